"""Youtu."""

from __future__ import annotations

from aprfmt.arch.blocks.decoder import decoder, hf_names, linear, must_be, norm
from aprfmt.arch.blocks.mla import latent_attention, mla_keys
from aprfmt.arch.blocks.tower import ACTIVATION, IMAGE, TOWER_WIDTH, VISION_EPS, projector, sees, siglip, sizes, whole
from aprfmt.arch.converter import if_given
from aprfmt.arch.row import REQUIRED, Architecture, Key, Tower


_OF_EXPERTS = ("expert_", "leading_dense")

ROWS: tuple[Architecture, ...] = (
    Architecture(  # every layer is one of DeepSeek's leading dense layers
        id="youtu", gguf="deepseek2", when="expert_feed_forward_length&!expert_count",
        **hf_names("Youtu", "youtu", also=("youtu_llm",)),
        rope_type=0,
        tensors=decoder(*latent_attention()),
        keys=(
            *(key for key in mla_keys() if not key.gguf.startswith(_OF_EXPERTS)),
            Key("leading_dense_block_count", ("num_hidden_layers",), field="num_layers"),
            Key("expert_feed_forward_length", ("intermediate_size",), field="intermediate_size"),
            Key("expert_shared_count", constant=0), must_be("rope_interleave", True),
        ),
    ),
)

TOWERS: tuple[Tower, ...] = (
    Tower(
        id="youtu_vl_vision", **whole("YoutuVLForConditionalGeneration", types=("youtu_vl",)),
        when="projector_type=youtuvl", text="",
        tensors=(
            *linear(
                "siglip2.vision_model.embeddings.patch_embedding", "v.patch_embd",
                f"{TOWER_WIDTH},3*patch_size*patch_size", REQUIRED,
            ),
            *siglip("siglip2.vision_model.")[3:], *norm("merger.ln_q", "mm.input_norm", TOWER_WIDTH),
            *linear("merger.mlp.0", "mm.0", f"4*{TOWER_WIDTH},4*{TOWER_WIDTH}", REQUIRED),
            *linear("merger.mlp.2", "mm.2", f"hidden,4*{TOWER_WIDTH}", REQUIRED),
        ),
        keys=sees(
            *sizes(), *IMAGE, projector("youtuvl"), VISION_EPS, ACTIVATION,
            Key("vision.spatial_merge_size", ("vision_config.spatial_merge_size",)),
            Key("vision.window_size", ("vision_config.window_size",), converter=if_given),
            Key("vision.wa_layer_indexes", ("vision_config.fullatt_block_indexes",), "i32[]"),
        ),
        config={"vision_config.model_type": "siglip2_vision_model"},
    ),
)
