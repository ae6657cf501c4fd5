"""Annotated spans of bytes, grouped into entries and sections."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from aprfmt.errors import AprError
from aprfmt.io.source import Source
from aprfmt.types import Json

KEPT_BYTES = 64
"""Bytes of a span that are read for display."""

_LONGEST_TEXT = 200


@dataclass(slots=True)
class Span:
    """Consecutive bytes with one meaning.

    Attributes:
        offset: of the first byte, from the start of the file.
        n_bytes: length.
        name: of the field.
        value: a number, or text as far as it is shown.
        meaning: explanation, if the value alone is not clear.
        data: the first of the bytes.
    """

    offset: int
    n_bytes: int
    name: str
    value: Json = None
    meaning: str = ""
    data: bytes = b""

    def to_json(self) -> dict[str, object]:
        """{offset, size, name, value, meaning, bytes}: the first bytes in hex."""
        body = {"offset": self.offset, "size": self.n_bytes, "name": self.name, "value": self.value}
        return body | {"meaning": self.meaning, "bytes": self.data.hex()}


Entry = Sequence[Span]
"""Spans that belong together: one key, one tensor of the index."""


@dataclass(slots=True)
class Walk:
    """A section that is being walked: its entries are produced lazily, which may raise AprError.

    `label` is the name of an entry ("key"), `count` the number stated in the file.
    """

    name: str
    entries: Iterator[Entry]
    label: str = "entry"
    count: int | None = None


@dataclass(slots=True)
class Section:
    """A part of a file, as far as it is shown.

    Attributes:
        name: "header", "metadata", "index", "data", ...
        entries: the shown ones.
        label: name of an entry.
        count: number of entries in the section.
    """

    name: str
    label: str
    count: int
    entries: list[Entry] = field(default_factory=list)

    def to_json(self) -> dict[str, object]:
        """{name, count, entries}."""
        entries = [[span.to_json() for span in entry] for entry in self.entries]
        return {"name": self.name, "count": self.count, "entries": entries}


def take(walk: Walk, source: Source, offset: int, limit: int) -> tuple[Section, AprError | None]:
    """The first `limit` entries (0: all) that end after byte `offset`, with bytes; the error that ended the walk."""
    section, seen, error = Section(walk.name, walk.label, walk.count or 0), 0, None
    try:
        for entry in walk.entries:
            seen += 1
            last = entry[-1]
            if last.offset + last.n_bytes > offset and (not limit or len(section.entries) < limit):
                section.entries.append(entry)
    except AprError as caught:
        error = caught
    section.count = max(section.count, seen)
    for span in (span for entry in section.entries for span in entry):
        end = min(span.offset + min(span.n_bytes, KEPT_BYTES), source.size)
        span.data = source.read(span.offset, max(0, end - span.offset))
    return section, error


def shown(text: str) -> str:
    """`text`, truncated if long."""
    return text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}…"
