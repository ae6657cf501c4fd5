"""The arithmetic of merging: one weight out of the same weight of several models, a range of its values at a time.

Everything is computed in float32. What a method has to know of a whole weight is found beforehand in passes over it,
in constant memory: dot product and lengths for slerp; for TIES the k-th largest magnitude, exactly, by counting the
upper 15 bits of the floats in one pass, the lower 16 bits of those that share the threshold's in a second, and, where
more values lie on the threshold than may stay, which of them come first in a third; sums of magnitudes where a delta
is rescaled. A pass is divided into chunks, which the threads that want the weight take in turns.

What DARE drops follows from seed, weight, model and element alone (Philox, a generator that counts), so that it is the
same whatever the number of threads and the size of the pieces.

Sources: TIES-Merging (Yadav et al., 2023), Language Models are Super Mario (DARE; Yu et al., 2023), Editing Models with
Task Arithmetic (Ilharco et al., 2022), Animating Rotation with Quaternion Curves (slerp; Shoemake, 1985).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from threading import Condition
from typing import Protocol

from aprfmt.codecs.stream import BLOCK, STEP, blocks
from aprfmt.types import Array

LINEAR, SLERP, TASK_ARITHMETIC = "linear", "slerp", "task_arithmetic"
TIES, DARE_LINEAR, DARE_TIES, PASSTHROUGH = "ties", "dare_linear", "dare_ties", "passthrough"

METHODS = (LINEAR, SLERP, TIES, DARE_LINEAR, DARE_TIES, TASK_ARITHMETIC, PASSTHROUGH)

NORM, DENSITY, NONE = "norm", "density", "none"

RESCALES = (NORM, DENSITY, NONE)
"""How a delta that lost values is rescaled: to the sum of magnitudes that it had, by 1 / density (the DARE paper), not
at all."""

_PARALLEL = 0.9995
"""Cosine from which on two weights are interpolated linearly."""

_RUN = 256
_TINY = 1e-8
_LEAST_SUM = 1e-7


class Values(Protocol):
    """The values of a weight in one model."""

    def read(self, first: int, last: int) -> Array:
        """Elements [first, last) in row-major order, float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """How one weight is merged.

    Attributes:
        method: one of METHODS.
        base: which of the inputs is the base; None for methods without one.
        weights, densities: of each input.
        t: for slerp, from 0, the base, to 1, the other.
        normalize: whether the result is divided by the sum of the weights that count.
        rescale: one of RESCALES.
        factor: what the sum of deltas, or for passthrough the weight, is multiplied by.
        seed: of what DARE drops.
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
    """What stays of a delta.

    Attributes:
        bits: magnitude, as the bits of a float32, from which on values stay.
        end: element from which on values of exactly that magnitude are dropped.
        scale: what the rest is multiplied by.
    """

    bits: int = 0
    end: int = 1 << 62
    scale: float = 1.0


_Found = tuple[tuple[float, ...], "Array | None"]
"""What a chunk of a pass gives: numbers, which are added up in order, and counts."""


class _Pass:
    """Chunks of one pass over a weight, done by whichever threads want the result."""

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
        """What `finish` makes of the sums of what `work` gives of all chunks, which are the same each time.

        Raises what `work` raises, in every thread that waits.
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
        name: of the weight, from which what DARE drops follows.
        n: its elements.
    """

    name: str
    n: int
    rule: Rule
    inputs: Sequence[Values]
    _passes: list[_Pass] = field(default_factory=list)
    _trims: dict[int, _Trim] | None = None
    _shares: tuple[float, float] | None = None
    _lock: Condition = field(default_factory=Condition)

    def read(self, first: int, last: int) -> Array:
        """Elements [first, last) of the result, float32."""
        import numpy as np

        self._prepare()
        out = np.empty(last - first, np.float32)
        for start in range(first, last, STEP):
            end = min(start + STEP, last)
            read = [values.read(start, end) for values in self.inputs]
            with np.errstate(all="ignore"):  # values that are not finite stay so
                for part in blocks(end - start, STEP):
                    rows = [values[part] for values in read]
                    out[start - first + part.start : start - first + part.stop] = self._mixed(rows, start + part.start)
        return out

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
        """Pass `number` over the weight; `work` is given the first element of a chunk and the one behind its last."""
        with self._lock:
            while len(self._passes) <= number:
                self._passes.append(_Pass(-(-self.n // STEP)))
        return self._passes[number].run(lambda i: work(i * STEP, min((i + 1) * STEP, self.n)), finish)

    def _spherical(self) -> tuple[float, float]:
        """What base and other are multiplied by."""
        assert self.rule.base is not None
        pair = self.inputs[self.rule.base], self.inputs[1 - self.rule.base]

        def work(first: int, last: int) -> _Found:
            a, b = (values.read(first, last) for values in pair)
            return tuple(_sum_of_products(x, y) for x, y in ((a, a), (b, b), (a, b))), None

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
        """What stays of the delta of input `i`, and the number of the next pass."""
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
        """The `k` values of largest magnitude of the delta of input `i`; of equal ones those that come first."""
        import numpy as np

        def upper(first: int, last: int) -> _Found:
            return (), np.bincount(self._bits(i, first, last) >> 16, minlength=1 << 15)

        top, rest, _ = map(int, self._pass(number, upper, lambda _, counts: _bin_of(counts, k)))

        def lower(first: int, last: int) -> _Found:
            bits = self._bits(i, first, last)
            return (), np.bincount(bits[bits >> 16 == top] & 0xFFFF, minlength=1 << 16)

        low, rest, there = map(int, self._pass(number + 1, lower, lambda _, counts: _bin_of(counts, rest)))
        threshold = top << 16 | low
        if rest == there:
            return _Trim(threshold), number + 2
        n_chunks = -(-self.n // STEP)

        def equal(first: int, last: int) -> _Found:
            found = np.zeros(n_chunks, np.int64)
            found[first // STEP] = np.count_nonzero(self._bits(i, first, last) == threshold)
            return (), found

        def last_kept(_: list[float], counts: Array | None) -> tuple[float, ...]:
            assert counts is not None
            chunk = int(np.searchsorted(np.cumsum(counts), rest))
            first = chunk * STEP
            places = np.flatnonzero(self._bits(i, first, min(first + STEP, self.n)) == threshold)
            return (first + int(places[rest - int(counts[:chunk].sum()) - 1]),)

        return _Trim(threshold, int(self._pass(number + 2, equal, last_kept)[0]) + 1), number + 3

    def _norm_scale(self, i: int, trim: _Trim, number: int) -> float:
        """By what the sum of magnitudes of a delta shrank."""
        import numpy as np

        def work(first: int, last: int) -> _Found:
            delta = self._delta(i, first, last)
            sums = []
            for part in blocks(last - first):
                kept = self._kept(i, delta[part], first + part.start, trim)
                sums.append([float(np.abs(values).sum()) for values in (delta[part], kept)])
            return tuple(math.fsum(column) for column in zip(*sums, strict=True)), None

        before, after = self._pass(number, work, lambda sums, _: tuple(sums))
        return before / after if before >= _LEAST_SUM and after >= _LEAST_SUM else 1.0

    def _delta(self, i: int, first: int, last: int) -> Array:
        assert self.rule.base is not None
        delta: Array = self.inputs[i].read(first, last) - self.inputs[self.rule.base].read(first, last)
        return delta

    def _bits(self, i: int, first: int, last: int) -> Array:
        """Magnitudes of a delta as the bits of a float32, which have the same order: int32."""
        import numpy as np

        delta = self._delta(i, first, last)
        return np.abs(delta, out=delta).view(np.int32)

    # --- values ---

    def _mixed(self, rows: Sequence[Array], first: int) -> Array:
        """The result for a block of values of each input, from element `first` on."""
        import numpy as np

        rule = self.rule
        if rule.method == PASSTHROUGH:
            return rows[0] if rule.factor == 1 else rows[0] * np.float32(rule.factor)
        if rule.method == SLERP:
            assert rule.base is not None
            assert self._shares is not None
            out = rows[rule.base] * np.float32(self._shares[0])
            out += rows[1 - rule.base] * np.float32(self._shares[1])
            return out
        if rule.method == LINEAR:
            # What was read is nobody else's: each pass that needs no new memory saves the time to have it cleared.
            for values, weight in zip(rows, rule.weights, strict=True):
                if weight != 1:
                    np.multiply(values, np.float32(weight), out=values)
            for values in rows[1:]:
                np.add(rows[0], values, out=rows[0])
            total = math.fsum(rule.weights)
            return np.divide(rows[0], np.float32(total), out=rows[0]) if rule.normalize and total != 1 else rows[0]
        return self._with_deltas(rows, first)

    def _with_deltas(self, rows: Sequence[Array], first: int) -> Array:
        """The base and the sum of what the others add to it."""
        import numpy as np

        rule = self.rule
        assert rule.base is not None
        base = rows[rule.base]
        if not rule.deltas:
            return base
        trims = self._trims or {}
        deltas = []
        for i in rule.deltas:
            delta = self._kept(i, rows[i] - base, first, trims.get(i, _Trim()))
            delta *= np.float32(rule.weights[i])
            deltas.append(delta)
        total = deltas[0].copy()
        for delta in deltas[1:]:
            total += delta
        if rule.method in (TIES, DARE_TIES):
            positive = total >= 0
            total = np.zeros_like(base)
            share = np.zeros_like(base)
            for i, delta in zip(rule.deltas, deltas, strict=True):
                # Products with what is true or false take a tenth of the time of np.where.
                agreeing = np.maximum(delta, 0) * positive
                agreeing += np.minimum(delta, 0) * ~positive
                total += agreeing
                if rule.normalize:
                    share += (agreeing != 0) * np.float32(rule.weights[i])
            if rule.normalize:
                share += share == 0
                total /= share
        elif rule.normalize:
            divisor = math.fsum(rule.weights[i] for i in rule.deltas)
            total /= np.float32(divisor if abs(divisor) >= _TINY else 1)
        if rule.factor != 1:
            total *= np.float32(rule.factor)
        total += base
        return total

    def _kept(self, i: int, delta: Array, first: int, trim: _Trim) -> Array:
        """The values of a delta that stay, the others 0; rescaled."""
        import numpy as np

        rule = self.rule
        if rule.keeps(i):
            return delta
        if rule.densities[i] <= 0:
            return np.zeros_like(delta)
        if rule.method == TIES:
            bits = np.abs(delta).view(np.int32)
            if trim.end >= first + len(delta):
                stays = bits >= trim.bits
            else:
                stays = bits > trim.bits
                stays[: max(0, trim.end - first)] |= bits[: max(0, trim.end - first)] == trim.bits
        else:
            stays = kept_at_random(rule.seed, self.name, i, first, first + len(delta), rule.densities[i])
        out: Array = delta * stays
        if trim.scale != 1:
            out *= np.float32(trim.scale)
        return out


def _sum_of_products(x: Array, y: Array) -> float:
    """The dot product of two vectors of float32: runs of 256 products in float32, their sums in float64."""
    import numpy as np

    whole = len(x) // _RUN * _RUN
    pairs = [(x[part].reshape(-1, _RUN), y[part].reshape(-1, _RUN)) for part in blocks(whole)]
    pairs.append((x[whole:].reshape(1, -1), y[whole:].reshape(1, -1)))
    return math.fsum(float(np.einsum("ij,ij->i", *pair).sum(dtype=np.float64)) for pair in pairs)


def _bin_of(counts: Array | None, k: int) -> tuple[int, int, int]:
    """The bin in which the `k`-th largest lies, which of that bin's it is, from 1 on, and how many are there."""
    import numpy as np

    assert counts is not None
    above = np.cumsum(counts[::-1])
    place = int(np.searchsorted(above, k))
    found = len(counts) - 1 - place
    return found, k - int(above[place - 1] if place else 0), int(counts[found])


def kept_at_random(seed: int, name: str, model: int, first: int, last: int, density: float) -> Array:
    """Which of the elements [first, last) of the weight `name` of an input stay: bool, each with chance `density`."""
    import numpy as np

    key = int.from_bytes(blake2b(f"{seed}\0{model}\0{name}".encode(), digest_size=16).digest(), "little")
    limit = round(density * (1 << 32))
    parts = []
    for block, inside in _numbered(first, last):
        drawn = np.random.Philox(key=key, counter=block << 64).random_raw(BLOCK // 2).view("<u4")
        parts.append(drawn[inside] < limit)
    return np.concatenate(parts) if len(parts) != 1 else parts[0]


def _numbered(first: int, last: int) -> Iterator[tuple[int, slice]]:
    """The blocks that [first, last) touches, and the part of each that lies in it."""
    for block in range(first // BLOCK, -(-last // BLOCK)):
        start = block * BLOCK
        yield block, slice(max(first - start, 0), min(last - start, BLOCK))
