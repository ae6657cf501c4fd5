"""Rates the experts of a model on texts, by the trainer's decoder in a process of its own (`aprtrain.rating`)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from aprfmt.arch.fields import as_float, as_int, as_text
from aprfmt.canonical.model import Canonical
from aprfmt.convert.torch_child import ask_torch
from aprfmt.errors import MissingDependencyError, error_class


def rate_experts(c: Canonical, texts: Sequence[Path]) -> tuple[list[list[float]], int]:
    """The saliency of the experts of each layer, [] for a dense layer, and the number of tokens it is computed on.

    Raises what the trainer raises for the model and the texts; MissingDependencyError without torch, OutOfMemoryError,
    RunError.
    """
    path = str(c.model.path)
    request = {"path": os.path.abspath(path) if os.path.exists(path) else path, "texts": [*map(os.path.abspath, texts)]}
    n_bytes = sum(tensor.n_bytes for tensor in c.model.tensors.values())
    hint = "a GGUF of Q4_K or Q8_0 stays quantized"
    answer = ask_torch("aprtrain.rating", request, "rates the experts", path=path, n_bytes=n_bytes, hint=hint)
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
