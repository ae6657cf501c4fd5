"""Depth pruning and layer surgery: layers removed, repeated, reordered, or taken from several models.

Each layer of the result is a layer of a source; its tensors, its config.json values and its GGUF index are renumbered.
The bytes of weights do not change. Anything that depends on a layer's index alone (a periodic pattern, a slope by
depth)
keeps its value or is refused: a layer never gets another role than the one it was trained for.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, is_dataclass, replace
from itertools import pairwise
from typing import TypeVar

from aprfmt.arch import hparams as hp
from aprfmt.arch.converter import language_part
from aprfmt.arch.extra_tensors import layer_of
from aprfmt.arch.fields import as_mapping
from aprfmt.arch.grammar import has_layer, layer_kinds, size_words
from aprfmt.arch.hyperparams import Hyperparams
from aprfmt.arch.layer_sizes import layer_sizes
from aprfmt.arch.links import Link
from aprfmt.arch.names import matches
from aprfmt.arch.projectors import DEEPSTACK, fed_layers
from aprfmt.arch.row import Architecture
from aprfmt.canonical.model import Canonical
from aprfmt.canonical.tensor import CanonicalTensor
from aprfmt.codecs.stream import TensorSource
from aprfmt.errors import RefusedError, UsageError
from aprfmt.limits import MAX_LAYERS
from aprfmt.types import PathLike

SourceLayer = tuple[int, int]
"""(index of the model, index of its layer), both from 0."""

T = TypeVar("T")

PER_LAYER = frozenset(
    (
        *("layer_types", "layers_block_type", "mlp_layer_types", "indexer_types", "no_rope_layers", "layer_rope_theta"),
        *("attn_type_list", "moe_layer_layout", "sliding_window_layout", "rope_layout", "hybrid_layer_pattern"),
        *("moe_layer_freq", "compress_ratios", "swiglu_limit", "swiglu_limits", "swiglu_limits_shared", "rope_theta"),
        *("expert_swiglu_limit_list", "share_expert_swiglu_limit_list", "partial_rotary_factors", "ffn_multipliers"),
        *("num_attention_heads_per_layer", "num_key_value_heads_per_layer", "num_kv_heads", "num_query_heads"),
        *("block_configs", "activation_sparsity_pattern", "indexer_compress_ratio", "hybrid_override_pattern"),
        *("sparse_attention_config.sparse_attention_freq", "sliding_window", "position_layers", "window_sizes"),
        "kv_source_layers",
    )
)
"""config.json keys whose value may be a list, or a string of letters, with one item per layer. Lists under the name of
a scalar of the network (`num_key_value_heads`) count too.
"""

NUMBERS = frozenset(
    (
        *("mlp_only_layers", "moe_layers", "attn_layer_indices", "full_attn_idxs", "full_attention_idx"),
        *("moe_layers_enum", "bskcn_1", "bskcn_2", "bskcn_3", "bskcn_4"),
    )
)
"""config.json keys that list layer indices from 0; strings are comma-separated."""

NUMBERS_FROM_1 = frozenset(("ple_layer_ids", "linear_attn_config.kda_layers", "linear_attn_config.full_attn_layers"))
"""config.json keys that list layer indices from 1."""

LEADING = frozenset(
    ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index", "num_hash_layers", "max_window_layers")
)
"""config.json keys that count leading layers."""

TRAILING = "num_kv_shared_layers"
"""config.json key that counts the trailing layers that share keys and values of an earlier one."""

LAST = "moe_layer_end_index"
"""config.json key with the index of the last MoE layer; negative: all to the end."""

BY_NUMBER: Mapping[str, Callable[[Hyperparams, int], object]] = {
    "rescale_every": lambda h, layer: layer // step if (step := _int(h, "rescale_every")) > 0 else 0,
    "attn_res_block_size": lambda h, layer: layer % step if (step := _int(h, "attn_res_block_size")) > 0 else 0,
    "scale_attn_by_inverse_layer_idx": lambda h, layer: layer if h.extra.get("scale_attn_by_inverse_layer_idx") else 0,
    "kv_source_layers": lambda h, layer: layer if h.extra.get("kv_source_layers") else 0,
    DEEPSTACK: lambda h, layer: fed_layers(h).get(layer),
    "deepstack_layers": lambda h, layer: min(layer, _int(h, "deepstack_layers")),
}
"""config.json key -> the role it gives to a layer index, unless a list or tensor does."""

_SLOPES = ("minimax_text_01", "bailing_moe_v3")
"""Rows whose linear attention has a decay that depends on the layer index and the number of layers."""


def _int(h: Hyperparams, key: str) -> int:
    value = h.extra.get(key)
    return value if type(value) is int else 0


@dataclass(frozen=True, slots=True)
class _Stack:
    """The requested layers and their source models."""

    models: Sequence[Canonical]
    layers: Sequence[SourceLayer]
    row: Architecture

    @property
    def path(self) -> PathLike:
        return self.models[0].model.path

    def h(self, model: int) -> Hyperparams:
        return self.models[model].hparams

    def n_layers(self, model: int) -> int:
        return self.h(model).num_layers or 0

    def refuse(self, key: str, why: str) -> RefusedError:
        return RefusedError(
            f"{key}: {why}", path=self.path, hint="choose layers that keep their position in the pattern"
        )


def select_layers(models: Sequence[Canonical], layers: Sequence[SourceLayer]) -> Canonical:
    """The first of `models` with `layers` instead of its own, each given as (model, layer).

    Tensors outside the layers, the tokenizer and everything else come from the first model. MTP layers after the last
    layer remain after the last layer. All models must have the same row and dequantization.

    Raises:
        UsageError: no layers, or one that its model does not have.
        RefusedError: a layer's role depends on its index and would change; names the config.json key. Also for networks
            with several layer stacks, with weights whose shape depends on the number of layers, and for models of
            different rows.
    """
    first = models[0]
    row = first.arch
    if row is None or not first.tensors:
        raise RefusedError(
            "the architecture is unknown, so layers cannot be dropped",
            path=first.model.path,
            hint="set it with --arch NAME; list the names with apr architectures",
        )
    stack = _Stack(models, layers, row)
    _check(stack)
    hparams = _hparams(stack)
    _check_roles(stack, hparams)
    tensors, extras = _tensors(stack)
    return replace(
        first, hparams=hparams, tensors=tensors, extras=extras, is_whole=False, sidecar=None,
        layers=tuple(layer if model == 0 else None for model, layer in layers),
    )  # fmt: skip


# --- what can be asked for ---


def _check(stack: _Stack) -> None:
    row, models = stack.row, stack.models
    other = next((c for c in models if c.arch is not row), None)
    if other is not None:
        found = other.arch.id if other.arch is not None else other.hparams.architecture
        raise RefusedError(f"layers of {row.id} and {found} cannot be combined", path=other.model.path)
    if not stack.layers:
        raise UsageError("a network needs at least one layer", path=stack.path)
    if len(stack.layers) > MAX_LAYERS:
        raise UsageError(f"{len(stack.layers)} layers exceed the limit of {MAX_LAYERS}")
    for model, layer in stack.layers:
        check_layer(models[model], layer)
    depths = {r.depth for r in row.tensors if any("{n}" in name for name in (*r.hf, *r.gguf))}
    if depths - {"layers"}:
        raise RefusedError(
            f"{row.id} has several stacks of layers ({', '.join(sorted(depths))})",
            path=stack.path,
            hint="layers can be changed only in networks with one stack",
        )
    for name, tensor in models[0].tensors.items():
        for match in matches(row, name)[:1]:
            if match.layer is None and any("layers" in size_words(size) for size in _sizes(match.row.dims)):
                raise RefusedError(
                    f"its shape {list(tensor.shape)} depends on the number of layers",
                    path=stack.path,
                    tensor=name,
                    hint="a network with such a table cannot be pruned or stacked by layers",
                )
    if row.id in _SLOPES and list(stack.layers) != [(0, layer) for layer in range(stack.n_layers(0))]:
        raise stack.refuse("num_hidden_layers", f"the decay of {row.id} depends on each layer's index and on this key")


def _sizes(dims: Sequence[str]) -> list[str]:
    return [size for shape in dims for size in shape.split(",") if size]


def check_layer(c: Canonical, layer: int) -> None:
    """Raises UsageError for a layer that the model does not have, RefusedError for an MTP layer."""
    n_layers = c.hparams.num_layers or 0
    if 0 <= layer < n_layers:
        return
    drafts = {n for name in c.extras if (n := _layer_of(c, name)) is not None}
    if layer in drafts:
        raise RefusedError(
            f"layer {layer} is an MTP layer, not one of the {n_layers} of the network",
            path=c.model.path,
            hint="drop all MTP layers with --no-mtp",
        )
    raise UsageError(f"unknown layer {layer}", path=c.model.path, hint=f"the model has layers 0 to {n_layers - 1}")


# --- the config ---


def _hparams(stack: _Stack) -> Hyperparams:
    """The first model's hyper-parameters, for the new layers."""
    old, n_layers = stack.h(0), stack.n_layers(0)
    h = deepcopy(old)
    h.num_layers = len(stack.layers)
    fields = {name: key.field for key in stack.row.keys if key.field for name in key.hf}
    for name, value in old.extra.items():
        if name in NUMBERS or name in NUMBERS_FROM_1:
            h.extra[name] = _numbers(stack, name, value, int(name in NUMBERS_FROM_1))
        elif name == "linear_attn_config":
            inner = {f"{name}.{key}": item for key, item in as_mapping(value).items()}
            made = {key: _numbers(stack, key, inner[key], 1) for key in inner if key in NUMBERS_FROM_1}
            h.extra[name] = {key.partition(".")[2]: made.get(key, item) for key, item in inner.items()}
        elif name in LEADING and type(value) is int:
            h.extra[name] = _leading(stack, name, value)
        elif isinstance(value, list | str) and (name in PER_LAYER or name in fields or "{n}" in name):
            if isinstance(value, str) and name != "hybrid_override_pattern":
                continue
            if _is_in_one_layer(stack, name):
                continue
            h.extra[name] = picked = _picked(stack, name, value)
            if name in fields and isinstance(picked, list):
                setattr(h, fields[name], picked[0] if picked and picked.count(picked[0]) == len(picked) else None)
    _set_trailing(stack, h)
    if _int(old, LAST) > 0 and len(stack.layers):
        h.extra[LAST] = _leading(stack, LAST, _int(old, LAST) + 1) - 1
    depth = old.extra.get("scale_depth")
    if isinstance(depth, int | float) and n_layers:
        # Each layer's output is multiplied by scale_depth / sqrt(layers), which must not change.
        h.extra["scale_depth"] = depth * math.sqrt(len(stack.layers) / n_layers)
    return h


def _is_in_one_layer(stack: _Stack, template: str) -> bool:
    """Whether a list belongs to a single layer's tensor instead of giving one number per layer."""
    return any(key.kind == "u64[]" for key in stack.row.keys if template in key.hf)


def _values(stack: _Stack, name: str) -> list[object]:
    """The value of this key in each model. Raises RefusedError if only some of them have it."""
    found = [stack.h(model).extra.get(name) for model in range(len(stack.models))]
    if any(type(value) is not type(found[0]) for value in found):
        raise RefusedError(f"{name} differs between the models or is missing from some", path=stack.path)
    return found


def _picked(stack: _Stack, name: str, value: list[T] | str) -> list[T] | str:
    """The list items of the new layers, followed by those of the MTP layers."""
    values = _values(stack, name)
    lists = [list(one) if isinstance(one, list | str) else [] for one in values]
    for model, items in enumerate(lists):
        if len(items) < stack.n_layers(model):
            raise RefusedError(
                f"{name} lists {len(items)} values for {stack.n_layers(model)} layers",
                path=stack.models[model].model.path,
                hint="correct config.json",
            )
    made = [lists[model][layer] for model, layer in stack.layers] + lists[0][stack.n_layers(0) :]
    return "".join(made) if isinstance(value, str) else made


def _numbers(stack: _Stack, name: str, value: object, start: int) -> object:
    """The indices of the new layers that the list contains."""
    if value is None:
        return None
    parent, _, inner = name.partition(".")
    own = [
        as_mapping(one).get(inner) if inner else one
        for one in (_values(stack, parent) if inner else _values(stack, name))
    ]
    listed = [{int(n) for n in re.findall(r"\d+", one)} if isinstance(one, str) else _set_of(one) for one in own]
    made = [i + start for i, (model, layer) in enumerate(stack.layers) if layer + start in listed[model]]
    return ",".join(map(str, made)) if isinstance(value, str) else made


def _set_of(value: object) -> set[int]:
    return {item for item in value if type(item) is int} if isinstance(value, list) else set()


def _leading(stack: _Stack, name: str, value: int) -> int:
    """How many of the new layers are among the first `value` of their model. Raises RefusedError if others precede."""
    if value >= stack.n_layers(0):
        return max(value, len(stack.layers))
    counts = [_int(stack.h(model), name) + int(name == LAST) for model in range(len(stack.models))]
    among = [layer < counts[model] for model, layer in stack.layers]
    number = sum(among)
    if not all(among[:number]):
        raise stack.refuse(name, f"the first {value} layers differ from the others and must stay first")
    return number


def _set_trailing(stack: _Stack, h: Hyperparams) -> None:
    """Sets the number of trailing layers with shared keys and values. Raises RefusedError if others would follow."""
    if not (shared := _int(stack.h(0), TRAILING)):
        return
    among = [layer >= stack.n_layers(m) - _int(stack.h(m), TRAILING) for m, layer in stack.layers]
    number = sum(among)
    if any(among[: len(among) - number]):
        raise stack.refuse(TRAILING, f"the last {shared} layers share keys and values and must stay last")
    h.extra[TRAILING] = number


def _keys_of(h: Hyperparams, layer: int) -> int | None:
    """The layer whose keys and values a layer shares, or None: the last earlier layer of its kind with its own."""
    end = (h.num_layers or 0) - _int(h, TRAILING)
    if layer < end:
        return None
    kinds = layer_kinds(h.extra, h.num_layers) or [None] * (h.num_layers or 0)
    return next((n for n in range(end - 1, -1, -1) if kinds[n] == kinds[layer]), None)


def _index_of(h: Hyperparams, layer: int) -> int | None:
    """The layer whose indexer selection a layer reuses if it has none: the last earlier one with an indexer."""
    types = h.extra.get("indexer_types")
    if not isinstance(types, list) or layer >= len(types) or types[layer] != "shared":
        return None
    return next((n for n in range(layer - 1, -1, -1) if types[n] == "full"), None)


TAKES: Mapping[str, tuple[Callable[[Hyperparams, int], int | None], str]] = {
    TRAILING: (_keys_of, "keys and values"),
    "indexer_types": (_index_of, "selected positions"),
}
"""config.json key -> the layer that another layer depends on, and for what."""


# --- roles ---


def _check_roles(stack: _Stack, h: Hyperparams) -> None:
    """Raises RefusedError if a layer's role would change with its index."""
    conditions = sorted({r.layers for r in stack.row.tensors if r.layers})
    kinds = layer_kinds(h.extra, h.num_layers)
    _check_kinds_again(stack, h)
    for i, (model, layer) in enumerate(stack.layers):
        own = stack.h(model)
        for key, rule in BY_NUMBER.items():
            if rule(own, layer) != rule(h, i):
                raise stack.refuse(key, f"layer {layer} depends on its index and would become layer {i}")
        for key, (source, what) in TAKES.items():
            other, new = source(own, layer), source(h, i)
            if other is not None and (new is None or stack.layers[new] != (model, other)):
                raise stack.refuse(key, f"layer {layer} uses the {what} of layer {other}, whose number would change")
        before = layer_kinds(own.extra, own.num_layers)
        if before is not None and (kinds is None or before[layer] != kinds[i]):
            now = kinds[i] if kinds is not None else None
            raise stack.refuse(_pattern(own), f"layer {layer} is {before[layer]} and would be {now} as layer {i}")
        changed = next((c for c in conditions if has_layer(c, own, layer) != has_layer(c, h, i)), None)
        if changed is not None or _own_sizes(own, layer) != _own_sizes(h, i):
            what = f"index ({changed})" if changed else "sizes"
            raise stack.refuse(_pattern(own), f"layer {layer} depends on its {what}, which layer {i} does not match")


def _check_kinds_again(stack: _Stack, h: Hyperparams) -> None:
    """Raises RefusedError if config.json would imply other layer types for the new layers."""
    kinds = layer_kinds(h.extra, h.num_layers)
    if kinds is None:
        return
    again = hp.from_hf_config(hp.to_hf_config(h), stack.row)
    read = layer_kinds(again.extra, again.num_layers) or kinds
    changed = next((i for i, (a, b) in enumerate(zip(kinds, read, strict=False)) if a != b), None)
    if changed is not None:
        layer = stack.layers[changed][1]
        why = f"layer {layer} is {kinds[changed]}, but {stack.row.id} implies {read[changed]} for layer {changed}"
        raise stack.refuse("layer_types", f"{why} of {len(kinds)}")


def _own_sizes(h: Hyperparams, layer: int) -> dict[str, int]:
    return {
        word: size for word, size in layer_sizes(h, layer).items() if word in ("heads", "kv_heads", "ffn", "moe_ffn")
    }


_PERIODS = (
    *("attn_layer_period", "expert_layer_period", "layer_group_size", "mamba_step", "decoder_sparse_step"),
    *("moe_layer_interval", "interleave_moe_layer_step", "moe_layer_freq", "full_attention_interval"),
    *("sliding_window_pattern", "no_rope_layer_interval", "global_attn_every_n_layers", "moe_every_n_layer"),
)


def _pattern(h: Hyperparams) -> str:
    """The key that sets layer types by a period, else the number of layers."""
    return next((key for key in _PERIODS if h.extra.get(key) not in (None, 0, 1)), "num_hidden_layers")


def with_layers(config: Mapping[str, object], layers: Sequence[int | None]) -> dict[str, object]:
    """The source's `config` with per-layer lists that no row knows, adjusted to the new `layers`.

    Entries of a layer from another model are taken from the first layer.
    """
    part = language_part(config)
    if part:
        return {key: with_layers(part, layers) if value is part else value for key, value in config.items()}
    numbers = [layer or 0 for layer in layers]
    out = dict(config)
    for key, value in config.items():
        if key in PER_LAYER and isinstance(value, list) and len(value) > max(numbers):
            out[key] = [value[layer] for layer in numbers]
        elif key == "per_layer_config":
            stated = as_mapping(value)
            out[key] = {str(i): stated[str(layer)] for i, layer in enumerate(numbers) if str(layer) in stated}
    return out


# --- tensors ---


def _layer_of(c: Canonical, name: str) -> int | None:
    return layer_of(c.arch, name) if c.arch is not None else None


def renumbered(name: str, old: int, new: int) -> str:
    """`name` with layer `old` replaced by `new`: the layer is the first number in a name."""
    return re.sub(rf"(?<![^.]){old}(?![^.])", str(new), name, count=1)


def _tensors(stack: _Stack) -> tuple[dict[str, CanonicalTensor], dict[str, CanonicalTensor]]:
    """The tensors of the network and the extra tensors, in the order of the first model."""
    by_layer: dict[SourceLayer, list[CanonicalTensor]] = {}
    before: list[CanonicalTensor] = []
    behind: list[CanonicalTensor] = []
    for number, c in enumerate(stack.models):
        for name, tensor in c.tensors.items():
            layer = _layer_of(c, name)
            if layer is not None:
                by_layer.setdefault((number, layer), []).append(tensor)
            elif number == 0:
                (behind if by_layer else before).append(tensor)
    made = list(before)
    for new, source in enumerate(stack.layers):
        made += _Moved(stack.models[source[0]], source[1], new).tensors(by_layer.get(source, ()))
    made += behind
    c, n_old, n_new = stack.models[0], stack.n_layers(0), len(stack.layers)
    extras: list[CanonicalTensor] = []
    for name, tensor in c.extras.items():
        layer = _layer_of(c, name)
        if layer is None or layer < n_old:
            extras.append(tensor)
        else:
            extras += _Moved(c, layer, layer - n_old + n_new).tensors([tensor])
    return {t.name: t for t in made}, {t.name: t for t in extras}


@dataclass(frozen=True, slots=True)
class _Moved:
    """A layer of `c` under another index."""

    c: Canonical
    old: int
    new: int

    def tensors(self, tensors: Sequence[CanonicalTensor]) -> list[CanonicalTensor]:
        """Its tensors and their links, which several of them share."""
        if self.old == self.new:
            return list(tensors)
        links: dict[int, Link] = {}
        sources: dict[int, TensorSource] = {}
        for tensor in tensors:
            if (link := tensor.link) is not None and id(link) not in links:
                hf, gguf = (tuple(map(self.name, side)) for side in (link.hf, link.gguf))
                links[id(link)] = replace(link, hf=hf, gguf=gguf)
            for source in tensor.sources:
                sources.setdefault(id(source), self.renamed(source))
        return [
            replace(
                tensor,
                name=self.name(tensor.name),
                sources=tuple(sources[id(source)] for source in tensor.sources),
                link=links[id(tensor.link)] if tensor.link is not None else None,
            )
            for tensor in tensors
        ]

    def name(self, name: str) -> str:
        """The name in this layer; other names, and a source's own names of MTP layers, are kept."""
        return renumbered(name, self.old, self.new) if _layer_of(self.c, name) == self.old else name

    def renamed(self, source: TensorSource) -> TensorSource:
        """The stored tensor under its new name: a checkpoint keeps its own spelling."""
        name = self.name(source.name)
        if name == source.name or not is_dataclass(source) or isinstance(source, type):
            return source
        return replace(source, name=name)


# --- what a user writes ---


def parse_layers(text: str, n_layers: int) -> list[int]:
    """Parses "10-15,20" into ascending unique layers. Raises UsageError."""
    found: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,6})\s*(?:-\s*(\d{1,6})\s*)?", part, re.ASCII)
        first = int(match[1]) if match is not None else 0
        last = int(match[2] or first) if match is not None else -1
        if last < first:
            raise UsageError(
                f"{text!r:.60} is not a layer list", hint="use numbers from 0 and inclusive ranges: 10-15,20"
            )
        if last - first >= MAX_LAYERS:
            raise UsageError(f"unknown layer {last}", hint=f"the model has layers 0 to {n_layers - 1}")
        found |= set(range(first, last + 1))
    return sorted(found)


def ranges(layers: Sequence[int]) -> str:
    """Formats numbers as parse_layers reads them: "10-15, 20"."""
    ordered = sorted(layers)
    if not ordered:
        return ""
    starts = [ordered[0], *(b for a, b in pairwise(ordered) if b != a + 1)]
    ends = [*(a for a, b in pairwise(ordered) if b != a + 1), ordered[-1]]
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))
