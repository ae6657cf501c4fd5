"""Rotary embedding parameters as keys of a GGUF, in both directions. rope.py says how Hyperparams holds them."""

from __future__ import annotations

import math
from collections.abc import Mapping

from aprfmt.arch import yarn
from aprfmt.arch.fields import OTHER_FORMAT, as_float, as_int, as_mapping, from_f32, plain_value, shorten
from aprfmt.arch.hyperparams import Hyperparams
from aprfmt.arch.loaders import loader_of
from aprfmt.arch.rope import (
    FREQS,
    LOCAL_THETAS,
    LONG,
    MAIN,
    PARTIAL,
    attention_factor,
    first_of,
    halves_full,
    mscale_of,
    names_rotated_part,
    original_context,
    reads_factors,
    rotary_dim,
    scaling_of,
    shares_rotated_part,
    sliding_theta,
    stretch_of,
)
from aprfmt.arch.row import COMPRESSED_ROPE, WHOLE_HEADS, Architecture
from aprfmt.errors import CorruptError, RefusedError

# Hugging Face key of a YaRN dict -> GGUF suffix; the first name of a suffix is the one written.
_YARN = {
    "extrapolation_factor": "yarn_ext_factor",
    "attention_factor": "yarn_attn_factor",
    "attn_factor": "yarn_attn_factor",
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
}

_KINDS = {
    "default": "", "dynamic": "", "linear": "", "yarn": "", "llama3": FREQS, "proportional": FREQS, "longrope": LONG
}  # fmt: skip
"""Kinds of scaling that a GGUF supports, and the factor tensor that the family must then know."""

_CONTEXT_STEP = 256
"""Contexts of llama.cpp are multiples of this."""


def to_gguf(h: Hyperparams, row: Architecture) -> dict[str, tuple[str, object]]:
    """{suffix: (kind, value)} of the rope keys, as llama.cpp's converter writes them.

    The factors of llama3 and longrope are tensors, see factor_tensors. Raises RefusedError for kinds that a GGUF of
    this family does not support.
    """
    scaling = scaling_of(h)
    kind = str(scaling.get("rope_type", "default")).lower()
    tensor = _KINDS.get(kind)
    if tensor is None or (tensor and not reads_factors(row, tensor)):
        raise RefusedError(
            f"rope_parameters.rope_type is {kind!r:.40}, which llama.cpp's {row.gguf} does not support",
            hint=OTHER_FORMAT,
        )
    if names_rotated_part(row) and PARTIAL[0] in h.extra:
        raise RefusedError(
            f"{PARTIAL[0]} is {h.extra[PARTIAL[0]]}: llama.cpp's {row.gguf} rotates by frequencies of qk_rope_head_dim "
            "dimensions, transformers by those of this part of head_dim",
            hint=OTHER_FORMAT,
        )
    turned = rotary_dim(h) or 0
    if row.rotates == WHOLE_HEADS and kind not in ("default", "proportional") and turned % 2:
        # Such classes rotate a part only if it rounds up to the head, with frequencies of the part.
        raise RefusedError(
            f"partial_rotary_factor is {h.extra.get(PARTIAL[0])}: llama.cpp cannot rotate {turned} values per head",
            hint=OTHER_FORMAT,
        )
    out: dict[str, tuple[str, object]] = {}
    loader = loader_of(row.gguf)
    if kind in ("linear", "yarn") and loader is not None and loader.window_factor and not row.nested_rope:
        raise RefusedError(
            f"rope_parameters.rope_type is {kind!r}: llama.cpp's {row.gguf} applies no RoPE scaling in sliding-window "
            "layers",
            hint=OTHER_FORMAT,
        )
    if kind in ("linear", "yarn", "longrope"):
        out |= _scaling_keys(h, kind, scaling, row)
    elif kind == "llama3" and scaling.get("llama_4_scaling_beta"):  # queries are scaled after this many positions
        out["rope.scaling.original_context_length"] = ("u32", original_context(h, scaling))
    sections = scaling.get("mrope_section")
    if isinstance(sections, list) and sections:
        padded = [as_int(item, "mrope_section") for item in (*sections, 0, 0, 0, 0)[: max(4, len(sections))]]
        out["rope.dimension_sections"] = ("i32[]", padded[:4])
    if h.rope_theta is not None:
        out["rope.freq_base"] = ("f32", h.rope_theta * (1.0 if _names_alpha(row) else stretch_of(h, kind, scaling)))
    if kind == "dynamic" and scaling.get("alpha") and _names_alpha(row):
        out |= {
            "rope.scaling.alpha": ("f32", scaling["alpha"]),
            "rope.scaling.type": ("str", "none"),
            "rope.scaling.factor": ("f32", scaling.get("factor") or 1.0),
            "rope.scaling.original_context_length": ("u32", h.max_position_embeddings),
        }
    _check_layers(h, row)
    local = sliding_theta(h)
    if local is not None and row.nested_rope:
        out["rope.freq_base_swa"] = ("f32", local)
    return out


def _names_alpha(row: Architecture) -> bool:
    """Whether a GGUF of the family states alpha; in others the base is scaled."""
    return any(key.gguf == "rope.scaling.alpha" for key in row.keys)


def _check_layers(h: Hyperparams, row: Architecture) -> None:
    """Refuses per-layer parameters that a GGUF cannot express: some families have one more base, for sliding layers."""
    for name, value in as_mapping(h.extra.get("rope_layers")).items():
        if not isinstance(value, Mapping):
            raise CorruptError(f"rope_layers: {name} is not an object")
        shared = shares_rotated_part(row) or halves_full(row) or name != "sliding_attention"
        stated = ("rope_theta",) if shared else ("rope_theta", PARTIAL[0])
        rest = {key: item for key, item in value.items() if key not in stated}
        other_base = value.get("rope_theta") != h.rope_theta
        alone = name != "sliding_attention" or not row.nested_rope
        if rest != {"rope_type": "default"} or (other_base and alone):
            raise RefusedError(f"a GGUF of this architecture cannot hold separate rope parameters for {name} layers")


def _scaling_keys(
    h: Hyperparams, kind: str, scaling: Mapping[str, object], row: Architecture
) -> dict[str, tuple[str, object]]:
    base = "rope.scaling."
    out: dict[str, tuple[str, object]] = {f"{base}type": ("str", kind)}
    if kind != "longrope":
        out[f"{base}factor"] = ("f32", scaling.get("factor") or 1.0)
    if kind == "linear":
        return out
    original = original_context(h, scaling)
    if original:
        out[f"{base}original_context_length"] = ("u32", original)
    if kind == "longrope" and original:
        _check_long_factors(h, scaling, original)
    if kind == "yarn":
        for name, suffix in _YARN.items():
            if scaling.get(name) is not None:
                out.setdefault(base + suffix, ("f32", scaling[name]))
    attention = runtime_scales(h, row)[1]
    if not yarn.same(attention, 1):
        out[base + "attn_factor"] = ("f32", attention)
    return out


def _check_long_factors(h: Hyperparams, scaling: Mapping[str, object], original: int) -> None:
    """Raises RefusedError if no context of llama.cpp is short enough for the short factors of a short network."""
    positions = h.max_position_embeddings or 0
    context = -(-positions // _CONTEXT_STEP) * _CONTEXT_STEP
    if positions <= original < context and scaling.get("short_factor") != scaling.get("long_factor"):
        raise RefusedError(
            f"original_max_position_embeddings is {original} and max_position_embeddings {positions}: llama.cpp rounds "
            f"its context up to {context} tokens, and would use the long factors for short texts"
        )


def runtime_scales(h: Hyperparams, row: Architecture) -> tuple[float, float]:
    """(L, r) of arch.yarn that yield the network's attention. Raises RefusedError if llama.cpp cannot express it."""
    scaling = scaling_of(h)
    kind = str(scaling.get("rope_type", "default")).lower()
    factor = as_float(scaling.get("factor"), "factor") or 1.0
    named = as_float(scaling.get("mscale_all_dim"), "mscale_all_dim") or 0.0
    scores = mscale_of(factor, named) if named and _is_latent(row) else 1.0
    attention = attention_factor(h, kind, scaling)
    if attention is not None and any(key.role == COMPRESSED_ROPE for key in row.keys):
        raise RefusedError(
            f"rope_parameters scales RoPE by {attention:.4g} in compressed layers; llama.cpp's {row.gguf} never does",
            hint=OTHER_FORMAT,
        )
    if attention is None:
        attention = mscale_of(factor) if kind == "yarn" else 1.0
    if kind not in ("yarn", "linear"):
        found = (0.0, attention) if yarn.same(scores, 1) else None
    else:
        log = named if any(key.gguf == yarn.LOG_KEY for key in row.keys) else 0.0
        found = yarn.to_runtime(row.gguf, kind, factor, attention, scores, log)
    if found is not None and not yarn.same(found[1], 1) and _scales_windows(h, row):
        raise RefusedError(
            f"rope_parameters.full_attention scales RoPE by {attention:.4g}; llama.cpp's {row.gguf} would scale that "
            "of sliding layers too",
            hint=OTHER_FORMAT,
        )
    if found is None:
        raise RefusedError(
            f"rope_parameters (rope_type {kind}, factor {factor:g}, mscale_all_dim {named:g}) scales attention scores "
            f"by {scores * scores:.4g} and RoPE by {attention:.4g}, which llama.cpp's {row.gguf} does not support",
            hint=OTHER_FORMAT,
        )
    return found


def _scales_windows(h: Hyperparams, row: Architecture) -> bool:
    """Whether llama.cpp multiplies sliding-window layers by the factor of the others."""
    loader = loader_of(row.gguf)
    return row.nested_rope and loader is not None and loader.window_factor and "rope_layers" in h.extra


def _is_latent(row: Architecture) -> bool:
    """Whether transformers scales the scores of the family's latent attention by `mscale_all_dim`."""
    return names_rotated_part(row) and not any(key.role == COMPRESSED_ROPE for key in row.keys)


def from_gguf(h: Hyperparams, row: Architecture, kv: Mapping[str, object], defaults: Mapping[str, object]) -> None:
    """Reads the rope keys of a GGUF. Raises CorruptError."""
    prefix = f"{row.gguf}.rope."
    h.rope_theta = from_f32(kv.get(f"{prefix}freq_base"), f"{prefix}freq_base")
    scaling = _read_scaling(h, row, kv, prefix)
    sections = plain_value(f"{prefix}dimension_sections", kv.get(f"{prefix}dimension_sections"))
    if sections is not None:
        if not isinstance(sections, list):
            raise CorruptError(f"{prefix}dimension_sections is not a list")
        numbers = [as_int(item, "dimension_sections") for item in sections]
        while len(numbers) > 3 and not numbers[-1]:
            numbers.pop()
        if any(numbers):
            scaling = {**(scaling or {"rope_type": "default"}), "mrope_section": numbers}
    named = defaults.get("rope_parameters")
    if scaling and isinstance(named, Mapping):
        named = as_mapping(named.get(MAIN)) or named
        scaling = {**{k: v for k, v in named.items() if k not in ("rope_theta", "partial_rotary_factor")}, **scaling}
    if scaling:
        h.extra["rope_scaling"] = scaling
    local = from_f32(kv.get(f"{prefix}freq_base_swa"), f"{prefix}freq_base_swa")
    if local is not None or row.nested_rope:
        usual = as_float(first_of(defaults, LOCAL_THETAS), "rope_theta")
        theta = local if local is not None else usual if usual is not None else h.rope_theta
        h.extra["rope_layers"] = {"sliding_attention": {"rope_type": "default", "rope_theta": theta}}


def _read_scaling(h: Hyperparams, row: Architecture, kv: Mapping[str, object], prefix: str) -> dict[str, object] | None:
    def number(suffix: str) -> float | None:
        return from_f32(kv.get(prefix + suffix), prefix + suffix)

    if alpha := number("scaling.alpha"):
        return {"rope_type": "dynamic", "alpha": alpha, "factor": number("scaling.factor") or 1.0}
    length = f"{prefix}scaling.original_context_length"
    # Files from before the scaling keys state only a linear factor.
    factor = number("scaling.factor") or number("scale_linear")
    attention, original = number("scaling.attn_factor"), as_int(kv.get(length), length)
    kind = kv.get(f"{prefix}scaling.type")
    if kind is None and attention and original:
        kind = "longrope"
    if kind is None and factor:
        kind = "linear"
    if kind in (None, "none", ""):
        if original:
            h.extra["original_max_position_embeddings"] = original
        return None
    if not isinstance(kind, str):
        raise CorruptError(f"{prefix}scaling.type is not a string")
    scaling: dict[str, object] = {"rope_type": kind}
    if factor is not None:
        scaling["factor"] = factor
    if original is not None:
        scaling["original_max_position_embeddings"] = original
    for name, suffix in _YARN.items():
        if name != "attn_factor" and (value := number(f"scaling.{suffix}")) is not None:
            scaling[name] = value
    log = number(yarn.LOG_KEY.removeprefix("rope.")) or 0.0
    if "attention_factor" not in scaling:
        attention = attention if attention and attention > 0 else None
        _set_scales(h, row, scaling, shorten(log / yarn.log_unit(row.gguf)), attention)
    return scaling


def _set_scales(
    h: Hyperparams, row: Architecture, scaling: dict[str, object], log: float, attention: float | None
) -> None:
    """States in `scaling` what llama.cpp computes from (L, r), if it is not transformers' default."""
    kind, factor = str(scaling["rope_type"]), as_float(scaling.get("factor"), "factor") or 1.0
    if kind not in ("yarn", "linear"):
        computed = attention_factor(h, kind, scaling)
        stated = attention if computed is None else attention or 1.0
        if stated is not None and (computed is None or not yarn.same(computed, stated)):
            scaling["attention_factor"] = shorten(stated)
        return
    t, s = yarn.from_runtime(row.gguf, kind, factor, log, 1.0 if attention is None else attention)
    if log and not _is_latent(row):
        scaling |= {"mscale": 1.0, "mscale_all_dim": log}
    elif log and not yarn.reads_log(row.gguf):  # it has the meaning of other networks
        scaling |= {"mscale": log, "mscale_all_dim": log}
        return
    elif not yarn.same(s, 1) and factor > 1:
        scaling["mscale_all_dim"] = shorten((s - 1) / (0.1 * math.log(factor)))
        if yarn.same(t, 1) and kind == "yarn":
            scaling["mscale"] = scaling["mscale_all_dim"]
    computed = attention_factor(h, kind, scaling)
    usual = mscale_of(factor) if kind == "yarn" else 1.0
    if not yarn.same(usual if computed is None else computed, t):
        scaling["attention_factor"] = shorten(t)
