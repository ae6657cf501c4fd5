"""GGUF reader, versions 2 and 3, single files and split ones. Nothing is decoded before it is asked for.

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
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from enum import IntEnum
from itertools import pairwise, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aprfmt.codecs.dtypes import DTYPES, DTYPES_BY_GGML_ID
from aprfmt.errors import (
    CorruptError,
    LimitError,
    RefusedError,
    TruncatedError,
    UnknownFormatError,
    UnsupportedError,
    UsageError,
)
from aprfmt.io.source import Buffer, Source, exists, padding
from aprfmt.limits import (
    MAX_ARRAY_DEPTH,
    MAX_ELEMENT_BYTES,
    MAX_HEADER_BYTES,
    MAX_KEY_BYTES,
    MAX_KEYS,
    MAX_NAME_BYTES,
    MAX_PARSED_BYTES,
    MAX_STRING_BYTES,
    MAX_TENSORS,
    MAX_TEXT_FILE_BYTES,
)
from aprfmt.model import Model, Tensor
from aprfmt.records import record

if TYPE_CHECKING:
    from aprfmt.arch.hyperparams import Hyperparams
    from aprfmt.tokenizer.model import Tokenizer

DEFAULT_ALIGNMENT = 32
"""Of the tensor data, where `general.alignment` is absent."""

MAX_DIMS = 4
"""GGML_MAX_DIMS."""

LOADER_NAME_BYTES = 63
"""Longest tensor name that llama.cpp loads (GGML_MAX_NAME less the terminator)."""

# What is read of a header at first, and at a time where it is long.
_FIRST_STEP, _MOST_STEP = 64 << 10, 1 << 20
_LEAST_ENTRY_BYTES = 14
_LEAST_INFO_BYTES = 24
_INFOS = tuple(struct.Struct(f"<{n}QIQ") for n in range(MAX_DIMS + 1))
PART_NAME = re.compile(r"(?P<stem>.*)-(?P<no>\d{5})-of-(?P<count>\d{5})(?P<suffix>\.gguf)", re.DOTALL)
_BIG_ENDIAN_HINT = "convert it with llama.cpp's gguf-py script gguf_convert_endian.py first"


# --- key-value pairs ---


class GgufType(IntEnum):
    """Value types, with their numbers in the file (gguf.h)."""

    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    UINT64 = 10
    INT64 = 11
    FLOAT64 = 12


FORMATS: dict[GgufType, str] = {
    GgufType.UINT8: "B",
    GgufType.INT8: "b",
    GgufType.UINT16: "H",
    GgufType.INT16: "h",
    GgufType.UINT32: "I",
    GgufType.INT32: "i",
    GgufType.FLOAT32: "f",
    GgufType.BOOL: "?",
    GgufType.UINT64: "Q",
    GgufType.INT64: "q",
    GgufType.FLOAT64: "d",
}
"""Scalar types and their `struct` codes."""

# Least bytes of one array element: what a count is held against before anything is walked.
_LEAST_BYTES = {kind: struct.calcsize("<" + code) for kind, code in FORMATS.items()}
_LEAST_BYTES |= {GgufType.STRING: 8, GgufType.ARRAY: 12}

# What an element of a list takes in memory: its place there, while it is made one in a tuple, and the object.
_ELEMENT_BYTES = dict.fromkeys(GgufType, 48)
_ELEMENT_BYTES |= {GgufType.UINT8: 16, GgufType.INT8: 16, GgufType.BOOL: 16, GgufType.STRING: 80, GgufType.ARRAY: 112}

_CHARACTER_BYTES = 4
"""Most memory for a character of a string, where one of them lies beyond U+FFFF."""

FILE_KEYS = ("tokenizer.huggingface.json", "tokenizer.rwkv.world", "aprfmt.metadata")
"""Keys whose strings hold a whole file: they may have MAX_TEXT_FILE_BYTES."""

_TYPES = {int(kind): kind for kind in GgufType}
_MAGIC = struct.Struct("<4s")
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


@record(slots=True)
class KvEntry:
    """Where one pair lies; positions are bytes from the start of the file.

    Attributes:
        key: the key.
        type: of the value.
        elem_type: of an array's elements, None for scalars.
        count: of an array's elements, None for scalars.
        start: of the whole entry (the key's length field).
        value_start: of the value, behind the type; for arrays that is the element type.
        end: one past the entry.
    """

    key: str
    type: GgufType
    elem_type: GgufType | None
    count: int | None
    start: int
    value_start: int
    end: int


class Cursor:
    """Walks the header of a GGUF file; every step is checked against the bytes that are left.

    `data` begins at the start of the file. Of a `source` it grows with the walk, a step ahead of it and to at most
    MAX_HEADER_BYTES; `more` says that the file goes on behind what may be walked.
    """

    __slots__ = ("_parsed_bytes", "_size", "_source", "data", "more", "path", "pos")

    def __init__(self, data: Buffer, path: str, *, more: bool = False, source: Source | None = None) -> None:
        self._size = len(data) if source is None else min(source.size, MAX_HEADER_BYTES)
        self._source = source
        self._parsed_bytes = 0
        self.data = data
        self.path = path
        self.pos = 0
        self.more = more if source is None else source.size > self._size

    @property
    def size(self) -> int:
        """Bytes of the whole file."""
        return self._size if self._source is None else self._source.size

    def read_to(self, end: int) -> None:
        """Reads the file as far as byte `end`, for which `need` was asked. Raises CorruptError where it shrank."""
        while len(self.data) < end:
            assert self._source is not None
            assert isinstance(self.data, bytearray)
            start = len(self.data)
            step = min(max(start, _FIRST_STEP), _MOST_STEP, self._size - start)
            self.data += self._source.read(start, step)

    def need(self, n_bytes: int, what: str) -> None:
        """Raises TruncatedError (LimitError at the header cap) unless `n_bytes` bytes are left."""
        left = self._size - self.pos
        if n_bytes <= left:
            return
        if self.more:
            raise LimitError(
                f"{what} ends beyond the {MAX_HEADER_BYTES} bytes that a header may have",
                path=self.path,
                offset=self.pos,
            )
        raise TruncatedError(f"{what} needs {n_bytes} bytes, {left} are left", path=self.path, offset=self.pos)

    def unpack(self, form: struct.Struct, what: str) -> tuple[Any, ...]:
        """The fields of `form` at the cursor, which moves behind them."""
        self.need(form.size, what)
        self.read_to(self.pos + form.size)
        fields = form.unpack_from(self.data, self.pos)
        self.pos += form.size
        return fields

    def u32(self, what: str) -> int:
        """A little-endian u32."""
        return int(self.unpack(_U32, what)[0])

    def u64(self, what: str) -> int:
        """A little-endian u64."""
        return int(self.unpack(_U64, what)[0])

    def string(self, cap: int, what: str) -> str:
        """A string of at most `cap` bytes; bytes that are not UTF-8 become lone surrogates."""
        length = self.u64(what)
        if length > cap:
            raise LimitError(f"{what} has {length} bytes; the limit is {cap}", path=self.path, offset=self.pos - 8)
        self.need(length, what)
        self.pos += length
        self.read_to(self.pos)
        return str(self.data[self.pos - length : self.pos], "utf-8", "surrogateescape")

    def entry(self) -> KvEntry:
        """The pair at the cursor, located but not decoded. Raises CorruptError and its kinds."""
        start = self.pos
        key = self.string(MAX_KEY_BYTES, "a key")
        if not key:
            raise CorruptError("a key is empty", path=self.path, offset=start)
        kind = self._kind(key)
        value_start = self.pos
        elem_type: GgufType | None = None
        count: int | None = None
        if kind is GgufType.ARRAY:
            elem_type, count = self._skip_array(key, 1)
        elif kind is GgufType.STRING:
            length = self.u64(f"the value of {key!r}")
            self.need(length, f"the value of {key!r}")
            check_string(key, length, self.path, start)
            self._skip(length, key)
        else:
            self._skip(_LEAST_BYTES[kind], key)
        self.read_to(self.pos)
        return KvEntry(key, kind, elem_type, count, start, value_start, self.pos)

    def _kind(self, key: str) -> GgufType:
        number = self.u32(f"the type of {key!r}")
        kind = _TYPES.get(number)
        if kind is None:
            raise CorruptError(f"key {key!r} has the unknown type {number}", path=self.path, offset=self.pos - 4)
        return kind

    def _skip(self, n_bytes: int, key: str) -> None:
        self.need(n_bytes, f"the value of {key!r}")
        self.pos += n_bytes

    def _skip_array(self, key: str, depth: int) -> tuple[GgufType, int]:
        if depth > MAX_ARRAY_DEPTH:
            raise LimitError(
                f"arrays of {key!r} are nested deeper than {MAX_ARRAY_DEPTH}", path=self.path, offset=self.pos
            )
        elem_type = self._kind(key)
        count = self.u64(f"the count of {key!r}")
        self.need(count * _LEAST_BYTES[elem_type], f"the array {key!r} of {count} elements")
        self._take_memory(count * _ELEMENT_BYTES[elem_type], key)
        if elem_type is GgufType.STRING:
            start = self.pos
            self._skip_strings(key, count)
            self._take_memory(_CHARACTER_BYTES * (self.pos - start - 8 * count), key)
        elif elem_type is GgufType.ARRAY:
            for _ in range(count):
                self._skip_array(key, depth + 1)
        else:
            self.pos += count * _LEAST_BYTES[elem_type]
        return elem_type, count

    def _take_memory(self, n_bytes: int, key: str) -> None:
        self._parsed_bytes += n_bytes
        if self._parsed_bytes > MAX_PARSED_BYTES:
            raise LimitError(
                f"the arrays up to {key!r} may take {self._parsed_bytes:,} bytes of memory; the limit is "
                f"{MAX_PARSED_BYTES:,}",
                path=self.path,
                offset=self.pos,
            )

    def _skip_strings(self, key: str, count: int) -> None:
        # The hot loop of opening a file: vocabularies have 150,000 strings. A length behind what was read raises: then
        # more is read, and the loop goes on where it stopped.
        what, pos, unpack, left = f"the strings of {key!r}", self.pos, _U64.unpack_from, repeat(None, count)
        longest, is_done = 0, False
        while not is_done:
            data = self.data
            try:
                for _ in left:
                    (length,) = unpack(data, pos)
                    if length > longest:  # noqa: PLR1730 - a call is too slow here
                        longest = length
                    pos += length + 8
                is_done = True
            except (struct.error, OverflowError):
                self.need(pos + 8 - self.pos, what)
                self.read_to(pos + 8)
                (length,) = unpack(self.data, pos)
                longest = max(longest, length)
                pos += length + 8
        self.need(pos - self.pos, what)
        if longest > MAX_ELEMENT_BYTES:
            raise LimitError(
                f"a string of {key!r} has {longest:,} bytes; the limit is {MAX_ELEMENT_BYTES:,}",
                path=self.path,
                offset=self.pos,
            )
        self.pos = pos


def check_string(key: str, n_bytes: int, path: str | None = None, offset: int | None = None) -> None:
    """Raises LimitError for a value of `key` that is a string of more bytes than such a value has."""
    limit = MAX_TEXT_FILE_BYTES if key in FILE_KEYS else MAX_STRING_BYTES
    if n_bytes > limit:
        raise LimitError(
            f"the value of {key!r} has {n_bytes:,} bytes; the limit is {limit:,}", path=path, offset=offset
        )


def decode(data: Buffer, entry: KvEntry) -> Any:
    """The value of `entry`, located by a Cursor in `data`: int, float, bool, str or a list of values."""
    if entry.type is GgufType.ARRAY:
        # A copy, because slices of bytes are several times cheaper than slices of a memoryview.
        return _decode_array(bytes(data[entry.value_start : entry.end]), 0)[0]
    if entry.type is GgufType.STRING:
        return str(data[entry.value_start + 8 : entry.end], "utf-8", "surrogateescape")
    return struct.unpack_from("<" + FORMATS[entry.type], data, entry.value_start)[0]


def _decode_array(data: bytes, pos: int) -> tuple[list[Any], int]:
    elem_type = _TYPES[_U32.unpack_from(data, pos)[0]]
    count: int = _U64.unpack_from(data, pos + 4)[0]
    pos += 12
    if elem_type in FORMATS:
        values = list(struct.unpack_from(f"<{count}{FORMATS[elem_type]}", data, pos))
        return values, pos + count * _LEAST_BYTES[elem_type]
    values = []
    for _ in range(count):
        if elem_type is GgufType.ARRAY:
            value, pos = _decode_array(data, pos)
            values.append(value)
        else:
            end = pos + 8 + _U64.unpack_from(data, pos)[0]
            values.append(data[pos + 8 : end].decode("utf-8", "surrogateescape"))
            pos = end
    return values, pos


class KvMapping(Mapping[str, Any]):
    """Key-value pairs in file order, each decoded when it is first asked for.

    `entries` tells types and counts without decoding; the bytes stay readable after the model is closed.
    """

    def __init__(self, data: memoryview, entries: dict[str, KvEntry]) -> None:
        self.entries = entries
        self._data = data
        self._values: dict[str, Any] = {}

    def raw(self, key: str) -> memoryview:
        """The bytes of the whole entry: key, type and value. Raises KeyError."""
        entry = self.entries[key]
        return self._data[entry.start : entry.end]

    def kind(self, key: str) -> str | tuple[str, str] | None:
        """The type's name, ("ARRAY", element type's name) for arrays, None for arrays of arrays. Raises KeyError."""
        entry = self.entries[key]
        if entry.elem_type is None:
            return entry.type.name
        return None if entry.elem_type is GgufType.ARRAY else (entry.type.name, entry.elem_type.name)

    def without(self, is_left_out: Callable[[str], bool]) -> KvMapping:
        """The pairs but for those whose keys are left out."""
        return KvMapping(self._data, {key: entry for key, entry in self.entries.items() if not is_left_out(key)})

    def remember(self, key: str, value: Any) -> None:
        """Takes `value` for what the entry would be decoded to."""
        self._values[key] = value

    def __getitem__(self, key: str) -> Any:
        if key not in self._values:
            self._values[key] = decode(self._data, self.entries[key])
        return self._values[key]

    def __contains__(self, key: object) -> bool:
        return key in self.entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)


# --- the model ---


@record(slots=True)
class GgufPart:
    """One file of a model.

    Attributes:
        source: the open file.
        version: 2 or 3.
        alignment: of the tensor data.
        tensors: in file order.
        kv: the pairs in file order, decoded on access.
        infos: where the tensor infos begin and end.
        data_start: where the tensor data begin, behind the padding of the header.
    """

    source: Source
    version: int
    alignment: int
    tensors: list[Tensor]
    kv: KvMapping
    infos: tuple[int, int]
    data_start: int


@record(slots=True)
class GgufNative:
    """What writers of GGUF need: every part, in order."""

    parts: list[GgufPart]


def open_model(path: Path) -> Model:
    """Opens a GGUF file; any part of a split model opens all of them, with the metadata of the first.

    Raises UnsupportedError (version 1, big-endian, unknown tensor type), CorruptError and its kinds,
    RefusedError (a part is missing or belongs elsewhere), NotFoundError, StorageError.
    """
    with ExitStack() as stack:
        parts = _read_all(path, stack)
        tensors = [tensor for part in parts for tensor in part.tensors]
        seen: set[str] = set()
        for tensor in tensors:
            if tensor.name in seen:
                raise CorruptError("two tensors have one name", path=tensor.source.path, tensor=tensor.name)
            seen.add(tensor.name)
        model = model_of(path, parts)
        stack.pop_all()
    return model


def model_of(path: Path, parts: list[GgufPart]) -> Model:
    """The model of these parts, with the keys of the first."""
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
            f"llama.cpp loads no tensor name of more than {LOADER_NAME_BYTES} bytes: {tensor.name}"
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
        # Only their number matters here, and decoding 150,000 strings takes longer than all the rest.
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
            hint="give the parts the names under which they were written",
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
                f"the file is part {found[0] + 1} of {found[1]}, its name says {no + 1} of {len(parts)}",
                path=part.source.path,
                hint="give the parts the names under which they were written",
            )
    n_tensors = sum(len(part.tensors) for part in parts)
    expected = _split_number(parts[0], "split.tensors.count", n_tensors)
    if expected != n_tensors:
        raise RefusedError(
            f"the parts hold {n_tensors} tensors, the first one declares {expected}",
            path=parts[0].source.path,
            hint="fetch all parts of one and the same release",
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
    spans = sorted((t.offset, t.offset + t.n_bytes, t.name) for t in tensors if t.n_bytes)
    for (_, end, before), (start, _, name) in pairwise(spans):
        if start < end:
            raise CorruptError(f"the tensor overlaps {before!r}", path=source.path, tensor=name, offset=start)
    return GgufPart(source, version, alignment, tensors, kv, (infos_start, cursor.pos), data_start)


def read_header(cursor: Cursor) -> tuple[int, int, int]:
    """Version, tensor count, key count; the cursor stands behind them. Raises what `open_model` raises."""
    (magic,) = cursor.unpack(_MAGIC, "the magic")
    if magic == b"FUGG":
        raise UnsupportedError("a big-endian GGUF file", path=cursor.path, offset=0, hint=_BIG_ENDIAN_HINT)
    if magic != b"GGUF":
        raise UnknownFormatError("not a GGUF file: its magic is missing", path=cursor.path)
    version = cursor.u32("the version")
    if version and not version & 0xFFFF:
        raise UnsupportedError("a big-endian GGUF file", path=cursor.path, offset=4, hint=_BIG_ENDIAN_HINT)
    if version == 1:
        hint = "fetch a newer file of the model: version 1 was replaced in August 2023"
        raise UnsupportedError("GGUF version 1", path=cursor.path, offset=4, hint=hint)
    if version not in (2, 3):
        kind = CorruptError if version == 0 else UnsupportedError
        raise kind(f"GGUF version {version}; versions 2 and 3 can be read", path=cursor.path, offset=4)
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
            raise CorruptError(f"the key {entry.key!r} is there twice", path=cursor.path, offset=entry.start)
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
                f"{n_dims} dimensions, GGUF has at most {MAX_DIMS}", path=cursor.path, tensor=name, offset=start
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
    if n_bytes:
        source.check(offset, n_bytes, "the tensor", name)
    # An empty tensor may be placed behind padding that the last tensor's writer left out.
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
        raise LimitError(f"dims {list(ne)} are beyond 2^63", path=path, tensor=name, offset=start)
    try:
        return dtype.name, dtype.n_bytes(ne[::-1] or (1,))
    except LimitError as error:
        raise LimitError(error.message, path=path, tensor=name, offset=start) from error
    except UsageError as error:
        raise CorruptError(error.message, path=path, tensor=name, offset=start) from error


def read_pairs(data: bytes, path: str) -> KvMapping:
    """The key-value pairs of a GGUF of which `data` holds at least the header; tensors are not looked at."""
    cursor = Cursor(data, path, more=True)
    _, _, n_kv = read_header(cursor)
    return KvMapping(memoryview(data), _read_entries(cursor, n_kv))
