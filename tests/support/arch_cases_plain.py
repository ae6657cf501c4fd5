"""Cases of networks that llama.cpp does not run: a folder becomes an `.apr` and comes back, a GGUF is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any

from arch_models import ArchCase

from aprfmt.arch.families.plain import LINES

SMALL: dict[str, int] = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 6),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk"), 2),
    **dict.fromkeys(
        ("n_group", "topk_group", "n_shared_experts", "moe_num_shared_experts", "first_k_dense_replace"), 1
    ),
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 44,
    "kv_lora_rank": 20,
    "q_lora_rank": 28,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "rotary_dim": 8,
    "embedding_size": 36,
    "decoder_layers": 2,
    "decoder_ffn_dim": 112,
    "decoder_attention_heads": 4,
    "encoder_layers": 1,
    "encoder_ffn_dim": 104,
    "encoder_attention_heads": 4,
    "sliding_window": 8,
    "max_target_positions": 512,
    "max_source_positions": 32,
    "position_bias_num_buckets": 24,
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 11,
    "type_vocab_size": 2,
    "task_type_vocab_size": 3,
    "input_embedding_size": 36,
    "output_embedding_size": 52,
    "conv1d_width": 3,
    "intermediate_multiple_size": 3,
    "loop_gate_rank": 11,
    "loop_layer_index_start": 1,
    "loop_layer_index_end": 2,
    "ngram": 3,
    "cross_attention_hidden_size": 52,
    "zero_expert_num": 4,
    "moe_hidden_size": 30,
    "expert_ffn_hidden_size": 40,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 1,
    "swa_head_dim": 20,
    "sliding_window_size": 8,
    "d_rel": 7,
    "rel_extent": 24,
    "index_head_dim": 18,
    "index_n_heads": 2,
    "gated_norm_rank": 10,
    "adapter_rank": 10,
    "mamba_d_state": 14,
    "n_mamba_heads": 8,
    "router_hidden_size": 18,
    "pad_token_id": 0,
    "intra_bottleneck_size": 48,
    "num_global_tokens": 10,
    "max_encoder_position_embeddings": 64,
    "max_decoder_position_embeddings": 60,
    "pronunciation_vocab_size": 30,
    "pronunciation_embed_dim": 22,
    "shape_vocab_size": 34,
    "shape_embed_dim": 26,
    "src_vocab_size": 490,
    "tgt_vocab_size": 510,
}
"""Sizes of tiny models, for config classes that know the key."""
_INKLING: dict[str, Any] = {"layer_types": ["hybrid_sliding", "hybrid"], "mlp_layer_types": ["dense", "sparse"]}
_INKLING_BLOCKS: dict[str, Any] = {
    "unpadded_vocab_size": 500,
    "num_hidden_layers": 4,
    **{key: 2 * kinds for key, kinds in _INKLING.items()},
}
SIZES: dict[str, dict[str, Any]] = {
    "AXK1ForCausalLM": {"head_dim": 8, "num_key_value_heads": 4},
    "AXK2ForCausalLM": {"head_dim": 8, "num_key_value_heads": 4},
    "BeamForCausalLM": {"layer_types": ["sliding_attention", "full_attention"], "mlp_layer_types": ["dense", "sparse"]},
    "DoryForCausalLM": {
        "num_hidden_layers": 3,
        "n_input_layers": 1,
        "n_recurrent_layers": 1,
        "n_output_layers": 1,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "FlintForCausalLM": {"mlp_only_layers": [0], "layer_types": ["full_attention", "sliding_attention"]},
    "InklingForCausalLM": _INKLING,
    "Inkling2ForCausalLM": {**_INKLING_BLOCKS, "n_layers_per_attn_res_block": 2},
    "Inkling2LoopForCausalLM": {**_INKLING_BLOCKS, "n_layers_per_attn_res_block": 1},
    "Lfm3ForCausalLM": {"layer_types": ["conv", "full_attention"], "mlp_layer_types": ["dense", "sparse"]},
    "LongcatFlashForCausalLM": {"head_dim": 8, "num_key_value_heads": 4},
    "NllbMoeForConditionalGeneration": {
        "encoder_layers": 2,
        "decoder_layers": 3,
        "encoder_sparse_step": 2,
        "decoder_sparse_step": 2,
    },
    "RecurrentGemmaForCausalLM": {"block_types": ["recurrent", "attention"]},
    "Zamba2ForCausalLM": {"mamba_ngroups": 4, "layers_block_type": ["mamba", "hybrid"], "attention_head_dim": 20},
    "ZayaForCausalLM": {"num_experts_per_tok": 1},
    "GPTNeoForCausalLM": {"attention_types": [[["global", "local"], 1]]},
    "MllamaForCausalLM": {"cross_attention_layers": [1]},
    "DebertaForMaskedLM": {"max_relative_positions": 30},
    "DebertaV2ForMaskedLM": {"position_buckets": 30},
    "DogeForCausalLM": {"num_experts": 16},
    "JetMoeForCausalLM": {"kv_channels": 16},
    "RwkvForCausalLM": {"attention_hidden_size": 104},
    "MuseSparkTextModel": {
        "layer_types": ["sliding_attention", "full_attention"],
        "mlp_layer_types": ["dense", "sparse"],
        "layer_rope_theta": [10000.0, 0.0],
    },
}
"""Class -> config.json keys of its tiny model, where the usual sizes do not suffice."""

_CONFIGS = {
    "BertGenerationDecoder": "BertGenerationConfig",
    "CohereCompassForCausalLM": "CohereCompassTextConfig",
    "InklingForCausalLM": "InklingTextConfig",
    "Inkling2ForCausalLM": "Inkling2TextConfig",
    "Inkling2LoopForCausalLM": "Inkling2LoopTextConfig",
    "MllamaForCausalLM": "MllamaTextConfig",
    "XLMWithLMHeadModel": "XLMConfig",
    "FlaubertWithLMHeadModel": "FlaubertConfig",
    "MarianMTModel": "MarianConfig",
}
"""Class -> its config class, where the names differ."""
_OF_CASES: dict[str, dict[str, Any]] = {
    "FSMTForConditionalGeneration": {"src_vocab_size": 50000, "tgt_vocab_size": 50000},
    "LEDForConditionalGeneration": {"attention_window": 8},
    "RecurrentGemmaForCausalLM": {"num_key_value_heads": 1},  # as mlx_lm has it
    "XLNetLMHeadModel": {"d_head": 16},
    "XmodForMaskedLM": {"default_language": "en_XX"},
}
"""Class -> config.json keys that its case needs to compute a text."""
_KINDS = {"ForMaskedLM": "encoder", "ForConditionalGeneration": "seq2seq", "MTModel": "seq2seq"}
CANNOT = "it has no such network"


def _case(name: str, row: str, known: Collection[str]) -> ArchCase:
    config = _CONFIGS.get(name) or re.sub(r"(For[A-Z]\w+|LMHeadModel)$", "Config", name)
    sizes = {key: value for key, value in SMALL.items() if key in known or key == "pad_token_id"}
    kind = next((kind for end, kind in _KINDS.items() if name.endswith(end)), "causal")
    sizes |= SIZES.get(name, {}) | _OF_CASES.get(name, {})
    return ArchCase(row, row, config, name, sizes, llama_cpp_cannot=CANNOT, kind=kind)


_INSIDE = ("MuseSparkForCausalLM",)
"""Networks that only wrappers have: their cases are in arch_cases_served.py."""

CASES: tuple[ArchCase, ...] = tuple(
    _case(line["classes"][0], line["id"], {*line["config"], *line["sizes"].values()})
    for line in map(json.loads, LINES.read_text("utf-8").splitlines())
    if line["classes"][0] not in _INSIDE
)
