"""Rotary embedding parameters in their three spellings: Hugging Face dict, GGUF keys, GGUF factor tensors.

In Hyperparams they are `rope_theta` and, in `extra`:

    rope_scaling             how positions are stretched: {"rope_type": ..., ...} without theta; absent if not at all
    partial_rotary_factor    rotated part of a head, absent where it is all of it
    rope_layers              {layer type: {"rope_type": ..., "rope_theta": ...}} of layers other than full_attention
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from aprfmt.arch.fields import as_float, as_int, as_mapping, from_f32, plain_value, shorten
from aprfmt.arch.hyperparams import Hyperparams
from aprfmt.arch.rope_math import (
    DEFAULT_THETA,
    attention_factor,
    mscale_of,
    original_context,
    rotary_dim,
    scaling_of,
)
from aprfmt.arch.row import Architecture
from aprfmt.errors import CorruptError, RefusedError

MAIN = "full_attention"
"""The layer type whose rope parameters are the main ones."""

THETAS = ("rope_theta", "rotary_emb_base", "global_rope_theta", "rope_global_theta")
LOCAL_THETAS = ("rope_local_base_freq", "local_rope_theta", "rope_local_theta", "swa_rope_theta")
PARTIAL = ("partial_rotary_factor", "rotary_pct", "rope_pct", "rope_percent")
COUNTS = ("rotary_dim", "rotary_ndims")
NAMES = frozenset((*THETAS, *LOCAL_THETAS, *PARTIAL, *COUNTS, "rope_parameters", "rope_scaling"))
"""config.json keys that this module reads and writes."""

# Hugging Face key of a yarn dict -> GGUF suffix; the first name of a suffix is the one given back.
_YARN = {
    "extrapolation_factor": "yarn_ext_factor",
    "attention_factor": "yarn_attn_factor",
    "attn_factor": "yarn_attn_factor",
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
}
_OLD_KINDS = {"su": "longrope", "mrope": "default"}
_STRETCHED = ("llama3", "yarn", "longrope")
_UNSCALED = ("default", "llama3", "dynamic", "proportional")


def read(
    h: Hyperparams, config: Mapping[str, object], defaults: Mapping[str, object], row: Architecture | None
) -> None:
    """Fills in the rope parameters of a config.json in the spelling of transformers 4 or 5. Raises CorruptError."""
    if row is not None and not any(key.via == "rope" for key in row.keys):
        return
    # A dict of dicts is by layer type: the main one is that of full_attention, whatever the others are called.
    dicts = _dicts(config) or _dicts(defaults)
    layers = {key: value for key, value in dicts.items() if isinstance(value, Mapping)}
    main = dict(layers.get(MAIN) or (next(iter(layers.values())) if layers else dicts))
    theta = main.pop("rope_theta", None)
    theta = theta if theta is not None else _first(config, THETAS)
    if theta is None and row is not None:
        theta = _first(defaults, THETAS) or DEFAULT_THETA
    h.rope_theta = as_float(theta, "rope_theta")
    partial = main.pop("partial_rotary_factor", None)
    _set_partial(h, partial if partial is not None else _partial(h, config, defaults), defaults)
    scaling = _scaling(main)
    if scaling and scaling["rope_type"] in _STRETCHED and config.get("original_max_position_embeddings"):
        scaling["original_max_position_embeddings"] = config["original_max_position_embeddings"]
    if scaling:
        h.extra["rope_scaling"] = scaling
    others = {name: _layer(value, h.rope_theta) for name, value in layers.items() if name != MAIN}
    local = _first(config, LOCAL_THETAS)
    if local is None:
        local = _first(defaults, LOCAL_THETAS)
    if "sliding_attention" not in others and row is not None and row.nested_rope:
        others["sliding_attention"] = _layer({"rope_theta": local}, h.rope_theta)
    if others:
        h.extra["rope_layers"] = others


def _dicts(config: Mapping[str, object]) -> dict[str, object]:
    """The first dict of rope parameters that says something."""
    for key in ("rope_parameters", "rope_scaling"):
        value = config.get(key)
        if value is None:
            continue
        if not isinstance(value, Mapping):
            raise CorruptError(f"config.json: {key} is not an object")
        if value:
            return dict(value)
    return {}


def _layer(value: Mapping[str, object], main: float | None) -> dict[str, object]:
    """The parameters of one layer type, theta made explicit."""
    out = dict(value)
    theta = as_float(out.pop("rope_theta", None), "rope_theta")
    return {**(_scaling(out) or {"rope_type": "default"}), "rope_theta": theta if theta is not None else main}


def _scaling(found: dict[str, object]) -> dict[str, object] | None:
    old = found.pop("type", None)
    kind = found.pop("rope_type", None) or old or "default"
    if not isinstance(kind, str):
        raise CorruptError("config.json: rope_type is not a string")
    kind = _OLD_KINDS.get(kind, kind)
    return None if kind == "default" and not found else {"rope_type": kind, **found}


def _first(source: Mapping[str, object], names: tuple[str, ...]) -> object:
    return next((source[name] for name in names if source.get(name) is not None), None)


def _partial(h: Hyperparams, *sources: Mapping[str, object]) -> object:
    """The rotated part of a head, from whichever spelling comes first."""
    for source in sources:
        if (part := _first(source, PARTIAL)) is not None:
            return part
        count = as_int(_first(source, COUNTS), "rotary_dim")
        if count and h.head_dim:
            return count / h.head_dim
    return None


def _set_partial(h: Hyperparams, value: object, defaults: Mapping[str, object]) -> None:
    part = as_float(value, "partial_rotary_factor")
    if part is None or (part == 1 and (_partial(h, defaults) or 1) == 1):
        h.extra.pop("partial_rotary_factor", None)
    else:
        h.extra["partial_rotary_factor"] = part


def set_rotary_dim(h: Hyperparams, count: int | None, defaults: Mapping[str, object]) -> None:
    """The rotated part of a head from the count of a GGUF; the default's own digits where they give that count."""
    size = h.head_dim or (h.hidden_size // h.num_heads if h.hidden_size and h.num_heads else None)
    if count is None or not size:
        return
    usual = as_float(_partial(h, defaults), "partial_rotary_factor") or 1.0
    part = usual if int(size * usual) == count else shorten(count / size)
    _set_partial(h, part if int(size * part) == count else count / size, defaults)


def to_gguf(h: Hyperparams, row: Architecture) -> dict[str, tuple[str, object]]:
    """{suffix: (kind, value)} of the rope keys, as llama.cpp's converter writes them.

    The factors of llama3 and longrope are tensors, see rope_math.factor_tensors. Raises RefusedError for kinds that a
    GGUF of this family cannot have.
    """
    scaling = scaling_of(h)
    kind = str(scaling.get("rope_type", "default")).lower()
    _check_kind(kind, scaling, row)
    out: dict[str, tuple[str, object]] = {}
    if kind in ("linear", "yarn", "longrope"):
        out |= _scaling_keys(h, kind, scaling, row)
    sections = scaling.get("mrope_section")
    if isinstance(sections, list) and sections:
        padded = [as_int(item, "mrope_section") for item in (*sections, 0, 0, 0, 0)[: max(4, len(sections))]]
        out["rope.dimension_sections"] = ("i32[]", padded[:4])
    if h.rope_theta is not None:
        out["rope.freq_base"] = ("f32", h.rope_theta * _stretch(h, kind, scaling))
    _check_layers(h, row)
    local = _sliding(h)
    if local is not None and row.nested_rope:
        out["rope.freq_base_swa"] = ("f32", local)
    return out


def _check_layers(h: Hyperparams, row: Architecture) -> None:
    """Refuses what a GGUF cannot say of single layers: it has one more base, for sliding layers, in some families."""
    for name, value in as_mapping(h.extra.get("rope_layers")).items():
        if not isinstance(value, Mapping):
            raise CorruptError(f"rope_layers: {name} is not an object")
        rest = {
            key: item for key, item in value.items() if key not in ("rope_theta", "partial_rotary_factor")
        }
        other_base = value.get("rope_theta") != h.rope_theta
        alone = name != "sliding_attention" or not row.nested_rope
        if rest != {"rope_type": "default"} or (other_base and alone):
            raise RefusedError(
                f"a GGUF of this architecture cannot give {name} layers rope parameters of their own"
            )


def _sliding(h: Hyperparams) -> object:
    layers = as_mapping(h.extra.get("rope_layers"))
    return as_mapping(layers.get("sliding_attention")).get("rope_theta")


def _stretch(h: Hyperparams, kind: str, scaling: Mapping[str, object]) -> float:
    """What a fixed `alpha` does to the base: alpha^(d / (d - 2)), 1 without one."""
    alpha = as_float(scaling.get("alpha"), "alpha") if kind == "dynamic" else None
    if not alpha or alpha < 0 or not h.head_dim or h.head_dim <= 2:
        return 1.0
    try:
        return float(alpha ** (h.head_dim / (h.head_dim - 2)))
    except OverflowError:
        raise RefusedError(f"rope alpha {alpha:g} gives no base frequency") from None


def _check_kind(kind: str, scaling: Mapping[str, object], row: Architecture) -> None:
    known = kind in (*_UNSCALED, "linear", "yarn")
    if kind in ("llama3", "proportional"):
        known = "rope_freqs.weight" in row.gguf_only
    if kind == "longrope":
        known = "rope_factors_long.weight" in row.gguf_only
    if not known:
        raise RefusedError(f"a GGUF of this architecture cannot have rope scaling {kind!r}")


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
    if kind == "yarn":
        for name, suffix in _YARN.items():
            if scaling.get(name) is not None:
                out.setdefault(base + suffix, ("f32", scaling[name]))
    attention = attention_factor(h, kind, scaling)
    has_log = any(key.gguf.endswith("yarn_log_multiplier") for key in row.keys)
    usual = _usual_attention(kind, scaling)
    if attention is not None and not has_log and not math.isclose(attention, usual, rel_tol=1e-6):
        # The runtime multiplies this by yarn's usual factor, and ignores yarn_attn_factor.
        out[f"{base}attn_factor"] = ("f32", attention / usual)
    return out


def from_gguf(
    h: Hyperparams, row: Architecture, kv: Mapping[str, object], defaults: Mapping[str, object]
) -> None:
    """Fills in what the rope keys of a GGUF say. Raises CorruptError."""
    prefix = f"{row.gguf}.rope."
    h.rope_theta = from_f32(kv.get(f"{prefix}freq_base"), f"{prefix}freq_base")
    scaling = _read_scaling(h, kv, prefix)
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
        scaling = {
            **{k: v for k, v in named.items() if k not in ("rope_theta", "partial_rotary_factor")},
            **scaling,
        }
    if scaling:
        h.extra["rope_scaling"] = scaling
    local = from_f32(kv.get(f"{prefix}freq_base_swa"), f"{prefix}freq_base_swa")
    if local is not None or row.nested_rope:
        usual = as_float(_first(defaults, LOCAL_THETAS), "rope_theta")
        theta = local if local is not None else usual if usual is not None else h.rope_theta
        h.extra["rope_layers"] = {"sliding_attention": {"rope_type": "default", "rope_theta": theta}}


def _read_scaling(h: Hyperparams, kv: Mapping[str, object], prefix: str) -> dict[str, object] | None:
    def number(suffix: str) -> float | None:
        return from_f32(kv.get(prefix + suffix), prefix + suffix)

    kind, length = kv.get(f"{prefix}scaling.type"), f"{prefix}scaling.original_context_length"
    # Files from before the scaling keys name a bare linear factor.
    factor = number("scaling.factor") or number("scale_linear")
    attention, original = number("scaling.attn_factor"), as_int(kv.get(length), length)
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
    if attention is not None and attention > 0 and "attention_factor" not in scaling:
        _set_attention(h, kind, scaling, attention)
    return scaling


def _usual_attention(kind: str, scaling: Mapping[str, object]) -> float:
    """What the runtime multiplies with by itself."""
    return mscale_of(as_float(scaling.get("factor"), "factor") or 1.0) if kind == "yarn" else 1.0


def _set_attention(h: Hyperparams, kind: str, scaling: dict[str, object], attention: float) -> None:
    usual = _usual_attention(kind, scaling)
    computed = attention_factor(h, kind, scaling)
    number = attention * usual
    if computed is None or not math.isclose(computed, number, rel_tol=1e-6):
        scaling["attention_factor"] = shorten(number)


def to_hf(h: Hyperparams, row: Architecture, defaults: Mapping[str, object]) -> dict[str, object]:
    """The rope keys of a config.json, in the spellings of transformers 4 and 5."""
    theta = h.rope_theta if h.rope_theta is not None else DEFAULT_THETA
    scaling = scaling_of(h)
    part = h.extra.get("partial_rotary_factor")
    main: dict[str, object] = {"rope_type": "default", **scaling, "rope_theta": theta}
    if part is not None:
        main["partial_rotary_factor"] = part
    out: dict[str, object] = {"rope_theta": theta, "rope_scaling": scaling or None, "rope_parameters": main}
    if row.nested_rope:
        out["rope_parameters"] = {MAIN: main, **as_mapping(h.extra.get("rope_layers"))}
        local = next((name for name in LOCAL_THETAS if name in defaults), None)
        if local is None:  # a flat dict would stand for all layers
            del out["rope_scaling"]
        elif _sliding(h) is not None:
            out[local] = _sliding(h)
    name = next((key.hf[0] for key in row.keys if key.via == "rotary_dim" and key.hf), PARTIAL[0])
    if part is not None:
        out[name] = rotary_dim(h) if name in COUNTS else part
    return {key: value for key, value in out.items() if key not in THETAS or key == _theta_name(defaults)}


def _theta_name(defaults: Mapping[str, object]) -> str:
    return next((name for name in THETAS if name in defaults), THETAS[0])
