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
from aprfmt.errors import RefusedError

pytestmark = pytest.mark.slow

CASES = (*NETWORKS, "gemma3_text/whole")
WRAPPED = ("mistral3", "qwen2_vl", "qwen3_vl", "gemma3_text/whole")
"""Networks that also see, of which mlx_lm has the language model."""


def place(work: Path, case: str) -> Path:
    return work / case.replace("/", "-")


def inner(name: str) -> str:
    return name.replace("language_model.", "").removeprefix("model.")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source `ROW` of each network and mlx_lm's quantized `ROW-mlx`."""
    work = tmp_path_factory.mktemp("networks")
    names = ["smollm2", *arch_models.FOLDER_TOKENIZERS]
    tokenizers = arch_models.write_tokenizers(work / "tokenizers", names, limit=600)
    jobs = []
    for case in CASES:
        mlx_folders.build(case, place(work, case), tokenizers)
        jobs.append(("quantize_folder", str(place(work, case)), str(place(work, f"{case}-mlx")), 4, 32))
    mlx_peer.run(*jobs)
    return work


@pytest.mark.turns(by="case")
@pytest.mark.parametrize("case", CASES)
def test_names_shapes_codes_and_config_are_those_of_mlx_lm(case: str, made: Path, tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", place(made, f"{case}-mlx")
    report = aprfmt.export_model(place(made, case), ours, format="mlx", bits=4, group_size=32)
    assert tensors(ours) == tensors(theirs)
    assert json.loads((ours / "config.json").read_text()) == json.loads((theirs / "config.json").read_text())
    assert any("mlx_lm does not support them" in loss for loss in report.losses) == (case in WRAPPED)


@pytest.mark.turns(by="case")
@pytest.mark.parametrize("case", CASES)
def test_a_folder_of_mlx_comes_back_and_decodes_to_the_checkpoint(case: str, made: Path, tmp_path: Path) -> None:
    source = place(made, f"{case}-mlx")
    aprfmt.import_model(source, tmp_path / "m.apr")
    aprfmt.export_model(tmp_path / "m.apr", tmp_path / "back", format="mlx")
    assert files(tmp_path / "back") == files(source)
    aprfmt.export_model(tmp_path / "m.apr", tmp_path / "hf", format="hf", dtype="f32")
    aprfmt.export_model(place(made, case), tmp_path / "own", format="hf", dtype="f32")
    decoded, own = (load_file(tmp_path / name / "model.safetensors") for name in ("hf", "own"))
    if case in WRAPPED:  # other beginnings, and no tower
        decoded, own = ({inner(key): tensor for key, tensor in part.items()} for part in (decoded, own))
        own = {key: own[key] for key in decoded}
    assert decoded.keys() == own.keys()
    for name, tensor in own.items():
        assert decoded[name].shape == tensor.shape
        assert (decoded[name] - tensor).abs().max() <= 0.2 * tensor.abs().max()


def test_a_network_that_sees_whose_language_model_is_not_known_is_refused(tmp_path: Path) -> None:
    tokenizers = arch_models.write_tokenizers(tmp_path / "tokenizers", ["smollm2"], limit=600)
    mlx_folders.build("qwen3", tmp_path / "qwen3", tokenizers)
    path = tmp_path / "qwen3" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({"architectures": ["SomethingNew"], "model_type": "new", "text_config": config}))
    with pytest.raises(RefusedError, match="SomethingNew cannot be quantized for MLX: the prefix"):
        aprfmt.export_model(tmp_path / "qwen3", tmp_path / "out", format="mlx", bits=4, group_size=32)
    assert not (tmp_path / "out").exists()
