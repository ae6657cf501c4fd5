"""A model's origin: read from and written to model cards, config.json and `general.*` keys.

Fields that are typed in APR are `info`; the rest is `general`, stored under GENERAL in an `.apr`:

    {"organization": str, "license.name": str, ...,   one string for each of TEXT_NAMES without a typed field
     "base_models": [{"name", "organization", "repo_url", ...: str}], "datasets": [the same],
     "tags": [str], "languages": [str]}

GGUF key names and types are those of llama.cpp's converter. Unlike it, this module does not guess version, size and
fine-tune from the folder's name; the size label is computed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import field
from typing import TypeAlias

from aprfmt.errors import UsageError
from aprfmt.formats.gguf_fields import GgufType
from aprfmt.light_dataclass import light_dataclass
from aprfmt.model import Model
from aprfmt.provenance.model_card import (
    CARD,
    ENTRY_FIELDS,
    entries,
    from_card,
    from_location,
    from_name_or_path,
    hub_id,
    parse_card,
    read_card,
    text,
    texts,
)
from aprfmt.provenance.spdx import canonical_license, license_warnings

GENERAL = "aprfmt.general"
INFO_FIELDS = (*("name", "description", "author", "license", "version", "source"), *("data_source", "data_license"))

# Names in `general`, in the order of llama.cpp's converter; their GGUF keys begin with "general.".
TEXT_NAMES = (
    *("name", "author", "version", "organization", "finetune", "basename", "description", "quantized_by"),
    *("size_label", "license", "license.name", "license.link", "url", "doi", "uuid", "repo_url"),
    *("source.url", "source.doi", "source.uuid", "source.repo_url"),
)
# Those with a typed APR field.
_TYPED = {name: name for name in TEXT_NAMES if name in INFO_FIELDS} | {"source.url": "source"}
# Name in `general` -> infix of its numbered GGUF keys; for plain lists their key.
ENTRY_LISTS = {"base_models": "base_model", "datasets": "dataset"}
TEXT_LISTS = {"tags": "general.tags", "languages": "general.languages"}

_ENTRY_KEY = re.compile(r"general\.(base_model|dataset)\.(\d{1,4})\.(\w+)")
_UNTYPED = tuple(name for name in TEXT_NAMES if name not in _TYPED)

# File names common to all models.
_NO_NAMES = ("model", "pytorch_model", "consolidated", "adapter_model")

KeyValue: TypeAlias = "tuple[str, GgufType | tuple[GgufType, GgufType], object]"


@light_dataclass(slots=True)
class Provenance:
    """What a source states about itself.

    Attributes:
        info: the known INFO_FIELDS, never empty.
        general: untyped fields, as in the module's docstring; None if the source has none.
        warnings: unreadable parts, and licenses that are not SPDX ids.
    """

    info: dict[str, str]
    general: dict[str, object] | None = None
    warnings: list[str] = field(default_factory=list)


def read(model: Model) -> Provenance:
    """The provenance of an opened model of any container."""
    if model.convention == "gguf":
        found = from_gguf(model.metadata)
    elif model.convention == "apr":
        return Provenance({"name": model.path.stem}) if model.format == "apr-v1" else _from_apr(model.metadata)
    else:
        found = _from_files(model)
    found.warnings += license_warnings(found.info.get("license"), text((found.general or {}).get("license.name")))
    return found


def valid_general(general: object) -> dict[str, object]:
    """`general` reduced to known keys with the right types: a file may contain anything."""
    if not isinstance(general, Mapping):
        return {}
    out: dict[str, object] = {
        name: value for name in sorted(_UNTYPED) if (value := text(general.get(name))) is not None
    }
    out |= {name: rows for name in ENTRY_LISTS if (rows := entries(general.get(name)))}
    return out | {name: items for name in TEXT_LISTS if (items := texts(general.get(name)))}


# --- GGUF ---


def from_gguf(kv: Mapping[str, object]) -> Provenance:
    """The provenance in `general.*` keys; values of the wrong type are ignored."""
    info = {typed: value for name, typed in _TYPED.items() if (value := text(kv.get(f"general.{name}"))) is not None}
    general: dict[str, object] = {name: kv.get(f"general.{name}") for name in _UNTYPED}
    general |= {name: kv.get(key) for name, key in TEXT_LISTS.items()} | _read_entries(kv)
    general = valid_general(general)
    if sources := dataset_ids(general):
        info["data_source"] = sources
    return Provenance(info, general)


def _read_entries(kv: Mapping[str, object]) -> dict[str, object]:
    found: dict[str, dict[int, dict[str, object]]] = {infix: {} for infix in ENTRY_LISTS.values()}
    for key in kv:
        if (match := _ENTRY_KEY.fullmatch(key)) is not None and match[3] in ENTRY_FIELDS:
            found[match[1]].setdefault(int(match[2]), {})[match[3]] = kv[key]
    out: dict[str, object] = {
        name: [row for _, row in sorted(found[infix].items())] for name, infix in ENTRY_LISTS.items()
    }
    # An earlier edition of the keys: plain ids.
    if not out["datasets"] and (ids := texts(kv.get("general.datasets"))):
        out["datasets"] = from_card({"datasets": ids})[1]["datasets"]
    return out


def to_gguf(info: Mapping[str, object], general: Mapping[str, object] | None) -> Iterator[KeyValue]:
    """The `general.*` keys of a model, in the converter's order."""
    general = general or {}
    for name in TEXT_NAMES:
        if value := info.get(_TYPED[name]) if name in _TYPED else general.get(name):
            yield f"general.{name}", GgufType.STRING, value
    for name, infix in ENTRY_LISTS.items():
        rows = entries(general.get(name))
        if rows:
            yield f"general.{infix}.count", GgufType.UINT32, len(rows)
        for i, row in enumerate(rows):
            for entry in ENTRY_FIELDS:
                if entry in row:
                    yield f"general.{infix}.{i}.{entry}", GgufType.STRING, row[entry]
    for name, key in TEXT_LISTS.items():
        if general.get(name):
            yield key, (GgufType.ARRAY, GgufType.STRING), general[name]


def size_label(n_params: int) -> str:
    """A parameter count with at least two digits, as llama.cpp writes it: 494032768 -> "494M", 1500000000 -> "1.5B"."""
    for unit, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        scaled = n_params / unit
        if scaled > 1 or suffix == "K":
            break
    whole = round(scaled)
    digits = len(str(whole)) if whole else 0
    return f"{scaled:.{max(2 - digits, 0)}f}{suffix}"


# --- .apr ---


def _from_apr(metadata: Mapping[str, object]) -> Provenance:
    info = {name: value for name in INFO_FIELDS if (value := text(metadata.get(name))) is not None}
    general = metadata.get(GENERAL)
    return Provenance(info, None if general is None else valid_general(general))


def to_metadata(general: Mapping[str, object] | None) -> dict[str, object]:
    """The `.apr` key for `general`; written even if empty, meaning that nothing is known."""
    return {} if general is None else {GENERAL: dict(general)}


# --- files ---


def _from_files(model: Model) -> Provenance:
    """A folder, or one weight file: the card in the folder, then config.json, then the name."""
    from aprfmt.formats.hfdir import HfNative
    from aprfmt.formats.safetensors import SafetensorsNative

    hf, single = model.native_as(HfNative), model.native_as(SafetensorsNative)
    folder = hf.folder if hf is not None else None
    if single is not None and single.config_path is not None:
        folder = single.config_path.parent
    card, warnings = read_card(folder) if folder is not None else ({}, [])
    info, general = from_card(card)
    if hf is not None:
        fallback = [from_name_or_path(model.metadata), from_location(hf.folder)]
    elif model.path.stem in _NO_NAMES:
        fallback = [from_location(model.path.parent)]
    else:
        fallback = [({"name": model.path.stem}, {})]
    for more_info, more_general in fallback:
        info = more_info | info
        general = more_general | general
    general = valid_general(general)
    if "data_source" not in info and (sources := dataset_ids(general)):
        info["data_source"] = sources
    known = {name: value for name in INFO_FIELDS if (value := text(info.get(name))) is not None}
    return Provenance(known, general, warnings)


def dataset_ids(general: Mapping[str, object]) -> str:
    """The data sets in the form of `data_source`: their ids, joined by commas."""
    return ",".join(
        found for row in entries(general.get("datasets")) if (found := hub_id(row) or row.get("name") or row.get("url"))
    )


# --- the user's word ---

FLAGS = ("license", "data_source", "data_license")
"""Fields with an option in import, convert and stamp."""


def from_flags(flags: Mapping[str, str | None]) -> dict[str, str]:
    """The given FLAGS, licenses in SPDX spelling. Raises UsageError for empty values."""
    out = {}
    for name, value in flags.items():
        if value is None:
            continue
        flag = "--" + name.replace("_", "-")
        if name.endswith("license"):
            value = canonical_license(value, flag)
        elif not value.strip():
            raise UsageError(f"{flag} is empty", hint="name the data set, or teacher-only")
        out[name] = value
    return out


def without_license(general: object) -> dict[str, object] | None:
    """`general` after another license is set: without the old one's name and link. None stays None."""
    if not isinstance(general, Mapping):
        return None
    return {name: value for name, value in general.items() if name not in ("license.name", "license.link")}


def card_fields(card: bytes) -> dict[str, str]:
    """The typed fields that an import takes from the model card `card`."""
    known, general = from_card(parse_card(card)[0])
    if "data_source" not in known and (sources := dataset_ids(valid_general(general))):
        known["data_source"] = sources
    return {name: value for name in INFO_FIELDS if (value := text(known.get(name))) is not None}


def contradictions(card: bytes, info: Mapping[str, object]) -> list[str]:
    """Warnings if a card that is carried unchanged contradicts `info`."""
    known = card_fields(card)
    return [
        f"{CARD} is unchanged and still has {name} {known[name]!r}, not {info[name]!r}"
        for name in FLAGS
        if known.get(name) and info.get(name) and known[name] != info[name]
    ]
