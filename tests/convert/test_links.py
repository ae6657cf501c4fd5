"""Symbolic links that lead out of a model's folder: refused before anything is written, unless asked for."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import plain_models
import pytest

import aprfmt
from aprfmt.cli.main import run
from aprfmt.errors import AprError, ChangedError, RefusedError
from aprfmt.io import links
from aprfmt.io.source import Source
from aprfmt.running.prepared import prepare

SECRET = b"root:*:1:0:99999:7:::\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = plain_models.write_folder(tmp_path / "hf")
    (path / "assets").mkdir()
    (path / "assets" / "logo.png").write_bytes(b"png")
    (tmp_path / "secret").write_bytes(SECRET)
    return path


def outside(folder: Path, name: str) -> Path:
    """What a file of the folder becomes a link to, outside of it."""
    there = folder.parent / "elsewhere" / Path(name).name
    there.parent.mkdir(exist_ok=True)
    if (folder / name).exists():
        shutil.move(folder / name, there)
    else:
        there.write_bytes(SECRET)
    return there


NAMES = ("LICENSE", "notes.bin", "assets/logo.png", "config.json", "tokenizer.json", "model.safetensors")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("how", ["absolute", "relative", "chain"])
def test_a_link_that_leads_out_is_refused(folder: Path, tmp_path: Path, name: str, how: str) -> None:
    there, link = outside(folder, name), folder / name
    if how == "chain":
        (folder / "inner").symlink_to(there)
        link.symlink_to(os.path.relpath(folder / "inner", link.parent))
    else:
        link.symlink_to(there if how == "absolute" else os.path.relpath(there, link.parent))
    for plan in (True, False):
        for output, form in (("m.apr", None), ("out", "hf")):
            with pytest.raises(RefusedError, match="symlinks pointing outside the folder") as caught:
                aprfmt.convert_model(folder, tmp_path / output, format=form, plan=plan)
            assert repr(name) in caught.value.message or "'inner'" in caught.value.message
            assert str(there) in caught.value.message
            assert "--follow-links" in str(caught.value.hint)
            assert not (tmp_path / output).exists()
    assert aprfmt.convert_model(folder, tmp_path / "out", format="hf", follow_links=True).lossless
    assert (tmp_path / "out" / name).read_bytes() == there.read_bytes()


def test_links_inside_the_folder_and_a_folder_behind_a_link_are_quiet(folder: Path, tmp_path: Path) -> None:
    (folder / "LICENSE").write_bytes(b"MIT")
    (folder / "NOTICE").symlink_to("LICENSE")
    (folder / "assets" / "copy.png").symlink_to("../assets/logo.png")
    (tmp_path / "link").symlink_to(folder)
    report = aprfmt.import_model(tmp_path / "link", tmp_path / "m.apr")
    assert (report.lossless, report.losses, report.warnings) == (True, [], [])
    (tmp_path / "named.apr").symlink_to(tmp_path / "m.apr")
    assert aprfmt.convert_model(tmp_path / "named.apr", tmp_path / "out", format="hf").lossless


@pytest.mark.parametrize("form", ["gguf", "apr-shards"])
def test_later_parts_that_are_links_are_refused(folder: Path, tmp_path: Path, form: str) -> None:
    parts = tmp_path / "parts"
    parts.mkdir()
    target = parts / "m.gguf" if form == "gguf" else parts / "m"
    aprfmt.convert_model(folder, target, format=form, shard_size=200_000)
    first, *_, last = sorted(path for path in parts.rglob("*-*") if path.is_file())
    there = Path(shutil.move(last, tmp_path / "elsewhere"))
    last.symlink_to(there)
    source = first if form == "gguf" else target
    with pytest.raises(RefusedError, match="symlinks pointing outside the folder"):
        aprfmt.convert_model(source, tmp_path / "out.apr")
    assert aprfmt.convert_model(source, tmp_path / "out.apr", follow_links=True).lossless


@pytest.mark.parametrize("which", [0, 1])
def test_every_folder_of_a_merge_is_checked(folder: Path, tmp_path: Path, which: int) -> None:
    folders = [folder, Path(shutil.copytree(folder, tmp_path / "other"))]
    there = outside(folders[which], "config.json")
    (folders[which] / "config.json").symlink_to(there)
    words = ["merge", *map(str, folders), "--method", "linear", "-o", str(tmp_path / "m.gguf")]
    assert run(words) == 5
    assert not (tmp_path / "m.gguf").exists()
    assert run([*words, "--follow-links"]) == 0


def test_prune_checks_links(folder: Path, tmp_path: Path) -> None:
    (folder / "config.json").symlink_to(outside(folder, "config.json"))
    words = ["prune", str(folder), "--drop-layers", "0", "-o", str(tmp_path / "m.gguf")]
    assert run(words) == 5
    assert run([*words, "--follow-links"]) == 0


@pytest.mark.parametrize(
    "words",
    [
        *("stamp IN -o OUT --license MIT", "stamp IN -o OUT --license MIT --plan"),
        *("meta set IN rope_theta=20000.0 -o OUT", "sbom IN -o OUT", "sbom IN"),
    ],
)
@pytest.mark.parametrize("name", ["notes.bin", "tokenizer.json"])
def test_copies_and_documents_check_links(folder: Path, tmp_path: Path, words: str, name: str) -> None:
    (folder / name).symlink_to(outside(folder, name))
    line = words.replace("IN", str(folder)).replace("OUT", str(tmp_path / "out")).split()
    assert run(line) == 5
    assert not (tmp_path / "out").exists()
    assert run([*line, "--follow-links"]) == 0


def test_a_link_that_appears_while_a_folder_is_copied(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "LICENSE").write_text("mine")
    there = tmp_path / "secret"

    def no_links(*_: object) -> None:
        (folder / "LICENSE").unlink()
        (folder / "LICENSE").symlink_to(there)

    monkeypatch.setattr("aprfmt.convert.stamp.check_links", no_links)
    with pytest.raises(AprError):
        aprfmt.stamp(folder, tmp_path / "out", license="MIT")
    assert not (tmp_path / "out").exists()


def snapshot_of(folder: Path, tmp_path: Path) -> Path:
    """The folder as the hub's cache has it."""
    snapshot = tmp_path / "hub" / "models--org--name" / "snapshots" / ("a" * 40)
    blobs = snapshot.parents[1] / "blobs"
    blobs.mkdir(parents=True)
    for i, path in enumerate(sorted(p for p in folder.rglob("*") if p.is_file())):
        place = snapshot / path.relative_to(folder)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, blobs / str(i))
        place.symlink_to(os.path.relpath(blobs / str(i), place.parent))
    return snapshot


def test_the_cache_of_the_hub_is_quiet(folder: Path, tmp_path: Path) -> None:
    snapshot = snapshot_of(folder, tmp_path)
    report = aprfmt.import_model(snapshot, tmp_path / "m.apr")
    assert (report.lossless, report.losses) == (True, [])
    other = tmp_path / "hub" / "models--org--other" / "blobs"
    other.mkdir(parents=True)
    (other / "0").write_bytes(SECRET)
    (snapshot / "LICENSE").symlink_to("../../../models--org--other/blobs/0")
    with pytest.raises(RefusedError, match=r"'LICENSE' \(.*models--org--other/blobs/0\)"):
        aprfmt.import_model(snapshot, tmp_path / "n.apr")


def test_blobs_that_are_a_link_are_no_blobs(folder: Path, tmp_path: Path) -> None:
    snapshot = snapshot_of(folder, tmp_path)
    blobs = snapshot.parents[1] / "blobs"
    blobs.rename(tmp_path / "private")
    blobs.symlink_to(tmp_path / "private")
    with pytest.raises(RefusedError, match="symlinks pointing outside the folder"):
        aprfmt.import_model(snapshot, tmp_path / "m.apr")


@pytest.mark.parametrize("then", ["outside", "inside"])
def test_a_file_that_becomes_a_link_meanwhile_is_seen(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    """A link that is there when the file is opened, and gone when it is looked at."""
    license, aside = folder / "LICENSE", tmp_path / "aside"
    license.write_bytes(b"x" * len(SECRET))
    found = Source.open

    def swapped(path: Any) -> Source:
        if os.fspath(path) != str(license) or not aside.parent.exists() or aside.exists():
            return found(path)
        license.rename(aside)
        license.symlink_to(tmp_path / "secret")
        source = found(path)
        if then == "inside":
            license.unlink()
            shutil.copyfile(aside, license)
        return source

    monkeypatch.setattr(Source, "open", staticmethod(swapped))
    with pytest.raises(AprError) as caught:
        aprfmt.import_model(folder, tmp_path / "m.apr")
    assert isinstance(caught.value, RefusedError if then == "outside" else ChangedError)
    assert not (tmp_path / "m.apr").exists()


def test_what_was_opened_is_what_is_there(folder: Path, tmp_path: Path) -> None:
    path = folder / "config.json"
    with Source.open(path) as source:
        links.check_opened(folder, [path], [source])
        path.rename(tmp_path / "old.json")
        shutil.copyfile(tmp_path / "old.json", path)
        with pytest.raises(ChangedError):
            links.check_opened(folder, [path], [source])


def test_what_only_runs_here_may_follow_links(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("APR_CACHE", str(tmp_path / "cache"))
    there = outside(folder, "model.safetensors")
    (folder / "model.safetensors").symlink_to(there)
    assert prepare(folder).report is not None


def test_the_command(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "LICENSE").symlink_to(tmp_path / "secret")
    words = ["import", str(folder), "-o", str(tmp_path / "m.apr"), "--json"]
    assert run(words) == 5
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "refused"
    assert run([*words, "--follow-links"]) == 0
