"""`apr diff` across containers: by Hugging Face name, row order and value."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import aprfmt


def diff(*args: object) -> tuple[int, dict[str, Any]]:
    command = [sys.executable, "-m", "aprfmt", "diff", *map(str, args), "--json"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    return run.returncode, json.loads(run.stdout)


@pytest.mark.parametrize("name", ["mistral", "qwen2-untied", "llama-bias"])
def test_a_folder_and_its_gguf_hold_the_same_values(
    name: str, tiny_model: Callable[[str], Any], tmp_path: Path
) -> None:
    folder, _ = tiny_model(name)
    aprfmt.export_model(folder, tmp_path / "m.gguf")
    aprfmt.import_model(tmp_path / "m.gguf", tmp_path / "m.apr")
    for a, b in ((folder, "m.gguf"), ("m.gguf", "m.apr"), (folder, "m.apr")):
        code, body = diff(tmp_path / a, tmp_path / b, "--values")
        assert code == 0, body
        assert body["identical"] is True


def test_another_dtype_is_the_same_within_its_tolerance(tiny_model: Callable[[str], Any], tmp_path: Path) -> None:
    folder, _ = tiny_model("mistral")
    aprfmt.export_model(folder, tmp_path / "m.gguf", dtype="f16")
    assert diff(folder, tmp_path / "m.gguf", "--values", "--tolerance", "1e-2")[0] == 0
    code, body = diff(folder, tmp_path / "m.gguf", "--values", "--tolerance", "1e-9")
    assert code == 1
    assert any(d["kind"] == "tensor" and "q_proj" in d["name"] for d in body["differences"])


def test_one_changed_weight_is_found_by_its_hf_name(tiny_gguf: Path, tmp_path: Path) -> None:
    with aprfmt.open(tiny_gguf) as model:
        tensor = model.tensors["blk.1.attn_q.weight"]
        position, size = tensor.offset + 4 * 100, tensor.n_bytes
    assert size > 404
    data = bytearray(tiny_gguf.read_bytes())
    data[position + 3] ^= 0x40
    (tmp_path / "changed.gguf").write_bytes(data)
    code, body = diff(tiny_gguf, tmp_path / "changed.gguf", "--values")
    assert code == 1
    assert [d["name"] for d in body["differences"]] == ["model.layers.1.self_attn.q_proj.weight"]


def test_gguf_to_gguf_without_a_wish_is_a_copy(tiny_gguf: Path, tmp_path: Path) -> None:
    assert aprfmt.convert_model(tiny_gguf, tmp_path / "same.gguf").lossless
    assert (tmp_path / "same.gguf").read_bytes() == tiny_gguf.read_bytes()
