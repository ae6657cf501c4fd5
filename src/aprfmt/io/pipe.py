"""The one pipeline that moves bytes: a second thread produces chunks, the caller's checks and writes them."""

from __future__ import annotations

import queue
import struct
import threading
from collections.abc import Callable, Iterator, Sequence

from aprfmt.errors import CorruptError
from aprfmt.io.crc import crc32
from aprfmt.io.segments import FileLayout, Literal, Segment, Stream, Zeros
from aprfmt.io.sink import AtomicFile
from aprfmt.io.source import Buffer, Source

CHUNK_BYTES = 1 << 20
_QUEUE_CHUNKS = 8
_ZEROS = bytes(1 << 16)

Progress = Callable[[int, str], None]
"""Called with (bytes just written, label of the tensor)."""


def write_layout(layout: FileLayout, sink: AtomicFile, progress: Progress | None = None) -> int:
    """Writes every segment of `layout` to `sink`; returns the CRC-32 of the bytes before the footer."""
    crc = 0
    for chunk, label in _prefetch(layout.segments):
        if layout.crc_footer:
            crc = crc32(chunk, crc)
        sink.write(chunk)
        if progress is not None:
            progress(len(chunk), label)
    if layout.crc_footer:
        sink.write(struct.pack("<I", crc))
        if progress is not None:
            progress(4, "")
    return crc


def _pieces(segments: Sequence[Segment]) -> Iterator[tuple[Buffer, str]]:
    for segment in segments:
        if isinstance(segment, Literal):
            view = memoryview(segment.data)
            for start in range(0, len(view), CHUNK_BYTES):
                yield view[start : start + CHUNK_BYTES], ""
        elif isinstance(segment, Zeros):
            for start in range(0, segment.n_bytes, len(_ZEROS)):
                yield memoryview(_ZEROS)[: segment.n_bytes - start], ""
        else:
            yield from _stream_pieces(segment)


def _stream_pieces(segment: Stream) -> Iterator[tuple[Buffer, str]]:
    n_bytes = 0
    for chunk in segment.chunks():
        n_bytes += len(chunk)
        if n_bytes > segment.n_bytes:
            break
        yield chunk, segment.label
    if n_bytes != segment.n_bytes:
        raise CorruptError(
            f"the conversion gave {n_bytes} bytes where the plan has {segment.n_bytes}", tensor=segment.label
        )


def _prefetch(segments: Sequence[Segment]) -> Iterator[tuple[Buffer, str]]:
    """The pieces of `segments`, produced by a second thread at most a few chunks ahead."""
    items: queue.Queue[tuple[Buffer, str] | BaseException | None] = queue.Queue(_QUEUE_CHUNKS)
    stop = threading.Event()

    def put(item: tuple[Buffer, str] | BaseException | None) -> bool:
        while not stop.is_set():
            try:
                items.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def produce() -> None:
        try:
            for piece in _pieces(segments):
                if not put(piece):
                    return
            put(None)
        except BaseException as error:
            put(error)

    thread = threading.Thread(target=produce, name="apr-read", daemon=True)
    thread.start()
    try:
        while (item := items.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        stop.set()
        thread.join()


def source_chunks(source: Source, offset: int, n_bytes: int, multiple: int = 1) -> Iterator[bytearray]:
    """Reads [offset, offset + n_bytes) in fresh buffers of about 1 MiB, each a multiple of `multiple` bytes long."""
    step = max(multiple, CHUNK_BYTES // multiple * multiple)
    for start in range(0, n_bytes, step):
        buffer = bytearray(min(step, n_bytes - start))
        source.read_into(offset + start, memoryview(buffer))
        yield buffer
