"""Towers around a Llama: Llama 4, Idefics 3, Janus; InternVL."""

from __future__ import annotations

from aprfmt.arch.blocks.decoder import linear, norm, tensor
from aprfmt.arch.blocks.tower import (
    ACTIVATION, IMAGE, PATCHES, TOWER_WIDTH, USE_GELU, VISION_EPS, epsilon, intern, layers, mlp, norms, patches,
    projector, sees, siglip, sizes, tower_attention, whole,
)
from aprfmt.arch.converter import if_given
from aprfmt.arch.converters.towers import ffn_by_ratio, inverse, ratio_of_ffn
from aprfmt.arch.row import REQUIRED, Key, Tower



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
        id="intern_vision", **whole("InternVLChatModel", "InternVisionModel", types=("internvl_chat",)),
        when="projector_type=internvl",
        tensors=(
            *intern(None), *norm("mlp1.0", "mm.model.mlp.0", f"4*{TOWER_WIDTH}", REQUIRED),
            *linear("mlp1.1", "mm.model.mlp.1", f"hidden,4*{TOWER_WIDTH}", REQUIRED),
            *linear("mlp1.3", "mm.model.mlp.3", "hidden,hidden", REQUIRED),
        ),
        f32=(".position_embd.",),
        keys=sees(
            *sizes(), *IMAGE, projector("internvl"), VISION_EPS, ACTIVATION,
            Key("vision.projector.scale_factor", ("downsample_ratio",), converter=inverse),
            Key("vision.preproc_min_tiles", ("min_dynamic_patch",), converter=if_given),
            Key("vision.preproc_max_tiles", ("max_dynamic_patch",), converter=if_given),
        ),
        config={"vision_config.architectures": ["InternVisionModel"], "vision_config.model_type": "intern_vit_6b"},
    ),
    Tower(
        id="janus_vision", **whole("JanusForConditionalGeneration", types=("janus",)), when="projector_type=janus_pro",
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
