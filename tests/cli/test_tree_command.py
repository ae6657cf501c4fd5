"""`apr tree` as a user calls it."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest


def test_tree(apr: Any, tiny_gguf: Path) -> None:
    done = apr("tree", tiny_gguf, "--sizes")
    assert done.code == 0
    assert "blk.0–1 (2 ×)" in done.stdout
    assert sum("attn_q.weight" in line for line in done.stdout.splitlines()) == 1
    assert sum("attn_q.weight" in line for line in apr("tree", tiny_gguf, "--all").stdout.splitlines()) == 2
    body = apr("tree", tiny_gguf, "--json").json
    assert (body["tensor_count"], body["matched"], body["format"]) == (20, 20, "GGUF v3")
    assert apr("tree", tiny_gguf, "--format", "json").json == body
    (blk,) = (node for node in body["tree"] if node["name"] == "blk")
    assert [node["name"] for node in blk["children"]] == ["0", "1"]
    leaf = blk["children"][0]["children"][0]
    assert set(leaf) == {"name", "path", "type", "dtype", "shape", "params", "size_bytes"}


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_lines_fit_a_terminal(apr: Any, tiny_apr: Path, monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(type(sys.stdout), "isatty", lambda stream: stream is sys.stdout, raising=False)
    lines = apr("tree", tiny_apr, "--sizes").stdout.splitlines()[1:]
    assert max(map(len, lines)) <= columns


def test_pictures(apr: Any, tiny_gguf: Path) -> None:
    dot = apr("tree", tiny_gguf, "--format", "dot", "--filter", "blk.*").stdout
    assert dot.startswith("digraph")
    assert dot.rstrip().endswith("}")
    nodes = set(re.findall(r"^  (n\d+|root) \[", dot, re.MULTILINE))
    edges = re.findall(r"^  (\w+) -> (\w+);", dot, re.MULTILINE)
    assert {name for edge in edges for name in edge} == nodes
    assert len(edges) == len(nodes) - 1
    mermaid = apr("tree", tiny_gguf, "--format", "mermaid").stdout
    assert mermaid.startswith("flowchart LR\n")
    assert "blk.0–1 #40;2 ×#41;" in mermaid


def test_names_cannot_break_out_of_a_picture(apr: Any, tmp_path: Path) -> None:
    from aprfmt import RawTensor, save_file

    path = tmp_path / "odd.apr"
    save_file({'a"];\\x\n[<b>.w': RawTensor("F32", (1,), bytes(4))}, path, metadata={"model_type": "x"})
    dot = apr("tree", path, "--format", "dot").stdout
    assert r'n0 [label="a\"];\\x\\n[<b>.w\nF32 1"];' in dot
    mermaid = apr("tree", path, "--format", "mermaid").stdout
    assert '"a#34;#93;#59;#92;x#92;n#91;#60;b#62;.w<br/>F32 1"' in mermaid
    assert len(mermaid.splitlines()) == 4


def test_wrong_options(apr: Any, tiny_gguf: Path, tmp_path: Path) -> None:
    assert apr("tree", tiny_gguf, "--format", "svg").code == 2
    assert apr("tree", tiny_gguf, "--format", "dot", "--json").json["error"]["code"] == "usage"
    assert apr("tree", tiny_gguf, "--depth", "-1").code == 2
    assert apr("tree", tmp_path / "none").code == 3
    assert "no tensor matches" in apr("tree", tiny_gguf, "--filter", "zzz").stderr
    assert apr("tree", tiny_gguf, "-q").stdout == ""
