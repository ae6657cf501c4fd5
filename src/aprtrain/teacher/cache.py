"""The teacher cache: final hidden states of every window, read instead of computed when the window comes again.

    DIR/KEY/            KEY is a hash of what the states follow from, see `_about`
      about.json        the same in words
      PART.states       of train and held_out: window after window [T, D], bf16 or float32 as computed; else holes
      PART.sums         8 bytes a window: 2^32 + the CRC-32 of its states, begun at its number; 0 for a hole

Hidden states and not the largest probabilities: with the teacher's head they give its whole distribution, bit by bit.

A window's sum is written behind its states and compared whenever they are read. So a process may be killed at any
moment, the power may fail, several processes may write the same files: what does not agree is missing.

Shape suffixes: N rows of a batch, T positions, D = d_model of the teacher.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from aprfmt.errors import StorageError, storage_errors
from aprfmt.io.crc import crc32
from aprfmt.io.pipe import FileLayout, Literal, WriteOptions, write_file
from aprfmt.io.source import is_file, read_whole
from aprfmt.types import JsonObject
from aprtrain.config import Config
from aprtrain.data.batches import Batch, Batches, Windows
from aprtrain.data.corpus import PARTS, Corpus
from aprtrain.loss.vocab import Vocabulary
from aprtrain.network.weights import Network, byte_fingerprint
from aprtrain.teacher.teacher import Teacher, teacher_dtype

_READERS = 4
_DEPTH = 2  # micro-batches that are read ahead, or wait to be written
_COUNTED = 1 << 20  # windows of a run that are looked up one by one

Log = Callable[[str], None]

_KEPT = 1 << 32
_SUM_BYTES = 8


class Store:
    """The states of the windows of one part, in two files that several processes may have open.

    Attributes:
        size: T and D.
        dtype: of the states.
        window_bytes: bytes of a window's states.
        writes: whether windows may be added.
        lost: whether the file of states was shorter than it should be, and all windows are missing for that.
    """

    def __init__(
        self, folder: Path, part: str, n: int, size: tuple[int, int], dtype: torch.dtype, *, writes: bool = True
    ) -> None:
        """Opens the states of `n` windows, or makes room for them. Raises NotFoundError, StorageError."""
        self.size = size
        self.dtype = dtype
        self.window_bytes = size[0] * size[1] * dtype.itemsize
        self.writes = writes
        self._n = n
        self._states, is_short = _open_file(folder / f"{part}.states", n * self.window_bytes, writes)
        self._sums, _ = _open_file(folder / f"{part}.sums", n * _SUM_BYTES, writes)
        self.lost = writes and is_short and bool(self.kept().any())
        if self.lost:
            os.ftruncate(self._sums, 0)
            os.ftruncate(self._sums, n * _SUM_BYTES)

    def __len__(self) -> int:
        return self._n

    def kept(self) -> npt.NDArray[np.bool_]:
        """Of which windows [n] there are states."""
        data = _pread(self._sums, self._n * _SUM_BYTES, 0)
        sums = np.frombuffer(data.ljust(self._n * _SUM_BYTES, b"\0"), "<u8")
        found: npt.NDArray[np.bool_] = sums != 0
        return found

    def has(self, windows: Iterable[int]) -> bool:
        """Whether there are states of all these windows; negative ones, which are empty, need none."""
        return all(i < 0 or self._sum(i) for i in windows)

    def read(self, window: int, out_TD: Tensor) -> bool:
        """Fills `out_TD`, contiguous in main memory; False where the states are missing or damaged.

        Damaged ones are missing from then on.
        """
        data = _bytes(out_TD)
        with suppress(OSError):
            n = os.preadv(self._states, [data], window * self.window_bytes)
            if n == len(data) and _sum_of(window, data) == self._sum(window):
                return True
            if self.writes:
                os.pwrite(self._sums, bytes(_SUM_BYTES), window * _SUM_BYTES)
        return False

    def write(self, window: int, states_TD: Tensor) -> None:
        """Adds the states of a window, in main memory. Raises OSError."""
        data = _bytes(states_TD)
        assert len(data) == self.window_bytes
        start, done = window * self.window_bytes, 0
        while done < len(data):
            done += os.pwrite(self._states, data[done:], start + done)
        os.pwrite(self._sums, _sum_of(window, data).to_bytes(_SUM_BYTES, "little"), window * _SUM_BYTES)

    def close(self) -> None:
        """Closes the files."""
        os.close(self._states)
        os.close(self._sums)

    def _sum(self, window: int) -> int:
        data = _pread(self._sums, _SUM_BYTES, window * _SUM_BYTES)
        return int.from_bytes(data, "little")


def _open_file(path: Path, n_bytes: int, writes: bool) -> tuple[int, bool]:
    """The file, and whether it was too short; it has `n_bytes` bytes then."""
    with storage_errors(path):
        file = os.open(path, os.O_RDWR | os.O_CREAT if writes else os.O_RDONLY, 0o666)
        size = os.fstat(file).st_size
        if writes and size != n_bytes:
            os.ftruncate(file, n_bytes)
    return file, size < n_bytes


def _pread(file: int, n_bytes: int, start: int) -> bytes:
    """What there is; nothing where it cannot be read."""
    try:
        return os.pread(file, n_bytes, start)
    except OSError:
        return b""


def _bytes(states_TD: Tensor) -> memoryview:
    return states_TD.view(-1).view(torch.uint8).numpy().data


def _sum_of(window: int, data: memoryview) -> int:
    return _KEPT | crc32(data, window & 0xFFFFFFFF)


_Reading = tuple[Tensor, list[tuple[int, Future[bool]]]]
"""A micro-batch on its way from the files: where its states go, and whether each window is what was written."""


class CachedHidden:
    """The teacher's hidden states of batches of one part: read where they are kept, else computed and kept.

    Files are read by threads, ahead of their use where it is known what comes, into pinned memory for a GPU; they
    are written by a thread.

    Attributes:
        is_read: whether those of the last batch were read.
    """

    def __init__(
        self,
        store: Store,
        device: torch.device,
        compute: Callable[[Batch], Tensor],
        log: Log,
        upcoming: Iterator[tuple[int, ...]] = iter(()),  # noqa: B008 - empty
    ) -> None:
        """Takes them from `store`, else from `compute`; `upcoming` are the windows of the batches to come."""
        self.is_read = False
        self._store = store
        self._device = device
        self._compute = compute
        self._log = log
        self._upcoming = upcoming
        self._readers = ThreadPoolExecutor(_READERS, thread_name_prefix="apr-cache")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="apr-cache")
        self._ahead: deque[tuple[tuple[int, ...], _Reading | None]] = deque()
        self._writing: deque[Future[None]] = deque()

    def __call__(self, batch: Batch) -> Tensor:
        """Hidden states [N, T, D] of a batch on the device; zeros for rows that only fill it."""
        states_NTD = self._read(batch.windows)
        self.is_read = states_NTD is not None
        if states_NTD is not None:
            return states_NTD.to(self._device, non_blocking=True)
        hidden_NTD = self._compute(batch)
        self._keep(batch.windows, hidden_NTD)
        return hidden_NTD

    def _read(self, windows: tuple[int, ...]) -> Tensor | None:
        self._look_ahead()
        reading = None
        if self._ahead and self._ahead[0][0] == windows:
            reading = self._ahead.popleft()[1]
        reading = reading or self._begin(windows)
        self._look_ahead()
        if reading is None:
            return None
        states_NTD, done = reading
        damaged = [window for window, future in done if not future.result()]
        if damaged:
            names = ", ".join(map(str, damaged))
            self._log(f"the teacher's hidden states of window {names} are damaged; computing them again")
        return None if damaged else states_NTD

    def _look_ahead(self) -> None:
        while len(self._ahead) < _DEPTH and (windows := next(self._upcoming, None)) is not None:
            self._ahead.append((windows, self._begin(windows)))

    def _begin(self, windows: tuple[int, ...]) -> _Reading | None:
        """Starts to read these windows; None where not all are kept."""
        if not self._store.has(windows):
            return None
        on_gpu = self._device.type == "cuda"
        states_NTD = torch.empty((len(windows), *self._store.size), dtype=self._store.dtype, pin_memory=on_gpu)
        done = []
        for row_TD, window in zip(states_NTD, windows, strict=True):
            if window < 0:
                row_TD.zero_()
            else:
                done.append((window, self._readers.submit(self._store.read, window, row_TD)))
        return states_NTD, done

    def _keep(self, windows: Sequence[int], hidden_NTD: Tensor) -> None:
        if not self._store.writes:
            return
        ready = None
        if hidden_NTD.is_cuda:
            host = torch.empty(hidden_NTD.shape, dtype=hidden_NTD.dtype, pin_memory=True)
            hidden_NTD = host.copy_(hidden_NTD, non_blocking=True)
            ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ready.record()
        while len(self._writing) >= _DEPTH:
            self._writing.popleft().result()
        self._writing.append(self._writer.submit(self._write, windows, hidden_NTD, ready))

    def _write(self, windows: Sequence[int], states_NTD: Tensor, ready: torch.cuda.Event | None) -> None:
        if ready is not None:
            ready.synchronize()
        try:
            for row_TD, window in zip(states_NTD, windows, strict=True):
                is_new = self._store.writes and not self._store.has([window])
                # Values that are not finite must not reach every run that reads them.
                if is_new and bool(torch.isfinite(row_TD).all()):
                    self._store.write(window, row_TD)
        except OSError as error:
            self._store.writes = False
            self._log(f"the teacher cache is closed: {error.strerror}; the training continues")

    def close(self) -> None:
        """Waits until all is written; a failure is logged."""
        self._readers.shutdown(cancel_futures=True)
        self._writer.shutdown()
        for error in filter(None, (future.exception() for future in self._writing)):
            self._log(f"not all of the teacher's hidden states were cached: {type(error).__name__}: {error}")
        self._store.close()


@dataclass
class Cache:
    """What is kept for both parts of a corpus; at the end of `with` all is written.

    Attributes:
        stores: by part.
        missing: windows that this run needs and that are not kept, at most.
        device: where the teacher computes.
        log: takes lines for the user.
        upcoming: windows of the micro-batches to come.
        cached: by part, once `connect` was called.
    """

    stores: dict[str, Store]
    missing: int
    device: torch.device
    log: Log
    upcoming: Iterator[tuple[int, ...]]
    cached: dict[str, CachedHidden] = field(default_factory=dict)

    def connect(self, teacher: Teacher, load: Callable[[], Teacher | None]) -> dict[str, CachedHidden]:
        """The states by part. If `teacher` is a head alone, `load` gives the whole one when it is needed."""
        # `compute` must not own the cache, which owns it: the teacher would outlive the run.
        whole, log = teacher if teacher.has_backbone else None, self.log

        def compute(batch: Batch) -> Tensor:
            nonlocal whole
            if whole is None:
                log("loading the teacher after all")
                whole = load()
            assert whole is not None
            return whole.hidden(batch.tokens_NT, batch.documents)

        for part, store in self.stores.items():
            upcoming = self.upcoming if part == "train" else iter(())
            self.cached[part] = CachedHidden(store, self.device, compute, self.log, upcoming)
        return self.cached

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for cached in self.cached.values():
            cached.close()


def check_folder(config: Config) -> None:
    """Makes the folder of --teacher-cache, before anything that takes time. Raises NotFoundError, StorageError."""
    if config.teacher_cache is not None and config.smoke is None:
        _make(Path(config.teacher_cache))


def open_cache(
    config: Config,
    teacher: Network | None,
    vocabulary: Vocabulary | None,
    corpus: Corpus,
    parts: tuple[Windows, Windows],
    batches: Batches,
    device: torch.device,
    log: Log,
) -> Cache | None:
    """What --teacher-cache holds, None without one; a smoke run only reads it.

    Args:
        config: resolved.
        teacher, vocabulary: the teacher, opened, and the ids that it shares with the student; None in pretraining.
        corpus, parts: the data; the windows to train on, those held out.
        batches: at the cursor of the run.
        device: where the teacher computes.
        log: takes lines for the user.

    Raises:
        StorageError: the folder cannot be written, or its disk lacks the space for what this run adds.
    """
    if config.teacher_cache is None or teacher is None:
        return None
    about = _about(config, teacher, vocabulary, corpus, device)
    text = json.dumps(about, sort_keys=True)
    folder = Path(config.teacher_cache) / hashlib.sha256(text.encode()).hexdigest()[:32]
    writes = config.smoke is None
    if not writes and not folder.is_dir():
        return None
    if writes:
        _make(folder)
        path = folder / "about.json"
        words = (json.dumps(about, indent=2) + "\n").encode()
        if not is_file(path) or read_whole(path) != words:
            write_file(str(path), FileLayout(path.name, [Literal(words)]), WriteOptions(force=True))
    size, dtype = (config.seq_len, teacher.shape.d_model), teacher_dtype(config.teacher_residency, device)
    stores = {
        part: Store(folder, part, len(windows), size, dtype, writes=writes)
        for part, windows in zip(PARTS, parts, strict=True)
    }
    for part, store in stores.items():
        if store.lost:
            log(f"{part}.states in {folder} was cut off; computing its states again")
    cache = Cache(stores, _missing(config, stores, parts[1], batches), device, log, batches.upcoming())
    _check_disk(cache, folder)
    return cache


def bytes_per_token(config: Config, teacher: Network, device: torch.device) -> int:
    """Bytes of the states of a token."""
    return teacher.shape.d_model * teacher_dtype(config.teacher_residency, device).itemsize


def _about(
    config: Config, teacher: Network, vocabulary: Vocabulary | None, corpus: Corpus, device: torch.device
) -> JsonObject:
    """What hidden states follow from: the teacher, how it computes, and the windows."""
    return {
        "format": 1,
        "teacher": byte_fingerprint(teacher),
        "shape": asdict(teacher.shape),
        "residency": config.teacher_residency,
        "compared_ids": vocabulary.n_real if vocabulary and config.teacher_residency == "fp8" else None,
        "dtype": str(teacher_dtype(config.teacher_residency, device)).removeprefix("torch."),
        "device": device.type,
        "compiled": config.is_compiled(device.type),
        "data": {part: {**corpus.header["parts"][part]["sha256"]} for part in PARTS},
        "separator": corpus.separator,
        "seq_len": config.seq_len,
    }


def _make(folder: Path) -> None:
    with storage_errors(folder):
        os.makedirs(folder, exist_ok=True)


def _missing(config: Config, stores: dict[str, Store], held_out: Windows, batches: Batches) -> int:
    """How many windows the run needs that are not kept; at most, where counting them would take long."""
    kept, scored = stores["train"].kept(), stores["held_out"].kept()
    n = sum(not scored[i] for i in held_out.select(config.eval_windows))
    coming = config.stop * config.windows_per_step - batches.cursor
    if not kept.all() and coming < min(2 * len(kept), _COUNTED):
        return n + len({i for i in batches.windows_until(config.stop) if i >= 0 and not kept[i]})
    return n + min(coming, int(np.count_nonzero(~kept)))


def _check_disk(cache: Cache, folder: Path) -> None:
    store = cache.stores["train"]
    if not cache.missing:
        cache.log(f"the teacher's hidden states are read from {folder}; only its head is loaded")
        return
    need, free = cache.missing * store.window_bytes, shutil.disk_usage(folder).free
    if store.writes and need > free:
        raise StorageError(
            f"the teacher cache takes up to {need / 1e9:.3g} GB more, {free / 1e9:.3g} GB are free",
            path=folder,
            hint="put --teacher-cache on another disk, or leave it out",
        )
    total = sum(map(len, cache.stores.values()))
    kept = sum(int(np.count_nonzero(store.kept())) for store in cache.stores.values())
    cache.log(
        f"the teacher's hidden states are cached in {folder}: {kept} of {total} windows exist, up to {cache.missing} "
        f"more take {need / 1e9:.3g} GB"
    )
