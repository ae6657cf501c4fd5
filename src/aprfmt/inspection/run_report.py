"""What became of a training run; its page and picture are drawn by run_page.

`summarise` reads `metrics.jsonl` and `distillation_metadata.json` alone, so that a run that still goes on or was
killed has a report too. Both may be damaged or half written: what cannot be read is skipped, and no value is trusted
to be of its type.
"""

from __future__ import annotations

import json
import math
import statistics
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from io import BytesIO
from pathlib import Path, PurePath

from aprfmt.errors import LimitError, NotFoundError, UnknownFormatError, storage_errors
from aprfmt.html.file import check_page, write_page
from aprfmt.html.picture import png
from aprfmt.inspection.run_page import (
    RunModel,
    RunReport,
    SavedCheckpoint,
    StepPlace,
    StepSamples,
    charts,
    html,
    sentence,
    title,
)  # fmt: skip
from aprfmt.io.jsonx import check_size, objects_of
from aprfmt.io.source import is_file
from aprfmt.io.system import is_locked
from aprfmt.limits import MAX_REPORTED_BYTES
from aprfmt.text import first_few
from aprfmt.types import Json, JsonObject, Numbers

FILE = "metrics.jsonl"
METADATA = "distillation_metadata.json"
PAGE = "report.html"

CURVES = (
    *("loss", "ce", "kl", "kl1", "agreement", "grad_norm", "lr", "tokens_per_s"),
    *("mfu", "utilisation", "memory_bytes"),
)
"""Values of a step that are drawn."""

SCORES = ("ce", "perplexity", "accuracy", "kl", "agreement", "teacher_ce")
_SHARES = ("accuracy", "agreement")
_ENDS = ("done", "interrupted", "failed")
_COLD = 2  # first steps of a process, which compile, so their speed means nothing
_SAMPLED, _SAMPLES, _SAMPLE_CHARS = 40, 8, 600  # evaluations, samples of each, characters
_ABSURD = 1e100  # no run counts or measures so much, and sums of such numbers overflow


def is_run(folder: Path) -> bool:
    """Whether a run was begun in `folder`."""
    return any(is_file(folder / name) for name in (FILE, METADATA))


def summarise(folder: Path) -> RunReport:
    """What became of the run in `folder`.

    Raises NotFoundError for a folder that does not exist, UnknownFormatError (exit 3) for one without a run.
    """
    if not folder.exists():
        raise NotFoundError("no such file or folder", path=folder)
    if not is_run(folder):
        hint = f"pass the output folder of apr distill or apr pretrain, which contains {FILE}"
        raise UnknownFormatError("not the folder of a training run", path=folder, hint=hint)
    with storage_errors(folder):
        log, metadata = _read(folder / FILE), _object(_read(folder / METADATA))
    events: list[JsonObject] = []
    skipped = 0
    for line in BytesIO(log):
        if event := _object(line):
            events.append(event)
        else:
            skipped += bool(line.strip())
    return _report(folder, events, metadata, skipped)


def _read(path: Path) -> bytes:
    if not path.is_file():
        return b""
    with path.open("rb") as file:
        data = file.read(MAX_REPORTED_BYTES + 1)
    if len(data) > MAX_REPORTED_BYTES:
        raise LimitError(f"the file is over {MAX_REPORTED_BYTES:,} bytes", path=path)
    try:
        check_size(data)
    except LimitError as error:
        raise LimitError(error.message, path=path) from None
    return data


def _object(line: bytes) -> JsonObject:
    try:
        return _mapping(json.loads(line.decode("utf-8", "replace")))
    except (ValueError, RecursionError):
        return {}


def _report(folder: Path, events: Sequence[JsonObject], metadata: JsonObject, skipped: int) -> RunReport:
    of: dict[str, list[JsonObject]] = {}
    for event in events:
        of.setdefault(str(event.get("event")), []).append(event)
    begun = [i for i, event in enumerate(events) if event.get("event") == "begin"]
    now = events[begun[-1] :] if begun else events  # of the last process that worked on the run
    start = (of.get("start") or [{}])[-1]
    status, end = metadata.get("status"), next((e for e in now if e.get("event") == "end"), {})
    seen = (
        ("killed" if is_locked(folder) is False else "running")
        if "finished" not in end
        else "done"
        if end["finished"]
        else "interrupted"
    )
    steps = [(n, e) for n, e in _by_step(of.get("step", [])) if number(e.get("tokens")) is not None]
    at = _clock(steps)
    evaluations: list[Numbers] = [
        {
            "step": (place := _place(e, at))["step"],
            "at_tokens": place["at_tokens"],
            **{name: number(e.get(name)) for name in SCORES},
            "scored_tokens": number(e.get("tokens")),
        }
        for _, e in _by_step(of.get("evaluation") or objects_of(metadata.get("evaluations")))
    ]
    command = str(start.get("command") or metadata.get("command") or "distill")
    config, defaults = _mapping(start.get("config") or metadata.get("resolved")), _mapping(start.get("defaults"))
    failed = of.get("failed_save", [])
    # The last evaluation may be of a later step than the last line of one.
    done = [number(metadata.get("steps")), *(n for n, _ in steps), *(e["step"] for e in evaluations)]
    tokens = [number(v) for v in (metadata.get("tokens"), *(e.get("tokens") for _, e in steps[-1:]))]
    teacher, student, data = _models(metadata, config)
    warm = [e for _, e in steps[_COLD:] or steps[-1:]]
    columns = {name: [number(e.get(name)) for _, e in steps] for name in ("step", "tokens", *CURVES)}
    return {
        "folder": str(folder),
        "command": command,
        "status": status if isinstance(status, str) and status in _ENDS else seen,
        "error": next((str(e.get("message")) for e in now if e.get("event") == "error"), None),
        "heard_at": max((t for e in events if (t := number(e.get("time"))) is not None), default=None),
        "teacher": teacher,
        "student": student,
        "data": data,
        "device": str(start.get("device") or "") or None,
        "steps": max(int(n or 0) for n in (0, *done)),
        "total_steps": number(config.get("steps")),
        "tokens": max(n or 0 for n in (0, *tokens, *(e["at_tokens"] for e in evaluations))),
        "seconds": _seconds(events) or number(metadata.get("seconds")),
        "loss": _latest_loss(steps, config),
        "tokens_per_s": _median(warm, "tokens_per_s"),
        "mfu": _median(warm, "mfu"),
        "utilisation": _median(warm, "utilisation"),
        "memory_bytes": max((v for _, e in steps if (v := number(e.get("memory_bytes")))), default=None),
        "before": evaluations[0] if evaluations else None,
        "after": evaluations[-1] if len(evaluations) > 1 else None,
        "change": _change(evaluations),
        "evaluations": evaluations,
        "curves": {name: column for name, column in columns.items() if any(v is not None for v in column)},
        "resumed": [_place(e, at) for e in of.get("begin", []) if e.get("resumed")],
        "damaged": [
            {**_place(e, at), "checkpoint": number(d.get("step")), "reason": str(d.get("reason"))}
            for e in of.get("begin", [])
            for d in objects_of(e.get("damaged"))
        ],
        "failed_saves": [{**_place(e, at), "error": str(e.get("error"))} for e in failed],
        "failed_save_count": max(int(number(metadata.get("failed_saves")) or 0), len(failed)),
        "checkpoints": _checkpoints(of.get("checkpoint", []), metadata, at),
        "changed": [
            {"name": name, "value": config.get(name), "default": default}
            for name, default in defaults.items()
            if config.get(name) != default
        ],
        "config": config,
        "environment": _mapping((of.get("begin") or [{}])[-1].get("environment")),
        "versions": _mapping(metadata.get("versions")),
        "lineage": {
            "configuration": start.get("digest") or metadata.get("config_digest"),
            "teacher": _mapping(metadata.get("teacher")).get("print"),
            "student": _mapping(metadata.get("student")).get("print"),
            "data": metadata.get("data"),
            "overrides": metadata.get("overrides") or None,
            "schema": metadata.get("schema"),
        },
        "samples": _samples(of.get("samples", []), at),
        "skipped_lines": skipped,
    }


# --- values of no certain type ---


def number(value: object) -> float | None:
    """`value` if it is a finite number of a size that can be drawn, else None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return value if abs(value) < _ABSURD else None


def _mapping(value: Json) -> JsonObject:
    return value if isinstance(value, dict) else {}


# --- steps, and the tokens after them ---


def _by_step(events: Iterable[JsonObject]) -> list[tuple[float, JsonObject]]:
    """(step, event), one event a step, the latest, in the order of steps."""
    kept = {step: e for e in events if (step := number(e.get("step"))) is not None}
    return sorted(kept.items(), key=lambda pair: pair[0])


def _clock(steps: Sequence[tuple[float, JsonObject]]) -> Callable[[float], float]:
    """From a step to the tokens after it: between logged steps on a straight line, beyond them at the same rate."""
    known = [(0.0, 0.0), *((step, number(e.get("tokens")) or 0.0) for step, e in steps if step > 0)]

    def tokens(step: float) -> float:
        if len(known) == 1:
            return step
        i = min(max(bisect_left(known, (step, -math.inf)), 1), len(known) - 1)
        (a, before), (b, after) = known[i - 1], known[i]
        return max(0.0, before + (step - a) * (after - before) / (b - a))

    return tokens


def _place(event: JsonObject, at: Callable[[float], float]) -> StepPlace:
    step = number(event.get("step")) or 0
    return {"step": step, "at_tokens": round(at(step))}


def _change(evaluations: Sequence[Numbers]) -> Numbers:
    """From the first evaluation to the last: relative, of shares the difference."""
    if len(evaluations) < 2:
        return {}
    out: Numbers = {}
    for name in SCORES:
        a, b = evaluations[0][name], evaluations[-1][name]
        if a is None or b is None:
            out[name] = None
        else:
            out[name] = b - a if name in _SHARES else (b - a) / a if a else None
    return out


def _latest_loss(steps: Sequence[tuple[float, JsonObject]], config: JsonObject) -> float | None:
    """The mean loss per label of the steps since a line of the run, which prints one each `log_every` steps."""
    if not steps:
        return None
    every = max(1, int(number(config.get("log_every")) or 1))
    since = (int(steps[-1][0]) - 1) // every * every
    found = [
        (loss, number(e.get("labels")) or 0.0)
        for n, e in steps
        if n > max(since, 1 if steps[-1][0] > 1 else 0) and (loss := number(e.get("loss"))) is not None
    ]
    weights = [n for _, n in found]
    return statistics.fmean([loss for loss, _ in found], weights if any(weights) else None) if found else None


def _median(steps: Sequence[JsonObject], name: str) -> float | None:
    values = [v for e in steps if (v := number(e.get(name))) is not None]
    return statistics.median(values) if values else None


def _seconds(events: Iterable[JsonObject]) -> float:
    """Time from the first to the last line of each process that worked on the run, added up."""
    spans: list[list[float]] = []
    for event in events:
        if event.get("event") == "begin" or not spans:
            spans.append([])
        if (time := number(event.get("time"))) is not None:
            spans[-1].append(time)
    return sum(max(span) - min(span) for span in spans if span)


def _checkpoints(
    events: Sequence[JsonObject], metadata: JsonObject, at: Callable[[float], float]
) -> list[SavedCheckpoint]:
    listed = metadata.get("checkpoints")
    known: list[JsonObject] = [{"step": n} for n in listed] if isinstance(listed, list) else []
    return [
        {
            **_place(event, at),
            "bytes": number(event.get("bytes")),
            "seconds": number(event.get("seconds")),
            "time": number(event.get("time")),
            "best": bool(event.get("best")),
        }
        for _, event in _by_step([*known, *events])
    ]


def _samples(events: Iterable[JsonObject], at: Callable[[float], float]) -> list[StepSamples]:
    """The samples of the latest evaluations; texts of any length are cut."""
    return [
        {
            **_place(event, at),
            "samples": [
                {key: str(sample.get(key) or "")[:_SAMPLE_CHARS] for key in ("prompt", "text")}
                for sample in objects_of(event.get("samples"))[:_SAMPLES]
            ],
        }
        for _, event in _by_step(events)[-_SAMPLED:]
    ]


# --- what the run is ---


def _models(metadata: JsonObject, config: JsonObject) -> tuple[RunModel | None, RunModel, str | None]:
    """Teacher, student, and the name of the data."""
    teacher, student = _mapping(metadata.get("teacher")), _mapping(metadata.get("student"))
    source = next((config[k] for k in ("student", "init", "like", "teacher") if config.get(k)), None)
    path = config.get("teacher") or teacher.get("name")
    made: RunModel = {
        **_model(source or student.get("name") or "model", student),
        "made": config.get("student_init") or config.get("shape"),
    }
    data = config.get("data")
    names = [name for path in (data if isinstance(data, list) else [data]) if (name := short_path(path))]
    return _model(path, teacher) if path else None, made, first_few(names) or None


def _model(path: Json, origin: JsonObject) -> RunModel:
    parameters = number(origin.get("parameters"))
    return {"name": short_path(path), "architecture": origin.get("architecture"), "parameters": parameters}


def short_path(path: Json) -> str | None:
    """The last part of a path, with its folder if many files have that name."""
    if path is None:
        return None
    parts = PurePath(str(path)).parts
    generic = bool(parts) and parts[-1].split(".")[0] in ("model", "data", "train", "text")
    return "/".join(parts[-2:] if generic else parts[-1:])


def write_report(folder: Path, target: Path, *, force: bool = False) -> RunReport:
    """Writes the report of the run in `folder` as `target`: a page (.html), or its curves (.png); gives what it says.

    Raises UsageError for another suffix, MissingDependencyError for a .png without matplotlib, and what `summarise`
    and the writing of a file raise.
    """
    check_page(target, also=(".png",))
    body = summarise(folder)
    is_picture = target.suffix.lower() == ".png"
    content = png(f"{title(body)}: {sentence(body)}", charts(body)) if is_picture else html(body)
    write_page(target, content, force=force)
    return body
