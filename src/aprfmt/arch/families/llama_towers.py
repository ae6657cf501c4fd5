"""Towers around a Llama: Llama 4, Idefics 3, Janus; InternVL."""

from __future__ import annotations

from dataclasses import replace

from aprfmt.arch.blocks.decoder import linear, norm, tensor
from aprfmt.arch.blocks.tower import (
    ACTIVATION, IMAGE, PATCHES, TOWER_WIDTH, USE_GELU, VISION_EPS, epsilon, intern, layers, mlp, norms, patches,
    projector, sees, siglip, sizes, tower_attention, whole,
)
from aprfmt.arch.converter import Scope, if_given, implied
from aprfmt.arch.converters.towers import ffn_by_ratio, inverse, ratio_of_ffn, square
from aprfmt.arch.row import OPTIONAL, REQUIRED, Key, TensorRow, Tower



_V = "vision_tower."
_MM = "multi_modal_projector."
_SQUARES = tuple(
    replace(key, converter=square) if key.gguf in ("vision.image_size", "vision.patch_size") else key for key in sizes()
)
_SHUFFLE = Key("vision.projector.scale_factor", ("downsample_ratio",), converter=inverse)


_SIGLIP = Key("vision.model_type", ("vision_config.model_type",), "str", constant="siglip_vision_model")
"""Tells DeepSeek-VL's tower from Janus', which have the same projector; mtmd does not read it."""


def _norm_of_size(scope: Scope) -> str:
    """llama.cpp knows the 6B tower by its size: only that one has RMS norms."""
    big = tuple(scope.size(f"vision_config.{name}") for name in ("hidden_size", "num_hidden_layers")) == (3200, 45)
    return "rms_norm" if big else "layer_norm"


_NORM_OF_SIZE = implied(_norm_of_size, "{name} is {value}: llama.cpp takes RMS norms for 45 layers of 3200 values only")


def _internvl(need: str) -> tuple[TensorRow, ...]:
    """InternViT as transformers has it; `need` is the condition of the biases of Q, K and V."""
    square_of = f"{TOWER_WIDTH},{TOWER_WIDTH}"
    return (
        tensor(f"{_V}embeddings.cls_token", "v.class_embd", f"1,1,{TOWER_WIDTH}"),
        *patches(f"{_V}embeddings.patch_embeddings.projection"),
        tensor(f"{_V}embeddings.position_embeddings", "v.position_embd.weight", f"1,{PATCHES}+1,{TOWER_WIDTH}"),
        *layers(
            *norm("layernorm_before", "ln1", TOWER_WIDTH, OPTIONAL),
            *norm("layernorm_after", "ln2", TOWER_WIDTH, OPTIONAL),
            *(
                row
                for part in "qkv"
                for row in linear(f"attention.{part}_proj", f"attn_{part}", square_of, need)
            ),
            *linear("attention.projection_layer", "attn_out", square_of, REQUIRED),
            *norm("attention.q_norm", "attn_q_norm", TOWER_WIDTH, need=OPTIONAL),
            *norm("attention.k_norm", "attn_k_norm", TOWER_WIDTH, need=OPTIONAL), *mlp(),
            tensor("lambda_1", "ls1.weight", TOWER_WIDTH), tensor("lambda_2", "ls2.weight", TOWER_WIDTH),
            hf=f"{_V}encoder.layer.{{n}}.",
        ),
    )


TOWERS: tuple[Tower, ...] = (
    Tower(
        id="idefics3_vision",
        **whole("Idefics3ForConditionalGeneration", "SmolVLMForConditionalGeneration", types=("idefics3", "smolvlm")),
        when="projector_type=idefics3", text="model.text_model.",
        tensors=(
            *siglip("model.vision_model."),
            *linear(
                "model.connector.modality_projection.proj", "mm.model.fc",
                f"hidden,{TOWER_WIDTH}*scale_factor*scale_factor",
            ),
        ),
        f32=(".position_embd.", ".patch_embd.weight"),
        keys=sees(
            *sizes(), *IMAGE, projector("idefics3"), VISION_EPS,
            Key("vision.projector.scale_factor", ("scale_factor",)), USE_GELU,
            Key("vision.preproc_image_size", ("preprocessor_config.size.longest_edge", "vision_config.image_size")),
        ),
    ),
    Tower(
        id="intern_vision",
        **whole("InternVLChatModel", "InternVisionModel", types=("internvl_chat", "qianfan_ocr")),
        when="projector_type=internvl",
        tensors=(
            *intern(None), *norm("mlp1.0", "mm.model.mlp.0", f"4*{TOWER_WIDTH}", REQUIRED),
            *linear("mlp1.1", "mm.model.mlp.1", f"hidden,4*{TOWER_WIDTH}", REQUIRED),
            *linear("mlp1.3", "mm.model.mlp.3", "hidden,hidden", REQUIRED),
        ),
        f32=(".position_embd.",),
        keys=sees(
            *_SQUARES, *IMAGE, projector("internvl"), VISION_EPS, ACTIVATION, _SHUFFLE,
            Key("vision.preproc_min_tiles", ("min_dynamic_patch",), converter=if_given),
            Key("vision.preproc_max_tiles", ("max_dynamic_patch",), converter=if_given),
        ),
        config={"vision_config.architectures": ["InternVisionModel"], "vision_config.model_type": "intern_vit_6b"},
    ),
    Tower(
        id="internvl_vision", **whole("InternVLForConditionalGeneration", types=("internvl",)),
        when="projector_type=internvl&!vision.preproc_max_tiles",
        prefixes=(("model.vision_tower.", _V), (f"model.{_MM}", _MM)),
        tensors=(
            *_internvl("vision_config.attention_bias"),
            *norm(f"{_MM}layer_norm", "mm.model.mlp.0", f"4*{TOWER_WIDTH}", REQUIRED),
            *linear(f"{_MM}linear_1", "mm.model.mlp.1", f"hidden,4*{TOWER_WIDTH}", REQUIRED),
            *linear(f"{_MM}linear_2", "mm.model.mlp.3", "hidden,hidden", REQUIRED),
        ),
        f32=(".position_embd.",),
        keys=sees(
            *_SQUARES,
            *IMAGE, projector("internvl"), VISION_EPS, ACTIVATION, _SHUFFLE,
            Key("", ("vision_config.norm_type",), "str", converter=_NORM_OF_SIZE),
            Key("", ("vision_config.attention_bias",), "bool"),
            Key("", ("vision_config.use_absolute_position_embeddings",), "bool", allowed=(True,)),
            Key("", ("vision_config.use_mean_pooling",), "bool", allowed=(True,)),
            Key("", ("projector_hidden_act",), "str", allowed=("gelu",)),
            Key("", ("vision_feature_layer",), "i32", allowed=(-1,)),
            Key("", ("vision_feature_select_strategy",), "str", allowed=("default",)),
        ),
        config={"vision_config.model_type": "internvl_vision"},
    ),
    Tower(
        id="janus_vision", **whole("JanusForConditionalGeneration", types=("janus",)),
        when="projector_type=janus_pro&!vision.model_type",
        text="model.language_model.",
        tensors=(
            *patches("model.vision_model.embeddings.patch_embedding"),
            tensor(
                "model.vision_model.embeddings.position_embedding.weight", "v.position_embd.weight",
                f"{PATCHES},{TOWER_WIDTH}",
            ),
            *layers(
                *norms("layer_norm1", "layer_norm2"),
                *tower_attention(names=("q_proj", "k_proj", "v_proj", "projection_layer")), *mlp(),
                hf="model.vision_model.encoder.layers.{n}.",
            ),
            *norm("model.vision_model.post_layernorm", "v.post_ln", TOWER_WIDTH, REQUIRED),
            *linear("model.aligner.fc1", "mm.0", f"hidden,{TOWER_WIDTH}", REQUIRED),
            *linear("model.aligner.hidden_layers.0", "mm.1", "hidden,hidden", REQUIRED),
        ),
        f32=(".position_embd.",), ignored=(),
        keys=sees(
            *sizes(feed_forward_length=""),
            Key(
                "vision.feed_forward_length", ("vision_config.intermediate_size",),
                converter=ffn_by_ratio("vision_config.hidden_size"),
            ),
            Key("", ("vision_config.mlp_ratio",), "f32", converter=ratio_of_ffn), *IMAGE, projector("janus_pro"),
            VISION_EPS, ACTIVATION,
        ),
        config={"vision_config.model_type": "janus_vision_model"},
    ),
    Tower(
        id="deepseek_vl_vision", **whole("DeepseekVLForConditionalGeneration", types=("deepseek_vl",)),
        when="projector_type=janus_pro&vision.model_type", text="model.language_model.",
        prefixes=(("model.vision_model.vision_model.", "model.vision_model."),),
        tensors=(
            *siglip("model.vision_model."), *linear("model.aligner.linear1", "mm.0", f"hidden,{TOWER_WIDTH}", REQUIRED),
            *linear("model.aligner.linear2", "mm.1", "hidden,hidden", REQUIRED),
        ),
        f32=(".position_embd.",),
        keys=sees(*sizes(), *IMAGE, projector("janus_pro"), VISION_EPS, ACTIVATION, _SIGLIP),
    ),
    Tower(
        id="llama4_vision", **whole("Llama4ForConditionalGeneration", types=("llama4",)), when="projector_type=llama4",
        prefixes=(("model.vision_model.", "vision_model."), ("model.multi_modal_projector.", "multi_modal_projector.")),
        tensors=(
            tensor("vision_model.class_embedding", "v.class_embd", TOWER_WIDTH),
            tensor("vision_model.positional_embedding_vlm", "v.position_embd.weight", f"{PATCHES}+1,{TOWER_WIDTH}"),
            tensor(
                "vision_model.patch_embedding.linear.weight", "v.patch_embd.weight",
                f"{TOWER_WIDTH},3*patch_size*patch_size",
            ),
            *norm("vision_model.layernorm_pre", "v.pre_ln", TOWER_WIDTH, REQUIRED),
            *norm("vision_model.layernorm_post", "v.post_ln", TOWER_WIDTH, REQUIRED),
            *layers(
                *norms("input_layernorm", "post_attention_layernorm"),
                *tower_attention(names=("q_proj", "k_proj", "v_proj", "o_proj")), *mlp(),
                hf="vision_model.model.layers.{n}.",
            ),
            *linear("vision_model.vision_adapter.mlp.fc1", "mm.model.mlp.1", "projector_input_dim,intermediate_size"),
            *linear(
                "vision_model.vision_adapter.mlp.fc2", "mm.model.mlp.2", "projector_output_dim,projector_output_dim",
            ),
            *linear("multi_modal_projector.linear_1", "mm.model.fc", "hidden,vision_output_dim"),
        ),
        keys=sees(
            *sizes(), *IMAGE, projector("llama4"), epsilon("vision", "vision_config.norm_eps"),
            Key("vision.projector.scale_factor", ("vision_config.pixel_shuffle_ratio",), converter=inverse), USE_GELU,
            *(
                Key("", (f"vision_config.{name}",))
                for name in ("projector_input_dim", "projector_output_dim", "vision_output_dim")
            ),
        ),
        config={"vision_config.model_type": "llama4_vision_model"},
    ),
)
