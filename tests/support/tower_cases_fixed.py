"""Cases of towers that the converter knows at their published sizes only."""

from __future__ import annotations

import arch_cases_sparse
import arch_cases_ssm
from tower_cases_moon import WHOLE, at_size
from tower_models import TEXT, TowerCase

_STEP = next(case for case in arch_cases_sparse.CASES if case.id == "step3p5/logits")
_NEMOTRON = next(case for case in arch_cases_ssm.CASES if case.id == "nemotron_h")
_ONE_SIZE = "edited: it asserts the sizes of the published model"
_ASSERTED = "num_layers) == (2, 728, 1536, 47)"
_ANY_SIZE = (("step3", _ASSERTED, "num_layers)"),)
_RADIO_SIZES = {"hidden_size": (1280, 32), "intermediate_size": (5120, 48), "num_layers": (32, 4), "num_heads": (16, 4)}
_RADIO = "vision_model.radio_model.model.patch_generator."

CASES = (
    TowerCase(
        "step_vl_vision",
        "StepVLForConditionalGeneration",
        {
            **WHOLE["qwen3/step_vl"],
            "understand_projector_stride": 2,
            "vision_config": {
                **{"width": 32, "layers": 3, "heads": 4, "image_size": 56, "patch_size": 14, "mlp_ratio": 1.5},
                **{"hidden_act": "quick_gelu", "layer_norm_eps": 1e-5, "use_rope2d": True},
            },
        },
        patches=_ANY_SIZE,
        patched=_ONE_SIZE,
    ),
    TowerCase(
        "step3p7_vision",
        "Step3p7ForConditionalGeneration",
        {
            "text_config": at_size(_STEP.config["text_config"]),
            "vision_config": {
                **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4},
                **{"image_size": 56, "patch_size": 14, "mlp_ratio": 1.5},
            },
            "image_token_id": 5,
            "understand_projector_stride": 2,
        },
        "Step3p7Config",
        patches=_ANY_SIZE,
        patched=_ONE_SIZE,
        feed="pixels",
    ),
    TowerCase(
        "nemotron_vl_vision",
        "NemotronH_Nano_VL_V2",
        {
            "model_type": "NemotronH_Nano_VL_V2",
            "llm_config": {
                **{key: value for key, value in TEXT.items() if key != "head_dim"},
                **at_size(_NEMOTRON.config),
                **{"model_type": "nemotron_h", "architectures": ["NemotronHForCausalLM"]},
            },
            "force_image_size": 80,
            "downsample_ratio": 0.5,
            "projector_hidden_size": 80,
            "vision_config": {
                **{"architectures": ["RADIOModel"], "patch_size": 16, "hidden_size": 32, "intermediate_size": 48},
                **{"num_hidden_layers": 4, "num_attention_heads": 4},
            },
        },
        extra={
            f"{_RADIO}cls_token.token": (3, 32),
            f"{_RADIO}pos_embed": (1, 49, 32),
        },  # 7 x 7 on 5 x 5: at halves, so that nothing is rounded
        lost=r"pos_embed",
        patches=tuple(("nemotron", f"_vit_{key} = {a}", f"_vit_{key} = {b}") for key, (a, b) in _RADIO_SIZES.items()),
        patched="edited: it hard-codes the sizes of the published tower",
    ),
)
