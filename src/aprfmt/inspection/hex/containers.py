"""The layout of each container as spans, walked from the bytes alone: a damaged file is shown up to the damage."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path

from aprfmt.codecs.dtypes import DTYPES_BY_APR_ID, DTYPES_BY_GGML_ID
from aprfmt.errors import AprError, ChecksumError, CorruptError, LimitError, TruncatedError
from aprfmt.formats import apr1, apr1_metadata, apr2
from aprfmt.formats.apr_legacy import detect_apr
from aprfmt.formats.gguf import DEFAULT_ALIGNMENT, read_header
from aprfmt.formats.gguf_fields import FORMATS, Cursor, GgufType, KvEntry, decode
from aprfmt.formats.safetensors import MAX_LIBRARY_HEADER_BYTES, METADATA_KEY
from aprfmt.inspection.hex.spans import Entry, Span, Walk, shown
from aprfmt.io.source import Source, padding
from aprfmt.limits import MAX_HEADER_BYTES, MAX_METADATA_BYTES, MAX_NAME_BYTES, MAX_NDIM
from aprfmt.text import format_shape, plural
from aprfmt.types import Json

_ITEMS = 8
"""Elements of an array that are decoded for display."""

Step = Walk | AprError
"""A section, or damage that does not stop the walk."""


@dataclass(frozen=True, slots=True)
class Container:
    """A container: its detection by the first bytes, its name, and its walker."""

    label: str
    begins: Callable[[bytes, int], bool]
    walk: Callable[[Source], Iterator[Step]]


def container_of(source: Source) -> Container | None:
    """The container whose bytes the file begins with; None if it is not supported here."""
    head = source.read(0, min(64, source.size))
    if head.startswith(b"APR"):
        with suppress(AprError):  # nothing matches: shown as what it begins like
            if detect_apr(source, Path(source.path)) == "apr-legacy":
                return None
    return next((row for row in CONTAINERS if row.begins(head, source.size)), None)


def _fixed(source: Source, form: struct.Struct, names: Sequence[str], at: int = 0) -> list[Span]:
    """Spans of consecutive little-endian fields, as far as the file goes."""
    spans, codes = [], _codes(form.format)
    for name, code in zip(names, codes, strict=True):
        n_bytes = struct.calcsize("<" + code)
        if at + n_bytes > source.size:
            break
        (value,) = struct.unpack("<" + code, source.read(at, n_bytes))
        if isinstance(value, bytes):
            value = value.hex(" ") if name == "reserved" else value.decode("latin-1")
        spans.append(Span(at, n_bytes, name, value))
        at += n_bytes
    return spans


def _codes(form: str) -> list[str]:
    codes, count = [], ""
    for c in form.lstrip("<"):
        if c.isdigit():
            count += c
            continue
        codes += [count + "s"] if c in "sx" else [c] * int(count or 1)
        count = ""
    return codes


# --- GGUF ---

_GGUF_HEADER = struct.Struct("<4sIQQ")


def _gguf(source: Source) -> Iterator[Step]:
    header = _fixed(source, _GGUF_HEADER, ("magic", "version", "tensor count", "key count"))
    yield Walk("header", iter([header]), "header")
    cursor = Cursor(bytearray(), source.path, source=source)
    try:
        _, n_tensors, n_kv = read_header(cursor)
    except TruncatedError:  # the walk reaches the end of the file
        if len(header) < 4:
            raise
        n_tensors, n_kv = (n if isinstance(n := header[i].value, int) else 0 for i in (2, 3))
    alignment = [DEFAULT_ALIGNMENT]
    yield Walk("metadata", _gguf_keys(cursor, n_kv, alignment), "key", n_kv)
    start = cursor.pos
    data_start = _gguf_data_start(cursor, n_tensors, alignment[0])
    cursor.pos = start
    lacking: list[str] = []
    yield Walk("index", _gguf_infos(cursor, n_tensors, data_start, lacking), "tensor", n_tensors)
    yield from _beyond(lacking, source)
    yield Walk("data", iter([_rest(source, cursor.pos, data_start)]), "part")


def _beyond(names: Sequence[str], source: Source) -> Iterator[AprError]:
    """Reports that the data of these tensors is, at least in part, beyond the end of the file."""
    if names:
        message = f"the data of {plural(len(names), 'tensor')} extends past the end of the file"
        yield TruncatedError(message, path=source.path, tensor=names[0], offset=source.size)


def _rest(source: Source, end: int, data_start: int) -> list[Span]:
    """The padding between the header and the data, and the data."""
    data_start = min(data_start, source.size)
    spans = [Span(end, data_start - end, "padding", meaning="up to the alignment")] if data_start > end else []
    return [*spans, Span(data_start, source.size - data_start, "tensor data", meaning="apr hex FILE --tensor NAME")]


def _gguf_keys(cursor: Cursor, n_kv: int, alignment: list[int]) -> Iterator[Entry]:
    for _ in range(n_kv):
        entry = cursor.entry()
        if entry.key == "general.alignment" and entry.type is GgufType.UINT32:
            alignment[0] = max(1, decode(cursor.data, entry))
        yield _gguf_key(cursor, entry)


def _gguf_key(cursor: Cursor, entry: KvEntry) -> list[Span]:
    data, at = cursor.data, entry.value_start
    n_key = at - 4 - entry.start
    spans = [
        Span(entry.start, n_key, "key", entry.key, f"a length of 8 bytes, then {plural(n_key - 8, 'byte')}"),
        Span(at - 4, 4, "type", int(entry.type), entry.type.name),
    ]
    if entry.type is GgufType.ARRAY and entry.elem_type is not None and entry.count is not None:
        few, more = _few(data, entry), entry.count > _ITEMS
        text = shown(json.dumps(few, ensure_ascii=False, default=str)[:-1] + (", …]" if more else "]"))
        return [
            *spans,
            Span(at, 4, "element type", int(entry.elem_type), entry.elem_type.name),
            Span(at + 4, 8, "count", entry.count),
            Span(at + 12, entry.end - at - 12, "elements", text),
        ]
    if entry.type is GgufType.STRING:
        n_bytes = entry.end - at - 8
        text = bytes(data[at + 8 : at + 8 + min(n_bytes, 1 << 10)]).decode("utf-8", "surrogateescape")
        return [*spans, Span(at, 8, "length", n_bytes), Span(at + 8, n_bytes, "value", shown(text))]
    return [*spans, Span(at, entry.end - at, "value", decode(data, entry))]


def _few(data: bytes | bytearray | memoryview, entry: KvEntry) -> list[Json]:
    """The first elements of an array; nested arrays as their type only."""
    kind, at, n = entry.elem_type, entry.value_start + 12, min(entry.count or 0, _ITEMS)
    if kind is None or kind is GgufType.ARRAY:
        return ["(array)"] * n
    if kind is not GgufType.STRING:
        return list(struct.unpack_from(f"<{n}{FORMATS[kind]}", data, at))
    found: list[Json] = []
    for _ in range(n):
        (length,) = struct.unpack_from("<Q", data, at)
        text = bytes(data[at + 8 : at + 8 + min(length, 1 << 10)]).decode("utf-8", "surrogateescape")
        found.append(shown(text))
        at += 8 + length
    return found


def _gguf_data_start(cursor: Cursor, n_tensors: int, alignment: int) -> int:
    for _ in _gguf_infos(cursor, n_tensors, 0, []):
        pass
    return cursor.pos + padding(cursor.pos, alignment)


def _gguf_infos(cursor: Cursor, n_tensors: int, data_start: int, lacking: list[str]) -> Iterator[Entry]:
    """Adds names of tensors beyond the end of the file to `lacking`."""
    for _ in range(n_tensors):
        at = cursor.pos
        name = cursor.string(MAX_NAME_BYTES, "a tensor name")
        n_name = cursor.pos - at
        n_dims = cursor.u32("a tensor's dimension count")
        if n_dims > MAX_NDIM:
            raise LimitError(f"{n_dims} dimensions", path=cursor.path, tensor=name, offset=cursor.pos - 4)
        dims = [cursor.u64("a dimension") for _ in range(n_dims)]
        kind, offset = cursor.u32("a tensor's type"), cursor.u64("a tensor's offset")
        dtype = DTYPES_BY_GGML_ID.get(kind)
        end = cursor.pos
        if dtype is not None and offset + data_start + prod(dims) // dtype.block * dtype.block_bytes > cursor.size:
            lacking.append(name)
        yield [
            Span(at, n_name, "name", name, f"a length of 8 bytes, then {plural(n_name - 8, 'byte')}"),
            Span(at + n_name, 4, "dimensions", n_dims),
            Span(
                at + n_name + 4, 8 * n_dims, "sizes", list(dims), f"fastest-varying first: {format_shape(dims[::-1])}"
            ),
            Span(end - 12, 4, "type", kind, dtype.name if dtype is not None else "unknown"),
            Span(end - 8, 8, "offset", offset, f"in the data: byte {offset + data_start:,} of the file"),
        ]


# --- JSON, as safetensors and .apr have it ---


def _members(raw: bytes, base: int, path: str) -> Iterator[tuple[str, object, int, int, int]]:
    """(key, value, start of the key, start and end of the value) of a JSON object, in bytes of the file."""
    text = raw.decode("utf-8", "surrogateescape")
    scan, blank = json.JSONDecoder(strict=False), " \t\r\n"

    def skip(at: int, expected: str = "") -> int:
        while at < len(text) and text[at] in blank:
            at += 1
        if expected and (at >= len(text) or text[at] not in expected):
            raise CorruptError(f"expected {expected[0]!r} in the JSON text", path=path, offset=base + at)
        return at

    at, n_bytes, n_chars = skip(0, "{") + 1, 0, 0

    def place(at: int) -> int:
        nonlocal n_bytes, n_chars
        n_bytes, n_chars = n_bytes + len(text[n_chars:at].encode("utf-8", "surrogateescape")), at
        return base + n_bytes

    try:
        at = skip(at)
        while text[at : at + 1] != "}":
            start = skip(at, '"')
            key, at = scan.raw_decode(text, start)
            value_start = skip(skip(at, ":") + 1)
            value, end = scan.raw_decode(text, value_start)
            yield str(key), value, place(start), place(value_start), place(end)
            at = skip(end, ",}")
            at = skip(at + 1) if text[at] == "," else at
    except (ValueError, RecursionError) as error:
        raise CorruptError("the JSON text ends unexpectedly", path=path, offset=place(min(at, len(text)))) from error


def _json_entries(raw: bytes, base: int, path: str, meaning: Callable[[str, object], str]) -> Iterator[Entry]:
    for key, value, start, value_start, end in _members(raw, base, path):
        few = raw[value_start - base : min(end, value_start + 1024) - base].decode("utf-8", "replace")
        yield [
            Span(start, value_start - start, "key", shown(key)),
            Span(value_start, end - value_start, "value", shown(few), meaning(key, value)),
        ]


def _safetensors(source: Source) -> Iterator[Step]:
    header = _fixed(source, struct.Struct("<Q"), ("header length",))
    yield Walk("header", iter([header]), "header")
    n_bytes = int.from_bytes(source.read(0, 8), "little")
    if n_bytes > min(MAX_LIBRARY_HEADER_BYTES, MAX_HEADER_BYTES):
        raise LimitError(f"a header of {n_bytes} bytes", path=source.path, offset=0)
    source.check(8, n_bytes, "the header")
    start, lacking = 8 + n_bytes, list[str]()

    def meaning(key: str, value: object) -> str:
        if key == METADATA_KEY or not isinstance(value, dict):
            return ""
        span = value.get("data_offsets")
        if not (isinstance(span, list) and len(span) == 2 and all(type(at) is int for at in span)):
            return "no data_offsets"
        if span[1] + start > source.size:
            lacking.append(key)
        return f"bytes {span[0] + start:,} to {span[1] + start:,} of the file"

    yield Walk("index", _json_entries(source.read(8, n_bytes), 8, source.path, meaning), "member")
    yield from _beyond(lacking, source)
    yield Walk("data", iter([_rest(source, start, start)]), "part")


# --- .apr ---

_APR_NAMES = (
    *("magic", "major", "minor", "flags", "tensor count", "metadata offset", "metadata size", "index offset"),
    *("data offset", "checksum", "reserved"),
)


def _apr2(source: Source) -> Iterator[Step]:
    spans = _fixed(source, apr2.HEADER, _APR_NAMES)
    header = apr2.parse_header(source)
    if header is None:
        yield Walk("header", iter([spans]), "header")
        raise TruncatedError(f"the file has {source.size} bytes, fewer than its header of 64", path=source.path)
    names = [name for name, bit in apr2.FLAGS.items() if header.flags & bit]
    for span, meaning in ((spans[3], ", ".join(names)), (spans[9], "right" if header.crc_ok else "wrong")):
        span.meaning = meaning
    yield Walk("header", iter([spans]), "header")
    try:
        apr2.read_header(source)
    except ChecksumError as error:  # the rest may still be intact
        error.path = source.path
        yield error
    start, n_bytes = header.metadata_offset, header.metadata_size
    source.check(start, n_bytes, "the metadata")
    if n_bytes > MAX_METADATA_BYTES:
        raise LimitError(f"metadata of {n_bytes} bytes", path=source.path, offset=20)
    yield Walk("metadata", _json_entries(source.read(start, n_bytes), start, source.path, lambda key, value: ""), "key")
    lacking: list[str] = []
    yield Walk("index", _apr_index(source, header, lacking), "tensor", header.tensor_count)
    yield from _beyond(lacking, source)
    end = source.size - 4 if source.size - 4 >= header.data_offset else source.size
    data = Span(header.data_offset, end - header.data_offset, "tensor data", meaning="apr hex FILE --tensor NAME")
    parts: list[Entry] = [[data]]
    if end < source.size:
        parts.append([Span(end, 4, "checksum", source.read(end, 4)[::-1].hex(), "CRC-32 of all preceding bytes")])
    yield Walk("data", iter(parts), "part")


def _apr_index(source: Source, header: apr2.Header, lacking: list[str]) -> Iterator[Entry]:
    at, end = header.tensor_index_offset, min(header.data_offset, source.size)
    if end - at > MAX_HEADER_BYTES:
        raise LimitError(f"an index of {end - at} bytes", path=source.path, offset=24)
    for _ in range(header.tensor_count):
        start = at
        if at + 2 > end:
            raise TruncatedError("an index entry reaches beyond the index", path=source.path, offset=start)
        n_name = int.from_bytes(source.read(at, 2), "little")
        if at + 4 + n_name > end:
            raise TruncatedError("an index entry reaches beyond the index", path=source.path, offset=start)
        name = source.read(at + 2, n_name).decode("utf-8", "surrogateescape")
        dtype_id, ndim = source.read(at + 2 + n_name, 2)
        fields = at + 4 + n_name
        if ndim > MAX_NDIM or fields + 8 * ndim + 16 > end:
            raise TruncatedError("an index entry reaches beyond the index", path=source.path, offset=start, tensor=name)
        *dims, offset, size = struct.unpack(f"<{ndim + 2}Q", source.read(fields, 8 * ndim + 16))
        row, at = DTYPES_BY_APR_ID.get(dtype_id), fields + 8 * ndim + 16
        if offset + header.data_offset + size > source.size:
            lacking.append(name)
        yield [
            Span(start, 2 + n_name, "name", name, f"a length of 2 bytes, then {plural(n_name, 'byte')}"),
            Span(fields - 2, 1, "dtype", dtype_id, row.name if row is not None else "unknown"),
            Span(fields - 1, 1, "dimensions", ndim),
            Span(fields, 8 * ndim, "sizes", list(dims), f"{format_shape(dims)}, {prod(dims):,} values"),
            Span(at - 16, 8, "offset", offset, f"in the data: byte {offset + header.data_offset:,} of the file"),
            Span(at - 8, 8, "size", size),
        ]


_APR1_HEADER = struct.Struct("<4sBBHIIIBBB9s")
_APR1_NAMES = (
    *("magic", "major", "minor", "model type", "metadata size", "payload size", "uncompressed size"),
    *("compression", "flags", "quality", "reserved"),
)


def _apr1(source: Source) -> Iterator[Step]:
    spans = _fixed(source, _APR1_HEADER, _APR1_NAMES)
    values = {span.name: span.value for span in spans}
    sizes = [value if isinstance(value, int) else 0 for value in map(values.get, ("metadata size", "payload size"))]
    for span in spans:
        code = span.value if isinstance(span.value, int) else 0
        if span.name == "model type":
            span.meaning = apr1.MODEL_TYPES.get(code, "unknown")
        elif span.name == "compression":
            span.meaning = apr1.COMPRESSIONS.get(code, "unknown")
        elif span.name == "flags":
            span.meaning = ", ".join(name for name, bit in apr1.FLAGS.items() if code & bit)
    yield Walk("header", iter([spans]), "header")
    start, at = _APR1_HEADER.size, _APR1_HEADER.size + sizes[0]
    source.check(start, sum(sizes), "the metadata and the payload")
    if sizes[0] > MAX_METADATA_BYTES:
        raise LimitError(f"metadata of {sizes[0]} bytes", path=source.path, offset=8)
    yield Walk("metadata", _msgpack_entries(source.read(start, sizes[0]), start, source.path), "key")
    parts = [Span(at, sizes[1], "payload", meaning="as stored: compressed, encrypted")]
    at += sizes[1]
    flags = values.get("flags")
    if isinstance(flags, int) and flags & apr1.SIGNED and at + 96 <= source.size - 4:
        parts += [Span(at, 64, "signature", meaning="Ed25519"), Span(at + 64, 32, "public key", meaning="Ed25519")]
        at += 96
    if at + 4 <= source.size:
        last = source.size - 4
        parts.append(Span(last, 4, "checksum", source.read(last, 4)[::-1].hex(), "CRC-32 of all preceding bytes"))
    yield Walk("data", iter([[part] for part in parts]), "part")


def _msgpack_entries(raw: bytes, base: int, path: str) -> Iterator[Entry]:
    """The entries of a MessagePack map, after checking that it is one."""
    import msgpack

    values = apr1_metadata.parse_metadata(raw, path, base)
    unpacker = msgpack.Unpacker(max_buffer_size=max(1, len(raw)), strict_map_key=False)
    unpacker.feed(raw)
    for _ in range(unpacker.read_map_header()):
        start = base + unpacker.tell()
        key = unpacker.unpack()
        value_start = base + unpacker.tell()
        unpacker.skip()
        end = base + unpacker.tell()
        text = shown(json.dumps(values[key], ensure_ascii=False))
        yield [Span(start, value_start - start, "key", key), Span(value_start, end - value_start, "value", text)]


def _is_safetensors(head: bytes, size: int) -> bool:
    return head[8:9] == b"{" and int.from_bytes(head[:8], "little") >= 2


CONTAINERS = (
    Container("GGUF", lambda head, size: head[:4] in (b"GGUF", b"FUGG"), _gguf),
    Container("APR v2", lambda head, size: head[:4] == apr2.MAGIC, _apr2),
    Container("APR v1", lambda head, size: head[:4] == apr1.MAGIC, _apr1),
    Container("SafeTensors", _is_safetensors, _safetensors),
)
"""The supported containers, in the order of detection."""
