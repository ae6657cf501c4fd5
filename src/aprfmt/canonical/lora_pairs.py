"""Adapters of any container in one form: for each changed weight, its two factors.

The names of the weights are Hugging Face names, or llama.cpp's where one tensor of a GGUF holds what are several of a
checkpoint; `canonical.lora` turns one into the other. Shapes are the same everywhere: A [rank, in], B [out, rank], with
the number of matrices before them where a weight is a stack of such. For an embedding `in` is the vocabulary, as if it
were a layer that reads one-hot rows; its weight is stored transposed then.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from aprfmt.arch.hyperparams import Hyperparams
from aprfmt.arch.names import canonical_name, embedding
from aprfmt.arch.row import Architecture
from aprfmt.canonical.tensor import CanonicalTensor
from aprfmt.formats import lora
from aprfmt.types import Shape

APR_KEY = "aprfmt.adapter"
"""APR metadata key with what lora_rank and lora_alpha do not say."""

GGUF_KEY = "aprfmt.adapter"
"""GGUF key with the config of the adapter that it was made from, a JSON object."""

INVOCATION = "alora_invocation_tokens"
"""Config key, and end of a GGUF key, of the tokens after which an activated LoRA counts."""

Blocks = Mapping[str, Sequence[tuple[str, int]]]
"""llama.cpp's name of a weight made of several with different A -> those, in order, with the rank of each."""


@dataclass(frozen=True, slots=True)
class Base:
    """The model that an adapter is for: its row of the architecture table and its hyper-parameters."""

    row: Architecture
    hparams: Hyperparams


@dataclass(frozen=True, slots=True)
class LoraPair:
    """What is added to the weight `weight`: scale * B A. `a` is [(n,) rank, in], `b` [(n,) out, rank]."""

    weight: str
    a: CanonicalTensor
    b: CanonicalTensor
    scale: float

    @property
    def rank(self) -> int:
        """Rows of A."""
        return self.a.shape[-2]

    @property
    def shape(self) -> Shape:
        """Of the product: [(n,) out, in]."""
        return (*self.b.shape[:-1], self.a.shape[-1])


@dataclass(frozen=True, slots=True, repr=False)
class Adapter:
    """An adapter. Its tensors are those of the pairs, then the whole ones.

    Attributes:
        pairs: by the name of the weight.
        whole: weights that are replaced by others (modules_to_save), by their name.
        rank, alpha: what the container says of most pairs; alpha / rank is their scale.
        base: name of the base model, as the adapter has it.
        config: adapter_config.json of the folder that it is, or was made from; {} without one.
        of: the base model, if known.
        blocks: what the weights of a GGUF were made of, as it tells.
    """

    pairs: Mapping[str, LoraPair]
    whole: Mapping[str, CanonicalTensor]
    rank: int
    alpha: float
    base: str | None = None
    config: Mapping[str, object] = field(default_factory=dict)
    of: Base | None = None
    blocks: Blocks = field(default_factory=dict)

    @property
    def tensors(self) -> dict[str, CanonicalTensor]:
        """All tensors, by the names that an `.apr` has them under."""
        found: dict[str, CanonicalTensor] = {}
        for weight, pair in self.pairs.items():
            found |= {weight + lora.A: pair.a, weight + lora.B: pair.b}
        return {**found, **self.whole}

    @property
    def invocation(self) -> list[int]:
        """The tokens after which an activated LoRA counts; [] for any other."""
        value = self.config.get(INVOCATION)
        return [token for token in value if type(token) is int] if isinstance(value, list) else []

    def to_metadata(self) -> dict[str, object]:
        """Metadata of an `.apr`."""
        scales = {p.weight: p.scale for p in self.pairs.values() if p.scale != self.alpha / p.rank}
        blocks = {weight: [list(part) for part in parts] for weight, parts in self.blocks.items()}
        more = {"base": self.base, "scales": scales, "config": self.config, "blocks": blocks}
        return {
            "lora_rank": self.rank,
            "lora_alpha": self.alpha,
            APR_KEY: {key: value for key, value in more.items() if value},
        }


_MLX_STACK = re.compile(r"(?:.*\.)?layers\.(\d+)\..*?\.?(?:switch_mlp|experts)\.(gate|up|down)_proj\.weight")


def stacked_name(weight: str) -> str:
    """llama.cpp's name of a stack of experts that MLX calls `weight`; `weight` itself for any other."""
    found = _MLX_STACK.fullmatch(weight)
    return f"blk.{found[1]}.ffn_{found[2]}_exps.weight" if found is not None else weight


def is_embedding(row: Architecture | None, weight: str) -> bool:
    """Whether the weight is the token embedding, whose lookup is a layer that reads one-hot rows."""
    if row is not None:
        return weight == "token_embd.weight" or canonical_name(row, weight) == embedding(row)
    last = weight.removesuffix(".weight").rpartition(".")[2]
    return last in ("embed_tokens", "wte", "word_embeddings", "embed_in", "tok_embeddings", "token_embd", "embeddings")
