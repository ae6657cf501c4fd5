"""A crafted package writes no name that other programs act on; a folder that holds one says what is not carried."""

from __future__ import annotations

import base64
import json
import zlib
from pathlib import Path
from typing import Any

import plain_models
import pytest

import aprfmt
from aprfmt.cli.main import run
from aprfmt.errors import RefusedError
from aprfmt.formats.apr_metadata import SOURCE_KEY

ATTACKS = (".git/config", ".m.0123456789abcdef-1-1-01234567.tmp/.switch", "con", "CONFIG.JSON", ".envrc")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return plain_models.write_folder(tmp_path / "hf")


def crafted(folder: Path, path: Path, *names: str) -> Path:
    """The `.apr` of a folder that gives back further files of these names."""
    aprfmt.import_model(folder, path)
    with aprfmt.open(path) as model:
        metadata = json.loads(json.dumps(dict(model.metadata)))
        tensors: dict[str, Any] = {
            n: aprfmt.RawTensor(t.dtype, t.shape, bytes(t.raw())) for n, t in model.tensors.items()
        }
    record = metadata[SOURCE_KEY]
    text = b"[core]\n"
    literals = zlib.decompress(base64.b64decode(record["literals"])) + text * len(names)
    record["literals"] = base64.b64encode(zlib.compress(literals)).decode()
    record["files"] += [{"name": name, "size": len(text), "segments": [["b", len(text)]]} for name in names]
    aprfmt.save_file(tensors, path, metadata, force=True)
    return path


@pytest.mark.parametrize("name", ATTACKS)
@pytest.mark.parametrize("form", ["hf", "mlx"])
def test_a_crafted_package_writes_nothing(folder: Path, tmp_path: Path, name: str, form: str) -> None:
    package = crafted(folder, tmp_path / "m.apr", name)
    for options in ({}, {"plan": True}, {"dtype": "f16"}):
        if form == "mlx" and "dtype" in options:
            continue
        with pytest.raises(RefusedError, match="the model would write"):
            aprfmt.export_model(package, tmp_path / "out", format=form, **options)
    assert not (tmp_path / "out").exists()
    aprfmt.export_model(package, tmp_path / "m.gguf")


def test_what_is_allowed_is_written(folder: Path, tmp_path: Path) -> None:
    package = crafted(folder, tmp_path / "m.apr", ".envrc", "CONFIG.JSON")
    aprfmt.export_model(package, tmp_path / "out", format="hf", allow_names=True)
    assert (tmp_path / "out" / ".envrc").read_bytes() == b"[core]\n"


@pytest.mark.parametrize("name", ATTACKS)
def test_validate_fails_and_names_it(
    folder: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["validate", str(crafted(folder, tmp_path / "good.apr")), "--strict"]) == 0
    capsys.readouterr()
    assert run(["validate", str(crafted(folder, tmp_path / "m.apr", name)), "--strict", "--json"]) == 5
    found = json.loads(capsys.readouterr().out)
    (check,) = [check for check in found["checks"] if check["status"] == "fail"]
    assert check["id"] == "record.names"
    assert repr(name) in check["message"]
    assert found["score"] < 100


def test_of_two_spellings_the_usual_one_is_carried(folder: Path, tmp_path: Path) -> None:
    for name in ("README.md", "readme.md", "CONFIG.json"):
        (folder / name).write_text(name)
    aprfmt.convert_model(folder, tmp_path / "out", format="hf")
    left = {path.name for path in folder.iterdir()} - {path.name for path in (tmp_path / "out").iterdir()}
    assert left == {"readme.md", "CONFIG.json"}


def test_an_ordinary_repository_comes_back_whole(folder: Path, tmp_path: Path) -> None:
    for name in (".gitattributes", ".gitignore", "modeling_x.py", "assets/.gitkeep"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("*.bin filter=lfs\n")
    (folder / ".git").mkdir()
    (folder / ".git" / "config").write_text("x")
    report = aprfmt.import_model(folder, tmp_path / "m.apr")
    assert (report.lossless, report.losses) == (True, [])
    aprfmt.export_model(tmp_path / "m.apr", tmp_path / "back", format="hf")
    assert (tmp_path / "back" / "assets" / ".gitkeep").exists()
    assert (tmp_path / "back" / ".gitattributes").read_bytes() == b"*.bin filter=lfs\n"


@pytest.mark.parametrize("form", ["apr", "hf"])
def test_what_is_not_carried_is_named(folder: Path, tmp_path: Path, form: str) -> None:
    for name in (".envrc", "conftest.py", "notes.md", "NOTES.md", ".github/x.yml"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(name)
    output = tmp_path / ("m.apr" if form == "apr" else "out")
    report = aprfmt.convert_model(folder, output, format=form)
    assert not report.lossless
    (loss,) = report.losses
    assert loss.startswith("not carried: '.envrc' (other programs read hidden files), '.github' (")
    assert loss.endswith("and 1 more; --allow-names carries them")
    back = tmp_path / "back"
    aprfmt.convert_model(output, back, format="hf")
    assert {".envrc", "conftest.py", "NOTES.md", ".github"} & {path.name for path in back.iterdir()} == set()
    assert (back / "notes.md").exists()
    report = aprfmt.convert_model(folder, output, format=form, force=True, allow_names=True)
    assert (report.lossless, report.losses) == (True, [])
    aprfmt.convert_model(output, back, format="hf", force=True, allow_names=True)
    assert {path.relative_to(back) for path in back.rglob("*")} == {
        path.relative_to(folder) for path in folder.rglob("*")
    }
