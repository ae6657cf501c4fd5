"""Cases of GPT-2's kin whose code came with their checkpoints, with the config.json of a published model."""

from __future__ import annotations

from typing import Any

from arch_cases_remote import remote
from arch_models import VOCAB, ArchCase

# As inceptionai/jais-family-590m has them.
_JAIS: dict[str, Any] = {
    "activation_function": "swiglu", "bos_token_id": 1, "eos_token_id": 2, "layer_norm_epsilon": 1e-5,
    "mup_embeddings_scale": 9.1705785388303, "mup_output_alpha": 1.09518349815769, "mup_scale_qk_dot_by_d": True,
    "mup_width_scale": 0.16666666666666666, "n_embd": 64, "n_head": 4, "n_inner": 96, "n_layer": 2, "n_positions": 512,
    "position_embedding_type": "alibi", "scale_attn_weights": True, "tie_word_embeddings": False, "vocab_size": VOCAB,
}  # fmt: skip
# As core42/jais-13b has them.
_JAIS_13B: dict[str, Any] = {
    **{key: value for key, value in _JAIS.items() if not key.startswith("mup_")},
    "embeddings_scale": 14.6, "scale_qk_dot_by_d": True, "width_scale": 0.11100000000000002,
}  # fmt: skip
# As lewtun/talkie-1930-13b-it-hf has them.
_TALKIE: dict[str, Any] = {
    "bos_token_id": 1, "eos_token_id": 2, "head_dim": 16, "hidden_size": 64, "intermediate_size": 96,
    "max_position_embeddings": 512, "num_attention_heads": 4, "num_hidden_layers": 2, "rope_theta": 1000000.0,
    "tie_word_embeddings": False, "vocab_size": VOCAB,
}  # fmt: skip

CASES: tuple[ArchCase, ...] = (
    *remote("jais", "JAISLMHeadModel", _JAIS),
    ArchCase("jais/13b", "jais", "", "JAISLMHeadModel", {**_JAIS_13B, "model_type": "jais"}),
    *remote("talkie", "TalkieForCausalLM", _TALKIE),
)  # fmt: skip
