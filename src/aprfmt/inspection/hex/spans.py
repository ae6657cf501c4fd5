"""What is shown of a file: spans of bytes with their meaning, entry by entry, section by section."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from aprfmt.errors import AprError
from aprfmt.io.source import Source
from aprfmt.types import Json

KEPT_BYTES = 64
"""Bytes of a span that are read to be shown."""

_LONGEST_TEXT = 200


@dataclass(slots=True)
class Span:
    """Neighbouring bytes that mean one thing.

    Attributes:
        offset: of the first byte, from the start of the file.
        n_bytes: how many.
        name: of the field.
        value: what they say: a number, or text as far as it is shown.
        meaning: what that says, where the value alone does not.
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
    """A section on its way: its entries are made while it is walked, which may raise AprError.

    `label` is what one entry is called ("key"), `count` how many the file says there are.
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
        entries: those that are shown.
        label: what one entry is called.
        count: how many the section has.
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
    """The first `limit` entries (0: all) that end behind byte `offset`, with bytes; the error that ended the walk."""
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
    """`text`, cut where it is long."""
    return text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}…"
