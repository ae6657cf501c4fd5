"""A run's options: one schema of types, ranges, defaults, environment variables and help, and what fills it.

Values come from the command line, then the environment, then a file, then the defaults. What no field stands for is
refused by name, with the nearest field there is. `Config.to_json` is what a run prints and stores, `Config.digest`
the hash of what decides its numbers.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from aprfmt.errors import UsageError
from aprfmt.io.settings import read_settings
from aprfmt.types import Json, JsonObject, PathLike

ENV_PREFIX = "APR_DISTILL_"
_DISTILL, _PRETRAIN = ("distill",), ("pretrain",)

Value = str | int | float | bool | tuple[str, ...] | None
_V = TypeVar("_V", bound=Value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One row of the schema.

    Attributes:
        kind: str, int, float, bool or tuple (of words).
        low, high, choices: what values are allowed.
        env: the environment variable that sets it.
        flags: short options beside `flag`.
        metavar: what --help calls the words of a tuple.
        number: of a switch: what the number is that may follow it; alone it is true.
        commands: which commands have it.
        place: what it decides. "what" is trained on what (a resumed run must agree), "run": how far, where and how
            closely watched (a resumed run may differ), or "save": the same of what a smoke run leaves out.
    """

    name: str
    kind: type
    default: Value
    help: str
    low: float = -math.inf
    high: float = math.inf
    choices: tuple[str, ...] = ()
    env: str = ""
    flags: tuple[str, ...] = ()
    metavar: str = "NAME"
    number: str = ""
    commands: tuple[str, ...] = (*_DISTILL, *_PRETRAIN)
    place: str = "run"

    @property
    def flag(self) -> str:
        """Its long option."""
        return "--" + self.name.replace("_", "-")


def _option(default: _V, help: str, **more: Any) -> _V:
    """A field of Config with what its Field says beside name and type."""
    return field(default=default, metadata={"default": default, "help": help, **more})


def _distill(default: _V, help: str, **more: Any) -> _V:
    return _option(default, help, commands=_DISTILL, **more)


def _what(default: _V, help: str, **more: Any) -> _V:
    return _option(default, help, place="what", **more)


def _kd(default: _V, help: str, **more: Any) -> _V:
    return _distill(default, help, place="what", **more)


def _save(default: _V, help: str, **more: Any) -> _V:
    return _option(default, help, place="save", **more)


@dataclass(frozen=True, kw_only=True)
class Config:
    """A run's options. `None` stands for a default that follows from other fields; `resolve` fills those in."""

    teacher: str | None = _distill(None, "The model to learn from.")
    teacher_logprobs: str | None = _distill(None, "Folder of files that apr teacher wrote, in place of a teacher.")
    top_k: int | None = _kd(
        None, "Ids of a position to use of --teacher-logprobs (default: all that the files know).", low=1
    )
    student: str | None = _distill(None, "The model to train: .apr, .gguf, .safetensors or a folder.")
    student_init: str | None = _kd(
        None, "Make the student from the teacher: layers:0,2,4, layers:12, width:hidden=512,heads=8, or a config.json."
    )
    init: str | None = _option(None, "The model whose weights the training starts from.", commands=_PRETRAIN)
    like: str | None = _option(
        None, "The model whose tokenizer is used; --shape gives the network to train from scratch.", commands=_PRETRAIN
    )
    shape: str | None = _option(
        None, "config.json of the network to train from scratch (with --like).", commands=_PRETRAIN
    )
    data: tuple[str, ...] = _option(
        (),
        "Text, jsonl, csv or parquet files, a folder of them or of source code, token shards; may be given again, "
        "with a share of the tokens each.",
        flags=("-d",),
        metavar="PATH[:WEIGHT]",
    )
    text_field: str = _option("text", "The field of a record, or the column of a table, that holds its text.")
    strict: bool = _option(False, "A record that is not a document ends the run; else it is counted and left out.")
    output: str | None = _option(None, "Folder for checkpoints, metrics and the model.", flags=("-o",))

    kd_weight: float = _kd(
        0.7,
        "Weight w of the teacher's term; the labels have 1 - w. 0: the teacher is for comparison only.",
        low=0,
        high=1,
        flags=("--alpha",),
    )
    temperature: float = _kd(3.0, "Softens both distributions in the teacher's term.", low=0.05, high=100)
    loss: str = _kd("forward", "Divergence from the teacher.", choices=("forward", "reverse", "jsd"))
    beta: float = _kd(0.5, "Mixing weight of --loss jsd.", low=0.001, high=0.999)
    logits: str = _what("fp16", "Storage of logits on a GPU.", choices=("fp16", "fp32"))
    chunk: int = _what(2048, "Positions whose logits are held at a time.", low=1)

    lr: float = _what(5e-5, "Peak learning rate.", low=1e-12, high=10)
    lr_final: float = _what(0.1, "Share of --lr that is left at the end.", low=0, high=1)
    warmup_steps: int | None = _what(
        None,
        "Steps of linear warm-up (default: 2 % of --total-steps, at least 100 where that is at most a tenth).",
        low=0,
    )
    beta1: float = _what(0.9, "AdamW: decay of the mean.", low=0, high=0.999999)
    beta2: float = _what(0.95, "AdamW: decay of the square.", low=0, high=0.999999)
    eps: float = _what(1e-8, "AdamW: added to the root.", low=1e-20, high=1)
    weight_decay: float = _what(0.01, "AdamW: decay of matrices.", low=0, high=10)
    clip: float = _what(1.0, "Largest norm of the gradient; 0: no limit.", low=0)

    steps: int | None = _option(None, "The update at which this run stops, counted from the beginning.", low=1)
    total_steps: int | None = _what(None, "Length of the schedule (default: --steps).", low=1)
    epochs: int | None = _what(None, "Passes over the data: at most, or without --steps exactly.", low=1)
    repeat: bool = _what(False, "Repeat the data as often as --steps needs.")
    seq_len: int = _what(2048, "Tokens of a window.", low=2, env=ENV_PREFIX + "MAX_SEQ_LEN")
    tokens_per_step: int = _what(32768, "Tokens of an update, over all GPUs.", low=2)
    micro_tokens: int = _what(
        0, "Tokens of one forward and backward pass; 0: as many as the GPU has memory for, up to 32768.", low=0
    )
    held_out: float = _what(0.01, "Share of the documents held out for evaluation.", low=1e-9, high=0.9)
    eval_data: str | None = _option(None, "Evaluate on these files instead.")
    seed: int = _what(42, "Order of the data and fresh weights.", low=0, high=2**63 - 1)
    deterministic: bool = _what(False, "Bitwise the same numbers in every run.")

    vocab_policy: str = _kd(
        "shared",
        "Whether the teacher may have tokens that the student lacks: renormalise leaves them out.",
        choices=("shared", "renormalise"),
    )
    teacher_residency: str = _kd(
        "auto",
        "How the teacher's weights are held in memory; auto: Q4_K, Q6_K and Q8_0 as in its file.",
        choices=("auto", "bf16", "q4k", "fp8"),
        env=ENV_PREFIX + "TEACHER_BACKEND",
    )
    recompute: str = _option("none", "What the backward pass computes again to save memory.", choices=("none", "block"))
    shard: str = _option(
        "states",
        "What several processes share out: masters and moments, or the student's weights too.",
        choices=("states", "weights"),
    )
    compile: str = _what("auto", "Compile the blocks; auto: on a GPU.", choices=("auto", "on", "off"))
    device: str = _option("cuda", "cuda, cuda:N or cpu; there is no fallback.")

    save_every: int = _save(
        5000, "Steps between checkpoints; 0: by the clock alone.", low=0, env=ENV_PREFIX + "CHECKPOINT_EVERY"
    )
    save_minutes: float = _save(15.0, "Also save every X minutes; 0: by steps alone.", low=0)
    save_epochs: int | None = _save(
        None, "Also save after every N passes over the data; these are kept beside those of --keep.", low=1
    )
    keep: int = _save(3, "Number of latest checkpoints to keep besides the best, two or more.", low=2)
    save_dtype: str = _save("bf16", "Dtype of saved weights.", choices=("bf16", "f16", "f32"))
    eval_every: int = _save(1000, "Steps between evaluations on held-out data; 0: first and last.", low=0)
    patience: int | None = _save(
        None, "Stop after so many evaluations in a row that are no better than the best before them.", low=1
    )
    target_val_loss: float | None = _save(
        None, "Stop when the cross entropy on held-out text is at most this.", low=1e-9
    )
    eval_tokens: int = _option(65536, "Held-out tokens of an evaluation.", low=2)
    log_every: int = _option(10, "Steps between lines.", low=1, env=ENV_PREFIX + "LOG_EVERY")
    log_to: str | None = _save(None, "Also show the numbers in one of these.", choices=("tensorboard", "wandb"))
    qa: bool = _option(False, "At the end look at the model as apr qa does; exit status 1 if it does not pass.")
    resume: bool | int = _option(
        False, "Continue from the latest checkpoint in the output folder, or from that of STEP.", low=0, number="STEP"
    )
    allow_changed: tuple[str, ...] = _option(
        (), "A field that may differ from the run that is resumed; may be given again."
    )
    smoke: int | None = _option(
        None, "Run N steps, estimate the time of the whole run, write nothing.", low=1, env=ENV_PREFIX + "MAX_STEPS"
    )
    allow_same_arch: bool = _distill(False, "Teacher and student may have the same dims.")
    allow_weaker_teacher: bool = _distill(False, "Continue with a teacher that predicts the data badly.")
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
        """Windows of an evaluation, if there are that many."""
        return max(1, self.eval_tokens // self.seq_len)

    @property
    def stop(self) -> int:
        """The update after which this run stops; of a resolved configuration."""
        assert self.steps is not None
        return min(self.steps, self.smoke or self.steps)

    @property
    def resumes(self) -> bool:
        """Whether the run continues another one; step 0 is a step."""
        return self.resume is not False

    def is_compiled(self, device: str) -> bool:
        """Whether blocks are compiled on a device of the type `device`."""
        return self.compile == "on" or (self.compile == "auto" and device == "cuda")

    def to_json(self) -> JsonObject:
        """Every field with its value."""
        return {f.name: to_json(getattr(self, f.name)) for f in fields(self)}

    def digest(self) -> str:
        """SHA-256 of what decides the numbers of a run: the fields of place "what"."""
        return digest_of(self.to_json())


@cache
def schema() -> dict[str, Field]:
    """The rows by name, in the order of Config."""
    hints = get_type_hints(Config)
    return {f.name: Field(name=f.name, kind=_kind(hints[f.name]), **f.metadata) for f in fields(Config)}


def _kind(hint: type) -> type:
    parts = (hint, get_origin(hint), *get_args(hint))
    return next(kind for kind in (tuple, bool, int, float, str) if kind in parts)


def command_fields(command: str) -> Iterator[Field]:
    """The rows that `command` ("distill" or "pretrain") takes."""
    return (f for f in schema().values() if command in f.commands)


def what_fields() -> list[str]:
    """Names of the fields that a resumed run must share with the run that it continues."""
    return [f.name for f in schema().values() if f.place == "what"]


def digest_of(values: Mapping[str, object]) -> str:
    """SHA-256 of what decides the numbers of a run, from a configuration as JSON data. Raises KeyError."""
    decides = {name: values[name] for name in what_fields()}
    return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()


def is_value(name: str, value: object) -> bool:
    """Whether a field can have this value, which is JSON data."""
    row = schema()[name]
    try:
        return value is None or to_json(_check(row, value, "")) == value
    except UsageError:
        return False


def changed_fields(old: Mapping[str, object], new: Config) -> list[str]:
    """Names of the fields in which a resumed run may not differ and does."""
    return [name for name in what_fields() if old.get(name) != to_json(getattr(new, name))]


def to_json(value: Value) -> Json:
    """A field's value as JSON data."""
    return [*value] if isinstance(value, tuple) else value


def resolve(config: Config, data_steps: int | None = None) -> Config:
    """`config` with every number filled in; `data_steps` is how many updates the data last for.

    Raises UsageError for a schedule shorter than the run.
    """
    steps = config.steps or (data_steps if config.epochs is not None else config.smoke)
    assert steps is not None
    total, warmup = config.total_steps or steps, config.warmup_steps
    if warmup is None:
        warmup = min(max(100, total // 50), total // 10)
    if total < steps:
        raise UsageError(f"--total-steps {total} is less than --steps {steps}", hint="the schedule must cover the run")
    return replace(config, steps=steps, total_steps=total, warmup_steps=warmup)


def usual_values(config: Config) -> JsonObject:
    """What a resolved configuration would be if nothing but its steps had been given."""
    assert config.total_steps is not None
    usual = resolve(Config(steps=config.steps, total_steps=config.total_steps))
    return usual.to_json() | {"steps": None, "total_steps": config.steps}


# --- sources of values ---


def build(
    command: str,
    given: Mapping[str, object],
    file: PathLike | None = None,
    environment: Mapping[str, str] | None = None,
) -> tuple[Config, list[str]]:
    """The configuration of a run of `command`, and lines that name the environment variables that count.

    `given` holds the command line's values, None (or an empty tuple) for options that were not given.
    Raises UsageError, NotFoundError for a file that does not exist.
    """
    rows = {f.name: f for f in command_fields(command)}
    from_file = _read_file(Path(file), rows) if file is not None else {}
    from_environment = dict(_read_environment(environment or {}, rows))
    from_command = {name: value for name, value in given.items() if value is not None and value != ()}
    values: dict[str, Any] = {name: _check(rows[name], value, str(file)) for name, value in from_file.items()}
    values |= {name: _check(rows[name], text, variable) for name, (text, variable) in from_environment.items()}
    lines = [
        f"{variable} is overruled by {rows[name].flag}"
        if name in from_command
        else f"{variable} sets {rows[name].flag} {values[name]}"
        for name, (_, variable) in from_environment.items()
    ]
    values |= {name: _check(rows[name], value, rows[name].flag) for name, value in from_command.items()}
    config = Config(**values)
    _check_together(config, command)
    unused = [rows[name].flag for name in rows if name in values and rows[name].place == "save"]
    if config.smoke is not None and unused:
        lines.append(f"--smoke scores once and writes nothing: {', '.join(unused)} without effect")
    return config, lines


def _read_file(path: Path, rows: Mapping[str, Field]) -> dict[str, object]:
    values: dict[str, object] = {}
    for key, value in read_settings(path).items():
        name = key.replace("-", "_")
        if name in values:
            raise UsageError(f"{name!r} is given twice", path=path)
        if name not in rows:
            raise UsageError(f"unknown option {name!r} in {path}", hint=_nearest(name, rows))
        values[name] = value
    return values


def _nearest(name: str, rows: Mapping[str, Field]) -> str:
    if (other := schema().get(name)) is not None:
        return f"apr {other.commands[0]} has it"
    near = get_close_matches(name, rows, n=1)
    return f"did you mean {near[0]}?" if near else "--help lists all of them"


# What the reference's words for the teacher's place mean here.
_BACKENDS = {"cudatrainer": "bf16", "realizar-q4k": "q4k"}


def _read_environment(
    environment: Mapping[str, str], rows: Mapping[str, Field]
) -> Iterator[tuple[str, tuple[str, str]]]:
    """(name, (value, variable)) of each field that a variable sets."""
    by_variable = {f.env: f for f in schema().values() if f.env}
    for variable, text in environment.items():
        if not variable.startswith(ENV_PREFIX):
            continue
        row = by_variable.get(variable)
        if row is None:
            raise UsageError(
                f"the environment variable {variable} has no meaning here",
                hint=f"unset it; known are {', '.join(sorted(by_variable))}",
            )
        if row.name in rows:
            yield row.name, (_BACKENDS.get(text, text) if row.name == "teacher_residency" else text, variable)


_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", tuple: "a list of names"}


def _check(row: Field, value: object, where: str) -> Value:
    """`value` as the row's type, within its range. Raises UsageError naming the row and its source."""
    try:
        found = _convert(row, value)
    except (TypeError, ValueError, OverflowError):
        words = f"the {row.number.lower()} of a checkpoint, or true or false" if row.number else _WORDS[row.kind]
        raise UsageError(f"{row.name} must be {words}, not {value!r} ({where})") from None
    wanted = ""
    if row.choices and found not in row.choices:
        wanted = f"one of {', '.join(row.choices)}"
    elif isinstance(found, (int, float)) and not row.low <= found <= row.high:
        wanted = f"at least {row.low:g}" if row.high == math.inf else f"between {row.low:g} and {row.high:g}"
    if wanted:
        usual = None if row.default is None else f"leave {row.flag} out for the default, {row.default}"
        raise UsageError(f"{row.name} must be {wanted}, not {found!r} ({where})", hint=usual)
    return found


def _convert(row: Field, value: object) -> Value:
    """Raises TypeError, ValueError or OverflowError."""
    if row.kind is tuple and isinstance(value, (str, list, tuple)):
        names = (value,) if isinstance(value, str) else tuple(value)
        for name in names if row.name == "allow_changed" else ():
            if name not in what_fields():
                raise UsageError(f"{name!r} is not a field that a resumed run must keep", hint=", ".join(what_fields()))
        return names
    if row.number and not isinstance(value, bool) and str(value).isdecimal():
        return int(str(value))
    if (row.kind is bool and isinstance(value, bool)) or (row.kind is str and isinstance(value, str)):
        return value
    if row.kind not in (int, float) or isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise TypeError
    if row.kind is int and str(value).lstrip("+-").isdigit():
        return int(value)  # not by way of a float, which large seeds do not fit
    number = float(value)
    if not math.isfinite(number) or (row.kind is int and not number.is_integer()):
        raise ValueError
    return int(number) if row.kind is int else number


def _check_together(config: Config, command: str) -> None:
    """What single fields cannot say. Raises UsageError."""
    c, keep_one = config, "keep one of them"
    ways, names, what = (c.student, c.student_init), "--student or --student-init", "the student"
    if command == "pretrain":
        ways, names, what = (c.init, c.like), "--init or --like", "where to start"
    needed = [("data", "what to train on; there is no default")]
    needed += [("teacher", "the model to learn from")] if command == "distill" and c.teacher_logprobs is None else []
    needed += [("output", "the folder to write")] if c.smoke is None else []
    faults = (
        (not any(ways), f"{names} is missing: {what}", "add one of them"),
        (all(ways), f"{names}, not both", keep_one),
        *((not getattr(c, name), f"--{name} is missing: {what}", f"add --{name} PATH") for name, what in needed),
        (all((c.teacher, c.teacher_logprobs)), "a teacher or --teacher-logprobs, not both", keep_one),
        (all((c.student_init, c.teacher_logprobs)), "--student-init needs the teacher itself, not files of it",
            "apr prune makes a student; name it with --student"),
        (c.top_k is not None and c.teacher_logprobs is None, "--top-k is for --teacher-logprobs",
            "leave --top-k out: a teacher that is loaded says all"),
        *(
            (c.teacher_logprobs is not None and getattr(c, name) != getattr(Config, name),
                f"{schema()[name].flag} is for a teacher that is loaded, and --teacher-logprobs loads none",
                "leave it out")
            for name in ("teacher_residency", "vocab_policy", "allow_same_arch")
        ),
        (c.beta != Config.beta and c.loss != "jsd", "--beta is for --loss jsd", "add it, or leave --beta out"),
        ((c.like is None) != (c.shape is None), "--like and --shape go together",
            "a model for its tokenizer, and the config.json to train"),
        (c.smoke is not None and c.resumes, "--smoke starts anew and writes nothing; it cannot --resume",
            keep_one),
        (c.steps is None and c.epochs is None and c.smoke is None,
            "--steps or --epochs is missing: how long to train", "add --steps N, or --epochs 1 for one pass"),
        (c.eval_data is not None and c.held_out != Config.held_out,
            "--held-out and --eval-data contradict each other", keep_one),
        (c.qa and c.smoke is not None, "--qa looks at the model, and --smoke writes none", keep_one),
        (c.repeat and c.epochs is not None, "--repeat and --epochs contradict each other", keep_one),
        ((c.patience or c.target_val_loss) is not None and not (c.eval_every or c.save_every or c.save_epochs),
            "--patience and --target-val-loss go by evaluations, and there are none on the way", "add --eval-every N"),
        (bool(c.allow_changed) and not c.resumes, "--allow-changed is for --resume", "add --resume, or leave it out"),
        *(
            (tokens % c.seq_len != 0, f"{flag} {tokens} is not a multiple of --seq-len {c.seq_len}",
                f"the nearest is {max(c.seq_len, round(tokens / c.seq_len) * c.seq_len)}")
            for flag, tokens in (("--tokens-per-step", c.tokens_per_step), ("--micro-tokens", c.micro_tokens))
        ),
    )  # fmt: skip
    found = [(message, hint) for is_wrong, message, hint in faults if is_wrong]
    missing = [(message, hint) for message, hint in found if " is missing: " in message]
    if len(missing) > 1:
        what = "TEACHER --student S" if command == "distill" else "--init M"
        hint = f"apr {command} {what} --data FILES -o FOLDER --steps N"
        raise UsageError("; ".join(message for message, _ in missing), hint=hint)
    if found:
        raise UsageError(found[0][0], hint=found[0][1])
