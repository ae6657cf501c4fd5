"""A teacher's answers kept: the final hidden states of every window, read instead of computed when it comes again.

    DIR/KEY/            KEY is a hash of what the states follow from, see `_about`
      about.json        the same in words
      train.states      and the other files of a `teacher_store.Store`
      held_out.states

Hidden states and not the largest probabilities: with the teacher's head they give its whole distribution, bit by bit.

Shape suffixes: N rows of a batch, T positions, D = d_model of the teacher.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from aprfmt.errors import StorageError, storage_error
from aprfmt.io.segments import FileLayout, Literal
from aprfmt.io.write import WriteOptions, write_file
from aprtrain.config import Config
from aprtrain.data.batches import Batch, Batches
from aprtrain.data.packing import Windows
from aprtrain.data.shards import PARTS, Corpus
from aprtrain.evaluate import chosen
from aprtrain.models import Pair, is_compiled, teacher_dtype
from aprtrain.network.weights import Network
from aprtrain.teacher.store import Store
from aprtrain.teacher.teacher import Teacher

__all__ = ["Cache", "CachedHidden", "bytes_per_token", "check_folder", "open_cache"]

_READERS = 4
_DEPTH = 2  # micro-batches that are read ahead, or wait to be written
_COUNTED = 1 << 20  # windows of a run that are looked up one by one

Log = Callable[[str], None]


@dataclass(slots=True)
class _Reading:
    """A micro-batch on its way from the files: where its states go, and whether each window is there."""

    windows: tuple[int, ...]
    states_NTD: Tensor
    done: list[tuple[int, Future[bool]]]

    def damaged(self) -> list[int]:
        """Waits; which windows are not what was written."""
        return [window for window, future in self.done if not future.result()]


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
        self._readers = ThreadPoolExecutor(_READERS, thread_name_prefix="apr-answers")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="apr-answers")
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
        damaged = reading.damaged()
        if damaged:
            names = ", ".join(map(str, damaged))
            self._log(f"the teacher's answers to window {names} are damaged and computed again")
        return None if damaged else reading.states_NTD

    def _look_ahead(self) -> None:
        while len(self._ahead) < _DEPTH and (windows := next(self._upcoming, None)) is not None:
            self._ahead.append((windows, self._begin(windows)))

    def _begin(self, windows: tuple[int, ...]) -> _Reading | None:
        """Starts to read these windows; None where not all are kept."""
        if not self._store.has(windows):
            return None
        on_gpu = self._device.type == "cuda"
        states_NTD = torch.empty(
            (len(windows), *self._store.size), dtype=self._store.dtype, pin_memory=on_gpu
        )
        done = []
        for row_TD, window in zip(states_NTD, windows, strict=True):
            if window < 0:
                row_TD.zero_()
            else:
                done.append((window, self._readers.submit(self._store.read, window, row_TD)))
        return _Reading(windows, states_NTD, done)

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
                if is_new and bool(
                    torch.isfinite(row_TD).all()
                ):  # a fault must not meet every run that reads it
                    self._store.write(window, row_TD)
        except OSError as error:
            self._store.writes = False
            self._log(f"no more of the teacher's answers are kept: {error.strerror}; the training goes on")

    def close(self) -> None:
        """Waits until all is written; a failure is told."""
        self._readers.shutdown(cancel_futures=True)
        self._writer.shutdown()
        for error in filter(None, (future.exception() for future in self._writing)):
            self._log(f"the teacher's answers were not all kept: {type(error).__name__}: {error}")
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
        answers: by part, once `connect` was called.
    """

    stores: dict[str, Store]
    missing: int
    device: torch.device
    log: Log
    upcoming: Iterator[tuple[int, ...]]
    answers: dict[str, CachedHidden] = field(default_factory=dict)

    def connect(self, teacher: Teacher, load: Callable[[], Teacher | None]) -> dict[str, CachedHidden]:
        """The answers by part. Where `teacher` is a head alone, `load` gives the whole one should it be needed."""
        whole = teacher if teacher.has_backbone else None

        def compute(batch: Batch) -> Tensor:
            nonlocal whole
            if whole is None:
                self.log("the teacher is loaded after all")
                whole = load()
            assert whole is not None
            return whole.hidden(batch.tokens_NT, batch.documents)

        for part, store in self.stores.items():
            upcoming = self.upcoming if part == "train" else iter(())
            self.answers[part] = CachedHidden(store, self.device, compute, self.log, upcoming)
        return self.answers

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for answers in self.answers.values():
            answers.close()


def check_folder(config: Config) -> None:
    """Makes the folder of --teacher-cache, before anything that takes time. Raises NotFoundError, StorageError."""
    if config.teacher_cache is not None and config.smoke is None:
        _make(Path(config.teacher_cache))


def open_cache(
    config: Config,
    pair: Pair,
    corpus: Corpus,
    parts: tuple[Windows, Windows],
    batches: Batches,
    device: torch.device,
    log: Log,
) -> Cache | None:
    """The answers that --teacher-cache keeps, None without one; a smoke run reads what there is.

    Args:
        config: settled.
        pair: the models, opened.
        corpus, parts: the data; the windows to train on, those held out.
        batches: at the cursor of the run.
        device: where the teacher computes.
        log: takes lines for the user.

    Raises:
        StorageError: the folder cannot be written, or its disk has not the room for what this run adds.
    """
    if config.teacher_cache is None or pair.teacher is None:
        return None
    about = _about(config, pair, corpus, device)
    text = json.dumps(about, sort_keys=True)
    folder = Path(config.teacher_cache) / hashlib.sha256(text.encode()).hexdigest()[:32]
    writes = config.smoke is None
    if not writes and not folder.is_dir():
        return None
    if writes:
        _prepare(folder, about)
    size, dtype = (config.seq_len, pair.teacher.shape.d_model), teacher_dtype(config, device)
    stores = {
        part: Store(folder, part, len(windows), size, dtype, writes=writes)
        for part, windows in zip(PARTS, parts, strict=True)
    }
    for part, store in stores.items():
        if store.lost:
            log(f"{part}.states in {folder} was cut off: its answers are computed again")
    cache = Cache(stores, _missing(config, stores, parts[1], batches), device, log, batches.upcoming())
    _check_disk(cache, folder)
    return cache


def bytes_per_token(config: Config, teacher: Network, device: torch.device) -> int:
    """Bytes that the answer to a token takes."""
    return teacher.shape.d_model * teacher_dtype(config, device).itemsize


def _about(config: Config, pair: Pair, corpus: Corpus, device: torch.device) -> dict[str, Any]:
    """What hidden states follow from: the teacher, how it computes, and the windows."""
    teacher = pair.teacher
    assert teacher is not None
    compared = pair.vocabulary if config.teacher_residency == "fp8" else None
    return {
        "format": 1,
        "teacher": _full_fingerprint(teacher),
        "shape": asdict(teacher.shape),
        "residency": config.teacher_residency,
        "compared_ids": compared and compared.n_real,
        "dtype": str(teacher_dtype(config, device)).removeprefix("torch."),
        "device": device.type,
        "compiled": is_compiled(config, device),
        "data": {part: corpus.header["parts"][part]["sha256"] for part in PARTS},
        "separator": corpus.separator,
        "seq_len": config.seq_len,
    }


def _full_fingerprint(network: Network) -> str:
    """SHA-256 over names, dtypes, shapes and all bytes of an opened file's tensors, several read at a time.

    Every byte counts: a model in which a few rows of the embedding were changed gives other answers.
    """
    assert network.model is not None
    tensors = sorted(network.model.tensors.values(), key=lambda t: t.name)

    def one(tensor: Any) -> bytes:
        words = f"{tensor.name} {tensor.dtype} {list(tensor.shape)}\n".encode()
        return hashlib.sha256(words + hashlib.sha256(tensor.raw()).digest()).digest()

    with ThreadPoolExecutor(_READERS) as pool:
        return hashlib.sha256(b"".join(pool.map(one, tensors))).hexdigest()


def _make(folder: Path) -> None:
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise storage_error(error, folder) from error


def _prepare(folder: Path, about: dict[str, Any]) -> None:
    _make(folder)
    path = folder / "about.json"
    if not path.exists():
        layout = FileLayout(path.name, [Literal((json.dumps(about, indent=2) + "\n").encode())])
        write_file(str(path), layout, WriteOptions(force=True))


def _missing(config: Config, stores: dict[str, Store], held_out: Windows, batches: Batches) -> int:
    """How many windows the run needs that are not kept; at most, where counting them would take long."""
    kept, scored = stores["train"].kept(), stores["held_out"].kept()
    n = sum(not scored[i] for i in chosen(held_out, config.eval_windows))
    coming = config.stop * config.windows_per_step - batches.cursor
    if not kept.all() and coming < min(2 * len(kept), _COUNTED):
        return n + len({i for i in batches.windows_until(config.stop) if i >= 0 and not kept[i]})
    return n + min(coming, int(np.count_nonzero(~kept)))


def _check_disk(cache: Cache, folder: Path) -> None:
    store = cache.stores["train"]
    if not cache.missing:
        cache.log(f"the teacher's answers are read from {folder}; of the teacher only the head is loaded")
        return
    need, free = cache.missing * store.window_bytes, shutil.disk_usage(folder).free
    if store.writes and need > free:
        raise StorageError(
            f"the teacher's answers take {need / 1e9:.3g} GB more at most, {free / 1e9:.3g} GB are free",
            path=folder,
            hint="--teacher-cache on another disk, or none",
        )
    total = sum(map(len, cache.stores.values()))
    kept = sum(int(np.count_nonzero(store.kept())) for store in cache.stores.values())
    cache.log(
        f"the teacher's answers are kept in {folder}: {kept} of {total} windows are there, at most {cache.missing} "
        f"more take {need / 1e9:.3g} GB"
    )
