"""Tensors under one set of names: a source's tensors as Hugging Face's, those as a GGUF's, and back."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from aprfmt.arch import names
from aprfmt.arch.facts import has_layer
from aprfmt.arch.hyperparams import Hyperparams
from aprfmt.arch.links import Link, find_link, link_of
from aprfmt.arch.names import Match
from aprfmt.arch.row import Architecture
from aprfmt.canonical.packed import Packing
from aprfmt.canonical.rowmap import keeps_dtype
from aprfmt.canonical.tensor import CanonicalTensor
from aprfmt.codecs.dtypes import DTYPES
from aprfmt.codecs.pieces import Piece
from aprfmt.errors import RefusedError, UnmappedError
from aprfmt.model import Model, Tensor


def name_tensors(
    model: Model, row: Architecture | None, h: Hyperparams, allow_unmapped: bool, packs: Packing
) -> tuple[dict[str, CanonicalTensor], list[str]]:
    """The tensors of `model` in its order, by Hugging Face name (their own without a `row`); those not carried.

    Raises UnmappedError for a name that the family does not have, RefusedError for two tensors of one name and for
    dimensions that contradict the tensors.
    """
    entries = model.tensors.entries
    left_out = [t.name for t in entries if row is not None and names.is_left_out(row, h, t.name)]
    tensors: dict[str, CanonicalTensor] = {}
    for tensor in _named(model, row, h, allow_unmapped, packs, set(left_out)):
        if tensor.name in tensors:
            raise RefusedError("two tensors have this name", path=model.path, tensor=tensor.name)
        tensors[tensor.name] = tensor
    return tensors, left_out


def _named(
    model: Model,
    row: Architecture | None,
    h: Hyperparams,
    allow_unmapped: bool,
    packs: Packing,
    left_out: Collection[str],
) -> Iterator[CanonicalTensor]:
    def hf_name(name: str) -> str | None:
        return names.canonical_name(row, name) if row is not None and model.convention != "gguf" else None

    # An `.apr` may hold tensors under GGUF names too: blocks that had to keep their order.
    entries = [t for t in model.tensors.entries if t.name not in left_out]
    found = {t.name: hf_name(t.name) for t in entries}
    from_gguf = {
        t.name: t
        for t in entries
        if row is not None and found[t.name] is None and names.matches(row, t.name, "gguf")
    }
    shapes = {name: t.shape for name, t in from_gguf.items()}
    done: set[str] = set()
    for tensor in entries:
        name = found[tensor.name]
        if packs.decoded and tensor.name in packs.parts:
            # The weight comes in the place of the first of its parts.
            if (weight := packs.by_first_part.get(tensor.name)) is not None:
                yield CanonicalTensor(hf_name(weight.name) or weight.name, (weight,))
        elif row is None or tensor.name in packs.parts:
            yield CanonicalTensor(tensor.name, (tensor,))
        elif name is not None:
            yield CanonicalTensor(name, (tensor,))
        elif tensor.name in from_gguf:
            if tensor.name not in done:  # a link comes in the place of the first of its tensors
                match = _matching(names.matches(row, tensor.name, "gguf"), tensor, h, shapes)
                link = link_of(h, match, shapes)
                done |= set(link.gguf)
                yield from _from_gguf(from_gguf, link)
        elif allow_unmapped or tensor.name in row.gguf_only or names.ignorable(row, tensor.name):
            yield CanonicalTensor(tensor.name, (tensor,))
        else:
            nearest = names.nearest(row, tensor.name, "gguf" if model.convention == "gguf" else "hf")
            raise UnmappedError(
                f"the tensor has no name in architecture {row.id!r}; the nearest is {nearest!r}",
                path=model.path,
                tensor=tensor.name,
                hint="check --arch, or carry it under its own name with --allow-unmapped",
            )


def _check_whole(link_names: Sequence[str], there: Collection[str]) -> None:
    """Raises RefusedError where some of the tensors of a link are there and others are not."""
    absent = [name for name in link_names if name not in there]
    if absent:
        present = next(name for name in link_names if name in there)
        raise RefusedError(f"{absent[0]} is missing, and this tensor needs it", tensor=present)


def _to_hf(link: Link, pieces: tuple[Piece, ...]) -> list[CanonicalTensor]:
    """The Hugging Face tensors of a link, made of those of the GGUF."""
    return [
        CanonicalTensor(name, pieces, link.row_map, position, inverse=True, link=link)
        for position, name in enumerate(link.hf)
    ]


def _from_gguf(tensors: Mapping[str, Tensor], link: Link) -> list[CanonicalTensor]:
    """The Hugging Face tensors that the GGUF tensors of a link hold.

    Blocks that cannot come into Hugging Face order without being decoded keep the GGUF name.
    """
    _check_whole(link.gguf, tensors)
    pieces = tuple(tensors[name] for name in link.gguf)
    if not keeps_dtype(pieces, link.row_map) and any(DTYPES[p.dtype].kind != "plain" for p in pieces):
        return [CanonicalTensor(p.name, (p,), link=link) for p in pieces]
    return _to_hf(link, pieces)


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


def _walk(
    row: Architecture, h: Hyperparams, tensors: Mapping[str, CanonicalTensor]
) -> Iterator[tuple[str, Link | None]]:
    """The tensors with a place in a GGUF, in the network's order: the first name of each link, or a name without."""
    # A name may belong to several rows of the table (stacked or single experts, fused or split projections): which
    # one holds follows from the names that are there, so links are found with all of them in sight.
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
        out += [tensors[name]] if link is None else _to_gguf(link, tensors)
    head, embedding = names.head(row), tensors.get(names.embedding(row))
    if row.head_never and head in tensors:
        raise RefusedError(
            f"llama.cpp's {row.gguf} network has no separate output head, and this one differs from the embedding",
            tensor=head,
        )
    # Where llama.cpp's loader insists on a head, a tied one is the embedding once more.
    if row.head_always and head not in tensors and embedding is not None:
        out.append(CanonicalTensor("output.weight", embedding.pieces, embedding.row_map))
    found: dict[str, CanonicalTensor] = {}
    for tensor in out:
        first = found.setdefault(tensor.name, tensor)
        if first is not tensor:
            raise RefusedError(
                f"the network would have it twice, from {first.pieces[0].name} and from {tensor.pieces[0].name}",
                tensor=tensor.name,
                hint="the checkpoint holds the same weights under two names; remove one of them",
            )
    return out


def _to_gguf(link: Link, tensors: Mapping[str, CanonicalTensor]) -> list[CanonicalTensor]:
    """The GGUF tensors of a link, made of those of the checkpoint."""
    _check_whole(link.hf, tensors)
    parts = [tensors[name] for name in link.hf]
    if all(part.link is link and part.inverse for part in parts):  # made of these very tensors
        return [
            CanonicalTensor(name, (piece,)) for name, piece in zip(link.gguf, parts[0].pieces, strict=True)
        ]
    if link.row_map.is_plain:
        return [replace(parts[0], name=name, link=None) for name in link.gguf]
    pieces = tuple(part.piece() for part in parts)
    return [CanonicalTensor(name, pieces, link.row_map, position) for position, name in enumerate(link.gguf)]


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
        out += _to_hf(tensor.link, tuple(tensor.pieces[0] for name in tensor.link.gguf))
    return sorted(out, key=lambda t: names.order(row, t.name))
