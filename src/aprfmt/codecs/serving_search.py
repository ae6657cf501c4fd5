"""Searches the scales of 4-bit groups for the least weighted squared error, instead of deriving them from the maximum.

The error of a group is Σ w (x - x')², with w the importance of a column (mean square of its inputs), else 1. A clipped
outlier costs less than a coarse step for all others. Ratios of the maximum are tried first; then the best scale is
fitted to its own codes by least squares, which for given codes q is Σ w x q / Σ w q².
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from aprfmt.codecs import affine, plain
from aprfmt.codecs.packed_floats import FP4_VALUES
from aprfmt.types import Array

_CLIPPED = tuple(0.5 + 0.05 * i for i in range(10))
"""Ratios of the scale derived from the maximum, for 4-bit codes."""
_FITS = 2
_E4M3_STEPS = range(-4, 7)
"""E4M3 neighbours of the scale derived from the maximum; six steps up map it to 4 instead of 6."""
_MOST_E4M3 = 0x7E


def _least(
    groups: Array, weights: Array, decode: Callable[..., Array], candidates: Iterable[tuple[Array, ...]]
) -> tuple[Array, ...]:
    """Of the candidates, arrays [rows, groups] each, those with the least error per group."""
    import numpy as np

    found: tuple[Array, ...] = ()
    least = np.empty(0, "f4")
    for candidate in candidates:
        difference = groups - decode(*candidate)
        difference *= difference
        difference *= weights
        error = difference.sum(axis=-1)
        if found:
            better = error < least
            found = tuple(np.where(better, new, old) for new, old in zip(candidate, found, strict=True))
            least = np.minimum(error, least)
        else:
            found, least = candidate, error
    return found


def integer_codes(groups: Array, scale: Array, zero: Array, half: int) -> Array:
    """The signed codes of float32 [rows, groups, values] for scales and zero points [rows, groups]."""
    import numpy as np

    codes = groups / scale[..., None]
    np.rint(codes, out=codes)
    codes += zero[..., None]
    found: Array = np.clip(codes, -half, half - 1, out=codes)
    return found


def integer_values(scale: Array, zero: Array, half: int) -> Callable[[int, Array], Array]:
    """The stored values of one column, float32 [rows], given its group and what is rounded to nearest."""

    def stored(group: int, values: Array) -> Array:
        offset = zero[:, group]
        codes = integer_codes(values[:, None], scale[:, group], offset, half)[:, 0]
        codes -= offset
        codes *= scale[:, group]
        return codes

    return stored


def integer_scales(groups: Array, weights: Array, half: int, dtype: str, *, symmetric: bool) -> tuple[Array, Array]:
    """Searches for the scales and zero points with the least squared error of each group, weighted by `weights`.

    Returns positive scales that `dtype` can store, and whole zero points: float32 [rows, groups].
    """
    import numpy as np

    low, high = np.minimum(groups.min(axis=-1), 0), np.maximum(groups.max(axis=-1), 0)
    reach = np.maximum(-low, high)
    tiny = np.float32(np.finfo("f2").tiny)

    def as_scale(values: Array) -> Array:
        rounded = affine.rounded(values.astype("f4"), dtype)
        usable: Array = np.where((rounded > 0) & np.isfinite(rounded), rounded, tiny)
        return usable

    def decode(scale: Array, zero: Array) -> Array:
        codes = integer_codes(groups, scale, zero, half)
        codes -= zero[..., None]
        codes *= scale[..., None]
        return codes

    def with_ratio(ratio: float) -> tuple[Array, Array]:
        if symmetric:
            return as_scale(reach * np.float32(ratio / (half - 0.5))), np.zeros_like(reach)
        scale = as_scale((high - low) * np.float32(ratio / (2 * half - 1)))
        middle = (low + high) / 2  # whose range is narrowed on both sides
        zero = np.rint(np.clip(-0.5 - middle / scale, -half, half - 1))
        return scale, zero

    def fitted(scale: Array, zero: Array) -> tuple[Array, Array]:
        codes = integer_codes(groups, scale, zero, half) - zero[..., None]
        upper, lower = (weights * groups * codes).sum(axis=-1), (weights * codes * codes).sum(axis=-1)
        with np.errstate(all="ignore"):
            ratio = upper / lower
        return as_scale(np.where((lower > 0) & (ratio > 0), ratio, scale)), zero

    # If values are already whole steps of a scale, the largest is that of the last code on its side.
    last = ((half - 0.5) / (half - 1), (half - 0.5) / half) if symmetric else ()
    found = _least(groups, weights, decode, map(with_ratio, (1.0, *last, *(_CLIPPED if half == 8 else ()))))
    for _ in range(_FITS):
        found = _least(groups, weights, decode, (found, fitted(*found)))
    return found[0], found[1]


def nearest_fp4(values: Array) -> Array:
    """The E2M1 floats nearest to `values`, float32, ties to even."""
    import numpy as np

    size = np.minimum(np.abs(values), np.float32(FP4_VALUES[7]))
    # Steps are half the power of two below a value, and 0.5 below 1.
    step = (size.view("u4") & np.uint32(0xFF << 23)).view("f4")
    step *= np.float32(0.5)
    np.maximum(step, np.float32(0.5), out=step)
    size /= step
    np.rint(size, out=size)
    size *= step
    nearest: Array = np.copysign(size, values, out=size)
    return nearest


def fp4_values(scale: Array) -> Callable[[int, Array], Array]:
    """The stored values of one column, float32 [rows], given its group and what is rounded to nearest."""

    def stored(group: int, values: Array) -> Array:
        found: Array = nearest_fp4(values / scale[:, group]) * scale[:, group]
        return found

    return stored


def e4m3_scales(groups: Array, weights: Array, largest: Array, tensor_scale: float) -> Array:
    """Codes of positive E4M3 scales, uint8 [rows, groups], for NVFP4 with `tensor_scale`, which divides.

    `largest` are the codes derived from each group's maximum.
    """
    import numpy as np

    table = plain.decode("F8_E4M3", np.arange(_MOST_E4M3 + 1, dtype="u1").data) / np.float32(tensor_scale)

    def decode(codes: Array) -> Array:
        scale = table[codes][..., None]
        values: Array = nearest_fp4(groups / scale) * scale
        return values

    steps = (0, *(step for step in _E4M3_STEPS if step))
    near = (np.clip(largest.astype("i2") + step, 1, _MOST_E4M3).astype("u1") for step in steps)
    return _least(groups, weights, decode, ((codes,) for codes in near))[0]


def exponents(groups: Array, weights: Array, largest: Array) -> Array:
    """Biased exponents of the power-of-two scales of MXFP4, uint8: `largest` or a neighbour."""
    import numpy as np

    def decode(codes: Array) -> Array:
        scale = np.exp2(codes.astype("f4") - 127)[..., None]
        values: Array = nearest_fp4(groups / scale) * scale
        return values

    near = (np.clip(largest.astype("i2") + step, 1, 253).astype("u1") for step in (0, -1, 1))
    return _least(groups, weights, decode, ((codes,) for codes in near))[0]
