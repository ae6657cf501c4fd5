"""Row orders and value maps: how tensors are permuted and transformed for a GGUF, and back.

An order is a name with integers that divide the rows; it gives, for each row of the GGUF side, the row of the Hugging
Face side:

    swap:a,b,c       the rows viewed as [a, b, c, rest], b and c swapped
    deal:n,x,y,...   n groups of x, y, ... rows: all the x of all groups, then all the y, ...
    tail:s,a,b,c     the first s rows stay, the others as swap:a,b,c
    head:s,a,b,c     the first s rows as swap:a,b,c, the others stay
    each:n,m,a,b     n groups of m rows: the first a*b rows of each, viewed as [a, b], transposed; its others stay
    each:n,m,a,b,c   the same of a*b runs of c rows
    parts:i,j,...    as many equal parts of the rows as there are numbers: part i first, then part j, ...

Llama's rotary order is swap:heads,2,head_dim/2, since Hugging Face rotates the halves of a head against each other
and GGUF's llama neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import TypeAlias

from aprfmt.arch.row import INT32, PLUS_ROW, PRODUCT
from aprfmt.errors import RefusedError
from aprfmt.types import Array

Order = tuple[str, tuple[int, ...]]
"""A name of ORDERS and its integers."""


def _swap(rows: Array, args: Sequence[int]) -> Array:
    return rows.reshape(*args, -1).swapaxes(1, 2).reshape(-1)


def _deal(rows: Array, args: Sequence[int]) -> Array:
    import numpy as np

    n, *runs = args
    groups = rows.reshape(n, sum(runs))
    ends = np.cumsum(runs)
    return np.concatenate([groups[:, end - run : end].reshape(-1) for run, end in zip(runs, ends, strict=True)])


def _tail(rows: Array, args: Sequence[int]) -> Array:
    import numpy as np

    return np.concatenate([rows[: args[0]], _swap(rows[args[0] :], args[1:])])


def _head(rows: Array, args: Sequence[int]) -> Array:
    import numpy as np

    return np.concatenate([_swap(rows[: args[0]], args[1:]), rows[args[0] :]])


def _each(rows: Array, args: Sequence[int]) -> Array:
    import numpy as np

    n, m, *turn = args
    groups, end = rows.reshape(n, m), prod(turn)
    turned = groups[:, :end].reshape(n, *turn[:2], -1).swapaxes(1, 2).reshape(n, -1)
    return np.concatenate([turned, groups[:, end:]], axis=1).reshape(-1)


def _parts(rows: Array, args: Sequence[int]) -> Array:
    return rows.reshape(len(args), -1)[list(args)].reshape(-1)


ORDERS: dict[str, tuple[Callable[[Array, Sequence[int]], Array], range]] = {
    "swap": (_swap, range(3, 4)), "deal": (_deal, range(2, 9)), "tail": (_tail, range(4, 5)),
    "head": (_head, range(4, 5)), "each": (_each, range(4, 6)), "parts": (_parts, range(2, 9)),
}  # fmt: skip
"""Name -> (permutation of rows that check_order has accepted, number of integers)."""


def check_order(order: Order, n_rows: int) -> None:
    """Raises RefusedError unless `n_rows` rows divide as the order requires."""
    name, args = order
    if name not in ORDERS or len(args) not in ORDERS[name][1] or min(args) < 0:
        raise RefusedError(f"unknown row order {_text(order)}")
    if name == "parts" and sorted(args) != list(range(len(args))):
        raise RefusedError(f"{_text(order)} is not a permutation of all parts")
    whole = {"parts": len(args), "swap": prod(args), "deal": args[0] * sum(args[1:]), "each": prod(args[:2])}
    groups = whole.get(name, prod(args[1:]))
    rest = {"tail": n_rows - args[0], "head": min(args[0], n_rows)}.get(name, n_rows)
    if groups == 0 or rest < groups or rest % groups or (name in ("deal", "each") and rest != groups):
        raise RefusedError(f"row order {_text(order)} does not divide {n_rows} rows")
    if name == "each" and prod(args[2:]) > args[1]:
        raise RefusedError(f"row order {_text(order)} permutes more rows than a group has")


def _text(order: Order) -> str:
    return f"{order[0]}:{','.join(map(str, order[1]))}"


def indices(orders: Sequence[Order], n_rows: int, *, inverse: bool = False) -> Array:
    """The Hugging Face row of each GGUF row, int64 [n_rows]; `inverse`: the other way.

    Raises RefusedError unless the rows divide as an order requires.
    """
    import numpy as np

    out = np.arange(n_rows)
    for order in orders:
        check_order(order, n_rows)
        out = ORDERS[order[0]][0](out, order[1])
    if not inverse:
        return out
    back = np.empty_like(out)
    back[out] = np.arange(n_rows)
    return back


_LEAST = 1e-9
"""Keeps an inverse finite."""


def _minus_exp(values: Array) -> Array:
    import numpy as np

    # Through float64 the result is correctly rounded, so the same on every processor.
    return -np.exp(values.astype(np.float64)).astype(np.float32)


def _log_minus(values: Array) -> Array:
    import numpy as np

    with np.errstate(all="ignore"):
        return np.log(-values.astype(np.float64)).astype(np.float32)


def _inverse_exp(values: Array) -> Array:
    import numpy as np

    return (1 / (np.exp(values.astype(np.float64)) + _LEAST)).astype(np.float32)


def _log_inverse(values: Array) -> Array:
    import numpy as np

    with np.errstate(all="ignore"):
        return np.log(1 / values.astype(np.float64) - _LEAST).astype(np.float32)


def _softplus(values: Array) -> Array:
    import numpy as np

    return np.logaddexp(values.astype(np.float64), 0).astype(np.float32)


def _unsoftplus(values: Array) -> Array:
    import numpy as np

    wide = values.astype(np.float64)
    with np.errstate(all="ignore"):
        return (wide + np.log(-np.expm1(-wide))).astype(np.float32)


Maps: TypeAlias = dict[str, tuple[Callable[[Array], Array], Callable[[Array], Array]]]


def _plus(name: str, number: float) -> Maps:
    import struct

    single = struct.unpack("<f", struct.pack("<f", number))[0]
    return {name: (lambda values: values + single, lambda values: values - single)}


VALUES: Maps = {
    "same": (lambda values: values, lambda values: values),  # of rows that are only cut
    "plus_one": (lambda values: values + 1, lambda values: values - 1),
    "minus_exp": (_minus_exp, _log_minus),
    "exp": (lambda values: -_minus_exp(values), lambda values: _log_minus(-values)),
    "inverse_exp": (_inverse_exp, _log_inverse),
    "softplus": (_softplus, _unsoftplus),
    **_plus("plus_fifth", 1 / 5),
    **_plus("plus_root_of_125th", 1 / 5**1.5),
}
"""Name -> (Hugging Face values to GGUF values, and back), float32 to float32."""

MIRROR = "mirror"
"""A value map with a number after a colon: "mirror:16" negates the second half of each 16 rows."""

UNIT_COLUMNS = "unit_columns"
"""The map that divides each column of a matrix by its norm, which cannot be reversed; in a table row the config.json
key after a colon enables it.
"""


def map_values(value: str, values: Array, rows: Array, *, inverse: bool = False) -> Array:
    """Maps `values` [rows, columns] of the Hugging Face rows `rows` to those of a GGUF, float32; `inverse`: back."""
    import numpy as np

    name, _, argument = value.partition(":")
    if name == MIRROR:
        size = int(argument)
        return values * np.where(rows % size < size // 2, 1, -1).astype(np.float32)[:, None]
    return VALUES[name][int(inverse)](values)


def check_value_map(value: str) -> None:
    """Raises ValueError for an invalid value map."""
    name, colon, argument = value.partition(":")
    if colon:
        good = name == MIRROR and argument.isdecimal() and int(argument) > 0
    else:
        good = value in ("", *VALUES, PLUS_ROW, INT32, PRODUCT, UNIT_COLUMNS)
    if not good:
        raise ValueError("unknown value map")
