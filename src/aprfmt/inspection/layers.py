"""Tensors in the order of a page: kind by kind, layer by layer."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")

Layers = dict[int, list[T]]
"""Layer -> the tensors of one kind: one tensor, or several with experts."""

_LAYER = re.compile(r"(?:^|\.)(\d{1,9})\.")


def by_layer(rows: Sequence[T], name_of: Callable[[T], str]) -> tuple[dict[str, Layers[T]], list[T]]:
    """Kind of tensor -> its layers, and the rows outside the layers."""
    kinds: dict[tuple[str, str], Layers[T]] = {}
    rest = []
    for row in rows:
        name = name_of(row)
        found = _LAYER.search(name)
        if found is None:
            rest.append(row)
            continue
        key = name[: found.start()], re.sub(r"\.\d+\.", ".*.", name[found.end() :])
        kinds.setdefault(key, {}).setdefault(int(found[1]), []).append(row)
    alone = len({prefix for prefix, _ in kinds}) == 1
    return {tail if alone else f"{prefix}.{tail}": layers for (prefix, tail), layers in kinds.items()}, rest
