"""The parts of a split GGUF: names, sizes, keys."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from aprfmt.errors import RefusedError, storage_errors
from aprfmt.formats import gguf_write
from aprfmt.formats.gguf_fields import GgufType
from aprfmt.formats.gguf_write import KV
from aprfmt.formats.out_tensor import OutTensor, group_by_size
from aprfmt.io.pipe import FileLayout
from aprfmt.io.source import padding
from aprfmt.limits import MAX_SPLITS

_PART = re.compile(r"-\d{5}-of-\d{5}$")


def part_names(name: str, count: int) -> list[str]:
    """File names of the parts of a split GGUF called `name`, counted from 1 (llama_split_path)."""
    stem = name[: -len(".gguf")] if name.lower().endswith(".gguf") else name
    stem = _PART.sub("", stem)
    return [f"{stem}-{no:05d}-of-{count:05d}.gguf" for no in range(1, count + 1)]


def older_outputs(first: Path, new: Collection[str]) -> list[str]:
    """Names of GGUFs in the folder of `first` that differ from it only in the part number and are not in `new`."""
    stem = _PART.sub("", first.stem)
    with storage_errors(first.parent):
        found = [path for path in first.parent.iterdir() if path.suffix == ".gguf"]
    return sorted(path.name for path in found if _PART.sub("", path.stem) == stem and path.name not in new)


def split_gguf(
    name: str, keys: Sequence[KV | bytes], tensors: Sequence[OutTensor], alignment: int, max_bytes: int
) -> list[FileLayout]:
    """The parts of a GGUF, none larger than `max_bytes` unless the keys or a single tensor are.

    All keys go into the first part; each has split.no, split.count and split.tensors.count, as in gguf-split. A model
    that fits into one file is not split. Raises as gguf_write.layout, RefusedError for too many parts.
    """
    whole = FileLayout(name, gguf_write.layout(keys, tensors, alignment=alignment))
    if whole.n_bytes <= max_bytes:
        return [whole]
    room = FileLayout("", gguf_write.layout(_split_keys(MAX_SPLITS, MAX_SPLITS, 0), [])).n_bytes + alignment
    first = FileLayout("", gguf_write.layout(keys, [], alignment=alignment)).n_bytes + room
    groups = group_by_size(tensors, max_bytes, lambda tensor: _gguf_cost(tensor, alignment), first, room)
    if len(groups) > MAX_SPLITS:
        raise RefusedError(
            f"too many parts: {len(groups)}, the limit is {MAX_SPLITS}", hint="use a larger --shard-size"
        )
    if len(groups) == 1:
        return [whole]
    layouts = []
    for no, (part, group) in enumerate(zip(part_names(name, len(groups)), groups, strict=True)):
        numbers = _split_keys(no, len(groups), len(tensors))
        # The alignment is a key of the first part, so the others use the default.
        segments = (
            gguf_write.layout(numbers, group)
            if no
            else gguf_write.layout([*keys, *numbers], group, alignment=alignment)
        )
        layouts.append(FileLayout(part, segments))
    return layouts


def _split_keys(no: int, count: int, n_tensors: int) -> list[KV | bytes]:
    return [
        ("split.no", GgufType.UINT16, no),
        ("split.count", GgufType.UINT16, count),
        ("split.tensors.count", GgufType.INT32, n_tensors),
    ]


def _gguf_cost(tensor: OutTensor, alignment: int) -> int:
    """Bytes of a tensor in a part: its info, its data, padding."""
    info = 24 + len(tensor.name.encode("utf-8", "surrogateescape")) + 8 * len(tensor.shape)
    return info + tensor.n_bytes + padding(tensor.n_bytes, alignment)


def rename_parts(layouts: Sequence[FileLayout], name: str) -> list[FileLayout]:
    """The parts of an imported split GGUF, renamed after the output `name`."""
    names = part_names(name, len(layouts)) if len(layouts) > 1 else [name]
    return [replace(layout, name=new) for layout, new in zip(layouts, names, strict=True)]
