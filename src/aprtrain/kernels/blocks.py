"""Matrices that stay GGML blocks on the device and are dequantized to bf16 on use.

A matrix is dequantized as a whole into the caller's memory: on CUDA by one Triton kernel per block type, elsewhere by
aprfmt's codecs, a piece at a time. Both yield the codec's float32 value rounded once to bf16, bit for bit: a code times
its scale is exact in float32 for these three types, so not even a fused multiply-add can differ.

Shape suffixes: R rows, C columns, B bytes, N selected rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from aprfmt.codecs.dtypes import DTYPES
from aprfmt.codecs.recode import decode as decode_values
from aprfmt.errors import CorruptError, UsageError

if TYPE_CHECKING:
    from aprfmt.canonical.tensor import CanonicalTensor

BLOCK_TYPES = ("Q4_K", "Q6_K", "Q8_0")
"""Block types that the kernels dequantize."""

_PIECE = 1 << 20
"""float32 values at a time off CUDA."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """A matrix as stored blocks.

    Attributes:
        dtype: one of BLOCK_TYPES.
        shape: rows and columns; blocks divide a row.
        stored_B: its bytes, uint8, contiguous.
    """

    dtype: str
    shape: tuple[int, int]
    stored_B: torch.Tensor

    @property
    def n_bytes(self) -> int:
        """Bytes on its device."""
        return self.stored_B.numel()


def is_kept(tensor: CanonicalTensor) -> bool:
    """Whether a stored tensor can stay in blocks: a matrix of BLOCK_TYPES whose rows are whole blocks."""
    if tensor.dtype not in BLOCK_TYPES or len(tensor.shape) != 2:
        return False
    row = DTYPES[tensor.dtype]
    return tensor.shape[-1] % row.block == 0 and row.n_bytes(tensor.shape) == tensor.n_bytes


def upload(tensor: CanonicalTensor, device: torch.device) -> Blocks:
    """Copies the blocks of a matrix to `device`, a chunk at a time. Raises CorruptError if bytes are missing."""
    rows, cols = tensor.shape
    stored_B = torch.empty(tensor.n_bytes, dtype=torch.uint8, device=device)
    at = 0
    for chunk in tensor.chunks():
        part_B = torch.frombuffer(bytearray(chunk), dtype=torch.uint8) if len(chunk) else stored_B[:0]
        stored_B[at : at + part_B.numel()].copy_(part_B)
        at += part_B.numel()
    if at != stored_B.numel():
        raise CorruptError(
            f"{at} bytes are stored, but {tensor.dtype} of shape {[rows, cols]} needs {stored_B.numel()}",
            tensor=tensor.name,
        )
    return Blocks(tensor.dtype, (rows, cols), stored_B)


def decode(blocks: Blocks, out_RC: torch.Tensor | None = None) -> torch.Tensor:
    """Fills `out_RC`, contiguous bf16 with the matrix's number of values on the same device, and returns it.

    Without it allocates one. On CUDA it only launches, without waiting. Raises UsageError for another target.
    """
    rows, cols = blocks.shape
    if out_RC is None:
        out_RC = torch.empty(rows, cols, dtype=torch.bfloat16, device=blocks.stored_B.device)
    if out_RC.dtype != torch.bfloat16 or not out_RC.is_contiguous() or out_RC.numel() != rows * cols:
        raise UsageError(
            f"{rows} x {cols} values of {blocks.dtype} need a contiguous bf16 target, "
            f"not {list(out_RC.shape)} of {out_RC.dtype}"
        )
    if out_RC.is_cuda:
        from aprtrain.kernels.blocks_triton import launch

        launch(blocks.dtype, blocks.stored_B, out_RC)
    else:
        row, out = DTYPES[blocks.dtype], out_RC.view(-1)
        stored = memoryview(blocks.stored_B.numpy().data)
        for at in range(0, out.numel(), _PIECE):
            n = min(_PIECE, out.numel() - at)
            first = at // row.block * row.block_bytes
            data = stored[first : first + n // row.block * row.block_bytes]
            out[at : at + n] = torch.from_numpy(decode_values(blocks.dtype, data, (n,)))
    return out_RC


def pick_rows(blocks: Blocks, rows_N: torch.Tensor) -> torch.Tensor:
    """Rows `rows_N` (int64) of the matrix as bf16 [N, C]: the lookup in a quantized embedding."""
    stored_RB = blocks.stored_B.view(blocks.shape[0], -1)
    picked_NB = stored_RB.index_select(0, rows_N)
    return decode(Blocks(blocks.dtype, (rows_N.numel(), blocks.shape[1]), picked_NB.view(-1)))


def some_rows(blocks: Blocks, first: int, n_rows: int) -> Blocks:
    """`n_rows` rows from row `first` on; shares memory."""
    row_bytes = blocks.n_bytes // blocks.shape[0]
    stored_B = blocks.stored_B[first * row_bytes : (first + n_rows) * row_bytes]
    return Blocks(blocks.dtype, (n_rows, blocks.shape[1]), stored_B)
