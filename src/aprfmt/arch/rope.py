"""Rotary embedding parameters: Hugging Face dicts, GGUF keys and GGUF factor tensors.

In Hyperparams they are `rope_theta` and, in `extra`:

    rope_scaling             {"rope_type": ..., ...} without theta; absent without scaling partial_rotary_factor
    rotated part of a head, absent if all of it rope_layers              {layer type: {"rope_type": ..., "rope_theta":
    ...}} of layers other than full_attention
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from aprfmt.arch import yarn
from aprfmt.arch.fields import as_float, as_int, as_mapping, from_f32, plain_value, shorten
from aprfmt.arch.hyperparams import Hyperparams
from aprfmt.arch.loaders import loader_of
from aprfmt.arch.row import (
    COMPRESSED_ROPE,
    HALF_ROTARY,
    ROPE,
    ROPE_FACTORS,
    ROTARY_DIM,
    ROTARY_PART,
    SHARED_ROTARY_DIM,
    WHOLE_HEADS,
    Architecture,
)
from aprfmt.errors import CorruptError, RefusedError

DEFAULT_THETA = 10000.0
"""Default base frequency of Hugging Face configs."""

FREQS, LONG, SHORT = ROPE_FACTORS

MAX_HEAD_DIM = 1 << 20

MAIN = "full_attention"
"""The layer type with the main rope parameters."""

ELSEWHERE = "use another output format: -o NAME.apr, or -o NAME --format hf"

THETAS = ("rope_theta", "rotary_emb_base", "global_rope_theta", "rope_global_theta")
_LOCAL = "local_rope_theta"
LOCAL_THETAS = ("rope_local_base_freq", _LOCAL, "rope_local_theta", "swa_rope_theta")
PARTIAL = ("partial_rotary_factor", "rotary_pct", "rope_pct", "rope_percent")
COUNTS = ("rotary_dim", "rotary_ndims")
NAMES = frozenset((*THETAS, *LOCAL_THETAS, *PARTIAL, *COUNTS, "rope_parameters", "rope_scaling"))
"""config.json keys that this module reads and writes."""

# Hugging Face key of a YaRN dict -> GGUF suffix; the first name of a suffix is the one written.
_YARN = {
    "extrapolation_factor": "yarn_ext_factor",
    "attention_factor": "yarn_attn_factor",
    "attn_factor": "yarn_attn_factor",
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
}
_OLD_KINDS = {"su": "longrope", "mrope": "default", "xdrope": "dynamic"}
_STRETCHED = ("llama3", "yarn", "longrope")
_KINDS = {
    "default": "", "dynamic": "", "linear": "", "yarn": "", "llama3": FREQS, "proportional": FREQS, "longrope": LONG
}  # fmt: skip
"""Kinds of scaling that a GGUF supports, and the factor tensor that the family must then know."""


def read(
    h: Hyperparams, config: Mapping[str, object], defaults: Mapping[str, object], row: Architecture | None
) -> None:
    """Reads the rope parameters of a config.json in the spelling of transformers 4 or 5. Raises CorruptError."""
    if row is not None and not any(key.role == ROPE for key in row.keys):
        return
    # A dict of dicts is by layer type: the main one is that of full_attention, whatever the others are called.
    dicts = _dicts(config) or _dicts(defaults)
    layers = {key: value for key, value in dicts.items() if isinstance(value, Mapping)}
    compresses = row is not None and any(key.role == COMPRESSED_ROPE for key in row.keys)
    names_part = row is not None and _names_part(row)
    if compresses:
        dicts, layers = _of_compressed(h, dicts), {}
    main = dict(layers.get(MAIN) or (next(iter(layers.values())) if layers else dicts))
    theta = main.pop("rope_theta", None)
    theta = theta if theta is not None else _first(config, THETAS)
    local = _first(config, LOCAL_THETAS)
    if isinstance(theta, list):  # one per layer
        theta, local = (_of_kind(theta, config, kind) for kind in (MAIN, "sliding_attention"))
    if theta is None and row is not None:
        theta = _first(defaults, THETAS) or DEFAULT_THETA
    h.rope_theta = as_float(theta, "rope_theta")
    partial = _rotated_part(h, dicts, main, config, defaults, row)
    if not names_part:
        _set_partial(h, partial, defaults)
    elif compresses and config.get("qk_rope_head_dim") is None and partial is not None and h.head_dim:
        h.extra["qk_rope_head_dim"] = int(h.head_dim * (as_float(partial, PARTIAL[0]) or 0))
    scaling = _scaling(main)
    _keep_other_part(h, partial if names_part and (scaling or compresses) else None, config)
    if scaling and scaling["rope_type"] in _STRETCHED and config.get("original_max_position_embeddings"):
        scaling["original_max_position_embeddings"] = config["original_max_position_embeddings"]
    if scaling:
        h.extra["rope_scaling"] = scaling
    others = {name: _layer(value, h.rope_theta) for name, value in layers.items() if name != MAIN}
    for other in others.values():
        _drop_usual_part(h, row, other)
    if local is None:
        local = _first(defaults, LOCAL_THETAS)
    if "sliding_attention" not in others and row is not None and row.nested_rope:
        others["sliding_attention"] = _layer({"rope_theta": local}, h.rope_theta)
    if others:
        h.extra["rope_layers"] = others


def _names_part(row: Architecture) -> bool:
    """Whether the family names the rotated dimensions of a head: qk_rope_head_dim."""
    return any("qk_rope_head_dim" in key.hf for key in row.keys)


def _keep_other_part(h: Hyperparams, partial: object, config: Mapping[str, object]) -> None:
    """Keeps a part of head_dim that is not qk_rope_head_dim: transformers computes frequencies of the part."""
    size, rotated = (as_int(config.get(name), name) for name in ("head_dim", "qk_rope_head_dim"))
    part = as_float(partial, PARTIAL[0])
    if part is not None and size is not None and rotated is not None and int(size * part) != rotated:
        h.extra[PARTIAL[0]] = part


def _of_compressed(h: Hyperparams, dicts: Mapping[str, object]) -> dict[str, object]:
    """The parameters of a network whose compressed layers have a base frequency of their own and the only scaling.

    llama.cpp rotates without an attention factor, and so does transformers unless one is stated.
    """
    own, main = as_mapping(dicts.get("compress")), as_mapping(dicts.get("main"))
    out = {**own, "rope_theta": main.get("rope_theta")} if own and main else dict(dicts)
    if own.get("rope_theta") is not None:
        h.extra["compress_rope_theta"] = own["rope_theta"]
    if own and main and out.get("rope_type") == "yarn" and out.get("attention_factor") is None:
        out["attention_factor"] = attention_factor(h, "yarn", out) or mscale_of(
            as_float(out.get("factor"), "factor") or 1
        )
    if out.get("attention_factor") == 1:
        del out["attention_factor"]
    scaling = _scaling({key: value for key, value in main.items() if key not in ("rope_theta", *PARTIAL)})
    parts = {name: _first(one, PARTIAL) for name, one in (("main", main), ("compress", own))}
    if own and main and parts["main"] != parts["compress"]:
        scaling = {"rope_type": "default", **(scaling or {}), PARTIAL[0]: parts["main"]}
    if own and scaling:  # of the uncompressed layers, which _check_layers refuses
        h.extra["rope_layers"] = {"main": {**scaling, "rope_theta": main.get("rope_theta")}}
    return out


def _of_kind(values: list[object], config: Mapping[str, object], kind: str) -> object:
    """The value of the first layer of a type, from a per-layer list."""
    kinds = config.get("layer_types")
    kinds = kinds if isinstance(kinds, list) else []
    return next((value for value, one in zip(values, kinds, strict=False) if one == kind), None)


def _drop_usual_part(h: Hyperparams, row: Architecture | None, layer: dict[str, object]) -> None:
    """Removes the rotated part of a layer type if it is the family's default."""
    if row is None:
        return
    usual = h.extra.get(PARTIAL[0]) if _shares_part(row) else 1 if halves_full(row) else None
    if usual is not None and layer.get(PARTIAL[0]) == usual:
        del layer[PARTIAL[0]]


def halves_full(row: Architecture) -> bool:
    """Whether sliding-window layers rotate all of a head, the others a part of it."""
    return any(key.role == HALF_ROTARY for key in row.keys)


def _shares_part(row: Architecture) -> bool:
    """Whether all layer types rotate the same part of a head, and a config states it for each."""
    return row.nested_rope and any(key.role == SHARED_ROTARY_DIM for key in row.keys)


def _dicts(config: Mapping[str, object]) -> dict[str, object]:
    """The first non-empty dict of rope parameters."""
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
    """The parameters of one layer type, with explicit theta."""
    out = dict(value)
    theta = as_float(out.pop("rope_theta", None), "rope_theta")
    return {**(_scaling(out) or {"rope_type": "default"}), "rope_theta": theta if theta is not None else main}


def _scaling(found: dict[str, object]) -> dict[str, object] | None:
    old = found.pop("type", None)
    kind = found.pop("rope_type", None) or old or "default"
    if not isinstance(kind, str):
        raise CorruptError("config.json: rope_type is not a string")
    kind = _OLD_KINDS.get(kind, kind)
    if "xdrope_section" in found:
        found.setdefault("mrope_section", found.pop("xdrope_section"))
    return None if kind == "default" and not found else {"rope_type": kind, **found}


def _first(source: Mapping[str, object], names: tuple[str, ...]) -> object:
    return next((source[name] for name in names if source.get(name) is not None), None)


def _rotated_part(
    h: Hyperparams,
    dicts: Mapping[str, object],
    main: dict[str, object],
    config: Mapping[str, object],
    defaults: Mapping[str, object],
    row: Architecture | None,
) -> object:
    """The rotated part of a head, removed from `main`; None if the class rotates all of it."""
    rotates = "" if row is None else row.rotates
    partial = main.pop(PARTIAL[0], None)
    if rotates == WHOLE_HEADS and main.get("rope_type", "default") == "default":
        return None
    if partial is None and row is not None and halves_full(row) and any(isinstance(v, Mapping) for v in dicts.values()):
        return 1.0
    return partial if partial is not None else _partial(h, config, defaults, counts=not dicts or rotates != ROTARY_PART)


def _partial(h: Hyperparams, *sources: Mapping[str, object], counts: bool = True) -> object:
    """The rotated part of a head, from the first spelling present; `counts` also reads those in dimensions."""
    for source in sources:
        if (part := _first(source, PARTIAL)) is not None:
            return part
        count = as_int(_first(source, COUNTS), "rotary_dim") if counts else None
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
    """Sets the rotated part of a head from the count of a GGUF; keeps the default's digits if they yield that count."""
    size = h.head_dim or h.plain_head_dim
    if count is None or not size:
        return
    usual = as_float(_partial(h, defaults), "partial_rotary_factor") or 1.0
    part = usual if int(size * usual) == count else shorten(count / size)
    _set_partial(h, part if int(size * part) == count else count / size, defaults)


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
            f"rope_parameters.rope_type is {kind!r:.40}, which llama.cpp's {row.gguf} does not support", hint=ELSEWHERE
        )
    if _names_part(row) and PARTIAL[0] in h.extra:
        raise RefusedError(
            f"{PARTIAL[0]} is {h.extra[PARTIAL[0]]}: llama.cpp's {row.gguf} rotates by frequencies of qk_rope_head_dim "
            "dimensions, transformers by those of this part of head_dim",
            hint=ELSEWHERE,
        )
    turned = rotary_dim(h) or 0
    if row.rotates == WHOLE_HEADS and kind not in ("default", "proportional") and turned % 2:
        # Such classes rotate a part only if it rounds up to the head, with frequencies of the part.
        raise RefusedError(
            f"partial_rotary_factor is {h.extra.get(PARTIAL[0])}: llama.cpp cannot rotate {turned} values per head",
            hint=ELSEWHERE,
        )
    out: dict[str, tuple[str, object]] = {}
    loader = loader_of(row.gguf)
    if kind in ("linear", "yarn") and loader is not None and loader.window_factor and not row.nested_rope:
        raise RefusedError(
            f"rope_parameters.rope_type is {kind!r}: llama.cpp's {row.gguf} applies no RoPE scaling in sliding-window "
            "layers",
            hint=ELSEWHERE,
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
    local = _sliding(h)
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
        shared = _shares_part(row) or halves_full(row) or name != "sliding_attention"
        told = ("rope_theta",) if shared else ("rope_theta", PARTIAL[0])
        rest = {key: item for key, item in value.items() if key not in told}
        other_base = value.get("rope_theta") != h.rope_theta
        alone = name != "sliding_attention" or not row.nested_rope
        if rest != {"rope_type": "default"} or (other_base and alone):
            raise RefusedError(f"a GGUF of this architecture cannot hold separate rope parameters for {name} layers")


def _sliding(h: Hyperparams) -> object:
    layers = as_mapping(h.extra.get("rope_layers"))
    return as_mapping(layers.get("sliding_attention")).get("rope_theta")


def stretch_of(h: Hyperparams, kind: str, scaling: Mapping[str, object]) -> float:
    """The factor of the base for a fixed `alpha`: alpha^(d / (d - 2)), 1 without one."""
    alpha = as_float(scaling.get("alpha"), "alpha") if kind == "dynamic" else None
    if not alpha or alpha < 0 or not h.head_dim or h.head_dim <= 2:
        return 1.0
    try:
        return float(alpha ** (h.head_dim / (h.head_dim - 2)))
    except OverflowError:
        raise RefusedError(f"rope alpha {alpha:g} gives no valid base frequency") from None


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


_CONTEXT_STEP = 256
"""Contexts of llama.cpp are multiples of this."""


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
            hint=ELSEWHERE,
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
            hint=ELSEWHERE,
        )
    if found is None:
        raise RefusedError(
            f"rope_parameters (rope_type {kind}, factor {factor:g}, mscale_all_dim {named:g}) scales attention scores "
            f"by {scores * scores:.4g} and RoPE by {attention:.4g}, which llama.cpp's {row.gguf} does not support",
            hint=ELSEWHERE,
        )
    return found


def _scales_windows(h: Hyperparams, row: Architecture) -> bool:
    """Whether llama.cpp multiplies sliding-window layers by the factor of the others."""
    loader = loader_of(row.gguf)
    return row.nested_rope and loader is not None and loader.window_factor and "rope_layers" in h.extra


def _is_latent(row: Architecture) -> bool:
    """Whether transformers scales the scores of the family's latent attention by `mscale_all_dim`."""
    return _names_part(row) and not any(key.role == COMPRESSED_ROPE for key in row.keys)


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
        usual = as_float(_first(defaults, LOCAL_THETAS), "rope_theta")
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
        told = attention if computed is None else attention or 1.0
        if told is not None and (computed is None or not yarn.same(computed, told)):
            scaling["attention_factor"] = shorten(told)
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


NEAR_RAMP = 0.08
"""Maximum deviation between llama.cpp's and transformers' interpolation weights in published models (GPT-OSS)."""


def yarn_betas(h: Hyperparams) -> tuple[float, float]:
    """beta_fast and beta_slow."""
    scaling = as_mapping(h.extra.get("rope_scaling"))
    fast, slow = (as_float(scaling.get(name), name) for name in ("beta_fast", "beta_slow"))
    return fast or 32.0, slow or 1.0


def yarn_distance(row: Architecture, h: Hyperparams) -> float:
    """The largest deviation between llama.cpp's and transformers' interpolation weights under YaRN, 0 to 1.

    llama.cpp rounds the bounds of the ramp, and reads them for few families.
    """
    scaling = as_mapping(h.extra.get("rope_scaling"))
    n_dims = as_int(h.extra.get("qk_rope_head_dim"), "qk_rope_head_dim") or rotary_dim(h) or 0
    base, original = h.rope_theta or 0.0, original_context(h, scaling) or 0
    if scaling.get("rope_type") != "yarn" or not 0 < n_dims <= MAX_HEAD_DIM or base <= 1 or original <= 0:
        return 0.0
    loader = loader_of(row.gguf)
    own = loader is not None and "rope.scaling.yarn_beta_fast" in loader.optional
    ours = yarn.ramp(n_dims, base, original, yarn_betas(h), whole=scaling.get("truncate") is not False)
    theirs = yarn.ramp(n_dims, base, original, yarn_betas(h) if own else (32.0, 1.0), whole=True)
    return max(abs(a - b) for a, b in zip(ours, theirs, strict=True))


def to_hf(h: Hyperparams, row: Architecture, defaults: Mapping[str, object]) -> dict[str, object]:
    """The rope keys of a config.json, in the spellings of transformers 4 and 5."""
    theta = h.rope_theta if h.rope_theta is not None else DEFAULT_THETA
    scaling = scaling_of(h)
    part = h.extra.get("partial_rotary_factor")
    if part is None and _first(defaults, PARTIAL) is not None:
        part = 1.0
    main: dict[str, object] = {"rope_type": "default", **scaling, "rope_theta": theta}
    if part is not None:
        main["partial_rotary_factor"] = part
    out: dict[str, object] = {"rope_theta": theta, "rope_scaling": scaling or None, "rope_parameters": main}
    if row.nested_rope:
        shared = {PARTIAL[0]: part} if part is not None and _shares_part(row) else {}
        shared = {PARTIAL[0]: 1.0} if halves_full(row) else shared
        others = as_mapping(h.extra.get("rope_layers"))
        out["rope_parameters"] = {MAIN: main, **{name: {**shared, **as_mapping(v)} for name, v in others.items()}}
        local = next((name for name in LOCAL_THETAS if name in defaults), None)
        if local in (None, _LOCAL) or _shares_part(row):  # a flat dict would apply to all layers
            del out["rope_scaling"]
        if local is not None and _sliding(h) is not None:
            out[local] = _sliding(h)
    usual = as_float(_partial(h, defaults), PARTIAL[0]) if part is not None else None
    other_part = bool(scaling) and part != usual and not row.nested_rope
    if "llama_4_scaling_beta" in scaling or other_part:  # the older spelling would lose the rotated part
        out.pop("rope_scaling", None)
    name = next((key.hf[0] for key in row.keys if key.role == ROTARY_DIM and key.hf), PARTIAL[0])
    if part is not None and "rope_scaling" in out:
        out[name] = rotary_dim(h) if name in COUNTS else part
    named = next((name for name in THETAS if name in defaults), THETAS[0])
    if own := [key.hf[0] for key in row.keys if key.role == ROPE and key.hf]:
        named = own[0]
        out[named] = theta
    return {key: value for key, value in out.items() if key not in THETAS or key == named}


# --- what the parameters mean in numbers ---


def scaling_of(h: Hyperparams) -> dict[str, object]:
    """The scaling dict, {} if missing. Raises CorruptError for another type."""
    scaling = h.extra.get("rope_scaling") or {}
    if not isinstance(scaling, Mapping):
        raise CorruptError("rope_scaling is not an object")
    return dict(scaling)


def rotary_dim(h: Hyperparams) -> int | None:
    """Rotated dimensions of a head in full-attention layers; None if the head size is unknown."""
    part, size = as_float(h.extra.get("partial_rotary_factor"), "partial_rotary_factor"), full_head_dim(h)
    return size if size is None or part is None else int(size * part)


def full_head_dim(h: Hyperparams) -> int | None:
    """Head size of full-attention layers; sliding-window layers may have smaller heads."""
    return as_int(h.extra.get("global_head_dim"), "global_head_dim") or h.head_dim


def original_context(h: Hyperparams, scaling: Mapping[str, object]) -> int | None:
    """Positions before scaling: from the scaling dict, the config, else all positions."""
    key = "original_max_position_embeddings"
    value = scaling.get(key) or h.extra.get(key) or h.max_position_embeddings
    return as_int(value, key)


def mscale_of(factor: float, mscale: float = 1.0) -> float:
    """YaRN's attention factor for a scaling `factor`."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def attention_factor(h: Hyperparams, kind: str, scaling: Mapping[str, object]) -> float | None:
    """The factor of cosines and sines, as transformers computes it; None for YaRN's default."""
    for name in ("attention_factor", "attn_factor"):
        if (number := as_float(scaling.get(name), name)) is not None:
            return number if number > 0 else None
    factor = as_float(scaling.get("factor"), "factor")
    if kind == "longrope":
        original = original_context(h, scaling)
        if not original or original < 2:
            return None
        if factor is None and h.max_position_embeddings:
            factor = h.max_position_embeddings / original
        return 1.0 if not factor or factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    mscale, all_dim = (as_float(scaling.get(name), name) for name in ("mscale", "mscale_all_dim"))
    if factor and mscale and all_dim and mscale > 0 and all_dim > 0:
        return mscale_of(factor, mscale) / mscale_of(factor, all_dim)
    return None


def reads_factors(row: Architecture, tensor: str) -> bool:
    """Whether llama.cpp's loader and graph of the family read the rope factor tensor."""
    loader = loader_of(row.gguf)
    return loader is None or tensor in loader.rope_factors
