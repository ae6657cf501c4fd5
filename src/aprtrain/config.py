"""The one schema of a training run: every option, its type, range, default, environment variable and words of help.

`config_build` fills it from the command line, the environment and a file. `Config.resolved()` is what a run prints
and stores, `Config.digest()` the hash of what decides its numbers.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any, get_args, get_type_hints

from aprfmt.errors import UsageError

ENV_PREFIX = "APR_DISTILL_"
_DISTILL, _PRETRAIN = ("distill",), ("pretrain",)
_BOTH = (*_DISTILL, *_PRETRAIN)


def _option(
    default: Any,
    help: str,
    *,
    low: float = -math.inf,
    high: float = math.inf,
    choices: tuple[str, ...] = (),
    env: str = "",
    flags: tuple[str, ...] = (),
    commands: tuple[str, ...] = _BOTH,
    place: str = "run",
) -> Any:
    metadata = {
        "help": help,
        "low": low,
        "high": high,
        "choices": choices,
        "env": env and ENV_PREFIX + env,
        "flags": flags,
        "commands": commands,
        "place": place,
    }
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class Config:
    """A run's options. `place` of a field says what it decides: "what" is trained on what (a resumed run must agree),
    "run": how far, where and how closely watched (a resumed run may differ).

    `None` stands for a default that follows from other fields; `settled` fills those in.
    """

    teacher: str | None = _option(None, "The model to learn from.", commands=_DISTILL)
    student: str | None = _option(
        None, "The model to train: .apr, .gguf, .safetensors or a folder.", commands=_DISTILL
    )
    student_init: str | None = _option(
        None,
        "Make the student from the teacher: layers:0,2,4, layers:12, width:hidden=512,heads=8, or a config.json.",
        commands=_DISTILL,
        place="what",
    )
    init: str | None = _option(None, "The model whose weights the training starts from.", commands=_PRETRAIN)
    like: str | None = _option(
        None,
        "A model whose tokenizer is used; --shape says what is trained from scratch.",
        commands=_PRETRAIN,
    )
    shape: str | None = _option(
        None, "config.json of the network to train from scratch (with --like).", commands=_PRETRAIN
    )
    data: str | None = _option(
        None, "Text, jsonl or parquet files, a folder of them or of source code, token shards.", flags=("-d",)
    )
    output: str | None = _option(None, "Folder for checkpoints, metrics and the model.", flags=("-o",))

    kd_weight: float = _option(
        0.7, "Weight of the teacher's term; 1 - it is that of the labels. 0: the teacher is only compared with.",
        low=0, high=1, flags=("--alpha",), commands=_DISTILL, place="what",
    )  # fmt: skip
    temperature: float = _option(
        3.0, "Softens both distributions in the teacher's term.", low=0.05, high=100, commands=_DISTILL,
        place="what",
    )  # fmt: skip
    loss: str = _option(
        "forward", "Divergence from the teacher.", choices=("forward", "reverse", "jsd"), commands=_DISTILL,
        place="what",
    )  # fmt: skip
    beta: float = _option(
        0.5, "Mixing weight of --loss jsd.", low=0.001, high=0.999, commands=_DISTILL, place="what"
    )
    logits: str = _option("fp16", "Storage of logits on a GPU.", choices=("fp16", "fp32"), place="what")
    chunk: int = _option(2048, "Positions whose logits are held at a time.", low=1, place="what")

    lr: float = _option(5e-5, "Peak learning rate.", low=1e-12, high=10, place="what")
    lr_final: float = _option(0.1, "Share of --lr left at the end.", low=0, high=1, place="what")
    warmup_steps: int | None = _option(
        None, "Steps of linear warm-up (default: 2 % of --total-steps, at least 100 where that is at most a tenth).",
        low=0, place="what",
    )  # fmt: skip
    beta1: float = _option(0.9, "AdamW: decay of the mean.", low=0, high=0.999999, place="what")
    beta2: float = _option(0.95, "AdamW: decay of the square.", low=0, high=0.999999, place="what")
    eps: float = _option(1e-8, "AdamW: added to the root.", low=1e-20, high=1, place="what")
    weight_decay: float = _option(0.01, "AdamW: decay of matrices.", low=0, high=10, place="what")
    clip: float = _option(1.0, "Largest norm of the gradient; 0: no limit.", low=0, place="what")

    steps: int | None = _option(None, "Where this run stops, in updates since the beginning.", low=1)
    total_steps: int | None = _option(None, "Length of the schedule (default: --steps).", low=1, place="what")
    epochs: int | None = _option(
        None, "How often the data may be read; without --steps: how often it is.", low=1, place="what"
    )
    repeat: bool = _option(False, "Read the data again as often as --steps needs it.", place="what")
    seq_len: int = _option(2048, "Tokens of a window.", low=2, env="MAX_SEQ_LEN", place="what")
    tokens_per_step: int = _option(32768, "Tokens of an update, over all GPUs.", low=2, place="what")
    micro_tokens: int = _option(
        16384, "Tokens of one forward and backward pass on a GPU.", low=2, place="what"
    )
    held_out: float = _option(
        0.01, "Share of the documents that is held out for evaluation.", low=1e-9, high=0.9, place="what"
    )
    eval_data: str | None = _option(None, "Evaluate on these files instead.")
    seed: int = _option(42, "Order of the data and fresh weights.", low=0, high=2**63 - 1, place="what")
    deterministic: bool = _option(False, "Bitwise the same numbers at every run.", place="what")

    vocab_policy: str = _option(
        "shared", "Whether the teacher may have tokens that the student has not: renormalise leaves them out.",
        choices=("shared", "renormalise"), commands=_DISTILL, place="what",
    )  # fmt: skip
    teacher_residency: str = _option(
        "bf16", "How the teacher lies in memory.", choices=("bf16", "q4k", "fp8"), env="TEACHER_BACKEND",
        commands=_DISTILL, place="what",
    )  # fmt: skip
    teacher_cache: str | None = _option(
        None, "Folder in which the teacher's answers are kept, to be read when a text comes again.",
        commands=_DISTILL,
    )  # fmt: skip
    recompute: str = _option(
        "none", "What the backward pass computes again to save memory.", choices=("none", "block")
    )
    shard: str = _option(
        "states", "What several processes divide among them: masters and moments, or also the student's weights.",
        choices=("states", "weights"),
    )  # fmt: skip
    compile: str = _option(
        "auto", "Compile the blocks; auto: on a GPU.", choices=("auto", "on", "off"), place="what"
    )
    device: str = _option("cuda", "cuda, cuda:N or cpu; nothing else is tried when it is missing.")

    save_every: int = _option(
        5000, "Steps between checkpoints; 0: by the clock alone.", low=0, env="CHECKPOINT_EVERY"
    )
    save_minutes: float = _option(15.0, "Minutes between checkpoints, too; 0: by steps alone.", low=0)
    keep: int = _option(3, "Latest checkpoints to keep, beside the best.", low=1)
    save_dtype: str = _option("bf16", "Dtype of saved weights.", choices=("bf16", "f16", "f32"))
    eval_every: int = _option(1000, "Steps between evaluations on held-out data; 0: first and last.", low=0)
    eval_tokens: int = _option(65536, "Held-out tokens of an evaluation.", low=2)
    log_every: int = _option(10, "Steps between lines.", low=1, env="LOG_EVERY")
    resume: bool = _option(False, "Go on from the latest checkpoint of the output folder.")
    allow_changed: tuple[str, ...] = _option(
        (), "A field that may differ from the run that is resumed; may be given again."
    )
    smoke: int | None = _option(
        None, "Do N steps, say how long the run would take, write nothing.", low=1, env="MAX_STEPS"
    )
    allow_same_arch: bool = _option(False, "Teacher and student may have the same dims.", commands=_DISTILL)
    allow_weaker_teacher: bool = _option(
        False, "Go on with a teacher that predicts the data badly.", commands=_DISTILL
    )
    deadline: float = _option(600.0, "Seconds that the first step may take.", low=0.1)

    # What follows from the others.
    @property
    def windows_per_step(self) -> int:
        """Windows of an update, over all GPUs."""
        return self.tokens_per_step // self.seq_len

    @property
    def windows_per_pass(self) -> int:
        """Windows of one forward and backward pass."""
        return self.micro_tokens // self.seq_len

    @property
    def eval_windows(self) -> int:
        """Windows of an evaluation, where there are as many."""
        return max(1, self.eval_tokens // self.seq_len)

    @property
    def stop(self) -> int:
        """The update after which this run stops; settled."""
        assert self.steps is not None
        return min(self.steps, self.smoke or self.steps)

    @property
    def schedule_steps(self) -> int:
        """Length of the schedule; settled."""
        assert self.total_steps is not None
        return self.total_steps

    def resolved(self) -> dict[str, Any]:
        """Every field with its value, as JSON data."""
        return {f.name: plain(getattr(self, f.name)) for f in fields(self)}

    def digest(self) -> str:
        """sha-256 of what decides the numbers of a run: the fields of place "what"."""
        values = {name: plain(getattr(self, name)) for name in what_fields()}
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Field:
    """One row of the schema; `kind` is str, int, float, bool or tuple (of words)."""

    name: str
    kind: type
    default: Any
    help: str
    low: float
    high: float
    choices: tuple[str, ...]
    env: str
    flags: tuple[str, ...]
    commands: tuple[str, ...]
    place: str

    @property
    def flag(self) -> str:
        """Its long option."""
        return "--" + self.name.replace("_", "-")


@cache
def schema() -> dict[str, Field]:
    """The rows by name, in the order of Config."""
    hints = get_type_hints(Config)
    return {f.name: Field(f.name, _kind(hints[f.name]), f.default, **f.metadata) for f in fields(Config)}


def _kind(hint: Any) -> type:
    if hint in (str, int, float, bool):
        return hint  # type: ignore[no-any-return]
    inner = [a for a in get_args(hint) if a in (str, int, float)]
    return tuple if hint == tuple[str, ...] else inner[0]


def command_fields(command: str) -> Iterator[Field]:
    """The rows that `command` ("distill" or "pretrain") takes."""
    return (f for f in schema().values() if command in f.commands)


def what_fields() -> list[str]:
    """Names of the fields that a resumed run must share with the run that it continues."""
    return [f.name for f in schema().values() if f.place == "what"]


def resolve(config: Config, data_steps: int | None = None) -> Config:
    """`config` with every number filled in; `data_steps` is how many updates the data last for.

    Raises UsageError for a schedule shorter than the run.
    """
    steps = config.steps or (data_steps if config.epochs is not None else config.smoke)
    assert steps is not None
    total = config.total_steps or steps
    warmup = config.warmup_steps
    if warmup is None:
        warmup = min(max(100, total // 50), total // 10)
    if total < steps:
        raise UsageError(
            f"--total-steps {total} is less than --steps {steps}", hint="the schedule must cover the run"
        )
    return replace(config, steps=steps, total_steps=total, warmup_steps=warmup)


def changed_fields(old: Mapping[str, Any], new: Config) -> list[str]:
    """Names of the fields in which a resumed run may not differ and does."""
    return [name for name in what_fields() if old.get(name) != plain(getattr(new, name))]


def plain(value: Any) -> Any:
    """A field's value as JSON data."""
    return list(value) if isinstance(value, tuple) else value
