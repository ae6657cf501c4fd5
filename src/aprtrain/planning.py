"""What a run would take and do, told without a device: memory, FLOPs, disk, and where its checkpoints come from."""

from __future__ import annotations

import platform
import shutil
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

import aprfmt
from aprfmt.errors import UsageError
from aprtrain import budget
from aprtrain.config import Config, command_fields, resolve, what_fields
from aprtrain.data.shards import Corpus, read_header
from aprtrain.data.sources import list_files
from aprtrain.loss.head import Logits, head_bytes, logit_weight_bytes
from aprtrain.loss.vocab import Vocabulary
from aprtrain.models import Pair, is_compiled, open_pair, quick_fingerprint, teacher_dtype
from aprtrain.student import without_folders
from aprtrain.teacher.cache import bytes_per_token
from aprtrain.teacher.teacher import estimate_bytes
from aprtrain.world import world_size

SCHEMA = "aprtrain.run/1"
_ASSUMED_FLOPS = 400e12
"""What a plan's time goes by: half of an H200's published rate is rarely missed by far."""


def flops_of(config: Config, pair: Pair) -> budget.Flops:
    """The arithmetic of a token."""
    return budget.flops(config, pair.student.shape, pair.teacher.shape if pair.teacher is not None else None)


def check_sharding(config: Config, processes: int) -> None:
    """Raises UsageError where there is nobody to share the student's weights with."""
    if config.shard == "weights" and processes == 1:
        raise UsageError(
            "--shard weights divides the student among processes, and there is one",
            hint="start several: torchrun --nproc-per-node 2 -m aprfmt ..., or leave --shard out",
        )


def memory_plan(
    config: Config, pair: Pair, device: torch.device, *, backbone: bool = True, processes: int = 1
) -> list[budget.Row]:
    """The memory of one of several processes, on `device`; without `backbone` only the teacher's head is loaded."""
    teacher, shape = pair.teacher, pair.student.shape
    share = max(config.seq_len, config.tokens_per_step // processes)
    config = replace(config, micro_tokens=min(config.micro_tokens, share))
    on_gpu = device.type == "cuda"
    vocabulary = pair.vocabulary or Vocabulary(shape.vocab_rows, shape.vocab_rows, shape.vocab_rows)
    logits: Logits = "fp16" if config.logits == "fp16" and on_gpu else "fp32"
    chunk = min(config.chunk, config.micro_tokens)
    resident = teacher_head = 0
    if teacher is not None:
        resident = estimate_bytes(teacher, config.teacher_residency, backbone=backbone)
        resident *= teacher_dtype(config, device).itemsize // 2
        teacher_head = logit_weight_bytes(
            vocabulary, teacher.shape.d_model, logits, config.teacher_residency == "q4k"
        )
    return budget.memory(
        config, shape, teacher.shape if teacher is not None else None, resident=resident,
        head=head_bytes(vocabulary, shape.d_model, chunk, logits, teacher is not None),
        on_gpu=on_gpu, compiled=is_compiled(config, device), teacher_head=teacher_head, backbone=backbone,
        processes=processes,
    )  # fmt: skip


def origin_of(command: str, config: Config, pair: Pair, corpus: Corpus | None) -> dict[str, Any]:
    """Where a checkpoint of this run comes from; no folder of this machine is named."""
    overrides = [name for name in ("allow_same_arch", "allow_weaker_teacher") if getattr(config, name)]
    overrides += [f"changed {name}" for name in config.allow_changed]
    teacher, made = pair.teacher, without_folders(config.student_init)
    own = {row.name for row in command_fields(command)} & set(what_fields())
    decides = {name: value for name, value in config.resolved().items() if name in own}
    decides |= {"student_init": made} if command == "distill" else {}
    return {
        "schema": SCHEMA,
        "command": command,
        "teacher": teacher
        and {
            "name": teacher.path.name,
            "print": quick_fingerprint(teacher),
            "architecture": teacher.shape.architecture,
            "parameters": teacher.shape.n_params,
        },
        "student": {
            "name": pair.student.path.name,
            "made": made or without_folders(config.shape),
            "print": pair.student_fingerprint(),
            "architecture": pair.student.shape.architecture,
            "parameters": pair.student.shape.n_params,
        },
        "data": corpus.key if corpus is not None else None,
        "config": decides,
        "config_digest": config.digest(),
        "overrides": overrides,
        "versions": {
            "aprfmt": aprfmt.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }


def plan(command: str, config: Config) -> dict[str, Any]:
    """What a run would take and do, without a device: memory, FLOPs, time, vocabulary, hashes. Raises AprError."""
    device, processes = torch.device(config.device.split(":")[0]), world_size()
    check_sharding(config, processes)
    with open_pair(command, config) as pair:
        rows = memory_plan(config, pair, device, processes=processes)
        work = flops_of(config, pair)
        steps = config.steps
        tokens = steps * config.tokens_per_step if steps is not None else None
        if steps is not None:
            config = resolve(config)
        return {
            "command": command,
            "memory": [{"name": row.name, "bytes": row.n_bytes} for row in rows],
            "memory_bytes": budget.total(rows),
            "flops_per_token": {"teacher": work.teacher, "student": work.student},
            "tokens": tokens,
            "flops": tokens and tokens * work.total,
            "seconds_at_400_tflops": tokens and tokens * work.total / _ASSUMED_FLOPS,
            "student": {**_described(pair.student.shape), "made": pair.made is not None},
            "teacher": _described(pair.teacher.shape) if pair.teacher is not None else None,
            "vocabulary": asdict(pair.vocabulary) if pair.vocabulary is not None else None,
            "compiled": is_compiled(config, device),
            "data": _data(config),
            "teacher_cache": _cache(config, pair, device, tokens),
            "config": config.resolved(),
            "digest": config.digest(),
            "origin": origin_of(command, config, pair, None),
        }


def _data(config: Config) -> dict[str, Any]:
    """What lies behind --data, without reading it: the tokens of shards, else files and bytes. Raises AprError."""
    path, skipped = Path(config.data or ""), Counter[str]()
    header = read_header(path) if path.is_dir() else None
    if header is not None:
        tokens = header.get("parts", {}).get("train", {}).get("tokens")
        return {"tokens": tokens, "files": None, "bytes": None, "left_out": {}}
    files = list_files([path], skipped, Path(config.output) if config.output is not None else None)
    size = sum(file.path.stat().st_size for file in files)
    return {"tokens": None, "files": len(files), "bytes": size, "left_out": dict(+skipped)}


def _cache(config: Config, pair: Pair, device: torch.device, tokens: int | None) -> dict[str, Any] | None:
    """What --teacher-cache takes on its disk, at most: what is there already is found once the text is read."""
    if config.teacher_cache is None or pair.teacher is None:
        return None
    folder = Path(config.teacher_cache).absolute()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    each = bytes_per_token(config, pair.teacher, device)
    return {
        "folder": config.teacher_cache,
        "bytes_per_token": each,
        "bytes": tokens and (tokens + config.eval_windows * config.seq_len) * each,
        "free": shutil.disk_usage(there).free,
    }


def _described(shape: Any) -> dict[str, Any]:
    return {name: value for name, value in asdict(shape).items() if isinstance(value, (int, float, str))} | {
        "parameters": shape.n_params
    }
