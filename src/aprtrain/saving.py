"""Saving beside the training: a copy of the live state, written by a thread, tried again, counted when it fails.

Order of a checkpoint: the model, the state, then `latest` (and `best`), then old ones go. So whatever moment a
machine stops at, `latest` names two complete files.
"""

from __future__ import annotations

import json
import os
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from aprfmt.convert.run import Way, write_file
from aprfmt.errors import AprError, ExistsError, RefusedError, StorageError, storage_error
from aprfmt.io.segments import FileLayout, Literal
from aprtrain import checkpoint
from aprtrain.checkpoint import BEST, LATEST, Identity, Snapshot, step_name

METADATA = "distillation_metadata.json"
MODEL = "model.apr"
_REHEARSAL = "rehearsal.apr"


@dataclass(frozen=True, slots=True)
class Moment:
    """A run at the end of a step, apart from the live one: what a checkpoint holds."""

    step: int
    weights: Snapshot
    lineage: Mapping[str, Any]
    state: Mapping[str, Tensor]
    facts: Mapping[str, Any]
    is_best: bool = False


@dataclass
class Saver:
    """Writes moments into a folder; one at a time.

    Attributes:
        folder: of the run.
        identity: what the model is beside its weights.
        keep: how many of the latest checkpoints stay.
        tell: takes a line about a failure.
        failed: how many periodic saves were given up.
        saved: steps of the checkpoints that were written.
    """

    folder: Path
    identity: Identity
    keep: int
    tell: Callable[[str], None]
    failed: int = 0
    saved: list[int] = field(default_factory=list)
    _thread: threading.Thread | None = None

    def rehearse(self, moment: Moment) -> None:
        """Saves a model once and throws it away, so that what would fail after days fails before the first step.

        Raises AprError.
        """
        path = self.folder / _REHEARSAL
        try:
            checkpoint.save_model(moment.weights, self.identity, path, moment.lineage)
        finally:
            path.unlink(missing_ok=True)

    def begin(self, moment: Moment) -> None:
        """Starts to write a checkpoint, after the one before is done. Never raises: a failure is told and counted."""
        self.wait()
        self._thread = threading.Thread(target=self._save, args=(moment,), name="apr-saver")
        self._thread.start()

    def wait(self) -> None:
        """Until nothing is being written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _save(self, moment: Moment) -> None:
        error = checkpoint.with_retries(lambda: self._write(moment), self.tell)
        if error is not None:
            self.failed += 1
            self.tell(f"NO CHECKPOINT of step {moment.step}: {error}; the training goes on")

    def _write(self, moment: Moment) -> None:
        name = step_name(moment.step)
        checkpoint.save_model(moment.weights, self.identity, self.folder / f"{name}.apr", moment.lineage)
        checkpoint.save_state(moment.state, moment.facts, self.folder / f"{name}.state")
        checkpoint.point(self.folder, LATEST, moment.step)
        if moment.is_best:
            checkpoint.point(self.folder, BEST, moment.step)
        checkpoint.prune(self.folder, self.keep)
        if moment.step not in self.saved:
            self.saved.append(moment.step)

    def finish(self, moment: Moment) -> Path:
        """Writes `model.apr`; gives its path.

        Raises StorageError (exit 7) where that fails, also when a last try in the folder for temporary files works.
        """
        self.wait()
        path = self.folder / MODEL
        error = checkpoint.with_retries(
            lambda: checkpoint.save_model(moment.weights, self.identity, path, moment.lineage), self.tell
        )
        if error is None:
            return path
        raise StorageError(
            f"the model could not be saved: {error.message}", path=path, hint=self._rescue(moment)
        ) from error

    def _rescue(self, moment: Moment) -> str:
        """Tries another folder; says what became of it."""
        try:
            other = Path(tempfile.mkdtemp(prefix="apr-rescued-")) / MODEL
            checkpoint.save_model(moment.weights, self.identity, other, moment.lineage)
        except (AprError, OSError) as error:
            return f"a last try elsewhere failed too: {error}; the checkpoints saved before are intact"
        return f"it was saved as {other} instead; move it to a disk that lasts"

    def describe(self, facts: Mapping[str, Any]) -> None:
        """Writes `distillation_metadata.json`; a failure is told."""
        text = json.dumps({**facts, "failed_saves": self.failed, "checkpoints": self.saved}, indent=2) + "\n"
        layout = FileLayout(METADATA, [Literal(text.encode())])
        try:
            write_file(str(self.folder / METADATA), layout, Way(force=True))
        except (AprError, OSError) as error:
            self.tell(f"{METADATA} could not be written: {error}")


def prepare_folder(folder: Path, *, resume: bool) -> int | None:
    """Makes the run's folder; the step to resume from.

    Raises ExistsError for a folder that holds a run already, RefusedError where there is nothing to resume.
    """
    try:
        os.makedirs(folder, exist_ok=True)
    except FileExistsError as error:
        raise ExistsError("the output is a file, not a folder", path=folder) from error
    except OSError as error:
        raise storage_error(error, folder) from error
    step = checkpoint.pointed(folder, LATEST)
    if resume and step is None:
        raise RefusedError(
            "there is no checkpoint to resume from", path=folder, hint="leave --resume out to begin anew"
        )
    if not resume and any((folder / name).exists() for name in (LATEST, MODEL)):
        raise ExistsError(
            "the folder holds a run already", path=folder, hint="add --resume to go on, or name another -o"
        )
    return step if resume else None
