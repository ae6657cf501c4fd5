"""Converts LoRA factors between Hugging Face and llama.cpp names: applies a link's weight mapping to B A.

A link of the architecture table permutes, cuts and stacks the rows of weights. Each output matrix consists of rows of
one or more input matrices. From one: it keeps its A, and takes rows of its B. From several with the same A (a fused
projection): that A, and rows of all their B. From several with different A: all A stacked, and rows of each B in the
columns of its own A; the rank is then the sum of theirs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from aprfmt.arch.grammar import shape_of, sizes_of
from aprfmt.arch.hyperparams import Hyperparams
from aprfmt.arch.links import Link, find_link, link_of
from aprfmt.arch.names import canonical_name, embedding, head, matches
from aprfmt.arch.names import check_shapes as check_dims
from aprfmt.arch.row import Architecture
from aprfmt.canonical.lora_blocks import is_power_of_two, made, shared_dtype, transform, values_of
from aprfmt.canonical.lora_pairs import Adapter, Base, Blocks, LoraPair, is_embedding, stacked_name
from aprfmt.canonical.tensor import CanonicalTensor
from aprfmt.errors import RefusedError
from aprfmt.formats import lora
from aprfmt.types import Array, PathLike, Shape

# --- names and shapes ---


def spelled(adapter: Adapter, base: Base) -> dict[str, LoraPair]:
    """The pairs by the table's spelling of their weights, in either convention. Raises RefusedError for duplicates."""
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
                    f"this weight is adapted twice, as {out[name].weight} and as {pair.weight}", tensor=name
                )
            out[name] = one
    return out


def as_linear(base: Base, name: str, pair: LoraPair) -> LoraPair:
    """The pair of a stack with `in` and `out` as in a linear layer.

    PEFT treats a 3-D parameter as [n, out, in] unless its module says otherwise; Llama 4's does not.
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
    """The pair whose product is that of `pair` with its last two dimensions transposed."""
    a, b = pair.a, pair.b
    (*n, rank, inside), out = a.shape, b.shape[-2]
    new_a = made(a.name, shared_dtype([b]), (*n, rank, out), lambda: values_of(b).swapaxes(-1, -2))
    new_b = made(b.name, shared_dtype([a]), (*n, inside, rank), lambda: values_of(a).swapaxes(-1, -2))
    return LoraPair(pair.weight, new_a, new_b, pair.scale)


def _fused_experts(row: Architecture, pair: LoraPair) -> dict[str, LoraPair]:
    """GGUF stacks that correspond to one fused tensor in transformers, for checkpoints with separate experts."""
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
        return made(b.name, shared_dtype([b]), (*n, half, rank), lambda: values_of(b)[..., own, :])

    return {name: LoraPair(pair.weight, a, part(i), pair.scale) for i, name in enumerate(names)}


def is_turned(row: Architecture, name: str) -> bool:
    """Whether the Hugging Face weight `name` is stored as [in, out]: the embedding, and what the row transposes."""
    return is_embedding(row, name) or any(match.row.transposed for match in matches(row, name))


def stored_shape(row: Architecture, name: str, pair: LoraPair) -> Shape:
    """The shape of the Hugging Face weight `name`, from its pair."""
    *n, out, inside = pair.shape
    return (*n, inside, out) if is_turned(row, name) else (*n, out, inside)


def check_shapes(adapter: Adapter, path: PathLike) -> None:
    """Raises RefusedError if the pairs do not match the shapes of the base's weights."""
    base = adapter.of
    if base is None:
        return
    row, h = base.row, base.hparams
    _check_whole(adapter, base, path)
    for name, pair in spelled(adapter, base).items():
        found = matches(row, name) or matches(row, name, "gguf")
        layer = found[0].layer if found else None
        if layer is not None and found[0].row.depth == "layers" and h.num_layers and layer >= h.num_layers:
            raise _other_base(f"it changes layer {layer}, but the base has {h.num_layers}", pair.weight, path)
        try:
            if matches(row, name):
                check_dims(row, h, {name: stored_shape(row, name, pair)})
            else:
                shapes = {name: pair.shape[::-1] if name == "token_embd.weight" else pair.shape}
                link = find_link(row, h, name, shapes, "gguf")
                if link is not None:
                    check_dims(row, h, dict(zip(link.hf, link.mapping.before, strict=True)))
        except RefusedError as error:
            raise _other_base(error.message, pair.weight, path) from error


def _check_whole(adapter: Adapter, base: Base, path: PathLike) -> None:
    """Checks the shapes of whole weights of the adapter; those with one row per token may have more rows."""
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
        f"the adapter is for a different base model: {reason}",
        path=path,
        tensor=weight,
        hint="use the model that it was trained on, which apr inspect ADAPTER names (to convert an adapter: --base)",
    )


# --- links ---


def to_gguf(adapter: Adapter, path: PathLike) -> tuple[dict[str, LoraPair], dict[str, list[tuple[str, int]]]]:
    """The pairs under llama.cpp names, and which of them combine several with different A.

    Raises RefusedError if the row, or what it needs of the base, is unknown.
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
        for made_pair, parts in _with_something(transform(link, given, inverse=False, path=path)):
            _add(out, made_pair, path)
            if parts:
                blocks[made_pair.weight] = parts
    return out, blocks


def _with_something(
    found: list[tuple[LoraPair, list[tuple[str, int]]]],
) -> list[tuple[LoraPair, list[tuple[str, int]]]]:
    """The parts of a weight that the adapter changes."""
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
    """The error if the base model is needed and not found."""
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
    """The pairs under Hugging Face names, from the adapter, else from the table.

    Raises RefusedError if this needs the base and it is not found.
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
    """The link of a GGUF weight; of alternatives the one whose names the adapter was made from.

    If unknown, the one with stacks, since transformers' classes have stacked experts.
    """
    origin = {hf for hf, _ in adapter.blocks.get(name, ())}
    stated = adapter.config.get("target_parameters")
    ends = tuple(f".{end}" for end in stated if isinstance(end, str)) if isinstance(stated, list) else ()
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
    """The Hugging Face pairs of a link, from those of a GGUF by name."""
    found = []
    given = [names.get(gguf) for gguf in link.gguf]
    for pair, _ in transform(link, given, inverse=True, path=path):
        own = _own_rank_slice(pair, link, blocks)
        if own is not None:
            found.append(own)
    return found


def _own_rank_slice(pair: LoraPair, link: Link, blocks: Blocks) -> LoraPair | None:
    """`pair` with only the rows of A that belong to it; None if none do."""
    stated = next((blocks[name] for name in link.gguf if name in blocks), None)
    if stated is None:
        return pair if values_of(pair.b).any() or len(link.hf) == 1 else None
    start = 0
    for name, rank in stated:
        if name == pair.weight:
            whole = start + rank > pair.rank or (start == 0 and rank == pair.rank)
            return pair if whole else _part(pair, slice(start, start + rank))
        start += rank
    return None


def _part(pair: LoraPair, own: slice) -> LoraPair:
    """The product of some rows of A and their columns of B."""
    a, b, rank = pair.a, pair.b, own.stop - own.start
    return replace(
        pair,
        a=made(a.name, a.dtype, (*a.shape[:-2], rank, a.shape[-1]), lambda: values_of(a)[..., own, :]),
        b=made(b.name, b.dtype, (*b.shape[:-1], rank), lambda: values_of(b)[..., own]),
    )


# --- scales ---


def with_scale(pair: LoraPair, scale: float, rank: int | None = None) -> LoraPair:
    """The pair with an equal product for this `scale` and `rank` (padded with zeros)."""
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
            raise RefusedError(f"factor B times the scale {pair.scale:g} overflows float32", tensor=pair.weight)
        return scaled

    def long_a() -> Array:
        return np.pad(values_of(a), [(0, 0)] * (len(a.shape) - 2) + [(0, extra), (0, 0)])

    dtype = shared_dtype([b]) if is_power_of_two(factor) else "F32"
    new_b = made(b.name, dtype, (*b.shape[:-1], rank), wide_b)
    new_a = a if not extra else made(a.name, shared_dtype([a]), (*a.shape[:-2], rank, a.shape[-1]), long_a)
    return LoraPair(pair.weight, new_a, new_b, scale)


def on_top(weight: str, pairs: Sequence[LoraPair]) -> LoraPair | None:
    """Stacks pairs with the same A and scale; None if they differ."""
    import numpy as np

    first = pairs[0]
    if any(one.a.shape != first.a.shape or one.scale != first.scale for one in pairs):
        return None
    if any((values_of(one.a) != values_of(first.a)).any() for one in pairs[1:]):
        return None
    shape = (*first.b.shape[:-2], sum(one.b.shape[-2] for one in pairs), first.rank)
    dtype = shared_dtype([one.b for one in pairs])
    b = made(weight + lora.B, dtype, shape, lambda: np.concatenate([values_of(one.b) for one in pairs], axis=-2))
    return LoraPair(weight, first.a, b, first.scale)


def without_zeros(pair: LoraPair, rank: int) -> LoraPair:
    """`pair` with the first `rank` rows of A if all others are zero, else unchanged."""
    if pair.rank <= rank or values_of(pair.b)[..., rank:].any():
        return pair
    return _part(pair, slice(0, rank))


def scaled_by_alpha(pair: LoraPair, alpha: float) -> tuple[LoraPair, bool]:
    """The pair with an equal product for the scale alpha / rank, and whether it is exact.

    If the rank does not yield that scale, zeros are added until the quotient is a power of two.
    """
    if pair.scale == alpha / pair.rank:
        return pair, True
    found = (rank for rank in range(pair.rank, 2 * pair.rank + 1) if is_power_of_two(pair.scale * rank / alpha))
    rank = next(found, None)
    return with_scale(pair, alpha / (rank or pair.rank), rank), rank is not None
