"""Cases of networks that vLLM runs and transformers does not have."""

from __future__ import annotations

from dataclasses import replace

from arch_cases_multimodal import sees
from arch_cases_plain import CANNOT
from arch_cases_remote import Config, remote
from arch_cases_remote_moe import PARAM2
from arch_cases_wrappers import inside
from arch_models import DIMS, VOCAB, ArchCase

_LLAMA: Config = {
    **{key: value for key, value in DIMS.items() if key != "head_dim"},
    "hidden_act": "silu", "rope_theta": 10000.0, "tie_word_embeddings": False, "vocab_size": VOCAB,
}  # fmt: skip
# As Tele-AI/TeleChat2-7B has them.
_TELECHAT: Config = {
    "bos_token_id": 1, "eos_token_id": 2, "n_layer": 2, "n_head": 4,
    "num_key_value_heads": 2, "hidden_size": 64, "ffn_hidden_size": 96, "seq_length": 512,
    "layer_norm_epsilon": 1e-5, "apply_residual_connection_post_layernorm": False, "embed_layernorm": False,
    "base_seqlen": 8192, "training_seqlen": 8192, "tie_word_embeddings": False, "vocab_size": VOCAB,
}  # fmt: skip
# As sarvamai/sarvam-105b has them.
_SARVAM: Config = {
    **_LLAMA, "num_hidden_layers": 3, "num_key_value_heads": 4, "q_lora_rank": None, "kv_lora_rank": 16,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12, "num_experts": 8, "num_experts_per_tok": 2,
    "num_shared_experts": 1, "moe_intermediate_size": 32, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5,
    "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "score_function": "sigmoid", "attention_bias": False,
}  # fmt: skip
_STEP3: Config = {
    **{key: value for key, value in _LLAMA.items() if key not in ("max_position_embeddings", "num_key_value_heads")},
    "max_position_embedding": 512, "head_dim": 16, "share_q_dim": 40, "moe_num_experts": 8, "moe_top_k": 2,
    "moe_intermediate_size": 32, "share_expert_dim": 48, "moe_layers_enum": "1", "norm_expert_weight": True,
}  # fmt: skip
_RNJ: Config = {
    **_LLAMA, "head_dim": 16, "attention_bias": False, "query_pre_attn_scalar": 16, "final_logit_softcapping": 30.0,
    "sliding_window": 8, "layer_types": ["chunked_attention", "full_attention"],
}  # fmt: skip
_DOMYN: Config = {
    **_LLAMA, "head_dim": 16, "position_layers": ["rope", "nope"], "window_sizes": [[7, 0], [-1, -1]],
    "per_layer_config": [{"head_dim": 16}, {"head_dim": 16}],
}  # fmt: skip
_BLENDS: Config = {"bskcn_1": [0], "bskcn_2": [0], "bskcn_3": [1], "bskcn_4": [1], "bskcn_tv": [0.9, 0.8]}
_INKLING: Config = {
    "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 20, "sliding_window_size": 8,
    "d_rel": 6, "rel_extent": 24, "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40,
    "head_dim": 20, "layer_types": ["hybrid_sliding", "hybrid"],
}  # fmt: skip
_EYES: Config = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 4,
}  # fmt: skip
_SEES = {**_EYES, "projection_hidden_dim": 48, "posemb_grid_size": 4, "text_hidden_size": 64}
_MLLAMA_SEES: Config = {
    **{key: value for key, value in _EYES.items() if key != "num_attention_heads"}, "num_global_layers": 1,
    "attention_heads": 2, "image_size": 16, "intermediate_layers_indices": [0], "vision_output_dim": 64,
    "num_hidden_layers": 1,
}  # fmt: skip
_WRAPPERS: tuple[ArchCase, ...] = (
    sees("inkling2_text/whole", "Inkling2", {**_INKLING, "unpadded_vocab_size": 500}, _SEES),
    sees("inkling2_loop_text/whole", "Inkling2Loop", {**_INKLING, "unpadded_vocab_size": 500}, _SEES),
    sees("lfm3/vl", "Lfm3Vl", {
        "model_type": "lfm3", "layer_types": ["conv", "full_attention"], "head_dim": 16,
    }, {**_EYES, "num_key_value_heads": 1, "layer_types": ["conv", "full_attention"]}),
    sees("mllama_text_model/whole", "Mllama", {"model_type": "mllama_text_model", "cross_attention_layers": [1]},
        _MLLAMA_SEES),
)  # fmt: skip

CASES: tuple[ArchCase, ...] = (
    *(replace(case, llama_cpp_cannot=CANNOT) for case in _WRAPPERS),
    ArchCase("bailing_moe_v2/param2", "bailing_moe_v2", "", "Param2MoEForCausalLM", PARAM2),
    inside("hyperclovax/vision_v2", "HCXVisionV2ForCausalLM", "vlm", {
        "text_config": {**_LLAMA, "model_type": "hyperclovax", "attention_multiplier": 0.0625, "use_post_norm": False},
        "vision_config": {"depth": 1},
    }, "model.vision_model.blocks.0.attn.proj.weight", "model.mm_projector.proj.weight",
        begins={"model.": "model.language_model.model.", "lm_head.": "model.language_model.lm_head."}),
    *remote("mimo", "MiMoForCausalLM", {**_LLAMA, "attention_bias": True, "num_nextn_predict_layers": 1}, {
        "windows": {"use_sliding_window": False, "sliding_window": None, "max_window_layers": 2},
    }),
    *remote("sarvam_mla", "SarvamMLAForCausalLM", _SARVAM, {"low_rank": {"q_lora_rank": 24}}),
    *remote("telechat2", "TeleChat2ForCausalLM", _TELECHAT, {"mha": {"num_key_value_heads": 4}}),
    *remote("teleflm", "TeleFLMForCausalLM", {
        **_LLAMA, "model_type": "TeleFLM", "use_mup": True, "mup_scale_factor": 8.0, "input_mult": 1.0,
        "output_mult": 16.0,
    }, llama_cpp_cannot=CANNOT),
    *remote("solar", "SolarForCausalLM", {**_LLAMA, **_BLENDS}, llama_cpp_cannot=CANNOT),
    *remote("step1", "Step1ForCausalLM", {
        **{key: value for key, value in _LLAMA.items() if key not in ("num_key_value_heads", "rope_theta")},
        "num_attention_groups": 2,
    }, llama_cpp_cannot=CANNOT),
    *remote("iquestloopcoder", "IQuestLoopCoderForCausalLM", {**_LLAMA, "loop_num": 2, "loop_window_size": 64},
        llama_cpp_cannot=CANNOT),
    *remote("rnj1", "Rnj1ForCausalLM", _RNJ, llama_cpp_cannot=CANNOT),
    *remote("domyn_edge", "DomynEdgeForCausalLM", _DOMYN, llama_cpp_cannot=CANNOT),
    *remote("step3_text", "Step3TextForCausalLM", _STEP3, llama_cpp_cannot=CANNOT),
    ArchCase("llama/telechat3", "llama", "", "TeleChat3ForCausalLM", {**_LLAMA, "model_type": "telechat3"}),
)  # fmt: skip
