"""Qwen: dense and MoE."""

from __future__ import annotations

from dataclasses import replace

from aprfmt.arch.blocks.decoder import (
    DECODER, DIMS, NO_WINDOW, RMS_EPS, ROPE, SILU, SLIDING_LAYERS, WHOLE_HEADS, WINDOW, attention, decoder, flag,
    gated_mlp, hf_names, linear, must_be, network, norm, split, tensor,
)
from aprfmt.arch.blocks.moe import ALL_SPARSE, NO_BIAS, WIDTH, moe_decoder, moe_keys, router_and_experts, shared_expert
from aprfmt.arch.converter import DEFAULT, Converter
from aprfmt.arch.row import REQUIRED, Architecture, Key, TensorRow


_WINDOWED = (flag("use_sliding_window"), Key("", ("max_window_layers",)))
number_of = Converter(
    derive=lambda scope: 0, normalize=lambda value, scope: len(value) if isinstance(value, list) else DEFAULT,
)
_DEEPSTACK = Key(
    "n_deepstack_layers", ("deepstack_layers", "vision_config.deepstack_visual_indexes"), converter=number_of,
)
"""Number of vision tower layers that also feed the first layers of the language model."""


def _language(name: str) -> dict[str, object]:
    """The language model's own config.json, whatever network it was part of."""
    return {"architectures": [f"{name}ForCausalLM"], "model_type": name.lower()}


def _published_experts() -> tuple[TensorRow, ...]:
    """Qwen3-VL's experts as published: all in two tensors, input before output."""
    stacked = {f"ffn_{name}_exps.weight": "experts,moe_ffn,hidden" for name in ("gate", "up")}
    order, down = ("deal:experts,moe_ffn,moe_ffn",), "experts,moe_ffn,hidden"
    return (
        split(
            "mlp.experts.gate_up_proj", "experts,hidden,2*moe_ffn", stacked, order=order, layers="moe", transposed=True,
        ),
        tensor("mlp.experts.down_proj", "ffn_down_exps.weight", down, layers="moe", transposed=True),
    )


ROWS: tuple[Architecture, ...] = (
    Architecture(
        id="qwen2", gguf="qwen2", **hf_names("Qwen2", "qwen2"),
        tensors=decoder(*attention(REQUIRED)), keys=(*DECODER, WHOLE_HEADS, WINDOW, SLIDING_LAYERS, SILU),
        differs=(NO_WINDOW,),
    ),
    Architecture(  # as in KORMo-Team/KORMo-10B-base: a llama with other names of its norms
        id="kormo", gguf="qwen2", when="tensors=attn_q.weight&!tensors=attn_q.bias", **hf_names("KORMo", "kormo"),
        tensors=network(
            *norm("pre_attention_layernorm", "attn_norm"), *attention(), *norm("pre_mlp_layernorm", "ffn_norm"),
            *gated_mlp(),
        ),
        keys=(*DECODER, WHOLE_HEADS, SILU, must_be("attention_bias", False), must_be("mlp_bias", False)),
    ),
    Architecture(
        id="qwen3", gguf="qwen3", **hf_names("Qwen3", "qwen3"),
        tensors=decoder(*attention("attention_bias", "attention_bias", qk_norm="head_dim")),
        keys=(*DECODER, WINDOW, SLIDING_LAYERS, SILU, must_be("attention_bias", False)), differs=(NO_WINDOW,),
    ),
    Architecture(
        id="qwen2_moe", gguf="qwen2moe", **hf_names("Qwen2Moe", "qwen2_moe"),
        tensors=moe_decoder(
            *attention("qkv_bias"), *router_and_experts("moe"),
            *linear("mlp.shared_expert_gate", "ffn_gate_inp_shexp", "1,hidden", layers="moe"),
            *shared_expert("mlp.shared_expert", "shared_expert_intermediate_size", layers="moe"),
            *gated_mlp(layers="dense"),
        ),
        keys=moe_keys(
            WIDTH, Key("expert_shared_feed_forward_length", ("shared_expert_intermediate_size",)),
            must_be("norm_topk_prob", False), flag("qkv_bias"), *ALL_SPARSE, WINDOW, SLIDING_LAYERS, *_WINDOWED,
        ),
        differs=(NO_WINDOW,),
    ),
    Architecture(
        id="qwen3_moe", gguf="qwen3moe", **hf_names("Qwen3Moe", "qwen3_moe"),
        tensors=moe_decoder(
            *attention("attention_bias", "attention_bias", qk_norm="head_dim"), *router_and_experts("moe"),
            *gated_mlp(layers="dense"),
        ),
        keys=moe_keys(WIDTH, must_be("norm_topk_prob", True), NO_BIAS, *ALL_SPARSE, WINDOW, *_WINDOWED),
        differs=(NO_WINDOW,),
    ),
    Architecture(
        id="qwen2_vl", gguf="qwen2vl", hf_class="Qwen2ForCausalLM", model_type="qwen2",
        hf_classes=("Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration", "Qwen2VLModel"),
        bare_classes=("Qwen2VLModel",),
        model_types=("qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text", "qwen2_5_omni_text"),
        tensors=decoder(*attention(REQUIRED)), keys=(*DECODER, SILU, must_be("use_sliding_window", False)),
        config=_language("Qwen2"),
    ),
    Architecture(
        id="qwen3_vl", gguf="qwen3vl", hf_class="Qwen3ForCausalLM", model_type="qwen3",
        hf_classes=("Qwen3VLForConditionalGeneration",), model_types=("qwen3_vl", "qwen3_vl_text", "qwen3_asr_text"),
        tensors=decoder(*attention("attention_bias", "attention_bias", qk_norm="head_dim")),
        keys=(*DECODER, _DEEPSTACK, SILU, must_be("use_sliding_window", False), must_be("attention_bias", False)),
        config=_language("Qwen3"),
    ),
    Architecture(
        id="qwen3_vl_moe", gguf="qwen3vlmoe", hf_class="Qwen3MoeForCausalLM", model_type="qwen3_moe", hf_classes=(),
        model_types=("qwen3_vl_moe_text", "qwen3_omni_moe_text"),
        tensors=moe_decoder(
            *attention("attention_bias", "attention_bias", qk_norm="head_dim"), *router_and_experts("moe"),
            *_published_experts(), *gated_mlp(layers="dense"),
        ),
        keys=moe_keys(WIDTH, _DEEPSTACK, must_be("norm_topk_prob", True), NO_BIAS, *ALL_SPARSE),
    ),
    Architecture(
        id="qwen", gguf="qwen", **hf_names("QWen", "qwen", end="LMHeadModel"),
        tensors=network(
            *norm("ln_1", "attn_norm"), *linear("attn.c_attn", "attn_qkv", "3*hidden,hidden", REQUIRED),
            *linear("attn.c_proj", "attn_output", "hidden,hidden"), *norm("ln_2", "ffn_norm"),
            *linear("mlp.w1", "ffn_up", "ffn/2,hidden"), *linear("mlp.w2", "ffn_gate", "ffn/2,hidden"),
            *linear("mlp.c_proj", "ffn_down", "hidden,ffn/2"),
            hf="transformer.h.{n}.", embed="transformer.wte", last="transformer.ln_f",
        ),
        keys=(
            *DIMS, replace(ROPE, hf=("rotary_emb_base",)), replace(RMS_EPS, hf=("layer_norm_epsilon",)),
            must_be("no_bias", True), Key("", ("seq_length",)),
        ),
    ),
)
