"""Tensors under one set of names: a source's tensors as Hugging Face's, those as a GGUF's, and back."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from aprfmt.arch import names
from aprfmt.arch.facts import has_layer
from aprfmt.arch.hyperparams import Hyperparams
from aprfmt.arch.links import Link, find_link, link_of
from aprfmt.arch.names import Match
from aprfmt.arch.row import Architecture
from aprfmt.canonical.packed import Packing
from aprfmt.canonical.rowmap import keeps_dtype
from aprfmt.canonical.tensor import CanonicalTensor, of_pieces, stored
from aprfmt.codecs.dtypes import DTYPES
from aprfmt.codecs.pieces import Piece
from aprfmt.errors import RefusedError, UnmappedError
from aprfmt.model import Model, Tensor


@dataclass(slots=True)
class NamedTensors:
    """The tensors of a model by Hugging Face name, and the names of those that are not carried."""

    tensors: dict[str, CanonicalTensor] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)


def name_tensors(
    model: Model, row: Architecture | None, h: Hyperparams, allow_unmapped: bool, packs: Packing
) -> NamedTensors:
    """The tensors of `model` in the source's order, under their own names without a `row`.

    Raises UnmappedError for a name that the family has not, RefusedError for two tensors of one name and for
    dimensions that contradict the tensors.
    """
    out = NamedTensors()
    if row is None:
        for tensor in model.tensors.entries:
            _add_one(out, tensor, None, packs, model)
        return out
    source = _Source(model, row, h)
    for tensor in model.tensors.entries:
        if names.is_left_out(row, h, tensor.name):
            out.left_out.append(tensor.name)
        elif source.hf_name(tensor) is not None or tensor.name in packs.parts:
            _add_one(out, tensor, row, packs, model)
        elif tensor.name in source.from_gguf:
            for item in source.linked(tensor):
                _add(out, item, model)
        elif allow_unmapped or _is_known(row, tensor.name):
            _add(out, stored(tensor.name, tensor), model)
        else:
            raise _unmapped(tensor, row, model)
    return out


class _Source:
    """The tensors of a source that stand under GGUF names, and what becomes of them."""

    def __init__(self, model: Model, row: Architecture, h: Hyperparams) -> None:
        self.model, self.row, self.h = model, row, h
        entries = [t for t in model.tensors.entries if not names.is_left_out(row, h, t.name)]
        self.from_gguf = {
            t.name: t for t in entries if self.hf_name(t) is None and names.matches(row, t.name, "gguf")
        }
        self._shapes = {name: t.shape for name, t in self.from_gguf.items()}
        self._done: set[str] = set()

    def hf_name(self, tensor: Tensor) -> str | None:
        """The table's Hugging Face name of a tensor that stands under such a name."""
        return None if self.model.convention == "gguf" else names.canonical_name(self.row, tensor.name)

    def linked(self, tensor: Tensor) -> Iterator[CanonicalTensor]:
        """The Hugging Face tensors of the link that `tensor` is part of, once a link."""
        if tensor.name not in self._done:
            found = names.matches(self.row, tensor.name, "gguf")
            link = link_of(self.h, _matching(found, tensor, self.h, self._shapes), self._shapes)
            self._done |= set(link.gguf)
            yield from _from_gguf(self.from_gguf, link)


def _add_one(
    out: NamedTensors, tensor: Tensor, row: Architecture | None, packs: Packing, model: Model
) -> None:
    """A tensor under its Hugging Face name; a piece of a packed weight as it is, or decoded for the first of them."""
    if tensor.name not in packs.parts:
        name = names.canonical_name(row, tensor.name) if row is not None else None
        _add(out, stored(name or tensor.name, tensor), model)
        return
    weight = packs.by_first_part.get(tensor.name)
    if not packs.decoded:
        _add(out, stored(tensor.name, tensor), model)
    elif weight is not None:
        name = (names.canonical_name(row, weight.name) if row is not None else None) or weight.name
        _add(out, CanonicalTensor(name, (weight,)), model)


def _add(out: NamedTensors, item: CanonicalTensor, model: Model) -> None:
    if item.name in out.tensors:
        raise RefusedError("two tensors of one name", path=model.path, tensor=item.name)
    out.tensors[item.name] = item


def _is_known(row: Architecture, name: str) -> bool:
    return name in row.gguf_only or names.ignorable(row, name)


def _unmapped(tensor: Tensor, row: Architecture, model: Model) -> UnmappedError:
    nearest = names.nearest(row, tensor.name, "gguf" if model.convention == "gguf" else "hf")
    return UnmappedError(
        f"the tensor has no name in architecture {row.id!r}; the nearest is {nearest!r}",
        path=model.path,
        tensor=tensor.name,
        hint="check --arch, or carry it under its own name with --allow-unmapped",
    )


def _from_gguf(tensors: Mapping[str, Tensor], link: Link) -> Iterator[CanonicalTensor]:
    """The Hugging Face tensors that the GGUF tensors of a link hold.

    Blocks that cannot come into Hugging Face order without being decoded keep the GGUF name.
    """
    absent = [name for name in link.gguf if name not in tensors]
    if absent:
        present = next(name for name in link.gguf if name in tensors)
        raise RefusedError(f"{absent[0]} is missing, which belongs to it", tensor=present)
    pieces = tuple(tensors[name] for name in link.gguf)
    if not keeps_dtype(pieces, link.row_map) and any(_is_quantized(p) for p in pieces):
        yield from (CanonicalTensor(p.name, (p,), link=link) for p in pieces)
        return
    for position, name in enumerate(link.hf):
        yield CanonicalTensor(name, pieces, link.row_map, position, inverse=True, link=link)


def _matching(found: list[Match], tensor: Tensor, h: Hyperparams, there: Collection[str]) -> Match:
    """The row for the tensor's layer, its dtype (packed rows take what they pack) and the tensors beside it."""
    return min(
        found,
        key=lambda m: (
            m.layer is not None and not has_layer(m.row.layers, h, m.layer),
            bool(m.row.pack) != (tensor.dtype == "MXFP4"),
            any(names.spell(name, m.layer) not in there for name in m.row.gguf),
        ),
    )


def _is_quantized(piece: Piece) -> bool:
    return DTYPES[piece.dtype].kind != "plain"


def _walk(
    row: Architecture, h: Hyperparams, tensors: Mapping[str, CanonicalTensor]
) -> Iterator[tuple[str, Link | None]]:
    """The tensors with a place in a GGUF, in the network's order: the first name of each link, or a name without."""
    shapes = {name: t.shape for name, t in tensors.items()}
    done: set[str] = set()
    for name in sorted(tensors, key=lambda n: names.order(row, n)):
        if name in done or names.ignorable(row, name) or names.is_hf_only(row, name):
            continue
        link = tensors[name].link or find_link(row, h, name, shapes, "hf")
        if link is not None and name in link.hf:
            done |= set(link.hf)
            yield name, link
        else:
            yield name, None


def links(row: Architecture, h: Hyperparams, tensors: Mapping[str, CanonicalTensor]) -> list[Link]:
    """Every link that the Hugging Face `tensors` go through on their way to a GGUF."""
    return [link for _, link in _walk(row, h, tensors) if link is not None]


def gguf_side(
    row: Architecture, h: Hyperparams, tensors: Mapping[str, CanonicalTensor]
) -> list[CanonicalTensor]:
    """The tensors of a GGUF for the Hugging Face `tensors`, in the network's order; unknown names stay.

    Raises RefusedError where a tensor's partners are missing or the hyper-parameters contradict the shapes.
    """
    out: list[CanonicalTensor] = []
    for name, link in _walk(row, h, tensors):
        out += [tensors[name]] if link is None else _gguf_of(link, tensors)
    head, embedding = names.head(row), tensors.get(names.embedding(row))
    if row.head_never and head in tensors:
        raise RefusedError(
            f"llama.cpp's {row.gguf} network has no output head of its own, this one is not the embedding",
            tensor=head,
        )
    if row.head_always and head not in tensors and embedding is not None:
        out.append(CanonicalTensor("output.weight", embedding.pieces, embedding.row_map))
    _check_once(out)
    return out


def _check_once(tensors: Iterable[CanonicalTensor]) -> None:
    found: dict[str, CanonicalTensor] = {}
    for tensor in tensors:
        first = found.setdefault(tensor.name, tensor)
        if first is not tensor:
            raise RefusedError(
                f"the network has it twice, of {first.pieces[0].name} and of {tensor.pieces[0].name}",
                tensor=tensor.name,
                hint="the checkpoint holds the same weights in two spellings; take one of them away",
            )


def _gguf_of(link: Link, tensors: Mapping[str, CanonicalTensor]) -> Iterator[CanonicalTensor]:
    absent = [name for name in link.hf if name not in tensors]
    if absent:
        raise RefusedError(
            f"{absent[0]} is missing, which belongs to it", tensor=next(n for n in link.hf if n in tensors)
        )
    parts = [tensors[name] for name in link.hf]
    if all(part.link is link and part.inverse for part in parts):  # it came so
        yield from (
            CanonicalTensor(name, (piece,)) for name, piece in zip(link.gguf, parts[0].pieces, strict=True)
        )
        return
    pieces = [part.piece() for part in parts]
    for position, name in enumerate(link.gguf):
        if link.row_map.is_plain:
            yield CanonicalTensor(
                name, parts[0].pieces, parts[0].row_map, parts[0].position, parts[0].inverse
            )
        else:
            yield of_pieces(name, pieces, link.row_map, position)


def hf_side(row: Architecture | None, tensors: Mapping[str, CanonicalTensor]) -> list[CanonicalTensor]:
    """The tensors of a Hugging Face checkpoint: those under GGUF names decoded and brought into order."""
    if row is None:
        return list(tensors.values())
    out: list[CanonicalTensor] = []
    done: set[str] = set()
    for name, tensor in tensors.items():
        if name in row.gguf_only or name in done:
            continue  # derived from config.json's rope settings by every Hugging Face reader
        if tensor.link is None or name in tensor.link.hf:
            out.append(tensor)
            continue
        done |= set(tensor.link.gguf)
        out += _decoded(tensor.link, tensors)
    return sorted(out, key=lambda t: names.order(row, t.name))


def _decoded(link: Link, tensors: Mapping[str, CanonicalTensor]) -> Iterable[CanonicalTensor]:
    pieces = tuple(tensors[name].pieces[0] for name in link.gguf)
    return [
        CanonicalTensor(name, pieces, link.row_map, position, inverse=True)
        for position, name in enumerate(link.hf)
    ]
