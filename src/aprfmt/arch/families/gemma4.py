"""Gemma 3n and Gemma 4."""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import replace

from aprfmt.arch.blocks.decoder import (
    DIMS, GROUPED, HEAD_DIM, RMS_EPS, ROPE, WINDOW_LAYERS, block, class_names, embedding, final_norm, flag, gated_mlp,
    head, linear, must_be, needs, norm, number, rename, tensor,
)
from aprfmt.arch.blocks.moe import COUNT, USED, WIDTH
from aprfmt.arch.converter import DEFAULT, ConfigKeys, Convert, Converter, GgufKeys, Scope
from aprfmt.arch.converters.common import zero_cap
from aprfmt.arch.converters.layers import FULL, SLIDING, layer_types, layer_types_derive, number_or_0, slides_of
from aprfmt.arch.fields import as_int, as_mapping
from aprfmt.arch.row import OPTIONAL, REQUIRED, Architecture, Key, TensorRow
from aprfmt.errors import CorruptError, RefusedError


_GLOBAL_HEAD = 512
"""The defaults of a Gemma 4 config."""


def _last_full(kinds: list[str] | None) -> list[str] | None:
    """Gemma 4's last layer has full attention, whatever its config says."""
    return [*kinds[:-1], FULL] if kinds else kinds


def _last_full_normalize(value: object, scope: Scope) -> object:
    return _last_full([str(kind) for kind in value] if isinstance(value, list) else layer_types_derive(scope))


def _global_heads_normalize(value: object, scope: Scope) -> object:
    """Per-layer values reduced to the two numbers of the full-attention layers."""
    extra, told = scope.h.extra, scope.h.extra.pop("per_layer_config", None)
    kv_heads = extra.pop("num_global_key_value_heads", None) if scope.config("attention_k_eq_v") else None
    if told is None:
        return ConfigKeys(global_head_dim=value or _GLOBAL_HEAD, num_global_key_value_heads=kv_heads)
    layers = {int(i): layer for i, layer in as_mapping(told).items() if str(i).isdigit()}
    kinds = extra.get("layer_types")
    full = [i for i, kind in enumerate(kinds) if kind == FULL] if isinstance(kinds, list) else []
    own = [dict(as_mapping(layers.get(i))) for i in full]
    if set(layers) - set(full) or any(one != own[0] for one in own) or not own:
        raise RefusedError("per_layer_config must set the full-attention layers only, and all alike")
    more = set(own[0]) - {"head_dim", "num_key_value_heads"}
    if more:
        raise RefusedError(f"per_layer_config sets {min(more)}, which is not supported per layer")
    return ConfigKeys(
        global_head_dim=own[0].get("head_dim", scope.h.head_dim),
        num_global_key_value_heads=own[0].get("num_key_value_heads"),
    )


def head_sizes(end: str = "") -> Convert:
    """The head size, all of which is rotated: unrotated pairs have a frequency of 0."""
    names = [f"{name}{end}" for name in ("attention.key_length", "attention.value_length", "rope.dimension_count")]
    return lambda value, scope: GgufKeys({name: ("u32", value) for name in names if value is not None})


def _window_kv_heads_to_gguf(value: object, scope: Scope) -> object:
    """KV heads: one number, or one per layer if full-attention layers differ."""
    other = scope.size("num_global_key_value_heads")
    if other is None or other == value:
        return value
    slides = slides_of(scope.h.extra.get("layer_types"))
    return GgufKeys({scope.key.gguf: ("i32[]", [value if one else other for one in slides])})


def _window_kv_heads_from_gguf(value: object, scope: Scope) -> object:
    slides = scope.gguf("attention.sliding_window_pattern")
    if not isinstance(value, list) or not isinstance(slides, list) or len(slides) != len(value):
        return value[0] if isinstance(value, list) and value.count(value[0]) == len(value) else value
    kinds = [{heads for heads, one in zip(value, slides, strict=True) if bool(one) is kind} for kind in (True, False)]
    if any(len(kind) > 1 for kind in kinds):
        raise CorruptError(f"{scope.key.gguf} differs between layers of the same type")
    windowed, other = (next(iter(kind), None) for kind in kinds)
    heads = other if windowed is None else windowed
    return ConfigKeys(num_key_value_heads=heads, num_global_key_value_heads=heads if other is None else other)


def _double_wide_to_gguf(value: object, scope: Scope) -> object:
    """The MLP width: one number, or one per layer if layers that share keys and values have twice as much."""
    width, n_layers = as_int(value, scope.name), scope.h.num_layers
    if width is None or n_layers is None or not scope.config("use_double_wide_mlp"):
        return width
    first = n_layers - (scope.size("num_kv_shared_layers") or 0)
    return GgufKeys({scope.key.gguf: ("i32[]", [width if i < first else 2 * width for i in range(n_layers)])})


def _double_wide_from_gguf(value: object, scope: Scope) -> object:
    if not isinstance(value, list) or not value:
        return value if value is not None else DEFAULT
    shared = as_int(scope.gguf("attention.shared_kv_layers"), "attention.shared_kv_layers") or 0
    first = len(value) - shared
    wide = value[-1] != value[0]
    if value != [value[0] * (2 if wide and i >= first else 1) for i in range(len(value))]:
        raise CorruptError(f"{scope.key.gguf} differs between layers of the same type")
    return ConfigKeys(intermediate_size=value[0], use_double_wide_mlp=wide)


def _shared_kv_to_gguf(value: object, scope: Scope) -> object:
    """llama.cpp shares keys and values of the last two layers that have some: the last has full attention."""
    shared, n_layers = as_int(value, scope.name) or 0, scope.h.num_layers or 0
    kinds = scope.h.extra.get("layer_types")
    if not shared or not isinstance(kinds, list):
        return shared
    first = n_layers - shared
    if first < 2 or [kinds[first - 2], kinds[first - 1]] != [SLIDING, FULL]:
        raise RefusedError(
            f"{scope.name} is {shared}: llama.cpp's {scope.row.gguf} shares the keys and values of layers {first - 2} "
            f"and {first - 1}, which must be a sliding-window and a full-attention layer"
        )
    return shared


def _values_are_keys_from_gguf(value: object, scope: Scope) -> object:
    """Whether full-attention layers use keys as values."""
    slides = scope.gguf("attention.sliding_window_pattern")
    if not scope.names or not isinstance(slides, list):
        return DEFAULT
    full = [i for i, one in enumerate(slides) if not one and f"blk.{i}.attn_k.weight" in scope.names]
    return bool(full) and not any(f"blk.{i}.attn_v.weight" in scope.names for i in full)


def _n_tokens_from_gguf(value: object, scope: Scope) -> object:
    """As many rows as the vocabulary."""
    tokens = scope.kv.get("tokenizer.ggml.tokens")
    return scope.h.vocab_size or (len(tokens) if isinstance(tokens, Sized) else DEFAULT)


def _n_tokens_to_gguf(value: object, scope: Scope) -> None:
    rows, vocab = as_int(value, scope.name), scope.h.vocab_size
    if not scope.config("hidden_size_per_layer_input") or rows is None or vocab is None:
        return
    if rows > vocab:
        raise RefusedError(f"{scope.name} is {rows}: llama.cpp's {scope.row.gguf} supports at most the vocabulary "
            f"size, {vocab}")
    if rows < min(vocab, _LEAST_ROWS):
        raise RefusedError(
            f"{scope.name} is {rows}: transformers would not load a folder made from the GGUF without a row for the "
            f"tokenizer's padding token; it must be at least {_LEAST_ROWS}"
        )


_LEAST_ROWS = 256
"""Rows that have the special tokens of usual tokenizers."""


_KV_LAYERS, _SPARSE_LAYERS, _SPARSITY = 20, 10, 0.95
"""llama.cpp's constants for Gemma 3n: layers with keys and values, leading layers with a sparse MLP, and its sparsity.
"""


def _sparsity(scope: Scope) -> list[float]:
    return [_SPARSITY if i < _SPARSE_LAYERS else 0.0 for i in range(scope.h.num_layers or 0)]


def _sparsity_to_gguf(value: object, scope: Scope) -> None:
    if value is not None and value != _sparsity(scope):
        raise RefusedError(
            f"{scope.name}: llama.cpp's {scope.row.gguf} has a fixed sparsity of {_SPARSITY} in the first "
            f"{_SPARSE_LAYERS} layers and of 0 in the others"
        )


def _sparsity_derive(scope: Scope) -> list[float]:
    """The default: small networks are not sparse."""
    found = _sparsity(scope)
    return found if len(found) > _SPARSE_LAYERS else [0.0] * len(found)


def _gemma3n_kv_sharing_to_gguf(value: object, scope: Scope) -> object:
    shared, n_layers = as_int(value, scope.name) or 0, scope.h.num_layers or 0
    if shared != max(0, n_layers - _KV_LAYERS):
        raise RefusedError(
            f"{scope.name} is {shared} of {n_layers} layers: in llama.cpp's {scope.row.gguf} exactly the first "
            f"{_KV_LAYERS} layers have their own keys and values"
        )
    return _shared_kv_to_gguf(value, scope)


def _width_a_layer_to_gguf(value: object, scope: Scope) -> list[object] | None:
    widths = scope.h.extra.get(scope.name)
    if isinstance(widths, list) and widths.count(widths[0]) != len(widths):
        raise RefusedError(f"{scope.name} differs between layers: llama.cpp's {scope.row.gguf} has one for all")
    return None if value is None else [value] * (scope.h.num_layers or 0)


last_full_layer_types = replace(
    layer_types, derive=lambda scope: _last_full(layer_types_derive(scope)), normalize=_last_full_normalize,
)
global_heads = Converter(head_sizes(), normalize=_global_heads_normalize)
window_kv_heads = Converter(_window_kv_heads_to_gguf, _window_kv_heads_from_gguf)
double_wide = Converter(_double_wide_to_gguf, _double_wide_from_gguf)
shared_kv = Converter(_shared_kv_to_gguf, lambda value, scope: value or 0)
values_are_keys = Converter(from_gguf=_values_are_keys_from_gguf)
row_a_token = Converter(_n_tokens_to_gguf, _n_tokens_from_gguf)
width_a_layer = Converter(_width_a_layer_to_gguf)
ten_sparse_layers = Converter(_sparsity_to_gguf, lambda value, scope: _sparsity(scope), _sparsity_derive)
_SHARED_KV = Key("attention.shared_kv_layers", ("num_kv_shared_layers",), converter=shared_kv)
_GELU = must_be("hidden_activation", "gelu_pytorch_tanh")


def _attention(kind: str, head_dim: str, kv_heads: str, values: str = REQUIRED) -> tuple[TensorRow, ...]:
    """Attention of one layer type; `values` says whether values are separate from keys.

    Some checkpoints contain unused keys and values of layers that share those of another.
    """
    kv, rows = f"{kv_heads}*{head_dim},hidden", list[TensorRow]()
    for layers, need in ((f"{kind}&!shares_kv", REQUIRED), (f"{kind}&shares_kv", OPTIONAL)):
        bias = "attention_bias" if need == REQUIRED else need
        separate = values if need == REQUIRED else need
        rows += linear("self_attn.k_proj", "attn_k", kv, bias, need, layers=layers)
        rows += linear("self_attn.v_proj", "attn_v", kv, f"{bias}&{separate}", separate, layers=layers)
        rows += norm("self_attn.k_norm", "attn_k_norm", head_dim, need=need, layers=layers)
    return (
        *linear("self_attn.q_proj", "attn_q", f"heads*{head_dim},hidden", "attention_bias", layers=kind), *rows,
        *linear("self_attn.o_proj", "attn_output", f"hidden,heads*{head_dim}", "attention_bias", layers=kind),
        *norm("self_attn.q_norm", "attn_q_norm", head_dim, layers=kind),
    )


def _double_wide() -> tuple[TensorRow, ...]:
    rows = gated_mlp(layers="double_wide")
    return tuple(replace(row, dims=tuple(dims.replace("ffn", "2*ffn") for dims in row.dims)) for row in rows)


def _gemma4_experts() -> tuple[TensorRow, ...]:
    need = "enable_moe_block"
    return (
        *linear("router.proj", "ffn_gate_inp", "experts,hidden", need=need),
        tensor("router.scale", "ffn_gate_inp.scale", "hidden", need),
        tensor("router.per_expert_scale", "ffn_down_exps.scale", "experts", need),
        tensor("experts.gate_up_proj", "ffn_gate_up_exps.weight", "experts,2*moe_ffn,hidden", need),
        tensor("experts.down_proj", "ffn_down_exps.weight", "experts,hidden,moe_ffn", need),
        *norm("post_feedforward_layernorm_1", "post_ffw_norm_1", need=need),
        *norm("post_feedforward_layernorm_2", "post_ffw_norm_2", need=need),
        *norm("pre_feedforward_layernorm_2", "pre_ffw_norm_2", need=need),
    )


_PER_LAYER = "hidden_size_per_layer_input"


def _per_layer_model(need: str = REQUIRED) -> tuple[TensorRow, ...]:
    """Per-layer token embeddings, and the projection of the main embedding that is added to them.

    If only the first tokens have some, transformers reads token 0's for the others (images and audio, in published
    checkpoints): a GGUF repeats them.
    """
    rows, width = "vocab_size_per_layer_input", f"layers*{_PER_LAYER}"
    table = tensor("model.embed_tokens_per_layer.weight", "per_layer_token_embd.weight", f"{rows},{width}", need)
    return (
        replace(table, gguf_dims=(f"vocab,{width}",), trail=f"vocab-{rows}", repeats=True),
        *linear("model.per_layer_model_projection", "per_layer_model_proj", f"layers*{_PER_LAYER},hidden", need=need),
        *norm("model.per_layer_projection_norm", "per_layer_proj_norm", _PER_LAYER, need=need),
    )


def _per_layer_input(need: str = REQUIRED) -> tuple[TensorRow, ...]:
    return (
        *linear("per_layer_input_gate", "inp_gate", f"{_PER_LAYER},hidden", need=need),
        *linear("per_layer_projection", "proj", f"hidden,{_PER_LAYER}", need=need),
        *norm("post_per_layer_input_norm", "post_norm", need=need),
    )


_NORMS = (
    *norm("input_layernorm", "attn_norm"), *norm("post_attention_layernorm", "post_attention_norm"),
    *norm("pre_feedforward_layernorm", "ffn_norm"), *norm("post_feedforward_layernorm", "post_ffw_norm"),
)


def _gemma3n_layer() -> tuple[TensorRow, ...]:
    """The tensors of a layer for four residual streams, of which it computes one, and a learned residual."""
    n = "altup_num_inputs"
    return (
        tensor("altup.correct_output_scale", "altup_correct_scale.weight", "hidden"),
        *linear("altup.correction_coefs", "altup_correct_coef", f"{n},{n}"),
        *linear("altup.prediction_coefs", "altup_predict_coef", f"{n}*{n},{n}"),
        *linear("altup.modality_router", "altup_router", f"{n},hidden"),
        *norm("altup.router_norm", "altup_router_norm"),
        *linear("laurel.linear_left", "laurel_l", "laurel_rank,hidden"),
        *linear("laurel.linear_right", "laurel_r", "hidden,laurel_rank"),
        *norm("laurel.post_laurel_norm", "laurel_post_norm"),
    )


def _streams(hf: str, gguf: str) -> TensorRow:
    """A matrix for each stream but the first, which a GGUF stacks."""
    names = tuple(f"model.{hf}.{i}.weight" for i in range(3))
    return TensorRow(names, (f"{gguf}.weight",), ("hidden,hidden",), gguf_dims=("3,hidden,hidden",))


_FFN = next(key for key in DIMS if key.field == "intermediate_size")


def _widths(converter: Converter) -> tuple[Key, ...]:
    listed = replace(_FFN, kind="u32[]", converter=converter)
    return tuple(listed if key is _FFN else key for key in DIMS)


ROWS: tuple[Architecture, ...] = (
    Architecture(
        id="gemma3n_text", gguf="gemma3n",
        **class_names("Gemma3nForCausalLM", "Gemma3nTextModel", types=("gemma3n_text",), bare=("Gemma3nTextModel",)),
        tensors=(
            embedding(), *_per_layer_model(), _streams("altup_projections", "altup_proj"),
            _streams("altup_unembed_projections", "altup_unembd_proj"),
            *block(
                *_NORMS, *_attention("sliding_attention", "head_dim", "kv_heads"),
                *_attention("full_attention", "head_dim", "kv_heads"), *gated_mlp(), *_gemma3n_layer(),
                *_per_layer_input(),
            ),
            *final_norm(), *head(),
        ),
        keys=(
            *_widths(width_a_layer), GROUPED, ROPE, RMS_EPS, HEAD_DIM,
            Key("final_logit_softcapping", ("final_logit_softcapping",), "f32", constant=30.0),
            Key("attention.sliding_window", ("sliding_window",)), WINDOW_LAYERS,
            Key("embedding_length_per_layer_input", (_PER_LAYER,), constant=256),
            Key("", ("vocab_size_per_layer_input",), converter=row_a_token),
            replace(_SHARED_KV, converter=Converter(_gemma3n_kv_sharing_to_gguf, lambda value, scope: value or 0)),
            Key("altup.active_idx", ("altup_active_idx",), constant=0),
            Key("altup.num_inputs", ("altup_num_inputs",), constant=4), must_be("altup_correct_scale", True),
            must_be("laurel_rank", 64), Key("", ("activation_sparsity_pattern",), "f32[]", converter=ten_sparse_layers),
            must_be("attention_bias", False), _GELU,
        ),
        nested_rope=True,
    ),
    Architecture(
        id="gemma4_text", gguf="gemma4",
        **class_names("Gemma4ForCausalLM", "Gemma4UnifiedForCausalLM", types=("gemma4_text", "gemma4_unified_text")),
        tensors=(
            embedding(), *_per_layer_model(_PER_LAYER),
            *block(
                *_NORMS, *_attention("sliding_attention", "head_dim", "kv_heads"),
                *_attention("full_attention", "global_head_dim", "num_global_key_value_heads", "!attention_k_eq_v"),
                *gated_mlp(layers="!double_wide"), *_double_wide(), *_gemma4_experts(), *_per_layer_input(_PER_LAYER),
                tensor("layer_scalar", "layer_output_scale.weight", "1"),
            ),
            *final_norm(), *head(),
        ),
        keys=(
            *_widths(double_wide), replace(GROUPED, kind="u32[]", converter=window_kv_heads), ROPE, RMS_EPS,
            replace(WINDOW_LAYERS, converter=last_full_layer_types),
            replace(number("head_dim"), gguf="attention.key_length_swa", converter=Converter(head_sizes("_swa"))),
            Key("attention.key_length", ("global_head_dim",), converter=global_heads),
            Key("", ("num_global_key_value_heads",), converter=Converter(derive=lambda scope: scope.h.num_kv_heads)),
            Key("", ("per_layer_config",)), Key("attention.sliding_window", ("sliding_window",)),
            Key("final_logit_softcapping", ("final_logit_softcapping",), "f32", converter=zero_cap),
            Key("embedding_length_per_layer_input", (_PER_LAYER,), converter=number_or_0),
            Key("", ("vocab_size_per_layer_input",), converter=row_a_token), _SHARED_KV,
            *needs("rope.dimension_count_swa"),
            *rename((COUNT, USED, WIDTH), num_experts="num_experts", num_experts_per_tok="top_k_experts"),
            flag("enable_moe_block"), Key("", ("attention_k_eq_v",), "bool", converter=values_are_keys),
            flag("use_double_wide_mlp"), Key("", ("use_bidirectional_attention",), "str", allowed=("vision",)),
            must_be("attention_bias", False), _GELU,
        ),
        nested_rope=True, freqs_always=True,
    ),
)
