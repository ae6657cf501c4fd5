"""Converters of hybrids and linear attention: which layers attend, and what their configs count otherwise."""

from __future__ import annotations

from collections.abc import Collection

from aprfmt.arch.converter import DEFAULT, ConfigKeys, Converter, GgufKeys, Scope, default, nothing
from aprfmt.arch.fields import as_int, as_mapping
from aprfmt.arch.grammar import layer_kinds
from aprfmt.errors import CorruptError, RefusedError
from aprfmt.text import first_few


def _attending(scope: Scope) -> list[int] | None:
    """The layers with key-value heads, by the GGUF; None where it does not say it of each layer."""
    heads = scope.gguf("attention.head_count_kv")
    return [i for i, n in enumerate(heads) if n] if isinstance(heads, list) else None


def _listed_from(value: object, scope: Scope) -> object:
    return DEFAULT if (found := _attending(scope)) is None else found


def _steps(found: list[int], n_layers: int, period: str, offset: str) -> ConfigKeys:
    """Layers that come every `period`, the first at `offset`; of one that stands alone, the next is behind the last."""
    first = found[0] if found else n_layers
    return ConfigKeys({period: found[1] - first if len(found) > 1 else max(n_layers, first + 1), offset: first})


def _period_from(value: object, scope: Scope) -> object:
    found, n_layers = _attending(scope), scope.h.num_layers
    return DEFAULT if found is None or not n_layers else _steps(found, n_layers, scope.name, "attn_layer_offset")


def _expert_period_from(value: object, scope: Scope) -> object:
    """By the layers that have a router."""
    n_layers = scope.h.num_layers
    if not scope.names or not n_layers:
        return DEFAULT
    found = [i for i in range(n_layers) if f"blk.{i}.ffn_gate_inp.weight" in scope.names]
    return _steps(found, n_layers, scope.name, "expert_layer_offset")


def _padded_settle(value: object, scope: Scope) -> object:
    """The embedding's rows: tokens are padded to a multiple."""
    vocab, multiple = as_int(value, scope.name), as_int(scope.h.extra.get("pad_vocab_size_multiple"), "") or 1
    return DEFAULT if vocab is None else -(-vocab // multiple) * multiple


_LINEAR, _FULL = "linear_attention", "full_attention"
_KDA_CONFIG = {
    "head_dim": "linear_head_dim",
    "num_heads": "linear_num_heads",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}


def _kinds_of(full: Collection[int], n_layers: int) -> list[str]:
    return [_FULL if i in full else _LINEAR for i in range(n_layers)]


def _latent_layers_to(value: object, scope: Scope) -> list[int] | None:
    """Key-value heads by layer, as the runtime sees them: one in the layers of latent attention."""
    kinds = layer_kinds(scope.h.extra, scope.h.num_layers)
    return None if kinds is None else [int(kind == _FULL) for kind in kinds]


def _kda_layers_settle(value: object, scope: Scope) -> object:
    """By the list of the attending layers, counted from 1; by every fourth where nothing says it."""
    n_layers = scope.h.num_layers
    if value is not None or n_layers is None:
        return DEFAULT
    listed = as_mapping(scope.h.extra.get("linear_attn_config")).get("full_attn_layers")
    if listed is None:
        return _kinds_of(range(4, n_layers, 4), n_layers)
    return _kinds_of([i - 1 for i in listed if isinstance(i, int)] if isinstance(listed, list) else [], n_layers)


def _kda_layers_from(value: object, scope: Scope) -> object:
    found, n_layers = _attending(scope), scope.h.num_layers
    return DEFAULT if found is None or n_layers is None else _kinds_of(found, n_layers)


def _kda_config(value: object, scope: Scope) -> object:
    """The object in which Kimi's own code, and llama.cpp's converter, look for what transformers has beside it."""
    kinds = layer_kinds(scope.h.extra)
    if kinds is None:
        return DEFAULT
    numbers = {name: scope.h.extra.get(key) for name, key in _KDA_CONFIG.items()}
    full = [i + 1 for i, kind in enumerate(kinds) if kind == _FULL]
    kda = [i + 1 for i, kind in enumerate(kinds) if kind != _FULL]
    return {**as_mapping(value), **numbers, "full_attn_layers": full, "kda_layers": kda}


def _k3_config(value: object, scope: Scope) -> object:
    """The same, with what only the third Kimi has there. That it has no draft layers is what silence says too."""
    if not scope.h.extra.get("num_nextn_predict_layers"):
        scope.h.extra.pop("num_nextn_predict_layers", None)
    found = _kda_config(value, scope)
    if not isinstance(found, dict):
        return found
    bound = scope.h.extra.get("linear_lower_bound")
    return {"use_full_rank_gate": True, **({"gate_lower_bound": bound} if bound is not None else {}), **found}


def _k3_config_to(value: object, scope: Scope) -> None:
    if as_mapping(value).get("use_full_rank_gate") is False:
        raise RefusedError(f"{scope.name}: llama.cpp's {scope.row.gguf} loads gates of full rank only")


def _kda_heads_to(value: object, scope: Scope) -> None:
    if value != scope.h.num_heads:
        raise RefusedError(
            f"{scope.name} is {value}: llama.cpp's {scope.row.gguf} has as many heads in every layer, "
            f"{scope.h.num_heads} by num_attention_heads"
        )


def _one_group_to(value: object, scope: Scope) -> None:
    if value not in (None, 1):
        raise RefusedError(f"{scope.name} is {value}: llama.cpp's {scope.row.gguf} chooses experts without groups")


def _no_low_rank_to(value: object, scope: Scope) -> None:
    if value is not None:
        raise RefusedError(f"{scope.name} is {value}: llama.cpp's {scope.row.gguf} loads queries of full rank only")


def _inner_width_settle(value: object, scope: Scope) -> object:
    """The width of a mixer: null means the expansion of the hidden size."""
    expand, hidden = scope.size("mamba_expand"), scope.h.hidden_size
    return expand * hidden if value is None and expand and hidden else DEFAULT


def _head_width_settle(value: object, scope: Scope) -> object:
    inner, heads = scope.size("mamba_d_ssm"), scope.size("mamba_n_heads")
    return inner // heads if value in (None, "auto") and inner and heads else DEFAULT


def _norm_behind_gate_to(value: object, scope: Scope) -> None:
    if value and scope.config("mamba_rms_norm"):
        raise RefusedError(
            f"{scope.name}: llama.cpp's {scope.row.gguf} normalises what the gate lets through, not before it"
        )


def _tied_multiplier_to(value: object, scope: Scope) -> None:
    if scope.h.tied and value != scope.h.extra.get("lm_head_multiplier"):
        raise RefusedError(
            f"embedding_multiplier is {value} and lm_head_multiplier {scope.h.extra.get('lm_head_multiplier')}: a GGUF "
            "has them in the weights, and here both are of the one embedding"
        )


_EIGHTH = 8
"""MiniMax's runtime takes each eighth layer for one of full attention where a file does not say it."""


def _lightning_layers_to(value: object, scope: Scope) -> list[bool] | None:
    if not isinstance(value, list):
        return None
    recurrent = [not mark for mark in value]
    return None if recurrent == [bool((i + 1) % _EIGHTH) for i in range(len(value))] else recurrent


def _lightning_layers_from(value: object, scope: Scope) -> object:
    if isinstance(value, list):
        return [int(not flag) for flag in value]
    period = as_int(scope.gguf("full_attention_interval"), "full_attention_interval") or _EIGHTH
    return [int((i + 1) % period == 0) for i in range(scope.h.num_layers or 0)]


def _same_alpha_to(value: object, scope: Scope) -> None:
    if value != scope.h.extra.get("layernorm_full_attention_alpha"):
        raise RefusedError(f"{scope.name} is {value}: llama.cpp's {scope.row.gguf} scales every residual alike")


def _period_of_window_to(value: object, scope: Scope) -> object:
    return value if scope.config("window_size") else None


def _kda_and_value_to(value: object, scope: Scope) -> GgufKeys | None:
    size = scope.h.head_dim
    return None if size is None else GgufKeys({"kda.head_dim": ("u32", size), "attention.value_length": ("u32", size)})


def _three_sections_to(value: object, scope: Scope) -> object:
    return [*value[:3], 0] if isinstance(value, list) else None


def _three_sections_from(value: object, scope: Scope) -> object:
    return value[:3] if isinstance(value, list) else None


def _limits_to(value: object, scope: Scope) -> object:
    """A limit a layer, 0 where there is none."""
    n_layers = scope.h.num_layers
    if not isinstance(value, list) or n_layers is None:
        return None
    return [*(limit or 0.0 for limit in value), *[0.0] * (n_layers - len(value))]


def _limits_settle(value: object, scope: Scope) -> object:
    return [limit or 0.0 for limit in value] if isinstance(value, list) else DEFAULT


def _group_of_layers_from(value: object, scope: Scope) -> object:
    found = _attending(scope)
    return DEFAULT if not found else found[0] + 1


def _mamba_step_from(value: object, scope: Scope) -> object:
    """The shortest step by which the layers attend that do."""
    found, n_layers = _attending(scope), scope.h.num_layers
    if found is None or not n_layers:
        return DEFAULT
    for step in range(2, 2 * n_layers + 1):
        if layer_kinds({"mamba_step": step}, n_layers) == _kinds_of(found, n_layers):
            return step
    raise CorruptError(
        f"{scope.row.gguf}.attention.head_count_kv has heads in the layers {first_few(found)}, which is not a step of "
        "attention layers"
    )


def _heads_by_size_to(value: object, scope: Scope) -> int | None:
    heads = scope.size("mamba_num_heads")
    return heads * scope.h.head_dim if heads and scope.h.head_dim else None


def _least_rank(scope: Scope) -> int | None:
    """PLaMo 2's: a sixteenth of the hidden size, but at least 64."""
    return max(64, scope.h.hidden_size // 16) if scope.h.hidden_size else None


HYBRID: dict[str, Converter] = {
    "attention_indices": Converter(nothing, _listed_from),
    "attention_period": Converter(nothing, _period_from),
    "expert_period": Converter(nothing, _expert_period_from),
    "latent_layers": Converter(_latent_layers_to, lambda value, scope: scope.h.num_heads),
    "kda_layers": Converter(nothing, _kda_layers_from, settle=_kda_layers_settle),
    "kda_config": Converter(nothing, _kda_config, settle=_kda_config),
    "k3_config": Converter(_k3_config_to, _k3_config, settle=_k3_config),
    "kda_heads": Converter(_kda_heads_to, lambda value, scope: scope.h.num_heads),
    "one_group": Converter(_one_group_to, lambda value, scope: 1),
    "no_low_rank": Converter(_no_low_rank_to, lambda value, scope: value),
    "inner_width": Converter(settle=_inner_width_settle),
    "heads_of_width": Converter(nothing, _head_width_settle, settle=_head_width_settle),
    "norm_behind_gate": Converter(_norm_behind_gate_to, lambda value, scope: not scope.h.extra.get("mamba_rms_norm")),
    "tied_multiplier": Converter(_tied_multiplier_to),
    "one_alpha": Converter(),
    "same_alpha": Converter(_same_alpha_to, lambda value, scope: scope.h.extra.get("layernorm_full_attention_alpha")),
    "lightning_layers": Converter(_lightning_layers_to, _lightning_layers_from),
    "period_of_window": Converter(_period_of_window_to),
    "kda_and_value": Converter(_kda_and_value_to),
    "three_sections": Converter(
        _three_sections_to, lambda value, scope: value[:3] if isinstance(value, list) else None
    ),
    "limits": Converter(_limits_to, settle=_limits_settle),
    "group_of_layers": Converter(nothing, _group_of_layers_from),
    "mamba_step": Converter(nothing, _mamba_step_from),
    "heads_by_size": Converter(_heads_by_size_to, default),
    "least_rank": Converter(fill=_least_rank),
    "padded_vocab": Converter(settle=_padded_settle),
}
