"""A switch that a process did not end: completed by the next run, unless somebody else has put something there."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from aprfmt.errors import RefusedError
from aprfmt.io.signature import identity, sign
from aprfmt.io.sink import AtomicFile, AtomicFolder
from aprfmt.io.switch import Switch
from aprfmt.io.temporary import scratch_folder, sweep

OLD = {"m-1": "old", "m-2": "old", "m-3": "old", "notes": "mine"}
NEW = {"m-1": "new", "m-2": "new", "notes": "mine"}


class KilledError(BaseException):
    """What a SIGKILL would be."""


def tree(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in OLD.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def begin(folder: Path, monkeypatch: pytest.MonkeyPatch, moves: int, *, force: bool = True) -> None:
    """A process replaces m-1 and m-2, removes m-3, and dies after so many renames or links."""
    left = moves

    def counted(call: Callable[..., None]) -> Callable[..., None]:
        def wrapped(source: str, target: str) -> None:
            nonlocal left
            if not left:
                raise KilledError
            left -= 1
            call(source, target)

        return wrapped

    with monkeypatch.context() as patch:
        for name in ("rename", "replace", "link"):
            patch.setattr(os, name, counted(getattr(os, name)))
        patch.setattr(Switch, "_back", lambda self: (_ for _ in ()).throw(KilledError))
        with pytest.raises(KilledError):
            write(folder, force=force)
    monkeypatch.setattr("aprfmt.io.temporary.is_running", lambda process: False)


@pytest.fixture(autouse=True)
def secret() -> None:
    """What is made once is not counted."""
    assert sign("x", b"")


def write(folder: Path, *, force: bool) -> None:
    with AtomicFolder(folder, shared=True, force=force, stale=("m-3",), last="m-1") as temporary:
        for name in ("m-1", "m-2"):
            (temporary / name).write_text("new")


@pytest.mark.parametrize("moves", range(5))
def test_it_is_completed(folder: Path, monkeypatch: pytest.MonkeyPatch, moves: int) -> None:
    begin(folder, monkeypatch, moves)
    found = {name: text for name, text in tree(folder).items() if ".tmp" not in name and name.startswith("m-")}
    assert len(set(found.values())) <= 1  # never both old and new
    assert found.keys() in ({"m-1", "m-2", "m-3"}, {"m-2", "m-3"}, {"m-3"}, set(), {"m-2"})
    sweep(folder)
    assert tree(folder) == NEW


def test_it_is_completed_in_a_folder_that_a_link_leads_to(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    begin(folder, monkeypatch, 2)
    link = tmp_path_factory.mktemp("links") / "link"
    link.symlink_to(folder)
    sweep(link)
    assert tree(folder) == NEW


def test_new_files_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin(tmp_path, monkeypatch, 1, force=False)
    assert (tmp_path / "m-2").read_text() == "new"
    sweep(tmp_path)
    assert tree(tmp_path) == {"m-1": "new", "m-2": "new"}


def test_a_link_that_was_made_but_not_taken_note_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin(tmp_path, monkeypatch, 1, force=False)
    assert os.path.samefile(tmp_path / "m-2", begun(tmp_path) / "m-2")
    sweep(tmp_path)
    assert tree(tmp_path) == {"m-1": "new", "m-2": "new"}


def test_what_somebody_else_has_put_there_stays(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin(folder, monkeypatch, 2)
    (folder / "m-1").write_text("another")
    before = tree(folder)
    sweep(folder)
    assert tree(folder) == before  # a part of the new set is still to come


def test_a_later_output_puts_it_out_of_date(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin(folder, monkeypatch, 2)
    for name in ("m-1", "m-2"):
        (folder / name).write_text("later")
    sweep(folder)
    assert tree(folder) == {"m-1": "later", "m-2": "later", "m-3": "old", "notes": "mine"}


@pytest.mark.skipif(os.geteuid() != 0, reason="makes files of another user")
def test_another_users_record_is_not_followed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin(folder, monkeypatch, 2)
    (record,) = folder.glob(".*.tmp/.switch")
    os.chown(record, 1234, 1234)
    before = tree(folder)
    sweep(folder)
    assert tree(folder) == before
    os.chown(record, 0, 0)
    folder.chmod(0o1777)
    os.chown(record.parent, 1234, 1234)
    sweep(folder)
    assert tree(folder) == before


def begun(folder: Path) -> Path:
    (path,) = folder.glob(".*.tmp")
    return path


def refused(folder: Path, why: str) -> None:
    """Nothing is moved or removed, and the user hears of it."""
    before = tree(folder)
    with pytest.raises(RefusedError, match=why) as caught:
        sweep(folder)
    assert caught.value.path == str(begun(folder))
    assert caught.value.hint
    assert shlex.quote(str(begun(folder))) in caught.value.hint
    assert tree(folder) == before


# --- what is not ours ---


def test_a_planted_folder_moves_and_removes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an archive holds it that was unpacked here: right in all but the signature."""
    home = tmp_path / "home"
    planted = home / f".m.{'0' * 16}-1-1-01234567.tmp"
    for place in (planted, planted.with_name(f".m.{'0' * 16}-1-1-{'0' * 24}.tmp")):
        (place / ".ssh").mkdir(parents=True)
        (place / ".bashrc").write_text("evil")
        (place / ".ssh" / "authorized_keys").write_text("evil")
        values = {
            "new": [".bashrc", ".ssh/authorized_keys"],
            "old": {".bashrc": [0, 0], "notes": [0, 0]},
            "force": True,
        }
        (place / ".switch").write_text(json.dumps(values))
        with (place / "big").open("w") as file:
            file.write("precious")
    folders = [identity(os.stat(home))[0], identity(os.stat(place))[0]]
    names = (".bashrc", ".ssh/authorized_keys")
    values |= {"folders": folders, "new": {name: identity(os.stat(place / name)) for name in names}, "old": {}}
    (place / ".switch").write_text("0" * 16 + "\n" + json.dumps(values))
    (home / ".ssh").mkdir()
    for name in (*names, "notes"):
        (home / name).write_text("mine")
    monkeypatch.setattr("aprfmt.io.temporary._ABANDONED_S", -60)
    before = tree(home)
    with AtomicFile(home / "m.apr") as sink:
        sink.write(b"x")
    assert tree(home) == {**before, "m.apr": "x"}


def test_a_record_that_was_changed_moves_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin(folder, monkeypatch, 2)
    record = begun(folder) / ".switch"
    record.write_text(record.read_text().replace("m-1", "n-1"))
    refused(folder, "damaged")
    record.write_text("[]")
    refused(folder, "damaged")


def test_a_record_that_is_not_complete_has_moved_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin(folder, monkeypatch, 0)
    record = begun(folder) / ".switch"
    (begun(folder) / ".replaced").rmdir()
    record.write_bytes(record.read_bytes()[:-1])
    sweep(folder)
    assert tree(folder) == OLD


@pytest.mark.parametrize("moves", range(5))
def test_a_copy_of_the_folder_is_left_to_its_user(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory, moves: int
) -> None:
    begin(folder, monkeypatch, moves)
    copy = tmp_path_factory.mktemp("copies") / "copy"
    shutil.copytree(folder, copy)
    refused(copy, "a copy")
    sweep(folder)
    assert tree(folder) == NEW


def test_a_temporary_folder_that_was_renewed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin(folder, monkeypatch, 2)
    path = begun(folder)
    path.rename(folder / "first")
    shutil.copytree(folder / "first", path)
    refused(folder, "a copy")


def test_a_new_file_that_is_another_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin(folder, monkeypatch, 2)
    (begun(folder) / "m-1").write_text("evil")
    refused(folder, "m-1 in it was modified")


def test_a_file_that_was_to_go_and_is_another_one_stays(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin(folder, monkeypatch, 2)
    (folder / "m-3").write_text("mine, written since")
    sweep(folder)
    assert tree(folder) == {**NEW, "m-3": "mine, written since"}


def test_a_link_that_came_since_leads_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")

    def refuse(*paths: str) -> None:
        raise KilledError

    with monkeypatch.context() as patch:
        patch.setattr(Switch, "forward", refuse)
        patch.setattr(Switch, "_back", refuse)
        with pytest.raises(KilledError), AtomicFolder(tmp_path, shared=True) as temporary:  # noqa: PT012
            (temporary / "sub").mkdir()
            (temporary / "sub" / "x").write_text("new")
    monkeypatch.setattr("aprfmt.io.temporary.is_running", lambda process: False)
    (tmp_path / "sub").symlink_to(elsewhere)
    refused(tmp_path, "a symlink points outside")
    assert not list(elsewhere.iterdir())


def test_a_mounted_disk_in_what_was_left_stays(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin(folder, monkeypatch, 4)
    monkeypatch.setattr("aprfmt.io.temporary.is_mounted", lambda path: path == os.path.realpath(begun(folder)))
    sweep(folder)
    assert begun(folder).is_dir()


def test_folders_of_killed_processes_are_removed_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    code = (
        "import os, pathlib, signal\nfrom aprfmt.io.temporary import scratch_folder\n"
        "with scratch_folder('qa') as folder:\n"
        "    pathlib.Path(folder, 'big').write_bytes(b'x')\n    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=False)
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".apr-qa.")
    (tmp_path / "somebody's").touch()
    with scratch_folder("imatrix") as folder, scratch_folder("qa") as another:
        Path(folder, "x").touch()
        assert {path.name for path in tmp_path.iterdir()} == {"somebody's", Path(folder).name, Path(another).name}
    assert [path.name for path in tmp_path.iterdir()] == ["somebody's"]
