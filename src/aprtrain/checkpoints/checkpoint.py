"""Checkpoints: models and optimizer states on disk, written from live parameters and verified before publication.

ckpt-step-NNNNNN.apr    a model like any other: weights, tokenizer, dimensions, provenance, lineage
ckpt-step-NNNNNN.state  float32 master weights, moments, counters; safetensors with JSON in its metadata
latest, best            JSON {"step", "model", "state"}, replaced after both files are durable

A thread saves while training continues, retries, and counts failures. It writes the model, the state, then `latest`
(and `best`), then removes old ones: whenever a machine stops, `latest` names two complete files. Each file has
checksums of its own, which resume.py verifies before a run continues.
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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

import aprfmt
from aprfmt.arch.hyperparams import Hyperparams
from aprfmt.canonical.metadata import apr_metadata_with
from aprfmt.errors import (
    AprError,
    CorruptError,
    ExistsError,
    RefusedError,
    RunError,
    StorageError,
    storage_error,
    storage_errors,
)
from aprfmt.formats import apr2_write, apr_metadata
from aprfmt.formats import open_own as open_model
from aprfmt.formats.apr2 import FLAGS
from aprfmt.formats.apr_metadata import FOOTER, FOOTER_KEY, TRUE_DTYPES_KEY
from aprfmt.inspection.run_report import FILE, METADATA
from aprfmt.io.crc import crc32_of, crc32_of_range
from aprfmt.io.pipe import FileLayout, Literal, WriteOptions, write_file
from aprfmt.io.temporary import sweep
from aprfmt.provenance.provenance import Provenance
from aprfmt.text import first_few
from aprfmt.tokenizer.model import Tokenizer
from aprtrain.checkpoints.state import out_tensor, save_state, tensor_bytes
from aprtrain.features import current, reason_of
from aprtrain.network.decoder import Decoder
from aprtrain.network.lora import merged
from aprtrain.network.names import hf_names, hf_parts
from aprtrain.optim.states import Optimizer, states
from aprtrain.qat import Quantizer

LINEAGE = "aprfmt.lineage"
"""Metadata key of a checkpoint's lineage: teacher, student, data, configuration, step, tokens, evaluations."""

SIZES = ("architecture", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "vocab_size")
"""Hyper-parameters that a checkpoint must share with the student of its run."""

LATEST, BEST = "latest", "best"
MODEL = "model.apr"
_TRIAL = "trial.apr"
_GLANCE_S = 0.05
_OURS = re.compile(
    r"(ckpt-step-|(model|trial)\.apr|adapter|teacher|tokens|latest|best|distillation_meta|metrics|report).*", re.DOTALL
)
"""Files that only a run writes into its folder."""
_TORCH = {"bf16": ("BF16", torch.bfloat16), "f16": ("F16", torch.float16), "f32": ("F32", torch.float32)}
_NAME = re.compile(r"ckpt-step-(\d{6,})\.(apr|state)", re.ASCII)
_POINTER = re.compile(rb'\{"step": (\d{1,18}),')
_ALIGNMENT = 64
_SLAB = 1 << 28
_TRIES = 3
_PAUSE_S = 0.2


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """A model without its weights."""

    hparams: Hyperparams
    tokenizer: Tokenizer | None
    origin: Provenance


class StoredWeight(NamedTuple):
    """A weight in host memory as the file has it: its dtype and shape, and the values, or the bytes of blocks."""

    dtype: str
    shape: tuple[int, ...]
    data: Tensor


Weights = Mapping[str, StoredWeight]
"""By Hugging Face name, in the order of the network."""


def step_name(step: int) -> str:
    """`ckpt-step-000120`."""
    return f"ckpt-step-{step:06d}"


class HostBuffers:
    """Copies of tensors in host memory; GPU tensors are copied into reused pinned buffers.

    A buffer is valid until the next copy under its name: its reader must be done by then.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._slab = torch.empty(0, dtype=torch.uint8)

    def copy(self, name: str, tensor: Tensor) -> Tensor:
        """A contiguous copy; complete after `wait`."""
        if tensor.device.type == "cpu":
            return tensor.detach().clone(memory_format=torch.contiguous_format)
        buffer = self._buffers.get(name)
        if buffer is None or (buffer.shape, buffer.dtype) != (tensor.shape, tensor.dtype):
            buffer = self._buffers[name] = self._room(tensor)
        return buffer.copy_(tensor.detach(), non_blocking=True)

    def _room(self, tensor: Tensor) -> Tensor:
        """Pinned memory for a tensor, cut from slabs: torch rounds each allocation up to a power of two."""
        need = tensor.nbytes + -tensor.nbytes % _ALIGNMENT
        if need > len(self._slab):
            self._slab = self._pinned(max(_SLAB, 1 << (need - 1).bit_length()))
        room, self._slab = self._slab[:need], self._slab[need:]
        return room[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)

    def _pinned(self, n_bytes: int) -> Tensor:
        return torch.empty(n_bytes, dtype=torch.uint8, pin_memory=True)

    def wait(self) -> None:
        """Waits until all copies are complete."""
        if self._buffers:
            torch.cuda.synchronize()


def copy_state(
    optimizer: Optimizer, network: Decoder, dtype: str, host: HostBuffers, *, keeps: bool, quantizer: Quantizer | None
) -> tuple[Weights, dict[str, Tensor]]:
    """Copies of the live weights in the file's form, LoRA pairs merged, and of the optimizer states. Collective.

    Without `keeps` both are empty: such a process only provides what it owns. Raises RunError if blocks cannot hold a
    weight.
    """
    found: dict[str, StoredWeight] = {}
    state: dict[str, Tensor] = {}

    def store(hf: str, part: Tensor) -> None:
        kind, torch_dtype = _TORCH[dtype]
        if quantizer is not None and hf in quantizer.types:
            kind, stored = quantizer.types[hf], quantizer.encode(hf, part)
        else:
            stored = part.to(torch_dtype)
        found[hf] = StoredWeight(kind, tuple(part.shape), host.copy(f"{dtype} {hf}", stored))

    for key, tensor in states(optimizer):
        if keeps:
            state[key] = host.copy(key, tensor)
            kind, _, name = key.partition(".")
            if kind == "master" and network.lora is None:
                for hf, part in hf_parts(network.shape, name, tensor):
                    store(hf, part)
    host.wait()
    if keeps and network.lora is not None:
        masters = {key.removeprefix("master."): value for key, value in state.items() if key.startswith("master.")}
        for hf, part in merged(network, masters):
            store(hf, part)
        host.wait()
    return {name: found[name] for name in hf_names(network.shape) if name in found}, state


def save_model(weights: Weights, identity: ModelIdentity, path: Path, lineage: Mapping[str, object]) -> None:
    """Writes the `.apr` of `weights`, replacing an existing file.

    Before publication it is opened, and its tensors, dimensions and tokenizer are compared with the originals. Raises
    RunError if they differ or a weight is not finite, StorageError.
    """
    outs = [out_tensor(name, dtype, data, shape) for name, (dtype, shape, data) in weights.items()]
    if not outs:
        raise RunError("no tensors to save", path=path)
    for name, (dtype, _, data) in weights.items():
        if not bool(torch.isfinite(data).all()):
            raise RunError(f"a weight is NaN or infinite in {dtype}", tensor=name, hint="save with --save-dtype f32")
    n_bytes, n_params = sum(out.n_bytes for out in outs), sum(prod(out.shape) for out in outs)
    more = {LINEAGE: dict(lineage), FOOTER_KEY: FOOTER, TRUE_DTYPES_KEY: apr2_write.true_dtypes(outs) or None}
    metadata = apr_metadata_with(
        identity.hparams, identity.tokenizer, identity.origin, more, kind="apr", n_bytes=n_bytes, n_params=n_params
    )
    flags = FLAGS["has_vocab"] if identity.tokenizer is not None else 0
    flags |= FLAGS["quantized"] if any(data.dtype == torch.uint8 for _, _, data in weights.values()) else 0
    segments = apr2_write.layout(apr_metadata.dump(metadata), outs, flags=flags)
    layout = FileLayout(path.name, segments, crc_footer=True)
    sums = {name: crc32_of(tensor_bytes(weight.data)) for name, weight in weights.items()}
    write_file(str(path), layout, WriteOptions(force=True), lambda file: _compare(file, weights, identity, sums))


def _compare(file: str, weights: Weights, identity: ModelIdentity, sums: Mapping[str, int]) -> None:
    with open_model(file) as model:
        if model.checksum().get("footer") != "ok":
            raise RunError("the checkpoint on disk has a wrong checksum")
        if set(model.tensors) != set(sums):
            raise RunError("the checkpoint on disk does not contain the network's tensors")
        for name, tensor in model.tensors.items():
            same = (tensor.dtype, tensor.shape) == weights[name][:2]
            if not same or crc32_of_range(tensor.source, tensor.offset, tensor.offset + tensor.n_bytes) != sums[name]:
                raise RunError("the checkpoint on disk differs from the live weights", tensor=name)
        for size in SIZES:
            if getattr(model.hparams, size) != getattr(identity.hparams, size):
                raise RunError(f"the checkpoint on disk has a different {size}")
        if (model.tokenizer and model.tokenizer.tokens) != (identity.tokenizer and identity.tokenizer.tokens):
            raise RunError("the checkpoint on disk has a different tokenizer")


# --- the folder ---


def write_pointer(folder: Path, which: str, step: int) -> None:
    """Points `latest` or `best` to the checkpoint of `step`."""
    _write_text(folder / which, _pointer(step))


def _pointer(step: int) -> str:
    name = step_name(step)
    return json.dumps({"step": step, "model": f"{name}.apr", "state": f"{name}.state"}) + "\n"


def _write_text(path: Path, text: str) -> None:
    write_file(str(path), FileLayout(path.name, [Literal(text.encode())]), WriteOptions(force=True))


def read_pointer(folder: Path, which: str) -> int | None:
    """The step that `latest` or `best` points to, None without such a file. Raises CorruptError."""
    path = folder / which
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise storage_error(error, path) from error
    match = _POINTER.match(text)
    if match is None or text != _pointer(int(match[1])).encode():  # it states the step three times
        raise CorruptError("not a pointer to a checkpoint", path=path)
    return int(match[1])


def files_by_step(folder: Path) -> dict[int, list[Path]]:
    """The files of each checkpoint in a run's folder, by ascending step. Raises StorageError."""
    found: dict[int, list[Path]] = {}
    with storage_errors(folder):
        for path in folder.iterdir():
            if (match := _NAME.fullmatch(path.name)) and path.stem == step_name(int(match[1])):
                found.setdefault(int(match[1]), []).append(path)
    return dict(sorted(found.items()))


def prune(folder: Path, keep: int, left: Collection[int], also_keep: Callable[[int], bool]) -> list[Path]:
    """Removes all checkpoints except the latest `keep`, the best, and steps that `also_keep` accepts.

    The steps `left`, of a line that the run did not continue, are always removed. Returns the removed ones.
    """
    found, latest, best = files_by_step(folder), read_pointer(folder, LATEST), read_pointer(folder, BEST)
    own = [step for step in found if step not in left]
    kept = {*own[-keep:], best, latest, *filter(also_keep, own)}
    removed = [path for step, paths in found.items() if step not in kept for path in paths]
    for path in removed:
        path.unlink(missing_ok=True)
    return removed


def discard(folder: Path, step: int) -> None:
    """Removes the leftovers of a failed save of `step`, unless a pointer names them."""
    if step not in (read_pointer(folder, BEST), read_pointer(folder, LATEST)):
        for suffix in ("apr", "state"):
            (folder / f"{step_name(step)}.{suffix}").unlink(missing_ok=True)


def with_retries(save: Callable[[], object], tell: Callable[[str], None], pause_s: float = _PAUSE_S) -> AprError | None:
    """Calls `save` up to three times; returns the last error, None on success.

    Any exception counts, even a bug: nobody else would notice it in the saving thread.
    """
    error: AprError | None = None
    for number in range(1, _TRIES + 1):
        try:
            save()
        except AprError as failure:
            error = failure
        except OSError as failure:
            error = storage_error(failure, "(checkpoint)")
        except Exception as failure:
            error = RunError(f"{type(failure).__name__}: {failure}")
        else:
            return None
        tell(f"saving failed (attempt {number} of {_TRIES}): {error}")
        time.sleep(pause_s if number < _TRIES else 0)
    return error


# --- saving beside the training ---


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of a run after a step, separate from the live one: the content of a checkpoint."""

    step: int
    weights: Weights
    lineage: Mapping[str, object]
    state: Mapping[str, Tensor]
    facts: Mapping[str, object]
    is_best: bool = False


@dataclass
class Saver:
    """Writes snapshots into a folder, one at a time.

    Attributes:
        folder: of the run.
        identity: the model without its weights.
        keep: number of latest checkpoints to keep.
        tell: called with a line about a failure.
        record: called with an event, "checkpoint" or "failed_save", and its values for the metrics.
        failed: number of periodic saves that were given up.
        saved: steps of the written checkpoints.
        left: steps of checkpoints that a resumed run abandons; removed once it has one of its own.
        also_keep: whether to keep the checkpoint of a step in addition to the latest and the best.
    """

    folder: Path
    identity: ModelIdentity
    keep: int
    tell: Callable[[str], None]
    record: Callable[[str, Mapping[str, object]], None] = lambda event, values: None
    failed: int = 0
    saved: list[int] = field(default_factory=list)
    left: set[int] = field(default_factory=set)
    also_keep: Callable[[int], bool] = lambda step: False
    _thread: threading.Thread | None = None

    def trial_save(self, snapshot: Snapshot) -> None:
        """Saves a model once and discards it, so that failures show before the first step instead of after days.

        Warns about a disk that will be full, and about a model that a GGUF cannot store. Raises AprError.
        """
        path = self.folder / _TRIAL
        try:
            save_model(snapshot.weights, self.identity, path, snapshot.lineage)
            self._check_space(path.stat().st_size + sum(t.nbytes for t in snapshot.state.values()))
            try:
                aprfmt.export_model(path, path.with_suffix(".gguf"), plan=True)
            except AprError as error:
                hint = f" ({error.hint})" if error.hint else ""
                self.tell(f"warning: cannot convert this student to GGUF: {error.message}{hint}")
        finally:
            path.unlink(missing_ok=True)

    def _check_space(self, n_bytes: int) -> None:
        need, free = (self.keep + 2) * n_bytes, shutil.disk_usage(self.folder).free
        if need > free:
            self.tell(
                f"warning: {self.keep + 2} checkpoints (--keep, the best, the one being written) take "
                f"{need / 2**30:.1f} GiB, the disk has {free / 2**30:.1f} GiB free"
            )

    def begin(self, snapshot: Snapshot) -> None:
        """Starts writing a checkpoint once the previous one is done. Never raises: failures are logged and counted."""
        self.wait()
        self._thread = threading.Thread(target=self._save, args=(snapshot,), name="apr-saver")
        self._thread.start()

    def wait(self) -> None:
        """Waits until nothing is being written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _save(self, snapshot: Snapshot) -> None:
        error = with_retries(lambda: self._write(snapshot), self.tell)
        if error is not None:
            self.failed += 1
            self.record("failed_save", {"step": snapshot.step, "error": str(error)})
            with suppress(AprError, OSError):
                discard(self.folder, snapshot.step)  # on a full disk the next one needs the space
            self.tell(f"THE CHECKPOINT of step {snapshot.step} WAS NOT SAVED: {error}")

    def _write(self, snapshot: Snapshot) -> None:
        name, began = step_name(snapshot.step), time.monotonic()
        save_model(snapshot.weights, self.identity, self.folder / f"{name}.apr", snapshot.lineage)
        save_state(snapshot.state, snapshot.facts, self.folder / f"{name}.state")
        write_pointer(self.folder, LATEST, snapshot.step)
        if snapshot.is_best:
            write_pointer(self.folder, BEST, snapshot.step)
        try:
            self.left.discard(snapshot.step)
            self._tell_removed(prune(self.folder, self.keep, self.left, self.also_keep))
        except (AprError, OSError) as error:  # this one is saved; the next one retries
            self.tell(f"old checkpoints could not be removed: {error}")
        if snapshot.step not in self.saved:
            self.saved.append(snapshot.step)
        size = (self.folder / f"{name}.apr").stat().st_size
        facts = {"bytes": size, "seconds": time.monotonic() - began, "best": snapshot.is_best}
        self.record("checkpoint", {"step": snapshot.step, **facts})

    def _tell_removed(self, paths: Sequence[Path]) -> None:
        """Names the removed checkpoints that a resumed run came with; its own come and go without a word."""
        own = {step_name(step) for step in self.saved}
        left = {step_name(step) for step in self.left}
        removed = {path.stem for path in paths} - own
        for names, why in (
            (removed - left, f"--keep {self.keep} keeps the latest {self.keep} and the best"),
            (removed & left, "the run continues from an older one"),
        ):
            if names:
                self.tell(f"removed {first_few(sorted(names))}: {why}")

    def finish(self, snapshot: Snapshot) -> Path:
        """Writes `model.apr` and returns its path.

        Raises StorageError (exit 7) on failure, even if a last attempt in the temporary folder succeeds.
        """
        self.wait()
        path = self.folder / MODEL
        error = with_retries(lambda: save_model(snapshot.weights, self.identity, path, snapshot.lineage), self.tell)
        if error is None:
            return path
        raise StorageError(
            f"the model could not be saved: {error.message}", path=path, hint=self._rescue(snapshot)
        ) from error

    def _rescue(self, snapshot: Snapshot) -> str:
        """Tries another folder; returns a sentence about the result."""
        try:
            other = Path(tempfile.mkdtemp(prefix="apr-rescued-")) / MODEL
            save_model(snapshot.weights, self.identity, other, snapshot.lineage)
        except (AprError, OSError) as error:
            return f"saving it elsewhere failed too: {error}; free some space, then --resume writes the model"
        return f"it was saved as {other} instead: move it to permanent storage, or free some space and --resume"

    def describe(self, facts: Mapping[str, object]) -> None:
        """Writes `distillation_metadata.json`; logs a failure."""
        try:
            counts = {"failed_saves": self.failed, "checkpoints": self.saved}
            _write_text(self.folder / METADATA, json.dumps({**facts, **counts}, indent=2) + "\n")
        except (AprError, OSError) as error:
            self.tell(f"{METADATA} could not be written: {error}")


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Creates and locks the run's folder for the duration of the block, if the file system supports locks.

    Removes what a killed run was writing. Raises ExistsError if another run has the lock, StorageError.
    """
    try:
        os.makedirs(folder, exist_ok=True)
        lock = os.open(folder, os.O_RDONLY)
    except FileExistsError as error:
        raise ExistsError("the output is a file, not a folder", path=folder, hint="choose another -o") from error
    except OSError as error:
        raise storage_error(error, folder) from error
    try:
        _lock(lock, folder)
        yield
    finally:
        with suppress(OSError):  # nothing was written by it
            os.close(lock)


def _lock(descriptor: int, folder: Path) -> None:
    for is_last in (False, True):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if is_last:
                raise ExistsError(
                    "another run is writing to this folder",
                    path=folder,
                    hint="wait until it ends, or choose another -o",
                ) from None
            time.sleep(_GLANCE_S)  # `apr runs` may hold the lock for a moment
        except OSError as error:  # a network file system may lack locks
            current().miss("locks", reason_of(error))
            return
    sweep(folder, _OURS)
    with suppress(OSError):
        (folder / _TRIAL).unlink(missing_ok=True)


def clear(folder: Path, *, is_new: bool) -> None:
    """Removes the files of a run that ended before its first step, except token ids, which the next attempt reuses."""
    if not any((folder / name).exists() for name in (LATEST, MODEL, METADATA)):
        with suppress(OSError):
            (folder / FILE).unlink(missing_ok=True)
            if is_new:
                folder.rmdir()  # if nothing is left


def check_resumable(folder: Path, wanted: bool | int | str, steps: Collection[int]) -> None:
    """Raises RefusedError unless the checkpoint of step `wanted`, for True any, is among these `steps`."""
    if not steps and wanted is True:
        raise RefusedError(
            "no checkpoint to resume from",
            path=folder,
            hint="leave out --resume to start a new run; --resume auto starts or continues",
        )
    if wanted is not True and wanted not in steps:
        there = f"available steps: {', '.join(map(str, steps)) or 'none'}"
        raise RefusedError(f"no checkpoint of step {wanted}", path=folder, hint=f"{there}; --resume: the latest")


def prepare_folder(folder: Path, *, resumes: bool) -> None:
    """Raises ExistsError for a folder that already has a run, unless it `resumes`."""
    if not resumes and any((folder / name).exists() for name in (LATEST, MODEL)):
        raise ExistsError(
            "the folder already contains a run",
            path=folder,
            hint="add --resume to continue (--resume auto starts or continues), or choose another -o",
        )
