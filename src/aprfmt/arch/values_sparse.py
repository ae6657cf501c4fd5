"""Converters of networks that attend to chosen positions, or have many experts beside windows. See arch.values."""

from __future__ import annotations

import math

from aprfmt.arch.converter import DEFAULT, ConfigKeys, Convert, Converter, Scope, default, nothing
from aprfmt.arch.fields import as_float, as_int, as_mapping, from_f32
from aprfmt.arch.grammar import BLOCKWISE, layer_kinds
from aprfmt.errors import CorruptError, RefusedError

_OWN, _SHARED = "full", "shared"
_LONG = 1 << 20
"""From so many positions on llama.cpp takes a GLM for 5.2, where few layers have an indexer, unless a key says more."""


_TURN = 64
"""Rows of the smallest matrix by which the runtime turns an indexer's queries and keys."""


def _turned_keys_to(value: object, scope: Scope) -> object:
    if isinstance(value, int) and value % _TURN:
        raise RefusedError(f"{scope.name} is {value}: llama.cpp's {scope.row.gguf} computes multiples of {_TURN} only")
    return value


def _glm_5_2(n_layers: int) -> list[str]:
    return [_OWN if i < 2 or (i - 2) % 4 == 0 else _SHARED for i in range(n_layers)]


def _indexers_to(value: object, scope: Scope) -> list[bool] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not set(map(str, value)) <= {_OWN, _SHARED}:
        raise CorruptError(f"{scope.name} may only have the words {_OWN!r} and {_SHARED!r}")
    return [kind == _OWN for kind in value]


def _indexers_from(value: object, scope: Scope) -> object:
    if isinstance(value, list):
        return [_OWN if flag else _SHARED for flag in value]
    n_layers = scope.h.num_layers or 0
    return _glm_5_2(n_layers) if (scope.h.max_position_embeddings or 0) >= _LONG else [_OWN] * n_layers


def _indexers_settle(value: object, scope: Scope) -> object:
    """By a pattern of letters (F full, S shared), else by a step and the layer from which on it counts."""
    extra, n_layers = scope.h.extra, scope.h.num_layers
    pattern = extra.pop("index_topk_pattern", None)
    names = ("index_topk_freq", "index_skip_topk_offset")
    step, start = (as_int(extra.pop(name, None), name) for name in names)
    if value is not None or n_layers is None:
        return DEFAULT
    if isinstance(pattern, str):
        return [_OWN if letter == "F" else _SHARED for letter in pattern]
    if pattern is not None:
        return pattern
    start = 2 if start is None else start
    return [_SHARED if max(i - start + 1, 0) % max(step or 1, 1) else _OWN for i in range(n_layers)]


def _hy_indexers(value: object, scope: Scope) -> object:
    """The first layer, and then every fourth from the second on, unless a config says it."""
    n_layers = scope.h.num_layers
    if value is not None or n_layers is None:
        return DEFAULT
    return [_OWN if i == 0 or (i - 1) % 4 == 0 else _SHARED for i in range(n_layers)]


def _one_for_all_to(value: object, scope: Scope) -> list[float] | None:
    """A number as one a layer; 0 is none."""
    number = as_float(value, scope.name)
    return [number] * scope.h.num_layers if number and scope.h.num_layers else None


def _one_for_all_from(value: object, scope: Scope) -> object:
    found = value[0] if isinstance(value, list) and value else value
    return from_f32(found, scope.key.gguf) or 0.0


def _own_indexers_from(value: object, scope: Scope) -> object:
    return [_OWN if flag else _SHARED for flag in value] if isinstance(value, list) else DEFAULT


def _same_limit_to(value: object, scope: Scope) -> list[float] | None:
    return _one_for_all_to(scope.h.extra.get("swiglu_limit"), scope)


def _latent_or_linear_settle(value: object, scope: Scope) -> object:
    """Every fourth layer attends unless it is said; transformers says in this word that an indexer chooses."""
    if isinstance(value, list):
        return ["full_attention" if kind == "indexed_attention" else kind for kind in value]
    n_layers = scope.h.num_layers
    return DEFAULT if n_layers is None else [_ATTENDS if i % 4 == 3 else _LINEAR for i in range(n_layers)]


def _latent_or_linear_from(value: object, scope: Scope) -> object:
    heads = scope.gguf("attention.head_count_kv")
    return [_ATTENDS if n else _LINEAR for n in heads] if isinstance(heads, list) else DEFAULT


_ATTENDS, _LINEAR = "full_attention", "linear_attention"


def _indexed_settle(value: object, scope: Scope) -> object:
    """transformers says in a word of its own that an indexer chooses."""
    if not isinstance(value, list):
        return DEFAULT
    return ["full_attention" if kind == "indexed_attention" else kind for kind in value]


def _indexed_to(value: object, scope: Scope) -> list[bool] | None:
    return [kind == "sliding_attention" for kind in value] if isinstance(value, list) else None


def _indexed_from(value: object, scope: Scope) -> object:
    if not isinstance(value, list):
        return DEFAULT
    return ["sliding_attention" if flag else "full_attention" for flag in value]


def _without_window_to(value: object, scope: Scope) -> list[bool] | None:
    kinds = layer_kinds(scope.h.extra)
    return None if kinds is None else [kind != "sliding_attention" for kind in kinds]


def _latent_scales(scope: Scope, applied: object) -> object:
    """What the latent vectors are multiplied by behind their norms, which a GGUF has in the weights of these."""
    ranks = {"q_lora_scale": "q_lora_rank", "kv_lora_scale": "kv_lora_rank", "swa_kv_lora_scale": "swa_kv_lora_rank"}
    hidden, extra = scope.h.hidden_size or 0, scope.h.extra
    for name, key in ranks.items():
        rank = as_int(extra.get(key), key)
        extra[name] = math.sqrt(hidden / rank) if applied and hidden and rank else 1.0
    return bool(applied)


def _swa_sum(*names: str) -> Convert:
    def to_gguf(value: object, scope: Scope) -> int | None:
        numbers = [as_int(scope.h.extra.get(name), name) for name in names]
        return None if None in numbers else sum(n or 0 for n in numbers)

    return to_gguf


def _swa_nope_from(value: object, scope: Scope) -> object:
    length, rotated = as_int(value, scope.key.gguf), as_int(scope.gguf("rope.dimension_count"), "rope.dimension_count")
    return DEFAULT if length is None or rotated is None or rotated > length else length - rotated


# --- layers with and without experts ---

_DENSE, _SPARSE = "dense", "sparse"


def _types(kinds: list[str], scope: Scope) -> object:
    """Which layers have experts, in each spelling that the family's configs have for it."""
    if not any("moe_layer_freq" in key.hf for key in scope.row.keys):
        return kinds
    return ConfigKeys(mlp_layer_types=kinds, moe_layer_freq=[int(kind == _SPARSE) for kind in kinds])


def _after(n_dense: int, n_layers: int) -> list[str]:
    return [_DENSE if i < n_dense else _SPARSE for i in range(n_layers)]


def _dense_settle(value: object, scope: Scope) -> object:
    """By a list of words or of flags, else by the number of dense layers at the beginning, which is 1 unless said."""
    extra, n_layers = scope.h.extra, scope.h.num_layers
    flags = extra.get("moe_layer_freq")
    first = as_int(extra.pop("first_k_dense_replace", None), "first_k_dense_replace")
    if isinstance(value, list):
        return _types([str(kind) for kind in value], scope)
    if isinstance(flags, list):
        return _types([_SPARSE if flag else _DENSE for flag in flags], scope)
    return DEFAULT if n_layers is None else _types(_after(1 if first is None else first, n_layers), scope)


def _dense_from(value: object, scope: Scope) -> object:
    """By the tensors: llama.cpp asks no key."""
    n_layers = scope.h.num_layers or 0
    if not scope.names:
        return _types(_after(1, n_layers), scope)
    routed = [f"blk.{i}.ffn_gate_inp.weight" in scope.names for i in range(n_layers)]
    return _types([_SPARSE if one else _DENSE for one in routed], scope)


_FREQUENCY = "sparse_attention_config.sparse_attention_freq"


def _counted_dense_settle(value: object, scope: Scope) -> object:
    flags = scope.h.extra.pop("moe_layer_freq", None)
    if value is not None or scope.h.num_layers is None:
        return DEFAULT
    if flags is None:
        return [_SPARSE] * scope.h.num_layers
    return [_SPARSE if flag else _DENSE for flag in _flags(flags, "moe_layer_freq")]


def _counted_dense_to(value: object, scope: Scope) -> int | None:
    """How many layers at the beginning are dense, and no others."""
    if not isinstance(value, list):
        return None
    n_dense = next((i for i, kind in enumerate(value) if kind != _DENSE), len(value))
    if _DENSE in value[n_dense:]:
        raise RefusedError(f"{scope.name} has dense layers after sparse ones, which llama.cpp does not load")
    return n_dense


def _counted_dense_from(value: object, scope: Scope) -> object:
    return _after(as_int(value, scope.key.gguf) or 0, scope.h.num_layers or 0)


def _where_sparse(scope: Scope) -> list[str]:
    """Blocks are chosen in the layers with experts: what llama.cpp takes for granted."""
    kinds = scope.h.extra.get("mlp_layer_types")
    return ["full_attention" if kind == _DENSE else BLOCKWISE for kind in kinds] if isinstance(kinds, list) else []


def _where_sparse_settle(value: object, scope: Scope) -> object:
    flags = scope.h.extra.pop(_FREQUENCY, None)
    if value is not None or scope.h.num_layers is None:
        return DEFAULT
    if flags is None:
        return ["full_attention"] * scope.h.num_layers
    return [BLOCKWISE if flag else "full_attention" for flag in _flags(flags, _FREQUENCY)]


def _where_sparse_to(value: object, scope: Scope) -> None:
    if value is not None and value != _where_sparse(scope):
        raise RefusedError(
            f"{scope.name}: llama.cpp's {scope.row.gguf} chooses blocks of positions in exactly the layers with experts"
        )


def _times_moe_width(value: object, scope: Scope) -> int | None:
    """A number of experts as the width of one as wide as all of them."""
    count, width = as_int(value, scope.name), scope.h.moe_intermediate_size
    return None if count is None or width is None else count * width


def _over_moe_width(value: object, scope: Scope) -> object:
    total, width = as_int(value, scope.key.gguf), scope.h.moe_intermediate_size
    return total // width if total is not None and width else DEFAULT


def _whole_experts(value: object, scope: Scope) -> int | None:
    """A width as a number of experts of the others' width."""
    total, width = as_int(value, scope.name), scope.h.moe_intermediate_size
    if total is None or not width:
        return None
    if total % width:
        raise RefusedError(f"{scope.name} is {total}: llama.cpp's {scope.row.gguf} knows multiples of {width} only")
    return total // width


# --- heads of layers with a window ---


def _flags(value: object, name: str) -> list[bool]:
    if not isinstance(value, list):
        raise CorruptError(f"{name} is not a list")
    return [bool(item) for item in value]


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
        return _both_kinds(_flags(flags, "hybrid_layer_pattern"), scope)
    return DEFAULT if n_layers is None else _both_kinds([i > 0 and (i + 1) % 6 > 0 for i in range(n_layers)], scope)


def _hybrid_to(value: object, scope: Scope) -> list[bool] | None:
    return (
        None if value is None else [kind == "sliding_attention" for kind in value] if isinstance(value, list) else None
    )


def _hybrid_from(value: object, scope: Scope) -> object:
    return DEFAULT if value is None else _both_kinds(_flags(value, scope.key.gguf), scope)


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


def _enumerated_dense_settle(value: object, scope: Scope) -> object:
    """By the layers with experts, which a text lists; all but the first three unless something is said."""
    listed, n_layers = scope.h.extra.pop("moe_layers_enum", None), scope.h.num_layers
    if value is not None or n_layers is None:
        return DEFAULT
    if listed is None:
        return _after(3, n_layers)
    if not isinstance(listed, str) or not all(part.strip().isdecimal() for part in listed.split(",") if part.strip()):
        raise CorruptError("moe_layers_enum is not a list of layers, separated by commas")
    routed = {int(part) for part in listed.split(",") if part.strip()}
    return [_SPARSE if i in routed else _DENSE for i in range(n_layers)]


def _limits_to(value: object, scope: Scope) -> list[float] | None:
    """Bounds of the gated values, 0 where a layer has none."""
    return [as_float(item, scope.name) or 0.0 for item in value] if isinstance(value, list) else None


def _limits_from(value: object, scope: Scope) -> object:
    items = [from_f32(item, scope.key.gguf) for item in value] if isinstance(value, list) else []
    return [item or None for item in items] if items else DEFAULT


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


SPARSE: dict[str, Converter] = {
    "dense_by_tensors": Converter(nothing, _dense_from, settle=_dense_settle),
    "times_moe_width": Converter(_times_moe_width, _over_moe_width),
    "heads_by_window": Converter(_heads_by_window_to, _heads_by_window_from),
    "windowed_kv_heads": Converter(nothing, _windowed_from, _twice_the_heads),
    "mimo_window": Converter(settle=_inclusive_window),
    "hybrid_layers": Converter(_hybrid_to, _hybrid_from, settle=_hybrid_settle),
    "fused_by_tensors": Converter(_fused_to, _fused_from),
    "hy_indexers": Converter(_indexers_to, _indexers_from, settle=_hy_indexers),
    "one_for_all": Converter(_one_for_all_to, _one_for_all_from),
    "over_moe_width": Converter(_whole_experts, lambda value, scope: _times_moe_width(value, scope) or DEFAULT),
    "counted_dense": Converter(_counted_dense_to, _counted_dense_from, settle=_counted_dense_settle),
    "indexed_where_sparse": Converter(
        _where_sparse_to, lambda value, scope: _where_sparse(scope), settle=_where_sparse_settle
    ),
    "step_heads": Converter(_step_heads_to, _heads_by_window_from),
    "windowed_heads": Converter(nothing, _windowed_heads_from, lambda scope: scope.h.num_heads),
    "same_heads": Converter(_same_heads_to, _first_of),
    "half_rotary": Converter(_half_rotary_to, _half_rotary_from, settle=_rotary_parts_settle),
    "enumerated_dense": Converter(_counted_dense_to, _counted_dense_from, settle=_enumerated_dense_settle),
    "limits": Converter(_limits_to, _limits_from),
    "own_indexers": Converter(_indexers_to, _own_indexers_from, settle=_indexers_settle),
    "same_limit": Converter(_same_limit_to, default),
    "latent_or_linear": Converter(nothing, _latent_or_linear_from, settle=_latent_or_linear_settle),
    "indexed_layers": Converter(_indexed_to, _indexed_from, settle=_indexed_settle),
    "indexed_without_window": Converter(_without_window_to, default),
    "latent_scales": Converter(
        nothing,
        lambda value, scope: _latent_scales(scope, True),
        settle=lambda value, scope: _latent_scales(scope, value),
    ),
    "swa_key_width": Converter(_swa_sum("swa_kv_lora_rank", "qk_rope_head_dim"), default),
    "swa_value_width": Converter(_swa_sum("swa_kv_lora_rank"), default),
    "swa_key_length": Converter(_swa_sum("swa_qk_nope_head_dim", "qk_rope_head_dim"), _swa_nope_from),
    "turned_keys": Converter(_turned_keys_to),
    "glm_indexers": Converter(_indexers_to, _indexers_from, settle=_indexers_settle),
}
"""What a Key's `via` names, as in arch.values.CONVERTERS."""
