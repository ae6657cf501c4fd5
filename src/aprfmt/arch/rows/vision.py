"""Rows of the architecture table: language models of networks that also see, where GGUF has its own name for them.

Most of their positions are triples. Those of text have three equal numbers, which is what Qwen2, Qwen3 and others
compute: a Hugging Face folder of the language model alone is one of these.
"""

from __future__ import annotations

from aprfmt.arch.converter import DEFAULT, Converter, nothing
from aprfmt.arch.converters.common import gating, only_true
from aprfmt.arch.row import REQUIRED, Architecture, Key, TensorRow
from aprfmt.arch.rows.parts import (
    DECODER, PAD, SILU, VOCAB, WHOLE_HEADS, attention, decoder, gated_mlp, must_be, split, tensor,
)
from aprfmt.arch.rows.parts_moe import (
    DENSE_LAYERS, EQUAL_HEADS, GROUPS, NO_BIAS, SHARED_COUNT, WEIGHTS_SCALE, WIDTH, moe_decoder, moe_keys,
    router_and_experts, shared_expert,
)
from aprfmt.arch.rows.qwen import HUNYUAN_DENSE


in_rope = Converter(nothing, lambda value, scope: DEFAULT)
number_of = Converter(
        derive=lambda scope: 0, normalize=lambda value, scope: len(value) if isinstance(value, list) else DEFAULT
    )

_DEFAULTS = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "num_key_value_heads": 32}
_DEEPSTACK = Key(
    "n_deepstack_layers", ("deepstack_layers", "vision_config.deepstack_visual_indexes"), converter=number_of
)
"""How many layers of the vision tower also feed the first layers of the language model."""


def _language(name: str) -> dict[str, object]:
    """What a config.json of the language model alone says, whatever network it was part of."""
    return {"architectures": [f"{name}ForCausalLM"], "model_type": name.lower()}


_QWEN2_VL_DEFAULTS = {
    **_DEFAULTS, "rms_norm_eps": 1e-5, "max_position_embeddings": 32768, "rope_theta": 1e6, "num_key_value_heads": 8,
}
_QWEN2_5_OMNI = {"rms_norm_eps": 1e-6, "num_key_value_heads": 4, "tie_word_embeddings": True}
_SPARSE = (must_be("decoder_sparse_step", 1), must_be("mlp_only_layers", []))
_QWEN3_VL_MOE_DEFAULTS = {
    "rms_norm_eps": 1e-6, "norm_topk_prob": True, "max_position_embeddings": 128000, "rope_theta": 5e5,
    "num_key_value_heads": 16, "moe_intermediate_size": 1408, "num_experts": 60, "num_experts_per_tok": 4,
}
_QWEN3_OMNI_MOE = {
    "max_position_embeddings": 32768, "rope_theta": 1e6, "num_key_value_heads": 4, "moe_intermediate_size": 768,
    "num_experts": 128, "num_experts_per_tok": 8,
}


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
        id="qwen2_vl", required={"rope.dimension_sections": ""}, gguf="qwen2vl", hf_class="Qwen2ForCausalLM",
        model_type="qwen2",
        hf_classes=("Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration", "Qwen2VLModel"),
        bare_classes=("Qwen2VLModel",),
        model_types=("qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text", "qwen2_5_omni_text"), gguf_only=(),
        tensors=decoder(*attention(REQUIRED)), keys=(*DECODER, SILU, must_be("use_sliding_window", False)),
        defaults={"": _QWEN2_VL_DEFAULTS, "qwen2_5_omni_text": _QWEN2_5_OMNI}, config=_language("Qwen2"),
    ),
    Architecture(
        id="qwen3_vl", required={"rope.dimension_sections": ""}, gguf="qwen3vl", hf_class="Qwen3ForCausalLM",
        model_type="qwen3", hf_classes=("Qwen3VLForConditionalGeneration",),
        model_types=("qwen3_vl", "qwen3_vl_text", "qwen3_asr_text"), gguf_only=(),
        tensors=decoder(*attention("attention_bias", "attention_bias", qk_norm="head_dim")),
        keys=(*DECODER, _DEEPSTACK, SILU, must_be("use_sliding_window", False), must_be("attention_bias", False)),
        defaults={"": _DEFAULTS | {"head_dim": 128, "max_position_embeddings": 128000, "rope_theta": 5e5}},
        config=_language("Qwen3"),
    ),
    Architecture(
        id="qwen3_vl_moe", required={"rope.dimension_sections": ""}, gguf="qwen3vlmoe", hf_class="Qwen3MoeForCausalLM",
        model_type="qwen3_moe", hf_classes=(), model_types=("qwen3_vl_moe_text", "qwen3_omni_moe_text"), gguf_only=(),
        tensors=moe_decoder(
            *attention("attention_bias", "attention_bias", qk_norm="head_dim"), *router_and_experts("moe"),
            *_published_experts(), *gated_mlp(layers="dense"),
        ),
        keys=moe_keys(WIDTH, _DEEPSTACK, must_be("norm_topk_prob", True), NO_BIAS, *_SPARSE),
        defaults={"": _QWEN3_VL_MOE_DEFAULTS, "qwen3_omni_moe_text": _QWEN3_OMNI_MOE},
    ),
    Architecture(
        id="paddleocr", required={"rope.dimension_sections": ""}, gguf="paddleocr", hf_class="LlamaForCausalLM",
        model_type="llama", hf_classes=(), model_types=("paddleocr_vl_text",), gguf_only=(),
        tensors=decoder(*attention("use_bias", "use_bias"), mlp=gated_mlp("use_bias")),
        keys=(*DECODER, SILU, must_be("use_bias", False)),
        defaults={"": {
            "max_position_embeddings": 131072, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
            "head_dim": 128, "use_bias": False, "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2,
            "pad_token_id": 0,
        }},
    ),
    Architecture(
        id="hunyuan_vl", gguf="hunyuan_vl", hf_class="HunYuanDenseV1ForCausalLM", model_type="hunyuan_v1_dense",
        hf_classes=(), model_types=("hunyuan_vl_text",), gguf_only=(),
        tensors=HUNYUAN_DENSE,
        keys=(*DECODER, PAD, Key("rope.scaling.alpha", converter=in_rope), SILU, must_be("attention_bias", False)),
        defaults={"": {
            "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "attention_bias": False, "tie_word_embeddings": True,
            "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
        }},
    ),
    Architecture(  # DeepSeek's experts behind plain attention, as deepseek-ai/DeepSeek-OCR has them
        id="deepseek_ocr", required={"expert_shared_count": ""}, gguf="deepseek2-ocr",
        hf_class="DeepseekOCRForCausalLM", model_type="deepseek_vl_v2", hf_classes=(), model_types=(), gguf_only=(),
        tensors=moe_decoder(
            *attention(), *router_and_experts("moe"),
            *shared_expert("mlp.shared_experts", "n_shared_experts*moe_ffn", layers="moe"), *gated_mlp(layers="dense"),
        ),
        keys=moe_keys(
            *GROUPS, Key("expert_gating_func", ("scoring_func",), converter=gating), DENSE_LAYERS, VOCAB, WIDTH,
            SHARED_COUNT, WEIGHTS_SCALE, Key("expert_weights_norm", ("norm_topk_prob",), "bool", converter=only_true),
            Key("rope.dimension_count", ("qk_rope_head_dim",)),
            Key("attention.sliding_window", ("sliding_window_size", "sliding_window")), EQUAL_HEADS, WHOLE_HEADS,
            NO_BIAS, count="n_routed_experts",
        ),
        defaults={"": {"rms_norm_eps": 1e-6, "first_k_dense_replace": 0, "n_shared_experts": 0}},
    ),
)
