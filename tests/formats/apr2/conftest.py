"""A second writer of APR v2 images, from the format's description alone, that can also write broken ones."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

MINIMAL = b'{"model_type":"","license":null,"data_source":null,"data_license":null,"total_size":0,"param_count":0}'


def pad64(data: bytes) -> bytes:
    return data + bytes(-len(data) % 64)


@dataclass
class Image:
    """An image in parts; `build` lays them out by the rules unless a field says otherwise."""

    entries: list[tuple[bytes, int, tuple[int, ...], int, int]] = field(default_factory=list)
    blobs: bytes = b""
    metadata: bytes = MINIMAL
    magic: bytes = b"APR\0"
    version: tuple[int, int] = (2, 0)
    flags: int = 0x0400
    header: dict[str, int] = field(default_factory=dict)
    index_tail: bytes = b""

    def build(self) -> bytes:
        index = b"".join(
            struct.pack("<H", len(name)) + name + struct.pack(f"<BB{len(dims)}QQQ", dtype, len(dims), *dims, *span)
            for name, dtype, dims, *span in self.entries
        )
        index += self.index_tail
        index_offset = 64 + len(pad64(self.metadata))
        fields = {
            "count": len(self.entries),
            "metadata_offset": 64,
            "metadata_size": len(self.metadata),
            "index_offset": index_offset,
            "data_offset": index_offset + len(pad64(index)),
        } | self.header
        head = self.magic + bytes(self.version)
        head += struct.pack("<HIQIQQ", self.flags, *fields.values())
        head += struct.pack("<I", zlib.crc32(head + bytes(20))) + bytes(20)
        body = head + pad64(self.metadata) + pad64(index) + pad64(self.blobs)
        return body + struct.pack("<I", zlib.crc32(body))


@pytest.fixture
def write_image(tmp_path: Path) -> Callable[..., Path]:
    """write_image(**fields of Image) -> path of the file."""

    def write(**fields: object) -> Path:
        path = tmp_path / "image.apr"
        path.write_bytes(Image(**fields).build())  # type: ignore[arg-type]
        return path

    return write
