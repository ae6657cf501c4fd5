"""Training options: one schema of types, ranges, defaults, environment variables and help.

A run prints and stores `Config.to_json`; `Config.digest` hashes the options that affect the results.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial

from aprfmt.errors import UsageError
from aprfmt.schema import OptionRow, option
from aprfmt.schema import rows as option_rows
from aprfmt.tokenizer.alignment import ALIGNED
from aprfmt.types import Json, JsonObject, construct

ENV_PREFIX = "APR_DISTILL_"
SELF = "self"
"""Value of --student-init for a student that starts as the teacher."""

DEFAULTS: dict[str, dict[str, float]] = {
    "pruned": {"lr": 2.4e-3, "kd_weight": 0.8, "temperature": 1.0, "lr_final": 0.1, "weight_decay": 0.01},
    "fresh": {"lr": 5e-4, "kd_weight": 0.8, "temperature": 1.0, "lr_final": 0.1, "weight_decay": 0.01},
    "pretrained": {"lr": 1.2e-3, "kd_weight": 0.8, "temperature": 1.0, "lr_final": 0.1, "weight_decay": 0.01},
    "quantized": {"lr": 3e-4, "kd_weight": 1.0, "temperature": 1.0, "lr_final": 0.0, "weight_decay": 0.0},
}
"""Defaults by kind of student (`student_kind`); docs/training.md has the same table. `lr` is that of a narrow student:
see `usual_lr`."""
MEASURED_WIDTH, ASSUMED_WIDTH = 576, 2048
"""Hidden size for which the rates were measured, and the one assumed of a model that is not on this machine."""

_USUAL = DEFAULTS["pretrained"]

Value = str | int | float | bool | tuple[str, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigField(OptionRow):
    """One row of the schema.

    Attributes:
        env: the environment variable that sets it.
        commands: the commands that take it.
        place: "what" affects the results and must match when a run resumes; "run" (length, device, logging) may
            change on resume; "save" is like "run", but has no effect with --smoke.
    """

    negatable: bool = True
    env: str = ""
    commands: tuple[str, ...] = ("distill", "pretrain")
    place: str = "run"


_distill = partial(option, commands=("distill",))
_what = partial(option, place="what")
_kd = partial(_distill, place="what")
_save = partial(option, place="save")


@dataclass(frozen=True, kw_only=True)
class Config:
    """A run's options. `None` means that `resolve` derives the default from other fields."""

    teacher: str | None = _distill(
        None, "The teacher model, or the URL of a vLLM, SGLang or llama-server (its answers are saved in RUN/teacher)."
    )
    teacher_logprobs: str | None = _distill(None, "Distill from log-probabilities saved by apr teacher.")
    top_k: int | None = _kd(
        None, "How many of the saved tokens to use at each position (default: all; 20 of a server).", low=1
    )
    student: str | None = _distill(None, "The model to train: .apr, .gguf, .safetensors or folder.")
    student_init: str | None = _kd(
        None,
        "Build the student by pruning the teacher (layers:0,2,4, layers:12, width:hidden=512,heads=8, experts:32), or "
        "randomly initialized from a config.json; self: the teacher itself, for --qat.",
    )
    lora: str | None = _what(
        None,
        "Train low-rank adapters beside the frozen student: r=16, or r=16,alpha=32,targets=attention|mlp|all; the run "
        "also writes a PEFT folder and a GGUF adapter.",
        metavar="r=N",
    )
    lora_base: str = _what(
        "auto",
        "Format of the frozen weights of --lora in memory; auto: q4k for a Q4_K, Q6_K or Q8_0 file, else bf16.",
        choices=("auto", "bf16", "q4k"),
    )
    init: str | None = option(None, "Initialize from the weights of this model.", commands=("pretrain",))
    like: str | None = option(
        None, "Train from scratch with this model's tokenizer (needs --shape).", commands=("pretrain",)
    )
    shape: str | None = option(
        None, "config.json of the model to train from scratch (needs --like).", commands=("pretrain",)
    )
    data: tuple[str, ...] = option(
        (),
        "Training data: text, jsonl, csv or parquet files, folders of them or of source code, token shards, or "
        "hf://datasets/org/name; repeatable, with a sampling weight each.",
        flags=("-d",),
        metavar="PATH[:WEIGHT]",
    )
    text_field: str = option("text", "Field (jsonl) or column (csv, parquet) that contains the text.")
    strict: bool = option(False, "Fail on invalid records; by default they are counted and skipped.")
    output: str | None = option(None, "Output folder for checkpoints, metrics and the final model.", flags=("-o",))

    kd_weight: float = _kd(
        _USUAL["kd_weight"],
        "Weight of the distillation loss; cross entropy gets 1 minus this. 0: log the teacher's KL only.",
        low=0,
        high=1,
        flags=("--alpha",),
    )
    temperature: float = _kd(_USUAL["temperature"], "Softmax temperature of the distillation loss.", low=0.05, high=100)
    loss: str = _kd(
        "forward",
        "Distillation loss: forward, reverse or skewed KL, Jensen-Shannon divergence, total variation, or an installed "
        "one (entry points aprtrain.losses).",
        metavar="forward|reverse|skew|jsd|tv|NAME",
    )
    beta: float = _kd(0.5, "The teacher's share of the mixture of --loss jsd and skew.", low=0.001, high=0.999)
    hidden_weight: float = _kd(0.0, "Weight of the loss between hidden states of student and teacher; 0: off.", low=0)
    hidden_loss: str = _kd(
        "cosine", "Distance of hidden states: cosine, or mse relative to the teacher's.", choices=("cosine", "mse")
    )
    hidden_layers: str | None = _kd(
        None, "Student layers of --hidden-weight, numbered from 0: 3,7,11 (default: all).", metavar="LIST"
    )
    on_policy: float = _kd(
        0.0,
        "Share of the steps that learn from the student's own continuations of --prompts, scored by the teacher.",
        low=0,
        high=1,
    )
    prompts: str | None = _distill(
        None, "Prompts of --on-policy: a file of conversations (up to the first answer) or texts.", metavar="PATH"
    )
    sample_every: int = _kd(
        4,
        "On-policy steps whose continuations are sampled at once, in larger batches: faster, from older weights.",
        low=1,
    )
    new_tokens: int = _kd(128, "Maximum length of a continuation of --on-policy in tokens.", low=1)
    logits: str = _what("fp16", "Dtype of the logits on a GPU.", choices=("fp16", "fp32"))
    chunk: int = _what(2048, "Positions per chunk of the loss; smaller saves memory.", low=1)

    router_aux_loss: float | None = _what(
        None,
        "Weight of the load-balancing loss of the routers, for a student with experts (MoE); default 0.001, 0: off.",
        low=0,
    )
    qat: str | None = _what(
        None,
        "Quantization-aware training: compute with weights quantized by this preset and save them quantized: q4_0, "
        "q8_0, q4_k_m, q5_k_m, q6_k, nvfp4 or mxfp4.",
        metavar="PRESET",
    )
    qat_every: int = _what(16, "Steps between two searches for the scales of K-quants, with --qat.", low=1)
    qat_dampening: float = _what(
        1e-3,
        "Fraction by which an update pulls weights toward their quantized values, with --qat; rises from 0 over the "
        "run. 0: off.",
        low=0,
        high=1,
    )

    lr: float = _what(
        _USUAL["lr"],
        "Peak learning rate.",
        low=1e-12,
        high=10,
        shown=", ".join(f"{kind} student {values['lr']:g}" for kind, values in DEFAULTS.items())
        + f"; times {MEASURED_WIDTH} / hidden size if that is wider",
    )
    lr_final: float = _what(
        _USUAL["lr_final"], "Final learning rate, as a fraction of --lr.", low=0, high=1,
        shown=f"{_USUAL['lr_final']:g}, quantized student 0",
    )  # fmt: skip
    warmup_steps: int | None = _what(
        None, "Linear warmup steps (default: 2 % of --total-steps, at least 100, but at most 10 %).", low=0
    )
    optimizer: str = _what(
        "adamw",
        "Optimizer: adamw, muon (matrices of layers; AdamW for all else), or an installed one (entry points "
        "aprtrain.optimizers).",
        metavar="adamw|muon|NAME",
    )
    beta1: float = _what(0.9, "AdamW beta1.", low=0, high=0.999999)
    beta2: float = _what(0.95, "AdamW beta2.", low=0, high=0.999999)
    eps: float = _what(1e-8, "AdamW epsilon.", low=1e-20, high=1)
    weight_decay: float = _what(
        _USUAL["weight_decay"], "Weight decay of matrices.", low=0, high=10,
        shown=f"{_USUAL['weight_decay']:g}, quantized student 0",
    )  # fmt: skip
    clip: float = _what(1.0, "Gradient clipping norm; 0: off.", low=0)

    steps: int | None = option(None, "Train up to this step, counted from the start of training.", low=1)
    total_steps: int | None = _what(None, "Length of the learning rate schedule (default: --steps).", low=1)
    epochs: int | None = _what(None, "Number of passes over the data; with --steps, the maximum.", low=1)
    repeat: bool = _what(False, "Repeat the data until --steps is reached.")
    seq_len: int = _what(
        2048, "Sequence length in tokens, or the models' context length if shorter.", low=2,
        env=ENV_PREFIX + "MAX_SEQ_LEN",
    )  # fmt: skip
    tokens_per_step: int = _what(32768, "Global batch size in tokens, over all GPUs.", low=2)
    micro_tokens: int = _what(
        0, "Micro-batch size in tokens, per GPU; 0: as large as fits in memory, up to 32768.", low=0
    )
    held_out: float = _what(0.01, "Fraction of the documents held out for evaluation.", low=1e-9, high=0.9)
    eval_data: str | None = option(None, "Evaluate on this file or folder instead of held-out documents.")
    seed: int = _what(42, "Random seed of the data order and of initial weights.", low=0, high=2**63 - 1)
    deterministic: bool = _what(False, "Use deterministic kernels only: runs are bitwise reproducible.")

    vocab_policy: str = _kd(
        "shared",
        "If the teacher has tokens that the student lacks: refuse (shared), or renormalise over the shared tokens. If "
        "its tokenizer is another one: compare spans of tokens with the same text (aligned, as GOLD), or their sorted "
        "probabilities (uld).",
        choices=("shared", "renormalise", *ALIGNED),
    )
    teacher_residency: str = _kd(
        "auto",
        "Format of the teacher's weights in memory; auto: q4k for a Q4_K, Q6_K or Q8_0 file, else bf16.",
        choices=("auto", "bf16", "q4k", "fp8"),
        env=ENV_PREFIX + "TEACHER_BACKEND",
    )
    recompute: str = option(
        "none", "Activation checkpointing: recompute blocks in the backward pass.", choices=("none", "block")
    )
    shard: str = option(
        "states",
        "What to shard across processes: optimizer states, or the student's weights too (FSDP2).",
        choices=("states", "weights"),
    )
    compile: str = _what(
        "auto", "Compile the blocks with torch.compile; auto: on a GPU.", choices=("auto", "on", "off")
    )
    device: str = option("cuda", "cuda, cuda:N or cpu; never falls back to another device.")

    save_every: int = _save(
        5000,
        "Save a checkpoint every N steps; 0: only every --save-minutes.",
        low=0,
        env=ENV_PREFIX + "CHECKPOINT_EVERY",
    )
    save_minutes: float = _save(15.0, "Also save every X minutes; 0: off.", low=0)
    save_epochs: int | None = _save(None, "Also save every N epochs; --keep does not count or remove these.", low=1)
    keep: int = _save(3, "Number of latest checkpoints to keep in addition to the best, at least 2.", low=2)
    save_dtype: str = _save("bf16", "Dtype of the saved weights.", choices=("bf16", "f16", "f32"))
    eval_every: int = _save(1000, "Evaluate every N steps; 0: only at start and end.", low=0)
    patience: int | None = _save(None, "Early stopping: end after N evaluations in a row without improvement.", low=1)
    target_val_loss: float | None = _save(None, "Stop when the held-out cross entropy is at most this.", low=1e-9)
    eval_tokens: int = option(65536, "Held-out tokens per evaluation.", low=2)
    samples: int = _save(
        0, "Log N continuations by the student, of up to 40 tokens, at each evaluation.", low=0, high=8
    )
    log_every: int = option(10, "Log every N steps.", low=1, env=ENV_PREFIX + "LOG_EVERY")
    log_to: str | None = _save(
        None, "Also log metrics to TensorBoard or Weights & Biases.", choices=("tensorboard", "wandb")
    )
    qa: bool = option(False, "Run apr qa on the final model; exit code 1 if it does not pass.")
    resume: bool | int | str = option(
        False,
        "Resume from the latest checkpoint in the output folder, or from STEP; auto: if there is one, else start.",
        low=0,
        optional="STEP|auto",
    )
    allow_changed: tuple[str, ...] = option(
        (), "Option that may differ from the resumed run; repeatable.", metavar="NAME"
    )
    smoke: int | None = option(
        None, "Run N steps, estimate the total training time, write nothing.", low=1, env=ENV_PREFIX + "MAX_STEPS"
    )
    allow_same_arch: bool = _distill(False, "Allow a student with the teacher's dimensions.")
    allow_weaker_teacher: bool = _distill(False, "Allow a teacher that predicts the data badly.")
    deadline: float = option(600.0, "Time limit of the first step in seconds.", low=0.1)
    step_deadline: float = option(
        120.0, "Minimum time limit of a later step in seconds (20 times the median step if longer); 0: off.", low=0
    )
    min_utilization: float = option(
        5.0, "Stop if the GPU's utilization over a minute is below this percentage; 0: off.", low=0, high=100
    )

    # Derived values.
    @property
    def sequences_per_step(self) -> int:
        """Sequences per global batch."""
        return self.tokens_per_step // self.seq_len

    @property
    def sequences_per_pass(self) -> int:
        """Sequences per micro-batch."""
        return self.micro_tokens // self.seq_len

    @property
    def eval_sequences(self) -> int:
        """Maximum number of sequences per evaluation."""
        return max(1, self.eval_tokens // self.seq_len)

    @property
    def stop(self) -> int:
        """The step after which this run stops. Needs a resolved configuration."""
        assert self.steps is not None
        return min(self.steps, self.smoke or self.steps)

    @property
    def resumes(self) -> bool:
        """Whether to resume, with `auto` only if the folder has a checkpoint; `resume` may be step 0."""
        return self.resume is not False

    def is_compiled(self, device: str) -> bool:
        """Whether to compile the blocks on a device of type `device`."""
        return self.compile == "on" or (self.compile == "auto" and device == "cuda")

    def to_json(self) -> JsonObject:
        """Every field with its value."""
        return {f.name: to_json(getattr(self, f.name)) for f in fields(self)}

    def digest(self) -> str:
        """SHA-256 of the options that affect the results: the fields of place "what"."""
        return digest_of(self.to_json())


def schema() -> dict[str, ConfigField]:
    """All fields by name, in the order of Config."""
    return option_rows(Config, ConfigField)


def command_fields(command: str) -> Iterator[ConfigField]:
    """The fields of `command` ("distill" or "pretrain")."""
    return (f for f in schema().values() if command in f.commands)


def what_fields() -> list[str]:
    """Names of the fields that must match when a run resumes."""
    return [f.name for f in schema().values() if f.place == "what"]


def digest_of(values: Mapping[str, object]) -> str:
    """`Config.digest` of a configuration that is given as JSON data. Raises KeyError."""
    decides = {name: values[name] for name in what_fields()}
    return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()


def is_value(name: str, value: object) -> bool:
    """Whether a JSON value is valid for a field."""
    row = schema()[name]
    try:
        return value is None or to_json(check_value(row, value, "")) == value
    except UsageError:
        return False


def changed_fields(old: Mapping[str, object], new: Config) -> list[str]:
    """Names of the fields that must match on resume, but differ from `old`."""
    return [name for name in what_fields() if old.get(name) != to_json(getattr(new, name))]


def is_pruned(student_init: str) -> bool:
    """Whether a --student-init prunes the teacher or keeps it whole; else it is the path of a config.json."""
    return student_init == SELF or all(
        word.startswith(("layers:", "width:", "experts:")) for word in student_init.split("+")
    )


def student_kind(student_init: str | None, shape: str | None) -> str:
    """The row of DEFAULTS: pruned from the teacher, fresh (random weights), pretrained, or the quantized teacher."""
    if student_init == SELF:
        return "quantized"
    if student_init is not None:
        return "pruned" if is_pruned(student_init) else "fresh"
    return "pretrained" if shape is None else "fresh"


def usual_lr(kind: str, width: int | None) -> float:
    """The default peak learning rate of a student by its hidden size; None: unknown.

    Wider students learn with a rate in inverse proportion, as Adam's rate of matrices under muP (arXiv 2203.03466).
    """
    return float(f"{DEFAULTS[kind]['lr'] * min(1.0, MEASURED_WIDTH / (width or ASSUMED_WIDTH)):.2g}")


def to_json(value: Value) -> Json:
    """A field's value as JSON data."""
    return [*value] if isinstance(value, tuple) else value


def resolve(config: Config, data_steps: int | None = None) -> Config:
    """`config` with all derived numbers filled in; `data_steps` is the number of steps that the data provide.

    Raises UsageError if the schedule is shorter than the run.
    """
    steps = config.steps or (data_steps if config.epochs is not None else config.smoke)
    assert steps is not None
    total, warmup = config.total_steps or steps, config.warmup_steps
    if warmup is None:
        warmup = min(max(100, total // 50), total // 10)
    if total < steps:
        raise UsageError(
            f"--total-steps {total} is less than --steps {steps}", hint="the learning rate schedule must cover the run"
        )
    return replace(config, steps=steps, total_steps=total, warmup_steps=warmup)


_AUTOMATIC = ("micro_tokens", "teacher_residency")
"""Fields whose default leaves the value to the run."""


def usual_values(config: Config, width: int, asked: Config | None = None) -> JsonObject:
    """The default configuration for the same kind of student, its hidden size `width`, and number of steps.

    Values that `asked`, the configuration before the run completed it, left to the run are those of `config`.
    """
    assert config.total_steps is not None
    kind = student_kind(config.student_init, config.shape)
    by_kind = DEFAULTS[kind] | {"lr": usual_lr(kind, width)}
    steps = {"steps": config.steps, "total_steps": config.total_steps}
    usual = resolve(construct(Config, {**steps, **by_kind}))
    found = usual.to_json()
    chosen = [name for name in _AUTOMATIC if asked is not None and to_json(getattr(asked, name)) == found[name]]
    return (
        found | {name: to_json(getattr(config, name)) for name in chosen} | {"steps": None, "total_steps": config.steps}
    )


_WORDS = {int: "an integer", float: "a number", bool: "true or false", str: "text"}


def check_value(row: ConfigField, value: object, where: str) -> Value:
    """`value` converted to the field's type and checked against its range. Raises UsageError.

    `where` is the option that it comes from, or the file or variable that sets the field.
    """
    what, source = (row.flag, "") if where == row.flag else (row.name, f" ({where})")
    try:
        found = _convert(row, value)
    except (TypeError, ValueError, OverflowError):
        words = (
            "the step of a checkpoint, auto, true or false"
            if row.optional
            else "a list of names"
            if row.many
            else _WORDS[row.kind]
        )
        hint = f"use {row.flag}, {row.flag} STEP or {row.flag} auto" if row.optional else None
        raise UsageError(f"{what} must be {words}, not {value!r}{source}", hint=hint) from None
    wanted = ""
    if row.choices and found not in row.choices:
        wanted = f"one of {', '.join(row.choices)}"
    elif isinstance(found, (int, float)) and not row.low <= found <= row.high:
        wanted = f"at least {row.low:g}" if row.high == math.inf else f"between {row.low:g} and {row.high:g}"
    if wanted:
        usual = None if row.default is None else f"the default of {row.flag} is {row.default}"
        raise UsageError(f"{what} must be {wanted}, not {found!r}{source}", hint=usual)
    return found


def _convert(row: ConfigField, value: object) -> Value:
    """Raises TypeError, ValueError or OverflowError."""
    if row.many and isinstance(value, (str, list, tuple)):
        names = (value,) if isinstance(value, str) else tuple(value)
        if row.name == "allow_changed":  # fields, by the names of their options too
            names = tuple(str(name).removeprefix("--").replace("-", "_") for name in names)
        for name in names if row.name == "allow_changed" else ():
            if name not in what_fields():
                raise UsageError(
                    f"{name!r} is not one of the options that --allow-changed takes",
                    hint=f"it takes {', '.join(what_fields())}",
                )
        return names
    if row.optional and not isinstance(value, bool) and str(value).isdecimal():
        return int(str(value))
    if row.optional and value in row.optional.split("|")[1:]:
        return str(value)
    if row.many:
        raise TypeError
    if (row.kind is bool and isinstance(value, bool)) or (row.kind is str and isinstance(value, str)):
        return value
    if row.kind not in (int, float) or isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise TypeError
    if row.kind is int and str(value).lstrip("+-").isdigit():
        return int(value)  # a float would round large seeds
    number = float(value)
    if not math.isfinite(number) or (row.kind is int and not number.is_integer()):
        raise ValueError
    return int(number) if row.kind is int else number
