"""Muse Glimmer."""

from __future__ import annotations

from dataclasses import replace

from aprfmt.arch.blocks.decoder import (
    ALWAYS_WINDOW, DECODER, WINDOW_LAYERS, attention, class_names, gated_mlp, linear, must_be, network, norm, tensor,
)
from aprfmt.arch.blocks.moe import NO_BIAS
from aprfmt.arch.blocks.tower import (
    IMAGE, TOWER_WIDTH, VISION_EPS, layers, mlp, norms, projector, sees, sizes, tower_attention, whole,
)
from aprfmt.arch.converter import DEFAULT, Converter, Scope
from aprfmt.arch.converters.common import zero_cap
from aprfmt.arch.converters.layers import kinds_of, layer_types, periodic, slides_of
from aprfmt.arch.converters.windows import FOURTH
from aprfmt.arch.fields import as_int
from aprfmt.arch.row import REQUIRED, Architecture, Key, TensorRow, Tower
from aprfmt.errors import RefusedError


def _window_theta_to_gguf(value: object, scope: Scope) -> None:
    """llama.cpp rotates sliding-window layers only, all with one base frequency."""
    kinds = scope.h.extra.get("layer_types")
    if not isinstance(value, list) or not isinstance(kinds, list):
        return
    if [theta or 0 for theta in value] != [scope.h.rope_theta if one else 0 for one in slides_of(kinds)]:
        raise RefusedError(
            f"{scope.name}: llama.cpp's {scope.row.gguf} applies RoPE in sliding-window layers, and only there"
        )


def _window_theta_from_gguf(value: object, scope: Scope) -> object:
    kinds = scope.h.extra.get("layer_types")
    return [scope.h.rope_theta if one else 0 for one in slides_of(kinds)] if isinstance(kinds, list) else DEFAULT


last_dense_layer_types = replace(
    layer_types, derive=lambda scope: kinds_of([*reversed(periodic(FOURTH, scope.h.num_layers or 0, first=0))]),
)


def _merged_patch(scope: Scope) -> int:
    """Pixels along one side of a group of patches."""
    return (scope.size("vision_config.patch_size") or 0) * (scope.size("vision_config.merge_size") or 0)


def _side_from_gguf(value: object, scope: Scope) -> object:
    patch, merge = (as_int(scope.gguf(f"vision.{name}_size"), scope.name) for name in ("patch", "spatial_merge"))
    side = as_int(value, scope.name)
    return side // (patch * merge) if side and patch and merge else DEFAULT


side_of_patches = Converter(
    lambda value, scope: (as_int(value, scope.name) or 0) * _merged_patch(scope), _side_from_gguf
)
_EMBEDDER = "model.vision_tower.patch_embedder."

ROWS: tuple[Architecture, ...] = (
    Architecture(
        id="muse_glimmer_text", gguf="muse-glimmer",
        **class_names("MuseGlimmerForCausalLM", "MuseGlimmerTextModel", types=("muse_glimmer_text",)), rope_type=0,
        flat_norms={"blk.{n}.attn_q_norm.weight": "qk_scale_factor", "blk.{n}.attn_k_norm.weight": ""},
        tensors=network(
            *norm("input_layernorm", "attn_norm", value="plus_one"),
            *attention("attention_bias", "attention_bias", permuted=True),
            *linear("self_attn.gate_proj", "attn_gate", "q,hidden"),
            *norm("post_attention_layernorm", "post_attention_norm", value="plus_one"),
            *norm("pre_feedforward_layernorm", "ffn_norm", value="plus_one"),
            *norm("post_feedforward_layernorm", "post_ffw_norm", value="plus_one"), *gated_mlp(),
        ),
        keys=(
            *DECODER, Key("final_logit_softcapping", ("final_logit_softcapping",), "f32", converter=zero_cap),
            Key("logit_scale", ("output_multiplier",), "f32"), ALWAYS_WINDOW,
            replace(WINDOW_LAYERS, converter=last_dense_layer_types),
            Key("", ("layer_rope_theta",), "f32[]",
                converter=Converter(_window_theta_to_gguf, _window_theta_from_gguf)),
            Key("", ("qk_scale_factor",), "f32"),
            must_be("post_norm_eps", 1e-8), must_be("hidden_activation", "silu"), NO_BIAS,
        ),
    ),
)

TOWERS: tuple[Tower, ...] = (
    Tower(
        id="muse_glimmer_vision", **whole("MuseGlimmerForConditionalGeneration", types=("muse_glimmer",)),
        when="projector_type=muse-glimmer", text="model.language_model.",
        tensors=(
            TensorRow(
                (f"{_EMBEDDER}patch_embedding.weight",), (), (f"{TOWER_WIDTH},patch_temporal*3*patch_size*patch_size",),
            ),
            tensor(
                f"{_EMBEDDER}position_embedding_table.weight", "v.position_embd.weight",
                f"pos_emb_height*pos_emb_width,{TOWER_WIDTH}",
            ),
            *norm("model.vision_tower.ln_pre", "v.pre_ln", TOWER_WIDTH, REQUIRED),
            *norm("model.vision_tower.ln_post", "v.post_ln", TOWER_WIDTH, REQUIRED),
            *layers(
                *norms("norm1", "norm2"),
                *tower_attention(
                    "attn", names=("q_proj", "k_proj", "v_proj", "proj"),
                    order=("swap:num_attention_heads,2,hidden_size/num_attention_heads/2",),
                ),
                *mlp(), hf="model.vision_tower.layers.{n}.",
            ),
            *linear("model.vision_adapter.fc1", "mm.0", f"projector_hidden_size,{TOWER_WIDTH}*merge_size*merge_size"),
            *linear("model.vision_adapter.fc2", "mm.1", "projector_hidden_size,projector_hidden_size"),
            *linear("model.vision_projection", "mm.2", "hidden,projector_hidden_size"),
        ),
        made={"v.patch_embd.weight": f"sum_of_frames:{_EMBEDDER}patch_embedding.weight,patch_temporal,patch_size"},
        f32=(".position_embd.",),
        keys=sees(
            Key("vision.image_size", ("vision_config.pos_emb_height",), converter=side_of_patches),
            *sizes(image_size=""), *IMAGE, projector("muse-glimmer"), VISION_EPS,
            Key("vision.spatial_merge_size", ("vision_config.merge_size",)), Key("", ("vision_config.pos_emb_width",)),
            Key("", ("vision_config.patch_temporal",)), Key("", ("projector_hidden_size",)),
        ),
        config={"vision_config.model_type": "muse_glimmer_vision"},
    ),
)
