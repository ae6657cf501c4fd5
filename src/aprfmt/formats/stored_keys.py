"""The metadata keys of a file as it has them, with their types."""

from __future__ import annotations

from collections.abc import Mapping

from aprfmt.formats.gguf_fields import KvMapping
from aprfmt.light_dataclass import light_dataclass
from aprfmt.model import Model

STORED_ITEMS = 64
"""Maximum number of list elements shown per stored key."""


@light_dataclass(frozen=True, slots=True)
class StoredKey:
    """One metadata key as stored.

    Attributes:
        key: its name.
        type: as the container calls it, "UINT32", "ARRAY of STRING"; for JSON "string", "integer", "list", ...
        count: elements of a list, None for other types.
        value: the value; for a list the first STORED_ITEMS elements.
    """

    key: str
    type: str
    count: int | None
    value: object


_JSON_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "list", dict: "object"}


def stored_keys(model: Model, values: Mapping[str, object] | None = None) -> list[StoredKey]:
    """Every metadata key of the file (GGUF keys, those of an `.apr`, config.json), or of `values`, in order."""
    values, found = model.metadata if values is None else values, []
    for key, value in values.items():
        kind = values.kind(key) if isinstance(values, KvMapping) else _JSON_TYPES.get(type(value), "null")
        type_name = " of ".join(kind) if isinstance(kind, tuple) else kind or "ARRAY of ARRAY"
        if isinstance(value, list | tuple):
            found.append(StoredKey(key, type_name, len(value), value[:STORED_ITEMS]))
        else:
            found.append(StoredKey(key, type_name, None, value))
    return found
