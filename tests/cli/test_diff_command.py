"""`apr diff --values` of two quantizations as a user calls it: one table, the worst tensor first."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from pages import Page

ANSI = re.compile(r"\x1b\[\d+m")


@pytest.fixture(scope="module")
def pair(tiny_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    from aprfmt import convert_model

    folder = tmp_path_factory.mktemp("pair")
    for mix in ("f16", "q8_0"):
        convert_model(tiny_gguf, folder / f"{mix}.gguf", dtype=mix)
    return folder / "f16.gguf", folder / "q8_0.gguf"


def test_the_table_is_sorted_and_adds_up(apr: Any, pair: tuple[Path, Path]) -> None:
    body = apr("diff", *pair, "--values", "--json")
    assert body.code == 1
    rows = body.json["tensors"]
    assert len(rows) == body.json["tensors_compared"] == 20
    figures = [row["relative_rmse"] for row in rows]
    assert figures == sorted(figures, reverse=True)
    assert {"name", "a", "b", "bits_a", "bits_b", "snr_db", "cosine", "rmse", "nonfinite_different"} <= set(rows[0])
    assert (rows[0]["a"], rows[0]["bits_b"]) == ("F16", 8.5)
    total = body.json["total"]
    assert total["size_b"] < total["size_a"]
    text = apr("diff", *pair, "--values", "--top", "3").stdout.splitlines()
    assert text[0].split()[:2] == ["tensor", "RMSE"]
    assert [line.split()[0] for line in text[1:4]] == [row["name"] for row in rows[:3]]
    different = sum(row["max_diff"] != 0 for row in rows)
    assert text[4].startswith(f"and {different - 3} more ")
    assert text[5].startswith("all 20 ")
    everything = apr("diff", *pair, "--values", "--top", "0").stdout
    assert " more " not in everything
    assert len(everything.splitlines()) == different + 4


def test_the_rest_is_the_figure_of_its_tensors_together(apr: Any, pair: tuple[Path, Path]) -> None:
    """With no tensor shown but the worst, the rest and it give the total again."""
    from aprfmt import diff
    from aprfmt.inspection.distance import together

    found = diff(*pair, values=True)
    assert found.tensors is not None
    assert found.total is not None
    assert together(found.tensors) == found.total.distance
    rest = together(found.tensors[1:])
    energy = sum(row.sums.squares for row in found.tensors[1:])
    assert rest.rmse == pytest.approx((energy / rest.n_values) ** 0.5)


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_the_table_fits_a_terminal(
    apr: Any, pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(type(sys.stdout), "isatty", lambda stream: stream is sys.stdout, raising=False)
    monkeypatch.setenv("NO_COLOR", "1")
    lines = apr("diff", *pair, "--values").stdout.splitlines()
    table = lines[: next(i for i, line in enumerate(lines) if line.startswith("all 20")) + 1]
    assert max(len(ANSI.sub("", line)) for line in table) <= columns
    assert any("q_proj" in line for line in table) or columns == 60


def test_a_page_and_wrong_options(apr: Any, pair: tuple[Path, Path], tmp_path: Path) -> None:
    target = tmp_path / "page.html"
    done = apr("diff", *pair, "--values", "-o", target, "--json")
    assert (done.code, done.json["output"]) == (1, str(target))
    assert Page(target.read_text()).titles[0] == "SNR of B, in dB"
    assert apr("diff", *pair, "--values", "-o", target).code == 2, "it exists, and trouble is 2"
    assert apr("diff", *pair, "--values", "-o", target, "--force").code == 1
    for words in (
        ["--top", "3"],
        ["-o", target],
        ["--values", "--threads", "0"],
        ["--values", "-o", tmp_path / "x.png"],
    ):
        assert apr("diff", *pair, *words).code == 2
    assert apr("diff", pair[0], pair[0], "--values", "--json").json["tensors"] == []


def test_equal_changes_share_an_entry(apr: Any, tiny_gguf: Path, tmp_path: Path) -> None:
    other = tmp_path / "q8.gguf"
    assert apr("quantize", tiny_gguf, "q8_0", "-o", other, "--quiet").code == 0
    done = apr("diff", tiny_gguf, other)
    assert done.code == 1
    assert "tensor model.layers.0.self_attn.o_proj.weight and 3 more tensors: dtype\n" in done.stdout
    n = len(apr("diff", tiny_gguf, other, "--json").json["differences"])
    assert f"different: {n} differences" in done.stdout
    assert done.stdout.count(": dtype\n") < n


def test_sides_that_read_alike_are_not_printed(apr: Any, tiny_gguf: Path, tmp_path: Path) -> None:
    from aprfmt import stamp

    pair = tmp_path / "a.gguf", tmp_path / "b.gguf"
    for path in pair:
        stamp(tiny_gguf, path, set={"general.description": "x" * 400 + path.stem, "general.name": path.stem})
    data = bytearray(pair[1].read_bytes())
    data[-2] ^= 1  # of a weight
    pair[1].write_bytes(data)
    lines = apr("diff", *pair).stdout.splitlines()
    assert "metadata general.description: content" in lines
    at = lines.index("metadata general.name")
    assert lines[at + 1 : at + 3] == ["  - a", "  + b"]
    changed = [line for line in lines if line.startswith("tensor ")]
    assert [": bytes (1 of " in line for line in changed] == [True]
    assert sum(line.startswith(("  -", "  +")) for line in lines) == 2
