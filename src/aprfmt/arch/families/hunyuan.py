"""Hunyuan."""

from __future__ import annotations

from dataclasses import replace

from aprfmt.arch.blocks.decoder import (
    DECODER, PAD, SILU, attention, decoder, experts, gated_mlp, hf_names, linear, must_be, norm, tensor,
)
from aprfmt.arch.blocks.moe import (
    MTP, NO_BIAS, SIGMOID, WIDTH, draft_layer, moe_decoder, moe_keys, router_and_experts, shared_expert,
)
from aprfmt.arch.blocks.tower import (
    IMAGE, TOWER_WIDTH, USE_GELU, epsilon, layers, mlp, norms, patches, projector, sees, sizes, tower_attention, whole,
)
from aprfmt.arch.converter import DEFAULT, Converter, Scope, nothing
from aprfmt.arch.converters.common import absent_1_0
from aprfmt.arch.converters.experts import dense_by_tensors, width_of_experts
from aprfmt.arch.fields import as_int
from aprfmt.arch.row import OPTIONAL, REQUIRED, Architecture, Key, Tower


def _over_moe_width(value: object, scope: Scope) -> object:
    total, width = as_int(value, scope.key.gguf), scope.h.moe_intermediate_size
    return total // width if total is not None and width else DEFAULT


times_moe_width = Converter(width_of_experts, _over_moe_width)
_DENSE = Architecture(
    id="hunyuan_v1_dense", gguf="hunyuan-dense", **hf_names("HunYuanDenseV1", "hunyuan_v1_dense"),
    tensors=decoder(
        *attention("attention_bias", "attention_bias"), *norm("self_attn.query_layernorm", "attn_q_norm", "head_dim"),
        *norm("self_attn.key_layernorm", "attn_k_norm", "head_dim"),
    ),
    keys=(*DECODER, PAD, SILU, must_be("attention_bias", False)),
)

ROWS: tuple[Architecture, ...] = (
    _DENSE,
    Architecture(
        id="hunyuan_v1_moe", gguf="hunyuan-moe", **hf_names("HunYuanMoEV1", "hunyuan_v1_moe", also=("hunyuan",)),
        tensors=moe_decoder(
            *attention("attention_bias", "attention_bias"),
            *norm("self_attn.query_layernorm", "attn_q_norm", "head_dim"),
            *norm("self_attn.key_layernorm", "attn_k_norm", "head_dim"),
            *linear("mlp.gate.wg", "ffn_gate_inp", "experts,hidden"), *router_and_experts()[1:],
            *shared_expert("mlp.shared_mlp", "ffn"),
        ),
        keys=moe_keys(
            Key("expert_shared_feed_forward_length", ("intermediate_size",), field="intermediate_size"),
            Key("expert_feed_forward_length", ("intermediate_size",), field="intermediate_size"),
            Key("expert_shared_count", ("num_shared_expert",)), NO_BIAS, used="moe_topk",
        ),
    ),
    Architecture(
        id="hy_v3", gguf="hy_v3", **hf_names("HYV3", "hy_v3"),
        tensors=moe_decoder(
            *attention("attention_bias", "attention_bias", qk_norm="head_dim"),
            *linear("mlp.router.gate", "ffn_gate_inp", "experts,hidden", layers="moe"),
            tensor("mlp.expert_bias", "exp_probs_b", "experts", layers="moe"), *experts(layers="moe"),
            *shared_expert("mlp.shared_mlp", "num_shared_experts*moe_ffn", layers="moe", bias="mlp_bias"),
            *gated_mlp("mlp_bias", layers="dense"), *draft_layer(norm_after="final_layernorm"),
        ),
        keys=moe_keys(
            WIDTH, Key("expert_shared_feed_forward_length", ("num_shared_experts",), converter=times_moe_width),
            Key("expert_weights_norm", ("route_norm",), "bool", constant=True),
            Key("expert_weights_scale", ("router_scaling_factor",), "f32", converter=absent_1_0), SIGMOID, MTP,
            Key("", ("mlp_layer_types",), "str[]", converter=dense_by_tensors), Key("", ("first_k_dense_replace",)),
            must_be("enable_moe_fp32_combine", True), must_be("mlp_bias", False), NO_BIAS,
        ),
    ),
    replace(
        _DENSE, id="hunyuan_vl", gguf="hunyuan_vl", hf_classes=(), bare_classes=(), model_types=("hunyuan_vl_text",),
        keys=(*_DENSE.keys, Key("rope.scaling.alpha", converter=Converter(nothing, lambda value, scope: DEFAULT))),
    ),
)

TOWERS: tuple[Tower, ...] = (
    Tower(
        id="hunyuan_vl_vision", **whole("HunYuanVLForConditionalGeneration", types=("hunyuan_vl",)),
        when="projector_type=hunyuanvl", text="", prefixes=(("model.vit.", "vit."),),
        tensors=(
            *patches("vit.embeddings.patch_embedding"),
            tensor(
                "vit.embeddings.position_embedding.weight", "v.position_embd.weight",
                f"max_image_size/patch_size*max_image_size/patch_size+1,{TOWER_WIDTH}",
                gguf_dims=(f"max_image_size/patch_size*max_image_size/patch_size,{TOWER_WIDTH}",), skip="1",
            ),
            *layers(
                *norms("input_layernorm", "post_attention_layernorm"),
                *tower_attention(names=("q_proj", "k_proj", "v_proj", "o_proj")),
                *mlp("mlp.dense_h_to_4h", "mlp.dense_4h_to_h"), hf="vit.layers.{n}.",
            ),
            *norm("vit.perceive.before_rms", "mm.pre_norm", TOWER_WIDTH),
            tensor(
                "vit.perceive.proj.0.weight", "mm.0.weight",
                f"2*{TOWER_WIDTH},{TOWER_WIDTH},spatial_merge_size,spatial_merge_size",
            ),
            tensor("vit.perceive.proj.0.bias", "mm.0.bias", f"2*{TOWER_WIDTH}"),
            tensor("vit.perceive.proj.2.weight", "mm.2.weight", f"4*{TOWER_WIDTH},2*{TOWER_WIDTH},1,1"),
            tensor("vit.perceive.proj.2.bias", "mm.2.bias", f"4*{TOWER_WIDTH}"),
            tensor("vit.perceive.image_newline", "v.image_newline", f"4*{TOWER_WIDTH}"),
            *linear("vit.perceive.mlp", "mm.model.fc", f"hidden,4*{TOWER_WIDTH}", REQUIRED),
            *norm("vit.perceive.after_rms", "mm.post_norm", "hidden"),
            tensor("vit.perceive.image_begin", "mm.image_begin", "hidden"),
            tensor("vit.perceive.image_end", "mm.image_end", "hidden"),
            tensor("vit.perceive.image_sep", "v.view_seperator", "hidden", OPTIONAL),
        ),
        f32=(".position_embd.",), convolutions=("mm.0.weight", "mm.2.weight"),
        keys=sees(
            *sizes(image_size="max_image_size"), *IMAGE, projector("hunyuanvl"), USE_GELU,
            must_be("vision_config.hidden_act", "gelu"), epsilon("vision", "vision_config.rms_norm_eps"),
            Key("vision.spatial_merge_size", ("vision_config.spatial_merge_size",)),
            Key("vision.image_min_pixels", ("preprocessor_config.min_pixels",)),
            Key("vision.image_max_pixels", ("preprocessor_config.max_pixels",)),
        ),
        config={"vision_config.model_type": "hunyuan_vl_vision"},
    ),
)
