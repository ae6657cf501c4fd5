"""Verified files in huggingface_hub's cache: a blob gets its digest's name only after its bytes were hashed.

<cache>/models--org--repo/blobs/<digest>              SHA-256 of an LFS file, git's SHA-1 of any other
<cache>/models--org--repo/snapshots/<commit>/<name>   link to the blob
$APR_CACHE/hub/verified/<digest>                      device, inode, size and times of a file that had this digest

Other programs fill this cache too and do not verify what they download. So a file from the cache is hashed once, and
again after a week or when its record no longer matches: nobody can modify a file and keep its ctime.
"""

from __future__ import annotations

import json
import os
import queue
import shutil
import stat
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from aprfmt.errors import ChecksumError, StorageError, storage_errors
from aprfmt.io import remote_file
from aprfmt.io.cache import cache_home, own_folder, storing_in
from aprfmt.io.remote_file import RemoteFile, new_hash
from aprfmt.io.source import Source, register_remote

try:
    import fcntl
except ImportError:  # Windows: two processes may download the same file; the later one wins
    fcntl = None  # type: ignore[assignment]

Progress = Callable[[int], object]
"""Called with the number of bytes received."""

_RECORD_S = 7 * 24 * 3600.0
_AHEAD = 3
_READ_BYTES = 1 << 20
_NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)

_stated: dict[str, str] = {}


class CachedSource(Source):
    """A file of the cache; `check_unchanged` verifies it when it decides on an output."""

    def check_unchanged(self, *, digest: bool = False) -> None:
        """Like Source.check_unchanged; with `digest` raises ChecksumError if the bytes have another digest."""
        super().check_unchanged()
        if digest:
            verify(self.path)


def register(snapshot: Path, is_text: Callable[[str], bool]) -> None:
    """Makes Source.open verify the files of a snapshot: texts when opened, others before an output is published.

    A file that is not a link to a blob was added by hand and has no digest.
    """
    for where, _, names in os.walk(snapshot):
        for name in names:
            path = os.path.join(where, name)
            with suppress(OSError):
                blob = Path(os.readlink(path))
                if blob.parent.name == "blobs" and is_digest(blob.name):
                    _stated[os.path.abspath(path)] = blob.name
                    register_remote(path, partial(_open, is_text=is_text(name)))


def _open(path: str, is_text: bool) -> Source:
    if is_text:
        verify(path)
    return CachedSource._open(path)


def is_digest(value: object) -> bool:
    """Whether `text` is a SHA-1 or SHA-256 in hex."""
    return isinstance(value, str) and len(value) in (40, 64) and not set(value) - set("0123456789abcdef")


def verify(path: str) -> None:
    """Compares a file of a registered snapshot with its digest; accepts any other path.

    Raises ChecksumError, StorageError.
    """
    digest = _stated.get(os.path.abspath(path))
    if digest is not None:
        _verify(path, digest)


def _verify(path: str | Path, digest: str) -> None:
    with storage_errors(path):
        fd = os.open(path, os.O_RDONLY)
        try:
            stamp = _stamp(os.fstat(fd))
            if _recorded(digest) == stamp:
                return
            found = new_hash(digest, stamp[2])
            while data := os.read(fd, _READ_BYTES):
                found.update(data)
            is_good = found.hexdigest() == digest and _stamp(os.fstat(fd)) == stamp
        finally:
            os.close(fd)
    if not is_good:
        raise ChecksumError(
            "the file in huggingface_hub's cache differs from the one on the hub: digest mismatch",
            path=path,
            hint=f"rm {os.path.realpath(path)}, then run again to download it",
        )
    _record(digest, stamp)


def _stamp(info: os.stat_result) -> list[int]:
    return [info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns]


def _recorded(digest: str) -> list[int] | None:
    """The recorded identity of the verified file; None if it cannot be trusted."""
    with suppress(OSError, ValueError):
        fd = os.open(cache_home() / "hub" / "verified" / digest, os.O_RDONLY | _NO_FOLLOW)
        with open(fd, "rb") as file:
            info = os.fstat(fd)
            is_own = stat.S_ISREG(info.st_mode) and (os.name == "nt" or info.st_uid == os.geteuid())
            if is_own and abs(time.time() - info.st_mtime) < _RECORD_S:
                found = json.loads(file.read(1024))
                return found if isinstance(found, list) else None
    return None


def _record(digest: str, stamp: list[int]) -> None:
    """Records that a file has its digest; without a writable cache it is hashed again next time."""
    folder = cache_home() / "hub" / "verified"
    with suppress(OSError):
        own_folder(folder.parent)
        own_folder(folder)
        fd, name = tempfile.mkstemp(dir=folder)
        with open(fd, "w", encoding="ascii") as file:
            json.dump(stamp, file)
        os.replace(name, folder / digest)


# --- fetching ---


def fetch(
    file: RemoteFile, cache: Path, repo: str, commit: str, progress: Callable[[int, int], Progress] | None = None
) -> Path:
    """The cache path of a hub file, downloaded if missing and verified.

    `progress` gets the size of the file and the bytes already there. Raises AprError; ChecksumError if the bytes differ
    from the hub's listing.
    """
    root = cache / ("models--" + repo.replace("/", "--"))
    blob, link = root / "blobs" / file.digest, root / "snapshots" / commit / file.name
    with storage_errors(root):
        blob.parent.mkdir(parents=True, exist_ok=True)
        link.parent.mkdir(parents=True, exist_ok=True)
        if not blob.is_file():
            fetch_blob(file, blob, progress)
        _verify(blob, file.digest)
        target = os.path.relpath(blob, link.parent)
        if not link.is_symlink() or os.readlink(link) != target:
            _link(target, link, blob)
    _stated[os.path.abspath(link)] = file.digest
    remote_file.traffic.used[file.address] = remote_file.traffic.verified[file.address] = None
    return link


def _link(target: str, link: Path, blob: Path) -> None:
    made = Path(tempfile.mktemp(dir=link.parent))
    try:
        os.symlink(target, made)
    except OSError:  # a file system without links
        shutil.copyfile(blob, made)
    os.replace(made, link)


def fetch_blob(
    file: RemoteFile, blob: Path, progress: Callable[[int, int], Progress] | None, variable: str = "HF_HOME"
) -> None:
    """Downloads a file, continuing an interrupted download, and names it once its digest is verified.

    `progress` gets the size of the file and the bytes already there; `variable` sets the folder, for the hint when the
    disk is full. Raises AprError; ChecksumError for another digest.
    """
    part = blob.with_name(f"{blob.name}.apr.incomplete")
    with storing_in(blob.parent, variable), storage_errors(part), _locked(part) as fd:
        if blob.is_file():  # another process was faster
            return
        found, done = new_hash(file.digest, file.size), 0
        whole = os.fstat(fd).st_size // remote_file.CHUNK_BYTES * remote_file.CHUNK_BYTES
        while done < min(whole, file.size) and (data := os.pread(fd, _READ_BYTES, done)):
            found.update(data)
            done += len(data)
        os.ftruncate(fd, done)
        free = shutil.disk_usage(part.parent).free
        if free < file.size - done:
            raise StorageError(
                f"the file needs {file.size - done} bytes, but the disk has {free} free",
                path=part.parent,
                hint=f"free some space, or set {variable} to a folder on another disk",
            )
        tell = progress(file.size, done) if progress is not None else None
        for data in _in_order(file, done):
            found.update(data)
            done += os.pwrite(fd, data, done)
            if tell is not None:
                tell(len(data))
        if found.hexdigest() != file.digest:
            part.unlink()
            raise file.bad()
        os.fsync(fd)
        os.replace(part, blob)
        _record(file.digest, _stamp(os.stat(blob)))


@contextmanager
def _locked(path: Path) -> Iterator[int]:
    """Opens and locks the file for this process."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | _NO_FOLLOW, 0o666)
        try:
            if fcntl is not None:
                fcntl.flock(fd, fcntl.LOCK_EX)
            is_there = os.name == "nt"
            with suppress(FileNotFoundError):  # of the block it must pass: NotFoundError is one
                is_there = is_there or os.path.samestat(os.fstat(fd), os.stat(path))
            if is_there:
                yield fd
                return
        finally:
            os.close(fd)


def _in_order(file: RemoteFile, start: int) -> Iterator[bytes]:
    """Yields the file from `start` in order; several chunks are downloaded at once."""

    def begin(at: int) -> queue.SimpleQueue[bytes | BaseException]:
        box: queue.SimpleQueue[bytes | BaseException] = queue.SimpleQueue()
        threading.Thread(target=work, args=(at, box), name="apr-fetch", daemon=True).start()
        return box

    def work(at: int, box: queue.SimpleQueue[bytes | BaseException]) -> None:
        try:
            box.put(b"".join(file.fetch(at, min(at + remote_file.CHUNK_BYTES, file.size))))
        except BaseException as error:
            box.put(error)

    places = iter(range(start, file.size, remote_file.CHUNK_BYTES))
    boxes = deque(begin(at) for _, at in zip(range(_AHEAD), places, strict=False))
    while boxes:
        found = boxes.popleft().get()
        if isinstance(found, BaseException):
            raise found
        if (at := next(places, None)) is not None:
            boxes.append(begin(at))
        yield found
