"""Networks that vLLM runs and neither transformers nor llama.cpp has: names and sizes as vLLM loads them.

Those of MiMo, Sarvam and TeleChat 2 are what llama.cpp knows under another name; of the others a GGUF is refused.
"""

from __future__ import annotations

from dataclasses import replace

from aprfmt.arch.blocks.decoder import (
    DECODER, DIMS, GROUPED, HEAD_DIM, LLAMA_KEYS, PAIRS, RMS_EPS, ROPE, ROPE_DIM, SILU, SLIDING_LAYERS, VOCAB,
    WHOLE_HEADS, WINDOW, attention, block, class_names, decoder, flag, gated_mlp, hf_names, linear, must_be, network,
    norm, optional, rename, split, tensor,
)
from aprfmt.arch.blocks.encoder import hf_only
from aprfmt.arch.blocks.mla import mla_decoder, mla_keys
from aprfmt.arch.blocks.moe import NUM_SHARED_EXPERTS, selection_bias, shared_expert
from aprfmt.arch.converters.common import gating
from aprfmt.arch.row import REQUIRED, Architecture, Key, TensorRow


_MTP, _COUNT, _WIDTH = "num_nextn_predict_layers", "moe_num_experts", "moe_intermediate_size"


def _mimo_drafts() -> tuple[TensorRow, ...]:
    """MTP layers of a Qwen2 each, which only a checkpoint has."""
    return block(
        *hf_only("hidden", "token_layernorm", "hidden_layernorm", "input_layernorm", "post_attention_layernorm"),
        *hf_only("hidden", "final_layernorm"), *hf_only("hidden,2*hidden", "input_proj"),
        *hf_only("q,hidden", "self_attn.q_proj"), *hf_only("kv,hidden", "self_attn.k_proj", "self_attn.v_proj"),
        *hf_only("hidden,q", "self_attn.o_proj"), *hf_only("ffn,hidden", "mlp.gate_proj", "mlp.up_proj"),
        *hf_only("hidden,ffn", "mlp.down_proj"), hf="model.mtp_layers.{n}.", gguf="", depth=_MTP,
    )


def _of_sarvam(row: TensorRow) -> TensorRow:
    """Sarvam's config.json counts the shared experts under another name."""
    return replace(row, dims=tuple(dims.replace("n_shared_experts", "num_shared_experts") for dims in row.dims))


_KEYS_AND_VALUES = {"attn_k.weight": "kv,hidden", "attn_v.weight": "kv,hidden"}
_GATE_UP_DOWN = gated_mlp()
_LOOPS = (Key("", ("loop_num",)), Key("", ("loop_window_size",)))
_SKIPS = tuple(Key("", (f"bskcn_{i}",), "i32[]") for i in (1, 2, 3, 4))
"""Layers of Solar whose output is blended into that of later ones."""

ROWS: tuple[Architecture, ...] = (
    # As XiaomiMiMo/MiMo-7B-Base has it: a Qwen2 with an MTP layer.
    Architecture(
        id="mimo", gguf="qwen2", **hf_names("MiMo", "mimo"),
        tensors=(*decoder(*attention("attention_bias")), *_mimo_drafts()),
        keys=(
            *DECODER, WHOLE_HEADS, WINDOW, SLIDING_LAYERS, SILU, flag("attention_bias"), Key("", (_MTP,)),
            must_be("use_sliding_window", False),
        ),
    ),
    # As sarvamai/sarvam-105b has it: a DeepSeek V3.
    Architecture(
        id="sarvam_mla", gguf="deepseek2", **hf_names("SarvamMLA", "sarvam_mla"), rope_type=0,
        tensors=tuple(map(_of_sarvam, mla_decoder((selection_bias(),)))),
        keys=(
            *(key for key in mla_keys() if not {*key.hf} & {"n_shared_experts", "scoring_func"}), NUM_SHARED_EXPERTS,
            Key("expert_gating_func", ("score_function",), converter=gating), must_be("moe_layer_freq", 1),
        ),
    ),
    # As Tele-AI/TeleChat2-7B has it: a Llama with fused keys and values.
    Architecture(
        id="telechat2", gguf="llama", when="tensors=attn_output.bias&!tensors=attn_q.bias",
        **hf_names("TeleChat2", "telechat2", "TeleChat", also=("telechat",)),
        rope_type=0,
        tensors=network(
            *norm("input_layernorm", "attn_norm"),
            *linear("self_attention.query", "attn_q", "q,hidden", order=PAIRS["q"]),
            split(
                "self_attention.key_value.weight", "2*kv,hidden", _KEYS_AND_VALUES,
                order=("deal:kv_heads,head_dim,head_dim", "head:kv,kv_heads,2,head_dim/2"),
            ),
            *linear("self_attention.dense", "attn_output", "hidden,q", REQUIRED),
            *norm("post_attention_layernorm", "ffn_norm"), *_GATE_UP_DOWN[:2],
            *linear("mlp.down_proj", "ffn_down", "hidden,ffn", REQUIRED),
            hf="transformer.h.{n}.", embed="transformer.word_embeddings", last="transformer.ln_f",
        ),
        keys=(
            *rename(
                DIMS, num_layers="n_layer", num_heads="n_head", intermediate_size="ffn_hidden_size",
                max_position_embeddings="seq_length",
            ),
            GROUPED, ROPE, replace(RMS_EPS, hf=("layer_norm_epsilon",)), VOCAB, ROPE_DIM,
            must_be("apply_residual_connection_post_layernorm", False), must_be("embed_layernorm", False),
        ),
    ),
    Architecture(
        id="teleflm", gguf="teleflm", **hf_names("TeleFLM", "TeleFLM"), tensors=decoder(*attention()),
        keys=(
            *LLAMA_KEYS, flag("use_mup"), Key("", ("mup_scale_factor",), "f32"), Key("", ("input_mult",), "f32"),
            Key("", ("output_mult",), "f32"),
        ),
    ),
    Architecture(
        id="solar", gguf="solar", **hf_names("Solar", "solar"),
        tensors=decoder(*attention("attention_bias"), mlp=gated_mlp("mlp_bias")),
        keys=(*LLAMA_KEYS, flag("attention_bias"), flag("mlp_bias"), *_SKIPS, Key("", ("bskcn_tv",), "f32[]")),
    ),
    Architecture(
        id="step1", gguf="step1", **hf_names("Step1", "step1"),
        tensors=decoder(*attention("attention_bias", "attention_bias"), mlp=gated_mlp("mlp_bias")),
        keys=(
            *DIMS, replace(GROUPED, hf=("num_attention_groups", "num_key_value_heads")), RMS_EPS, VOCAB,
            flag("attention_bias"), flag("mlp_bias"),
        ),
    ),
    Architecture(
        id="iquestloopcoder", gguf="iquestloopcoder", **hf_names("IQuestLoopCoder", "iquestloopcoder"),
        tensors=(
            *decoder(*attention()),
            *block(
                tensor("weight", "loop_gate.weight", "heads,head_dim"), tensor("bias", "loop_gate.bias", "heads"),
                hf="model.gate_projections.{n}.",
            ),
        ),
        keys=(*LLAMA_KEYS, *_LOOPS),
    ),
    Architecture(
        id="rnj1", gguf="rnj1", **hf_names("Rnj1", "rnj1"), nested_rope=True,
        tensors=network(
            *norm("input_layernorm", "attn_norm"),
            *attention("attention_bias", "attention_bias", qk_norm="head_dim"),
            *norm("post_attention_layernorm", "post_attention_norm"),
            *norm("pre_feedforward_layernorm", "ffn_norm"), *gated_mlp(),
            *norm("post_feedforward_layernorm", "post_ffw_norm"),
        ),
        keys=(
            *LLAMA_KEYS, flag("attention_bias"), Key("", ("layer_types",), "str[]"), Key("", ("sliding_window",)),
            Key("", ("query_pre_attn_scalar",), "f32"), Key("", ("final_logit_softcapping",), "f32"),
        ),
    ),
    Architecture(
        id="domyn_edge", gguf="domyn_edge", **hf_names("DomynEdge", "domyn_edge"),
        tensors=network(
            *norm("pre_attention_norm", "attn_norm"), *attention(hf="attention"),
            *norm("attention.k_norm", "attn_k_norm", "head_dim"),
            *norm("post_attention_norm", "post_attention_norm"), *norm("pre_feedforward_norm", "ffn_norm"),
            *gated_mlp(hf="feedforward"), *norm("post_feedforward_norm", "post_ffw_norm"),
        ),
        keys=(
            *LLAMA_KEYS, Key("", ("position_layers",), "str[]"), Key("", ("window_sizes",)),
            Key("", ("per_layer_config",)),
        ),
    ),
    Architecture(
        id="step3_text", gguf="step3_text", **class_names("Step3TextForCausalLM", types=("step3_text",)),
        tensors=network(
            *norm("input_layernorm", "attn_norm"), *linear("self_attn.q_proj", "attn_q_a", "share_q_dim,hidden"),
            *norm("self_attn.inter_norm", "attn_q_a_norm", "share_q_dim"),
            *linear("self_attn.wq", "attn_q_b", "q,share_q_dim"),
            *linear("self_attn.k_proj", "attn_k", "head_dim,hidden"),
            *linear("self_attn.v_proj", "attn_v", "head_dim,hidden"),
            *linear("self_attn.o_proj", "attn_output", "hidden,q"), *norm("post_attention_layernorm", "ffn_norm"),
            *optional(
                *_GATE_UP_DOWN, *linear("moe.gate", "ffn_gate_inp", f"{_COUNT},hidden"),
                *linear("moe.gate_proj", "ffn_gate_exps", f"{_COUNT},{_WIDTH},hidden"),
                *linear("moe.up_proj", "ffn_up_exps", f"{_COUNT},{_WIDTH},hidden"),
                *linear("moe.down_proj", "ffn_down_exps", f"{_COUNT},hidden,{_WIDTH}"),
                *shared_expert("share_expert", "share_expert_dim"),
            ),
        ),
        keys=(
            *rename(DIMS, max_position_embeddings="max_position_embedding"), ROPE, RMS_EPS, VOCAB, HEAD_DIM,
            *(Key("", (name,)) for name in ("share_q_dim", _COUNT, "moe_top_k", _WIDTH, "share_expert_dim")),
            Key("", ("moe_layers_enum",), "str"), flag("norm_expert_weight"),
        ),
    ),
)
