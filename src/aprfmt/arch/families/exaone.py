"""EXAONE."""

from __future__ import annotations

from dataclasses import replace

from aprfmt.arch.blocks.decoder import (
    ALWAYS_WINDOW, DECODER, DIMS, GROUPED, HEAD_DIM, RMS_EPS, ROPE, ROPE_DIM, SILU, SLIDING_LAYERS, VOCAB, WHOLE_HEADS,
    WINDOW, attention, block, gated_mlp, hf_names, linear, must_be, network, norm, post_norm_decoder, rename,
)
from aprfmt.arch.blocks.moe import (
    DENSE_LAYERS, GROUPS, MLP_LAYER_TYPES, MTP, NUM_SHARED_EXPERTS, SHARED_WIDTH, SIGMOID, WEIGHTS_NORM, WEIGHTS_SCALE,
    WIDTH, draft_layer, moe_decoder, moe_keys, mtp_names, router_and_experts, selection_bias, shared_expert,
)
from aprfmt.arch.blocks.qwen_vision import merger
from aprfmt.arch.blocks.tower import (
    IMAGE, TOWER_WIDTH, USE_SILU, layers, mlp, norms, patches_in_time, preprocessor, projector, sees, sizes, whole,
)
from aprfmt.arch.converter import if_given
from aprfmt.arch.converters.layers import number_or_0
from aprfmt.arch.converters.towers import window_pattern
from aprfmt.arch.row import REQUIRED, Architecture, Difference, Key, Tower


_ONLY_64 = Difference(
    "llama.cpp's exaone4 uses sliding-window and NoPE layers if, and only if, the model has 64 layers "
    "(sliding_window, layer_types)",
    "other_exaone",
)
_V = "visual."
_PREFIXES = (("model.visual.", _V),)
_KV = f"num_key_value_heads*{TOWER_WIDTH}/num_heads"

ROWS: tuple[Architecture, ...] = (
    Architecture(
        id="exaone4", gguf="exaone4", **hf_names("Exaone4", "exaone4", also=("exaone4_5_text",)),
        tensors=(*post_norm_decoder(*attention(qk_norm="head_dim")), *block(*draft_layer())), drafts=mtp_names(),
        keys=(*DECODER, VOCAB, WHOLE_HEADS, WINDOW, SLIDING_LAYERS, MTP, SILU), differs=(_ONLY_64,),
    ),
    Architecture(
        id="exaone_moe", gguf="exaone-moe", **hf_names("ExaoneMoe", "exaone_moe", "ExaoneMoE"),
        tensors=moe_decoder(
            *attention(qk_norm="head_dim"),
            *router_and_experts(
                "moe&!draft",
                (
                    replace(selection_bias("moe&!draft"), hf=("mlp.e_score_correction_bias",)),
                    selection_bias("moe&!draft"),
                ),
            ),
            *shared_expert("mlp.shared_experts", "num_shared_experts*moe_ffn", layers="moe&!draft"),
            *gated_mlp(layers="dense|draft"), *draft_layer(),
        ),
        drafts=mtp_names(),
        keys=moe_keys(
            VOCAB, *GROUPS, WIDTH, NUM_SHARED_EXPERTS, SHARED_WIDTH, WEIGHTS_SCALE, WEIGHTS_NORM, SIGMOID, DENSE_LAYERS,
            MLP_LAYER_TYPES, ALWAYS_WINDOW, SLIDING_LAYERS,
            Key("nextn_predict_layers", ("num_nextn_predict_layers",), converter=number_or_0),
            Key("rope.scaling.type", kind="str", constant="none"),
        ),
    ),
    Architecture(
        id="exaone", gguf="exaone", **hf_names("Exaone", "exaone"),
        tensors=network(
            *norm("ln_1", "attn_norm"), *attention(hf="attn.attention", o_proj="out_proj"), *norm("ln_2", "ffn_norm"),
            *gated_mlp(names=("c_fc_0", "c_fc_1", "c_proj")),
            hf="transformer.h.{n}.", embed="transformer.wte", last="transformer.ln_f",
        ),
        keys=(
            *rename(DIMS, num_layers=("num_layers", "num_hidden_layers")), GROUPED, ROPE,
            replace(RMS_EPS, hf=("layer_norm_epsilon",)), HEAD_DIM, ROPE_DIM, must_be("activation_function", "silu"),
        ),
    ),
)

TOWERS: tuple[Tower, ...] = (
    Tower(
        id="exaone4_5_vision", **whole("Exaone4_5_ForConditionalGeneration", types=("exaone4_5",)),
        when="projector_type=exaone4_5", text="model.language_model.", prefixes=_PREFIXES,
        tensors=(
            *patches_in_time(f"{_V}patch_embed.proj"),
            *layers(
                *norms("norm1", "norm2", bias=False),
                *linear("attn.qkv", "attn_qkv", f"{TOWER_WIDTH}+2*{_KV},{TOWER_WIDTH}", REQUIRED),
                *linear("attn.proj", "attn_out", f"{TOWER_WIDTH},{TOWER_WIDTH}", REQUIRED),
                *mlp("mlp.up_proj", "mlp.down_proj", "mlp.gate_proj"), hf=f"{_V}blocks.{{n}}.", depth="depth",
            ),
            *merger(norm_bias=False),
        ),
        keys=sees(
            *sizes(block_count="depth", head_count="num_heads"), *IMAGE, projector("exaone4_5"), USE_SILU,
            preprocessor("vision.image_min_pixels", "min_pixels"),
            preprocessor("vision.image_max_pixels", "max_pixels"),
            Key("vision.attention.head_count_kv", ("vision_config.num_key_value_heads",)),
            Key("vision.attention.layer_norm_epsilon", ("vision_config.rms_norm_eps", "rms_norm_eps"), "f32"),
            Key("vision.window_size", ("vision_config.window_size",), converter=if_given),
            Key("vision.n_wa_pattern", ("vision_config.fullatt_block_indexes",), converter=window_pattern),
        ),
    ),
)
