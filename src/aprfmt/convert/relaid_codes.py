"""Weights that are quantized already, in another layout of the same codes: nothing is rounded but scales to F16."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from aprfmt.canonical.packed import PackedTensor
from aprfmt.canonical.tensor import CanonicalTensor
from aprfmt.codecs import affine, nvfp4
from aprfmt.codecs.dtypes import DTYPES
from aprfmt.codecs.packed import SCALE, Integers, PackedBlocks
from aprfmt.codecs.serving import ServingScheme, pack_integers
from aprfmt.codecs.stream import STEP, TensorSource, read_part
from aprfmt.io.pipe import Job
from aprfmt.io.source import Buffer
from aprfmt.types import Array

_NUMBER = 8
"""Bytes of the number of a row."""


@dataclass(frozen=True, slots=True)
class RelaidCodes:
    """The integer codes of a weight, made into the parts of a scheme a few rows at a time.

    Attributes:
        scheme: of the parts.
        integers: the codes, scales and biases.
        dtype: of the stored scales.
        change: the largest relative change of a scale, 0 where `dtype` holds all of them.
    """

    scheme: ServingScheme
    integers: Integers
    dtype: str
    change: float

    @property
    def unit(self) -> int:
        """Bytes of `row_numbers` that must be made together."""
        return self.scheme.rows * _NUMBER

    def row_numbers(self, unit: int) -> Iterator[Job]:
        """A stream of the numbers of the rows, in pieces of about a mebibyte of values."""
        n_rows, columns = self.integers.shape
        step = max(1, STEP // columns // self.scheme.rows) * self.scheme.rows
        for start in range(0, n_rows, step):
            rows = range(start, min(start + step, n_rows))
            yield Job(len(rows) * _NUMBER, partial(_numbers, rows))

    def parts(self, numbers: Buffer) -> Sequence[Buffer]:
        """The parts of the rows with these numbers."""
        import numpy as np

        rows = np.frombuffer(numbers, "<i8")
        lines, columns = range(int(rows[0]), int(rows[-1]) + 1), self.integers.shape[1]
        codes = np.ascontiguousarray(self.integers.fields(lines, range(columns)), "u1")
        scale, bias = self.integers.numbers(lines)
        zero = _zero_points(scale, bias, self.scheme.bits)
        assert zero is not None
        repeat = self.integers.group // (self.scheme.group or columns)
        scale, zero = (np.repeat(part, repeat, axis=1) for part in (scale, zero))
        return pack_integers(self.scheme, codes, scale.astype("f4"), zero.astype("u1"), self.dtype)


def _numbers(rows: range) -> bytes:
    import numpy as np

    return np.arange(rows.start, rows.stop, dtype="<i8").tobytes()


def _zero_points(scale: Array, bias: Array, bits: int) -> Array | None:
    """Integer zero points of codes with these scales and biases; None unless every bias is a multiple of its scale."""
    import numpy as np

    wide, lifted = scale.astype("f8"), bias.astype("f8")
    with np.errstate(divide="ignore", invalid="ignore"):
        zero = np.where(wide == 0, 1 << bits - 1, np.rint(-lifted / wide))
    exact = np.isfinite(zero).all() and np.array_equal(-zero * wide, lifted)
    return zero if exact and zero.min() >= 0 and zero.max() < 1 << bits else None


def relaid(scheme: ServingScheme, tensor: CanonicalTensor) -> RelaidCodes | None:
    """The codes of `tensor` for a scheme of the same bits; None where it has no such codes, groups or zero points."""
    integers = _integers(tensor) if scheme.kind == "int" else None
    if integers is None or integers.bits != scheme.bits or integers.group % (scheme.group or tensor.shape[1]):
        return None
    least, half = int(scheme.format == "gptq"), 1 << scheme.bits - 1
    dtypes, change = ["F16"] if scheme.is_transposed else ["F16", "BF16", "F32"], 0.0
    for scale, bias in integers.all_numbers():
        zero = _zero_points(scale, bias, scheme.bits)
        if zero is None or zero.min() < least or (scheme.symmetric and (zero != half).any()):
            return None
        dtypes = [d for d in dtypes if d == dtypes[-1] or _change(scale, d) == 0]
        change = max(change, _change(scale, dtypes[0])) if len(dtypes) == 1 else 0.0
    return RelaidCodes(scheme, integers, dtypes[0], change) if change <= affine.MOST_CHANGE else None


def _change(scale: Array, dtype: str) -> float:
    """The largest relative change of rounding scales to `dtype`; infinite where one becomes zero or infinite."""
    import numpy as np

    wide = scale.astype("f8")
    with np.errstate(all="ignore"):
        moved = np.abs(affine.rounded(scale.astype("f4"), dtype) / wide - 1)
    return float(np.where(wide == 0, 0, np.nan_to_num(moved, nan=np.inf)).max(initial=0))


def _integers(tensor: CanonicalTensor) -> Integers | None:
    source = tensor.sources[0]
    if isinstance(source, PackedTensor):
        return source.decoded.integers if tensor.mapping is None else None
    if tensor.dtype in ("Q4_0", "Q4_1", "Q8_0") and not tensor.scales and not tensor.is_decoded:
        return _block_integers(tensor.as_source())
    return None


def _block_integers(source: TensorSource) -> Integers:
    """The codes of a matrix of GGML blocks."""
    import numpy as np

    rows, columns = source.shape
    line = DTYPES[source.dtype].n_bytes((columns,))

    def blocks(lines: range) -> tuple[Array, Array, Array]:
        return affine.read_blocks(source.dtype, read_part(source, lines.start * line, len(lines) * line))

    def fields(lines: range, across: range) -> Array:
        return blocks(lines)[0].reshape(len(lines), columns)[:, across.start : across.stop]

    def numbers(lines: range) -> tuple[Array, Array]:
        scale, bias = (part.reshape(len(lines), -1) for part in blocks(lines)[1:])
        return np.asarray(scale), np.asarray(bias)

    return Integers((rows, columns), affine.BITS_OF_BLOCKS[source.dtype], affine.BLOCK, fields, numbers)


def nvfp4_blocks(tensor: CanonicalTensor) -> PackedBlocks | None:
    """The NVFP4 blocks that `tensor` is made of, or that have the codes of its quantized checkpoint."""
    source = tensor.sources[0]
    if isinstance(source, PackedTensor) and tensor.mapping is None:
        decoded = source.decoded
        blocks = decoded.blocks() if decoded.integers is None else None
        return blocks if blocks is not None and blocks.dtype == "NVFP4" else None
    if tensor.dtype != "NVFP4":
        return None
    stored, size = tensor.as_source(), nvfp4.BLOCK_BYTES
    between = lambda start, stop: read_part(stored, start * size, (stop - start) * size)  # noqa: E731
    return PackedBlocks("NVFP4", between, {SCALE: (1.0,), **tensor.scales})
