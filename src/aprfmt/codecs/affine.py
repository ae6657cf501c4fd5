"""MLX's affine quantization: groups of unsigned codes, each with a scale and a bias, in three tensors; numpy only.

A value is `scale * code + bias`, in the dtype of scale and bias, rounded after each of the two steps as MLX does. Codes
of 2 to 8 bits are packed contiguously into 32-bit words, lowest bits first. Quantization is bit-equal to `mx.quantize`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from aprfmt.codecs import plain
from aprfmt.codecs.dtypes import DTYPES
from aprfmt.codecs.split import SplitStream
from aprfmt.errors import RefusedError, UsageError
from aprfmt.io.pipe import Item
from aprfmt.io.source import Buffer
from aprfmt.types import Array, Shape

BITS = (2, 3, 4, 5, 6, 8)
GROUP_SIZES = (32, 64, 128)
PARTS = ("weight", "scales", "biases")
"""Suffixes of the tensors of a quantized module."""

_LEAST_SCALE = 1e-7


@dataclass(frozen=True, slots=True)
class Affine:
    """How the weights of a module are quantized.

    Attributes:
        bits: per code, one of BITS.
        group_size: values that share scale and bias, one of GROUP_SIZES.
    """

    bits: int = 4
    group_size: int = 64

    @property
    def word(self) -> str:
        """How options and recipes name it: "4g64"."""
        return f"{self.bits}g{self.group_size}"

    def part_shape(self, shape: Shape, part: str) -> Shape:
        """The shape of one of the PARTS of a weight of `shape`."""
        columns = shape[-1] * self.bits // 32 if part == "weight" else shape[-1] // self.group_size
        return (*shape[:-1], columns)


def parse_affine(word: str, group_size: int = 64) -> Affine:
    """The scheme of a word such as "4g64", or "4" with groups of `group_size`. Raises UsageError."""
    bits, _, group = word.lower().partition("g")
    numbers = [int(text) if text.isdecimal() and len(text) < 4 else text for text in (bits, group or str(group_size))]
    return check(*numbers)


def check(bits: object, group_size: object) -> Affine:
    """Builds a scheme. Raises UsageError if MLX does not support it."""
    if type(bits) is not int or bits not in BITS:
        known = ", ".join(map(str, BITS))
        raise UsageError(f"MLX does not support {bits!r}-bit affine quantization", hint=f"--bits is one of: {known}")
    if type(group_size) is not int or group_size not in GROUP_SIZES:
        known = ", ".join(map(str, GROUP_SIZES))
        raise UsageError(
            f"MLX does not support groups of {group_size!r} values", hint=f"--group-size is one of: {known}"
        )
    return Affine(bits, group_size)


def pack(codes: Array, bits: int) -> Array:
    """Packs codes, uint8 [..., n], into 32-bit words [..., n * bits / 32]; n * bits is a multiple of 32."""
    import numpy as np

    fields = np.ascontiguousarray(codes)
    while bits < 8:  # merge neighbours, then pairs, then quadruples
        fields = fields.view(f"<u{fields.itemsize * 2}")
        kind, n, wide = fields.dtype.type, fields.itemsize // 2, fields.itemsize // 2 * bits
        low = fields & kind((1 << wide) - 1)
        low |= fields >> kind(8 * n - wide) & kind((1 << wide) - 1 << wide)
        fields = low
        if 2 * wide % 8 == 0:
            break
    octets = fields.view("u1").reshape(*codes.shape[:-1], -1, fields.itemsize)
    octets = np.ascontiguousarray(octets[..., : fields.itemsize * bits // 8]).reshape(*codes.shape[:-1], -1)
    return octets.view("<u4")


def quantize(values: Array, affine: Affine) -> tuple[Array, Array, Array]:
    """Codes uint8 [groups, group_size], scales and biases float32 [groups] of float32 values [groups, group_size].

    The end of the range that is farther from zero is exact, and so is zero: the scale divides that end without a
    remainder.
    The caller rounds scales and biases to the weight's dtype; the codes are computed from the unrounded ones.
    """
    import numpy as np

    steps = np.float32((1 << affine.bits) - 1)
    low, high = values.min(axis=1), values.max(axis=1)
    below = np.abs(low) > np.abs(high)
    with np.errstate(all="ignore"):
        scale = np.maximum((high - low) / steps, np.float32(_LEAST_SCALE))
        np.negative(scale, out=scale, where=~below)
        edge = np.where(below, low, high)
        whole = np.rint(edge / scale)
        hit = whole != 0
        scale = np.divide(edge, whole, out=scale, where=hit)
        bias = np.where(hit, edge, np.float32(0))
        fields = values - bias[:, None]
        fields /= scale[:, None]
        np.rint(fields, out=fields)
        np.clip(fields, 0, steps, out=fields)
        return fields.astype("u1"), scale, bias


def dequantize(codes: Array, scales: Array, biases: Array, dtype: str) -> Array:
    """The float32 values that MLX computes in `dtype` from codes and broadcastable float32 scales and biases."""
    products = rounded(codes * scales, dtype)
    products += biases
    return rounded(products, dtype)


def round_trip(values: Array, affine: Affine, dtype: str) -> Array:
    """What quantization makes of float32 values [rows, columns], with scales and biases stored in `dtype`."""
    codes, scale, bias = quantize(values.reshape(-1, affine.group_size), affine)
    scale, bias = (rounded(numbers, dtype)[:, None] for numbers in (scale, bias))
    return dequantize(codes, scale, bias, dtype).reshape(values.shape)


def rounded(values: Array, dtype: str) -> Array:
    """Rounds float32 values to `dtype`."""
    if dtype == "F32":
        return values
    stored = plain.encode(dtype, values.reshape(-1)).view("u1").data
    return plain.decode(dtype, stored).astype("<f4", copy=False).reshape(values.shape)


# --- writing: three tensors of one stream of values ---


def quantized(name: str, dtype: str, scheme: Affine, values: Callable[[int], Iterable[Item]]) -> SplitStream:
    """The PARTS of a weight: `values` yields its stored bytes in `dtype`, in rows that consist of whole groups.

    Scales and biases are stored in `dtype`. Producing them raises RefusedError, which calls the weight `name`, for
    groups without a finite scale.
    """
    size = DTYPES[dtype].block_bytes
    unit = scheme.group_size * size

    def stored(numbers: Array) -> bytes:
        import numpy as np

        if not np.isfinite(numbers).all():
            raise RefusedError(
                "MLX: a group of values has no finite scale", tensor=name, hint="apr validate shows such values"
            )
        return plain.encode(dtype, numbers).tobytes()

    def make(data: Buffer) -> list[Buffer]:
        groups = plain.decode(dtype, data).astype("<f4", copy=False).reshape(-1, scheme.group_size)
        codes, scale, bias = quantize(groups, scheme)
        return [pack(codes.reshape(-1), scheme.bits).view("u1").data, stored(scale), stored(bias)]

    def sizes(n_bytes: int) -> list[int]:
        return [n_bytes // unit * part for part in (scheme.bits * scheme.group_size // 8, size, size)]

    return SplitStream(unit, values, sizes, make)


# --- blocks of GGML that hold the same codes and scales ---

BLOCK = 32
_HALVES = {"Q4_0": 8, "Q5_0": 16, "Q8_0": 128}
"""Offset of the codes of block types without a minimum."""
BITS_OF_BLOCKS = {"Q4_0": 4, "Q4_1": 4, "Q5_0": 5, "Q5_1": 5, "Q8_0": 8}
"""GGML types that are affine groups of 32, and the bits of their codes."""
_FITTING = {2: ("Q4_1",), 3: ("Q4_1",), 4: ("Q4_0", "Q4_1"), 5: ("Q5_0", "Q5_1"), 8: ("Q8_0",)}


def _field_names(dtype: str) -> list[tuple[str, str]]:
    scales = [("d", "<f2")] if dtype in _HALVES else [("d", "<f2"), ("m", "<f2")]
    high = [("high", "4u1")] if dtype.startswith("Q5") else []
    return [*scales, *high, ("codes", "32u1" if dtype == "Q8_0" else "16u1")]


def read_blocks(dtype: str, data: Buffer) -> tuple[Array, Array, Array]:
    """Codes uint8 [blocks, 32], scales and biases float32 [blocks] of GGML blocks, exactly."""
    import numpy as np

    blocks = np.frombuffer(data, np.dtype(_field_names(dtype)))
    stored, scales = blocks["codes"], blocks["d"].astype(np.float32)
    if dtype == "Q8_0":
        codes = stored ^ np.uint8(0x80)  # two's complement to an offset of 128
    else:
        codes = np.concatenate([stored & 15, stored >> 4], axis=1)
        if dtype.startswith("Q5"):
            codes |= np.unpackbits(blocks["high"], axis=1, bitorder="little") << 4
    with np.errstate(invalid="ignore"):  # a NaN scale yields a NaN bias
        biases = blocks["m"].astype(np.float32) if "m" in (blocks.dtype.names or ()) else scales * -_HALVES[dtype]
    return codes, scales, biases


def write_blocks(dtype: str, codes: Array, scales: Array, biases: Array) -> Buffer:
    """GGML blocks from codes uint8 [blocks, 32] and scales and biases, float32 [blocks], which must be exact in
    `dtype`.
    """
    import numpy as np

    blocks = np.empty(len(codes), np.dtype(_field_names(dtype)))
    blocks["d"] = scales
    if dtype not in _HALVES:
        blocks["m"] = biases
    if dtype == "Q8_0":
        blocks["codes"] = codes ^ np.uint8(0x80)
    else:
        blocks["codes"] = codes[:, :16] & 15 | codes[:, 16:] << 4
        if dtype.startswith("Q5"):
            blocks["high"] = np.packbits(codes >> 4, axis=1, bitorder="little")
    return blocks.view("u1").data


MOST_CHANGE = 2.0**-10
"""The largest accepted change of a value when scales are rounded to F16: that of two roundings."""


def fitting_blocks(bits: int, parts: Iterable[tuple[Array, Array]]) -> tuple[str, float] | None:
    """The GGML type for codes of `bits` bits with these scales and biases, and the change from rounding them to F16.

    The change is that of a value, relative to the largest that its group can represent. None if the type cannot store a
    bias, or a change exceeds MOST_CHANGE. `parts` are float32 or float64, and finite.
    """
    import numpy as np

    left, top, most = list(_FITTING.get(bits, ())), (1 << bits) - 1, 0.0
    for scales, biases in parts:
        left = [d for d in left if d not in _HALVES or np.array_equal(scales * -_HALVES[d], biases)]
        if not left:
            return None
        scale, bias = scales.astype("f8"), biases.astype("f8")
        with np.errstate(all="ignore"):
            moved = scales.astype("f2").astype("f8") - scale
            lifted = biases.astype("f2").astype("f8") - bias if left[0] not in _HALVES else -_HALVES[left[0]] * moved
            change = np.maximum(np.abs(lifted), np.abs(top * moved + lifted))
            largest = np.maximum(np.abs(bias), np.abs(top * scale + bias))
            relative = np.where(change == 0, 0, change / largest)
        most = max(most, float(np.nan_to_num(relative, nan=np.inf).max(initial=0)))
        if not most <= MOST_CHANGE:
            return None
    return (left[0], most) if left else None


def _is_half(values: Array) -> bool:
    """Whether every value is exact in F16."""
    import numpy as np

    with np.errstate(over="ignore"):
        same = np.array_equal(values.astype(np.float16).astype(np.float32), values)
    return bool(same and np.isfinite(values).all())


def regrouped(name: str, dtype: str, values: Callable[[int], Iterable[Item]]) -> SplitStream:
    """The PARTS of a weight of GGML blocks, with groups of 32 and scales in F16, exactly.

    `dtype` is one of BITS_OF_BLOCKS, `values` yields the blocks. Producing them raises RefusedError, which calls the
    weight `name`, if a bias overflows.
    """
    unit, bits = DTYPES[dtype].block_bytes, BITS_OF_BLOCKS[dtype]

    def make(data: Buffer) -> list[Buffer]:
        import numpy as np

        codes, scales, biases = read_blocks(dtype, data)
        if not _is_half(biases) or not _is_half(scales):
            raise RefusedError(
                f"MLX: the biases of {dtype} blocks with scales this large overflow F16",
                tensor=name,
                hint="requantize the values: --dtype bf16 --bits 4",
            )
        halves = [numbers.astype(np.float16).view("u1").data for numbers in (scales, biases)]
        return [pack(codes.reshape(-1), bits).view("u1").data, *halves]

    return SplitStream(unit, values, lambda n: [n // unit * part for part in (4 * bits, 2, 2)], make)
