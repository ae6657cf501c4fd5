"""The pipeline that writes files: their layout, the workers that produce the bytes, and the publication.

A `FileLayout` is complete before a byte is written. Workers produce its pieces in parallel, and the caller's thread
writes them in order: a worker takes the next pieces (about 1 MiB), produces their bytes and computes their CRC while
they are in the cache. A window limits the pieces that are produced but not yet written, so memory use does not grow
with the model.
"""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias

from aprfmt.errors import AprError, ChecksumError, CorruptError, RefusedError, storage_errors
from aprfmt.io.crc import combine, crc32, crc32_after
from aprfmt.io.digest import BLAKE3, CRC32, Digest, StreamDigest, altered, crc_digest
from aprfmt.io.sink import AtomicFile, AtomicFolder, stale_names
from aprfmt.io.source import Buffer, Source, cancelled_reads, is_folder
from aprfmt.io.system import keep_freed_memory, n_processors
from aprfmt.types import PathLike

# --- what a file consists of ---


@dataclass(frozen=True, slots=True)
class Job:
    """`n_bytes` bytes that `run()` produces, in any thread and in any order relative to other jobs."""

    n_bytes: int
    run: Callable[[], Buffer]


Item: TypeAlias = Buffer | Job
"""A piece of a stream: bytes, or the job that produces them."""


def item_bytes(item: Item) -> int:
    """Length of a piece in bytes."""
    return item.n_bytes if isinstance(item, Job) else memoryview(item).nbytes


def run_jobs(items: Iterable[Item]) -> Iterator[Buffer]:
    """The bytes of `items`; runs jobs one after the other, as needed."""
    for item in items:
        yield item.run() if isinstance(item, Job) else item


@dataclass(frozen=True, slots=True)
class Literal:
    """Bytes that are already known (a header, an index)."""

    data: Buffer

    @property
    def n_bytes(self) -> int:
        """Length in bytes."""
        return len(self.data)


@dataclass(frozen=True, slots=True)
class Zeros:
    """Padding."""

    n_bytes: int


@dataclass(frozen=True, slots=True)
class Stream:
    """`n_bytes` bytes that `chunks()` yields when they are written; `label` names the tensor.

    A yielded buffer must not be modified: another thread writes it.
    """

    n_bytes: int
    chunks: Callable[[], Iterable[Item]]
    label: str = ""


Segment: TypeAlias = Literal | Zeros | Stream


@dataclass(frozen=True, slots=True)
class DeferredPatch:
    """Bytes of a file that are known only after all of it was streamed.

    `make()` returns them then; until then `stand_in`, of the same length, is at `offset`.
    """

    offset: int
    stand_in: bytes
    make: Callable[[], bytes]


@dataclass(frozen=True, slots=True)
class FileLayout:
    """One output file.

    Attributes:
        name: in its folder.
        segments: the content.
        crc_footer: append a little-endian CRC-32 of everything before it.
        deferred: ranges of the segments that are replaced at the end.
        digest: the required digest, if known.
    """

    name: str
    segments: Sequence[Segment]
    crc_footer: bool = False
    deferred: Sequence[DeferredPatch] = ()
    digest: Digest | None = None

    @property
    def n_bytes(self) -> int:
        """Final size of the file in bytes."""
        return sum(segment.n_bytes for segment in self.segments) + (4 if self.crc_footer else 0)


# --- the pipeline ---

CHUNK_BYTES = 1 << 20
_BATCH_BYTES = CHUNK_BYTES // 2
"""A worker takes pieces until it has as many bytes."""
_ZEROS = bytes(1 << 16)

Progress = Callable[[int, str], None]
"""Called with (bytes just written, label of the tensor)."""

MOST_THREADS = 32
WINDOW_BYTES = 32 << 20
THREAD_BYTES = 16 << 20
"""Buffers of a worker besides the window: one piece as read, as float32 and as encoded, and temporaries."""


@dataclass(frozen=True, slots=True)
class Flow:
    """Resource limits of a write: worker threads, and bytes produced but not yet written."""

    threads: int = 0  # 0: one per processor
    window_bytes: int = WINDOW_BYTES

    @property
    def n_workers(self) -> int:
        """Worker threads."""
        return self.threads or min(MOST_THREADS, n_processors())

    @property
    def memory_bytes(self) -> int:
        """Maximum memory of the pipeline at a time."""
        return self.window_bytes + self.n_workers * (THREAD_BYTES + CHUNK_BYTES)


DEFAULT_FLOW = Flow()


def write_layout(
    layout: FileLayout, sink: AtomicFile, progress: Progress | None = None, flow: Flow = DEFAULT_FLOW
) -> int:
    """Writes every segment of `layout` to `sink`; returns the CRC-32 of everything before a footer, else 0.

    Raises ChecksumError if the written file does not have `layout.digest`.
    """
    keep_freed_memory()

    def write(data: Buffer, label: str) -> None:
        sink.write(data)
        if progress is not None:
            progress(len(data), label)

    crc, found = _run(layout, flow, write)
    if found is not None and found != layout.digest:
        raise ChecksumError(
            altered(layout.name, found.kind), hint="the model was damaged after its import: import the source again"
        )
    for patch in layout.deferred:
        crc = _apply_patch(patch, layout, sink, crc)
    if layout.crc_footer:
        sink.write(struct.pack("<I", crc))
        if progress is not None:
            progress(4, "")
    return crc


def layout_digest(layout: FileLayout, flow: Flow = DEFAULT_FLOW) -> Digest | None:
    """The digest of the segments of `layout`, of the required kind; nothing is written."""
    return _run(layout, flow, lambda data, label: None)[1]


def _run(layout: FileLayout, flow: Flow, take: Callable[[Buffer, str], None]) -> tuple[int, Digest | None]:
    """Passes every piece to `take`, in order; returns the CRC-32, if requested, and the digest."""
    crc, kind = 0, layout.digest.kind if layout.digest is not None else None
    with_crc = layout.crc_footer or kind == CRC32
    line = _Pipeline(_pieces(layout.segments), flow, layout.n_bytes, with_crc=with_crc)
    stream = StreamDigest() if kind == BLAKE3 else None
    with stream or nullcontext(), closing(line.batches()) as batches:
        for batch in batches:
            crc = combine(crc, batch.crc, batch.n_bytes) if with_crc else 0
            for data, label in batch.parts:
                take(data, label)
                if stream is not None:
                    stream.add(data)
    if stream is not None:
        return crc, stream.digest()
    return crc, crc_digest(crc) if kind == CRC32 else None


def _apply_patch(patch: DeferredPatch, layout: FileLayout, sink: AtomicFile, crc: int) -> int:
    """Replaces a placeholder by the final bytes; returns the updated checksum."""
    data = patch.make()
    if len(data) != len(patch.stand_in):
        raise _wrong_length(len(data), len(patch.stand_in), layout.name)
    sink.patch(patch.offset, data)
    if not layout.crc_footer:
        return 0
    n_behind = layout.n_bytes - 4 - patch.offset - len(data)
    # A CRC is linear: it changes by the difference of the parts' CRCs, shifted by the bytes that follow.
    return crc ^ combine(crc32(data) ^ crc32(patch.stand_in), 0, n_behind)


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
    """Adds the tensor's name to an error."""
    if error.tensor is None:
        error.tensor = label or None
    return error


def _wrong_length(n_bytes: int, expected: int, label: str) -> CorruptError:
    return CorruptError(f"the conversion produced {n_bytes} bytes instead of the planned {expected}", tensor=label)


@dataclass(slots=True)
class _Batch:
    """Neighbouring pieces that one worker produces."""

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
                made = item.run() if isinstance(item, Job) else item
                data = memoryview(made).cast("B")
                if len(data) != item_bytes(item):
                    raise _wrong_length(len(data), item_bytes(item), label)
                if with_crc:
                    self.crc = crc32_after(self.crc, made if isinstance(made, bytes) else data)
                self.parts.append((data, label))
        except BaseException as error:
            self.error = _with_tensor(error, label) if isinstance(error, AprError) else error
        self.items = []


class _Pipeline:
    """Batches on their way from the workers to the writer, in order."""

    def __init__(self, pieces: Iterator[tuple[Item, str]], flow: Flow, n_bytes: int, *, with_crc: bool) -> None:
        self._pieces = pieces
        self._flow = flow
        self._most_batches = n_bytes // _BATCH_BYTES + 1
        self._with_crc = with_crc
        self._pulling = threading.Lock()
        self._changed = threading.Condition()
        self._batches: list[_Batch] = []  # pulled and not yet written, oldest first
        self._held_bytes = 0
        self._is_over = False  # nothing left to pull

    def batches(self) -> Generator[_Batch, None, None]:
        """Yields every batch, complete, in order. Raises what a piece raised; all threads have ended when it returns or
        raises. A single batch is produced by the caller's thread, since threads take longer to start.
        """
        if self._most_batches == 1:
            yield from self._only_batch()
            return
        n = min(self._flow.n_workers, self._most_batches)
        threads = [threading.Thread(target=self._work, name=f"apr-{i}", daemon=True) for i in range(n)]
        started: list[threading.Thread] = []
        is_whole = False
        try:
            for thread in threads:
                thread.start()
                started.append(thread)
            while (batch := self._next()) is not None:
                if batch.error is not None:
                    raise batch.error
                yield batch
            is_whole = True
        finally:
            with self._changed:
                self._is_over = True
                self._changed.notify_all()
            with nullcontext() if is_whole else cancelled_reads():
                for thread in started:
                    thread.join()

    def _only_batch(self) -> Iterator[_Batch]:
        batch = self._collect()
        batch.make(self._with_crc)
        if batch.error is not None:
            raise batch.error
        yield batch

    def _next(self) -> _Batch | None:
        """The oldest batch once it is complete; the previous one leaves the window."""
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
        """The next pieces when the window has space; None at the end."""
        with self._pulling:
            with self._changed:
                while self._held_bytes >= self._flow.window_bytes and not self._is_over:
                    self._changed.wait()
                if self._is_over:
                    return None
            batch = self._collect()
            with self._changed:
                if not batch.items and batch.error is None:
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
                if batch.n_bytes >= _BATCH_BYTES:
                    break
        except BaseException as error:
            batch.error = error
        return batch


def source_chunks(source: Source, offset: int, n_bytes: int) -> Iterator[Buffer]:
    """Reads [offset, offset + n_bytes) in fresh buffers of about 1 MiB."""
    return run_jobs(source_jobs(source, offset, n_bytes))


_SHA256_DIGITS = 64


def is_same_content(a: Source, b: Source) -> bool:
    """Whether two files have the same bytes; for a remote file the digest that its server states is used."""
    if a.size != b.size:
        return False
    stated = {source.stated_digest for source in (a, b)}
    if None not in stated and len(set(map(len, filter(None, stated)))) == 1:
        return len(stated) == 1
    for there, here in ((a, b), (b, a)):
        if here.stated_digest is None and len(there.stated_digest or "") == _SHA256_DIGITS:
            return sha256_of_range(here, 0, here.size) == there.stated_digest
    pairs = zip(*(source_chunks(source, 0, source.size) for source in (a, b)), strict=False)
    return all(x == y for x, y in pairs)


def sha256_of_range(source: Source, offset: int, n_bytes: int) -> str:
    """SHA-256 of [offset, offset + n_bytes) of a file, in hex."""
    import hashlib

    digest = hashlib.sha256()
    for chunk in source_chunks(source, offset, n_bytes):
        digest.update(chunk)
    return digest.hexdigest()


def source_jobs(source: Source, offset: int, n_bytes: int, multiple: int = 1) -> Iterator[Job]:
    """Jobs that read [offset, offset + n_bytes) of a file, each a multiple of `multiple` bytes long."""
    step = max(multiple, CHUNK_BYTES // multiple * multiple)
    for start in range(0, n_bytes, step):
        length = min(step, n_bytes - start)
        yield Job(length, partial(source.read_data, offset + start, length))


# --- files and folders ---

StartProgress = Callable[[int], Progress]
"""Called with the total bytes before writing; returns the function to call with each piece."""


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """How outputs are written.

    Attributes:
        force: replace existing files.
        progress: called with the total bytes; returns the function to call with each piece.
        flow: resource limits.
        fsync: wait until the data is on the disk; without it a power cut may lose it.
        confirm: called with the path of the complete output before it gets its name: a file, the first of several, or a
            folder; if it raises, nothing is published.
    """

    force: bool = False
    progress: StartProgress | None = None
    flow: Flow = DEFAULT_FLOW
    fsync: bool = True
    confirm: Callable[[str], None] = lambda path: None


# Weight files of an older export that must not remain with new ones.
_STALE = ("model*.safetensors", "model.safetensors.index.json")

# An old tokenizer next to a new one would be read together with it.
_STALE_TOKENIZER = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja",
)  # fmt: skip


def write_file(
    target: str, layout: FileLayout, options: WriteOptions, check: Callable[[str], None] | None = None
) -> None:
    """Writes `layout` as the file `target`. Raises ExistsError, StorageError.

    `check` gets the path of the complete temporary file; if it raises, the target is not created.
    """
    advance = options.progress(layout.n_bytes) if options.progress else None
    with AtomicFile(target, force=options.force, n_bytes=layout.n_bytes, fsync=options.fsync) as sink:
        write_layout(layout, sink, advance, options.flow)
        sink.flush()
        options.confirm(sink.temporary)
        if check is not None:
            check(sink.temporary)


def write_parts(
    folder: str,
    layouts: Sequence[FileLayout],
    options: WriteOptions,
    check: Callable[[str], None] | None = None,
    stale: Collection[str] = (),
) -> None:
    """Writes `layouts` as files of the existing `folder`, all or none of them. Raises like write_file.

    With `force`, files that match `stale` (glob patterns) are removed unless one of `layouts` replaces them. The first
    file
    appears last: without it nobody can load the others.
    `check` gets the path of the first file while all of them are complete in a temporary folder.
    """
    n_bytes = sum(layout.n_bytes for layout in layouts)
    advance = options.progress(n_bytes) if options.progress else None
    first = layouts[0].name
    with AtomicFolder(folder, force=options.force, n_bytes=n_bytes, shared=True, stale=stale, last=first) as temporary:
        _write_all(temporary, layouts, options, advance)
        options.confirm(str(temporary / first))
        if check is not None:
            check(str(temporary / first))


def check_inputs_kept(target: Path, names: Collection[str], sources: Iterable[str]) -> None:
    """Refuses a folder in which new files, or the removal of old weights, would hit one of the sources."""
    if not is_folder(target):
        return
    inputs = {found for source in sources if (found := _inode(source)) is not None}
    with storage_errors(target):
        gone = {*names, *stale_names(str(target), (*_STALE, *_STALE_TOKENIZER))}
    if held := [name for name in sorted(gone) if _inode(target / name) in inputs]:
        raise RefusedError(
            f"the output folder contains the input {held[0]}", path=target, hint="choose another folder with -o"
        )


def _inode(path: PathLike) -> tuple[int, int] | None:
    """Device and inode, equal for two names of one file; None if missing."""
    with storage_errors(path):
        try:
            info = os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
    return (info.st_dev, info.st_ino)


def write_folder(
    target: str, layouts: Sequence[FileLayout], options: WriteOptions, check: Callable[[str], None] | None = None
) -> None:
    """Writes `layouts` as the files of the folder `target`; names may contain `/`. Raises like write_file.

    `check` gets the path of the complete temporary folder.
    """
    n_bytes = sum(layout.n_bytes for layout in layouts)
    advance = options.progress(n_bytes) if options.progress else None
    brings_tokenizer = any(layout.name in _STALE_TOKENIZER for layout in layouts)
    stale = _STALE + (_STALE_TOKENIZER if brings_tokenizer else ())
    with AtomicFolder(target, force=options.force, n_bytes=n_bytes, stale=stale, last="config.json") as folder:
        _write_all(folder, layouts, options, advance)
        options.confirm(str(folder))
        if check is not None:
            check(str(folder))


def _write_all(folder: Path, layouts: Sequence[FileLayout], options: WriteOptions, advance: Progress | None) -> None:
    for layout in layouts:
        path = folder / layout.name
        if path.parent != folder:
            with storage_errors(path.parent):
                os.makedirs(path.parent, exist_ok=True)
        with AtomicFile(path, force=True, n_bytes=layout.n_bytes, fsync=options.fsync) as sink:
            write_layout(layout, sink, advance, options.flow)
