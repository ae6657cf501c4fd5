"""Edits of files that know their format: read into parts, one part changed with intent, put together as a valid file
would be (lengths, offsets, checksums, compression), and only then, sometimes, one field of the result made a lie.
"""

from __future__ import annotations

import base64
import json
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from fuzz_values import dump, edit_bytes, edit_json, edit_lines, edit_tree, number, text, value
from tokenizer_folders import varint

Edit = Callable[[bytes, Random], bytes]


class Misfit(Exception):
    """The bytes are not of the format: they are edited as bytes."""


def _lie(data: bytes, fields: list[tuple[int, int]], rng: Random) -> bytes:
    """One of the numbers at (position, size) replaced."""
    at, size = rng.choice(fields)
    near = int.from_bytes(data[at : at + size], "little")
    return data[:at] + (number(rng, near) % (1 << 8 * size)).to_bytes(size, "little") + data[at + size :]


def _name(rng: Random, near: bytes, others: list[bytes]) -> bytes:
    if rng.random() < 0.4 and others:
        return rng.choice(others)
    return text(rng, near.decode("utf-8", "replace")).encode("utf-8", "surrogatepass")


def _dims(rng: Random, dims: list[int]) -> list[int]:
    """Other dims: of one number changed, of another order, of the same product."""
    dims = list(dims)
    kind = rng.randrange(6)
    if kind == 0 or not dims:
        dims.insert(rng.randrange(len(dims) + 1), rng.choice((1, 1, 0, number(rng))))
    elif kind == 1:
        dims[rng.randrange(len(dims))] = number(rng, rng.choice(dims)) % (1 << 64)
    elif kind == 2:
        del dims[rng.randrange(len(dims))]
    elif kind == 3:
        dims.reverse()
    elif kind == 4:
        at = rng.randrange(len(dims))
        if dims[at] % 2 == 0:
            dims[at : at + 1] = [2, dims[at] // 2]
    else:
        dims = rng.choice(([], [1 << 32, 1 << 32], [0, 1 << 63], [1 << 31, 2], [3] * 9, [1] * 4, [(1 << 64) - 1]))
    return dims


# --- GGUF ---

_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


@dataclass
class _Gguf:
    version: int
    pairs: list[tuple[bytes, int, bytes]]
    infos: list[tuple[bytes, list[int], int, int]]
    data: bytes
    alignment: int = 32


def _string_at(data: bytes, pos: int) -> tuple[bytes, int]:
    n = struct.unpack_from("<Q", data, pos)[0]
    if n > len(data):
        raise Misfit
    return data[pos + 8 : pos + 8 + n], pos + 8 + n


def _value_end(data: bytes, kind: int, pos: int, depth: int = 0) -> int:
    if kind == 8:
        return _string_at(data, pos)[1]
    if kind != 9:
        return pos + _SIZES[kind]
    inner, count = struct.unpack_from("<IQ", data, pos)
    pos += 12
    if count > len(data) or depth > 8:
        raise Misfit
    if inner in _SIZES:
        return pos + int(count) * _SIZES[inner]
    for _ in range(count):
        pos = _value_end(data, inner, pos, depth + 1)
    return pos


def _read_gguf(data: bytes) -> _Gguf:
    version, n_infos, n_pairs = struct.unpack_from("<IQQ", data, 4)
    out, pos = _Gguf(version, [], [], b""), 24
    for _ in range(min(n_pairs, 10_000)):
        key, pos = _string_at(data, pos)
        kind = struct.unpack_from("<I", data, pos)[0]
        end = _value_end(data, kind, pos + 4)
        out.pairs.append((key, kind, data[pos + 4 : end]))
        if key == b"general.alignment" and kind == 4:
            out.alignment = max(1, struct.unpack("<I", out.pairs[-1][2])[0] % 4096)
        pos = end
    for _ in range(min(n_infos, 10_000)):
        name, pos = _string_at(data, pos)
        n_dims = struct.unpack_from("<I", data, pos)[0]
        if n_dims > 64:
            raise Misfit
        *dims, kind, offset = struct.unpack_from(f"<{n_dims}QIQ", data, pos + 4)
        pos += 16 + 8 * n_dims
        out.infos.append((name, dims, kind, offset))
    out.data = data[pos + -pos % out.alignment :]
    return out


def _write_gguf(g: _Gguf) -> tuple[bytes, list[tuple[int, int]]]:
    out, fields = (
        bytearray(struct.pack("<4sIQQ", b"GGUF", g.version, len(g.infos), len(g.pairs))),
        [(4, 4), (8, 8), (16, 8)],
    )
    for key, kind, raw in g.pairs:
        fields += [(len(out), 8), (len(out) + 8 + len(key), 4)]
        out += struct.pack("<Q", len(key)) + key + struct.pack("<I", kind)
        fields += {8: [(len(out), 8)], 9: [(len(out), 4), (len(out) + 4, 8), (len(out) + 12, 8)]}.get(kind, [])
        out += raw
    for name, dims, kind, offset in g.infos:
        fields += [(len(out), 8), (len(out) + 8 + len(name), 4)]
        out += struct.pack("<Q", len(name)) + name + struct.pack("<I", len(dims))
        fields += [(len(out) + 8 * n, 8) for n in range(len(dims))]
        fields += [(len(out) + 8 * len(dims), 4), (len(out) + 8 * len(dims) + 4, 8)]
        out += struct.pack(f"<{len(dims)}QIQ", *dims, kind % (1 << 32), offset % (1 << 64))
    return bytes(out) + bytes(-len(out) % g.alignment) + g.data, [f for f in fields if f[0] + f[1] <= len(out)]


def _elements(kind: int, raw: bytes) -> tuple[int, list[bytes]]:
    """(element type, elements) of an array value."""
    inner, count = struct.unpack_from("<IQ", raw)
    if inner in _SIZES:
        size = _SIZES[inner]
        return inner, [raw[at : at + size] for at in range(12, 12 + int(count) * size, size)]
    out, pos = [], 12
    for _ in range(count):
        end = _value_end(raw, inner, pos)
        out.append(raw[pos:end])
        pos = end
    return inner, out


def _scalar(rng: Random, kind: int, near: bytes = b"") -> bytes:
    if kind == 8:
        new = text(rng, near[8:].decode("utf-8", "replace")).encode("utf-8", "surrogatepass")
        return struct.pack("<Q", len(new)) + new
    if kind == 9:
        return struct.pack("<IQ", rng.choice((0, 4, 8, 9, 6)), 0)
    if kind in (6, 12):
        return struct.pack("<" + _CODES[kind], rng.choice((0.0, -1.0, 1e-45, 1e30, float("nan"), float("inf"), 0.5)))
    size = _SIZES[kind]
    known = int.from_bytes(near, "little") if len(near) == size else 0
    return (number(rng, known) % (1 << 8 * size)).to_bytes(size, "little")


def _edit_gguf_value(rng: Random, kind: int, raw: bytes) -> tuple[int, bytes]:
    if rng.random() < 0.15:
        kind = rng.choice((*_SIZES, 8, 9))
        return kind, _scalar(rng, kind)
    if kind != 9:
        return kind, _scalar(rng, kind, raw)
    inner, items = _elements(kind, raw)
    how = rng.randrange(7)
    at = rng.randrange(len(items)) if items else 0
    if how == 0 or not items:
        items.insert(at, _scalar(rng, inner))
    elif how == 1:
        del items[at]
    elif how == 2:
        items[at] = rng.choice(items)
    elif how == 3:
        items[at] = _scalar(rng, inner, items[at])
    elif how == 4:
        items = items[:at]
    elif how == 5:
        items += items[: rng.choice((1, len(items)))]
    else:
        inner = rng.choice((*_SIZES, 8))
        items = [_scalar(rng, inner) for _ in items[:300]]
    return 9, struct.pack("<IQ", inner, len(items)) + b"".join(items)


def edit_gguf(data: bytes, rng: Random) -> bytes:
    """A GGUF with a pair, a tensor info, the alignment or a count changed."""
    g = _read_gguf(data)
    kind = rng.random()
    if kind < 0.45 and g.pairs:
        at = rng.randrange(len(g.pairs))
        key, of, raw = g.pairs[at]
        how = rng.random()
        if how < 0.7:
            g.pairs[at] = (key, *_edit_gguf_value(rng, of, raw))
        elif how < 0.8:
            del g.pairs[at]
        elif how < 0.9:
            g.pairs[at] = (_name(rng, key, [k for k, *_ in g.pairs]), of, raw)
        else:
            g.pairs.insert(rng.randrange(len(g.pairs)), g.pairs[at])
    elif kind < 0.52:
        alignment = rng.choice((0, 1, 3, 8, 16, 64, 4096, 1 << 31))
        g.pairs = [p for p in g.pairs if p[0] != b"general.alignment"]
        g.pairs.append(
            (b"general.alignment", rng.choice((4, 4, 10)), struct.pack("<Q", alignment)[: rng.choice((4, 8))])
        )
        g.pairs[-1] = (g.pairs[-1][0], 4, g.pairs[-1][2][:4])
        g.alignment = alignment % 8192 or 1
    elif kind < 0.85 and g.infos:
        at = rng.randrange(len(g.infos))
        name, dims, of, offset = g.infos[at]
        how = rng.randrange(7)
        if how == 0:
            g.infos[at] = (_name(rng, name, [n for n, *_ in g.infos]), dims, of, offset)
        elif how in (1, 2):
            g.infos[at] = (name, _dims(rng, dims), of, offset)
        elif how == 3:
            g.infos[at] = (name, dims, rng.choice((*range(42), 255, 1 << 31)), offset)
        elif how == 4:
            offsets = [o for *_, o in g.infos]
            g.infos[at] = (
                name,
                dims,
                of,
                rng.choice((*offsets, 0, offset + 32, offset + 1, number(rng, offset), len(g.data))),
            )
        elif how == 5:
            del g.infos[at]
        else:
            g.infos.insert(at, (_name(rng, name, []), dims, of, offset))
    elif kind < 0.9:
        g.data = edit_bytes(g.data, rng)
    else:
        out, fields = _write_gguf(g)
        return _lie(out, fields, rng)
    return _write_gguf(g)[0]


# --- APR v2 ---

_HEADER = struct.Struct("<4sBBHIQIQQI20s")
_HEADER_FIELDS = [(4, 1), (5, 1), (6, 2), (8, 4), (12, 8), (20, 4), (24, 8), (32, 8), (40, 4), (44, 8)]


def repair_v2(data: bytes, rng: Random) -> bytes:
    """The two checksums of an APR v2 put right."""
    out = bytearray(data)
    out[40:44] = struct.pack("<I", zlib.crc32(out[44:64], zlib.crc32(out[:40])))
    if len(out) > 68:
        out[-4:] = struct.pack("<I", zlib.crc32(out[:-4]))
    return bytes(out)


@dataclass
class _Apr2:
    head: list[Any]
    metadata: bytes
    entries: list[tuple[bytes, int, list[int], int, int]]
    data: bytes


def _read_v2(data: bytes) -> _Apr2:
    head = list(_HEADER.unpack_from(data))
    count, at, n_metadata, index, start = head[4], head[5], head[6], head[7], head[8]
    if not 64 <= at <= index <= start <= len(data):
        raise Misfit
    entries, pos = [], index
    for _ in range(min(count, 10_000)):
        n = struct.unpack_from("<H", data, pos)[0]
        name, dtype, ndim = data[pos + 2 : pos + 2 + n], data[pos + 2 + n], data[pos + 3 + n]
        *dims, offset, size = struct.unpack_from(f"<{ndim + 2}Q", data, pos + 4 + n)
        entries.append((name, dtype, dims, offset, size))
        pos += 20 + n + 8 * ndim
    return _Apr2(head, data[at : at + n_metadata], entries, data[start:-4])


def _write_v2(a: _Apr2) -> bytes:
    index = b"".join(
        struct.pack("<H", len(name) % 65536) + name + bytes([dtype % 256, len(dims) % 256])
        + struct.pack(f"<{len(dims) + 2}Q", *(n % (1 << 64) for n in (*dims, offset, size)))
        for name, dtype, dims, offset, size in a.entries
    )  # fmt: skip
    metadata = a.metadata + bytes(-len(a.metadata) % 64)
    start = 64 + len(metadata) + len(index)
    start += -start % 64
    a.head[4:9] = [len(a.entries), 64, len(a.metadata), 64 + len(metadata), start]
    return (_HEADER.pack(*a.head) + metadata + index).ljust(start, b"\0") + a.data + bytes(4)


def _edit_segments(files: list[Any], rng: Random) -> None:
    """An edit of a manifest's segments that keeps as much as it can, so that it is used."""
    file = rng.choice(files)
    segments = file["segments"]
    at, to = rng.randrange(len(segments)), rng.randrange(len(segments))
    kind = rng.randrange(8)
    if kind == 0:
        segments[at], segments[to] = segments[to], segments[at]
    elif kind == 1:  # bytes move from one literal to the next
        counted = [s for s in segments if s[0] in "bz"]
        if len(counted) > 1:
            a, b = rng.sample(counted, 2)
            n = rng.choice((1, 4, a[1]))
            a[1], b[1] = a[1] - n, b[1] + n
    elif kind == 2 and segments[at][0] in "bz":
        segments[at][0] = "z" if segments[at][0] == "b" else "b"
    elif kind == 3:
        segments[at][-1] = value(rng, segments[at][-1])
    elif kind == 4 and segments[at][0] == "l":
        body = segments[at][4]
        edit_tree(body, rng)
    elif kind == 5 and segments[at][0] in "tl":
        segments[at][3] = text(rng, str(segments[at][3]))
    elif kind == 6:
        file["name"] = text(rng, file["name"])
    else:
        grown = [s for s in segments if s[0] in "bz"]
        if grown:
            n = rng.choice((1, 1000, 1 << 20, 1 << 30, 1 << 45))
            rng.choice(grown)[1] += n
            file["size"] += n


def _edit_metadata(tree: Any, rng: Random) -> None:
    """An edit of APR metadata, where there is one often of the manifest."""
    manifest = tree.get("aprfmt.source") if isinstance(tree, dict) else None
    kind = rng.random()
    if not isinstance(manifest, dict) or kind > 0.5:
        edit_tree(tree, rng)
    elif kind < 0.12:
        literals = zlib.decompress(base64.b64decode(manifest["literals"]))
        changed = edit_bytes(literals, rng)
        if rng.random() < 0.8:
            changed = changed[: len(literals)].ljust(len(literals), b"\0")
        manifest["literals"] = base64.b64encode(zlib.compress(changed)).decode()
    elif kind < 0.4:
        _edit_segments(manifest["files"], rng)
    else:
        edit_tree(manifest, rng)


def edit_v2(data: bytes, rng: Random) -> bytes:
    """An APR v2 with its metadata, an index entry or a field of the header changed; checksums mostly right."""
    a = _read_v2(data)
    kind, header = rng.random(), False
    if kind < 0.6:
        a.metadata = edit_json(a.metadata, rng, _edit_metadata)
    elif kind < 0.85 and a.entries:
        at = rng.randrange(len(a.entries))
        name, dtype, dims, offset, size = a.entries[at]
        how = rng.randrange(8)
        if how == 0:
            name = _name(rng, name, [n for n, *_ in a.entries])[:60_000]
        elif how in (1, 2):
            dims = _dims(rng, dims)
        elif how == 3:
            dtype = rng.choice((*range(20), 255))
        elif how == 4:
            offset = rng.choice(
                (0, offset + 64, offset + 1, number(rng, offset), rng.choice(a.entries)[3], len(a.data))
            )
        elif how == 5:
            size = rng.choice((0, size - 1, size + 1, size * 2, number(rng, size)))
        if how == 6:
            del a.entries[at]
        else:
            a.entries[at] = (name, dtype, dims, offset, size)
        if how == 7:
            a.entries.insert(at, a.entries[at])
        if rng.random() < 0.85:
            a.entries.sort(key=lambda entry: entry[0])
    elif kind < 0.9:
        a.data = edit_bytes(a.data, rng)
    elif kind < 0.94:
        a.head[3] ^= 1 << rng.randrange(16)
    else:
        header = True
    out = _write_v2(a)
    if header:
        out = _lie(out, _HEADER_FIELDS, rng)
    return repair_v2(out, rng) if rng.random() < 0.93 else out


def _packers() -> dict[str, tuple[Callable[[bytes], bytes], Callable[[bytes], bytes]]]:
    import zstandard
    from lz4 import block

    return {
        "zstd": (lambda b: zstandard.decompress(b, 1 << 20), lambda b: zstandard.compress(b, 3)),
        "lz4": (lambda b: bytes(block.decompress(b)), lambda b: bytes(block.compress(b, store_size=True))),
        "none": (bytes, bytes),
    }


def edit_compressed(data: bytes, rng: Random) -> bytes:
    """A v2 whose body is compressed: unpacked, changed, packed again."""
    unpack, pack = _packers()["zstd" if data[64:68] == b"\x28\xb5\x2f\xfd" else "lz4"]
    plain = edit_v2(data[:64] + unpack(data[64:]), rng)
    body = pack(plain[64:])
    if rng.random() < 0.2:
        body = edit_bytes(body, rng)
    out = bytearray(plain[:64] + body)
    out[6:8] = data[6:8]
    out[40:44] = struct.pack("<I", zlib.crc32(out[44:64], zlib.crc32(out[:40])))
    return bytes(out)


# --- older APR ---


def edit_apr1_json(data: bytes, rng: Random) -> bytes:
    """APR1: JSON metadata, JSON index."""
    n = struct.unpack_from("<I", data, 4)[0]
    metadata, at = data[8 : 8 + n], 8 + n
    count, m = struct.unpack_from("<II", data, at)
    index, blobs = data[at + 8 : at + 8 + m], data[at + 8 + m : -4]
    kind = rng.random()
    if kind < 0.35:
        metadata = edit_json(metadata, rng)
    elif kind < 0.75:
        index = edit_json(index, rng)
        count = len(json.loads(index)) if rng.random() < 0.7 else count
    elif kind < 0.85:
        blobs = edit_bytes(blobs, rng)
    out = b"APR1" + struct.pack("<I", len(metadata)) + metadata
    fields = [(4, 4), (len(out), 4), (len(out) + 4, 4)]
    out += struct.pack("<II", count % (1 << 32), len(index)) + index + blobs
    if kind > 0.9:
        out = _lie(out, fields, rng)
    return out + struct.pack("<I", zlib.crc32(out))


def edit_wrapper(data: bytes, rng: Random) -> bytes:
    """A wrapper around an APR1."""
    unpack, pack = _packers()[("none", "lz4", "zstd")[data[4] % 3]]
    plain = edit_apr1_json(unpack(data[9:]), rng)
    body = pack(plain)
    if rng.random() < 0.15:
        body = edit_bytes(body, rng)
    length = len(plain) if rng.random() < 0.9 else number(rng, len(plain)) % (1 << 32)
    return data[:5] + struct.pack("<I", length) + body


def edit_v1(data: bytes, rng: Random) -> bytes:
    """APR v1: MessagePack metadata, compressed payload, CRC."""
    import msgpack

    n_metadata, n_payload, n_plain = struct.unpack_from("<III", data, 8)
    end = 32 + n_metadata + n_payload
    metadata, payload, rest = data[32 : 32 + n_metadata], data[32 + n_metadata : end], data[end:-4]
    head = bytearray(data[:32])
    kind = rng.random()
    if kind < 0.45:
        tree = msgpack.unpackb(metadata, strict_map_key=False)
        if isinstance(tree, dict) and tree:
            edit_tree(tree, rng)
        metadata = msgpack.packb(tree, unicode_errors="surrogatepass")
    elif kind < 0.6:
        metadata = edit_bytes(metadata, rng)
    elif kind < 0.85 and head[20] in (0, 1, 2, 3) and not head[21] & 1:
        unpack, pack = _packers()[("none", "zstd", "zstd", "lz4")[head[20]]]
        plain = edit_bytes(unpack(payload), rng)
        n_plain = len(plain) if rng.random() < 0.7 else n_plain
        payload = pack(plain)
    else:
        payload = edit_bytes(payload, rng)
    head[8:20] = struct.pack("<III", len(metadata), len(payload), n_plain)
    out = bytes(head) + metadata + payload + rest
    if rng.random() < 0.15:
        out = _lie(out, [(4, 1), (6, 2), (8, 4), (12, 4), (16, 4), (20, 1), (21, 1), (22, 1)], rng)
    return out + struct.pack("<I", zlib.crc32(out))


# --- safetensors, SentencePiece, importance matrices ---


def _edit_header(tree: Any, rng: Random) -> None:
    names = [name for name in tree if isinstance(tree[name], dict) and "shape" in tree[name]]
    if not names or rng.random() < 0.35:
        edit_tree(tree, rng)
        return
    name = rng.choice(names)
    row = tree[name]
    kind = rng.randrange(5)
    if kind == 0:
        row["shape"] = _dims(rng, row["shape"])
    elif kind == 1:
        row["dtype"] = text(rng, row["dtype"])
    elif kind == 2:
        row["data_offsets"][rng.randrange(2)] = number(rng, rng.choice(row["data_offsets"]))
    elif kind == 3:
        tree[text(rng, name)] = tree.pop(name)
    else:
        row["data_offsets"] = list(tree[rng.choice(names)]["data_offsets"])


def edit_safetensors(data: bytes, rng: Random) -> bytes:
    """A safetensors file with its header changed."""
    n = struct.unpack_from("<Q", data)[0]
    if n > len(data):
        raise Misfit
    header, body = data[8 : 8 + n], data[8 + n :]
    kind = rng.random()
    if kind < 0.85:
        header = edit_json(header, rng, _edit_header)
    elif kind < 0.92:
        body = edit_bytes(body, rng)
    out = struct.pack("<Q", len(header)) + header + body
    return _lie(out, [(0, 8)], rng) if kind > 0.96 else out


def _read_varint(data: bytes, pos: int) -> tuple[int, int]:
    out = shift = 0
    while True:
        out |= (data[pos] & 0x7F) << shift
        shift, pos = shift + 7, pos + 1
        if not data[pos - 1] & 0x80:
            return out, pos


def _read_message(data: bytes) -> list[tuple[int, int, Any]]:
    out: list[tuple[int, int, Any]] = []
    pos = 0
    while pos < len(data):
        tag, pos = _read_varint(data, pos)
        wire = tag & 7
        if wire == 0:
            found, pos = _read_varint(data, pos)
            out.append((tag >> 3, wire, found))
            continue
        if wire not in (1, 2, 5):
            raise Misfit
        size = {1: 8, 5: 4}.get(wire)
        if size is None:
            size, pos = _read_varint(data, pos)
        if pos + size > len(data):
            raise Misfit
        out.append((tag >> 3, wire, data[pos : pos + size]))
        pos += size
    return out


def _write_message(fields: list[tuple[int, int, Any]]) -> bytes:
    out = b""
    for n, wire, item in fields:
        raw = varint(item) if wire == 0 else item
        out += varint(n << 3 | wire) + (varint(len(raw)) if wire == 2 else b"") + raw
    return out


def edit_message(data: bytes, rng: Random, depth: int = 0) -> bytes:
    """A protobuf message with one field of it, or of a message inside, changed."""
    fields = _read_message(data)
    if not fields:
        return varint(number(rng) % (1 << 40))
    at = rng.randrange(len(fields)) if rng.random() < 0.6 else len(fields) - 1 - rng.randrange(min(2, len(fields)))
    n, wire, item = fields[at]
    kind = rng.random()
    if wire == 2 and depth == 0 and kind < 0.7:
        fields[at] = (n, wire, edit_message(item, rng, 1))
    elif kind < 0.8:
        if wire == 0:
            fields[at] = (n, wire, number(rng, item))
        elif wire == 5:
            fields[at] = (n, wire, struct.pack("<f", rng.choice((0.0, -1e30, float("nan"), float("inf"), 1e-45))))
        else:
            fields[at] = (n, wire, _name(rng, item[:40], []))
    elif kind < 0.85:
        fields[at] = (rng.choice((0, 1, 2, 3, 24, 35, 40, 43, 1 << 28)), wire, item)
    elif kind < 0.9:
        del fields[at]
    elif kind < 0.95:
        fields.insert(rng.randrange(len(fields)), fields[at])
    else:
        fields[at] = (n, rng.choice((0, 1, 2, 3, 5, 7)) if wire else 0, item)
        fields[at] = (n, fields[at][1] if isinstance(item, bytes) and fields[at][1] else wire, item)
    return _write_message(fields)


def edit_imatrix(data: bytes, rng: Random) -> bytes:
    """An old importance matrix: i32 count, then name, calls, values of each entry."""
    pos, fields = 4, [(0, 4)]
    for _ in range(min(struct.unpack_from("<i", data)[0], 1000)):
        n = struct.unpack_from("<i", data, pos)[0]
        fields += [(pos, 4), (pos + 4 + n, 4), (pos + 8 + n, 4)]
        m = struct.unpack_from("<i", data, pos + 8 + n)[0]
        fields += [(pos + 12 + n + 4 * rng.randrange(max(1, m)), 4)]
        pos += 12 + n + 4 * m
    return (
        _lie(data, [f for f in fields if 0 <= f[0] <= len(data) - 4], rng)
        if rng.random() < 0.8
        else edit_bytes(data, rng)
    )


# --- which edit ---


def edit_of(name: str, data: bytes) -> Edit | None:
    """The edit that knows the format, by the bytes and then by the name; None where there is none."""
    magic = data[:4]
    if magic == b"GGUF":
        return edit_gguf
    if magic == b"APR1":
        return edit_apr1_json
    if magic == b"APRN" and data[4:5] == b"\x01":
        return edit_v1
    if magic in (b"APR2", b"APR\0") and (
        data[9:13] in (b"APR1", b"\x28\xb5\x2f\xfd") or data[4:5] == b"\x01" != data[5:6]
    ):
        return edit_wrapper
    if magic in (b"APR\0", b"APR2"):
        return edit_compressed if data[6:7] and data[6] & 3 and data[64:65] != b"{" else edit_v2
    if name.endswith(".safetensors"):
        return edit_safetensors
    if name.endswith(".model"):
        return edit_message
    if name.endswith(".dat"):
        return edit_imatrix
    if name.endswith((".md", ".txt", ".jinja")):
        return edit_lines
    return edit_json if data[:1] in (b"{", b"[") else None


def repaired(data: bytes, rng: Random) -> bytes:
    """Bytes of an `.apr` with its checksums put right."""
    if data[:4] in (b"APR\0", b"APR2") and len(data) >= 68:
        return repair_v2(data, rng)
    if data[:4] in (b"APR1", b"APRN"):
        return data[:-4] + struct.pack("<I", zlib.crc32(data[:-4]))
    return data


_LONGEST_FILE = 600_000
"""Time is judged by what a small file can ask for."""


def edit_file(name: str, data: bytes, rng: Random, other: bytes) -> bytes:
    """One edit of a file, mostly of its parts, sometimes of its bytes."""
    edit = edit_of(name, data)
    if edit is not None and rng.random() < 0.85:
        try:
            edited = edit(data, rng)
            return edited if len(edited) < _LONGEST_FILE else data[: len(data) // 2]
        except Exception:  # a file that is damaged already: its bytes are edited
            pass
    out = edit_bytes(data, rng, other)
    return repaired(out, rng) if rng.random() < 0.8 else out


_FOLDER_EDITS: list[str] = ["delete", "copy", "rename", "empty", "swap", "nest"]


def edit_folder(files: dict[str, bytes], rng: Random) -> dict[str, bytes]:
    """One edit of which files a folder holds."""
    names = sorted(files)
    name, other = rng.choice(names), rng.choice(names)
    kind = rng.choice(_FOLDER_EDITS)
    if kind == "delete" and len(files) > 1:
        return {n: data for n, data in files.items() if n != name}
    if kind == "rename":
        return {rng.choice(_NAMES) if n == name else n: data for n, data in files.items()}
    if kind == "swap":
        return {**files, name: files[other], other: files[name]}
    if kind == "empty":
        return {**files, name: b""}
    return {**files, rng.choice(_NAMES): files[name]}


_NAMES = (
    *(
        "model.safetensors",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "consolidated.safetensors",
    ),
    *("config.json", "tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "vocab.txt", "spiece.model"),
    *(
        "model.safetensors.index.json",
        "generation_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "README.md",
    ),
    *(
        "chat_template.jinja",
        "chat_template.json",
        "tokenizer_config.json",
        "adapter_config.json",
        "preprocessor_config.json",
    ),
    *(
        "x.apr.index.json",
        "aprfmt.json",
        "original/params.json",
        "a b\n.txt",
        "sub/dir/x.bin",
        "x" * 250,
        "quantize_config.json",
    ),
)

__all__ = ["dump", "edit_file", "edit_folder"]
