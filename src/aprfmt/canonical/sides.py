"""The tensors of a GGUF or of a checkpoint that represent those of a canonical model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

from aprfmt.arch import names
from aprfmt.arch.heads import has_no_output, repeats_embedding
from aprfmt.arch.hyperparams import Hyperparams
from aprfmt.arch.links import Link, find_link
from aprfmt.arch.loaders import OUTPUT_HEAD, supports_untied_head
from aprfmt.arch.row import Architecture
from aprfmt.canonical.naming import check_whole, to_hf
from aprfmt.canonical.row_mapping import BufferedTensor
from aprfmt.canonical.tensor import CanonicalTensor
from aprfmt.errors import RefusedError


def _walk(
    row: Architecture, h: Hyperparams, tensors: Mapping[str, CanonicalTensor]
) -> Iterator[tuple[str, Link | None]]:
    """The tensors with a GGUF counterpart, in the network's order: the first name of each link, or a name without."""
    # A name may belong to several entries of the table (stacked or single experts, fused or split projections): which
    # one applies depends on the names present, so links are found with all of them in view.
    shapes = {name: t.shape for name, t in tensors.items()}
    done: set[str] = set()
    for name in sorted(tensors, key=lambda n: names.order(row, n)):
        if name in done or names.ignorable(row, name) or names.is_hf_only(row, name, h):
            continue
        link = tensors[name].link or find_link(row, h, name, shapes, "hf")
        if link is not None and name in link.hf:
            done |= set(link.hf)
            yield name, link
        else:
            yield name, None


def links(row: Architecture, h: Hyperparams, tensors: Mapping[str, CanonicalTensor]) -> list[Link]:
    """Every link that maps the Hugging Face `tensors` to a GGUF."""
    return [link for _, link in _walk(row, h, tensors) if link is not None]


def gguf_side(row: Architecture, h: Hyperparams, tensors: Mapping[str, CanonicalTensor]) -> list[CanonicalTensor]:
    """The tensors of a GGUF for the Hugging Face `tensors`, in the network's order; unknown names are kept.

    Raises RefusedError if a tensor's partners are missing or the hyper-parameters contradict the shapes.
    """
    out: list[CanonicalTensor] = []
    for name, link in _walk(row, h, tensors):
        out += [tensors[name]] if link is None else to_link(link, tensors)
    head, embedding = names.head(row), tensors.get(names.embedding(row))
    if head in tensors and names.special(row, OUTPUT_HEAD) and not supports_untied_head(row.gguf):
        raise RefusedError(
            f"llama.cpp's {row.gguf} network has no separate output head, and this one differs from the embedding",
            tensor=head,
        )
    # If llama.cpp's loader requires a head, a tied one duplicates the embedding.
    is_tied = bool(h.tied) and h.hf_architecture not in row.bare_classes
    if repeats_embedding(row.gguf, is_tied, h.extra) and head not in tensors and embedding is not None:
        link = find_link(row, h, head, {head: embedding.shape}, "hf") if embedding.link is None else None
        out.append(CanonicalTensor("output.weight", embedding.sources, link.mapping if link else embedding.mapping))
        if has_no_output(h.hf_architecture) and names.matches(row, "output.bias", "gguf"):
            data = bytes(4 * embedding.shape[0])
            zeros = BufferedTensor("output.bias", "F32", embedding.shape[:1], partial(list, (data,)))
            out.append(CanonicalTensor("output.bias", (zeros,)))
    made = {tensor.name: tensor for tensor in out}
    out += [
        replace(made[original], name=name)
        for name, original in row.copies.items()
        if name not in made and original in made
    ]
    found: dict[str, CanonicalTensor] = {}
    for tensor in out:
        first = found.setdefault(tensor.name, tensor)
        if first is not tensor:
            raise RefusedError(
                f"two source tensors map to it: {first.sources[0].name} and {tensor.sources[0].name}",
                tensor=tensor.name,
                hint="the checkpoint holds the same weights under two names; remove one of them",
            )
    return out


def to_link(link: Link, tensors: Mapping[str, CanonicalTensor]) -> list[CanonicalTensor]:
    """The tensors on the GGUF side of a link, made from the checkpoint's. Raises RefusedError if one is missing."""
    check_whole(link.hf, tensors)
    parts = [tensors[name] for name in link.hf]
    if all(part.link is link and part.inverse for part in parts):  # made from these very tensors
        return [CanonicalTensor(name, (source,)) for name, source in zip(link.gguf, parts[0].sources, strict=True)]
    if link.mapping.is_plain:
        return [replace(parts[0], name=name, link=None) for name in link.gguf]
    sources = tuple(part.as_source() for part in parts)
    return [CanonicalTensor(name, sources, link.mapping, position) for position, name in enumerate(link.gguf)]


def hf_side(row: Architecture | None, tensors: Mapping[str, CanonicalTensor]) -> list[CanonicalTensor]:
    """The tensors of a Hugging Face checkpoint: those under GGUF names dequantized and reordered."""
    if row is None:
        return list(tensors.values())
    out: list[CanonicalTensor] = []
    done: set[str] = set()
    for name, tensor in tensors.items():
        if names.is_gguf_only(row, name) or name in done:
            continue  # every Hugging Face reader derives it from config.json
        if tensor.link is None or name in tensor.link.hf:
            out.append(tensor)
            continue
        done |= set(tensor.link.gguf)
        out += to_hf(tensor.link, tuple(tensors[gguf].sources[0] for gguf in tensor.link.gguf))
    return sorted(out, key=lambda t: names.order(row, t.name))
