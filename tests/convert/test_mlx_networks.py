"""What mlx_lm calls the tensors of each network that it and the table have, beside mlx_lm itself."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import arch_models
import mlx_folders
import mlx_peer
import pytest
from mlx_folders import CASES, files, tensors
from safetensors.torch import load_file

import aprfmt
from aprfmt.errors import RefusedError

pytestmark = pytest.mark.slow

LOST = {"ernie4_5_moe": "e_score_correction_bias", "kimi_k3/plain": "A_log"}
"""Endings of tensors that mlx_lm does not read, or not whole."""


def place(work: Path, case: str) -> Path:
    return work / case.replace("/", "-")


def inner(name: str) -> str:
    """A name without what a wrapper, or transformers in place of the published checkpoint, puts before it."""
    name = name.replace("language_model.", "")
    return name.removeprefix("model.").removeprefix("transformer.")


def sees(folder: Path) -> bool:
    """Whether the model has other parts beside the language model that mlx_lm has of it."""
    return "text_config" in json.loads((folder / "config.json").read_text())


@pytest.fixture(scope="module")
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source `CASE` of each network and mlx_lm's quantized `CASE-mlx`, of the cases that run."""
    work = tmp_path_factory.mktemp("networks")
    names = ["smollm2", arch_models.RWKV, *arch_models.FOLDER_TOKENIZERS]
    tokenizers = arch_models.write_tokenizers(work / "tokenizers", names, limit=600)
    items = [item for item in request.session.items if item.path == request.path and isinstance(item, pytest.Function)]
    wanted = {item.callspec.params["case"] for item in items if "case" in item.fixturenames}
    jobs = []
    for case in (case for case in CASES if case in wanted):
        mlx_folders.build(case, place(work, case), tokenizers)
        source = mlx_folders.for_mlx(case, place(work, case))
        jobs.append(("quantize_folder", str(source), str(place(work, f"{case}-mlx")), 4, 32))
    mlx_peer.run(*jobs)
    return work


@pytest.mark.turns(by="case", of=8)
@pytest.mark.parametrize("case", CASES)
def test_names_shapes_codes_and_config_are_those_of_mlx_lm(case: str, made: Path, tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", place(made, f"{case}-mlx")
    report = aprfmt.export_model(place(made, case), ours, format="mlx", bits=4, group_size=32)
    assert tensors(ours) == tensors(theirs)
    assert json.loads((ours / "config.json").read_text()) == json.loads((theirs / "config.json").read_text())
    assert any("trailing values dropped" in loss for loss in report.losses) == (case == "kimi_k3/plain")
    assert any("mlx_lm does not support them" in loss for loss in report.losses) == sees(place(made, case))
    assert any("mlx_lm does not use it" in loss for loss in report.losses) == (case == "ernie4_5_moe")


@pytest.mark.turns(by="case", of=8)
@pytest.mark.parametrize("case", CASES)
def test_a_folder_of_mlx_comes_back_and_decodes_to_the_checkpoint(case: str, made: Path, tmp_path: Path) -> None:
    source = place(made, f"{case}-mlx")
    aprfmt.import_model(source, tmp_path / "m.apr")
    aprfmt.export_model(tmp_path / "m.apr", tmp_path / "back", format="mlx")
    assert files(tmp_path / "back") == files(source)
    aprfmt.export_model(tmp_path / "m.apr", tmp_path / "hf", format="hf", dtype="f32")
    aprfmt.export_model(place(made, case), tmp_path / "own", format="hf", dtype="f32")
    decoded, own = (
        {inner(key): tensor for key, tensor in load_file(tmp_path / name / "model.safetensors").items()}
        for name in ("hf", "own")
    )
    if case in mlx_folders.FUSED:
        decoded = mlx_folders.fused(decoded, case)
    if sees(place(made, case)):
        own = {key: own[key] for key in decoded}  # no tower
    lost = LOST.get(case, "nothing")
    decoded, own = ({k: tensor for k, tensor in part.items() if not k.endswith(lost)} for part in (decoded, own))
    assert decoded.keys() == own.keys()
    for name, tensor in own.items():
        assert decoded[name].shape == tensor.shape
        assert (decoded[name] - tensor).abs().max() <= 0.2 * tensor.abs().max()


@pytest.mark.parametrize(
    ("case", "changed", "why"),
    [
        ("qwen3_5_text", {}, "mlx_lm has qwen3_5_text only as the language model inside a larger network"),
        ("llama4_text", {}, r"mlx_lm's network has no model\.layers\.1\.feed_forward\.router\.weight"),
        ("deci/blocks", {}, r"mlx_lm's network has no model\.layers\.2\.self_attn\.linear_attn\.weight"),
        ("bailing_moe_linear", {"norm_head": True}, "mlx_lm changes the values of the head if norm_head is true"),
    ],
)
def test_what_mlx_lm_lacks_is_refused(case: str, changed: dict[str, object], why: str, tmp_path: Path) -> None:
    tokenizers = arch_models.write_tokenizers(tmp_path / "tokenizers", ["smollm2", "llama3", "qwen3"], limit=600)
    found = arch_models.find_case(case)
    write = arch_models.build if found.computable else arch_models.write_checkpoint
    write(replace(found, config={**found.config, **changed}), tmp_path / "model", tokenizers)
    with pytest.raises(RefusedError, match=f"cannot be quantized for MLX: {why}"):
        aprfmt.export_model(tmp_path / "model", tmp_path / "out", format="mlx", bits=4, group_size=32)
    assert not (tmp_path / "out").exists()


def test_a_network_that_sees_whose_language_model_is_not_known_is_refused(tmp_path: Path) -> None:
    tokenizers = arch_models.write_tokenizers(tmp_path / "tokenizers", ["smollm2"], limit=600)
    mlx_folders.build("qwen3", tmp_path / "qwen3", tokenizers)
    path = tmp_path / "qwen3" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({"architectures": ["SomethingNew"], "model_type": "new", "text_config": config}))
    with pytest.raises(RefusedError, match="SomethingNew cannot be quantized for MLX: the prefix"):
        aprfmt.export_model(tmp_path / "qwen3", tmp_path / "out", format="mlx", bits=4, group_size=32)
    assert not (tmp_path / "out").exists()
