"""Differences between llama.cpp and transformers: the facts of a row, evaluated for one network."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from aprfmt.arch.converter import look_up
from aprfmt.arch.fields import as_float, as_int, as_mapping
from aprfmt.arch.grammar import holds, layer_kinds, sizes_of
from aprfmt.arch.heads import has_no_output
from aprfmt.arch.hparams import STEP_LIMITS, active_window
from aprfmt.arch.hyperparams import Hyperparams
from aprfmt.arch.loaders import loader_of
from aprfmt.arch.rope import (
    MAX_HEAD_DIM,
    NEAR_RAMP,
    original_context,
    rotary_dim,
    scaling_of,
    stretch_of,
    yarn_betas,
    yarn_distance,
)
from aprfmt.arch.row import CONTEXT, FOURTH, POSITIONS, WINDOW, Architecture, Difference
from aprfmt.arch.scopes import defaults_of
from aprfmt.light_dataclass import light_dataclass

_RAMP = Difference(
    "llama.cpp's YaRN uses a different ramp: beta_fast 32, beta_slow 1, both bounds rounded; the config has {betas}: "
    "RoPE frequencies differ by up to {ramp:.2g} %",
    "other_ramp&!gguf=gpt-oss|far_ramp",
)
_EPSILONS = (
    "llama.cpp uses rms_norm_eps {epsilon:g} in all norms; transformers uses {inner:g} inside attention or mixers: "
    "their outputs differ by {gap_at_1:.1g} for inputs of RMS 1, {gap_at_tenth:.1g} for RMS 0.1"
)
_SECTIONS = (
    "llama.cpp does not apply the fourth section of mrope_section to text: logits differ for texts longer than "
    "about {fourth} tokens"
)

GENERAL: tuple[Difference, ...] = (
    Difference(
        "llama.cpp does not apply dynamic RoPE scaling: logits differ for texts longer than {positions} tokens",
        "rope_scaling.rope_type=dynamic&!rope_scaling.alpha",
        beyond=POSITIONS,
    ),
    _RAMP,
    replace(_RAMP, when="other_ramp&!far_ramp&gguf=gpt-oss", slight=True),  # all published models require it
    Difference(
        "llama.cpp applies LongRoPE's long factors to every text once its context (-c) exceeds {original} tokens; "
        "transformers applies them to longer texts only",
        "long_context",
        beyond=CONTEXT,
    ),
    Difference(_SECTIONS, "fourth_section&!far_fourth_section", beyond=FOURTH),
    Difference(_SECTIONS, "far_fourth_section"),
    Difference(
        "llama.cpp does not rotate the pairs of a head that mrope_section does not cover; transformers rotates them by "
        "the position of the token",
        "uncovered_pairs",
    ),
    Difference("llama.cpp does not clamp time steps (time_step_limit)", "limited_steps"),
    Difference(
        "llama.cpp computes every GELU by the tanh formula in half precision: logits differ by about 3e-4, and a "
        "folder made from the GGUF has the family's default activation",
        "other_gelu",
        slight=True,
    ),
    Difference(
        "llama.cpp uses the weights as stored; transformers divides each out_proj by the square root of the number of "
        "layers on every load (rescale_prenorm_residual)",
        "rescale_prenorm_residual&gguf=mamba|rescale_prenorm_residual&gguf=mamba2",
    ),
    Difference(_EPSILONS, "two_epsilons&!far_epsilons", slight=True),
    Difference(_EPSILONS, "far_epsilons"),
    Difference(
        "llama.cpp's loader does not read rms_norm_eps ({epsilon:g}) of this family, and uses 0: outputs of norms "
        "differ by {gap_at_1:.1g} for inputs of RMS 1, {gap_at_tenth:.1g} for RMS 0.1",
        "unread_epsilon",
    ),
)
"""Differences that concern every family."""


@light_dataclass(frozen=True, slots=True)
class Found:
    """A difference for one network.

    Attributes:
        what: one sentence for the user.
        beyond: text length in tokens above which logits differ; None if all texts are affected.
        slight: whether the ranking of the most likely tokens is unchanged.
    """

    what: str
    beyond: int | None = None
    slight: bool = False

    @property
    def refused(self) -> bool:
        """Whether an export needs the user's consent: logits of short texts differ."""
        return self.beyond is None and not self.slight


def differences(row: Architecture, h: Hyperparams) -> Iterator[Found]:
    """Everything that llama.cpp computes differently in the network `h` of the family `row`."""

    def value(word: str) -> object:
        if word == "gguf":
            return row.gguf
        if word in RULES_OF_ROW:
            return RULES_OF_ROW[word](row, h)
        return RULES[word](h) if word in RULES else look_up(h.extra, (word,))[0]

    for difference in (*GENERAL, *row.differs):
        if not difference.when or holds(difference.when, value):
            lengths = {WINDOW: active_window(h) or 0, POSITIONS: h.max_position_embeddings or 0, CONTEXT: 0}
            lengths[FOURTH] = _first_turned(h) or 0
            what = difference.what.format(
                window=f"{lengths[WINDOW]:,}", positions=f"{lengths[POSITIONS]:,}", epsilon=h.rms_norm_eps or 0,
                inner=_inner_epsilon(h) or 0, betas=_ramp_text(h), fourth=f"{lengths[FOURTH]:,}",
                original=f"{original_context(h, scaling_of(h)) or 0:,}", ramp=100 * _frequency_gap(row, h),
                gap_at_1=_norm_gap(h, 1.0), gap_at_tenth=_norm_gap(h, 0.1),
            )  # fmt: skip
            beyond = lengths.get(difference.beyond, h.extra.get(difference.beyond) if difference.beyond else None)
            yield Found(what, as_int(beyond, difference.beyond), difference.slight)


def _has_window(h: Hyperparams) -> bool:
    """Whether a layer attends to less than the longest text."""
    window, kinds = active_window(h), layer_kinds(h.extra)
    if window is None or (h.max_position_embeddings is not None and window >= h.max_position_embeddings):
        return False
    return kinds is None or "sliding_attention" in kinds


def _has_two_thetas(h: Hyperparams) -> bool:
    sliding = as_mapping(as_mapping(h.extra.get("rope_layers")).get("sliding_attention"))
    return sliding.get("rope_theta", h.rope_theta) != h.rope_theta


def _has_other_ramp(row: Architecture, h: Hyperparams) -> bool:
    return yarn_distance(row, h) > _SMALL


def _has_far_ramp(row: Architecture, h: Hyperparams) -> bool:
    return yarn_distance(row, h) > NEAR_RAMP


def _has_other_gelu(row: Architecture, h: Hyperparams) -> bool:
    """Whether the activation is another GELU than the family's usual one."""
    usual = defaults_of(row, h.hf_model_type)
    keys = (key.hf[0] for key in row.keys if "gelu_new" in key.allowed)
    return any(name in usual and h.extra.get(name, usual[name]) != usual[name] for name in keys)


def _first_turned(h: Hyperparams) -> int | None:
    """The text length from which the fourth section of M-RoPE rotates pairs noticeably; None without one."""
    sections = scaling_of(h).get("mrope_section")
    n_dims, base = rotary_dim(h), h.rope_theta
    numbers = [n for n in sections if type(n) is int] if isinstance(sections, list) else []
    if len(numbers) < 4 or not numbers[3] or not n_dims or not base or base <= 1:
        return None
    base *= stretch_of(h, str(scaling_of(h).get("rope_type")), scaling_of(h))
    return int(min(_LEAST_TURN * base ** (2 * sum(numbers[:3]) / n_dims), 1 << 30))


def _has_fourth_section(h: Hyperparams) -> bool:
    first = _first_turned(h)
    return first is not None and first < (h.max_position_embeddings or 1 << 30)


def _has_far_fourth_section(h: Hyperparams) -> bool:
    first = _first_turned(h)
    return first is not None and first < _SHORT_TEXT


def _leaves_pairs(row: Architecture, h: Hyperparams) -> bool:
    """Whether a pair that rotates noticeably in short texts gets no position in llama.cpp.

    Pair i is sector i mod sum(mrope_section), of lane sector mod 3, which has as many sectors as its section says.
    """
    sections, n_pairs = scaling_of(h).get("mrope_section"), (rotary_dim(h) or 0) // 2
    numbers = [n for n in sections if type(n) is int] if isinstance(sections, list) else []
    base = h.rope_theta or 0.0
    if row.gguf not in _INTERLEAVED or len(numbers) < 3 or sum(numbers) < 1 or base <= 1 or n_pairs > MAX_HEAD_DIM:
        return False
    sectors = ((i, i % sum(numbers)) for i in range(n_pairs))
    first = next((i for i, sector in sectors if sector >= 3 * numbers[sector % 3]), None)
    return first is not None and base ** (-first / n_pairs) * _SHORT_TEXT > _LEAST_TURN


def _has_long_context(h: Hyperparams) -> bool:
    """Whether long texts get other rotary factors than short ones."""
    scaling = scaling_of(h)
    original, positions = original_context(h, scaling), h.max_position_embeddings
    other = scaling.get("short_factor") != scaling.get("long_factor")
    return scaling.get("rope_type") == "longrope" and other and (original or 0) < (positions or 0)


def _ramp_text(h: Hyperparams) -> str:
    fast, slow = yarn_betas(h)
    truncate = as_mapping(h.extra.get("rope_scaling")).get("truncate")
    return f"beta_fast {fast:g}, beta_slow {slow:g}{', truncate false' if truncate is False else ''}"


def _is_other_exaone(h: Hyperparams) -> bool:
    """Whether llama.cpp rotates layers of an EXAONE 4 that transformers does not, or gives windows to others."""
    window = active_window(h)
    if h.num_layers == 64:
        return window is None
    return window is not None and ("full_attention" in (layer_kinds(h.extra) or ()) or _has_window(h))


def _has_lone_attention(h: Hyperparams) -> bool:
    """Whether a layer has attention but no MLP."""
    sizes = (sizes_of(h, layer) for layer in range(h.num_layers or 0))
    return any(size.get("heads") and not size.get("ffn") for size in sizes)


def _inner_epsilon(h: Hyperparams) -> float | None:
    """The separate epsilon of norms inside a layer in transformers; None without such norms."""
    if h.extra.get("kv_lora_rank") or h.extra.get("linear_key_head_dim"):  # latent vectors; queries of the delta rule
        return 1e-6
    if h.hf_model_type == "falcon_mamba":
        return as_float(h.extra.get("mixer_rms_eps"), "mixer_rms_eps") or 1e-6
    return None


def _norm_gap(h: Hyperparams, rms: float) -> float:
    """Relative difference of a norm's outputs with both epsilons, for an input with that root mean square."""
    ours, theirs = (math.sqrt(rms * rms + epsilon) for epsilon in (_inner_epsilon(h) or 0.0, h.rms_norm_eps or 0.0))
    return abs(theirs / ours - 1)


def _frequency_gap(row: Architecture, h: Hyperparams) -> float:
    """The largest relative difference of a rotary frequency under yarn."""
    factor = as_float(scaling_of(h).get("factor"), "factor") or 1.0
    return yarn_distance(row, h) * abs(1 - 1 / factor)


def _has_two_epsilons(h: Hyperparams) -> bool:
    inner = _inner_epsilon(h)
    return inner is not None and h.rms_norm_eps is not None and not math.isclose(h.rms_norm_eps, inner, rel_tol=1e-3)


def _has_far_epsilons(h: Hyperparams) -> bool:
    return _has_two_epsilons(h) and abs((h.rms_norm_eps or 0) - (_inner_epsilon(h) or 0)) > _USUAL_EPSILON


def _has_unread_epsilon(row: Architecture, h: Hyperparams) -> bool:
    """Whether the loader ignores the epsilon of norms, and the network's is not negligible."""
    loader = loader_of(row.gguf)
    return loader is not None and not loader.reads_epsilon and (h.rms_norm_eps or 0) > _LARGE_EPSILON


def _has_other_head_norm(h: Hyperparams) -> bool:
    """Whether the norm of each head effectively has another epsilon than that over 64 values."""
    return not math.isclose((h.head_dim or 0) * (h.rms_norm_eps or 0), 64e-5, rel_tol=1e-6)


def _has_least_step(h: Hyperparams) -> bool:
    return (as_float(h.extra.get("time_step_min"), "time_step_min") or 0) > _USUAL_STEP


def _chooses_positions(h: Hyperparams) -> bool:
    """Whether a text may be longer than the number of positions that its layers select."""
    budget = as_int(h.extra.get("indexer_budget"), "indexer_budget")
    return budget is not None and (h.max_position_embeddings is None or budget < h.max_position_embeddings)


_SMALL = 1e-3
"""Maximum deviation of a pair's interpolation weight that shows in no logit."""

_USUAL_EPSILON = 1e-5
"""The largest epsilon of published models: two of them below it differ by less than rounding in other programs."""

_USUAL_STEP = 1e-3
"""The smallest time step limit of published models, which their steps rarely reach."""

_LARGE_EPSILON = 5e-5
"""An epsilon of norms above which logits depend on whether it is added."""

_LEAST_TURN, _SHORT_TEXT = 1e-2, 128
"""The angle, and the text length, below which a difference of rotations is negligible."""

_INTERLEAVED = frozenset(("qwen3vl", "qwen3vlmoe", "qwen35", "qwen35moe", "qwen4exp", "qwen3tts"))
"""Architectures whose pairs of a head alternate between time, height and width (LLAMA_ROPE_TYPE_IMROPE)."""

RULES_OF_ROW: dict[str, Callable[[Architecture, Hyperparams], object]] = {
    "other_ramp": _has_other_ramp,
    "far_ramp": _has_far_ramp,
    "other_gelu": _has_other_gelu,
    "uncovered_pairs": _leaves_pairs,
    "unread_epsilon": _has_unread_epsilon,
}
"""The same, for words that depend on the architecture."""

RULES: dict[str, Callable[[Hyperparams], object]] = {
    "window": _has_window, "chosen": _chooses_positions, "two_thetas": _has_two_thetas,
    "long_context": _has_long_context, "fourth_section": _has_fourth_section,
    "far_fourth_section": _has_far_fourth_section, "other_exaone": _is_other_exaone,
    "limited_steps": lambda h: h.extra.get(STEP_LIMITS), "least_step": _has_least_step,
    "two_epsilons": _has_two_epsilons, "far_epsilons": _has_far_epsilons, "lone_attention": _has_lone_attention,
    "other_head_norm": _has_other_head_norm, "layers": lambda h: h.num_layers, "tied": lambda h: h.tied,
    "bare": lambda h: (h.hf_architecture or "").endswith("Model") or has_no_output(h.hf_architecture),
    "model_type": lambda h: h.hf_model_type,
}  # fmt: skip
"""Word of a `when` -> its meaning; any other word is a config.json key."""
