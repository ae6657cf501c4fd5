"""MiniCPM."""

from __future__ import annotations

import math

from aprfmt.arch.blocks.decoder import (
    DECODER, DIMS, GROUPED, RMS_EPS, ROPE, SILU, VOCAB, attention, decoder, hf_names, linear, must_be, norm,
)
from aprfmt.arch.blocks.mla import KEY, joint_latent_attention
from aprfmt.arch.blocks.moe import EQUAL_HEADS
from aprfmt.arch.blocks.tower import IMAGE, TOWER_WIDTH, USE_GELU, VISION_EPS, projector, sees, siglip, sizes, whole
from aprfmt.arch.converter import DEFAULT, Converter, Scope, words
from aprfmt.arch.converters.common import nope_and_rope
from aprfmt.arch.fields import as_float, as_int
from aprfmt.arch.row import REQUIRED, SELDOM, Architecture, Key, TensorRow, Tower
from aprfmt.errors import RefusedError


def _odd_length_to_gguf(value: object, scope: Scope) -> object:
    """The value size, if it differs from llama.cpp's default."""
    return None if value == scope.h.plain_head_dim else value


odd_value_length = Converter(_odd_length_to_gguf, derive=lambda scope: scope.h.plain_head_dim, role=SELDOM)


def _given_to_gguf(value: object, scope: Scope) -> object:
    if value is None:
        raise RefusedError(
            f"{scope.name} is null: llama.cpp's {scope.row.gguf} requires it",
            hint="use another output format: -o NAME.apr, or -o NAME --format hf",
        )
    return value


given = Converter(_given_to_gguf)
_ROTATED = Key("rope.dimension_count", ("qk_rope_head_dim",), field="head_dim")
"""The rope parameters' head size is the rotated part."""
_WHOLE_QUERY = f"heads*{KEY.replace('+', '+heads*')},"
_LOW_RANK = (
    *linear("self_attn.q_a_proj", "attn_q_a", "q_lora_rank,hidden", need="q_lora_rank"),
    *norm("self_attn.q_a_layernorm", "attn_q_a_norm", "q_lora_rank", need="q_lora_rank"),
    *linear("self_attn.q_b_proj", "attn_q_b", f"{_WHOLE_QUERY}q_lora_rank", need="q_lora_rank"),
    TensorRow(("self_attn.q_proj.weight",), (), (f"{_WHOLE_QUERY}hidden",), "!q_lora_rank"),
)


def _depth_scale_to_gguf(value: object, scope: Scope) -> float | None:
    """MiniCPM's residual scale: scale_depth over the square root of the number of layers."""
    depth = as_float(value, scope.name)
    return None if depth is None or not scope.h.num_layers else depth / math.sqrt(scope.h.num_layers)


def _depth_scale_from_gguf(value: object, scope: Scope) -> object:
    scale = as_float(value, scope.key.gguf)
    return DEFAULT if scale is None or not scope.h.num_layers else round(scale * math.sqrt(scope.h.num_layers), 6)


def _base_width_to_gguf(value: object, scope: Scope) -> float | None:
    """MiniCPM divides its logits by the ratio of the hidden size to `dim_model_base`."""
    base = as_int(value, scope.name)
    return scope.h.hidden_size / base if base and scope.h.hidden_size else None


def _base_width_from_gguf(value: object, scope: Scope) -> object:
    times = as_float(value, scope.key.gguf)
    return round(scope.h.hidden_size / times) if times and scope.h.hidden_size else DEFAULT


downsampling = words({"4x": 2, "16x": 4})
one_layer = Converter(
    lambda value, scope: None if value is None else [value],
    lambda value, scope: value[0] if isinstance(value, list) and value else DEFAULT,
)
_MERGER = "model.vision_tower.vit_merger."

ROWS: tuple[Architecture, ...] = (
    Architecture(
        id="minicpm3", gguf="minicpm3", **hf_names("MiniCPM3", "minicpm3"),
        tensors=decoder(*joint_latent_attention(*_LOW_RANK)),
        keys=(
            *DIMS, GROUPED, _ROTATED, ROPE, RMS_EPS, VOCAB,
            Key("attention.q_lora_rank", ("q_lora_rank",), converter=given),
            Key("attention.kv_lora_rank", ("kv_lora_rank",)),
            Key("attention.key_length", ("qk_nope_head_dim",), converter=nope_and_rope, needed=REQUIRED),
            Key("attention.value_length", ("v_head_dim",), converter=odd_value_length), EQUAL_HEADS,
            must_be("scale_emb", 12), must_be("scale_depth", 1.4), must_be("dim_model_base", 256),
            must_be("attention_bias", False), must_be("mlp_bias", False), SILU,
        ),
    ),
    Architecture(
        id="minicpm", gguf="minicpm", **hf_names("MiniCPM", "minicpm"), rope_type=0,
        tensors=decoder(*attention(permuted=True)),
        keys=(
            *DECODER, Key("embedding_scale", ("scale_emb",), "f32"),
            Key("residual_scale", ("scale_depth",), "f32",
                converter=Converter(_depth_scale_to_gguf, _depth_scale_from_gguf)),
            Key("logit_scale", ("dim_model_base",), "f32",
                converter=Converter(_base_width_to_gguf, _base_width_from_gguf)), SILU,
        ),
    ),
)

TOWERS: tuple[Tower, ...] = (
    Tower(
        id="minicpmv4_6_vision",
        **whole(
            "MiniCPMV4_6ForConditionalGeneration", "MiniCPMOcrForConditionalGeneration",
            types=("minicpmv4_6", "minicpm_ocr"),
        ),
        when="projector_type=minicpmv4_6", text="model.language_model.",
        tensors=(
            *siglip("model.vision_tower."), *norm(f"{_MERGER}layer_norm1", "v.vit_merger.ln1", TOWER_WIDTH, REQUIRED),
            *(
                row
                for name, short in (("q_proj", "q"), ("k_proj", "k"), ("v_proj", "v"), ("out_proj", "out"))
                for row in linear(
                    f"{_MERGER}self_attn.{name}", f"v.vit_merger.attn_{short}", f"{TOWER_WIDTH},{TOWER_WIDTH}",
                    REQUIRED,
                )
            ),
            *norm(f"{_MERGER}pre_norm", "v.vit_merger.ds_ln", f"4*{TOWER_WIDTH}", REQUIRED),
            *linear(f"{_MERGER}linear_1", "v.vit_merger.ds_ffn_up", f"4*intermediate_size,4*{TOWER_WIDTH}", REQUIRED),
            *linear(f"{_MERGER}linear_2", "v.vit_merger.ds_ffn_down", f"{TOWER_WIDTH},4*intermediate_size", REQUIRED),
            *norm("model.merger.mlp.0.pre_norm", "mm.input_norm", f"4*{TOWER_WIDTH}", REQUIRED),
            *linear("model.merger.mlp.0.linear_1", "mm.up", f"4*{TOWER_WIDTH},4*{TOWER_WIDTH}", REQUIRED),
            *linear("model.merger.mlp.0.linear_2", "mm.down", f"hidden,4*{TOWER_WIDTH}", REQUIRED),
        ),
        keys=sees(
            Key("vision.image_size", ("preprocessor_config.scale_resolution",)), *sizes(image_size=""),
            Key("", ("vision_config.image_size",)), *IMAGE, projector("minicpmv4_6"),
            Key("vision.projector.scale_factor", ("preprocessor_config.downsample_mode",), converter=downsampling),
            Key("vision.wa_layer_indexes", ("insert_layer_id",), "i32[]", converter=one_layer), USE_GELU, VISION_EPS,
        ),
        config={"vision_config.model_type": "minicpmv4_6_vision"},
    ),
)
