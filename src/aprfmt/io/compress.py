"""zstd and LZ4 with a cap on what comes out. The libraries are imported on first use.

What is unpacked stays in memory up to MAX_IMAGE_IN_MEMORY. Beyond that it goes to a file without a name among the
system's temporary files, which is gone when it is closed, also by the death of the process.
"""

from __future__ import annotations

import io
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import IO, NamedTuple, Self

from aprfmt.errors import CorruptError, LimitError, StorageError, TruncatedError, storage_errors
from aprfmt.io.source import Buffer, Source
from aprfmt.io.temporary import temporary_place
from aprfmt.limits import MAX_IMAGE_AHEAD, MAX_IMAGE_IN_MEMORY, MAX_IMAGE_RATIO, MAX_LZ4_BYTES, MAX_UNCOMPRESSED_BYTES

# A block of a zstd frame takes at least 4 bytes and gives at most 128 KiB: 512 bytes of input give at most 16
# MiB, which is how far the output can run past the cap before it is looked at.
_ZSTD_STEP = 512
_READ_BYTES = 1 << 20
_LZ4_MAX_RATIO = 255
_LZ4_SLACK = 16
# An empty frame takes 9 bytes and some microseconds.
_MOST_FRAMES = 1 << 16


class Packed(NamedTuple):
    """Compressed data within a file, read as far as they are needed."""

    source: Source
    start: int
    n_bytes: int

    def read(self, start: int, n_bytes: int) -> bytes:
        """Up to `n_bytes` from `start`, counted from the beginning of the data."""
        n_bytes = min(n_bytes, self.n_bytes - start)
        return self.source.read(self.start + start, n_bytes)


def packed(data: Buffer, path: str) -> Packed:
    """Compressed data in memory."""
    return Packed(Source.from_bytes(data, path), 0, len(data))


def _cap_of(n_packed: int, cap: int) -> int:
    """`cap`, or less where so little data cannot be what was packed."""
    return min(cap, MAX_IMAGE_RATIO * n_packed + MAX_IMAGE_AHEAD)


def _check_cap(n_bytes: int, cap: int, path: str) -> None:
    if n_bytes > cap:
        raise LimitError(f"the data decompresses to {n_bytes} bytes or more; the limit is {cap}", path=path)


class _Image:
    """What is unpacked, behind `head`. `source` hands it over; else it is discarded at the end of the block."""

    def __init__(self, path: str, head: bytes) -> None:
        self._path = path
        self._memory = io.BytesIO()  # whose value is no copy
        self._memory.write(head)
        self._file: IO[bytes] | None = None
        self._n_head = len(head)
        self.n_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()

    def write(self, data: Buffer) -> None:
        """Appends `data`. Raises StorageError."""
        self.n_bytes += len(data)
        if self._file is None:
            if self.n_bytes <= MAX_IMAGE_IN_MEMORY:
                self._memory.write(data)
                return
            with _scratch_errors():
                self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - closed by __exit__
            self._write(self._memory.getbuffer())
            self._memory = io.BytesIO()
        self._write(memoryview(data))

    def _write(self, data: memoryview) -> None:
        assert self._file is not None
        with _scratch_errors():
            while data:
                data = data[self._file.write(data) :]

    def source(self) -> Source:
        """All of it, to be read. The caller closes it."""
        if self._file is None:
            return Source.from_bytes(self._memory.getvalue(), self._path)
        with _scratch_errors():
            fd = os.dup(self._file.fileno())
        return Source(self._path, fd, None, self._n_head + self.n_bytes)


@contextmanager
def _scratch_errors() -> Iterator[None]:
    """Raises StorageError that names the folder of temporary files."""
    place = temporary_place()
    try:
        with storage_errors(place):
            yield
    except StorageError as error:
        error.hint = "a compressed model is unpacked there: set TMPDIR to a folder with enough space"
        raise


def unzstd(data: Packed, cap: int = MAX_UNCOMPRESSED_BYTES, *, head: bytes = b"") -> Source:
    """The content of one or more zstd frames laid end to end, behind `head`. The caller closes it.

    Raises CorruptError for what is not zstd, TruncatedError where a frame ends early, LimitError beyond `cap`, for
    much more than was read of `data` and for frames without end; StorageError where the scratch file has no room.
    """
    import zstandard

    path = data.source.path
    if not data.n_bytes:
        raise CorruptError("no zstd data found", path=path)
    decompressor, frame = zstandard.ZstdDecompressor(), None
    n_read = n_frames = 0
    with _Image(path, head) as image:
        for step in _steps(data):
            n_read += len(step)
            while step:
                if frame is None:
                    n_frames += 1
                    if n_frames > _MOST_FRAMES:
                        raise LimitError(f"the zstd data has more than {_MOST_FRAMES} frames", path=path)
                    frame = decompressor.decompressobj()
                try:
                    plain = frame.decompress(step)
                except zstandard.ZstdError as error:
                    raise CorruptError(f"damaged zstd data: {error}", path=path) from error
                _check_cap(image.n_bytes + len(plain), _cap_of(n_read, cap), path)
                image.write(plain)
                step, frame = (frame.unused_data, None) if frame.eof else (b"", frame)
        if frame is not None:
            raise TruncatedError("the zstd data ends in the middle of a frame", path=path)
        return image.source()


def _steps(data: Packed) -> Iterator[bytes]:
    for start in range(0, data.n_bytes, _READ_BYTES):
        piece = data.read(start, _READ_BYTES)
        for at in range(0, len(piece), _ZSTD_STEP):
            yield piece[at : at + _ZSTD_STEP]


def unlz4(data: Packed, cap: int = MAX_UNCOMPRESSED_BYTES, *, head: bytes = b"") -> Source:
    """The content of a size-prepended LZ4 block (u32 length, then the block), behind `head`. The caller closes it.

    Raises CorruptError where it does not unpack to exactly that length, LimitError beyond `cap` bytes and where it
    takes more than MAX_LZ4_BYTES to unpack it; StorageError where the scratch file has no room. Sizes that do
    not fit each other are refused before the block is read.
    """
    from lz4 import block

    path = data.source.path
    if data.n_bytes < 4:
        raise TruncatedError("LZ4 data shorter than its length field", path=path)
    n_bytes, n_packed = int.from_bytes(data.read(0, 4), "little"), data.n_bytes - 4
    _check_cap(n_bytes, _cap_of(data.n_bytes, cap), path)
    if n_bytes > _LZ4_MAX_RATIO * n_packed or n_packed > n_bytes + n_bytes // _LZ4_MAX_RATIO + _LZ4_SLACK:
        raise CorruptError(f"{n_packed} bytes of LZ4 cannot decompress to {n_bytes}", path=path)
    if (needed := n_packed + 2 * n_bytes) > MAX_LZ4_BYTES:  # the library copies what it has unpacked
        raise LimitError(
            f"decompressing an LZ4 block of {n_packed} bytes to {n_bytes} needs {needed} bytes of memory; the limit is "
            f"{MAX_LZ4_BYTES}",
            path=path,
            hint="save the model with zstd or uncompressed in the program that wrote it",
        )
    try:
        out: bytes = block.decompress(data.read(4, n_packed), uncompressed_size=n_bytes)
    except (block.LZ4BlockError, ValueError) as error:
        raise CorruptError(f"damaged LZ4 data: {error}", path=path) from error
    if len(out) != n_bytes:
        raise CorruptError(f"the LZ4 data declares {n_bytes} bytes but contains {len(out)}", path=path)
    with _Image(path, head) as image:
        image.write(out)
        return image.source()


def zstd(data: Buffer, level: int) -> bytes:
    """`data` as one zstd frame."""
    import zstandard

    return zstandard.ZstdCompressor(level=level).compress(data)


def lz4(data: Buffer) -> bytes:
    """`data` as a size-prepended LZ4 block."""
    from lz4 import block

    packed: bytes = block.compress(data, store_size=True)
    return packed
