"""Rotary embedding parameters: Hugging Face dicts, and what they mean in numbers. rope_gguf.py has the GGUF keys.

In Hyperparams they are `rope_theta` and, in `extra`:

    rope_scaling           {"rope_type": ..., ...} without theta; absent without scaling
    partial_rotary_factor  rotated part of a head; absent if all of it is rotated
    rope_layers            {layer type: {"rope_type": ..., "rope_theta": ...}} of layers other than full_attention
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from aprfmt.arch import yarn
from aprfmt.arch.fields import as_float, as_int, as_mapping, shorten
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

THETAS = ("rope_theta", "rotary_emb_base", "global_rope_theta", "rope_global_theta")
_LOCAL = "local_rope_theta"
LOCAL_THETAS = ("rope_local_base_freq", _LOCAL, "rope_local_theta", "swa_rope_theta")
PARTIAL = ("partial_rotary_factor", "rotary_pct", "rope_pct", "rope_percent")
COUNTS = ("rotary_dim", "rotary_ndims")
NAMES = frozenset((*THETAS, *LOCAL_THETAS, *PARTIAL, *COUNTS, "rope_parameters", "rope_scaling"))
"""config.json keys that this module reads and writes."""

_OLD_KINDS = {"su": "longrope", "mrope": "default", "xdrope": "dynamic"}
_STRETCHED = ("llama3", "yarn", "longrope")


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
    names_part = row is not None and names_rotated_part(row)
    if compresses:
        dicts, layers = _of_compressed(h, dicts), {}
    main = dict(layers.get(MAIN) or (next(iter(layers.values())) if layers else dicts))
    theta = main.pop("rope_theta", None)
    theta = theta if theta is not None else first_of(config, THETAS)
    local = first_of(config, LOCAL_THETAS)
    if isinstance(theta, list):  # one per layer
        theta, local = (_of_kind(theta, config, kind) for kind in (MAIN, "sliding_attention"))
    if theta is None and row is not None:
        theta = first_of(defaults, THETAS) or DEFAULT_THETA
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
        local = first_of(defaults, LOCAL_THETAS)
    if "sliding_attention" not in others and row is not None and row.nested_rope:
        others["sliding_attention"] = _layer({"rope_theta": local}, h.rope_theta)
    if others:
        h.extra["rope_layers"] = others


def names_rotated_part(row: Architecture) -> bool:
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
    parts = {name: first_of(one, PARTIAL) for name, one in (("main", main), ("compress", own))}
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
    usual = h.extra.get(PARTIAL[0]) if shares_rotated_part(row) else 1 if halves_full(row) else None
    if usual is not None and layer.get(PARTIAL[0]) == usual:
        del layer[PARTIAL[0]]


def halves_full(row: Architecture) -> bool:
    """Whether sliding-window layers rotate all of a head, the others a part of it."""
    return any(key.role == HALF_ROTARY for key in row.keys)


def shares_rotated_part(row: Architecture) -> bool:
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


def first_of(source: Mapping[str, object], names: tuple[str, ...]) -> object:
    """The value of the first of these keys that is set; None without one."""
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
        if (part := first_of(source, PARTIAL)) is not None:
            return part
        count = as_int(first_of(source, COUNTS), "rotary_dim") if counts else None
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


def sliding_theta(h: Hyperparams) -> object:
    """Base frequency of sliding-window layers; None if they have no parameters of their own."""
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
    if part is None and first_of(defaults, PARTIAL) is not None:
        part = 1.0
    main: dict[str, object] = {"rope_type": "default", **scaling, "rope_theta": theta}
    if part is not None:
        main["partial_rotary_factor"] = part
    out: dict[str, object] = {"rope_theta": theta, "rope_scaling": scaling or None, "rope_parameters": main}
    if row.nested_rope:
        shared = {PARTIAL[0]: part} if part is not None and shares_rotated_part(row) else {}
        shared = {PARTIAL[0]: 1.0} if halves_full(row) else shared
        others = as_mapping(h.extra.get("rope_layers"))
        out["rope_parameters"] = {MAIN: main, **{name: {**shared, **as_mapping(v)} for name, v in others.items()}}
        local = next((name for name in LOCAL_THETAS if name in defaults), None)
        if local in (None, _LOCAL) or shares_rotated_part(row):  # a flat dict would apply to all layers
            del out["rope_scaling"]
        if local is not None and sliding_theta(h) is not None:
            out[local] = sliding_theta(h)
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
