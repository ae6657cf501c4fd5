"""The factors of an adapter between Hugging Face names and llama.cpp's: what a link does to a weight, done to B A.

A link of the architecture table moves the rows of weights, cuts some and stacks others. Each matrix of its outcome is
made of rows of one or more matrices of its source. Of one: it has that one's A, and rows of its B. Of several with
the same A (a fused projection): that A, and rows of all their B. Of several with different A: all A on top of each
other, and rows of B each in the columns of its own A; the rank is then the sum of theirs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from aprfmt.arch.grammar import shape_of, sizes_of
from aprfmt.arch.hyperparams import Hyperparams
from aprfmt.arch.links import MIRROR, VALUES, Link, find_link, indices, link_of, map_values
from aprfmt.arch.names import canonical_name, embedding, head, matches
from aprfmt.arch.names import check_shapes as check_dims
from aprfmt.arch.row import Architecture
from aprfmt.canonical.pairs import Adapter, Base, Blocks, LoraPair, is_embedding, stacked_name
from aprfmt.canonical.rowmap import BufferedPiece
from aprfmt.canonical.tensor import CanonicalTensor
from aprfmt.codecs.recode import encode
from aprfmt.errors import RefusedError
from aprfmt.formats import lora
from aprfmt.types import Array, PathLike, Shape

_FLOATS = ("F32", "F16", "BF16")


def made(name: str, dtype: str, shape: Shape, make: Callable[[], Array]) -> CanonicalTensor:
    """A tensor whose values are computed when they are written."""
    return CanonicalTensor(name, (BufferedPiece(name, dtype, shape, lambda: [encode(dtype, make())]),))


def values_of(tensor: CanonicalTensor) -> Array:
    """The values of a factor, float32."""
    import numpy as np

    return tensor.produced.values().astype(np.float32, copy=False)


# --- names and shapes ---


def spelled(adapter: Adapter, base: Base) -> dict[str, LoraPair]:
    """The pairs by the table's spelling of their weights, on either side. Raises RefusedError for two of one weight."""
    row = base.row
    out: dict[str, LoraPair] = {}
    for pair in adapter.pairs.values():
        known = canonical_name(row, pair.weight) or stacked_name(pair.weight)
        found = {known: as_linear(base, known, pair)}
        if not (matches(row, known) or matches(row, known, "gguf")):
            found = _fused_experts(row, pair) or found
        for name, one in found.items():
            if name in out:
                raise RefusedError(
                    f"two adapters change this weight, as {out[name].weight} and as {pair.weight}", tensor=name
                )
            out[name] = one
    return out


def as_linear(base: Base, name: str, pair: LoraPair) -> LoraPair:
    """The pair of a stack as what reads its `in` and gives its `out`.

    PEFT takes a parameter of three dims for [n, out, in], unless its module says otherwise; Llama 4's does not.
    """
    row, h = base.row, base.hparams
    if len(pair.shape) != 3 or not matches(row, name) or not is_turned(row, name):
        return pair
    dims = shape_of(matches(row, name)[0].row.dims[0], sizes_of(h, matches(row, name)[0].layer))
    as_stored = all(want in (None, have) for have, want in zip(pair.shape, dims, strict=True))
    if len(dims) != 3 or not as_stored or pair.shape[1] == pair.shape[2]:
        return pair
    return swapped(pair)


def swapped(pair: LoraPair) -> LoraPair:
    """The pair whose product is that of `pair` with the last two dimensions swapped."""
    a, b = pair.a, pair.b
    (*n, rank, inside), out = a.shape, b.shape[-2]
    new_a = made(a.name, _dtype([b]), (*n, rank, out), lambda: values_of(b).swapaxes(-1, -2))
    new_b = made(b.name, _dtype([a]), (*n, inside, rank), lambda: values_of(a).swapaxes(-1, -2))
    return LoraPair(pair.weight, new_a, new_b, pair.scale)


def _fused_experts(row: Architecture, pair: LoraPair) -> dict[str, LoraPair]:
    """The stacks of a GGUF that one of transformers is, for families whose checkpoints have each expert alone."""
    found = re.fullmatch(r"(?:.*\.)?layers\.(\d+)\..*experts\.(gate_up_proj|down_proj)", pair.weight)
    if found is None or len(pair.shape) != 3:
        return {}
    stem = f"blk.{found[1]}.ffn_"
    names = (
        [f"{stem}down_exps.weight"] if found[2] == "down_proj" else [f"{stem}{x}_exps.weight" for x in ("gate", "up")]
    )
    if not all(matches(row, name, "gguf") for name in names):
        return {}
    a, b = pair.a, pair.b
    (*n, out, rank), half = b.shape, b.shape[-2] // len(names)
    if half * len(names) != out:
        return {}

    def part(i: int) -> CanonicalTensor:
        own = slice(i * half, (i + 1) * half)
        return made(b.name, _dtype([b]), (*n, half, rank), lambda: values_of(b)[..., own, :])

    return {name: LoraPair(pair.weight, a, part(i), pair.scale) for i, name in enumerate(names)}


def is_turned(row: Architecture, name: str) -> bool:
    """Whether the Hugging Face weight `name` is stored as [in, out]: the embedding, and what the row transposes."""
    return is_embedding(row, name) or any(match.row.transposed for match in matches(row, name))


def stored_shape(row: Architecture, name: str, pair: LoraPair) -> Shape:
    """The shape of the Hugging Face weight `name` by its pair."""
    *n, out, inside = pair.shape
    return (*n, inside, out) if is_turned(row, name) else (*n, out, inside)


def check_shapes(adapter: Adapter, path: PathLike) -> None:
    """Raises RefusedError where the pairs are not of the shapes of the base's weights."""
    base = adapter.of
    if base is None:
        return
    row, h = base.row, base.hparams
    _check_whole(adapter, base, path)
    for name, pair in spelled(adapter, base).items():
        found = matches(row, name) or matches(row, name, "gguf")
        layer = found[0].layer if found else None
        if layer is not None and found[0].row.depth == "layers" and h.num_layers and layer >= h.num_layers:
            raise _other_base(f"it changes layer {layer}, and the base has {h.num_layers}", pair.weight, path)
        try:
            if matches(row, name):
                check_dims(row, h, {name: stored_shape(row, name, pair)})
            else:
                shapes = {name: pair.shape[::-1] if name == "token_embd.weight" else pair.shape}
                link = find_link(row, h, name, shapes, "gguf")
                if link is not None:
                    check_dims(row, h, dict(zip(link.hf, link.row_map.before, strict=True)))
        except RefusedError as error:
            raise _other_base(error.message, pair.weight, path) from error


def _check_whole(adapter: Adapter, base: Base, path: PathLike) -> None:
    """The same of weights that are replaced, but for those whose rows are tokens: there may be more."""
    tokens = {embedding(base.row), head(base.row)}
    for name, tensor in adapter.whole.items():
        known = canonical_name(base.row, name.replace(".base_layer.", "."))
        if known is None or known in tokens:
            continue
        try:
            check_dims(base.row, base.hparams, {known: tensor.shape})
        except RefusedError as error:
            raise _other_base(error.message, name, path) from error


def _other_base(reason: str, weight: str, path: PathLike) -> RefusedError:
    return RefusedError(
        f"the adapter is for another base model: {reason}",
        path=path,
        tensor=weight,
        hint="set the model that it was trained on with --base",
    )


# --- links ---


def to_gguf(adapter: Adapter, path: PathLike) -> tuple[dict[str, LoraPair], dict[str, list[tuple[str, int]]]]:
    """The pairs under llama.cpp's names, and which of them are made of several with different A.

    Raises RefusedError where the row, or what it needs of the base, is unknown.
    """
    row, h = _row(adapter, path)
    out: dict[str, LoraPair] = {}
    blocks: dict[str, list[tuple[str, int]]] = {}
    names = spelled(adapter, Base(row, h))
    shapes = {name: stored_shape(row, name, pair) for name, pair in names.items() if matches(row, name)}
    done: set[str] = set()
    for name, pair in names.items():
        if name in done:
            continue
        if name not in shapes:
            _add(out, replace(pair, weight=name), path)
            continue
        link = _link(row, h, name, shapes, adapter, path)
        done |= set(link.hf)
        given = [names.get(hf) for hf in link.hf]
        for made_pair, parts in _with_something(_transform(link, given, inverse=False, path=path)):
            _add(out, made_pair, path)
            if parts:
                blocks[made_pair.weight] = parts
    return out, blocks


def _with_something(
    found: list[tuple[LoraPair, list[tuple[str, int]]]],
) -> list[tuple[LoraPair, list[tuple[str, int]]]]:
    """Of several parts of one weight those to which something is added: an adapter may have changed one alone."""
    kept = [one for one in found if values_of(one[0].b).any()] if len(found) > 1 else found
    return kept or found


def _add(out: dict[str, LoraPair], pair: LoraPair, path: PathLike) -> None:
    if pair.weight in out:
        raise RefusedError("two adapters change this weight", path=path, tensor=pair.weight)
    out[pair.weight] = pair


def _row(adapter: Adapter, path: PathLike) -> tuple[Architecture, Hyperparams]:
    if adapter.of is None:
        raise missing_base(adapter, path)
    return adapter.of.row, adapter.of.hparams


def missing_base(adapter: Adapter, path: PathLike) -> RefusedError:
    """The error where the base model is needed and not at hand."""
    named = f" ({adapter.base})" if adapter.base else ""
    return RefusedError(
        f"the adapter's base model{named} was not found, and tensor names and row order depend on it",
        path=path,
        hint="set it with --base: a folder with config.json (weights are not needed), or a model file",
    )


def _link(
    row: Architecture, h: Hyperparams, name: str, shapes: Mapping[str, Shape], adapter: Adapter, path: PathLike
) -> Link:
    link = find_link(row, h, name, shapes, "hf")
    if link is None or not link.gguf:
        raise RefusedError(
            f"a GGUF of architecture {row.gguf!r} cannot hold this weight",
            path=path,
            tensor=name,
            hint="merge the adapter into its base instead: apr merge-adapter BASE ADAPTER -o OUT",
        )
    return link


def to_hf(adapter: Adapter, path: PathLike) -> dict[str, LoraPair]:
    """The pairs under Hugging Face names, by the names that the adapter, or else the table, has for them.

    Raises RefusedError where the base is needed for that and not at hand.
    """
    blocks = adapter.blocks
    if adapter.of is None and not any(map(_is_gguf_name, adapter.pairs)):
        return dict(adapter.pairs)
    row, h = _row(adapter, path)
    names = spelled(adapter, Base(row, h))
    shapes = {
        name: pair.shape[::-1] if name == "token_embd.weight" else pair.shape
        for name, pair in names.items()
        if not matches(row, name)
    }
    out: dict[str, LoraPair] = {}
    done: set[str] = set()
    for name, pair in names.items():
        if name in done:
            continue
        if name not in shapes:
            _add(out, pair, path)
            continue
        link = _alternative(adapter, name, shapes, Base(row, h))
        done |= set(link.gguf)
        for made_pair in from_link(link, names, blocks, path):
            _add(out, made_pair, path)
    return out


def _is_gguf_name(weight: str) -> bool:
    return stacked_name(weight).startswith(("blk.", "token_embd.", "output."))


def _alternative(adapter: Adapter, name: str, shapes: Mapping[str, Shape], base: Base) -> Link:
    """The link of a GGUF's weight: of alternatives the one whose names the adapter was made from.

    Where that is not known, it is that of stacks, as the classes of transformers hold experts.
    """
    origin = {hf for hf, _ in adapter.blocks.get(name, ())}
    told = adapter.config.get("target_parameters")
    ends = tuple(f".{end}" for end in told if isinstance(end, str)) if isinstance(told, list) else ()
    links = [link_of(base.hparams, match, shapes) for match in matches(base.row, name, "gguf")]
    for link in links:
        if origin & set(link.hf) or (ends and all(hf.endswith(ends) for hf in link.hf)):
            return link
    usual = find_link(base.row, base.hparams, name, shapes, "gguf")
    assert usual is not None
    stacks = [
        link for link in links if all(hf.endswith(("experts.gate_up_proj", "experts.down_proj")) for hf in link.hf)
    ]
    singles = any(re.search(r"\.experts\.\d+\.", hf) for hf in usual.hf)
    return stacks[0] if stacks and singles and not adapter.config.get("target_modules") else usual


def from_link(link: Link, names: Mapping[str, LoraPair], blocks: Blocks, path: PathLike) -> list[LoraPair]:
    """The Hugging Face pairs of a link, of those of a GGUF by name."""
    found = []
    given = [names.get(gguf) for gguf in link.gguf]
    for pair, _ in _transform(link, given, inverse=True, path=path):
        trimmed = _trimmed(pair, link, given, blocks)
        if trimmed is not None:
            found.append(trimmed)
    return found


def _trimmed(pair: LoraPair, link: Link, given: Sequence[LoraPair | None], blocks: Blocks) -> LoraPair | None:
    """`pair` with the rows of A that are its own; None where the adapter was made of others alone."""
    told = next((blocks[name] for name in link.gguf if name in blocks), None)
    if told is None:
        return pair if values_of(pair.b).any() or len(link.hf) == 1 else None
    start = 0
    for name, rank in told:
        if name == pair.weight:
            whole = start + rank > pair.rank or (start == 0 and rank == pair.rank)
            return pair if whole else _part(pair, slice(start, start + rank))
        start += rank
    return None


def _part(pair: LoraPair, own: slice) -> LoraPair:
    """The product of some rows of A and the columns of B that go with them."""
    a, b, rank = pair.a, pair.b, own.stop - own.start
    return replace(
        pair,
        a=made(a.name, a.dtype, (*a.shape[:-2], rank, a.shape[-1]), lambda: values_of(a)[..., own, :]),
        b=made(b.name, b.dtype, (*b.shape[:-1], rank), lambda: values_of(b)[..., own]),
    )


@dataclass(frozen=True, slots=True)
class _LoraSide:
    """The tensors of one side of a link, as rows laid end to end.

    Attributes:
        names, shapes: of the tensors.
        turned: of each, whether rows of the row space are columns of B A.
    """

    names: Sequence[str]
    shapes: Sequence[Shape]
    turned: Sequence[bool]

    def matrices(self, width: int) -> list[tuple[int, int, int]]:
        """(tensor, number of the matrix in it, rows) of each matrix."""
        out = []
        for i, shape in enumerate(self.shapes):
            n = prod(shape[:-2])
            out += [(i, m, prod(shape) // n // width) for m in range(n)]
        return out


def _transform(
    link: Link, given: Sequence[LoraPair | None], *, inverse: bool, path: PathLike
) -> list[tuple[LoraPair, list[tuple[str, int]]]]:
    """The pairs of the other side of a link, each with its blocks where it is made of several with different A."""
    import numpy as np

    m = link.row_map
    name, _, _ = m.value.partition(":")
    if m.pack or (m.flat and m.orders) or name not in ("", MIRROR, *(v for v in VALUES if v.startswith("plus_"))):
        raise RefusedError(
            "a GGUF stores this weight in a form that low-rank factors cannot be applied to",
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
    """What the rows of B are multiplied by, one number a row of the outcome; None for 1 throughout."""
    import numpy as np

    m = link.row_map
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
    """Rows `there` of a matrix: rows `local` of matrix `number` of the pair."""

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
    """A matrix of the outcome: how many rows it has, what they are made of, and what they are multiplied by."""

    rows: int
    sections: Sequence[_Section]
    factors: Array | None

    def is_shared(self) -> bool:
        """Whether all sections have the same A, so that the rank stays."""
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
    """Tensor `i` of a side made of `matrices`; None where no pair has a part in it."""
    import numpy as np

    sections = [section for matrix in matrices for section in matrix.sections]
    if not sections:
        return None
    shared = [matrix.is_shared() for matrix in matrices]
    rank = max(matrix.rank(one) for matrix, one in zip(matrices, shared, strict=True))
    scale = next((section.pair.scale for section in sections if section.pair.scale), 1.0)
    exact = all(is_power_of_two(section.pair.scale / scale) for section in sections)
    plain = exact and all(matrix.factors is None for matrix in matrices)
    dtypes = [_dtype([getattr(s.pair, which) for s in sections]) for which in ("a", "b")]
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


def _dtype(tensors: Iterable[CanonicalTensor]) -> str:
    found = {tensor.dtype for tensor in tensors}
    return found.pop() if len(found) == 1 and found <= set(_FLOATS) else "F32"


def is_power_of_two(factor: float) -> bool:
    """Whether values multiplied by `factor` keep their digits."""
    return factor != 0 and math.isfinite(factor) and math.frexp(abs(factor))[0] == 0.5


# --- scales ---


def with_scale(pair: LoraPair, scale: float, rank: int | None = None) -> LoraPair:
    """The same product with that `scale`, and of that `rank` (filled up with zeros)."""
    import numpy as np

    rank = rank or pair.rank
    factor = pair.scale / scale
    if factor == 1 and rank == pair.rank:
        return pair
    a, b, extra = pair.a, pair.b, rank - pair.rank

    def wide_b() -> Array:
        values = np.pad(values_of(b), [(0, 0)] * (len(b.shape) - 1) + [(0, extra)])
        if factor == 1:
            return values
        with np.errstate(over="ignore", invalid="ignore"):
            scaled = values * np.float32(factor)
        if not np.isfinite(scaled).all() and np.isfinite(values).all():
            raise RefusedError(f"with its scale of {pair.scale:g} the factor B is beyond float32", tensor=pair.weight)
        return scaled

    def long_a() -> Array:
        return np.pad(values_of(a), [(0, 0)] * (len(a.shape) - 2) + [(0, extra), (0, 0)])

    dtype = _dtype([b]) if is_power_of_two(factor) else "F32"
    new_b = made(b.name, dtype, (*b.shape[:-1], rank), wide_b)
    new_a = a if not extra else made(a.name, _dtype([a]), (*a.shape[:-2], rank, a.shape[-1]), long_a)
    return LoraPair(pair.weight, new_a, new_b, scale)


def on_top(weight: str, pairs: Sequence[LoraPair]) -> LoraPair | None:
    """The pair of a weight whose rows are those of several; None where these have not the same A and scale."""
    import numpy as np

    first = pairs[0]
    if any(one.a.shape != first.a.shape or one.scale != first.scale for one in pairs):
        return None
    if any((values_of(one.a) != values_of(first.a)).any() for one in pairs[1:]):
        return None
    shape = (*first.b.shape[:-2], sum(one.b.shape[-2] for one in pairs), first.rank)
    dtype = _dtype([one.b for one in pairs])
    b = made(weight + lora.B, dtype, shape, lambda: np.concatenate([values_of(one.b) for one in pairs], axis=-2))
    return LoraPair(weight, first.a, b, first.scale)


def without_zeros(pair: LoraPair, rank: int) -> LoraPair:
    """`pair` with the first `rank` rows of A, where nothing but zeros is behind them; else as it is."""
    if pair.rank <= rank or values_of(pair.b)[..., rank:].any():
        return pair
    return _part(pair, slice(0, rank))


def at_alpha(pair: LoraPair, alpha: float) -> tuple[LoraPair, bool]:
    """The same product with the scale alpha / rank, and whether every digit is kept.

    Where the rank does not give that scale, zeros are added to it until the rest is a power of two.
    """
    if pair.scale == alpha / pair.rank:
        return pair, True
    found = (rank for rank in range(pair.rank, 2 * pair.rank + 1) if is_power_of_two(pair.scale * rank / alpha))
    rank = next(found, None)
    return with_scale(pair, alpha / (rank or pair.rank), rank), rank is not None
