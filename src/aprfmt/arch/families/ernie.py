"""Ernie 4.5 and PaddleOCR."""

from __future__ import annotations

from math import isqrt

from aprfmt.arch.blocks.decoder import (
    DECODER, PAD, SILU, attention, decoder, gated_mlp, hf_names, linear, must_be, needs, norm, tensor,
)
from aprfmt.arch.blocks.moe import WIDTH, moe_decoder, moe_keys, router_and_experts, shared_expert
from aprfmt.arch.blocks.tower import (
    IMAGE, TOWER_WIDTH, USE_GELU, layers, mlp, norms, patches, preprocessor, projector, sees, sizes, tower_attention,
    whole,
)
from aprfmt.arch.converter import Converter, Scope, default
from aprfmt.arch.converters.common import shared_width
from aprfmt.arch.fields import as_int
from aprfmt.arch.row import OPTIONAL, REQUIRED, Architecture, Key, Tower
from aprfmt.errors import RefusedError


def _every_layer_to_gguf(value: object, scope: Scope) -> object:
    """The step between MoE layers, which llama.cpp assumes to be 1."""
    if value not in (None, 1):
        raise RefusedError(f"{scope.name} is {value}: llama.cpp's {scope.row.gguf} needs experts in every layer")
    return value


def _last_layer_to_gguf(value: object, scope: Scope) -> None:
    """The last MoE layer: a GGUF has no key for it, it is always the last layer."""
    if value not in (None, -1) and scope.h.num_layers is not None and value != scope.h.num_layers - 1:
        raise RefusedError(
            f"{scope.name} is {value}, but a GGUF of {scope.row.gguf!r} has experts up to the last layer"
        )


last_layer = Converter(_last_layer_to_gguf)
every_layer = Converter(_every_layer_to_gguf)


def _root_to_gguf(value: object, scope: Scope) -> object:
    number = as_int(value, scope.name)
    return isqrt(number) if number is not None else None


root = Converter(_root_to_gguf, default)
_V = "visual.vision_model."
_MERGED = f"{TOWER_WIDTH}*spatial_merge_size*spatial_merge_size"

ROWS: tuple[Architecture, ...] = (
    Architecture(
        id="ernie4_5", gguf="ernie4_5", **hf_names("Ernie4_5", "ernie4_5", "Ernie4_5_"), rope_type=0,
        prefixes=(("ernie.", "model."),),
        tensors=decoder(*attention("use_bias", "use_bias"), mlp=gated_mlp("use_bias")),
        keys=(*DECODER, PAD, SILU, must_be("use_bias", False)),
    ),
    Architecture(
        # A Llama that rotates neighbours, as a GGUF has them: llama.cpp's dense Ernie is the same network.
        id="helium", gguf="ernie4_5", **hf_names("Helium", "helium"), rope_type=0,
        tensors=decoder(*attention("attention_bias"), mlp=gated_mlp("mlp_bias")),
        keys=(*DECODER, PAD, SILU, must_be("attention_bias", False), must_be("mlp_bias", False)),
    ),
    Architecture(
        id="ernie4_5_moe", gguf="ernie4_5-moe", **hf_names("Ernie4_5_Moe", "ernie4_5_moe"), rope_type=0,
        tensors=moe_decoder(
            *attention("use_bias", "use_bias"),
            *router_and_experts(
                "moe",
                (
                    tensor(
                        "mlp.moe_statics.e_score_correction_bias", "exp_probs_b.bias", "1,experts",
                        gguf_dims=("1,experts",), layers="moe",
                    ),
                ),
            ),
            *shared_expert(
                "mlp.shared_experts", "moe_ffn*moe_num_shared_experts", "moe_num_shared_experts", "moe", OPTIONAL
            ),
            *gated_mlp("use_bias", layers="dense"), head_bias="use_bias&output",
        ),
        keys=moe_keys(
            Key("interleave_moe_layer_step", ("moe_layer_interval",), converter=every_layer, needed=REQUIRED),
            Key("leading_dense_block_count", ("moe_layer_start_index",)), WIDTH,
            Key("expert_shared_count", ("moe_num_shared_experts",)),
            Key("expert_shared_feed_forward_length", converter=shared_width, needed="expert_shared_count"),
            Key("", ("moe_layer_end_index",), "i32", converter=last_layer), must_be("use_bias", False),
            must_be("moe_norm_min", 1e-12),
            count="moe_num_experts", used="moe_k",
        ),
    ),
    Architecture(
        id="paddleocr", gguf="paddleocr", hf_class="LlamaForCausalLM", model_type="llama", hf_classes=(),
        model_types=("paddleocr_vl_text",),
        tensors=decoder(*attention("use_bias", "use_bias"), mlp=gated_mlp("use_bias")),
        keys=(*DECODER, SILU, must_be("use_bias", False), *needs("rope.dimension_sections")),
    ),
)

TOWERS: tuple[Tower, ...] = (
    Tower(
        id="paddleocr_vision",
        **whole("PaddleOCRVLForConditionalGeneration", "PaddleOCRVisionModel", types=("paddleocr_vl",)),
        when="projector_type=paddleocr", text="",
        prefixes=(("model.visual.vision_model.", _V), ("model.visual.", _V), ("model.projector.", "mlp_AR.")),
        tensors=(
            *patches(f"{_V}embeddings.patch_embedding"),
            tensor(
                f"{_V}embeddings.position_embedding.weight", "v.position_embd.weight",
                f"vision_config.image_size/patch_size*vision_config.image_size/patch_size,{TOWER_WIDTH}",
            ),
            *layers(*norms("layer_norm1", "layer_norm2"), *tower_attention(), *mlp(), hf=f"{_V}encoder.layers.{{n}}."),
            *norm(f"{_V}post_layernorm", "v.post_ln", TOWER_WIDTH, REQUIRED),
            *norm("mlp_AR.pre_norm", "mm.input_norm", TOWER_WIDTH, REQUIRED),
            *linear("mlp_AR.linear_1", "mm.1", f"{_MERGED},{_MERGED}", REQUIRED),
            *linear("mlp_AR.linear_2", "mm.2", f"hidden,{_MERGED}", REQUIRED),
        ),
        keys=sees(
            preprocessor("vision.image_size", "max_pixels", converter=root), *sizes(image_size=""), *IMAGE,
            projector("paddleocr"), preprocessor("vision.image_max_pixels", "max_pixels"),
            preprocessor("vision.image_min_pixels", "min_pixels"), USE_GELU,
            Key("vision.attention.layer_norm_epsilon", ("vision_config.layer_norm_eps",), "f32"),
            Key("", ("vision_config.image_size",)), Key("", ("vision_config.spatial_merge_size",)),
        ),
    ),
)
