"""GGUF reader, versions 2 and 3, single and split files. Values are decoded on access.

0   4  magic "GGUF"
4   4  u32 version
8   8  u64 tensor count
16  8  u64 key-value count
24     key-value entries, tensor infos, zeros up to the alignment, tensor data

entry       = key string | u32 type | value
string      = u64 length | bytes (UTF-8, no terminator)
array       = u32 element type | u64 count | elements, which may be arrays again
tensor info = name string | u32 n_dims | u64 dims, fastest first | u32 ggml type | u64 offset in the data
"""

from __future__ import annotations

import re
import struct
from collections import ChainMap
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from aprfmt.codecs.dtypes import DTYPES, DTYPES_BY_GGML_ID
from aprfmt.errors import CorruptError, LimitError, RefusedError, UnknownFormatError, UnsupportedError, UsageError
from aprfmt.formats.gguf_fields import ELEMENT_BYTES, LEAST_BYTES, Cursor, GgufType, KvEntry, KvMapping
from aprfmt.io.downloads import cut_short
from aprfmt.io.source import Source, exists, padding
from aprfmt.light_dataclass import light_dataclass
from aprfmt.limits import MAX_KEYS, MAX_NAME_BYTES, MAX_TENSORS
from aprfmt.model import Model, Tensor

if TYPE_CHECKING:
    from aprfmt.arch.hyperparams import Hyperparams
    from aprfmt.tokenizer.model import Tokenizer

DEFAULT_ALIGNMENT = 32
"""Alignment of the tensor data if `general.alignment` is absent."""

MAX_DIMS = 4
"""GGML_MAX_DIMS."""

LOADER_NAME_BYTES = 63
"""Longest tensor name that llama.cpp loads (GGML_MAX_NAME less the terminator)."""

_LEAST_ENTRY_BYTES = 14
_LEAST_INFO_BYTES = 24
_INFOS = tuple(struct.Struct(f"<{n}QIQ") for n in range(MAX_DIMS + 1))
PART_NAME = re.compile(r"(?P<stem>.*)-(?P<no>\d{5})-of-(?P<count>\d{5})(?P<suffix>\.gguf)", re.DOTALL)
_BIG_ENDIAN_HINT = "convert it in place: pip install gguf; gguf-convert-endian FILE little"


# --- key-value pairs ---


LEAST_BYTES |= {GgufType.STRING: 8, GgufType.ARRAY: 12}

ELEMENT_BYTES |= {GgufType.UINT8: 16, GgufType.INT8: 16, GgufType.BOOL: 16, GgufType.STRING: 80, GgufType.ARRAY: 112}


_MAGIC = struct.Struct("<4s")


# --- the model ---


@light_dataclass(slots=True)
class GgufPart:
    """One file of a model.

    Attributes:
        source: the open file.
        version: 2 or 3.
        alignment: of the tensor data.
        tensors: in file order.
        kv: the pairs in file order, decoded on access.
        infos: start and end of the tensor infos.
        data_start: start of the tensor data, after the header's padding.
    """

    source: Source
    version: int
    alignment: int
    tensors: list[Tensor]
    kv: KvMapping
    infos: tuple[int, int]
    data_start: int


@light_dataclass(slots=True)
class GgufNative:
    """All parts in order, for writers of GGUF."""

    parts: list[GgufPart]


def open_model(path: Path) -> Model:
    """Opens a GGUF file; any part of a split model opens all of them, with the metadata of the first.

    Raises UnsupportedError (version 1, big-endian, unknown tensor type), CorruptError and its kinds, RefusedError (a
    part is missing or misplaced), NotFoundError, StorageError.
    """
    with ExitStack() as stack:
        parts = _read_all(path, stack)
        tensors = [tensor for part in parts for tensor in part.tensors]
        seen: set[str] = set()
        for tensor in tensors:
            if tensor.name in seen:
                raise CorruptError("duplicate tensor name", path=tensor.source.path, tensor=tensor.name)
            seen.add(tensor.name)
        model = model_of(path, parts)
        stack.pop_all()
    return model


def model_of(path: Path, parts: list[GgufPart]) -> Model:
    """Builds the model from its parts, with the keys of the first."""
    tensors = [tensor for part in parts for tensor in part.tensors]
    return Model(
        path=path,
        format="gguf",
        convention="gguf",
        label=f"GGUF v{parts[0].version}",
        version=str(parts[0].version),
        sources=[part.source for part in parts],
        tensors=tensors,
        load_metadata=lambda: parts[0].kv,
        load_tokenizer=_load_tokenizer,
        load_hparams=_load_hparams,
        warnings=[
            f"llama.cpp refuses tensor names over {LOADER_NAME_BYTES} bytes: {tensor.name}"
            for tensor in tensors
            if len(tensor.name.encode("utf-8", "surrogateescape")) > LOADER_NAME_BYTES
        ],
        native=GgufNative(parts),
    )


def _load_tokenizer(model: Model) -> Tokenizer | None:
    from aprfmt.tokenizer.ggml import from_gguf

    return from_gguf(model.metadata)


def _load_hparams(model: Model) -> Hyperparams:
    from aprfmt.arch.hparams import from_gguf

    kv = model.metadata
    entry = kv.entries.get("tokenizer.ggml.tokens") if isinstance(kv, KvMapping) else None
    if entry is not None and entry.count is not None:
        # Only the number is needed here; decoding 150,000 strings takes longer than everything else.
        kv = ChainMap({"tokenizer.ggml.tokens": range(entry.count)}, kv)  # type: ignore[arg-type]
    return from_gguf(kv, tuple(model.tensors))


# --- split models ---


def _read_all(path: Path, stack: ExitStack) -> list[GgufPart]:
    first = _read_part(path, stack)
    count = _split_number(first, "split.count", 1)
    if count <= 1:
        return [first]
    match = PART_NAME.fullmatch(path.name)
    if match is None or int(match["count"]) != count:
        raise RefusedError(
            f"the file is one of {count} parts, but its name does not end in -0000N-of-{count:05d}.gguf",
            path=path,
            hint="restore the original file names of the parts",
        )
    own = _split_number(first, "split.no", -1)
    names = [f"{match['stem']}-{no + 1:05d}-of-{count:05d}.gguf" for no in range(count)]
    missing = next((name for name in names if not exists(path.with_name(name))), None)
    if missing is not None:
        raise RefusedError(
            f"part {missing} of the split model is missing", path=path, hint=f"put all {count} parts in one folder"
        )
    parts = [first if no == own else _read_part(path.with_name(name), stack) for no, name in enumerate(names)]
    _check_parts(parts, names)
    return parts


def _check_parts(parts: list[GgufPart], names: list[str]) -> None:
    for no, (part, name) in enumerate(zip(parts, names, strict=True)):
        found = (_split_number(part, "split.no", -1), _split_number(part, "split.count", 1))
        if found != (no, len(parts)) or Path(part.source.path).name != name:
            raise RefusedError(
                f"the file is part {found[0] + 1} of {found[1]}, but named as part {no + 1} of {len(parts)}",
                path=part.source.path,
                hint="restore the original file names of the parts",
            )
    n_tensors = sum(len(part.tensors) for part in parts)
    expected = _split_number(parts[0], "split.tensors.count", n_tensors)
    if expected != n_tensors:
        raise RefusedError(
            f"the parts hold {n_tensors} tensors, but the first part declares {expected}",
            path=parts[0].source.path,
            hint="download all parts from one release",
        )


def _split_number(part: GgufPart, key: str, default: int) -> int:
    value = part.kv.get(key, default)
    if type(value) is not int:
        raise CorruptError(f"{key!r} is not an integer", path=part.source.path, offset=part.kv.entries[key].start)
    return value


# --- one file ---


def _read_part(path: Path, stack: ExitStack) -> GgufPart:
    source = stack.enter_context(Source.open(path))
    cursor = Cursor(bytearray(), source.path, source=source)
    version, n_tensors, n_kv = read_header(cursor)
    entries = _read_entries(cursor, n_kv)
    infos_start = cursor.pos
    infos = _read_infos(cursor, n_tensors)
    kv = KvMapping(memoryview(cursor.data).toreadonly(), entries)
    alignment = _alignment(kv, source.path)
    data_start = cursor.pos + padding(cursor.pos, alignment)
    tensors = [_tensor(info, data_start, alignment, source) for info in infos]
    if first := next((t for t in tensors if t.offset + t.n_bytes > source.size), None):
        raise cut_short(source.size, max(t.offset + t.n_bytes for t in tensors), source.path, first.name)
    spans = sorted((t.offset, t.offset + t.n_bytes, t.name) for t in tensors if t.n_bytes)
    for (_, end, before), (start, _, name) in pairwise(spans):
        if start < end:
            raise CorruptError(f"the tensor overlaps {before!r}", path=source.path, tensor=name, offset=start)
    return GgufPart(source, version, alignment, tensors, kv, (infos_start, cursor.pos), data_start)


def read_header(cursor: Cursor) -> tuple[int, int, int]:
    """Version, tensor count, key count; leaves the cursor after them. Raises what `open_model` raises."""
    (magic,) = cursor.unpack(_MAGIC, "the magic")
    if magic == b"FUGG":
        raise UnsupportedError("a big-endian GGUF file", path=cursor.path, offset=0, hint=_BIG_ENDIAN_HINT)
    if magic != b"GGUF":
        raise UnknownFormatError("not a GGUF file: wrong magic", path=cursor.path)
    version = cursor.u32("the version")
    if version and not version & 0xFFFF:
        raise UnsupportedError("a big-endian GGUF file", path=cursor.path, offset=4, hint=_BIG_ENDIAN_HINT)
    if version == 1:
        hint = "download a newer file of the model: version 1 was replaced in August 2023"
        raise UnsupportedError("GGUF version 1", path=cursor.path, offset=4, hint=hint)
    if version not in (2, 3):
        kind = CorruptError if version == 0 else UnsupportedError
        raise kind(f"unsupported GGUF version {version}; supported: 2 and 3", path=cursor.path, offset=4)
    n_tensors, n_kv = cursor.u64("the tensor count"), cursor.u64("the key count")
    least = n_kv * _LEAST_ENTRY_BYTES + n_tensors * _LEAST_INFO_BYTES
    cursor.need(least, f"a header of {n_kv} keys and {n_tensors} tensors")
    if n_kv > MAX_KEYS or n_tensors > MAX_TENSORS:
        raise LimitError(
            f"a header of {n_kv} keys and {n_tensors} tensors; the limits are {MAX_KEYS} and {MAX_TENSORS}",
            path=cursor.path,
            offset=8,
        )
    return version, n_tensors, n_kv


def _read_entries(cursor: Cursor, n_kv: int) -> dict[str, KvEntry]:
    entries: dict[str, KvEntry] = {}
    for _ in range(n_kv):
        entry = cursor.entry()
        if entry.key in entries:
            raise CorruptError(f"duplicate key {entry.key!r}", path=cursor.path, offset=entry.start)
        entries[entry.key] = entry
    return entries


def _alignment(kv: KvMapping, path: str) -> int:
    if "general.alignment" not in kv:
        return DEFAULT_ALIGNMENT
    entry = kv.entries["general.alignment"]
    value = kv["general.alignment"]
    if entry.type is not GgufType.UINT32 or value < 1 or value & (value - 1):
        raise CorruptError("'general.alignment' is not a power of two stored as UINT32", path=path, offset=entry.start)
    return int(value)


_Info = tuple[str, int, tuple[int, ...], int, int]


def _read_infos(cursor: Cursor, n_tensors: int) -> list[_Info]:
    """Per tensor: name, ggml type, dims, offset in the data, position of the info."""
    infos: list[_Info] = []
    for _ in range(n_tensors):
        start = cursor.pos
        name = cursor.string(MAX_NAME_BYTES, "a tensor name")
        n_dims = cursor.u32("a tensor's dimension count")
        if n_dims > MAX_DIMS:
            raise LimitError(
                f"{n_dims} dimensions; GGUF allows at most {MAX_DIMS}", path=cursor.path, tensor=name, offset=start
            )
        *ne, ggml_type, offset = cursor.unpack(_INFOS[n_dims], "a tensor's dims, type and offset")
        infos.append((name, ggml_type, tuple(ne), offset, start))
    return infos


def _tensor(info: _Info, data_start: int, alignment: int, source: Source) -> Tensor:
    name, _, ne, offset, start = info
    dtype, n_bytes = _stored_as(info, source.path)
    if offset % alignment:
        raise CorruptError(
            f"the data offset {offset} is not a multiple of the alignment {alignment}",
            path=source.path,
            tensor=name,
            offset=start,
        )
    offset += data_start
    # An empty tensor may follow padding that the writer of the last tensor omitted.
    return Tensor(name, dtype, ne[::-1], offset if n_bytes else min(offset, source.size), n_bytes, source)


def _stored_as(info: _Info, path: str) -> tuple[str, int]:
    """Dtype and stored length, without padding."""
    name, ggml_type, ne, _, start = info
    dtype = DTYPES_BY_GGML_ID.get(ggml_type)
    if dtype is None:
        known = ", ".join(row.name for row in DTYPES.values() if row.ggml_id is not None)
        raise UnsupportedError(
            f"unknown GGML type {ggml_type}", path=path, tensor=name, offset=start, hint=f"known: {known}"
        )
    if any(dim >= 1 << 63 for dim in ne):
        raise LimitError(f"dims {list(ne)} exceed 2^63", path=path, tensor=name, offset=start)
    try:
        return dtype.name, dtype.n_bytes(ne[::-1] or (1,))
    except LimitError as error:
        raise LimitError(error.message, path=path, tensor=name, offset=start) from error
    except UsageError as error:
        raise CorruptError(error.message, path=path, tensor=name, offset=start) from error


def read_pairs(data: bytes, path: str) -> KvMapping:
    """Reads the key-value pairs of a GGUF whose header is in `data`; ignores tensors."""
    cursor = Cursor(data, path, more=True)
    _, _, n_kv = read_header(cursor)
    return KvMapping(memoryview(data), _read_entries(cursor, n_kv))
