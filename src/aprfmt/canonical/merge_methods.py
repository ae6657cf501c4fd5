"""The arithmetic of merging: a weight from the same weight of several models, a range of its values at a time.

Everything is computed in float32. What a method needs to know of a whole weight is found first, in passes with constant
memory: dot product and norms for slerp; for TIES the exact k-th largest magnitude: a sample brackets it, one pass
collects the values in between, and if there are too many or the sample misled, one pass counts the upper 15 bits of the
floats and a second one the lower 16 of those that share the threshold's; sums of magnitudes if a delta is rescaled. A
pass is divided into chunks, which the threads that need the weight share.

What DARE drops depends only on seed, weight, model and element (PCG64DXSM, which can be advanced to any position), not
on the number of threads or the size of chunks.

Sources: TIES-Merging (Yadav et al., 2023), Language Models are Super Mario (DARE; Yu et al., 2023), Editing Models with
Task Arithmetic (Ilharco et al., 2022), Animating Rotation with Quaternion Curves (slerp; Shoemake, 1985).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from threading import Condition

from aprfmt.canonical.merge_arrays import CHUNK, SCRATCH, Values, bin_of, dare_mask, sum_of, sum_of_products, values_in
from aprfmt.types import Array

LINEAR, SLERP, TASK_ARITHMETIC = "linear", "slerp", "task_arithmetic"
TIES, DARE_LINEAR, DARE_TIES, PASSTHROUGH = "ties", "dare_linear", "dare_ties", "passthrough"

METHODS = (LINEAR, SLERP, TIES, DARE_LINEAR, DARE_TIES, TASK_ARITHMETIC, PASSTHROUGH)

NORM, DENSITY, NONE = "norm", "density", "none"

RESCALES = (NORM, DENSITY, NONE)
"""How a delta with dropped values is rescaled: to its original sum of magnitudes, by 1 / density (the DARE paper), or
not.
"""

_PARALLEL = 0.9995
"""Cosine above which two weights are interpolated linearly."""


_SAMPLE = 1 << 17
_MARGIN = 6
"""Margin on either side of the sample's threshold, in units of the square root of its size: a dozen standard deviations
of a fair sample, since neighbouring values are similar.
"""

_MOST_CANDIDATES = 1 << 22
"""Maximum number of candidates for the threshold, of 4 bytes each."""

_MOST_DRAWN = 1 << 28
"""Maximum size of a weight for which DARE's mask is kept, one bit per value."""

_TINY = 1e-8
_LEAST_SUM = 1e-7


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeRule:
    """How one weight is merged.

    Attributes:
        method: one of METHODS.
        base: index of the base among the inputs; None for methods without one. weights, densities: of each input.
        t: for slerp, from 0 (the base) to 1 (the other).
        normalize: whether the result is divided by the sum of the weights.
        rescale: one of RESCALES.
        factor: factor of the sum of deltas, or for passthrough of the weight.
        seed: of DARE's random masks.
    """

    method: str
    base: int | None = None
    weights: tuple[float, ...] = ()
    densities: tuple[float, ...] = ()
    t: float = 0.5
    normalize: bool = False
    rescale: str = NONE
    factor: float = 1.0
    seed: int = 0

    @property
    def deltas(self) -> list[int]:
        """The inputs that are compared with the base."""
        return [i for i in range(len(self.weights)) if i != self.base]

    def keeps(self, i: int) -> bool:
        """Whether nothing of the delta of input `i` is dropped."""
        return self.method == TASK_ARITHMETIC or self.densities[i] >= 1


@dataclass(frozen=True, slots=True)
class _Trim:
    """Which values of a delta are kept.

    Attributes:
        bits: minimum magnitude, as the bits of a float32.
        end: element from which on values of exactly that magnitude are dropped.
        scale: factor of the kept values.
    """

    bits: int = 0
    end: int = 1 << 62
    scale: float = 1.0


_Found = tuple[tuple[float, ...], "Array | None"]
"""The result of a chunk of a pass: numbers, which are added in order, and counts."""


class _Pass:
    """Chunks of one pass over a weight, shared by the threads that need the result."""

    def __init__(self, n: int) -> None:
        self._n, self._next, self._done = n, 0, 0
        self._numbers: list[tuple[float, ...]] = [()] * n
        self._counts: Array | None = None
        self._error: BaseException | None = None
        self._result: tuple[float, ...] | None = None
        self._changed = Condition()

    def run(
        self, work: Callable[[int], _Found], finish: Callable[[list[float], Array | None], tuple[float, ...]]
    ) -> tuple[float, ...]:
        """Combines the results of `work` for all chunks, in a fixed order, with `finish`.

        Raises what `work` raises, in every waiting thread.
        """
        with self._changed:
            while self._error is None and self._done < self._n:
                if self._next == self._n:
                    self._changed.wait()
                    continue
                i = self._next
                self._next += 1
                self._changed.release()
                numbers: tuple[float, ...] = ()
                counts: Array | None = None
                error: BaseException | None = None
                try:
                    numbers, counts = work(i)
                except BaseException as caught:
                    error = caught
                finally:
                    self._changed.acquire()
                self._numbers[i] = numbers
                if counts is not None:
                    self._counts = counts if self._counts is None else self._counts + counts
                self._error = self._error or error
                self._done += 1
                self._changed.notify_all()
            if self._error is not None:
                raise self._error
            if self._result is None:
                sums = [math.fsum(column) for column in zip(*self._numbers, strict=True)]
                self._result = finish(sums, self._counts)
                self._numbers, self._counts = [], None  # a model has thousands of passes
            return self._result


@dataclass(slots=True)
class Combination:
    """A weight merged from `inputs` by `rule`.

    Attributes:
        name: of the weight; it determines DARE's mask.
        n: its elements.
    """

    name: str
    n: int
    rule: MergeRule
    inputs: Sequence[Values]
    _passes: list[_Pass] = field(default_factory=list)
    _trims: dict[int, _Trim] | None = None
    _shares: tuple[float, float] | None = None
    _lock: Condition = field(default_factory=Condition)
    _kept_bits: dict[tuple[int, int, int], Array] = field(default_factory=dict)
    _drawn: dict[tuple[int, int], Array] = field(default_factory=dict)

    def read(self, first: int, last: int) -> Array:
        """Elements [first, last) of the result, float32."""
        import numpy as np

        return np.concatenate([values.copy() for _, values in self.chunks(first, last)])

    def chunks(self, first: int, last: int) -> Iterator[tuple[int, Array]]:
        """The result chunk by chunk, each with its first element; the memory is reused for the next one."""
        import numpy as np

        self._prepare()
        for start in range(first, last, CHUNK):
            end = min(start + CHUNK, last)
            SCRATCH.start()
            with np.errstate(all="ignore"):  # NaN and infinities propagate
                values = self._mixed([values_in(of, start, end) for of in self.inputs], start)
            yield start, values

    # --- what is known of the whole weight ---

    def _prepare(self) -> None:
        rule = self.rule
        if rule.method == SLERP and self._shares is None:
            self._shares = self._spherical()
        elif rule.method in (TIES, DARE_TIES, DARE_LINEAR) and self._trims is None:
            trims, number = {}, 0
            for i in rule.deltas:
                trims[i], number = self._trim(i, number)
            self._trims = trims

    def _pass(
        self,
        number: int,
        work: Callable[[int, int], _Found],
        finish: Callable[[list[float], Array | None], tuple[float, ...]],
    ) -> tuple[float, ...]:
        """Runs pass `number` over the weight; `work` gets the first and last element of a chunk."""
        with self._lock:
            while len(self._passes) <= number:
                self._passes.append(_Pass(-(-self.n // CHUNK)))
        return self._passes[number].run(lambda i: work(i * CHUNK, min((i + 1) * CHUNK, self.n)), finish)

    def _spherical(self) -> tuple[float, float]:
        """The factors of base and other."""
        assert self.rule.base is not None
        pair = self.inputs[self.rule.base], self.inputs[1 - self.rule.base]

        def work(first: int, last: int) -> _Found:
            SCRATCH.start()
            a, b = (values_in(of, first, last) for of in pair)
            return tuple(sum_of_products(x, y) for x, y in ((a, a), (b, b), (a, b))), None

        t = self.rule.t
        numbers = self._pass(0, work, lambda sums, _: tuple(sums))
        if not numbers:
            return 1 - t, t
        lengths = [math.sqrt(square) if math.sqrt(square) > _TINY else 1.0 for square in numbers[:2]]
        dot = max(-1.0, min(1.0, numbers[2] / (lengths[0] * lengths[1])))
        if abs(dot) > _PARALLEL or math.isnan(dot):
            return 1 - t, t
        angle = math.acos(dot)
        return math.sin((1 - t) * angle) / math.sin(angle), math.sin(t * angle) / math.sin(angle)

    def _trim(self, i: int, number: int) -> tuple[_Trim, int]:
        """Which values of the delta of input `i` are kept, and the number of the next pass."""
        rule = self.rule
        trim = _Trim()
        if rule.keeps(i) or not self.n or rule.densities[i] <= 0:
            return trim, number
        if rule.method == TIES:
            trim, number = self._largest(i, max(1, int(rule.densities[i] * self.n)), number)
        if rule.rescale == DENSITY:
            return _Trim(trim.bits, trim.end, 1 / rule.densities[i]), number
        if rule.rescale == NORM:
            scale = self._norm_scale(i, trim, number)
            return _Trim(trim.bits, trim.end, scale), number + 1
        return trim, number

    def _largest(self, i: int, k: int, number: int) -> tuple[_Trim, int]:
        """The `k` values of largest magnitude of the delta of input `i`; ties go to those that come first."""
        found = self._among_candidates(i, k, number)
        return (found, number + 2) if found is not None else self._by_counting(i, k, number + 2)

    def _among_candidates(self, i: int, k: int, number: int) -> _Trim | None:
        """`_largest` by a sample, if few values are near its threshold; None otherwise."""
        import numpy as np

        share = min(1.0, max(_SAMPLE / self.n, 1 / 64))

        def sample(first: int, last: int) -> _Found:
            taken = self._bits(i, first, first + math.ceil((last - first) * share))
            self._kept_bits[i, number, first] = taken.copy()
            return (), None

        def bracket(_sums: list[float], _counts: Array | None) -> tuple[float, ...]:
            taken = np.concatenate(self._take_bits(i, number))
            place = k / self.n * len(taken)
            margin = 0 if len(taken) == self.n else _MARGIN * math.sqrt(len(taken))
            low, high = (len(taken) - 1 - int(place + sign * margin) for sign in (1, -1))
            ordered = np.partition(taken, [max(low, 0), min(high, len(taken) - 1)])
            return (
                float(ordered[low]) if low >= 0 else 0.0,
                float(ordered[high]) + 1 if high < len(taken) else float(1 << 31),
            )

        low, high = map(int, self._pass(number, sample, bracket))
        room = _MOST_CANDIDATES

        def candidates(first: int, last: int) -> _Found:
            bits = self._bits(i, first, last)
            n_above = np.count_nonzero(bits >= high)
            # One comparison for both bounds: below the lower one the difference wraps to a large number.
            bits -= np.int32(low)
            inside = bits.view(np.uint32) < np.uint32(high - low)
            n_inside = np.count_nonzero(inside)
            if n_inside * (self.n / (last - first)) <= 2 * room:
                self._kept_bits[i, number + 1, first] = bits[inside]
            return (float(n_above), float(n_inside)), None

        def select(sums: list[float], _counts: Array | None) -> tuple[float, ...]:
            n_above, n_inside = map(int, sums)
            taken = self._take_bits(i, number + 1)
            if not 0 < k - n_above <= n_inside or sum(map(len, taken)) != n_inside:
                return (-1.0, 0.0)
            whole = np.concatenate(taken)
            threshold = int(np.partition(whole, n_inside - (k - n_above))[n_inside - (k - n_above)])
            equal = [int(np.count_nonzero(part == threshold)) for part in taken]
            rest = k - n_above - int(np.count_nonzero(whole > threshold))
            end = self._end_of(i, threshold + low, rest, equal) if rest < sum(equal) else _Trim().end
            return (float(threshold + low), float(end))

        threshold, end = map(int, self._pass(number + 1, candidates, select))
        return _Trim(threshold, end) if threshold >= 0 else None

    def _take_bits(self, i: int, number: int) -> list[Array]:
        """What the chunks of a pass kept, in order; releases it."""
        found = sorted(key for key in self._kept_bits if key[:2] == (i, number))
        return [self._kept_bits.pop(key) for key in found]

    def _end_of(self, i: int, threshold: int, rest: int, counts: Sequence[int]) -> int:
        """One past the `rest`-th of the values equal to the threshold; `counts`: how many each chunk has."""
        import numpy as np

        chunk = int(np.searchsorted(np.cumsum(counts), rest))
        first = chunk * CHUNK
        places = np.flatnonzero(self._bits(i, first, min(first + CHUNK, self.n)) == threshold)
        return first + int(places[rest - sum(counts[:chunk]) - 1]) + 1

    def _by_counting(self, i: int, k: int, number: int) -> tuple[_Trim, int]:
        """`_largest` by counting first the upper, then the lower bits of all values."""
        import numpy as np

        def upper(first: int, last: int) -> _Found:
            return (), np.bincount(self._bits(i, first, last) >> 16, minlength=1 << 15)

        top, rest, _ = map(int, self._pass(number, upper, lambda _, counts: bin_of(counts, k)))

        def lower(first: int, last: int) -> _Found:
            bits = self._bits(i, first, last)
            return (), np.bincount(bits[bits >> 16 == top] & 0xFFFF, minlength=1 << 16)

        low, rest, there = map(int, self._pass(number + 1, lower, lambda _, counts: bin_of(counts, rest)))
        threshold = top << 16 | low
        if rest == there:
            return _Trim(threshold), number + 2
        n_chunks = -(-self.n // CHUNK)

        def equal(first: int, last: int) -> _Found:
            found = np.zeros(n_chunks, np.int64)
            found[first // CHUNK] = np.count_nonzero(self._bits(i, first, last) == threshold)
            return (), found

        def last_kept(_: list[float], counts: Array | None) -> tuple[float, ...]:
            assert counts is not None
            return (float(self._end_of(i, threshold, rest, counts.tolist())),)

        return _Trim(threshold, int(self._pass(number + 2, equal, last_kept)[0])), number + 3

    def _norm_scale(self, i: int, trim: _Trim, number: int) -> float:
        """The factor by which the sum of magnitudes of a delta shrank."""
        import numpy as np

        def work(first: int, last: int) -> _Found:
            delta = self._delta(i, first, last)
            np.abs(delta, out=delta)
            whole = sum_of(delta)
            return (whole, sum_of(self._kept(i, delta, first, trim))), None

        before, after = self._pass(number, work, lambda sums, _: tuple(sums))
        return before / after if before >= _LEAST_SUM and after >= _LEAST_SUM else 1.0

    def _delta(self, i: int, first: int, last: int) -> Array:
        import numpy as np

        assert self.rule.base is not None
        SCRATCH.start()
        delta, base = (values_in(self.inputs[which], first, last) for which in (i, self.rule.base))
        return np.subtract(delta, base, out=delta)

    def _bits(self, i: int, first: int, last: int) -> Array:
        """Magnitudes of a delta as the bits of a float32, which have the same order: int32."""
        import numpy as np

        delta = self._delta(i, first, last)
        return np.abs(delta, out=delta).view(np.int32)

    # --- values ---

    def _mixed(self, rows: Sequence[Array], first: int) -> Array:
        """The result for values of each input, from element `first` on; reuses the memory of `rows`."""
        import numpy as np

        rule = self.rule
        if rule.method == PASSTHROUGH:
            return rows[0] if rule.factor == 1 else np.multiply(rows[0], np.float32(rule.factor), out=rows[0])
        if rule.method not in (LINEAR, SLERP):
            return self._with_deltas(rows, first)
        weights: Sequence[float] = rule.weights
        if rule.method == SLERP:
            assert self._shares is not None
            weights = self._shares if rule.base == 0 else self._shares[::-1]
        for values, weight in zip(rows, weights, strict=True):
            if weight != 1:
                np.multiply(values, np.float32(weight), out=values)
        total = rows[0]
        for values in rows[1:]:
            total += values
        whole = math.fsum(weights)
        if rule.method == LINEAR and rule.normalize and whole != 1:
            total /= np.float32(whole)
        return total

    def _with_deltas(self, rows: Sequence[Array], first: int) -> Array:
        """The base plus the sum of the others' contributions."""
        import numpy as np

        rule = self.rule
        assert rule.base is not None
        base = rows[rule.base]
        if not rule.deltas:
            return base
        trims = self._trims or {}
        deltas = []
        for i in rule.deltas:
            delta = np.subtract(rows[i], base, out=rows[i])
            delta = self._kept(i, delta, first, trims.get(i, _Trim()))
            if rule.weights[i] != 1:
                delta *= np.float32(rule.weights[i])
            deltas.append(delta)
        if rule.method in (TIES, DARE_TIES):
            total = self._agreeing(deltas)
        else:
            total = deltas[0]
            for delta in deltas[1:]:
                total += delta
            divisor = math.fsum(rule.weights[i] for i in rule.deltas) if rule.normalize else 1.0
            if divisor != 1:
                total /= np.float32(divisor if abs(divisor) >= _TINY else 1)
        if rule.factor != 1:
            total *= np.float32(rule.factor)
        total += base
        return total

    def _agreeing(self, deltas: Sequence[Array]) -> Array:
        """The sum of the weighted deltas whose sign equals that of the total, optionally divided by their weights."""
        import numpy as np

        rule = self.rule
        if len(deltas) == 1:  # it agrees with itself
            weight = rule.weights[rule.deltas[0]]
            if rule.normalize and weight not in (0, 1):
                deltas[0] /= np.float32(weight)
            return deltas[0]
        summed = deltas[0] + deltas[1]
        for delta in deltas[2:]:
            summed += delta
        positive = summed >= 0
        negative = ~positive
        total, share = summed, np.zeros_like(summed)
        total.fill(0)
        for i, delta in zip(rule.deltas, deltas, strict=True):
            # Multiplying by booleans takes a tenth of the time of np.where.
            agreeing = np.maximum(delta, 0)
            agreeing *= positive
            np.minimum(delta, 0, out=delta)
            delta *= negative
            agreeing += delta
            total += agreeing
            if rule.normalize:
                share += (agreeing != 0) * np.float32(rule.weights[i])
        if rule.normalize:
            share += share == 0
            total /= share
        return total

    def _kept(self, i: int, delta: Array, first: int, trim: _Trim) -> Array:
        """The kept values of a delta, the others 0; rescaled. Reuses the memory of `delta`."""
        import numpy as np

        rule = self.rule
        if rule.keeps(i):
            return delta
        if rule.densities[i] <= 0:
            delta.fill(0)
            return delta
        if rule.method == TIES:
            bits = np.abs(delta, out=SCRATCH.take(len(delta))).view(np.int32)
            if trim.end >= first + len(delta):
                stays = bits >= trim.bits
            else:
                stays = bits > trim.bits
                stays[: max(0, trim.end - first)] |= bits[: max(0, trim.end - first)] == trim.bits
        else:
            stays = self._random(i, first, first + len(delta))
        delta *= stays
        if trim.scale != 1:
            delta *= np.float32(trim.scale)
        return delta

    def _random(self, i: int, first: int, last: int) -> Array:
        """DARE's mask of a range; the first pass's result is kept, one bit per value, until the chunk is merged."""
        import numpy as np

        rule = self.rule
        chunk = first // CHUNK * CHUNK
        end = min(chunk + CHUNK, self.n)
        held = self._drawn.pop((i, chunk), None) if last == end else self._drawn.get((i, chunk))
        if held is not None and last <= end:
            return np.unpackbits(held, count=end - chunk).view(np.bool_)[first - chunk : last - chunk]
        stays = dare_mask(rule.seed, self.name, i, first, last, rule.densities[i])
        if self._trims is None and (first, last) == (chunk, end) and self.n <= _MOST_DRAWN:
            self._drawn[i, chunk] = np.packbits(stays)
        return stays
