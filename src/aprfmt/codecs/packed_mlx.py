"""Quantized weights of MLX."""

from __future__ import annotations

from aprfmt.codecs import affine, plain
from aprfmt.codecs.dtypes import n_elements
from aprfmt.codecs.packed import (
    CONFIG_HINT,
    FLOATS,
    Decoded,
    Integers,
    Settings,
    StoredTensors,
    Tile,
    expect,
    refusal,
    region,
    unpack,
)
from aprfmt.codecs.packed_floats import FP4_VALUES
from aprfmt.codecs.stream import TensorSource
from aprfmt.errors import UsageError
from aprfmt.types import Array, Shape

_MLX = "MLX"


def mlx_settings(settings: Settings, module: str) -> Settings:
    """The settings of `module`: its own entry, else the global one."""
    own = settings.get(module)
    return own if isinstance(own, dict) else settings


def _mlx_fields(sources: StoredTensors, bits: int, group: int) -> tuple[Shape, int, Tile]:
    """The shape of the weight, its rows, and a decoder of the codes of a tile."""
    words, scales = sources[".weight"], sources[".scales"]
    expect(_MLX, words, ("U32",))
    *lead, n_words = words.shape
    if len(words.shape) < 2 or n_words * 32 % bits:
        raise refusal(
            _MLX, words.name, f"{list(words.shape)} words do not hold whole rows of {bits}-bit codes", CONFIG_HINT
        )
    n_in = n_words * 32 // bits
    if n_in % group or scales.shape != (*lead, n_in // group):
        what = f"{list(words.shape)} words of {bits}-bit codes in groups of {group} do not match scales of shape"
        raise refusal(_MLX, words.name, f"{what} {list(scales.shape)}", CONFIG_HINT)

    def fields(rows: range, columns: range) -> Array:
        first, stop = columns.start // 32, min(-(-columns.stop // 32) * bits, n_words)
        found = unpack(region(words, n_words, rows, range(first * bits, stop)), bits)
        skip = columns.start - 32 * first
        return found[:, skip : skip + len(columns)]

    return (*lead, n_in), n_elements(tuple(lead)), fields


def _mlx_numbers(sources: StoredTensors, settings: Settings, default: tuple[int, int]) -> tuple[int, int]:
    """Bits and group size of a weight."""
    words = sources[".weight"]
    own = mlx_settings(settings, words.name.removesuffix(".weight"))
    bits = own.get("bits", settings.get("bits", default[0]))
    group = own.get("group_size", settings.get("group_size") if own is settings else default[1])
    try:
        scheme = affine.check(bits, group)
    except UsageError as error:
        raise refusal(_MLX, words.name, error.message, CONFIG_HINT) from error
    return scheme.bits, scheme.group_size


def _mlx_mode(sources: StoredTensors, settings: Settings) -> str:
    own = mlx_settings(settings, sources[".weight"].name.removesuffix(".weight"))
    return str(own.get("mode", settings.get("mode", "affine") if own is settings else "affine"))


def mlx_affine(sources: StoredTensors, settings: Settings) -> Decoded:
    """MLX's affine mode: codes in words, [..., out, in * bits / 32]; scales and biases [..., out, groups]."""
    import numpy as np

    words, scales, biases = sources[".weight"], sources[".scales"], sources[".biases"]
    if (mode := _mlx_mode(sources, settings)) != "affine":
        raise refusal(_MLX, words.name, f"has biases, which mode {mode!r} does not use", CONFIG_HINT)
    bits, group = _mlx_numbers(sources, settings, (4, 64))
    shape, _, fields = _mlx_fields(sources, bits, group)
    expect(_MLX, scales, FLOATS)
    expect(_MLX, biases, (scales.dtype,), scales.shape)
    n_groups = shape[-1] // group

    def numbers(source: TensorSource, rows: range, groups: range) -> Array:
        return region(source, n_groups, rows, groups).astype(np.float32)

    def tile(rows: range, columns: range) -> Array:
        groups = range(columns.start // group, -(-columns.stop // group))
        spread = np.arange(columns.start, columns.stop) // group - groups.start
        scale, bias = (numbers(source, rows, groups).take(spread, axis=1) for source in (scales, biases))
        return affine.dequantize(fields(rows, columns), scale, bias, scales.dtype)

    def all_numbers(rows: range) -> tuple[Array, Array]:
        return numbers(scales, rows, range(n_groups)), numbers(biases, rows, range(n_groups))

    integers = Integers(shape, bits, group, fields, all_numbers, exact=True)
    return Decoded(shape, tile, scales.dtype, blocks=integers.blocks)


_MLX_FLOATS = {"mxfp4": (4, 32, "F8_E8M0"), "nvfp4": (4, 16, "F8_E4M3"), "mxfp8": (8, 32, "F8_E8M0")}
"""By mode: bits per value, values per scale, encoding of the scales."""


def mlx_floats(sources: StoredTensors, settings: Settings) -> Decoded:
    """MLX's modes with small floats in words, a scale byte per group, and optionally a tensor scale."""
    import numpy as np

    words, scales = sources[".weight"], sources[".scales"]
    mode = _mlx_mode(sources, settings)
    if mode == "affine":
        missing = words.name.removesuffix("weight") + "biases"
        raise refusal(_MLX, words.name, f"{missing} is missing")
    if mode not in _MLX_FLOATS:
        known = ", ".join(("affine", *_MLX_FLOATS))
        raise refusal(_MLX, words.name, f"unsupported mode {mode!r}", f"supported: {known}")
    bits, group, kind = _MLX_FLOATS[mode]
    if ".global_scale" in sources:
        raise refusal(_MLX, words.name, f"mode {mode!r} with a global_scale is not supported")
    expect(_MLX, scales, ("U8",))
    shape, _, fields = _mlx_fields(sources, bits, group)
    values = (
        np.array(FP4_VALUES, np.float32) if bits == 4 else plain.decode("F8_E4M3", bytes(range(256))).astype(np.float32)
    )
    n_groups = shape[-1] // group

    def tile(rows: range, columns: range) -> Array:
        groups = range(columns.start // group, -(-columns.stop // group))
        scale = region(scales, n_groups, rows, groups, kind).astype(np.float32)
        spread = np.arange(columns.start, columns.stop) // group - groups.start
        product: Array = values[fields(rows, columns)] * scale.take(spread, axis=1)
        return product

    return Decoded(shape, tile, "BF16")
