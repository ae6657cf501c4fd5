"""Whether llama.cpp runs a GGUF: it loads, has the vocabulary that the embedding asks for, and computes numbers."""

from __future__ import annotations

import math
from typing import NotRequired, TypedDict

from aprfmt import formats
from aprfmt.errors import RunError
from aprfmt.llama.client import Llama
from aprfmt.llama.engine import POOLINGS
from aprfmt.types import PathLike

PROMPT = "The capital of France is"

_ENCODERS = ("gemma-embedding",)
"""Architectures whose attention llama.cpp knows to look both ways without a key that says so."""


class Verification(TypedDict):
    """What llama.cpp made of a file; decoders have `tokens` and `text`, encoders the vector of the prompt."""

    loaded: bool
    engine: str
    vocab_size: int
    embedding_rows: int | None
    tokens: NotRequired[list[int]]
    text: NotRequired[str]
    embedding_size: NotRequired[int]
    embedding_norm: NotRequired[float]


def encoder_pooling(path: PathLike) -> tuple[str | None, int]:
    """(how the model of a GGUF pools its embeddings, None for one that generates text; bytes of all its parts)."""
    with formats.open(path) as model:
        architecture = model.metadata.get("general.architecture")
        causal = model.metadata.get(f"{architecture}.attention.causal", True)
        pooling = model.metadata.get(f"{architecture}.pooling_type", 0)
        size = model.size_bytes
    if causal and architecture not in _ENCODERS:
        return None, size
    name = POOLINGS[pooling] if isinstance(pooling, int) and 0 <= pooling < len(POOLINGS) else "none"
    # Without pooling there is a vector for each token, with "rank" a score: both are asked for their mean.
    return (name if name in ("mean", "cls", "last") else "mean"), size


def verify_gguf(path: PathLike, embedding_rows: int | None, name: PathLike | None = None) -> Verification:
    """Loads `path`, which errors call `name`, and runs it: 16 tokens of text, or of an encoder one embedding.

    Raises MissingDependencyError without llama.cpp; RunError where it refuses the file, dies, has another number of
    tokens than `embedding_rows`, or computes what is not a number.
    """
    pooling, n_bytes = encoder_pooling(path)
    with Llama(path, pooling=pooling, name=name, n_bytes=n_bytes) as llama:
        if embedding_rows is not None and llama.n_vocab != embedding_rows:
            raise RunError(
                f"the vocabulary has {llama.n_vocab} tokens, the embedding {embedding_rows} rows",
                path=name or path,
            )
        found = Verification(loaded=True, engine="", vocab_size=llama.n_vocab, embedding_rows=embedding_rows)
        if pooling is None:
            generated = llama.generate(PROMPT)
            found |= {"tokens": generated.ids, "text": generated.text}
        else:
            vector = llama.embed(PROMPT)
            norm = math.hypot(*vector)
            if not norm:
                raise RunError("the model computes an embedding of zeros", path=name or path)
            found |= {"embedding_size": len(vector), "embedding_norm": norm}
        found["engine"] = llama.engine  # a worker that died was replaced meanwhile
        return found
