"""The case of Gemma 3n's towers; transformers builds the one that sees with a library of images."""

from __future__ import annotations

import arch_cases_gemma4
from tower_cases_moon import at_size
from tower_models import TowerCase

_TEXT = next(case for case in arch_cases_gemma4.CASES if case.id == "gemma3n_text/whole")
_VISION = "model.vision_tower.timm_model."
_AUDIO = "model.audio_tower.subsample_conv_projection."

_ARCHITECTURE = (
    "er3_w8 er3_w8 er3_w8",
    "ir35_w10 ir50_w10 ir30_w10 ir50_w10 ir30_w10",
    "ir55_w12 " + "ir50_w12 " * 7 + "ir00_w12 " + "at3_w12 ir00_w12 " * 14,
    "ir55_w14 " + "at0_w14 ir00_w14 " * 19,
)
"""Kinds, kernels and widths of the blocks of mobilenetv5_300m_enc, whose own widths are 128, 256, 640 and 1280."""

_NAMES = 'name = name.replace("model.audio_tower.conformer.", "conformer.layers.")'
_NAMED = (
    r'name = re.sub(r"^model.audio_tower.(subsample_conv_projection.)conv_(\d.norm)", r"conformer.\1layer\2", name)'
)


def _blocks() -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors of all blocks."""
    shapes: dict[str, tuple[int, ...]] = {}
    before = 6
    for stage, blocks in enumerate(_ARCHITECTURE):
        for number, block in enumerate(blocks.split()):
            kind, width = block[:2], int(block.partition("_w")[2])
            kernels = [int(digit) for digit in block[2:].partition("_")[0]]
            inner = 4 * width
            own: dict[str, tuple[int, ...]] = {}
            if kind == "er":
                own |= {"conv_exp": (inner, before, 3, 3), "bn1": (inner,)}
                own |= {"conv_pwl": (width, inner, 1, 1), "bn2": (width,)}
            elif kind == "ir":
                for name, channels, kernel in (("dw_start", before, kernels[0]), ("dw_mid", inner, kernels[1])):
                    if kernel:
                        own |= {f"{name}.conv": (channels, 1, kernel, kernel), f"{name}.bn": (channels,)}
                own |= {"pw_exp.conv": (inner, before, 1, 1), "pw_exp.bn": (inner,)}
                own |= {"pw_proj.conv": (width, inner, 1, 1), "pw_proj.bn": (width,)}
            else:
                own |= {"norm": (width,), "attn.query.proj": (16, width, 1, 1), "attn.output.proj": (width, 16, 1, 1)}
                for name in ("attn.key", "attn.value"):
                    own |= {f"{name}.proj": (4, width, 1, 1)}
                    if kernels[0]:
                        own |= {f"{name}.down_conv": (width, 1, 3, 3), f"{name}.norm": (width,)}
            shapes |= {f"{_VISION}blocks.{stage}.{number}.{name}.weight": shape for name, shape in own.items()}
            if kind != "er":
                shapes[f"{_VISION}blocks.{stage}.{number}.layer_scale.gamma"] = (width,)
            before = width
    return shapes


CASES = (
    TowerCase(
        "gemma3n_towers",
        "Gemma3nForConditionalGeneration",
        {
            **at_size(_TEXT.config),
            "vision_config": {
                **{"model_type": "gemma3n_vision", "architecture": "mobilenetv5_300m_enc", "hidden_size": 32},
                **{"vocab_size": 8, "vocab_offset": 600, "rms_norm_eps": 1e-6},
            },
            "audio_config": {
                **{"model_type": "gemma3n_audio", "hidden_size": 48, "vocab_size": 8, "vocab_offset": 608},
                **{"conf_num_hidden_layers": 2, "conf_num_attention_heads": 4, "conf_conv_kernel_size": 5},
                **{"input_feat_size": 16, "sscp_conv_channel_size": [8, 4]},
            },
        },
        preprocessor={"size": {"height": 768, "width": 768}, "image_seq_length": 256},
        extra={
            **_blocks(),
            f"{_VISION}conv_stem.conv.weight": (6, 3, 3, 3),
            f"{_VISION}conv_stem.conv.bias": (6,),
            f"{_VISION}conv_stem.bn.weight": (6,),
            f"{_VISION}msfa.ffn.pw_exp.conv.weight": (40, 26, 1, 1),
            f"{_VISION}msfa.ffn.pw_exp.bn.weight": (40,),
            f"{_VISION}msfa.ffn.pw_proj.conv.weight": (32, 40, 1, 1),
            f"{_AUDIO}conv_0.conv.weight": (8, 1, 3, 3),
            f"{_AUDIO}conv_0.norm.weight": (8,),
            f"{_AUDIO}conv_1.conv.weight": (4, 8, 3, 3),
            f"{_AUDIO}conv_1.norm.weight": (4,),
            f"{_AUDIO}input_proj_linear.weight": (48, 16),
        },
        # With timm 1.0.31 at an eighth of the widths: 7e-4, 9e-4 and 7e-4 for three images in F16.
        mtmd_cannot="transformers builds it with timm, which the suite does not have; with it three images agree",
        differs={r"layer_scale\.gamma": "it writes the scales of blocks flat, which crashes llama.cpp"},
        patches=(("gemma", _NAMES, f"{_NAMES}; {_NAMED}"),),
        patched="edited: it has no name for the norms of the first convolutions, which only Gemma 4's have",
    ),
)
