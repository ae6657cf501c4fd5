"""Compressed files as streams: memory use is bounded by a step and the window, output by a maximum ratio."""

from __future__ import annotations

import io
import lzma
import zlib
from collections.abc import Callable
from functools import partial
from typing import BinaryIO, NamedTuple, Protocol

from aprfmt.errors import CorruptError, LimitError
from aprfmt.io.source import Buffer
from aprfmt.limits import (
    MAX_UNPACKED_AHEAD,
    MAX_UNPACKED_RATIO,
    MAX_UNPACKED_STREAMS,
    MAX_WINDOW_BYTES,
    MIN_UNPACKED_STREAM_BYTES,
)


class _Decompressor(Protocol):
    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, /) -> bytes: ...


_Begin = Callable[[], _Decompressor]


class _Form(NamedTuple):
    """A compression format: the decompressor of each stream, and how much input it gets at once.

    A step yields at most about 30 MB: 4 bytes of zstd can expand to 128 KiB, 1 byte of xz to 7 KB, 1 byte of gzip to 1
    KB.
    """

    open: Callable[[], _Begin]
    step_bytes: int


def _zstd() -> _Begin:
    """One context for all frames: creating one takes 30 times as long as an empty frame."""
    import zstandard

    begin: _Begin = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES).decompressobj
    return begin


_FORMS = {
    ".gz": _Form(lambda: partial(zlib.decompressobj, wbits=31), 4 << 10),
    ".xz": _Form(lambda: partial(lzma.LZMADecompressor, lzma.FORMAT_XZ, MAX_WINDOW_BYTES), 4 << 10),
    ".zst": _Form(_zstd, 1 << 10),
}

SUFFIXES = tuple(_FORMS)
"""The supported formats."""


class Unpacked(io.RawIOBase):
    """The content of a compressed file: concatenated streams, each followed by any number of zero bytes.

    Reading raises CorruptError for damaged data, for anything else between or after the streams and for truncated
    files, even empty ones; LimitError if it expands to more than MAX_UNPACKED_RATIO times its size, or has more streams
    than its content needs.
    """

    def __init__(self, file: BinaryIO, suffix: str, path: str) -> None:
        self._form = _FORMS[suffix]
        self._begin = self._form.open()
        self._file = file
        self._path = path
        self._stream: _Decompressor | None = None
        self._rest = self._plain = b""
        self._used = self._read = self._given = self._streams = 0

    def readable(self) -> bool:
        """Always."""
        return True

    def readinto(self, buffer: Buffer) -> int:  # type: ignore[override]
        """Fills part of `buffer`; returns 0 at the end."""
        assert not isinstance(buffer, bytes)
        while self._used == len(self._plain):
            if not self._fill():
                return 0
            self._unpack()
        n = min(len(buffer), len(self._plain) - self._used)
        buffer[:n] = self._plain[self._used : self._used + n]
        self._used += n
        return n

    def _fill(self) -> bool:
        """Makes `_rest` the next decompressed data. Returns False at the end of the file."""
        while True:
            self._rest = self._rest or self._file.read(self._form.step_bytes)
            is_between = self._stream is None and self._streams > 0
            if not self._rest:
                if not is_between:
                    raise self._damaged("it is truncated")
                return False
            if is_between:
                self._rest = self._rest.lstrip(b"\0")
            if self._rest:
                return True

    def _unpack(self) -> None:
        """Replaces the used-up `_plain` with the output of the next step."""
        if self._stream is None:
            self._stream, self._streams = self._begin(), self._streams + 1
        stream = self._stream
        try:
            self._plain, self._used = stream.decompress(self._rest), 0
        except MemoryError:
            raise
        except Exception as error:  # each library has its own exception class
            raise self._damaged(str(error)) from error
        self._read += len(self._rest)
        self._rest = b""
        if stream.eof:
            self._rest, self._stream = stream.unused_data, None
            self._read -= len(self._rest)
        self._given += len(self._plain)
        self._check_limits()

    def _check_limits(self) -> None:
        if self._given > MAX_UNPACKED_RATIO * self._read + MAX_UNPACKED_AHEAD:
            what = (
                f"{self._read:,} bytes decompress to {self._given:,} or more, over {MAX_UNPACKED_RATIO} times "
                "their size"
            )
        elif self._streams > MAX_UNPACKED_STREAMS + self._given // MIN_UNPACKED_STREAM_BYTES:
            what = f"{self._streams:,} compressed streams hold only {self._given:,} bytes"
        else:
            return
        raise LimitError(what, path=self._path, hint="decompress the file yourself if you trust it")

    def _damaged(self, how: str) -> CorruptError:
        return CorruptError(f"cannot be decompressed: {how}", path=self._path, hint="download it again")
