"""Cases of models that draft tokens for another one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from arch_cases_remote import remote
from arch_models import DIMS, VOCAB, ArchCase

Config = dict[str, Any]

_N_VOCAB, _N_DRAFT = 49152, 64
_LLAMA: Config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 12}
# As yuhuili/EAGLE3-LLaMA3.1-Instruct-8B has them.
_EAGLE3: Config = {
    **DIMS,
    "model_type": "llama",
    "num_hidden_layers": 1,
    "hidden_act": "silu",
    "vocab_size": VOCAB,
    "draft_vocab_size": _N_DRAFT,
    "tie_word_embeddings": False,
    "rope_theta": 500000.0,
}
_TOKENS = {"d2t": (_N_DRAFT,)}
_EMBEDDING = {"embed_tokens.weight": (_N_VOCAB, 64)}


def _draft(row: str, model_class: str, config: Config, target: Config, **fields: Any) -> ArchCase:
    (case,) = remote(row, model_class, config, kind="draft", target=target, **fields)
    return case


def _variant(
    case: ArchCase,
    name: str,
    model_class: str = "",
    *,
    optional: Mapping[str, tuple[int, ...]] | None = None,
    **config: Any,
) -> ArchCase:
    return replace(
        case,
        id=f"{case.row}/{name}",
        model_class=model_class or case.model_class,
        config=case.config | config,
        optional=case.optional if optional is None else optional,
    )


_eagle3 = _draft("eagle3", "LlamaForCausalLMEagle3", _EAGLE3, _LLAMA, optional=_TOKENS)
# as RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3 has them
_OF_LAYERS = {key: value for key, value in _EAGLE3.items() if key not in ("draft_vocab_size", "tie_word_embeddings")}
_speculator = replace(
    _eagle3,
    id="eagle3/speculator",
    model_class="Eagle3Speculator",
    config={
        "draft_vocab_size": _N_DRAFT,
        "norm_before_residual": True,
        "speculators_model_type": "eagle3",
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "transformer_layer_config": _OF_LAYERS,
    },
    begins={"midlayer.": "layers.0."},
)

_QWEN3: Config = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "num_hidden_layers": 12,
    "tie_word_embeddings": False,
}
_MROPE: Config = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [3, 3, 2]}}
# as z-lab/Qwen3-8B-DFlash-b16 has them
_DFLASH: Config = {
    **DIMS,
    "model_type": "qwen3",
    "attention_bias": False,
    "block_size": 16,
    "dflash_config": {"mask_token_id": 7, "target_layer_ids": [1, 5, 9]},
    "hidden_act": "silu",
    "layer_types": ["full_attention", "full_attention"],
    "num_target_layers": 12,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": VOCAB,
}
_dflash = _draft("dflash", "DFlashDraftModel", _DFLASH, _QWEN3)
_CONVOLUTIONS: Config = {
    **_DFLASH["dflash_config"],
    "block_size": 8,
    "conv_group_size": 16,
    "conv_kernel_size": 3,
    "selector_rank": 8,
    "selector_top_k": 4,
}
# as Qwen3DSparkModel checkpoints of satgeze/Qwen3.6-27B-DSpark have them
_DSPARK: Config = {
    **{key: value for key, value in _DFLASH.items() if key != "dflash_config"},
    "mask_token_id": 7,
    "target_layer_ids": [1, 5, 9],
    "markov_head_type": "vanilla",
    "markov_rank": 8,
}
_CONFIDENCE = {"confidence_head.proj.weight": (1, 72), "confidence_head.proj.bias": (1,)}
_dspark = _draft("dspark", "DSparkDraftModel", _DSPARK, _QWEN3, optional=_CONFIDENCE | _EMBEDDING)
_OF_DSPARK = {key: value for key, value in _DFLASH.items() if key not in ("dflash_config", "block_size")}

# as google/gemma-4-E2B-it-assistant has them
_GEMMA4: Config = {
    **DIMS,
    "model_type": "gemma4_text",
    "num_hidden_layers": 3,
    "num_kv_shared_layers": 3,
    "moe_intermediate_size": None,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "head_dim": 16,
    "global_head_dim": 32,
    "attention_k_eq_v": False,
    "enable_moe_block": False,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
    "sliding_window": 8,
    "tie_word_embeddings": True,
    "use_double_wide_mlp": False,
    "vocab_size": VOCAB,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    },
}
_ASSISTANT: Config = {
    "model_type": "gemma4_assistant",
    "backbone_hidden_size": 48,
    "tie_word_embeddings": True,
    "use_ordered_embeddings": False,
    "text_config": _GEMMA4,
}
_gemma4 = _draft("gemma4_assistant", "Gemma4AssistantForCausalLM", _ASSISTANT, {})

# Gemma4DSparkModel has no published checkpoint: as llama.cpp's converter reads it
_GEMMA4_DSPARK: Config = {
    **{key: value for key, value in DIMS.items() if key != "num_key_value_heads"},
    "model_type": "gemma4_dspark",
    "attention_k_eq_v": True,
    "block_size": 8,
    "global_head_dim": 32,
    "hidden_activation": "gelu_pytorch_tanh",
    "layer_types": ["full_attention", "full_attention"],
    "markov_rank": 8,
    "mask_token_id": 7,
    "num_global_key_value_heads": 2,
    "num_key_value_heads": 2,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}
    },
    "target_layer_ids": [1, 5],
    "tie_word_embeddings": True,
    "vocab_size": VOCAB,
}
_gemma4_dspark = _draft("gemma4_dspark", "Gemma4DSparkModel", _GEMMA4_DSPARK, _QWEN3, optional=_EMBEDDING | _CONFIDENCE)

CASES: tuple[ArchCase, ...] = (
    _eagle3,
    # as nvidia/gpt-oss-120b-Eagle3-v3 has them
    _variant(
        _eagle3,
        "norms",
        "Eagle3LlamaForCausalLM",
        norm_before_fc=True,
        target_hidden_size=48,
        eagle_aux_hidden_state_layer_ids=[1, 5, 8],
    ),
    _variant(_eagle3, "plain", "Eagle3DraftModel", draft_vocab_size=_N_VOCAB, optional=_EMBEDDING),
    _speculator,
    _dflash,
    # as z-lab/gpt-oss-20b-DFlash has them
    _variant(
        _dflash,
        "window",
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=8,
        use_sliding_window=True,
        is_causal=False,
        optional={"layers.0.self_attn.sinks": (4,), "layers.1.self_attn.sinks": (4,)},
    ),
    _variant(
        _dflash,
        "all_windows",
        dflash_config={**_DFLASH["dflash_config"], "use_swa": True, "swa_window_size": 16, "causal": True},
        layer_types=None,
        optional={**_EMBEDDING, "lm_head.weight": (_N_VOCAB, 64)},
    ),
    _variant(_dflash, "convolutions", "DFlash2DraftModel", dflash_config=_CONVOLUTIONS),
    replace(
        _variant(
            _dflash,
            "scales",
            rope_parameters={"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
            output_multiplier=0.5,
            final_logit_softcapping=30.0,
            input_embedding_scale=2.0,
            dflash_config={**_DFLASH["dflash_config"], "attention_value_scale": 0.7},
        ),
        target=_QWEN3 | _MROPE,
    ),
    ArchCase(
        "dflash/muse_glimmer",
        "dflash",
        "MuseGlimmerAssistantConfig",
        "MuseGlimmerAssistantModel",
        {
            "target_layer_ids": [1, 5, 9],
            "layer_types": ["sliding_attention", "full_attention"],
            "mask_token_id": 7,
            "vocab_size": _N_VOCAB,
            "pad_token_id": 2,
        },
        kind="draft",
        target=_QWEN3,
    ),
    _dspark,
    _variant(_dspark, "plain", "Qwen3DSparkModel", optional={}),
    _variant(_dspark, "head", optional={**_EMBEDDING, "lm_head.weight": (_N_VOCAB, 64)}),
    _variant(_dspark, "lfm2", "Lfm2DSparkDraftModel", dflash_config={"mask_token_id": 9, "target_layer_ids": [2, 4]}),
    _variant(_dspark, "ling", "LingDSparkModel", rope_is_neox_style=True),
    _variant(
        _dspark, "own_vocabulary", draft_vocab_size=_N_DRAFT, optional={**_TOKENS, "lm_head.weight": (_N_DRAFT, 64)}
    ),
    replace(
        _dspark,
        id="dspark/speculator",
        model_class="DSparkSpeculator",
        config={
            "aux_hidden_state_layer_ids": [2, 6, 10],
            "block_size": 8,
            "mask_token_id": 7,
            "markov_head_type": "vanilla",
            "markov_rank": 8,
            "tie_word_embeddings": False,
            "transformer_layer_config": _OF_DSPARK,
        },
    ),
    _gemma4,
    _variant(
        _gemma4,
        "unified",
        "Gemma4UnifiedAssistantForCausalLM",
        model_type="gemma4_unified_assistant",
        text_config=_GEMMA4 | {"model_type": "gemma4_unified_text"},
    ),
    _gemma4_dspark,
    _variant(
        _gemma4_dspark, "plain_rope", rope_parameters={"rope_type": "default", "rope_theta": 2e4}, optional=_EMBEDDING
    ),
)
