"""Converters of networks whose layers differ: kinds of layers, and what sizes each kind has. See arch.values."""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import replace

from aprfmt.arch.converter import DEFAULT, ConfigKeys, Converter, GgufKeys, Scope
from aprfmt.arch.fields import as_float, as_int, as_mapping
from aprfmt.errors import CorruptError, RefusedError

SLIDING, FULL = "sliding_attention", "full_attention"


def kinds_of(slides: list[bool]) -> list[str]:
    """Kinds of layers: those with a window, and those that see everything."""
    return [SLIDING if one else FULL for one in slides]


def slides_of(kinds: object) -> list[bool]:
    """Which of the kinds have a window. Raises CorruptError for what is not a list."""
    if not isinstance(kinds, list):
        raise CorruptError("layer_types is not a list")
    return [kind in (SLIDING, "chunked_attention") for kind in kinds]


def flags_of(value: object, name: str) -> list[bool]:
    """A list of flags or numbers, one a layer, as flags. Raises CorruptError."""
    if not isinstance(value, list):
        raise CorruptError(f"{name} is not a list")
    return [bool(item) for item in value]


def layer_types_to(value: object, scope: Scope) -> list[bool] | None:
    """Which layers slide. Where a GGUF has no key for it, the runtime knows one pattern, and others are refused."""
    if value is None:
        return None
    slides = slides_of(value)
    expected = layer_types_fill(scope)
    if not scope.key.gguf and expected is not None and slides_of(expected) != slides:
        raise RefusedError(
            f"a GGUF of {scope.row.id} always means one pattern of layer_types, and this model has another"
        )
    return slides


def layer_types_from(value: object, scope: Scope) -> object:
    """By a list of flags, or by a period; by the row's pattern where there is neither."""
    if isinstance(value, int):
        return kinds_of(periodic(max(1, int(value)), scope.h.num_layers or 0))
    if isinstance(value, list):
        return kinds_of([bool(item) for item in value])
    filled = layer_types_fill(scope)
    return DEFAULT if filled is None else filled


def layer_types_fill(scope: Scope) -> list[str] | None:
    """By `sliding_window_pattern`, of a config or of the row's defaults: a period, or letters (L sliding)."""
    pattern = scope.h.extra.get("sliding_window_pattern", scope.defaults.get("sliding_window_pattern"))
    n_layers = scope.h.num_layers
    if n_layers is None or pattern is None:
        return None
    if isinstance(pattern, str) and pattern:
        return kinds_of([pattern[i % len(pattern)] == "L" for i in range(n_layers)])
    period = as_int(pattern, "sliding_window_pattern")
    return kinds_of(periodic(period, n_layers)) if period else None


def periodic(period: int, n_layers: int, first: int = 1) -> list[bool]:
    """Which layers have a window: all but every `period`-th, where the first layer is number `first`."""
    return [bool((i + first) % period) for i in range(n_layers)]


LAYER_TYPES = Converter(layer_types_to, layer_types_from, layer_types_fill)
_GLOBAL_HEAD = 512
"""What a Gemma 4 config that is silent means."""


def _last_full(kinds: list[str] | None) -> list[str] | None:
    """Gemma 4's last layer sees everything, whatever its config says."""
    return [*kinds[:-1], FULL] if kinds else kinds


def _last_full_settle(value: object, scope: Scope) -> object:
    return _last_full([str(kind) for kind in value] if isinstance(value, list) else layer_types_fill(scope))


def _global_heads_settle(value: object, scope: Scope) -> object:
    """What is told of single layers, as the two numbers of the layers that see everything."""
    extra, told = scope.h.extra, scope.h.extra.pop("per_layer_config", None)
    kv_heads = extra.pop("num_global_key_value_heads", None) if scope.config("attention_k_eq_v") else None
    if told is None:
        return ConfigKeys(global_head_dim=value or _GLOBAL_HEAD, num_global_key_value_heads=kv_heads)
    layers = {int(i): layer for i, layer in as_mapping(told).items() if str(i).isdigit()}
    kinds = extra.get("layer_types")
    full = [i for i, kind in enumerate(kinds) if kind == FULL] if isinstance(kinds, list) else []
    own = [dict(as_mapping(layers.get(i))) for i in full]
    if set(layers) - set(full) or any(one != own[0] for one in own) or not own:
        raise RefusedError("per_layer_config tells apart more than the layers that see everything from the others")
    more = set(own[0]) - {"head_dim", "num_key_value_heads"}
    if more:
        raise RefusedError(f"per_layer_config gives layers a {min(more)} of their own, which no such network has")
    return ConfigKeys(
        global_head_dim=own[0].get("head_dim", scope.h.head_dim),
        num_global_key_value_heads=own[0].get("num_key_value_heads"),
    )


def _global_heads_to(value: object, scope: Scope) -> GgufKeys:
    """All of such a head is rotated: pairs that are not have a frequency of 0."""
    names = ("attention.key_length", "attention.value_length", "rope.dimension_count")
    return GgufKeys({name: ("u32", value) for name in names if value is not None})


def _window_heads_to(value: object, scope: Scope) -> GgufKeys:
    names = ("attention.key_length_swa", "attention.value_length_swa", "rope.dimension_count_swa")
    return GgufKeys({name: ("u32", value) for name in names if value is not None})


def _window_kv_heads_to(value: object, scope: Scope) -> object:
    """KV heads: one number, or one a layer where the layers that see everything have another."""
    other = scope.size("num_global_key_value_heads")
    if other is None or other == value:
        return value
    slides = slides_of(scope.h.extra.get("layer_types"))
    return GgufKeys({scope.key.gguf: ("i32[]", [value if one else other for one in slides])})


def _window_kv_heads_from(value: object, scope: Scope) -> object:
    slides = scope.gguf("attention.sliding_window_pattern")
    if not isinstance(value, list) or not isinstance(slides, list) or len(slides) != len(value):
        return value[0] if isinstance(value, list) and value.count(value[0]) == len(value) else value
    kinds = [{heads for heads, one in zip(value, slides, strict=True) if bool(one) is kind} for kind in (True, False)]
    if any(len(kind) > 1 for kind in kinds):
        raise CorruptError(f"{scope.key.gguf} differs between layers of one kind")
    windowed, other = (next(iter(kind), None) for kind in kinds)
    heads = other if windowed is None else windowed
    return ConfigKeys(num_key_value_heads=heads, num_global_key_value_heads=heads if other is None else other)


def _double_wide_to(value: object, scope: Scope) -> object:
    """The width of the MLP: one number, or one a layer where those that share keys and values have twice as much."""
    width, n_layers = as_int(value, scope.name), scope.h.num_layers
    if width is None or n_layers is None or not scope.config("use_double_wide_mlp"):
        return width
    first = n_layers - (scope.size("num_kv_shared_layers") or 0)
    return GgufKeys({scope.key.gguf: ("i32[]", [width if i < first else 2 * width for i in range(n_layers)])})


def _double_wide_from(value: object, scope: Scope) -> object:
    if not isinstance(value, list) or not value:
        return value if value is not None else DEFAULT
    shared = as_int(scope.gguf("attention.shared_kv_layers"), "attention.shared_kv_layers") or 0
    first = len(value) - shared
    wide = value[-1] != value[0]
    if value != [value[0] * (2 if wide and i >= first else 1) for i in range(len(value))]:
        raise CorruptError(f"{scope.key.gguf} differs between layers of one kind")
    return ConfigKeys(intermediate_size=value[0], use_double_wide_mlp=wide)


def _shared_kv_to(value: object, scope: Scope) -> object:
    """llama.cpp takes keys and values of the last two layers that have some: the last sees everything."""
    shared, n_layers = as_int(value, scope.name) or 0, scope.h.num_layers or 0
    kinds = scope.h.extra.get("layer_types")
    if not shared or not isinstance(kinds, list):
        return shared
    first = n_layers - shared
    if first < 2 or [kinds[first - 2], kinds[first - 1]] != [SLIDING, FULL]:
        raise RefusedError(
            f"{scope.name} is {shared}: llama.cpp's {scope.row.gguf} takes the keys and values of layers {first - 2} "
            f"and {first - 1}, which would have to be one with a window and one without"
        )
    return shared


def _values_are_keys_from(value: object, scope: Scope) -> object:
    """Whether the layers that see everything have no values of their own."""
    slides = scope.gguf("attention.sliding_window_pattern")
    if not scope.names or not isinstance(slides, list):
        return DEFAULT
    full = [i for i, one in enumerate(slides) if not one and f"blk.{i}.attn_k.weight" in scope.names]
    return bool(full) and not any(f"blk.{i}.attn_v.weight" in scope.names for i in full)


def _n_tokens_from(value: object, scope: Scope) -> object:
    """As many rows as the vocabulary has."""
    tokens = scope.kv.get("tokenizer.ggml.tokens")
    return scope.h.vocab_size or (len(tokens) if isinstance(tokens, Sized) else DEFAULT)


def _n_tokens_to(value: object, scope: Scope) -> None:
    rows, vocab = as_int(value, scope.name), scope.h.vocab_size
    if scope.config("hidden_size_per_layer_input") and rows is not None and vocab is not None and rows > vocab:
        raise RefusedError(f"{scope.name} is {rows}: llama.cpp's {scope.row.gguf} has one for each of {vocab} tokens")


_KV_LAYERS, _SPARSE_LAYERS, _SPARSITY = 20, 10, 0.95
"""Gemma 3n in llama.cpp: so many layers have keys and values, so many at the beginning zero this part of their MLP."""


def _sparsity(scope: Scope) -> list[float]:
    return [_SPARSITY if i < _SPARSE_LAYERS else 0.0 for i in range(scope.h.num_layers or 0)]


def _sparsity_to(value: object, scope: Scope) -> None:
    if value is not None and value != _sparsity(scope):
        raise RefusedError(
            f"{scope.name}: llama.cpp's {scope.row.gguf} has a sparsity of {_SPARSITY} in the first {_SPARSE_LAYERS} "
            "layers, and of 0 in the others"
        )


def _sparsity_fill(scope: Scope) -> list[float]:
    """What a silent config means: small networks are not sparse."""
    found = _sparsity(scope)
    return found if len(found) > _SPARSE_LAYERS else [0.0] * len(found)


def _shared_from_20_to(value: object, scope: Scope) -> object:
    shared, n_layers = as_int(value, scope.name) or 0, scope.h.num_layers or 0
    if shared != max(0, n_layers - _KV_LAYERS):
        raise RefusedError(
            f"{scope.name} is {shared} of {n_layers} layers: llama.cpp's {scope.row.gguf} gives the first "
            f"{_KV_LAYERS} keys and values of their own"
        )
    return _shared_kv_to(value, scope)


def _width_a_layer_to(value: object, scope: Scope) -> list[object] | None:
    widths = scope.h.extra.get(scope.name)
    if isinstance(widths, list) and widths.count(widths[0]) != len(widths):
        raise RefusedError(f"{scope.name} differs between layers: llama.cpp's {scope.row.gguf} has one for all")
    return None if value is None else [value] * (scope.h.num_layers or 0)


def _scale_of_range(value: object, scope: Scope) -> object:
    """One over the range of the first weights, where the config does not name the scale."""
    spread = as_float(scope.config("initializer_range"), "initializer_range")
    return 1 / spread if value is None and spread else DEFAULT


def _passes(scope: Scope, layers: int) -> int | None:
    """How many layers a token passes, of two stacks that run in cycles."""
    high, low = scope.size("H_cycles"), scope.size("L_cycles")
    return None if high is None or low is None else layers * high * (low + 1)


def _layers_of_stack_settle(value: object, scope: Scope) -> object:
    """A config that is silent counts the layers of a stack where others count all that a token passes."""
    layers = scope.h.num_layers
    if value is not None or layers is None:
        return DEFAULT
    return ConfigKeys({scope.name: layers, "num_hidden_layers": _passes(scope, layers)})


def _layers_of_stack_to(value: object, scope: Scope) -> int | None:
    layers = as_int(value, scope.name)
    passed = None if layers is None else _passes(scope, layers)
    if passed is not None and passed != scope.h.num_layers:
        raise RefusedError(
            f"num_hidden_layers is {scope.h.num_layers}, but {scope.name}, H_cycles and L_cycles make it {passed}"
        )
    return layers


LAYER_CONVERTERS: dict[str, Converter] = {
    "one_more": Converter(
        lambda value, scope: value - 1 if isinstance(value, int) and value else None,
        lambda value, scope: value + 1 if isinstance(value, int) else DEFAULT,
    ),
    "scale_of_range": Converter(settle=_scale_of_range),
    "layers_of_stack": Converter(_layers_of_stack_to, settle=_layers_of_stack_settle),
    "layer_types": LAYER_TYPES,
    "last_full_layer_types": replace(
        LAYER_TYPES, fill=lambda scope: _last_full(layer_types_fill(scope)), settle=_last_full_settle
    ),
    "global_heads": Converter(_global_heads_to, settle=_global_heads_settle),
    "global_kv_heads": Converter(fill=lambda scope: scope.h.num_kv_heads),
    "window_heads": Converter(_window_heads_to),
    "window_kv_heads": Converter(_window_kv_heads_to, _window_kv_heads_from),
    "double_wide": Converter(_double_wide_to, _double_wide_from),
    "shared_kv": Converter(_shared_kv_to, lambda value, scope: value or 0),
    "values_are_keys": Converter(from_gguf=_values_are_keys_from),
    "number_or_0": Converter(lambda value, scope: value or 0, lambda value, scope: value or 0),
    "row_a_token": Converter(_n_tokens_to, _n_tokens_from),
    "width_a_layer": Converter(_width_a_layer_to),
    "shared_kv_from_20": Converter(_shared_from_20_to, lambda value, scope: value or 0),
    "ten_sparse_layers": Converter(_sparsity_to, lambda value, scope: _sparsity(scope), _sparsity_fill),
    "positive": Converter(lambda value, scope: value or None, lambda value, scope: value or 0),
}
"""What a Key's `via` names, as in arch.values.CONVERTERS."""
