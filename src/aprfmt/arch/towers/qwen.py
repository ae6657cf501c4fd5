"""Towers of Qwen's vision-language models: pairs of images, rotary positions in two dimensions. Data only."""

from __future__ import annotations

from aprfmt.arch.converters.towers import optional, window_pattern
from aprfmt.arch.row import REQUIRED, Key, TensorRow, Tower
from aprfmt.arch.rows.parts import linear, norm
from aprfmt.arch.towers.parts import (
    IMAGE,
    SILU,
    WIDTH,
    fused_attention,
    layers,
    mlp,
    norms,
    patches_in_time,
    preprocessor,
    projector,
    sees,
    sizes,
)

_V = "visual."
_PREFIXES = (("model.visual.", _V),)
_EPS = Key("vision.attention.layer_norm_epsilon", ("rms_norm_eps",), "f32")
_SQUARE = "4*" + WIDTH
_DEFAULTS = {
    "vision_config.image_size": 560,
    "rms_norm_eps": 1e-6,
    "preprocessor_config.image_mean": [0.48145466, 0.4578275, 0.40821073],
    "preprocessor_config.image_std": [0.26862954, 0.26130258, 0.27577711],
}


def _merger(norm_bias: bool) -> tuple[TensorRow, ...]:
    """The projector: four patches side by side through two layers."""
    return (
        *norm(f"{_V}merger.ln_q", "v.post_ln", WIDTH, REQUIRED if norm_bias else None),
        *linear(f"{_V}merger.mlp.0", "mm.0", f"{_SQUARE},{_SQUARE}", REQUIRED),
        *linear(f"{_V}merger.mlp.2", "mm.2", f"hidden,{_SQUARE}", REQUIRED),
    )


_QWEN2 = (
    *patches_in_time(f"{_V}patch_embed.proj", width="embed_dim"),
    *layers(
        *norms("norm1", "norm2", width="embed_dim"),
        *fused_attention(width="embed_dim"),
        *mlp(width="embed_dim", ffn="embed_dim*mlp_ratio"),
        hf=f"{_V}blocks.{{n}}.",
        depth="depth",
    ),
    *norm(f"{_V}merger.ln_q", "v.post_ln", "embed_dim", REQUIRED),
    *linear(f"{_V}merger.mlp.0", "mm.0", "4*embed_dim,4*embed_dim", REQUIRED),
    *linear(f"{_V}merger.mlp.2", "mm.2", "hidden,4*embed_dim", REQUIRED),
)
_QWEN2_KEYS = sees(
    *sizes(
        embedding_length="embed_dim", feed_forward_length="hidden_size", block_count="depth", head_count="num_heads"
    ),
    Key("", ("vision_config.mlp_ratio",)),
    *IMAGE,
    projector("qwen2vl_merger"),
    _EPS,
)
_QWEN2_DEFAULTS = {
    **_DEFAULTS,
    "vision_config.depth": 32,
    "vision_config.embed_dim": 1280,
    "vision_config.hidden_size": 3584,
    "vision_config.num_heads": 16,
    "vision_config.mlp_ratio": 4,
    "vision_config.patch_size": 14,
}
_KV = f"num_key_value_heads*{WIDTH}/num_heads"

TOWERS: tuple[Tower, ...] = (
    Tower(
        id="qwen2_vl_vision",
        gguf="clip",
        hf_class="Qwen2VLForConditionalGeneration",
        model_type="qwen2_vl",
        hf_classes=("Qwen2VLForConditionalGeneration", "Qwen2VLModel"),
        model_types=("qwen2_vl",),
        when="projector_type=qwen2vl_merger",
        text="",
        prefixes=_PREFIXES,
        tensors=_QWEN2,
        keys=_QWEN2_KEYS,
        defaults={"": _QWEN2_DEFAULTS},
        config={"vision_config.model_type": "qwen2_vl"},
    ),
    Tower(
        id="qwen2_5_vl_vision",
        gguf="clip",
        hf_class="Qwen2_5_VLForConditionalGeneration",
        model_type="qwen2_5_vl",
        hf_classes=("Qwen2_5_VLForConditionalGeneration",),
        model_types=("qwen2_5_vl",),
        when="projector_type=qwen2.5vl_merger",
        text="",
        prefixes=_PREFIXES,
        tensors=(
            *patches_in_time(f"{_V}patch_embed.proj"),
            *layers(
                *norms("norm1", "norm2", bias=False),
                *fused_attention(),
                *mlp("mlp.up_proj", "mlp.down_proj", "mlp.gate_proj"),
                hf=f"{_V}blocks.{{n}}.",
                depth="depth",
            ),
            *_merger(norm_bias=False),
        ),
        f32=(".position_embd.",),
        keys=sees(
            *sizes(block_count="depth", head_count="num_heads"),
            *IMAGE,
            projector("qwen2.5vl_merger"),
            SILU,
            Key("vision.n_wa_pattern", ("vision_config.fullatt_block_indexes",), converter=window_pattern),
            _EPS,
        ),
        defaults={
            "": {
                **_DEFAULTS,
                "vision_config.depth": 32,
                "vision_config.hidden_size": 3584,
                "vision_config.intermediate_size": 3420,
                "vision_config.num_heads": 16,
                "vision_config.patch_size": 14,
                "vision_config.fullatt_block_indexes": [7, 15, 23, 31],
            }
        },
        config={"vision_config.model_type": "qwen2_5_vl"},
    ),
    Tower(
        id="sarashina2_vision",
        gguf="clip",
        hf_class="Sarashina2VisionForCausalLM",
        model_type="sarashina2_vision",
        hf_classes=("Sarashina2VisionForCausalLM",),
        model_types=("sarashina2_vision",),
        when="projector_type=qwen2vl_merger",
        text="llm.",
        prefixes=_PREFIXES,
        tensors=_QWEN2,
        keys=_QWEN2_KEYS,
        defaults={"": _QWEN2_DEFAULTS},
    ),
    Tower(
        id="exaone4_5_vision",
        gguf="clip",
        hf_class="Exaone4_5_ForConditionalGeneration",
        model_type="exaone4_5",
        hf_classes=("Exaone4_5_ForConditionalGeneration",),
        model_types=("exaone4_5",),
        when="projector_type=exaone4_5",
        text="model.language_model.",
        prefixes=_PREFIXES,
        tensors=(
            *patches_in_time(f"{_V}patch_embed.proj"),
            *layers(
                *norms("norm1", "norm2", bias=False),
                *linear("attn.qkv", "attn_qkv", f"{WIDTH}+2*{_KV},{WIDTH}", REQUIRED),
                *linear("attn.proj", "attn_out", f"{WIDTH},{WIDTH}", REQUIRED),
                *mlp("mlp.up_proj", "mlp.down_proj", "mlp.gate_proj"),
                hf=f"{_V}blocks.{{n}}.",
                depth="depth",
            ),
            *_merger(norm_bias=False),
        ),
        keys=sees(
            *sizes(block_count="depth", head_count="num_heads"),
            *IMAGE,
            projector("exaone4_5"),
            SILU,
            preprocessor("vision.image_min_pixels", "min_pixels"),
            preprocessor("vision.image_max_pixels", "max_pixels"),
            Key("vision.attention.head_count_kv", ("vision_config.num_key_value_heads",)),
            Key("vision.attention.layer_norm_epsilon", ("vision_config.rms_norm_eps", "rms_norm_eps"), "f32"),
            Key("vision.window_size", ("vision_config.window_size",), converter=optional),
            Key("vision.n_wa_pattern", ("vision_config.fullatt_block_indexes",), converter=window_pattern),
        ),
        defaults={
            "": {
                **_DEFAULTS,
                "vision_config.depth": 32,
                "vision_config.hidden_size": 3584,
                "vision_config.intermediate_size": 3420,
                "vision_config.num_heads": 16,
                "vision_config.num_key_value_heads": 8,
                "vision_config.patch_size": 14,
                "vision_config.window_size": 112,
                "vision_config.rms_norm_eps": 1e-6,
                "vision_config.fullatt_block_indexes": [7, 15, 23, 31],
            }
        },
    ),
)
