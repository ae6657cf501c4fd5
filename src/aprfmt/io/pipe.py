"""The one pipeline that moves bytes: workers make pieces, side by side, and the caller's thread writes them in order.

A worker takes the next pieces (about 1 MiB), makes their bytes and takes their CRC while they are in the cache.
Pieces that were made but not yet written are held back by a window, so memory does not grow with the model.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial

from aprfmt.errors import AprError, CorruptError
from aprfmt.io.crc import combine, crc32
from aprfmt.io.segments import FileLayout, Item, Job, Literal, Segment, Stream, Zeros, item_bytes, run_jobs
from aprfmt.io.sink import AtomicFile
from aprfmt.io.source import Buffer, Source
from aprfmt.io.system import keep_freed_memory, n_processors

CHUNK_BYTES = 1 << 20
_ZEROS = bytes(1 << 16)

Progress = Callable[[int, str], None]
"""Called with (bytes just written, label of the tensor)."""

MOST_THREADS = 32
WINDOW_BYTES = 32 << 20
THREAD_BYTES = 16 << 20
"""What a worker holds beside the pieces in the window: one as read, as float32 and as encoded, and temporaries."""


@dataclass(frozen=True, slots=True)
class Flow:
    """How much of the machine a write may take: worker threads, and bytes made but not yet written."""

    threads: int = 0  # 0: one a processor
    window_bytes: int = WINDOW_BYTES

    @property
    def n_workers(self) -> int:
        """Worker threads."""
        return self.threads or min(MOST_THREADS, n_processors())

    @property
    def memory_bytes(self) -> int:
        """What the pipeline may hold at a time."""
        return self.window_bytes + self.n_workers * (THREAD_BYTES + CHUNK_BYTES)


DEFAULT_FLOW = Flow()


def write_layout(
    layout: FileLayout, sink: AtomicFile, progress: Progress | None = None, flow: Flow = DEFAULT_FLOW
) -> int:
    """Writes every segment of `layout` to `sink`; returns the CRC-32 of what stands before a footer, else 0."""
    keep_freed_memory()
    crc = 0
    line = _Line(_pieces(layout.segments), flow, with_crc=layout.crc_footer)
    with closing(line.batches()) as batches:
        for batch in batches:
            crc = combine(crc, batch.crc, batch.n_bytes) if layout.crc_footer else 0
            for data, label in batch.parts:
                sink.write(data)
                if progress is not None:
                    progress(len(data), label)
    if layout.crc_footer:
        sink.write(struct.pack("<I", crc))
        if progress is not None:
            progress(4, "")
    return crc


def _pieces(segments: Sequence[Segment]) -> Iterator[tuple[Item, str]]:
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


def _stream_pieces(segment: Stream) -> Iterator[tuple[Item, str]]:
    n_bytes = 0
    try:
        for item in segment.chunks():
            n_bytes += item_bytes(item)
            if n_bytes > segment.n_bytes:
                break
            yield item, segment.label
    except AprError as error:
        raise _with_tensor(error, segment.label) from error.__cause__
    if n_bytes != segment.n_bytes:
        raise _wrong_length(n_bytes, segment.n_bytes, segment.label)


def _with_tensor(error: AprError, label: str) -> AprError:
    """The error, with the tensor that it is about."""
    if error.tensor is None:
        error.tensor = label or None
    return error


def _wrong_length(n_bytes: int, expected: int, label: str) -> CorruptError:
    return CorruptError(
        f"the conversion produced {n_bytes} bytes instead of the planned {expected}", tensor=label
    )


@dataclass(slots=True)
class _Batch:
    """Neighbouring pieces that one worker makes."""

    items: list[tuple[Item, str]]
    n_bytes: int
    parts: list[tuple[Buffer, str]]
    crc: int = 0
    error: BaseException | None = None
    is_done: bool = False

    def make(self, with_crc: bool) -> None:
        """Fills `parts` and `crc`, or `error`."""
        label = ""
        try:
            for item, label in self.items:
                data = memoryview(item.run() if isinstance(item, Job) else item).cast("B")
                if len(data) != item_bytes(item):
                    raise _wrong_length(len(data), item_bytes(item), label)
                if with_crc:
                    self.crc = crc32(data, self.crc)
                self.parts.append((data, label))
        except BaseException as error:
            self.error = _with_tensor(error, label) if isinstance(error, AprError) else error
        self.items = []


class _Line:
    """Batches on their way from the workers to the writer, in order."""

    def __init__(self, pieces: Iterator[tuple[Item, str]], flow: Flow, *, with_crc: bool) -> None:
        self._pieces = pieces
        self._flow = flow
        self._with_crc = with_crc
        self._pulling = threading.Lock()
        self._changed = threading.Condition()
        self._batches: list[_Batch] = []  # pulled and not yet written, oldest first
        self._held_bytes = 0
        self._is_over = False  # nothing more to pull

    def batches(self) -> Generator[_Batch, None, None]:
        """Every batch, made, in order. Raises what a piece raised; no thread is left when it ends."""
        n = self._flow.n_workers
        threads = [threading.Thread(target=self._work, name=f"apr-{i}", daemon=True) for i in range(n)]
        started: list[threading.Thread] = []
        try:
            for thread in threads:
                thread.start()
                started.append(thread)
            while (batch := self._next()) is not None:
                if batch.error is not None:
                    raise batch.error
                yield batch
        finally:
            with self._changed:
                self._is_over = True
                self._changed.notify_all()
            for thread in started:
                thread.join()

    def _next(self) -> _Batch | None:
        """The oldest batch once it is made; the one given before leaves the window."""
        with self._changed:
            while True:
                if self._batches and self._batches[0].is_done:
                    batch = self._batches.pop(0)
                    self._held_bytes -= batch.n_bytes
                    self._changed.notify_all()
                    return batch
                if self._is_over and not self._batches:
                    return None
                self._changed.wait()

    def _work(self) -> None:
        while (batch := self._pull()) is not None:
            batch.make(self._with_crc)
            with self._changed:
                batch.is_done = True
                self._is_over = self._is_over or batch.error is not None
                self._changed.notify_all()

    def _pull(self) -> _Batch | None:
        """The next pieces, when the window has room; None at the end."""
        with self._pulling:
            with self._changed:
                while self._held_bytes >= self._flow.window_bytes and not self._is_over:
                    self._changed.wait()
                if self._is_over:
                    return None
            batch = self._collect()
            with self._changed:
                if not batch.items:
                    self._is_over = True
                    self._changed.notify_all()
                    return None
                self._batches.append(batch)
                self._held_bytes += batch.n_bytes
            return batch

    def _collect(self) -> _Batch:
        batch = _Batch([], 0, [])
        try:
            for piece in self._pieces:
                batch.items.append(piece)
                batch.n_bytes += item_bytes(piece[0])
                if batch.n_bytes >= CHUNK_BYTES // 2:
                    break
        except BaseException as error:
            batch.items.append((Job(0, _raiser(error)), ""))
        return batch


def _raiser(error: BaseException) -> Callable[[], Buffer]:
    def run() -> Buffer:
        raise error

    return run


def source_chunks(source: Source, offset: int, n_bytes: int) -> Iterator[Buffer]:
    """Reads [offset, offset + n_bytes) in fresh buffers of about 1 MiB."""
    return run_jobs(source_jobs(source, offset, n_bytes))


def is_same_content(a: Source, b: Source) -> bool:
    """Whether two files hold the same bytes."""
    pairs = zip(*(source_chunks(source, 0, source.size) for source in (a, b)), strict=False)
    return a.size == b.size and all(x == y for x, y in pairs)


def sha256_of_range(source: Source, offset: int, n_bytes: int) -> str:
    """SHA-256 of [offset, offset + n_bytes) of a file, in hex."""
    import hashlib

    digest = hashlib.sha256()
    for chunk in source_chunks(source, offset, n_bytes):
        digest.update(chunk)
    return digest.hexdigest()


def source_jobs(source: Source, offset: int, n_bytes: int, multiple: int = 1) -> Iterator[Job]:
    """The same as jobs, each a multiple of `multiple` bytes long."""
    step = max(multiple, CHUNK_BYTES // multiple * multiple)
    for start in range(0, n_bytes, step):
        length = min(step, n_bytes - start)
        yield Job(length, partial(source.read, offset + start, length))
