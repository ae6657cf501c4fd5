"""Quantization for serving engines (vLLM, SGLang), in the tensors that they load: round to nearest, or a scale search.

Arithmetic and layouts are those of compressed-tensors; `fp8-block` is that of DeepSeek V3. Each step is rounded to the
dtype of the weight, as in torch. `in_layout` gives the same codes in the layouts of GPTQ, AWQ and ModelOpt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise

from aprfmt.codecs import affine, plain, serving_search
from aprfmt.codecs.error_feedback import FeedbackBlock, with_feedback
from aprfmt.codecs.packed_floats import FP4_VALUES
from aprfmt.codecs.serving_layouts import awq_parts, gptq_parts
from aprfmt.codecs.stream import BLOCK, blocks
from aprfmt.errors import RefusedError
from aprfmt.io.source import Buffer
from aprfmt.types import Array, Shape

NVFP4_MOST = 448.0 * 6.0
"""The maximum of NVFP4 before the tensor scale."""

_BLOCK = 128
_EPS = {"BF16": 2.0**-7, "F16": 2.0**-10, "F32": 2.0**-23}
"""The scale of a group of zeros."""

_INFINITE = 0x7F80
"""The bfloat16 code of infinity; above it are NaNs."""

_SHIFTABLE = range(127 - 103, 127 + 104)
"""Exponents of scales that shift the index into `_float8_quotients` to a place of the same quotient."""


@dataclass(frozen=True, slots=True)
class Part:
    """One of the tensors of a quantized weight.

    Attributes:
        ending: suffix of the weight's name, or replacement of its "weight".
        dtype: "" for that of the weight.
        height, width: rows and columns of the weight per element; a width of 0 is a whole row.
        transposed: whether it is stored as [inputs, outputs].
    """

    ending: str
    dtype: str
    height: int = 1
    width: int = 1
    transposed: bool = False

    def shape(self, rows: int, columns: int) -> Shape:
        """The shape for a weight of this many rows and columns."""
        down, across = -(-rows // self.height), -(-columns // self.width) if self.width else 1
        return (across, down) if self.transposed else (down, across)


@dataclass(frozen=True, slots=True)
class Importance:
    """What decides over the codes of a weight beside its values.

    Attributes:
        weights: importance of the columns, float32 [columns].
        feedback: how columns make up for the errors of each other, for all columns; empty: each value is rounded alone.
    """

    weights: Array
    feedback: Sequence[FeedbackBlock] = ()


Encode = Callable[["ServingScheme", Array, str, float, "Importance | None"], Sequence[Buffer]]


@dataclass(frozen=True, slots=True)
class ServingScheme:
    """A way to store weights.

    Attributes:
        id: the value of `--quantize`.
        format: compressed-tensors' name of the layout; "fp8" for fp8-block; or one of LAYOUTS.
        bits, kind: of a code: "int" or "float".
        group: values per scale, 0 for a whole row.
        symmetric: whether zero points are absent.
        parts: tensors of a weight; the first holds the codes.
        encode: makes the parts of float32 [rows, columns], given the weight's dtype, the scale of the tensor and what
            decides over scales and codes; None takes scales from the largest value and rounds to nearest.
        rows: quantized together.
        inputs: the config of activations; None: not quantized.
        scale_dtype: of scales, if the config states it.
        encode_bf16: a faster `encode` of bfloat16 codes uint16 [rows, columns], which checks that they are finite.
    """

    id: str
    format: str
    bits: int
    kind: str
    group: int
    parts: tuple[Part, ...]
    encode: Encode
    symmetric: bool = True
    rows: int = 1
    inputs: tuple[tuple[str, object], ...] | None = None
    scale_dtype: str | None = None
    encode_bf16: Callable[[Array], Sequence[Buffer]] | None = None

    @property
    def strategy(self) -> str:
        """compressed-tensors' name of the granularity of scales."""
        if self.format == "fp8":
            return "block"
        return "tensor_group" if self.has_tensor_scale else "group" if self.group else "channel"

    @property
    def is_searched(self) -> bool:
        """Whether scales can be searched: for small groups of 4-bit codes."""
        return self.bits == 4

    @property
    def has_tensor_scale(self) -> bool:
        """Whether a scale of the tensor is beside those of its groups."""
        return self.format in ("nvfp4-pack-quantized", "modelopt")

    @property
    def is_transposed(self) -> bool:
        """Whether inputs run down and outputs across in its parts, which are made of the whole weight."""
        return self.parts[0].transposed

    def divides(self, rows: int, columns: int) -> bool:
        """Whether a weight of this shape can be stored."""
        per_element = self.parts[0].width
        fills_words = not self.is_transposed or rows % self.rows == 0
        return columns > 0 and fills_words and columns % max(self.group, per_element, 1) == 0

    def settings(self) -> dict[str, object]:
        """The config of the weights."""
        found: dict[str, object] = {
            "num_bits": self.bits, "type": self.kind, "symmetric": self.symmetric, "strategy": self.strategy,
            "group_size": self.group or None, "dynamic": False,
        }  # fmt: skip
        return found | ({"scale_dtype": self.scale_dtype} if self.scale_dtype else {})


def not_finite(name: str | None = None) -> RefusedError:
    """The error for a weight that cannot be quantized."""
    return RefusedError("the weight has NaN or infinite values", tensor=name, hint="apr validate shows them")


# --- arithmetic ---


def _rounded(values: Array, dtype: str) -> Array:
    return affine.rounded(values, dtype)


def _largest(groups: Array) -> Array:
    import numpy as np

    largest: Array = np.abs(groups).max(axis=-1)
    return largest


def _scales(largest: Array, half: float, dtype: str) -> Array:
    """The scales that map the largest values of groups to `half`."""
    import numpy as np

    scale = _rounded(largest / np.float32(half), dtype)
    return np.where(scale == 0, np.float32(_EPS[dtype]), scale)


def _stored(values: Array, dtype: str) -> Buffer:
    return plain.encode(dtype, values.reshape(-1)).view("u1").data


def _grouped(values: Array, group: int) -> Array:
    return values.reshape(len(values), -1, group or values.shape[1])


def _encode_float8(
    scheme: ServingScheme, values: Array, source_dtype: str, global_scale: float, importance: Importance | None = None
) -> list[Buffer]:
    return _float8(values, source_dtype)


def _float8(values: Array, source_dtype: str) -> list[Buffer]:
    scale = _scales(_largest(values), 448.0, source_dtype)
    scaled = values / scale[:, None]
    codes: Buffer
    if source_dtype == "BF16":  # the quotient is at most 448 but for the rounding of the scale: nothing to clip
        codes = plain.cast("BF16", "F8_E4M3", plain.encode("BF16", scaled.reshape(-1))).data
    else:
        codes = _e4m3(_rounded(scaled, source_dtype))
    return [codes, _stored(scale, source_dtype)]


def _encode_bf16_as_float8(values: Array) -> list[Buffer]:
    """`_float8` of bfloat16 codes, with one lookup per weight instead of arithmetic.

    A quotient of two bfloat16 numbers depends on their mantissas and on the difference of their exponents. Each
    mantissa of a scale has a table of the 8-bit floats of all weights; the exponent of the scale shifts the index.
    """
    import numpy as np

    (rows, columns), negative = values.shape, values.max(axis=1)  # the codes of negative numbers are the larger ones
    positive = np.maximum(values.view("<i2").max(axis=1), 0).view("<u2")
    largest = np.maximum(positive, negative & np.uint16(0x7FFF))
    if largest.max() >= _INFINITE:
        raise not_finite()
    scale = _float8_scales()[largest]
    exponents, mantissas = np.divmod(scale.astype("i8"), 128)
    if exponents.min() < _SHIFTABLE.start or exponents.max() >= _SHIFTABLE.stop:
        return _float8(plain.decode("BF16", values.reshape(-1)).reshape(values.shape), "BF16")
    start = ((mantissas << 16) - (exponents - 127 << 7))[:, None]
    table, codes = _float8_quotients(), np.empty(values.shape, "u1")
    parts = [*blocks(rows, max(1, BLOCK // columns))]
    indices = np.empty((parts[0].stop, columns), "i8")
    with _unbuffered():
        for part in parts:
            index = indices[: part.stop - part.start]
            np.copyto(index, values[part])
            index += start[part]
            np.take(table, index, out=codes[part], mode="wrap")
    return [codes.reshape(-1).data, scale.view("u1").data]


@cache
def _float8_scales() -> Array:
    """The scale of a row, as a bfloat16 code, by the code of its largest value without sign."""
    import numpy as np

    return plain.encode("BF16", _scales(plain.decode("BF16", np.arange(_INFINITE, dtype="<u2")), 448.0, "BF16"))


@cache
def _float8_quotients() -> Array:
    """The 8-bit floats of all bfloat16 codes, divided by a scale of 1 to 2: 65,536 for each mantissa of the scale, 1-d.

    Quotients above 464 do not occur. Their places hold the zeros of small numbers of the other sign, whose index the
    exponent of the scale shifts there, for small positive numbers into the table before.
    """
    import numpy as np

    low, high, end = 127 - 11 << 7, 127 + 10 << 7, 127 + 17 << 7
    numbers, scales = (plain.decode("BF16", np.arange(*ends, dtype="<u2")) for ends in ((low, high), (0x3F80, 0x4000)))
    codes = plain.cast("BF16", "F8_E4M3", plain.encode("BF16", (numbers / scales[:, None]).reshape(-1)))
    table = np.zeros((len(scales), 2, 1 << 15), "u1")
    table[:, 0, low:high] = codes.reshape(len(scales), -1)
    table[:, 1] = table[:, 0] | 0x80
    table[:, 0, end:], table[:, 1, end:] = 0x80, 0
    return table.reshape(-1)


@contextmanager
def _unbuffered() -> Iterator[None]:
    """Keeps numpy from copying the rows that it combines with one value each through a buffer."""
    import numpy as np

    size = np.setbufsize(16)
    try:
        yield
    finally:
        np.setbufsize(size)


def _e4m3(values: Array) -> Buffer:
    import numpy as np

    return _stored(np.clip(values, -448, 448), "F8_E4M3")


def _encode_float8_blocks(
    scheme: ServingScheme, values: Array, source_dtype: str, global_scale: float, importance: Importance | None = None
) -> list[Buffer]:
    import numpy as np

    rows, columns = values.shape
    high, wide = -(-rows // _BLOCK), -(-columns // _BLOCK)
    padded = np.zeros((high * _BLOCK, wide * _BLOCK), "f4")
    padded[:rows, :columns] = values
    blocks = padded.reshape(high, _BLOCK, wide, _BLOCK)
    most = np.abs(blocks).max(axis=(1, 3))
    scale = np.where(most == 0, np.float32(1), most / np.float32(448))
    codes = (blocks / scale[:, None, :, None]).reshape(padded.shape)[:rows, :columns]
    return [_e4m3(np.ascontiguousarray(codes)), _stored(scale, "F32")]


def _encode_integers(
    scheme: ServingScheme, values: Array, source_dtype: str, global_scale: float, importance: Importance | None = None
) -> Sequence[Buffer]:
    """Codes packed into words, or bytes if there is at most one scale per row."""
    dtype = scheme.parts[-1].dtype if scheme.is_transposed else source_dtype
    codes, scale, zero = _quantize_integers(scheme, values, dtype, importance)
    return pack_integers(scheme, codes, scale, zero, dtype)


def _quantize_integers(
    scheme: ServingScheme, values: Array, dtype: str, importance: Importance | None
) -> tuple[Array, Array, Array]:
    """Unsigned codes [rows, columns], scales that `dtype` holds and unsigned zero points [rows, groups]."""
    import numpy as np

    half, groups = 1 << scheme.bits - 1, _grouped(values, scheme.group)
    if importance is not None:
        own = _grouped(importance.weights[None], scheme.group)
        scale, zero = serving_search.integer_scales(groups, own, half, dtype, symmetric=scheme.symmetric)
        scale, zero, _ = _without_zero(scheme, groups, scale, zero, dtype)
        if importance.feedback:
            stored = serving_search.integer_values(scale, zero, half)
            groups = _with_feedback(scheme, values, importance, stored)
        codes = serving_search.integer_codes(groups, scale, zero, half)
    elif scheme.symmetric:
        scale = _scales(_largest(groups), half - 0.5, dtype)
        zero = np.zeros_like(scale)
        codes = np.rint(np.clip(_rounded(groups / scale[..., None], dtype), -half, half - 1))
    else:
        low, high = np.minimum(groups.min(axis=-1), 0), np.maximum(groups.max(axis=-1), 0)
        scale = _rounded(_rounded(high - low, dtype) / np.float32(2 * half - 1), dtype)
        with np.errstate(divide="ignore", invalid="ignore"):
            zero = _rounded(-half - _rounded(low / scale, dtype), dtype)
        zero = np.rint(np.clip(np.nan_to_num(zero), -half, half - 1))
        scale = np.where(scale == 0, np.float32(_EPS[dtype]), scale)
        scaled = _rounded(_rounded(groups / scale[..., None], dtype) + zero[..., None], dtype)
        codes = np.rint(np.clip(scaled, -half, half - 1))
        scale, zero, changed = _without_zero(scheme, groups, scale, zero, dtype)
        if changed is not None:
            codes = np.where(changed[..., None], serving_search.integer_codes(groups, scale, zero, half), codes)
    if not np.isfinite(scale).all():
        raise RefusedError(
            f"the weight has values too large for {dtype} scales", hint="choose another scheme or --format hf"
        )
    return (codes + half).astype("u1").reshape(values.shape), scale, (zero + half).astype("u1")


def _without_zero(
    scheme: ServingScheme, groups: Array, scale: Array, zero: Array, dtype: str
) -> tuple[Array, Array, Array | None]:
    """Scales and zero points that the layout can store, and which groups they change: GPTQ's has no zero point of 0."""
    import numpy as np

    half = 1 << scheme.bits - 1
    if scheme.format != "gptq" or not (least := zero == -half).any():  # groups without negative values
        return scale, zero, None
    return (
        np.where(least, _scales(_largest(groups), 2 * half - 2, dtype), scale),
        np.where(least, 1 - half, zero),
        least,
    )


def _with_feedback(
    scheme: ServingScheme, values: Array, importance: Importance, stored: Callable[[int, Array], Array]
) -> Array:
    """What to round to nearest, in groups; `stored(group, values)` are the values that readers see."""
    size = scheme.group or values.shape[1]
    adjusted = with_feedback(values, importance.feedback, lambda column, rows: stored(column // size, rows))
    return _grouped(adjusted, scheme.group)


def pack_integers(scheme: ServingScheme, codes: Array, scale: Array, zero: Array, dtype: str) -> Sequence[Buffer]:
    """The parts of a few rows: unsigned codes uint8 [rows, columns], scales and zero points [rows, groups].

    Scales are stored in `dtype`. Transposed parts are the columns that these rows become, line by line.
    """
    if scheme.is_transposed:
        pack = gptq_parts if scheme.format == "gptq" else awq_parts
        return pack(codes, scale.astype("f2"), zero, scheme.bits)
    if scheme.parts[0].dtype == "I8":
        return [(codes ^ 0x80).data, _stored(scale, dtype)]
    parts = [_words(codes, scheme.bits), _stored(scale, dtype)]
    return parts if scheme.symmetric else [*parts, pack_zero_points(zero, scheme.bits)]


def _words(codes: Array, bits: int) -> Buffer:
    return affine.pack(codes, bits).view("u1").reshape(-1).data


def pack_zero_points(zero: Array, bits: int) -> Buffer:
    """Packs unsigned zero points [rows, groups] into words along the rows, the last of which may be partial."""
    import numpy as np

    per_word = 32 // bits
    padded = np.zeros((-(-len(zero) // per_word) * per_word, zero.shape[1]), "u1")
    padded[: len(zero)] = zero
    words = affine.pack(np.ascontiguousarray(padded.T), bits)  # [groups, words]
    return np.ascontiguousarray(words.T).view("u1").reshape(-1).data


def _fp4(values: Array) -> Array:
    """Codes of the nearest E2M1 floats, ties to even; uint8, two per byte along the last axis."""
    import numpy as np

    size = np.abs(values)
    index = np.zeros(values.shape, "u1")
    for i, (low, high) in enumerate(pairwise(FP4_VALUES[:8])):
        middle = np.float32((low + high) / 2)
        index += size > middle if i % 2 == 0 else size >= middle
    index |= (values < 0).view("u1") << 3
    pairs: Array = index[..., 0::2] | index[..., 1::2] << 4
    return pairs


def _encode_nvfp4(
    scheme: ServingScheme, values: Array, source_dtype: str, global_scale: float, importance: Importance | None = None
) -> list[Buffer]:
    import numpy as np

    groups, own = _grouped(values, scheme.group), np.float32(global_scale)
    wanted = np.clip(_rounded(_largest(groups) / np.float32(6), source_dtype) * own, 0, 448)
    codes = plain.encode("F8_E4M3", wanted.reshape(-1)).view("u1")
    if importance is not None:
        largest = codes.reshape(wanted.shape)
        weights = _grouped(importance.weights[None], scheme.group)
        found = serving_search.e4m3_scales(groups, weights, largest, global_scale)
        codes = np.where(largest == 0, largest, found).reshape(-1)
    scale = plain.decode("F8_E4M3", codes.data).reshape(wanted.shape)
    zero = scale == 0
    scale, stored = np.where(zero, np.float32(0.125), scale), codes.reshape(wanted.shape).copy()
    stored[zero] = _EIGHTH
    if importance is not None and importance.feedback:
        groups = _with_feedback(scheme, values, importance, serving_search.fp4_values(scale / own))
    return [_fp4(groups / (scale / own)[..., None]).reshape(-1).data, stored.reshape(-1).data]


_EIGHTH = 0x20
"""0.125 in E4M3: the scale of a group of zeros."""


def _exponents(groups: Array, dtype: str, offset: int) -> Array:
    """Biased exponents of the powers of two that map the largest value of a group near the largest code."""
    import numpy as np

    bits = _largest(groups).astype("f4").view("u4")
    # From 7/4 of a power of two on, the next one is used.
    exponent = (bits + (1 << 21) >> 23).astype("i4") - offset
    found: Array = np.clip(exponent, 0, 254).astype("u1")
    if dtype == "F16":  # where a scale in F16 would be zero
        found[found < 127 - 24] = 127
    return found


def _encode_mx(
    scheme: ServingScheme, values: Array, source_dtype: str, global_scale: float, importance: Importance | None = None
) -> list[Buffer]:
    """MXFP4 or MXFP8: codes and E8M0 scales of each group. Ignores `global_scale`, which is NVFP4's."""
    import numpy as np

    groups = _grouped(values, scheme.group)
    exponents = _exponents(groups, source_dtype, 2 if scheme.bits == 4 else 8)
    if importance is not None:
        weights = _grouped(importance.weights[None], scheme.group)
        exponents = serving_search.exponents(groups, weights, exponents)
        if importance.feedback:
            stored = serving_search.fp4_values(np.exp2(exponents.astype("f4") - 127))
            groups = _with_feedback(scheme, values, importance, stored)
    with np.errstate(over="ignore"):
        scaled = groups / np.exp2(exponents.astype("f4") - 127)[..., None]
    codes = _fp4(scaled).reshape(-1).data if scheme.bits == 4 else _e4m3(scaled)
    return [codes, exponents.reshape(-1).data]


# --- the table ---

_TOKENS = (("type", "float"), ("num_bits", 8), ("symmetric", True), ("strategy", "token"), ("dynamic", True))
_INT_TOKENS = (("type", "int"), *_TOKENS[1:])
_SCALE = Part("weight_scale", "", width=0)


def _packed(bits: int, group: int, symmetric: bool) -> ServingScheme:
    name = f"w{bits}a16" + (f"-g{group}" if group != (128 if bits == 4 else 0) else "") + ("" if symmetric else "-asym")
    per_word = 32 // bits
    parts = [Part("weight_packed", "I32", width=per_word), Part("weight_scale", "", width=group)]
    parts += [] if symmetric else [Part("weight_zero_point", "I32", height=per_word, width=group)]
    rows = 1 if symmetric else per_word
    return ServingScheme(name, "pack-quantized", bits, "int", group, tuple(parts), _encode_integers, symmetric, rows)


_SCHEMES = (
    ServingScheme("fp8-dynamic", "float-quantized", 8, "float", 0, (Part("weight", "F8_E4M3"), _SCALE), _encode_float8,
                  inputs=_TOKENS, encode_bf16=_encode_bf16_as_float8),
    ServingScheme("fp8-block", "fp8", 8, "float", 0,
                  (Part("weight", "F8_E4M3"), Part("weight_scale_inv", "F32", _BLOCK, _BLOCK)), _encode_float8_blocks,
                  rows=_BLOCK),
    ServingScheme("w8a8", "int-quantized", 8, "int", 0, (Part("weight", "I8"), _SCALE), _encode_integers,
                  inputs=_INT_TOKENS),
    _packed(8, 0, True), _packed(8, 32, True),
    *(_packed(4, group, symmetric) for symmetric in (True, False) for group in (128, 64, 32)),
    ServingScheme("nvfp4a16", "nvfp4-pack-quantized", 4, "float", 16,
                  (Part("weight_packed", "U8", width=2), Part("weight_scale", "F8_E4M3", width=16)), _encode_nvfp4,
                  scale_dtype="torch.float8_e4m3fn"),
    ServingScheme("mxfp4", "mxfp4-pack-quantized", 4, "float", 32,
                  (Part("weight_packed", "U8", width=2), Part("weight_scale", "U8", width=32)), _encode_mx,
                  scale_dtype="torch.uint8"),
    ServingScheme("mxfp8", "mxfp8-quantized", 8, "float", 32,
                  (Part("weight", "F8_E4M3"), Part("weight_scale", "U8", width=32)), _encode_mx,
                  scale_dtype="torch.uint8"),
)  # fmt: skip

SERVING = {scheme.id: scheme for scheme in _SCHEMES}
"""Every scheme by its id."""

_ALIASES = {
    "fp8": "fp8-dynamic", "int8": "w8a8", "mxfp4a16": "mxfp4", "mxfp8a16": "mxfp8",
    "w4a16-g128": "w4a16", "w4a16-g128-asym": "w4a16-asym",
}  # fmt: skip


def find_scheme(name: str) -> ServingScheme | None:
    """The scheme `name`, also as llm-compressor spells it (`W4A16_ASYM`); None if unknown."""
    word = name.lower().replace("_", "-")
    return SERVING.get(_ALIASES.get(word, word))


LAYOUTS = ("gptq", "awq", "modelopt")
"""Layouts of other tools than compressed-tensors that engines load."""


@cache
def in_layout(name: str, layout: str) -> ServingScheme | None:
    """The scheme called `name` with the tensors of one of LAYOUTS; None where it has no such form.

    GPTQ holds integers of 4 and 8 bits, AWQ of 4; those of both have zero points and F16 scales. ModelOpt holds NVFP4.
    """
    scheme = SERVING[name]
    if layout == "modelopt":
        codes = Part("weight", "U8", width=2)
        return replace(scheme, format=layout, parts=(codes, scheme.parts[1])) if scheme.has_tensor_scale else None
    if scheme.format != "pack-quantized" or (layout == "awq" and scheme.bits != 4):
        return None
    per_word = 32 // scheme.bits
    codes = Part("qweight", "I32", transposed=True, **{"width" if layout == "gptq" else "height": per_word})
    zeros = Part("qzeros", "I32", per_word, scheme.group, transposed=True)
    parts = (codes, zeros, Part("scales", "F16", width=scheme.group, transposed=True))
    return replace(scheme, format=layout, parts=parts, rows=per_word)


_SAME_WEIGHTS = ("num_bits", "type", "symmetric", "strategy", "group_size")


def scheme_of(settings: Mapping[str, object]) -> ServingScheme | None:
    """The scheme that a `quantization_config` describes; None for another one, and for several in one folder."""
    groups = settings.get("config_groups")
    if settings.get("quant_method") == "fp8":
        return SERVING["fp8-block"] if settings.get("weight_block_size") == [_BLOCK, _BLOCK] else None
    if settings.get("quant_method") != "compressed-tensors" or not isinstance(groups, dict) or len(groups) != 1:
        return None
    group = next(iter(groups.values()))
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(weights, dict):
        return None
    form = group.get("format") or settings.get("format")
    for scheme in _SCHEMES:
        own = scheme.settings()
        same = all((weights.get(key) or None) == (own[key] or None) for key in _SAME_WEIGHTS)
        if scheme.format == form and same and (group.get("input_activations") is None) == (scheme.inputs is None):
            return scheme
    return None


def stored_scheme(settings: Mapping[str, object]) -> ServingScheme | None:
    """The scheme of a `quantization_config` in its layout: that of `scheme_of`, GPTQ, AWQ or ModelOpt's NVFP4."""
    method = str(settings.get("quant_method"))
    if method == "modelopt" and settings.get("quant_algo") in ("NVFP4", "W4A16_NVFP4"):
        return in_layout("nvfp4a16", method)
    if method not in ("gptq", "awq"):
        return scheme_of(settings)
    bits, group = settings.get("bits", settings.get("w_bit")), settings.get("group_size", settings.get("q_group_size"))
    symmetric = method == "gptq" and settings.get("sym") is True
    fitting = (
        scheme.id
        for scheme in _SCHEMES
        if (scheme.format, scheme.bits, scheme.group or -1) == ("pack-quantized", bits, group)
        and scheme.symmetric == symmetric
    )
    name = next(fitting, None)
    return in_layout(name, method) if name is not None else None
