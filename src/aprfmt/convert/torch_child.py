"""Asks a module of the trainer that imports torch, in a process of its own: memory that runs out ends only that."""

from __future__ import annotations

from aprfmt.errors import OutOfMemoryError, RunError
from aprfmt.io.child import Child, ChildDiedError, last_line
from aprfmt.llama.client import TIMEOUT_VARIABLE, time_limit
from aprfmt.types import JsonObject

_SLOWER = 5
"""Time limit of an answer, which includes the start of torch, in multiples of llama.cpp's for a request."""


def ask_torch(module: str, request: object, task: str, *, path: str, n_bytes: int, hint: str = "") -> JsonObject:
    """The answer of `python -m MODULE` to one request.

    Args:
        module: of aprtrain.
        request: what it is asked.
        task: what it does, for errors: "computes the logits".
        path: the model's name, for errors.
        n_bytes: size of the model.
        hint: what needs less memory, beside what float32 weights take.

    Raises:
        OutOfMemoryError: the process died.
        RunError: it took too long.
    """
    child = Child(["-m", module])
    try:
        return child.ask(request, _SLOWER * time_limit(n_bytes))
    except ChildDiedError as death:
        text = f"the process that {task} {death}: {last_line(death.log)}"
        if death.late:
            raise RunError(text, path=path, hint=f"set {TIMEOUT_VARIABLE}=SECONDS to allow more time") from None
        needs = "float32 weights take 4 bytes of memory per parameter"
        raise OutOfMemoryError(text, path=path, hint=f"{needs}; {hint}" if hint else needs) from None
    finally:
        child.close()
