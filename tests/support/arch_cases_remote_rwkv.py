"""Cases of RWKV, as published but for the sizes."""

from __future__ import annotations

from typing import Any

from arch_cases_remote import remote
from arch_models import RWKV, VOCAB, ArchCase

_SIZES: dict[str, Any] = {
    "bos_token_id": 0, "eos_token_id": 0, "hidden_size": 128, "num_hidden_layers": 2, "tie_word_embeddings": False,
    "vocab_size": VOCAB,
}  # fmt: skip
# As RWKV/v6-Finch-1B6-HF has them.
_FINCH: dict[str, Any] = {
    **_SIZES, "attention_hidden_size": 64, "head_size": 16, "head_size_divisor": 8, "hidden_size": 64,
    "intermediate_size": None, "layer_norm_epsilon": 1e-5, "num_attention_heads": 4, "num_hidden_layers": 3,
    "rescale_every": 2,
}  # fmt: skip
# As fla-hub/rwkv7-0.4B-world has them.
_FLA: dict[str, Any] = {
    **_SIZES, "a_low_rank_dim": 8, "attn": None, "attn_mode": "chunk", "decay_low_rank_dim": 24, "fuse_norm": False,
    "gate_low_rank_dim": 48, "head_dim": 64, "hidden_act": "sqrelu", "hidden_ratio": 4.0, "intermediate_size": 192,
    "max_position_embeddings": 2048, "norm_bias": True, "norm_eps": 1e-05, "norm_first": True, "num_heads": None,
    "v_low_rank_dim": 16, "value_dim": [128, 128],
}  # fmt: skip
# As SmerkyG/RWKV7-Goose-1.4B-Pile-HF has them.
_GOOSE: dict[str, Any] = {
    **_SIZES, "attention_hidden_size": 128, "head_size": 64, "intermediate_size": None, "layer_norm_epsilon": 1e-5,
    "lora_rank_decay": None, "lora_rank_gate": None, "lora_rank_iclr": None, "lora_rank_value_residual_mix": None,
    "model_type": "rwkv7",
}  # fmt: skip
_QWEN: dict[str, Any] = {
    **_SIZES, "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
    "initializer_range": 0.02, "intermediate_size": 96, "max_position_embeddings": 512, "max_window_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
    "use_sliding_window": False,
}  # fmt: skip
# As RWKV-Red-Team/ARWKV-7B-Preview-0.1 has them.
_HYBRID: dict[str, Any] = {
    **_QWEN, "head_size": 32, "head_size_divisor": 8, "rope_scaling": None, "sliding_window": None,
    "wkv_has_gate": True, "wkv_has_group_norm": False, "wkv_version": 7,
}  # fmt: skip
# As recursal/QRWKV6-32B-Instruct-Preview-v0.1 has them.
_QRWKV: dict[str, Any] = {
    **_QWEN, "attention_bias": True, "attention_output_bias": False, "rms_norm_eps": 1e-5, "sliding_window": 131072,
}  # fmt: skip


CASES: tuple[ArchCase, ...] = (
    *remote(
        "rwkv6", "Rwkv6ForCausalLM", _FINCH, {"width": {"intermediate_size": 96, "rescale_every": 0}}, tokenizer=RWKV
    ),
    *remote("rwkv6qwen2", "RWKV6Qwen2ForCausalLM", _QRWKV, {
        "ranks": {"lora_rank_tokenshift": 24, "lora_rank_decay": 16, "attention_bias": False},
        "mha": {"num_key_value_heads": 4},
    }),
    *remote("rwkv7", "RWKV7ForCausalLM", _FLA, {
        "ratio": {"intermediate_size": None, "hidden_ratio": 4},
        "ranks": dict.fromkeys(("decay_low_rank_dim", "gate_low_rank_dim", "a_low_rank_dim", "v_low_rank_dim")),
    }, tokenizer=RWKV),
    *remote("rwkv7_goose", "Rwkv7ForCausalLM", _GOOSE, {
        "ranks": {"intermediate_size": 192, "lora_rank_decay": 16, "lora_rank_gate": 48},
    }, tokenizer=RWKV, wrapped=True),
    *remote("rwkv_hybrid", "RwkvHybridForCausalLM", _HYBRID, {
        "ungated": {"wkv_has_gate": False, "wkv_has_group_norm": True},
    }),
)  # fmt: skip
