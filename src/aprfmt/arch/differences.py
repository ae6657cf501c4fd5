"""What llama.cpp computes otherwise than transformers: the facts of a row, held against one network."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from aprfmt.arch.converter import look_up
from aprfmt.arch.fields import as_float, as_int, as_mapping
from aprfmt.arch.grammar import holds, layer_kinds, sizes_of
from aprfmt.arch.heads import has_no_output
from aprfmt.arch.hparams import active_window
from aprfmt.arch.hyperparams import Hyperparams
from aprfmt.arch.row import Architecture, Difference

GENERAL: tuple[Difference, ...] = (
    Difference(
        "llama.cpp does not stretch the rotary frequencies of a longer text (rope_type dynamic)",
        "rope_scaling.rope_type=dynamic&!rope_scaling.alpha",
    ),
    Difference(
        "llama.cpp scales the attention of this network by yarn's factor, which a linear scaling of positions has not",
        "|".join(f"rope_scaling.rope_type=linear&gguf={gguf}" for gguf in ("deepseek2", "deepseek32", "glm-dsa")),
    ),
    Difference("llama.cpp rounds the ends of yarn's ramp, which this config asks not to do (truncate)", "ragged_yarn"),
    Difference(
        "llama.cpp's yarn has a beta_fast of 32 and a beta_slow of 1, whatever the config says",
        "yarn_betas&!gguf=mistral3",
    ),
)
"""What concerns every family."""


def differences(row: Architecture, h: Hyperparams) -> Iterator[str]:
    """One sentence for each thing that llama.cpp computes otherwise in the network `h` of the family `row`."""

    def value(word: str) -> object:
        if word == "gguf":
            return row.gguf
        return RULES[word](h) if word in RULES else look_up(h.extra, (word,))[0]

    for difference in (*GENERAL, *row.differs):
        if not difference.when or holds(difference.when, value):
            yield difference.what.format(window=f"{active_window(h):,}" if RULES["window"](h) else "")


def _has_window(h: Hyperparams) -> bool:
    """Whether a layer sees less than the longest text."""
    window, kinds = active_window(h), layer_kinds(h.extra)
    if window is None or (h.max_position_embeddings is not None and window >= h.max_position_embeddings):
        return False
    return kinds is None or "sliding_attention" in kinds


def _has_two_thetas(h: Hyperparams) -> bool:
    sliding = as_mapping(as_mapping(h.extra.get("rope_layers")).get("sliding_attention"))
    return sliding.get("rope_theta", h.rope_theta) != h.rope_theta


def _betas(h: Hyperparams) -> tuple[float, float]:
    scaling = as_mapping(h.extra.get("rope_scaling"))
    fast, slow = (as_float(scaling.get(name), name) for name in ("beta_fast", "beta_slow"))
    return fast or 32.0, slow or 1.0


def _has_own_betas(h: Hyperparams) -> bool:
    return as_mapping(h.extra.get("rope_scaling")).get("rope_type") == "yarn" and _betas(h) != (32.0, 1.0)


def _has_ragged_yarn(h: Hyperparams) -> bool:
    """Whether the ends of yarn's ramp, which the runtime rounds, are to stay as they are and are not whole."""
    scaling = as_mapping(h.extra.get("rope_scaling"))
    n_dims, base = h.head_dim, h.rope_theta
    original = scaling.get("original_max_position_embeddings")
    if scaling.get("rope_type") != "yarn" or scaling.get("truncate") is not False:
        return False
    if not n_dims or not base or base <= 1 or not isinstance(original, int | float) or original <= 0:
        return True
    ends = [n_dims * math.log(original / (beta * 2 * math.pi)) / (2 * math.log(base)) for beta in _betas(h)]
    low, high = max(ends[0], 0.0), min(ends[1], n_dims - 1.0)
    rounded = max(math.floor(ends[0]), 0), min(math.ceil(ends[1]), n_dims - 1)
    return abs(low - rounded[0]) + abs(high - rounded[1]) > _SMALL


def _has_lone_attention(h: Hyperparams) -> bool:
    """Whether a layer has attention but no MLP."""
    sizes = (sizes_of(h, layer) for layer in range(h.num_layers or 0))
    return any(size.get("heads") and not size.get("ffn") for size in sizes)


def _has_other_head_norm(h: Hyperparams) -> bool:
    """Whether the norm of each head adds another epsilon to it than that of 64 values does."""
    return not math.isclose((h.head_dim or 0) * (h.rms_norm_eps or 0), 64e-5, rel_tol=1e-6)


def _chooses_positions(h: Hyperparams) -> bool:
    """Whether a text may be longer than what its layers choose of it."""
    budget = as_int(h.extra.get("indexer_budget"), "indexer_budget")
    return budget is not None and (h.max_position_embeddings is None or budget < h.max_position_embeddings)


_SMALL = 1e-3
"""Of a ramp's end, in dimensions: shows in no logit."""

RULES: dict[str, Callable[[Hyperparams], object]] = {
    "window": _has_window,
    "chosen": _chooses_positions,
    "two_thetas": _has_two_thetas,
    "yarn_betas": _has_own_betas,
    "ragged_yarn": _has_ragged_yarn,
    "lone_attention": _has_lone_attention,
    "other_head_norm": _has_other_head_norm,
    "layers": lambda h: h.num_layers,
    "tied": lambda h: h.tied,
    "bare": lambda h: (h.hf_architecture or "").endswith("Model") or has_no_output(h.hf_architecture),
    "model_type": lambda h: h.hf_model_type,
}
"""Word of a `when` -> what it stands for; any other word is a config.json key."""
