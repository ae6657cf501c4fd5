"""Networks that mlx_lm runs and llama.cpp does not, under the names of the published checkpoints."""

from __future__ import annotations

from dataclasses import replace

from aprfmt.arch.blocks.decoder import (
    DECODER, DIMS, EPSILON, GROUPED, RMS_EPS, ROPE, VOCAB, attention, block, class_names, convert, embedding,
    experts, final_norm, flag, fused_qkv, gated_mlp, hf_names, linear, network, norm, rename, tensor,
)
from aprfmt.arch.blocks.mla import LATENT_SIZES, latent_attention
from aprfmt.arch.blocks.moe import COUNT, DENSE_LAYERS, USED, WIDTH, moe_decoder, shared_expert
from aprfmt.arch.converter import Converter, Scope
from aprfmt.arch.converters.common import times_hidden
from aprfmt.arch.row import OPTIONAL, REQUIRED, Architecture, Key, TensorRow

_HIDDEN_ACT = Key("", ("hidden_act",), "str")
_LINEAR, _LOCAL, _ATTENTION = "linear_attention", "conv_mixer", "full_attention|sliding_attention"


def _words(*names: str, kind: str = "u32") -> tuple[Key, ...]:
    """Keys of config.json that no tensor's shape needs."""
    return tuple(Key("", (name,), kind) for name in names)


def _width_of_lille(scope: Scope) -> object:
    """8/3 of the hidden size, rounded to a multiple of 256."""
    hidden = scope.h.hidden_size
    return None if hidden is None else 256 * round(8 * hidden // 3 / 256)


_LATENT = tuple(
    replace(
        row,
        hf=tuple(name.replace("self_attn.o_proj.", "self_attn.dense.").replace("self_attn.", "attention.")
                 for name in row.hf),
        need=row.need.replace("attention_bias", "use_qkv_bias"), layers="full_attention",
    )
    for row in latent_attention()
)  # fmt: skip


def _bailing(*attention_rows: TensorRow, shared: str) -> tuple[TensorRow, ...]:
    """Ling's and Ring's hybrids: the last layer of each group of `layer_group_size` has softmax attention."""
    return network(
        *norm("input_layernorm", "attn_norm"),
        *linear("attention.query_key_value", "attn_qkv", "3*q,hidden", "use_qkv_bias", layers=_LINEAR),
        *attention_rows, *linear("attention.g_proj", "attn_gate", "q,hidden", layers=_LINEAR),
        *norm("attention.g_norm", "attn_gate_norm", "q", layers=_LINEAR),
        *norm("post_attention_layernorm", "ffn_norm"),
        *linear("mlp.gate", "ffn_gate_inp", "experts,hidden", layers="moe"),
        tensor("mlp.gate.expert_bias", "exp_probs_b.bias", "experts", OPTIONAL, layers="moe"),
        *experts(layers="moe"), *shared_expert("mlp.shared_experts", shared, layers="moe"),
        *gated_mlp(layers="dense"), embed="model.word_embeddings",
    )  # fmt: skip


_BAILING_KEYS = (
    *DECODER, VOCAB, COUNT, USED, WIDTH, DENSE_LAYERS, _HIDDEN_ACT, flag("use_bias"), flag("use_qkv_bias"),
    flag("use_qk_norm"), flag("norm_topk_prob"),
    *_words("num_shared_experts", "layer_group_size", "group_norm_size", "n_group", "topk_group"),
    *_words("routed_scaling_factor", kind="f32"), *_words("score_function", kind="str"),
)

ROWS: tuple[Architecture, ...] = (
    Architecture(
        id="klear", gguf="klear", **hf_names("KlearMoe", "Klear"),
        tensors=moe_decoder(
            *attention("attention_bias", "attention_bias", qk_norm="head_dim"),
            *linear("mlp.gate", "ffn_gate_inp", "experts,hidden", layers="moe"), *experts(layers="moe"),
            *shared_expert("mlp.shared_experts", "n_shared_experts*moe_ffn", layers="moe"),
            *linear("mlp.coefficient", "ffn_coefficient", "2,hidden", REQUIRED, layers="moe"),
            tensor("mlp.expert_bias", "exp_probs_b.bias", "experts", layers="moe"), *gated_mlp(layers="dense"),
        ),
        keys=(
            *DECODER, VOCAB, COUNT, USED, WIDTH, _HIDDEN_ACT, flag("attention_bias"), flag("norm_topk_prob"),
            *_words("n_shared_experts", "decoder_sparse_step"), Key("", ("mlp_only_layers",), "i32[]"),
        ),
    ),
    Architecture(
        id="lille", gguf="lille", **class_names("LilleForCausalLM", types=("lille-130m",)),
        tensors=network(
            *norm("attention.norm", "attn_norm"), *fused_qkv("attention.qkv_proj", "q+2*kv,hidden"),
            *linear("attention.out_proj", "attn_output", "hidden,q"), *norm("feed_forward.norm", "ffn_norm"),
            *linear("feed_forward.gate_proj", "ffn_gate", "ffn,hidden"),
            *linear("feed_forward.up_proj", "ffn_up", "ffn,hidden"),
            *linear("feed_forward.down_proj", "ffn_down", "hidden,ffn"),
            embed="transformer.tok_embeddings", hf="transformer.layers.{n}.", last="transformer.norm",
        ),
        keys=(
            *rename(
                convert(DIMS, intermediate_size=Converter(derive=_width_of_lille)), num_layers="n_layer",
                max_position_embeddings="block_size", hidden_size="n_embd", num_heads="n_head",
            ),
            *rename((GROUPED, RMS_EPS), num_kv_heads="n_kv_heads", rms_norm_eps="layer_norm_eps"), ROPE, VOCAB,
        ),
    ),
    Architecture(
        id="phi3small", gguf="phi3small", **hf_names("Phi3Small", "phi3small"),
        tensors=network(
            *norm("input_layernorm", "attn_norm", bias=REQUIRED),
            *fused_qkv("self_attn.query_key_value", "q+2*kv,hidden", REQUIRED),
            *linear("self_attn.dense", "attn_output", "hidden,q", REQUIRED),
            *norm("post_attention_layernorm", "ffn_norm", bias=REQUIRED),
            *linear("mlp.up_proj", "ffn_up", "2*ffn,hidden", REQUIRED),
            *linear("mlp.down_proj", "ffn_down", "hidden,ffn", REQUIRED),
            last="model.final_layernorm", norm_bias=REQUIRED,
        ),
        keys=(
            *rename(DIMS, intermediate_size="ff_intermediate_size"), GROUPED, EPSILON, VOCAB, _HIDDEN_ACT,
            *_words("dense_attention_every_n_layers", "blocksparse_block_size", "blocksparse_num_local_blocks"),
            *_words("blocksparse_vert_stride"), *_words("gegelu_limit", "mup_attn_multiplier", kind="f32"),
            *_words("mup_embedding_multiplier", "mup_width_multiplier", "rope_embedding_base", kind="f32"),
            *_words("rope_position_scale", kind="f32"), flag("mup_use_scaling"),
        ),
    ),
    Architecture(
        id="bailing_moe_linear", gguf="bailing-moe-linear",
        **class_names("BailingMoeLinearV2ForCausalLM", types=("bailing_moe_linear",)),
        tensors=_bailing(
            *linear("attention.query_key_value", "attn_qkv", "q+2*kv,hidden", "use_qkv_bias", layers="full_attention"),
            *linear("attention.dense", "attn_output", "hidden,q", "use_bias"),
            *norm("attention.query_layernorm", "attn_q_norm", "head_dim", need="use_qk_norm"),
            *norm("attention.key_layernorm", "attn_k_norm", "head_dim", need="use_qk_norm"),
            shared="num_shared_experts*moe_ffn",
        ),
        keys=(*_BAILING_KEYS, flag("norm_head")),
    ),
    Architecture(
        id="bailing_moe_v2_5", gguf="bailing-moe-v2.5",
        hf_class="BailingMoeV2_5ForCausalLM", hf_classes=("BailingMoeV2_5ForCausalLM",),
        model_type="bailing_hybrid", model_types=(),  # BailingMoeV3ForCausalLM has the same
        tensors=_bailing(
            *_LATENT, *linear("attention.dense", "attn_output", "hidden,q", "use_bias", layers=_LINEAR),
            *norm("attention.query_layernorm", "attn_q_norm", "head_dim", need="use_qk_norm", layers=_LINEAR),
            *norm("attention.key_layernorm", "attn_k_norm", "head_dim", need="use_qk_norm", layers=_LINEAR),
            shared="num_shared_experts*moe_shared_expert_intermediate_size",
        ),
        keys=(
            *_BAILING_KEYS, *LATENT_SIZES,
            *_words("q_lora_rank", "moe_shared_expert_intermediate_size", "num_nextn_predict_layers"),
            flag("rope_interleave"), flag("moe_router_enable_expert_bias"),
        ),
    ),
    Architecture(
        id="phixtral", gguf="phixtral", **class_names("PhiForCausalLM", types=("phi-msft",)),
        hf_when="rotary_dim",
        tensors=(
            embedding("transformer.embd.wte"),
            *block(
                *norm("ln", "attn_norm", bias=REQUIRED), *linear("mixer.Wqkv", "attn_qkv", "3*hidden,hidden", REQUIRED),
                *linear("mixer.out_proj", "attn_output", "hidden,hidden", REQUIRED),
                *linear("moe.gate", "ffn_gate_inp", "experts,hidden"),
                tensor("moe.mlp.{e}.fc1.weight", "ffn_up_exps.weight", "4*hidden,hidden"),
                tensor("moe.mlp.{e}.fc1.bias", "ffn_up_exps.bias", "4*hidden"),
                tensor("moe.mlp.{e}.fc2.weight", "ffn_down_exps.weight", "hidden,4*hidden"),
                tensor("moe.mlp.{e}.fc2.bias", "ffn_down_exps.bias", "hidden"),
                hf="transformer.h.{n}.",
            ),
            *final_norm("lm_head.ln", REQUIRED), *linear("lm_head.linear", "output", "vocab,hidden", REQUIRED),
        ),
        keys=(
            *rename(
                convert(DIMS, intermediate_size=Converter(derive=lambda scope: times_hidden(4, scope))),
                num_layers=("num_layers", "n_layer"), max_position_embeddings="n_positions",
                hidden_size=("model_dim", "n_embd"), num_heads=("num_heads", "n_head"),
            ),
            *rename((COUNT, USED, VOCAB), num_experts="num_local_experts", vocab_size=("num_vocab", "vocab_size")),
            EPSILON, *_words("rotary_dim"),
        ),
    ),
    Architecture(
        id="gear", gguf="gear", **hf_names("Gear", "gear"),
        tensors=network(
            *norm("input_layernorm", "attn_norm"),
            *attention("attention_bias", "attention_bias", qk_norm="head_dim", layers=_ATTENTION),
            *attention("attention_bias", "attention_bias", qk_norm="head_dim", hf="local_mixer", layers=_LOCAL),
            *linear("local_mixer.key_conv", "conv_k", "kv,1,conv_L_cache", "attention_bias", layers=_LOCAL),
            *linear("local_mixer.value_conv", "conv_v", "kv,1,conv_L_cache", "attention_bias", layers=_LOCAL),
            *norm("post_attention_layernorm", "post_attention_norm"), *norm("pre_feedforward_layernorm", "ffn_norm"),
            *gated_mlp(), *norm("post_feedforward_layernorm", "post_ffw_norm"),
        ),
        keys=(*DECODER, VOCAB, flag("attention_bias"), Key("", ("layer_types",), "str[]"), *_words("conv_L_cache")),
    ),
)
