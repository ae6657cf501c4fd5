"""`apr lint` as a user calls it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest


def test_findings_and_exit_codes(apr: Any, tiny_gguf: Path, tmp_path: Path) -> None:
    done = apr("lint", tiny_gguf, "--json")
    assert (done.code, done.json["passed"]) == (0, True)
    assert [row["id"] for row in done.json["findings"]] == ["vocab.unpadded"]
    assert set(done.json["findings"][0]) == {"id", "level", "message", "suggestion", "tensor"}
    assert apr("lint", tiny_gguf, "--fail-at", "info").code == 1
    assert apr("lint", tiny_gguf, "--fail-at", "info", "--ignore", "vocab.*").code == 0
    path = tmp_path / "m.gguf"
    assert apr("stamp", tiny_gguf, "-o", path, "--unset", "general.license").code == 0
    done = apr("lint", path)
    assert done.code == 1
    assert "provenance.no-license" in done.stdout
    assert f"→ apr stamp {path} --in-place --set general.license=apache-2.0" in done.stdout
    assert done.stdout.rstrip().endswith("FAILED: 1 warning, 1 note by 45 rules")
    assert apr("lint", path, "--fail-at", "error").code == 0
    assert apr("lint", path, "--quiet").code == 1


def test_the_list(apr: Any) -> None:
    done = apr("lint", "--list", "--json")
    assert done.json["count"] == len(done.json["rules"])
    assert {"id", "level", "holds", "why", "source"} == set(done.json["rules"][0])
    text = apr("lint", "--list").stdout
    assert all(rule["id"] in text for rule in done.json["rules"])


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_lines_fit_a_terminal(
    apr: Any, tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    path = tmp_path / "m.gguf"
    assert apr("stamp", tiny_gguf, "-o", path, "--unset", "tokenizer.ggml.pre").code == 0
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(type(sys.stdout), "isatty", lambda stream: stream is sys.stdout, raising=False)
    lines = apr("lint", path).stdout.splitlines()[1:]
    assert max(map(len, lines)) <= columns
    assert max(map(len, apr("lint", "--list").stdout.splitlines())) <= columns


def test_wrong_options(apr: Any, tiny_gguf: Path, tmp_path: Path) -> None:
    assert apr("lint").code == 2
    assert apr("lint", tiny_gguf, "--fail-at", "much").code == 2
    done = apr("lint", tiny_gguf, "--select", "gguf.alignmnt", "--json")
    assert (done.code, done.json["error"]["code"]) == (2, "usage")
    assert "gguf.alignment" in done.json["error"]["hint"]
    assert apr("lint", tmp_path / "none.gguf").code == 3
    (tmp_path / "bad.gguf").write_bytes(b"GGUF\3\0\0\0")
    assert apr("lint", tmp_path / "bad.gguf").code == 4
