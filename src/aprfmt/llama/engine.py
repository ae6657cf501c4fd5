"""What a process that runs llama.cpp is asked for: the packages that bring the library, and the words of a request."""

from __future__ import annotations

from dataclasses import dataclass, field

ENGINES = {"xllamacpp": "xllamacpp", "llama_cpp": "llama-cpp-python"}
"""Package that holds the library -> its name on PyPI; the first that works is used."""

POOLINGS = ("none", "mean", "cls", "last", "rank")
"""How an encoder makes one vector of a text, by llama.cpp's number."""


MEDIA_MARKER = "<__media__>"
"""Stands in a prompt for a picture or a sound."""


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """A model to load.

    Attributes:
        path: a GGUF, or the first of its parts.
        n_ctx: tokens of the context, prompt and answer together; 0: those that the model was trained with.
        pooling: one of POOLINGS for a model that is asked for embeddings; None for one that generates text.
        extra_buffers: whether llama.cpp may repack weights for instructions such as AMX.
        n_threads: threads that compute; 0: half of the processors, since one that waits does so in a busy loop.
        gpu_layers: layers computed on a GPU, by a build of llama.cpp that can.
        adapters: (path of a LoRA GGUF, scale).
        tower: GGUF of what sees or hears beside the model.
        watched: whether weights are looked at and reordered in memory, which takes memory of the process's own.
        exact: whether the KV cache is F32 and attention is computed step by step, for comparisons.
        n_seq: texts that are computed in one batch.
        importance: what an importance matrix is made of: "layers", or "output" for the output head too.
    """

    path: str
    n_ctx: int
    pooling: str | None
    extra_buffers: bool
    n_threads: int = 0
    gpu_layers: int = 0
    adapters: list[tuple[str, float]] = field(default_factory=list)
    importance: str | None = None
    tower: str | None = None
    watched: bool = False
    exact: bool = False
    n_seq: int = 1


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is drawn; without a temperature it is the most likely one.

    Attributes:
        temperature: divides the logits; 0 takes the most likely token.
        top_k: only the k most likely tokens; 0: all.
        top_p: only the most likely tokens that have this probability together; 1: all.
        min_p: only tokens with at least this share of the most likely one's probability; 0: all.
        seed: the same seed draws the same tokens.
    """

    temperature: float = 0.0
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    seed: int = 0


class EngineError(Exception):
    """llama.cpp refuses a model or a request."""


class RoomError(EngineError):
    """A text has more tokens than the context has room for."""


class LayoutError(EngineError):
    """A build of llama.cpp whose structures are laid out in a way that is not known."""
