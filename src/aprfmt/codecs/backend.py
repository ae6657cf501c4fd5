"""Which implementation of a codec runs: numpy (the reference), ggml (libggml-base) or torch. All give equal bytes."""

from __future__ import annotations

import importlib.util
import os

from aprfmt.codecs import libggml
from aprfmt.errors import MissingDependencyError, UsageError

VARIABLE = "APR_BACKEND"
"""Environment variable that forces a backend."""

_NAMES = ("numpy", "ggml", "torch")


def forced() -> str | None:
    """The backend that the environment asks for, None where it leaves the choice. Raises UsageError if unknown."""
    name = os.environ.get(VARIABLE) or None
    if name is not None and name not in _NAMES:
        raise UsageError(f"{VARIABLE} is {name!r}", hint="one of " + ", ".join(_NAMES))
    return name


def order(*names: str) -> tuple[str, ...]:
    """Those of `names`, the backends that have code for something, that may be tried; in the given order.

    A forced backend leaves only itself, or numpy, the reference, for what it has no code for. Presence is not looked
    at unless a backend is forced: then its absence raises MissingDependencyError.
    """
    wanted = forced()
    if wanted is None:
        return names
    if wanted == "ggml" and not any(libggml.libraries()):
        raise MissingDependencyError(
            f"{VARIABLE}=ggml: {libggml.absence()}", hint="pip install libggml-python"
        )
    if wanted == "torch" and not has_torch():
        raise MissingDependencyError(f"{VARIABLE}=torch: torch is not installed", hint="pip install torch")
    return (wanted,) if wanted in names else tuple(name for name in names if name == "numpy")


def has_torch() -> bool:
    """Whether torch is installed; it is not imported."""
    try:
        return importlib.util.find_spec("torch") is not None
    except (ImportError, ValueError):
        return False
