"""Front matter is somebody else's text: read within bounds, and never a reason to fail."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from aprfmt.provenance.model_card import (
    MAX_CARD_BYTES,
    MAX_DEPTH,
    MAX_FRONT_MATTER_BYTES,
    front_matter,
    parse_card,
    read_card,
    render_card,
)


def card(matter: str, body: str = "# T\n") -> bytes:
    return f"---\n{matter}\n---\n{body}".encode()


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (card("license: mit"), {"license": "mit"}),
        (card("language: no"), {"language": "no"}),
        (card("language:\n- en\n- no\n- on"), {"language": ["en", "no", "on"]}),
        (card("version: 1.10\ndate: 2024-01-01"), {"version": "1.10", "date": "2024-01-01"}),
        (card("license: ~\nauthor:\nname: null"), {}),
        (card("tags:\n\t- a"), {"tags": ["a"]}),
        (card("a: é"), {"a": "é"}),
        (b"\xef\xbb\xbf" + card("a: b"), {"a": "b"}),
        (card("a: b").replace(b"\n", b"\r\n"), {"a": "b"}),
        (card("a: b", body="x: y\n---\n"), {"a": "b"}),
        (b"---\n---\n", {}),
        (b"", {}),
        (b"# no front matter\n---\na: b\n---\n", {}),
        (b"----\na: b\n---\n", {}),
    ],
)
def test_what_is_read(data: bytes, expected: dict[str, object]) -> None:
    assert front_matter(data) == expected
    assert parse_card(data) == (expected, [])


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (card("a: [b"), "not valid YAML"),
        (card("a: b: c"), "not valid YAML"),
        (card("? [a, b]\n: c"), "not valid YAML"),
        (card("- a"), "not a mapping"),
        (card("just words"), "not a mapping"),
        (card("a: &x [1]\nb: *x"), "anchors"),
        (card("a: &x 1"), "anchors"),
        (card("b: *x"), "anchors"),
        (card("a: \x00"), "not valid YAML"),
        (b"---\na: b\n", "not closed"),
        (b"---\na: \xff\n---\n", "UTF-8"),
        (card("a: " + "[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1)), "nested"),
        (card("a: " + "x" * MAX_FRONT_MATTER_BYTES), "65536"),
        (card("a: b", "x" * MAX_CARD_BYTES), "1048576"),
    ],
)
def test_what_is_not_read_is_one_warning(data: bytes, reason: str) -> None:
    values, warnings = parse_card(data)
    assert values == {}
    assert len(warnings) == 1
    assert reason in warnings[0]
    assert warnings[0].startswith("README.md")


BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "\n".join(
    f"{new}: &{new} [{','.join(['*' + old] * 9)}]" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    "matter",
    [BOMB, "[" * 60_000, "{" * 60_000, "a: " + "[" * 60_000, "- " * 30_000, "? " * 30_000, "!!python/object:x {}",
     "a: !!python/object/apply:os.system [x]", '"' * 60_001, "'" * 60_001, "a: |\n" + " x\n" * 20_000,
     "<<: {a: b}", "%TAG ! x\n" * 5_000, "a:\n" + " b\n" * 20_000],
    ids=lambda m: str(m)[:12],
)  # fmt: skip
def test_crafted_front_matter_costs_little(matter: str) -> None:
    start = time.monotonic()
    values, warnings = parse_card(card(matter))
    assert time.monotonic() - start < 5
    assert values == {} or not warnings
    assert all(isinstance(item, (str, list, dict)) for item in values.values())


def test_a_folder_without_a_card_and_with_one_that_is_a_folder(tmp_path: Path) -> None:
    assert read_card(tmp_path) == ({}, [])
    (tmp_path / "README.md").mkdir()
    values, warnings = read_card(tmp_path)
    assert values == {}
    assert "cannot be read" in warnings[0]


def test_what_is_written_is_read_again() -> None:
    front = {"license": "mit", "language": ["no", "en"], "version": "1.0", "tags": ["a: b", "---", "#x"], "x": "é\n"}
    data = render_card(front, "My\nModel", "Words.")
    assert front_matter(data) == front
    assert data.decode().endswith("---\n\n# My Model\n\nWords.\n")
