"""GLM 5 Next and Hunyuan 4: residual streams that layers mix."""

from __future__ import annotations

from dataclasses import replace

from aprfmt.arch.blocks.decoder import (
    block, embedding, final_norm, fused_experts, gated_mlp, head, hf_names, linear, must_be, network, norm, tensor,
)
from aprfmt.arch.blocks.delta import delta_attention, low_rank
from aprfmt.arch.blocks.mla import INDEXER, indexer, latent_attention, mla_keys
from aprfmt.arch.blocks.moe import GROUPS, MTP, draft_layer, router_and_experts, selection_bias, shared_expert
from aprfmt.arch.blocks.streams import HC_COUNT, HC_EPS, HC_ITERATIONS, last_stream, streams
from aprfmt.arch.converter import DEFAULT, Converter, Scope, nothing
from aprfmt.arch.converters.common import dense_first, dense_first_to_gguf, rope_keys, yarn_log
from aprfmt.arch.converters.experts import one_for_all, same_limit
from aprfmt.arch.converters.hybrid import kda_heads, latent_layers
from aprfmt.arch.converters.layers import plain_kinds
from aprfmt.arch.converters.sparse import OWN, SHARED, indexers_from_gguf, indexers_normalize, indexers_to_gguf
from aprfmt.arch.row import MOST, Architecture, Difference, Key, TensorRow


def _hy_indexers(value: object, scope: Scope) -> object:
    """The first layer, and then every fourth from the second on, unless the config lists them."""
    n_layers = scope.h.num_layers
    if value is not None or n_layers is None:
        return DEFAULT
    return [OWN if i == 0 or (i - 1) % 4 == 0 else SHARED for i in range(n_layers)]


_ATTENDS, _LINEAR_KIND = "full_attention", "linear_attention"


def _latent_or_linear_normalize(value: object, scope: Scope) -> object:
    """Every fourth layer has attention by default."""
    n_layers = scope.h.num_layers
    if isinstance(value, list) or n_layers is None:
        return plain_kinds(value, scope)
    return [_ATTENDS if i % 4 == 3 else _LINEAR_KIND for i in range(n_layers)]


def _latent_or_linear_from_gguf(value: object, scope: Scope) -> object:
    heads = scope.gguf("attention.head_count_kv")
    return [_ATTENDS if n else _LINEAR_KIND for n in heads] if isinstance(heads, list) else DEFAULT


hy_indexers = Converter(indexers_to_gguf, indexers_from_gguf, normalize=_hy_indexers)
own_indexers = Converter(
    indexers_to_gguf,
    lambda value, scope: [OWN if flag else SHARED for flag in value] if isinstance(value, list) else DEFAULT,
    normalize=indexers_normalize,
)
latent_or_linear = Converter(nothing, _latent_or_linear_from_gguf, normalize=_latent_or_linear_normalize)


def _listed_dense_from_gguf(value: object, scope: Scope) -> object:
    """The same list, for classes without a number of dense layers."""
    first, n_layers = scope.size("first_k_dense_replace"), scope.h.num_layers
    return DEFAULT if first is None else ["dense" if i < first else "sparse" for i in range(n_layers or 0)]


listed_dense = Converter(dense_first_to_gguf, _listed_dense_from_gguf, normalize=dense_first)
_NEIGHBOURS = Difference(
    "llama.cpp's hy_v4 applies interleaved RoPE, transformers NEOX-style RoPE, and llama.cpp's converter does not "
    "permute the rows: logits differ"
)
"""No row order fixes this: mlx-lm rotates neighbours of the published ones too."""
_LINEAR, _LATENT = "linear_attention", "!linear_attention"
_DELTA = {"size": "linear_head_dim", "heads": "linear_num_heads", "kernel": "linear_conv_kernel_dim"}


def _pooled_indexer() -> tuple[TensorRow, ...]:
    """An indexer that scores pools of positions."""
    layers, hf = f"indexer&{_LATENT}", "self_attn.indexer.index_kpool_compress_"
    return (
        *indexer(layers),
        tensor(f"{hf}ape", "indexer_compressor_ape.weight", "index_kpool,index_head_dim", layers=layers),
        tensor(f"{hf}gate", "indexer_compressor_gate.weight", "index_head_dim,hidden", layers=layers),
    )


_SAVED_GATES = (
    *linear("mlp.linear_gate", "ffn_gate", "ffn,hidden", layers="dense"),
    *linear("mlp.shared_experts.linear_gate", "ffn_gate_shexp", "n_shared_experts*moe_ffn,hidden", layers="moe"),
)
"""Gates of Hunyuan 4's MLPs under transformers' names; its streams, too, are saved under other names."""

ROWS: tuple[Architecture, ...] = (
    Architecture(
        id="hy_v4", gguf="hy_v4", **hf_names("HYV4", "hy_v4"), rope_type=0,
        tensors=(
            embedding(),
            *block(
                *streams("hc_attn_layer.hc_pre.hc_", "hc_mlp_layer.hc_pre.hc_", "2*hc_mult", "2"),
                *streams("hc_pre.hc_attn_layer.hc_", "hc_pre.hc_mlp_layer.hc_", "2*hc_mult", "2"),
                *norm("input_layernorm", "attn_norm"), *latent_attention(),
                *linear("self_attn.linear_gate", "attn_gate", "heads*v_head_dim,hidden"),
                tensor("self_attn.learnable_sink_param", "attn_sinks.weight", "heads"), *indexer("indexer"),
                *norm("post_attention_layernorm", "ffn_norm"),
                *linear("mlp.gate", "ffn_gate_inp", "experts,hidden", layers="moe"), selection_bias(),
                *fused_experts("mlp.experts.gate_up_proj", "mlp.experts.down_proj", layers="moe"),
                *shared_expert("mlp.shared_experts", "n_shared_experts*moe_ffn", layers="moe"),
                *gated_mlp(layers="dense"), *_SAVED_GATES,
            ),
            *last_stream("model.hc_head.hc_head_"), *last_stream("model.hc_pre.hc_head.hc_head_"), *final_norm(),
            *head(),
        ),
        keys=(
            *(key for key in mla_keys() if key not in GROUPS), must_be("n_group", 1), must_be("topk_group", 1),
            *INDEXER, Key("attention.indexer.types", ("indexer_types",), "bool[]", converter=hy_indexers),
            Key("swiglu_clamp_exp", ("swiglu_limit",), "f32[]", converter=one_for_all, draft=MOST), HC_COUNT, HC_EPS,
            Key("hyper_connection.magnitude", ("hc_magnitude",), "f32"),
            Key("", ("mlp_layer_types",), "str[]", converter=listed_dense),
        ),
        differs=(_NEIGHBOURS,),
    ),
    Architecture(
        id="glm5_next", gguf="glm5-next", **hf_names("Glm5Next", "glm5_next_text"),
        tensors=network(
            *streams("hc_attn_", "hc_ffn_", "2*hc_mult+hc_mult*hc_mult", "3", "!draft"),
            *norm("input_layernorm", "attn_norm"),
            *delta_attention(
                *low_rank("f"), *low_rank("g"), tensor("A_log", "ssm_a", _DELTA["heads"], value="minus_exp")
            ),
            *(replace(row, layers=_LATENT) for row in latent_attention()), *_pooled_indexer(),
            *norm("post_attention_layernorm", "ffn_norm"), *router_and_experts("moe", (selection_bias(),)),
            *shared_expert("mlp.shared_experts", "n_shared_experts*moe_ffn", layers="moe"), *gated_mlp(layers="dense"),
            *draft_layer(),
        ),
        keys=(
            *(
                replace(key, kind="i32[]", converter=latent_layers, draft=1) if key.field == "num_kv_heads" else key
                for key in mla_keys()
                if key.converter not in (rope_keys, yarn_log)
            ),
            Key("attention.layer_norm_epsilon", kind="f32", constant=1e-6),
            Key("ssm.conv_kernel", (_DELTA["kernel"], "linear_attn_config.short_conv_kernel_size")),
            Key("kda.head_dim", (_DELTA["size"], "linear_attn_config.head_dim")),
            Key("", (_DELTA["heads"], "linear_attn_config.num_heads"), converter=kda_heads),
            Key("kda.gate_lower_bound", ("linear_lower_bound", "linear_attn_config.gate_lower_bound"), "f32"), *INDEXER,
            Key("attention.indexer.kpool", ("index_kpool",)),
            Key("attention.indexer.kpool_select_tail", ("index_kpool_always_select_tail",), "bool"),
            Key("attention.indexer.types", ("indexer_types",), "bool[]", converter=own_indexers),
            Key("swiglu_clamp_exp", ("swiglu_limit",), "f32[]", converter=one_for_all, draft=MOST),
            Key("swiglu_clamp_shexp", kind="f32[]", converter=same_limit, draft=MOST), HC_COUNT,
            HC_ITERATIONS, HC_EPS,
            Key("", ("layer_types",), "str[]", converter=latent_or_linear),
            Key("", ("mlp_layer_types",), "str[]", converter=listed_dense), must_be("mla_use_nope", True), MTP,
        ),
    ),
)
