"""RADIO: a plain vision transformer whose positions are shrunk to the images that it gets. Data only."""

from __future__ import annotations

from aprfmt.arch.converters.towers import inverse
from aprfmt.arch.row import OPTIONAL, REQUIRED, Key, Tower
from aprfmt.arch.rows.parts import linear, norm, tensor
from aprfmt.arch.towers.parts import GELU, IMAGE, WIDTH, layers, mlp, norms, projector, sees, sizes
from aprfmt.arch.towers.vit import vision

_V = "vision_model.radio_model.model."
_PATCHES = f"{_V}patch_generator."

TOWERS: tuple[Tower, ...] = (
    Tower(
        id="nemotron_vl_vision",
        gguf="clip",
        hf_class="NemotronH_Nano_VL_V2",
        model_type="NemotronH_Nano_VL_V2",
        hf_classes=("NemotronH_Nano_VL_V2", "RADIOModel"),
        model_types=("NemotronH_Nano_VL_V2",),
        hf_when="!sound_config",
        when="projector_type=nemotron_v2_vl",
        tensors=(
            tensor(f"{_PATCHES}cls_token.token", "v.class_embd", f"any_tokens,{WIDTH}"),
            tensor(
                f"{_PATCHES}embedder.weight",
                "v.patch_embd.weight",
                f"{WIDTH},3*patch_size*patch_size",
                gguf_dims=(f"{WIDTH},3,patch_size,patch_size",),
            ),
            tensor(f"{_PATCHES}pos_embed", "v.position_embd.weight", f"1,any_positions,{WIDTH}"),
            *layers(
                *norms("norm1", "norm2"),
                *linear("attn.qkv", "attn_qkv", f"3*{WIDTH},{WIDTH}", REQUIRED),
                *linear("attn.proj", "attn_out", f"{WIDTH},{WIDTH}", REQUIRED),
                *mlp(),
                hf=f"{_V}blocks.{{n}}.",
            ),
            *norm("mlp1.0", "mm.model.mlp.0", f"4*{WIDTH}"),
            *linear("mlp1.1", "mm.model.mlp.1", f"projector_hidden_size,4*{WIDTH}", OPTIONAL),
            *linear("mlp1.3", "mm.model.mlp.3", "hidden,projector_hidden_size", OPTIONAL),
        ),
        made={"v.position_embd.weight": f"grid:{_PATCHES}pos_embed,force_image_size/patch_size"},
        f32=(".position_embd.",),
        keys=sees(
            *sizes(image_size=""),
            Key("vision.image_size", ("force_image_size",)),
            *IMAGE,
            projector("nemotron_v2_vl"),
            Key("vision.attention.layer_norm_epsilon", kind="f32", constant=1e-6),
            GELU,
            Key("vision.projector.scale_factor", ("downsample_ratio",), converter=inverse),
            Key("", ("projector_hidden_size",)),
        ),
        defaults={
            "": {
                "preprocessor_config.image_mean": [0.485, 0.456, 0.406],
                "preprocessor_config.image_std": [0.229, 0.224, 0.225],
                **vision(hidden_size=1280, intermediate_size=5120, num_hidden_layers=32, num_attention_heads=16),
                **vision(patch_size=16),
                "force_image_size": 512,
                "downsample_ratio": 0.5,
            }
        },
        config={"vision_config.architectures": ["RADIOModel"]},
    ),
)
