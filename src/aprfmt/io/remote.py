"""Remote files: empty placeholders of the right size on this disk, whose bytes are fetched when they are read.

Headers are read by ranges and kept in memory. Weights are read in whole chunks, which stay on the disk until others
need the space; the next run uses what an interrupted run leaves. A file is hashed as its chunks arrive in order, and
the digest is compared when a command checks that its sources are unchanged.
"""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from aprfmt.errors import UsageError, storage_errors
from aprfmt.io import remote_file
from aprfmt.io.chunks import LEAST_STORED_BYTES, Store, is_kept_file
from aprfmt.io.remote_file import RemoteFile
from aprfmt.io.source import FileIdentity, Source, register_remote

_HEADS_AT_ONCE = 8
_SHORT_BYTES = 1 << 20  # short texts that are prefetched


class RemoteSource(Source):
    """A remote file, read like any other; `view` returns a copy."""

    def __init__(self, path: str, file: RemoteFile, store: Store, identity: FileIdentity) -> None:
        super().__init__(path, None, None, file.size, identity)
        self.file = file
        self.stated_digest = file.digest if file.is_stated else None
        self.store = store
        self._is_open = True

    def check_unchanged(self, *, digest: bool = False) -> None:
        """Compares the file with its digest if weights were read, or with `digest` if anything was."""
        if self.file.is_read or (digest and self.file.is_used and self.file.is_stated):
            self.store.verify(self.file)

    def view(self, offset: int = 0, n_bytes: int | None = None) -> memoryview:
        """A copy of `n_bytes` bytes at `offset` (to the end by default), read-only."""
        return memoryview(self.read(offset, self.size - offset if n_bytes is None else n_bytes)).toreadonly()

    def read(self, offset: int, n_bytes: int) -> bytes:
        """A copy of `n_bytes` header bytes at `offset`; texts are fetched and verified whole."""
        self._check_open(offset, n_bytes)
        data = None
        if self.file.is_text:
            self.store.verify(self.file)
        else:
            data = self.file.head(offset, n_bytes) if n_bytes else b""
        if data is None:
            return self.read_data(offset, n_bytes)
        if self.record is not None:
            self.record.add(offset, data)
        return data

    def read_pieces(self, offset: int, n_bytes: int) -> Iterator[bytes]:
        """`read` as one piece, fetched by one request."""
        yield self.read(offset, n_bytes)

    def read_data(self, offset: int, n_bytes: int) -> bytes:
        """A copy of `n_bytes` bytes of weights at `offset`."""
        buffer = bytearray(n_bytes)
        self.read_into(offset, memoryview(buffer))
        return bytes(buffer)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fills `buffer` with bytes of weights from `offset`."""
        self._check_open(offset, len(buffer))
        self.store.read(self.file, offset, buffer)
        if self.record is not None:
            self.record.add(offset, buffer)

    def _check_open(self, offset: int, n_bytes: int) -> None:
        self.check(offset, n_bytes)
        if not self._is_open:
            raise UsageError("the file is closed", path=self.path, hint="use its tensors inside the with block")

    def close(self) -> None:
        """Stops reading."""
        self._is_open = False
        super().close()


def place(folder: Path, files: Sequence[RemoteFile], store: Store) -> list[tuple[RemoteFile, str]]:
    """Creates a placeholder for each file in `folder` and makes Source.open read the remote file. Raises StorageError.

    A placeholder has the size of its file and no bytes: other programs see zeros. Returns the files that the file
    system cannot hold together with the others, each with the reason.
    """
    skipped: list[tuple[RemoteFile, str]] = []
    placed: dict[tuple[int, int], str] = {}
    for file in files:
        path = folder / file.name
        with storage_errors(path):
            try:
                identity = _placeholder(path, file.size)
            except OSError as error:
                if error.errno not in _ODD_NAMES:
                    raise
                skipped.append((file, os.strerror(error.errno)))
                continue
        if (other := placed.setdefault((identity.device, identity.inode), file.name)) != file.name:
            skipped.append((file, f"the file system reads it as {other}"))
            continue
        register_remote(path, _maker(file, store, identity))
    return skipped


_ODD_NAMES = (
    *(errno.ENAMETOOLONG, errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ELOOP),
    *(errno.EILSEQ, errno.EINVAL, errno.EFBIG, errno.EOVERFLOW),
)


def _placeholder(path: Path, size: int) -> FileIdentity:
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)
    try:
        if os.fstat(fd).st_size != size:
            os.ftruncate(fd, size)
        return FileIdentity.of(os.fstat(fd))
    finally:
        os.close(fd)


def _maker(file: RemoteFile, store: Store, identity: FileIdentity) -> Callable[[str], Source]:
    return lambda path: RemoteSource(path, file, store, identity)


def limit_stores(sources: Sequence[Source], most_bytes: int | None) -> list[Store]:
    """Sets the disk limit of all stores of remote files, None: the size of the largest file. Returns the stores."""
    stores = {id(source.store): source.store for source in sources if isinstance(source, RemoteSource)}
    for store in stores.values():
        sizes = [source.size for source in sources if isinstance(source, RemoteSource) and source.store is store]
        store.most_bytes = max(*sizes, LEAST_STORED_BYTES) if most_bytes is None else most_bytes
    return [*stores.values()]


def prefetch_headers(files: Sequence[RemoteFile], store: Store) -> None:
    """Fetches headers of weights and short texts, several at once; errors are left to the readers."""
    left = iter(files)

    def work() -> None:
        for file in left_over():
            with suppress(Exception):
                if not file.is_text:
                    file.prefetch(remote_file.BLOCK_BYTES)
                elif file.size <= _SHORT_BYTES:
                    store.verify(file)

    lock = threading.Lock()

    def left_over() -> Iterator[RemoteFile]:
        while True:
            with lock:
                file = next(left, None)
            if file is None:
                return
            yield file

    threads = [threading.Thread(target=work, name="apr-fetch", daemon=True) for _ in files[:_HEADS_AT_ONCE]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def remove_old(folder: Path, before: float) -> None:
    """Removes the chunks that abandoned runs left below `folder`, if not modified since `before` (Unix time)."""
    for path in folder.glob("models--*/chunks/*"):
        with suppress(OSError):
            if is_kept_file(path) and path.lstat().st_mtime < before:
                shutil.rmtree(path)
