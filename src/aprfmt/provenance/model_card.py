"""Front matter of a Hugging Face model card: the YAML between two `---` lines at the top of README.md.

A card is text that anybody may have written, so it is read within bounds, and what is wrong with it is a warning.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aprfmt.errors import CorruptError, LimitError

CARD = "README.md"
MAX_CARD_BYTES = 1 << 20
MAX_FRONT_MATTER_BYTES = 64 << 10
MAX_DEPTH = 16

_FENCE = "---"
_NULLS = ("", "~", "null", "Null", "NULL")


def read_card(folder: Path) -> tuple[dict[str, Any], list[str]]:
    """The front matter of the card in `folder`, and a warning when there is one that cannot be read.

    Values are str, list and dict only: `no` is the language, `1.0` the version that the author typed.
    """
    try:
        with (folder / CARD).open("rb") as stream:
            data = stream.read(MAX_CARD_BYTES + 1)
    except FileNotFoundError:
        return {}, []
    except OSError as error:
        return {}, [f"{CARD} cannot be read: {error.strerror}"]
    return parse_card(data)


def parse_card(data: bytes) -> tuple[dict[str, Any], list[str]]:
    """The same from the bytes of a card."""
    try:
        return front_matter(data), []
    except (CorruptError, LimitError) as error:
        return {}, [f"{CARD} is not read for provenance: {error.message}"]


def front_matter(data: bytes) -> dict[str, Any]:
    """Front matter of the card `data`, {} where it has none. Raises LimitError, CorruptError."""
    if len(data) > MAX_CARD_BYTES:
        raise LimitError(f"a card may have {MAX_CARD_BYTES} bytes")
    if not data.removeprefix(b"\xef\xbb\xbf").startswith(_FENCE.encode()):
        return {}
    try:
        lines = data.decode("utf-8-sig").replace("\r\n", "\n").split("\n")
    except UnicodeDecodeError as error:
        raise CorruptError(f"it is not UTF-8 at byte {error.start}") from error
    if lines[0].rstrip() != _FENCE:
        return {}
    ends = (i for i, line in enumerate(lines) if i and line.rstrip() == _FENCE)
    end = next(ends, None)
    if end is None:
        raise CorruptError("its front matter has no end")
    # YAML forbids tabs as indentation, yet cards in use have them.
    text = "\n".join(lines[1:end]).replace("\t", "  ")
    if len(text.encode()) > MAX_FRONT_MATTER_BYTES:
        raise LimitError(f"front matter may have {MAX_FRONT_MATTER_BYTES} bytes")
    return _load(text)


def _load(text: str) -> dict[str, Any]:
    """YAML to str, list and dict; no aliases, no tags that build objects, bounded depth."""
    import yaml

    try:
        _check_events(text)
        value = yaml.load(text, Loader=yaml.BaseLoader)  # builds nothing but str, list and dict
    except (CorruptError, LimitError):
        raise
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        problem = getattr(error, "problem", None) or type(error).__name__
        raise CorruptError(f"its front matter is not valid YAML: {problem}") from error
    if value is None or value == "":
        return {}
    if not isinstance(value, dict):
        raise CorruptError("its front matter is not a mapping")
    return {key: item for key, item in value.items() if isinstance(key, str) and not _is_null(item)}


def _check_events(text: str) -> None:
    """Refuses anchors, aliases and deep nesting before anything is built: a few bytes of them can mean gigabytes."""
    import yaml

    depth = 0
    for event in yaml.parse(text, Loader=yaml.BaseLoader):
        if getattr(event, "anchor", None) is not None:
            raise CorruptError("its front matter uses anchors or aliases")
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > MAX_DEPTH:
                raise LimitError(f"its front matter is nested deeper than {MAX_DEPTH} levels")
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1


def _is_null(value: Any) -> bool:
    return isinstance(value, str) and value in _NULLS


def render_card(front: Mapping[str, Any], title: str | None, text: str | None) -> bytes:
    """A README.md with `front` as its front matter, then a heading and a paragraph."""
    import yaml

    matter = yaml.safe_dump(dict(front), sort_keys=False, allow_unicode=True, width=10_000)
    body = [f"# {' '.join(title.split())}\n"] if title and title.split() else []
    body += [f"{text.strip()}\n"] if text and text.strip() else []
    return (f"{_FENCE}\n{matter}{_FENCE}\n" + "".join(f"\n{part}" for part in body)).encode()
