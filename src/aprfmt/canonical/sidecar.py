"""Metadata of an `.apr` that a GGUF or a Hugging Face folder has no fields for, kept for exact round trips.

In a folder it is the file `apr_metadata.json`: descriptive fields that the model card lacks, and custom keys.

In a GGUF it is the key `aprfmt.metadata` with a JSON object:

    {"keys": sha-256 of all other entries, "metadata": {...}, "dtypes": {tensor: dtype}, "exact": {tensor: [...]}}

`metadata` has what an import of the other keys would miss, null for what it would add; `dtypes` lists tensors that were
widened for llama.cpp, `exact` has corrections of mapped values. If all are empty the key is omitted. If another program
edits the GGUF, the digest no longer matches: then its keys count and this one is ignored.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from aprfmt.arch.links import Link
from aprfmt.arch.row import PRODUCT
from aprfmt.canonical.row_mapping import BufferedTensor, produce
from aprfmt.canonical.tensor import CanonicalTensor
from aprfmt.codecs.dtypes import DTYPES
from aprfmt.codecs.recode import encode
from aprfmt.codecs.stream import TensorSource, read_whole
from aprfmt.formats import apr2, apr_metadata, gguf_write
from aprfmt.formats.gguf_fields import GgufType, KvMapping
from aprfmt.formats.hf_files import read_text_file
from aprfmt.io.source import is_file
from aprfmt.model import Model
from aprfmt.provenance import provenance
from aprfmt.provenance.model_card import CARD, is_location
from aprfmt.types import Array

KEY = "aprfmt.metadata"

LEFT_ASIDE = "aprfmt.left_aside"
"""Key of an `.apr` whose GGUF had sidecar metadata that contradict its tensors."""

MAX_CORRECTED_BYTES = 64 << 20
"""Largest tensor that is corrected; only norms, decays and position tables are of this kind."""

Corrections = dict[str, list[str]]
"""Hugging Face name -> [dtype, base64 of the deflated differences]."""

_FLOATS = ("F32", "F16", "BF16")


@dataclass(slots=True)
class Sidecar:
    """What the keys of a GGUF lack: metadata (None: remove it) and, by Hugging Face name, dtypes of widened tensors and
    corrections of mapped ones.
    """

    metadata: dict[str, object] = field(default_factory=dict)
    dtypes: dict[str, str] = field(default_factory=dict)
    exact: Corrections = field(default_factory=dict)


def differences(model: Model, derived: Mapping[str, object]) -> dict[str, object]:
    """How the `.apr` `model` differs from `derived`, the metadata that an import of its GGUF yields."""
    now = _comparable(apr_metadata.canonicalize_aliases(model.metadata))
    then = _comparable(apr_metadata.parse(apr_metadata.dump(derived)))
    return {key: now.get(key) for key in sorted({*now, *then}) if now.get(key) != then.get(key)}


def _comparable(metadata: Mapping[str, object]) -> dict[str, object]:
    return {key: value for key, value in metadata.items() if value is not None and not _is_derived(key)}


def _is_derived(key: str) -> bool:
    """Whether every import recreates this entry, so that sidecar metadata must not contain it."""
    own = (apr_metadata.SOURCE_KEY, apr_metadata.TRUE_DTYPES_KEY, apr_metadata.FOOTER_KEY, LEFT_ASIDE)
    return key in own or key.startswith("tokenizer.")


def seal(entries: Sequence[bytes], sidecar: Sidecar) -> list[bytes]:
    """The entries of a GGUF with the sidecar metadata appended, replacing an older one."""
    kept = strip(entries)
    if not (sidecar.metadata or sidecar.dtypes or sidecar.exact):
        return kept
    value = {"keys": _digest(kept), "metadata": sidecar.metadata, "dtypes": sidecar.dtypes}
    value |= {"exact": sidecar.exact} if sidecar.exact else {}
    text = json.dumps(value, ensure_ascii=True, sort_keys=True, separators=(",", ":"))
    return [*kept, gguf_write.encode_kv(KEY, GgufType.STRING, text)]


def strip(entries: Iterable[bytes]) -> list[bytes]:
    """The entries of a GGUF without the sidecar metadata."""
    return [entry for entry in entries if not _is_own(entry)]


def read_sidecar(kv: KvMapping) -> tuple[Sidecar | None, str | None]:
    """The sidecar metadata of a GGUF, and a warning if they no longer match its keys."""
    if KEY not in kv:
        return None, None
    try:
        value = json.loads(kv[KEY])
        metadata, dtypes = dict(value["metadata"]), {str(k): str(v) for k, v in value["dtypes"].items()}
        exact = {str(k): [str(v[0]), str(v[1])] for k, v in value.get("exact", {}).items()}
        fits = value["keys"] == _digest([bytes(kv.raw(k)) for k in kv if k != KEY and not k.startswith("split.")])
        # the rules for a file's own metadata apply here too
        apr_metadata.parse(apr_metadata.dump({k: v for k, v in metadata.items() if v is not None}))
        if any(dtype not in DTYPES for dtype in dtypes.values()):
            raise ValueError("unknown dtype")
        if any(map(_is_derived, metadata)):
            raise ValueError("an entry that is derived from the tensors or the tokenizer")
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
        return None, f"{KEY} is damaged and ignored"
    if not fits:
        return None, f"the GGUF's keys were edited after the export: {KEY} is ignored"
    return Sidecar(metadata, dtypes, exact), None


def _digest(entries: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for entry in sorted(entries):
        digest.update(entry)
    return digest.hexdigest()


def _is_own(entry: bytes) -> bool:
    name = KEY.encode()
    return entry[8 : 8 + len(name)] == name and int.from_bytes(entry[:8], "little") == len(name)


# --- corrections ---


def corrections(tensors: Mapping[str, CanonicalTensor], links: Sequence[Link]) -> Corrections:
    """What is needed besides a GGUF with these weight mappings to restore an `.apr` bit by bit.

    `x + 1` and `-exp(x)` round, and rows that a GGUF cannot store are cut. The inverse differs from the original in a
    few last bits; the differences of the stored integers compress to almost nothing.
    """
    out: Corrections = {}
    for link in links:
        mapping = link.mapping
        if not (mapping.maps_values or mapping.skip) or not _is_corrected(link):
            continue
        originals = [tensors[name] for name in link.hf]
        if mapping.scales and not mapping.value and originals[0].dtype in ("F16", "BF16"):
            continue  # a product in F32 and its quotient round to the same half
        if any(tensor.dtype not in _FLOATS or tensor.n_bytes > MAX_CORRECTED_BYTES for tensor in originals):
            continue
        made = produce([tensor.as_source() for tensor in originals], link.mapping, 0)
        for position, tensor in enumerate(originals):
            original = _bits(tensor.produced.data(), tensor.dtype)
            found = _bits(_inverse(made.as_source(tensor.name), link, position, tensor.dtype), tensor.dtype)
            if not (original == found).all():
                packed = zlib.compress((original - found).tobytes(), 9)
                out[tensor.name] = [tensor.dtype, base64.b64encode(packed).decode()]
    return out


def _is_corrected(link: Link) -> bool:
    """Whether the tensors of a weight mapping can have corrections: a single one, or the two of a product."""
    return len(link.gguf) == 1 and (len(link.hf) == 1 or link.mapping.value == PRODUCT)


def restore(link: Link, sources: Sequence[TensorSource], stated: Corrections) -> list[TensorSource] | None:
    """The original tensors from that of a GGUF and their corrections; None unless they yield that tensor again."""
    if not _is_corrected(link):
        return None
    try:
        restored = [_corrected(link, sources[0], position, stated) for position in range(len(link.hf))]
    except (ValueError, KeyError, IndexError, zlib.error, binascii.Error):
        return None
    return restored if produce(restored, link.mapping, 0).data() == read_whole(sources[0]) else None


def _corrected(link: Link, source: TensorSource, position: int, stated: Corrections) -> TensorSource:
    """Restores an original tensor. Raises ValueError, KeyError and the like for an invalid correction."""
    name, shape = link.hf[position], link.mapping.before[position]
    dtype, text = (str(part) for part in stated.get(name, ["F32", ""])[:2])
    n_bytes = DTYPES[dtype].n_bytes(shape)
    if dtype not in _FLOATS or n_bytes > MAX_CORRECTED_BYTES:
        raise ValueError("not a tensor that has corrections")
    original = _inverse(source, link, position, dtype)
    if name in stated:
        data = zlib.decompressobj().decompress(base64.b64decode(text, validate=True), max(1, n_bytes))
        original = (_bits(original, dtype) + _bits(data, dtype)).tobytes()
    return BufferedTensor(name, dtype, shape, lambda: [original])


def _inverse(source: TensorSource, link: Link, position: int, dtype: str) -> bytes:
    made = produce([source], link.mapping, position, inverse=True)
    return made.data() if made.dtype == dtype else encode(dtype, made.values())


def _bits(data: bytes, dtype: str) -> Array:
    import numpy as np

    return np.frombuffer(data, f"<u{DTYPES[dtype].block_bytes}")


# --- folders ---

FOLDER_FILE = "apr_metadata.json"

# Typed fields that a folder stores in its model card, as far as it has one; the name may be the folder's.
_FOLDER_FIELDS = tuple(name for name in provenance.INFO_FIELDS if name != "name")


def folder_fields(metadata: Mapping[str, object]) -> dict[str, object]:
    """The fields of `metadata` that the folder's file may contain: descriptions and custom keys."""
    return {
        key: value
        for key, value in metadata.items()
        if value is not None
        and (key in _FOLDER_FIELDS or key not in apr_metadata.TYPED_FIELDS)
        and not key.startswith(("aprfmt.", "tokenizer."))
        and key != "tied_embeddings"
    }


def with_folder_fields(model: Model, info: Mapping[str, object], texts: dict[str, bytes]) -> dict[str, bytes]:
    """The text files of a folder made from the `.apr` `model`, plus one for what they lack."""
    if apr2.native_of(model) is None:
        return texts
    on_card = provenance.card_fields(texts[CARD]) if CARD in texts else {}
    now = folder_fields(dict(model.metadata) | dict(info))
    if texts.keys() - {CARD} and is_location(now.get("source"), info.get("name")):
        del now["source"]  # derived from the source folder's location, as the name is
    missing = {key: value for key, value in sorted(now.items()) if on_card.get(key) != value}
    if FOLDER_FILE in texts and missing.items() <= _read_folder_fields(texts[FOLDER_FILE]).items() <= now.items():
        return texts  # the source's own value, perhaps also in the card, or written by another program
    others = {name: data for name, data in texts.items() if name != FOLDER_FILE}
    if not missing:
        return others
    return others | {FOLDER_FILE: (json.dumps(missing, indent=2, ensure_ascii=False) + "\n").encode()}


def read_folder(folder: Path) -> Sidecar | None:
    """The contents of a folder's `apr_metadata.json`; None if missing or invalid."""
    path = folder / FOLDER_FILE
    if not is_file(path):
        return None
    return Sidecar(_read_folder_fields(read_text_file(path)))


def _read_folder_fields(data: bytes) -> dict[str, object]:
    try:
        return folder_fields(apr_metadata.parse(apr_metadata.dump(folder_fields(json.loads(data)))))
    except (ValueError, TypeError, AttributeError, RecursionError):
        return {}
