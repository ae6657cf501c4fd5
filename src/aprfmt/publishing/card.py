"""The model card of a repository: the author's text, with one generated section between two markers.

Everything outside the markers is kept byte for byte, except that a missing license is added to the front matter.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from aprfmt.errors import RefusedError
from aprfmt.provenance.model_card import CARD, front_matter, markdown, markdown_code, to_card, yaml_line
from aprfmt.text import format_bytes, format_count

BEGIN, END = "<!-- apr: files -->", "<!-- apr: end -->"
"""Markers around the generated section; without them it is added at the end of the card."""

_SECTION = re.compile(f"^{re.escape(BEGIN)}$.*?^{re.escape(END)}$", re.DOTALL | re.MULTILINE)
_ROW = re.compile(r"^\| `(?P<name>[^`]+)` \|", re.MULTILINE)
_FENCE = re.compile(rb"\A(?:\xef\xbb\xbf)?---[ \t]*\r?\n")
_HEADER = "| file | type | bits per weight | size | parameters | architecture |\n|---|---|--:|--:|--:|---|"
_SUMS = "| file | SHA-256 |\n|---|---|"


@dataclass(frozen=True, slots=True)
class ModelRow:
    """A published model.

    Attributes:
        file: its file in the repository; for a split the first; for a folder the index or the single weight file.
        format, type: the container, and the type of most weights: "Q4_K_M", "BF16".
        architecture, params: of the network.
        bits_per_weight: stored bits per parameter.
        size_bytes: of all its files.
    """

    file: str
    format: str
    type: str
    architecture: str | None
    params: int
    bits_per_weight: float | None
    size_bytes: int


def renewed(
    card: bytes | None,
    models: Sequence[ModelRow],
    sums: Mapping[str, str],
    info: Mapping[str, str],
    general: Mapping[str, object] | None,
    kept: Sequence[str] = (),
) -> bytes:
    """The card with the section for `models`; a new card is built from `info` and `general`.

    Args:
        card: the existing card.
        models: the published models.
        sums: SHA-256 of their files, by name.
        info, general: their provenance.
        kept: files that stay in the repository, with their rows in the section.

    Raises:
        RefusedError: for a card that is not UTF-8 text.
    """
    if card is None:
        card = to_card(info, general) or b""
    else:
        card = _with_license(card, info.get("license"))
    try:
        text = card.decode("utf-8")
    except UnicodeDecodeError as error:
        hint = "save it as UTF-8, or use another card with --card FILE"
        raise RefusedError(f"the card is not UTF-8 at byte {error.start}", path=CARD, hint=hint) from error
    found = _SECTION.search(text)
    section = _section(models, sums, info, found[0] if found else "", kept)
    if found is not None:
        return (text[: found.start()] + section + text[found.end() :]).encode()
    gap = "" if not text else "\n" if text.endswith("\n") else "\n\n"
    return f"{text}{gap}{section}\n".encode()


def license_of(card: bytes | None) -> str | None:
    """The license in the front matter of a card. Raises CorruptError, LimitError if it cannot be parsed."""
    stated = front_matter(card).get("license") if card else None
    names = stated if isinstance(stated, list) else [stated]
    return ",".join(name for name in names if isinstance(name, str) and name) or None


def _with_license(card: bytes, license: str | None) -> bytes:
    if license is None or license_of(card) is not None:
        return card
    line = yaml_line("license", license).encode()
    fence = _FENCE.match(card)
    if fence is None:
        return b"---\n" + line + b"---\n\n" + card
    return card[: fence.end()] + line + card[fence.end() :]


def _section(
    models: Sequence[ModelRow], sums: Mapping[str, str], info: Mapping[str, str], old: str, kept: Sequence[str]
) -> str:
    from aprfmt import __version__

    tables = {
        "": [_model_line(row) for row in models],
        "sums": [f"| {markdown_code(name)} | `{sum}` |" for name, sum in sums.items()],
    }
    there = {*kept} - {*sums} - {row.file for row in models}
    before, _, after = old.partition(_SUMS)
    for name, part in (("", before), ("sums", after)):
        lines = part.splitlines()
        tables[name] += [line for line in lines if (match := _ROW.match(line)) and match["name"] in there]
        tables[name].sort()
    facts = [(name.replace("_", " "), info[name]) for name in ("source", "data_source", "license") if info.get(name)]
    lines = [BEGIN, "## Files", "", _HEADER, *tables[""], ""]
    lines += [f"* {name}: {markdown(value)}" for name, value in facts]
    lines += [f"* written by apr {__version__}", ""]
    if tables["sums"]:
        lines += [_SUMS, *tables["sums"], ""]
    return "\n".join([*lines, END])


def _model_line(row: ModelRow) -> str:
    bits = f"{row.bits_per_weight:.2f}" if row.bits_per_weight is not None else ""
    facts = (row.type, bits, format_bytes(row.size_bytes), format_count(row.params), row.architecture)
    return f"| {' | '.join([markdown_code(row.file), *(markdown(fact or '') for fact in facts)])} |"
