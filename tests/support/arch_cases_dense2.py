"""Cases of dense decoders: Gemma, Cohere, GLM, Phi and others."""

from __future__ import annotations

from typing import Any

from arch_models import ArchCase

_TIED: dict[str, Any] = {"tie_word_embeddings": True}
_UNTIED: dict[str, Any] = {"tie_word_embeddings": False}
_MHA: dict[str, Any] = {"num_key_value_heads": 4}
_LINEAR: dict[str, Any] = {"rope_type": "linear", "factor": 4.0}
_YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
_LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_DYNAMIC: dict[str, Any] = {"rope_type": "dynamic", "factor": 2.0}
_NO_HEAD = "its network reads the embedding as its head, and refuses a file with an output.weight"
_HEAD_SIZE = "its loader wants an output projection of hidden x hidden values, whatever the size of a head"
_NO_FREQS = "its loader reads no rope_freqs.weight for this family"
_NO_BIAS = "its loader knows no bias of the output projection"
_NO_WINDOW = "its network has no sliding window"


def _rope(theta: float = 10000.0, part: float | None = None, **scaling: Any) -> dict[str, Any]:
    """The rope parameters of a config."""
    partial = {} if part is None else {"partial_rotary_factor": part}
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta, **partial, **scaling}}


def _cases(
    base: ArchCase, variants: dict[str, dict[str, Any]], cannot: dict[str, str] | None = None
) -> tuple[ArchCase, ...]:
    """A row's base case and what differs from it, by the name of the variant."""
    reasons = cannot or {}
    unknown = sorted({*reasons} - {*variants})
    if unknown:
        raise ValueError(f"reasons for variants that are not there: {', '.join(unknown)}")
    shared = (base.row, base.config_class, base.model_class)
    return base, *(
        ArchCase(
            f"{base.id}/{name}",
            *shared,
            {**base.config, **config},
            base.tokenizer,
            reasons.get(name, ""),
            base.kind,
        )
        for name, config in variants.items()
    )


_GEMMA2: dict[str, Any] = {**_TIED, "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 8}
_GEMMA3: dict[str, Any] = {**_GEMMA2, "num_hidden_layers": 6}


def _gemma3_rope(**full: Any) -> dict[str, Any]:
    return {
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e6, **full},
            "sliding_attention": {"rope_type": "default", "rope_theta": 20000.0},
        }
    }


def _layers(letters: str) -> dict[str, Any]:
    """Layer types by letters: S sliding, F full."""
    words = {"S": "sliding_attention", "F": "full_attention"}
    return {"num_hidden_layers": len(letters), "layer_types": [words[letter] for letter in letters]}


_FACTORS: dict[str, Any] = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.25, 1.5, 2.0, 2.5, 3.0, 3.5],
    "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0],
}

CASES: tuple[ArchCase, ...] = (
    *_cases(
        ArchCase("gemma", "gemma", "GemmaConfig", "GemmaForCausalLM", {**_TIED, "head_dim": 32}),
        {
            "mha": _MHA,
            "mqa": {"num_key_value_heads": 1},
            "head_dim": {"head_dim": 20},
            "linear": _rope(**_LINEAR),
            "yarn": _rope(**_YARN),
            "dynamic": _rope(**_DYNAMIC),
            "llama3": _rope(**_LLAMA3),
            "untied": _UNTIED,
            "bias": {"attention_bias": True},
        },
        {"llama3": _NO_FREQS, "untied": _NO_HEAD, "bias": _NO_BIAS},
    ),
    *_cases(
        ArchCase("gemma2", "gemma2", "Gemma2Config", "Gemma2ForCausalLM", _GEMMA2),
        {
            "mha": _MHA,
            "caps": {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
            "uncapped": {"attn_logit_softcapping": None, "final_logit_softcapping": None},
            "layer_types": _layers("SFFS"),
            "linear": _rope(**_LINEAR),
            "yarn": _rope(**_YARN),
            "scale": {"query_pre_attn_scalar": 24},
        },
        {"scale": "its network scales attention by the size of a head, or by hidden / heads at 46 layers"},
    ),
    *_cases(
        ArchCase("gemma3_text", "gemma3_text", "Gemma3TextConfig", "Gemma3ForCausalLM", _GEMMA3),
        {
            "mha": _MHA,
            "theta": _gemma3_rope(),
            "linear": _gemma3_rope(**_LINEAR),
            "yarn": _gemma3_rope(**_YARN),
            "layer_types": _layers("FSSF"),
            "global": _layers("FFF"),
            "capped": {"final_logit_softcapping": 4.0},
            "untied": _UNTIED,
            "head_dim": {"head_dim": 24, "query_pre_attn_scalar": 24},
        },
    ),
    *_cases(
        ArchCase(
            "gemma_embedding",
            "gemma_embedding",
            "Gemma3TextConfig",
            "Gemma3TextModel",
            {**_GEMMA3, "use_bidirectional_attention": True},
            kind="encoder",
        ),
        {"layer_types": _layers("FSSF"), "linear": _gemma3_rope(**_LINEAR)},
    ),
    *_cases(
        ArchCase("cohere", "cohere", "CohereConfig", "CohereForCausalLM", {**_TIED, "logit_scale": 0.0625}),
        {
            "mha": _MHA,
            "linear": _rope(**_LINEAR),
            "yarn": _rope(**_YARN),
            "dynamic": _rope(**_DYNAMIC),
            "qk_norm": {"use_qk_norm": True, "num_hidden_layers": 64},
            "qk_norm_few": {"use_qk_norm": True},
            "untied": _UNTIED,
            "bias": {"attention_bias": True},
        },
        {
            "qk_norm_few": "its loader looks for norms of Q and K from 64 layers on",
            "untied": _NO_HEAD,
            "bias": _NO_BIAS,
        },
    ),
    *_cases(
        ArchCase(
            "cohere2",
            "cohere2",
            "Cohere2Config",
            "Cohere2ForCausalLM",
            {**_TIED, "logit_scale": 0.25, "sliding_window": 8, "num_hidden_layers": 4},
        ),
        {
            "mha": _MHA,
            "layer_types": _layers("SFSSF"),
            "linear": _rope(**_LINEAR),
            "yarn": _rope(**_YARN),
            "untied": _UNTIED,
        },
        {"untied": _NO_HEAD},
    ),
    *_cases(
        ArchCase("glm", "glm", "GlmConfig", "GlmForCausalLM", {"pad_token_id": None}),
        {
            "mha": _MHA,
            "no_bias": {"attention_bias": False},
            "tied": _TIED,
            "whole_rotary": _rope(part=1.0),
            "linear": _rope(part=0.5, **_LINEAR),
            "yarn": _rope(part=0.5, **_YARN),
            "head_dim": {"head_dim": 24},
        },
        {"head_dim": _HEAD_SIZE},
    ),
    *_cases(
        ArchCase("glm4", "glm4", "Glm4Config", "Glm4ForCausalLM", {"pad_token_id": None}),
        {
            "mha": _MHA,
            "no_bias": {"attention_bias": False},
            "tied": _TIED,
            "head_dim": {"head_dim": 24},
            "linear": _rope(part=0.5, **_LINEAR),
            "yarn": _rope(part=0.5, **_YARN),
        },
    ),
    *_cases(
        ArchCase("stablelm", "stablelm", "StableLmConfig", "StableLmForCausalLM", _rope(part=0.25)),
        {
            "mha": _MHA,
            "theta": _rope(50000.0, part=0.5),
            "qkv_bias": {"use_qkv_bias": True},
            "qk_norm": {"qk_layernorm": True},
            "parallel": {"use_parallel_residual": True, "qk_layernorm": True},
            "tied": _TIED,
            "linear": _rope(part=0.25, **_LINEAR),
            "yarn": _rope(part=0.5, **_YARN),
        },
    ),
    *_cases(
        ArchCase("nemotron", "nemotron", "NemotronConfig", "NemotronForCausalLM", _rope(part=0.5)),
        {
            "mha": _MHA,
            "bias": {"attention_bias": True, "mlp_bias": True},
            "tied": _TIED,
            "linear": _rope(part=0.5, **_LINEAR),
            "yarn": _rope(part=0.5, **_YARN),
            "head_dim": {"head_dim": 24},
        },
        {"head_dim": _HEAD_SIZE},
    ),
    *_cases(
        ArchCase(
            "phi", "phi", "PhiConfig", "PhiForCausalLM", {**_MHA, "intermediate_size": 256, **_rope(part=0.5)}
        ),
        {
            "gqa": {"num_key_value_heads": 2},
            "ffn": {"intermediate_size": 96},
            "tied": _TIED,
            "linear": _rope(part=0.5, **_LINEAR),
            "yarn": _rope(part=0.5, **_YARN),
            "theta": _rope(50000.0, part=0.25),
            "qk_norm": {"qk_layernorm": True},
        },
        {"qk_norm": "its network has no norms of Q and K"},
    ),
    *_cases(
        ArchCase("phi3", "phi3", "Phi3Config", "Phi3ForCausalLM", {"original_max_position_embeddings": 512}),
        {
            "mha": _MHA,
            "tied": _TIED,
            "partial": _rope(part=0.5),
            "longrope": {**_rope(**_FACTORS), "max_position_embeddings": 2048},
            "longrope_long": {**_rope(**_FACTORS), "original_max_position_embeddings": 16},
            "longrope_partial": _rope(
                part=0.5,
                rope_type="longrope",
                short_factor=_FACTORS["short_factor"][:4],
                long_factor=_FACTORS["long_factor"][:4],
            ),
            "window": {"sliding_window": 8},
        },
        {"window": _NO_WINDOW},
    ),
    *_cases(
        ArchCase("starcoder2", "starcoder2", "Starcoder2Config", "Starcoder2ForCausalLM", _TIED),
        {
            "mha": _MHA,
            "untied": _UNTIED,
            "linear": _rope(**_LINEAR),
            "yarn": _rope(**_YARN),
            "no_bias": {"use_bias": False},
            "window": {"sliding_window": 8},
        },
        {"no_bias": "its loader wants every bias", "window": _NO_WINDOW},
    ),
)
