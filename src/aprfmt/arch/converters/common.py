"""Converters that many families share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TypeGuard

from aprfmt.arch import rope, rope_gguf, yarn
from aprfmt.arch.converter import DEFAULT, ConfigKeys, Convert, Converter, GgufKeys, Scope, default, nothing, words
from aprfmt.arch.converters.layers import (
    FULL,
    LINEAR,
    SLIDING,
    layer_types_derive,
    layer_types_from_gguf,
    layer_types_to_gguf,
    periodic,
    plain_kinds,
)
from aprfmt.arch.fields import as_float, as_id, as_int, as_mapping, from_f32, shorten
from aprfmt.arch.grammar import FIELD_OF_SIZE, evaluate, layer_kinds, size_words, sizes_of
from aprfmt.arch.rope import scaling_of
from aprfmt.arch.row import HEAD_DIM, OF_TENSOR, ROPE, ROTARY_DIM, SHARED_ROTARY_DIM, WINDOW
from aprfmt.errors import CorruptError, RefusedError


def is_list(value: object) -> TypeGuard[Iterable[object]]:
    """Whether the value is a list or an array rather than text."""
    return isinstance(value, Iterable) and not isinstance(value, str | bytes)


of_tensor = Converter(role=OF_TENSOR)


def numbers(value: object, name: str) -> list[int]:
    """A list of integers; `name` is its config.json key. Raises RefusedError for anything else."""
    if not isinstance(value, list) or not all(type(number) is int for number in value):
        raise RefusedError(f"{name} is {value!r:.40}, not a list of integers")
    return list(value)


def _rope_from_gguf(value: object, scope: Scope) -> object:
    rope_gguf.from_gguf(scope.h, scope.row, scope.kv, scope.defaults)
    return DEFAULT


def _rotary_dim_from_gguf(value: object, scope: Scope) -> object:
    rope.set_rotary_dim(scope.h, as_int(value, "rope.dimension_count"), scope.defaults)
    return DEFAULT


def head_dim_is_named(scope: Scope) -> bool:
    """Whether the head size must be written: the source states it, or nothing else implies it."""
    h = scope.h
    named = h.extra.get("head_dim") or scope.defaults.get("head_dim")
    return h.head_dim is not None and bool(named or h.head_dim != h.plain_head_dim)


def _head_dim_normalize(value: object, scope: Scope) -> object:
    if scope.h.head_dim:
        scope.h.extra["head_dim"] = scope.h.head_dim
    return DEFAULT


def _head_dim_to_gguf(value: object, scope: Scope) -> GgufKeys | None:
    if not head_dim_is_named(scope):
        return None
    return GgufKeys({f"attention.{name}_length": ("u32", scope.h.head_dim) for name in ("key", "value")})


def _head_dim_from_gguf(value: object, scope: Scope) -> object:
    scope.h.head_dim = as_int(value, "attention.key_length")
    return _head_dim_normalize(value, scope)


def _has_switch(scope: Scope) -> bool:
    """Whether the family has the switch `use_sliding_window`."""
    return "use_sliding_window" in scope.defaults


def window_to_gguf(value: object, scope: Scope) -> int | None:
    """The window, None if the network does not use one."""
    window, used = as_int(value, "sliding_window"), scope.h.extra.get("use_sliding_window")
    return None if used is False or (_has_switch(scope) and not used) else window or None


def _window_from_gguf(value: object, scope: Scope) -> object:
    window = as_int(value, "sliding_window") or None
    if _has_switch(scope):
        return ConfigKeys({scope.name: window, "use_sliding_window": window is not None})
    return window


def _yarn_log_to_gguf(value: object, scope: Scope) -> float | None:
    if scaling_of(scope.h).get("rope_type") not in ("yarn", "linear"):
        return None
    return yarn.log_unit(scope.row.gguf) * rope_gguf.runtime_scales(scope.h, scope.row)[0] or None


def unless_named(otherwise: object) -> Converter:
    """The same on both sides; a GGUF without the key means `otherwise`."""
    return Converter(from_gguf=lambda value, scope: otherwise if value is None else value)


def times_hidden(factor: object, scope: Scope) -> int | None:
    """A multiple of the hidden size as a width."""
    number, hidden = as_float(factor, scope.name), scope.h.hidden_size
    return None if number is None or hidden is None else int(number * hidden)


def over_hidden(width: int | None, scope: Scope) -> object:
    """A width as a multiple of the hidden size, an integer if possible."""
    hidden = scope.h.hidden_size
    if not width or not hidden:
        return DEFAULT
    return width // hidden if width % hidden == 0 else width / hidden


window = Converter(window_to_gguf, _window_from_gguf, role=WINDOW)
yarn_log = Converter(_yarn_log_to_gguf, default)


def _whole_heads_to_gguf(value: object, scope: Scope) -> None:
    """llama.cpp supports projections of hidden_size only."""
    h = scope.h
    if h.head_dim and h.hidden_size and h.num_heads and h.num_heads * h.head_dim != h.hidden_size:
        raise RefusedError(
            f"llama.cpp's {scope.row.gguf} needs heads times head_dim to equal the hidden size: {h.num_heads} x "
            f"{h.head_dim} is not {h.hidden_size}"
        )


def _equal_heads_to_gguf(value: object, scope: Scope) -> None:
    h = scope.h
    if h.num_kv_heads != h.num_heads:
        raise RefusedError(
            f"llama.cpp's {scope.row.gguf} does not support grouped-query attention: {h.num_kv_heads} key-value heads "
            f"for {h.num_heads} heads"
        )


def _sliding_to_gguf(value: object, scope: Scope) -> object:
    """A network without a window has no window pattern."""
    return layer_types_to_gguf(value, scope) if window_to_gguf(scope.h.extra.get("sliding_window"), scope) else None


def _sliding_from_gguf(value: object, scope: Scope) -> object:
    if value is None and not scope.gguf("attention.sliding_window"):
        return [FULL] * (scope.h.num_layers or 0)
    return layer_types_from_gguf(value, scope)


BETA, PADDING = "llama_4_scaling_beta", "tokenizer.ggml.padding_token_id"
_NO_CAP = float(1 << 20)
"""A soft cap so large that it changes no float32 logit: llama.cpp cannot disable it."""


def _any_window_to_gguf(value: object, scope: Scope) -> int | None:
    """llama.cpp's Gemma 3 takes a window to mean that some layer has one."""
    kinds = scope.h.extra.get("layer_types")
    none_slides = isinstance(kinds, list) and SLIDING not in kinds
    return None if none_slides else as_int(value, scope.name) or None


def _softcap_from_gguf(value: object, scope: Scope) -> object:
    number = from_f32(value, scope.key.gguf)
    return DEFAULT if number is None else number if 0 < number < _NO_CAP else None


def _cap_or_30_from_gguf(value: object, scope: Scope) -> float | None:
    """The soft cap of a loader that defaults to 30 and treats 0 as disabled."""
    return 30.0 if value is None else from_f32(value, scope.key.gguf) or None


def _unscaled_to_gguf(value: object, scope: Scope) -> str | None:
    return "none" if scaling_of(scope.h).get("rope_type", "default") in ("default", "dynamic") else None


def gguf_int(scope: Scope, suffix: str) -> int:
    """A number of the GGUF by its key without the architecture prefix; 0 if absent. Raises CorruptError."""
    return as_int(scope.gguf(suffix), suffix) or 0


def computed(size: str, from_gguf: Convert = default) -> Converter:
    """A GGUF key that is a size expression of config.json keys: "kv_lora_rank+qk_rope_head_dim" (see arch.grammar).

    A size of 0 is omitted.
    """

    def to_gguf(value: object, scope: Scope) -> int | None:
        for word in size_words(size) - FIELD_OF_SIZE.keys():
            scope.size(word)  # raises CorruptError for anything else
        return evaluate(size, sizes_of(scope.h)) or None

    return Converter(to_gguf, from_gguf)


def integer(to_gguf: Callable[[int], object], from_gguf: Callable[[int], object]) -> Converter:
    """An integer that one side counts differently; None stays None."""

    def there(value: object, scope: Scope) -> object:
        number = as_int(value, scope.name)
        return None if number is None else to_gguf(number)

    def back(value: object, scope: Scope) -> object:
        number = as_int(value, scope.key.gguf)
        return DEFAULT if number is None else from_gguf(number)

    return Converter(there, back)


def by_tensor(name: str, *, there: object = True, absent: object = False) -> Converter:
    """A switch that a GGUF states by the presence of the tensor `name`; the default if its tensors are unknown."""
    return Converter(
        from_gguf=lambda value, scope: (there if name in scope.names else absent) if scope.names else DEFAULT
    )


def _mla_key_from_gguf(value: object, scope: Scope) -> object:
    """The unrotated part of a key. Files with full keys state its length like any other family."""
    length = as_int(value, scope.key.gguf) or gguf_int(scope, "attention.key_length")
    return length - gguf_int(scope, "rope.dimension_count") if length else DEFAULT


def _mla_value_from_gguf(value: object, scope: Scope) -> object:
    return as_int(value, scope.key.gguf) or gguf_int(scope, "attention.value_length") or DEFAULT


def _shared_width(value: object, scope: Scope) -> int | None:
    count = scope.size("moe_num_shared_experts") or scope.size("num_shared_experts")
    return count * scope.h.moe_intermediate_size if count and scope.h.moe_intermediate_size else None


def dense_first(value: object, scope: Scope) -> object:
    """The number of leading dense layers in a per-layer list; one if nothing says it."""
    if not isinstance(value, list):
        return DEFAULT if scope.config("first_k_dense_replace") is not None else ConfigKeys(first_k_dense_replace=1)
    count = next((n for n, kind in enumerate(value) if kind != "dense"), len(value))
    return ConfigKeys(mlp_layer_types=value, first_k_dense_replace=count)


def dense_first_to_gguf(value: object, scope: Scope) -> None:
    """Writes no key. Raises RefusedError for a dense layer after the first MoE layer."""
    if isinstance(value, list) and "dense" in value[scope.size("first_k_dense_replace") or 0 :]:
        raise RefusedError(
            f"{scope.name} has dense layers after MoE layers, which a GGUF of {scope.row.gguf!r} cannot express"
        )


ATTENTION = (FULL, SLIDING, "attention")


def _kinds(scope: Scope) -> list[object]:
    kinds = layer_kinds(scope.h.extra, scope.h.num_layers)
    if kinds is None:
        raise CorruptError("layer_types is not a list")
    return kinds


def _heads(scope: Scope) -> int | None:
    name = next((key.hf[0] for key in scope.row.keys if key.gguf == "ssm.time_step_rank"), "")
    return as_int(scope.h.extra.get(name), name)


def _inner_to_gguf(value: object, scope: Scope) -> int | None:
    """Values per head -> values of all heads, whose number is the key `ssm.time_step_rank`."""
    size, heads = as_int(value, scope.name), _heads(scope)
    return None if size is None or heads is None else size * heads


def _inner_from_gguf(value: object, scope: Scope) -> object:
    inner, heads = (as_int(scope.gguf(key), key) for key in ("ssm.inner_size", "ssm.time_step_rank"))
    return inner // heads if inner and heads else DEFAULT


def _window_rope(scope: Scope) -> Mapping[str, object]:
    return as_mapping(as_mapping(scope.h.extra.get("rope_layers")).get(SLIDING))


def _window_rotary_to_gguf(value: object, scope: Scope) -> int | None:
    """Rotated dimensions of a head in sliding-window layers."""
    part = as_float(_window_rope(scope).get("partial_rotary_factor"), "partial_rotary_factor")
    return None if scope.h.head_dim is None else int(scope.h.head_dim * (1.0 if part is None else part))


def _window_rotary_from_gguf(value: object, scope: Scope) -> object:
    count, size, layers = as_int(value, scope.key.gguf), scope.h.head_dim, as_mapping(scope.h.extra.get("rope_layers"))
    if count is not None and size and SLIDING in layers:
        sliding = {**_window_rope(scope), "partial_rotary_factor": shorten(count / size)}
        scope.h.extra["rope_layers"] = {**layers, SLIDING: sliding}
    return DEFAULT


def _recurrent_to_gguf(value: object, scope: Scope) -> list[bool] | None:
    return None if value is None else [kind not in ATTENTION for kind in _kinds(scope)]


def _linear(flags: list[bool]) -> list[str]:
    return [LINEAR if flag else FULL for flag in flags]


def _every_fourth(scope: Scope, interval: object = None) -> list[str] | None:
    """Full attention in the last of every `full_attention_interval` layers."""
    interval = interval or scope.h.extra.get("full_attention_interval", scope.defaults["full_attention_interval"])
    period, n_layers = as_int(interval, "full_attention_interval"), scope.h.num_layers
    if not period or n_layers is None:
        return None
    return _linear(periodic(period, n_layers))


def _recurrent_from_gguf(value: object, scope: Scope) -> object:
    if not isinstance(value, list):
        return _every_fourth(scope, scope.gguf("full_attention_interval"))
    return _linear([bool(flag) for flag in value])


def per_layer(value: object, scope: Scope, *kinds: str) -> list[int] | None:
    """A number in the layers of some types, 0 in the others."""
    number = as_int(value, scope.name)
    return None if number is None else [number if kind in kinds else 0 for kind in _kinds(scope)]


def largest(value: object, scope: Scope) -> object:
    """The common value of the layers that have it."""
    heads = value if isinstance(value, list) else [value]
    return max((n for n in heads if isinstance(n, int)), default=0) or DEFAULT


rope_keys = Converter(lambda value, scope: GgufKeys(rope_gguf.to_gguf(scope.h, scope.row)), _rope_from_gguf, role=ROPE)
rotary_dim = Converter(lambda value, scope: rope.rotary_dim(scope.h), _rotary_dim_from_gguf, role=ROTARY_DIM)
shared_rotary_dim = Converter(
    lambda value, scope: rope.rotary_dim(scope.h), _rotary_dim_from_gguf, role=SHARED_ROTARY_DIM
)
head_dim = Converter(_head_dim_to_gguf, _head_dim_from_gguf, normalize=_head_dim_normalize, role=HEAD_DIM)
gating = words({"softmax": 1, "sigmoid": 2, "sqrtsoftplus": 4})
whole_heads = Converter(_whole_heads_to_gguf, default)
sliding_layers = Converter(_sliding_to_gguf, _sliding_from_gguf, layer_types_derive)
pad_token = Converter(nothing, lambda value, scope: as_id(scope.kv.get(PADDING), PADDING))
any_window = Converter(_any_window_to_gguf, lambda value, scope: as_int(value, scope.key.gguf) or DEFAULT)
softcap = Converter(lambda value, scope: as_float(value, scope.name) or _NO_CAP, _softcap_from_gguf)
zero_cap = Converter(lambda value, scope: value or 0.0, _cap_or_30_from_gguf)
unscaled = Converter(_unscaled_to_gguf, default)
no_rope_scaling = Converter(lambda value, scope: None if scope.h.extra.get("rope_scaling") else "none", default)
absent_false = unless_named(False)
absent_0 = unless_named(0)
absent_1 = unless_named(1)
absent_1_0 = unless_named(1.0)
or_zero = Converter(lambda value, scope: value or 0, lambda value, scope: value or None)
only_true = Converter(lambda value, scope: value or None, lambda value, scope: bool(value))
mla_kv_heads = Converter(lambda value, scope: 1, lambda value, scope: scope.h.num_heads)
mla_key_width = computed("kv_lora_rank+qk_rope_head_dim")
mla_value_width = computed("kv_lora_rank")
mla_key_length = computed("qk_nope_head_dim+qk_rope_head_dim", _mla_key_from_gguf)
mla_value_length = Converter(from_gguf=_mla_value_from_gguf)
shared_width = Converter(_shared_width)
drafts = Converter(from_gguf=lambda value, scope: value or 0)
some_drafts = Converter(lambda value, scope: value or None, lambda value, scope: value or DEFAULT)
leading_dense = Converter(dense_first_to_gguf, default, normalize=dense_first)
expand = Converter(times_hidden, lambda value, scope: over_hidden(as_int(value, scope.key.gguf), scope))
equal_heads = Converter(_equal_heads_to_gguf, default)
inner_size = Converter(_inner_to_gguf, _inner_from_gguf)
window_rotary = Converter(_window_rotary_to_gguf, _window_rotary_from_gguf)
recurrent_layers = Converter(_recurrent_to_gguf, _recurrent_from_gguf, _every_fourth)
attention_layers = Converter(lambda value, scope: per_layer(value, scope, *ATTENTION), largest)
attending_layers = replace(recurrent_layers, normalize=plain_kinds)


def _nope_from_gguf(value: object, scope: Scope) -> object:
    length, rotated = as_int(value, scope.key.gguf), scope.h.head_dim
    return length - rotated if length and rotated and length >= rotated else DEFAULT


nope_and_rope = computed("qk_nope_head_dim+head_dim", _nope_from_gguf)
