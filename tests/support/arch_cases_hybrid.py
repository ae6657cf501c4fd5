"""Cases of decoders whose layers attend, or have Mamba's mixer or linear attention, each with an MLP behind it."""

from __future__ import annotations

from arch_cases_common import ATTENTION_BIAS, MHA, TIED, Config, family
from arch_models import VOCAB, ArchCase

_BAMBA: Config = {
    "num_hidden_layers": 4,
    "attn_layer_indices": [1, 3],
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "pad_token_id": 0,
}
_JAMBA: Config = {
    "num_hidden_layers": 4,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "num_experts": 4,
    "pad_token_id": 0,
}
_LATE: Config = {"expert_layer_period": 3, "expert_layer_offset": 2, "attn_layer_period": 8, "attn_layer_offset": 2}

_ORIGINAL: Config = {
    "model_type": "mamba", "d_model": 64, "n_layer": 2, "vocab_size": VOCAB, "ssm_cfg": {}, "rms_norm": True,
    "residual_in_fp32": True, "fused_add_norm": True, "pad_vocab_size_multiple": 8, "tie_word_embeddings": True,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
"""As state-spaces/mamba-130m has it, with a model type and token ids; the tokenizer comes beside it."""

CASES: tuple[ArchCase, ...] = (
    *family("bamba", "Bamba", _BAMBA, {
        "tied": TIED | {"mamba_n_groups": 1, "attn_layer_indices": [2]}, "biases": ATTENTION_BIAS | MHA,
        "mlp-bias": {"mlp_bias": True},
    }),
    *family("jamba", "Jamba", _JAMBA, {
        "tied": TIED | {"mamba_d_state": 8, "mamba_dt_rank": 5, "mamba_d_conv": 3}, "late": _LATE | MHA,
        "dense": {"num_experts": 1, "num_experts_per_tok": 1},
    }),
    ArchCase(
        "mamba/original", "mamba", "", "MambaLMHeadModel", _ORIGINAL,
        wrapped=True,  # under other names than the row's
        begins={"backbone.embeddings.": "backbone.embedding."},
    ),
)  # fmt: skip
