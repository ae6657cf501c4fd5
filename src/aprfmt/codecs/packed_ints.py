"""Checkpoints of integers with zero points: GPTQ, AWQ, compressed-tensors."""

from __future__ import annotations

from functools import partial

from aprfmt.codecs.packed import (
    CONFIG_HINT,
    DEQUANTIZE_HINT,
    FLOATS,
    TRANSPOSED_STEP,
    Decoded,
    Grid,
    Integers,
    Settings,
    StoredTensors,
    Tile,
    count,
    expect,
    flat,
    positive,
    refusal,
    region,
    require_symmetric,
    scale_blocks,
    unpack,
    unpack_fields,
    weight_arguments,
)
from aprfmt.codecs.stream import TensorSource
from aprfmt.types import Array

AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Position in a word at which AWQ's kernels expect each of eight values."""


def gptq(sources: StoredTensors, settings: Settings) -> Decoded:
    """Codes packed along the inputs, [in, out]; zero points and scales [groups, out]; the group of each input.

    The first checkpoint format stores zero points minus one, wrapping around; the second stores them unchanged.
    """
    import numpy as np

    codes, zeros, scales = sources[".qweight"], sources[".qzeros"], sources[".scales"]
    for source, dtypes in ((codes, ("I32",)), (zeros, ("I32",)), (scales, FLOATS)):
        expect("GPTQ", source, dtypes, ndim=2)
    n_groups, n_out = scales.shape
    bits = _gptq_bits(codes, zeros, n_out, settings)
    n_in = codes.shape[0] * 32 // bits
    expect("GPTQ", codes, ("I32",), (n_in * bits // 32, n_out))
    expect("GPTQ", zeros, ("I32",), (n_groups, n_out * bits // 32))
    order = _gptq_order(sources, n_in, n_groups, settings)
    shift = 1 if settings.get("checkpoint_format", "gptq") == "gptq" else 0

    def tile(rows: range, columns: range) -> Array:
        values = unpack_fields(codes, rows, columns, bits, down=True).astype(np.float32)
        zero = unpack_fields(zeros, range(n_groups), rows, bits)
        zero = (zero + np.uint8(shift)) & np.uint8((1 << bits) - 1)
        scale = region(scales, n_out, range(n_groups), rows).astype(np.float32)
        group = order[columns.start : columns.stop]
        values -= zero.T.astype(np.float32).take(group, axis=1)
        values *= scale.T.take(group, axis=1)
        return values

    def numbers(rows: range) -> tuple[Array, Array]:
        zero = unpack_fields(zeros, range(n_groups), rows, bits)
        zero = (zero + np.uint8(shift)) & np.uint8((1 << bits) - 1)
        return _biased("GPTQ", scales, region(scales, n_out, range(n_groups), rows).T, zero.T)

    size = -(-n_in // n_groups)
    in_order = n_in == size * n_groups and np.array_equal(order, np.arange(n_in) // size)
    fields = partial(unpack_fields, codes, bits=bits, down=True)
    integers = Integers((n_out, n_in), bits, size if in_order else 1, fields, numbers)
    return Decoded((n_out, n_in), tile, step=TRANSPOSED_STEP, blocks=integers.blocks, integers=integers)


def _biased(scheme: str, source: TensorSource, scale: Array, zero: Array) -> tuple[Array, Array]:
    """Scales, and the biases of codes with these zero points, float64. Raises RefusedError for non-finite scales."""
    import numpy as np

    wide = scale.astype(np.float64)
    if not np.isfinite(wide).all():
        raise refusal(scheme, source.name, "has scales that are NaN or infinite")
    return wide, -wide * zero


def _gptq_bits(codes: TensorSource, zeros: TensorSource, n_out: int, settings: Settings) -> int:
    """The bits per code: those of the settings, for all or by module, that match the zero points."""
    dynamic = settings.get("dynamic")
    rules = [settings, *(dynamic.values() if isinstance(dynamic, dict) else ())]
    named = {rule["bits"] for rule in rules if isinstance(rule, dict) and type(rule.get("bits")) is int}
    fit = [bits for bits in (2, 3, 4, 8) if bits in named and zeros.shape[1] * 32 == n_out * bits]
    if len(fit) == 1 and codes.shape[0] * 32 % fit[0] == 0 and n_out * fit[0] % 32 == 0:
        return fit[0]
    what = f"codes of shape {list(codes.shape)} with zero points of shape {list(zeros.shape)}"
    stated = ", ".join(map(str, sorted(named))) or "any number of"
    raise refusal("GPTQ", codes.name, f"{what} are not {stated} bits (supported: 2, 3, 4 and 8)", CONFIG_HINT)


def _gptq_order(sources: StoredTensors, n_in: int, n_groups: int, settings: Settings) -> Array:
    import numpy as np

    scales, given = sources[".scales"], sources.get(".g_idx")
    size = _group_size("GPTQ", settings, scales, n_in, n_groups)
    plain = np.arange(n_in) // size
    if given is None:
        if settings.get("desc_act"):
            raise refusal("GPTQ", scales.name, "desc_act is set, but g_idx is missing")
        return plain
    expect("GPTQ", given, ("I32", "I64"), (n_in,))
    order = flat(given)
    if order.min() < 0 or order.max() >= n_groups:
        raise refusal("GPTQ", given.name, f"refers to a group outside the {n_groups} stored ones")
    if settings.get("desc_act") is False and not np.array_equal(order, plain):
        # Runtimes differ: some follow the order, some ignore it because of the setting.
        what = "has act-order, but the config has desc_act false"
        raise refusal("GPTQ", given.name, what, "set desc_act in config.json to the value used for quantization")
    return order.astype(np.int64)


def _group_size(scheme: str, settings: Settings, scales: TensorSource, n_in: int, n_groups: int) -> int:
    """Inputs per group: the group size in the settings that yields the stored number of groups."""
    dynamic = settings.get("dynamic")
    rules = [settings, *(dynamic.values() if isinstance(dynamic, dict) else ())]
    named = [r.get("group_size", r.get("q_group_size")) for r in rules if isinstance(r, dict)]
    sizes = [n_in if size == -1 else size for size in named if size is not None]
    for size in sizes:
        positive(scheme, "group_size", size, scales.name)
    fit = {size for size in sizes if -(-n_in // size) == n_groups}
    if len(fit) != 1:
        what = f"{n_groups} groups for {n_in} inputs, but config.json has group_size {named[0]!r}"
        raise refusal(scheme, scales.name, what, CONFIG_HINT)
    return int(fit.pop())


def awq(sources: StoredTensors, settings: Settings) -> Decoded:
    """4-bit codes packed along the outputs in AWQ's order, [in, out]; zero points and scales [groups, out]."""
    import numpy as np

    codes, zeros, scales = sources[".qweight"], sources[".qzeros"], sources[".scales"]
    if settings.get("bits", settings.get("w_bit")) != 4:
        raise refusal("AWQ", codes.name, f"{settings.get('bits')!r} bits are not supported, only 4", CONFIG_HINT)
    for source, dtypes in ((codes, ("I32",)), (zeros, ("I32",)), (scales, FLOATS)):
        expect("AWQ", source, dtypes, ndim=2)
    n_in, n_words = codes.shape
    n_groups, n_out = scales.shape
    expect("AWQ", scales, FLOATS, (n_groups, n_words * 8))
    expect("AWQ", zeros, ("I32",), (n_groups, n_words))
    size = _group_size("AWQ", settings, scales, n_in, n_groups)

    def fields(source: TensorSource, lines: range, outputs: range) -> Array:
        span = range(outputs.start // 8, -(-outputs.stop // 8))
        words = np.ascontiguousarray(region(source, n_words, lines, span).view("<u4").T)
        eights = np.empty((len(span), 8, len(lines)), dtype=np.float32)
        for i, place in enumerate(AWQ_PLACES):
            eights[:, i] = words >> np.uint32(4 * place) & np.uint32(15)
        skip = outputs.start - 8 * span.start
        return eights.reshape(-1, len(lines))[skip : skip + len(outputs)]

    def tile(rows: range, columns: range) -> Array:
        groups = range(columns.start // size, -(-columns.stop // size))
        scale = region(scales, n_out, groups, rows).astype(np.float32).T
        group = np.arange(columns.start, columns.stop) // size - groups.start
        values = fields(codes, columns, rows)
        values -= fields(zeros, groups, rows).take(group, axis=1)
        values *= scale.take(group, axis=1)
        return values

    def numbers(rows: range) -> tuple[Array, Array]:
        groups = range(n_groups)
        return _biased("AWQ", scales, region(scales, n_out, groups, rows).T, fields(zeros, groups, rows))

    def octets(rows: range, columns: range) -> Array:
        return fields(codes, columns, rows).astype("u1")

    integers = Integers((n_out, n_in), 4, size if n_in == size * n_groups else 1, octets, numbers)
    return Decoded((n_out, n_in), tile, step=TRANSPOSED_STEP, blocks=integers.blocks, integers=integers)


def pack_quantized(sources: StoredTensors, settings: Settings) -> Decoded:
    """Codes packed along the inputs, [out, in], offset by half their range; the shape is a separate tensor."""
    import numpy as np

    packed, scale, stated = sources[".weight_packed"], sources[".weight_scale"], sources[".weight_shape"]
    scheme = "compressed-tensors"
    expect(scheme, packed, ("I32",), ndim=2)
    expect(scheme, scale, FLOATS)
    expect(scheme, stated, ("I64", "I32"), (2,))
    rows, columns = (int(n) for n in flat(stated))
    if rows != packed.shape[0] or columns <= 0:
        what = f"says {[rows, columns]}, but the packed codes have shape {list(packed.shape)}"
        raise refusal(scheme, stated.name, what)
    bits = _packed_bits(packed, columns, settings)
    grid = _packed_grid(sources, (rows, columns), settings)
    zero = _zero_points(sources, grid, bits, settings)

    def tile(rows: range, columns: range) -> Array:
        values = unpack_fields(packed, rows, columns, bits).astype(np.float32)
        values -= zero(rows, columns)
        return values * grid.at(rows, columns)

    fields = partial(unpack_fields, packed, bits=bits)
    integers = grid_integers(grid, (rows, columns), bits, fields, zero)
    return Decoded((rows, columns), tile, blocks=integers.blocks, integers=integers)


def grid_integers(grid: Grid, shape: tuple[int, int], bits: int, fields: Tile, zero: Tile) -> Integers:
    """Codes with a grid of scales; `zero` returns the zero points of a tile."""
    import numpy as np

    columns, n_groups = shape[1], grid.grid[1]
    is_regular = grid.order is None and columns % n_groups == 0 and (grid.height == 1 or grid.grid[0] == 1)
    group = columns // n_groups if is_regular else 1

    def numbers(lines: range) -> tuple[Array, Array]:
        every = range(columns)
        scale, zeros = (
            np.broadcast_to(part(lines, every), (len(lines), columns))[:, ::group] for part in (grid.at, zero)
        )
        return _biased("compressed-tensors", grid.source, scale, zeros)

    return Integers(shape, bits, group, fields, numbers)


def bitnet(sources: StoredTensors, settings: Settings) -> Decoded:
    """Ternary values plus one, four quarters of the rows in one byte [out / 4, in], the first in the lowest bits.

    AutoBitLinear multiplies by the one scale, BitLinear divides by it.
    """
    import numpy as np

    packed, scale = sources[".weight"], sources[".weight_scale"]
    expect("BitNet", packed, ("U8",), ndim=2)
    expect("BitNet", scale, FLOATS)
    if count(scale) != 1:
        raise refusal("BitNet", scale.name, f"has shape {list(scale.shape)}, expected one value")
    factor, (quarter, width) = flat(scale)[0], packed.shape
    if settings.get("linear_class", "bitlinear") == "bitlinear":
        if factor == 0:
            raise refusal("BitNet", scale.name, "is zero, but weights are divided by it")
        factor = 1 / factor

    def tile(rows: range, columns: range) -> Array:
        part, first = divmod(rows.start, quarter)
        octets = region(packed, width, range(first, first + len(rows)), columns)
        values: Array = (octets >> 2 * part & 3).astype(np.float32) - np.float32(1)
        return values * np.float32(factor)

    return Decoded((4 * quarter, width), tile, period=quarter)


def _packed_bits(packed: TensorSource, columns: int, settings: Settings) -> int:
    named = [weights.get("num_bits") for weights in weight_arguments(settings)]
    fit = [bits for bits in (2, 4, 8) if bits in named and -(-columns // (32 // bits)) == packed.shape[1]]
    if len(fit) == 1:
        return fit[0]
    if odd := [bits for bits in named if bits not in (2, 4, 8) and bits is not None]:
        what = f"num_bits {odd[0]} is not supported (only 2, 4 and 8)"
        raise refusal("compressed-tensors", packed.name, what, DEQUANTIZE_HINT)
    what = f"codes of shape {list(packed.shape)} for {columns} inputs match no num_bits of config.json"
    raise refusal("compressed-tensors", packed.name, f"{what} (supported: 2, 4 and 8)", CONFIG_HINT)


def _packed_grid(sources: StoredTensors, shape: tuple[int, int], settings: Settings) -> Grid:
    scheme, scale, given = "compressed-tensors", sources[".weight_scale"], sources.get(".weight_g_idx")
    rows, columns = shape
    if count(scale) == 1:
        return Grid(scale, rows, (1, 1), rows, columns)
    if len(scale.shape) == 2 and scale.shape[0] == rows:
        n_groups = scale.shape[1]
        sizes = [width for height, width in scale_blocks(scheme, settings, scale.name) if height == 1]
        whole = any(weights.get("group_size") in (None, -1) for weights in weight_arguments(settings))
        one = n_groups == 1 and (whole or max(sizes, default=0) >= columns)
        # Rows that end inside a group are not decoded: quantizers refuse to make them.
        if one or (columns % n_groups == 0 and columns // n_groups in sizes):
            order = _packed_order(given, columns, n_groups) if given is not None else None
            return Grid(scale, rows, (rows, n_groups), 1, columns // n_groups, order)
    what = f"scales of shape {list(scale.shape)} match no group_size of config.json for a weight of {list(shape)}"
    raise refusal(scheme, scale.name, what, CONFIG_HINT)


def _packed_order(given: TensorSource, columns: int, n_groups: int) -> Array | None:
    expect("compressed-tensors", given, ("I32", "I64"), (columns,))
    order = flat(given)
    if (order == -1).all():  # never set: columns are in order
        return None
    if order.min() < 0 or order.max() >= n_groups:
        what = f"refers to a group outside the {n_groups} stored ones"
        raise refusal("compressed-tensors", given.name, what)
    return order


def _zero_points(sources: StoredTensors, grid: Grid, bits: int, settings: Settings) -> Tile:
    """Returns what to subtract from the unsigned codes of a tile."""
    import numpy as np

    half, source = 1 << bits - 1, sources.get(".weight_zero_point")
    if source is None:
        require_symmetric("compressed-tensors", grid.source, settings)
        return lambda rows, columns: np.asarray(half, dtype=np.float32)
    high, wide = grid.grid
    if source.dtype == "I8":  # one number each, without the offset
        expect("compressed-tensors", source, ("I8",), grid.source.shape)
        plain = Grid(source, grid.rows, grid.grid, grid.height, grid.width, grid.order)
        return lambda rows, columns: plain.at(rows, columns) + np.float32(half)
    per_word = 32 // bits
    expect("compressed-tensors", source, ("I32",), (-(-high // per_word), wide))

    def packed_down_the_rows(rows: range, columns: range) -> Array:
        lines = grid.lines(rows)
        first, last = int(lines[0]) // per_word, int(lines[-1]) // per_word + 1
        words = region(source, wide, range(first, last), range(wide))
        fields: Array = unpack(words.T, bits).T[lines - first * per_word].astype(np.float32)
        return fields if wide == 1 else fields[:, grid.blocks(columns)]

    return packed_down_the_rows
