"""Metadata of an APR v1 file: MessagePack, a map with string keys in a fixed order.

The codec is written out here because the format wants float32 in some fields and float64 in others, and
because a decoder for hostile input must not allocate what a length field promises.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Mapping, Sequence
from typing import Any

from aprfmt.errors import CorruptError, LimitError, TruncatedError, UsageError
from aprfmt.limits import MAX_JSON_DEPTH

# What a field holds. FREE: any JSON value, floats as float64. F32: a float32. FREE_MAP and LIST are left out
# when empty. A tuple of fields is a struct; None fields are left out. [x]: an array of x, left out when None.
FREE, F32, FREE_MAP, LIST = "free", "f32", "map", "list"
_TEACHER: tuple[tuple[str, Any], ...] = tuple(
    (name, FREE) for name in ("hash", "signature", "model_type", "param_count")
)
_TEACHER_WITH_ENSEMBLE = (*_TEACHER, ("ensemble_teachers", [_TEACHER]))
FIELDS: tuple[tuple[str, Any], ...] = (
    ("created_at", FREE),
    ("aprender_version", FREE),
    ("model_name", FREE),
    ("description", FREE),
    ("training", (("samples", FREE), ("duration_ms", FREE), ("source", FREE))),
    ("hyperparameters", FREE_MAP),
    ("metrics", FREE_MAP),
    ("custom", FREE_MAP),
    ("distillation", FREE),
    (
        "distillation_info",
        (
            ("method", FREE),
            ("teacher", _TEACHER_WITH_ENSEMBLE),
            (
                "params",
                (("temperature", F32), ("alpha", F32), ("beta", F32), ("epochs", FREE), ("final_loss", F32)),
            ),
            ("layer_mapping", [(("student_layer", FREE), ("teacher_layer", FREE), ("weight", F32))]),
        ),
    ),
    ("license", tuple((name, FREE) for name in ("uuid", "hash", "expiry", "seats", "licensee", "tier"))),
    (
        "model_card",
        (
            ("model_id", FREE),
            ("name", FREE),
            ("version", FREE),
            ("author", FREE),
            ("created_at", FREE),
            ("framework_version", FREE),
            ("rust_version", FREE),
            ("description", FREE),
            ("license", FREE),
            ("training_data", (("name", FREE), ("samples", FREE), ("hash", FREE))),
            ("hyperparameters", FREE_MAP),
            ("metrics", FREE_MAP),
            ("architecture", FREE),
            ("param_count", FREE),
            ("target_hardware", LIST),
            ("*", FREE),
        ),
    ),
)
_STRINGS = ("created_at", "aprender_version", "model_name", "description", "distillation")
_MAPS = ("training", "hyperparameters", "metrics", "custom", "distillation_info", "license", "model_card")


def dump(metadata: Mapping[str, Any]) -> bytes:
    """`metadata` as the reference writes it: typed order, unset fields and empty maps left out, maps sorted.

    A missing `created_at` becomes the Unix time as decimal text, a missing `aprender_version` "aprfmt".
    Raises UsageError for unknown fields (free ones belong under `custom`) and for values that JSON cannot
    hold.
    """
    values = {"created_at": str(int(time.time())), "aprender_version": "aprfmt", **metadata}
    try:
        return b"".join(_encode(values, FIELDS, "metadata", 1))
    except (OverflowError, struct.error, UnicodeEncodeError) as error:
        raise UsageError(f"a metadata value does not fit the format: {error}") from error


def _encode(value: Any, kind: Any, where: str, depth: int) -> list[bytes]:
    if depth > MAX_JSON_DEPTH:
        raise UsageError(f"metadata nested deeper than {MAX_JSON_DEPTH} levels")
    if isinstance(kind, tuple):
        return _encode_struct(value, kind, where, depth)
    if kind == F32:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise UsageError(f"{where} must be a number")
        return [b"\xca", struct.pack(">f", value)]
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise UsageError(f"{where} has a key that is no text")
        out = [_head(len(value), 0x80, 16, (None, 0xDE, 0xDF))]
        for key in sorted(value, key=lambda text: text.encode()):
            out += [_text(key), *_encode(value[key], FREE, f"{where}.{key}", depth + 1)]
        return out
    if isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray):
        item = kind[0] if isinstance(kind, list) else FREE
        out = [_head(len(value), 0x90, 16, (None, 0xDC, 0xDD))]
        for index, element in enumerate(value):
            out += _encode(element, item, f"{where}[{index}]", depth + 1)
        return out
    return [_scalar(value, where)]


def _encode_struct(value: Any, fields: Sequence[tuple[str, Any]], where: str, depth: int) -> list[bytes]:
    if not isinstance(value, Mapping):
        raise UsageError(f"{where} must be a map")
    order = dict(fields)
    extra = [key for key in value if key not in order]
    if extra and "*" not in order:
        raise UsageError(f"unknown field {where}.{extra[0]}", hint="put values of your own under custom")
    pairs = [(key, kind, value[key]) for key, kind in fields if key != "*" and _is_set(value.get(key), kind)]
    pairs += [(key, FREE, value[key]) for key in sorted(extra)]
    out = [_head(len(pairs), 0x80, 16, (None, 0xDE, 0xDF))]
    for key, kind, item in pairs:
        out += [_text(key), *_encode(item, kind, f"{where}.{key}", depth + 1)]
    return out


def _is_set(value: Any, kind: Any) -> bool:
    return value is not None and not (kind in (FREE_MAP, LIST) and not value)


def _head(n: int, fix: int, fix_limit: int, tags: tuple[int | None, int, int]) -> bytes:
    """The shortest length prefix: inside the tag byte, or in 8, 16 or 32 bits after the tag."""
    tag8, tag16, tag32 = tags
    if n < fix_limit:
        return bytes([fix | n])
    if tag8 is not None and n < 1 << 8:
        return struct.pack(">BB", tag8, n)
    if n < 1 << 16:
        return struct.pack(">BH", tag16, n)
    return struct.pack(">BI", tag32, n)


def _text(value: str) -> bytes:
    data = value.encode()
    return _head(len(data), 0xA0, 32, (0xD9, 0xDA, 0xDB)) + data


def _scalar(value: Any, where: str) -> bytes:
    if value is None:
        return b"\xc0"
    if isinstance(value, bool):
        return b"\xc3" if value else b"\xc2"
    if isinstance(value, int):
        return _integer(value)
    if isinstance(value, float):
        return struct.pack(">Bd", 0xCB, value)
    if isinstance(value, str):
        return _text(value)
    raise UsageError(f"{where} is a {type(value).__name__}, which JSON cannot hold")


def _integer(value: int) -> bytes:
    if -32 <= value < 128:
        return struct.pack(">b", value)
    if value >= 0:
        tags = ((0xCC, "B", 8), (0xCD, "H", 16), (0xCE, "I", 32), (0xCF, "Q", 64))
        bits = value.bit_length()
    else:
        tags = ((0xD0, "b", 8), (0xD1, "h", 16), (0xD2, "i", 32), (0xD3, "q", 64))
        bits = (-value - 1).bit_length() + 1
    tag, code, _ = next((row for row in tags if bits <= row[2]), tags[-1])
    return struct.pack(">B" + code, tag, value)


def parse(raw: bytes, path: str, base: int = 0) -> dict[str, Any]:
    """The metadata map. `base` is its offset in the file, for messages.

    Raises CorruptError (TruncatedError, LimitError) unless `raw` is exactly one map of the known shape:
    string keys, no duplicates, UTF-8 text, at most 127 levels.
    """
    decoder = _Decoder(raw, path, base)
    value = decoder.value(1)
    if not isinstance(value, dict):
        raise CorruptError("the metadata is not a map", path=path, offset=base)
    if decoder.at != len(raw):
        raise CorruptError(
            "bytes follow the metadata map inside its section", path=path, offset=base + decoder.at
        )
    for names, kind, what in ((_STRINGS, str, "text"), (_MAPS, dict, "a map")):
        for name in names:
            if value.get(name) is not None and not isinstance(value[name], kind):
                raise CorruptError(f"metadata field {name} is not {what}", path=path, offset=base)
    return value


# tag -> struct code of a number.
_NUMBERS = {0xCA: ">f", 0xCB: ">d", 0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q"} | {
    0xD0: ">b",
    0xD1: ">h",
    0xD2: ">i",
    0xD3: ">q",
}
_LENGTHS = {0xD9: (">B", "text"), 0xDA: (">H", "text"), 0xDB: (">I", "text")} | {
    0xDC: (">H", "array"),
    0xDD: (">I", "array"),
    0xDE: (">H", "map"),
    0xDF: (">I", "map"),
}
_CONSTANTS: dict[int, bool | None] = {0xC0: None, 0xC2: False, 0xC3: True}


class _Decoder:
    def __init__(self, raw: bytes, path: str, base: int) -> None:
        self.raw = raw
        self.at = 0
        self.path = path
        self.base = base

    def take(self, n: int) -> bytes:
        if n > len(self.raw) - self.at:
            raise TruncatedError(
                "the metadata ends in the middle of a value", path=self.path, offset=self.where
            )
        self.at += n
        return self.raw[self.at - n : self.at]

    @property
    def where(self) -> int:
        return self.base + self.at

    def value(self, depth: int) -> Any:
        tag = self.take(1)[0]
        if tag < 0x80 or tag >= 0xE0:
            return tag if tag < 0x80 else tag - 256
        if tag in _CONSTANTS:
            return _CONSTANTS[tag]
        if tag in _NUMBERS:
            return self.number(_NUMBERS[tag])
        if tag < 0xA0:
            return self.container("map" if tag < 0x90 else "array", tag & 15, depth)
        if tag < 0xC0:
            return self.text(tag & 31)
        if tag not in _LENGTHS:
            raise CorruptError(
                f"the metadata holds binary data (tag {tag:#x})", path=self.path, offset=self.where - 1
            )
        code, what = _LENGTHS[tag]
        n = self.number(code)
        return self.text(n) if what == "text" else self.container(what, n, depth)

    def number(self, code: str) -> Any:
        return struct.unpack(code, self.take(struct.calcsize(code)))[0]

    def text(self, n: int) -> str:
        start = self.where
        try:
            return self.take(n).decode()
        except UnicodeDecodeError:
            raise CorruptError("text in the metadata is not UTF-8", path=self.path, offset=start) from None

    def container(self, what: str, n: int, depth: int) -> Any:
        if depth > MAX_JSON_DEPTH:
            raise LimitError(
                f"metadata nested deeper than {MAX_JSON_DEPTH} levels", path=self.path, offset=self.where
            )
        if what == "array":
            return [self.value(depth + 1) for _ in range(n)]
        out: dict[str, Any] = {}
        for _ in range(n):
            start = self.where
            key = self.value(depth + 1)
            if not isinstance(key, str):
                raise CorruptError("a metadata key is not text", path=self.path, offset=start)
            if key in out:
                raise CorruptError(f"metadata key {key!r} occurs twice", path=self.path, offset=start)
            out[key] = self.value(depth + 1)
        return out
