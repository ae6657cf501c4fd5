"""Adapters of any container in one form: two factors for each changed weight.

Weights have Hugging Face names, or llama.cpp names where one GGUF tensor combines several of a checkpoint;
`canonical.lora` converts between them. Shapes are the same everywhere: A [rank, in], B [out, rank], preceded by the
number of matrices for a stack. For an embedding `in` is the vocabulary, as if it were a layer that reads one-hot rows;
its weight is then stored transposed.
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
"""APR metadata key for what lora_rank and lora_alpha do not cover."""

GGUF_KEY = "aprfmt.adapter"
"""GGUF key with the config of the adapter's source, a JSON object."""

INVOCATION = "alora_invocation_tokens"
"""Config key, and suffix of a GGUF key, of the tokens that activate an aLoRA."""

Blocks = Mapping[str, Sequence[tuple[str, int]]]
"""llama.cpp name of a weight combined from several with different A -> those, in order, with the rank of each."""


@dataclass(frozen=True, slots=True)
class Base:
    """The base model of an adapter: its architecture row and hyper-parameters."""

    row: Architecture
    hparams: Hyperparams


@dataclass(frozen=True, slots=True)
class LoraPair:
    """The update of the weight `weight`: scale * B A. `a` is [(n,) rank, in], `b` [(n,) out, rank]."""

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
    """An adapter. Its tensors are those of the pairs, followed by the whole weights.

    Attributes:
        pairs: by the name of the weight.
        whole: replaced weights (modules_to_save), by name.
        rank, alpha: of most pairs, from the container; alpha / rank is their scale.
        base: name of the base model, as stored in the adapter.
        config: adapter_config.json of the folder, or of the adapter's source; {} without one.
        of: the base model, if known.
        blocks: the parts of combined weights of a GGUF, as stored in it.
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
        """All tensors, by their names in an `.apr`."""
        found: dict[str, CanonicalTensor] = {}
        for weight, pair in self.pairs.items():
            found |= {weight + lora.A: pair.a, weight + lora.B: pair.b}
        return {**found, **self.whole}

    @property
    def invocation(self) -> list[int]:
        """The tokens that activate an aLoRA; [] for other adapters."""
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
    """llama.cpp's name of an expert stack that MLX calls `weight`; `weight` itself for any other."""
    found = _MLX_STACK.fullmatch(weight)
    return f"blk.{found[1]}.ffn_{found[2]}_exps.weight" if found is not None else weight


def is_embedding(row: Architecture | None, weight: str) -> bool:
    """Whether the weight is the token embedding, whose lookup is a layer that reads one-hot rows."""
    if row is not None:
        return weight == "token_embd.weight" or canonical_name(row, weight) == embedding(row)
    last = weight.removesuffix(".weight").rpartition(".")[2]
    return last in ("embed_tokens", "wte", "word_embeddings", "embed_in", "tok_embeddings", "token_embd", "embeddings")
