"""Applies a RowMapping: reads rows of the source tensors in the order of the output, in chunks of about 1 MiB.

Rows of stored bytes move unchanged, quantized blocks too. Operations below rows (transposed matrices, shuffled columns,
mapped values) work on single elements: quantized tensors are dequantized for them, one tensor at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import lcm, prod

from aprfmt.arch.links import RowMapping
from aprfmt.arch.orders import UNIT_COLUMNS, indices, map_values
from aprfmt.arch.row import INT32, PACKS, PLUS_ROW, PRODUCT
from aprfmt.canonical.packed import PackedTensor
from aprfmt.canonical.source_rows import SourceRows, as_bytes, column_lengths, read_rows, take_rows
from aprfmt.codecs import mxfp4
from aprfmt.codecs.dtypes import DTYPES
from aprfmt.codecs.packed import SCALE, TensorScales
from aprfmt.codecs.recode import Items, decode, recode
from aprfmt.codecs.stream import TensorSource, read_part, regroup
from aprfmt.errors import RefusedError
from aprfmt.io.pipe import CHUNK_BYTES, Item, Job, run_jobs, source_jobs
from aprfmt.io.source import Buffer
from aprfmt.model import Tensor
from aprfmt.types import Array, Shape


@dataclass(slots=True)
class BufferedTensor:
    """A lazy tensor whose bytes are computed once (blocks that cannot move, another mapping) and held while they are
    read.
    """

    name: str
    dtype: str
    shape: Shape
    make: Callable[[], Iterable[Buffer]]
    scales: TensorScales = field(default_factory=dict)
    _data: bytes | None = None

    @property
    def n_bytes(self) -> int:
        """Bytes once decoded."""
        return DTYPES[self.dtype].n_bytes(self.shape)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fills `buffer` from byte `offset` of the decoded tensor."""
        data = self._data
        if data is None:
            data = self._data = b"".join(self.make())
        buffer[:] = memoryview(data)[offset : offset + len(buffer)]

    def drop(self) -> None:
        """Frees the memory; the next use computes the bytes again."""
        self._data = None


@dataclass(frozen=True, slots=True)
class StackedMatrix:
    """One matrix of a stack, read where it is stored.

    Attributes:
        name: its own.
        stack: the tensor that it is part of.
        number: its place there, from 0.
        shape: row-major; as many values as the stack has for each of its first dimension.
    """

    name: str
    stack: TensorSource
    number: int
    shape: Shape

    @property
    def dtype(self) -> str:
        """Dtype of the stack."""
        return self.stack.dtype

    @property
    def n_bytes(self) -> int:
        """Stored bytes."""
        return self.stack.n_bytes // self.stack.shape[0]

    @property
    def scales(self) -> TensorScales:
        """Its scales among those of the stack."""
        return {which: values[self.number :][:1] or values for which, values in scales_of(self.stack).items()}

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fills `buffer` from byte `offset` of the matrix."""
        self.stack.read_into(self.number * self.n_bytes + offset, buffer)


@dataclass(frozen=True, slots=True)
class Produced:
    """One output tensor of a RowMapping: its form, its bytes, and the memory needed to produce them."""

    dtype: str
    shape: Shape
    n_bytes: int
    items: Items
    held_bytes: int = 0
    scales: TensorScales = field(default_factory=dict)

    def chunks(self) -> Iterator[Buffer]:
        """Its bytes, chunk by chunk."""
        return run_jobs(self.items(1))

    def data(self) -> bytes:
        """All its bytes, in memory."""
        return b"".join(self.chunks())

    def values(self) -> Array:
        """The tensor in memory, decoded."""
        made = self.without_scales()
        return decode(made.dtype, made.data(), made.shape)

    def without_scales(self) -> Produced:
        """The values in a dtype without tensor scales: F32 if there are scales, else unchanged."""
        return unchanged_output(_floats(self.as_source(""))) if self.scales else self

    def as_source(self, name: str) -> TensorSource:
        """Its bytes as a source for another RowMapping."""
        return BufferedTensor(name, self.dtype, self.shape, self.chunks, self.scales)


_INTEGERS = ("I64", "I32")


def keeps_dtype(sources: Sequence[TensorSource], mapping: RowMapping) -> bool:
    """Whether the output has the stored dtype of the sources: nothing needs to be dequantized."""
    if mapping.pack:
        return True
    dtypes = {source.dtype for source in sources}
    if len(dtypes) > 1 or mapping.maps_values:
        return False
    row = DTYPES[dtypes.pop()]
    if row.kind == "plain" or (mapping.is_plain and len(sources) == 1):
        return True
    n_rows = sum(prod(source.shape) for source in sources) // max(1, mapping.row_elements)
    n_bytes = sum(source.n_bytes for source in sources)
    return (
        mapping.moves_rows_only
        and row.kind == "ggml"
        and len(mapping.before[0]) >= 2
        and n_rows > 0
        and n_bytes % n_rows == 0
    )


def unchanged_output(source: TensorSource) -> Produced:
    """The output of an identity mapping; most tensors of a large model are one."""
    held = source.n_bytes if isinstance(source, BufferedTensor) else 0
    return Produced(
        source.dtype, source.shape, source.n_bytes, partial(_whole, source, source.n_bytes), held, scales_of(source)
    )


def scales_of(source: TensorSource) -> TensorScales:
    """The tensor scales that the blocks of a source need."""
    return source.scales if isinstance(source, PackedTensor | BufferedTensor | StackedMatrix) else {}


def _scales_after(
    sources: Sequence[TensorSource], mapping: RowMapping, position: int, inverse: bool
) -> TensorScales | None:
    """The scales of an output tensor, from those of the sources its rows come from.

    None if rows of one matrix have different scales, which no output can store.
    """
    import numpy as np

    if mapping.pack or mapping.lead or mapping.trail or mapping.skip or mapping.cut or not mapping.moves_rows_only:
        return None
    shapes = mapping.before if inverse else mapping.after
    shape, width = shapes[position], mapping.row_elements
    first = sum(map(prod, shapes[:position])) // width
    index = indices(mapping.orders, mapping.n_rows, inverse=inverse) if mapping.orders else np.arange(mapping.n_rows)
    index = index[first : first + prod(shape) // width].reshape(prod(shape[:-2]), -1)
    found: dict[str, tuple[float, ...]] = {}
    for which in dict.fromkeys(which for source in sources for which in scales_of(source)):
        own = [np.array(scales_of(source).get(which, (1.0,))) for source in sources]
        of_rows = [np.repeat(v, prod(p.shape) // width // len(v)) for v, p in zip(own, sources, strict=True)]
        matrices = np.concatenate(of_rows)[index]
        if (matrices == matrices[:, :1]).all():
            found[which] = tuple(matrices[:, 0].tolist())
        elif which == SCALE:
            return None
    return found


def produce(sources: Sequence[TensorSource], mapping: RowMapping, position: int, *, inverse: bool = False) -> Produced:
    """Output tensor `position` of the GGUF side from the sources of the Hugging Face side; `inverse`: the other way.

    The dtype is the sources' own if keeps_dtype, else F32. Raises RefusedError for impossible orders.
    """
    shapes = mapping.before if inverse else mapping.after
    shape = shapes[position]
    if mapping.pack:
        return mxfp4_tensor(sources, mapping, position, inverse=inverse)
    if mapping.value == PRODUCT:
        return _product(sources, shape, position, inverse)
    if mapping.lead or mapping.trail:
        return _padded(sources, mapping, position, inverse)
    scales: TensorScales = {}
    if any(map(scales_of, sources)):
        after = _scales_after(sources, mapping, position, inverse) if keeps_dtype(sources, mapping) else None
        sources, scales = (sources, after) if after is not None else ([_floats(source) for source in sources], {})
    counts = mapping.value in (PLUS_ROW, INT32) and all(source.dtype in _INTEGERS for source in sources)
    mapped = mapping.maps_values and all(source.dtype == "F32" for source in sources)
    if not (counts or mapped or keeps_dtype(sources, mapping)):
        sources = [_floats(source) for source in sources]
    dtype = sources[0].dtype if mapping.value != INT32 or not counts else "I64" if inverse else "I32"
    held = sum(source.n_bytes for source in sources if isinstance(source, BufferedTensor))
    if mapping.is_plain or prod(shape) == 0:
        return (
            unchanged_output(sources[0]) if prod(shape) else Produced(dtype, shape, 0, partial(_whole, sources[0], 0))
        )
    # The outputs of a mapping are concatenated in one sequence of rows; this one's follow those before it.
    first = sum(map(prod, shapes[:position])) // mapping.row_elements
    rows = range(first, first + prod(shape) // mapping.row_elements)
    run = _Run(sources, mapping, position, inverse, rows)
    n_read = sum(source.n_bytes for source in sources)
    if mapping.moves_rows_only:
        row_bytes = n_read // (mapping.n_rows + (0 if inverse else mapping.skip))
        return Produced(dtype, shape, len(rows) * row_bytes, partial(run.move_rows, row_bytes), held, scales)
    return Produced(dtype, shape, DTYPES[dtype].n_bytes(shape), lambda unit: run.move_elements(), n_read)


def _padded(sources: Sequence[TensorSource], mapping: RowMapping, position: int, inverse: bool) -> Produced:
    """The single GGUF tensor with padding rows added before and after those of the sources, or removed."""
    if inverse:
        return _without_padding(sources[0], mapping, position)
    rows = produce(sources, mapping.inner, 0)
    row_bytes = DTYPES[rows.dtype].n_bytes((mapping.row_elements,))

    def items(unit: int) -> Iterator[Item]:
        yield bytes(mapping.lead * row_bytes)
        yield from rows.items(unit)
        yield mapping.trail * (_first_bytes(rows, row_bytes) if mapping.repeats else bytes(row_bytes))

    n_bytes = rows.n_bytes + (mapping.lead + mapping.trail) * row_bytes
    return Produced(rows.dtype, mapping.after[0], n_bytes, items, rows.held_bytes)


def _first_bytes(produced: Produced, n_bytes: int) -> bytes:
    found = b""
    for chunk in produced.chunks():
        found += bytes(memoryview(chunk).cast("B")[: n_bytes - len(found)])
        if len(found) == n_bytes:
            break
    return found


def _without_padding(source: TensorSource, mapping: RowMapping, position: int) -> Produced:
    """A tensor of the Hugging Face side. Producing it raises RefusedError if a removed row is not padding."""
    row_bytes = DTYPES[source.dtype].n_bytes((mapping.row_elements,))
    inner = mapping.inner
    inside = _Part(source, mapping.lead * row_bytes, inner.after[0])
    made = produce([inside], inner, position, inverse=True)

    def items(unit: int) -> Iterator[Item]:
        first = bytes(read_part(inside, 0, row_bytes)) if mapping.repeats else b""
        for start, rows in ((0, mapping.lead), (source.n_bytes - mapping.trail * row_bytes, mapping.trail)):
            left_out = bytes(read_part(source, start, rows * row_bytes))
            if not any(left_out) or (start and mapping.repeats and left_out == first * rows):
                continue
            if decode(source.dtype, left_out, (rows, mapping.row_elements)).any():
                raise RefusedError(
                    f"{rows} of its padding rows are not {'copies of the first row' if mapping.repeats else 'zero'}",
                    tensor=source.name,
                    hint="the metadata belongs to another model, or the tensor is damaged",
                )
        yield from made.items(unit)

    return Produced(made.dtype, made.shape, made.n_bytes, items, made.held_bytes)


@dataclass(frozen=True, slots=True)
class _Part:
    """Neighbouring rows of a source, from byte `start` on."""

    whole: TensorSource
    start: int
    shape: Shape

    @property
    def name(self) -> str:
        return self.whole.name

    @property
    def dtype(self) -> str:
        return self.whole.dtype

    @property
    def n_bytes(self) -> int:
        return DTYPES[self.dtype].n_bytes(self.shape)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fills `buffer` from byte `offset` of the part."""
        self.whole.read_into(self.start + offset, buffer)


def _product(sources: Sequence[TensorSource], shape: Shape, position: int, inverse: bool) -> Produced:
    """The elementwise product of two tensors in F32; in reverse the product and ones."""
    import numpy as np

    if not inverse:
        a, b = map(_floats, sources)

        def multiplied(unit: int) -> Iterator[Item]:
            values, others = (np.frombuffer(b"".join(run_jobs(_whole(p, p.n_bytes, 1))), "<f4") for p in (a, b))
            yield as_bytes(values * others)

        return Produced("F32", shape, 4 * prod(shape), multiplied)
    if position == 0:
        stored = _floats(sources[0])
        return Produced("F32", shape, 4 * prod(shape), partial(_whole, stored, stored.n_bytes))
    return Produced("F32", shape, 4 * prod(shape), lambda unit: iter((np.ones(shape, "<f4").tobytes(),)))


def _floats(source: TensorSource) -> TensorSource:
    if source.dtype == "F32":
        return source

    def read() -> Iterator[Buffer]:
        return run_jobs(_whole(source, source.n_bytes, 1))

    floats = BufferedTensor(source.name, "F32", source.shape, lambda: recode(source.dtype, "F32", source.shape, read))
    factors = scales_of(source).get(SCALE)
    return replace(floats, make=partial(_multiplied, floats.make, factors, prod(source.shape))) if factors else floats


def _multiplied(make: Callable[[], Iterable[Buffer]], factors: tuple[float, ...], n_values: int) -> Iterator[Buffer]:
    """The float32 values of `make`, each matrix times its factor."""
    import numpy as np

    numbers, size, start = np.array(factors, np.float32), n_values // len(factors), 0
    for chunk in make():
        values = np.frombuffer(chunk, "<f4")
        yield as_bytes(values * numbers[np.arange(start, start + values.size) // size])
        start += values.size


def _whole(source: TensorSource, n_bytes: int, unit: int) -> Iterator[Item]:
    if isinstance(source, BufferedTensor):
        return iter(source.make())
    if isinstance(source, Tensor) and n_bytes <= source.n_bytes:
        return source_jobs(source.source, source.offset, n_bytes, unit)
    step = max(1, CHUNK_BYTES // unit) * unit
    starts = range(0, n_bytes, step)
    return (Job(min(step, n_bytes - s), partial(read_part, source, s, min(step, n_bytes - s))) for s in starts)


@dataclass(frozen=True, slots=True)
class _Run:
    """One output tensor of a mapping: its inputs and its range of the mapping's rows."""

    sources: Sequence[TensorSource]
    mapping: RowMapping
    position: int
    inverse: bool
    rows: range

    def _items(self, jobs: Iterator[Job]) -> Iterator[Item]:
        """`jobs` unchanged, but run at once if they read buffered sources: these are dropped at the end."""
        held = [source for source in self.sources if isinstance(source, BufferedTensor)]
        for job in jobs:
            yield job.run() if held else job
        for source in held:
            source.drop()

    def move_rows(self, row_bytes: int, unit: int) -> Iterator[Item]:
        """Whole rows of `row_bytes`, in chunks that are multiples of `unit` bytes if possible."""
        if self.mapping.skip and self.inverse:
            yield bytes(self.mapping.skip * row_bytes)  # rows that a GGUF does not store
        yield from self._items(self._row_jobs(row_bytes, unit))

    def _row_jobs(self, row_bytes: int, unit: int) -> Iterator[Job]:
        import numpy as np

        mapping, rows = self.mapping, self.rows
        ends = np.cumsum([source.n_bytes // row_bytes for source in self.sources])
        whole = lcm(row_bytes, unit)
        if whole > CHUNK_BYTES:  # rows and units that seldom coincide: the caller regroups
            whole = row_bytes
        step = max(1, CHUNK_BYTES // whole) * (whole // row_bytes)
        index = indices(mapping.orders, mapping.n_rows, inverse=self.inverse) if mapping.orders else None
        # Skipped rows come first on the Hugging Face side, and only there.
        if mapping.skip and self.inverse:
            rows = range(rows.stop - mapping.skip)
        elif mapping.skip:
            rows = range(rows.start + mapping.skip, rows.stop + mapping.skip)
        for start in range(rows.start, rows.stop, step):
            part = np.arange(start, min(start + step, rows.stop))
            wanted = part if index is None else index[part]
            yield Job(len(part) * row_bytes, partial(read_rows, self.sources, ends, wanted, row_bytes))

    def move_elements(self) -> Iterator[Item]:
        """Values that move one by one: permuted columns, transposed matrices, mapped values."""
        return self._items(self._element_jobs())

    def _element_jobs(self) -> Iterator[Job]:
        import numpy as np

        mapping, inverse = self.mapping, self.inverse
        row_elements = mapping.row_elements
        after_flags = mapping.after_transposed or (False,) * len(mapping.after)
        before = list(zip(mapping.before, (mapping.transposed,) * len(mapping.before), strict=True))
        after = list(zip(mapping.after, after_flags, strict=True))
        layouts, (shape, transposed) = (after, before[self.position]) if inverse else (before, after[self.position])
        lines = [
            SourceRows(source, *layout, row_elements) for source, layout in zip(self.sources, layouts, strict=True)
        ]
        index = indices(mapping.orders, mapping.n_rows, inverse=inverse)[self.rows.start : self.rows.stop]
        columns = indices(mapping.columns, row_elements, inverse=inverse) if mapping.columns else None
        value, first = mapping.value, self.rows.start
        lengths = column_lengths(lines, mapping.n_rows, row_elements) if value == UNIT_COLUMNS and not inverse else 1.0
        factors = _factors(mapping) if mapping.scales else None

        def make(part: Array, start: int) -> Buffer:
            block = take_rows(lines, part, row_elements)
            there = np.arange(first + start, first + start + len(part))
            if factors is not None and inverse:
                block = _scaled(block, factors[:, part], inverse)
            block = block if columns is None else block[:, columns]
            if value == PLUS_ROW:
                block = block + (part * (-1 if inverse else 1))[:, None].astype(block.dtype)
            elif value == INT32:
                block = _integers(block, 64 if inverse else 32, self.sources[0].name)
            elif value == UNIT_COLUMNS:
                block = (block / lengths).astype(np.float32, copy=False)
            elif value:
                rows = there if inverse else part
                block = map_values(value, block, rows, inverse=inverse).astype(np.float32, copy=False)
            if factors is not None and not inverse:
                block = _scaled(block, factors[:, there], inverse)
            block = block.T if transposed else block
            return as_bytes(block)

        # A transposed output is made matrix by matrix, any other in chunks of about 1 MiB.
        row_bytes = row_elements * (lines[0].element.itemsize if value != INT32 else 8 if inverse else 4)
        step = shape[-1] if transposed else max(1, CHUNK_BYTES // row_bytes)
        for start in range(0, len(index), step):
            part = index[start : start + step]
            yield Job(len(part) * row_bytes, partial(make, part, start))
        if inverse and mapping.cut:
            rest = mapping.cut * row_bytes
            yield Job(rest, partial(bytes, rest))


def _factors(mapping: RowMapping) -> Array:
    """The successive factors of each row of the GGUF side: float32 [numbers, rows]."""
    import numpy as np

    runs = [rows for rows, _ in mapping.scales]
    most = max(len(numbers) for _, numbers in mapping.scales)
    padded = [(*numbers, *[1.0] * (most - len(numbers))) for _, numbers in mapping.scales]
    return np.repeat(np.array(padded, np.float32).T, runs, axis=1)


def _scaled(block: Array, factors: Array, inverse: bool) -> Array:
    """Rows multiplied by their factors one after the other, or divided by them in reverse order."""
    for numbers in factors[::-1] if inverse else factors:
        block = block / numbers[:, None] if inverse else block * numbers[:, None]
    return block


def _integers(block: Array, bits: int, name: str) -> Array:
    """Stored unsigned words as integers of `bits` bits. Raises RefusedError for values that do not fit."""
    import numpy as np

    signed = block.view(f"<i{block.itemsize}")
    out = signed.astype(f"<i{bits // 8}")
    if not np.array_equal(out, signed):
        raise RefusedError(f"{np.abs(signed).max()} does not fit the {bits}-bit integers of a GGUF", tensor=name)
    return out


# --- packed blocks ---


@dataclass(frozen=True, slots=True)
class _Mxfp4Rows:
    """MXFP4 rows from the blocks and scales of a checkpoint, packed as they are read."""

    blocks: TensorSource
    scales: TensorSource
    shape: Shape
    dtype: str = "MXFP4"

    @property
    def name(self) -> str:
        return self.blocks.name

    @property
    def n_bytes(self) -> int:
        return DTYPES[self.dtype].n_bytes(self.shape)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fills `buffer` from byte `offset`; the blocks that it touches are packed for it."""
        first, end = offset // mxfp4.ROW_BYTES, -(-(offset + len(buffer)) // mxfp4.ROW_BYTES)
        blocks, scales = bytearray(mxfp4.PIECE_BYTES * (end - first)), bytearray(end - first)
        self.blocks.read_into(mxfp4.PIECE_BYTES * first, memoryview(blocks))
        self.scales.read_into(first, memoryview(scales))
        start = offset - first * mxfp4.ROW_BYTES
        buffer[:] = memoryview(mxfp4.pack(blocks, scales))[start : start + len(buffer)]


def mxfp4_tensor(sources: Sequence[TensorSource], mapping: RowMapping, position: int, *, inverse: bool) -> Produced:
    """MXFP4 rows of the GGUF from values and scales, or the values or the scales from the rows.

    Values are bytes [..., n / 32, 16] or [..., n / 2], scales [..., n / 32]; first all the values, then their scales in
    the same order. The rows of all `after` tensors are theirs in order.
    """
    half = len(mapping.before) // 2
    matrices = tuple(map(_mxfp4_matrix, mapping.before[:half], mapping.before[half:]))
    if not matrices or None in matrices or 2 * half != len(mapping.before):
        blocks, scales = (list(mapping.before[i % len(mapping.before)]) for i in (0, half))
        raise RefusedError(f"{blocks} and {scales} are not MXFP4 values and scales", tensor=sources[0].name)
    shape = (mapping.before if inverse else mapping.after)[position]
    outer = RowMapping(tuple(matrix for matrix in matrices if matrix is not None), mapping.after, mapping.orders)
    outer.check(sources[0].name)
    if not inverse:
        pairs = zip(sources[:half], sources[half:], outer.before, strict=True)
        return produce([_Mxfp4Rows(*pair) for pair in pairs], outer, position)
    part, which = divmod(position, half)
    rows = produce(sources, outer, which, inverse=True)
    size = mxfp4.ROW_BYTES

    def unpacked(unit: int) -> Iterator[Buffer]:
        for chunk in regroup(rows.chunks(), size, max(size, CHUNK_BYTES // size * size)):
            yield mxfp4.unpack(chunk)[part]

    return Produced(PACKS[mapping.pack][part], shape, prod(shape), unpacked)


def _mxfp4_matrix(values: Shape, scales: Shape) -> Shape | None:
    """[rows, n] of a packed tensor; None if the two shapes do not match."""
    if not scales or values not in ((*scales, mxfp4.PIECE_BYTES), (*scales[:-1], mxfp4.PIECE_BYTES * scales[-1])):
        return None
    return prod(scales[:-1]), scales[-1] * 2 * mxfp4.PIECE_BYTES
