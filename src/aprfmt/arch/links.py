"""Links: table rows made concrete for one network, layer by layer, with the shapes and orders of their tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from aprfmt.arch.hyperparams import Hyperparams
from aprfmt.arch.layers import applies
from aprfmt.arch.names import Match, expand, matches, spell
from aprfmt.arch.orders import ORDERS, VALUES, Order, check_order
from aprfmt.arch.row import Architecture, TensorRow
from aprfmt.arch.sizes import Sizes, evaluate, shape_of, sizes_of
from aprfmt.errors import RefusedError
from aprfmt.text import first_few
from aprfmt.types import Shape

MAX_TENSORS = 1 << 16
"""Most tensors on one side of a row_map that a file may name; a short run can stand for many."""


@dataclass(frozen=True, slots=True)
class RowMap:
    """How the values of some tensors become those of others: see TensorRow. Plain data, kept in `.apr` files.

    Attributes:
        before, after: shapes of the tensors on the Hugging Face side and on the GGUF side.
        orders, columns: with their integers.
        transposed: whether the last two dimensions of the `before` tensors are swapped first.
        after_transposed: the same for each of the `after` tensors, last; empty: none.
        value, pack, flat, skip: as in TensorRow.
    """

    before: tuple[Shape, ...]
    after: tuple[Shape, ...]
    orders: tuple[Order, ...] = ()
    columns: tuple[Order, ...] = ()
    transposed: bool = False
    after_transposed: tuple[bool, ...] = ()
    value: str = ""
    pack: str = ""
    flat: bool = False
    skip: int = 0

    @property
    def moves_rows_only(self) -> bool:
        """Whether stored rows stay whole, so that quantised blocks can be moved."""
        return not (self.columns or self.transposed or any(self.after_transposed) or self.value or self.pack)

    @property
    def is_plain(self) -> bool:
        """Whether both sides are one tensor of the same bytes."""
        return (
            self.moves_rows_only and not self.orders and len(self.before) == 1 and self.before == self.after
        )

    @property
    def row_elements(self) -> int:
        """Values of a row while rows are moved."""
        shape = self.before[0]
        return 1 if len(shape) < 2 or self.flat else shape[-2 if self.transposed else -1]

    @property
    def n_rows(self) -> int:
        """Rows of all tensors of the GGUF side."""
        return sum(map(prod, self.after)) // max(1, self.row_elements)

    def check(self, tensor: str) -> None:
        """Raises RefusedError where the two sides or the orders do not fit together."""
        n_before, n_after = sum(map(prod, self.before)), sum(map(prod, self.after))
        n_before -= self.skip * self.row_elements
        if n_before != n_after:
            raise RefusedError(
                f"{_shapes(self.before)} and {_shapes(self.after)} do not hold the same number of values",
                tensor=tensor,
                hint="the config or metadata belongs to another model, or the tensor is damaged",
            )
        if n_before == 0:
            return
        whole = self.row_elements
        if whole == 0 or any(prod(shape) % whole for shape in (*self.before, *self.after)):
            raise RefusedError(f"{_shapes(self.after)} are not whole rows of {whole} values", tensor=tensor)
        for order in self.orders:
            _check(order, self.n_rows, tensor)
        for order in self.columns:
            _check(order, whole, tensor)


def _check(order: Order, n: int, tensor: str) -> None:
    try:
        check_order(order, n)
    except RefusedError as error:
        raise RefusedError(
            error.message, tensor=tensor, hint="check the head counts and dimensions"
        ) from None


def _shapes(shapes: tuple[Shape, ...]) -> str:
    return first_few(map(list, shapes))


@dataclass(frozen=True, slots=True)
class Link:
    """Tensors of a checkpoint and the tensors of a GGUF that hold the same values."""

    row: TensorRow
    hf: tuple[str, ...]
    gguf: tuple[str, ...]
    row_map: RowMap


def link_of(h: Hyperparams, match: Match, shapes: Mapping[str, Shape]) -> Link:
    """The link that `match` is part of; `shapes` gives the tensors that are there, by their names.

    Raises RefusedError where the hyper-parameters do not tell shapes or orders, or contradict the tensors.
    """
    row, layer = match.row, match.layer
    hf = tuple(name for template in row.hf for name in expand(row, template, h, layer))
    gguf = tuple(spell(name, layer) for name in row.gguf)
    if not hf:
        raise RefusedError(f"the number of {row.count} is unknown", tensor=gguf[0])
    sizes = sizes_of(h)
    before, after = _both_sides(row, hf, gguf, sizes, shapes)
    row_map = RowMap(
        before,
        after,
        tuple(_order(text, sizes, hf[0]) for text in row.order),
        tuple(_order(text, sizes, hf[0]) for text in row.columns),
        row.transposed,
        row.gguf_transposed,
        row.value,
        row.pack,
        row.flat,
        _size_of(row.skip, sizes, hf[0]) if row.skip else 0,
    )
    if not row.pack:
        row_map.check(hf[0])
    return Link(row, hf, gguf, row_map)


def _both_sides(
    row: TensorRow, hf: tuple[str, ...], gguf: tuple[str, ...], sizes: Sizes, shapes: Mapping[str, Shape]
) -> tuple[tuple[Shape, ...], tuple[Shape, ...]]:
    per_name = len(hf) // len(row.hf)
    dims = row.dims if len(row.dims) > 1 else row.dims * len(row.hf)
    before = [shapes.get(name) or _known(dims[i // per_name], sizes) for i, name in enumerate(hf)]
    after_dims = row.gguf_dims or ("",) * len(gguf)
    after = [shapes.get(name) or _known(d, sizes) for name, d in zip(gguf, after_dims, strict=True)]
    if not row.gguf_dims and len(gguf) == 1:
        stacked = "{e}" in row.hf[0]
        if any(name in shapes for name in gguf) and after[0] is not None:
            one = _swapped(after[0][1:] if stacked else after[0], row.transposed)
            before = [one] * len(hf)
        elif before[0] is not None:
            one = _swapped(before[0], row.transposed)
            after = [(len(hf), *one) if stacked else one]
    missing = next(
        (n for n, shape in zip((*hf, *gguf), (*before, *after), strict=True) if shape is None), None
    )
    if missing is not None:
        raise RefusedError(
            "its shape does not follow from the hyper-parameters that are known",
            tensor=missing,
            hint="the source lacks dimensions: give the config.json, or set them with apr stamp",
        )
    return tuple(s for s in before if s is not None), tuple(s for s in after if s is not None)


def _swapped(shape: Shape, transposed: bool) -> Shape:
    return (*shape[:-2], shape[-1], shape[-2]) if transposed and len(shape) >= 2 else shape


def _known(dims: str, sizes: Sizes) -> Shape | None:
    shape = shape_of(dims, sizes) if dims else (None,)
    known = tuple(size for size in shape if size is not None)
    return known if len(known) == len(shape) else None


def _order(text: str, sizes: Sizes, tensor: str) -> Order:
    name, _, expressions = text.partition(":")
    return name, tuple(_size_of(expression, sizes, tensor) for expression in expressions.split(","))


def _size_of(expression: str, sizes: Sizes, tensor: str) -> int:
    size = evaluate(expression, sizes)
    if size is None:
        raise RefusedError(
            f"{expression} is not known, or its sizes do not divide, so the rows cannot be brought into order",
            tensor=tensor,
            hint="the source lacks dimensions: give the config.json, or set them with apr stamp",
        )
    return size


def recast_to_json(row_map: RowMap) -> dict[str, object]:
    """`row_map` as a JSON object without what is empty; a run of equal shapes is told once with its number."""
    body: dict[str, object] = {"before": _runs(row_map.before), "after": _runs(row_map.after)}
    if row_map.orders:
        body["orders"] = [[name, *args] for name, args in row_map.orders]
    if row_map.columns:
        body["columns"] = [[name, *args] for name, args in row_map.columns]
    if row_map.transposed:
        body["transposed"] = True
    if row_map.flat:
        body["flat"] = True
    if row_map.skip:
        body["skip"] = row_map.skip
    if any(row_map.after_transposed):
        body["after_transposed"] = list(row_map.after_transposed)
    body |= {key: text for key in ("value", "pack") if (text := getattr(row_map, key))}
    return body


def _runs(shapes: tuple[Shape, ...]) -> list[list[object]]:
    runs: list[list[object]] = []
    for shape in shapes:
        if runs and runs[-1][1] == list(shape):
            runs[-1][0] = int(str(runs[-1][0])) + 1
        else:
            runs.append([1, list(shape)])
    return runs


def recast_from_json(body: Mapping[str, object], tensor: str) -> RowMap:
    """What recast_to_json gave. Raises RefusedError, ValueError, TypeError or KeyError for anything else."""

    def shapes(key: str) -> tuple[Shape, ...]:
        runs = [(_size(n), tuple(_size(d) for d in shape)) for n, shape in _list(body[key])]
        _size(sum(n for n, _ in runs), MAX_TENSORS)
        return tuple(shape for n, shape in runs for _ in range(n))

    def orders(key: str) -> tuple[Order, ...]:
        found = tuple((str(name), tuple(_size(a) for a in args)) for name, *args in _list(body.get(key, [])))
        if any(name not in ORDERS for name, _ in found):
            raise ValueError("an unknown order of rows")
        return found

    if not isinstance(body, Mapping):
        raise TypeError("a row_map is an object")
    value, pack = str(body.get("value", "")), str(body.get("pack", ""))
    if (value and value not in VALUES) or pack not in ("", "mxfp4"):
        raise ValueError("an unknown map of values")
    row_map = RowMap(
        shapes("before"),
        shapes("after"),
        orders("orders"),
        orders("columns"),
        body.get("transposed") is True,
        tuple(flag is True for flag in _list(body.get("after_transposed", []))),
        value,
        pack,
        body.get("flat") is True,
        _size(body.get("skip", 0)),
    )
    flags = row_map.after_transposed
    if not row_map.before or not row_map.after or (flags and len(flags) != len(row_map.after)):
        raise ValueError("a row_map without tensors")
    if not pack:
        row_map.check(tensor)
    return row_map


def _list(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError("no list")
    return value


def _size(value: object, limit: int = 1 << 62) -> int:
    if type(value) is not int or not 0 <= value <= limit:
        raise ValueError(f"{value!r} is no size")
    return value


def find_link(
    arch: Architecture, h: Hyperparams, name: str, shapes: Mapping[str, Shape], side: str
) -> Link | None:
    """The link of tensor `name`; of alternatives the first whose tensors on `side` are all in `shapes`.

    None when the family has no such tensor. Raises RefusedError as link_of does.
    """
    found = matches(arch, name, side)
    # A name may stand in two rows for two kinds of layers.
    found.sort(key=lambda m: m.layer is not None and not applies(m.row.layers, h, m.layer))
    whole = (m for m in found if _is_whole(m, h, shapes, side))
    match = next(whole, found[0] if found else None)
    return None if match is None else link_of(h, match, shapes)


def _is_whole(match: Match, h: Hyperparams, shapes: Mapping[str, Shape], side: str) -> bool:
    templates = match.row.hf if side == "hf" else match.row.gguf
    return all(name in shapes for t in templates for name in expand(match.row, t, h, match.layer))
