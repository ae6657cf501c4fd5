"""The cache on the disk: for one user, compared with a checksum, never trimmed under somebody who uses it."""

from __future__ import annotations

import errno
import gc
import os
import re
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from aprfmt.errors import ChecksumError, StorageError, storage_errors
from aprfmt.io.cache import CacheFolder
from aprfmt.io.sink import check_space

DATA = b"weights" * 1000


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CacheFolder:
    monkeypatch.setenv("APR_CACHE", str(tmp_path / "cache"))
    return CacheFolder("exports")


def write(path: Path) -> None:
    path.write_bytes(DATA)


def refuse(path: Path) -> None:
    raise AssertionError("it is there already")


@contextmanager
def umask(mask: int) -> Iterator[None]:
    old = os.umask(mask)
    try:
        yield
    finally:
        os.umask(old)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_nobody_else_reads_it(cache: CacheFolder) -> None:
    with umask(0):
        entry = cache.entry("a.gguf", write)
    assert entry.made
    assert [mode(path) for path in (cache.path.parent, cache.path, entry.path)] == [0o700, 0o700, 0o600]
    assert mode(cache.path / "a.gguf.lock") == 0o600


def test_an_open_folder_of_ours_is_closed(cache: CacheFolder) -> None:
    cache.path.mkdir(parents=True)
    cache.path.chmod(0o777)
    cache.entry("a.gguf", write)
    assert mode(cache.path) == 0o700


@pytest.mark.parametrize("bits", [0o777, 0o770, 0o702])
def test_files_that_others_could_write_are_not_used(cache: CacheFolder, bits: int) -> None:
    cache.entry("a.gguf", write).close()
    cache.path.chmod(bits)
    for _ in range(2):
        with pytest.raises(StorageError, match="other users could write to the cache") as caught:
            cache.entry("a.gguf", refuse)
    assert str(caught.value.hint).startswith(f"rm -r {cache.path}, or set APR_CACHE=")
    assert mode(cache.path) == bits


def test_it_is_found_again(cache: CacheFolder) -> None:
    first = cache.entry("a.gguf", write)
    again = cache.entry("a.gguf", refuse)
    assert (again.made, again.path) == (False, first.path)
    again.confirm()
    first.confirm()


def flip(path: Path) -> None:
    path.write_bytes(DATA[:-1] + b"!")


@pytest.mark.parametrize("damage", [flip, lambda path: path.write_bytes(DATA[:-1]), Path.unlink])
def test_a_damaged_file_is_made_anew(cache: CacheFolder, damage: Callable[[Path], None]) -> None:
    cache.entry("a.gguf", write).close()
    damage(cache.path / "a.gguf")
    if damage is flip:
        with pytest.raises(ChecksumError, match="damaged") as caught:
            cache.entry("a.gguf", refuse).confirm()
        assert (caught.value.exit_code, caught.value.hint) == (4, "run it again: the file is recreated")
    entry = cache.entry("a.gguf", write)
    assert (entry.made, entry.path.read_bytes()) == (True, DATA)


@pytest.mark.parametrize("record", [b"", b"{", b"[]", b'{"size":"7000","crc32":"0"}', b'{"size":7000}', b"x" * 9999])
def test_a_file_without_a_record_is_not_used(cache: CacheFolder, record: bytes) -> None:
    cache.entry("a.gguf", write).close()
    (cache.path / "a.gguf.lock").write_bytes(record)
    assert cache.entry("a.gguf", write).made


def test_what_nobody_holds_is_in_use_no_more(cache: CacheFolder) -> None:
    gc.disable()
    try:
        cache.entry("a.gguf", write)
        assert cache.trim(0) == [cache.path / "a.gguf"]
    finally:
        gc.enable()


def test_a_failure_leaves_nothing_that_is_used(cache: CacheFolder) -> None:
    def half(path: Path) -> None:
        path.write_bytes(DATA[:10])
        raise StorageError("disk full")

    with pytest.raises(StorageError, match="disk full"):
        cache.entry("a.gguf", half)
    assert cache.entry("a.gguf", write).made


@pytest.mark.parametrize("is_checked", [False, True])
def test_a_full_disk_of_the_cache_names_its_variable(cache: CacheFolder, tmp_path: Path, is_checked: bool) -> None:
    def check(path: Path) -> None:
        check_space(path.parent, 1 << 80)

    def fill(path: Path) -> None:
        with storage_errors(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    make = check if is_checked else fill
    with pytest.raises(StorageError, match=re.escape(str(cache.path))) as caught:
        cache.entry("a.gguf", make)
    assert caught.value.hint == "free some space, or set APR_CACHE to a folder on another disk"
    with pytest.raises(StorageError) as caught:
        cache.entry("a.gguf", lambda path: make(tmp_path / "elsewhere.gguf"))
    assert "APR_CACHE" not in str(caught.value.hint), "the disk of temporary files, for example"


def test_a_link_in_place_of_the_lock_is_refused(cache: CacheFolder, tmp_path: Path) -> None:
    cache.path.mkdir(parents=True)
    (cache.path / "a.gguf.lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StorageError):
        cache.entry("a.gguf", write)
    assert not (tmp_path / "elsewhere").exists()


def test_a_link_in_place_of_the_file_is_not_used(cache: CacheFolder, tmp_path: Path) -> None:
    cache.entry("a.gguf", write).close()
    (cache.path / "a.gguf").unlink()
    (tmp_path / "other").write_bytes(b"mine")
    (cache.path / "a.gguf").symlink_to(tmp_path / "other")
    entry = cache.entry("a.gguf", write)
    assert (entry.made, entry.path.is_symlink(), entry.path.read_bytes()) == (True, False, DATA)
    assert (tmp_path / "other").read_bytes() == b"mine"


def test_another_users_folder_is_refused(cache: CacheFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.path.mkdir(parents=True)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(StorageError, match="belongs to another user") as caught:
        cache.entry("a.gguf", write)
    assert caught.value.hint == "set APR_CACHE=FOLDER to use another one"


def test_a_folder_that_anybody_can_exchange_is_refused(cache: CacheFolder) -> None:
    cache.path.mkdir(parents=True)
    cache.path.parent.chmod(0o777)
    with pytest.raises(StorageError, match="other users can write to the cache"):
        cache.entry("a.gguf", write)
    cache.path.parent.chmod(0o1777)
    assert cache.entry("a.gguf", write).made


def test_what_is_in_use_is_not_trimmed(cache: CacheFolder) -> None:
    entry = cache.entry("a.gguf", write)
    again = cache.entry("a.gguf", refuse)
    entry.close()
    assert cache.trim(0) == []
    again.confirm()
    again.close()
    assert cache.trim(0) == [cache.path / "a.gguf"]
    assert list(cache.path.iterdir()) == []


def test_what_another_process_uses_is_not_trimmed(cache: CacheFolder) -> None:
    cache.entry("a.gguf", write).close()
    code = (
        "from aprfmt.io.cache import CacheFolder; entry = CacheFolder('exports').entry('a.gguf', None); "
        "entry.confirm(); print(flush=True); input()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline()
        assert cache.trim(0) == []
        other.communicate(b"\n")
    assert other.returncode == 0
    assert cache.trim(0) == [cache.path / "a.gguf"]


def test_a_lock_that_was_removed_is_not_held(cache: CacheFolder) -> None:
    made: list[Path] = []

    def make(path: Path) -> None:
        write(path)
        made.append(path)
        if len(made) == 1:
            (cache.path / "a.gguf.lock").unlink()

    entry = cache.entry("a.gguf", make)
    assert len(made) == 2
    assert cache.trim(0) == []
    entry.close()


def test_files_of_others_are_not_trimmed(cache: CacheFolder) -> None:
    cache.entry("a.gguf", write).close()
    (cache.path / "notes.txt").write_text("mine")
    cache.trim(0)
    assert [path.name for path in cache.path.iterdir()] == ["notes.txt"]


def test_trimming_never_takes_what_somebody_loads(cache: CacheFolder) -> None:
    """Each thread opens the lock anew, so they are to each other what processes are."""
    errors: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(40):
                entry = cache.entry("a.gguf", write)
                assert entry.path.read_bytes() == DATA
                entry.confirm()
                assert entry.path.exists()
                entry.close()
                cache.trim(1)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []
