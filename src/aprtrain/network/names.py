"""Hugging Face names of a network's parameters, and views of the tensors that a parameter is made of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING

from aprtrain.network.layout import count_rows
from aprtrain.network.shape import Shape

if TYPE_CHECKING:
    from torch import Tensor


@cache
def hf_names(shape: Shape) -> Mapping[str, tuple[str, int, tuple[int, ...]]]:
    """Hugging Face name -> (parameter of Decoder, its first row there, shape), in the order of the network."""
    found: dict[str, tuple[str, int, tuple[int, ...]]] = {}
    layers = [(f"blocks.{n}.", n, shape.kinds[kind]) for n, kind in enumerate(shape.layer_kinds)]
    for prefix, layer, layout in (("", 0, shape.outer[:1]), *layers, ("", 0, shape.outer[1:])):
        for name, parts in layout:
            first = 0
            for part in parts:
                found[part.name.replace("{n}", str(layer))] = prefix + name, first, part.size
                first += part.rows
    return found


@cache
def parts_of(shape: Shape) -> Mapping[str, list[tuple[str, int, tuple[int, ...]]]]:
    """Parameter of Decoder -> (Hugging Face name, first row, shape) of its parts, in row order."""
    found: dict[str, list[tuple[str, int, tuple[int, ...]]]] = {}
    for hf, (parameter, first, size) in hf_names(shape).items():
        found.setdefault(parameter, []).append((hf, first, size))
    return found


def hf_parts(shape: Shape, parameter: str, whole: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The Hugging Face tensors that make up a parameter of Decoder, as views of its values `whole`."""
    for hf, first, size in parts_of(shape)[parameter]:
        yield hf, whole.narrow(0, first, count_rows(size)).view(size)


def head_name(shape: Shape) -> str:
    """Name of Decoder's parameter that is the output head."""
    return "embed" if shape.tied else "head"
