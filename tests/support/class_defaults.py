"""What transformers' classes take absent keys of config.json for."""

from __future__ import annotations

import re
from dataclasses import fields
from functools import cache
from importlib import import_module
from inspect import signature
from typing import Any

from arch_models import all_cases, quiet_transformers

from aprfmt.arch import rope
from aprfmt.arch.row import ROTARY_COUNT, ROTARY_PART, WHOLE_HEADS, Architecture

NO_CLASS = {
    "smollm",
    "smollm2",
    "RefinedWeb",
    "RefinedWebModel",
    "exaone4_5_text",
    "hunyuan",
    "mimo_v2",
    "minimax_m3",
    "kimi_k2",
    "qwen3_asr_text",
    "youtu_llm",
    "telechat3",
}
"""Model types of real config.json files that transformers registers no class for."""

PATTERNS = {"sliding_window_pattern", "full_attention_interval"}
"""Keys that classes read without having them; what follows is `layer_types`, or the like."""

REMOTE = {case.row for case in all_cases()} - {case.row for case in all_cases() if case.computable}
"""Rows of networks that transformers does not have."""

OF_THE_MODEL = {
    ("bloom", "seq_length"),  # a key of real files; positions are not limited
    ("t5", "n_positions"),  # the same: positions are relative
    ("umt5", "n_positions"),
    ("glm4_moe_lite", "scoring_func"),  # the same
    ("deepseek_v32", "scoring_func"),  # the same
    ("glm_moe_dsa", "scoring_func"),  # the same
    ("mimo_v2_flash", "scoring_func"),  # the same
    ("hy_v4", "scoring_func"),  # the same
    ("minimax_m3", "scoring_func"),  # the same
    *(("step3p5", name) for name in ("norm_expert_weight", "moe_every_n_layer", "moe_router_activation")),
    ("glm5_next", "scoring_func"),  # a key of real files
    ("step3p5", "partial_rotary_factor"),  # of its layers without a window
    ("deepseek_v3", "scoring_func"),  # a key of real files, whose only value the class computes
    ("qwen3_vl_moe", "norm_topk_prob"),  # a key of real files, whose only value the class computes
    ("glm4_moe", "use_qk_norm"),  # of one class; the others have no such norm
    ("glm4v", "attention_bias"),  # always there in one class and never in the other, and a key of Glm4's
    ("afmoe", "route_norm"),  # the same
    ("afmoe", "score_func"),  # the same
    ("cohere2_moe", "first_k_dense_replace"),  # a key that the class reads without having it
    ("dflash", "use_sliding_window"),  # always, in MuseGlimmerAssistant
    ("dflash", "tie_word_embeddings"),  # no head at all
    ("dflash", "rotates"),  # the part that a config.json of DFlashDraftModel names, all in MuseGlimmerAssistant
}
"""Defaults that no class has."""

COMPUTED = {"time_step_rank", "moe_layer_end_index"}
"""Class attributes that hold what follows from the default."""


@cache
def class_config(model_type: str) -> Any:
    from transformers import AutoConfig

    quiet_transformers()
    whole = AutoConfig.for_model(model_type)
    text = whole.get_text_config()
    text.allow_global_per_layer_attribute_access = True
    if not hasattr(text, "tie_word_embeddings"):  # of the whole, whose own is False in all of them
        text.tie_word_embeddings = getattr(whole, "tie_word_embeddings", False)
    return text


def attribute(config: Any, name: str) -> Any:
    """The value that a transformers config has for a config.json key."""
    ropes = getattr(config, "rope_parameters", None) or {}
    if name in rope.LOCAL_THETAS:
        return ropes["sliding_attention"]["rope_theta"]
    main = ropes.get("full_attention") or ropes
    if name in rope.THETAS and main:
        return main["rope_theta"]
    if name in rope.PARTIAL and "partial_rotary_factor" in main:
        return main["partial_rotary_factor"]
    here = config
    for part in name.split("."):
        here = here[part] if isinstance(here, dict) else getattr(here, part)
    return [*here] if isinstance(here, tuple) else here


def rotation_of(row: Architecture) -> str:
    """What the class of an architecture's first model type rotates of a head: see Architecture.rotates."""
    types = [name for name in row.model_types if name not in NO_CLASS]
    if not types:  # a row that only its class names
        cases = [case for case in all_cases() if case.row == row.id and case.computable]
        types = [getattr(quiet_transformers(), case.config_class).model_type for case in cases]
    if row.id in REMOTE or not types or not is_of_the_class(row, "rotates"):
        return ""
    config_class = type(class_config(types[0]))
    whole, half = (_rotated(config_class, part=part) for part in (1.0, 0.5))
    if not whole:
        return ""
    if half == whole:
        return WHOLE_HEADS
    return ROTARY_COUNT if _rotated(config_class) != _rotated(config_class, rotary_dim=8) else ROTARY_PART


def _rotated(config_class: Any, part: float | None = None, **given: int) -> list[int]:
    """How many frequencies each rotation of text in the module of a config class has."""
    ropes = {"rope_type": "default", "rope_theta": 10000.0} | ({} if part is None else {"partial_rotary_factor": part})
    kinds = {f.name: str(f.type) for f in fields(config_class)}
    if "rope_parameters" not in kinds:
        return []
    by_type = {"full_attention": ropes, "sliding_attention": ropes}
    config = config_class(rope_parameters=by_type if "Literal" in kinds["rope_parameters"] else ropes, **given)
    modeling = import_module(config_class.__module__.replace("configuration_", "modeling_"))
    config.allow_global_per_layer_attribute_access = True
    found = []
    for name, member in sorted(vars(modeling).items()):
        compute = getattr(member, "compute_default_rope_parameters", None)
        if compute is None or re.search(r"Vision|Audio", name):
            continue
        nested = {"layer_type": "full_attention"} if "layer_type" in signature(compute).parameters else {}
        if nested:
            config.rope_parameters = {"full_attention": ropes}
        found.append(len(compute(config, **nested)[0]))
    return found


def is_of_the_class(row: Architecture, name: str) -> bool:
    """Whether the class of an architecture holds the default of a config.json key under that name."""
    return name not in PATTERNS and name not in COMPUTED and (row.id, name) not in OF_THE_MODEL


_OF_EVERY_CLASS = {
    "_name_or_path", "allow_global_per_layer_attribute_access", "architectures", "chunk_size_feed_forward", "dtype",
    "id2label", "is_encoder_decoder", "label2id", "model_type", "output_attentions", "output_hidden_states",
    "problem_type", "return_dict", "transformers_version",
}  # fmt: skip
_OF_TRAINING = {
    "altup_coef_clip", "attention_dropout", "attention_probs_dropout_prob", "attn_pdrop", "classifier_dropout",
    "dropout", "dropout_rate", "embd_pdrop", "embedding_dropout", "embedding_initializer_range", "emb_pdrop",
    "eos_loss_weight", "flow_loss_num_samples", "hidden_dropout", "hidden_dropout_prob", "initializer_cutoff_factor",
    "initializer_factor", "initializer_range", "input_jitter_noise", "L_bp_cycles", "latent_stats_ema_decay",
    "latent_stats_ema_steps", "learnable_sink_init", "lsd_diagonal_weight", "lsd_distill_probability",
    "lsd_time_logit_mean", "lsd_time_logit_std", "mlp_dropout", "output_router_logits", "qa_dropout",
    "residual_dropout", "resid_pdrop", "router_aux_loss_coef", "router_jitter_noise", "seq_classif_dropout",
    "sinusoidal_pos_embds", "sparse_prediction", "sparse_pred_ignore_index", "time_step_floor",
    "time_step_init_scheme", "time_step_max", "time_step_min", "time_step_scale", "z_loss_coefficient",
}  # fmt: skip
_OF_THE_COMPUTATION = {
    "attention_softmax_in_fp32", "chunk_size", "deterministic_flash_attn", "init_device", "mamba_chunk_size",
    "mamba_ssm_cache_dtype", "model_parallel_size", "moe_shared_expert_overlap", "num_logits_to_keep",
    "number_of_conv_states", "pretraining_tp", "reorder_and_upcast_attn", "residual_in_fp32",
    "scale_attention_softmax_in_fp32", "slow_but_exact", "use_associative_scan", "use_cache", "use_mamba_kernels",
    "use_mambapy",
}  # fmt: skip
"""Precision, kernels and the cache: the same network."""
_OF_HEADS = {
    "classifier_activation", "classifier_bias", "classifier_pooling", "decoder_bias", "summary_activation",
    "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj",
}  # fmt: skip
_OF_TOKENS = {
    "audio_bos_token_id", "audio_latent_token_id", "audio_prompt_bos_token_id", "audio_prompt_token_id", "cls_token_id",
    "eod_token_id", "image_token_id", "mask_token_id", "pad_token_id", "sep_token_id", "vocab_size",
}  # fmt: skip
_FOLLOWS = {
    "qk_head_dim", "rescale_prenorm_residual", "sliding_window_pattern", "_sliding_window_pattern", "time_step_limit",
    "mamba_expand", "mamba_d_head", "max_window_layers", "use_sliding_window", "latent_dim", "frame_rate",
    "dense_act_fn", "is_gated_act", "expand", "mtp_layer_types", "mtp_mlp_layer_types",
}  # fmt: skip
"""What other keys say, or arch.differences reads."""
_VL = ("_vl", "_vl_text", "_5_vl", "_5_vl_text", "_5_omni_text")
_UNREAD = {
    *((name, "head_dim") for name in ("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm_moe_dsa", "hy_v4")),
    *((name, "head_dim") for name in ("minicpm3", "mistral4", "youtu")),
    *((name, "layer_types") for name in ("deepseek_v32", "glm_moe_dsa", "hy_v4")),
    *((f"qwen2{part}", name) for part in _VL for name in ("layer_types", "sliding_window")),
    *((name, "sliding_window") for name in ("qwen3_vl_moe_text", "qwen3_omni_moe_text")),
    ("deepseek_v4", "layer_types"), *((name, "add_cross_attention") for name in ("gpt2", "gpt_bigcode")),
    *((name, "mlp_bias") for name in ("deepseek_v32", "glm_moe_dsa")),
    *((name, "is_decoder") for name in ("gpt_neox", "t5", "mt5", "umt5")),
    *((name, "learned_pos_emb") for name in ("mpt",)), ("mpt", "norm_type"), ("mpt", "embedding_fraction"),
    *(("nemotron_h", name) for name in ("attention_bias", "expand", "mamba_proj_bias", "mtp_layers_block_type")),
    ("nemotron_h", "sliding_window"), ("mamba2", "time_step_rank"), ("laguna", "moe_apply_router_weight_on_input"),
    ("step3p5", "per_layer_config"), ("step3p5", "query_pre_attn_scalar"), ("mellum", "num_nextn_predict_layers"),
    ("dbrx", "num_key_value_heads"),
}  # fmt: skip
"""(model type, field): the class has the field, and its network does not read it, or only where another key refuses."""


def carries_no_logits(model_type: str, name: str) -> bool:
    """Whether a field of the class of a model type changes no logits, or is told by others."""
    known = (_OF_EVERY_CLASS, _OF_TRAINING, _OF_THE_COMPUTATION, _OF_HEADS, _OF_TOKENS, _FOLLOWS)
    return any(name in names for names in known) or (model_type, name) in _UNREAD
