"""Rows of the architecture table: networks that attend to a window and to keys of many positions in one."""

from __future__ import annotations

from dataclasses import replace

from aprfmt.arch.row import INT32, MOST, OPTIONAL, Architecture, Key, TensorRow
from aprfmt.arch.rows.hyper import HC_COUNT, HC_EPS, last_stream, streams
from aprfmt.arch.rows.parts import (
    DIMS, GROUPED, HEAD_DIM, RMS_EPS, ROPE, SILU, block, embedding, experts, final_norm, head, hf_names, linear,
    must_be, norm, optional, rename, tensor,
)
from aprfmt.arch.rows.parts_mla import INDEXER
from aprfmt.arch.rows.parts_moe import COUNT, MTP, SHARED_COUNT, USED, WEIGHTS_SCALE, WIDTH, draft_layer, packed_experts

_TURNS = "2*hc_mult+hc_mult*hc_mult"


def _compressor(hf: str, gguf: str, width: str, layers: str, size: str) -> tuple[TensorRow, ...]:
    """What makes one key of as many positions as the layer's ratio: `width` values of each, and a key of `size`."""
    return (
        tensor(f"{hf}.ape", f"{gguf}_ape.weight", f"compress_ratios,{width}", layers=layers),
        *linear(f"{hf}.wkv", f"{gguf}_kv", f"{width},hidden", layers=layers),
        *linear(f"{hf}.wgate", f"{gguf}_gate", f"{width},hidden", layers=layers),
        *norm(f"{hf}.norm", f"{gguf}_norm", size, layers=layers),
    )


def _attention() -> tuple[TensorRow, ...]:
    """One key that is the value too; an output of low rank, group of heads by group; what compresses and chooses."""
    indexer, size = "attn.indexer", "index_head_dim"
    return (
        *linear("attn.wq_a", "attn_q_a", "q_lora_rank,hidden"), *norm("attn.q_norm", "attn_q_a_norm", "q_lora_rank"),
        *linear("attn.wq_b", "attn_q_b", "q,q_lora_rank"), *linear("attn.wkv", "attn_kv", "head_dim,hidden"),
        *norm("attn.kv_norm", "attn_kv_a_norm", "head_dim"),
        *optional(*norm("attn.norm", "attn_kv_a_norm", "head_dim")),  # as transformers saves it
        tensor("attn.attn_sink", "attn_sinks.weight", "heads"),
        *linear("attn.wo_a", "attn_output_a", "o_groups*o_lora_rank,q/o_groups"),
        *linear("attn.wo_b", "attn_output_b", "hidden,o_groups*o_lora_rank"),
        *_compressor("attn.compressor", "attn_compressor", "2*head_dim", "compressor&indexer", "head_dim"),
        *_compressor("attn.compressor", "attn_compressor", "head_dim", "compressor&!indexer", "head_dim"),
        *linear(f"{indexer}.wq_b", "indexer.attn_q_b", f"index_n_heads*{size},q_lora_rank", layers="indexer"),
        *linear(f"{indexer}.weights_proj", "indexer.proj", "index_n_heads,hidden", layers="indexer"),
        *_compressor(f"{indexer}.compressor", "indexer_compressor", f"2*{size}", "indexer", size),
    )


def _draft() -> tuple[TensorRow, ...]:
    """A draft layer has the two halves of its projection apart."""
    halves = TensorRow(
        ("e_proj.weight", "h_proj.weight"), ("nextn.eh_proj.weight",), ("hidden,hidden",),
        gguf_dims=("hidden,2*hidden",), layers="draft", transposed=True, gguf_transposed=(True,),
    )
    return (halves, *(row for row in draft_layer(norm_after="norm") if "eh_proj" not in row.hf[0]))


def _experts() -> tuple[TensorRow, ...]:
    """Experts that a table gives each token in the first layers; a shared one beside them."""
    return (
        *linear("ffn.gate", "ffn_gate_inp", "experts,hidden"),
        tensor("ffn.gate.tid2eid", "ffn_gate_tid2eid.weight", "vocab,experts_used", layers="hashed", value=INT32),
        tensor("ffn.gate.bias", "exp_probs_b.bias", "experts", layers="!hashed"),
        tensor("ffn.gate.bias_vl", "exp_probs_b_vl.bias", "experts", OPTIONAL),
        *packed_experts("ffn.experts.{e}.", ("w1", "w3", "w2"), ("weight", "scale"), "mxfp4_e8m0"),
        *experts("ffn.experts.{e}.", ("w1", "w3", "w2")),
        *linear("ffn.shared_experts.w1", "ffn_gate_shexp", "n_shared_experts*moe_ffn,hidden"),
        *linear("ffn.shared_experts.w3", "ffn_up_shexp", "n_shared_experts*moe_ffn,hidden"),
        *linear("ffn.shared_experts.w2", "ffn_down_shexp", "hidden,n_shared_experts*moe_ffn"),
    )


_LAYER = (
    *streams("hc_attn_", "hc_ffn_", _TURNS, "3"), *norm("attn_norm", "attn_norm"), *_attention(),
    *norm("ffn_norm", "ffn_norm"), *_experts(),
)
_LAYER_OF_DRAFTS = tuple(row for row in _LAYER if row.layers in ("", "!hashed") and "bias_vl" not in row.hf[0])
_ALL_STREAMS = Key("embedding_length_out", via="all_streams")
_KEYS = (
    *(key for key in DIMS if key.field != "intermediate_size"), GROUPED, ROPE, RMS_EPS,
    *rename((COUNT, USED), num_experts=("n_routed_experts", "num_local_experts")),
    Key("expert_gating_func", ("scoring_func",), via="gating"), HEAD_DIM,
    Key("rope.dimension_count", ("qk_rope_head_dim",), via="eighth_of_head"),
    Key("attention.q_lora_rank", ("q_lora_rank",)), Key("attention.sliding_window", ("sliding_window",)), WIDTH,
    SHARED_COUNT, WEIGHTS_SCALE, Key("expert_weights_norm", ("norm_topk_prob",), "bool", constant=True),
    Key("swiglu_clamp_exp", ("swiglu_limit",), "f32[]", via="one_for_all", draft=MOST),
    Key("swiglu_clamp_shexp", kind="f32[]", via="same_limit", draft=MOST), *INDEXER,
    Key("attention.output_group_count", ("o_groups",)), Key("attention.output_lora_rank", ("o_lora_rank",)),
    Key("", ("compress_rates",)), Key("", ("mlp_layer_types",), "str[]"),
    Key("attention.compress_ratios", ("compress_ratios",), "i32[]", via="compress_ratios"),
    Key("attention.compress_rope_freq_base", ("compress_rope_theta",), "f32", via="compressed_rope"), HC_COUNT,
    Key("hyper_connection.sinkhorn_iterations", ("hc_sinkhorn_iters",)), HC_EPS,
    Key("hash_layer_count", ("num_hash_layers",), via="hash_layers"), _ALL_STREAMS, MTP,
    must_be("attention_bias", False), must_be("mlp_bias", False), SILU,
)
_OF_DRAFTS = {"block_count": "draft_stages", "attention.compress_ratios": "no_ratios", "hash_layer_count": "no_tables"}
_DEFAULTS = {
    "moe_intermediate_size": 2048, "num_key_value_heads": 1, "head_dim": 512, "q_lora_rank": 1024,
    "num_experts_per_tok": 6, "n_routed_experts": 256, "n_shared_experts": 1, "scoring_func": "sqrtsoftplus",
    "norm_topk_prob": True, "routed_scaling_factor": 1.5, "max_position_embeddings": 1048576,
    "compress_rope_theta": 160000.0, "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6, "swiglu_limit": 10.0,
    "sliding_window": 128, "o_groups": 8, "o_lora_rank": 1024, "index_n_heads": 64, "index_head_dim": 128,
    "index_topk": 512, "rms_norm_eps": 1e-6, "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False,
    "bos_token_id": 0, "eos_token_id": 1,
}

_PACKED = {
    "quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "activation_scheme": "dynamic",
    "weight_block_size": [128, 128], "expert_dtype": "fp4", "modules_to_not_convert": ["attn", "shared_experts"],
}

ROWS: tuple[Architecture, ...] = (
    Architecture(
        id="deepseek_v4",
        required={
            "attention.q_lora_rank": "", "attention.sliding_window": "", "attention.compress_ratios": "",
            "attention.compress_rope_freq_base": "", "hyper_connection.count": "",
            "hyper_connection.sinkhorn_iterations": "", "hyper_connection.epsilon": "", "hash_layer_count": "",
            "expert_gating_func": "",
        },
        gguf="deepseek4", **hf_names("DeepseekV4", "deepseek_v4"), head_always=True, packed_config=_PACKED,
        gguf_only=(), drafts=(("mtp.{m}.", "layers.{n}."),), drafts_apart=(("mtp.0.hc_head_", "hc_head_"),),
        prefixes=(("model.embed_tokens.", "embed."), ("model.hc_head.hc_", "hc_head_"), ("model.", "")),
        tensors=(
            embedding("embed"), *block(*_LAYER, *_draft(), hf="layers.{n}."), *last_stream("hc_head_"),
            *final_norm("norm"), *head("head"),
        ),
        keys=_KEYS,
        defaults={"": _DEFAULTS},
    ),
    Architecture(
        id="deepseek_v4_dspark",
        required={"target_layers": "", "attention.q_lora_rank": "", "attention.sliding_window": ""}, gguf="dflash",
        when="hyper_connection.count", hf_class="DeepseekV4DSparkModel", model_type="deepseek_v4",
        hf_classes=("DeepseekV4DSparkModel",), model_types=(), packed_config=_PACKED, gguf_only=(),
        # The last stage has what follows all of them; published drafts have three.
        prefixes=tuple(
            (f"mtp.{stage}.{name}", f"mtp.2.{name}")
            for stage in (0, 1, 3)
            for name in ("norm.", "hc_head_", "markov_head.", "confidence_head.")
        ),
        tensors=(
            *linear("mtp.0.main_proj", "fc", "hidden,dspark_target_layer_ids*hidden"),
            *norm("mtp.0.main_norm", "enc.output_norm"), *block(*_LAYER_OF_DRAFTS, hf="mtp.{n}."),
            *last_stream("mtp.2.hc_head_"), *norm("mtp.2.norm", "output_norm"),
            *linear("mtp.2.markov_head.markov_w1", "markov_w1", "vocab,dspark_markov_rank"),
            *linear("mtp.2.markov_head.markov_w2", "markov_w2", "vocab,dspark_markov_rank"),
            *optional(*linear("mtp.2.confidence_head.proj", "conf_proj", "1,hidden+dspark_markov_rank")),
            # Of the model that it is published with, whose layers are carried beside it.
            *(
                replace(row, gguf=(), need=OPTIONAL)
                for row in (embedding("embed"), *final_norm("norm"), *head("head"), *last_stream("hc_head_"))
            ),
        ),
        keys=(
            *(replace(key, via=_OF_DRAFTS.get(key.gguf, key.via)) for key in _KEYS if key not in (MTP, _ALL_STREAMS)),
            Key("block_size", ("dspark_block_size",)),
            Key("target_layers", ("dspark_target_layer_ids",), "i32[]", via="next_layers"),
            Key("tokenizer.ggml.mask_token_id", ("dspark_noise_token_id",)), Key("", ("dspark_markov_rank",)),
        ),
        defaults={"": _DEFAULTS},
    ),
)
