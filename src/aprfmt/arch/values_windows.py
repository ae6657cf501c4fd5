"""Converters of networks with a window in some of their layers: which these are, their heads and their rotation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from aprfmt.arch.converter import DEFAULT, ConfigKeys, Converter, Scope, nothing
from aprfmt.arch.fields import as_float, as_int, as_mapping, shorten
from aprfmt.arch.grammar import layer_kinds
from aprfmt.arch.values_layers import (
    FULL,
    LAYER_TYPES,
    SLIDING,
    flags_of,
    kinds_of,
    layer_types_from,
    layer_types_to,
    periodic,
    slides_of,
)
from aprfmt.errors import CorruptError, RefusedError

_FOURTH = 4
"""Of the layers of some families llama.cpp lets each fourth see everything, and rotates it or not by that."""


def _fourth_full_to(value: object, scope: Scope) -> None:
    kinds = value if isinstance(value, list) else []
    if kinds and slides_of(kinds) != periodic(_FOURTH, len(kinds)):
        raise RefusedError(f"{scope.name}: llama.cpp's {scope.row.gguf} lets exactly every fourth layer see everything")


def _fourth_full(scope: Scope) -> list[str] | None:
    period = as_int(scope.config("global_attn_every_n_layers"), "global_attn_every_n_layers") or _FOURTH
    return None if scope.h.num_layers is None else kinds_of(periodic(period, scope.h.num_layers))


def _dense_first(scope: Scope) -> list[str] | None:
    """Every fourth layer sees everything, the first among them."""
    return None if scope.h.num_layers is None else kinds_of(periodic(_FOURTH, scope.h.num_layers, first=0))


def _dense_prefix(scope: Scope) -> list[str] | None:
    """Layers without experts stand first and have a period of their own."""
    n_layers, dense = scope.h.num_layers, scope.size("first_k_dense_replace") or 0
    own = as_int(scope.config("prefix_dense_sliding_window_pattern"), "prefix_dense_sliding_window_pattern") or 1
    pattern = scope.h.extra.get("sliding_window_pattern", scope.defaults.get("sliding_window_pattern"))
    if n_layers is None:
        return None
    rest = periodic(as_int(pattern, "sliding_window_pattern") or _FOURTH, max(0, n_layers - dense))
    return kinds_of([*periodic(own, min(dense, n_layers)), *rest])


def _rope_pattern_to(value: object, scope: Scope) -> list[bool] | None:
    """Which layers are rotated, where not all are, from the base frequency of each: 0 for those that are not."""
    listed = value if value is not None else scope.h.extra.get("no_rope_layers")
    if listed is None:
        return None
    if not isinstance(listed, list):
        raise CorruptError(f"{scope.name} is not a list")
    if value is not None and {theta for theta in listed if theta} - {scope.h.rope_theta}:
        raise RefusedError(f"{scope.name}: a GGUF of {scope.row.gguf} has one base frequency for all layers")
    return None if all(listed) else [bool(item) for item in listed]


def _rope_pattern_from(value: object, scope: Scope) -> object:
    return [scope.h.rope_theta if rotated else 0 for rotated in value] if isinstance(value, list) else DEFAULT


def _own_dense_first_to(value: object, scope: Scope) -> list[bool] | None:
    """Which layers have a window, where they are not those that llama.cpp takes by itself."""
    slides = slides_of(value) if value is not None else []
    return None if not any(slides) or slides == periodic(_FOURTH, len(slides), first=0) else slides


def _own_dense_first_from(value: object, scope: Scope) -> object:
    if value is None and scope.gguf("attention.sliding_window"):
        return _dense_first(scope)
    return layer_types_from(value, scope) if value is not None else [FULL] * (scope.h.num_layers or 0)


def _heads_a_layer_to(value: object, scope: Scope) -> object:
    return value or [scope.h.num_heads] * (scope.h.num_layers or 0)


def _heads_a_layer_from(value: object, scope: Scope) -> object:
    """Heads of each layer; the config's one number is that of the first."""
    if not isinstance(value, list) or not value:
        return DEFAULT if value is None else ConfigKeys(num_attention_heads=value)
    return ConfigKeys(num_attention_heads=value[0], num_attention_heads_per_layer=value)


def _window_rotary_to(value: object, scope: Scope) -> int | None:
    """Rotated values of a head in layers with a window."""
    part = _window_rope(scope).get("partial_rotary_factor", 1.0)
    number = as_float(part, "partial_rotary_factor")
    return None if number is None or not scope.h.head_dim else int(scope.h.head_dim * number)


def _window_rotary_from(value: object, scope: Scope) -> object:
    count, size, rope = as_int(value, scope.key.gguf), scope.h.head_dim, _window_rope(scope)
    if count and size and isinstance(rope, dict):
        rope["partial_rotary_factor"] = shorten(count / size)
    return DEFAULT


def _window_rope(scope: Scope) -> Mapping[str, object]:
    return as_mapping(as_mapping(scope.h.extra.get("rope_layers")).get(SLIDING))


def _window_theta_to(value: object, scope: Scope) -> None:
    """llama.cpp rotates the layers with a window and no others, all by one base frequency."""
    kinds = scope.h.extra.get("layer_types")
    if not isinstance(value, list) or not isinstance(kinds, list):
        return
    if [theta or 0 for theta in value] != [scope.h.rope_theta if one else 0 for one in slides_of(kinds)]:
        raise RefusedError(
            f"{scope.name}: llama.cpp's {scope.row.gguf} rotates the layers with a window, and no others"
        )


def _window_theta_from(value: object, scope: Scope) -> object:
    kinds = scope.h.extra.get("layer_types")
    return [scope.h.rope_theta if one else 0 for one in slides_of(kinds)] if isinstance(kinds, list) else DEFAULT


def _both_kinds(slides: list[bool], scope: Scope) -> object:
    """Which layers have a window, in each spelling that the family's configs have for it."""
    kinds = ["sliding_attention" if one else "full_attention" for one in slides]
    if not any("hybrid_layer_pattern" in key.hf for key in scope.row.keys):
        return kinds
    return ConfigKeys(layer_types=kinds, hybrid_layer_pattern=[int(one) for one in slides])


def _hybrid_settle(value: object, scope: Scope) -> object:
    """By words, else by flags; else every sixth layer, and the first, sees everything."""
    flags, n_layers = scope.h.extra.get("hybrid_layer_pattern"), scope.h.num_layers
    if isinstance(value, list):
        return _both_kinds([kind == "sliding_attention" for kind in value], scope)
    if flags is not None:
        return _both_kinds(flags_of(flags, "hybrid_layer_pattern"), scope)
    return DEFAULT if n_layers is None else _both_kinds([i > 0 and (i + 1) % 6 > 0 for i in range(n_layers)], scope)


def _hybrid_to(value: object, scope: Scope) -> list[bool] | None:
    return (
        None if value is None else [kind == "sliding_attention" for kind in value] if isinstance(value, list) else None
    )


def _hybrid_from(value: object, scope: Scope) -> object:
    return DEFAULT if value is None else _both_kinds(flags_of(value, scope.key.gguf), scope)


def _heads_by_window_to(value: object, scope: Scope) -> list[int] | None:
    """Key-value heads of each layer: of layers with a window, and of the others."""
    full, windowed = as_int(value, scope.name), as_int(scope.h.extra.get(_WINDOWED), _WINDOWED)
    kinds = layer_kinds(scope.h.extra)
    if full is None or windowed is None or kinds is None:
        return None
    return [windowed if kind == "sliding_attention" else full for kind in kinds]


_WINDOWED = "swa_num_key_value_heads"


def _heads_by_window_from(value: object, scope: Scope) -> object:
    """What the layers without a window have."""
    found = _of_kind(value, scope, slides=False)
    return found if found is not None else _of_kind(value, scope, slides=True)


def _of_kind(value: object, scope: Scope, *, slides: bool) -> int | None:
    flags = scope.gguf("attention.sliding_window_pattern")
    heads = value if isinstance(value, list) else [value] * (scope.h.num_layers or 0)
    if not isinstance(flags, list):
        return None
    return next((as_int(n, scope.name) for n, flag in zip(heads, flags, strict=False) if bool(flag) is slides), None)


def _windowed_from(value: object, scope: Scope) -> object:
    heads = scope.gguf("attention.head_count_kv")
    found = _of_kind(heads, scope, slides=True)
    return DEFAULT if found is None else found


def _twice_the_heads(scope: Scope) -> int | None:
    """What transformers' class gives layers with a window."""
    return None if scope.h.num_kv_heads is None else 2 * scope.h.num_kv_heads


_SLIDING_HEADS = ("num_sliding_attention_heads", "swa_num_attention_heads")


def _step_heads_to(value: object, scope: Scope) -> list[int] | None:
    """Heads of each layer, draft layers that the kinds name among them."""
    windowed = next((as_int(scope.h.extra[key], key) for key in _SLIDING_HEADS if key in scope.h.extra), None)
    full = as_int(value, scope.name)
    kinds = layer_kinds(scope.h.extra)
    if full is None or kinds is None:
        return None
    return [full if windowed is None or kind != "sliding_attention" else windowed for kind in kinds]


def _windowed_heads_from(value: object, scope: Scope) -> object:
    found = _of_kind(scope.gguf("attention.head_count"), scope, slides=True)
    return DEFAULT if found is None else found


def _same_heads_to(value: object, scope: Scope) -> list[int] | None:
    count, kinds = as_int(value, scope.name), layer_kinds(scope.h.extra)
    return None if count is None or kinds is None else [count] * len(kinds)


def _first_of(value: object, scope: Scope) -> object:
    return as_int(value[0] if isinstance(value, list) and value else value, scope.key.gguf)


_HALF = "partial_rotary_factor"


def _rotated_parts(scope: Scope) -> list[float]:
    """What is rotated of a head: all where there is a window, half where there is none."""
    return [1.0 if kind == "sliding_attention" else 0.5 for kind in layer_kinds(scope.h.extra) or ()]


def _rotary_parts_settle(value: object, scope: Scope) -> object:
    return DEFAULT if value is not None else _rotated_parts(scope) or DEFAULT


def _half_rotary_to(value: object, scope: Scope) -> None:
    if value is not None and value != _rotated_parts(scope):
        raise RefusedError(
            f"{scope.name}: llama.cpp's {scope.row.gguf} rotates all of a head where there is a window, half elsewhere"
        )


def _half_rotary_from(value: object, scope: Scope) -> object:
    scope.h.extra[_HALF] = 0.5
    return _rotated_parts(scope) or DEFAULT


def _inclusive_window(value: object, scope: Scope) -> object:
    """`sliding_window_size` counts the positions before the last one."""
    size = as_int(scope.h.extra.pop("sliding_window_size", None), "sliding_window_size")
    return DEFAULT if size is None or scope.h.hf_model_type != "mimo_v2_flash" else size + 1


def _fused_from(value: object, scope: Scope) -> object:
    return "fused_qkv" if "blk.0.attn_qkv.weight" in scope.names else DEFAULT


def _fused_to(value: object, scope: Scope) -> None:
    """FP8 releases store the fused rows in the order of the devices that they were divided among."""
    packed = as_mapping(scope.h.extra.get("quantization_config"))
    if value == "fused_qkv" and packed.get("quant_method") == "fp8":
        raise RefusedError(
            f"{scope.name} is {value!r} and the weights are FP8: the rows of qkv_proj stand in an order of devices "
            "that no key tells",
            hint="an .apr or a folder can hold the model; for a GGUF take the BF16 release",
        )


WINDOWS: dict[str, Converter] = {
    "every_fourth_full": Converter(_fourth_full_to, lambda value, scope: _fourth_full(scope), _fourth_full),
    "every_fourth_unchunked": Converter(_fourth_full_to, lambda value, scope: None),
    "dense_first_layer_types": replace(LAYER_TYPES, fill=_dense_first),
    "dense_prefix_layer_types": replace(LAYER_TYPES, fill=_dense_prefix),
    "full_unless_named": replace(
        LAYER_TYPES,
        to_gguf=lambda value, scope: layer_types_to(value, scope) if scope.config("sliding_window") else None,
        fill=lambda scope: [FULL] * (scope.h.num_layers or 0),
    ),
    "own_dense_first": Converter(
        _own_dense_first_to, _own_dense_first_from, lambda scope: [FULL] * (scope.h.num_layers or 0)
    ),
    "heads_a_layer": Converter(_heads_a_layer_to, _heads_a_layer_from),
    "window_rotary": Converter(_window_rotary_to, _window_rotary_from),
    "last_dense_layer_types": replace(
        LAYER_TYPES, fill=lambda scope: kinds_of([*reversed(periodic(_FOURTH, scope.h.num_layers or 0, first=0))])
    ),
    "rotated_with_window": Converter(_window_theta_to, _window_theta_from),
    "same_theta": Converter(from_gguf=lambda value, scope: scope.h.rope_theta),
    "rope_pattern": Converter(_rope_pattern_to, _rope_pattern_from),
    "heads_by_window": Converter(_heads_by_window_to, _heads_by_window_from),
    "windowed_kv_heads": Converter(nothing, _windowed_from, _twice_the_heads),
    "mimo_window": Converter(settle=_inclusive_window),
    "hybrid_layers": Converter(_hybrid_to, _hybrid_from, settle=_hybrid_settle),
    "fused_by_tensors": Converter(_fused_to, _fused_from),
    "step_heads": Converter(_step_heads_to, _heads_by_window_from),
    "windowed_heads": Converter(nothing, _windowed_heads_from, lambda scope: scope.h.num_heads),
    "same_heads": Converter(_same_heads_to, _first_of),
    "half_rotary": Converter(_half_rotary_to, _half_rotary_from, settle=_rotary_parts_settle),
}
"""What a Key's `via` names, as in arch.values.CONVERTERS."""
