"""Biases that only llama.cpp needs: zeros in a GGUF, absent from every other format."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
from odd_configs import OddConfig, write_model

import aprfmt

pytest.importorskip("torch")

CASE = OddConfig(
    "starcoder2",
    "Starcoder2ForCausalLM",
    {
        "vocab_size": 280, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 64, "use_bias": False,
    },
    like="starcoder2",
)  # fmt: skip
BIAS = "blk.1.ffn_down.bias"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose config switches biases off, and the GGUF made from it."""
    root = tmp_path_factory.mktemp("zeros")
    write_model(CASE, root / "m", root)
    aprfmt.convert_model(root / "m", root / "m.gguf")
    return root


def names(path: Path) -> list[str]:
    with aprfmt.open(path) as model:
        return sorted(model.tensors)


def test_they_do_not_come_back(source: Path, tmp_path: Path) -> None:
    assert BIAS in names(source / "m.gguf")
    aprfmt.convert_model(source / "m.gguf", tmp_path / "folder", format="hf")
    aprfmt.convert_model(source / "m.gguf", tmp_path / "m.apr")
    assert names(tmp_path / "folder") == names(tmp_path / "m.apr") == names(source / "m")
    assert json.loads((tmp_path / "folder" / "config.json").read_text())["use_bias"] is False
    aprfmt.convert_model(tmp_path / "m.apr", tmp_path / "m.gguf")
    assert (tmp_path / "m.gguf").read_bytes() == (source / "m.gguf").read_bytes()
    aprfmt.convert_model(source / "m.gguf", tmp_path / "f16.gguf", dtype="f16")
    assert names(tmp_path / "f16.gguf") == names(source / "m.gguf")


def test_a_bias_that_was_edited_does(source: Path, tmp_path: Path) -> None:
    edited = tmp_path / "m.gguf"
    edited.write_bytes((source / "m.gguf").read_bytes())
    with aprfmt.open(edited) as model:
        at = model.tensors[BIAS].offset
    with edited.open("r+b") as file:
        file.seek(at)
        file.write(struct.pack("<f", 0.5))
    aprfmt.convert_model(edited, tmp_path / "folder", format="hf")
    assert set(names(tmp_path / "folder")) - set(names(source / "m")) >= {
        "model.layers.1.mlp.c_proj.bias", "model.layers.0.self_attn.q_proj.bias",
    }  # fmt: skip
    assert json.loads((tmp_path / "folder" / "config.json").read_text())["use_bias"] is True
