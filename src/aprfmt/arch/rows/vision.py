"""Rows of the architecture table: language models of networks that also see, where GGUF has its own name for them.

Their positions are triples. Those of text have three equal numbers, which is what Qwen2 and Qwen3 compute: a
Hugging Face folder of the language model alone is one of these.
"""

from __future__ import annotations

from aprfmt.arch.row import REQUIRED, Architecture, Key
from aprfmt.arch.rows.parts import DECODER, SILU, attention, decoder, must_be

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


ROWS: tuple[Architecture, ...] = (
    Architecture(
        id="qwen2_vl",
        required={"rope.dimension_sections": ""},
        gguf="qwen2vl",
        hf_class="Qwen2ForCausalLM",
        model_type="qwen2",
        hf_classes=("Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"),
        model_types=("qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text"),
        gguf_only=(),
        tensors=decoder(*attention(REQUIRED)),
        keys=(*DECODER, SILU, must_be("use_sliding_window", False)),
        defaults={"": _QWEN2_VL_DEFAULTS},
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
)
