"""`apr hex` as a user calls it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest


def test_a_file_and_a_tensor(apr: Any, tiny_gguf: Path) -> None:
    text = apr("hex", tiny_gguf).stdout
    assert "000000  47 47 55 46" in text
    assert "metadata  27 keys, 16 shown" in text
    assert "general.architecture" in text
    body = apr("hex", tiny_gguf, "--json", "--limit", "0").json
    (file,) = body["files"]
    assert (file["format"], file["damage"], body["tensor"]) == ("GGUF", [], None)
    assert [section["name"] for section in file["sections"]] == ["header", "metadata", "index", "data"]
    assert file["sections"][0]["entries"][0][1] == {
        "offset": 4,
        "size": 4,
        "name": "version",
        "value": 3,
        "meaning": "",
        "bytes": "03000000",
    }
    tensor = apr("hex", tiny_gguf, "--tensor", "blk.0.attn_q.weight", "--json").json["tensor"]
    assert (tensor["dtype"], tensor["shape"], len(tensor["blocks"])) == ("F16", [64, 64], 16)
    stored = tiny_gguf.read_bytes()[tensor["offset"] :]
    assert stored.startswith(bytes.fromhex(tensor["blocks"][0]["bytes"]))
    assert "16 of 1,024 lines shown" in apr("hex", tiny_gguf, "--tensor", "blk.0.attn_q.weight").stderr


def test_blocks_of_a_quantized_tensor(apr: Any, tiny_gguf: Path, tmp_path: Path) -> None:
    path = tmp_path / "q.gguf"
    assert apr("convert", tiny_gguf, "-o", path, "--dtype", "q4_0").code == 0
    words = ("hex", path, "--tensor", "blk.0.attn_q.weight", "--limit", "1")
    text = apr(*words).stdout
    assert "formula    value = d × (code - 8)" in text
    assert "block 0, values 0 to 31" in text
    (block,) = apr(*words, "--json").json["tensor"]["blocks"]
    d, codes = block["fields"][0]["d"][0], block["codes"]
    assert block["values"] == pytest.approx([d * (code - 8) for code in codes])


def test_raw(apr: Any, tiny_gguf: Path) -> None:
    done = apr("hex", tiny_gguf, "--raw", "--offset", "0x18", "--limit", "2", "--width", "4")
    data = tiny_gguf.read_bytes()
    assert done.stdout.splitlines()[1:] == [f"{at:06x}  {data[at : at + 4].hex(' ')}  ...." for at in (24, 28)]


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_lines_fit_a_terminal(
    apr: Any, tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    path = tmp_path / "q.gguf"
    assert apr("convert", tiny_gguf, "-o", path, "--dtype", "q4_0").code == 0
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(type(sys.stdout), "isatty", lambda stream: stream is sys.stdout, raising=False)
    for words in ([], ["--raw"], ["--tensor", "blk.0.attn_q.weight"], ["--tensor", "output_norm.weight"]):
        lines = apr("hex", path, *words).stdout.splitlines()[1:]
        assert max(map(len, (line for line in lines if str(tmp_path) not in line))) <= columns, words


def test_damage_is_shown_and_is_the_exit_status(apr: Any, tiny_gguf: Path, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(tiny_gguf.read_bytes()[:300])
    done = apr("hex", path)
    assert done.code == 4
    assert "general.architecture" in done.stdout
    assert "error:" in done.stderr
    body = apr("hex", path, "--json")
    assert body.code == 4
    assert (body.json["schema"], body.json["ok"], body.json["error"]["code"]) == ("apr.error/1", False, "truncated")
    assert body.json["files"][0]["damage"] == [body.json["error"]]
    assert body.json["files"][0]["sections"][1]["entries"][0][0]["value"] == "general.architecture"


def test_names_cannot_drive_a_terminal(apr: Any, tmp_path: Path) -> None:
    from aprfmt import RawTensor, save_file

    path = tmp_path / "odd.apr"
    save_file({"w\x1b[31m": RawTensor("F32", (1,), bytes(4))}, path, metadata={"model_type": "\x1b[2J"})
    assert "\x1b" not in apr("hex", path).stdout
    assert "\x1b" not in apr("hex", path, "--tensor", "w\x1b[31m").stdout


def test_wrong_options(apr: Any, tiny_gguf: Path, tmp_path: Path) -> None:
    assert apr("hex", tiny_gguf, "--offset", "ten").code == 2
    assert apr("hex", tiny_gguf, "--width", "0").code == 2
    done = apr("hex", tiny_gguf, "--tensor", "blk.0.attn_q.weigh", "--json")
    assert done.code == 2
    assert "blk.0.attn_q.weight" in done.json["error"]["message"]
    for words in ((), ("--raw",), ("--tensor", "blk.0.attn_q.weight"), ("--tensor", "blk.0.attn_q.weight", "--raw")):
        done = apr("hex", tiny_gguf, *words, "--offset", "99999999", "--json")
        assert done.code == 2
        part = "tensor" if "--tensor" in words else "file"
        assert done.json["error"]["message"] == f"--offset 99999999 is past the end of the {part}"
    assert apr("hex", tmp_path / "none").code == 3
