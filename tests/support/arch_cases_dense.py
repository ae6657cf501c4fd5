"""Cases of GLM, Phi and other dense decoders with a layout of their own."""

from __future__ import annotations

from typing import Any

from arch_cases_common import MHA, TIED, UNTIED, family
from arch_models import VOCAB, ArchCase

_LINEAR: dict[str, Any] = {"rope_type": "linear", "factor": 4.0}
_YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
_HEAD_SIZE = "its loader needs an output projection of hidden x hidden values for any head size"
_NO_WINDOW = "its network has no sliding window"


def _rope(theta: float = 10000.0, part: float | None = None, **scaling: Any) -> dict[str, Any]:
    """The rope parameters of a config."""
    partial = {} if part is None else {"partial_rotary_factor": part}
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta, **partial, **scaling}}


_FACTORS: dict[str, Any] = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.25, 1.5, 2.0, 2.5, 3.0, 3.5],
    "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0],
}

CASES: tuple[ArchCase, ...] = (
    *family("glm", "Glm", {"pad_token_id": None}, {
        "mha": MHA, "no_bias": {"attention_bias": False}, "tied": TIED, "whole_rotary": _rope(part=1.0),
        "linear": _rope(part=0.5, **_LINEAR), "yarn": _rope(part=0.5, **_YARN),
        "head_dim": ({"head_dim": 24}, _HEAD_SIZE),
    }),
    *family("glm4", "Glm4", {"pad_token_id": None}, {
        "mha": MHA, "no_bias": {"attention_bias": False}, "tied": TIED, "head_dim": {"head_dim": 24},
        "linear": _rope(part=0.5, **_LINEAR), "yarn": _rope(part=0.5, **_YARN),
    }),
    *family("stablelm", "StableLm", _rope(part=0.25), {
        "mha": MHA, "theta": _rope(50000.0, part=0.5), "qkv_bias": {"use_qkv_bias": True},
        "qk_norm": {"qk_layernorm": True}, "parallel": {"use_parallel_residual": True, "qk_layernorm": True},
        "tied": TIED, "linear": _rope(part=0.25, **_LINEAR), "yarn": _rope(part=0.5, **_YARN),
    }),
    *family("nemotron", "Nemotron", _rope(part=0.5), {
        "mha": MHA, "bias": {"attention_bias": True, "mlp_bias": True}, "tied": TIED,
        "linear": _rope(part=0.5, **_LINEAR), "yarn": _rope(part=0.5, **_YARN),
        "head_dim": ({"head_dim": 24}, _HEAD_SIZE),
    }),
    *family("phi", "Phi", {**MHA, "intermediate_size": 256, **_rope(part=0.5)}, {
        "gqa": {"num_key_value_heads": 2}, "ffn": {"intermediate_size": 96}, "tied": TIED,
        "linear": _rope(part=0.5, **_LINEAR), "yarn": _rope(part=0.5, **_YARN),
        "theta": _rope(50000.0, part=0.25),
        "qk_norm": ({"qk_layernorm": True}, "its network has no Q/K norms"),
    }),
    *family("phi3", "Phi3", {"original_max_position_embeddings": 512}, {
        "mha": MHA, "tied": TIED, "partial": _rope(part=0.5),
        "longrope": {**_rope(**_FACTORS), "max_position_embeddings": 2048},
        "longrope_long": {**_rope(**_FACTORS), "original_max_position_embeddings": 16},
        "longrope_partial": _rope(part=0.5, rope_type="longrope", short_factor=_FACTORS["short_factor"][:4],
            long_factor=_FACTORS["long_factor"][:4]),
        "window": ({"sliding_window": 8}, _NO_WINDOW),
    }),
    *family("starcoder2", "Starcoder2", TIED, {
        "mha": MHA, "untied": UNTIED, "linear": _rope(**_LINEAR), "yarn": _rope(**_YARN),
        "no_bias": {"use_bias": False},
        "window": ({"sliding_window": 8}, _NO_WINDOW),
    }),
    *family("jais2", "Jais2", MHA, {
        "gqa": {"num_key_value_heads": 2}, "tied": TIED, "head_dim": {"head_dim": 24}, "linear": _rope(**_LINEAR),
        "yarn": _rope(**_YARN),
        "no_bias": {"attention_bias": False, "mlp_bias": False},
    }),
    *family("bitnet", "BitNet", {**TIED, "hidden_act": "silu"}, {
        "mha": MHA, "relu2": ({"hidden_act": "relu2"}, "its MLP has a SiLU, as the first BitNet had"),
        "untied": (UNTIED, "its head is tied"),
    }),
    # As 1bitLLM/bitnet_b1_58-large has them.
    ArchCase("bitnet/rounded", "bitnet", "", "BitnetForCausalLM", {
        "model_type": "bitnet", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "hidden_act": "silu", "weight_bits": 1, "input_bits": 8, "tie_word_embeddings": True,
        "vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2,
    }, llama_cpp_cannot="it uses the weights as stored; this model rounds them to ternary values at run time"),
)  # fmt: skip
