"""Towers of Qwen 3's kind: learned positions, and features of some layers beside the last's. Data only."""

from __future__ import annotations

from aprfmt.arch.converter import DEFAULT, Converter, GgufKeys, Scope
from aprfmt.arch.converters.towers import beside
from aprfmt.arch.fields import as_int
from aprfmt.arch.row import REQUIRED, Key, TensorRow, Tower
from aprfmt.arch.rows.parts import linear, norm, tensor
from aprfmt.arch.towers.parts import (
    GELU,
    IMAGE,
    WIDTH,
    hears,
    layers,
    mlp,
    norms,
    patches_in_time,
    projector,
    sees,
    sizes,
)
from aprfmt.arch.towers.sound import QWEN3_CONVOLUTIONS, QWEN3_DEFAULTS, QWEN3_KEYS, QWEN3_POSITIONS, qwen3_audio


def _square_to(value: object, scope: Scope) -> object:
    """Positions are learned for an image of this many patches in all; the GGUF gives its side in pixels."""
    positions, patch = as_int(value, scope.name), beside(scope, "patch_size")
    return int(positions**0.5 * patch) if positions and patch else None


def _square_from(value: object, scope: Scope) -> object:
    side, patch = as_int(value, scope.name), scope.gguf("vision.patch_size")
    return (side // patch) ** 2 if side and isinstance(patch, int) and patch else DEFAULT


def _deepstack_to(value: object, scope: Scope) -> object:
    listed, depth = value if isinstance(value, list) else [], beside(scope, "depth") or 0
    return GgufKeys({scope.key.gguf: ("bool[]", [layer in listed for layer in range(depth)])}) if depth else None


def _deepstack_from(value: object, scope: Scope) -> object:
    return [layer for layer, marked in enumerate(value) if marked] if isinstance(value, list) else []


deepstack = Converter(_deepstack_to, _deepstack_from)
square_of_patches = Converter(_square_to, _square_from)

_V = "visual."
MERGED = f"{WIDTH}*spatial_merge_size*spatial_merge_size"
"""Width of a square of patches."""

_DEEPSTACK = f"{_V}deepstack_merger_list."
_OMNI = "thinker.visual."
_THINKER = "thinker_config.vision_config"


def _blocks(v: str) -> tuple[TensorRow, ...]:
    return (
        *patches_in_time(f"{v}patch_embed.proj"),
        tensor(f"{v}pos_embed.weight", "v.position_embd.weight", f"num_position_embeddings,{WIDTH}"),
        *layers(
            *norms("norm1", "norm2"),
            *linear("attn.qkv", "attn_qkv", f"3*{WIDTH},{WIDTH}", REQUIRED),
            *linear("attn.proj", "attn_out", f"{WIDTH},{WIDTH}", REQUIRED),
            *mlp("mlp.linear_fc1", "mlp.linear_fc2"),
            hf=f"{v}blocks.{{n}}.",
            depth="depth",
        ),
    )


def _projectors(listed: str, last: str, first: str, up: str, down: str) -> tuple[TensorRow, ...]:
    """Those of the layers whose features the language model gets, and that of the last layer."""
    return (
        *layers(
            *norm(first, "norm", MERGED, REQUIRED, layers="deepstack"),
            *linear(up, "fc1", f"{MERGED},{MERGED}", REQUIRED, layers="deepstack"),
            *linear(down, "fc2", f"hidden,{MERGED}", REQUIRED, layers="deepstack"),
            hf=listed + "{n}.",
            gguf="v.deepstack.{n}.",
            depth="depth",
        ),
        *norm(last + first, "v.post_ln", WIDTH, REQUIRED),
        *linear(last + up, "mm.0", f"{MERGED},{MERGED}", REQUIRED),
        *linear(last + down, "mm.2", f"hidden,{MERGED}", REQUIRED),
    )


def _sizes(config: str) -> tuple[Key, ...]:
    return (
        Key("vision.image_size", (f"{config}.num_position_embeddings",), converter=square_of_patches),
        *sizes("vision", config, image_size="", block_count="depth", head_count="num_heads"),
    )


def _rest(config: str) -> tuple[Key, ...]:
    return (
        GELU,
        Key("vision.spatial_merge_size", (f"{config}.spatial_merge_size",)),
        Key("vision.attention.layer_norm_epsilon", ("text_config.rms_norm_eps",), "f32"),
        Key("vision.is_deepstack_layers", (f"{config}.deepstack_visual_indexes",), "bool[]", converter=deepstack),
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
        tensors=(
            tensor(f"{_V}patch_embed.proj.bias", "v.patch_embd.bias", WIDTH),
            *_blocks(_V),
            *_projectors(_DEEPSTACK, f"{_V}merger.", "norm", "linear_fc1", "linear_fc2"),
        ),
        keys=sees(*_sizes("vision_config"), *IMAGE, projector("qwen3vl_merger"), *_rest("vision_config")),
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
            *_blocks(_V),
            *norm(f"{_V}merger.norm", "mm.input_norm", WIDTH, REQUIRED),
            *linear("linear_proj.0", "mm.0", f"hidden,{MERGED}", REQUIRED),
            *linear("linear_proj.2", "mm.2", "hidden,hidden", REQUIRED),
        ),
        keys=sees(*_sizes("vision_config"), *IMAGE, projector("ling3vl"), *_rest("vision_config")[:-1]),
        defaults={"": _DEFAULTS},
        config={"vision_config.disable_merger_proj": True},
    ),
    Tower(
        id="qwen3_omni_towers",
        gguf="clip",
        hf_class="Qwen3OmniMoeForConditionalGeneration",
        model_type="qwen3_omni_moe",
        hf_classes=("Qwen3OmniMoeForConditionalGeneration",),
        model_types=("qwen3_omni_moe",),
        when="vision.projector_type=qwen3vl_merger&audio.projector_type=qwen3a",
        text="thinker.",
        listed={f"{_OMNI}merger_list.": f"{_THINKER}.deepstack_visual_indexes"},
        tensors=(
            tensor(f"{_OMNI}patch_embed.proj.bias", "v.patch_embd.bias", WIDTH),
            *_blocks(_OMNI),
            *_projectors(f"{_OMNI}merger_list.", f"{_OMNI}merger.", "ln_q", "mlp.0", "mlp.2"),
            *qwen3_audio("thinker.audio_tower."),
        ),
        made=QWEN3_POSITIONS,
        f32=(".position_embd.",),
        f16=QWEN3_CONVOLUTIONS,
        keys=(
            *sees(*_sizes(_THINKER), *IMAGE, *_rest(_THINKER), projector("qwen3vl_merger", part="vision")),
            *hears(*QWEN3_KEYS, projector("qwen3a", part="audio")),
        ),
        defaults={
            "": {
                **{path.replace("vision_config", _THINKER): value for path, value in _DEFAULTS.items()},
                f"{_THINKER}.deepstack_visual_indexes": [8, 16, 24],
                **QWEN3_DEFAULTS,
            }
        },
    ),
)
