"""Tensor names: the table row of a name, and whether a set of tensors is the whole network."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from itertools import islice
from operator import attrgetter

from aprfmt.arch.grammar import dims_of, evaluate, has_layer, is_needed, shape_of, size_words, sizes_of
from aprfmt.arch.hyperparams import Hyperparams
from aprfmt.arch.row import ROPE_FACTORS, Architecture, TensorRow, Tower
from aprfmt.arch.table import LISTED
from aprfmt.arch.wrappers import BEGINNINGS
from aprfmt.errors import RefusedError, UnmappedError
from aprfmt.light_dataclass import light_dataclass
from aprfmt.text import first_few
from aprfmt.types import Shape

_NUMBER = re.compile(r"(?:(?<![^.])|(?<=\.shard_)|(?<=\.expert_))(0|[1-9][0-9]{0,5})(?![^.])")
_MAX_NUMBERS = 8
_MOST_NAMES = 4096
"""Names whose readings are kept: each is looked up in many families, and many times in one."""

EMBEDDING, OUTPUT_HEAD = "token_embd.weight", "output.weight"
"""GGUF names of the tensors that every kind of language model has."""


@light_dataclass(frozen=True, slots=True)
class Match:
    """A name found in the table: its row, which of the row's names on that side, layer and expert."""

    row: TensorRow
    position: int
    layer: int | None
    expert: int | None


_Entries = list[tuple[TensorRow, int]]
_Reading = tuple[str, int | None, int | None]


@cache
def _index(arch: Architecture, side: str) -> dict[str, _Entries]:
    index: dict[str, _Entries] = {}
    for row in arch.tensors:
        for position, name in enumerate(getattr(row, side)):
            index.setdefault(name, []).append((row, position))
    return index


@cache
def _names_numbers(arch: Architecture, side: str) -> bool:
    """Whether the family's own names contain numbers that are not layers or experts ("mlp.0.weight")."""
    return any(_NUMBER.search(name) for name in _index(arch, side))


@lru_cache(_MOST_NAMES)
def _only_reading(name: str) -> _Reading | None:
    """The reading of `name` in which all numbers are layers or experts, as in _all_readings; None if unknown."""
    if "{" in name:
        return None
    parts = _NUMBER.split(name, 3)
    if len(parts) == 5:
        head, layer, middle, expert, tail = parts
        return f"{head}{{n}}{middle}{{e}}{tail}", int(layer), int(expert)
    if len(parts) == 3:
        head, layer, tail = parts
        return f"{head}{{n}}{tail}", int(layer), None
    return (name, None, None) if len(parts) == 1 else None


@lru_cache(_MOST_NAMES)
def _all_readings(name: str) -> tuple[_Reading, ...]:
    """(`name` with layer and expert index as `{n}` and `{e}`, layer, expert), for every possible reading."""
    return tuple(_templates(name))


def _templates(name: str) -> Iterator[_Reading]:
    if "{" in name:
        return
    yield name, None, None
    # A crafted name may be thousands of numbers; the pairs of that many are not tried.
    numbers = list(islice(_NUMBER.finditer(name), _MAX_NUMBERS))
    for i, first in enumerate(numbers):
        head, tail = name[: first.start()], name[first.end() :]
        yield f"{head}{{e}}{tail}", None, int(first[1])
        yield f"{head}{{n}}{tail}", int(first[1]), None
        for second in numbers[i + 1 :]:
            middle, end = name[first.end() : second.start()], name[second.end() :]
            yield f"{head}{{n}}{middle}{{e}}{end}", int(first[1]), int(second[1])


def _reading(arch: Architecture, name: str, side: str = "hf") -> _Reading | None:
    """The reading of `name` whose template is in the table on that side; None without one."""
    index = _index(arch, side)
    if not _names_numbers(arch, side):  # a model may have a hundred thousand names
        only = _only_reading(name)
        return only if only is not None and only[0] in index else None
    return next((reading for reading in _all_readings(name) if reading[0] in index), None)


def matches(arch: Architecture, name: str, side: str = "hf") -> list[Match]:
    """The rows with `name` on `side` ("hf" or "gguf"), the preferred one first."""
    found = _reading(arch, name, side)
    if found is None:
        return []
    template, layer, expert = found
    return [Match(row, position, layer, expert) for row, position in _index(arch, side)[template]]


def is_known(arch: Architecture, name: str, side: str = "hf") -> bool:
    """Whether `matches` finds any."""
    return _reading(arch, name, side) is not None


def in_stacks(found: list[Match], h: Hyperparams) -> list[Match]:
    """Rows found by a GGUF name, with the layer index in its own stack: a GGUF may number stacks consecutively.

    A tensor that is outside the layers only in a GGUF gets the first layer that has it.
    """
    found = [
        replace(match, layer=_first_layer(match.row, h)) if match.layer is None and "{n}" in match.row.hf[0] else match
        for match in found
    ]
    if not any(match.row.first for match in found):
        return found
    sizes = sizes_of(h)
    counted = []
    for match in found:
        first, depth = evaluate(match.row.first or "0", sizes), evaluate(match.row.depth, sizes)
        if match.layer is None or first is None or depth is None or 0 <= match.layer - first < depth:
            layer = match.layer if match.layer is None or first is None else match.layer - first
            counted.append(replace(match, layer=layer))
    return counted or found


def _first_layer(row: TensorRow, h: Hyperparams) -> int | None:
    layers = range(evaluate(row.depth, sizes_of(h)) or 0)
    return next((layer for layer in layers if has_layer(row.layers, h, layer)), None)


_MOST_EXPERTS = 1 << 14


def gguf_names(row: TensorRow, layer: int | None, h: Hyperparams) -> tuple[str, ...]:
    """The GGUF names of the row's tensors in a layer; a name with `{e}` means one for each expert (of mlx_lm)."""
    first = evaluate(row.first, sizes_of(h)) or 0 if row.first else 0
    in_stack = None if layer is None else layer + first
    if not any("{e}" in name for name in row.gguf):
        return tuple(spell(name, in_stack) for name in row.gguf)
    count = min(evaluate(row.count, sizes_of(h)) or 0, _MOST_EXPERTS)
    return tuple(spell(name, in_stack, expert) for name in row.gguf for expert in range(count))


def spell(template: str, layer: int | None, expert: int | None = None) -> str:
    """The name that `template` yields for a layer and an expert."""
    name = template if layer is None else template.replace("{n}", str(layer))
    return name if expert is None else name.replace("{e}", str(expert))


def canonical_name(arch: Architecture, name: str) -> str | None:
    """The table's spelling of the Hugging Face tensor `name`; None if the family has no such tensor."""
    if is_known(arch, name):
        return name
    return next((spelled for spelled in possible_spellings(arch, name) if is_known(arch, spelled)), None)


_TORCH_WRAPPERS = re.compile(
    r"^(?:module\.)+|(?<![^.])(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|_forward_module)\."
    r"(?:module\.)*"
)
"""DataParallel and DDP, torch.compile, FSDP, activation checkpointing, Lightning."""


def possible_spellings(arch: Architecture, name: str) -> Iterator[str]:
    """`name`, then its possible spellings in the table: bare models and wrappers use other prefixes, and names saved
    with PyTorch's own wrappers contain theirs.
    """
    yield name
    if (plain := _TORCH_WRAPPERS.sub("", name)) != name:
        name = plain
        yield name
    insides = [name[len(beginning) :] for beginning in BEGINNINGS if name.startswith(beginning)]
    yield from insides
    for inside in (name, *insides):
        for beginning, instead in (*arch.prefixes, ("", "model.")):
            if inside.startswith(beginning) and not (beginning == "" and inside.startswith(instead)):
                yield instead + inside[len(beginning) :]


def draft_name(arch: Architecture, h: Hyperparams, name: str) -> str | None:
    """The table's spelling of `name` if it is a tensor of an MTP layer, whatever checkpoints call these layers.

    None for everything else, and for tensors that the row does not name.
    """
    spelled = canonical_name(arch, name)
    if spelled is None and h.num_layers is not None and arch.drafts:
        as_layers = _drafts_as_layers(arch, h.num_layers, name)
        spelled = next((found for way in as_layers if (found := canonical_name(arch, way)) is not None), None)
    drafts = [m for m in matches(arch, spelled) if m.layer is not None] if spelled is not None else []
    return spelled if drafts and h.num_layers is not None and (drafts[0].layer or 0) >= h.num_layers else None


def draft_spelling(arch: Architecture, h: Hyperparams, name: str) -> str:
    """The checkpoint name of the tensor that the table calls `name`; the same except for MTP layers."""
    for beginning, instead in arch.drafts:
        found = re.match(_number_pattern(instead, "n"), name)
        number = int(found["n"]) - (h.num_layers or 0) if found is not None else -1
        if found is not None and number >= 0 and (number == 0 or "{m}" in beginning):
            return beginning.replace("{m}", str(number)) + name[found.end() :]
    return name


def _drafts_as_layers(arch: Architecture, n_layers: int, name: str) -> Iterator[str]:
    """The name of `name`, of an MTP layer, as a further layer; MTP layers are inside or next to the model."""
    for spelled in possible_spellings(arch, name):
        for candidate in dict.fromkeys((spelled, spelled.removeprefix("model."))):
            for beginning, instead in _draft_patterns(arch):
                if (found := beginning.match(candidate)) is not None:
                    layer = n_layers + int(found.groupdict().get("m", 0))
                    yield spell(instead, layer) + candidate[found.end() :]
                    break


@cache
def _draft_patterns(arch: Architecture) -> tuple[tuple[re.Pattern[str], str], ...]:
    return tuple((re.compile(_number_pattern(beginning, "m")), instead) for beginning, instead in arch.drafts)


def _number_pattern(beginning: str, letter: str) -> str:
    return re.escape(beginning).replace(rf"\{{{letter}\}}", rf"(?P<{letter}>0|[1-9][0-9]{{0,5}})")


def ignorable(arch: Architecture, name: str) -> bool:
    """Whether the Hugging Face tensor `name` is a buffer that converters ignore."""
    return name.endswith(arch.ignored)


def is_gguf_only(arch: Architecture, name: str) -> bool:
    """Whether the GGUF tensor `name` is derived from the rest of the network, so that a checkpoint lacks it."""
    if name in ROPE_FACTORS or name in arch.copies:
        return True
    made = arch.made if isinstance(arch, Tower) else arch.flat_norms
    return any(template in made for template, *_ in _all_readings(name)) and not matches(arch, name, "gguf")


def is_hf_only(arch: Architecture, name: str, h: Hyperparams | None = None) -> bool:
    """Whether a GGUF of the family cannot store the Hugging Face tensor `name` (a pooler, a training head).

    `h` identifies the layers if it can be stored in some layers only.
    """
    alone, in_layers = _hf_only(arch), _hf_only_in_layers(arch)
    if not (alone or in_layers) or (found := _reading(arch, name)) is None:
        return False
    template, layer, _ = found
    if h is None or layer is None or template not in in_layers:
        return template in alone
    return not any(row.gguf and has_layer(row.layers, h, layer) for row, _ in _index(arch, "hf")[template])


@cache
def _hf_only(arch: Architecture) -> frozenset[str]:
    """The templates without a GGUF counterpart in any row."""
    index = _index(arch, "hf").items()
    return frozenset(name for name, entries in index if not any(row.gguf for row, _ in entries))


@cache
def _hf_only_in_layers(arch: Architecture) -> frozenset[str]:
    """The templates with a GGUF counterpart in one row, and none in another for other layers."""
    index = _index(arch, "hf").items()
    return frozenset(name for name, entries in index if len({bool(row.gguf) for row, _ in entries}) == 2)


def template_of(arch: Architecture, name: str) -> str:
    """The Hugging Face name of the row for `name`, with `{n}` for the layer; `name` itself if unknown."""
    return next((match.row.hf[match.position] for match in matches(arch, name)), name)


@cache
def special(arch: Architecture, gguf_name: str) -> str | None:
    """The Hugging Face name of a tensor outside the layers, "token_embd.weight" or "output.weight"."""
    found = matches(arch, gguf_name, "gguf")
    return found[0].row.hf[0] if found else None


@cache
def spellings(gguf_name: str) -> tuple[str, ...]:
    """Every Hugging Face name of EMBEDDING or OUTPUT_HEAD in any family."""
    field = attrgetter({EMBEDDING: "embedding", OUTPUT_HEAD: "head"}[gguf_name])
    found = dict.fromkeys(filter(None, map(field, LISTED.values())))
    bare = (name.partition("model.")[2] for name in found if name.startswith("model."))
    return tuple(dict.fromkeys((*found, gguf_name, *bare)))


def embedding(arch: Architecture | None) -> str:
    """The Hugging Face name of the token embedding, the usual one without a row."""
    return (arch and special(arch, EMBEDDING)) or "model.embed_tokens.weight"


def head(arch: Architecture | None) -> str:
    """The Hugging Face name of the output head, the usual one without a row."""
    return (arch and special(arch, OUTPUT_HEAD)) or "lm_head.weight"


def gguf_name(arch: Architecture, name: str, h: Hyperparams) -> str | None:
    """The GGUF name of the (first) tensor that contains the Hugging Face tensor `name`; None without one."""
    found = _reading(arch, name)
    row = _index(arch, "hf")[found[0]][0][0] if found is not None else None
    return gguf_names(row, found[1], h)[0] if found is not None and row is not None and row.gguf else None


def nearest(arch: Architecture, name: str, side: str = "hf") -> str:
    """The family's most similar name on that side ("hf" or "gguf")."""
    readings = list(_templates(name)) or [(name, None, None)]
    template, layer, expert = readings[-1]
    from difflib import get_close_matches

    known = list(_index(arch, side))
    best = get_close_matches(template, known, n=1, cutoff=0.0)
    return spell(best[0] if best else known[0], layer or 0, expert or 0)


def check_tensors(arch: Architecture, hparams: Hyperparams, names: Collection[str]) -> None:
    """Compares the Hugging Face `names` with those that the network needs.

    Raises UnmappedError for an unknown name (with the most similar known one), RefusedError for missing tensors and for
    layers and experts beyond their number. A tied head, biases without their config flag and buffers are optional. A
    tensor may have its GGUF name (see aprfmt.canonical).
    """
    depths = _depths(arch, hparams, names)
    # Thousands of names share a layer and a row: results for these are cached.
    sizes = cache(lambda layer: sizes_of(hparams, layer))
    count_of = cache(lambda count, layer: evaluate(count, sizes(layer)))
    lies_in = cache(lambda layers, layer: has_layer(layers, hparams, layer))
    for name in names:
        _check_name(arch, name, depths, count_of, lies_in, hparams)

    def layers_of(row: TensorRow) -> Sequence[int | None]:
        # A crafted layer count must cost no more than the tensors that are present.
        return range(min(depths[row.depth], len(names) + 1)) if "{n}" in row.hf[0] else (None,)

    n_missing, missing = _missing(arch, hparams, set(names), layers_of)
    if n_missing:
        raise RefusedError(
            f"{n_missing} tensors of the {arch.id} network are missing: {first_few(missing, total=n_missing)}",
            tensor=missing[0],
            hint="a sharded model needs all its shards; check num_layers and --arch",
        )


def check_drafts(arch: Architecture, hparams: Hyperparams, shapes: Mapping[str, Shape]) -> None:
    """Compares the tensors of MTP layers, by the table's names, with those that the network needs.

    Raises RefusedError for a missing tensor and for a shape that contradicts the hyper-parameters.
    """
    layers = {match.layer for name in shapes for match in matches(arch, name)[:1] if match.layer is not None}
    n_missing, missing = _missing(arch, hparams, set(shapes), lambda row: sorted(layers) if "{n}" in row.hf[0] else ())
    if n_missing:
        raise RefusedError(
            f"{n_missing} tensors of the MTP layers are missing: {first_few(missing, total=n_missing)}",
            tensor=missing[0],
            hint="--no-mtp drops these layers; a sharded model needs all its shards",
        )
    check_shapes(arch, hparams, shapes)


def _missing(
    arch: Architecture, h: Hyperparams, present: set[str], layers_of: Callable[[TensorRow], Sequence[int | None]]
) -> tuple[int, list[str]]:
    """The number of missing tensors, and the first of them.

    `layers_of` returns the layers of a row, None for tensors outside the layers.
    """
    missing: list[str] = []
    n_missing = 0
    for group in _alternatives(arch):
        if not any(is_needed(arch, row.need, h) for row in group):
            continue
        for layer in layers_of(group[0]):
            absent = _absent(group, h, present, layer)
            n_missing += len(absent)
            missing += absent[: max(0, 3 - len(missing))]
    return n_missing, missing


def _depths(arch: Architecture, h: Hyperparams, names: Collection[str]) -> dict[str, int]:
    """The depth of each layer stack, by its word; from the names if the hyper-parameters lack it."""
    sizes = sizes_of(h)
    known = {depth: evaluate(depth, sizes) for depth in dict.fromkeys(row.depth for row in arch.tensors)}
    found = dict.fromkeys(known, 0)
    for name in names if None in known.values() else ():
        for match in matches(arch, name)[:1]:
            found[match.row.depth] = max(found[match.row.depth], 0 if match.layer is None else match.layer + 1)
    return {depth: found[depth] if number is None else number for depth, number in known.items()}


def _check_name(
    arch: Architecture,
    name: str,
    depths: Mapping[str, int],
    count_of: Callable[[str, int | None], int | None],
    lies_in: Callable[[str, int], bool],
    h: Hyperparams,
) -> None:
    """`count_of` is a size in a layer, `lies_in` tells whether a row applies to a layer."""
    if is_gguf_only(arch, name) or ignorable(arch, name):
        return
    side = "hf"
    if (found := _reading(arch, name)) is None:
        side, found = "gguf", _reading(arch, name, "gguf")
    if found is None:
        raise UnmappedError(
            f"unknown tensor for architecture {arch.id!r}; the closest name is {nearest(arch, name)!r}",
            tensor=name,
            hint="check --arch, or keep the name with --allow-unmapped",
        )
    template, layer, expert = found
    rows = _index(arch, side)[template]
    if side == "gguf" and any(row.first for row, _ in rows):
        counted = in_stacks(matches(arch, name, side), h)
        rows, layer = [(match.row, match.position) for match in counted], counted[0].layer
    first, depth = rows[0][0], rows[0][0].depth
    if layer is not None and layer >= depths[depth]:
        what = "layers" if depth == "layers" else f"such layers ({depth})"
        raise RefusedError(f"it belongs to layer {layer}, but the network has {depths[depth]} {what}", tensor=name)
    if layer is not None and not any(lies_in(row.layers, layer) for row, _ in rows):
        raise RefusedError(
            f"unexpected tensor in layer {layer}: in this config only {first.layers} layers have one",
            tensor=name,
            hint="the config or metadata belongs to another model",
        )
    count = count_of(first.count, layer) if expert is not None else None
    if expert is not None and count is not None and expert >= count:
        what = first.count.replace("_", " ")
        raise RefusedError(f"expert {expert} does not exist: the network has {count} {what}", tensor=name)


@cache
def _alternatives(arch: Architecture) -> list[list[TensorRow]]:
    """The rows in groups of which a network needs one: those that yield the same GGUF tensor."""
    groups: list[list[TensorRow]] = []
    for row in arch.tensors:
        same = [
            g for g in groups if set(row.gguf) & set(g[0].gguf) and (row.layers, row.first) == (g[0].layers, g[0].first)
        ]
        for group in same:
            group.append(row)
        if not same:
            groups.append([row])
    return groups


def _absent(group: list[TensorRow], h: Hyperparams, present: set[str], layer: int | None) -> list[str]:
    """What the layer lacks of the most complete alternative; [] if one is complete."""
    best: list[str] | None = None
    for row in group:
        if layer is not None and not has_layer(row.layers, h, layer):
            return []
        if any(name in present for name in gguf_names(row, layer, h)):
            return []
        wanted = [name for template in row.hf for name in expand(row, template, h, layer, len(present) + 1)]
        absent = [name for name in wanted if name not in present]
        if not absent:
            return []
        if best is None or len(absent) / len(wanted) < len(best) / max(1, len(wanted)):
            best = absent
    return best or []


def expand(row: TensorRow, template: str, h: Hyperparams, layer: int | None, limit: int = 1 << 20) -> list[str]:
    """The names that `template` of `row` yields for a layer: one, or one per expert (at most `limit`)."""
    name = spell(template, layer)
    if "{e}" not in name:
        return [name]
    return [name.replace("{e}", str(e)) for e in range(min(evaluate(row.count, sizes_of(h, layer)) or 0, limit))]


def check_shapes(arch: Architecture, hparams: Hyperparams, shapes: Mapping[str, Shape]) -> None:
    """Compares shapes (row-major, by Hugging Face name) with the hyper-parameters, as far as these are known.

    Raises RefusedError naming tensor, shape and rule.
    """
    sizes = cache(lambda layer: sizes_of(hparams, layer))
    right = set[tuple[str, int | None, Shape]]()  # the experts of a layer are all alike
    for name, shape in shapes.items():
        reading = _reading(arch, name)
        if reading is None or (alike := (*reading[:2], shape)) in right:
            continue
        layer, found = reading[1], matches(arch, name)  # a name may be in several rows for several layer types
        if layer is not None and len(found) > 1:
            found = [one for one in found if has_layer(one.row.layers, hparams, layer)] or found
        if 0 in shape:
            raise RefusedError(f"it is empty: its shape is {list(shape)}", tensor=name, hint=_DAMAGED)
        dims = [_dims_of(match) for match in found]
        known = [shape_of(one, sizes(layer)) for one in dims]
        if not any(_fits(shape, one) for one in known):
            want = ", ".join(
                dim if size is None or dim.isdigit() else f"{dim} {size}"
                for dim, size in zip(dims_of(dims[0]), known[0], strict=True)
            )
            raise RefusedError(
                f"its shape is {list(shape)}, but the hyper-parameters require [{want}]", tensor=name, hint=_DAMAGED
            )
        right.add(alike)


_DAMAGED = "the config or metadata belongs to another model, or the tensor is damaged"


_ONE_VALUE = re.compile(r"(\w+)=([\w-]+)")


def config_keys_from_shapes(arch: Architecture, h: Hyperparams, shapes: Mapping[str, Shape]) -> dict[str, str]:
    """Config keys without a GGUF key whose values follow from the shapes of its tensors (row-major, by name).

    A row needs one value of them ("gating=per-element") for a tensor that has another shape otherwise.
    """
    stated: dict[str, str] = {}
    for row in arch.tensors:
        match, name = _ONE_VALUE.fullmatch(row.need), spell(row.gguf[0], 0) if row.gguf else ""
        if match is not None and name in shapes and shape_of(row.dims[0], sizes_of(h, 0)) == shapes[name]:
            stated[match[1]] = match[2]
    return stated


def sizes_of_tensors(arch: Architecture, shapes: Mapping[str, Shape]) -> dict[str, int]:
    """The sizes that tensor shapes determine by the table: each word that is a whole dimension or a depth.

    check_shapes finds damaged shapes: of two contradictory ones the first is used.
    """
    sizes: dict[str, int] = {}
    for name, shape in shapes.items():
        for match in matches(arch, name)[:1]:
            if match.layer is not None:
                sizes[match.row.depth] = max(sizes.get(match.row.depth, 0), match.layer + 1)
            words = dims_of(_dims_of(match))
            if len(words) == len(shape):
                for word, size in zip(words, shape, strict=True):
                    if word.isidentifier():
                        sizes.setdefault(word, size)
    return sizes


@cache
def dimension_words(arch: Architecture) -> frozenset[str]:
    """Every word in the dimensions of the family's Hugging Face tensors."""
    sizes = (size for row in arch.tensors for dims in row.dims for size in dims_of(dims))
    return frozenset(word for size in sizes for word in size_words(size))


def _dims_of(match: Match) -> str:
    """The table's dims of the tensor: one text for all names of a row, or one each."""
    return (match.row.dims * len(match.row.hf))[match.position]


def fits(match: Match, shape: Shape, sizes: Mapping[str, int]) -> bool:
    """Whether the table gives the tensor that shape, as far as the sizes are known."""
    return _fits(shape, shape_of(_dims_of(match), sizes))


def _fits(shape: Shape, known: tuple[int | None, ...]) -> bool:
    return len(shape) == len(known) and all(map(lambda have, want: want in (None, have), shape, known))


def order(arch: Architecture, name: str) -> tuple[int, int, int, int, int, str]:
    """Sort key in the order of the network: embedding, layers, final norm, head, the rest.

    Several layer stacks are kept whole.
    """
    found = _reading(arch, name)
    if found is None:
        return 3, 0, 0, 0, 0, name
    template, layer, expert = found
    part, stack, position = _places(arch)[template]
    return part, stack, layer or 0, position, expert or 0, name


@cache
def _places(arch: Architecture) -> dict[str, tuple[int, int, int]]:
    """Template -> (part of the network, layer stack, position in the table), as in `order`."""
    words = dict.fromkeys((row.depth, row.first) for row in arch.tensors if "{n}" in row.hf[0])
    stacks = {stack: number for number, stack in enumerate(words)}
    positions = {row: i for i, row in enumerate(arch.tensors)}
    first_layer = next((i for row, i in positions.items() if "{n}" in row.hf[0]), 0)
    places = {}
    for template, entries in _index(arch, "hf").items():
        position = positions[entries[0][0]]
        part = (0 if position < first_layer else 2) if "{n}" not in template else 1
        row = entries[0][0]
        places[template] = part, stacks[row.depth, row.first] if part == 1 else 0, position
    return places
