"""Between float32 and the 16-bit floats, and from any of them to 8-bit floats: on several backends, with equal bytes.

Rounding is to nearest, ties to even; what rounds beyond the largest value becomes infinite, in E4M3, which has no
infinities, the largest value. A NaN stays one of its sign and is quiet: F16 and BF16 keep its top mantissa bits, for
8-bit floats it is the code of all ones, as in torch. BF16 is the upper half of a float32, so widening it keeps every
bit.

16-bit floats are handled as their codes, arrays of u2. What has but 65,536 cases is a table for numpy; so are the
8-bit targets of float32, which is first cut to 16 bits with the last one set where anything was cut off ("round to
odd"): with four bits to spare the second rounding then gives what one rounding would.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

from aprfmt.codecs import backend, libggml
from aprfmt.codecs.stream import blocks
from aprfmt.types import Array

if TYPE_CHECKING:
    pass

Overflow = Callable[[int], None] | None
"""Told how many values became infinite that were not; for E4M3 how many, infinities too, became its largest value."""

_Kernel = Callable[["Array", "Array"], None]
"""(values, out): both 1-d, contiguous and aligned. For NaN any NaN will do, `_settle` sees to its bits."""

EIGHT_BITS = ("F8_E4M3", "F8_E5M2")

# Codes, without sign, of what is too large: infinity, in E4M3 the largest value. Above them there are but NaNs.
_TOP = {"F16": 0x7C00, "BF16": 0x7F80, "F8_E4M3": 0x7E, "F8_E5M2": 0x7C}
_E4M3_END = 464.0  # half a step above the largest value

_SYMBOLS = {
    ("F16", "F32"): "ggml_cpu_fp16_to_fp32",
    ("F32", "F16"): "ggml_cpu_fp32_to_fp16",
    ("BF16", "F32"): "ggml_cpu_bf16_to_fp32",
    ("F32", "BF16"): "ggml_cpu_fp32_to_bf16",
}


def widen(dtype: str, codes: Array) -> Array:
    """Codes of F16 or BF16 as float32."""
    import numpy as np

    out = np.empty(codes.size, dtype="<f4")
    codes = np.require(codes, requirements=["C", "A"])
    _kernel(dtype, "F32")(codes, out)
    if dtype == "F16":
        _quieten(codes, out)
    return out


def narrow(dtype: str, values: Array, overflow: Overflow = None) -> Array:
    """Float32 values as codes of F16, BF16 or an 8-bit float."""
    import numpy as np

    values = np.require(values, requirements=["C", "A"])
    if dtype in EIGHT_BITS:
        out = np.empty(values.size, dtype="<u1")
        for part in blocks(values.size):
            bits = values[part].view("<u4")
            odd = (bits >> np.uint32(16)).astype("<u2")
            odd |= (bits & np.uint32(0xFFFF)) != 0
            out[part] = _looked_up("BF16", dtype, odd, overflow)
        return out
    out = np.empty(values.size, dtype="<u2")
    _kernel("F32", dtype)(values, out)
    settle(dtype, values, out, overflow)
    return out


def recode(src: str, dst: str, codes: Array, overflow: Overflow = None) -> Array:
    """Codes of F16 or BF16 as codes of the other one, or of an 8-bit float."""
    if dst in _CODES and _kernel("F32", dst) is not _NUMPY["F32", dst]:
        return narrow(dst, widen(src, codes), overflow)
    return _looked_up(src, dst, codes, overflow)


def settle(dtype: str, values: Array, out: Array, overflow: Overflow) -> None:
    """Gives the NaNs among `out`, the codes of `values`, their bits, and reports overflow.

    As a rule there is neither, which two maxima of the codes tell.
    """
    import numpy as np

    if not _has_special(dtype, out):
        return
    nans = np.isnan(values)
    if nans.any():
        bits = values[nans].astype("<f4", copy=False).view("<u4")
        sign = bits >> np.uint32(16) & np.uint32(0x8000)
        kept = bits >> np.uint32(13) & np.uint32(0x3FF) | np.uint32(0x7E00)
        out[nans] = sign | kept if dtype == "F16" else bits >> np.uint32(16) | np.uint32(0x40)
    if overflow is not None:
        n = int(np.count_nonzero((out & 0x7FFF == _TOP[dtype]) & np.isfinite(values)))
        if n:
            overflow(n)


def _has_special(dtype: str, out: Array) -> bool:
    """Whether a code of _TOP or a NaN is among them: the largest as signed and as unsigned numbers tell."""
    top, sign = _TOP[dtype], 1 << 8 * out.itemsize - 1
    signed = "<i2" if out.itemsize == 2 else "<i1"
    return bool(out.size) and bool(out.view(signed).max() >= top or out.max() >= sign | top)


def _quieten(codes: Array, out: Array) -> None:
    """Sets the quiet bit of each NaN: processors do it while widening, plain C and tables do not."""
    import numpy as np

    if _has_special("F16", codes):
        nans = codes & 0x7FFF > _TOP["F16"]
        out.view("<u4")[nans] |= np.uint32(0x400000)


# --- backends ---


def _kernel(src: str, dst: str) -> _Kernel:
    """The fastest implementation that is there and agrees with numpy's, which is the reference."""
    with_torch = "torch" in sys.modules or backend.forced() == "torch"
    return _chosen(src, dst, backend.order("ggml", *(["torch"] if with_torch else []), "numpy"))


@cache
def _chosen(src: str, dst: str, names: tuple[str, ...]) -> _Kernel:
    for name in names:
        kernel = _ggml(src, dst) if name == "ggml" else _torch(src, dst) if name == "torch" else None
        if kernel is not None and _agrees(src, dst, kernel):
            return kernel
    return _NUMPY[src, dst]


def _ggml(src: str, dst: str) -> _Kernel | None:
    library = _cpu_library()
    function = getattr(library, _SYMBOLS[src, dst], None) if library is not None else None
    if function is None:
        return None
    function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64], None
    return lambda values, out: function(values.ctypes.data, out.ctypes.data, values.size)


@cache
def _cpu_library() -> ctypes.CDLL | None:
    """libggml-cpu, beside libggml-base: the vectorised form of the same functions."""
    base = next(libggml.libraries(), None)
    if base is None:
        return None
    try:
        library = ctypes.CDLL(str(base.path.with_name(base.path.name.replace("base", "cpu"))))
        library.ggml_cpu_init()  # fills the table behind what is left over of whole vectors
    except (OSError, AttributeError):
        return None
    return library


def _torch(src: str, dst: str) -> _Kernel | None:
    try:
        import torch
    except ImportError:
        return None
    kinds = {"F16": torch.float16, "BF16": torch.bfloat16}

    def tensor(array: Array, dtype: str) -> torch.Tensor:
        if dtype == "F32":
            return torch.from_numpy(array)
        return torch.from_numpy(array.view("<i2")).view(kinds[dtype])

    def run(values: Array, out: Array) -> None:
        if not values.flags.writeable:  # torch warns, though nothing is written
            values = values.copy()
        tensor(out, dst).copy_(tensor(values, src))

    return run


def _agrees(src: str, dst: str, kernel: _Kernel) -> bool:
    """Whether `kernel` gives what numpy gives, NaNs aside: for all codes, or for float32 of every kind."""
    import numpy as np

    if src == "F32":
        ends = np.array(
            [0, 1, 0xFFF, 0x1000, 0x1001, 0x3000, 0x7FFF, 0x8000, 0x8001, 0x18000, 0x7FFFFF], "<u4"
        )
        values = (np.arange(512, dtype="<u4")[:, None] << np.uint32(23) | ends).reshape(-1).view("<f4")
        values = values[~np.isnan(values)]
    else:
        values = np.arange(65536, dtype="<u2")
        values = values[values & 0x7FFF <= _TOP[src]]
    kind = "<f4" if dst == "F32" else "<u2"
    got, want = np.empty(values.size, kind), np.empty(values.size, kind)
    kernel(values, got)
    _NUMPY[src, dst](values, want)
    return got.tobytes() == want.tobytes()


# --- numpy ---


def _bf16_to_f32(codes: Array, out: Array) -> None:
    import numpy as np

    bits = out.view("<u4")
    bits[:] = codes
    bits <<= np.uint32(16)


def _f16_to_f32(codes: Array, out: Array) -> None:
    import numpy as np

    np.take(_table("F16", "F32"), codes, out=out, mode="clip")


def _f32_to_f16(values: Array, out: Array) -> None:
    import numpy as np

    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        np.copyto(out.view("<f2"), values, casting="unsafe")


def _f32_to_bf16(values: Array, out: Array) -> None:
    import numpy as np

    for part in blocks(values.size):
        bits = values[part].view("<u4")
        rounded = bits >> np.uint32(16)
        rounded &= np.uint32(1)
        rounded += np.uint32(0x7FFF)
        rounded += bits
        rounded >>= np.uint32(16)
        out[part] = rounded
        # The sum carries a NaN of many ones over to zero.
        if bits.view("<i4").max() > 0x7F800000 or bits.max() > 0xFF800000:
            out[part][np.isnan(values[part])] = 0x7FC0


_CODES = ("F16", "BF16")

_NUMPY: dict[tuple[str, str], _Kernel] = {
    ("F16", "F32"): _f16_to_f32,
    ("F32", "F16"): _f32_to_f16,
    ("BF16", "F32"): _bf16_to_f32,
    ("F32", "BF16"): _f32_to_bf16,
}


def _looked_up(src: str, dst: str, codes: Array, overflow: Overflow) -> Array:
    import numpy as np

    out: Array = np.take(_table(src, dst), codes)
    if overflow is not None and _has_special(dst, out):
        n = int(np.count_nonzero(np.take(_lost(src, dst), codes)))
        if n:
            overflow(n)
    return out


@cache
def _table(src: str, dst: str) -> Array:
    """What each of the 65,536 codes of `src` becomes."""
    import numpy as np

    codes = np.arange(65536, dtype="<u2")
    if dst == "F32":
        return codes.view("<f2").astype("<f4")
    wide = np.empty(65536, dtype="<f4")
    _NUMPY[src, "F32"](codes, wide)
    if dst in EIGHT_BITS:
        return _rounded_to_eight_bits(dst, wide)
    out = np.empty(65536, dtype="<u2")
    _NUMPY["F32", dst](wide, out)
    settle(dst, wide, out, None)
    return out


@cache
def _lost(src: str, dst: str) -> Array:
    """Which codes of `src` are beyond the range of `dst`."""
    import numpy as np

    wide = widen(src, np.arange(65536, dtype="<u2"))
    if dst == "F8_E4M3":
        return np.greater(np.abs(wide), _E4M3_END)
    is_top = _table(src, dst) & (0x7FFF if dst in _CODES else 0x7F) == _TOP[dst]
    return np.asarray(is_top & np.isfinite(wide))


def _rounded_to_eight_bits(dtype: str, values: Array) -> Array:
    import numpy as np

    exponent_bits, mantissa_bits = FIELDS[dtype]
    # Infinity counts as the value that would stand there.
    steps = np.array([f8_value(code, exponent_bits, mantissa_bits) for code in range(_TOP[dtype] + 1)])
    middles = (steps[1:] + steps[:-1]) / 2
    nans = np.isnan(values)
    size = np.abs(np.where(nans, 0, values)).astype("<f8")
    low, high = np.searchsorted(middles, size, "left"), np.searchsorted(middles, size, "right")
    codes = np.where(low % 2 == 0, low, high)  # they differ in a tie: the even one
    codes = np.where(nans, 0x7F, codes) | np.signbit(values) * 0x80
    return np.asarray(codes, dtype="<u1")


FIELDS = {"F8_E4M3": (4, 3), "F8_E5M2": (5, 2)}
"""Exponent and mantissa bits."""


def f8_value(code: int, exponent_bits: int, mantissa_bits: int) -> float:
    """The value of a code without sign, special codes read as numbers."""
    exponent, mantissa = code >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
    bias = (1 << exponent_bits - 1) - 1
    fraction = mantissa / (1 << mantissa_bits)
    return fraction * 2.0 ** (1 - bias) if exponent == 0 else (1 + fraction) * 2.0 ** (exponent - bias)
