"""Rows of the architecture table: language models of networks that also see, where GGUF has its own name for them.

Their positions are triples. Those of text have three equal numbers, which is what Qwen2 and Qwen3 compute: a
Hugging Face folder of the language model alone is one of these.
"""

from __future__ import annotations

from aprfmt.arch.row import REQUIRED, Architecture, Key, TensorRow
from aprfmt.arch.rows.parts import DECODER, SILU, attention, decoder, gated_mlp, must_be, split, tensor
from aprfmt.arch.rows.parts_moe import NO_BIAS, WIDTH, moe_decoder, moe_keys, router_and_experts

_DEFAULTS = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "num_key_value_heads": 32}
_DEEPSTACK = Key("n_deepstack_layers", ("deepstack_layers", "vision_config.deepstack_visual_indexes"), via="number_of")
"""How many layers of the vision tower also feed the first layers of the language model."""


def _language(name: str) -> dict[str, object]:
    """What a config.json of the language model alone says, whatever network it was part of."""
    return {"architectures": [f"{name}ForCausalLM"], "model_type": name.lower()}


_QWEN2_VL_DEFAULTS = {
    **_DEFAULTS, "rms_norm_eps": 1e-5, "max_position_embeddings": 32768, "rope_theta": 1e6,
    "num_key_value_heads": 8,
}  # fmt: skip
_QWEN2_5_OMNI = {"rms_norm_eps": 1e-6, "num_key_value_heads": 4, "tie_word_embeddings": True}
_SPARSE = (must_be("decoder_sparse_step", 1), must_be("mlp_only_layers", []))
_QWEN3_VL_MOE_DEFAULTS = {
    "rms_norm_eps": 1e-6, "norm_topk_prob": True, "max_position_embeddings": 128000, "rope_theta": 5e5,
    "num_key_value_heads": 16, "moe_intermediate_size": 1408, "num_experts": 60, "num_experts_per_tok": 4,
}  # fmt: skip
_QWEN3_OMNI_MOE = {
    "max_position_embeddings": 32768, "rope_theta": 1e6, "num_key_value_heads": 4, "moe_intermediate_size": 768,
    "num_experts": 128, "num_experts_per_tok": 8,
}  # fmt: skip


def _published_experts() -> tuple[TensorRow, ...]:
    """Qwen3-VL's experts as they are published: all in two tensors, input before output."""
    stacked = {f"ffn_{name}_exps.weight": "experts,moe_ffn,hidden" for name in ("gate", "up")}
    order, down = ("deal:experts,moe_ffn,moe_ffn",), "experts,moe_ffn,hidden"
    return (
        split(
            "mlp.experts.gate_up_proj", "experts,hidden,2*moe_ffn", stacked, order=order, layers="moe", transposed=True
        ),
        tensor("mlp.experts.down_proj", "ffn_down_exps.weight", down, layers="moe", transposed=True),
    )


ROWS: tuple[Architecture, ...] = (
    Architecture(
        id="qwen2_vl",
        required={"rope.dimension_sections": ""},
        gguf="qwen2vl",
        hf_class="Qwen2ForCausalLM",
        model_type="qwen2",
        hf_classes=("Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration", "Qwen2VLModel"),
        bare_classes=("Qwen2VLModel",),
        model_types=("qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text", "qwen2_5_omni_text"),
        gguf_only=(),
        tensors=decoder(*attention(REQUIRED)),
        keys=(*DECODER, SILU, must_be("use_sliding_window", False)),
        defaults={"": _QWEN2_VL_DEFAULTS, "qwen2_5_omni_text": _QWEN2_5_OMNI},
        config=_language("Qwen2"),
    ),
    Architecture(
        id="qwen3_vl",
        required={"rope.dimension_sections": ""},
        gguf="qwen3vl",
        hf_class="Qwen3ForCausalLM",
        model_type="qwen3",
        hf_classes=("Qwen3VLForConditionalGeneration",),
        model_types=("qwen3_vl", "qwen3_vl_text"),
        gguf_only=(),
        tensors=decoder(*attention("attention_bias", "attention_bias", qk_norm="head_dim")),
        keys=(*DECODER, _DEEPSTACK, SILU, must_be("use_sliding_window", False), must_be("attention_bias", False)),
        defaults={"": _DEFAULTS | {"head_dim": 128, "max_position_embeddings": 128000, "rope_theta": 5e5}},
        config=_language("Qwen3"),
    ),
    Architecture(
        id="qwen3_vl_moe",
        required={"rope.dimension_sections": ""},
        gguf="qwen3vlmoe",
        hf_class="Qwen3MoeForCausalLM",
        model_type="qwen3_moe",
        hf_classes=(),
        model_types=("qwen3_vl_moe_text", "qwen3_omni_moe_text"),
        gguf_only=(),
        tensors=moe_decoder(
            *attention("attention_bias", "attention_bias", qk_norm="head_dim"),
            *router_and_experts("moe"),
            *_published_experts(),
            *gated_mlp(layers="dense"),
        ),
        keys=moe_keys(WIDTH, _DEEPSTACK, must_be("norm_topk_prob", True), NO_BIAS, *_SPARSE),
        defaults={"": _QWEN3_VL_MOE_DEFAULTS, "qwen3_omni_moe_text": _QWEN3_OMNI_MOE},
    ),
)
