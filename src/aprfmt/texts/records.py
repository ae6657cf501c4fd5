"""Reads documents from plain text, source code, JSON lines, Parquet, csv and token shards, compressed or not.

A document is a string, a conversation, or an array of token ids [n] (uint32) from token shards. `RecordReader` skips
and counts invalid records, or raises with `strict`. Memory is bounded by one document plus one block of a file.
"""

from __future__ import annotations

import codecs
import csv
import io
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np
import numpy.typing as npt

from aprfmt.errors import CorruptError, LimitError, RefusedError, UnsupportedError, storage_error
from aprfmt.io.downloads import MAX_POINTER_BYTES, check_no_pointer
from aprfmt.io.jsonx import check_size
from aprfmt.io.unpacked import SUFFIXES, Unpacked
from aprfmt.limits import MAX_CHAT_CHARS, MAX_DOCUMENT_CHARS, MAX_LIST_BYTES, MAX_RECORD_BYTES
from aprfmt.text import format_clock
from aprfmt.texts.parquet import ParquetRows
from aprfmt.texts.sources import MAX_SOURCE_BYTES, SourceFile
from aprfmt.tokenizer.chat import PrefixError, TemplateSyntaxError

TEXT_FIELD = "text"
"""Default field of a record's text."""

LOG_S = 20.0  # between progress lines
_STEP_BYTES = 1 << 17  # per read
_PIECE = 1 << 16  # approximate length in characters of the documents that a text file is split into
_TRIES = 100  # conversations without a recognizable answer before the template is refused
_BLOCK = 1 << 20  # tokens read at a time, and the longest document of a token shard
_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "function": "tool"}
"""Roles in ShareGPT files and their standard names."""

Log = Callable[[str], None]


@dataclass(slots=True)
class ReadPosition:
    """Read position in a file: `bytes` returns the number of bytes consumed on disk."""

    bytes: Callable[[], int] = lambda: 0


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation.

    Attributes:
        messages: messages with "role" and "content".
        first: index of the first message that may be trained on.
        tools: tool definitions for the chat template.
    """

    messages: list[dict[str, object]]
    first: int = 0
    tools: object = None


@dataclass(frozen=True, slots=True)
class Marked:
    """A text with a loss mask: `learned` are the character ranges to train on, ascending."""

    text: str
    learned: Sequence[tuple[int, int]]

    def __len__(self) -> int:
        return len(self.text)


def as_text(chat: Chat) -> Marked:
    """The messages joined as plain text, for readers without a chat template."""
    text = "\n\n".join(str(message["content"]) for message in chat.messages)
    return Marked(text, [(0, len(text))])


Document = str | npt.NDArray[np.uint32] | Marked
Record = str | Chat


def is_blank(document: Document) -> bool:
    """Whether a document is empty or only whitespace."""
    return not len(document) or (isinstance(document, str) and not document.strip())


_UNTOLD = "conversations whose answers cannot be located"


class _BadRecordError(Exception):
    """An invalid record: its fault, and `kind`, the reason under which such records are counted."""

    def __init__(self, why: str, kind: str) -> None:
        super().__init__(why)
        self.kind = kind


@dataclass(slots=True, kw_only=True)
class RecordReader:
    """Reads the documents of files.

    Attributes:
        separator: the token id that ends documents in token shards.
        render: renders a conversation and its loss mask; raises RefusedError or UnsupportedError if the chat template
            rejects it.
        text_field: field of a record's text or list of messages.
        strict: whether an invalid record is an error.
        strict_hint: what to type after that error.
        skipped: number of skipped records by reason.
        log: reports the first invalid record of each kind.
        place: position in the current file.
    """

    separator: int
    render: Callable[[Chat], Marked]
    text_field: str = TEXT_FIELD
    strict: bool = False
    strict_hint: str = "without --strict such records are skipped and counted"
    skipped: Counter[str] = field(default_factory=Counter)
    log: Log = lambda line: None
    place: ReadPosition = field(default_factory=ReadPosition)
    _rendered: int = 0

    def documents(self, file: SourceFile) -> Iterator[Document]:
        """The documents of one file of `list_files`.

        Raises:
            CorruptError: not UTF-8, a truncated shard, damaged compression; with `strict`, an invalid record.
            RefusedError: a table without a text column.
            LimitError: a file that needs too much memory or time, or decompresses to far more than its size.
            MissingDependencyError: a Parquet file, but no pyarrow.
            PrefixError: no chat template, or one that marks the answer in no conversation.
            TemplateSyntaxError: a chat template that cannot be parsed.
            StorageError: the file cannot be read.
        """
        try:
            with open(file.path, "rb") as opened:
                check_no_pointer(opened.read(MAX_POINTER_BYTES), file.path, file.size)
            if file.kind == "source":
                yield from _source(file.path, self.skipped, self.place)
            elif file.kind == "tokens":
                yield from _tokens(file.path, self.separator, self.place)
            elif file.kind == "text":
                yield from _text(file.path, self.place)
            else:
                yield from self._records(file)
        except UnicodeDecodeError as error:
            raise CorruptError(
                f"not UTF-8 text: {error.reason}",
                path=file.path,
                hint="use UTF-8 text, .jsonl, .parquet or .bin shards",
            ) from error
        except OSError as error:
            raise storage_error(error, file.path) from error

    def _records(self, file: SourceFile) -> Iterator[Document]:
        untold: PrefixError | None = None
        for where, record in _RECORDS[file.kind](file.path, self.text_field, self.place):
            try:
                document = self._document(record)
                if isinstance(document, str) and len(document) > MAX_DOCUMENT_CHARS:
                    yield from _cut(document)
                else:
                    yield document
            except _BadRecordError as bad:
                self._leave_out(file, where, bad)
                untold = bad.__cause__ if isinstance(bad.__cause__, PrefixError) else untold
            except LimitError as error:
                raise LimitError(f"{where}: {error.message}", path=file.path) from None
            if untold is not None and not self._rendered and self.skipped[_UNTOLD] >= _TRIES:
                break
        if untold is not None and not self._rendered:
            raise untold

    def _document(self, record: object) -> Document:
        if isinstance(record, _BadRecordError):
            raise record
        found = document_of(record, self.text_field)
        if isinstance(found, str):
            return found
        if sum(len(str(message["content"])) for message in found.messages) > MAX_CHAT_CHARS // 2:
            raise _BadRecordError(
                f"has more than {MAX_CHAT_CHARS // 2:,} characters", "conversations too long to render"
            )
        try:
            marked = self.render(found)
            marked.text.encode()
        except PrefixError as error:
            raise _BadRecordError(error.message, _UNTOLD) from error
        except TemplateSyntaxError as error:
            error.hint = "use a model with a valid Jinja chat template, or plain text instead of conversations"
            raise
        except (RefusedError, UnsupportedError) as error:
            raise _BadRecordError(
                f"is rejected by the chat template: {error.message}", "conversations that the chat template rejects"
            ) from None
        except UnicodeEncodeError:
            raise _BadRecordError("has an unpaired surrogate", "conversations with invalid text") from None
        if not marked.learned:
            raise _BadRecordError("has no answer in its rendered text", "conversations without an answer")
        self._rendered += 1
        return marked

    def _leave_out(self, file: SourceFile, where: str, bad: _BadRecordError) -> None:
        if self.strict and isinstance(bad.__cause__, PrefixError):
            raise bad.__cause__
        if self.strict:
            raise CorruptError(f"{where} {bad}", path=file.path, hint=self.strict_hint)
        if not self.skipped[bad.kind]:
            self.log(f"{file.name}: {where} {bad}; such records are skipped and counted")
        self.skipped[bad.kind] += 1


class ReadProgress:
    """Reads documents and logs progress from time to time; `done` is the number of bytes read."""

    def __init__(self, n_bytes: int, log: Log) -> None:
        self._n_bytes = max(1, n_bytes)
        self._log = log
        self.done = 0
        self._began = self._logged = time.monotonic()

    def documents(self, file: SourceFile, reader: RecordReader) -> Iterator[Document]:
        """The documents of a file, see `RecordReader.documents`."""
        before, size = self.done, file.size
        for document in reader.documents(file):
            self.done = before + reader.place.bytes()
            if (now := time.monotonic()) - self._logged >= LOG_S:
                self._logged = now
                self._say(min(self.done, self._n_bytes), now - self._began)
            yield document
        self.done = before + size

    def _say(self, done: int, seconds: float) -> None:
        rate = done / seconds
        left = format_clock((self._n_bytes - done) / max(rate, 1.0))
        self._log(f"read {done / 1e6:,.0f} of {self._n_bytes / 1e6:,.0f} MB, {rate / 1e6:.1f} MB/s, about {left} left")


# --- records ---


def document_of(record: object, text_field: str) -> Record:
    """The text or conversation of a record, which is JSON data. Raises _BadRecordError."""
    if not isinstance(record, Mapping):
        raise _BadRecordError(f"lacks the field {text_field!r}: not a JSON object", "records that are not objects")
    columns = columns_of([name for name, value in record.items() if value is not None], text_field)
    if columns is None:
        names = ", ".join(map(str, list(record)[:8])) or "nothing"
        raise _BadRecordError(f"lacks the field {text_field!r}; it has {names}", f"records without {text_field!r}")
    value = record[columns[0]]
    if columns == ("prompt", "completion"):
        before = _messages(value, "user")
        return _chat([*before, *_messages(record["completion"], "assistant")], record, len(before))
    if isinstance(value, str) and columns == (text_field,):
        return _without_halves(value)
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise _BadRecordError(
            f"has a field {columns[0]!r} that is neither a text nor a list of messages",
            f"records without {text_field!r}",
        )
    return _chat(_messages(value, ""), record, 0)


def columns_of(names: Sequence[object], text_field: str) -> tuple[str, ...] | None:
    """The columns that form a document: the text, or the first known form of a conversation; None without one."""
    forms = ((text_field,), ("messages",), ("conversations",), ("prompt", "completion"))
    return next((form for form in forms if all(name in names for name in form)), None)


def _chat(messages: list[dict[str, object]], record: Mapping[str, object], first: int) -> Chat:
    if not any(message["role"] == "assistant" for message in messages[first:]):
        raise _BadRecordError("has no answer: no assistant message", "conversations without an answer")
    tools = record.get("tools")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError):
            raise _BadRecordError("has tools that are not JSON", "conversations in an unknown format") from None
    return Chat(messages, first, tools or None)


def _messages(value: object, role: str) -> list[dict[str, object]]:
    """Messages for a chat template; a string becomes one message of `role`. Raises _BadRecordError."""
    if isinstance(value, str) and role:
        return [{"role": role, "content": _without_halves(value)}]
    found = []
    for message in value if isinstance(value, Sequence) and not isinstance(value, str) else [None]:
        speaker = message.get("role", message.get("from")) if isinstance(message, Mapping) else None
        if not isinstance(message, Mapping) or not isinstance(speaker, str):
            raise _BadRecordError("has a message without a role", "conversations in an unknown format")
        content = message.get("content", message.get("value"))
        if isinstance(content, Sequence) and not isinstance(content, str):
            texts = [part.get("text") if isinstance(part, Mapping) else None for part in content]
            content = "".join(texts) if all(isinstance(text, str) for text in texts) else None  # type: ignore[arg-type]
        if not isinstance(content, str) and not message.get("tool_calls"):
            raise _BadRecordError("has a message without a text", "conversations in an unknown format")
        rest = {str(k): v for k, v in message.items() if v is not None and k not in ("from", "value")}
        text = _without_halves(content) if isinstance(content, str) else ""
        found.append({**rest, "role": _ROLES.get(speaker, speaker), "content": text})
    return found


def _without_halves(text: str) -> str:
    r"""Replaces unpaired surrogates such as `\ud83d` (from a truncated emoji), which no tokenizer accepts."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


_Records = Iterator[tuple[str, object]]
"""(location, record), or (location, _BadRecordError) for an invalid one."""


def _jsonl(path: Path, text_field: str, place: ReadPosition) -> _Records:
    with _open(path, place) as file:
        number = 0
        while line := file.readline(MAX_RECORD_BYTES + 1):
            number += 1
            if len(line) > MAX_RECORD_BYTES:
                while line and not line.endswith(b"\n"):
                    line = file.readline(_STEP_BYTES)
                record: object = _BadRecordError(f"is longer than {MAX_RECORD_BYTES:,} bytes", _TOO_LONG)
            elif not line.strip():
                continue
            else:
                record = _parse(line)
            yield f"line {number}", record


_TOO_LONG = "records that are too long"


def _parse(line: bytes) -> object:
    try:
        check_size(line)
        return json.loads(line.removeprefix(codecs.BOM_UTF8))
    except LimitError as error:
        return _BadRecordError(f"is {error.message}", _TOO_LONG)
    except (ValueError, RecursionError) as error:
        return _BadRecordError(f"is not JSON: {error}", "records that are not JSON")


def _cut(text: str) -> Iterator[str]:
    """Splits a text into documents of at most MAX_DOCUMENT_CHARS, after a line break in the second half if possible."""
    start = 0
    while start < len(text):
        end = start + MAX_DOCUMENT_CHARS
        if end < len(text):
            end = text.rfind("\n", start + MAX_DOCUMENT_CHARS // 2, end) + 1 or end
        yield text[start:end]
        start = end


def _json(path: Path, text_field: str, place: ReadPosition) -> _Records:
    """Reads a JSON list of records, or JSON lines."""
    with _open(path, place) as file:
        is_list = file.read(64).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")
    if not is_list:
        yield from _jsonl(path, text_field, place)
        return
    with _open(path, place) as file:
        data = file.read(MAX_LIST_BYTES + 1)
    if len(data) > MAX_LIST_BYTES:
        hint = "use .jsonl with one record per line"
        raise LimitError(f"a list of more than {MAX_LIST_BYTES:,} bytes", path=path, hint=hint)
    try:
        check_size(data)
        records = json.loads(data.removeprefix(codecs.BOM_UTF8))
    except LimitError as error:
        raise LimitError(error.message, path=path, hint="use .jsonl with one record per line") from None
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"not JSON: {error}", path=path, hint="use .jsonl with one record per line") from None
    for number, record in enumerate(records, 1):
        yield f"record {number}", record


def _parquet(path: Path, text_field: str, place: ReadPosition) -> _Records:
    size = path.stat().st_size
    rows = ParquetRows(path, lambda names: _require(names, text_field, path))
    place.bytes = lambda: int(rows.part * size)
    for number, row in enumerate(rows, 1):
        too_long = _BadRecordError(f"has more than {MAX_RECORD_BYTES:,} characters", _TOO_LONG)
        yield f"row {number}", too_long if row is None else _parse(row.encode("utf-8", "surrogatepass"))


def _csv(path: Path, text_field: str, place: ReadPosition, delimiter: str = ",") -> _Records:
    csv.field_size_limit(MAX_RECORD_BYTES)
    with _open(path, place) as plain, io.TextIOWrapper(plain, encoding="utf-8-sig", newline="") as file:
        rows = csv.DictReader(_lines(file, path), delimiter=delimiter)
        try:
            if rows.fieldnames is None:  # an empty file
                return
            _require(rows.fieldnames, text_field, path)
            for row in rows:
                yield f"line {rows.line_num}", row
        except csv.Error as error:
            raise CorruptError(f"line {rows.line_num} is not csv: {error}", path=path) from error


def _lines(file: io.TextIOWrapper, path: Path) -> Iterator[str]:
    number = 0
    while line := file.readline(MAX_RECORD_BYTES + 1):
        number += 1
        if len(line) > MAX_RECORD_BYTES:
            raise LimitError(f"line {number} is longer than {MAX_RECORD_BYTES:,} characters", path=path)
        yield line


def _tsv(path: Path, text_field: str, place: ReadPosition) -> _Records:
    return _csv(path, text_field, place, "\t")


def _require(names: Sequence[str], text_field: str, path: Path) -> list[str]:
    """The columns of a table that form a document. Raises RefusedError."""
    found = columns_of(names, text_field)
    if found is None:
        raise RefusedError(
            f"no column {text_field!r}; the columns are {', '.join(names)}",
            path=path,
            hint="choose a column with --text-field",
        )
    return [*found, *({"tools"} & set(names))]


_RECORDS: dict[str, Callable[[Path, str, ReadPosition], _Records]] = {
    "jsonl": _jsonl, "json": _json, "parquet": _parquet, "csv": _csv, "tsv": _tsv,
}  # fmt: skip


# --- text and tokens ---


@contextmanager
def _open(path: Path, place: ReadPosition) -> Iterator[BinaryIO]:
    """The bytes of a file, decompressed by its last suffix."""
    with open(path, "rb") as raw:
        size, place.bytes = os.fstat(raw.fileno()).st_size, raw.tell
        try:
            suffix = path.suffix.lower()
            packed = suffix in SUFFIXES
            yield cast("BinaryIO", io.BufferedReader(Unpacked(raw, suffix, str(path)), _STEP_BYTES)) if packed else raw
        finally:
            place.bytes = lambda: size


def _source(path: Path, skipped: Counter[str], place: ReadPosition) -> Iterator[str]:
    size = path.stat().st_size
    place.bytes = lambda: size
    if not _is_text(path):
        skipped["files that are not UTF-8 text"] += 1
    elif size > MAX_SOURCE_BYTES:
        yield from _text(path, place)
    else:
        yield path.read_bytes().decode("utf-8-sig")


def _is_text(path: Path) -> bool:
    """Whether a file is UTF-8 without zero bytes."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    with open(path, "rb") as file:
        try:
            while block := file.read(MAX_SOURCE_BYTES):
                decoder.decode(block)
                if b"\0" in block:
                    return False
            decoder.decode(b"", final=True)
        except UnicodeDecodeError:
            return False
    return True


def _text(path: Path, place: ReadPosition) -> Iterator[str]:
    """Splits a text file into documents, at a blank line if possible."""
    with _open(path, place) as plain, io.TextIOWrapper(plain, encoding="utf-8-sig", newline="") as file:
        piece: list[str] = []
        size = 0
        while line := file.readline(_PIECE):
            if "\0" in line:
                raise CorruptError("not a text file: it contains NUL bytes", path=path)
            piece.append(line)
            size += len(line)
            if size >= _PIECE and (not line.strip() or size >= 4 * _PIECE):
                yield "".join(piece)
                piece, size = [], 0
        if piece:
            yield "".join(piece)


def _tokens(path: Path, separator: int, place: ReadPosition) -> Iterator[Document]:
    """Documents of a shard of little-endian uint32, without the separators between them."""
    size = path.stat().st_size
    if size % 4:
        raise CorruptError(f"{size} bytes are not a whole number of uint32 token ids", path=path)
    rest = np.empty(0, np.uint32)
    with _open(path, place) as file:
        while block := file.read(4 * _BLOCK):
            tokens = np.concatenate([rest, np.frombuffer(block, "<u4")])
            start = 0
            for end in np.flatnonzero(tokens == separator).tolist():
                yield tokens[start:end]
                start = end + 1
            rest = tokens[start:]
            if len(rest) >= _BLOCK:
                yield rest
                rest = rest[:0]
    if len(rest):
        yield rest
