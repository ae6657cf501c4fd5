"""Pixtral and Voxtral."""

from __future__ import annotations

from aprfmt.arch.blocks.decoder import linear, norm
from aprfmt.arch.blocks.hearing import CONVOLUTIONS, HEARING_EPS, MEL, MM, POSITIONS, PREFIXES, whisper
from aprfmt.arch.blocks.tower import (
    IMAGE, TOWER_WIDTH, epsilon, hears, layers, mlp, norms, patches, projector, sees, sizes, tower_attention, whole,
)
from aprfmt.arch.converters.towers import activation
from aprfmt.arch.row import OPTIONAL, Key, TensorRow, Tower


_V = "vision_tower."
_MM = "multi_modal_projector."
_PREFIXES = (("model.vision_tower.", _V), (f"model.{_MM}", _MM))
_BREAK = {"v.token_embd.img_break": "row_of_token:[IMG_BREAK]"}
"""The row break token of an image, a row of the language model's embedding."""
_PAIRS = ("swap:num_attention_heads,2,hidden_size/num_attention_heads/2",)
_SIDE = "spatial_merge_size"


def _tensors(v: str, mm: str, *, merges: bool) -> tuple[TensorRow, ...]:
    """The tower and its projector, which concatenates neighbouring patches if it `merges` them."""
    merger = (
        *norm(f"{mm}norm", "mm.input_norm", TOWER_WIDTH),
        *linear(f"{mm}patch_merger.merging_layer", "mm.patch_merger", f"{TOWER_WIDTH},{TOWER_WIDTH}*{_SIDE}*{_SIDE}"),
    )
    return (
        *patches(f"{v}patch_conv", bias=False), *norm(f"{v}ln_pre", "v.pre_ln", TOWER_WIDTH),
        *layers(
            *norms("attention_norm", "ffn_norm", bias=False),
            *tower_attention("attention", names=("q_proj", "k_proj", "v_proj", "o_proj"), bias=False, order=_PAIRS),
            *mlp("feed_forward.up_proj", "feed_forward.down_proj", "feed_forward.gate_proj", bias=False),
            hf=f"{v}transformer.layers.{{n}}.",
        ),
        *linear(f"{mm}linear_1", "mm.1", f"hidden,{TOWER_WIDTH}", OPTIONAL),
        *linear(f"{mm}linear_2", "mm.2", "hidden,hidden", OPTIONAL), *(merger if merges else ()),
    )


def _keys(name: str) -> tuple[Key, ...]:
    return sees(
        *sizes(), *IMAGE, projector(name), epsilon("vision", "vision_config.layer_norm_eps"),
        Key("", ("vision_config.hidden_act",), "str", converter=activation),
    )


_KEYS = _keys("pixtral")
_OWN = ("hidden_size", "intermediate_size", "num_hidden_layers")

TOWERS: tuple[Tower, ...] = (
    Tower(
        id="mistral3_vision", **whole("Mistral3ForConditionalGeneration", types=("mistral3",)),
        when=f"projector_type=pixtral&vision.{_SIDE}", prefixes=_PREFIXES,
        tensors=_tensors(_V, _MM, merges=True), keys=(*_KEYS, Key(f"vision.{_SIDE}", (_SIDE,))), made=_BREAK,
        config={"vision_config.model_type": "pixtral"},
    ),
    Tower(
        id="lighton_ocr_vision",
        **whole(
            "LightOnOCRForConditionalGeneration", "LightOnOcrForConditionalGeneration",
            types=("lighton_ocr", "mistral3"),
        ),
        when="projector_type=lightonocr", text="model.language_model.",
        tensors=_tensors("model.vision_encoder.", "model.vision_projection.", merges=True),
        keys=(*_keys("lightonocr"), Key(f"vision.{_SIDE}", (_SIDE,))), config={"vision_config.model_type": "pixtral"},
    ),
    Tower(
        id="pixtral_vision", **whole("LlavaForConditionalGeneration", types=("llava",)),
        hf_when="vision_config.model_type=pixtral", when=f"projector_type=pixtral&!vision.{_SIDE}", prefixes=_PREFIXES,
        tensors=_tensors(_V, _MM, merges=False), keys=_KEYS, made=_BREAK,
        config={"vision_config.model_type": "pixtral"},
    ),
    Tower(
        id="voxtral_tower", **whole("VoxtralForConditionalGeneration", types=("voxtral",)),
        when="projector_type=voxtral", prefixes=PREFIXES,
        tensors=(
            *whisper("audio_tower.", *_OWN), *linear(f"{MM}linear_1", "mm.a.mlp.1", "hidden,4*hidden_size"),
            *linear(f"{MM}linear_2", "mm.a.mlp.2", "hidden,hidden"),
        ),
        f32=(".position_embd.",), f16=CONVOLUTIONS,
        keys=hears(
            *sizes("audio"), projector("voxtral"), MEL, HEARING_EPS, Key("audio.projector.stack_factor", constant=4),
            POSITIONS,
        ),
        config={"audio_config.model_type": "voxtral_encoder"},
    ),
)
