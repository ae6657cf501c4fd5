"""Compressed files as streams: memory within one step and the window, and not endlessly much of little."""

from __future__ import annotations

import io
import lzma
import zlib
from collections.abc import Callable
from typing import BinaryIO, NamedTuple, Protocol

from aprfmt.errors import CorruptError, LimitError
from aprfmt.io.source import Buffer
from aprfmt.limits import MAX_UNPACKED_AHEAD, MAX_UNPACKED_RATIO, MAX_WINDOW_BYTES


class _Decompressor(Protocol):
    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, /) -> bytes: ...


class _Form(NamedTuple):
    """How a format is read: what decompresses one stream of it, and how much it is given at once.

    A step gives at most some 30 MB: 4 bytes of zstd can mean 128 KiB, 1 byte of xz 7 KB, 1 byte of gzip 1 KB.
    """

    begin: Callable[[], _Decompressor]
    step_bytes: int


def _zstd() -> _Decompressor:
    import zstandard

    found: _Decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES).decompressobj()
    return found


_FORMS = {
    ".gz": _Form(lambda: zlib.decompressobj(wbits=31), 4 << 10),
    ".xz": _Form(lambda: lzma.LZMADecompressor(memlimit=MAX_WINDOW_BYTES), 4 << 10),
    ".zst": _Form(_zstd, 1 << 10),
}

SUFFIXES = tuple(_FORMS)
"""Of the formats that are known."""


class Unpacked(io.RawIOBase):
    """The content of a compressed file: streams laid end to end, zeros between them left out.

    Reading raises CorruptError for damaged data and for a file that is cut short, LimitError for one that unpacks to
    more than MAX_UNPACKED_RATIO times its size.
    """

    def __init__(self, file: BinaryIO, suffix: str, path: str) -> None:
        self._form = _FORMS[suffix]
        self._file = file
        self._path = path
        self._stream: _Decompressor | None = None
        self._rest = self._plain = b""
        self._used = self._read = self._given = 0

    def readable(self) -> bool:
        """Always."""
        return True

    def readinto(self, buffer: Buffer) -> int:  # type: ignore[override]
        """As of any stream: fills a part of `buffer`; 0 at the end."""
        assert not isinstance(buffer, bytes)
        while self._used == len(self._plain):
            self._rest = self._rest or self._file.read(self._form.step_bytes)
            if self._stream is None:
                self._rest = self._rest.lstrip(b"\0") or self._file.read(self._form.step_bytes).lstrip(b"\0")
            if not self._rest:
                if self._stream is not None:
                    raise CorruptError(
                        "cannot be decompressed: it ends too early", path=self._path, hint="fetch it again"
                    )
                return 0
            self._unpack()
        n = min(len(buffer), len(self._plain) - self._used)
        buffer[:n] = self._plain[self._used : self._used + n]
        self._used += n
        return n

    def _unpack(self) -> None:
        """Replaces `_plain`, which was used up, by what the next step gives."""
        stream = self._stream = self._stream or self._form.begin()
        try:
            self._plain, self._used = stream.decompress(self._rest), 0
        except MemoryError:
            raise
        except Exception as error:  # each library has a class of its own
            raise CorruptError(f"cannot be decompressed: {error}", path=self._path, hint="fetch it again") from error
        self._read += len(self._rest)
        self._rest = b""
        if stream.eof:
            self._rest, self._stream = stream.unused_data, None
            self._read -= len(self._rest)
        self._given += len(self._plain)
        if self._given > MAX_UNPACKED_RATIO * self._read + MAX_UNPACKED_AHEAD:
            raise LimitError(
                f"{self._read:,} bytes unpack to {self._given:,} or more; text is compressed to a "
                f"{MAX_UNPACKED_RATIO}th at most",
                path=self._path,
                hint="unpack the file if you trust it",
            )
