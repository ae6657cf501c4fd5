"""Networks of experts that llama.cpp does not run, with names and sizes as vLLM loads them.

transformers has Mistral Large 4 of them. A GGUF of them is refused. Tensors that only layers of one kind have are
optional.
"""

from __future__ import annotations

from dataclasses import replace

from aprfmt.arch.blocks.decoder import (
    DIMS, GROUPED, HEAD_DIM, LLAMA_KEYS, RMS_EPS, ROPE, VOCAB, block, class_names, embedding, final_norm, flag, head,
    hf_names,
)
from aprfmt.arch.families import plain
from aprfmt.arch.row import HEAD, OPTIONAL, REQUIRED, Architecture, Key, TensorRow


def _only(dims: str, *names: str, need: str = REQUIRED, count: str = "experts") -> tuple[TensorRow, ...]:
    """Tensors that no GGUF has, of the shape `dims`; `count` is what `{e}` counts."""
    return tuple(TensorRow((name,), (), (dims,), need, count=count) for name in names)


def _weights(dims: str, *names: str, need: str = REQUIRED, count: str = "experts") -> tuple[TensorRow, ...]:
    """The same of modules without a bias."""
    return _only(dims, *(f"{name}.weight" for name in names), need=need, count=count)


def _mlp(hf: str, width: str, need: str = REQUIRED, count: str = "experts") -> tuple[TensorRow, ...]:
    """Gate, up and down projection."""
    return (
        *_weights(f"{width},hidden", f"{hf}.gate_proj", f"{hf}.up_proj", need=need, count=count),
        *_weights(f"hidden,{width}", f"{hf}.down_proj", need=need, count=count),
    )


def _counts(*names: str) -> tuple[Key, ...]:
    return tuple(Key("", (name,)) for name in names)


def _layers(*rows: TensorRow, norms: tuple[str, ...] = ()) -> tuple[TensorRow, ...]:
    """A decoder of layers of these rows, with the usual norms and `norms`."""
    usual = _weights("hidden", "input_layernorm", "post_attention_layernorm", *norms)
    return (embedding(), *block(*usual, *rows), *final_norm(), *head())


_ROUTED, _WIDTH = "n_routed_experts", "moe_intermediate_size"
_KDA = "linear_num_key_heads*linear_key_head_dim"
_ALICE_AI = Architecture(
    id="alice_ai", gguf="alice_ai", **hf_names("AliceAI", "alice_ai"),
    tensors=(
        *_layers(
            *_weights("2*q,hidden", "self_attn.q_proj", need=OPTIONAL),
            *_weights("kv,hidden", "self_attn.k_proj", "self_attn.v_proj", need=OPTIONAL),
            *_weights("hidden,q", "self_attn.o_proj", need=OPTIONAL),
            *_weights("head_dim", "self_attn.q_norm", "self_attn.k_norm", need=OPTIONAL),
            *_weights(f"{_KDA},hidden", *(f"linear_attn.{x}_proj" for x in "qkv"), need=OPTIONAL),
            *_weights(
                f"{_KDA},1,linear_conv_kernel_dim", *(f"linear_attn.{x}_conv1d" for x in "qkv"), need=OPTIONAL
            ),
            *_weights("linear_num_key_heads,hidden", "linear_attn.b_proj", need=OPTIONAL),
            *_weights(
                "linear_key_head_dim,hidden", "linear_attn.f_a_proj", "linear_attn.g_a_proj", need=OPTIONAL
            ),
            *_weights(f"{_KDA},linear_key_head_dim", "linear_attn.f_b_proj", "linear_attn.g_b_proj", need=OPTIONAL),
            *_only(_KDA, "linear_attn.dt_bias", need=OPTIONAL),
            *_only("linear_num_key_heads", "linear_attn.A_log", "linear_attn.a_log_bias", need=OPTIONAL),
            *_weights("linear_key_head_dim", "linear_attn.o_norm", need=OPTIONAL),
            *_weights(f"hidden,{_KDA}", "linear_attn.o_proj", need=OPTIONAL),
            *_weights("num_experts,hidden", "mlp.gate"), *_only("num_experts", "mlp.gate.e_score_correction_bias"),
            *_mlp("mlp.experts.{e}", _WIDTH, count="num_experts"),
            *_mlp("mlp.shared_expert", "shared_expert_intermediate_size", need="shared_expert_intermediate_size"),
            *_weights("1,hidden", "mlp.shared_expert_gate", "mlp_res_proj"),
            *_weights("1,hidden", "attn_res_proj", need=OPTIONAL),
            *_only("hidden", "mlp_res_norm_weight"), *_only("hidden", "attn_res_norm_weight", need=OPTIONAL),
        ),
        *_weights("1,hidden", "model.attnres_final.res_proj"),
        *_only("hidden", "model.attnres_final.res_norm_weight"),
    ),
    keys=(
        *LLAMA_KEYS, Key("", ("layer_types",), "str[]"),
        *_counts(
            "num_experts", "num_experts_per_tok", _WIDTH, "shared_expert_intermediate_size",
            "block_attn_res_block_size", "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim",
            "linear_value_head_dim", "linear_conv_kernel_dim",
        ),
        flag("norm_topk_prob"),
    ),
)

_MOVA = "mova_num_experts"
_K2_HORIZON = Architecture(
    id="k2_horizon", gguf="k2_horizon", **hf_names("K2Horizon", "k2_horizon"),
    tensors=_layers(
        *_weights("q,hidden", "self_attn.q_proj"), *_weights("kv,hidden", "self_attn.k_proj"),
        *_weights("hidden,q", "self_attn.o_proj"), *_only("q", "self_attn.q_proj.bias", need="attention_bias"),
        *_only("kv", "self_attn.k_proj.bias", need="attention_bias"),
        *_only("hidden", "self_attn.o_proj.bias", need="attention_bias"),
        # A value projection, or in sparse layers a mixture of them.
        *_weights("kv,hidden", "self_attn.v_proj", need=OPTIONAL),
        *_only("kv", "self_attn.v_proj.bias", need=OPTIONAL),
        *_weights(f"{_MOVA},hidden", "self_attn.v_router", need=OPTIONAL),
        *_only(_MOVA, "self_attn.v_router.bias", need=OPTIONAL),
        *_weights("kv,hidden", "self_attn.v_experts.{e}", need=OPTIONAL, count=_MOVA),
        *_weights("q", "self_attn.q_norm", need="query_key_norm"),
        *_weights("kv", "self_attn.k_norm", need="query_key_norm"),
        *_weights("q,hidden", "self_attn.gate_proj", need="attention_gate_func"),
        *_mlp("mlp", "ffn", OPTIONAL), *_weights("num_experts,hidden", "mlp.gate", need=OPTIONAL),
        *_only("num_experts", "mlp.gate.bias", need=OPTIONAL),
        *_mlp("mlp.shared_experts", f"{_WIDTH}*num_shared_experts", OPTIONAL),
        *_mlp("mlp.experts.{e}", _WIDTH, OPTIONAL, "num_experts"),
    ),
    keys=(
        *LLAMA_KEYS, flag("attention_bias"), flag("moe_gate_bias"), flag("query_key_norm"), flag("norm_topk_prob"),
        Key("", ("attention_gate_func",), "str"), Key("", ("router_score_func",), "str"),
        Key("", ("router_scaling_factor",), "f32"), Key("", ("mlp_only_layers",), "i32[]"),
        *_counts(
            "num_experts", "num_experts_per_tok", "num_shared_experts", _WIDTH, _MOVA, "mova_num_experts_per_tok",
            "decoder_sparse_step", "layernorm_num_groups", "rope_head_dim",
        ),
    ),
)

_NGRAMS = "emb_split_num*emb_neighbor_num-emb_split_num"
_LONGCAT = next(row for row in plain.ROWS if row.id == "longcat_flash")
_LONGCAT_NGRAM = replace(
    _LONGCAT, id="longcat_flash_ngram", gguf="longcat_flash_ngram",
    **hf_names("LongcatFlashNgram", "longcat_flash_ngram"),
    tensors=(
        *_LONGCAT.tensors,
        *_weights("any_ngrams,any_width", "model.ngram_embeddings.embedders.{e}", count=_NGRAMS),
        *_weights("hidden,any_width", "model.ngram_embeddings.post_projs.{e}", count=_NGRAMS),
    ),
    keys=(*_LONGCAT.keys, *_counts("ngram_vocab_size_ratio", "emb_neighbor_num", "emb_split_num")),
)


def _pangu(name: str, model_type: str, attention: tuple[TensorRow, ...], *keys: Key) -> Architecture:
    """OpenPangu with experts: the first layers dense, norms around the MLP where its config.json says so."""
    return Architecture(
        id=model_type, gguf=model_type, **hf_names(name, model_type),
        tensors=_layers(
            *attention, *_weights("hidden", "pre_mlp_layernorm", "post_mlp_layernorm", need="sandwich_norm"),
            *_mlp("mlp", "ffn", OPTIONAL), *_weights(f"{_ROUTED},hidden", "mlp.gate", need=OPTIONAL),
            *_only(_ROUTED, "mlp.e_score_correction_bias", "mlp.gate.e_score_correction_bias", need=OPTIONAL),
            *_mlp("mlp.shared_experts", f"{_WIDTH}*n_shared_experts", OPTIONAL),
            *_mlp("mlp.experts.{e}", _WIDTH, OPTIONAL, _ROUTED),
        ),
        keys=(
            *DIMS, GROUPED, ROPE, RMS_EPS, VOCAB, Key("", ("hidden_act",), "str"), flag("sandwich_norm"),
            flag("norm_topk_prob"), flag("router_enable_expert_bias"), Key("", ("routed_scaling_factor",), "f32"),
            *_counts(
                _ROUTED, "n_shared_experts", "num_experts_per_tok", _WIDTH, "first_k_dense_replace",
                "num_nextn_predict_layers",
            ),
            *keys,
        ),
    )  # fmt: skip


_QUERIES = "heads*qk_nope_head_dim+heads*qk_rope_head_dim"
_PANGU_ULTRA = _pangu(
    "PanguUltraMoE", "pangu_ultra_moe",
    (
        *_weights(f"{_QUERIES},hidden", "self_attn.q_proj", need="!q_lora_rank"),
        *_weights("q_lora_rank,hidden", "self_attn.q_a_proj", need="q_lora_rank"),
        *_weights("q_lora_rank", "self_attn.q_a_layernorm", need="q_lora_rank"),
        *_weights(f"{_QUERIES},q_lora_rank", "self_attn.q_b_proj", need="q_lora_rank"),
        *_weights("kv_lora_rank+qk_rope_head_dim,hidden", "self_attn.kv_a_proj_with_mqa"),
        *_weights("kv_lora_rank", "self_attn.kv_a_layernorm"),
        *_weights("heads*qk_nope_head_dim+heads*v_head_dim,kv_lora_rank", "self_attn.kv_b_proj"),
        *_weights("hidden,heads*v_head_dim", "self_attn.o_proj"),
    ),
    *_counts("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
)
_KEY, _VALUE, _SINKS = "kv_heads*qk_nope_dim+kv_heads*qk_rope_dim", "kv_heads*v_channels", "param_sink_number"
_PANGU_PRO = _pangu(
    "PanguProMoEV2", "pangu_pro_moe_v2",
    (
        *_weights("heads*qk_nope_dim+heads*qk_rope_dim,hidden", "self_attn.q_proj"),
        *_weights(f"{_KEY},hidden", "self_attn.k_proj"), *_weights(f"{_VALUE},hidden", "self_attn.v_proj"),
        *_only("heads*qk_nope_dim+heads*qk_rope_dim", "self_attn.q_proj.bias", need="attention_bias"),
        *_only(_KEY, "self_attn.k_proj.bias", need="attention_bias"),
        *_only(_VALUE, "self_attn.v_proj.bias", need="attention_bias"),
        *_weights("hidden,heads*v_channels", "self_attn.o_proj"),
        *_only("hidden", "self_attn.o_proj.bias", need="attention_bias"),
        *_weights("qk_nope_dim+qk_rope_dim", "self_attn.k_layernorm"),
        *_only(f"{_SINKS},kv_heads,qk_nope_dim+qk_rope_dim", "self_attn.param_sink_key", need=_SINKS),
        *_only(f"{_SINKS},kv_heads,v_channels", "self_attn.param_sink_value", need="param_sink_with_value"),
    ),
    flag("attention_bias"), flag("param_sink_with_value"),
    *_counts("qk_nope_dim", "qk_rope_dim", "v_channels", _SINKS),
)

# Layers of the other kind have other heads.
_STEP5 = Architecture(
    id="step5", gguf="step5", **hf_names("Step5", "step5"),
    tensors=_layers(
        *_weights("any_q,hidden", "self_attn.q_proj"),
        *_weights("any_kv,hidden", "self_attn.k_proj", "self_attn.v_proj"),
        *_weights("hidden,any_q", "self_attn.o_proj"), *_weights("any_head", "self_attn.q_norm", "self_attn.k_norm"),
        *_weights("any_heads,hidden", "self_attn.g_proj", need="use_head_wise_attn_gate"),
        *_weights(
            "any_index,hidden", *(f"self_attn.sparse_indexer_{part}" for part in "qkzw"), need=OPTIONAL
        ),
        *_weights("any_proxy", "self_attn.sparse_indexer_q_norm", "self_attn.sparse_indexer_k_norm", need=OPTIONAL),
        *_only("any_proxy", "self_attn.sparse_indexer_k_norm.bias", need=OPTIONAL),
        *_only("any_heads", "self_attn.ssmax_s", need=OPTIONAL),
        *_mlp("mlp", "ffn", OPTIONAL), *_weights("moe_num_experts,hidden", "moe.gate", need=OPTIONAL),
        *_only("moe_num_experts", "moe.router_bias", need=OPTIONAL),
        *_weights(f"moe_num_experts,{_WIDTH},hidden", "moe.gate_proj", "moe.up_proj", need=OPTIONAL),
        *_weights(f"moe_num_experts,hidden,{_WIDTH}", "moe.down_proj", need=OPTIONAL),
        *_mlp("moe.share_expert", "share_expert_dim", OPTIONAL), *_mlp("share_expert", "share_expert_dim", OPTIONAL),
    ),
    keys=(
        *DIMS, replace(GROUPED, hf=("num_attention_groups", "num_key_value_heads")), ROPE, RMS_EPS, VOCAB, HEAD_DIM,
        *_counts("moe_num_experts", "moe_top_k", _WIDTH, "share_expert_dim", "num_nextn_predict_layers"),
        Key("", ("layer_types",), "str[]"), Key("", ("attention_other_setting",)), Key("", ("sparse_config",)),
        Key("", ("moe_layers_enum",), "str"), Key("", ("moe_router_activation",), "str"),
        Key("", ("moe_router_scaling_factor",), "f32"), Key("", ("att_impl_type",), "str"),
        *map(flag, ("use_moe", "norm_expert_weight", "use_head_wise_attn_gate", "use_moe_router_bias", "zero_centered",
                    "need_fp32_gate", "fp32_residual_connection")),
        *(Key("", (name,), "f32[]") for name in ("partial_rotary_factors", "swiglu_limits", "swiglu_limits_shared")),
    ),
)  # fmt: skip

# As transformers saves it: with Mistral's own names, inside a network that sees. Layers without rope have other keys.
_MISTRAL_LARGE = Architecture(
    id="mistral_large4_text", gguf="mistral_large4",
    **class_names("MistralLarge4ForCausalLM", types=("mistral_large4_text",)),
    tensors=(
        TensorRow(("tok_embeddings.weight",), ("token_embd.weight",), ("vocab,hidden",)),
        *block(
            *_weights("hidden", "attention_norm", "ffn_norm"), *_weights(f"{_QUERIES},hidden", "attention.wq"),
            *_weights("any_kv_a,hidden", "attention.wkv_a_with_mqa"), *_weights("kv_lora_rank", "attention.kv_a_norm"),
            *_weights("any_kv_b,kv_lora_rank", "attention.wkv_b"),
            *_weights("hidden,heads*v_head_dim", "attention.wo"),
            *_only("heads", "attention.ssmax_scaling.b", "attention.ssmax_scaling.s"),
            *_only("any_kv_a", "attention.wkv_a_with_mqa.bias", need="attention_bias"),
            *_only("hidden", "attention.wo.bias", need="attention_bias"),
            *_only(
                "index_head_dim", "attention.indexer.k_norm.weight", "attention.indexer.k_norm.bias", need=OPTIONAL
            ),
            *_only(
                "hidden", "attention.indexer.q_input_norm.weight", "attention.indexer.q_input_norm.bias", need=OPTIONAL
            ),
            *_only(
                "index_n_heads", "attention.indexer.ssmax_scaling.b", "attention.indexer.ssmax_scaling.s",
                need=OPTIONAL,
            ),
            *_weights("index_n_heads,hidden", "attention.indexer.weights_proj", need=OPTIONAL),
            *_weights("index_head_dim,hidden", "attention.indexer.wk", need=OPTIONAL),
            *_weights("index_n_heads*index_head_dim,hidden", "attention.indexer.wq_b", need=OPTIONAL),
            *_weights("ffn,hidden", "feed_forward.w1", "feed_forward.w3", need=OPTIONAL),
            *_weights("hidden,ffn", "feed_forward.w2", need=OPTIONAL),
            *_weights(f"{_ROUTED},hidden", "gate", need=OPTIONAL),
            *_weights(f"{_WIDTH},hidden", "experts.{e}.w1", "experts.{e}.w3", need=OPTIONAL, count=_ROUTED),
            *_weights(f"hidden,{_WIDTH}", "experts.{e}.w2", need=OPTIONAL, count=_ROUTED),
            *_weights(f"{_WIDTH}*n_shared_experts,hidden", "shared_experts.w1", "shared_experts.w3", need=OPTIONAL),
            *_weights(f"hidden,{_WIDTH}*n_shared_experts", "shared_experts.w2", need=OPTIONAL), hf="layers.{n}.",
        ),
        *_only("qk_rope_head_dim/2", "lerope.alpha"), *_weights("hidden", "norm"),
        TensorRow(("output.weight",), ("output.weight",), ("vocab,hidden",), HEAD),
    ),
    keys=(
        *DIMS, GROUPED, ROPE, RMS_EPS, VOCAB, Key("", ("hidden_act",), "str"), flag("attention_bias"),
        Key("", ("routed_scaling_factor",), "f32"), Key("", ("final_logit_softcapping",), "f32"), HEAD_DIM,
        *_counts(
            _ROUTED, "n_shared_experts", "num_experts_per_tok", _WIDTH, "kv_lora_rank", "qk_nope_head_dim",
            "qk_rope_head_dim", "v_head_dim", "n_group", "topk_group", "index_topk", "index_head_dim", "index_n_heads",
            "first_k_dense_replace",
        ),
        *(Key("", (name,), "str[]") for name in ("layer_types", "mlp_layer_types", "indexer_types")),
        *(Key("", (name,), "i32[]") for name in ("no_rope_layers", "kv_source_layers")),
    ),
)

ROWS: tuple[Architecture, ...] = (
    _MISTRAL_LARGE, _ALICE_AI, _K2_HORIZON, _LONGCAT_NGRAM, _PANGU_ULTRA, _PANGU_PRO, _STEP5,
)
