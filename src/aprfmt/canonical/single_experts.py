"""Stacks of experts as one tensor an expert, the form in which serving engines load quantized ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod

from aprfmt.arch import names
from aprfmt.arch.links import find_link
from aprfmt.canonical.model import Canonical
from aprfmt.canonical.row_mapping import BufferedTensor, StackedMatrix
from aprfmt.canonical.sides import to_link
from aprfmt.canonical.tensor import CanonicalTensor
from aprfmt.codecs.stream import TensorSource


def with_single_experts(c: Canonical) -> tuple[Canonical, dict[str, str]]:
    """`c` with the stacks of experts as one tensor an expert, where its architecture has names for these.

    Also gives the name of the stack that each of the new tensors is part of.
    """
    if c.arch is None:
        return c, {}
    tensors: dict[str, CanonicalTensor] = {}
    stacks: dict[str, str] = {}
    for name, tensor in c.tensors.items():
        found = names.gguf_name(c.arch, name, c.hparams) or name
        is_stack = "_exps." in found and len(tensor.shape) == 3 and prod(tensor.shape) > 0
        single = dict(_single(c, name, tensor)) if is_stack else {}
        tensors |= single or {name: tensor}
        stacks |= dict.fromkeys(single, name)
    return replace(c, tensors=tensors), stacks


def _single(c: Canonical, name: str, tensor: CanonicalTensor) -> Iterator[tuple[str, CanonicalTensor]]:
    """The tensors of single experts in a stack, by name; none without names for all of them."""
    assert c.arch is not None
    n_experts, *rest = tensor.shape
    one = replace(c.hparams, num_experts=1)
    if tensor.link is not None:  # of a GGUF, whose stacks have the order of single experts
        own_side = name in tensor.link.hf
        stacks = tensor.link.gguf if own_side else (name,)
        fits = tensor.inverse and tensor.link.hf == (name,) if own_side else tensor.mapping is None
        spelled = _names(c, stacks) if fits else []
        if len(spelled) != len(stacks):
            return
        for expert in range(n_experts):
            for (template, layer), stack in zip(spelled, tensor.sources, strict=True):
                own = names.spell(template, layer, expert)
                yield own, CanonicalTensor(own, (StackedMatrix(own, stack, expert, stack.shape[1:]),))
        return
    link = find_link(c.arch, one, name, {name: (1, *rest)}, "hf") if tensor.mapping is None else None
    spelled = _names(c, link.gguf) if link is not None and link.hf == (name,) else []
    if link is None or len(spelled) != len(link.gguf):
        return
    for expert in range(n_experts):
        part = StackedMatrix(name, tensor.sources[0], expert, (1, *rest))
        for (template, layer), made in zip(spelled, to_link(link, {name: CanonicalTensor(name, (part,))}), strict=True):
            own = names.spell(template, layer, expert)
            source: TensorSource = replace(part, name=own, shape=tuple(rest))
            if not link.mapping.is_plain:
                produced = made.produced
                source = BufferedTensor(own, produced.dtype, made.shape[1:], produced.chunks, produced.scales)
            yield own, CanonicalTensor(own, (source,))


def _names(c: Canonical, stacks: tuple[str, ...]) -> list[tuple[str, int | None]]:
    """The names of single experts in stacks of a GGUF, each a template with its layer; fewer where one has none."""
    assert c.arch is not None
    found = []
    for name in stacks:
        for match in names.matches(c.arch, name, "gguf"):
            row = match.row
            if "{e}" in row.hf[0] and len(row.hf) == len(row.gguf) == 1 and not (row.order or row.transposed):
                found.append((row.hf[0], match.layer))
                break
    return found
