"""Cases of decoders whose layers differ in heads and widths, or come in two stacks."""

from __future__ import annotations

from typing import Any

from arch_cases_common import TIED, YARN, family
from arch_cases_remote import LLAMA3, remote
from arch_models import VOCAB, ArchCase

# As apple/OpenELM-270M has them.
_OPENELM: dict[str, Any] = {
    "activation_fn_name": "swish", "bos_token_id": 1, "eos_token_id": 2, "ffn_dim_divisor": 256,
    "ffn_multipliers": [4.0, 4.0, 8.0], "ffn_with_glu": True, "head_dim": 16, "max_context_length": 512,
    "model_dim": 64, "normalization_layer_name": "rms_norm", "normalize_qk_projections": True, "num_gqa_groups": 2,
    "num_kv_heads": [2, 2, 3], "num_query_heads": [4, 4, 6], "num_transformer_layers": 3,
    "qkv_multipliers": [0.5, 1.0], "rope_freq_constant": 10000, "rope_max_length": 1024,
    "share_input_output_layers": True, "vocab_size": VOCAB,
}  # fmt: skip

# As Deci/DeciLM-7B has them.
_DECI: dict[str, Any] = {
    "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 64, "intermediate_size": 96,
    "max_position_embeddings": 512, "model_type": "deci", "num_attention_heads": 4, "num_hidden_layers": 3,
    "num_key_value_heads_per_layer": [4, 2, 1], "rms_norm_eps": 1e-5, "rope_scaling": None, "rope_theta": 10000.0,
    "tie_word_embeddings": False, "vocab_size": VOCAB,
}  # fmt: skip


def _block(group: int | None, multiplier: float | None, *, linear: bool = False) -> dict[str, Any]:
    """What Nemotron's config says of a layer."""
    attention = {"n_heads_in_group": group, "no_op": not group and not linear, "replace_with_linear": linear}
    return {"attention": attention, "ffn": {"ffn_mult": multiplier, "no_op": multiplier is None}}


# As nvidia/Llama-3_1-Nemotron-51B-Instruct and nvidia/Llama-3_1-Nemotron-Ultra-253B-v1 have them.
_NEMOTRON: dict[str, Any] = {
    **{key: value for key, value in _DECI.items() if key != "num_key_value_heads_per_layer"},
    "model_type": "nemotron-nas", "attention_bias": False, "mlp_bias": False, "intermediate_size": None,
    "num_key_value_heads": None, "num_hidden_layers": 5,
    "block_configs": [
        _block(2, 6.0), _block(None, 6.0), _block(None, 6.0, linear=True), _block(None, None), _block(4, 12.0),
    ],
}  # fmt: skip
_LONE = {"block_configs": [_block(2, 6.0), _block(2, None), *[_block(2, 6.0)] * 3]}
_HRM: dict[str, Any] = {"prefix_lm": False}

CASES: tuple[ArchCase, ...] = (
    *remote("openelm", "OpenELMForCausalLM", _OPENELM, {
        "alike": {"num_kv_heads": [2] * 3, "num_query_heads": [4] * 3, "ffn_multipliers": [4.0] * 3},
    }),
    *family("hrm_text", "HrmText", _HRM, {
        "tied": TIED, "scale": {"embedding_scale": 3.5}, "cycles": {"H_cycles": 1, "L_cycles": 2}, "yarn": YARN,
        "head_dim": {"head_dim": 24}, "one": {"num_hidden_layers": 1, "initializer_range": 0.1},
        "prefix": ({"prefix_lm": True}, "its attention is causal, also within the prompt"),
    }),
    *remote("deci", "DeciLMForCausalLM", _DECI),
    ArchCase("deci/blocks", "deci", "", "DeciLMForCausalLM", _NEMOTRON),
    ArchCase("deci/llama3", "deci", "", "DeciLMForCausalLM", {**_NEMOTRON, "rope_scaling": LLAMA3}),
    ArchCase("deci/lone_attention", "deci", "", "DeciLMForCausalLM", {**_NEMOTRON, **_LONE},
        llama_cpp_cannot="its graph skips layers that have attention but no MLP"),
)  # fmt: skip
