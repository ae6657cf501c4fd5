"""A source that somebody writes to while it is converted: exit 4, and no output."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from plain_models import write_folder

import aprfmt
from aprfmt.errors import CorruptError

Change = Callable[[Path], None]


def touch(path: Path) -> None:
    info = path.stat()
    os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns + 1_000_000))


def grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b" ")


def replace(path: Path) -> None:
    new = path.with_name("new")
    new.write_bytes(path.read_bytes())
    new.replace(path)


def remove(path: Path) -> None:
    path.unlink()


CHANGES = (touch, grow, replace, remove)
OUTPUTS = ("m.apr", "m.gguf", "m.safetensors", "hf", "shards")


@pytest.fixture
def sources(tmp_path: Path) -> dict[str, Path]:
    folder = write_folder(tmp_path / "in")
    aprfmt.import_model(folder, tmp_path / "in.apr")
    aprfmt.export_model(folder, tmp_path / "in.gguf")
    aprfmt.export_model(folder, tmp_path / "in.safetensors")
    return {"hf": folder, "apr": tmp_path / "in.apr", "gguf": tmp_path / "in.gguf"}


def convert(source: Path, target: Path, victim: Path, change: Change) -> None:
    """Converts, and changes `victim` when the first bytes are written."""

    def start(total: int) -> Callable[[int, str], None]:
        done: list[int] = []

        def advance(n: int, label: str) -> None:
            if not done:
                change(victim)
            done.append(n)

        return advance

    format = "apr-shards" if target.name == "shards" else None
    aprfmt.convert_model(source, target, format=format, progress=start)


@pytest.mark.turns
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("kind", ["hf", "apr", "gguf"])
def test_nothing_is_published(kind: str, output: str, change: Change, sources: dict[str, Path], tmp_path: Path) -> None:
    source = sources[kind]
    victim = source / "model.safetensors" if kind == "hf" else source
    folder = tmp_path / "out"
    folder.mkdir()
    with pytest.raises(CorruptError, match="changed while it was read") as caught:
        convert(source, folder / output, victim, change)
    assert caught.value.exit_code == 4
    assert caught.value.path == str(victim)
    assert not list(folder.iterdir())


@pytest.mark.turns
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("change", CHANGES)
def test_the_text_files_of_a_folder(name: str, change: Change, sources: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(CorruptError, match="changed while it was read") as caught:
        convert(sources["hf"], tmp_path / "m.apr", sources["hf"] / name, change)
    assert caught.value.path == str(sources["hf"] / name)
    assert not (tmp_path / "m.apr").exists()


@pytest.mark.parametrize("change", CHANGES)
def test_a_tokenizer_that_was_named(change: Change, sources: dict[str, Path], tmp_path: Path) -> None:
    def start(total: int) -> Callable[[int, str], None]:
        change(sources["hf"] / "tokenizer.json")
        return lambda n, label: None

    with pytest.raises(CorruptError, match="changed while it was read"):
        aprfmt.convert_model(sources["apr"], tmp_path / "m.gguf", tokenizer=sources["hf"], progress=start)
    assert not (tmp_path / "m.gguf").exists()


def test_a_folder_that_stays_as_it_is_with_force(sources: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "hf"
    aprfmt.export_model(sources["apr"], out)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    with pytest.raises(CorruptError):
        aprfmt.convert_model(
            sources["gguf"], out, force=True, progress=lambda total: lambda n, label: touch(sources["gguf"])
        )
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_a_stamp_in_place(sources: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    path = sources["apr"]
    data = path.read_bytes()
    from aprfmt.formats import apr2_write

    laid_out = apr2_write.layout_from_model

    def layout(*given: object) -> object:
        touch(path)
        return laid_out(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(apr2_write, "layout_from_model", layout)
    with pytest.raises(CorruptError, match="it was written to"):
        aprfmt.stamp(path, in_place=True, license="MIT")
    assert path.read_bytes() == data
