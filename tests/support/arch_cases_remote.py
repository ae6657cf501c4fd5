"""Cases of networks that transformers does not have: config.json as published, tensors by the row."""

from __future__ import annotations

from typing import Any

from arch_models import DIMS, VOCAB, ArchCase

# As of internlm2-chat-7b, but for the sizes.
_INTERNLM2: dict[str, Any] = {
    **{key: value for key, value in DIMS.items() if key != "head_dim"},
    "model_type": "internlm2",
    "hidden_act": "silu",
    "bias": False,
    "rope_theta": 1000000,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "vocab_size": VOCAB,
}

CASES: tuple[ArchCase, ...] = (
    ArchCase("internlm2", "internlm2", "", "InternLM2ForCausalLM", _INTERNLM2),
    ArchCase("internlm2/mha", "internlm2", "", "InternLM2ForCausalLM", _INTERNLM2 | {"num_key_value_heads": 4}),
)
