"""The keys of a GGUF: unedited ones of the source, and new ones for llama.cpp."""

from __future__ import annotations

import struct
from dataclasses import replace

from aprfmt.arch import hparams as hp
from aprfmt.arch import names, scopes, zero_biases
from aprfmt.arch.fields import Misfit, shorten
from aprfmt.arch.gguf_keys import key_problems
from aprfmt.arch.table import find_gguf
from aprfmt.canonical import sidecar
from aprfmt.canonical.completion import complete_from_shapes
from aprfmt.canonical.drafts import named_drafts, with_mtp_layers_counted
from aprfmt.canonical.metadata import apr_metadata_of
from aprfmt.canonical.model import Canonical, embedding_rows, from_gguf
from aprfmt.canonical.padded_vocabulary import with_stored_rows
from aprfmt.canonical.sidecar import Sidecar
from aprfmt.canonical.sides import links
from aprfmt.canonical.tensor import CanonicalTensor, is_exact
from aprfmt.codecs.dtypes import DTYPES
from aprfmt.convert.options import Options
from aprfmt.convert.presets import file_type_of
from aprfmt.convert.quantization import Quantization, preset_of
from aprfmt.convert.source_manifest import SourceManifest, overlay
from aprfmt.convert.targets.base import Work
from aprfmt.errors import RefusedError
from aprfmt.formats import apr2, gguf, gguf_write
from aprfmt.formats.gguf import GgufNative
from aprfmt.formats.gguf_fields import GgufType, KvMapping
from aprfmt.formats.gguf_write import KV
from aprfmt.formats.out_tensor import OutTensor, dominant_dtype
from aprfmt.provenance import provenance
from aprfmt.tokenizer import ggml
from aprfmt.tokenizer.data import NO_VOCABULARY
from aprfmt.tokenizer.model import Tokenizer
from aprfmt.tokenizer.pre import check_name


def extras_in_gguf(c: Canonical) -> dict[str, CanonicalTensor]:
    """The extra tensors in the GGUF of `c`: those of a source GGUF, and MTP layers that the architecture names."""
    if c.tower is not None:
        c = replace(c, extras={name: t for name, t in c.extras.items() if not c.tower.has(name)})
    if c.arch is None or from_gguf(c):
        return c.extras
    counted = with_mtp_layers_counted(c).hparams
    keys = {key: value for key, _, value in hp.to_gguf(counted, c.arch, complete=False)}
    if not keys.get(scopes.full_key(c.arch, scopes.DRAFTS.gguf)):
        return {}
    drafts = named_drafts(c)
    names.check_drafts(c.arch, c.hparams, {name: t.shape for name, t in drafts.items()})
    return drafts


_OF_THE_CLASS = (hp.EXTRA_KEY, "hf_architecture", "hf_model_type")
"""Metadata that only the row of the model's class can read."""


def is_model(c: Canonical, base: KvMapping | None) -> bool:
    """Whether llama.cpp would load the GGUF by itself; adapters, projectors and the like have no tokenizer."""
    return c.arch is not None and (base is None or base.get("general.type", "model") == "model")


def checked_keys(c: Canonical, keys: list[KV | bytes], tensors: list[OutTensor]) -> list[bytes]:
    """The encoded keys, checked for llama.cpp, with the sidecar metadata of an `.apr`."""
    entries = [item if isinstance(item, bytes) else gguf_write.encode_kv(*item) for item in keys]
    is_apr = apr2.native_of(c.model) is not None
    pairs = _pairs(c, sidecar.strip(entries) if is_apr else entries)
    for item in keys:  # the vocabulary was just encoded
        if not isinstance(item, bytes) and isinstance(item[2], list) and item[1] == (GgufType.ARRAY, GgufType.STRING):
            pairs.remember(item[0], [*item[2]])
    _check_keys(c, pairs, tensors)
    if not is_apr:
        return entries
    stated = _missing_after_import(c, pairs, extras_in_gguf(c)) if _is_of_its_class(c) else {}
    kept = sidecar.corrections(c.tensors, links(c.arch, c.hparams, c.tensors)) if c.arch is not None else {}
    return sidecar.seal(entries, Sidecar(stated, _stored_dtypes(c, tensors), kept))


def _is_of_its_class(c: Canonical) -> bool:
    """Whether the GGUF has the class and outputs of the source, rather than being a reranker derived from it."""
    own = c.model.hparams
    return c.hparams.hf_architecture == own.hf_architecture and c.hparams.extra.get("num_labels") == own.extra.get(
        "num_labels"
    )


def _check_keys(c: Canonical, pairs: KvMapping, tensors: list[OutTensor]) -> None:
    """Raises RefusedError for missing or wrong keys that llama.cpp needs to load the architecture."""
    if c.arch is None or not tensors or not is_model(c, pairs):
        return
    shapes = {tensor.name: tensor.shape for tensor in tensors}
    rows = next(iter(shapes.get("token_embd.weight", ())), None)
    vocabulary = ggml.key_problems(pairs, c.arch.gguf, rows) if c.tokenizer is not None and c.tokenizer.tokens else ()
    for key, problem in (*key_problems(c.arch, pairs, shapes), *vocabulary):
        raise RefusedError(
            f"llama.cpp would not load the GGUF: {key} {problem}",
            path=c.model.path,
            hint="correct config.json or the tokenizer files"
            if c.model.convention == "hf"
            else "correct the metadata: apr stamp FILE --in-place --set KEY=JSON",
        )


def sidecar_holds(c: Canonical, base: KvMapping) -> bool:
    """Whether the sidecar metadata in the GGUF still matches the `.apr`."""
    if apr2.native_of(c.model) is None:
        return True
    found, warning = sidecar.read_sidecar(base)
    if warning is not None or c.model.metadata.get(sidecar.LEFT_ASIDE):
        return True  # the import ignored it too
    pairs = _pairs(c, sidecar.strip(unsplit_entries(base).values()))
    missing = _missing_after_import(c, pairs, c.extras)
    # A GGUF by another program needs one only for what it cannot contain itself.
    return found.metadata == missing if found is not None else not sidecar.folder_fields(missing)


def _pairs(c: Canonical, entries: list[bytes]) -> KvMapping:
    head = b"".join((b"GGUF", struct.pack("<IQQ", 3, 0, len(entries)), *entries))
    return gguf.read_pairs(head, str(c.model.path))


def _missing_after_import(c: Canonical, pairs: KvMapping, extras: dict[str, CanonicalTensor]) -> dict[str, object]:
    """What an import of a GGUF with these keys would miss. Without class and hyper-parameters if it comes back as
    another network of the table, to which the same config.json keys may mean something else.
    """
    found = sidecar.differences(c.model, _metadata_after_import(c, pairs, extras))
    if c.arch is not None and not found.keys().isdisjoint(_OF_THE_CLASS):
        stored = [name for link in links(c.arch, c.hparams, c.tensors) for name in link.gguf]
        row = find_gguf(pairs, stored)
        if row is not None and row.id != c.arch.id:
            return {key: value for key, value in found.items() if key not in _OF_THE_CLASS}
    return found


def _metadata_after_import(c: Canonical, pairs: KvMapping, extras: dict[str, CanonicalTensor]) -> dict[str, object]:
    """The metadata of an import of a GGUF with these keys, the tensors of `c` and the extra tensors `extras`."""
    source = replace(_as_import(c, pairs), extras=extras)
    if c.arch is not None:
        identity = hp.hf_identity(source.hparams, c.arch)
        source.hparams.hf_architecture, source.hparams.hf_model_type = identity
    if source.hparams.vocab_size is None:
        source.hparams.vocab_size = embedding_rows(c)
    tensors = [t.out(t.name) for t in source.all_tensors.values()]
    return apr_metadata_of(source, tensors) | {"original_format": "gguf"}


def _stored_dtypes(c: Canonical, tensors: list[OutTensor]) -> dict[str, str]:
    """Original dtype, by Hugging Face name, of tensors that the GGUF stores losslessly in a wider dtype."""
    out = {t.name: t.dtype for t in tensors}
    wide = {}
    for t in (c.tensors | extras_in_gguf(c)).values():
        target = out.get((names.gguf_name(c.arch, t.name, c.hparams) if c.arch else None) or t.name, t.dtype)
        if target != t.dtype and DTYPES[t.dtype].kind == "plain" and is_exact(t.dtype, target):
            wide[t.name] = t.dtype
    return wide


def base_keys(c: Canonical, manifest: SourceManifest | None) -> KvMapping | None:
    """The key-value pairs of the GGUF that `c` was imported from."""
    if (source := c.model.native_as(GgufNative)) is not None:
        return source.parts[0].kv
    if manifest is not None:
        return gguf.read_pairs(manifest.head(next(iter(manifest.files))), str(c.model.path))
    return None


def keys_of(
    c: Canonical, work: Work, base: KvMapping | None, tensors: list[OutTensor], *, copied: bool = False
) -> list[KV | bytes]:
    """The keys to write; those of `base` that no edit or option changes keep their bytes.

    Raises RefusedError, CorruptError for a value that its key cannot store; with `copied` the source's value is kept.
    """
    if base is None:
        return list(derive_keys(c, work, tensors))
    now = {kv[0]: _rounded(kv) for kv in derive_keys(c, work, tensors, overlaid=True)}
    # What derive_keys yields for the source itself, before any edit.
    plain = replace(work, options=Options(), quantization=None)
    source = replace(c, tensors=with_stored_rows(c.tensors))
    then = {kv[0]: _rounded(kv) for kv in derive_keys(_as_import(source, base), plain, [], overlaid=True)}
    if work.options.dtype == "keep":  # the source's own file type is kept
        del now["general.file_type"]
    del then["general.file_type"]
    misfit = next((value for _, _, value in now.values() if isinstance(value, Misfit)), None)
    if misfit is not None and not copied:
        raise misfit.error
    return list(overlay(unsplit_entries(base), then, now).values())


def _rounded(kv: KV) -> KV:
    """`kv` with float32 values as an `.apr` stores them: a source may have the number in another type."""
    key, kind, value = kv
    return (key, kind, shorten(value)) if kind is GgufType.FLOAT32 and isinstance(value, float) else kv


def unsplit_entries(base: KvMapping) -> dict[str, bytes]:
    """The entries of a model that is not split."""
    return {key: bytes(base.raw(key)) for key in base if not key.startswith("split.")}


def _as_import(c: Canonical, base: KvMapping) -> Canonical:
    """`c` as if imported from a GGUF with the keys `base`."""
    tensor_names = gguf_names(c)
    hparams = hp.from_gguf(base, tensor_names)
    if c.arch is not None:
        hparams.architecture = c.arch.id
    if hparams.head_dim is None and c.model.convention == "apr":
        complete_from_shapes(hparams, c.tensors)
    known = provenance.from_gguf(base)
    # An .apr without these keys never removed any of them.
    general = known.general if c.general is not None else None
    return Canonical(c.model, c.arch, hparams, ggml.from_gguf(base), known.info, c.tensors, general=general)


def derive_keys(c: Canonical, work: Work, tensors: list[OutTensor], *, overlaid: bool = False) -> list[KV]:
    """Every key of a GGUF for `c`, in the order of llama.cpp's own converter.

    `overlaid`: they complement a GGUF's own keys, so a pre-tokenizer or a dimension may be missing.
    """
    architecture = c.arch.gguf if c.arch else c.hparams.architecture or "unknown"
    keys: list[KV] = [
        ("general.architecture", GgufType.STRING, architecture),
        ("general.type", GgufType.STRING, "model"),
    ]
    keys += provenance.to_gguf(c.info, c.general)
    n_rows = embedding_rows(c)
    if c.arch is not None:
        found = hp.to_gguf(c.hparams, c.arch, vocab_size=n_rows, complete=not overlaid, misfits=overlaid)
        keys += [gguf_write.typed_kv(kv) for kv in found]
    if c.tokenizer is not None and c.tokenizer.model == NO_VOCABULARY and n_rows is not None:
        size: KV = (f"{architecture}.vocab_size", GgufType.UINT32, n_rows)  # llama.cpp then counts no tokens
        keys += [size] if size not in keys else []
    keys.append(("general.file_type", GgufType.UINT32, _file_type(c, work.quantization, tensors)))
    if c.tokenizer is not None:
        own = {key for key, _, _ in keys}  # a network may state the number of token types of its tokenizer
        found = ggml.to_gguf(
            _with_pre(c, c.tokenizer, work.options.pre, overlaid=overlaid),
            vocab_size=n_rows,
            pad_style=work.options.pad_style,
        )
        keys += [gguf_write.typed_kv(kv) for kv in found if kv[0] not in own]
    keys.append(("general.quantization_version", GgufType.UINT32, 2))
    if c.arch is not None and (switches := zero_biases.zero_switches(c.hparams, c.arch)):
        keys.append((zero_biases.KEY, (GgufType.ARRAY, GgufType.STRING), switches))
    return keys + _imatrix_keys(work.quantization)


def _file_type(c: Canonical, quantization: Quantization | None, tensors: list[OutTensor]) -> int:
    """The `general.file_type` of the requested or detected preset, else of the dtype with the most bytes."""
    if quantization is not None:
        return quantization.preset.file_type
    preset = preset_of(c, tensors)
    return preset.file_type if preset is not None else file_type_of(dominant_dtype(tensors))


def _imatrix_keys(quantization: Quantization | None) -> list[KV]:
    """The keys that llama-quantize writes for the importance matrix; it truncates strings to 127 bytes."""
    imatrix = quantization.imatrix if quantization is not None else None
    if imatrix is None:
        return []
    keys: list[KV] = [("quantize.imatrix.file", GgufType.STRING, _cut(imatrix.path))]
    if imatrix.datasets:
        keys.append(("quantize.imatrix.dataset", GgufType.STRING, _cut(imatrix.datasets[0])))
    keys.append(("quantize.imatrix.entries_count", GgufType.UINT32, len(imatrix.entries)))
    if imatrix.chunks > 0:
        keys.append(("quantize.imatrix.chunks_count", GgufType.UINT32, imatrix.chunks))
    return keys


def _cut(text: str) -> str:
    return text.encode(errors="surrogateescape")[:127].decode(errors="surrogateescape")


def gguf_names(c: Canonical) -> list[str]:
    """The GGUF names of all tensors."""
    if c.arch is None:
        return list(c.tensors)
    found = (m for t in c.tensors for m in names.matches(c.arch, t)[:1])
    made = {name for m in found for name in names.gguf_names(m.row, m.layer, c.hparams)}
    return [*made, *(t for t in c.tensors if not names.matches(c.arch, t))]


def _with_pre(c: Canonical, tokenizer: Tokenizer, pre: str | None, *, overlaid: bool) -> Tokenizer:
    if overlaid:  # the JSON of an .apr is sorted by name, which is not an edit
        tokenizer = replace(tokenizer, chat_templates=dict(sorted(tokenizer.chat_templates.items())))
    if pre is not None:
        check_name(pre)
        return replace(tokenizer, pre=pre)
    if tokenizer.pre is None and tokenizer.model == "gpt2" and not overlaid:
        raise RefusedError(
            "llama.cpp has no pre-tokenizer that matches this tokenizer",
            path=c.model.path,
            hint=f"{tokenizer.pre_note or 'the file does not name one'}; set one with --pre NAME",
        )
    return tokenizer
