"""The models of a folder: one row each, and what cannot be read with the reason."""

from __future__ import annotations

from pathlib import Path

import demo_model
import plain_models
import pytest
from imatrix_files import new_imatrix

import aprfmt
from aprfmt.errors import NotFoundError
from aprfmt.inspection.model_folder import models_in


def test_models_are_rows_and_damage_is_named(tmp_path: Path) -> None:
    demo_model.build(tmp_path / "m.gguf")
    (tmp_path / "parts").mkdir()
    aprfmt.convert_model(tmp_path / "m.gguf", tmp_path / "parts" / "m.gguf", shard_size="100KB")
    plain_models.write_folder(tmp_path / "hf")
    plain_models.write_adapter(tmp_path / "lora")
    aprfmt.convert_model(tmp_path / "hf", tmp_path / "mlx", format="mlx", bits=4)
    new_imatrix(tmp_path / "m.imatrix.gguf", {"w": [1.0] * 32}, {"w": [1.0]})
    whole = (tmp_path / "m.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "page.gguf").write_text("<html><title>404</title></html>")
    plain_models.write_folder(tmp_path / "pointer")
    (tmp_path / "pointer" / "model.safetensors").write_text(
        f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 5000000\n"
    )
    found = models_in(tmp_path)
    rows = {Path(row.path).relative_to(tmp_path).parts[0]: row for row in found.models}
    assert {name: row.format for name, row in rows.items()} == {
        "m.gguf": "gguf", "parts": "gguf", "hf": "hf", "lora": "adapter", "mlx": "mlx"
    }  # fmt: skip
    shards = [*(tmp_path / "parts").iterdir()]
    assert (rows["parts"].files, rows["parts"].size_bytes) == (len(shards), sum(p.stat().st_size for p in shards))
    said = {Path(path).name: reason for path, reason in found.skipped.items()}
    assert said.keys() == {"cut.gguf", "page.gguf", "pointer"}
    assert "cut short" in said["cut.gguf"]
    assert "HTML" in said["page.gguf"]
    assert "Git LFS pointer" in said["pointer"]


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        models_in(tmp_path / "no")
