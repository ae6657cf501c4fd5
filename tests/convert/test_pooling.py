"""How an encoder pools: out of a sentence-transformers folder, through .apr and GGUF, and into a folder again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from arch_models import build, find_case, write_tokenizers

import aprfmt
from aprfmt.errors import RefusedError
from aprfmt.formats.hf_modules import module_files


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny BertModel."""
    folder = tmp_path_factory.mktemp("bert")
    build(find_case("bert"), folder / "m", write_tokenizers(folder / "tokenizers", ["bert"], 4000))
    return folder / "m"


def _pooled(bert: Path, folder: Path, word: str) -> Path:
    shutil.copytree(bert, folder / "m")
    for name, data in module_files({"pooling": word}, 64).items():
        (folder / "m" / name).parent.mkdir(exist_ok=True)
        (folder / "m" / name).write_bytes(data)
    return folder / "m"


@pytest.mark.parametrize(("word", "number"), [("mean", 1), ("cls", 2), ("last", 3)])
def test_pooling_goes_there_and_back(bert: Path, tmp_path: Path, word: str, number: int) -> None:
    source = _pooled(bert, tmp_path, word)
    aprfmt.import_model(source, tmp_path / "m.apr")
    aprfmt.export_model(tmp_path / "m.apr", tmp_path / "m.gguf")
    with aprfmt.open(tmp_path / "m.gguf") as model:
        assert model.metadata["bert.pooling_type"] == number
    aprfmt.import_model(tmp_path / "m.gguf", tmp_path / "b.apr")
    aprfmt.export_model(tmp_path / "b.apr", tmp_path / "b", format="hf")
    for name in module_files({"pooling": word}, 64):
        assert json.loads((tmp_path / "b" / name).read_bytes()) == json.loads((source / name).read_bytes())
    assert "pooling" not in json.loads((tmp_path / "b" / "config.json").read_bytes())


def test_the_folder_itself_comes_back_byte_for_byte(bert: Path, tmp_path: Path) -> None:
    source = _pooled(bert, tmp_path, "mean")
    aprfmt.import_model(source, tmp_path / "m.apr")
    aprfmt.export_model(tmp_path / "m.apr", tmp_path / "b", format="hf")
    names = sorted(p.relative_to(source) for p in source.rglob("*") if p.is_file())
    assert names == sorted(p.relative_to(tmp_path / "b") for p in (tmp_path / "b").rglob("*") if p.is_file())
    for name in names:
        assert (tmp_path / "b" / name).read_bytes() == (source / name).read_bytes()


def test_a_gguf_cannot_say_every_pooling(bert: Path, tmp_path: Path) -> None:
    source = _pooled(bert, tmp_path, "max")
    aprfmt.import_model(source, tmp_path / "m.apr")
    with pytest.raises(RefusedError, match="pooling is 'max'"):
        aprfmt.export_model(tmp_path / "m.apr", tmp_path / "m.gguf")


def test_without_a_pooling_module_nothing_is_said(bert: Path, tmp_path: Path) -> None:
    aprfmt.import_model(bert, tmp_path / "m.apr")
    aprfmt.export_model(tmp_path / "m.apr", tmp_path / "m.gguf")
    with aprfmt.open(tmp_path / "m.gguf") as model:
        assert "bert.pooling_type" not in model.metadata
