"""The manifest of a sharded `.apr`: the reference's ShardManifest, with `sha256` and `crc32` added to each shard.

{"version": "2.0", "shard_count", "total_size" (bytes of all tensors), "tensor_count",
 "shards": [{"filename", "index", "size" (bytes of the file), "tensors": [...],
             "sha256" (of the file, hex), "crc32" (its footer)}, ...],
 "weight_map": {tensor name: shard index}}
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from aprfmt.errors import CorruptError, LimitError
from aprfmt.formats.hf_files import parse_object, read_text_file
from aprfmt.limits import MAX_SPLITS

_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class ShardInfo:
    """One shard as a manifest has it; `sha256` (hex) and `crc32` are None in manifests of other tools."""

    filename: str
    index: int
    size: int
    tensors: tuple[str, ...]
    sha256: str | None = None
    crc32: int | None = None


def manifest_text(shards: Sequence[ShardInfo], total_size: int) -> bytes:
    """The manifest of `shards`, whose tensors take `total_size` bytes."""
    fields = ("filename", "index", "size", "tensors", "sha256", "crc32")
    value = {
        "version": "2.0",
        "shard_count": len(shards),
        "total_size": total_size,
        "tensor_count": sum(len(shard.tensors) for shard in shards),
        "shards": [
            {name: item for name in fields if (item := getattr(shard, name)) is not None} for shard in shards
        ],
        "weight_map": {name: shard.index for shard in shards for name in shard.tensors},
    }
    return json.dumps(value, indent=2, ensure_ascii=False).encode()


def read_manifest(path: Path) -> list[ShardInfo]:
    """The shards of a manifest, in order. Raises CorruptError, LimitError, NotFoundError, StorageError."""
    value = parse_object(read_text_file(path), str(path), "the manifest")
    rows = value.get("shards")
    if not isinstance(rows, list) or not rows:
        raise CorruptError("the manifest has no list 'shards'", path=path)
    if len(rows) > MAX_SPLITS:
        raise LimitError(f"the manifest names {len(rows)} shards, the cap is {MAX_SPLITS}", path=path)
    shards = sorted((_shard_info(row, path) for row in rows), key=lambda shard: shard.index)
    if [shard.index for shard in shards] != list(range(len(shards))) or value.get("shard_count") != len(rows):
        raise CorruptError(f"the indices of the {len(rows)} shards do not fit 'shard_count'", path=path)
    names = [name for shard in shards for name in shard.tensors]
    placed = {name: shard.index for shard in shards for name in shard.tensors}
    if len(placed) != len(names) or value.get("weight_map", placed) != placed:
        raise CorruptError("'weight_map' and the shards' lists of tensors disagree", path=path)
    return shards


def _shard_info(row: object, path: Path) -> ShardInfo:
    known = row if isinstance(row, dict) else {}
    name, index, size, tensors = (known.get(key) for key in ("filename", "index", "size", "tensors"))
    if (
        not isinstance(name, str)
        or not all(type(n) is int and n >= 0 for n in (index, size))
        or not isinstance(tensors, list)
        or not all(isinstance(tensor, str) for tensor in tensors)
    ):
        raise CorruptError("a shard of the manifest lacks filename, index, size or tensors", path=path)
    if not name or name in (".", "..") or set(name) & set("/\\:\0") or not name.isprintable():
        raise CorruptError(f"the manifest names {name!r}, which is not a file of its folder", path=path)
    sha256, crc32 = known.get("sha256"), known.get("crc32")
    if sha256 is not None and not (isinstance(sha256, str) and _SHA256.fullmatch(sha256)):
        raise CorruptError(f"the sha256 of {name} is not 64 hexadecimal digits", path=path)
    if crc32 is not None and type(crc32) is not int:
        raise CorruptError(f"the crc32 of {name} is not an integer", path=path)
    return ShardInfo(name, int(index or 0), int(size or 0), tuple(tensors), sha256, crc32)
