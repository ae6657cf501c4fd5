"""Towers of Step 3: learned positions and rotary ones, scaled layers, two convolutions behind them. Data only."""

from __future__ import annotations

from math import isqrt

from aprfmt.arch.converter import DEFAULT, Converter, Scope
from aprfmt.arch.converters.towers import ratio_of_ffn
from aprfmt.arch.fields import as_float, as_int
from aprfmt.arch.row import OPTIONAL, REQUIRED, Key, Tower
from aprfmt.arch.rows.parts import linear, norm, tensor
from aprfmt.arch.towers.parts import IMAGE, epsilon, layers, mlp, norms, projector, sees
from aprfmt.arch.towers.vit import vision


def _square_to(value: object, scope: Scope) -> object:
    stride = as_int(value, scope.name)
    return stride**2 if stride else None


def _square_from(value: object, scope: Scope) -> object:
    return isqrt(as_int(value, scope.name) or 0) or DEFAULT


def _ffn_of_width(scope: Scope) -> object:
    width, ratio = scope.size("vision_config.width"), as_float(scope.config("vision_config.mlp_ratio"), scope.name)
    return round(width * ratio) if width and ratio else None


squared = Converter(_square_to, _square_from)
ffn_of_width = Converter(derive=_ffn_of_width)

_V = "vision_model."
_W = "width"
_TENSORS = (
    tensor(f"{_V}conv1.weight", "v.patch_embd.weight", f"{_W},3,patch_size,patch_size"),
    tensor(f"{_V}positional_embedding", "v.position_embd.weight", f"image_size/patch_size*image_size/patch_size,{_W}"),
    *norm(f"{_V}ln_pre", "v.pre_ln", _W, REQUIRED),
    *layers(
        *norms("ln_1", "ln_2", width=_W),
        tensor("attn.in_proj_weight", "attn_qkv.weight", f"3*{_W},{_W}"),
        tensor("attn.in_proj_bias", "attn_qkv.bias", f"3*{_W}"),
        *linear("attn.out_proj", "attn_out", f"{_W},{_W}", REQUIRED),
        *mlp("mlp.c_fc", "mlp.c_proj", width=_W),
        tensor("ls_1.gamma", "ls1.weight", _W),
        tensor("ls_2.gamma", "ls2.weight", _W),
        hf=f"{_V}transformer.resblocks.{{n}}.",
        depth="vision_config.layers",
    ),
    tensor(f"{_V}vit_downsampler1.weight", "mm.0.weight", f"2*{_W},{_W},3,3"),
    tensor(f"{_V}vit_downsampler1.bias", "mm.0.bias", f"2*{_W}", OPTIONAL),
    tensor(f"{_V}vit_downsampler2.weight", "mm.1.weight", f"4*{_W},2*{_W},3,3"),
    tensor(f"{_V}vit_downsampler2.bias", "mm.1.bias", f"4*{_W}", OPTIONAL),
    tensor("vit_large_projector.weight", "mm.model.fc.weight", f"hidden,4*{_W}"),
)


def _step(id: str, hf_class: str, model_type: str) -> Tower:
    return Tower(
        id=id,
        gguf="clip",
        hf_class=hf_class,
        model_type=model_type,
        hf_classes=(hf_class,),
        model_types=(model_type,),
        when="projector_type=step3vl",
        text="",
        prefixes=(("model.vision_model.", _V), ("model.vit_large_projector.", "vit_large_projector.")),
        tensors=_TENSORS,
        f32=(".position_embd.",),
        convolutions=("mm.0.weight", "mm.1.weight"),
        keys=sees(
            Key("vision.image_size", ("vision_config.image_size",)),
            Key("vision.patch_size", ("vision_config.patch_size",)),
            Key("vision.embedding_length", ("vision_config.width", "vision_config.hidden_size")),
            Key("vision.feed_forward_length", ("vision_config.intermediate_size",), converter=ffn_of_width),
            Key("", ("vision_config.mlp_ratio",), "f32", converter=ratio_of_ffn),
            Key("vision.block_count", ("vision_config.layers", "vision_config.num_hidden_layers")),
            Key("vision.attention.head_count", ("vision_config.heads", "vision_config.num_attention_heads")),
            *IMAGE,
            projector("step3vl"),
            epsilon("vision", "vision_config.layer_norm_eps"),
            Key("vision.projector.scale_factor", ("understand_projector_stride",), converter=squared),
            Key("vision.preproc_image_size", constant=3024),
        ),
        defaults={
            "": {
                "preprocessor_config.image_mean": [0.48145466, 0.4578275, 0.40821073],
                "preprocessor_config.image_std": [0.26862954, 0.26130258, 0.27577711],
                **vision(image_size=728, patch_size=14, width=1536, layers=47, heads=16, mlp_ratio=8960 / 1536),
                **vision(layer_norm_eps=1e-5),
                "understand_projector_stride": 2,
            }
        },
        config={"vision_config.model_type": "perception_encoder"},
    )


TOWERS: tuple[Tower, ...] = (
    _step("step_vl_vision", "StepVLForConditionalGeneration", "step_robotics"),
    _step("step3p7_vision", "Step3p7ForConditionalGeneration", "step3p7"),
)
