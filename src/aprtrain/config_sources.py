"""A run's options from the command line, the environment and a config file.

The command line overrides the environment, which overrides the config file, which overrides the defaults. Unknown
options are errors that suggest the closest name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path

from aprfmt.arch.hparams import from_hf_config
from aprfmt.arch.hyperparams import Hyperparams
from aprfmt.canonical.width_pruning import parse_widths
from aprfmt.errors import AprError, UsageError
from aprfmt.formats.hf_files import read_config
from aprfmt.io.server_url import is_server
from aprfmt.io.settings import read_settings
from aprfmt.tokenizer.alignment import ALIGNED
from aprfmt.types import PathLike, construct
from aprtrain.config import (
    DEFAULTS,
    ENV_PREFIX,
    SELF,
    Config,
    ConfigField,
    check_value,
    command_fields,
    is_pruned,
    schema,
    student_kind,
    usual_lr,
)
from aprtrain.lora_spec import parse_lora
from aprtrain.plugins import LOSSES, MIXTURES, OPTIMIZERS


def build(
    command: str,
    given: Mapping[str, object],
    file: PathLike | None = None,
    environment: Mapping[str, str] | None = None,
) -> tuple[Config, list[str]]:
    """The configuration of a run of `command`, and log lines about the environment variables in effect.

    `given` holds the values of the command line: None or an empty tuple for options that were not set.
    Raises UsageError, or NotFoundError if the file does not exist.
    """
    rows = {f.name: f for f in command_fields(command)}
    from_file = _read_file(Path(file), rows) if file is not None else {}
    from_environment = dict(_read_environment(environment or {}, rows))
    from_command = {name: value for name, value in given.items() if value is not None and value != ()}
    values: dict[str, object] = {name: check_value(rows[name], value, str(file)) for name, value in from_file.items()}
    values |= {name: check_value(rows[name], text, variable) for name, (text, variable) in from_environment.items()}
    lines = [
        f"{variable} is overridden by {rows[name].flag}"
        if name in from_command
        else f"{variable} sets {rows[name].flag} {values[name]}"
        for name, (_, variable) in from_environment.items()
    ]
    values |= {name: check_value(rows[name], value, rows[name].flag) for name, value in from_command.items()}
    init, shape = (None if (text := values.get(name)) is None else str(text) for name in ("student_init", "shape"))
    kind, found = student_kind(init, shape), dict(_local_models(values))
    usual = {name: value for name, value in DEFAULTS[kind].items() if name in rows}
    if "lr" not in values:
        width = _student_width(values, found)
        usual["lr"] = usual_lr(kind, width)
        if width and usual["lr"] != DEFAULTS[kind]["lr"]:
            lines.append(f"--lr is {usual['lr']:g} for a {kind} student of hidden size {width}")
    contexts = [(h.max_position_embeddings, path) for path, h in found.values() if h.max_position_embeddings]
    if "seq_len" not in values and contexts:
        positions, path = min(contexts)
        if 2 <= positions < Config.seq_len:
            usual["seq_len"] = 1 << positions.bit_length() - 1  # a divisor of the usual --tokens-per-step
            lines.append(f"--seq-len is {usual['seq_len']}, since the context length of {path} is {positions}")
    config = construct(Config, {**usual, **values})
    _check_together(config, command)
    unused = [rows[name].flag for name in rows if name in values and rows[name].place == "save"]
    if config.smoke is not None and unused:
        lines.append(f"--smoke evaluates once and writes nothing, so it ignores {', '.join(unused)}")
    return config, lines


def _local_models(values: Mapping[str, object]) -> Iterator[tuple[str, tuple[str, Hyperparams]]]:
    """The models of a run that are on this machine: (option, (path, hyper-parameters))."""
    from aprfmt import formats

    for name in ("teacher", "student", "init", "like"):
        path = values.get(name)
        if isinstance(path, str) and "://" not in path:
            with suppress(AprError), formats.open(path) as model:  # which opening the models reports
                yield name, (path, model.hparams)


def _student_width(values: Mapping[str, object], models: Mapping[str, tuple[str, Hyperparams]]) -> int | None:
    """The hidden size of the student, if its model is on this machine."""
    init = values.get("student_init", values.get("shape"))
    if isinstance(init, str) and not is_pruned(init):
        path = Path(init) / "config.json" if Path(init).is_dir() else Path(init)
        with suppress(AprError, OSError):  # as above
            return from_hf_config(read_config(path)).hidden_size
        return None
    for word in init.split("+") if isinstance(init, str) else ():
        if word.startswith("width:") and (hidden := parse_widths(word.removeprefix("width:")).get("hidden")):
            return hidden
    name = "teacher" if init is not None else "student" if "student" in values else "init"
    return models[name][1].hidden_size if name in models else None


def _read_file(path: Path, rows: Mapping[str, ConfigField]) -> dict[str, object]:
    values: dict[str, object] = {}
    for key, value in read_settings(path).items():
        name = key.replace("-", "_")
        if name in values:
            raise UsageError(f"{name!r} is given twice", path=path)
        if name not in rows:
            raise UsageError(f"unknown option {name!r} in {path}", hint=_nearest(name, rows))
        values[name] = value
    return values


def _nearest(name: str, rows: Mapping[str, ConfigField]) -> str:
    if (other := schema().get(name)) is not None:
        return f"it is an option of apr {other.commands[0]}"
    near = get_close_matches(name, rows, n=1)
    return f"did you mean {near[0]}?" if near else "see --help for all options"


# Values of --teacher-residency in the reference implementation, and ours.
_BACKENDS = {"cudatrainer": "bf16", "realizar-q4k": "q4k"}


def _read_environment(
    environment: Mapping[str, str], rows: Mapping[str, ConfigField]
) -> Iterator[tuple[str, tuple[str, str]]]:
    """(name, (value, variable)) of each field that a variable sets."""
    by_variable = {f.env: f for f in schema().values() if f.env}
    for variable, text in environment.items():
        if not variable.startswith(ENV_PREFIX):
            continue
        row = by_variable.get(variable)
        if row is None:
            raise UsageError(
                f"unknown environment variable {variable}",
                hint=f"unset it; supported are {', '.join(sorted(by_variable))}",
            )
        if row.name in rows:
            yield row.name, (_BACKENDS.get(text, text) if row.name == "teacher_residency" else text, variable)


def _check_together(config: Config, command: str) -> None:
    """Checks combinations of fields. Raises UsageError."""
    c, keep_one = config, "keep one of them"
    if c.lora is not None:
        parse_lora(c.lora)
    served = is_server(c.teacher)
    has_files = served or c.teacher_logprobs is not None
    ways, names, what = (c.student, c.student_init), "--student or --student-init", "the model to train"
    if command == "pretrain":
        ways, names, what = (c.init, c.like), "--init or --like", "the model to start from"
    needed = [("data", "the training data")]
    needed += [("teacher", "the teacher model")] if command == "distill" and c.teacher_logprobs is None else []
    needed += [("output", "the output folder")] if c.smoke is None else []
    faults = (
        (not any(ways), f"{names} is missing: {what}", "add one of them"),
        (all(ways), f"use {names}, not both", keep_one),
        *((not getattr(c, name), f"--{name} is missing: {what}", f"add --{name} PATH") for name, what in needed),
        (all((c.teacher, c.teacher_logprobs)), "use a teacher or --teacher-logprobs, not both", keep_one),
        (c.student_init is not None and has_files,
            "--student-init needs the teacher model, not its log-probabilities",
            "make a student with apr prune and pass it as --student"),
        (served and c.temperature != 1, "a server gives log-probabilities at temperature 1 only",
            "leave out --temperature"),
        (served and c.eval_data is not None, "--eval-data needs a loaded teacher or --teacher-logprobs",
            "leave out --eval-data: documents are held out"),
        (c.top_k is not None and not has_files, "--top-k needs --teacher-logprobs or a server",
            "leave out --top-k: a loaded teacher gives the full distribution"),
        *(
            (has_files and getattr(c, name) != getattr(Config, name),
                f"{schema()[name].flag} needs a loaded teacher, and log-probabilities load none",
                f"leave out {schema()[name].flag}")
            for name in ("teacher_residency", "vocab_policy", "allow_same_arch")
        ),
        (c.vocab_policy in ALIGNED and c.student is None,
            f"--vocab-policy {c.vocab_policy} needs --student: a student made from the teacher has its tokenizer",
            "add --student FILE, or leave out --vocab-policy"),
        (c.vocab_policy in ALIGNED and c.on_policy > 0,
            f"--on-policy and --vocab-policy {c.vocab_policy} are mutually exclusive",
            "leave out --on-policy: the data are aligned before the run"),
        (c.vocab_policy == "uld" and c.loss != Config.loss, "--vocab-policy uld has a loss of its own",
            "leave out --loss, or use --vocab-policy aligned"),
        (c.hidden_weight > 0 and has_files, "--hidden-weight needs a loaded teacher, and log-probabilities load none",
            "leave out --hidden-weight, or pass the teacher's file"),
        (c.hidden_weight > 0 and c.vocab_policy in ALIGNED,
            f"--hidden-weight and --vocab-policy {c.vocab_policy} are mutually exclusive: positions differ",
            "leave out --hidden-weight"),
        *(
            (getattr(c, name) != getattr(Config, name) and not c.hidden_weight, f"{schema()[name].flag} needs "
                "--hidden-weight", "add --hidden-weight 1")
            for name in ("hidden_loss", "hidden_layers")
        ),
        ((c.on_policy > 0) != (c.prompts is not None), "--on-policy and --prompts must be given together",
            "add --on-policy 0.5 --prompts FILE"),
        (c.on_policy > 0 and has_files, "--on-policy needs a loaded teacher: it scores new text at every step",
            "pass the teacher's file"),
        (c.on_policy > 0 and c.shard == "weights", "--on-policy and --shard weights are mutually exclusive",
            "leave out --shard"),
        (c.on_policy > 0 and c.new_tokens >= c.seq_len,
            f"--new-tokens {c.new_tokens} is not less than --seq-len {c.seq_len}",
            f"add --new-tokens {c.seq_len // 2}; the prompt needs room too"),
        (c.lora is not None and not (c.student or c.init), "--lora needs the file of the model that it adapts",
            "add --student FILE (of apr pretrain: --init FILE); prune it first with apr prune"),
        (c.lora is not None and c.shard == "weights", "--lora and --shard weights are mutually exclusive",
            "leave out --shard: the frozen weights have no states"),
        (c.lora is None and c.lora_base != "auto", "--lora-base needs --lora", "add --lora r=16, or leave it out"),
        (c.student_init == SELF and c.qat is None, "--student-init self needs --qat: a copy has nothing to learn",
            "add --qat q4_0, or prune the teacher: --student-init layers:N"),
        (c.qat_every != Config.qat_every and c.qat is None, "--qat-every needs --qat",
            "add --qat PRESET, or leave out --qat-every"),
        (c.qat_dampening != Config.qat_dampening and c.qat is None, "--qat-dampening needs --qat",
            "add --qat PRESET, or leave out --qat-dampening"),
        (c.qat is not None and c.lora is not None, "--qat and --lora are mutually exclusive",
            "merge the adapter first, then train the merged model into the preset"),
        (c.qat is not None and c.shard != "states", "--qat does not support --shard weights", "leave out --shard"),
        (LOSSES.unknown(c.loss) is not None, f"--loss: {LOSSES.unknown(c.loss)}", None),
        (OPTIMIZERS.unknown(c.optimizer) is not None, f"--optimizer: {OPTIMIZERS.unknown(c.optimizer)}", None),
        (c.beta != Config.beta and c.loss not in MIXTURES, "--beta needs --loss jsd or skew",
            "add one of them, or leave out --beta"),
        ((c.like is None) != (c.shape is None), "--like and --shape must be given together",
            "--like takes a model for its tokenizer, --shape the config.json to train"),
        (c.smoke is not None and c.resumes, "--smoke cannot be combined with --resume: it starts from step 0",
            keep_one),
        (c.steps is None and c.epochs is None and c.smoke is None,
            "--steps or --epochs is missing: how long to train", "add --steps N, or --epochs 1 for one pass"),
        (c.eval_data is not None and c.held_out != Config.held_out,
            "--held-out and --eval-data are mutually exclusive", keep_one),
        (c.qa and c.smoke is not None, "--qa checks the final model, and --smoke writes none", keep_one),
        (c.repeat and c.epochs is not None, "--repeat and --epochs are mutually exclusive", keep_one),
        ((c.patience or c.target_val_loss) is not None and not (c.eval_every or c.save_every or c.save_epochs),
            "--patience and --target-val-loss need evaluations during the run", "add --eval-every N"),
        (bool(c.allow_changed) and not c.resumes, "--allow-changed needs --resume",
            "add --resume, or leave out --allow-changed"),
        *(
            (tokens % c.seq_len != 0, f"{flag} {tokens} is not a multiple of --seq-len {c.seq_len}",
                f"the nearest multiple is {max(c.seq_len, round(tokens / c.seq_len) * c.seq_len)}")
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
