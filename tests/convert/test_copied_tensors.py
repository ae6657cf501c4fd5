"""Tensors that a GGUF has twice, because llama.cpp loads them and never uses them: RWKV 7's first layer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from arch_models import ArchCase, find_case, write_checkpoint, write_tokenizers
from safetensors.numpy import load_file, save_file

import aprfmt

_FIRST = [f"blk.0.time_mix_{letter}{i}.weight" for letter in "va" for i in range(3)]


def _folder(root: Path, case: ArchCase) -> Path:
    folder = root / "model"
    write_checkpoint(case, folder, write_tokenizers(root / "tokenizers", [case.tokenizer], 512))
    return folder


@pytest.mark.parametrize(
    ("row", "begin", "rank"),
    [("rwkv7_goose", "model.blocks.0.attention.", 32), ("rwkv_hybrid", "model.layers.0.self_attn.time_mixer.", 32)],
)
def test_what_the_first_layer_never_uses_stays_in_the_folder(tmp_path: Path, row: str, begin: str, rank: int) -> None:
    folder = _folder(tmp_path, find_case(row))
    tensors = load_file(folder / "model.safetensors")
    idle = {"v0": (1, 1, 128), "v1": (128, rank), "v2": (rank, 128)}
    tensors |= {f"{begin}{name}": np.full(shape, 7, np.float32) for name, shape in idle.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    report = aprfmt.convert_model(folder, tmp_path / "m.gguf", dtype="f32")
    assert any("3 tensors of the network" in loss and f"{begin}v0" in loss for loss in report.losses)
    with aprfmt.open(tmp_path / "m.gguf") as model:
        assert [model.tensors[v].raw() for v in _FIRST[:3]] == [model.tensors[a].raw() for a in _FIRST[3:]]

    aprfmt.import_model(folder, tmp_path / "m.apr")
    aprfmt.export_model(tmp_path / "m.apr", tmp_path / "again", format="hf")
    assert (load_file(tmp_path / "again" / "model.safetensors")[f"{begin}v1"] == 7).all()


def test_copies_are_made_of_quantized_tensors_too(tmp_path: Path) -> None:
    folder = _folder(tmp_path, find_case("rwkv7"))
    aprfmt.import_model(folder, tmp_path / "m.apr")
    aprfmt.quantize_model(tmp_path / "m.apr", tmp_path / "m.gguf", "q8_0")
    with aprfmt.open(tmp_path / "m.gguf") as model:
        assert [model.tensors[v].raw() for v in _FIRST[:3]] == [model.tensors[a].raw() for a in _FIRST[3:]]
    aprfmt.convert_model(tmp_path / "m.gguf", tmp_path / "back", format="hf", dtype="f32")
    assert load_file(tmp_path / "back" / "model.safetensors").keys() == load_file(folder / "model.safetensors").keys()


def test_all_mixes_in_one_tensor_are_those_one_by_one(tmp_path: Path) -> None:
    """Checkpoints of the first fla releases."""
    folder = _folder(tmp_path, find_case("rwkv7"))
    aprfmt.convert_model(folder, tmp_path / "a.gguf", dtype="f32")
    tensors = load_file(folder / "model.safetensors")
    for layer in range(2):
        names = [f"model.layers.{layer}.attn.x_{letter}" for letter in "rwkvag"]
        tensors[f"model.layers.{layer}.attn.x_x"] = np.concatenate([tensors.pop(name)[0] for name in names])
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    aprfmt.convert_model(folder, tmp_path / "b.gguf", dtype="f32")
    with aprfmt.open(tmp_path / "a.gguf") as a, aprfmt.open(tmp_path / "b.gguf") as b:
        name = "blk.1.time_mix_lerp_fused.weight"
        assert a.tensors[name].shape == b.tensors[name].shape == (6, 1, 1, 128)
        assert a.tensors[name].raw() == b.tensors[name].raw()
