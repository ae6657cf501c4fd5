"""Tensors by dtype: expected stored bytes, decoding in memory, and jobs that change the dtype.

The jobs process whole blocks in parallel, with constant memory.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from threading import Lock
from typing import TYPE_CHECKING

from aprfmt.codecs import aprq, ggml, plain
from aprfmt.codecs.dtypes import DTYPES, Dtype, find_dtype, n_elements
from aprfmt.codecs.stream import STEP, rebatch, regroup, whole_units
from aprfmt.errors import CorruptError, LimitError, MissingDependencyError, UnsupportedError, UsageError
from aprfmt.io.pipe import Item, Job, item_bytes, run_jobs
from aprfmt.io.source import Buffer
from aprfmt.limits import MAX_NDIM
from aprfmt.types import Array

if TYPE_CHECKING:
    import torch

_MAX_ARRAY_ELEMENTS = 1 << 59
"""Product of the dims that are not zero: numpy and torch count an array's bytes in 63 bits."""


def stored_bytes(dtype: str, shape: tuple[int, ...], *, padded: bool = True) -> int:
    """Stored bytes of a tensor; if blocks do not divide a row, each row is padded to whole blocks.

    Unless `padded`, such shapes raise UsageError, as only the reference writes them.
    """
    row = DTYPES[dtype]
    if padded and is_padded(row, shape):
        return n_elements(shape[:-1]) * -(-shape[-1] // row.block) * row.block_bytes
    return row.n_bytes(shape)


def is_padded(row: Dtype, shape: tuple[int, ...]) -> bool:
    """Whether the rows of a GGML block tensor need padding."""
    return row.kind == "ggml" and bool(shape) and n_elements(shape) > 0 and shape[-1] % row.block != 0


def can_encode(dtype: str) -> bool:
    """Whether the dtype can be written: floats, AprQ4, AprQ8, GGML types (most need libggml)."""
    row = find_dtype(dtype)
    if row.kind == "ggml":
        return ggml.encodable(row.name)
    return row.kind == "aprq" or row.name in plain.ENCODABLE


def decode(dtype: str, data: Buffer, shape: tuple[int, ...], *, tensor: str | None = None) -> Array:
    """Decodes a tensor, row-major. Plain dtypes are a view of `data`, without a copy.

    BF16, 8-bit floats and quantized dtypes become float32, BOOL becomes bool. `tensor` names it in errors. Dims beyond
    the eighth, which an APR drops, are restored as one. Raises CorruptError if the length does not match dtype and
    shape, LimitError for dims beyond any array, UnsupportedError without a decoder.
    """
    row = DTYPES[dtype]
    shape = _array_shape(row, data, shape, tensor)
    if row.kind == "plain":
        values = plain.decode(dtype, data)
    elif row.kind == "ggml":
        padded = is_padded(row, shape) and not _is_flat(row, data, shape)
        values = ggml.decode(dtype, data, cols=shape[-1] if padded else None, tensor=tensor)
        values = values[: n_elements(shape)]
    elif dtype == "AprQ4":
        values = aprq.decode_q4(data, n_elements(shape))
    else:
        view = memoryview(data)
        values = aprq.decode_q8(view[4:], struct.unpack("<f", view[:4])[0] if view.nbytes else 1.0)
    return values.reshape(shape)


def _array_shape(row: Dtype, data: Buffer, shape: tuple[int, ...], tensor: str | None) -> tuple[int, ...]:
    """`shape`, with the dims that an APR dropped as one more; checked against the length of `data`."""
    n_bytes = memoryview(data).nbytes
    if math.prod(dim for dim in shape if dim) > _MAX_ARRAY_ELEMENTS:
        raise LimitError(f"invalid array shape {list(shape)}", tensor=tensor)
    if _is_flat(row, data, shape):
        return shape
    expected = stored_bytes(row.name, shape)
    if row.kind == "plain" and len(shape) == MAX_NDIM and expected and n_bytes % expected == 0:
        return (*shape, n_bytes // expected)
    if n_bytes != expected:
        raise CorruptError(
            f"{n_bytes} bytes are stored, but {row.name} of shape {list(shape)} needs {expected}", tensor=tensor
        )
    return shape


def _is_flat(row: Dtype, data: Buffer, shape: tuple[int, ...]) -> bool:
    """Whether GGML blocks of an APR continue across rows: only the last one of the tensor is padded."""
    if row.kind != "ggml" or row.apr_id is None or not shape:
        return False
    return memoryview(data).nbytes == -(-n_elements(shape) // row.block) * row.block_bytes


def decode_torch(dtype: str, data: Buffer, shape: tuple[int, ...], *, tensor: str | None = None) -> torch.Tensor:
    """Decodes to a torch tensor: plain dtypes unchanged, quantized ones as float32.

    Plain values are not copied if `data` is writable. Raises MissingDependencyError without torch, otherwise as
    `decode`.
    """
    try:
        import torch
    except ImportError as error:
        raise MissingDependencyError("this needs torch", hint="pip install torch") from error
    row = DTYPES[dtype]
    if row.kind != "plain":
        return torch.from_numpy(decode(dtype, data, shape, tensor=tensor).copy())
    shape = _array_shape(row, data, shape, tensor)
    kind = getattr(torch, row.torch or "", None)
    if kind is None:
        raise UnsupportedError(f"this torch has no dtype for {dtype}", tensor=tensor, hint="use a newer torch")
    if not memoryview(data).nbytes:
        return torch.empty(shape, dtype=kind)
    own = bytearray(data) if memoryview(data).readonly else data
    if dtype == "BOOL":
        return (torch.frombuffer(own, dtype=torch.uint8) != 0).reshape(shape)
    return torch.frombuffer(own, dtype=kind).reshape(shape)


# --- another dtype ---

OverflowCount = Callable[[int], None]
"""Called with the number of finite values that became infinite in a narrower dtype."""

Read = Callable[[], Iterable[Buffer]]
"""Yields the stored bytes of a tensor in order, in chunks of any size; may be called again."""

Items = Callable[[int], Iterable[Item]]
"""Yields the stored bytes as chunks or jobs; chunks should be multiples of the given number of bytes."""


_COUNTING = Lock()
"""For callers that count the overflows of many tensors together."""


def encode(dtype: str, array: Array) -> bytes:
    """Encodes float values as `dtype`. Raises UsageError, MissingDependencyError (`can_encode`)."""
    import numpy as np

    dtype = find_dtype(dtype).name
    values = np.ascontiguousarray(array)
    shape = tuple(int(dim) for dim in array.shape)
    if values.dtype.kind not in "f":
        values = values.astype("<f4")
    source = "F64" if values.dtype.itemsize == 8 else "F32"
    data = _bytes(values.astype(DTYPES[source].numpy, copy=False).reshape(-1))
    return b"".join(recode(source, dtype, shape, lambda: [data]))


def recode(
    src_dtype: str, dst_dtype: str, shape: tuple[int, ...], read: Read, overflow: OverflowCount | None = None
) -> Iterator[Buffer]:
    """Converts a tensor to another dtype, in chunks of about 1 MiB; memory does not grow with the tensor.

    Runs the jobs of `recode_jobs` one after the other. Raises as it does.
    """
    return run_jobs(recode_jobs(src_dtype, dst_dtype, shape, lambda unit: read(), overflow))


def recode_jobs(
    src_dtype: str,
    dst_dtype: str,
    shape: tuple[int, ...],
    items: Items,
    overflow: OverflowCount | None = None,
    weights: Array | None = None,
) -> Iterator[Item]:
    """Converts a tensor to another dtype, as jobs of about 1 MiB that may run in parallel.

    Blocks go through float32, F64 directly to the target. Rows that the target's blocks do not divide are padded with
    zeros for the K-quants of an APR. `weights` [matrices * cols], float32, are column importances for GGML targets.
    AprQ8 as target calls `items` twice.

    Raises UsageError for a shape or dtype that cannot be written, MissingDependencyError for block types that need
    libggml, both immediately; while iterating CorruptError if `items` yields too few or too many bytes; in the jobs
    RefusedError for values that blocks cannot represent.
    """
    src, dst = DTYPES[src_dtype], DTYPES[dst_dtype]
    if src is dst:
        return iter(items(1))
    if not can_encode(dst.name):
        if dst.kind == "ggml":
            raise ggml.missing_library(dst.name, "encode")
        raise UsageError(f"values cannot be written as {dst.name}", hint="choose f32, f16, bf16 or a quantized dtype")
    if src.name == "C64":
        raise UsageError(f"complex values cannot be written as {dst.name}", hint="keep them with --dtype keep")
    if not (is_padded(dst, shape) and dst.apr_id is not None):
        dst.n_bytes(shape)

    def count_overflow(n: int) -> None:
        assert overflow is not None
        with _COUNTING:
            overflow(n)

    change = _Change(src, dst, shape, None if overflow is None else count_overflow, weights)
    if dst.name == "AprQ8":
        return _to_q8(change, lambda: run_jobs(items(1)))
    if change.units is not None:
        return _jobs(change, items)
    batches = rebatch(_values(change, lambda: run_jobs(items(1))), dst.block)
    return (_bytes(change.encode(values, 0)) for values in batches)


@dataclass(frozen=True, slots=True)
class _Units:
    """The number of values in whole blocks of both dtypes, and their bytes in each."""

    values: int
    src_bytes: int
    dst_bytes: int


@dataclass(frozen=True)
class _Change:
    """A conversion of a tensor."""

    src: Dtype
    dst: Dtype
    shape: tuple[int, ...]
    overflow: OverflowCount | None
    weights: Array | None

    @property
    def cols(self) -> int:
        """Values per row."""
        return self.shape[-1] if self.shape else 1

    @cached_property
    def units(self) -> _Units | None:
        """The smallest piece that can be converted by itself; None if blocks and rows do not align."""
        src, dst, cols = self.src, self.dst, self.cols
        if src.name == "AprQ8" or not cols:
            return None
        row = (cols,)
        if is_padded(src, self.shape) or dst.kind == "ggml":
            if dst.kind == "aprq" or (src.kind == "aprq" and cols % src.block):
                return None
            return _Units(cols, stored_bytes(src.name, row), stored_bytes(dst.name, row))
        n = max(src.block, dst.block)
        return _Units(n, n // src.block * src.block_bytes, n // dst.block * dst.block_bytes)

    def recode(self, data: Buffer, count: int, first: int) -> Array:
        """Converts stored bytes of whole units, with `count` values of the tensor."""
        if self.src.kind == self.dst.kind == "plain":
            return plain.cast(self.src.name, self.dst.name, data, self.overflow)
        return self.encode(self.decode(data)[:count], first)

    def decode(self, data: Buffer) -> Array:
        """Decodes stored bytes of whole units to 1-d floats, without row padding."""
        src = self.src
        if src.name == "AprQ4":
            return aprq.decode_q4(data, len(data) // src.block_bytes * src.block)
        if src.kind == "ggml":
            return ggml.decode(src.name, data, cols=self.cols if is_padded(src, self.shape) else None)
        values = plain.decode(src.name, data)
        return values if values.dtype.kind == "f" else values.astype("<f4")

    def encode(self, values: Array, first: int) -> Array:
        """Encodes 1-d floats; `first` is the number of preceding values of the tensor."""
        dst = self.dst
        if dst.kind == "plain":
            return plain.encode(dst.name, values, self.overflow)
        values = plain.encode("F32", values, self.overflow)
        if dst.name == "AprQ4":
            return aprq.encode_q4(values)
        if self.weights is None:
            return self._encode_rows(values, None, first)
        return self._encode_weighted(values, first // self.cols)

    def _encode_weighted(self, values: Array, first_row: int) -> Array:
        """Rows with the importances of their matrix; those of the outermost dims repeat."""
        import numpy as np

        assert self.weights is not None
        cols, per_matrix = self.cols, self.shape[-2] if len(self.shape) > 1 else 1
        weights = self.weights.reshape(-1, cols)
        parts, row, end = [], first_row, first_row + values.size // cols
        while row < end:
            stop = min(end, (row // per_matrix + 1) * per_matrix)
            part = values[(row - first_row) * cols : (stop - first_row) * cols]
            parts.append(self._encode_rows(part, weights[row // per_matrix % len(weights)], row * cols))
            row = stop
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _encode_rows(self, values: Array, weights: Array | None, first: int) -> Array:
        """Whole rows as blocks, each padded to whole blocks."""
        import numpy as np

        cols, wide = self.cols, -(-self.cols // self.dst.block) * self.dst.block
        if wide == cols:
            return ggml.encode(self.dst.name, values, cols, weights, start=first)
        rows = np.zeros((values.size // cols, wide), dtype="<f4")
        rows[:, :cols] = values.reshape(-1, cols)
        if weights is not None:
            weights = np.pad(weights, (0, wide - cols))
        return ggml.encode(self.dst.name, rows.reshape(-1), wide, weights)


def _jobs(change: _Change, items: Items) -> Iterator[Job]:
    """One job per piece of whole units."""
    units, n = change.units, n_elements(change.shape)
    assert units is not None
    piece = max(1, STEP // units.values) * units.src_bytes
    first = 0
    counted = _check_count(items(units.src_bytes), stored_bytes(change.src.name, change.shape), change.src)
    for item in whole_units(counted, units.src_bytes, piece):
        count = min(-(-item_bytes(item) // units.src_bytes) * units.values, n - first)
        n_bytes = -(-count // units.values) * units.dst_bytes
        if change.dst.kind == "plain":
            n_bytes = count * change.dst.block_bytes
        elif change.dst.name == "AprQ4":
            n_bytes = change.dst.n_bytes((count,))
        yield Job(n_bytes, partial(_run, change, item, first, count, n_bytes))
        first += count


def _run(change: _Change, item: Item, first: int, count: int, n_bytes: int) -> Buffer:
    """Converts one piece of `count` values, in parts that fit the cache."""
    import numpy as np

    units = change.units
    assert units is not None
    data = memoryview(item.run() if isinstance(item, Job) else item)
    step = max(1, STEP // units.values)
    if count <= step * units.values:
        return _bytes(change.recode(data, count, first))
    out, done = np.empty(n_bytes, dtype="u1"), 0
    for start in range(0, len(data), step * units.src_bytes):
        left = count - start // units.src_bytes * units.values
        end = start + step * units.src_bytes
        part = np.ascontiguousarray(change.recode(data[start:end], left, first + count - left)).view("u1")
        out[done : done + part.size] = part
        done += part.size
    return _bytes(out)


def _to_q8(change: _Change, read: Read) -> Iterator[Buffer]:
    if not n_elements(change.shape):
        return
    scale = aprq.q8_scale(plain.encode("F32", values) for values in _values(change, read))
    yield struct.pack("<f", scale)
    for values in _values(change, read):
        yield _bytes(aprq.encode_q8(plain.encode("F32", values), scale))


def _values(change: _Change, read: Read) -> Iterator[Array]:
    """The decoded values of a tensor in flat order, 1-d float arrays of at most about STEP values.

    Raises CorruptError if `read` does not yield the number of bytes that dtype and shape require.
    """
    src, shape = change.src, change.shape
    counted = run_jobs(_check_count(read(), stored_bytes(src.name, shape), src))
    if src.name == "AprQ8":
        yield from _q8_values(counted)
        return
    unit = stored_bytes(src.name, shape[-1:]) if is_padded(src, shape) else src.block_bytes
    piece = max(1, STEP // src.block * src.block_bytes // unit) * unit
    left = n_elements(shape)
    for chunk in regroup(counted, unit, piece):
        values = change.decode(chunk)[:left]
        left -= values.size
        yield values


def _q8_values(chunks: Iterator[Buffer]) -> Iterator[Array]:
    head = b""
    for chunk in chunks:
        take = 4 - len(head)
        head += bytes(memoryview(chunk)[:take])
        if len(head) == 4:
            scale = struct.unpack("<f", head)[0]
            for part in regroup(chain([memoryview(chunk)[take:]], chunks), 1, STEP):
                yield aprq.decode_q8(part, scale)


def _check_count(items: Iterable[Item], expected: int, src: Dtype) -> Iterator[Item]:
    """`items`, checked against the expected number of bytes."""
    n_bytes = 0
    for item in items:
        n_bytes += item_bytes(item)
        if n_bytes > expected:
            break
        yield item
    if n_bytes != expected:
        few = "too many" if n_bytes > expected else f"only {n_bytes}"
        raise CorruptError(f"a {src.name} tensor is incomplete: read {few} of {expected} bytes")


def _bytes(array: Array) -> Buffer:
    import numpy as np

    return np.ascontiguousarray(array).view("u1").data if array.size else b""
