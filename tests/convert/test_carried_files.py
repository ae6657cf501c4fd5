"""Files of a folder that belong to no model are carried up to a size, in an `.apr` and from folder to folder."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import aprfmt
from aprfmt.cli.main import main
from aprfmt.errors import ChangedError, UsageError
from aprfmt.formats import apr_metadata
from aprfmt.formats.apr_metadata import FILES_PREFIX, SOURCE_KEY

PRINT_PEAK = "\nprint(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')))"


def files(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def folder(tiny_model: Callable[[str], Any], tmp_path: Path) -> Path:
    path = tmp_path / "m"
    shutil.copytree(tiny_model("qwen2-untied")[0], path)
    (path / "assets").mkdir()
    (path / "assets" / "small.png").write_bytes(b"\x89PNG" * 10)
    (path / "assets" / "large.png").write_bytes(bytes(range(256)) * 100)
    (path / "empty.bin").write_bytes(b"")
    (path / ("d" * 200) / ("e" * 200)).mkdir(parents=True)
    (path / ("d" * 200) / ("e" * 200) / "deep.dat").write_bytes(b"deep")
    (path / "README.md").write_text("# A model\n")
    return path


def test_they_come_back_and_are_no_tensors(folder: Path, tmp_path: Path) -> None:
    with aprfmt.open(folder) as model:
        n_tensors = len(model.tensors)
    report = aprfmt.import_model(folder, tmp_path / "m.apr")
    assert report.lossless
    assert not report.losses
    assert report.tensor_count == n_tensors
    with aprfmt.open(tmp_path / "m.apr") as model:
        assert len(model.tensors) == n_tensors
        assert sorted(len(file.raw()) for file in model.files) == [0, 4, 40, 25600]
        assert model.metadata["total_size"] == sum(tensor.n_bytes for tensor in model.tensors.values())
    aprfmt.export_model(tmp_path / "m.apr", tmp_path / "back")
    assert files(tmp_path / "back") == files(folder)
    aprfmt.convert_model(folder, tmp_path / "copy", format="hf")
    assert files(tmp_path / "copy") == files(folder)


def test_a_gguf_beside_the_model_is_carried_with_its_digest(folder: Path, tmp_path: Path) -> None:
    aprfmt.export_model(folder, tmp_path / "m.gguf")
    shutil.move(tmp_path / "m.gguf", folder / "m-F32.gguf")
    report = aprfmt.import_model(folder, tmp_path / "m.apr", hash=True)
    assert (report.lossless, report.losses) == (True, [])
    assert aprfmt.export_model(tmp_path / "m.apr", tmp_path / "back", format="hf").proven
    assert files(tmp_path / "back") == files(folder)
    report = aprfmt.import_model(folder, tmp_path / "less.apr", hash=True, carry="50kB")
    assert not report.lossless
    assert report.losses[0].startswith("not carried: m-F32.gguf (")


def test_what_is_written_from_the_apr_keeps_them(folder: Path, tmp_path: Path) -> None:
    aprfmt.import_model(folder, tmp_path / "m.apr")
    aprfmt.convert_model(tmp_path / "m.apr", tmp_path / "parts", format="apr-shards", shard_size=100_000)
    assert len(list((tmp_path / "parts").glob("*.apr"))) > 1
    aprfmt.convert_model(tmp_path / "parts", tmp_path / "joined.apr")
    aprfmt.stamp(tmp_path / "m.apr", tmp_path / "stamped.apr", license="MIT")
    aprfmt.stamp(tmp_path / "m.apr", tmp_path / "other.apr", tokenizer=folder)
    aprfmt.quantize_model(tmp_path / "m.apr", tmp_path / "q.apr", "q8_0")
    aprfmt.convert_model(folder, tmp_path / "q2.apr", dtype="q8_0")
    aprfmt.convert_model(folder, tmp_path / "t.apr", tokenizer=folder)
    aprfmt.convert_model(tmp_path / "q.apr", tmp_path / "half.apr", dtype="f16")
    own = files(folder)
    names = [name for name in own if name.endswith((".png", ".dat", ".bin"))]
    for name in ("parts", "joined.apr", "stamped.apr", "other.apr", "q.apr", "q2.apr", "t.apr", "half.apr"):
        aprfmt.export_model(tmp_path / name, tmp_path / f"{name}-back", format="hf", dtype="f32")
        back = files(tmp_path / f"{name}-back")
        assert {n: back.get(n) for n in names} == {n: own[n] for n in names}, name
        assert own.keys() - {"README.md"} <= back.keys(), name
    whole = files(folder)
    for name in ("parts", "joined.apr"):
        aprfmt.export_model(tmp_path / name, tmp_path / f"{name}-exact", format="hf")
        assert files(tmp_path / f"{name}-exact") == whole
    aprfmt.export_model(tmp_path / "m.apr", tmp_path / "mlx", format="mlx")
    assert {n: files(tmp_path / "mlx").get(n) for n in names} == {n: own[n] for n in names}


def test_a_mix_keeps_what_the_config_says_beyond_the_language_model(folder: Path, tmp_path: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vision_config": {"depth": 3}}))
    report = aprfmt.import_model(folder, tmp_path / "q.apr", dtype="q8_0")
    assert not report.lossless
    with aprfmt.open(tmp_path / "q.apr") as model:
        assert {f["name"] for f in model.metadata[SOURCE_KEY]["files"]} == files(folder).keys() - {"model.safetensors"}
    report = aprfmt.export_model(tmp_path / "q.apr", tmp_path / "back", format="hf", dtype="f32")
    assert not report.lossless
    made = json.loads((tmp_path / "back" / "config.json").read_text())
    assert made["vision_config"] == {"depth": 3}
    assert made["dtype"] == "float32"
    again = aprfmt.export_model(tmp_path / "q.apr", tmp_path / "again", format="hf")
    assert not again.lossless
    assert (tmp_path / "again" / "model.safetensors").stat().st_size > 1000


def test_the_smallest_are_carried_up_to_the_size_and_the_rest_is_said(folder: Path, tmp_path: Path) -> None:
    for options, left in (
        ({"carry": 44}, ["assets/large.png"]),
        ({"carry": "43B"}, ["assets/large.png", "assets/small.png"]),
        ({"carry": 0}, ["assets/large.png", "assets/small.png", "d" * 200 + "/" + "e" * 200 + "/deep.dat"]),
    ):
        for plan in (True, False):
            report = aprfmt.import_model(folder, tmp_path / "m.apr", force=True, plan=plan, **options)
            assert not report.lossless
            (loss,) = report.losses
            assert all(f"{name} (" in loss for name in left)
            assert loss.endswith("in total; apr convert --carry 26kB carries all of them")
        back = tmp_path / f"back-{options['carry']}"
        aprfmt.export_model(tmp_path / "m.apr", back, format="hf")
        assert files(folder).keys() - files(back).keys() == set(left)
    assert aprfmt.import_model(folder, tmp_path / "m.apr", force=True, carry="26kB").lossless
    with pytest.raises(UsageError, match="'much' is not a valid size"):
        aprfmt.import_model(folder, tmp_path / "x.apr", carry="much")


def test_a_form_without_a_place_for_them_says_so(folder: Path, tmp_path: Path) -> None:
    aprfmt.import_model(folder, tmp_path / "m.apr")
    for source in (folder, tmp_path / "m.apr"):
        for name, label in (
            ("m.gguf", "a GGUF cannot hold files"),
            ("m.safetensors", "a safetensors file cannot hold other files"),
        ):
            losses = aprfmt.convert_model(source, tmp_path / name, force=True).losses
            assert [loss for loss in losses if loss.startswith("4 unrelated files of the folder dropped (")]
            assert [loss for loss in losses if loss.endswith(f"): {label}")]


def test_hidden_folders_outputs_and_what_is_no_file_are_left(folder: Path, tmp_path: Path) -> None:
    (folder / ".git").mkdir()
    (folder / ".git" / "HEAD").write_text("x")
    report = aprfmt.import_model(folder, folder / "m.apr")
    assert report.lossless
    size = (folder / "m.apr").stat().st_size
    assert aprfmt.import_model(folder, folder / "m.apr", force=True).lossless
    assert (folder / "m.apr").stat().st_size == size
    aprfmt.convert_model(folder, folder / "out", format="hf")
    assert "m.apr" in files(folder / "out")
    (folder / "gone.png").symlink_to("nowhere")
    (folder / "loop").symlink_to(folder, target_is_directory=True)
    (folder / "back\\slash").write_text("x")
    (folder / "/".join("x" * 60)).mkdir(parents=True)
    report = aprfmt.import_model(folder, tmp_path / "o.apr")
    assert not report.lossless
    (loss,) = report.losses
    assert loss.startswith("not carried: back\\slash, gone.png, loop and 1 more; unreadable, not a regular file")


def test_a_folder_that_cannot_be_read_is_named(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def scandir(path: str) -> Any:
        if Path(path) == folder / "assets":
            raise PermissionError(13, "Permission denied", path)
        return found(path)

    found = os.scandir
    monkeypatch.setattr(os, "scandir", scandir)
    report = aprfmt.import_model(folder, tmp_path / "m.apr")
    assert not report.lossless
    (loss,) = report.losses
    assert loss.startswith("not carried: assets; unreadable")


@pytest.mark.parametrize("name", ["back\\slash.md", "note\udcff.txt"])
def test_texts_with_names_that_cannot_be_stored_are_named(folder: Path, tmp_path: Path, name: str) -> None:
    (folder / name).write_text("x")
    for output, format in (("m.apr", None), ("out", "hf")):
        report = aprfmt.convert_model(folder, tmp_path / output, format=format)
        assert not report.lossless
        assert report.losses == [
            f"not carried: {name}; unreadable, not a regular file, or a name that cannot be stored"
        ]


@pytest.mark.parametrize("instead", ["nothing", "folder", "other"])
def test_a_file_that_is_gone_or_another_one_meanwhile_is_exit_4(folder: Path, tmp_path: Path, instead: str) -> None:
    def start(n_bytes: int) -> Callable[[int, str], None]:
        picture = folder / "assets" / "large.png"
        picture.unlink()
        if instead == "folder":
            picture.mkdir()
        if instead == "other":
            picture.write_bytes(bytes(25600))
        return lambda n, label: None

    with pytest.raises(ChangedError) as caught:
        aprfmt.convert_model(folder, tmp_path / "m.apr", progress=start)
    assert caught.value.path == str(folder / "assets" / "large.png")
    assert not (tmp_path / "m.apr").exists()


def test_files_whose_record_no_longer_fits_are_said_to_stay_behind(folder: Path, tmp_path: Path) -> None:
    aprfmt.import_model(folder, tmp_path / "m.apr")
    with aprfmt.open(tmp_path / "m.apr") as model:
        rest = {key: value for key, value in model.metadata.items() if key != SOURCE_KEY}
        aprfmt.rewrite_file(model, tmp_path / "edited.apr", metadata=apr_metadata.dump(rest))
    losses = aprfmt.export_model(tmp_path / "edited.apr", tmp_path / "out", format="hf").losses
    assert [
        loss for loss in losses if loss.startswith("4 unrelated files") and "source manifest does not match" in loss
    ]


def test_an_edited_folder_in_shards_has_one_index(folder: Path, tmp_path: Path) -> None:
    (folder / "README.md").unlink()  # a model card with the licence is written
    aprfmt.convert_model(folder, tmp_path / "shards", format="hf", shard_size=60_000)
    aprfmt.import_model(tmp_path / "shards", tmp_path / "m.apr")
    aprfmt.stamp(tmp_path / "m.apr", in_place=True, license="MIT")
    report = aprfmt.export_model(tmp_path / "m.apr", tmp_path / "out", format="hf")
    assert (tmp_path / "out" / "model.safetensors.index.json").is_file()
    assert report.output_bytes == sum(map(len, files(tmp_path / "out").values()))


def test_the_modules_of_an_encoder_stay_in_their_folders(carried_folder: Callable[[str], Path], tmp_path: Path) -> None:
    source = carried_folder("sentence_transformers")
    aprfmt.import_model(source, tmp_path / "m.apr")
    aprfmt.convert_model(source, tmp_path / "q.apr", dtype="q8_0")
    for number, start in enumerate((source, tmp_path / "m.apr", tmp_path / "q.apr")):
        back = tmp_path / str(number)
        aprfmt.convert_model(start, back, format="hf", dtype="f16")
        assert files(back).keys() == files(source).keys()
        with aprfmt.open(back / "2_Dense" / "model.safetensors") as model:
            assert {name: t.dtype for name, t in model.tensors.items()} == {
                "linear.weight": "F16",
                "linear.bias": "F16",
            }
        with aprfmt.open(back) as model:
            assert "2_Dense.linear.weight" in model.tensors


def test_two_aprs_with_another_picture_differ(folder: Path, tmp_path: Path) -> None:
    aprfmt.import_model(folder, tmp_path / "a.apr")
    (folder / "assets" / "small.png").write_bytes(b"\x89PNH" * 10)
    aprfmt.import_model(folder, tmp_path / "b.apr")
    found = aprfmt.diff(tmp_path / "a.apr", tmp_path / "b.apr")
    assert [(d.kind, d.name, d.what) for d in found.differences] == [
        ("metadata", SOURCE_KEY, "content"),
        ("tensor", FILES_PREFIX + "assets/small.png", "bytes"),
    ]


def test_the_command_takes_the_size(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as info:
        main(["import", str(folder), "-o", str(tmp_path / "m.apr"), "--carry", "100", "--json"])
    assert not info.value.code
    report = json.loads(capsys.readouterr().out)
    assert report["lossless"] is False
    assert "assets/large.png" in report["losses"][0]


@pytest.mark.turns(first=False)
def test_a_large_file_takes_no_memory(folder: Path, tmp_path: Path) -> None:
    with open(folder / "film.mp4", "wb") as file:
        file.truncate(400 << 20)
    code = "import sys, aprfmt; aprfmt.convert_model(sys.argv[1], sys.argv[2], carry='2GB', fsync=False)" + PRINT_PEAK
    for source, target in (("m", "m.apr"), ("m.apr", "back")):
        command = [sys.executable, "-c", code, str(tmp_path / source), str(tmp_path / target)]
        run = subprocess.run(command, capture_output=True, text=True, check=True)
        assert int(run.stdout) * 1024 < 220e6
    assert (tmp_path / "back" / "film.mp4").stat().st_size == 400 << 20
