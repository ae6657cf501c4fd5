"""A run's configuration from the command line, then the environment, then a file, then the defaults.

What no field of the schema stands for is refused by name, with the nearest field there is.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from aprfmt.errors import NotFoundError, UsageError
from aprtrain.config import ENV_PREFIX, Config, Field, command_fields, schema, what_fields


def build(
    command: str,
    given: Mapping[str, Any],
    file: str | os.PathLike[str] | None = None,
    environment: Mapping[str, str] | None = None,
) -> tuple[Config, list[str]]:
    """The configuration of a run of `command`, and lines that name the environment variables that count.

    `given` holds the command line's values, None (or an empty tuple) where nothing was said.
    Raises UsageError, for a file that is not there NotFoundError.
    """
    rows = {f.name: f for f in command_fields(command)}
    values: dict[str, Any] = {}
    if file is not None:
        values |= {name: (value, f"{file}") for name, value in _file_values(Path(file), rows).items()}
    values |= (from_environment := dict(_environment_values(environment or {}, rows)))
    said = {name: value for name, value in given.items() if value is not None and value != ()}
    values |= {name: (value, rows[name].flag) for name, value in said.items()}
    checked = {name: _checked(rows[name], value, where) for name, (value, where) in values.items()}
    lines = [
        f"{where} sets {rows[name].flag} {checked[name]}"
        if name not in said
        else f"{where} is overruled by {rows[name].flag}"
        for name, (_, where) in from_environment.items()
    ]
    config = Config(**checked)
    _check_together(config, command)
    return config, lines


# --- sources of values ---


def _file_values(path: Path, rows: Mapping[str, Field]) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise NotFoundError("no such file", path=path) from None
    except (OSError, ValueError) as error:
        raise UsageError(f"not a readable text file: {error}", path=path) from error
    try:
        found = _parse(text, path.suffix.lower())
    except (ValueError, RecursionError) as error:
        raise UsageError(f"cannot be parsed: {str(error)[:200]}", path=path) from error
    if found is None:  # an empty .yaml
        found = {}
    if not isinstance(found, dict):
        raise UsageError("a configuration is a table of options", path=path)
    values: dict[str, Any] = {}
    for key, value in found.items():
        name = str(key).replace("-", "_")
        if name in values:
            raise UsageError(f"{name!r} is given twice", path=path)
        values[name] = value
    for name in values:
        if name not in rows:
            raise _unknown(name, rows, f"{path}")
    return values


def _parse(text: str, suffix: str) -> Any:
    if suffix == ".json":
        return json.loads(text)
    if suffix == ".toml":
        import tomllib

        return tomllib.loads(text)
    if suffix in (".yaml", ".yml"):
        import yaml

        try:
            return yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ValueError(error) from error
    raise UsageError("a configuration is a .toml, .yaml or .json file")


def _unknown(name: str, rows: Mapping[str, Field], where: str) -> UsageError:
    near = get_close_matches(name, rows, n=1)
    other = schema().get(name)
    hint = "--help lists all of them"
    if near:
        hint = f"did you mean {near[0]}?"
    if other is not None:
        hint = f"apr {other.commands[0]} has it"
    return UsageError(f"unknown option {name!r} in {where}", hint=hint)


# What the reference's words for the teacher's place mean here.
_BACKENDS = {"auto": "bf16", "cudatrainer": "bf16", "realizar-q4k": "q4k"}


def _environment_values(
    environment: Mapping[str, str], rows: Mapping[str, Field]
) -> Iterator[tuple[str, tuple[Any, str]]]:
    by_variable = {f.env: f for f in schema().values() if f.env}
    for variable, text in environment.items():
        if not variable.startswith(ENV_PREFIX):
            continue
        row = by_variable.get(variable)
        if row is None:
            raise UsageError(
                f"the environment variable {variable} has no meaning here",
                hint=f"unset it; understood are {', '.join(sorted(by_variable))}",
            )
        if row.name in rows:
            yield row.name, (_BACKENDS.get(text, text) if row.name == "teacher_residency" else text, variable)


def _checked(row: Field, value: Any, where: str) -> Any:
    """`value` as the row's type, within its range. Raises UsageError naming the row and its source."""
    try:
        value = _typed(row, value)
    except (TypeError, ValueError, OverflowError):
        words = {
            int: "a whole number",
            float: "a number",
            bool: "true or false",
            str: "text",
            tuple: "a list of names",
        }
        raise UsageError(f"{row.name} must be {words[row.kind]}, not {value!r} ({where})") from None
    if row.choices and value not in row.choices:
        raise UsageError(
            f"{row.name} is one of {', '.join(row.choices)}, not {value!r} ({where})", hint=_usual(row)
        )
    if row.kind in (int, float) and not row.low <= value <= row.high:
        bounds = f"at least {row.low:g}" if row.high == math.inf else f"between {row.low:g} and {row.high:g}"
        raise UsageError(f"{row.name} must be {bounds}, not {value!r} ({where})", hint=_usual(row))
    return value


def _usual(row: Field) -> str | None:
    return None if row.default is None else f"leave {row.flag} out for the default, {row.default}"


def _typed(row: Field, value: Any) -> Any:
    if row.kind is tuple:
        names = (value,) if isinstance(value, str) else tuple(value)
        for name in names:
            if name not in what_fields():
                raise UsageError(
                    f"{name!r} is no field that a resumed run must keep", hint=", ".join(what_fields())
                )
        return names
    if row.kind is bool:
        if not isinstance(value, bool):
            raise TypeError
        return value
    if isinstance(value, bool):
        raise TypeError
    if row.kind is str:
        if not isinstance(value, str):
            raise TypeError
        return value
    number = float(value)
    if row.kind is float:
        return number
    if number != int(number):
        raise ValueError
    return int(value) if isinstance(value, (int, str)) and str(value).lstrip("+-").isdigit() else int(number)


def _check_together(config: Config, command: str) -> None:
    """What single fields cannot say. Raises UsageError."""
    if command == "distill":
        _exactly_one(config, "student", "student_init", "the student")
        _need(config, "teacher", "the model to learn from")
        if config.beta != Config.beta and config.loss != "jsd":
            raise UsageError("--beta is for --loss jsd", hint="add --loss jsd or leave --beta out")
    else:
        _exactly_one(config, "init", "like", "where to start")
        if (config.like is None) != (config.shape is None):
            raise UsageError(
                "--like and --shape go together", hint="a tokenizer's model, and the config.json to train"
            )
    _need(config, "data", "what to train on; there is no default")
    if config.smoke is None:
        _need(config, "output", "the folder to write")
    elif config.resume:
        raise UsageError("--smoke begins anew and writes nothing; it cannot --resume")
    if config.steps is None and config.epochs is None and config.smoke is None:
        raise UsageError(
            "--steps or --epochs is missing: how long to train",
            hint="add --steps N, or --epochs 1 to read the data once",
        )
    if config.eval_data is not None and config.held_out != Config.held_out:
        raise UsageError("--held-out and --eval-data contradict each other", hint="keep one of them")
    if config.repeat and config.epochs is not None:
        raise UsageError("--repeat and --epochs contradict each other", hint="keep one of them")
    if config.allow_changed and not config.resume:
        raise UsageError("--allow-changed is for --resume")
    for name, unit in (("tokens_per_step", "seq_len"), ("micro_tokens", "seq_len")):
        tokens, part = getattr(config, name), getattr(config, unit)
        if tokens % part:
            near = max(part, round(tokens / part) * part)
            raise UsageError(
                f"{schema()[name].flag} {tokens} is no multiple of {schema()[unit].flag} {part}",
                hint=f"the nearest is {near}",
            )


def _need(config: Config, name: str, what: str) -> None:
    if getattr(config, name) is None:
        flag = schema()[name].flag
        raise UsageError(f"{flag} is missing: {what}", hint=f"add {flag} PATH")


def _exactly_one(config: Config, a: str, b: str, what: str) -> None:
    both = getattr(config, a) is not None, getattr(config, b) is not None
    names = f"{schema()[a].flag} or {schema()[b].flag}"
    if not any(both):
        raise UsageError(f"{names} is missing: {what}", hint="add one of them")
    if all(both):
        raise UsageError(f"{names}, not both", hint="keep one of them")
