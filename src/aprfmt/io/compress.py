"""zstd and LZ4 with a limit on the decompressed size. The libraries are imported on first use.

Decompressed data stays in memory up to MAX_IMAGE_IN_MEMORY. Larger data goes to an unnamed temporary file, which
disappears when it is closed or the process dies.
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

# A block of a zstd frame takes at least 4 bytes and yields at most 128 KiB, so 512 bytes of input yield at most
# 16 MiB: that is how far the output can overshoot the limit before it is checked.
_ZSTD_STEP = 512
_READ_BYTES = 1 << 20
_LZ4_MAX_RATIO = 255
_LZ4_SLACK = 16
# An empty frame takes 9 bytes and a few microseconds.
_MOST_FRAMES = 1 << 16


class Packed(NamedTuple):
    """Compressed data within a file, read as far as needed."""

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
    """`cap`, or a smaller limit that no compression ratio can exceed for so little data."""
    return min(cap, MAX_IMAGE_RATIO * n_packed + MAX_IMAGE_AHEAD)


def _check_cap(n_bytes: int, cap: int, path: str) -> None:
    if n_bytes > cap:
        raise LimitError(f"the data decompresses to {n_bytes} bytes or more; the limit is {cap}", path=path)


class _Image:
    """Decompressed data after `head`. `source` hands it over; otherwise it is discarded at the end of the block."""

    def __init__(self, path: str, head: bytes) -> None:
        self._path = path
        self._memory = io.BytesIO()  # whose value is not a copy
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
        """Returns all of it as a source. The caller closes it."""
        if self._file is None:
            return Source.from_bytes(self._memory.getvalue(), self._path)
        with _scratch_errors():
            fd = os.dup(self._file.fileno())
        return Source(self._path, fd, None, self._n_head + self.n_bytes)


@contextmanager
def _scratch_errors() -> Iterator[None]:
    """Turns OSErrors into StorageErrors that name the temporary folder."""
    place = temporary_place()
    try:
        with storage_errors(place):
            yield
    except StorageError as error:
        error.hint = "a compressed model is unpacked there: set TMPDIR to a folder with enough space"
        raise


def unzstd(data: Packed, cap: int = MAX_UNCOMPRESSED_BYTES, *, head: bytes = b"") -> Source:
    """Decompresses one or more concatenated zstd frames, after `head`. The caller closes the source.

    Raises CorruptError if the data is not zstd, TruncatedError if a frame ends early, LimitError beyond `cap`, beyond a
    plausible ratio or for endless frames; StorageError if the temporary file does not fit on the disk.
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
    """Decompresses a size-prepended LZ4 block (u32 length, then the block), after `head`. The caller closes the source.

    Raises CorruptError unless it decompresses to exactly that length, LimitError beyond `cap` bytes or MAX_LZ4_BYTES of
    memory; StorageError if the temporary file does not fit on the disk. Sizes that contradict each other are refused
    before the block is read.
    """
    from lz4 import block

    path = data.source.path
    if data.n_bytes < 4:
        raise TruncatedError("LZ4 data shorter than its length field", path=path)
    n_bytes, n_packed = int.from_bytes(data.read(0, 4), "little"), data.n_bytes - 4
    _check_cap(n_bytes, _cap_of(data.n_bytes, cap), path)
    if n_bytes > _LZ4_MAX_RATIO * n_packed or n_packed > n_bytes + n_bytes // _LZ4_MAX_RATIO + _LZ4_SLACK:
        raise CorruptError(f"{n_packed} bytes of LZ4 cannot decompress to {n_bytes}", path=path)
    if (needed := n_packed + 2 * n_bytes) > MAX_LZ4_BYTES:  # the library copies its output
        raise LimitError(
            f"decompressing an LZ4 block of {n_packed} bytes to {n_bytes} needs {needed} bytes of memory; the limit is "
            f"{MAX_LZ4_BYTES}",
            path=path,
            hint="write the model with zstd, or uncompressed, in the program that made it",
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
    """Compresses `data` into one zstd frame."""
    import zstandard

    return zstandard.ZstdCompressor(level=level).compress(data)


def lz4(data: Buffer) -> bytes:
    """Compresses `data` into a size-prepended LZ4 block."""
    from lz4 import block

    packed: bytes = block.compress(data, store_size=True)
    return packed
