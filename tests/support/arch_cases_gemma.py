"""Cases of Gemma and Cohere."""

from __future__ import annotations

from typing import Any

from arch_cases_common import MHA, TIED, UNTIED, family
from arch_models import ArchCase

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
_NO_HEAD = "its head is tied, and it refuses a file with output.weight"
_NO_FREQS = "its loader ignores rope_freqs.weight for this family"
_NO_BIAS = "its loader has no output projection bias"


def _rope(theta: float = 10000.0, part: float | None = None, **scaling: Any) -> dict[str, Any]:
    """The rope parameters of a config."""
    partial = {} if part is None else {"partial_rotary_factor": part}
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta, **partial, **scaling}}


_GEMMA2: dict[str, Any] = {**TIED, "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 8}
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


CASES: tuple[ArchCase, ...] = (
    *family("gemma", "Gemma", {**TIED, "head_dim": 32}, {
        "mha": MHA, "mqa": {"num_key_value_heads": 1}, "head_dim": {"head_dim": 20},
        "linear": _rope(**_LINEAR), "yarn": _rope(**_YARN), "dynamic": _rope(**_DYNAMIC),
        "llama3": (_rope(**_LLAMA3), _NO_FREQS), "untied": (UNTIED, _NO_HEAD),
        "bias": ({"attention_bias": True}, _NO_BIAS),
    }),
    *family("gemma2", "Gemma2", _GEMMA2, {
        "mha": MHA, "caps": {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
        "uncapped": {"attn_logit_softcapping": None, "final_logit_softcapping": None},
        "layer_types": _layers("SFFS"), "linear": _rope(**_LINEAR), "yarn": _rope(**_YARN),
        "scale": ({"query_pre_attn_scalar": 24},
            "its attention scale is that of the head size, or of hidden / heads at 46 layers"),
    }),
    *family("gemma3_text", "Gemma3", _GEMMA3, {
        "mha": MHA, "theta": _gemma3_rope(), "linear": _gemma3_rope(**_LINEAR),
        "yarn": _gemma3_rope(**_YARN), "layer_types": _layers("FSSF"), "global": _layers("FFF"),
        "capped": {"final_logit_softcapping": 4.0}, "untied": UNTIED,
        "head_dim": {"head_dim": 24, "query_pre_attn_scalar": 24},
    }, config_class="Gemma3TextConfig"),
    *family("gemma_embedding", "Gemma3Text", {**_GEMMA3, "use_bidirectional_attention": True}, {
        "layer_types": _layers("FSSF"), "linear": _gemma3_rope(**_LINEAR),
    }, end="Model", kind="encoder"),
    *family("cohere", "Cohere", {**TIED, "logit_scale": 0.0625}, {
        "mha": MHA, "linear": _rope(**_LINEAR), "yarn": _rope(**_YARN), "dynamic": _rope(**_DYNAMIC),
        "qk_norm": {"use_qk_norm": True, "num_hidden_layers": 64},
        "qk_norm_few": ({"use_qk_norm": True}, "its loader needs Q/K norms from 64 layers on"),
        "untied": (UNTIED, _NO_HEAD), "bias": ({"attention_bias": True}, _NO_BIAS),
    }),
    *family("cohere2", "Cohere2",
            {**TIED, "logit_scale": 0.25, "sliding_window": 8, "num_hidden_layers": 4}, {
        "mha": MHA, "layer_types": _layers("SFSSF"), "linear": _rope(**_LINEAR), "yarn": _rope(**_YARN),
        "untied": (UNTIED, _NO_HEAD),
    }),
)  # fmt: skip
