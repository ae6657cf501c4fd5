"""What a tensor's stored bytes must be, and decoding of whole tensors in memory."""

from __future__ import annotations

import math
import struct
from typing import TYPE_CHECKING

from aprfmt.codecs import aprq, ggml, plain
from aprfmt.codecs.dtypes import DTYPES, Dtype, find_dtype, n_elements
from aprfmt.errors import CorruptError, LimitError, MissingDependencyError, UnsupportedError
from aprfmt.io.source import Buffer
from aprfmt.limits import MAX_NDIM
from aprfmt.types import Array

if TYPE_CHECKING:
    import torch

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


def can_encode(dtype: str) -> bool:
    """Whether the dtype can be written here: floats, AprQ4, AprQ8, GGML's types (most of them by its library)."""
    row = find_dtype(dtype)
    if row.kind == "ggml":
        return ggml.encodable(row.name)
    return row.kind == "aprq" or row.name in plain.ENCODABLE


def decode(dtype: str, data: Buffer, shape: tuple[int, ...], *, tensor: str | None = None) -> Array:
    """The values of a tensor, row-major. Plain dtypes are a view of `data` as stored, without a copy.

    BF16, 8-bit floats and quantized dtypes become float32, BOOL becomes bool. `tensor` names it in errors.
    Dims beyond the eighth, which an APR drops, come back as one. Raises CorruptError where the length does
    not fit dtype and shape, LimitError for dims that no array has, UnsupportedError without a decoder.
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


def decode_torch(
    dtype: str, data: Buffer, shape: tuple[int, ...], *, tensor: str | None = None
) -> torch.Tensor:
    """The values as a torch tensor of its own memory: plain dtypes as they are, quantized ones as float32.

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
    kind = getattr(torch, row.torch or "", None)
    if kind is None:
        raise UnsupportedError(
            f"this torch has no dtype for {dtype}", tensor=tensor, hint="use a newer torch"
        )
    if not memoryview(data).nbytes:
        return torch.empty(shape, dtype=kind)
    if dtype == "BOOL":
        return (torch.frombuffer(bytearray(data), dtype=torch.uint8) != 0).reshape(shape)
    return torch.frombuffer(bytearray(data), dtype=kind).reshape(shape)
