"""Cases of Llama and the families that share its rotary order."""

from __future__ import annotations

from typing import Any

from arch_cases_common import (
    ATTENTION_BIAS,
    LINEAR,
    LLAMA3,
    MHA,
    NO_FACTORS,
    NO_MLP_BIAS,
    NO_O_BIAS,
    NO_WINDOW,
    TIED,
    UNTIED,
    WIDE_HEADS,
    YARN,
    YARN_FACTOR,
    family,
    rope,
)
from arch_models import DIMS, VOCAB, ArchCase

_BIASES = {"attention_bias": True, "mlp_bias": True}
_DYNAMIC = rope(rope_type="dynamic", factor=2.0)


def _longrope(original: int) -> dict[str, Any]:
    """llama.cpp chooses the factors by the size of its context, 256 at least, transformers by the text."""
    factors: dict[str, Any] = {
        "short_factor": [1.0 + 0.1 * i for i in range(8)],
        "long_factor": [1.5 + 0.5 * i for i in range(8)],
    }
    return rope(rope_type="longrope", factor=4.0, original_max_position_embeddings=original, **factors)


_MINISTRAL3 = {
    "rope_theta": 1000000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}
_GRANITE = {
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.0625,
    "residual_multiplier": 0.22,
    "logits_scaling": 8.0,
}

# A third of the ids are those of pictures, under names that spell numbers in letters.
_IMAGE_IDS = {f"IMGIMG{''.join(chr(65 + int(digit)) for digit in str(i))}Z": 4 + i for i in range(8192)}
_CHAMELEON: dict[str, Any] = {
    **{key: value for key, value in DIMS.items() if key != "head_dim"}, **MHA, "vocab_size": VOCAB,
    "vocabulary_map": {"<image>": 3, **_IMAGE_IDS},
    "vq_config": {
        "embed_dim": 8, "num_embeddings": 16, "latent_channels": 8, "resolution": 32, "base_channels": 32,
        "channel_multiplier": [1], "num_res_blocks": 1,
    },
}  # fmt: skip


def _chameleon(name: str = "", cannot: str = "", **config: Any) -> ArchCase:
    classes = "ChameleonConfig", "ChameleonForConditionalGeneration"
    values = {**_CHAMELEON, **config}
    return ArchCase(f"chameleon{name}", "chameleon", *classes, values, llama_cpp_cannot=cannot, wrapped=True)


CASES: tuple[ArchCase, ...] = (
    *family("llama", "Llama", {}, {
        "tied": TIED, "mha": MHA, "mqa": {"num_key_value_heads": 1}, "biases": _BIASES,
        "attention_bias": ATTENTION_BIAS, "head_dim": WIDE_HEADS, "linear": LINEAR, "dynamic": _DYNAMIC,
        "yarn": YARN, "yarn_factor": YARN_FACTOR, "llama3": LLAMA3,
        "llama3_head_dim": {**LLAMA3, **WIDE_HEADS}, "longrope": _longrope(256),
        "longrope_long": _longrope(16),
    }),
    *family("mistral", "Mistral", {"sliding_window": None}, {
        "window": ({"sliding_window": 8}, NO_WINDOW), "tied": TIED, "head_dim": WIDE_HEADS, "yarn": YARN,
    }),
    *family("ministral", "Ministral", {"layer_types": ["full_attention", "sliding_attention"]}, {
        "tied": TIED, "full": {"layer_types": ["full_attention"] * 2},
        "window": ({"sliding_window": 8}, NO_WINDOW),
    }),
    *family("ministral3", "Ministral3", rope(rope_type="yarn", **_MINISTRAL3), {
        "tied": TIED, "head_dim": {"head_dim": 32},
        "temperature": rope(rope_type="yarn", **{**_MINISTRAL3, "original_max_position_embeddings": 8}),
        "mscale": rope(rope_type="yarn", **{**_MINISTRAL3, "mscale_all_dim": 0.5}),
        "betas": rope(rope_type="yarn", **{**_MINISTRAL3, "beta_fast": 4.0, "beta_slow": 2.0}),
    }),
    *family("arcee", "Arcee", {}, {
        "tied": TIED, "mha": MHA, "head_dim": WIDE_HEADS, "linear": LINEAR, "yarn": YARN,
        "llama3": LLAMA3, "biases": (_BIASES, f"{NO_O_BIAS}, and {NO_MLP_BIAS}"),
    }),
    *family("smollm3", "SmolLM3", {**TIED, "num_hidden_layers": 4}, {
        "untied": UNTIED, "mha": MHA, "linear": LINEAR, "yarn": YARN, "llama3": (LLAMA3, NO_FACTORS),
        "biases": (_BIASES, f"{NO_O_BIAS}, and {NO_MLP_BIAS}"),
        "all_rotated": ({"no_rope_layers": [1, 1, 1, 1]},
            "its graph skips RoPE in every fourth layer"),
        "window": ({"use_sliding_window": True, "sliding_window": 8}, NO_WINDOW),
    }),
    *family("granite", "Granite", {**TIED, **_GRANITE}, {
        "untied": UNTIED, "mha": MHA, "biases": _BIASES,
        "default_multipliers": dict.fromkeys(_GRANITE, 1.0), "linear": LINEAR, "yarn": YARN,
        "llama3": LLAMA3,
    }),
    *family("olmo", "Olmo", {}, {
        "tied": TIED, "mha": MHA, "clip_qkv": {"clip_qkv": 0.7}, "linear": LINEAR,
        "attention_bias": (ATTENTION_BIAS, NO_O_BIAS),
    }),
    _chameleon(),
    # As the first conversions of facebook/chameleon-7b have them, under the class that transformers had for a while.
    ArchCase("chameleon/causal", "chameleon", "", "ChameleonForCausalLM", {
        **{key: value for key, value in _CHAMELEON.items() if key != "vq_config"}, "model_type": "chameleon",
        "hidden_act": "silu", "rope_theta": 10000.0, "swin_norm": False, "tie_word_embeddings": False,
    }),
    _chameleon("/swin", "its graph feeds the MLP without the residual", swin_norm=True),
    _chameleon("/biases", f"{NO_O_BIAS}, and {NO_MLP_BIAS}", **_BIASES),
    *family("apertus", "Apertus", {}, {
        "mha": MHA, "tied": TIED, "plain_rope": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
        "bias": {"attention_bias": True},
    }),
)  # fmt: skip
