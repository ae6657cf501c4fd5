"""An opened model under one set of names: Hugging Face tensor names and row order, one hyper-parameter set."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from aprfmt.arch import names
from aprfmt.arch.extra_tensors import ExtraTensors, parts
from aprfmt.arch.hyperparams import Hyperparams
from aprfmt.arch.row import Architecture
from aprfmt.canonical.lora_pairs import Adapter
from aprfmt.canonical.packed import Packing
from aprfmt.canonical.sidecar import Sidecar
from aprfmt.canonical.tensor import CanonicalTensor
from aprfmt.canonical.tower import TowerPart
from aprfmt.codecs.dtypes import n_elements
from aprfmt.model import Model
from aprfmt.text import plural
from aprfmt.tokenizer.model import Tokenizer


@dataclass(frozen=True, slots=True, repr=False)
class Canonical:
    """A model ready to be written in any container. Immutable: edit it with `dataclasses.replace`.

    Attributes:
        model: the opened model.
        arch: its row of the architecture table; None if no row matches (names are then the source's own).
        hparams: a copy of the model's, completed from its tensors.
        tokenizer: the model's, or the user's.
        info: descriptive fields under APR's typed names: name, description, author, license, ...
        tensors: the network's by Hugging Face name, in the source's order, without a head that equals the embedding.
        extras: the source's extra tensors (see arch.extra_tensors), under their own names; MTP layers that the row
            names are numbered as further layers.
        part: what the source contains if it is not a network ("an adapter"); "" for a network.
        dropped: omitted tensors of the source by name, with the name of the tensor that has the same bytes.
        warnings: about the source; targets collect theirs in Losses.
        general: descriptive facts without a typed name, see provenance; None if the source has none.
        stated: typed fields that the user gave.
        sidecar: the sidecar metadata of a GGUF that was made from an `.apr`.
        files: other files of the source's folder, by path, as byte tensors with their names in an `.apr`.
        left_out: files of the source's folder that are not carried, and why, one sentence each.
        packs: quantized weights of the source.
        is_whole: whether none of the source's tensors was left out on request.
        adapter: the adapter, if the source is one; its tensors are then the `extras`.
        tower: the towers from a separate GGUF; their tensors are among the `extras`, by checkpoint names. None without
            towers, or if the source's own config.json describes them.
        layers: if the layers differ from the source's (see select_layers): the index of each there, None for a layer of
            another model.
    """

    model: Model
    arch: Architecture | None
    hparams: Hyperparams
    tokenizer: Tokenizer | None
    info: dict[str, str]
    tensors: dict[str, CanonicalTensor]
    dropped: dict[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    general: dict[str, object] | None = None
    stated: dict[str, str] = field(default_factory=dict)
    sidecar: Sidecar | None = None
    files: dict[str, CanonicalTensor] = field(default_factory=dict)
    left_out: Sequence[str] = ()
    extras: dict[str, CanonicalTensor] = field(default_factory=dict)
    part: str = ""
    packs: Packing = field(default_factory=Packing)
    is_whole: bool = True
    adapter: Adapter | None = None
    tower: TowerPart | None = None
    layers: Sequence[int | None] | None = None

    def __repr__(self) -> str:
        arch = self.arch.id if self.arch is not None else None
        return f"Canonical({str(self.model.path)!r}, {arch}, {plural(len(self.tensors), 'tensor')})"

    @property
    def embedding(self) -> str:
        """Name of the token embedding."""
        return names.embedding(self.arch)

    @property
    def head(self) -> str:
        """Name of the output head."""
        return names.head(self.arch)

    @property
    def all_tensors(self) -> dict[str, CanonicalTensor]:
        """The tensors of the network, then the extra tensors."""
        return {**self.tensors, **self.extras}

    @property
    def stored(self) -> dict[str, CanonicalTensor]:
        """Everything that an `.apr` stores as tensors: all tensors, and the files."""
        return {**self.all_tensors, **{file.name: file for file in self.files.values()}}

    @property
    def n_params(self) -> int:
        """Number of elements of all tensors; of quantized ones, of their values."""
        return count_elements(self.all_tensors.values(), self.packs)

    def extra_parts(self) -> list[ExtraTensors]:
        """The parts of the model that the extra tensors belong to, by checkpoint names."""
        own = self.model.convention == "hf"
        sizes = {t.sources[0].name if own else t.name: t.n_bytes for t in self.extras.values()}
        return parts(self.arch, sizes, self.hparams.hf_architecture)


def count_elements(tensors: Collection[CanonicalTensor], packs: Packing) -> int:
    """Number of elements of the tensors; of quantized ones, of their values."""
    if packs.decoded:
        return sum(n_elements(t.shape) for t in tensors)
    stored = {t.sources[0].name for t in tensors} & packs.parts
    own = (t.shape for t in tensors if t.sources[0].name not in stored)
    return sum(map(n_elements, (*own, *(weight.shape for weight in packs.weights if weight.sources[0].name in stored))))


def embedding_rows(c: Canonical) -> int | None:
    """Rows of the token embedding, the required length of the token list; vocab_size without an embedding."""
    tensor = c.tensors.get(c.embedding)
    return tensor.shape[0] if tensor is not None else c.hparams.vocab_size


def from_gguf(c: Canonical) -> bool:
    """Whether the model is a GGUF or was imported from one; extra tensors then have GGUF names."""
    return c.model.convention == "gguf" or (
        c.model.convention == "apr" and c.model.metadata.get("original_format") == ORIGINAL_FORMATS["gguf"]
    )


# Convention of the source -> APR's `original_format`.
ORIGINAL_FORMATS = {"gguf": "gguf", "hf": "safetensors"}
