"""Describes a model file for `apr inspect`, from index, metadata and the first bytes of its weights."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace

from aprfmt import formats
from aprfmt.arch.extra_tensors import outside, parts
from aprfmt.arch.names import EMBEDDING, OUTPUT_HEAD, spellings
from aprfmt.arch.table import row_of
from aprfmt.canonical.model_kinds import is_adapter, is_clip, looks_like_adapter
from aprfmt.codecs.dtypes import DtypeTotals, dtype_totals
from aprfmt.errors import AprError, StorageError
from aprfmt.formats.apr_metadata import TYPED_FIELDS
from aprfmt.formats.stored_keys import StoredKey, stored_keys
from aprfmt.inspection.head import HeadInfo, head_info
from aprfmt.inspection.quality import Quality, quality_of
from aprfmt.inspection.quantized import QuantizedWeights, count_packed, lattice_weights
from aprfmt.inspection.tokenizer_info import TokenizerInfo, tokenizer_info
from aprfmt.light_dataclass import light_dataclass
from aprfmt.model import Model, Tensor
from aprfmt.trust.signature import ModelSignature
from aprfmt.types import PathLike

FOOTER_LIMIT_BYTES = 2 << 30
"""Whole-file checksums are verified up to this size; above, use `apr validate`."""

ALWAYS_PRESENT = ("license", "data_source", "data_license", "hf_architecture", "hf_model_type")

REQUIRED_DIMS = ("hidden_size", "num_layers", "num_heads", "intermediate_size")
"""Required by every runtime; the load gate of the reference runtime requires the same."""

DIMS = (
    *(("num_layers", "layers"), ("hidden_size", "hidden"), ("intermediate_size", "feed-forward")),
    *(("num_heads", "heads"), ("num_kv_heads", "kv heads"), ("head_dim", "head dim")),
    *(("vocab_size", "vocabulary"), ("max_position_embeddings", "context")),
    *(("num_experts", "experts"), ("num_experts_per_tok", "experts used")),
    *(("rope_theta", "rope theta"), ("rms_norm_eps", "norm eps")),
)
"""Typed metadata fields of a network, with their user-facing names."""

# The typed APR fields that Model.hparams holds under the same name.
_HPARAM_FIELDS = (
    *("architecture", "hf_architecture", "hf_model_type", "hidden_size", "num_layers", "num_heads"),
    *("num_kv_heads", "vocab_size", "intermediate_size", "max_position_embeddings", "rope_theta"),
    *("rope_type", "rms_norm_eps", "head_dim", "num_experts", "num_experts_per_tok"),
    "moe_intermediate_size",
)

# Dtypes that every decoder of the reference runtime reads correctly.
_RUNTIME_DTYPES = ("F32", "F16", "BF16", "Q4_K", "Q6_K")


@light_dataclass(frozen=True, slots=True)
class TowerInfo:
    """The contents of a tower GGUF.

    Attributes:
        row: id of the row in the tower table; None if unknown.
        projectors: llama.cpp's projector types.
        sees, hears: whether it is for images, for audio.
        width: output width per position.
        classes: of the models that it may belong to.
    """

    row: str | None
    projectors: Sequence[str]
    sees: bool
    hears: bool
    width: int | None
    classes: Sequence[str]


@light_dataclass(frozen=True, slots=True)
class Compatibility:
    """Whether the reference runtime can run the file unchanged, and every reason why not."""

    reference_runtime: bool
    reasons: list[str]


@light_dataclass(frozen=True, slots=True)
class Carried:
    """What a file contains besides the network.

    Attributes:
        tensors: number of extra tensors.
        kinds: what they belong to, the largest first: {"vision tower": {"tensors", "bytes"}}.
        files, file_bytes: files of the imported folder that are not part of the model.
    """

    tensors: int
    kinds: Mapping[str, Mapping[str, int]]
    files: int
    file_bytes: int


@light_dataclass(frozen=True, slots=True)
class AdapterInfo:
    """What an adapter changes.

    Attributes:
        kind: "lora", or why it is not supported.
        base: name of the base model, as stored in the adapter.
        rank, alpha: of most weights.
        scales: distinct scales.
        weights, whole: number of weights that it updates, and that it replaces.
        modules: suffixes of the updated modules.
    """

    kind: str
    base: str | None = None
    rank: int | None = None
    alpha: float | None = None
    scales: Sequence[float] = ()
    weights: int = 0
    whole: int = 0
    modules: Sequence[str] = ()


# Fields of Inspection that its JSON has only on request.
_ON_REQUEST = ("quality", "with_vocabulary", "vocabulary", "tensors", "stored")


@light_dataclass(frozen=True, slots=True)
class Inspection:
    """The result of `inspect`; `to_json` is the object of `apr inspect --json`.

    Attributes:
        file: the path as given.
        format, version: the container and its version, such as "GGUF v3" and "3".
        checksum: {"header", "footer"}: "ok", "bad" or "none"; the footer also "absent" or "unchecked".
        metadata: the known typed APR fields; those in ALWAYS_PRESENT are None if unknown.
        dtypes: dtypes of the tensors, most bytes first.
        quantized: quantized weights by scheme, and weights that QAT left on the values of Q4_0.
        carried: what the file contains besides the network.
        head: what the model outputs instead of next-token logits; None for a plain language model.
        signature: who signed the model, as it claims or as it was verified; None without a signature.
        adapter: what an adapter changes; None if the file is not an adapter.
        tensors: all tensors, if requested.
        stored: the file's own metadata keys, if requested.
        vocabulary: the tokens, if requested (`with_vocabulary`); None without a tokenizer.
        quality: the completeness score, if requested.
    """

    file: str
    format: str
    version: str
    size_bytes: int
    tensor_count: int
    param_count: int
    checksum: Mapping[str, str]
    flags: Mapping[str, bool]
    architecture: str | None
    metadata: Mapping[str, object]
    dtypes: Mapping[str, DtypeTotals]
    quantized: Sequence[QuantizedWeights]
    carried: Carried
    head: HeadInfo | None
    tokenizer: TokenizerInfo | None
    compat: Compatibility
    warnings: list[str]
    signature: ModelSignature | None = None
    adapter: AdapterInfo | None = None
    towers: TowerInfo | None = None
    quality: Quality | None = None
    with_vocabulary: bool = False
    vocabulary: Sequence[str] | None = None
    tensors: Sequence[Tensor] | None = None
    stored: Sequence[StoredKey] | None = None

    def to_json(self) -> dict[str, object]:
        """The keys of the JSON contract; `quality`, `vocabulary`, `keys`, `tensors` only on request."""
        body = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in _ON_REQUEST}
        body["quantized"] = [asdict(row) for row in self.quantized]
        body["carried"] = asdict(self.carried)
        body["head"] = None if self.head is None else asdict(self.head)
        body["signature"] = None if self.signature is None else asdict(self.signature)
        body["towers"] = None if self.towers is None else asdict(self.towers)
        body["adapter"] = None if self.adapter is None else asdict(self.adapter)
        body |= {"tokenizer": None if self.tokenizer is None else asdict(self.tokenizer), "compat": asdict(self.compat)}
        if self.quality is not None:
            body["quality"] = self.quality.to_json()
        if self.with_vocabulary:
            body["vocabulary"] = self.vocabulary
        if self.stored is not None:
            body["keys"] = [asdict(key) for key in self.stored]
        if self.tensors is not None:
            body["tensors"] = [
                {"name": t.name, "dtype": t.dtype, "shape": list(t.shape), "size_bytes": t.n_bytes}
                for t in self.tensors
            ]
        return body


def inspect(
    path: PathLike, *, vocab: bool = False, weights: bool = False, quality: bool = False, metadata: bool = False
) -> Inspection:
    """Reads a model's container, architecture, dimensions, dtypes, tokenizer and provenance.

    `vocab` adds the tokens, `weights` the tensors, `quality` a completeness score of the metadata, `metadata` every
    metadata key as stored. Raises AprError if the file cannot be opened.
    """
    with formats.open_unchanged(path) as model:
        found = replace(describe(model, quality=quality), file=os.fspath(path))
        if vocab:
            tokens = list(model.tokenizer.tokens) if model.tokenizer is not None else None
            found = replace(found, with_vocabulary=True, vocabulary=tokens)
        if metadata:
            found = replace(found, stored=stored_keys(model))
        return replace(found, tensors=model.tensors.entries) if weights else found


def _package_warnings(model: Model) -> list[str]:
    from aprfmt.inspection.package import folder_of, outside_files, refused_names
    from aprfmt.text import first_few

    if (folder := folder_of(model)) is None:
        return []
    odd, out = [*map(str, refused_names(folder))], outside_files(folder)
    skipped = [f"files that a conversion would skip: {first_few(odd)}"] if odd else []
    return skipped + ([f"symlinks pointing outside the folder: {first_few(out)}"] if out else [])


def describe(model: Model, *, quality: bool = False) -> Inspection:
    """Describes an opened model; `quality` adds the score and verifies checksums of any size."""
    entries = model.tensors.entries
    metadata = typed_metadata(model)
    stated = metadata.get("architecture")
    # The footer of a huge file takes long: apr validate checks it.
    large = model.convention == "apr" and model.size_bytes > FOOTER_LIMIT_BYTES and not quality
    checksum = {"header": "ok", "footer": "unchecked"} if large else model.checksum()
    tokenizer = tokenizer_info(model)
    packed = count_packed(model)
    totals = sorted(dtype_totals(entries).items(), key=lambda item: (-item[1]["bytes"], item[0]))
    warnings = list(model.warnings)
    if model.convention == "hf":
        from aprfmt.provenance import provenance

        warnings += provenance.read(model).warnings
        warnings += _package_warnings(model)
    return Inspection(
        file=str(model.path), format=model.label, version=model.version, size_bytes=model.size_bytes,
        tensor_count=len(entries), param_count=packed.param_count, checksum=checksum, flags=dict(model.flags),
        architecture=model.hparams.architecture or (stated if isinstance(stated, str) else None), metadata=metadata,
        dtypes=dict(totals), quantized=[*packed.quantized, *lattice_weights(model)], carried=carried(model),
        head=head_info(model), tokenizer=tokenizer, compat=compatibility(model, metadata), warnings=warnings,
        signature=model.signature, adapter=_adapter_info(model), towers=_tower_info(model),
        quality=quality_of(model, metadata, checksum, tokenizer) if quality else None,
    )  # fmt: skip


def _tower_info(model: Model) -> TowerInfo | None:
    if not is_clip(model):
        return None
    from aprfmt.arch.tower_table import find_tower_gguf

    kv = model.metadata
    row = find_tower_gguf(kv, model.tensors)
    words = (kv.get(f"clip.{part}projector_type") for part in ("", "vision.", "audio."))
    widths = (kv.get(f"clip.{part}.projection_dim") for part in ("vision", "audio"))
    return TowerInfo(
        row=row.id if row is not None else None,
        projectors=[word for word in words if isinstance(word, str)],
        sees=kv.get("clip.has_vision_encoder") is True,
        hears=kv.get("clip.has_audio_encoder") is True,
        width=next((width for width in widths if type(width) is int), None),
        classes=list(row.hf_classes) if row is not None else [],
    )


def _adapter_info(model: Model) -> AdapterInfo | None:
    if not is_adapter(model):
        return None
    from aprfmt.canonical.adapter import read_adapter

    try:
        found = read_adapter(model)
    except StorageError:
        raise
    except AprError as error:
        return AdapterInfo(error.message)
    ends = {weight.removesuffix(".weight").rpartition(".")[2] for weight in found.pairs}
    return AdapterInfo(
        kind="lora", base=found.base, rank=found.rank, alpha=found.alpha,
        scales=sorted({pair.scale for pair in found.pairs.values()}), weights=len(found.pairs), whole=len(found.whole),
        modules=sorted(ends),
    )  # fmt: skip


def carried(model: Model) -> Carried:
    """What `model` contains besides the network."""
    names = model.tensors
    row = row_of(model.hparams, kv=model.metadata if model.convention == "gguf" else None, tensor_names=names)
    whole = looks_like_adapter(model)
    others = {*names} if whole else outside(row, model.hparams, names) if row is not None else set[str]()
    found = parts(row, {name: names[name].n_bytes for name in others}, model.hparams.hf_architecture)
    return Carried(
        tensors=len(others),
        kinds={part.kind: {"tensors": part.n_tensors, "bytes": part.n_bytes} for part in found},
        files=len(model.files),
        file_bytes=sum(file.n_bytes for file in model.files),
    )


def typed_metadata(model: Model) -> dict[str, object]:
    """The set typed fields of an APR v2 file; for other containers the equivalent.

    The five provenance and identity fields of ALWAYS_PRESENT are None if unknown.
    """
    is_apr = model.convention == "apr" and model.format != "apr-v1"
    if is_apr:
        known = {name: value for name in TYPED_FIELDS if (value := model.metadata.get(name)) is not None}
    else:
        known = _from_other(model)
    for name in _HPARAM_FIELDS:
        value = getattr(model.hparams, name)
        if value is not None:
            known.setdefault(name, value)
    return known | {name: known.get(name) for name in ALWAYS_PRESENT}


def _from_other(model: Model) -> dict[str, object]:
    metadata: Mapping[str, object] = model.metadata
    found: dict[str, object]
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


def _is_apr2(model: Model) -> bool:
    """Whether it is an `.apr` v2, without importing its modules for other containers."""
    if model.convention != "apr":
        return False
    from aprfmt.formats import apr2

    return apr2.native_of(model) is not None


def compatibility(model: Model, metadata: Mapping[str, object]) -> Compatibility:
    """Whether the reference runtime can run the file, whose typed fields are `metadata`."""
    reasons = []
    if not _is_apr2(model):
        reasons.append(f"the runtime reads plain APR v2, not {model.label}")
    if not metadata.get("architecture"):
        reasons.append("metadata lacks the architecture (C-01)")
    missing = [name for name in REQUIRED_DIMS if metadata.get(name) is None]
    if missing:
        reasons.append(f"metadata lacks {', '.join(missing)} (C-03)")
    for flag in ("encrypted", "lz4_compressed", "zstd_compressed", "sharded"):
        if model.flags.get(flag):
            reasons.append(f"flag {flag} is set")
    dtypes = sorted({t.dtype for t in model.tensors.entries} - set(_RUNTIME_DTYPES))
    if dtypes:
        reasons.append(f"the runtime cannot decode {', '.join(dtypes)}; convert with --dtype f16")
    dims = [n for name in ("vocab_size", "hidden_size") if isinstance(n := metadata.get(name), int)]
    if len(dims) == 2:
        found = (model.tensors.get(name) for name in (*spellings(EMBEDDING), *spellings(OUTPUT_HEAD)))
        reasons += [
            f"{t.name} has shape {list(t.shape)}, the metadata has vocabulary {dims[0]} and width {dims[1]}"
            for t in found
            if t is not None and sorted(t.shape) != sorted(dims)
        ]
    return Compatibility(not reasons, reasons)
