"""Towers of Qwen 3's kind: learned positions, and features of some layers beside the last's. Data only."""

from __future__ import annotations

from aprfmt.arch.row import REQUIRED, Key, Tower
from aprfmt.arch.rows.parts import linear, norm, tensor
from aprfmt.arch.towers.parts import GELU, IMAGE, WIDTH, layers, mlp, norms, patches_in_time, projector, sees, sizes

_V = "visual."
MERGED = f"{WIDTH}*spatial_merge_size*spatial_merge_size"
"""Width of a square of patches."""

_DEEPSTACK = f"{_V}deepstack_merger_list."
_MERGE = Key("vision.spatial_merge_size", ("vision_config.spatial_merge_size",))
_EPS = Key("vision.attention.layer_norm_epsilon", ("text_config.rms_norm_eps",), "f32")
_BLOCKS = (
    *patches_in_time(f"{_V}patch_embed.proj"),
    tensor(f"{_V}pos_embed.weight", "v.position_embd.weight", f"num_position_embeddings,{WIDTH}"),
    *layers(
        *norms("norm1", "norm2"),
        *linear("attn.qkv", "attn_qkv", f"3*{WIDTH},{WIDTH}", REQUIRED),
        *linear("attn.proj", "attn_out", f"{WIDTH},{WIDTH}", REQUIRED),
        *mlp("mlp.linear_fc1", "mlp.linear_fc2"),
        hf=f"{_V}blocks.{{n}}.",
        depth="depth",
    ),
)
_TENSORS = (
    tensor(f"{_V}patch_embed.proj.bias", "v.patch_embd.bias", WIDTH),
    *_BLOCKS,
    *layers(
        *norm("norm", "norm", MERGED, REQUIRED, layers="deepstack"),
        *linear("linear_fc1", "fc1", f"{MERGED},{MERGED}", REQUIRED, layers="deepstack"),
        *linear("linear_fc2", "fc2", f"hidden,{MERGED}", REQUIRED, layers="deepstack"),
        hf=f"{_DEEPSTACK}{{n}}.",
        gguf="v.deepstack.{n}.",
        depth="depth",
    ),
    *norm(f"{_V}merger.norm", "v.post_ln", WIDTH, REQUIRED),
    *linear(f"{_V}merger.linear_fc1", "mm.0", f"{MERGED},{MERGED}", REQUIRED),
    *linear(f"{_V}merger.linear_fc2", "mm.2", f"hidden,{MERGED}", REQUIRED),
)
_DEFAULTS = {
    "vision_config.depth": 27,
    "vision_config.hidden_size": 1152,
    "vision_config.intermediate_size": 4304,
    "vision_config.num_heads": 16,
    "vision_config.patch_size": 16,
    "vision_config.spatial_merge_size": 2,
    "vision_config.num_position_embeddings": 2304,
    "text_config.rms_norm_eps": 1e-6,
    "preprocessor_config.image_mean": [0.5, 0.5, 0.5],
    "preprocessor_config.image_std": [0.5, 0.5, 0.5],
}

TOWERS: tuple[Tower, ...] = (
    Tower(
        id="qwen3_vl_vision",
        gguf="clip",
        hf_class="Qwen3VLForConditionalGeneration",
        model_type="qwen3_vl",
        hf_classes=(
            "Qwen3VLForConditionalGeneration",
            "Qwen3VLMoeForConditionalGeneration",
            "Qwen3_5ForConditionalGeneration",
            "Qwen3_5MoeForConditionalGeneration",
            "Qwen4ExpForConditionalGeneration",
        ),
        model_types=("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "qwen4_exp"),
        when="projector_type=qwen3vl_merger",
        text="model.language_model.",
        prefixes=(("model.visual.", _V),),
        listed={_DEEPSTACK: "vision_config.deepstack_visual_indexes"},
        tensors=_TENSORS,
        keys=sees(
            Key("vision.image_size", ("vision_config.num_position_embeddings",), via="square_of_patches"),
            *sizes(image_size="", block_count="depth", head_count="num_heads"),
            *IMAGE,
            projector("qwen3vl_merger"),
            GELU,
            _MERGE,
            _EPS,
            Key("vision.is_deepstack_layers", ("vision_config.deepstack_visual_indexes",), "bool[]", via="deepstack"),
        ),
        defaults={
            "": _DEFAULTS,
            "qwen3_vl": {"vision_config.deepstack_visual_indexes": [8, 16, 24]},
            "qwen3_vl_moe": {"vision_config.deepstack_visual_indexes": [8, 16, 24]},
        },
    ),
    Tower(
        id="ling3_vl_vision",
        gguf="clip",
        hf_class="BailingMoeV3VLForConditionalGeneration",
        model_type="bailing_moe_v3_vl",
        hf_classes=("BailingMoeV3VLForConditionalGeneration",),
        model_types=("bailing_moe_v3_vl",),
        when="projector_type=ling3vl",
        text="model.language_model.",
        prefixes=(("model.visual.", _V),),
        tensors=(
            *_BLOCKS,
            *norm(f"{_V}merger.norm", "mm.input_norm", WIDTH, REQUIRED),
            *linear("linear_proj.0", "mm.0", f"hidden,{MERGED}", REQUIRED),
            *linear("linear_proj.2", "mm.2", "hidden,hidden", REQUIRED),
        ),
        keys=sees(
            Key("vision.image_size", ("vision_config.num_position_embeddings",), via="square_of_patches"),
            *sizes(image_size="", block_count="depth", head_count="num_heads"),
            *IMAGE,
            projector("ling3vl"),
            GELU,
            _MERGE,
            _EPS,
        ),
        defaults={"": _DEFAULTS},
        config={"vision_config.disable_merger_proj": True},
    ),
)
