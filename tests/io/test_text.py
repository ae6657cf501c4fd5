"""Numbers and lists in words."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from aprfmt.text import (
    first_few,
    format_bytes,
    format_clock,
    format_count,
    format_limit,
    format_number,
    format_seconds,
    one_line,
    plural,
)


@pytest.mark.parametrize(
    ("n", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (98_000_000, "93.5 MiB"),
        (1 << 30, "1.00 GiB"),
        (1048575, "1.00 MiB"),
    ],
)
def test_bytes(n: int, text: str) -> None:
    assert format_bytes(n) == text


@pytest.mark.parametrize(
    ("n", "text"),
    [
        (10_000_000, "10 MB"),
        (300 << 20, "300 MiB"),
        (1_500_000_000, "1500 MB"),
        (1 << 30, "1 GiB"),
        (123_457, "120.6 KiB"),
        (0, "0 B"),
    ],
)
def test_limits_are_told_in_the_unit_that_was_typed(n: int, text: str) -> None:
    assert format_limit(n) == text


def test_counts_and_durations() -> None:
    assert [format_count(n) for n in (9999, 134_500_000, 7_620_000_000)] == ["9,999", "134.5 M", "7.62 B"]
    assert [format_seconds(s) for s in (0.012, 3.4159, 125, 4020)] == ["12 ms", "3.42 s", "2 min 05 s", "1 h 07 min"]
    assert [format_clock(s) for s in (0.4, 59.6, 4025)] == ["0:00:00", "0:01:00", "1:07:05"]


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (0.0379, "0.0379"), (3.1e-5, "3.1e-05"), (999.96, "1000"), (85_240, "85.2k"), (1.5e9, "1.5G")],
)
def test_numbers_are_short(number: float, text: str) -> None:
    assert format_number(number) == text


def test_plural() -> None:
    assert [plural(n, "tensor") for n in (0, 1, 2)] == ["0 tensors", "1 tensor", "2 tensors"]


@pytest.mark.parametrize(
    ("names", "n", "total", "text"),
    [
        ([], 3, None, ""),
        (["a"], 3, None, "a"),
        ("abc", 3, None, "a, b, c"),
        ("abcd", 3, None, "a, b, c and 1 more"),
        (iter("abcd"), 2, None, "a, b and 2 more"),
        (["a", "b"], 3, 9, "a, b and 7 more"),
        (["a", "b"], 3, 2, "a, b"),
    ],
)
def test_long_lists_are_counted(names: Iterable[str], n: int, total: int | None, text: str) -> None:
    assert first_few(names, n, total) == text


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (
            "<html><head><title>404 Not Found</title></head>\r\n<body><h1>404</h1><hr>nginx</body></html>",
            "404 Not Found",
        ),
        (
            "\n<!DOCTYPE HTML><!-- a > b --><style>p {}</style><p>Bad&nbsp;gateway &amp; more\n here<p>x",
            "Bad gateway & more here",
        ),
        ("<script>var a = 1; // cut off", ""),
        ("<html", ""),
        ('{"error": "a < b"}\n', '{"error": "a < b"}'),
        ("a\x1b[31m\nb" + "c" * 300, "a [31m b" + "c" * 192),
        ("", ""),
    ],
)
def test_a_servers_error_is_one_line(body: str, text: str) -> None:
    assert one_line(body) == text
