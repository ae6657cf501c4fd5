"""What mlx_lm calls the tensors of each network that it and the table have, beside mlx_lm itself."""

from __future__ import annotations

import json
from pathlib import Path

import arch_models
import mlx_folders
import mlx_peer
import pytest
from mlx_folders import files, tensors
from safetensors.torch import load_file

import aprfmt
from aprfmt.arch.mlx import NETWORKS

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source `ROW` of each network and mlx_lm's quantized `ROW-mlx`."""
    work = tmp_path_factory.mktemp("networks")
    names = ["smollm2", *arch_models.FOLDER_TOKENIZERS]
    tokenizers = arch_models.write_tokenizers(work / "tokenizers", names, limit=600)
    jobs = []
    for row in NETWORKS:
        mlx_folders.build(row, work / row, tokenizers)
        jobs.append(("quantize_folder", str(work / row), str(work / f"{row}-mlx"), 4, 32))
    mlx_peer.run(*jobs)
    return work


@pytest.mark.parametrize("row", NETWORKS)
def test_names_shapes_codes_and_config_are_those_of_mlx_lm(row: str, made: Path, tmp_path: Path) -> None:
    aprfmt.export_model(made / row, tmp_path / "ours", format="mlx", bits=4, group_size=32)
    assert tensors(tmp_path / "ours") == tensors(made / f"{row}-mlx")
    ours, theirs = (json.loads((at / "config.json").read_text()) for at in (tmp_path / "ours", made / f"{row}-mlx"))
    assert ours == theirs


@pytest.mark.parametrize("row", NETWORKS)
def test_a_folder_of_mlx_comes_back_and_decodes_to_the_checkpoint(row: str, made: Path, tmp_path: Path) -> None:
    source = made / f"{row}-mlx"
    aprfmt.import_model(source, tmp_path / "m.apr")
    aprfmt.export_model(tmp_path / "m.apr", tmp_path / "back", format="mlx")
    assert files(tmp_path / "back") == files(source)
    aprfmt.export_model(tmp_path / "m.apr", tmp_path / "hf", format="hf", dtype="f32")
    aprfmt.export_model(made / row, tmp_path / "own", format="hf", dtype="f32")
    decoded, own = (load_file(tmp_path / name / "model.safetensors") for name in ("hf", "own"))
    assert decoded.keys() == own.keys()
    for name, tensor in own.items():
        assert decoded[name].shape == tensor.shape
        assert (decoded[name] - tensor).abs().max() <= 0.2 * tensor.abs().max()
