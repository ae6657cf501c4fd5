"""SentencePiece's tokenizer.model: the few protobuf fields that matter, read without the protobuf package.

ModelProto      1 pieces (repeated), 2 trainer_spec, 3 normalizer_spec
SentencePiece   1 piece, 2 score (f32), 3 type
TrainerSpec     3 model_type, 24 treat_whitespace_as_suffix, 35 byte_fallback, 40..43 ids of unk, bos, eos, pad
NormalizerSpec  2 precompiled_charsmap, 3 add_dummy_prefix, 4 remove_extra_whitespaces, 5 escape_whitespaces
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from aprfmt.errors import CorruptError, LimitError, TruncatedError
from aprfmt.limits import MAX_TEXT_FILE_BYTES, MAX_TOKEN_ID

UNIGRAM = 1
BPE = 2
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_NAMES: dict[int, dict[int, str]] = {
    2: {3: "model_type", 24: "suffix", 35: "byte_fallback", 40: "unk", 41: "bos", 42: "eos", 43: "pad"},
    3: {2: "charsmap", 3: "add_dummy_prefix", 4: "remove_extra_whitespaces", 5: "escape_whitespaces"},
}
"""Fields of trainer_spec and normalizer_spec by number: an attribute of SentencePiece, or the role of an id."""
_MAX_VARINT_BYTES = 10

Field = tuple[int, int, int | memoryview, int]
"""Number, wire type, value (bits of fixed-size ones as an integer), offset."""


@dataclass(slots=True, frozen=True)
class VocabularyPiece:
    """One piece; `type` numbers are those of TokenType."""

    text: str
    score: float
    type: int


@dataclass(slots=True)
class SentencePiece:
    """A tokenizer.model, with the format's defaults."""

    pieces: list[VocabularyPiece] = field(default_factory=list)
    model_type: int = UNIGRAM
    byte_fallback: bool = False
    suffix: bool = False
    ids: dict[str, int] = field(default_factory=lambda: {"unk": 0, "bos": 1, "eos": 2})
    charsmap: bytes = b""
    add_dummy_prefix: bool = True
    remove_extra_whitespaces: bool = True
    escape_whitespaces: bool = True


def read(data: bytes, path: str) -> SentencePiece:
    """Reads a tokenizer.model.

    Raises:
        TruncatedError, CorruptError: the bytes are not a SentencePiece model.
        LimitError: too large, or more pieces than any vocabulary has.
    """
    if len(data) > MAX_TEXT_FILE_BYTES:
        raise LimitError(f"{len(data)} bytes exceed the size limit of a tokenizer file", path=path)
    model = SentencePiece()
    for number, wire, value, offset in _fields(memoryview(data), 0, path):
        if number in (1, 2, 3) and not isinstance(value, memoryview):
            raise CorruptError(f"field {number} has wire type {wire}", path=path, offset=offset)
        if number == 1 and isinstance(value, memoryview):
            if len(model.pieces) > MAX_TOKEN_ID:
                raise LimitError(f"more than {MAX_TOKEN_ID} pieces", path=path, offset=offset)
            model.pieces.append(_piece(value, offset, path))
        elif number in _NAMES and isinstance(value, memoryview):
            _read_settings(model, _NAMES[number], value, offset, path)
    if not model.pieces:
        raise CorruptError("not a SentencePiece model: no pieces found", path=path)
    return model


def _piece(data: memoryview, start: int, path: str) -> VocabularyPiece:
    text, score, kind = "", 0.0, 1
    for number, _, value, offset in _fields(data, start, path):
        if number == 1 and isinstance(value, memoryview):
            try:
                text = str(value, "utf-8")
            except UnicodeDecodeError as error:
                raise CorruptError(f"a piece is not UTF-8 text: {error}", path=path, offset=offset) from error
        elif number == 2 and isinstance(value, int):
            score = struct.unpack("<f", struct.pack("<I", value & 0xFFFFFFFF))[0]
        elif number == 3 and isinstance(value, int):
            kind = value
    if not 1 <= kind <= 6 or not math.isfinite(score):
        raise CorruptError(f"piece {text!r} has type {kind} and score {score}", path=path, offset=start)
    return VocabularyPiece(text, score, kind)


def _read_settings(model: SentencePiece, names: Mapping[int, str], data: memoryview, start: int, path: str) -> None:
    for number, _, value, _ in _fields(data, start, path):
        name = names.get(number)
        if name is None or isinstance(value, memoryview) != (name == "charsmap"):
            continue
        if hasattr(model, name):
            setattr(model, name, type(getattr(model, name))(value))
        else:
            # the id of a role; a negative one, which is written as ten bytes, means none
            model.ids.pop(name, None)
            if isinstance(value, int) and value < 1 << 31:
                model.ids[name] = value


def _fields(data: memoryview, start: int, path: str) -> Iterator[Field]:
    """The fields of one message; `start` is its offset in the file."""
    pos = 0
    while pos < len(data):
        offset = start + pos
        tag, pos = _varint(data, pos, start, path)
        number, wire = tag >> 3, tag & 7
        if number == 0:
            raise CorruptError("invalid field number 0", path=path, offset=offset)
        if wire == _VARINT:
            value, pos = _varint(data, pos, start, path)
            yield number, wire, value, offset
        elif wire in (_FIXED64, _FIXED32):
            size = 8 if wire == _FIXED64 else 4
            _need(data, pos, size, start, path)
            yield number, wire, int.from_bytes(data[pos : pos + size], "little"), offset
            pos += size
        elif wire == _BYTES:
            size, pos = _varint(data, pos, start, path)
            _need(data, pos, size, start, path)
            yield number, wire, data[pos : pos + size], start + pos
            pos += size
        else:
            raise CorruptError(f"invalid wire type {wire}", path=path, offset=offset)


def _need(data: memoryview, pos: int, size: int, start: int, path: str) -> None:
    if size > len(data) - pos:
        raise TruncatedError(f"a field needs {size} bytes, {len(data) - pos} are left", path=path, offset=start + pos)


def _varint(data: memoryview, pos: int, start: int, path: str) -> tuple[int, int]:
    value = 0
    for n in range(_MAX_VARINT_BYTES):
        _need(data, pos + n, 1, start, path)
        byte = data[pos + n]
        value |= (byte & 0x7F) << (7 * n)
        if byte < 0x80:
            return value, pos + n + 1
    raise CorruptError("a varint over ten bytes", path=path, offset=start + pos)
