"""How llama.cpp and transformers scale attention under RoPE scaling: two numbers each, and the conversion.

With f the scaling factor and m(x) = 1 + 0.1 x ln f, transformers multiplies cosines and sines by T, and the scores of
latent attention by S squared. A GGUF has L (`rope.scaling.yarn_log_multiplier`) and r (`rope.scaling.attn_factor`),
from which llama.cpp computes

    T = r m(1)/m(L) under yarn (T = r in `deepseek2` where L is not 0), T = r under a linear scaling;
    S = T m(L) under yarn, S = r m(1) m(L) under a linear scaling, in networks whose graph scales scores; else S = 1.
"""

from __future__ import annotations

import math

from aprfmt.arch.loaders import loader_of

LOG_KEY = "rope.scaling.yarn_log_multiplier"

_OF_ONE_MSCALE = ("deepseek2",)
"""Architectures for which llama.cpp assumes `mscale` equal to `mscale_all_dim`."""

_LINEAR = ("deepseek2", "mistral4")
"""Architectures with scaled scores whose linear scaling agrees with transformers'."""

_WHOLE_LOG = ("mistral3",)
"""Architectures whose key is L; for the others it is a tenth of it."""

_EXACT = 1e-6


def scales_scores(gguf: str) -> bool:
    """Whether llama.cpp's graph of the architecture scales scores too."""
    loader = loader_of(gguf)
    return loader is not None and loader.scales_scores


def reads_log(gguf: str) -> bool:
    """Whether llama.cpp reads L for the architecture; otherwise L is 0."""
    loader = loader_of(gguf)
    return loader is None or LOG_KEY in loader.optional | loader.required


def log_unit(gguf: str) -> float:
    """The factor of L in a GGUF's key."""
    return 0.1 if gguf not in _WHOLE_LOG else 1.0


def same(a: float, b: float) -> bool:
    """Whether two factors are equal up to rounding."""
    return math.isclose(a, b, rel_tol=_EXACT)


def to_runtime(gguf: str, kind: str, factor: float, t: float, s: float, log: float) -> tuple[float, float] | None:
    """(L, r) that yield (T, S); None if llama.cpp's network cannot express them.

    `log` is the L of a network without scaled scores, where any would do.
    """
    if not scales_scores(gguf):
        log = log if reads_log(gguf) else 0.0
        return (log, t / _usual(gguf, kind, factor, log)) if same(s, 1) else None
    if kind == "linear" and gguf not in _LINEAR:
        return None
    wanted = s / t if kind == "yarn" else s / (t * _m(factor, 1))
    if same(wanted, 1):
        log = 0.0
    elif factor <= 0 or same(factor, 1) or not reads_log(gguf):
        return None
    else:
        log = (wanted - 1) / (0.1 * math.log(factor))
    return log, t / _usual(gguf, kind, factor, log)


def from_runtime(gguf: str, kind: str, factor: float, log: float, attention: float) -> tuple[float, float]:
    """(T, S) that llama.cpp computes from (L, r)."""
    t = attention * _usual(gguf, kind, factor, log)
    if not scales_scores(gguf):
        return t, 1.0
    return t, t * _m(factor, log) * (1.0 if kind == "yarn" else _m(factor, 1))


def _m(factor: float, log: float) -> float:
    return 1 + 0.1 * log * math.log(factor) if factor > 0 else 1.0


def _usual(gguf: str, kind: str, factor: float, log: float) -> float:
    """T where r is 1."""
    if kind != "yarn" or factor <= 1:
        return 1.0
    if log and gguf in _OF_ONE_MSCALE:
        return 1.0
    return _m(factor, 1) / _m(factor, log)


def ramp_bounds(
    n_dims: int, base: float, original: int, betas: tuple[float, float], *, whole: bool
) -> tuple[float, float]:
    """The pairs of a head between which frequencies are interpolated in part; `whole` rounds them."""
    low, high = (n_dims * math.log(original / (beta * 2 * math.pi)) / (2 * math.log(base)) for beta in betas)
    if whole:
        low, high = math.floor(low), math.ceil(high)
    return max(low, 0), min(high, n_dims - 1)


def ramp(n_dims: int, base: float, original: int, betas: tuple[float, float], *, whole: bool) -> list[float]:
    """The interpolation weight of each pair of a head, 0 to 1; `whole` rounds the bounds of the ramp."""
    low, high = ramp_bounds(n_dims, base, original, betas, whole=whole)
    return [min(1.0, max(0.0, (i - low) / max(high - low, 1e-3))) for i in range(n_dims // 2)]
