"""Several files that appear together or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from aprfmt.errors import ExistsError, StorageError
from aprfmt.io.sink import AtomicFolder


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
    link = os.link

    def fail(source: str, target: str) -> None:
        if target.endswith("c"):
            raise kind("disk")
        link(source, target)

    monkeypatch.setattr(os, "link", fail)
    monkeypatch.setattr(os, "rename", _failing(os.rename, kind))
    monkeypatch.setattr(os, "replace", _failing(os.replace, kind))
    with pytest.raises(StorageError if kind is OSError else kind):
        write(tmp_path, force=force)
    assert contents(tmp_path) == before


def _failing(rename: object, kind: type[BaseException]) -> object:
    """A rename that fails for `c`, as on a file system that fails altogether."""

    def call(source: str, target: str) -> None:
        if target.endswith("c"):
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
