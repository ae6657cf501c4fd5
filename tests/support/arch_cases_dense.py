"""Cases of dense decoders: Llama and its nearest kin."""

from __future__ import annotations

from typing import Any

from arch_models import ArchCase

_TIED = {"tie_word_embeddings": True}
_UNTIED = {"tie_word_embeddings": False}
_MHA = {"num_key_value_heads": 4}
_WIDE_HEADS = {"head_dim": 24}
_ATTENTION_BIAS = {"attention_bias": True}
_BIASES = {"attention_bias": True, "mlp_bias": True}

_NO_FACTORS = "its loader knows no rope_freqs.weight, so the llama3 scaling of the frequencies has no place"
_NO_O_BIAS = "its loader knows no bias of the attention output"
_NO_MLP_BIAS = "its loader knows no biases of the MLP"
_NO_WINDOW = "its graph attends to all positions: the sliding window is not computed"
_PLAIN_HEADS = "its loader takes heads of hidden_size / num_attention_heads only"
_ONE_THETA = "its graph rotates sliding and full layers with one theta"


def _rope(kind: str, theta: float = 10000.0, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **more}}


_LINEAR = _rope("linear", 20000.0, factor=3.0)
_DYNAMIC = _rope("dynamic", factor=2.0)
_YARN = _rope("yarn", factor=4.0, original_max_position_embeddings=128)
_YARN_FACTOR = _rope("yarn", factor=4.0, original_max_position_embeddings=128, attention_factor=1.3)
_LLAMA3 = _rope(
    "llama3",
    500000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=128,
)


def _longrope(original: int) -> dict[str, Any]:
    """llama.cpp chooses the factors by the size of its context, 256 at least, transformers by the text."""
    factors: dict[str, Any] = {
        "short_factor": [1.0 + 0.1 * i for i in range(8)],
        "long_factor": [1.5 + 0.5 * i for i in range(8)],
    }
    return _rope("longrope", factor=4.0, original_max_position_embeddings=original, **factors)


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
_HYBRID = {"sliding_window": 8, "layer_types": None}
_OLMO3 = {"num_hidden_layers": 4, "sliding_window": 8}


def _family(
    row: str, stem: str, variants: dict[str, dict[str, Any] | tuple[dict[str, Any], str]], **base: Any
) -> tuple[ArchCase, ...]:
    """The base case and its variants: what differs from `base`, and why llama.cpp cannot compute it."""
    cases = [ArchCase(row, row, f"{stem}Config", f"{stem}ForCausalLM", base)]
    for name, variant in variants.items():
        config, why = variant if isinstance(variant, tuple) else (variant, "")
        names = f"{stem}Config", f"{stem}ForCausalLM"
        cases.append(ArchCase(f"{row}/{name}", row, *names, {**base, **config}, llama_cpp_cannot=why))
    return tuple(cases)


CASES: tuple[ArchCase, ...] = (
    *_family(
        "llama",
        "Llama",
        {
            "tied": _TIED,
            "mha": _MHA,
            "mqa": {"num_key_value_heads": 1},
            "biases": _BIASES,
            "attention_bias": _ATTENTION_BIAS,
            "head_dim": _WIDE_HEADS,
            "linear": _LINEAR,
            "dynamic": _DYNAMIC,
            "yarn": _YARN,
            "yarn_factor": _YARN_FACTOR,
            "llama3": _LLAMA3,
            "llama3_head_dim": {**_LLAMA3, **_WIDE_HEADS},
            "longrope": _longrope(256),
            "longrope_long": _longrope(16),
        },
    ),
    *_family(
        "mistral",
        "Mistral",
        {
            "window": ({"sliding_window": 8}, _NO_WINDOW),
            "tied": _TIED,
            "head_dim": _WIDE_HEADS,
            "yarn": _YARN,
        },
        sliding_window=None,
    ),
    *_family(
        "ministral",
        "Ministral",
        {
            "tied": _TIED,
            "full": {"layer_types": ["full_attention"] * 2},
            "window": ({"sliding_window": 8}, _NO_WINDOW),
        },
        layer_types=["full_attention", "sliding_attention"],
    ),
    *_family(
        "ministral3",
        "Ministral3",
        {
            "tied": _TIED,
            "head_dim": {"head_dim": 32},
            # Positions beyond the original context are what the temperature is for.
            "temperature": _rope("yarn", **{**_MINISTRAL3, "original_max_position_embeddings": 8}),
            "mscale": _rope("yarn", **{**_MINISTRAL3, "mscale_all_dim": 0.5}),
            "betas": _rope("yarn", **{**_MINISTRAL3, "beta_fast": 4.0, "beta_slow": 2.0}),
        },
        **_rope("yarn", **_MINISTRAL3),
    ),
    *_family(
        "arcee",
        "Arcee",
        {
            "tied": _TIED,
            "mha": _MHA,
            "head_dim": _WIDE_HEADS,
            "linear": _LINEAR,
            "yarn": _YARN,
            "llama3": _LLAMA3,
            "biases": (_BIASES, f"{_NO_O_BIAS}, and {_NO_MLP_BIAS}"),
        },
    ),
    *_family(
        "smollm3",
        "SmolLM3",
        {
            "untied": _UNTIED,
            "mha": _MHA,
            "linear": _LINEAR,
            "yarn": _YARN,
            "llama3": (_LLAMA3, _NO_FACTORS),
            "biases": (_BIASES, f"{_NO_O_BIAS}, and {_NO_MLP_BIAS}"),
            "all_rotated": (
                {"no_rope_layers": [1, 1, 1, 1]},
                "its graph leaves every fourth layer unrotated, whatever the file says",
            ),
            "window": ({"use_sliding_window": True, "sliding_window": 8}, _NO_WINDOW),
        },
        **_TIED,
        num_hidden_layers=4,
    ),
    *_family(
        "granite",
        "Granite",
        {
            "untied": _UNTIED,
            "mha": _MHA,
            "biases": _BIASES,
            "default_multipliers": dict.fromkeys(_GRANITE, 1.0),
            "linear": _LINEAR,
            "yarn": _YARN,
            "llama3": _LLAMA3,
        },
        **_TIED,
        **_GRANITE,
    ),
    *_family(
        "olmo",
        "Olmo",
        {
            "tied": _TIED,
            "mha": _MHA,
            "clip_qkv": {"clip_qkv": 0.7},
            "linear": _LINEAR,
            "attention_bias": (_ATTENTION_BIAS, _NO_O_BIAS),
        },
    ),
    *_family(
        "qwen2",
        "Qwen2",
        {
            "untied": _UNTIED,
            "mha": _MHA,
            "linear": _LINEAR,
            "yarn": _YARN,
            "yarn_factor": _YARN_FACTOR,
            "llama3": (_LLAMA3, _NO_FACTORS),
            "head_dim": (_WIDE_HEADS, _PLAIN_HEADS),
            "window": (
                {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
                _NO_WINDOW,
            ),
        },
        **_TIED,
    ),
    *_family(
        "qwen3",
        "Qwen3",
        {
            "untied": _UNTIED,
            "mha": _MHA,
            "plain_heads": {"head_dim": 16},
            "linear": _LINEAR,
            "yarn": _YARN,
            "attention_bias": (_ATTENTION_BIAS, _NO_O_BIAS),
            "window": (
                {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
                _NO_WINDOW,
            ),
        },
        **_TIED,
        head_dim=32,
    ),
    *_family(
        "seed_oss",
        "SeedOss",
        {
            "tied": _TIED,
            "mha": _MHA,
            "no_bias": {"attention_bias": False},
            "linear": _LINEAR,
            "yarn": _YARN,
            "out_bias": ({"attention_out_bias": True}, _NO_O_BIAS),
            "mlp_bias": ({"mlp_bias": True}, _NO_MLP_BIAS),
        },
        head_dim=32,
    ),
    *_family(
        "exaone4",
        "Exaone4",
        {
            "tied": _TIED,
            "mha": _MHA,
            "linear": _LINEAR,
            "llama3": _LLAMA3,
            "hybrid": {**_HYBRID, "num_hidden_layers": 64},
            "hybrid_llama3": {**_HYBRID, "num_hidden_layers": 64, **_LLAMA3},
            "hybrid_small": (
                {**_HYBRID, "num_hidden_layers": 4},
                "its loader turns the sliding window on for 64 layers only",
            ),
            "head_dim": (_WIDE_HEADS, _PLAIN_HEADS),
        },
        sliding_window=None,
        layer_types=["full_attention"] * 2,
    ),
    *_family(
        "hunyuan_v1_dense",
        "HunYuanDenseV1",
        {
            "untied": _UNTIED,
            "mha": _MHA,
            "head_dim": _WIDE_HEADS,
            "alpha": _rope("dynamic", alpha=1000.0, factor=1.0),
            "attention_bias": (_ATTENTION_BIAS, _NO_O_BIAS),
        },
        **_TIED,
    ),
    *_family(
        "ernie4_5",
        "Ernie4_5",
        {
            "untied": _UNTIED,
            "mha": _MHA,
            "plain_heads": {"head_dim": 16},
            "linear": _LINEAR,
            "yarn": _YARN,
            "biases": ({"use_bias": True}, _NO_MLP_BIAS),
        },
        **_TIED,
        head_dim=32,
    ),
    *_family(
        "olmo2",
        "Olmo2",
        {
            "tied": _TIED,
            "mha": _MHA,
            "linear": _LINEAR,
            "yarn": _YARN,
            "attention_bias": (_ATTENTION_BIAS, _NO_O_BIAS),
        },
    ),
    *_family(
        "olmo3",
        "Olmo3",
        {
            "mha": _MHA,
            "layer_types": {"layer_types": ["full_attention", "sliding_attention"] * 2},
            "yarn": {
                "rope_parameters": {
                    "full_attention": _YARN["rope_parameters"],
                    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                }
            },
            "two_thetas": (
                {
                    "rope_parameters": {
                        "full_attention": {"rope_type": "default", "rope_theta": 500000.0},
                        "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
                    }
                },
                _ONE_THETA,
            ),
            "tied": _TIED,
        },
        **_OLMO3,
    ),
)
