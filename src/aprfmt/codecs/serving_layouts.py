"""Integer codes, scales and zero points as GPTQ and AWQ store them: inputs down, outputs across.

Of a few rows (outputs) of a weight each function gives the columns of the stored tensors, line by line.
"""

from __future__ import annotations

from aprfmt.codecs import affine
from aprfmt.codecs.packed_ints import AWQ_PLACES
from aprfmt.io.source import Buffer
from aprfmt.types import Array


def gptq_parts(codes: Array, scales: Array, zeros: Array, bits: int) -> list[Buffer]:
    """qweight, qzeros and scales in the first checkpoint format, which stores zero points less one.

    Args:
        codes: uint8 [rows, columns], words of which run down the columns.
        scales: float16 [rows, groups].
        zeros: uint8 [rows, groups], from 1 on: kernels add one to what is stored, without wrapping around.
        bits: of a code, 4 or 8.
    """
    import numpy as np

    words = affine.pack(codes, bits).T
    return [_lines(words), _lines(affine.pack(np.ascontiguousarray((zeros - 1).T), bits)), _lines(scales.T)]


def awq_parts(codes: Array, scales: Array, zeros: Array, bits: int) -> list[Buffer]:
    """qweight, qzeros and scales as AutoAWQ's GEMM kernels read them; words run along the rows.

    Args:
        codes: uint8 [rows, columns], of a multiple of eight rows.
        scales: float16 [rows, groups].
        zeros: uint8 [rows, groups].
        bits: of a code, 4.
    """
    import numpy as np

    order = np.argsort(AWQ_PLACES)

    def words(fields: Array) -> Buffer:
        lines = fields.T.reshape(fields.shape[1], -1, len(order))
        return _lines(affine.pack(lines[:, :, order].reshape(fields.shape[1], -1), bits))

    return [words(codes), words(zeros), _lines(scales.T)]


def _lines(values: Array) -> Buffer:
    import numpy as np

    return np.ascontiguousarray(values).view("u1").reshape(-1).data
