"""GGUF writer: key-value entries from typed values, and the layout of a file. See gguf.py for the bytes."""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterable, Sequence
from typing import TypeAlias

from aprfmt.codecs.dtypes import find_dtype
from aprfmt.errors import AprError, UnsupportedError, UsageError
from aprfmt.formats.gguf import DEFAULT_ALIGNMENT, MAX_DIMS
from aprfmt.formats.gguf_fields import FORMATS, Cursor, GgufType, check_string, decode
from aprfmt.formats.out_tensor import OutTensor
from aprfmt.io.pipe import Literal, Segment, Zeros
from aprfmt.io.source import padding
from aprfmt.limits import MAX_ARRAY_DEPTH, MAX_KEY_BYTES

ValueType: TypeAlias = "GgufType | tuple[GgufType, ValueType]"
"""A scalar type, or (GgufType.ARRAY, element type); element types may be arrays again."""

KV: TypeAlias = tuple[str, ValueType, object]
"""Key, type, value; an array's value is a sequence."""


def encode_value(type: ValueType, value: object, depth: int = 0) -> bytes:
    """Encodes `value` without its type; arrays begin with element type and count.

    Strings may be str (lone surrogates of undecodable bytes become those bytes again) or bytes. `depth` counts
    enclosing arrays. Raises UsageError if the value does not match the type.
    """
    try:
        if isinstance(type, tuple):
            return _encode_array(type, value, depth + 1)
        if type is GgufType.STRING:
            return _encode_string(value)
        if type is GgufType.ARRAY:
            raise UsageError("an array needs its element type: (GgufType.ARRAY, element type)")
        return struct.pack("<" + FORMATS[type], value)
    except (struct.error, OverflowError, TypeError, UnicodeEncodeError) as error:
        raise UsageError(f"the value does not fit {_spell(type)}: {error}") from error


def _encode_string(value: object) -> bytes:
    raw = _string_bytes(value)
    return struct.pack("<Q", len(raw)) + raw


def _string_bytes(value: object) -> bytes:
    if isinstance(value, str):
        return value.encode("utf-8", "surrogateescape")
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    raise TypeError("neither text nor bytes")


_LENGTHS = tuple(struct.pack("<Q", n) for n in range(256))


def _encode_strings(values: Iterable[object]) -> bytes:
    """Vocabularies have hundreds of thousands of short strings: their encoded lengths come from a table."""
    raw = [v.encode("utf-8", "surrogateescape") if isinstance(v, str) else _string_bytes(v) for v in values]
    parts = [b""] * (2 * len(raw))
    try:
        parts[0::2] = [_LENGTHS[n] for n in map(len, raw)]
    except IndexError:
        parts[0::2] = [struct.pack("<Q", len(text)) for text in raw]
    parts[1::2] = raw
    return b"".join(parts)


def _encode_array(kind: tuple[GgufType, ValueType], values: object, depth: int) -> bytes:
    if not isinstance(values, Collection):
        raise TypeError("not a list")
    if depth > MAX_ARRAY_DEPTH:
        raise UsageError(f"arrays are nested deeper than {MAX_ARRAY_DEPTH}")
    elem = kind[1]
    head = struct.pack("<IQ", _number(elem), len(values))
    if isinstance(elem, GgufType) and elem in FORMATS:
        return head + struct.pack(f"<{len(values)}{FORMATS[elem]}", *values)
    if elem is GgufType.STRING:
        return head + _encode_strings(values)
    return head + b"".join(encode_value(elem, value, depth) for value in values)


def _number(kind: ValueType) -> int:
    return int(kind[0] if isinstance(kind, tuple) else kind)


def _spell(kind: ValueType) -> str:
    return f"ARRAY of {_spell(kind[1])}" if isinstance(kind, tuple) else kind.name


def encode_kv(key: str, type: ValueType, value: object) -> bytes:
    """Encodes a whole entry: key, type, value. Raises UsageError, LimitError for a string that readers would refuse."""
    raw = _encode_string(key)
    if not 0 < len(raw) - 8 <= MAX_KEY_BYTES:
        raise UsageError(f"a GGUF key must have 1 to {MAX_KEY_BYTES} bytes, {key[:40]!r} has {len(raw) - 8}")
    try:
        stored = encode_value(type, value)
        if type is GgufType.STRING:
            check_string(key, len(stored) - 8)
        return raw + struct.pack("<I", _number(type)) + stored
    except UsageError as error:
        raise UsageError(f"key {key!r}: {error.message}") from error


def layout(
    kv: Sequence[KV | bytes], tensors: Sequence[OutTensor], *, alignment: int = DEFAULT_ALIGNMENT, version: int = 3
) -> list[Segment]:
    """A GGUF file: header, keys and tensors in the given order, each tensor padded to `alignment`.

    A pair may be given as the encoded entry of another file. An alignment other than 32 must also be in `kv` as
    `general.alignment`.

    Raises UsageError (duplicate names, wrong values), UnsupportedError (a dtype or number of dimensions that GGUF does
    not have).
    """
    if version not in (2, 3):
        raise UsageError(f"unsupported GGUF version {version}; supported: 2 and 3")
    _check_keys(kv, alignment)
    entries = [item if isinstance(item, bytes) else encode_kv(*item) for item in kv]
    infos, offset = [], 0
    for tensor in tensors:
        infos.append(_encode_info(tensor, offset))
        offset += tensor.n_bytes + padding(tensor.n_bytes, alignment)
    if len({tensor.name for tensor in tensors}) != len(tensors):
        raise UsageError("duplicate tensor name")
    head = b"".join([b"GGUF", struct.pack("<IQQ", version, len(tensors), len(kv)), *entries, *infos])
    segments: list[Segment] = [Literal(head), *_pad(len(head), alignment)]
    for tensor in tensors:
        segments += [tensor.stream(), *_pad(tensor.n_bytes, alignment)]
    return segments


def _pad(n_bytes: int, alignment: int) -> list[Segment]:
    missing = padding(n_bytes, alignment)
    return [Zeros(missing)] if missing else []


def _check_keys(kv: Sequence[KV | bytes], alignment: int) -> None:
    keys: set[str] = set()
    stated: object = DEFAULT_ALIGNMENT
    for item in kv:
        key, value = _checked_entry(item) if isinstance(item, bytes) else (item[0], item[2])
        if key in keys:
            raise UsageError(f"duplicate key {key!r}")
        keys.add(key)
        if key == "general.alignment":
            stated = value
    if stated != alignment or alignment < 1 or alignment & (alignment - 1):
        raise UsageError(f"the alignment is {alignment}, but 'general.alignment' is {stated}")


def _checked_entry(raw: bytes) -> tuple[str, object]:
    """Key of an encoded entry, and its value if it is the alignment; the entry must be complete."""
    view = memoryview(raw)
    try:
        entry = Cursor(view, "").entry()
    except AprError as error:
        raise UsageError(f"an encoded entry is damaged: {error.message}") from error
    if entry.end != len(raw):
        raise UsageError(f"trailing bytes after the encoded entry {entry.key!r}")
    return entry.key, decode(view, entry) if entry.key == "general.alignment" else None


def _encode_info(tensor: OutTensor, offset: int) -> bytes:
    dtype = find_dtype(tensor.dtype)
    if dtype.ggml_id is None:
        raise UnsupportedError(
            f"GGUF has no type for {dtype.name}", tensor=tensor.name, hint="choose another one with --dtype"
        )
    if len(tensor.shape) > MAX_DIMS:
        raise UnsupportedError(f"{len(tensor.shape)} dimensions; GGUF allows at most {MAX_DIMS}", tensor=tensor.name)
    if dtype.n_bytes(tensor.shape or (1,)) != tensor.n_bytes:
        raise UsageError(
            f"{tensor.n_bytes} bytes do not match {dtype.name} of shape {list(tensor.shape)}", tensor=tensor.name
        )
    n_dims = len(tensor.shape)
    return _encode_string(tensor.name) + struct.pack(
        f"<I{n_dims}QIQ", n_dims, *reversed(tensor.shape), dtype.ggml_id, offset
    )


def typed_kv(kv: tuple[str, str | tuple[str, str], object]) -> KV:
    """A key-value pair whose types are given as names of GgufType."""
    key, kind, value = kv
    if isinstance(kind, tuple):
        return key, (GgufType[kind[0]], GgufType[kind[1]]), value
    return key, GgufType[kind], value
