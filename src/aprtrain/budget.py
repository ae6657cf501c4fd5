"""Estimates memory and time of a run from shapes alone: printed by --plan, enforced during the run.

FLOPs per token: 2 per matrix element forward and 4 backward; causal attention 2 T Q forward for QK and PV together
(T/2 positions on average, 2 products, 2 FLOPs) and twice that backward. Recomputation does not count.
"""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypedDict

import torch

from aprfmt.errors import RefusedError, RunError, UsageError
from aprfmt.formats.hub_datasets import split_sources
from aprfmt.io.server_url import is_server
from aprfmt.io.source import exists
from aprfmt.llama.client import require_llama
from aprfmt.texts.encoding import Encoder
from aprfmt.texts.summary import SAMPLE_CHARS, DataJson, DataSourceJson, summarise
from aprfmt.types import JsonObject
from aprtrain.checkpoints.checkpoint import check_resumable, files_by_step, prepare_folder
from aprtrain.config import Config, resolve, usual_values
from aprtrain.data.batches import check_shared, check_source, more_data_hint
from aprtrain.features import Selection, recording
from aprtrain.memory import USUAL_PASS, MemoryRow, checkpoint_bytes, memory_plan, total
from aprtrain.models import Origin, TrainingPair, open_pair, origin_of, resolve_residency
from aprtrain.network.shape import NO_ATTENTION, Shape
from aprtrain.qat import QatSummary, summarize
from aprtrain.report.tracker import check_tracker
from aprtrain.selection import expect_kernels
from aprtrain.teacher.teacher import estimate_bytes
from aprtrain.world import local_world_size, world_size

SLACK = 1.15
"""Maximum ratio of measured peak to planned bytes; a run beyond it is stopped."""

_ASSUMED_FLOPS = 400e12
"""FLOP/s that a plan assumes: about 40 % of an H200's published rate, close to what runs reach."""

_CPU_SHARE = 0.5
"""Fraction of the rate of matrix products that a step on a CPU reaches."""
_CPU_ROWS, _CPU_SECONDS = 512, 0.2

_PASSES = (32768, 16384, 8192, 4096, 2048)
_FILLED = 0.85
"""Fraction of a device's memory to fill when choosing the micro-batch size."""


def device_bytes(device: torch.device) -> int | None:
    """Total memory of a GPU; None for a CPU."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_properties(device).total_memory


def peak_bytes(device: torch.device) -> int | None:
    """Peak memory of tensors on a GPU since `reset_peak`; None for a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def reset_peak(device: torch.device) -> None:
    """Resets the peak that `peak_bytes` reports."""
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
    """`config` with `micro_tokens` set: the given or `saved` value, else the largest that fits `n_bytes` per device.

    Counts an fp8 teacher as bf16, since the number of fp8 layers is not known yet. `tried`: see `memory_plan`.
    """
    worst = None
    if config.teacher_residency == "fp8" and pair.teacher is not None:
        worst = estimate_bytes(pair.teacher, "bf16")
    given = config.micro_tokens or saved
    share = max(config.seq_len, config.tokens_per_step // processes)
    for tokens in (given,) if given else _PASSES if n_bytes is not None else (USUAL_PASS,):
        windows = max(1, (tokens if given else min(tokens, share)) // config.seq_len)
        found = replace(config, micro_tokens=windows * config.seq_len)
        if n_bytes is None:
            break
        plan = memory_plan(found, pair, device, processes=processes, tried=tried, teacher_bytes=worst)
        if total(plan) <= _FILLED * n_bytes:
            break
    return found


def check_fits(rows: list[MemoryRow], device_bytes: int | None) -> None:
    """Refuses a run whose plan exceeds the device's memory (None: unknown, not checked)."""
    if device_bytes is not None and (need := total(rows)) > device_bytes:
        largest = max(rows, key=lambda row: row.n_bytes)
        raise RefusedError(
            f"the run needs {need / 2**30:.1f} GiB, the device has {device_bytes / 2**30:.1f} GiB",
            hint=f"the largest part is {largest.name}; use a smaller --micro-tokens, --recompute block, a different "
            "--teacher-residency, or several GPUs with --shard weights",
        )


def check_peak(rows: list[MemoryRow], peak_bytes: int) -> None:
    """Stops a run that uses more memory than planned, which indicates a bug."""
    if peak_bytes > SLACK * total(rows):
        raise RunError(
            f"the run uses {peak_bytes / 2**30:.2f} GiB, but {total(rows) / 2**30:.2f} GiB were planned",
            hint="this is a bug: please report it with the output of --plan",
        )


@dataclass(frozen=True, slots=True)
class Flops:
    """Useful FLOPs per token."""

    teacher: float
    student: float

    @property
    def total(self) -> float:
        """Sum of both."""
        return self.teacher + self.student


def flops_of(config: Config, pair: TrainingPair) -> Flops:
    """Useful FLOPs per token of a run."""
    teacher = _forward(pair.teacher.shape, config.seq_len) if pair.teacher is not None else 0.0
    passes = 3 if config.lora is None else 2  # frozen matrices have no gradient of their own
    return Flops(teacher, passes * _forward(pair.student.shape, config.seq_len))


def _forward(s: Shape, seq_len: int) -> float:
    scores = sum(
        heads.n * heads.size * (min(window, seq_len) if window else seq_len / 2)
        for window, heads in zip(s.windows, s.layer_heads, strict=True)
        if window != NO_ATTENTION
    )
    return 2.0 * (s.n_active_params + s.vocab_rows * s.d_model) + 4.0 * scores


# Published dense bf16 rates, FLOP/s, by a part of the device's name.
_PEAKS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "L40S": 362e12, "B200": 2250e12, "4090": 165e12}


def peak_flops(device_name: str) -> float | None:
    """The published dense bf16 FLOP/s of a device; None if unknown."""
    return next((rate for part, rate in _PEAKS.items() if part in device_name), None)


def cpu_flops(shape: Shape) -> float:
    """FLOP/s of float32 matrix products of the student's size, measured on this CPU with torch's threads."""
    d_ffn = shape.d_ffn or 4 * shape.d_model
    x_ND, weight_DF = torch.ones(_CPU_ROWS, shape.d_model), torch.ones(shape.d_model, d_ffn)
    torch.mm(x_ND, weight_DF)  # starts the threads
    began, products, seconds = time.perf_counter(), 0, 0.0
    while seconds < _CPU_SECONDS:
        torch.mm(x_ND, weight_DF)
        products, seconds = products + 1, time.perf_counter() - began
    return 2.0 * _CPU_ROWS * shape.d_model * d_ffn * products / seconds


# --- of a run ---


def check_means(config: Config, processes: int) -> None:
    """Checks options that need several processes or packages. Raises UsageError, MissingDependencyError."""
    check_shared(config.sequences_per_step, processes, config.seq_len)
    check_tracker(config.log_to)
    if config.qa:
        require_llama()
    if config.shard == "weights" and processes == 1:
        raise UsageError(
            "--shard weights shards the student across processes, but only one is running",
            hint="start several with torchrun --nproc-per-node 2 -m aprfmt ..., or leave out --shard",
        )


class NodesPlan(TypedDict):
    """Resources of a multi-node run besides the model files, in bytes.

    Attributes:
        device_bytes_each: device memory per node.
        bytes_between_per_step: bytes that each process sends and receives per step.
        first_memory_bytes: host memory of rank 0 for the checkpoint being written.
        first_disk_bytes: --keep + 2 checkpoints; the other nodes need disk space for token shards only.
    """

    nodes: int
    processes_each: int
    device_bytes_each: int
    bytes_between_per_step: int
    first_memory_bytes: int
    first_disk_bytes: int


class MemoryEntry(TypedDict):
    """A part of a plan's memory; JSON data."""

    name: str
    bytes: int


class Plan(TypedDict):
    """A plan of a run; JSON data. Values that depend on --steps are None without it.

    Attributes:
        memory: name and bytes of each part.
        student, teacher: dimensions and `parameters`.
        data: as `apr data --json`, plus the number of passes over all data and each source, and whether the data
            suffice (`lasts`).
        flops_per_s, seconds: the assumed rate of useful FLOPs, and the estimated time; on a CPU the rate follows from a
            measurement of 0.2 s, on GPUs it is 400 TFLOP/s.
        config, defaults: every option, and its default for a run of as many steps.
        kernels: `used` and `not_used`, as expected from the installed packages.
        qat: preset, and tensors and parameters of each type; None without --qat.
        nodes: None on a single node.
    """

    command: str
    memory: list[MemoryEntry]
    memory_bytes: int
    flops_per_token: dict[str, float]
    tokens: int | None
    flops: float | None
    seconds_at_400_tflops: float | None
    flops_per_s: float
    seconds: float | None
    student: dict[str, Any]
    teacher: dict[str, Any] | None
    teacher_files: dict[str, object] | None
    vocabulary: dict[str, object] | None
    outcomes: int | None
    compiled: bool
    nodes: NodesPlan | None
    data: DataJson
    config: JsonObject
    defaults: JsonObject
    kernels: Selection
    qat: QatSummary | None
    digest: str
    origin: Origin


def plan(command: str, config: Config) -> Plan:
    """Plans a run without using a device: memory, FLOPs, time, vocabulary, hashes. Raises AprError."""
    device, processes = torch.device(config.device.split(":")[0]), world_size()
    check_means(config, processes)
    if is_server(config.teacher):
        raise UsageError(
            "--plan cannot see the model behind a server",
            hint="apr teacher URL --student S --data D -o DIR, then --plan with --teacher-logprobs DIR",
        )
    if config.output is not None and config.smoke is None:
        folder = Path(config.output)
        steps = list(files_by_step(folder)) if exists(folder) else []
        resume = bool(steps) if config.resume == "auto" else config.resume
        prepare_folder(folder, resumes=resume is not False)
        if resume is not False:
            check_resumable(folder, resume, steps)
    with recording() as record, open_pair(command, config) as pair:
        asked, config = config, resolve_residency(config, pair)
        expect_kernels(config, pair, device)
        if device.type == "cpu":  # the micro-batch size does not depend on memory
            config = choose_pass(config, pair, device, None, processes=processes)
        rows = memory_plan(config, pair, device, processes=processes)
        work = flops_of(config, pair)
        rate = _CPU_SHARE * cpu_flops(pair.student.shape) if device.type == "cpu" else _ASSUMED_FLOPS
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
            "flops_per_s": rate,
            "seconds": tokens and tokens * work.total / rate,
            "student": {**_dims(pair.student.shape), "made": pair.student.model is None},
            "teacher": _dims(pair.teacher.shape) if pair.teacher is not None else None,
            "teacher_files": asdict(pair.files.facts) if pair.files is not None else None,
            "vocabulary": asdict(pair.vocabulary) if pair.vocabulary is not None else None,
            "outcomes": pair.outcomes.n if pair.outcomes is not None else None,
            "compiled": config.is_compiled(device.type),
            "nodes": _plan_nodes(config, pair.student.shape, total(rows), device, processes),
            "data": _plan_data(config, pair),
            "config": config.to_json(),
            "defaults": usual_values(config, pair.student.shape.d_model, asked)
            if config.steps is not None
            else Config().to_json(),
            "kernels": record.to_json(),
            "qat": summarize(pair.student, config.qat, pair.qat_types) if config.qat is not None else None,
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


def _plan_data(config: Config, pair: TrainingPair) -> DataJson:
    """Size of each data source, estimated if it is long, and the number of passes over it."""
    paths, weights = split_sources(config.data)
    own = Path(config.output) if config.output is not None else None
    found = summarise(
        paths, weights, Encoder(pair.student.tokenizer), text_field=config.text_field, strict=config.strict, own=own,
        sample=SAMPLE_CHARS,
    )  # fmt: skip
    body = found.to_json()
    needed = config.steps * config.tokens_per_step if config.steps is not None else None
    for source in body["sources"]:
        share = source["weight"] or (source["tokens"] / found.tokens if found.tokens else 0.0)
        source["passes"] = needed and needed * share / max(1, source["tokens"])
    body["passes"] = needed and needed / max(1, found.tokens)
    mixed = [source for source in body["sources"] if source["weight"] is not None]
    scarce = max(mixed, key=lambda source: source["passes"] or 0.0, default=None)
    body["lasts"] = config.repeat or ((scarce or body)["passes"] or 0.0) <= (config.epochs or 1)
    if not found.estimated:
        if found.documents < (2 if found.lengths and config.eval_data is None else 1):  # shards have no lengths
            raise RefusedError(
                f"no training documents: {found.documents} read", hint="add text, at least two different documents"
            )
        for each in found.sources:
            check_source(each.name, config.seq_len if each.weight is None else each.tokens, config.seq_len)
    _check_lasts(config, body, scarce)
    return body


def _check_lasts(config: Config, body: DataJson, scarce: DataSourceJson | None) -> None:
    """Refuses data too small for the run; estimated data only if they fall short by a factor of 2.

    `scarce` is the first source of a mixture to run out; None without a mixture.
    """
    if body["lasts"] or config.steps is None:
        return
    # A partial last step suffices. The run itself also excludes held-out documents and duplicates.
    used = scarce or body
    passes = (used["passes"] or 0.0) * (min(config.steps, config.smoke or config.steps) - 1) / config.steps
    if passes > (config.epochs or 1) * (2 if body["estimated"] else 1):
        about, whose = "about " if body["estimated"] else "", f" of {scarce['name']}" if scarce is not None else ""
        weight = (scarce["weight"] if scarce is not None else None) or 1
        needed = round(config.steps * config.tokens_per_step * weight)
        raise RefusedError(
            f"{config.steps} steps need {needed} tokens{whose}, but the data has {about}{used['tokens']}: "
            f"{about}{passes:.1f} epochs",
            hint=more_data_hint(math.ceil(passes), int(used["tokens"] / weight) // config.steps, config.seq_len),
        )


def _dims(shape: Shape) -> dict[str, int | float | str]:
    numbers = {name: value for name, value in asdict(shape).items() if isinstance(value, (int, float, str))}
    return numbers | {"parameters": shape.n_params}
