"""Transforms the factors of a LoRA adapter by a weight mapping."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod

from aprfmt.arch.links import Link
from aprfmt.arch.orders import MIRROR, VALUES, indices, map_values
from aprfmt.canonical.lora_pairs import LoraPair
from aprfmt.canonical.row_mapping import BufferedTensor
from aprfmt.canonical.tensor import CanonicalTensor
from aprfmt.codecs.recode import encode
from aprfmt.errors import RefusedError
from aprfmt.formats import lora
from aprfmt.types import Array, PathLike, Shape

_FLOATS = ("F32", "F16", "BF16")


def made(name: str, dtype: str, shape: Shape, make: Callable[[], Array]) -> CanonicalTensor:
    """A tensor whose values are computed when they are written."""
    return CanonicalTensor(name, (BufferedTensor(name, dtype, shape, lambda: [encode(dtype, make())]),))


def values_of(tensor: CanonicalTensor) -> Array:
    """The values of a factor, float32."""
    import numpy as np

    return tensor.produced.values().astype(np.float32, copy=False)


@dataclass(frozen=True, slots=True)
class _LoraSide:
    """The tensors of one side of a link, with their rows concatenated.

    Attributes:
        names, shapes: of the tensors.
        turned: per tensor, whether rows of the row space are columns of B A.
    """

    names: Sequence[str]
    shapes: Sequence[Shape]
    turned: Sequence[bool]

    def matrices(self, width: int) -> list[tuple[int, int, int]]:
        """(tensor, index of the matrix in it, rows) of each matrix."""
        out = []
        for i, shape in enumerate(self.shapes):
            n = prod(shape[:-2])
            out += [(i, m, prod(shape) // n // width) for m in range(n)]
        return out


def transform(
    link: Link, given: Sequence[LoraPair | None], *, inverse: bool, path: PathLike
) -> list[tuple[LoraPair, list[tuple[str, int]]]]:
    """The pairs of the other side of a weight mapping, with their blocks if they combine several with different A."""
    import numpy as np

    m = link.mapping
    name, _, _ = m.value.partition(":")
    if m.pack or (m.flat and m.orders) or name not in ("", MIRROR, *(v for v in VALUES if v.startswith("plus_"))):
        raise RefusedError(
            "a GGUF stores this weight in a form that LoRA cannot be applied to",
            path=path,
            tensor=link.hf[0],
            hint="merge the adapter into its base instead: apr merge-adapter BASE ADAPTER -o OUT",
        )
    width = m.row_elements
    hf = _LoraSide(link.hf, m.before, [_is_lookup(link.gguf)] * len(link.hf))
    flags = m.after_transposed or (False,) * len(m.after)
    gguf = _LoraSide(link.gguf, m.after, [flag != _is_lookup(link.gguf) for flag in flags])
    sources, targets = (gguf, hf) if inverse else (hf, gguf)
    parts = sources.matrices(width)
    ends = np.cumsum([rows for *_, rows in parts])
    index = indices(m.orders, m.n_rows, inverse=inverse)
    if m.skip:
        index = index + m.skip if not inverse else np.concatenate([np.full(m.skip, -1), index])
    factors = _row_factors(link, index, inverse)
    columns = indices(m.columns, width, inverse=inverse) if m.columns else None
    out = []
    start = 0
    by_tensor: dict[int, list[_Matrix]] = {}
    for tensor, _, rows in targets.matrices(width):
        wanted = index[start : start + rows]
        owner = np.searchsorted(ends, wanted, side="right")
        sections = []
        for part in np.unique(owner):
            i, number, n = parts[int(part)]
            pair = given[i]
            if pair is None:
                continue
            there = np.flatnonzero((owner == part) & (wanted >= 0))
            local = wanted[there] - (int(ends[part]) - n)
            sections.append(_Section(pair, sources.turned[i], number, there, local))
        scaling = None if factors is None else factors[start : start + rows]
        by_tensor.setdefault(tensor, []).append(_Matrix(rows, sections, scaling))
        start += rows
    for i, matrices in by_tensor.items():
        found = _joined(targets, i, matrices, width, columns)
        if found is not None:
            out.append(found)
    return out


def _is_lookup(gguf: Sequence[str]) -> bool:
    return "token_embd.weight" in gguf


def _row_factors(link: Link, index: Array, inverse: bool) -> Array | None:
    """The factors of the rows of B, one per output row; None if all are 1."""
    import numpy as np

    m = link.mapping
    if not m.scales and not m.value.startswith(MIRROR):
        return None
    n = len(index)
    out = np.ones(n, np.float32)
    if m.scales:
        runs = np.repeat(np.array([prod(numbers) for _, numbers in m.scales]), [rows for rows, _ in m.scales])
        out *= (1 / runs[index] if inverse else runs).astype(np.float32)
    if m.value.startswith(MIRROR):
        rows = np.arange(n) if inverse else index
        out *= map_values(m.value, np.ones((n, 1), np.float32), rows)[:, 0]
    return out


@dataclass(frozen=True, slots=True)
class _Section:
    """Rows `there` of an output matrix: rows `local` of matrix `number` of the pair."""

    pair: LoraPair
    turned: bool
    number: int
    there: Array
    local: Array

    def a(self) -> Array:
        """[rank, width], in the row space."""
        return self._of(self.pair.b).T if self.turned else self._of(self.pair.a)

    def b(self) -> Array:
        """[rows, rank], in the row space."""
        return (self._of(self.pair.a).T if self.turned else self._of(self.pair.b))[self.local]

    def _of(self, tensor: CanonicalTensor) -> Array:
        values = values_of(tensor)
        return values[self.number] if values.ndim == 3 else values

    @property
    def key(self) -> tuple[int, int]:
        return id(self.pair), self.number


@dataclass(frozen=True, slots=True)
class _Matrix:
    """An output matrix: its number of rows, its sections, and the factors of its rows."""

    rows: int
    sections: Sequence[_Section]
    factors: Array | None

    def is_shared(self) -> bool:
        """Whether all sections have the same A, so the rank is unchanged."""
        if len(self.sections) < 2:
            return True
        first = self.sections[0]
        if any(s.pair.rank != first.pair.rank or s.pair.a.dtype != first.pair.a.dtype for s in self.sections):
            return False
        own = first.a()
        return all((s.a() == own).all() for s in self.sections[1:])

    def rank(self, shared: bool) -> int:
        ranks = [section.pair.rank for section in self.sections]
        return max(ranks, default=0) if shared else sum(ranks)

    def a(self, rank: int, width: int, shared: bool) -> Array:
        import numpy as np

        out = np.zeros((rank, width), np.float32)
        start = 0
        for section in self.sections[: 1 if shared else None]:
            values = section.a()
            out[start : start + len(values)] = values
            start += len(values)
        return out

    def b(self, rank: int, shared: bool, scale: float) -> Array:
        import numpy as np

        out = np.zeros((self.rows, rank), np.float32)
        start = 0
        for section in self.sections:
            values = section.b()
            factor = np.float32(section.pair.scale / scale)
            out[section.there, start : start + values.shape[1]] = values if factor == 1 else values * factor
            start += 0 if shared else values.shape[1]
        return out if self.factors is None else out * self.factors[:, None]


def _joined(
    side: _LoraSide, i: int, matrices: Sequence[_Matrix], width: int, columns: Array | None
) -> tuple[LoraPair, list[tuple[str, int]]] | None:
    """Tensor `i` of a side, composed of `matrices`; None if no pair contributes."""
    import numpy as np

    sections = [section for matrix in matrices for section in matrix.sections]
    if not sections:
        return None
    shared = [matrix.is_shared() for matrix in matrices]
    rank = max(matrix.rank(one) for matrix, one in zip(matrices, shared, strict=True))
    scale = next((section.pair.scale for section in sections if section.pair.scale), 1.0)
    exact = all(is_power_of_two(section.pair.scale / scale) for section in sections)
    plain = exact and all(matrix.factors is None for matrix in matrices)
    dtypes = [shared_dtype([getattr(s.pair, which) for s in sections]) for which in ("a", "b")]
    name, shape, turned = side.names[i], side.shapes[i], side.turned[i]
    n = (len(matrices),) if len(shape) > 2 else ()
    rows = matrices[0].rows

    def make_a() -> Array:
        found = [matrix.a(rank, width, one) for matrix, one in zip(matrices, shared, strict=True)]
        values = np.stack(found).reshape(*n, rank, width)
        return values if columns is None else values[..., columns]

    def make_b() -> Array:
        found = [matrix.b(rank, one, scale) for matrix, one in zip(matrices, shared, strict=True)]
        return np.stack(found).reshape(*n, rows, rank)

    if any(section.turned for section in sections):
        dtypes.reverse()
    a_dtype, b_dtype = dtypes[0], dtypes[1] if plain else "F32"
    if turned:
        a = made(name + lora.A, b_dtype, (*n, rank, rows), lambda: make_b().swapaxes(-1, -2))
        b = made(name + lora.B, a_dtype, (*n, width, rank), lambda: make_a().swapaxes(-1, -2))
    else:
        a = made(name + lora.A, a_dtype, (*n, rank, width), make_a)
        b = made(name + lora.B, b_dtype, (*n, rows, rank), make_b)
    blocks: list[tuple[str, int]] = []
    for one, matrix in zip(shared, matrices, strict=True):
        if not one and not blocks:
            blocks = [(section.pair.weight, section.pair.rank) for section in matrix.sections]
    return LoraPair(name, a, b, scale), blocks


def shared_dtype(tensors: Iterable[CanonicalTensor]) -> str:
    """The float dtype common to all `tensors`, else F32."""
    found = {tensor.dtype for tensor in tensors}
    return found.pop() if len(found) == 1 and found <= set(_FLOATS) else "F32"


def is_power_of_two(factor: float) -> bool:
    """Whether multiplication by `factor` is exact."""
    return factor != 0 and math.isfinite(factor) and math.frexp(abs(factor))[0] == 0.5
