"""Plain dtypes: IEEE floats, bfloat16, 8-bit floats, integers, booleans. Arrays are 1-d and little-endian.

Casts run on several backends, with equal bytes. Rounding is to nearest, ties to even; overflow becomes infinity, in
E4M3, which has no infinities, the largest value. A NaN keeps its sign and is quiet: F16 and BF16 keep its top mantissa
bits, in 8-bit floats it is the code of all ones, as in torch. BF16 is the upper half of a float32, so widening is
exact.

16-bit floats are handled as their codes, u2 arrays. A table maps the 65,536 codes of BF16 to 8-bit floats; a float32 is
first cut to BF16 with the last bit set if anything was cut off ("round to odd"): with four spare bits the second
rounding is then equal to rounding once.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import cache

from aprfmt.codecs import backend
from aprfmt.codecs.dtypes import DTYPES
from aprfmt.codecs.stream import blocks
from aprfmt.io.source import Buffer
from aprfmt.types import Array

Overflow = Callable[[int], None] | None
"""Called with the number of finite values that became infinite; for E4M3 the number of values, infinities included,
that became its largest.
"""

_Kernel = Callable[[Array, Array], None]
"""(values, out): both 1-d, contiguous and aligned. Any NaN will do: `_settle` sets its bits."""

_MANTISSA_BITS = {"F8_E4M3": 3, "F8_E5M2": 2}
EIGHT_BITS = tuple(_MANTISSA_BITS)
ENCODABLE = ("F32", "F16", "BF16", "F64", *EIGHT_BITS)

# Codes, without sign, of overflow: infinity, in E4M3 the largest value. Above them are only NaNs.
_TOP = {"F16": 0x7C00, "BF16": 0x7F80, "F8_E4M3": 0x7E, "F8_E5M2": 0x7C}
_E4M3_END = 464.0  # half a step above the largest value

_SYMBOLS = {
    ("F16", "F32"): "ggml_cpu_fp16_to_fp32",
    ("F32", "F16"): "ggml_cpu_fp32_to_fp16",
    ("BF16", "F32"): "ggml_cpu_bf16_to_fp32",
    ("F32", "BF16"): "ggml_cpu_fp32_to_bf16",
}


def decode(dtype: str, data: Buffer | Array) -> Array:
    """Decodes stored bytes to a 1-d array: BF16 and 8-bit floats as float32, BOOL as bool, the rest as a view."""
    import numpy as np

    raw = np.frombuffer(data, dtype=DTYPES[dtype].numpy)
    if dtype == "BF16":
        return _widen(dtype, raw)
    if dtype.startswith("F8_"):
        return np.take(_values_of_codes(dtype), raw)
    return raw != 0 if dtype == "BOOL" else raw


def decode_into(dtype: str, data: Buffer, out: Array) -> None:
    """`decode` of a float dtype into the float32 array `out` of the same length."""
    import numpy as np

    if dtype in ("F16", "BF16"):
        _widen(dtype, np.frombuffer(data, DTYPES[dtype].numpy).view("<u2"), out)
    else:
        np.copyto(out, decode(dtype, data), casting="same_kind")


def encode_into(dtype: str, values: Array, out: memoryview, overflow: Overflow = None) -> None:
    """`encode` of float32 `values` into the bytes of `out`, whose length must match."""
    import numpy as np

    codes = np.frombuffer(out, DTYPES[dtype].numpy)
    if dtype in ("F16", "BF16") and codes.flags.aligned:
        _kernel("F32", dtype)(values, codes)
        _settle(dtype, values, codes, overflow)
    else:
        np.copyto(codes, encode(dtype, values, overflow))  # unlike memoryview's copy it releases the GIL


def encode(dtype: str, values: Array, overflow: Overflow = None) -> Array:
    """Encodes 1-d float `values` as `dtype`, one of ENCODABLE.

    F64 is converted to BF16 and 8-bit floats through float32. `overflow` is called with the number of finite values
    that became infinite, or E4M3's largest value.
    """
    source = values.dtype.str
    if source == DTYPES[dtype].numpy:
        return values
    if source == "<f2" and dtype != "F64":
        values, source = _widen("F16", values.view("<u2")), "<f4"
        if dtype == "F32":
            return values
    if dtype in ("F32", "F64"):
        return _resize(values, dtype, overflow)
    if source == "<f8" and dtype == "F16":  # rounded once, not through float32
        codes = _resize(values, "F16", None).view("<u2")
        _settle("F16", values, codes, overflow)
        return codes
    return _narrow(dtype, values if source == "<f4" else _resize(values, "F32", overflow), overflow)


def cast(src: str, dst: str, data: Buffer | Array, overflow: Overflow = None) -> Array:
    """Casts stored bytes from one float dtype to another: `encode` of `decode`, by a shorter way."""
    import numpy as np

    if src == "BF16" and dst in EIGHT_BITS:
        return _look_up(dst, np.frombuffer(data, dtype="<u2"), overflow)
    values = decode(src, data)
    return encode(dst, values if values.dtype.kind == "f" else values.astype("<f4"), overflow)


def _resize(values: Array, dtype: str, overflow: Overflow) -> Array:
    import numpy as np

    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        out = values.astype(DTYPES[dtype].numpy)
        if overflow is not None and values.dtype.itemsize > out.dtype.itemsize:
            n = int(np.count_nonzero(np.isinf(out) & np.isfinite(values)))
            if n:
                overflow(n)
    return out


def _widen(dtype: str, codes: Array, out: Array | None = None) -> Array:
    """Codes of F16 or BF16 as float32."""
    import numpy as np

    if out is None:
        out = np.empty(codes.size, dtype="<f4")
    codes = np.require(codes, requirements=["C", "A"])
    _kernel(dtype, "F32")(codes, out)
    if dtype == "F16" and _has_special("F16", codes):
        # Processors set the quiet bit of a NaN while widening; plain C and tables do not.
        out.view("<u4")[codes & 0x7FFF > _TOP["F16"]] |= np.uint32(0x400000)
    return out


def _narrow(dtype: str, values: Array, overflow: Overflow) -> Array:
    """Float32 values to codes of F16, BF16 or an 8-bit float."""
    import numpy as np

    values = np.require(values, requirements=["C", "A"])
    if dtype in EIGHT_BITS:
        out = np.empty(values.size, dtype="<u1")
        for part in blocks(values.size):
            bits = values[part].view("<u4")
            odd = (bits >> np.uint32(16)).astype("<u2")
            odd |= (bits & np.uint32(0xFFFF)) != 0
            out[part] = _look_up(dtype, odd, overflow)
        return out
    out = np.empty(values.size, dtype="<u2")
    _kernel("F32", dtype)(values, out)
    _settle(dtype, values, out, overflow)
    return out


def _settle(dtype: str, values: Array, out: Array, overflow: Overflow) -> None:
    """Sets the bits of NaNs in `out`, the codes of `values`, and reports overflow.

    Usually two maxima of the codes show that neither occurs.
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
    """Whether a code of _TOP or a NaN is present: the maxima as signed and as unsigned numbers tell."""
    top, sign = _TOP[dtype], 1 << 8 * out.itemsize - 1
    signed = "<i2" if out.itemsize == 2 else "<i1"
    return bool(out.size) and bool(out.view(signed).max() >= top or out.max() >= sign | top)


# --- backends ---


def _kernel(src: str, dst: str) -> _Kernel:
    """The fastest available implementation that agrees with numpy, the reference."""
    forced = backend.forced()
    return _chosen(src, dst, forced, "torch" in sys.modules or forced == "torch")


@cache
def _chosen(src: str, dst: str, forced: str | None, with_torch: bool) -> _Kernel:
    for name in backend.order("ggml", *(["torch"] if with_torch else []), "numpy"):
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
    """libggml-cpu, in the folder of libggml-base: vectorized versions of the same functions."""
    base = next(backend.libraries(), None)
    if base is None:
        return None
    try:
        library = ctypes.CDLL(str(base.path.with_name(base.path.name.replace("base", "cpu"))))
        library.ggml_cpu_init()  # initializes the table used for the remainder of whole vectors
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
        if not values.flags.writeable:  # torch warns, although nothing is written
            values = values.copy()
        tensor(out, dst).copy_(tensor(values, src))

    return run


def _agrees(src: str, dst: str, kernel: _Kernel) -> bool:
    """Whether `kernel` equals numpy, NaNs aside: for all codes, or for float32 of every kind."""
    import numpy as np

    if src == "F32":
        ends = np.array([0, 1, 0xFFF, 0x1000, 0x1001, 0x3000, 0x7FFF, 0x8000, 0x8001, 0x18000, 0x7FFFFF], "<u4")
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


# --- numpy: the reference ---


def _bf16_to_f32(codes: Array, out: Array) -> None:
    import numpy as np

    bits = out.view("<u4")
    bits[:] = codes
    bits <<= np.uint32(16)


def _f16_to_f32(codes: Array, out: Array) -> None:
    import numpy as np

    np.take(_f16_values(), codes, out=out, mode="clip")


@cache
def _f16_values() -> Array:
    import numpy as np

    return np.arange(65536, dtype="<u2").view("<f2").astype("<f4")


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
        # The sum would carry a NaN of many ones over to zero.
        if bits.view("<i4").max() > 0x7F800000 or bits.max() > 0xFF800000:
            out[part][np.isnan(values[part])] = 0x7FC0


_NUMPY: dict[tuple[str, str], _Kernel] = {
    ("F16", "F32"): _f16_to_f32,
    ("F32", "F16"): _f32_to_f16,
    ("BF16", "F32"): _bf16_to_f32,
    ("F32", "BF16"): _f32_to_bf16,
}


# --- 8-bit floats ---


def _look_up(dtype: str, codes: Array, overflow: Overflow) -> Array:
    """Looks up the 8-bit float codes of BF16 codes."""
    import numpy as np

    table, lost = _eight_bits(dtype)
    out = np.empty(codes.size, table.dtype)
    for part in blocks(codes.size):  # numpy widens the codes to 64 bits first
        np.take(table, codes[part], out=out[part], mode="clip")
    if overflow is not None and _has_special(dtype, out):
        n = int(np.count_nonzero(np.take(lost, codes)))
        if n:
            overflow(n)
    return out


@cache
def _eight_bits(dtype: str) -> tuple[Array, Array]:
    """The 8-bit float of each BF16 code, and whether it overflows."""
    import numpy as np

    values = (np.arange(65536, dtype="<u4") << np.uint32(16)).view("<f4")
    nans = np.isnan(values)
    size = np.abs(np.where(nans, 0, values)).astype("<f8")
    # Infinity counts as the value that its code would have.
    steps = _magnitudes(dtype)[: _TOP[dtype] + 1]
    middles = (steps[1:] + steps[:-1]) / 2
    low, high = np.searchsorted(middles, size, "left"), np.searchsorted(middles, size, "right")
    codes = np.where(low % 2 == 0, low, high)  # a tie: use the even one
    lost = size > _E4M3_END if dtype == "F8_E4M3" else (codes == _TOP[dtype]) & np.isfinite(values)
    codes = np.where(nans, 0x7F, codes) | np.signbit(values) * 0x80
    return codes.astype("<u1"), lost


def _magnitudes(dtype: str) -> Array:
    """The values of an 8-bit float's codes without sign, special codes read as numbers, float64 [128]."""
    import numpy as np

    bits = _MANTISSA_BITS[dtype]
    code = np.arange(128)
    exponent, mantissa, least = code >> bits, code & ((1 << bits) - 1), 2 - (1 << 6 - bits) - bits
    is_normal = exponent > 0
    return np.asarray(np.ldexp(mantissa + (is_normal << bits), least + np.where(is_normal, exponent - 1, 0)))


@cache
def _values_of_codes(dtype: str) -> Array:
    """The 256 values of an 8-bit float (OCP 8-bit floating point and microscaling formats), as float32."""
    import numpy as np

    if dtype == "F8_E8M0":  # a power of two, 255 is NaN
        values = np.ldexp(1.0, np.arange(256) - 127)
        values[255] = np.nan
        return values.astype("<f4")
    values = _magnitudes(dtype)
    values[127] = np.nan  # E4M3's only special code; E5M2 has infinities like IEEE floats
    if dtype == "F8_E5M2":
        values[124:] = [np.inf, np.nan, np.nan, np.nan]
    return np.concatenate([values, -values]).astype("<f4")
