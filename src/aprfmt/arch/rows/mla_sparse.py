"""Rows of the architecture table: latent attention to the positions that an indexer chooses."""

from __future__ import annotations

from aprfmt.arch.row import Architecture, Key
from aprfmt.arch.rows.parts import hf_names
from aprfmt.arch.rows.parts_mla import INDEXER, MLA_REQUIRED, indexer, mla_decoder, mla_keys
from aprfmt.arch.rows.parts_moe import draft_layer, selection_bias

_DRAFTS = Key("nextn_predict_layers", ("num_nextn_predict_layers",), via="drafts")
_LAYERS = Key("", ("mlp_layer_types",), "str[]", via="leading_dense")
_REQUIRED = {
    **MLA_REQUIRED,
    "attention.q_lora_rank": "",
    "attention.indexer.head_count": "",
    "attention.indexer.key_length": "",
    "attention.indexer.top_k": "",
}
_DEFAULTS = {
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "kv_lora_rank": 512,
    "q_lora_rank": 1536, "rms_norm_eps": 1e-6, "attention_bias": False, "tie_word_embeddings": False,
    "scoring_func": "sigmoid", "n_shared_experts": 1, "n_routed_experts": 256, "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048, "first_k_dense_replace": 3, "routed_scaling_factor": 2.5,
    "norm_topk_prob": True, "index_topk": 2048, "index_head_dim": 128, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
_DEEPSEEK_V32_DEFAULTS = {
    **_DEFAULTS, "n_group": 8, "topk_group": 4, "num_key_value_heads": 128, "index_n_heads": 64,
    "max_position_embeddings": 163840,
}  # fmt: skip
_GLM_MOE_DSA_DEFAULTS = {
    **_DEFAULTS, "n_group": 1, "topk_group": 1, "num_key_value_heads": 64, "index_n_heads": 32,
    "qk_nope_head_dim": 192, "v_head_dim": 256, "q_lora_rank": 2048, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 202752,
}  # fmt: skip


ROWS: tuple[Architecture, ...] = (
    Architecture(
        id="deepseek_v32",
        required={**_REQUIRED, "expert_gating_func": ""},
        gguf="deepseek32",
        **hf_names("DeepseekV32", "deepseek_v32"),
        rope_type=0,
        tensors=mla_decoder((selection_bias(),), (*indexer(), *draft_layer())),
        keys=mla_keys(*INDEXER, _DRAFTS, _LAYERS),
        gguf_only=(),
        defaults={"": _DEEPSEEK_V32_DEFAULTS},
    ),
    Architecture(
        id="glm_moe_dsa",
        required=_REQUIRED,
        gguf="glm-dsa",
        **hf_names("GlmMoeDsa", "glm_moe_dsa"),
        rope_type=0,
        tensors=mla_decoder((selection_bias(),), (*indexer("indexer"), *draft_layer())),
        keys=mla_keys(
            *INDEXER, Key("attention.indexer.types", ("indexer_types",), "bool[]", via="glm_indexers"), _DRAFTS, _LAYERS
        ),
        gguf_only=(),
        defaults={"": _GLM_MOE_DSA_DEFAULTS},
    ),
)
