"""Links: table rows instantiated for one network, layer by layer, with the shapes and orders of their tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from math import prod

from aprfmt.arch.grammar import (
    ANY,
    dims_of,
    evaluate,
    factor_of,
    has_layer,
    is_unwanted,
    parse_order,
    shape_of,
    sizes_of,
)
from aprfmt.arch.hyperparams import Hyperparams
from aprfmt.arch.names import Match, expand, fits, gguf_names, in_stacks, matches
from aprfmt.arch.orders import MIRROR, ORDERS, UNIT_COLUMNS, Order, check_order, check_value_map
from aprfmt.arch.row import PACKS, PRODUCT, Architecture, TensorRow
from aprfmt.errors import RefusedError
from aprfmt.text import first_few
from aprfmt.types import Shape

Scale = tuple[int, tuple[float, ...]]
"""Number of rows, and their factors."""

MAX_TENSORS = 1 << 16
"""Maximum number of tensors on one side of a row mapping in a file; a short run can represent many."""


@dataclass(frozen=True, slots=True)
class RowMapping:
    """How tensors are converted to others: a TensorRow with its words replaced by numbers.

    Plain data, kept in `.apr` files. From the Hugging Face side to the GGUF side:

    1. each `before` tensor is transposed if `transposed`, and all are concatenated as rows of `row_elements` values,
    without the first `skip` and the last `cut` rows; 2. row i of the result is row `indices(orders)[i]`, and column j
    of each row column `indices(columns)[j]`; 3. `value` maps the values; the rows of each run of `scales` are
    multiplied by its numbers, one after the other; 4. `lead` rows of zeros come before the rows and `trail` behind
    them, which are copies of the first row if `repeats`; 5. the rows are cut into tensors of the `after` shapes, each
    transposed where `after_transposed` says so.

    Each step is a bijection (skipped rows come back as zeros), so the inverse follows from the same data. If only rows
    move (`moves_rows_only`), it works on stored bytes: a row of quantized blocks moves like any other.

    Attributes:
        before, after: shapes of the tensors on the Hugging Face side and on the GGUF side.
        orders, columns: names of ORDERS with their integers.
        transposed: whether the last two dimensions of the `before` tensors are swapped first.
        after_transposed: the same for each of the `after` tensors, last; empty for none of them.
        value, pack, flat: as in TensorRow.
        scales: (rows, numbers) of each run of rows, in the order of the GGUF side; empty: no row is multiplied.
        skip, cut: numbers of first and of last rows that the GGUF side does not have.
        lead, trail: numbers of first and of last rows, zeros, that only the GGUF side has; `after` is then one shape.
        repeats: whether the `trail` rows are copies of the first row instead of zeros.
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
    scales: tuple[Scale, ...] = ()
    cut: int = 0
    lead: int = 0
    trail: int = 0
    repeats: bool = False

    @property
    def inner(self) -> RowMapping:
        """The mapping without rows of zeros: its GGUF side is one matrix of the others."""
        rows = self.n_rows - self.lead - self.trail
        return replace(self, after=((rows, self.row_elements),), lead=0, trail=0, repeats=False)

    @property
    def maps_values(self) -> bool:
        """Whether values change, so that they are computed in F32."""
        return bool(self.value or self.scales)

    @property
    def moves_rows_only(self) -> bool:
        """Whether stored rows stay whole, so that quantized blocks can be moved."""
        return not (self.columns or self.transposed or any(self.after_transposed) or self.maps_values or self.pack)

    @property
    def is_plain(self) -> bool:
        """Whether both sides are one tensor of the same bytes."""
        return self.moves_rows_only and not self.orders and len(self.before) == 1 and self.before == self.after

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
        """Raises RefusedError if the two sides or the orders contradict each other.

        Nothing is allocated before this has passed: shapes and integers may come from a crafted file.
        """
        n_before, n_after = sum(map(prod, self.before)), sum(map(prod, self.after))
        n_before -= (self.skip + self.cut - self.lead - self.trail) * self.row_elements
        if (self.lead or self.trail) and (len(self.after) != 1 or any(self.after_transposed) or self.pack):
            raise RefusedError("padding needs a single, untransposed tensor", tensor=tensor)
        if self.value == PRODUCT:
            if len(self.before) != 2 or prod(self.before[0]) != prod(self.before[1]):
                raise RefusedError(
                    f"{_shapes(self.before)} must be two tensors with the same number of values", tensor=tensor
                )
            n_before //= 2
        if n_before != n_after:
            raise RefusedError(
                f"{_shapes(self.before)} and {_shapes(self.after)} have different numbers of values",
                tensor=tensor,
                hint="the config or metadata belongs to another model, or the tensor is damaged",
            )
        if n_before == 0:
            return
        whole = self.row_elements
        if whole == 0 or any(prod(shape) % whole for shape in (*self.before, *self.after)):
            raise RefusedError(f"{_shapes(self.after)} does not divide into rows of {whole} values", tensor=tensor)
        if self.scales and (sum(rows for rows, _ in self.scales) != self.n_rows or any(self.after_transposed)):
            raise RefusedError(f"the row mapping's scales do not match {self.n_rows} rows", tensor=tensor)
        try:
            for order in self.orders:
                check_order(order, self.n_rows - self.lead - self.trail)
            for order in self.columns:
                check_order(order, whole)
        except RefusedError as error:
            hint = "check the head counts and dimensions"
            raise RefusedError(error.message, tensor=tensor, hint=hint) from None

    def to_json(self) -> dict[str, object]:
        """A JSON object without empty fields; a run of equal shapes is written once, with its length."""
        body = {
            "before": _runs(self.before), "after": _runs(self.after),
            "orders": [[name, *args] for name, args in self.orders],
            "columns": [[name, *args] for name, args in self.columns], "transposed": self.transposed, "flat": self.flat,
            "skip": self.skip, "cut": self.cut, "lead": self.lead, "trail": self.trail, "repeats": self.repeats,
            "scales": [[rows, *numbers] for rows, numbers in self.scales],
            "after_transposed": any(self.after_transposed) and list(self.after_transposed), "value": self.value,
            "pack": self.pack,
        }  # fmt: skip
        return {key: value for key, value in body.items() if value}

    @classmethod
    def from_json(cls, body: object, tensor: str) -> RowMapping:
        """Parses the output of to_json. Raises RefusedError, ValueError, TypeError or KeyError for anything else."""
        if not isinstance(body, Mapping):
            raise TypeError("a row mapping must be an object")
        mapping = cls(
            _read_shapes(body["before"]), _read_shapes(body["after"]), _read_orders(body.get("orders", [])),
            _read_orders(body.get("columns", [])), body.get("transposed") is True,
            tuple(flag is True for flag in _list(body.get("after_transposed", []))), str(body.get("value", "")),
            str(body.get("pack", "")), body.get("flat") is True, _size(body.get("skip", 0)),
            _read_scales(body.get("scales", [])), _size(body.get("cut", 0)), _size(body.get("lead", 0)),
            _size(body.get("trail", 0)), body.get("repeats") is True,
        )  # fmt: skip
        check_value_map(mapping.value)
        if mapping.pack not in ("", *PACKS):
            raise ValueError("unknown packing")
        flags = mapping.after_transposed
        if not mapping.before or not mapping.after or (flags and len(flags) != len(mapping.after)):
            raise ValueError("a row mapping needs at least one tensor")
        if not mapping.pack:
            mapping.check(tensor)
        return mapping


def _shapes(shapes: tuple[Shape, ...]) -> str:
    return first_few(map(list, shapes))


def _runs(shapes: tuple[Shape, ...]) -> list[list[object]]:
    """[number, shape] of each run of equal shapes: a stack of 256 experts takes as much space as one."""
    return [[len(list(run)), list(shape)] for shape, run in groupby(shapes)]


def _list(value: object) -> list[object]:
    if not isinstance(value, list):
        raise TypeError("not a list")
    return value


def _size(value: object, limit: int = 1 << 62) -> int:
    if type(value) is not int or not 0 <= value <= limit:
        raise ValueError(f"{value!r} is not a valid size")
    return value


def _read_shapes(value: object) -> tuple[Shape, ...]:
    runs = []
    for run in _list(value):
        number, shape = _list(run)
        runs.append((_size(number), tuple(map(_size, _list(shape)))))
    _size(sum(number for number, _ in runs), MAX_TENSORS)
    return tuple(shape for number, shape in runs for _ in range(number))


def _read_scales(value: object) -> tuple[Scale, ...]:
    found = []
    for scale in _list(value):
        rows, *numbers = _list(scale)
        if not all(isinstance(number, int | float) and math.isfinite(number) and number for number in numbers):
            raise ValueError("row scales must be finite numbers other than 0")
        found.append((_size(rows), tuple(float(str(number)) for number in numbers)))
    return tuple(found)


def _read_orders(value: object) -> tuple[Order, ...]:
    found = []
    for order in _list(value):
        name, *args = _list(order)
        if name not in ORDERS:
            raise ValueError("unknown row order")
        found.append((str(name), tuple(map(_size, args))))
    return tuple(found)


# --- links ---


@dataclass(frozen=True, slots=True)
class Link:
    """Tensors of a checkpoint and the tensors of a GGUF that hold the same values."""

    row: TensorRow
    hf: tuple[str, ...]
    gguf: tuple[str, ...]
    mapping: RowMapping


def link_of(h: Hyperparams, match: Match, shapes: Mapping[str, Shape]) -> Link:
    """The link that `match` is part of; `shapes` has the tensors that are present, by name.

    Raises RefusedError if the hyper-parameters lack shapes or orders, or contradict the tensors.
    """
    row, layer = match.row, match.layer
    gguf = gguf_names(row, layer, h)
    # One more name than experts suffices to show that the number in the config is wrong.
    most = max([len(shapes), *(shapes[name][0] for name in gguf if shapes.get(name))])
    hf = tuple(name for template in row.hf for name in expand(row, template, h, layer, most + 1))
    if not hf:
        raise RefusedError(f"the number of {row.count} is unknown", tensor=gguf[0])
    sizes = sizes_of(h, layer)

    def size(text: str) -> int:
        number = evaluate(text, sizes)
        if number is None:
            raise RefusedError(
                f"{text} is unknown or not an integer, so the rows cannot be reordered", tensor=hf[0], hint=_NO_DIMS
            )
        return number

    def orders(texts: tuple[str, ...]) -> tuple[Order, ...]:
        return tuple((name, tuple(map(size, args))) for name, args in map(parse_order, texts))

    def value() -> str:
        name, _, argument = row.value.partition(":")
        if name == UNIT_COLUMNS:
            return UNIT_COLUMNS if h.extra.get(argument) else ""
        return f"{MIRROR}:{size(argument)}" if name == MIRROR else row.value

    before, after = _both_sides(row, hf, gguf, sizes, shapes)
    mapping = RowMapping(
        before, after, orders(row.order), orders(row.columns), row.transposed,
        row.gguf_transposed * (len(gguf) // len(row.gguf)), value(), row.pack, row.flat,
        size(row.skip) if row.skip else 0,
    )  # fmt: skip
    if row.cut:
        mapping = replace(mapping, cut=size(row.cut))
    if row.lead or row.trail:
        mapping = replace(mapping, lead=size(row.lead or "0"), trail=size(row.trail or "0"), repeats=row.repeats)
    if row.scale:
        mapping = replace(mapping, scales=_scales(row, h, layer, mapping.n_rows, size))
    if not row.pack:
        mapping.check(hf[0])
    return Link(row, hf, gguf, mapping)


def _scales(
    row: TensorRow, h: Hyperparams, layer: int | None, n_rows: int, size: Callable[[str], int]
) -> tuple[Scale, ...]:
    """The factors of a tensor's rows; empty if all are 1."""
    runs: list[Scale] = []
    left = n_rows
    for text in row.scale:
        rows, _, numbers = text.partition(":")
        count = size(rows) if rows else left
        factors = [math.prod(factor_of(word, h, layer) for word in n.split("*")) for n in numbers.split(",")]
        runs.append((count, tuple(factor for factor in factors if factor != 1)))
        left -= count
    return tuple(runs) if any(numbers for _, numbers in runs) else ()


_NO_DIMS = "the source lacks dimensions: add its config.json, or set them with apr stamp"


def _both_sides(
    row: TensorRow, hf: tuple[str, ...], gguf: tuple[str, ...], sizes: Mapping[str, int], shapes: Mapping[str, Shape]
) -> tuple[tuple[Shape, ...], tuple[Shape, ...]]:
    """The shapes of both sides: of the tensors that are present, else from the row's dims.

    If the GGUF side is one tensor without dims of its own, each side follows from the other, so that a shape that
    contradicts the hyper-parameters shows up as a difference of the two sides, not here.
    """
    if row.gguf_dims and (both := {*hf} & {*gguf}):  # the tensor of that name may be of either side
        shapes = {name: shape for name, shape in shapes.items() if name not in both}
    per_name = len(hf) // len(row.hf)
    dims = row.dims * len(row.hf)  # one for all names, or one each
    stated = ((name, dims[i // per_name]) for i, name in enumerate(hf))
    sizes = {**_free_sizes((*stated, *zip(gguf, row.gguf_dims, strict=False)), shapes), **sizes}
    before = [_shape_of(name, dims[i // per_name], sizes, shapes) for i, name in enumerate(hf)]
    after_dims = row.gguf_dims * (len(gguf) // len(row.gguf)) or (None,) * len(gguf)
    after = [_shape_of(name, d, sizes, shapes) for name, d in zip(gguf, after_dims, strict=True)]
    if not row.gguf_dims and len(gguf) == 1:
        stacked = "{e}" in row.hf[0]
        if gguf[0] in shapes and after[0] is not None:
            one = _swap_last(after[0][1:] if stacked else after[0], row.transposed)
            before = [one] * len(hf)
        elif before[0] is not None:
            one = _swap_last(before[0], row.transposed)
            after = [(len(hf), *one) if stacked else one]
    for name, shape in zip((*hf, *gguf), (*before, *after), strict=True):
        if shape is None:
            raise RefusedError("its shape does not follow from the hyper-parameters", tensor=name, hint=_NO_DIMS)
    return tuple(s for s in before if s is not None), tuple(s for s in after if s is not None)


def _free_sizes(stated: Iterable[tuple[str, str]], shapes: Mapping[str, Shape]) -> dict[str, int]:
    """The sizes that no key states (ANY), from the shapes of the tensors that are present: names with their dims."""
    found: dict[str, int] = {}
    for name, dims in stated:
        words = dims_of(dims)
        if name in shapes and len(shapes[name]) == len(words):
            found |= {word: size for word, size in zip(words, shapes[name], strict=True) if word.startswith(ANY)}
    return found


def _swap_last(shape: Shape, transposed: bool) -> Shape:
    return (*shape[:-2], shape[-1], shape[-2]) if transposed and len(shape) >= 2 else shape


def _shape_of(name: str, dims: str | None, sizes: Mapping[str, int], shapes: Mapping[str, Shape]) -> Shape | None:
    """The shape of the tensor if it is present, else from `dims`, if all are known. A scalar's is empty."""
    if name in shapes:
        return shapes[name]
    shape = shape_of(dims, sizes) if dims is not None else (None,)
    known = tuple(size for size in shape if size is not None)
    return known if len(known) == len(shape) else None


def find_link(arch: Architecture, h: Hyperparams, name: str, shapes: Mapping[str, Shape], side: str) -> Link | None:
    """The link of tensor `name`; of alternatives the first whose tensors on `side` are all in `shapes`.

    Of alternatives with the same names, the one whose dimensions the tensor has. None if the family has no such tensor.
    Raises RefusedError as link_of does.
    """

    def is_whole(m: Match) -> bool:
        if side == "gguf":
            return all(name in shapes for name in gguf_names(m.row, m.layer, h))
        return all(name in shapes for t in m.row.hf for name in expand(m.row, t, h, m.layer))

    found = matches(arch, name, side)
    found = in_stacks(found, h) if side == "gguf" else found
    # A name may be in two rows for two layer types, or networks.
    found.sort(
        key=lambda m: (
            m.layer is not None and not has_layer(m.row.layers, h, m.layer),
            is_unwanted(arch, m.row.need, h),
        )
    )
    chosen = next(filter(is_whole, found), found[0] if found else None)
    if chosen is not None and side == "hf" and name in shapes:
        same = [m for m in found if m.row.hf == chosen.row.hf and m.row.layers == chosen.row.layers]
        sizes = sizes_of(h) if len(same) > 1 else {}
        chosen = next((m for m in same if sizes and fits(m, shapes[name], sizes)), chosen)
    return link_of(h, chosen, shapes) if chosen is not None else None
