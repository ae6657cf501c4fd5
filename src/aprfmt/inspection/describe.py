"""What a model file is, as the JSON of `apr inspect`: from index and metadata, no tensor is decoded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from aprfmt.arch.names import spellings
from aprfmt.codecs.dtypes import n_elements
from aprfmt.formats import apr2
from aprfmt.formats.gguf import GgufNative
from aprfmt.model import Model, Tensor
from aprfmt.tokenizer.model import Tokenizer

FOOTER_LIMIT_BYTES = 2 << 30
"""Up to this size a whole-file checksum is verified unasked; above, it is a job for `apr validate`."""

ALWAYS_PRESENT = ("license", "data_source", "data_license", "hf_architecture", "hf_model_type")

# The typed APR fields that Model.hparams holds under the same name.
_HPARAM_FIELDS = (
    *("architecture", "hf_architecture", "hf_model_type", "hidden_size", "num_layers", "num_heads"),
    *("num_kv_heads", "vocab_size", "intermediate_size", "max_position_embeddings", "rope_theta"),
    *("rope_type", "rms_norm_eps", "head_dim", "num_experts", "num_experts_per_tok"),
    "moe_intermediate_size",
)

_REQUIRED_DIMS = ("hidden_size", "num_layers", "num_heads", "intermediate_size")

# Dtypes that every decoder of the reference runtime reads with their right meaning.
_RUNTIME_DTYPES = ("F32", "F16", "BF16", "Q4_K", "Q6_K")


def describe(model: Model, *, quality: bool = False) -> dict[str, Any]:
    """The body of `apr inspect --json`; `quality` adds the score and verifies checksums of any size."""
    entries = model.tensors.entries
    metadata = typed_metadata(model)
    checksum = checksums(model, always=quality)
    tokenizer = tokenizer_info(model)
    body: dict[str, Any] = {
        "file": str(model.path),
        "format": model.label,
        "version": model.version,
        "size_bytes": model.size_bytes,
        "tensor_count": len(entries),
        "param_count": sum(n_elements(t.shape) for t in entries),
        "checksum": checksum,
        "flags": dict(model.flags),
        "architecture": model.hparams.architecture or metadata.get("architecture"),
        "metadata": metadata,
        "dtypes": dtype_table(entries),
        "tokenizer": tokenizer,
        "compat": compatibility(model, metadata),
        "warnings": [*model.warnings, *_unread_card(model)],
    }
    if quality:
        from aprfmt.inspection.quality import quality_score

        body["quality"] = quality_score(model, metadata, checksum, tokenizer)
    return body


def _unread_card(model: Model) -> list[str]:
    if model.convention != "hf":
        return []
    from aprfmt.provenance import provenance

    return provenance.read(model).warnings


def checksums(model: Model, *, always: bool = True) -> dict[str, str]:
    """Header and footer checksum; the footer of a huge file is "unchecked" unless `always`."""
    if not always and model.convention == "apr" and model.size_bytes > FOOTER_LIMIT_BYTES:
        return {"header": "ok", "footer": "unchecked"}
    return model.checksum()


def typed_metadata(model: Model) -> dict[str, Any]:
    """The typed fields of an APR v2 file that are set, for other containers what says the same.

    The five provenance and identity fields of ALWAYS_PRESENT are there as None when nothing is known.
    """
    is_apr = model.convention == "apr" and model.format != "apr-v1"
    fields = _from_apr(model.metadata) if is_apr else _from_other(model)
    hparams = model.hparams
    for name in _HPARAM_FIELDS:
        value = getattr(hparams, name)
        if value is not None:
            fields.setdefault(name, value)
    return fields | {name: fields.get(name) for name in ALWAYS_PRESENT}


def _from_apr(metadata: Mapping[str, Any]) -> dict[str, Any]:
    from aprfmt.formats.apr_metadata import TYPED_FIELDS

    return {name: metadata[name] for name in TYPED_FIELDS if metadata.get(name) is not None}


def _from_other(model: Model) -> dict[str, Any]:
    metadata = model.metadata
    if model.format == "apr-v1":
        found = {"name": metadata.get("model_name"), "description": metadata.get("description")}
        found["created_at"] = metadata.get("created_at")
        card = metadata.get("model_card")
        found["license"] = card.get("license") if isinstance(card, Mapping) else None
    else:
        from aprfmt.provenance import provenance

        found = dict(provenance.read(model).info)
        if model.convention == "gguf":
            found["chat_template"] = metadata.get("tokenizer.chat_template")
    return {name: value for name, value in found.items() if isinstance(value, str) and value}


def dtype_table(tensors: Sequence[Tensor]) -> dict[str, dict[str, int]]:
    """Dtype -> {tensors, params, bytes}, most bytes first."""
    rows: dict[str, dict[str, int]] = {}
    for tensor in tensors:
        row = rows.setdefault(tensor.dtype, {"tensors": 0, "params": 0, "bytes": 0})
        row["tensors"] += 1
        row["params"] += n_elements(tensor.shape)
        row["bytes"] += tensor.n_bytes
    return dict(sorted(rows.items(), key=lambda item: (-item[1]["bytes"], item[0])))


def tokenizer_info(model: Model) -> dict[str, Any] | None:
    """Counts and special ids of the embedded tokenizer; None when there is none."""
    if (gguf := model.native_as(GgufNative)) is not None:
        return _gguf_tokenizer_info(model, gguf)
    if apr2.native_of(model) is not None:
        return _apr_tokenizer_info(model)
    tokenizer = model.tokenizer
    return None if tokenizer is None else _tokenizer_fields(tokenizer)


def _gguf_tokenizer_info(model: Model, gguf: GgufNative) -> dict[str, Any] | None:
    """The same from the counts of the arrays: decoding 150,000 strings would take longer than the rest."""
    from aprfmt.tokenizer.ggml import from_gguf

    entries = {key: e for key, e in gguf.parts[0].entries.items() if key.startswith("tokenizer.")}
    scalars = {key: model.metadata[key] for key, entry in entries.items() if entry.count is None}
    tokenizer = from_gguf(scalars)
    if tokenizer is None:
        return None
    counts = {
        name: entries[key].count
        for name, key in (("vocab_size", "tokenizer.ggml.tokens"), ("merges", "tokenizer.ggml.merges"))
        if key in entries
    }
    return _tokenizer_fields(tokenizer) | counts


def _apr_tokenizer_info(model: Model) -> dict[str, Any] | None:
    """The same from the first entry of each list: what 150,000 of them hold is not looked at here."""
    from aprfmt.tokenizer.apr import OWN_KEY, from_metadata

    metadata = dict(model.metadata)
    counts = {}
    for name, key in (("vocab_size", "vocabulary"), ("merges", "merges"), ("", "token_type"), ("", "scores")):
        items = metadata.get(f"tokenizer.{key}")
        if isinstance(items, list):
            counts[name] = len(items)
            metadata[f"tokenizer.{key}"] = items[:1]
    if isinstance(own := metadata.get(OWN_KEY), Mapping):
        metadata[OWN_KEY] = {key: value for key, value in own.items() if key != "patches"}
    tokenizer = from_metadata(metadata)
    counts.pop("", None)
    return None if tokenizer is None else _tokenizer_fields(tokenizer) | counts


def _tokenizer_fields(tokenizer: Tokenizer) -> dict[str, Any]:
    special = tokenizer.special
    return {
        "model": tokenizer.model,
        "pre": tokenizer.pre,
        "vocab_size": len(tokenizer.tokens),
        "merges": len(tokenizer.merges),
        "added": tokenizer.n_added,
        "bos_id": special.get("bos"),
        "eos_id": special.get("eos"),
        "pad_id": special.get("pad"),
        "unk_id": special.get("unk"),
        "chat_template": bool(tokenizer.chat_template),
    }


def compatibility(model: Model, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Whether the reference runtime can run the file as it is, and every reason why not."""
    reasons = []
    if apr2.native_of(model) is None:
        reasons.append(f"the runtime reads plain APR v2, not {model.label}")
    if not metadata.get("architecture"):
        reasons.append("metadata has no architecture (C-01)")
    missing = [name for name in _REQUIRED_DIMS if metadata.get(name) is None]
    if missing:
        reasons.append(f"metadata has no {', '.join(missing)} (C-03)")
    for flag in ("encrypted", "lz4_compressed", "zstd_compressed", "sharded"):
        if model.flags.get(flag):
            reasons.append(f"flag {flag} is set")
    dtypes = sorted({t.dtype for t in model.tensors.entries} - set(_RUNTIME_DTYPES))
    if dtypes:
        reasons.append(f"the runtime does not decode {', '.join(dtypes)}; --dtype f16 writes what it does")
    reasons += _embedding_reasons(model, metadata)
    return {"reference_runtime": not reasons, "reasons": reasons}


def _embedding_reasons(model: Model, metadata: Mapping[str, Any]) -> list[str]:
    dims = [n for name in ("vocab_size", "hidden_size") if isinstance(n := metadata.get(name), int)]
    if len(dims) < 2:
        return []
    found = (
        model.tensors.get(name) for name in (*spellings("token_embd.weight"), *spellings("output.weight"))
    )
    return [
        f"{t.name} is {list(t.shape)}, metadata says vocabulary {dims[0]} and width {dims[1]}"
        for t in found
        if t is not None and sorted(t.shape) != sorted(dims)
    ]
