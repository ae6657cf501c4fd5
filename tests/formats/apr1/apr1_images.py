"""Builders of older APR files, whole or broken on purpose."""

from __future__ import annotations

import json
import struct
import zlib
from typing import Any

SMALL_METADATA = b"\x82\xaacreated_at\xa10\xb0aprender_version\xa10"


def with_footer(body: bytes) -> bytes:
    """`body` and its CRC-32."""
    return body + struct.pack("<I", zlib.crc32(body))


def v1_bytes(metadata: bytes = SMALL_METADATA, payload: bytes = b"", **header: Any) -> bytes:
    """A v1 file with any header field replaced and a CRC that fits; `tail` goes after the payload."""
    tail = header.pop("tail", b"")
    fields = {
        "magic": b"APRN",
        "major": 1,
        "minor": 0,
        "model_type": 1,
        "metadata_size": len(metadata),
        "payload_size": len(payload),
        "uncompressed_size": len(payload),
        "compression": 0,
        "flags": 0,
        "quality": 0,
    } | header
    return with_footer(struct.pack("<4sBBHIIIBBB9x", *fields.values()) + metadata + payload + tail)


def v2_head(magic: bytes = b"APR2", flags: int = 0, **fields: int) -> bytes:
    """A 64-byte v2 header with a CRC that fits."""
    values = {"count": 0, "metadata": 64, "size": 2, "index": 128, "data": 128, "major": 2, "minor": 0} | fields
    head = struct.pack("<4sBBHI", magic, values["major"], values["minor"], flags, values["count"])
    head += struct.pack("<QIQQ", values["metadata"], values["size"], values["index"], values["data"])
    return head + struct.pack("<I", zlib.crc32(head + bytes(20))) + bytes(20)


def apr1_bytes(index: Any, blobs: bytes = bytes(32), metadata: bytes = b"{}", **over: Any) -> bytes:
    """An APR1 container; `count` and `raw_index` replace what fits."""
    raw = over.get("raw_index", json.dumps(index).encode())
    count = over.get("count", len(index) if isinstance(index, list) else 0)
    head = b"APR1" + struct.pack("<I", len(metadata)) + metadata + struct.pack("<II", count, len(raw)) + raw
    return with_footer(head + blobs)
