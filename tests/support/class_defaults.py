"""What transformers' classes take absent keys of config.json for."""

from __future__ import annotations

from functools import cache
from typing import Any

from arch_models import all_cases, quiet_transformers

from aprfmt.arch import rope
from aprfmt.arch.row import Architecture

NO_CLASS = {
    "smollm",
    "smollm2",
    "RefinedWeb",
    "RefinedWebModel",
    "exaone4_5_text",
    "mimo_v2",
    "minimax_m3",
    "kimi_k2",
    "qwen3_asr_text",
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
    return here


def is_of_the_class(row: Architecture, name: str) -> bool:
    """Whether the class of an architecture holds the default of a config.json key under that name."""
    return name not in PATTERNS and name not in COMPUTED and (row.id, name) not in OF_THE_MODEL
