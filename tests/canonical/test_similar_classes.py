"""`--arch auto-similar`: a class that nobody knows is read as the known network that it is in all but name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from arch_models import find_case, make_config, row_tensors
from safetensors.numpy import load_file, save_file

import aprfmt
from aprfmt.errors import UnmappedError

OURS = {"architectures": ["OurForCausalLM"], "model_type": "ours"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny Llama with random weights under another name, as its own class would publish it."""
    return renamed("llama", tmp_path / "model")


def renamed(row: str, folder: Path) -> Path:
    case, random = find_case(row), np.random.default_rng(0)
    config = json.loads(make_config(case, 320).to_json_string(use_diff=False)) | {"architectures": [case.model_class]}
    folder.mkdir()
    tensors = {name: random.standard_normal(shape).astype(np.float32) for name, shape in row_tensors(config)}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config | OURS))
    return folder


def edit(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def imported(folder: Path, arch: str | None = "auto-similar") -> aprfmt.Report:
    return aprfmt.import_model(folder, folder.parent / "m.apr", arch=arch, force=True)


@pytest.mark.parametrize("row", ["llama", "qwen2", "qwen3", "gemma2", "qwen3_moe"])
def test_a_class_that_is_a_known_one_is_read_as_it(row: str, tmp_path: Path) -> None:
    report = imported(renamed(row, tmp_path / "model"))
    assert report.architecture == row
    assert f"unknown class OurForCausalLM: read as {row}, which has the same tensors and config keys" in report.warnings


def test_its_gguf_is_that_of_the_known_class(folder: Path, tmp_path: Path) -> None:
    aprfmt.convert_model(folder, tmp_path / "ours.gguf", arch="auto-similar", no_tokenizer=True)
    edit(folder, architectures=["LlamaForCausalLM"], model_type="llama")
    aprfmt.convert_model(folder, tmp_path / "llama.gguf", no_tokenizer=True)
    with aprfmt.open(tmp_path / "ours.gguf") as ours, aprfmt.open(tmp_path / "llama.gguf") as llama:
        assert {name: t.numpy().tobytes() for name, t in ours.tensors.items()} == {
            name: t.numpy().tobytes() for name, t in llama.tensors.items()
        }
        keys = [
            {key: value for key, value in model.metadata.items() if key.startswith("llama.")} for model in (ours, llama)
        ]
        assert keys[0] == keys[1]


def test_an_apr_knows_as_what_it_was_read(folder: Path, tmp_path: Path) -> None:
    imported(folder)
    aprfmt.export_model(tmp_path / "m.apr", tmp_path / "m.gguf", no_tokenizer=True)
    with aprfmt.open(tmp_path / "m.gguf") as model:
        assert model.metadata["general.architecture"] == "llama"
    aprfmt.export_model(tmp_path / "m.apr", tmp_path / "back", format="hf")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "back" / name).read_bytes() == (folder / name).read_bytes()


def test_the_refusal_of_a_class_that_fits_proposes_it(folder: Path) -> None:
    with pytest.raises(UnmappedError) as caught:
        imported(folder, None)
    assert str(caught.value.hint).startswith(
        "its tensors and config keys are those of llama: try --arch auto-similar; or add --allow-unmapped"
    )


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"residual_multiplier": 0.5}, "residual_multiplier"), ({"use_nope": False}, "use_nope"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
)  # fmt: skip
def test_a_config_key_more_is_another_network(values: dict[str, Any], named: str, folder: Path) -> None:
    edit(folder, **values)
    with pytest.raises(UnmappedError, match=f"OurForCausalLM does not match a known network: .*{named}"):
        imported(folder)
    with pytest.raises(UnmappedError) as caught:
        imported(folder, None)
    assert "auto-similar" not in str(caught.value.hint)
    assert f"except for {named} in config.json" in str(caught.value.hint)


@pytest.mark.parametrize("name", ["rms_norm_eps", "rope_parameters"])
def test_a_default_of_its_own_is_not_guessed(name: str, folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({key: v for key, v in config.items() if key != name}))
    with pytest.raises(UnmappedError, match="no rms_norm_eps" if name == "rms_norm_eps" else "no rope_theta"):
        imported(folder)


def test_a_key_without_a_value_changes_nothing(folder: Path) -> None:
    edit(folder, use_nope=None, auto_map={"AutoModelForCausalLM": "modeling_ours.OurForCausalLM"})
    assert imported(folder).architecture == "llama"


def test_a_tensor_more_is_another_network(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.self_attn.sinks"] = np.zeros(4, np.float32)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UnmappedError, match=r"does not match a known network: qwen2 has no .*self_attn\.sinks"):
        imported(folder)


def test_a_tensor_less_is_another_network(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.0.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UnmappedError, match="does not match a known network: some tensors of qwen2"):
        imported(folder)


def test_a_known_class_is_itself(folder: Path) -> None:
    edit(folder, architectures=["MistralForCausalLM"], model_type="mistral")
    assert imported(folder).architecture == imported(folder, None).architecture
