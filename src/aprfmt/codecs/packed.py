"""Weights that a checkpoint holds packed, one row a scheme: which tensors belong together, and what decodes them.

A packed weight is a matrix of small codes in one stored tensor, with scales (and zero points, and an order of
columns) in others. The decoders are pure: they check the pieces against each other and against the settings, and give
float32 tile by tile, so that memory stays small. Figures are those of the schemes' own definitions; where their
kernels differ, the exact product is given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial

from aprfmt.codecs import affine, plain
from aprfmt.codecs.dtypes import DTYPES, n_elements
from aprfmt.codecs.stream import STEP, TensorSource
from aprfmt.errors import AprError, RefusedError, UsageError
from aprfmt.io import jsonx
from aprfmt.io.source import Buffer
from aprfmt.types import Array, Shape

FLOATS = ("F32", "F16", "BF16")
FLOATS_BY_TORCH = {DTYPES[name].torch: name for name in FLOATS}
_SHORT_LINE = 1 << 13  # bytes; a call for each line costs more than reading what lies between
_STRETCH = 1 << 22
UNPACK_HINT = "fetch the checkpoint again, or unpack it with the tool that packed it and import the result"


def region(piece: TensorSource, width: int, rows: range, columns: range, dtype: str | None = None) -> Array:
    """Decoded elements of a rectangle of a stored tensor, seen as a matrix with rows of `width` elements.

    `dtype` reads its bytes as elements of another dtype.
    """
    dtype = dtype or piece.dtype
    size = DTYPES[dtype].block_bytes
    n_rows, line, stride = len(rows), len(columns) * size, width * size
    buffer = bytearray(n_rows * line)
    view, first = memoryview(buffer), (rows.start * width + columns.start) * size
    if line == stride:
        piece.read_into(first, view)
    elif stride <= _SHORT_LINE:
        _read_narrow(piece, first, stride, line, view)
    else:
        for i in range(n_rows):
            piece.read_into(first + i * stride, view[i * line : (i + 1) * line])
    return plain.decode(dtype, buffer).reshape(n_rows, len(columns))


def _read_narrow(piece: TensorSource, first: int, stride: int, line: int, out: memoryview) -> None:
    """Many short lines: whole stretches are read and the lines taken from them."""
    import numpy as np

    lines = np.frombuffer(out, dtype="u1").reshape(-1, line)
    step = _STRETCH // stride
    for start in range(0, len(lines), step):
        n = min(step, len(lines) - start)
        stretch = bytearray(n * stride)
        piece.read_into(first + start * stride, memoryview(stretch)[: (n - 1) * stride + line])
        lines[start : start + n] = np.frombuffer(stretch, dtype="u1").reshape(n, stride)[:, :line]


def flat(piece: TensorSource, columns: range | None = None, dtype: str | None = None) -> Array:
    """Elements of a stored tensor in flat order, 1-d: those of a range, or all of one that is known to be small."""
    size = count(piece)
    return region(piece, size, range(1), range(size) if columns is None else columns, dtype).reshape(-1)


def count(piece: TensorSource) -> int:
    """Number of stored elements."""
    return n_elements(piece.shape)


Pieces = Mapping[str, TensorSource]
"""The pieces of one weight by what follows its base name, as the row of the scheme spells it."""

Settings = Mapping[str, object]
"""The `quantization_config` of config.json."""


Tile = Callable[[range, range], Array]
"""Gives the float32 values of a rectangle of a weight: rows (all leading dims flattened) and columns."""


@dataclass(frozen=True, slots=True)
class PackedBlocks:
    """A packed weight as GGML blocks of the same codes and scales.

    Attributes:
        dtype: of the blocks.
        between: gives the bytes of blocks start .. stop.
    """

    dtype: str
    between: Callable[[int, int], Buffer]


@dataclass(frozen=True, slots=True)
class Decoded:
    """A weight that can be decoded.

    Attributes:
        shape: row-major.
        tile: gives any rectangle of it.
        dtype: what it was packed from, where the pieces tell.
        step: most values a tile.
        period: rows after which a tile must end, 0 for none.
        blocks: finds the GGML blocks that hold the same codes and scales, where there are such.
    """

    shape: tuple[int, ...]
    tile: Tile
    dtype: str | None = None
    step: int = STEP
    period: int = 0
    blocks: Callable[[], PackedBlocks | None] = lambda: None

    def between(self, start: int, stop: int) -> Array:
        """The values of flat places start .. stop, 1-d float32."""
        import numpy as np

        width, out = self.shape[-1], np.empty(stop - start, dtype="<f4")
        done = 0
        while done < out.size:
            row, column = divmod(start + done, width)
            first = column // 32 * 32  # words and blocks are read from their beginning
            rows, columns = range(row, row + 1), range(first, min(width, column + out.size - done))
            if column == 0 and len(columns) == width:
                limit = self.period - row % self.period if self.period else out.size
                rows = range(row, row + max(1, min((out.size - done) // width, self.step // width, limit)))
            with np.errstate(all="ignore"):
                values = self.tile(rows, columns)[:, column - first :].reshape(-1)
            out[done : done + values.size] = values
            done += values.size
        return out


def refusal(scheme: str, tensor: str, what: str, hint: str = UNPACK_HINT) -> RefusedError:
    """The error for a packed weight that breaks its scheme's rules."""
    return RefusedError(f"{scheme}: {what}", tensor=tensor, hint=hint)


def expect(
    scheme: str, piece: TensorSource, dtypes: Sequence[str], shape: tuple[int, ...] | None = None, ndim: int = 0
) -> None:
    """Raises RefusedError unless `piece` has one of `dtypes`, the `shape` or the number of dims, and elements."""
    if piece.dtype not in dtypes:
        raise refusal(scheme, piece.name, f"stored as {piece.dtype}, not as {' or '.join(dtypes)}")
    if shape is not None and piece.shape != shape:
        raise refusal(scheme, piece.name, f"has the shape {list(piece.shape)}, {list(shape)} would fit")
    if ndim and len(piece.shape) != ndim:
        raise refusal(scheme, piece.name, f"has the shape {list(piece.shape)}, {ndim} dims are expected")
    if not count(piece):
        raise refusal(scheme, piece.name, "is empty")


def positive(scheme: str, name: str, value: object, tensor: str) -> int:
    """`value` as a positive integer of the settings. Raises RefusedError."""
    if type(value) is not int or value <= 0 or value >= 1 << 62:
        raise refusal(scheme, tensor, f"{name} is {value!r}, not a size", "correct it in config.json")
    return value


def unpack(words: Array, bits: int) -> Array:
    """Unsigned fields of `bits` bits along the last axis of 32-bit little-endian words, lowest bits first, uint8.

    Fields of 3 bits run on from word to word, 32 of them in three words.
    """
    import numpy as np

    octets = np.ascontiguousarray(words).view("u1")
    if bits == 8:
        return octets
    if bits in (2, 4):
        per_byte = 8 // bits
        out = np.empty((*octets.shape[:-1], octets.shape[-1] * per_byte), dtype="u1")
        for i in range(per_byte):
            out[..., i::per_byte] = octets >> bits * i & (1 << bits) - 1
        return out
    lines = np.unpackbits(octets, axis=-1, bitorder="little").reshape(*octets.shape[:-1], -1, bits)
    fields: Array = lines @ (1 << np.arange(bits, dtype="u1"))
    return fields


def unpack_fields(piece: TensorSource, rows: range, columns: range, bits: int, *, down: bool = False) -> Array:
    """Fields of a matrix of words, uint8 [rows, columns]; with `down` they run down the columns of words instead."""
    first, stop = columns.start // 32, min(-(-columns.stop // 32) * bits, piece.shape[0 if down else 1])
    words = range(first * bits, stop)
    found = region(piece, piece.shape[1], *((words, rows) if down else (rows, words)))
    skip = columns.start - 32 * first
    return unpack(found.T if down else found, bits)[:, skip : skip + len(columns)]


@dataclass(frozen=True, slots=True)
class Grid:
    """Scales (or zero points) of a weight of [lead, rows, columns]: one for each block of `height` x `width`.

    `order` gives the block of each column where columns were regrouped.
    """

    piece: TensorSource
    rows: int
    grid: tuple[int, int]
    height: int
    width: int
    order: Array | None = None
    dtype: str | None = None

    def at(self, rows: range, columns: range) -> Array:
        """The scale of every element of a tile, float32, of a shape that broadcasts to it."""
        import numpy as np

        lines, n_wide = self.lines(rows), self.grid[1]
        across = self.blocks(columns)
        low, high = (0, 0) if n_wide == 1 else (int(across.min()), int(across.max()))
        part: Array = region(
            self.piece, n_wide, range(int(lines[0]), int(lines[-1]) + 1), range(low, high + 1), self.dtype
        )
        part = part.astype(np.float32)[lines - lines[0]]
        return part if n_wide == 1 else part.take(across - low, axis=1)

    def lines(self, rows: range) -> Array:
        """The row of the grid for each row of the weight, never decreasing."""
        import numpy as np

        index = np.arange(rows.start, rows.stop)
        lines: Array = index // self.rows * self.grid[0] + index % self.rows // self.height
        return lines

    def blocks(self, columns: range) -> Array:
        """The column of the grid for each column of the weight."""
        import numpy as np

        if self.order is not None:
            return self.order[columns.start : columns.stop]
        return np.arange(columns.start, columns.stop) // self.width


def grid_of(scheme: str, piece: TensorSource, shape: tuple[int, ...], blocks: Sequence[tuple[int, int]] = ()) -> Grid:
    """How `piece` scales a weight of `shape`: as a whole, by rows, columns of stacked weights, or one of `blocks`.

    Raises RefusedError where that is not certain.
    """
    rows, columns, lead = shape[-2], shape[-1], shape[:-2]
    dtype = "F8_E8M0" if piece.dtype == "U8" else None  # bare exponents
    if count(piece) == 1:
        return Grid(piece, n_elements(shape[:-1]), (1, 1), n_elements(shape[:-1]), columns, dtype=dtype)
    if piece.shape in (shape[:-1], (*shape[:-1], 1)):
        return Grid(piece, rows, (rows, 1), 1, columns, dtype=dtype)
    if piece.shape in (lead, (*lead, 1), (*lead, 1, 1)) and lead:
        return Grid(piece, rows, (1, 1), rows, columns, dtype=dtype)
    if piece.shape == (*lead, 1, columns) and lead:
        return Grid(piece, rows, (1, columns), rows, 1, dtype=dtype)
    if len(piece.shape) == len(shape) and piece.shape[:-2] == lead and count(piece):
        high, wide = piece.shape[-2:]
        for height, width in blocks:
            if (-(-rows // height), -(-columns // width)) == (high, wide):
                return Grid(piece, rows, (high, wide), height, width, dtype=dtype)
    told = " or ".join(f"blocks of {a}x{b}" for a, b in blocks) or "one scale a row"
    what = f"scales of shape {list(piece.shape)} fit no weight of shape {list(shape)} with {told}"
    raise refusal(scheme, piece.name, what)


def scale_blocks(scheme: str, settings: Settings, tensor: str) -> list[tuple[int, int]]:
    """The sizes of blocks that the settings name: `weight_block_size`, or groups and blocks of compressed-tensors."""
    default = [128, 128] if settings.get("quant_method") == "fp8" else None  # as in transformers
    own = settings.get("weight_block_size", default)
    sizes: list[object] = [own] if own is not None else []
    for weights in weight_arguments(settings):
        group = weights.get("group_size")
        if group is not None and group != -1:
            sizes.append([1, group])
        if weights.get("block_structure") is not None:
            sizes.append(weights["block_structure"])
    found = []
    for size in sizes:
        pair = [int(n) for n in size.split("x") if n.isdecimal()] if isinstance(size, str) else size
        if not isinstance(pair, list) or len(pair) != 2:
            raise refusal(scheme, tensor, f"blocks of {size!r} are not two sizes", "correct it in config.json")
        height, width = (positive(scheme, "a block size", n, tensor) for n in pair)
        found.append((height, width))
    return found


def weight_arguments(settings: Settings) -> list[dict[str, object]]:
    """What each group of a compressed-tensors config says of its weights."""
    groups = settings.get("config_groups")
    entries = groups.values() if isinstance(groups, dict) else ()
    found = [entry.get("weights") for entry in entries if isinstance(entry, dict)]
    return [weights for weights in found if isinstance(weights, dict)]


def require_symmetric(scheme: str, scale: TensorSource, settings: Settings) -> None:
    """Raises RefusedError for scales without zero points where the config says that every weight has them."""
    arguments = weight_arguments(settings)
    if arguments and all(weights.get("symmetric") is False for weights in arguments):
        raise refusal(scheme, scale.name, "zero points are missing, and config.json says symmetric false")


Decoder = Callable[[Pieces, Settings], Decoded]


@dataclass(frozen=True, slots=True)
class Scheme:
    """One way to pack a weight.

    Attributes:
        id: short name, `fp8`.
        label: for sentences, `FP8`.
        methods: `quant_method` of the configs that use it.
        main: ending of the tensor that tells; what stands before it is the base name.
        dtypes: what that tensor is stored as.
        needs: endings of the other pieces, beside the base name.
        may: endings of pieces that some weights have.
        result: ending of the decoded weight's name.
        decode: checks the pieces and gives the weight.
        by_form: whether it checks no more than their dtypes and shapes, so that what holds for one weight holds for all
            that are alike.
    """

    id: str
    label: str
    methods: tuple[str, ...]
    main: str
    dtypes: tuple[str, ...]
    needs: tuple[str, ...]
    may: tuple[str, ...]
    result: str
    decode: Decoder
    by_form: bool = False


# --- 8-bit codes with scales, and 4-bit floats: FP8, INT8, NVFP4, MXFP4 ---

# OCP microscaling formats, E2M1: sign, two bits of exponent, one of mantissa.
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
MX_BLOCK = 32

_F8 = ("F8_E4M3", "F8_E5M2")
_TRANSPOSED_STEP = 1 << 20  # fewer, longer reads where columns of the stored tensor become rows


def fp8(pieces: Pieces, settings: Settings) -> Decoded:
    """8-bit floats times a scale for the tensor, a row or a block (bare exponents where it is stored as U8).

    The scale is called inverse in checkpoints that divide by its reciprocal; the product is the same.
    """
    weight = pieces.get("") or pieces[".weight"]
    expect("FP8", weight, _F8)
    if len(weight.shape) < 2:
        raise refusal("FP8", weight.name, f"has the shape {list(weight.shape)}, a matrix is expected")
    scale = pieces.get("_scale_inv") or pieces.get("_scale") or pieces[".scale"]
    expect("FP8", scale, (*FLOATS, "F8_E8M0", "U8"))
    grid = grid_of("FP8", scale, weight.shape, scale_blocks("FP8", settings, scale.name))
    return Decoded(weight.shape, _Scaled(weight, grid))


@dataclass(frozen=True, slots=True)
class _Scaled:
    """Tiles of stored values times a grid of scales."""

    weight: TensorSource
    grid: Grid

    def __call__(self, rows: range, columns: range) -> Array:
        values: Array = region(self.weight, self.weight.shape[-1], rows, columns) * self.grid.at(rows, columns)
        return values


def int8(pieces: Pieces, settings: Settings) -> Decoded:
    """8-bit integers, minus a zero point where there is one, times a scale (compressed-tensors)."""
    import numpy as np

    weight, scale, zero = pieces[".weight"], pieces[".weight_scale"], pieces.get(".weight_zero_point")
    expect("INT8", weight, ("I8",), ndim=2)
    expect("INT8", scale, FLOATS)
    blocks = scale_blocks("INT8", settings, scale.name)
    grid = grid_of("INT8", scale, weight.shape, blocks)
    if ".weight_g_idx" in pieces and grid.grid[1] > 1:
        raise refusal("INT8", weight.name, "a column order of 8-bit groups is not decoded")
    zeros: Grid | None = None
    if zero is None:
        require_symmetric("INT8", scale, settings)
    else:
        expect("INT8", zero, ("I8",), scale.shape)
        zeros = grid_of("INT8", zero, weight.shape, blocks)
    width = weight.shape[-1]

    def tile(rows: range, columns: range) -> Array:
        values = region(weight, width, rows, columns).astype(np.float32)
        if zeros is not None:
            values -= zeros.at(rows, columns)
        return values * grid.at(rows, columns)

    return Decoded(weight.shape, tile)


def nvfp4(pieces: Pieces, settings: Settings) -> Decoded:
    """Pairs of 4-bit floats, an 8-bit float as scale of 16 values, and a scale of the tensor.

    compressed-tensors divides by the scale of the tensor, ModelOpt multiplies by it.
    """
    import numpy as np

    divides = ".weight_global_scale" in pieces
    overall = pieces[".weight_global_scale" if divides else ".weight_scale_2"]
    expect("NVFP4", overall, ("F32",))
    if count(overall) != 1:
        raise refusal("NVFP4", overall.name, f"has the shape {list(overall.shape)}, one value is expected")
    factor = flat(overall)[0]
    if divides and factor == 0:
        raise refusal("NVFP4", overall.name, "is zero, and scales are divided by it")

    def scales(values: Array) -> Array:
        scaled: Array = (values / factor if divides else values * factor).astype(np.float32)
        return scaled

    return _fp4("NVFP4", pieces, 16, ("F8_E4M3",), scales)


def mxfp4_matrix(pieces: Pieces, settings: Settings) -> Decoded:
    """Pairs of 4-bit floats, a bare exponent as scale of 32 values (compressed-tensors, DeepSeek V4)."""
    return _fp4("MXFP4", pieces, MX_BLOCK, ("U8", "F8_E8M0"), lambda values: values)


def _fp4(
    scheme: str, pieces: Pieces, group: int, scale_dtypes: tuple[str, ...], scales: Callable[[Array], Array]
) -> Decoded:
    packed = pieces.get(".weight_packed") or pieces[".weight"]
    expect(scheme, packed, ("U8", "I8"), ndim=2)
    rows, half = packed.shape
    columns = 2 * half
    scale = pieces.get(".weight_scale") or pieces[".scale"]
    expect(scheme, scale, scale_dtypes, (rows, columns // group))
    if columns % group:
        raise refusal(scheme, packed.name, f"rows of {columns} values are not groups of {group}")
    as_dtype = "F8_E8M0" if scale.dtype == "U8" else None
    grid = Grid(scale, rows, (rows, columns // group), 1, group, dtype=as_dtype)

    def tile(rows: range, columns: range) -> Array:
        octets = region(packed, half, rows, range(columns.start // 2, -(-columns.stop // 2)), "U8")
        skip = columns.start % 2
        values: Array = fp4_values(octets)[:, skip : skip + len(columns)] * scales(grid.at(rows, columns))
        return values

    return Decoded((rows, columns), tile)


def fp4_values(octets: Array) -> Array:
    """Two values a byte along the last axis, the low half first, float32."""
    values: Array = _fp4_pairs()[octets].view("<f4")
    return values


@cache
def _fp4_pairs() -> Array:
    """The two values of each byte, as one number of eight bytes."""
    import numpy as np

    pairs = [(FP4_VALUES[byte & 15], FP4_VALUES[byte >> 4]) for byte in range(256)]
    return np.array(pairs, dtype="<f4").view("<u8").reshape(-1)


def mxfp4_experts(pieces: Pieces, settings: Settings) -> Decoded:
    """Experts of gpt-oss: paired 4-bit floats [experts, out, in / 32, 16], exponents [experts, out, in / 32].

    The decoded weight is [experts, in, out], as the model's own layers hold it.
    """
    blocks, scale = pieces["_blocks"], pieces["_scales"]
    expect("MXFP4", blocks, ("U8",), ndim=4)
    expect("MXFP4", scale, ("U8",), blocks.shape[:-1])
    experts, n_out, n_blocks, n_bytes = blocks.shape
    if n_bytes != MX_BLOCK // 2:
        raise refusal("MXFP4", blocks.name, f"blocks of {n_bytes} bytes, {MX_BLOCK // 2} are expected")
    n_in = n_blocks * MX_BLOCK

    def tile(rows: range, columns: range) -> Array:
        expert = rows.start // n_in
        first, last = rows.start - expert * n_in, rows.stop - expert * n_in
        span = range(first // MX_BLOCK, -(-last // MX_BLOCK))
        lines = range(expert * n_out + columns.start, expert * n_out + columns.stop)
        octets = region(blocks, n_blocks * n_bytes, lines, range(span.start * n_bytes, span.stop * n_bytes))
        exponents = region(scale, n_blocks, lines, span, "F8_E8M0")
        values = fp4_values(octets).reshape(len(lines), len(span), MX_BLOCK) * exponents[:, :, None]
        skip = first - span.start * MX_BLOCK
        return values.reshape(len(lines), -1)[:, skip : skip + len(rows)].T

    return Decoded((experts, n_in, n_out), tile, step=_TRANSPOSED_STEP, period=n_in)


# --- small integers in 32-bit words: GPTQ, AWQ, pack-quantized of compressed-tensors ---

# AWQ's kernels want value i of a word at this place among its eight.
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)

_CONFIG_HINT = "config.json does not describe these weights: fetch both again, of one revision"


def gptq(pieces: Pieces, settings: Settings) -> Decoded:
    """Codes packed down the inputs, [in, out]; zero points and scales [groups, out]; the group of each input.

    The first checkpoint format stores zero points less one, wrapped around in their bits; the second as they are.
    """
    import numpy as np

    codes, zeros, scales = pieces[".qweight"], pieces[".qzeros"], pieces[".scales"]
    for piece, dtypes in ((codes, ("I32",)), (zeros, ("I32",)), (scales, FLOATS)):
        expect("GPTQ", piece, dtypes, ndim=2)
    n_groups, n_out = scales.shape
    bits = _gptq_bits(codes, zeros, n_out, settings)
    n_in = codes.shape[0] * 32 // bits
    expect("GPTQ", codes, ("I32",), (n_in * bits // 32, n_out))
    expect("GPTQ", zeros, ("I32",), (n_groups, n_out * bits // 32))
    order = _gptq_order(pieces, n_in, n_groups, settings)
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

    return Decoded((n_out, n_in), tile, step=_TRANSPOSED_STEP)


def _gptq_bits(codes: TensorSource, zeros: TensorSource, n_out: int, settings: Settings) -> int:
    """The bits of a code: those that the settings name, for all or by module, which fit the zero points."""
    dynamic = settings.get("dynamic")
    rules = [settings, *(dynamic.values() if isinstance(dynamic, dict) else ())]
    named = {rule["bits"] for rule in rules if isinstance(rule, dict) and type(rule.get("bits")) is int}
    fit = [bits for bits in (2, 3, 4, 8) if bits in named and zeros.shape[1] * 32 == n_out * bits]
    if len(fit) == 1 and codes.shape[0] * 32 % fit[0] == 0 and n_out * fit[0] % 32 == 0:
        return fit[0]
    what = f"codes of shape {list(codes.shape)} with zero points of shape {list(zeros.shape)}"
    told = ", ".join(map(str, sorted(named))) or "no number of"
    raise refusal("GPTQ", codes.name, f"{what} are not {told} bits (2, 3, 4 and 8 are decoded)", _CONFIG_HINT)


def _gptq_order(pieces: Pieces, n_in: int, n_groups: int, settings: Settings) -> Array:
    import numpy as np

    scales, given = pieces[".scales"], pieces.get(".g_idx")
    size = _group_size("GPTQ", settings, scales, n_in, n_groups)
    plain = np.arange(n_in) // size
    if given is None:
        if settings.get("desc_act"):
            raise refusal("GPTQ", scales.name, "the order of inputs (g_idx) is missing, and desc_act is set")
        return plain
    expect("GPTQ", given, ("I32", "I64"), (n_in,))
    order = flat(given)
    if order.min() < 0 or order.max() >= n_groups:
        raise refusal("GPTQ", given.name, f"names a group outside the {n_groups} that are stored")
    if settings.get("desc_act") is False and not np.array_equal(order, plain):
        # Runtimes differ: some follow the order, some ignore it because of the setting.
        what = "holds another order of inputs than its config, which says desc_act false"
        raise refusal("GPTQ", given.name, what, "set desc_act in config.json to what the packing tool used")
    return order.astype(np.int64)


def _group_size(scheme: str, settings: Settings, scales: TensorSource, n_in: int, n_groups: int) -> int:
    """Inputs a group: the one among the sizes that the settings name which gives as many groups as are stored."""
    dynamic = settings.get("dynamic")
    rules = [settings, *(dynamic.values() if isinstance(dynamic, dict) else ())]
    named = [r.get("group_size", r.get("q_group_size")) for r in rules if isinstance(r, dict)]
    sizes = [n_in if size == -1 else size for size in named if size is not None]
    for size in sizes:
        positive(scheme, "group_size", size, scales.name)
    fit = {size for size in sizes if -(-n_in // size) == n_groups}
    if len(fit) != 1:
        what = f"{n_groups} groups for {n_in} inputs, but config.json says group_size {named[0]!r}"
        raise refusal(scheme, scales.name, what, _CONFIG_HINT)
    return int(fit.pop())


def awq(pieces: Pieces, settings: Settings) -> Decoded:
    """4-bit codes packed across the outputs in AWQ's order, [in, out]; zero points and scales [groups, out]."""
    import numpy as np

    codes, zeros, scales = pieces[".qweight"], pieces[".qzeros"], pieces[".scales"]
    if settings.get("bits", settings.get("w_bit")) != 4:
        raise refusal("AWQ", codes.name, f"{settings.get('bits')!r} bits are not decoded, 4 are", _CONFIG_HINT)
    for piece, dtypes in ((codes, ("I32",)), (zeros, ("I32",)), (scales, FLOATS)):
        expect("AWQ", piece, dtypes, ndim=2)
    n_in, n_words = codes.shape
    n_groups, n_out = scales.shape
    expect("AWQ", scales, FLOATS, (n_groups, n_words * 8))
    expect("AWQ", zeros, ("I32",), (n_groups, n_words))
    size = _group_size("AWQ", settings, scales, n_in, n_groups)

    def fields(piece: TensorSource, lines: range, outputs: range) -> Array:
        span = range(outputs.start // 8, -(-outputs.stop // 8))
        words = np.ascontiguousarray(region(piece, n_words, lines, span).view("<u4").T)
        eights = np.empty((len(span), 8, len(lines)), dtype=np.float32)
        for i, place in enumerate(_AWQ_PLACES):
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

    return Decoded((n_out, n_in), tile, step=_TRANSPOSED_STEP)


def pack_quantized(pieces: Pieces, settings: Settings) -> Decoded:
    """Codes packed along the inputs, [out, in], offset by half their range; the shape is a tensor of its own."""
    import numpy as np

    packed, scale, told = pieces[".weight_packed"], pieces[".weight_scale"], pieces[".weight_shape"]
    scheme = "compressed-tensors"
    expect(scheme, packed, ("I32",), ndim=2)
    expect(scheme, scale, FLOATS)
    expect(scheme, told, ("I64", "I32"), (2,))
    rows, columns = (int(n) for n in flat(told))
    if rows != packed.shape[0] or columns <= 0:
        what = f"says {[rows, columns]}, the packed codes have the shape {list(packed.shape)}"
        raise refusal(scheme, told.name, what)
    bits = _packed_bits(packed, columns, settings)
    grid = _packed_grid(pieces, (rows, columns), settings)
    zero = _zero_points(pieces, grid, bits, settings)

    def tile(rows: range, columns: range) -> Array:
        values = unpack_fields(packed, rows, columns, bits).astype(np.float32)
        values -= zero(rows, columns)
        return values * grid.at(rows, columns)

    return Decoded((rows, columns), tile)


def _packed_bits(packed: TensorSource, columns: int, settings: Settings) -> int:
    named = [weights.get("num_bits") for weights in weight_arguments(settings)]
    fit = [bits for bits in (2, 4, 8) if bits in named and -(-columns // (32 // bits)) == packed.shape[1]]
    if len(fit) == 1:
        return fit[0]
    what = f"codes of shape {list(packed.shape)} for {columns} inputs fit no num_bits of config.json"
    raise refusal("compressed-tensors", packed.name, f"{what} (2, 4 and 8 are decoded)", _CONFIG_HINT)


def _packed_grid(pieces: Pieces, shape: tuple[int, int], settings: Settings) -> Grid:
    scheme, scale, given = "compressed-tensors", pieces[".weight_scale"], pieces.get(".weight_g_idx")
    rows, columns = shape
    if count(scale) == 1:
        return Grid(scale, rows, (1, 1), rows, columns)
    if len(scale.shape) == 2 and scale.shape[0] == rows:
        n_groups = scale.shape[1]
        sizes = [width for height, width in scale_blocks(scheme, settings, scale.name) if height == 1]
        whole = any(weights.get("group_size") in (None, -1) for weights in weight_arguments(settings))
        one = n_groups == 1 and (whole or max(sizes, default=0) >= columns)
        # Rows that end within a group are not decoded: packing tools refuse to make them.
        if one or (columns % n_groups == 0 and columns // n_groups in sizes):
            order = _packed_order(given, columns, n_groups) if given is not None else None
            return Grid(scale, rows, (rows, n_groups), 1, columns // n_groups, order)
    what = f"scales of shape {list(scale.shape)} fit no group_size of config.json for a weight of {list(shape)}"
    raise refusal(scheme, scale.name, what, _CONFIG_HINT)


def _packed_order(given: TensorSource, columns: int, n_groups: int) -> Array | None:
    expect("compressed-tensors", given, ("I32", "I64"), (columns,))
    order = flat(given)
    if (order == -1).all():  # never set: columns are in order
        return None
    if order.min() < 0 or order.max() >= n_groups:
        what = f"names a group outside the {n_groups} that are stored"
        raise refusal("compressed-tensors", given.name, what)
    return order


def _zero_points(pieces: Pieces, grid: Grid, bits: int, settings: Settings) -> Tile:
    """What gives what to subtract from the unsigned codes of a tile."""
    import numpy as np

    half, piece = 1 << bits - 1, pieces.get(".weight_zero_point")
    if piece is None:
        require_symmetric("compressed-tensors", grid.piece, settings)
        return lambda rows, columns: np.asarray(half, dtype=np.float32)
    high, wide = grid.grid
    if piece.dtype == "I8":  # one number each, without the offset
        expect("compressed-tensors", piece, ("I8",), grid.piece.shape)
        plain = Grid(piece, grid.rows, grid.grid, grid.height, grid.width, grid.order)
        return lambda rows, columns: plain.at(rows, columns) + np.float32(half)
    per_word = 32 // bits
    expect("compressed-tensors", piece, ("I32",), (-(-high // per_word), wide))

    def packed_down_the_rows(rows: range, columns: range) -> Array:
        lines = grid.lines(rows)
        first, last = int(lines[0]) // per_word, int(lines[-1]) // per_word + 1
        words = region(piece, wide, range(first, last), range(wide))
        fields: Array = unpack(words.T, bits).T[lines - first * per_word].astype(np.float32)
        return fields if wide == 1 else fields[:, grid.blocks(columns)]

    return packed_down_the_rows


# --- bitsandbytes: 4-bit codes of NF4 and FP4 in flat blocks, and LLM.int8 rows ---

# Quantiles of a normal distribution scaled to one (QLoRA, appendix E), and a float of 4 bits over its largest value.
_NF4_VALUES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip
_FP4_TWELFTHS = (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)
_BNB_FP4_VALUES = tuple(sign * value / 12 for sign in (1, -1) for value in _FP4_TWELFTHS)

_MAX_STATE_BYTES = 1 << 16
_LABEL = "bitsandbytes"
_CODES = {"nf4": _NF4_VALUES, "fp4": _BNB_FP4_VALUES}


def bnb4(kind: str, pieces: Pieces, settings: Settings) -> Decoded:
    """4-bit codes of `kind`: "nf4", quantiles of a normal distribution, or "fp4", floats in a coding of their own.

    Flat blocks, the high half of a byte first, each with its largest magnitude.
    """
    import numpy as np

    weight, state = pieces[".weight"], _state(pieces[f".weight.quant_state.bitsandbytes__{kind}"], kind)
    expect(_LABEL, weight, ("U8", "I8", "F16", "BF16", "F32"))  # codes travel as any dtype of whole bytes
    dims = state.get("shape")
    if not isinstance(dims, list) or not 1 <= len(dims) <= 4:
        raise refusal(_LABEL, weight.name, f"its quant_state gives the shape {dims!r}")
    shape = tuple(positive(_LABEL, "a dimension of its quant_state", dim, weight.name) for dim in dims)
    n = n_elements(shape)
    stored = count(weight) * DTYPES[weight.dtype].block_bytes
    if stored != -(-n // 2):
        raise refusal(_LABEL, weight.name, f"{stored} bytes are stored, a weight of {list(shape)} has {n} codes")
    size = positive(_LABEL, "blocksize", state.get("blocksize"), weight.name)
    quant_map = pieces[".weight.quant_map"]
    expect(_LABEL, quant_map, ("F32",), (16,))
    code = flat(quant_map)
    # Kernels have the values built in and never look at the stored ones: they must be the same.
    if not np.allclose(code, _CODES[kind], rtol=0, atol=1e-4):
        raise refusal(_LABEL, quant_map.name, f"holds other values than those of {kind}")
    largest = _absmax(pieces, state, -(-n // size))
    width = shape[-1]

    def tile(rows: range, columns: range) -> Array:
        first = rows.start * width + columns.start
        last = (rows.stop - 1) * width + columns.stop
        pairs = region(weight, stored, range(1), range(first // 2, -(-last // 2)), "U8")[0]
        codes = np.empty(2 * pairs.size, dtype="u1")
        codes[0::2], codes[1::2] = pairs >> 4, pairs & 15
        values: Array = code[codes[first % 2 : first % 2 + last - first]]
        block = np.arange(first, last) // size
        values = values * largest(range(int(block[0]), int(block[-1]) + 1))[block - block[0]]
        return values.reshape(len(rows), len(columns))

    return Decoded(shape, tile, FLOATS_BY_TORCH.get(str(state.get("dtype"))))


def _state(piece: TensorSource, kind: str) -> dict[str, object]:
    """The JSON object that is stored as a tensor of bytes beside the weight."""
    expect(_LABEL, piece, ("U8",), ndim=1)
    if count(piece) > _MAX_STATE_BYTES:
        raise refusal(_LABEL, piece.name, f"{count(piece)} bytes are not a description of a weight")
    try:
        state = jsonx.loads(flat(piece).tobytes())
    except AprError as error:
        raise refusal(_LABEL, piece.name, f"cannot be read: {error.message}") from error
    if not isinstance(state, dict) or state.get("quant_type", kind) != kind:
        raise refusal(_LABEL, piece.name, f"is not a description of {kind} codes")
    return state


def _absmax(pieces: Pieces, state: dict[str, object], n_blocks: int) -> Callable[[range], Array]:
    """A function that gives the largest magnitudes of a range of blocks, themselves packed in 8 bits or not."""
    import numpy as np

    piece, nested = pieces[".weight.absmax"], pieces.get(".weight.nested_absmax")
    if nested is None:
        expect(_LABEL, piece, ("F32",), (n_blocks,))
        return lambda blocks: flat(piece, blocks)
    expect(_LABEL, piece, ("U8",), (n_blocks,))
    size = positive(_LABEL, "nested_blocksize", state.get("nested_blocksize"), piece.name)
    expect(_LABEL, nested, ("F32",), (-(-n_blocks // size),))
    table = pieces.get(".weight.nested_quant_map")
    if table is None:
        raise refusal(_LABEL, piece.name, "nested_quant_map is missing")
    expect(_LABEL, table, ("F32",), (256,))
    offset = state.get("nested_offset")
    if isinstance(offset, bool) or not isinstance(offset, int | float):
        raise refusal(_LABEL, piece.name, f"nested_offset is {offset!r}, not a number")
    with np.errstate(all="ignore"):
        code, shift = flat(table), np.float64(offset).astype(np.float32)

    def largest(blocks: range) -> Array:
        scale = flat(nested, range(blocks.start // size, -(-blocks.stop // size)))
        index = np.arange(blocks.start, blocks.stop) // size - blocks.start // size
        values: Array = code[flat(piece, blocks)] * scale[index] + shift
        return values

    return largest


def llm_int8(pieces: Pieces, settings: Settings) -> Decoded:
    """LLM.int8: signed bytes, 127 of them for the largest magnitude of the row."""
    import numpy as np

    weight, largest, layout = pieces[".weight"], pieces[".SCB"], pieces.get(".weight_format")
    expect(_LABEL, weight, ("I8",), ndim=2)
    expect(_LABEL, largest, ("F32", "F16"), (weight.shape[0],))
    if layout is not None and (count(layout) != 1 or layout.dtype not in ("U8", "I8") or flat(layout)[0]):
        raise refusal(_LABEL, layout.name, "the rows are laid out for one kind of GPU")
    width = weight.shape[1]

    def tile(rows: range, columns: range) -> Array:
        scale = flat(largest, rows).astype(np.float32)
        values: Array = region(weight, width, rows, columns) * scale[:, None] * np.float32(1 / 127)
        return values

    return Decoded(weight.shape, tile)


# --- MLX: affine groups, and 4- and 8-bit floats with shared exponents ---

_MLX = "MLX"


def mlx_settings(settings: Settings, module: str) -> Settings:
    """What the settings say of `module`: its own entry, else what they say of all of them."""
    own = settings.get(module)
    return own if isinstance(own, dict) else settings


def _mlx_fields(pieces: Pieces, bits: int, group: int) -> tuple[Shape, int, Tile]:
    """The shape of the weight, its rows, and what gives the codes of a tile."""
    words, scales = pieces[".weight"], pieces[".scales"]
    expect(_MLX, words, ("U32",))
    *lead, n_words = words.shape
    if len(words.shape) < 2 or n_words * 32 % bits:
        raise refusal(_MLX, words.name, f"{list(words.shape)} words hold no rows of {bits}-bit codes", _CONFIG_HINT)
    n_in = n_words * 32 // bits
    if n_in % group or scales.shape != (*lead, n_in // group):
        what = f"{list(words.shape)} words of {bits}-bit codes in groups of {group} do not fit scales of shape"
        raise refusal(_MLX, words.name, f"{what} {list(scales.shape)}", _CONFIG_HINT)

    def fields(rows: range, columns: range) -> Array:
        first, stop = columns.start // 32, min(-(-columns.stop // 32) * bits, n_words)
        found = unpack(region(words, n_words, rows, range(first * bits, stop)), bits)
        skip = columns.start - 32 * first
        return found[:, skip : skip + len(columns)]

    return (*lead, n_in), n_elements(tuple(lead)), fields


def _mlx_numbers(pieces: Pieces, settings: Settings, default: tuple[int, int]) -> tuple[int, int]:
    """Bits and group size of a weight."""
    words = pieces[".weight"]
    own = mlx_settings(settings, words.name.removesuffix(".weight"))
    bits, group = own.get("bits", settings.get("bits", default[0])), own.get("group_size", settings.get("group_size"))
    try:
        scheme = affine.check(bits, group)
    except UsageError as error:
        raise refusal(_MLX, words.name, error.message, _CONFIG_HINT) from error
    return scheme.bits, scheme.group_size


def _mlx_mode(pieces: Pieces, settings: Settings) -> str:
    own = mlx_settings(settings, pieces[".weight"].name.removesuffix(".weight"))
    return str(own.get("mode", settings.get("mode", "affine") if own is settings else "affine"))


def mlx_affine(pieces: Pieces, settings: Settings) -> Decoded:
    """MLX's affine mode: codes in words, [..., out, in * bits / 32]; scales and biases [..., out, groups]."""
    import numpy as np

    words, scales, biases = pieces[".weight"], pieces[".scales"], pieces[".biases"]
    if (mode := _mlx_mode(pieces, settings)) != "affine":
        raise refusal(_MLX, words.name, f"has biases, which mode {mode!r} has not", _CONFIG_HINT)
    bits, group = _mlx_numbers(pieces, settings, (4, 64))
    shape, n_rows, fields = _mlx_fields(pieces, bits, group)
    expect(_MLX, scales, FLOATS)
    expect(_MLX, biases, (scales.dtype,), scales.shape)
    n_groups = shape[-1] // group

    def numbers(piece: TensorSource, rows: range, groups: range) -> Array:
        return region(piece, n_groups, rows, groups).astype(np.float32)

    def tile(rows: range, columns: range) -> Array:
        groups = range(columns.start // group, -(-columns.stop // group))
        spread = np.arange(columns.start, columns.stop) // group - groups.start
        scale, bias = (numbers(piece, rows, groups).take(spread, axis=1) for piece in (scales, biases))
        return affine.dequantize(fields(rows, columns), scale, bias, scales.dtype)

    def blocks() -> PackedBlocks | None:
        step = max(1, STEP // max(1, n_groups))
        parts = (
            (numbers(scales, rows, range(n_groups)), numbers(biases, rows, range(n_groups)))
            for rows in (range(start, min(start + step, n_rows)) for start in range(0, n_rows, step))
        )
        dtype = affine.fitting_blocks(bits, parts)
        return None if dtype is None else PackedBlocks(dtype, partial(between, dtype))

    def between(dtype: str, start: int, stop: int) -> Buffer:
        per_row = shape[-1] // affine.BLOCK
        rows = range(start // per_row, -(-stop // per_row))
        codes = fields(rows, range(shape[-1])).reshape(-1, affine.BLOCK)
        per_group = group // affine.BLOCK
        scale, bias = (
            np.repeat(numbers(piece, rows, range(n_groups)).reshape(-1), per_group) for piece in (scales, biases)
        )
        part = slice(start - rows.start * per_row, stop - rows.start * per_row)
        return affine.write_blocks(dtype, codes[part], scale[part], bias[part])

    return Decoded(shape, tile, scales.dtype, blocks=blocks)


_MLX_FLOATS = {"mxfp4": (4, 32, "F8_E8M0"), "nvfp4": (4, 16, "F8_E4M3"), "mxfp8": (8, 32, "F8_E8M0")}
"""By mode: bits of a value, values that share a scale, what the scales' bytes are."""


def mlx_floats(pieces: Pieces, settings: Settings) -> Decoded:
    """MLX's modes of small floats in words, with a byte for the scale of each group, and perhaps one for all."""
    import numpy as np

    words, scales = pieces[".weight"], pieces[".scales"]
    mode = _mlx_mode(pieces, settings)
    if mode == "affine":
        missing = words.name.removesuffix("weight") + "biases"
        raise refusal(_MLX, words.name, f"{missing} is missing")
    if mode not in _MLX_FLOATS:
        known = ", ".join(("affine", *_MLX_FLOATS))
        raise refusal(_MLX, words.name, f"mode {mode!r} is not decoded", f"decoded are: {known}")
    bits, group, kind = _MLX_FLOATS[mode]
    if ".global_scale" in pieces:
        raise refusal(_MLX, words.name, f"mode {mode!r} with a global_scale is not decoded")
    expect(_MLX, scales, ("U8",))
    shape, _, fields = _mlx_fields(pieces, bits, group)
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


# --- the table ---

_FP8_METHODS = ("fp8", "fbgemm_fp8", "compressed-tensors", "modelopt")
_CT = ("compressed-tensors",)
_BNB = ("bitsandbytes",)
_STATE = ".weight.quant_state.bitsandbytes__"
_BNB_NEEDS = (".weight", ".weight.absmax", ".weight.quant_map")
_BNB_MAY = (".weight.nested_absmax", ".weight.nested_quant_map")
_QUANTS = (".qzeros", ".scales")

SCHEMES: tuple[Scheme, ...] = (
    Scheme("fp8", "FP8", _FP8_METHODS, "", _F8, ("_scale_inv",), (), "", fp8, by_form=True),
    Scheme("fp8", "FP8", _FP8_METHODS, "", _F8, ("_scale",), (), "", fp8, by_form=True),
    Scheme("fp8", "FP8", ("fp8",), ".weight", _F8, (".scale",), (), ".weight", fp8, by_form=True),
    Scheme("mxfp4", "MXFP4", ("fp8",), ".weight", ("I8",), (".scale",), (), ".weight", mxfp4_matrix),
    Scheme("gptq", "GPTQ", ("gptq",), ".qweight", ("I32",), _QUANTS, (".g_idx",), ".weight", gptq),
    Scheme("awq", "AWQ", ("awq",), ".qweight", ("I32",), _QUANTS, (), ".weight", awq),
    Scheme("pack-quantized", "packed integers", _CT, ".weight_packed", ("I32",), (".weight_scale", ".weight_shape"),
           (".weight_zero_point", ".weight_g_idx"), ".weight", pack_quantized),
    Scheme("nvfp4", "NVFP4", _CT, ".weight_packed", ("U8",), (".weight_scale", ".weight_global_scale"), (),
           ".weight", nvfp4),
    Scheme("nvfp4", "NVFP4", ("modelopt",), ".weight", ("U8",), (".weight_scale", ".weight_scale_2"), (),
           ".weight", nvfp4),
    Scheme("mxfp4", "MXFP4", _CT, ".weight_packed", ("U8",), (".weight_scale",), (), ".weight",
           mxfp4_matrix),
    Scheme("int8", "INT8", _CT, ".weight", ("I8",), (".weight_scale",), (".weight_zero_point", ".weight_g_idx"),
           ".weight", int8),
    Scheme("mxfp4", "MXFP4", ("mxfp4",), "_blocks", ("U8",), ("_scales",), (), "", mxfp4_experts),
    Scheme("bnb-nf4", "NF4", _BNB, _STATE + "nf4", ("U8",), _BNB_NEEDS, _BNB_MAY, ".weight",
           partial(bnb4, "nf4")),
    Scheme("bnb-fp4", "FP4", _BNB, _STATE + "fp4", ("U8",), _BNB_NEEDS, _BNB_MAY, ".weight",
           partial(bnb4, "fp4")),
    Scheme("mlx-affine", "MLX affine", ("mlx",), ".weight", ("U32",), (".scales", ".biases"), (), ".weight",
           mlx_affine),
    Scheme("mlx-floats", "MLX floats", ("mlx",), ".weight", ("U32",), (".scales",), (".global_scale",), ".weight",
           mlx_floats),
    Scheme("bnb-int8", "LLM.int8", _BNB, ".weight", ("I8",), (".SCB",), (".weight_format",), ".weight", llm_int8),
)  # fmt: skip

METHODS = tuple(dict.fromkeys(method for scheme in SCHEMES for method in scheme.methods))
"""Every `quant_method` that has a row."""
