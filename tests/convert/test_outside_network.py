"""Tensors outside the network stay in an `.apr` as they are, come back, and are said where they stay behind."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import aprfmt
from aprfmt.cli.main import main
from aprfmt.errors import RefusedError, UnmappedError

TOWER = {
    "vision_tower.blocks.0.weight": torch.arange(96, dtype=torch.float32).reshape(3, 32),
    "vision_tower.blocks.0.bias": torch.arange(3, dtype=torch.float32),
    "vision_tower.positions": torch.arange(7),
    "multi_modal_projector.weight": torch.ones(2, 32),
}


@pytest.fixture
def folder(tiny_model: Callable[[str], Any], tmp_path: Path) -> Path:
    """A tiny model with a tower, its language model under the names of multimodal checkpoints."""
    shutil.copytree(tiny_model("qwen2-untied")[0], tmp_path / "m")
    weights = {
        ("language_model." + name): tensor for name, tensor in load_file(tmp_path / "m" / "model.safetensors").items()
    }
    save_file(weights | TOWER, tmp_path / "m" / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    config["vision_config"] = {"depth": 1, "torch_dtype": "float32"}
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    return tmp_path / "m"


def files(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_whole_folder_comes_back(folder: Path, tmp_path: Path) -> None:
    plan = aprfmt.import_model(folder, tmp_path / "m.apr", plan=True)
    report = aprfmt.import_model(folder, tmp_path / "m.apr")
    for each in (plan, report):
        assert each.lossless
        assert not each.losses
        assert each.tensor_count == len(load_file(folder / "model.safetensors"))
    aprfmt.export_model(tmp_path / "m.apr", tmp_path / "back")
    assert files(tmp_path / "back") == files(folder)
    with aprfmt.open(tmp_path / "m.apr") as model:
        assert TOWER.keys() <= set(model.tensors)
        assert "model.norm.weight" in model.tensors
        assert model.metadata["param_count"] == sum(t.size for t in model.tensors.values())
    # As it is written again by name: one file, another copy, shards.
    aprfmt.convert_model(tmp_path / "m.apr", tmp_path / "parts", format="apr-shards", shard_size=200_000)
    aprfmt.export_model(tmp_path / "parts", tmp_path / "from-parts")
    assert files(tmp_path / "from-parts") == files(folder)
    aprfmt.stamp(tmp_path / "m.apr", tmp_path / "stamped.apr", set={"x": 1})
    aprfmt.export_model(tmp_path / "stamped.apr", tmp_path / "from-stamped")
    assert load_file(tmp_path / "from-stamped" / "model.safetensors").keys() >= TOWER.keys()


def test_a_folder_and_its_apr_are_the_same(folder: Path, tmp_path: Path) -> None:
    aprfmt.import_model(folder, tmp_path / "m.apr")
    assert aprfmt.diff(folder, tmp_path / "m.apr", values=True).identical
    found = aprfmt.diff(folder, tmp_path / "m.apr")
    assert [d.name for d in found.differences if d.kind == "tensor"] == []
    assert found.tensors_compared == len(load_file(folder / "model.safetensors"))


def test_one_file_comes_back(folder: Path, tmp_path: Path) -> None:
    report = aprfmt.import_model(folder / "model.safetensors", tmp_path / "m.apr")
    assert report.lossless
    aprfmt.export_model(tmp_path / "m.apr", tmp_path / "back.safetensors")
    assert (tmp_path / "back.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


def test_a_gguf_leaves_them_behind_and_says_so(folder: Path, tmp_path: Path) -> None:
    report = aprfmt.import_model(folder, tmp_path / "m.apr")
    direct = aprfmt.convert_model(folder, tmp_path / "a.gguf")
    report = aprfmt.export_model(tmp_path / "m.apr", tmp_path / "b.gguf")
    for each in (direct, report, aprfmt.export_model(tmp_path / "m.apr", tmp_path / "c.gguf", plan=True)):
        assert not each.lossless
        assert each.losses == [
            "3 tensors of the vision tower (vision_tower.*, 452 B) dropped: "
            "the GGUF of a language model cannot hold them",
            "1 tensor of the projector (multi_modal_projector.weight, 256 B) dropped: "
            "the GGUF of a language model cannot hold them",
        ]
    with aprfmt.open(tmp_path / "a.gguf") as a, aprfmt.open(tmp_path / "b.gguf") as b:
        assert list(a.tensors) == list(b.tensors)
        assert not any("tower" in name for name in a.tensors)


@pytest.mark.parametrize("source", ["m", "m.apr"])
def test_a_float_dtype_is_for_all_and_a_mix_for_the_network(source: str, folder: Path, tmp_path: Path) -> None:
    aprfmt.import_model(folder, tmp_path / "m.apr")
    aprfmt.convert_model(tmp_path / source, tmp_path / "half", dtype="bf16")
    half = load_file(tmp_path / "half" / "model.safetensors")
    whole = load_file(folder / "model.safetensors")
    assert half.keys() == whole.keys()
    assert all(
        t.dtype == (torch.bfloat16 if whole[name].is_floating_point() else torch.int64) for name, t in half.items()
    )
    config = json.loads((tmp_path / "half" / "config.json").read_text())
    assert (config["dtype"], config["vision_config"]) == ("bfloat16", {"depth": 1, "dtype": "bfloat16"})

    report = aprfmt.convert_model(tmp_path / source, tmp_path / "q.apr", dtype="q8_0")
    assert not report.lossless
    assert any("vision tower (vision_tower.*, 452 B) not quantized" in warning for warning in report.warnings)
    with aprfmt.open(tmp_path / "q.apr") as model:
        assert all(model.tensors[name].torch().equal(tensor) for name, tensor in TOWER.items())
        assert model.tensors["model.layers.0.mlp.up_proj.weight"].dtype == "Q8_0"
    aprfmt.convert_model(tmp_path / source, tmp_path / "h.apr", dtype="f16")
    with aprfmt.open(tmp_path / "h.apr") as model:
        assert [model.tensors[name].dtype for name in TOWER] == ["F16", "F16", "I64", "F16"]


def test_unknown_tensors_without_values_are_carried(folder: Path, tmp_path: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    name = "language_model.model.layers.0.self_attn.foo.weight"
    save_file(weights | {name: torch.ones(0, 4)}, folder / "model.safetensors")
    assert aprfmt.import_model(folder, tmp_path / "m.apr").lossless
    aprfmt.export_model(tmp_path / "m.apr", tmp_path / "back", format="hf")
    same = "model.safetensors"
    assert (tmp_path / "back" / same).read_bytes() == (folder / same).read_bytes()


def test_a_slip_of_a_name_is_still_refused(folder: Path, tmp_path: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    save_file(
        weights | {"language_model.model.layers.0.self_attn.foo.weight": torch.ones(2)}, folder / "model.safetensors"
    )
    with pytest.raises(UnmappedError, match="unknown tensor for architecture"):
        aprfmt.import_model(folder, tmp_path / "m.apr")
    assert aprfmt.import_model(folder, tmp_path / "m.apr", allow_unmapped=True).lossless
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(RefusedError, match="tensors of the gpt2 network are missing"):
        aprfmt.import_model(folder, tmp_path / "n.apr", arch="gpt2")


def test_validate_and_values_know_them(folder: Path, tmp_path: Path) -> None:
    aprfmt.import_model(folder, tmp_path / "m.apr")
    for path in (folder, tmp_path / "m.apr"):
        checks = {check.id: check.status for check in aprfmt.validate(path).checks}
        assert (checks["names.complete"], checks["shapes.match"]) == ("pass", "pass")


def test_inspect_and_tensors_tell_them(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "logo.png").write_bytes(b"\x89PNG")
    aprfmt.import_model(folder, tmp_path / "m.apr")
    kinds = {"vision tower": {"tensors": 3, "bytes": 452}, "projector": {"tensors": 1, "bytes": 256}}
    for path, n_files in ((folder, 0), (tmp_path / "m.apr", 1)):
        body = aprfmt.inspect(path).to_json()
        assert body["carried"] == {"tensors": 4, "kinds": kinds, "files": n_files, "file_bytes": 4 * n_files}
        assert body["tensor_count"] == len(load_file(folder / "model.safetensors"))
    with pytest.raises(SystemExit):
        main(["inspect", str(tmp_path / "m.apr")])
    shown = " ".join(capsys.readouterr().out.split())
    assert "also contains 3 tensors of the vision tower, 1 tensor of the projector, 1 file (4 B)" in shown
    with pytest.raises(SystemExit):
        main(["tensors", str(tmp_path / "m.apr")])
    shown = capsys.readouterr().out
    assert "vision_tower.positions" in shown
    assert "logo.png" not in shown
