"""Decoding, encoding and re-encoding of tensors: whole in memory, or streamed with constant memory."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any

from aprfmt.codecs import aprq, ggml, plain
from aprfmt.codecs.dtypes import DTYPES, Dtype, find_dtype, n_elements
from aprfmt.codecs.stream import STEP, rebatch, regroup
from aprfmt.errors import CorruptError, LimitError, MissingDependencyError, UnsupportedError, UsageError
from aprfmt.io.source import Buffer
from aprfmt.limits import MAX_NDIM

if TYPE_CHECKING:
    import numpy as np
    import torch

    Array = np.ndarray[Any, Any]

OverflowCount = Callable[[int], None]
"""Called with a number of finite values that became infinite in a narrower dtype."""

Read = Callable[[], Iterable[Buffer]]
"""Gives the stored bytes of a tensor in order, in pieces of any size, anew at every call."""


_MAX_ARRAY_ELEMENTS = 1 << 59
"""Product of the dims that are not zero: numpy and torch count an array's bytes in 63 bits."""


def stored_bytes(dtype: str, shape: tuple[int, ...], *, padded: bool = True) -> int:
    """Stored bytes of a tensor; where blocks do not divide a row, each row is padded to whole blocks.

    With `padded` False such shapes raise UsageError, as nobody but the reference writes them.
    """
    row = DTYPES[dtype]
    if padded and is_padded(row, shape):
        return n_elements(shape[:-1]) * -(-shape[-1] // row.block) * row.block_bytes
    return row.n_bytes(shape)


def is_padded(row: Dtype, shape: tuple[int, ...]) -> bool:
    """Whether a tensor of GGML blocks needs padding at the end of its rows."""
    return row.kind == "ggml" and bool(shape) and n_elements(shape) > 0 and shape[-1] % row.block != 0


def can_decode(dtype: str) -> bool:
    """Whether `decode` knows the dtype."""
    return find_dtype(dtype).name not in ggml.UNREADABLE


def can_encode(dtype: str) -> bool:
    """Whether `encode` and `recode` can write the dtype: floats, AprQ4, AprQ8 and the simpler GGML types."""
    row = find_dtype(dtype)
    return row.kind == "aprq" or row.name in plain.ENCODABLE or row.name in ggml.ENCODABLE


def decode(dtype: str, data: Buffer, shape: tuple[int, ...], *, tensor: str | None = None) -> Array:
    """The values of a tensor, row-major. Plain dtypes are a view of `data` as stored, without a copy.

    BF16, 8-bit floats and quantised dtypes become float32, BOOL becomes bool. `tensor` names it in errors.
    Dims beyond the eighth, which an APR drops, come back as one. Raises CorruptError where the length does
    not fit dtype and shape, LimitError for dims that no array has, UnsupportedError without a decoder.
    """
    row = DTYPES[dtype]
    shape = _array_shape(row, data, shape, tensor)
    if row.kind == "plain":
        values = plain.decode(dtype, data)
    elif row.kind == "ggml":
        if _is_flat(row, data, shape):
            values = ggml.decode(dtype, data, tensor=tensor)[: n_elements(shape)]
        elif is_padded(row, shape):
            values = ggml.decode_padded(dtype, data, shape[-1], tensor=tensor)
        else:
            values = ggml.decode(dtype, data, tensor=tensor)
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
        raise LimitError(f"no array has the shape {list(shape)}", tensor=tensor)
    if _is_flat(row, data, shape):
        return shape
    expected = stored_bytes(row.name, shape)
    if row.kind == "plain" and len(shape) == MAX_NDIM and expected and n_bytes % expected == 0:
        return (*shape, n_bytes // expected)
    if n_bytes != expected:
        raise CorruptError(
            f"{n_bytes} bytes are stored, {row.name} of shape {list(shape)} takes {expected}", tensor=tensor
        )
    return shape


def _is_flat(row: Dtype, data: Buffer, shape: tuple[int, ...]) -> bool:
    """Whether GGML blocks of an APR run over the ends of rows: only the last one of the tensor is filled up."""
    if row.kind != "ggml" or row.apr_id is None or not shape:
        return False
    return memoryview(data).nbytes == -(-n_elements(shape) // row.block) * row.block_bytes


_TORCH = {
    "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64", "I8": "int8", "I16": "int16",
    "I32": "int32", "I64": "int64", "U8": "uint8", "U16": "uint16", "U32": "uint32", "U64": "uint64",
    "BOOL": "bool", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
    "C64": "complex64",
}  # fmt: skip


def decode_torch(
    dtype: str, data: Buffer, shape: tuple[int, ...], *, tensor: str | None = None
) -> torch.Tensor:
    """The values as a torch tensor of its own memory: plain dtypes as they are, quantised ones as float32.

    Raises MissingDependencyError without torch, otherwise as `decode`.
    """
    try:
        import torch
    except ImportError as error:
        raise MissingDependencyError("this needs torch", hint="pip install 'aprfmt[train]'") from error
    row = DTYPES[dtype]
    if row.kind != "plain":
        return torch.from_numpy(decode(dtype, data, shape, tensor=tensor).copy())
    shape = _array_shape(row, data, shape, tensor)
    kind = getattr(torch, _TORCH[dtype], None)
    if kind is None:
        raise UnsupportedError(
            f"this torch has no dtype for {dtype}", tensor=tensor, hint="use a newer torch"
        )
    if not memoryview(data).nbytes:
        return torch.empty(shape, dtype=kind)
    if dtype == "BOOL":
        return (torch.frombuffer(bytearray(data), dtype=torch.uint8) != 0).reshape(shape)
    return torch.frombuffer(bytearray(data), dtype=kind).reshape(shape)


def encode(dtype: str, array: Array) -> bytes:
    """Float values as stored bytes of `dtype`. Raises UsageError, MissingDependencyError (`can_encode`)."""
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
    """The bytes of a tensor in another dtype, in pieces of about 1 MiB; memory does not grow with the tensor.

    Blocks go through float32, F64 directly to the target. AprQ8 as target calls `read` twice.

    Raises UsageError for a shape or dtype that cannot be written, MissingDependencyError for block types that
    only llama.cpp writes, both at once; while iterating CorruptError where `read` gives too few or too many
    bytes.
    """
    src, dst = DTYPES[src_dtype], DTYPES[dst_dtype]
    if src is dst:
        return iter(read())
    if not can_encode(dst.name):
        _refuse_target(dst)
    if src.name == "C64":
        raise UsageError(f"complex values cannot be written as {dst.name}", hint="keep them: --dtype keep")
    dst.n_bytes(shape)
    return _to_q8(src, shape, read) if dst.name == "AprQ8" else _recode(src, dst, shape, read, overflow)


def _recode(
    src: Dtype, dst: Dtype, shape: tuple[int, ...], read: Read, overflow: OverflowCount | None
) -> Iterator[Buffer]:
    for values in rebatch(_values(src, shape, read), dst.block):
        yield _bytes(_encode_part(dst, values, overflow))


def _refuse_target(dst: Dtype) -> None:
    if dst.kind == "ggml":
        ggml.encode(dst.name, _empty())
    raise UsageError(
        f"values cannot be written as {dst.name}", hint="choose f32, f16, bf16 or a quantised dtype"
    )


def _empty() -> Array:
    import numpy as np

    return np.empty(0, dtype="<f4")


def _encode_part(dst: Dtype, values: Array, overflow: OverflowCount | None) -> Array:
    if dst.kind == "plain":
        return plain.encode(dst.name, values, overflow)
    values = plain.encode("F32", values, overflow)
    return aprq.encode_q4(values) if dst.name == "AprQ4" else ggml.encode(dst.name, values)


def _to_q8(src: Dtype, shape: tuple[int, ...], read: Read) -> Iterator[Buffer]:
    if not n_elements(shape):
        return
    scale = aprq.q8_scale(plain.encode("F32", values) for values in _values(src, shape, read))
    yield struct.pack("<f", scale)
    for values in _values(src, shape, read):
        yield _bytes(aprq.encode_q8(plain.encode("F32", values), scale))


def _values(src: Dtype, shape: tuple[int, ...], read: Read) -> Iterator[Array]:
    """The decoded values of a tensor in flat order, 1-d float arrays of at most about STEP values.

    Raises CorruptError if the bytes that `read` gives are not as many as dtype and shape ask for.
    """
    counted = _counted(read(), stored_bytes(src.name, shape), src)
    if src.name == "AprQ8":
        yield from _q8_values(counted)
        return
    padded = is_padded(src, shape)
    unit = -(-shape[-1] // src.block) * src.block_bytes if padded else src.block_bytes
    piece = max(1, STEP // src.block * src.block_bytes // unit) * unit
    left = n_elements(shape)
    for chunk in regroup(counted, unit, piece):
        if padded:
            values = ggml.decode_padded(src.name, chunk, shape[-1])
        elif src.name == "AprQ4":
            values = aprq.decode_q4(chunk, left)
        else:
            values = plain.decode(src.name, chunk) if src.kind == "plain" else ggml.decode(src.name, chunk)
        left -= values.size
        yield values if values.dtype.kind == "f" else values.astype("<f4")


def _q8_values(chunks: Iterator[Buffer]) -> Iterator[Array]:
    head = b""
    for chunk in chunks:
        take = 4 - len(head)
        head += bytes(memoryview(chunk)[:take])
        if len(head) == 4:
            scale = struct.unpack("<f", head)[0]
            for part in regroup(chain([memoryview(chunk)[take:]], chunks), 1, STEP):
                yield aprq.decode_q8(part, scale)


def _counted(chunks: Iterable[Buffer], expected: int, src: Dtype) -> Iterator[Buffer]:
    """`chunks`, held against the number of bytes that should come."""
    n_bytes = 0
    for chunk in chunks:
        n_bytes += memoryview(chunk).nbytes
        if n_bytes > expected:
            break
        yield chunk
    if n_bytes != expected:
        few = "too many" if n_bytes > expected else f"only {n_bytes}"
        raise CorruptError(f"{few} of {expected} bytes of a {src.name} tensor came from its source")


def _bytes(array: Array) -> Buffer:
    return array.view("u1").data if array.size else b""
