"""Hyper-parameters under one set of names, for every container."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sized
from dataclasses import dataclass, field
from typing import Any

from aprfmt.arch import rope
from aprfmt.arch.fields import (
    COMMON_DEFAULTS,
    FIELDS,
    HF_DEFAULTS,
    HF_EXTRA,
    GgufKey,
    as_float,
    as_id,
    as_int,
    float_key,
    from_f32,
    int_key,
)
from aprfmt.arch.table import Architecture, find
from aprfmt.errors import CorruptError, RefusedError, UnmappedError


@dataclass(slots=True)
class Hyperparams:
    """Dimensions and constants of a network; None where the source does not say.

    Fields named like the typed APR metadata fields hold the same values. `extra` holds everything else that
    the network needs, under Hugging Face config names: `rope_scaling` (with `rope_type`, without theta;
    absent where positions are not scaled), `head_dim` where the source gives it, lists of token ids, ...

    Attributes:
        architecture: row id of arch.table ("llama", "qwen2", ...), or the source's own word when no row fits.
        hf_architecture: class name of the Hugging Face model, `LlamaForCausalLM`.
        hf_model_type: config.json's `model_type`.
        head_dim: explicit head size, or hidden_size / num_heads.
        rope_type: 0 adjacent pairs, 2 split halves (NeoX), as Hugging Face ORDERED rows are rotated.
        tied: whether the output head is the embedding; None when unknown.
        bos_token_id, eos_token_id: first id; lists stay in `extra`.
    """

    architecture: str | None = None
    hf_architecture: str | None = None
    hf_model_type: str | None = None
    hidden_size: int | None = None
    num_layers: int | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None
    vocab_size: int | None = None
    intermediate_size: int | None = None
    max_position_embeddings: int | None = None
    rope_theta: float | None = None
    rope_type: int | None = None
    rms_norm_eps: float | None = None
    head_dim: int | None = None
    num_experts: int | None = None
    num_experts_per_tok: int | None = None
    moe_intermediate_size: int | None = None
    tied: bool | None = None
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    extra: dict[str, Any] = field(default_factory=dict)


def from_hf_config(config: Mapping[str, Any]) -> Hyperparams:
    """Hyper-parameters of a config.json; absent keys get their model type's defaults. Raises CorruptError."""
    h = Hyperparams(hf_architecture=_first_class(config), hf_model_type=_text(config.get("model_type")))
    row = find(hf_class=h.hf_architecture, model_type=h.hf_model_type)
    h.architecture = row.id if row else h.hf_model_type
    full = {**_hf_defaults(row, h.hf_model_type), **config}
    for f in FIELDS:
        value = next((full[key] for key in f.hf if full.get(key) is not None), None)
        setattr(h, f.name, (as_float if f.is_float else as_int)(value, f.hf[0]))
    h.rope_theta, scaling = rope.read_hf(config)
    if row is not None:
        h.rope_theta = h.rope_theta if h.rope_theta is not None else rope.DEFAULT_THETA
        h.rope_type = row.rope_type
    h.extra = {key: full[key] for key in HF_EXTRA if full.get(key) is not None}
    h.extra |= {key: value for key, value in (("rope_scaling", scaling), ("head_dim", h.head_dim)) if value}
    dtype = full.get("dtype", full.get("torch_dtype"))
    if isinstance(dtype, str):
        h.extra["dtype"] = dtype
    tied = full.get("tie_word_embeddings")
    h.tied = tied if isinstance(tied, bool) else None
    _token_ids(h, full)
    return _derive(h)


def from_gguf(kv: Mapping[str, Any], tensor_names: Collection[str] = ()) -> Hyperparams:
    """Hyper-parameters of GGUF key-value pairs; `tensor_names` tell ties and biases. Raises CorruptError."""
    word = _text(kv.get("general.architecture"))
    row = find(gguf=word)
    h = Hyperparams(architecture=row.id if row else word, rope_type=row.rope_type if row else None)
    prefix = word or ""
    for f in FIELDS:
        key = f"{prefix}.{f.gguf}"
        value = _uniform(kv.get(key))
        setattr(h, f.name, from_f32(value, key) if f.is_float else as_int(value, key))
    if h.vocab_size is None and isinstance(tokens := kv.get("tokenizer.ggml.tokens"), Sized):
        h.vocab_size = len(tokens)
    h.bos_token_id = as_id(kv.get("tokenizer.ggml.bos_token_id"), "tokenizer.ggml.bos_token_id")
    h.eos_token_id = as_id(kv.get("tokenizer.ggml.eos_token_id"), "tokenizer.ggml.eos_token_id")
    if tensor_names:
        h.tied = "output.weight" not in tensor_names
    h.extra = _gguf_extra(h, kv, prefix, tensor_names)
    return _derive(h)


def _gguf_extra(
    h: Hyperparams, kv: Mapping[str, Any], prefix: str, tensor_names: Collection[str]
) -> dict[str, Any]:
    window = as_int(_uniform(kv.get(f"{prefix}.attention.sliding_window")), "sliding_window")
    extra = {
        "rope_scaling": rope.from_gguf(kv, prefix),
        "head_dim": h.head_dim,
        "sliding_window": window,
        "use_sliding_window": True if window and prefix.startswith("qwen") else None,
        "attention_bias": True if "blk.0.attn_q.bias" in tensor_names and prefix != "qwen2" else None,
        "mlp_bias": True if "blk.0.ffn_gate.bias" in tensor_names else None,
    }
    return {key: value for key, value in extra.items() if value}


def from_apr(metadata: Mapping[str, Any]) -> Hyperparams:
    """Hyper-parameters of APR metadata: typed fields, aliases, `to_apr`'s own, the reference's `hf_config`.

    Aliases of a wrong type are passed over, as the reference does. Raises CorruptError for bad typed fields.
    """
    stored = metadata.get("hf_config")
    base = from_hf_config(stored) if isinstance(stored, Mapping) else Hyperparams()
    h = Hyperparams(extra=base.extra, tied=base.tied)
    for name in ("architecture", "hf_architecture", "hf_model_type"):
        setattr(h, name, _text(metadata.get(name)) or getattr(base, name))
    row = find(hf_class=h.hf_architecture, model_type=h.hf_model_type or h.architecture, gguf=h.architecture)
    h.architecture = row.id if row else h.architecture
    for f in FIELDS:
        value = metadata.get(f.name)
        if value is None:
            value = next(
                (v for key in f.aliases if _is_number(v := metadata.get(key))), getattr(base, f.name)
            )
        setattr(h, f.name, (as_float if f.is_float else as_int)(value, f.name))
    h.rope_type = as_int(metadata.get("rope_type"), "rope_type")
    tied = metadata.get("tied_embeddings")
    h.tied = tied if isinstance(tied, bool) else base.tied
    ours = metadata.get(EXTRA_KEY)
    ours = dict(ours) if isinstance(ours, Mapping) else {}
    if not isinstance(ours.get("rope_scaling", {}), Mapping):
        raise CorruptError(f"{EXTRA_KEY}: rope_scaling is no object")
    _token_ids(h, {key: ours.pop(key, metadata.get(f"tokenizer.{key}")) for key in _TOKEN_IDS})
    h.extra |= ours
    return _derive(h)


def to_apr(h: Hyperparams) -> dict[str, Any]:
    """APR metadata: typed fields, `tied_embeddings`, the rest under `aprfmt.hparams`; no nulls."""
    out: dict[str, Any] = {
        "architecture": h.hf_model_type or h.architecture,
        "hf_architecture": h.hf_architecture,
        "hf_model_type": h.hf_model_type,
        "rope_type": h.rope_type,
        **{f.name: getattr(h, f.name) for f in FIELDS},
        "tied_embeddings": h.tied,
    }
    extra = {key: getattr(h, key) for key in _TOKEN_IDS if getattr(h, key) is not None} | h.extra
    out[EXTRA_KEY] = extra or None
    return {key: value for key, value in out.items() if value is not None}


def to_gguf(
    h: Hyperparams,
    arch: Architecture,
    *,
    vocab_size: int | None = None,
    file_type: int | None = None,
    complete: bool = True,
) -> list[GgufKey]:
    """The architecture's GGUF keys, in the order and with the types of llama.cpp's converter.

    `vocab_size` replaces the field; `file_type` (llama.cpp's number) adds `general.file_type` at its place. A
    sliding window is written too, which llama.cpp ignores for these families. Raises RefusedError for what is
    missing or has no GGUF form; with `complete` False it is left out.
    """
    missing = [name for name in _REQUIRED if getattr(h, name) is None]
    if missing and complete:
        raise RefusedError(
            f"a GGUF needs {', '.join(missing)}, which the source does not give",
            hint=f"set it first: apr stamp FILE --set {missing[0]}=VALUE -o OUT.apr",
        )
    explicit_head = h.extra.get("head_dim") or arch.id == "qwen3" or h.head_dim != _plain_head_dim(h)
    late = {"vocab_size", "head_dim"}
    keys: list[GgufKey] = []
    for f in FIELDS:
        value = getattr(h, f.name)
        if f.name == "rope_theta":
            try:
                keys += rope.to_gguf(h.extra.get("rope_scaling"), arch.gguf, h.max_position_embeddings)
            except RefusedError:
                if complete:
                    raise
        if value is not None and f.name not in late:
            keys.append((float_key if f.is_float else int_key)(f"{arch.gguf}.{f.gguf}", value))
    if explicit_head and h.head_dim is not None:
        keys += [int_key(f"{arch.gguf}.attention.{name}_length", h.head_dim) for name in ("key", "value")]
    if file_type is not None:
        keys.append(int_key("general.file_type", file_type))
    own = {
        "vocab_size": vocab_size if vocab_size is not None else h.vocab_size,
        "rope.dimension_count": h.head_dim,
    }
    keys += [int_key(f"{arch.gguf}.{name}", own[name]) for name in arch.gguf_keys if own[name] is not None]
    if window := active_window(h):
        keys.append(int_key(f"{arch.gguf}.attention.sliding_window", window))
    return keys


def to_hf_config(h: Hyperparams) -> dict[str, Any]:
    """A config.json that transformers 4 and 5 load, sorted. Raises UnmappedError, RefusedError (dims)."""
    row = find(hf_class=h.hf_architecture, model_type=h.hf_model_type, gguf=h.architecture)
    if row is None:
        raise UnmappedError(
            f"architecture {h.architecture!r} has no Hugging Face class in the architecture table"
        )
    missing = [name for name in (*_REQUIRED, "vocab_size") if getattr(h, name) is None]
    if missing:
        raise RefusedError(f"a config.json needs {', '.join(missing)}, which the source does not give")
    hf_class, model_type = hf_identity(h, row)
    theta = h.rope_theta if h.rope_theta is not None else rope.DEFAULT_THETA
    scaling = h.extra.get("rope_scaling")
    config: dict[str, Any] = {"hidden_act": "silu", **_switches(h, model_type)}
    config |= {f.hf[0]: value for f in FIELDS if (value := getattr(h, f.name)) is not None}
    config |= {key: value for key, value in h.extra.items() if key not in ("rope_scaling", "head_dim")}
    if model_type == "qwen2" and h.head_dim == _plain_head_dim(h):
        del config["head_dim"]
    config |= {
        "architectures": [hf_class],
        "model_type": model_type,
        "rope_theta": theta,
        "rope_scaling": scaling,
        "rope_parameters": {"rope_type": "default", **(scaling or {}), "rope_theta": theta},
        "tie_word_embeddings": bool(h.tied),
        "bos_token_id": h.bos_token_id,
        "eos_token_id": h.extra.get("eos_token_id", h.eos_token_id),
    }
    return dict(sorted(config.items()))


def hf_identity(h: Hyperparams, row: Architecture) -> tuple[str, str]:
    """(class, model type) of the network's config.json: the source's own, else those of its `row`."""
    model_type = h.hf_model_type or row.model_type
    hf_class = h.hf_architecture or row.hf_class
    if row.id == "llama" and not h.hf_model_type and not h.hf_architecture and h.extra.get("sliding_window"):
        model_type, hf_class = "mistral", "MistralForCausalLM"
    return hf_class, _MODEL_TYPE_OF.get(model_type, model_type)


def active_window(h: Hyperparams) -> int | None:
    """The sliding attention window in positions; None where the network has none or does not use it."""
    window = as_int(h.extra.get("sliding_window"), "sliding_window")
    off = h.extra.get("use_sliding_window") is False or (
        h.architecture in ("qwen2", "qwen3") and not h.extra.get("use_sliding_window")
    )
    return None if off or not window else window


EXTRA_KEY = "aprfmt.hparams"
"""APR metadata key of what has no typed field."""

_TOKEN_IDS = ("bos_token_id", "eos_token_id")
_REQUIRED = (
    "num_layers", "max_position_embeddings", "hidden_size", "intermediate_size", "num_heads", "rms_norm_eps",
)  # fmt: skip
# Model types that no transformers class registers.
_MODEL_TYPE_OF = {"smollm": "llama", "smollm2": "llama"}


def _switches(h: Hyperparams, model_type: str) -> dict[str, Any]:
    """Keys whose absence would not mean what the network is, by model type."""
    if model_type == "mistral":
        return {"sliding_window": None}
    if model_type == "llama":
        return {"attention_bias": False, "mlp_bias": False}
    switches: dict[str, Any] = {"use_sliding_window": False}
    return switches | ({"attention_bias": False} if model_type == "qwen3" else {})


def _hf_defaults(row: Architecture | None, model_type: str | None) -> dict[str, Any]:
    if row is None:
        return {}
    return {**COMMON_DEFAULTS, **HF_DEFAULTS.get(model_type or row.model_type, HF_DEFAULTS[row.model_type])}


def _first_class(config: Mapping[str, Any]) -> str | None:
    classes = config.get("architectures")
    return _text(classes[0]) if isinstance(classes, list) and classes else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _uniform(value: Any) -> Any:
    """A per-layer list as the one value all layers share; None where they differ."""
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        return value
    items = list(value)
    return items[0] if items and all(item == items[0] for item in items) else None


def _token_ids(h: Hyperparams, source: Mapping[str, Any]) -> None:
    for key in _TOKEN_IDS:
        value = source.get(key)
        setattr(h, key, as_id(value, key))
        if isinstance(value, list) and value:
            h.extra[key] = value


def _plain_head_dim(h: Hyperparams) -> int | None:
    return h.hidden_size // h.num_heads if h.hidden_size and h.num_heads else None


def _derive(h: Hyperparams) -> Hyperparams:
    if h.num_kv_heads is None:
        h.num_kv_heads = h.num_heads
    if h.head_dim is None:
        h.head_dim = _plain_head_dim(h)
    return h
