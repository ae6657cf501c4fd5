"""An output is opened once more before it has its name: what our own reader refuses never appears."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import plain_models
import pytest

import aprfmt
from aprfmt.convert import integrity
from aprfmt.errors import CorruptError, RefusedError, StorageError

TARGETS: dict[str, dict[str, Any]] = {
    "out.apr": {},
    "out.gguf": {},
    "parts.gguf": {"shard_size": 150_000},
    "out.safetensors": {},
    "folder": {"format": "hf"},
    "sharded": {"format": "hf", "shard_size": 150_000},
    "mlx": {"format": "mlx"},
    "shards": {"format": "apr-shards", "shard_size": 150_000},
}


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("name", TARGETS)
def test_every_output_is_whole_when_it_is_read_and_has_no_name_yet(
    name: str, force: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = plain_models.write_folder(tmp_path / "model"), tmp_path / "out" / name
    target.parent.mkdir()
    options = TARGETS[name]
    if force:
        aprfmt.convert_model(source, target, **options)
    before = {path: path.read_bytes() for path in target.parent.rglob("*") if path.is_file()}
    seen = []

    def refuse(path: str) -> None:
        with aprfmt.open(path) as model:
            seen.append((len(model.tensors), model.hparams.hidden_size))
        raise RefusedError("no")

    with monkeypatch.context() as patch:
        patch.setattr(integrity, "read_back", refuse)
        with pytest.raises(RefusedError):
            aprfmt.convert_model(source, target, **options, force=force)
    assert len(seen) == 1
    assert seen[0][0] == 21
    assert {path: path.read_bytes() for path in target.parent.rglob("*") if path.is_file()} == before
    aprfmt.convert_model(source, target, **options, force=force)


def test_stamp_reads_back_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    aprfmt.import_model(plain_models.write_folder(tmp_path / "model"), tmp_path / "m.apr")
    before = (tmp_path / "m.apr").read_bytes()

    def refuse(path: str) -> None:
        with aprfmt.open(path) as model:
            assert model.metadata["note"] == 1
        raise RefusedError("no")

    monkeypatch.setattr(integrity, "read_back", refuse)
    with pytest.raises(RefusedError):
        aprfmt.stamp(tmp_path / "m.apr", None, set={"note": 1}, in_place=True)
    assert (tmp_path / "m.apr").read_bytes() == before


@pytest.mark.parametrize("kept", [3, 40, 5000], ids=str)
@pytest.mark.parametrize("name", ["m.apr", "m.gguf", "m.safetensors"])
def test_what_cannot_be_read_is_refused_with_the_reason(name: str, kept: int, tmp_path: Path) -> None:
    aprfmt.convert_model(plain_models.write_folder(tmp_path / "model"), tmp_path / name)
    integrity.read_back(str(tmp_path / name))
    data = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(data[:kept])
    with pytest.raises(RefusedError, match="could not be read back") as caught:
        integrity.read_back(str(tmp_path / name))
    assert "apr validate" in str(caught.value.hint)


def test_trouble_with_the_disk_is_said_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: object) -> None:
        raise StorageError("cannot read")

    monkeypatch.setattr("aprfmt.formats.open_own", fail)
    with pytest.raises(StorageError):
        integrity.read_back("x")


def test_a_dimension_that_is_no_number_is_found(tmp_path: Path) -> None:
    folder = plain_models.write_folder(tmp_path / "model")
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace('"num_hidden_layers": 2', '"num_hidden_layers": "two"'))
    with pytest.raises(CorruptError), aprfmt.open(folder) as model:
        _ = model.hparams
    with pytest.raises(RefusedError, match="num_hidden_layers"):
        integrity.read_back(str(folder))
