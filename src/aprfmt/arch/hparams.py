"""Hyper-parameters of every container: out of its keys, and back into them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sized
from dataclasses import replace
from typing import Any

from aprfmt.arch import keys, rope
from aprfmt.arch.fields import FIELDS, GgufKey, as_float, as_id, as_int
from aprfmt.arch.hyperparams import Hyperparams
from aprfmt.arch.row import Architecture
from aprfmt.arch.table import ARCHITECTURES, find, find_gguf
from aprfmt.errors import CorruptError, RefusedError, UnmappedError


def from_hf_config(config: Mapping[str, Any]) -> Hyperparams:
    """Hyper-parameters of a config.json; absent keys get their model type's defaults. Raises CorruptError.

    Of a multimodal config the language model's part is taken (`extra["text_of"]` then holds its model type).
    A list of numbers, one a layer, for a typed field stays in `extra` under its config name, and the field is what
    all the layers share, None where they differ.
    """
    h = Hyperparams(hf_architecture=_first_class(config), hf_model_type=_text(config.get("model_type")))
    whole, config = config, _language_part(config)
    whole_type = h.hf_model_type
    text_type = _text(config.get("model_type"))
    row = find(hf_class=h.hf_architecture, model_type=whole_type, config=config)
    row = row or find(model_type=text_type, config=config)
    h.hf_model_type = text_type or whole_type
    h.architecture = row.id if row else h.hf_model_type
    defaults = keys.defaults_of(row, text_type, whole_type) if row else {}
    keys.read(h, row or keys.unknown(None), config, defaults)
    rope.read(h, config, defaults, row)
    h.rope_type = row.rope_type if row else None
    full = {**defaults, **config}
    dtype = full.get("dtype", full.get("torch_dtype"))
    if isinstance(dtype, str):
        h.extra["dtype"] = dtype
    if text_type != whole_type and whole_type:
        h.extra["text_of"] = whole_type
    tied = full.get("tie_word_embeddings")
    # Where the whole and its part differ, it depends on the class and on its age; the tensors tell.
    agreed = whole.get("tie_word_embeddings", tied) == tied
    h.tied = tied if agreed and isinstance(tied, bool) else None
    if (
        "pad_token_id" in config
    ):  # null is no absent key: some classes have a default that a small vocabulary lacks
        h.extra["pad_token_id"] = config["pad_token_id"]
    _token_ids(h, full)
    return h


_LANGUAGE_PARTS = ("text_config", "llm_config", "language_config")
_OF_THE_WHOLE = (
    "tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id", "dtype", "torch_dtype",
    "quantization_config", "model_type", "vision_config",
)  # fmt: skip


def _language_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config of the language model: a part of a multimodal one, with what only the whole says."""
    part = next((p for key in _LANGUAGE_PARTS if isinstance(p := config.get(key), Mapping) and p), None)
    if part is None:
        return config
    return {**{key: config[key] for key in _OF_THE_WHOLE if key in config}, **part}


def from_gguf(kv: Mapping[str, Any], tensor_names: Collection[str] = ()) -> Hyperparams:
    """Hyper-parameters of GGUF key-value pairs; `tensor_names` tell ties and biases. Raises CorruptError."""
    word = _text(kv.get("general.architecture"))
    row = find_gguf(kv, tensor_names)
    h = Hyperparams(architecture=row.id if row else word, rope_type=row.rope_type if row else None)
    defaults = keys.defaults_of(row) if row else {}
    keys.from_gguf(h, row or keys.unknown(word), kv, tensor_names, defaults)
    if h.vocab_size is None and isinstance(tokens := kv.get("tokenizer.ggml.tokens"), Sized):
        h.vocab_size = len(tokens)
    h.bos_token_id = as_id(kv.get("tokenizer.ggml.bos_token_id"), "tokenizer.ggml.bos_token_id")
    h.eos_token_id = as_id(kv.get("tokenizer.ggml.eos_token_id"), "tokenizer.ggml.eos_token_id")
    pad = as_id(kv.get("tokenizer.ggml.padding_token_id"), "tokenizer.ggml.padding_token_id")
    if row is not None:
        h.extra["pad_token_id"] = pad
    if tensor_names:
        h.tied = "output.weight" not in tensor_names
    return h


def from_apr(metadata: Mapping[str, Any]) -> Hyperparams:
    """Hyper-parameters of APR metadata: typed fields, aliases, `to_apr`'s own, the reference's `hf_config`.

    Aliases of a wrong type are passed over, as the reference does. Raises CorruptError for bad typed fields.
    """
    stored = metadata.get("hf_config")
    base = from_hf_config(stored) if isinstance(stored, Mapping) else Hyperparams()
    h = Hyperparams(extra=base.extra, tied=base.tied)
    for name in ("architecture", "hf_architecture", "hf_model_type"):
        setattr(h, name, _text(metadata.get(name)) or getattr(base, name))
    ours = dict(_mapping(metadata.get(EXTRA_KEY)))
    row = find(
        hf_class=h.hf_architecture,
        model_type=h.hf_model_type or h.architecture,
        gguf=h.architecture,
        config=ours or base.extra,
    )
    row = row or ARCHITECTURES.get(h.architecture or "")
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
    if not isinstance(ours.get("rope_scaling", {}), Mapping):
        raise CorruptError(f"{EXTRA_KEY}: rope_scaling is no object")
    _token_ids(h, {key: ours.pop(key, metadata.get(f"tokenizer.{key}")) for key in _TOKEN_IDS})
    h.extra |= ours
    keys.derive(h)
    if row is not None:
        keys.complete(h, row, keys.defaults_of(row, h.hf_model_type))
    return h


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
    """The architecture's GGUF keys, in the order of its row.

    `vocab_size` replaces the field; `file_type` (llama.cpp's number) adds `general.file_type` at its place.
    Raises RefusedError for what is missing or has no GGUF form; with `complete` False it is left out.
    """
    missing = _missing(h, arch)
    if missing and complete:
        raise RefusedError(
            f"a GGUF needs {', '.join(missing)}, which the source does not give",
            hint=f"set it first: apr stamp FILE --set {missing[0]}=VALUE -o OUT.apr",
        )
    if vocab_size is not None:
        h = replace(h, vocab_size=vocab_size)
    return keys.to_gguf(h, arch, keys.defaults_of(arch, h.hf_model_type), file_type, complete)


def to_hf_config(h: Hyperparams) -> dict[str, Any]:
    """A config.json that transformers 4 and 5 load, sorted. Raises UnmappedError, RefusedError (dims)."""
    row = _row_of(h)
    if row is None:
        raise UnmappedError(
            f"architecture {h.architecture!r} has no Hugging Face class in the architecture table"
        )
    missing = _missing(h, row) + (["vocab_size"] if h.vocab_size is None else [])
    if missing:
        raise RefusedError(f"a config.json needs {', '.join(missing)}, which the source does not give")
    hf_class, model_type = hf_identity(h, row)
    config = keys.to_hf(h, row, keys.defaults_of(row, model_type))
    config |= {
        "architectures": [hf_class],
        "model_type": model_type,
        "tie_word_embeddings": bool(h.tied),
        "bos_token_id": h.bos_token_id,
        "eos_token_id": h.extra.get("eos_token_id", h.eos_token_id),
    }
    config.pop("pooling", None)  # stands in files of its own, see formats.hf_pooling
    return dict(sorted({**config, **row.config}.items()))


def _row_of(h: Hyperparams) -> Architecture | None:
    row = find(hf_class=h.hf_architecture, model_type=h.hf_model_type, config=h.extra)
    return row or ARCHITECTURES.get(h.architecture or "") or find(gguf=h.architecture)


def _missing(h: Hyperparams, row: Architecture) -> list[str]:
    """Sizes that the row's keys name and the source does not give."""
    named = {
        key.field: key.hf[0]
        for key in row.keys
        if key.field in _REQUIRED and key.constant is None and key.hf and not key.via
    }
    return [
        name
        for name in _REQUIRED
        if name in named and getattr(h, name) is None and named[name] not in h.extra
    ]


def hf_identity(h: Hyperparams, row: Architecture) -> tuple[str, str]:
    """(class, model type) of the network's config.json: the source's own, else those of its `row`."""
    model_type = h.hf_model_type or row.model_type
    if "text_of" in h.extra:
        return _class_of(row, model_type), model_type if model_type in row.model_types else row.model_type
    hf_class = h.hf_architecture or (_class_of(row, h.hf_model_type) if h.hf_model_type else row.hf_class)
    return hf_class, _MODEL_TYPE_OF.get(model_type, model_type)


def _class_of(row: Architecture, model_type: str) -> str:
    """The class of the row that is named like the model type, else the row's own."""
    word = model_type.replace("_text", "").replace("_", "").lower()
    named = (name for name in row.hf_classes if name.lower().removesuffix("forcausallm") == word)
    return next(named, row.hf_class)


def active_window(h: Hyperparams) -> int | None:
    """The sliding attention window in positions; None where the network has none or does not use it."""
    row = _row_of(h)
    defaults = keys.defaults_of(row, h.hf_model_type) if row else {}
    used = h.extra.get("use_sliding_window", defaults.get("use_sliding_window"))
    return None if used is False else as_int(h.extra.get("sliding_window"), "sliding_window") or None


EXTRA_KEY = "aprfmt.hparams"
"""APR metadata key of what has no typed field."""

_TOKEN_IDS = ("bos_token_id", "eos_token_id")
_REQUIRED = (
    "num_layers", "max_position_embeddings", "hidden_size", "intermediate_size", "num_heads", "rms_norm_eps",
)  # fmt: skip
# Model types that no transformers class registers.
_MODEL_TYPE_OF = {"smollm": "llama", "smollm2": "llama"}


def _first_class(config: Mapping[str, Any]) -> str | None:
    classes = config.get("architectures")
    return _text(classes[0]) if isinstance(classes, list) and classes else None


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _token_ids(h: Hyperparams, source: Mapping[str, Any]) -> None:
    for key in _TOKEN_IDS:
        value = source.get(key)
        setattr(h, key, as_id(value, key))
        if isinstance(value, list) and value:
            h.extra[key] = value
