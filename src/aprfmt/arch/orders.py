"""Reversible orders of rows and maps of values between Hugging Face tensors and GGUF tensors.

An order is a name with integers that divide the rows; it tells, for each row of the GGUF side, which row of the
Hugging Face side stands there:

    swap:a,b,c       the rows viewed as [a, b, c, rest], b and c swapped
    deal:n,x,y,...   n groups of x, y, ... rows: all the x of all groups, then all the y, ...
    tail:s,a,b,c     the first s rows stay, the others as swap:a,b,c

Llama's rotary order is swap:heads,2,head_dim/2, since Hugging Face rotates the halves of a head against each other
and GGUF's llama neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

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
    return np.concatenate(
        [groups[:, end - run : end].reshape(-1) for run, end in zip(runs, ends, strict=True)]
    )


def _tail(rows: Array, args: Sequence[int]) -> Array:
    import numpy as np

    return np.concatenate([rows[: args[0]], _swap(rows[args[0] :], args[1:])])


ORDERS: dict[str, tuple[Callable[[Array, Sequence[int]], Array], range]] = {
    "swap": (_swap, range(3, 4)),
    "deal": (_deal, range(2, 9)),
    "tail": (_tail, range(4, 5)),
}
"""Name -> (what it does to rows that check_order has passed, how many integers it takes)."""


def check_order(order: Order, n_rows: int) -> None:
    """Raises RefusedError where `n_rows` rows do not divide as the order asks."""
    name, args = order
    if name not in ORDERS or len(args) not in ORDERS[name][1] or min(args) < 0:
        raise RefusedError(f"{_text(order)} is not an order of rows")
    groups = {"swap": math.prod(args), "deal": args[0] * sum(args[1:]), "tail": math.prod(args[1:])}[name]
    rest = n_rows - args[0] if name == "tail" else n_rows
    if groups == 0 or rest < groups or rest % groups or (name == "deal" and rest != groups):
        raise RefusedError(f"{n_rows} rows cannot be divided as {_text(order)} asks")


def _text(order: Order) -> str:
    return f"{order[0]}:{','.join(map(str, order[1]))}"


def indices(orders: Sequence[Order], n_rows: int, *, inverse: bool = False) -> Array:
    """For each row of the GGUF side the row of the Hugging Face side, int64 [n_rows]; `inverse`: the other way.

    Raises RefusedError where the rows do not divide as an order asks.
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


def _minus_exp(values: Array) -> Array:
    import numpy as np

    # Through float64 the result is correctly rounded, so the same on every processor.
    return -np.exp(values.astype(np.float64)).astype(np.float32)


def _log_minus(values: Array) -> Array:
    import numpy as np

    with np.errstate(all="ignore"):
        return np.log(-values.astype(np.float64)).astype(np.float32)


VALUES: dict[str, tuple[Callable[[Array], Array], Callable[[Array], Array]]] = {
    "plus_one": (lambda values: values + 1, lambda values: values - 1),
    "minus_exp": (_minus_exp, _log_minus),
}
"""Name -> (Hugging Face values to GGUF values, and back), float32 to float32."""
