"""What a Python binding of llama.cpp must do for the worker, and the table of those that can."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

ENGINES = {
    "xllamacpp": ("xllamacpp", "aprfmt.llama.engine_xllamacpp"),
    "llama_cpp": ("llama-cpp-python", "aprfmt.llama.engine_llama_cpp"),
}
"""Package -> (name on PyPI, module with LoadedModel, a Model made of a LoadRequest); the first that works is used."""

POOLINGS = ("none", "mean", "cls", "last", "rank")
"""How an encoder makes one vector of a text, by llama.cpp's number."""


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """A model to load.

    Attributes:
        path: a GGUF, or the first of its parts.
        n_ctx: tokens of the context, prompt and answer together.
        pooling: one of POOLINGS for a model that is asked for embeddings; None for one that generates text.
        extra_buffers: whether llama.cpp may repack weights for instructions such as AMX.
    """

    path: str
    n_ctx: int
    pooling: str | None
    extra_buffers: bool


class EngineError(Exception):
    """llama.cpp refuses a model or a request."""


class Model(Protocol):
    """A loaded model. The methods raise EngineError."""

    @property
    def n_vocab(self) -> int:
        """Tokens in its vocabulary."""

    def generate(self, prompt: str, n_tokens: int) -> tuple[list[int], str]:
        """The most likely continuation: at most `n_tokens` ids, an end token included, and their text.

        Raises EngineError where the model computes NaN or infinite logits.
        """

    def embed(self, text: str) -> list[float]:
        """The vector of a text."""


def require_finite(values: Iterable[float | None], what: str) -> None:
    """Raises EngineError where one of `values` is NaN, infinite or null, as JSON writes NaN."""
    if not all(value is not None and math.isfinite(value) for value in values):
        raise EngineError(f"the model computes NaN or infinite {what}")
