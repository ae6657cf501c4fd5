"""What the cases of all families are written with: a base case, its variants, and variants that many share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from arch_models import ArchCase

Config = dict[str, Any]

TIED: Config = {"tie_word_embeddings": True}
UNTIED: Config = {"tie_word_embeddings": False}
MHA: Config = {"num_key_value_heads": 4}


def rope(theta: float = 10000.0, part: float | None = None, **scaling: Any) -> Config:
    """The rope parameters of a config."""
    partial = {} if part is None else {"partial_rotary_factor": part}
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta, **partial, **scaling}}


WIDE_HEADS = {"head_dim": 24}
ATTENTION_BIAS = {"attention_bias": True}
LINEAR = rope(20000.0, rope_type="linear", factor=3.0)
YARN = rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=128)
YARN_FACTOR = rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=128, attention_factor=1.3)
LLAMA3 = rope(
    500000.0,
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=128,
)
NO_FACTORS = "its loader has no rope_freqs.weight for llama3 scaling"
NO_O_BIAS = "its loader has no attention output bias"
NO_MLP_BIAS = "its loader has no MLP biases"
NO_WINDOW = "its graph ignores the sliding window"
PLAIN_HEADS = "its loader supports head_dim = hidden_size / num_attention_heads only"


def family(
    row: str,
    stem: str,
    base: Config,
    variants: Mapping[str, Config | tuple[Config, str]],
    *,
    end: str = "ForCausalLM",
    config_class: str = "",
    kind: str = "causal",
    cannot: str = "",
) -> tuple[ArchCase, ...]:
    """The base case of a row and its variants: what differs from `base`, and why llama.cpp cannot compute it, if so.

    `stem` is how transformers begins the names of the classes; `cannot` is a reason for all of them.
    """
    classes = config_class or f"{stem}Config", stem + end
    cases = [ArchCase(row, row, *classes, base, llama_cpp_cannot=cannot, kind=kind)]
    for name, variant in variants.items():
        config, why = variant if isinstance(variant, tuple) else (variant, cannot)
        cases.append(ArchCase(f"{row}/{name}", row, *classes, {**base, **config}, llama_cpp_cannot=why, kind=kind))
    return tuple(cases)


def renamed(names: tuple[tuple[str, str], ...], *cases: ArchCase) -> tuple[ArchCase, ...]:
    """Cases whose published checkpoints call tensors otherwise than transformers does when it saves them."""
    return tuple(replace(case, renames=names) for case in cases)
