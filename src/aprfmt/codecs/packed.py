"""Quantized weights of checkpoints, one row per scheme: which tensors belong together, and how they are dequantized.

A quantized weight is a matrix of small codes in one stored tensor, with scales (and zero points, and an order of
columns) in others. The decoders are pure: they check the tensors against each other and the settings, and yield float32
tile by tile, so memory stays small. Values follow the schemes' own definitions; where their kernels differ, the exact
product is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod

from aprfmt.codecs import affine, plain
from aprfmt.codecs.dtypes import DTYPES, n_elements
from aprfmt.codecs.stream import STEP, TensorSource
from aprfmt.errors import RefusedError
from aprfmt.io.source import Buffer
from aprfmt.types import Array, Shape

FLOATS = ("F32", "F16", "BF16")
FLOATS_BY_TORCH = {DTYPES[name].torch: name for name in FLOATS}
_SHORT_LINE = 1 << 13  # bytes; a call per line costs more than reading what lies in between
_STRETCH = 1 << 22
UNPACK_HINT = "download the checkpoint again, or dequantize it with the tool that quantized it and import the result"


def region(source: TensorSource, width: int, rows: range, columns: range, dtype: str | None = None) -> Array:
    """A rectangle of a stored tensor, seen as a matrix with rows of `width` elements, decoded.

    `dtype` reinterprets its bytes.
    """
    dtype = dtype or source.dtype
    size = DTYPES[dtype].block_bytes
    n_rows, line, stride = len(rows), len(columns) * size, width * size
    buffer = bytearray(n_rows * line)
    view, first = memoryview(buffer), (rows.start * width + columns.start) * size
    if line == stride:
        source.read_into(first, view)
    elif stride <= _SHORT_LINE:
        _read_narrow(source, first, stride, line, view)
    else:
        for i in range(n_rows):
            source.read_into(first + i * stride, view[i * line : (i + 1) * line])
    return plain.decode(dtype, buffer).reshape(n_rows, len(columns))


def _read_narrow(source: TensorSource, first: int, stride: int, line: int, out: memoryview) -> None:
    """Many short lines: reads whole stretches and slices the lines from them."""
    import numpy as np

    lines = np.frombuffer(out, dtype="u1").reshape(-1, line)
    step = _STRETCH // stride
    for start in range(0, len(lines), step):
        n = min(step, len(lines) - start)
        stretch = bytearray(n * stride)
        source.read_into(first + start * stride, memoryview(stretch)[: (n - 1) * stride + line])
        lines[start : start + n] = np.frombuffer(stretch, dtype="u1").reshape(n, stride)[:, :line]


def flat(source: TensorSource, columns: range | None = None, dtype: str | None = None) -> Array:
    """Elements of a stored tensor in flat order, 1-d: a range, or all of one that is known to be small."""
    size = count(source)
    return region(source, size, range(1), range(size) if columns is None else columns, dtype).reshape(-1)


def count(source: TensorSource) -> int:
    """Number of stored elements."""
    return n_elements(source.shape)


StoredTensors = Mapping[str, TensorSource]
"""The stored tensors of one weight by suffix, as the row of the scheme spells it."""

Settings = Mapping[str, object]
"""The `quantization_config` of config.json."""


SCALE, INPUT_SCALE = "scale", "input_scale"
"""Suffixes of a weight's scale and of its inputs' scale in llama.cpp's GGUFs."""

TensorScales = Mapping[str, tuple[float, ...]]
"""SCALE and INPUT_SCALE of a weight: one value, or one per matrix of a stack."""

Tile = Callable[[range, range], Array]
"""The float32 values of a rectangle of a weight: rows (all leading dims flattened) and columns."""


@dataclass(frozen=True, slots=True)
class PackedBlocks:
    """A quantized weight as GGML blocks with the same codes and scales.

    Attributes:
        dtype: of the blocks.
        between: yields the bytes of blocks start .. stop.
        scales: tensor scales by their GGUF suffix; SCALE multiplies its values.
        change: the largest change of a value, relative to the largest that its block can represent; 0 if exact.
    """

    dtype: str
    between: Callable[[int, int], Buffer]
    scales: TensorScales = field(default_factory=dict)
    change: float = 0.0


@dataclass(frozen=True, slots=True)
class Integers:
    """A weight of unsigned integer codes: value = scale * code + bias.

    Attributes:
        shape: row-major; groups of `group` values of a row share scale and bias.
        bits: per code.
        fields: decodes the codes of a tile, uint8.
        numbers: decodes scales and biases of whole rows, [rows, groups], float32 or float64.
        exact: refuse blocks unless scales and biases are exact in F16.
    """

    shape: Shape
    bits: int
    group: int
    fields: Tile
    numbers: Callable[[range], tuple[Array, Array]]
    exact: bool = False

    def blocks(self) -> PackedBlocks | None:
        """GGML blocks with the same codes, with the scales rounded to F16; None if no type fits."""
        if self.group % affine.BLOCK:
            return None
        found = affine.fitting_blocks(self.bits, self.all_numbers())
        if found is None or (self.exact and found[1]):
            return None
        dtype, change = found
        return PackedBlocks(dtype, partial(self._between, dtype), change=change)

    def all_numbers(self) -> Iterator[tuple[Array, Array]]:
        """Scales and biases of all rows, a few rows at a time."""
        n_rows, step = prod(self.shape[:-1]), max(1, STEP // self.shape[-1])
        for start in range(0, n_rows, step):
            yield self.numbers(range(start, min(start + step, n_rows)))

    def _between(self, dtype: str, start: int, stop: int) -> Buffer:
        import numpy as np

        width = self.shape[-1]
        per_row, per_group = width // affine.BLOCK, self.group // affine.BLOCK
        rows = range(start // per_row, -(-stop // per_row))
        codes = self.fields(rows, range(width)).reshape(-1, affine.BLOCK)
        scale, bias = (np.repeat(numbers.reshape(-1), per_group) for numbers in self.numbers(rows))
        part = slice(start - rows.start * per_row, stop - rows.start * per_row)
        return affine.write_blocks(dtype, codes[part], scale[part], bias[part])


@dataclass(frozen=True, slots=True)
class Decoded:
    """A weight that can be dequantized.

    Attributes:
        shape: row-major.
        tile: decodes any rectangle.
        dtype: before quantization, if the stored tensors tell.
        step: maximum values per tile.
        period: rows after which a tile must end, 0 for none.
        blocks: GGML blocks with the same codes and scales, if possible.
        integers: codes, scales and biases of a weight of unsigned integers.
    """

    shape: tuple[int, ...]
    tile: Tile
    dtype: str | None = None
    step: int = STEP
    period: int = 0
    blocks: Callable[[], PackedBlocks | None] = lambda: None
    integers: Integers | None = None

    def between(self, start: int, stop: int) -> Array:
        """The values at flat positions start .. stop, 1-d float32."""
        import numpy as np

        width, out = self.shape[-1], np.empty(stop - start, dtype="<f4")
        done = 0
        while done < out.size:
            row, column = divmod(start + done, width)
            first = column // 32 * 32  # words and blocks are read from their start
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
    """The error for a quantized weight that violates its scheme."""
    return RefusedError(f"{scheme}: {what}", tensor=tensor, hint=hint)


def expect(
    scheme: str, source: TensorSource, dtypes: Sequence[str], shape: tuple[int, ...] | None = None, ndim: int = 0
) -> None:
    """Raises RefusedError unless `source` has one of `dtypes`, the `shape` or the number of dims, and elements."""
    if source.dtype not in dtypes:
        raise refusal(scheme, source.name, f"stored as {source.dtype}, not as {' or '.join(dtypes)}")
    if shape is not None and source.shape != shape:
        raise refusal(scheme, source.name, f"has shape {list(source.shape)}, expected {list(shape)}")
    if ndim and len(source.shape) != ndim:
        raise refusal(scheme, source.name, f"has shape {list(source.shape)}, expected {ndim} dims")
    if not count(source):
        raise refusal(scheme, source.name, "is empty")


def positive(scheme: str, name: str, value: object, tensor: str) -> int:
    """`value` as a positive integer of the settings. Raises RefusedError."""
    if type(value) is not int or value <= 0 or value >= 1 << 62:
        raise refusal(scheme, tensor, f"{name} is {value!r}, not a valid size", "correct it in config.json")
    return value


def unpack(words: Array, bits: int) -> Array:
    """Unpacks unsigned fields of `bits` bits along the last axis of 32-bit little-endian words, lowest bits first,
    uint8.

    3-bit fields continue across words, 32 of them in three words.
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


def unpack_fields(source: TensorSource, rows: range, columns: range, bits: int, *, down: bool = False) -> Array:
    """Unpacks the fields of a matrix of words, uint8 [rows, columns]; with `down` along columns instead of rows."""
    first, stop = columns.start // 32, min(-(-columns.stop // 32) * bits, source.shape[0 if down else 1])
    words = range(first * bits, stop)
    found = region(source, source.shape[1], *((words, rows) if down else (rows, words)))
    skip = columns.start - 32 * first
    return unpack(found.T if down else found, bits)[:, skip : skip + len(columns)]


@dataclass(frozen=True, slots=True)
class Grid:
    """Scales (or zero points) of a weight [lead, rows, columns]: one per block of `height` x `width`.

    `order` gives the block of each column if columns were regrouped.
    """

    source: TensorSource
    rows: int
    grid: tuple[int, int]
    height: int
    width: int
    order: Array | None = None
    dtype: str | None = None

    def at(self, rows: range, columns: range) -> Array:
        """The scale of every element of a tile, float32, broadcastable to it. Raises RefusedError for NaN, infinity."""
        import numpy as np

        lines, n_wide = self.lines(rows), self.grid[1]
        across = self.blocks(columns)
        low, high = (0, 0) if n_wide == 1 else (int(across.min()), int(across.max()))
        part: Array = region(
            self.source, n_wide, range(int(lines[0]), int(lines[-1]) + 1), range(low, high + 1), self.dtype
        )
        if part.dtype.kind == "f" and not np.isfinite(part).all():
            raise RefusedError("has scales that are NaN or infinite", tensor=self.source.name, hint=UNPACK_HINT)
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


def grid_of(scheme: str, source: TensorSource, shape: tuple[int, ...], blocks: Sequence[tuple[int, int]] = ()) -> Grid:
    """How `source` scales a weight of `shape`: per tensor, rows, columns of stacked weights, or one of `blocks`.

    Raises RefusedError if that is ambiguous.
    """
    rows, columns, lead = shape[-2], shape[-1], shape[:-2]
    dtype = "F8_E8M0" if source.dtype == "U8" else None  # bare exponents
    if count(source) == 1:
        return Grid(source, n_elements(shape[:-1]), (1, 1), n_elements(shape[:-1]), columns, dtype=dtype)
    if source.shape in (shape[:-1], (*shape[:-1], 1)):
        return Grid(source, rows, (rows, 1), 1, columns, dtype=dtype)
    if source.shape in (lead, (*lead, 1), (*lead, 1, 1)) and lead:
        return Grid(source, rows, (1, 1), rows, columns, dtype=dtype)
    if source.shape == (*lead, 1, columns) and lead:
        return Grid(source, rows, (1, columns), rows, 1, dtype=dtype)
    if len(source.shape) == len(shape) and source.shape[:-2] == lead and count(source):
        high, wide = source.shape[-2:]
        for height, width in blocks:
            if (-(-rows // height), -(-columns // width)) == (high, wide):
                return Grid(source, rows, (high, wide), height, width, dtype=dtype)
    stated = " or ".join(f"blocks of {a}x{b}" for a, b in blocks) or "one scale per row"
    what = f"scales of shape {list(source.shape)} do not match a weight of shape {list(shape)} with {stated}"
    raise refusal(scheme, source.name, what)


def scale_blocks(scheme: str, settings: Settings, tensor: str) -> list[tuple[int, int]]:
    """Block sizes from the settings: `weight_block_size`, or groups and blocks of compressed-tensors."""
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
            raise refusal(
                scheme, tensor, f"the block size {size!r} is not a pair of sizes", "correct it in config.json"
            )
        height, width = (positive(scheme, "a block size", n, tensor) for n in pair)
        found.append((height, width))
    return found


def weight_arguments(settings: Settings) -> list[dict[str, object]]:
    """The weight settings of each group of a compressed-tensors config."""
    groups = settings.get("config_groups")
    entries = groups.values() if isinstance(groups, dict) else ()
    found = [entry.get("weights") for entry in entries if isinstance(entry, dict)]
    return [weights for weights in found if isinstance(weights, dict)]


def require_symmetric(scheme: str, scale: TensorSource, settings: Settings) -> None:
    """Raises RefusedError for scales without zero points if the config says that every weight has them."""
    arguments = weight_arguments(settings)
    if arguments and all(weights.get("symmetric") is False for weights in arguments):
        raise refusal(scheme, scale.name, "zero points are missing, but config.json has symmetric false")


Decoder = Callable[[StoredTensors, Settings], Decoded]


@dataclass(frozen=True, slots=True)
class Scheme:
    """A quantization scheme.

    Attributes:
        id: short name, `fp8`.
        label: for messages, `FP8`.
        methods: `quant_method` of the configs that use it.
        main: suffix of the tensor that identifies it; the base name precedes it.
        dtypes: stored dtypes of that tensor.
        needs: suffixes of the other tensors.
        may: suffixes of optional tensors.
        result: suffix of the dequantized weight's name.
        decode: checks the tensors and returns the weight.
        by_form: whether it checks only dtypes and shapes, so that the result for one weight is valid for all alike.
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


TRANSPOSED_STEP = 1 << 20  # fewer, longer reads if columns of the stored tensor become rows


# --- small integers in 32-bit words: GPTQ, AWQ, pack-quantized of compressed-tensors ---


CONFIG_HINT = "config.json does not match these weights: download both again from one revision"
DEQUANTIZE_HINT = (
    'python -c "from transformers import AutoModelForCausalLM as M, CompressedTensorsConfig as C; '
    "M.from_pretrained('DIR', quantization_config=C(dequantize=True), dtype='auto').save_pretrained('OUT')\""
)
"""The line that decodes what compressed-tensors packed."""
