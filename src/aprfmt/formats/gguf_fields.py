"""The keys of a GGUF: types, a bounds-checked cursor, and a mapping that decodes values on first use."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from enum import IntEnum
from functools import cache
from itertools import repeat
from operator import length_hint
from typing import Any

from aprfmt.errors import CorruptError, LimitError, TruncatedError
from aprfmt.io.source import Buffer, Source
from aprfmt.light_dataclass import light_dataclass
from aprfmt.limits import (
    MAX_ARRAY_DEPTH,
    MAX_ELEMENT_BYTES,
    MAX_HEADER_BYTES,
    MAX_KEY_BYTES,
    MAX_PARSED_BYTES,
    MAX_STRING_BYTES,
    MAX_TEXT_FILE_BYTES,
)

# Bytes of a header to read at first, and per further read.
_FIRST_STEP, _MOST_STEP = 64 << 10, 1 << 20


class GgufType(IntEnum):
    """Value types with their enum values (gguf.h)."""

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
    GgufType.UINT8: "B", GgufType.INT8: "b", GgufType.UINT16: "H", GgufType.INT16: "h", GgufType.UINT32: "I",
    GgufType.INT32: "i", GgufType.FLOAT32: "f", GgufType.BOOL: "?", GgufType.UINT64: "Q", GgufType.INT64: "q",
    GgufType.FLOAT64: "d",
}  # fmt: skip
"""Scalar types and their `struct` codes."""


# Minimum bytes of an array element: counts are checked against it before anything is read.
LEAST_BYTES = {kind: struct.calcsize("<" + code) for kind, code in FORMATS.items()}


# Memory per list element: its slot, its slot in a temporary tuple, and the object.
ELEMENT_BYTES = dict.fromkeys(GgufType, 48)


_CHARACTER_BYTES = 4
"""Maximum memory per character of a string that contains one beyond U+FFFF."""


FILE_KEYS = ("tokenizer.huggingface.json", "tokenizer.rwkv.world", "aprfmt.metadata")
"""Keys whose string is a whole file: they may have MAX_TEXT_FILE_BYTES."""


_TYPES = {int(kind): kind for kind in GgufType}


_U32 = struct.Struct("<I")


_U64 = struct.Struct("<Q")


@light_dataclass(slots=True)
class KvEntry:
    """Location of a pair; positions are bytes from the start of the file.

    Attributes:
        key: the key.
        type: of the value.
        elem_type: of an array's elements, None for scalars.
        count: of an array's elements, None for scalars.
        start: of the whole entry (the key's length field).
        value_start: of the value, after the type; for arrays that is the element type.
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
    """Walks the header of a GGUF file; every step is checked against the remaining bytes.

    `data` begins at the start of the file. With a `source` it grows ahead of the walk, to at most MAX_HEADER_BYTES;
    `more` says that the file continues beyond what may be walked.
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
        """Reads the file up to byte `end`, of which `need` was requested. Raises CorruptError if the file shrank."""
        while len(self.data) < end:
            assert self._source is not None
            assert isinstance(self.data, bytearray)
            start = len(self.data)
            step = min(max(start, _FIRST_STEP), _MOST_STEP, self._size - start)
            for piece in self._source.read_pieces(start, step):
                self.data += piece

    def need(self, n_bytes: int, what: str) -> None:
        """Raises TruncatedError (LimitError at the header limit) unless `n_bytes` bytes are left."""
        left = self._size - self.pos
        if n_bytes <= left:
            return
        if self.more:
            raise LimitError(
                f"{what} extends past the {MAX_HEADER_BYTES}-byte limit of a header", path=self.path, offset=self.pos
            )
        raise TruncatedError(f"{what} needs {n_bytes} bytes, {left} are left", path=self.path, offset=self.pos)

    def unpack(self, form: struct.Struct, what: str) -> tuple[Any, ...]:
        """Unpacks the fields of `form` at the cursor and advances it."""
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
        """Locates the pair at the cursor without decoding it. Raises CorruptError and its kinds."""
        start = self.pos
        key = self.string(MAX_KEY_BYTES, "a key")
        if not key:
            raise CorruptError("empty key", path=self.path, offset=start)
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
            self._skip(LEAST_BYTES[kind], key)
        self.read_to(self.pos)
        return KvEntry(key, kind, elem_type, count, start, value_start, self.pos)

    def _kind(self, key: str) -> GgufType:
        number = self.u32(f"the type of {key!r}")
        kind = _TYPES.get(number)
        if kind is None:
            raise CorruptError(f"key {key!r} has unknown type {number}", path=self.path, offset=self.pos - 4)
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
        self.need(count * LEAST_BYTES[elem_type], f"the array {key!r} of {count} elements")
        self._take_memory(count * ELEMENT_BYTES[elem_type], key)
        if elem_type is GgufType.STRING:
            start = self.pos
            self._skip_strings(key, count)
            self._take_memory(_CHARACTER_BYTES * (self.pos - start - 8 * count), key)
        elif elem_type is GgufType.ARRAY:
            for _ in range(count):
                self._skip_array(key, depth + 1)
        else:
            self.pos += count * LEAST_BYTES[elem_type]
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
        # The hot loop of opening a file: vocabularies have 150,000 strings.
        what, pos, left, longest = f"the strings of {key!r}", self.pos, count, 0
        while left:
            pos, left = _skip_short_strings(self.data, pos, left)
            for _ in range(min(left, _STRIDE)):
                try:
                    (length,) = _U64.unpack_from(self.data, pos)
                except (struct.error, OverflowError):  # beyond what was read
                    self.need(pos + 8 - self.pos, what)
                    self.read_to(pos + 8)
                    (length,) = _U64.unpack_from(self.data, pos)
                if length > longest:  # noqa: PLR1730 - a call is too slow here
                    longest = length
                pos += length + 8
            left -= min(left, _STRIDE)
        self.need(pos - self.pos, what)
        if longest > MAX_ELEMENT_BYTES:
            raise LimitError(
                f"a string of {key!r} has {longest:,} bytes; the limit is {MAX_ELEMENT_BYTES:,}",
                path=self.path,
                offset=self.pos,
            )
        self.pos = pos


_STRIDE = 16
"""Strings that are skipped one by one before short ones are tried again."""


@cache
def _pairs_of_strings() -> tuple[Callable[[Buffer, int], tuple[int, int]], ...]:
    """For each length of a string below 256: what reads the length field before it and that behind it."""
    return tuple(struct.Struct(f"<Q{n}xQ").unpack_from for n in range(256))


def _skip_short_strings(data: Buffer, pos: int, count: int) -> tuple[int, int]:
    """Skips strings by fours with at most 255 bytes together; returns the new position and how many are left.

    The first byte of a length chooses what reads it and the next one. If all four lengths add up to at most 255, each
    is its first byte, so that the choice was right.
    """
    pairs, fours, start = _pairs_of_strings(), repeat(None, count // 4), pos
    try:
        for _ in fours:
            start = pos
            first, second = pairs[data[pos]](data, pos)
            pos += first + second + 16
            first, second = pairs[data[pos]](data, pos)
            pos += first + second + 16
            if pos - start > 255 + 4 * 8:
                break
        else:
            return pos, count % 4
    except (IndexError, struct.error):  # beyond `data`
        pass
    return start, 4 * (length_hint(fours) + 1) + count % 4


def check_string(key: str, n_bytes: int, path: str | None = None, offset: int | None = None) -> None:
    """Raises LimitError if the string value of `key` exceeds its maximum size."""
    limit = MAX_TEXT_FILE_BYTES if key in FILE_KEYS else MAX_STRING_BYTES
    if n_bytes > limit:
        raise LimitError(
            f"the value of {key!r} has {n_bytes:,} bytes; the limit is {limit:,}", path=path, offset=offset
        )


def decode(data: Buffer, entry: KvEntry) -> Any:
    """Decodes the value of `entry`, located by a Cursor in `data`: int, float, bool, str or a list of values."""
    if entry.type is GgufType.ARRAY:
        # A copy, because slices of bytes are several times cheaper than slices of a memoryview.
        return _decode_array(bytes(data[entry.value_start : entry.end]), 0)[0]
    if entry.type is GgufType.STRING:
        return str(data[entry.value_start + 8 : entry.end], "utf-8", "surrogateescape")
    return struct.unpack_from("<" + FORMATS[entry.type], data, entry.value_start)[0]


def _decode_array(data: bytes, pos: int) -> tuple[list[object], int]:
    elem_type = _TYPES[_U32.unpack_from(data, pos)[0]]
    count: int = _U64.unpack_from(data, pos + 4)[0]
    pos += 12
    if elem_type in FORMATS:
        numbers: list[object] = [*struct.unpack_from(f"<{count}{FORMATS[elem_type]}", data, pos)]
        return numbers, pos + count * LEAST_BYTES[elem_type]
    values: list[object] = []
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
    """Key-value pairs in file order, each decoded on first access.

    `entries` has types and counts without decoding; the bytes stay readable after the model is closed.
    """

    def __init__(self, data: memoryview, entries: dict[str, KvEntry]) -> None:
        self.entries = entries
        self._data = data
        self._values: dict[str, object] = {}

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
        """The pairs without the given keys."""
        return KvMapping(self._data, {key: entry for key, entry in self.entries.items() if not is_left_out(key)})

    def remember(self, key: str, value: object) -> None:
        """Caches `value` as the decoded value of the entry."""
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
