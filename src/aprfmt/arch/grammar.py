"""The two languages of table rows, sizes (`q+2*kv`) and conditions (`moe|!use_bias`), and what their words mean.

    size      := product (("+" | "-") product)*
    product   := atom (("*" | "/") atom)*
    atom      := number | word
    shape     := size ("," size)*
    order     := name ":" shape
    condition := facts ("|" facts)*
    facts     := fact ("&" fact)*
    fact      := ["!"] word ["=" value]

docs/rows.md explains them. Each text is parsed once and cached. An invalid text raises ValueError, which users cannot
cause: rows are part of the package, and tests parse all of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from functools import cache

from aprfmt.arch.fields import as_float
from aprfmt.arch.heads import has_no_output
from aprfmt.arch.hyperparams import Hyperparams
from aprfmt.arch.layer_sizes import layer_sizes
from aprfmt.arch.projectors import LAYERWISE, NUMBERS, SPATIAL
from aprfmt.arch.row import HEAD, OPTIONAL, OUTPUT, REQUIRED, WHOLE_KEYS, Architecture, Listed
from aprfmt.errors import CorruptError

_ATOM = r"(?:\d+|[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)"
_SIZE = rf"{_ATOM}(?:[-+*/]{_ATOM})*"
_TOKEN = rf"{_ATOM}|[-+*/]"
_FACT = r"(!?)([A-Za-z_][\w.]*)(?:=([\w.-]+))?"
_LAYER = re.compile(r"blk\.\d+\.")


@cache
def _parse_size(size: str) -> tuple[tuple[str, tuple[tuple[str, str], ...]], ...]:
    """((sign, ((operator, atom), ...)), ...): a sum of products."""
    if not re.fullmatch(_SIZE, size, re.ASCII):
        raise ValueError(f"{size!r} is not a valid size")
    tokens = re.findall(_TOKEN, size, re.ASCII)
    terms: list[tuple[str, list[tuple[str, str]]]] = [("+", [("*", tokens[0])])]
    for operator, atom in zip(tokens[1::2], tokens[2::2], strict=True):
        if operator in "+-":
            terms.append((operator, [("*", atom)]))
        else:
            terms[-1][1].append((operator, atom))
    return tuple((sign, tuple(factors)) for sign, factors in terms)


def evaluate(size: str, sizes: Mapping[str, int]) -> int | None:
    """The value of `size` ("q+2*kv"); None if a word is unknown or a division leaves a remainder."""
    total = 0
    for sign, factors in _parse_size(size):
        product = 1
        for operator, atom in factors:
            number = int(atom) if atom.isdigit() else sizes.get(atom)
            if number is None or (operator == "/" and (number == 0 or product % number)):
                return None
            product = product * number if operator == "*" else product // number
        total += product if sign == "+" else -product
    return total if total >= 0 else None


ANY = "any_"
"""Prefix of size words that no key states: those of the tensors themselves."""


def size_words(size: str) -> set[str]:
    """The words of a size; none for "", a scalar."""
    return {atom for _, factors in _parse_size(size) for _, atom in factors if not atom.isdigit()}


def dims_of(dims: str) -> list[str]:
    """The sizes of a shape, outermost first; none for a scalar, ""."""
    return dims.split(",") if dims else []


def shape_of(dims: str, sizes: Mapping[str, int]) -> tuple[int | None, ...]:
    """The shape that `dims` ("q,hidden") describes; None for each unknown dimension."""
    return tuple(evaluate(size, sizes) for size in dims_of(dims))


def parse_order(order: str) -> tuple[str, list[str]]:
    """The name and the sizes of a row order: "swap:heads,2,head_dim/2". `arch.orders` has the names."""
    name, _, sizes = order.partition(":")
    return name, sizes.split(",")


Fact = tuple[str, str, bool]
"""(word, value or "", whether it is behind "!")."""


@cache
def parse_condition(condition: str) -> tuple[tuple[Fact, ...], ...]:
    """The alternatives of a condition, each with the facts that must all hold."""

    def parse(text: str) -> Fact:
        match = re.fullmatch(_FACT, text, re.ASCII)
        if match is None:
            raise ValueError(f"unknown condition {text!r}")
        return match[2], match[3] or "", bool(match[1])

    return tuple(tuple(map(parse, facts.split("&"))) for facts in condition.split("|"))


def holds(condition: str, look_up: Callable[[str], object]) -> bool:
    """Whether `condition` holds, where `look_up` returns the value of a word.

    `word` holds unless it is absent, false, 0 or empty. `word=value` holds for a list that contains the value, and for
    anything else with that spelling.
    """
    return any(
        all(_is_true(look_up(word), value) is not negated for word, value, negated in facts)
        for facts in parse_condition(condition)
    )


def _is_true(found: object, value: str) -> bool:
    if not value:
        return bool(found)
    if isinstance(found, Collection) and not isinstance(found, str):
        return any(str(item) == value for item in found)
    return str(found) == value


# --- sizes ---

FIELD_OF_SIZE = {
    "vocab": "vocab_size", "hidden": "hidden_size", "ffn": "intermediate_size", "heads": "num_heads",
    "kv_heads": "num_kv_heads", "head_dim": "head_dim", "experts": "num_experts", "experts_used": "num_experts_per_tok",
    "moe_ffn": "moe_intermediate_size", "positions": "max_position_embeddings", "layers": "num_layers",
}  # fmt: skip
"""Standard size word -> its field of Hyperparams; `q` and `kv` are products of two."""


def sizes_of(h: Hyperparams, layer: int | None = None) -> dict[str, int]:
    """Every size word that the hyper-parameters define: the standard words and all integers among the config keys.

    With `layer`, its own values if layers differ (arch.layer_sizes).
    """
    own = {} if layer is None else layer_sizes(h, layer)
    kv_heads = h.num_kv_heads if h.num_kv_heads is not None else h.num_heads

    def heads_of(count: int | None) -> int | None:
        return count * h.head_dim if count is not None and h.head_dim is not None else None

    words: dict[str, int | None] = {}
    whole: dict[str, int] = {}
    for key, value in h.extra.items():
        size = len(value) if isinstance(value, list) else value
        if isinstance(size, int) and not isinstance(size, bool) and size >= 0:
            whole[key.replace("-", "_")] = words[key.rpartition(".")[2]] = size
    words |= whole  # a key is the word itself before it is the last word of another
    words |= {word: getattr(h, field) for word, field in FIELD_OF_SIZE.items()}
    part = h.extra.get("partial_rotary_factor", 1.0)
    if h.head_dim is not None and isinstance(part, int | float) and 0 <= part <= 1:
        words["rotary"] = int(h.head_dim * part)
    words |= {"kv_heads": kv_heads, **own}
    words |= {"q": heads_of(words["heads"]), "kv": heads_of(words["kv_heads"])}
    if words["moe_ffn"] is None:
        words["moe_ffn"] = h.intermediate_size
    return {word: size for word, size in words.items() if size is not None}


# --- layers ---


def has_layer(layers: str, h: Hyperparams, layer: int) -> bool:
    """Whether layer `layer` (from 0) has the tensors of a row with this `layers` condition; "" means every layer.

    A word is a name of LAYER_RULES, a size of LAYER_SIZES, which is not 0 in the layers that are meant, or a layer type
    (LAYER_KINDS); `kind` is the layer's type.
    """

    def look_up(word: str) -> object:
        if word in LAYER_RULES:
            return LAYER_RULES[word](h, layer)
        if word in LAYER_SIZES:
            return sizes_of(h, layer).get(word)
        kinds = layer_kinds(h.extra, h.num_layers)
        kind = kinds[layer] if kinds and layer < len(kinds) else None
        return kind if word == "kind" else kind == word

    return not layers or holds(layers, look_up)


def layer_kinds(config: Mapping[str, object], n_layers: int | None = None) -> list[object] | None:
    """The type of each layer, from the config.json key that lists the types or the attention layers; None without one.

    Keys that list only the attention layers need the number of layers.
    """
    kinds = config.get("layer_types") or config.get("layers_block_type")
    if isinstance(kinds, list):
        return kinds
    rule = next((rule for key, rule in ATTENDS.items() if config.get(key) is not None), None)
    if rule is None or n_layers is None:
        return None
    return ["full_attention" if rule(config, layer, n_layers) else "linear_attention" for layer in range(n_layers)]


def _number(config: Mapping[str, object], key: str, default: int) -> int:
    value = config.get(key, default)
    return value if isinstance(value, int) and not isinstance(value, bool) else default


def _is_listed(config: Mapping[str, object], layer: int) -> bool:
    listed = config["attn_layer_indices"]
    return isinstance(listed, list) and layer in listed


def _is_at_offset(config: Mapping[str, object], layer: int) -> bool:
    period = max(1, _number(config, "attn_layer_period", 1))
    return layer % period == _number(config, "attn_layer_offset", 0)


def _is_marked(config: Mapping[str, object], layer: int) -> bool:
    marks = config["attn_type_list"]
    return isinstance(marks, list) and layer < len(marks) and bool(marks[layer])


def _is_last_of_group(config: Mapping[str, object], layer: int, n_layers: int) -> bool:
    size = max(1, _number(config, "layer_group_size", 1))
    return (layer + 1) % size == 0 or layer >= n_layers // size * size


def _is_middle_of_step(config: Mapping[str, object], layer: int, n_layers: int) -> bool:
    middle = _number(config, "mamba_step", 2) // 2
    return layer == n_layers - 1 if n_layers <= middle else layer % max(1, _number(config, "mamba_step", 2)) == middle


ATTENDS: dict[str, Callable[[Mapping[str, object], int, int], bool]] = {
    "attn_layer_indices": lambda config, layer, n_layers: _is_listed(config, layer),
    "attn_layer_period": lambda config, layer, n_layers: _is_at_offset(config, layer),
    "attn_type_list": lambda config, layer, n_layers: _is_marked(config, layer),
    "layer_group_size": _is_last_of_group,
    "mamba_step": _is_middle_of_step,
}
"""config.json key of a hybrid without layer types -> whether a layer has attention by it."""


def _int(h: Hyperparams, key: str, default: int = 0) -> int:
    return _number(h.extra, key, default)


def _list(h: Hyperparams, key: str) -> list[object] | None:
    value = h.extra.get(key)
    return value if isinstance(value, list) else None


def _deepstack(h: Hyperparams) -> list[object]:
    """The tower layers whose features the language model also gets."""
    key = next((key for key in h.extra if key.endswith(".deepstack_visual_indexes")), "")
    return _list(h, key) or []


def _is_unread(h: Hyperparams, layer: int) -> bool:
    """Whether the layer is the last of a tower whose features are taken before it."""
    return layer == _int(h, "vision_config.num_hidden_layers") - 1


def _is_in_pyramid(h: Hyperparams, layer: int) -> bool:
    """Whether the tower layer has experts, by their per-layer number."""
    key = next((key for key in h.extra if key.endswith(".pyramid_num_routed")), "")
    counts = _list(h, key) or []
    count = counts[layer] if layer < len(counts) else 0
    return isinstance(count, int) and count > 0


def _has_window(h: Hyperparams, layer: int) -> bool:
    """Whether the tower layer attends to a window of rows or columns: its list entry is not -1."""
    key = next((key for key in h.extra if key.endswith(".vit_window_attn_types")), "")
    kinds = _list(h, key) or []
    return layer < len(kinds) and kinds[layer] != -1


def _is_moe(h: Hyperparams, layer: int) -> bool:
    """Whether the layer has routed experts rather than a dense MLP, by any config key."""
    if not h.num_experts or (h.num_experts == 1 and _int(h, "expert_layer_period")):
        return False  # Jamba turns a single expert into a dense MLP
    kinds = _list(h, "mlp_layer_types")
    if kinds is not None:
        return bool(kinds) and kinds[min(layer, len(kinds) - 1)] != "dense"  # an MTP layer is like the last layer
    if (listed := _list(h, "moe_layers")) is not None:
        return layer in listed
    first = max(_int(h, key) for key in ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"))
    end = _int(h, "moe_layer_end_index", -1)
    dense = layer in (_list(h, "mlp_only_layers") or []) or layer < first or 0 <= end < layer
    return not dense and _is_at_step(h, layer)


def _is_at_step(h: Hyperparams, layer: int) -> bool:
    """Whether MoE layers come every few layers and this is one."""
    frequency = h.extra.get("moe_layer_freq")
    if isinstance(frequency, list):
        return bool(frequency) and bool(frequency[min(layer, len(frequency) - 1)])
    if layer % max(1, _int(h, "moe_layer_freq", 1)):
        return False
    if (period := _int(h, "expert_layer_period")) and (layer - _int(h, "expert_layer_offset")) % period:
        return False
    steps = (_int(h, key, 1) for key in ("decoder_sparse_step", "moe_layer_interval", "interleave_moe_layer_step"))
    return all((layer + 1) % max(1, step) == 0 for step in steps)


def _has_indexer(h: Hyperparams, layer: int) -> bool:
    """Whether the layer has an indexer itself; others use that of an earlier layer."""
    types, kinds = _list(h, "indexer_types"), layer_kinds(h.extra)
    if _list(h, "compress_ratios") is not None:
        return _ratio(h, layer) == INDEXED_RATIO
    if types is None and kinds is not None and BLOCKWISE in kinds:
        return layer < len(kinds) and kinds[layer] == BLOCKWISE
    return types is None or layer >= len(types) or types[layer] == "full"


def _ratio(h: Hyperparams, layer: int) -> object:
    """The layer's compression ratio of positions; 0 for sliding-window only."""
    ratios = _list(h, "compress_ratios") or []
    return ratios[layer] if layer < len(ratios) else 0


INDEXED_RATIO = 4
"""The compression ratio of layers with an indexer."""


def _is_hashed(h: Hyperparams, layer: int) -> bool:
    """Whether a table assigns each token its experts in the layer."""
    kinds = _list(h, "mlp_layer_types") or []
    return kinds[layer] == "hash_moe" if layer < len(kinds) else layer < _int(h, "num_hash_layers")


BLOCKWISE = "minimax_m3_sparse"
"""The type of layers that select blocks of positions."""


def _shares_kv(h: Hyperparams, layer: int) -> bool:
    """Whether the layer uses the keys and values of an earlier one."""
    return h.num_layers is not None and layer >= h.num_layers - _int(h, "num_kv_shared_layers")


LAYER_RULES: dict[str, Callable[[Hyperparams, int], bool]] = {
    "moe": _is_moe, "dense": lambda h, layer: not _is_moe(h, layer),
    "first": lambda h, layer: layer == 0, "ple": lambda h, layer: layer + 1 in (_list(h, "ple_layer_ids") or []),
    "indexer": _has_indexer, "compressor": lambda h, layer: bool(_ratio(h, layer)),
    "hashed": _is_hashed, "deepstack": lambda h, layer: layer in _deepstack(h), "unread": _is_unread,
    "pyramid": _is_in_pyramid, "windowed": _has_window, "layerwise": lambda h, layer: layer in NUMBERS[LAYERWISE](h),
    "spatial": lambda h, layer: layer in NUMBERS[SPATIAL](h),
    "draft": lambda h, layer: h.num_layers is not None and layer >= h.num_layers, "shares_kv": _shares_kv,
    "double_wide": lambda h, layer: bool(h.extra.get("use_double_wide_mlp")) and _shares_kv(h, layer),
}  # fmt: skip
"""Word of a `layers` condition -> predicate of a layer."""

LAYER_SIZES = frozenset(("heads", "kv_heads", "ffn"))
"""Words of a `layers` condition that are sizes of the layer."""

LAYER_KINDS = frozenset(
    (
        "full_attention", "sliding_attention", "attention", "linear_attention", "mamba", "conv", "conv_mixer", "mlp",
        "moe",
    )
)  # fmt: skip
"""Words of a config's `layer_types` that rows distinguish; `kind=moe` is the type, `moe` alone the rule."""

# --- numbers ---


def factor_of(word: str, h: Hyperparams, layer: int | None) -> float:
    """A number of FACTORS, or of the config: "key", or "key.i" of a list; 1 by default.

    Raises CorruptError for anything but a number other than 0.
    """
    if word in FACTORS:
        return FACTORS[word](h, layer or 0)
    name, _, index = word.partition(".")
    value = h.extra.get(name)
    if index and value is not None:
        value = value[int(index)] if isinstance(value, list) and int(index) < len(value) else "nothing"
    number = as_float(value, word)
    if number == 0:
        raise CorruptError(f"{word} is 0, so tensors cannot be divided by it")
    return 1.0 if number is None else number


@cache
def factor_names(arch: Architecture) -> frozenset[str]:
    """The config keys that scale the values of the family's tensors, or count rows of a tensor."""
    switches = {row.value.partition("unit_columns:")[2] for row in arch.tensors} - {""}
    runs = (run.partition(":")[2] for row in arch.tensors for run in row.scale)
    words = (word for run in runs for word in run.replace("*", ",").split(","))
    factors = frozenset(word.partition(".")[0] for word in words if word not in FACTORS)
    return factors | switches | _padding_names(arch)


def _padding_names(arch: Architecture) -> set[str]:
    """The config keys without a GGUF counterpart that say where its tensors have rows of zeros, or how many tensors a
    checkpoint combines.
    """
    sizes = {size for row in arch.tensors for size in (row.lead, row.trail, row.count) if size}
    padding = {word for size in sizes for word in size_words(size)}
    return padding & {key.hf[0] for key in arch.keys if key.hf and not key.gguf}


def _rescaled(h: Hyperparams, layer: int) -> float:
    """RWKV halves its residual additions every few layers."""
    step = _int(h, "rescale_every")
    return 0.5 ** (layer // step) if step > 0 else 1.0


FACTORS: dict[str, Callable[[Hyperparams, int], float]] = {"rescaled": _rescaled}
"""Word of a `scale` -> the number for a layer; any other word is a config.json key."""

# --- needs ---


def is_needed(arch: Architecture, need: str, h: Hyperparams) -> bool:
    """Whether the network requires the tensors of a row with this `need`."""

    def look_up(word: str) -> object:
        if word in (HEAD, OUTPUT):
            has_output = h.hf_architecture not in arch.bare_classes and not has_no_output(h.hf_architecture)
            return has_output and not (word == HEAD and h.tied)
        return word == REQUIRED if word in (REQUIRED, OPTIONAL) else h.extra.get(word)

    return holds(need, look_up)


def is_unwanted(arch: Architecture, need: str, h: Hyperparams) -> bool:
    """Whether the config says that the network lacks the tensors of rows with this `need`."""
    return need != OPTIONAL and not is_needed(arch, need, h)


# --- which row ---


def is_config_of(arch: Architecture | Listed, config: Mapping[str, object]) -> bool:
    """Whether a config.json fulfils the `hf_when` of a row."""
    return holds(arch.hf_when, lambda word: layer_kinds(config) if word == "layer_types" else config.get(word))


def is_gguf_of(arch: Architecture | Listed, kv: Mapping[str, object], tensor_names: Collection[str] | None) -> bool:
    """Whether a GGUF with these keys and tensors fulfils the `when` of a row."""
    return holds_of_gguf(arch.when, arch, kv, tensor_names)


def holds_of_gguf(
    condition: str, arch: Architecture | Listed, kv: Mapping[str, object], tensor_names: Collection[str] | None
) -> bool:
    """Whether a condition holds for a GGUF; `tensors=NAME` means a tensor, with or without its `blk.N.`.

    `uneven_heads`: the number of heads does not divide the hidden size.
    """

    def look_up(word: str) -> object:
        if word == "tensors":
            return {form for name in tensor_names or () for form in (name, _LAYER.sub("", name, count=1))}
        if word == "uneven_heads":
            hidden, heads = (look_up(key) for key in ("embedding_length", "attention.head_count"))
            return isinstance(hidden, int) and isinstance(heads, int) and heads > 0 and hidden % heads != 0
        return kv.get(word if word.startswith(WHOLE_KEYS) else f"{arch.gguf}.{word}")

    return holds(condition, look_up)
