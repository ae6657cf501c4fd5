"""Names the tensors of an opened model as its Hugging Face checkpoint does."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from aprfmt.arch import mlx, names
from aprfmt.arch.extra_tensors import names_drafts
from aprfmt.arch.grammar import has_layer, is_unwanted
from aprfmt.arch.hyperparams import Hyperparams
from aprfmt.arch.links import Link, link_of
from aprfmt.arch.names import Match
from aprfmt.arch.row import Architecture
from aprfmt.canonical.detection import find_part
from aprfmt.canonical.model_kinds import ADAPTER
from aprfmt.canonical.packed import AS_STORED, Decoding, PackedTensor, Packing
from aprfmt.canonical.row_mapping import keeps_dtype
from aprfmt.canonical.tensor import CanonicalTensor, is_copy
from aprfmt.canonical.tensor_scales import scaled_weights
from aprfmt.codecs.dtypes import DTYPES
from aprfmt.codecs.stream import TensorSource
from aprfmt.errors import RefusedError, UnmappedError
from aprfmt.model import Model, Tensor


def name_tensors(
    model: Model,
    row: Architecture | None,
    h: Hyperparams,
    allow_unmapped: bool,
    packs: Packing,
    extra_names: Collection[str],
    decoding: Decoding = AS_STORED,
) -> tuple[dict[str, CanonicalTensor], dict[str, CanonicalTensor], dict[str, str]]:
    """The network's tensors in the order of `model`, by Hugging Face name (their own without a `row`); the extra
    tensors, those in `extra_names`; and source tensors that duplicate the bytes of another one, with its name.

    Raises UnmappedError for a name that the family does not have, RefusedError for two tensors of one name and for
    dimensions that contradict the tensors.
    """
    if row is None and find_part(model, row) == ADAPTER:
        extra_names = {*model.tensors}
    extra_names = {*extra_names, *(weight.name for weight in packs.weights if weight.sources[0].name in extra_names)}
    tensors: dict[str, CanonicalTensor] = {}
    others: dict[str, CanonicalTensor] = {}
    copies: dict[str, str] = {}
    naming = _Naming(model, row, h, packs, extra_names, allow_unmapped)
    for tensor in naming.named(scaled_weights(model, decoding, naming.may_be_scale)):
        found = others if tensor.name in extra_names or tensor.sources[0].name in extra_names else tensors
        first = found.setdefault(tensor.name, tensor)
        if first is tensor:
            continue
        if not is_copy(tensor, first):
            raise RefusedError("two tensors have this name", path=model.path, tensor=tensor.name)
        copies[tensor.sources[0].name] = tensor.name
    return tensors, others, copies


@dataclass(frozen=True, slots=True)
class _Naming:
    """Determines the Hugging Face names of stored tensors.

    Attributes:
        model: the model.
        row: its architecture; None: tensors keep their names.
        h: its dimensions.
        packs: its quantized weights.
        extra_names: names of the extra tensors.
        allow_unmapped: unknown tensors keep their names.
    """

    model: Model
    row: Architecture | None
    h: Hyperparams
    packs: Packing
    extra_names: Collection[str]
    allow_unmapped: bool

    @property
    def convention(self) -> Literal["gguf", "hf"]:
        """The naming convention of the model."""
        return "gguf" if self.model.convention == "gguf" else "hf"

    def may_be_scale(self, name: str) -> bool:
        """Whether a tensor of this name may be the scale of a weight, and not a tensor of the family."""
        return self.row is None or not names.matches(self.row, name, self.convention)

    def named(self, entries: Sequence[Tensor | PackedTensor]) -> Iterator[CanonicalTensor]:
        """The tensors by their new names, in order. Raises UnmappedError for unknown ones."""
        row, h, packs = self.row, self.h, self.packs
        # An `.apr` may have tensors under GGUF names too: blocks that could not be reordered.
        decoded = packs.parts if packs.decoded else frozenset()
        found = {t.name: self._hf_name(t.name) for t in entries if t.name not in decoded}
        from_gguf = {t.name: t for t in entries if found.get(t.name, "") is None and self._is_linked(t.name)}
        shapes = {name: t.shape for name, t in from_gguf.items()}
        done: set[str] = set()
        for tensor in entries:
            name = found.get(tensor.name)
            if tensor.name in decoded:
                # The weight replaces the first of its parts.
                if (weight := packs.by_first_part.get(tensor.name)) is not None:
                    yield from _decoded(row, h, weight, self._hf_name(weight.name))
            elif row is None or tensor.name in packs.parts:
                yield CanonicalTensor(tensor.name, (tensor,))
            elif name is not None:
                yield CanonicalTensor(name, (tensor,))
            elif tensor.name in from_gguf:
                if tensor.name not in done:  # a link replaces the first of its tensors
                    matches = names.in_stacks(names.matches(row, tensor.name, "gguf"), h)
                    link = link_of(h, _matching(row, matches, tensor, h, shapes), shapes)
                    done |= set(link.gguf)
                    yield from _from_gguf(from_gguf, link)
            elif self._keeps_name(row, tensor):
                yield CanonicalTensor(tensor.name, (tensor,))
            else:
                nearest = names.nearest(row, tensor.name, self.convention)
                raise UnmappedError(
                    f"unknown tensor for architecture {row.id!r}; the closest name is {nearest!r}",
                    path=self.model.path,
                    tensor=tensor.name,
                    hint="check --arch, or keep the name with --allow-unmapped",
                )

    def _hf_name(self, name: str) -> str | None:
        """The Hugging Face name of a checkpoint tensor; None if it has none, or comes through a link."""
        if self.row is None or self.convention == "gguf":
            return None
        if name in self.extra_names:
            return names.draft_name(self.row, self.h, name) if names_drafts(self.row) else None
        return names.canonical_name(self.row, name)

    def _is_linked(self, name: str) -> bool:
        """Whether a tensor without a Hugging Face name is a GGUF tensor that a link maps."""
        row = self.row
        if row is None or names.is_gguf_only(row, name) or not names.matches(row, name, "gguf"):
            return False
        return name not in self.extra_names or (names_drafts(row) and not names.matches(row, name))

    def _keeps_name(self, row: Architecture, tensor: TensorSource) -> bool:
        """Whether a tensor that the architecture does not map keeps its name."""
        return (
            self.allow_unmapped
            or tensor.name in self.extra_names
            or names.is_gguf_only(row, tensor.name)
            or names.ignorable(row, tensor.name)
            or mlx.link_from(row, self.h, tensor.name, {tensor.name: tensor.shape}) is not None
        )


def names_from_mlx(
    row: Architecture | None, h: Hyperparams, tensors: dict[str, CanonicalTensor]
) -> dict[str, CanonicalTensor]:
    """The tensors under the names and in the shapes of a checkpoint, including those that mlx_lm changes."""
    if row is None or mlx.network_of(row) is None:
        return tensors
    shapes = {name: t.shape for name, t in tensors.items()}
    links = {name: mlx.link_from(row, h, name, shapes) for name in tensors}
    mappings = {name: mlx.reshaped(row, h, name, shape, back=True) for name, shape in shapes.items()}
    if not any(links.values()) and not any(mappings.values()):
        return tensors
    out: dict[str, CanonicalTensor] = {}
    for name, tensor in tensors.items():
        link, mapping = links[name] or mlx.values_from(row, h, name, shapes), mappings[name]
        if link is not None and name == link.gguf[0]:
            check_whole(link.gguf, tensors)
            sources = tuple(tensors[part].sources[0] for part in link.gguf)
            out |= {
                made: CanonicalTensor(made, sources, link.mapping, position, inverse=True)
                for position, made in enumerate(link.hf)
            }
        elif mapping is not None:
            out[name] = CanonicalTensor(name, tensor.sources, mapping)
        elif link is None:
            out[name] = tensor
    return out


def _decoded(row: Architecture | None, h: Hyperparams, weight: PackedTensor, name: str | None) -> list[CanonicalTensor]:
    """A dequantized weight under its Hugging Face name, in that row order if it came from a GGUF."""
    found = names.matches(row, weight.name, "gguf") if row is not None and name is None else []
    if not found:
        return [CanonicalTensor(name or weight.name, (weight,))]
    return to_hf(link_of(h, found[0], {weight.name: weight.shape}), (weight,))


def check_whole(link_names: Sequence[str], there: Collection[str]) -> None:
    """Raises RefusedError if only some of the tensors of a link are present."""
    absent = [name for name in link_names if name not in there]
    if absent:
        present = next(name for name in link_names if name in there)
        raise RefusedError(f"{absent[0]} is missing, and this tensor needs it", tensor=present)


def to_hf(link: Link, sources: tuple[TensorSource, ...]) -> list[CanonicalTensor]:
    """The Hugging Face tensors of a link, made from those of the GGUF."""
    return [
        CanonicalTensor(name, sources, link.mapping, position, inverse=True, link=link)
        for position, name in enumerate(link.hf)
    ]


def _from_gguf(tensors: Mapping[str, Tensor | PackedTensor], link: Link) -> list[CanonicalTensor]:
    """The Hugging Face tensors in the GGUF tensors of a link.

    Blocks that cannot be reordered without dequantization keep the GGUF name.
    """
    check_whole(link.gguf, tensors)
    sources = tuple(tensors[name] for name in link.gguf)
    if not keeps_dtype(sources, link.mapping) and any(DTYPES[p.dtype].kind != "plain" for p in sources):
        return [CanonicalTensor(p.name, (p,), link=link) for p in sources]
    return to_hf(link, sources)


def _matching(
    arch: Architecture, found: list[Match], tensor: TensorSource, h: Hyperparams, there: Collection[str]
) -> Match:
    """The entry for the tensor's layer, dtype (quantized rows count as what they pack), neighbours and config."""
    return min(
        found,
        key=lambda m: (
            m.layer is not None and not has_layer(m.row.layers, h, m.layer),
            bool(m.row.pack) != (tensor.dtype == "MXFP4"),
            any(name not in there for name in names.gguf_names(m.row, m.layer, h)),
            is_unwanted(arch, m.row.need, h),
        ),
    )
