"""The command and the options that a run's folder records: what `apr resume` needs to continue it."""

from __future__ import annotations

import glob
import json
import os
import shlex
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from aprfmt.errors import CorruptError, NotFoundError, RefusedError, UnknownFormatError, UsageError, storage_errors
from aprfmt.inspection.run_report import METADATA, is_run
from aprfmt.limits import MAX_REPORTED_BYTES
from aprfmt.texts.corpus import OtherDataError
from aprfmt.texts.sources import HEADER, split_weights
from aprfmt.types import JsonObject, construct
from aprtrain.config import Config, is_value

_PATHS = ("teacher", "teacher_logprobs", "student", "init", "like", "shape", "eval_data", "prompts")
"""Fields of one path."""
_Result = TypeVar("_Result")


def recorded_config(folder: Path, steps: int | None = None, data: str | None = None) -> tuple[str, Config, list[str]]:
    """The command of the run in `folder`, its options to continue it from the latest checkpoint, and log lines.

    Relative paths of the run refer to the folder in which it was started. `steps` replaces the recorded number; one
    beyond the learning rate schedule extends the schedule too. `data` replaces the recorded paths.

    Raises UnknownFormatError if `folder` has no run, RefusedError if the run has saved nothing, CorruptError if the
    record is damaged, UsageError if `steps` is not a positive integer.
    """
    if not is_run(folder):
        hint = "pass the output folder of apr distill or apr pretrain"
        raise UnknownFormatError("not the folder of a training run", path=folder, hint=hint)
    path = folder / METADATA
    if not path.is_file():
        raise RefusedError(
            "the run ended before it saved a checkpoint", path=folder, hint="start it again with the same command"
        )
    record = _read(path)
    command, values, started_in = record.get("command"), record.get("resolved"), record.get("cwd")
    if command not in ("distill", "pretrain") or not isinstance(values, dict):
        raise CorruptError("the record of the run names no command or no options", path=path)
    known = {f.name: values[f.name] for f in fields(Config) if f.name in values}
    for name, value in known.items():
        if not is_value(name, value):
            raise CorruptError(f"option {name} is {value!r:.80}, not a valid value", path=path)
    plain = {name: tuple(value) if isinstance(value, list) else value for name, value in known.items()}
    config = _with_paths(construct(Config, plain), Path(started_in) if isinstance(started_in, str) else None)
    config = replace(config, output=str(folder), resume=True, smoke=None)
    config = config if data is None else replace(config, data=(data,))
    return command, *_extended(config, steps)


def resume(
    folder: Path, steps: int | None, data: str | None, train: Callable[[str, Config, list[str]], _Result]
) -> _Result:
    """Calls `train` with the run in `folder` as it is recorded.

    If the data moved or changed and none is named, the run continues with the tokens that it stored; a line says so.
    Raises as `recorded_config`; NotFoundError for a model or data that moved.
    """
    command, config, lines = recorded_config(folder, steps, data)
    _check_models(config, folder)
    stored = folder / "tokens"
    has_stored = data is None and (stored / HEADER).is_file() and "WORLD_SIZE" not in os.environ
    missing = next((path for path in map(os.fspath, split_weights(config.data)[0]) if not _is_there(path)), None)
    if missing is None:
        try:
            return train(command, config, lines)
        except OtherDataError:
            if not has_stored:
                raise
        why = "the data changed since the run was started"
    else:
        why = f"the data {missing} is not there"
        if not has_stored:
            place = str(stored) if (stored / HEADER).is_file() else "PATH"
            hint = shlex.join(["apr", "resume", str(folder), "--data", place])
            raise NotFoundError("the data of the run are not there", path=missing, hint=hint)
    lines = [*lines, f"{why}: continuing with the tokens that the run stored"]
    return train(command, replace(config, data=(str(stored),)), lines)


def _check_models(config: Config, folder: Path) -> None:
    started_in = _read(folder / METADATA).get("cwd")
    for path in (path for name in _PATHS if (path := getattr(config, name)) is not None):
        is_name = path.count("/") == 1 and not path.startswith((".", "/"))  # perhaps of the hub
        if not is_name and not _is_there(path):
            began = f" (the run was started in {started_in})" if started_in else ""
            line = shlex.join(["apr", "resume", str(folder)])
            hint = f"move it back, or type {line} in the folder that has {path}"
            raise NotFoundError(f"an input of the run is not there{began}", path=path, hint=hint)


def _is_there(path: str) -> bool:
    """Whether a path exists; addresses and patterns are left to their readers."""
    return "://" in path or glob.has_magic(path) or os.path.lexists(path)


def _read(path: Path) -> JsonObject:
    with storage_errors(path), path.open("rb") as file:
        data = file.read(MAX_REPORTED_BYTES)
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"not JSON: {error}", path=path) from error
    if not isinstance(found, dict):
        raise CorruptError("not a JSON object", path=path)
    return found


def _with_paths(config: Config, started_in: Path | None) -> Config:
    """`config` with the paths that were relative to another folder than the current one made absolute."""
    if started_in is None or started_in == Path(os.getcwd()):
        return config

    def absolute(path: str) -> str:
        return path if "://" in path or not (started_in / path).exists() else str(started_in / path)

    changed = {name: absolute(path) for name in _PATHS if (path := getattr(config, name)) is not None}
    has_weights = bool(split_weights(config.data)[1])
    split = (given.rpartition(":") if has_weights else (given, "", "") for given in config.data)
    data = tuple(f"{absolute(path)}{colon}{weight}" for path, colon, weight in split)
    if config.student_init is not None and config.student_init.endswith(".json"):
        changed["student_init"] = absolute(config.student_init)
    edited: Callable[..., Config] = partial(replace, config, data=data)
    return construct(edited, changed)


def _extended(config: Config, steps: int | None) -> tuple[Config, list[str]]:
    """`config` up to `steps`, if given, with a schedule that is as long."""
    if steps is None:
        return config, []
    if type(steps) is not int or steps < 1:
        raise UsageError(f"--steps must be at least 1, not {steps!r:.40}")
    before = config.total_steps or config.steps or 0
    if steps <= before:
        return replace(config, steps=steps), []
    allowed = tuple(dict.fromkeys((*config.allow_changed, "total_steps")))
    line = f"the learning rate schedule now ends at step {steps:,}; it ended at {before:,}"
    return replace(config, steps=steps, total_steps=steps, allow_changed=allowed), [line]
