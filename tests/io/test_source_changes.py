"""A file that changes while it is open: size, time, inode and path are compared with those at the open."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from aprfmt.errors import ChangedError, CorruptError, StorageError
from aprfmt.io.source import Source


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.write_bytes(b"0123456789")
    os.utime(path, ns=(0, 0))
    return path


def _replace(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(b"0123456789")
    os.utime(other, ns=(0, 0))
    other.replace(path)


def _rewrite(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(b"9876543210")


CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "shorter": (lambda path: os.truncate(path, 4), "it had 10 bytes, now has 4"),
    "longer": (lambda path: os.truncate(path, 11), "it had 10 bytes, now has 11"),
    "written": (_rewrite, "it was written to"),
    "touched": (lambda path: os.utime(path, ns=(0, 1)), "it was written to"),
    "replaced": (_replace, "it was replaced by another file"),
    "removed": (Path.unlink, "it no longer exists"),
}


@pytest.mark.parametrize("closed", [False, True], ids=["open", "closed"])
@pytest.mark.parametrize(("change", "how"), CHANGES.values(), ids=list(CHANGES))
def test_a_changed_file_is_noticed(file: Path, change: Callable[[Path], object], how: str, closed: bool) -> None:
    with Source.open(file) as source:
        source.check_unchanged()
        if closed:
            source.close()
        change(file)
        with pytest.raises(ChangedError, match="changed while it was read") as caught:
            source.check_unchanged()
    error = caught.value
    assert (error.code, error.exit_code, error.path) == ("changed", 4, str(file))
    assert isinstance(error, CorruptError)
    assert isinstance(error, StorageError)  # what is caught to judge a file lets it pass
    assert how in error.message
    assert error.hint == "run it again when no other process writes to the file"


def test_reading_and_new_modes_change_nothing(file: Path) -> None:
    with Source.open(file) as source:
        source.read(0, 10)
        source.view()
        file.chmod(0o600)
        file.with_name("link").hardlink_to(file)
        source.check_unchanged()


def test_a_relative_path_survives_another_folder(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(file.parent)
    with Source.open(file.name) as source:
        assert source.path == file.name
        monkeypatch.chdir("/")
        source.check_unchanged()


def test_a_link_to_another_file_is_a_change(file: Path) -> None:
    link, other = file.with_name("link"), file.with_name("other")
    other.write_bytes(b"0123456789")
    link.symlink_to(file)
    with Source.open(link) as source:
        source.check_unchanged()
        link.unlink()
        link.symlink_to(other)
        with pytest.raises(ChangedError, match="replaced by another"):
            source.check_unchanged()


def test_bytes_in_memory_never_change(tmp_path: Path) -> None:
    Source.from_bytes(b"abc", tmp_path / "absent").check_unchanged()


def test_a_file_that_shrinks_is_an_error_where_it_is_read(file: Path) -> None:
    with Source.open(file) as source:
        os.truncate(file, 4)
        assert source.read(0, 4) == b"0123"
        with pytest.raises(ChangedError, match="it shrank") as caught:
            source.read(2, 8)
    assert (caught.value.exit_code, caught.value.offset) == (4, 4)
