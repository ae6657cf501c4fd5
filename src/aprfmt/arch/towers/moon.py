"""Towers of MoonViT's kind: images of any size, learned positions and rotary ones. Data only."""

from __future__ import annotations

from aprfmt.arch.converter import DEFAULT, Converter, Scope, nothing
from aprfmt.arch.converters.towers import text_width
from aprfmt.arch.fields import as_int
from aprfmt.arch.row import OPTIONAL, REQUIRED, Key, TensorRow, Tower
from aprfmt.arch.rows.parts import linear, must_be, norm, tensor
from aprfmt.arch.towers.parts import (
    GELU,
    IMAGE,
    SILU,
    WIDTH,
    epsilon,
    fused_attention,
    layers,
    mlp,
    norms,
    patches,
    projector,
    sees,
    sizes,
)
from aprfmt.arch.towers.vit import vision
from aprfmt.errors import RefusedError

_LEAST_PATCHES = 8
"""Patches of the smallest image that Kimi K2.5's GGUF asks for."""


def _side_to(value: object, scope: Scope) -> object:
    sides = {as_int(side, scope.name) for side in value} if isinstance(value, list) else set()
    if len(sides) != 1:
        raise RefusedError(
            f"{scope.name} is {value!r:.40}; llama.cpp merges as many patches in both directions",
            hint="an .apr or a folder can hold the model: -o NAME.apr, or -o NAME --format hf",
        )
    return sides.pop()


def _side_from(value: object, scope: Scope) -> object:
    side = as_int(value, scope.name)
    return [side, side] if side else DEFAULT


def _patch_area(scope: Scope) -> int | None:
    side = scope.size("vision_config.patch_size")
    return side * side if side else None


def _position_image(value: object, scope: Scope) -> object:
    rows, side = (scope.size(f"vision_config.{name}") for name in ("init_pos_emb_height", "patch_size"))
    return rows * side if rows and side else None


def _least_pixels(value: object, scope: Scope) -> object:
    area = _patch_area(scope)
    return _LEAST_PATCHES * area if area else None


def _pixels_to(value: object, scope: Scope) -> object:
    patches, area = as_int(value, scope.name), _patch_area(scope)
    return patches * area if patches and area else None


def _pixels_from(value: object, scope: Scope) -> object:
    pixels, side = as_int(value, scope.name), as_int(scope.gguf("vision.patch_size"), scope.name)
    return pixels // side**2 if pixels and side else DEFAULT


same_sides = Converter(_side_to, _side_from)
position_image = Converter(_position_image, nothing)
least_pixels = Converter(_least_pixels, nothing)
patches_to_pixels = Converter(_pixels_to, _pixels_from)

_V = "vision_tower."
_HALVES = {"preprocessor_config.image_mean": [0.5, 0.5, 0.5], "preprocessor_config.image_std": [0.5, 0.5, 0.5]}
_GRID = "init_pos_emb_height,init_pos_emb_width"
_CELLS = "init_pos_emb_height*init_pos_emb_width"

_K25 = "vt_hidden_size"
_TURN = f"head:2*{_K25},2*vt_num_attention_heads,{_K25}/vt_num_attention_heads/4,2"
"""Q and K: the pairs of the two directions, which alternate in a checkpoint, behind one another."""


def _kimi_k25(projector_names: tuple[str, str]) -> tuple[TensorRow, ...]:
    """MoonViT in three dimensions, of which a still image has two."""
    first, second = projector_names
    blocks = f"{_V}encoder.blocks.{{n}}."
    return (
        *patches(f"{_V}patch_embed.proj", width=_K25),
        tensor(f"{_V}patch_embed.pos_emb.weight", "v.position_embd.weight", f"{_GRID},{_K25}"),
        *layers(
            *norms("norm0", "norm1", width=_K25),
            tensor("wqkv.weight", "attn_qkv.weight", f"3*{_K25},{_K25}", order=(_TURN,)),
            tensor("wqkv.bias", "attn_qkv.bias", f"3*{_K25}", order=(_TURN,)),
            *linear("wo", "attn_out", f"{_K25},{_K25}", REQUIRED),
            *mlp("mlp.fc0", "mlp.fc1", width=_K25, ffn="vt_intermediate_size"),
            hf=blocks,
            depth="vt_num_hidden_layers",
        ),
        *norm(f"{_V}encoder.final_layernorm", "v.post_ln", _K25, REQUIRED),
        *norm("mm_projector.pre_norm", "mm.input_norm", _K25, REQUIRED),
        *linear(f"mm_projector.{first}", "mm.1", f"4*{_K25},4*{_K25}", REQUIRED),
        *linear(f"mm_projector.{second}", "mm.2", f"hidden,4*{_K25}", REQUIRED),
    )


_K25_KEYS = sees(
    Key("vision.image_size", converter=position_image),
    Key("vision.patch_size", ("vision_config.patch_size",)),
    Key("vision.embedding_length", ("vision_config.vt_hidden_size", "vision_config.hidden_size")),
    Key("vision.feed_forward_length", ("vision_config.vt_intermediate_size", "vision_config.intermediate_size")),
    Key("vision.block_count", ("vision_config.vt_num_hidden_layers", "vision_config.num_hidden_layers")),
    Key("vision.attention.head_count", ("vision_config.vt_num_attention_heads", "vision_config.num_attention_heads")),
    *IMAGE,
    projector("kimik25"),
    Key("vision.pos_emb_height", ("vision_config.init_pos_emb_height", "vision_config.pos_emb_height")),
    Key("vision.pos_emb_width", ("vision_config.init_pos_emb_width", "vision_config.pos_emb_width")),
    Key("vision.pos_emb_time", ("vision_config.init_pos_emb_time", "vision_config.pos_emb_time")),
    GELU,
    must_be("vision_config.projector_hidden_act", "gelu"),
    epsilon("vision", "vision_config.projector_ln_eps", "projection_layer_norm_eps"),
    Key("vision.projector.scale_factor", ("vision_config.merge_kernel_size",), converter=same_sides),
    Key("vision.image_min_pixels", converter=least_pixels),
    Key("vision.image_max_pixels", ("preprocessor_config.in_patch_limit",), converter=patches_to_pixels),
)
_K25_DEFAULTS = {
    **_HALVES,
    **vision(patch_size=14, vt_hidden_size=1152, vt_intermediate_size=4304, vt_num_hidden_layers=27),
    **vision(vt_num_attention_heads=16, init_pos_emb_height=64, init_pos_emb_width=64, init_pos_emb_time=4),
    **vision(projector_hidden_act="gelu", projector_ln_eps=1e-5, merge_kernel_size=[2, 2]),
    "preprocessor_config.in_patch_limit": 16384,
}

TOWERS: tuple[Tower, ...] = (
    Tower(
        id="kimi_vl_vision",
        gguf="clip",
        hf_class="KimiVLForConditionalGeneration",
        model_type="kimi_vl",
        hf_classes=("KimiVLForConditionalGeneration",),
        model_types=("kimi_vl",),
        when="projector_type=kimivl",
        tensors=(
            *patches(f"{_V}patch_embed.proj"),
            tensor(
                f"{_V}patch_embed.pos_emb.weight",
                "v.position_embd.weight",
                f"{_GRID},{WIDTH}",
                gguf_dims=(f"{_CELLS},{WIDTH}",),
            ),
            *layers(
                *norms("norm0", "norm1"),
                *fused_attention("", names=("wqkv", "wo")),
                *mlp("mlp.fc0", "mlp.fc1"),
                hf=f"{_V}encoder.blocks.{{n}}.",
            ),
            *norm(f"{_V}encoder.final_layernorm", "v.post_ln", WIDTH, REQUIRED),
            *norm("multi_modal_projector.pre_norm", "mm.input_norm", WIDTH, REQUIRED),
            *linear("multi_modal_projector.linear_1", "mm.1", f"4*{WIDTH},4*{WIDTH}", REQUIRED),
            *linear("multi_modal_projector.linear_2", "mm.2", f"hidden,4*{WIDTH}", REQUIRED),
        ),
        f32=(".position_embd.",),
        keys=sees(
            *sizes(image_size=""),
            Key("vision.image_size", constant=64 * 14),
            *IMAGE,
            projector("kimivl"),
            GELU,
            Key("vision.projector.scale_factor", constant=2),
            must_be("vision_config.merge_kernel_size", [2, 2]),
            epsilon("vision", "vision_config.layer_norm_eps"),
            Key("", ("vision_config.init_pos_emb_height",)),
            Key("", ("vision_config.init_pos_emb_width",)),
        ),
        defaults={
            "": {
                **_HALVES,
                **vision(patch_size=14, hidden_size=1152, intermediate_size=4304, num_hidden_layers=27),
                **vision(num_attention_heads=16, layer_norm_eps=1e-5, merge_kernel_size=[2, 2]),
                **vision(init_pos_emb_height=64, init_pos_emb_width=64),
            }
        },
        config={"vision_config.model_type": "moonvit"},
    ),
    Tower(
        id="kimi_k25_vision",
        gguf="clip",
        hf_class="KimiK25ForConditionalGeneration",
        model_type="kimi_k25",
        hf_classes=("KimiK25ForConditionalGeneration",),
        model_types=("kimi_k25",),
        when="projector_type=kimik25",
        tensors=_kimi_k25(("proj.0", "proj.2")),
        f32=(".position_embd.",),
        keys=_K25_KEYS,
        defaults={"": _K25_DEFAULTS},
        config={"vision_config.pos_emb_type": "divided_fixed", "vision_config.mm_projector_type": "patchmerger"},
    ),
    Tower(
        id="glm5v_vision",
        gguf="clip",
        hf_class="Glm5vForConditionalGeneration",
        model_type="glm5v",
        hf_classes=("Glm5vForConditionalGeneration",),
        model_types=("glm5v",),
        when="projector_type=kimik25",
        tensors=_kimi_k25(("linear_1", "linear_2")),
        f32=(".position_embd.",),
        keys=_K25_KEYS,
        defaults={"": _K25_DEFAULTS},
        config={"vision_config.pos_emb_type": "divided_fixed", "vision_config.mm_projector_type": "patchmerger"},
    ),
    Tower(
        id="dots_ocr_vision",
        gguf="clip",
        hf_class="DotsOCRForCausalLM",
        model_type="dots_ocr",
        hf_classes=("DotsOCRForCausalLM",),
        model_types=("dots_ocr",),
        when="projector_type=dots_ocr",
        text="",
        tensors=(
            *patches(f"{_V}patch_embed.patchifier.proj", width="embed_dim"),
            *norm(f"{_V}patch_embed.patchifier.norm", "v.pre_ln", "embed_dim"),
            *layers(
                *norms("norm1", "norm2", bias=False, width="embed_dim"),
                *linear("attn.qkv", "attn_qkv", "3*embed_dim,embed_dim", OPTIONAL),
                *linear("attn.proj", "attn_out", "embed_dim,embed_dim", OPTIONAL),
                *linear("mlp.fc1", "ffn_gate", "intermediate_size,embed_dim", OPTIONAL),
                *linear("mlp.fc3", "ffn_up", "intermediate_size,embed_dim", OPTIONAL),
                *linear("mlp.fc2", "ffn_down", "embed_dim,intermediate_size", OPTIONAL),
                hf=f"{_V}blocks.{{n}}.",
            ),
            *norm(f"{_V}post_trunk_norm", "mm.post_norm", "embed_dim"),
            *norm(f"{_V}merger.ln_q", "mm.input_norm", "embed_dim", REQUIRED),
            *linear(f"{_V}merger.mlp.0", "mm.0", "4*embed_dim,4*embed_dim", REQUIRED),
            *linear(f"{_V}merger.mlp.2", "mm.2", "hidden,4*embed_dim", REQUIRED),
        ),
        keys=sees(
            *sizes(image_size="", embedding_length=("embed_dim", "hidden_size")),
            Key("vision.image_size", constant=0),
            Key("", ("vision_config.hidden_size",), converter=text_width),
            *IMAGE,
            projector("dots_ocr"),
            Key("vision.image_min_pixels", ("preprocessor_config.min_pixels",)),
            Key("vision.image_max_pixels", ("preprocessor_config.max_pixels",)),
            epsilon("vision", "vision_config.rms_norm_eps"),
            Key("vision.projector.scale_factor", ("vision_config.spatial_merge_size",)),
            SILU,
        ),
        defaults={
            "": {
                "preprocessor_config.image_mean": [0.48145466, 0.4578275, 0.40821073],
                "preprocessor_config.image_std": [0.26862954, 0.26130258, 0.27577711],
                **vision(embed_dim=1536, intermediate_size=4224, num_hidden_layers=42, num_attention_heads=12),
                **vision(patch_size=14, spatial_merge_size=2, rms_norm_eps=1e-5),
            }
        },
        config={"vision_config.model_type": "dots_vit", "vision_config.post_norm": True},
    ),
)
