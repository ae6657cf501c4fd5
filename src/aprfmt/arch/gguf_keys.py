"""Keys without which llama.cpp refuses a GGUF: those of every file and of one family; and unknown tensors."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sized
from typing import TypeAlias

from aprfmt.arch.grammar import dims_of, holds_of_gguf, parse_condition, size_words
from aprfmt.arch.loaders import EPSILONS, Loader, loader_of
from aprfmt.arch.names import matches
from aprfmt.arch.row import REQUIRED, SELDOM, Architecture, TensorRow
from aprfmt.arch.scopes import full_key
from aprfmt.types import Shape

Problem: TypeAlias = tuple[str, str]
"""(key, what is wrong with it)."""

ALWAYS = ("context_length", "embedding_length", "block_count")
"""Required by every network, after the prefix."""

# Required if a family has them; of the constants of norms the first among the family's keys.
_USUAL = ("ssm.conv_kernel", "ssm.inner_size", "ssm.state_size", "ssm.time_step_rank", "ssm.group_count")

# Dimension of a tensor -> the field of its key. llama.cpp has defaults for the others.
_FIELD_OF = {
    "hidden": "hidden_size", "ffn": "intermediate_size", "heads": "num_heads", "q": "num_heads",
    "experts": "num_experts", "moe_ffn": "moe_intermediate_size",
}  # fmt: skip
_HAS_DEFAULT = frozenset(("vocab", "kv_heads", "kv", "head_dim", "positions", "layers", "moe_num_shared_experts"))

# Required if a tensor of one of these names is present, whatever its sizes.
_BY_TENSOR = {
    "attention.head_count": ("attn_q.weight", "attn_qkv.weight"),
    "feed_forward_length": (".ffn_up.weight", ".ffn_down.weight"),
}

_ATTENTION = re.compile(r"blk\.(\d{1,6})\.attn_q\.weight")

# One number for all layers, or one per layer.
_BY_LAYER = ("feed_forward_length", "attention.head_count", "attention.head_count_kv", "attention.indexer.types")
_WITHOUT_MTP = "attention.indexer.types"
"""The one of them that lists the layers without the MTP layers."""


_STATES = ("ple.conv_kernel", "shortconv.l_cache")
"""Convolution lengths with a cache of earlier positions; llama.cpp cannot allocate an empty one."""


def key_problems(row: Architecture, kv: Mapping[str, object], shapes: Mapping[str, Shape]) -> Iterator[Problem]:
    """(key, what is wrong with it) for each key of a GGUF of the family that llama.cpp requires.

    `shapes` are those of its tensors, row-major.
    """
    loader = loader_of(row.gguf)
    wanted = _wanted(row, kv, shapes)
    if loader is not None:
        wanted |= dict.fromkeys(full_key(row, key) for key in sorted(loader.required))
        for name in loader.unknown(shapes):
            yield name, f"is not a tensor of its {row.gguf!r}{_switch_of(row, name)}"
        yield from _wrong_layers(row, loader, kv, shapes)
    else:
        yield "general.architecture", f"is {row.gguf!r}, an architecture that llama.cpp does not know"
    for key in wanted:
        if key not in kv:
            yield key, "is missing"
    layers, mtp = kv.get(full_key(row, "block_count")), kv.get(full_key(row, "nextn_predict_layers"))
    for suffix in _BY_LAYER:
        key, n = full_key(row, suffix), layers
        if suffix == _WITHOUT_MTP and isinstance(layers, int) and isinstance(mtp, int):
            n = layers - mtp
        value = kv.get(key)
        if isinstance(value, Sized) and not isinstance(value, str | bytes) and len(value) != n:
            yield key, f"has {len(value)} values for {n} layers"
    for key in (full_key(row, suffix) for suffix in _STATES):
        if kv.get(key) == 1:
            yield key, f"is 1: its {row.gguf!r} needs a convolution over at least 2 positions"
    yield from _wrong_defaults(row, kv, shapes)
    yield from _wrong_depths(row, kv, shapes)
    kinds = full_key(row, "attention.recurrent_layers")
    if (
        any(key.gguf == "attention.recurrent_layers" for key in row.keys)
        and kinds not in kv
        and not _is_every_fourth(shapes)
    ):
        yield kinds, "is missing, and the attention layers are not every fourth layer"


def _wrong_layers(
    row: Architecture, loader: Loader, kv: Mapping[str, object], shapes: Mapping[str, Shape]
) -> Iterator[Problem]:
    """llama.cpp's assertions about layers: square tensors, layers of every kind, groups to choose from."""
    hidden = kv.get(full_key(row, "embedding_length"))
    if isinstance(hidden, int):
        for name in [*loader.misshapen(shapes, hidden)][:1]:
            size = "x".join(map(str, shapes[name]))
            yield name, f"is {size}: its {row.gguf!r} needs heads times head_dim to equal the hidden size, {hidden}"
    layers, drafts = (kv.get(full_key(row, key)) for key in ("block_count", "nextn_predict_layers"))
    if layers == 0:
        yield full_key(row, "block_count"), "is 0, and its loader needs at least one layer"
    own = layers - (drafts if isinstance(drafts, int) else 0) if isinstance(layers, int) else None
    kinds = _kinds_of(loader, shapes, own)
    if loader.memory == "hybrid" and kinds is not None and len(kinds) < 2:
        missing = "attention" if "attention" not in kinds else "recurrent"
        yield "layer_types", f"has no {missing} layer, but its {row.gguf!r} needs at least one"
    yield from _check_sliding_window_pattern(row, loader, kv)
    yield from _check_rotary_dimensions(row, loader, kv)
    yield from _check_expert_groups(row, kv, shapes)


def _check_sliding_window_pattern(row: Architecture, loader: Loader, kv: Mapping[str, object]) -> Iterator[Problem]:
    """A pattern that lacks a layer type which llama.cpp requires: sliding-window or full-attention."""
    key = full_key(row, "attention.sliding_window_pattern")
    pattern, layers = kv.get(key, loader.period), kv.get(full_key(row, "block_count"))
    if loader.memory != "windowed" or (full_key(row, _WINDOW) not in kv and row.gguf not in _OWN_WINDOW):
        return
    if isinstance(pattern, int) and not isinstance(pattern, bool) and pattern > 0 and isinstance(layers, int):
        full = 0 if loader.full_first else pattern - 1
        pattern = [i % pattern != full for i in range(min(layers, pattern))]
    if not isinstance(pattern, list) or not pattern:
        return
    if not any(pattern):
        yield key, f"has no sliding-window layer, but its {row.gguf!r} needs at least one"
    elif all(pattern) and row.gguf in _FULL_INPUTS:
        yield key, f"has no full-attention layer, but its {row.gguf!r} needs at least one"


def _check_rotary_dimensions(row: Architecture, loader: Loader, kv: Mapping[str, object]) -> Iterator[Problem]:
    """Rotated dimensions of a head that llama.cpp cannot divide into pairs or sections."""
    for suffix in ("rope.dimension_count", "rope.dimension_count_swa"):
        count = kv.get(full_key(row, suffix))
        if isinstance(count, int) and count % 2:
            yield full_key(row, suffix), f"is {count}, an odd number"
    whole, swa = (kv.get(full_key(row, f"rope.dimension_count{end}")) for end in ("", "_swa"))
    pattern = kv.get(full_key(row, "attention.sliding_window_pattern"))
    slides_first = isinstance(pattern, list) and pattern[:1] == [True] and not all(pattern)
    if loader.first_rotation and slides_first and whole is not None and swa not in (None, whole):
        yield (
            full_key(row, "rope.dimension_count"),
            f"is {whole}, but its {row.gguf!r} rotates {swa} values in every layer: the first has a sliding window",
        )
    key = next((key for key in (full_key(row, k) for k in ("rope.dimension_count", _HEAD)) if key in kv), _HEAD)
    half = kv.get(key)
    if row.gguf in _HALF_ROTATED and isinstance(half, int) and half % 4:
        yield key, f"is {half}: its {row.gguf!r} applies RoPE to half of it, and needs an even number"
    hidden, heads, turned = (
        value if isinstance(value := kv.get(full_key(row, name)), int) else 0
        for name in ("embedding_length", "attention.head_count", "rope.dimension_count")
    )
    head = kv.get(full_key(row, _HEAD), hidden // heads if heads else None)
    if turned and isinstance(head, int) and (turned > head or (turned < head and _WHOLE in loader.asserts)):
        yield (
            full_key(row, "rope.dimension_count"),
            f"is {turned}: its {row.gguf!r} cannot rotate {turned} of {head} values per head",
        )
    indexed = kv.get(full_key(row, _INDEX_HEAD))
    if isinstance(indexed, int) and turned > indexed:
        yield full_key(row, _INDEX_HEAD), f"is {indexed}: its {row.gguf!r} rotates {turned} values of an index head"
    sections, size = (kv.get(full_key(row, key)) for key in ("rope.dimension_sections", _HEAD))
    pairs = sum(n for n in sections if isinstance(n, int)) if isinstance(sections, list) else 0
    if isinstance(size, int) and pairs > size:
        yield full_key(row, "rope.dimension_sections"), f"add up to {pairs} pairs, but a head has {size} values"


def _check_expert_groups(row: Architecture, kv: Mapping[str, object], shapes: Mapping[str, Shape]) -> Iterator[Problem]:
    key = full_key(row, "expert_group_count")
    names = (key, full_key(row, "expert_group_used_count"), full_key(row, "expert_count"))
    groups, used, experts = (value if isinstance(value, int) else 0 for value in map(kv.get, names))
    if groups > 1 and used and experts and (not 0 < used < groups < experts or experts % groups):
        yield key, f"is {groups}: its loader cannot select {used} of {groups} groups of {experts} experts"
    chosen = full_key(row, "expert_used_count")
    counts = kv.get(chosen)
    most = experts // groups * used if groups > 1 and used else experts
    for i, count in enumerate(counts if isinstance(counts, list) else [counts]):
        least = int(not isinstance(counts, list) or f"blk.{i}.ffn_gate_inp.weight" in shapes)
        if experts and isinstance(count, int) and not least <= count <= most:
            yield chosen, f"is {count}: its loader cannot select {count} of {most} experts"
            break
        if not experts and isinstance(count, int) and count > 0:
            yield chosen, f"is {count}: its loader cannot select experts of a network without any"
            break


_HEAD = "attention.key_length"
_INDEX_HEAD = "attention.indexer.key_length"
_WHOLE = "n_embd_head == n_rot"
_HALF_ROTATED = ("step35",)
"""Loaders that rotate half of rope.dimension_count in full-attention layers."""

_WINDOW = "attention.sliding_window"
_OWN_WINDOW = ("llama4",)
"""Loaders that set a window if a file states none."""
_FULL_INPUTS = ("modern-bert", "gemma-embedding", "llama4")
"""Windowed networks: llama.cpp fills inputs that only full-attention layers use, masks or scales of Q."""

_RECURRENT = (".ssm_", ".shortconv.", ".time_mix_")
_ATTENDS = (".attn_k.weight", ".attn_kv_a_mqa.weight", ".attn_qkv.weight")


def _kinds_of(loader: Loader, shapes: Mapping[str, Shape], own: int | None) -> set[str] | None:
    """The kinds of the network's `own` layers in its tensors, "attention" and "recurrent"; None for a family with one
    kind, or a file with MTP layers only.
    """
    weights = [name for name in loader.known if name.endswith(".weight")]  # every loader knows the scales of ssm_in
    if not any(part in name for name in weights for part in _RECURRENT):
        return None
    layers: dict[str, set[str]] = {}
    for name in shapes:
        layer, dot, _ = name.removeprefix("blk.").partition(".")
        if dot and name.startswith("blk.") and layer.isdecimal() and (own is None or int(layer) < own):
            kinds = layers.setdefault(layer, set())
            kinds |= {"recurrent"} if any(part in name for part in _RECURRENT) else set()
            kinds |= {"attention"} if name.endswith(_ATTENDS) else set()
    both = "blk.ssm_in.weight" in loader.needed
    found = set[str]()
    for kinds in layers.values():
        found |= {"recurrent"} if "recurrent" in kinds and not both else kinds
    return found if found or (layers and "blk.0.attn_norm.weight" in shapes) else None


def _switch_of(row: Architecture, name: str) -> str:
    """The config.json key that requests a tensor, if any."""
    needs = (match.row.need for match in matches(row, name, "gguf")[:1])
    words = (word for need in needs for facts in parse_condition(need) for word, _, _ in facts)
    keys = {name for key in row.keys for name in key.hf}
    return "".join(f" (config.json: {word} is true)" for word in [*words][:1] if word in keys)


def _wanted(row: Architecture, kv: Mapping[str, object], shapes: Mapping[str, Shape]) -> dict[str, None]:
    """The required keys, in the order of messages."""
    own = {key.gguf for key in row.keys}
    recurrent = any(".ssm_" in name for name in shapes)
    epsilons = [key.gguf for key in row.keys if key.gguf in EPSILONS]
    usual = [*(key for key in _USUAL if key in own and recurrent), *epsilons[:1]]
    needed = {key.gguf: key.needed for key in row.keys if key.needed}
    family = [key for key, when in needed.items() if when == REQUIRED or holds_of_gguf(when, row, kv, shapes)]
    wanted = dict.fromkeys(full_key(row, key) for key in (*ALWAYS, *usual, *family))
    for name in shapes:
        for match in matches(row, name, "gguf")[:1]:
            wanted |= dict.fromkeys(_keys_of(row, match.row))
    experts, used, dense = (
        full_key(row, key) for key in ("expert_count", "expert_used_count", "leading_dense_block_count")
    )
    for key, parts in _BY_TENSOR.items():
        if key in own and any(name.endswith(parts) for name in shapes):
            wanted[full_key(row, key)] = None
    if kv.get(experts):
        wanted[used] = None
    groups = kv.get(full_key(row, "expert_group_count"))
    if isinstance(groups, int) and groups > 1:
        wanted[full_key(row, "expert_group_used_count")] = None
    if kv.get(used):
        wanted[experts] = None
    if "leading_dense_block_count" in own and "blk.0.ffn_gate_inp.weight" not in shapes:
        wanted[dense] = None
    return wanted


def _is_every_fourth(shapes: Mapping[str, Shape]) -> bool:
    """Whether exactly every fourth layer has attention: llama.cpp's default."""
    found = (_ATTENTION.fullmatch(name) for name in shapes)
    return all((int(match[1]) + 1) % 4 == 0 for match in found if match)


def _wrong_defaults(row: Architecture, kv: Mapping[str, object], shapes: Mapping[str, Shape]) -> Iterator[Problem]:
    """Absent keys whose llama.cpp default contradicts the tensors of a layer."""

    def number(suffix: str) -> int | None:
        value = kv.get(full_key(row, suffix))
        return value if isinstance(value, int) and value > 0 else None

    hidden, heads = number("embedding_length"), number("attention.head_count")
    if hidden is None or heads is None or not isinstance(kv.get(full_key(row, "attention.head_count_kv"), 1), int):
        return  # numbers of heads per layer
    if full_key(row, "attention.key_length_swa") in kv:
        return  # head sizes by layer type
    query = next((part.dims[0] for part in row.tensors if "blk.{n}.attn_q.weight" in part.gguf), "")
    gated = dims_of(query)[:1] == ["2*q"]
    kv_heads = number("attention.head_count_kv") or heads
    key, value = (number(f"attention.{name}_length") or hidden // heads for name in ("key", "value"))
    sides = {
        "attn_q": (("attention.key_length",), heads * key * (2 if gated else 1)),
        "attn_k": (("attention.head_count_kv", "attention.key_length"), kv_heads * key),
        "attn_v": (("attention.head_count_kv", "attention.value_length"), kv_heads * value),
        "attn_qkv": (("attention.head_count_kv", "attention.key_length"), heads * key + kv_heads * (key + value)),
    }
    reported: set[str] = set()
    for name, shape in shapes.items():
        keys, rows = sides.get(name.removesuffix(".weight").rpartition(".")[2] if "blk." in name else "", ((), 0))
        absent = [suffix for suffix in keys if full_key(row, suffix) not in kv]
        if name.endswith(".weight") and absent and shape and shape[0] != rows and absent[0] not in reported:
            reported.add(absent[0])
            yield full_key(row, absent[0]), f"is missing: {name} has {shape[0]} rows, but llama.cpp expects {rows}"


def _wrong_depths(row: Architecture, kv: Mapping[str, object], shapes: Mapping[str, Shape]) -> Iterator[Problem]:
    """Layer stacks without a depth key that are not as deep as the first, which llama.cpp assumes."""
    depths: dict[str, int] = {}
    for name in shapes:
        for match in matches(row, name, "gguf")[:1]:
            if match.layer is not None and match.row.depth != "layers":
                depths[match.row.depth] = max(depths.get(match.row.depth, 0), match.layer + 1)
    for key in row.keys:
        depth = next((depths[word] for word in key.hf if word in depths), None)
        name, layers = full_key(row, key.gguf), kv.get(full_key(row, "block_count"))
        if depth is not None and name not in kv and depth != layers:
            yield name, f"is missing: the file has {depth} such layers, but llama.cpp assumes {layers}"


def _keys_of(row: Architecture, tensor: TensorRow) -> Iterator[str]:
    """The keys that the sizes of a tensor require."""
    words = {word for dims in (*tensor.dims, *tensor.gguf_dims) for size in dims_of(dims) for word in size_words(size)}
    if any("{e}" in name for name in tensor.hf):
        words |= size_words(tensor.count)
    for word in words - _HAS_DEFAULT:
        field = _FIELD_OF.get(word)
        keys = (key for key in row.keys if key.gguf and key.role != SELDOM)
        named = [key for key in keys if (key.field == field if field else word in key.hf)]
        if not named and word == "moe_ffn":
            named = [key for key in row.keys if key.gguf and key.field == "intermediate_size"]
        if any("_exps." in name for name in tensor.gguf):  # an expert has its own width
            named.sort(key=lambda key: key.gguf != "expert_feed_forward_length")
        if named:
            yield full_key(row, named[0].gguf)
