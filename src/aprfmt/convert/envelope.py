"""What a GGUF cannot say of the `.apr` it was made from, kept in one key of the GGUF so that the way back is exact.

The key `aprfmt.metadata` holds a JSON object:

    {"keys": sha-256 of all other entries, "metadata": {...}, "dtypes": {tensor: dtype}}

`metadata` holds what an import of the other keys would not give, null for what it would give too much; `dtypes`
names tensors that were widened for llama.cpp. Without either there is no such key. A GGUF whose keys another program
edited no longer fits the digest: then its keys count and this one is left aside.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from aprfmt.codecs.dtypes import DTYPES
from aprfmt.convert.recipe import KEY as SOURCE_KEY
from aprfmt.formats import apr_metadata, gguf_write
from aprfmt.formats.gguf_kv import GgufType, KvMapping
from aprfmt.model import Model

KEY = "aprfmt.metadata"


@dataclass(slots=True)
class Envelope:
    """What the keys of a GGUF do not say: metadata (None: remove it) and, by HF name, dtypes of widened tensors."""

    metadata: dict[str, Any] = field(default_factory=dict)
    dtypes: dict[str, str] = field(default_factory=dict)


def unsaid(model: Model, said: Mapping[str, Any]) -> dict[str, Any]:
    """What the `.apr` `model` holds otherwise than `said`, the metadata that an import of its GGUF gives."""
    now = _comparable(apr_metadata.canonicalize_aliases(model.metadata))
    then = _comparable(apr_metadata.parse(apr_metadata.dump(said)))
    return {key: now.get(key) for key in sorted({*now, *then}) if now.get(key) != then.get(key)}


def _comparable(metadata: Mapping[str, Any]) -> dict[str, Any]:
    own = (SOURCE_KEY, apr_metadata.TRUE_DTYPES_KEY)
    return {
        key: value
        for key, value in metadata.items()
        if value is not None and key not in own and not key.startswith("tokenizer.")
    }


def sealed(entries: Sequence[bytes], envelope: Envelope) -> list[bytes]:
    """The entries of a GGUF with the envelope at their end, without an older one."""
    kept = without(entries)
    if not envelope.metadata and not envelope.dtypes:
        return kept
    value = {"keys": _digest(kept), "metadata": envelope.metadata, "dtypes": envelope.dtypes}
    text = json.dumps(value, ensure_ascii=True, sort_keys=True, separators=(",", ":"))
    return [*kept, gguf_write.encode_kv(KEY, GgufType.STRING, text)]


def without(entries: Iterable[bytes]) -> list[bytes]:
    """The entries of a GGUF but for the envelope."""
    return [entry for entry in entries if not _is_own(entry)]


def opened(kv: KvMapping) -> tuple[Envelope | None, str | None]:
    """The envelope of a GGUF, and a warning when there is one that no longer counts."""
    if KEY not in kv:
        return None, None
    try:
        value = json.loads(kv[KEY])
        metadata, dtypes = dict(value["metadata"]), {str(k): str(v) for k, v in value["dtypes"].items()}
        fits = value["keys"] == _digest(
            [bytes(kv.raw(k)) for k in kv if k != KEY and not k.startswith("split.")]
        )
        # the rules of a file's own metadata hold here too
        apr_metadata.parse(apr_metadata.dump({k: v for k, v in metadata.items() if v is not None}))
        if any(dtype not in DTYPES for dtype in dtypes.values()):
            raise ValueError("unknown dtype")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None, f"{KEY} is damaged and is left aside"
    if not fits:
        return None, f"the GGUF's keys were edited after the export, so {KEY} is left aside"
    return Envelope(metadata, dtypes), None


def _digest(entries: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for entry in sorted(entries):
        digest.update(entry)
    return digest.hexdigest()


def _is_own(entry: bytes) -> bool:
    name = KEY.encode()
    return entry[8 : 8 + len(name)] == name and int.from_bytes(entry[:8], "little") == len(name)
