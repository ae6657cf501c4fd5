"""The metadata of `.apr` v1: MessagePack with typed fields."""

from __future__ import annotations

import struct
import time
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from aprfmt.errors import CorruptError, LimitError, TruncatedError, UsageError
from aprfmt.limits import MAX_JSON_DEPTH
from aprfmt.types import Json, JsonObject

Kind: TypeAlias = "str | list[Kind] | Fields"
"""Type of a field. FREE: any JSON value, floats as float64. F32: a float32. FREE_MAP and LIST are omitted when empty. A
tuple of fields is a struct; None fields are omitted. [x]: an array of x, omitted when None.
"""


Fields: TypeAlias = "tuple[tuple[str, Kind], ...]"


FREE, F32, FREE_MAP, LIST = "free", "f32", "map", "list"


_TEACHER: Fields = tuple((name, FREE) for name in ("hash", "signature", "model_type", "param_count"))


_TEACHER_WITH_ENSEMBLE: Fields = (*_TEACHER, ("ensemble_teachers", [_TEACHER]))


METADATA_FIELDS: Fields = (
    ("created_at", FREE), ("aprender_version", FREE), ("model_name", FREE), ("description", FREE),
    ("training", (("samples", FREE), ("duration_ms", FREE), ("source", FREE))), ("hyperparameters", FREE_MAP),
    ("metrics", FREE_MAP), ("custom", FREE_MAP), ("distillation", FREE),
    (
        "distillation_info",
        (
            ("method", FREE), ("teacher", _TEACHER_WITH_ENSEMBLE),
            ("params", (("temperature", F32), ("alpha", F32), ("beta", F32), ("epochs", FREE), ("final_loss", F32))),
            ("layer_mapping", [(("student_layer", FREE), ("teacher_layer", FREE), ("weight", F32))]),
        ),
    ),
    ("license", tuple((name, FREE) for name in ("uuid", "hash", "expiry", "seats", "licensee", "tier"))),
    (
        "model_card",
        (
            ("model_id", FREE), ("name", FREE), ("version", FREE), ("author", FREE), ("created_at", FREE),
            ("framework_version", FREE), ("rust_version", FREE), ("description", FREE), ("license", FREE),
            ("training_data", (("name", FREE), ("samples", FREE), ("hash", FREE))), ("hyperparameters", FREE_MAP),
            ("metrics", FREE_MAP), ("architecture", FREE), ("param_count", FREE), ("target_hardware", LIST),
            ("*", FREE),
        ),
    ),
)  # fmt: skip


_STRINGS = ("created_at", "aprender_version", "model_name", "description", "distillation")


_MAPS = ("training", "hyperparameters", "metrics", "custom", "distillation_info", "license", "model_card")


def dump_metadata(metadata: Mapping[str, object]) -> bytes:
    """Serializes `metadata` as the reference does: fields in order, unset fields and empty maps omitted, maps sorted.

    A missing `created_at` becomes the Unix time as decimal text, a missing `aprender_version` "aprfmt". Raises
    UsageError for unknown fields (free ones belong under `custom`) and for values that JSON cannot express.
    """
    values = {"created_at": str(int(time.time())), "aprender_version": "aprfmt", **metadata}
    writer = _MetadataWriter()
    try:
        writer.write(values, METADATA_FIELDS, "metadata", 1)
    except (OverflowError, UnicodeEncodeError) as error:
        raise UsageError(f"metadata value out of range for the format: {error}") from error
    return bytes(writer.out)


class _MetadataWriter:
    def __init__(self) -> None:
        import msgpack

        self.out = bytearray()
        self.packer = msgpack.Packer()

    def write(self, value: object, kind: Kind, where: str, depth: int) -> None:
        if depth > MAX_JSON_DEPTH:
            raise UsageError(f"metadata nested deeper than {MAX_JSON_DEPTH} levels")
        if isinstance(kind, tuple):
            self.write_struct(value, kind, where, depth)
        elif kind == F32:
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise UsageError(f"{where} must be a number")
            self.out += struct.pack(">Bf", 0xCA, value)
        elif isinstance(value, Mapping):
            if not all(isinstance(key, str) for key in value):
                raise UsageError(f"{where} has a key that is not text")
            ordered = sorted(value, key=lambda text: text.encode())
            self.write_map([(key, FREE, value[key]) for key in ordered], where, depth)
        elif isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray):
            self.out += self.packer.pack_array_header(len(value))
            for index, item in enumerate(value):
                self.write(item, kind[0] if isinstance(kind, list) else FREE, f"{where}[{index}]", depth + 1)
        elif value is None or isinstance(value, bool | int | float | str):
            self.out += self.packer.pack(value)
        else:
            raise UsageError(f"{where} is a {type(value).__name__}, which JSON cannot represent")

    def write_struct(self, value: object, fields: Fields, where: str, depth: int) -> None:
        if not isinstance(value, Mapping):
            raise UsageError(f"{where} must be a map")
        known = dict(fields)
        extra = [key for key in value if key not in known]
        if extra and "*" not in known:
            raise UsageError(f"unknown field {where}.{extra[0]}", hint="put your own values under `custom`")
        entries = [(key, kind, value.get(key)) for key, kind in fields if key != "*"]
        entries = [
            (key, kind, item)
            for key, kind, item in entries
            if item is not None and (item or kind not in (FREE_MAP, LIST))
        ]
        self.write_map(entries + [(key, FREE, value[key]) for key in sorted(extra)], where, depth)

    def write_map(self, entries: Sequence[tuple[str, Kind, object]], where: str, depth: int) -> None:
        self.out += self.packer.pack_map_header(len(entries))
        for key, kind, item in entries:
            self.out += self.packer.pack(key)
            self.write(item, kind, f"{where}.{key}", depth + 1)


def parse_metadata(raw: bytes, path: str, base: int = 0) -> JsonObject:
    """Parses the metadata map. `base` is its offset in the file, for messages.

    Raises CorruptError (TruncatedError, LimitError) unless `raw` is exactly one map of the known shape: string keys, no
    duplicates, UTF-8 text, at most 127 levels.
    """
    try:
        value = _unpack_map(raw)
        for names, kind, what in ((_STRINGS, str, "text"), (_MAPS, dict, "a map")):
            for name in names:
                if value.get(name) is not None and not isinstance(value[name], kind):
                    raise CorruptError(f"metadata field {name} is not {what}")
    except CorruptError as error:
        error.path, error.offset = path, base
        raise
    return value


def _unpack_map(raw: bytes) -> JsonObject:
    import msgpack

    try:
        # Lengths beyond that of `raw` are refused, so allocations are bounded by the bytes that follow.
        value: object = msgpack.unpackb(raw, object_pairs_hook=_to_map, strict_map_key=False)
    except CorruptError:
        raise
    except msgpack.ExtraData:
        raise CorruptError("trailing bytes after the metadata map") from None
    except msgpack.StackError:
        raise LimitError(f"metadata nested deeper than {MAX_JSON_DEPTH} levels") from None
    except msgpack.FormatError:
        raise CorruptError("invalid MessagePack byte in the metadata") from None
    except UnicodeDecodeError:
        raise CorruptError("text in the metadata is not UTF-8") from None
    except ValueError:
        raise TruncatedError("the metadata ends in the middle of a value") from None
    if not isinstance(value, dict):
        raise CorruptError("the metadata is not a map")
    level: list[list[object] | dict[str, object]] = [value]
    depth = 0
    while level:
        depth += 1
        if depth > MAX_JSON_DEPTH:
            raise LimitError(f"metadata nested deeper than {MAX_JSON_DEPTH} levels")
        children = [x for node in level for x in (node.values() if isinstance(node, dict) else node)]
        if not all(x is None or isinstance(x, bool | int | float | str | list | dict) for x in children):
            raise CorruptError("the metadata contains binary data")
        level = [x for x in children if isinstance(x, list | dict)]
    return value


def _to_map(pairs: list[tuple[object, Json]]) -> JsonObject:
    out: JsonObject = {}
    for key, value in pairs:
        if not isinstance(key, str):
            raise CorruptError("a metadata key is not text")
        if key in out:
            raise CorruptError(f"metadata key {key!r} occurs twice")
        out[key] = value
    return out
