"""Rates the experts of a model on texts, by the trainer's decoder in a process of its own (`aprtrain.rating`)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from aprfmt.arch.fields import as_float, as_int, as_text
from aprfmt.canonical.model import Canonical
from aprfmt.errors import MissingDependencyError, OutOfMemoryError, RunError, error_class
from aprfmt.io.child import Child, ChildDiedError, last_line
from aprfmt.llama.client import TIMEOUT_VARIABLE, time_limit

_SLOWER = 5
"""Time limit of a batch, torch's start and the reading of texts included, in multiples of llama.cpp's for a request."""


def rate_experts(c: Canonical, texts: Sequence[Path]) -> tuple[list[list[float]], int]:
    """The saliency of the experts of each layer, [] for a dense layer, and the number of tokens it is computed on.

    Raises what the trainer raises for the model and the texts; MissingDependencyError without torch, OutOfMemoryError,
    RunError.
    """
    path = str(c.model.path)
    request = {"path": os.path.abspath(path) if os.path.exists(path) else path, "texts": [*map(os.path.abspath, texts)]}
    child = Child(["-m", "aprtrain.rating"])
    try:
        answer = child.ask(request, _SLOWER * time_limit(sum(tensor.n_bytes for tensor in c.model.tensors.values())))
    except ChildDiedError as death:
        text = f"the process that rates the experts {death}: {last_line(death.log)}"
        if death.late:
            raise RunError(text, path=path, hint=f"set {TIMEOUT_VARIABLE}=SECONDS to allow more time") from None
        hint = "float32 weights take 4 bytes of memory per parameter; a GGUF of Q4_K or Q8_0 stays quantized"
        raise OutOfMemoryError(text, path=path, hint=hint) from None
    finally:
        child.close()
    if "missing" in answer:
        raise MissingDependencyError(f"--experts runs the model: {answer['missing']}", hint="pip install torch")
    if isinstance(error := answer.get("error"), list):
        name, message, hint_of_it = map(as_text, error)
        where, tensor = as_text(answer.get("path")), as_text(answer.get("tensor"))
        raise error_class(name or "AprError")(message or "", path=where, tensor=tensor, hint=hint_of_it)
    layers = answer["saliency"]
    assert isinstance(layers, list)
    saliency = [[as_float(value, "saliency") or 0.0 for value in of] for of in layers if isinstance(of, list)]
    return saliency, as_int(answer["tokens"], "tokens") or 0
