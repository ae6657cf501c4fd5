"""What became of a run, from its two files alone, so that one which still runs or was killed has a report too.

`numbers` reads `metrics.jsonl` and `distillation_metadata.json`; what a killed run left half written is passed over.
`write` puts them on a page (`report_page`) or, as a PNG, into a figure of matplotlib.
"""

from __future__ import annotations

import json
import math
import statistics
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

from aprfmt.errors import NotFoundError, UnknownFormatError, UsageError, storage_error
from aprfmt.io.files import is_file
from aprfmt.io.segments import FileLayout, Literal
from aprfmt.io.write import WriteOptions, write_file
from aprtrain.config import Config, command_fields, resolve, schema
from aprtrain.report.metrics import FILE, METADATA

PAGE = "report.html"

CURVES = (
    *("loss", "ce", "kl", "kl1", "agreement", "grad_norm", "lr", "tokens_per_s"),
    *("mfu", "utilisation", "memory_bytes"),
)
"""What a line of a step holds that is drawn."""

SCORES = ("ce", "perplexity", "accuracy", "kl", "agreement", "teacher_ce")
_SHARES = ("accuracy", "agreement")
_COLD = 2  # first steps of a process, which compile and are no measure of speed
_ABSURD = 1e100  # no run counts or measures so much, and sums of such numbers overflow


def is_run(folder: Path) -> bool:
    """Whether a run was begun in `folder`."""
    return any(is_file(folder / name) for name in (FILE, METADATA))


def numbers(folder: Path) -> dict[str, Any]:
    """Everything that a report says, as JSON data.

    Raises NotFoundError where there is no folder, UnknownFormatError (exit 3) where no run was begun in it.
    """
    if not folder.exists():
        raise NotFoundError("no such file or folder", path=folder)
    if not is_run(folder):
        hint = f"name the -o of apr distill or apr pretrain: it holds {FILE}"
        raise UnknownFormatError("not the folder of a run", path=folder, hint=hint)
    try:
        events, skipped = _events(folder / FILE)
        metadata = _metadata(folder / METADATA)
    except OSError as error:
        raise storage_error(error, folder) from error
    return _body(folder, events, metadata, skipped)


def _events(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The lines that are whole, in order; how many were not."""
    found, skipped = [], 0
    if path.is_file():
        with open(path, encoding="utf-8", errors="replace") as file:
            for line in file:
                event = _object(line)
                if event:
                    found.append(event)
                else:
                    skipped += bool(line.strip())
    return found, skipped


def _metadata(path: Path) -> dict[str, Any]:
    return _object(path.read_text(encoding="utf-8", errors="replace")) if path.is_file() else {}


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _body(
    folder: Path, events: Sequence[dict[str, Any]], metadata: dict[str, Any], skipped: int
) -> dict[str, Any]:
    of: dict[str, list[dict[str, Any]]] = {}
    for event in events:
        of.setdefault(str(event.get("event")), []).append(event)
    start = (of.get("start") or [{}])[-1]
    steps = _by_step(e for e in of.get("step", []) if number(e.get("tokens")) is not None)
    at = _clock(steps)
    evaluations = _evaluations(of.get("evaluation") or _list(metadata.get("evaluations")), at)
    command = str(start.get("command") or metadata.get("command") or "distill")
    config = _options(command, _mapping(start.get("config") or metadata.get("resolved")))
    last = steps[-1] if steps else {}
    # The last evaluation may be of a later step than the last line of one.
    done = max(
        int(number(n) or 0) for n in (metadata.get("steps"), *(e["step"] for e in (*steps, *evaluations)))
    )
    tokens = [metadata.get("tokens"), last.get("tokens"), *(e["at_tokens"] for e in evaluations)]
    now = _latest_process(events)
    return {
        "folder": str(folder),
        "command": command,
        "status": _status(metadata, next((e for e in now if e.get("event") == "end"), {})),
        "error": next((str(e.get("message")) for e in now if e.get("event") == "error"), None),
        "heard_at": max((t for e in events if (t := number(e.get("time"))) is not None), default=None),
        **_who(metadata, config),
        "device": str(start.get("device") or "") or None,
        "steps": done,
        "total_steps": number(config.get("steps")),
        "tokens": max(number(n) or 0 for n in tokens),
        "seconds": _seconds(events) or number(metadata.get("seconds")),
        **_speed(steps),
        "before": evaluations[0] if evaluations else None,
        "after": evaluations[-1] if len(evaluations) > 1 else None,
        "change": _change(evaluations),
        "evaluations": evaluations,
        "curves": _curves(steps),
        "resumed": [_place(e, at) for e in of.get("begin", []) if e.get("resumed")],
        "failed_saves": [_place(e, at) | {"error": e.get("error")} for e in of.get("failed_save", [])],
        "failed_save_count": max(int(number(metadata.get("failed_saves")) or 0), len(of.get("failed_save", []))),
        "checkpoints": _checkpoints(of.get("checkpoint", []), metadata, at),
        "changed": _changed(config),
        "config": config,
        "environment": _mapping((of.get("begin") or [{}])[-1].get("environment")),
        "versions": _mapping(metadata.get("versions")),
        "lineage": dict(_lineage(metadata, start)),
        "skipped_lines": skipped,
    }  # fmt: skip


def _latest_process(events: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
    """What the last of the processes that worked on the run has said."""
    begun = [i for i, event in enumerate(events) if event.get("event") == "begin"]
    return events[begun[-1] :] if begun else events


def number(value: Any) -> float | None:
    """`value` where it is a finite number of a size that can be drawn, else None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return value if abs(value) < _ABSURD else None


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _by_step(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """One event a step, the latest, in the order of steps."""
    kept = {step: e for e in events if (step := number(e.get("step"))) is not None}
    return [kept[step] for step in sorted(kept)]


def _clock(steps: Sequence[dict[str, Any]]) -> Callable[[float], float]:
    """From a step to the tokens after it: between logged steps on a straight line, beyond them at the same rate."""
    known = [(0.0, 0.0), *((float(e["step"]), float(e["tokens"])) for e in steps if e["step"] > 0)]

    def tokens(step: float) -> float:
        if len(known) == 1:
            return step
        i = min(max(bisect_left(known, (step, -math.inf)), 1), len(known) - 1)
        (a, before), (b, after) = known[i - 1], known[i]
        return max(0.0, before + (step - a) * (after - before) / (b - a))

    return tokens


def _place(event: dict[str, Any], at: Callable[[float], float]) -> dict[str, Any]:
    step = number(event.get("step")) or 0
    return {"step": step, "at_tokens": round(at(step))}


def _evaluations(events: Iterable[dict[str, Any]], at: Callable[[float], float]) -> list[dict[str, Any]]:
    return [_place(e, at) | {name: number(e.get(name)) for name in SCORES} for e in _by_step(events)]


def _change(evaluations: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    """From the first evaluation to the last: relative, of shares the difference."""
    if len(evaluations) < 2:
        return {}
    first, last = evaluations[0], evaluations[-1]
    out: dict[str, float | None] = {}
    for name in SCORES:
        a, b = first[name], last[name]
        if a is None or b is None:
            out[name] = None
        elif name in _SHARES:
            out[name] = b - a
        else:
            out[name] = (b - a) / a if a else None
    return out


def _curves(steps: Sequence[dict[str, Any]]) -> dict[str, list[float | None]]:
    """Columns of the logged steps; a quantity that was never measured is left out."""
    columns = {name: [number(e.get(name)) for e in steps] for name in ("step", "tokens", *CURVES)}
    return {name: column for name, column in columns.items() if any(v is not None for v in column)}


def _speed(steps: Sequence[dict[str, Any]]) -> dict[str, Any]:
    warm = steps[_COLD:] or steps[-1:]
    found: dict[str, Any] = {}
    for name in ("tokens_per_s", "mfu", "utilisation"):
        values = [v for e in warm if (v := number(e.get(name))) is not None]
        found[name] = statistics.median(values) if values else None
    found["memory_bytes"] = max((v for e in steps if (v := number(e.get("memory_bytes")))), default=None)
    return found


def _seconds(events: Iterable[dict[str, Any]]) -> float:
    """Time from the first to the last line of each process that worked on the run, added up."""
    spans: list[list[float]] = []
    for event in events:
        time = number(event.get("time"))
        if event.get("event") == "begin" or not spans:
            spans.append([])
        if time is not None:
            spans[-1].append(time)
    return sum(max(span) - min(span) for span in spans if span)


def _checkpoints(
    events: Iterable[dict[str, Any]], metadata: dict[str, Any], at: Callable[[float], float]
) -> list[dict[str, Any]]:
    names = ("bytes", "seconds", "time")
    listed = metadata.get("checkpoints")
    known = (
        [{"step": step} for step in listed if number(step) is not None] if isinstance(listed, list) else []
    )
    rows = {}
    for event in (*known, *events):
        row = {
            **_place(event, at),
            **{n: number(event.get(n)) for n in names},
            "best": bool(event.get("best")),
        }
        rows[row["step"]] = row
    return [rows[step] for step in sorted(rows)]


def _status(metadata: dict[str, Any], ended: dict[str, Any]) -> str:
    """done | interrupted | failed | running (or killed: nobody was left to say so)."""
    status = metadata.get("status")
    if status in ("done", "interrupted", "failed"):
        return str(status)
    return "running" if "finished" not in ended else "done" if ended["finished"] else "interrupted"


def _who(metadata: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    teacher, student = _mapping(metadata.get("teacher")), _mapping(metadata.get("student"))
    source = next((config[k] for k in ("student", "init", "like", "teacher") if config.get(k)), None)
    made = config.get("student_init") or config.get("shape")
    path = config.get("teacher") or teacher.get("name")
    return {
        "teacher": _model(path, teacher) if path else None,
        "student": {**_model(source or student.get("name") or "model", student), "made": made},
        "data": short_path(config.get("data")),
    }


def _model(path: Any, origin: dict[str, Any]) -> dict[str, Any]:
    """Its name (None without a path), architecture, parameters."""
    parameters = number(origin.get("parameters"))
    return {"name": short_path(path), "architecture": origin.get("architecture"), "parameters": parameters}


def short_path(path: Any) -> str | None:
    """The last part of a path, with its folder where many files are called so."""
    if path is None:
        return None
    parts = PurePath(str(path)).parts
    generic = bool(parts) and parts[-1].split(".")[0] in ("model", "data", "train", "text")
    return "/".join(parts[-2:] if generic else parts[-1:])


def _options(command: str, config: dict[str, Any]) -> dict[str, Any]:
    """`config` without what this command does not ask for."""
    asked = {row.name for row in command_fields("pretrain" if command == "pretrain" else "distill")}
    return {name: value for name, value in config.items() if name in asked or name not in schema()}


def _changed(config: dict[str, Any]) -> list[dict[str, Any]]:
    """The fields that are not at their defaults, also at those that follow from others."""
    usual = {name: row.default for name, row in schema().items()}
    steps, total = config.get("steps"), config.get("total_steps")
    usual["total_steps"] = steps
    if isinstance(steps, int) and isinstance(total, int) and 0 < steps <= total:
        usual["warmup_steps"] = resolve(Config(steps=steps, total_steps=total)).warmup_steps
    return [
        {"name": name, "value": value, "default": usual.get(name)}
        for name, value in config.items()
        if value != _plain(usual.get(name))
    ]


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _lineage(metadata: dict[str, Any], start: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    yield "configuration", start.get("digest") or metadata.get("config_digest")
    for who in ("teacher", "student"):
        yield who, _mapping(metadata.get(who)).get("print")
    yield "data", metadata.get("data")
    yield "overrides", metadata.get("overrides") or None
    yield "schema", metadata.get("schema")


def write(folder: Path, target: Path, *, force: bool = False) -> dict[str, Any]:
    """Writes the report of the run in `folder` as `target`, .html or .png; gives its numbers.

    Raises UsageError for another suffix, MissingDependencyError for a .png without matplotlib, and what `numbers`
    and the writing of a file raise.
    """
    make = _MAKERS.get(target.suffix.lower())
    if make is None:
        raise UsageError("a report is a page (.html) or a figure (.png)", path=target)
    body = numbers(folder)
    layout = FileLayout(target.name, [Literal(make(body))])
    write_file(str(target), layout, WriteOptions(force=force))
    return body


def _page(body: Mapping[str, Any]) -> bytes:
    from aprtrain.report.page import html

    return html(body).encode()


def _figure(body: Mapping[str, Any]) -> bytes:
    from aprtrain.report.page import png

    return png(body)


_MAKERS: dict[str, Callable[[Mapping[str, Any]], bytes]] = {".html": _page, ".htm": _page, ".png": _figure}
