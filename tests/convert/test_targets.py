"""Where an output may go: never over a device, a pipe or something of another kind."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

import aprfmt
from aprfmt.cli.main import run
from aprfmt.convert.targets.base import find_target
from aprfmt.errors import RefusedError, UnknownFormatError, UsageError


def test_a_pipe_is_not_replaced_even_by_force(tiny_gguf: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(RefusedError, match="not a regular file"):
        aprfmt.import_model(tiny_gguf, tmp_path / "pipe", force=True)
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


def test_a_folder_is_no_file_and_a_file_no_folder(tiny_gguf: Path, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("x")
    with pytest.raises(RefusedError, match="not a regular file"):
        aprfmt.import_model(tiny_gguf, tmp_path / "folder", force=True)
    with pytest.raises(RefusedError, match="not a folder"):
        aprfmt.export_model(tiny_gguf, tmp_path / "file", format="hf", force=True)
    assert (tmp_path / "file").read_text() == "x"


def test_a_pipe_is_no_model(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UnknownFormatError, match="a pipe, not a regular file") as caught:
        aprfmt.open(tmp_path / "pipe")
    assert "write it to a file first" in str(caught.value.hint)


@pytest.mark.parametrize("words", [["inspect", "-"], ["convert", "-", "-o", "x.gguf"], ["qa", "-"], ["lint", "-"]])
def test_standard_input_is_no_model(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(words) == 2
    text = capsys.readouterr().err
    assert "a model is not read from standard input" in text
    assert "write it to a file first: COMMAND > model.gguf" in text
    assert not list(tmp_path.iterdir())


def test_a_file_called_minus_is_read(tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "-").write_bytes(tiny_gguf.read_bytes())
    monkeypatch.chdir(tmp_path)
    with aprfmt.open("-") as model:
        assert model.format == "gguf"


@pytest.mark.parametrize(
    ("name", "target"),
    [("a.apr", "apr"), ("a.GGUF", "gguf"), ("a.safetensors", "safetensors"), ("folder", "hf"), ("smollm2-v1.5", "hf")],
)
def test_the_suffix_names_the_format(name: str, target: str) -> None:
    assert find_target(name).name == target


@pytest.mark.parametrize("name", ["a.ggfu", "a.bin", "a.safetensor", "a.onnx"])
def test_a_suffix_of_no_format_is_a_slip(name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="suffix"):
        find_target(tmp_path / name)
    (tmp_path / name).mkdir()
    assert find_target(tmp_path / name).name == "hf"
    assert find_target(tmp_path / name, "GGUF").name == "gguf"


def test_own_keys_cannot_be_stamped(tiny_gguf: Path, tmp_path: Path) -> None:
    aprfmt.import_model(tiny_gguf, tmp_path / "m.apr")
    with pytest.raises(UsageError, match="cannot be edited"):
        aprfmt.stamp(tmp_path / "m.apr", tmp_path / "s.apr", set={"aprfmt.tensors": {}})


@pytest.mark.parametrize(
    ("format", "shard_size"), [("gguf", "60KB"), ("hf", "60KB"), ("mlx", None), ("apr-shards", "60KB")]
)
def test_the_names_of_a_plan_are_those_of_the_files(
    format: str, shard_size: str | None, tiny_model: Callable[[str], tuple[Path, object]], tmp_path: Path
) -> None:
    source, dst = tiny_model("qwen2-untied")[0], tmp_path / ("m.gguf" if format == "gguf" else "out")
    plan = aprfmt.convert_model(source, dst, format=format, shard_size=shard_size, plan=True)
    assert not list(tmp_path.iterdir())
    done = aprfmt.convert_model(source, dst, format=format, shard_size=shard_size)
    assert (plan.output, plan.files) == (done.output, done.files)
    assert (len(done.files) > 1) == (format == "gguf")
    assert all(Path(file).is_file() for file in done.files)
    with aprfmt.open(done.output) as model:
        made = {t.name: (t.dtype, list(t.shape), t.n_bytes) for t in model.tensors.entries}
    assert {t["name"]: (t["dtype"], t["shape"], t["size_bytes"]) for t in plan.tensors} == made
