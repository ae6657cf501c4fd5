"""Whether a run fits and how long it takes, from shapes alone: what --plan prints and the run is held against.

FLOPs of a token: 2 a matrix element forward and 4 backward; causal attention 2 T Q forward for QK and PV together
(T/2 positions on average, 2 products, 2 FLOPs) and twice that backward. Only useful work counts, nothing recomputed.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypedDict

import torch

from aprfmt.errors import RefusedError, RunError, UsageError
from aprfmt.io.source import exists
from aprfmt.llama.client import require_llama
from aprfmt.texts.encoding import Encoder
from aprfmt.texts.sources import split_weights
from aprfmt.texts.summary import SAMPLE_CHARS, summarise
from aprfmt.types import JsonObject
from aprtrain.checkpoints.checkpoint import check_resumable, files_by_step, prepare_folder
from aprtrain.config import Config, resolve
from aprtrain.data.batches import check_shared, check_source
from aprtrain.features import Selection, recording
from aprtrain.memory import USUAL_PASS, MemoryRow, checkpoint_bytes, memory_plan, total
from aprtrain.models import Origin, TrainingPair, open_pair, origin_of, settle
from aprtrain.network.shape import Shape
from aprtrain.report.tracker import check_tracker
from aprtrain.selection import expect_kernels
from aprtrain.teacher.teacher import estimate_bytes
from aprtrain.world import local_world_size, world_size

SLACK = 1.15
"""Measured peak over planned bytes beyond which a run is stopped."""

_ASSUMED_FLOPS = 400e12
"""What a plan's time goes by: half of an H200's published rate is rarely missed by far."""

_PASSES = (32768, 16384, 8192, 4096, 2048)
_FILLED = 0.85
"""Share of a device's memory that a plan may take where the tokens of a pass go by it."""


def device_bytes(device: torch.device) -> int | None:
    """Memory of a GPU, None without one."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_properties(device).total_memory


def peak_bytes(device: torch.device) -> int | None:
    """The most that tensors took on a GPU since `reset_peak`, None without one."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def reset_peak(device: torch.device) -> None:
    """From here on `peak_bytes` counts."""
    if device.type == "cuda":
        torch.cuda.init()  # type: ignore[no-untyped-call]  # without it the reset raises
        torch.cuda.reset_peak_memory_stats(device)


def choose_pass(
    config: Config,
    pair: TrainingPair,
    device: torch.device,
    n_bytes: int | None,
    *,
    processes: int = 1,
    saved: int = 0,
    tried: bool = False,
) -> Config:
    """`config` with the tokens of a pass: what was given or `saved`, else as many as fit `n_bytes` of each device.

    An fp8 teacher counts as bf16: how many of its parts pass is not known yet. `tried` is as of `memory_plan`.
    """
    worst = None
    if config.teacher_residency == "fp8" and pair.teacher is not None:
        worst = estimate_bytes(pair.teacher, "bf16")
    given = config.micro_tokens or saved
    share = max(config.seq_len, config.tokens_per_step // processes)
    for tokens in (given,) if given else _PASSES if n_bytes is not None else (USUAL_PASS,):
        windows = max(1, (tokens if given else min(tokens, share)) // config.seq_len)
        found = replace(config, micro_tokens=windows * config.seq_len)
        if n_bytes is None or _need(found, pair, device, processes, tried, worst) <= _FILLED * n_bytes:
            break
    return found


def _need(
    config: Config, pair: TrainingPair, device: torch.device, processes: int, tried: bool, teacher: int | None
) -> int:
    return total(memory_plan(config, pair, device, processes=processes, tried=tried, teacher_bytes=teacher))


def check_fits(rows: list[MemoryRow], device_bytes: int | None) -> None:
    """Refuses a run whose plan is larger than the device; None: nothing is known of it."""
    if device_bytes is not None and (need := total(rows)) > device_bytes:
        largest = max(rows, key=lambda row: row.n_bytes)
        raise RefusedError(
            f"the run needs {need / 2**30:.1f} GiB, the device has {device_bytes / 2**30:.1f} GiB",
            hint=f"the largest part is {largest.name}; smaller --micro-tokens, --recompute block or another "
            "--teacher-residency take less, so do several GPUs with --shard weights",
        )


def check_peak(rows: list[MemoryRow], peak_bytes: int) -> None:
    """Stops a run that takes more memory than planned: something is held that should not be."""
    if peak_bytes > SLACK * total(rows):
        raise RunError(
            f"the run takes {peak_bytes / 2**30:.2f} GiB where {total(rows) / 2**30:.2f} GiB were planned",
            hint="that is a defect: please report it with the table of --plan",
        )


@dataclass(frozen=True, slots=True)
class Flops:
    """Useful FLOPs of a token."""

    teacher: float
    student: float

    @property
    def total(self) -> float:
        """Of both."""
        return self.teacher + self.student


def flops_of(config: Config, pair: TrainingPair) -> Flops:
    """The arithmetic of a token of a run."""
    teacher = _forward(pair.teacher.shape, config.seq_len) if pair.teacher is not None else 0.0
    return Flops(teacher, 3 * _forward(pair.student.shape, config.seq_len))


def _forward(s: Shape, seq_len: int) -> float:
    seen = sum(min(window, seq_len) if window else seq_len / 2 for window in s.windows)
    return 2.0 * (s.n_active_params + s.vocab_rows * s.d_model) + 4.0 * s.q_rows * seen


# Published dense bf16 rates, FLOP/s, by a part of the device's name.
_PEAKS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "L40S": 362e12, "B200": 2250e12, "4090": 165e12}


def peak_flops(device_name: str) -> float | None:
    """The published dense bf16 rate of a device, None where it is not known here."""
    return next((rate for part, rate in _PEAKS.items() if part in device_name), None)


# --- of a run ---


def check_means(config: Config, processes: int) -> None:
    """Raises UsageError for what so many processes cannot do, MissingDependencyError for what options need."""
    check_shared(config.windows_per_step, processes, config.seq_len)
    check_tracker(config.log_to)
    if config.qa:
        require_llama()
    if config.shard == "weights" and processes == 1:
        raise UsageError(
            "--shard weights divides the student among processes, and there is one",
            hint="start several: torchrun --nproc-per-node 2 -m aprfmt ..., or leave --shard out",
        )


class NodesPlan(TypedDict):
    """What each of several nodes needs beside the models' files; bytes.

    Attributes:
        device_bytes_each: memory of a node's devices, together.
        bytes_between_per_step: what each process sends and receives in an update.
        first_memory_bytes: main memory of the first process for a checkpoint that is being written.
        first_disk_bytes: of --keep, the best and the one being written; other nodes need room for the token shards.
    """

    nodes: int
    processes_each: int
    device_bytes_each: int
    bytes_between_per_step: int
    first_memory_bytes: int
    first_disk_bytes: int


class Plan(TypedDict):
    """What a run would take and do; JSON data. What depends on --steps is None without it.

    Attributes:
        memory: name and bytes of each part.
        student, teacher: the numbers of their shapes, and `parameters`.
        data: what `apr data --json` says, with the passes of the run over all and over each source, and whether it
            lasts for the run.
        kernels: `used` and `not_used`, expected from what is installed.
        nodes: None for a single one.
    """

    command: str
    memory: list[dict[str, Any]]
    memory_bytes: int
    flops_per_token: dict[str, float]
    tokens: int | None
    flops: float | None
    seconds_at_400_tflops: float | None
    student: dict[str, Any]
    teacher: dict[str, Any] | None
    teacher_files: dict[str, Any] | None
    vocabulary: dict[str, Any] | None
    compiled: bool
    nodes: NodesPlan | None
    data: dict[str, Any]
    config: JsonObject
    kernels: Selection
    digest: str
    origin: Origin


def plan(command: str, config: Config) -> Plan:
    """What a run would take and do, without a device: memory, FLOPs, time, vocabulary, hashes. Raises AprError."""
    device, processes = torch.device(config.device.split(":")[0]), world_size()
    check_means(config, processes)
    if config.output is not None and config.smoke is None:
        folder = Path(config.output)
        prepare_folder(folder, resumes=config.resumes)
        if config.resumes:
            check_resumable(folder, config.resume, list(files_by_step(folder)) if exists(folder) else [])
    with recording() as record, open_pair(command, config) as pair:
        config = settle(config, pair)
        expect_kernels(config, pair, device)
        if device.type == "cpu":  # which no memory decides
            config = choose_pass(config, pair, device, None, processes=processes)
        rows = memory_plan(config, pair, device, processes=processes)
        work = flops_of(config, pair)
        tokens = config.steps * config.tokens_per_step if config.steps is not None else None
        if config.steps is not None:
            config = resolve(config)
        return {
            "command": command,
            "memory": [{"name": row.name, "bytes": row.n_bytes} for row in rows],
            "memory_bytes": total(rows),
            "flops_per_token": {"teacher": work.teacher, "student": work.student},
            "tokens": tokens,
            "flops": tokens and tokens * work.total,
            "seconds_at_400_tflops": tokens and tokens * work.total / _ASSUMED_FLOPS,
            "student": {**_dims(pair.student.shape), "made": pair.student.model is None},
            "teacher": _dims(pair.teacher.shape) if pair.teacher is not None else None,
            "teacher_files": asdict(pair.files.facts) if pair.files is not None else None,
            "vocabulary": asdict(pair.vocabulary) if pair.vocabulary is not None else None,
            "compiled": config.is_compiled(device.type),
            "nodes": _plan_nodes(config, pair.student.shape, total(rows), device, processes),
            "data": _plan_data(config, pair),
            "config": config.to_json(),
            "kernels": record.to_json(),
            "digest": config.digest(),
            "origin": origin_of(command, config, pair, None),
        }


def _plan_nodes(config: Config, s: Shape, n_bytes: int, device: torch.device, processes: int) -> NodesPlan | None:
    each = local_world_size() or processes
    if each == processes:
        return None
    checkpoint = checkpoint_bytes(config, s)
    return {
        "nodes": -(-processes // each),
        "processes_each": each,
        "device_bytes_each": each * n_bytes,
        "bytes_between_per_step": s.n_params * (4 + (2 if device.type == "cuda" else 4)),
        "first_memory_bytes": checkpoint,
        "first_disk_bytes": (config.keep + 2) * checkpoint,
    }


def _plan_data(config: Config, pair: TrainingPair) -> dict[str, Any]:
    """What the sources of the data hold, about where they are long, and how often the run reads each."""
    paths, weights = split_weights(config.data)
    own = Path(config.output) if config.output is not None else None
    found = summarise(
        paths, weights, Encoder(pair.student.tokenizer), text_field=config.text_field, strict=config.strict, own=own,
        sample=SAMPLE_CHARS,
    )  # fmt: skip
    body: dict[str, Any] = found.to_json()
    needed = config.steps * config.tokens_per_step if config.steps is not None else None
    for source in body["sources"]:
        share = source["weight"] or (source["tokens"] / found.tokens if found.tokens else 0.0)
        source["passes"] = needed and needed * share / max(1, source["tokens"])
    body["passes"] = needed and needed / max(1, found.tokens)
    scarce = max(body["sources"], key=lambda source: source["passes"] or 0.0, default=body)
    scarce = body if scarce is body or scarce["weight"] is None else scarce
    body["lasts"] = config.repeat or (scarce["passes"] or 0.0) <= (config.epochs or 1)
    if not found.estimated:
        if found.documents < (2 if found.lengths and config.eval_data is None else 1):  # shards have no lengths
            raise RefusedError(
                f"no training documents: {found.documents} read",
                hint="give more text: at least two different documents",
            )
        for each in found.sources:
            check_source(each.name, config.seq_len if each.weight is None else each.tokens, config.seq_len)
    _check_lasts(config, body, scarce)
    return body


def _check_lasts(config: Config, body: dict[str, Any], scarce: dict[str, Any]) -> None:
    """Refuses what the run would, once it has counted: by twice as many tokens where they are estimated.

    `scarce` is the source of a mixture that is used up first, or all of the data.
    """
    if body["lasts"] or config.steps is None:
        return
    # Of the last update a part is enough; the run also takes the documents held out and copies off.
    passes = scarce["passes"] * (min(config.steps, config.smoke or config.steps) - 1) / config.steps
    if passes > (config.epochs or 1) * (2 if body["estimated"] else 1):
        about, whose = "about " if body["estimated"] else "", f" of {scarce['name']}" if "name" in scarce else ""
        needed = round(config.steps * config.tokens_per_step * scarce.get("weight", 1))
        raise RefusedError(
            f"{config.steps} steps need {needed} tokens{whose}, the data hold {about}{scarce['tokens']}: "
            f"{about}{passes:.1f} epochs",
            hint=f"give more data, fewer --steps, --epochs {math.ceil(passes)} or --repeat",
        )


def _dims(shape: Shape) -> dict[str, Any]:
    numbers = {name: value for name, value in asdict(shape).items() if isinstance(value, (int, float, str))}
    return numbers | {"parameters": shape.n_params}
