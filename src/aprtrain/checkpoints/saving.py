"""Saving beside the training: a copy of the live state, written by a thread, tried again, counted when it fails.

Order of a checkpoint: the model, the state, then `latest` (and `best`), then old ones go. So whatever moment a
machine stops at, `latest` names two complete files.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

import aprfmt
from aprfmt.errors import AprError, ExistsError, RefusedError, StorageError, storage_error
from aprfmt.io.segments import FileLayout, Literal
from aprfmt.io.write import WriteOptions, write_file
from aprtrain.checkpoints import checkpoint
from aprtrain.checkpoints.checkpoint import BEST, LATEST, Identity, Weights, step_name
from aprtrain.report import metrics

METADATA = metrics.METADATA
MODEL = "model.apr"
_TRIAL = "rehearsal.apr"
_UNFINISHED = re.compile(
    r"\.(ckpt-step-|model\.apr|rehearsal\.apr|tokens|latest|best|distillation_meta|metrics|report).*\.tmp"
)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A run at the end of a step, apart from the live one: what a checkpoint holds."""

    step: int
    weights: Weights
    lineage: Mapping[str, object]
    state: Mapping[str, Tensor]
    facts: Mapping[str, object]
    is_best: bool = False


@dataclass
class Saver:
    """Writes moments into a folder; one at a time.

    Attributes:
        folder: of the run.
        identity: what the model is beside its weights.
        keep: how many of the latest checkpoints stay.
        tell: takes a line about a failure.
        record: takes an event, "checkpoint" or "failed_save", and its values for the metrics.
        failed: how many periodic saves were given up.
        saved: steps of the checkpoints that were written.
    """

    folder: Path
    identity: Identity
    keep: int
    tell: Callable[[str], None]
    record: Callable[[str, Mapping[str, object]], None] = lambda event, values: None
    failed: int = 0
    saved: list[int] = field(default_factory=list)
    _thread: threading.Thread | None = None

    def trial_save(self, snapshot: Snapshot) -> None:
        """Saves a model once and throws it away, so that what would fail after days fails before the first step.

        Tells of a disk that will be full, and of a model that no GGUF can hold. Raises AprError.
        """
        path = self.folder / _TRIAL
        try:
            checkpoint.save_model(snapshot.weights, self.identity, path, snapshot.lineage)
            self._check_space(path.stat().st_size + sum(t.nbytes for t in snapshot.state.values()))
            self._check_export(path)
        finally:
            path.unlink(missing_ok=True)

    def _check_export(self, path: Path) -> None:
        try:
            aprfmt.export_model(path, path.with_suffix(".gguf"), plan=True)
        except AprError as error:
            hint = f" ({error.hint})" if error.hint else ""
            self.tell(f"warning: a GGUF cannot be made of this student: {error.message}{hint}")

    def _check_space(self, n_bytes: int) -> None:
        need, free = (self.keep + 2) * n_bytes, shutil.disk_usage(self.folder).free
        if need > free:
            self.tell(
                f"warning: {self.keep + 2} checkpoints (--keep, the best, the one being written) take "
                f"{need / 2**30:.1f} GiB, the disk has {free / 2**30:.1f} GiB free"
            )

    def begin(self, snapshot: Snapshot) -> None:
        """Starts to write a checkpoint, after the one before is done. Never raises: a failure is told and counted."""
        self.wait()
        self._thread = threading.Thread(target=self._save, args=(snapshot,), name="apr-saver")
        self._thread.start()

    def wait(self) -> None:
        """Until nothing is being written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _save(self, snapshot: Snapshot) -> None:
        error = checkpoint.with_retries(lambda: self._write(snapshot), self.tell)
        if error is not None:
            self.failed += 1
            self.record("failed_save", {"step": snapshot.step, "error": str(error)})
            with suppress(AprError, OSError):
                checkpoint.discard(self.folder, snapshot.step)  # on a full disk the next one needs the place
            self.tell(f"THE CHECKPOINT of step {snapshot.step} WAS NOT SAVED: {error}")

    def _write(self, snapshot: Snapshot) -> None:
        name, began = step_name(snapshot.step), time.monotonic()
        checkpoint.save_model(snapshot.weights, self.identity, self.folder / f"{name}.apr", snapshot.lineage)
        checkpoint.save_state(snapshot.state, snapshot.facts, self.folder / f"{name}.state")
        checkpoint.write_pointer(self.folder, LATEST, snapshot.step)
        if snapshot.is_best:
            checkpoint.write_pointer(self.folder, BEST, snapshot.step)
        try:
            checkpoint.prune(self.folder, self.keep)
        except (AprError, OSError) as error:  # this one is saved; the next one tries again
            self.tell(f"old checkpoints could not be removed: {error}")
        if snapshot.step not in self.saved:
            self.saved.append(snapshot.step)
        size = (self.folder / f"{name}.apr").stat().st_size
        facts = {"bytes": size, "seconds": time.monotonic() - began, "best": snapshot.is_best}
        self.record("checkpoint", {"step": snapshot.step, **facts})

    def finish(self, snapshot: Snapshot) -> Path:
        """Writes `model.apr`; gives its path.

        Raises StorageError (exit 7) where that fails, also when a last try in the folder for temporary files works.
        """
        self.wait()
        path = self.folder / MODEL
        error = checkpoint.with_retries(
            lambda: checkpoint.save_model(snapshot.weights, self.identity, path, snapshot.lineage), self.tell
        )
        if error is None:
            return path
        raise StorageError(
            f"the model could not be saved: {error.message}", path=path, hint=self._rescue(snapshot)
        ) from error

    def _rescue(self, snapshot: Snapshot) -> str:
        """Tries another folder; says what became of it."""
        try:
            other = Path(tempfile.mkdtemp(prefix="apr-rescued-")) / MODEL
            checkpoint.save_model(snapshot.weights, self.identity, other, snapshot.lineage)
        except (AprError, OSError) as error:
            return f"a last try elsewhere failed too: {error}; the checkpoints saved before are intact"
        return f"it was saved as {other} instead; move it to a disk that lasts"

    def describe(self, facts: Mapping[str, object]) -> None:
        """Writes `distillation_metadata.json`; a failure is told."""
        text = json.dumps({**facts, "failed_saves": self.failed, "checkpoints": self.saved}, indent=2) + "\n"
        layout = FileLayout(METADATA, [Literal(text.encode())])
        try:
            write_file(str(self.folder / METADATA), layout, WriteOptions(force=True))
        except (AprError, OSError) as error:
            self.tell(f"{METADATA} could not be written: {error}")


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Makes the run's folder and keeps other runs out of it while the block runs, where the disk knows locks.

    What a killed run was writing is removed. Raises ExistsError where another run holds it, StorageError.
    """
    try:
        os.makedirs(folder, exist_ok=True)
        lock = os.open(folder, os.O_RDONLY)
    except FileExistsError as error:
        raise ExistsError(
            "the output is a file, not a folder", path=folder, hint="name another -o"
        ) from error
    except OSError as error:
        raise storage_error(error, folder) from error
    try:
        _lock(lock, folder)
        yield
    finally:
        os.close(lock)


def _lock(descriptor: int, folder: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ExistsError(
            "another run is writing to this folder", path=folder, hint="wait for it, or name another -o"
        ) from None
    except OSError:  # a network's disk may have no locks
        return
    for path in folder.iterdir():
        if path.is_dir() and _UNFINISHED.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)
        elif path.name == _TRIAL or _UNFINISHED.fullmatch(path.name):
            with suppress(OSError):
                path.unlink()


def clear(folder: Path, *, is_new: bool) -> None:
    """Removes what a run wrote that ended before its first step, but for token ids, which the next try takes."""
    if not any((folder / name).exists() for name in (LATEST, MODEL, METADATA)):
        with suppress(OSError):
            (folder / metrics.FILE).unlink(missing_ok=True)
            if is_new:
                folder.rmdir()  # where nothing is left


def prepare_folder(folder: Path, *, resume: bool) -> int | None:
    """The step to resume from in a run's folder.

    Raises ExistsError for a folder that holds a run already, RefusedError where there is nothing to resume.
    """
    step = checkpoint.read_pointer(folder, LATEST)
    if resume and step is None:
        raise RefusedError(
            "there is no checkpoint to resume from", path=folder, hint="leave --resume out to start a new run"
        )
    if not resume and any((folder / name).exists() for name in (LATEST, MODEL)):
        raise ExistsError(
            "the folder holds a run already", path=folder, hint="add --resume to continue, or name another -o"
        )
    return step if resume else None
