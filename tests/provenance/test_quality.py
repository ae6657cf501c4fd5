"""The quality score rests on what was looked at, and says so."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aprfmt
from aprfmt.inspection.describe import inspect

Folder = Callable[..., Path]


def parts(path: Path) -> dict[str, Any]:
    quality: Any = inspect(path, quality=True).to_json()["quality"]
    assert quality["score"] == sum(part["points"] for part in quality["breakdown"].values())
    for part in quality["breakdown"].values():
        assert part["looked_at"]
        assert bool(part["missing"]) is (part["points"] < part["max"])
    return dict(quality["breakdown"])


def test_what_is_missing_is_named(folder: Folder) -> None:
    found = parts(folder(card="---\nlicense: gemma\ndatasets: [a/b]\n---\n"))
    assert found["physics"]["missing"] == ["the container stores no checksum"]
    assert found["provenance"]["points"] == 8
    assert found["provenance"]["found"] == {"license": "gemma", "data_source": "a/b"}
    assert found["provenance"]["missing"] == ["license 'gemma' is not an SPDX id", "data_license"]
    assert found["tokenizer"]["missing"] == ["no tokenizer embedded"]


def test_stated_dims_are_held_against_the_tensors(folder: Folder) -> None:
    assert parts(folder("good"))["structural"]["points"] == 20
    found = parts(folder("bad", hidden_size=16, num_hidden_layers=3))["structural"]
    assert found["points"] == 10
    assert found["missing"][0].startswith("hidden_size 16, but model.embed_tokens.weight is [10, 8]")
    assert found["missing"][1] == "num_layers 3, but the tensors have 1"


def test_more_tokens_than_rows_earn_nothing(folder: Folder, tmp_path: Path) -> None:
    aprfmt.import_model(folder(), tmp_path / "m.apr")
    with aprfmt.open(tmp_path / "m.apr") as model:
        values = dict(model.metadata)
        tensors = {name: tensor.numpy() for name, tensor in model.tensors.items()}
    for count, points in ((10, 15), (11, 0)):
        own = values | {"tokenizer.model": "gpt2", "tokenizer.vocabulary": [f"t{i}" for i in range(count)]}
        aprfmt.save_file(tensors, tmp_path / f"{count}.apr", metadata=own | {"tokenizer.merges": []})
        assert parts(tmp_path / f"{count}.apr")["tokenizer"]["points"] == points


def test_inspect_shows_the_cards_words_and_its_damage(folder: Folder) -> None:
    found = inspect(folder("a", card="---\nlicense: mit\nauthor: me\n---\n"))
    assert (found.metadata["license"], found.metadata["author"]) == ("mit", "me")
    found = inspect(folder("b", card="---\nlicense: *x\n---\n"))
    assert "anchors" in found.warnings[0]


def test_a_wrong_licence_exits_2_with_the_nearest_id(folder: Folder, tmp_path: Path) -> None:
    target = tmp_path / "m.apr"
    command = [sys.executable, "-m", "aprfmt", "import", str(folder()), "-o", str(target), "--license", "apache2"]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    error = json.loads(done.stdout)["error"]
    assert error["code"] == "usage"
    assert "Apache-2.0" in error["hint"]
    assert not target.exists()
