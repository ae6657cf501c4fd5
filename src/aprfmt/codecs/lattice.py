"""QAT lattices: weights that quantization-aware training left on Q4_0 values are detected and stored exactly.

A block of 32 lies on a lattice if for some step d each value is an integer -8 .. 7 times d, rounded to bfloat16.
llama.cpp's quantizer derives d from the largest value as if that were 8 steps, which need not be so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice

from aprfmt.codecs import affine, plain
from aprfmt.codecs.dtypes import DTYPES
from aprfmt.codecs.recode import encode
from aprfmt.codecs.stream import whole_units
from aprfmt.io.pipe import CHUNK_BYTES, Item, Job, item_bytes, run_jobs
from aprfmt.io.source import Buffer
from aprfmt.types import Array

_BLOCK = affine.BLOCK
_UNIT = 2 * _BLOCK
"""Bytes of a block in bfloat16."""
_ULP = 2.0**-8
"""Twice the relative rounding error of bfloat16."""
NEAR, EXACT = 1, 2


def find(values: Array) -> tuple[Array, Array, Array]:
    """Codes uint8 [blocks, 32], steps float32 [blocks] and whether they reproduce the values [blocks, 32]: uint8
    [blocks].

    `values` are float32 numbers that are exact in bfloat16. EXACT: code times step, rounded to bfloat16, is the value;
    NEAR:
    F16 has no such step, and the nearest is used; 0: no step exists. Blocks of zeros are EXACT with a step of zero, if
    any.
    """
    import numpy as np

    wide = values.astype("f8")
    place = np.abs(wide).argmax(axis=1)
    largest = wide[np.arange(len(wide)), place]
    codes, steps = np.full(values.shape, 8, "u1"), np.zeros(len(values), "f4")
    found = np.zeros(len(values), "u1")
    for most in (-8, *range(1, 8), *range(-7, 0)):
        left = np.flatnonzero((found != EXACT) & (largest != 0))
        if not left.size:
            break
        rough = largest[left] / most
        whole = np.rint(wide[left] / rough[:, None])
        near = np.abs(wide[left] / rough[:, None] - whole) <= np.abs(whole) * 2 * _ULP
        fits = (near & (whole >= -8) & (whole <= 7)).all(axis=1)
        rows, whole = left[fits], whole[fits]
        middle = _common_step(wide[rows], whole)
        again = affine.rounded((middle[:, None] * whole).astype("f4"), "BF16")
        kind = np.where((again == values[rows]).all(axis=1), EXACT, NEAR)
        better = kind > found[rows]
        own = rows[better]
        codes[own], steps[own], found[own] = (whole[better] + 8).astype("u1"), middle[better], kind[better]
    return codes, steps, found


def _common_step(values: Array, whole: Array) -> Array:
    """The F16 number in the middle of the interval of steps that reproduce all values after rounding."""
    import numpy as np

    size, n = np.abs(values), np.abs(whole)
    with np.errstate(divide="ignore", invalid="ignore"):
        power = np.exp2(np.floor(np.log2(size)))
        half = power * 2.0**-8  # half a unit in the last place; below a power of two the unit is half as large
        low = np.where(n == 0, 0, (size - np.where(size == power, half / 2, half)) / n).max(axis=1)
        high = np.where(n == 0, np.inf, (size + half) / n).min(axis=1)
    sign = np.sign((values * whole).sum(axis=1))
    middle: Array = (sign * (low + high) / 2).astype("f2").astype("f4")
    return middle


def is_on_lattice(items: Callable[[int], Iterable[Item]]) -> bool:
    """Whether the first blocks of a bfloat16 stream lie on lattices, and not all are zero."""
    import numpy as np

    data = next(iter(run_jobs(islice(items(_UNIT), 1))), b"")
    n_blocks = min(memoryview(data).nbytes // _UNIT, 1 << 10)
    values = _values(memoryview(data)[: n_blocks * _UNIT])
    some = values.any(axis=1)
    return bool(some.any()) and bool(find(values[some])[2].all()) and len(np.unique(np.abs(values[some]))) > 2


def jobs(items: Callable[[int], Iterable[Item]], count: Callable[[int], None]) -> Iterator[Item]:
    """Q4_0 blocks of a bfloat16 stream; calls `count` with the number of blocks that are rounded."""
    for item in whole_units(items(_UNIT), _UNIT, max(1, CHUNK_BYTES // _UNIT) * _UNIT):
        size = item_bytes(item) // _UNIT * DTYPES["Q4_0"].block_bytes
        yield Job(size, partial(_make, item, count))


def _make(item: Item, count: Callable[[int], None]) -> Buffer:
    import numpy as np

    values = _values(item.run() if isinstance(item, Job) else item)
    codes, steps, found = find(values)
    blocks = np.frombuffer(affine.write_blocks("Q4_0", codes, steps, steps), "u1").reshape(len(values), -1).copy()
    rest = np.flatnonzero(found == 0)
    if rest.size:
        blocks[rest] = np.frombuffer(encode("Q4_0", values[rest]), "u1").reshape(rest.size, -1)
    if n_rounded := int(((found != EXACT) & values.any(axis=1)).sum()):
        count(n_rounded)
    return blocks.reshape(-1).data


def _values(data: Buffer) -> Array:
    values: Array = plain.decode("BF16", data).astype("<f4", copy=False).reshape(-1, _BLOCK)
    return values
