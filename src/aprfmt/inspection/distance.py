"""Distance metrics between the decoded values of tensors, in constant memory with many threads."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import TypeVar

from aprfmt.canonical.packed import PackedTensor
from aprfmt.canonical.tensor import CanonicalTensor
from aprfmt.codecs.dtypes import DTYPES, n_elements
from aprfmt.codecs.values import values as decoded_values
from aprfmt.errors import RunError
from aprfmt.io.pipe import DEFAULT_FLOW, Flow
from aprfmt.types import Array

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Distance:
    """How far the decoded values of tensor `b` are from those of `a`.

    Two values are equal if both are NaN, or the same infinity. `relative_rmse`, `snr_db` and `cosine` cover the
    positions where both are finite, so that a NaN does not hide the rest.

    Attributes:
        n_values: their number.
        n_different: number of values that differ by more than the tolerance. max_diff, rmse: the largest difference,
            and the root of their mean square; infinite if a NaN or an infinity differs from the other side.
        relative_rmse: the root of sum (a - b)² / sum a²; None if every a is 0 and some b is not.
        snr_db: the same in decibels, -20 log10; None if it is 0 or None.
        cosine: of the angle between both as vectors; None if exactly one of them is all zeros. nonfinite_a,
        nonfinite_b: NaNs and infinities of each side; None if the bytes are equal and were not decoded.
        nonfinite_different: positions where one of those differs from the other side.
    """

    n_values: int
    n_different: int
    max_diff: float
    rmse: float
    relative_rmse: float | None
    snr_db: float | None
    cosine: float | None
    nonfinite_a: int | None
    nonfinite_b: int | None
    nonfinite_different: int

    @property
    def badness(self) -> tuple[bool, float]:
        """Larger is worse: a NaN in place of a number first, then the relative RMSE."""
        relative = math.inf if self.relative_rmse is None else self.relative_rmse
        return self.nonfinite_different > 0, relative

    @property
    def is_zero(self) -> bool:
        """Whether all values are equal."""
        return self.max_diff == 0


@dataclass(slots=True)
class DistanceSums:
    """Sums from which a Distance is computed; those of several tensor pairs can be added."""

    n: int = 0
    n_different: int = 0
    largest: float = 0.0
    squares: float = 0.0
    aa: float = 0.0
    bb: float = 0.0
    ab: float = 0.0
    nonfinite_a: int = 0
    nonfinite_b: int = 0
    nonfinite_different: int = 0

    def add(self, a: Array, b: Array, tolerance: float) -> None:
        """Adds blocks of values, flat and of equal length."""
        import numpy as np

        p, q = (_as_float64(block) for block in (a, b))
        self.n += p.size
        with np.errstate(over="ignore", invalid="ignore"):
            sums = [float(np.einsum("i,i->", *pair)) for pair in ((p, p), (q, q), (p, q))]
            if not all(map(math.isfinite, sums)):
                p, q = self._finite(p, q)
                sums = [float(np.einsum("i,i->", *pair)) for pair in ((p, p), (q, q), (p, q))]
            distance = np.abs(np.subtract(p, q, out=p), out=p)
            if a.dtype.kind in "iu" and b.dtype.kind in "iu" and p.size == a.size:
                distance[(distance == 0) & (a != b)] = 1.0  # two 64-bit integers that are the same float
            self.squares += float(np.einsum("i,i->", distance, distance))
        self.n_different += int(np.count_nonzero(distance > tolerance))
        self.largest = max(self.largest, float(distance.max(initial=0.0)))
        self.aa, self.bb, self.ab = self.aa + sums[0], self.bb + sums[1], self.ab + sums[2]

    def _finite(self, p: Array, q: Array) -> tuple[Array, Array]:
        """Both blocks where both are finite; counts the rest."""
        import numpy as np

        p_odd, q_odd = ~np.isfinite(p), ~np.isfinite(q)
        odd = p_odd | q_odd
        alike = (p[odd] == q[odd]) | (np.isnan(p[odd]) & np.isnan(q[odd]))
        n_different = int(np.count_nonzero(~alike))
        self.nonfinite_a += int(np.count_nonzero(p_odd))
        self.nonfinite_b += int(np.count_nonzero(q_odd))
        self.nonfinite_different += n_different
        self.n_different += n_different
        return p[~odd], q[~odd]

    def merge(self, other: DistanceSums) -> None:
        """Adds the sums of another pair of tensors."""
        self.largest = max(self.largest, other.largest)
        for name in ("n", "n_different", "squares", "aa", "bb", "ab", "nonfinite_a", "nonfinite_b"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.nonfinite_different += other.nonfinite_different

    def distance(self) -> Distance:
        """The metrics."""
        is_finite = self.aa + self.bb + self.squares < math.inf  # float64 values may have larger squares
        relative = 0.0 if not self.squares else math.sqrt(self.squares / self.aa) if self.aa and is_finite else None
        norm = math.sqrt(self.aa) * math.sqrt(self.bb) if is_finite else 0.0
        same = 1.0 if self.aa == self.bb == 0 else None
        is_odd = self.nonfinite_different > 0
        return Distance(
            n_values=self.n, n_different=self.n_different, max_diff=math.inf if is_odd else self.largest,
            rmse=math.inf if is_odd else math.sqrt(self.squares / self.n) if self.n else 0.0, relative_rmse=relative,
            snr_db=-20 * math.log10(relative) if relative else None,
            cosine=max(-1.0, min(1.0, self.ab / norm)) if norm else same, nonfinite_a=self.nonfinite_a,
            nonfinite_b=self.nonfinite_b, nonfinite_different=self.nonfinite_different,
        )  # fmt: skip


def _as_float64(block: Array) -> Array:
    """A copy as float64; complex values as pairs of reals."""
    import numpy as np

    return (block.view(block.real.dtype) if block.dtype.kind == "c" else block).astype(np.float64)


@dataclass(frozen=True, slots=True)
class TensorFigures:
    """A tensor that both models have with the same shape.

    Attributes:
        name: its Hugging Face name.
        a, b: dtype of each side as stored.
        bits_a, bits_b: bits per weight of these dtypes.
        distance: metrics of the values of `b` relative to those of `a`.
        sums: from which it was computed.
    """

    name: str
    a: str
    b: str
    bits_a: float
    bits_b: float
    distance: Distance
    sums: DistanceSums = field(repr=False, compare=False)

    def to_json(self) -> dict[str, object]:
        """{name, a, b, bits_a, bits_b} and the figures."""
        body: dict[str, object] = {"name": self.name, "a": self.a, "b": self.b}
        return body | {"bits_a": self.bits_a, "bits_b": self.bits_b} | asdict(self.distance)


@dataclass(frozen=True, slots=True)
class TotalFigures:
    """All tensors that both models have with the same shape, combined.

    Attributes:
        n_tensors: their number.
        size_a, size_b: stored bytes of all tensors of each model.
        bits_a, bits_b: the same as bits per weight; None for a model without weights.
        distance: metrics of all values.
    """

    n_tensors: int
    size_a: int
    size_b: int
    bits_a: float | None
    bits_b: float | None
    distance: Distance

    def to_json(self) -> dict[str, object]:
        """{n_tensors, size_a, size_b, bits_a, bits_b} and the figures."""
        return {name: getattr(self, name) for name in self.__slots__ if name != "distance"} | asdict(self.distance)


def together(rows: Iterable[TensorFigures]) -> Distance:
    """Combines several tensors."""
    sums = DistanceSums()
    for row in rows:
        sums.merge(row.sums)
    return sums.distance()


def bits_of(tensor: CanonicalTensor) -> float:
    """Bits per weight as stored: of its dtype, or of all parts of a quantized weight."""
    packed = _packed(tensor)
    if packed is not None:
        return 8 * sum(part.n_bytes for part in packed.sources) / max(1, n_elements(packed.shape))
    row = DTYPES[tensor.original_dtype]
    return 8 * row.block_bytes / row.block


def form_of(tensor: CanonicalTensor) -> str:
    """The stored dtype, or the quantization scheme."""
    packed = _packed(tensor)
    return packed.scheme if packed is not None else tensor.original_dtype


def _packed(tensor: CanonicalTensor) -> PackedTensor | None:
    source = tensor.sources[0]
    return source if isinstance(source, PackedTensor) and len(tensor.sources) == 1 else None


def measure(
    name: str, x: CanonicalTensor, y: CanonicalTensor, tolerance: float, is_over: Callable[[], bool] = lambda: False
) -> DistanceSums:
    """The sums over two tensors of the same shape. Raises RunError once `is_over`: nobody waits for the result."""
    sums = DistanceSums()
    sides = (side.produced.without_scales() for side in (x, y))
    streams = (decoded_values(side.dtype, side.shape, side.chunks, name=name) for side in sides)
    for p, q in zip(*streams, strict=True):
        if is_over():
            raise RunError("stopped", tensor=name)
        sums.add(p, q, tolerance)
    return sums


def same_sums(name: str, x: CanonicalTensor, is_over: Callable[[], bool] = lambda: False) -> DistanceSums:
    """The sums of a tensor compared with itself."""
    sums = DistanceSums()
    made = x.produced.without_scales()
    for block in decoded_values(made.dtype, made.shape, made.chunks, name=name):
        if is_over():
            raise RunError("stopped", tensor=name)
        sums.add(block, block, math.inf)
    return sums


def identical(x: CanonicalTensor) -> Distance:
    """The metrics of a tensor and one with the same bytes."""
    return Distance(n_elements(x.shape), 0, 0.0, 0.0, 0.0, None, 1.0, None, None, 0)


def side_by_side(
    things: Sequence[T], work: Callable[[T, Callable[[], bool]], R], flow: Flow = DEFAULT_FLOW
) -> Iterator[R]:
    """`work(thing, is_over)` for each thing, results in order, using as many threads as `flow` has workers.

    If one fails, or the caller stops, `is_over` tells the others to stop.
    """
    over = threading.Event()
    with ThreadPoolExecutor(flow.n_workers, thread_name_prefix="apr") as pool:
        try:
            futures = [pool.submit(work, thing, over.is_set) for thing in things]
            for future in futures:
                yield future.result()
        finally:
            over.set()
            pool.shutdown(wait=True, cancel_futures=True)
