"""A switch that a process did not end: completed by the next run, unless somebody else has put something there."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from aprfmt.io.sink import AtomicFolder
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
    (inside,) = tmp_path.glob(".*.tmp")
    os.link(tmp_path / "m-2", inside / "m-2")
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


@pytest.mark.parametrize("name", ["/etc/x", "../x", "a/../../x"])
def test_a_record_names_files_of_the_folder_only(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    begin(folder, monkeypatch, 2)
    (record,) = folder.glob(".*.tmp/.switch")
    record.write_text(record.read_text().replace("m-1", name))
    before = tree(folder)
    sweep(folder)
    assert tree(folder) == before


def test_a_record_does_not_lead_out_of_the_folder_by_links(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    begin(folder, monkeypatch, 0)
    (record,) = folder.glob(".*.tmp/.switch")
    (folder / "link").symlink_to(elsewhere)
    (record.parent / "link").mkdir()
    (record.parent / "link" / "x").write_text("trap")
    record.write_text('{"new": ["link/x"], "old": {}, "force": true}')
    sweep(folder)
    (record.parent / ".replaced").rmdir()
    (record.parent / ".replaced").symlink_to(elsewhere)
    (record.parent / "fresh").write_text("new")
    record.write_text('{"new": ["fresh"], "old": {"notes": [4, 0]}, "force": true}')
    sweep(folder)
    assert not list(elsewhere.iterdir())


@pytest.mark.parametrize("text", ["[]", "{}", "1", '{"new": [1], "old": {}, "force": true}', '{"new": 1, "old": 2}'])
def test_a_record_of_something_else_is_left_alone(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    begin(folder, monkeypatch, 2)
    (record,) = folder.glob(".*.tmp/.switch")
    record.write_text(text)
    before = tree(folder)
    sweep(folder)
    assert tree(folder) == before


def test_a_record_that_is_not_complete_has_moved_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin(folder, monkeypatch, 0)
    (record,) = folder.glob(".*.tmp/.switch")
    record.write_bytes(record.read_bytes()[:-1])
    sweep(folder)
    assert tree(folder) == OLD


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
