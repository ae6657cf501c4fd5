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
_EXPERTS: Config = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
_ALICE: Config = {
    **_LLAMA, **_EXPERTS, "head_dim": 16, "layer_types": ["linear_attention", "full_attention"],
    "shared_expert_intermediate_size": 48, "block_attn_res_block_size": 1, "linear_num_key_heads": 2,
    "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4,
}  # fmt: skip
_ALICE_LAYERS = {
    f"model.layers.{name}": shape for name, shape in {
        "1.self_attn.q_proj.weight": (128, 64), "1.self_attn.k_proj.weight": (32, 64),
        "1.self_attn.v_proj.weight": (32, 64), "1.self_attn.o_proj.weight": (64, 64),
        "1.self_attn.q_norm.weight": (16,), "1.self_attn.k_norm.weight": (16,), "1.attn_res_proj.weight": (1, 64),
        "1.attn_res_norm_weight": (64,), **{f"0.linear_attn.{x}_proj.weight": (16, 64) for x in "qkv"},
        **{f"0.linear_attn.{x}_conv1d.weight": (16, 1, 4) for x in "qkv"},
        "0.linear_attn.b_proj.weight": (2, 64), "0.linear_attn.f_a_proj.weight": (8, 64),
        "0.linear_attn.g_a_proj.weight": (8, 64), "0.linear_attn.f_b_proj.weight": (16, 8),
        "0.linear_attn.g_b_proj.weight": (16, 8), "0.linear_attn.dt_bias": (16,), "0.linear_attn.A_log": (2,),
        "0.linear_attn.o_norm.weight": (8,), "0.linear_attn.o_proj.weight": (64, 16),
    }.items()
}  # fmt: skip


def _dense(layer: int, hf: str = "mlp", width: int = 96) -> dict[str, tuple[int, ...]]:
    """Gate, up and down projection of a layer."""
    shapes = {"gate": (width, 64), "up": (width, 64), "down": (64, width)}
    return {f"model.layers.{layer}.{hf}.{name}_proj.weight": shape for name, shape in shapes.items()}


_HORIZON: Config = {
    **_LLAMA, **_EXPERTS, "head_dim": 16, "attention_bias": True, "moe_gate_bias": True, "query_key_norm": True,
    "attention_gate_func": "sigmoid", "router_score_func": "sigmoid", "router_scaling_factor": 2.5,
    "mlp_only_layers": [0], "num_shared_experts": 1, "mova_num_experts": 3, "mova_num_experts_per_tok": 2,
    "decoder_sparse_step": 1, "layernorm_num_groups": 1, "rope_head_dim": 8,
}  # fmt: skip
_HORIZON_LAYERS = {
    **_dense(0), "model.layers.0.self_attn.v_proj.weight": (32, 64), "model.layers.0.self_attn.v_proj.bias": (32,),
    "model.layers.1.self_attn.v_router.weight": (3, 64), "model.layers.1.self_attn.v_router.bias": (3,),
    **{f"model.layers.1.self_attn.v_experts.{e}.weight": (32, 64) for e in range(3)},
    "model.layers.1.mlp.gate.weight": (4, 64), "model.layers.1.mlp.gate.bias": (4,),
    **_dense(1, "mlp.shared_experts", 32),
    **{name: shape for e in range(4) for name, shape in _dense(1, f"mlp.experts.{e}", 32).items()},
}  # fmt: skip
_PANGU: Config = {
    **_LLAMA, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "first_k_dense_replace": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5, "sandwich_norm": True,
    "router_enable_expert_bias": True, "num_nextn_predict_layers": 0,
}  # fmt: skip
_LATENT: Config = {
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12,
    "num_key_value_heads": 4,
}  # fmt: skip
_SINKS: Config = {
    "qk_nope_dim": 8, "qk_rope_dim": 8, "v_channels": 12, "param_sink_number": 3, "param_sink_with_value": True,
    "attention_bias": True,
}  # fmt: skip
_PANGU_LAYERS = {
    **_dense(0), "model.layers.1.mlp.gate.weight": (4, 64), "model.layers.1.mlp.e_score_correction_bias": (4,),
    **_dense(1, "mlp.shared_experts", 32),
    **{name: shape for e in range(4) for name, shape in _dense(1, f"mlp.experts.{e}", 32).items()},
}  # fmt: skip
_NGRAMS: Config = {
    "bos_token_id": 1, "eos_token_id": 2, "num_layers": 2, "hidden_size": 48, "ffn_hidden_size": 96,
    "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB, "rope_theta": 10000.0, "tie_word_embeddings": False, "attention_bias": False,
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "qk_head_dim": 24,
    "head_dim": 8, "v_head_dim": 12, "moe_topk": 2, "n_routed_experts": 4, "zero_expert_num": 2,
    "expert_ffn_hidden_size": 32, "routed_scaling_factor": 2.5, "hidden_act": "silu", "ngram_vocab_size_ratio": 1,
    "emb_neighbor_num": 3, "emb_split_num": 2,
}  # fmt: skip
_NGRAM_TABLES = {
    f"model.ngram_embeddings.{name}": shape for e in range(4) for name, shape in {
        f"embedders.{e}.weight": (512 + 2 * e + 1, 12), f"post_projs.{e}.weight": (48, 12),
    }.items()
} | {
    f"model.layers.{n}.mlp.experts.{e}.{name}_proj.weight": (48, 32) if name == "down" else (32, 48)
    for n in range(2) for e in range(4) for name in ("gate", "up", "down")
}  # fmt: skip
_STEP5: Config = {
    **{key: value for key, value in _LLAMA.items() if key != "num_key_value_heads"}, "num_attention_groups": 2,
    "head_dim": 16, "moe_num_experts": 4, "moe_top_k": 2, "moe_intermediate_size": 32, "share_expert_dim": 48,
    "use_moe": True, "moe_layers_enum": "1", "layer_types": ["full_attention", "sliding_attention"],
    "attention_other_setting": {
        "attention_type": "sliding_attention", "num_attention_heads": 6, "num_attention_groups": 2, "head_dim": 16,
    },
    "use_head_wise_attn_gate": True, "use_moe_router_bias": True, "need_fp32_gate": True, "zero_centered": True,
}  # fmt: skip
_STEP5_LAYERS = {
    **_dense(0), "model.layers.1.moe.gate.weight": (4, 64), "model.layers.1.moe.router_bias": (4,),
    "model.layers.1.moe.gate_proj.weight": (4, 32, 64), "model.layers.1.moe.up_proj.weight": (4, 32, 64),
    "model.layers.1.moe.down_proj.weight": (4, 64, 32), **_dense(1, "moe.share_expert", 48),
    "model.layers.0.self_attn.sparse_indexer_q.weight": (32, 64),
    "model.layers.0.self_attn.sparse_indexer_k_norm.weight": (8,),
    "model.layers.0.self_attn.sparse_indexer_k_norm.bias": (8,), "model.layers.0.self_attn.ssmax_s": (4,),
    **{
        f"model.layers.{n}.self_attn.{name}.weight": shape for n, heads in ((0, 4), (1, 6)) for name, shape in {
            "q_proj": (16 * heads, 64), "k_proj": (32, 64), "v_proj": (32, 64), "o_proj": (64, 16 * heads),
            "q_norm": (16,), "k_norm": (16,), "g_proj": (heads, 64),
        }.items()
    },
}  # fmt: skip
_WRAPPERS: tuple[ArchCase, ...] = (
    sees("inkling2_text/whole", "Inkling2", {**_INKLING, "unpadded_vocab_size": 500}, _SEES),
    sees("inkling2_loop_text/whole", "Inkling2Loop", {**_INKLING, "unpadded_vocab_size": 500}, _SEES),
    sees("muse_spark_text", "MuseSpark", {
        "model_type": "muse_spark_text", "head_dim": 16, "layer_types": ["sliding_attention", "full_attention"],
        "mlp_layer_types": ["dense", "sparse"], "layer_rope_theta": [10000.0, 0.0], "sliding_window": 8,
        "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "moe_hidden_size": 24,
    }, {**_EYES, "pos_emb_height": 4, "pos_emb_width": 4}, out_hidden_size=64, projector_hidden_size=48,
        audio_config={
            "patch_sizes": [2, 2], "hidden_sizes": [16, 32], "depths": [1, 1], "num_hidden_layers": 2,
            "out_hidden_size": 64,
        }),
    sees("mistral_large4_text", "MistralLarge4", {
        "model_type": "mistral_large4_text", "head_dim": 8, "num_key_value_heads": 4,
        "layer_types": ["indexed_attention", "indexed_attention"], "mlp_layer_types": ["dense", "sparse"],
        "indexer_types": ["full", "shared"], "no_rope_layers": [1, 0], "kv_source_layers": [0, 1],
        "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "kv_lora_rank": 16,
        "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12, "index_head_dim": 8, "index_n_heads": 2,
    }, {"model_type": "pixtral", **_EYES, "image_size": 16, "head_dim": 16}, image_token_index=5),
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
    *remote("alice_ai", "AliceAIForCausalLM", _ALICE, llama_cpp_cannot=CANNOT, optional=_ALICE_LAYERS),
    *remote("k2_horizon", "K2HorizonForCausalLM", _HORIZON, llama_cpp_cannot=CANNOT, optional=_HORIZON_LAYERS),
    *remote("longcat_flash_ngram", "LongcatFlashNgramForCausalLM", _NGRAMS, llama_cpp_cannot=CANNOT,
        optional=_NGRAM_TABLES),
    *remote("pangu_ultra_moe", "PanguUltraMoEForCausalLM", _PANGU | _LATENT, llama_cpp_cannot=CANNOT,
        optional=_PANGU_LAYERS),
    *remote("pangu_pro_moe_v2", "PanguProMoEV2ForCausalLM", _PANGU | _SINKS, llama_cpp_cannot=CANNOT,
        optional=_PANGU_LAYERS),
    *remote("step5", "Step5ForCausalLM", _STEP5, llama_cpp_cannot=CANNOT, optional=_STEP5_LAYERS),
    ArchCase("llama/telechat3", "llama", "", "TeleChat3ForCausalLM", {**_LLAMA, "model_type": "telechat3"}),
)  # fmt: skip
