"""Models and optimizer states on disk: written from live parameters, opened again and compared before they appear.

ckpt-step-NNNNNN.apr    a model like any other: weights, tokenizer, dims, provenance, lineage
ckpt-step-NNNNNN.state  float32 masters, moments, counters; safetensors with JSON in its metadata
latest, best            JSON {"step", "model", "state"}, replaced after both files are durable
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from aprfmt.arch import hparams as hp
from aprfmt.arch.hyperparams import Hyperparams
from aprfmt.errors import AprError, CorruptError, RefusedError, RunError, storage_error
from aprfmt.formats import apr2_write, apr_metadata, safetensors
from aprfmt.formats import open as open_model
from aprfmt.formats.out import OutTensor
from aprfmt.io.segments import FileLayout, Literal
from aprfmt.io.write import WriteOptions, write_file
from aprfmt.model import Model
from aprfmt.provenance import provenance
from aprfmt.provenance.provenance import Provenance
from aprfmt.tokenizer import apr as tokenizer_apr
from aprfmt.tokenizer.model import Tokenizer
from aprfmt.types import JsonObject
from aprtrain.network.decoder import hf_names, hf_parts
from aprtrain.network.shape import Shape
from aprtrain.optim.adamw import Optimizer, states

LINEAGE = "aprfmt.lineage"
"""Metadata key of how a checkpoint came to be: teacher, student, data, configuration, step, tokens, evaluations."""

LATEST, BEST = "latest", "best"
_HAS_VOCAB = 0x0200
_STATE_KEY = "aprtrain"
_TORCH = {"bf16": ("BF16", torch.bfloat16), "f16": ("F16", torch.float16), "f32": ("F32", torch.float32)}
_NAME = re.compile(r"ckpt-step-(\d{6,})\.(apr|state)")
_ALIGNMENT = 64
_SLAB = 1 << 28
_TRIES = 3
_PAUSE_S = 0.2


@dataclass(frozen=True, slots=True)
class Identity:
    """What a model is beside its weights."""

    hparams: Hyperparams
    tokenizer: Tokenizer | None
    origin: Provenance


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights by Hugging Face name in main memory, apart from the network, in the dtype of the file."""

    dtype: str
    tensors: dict[str, Tensor]


def step_name(step: int) -> str:
    """`ckpt-step-000120`."""
    return f"ckpt-step-{step:06d}"


class Host:
    """Copies of tensors in main memory; those of a GPU's go into pinned buffers that are used again and again.

    A buffer holds until the next copy under its name: who reads it must be done by then.
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
        """Pinned memory for a tensor, cut from slabs: torch rounds every one that it makes up to a power of two."""
        need = tensor.nbytes + -tensor.nbytes % _ALIGNMENT
        if need > len(self._slab):
            self._slab = self._pinned(max(_SLAB, 1 << (need - 1).bit_length()))
        room, self._slab = self._slab[:need], self._slab[need:]
        return room[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)

    def _pinned(self, n_bytes: int) -> Tensor:
        return torch.empty(n_bytes, dtype=torch.uint8, pin_memory=True)

    def wait(self) -> None:
        """Until all copies are complete."""
        if self._buffers:
            torch.cuda.synchronize()


def _copies(tensors: Iterable[tuple[str, Tensor]], dtype: str, host: Host) -> dict[str, Tensor]:
    """Complete after `host.wait()`."""
    kind = _TORCH[dtype][1]
    return {key: host.copy(f"{dtype} {key}", tensor.to(kind)) for key, tensor in tensors}


def copy_state(
    optimizer: Optimizer, shape: Shape, dtype: str, host: Host, *, keeps: bool
) -> tuple[Weights, dict[str, Tensor]]:
    """Copies of the live weights as a file has them, and of the states. All processes take part.

    Without `keeps` both are empty: such a process only gives others what it owns.
    """
    weights: dict[str, Tensor] = {}
    state: dict[str, Tensor] = {}
    for key, tensor in states(optimizer):
        if keeps:
            state[key] = host.copy(key, tensor)
            kind, _, name = key.partition(".")
            if kind == "master":
                weights |= _copies(hf_parts(shape, name, tensor), dtype, host)
    host.wait()
    in_order = {name: weights[name] for name in hf_names(shape) if name in weights}
    return Weights(_TORCH[dtype][0], in_order), state


def save_model(weights: Weights, identity: Identity, path: Path, lineage: Mapping[str, object]) -> None:
    """Writes the `.apr` of `weights`, in the place of a file of that name.

    Before it appears it is opened again, and its tensors, dims and tokenizer are compared with what was to be saved.
    Raises RunError where they differ or a weight is not finite, StorageError.
    """
    outs = [_out(name, weights.dtype, tensor) for name, tensor in weights.tensors.items()]
    if not outs:
        raise RunError("there is no tensor to save", path=path)
    for name, tensor in weights.tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise RunError(
                f"a weight is not finite as {weights.dtype}", tensor=name, hint="save with --save-dtype f32"
            )
    metadata = _metadata(weights, identity, lineage)
    flags = _HAS_VOCAB if identity.tokenizer is not None else 0
    segments = apr2_write.layout(apr_metadata.dump(metadata), outs, flags=flags)
    layout = FileLayout(path.name, segments, crc_footer=True)
    hashes = {name: _digest(tensor) for name, tensor in weights.tensors.items()}
    write_file(
        str(path), layout, WriteOptions(force=True), lambda file: _compare(file, weights, identity, hashes)
    )


def _out(name: str, dtype: str, tensor: Tensor) -> OutTensor:
    data = _bytes(tensor)
    return OutTensor(name, dtype, tuple(tensor.shape), len(data), lambda: [data])


def _bytes(tensor: Tensor) -> memoryview:
    """Its memory, without a copy."""
    flat = tensor.contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy().data).toreadonly()


def _digest(tensor: Tensor) -> str:
    return hashlib.sha256(_bytes(tensor)).hexdigest()


def _metadata(weights: Weights, identity: Identity, lineage: Mapping[str, object]) -> dict[str, object]:
    h = identity.hparams
    values: dict[str, object] = {
        "model_type": h.hf_model_type or h.architecture or "",
        **identity.origin.info,
        "original_format": "apr",
        "total_size": sum(t.numel() * t.element_size() for t in weights.tensors.values()),
        "param_count": sum(t.numel() for t in weights.tensors.values()),
        **hp.to_apr(h),
        **provenance.to_metadata(identity.origin.general),
        LINEAGE: dict(lineage),
    }
    if identity.tokenizer is not None:
        values |= tokenizer_apr.to_metadata(identity.tokenizer)
    return {key: value for key, value in values.items() if value is not None}


def _compare(file: str, weights: Weights, identity: Identity, hashes: Mapping[str, str]) -> None:
    with open_model(file) as model:
        if model.checksum().get("footer") != "ok":
            raise RunError("the checkpoint's checksum is wrong as read back")
        if set(model.tensors) != set(hashes):
            raise RunError("the checkpoint does not hold the network's tensors as read back")
        for name, tensor in model.tensors.items():
            same = tensor.dtype == weights.dtype and tensor.shape == tuple(weights.tensors[name].shape)
            if not same or hashlib.sha256(tensor.raw()).hexdigest() != hashes[name]:
                raise RunError("the checkpoint differs from the live weights as read back", tensor=name)
        sizes = ("architecture", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "vocab_size")
        for size in sizes:
            if getattr(model.hparams, size) != getattr(identity.hparams, size):
                raise RunError(f"the checkpoint's {size} differs as read back")
        if (model.tokenizer and model.tokenizer.tokens) != (identity.tokenizer and identity.tokenizer.tokens):
            raise RunError("the checkpoint's tokenizer differs as read back")


# --- states ---


def save_state(tensors: Mapping[str, Tensor], facts: Mapping[str, object], path: Path) -> None:
    """Writes tensors in main memory and JSON facts as one file, in the place of a file of that name."""
    kinds = {torch.float32: "F32", torch.uint8: "U8", torch.int64: "I64"}
    outs = [_out(name, kinds[tensor.dtype], tensor) for name, tensor in tensors.items()]
    text = json.dumps(facts, sort_keys=True)
    hashes = {name: _digest(tensor) for name, tensor in tensors.items()}
    layout = FileLayout(path.name, safetensors.layout(outs, {_STATE_KEY: text}))

    def check(file: str) -> None:
        with open_model(file) as model:
            found = {name: hashlib.sha256(t.raw()).hexdigest() for name, t in model.tensors.items()}
            if found != hashes or model.metadata.get(_STATE_KEY) != text:
                raise RunError("the saved state differs from the live one as read back")

    write_file(str(path), layout, WriteOptions(force=True), check)


class _Saved(Mapping[str, Tensor]):
    """The tensors of an open file, each read when it is asked for: all of them may be more than the memory holds."""

    def __init__(self, model: Model) -> None:
        self._tensors = model.tensors

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name].torch()

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


@contextmanager
def open_state(path: Path) -> Iterator[tuple[Mapping[str, Tensor], JsonObject]]:
    """What `save_state` wrote, its tensors read one by one while the block runs.

    Raises AprError for a file that is missing, damaged or of another kind.
    """
    with open_model(path) as model:
        text = model.metadata.get(_STATE_KEY)
        if not isinstance(text, str):
            raise RefusedError("the file holds no state of a training run", path=path)
        try:
            facts = dict(json.loads(text))
        except ValueError as error:
            raise CorruptError("the state's facts are not JSON", path=path) from error
        yield _Saved(model), facts


# --- the folder ---


def write_pointer(folder: Path, which: str, step: int) -> None:
    """Makes `latest` or `best` name the checkpoint of `step`."""
    text = json.dumps({"step": step, "model": f"{step_name(step)}.apr", "state": f"{step_name(step)}.state"})
    write_file(
        str(folder / which), FileLayout(which, [Literal(text.encode() + b"\n")]), WriteOptions(force=True)
    )


def read_pointer(folder: Path, which: str) -> int | None:
    """The step that `latest` or `best` names, None without such a file. Raises CorruptError."""
    path = folder / which
    try:
        value = json.loads(path.read_text())["step"]
    except FileNotFoundError:
        return None
    except OSError as error:
        raise storage_error(error, path) from error
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptError("not a pointer to a checkpoint", path=path) from error
    if not isinstance(value, int):
        raise CorruptError("not a pointer to a checkpoint", path=path)
    return value


def prune(folder: Path, keep: int) -> list[Path]:
    """Removes all checkpoints but the latest `keep` and the best; gives what was removed."""
    found: dict[int, list[Path]] = {}
    for path in folder.iterdir():
        if match := _NAME.fullmatch(path.name):
            found.setdefault(int(match[1]), []).append(path)
    kept = {*sorted(found)[-keep:], read_pointer(folder, BEST), read_pointer(folder, LATEST)}
    removed = [path for step, paths in found.items() if step not in kept for path in paths]
    for path in removed:
        path.unlink(missing_ok=True)
    return removed


def discard(folder: Path, step: int) -> None:
    """Removes what a failed save left of the checkpoint of `step`, unless it is one that a pointer names."""
    if step not in (read_pointer(folder, BEST), read_pointer(folder, LATEST)):
        for suffix in ("apr", "state"):
            (folder / f"{step_name(step)}.{suffix}").unlink(missing_ok=True)


def with_retries(
    save: Callable[[], object], tell: Callable[[str], None], pause_s: float = _PAUSE_S
) -> AprError | None:
    """Runs `save` up to three times; the error of the last try, None when one worked.

    Any exception counts, also a defect's: in the thread that saves nobody else would hear of it.
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
        tell(f"saving failed (try {number} of {_TRIES}): {error}")
        time.sleep(pause_s if number < _TRIES else 0)
    return error
