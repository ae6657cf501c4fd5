"""A class that nobody knows gets a hint that works: the rows whose tensors the checkpoint has, by --arch."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from arch_models import DIMS, all_cases, make_config, row_tensors
from safetensors.numpy import save_file

import aprfmt
from aprfmt.arch.table import ARCHITECTURES
from aprfmt.errors import RefusedError, UnmappedError

ROWS = ("llama", "qwen3", "gpt2", "gpt_neox", "gemma2", "mixtral", "deepseek_v3", "bert", "mamba", "falcon")


def checkpoint(row: str, folder: Path) -> Path:
    """The base case of a row, under a class and a model type that nobody knows."""
    case = next(case for case in all_cases() if case.base and case.row == row)
    config = json.loads(make_config(case, 320).to_json_string(use_diff=False)) | {"architectures": [case.model_class]}
    folder.mkdir()
    save_file({name: np.zeros(shape, np.float32) for name, shape in row_tensors(config)}, folder / "model.safetensors")
    (folder / "config.json").write_text(
        json.dumps(config | {"architectures": ["NobodyKnowsForCausalLM"], "model_type": "nobody"})
    )
    return folder


@pytest.mark.parametrize("row", ROWS)
def test_the_hint_works(row: str, tmp_path: Path) -> None:
    folder = checkpoint(row, tmp_path / "model")
    with pytest.raises(UnmappedError, match="'NobodyKnowsForCausalLM' is not supported") as caught:
        aprfmt.import_model(folder, tmp_path / "m.apr")
    hint = str(caught.value.hint)
    named = re.match(r"its tensors (?:match|and config keys are those of) (\w+).*: try --arch ([\w-]+);", hint)
    assert named, hint
    assert named[2] in (named[1], "auto-similar")
    for name in {row, named[1]}:
        report = aprfmt.import_model(folder, tmp_path / "m.apr", arch=name, force=True)
        assert report.architecture == name
        with aprfmt.open(tmp_path / "m.apr") as model:
            assert model.hparams.hidden_size == DIMS["hidden_size"]
            assert not any(name.startswith("aprfmt.") for name in model.tensors)
    assert ARCHITECTURES[named[1]].tensors


def test_a_network_of_its_own_gets_the_nearest_name(tmp_path: Path) -> None:
    folder = checkpoint("llama", tmp_path / "model")
    save_file({"strange.weight": np.zeros((4, 4), np.float32)}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["Qwen3xForCausalLM"]}))
    with pytest.raises(UnmappedError) as caught:
        aprfmt.import_model(folder, tmp_path / "m.apr")
    assert str(caught.value.hint).startswith("the closest is 'Qwen3ForCausalLM'")


def test_a_config_without_sizes_is_not_called_missing(tmp_path: Path) -> None:
    folder = checkpoint("llama", tmp_path / "model")
    config = json.loads((folder / "config.json").read_text()) | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
    }
    del config["hidden_size"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(RefusedError, match=r"config.json lacks hidden_size$") as caught:
        aprfmt.import_model(folder, tmp_path / "m.apr")
    assert "AutoConfig.from_pretrained('DIR').save_pretrained('DIR')" in str(caught.value.hint)
