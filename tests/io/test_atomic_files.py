"""Several files that appear together or not at all."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from aprfmt.errors import ExistsError, NotFoundError, RefusedError, StorageError
from aprfmt.io.sink import AtomicFile, AtomicFolder, check_target
from aprfmt.io.switch import Switch
from aprfmt.io.temporary import sweep


def write(folder: Path, *, force: bool = False) -> None:
    before = {path.name for path in folder.iterdir()}
    with AtomicFolder(folder, force=force, shared=True) as temporary:
        for name in ("a", "b", "c"):
            (temporary / name).write_text(f"new {name}")
        assert {path.name for path in folder.iterdir()} - {temporary.name} == before


def contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


NEW = {name: f"new {name}" for name in "abc"}


def test_all_appear(tmp_path: Path) -> None:
    write(tmp_path)
    assert contents(tmp_path) == NEW


def test_force_replaces(tmp_path: Path) -> None:
    (tmp_path / "b").write_text("old")
    (tmp_path / "d").write_text("other")
    write(tmp_path, force=True)
    assert contents(tmp_path) == {**NEW, "d": "other"}


def test_none_appears_when_one_exists(tmp_path: Path) -> None:
    (tmp_path / "b").write_text("old")
    with pytest.raises(ExistsError):
        write(tmp_path)
    assert contents(tmp_path) == {"b": "old"}


def test_none_appears_after_an_exception(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), AtomicFolder(tmp_path, shared=True) as temporary:  # noqa: PT012
        (temporary / "a").write_text("new")
        raise KeyboardInterrupt
    assert contents(tmp_path) == {}


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("kind", [OSError, KeyboardInterrupt])
def test_what_was_there_is_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, force: bool, kind: type[BaseException]
) -> None:
    if force:
        for name in "ab":
            (tmp_path / name).write_text(f"old {name}")
    before = contents(tmp_path)
    monkeypatch.setattr(os, "link", _failing(os.link, kind))
    monkeypatch.setattr(os, "rename", _failing(os.rename, kind))
    monkeypatch.setattr(os, "replace", _failing(os.replace, kind))
    with pytest.raises(StorageError if kind is OSError else kind):
        write(tmp_path, force=force)
    assert contents(tmp_path) == before


def _failing(rename: object, kind: type[BaseException]) -> object:
    """A rename that fails for `c`, as on a file system that fails altogether."""

    def call(source: str, target: str) -> None:
        if target.endswith("/c"):
            raise kind("disk")
        rename(source, target)  # type: ignore[operator]

    return call


def test_a_file_system_without_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(source: str, target: str) -> None:
        raise OSError("no links here")

    monkeypatch.setattr(os, "link", fail)
    write(tmp_path)
    assert contents(tmp_path) == NEW
    with pytest.raises(ExistsError):
        write(tmp_path)


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), AtomicFolder(tmp_path / "x", shared=True):
        pass


def tree(folder: Path) -> dict[str, str]:
    return {str(p.relative_to(folder)): p.read_text() for p in folder.rglob("*") if p.is_file()}


OLD = {"w-1.bin": "old", "w-2.bin": "old", "sub/t.txt": "old", "sub/u.txt": "old", "notes": "mine"}
REWRITTEN = {"old/w-1.bin": "new", "old/sub/t.txt": "new", "old/config": "new", "old/notes": "mine"}


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A folder that an earlier run wrote."""
    for name, text in OLD.items():
        path = tmp_path / "old" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "old"


def rewrite(folder: Path, *, force: bool = True) -> None:
    with AtomicFolder(folder, force=force, stale=("w-*.bin", "sub/*.txt")) as temporary:
        (temporary / "sub").mkdir()
        for name in ("w-1.bin", "sub/t.txt", "config"):
            (temporary / name).write_text("new")


def test_a_new_folder_appears_whole(tmp_path: Path) -> None:
    rewrite(tmp_path / "new", force=False)
    assert tree(tmp_path) == {"new/w-1.bin": "new", "new/sub/t.txt": "new", "new/config": "new"}


def test_an_old_folder_keeps_what_is_not_ours_and_loses_what_is_stale(old: Path) -> None:
    with pytest.raises(ExistsError):
        rewrite(old, force=False)
    assert tree(old) == OLD
    rewrite(old)
    assert tree(old.parent) == REWRITTEN


@pytest.fixture
def no_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system where two folders cannot be exchanged."""

    def refuse(a: str, b: str) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr("aprfmt.io.sink.exchange", refuse)


@pytest.mark.usefixtures("no_exchange")
@pytest.mark.parametrize("name", ["config", "sub/t.txt", "w-1.bin", "w-2.bin"])
def test_an_old_folder_is_put_back_when_one_file_fails(name: str, old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(call: Callable[..., None]) -> Callable[..., None]:
        def wrapped(*paths: str, **options: int) -> None:
            comes = paths[-1] == str(old / name) and ".replaced" not in paths[0]
            goes = paths[0] == str(old / name) and name == "w-2.bin"
            if comes or goes:
                raise OSError(5, "Input/output error")
            call(*paths, **options)

        return wrapped

    for function in ("link", "rename", "replace"):
        monkeypatch.setattr(os, function, failing(getattr(os, function)))
    with pytest.raises(StorageError) as caught:
        rewrite(old)
    assert caught.value.path == str(old)
    assert tree(old.parent) == {f"old/{name}": text for name, text in OLD.items()}


@pytest.mark.usefixtures("no_exchange")
def test_what_cannot_be_put_back_stays_for_the_next_run(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", _raising)
        patch.setattr(Switch, "_back", _raising)
        with pytest.raises(StorageError):
            rewrite(old)
    left = {Path(name).name: text for name, text in tree(old).items() if ".replaced" in name}
    assert left == {"w-1.bin": "old", "w-2.bin": "old", "t.txt": "old", "u.txt": "old"}
    monkeypatch.setattr("aprfmt.io.temporary.is_running", lambda process: False)
    sweep(old)
    assert tree(old.parent) == REWRITTEN


def _raising(*paths: object) -> None:
    raise OSError(5, "Input/output error")


def test_errors_inside_name_the_target(tmp_path: Path) -> None:
    with pytest.raises(RefusedError) as caught, AtomicFolder(tmp_path / "new") as temporary:
        raise RefusedError("no", path=temporary / "sub" / "a")
    assert caught.value.path == str(tmp_path / "new" / "sub" / "a")
    with pytest.raises(RefusedError) as caught, AtomicFile(tmp_path / "f") as sink:
        raise RefusedError("no", path=sink.temporary)
    assert caught.value.path == str(tmp_path / "f")
    assert list(tmp_path.iterdir()) == []


def test_permissions_are_those_of_any_new_file(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        with AtomicFile(tmp_path / "f") as sink:
            sink.write(b"x")
        rewrite(tmp_path / "d", force=False)
    finally:
        os.umask(before)
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("f", "d")]
    assert modes == [0o640, 0o750]


def test_a_working_folder_that_is_gone_is_an_error_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    for call in (lambda: check_target("x", [], False), lambda: AtomicFile("x"), lambda: AtomicFolder("x")):
        with pytest.raises(NotFoundError):
            call()
