"""Requests to a llama.cpp process: the packages that provide the library, and the load and sampling parameters."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypedDict

ENGINES = {"xllamacpp": "xllamacpp", "llama_cpp": "llama-cpp-python"}
"""Package that provides the library -> its name on PyPI; the first that works is used."""

POOLINGS = ("none", "mean", "cls", "last", "rank")
"""Pooling type of an encoder -> llama.cpp's enum value."""


BATCH = 2048
"""Tokens that a context computes at once, if it has so many."""

MOMENT_COLUMNS = 1024
"""Columns of a block of second moments."""

MEDIA_MARKER = "<__media__>"
"""Marks the position of an image or audio in a prompt."""


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """A model to load.

    Attributes:
        path: a GGUF, or the first of its parts.
        n_ctx: context length in tokens, prompt and answer together; 0: the training context length.
        pooling: one of POOLINGS for embeddings; None for text generation.
        extra_buffers: whether llama.cpp may repack weights for instructions such as AMX.
        n_threads: compute threads; 0: half of the processors, since waiting threads spin.
        gpu_layers: layers to offload to a GPU, if the build supports it.
        adapters: (path of a LoRA GGUF, scale).
        tower: GGUF of the vision or audio tower.
        watched: whether weights are inspected and reordered in memory, which needs private memory.
        exact: use an F32 KV cache and no flash attention, for comparisons.
        n_seq: sequences per batch.
        importance: what an importance matrix covers: "layers", or "output" for the output head too.
        moments: with `importance`, an empty folder for the second moments of the inputs.
    """

    path: str
    n_ctx: int
    pooling: str | None
    extra_buffers: bool
    n_threads: int = 0
    gpu_layers: int = 0
    adapters: list[tuple[str, float]] = field(default_factory=list)
    importance: str | None = None
    moments: str | None = None
    tower: str | None = None
    watched: bool = False
    exact: bool = False
    n_seq: int = 1


class StateSketch(TypedDict):
    """Hidden states of a layer in little room, see `watch.sketch`; JSON data."""

    digest: str
    probes: list[list[float]]


class LayerEffects(TypedDict):
    """How far each layer moves the hidden states, and the names of the weights in use; JSON data."""

    effects: list[float | None]
    weights: list[str]


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters; without a temperature the most likely token is taken.

    Attributes:
        temperature: divides the logits; 0: greedy.
        top_k: keep the k most likely tokens; 0: all.
        top_p: keep the most likely tokens up to this total probability; 1: all.
        min_p: keep tokens with at least this fraction of the highest probability; 0: all.
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
    """A text does not fit the context."""


class LayoutError(EngineError):
    """The layout of llama.cpp's structures is unknown in this build."""
