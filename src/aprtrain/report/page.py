"""What became of a run, and its report: a page that stands alone, or its curves as one picture.

`summarise` reads `metrics.jsonl` and `distillation_metadata.json` alone, so that a run that still goes on or was
killed has a report too. Both may be damaged or half written: what cannot be read is skipped, and no value is trusted
to be of its type. Page and picture draw the same panels.
"""

from __future__ import annotations

import io
import json
import math
import statistics
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, TypedDict

from aprfmt.errors import MissingDependencyError, NotFoundError, UnknownFormatError, UsageError, storage_errors
from aprfmt.html.page import Mark, Series, chart, facts, fold, grid, heading, is_wide, page, table, text, tiles
from aprfmt.io.pipe import FileLayout, Literal, WriteOptions, write_file
from aprfmt.io.source import is_file
from aprfmt.text import format_clock, format_number
from aprfmt.types import Json, JsonObject
from aprtrain.config import Config, command_fields, resolve, schema, to_json
from aprtrain.report.metrics import FILE, METADATA, Numbers

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PAGE = "report.html"

STATUS = {
    "done": ("done", "good"),
    "interrupted": ("stopped by a signal", "warn"),
    "failed": ("failed", "bad"),
    "running": ("running, or killed", "warn"),
}
"""The words for a status, and their tone."""

_GIB = float(1 << 30)
_LONG = 14  # rows of a table that are shown without folding

CURVES = (
    *("loss", "ce", "kl", "kl1", "agreement", "grad_norm", "lr", "tokens_per_s"),
    *("mfu", "utilisation", "memory_bytes"),
)
"""Values of a step that are drawn."""

SCORES = ("ce", "perplexity", "accuracy", "kl", "agreement", "teacher_ce")
_SHARES = ("accuracy", "agreement")
_ENDS = ("done", "interrupted", "failed")
_COLD = 2  # first steps of a process, which compile, so their speed means nothing
_ABSURD = 1e100  # no run counts or measures so much, and sums of such numbers overflow


class RunReport(TypedDict):
    """Everything that a report says; JSON data.

    Attributes:
        status: done, interrupted, failed, or running (or killed: nobody was left to say so).
        heard_at: seconds since 1970 of the last line.
        tokens_per_s, mfu, utilisation: medians; memory_bytes is the peak.
        evaluations, resumed: `step`, `at_tokens` and, of an evaluation, SCORES.
        before, after, change: the first and last evaluation, and the relative difference, absolute for shares.
        teacher, student: name, architecture, parameters; `made` says how a student was made.
        curves: columns of the logged steps, by name.
        damaged: newer checkpoints that a resumed run could not go on from: `checkpoint`, `reason`, and where it did.
        failed_saves, checkpoints: step and at_tokens; the error, or bytes, seconds, time, best.
        changed: name, value and default of the fields that are not at their defaults.
        lineage: hashes of what the run is made of.
    """

    folder: str
    command: str
    status: str
    error: str | None
    heard_at: float | None
    teacher: dict[str, Any] | None
    student: dict[str, Any]
    data: str | None
    device: str | None
    steps: int
    total_steps: float | None
    tokens: float
    seconds: float | None
    tokens_per_s: float | None
    mfu: float | None
    utilisation: float | None
    memory_bytes: float | None
    before: Numbers | None
    after: Numbers | None
    change: Numbers
    evaluations: list[Numbers]
    curves: dict[str, list[float | None]]
    resumed: list[Numbers]
    damaged: list[dict[str, Any]]
    failed_saves: list[dict[str, Any]]
    failed_save_count: int
    checkpoints: list[dict[str, Any]]
    changed: list[dict[str, Any]]
    config: JsonObject
    environment: JsonObject
    versions: JsonObject
    lineage: JsonObject
    skipped_lines: int


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
        hint = f"name the -o of apr distill or apr pretrain: it holds {FILE}"
        raise UnknownFormatError("not the folder of a run", path=folder, hint=hint)
    with storage_errors(folder):
        lines = _read(folder / FILE).split("\n")
        metadata = _object(_read(folder / METADATA))
    parsed = [_object(line) for line in lines if line.strip()]
    events = [event for event in parsed if event]
    return _report(folder, events, metadata, len(parsed) - len(events))


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def _object(text: str) -> JsonObject:
    try:
        return _mapping(json.loads(text))
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
    seen = "running" if "finished" not in end else "done" if end["finished"] else "interrupted"
    steps = [(n, e) for n, e in _by_step(of.get("step", [])) if number(e.get("tokens")) is not None]
    at = _clock(steps)
    evaluations: list[Numbers] = [
        {**_place(e, at), **{name: number(e.get(name)) for name in SCORES}}
        for _, e in _by_step(of.get("evaluation") or _objects(metadata.get("evaluations")))
    ]
    command = str(start.get("command") or metadata.get("command") or "distill")
    own = {row.name for row in command_fields("pretrain" if command == "pretrain" else "distill")}
    resolved = _mapping(start.get("config") or metadata.get("resolved"))
    config = {name: value for name, value in resolved.items() if name in own or name not in schema()}
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
            for d in _objects(e.get("damaged"))
        ],
        "failed_saves": [{**_place(e, at), "error": str(e.get("error"))} for e in failed],
        "failed_save_count": max(int(number(metadata.get("failed_saves")) or 0), len(failed)),
        "checkpoints": _checkpoints(of.get("checkpoint", []), metadata, at),
        "changed": _find_changes(config),
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


def _objects(value: Json) -> list[JsonObject]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


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


def _place(event: JsonObject, at: Callable[[float], float]) -> Numbers:
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
) -> list[dict[str, Any]]:
    listed = metadata.get("checkpoints")
    known: list[JsonObject] = [{"step": n} for n in listed] if isinstance(listed, list) else []
    return [
        {
            **_place(event, at),
            **{name: number(event.get(name)) for name in ("bytes", "seconds", "time")},
            "best": bool(event.get("best")),
        }
        for _, event in _by_step([*known, *events])
    ]


# --- what the run is ---


def _models(metadata: JsonObject, config: JsonObject) -> tuple[dict[str, Any] | None, dict[str, Any], str | None]:
    """Teacher, student, and the name of the data."""
    teacher, student = _mapping(metadata.get("teacher")), _mapping(metadata.get("student"))
    source = next((config[k] for k in ("student", "init", "like", "teacher") if config.get(k)), None)
    path = config.get("teacher") or teacher.get("name")
    made = {
        **_model(source or student.get("name") or "model", student),
        "made": config.get("student_init") or config.get("shape"),
    }
    return _model(path, teacher) if path else None, made, short_path(config.get("data"))


def _model(path: Json, origin: JsonObject) -> dict[str, Any]:
    parameters = number(origin.get("parameters"))
    return {"name": short_path(path), "architecture": origin.get("architecture"), "parameters": parameters}


def short_path(path: Json) -> str | None:
    """The last part of a path, with its folder if many files have that name."""
    if path is None:
        return None
    parts = PurePath(str(path)).parts
    generic = bool(parts) and parts[-1].split(".")[0] in ("model", "data", "train", "text")
    return "/".join(parts[-2:] if generic else parts[-1:])


def _find_changes(config: JsonObject) -> list[dict[str, Any]]:
    """The fields that are not at their defaults, nor at those that follow from others."""
    usual = {name: to_json(row.default) for name, row in schema().items()}
    steps, total = config.get("steps"), config.get("total_steps")
    usual["total_steps"] = steps
    if isinstance(steps, int) and isinstance(total, int) and 0 < steps <= total:
        usual["warmup_steps"] = resolve(Config(steps=steps, total_steps=total)).warmup_steps
    return [
        {"name": name, "value": value, "default": usual.get(name)}
        for name, value in config.items()
        if value != usual.get(name)
    ]


# --- the page ---


@dataclass(frozen=True, slots=True)
class _Panel:
    title: str
    series: list[Series]
    kind: str = "number"
    zero: bool = False


def _panels(body: RunReport) -> Iterator[_Panel]:
    """What is drawn over tokens; a panel whose series are all empty is nothing."""
    t = body["config"].get("temperature")
    soft = f"train, T = {format_number(t)}" if isinstance(t, (int, float)) else "train, softened"
    if body["teacher"] is not None:  # without one the loss is the cross entropy
        yield _Panel("Loss", [_curve(body, "train", "loss", 0)])
    teacher = _scores(body, "teacher", "teacher_ce", 2)
    level = Series("teacher", teacher.xs, teacher.ys, "level", 2)
    yield _Panel("Cross entropy, nats", [_curve(body, "train", "ce", 0), _scores(body, "held-out", "ce", 1), level])
    kl = [_curve(body, "train, T = 1", "kl1", 0), _scores(body, "held-out", "kl", 1)]
    yield _Panel("KL to the teacher, nats", kl if t == 1 else [*kl, _curve(body, soft, "kl", 3)])
    same = [_curve(body, "train", "agreement", 0), _scores(body, "held-out", "agreement", 1)]
    yield _Panel("Same first choice as the teacher", same, "percent")
    yield _Panel("Learning rate", [_curve(body, "lr", "lr", 0, look="exact")], zero=True)
    yield _Panel("Gradient norm", [_curve(body, "norm", "grad_norm", 0)])
    yield _Panel("Tokens a second", [_curve(body, "tok/s", "tokens_per_s", 0)], zero=True)
    use = [_curve(body, "MFU", "mfu", 0), _curve(body, "GPU busy", "utilisation", 1, 100)]
    yield _Panel("Use of the GPU", use, "percent", zero=True)
    yield _Panel("Peak memory, GiB", [_curve(body, "peak", "memory_bytes", 0, _GIB, look="exact")], zero=True)


def _curve(body: RunReport, name: str, key: str, colour: int, unit: float = 1.0, look: str = "line") -> Series:
    ys = body["curves"].get(key, [])
    xs = [x or 0 for x in body["curves"].get("tokens", [])] if ys else []
    return Series(name, xs, [None if y is None else y / unit for y in ys], look, colour)


def _scores(body: RunReport, name: str, key: str, colour: int) -> Series:
    rows = [e for e in body["evaluations"] if e[key] is not None]
    return Series(name, [e["at_tokens"] or 0 for e in rows], [e[key] for e in rows], "points", colour)


def _marks(body: RunReport) -> list[Mark]:
    resumed = [Mark(m["at_tokens"] or 0, f"resumed at step {m['step']:,.0f}") for m in body["resumed"]]
    failed = [
        Mark(m["at_tokens"], f"no checkpoint at step {m['step']:,.0f}: {m['error']}", bad=True)
        for m in body["failed_saves"]
    ]
    damaged = [Mark(m["at_tokens"] or 0, damage_text(m), bad=True) for m in body["damaged"]]
    return resumed + damaged + failed


def damage_text(row: Mapping[str, Any]) -> str:
    """A row of RunReport.damaged in words."""
    return (
        f"checkpoint {row['checkpoint'] or 0:,.0f} was damaged ({row['reason']}): went on from {row['step'] or 0:,.0f}"
    )


def html(body: RunReport) -> str:
    """The page of a run."""
    reach = (0.0, float(max(body["tokens"], *(n or 0 for n in body["curves"].get("tokens", [])), 1)))
    figures = [
        chart(p.title, p.series, x_name="tokens", x_range=reach, kind=p.kind, zero=p.zero, marks=_marks(body))
        for p in _panels(body)
    ]
    parts = [*_head(body), _tiles(body), heading("Curves over tokens"), _notes(body), grid(figures)]
    point = " Point at a curve to read it." if any(figures) else ""
    foot = f"<footer>Report of {text(body['folder'])}{text(_heard(body))}.{point}</footer>"
    parts += [*_tables(body), *_origin(body), foot]
    return page(f"{name(body)}: {sentence(body)}", parts, interactive=True)


def name(body: RunReport) -> str:
    """Teacher → student."""
    student, teacher = body["student"], body["teacher"]
    made = f" ({student['made']})" if student["made"] else ""
    if teacher is None:
        return f"{student['name']}{made}"
    if student["made"] and student["name"] == teacher["name"]:
        return f"{teacher['name']} → student {student['made']}"
    return f"{teacher['name']} → {student['name']}{made}"


def sentence(body: RunReport) -> str:
    """The result in one sentence."""
    for key, words in (("kl", "KL to the teacher"), ("ce", "cross entropy")):
        moved, a, b = ((found or {}).get(key) for found in (body["change"], body["before"], body["after"]))
        if moved is not None and a is not None and b is not None:
            if a == b:
                return f"held-out {words} stayed at {a:.4g}"
            verb = "fell" if b < a else "rose"
            return f"held-out {words} {verb} from {a:.4g} to {b:.4g} ({_with_sign(moved)})"
    return "no result yet: there are no two evaluations to compare"


def _with_sign(share: float, unit: str = "%") -> str:
    return f"{100 * share:+.1f} {unit}".replace("-", "\N{MINUS SIGN}")


def _head(body: RunReport) -> Iterator[str]:
    words, tone = STATUS[body["status"]]
    yield f'<h1>{text(name(body))} <span class="pill {tone}">{text(words)}</span></h1>'
    result = sentence(body)
    yield f"<p class=lead>{text(result[0].upper() + result[1:])}</p>"
    words_of = [body["command"], f"on {body['data']}" if body["data"] else "", body["device"] or ""]
    for who, model in (("teacher", body["teacher"]), ("student", body["student"])):
        if model and model["architecture"]:
            size = f" {format_number(model['parameters'])} parameters" if model["parameters"] else ""
            words_of.append(f"{who if body['teacher'] else 'model'} {model['architecture']}{size}")
    yield f"<p class=soft>{text(' · '.join(word for word in words_of if word))}</p>"
    if body["error"]:
        yield f"<p class=bad>{text(body['error'])}</p>"
    total = body["total_steps"]
    if body["status"] != "done" and total:
        share = min(1.0, body["steps"] / total)
        yield f"<p>Step {body['steps']:,} of {total:,.0f} ({share:.0%}){text(_heard(body))}</p>"
        yield f'<div class=track><i style="width:{100 * share:.1f}%"></i></div>'


def _heard(body: RunReport) -> str:
    return f", last heard of on {_date(body['heard_at'])}" if body["heard_at"] is not None else ""


def _date(seconds: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))
    except (OverflowError, ValueError, OSError):
        return "an unknown day"


def _tiles(body: RunReport) -> str:
    rows = [*_results(body)]
    of = f"of {body['total_steps']:,.0f}" if body["total_steps"] else ""
    rows.append(("steps", f"{body['steps']:,}", of, ""))
    rows.append(("tokens", format_number(body["tokens"]), "", ""))
    if body["seconds"] is not None:
        rows.append(("wall time", format_clock(body["seconds"]), "h:mm:ss", ""))
    if body["tokens_per_s"] is not None:
        rows.append(("tokens a second", format_number(body["tokens_per_s"]), "median", ""))
    if body["mfu"] is not None:
        rows.append(("MFU", f"{body['mfu']:.1%}", "median", ""))
    if body["memory_bytes"] is not None:
        rows.append(("peak memory", f"{body['memory_bytes'] / _GIB:.1f} GiB", "", ""))
    if body["failed_save_count"]:
        rows.append(("failed saves", str(body["failed_save_count"]), "see the checkpoints", "bad"))
    return tiles(rows)


def _results(body: RunReport) -> Iterator[tuple[str, str, str, str]]:
    latest: Numbers = body["after"] or body["before"] or {}
    for key, label in (("kl", "held-out KL"), ("ce", "held-out CE"), ("agreement", "agreement")):
        value, moved, before = ((found or {}).get(key) for found in (latest, body["change"], body["before"]))
        if value is None:
            continue
        is_share = key == "agreement"
        note, tone = "", ""
        if moved is not None and before is not None:
            was = f"{before:.1%}" if is_share else f"{before:.4g}"
            note = f"{_with_sign(moved, 'points' if is_share else '%')} from {was}"
            note += f"; teacher {latest['teacher_ce']:.4g}" if key == "ce" and latest["teacher_ce"] else ""
            tone = "good" if (moved > 0) == is_share and moved else "bad" if moved else ""
        yield label, f"{value:.1%}" if is_share else f"{value:.4g}", note, tone


def _notes(body: RunReport) -> str:
    words = []
    if body["resumed"]:
        words.append("Grey vertical lines: the run was resumed.")
    if body["failed_saves"]:
        words.append("Red vertical lines: a checkpoint that could not be saved.")
    words += [damage_text(m)[0].upper() + damage_text(m)[1:] + "." for m in body["damaged"]]
    if body["skipped_lines"]:
        words.append(f"Damaged lines skipped: {body['skipped_lines']}.")
    if not body["curves"]:
        words.append("No step has been logged yet.")
    return f"<p class=soft>{text(' '.join(words))}</p>" if words else ""


def _tables(body: RunReport) -> Iterator[str]:
    columns: list[tuple[str, str, Callable[[float], str]]] = [
        ("step", "step", "{:,.0f}".format),
        ("tokens", "at_tokens", format_number),
        ("KL", "kl", "{:.4g}".format),
        ("CE", "ce", "{:.4f}".format),
        ("perplexity", "perplexity", "{:,.3f}".format),
        ("agreement", "agreement", "{:.1%}".format),
        ("right first choice", "accuracy", "{:.1%}".format),
        ("teacher's CE", "teacher_ce", "{:.4f}".format),
    ]
    yield from _numbers_table("Held-out evaluations", columns, body["evaluations"])
    gone = [
        {"step": m["step"], "at_tokens": m["at_tokens"], "note": f"not saved: {m['error']}"}
        for m in body["failed_saves"]
    ]
    kept = [{**row, "note": "best so far" if row["best"] else ""} for row in body["checkpoints"]]
    columns = [
        ("step", "step", "{:,.0f}".format),
        ("tokens", "at_tokens", format_number),
        ("written", "time", _date),
        ("GiB", "bytes", lambda n: f"{n / _GIB:.3g}"),
        ("seconds", "seconds", "{:.3g}".format),
        ("", "note", str),
    ]
    rows = sorted([*kept, *gone], key=lambda row: number(row["step"]) or 0)
    yield from _numbers_table("Checkpoints saved, including those removed since", columns, rows)


def _numbers_table(
    title: str, columns: Sequence[tuple[str, str, Callable[[Any], str]]], rows: Sequence[Mapping[str, Any]]
) -> Iterator[str]:
    """A table without the columns that no row has a value in."""
    used = [column for column in columns if any(row.get(column[1]) not in (None, "") for row in rows)]
    if not rows or not used:
        return
    cells = [[put(row[key]) if row.get(key) is not None else "–" for _, key, put in used] for row in rows]
    header, right = [name for name, _, _ in used], "|".join(name for name, key, _ in used if key != "note")
    yield heading(title)
    if len(cells) <= _LONG:
        yield table(header, cells, right=right)
        return
    yield table(header, [*cells[:2], *cells[-8:]], right=right)
    yield fold(f"All {len(cells)}", table(header, cells, right=right))


def _origin(body: RunReport) -> Iterator[str]:
    changed = {row["name"] for row in body["changed"]}
    if body["config"]:
        yield heading("Configuration")
        rows = [[row["name"], _word(row["value"]), _word(row["default"])] for row in body["changed"]]
        yield table(["differs from the default", "value", "default"], rows, code="value|default")
        rest = [(name, _word(value)) for name, value in body["config"].items() if name not in changed]
        yield fold(f"{len(rest)} fields at their defaults", facts(rest))
    for title, part in (
        ("Environment", body["environment"]),
        ("Versions", body["versions"]),
        ("Lineage (SHA-256)", body["lineage"]),
    ):
        found = [(key, _word(value)) for key, value in part.items() if value is not None]
        if found:
            yield heading(title) + facts(found)


def _word(value: Json) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "–"
    return f"{value:g}" if isinstance(value, float) else str(value)


# --- files ---


def write_report(folder: Path, target: Path, *, force: bool = False) -> RunReport:
    """Writes the report of the run in `folder` as `target`: a page (.html), or its curves (.png); gives what it says.

    Raises UsageError for another suffix, MissingDependencyError for a .png without matplotlib, and what `summarise`
    and the writing of a file raise.
    """
    suffix = target.suffix.lower()
    if suffix not in (".html", ".htm", ".png"):
        raise UsageError("a report is a page (.html) or a picture of its curves (.png)", path=target)
    body = summarise(folder)
    data = png(body) if suffix == ".png" else html(body).encode()
    write_file(str(target), FileLayout(target.name, [Literal(data)]), WriteOptions(force=force))
    return body


def png(body: RunReport) -> bytes:
    """The panels as one picture. Raises MissingDependencyError without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError(
            "a picture of the curves needs matplotlib", hint="pip install matplotlib, or write a page: -o report.html"
        ) from error
    panels = [p for p in _panels(body) if any(y is not None for s in p.series for y in s.ys)]
    rows = max(1, -(-len(panels) // 3))
    figure = Figure(figsize=(14, 3.4 * rows + 0.6), dpi=120, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    figure.suptitle(f"{name(body)}: {sentence(body)}".replace("$", r"\$"))  # $ would begin a formula
    for panel, axes in zip(panels, figure.subplots(rows, 3, squeeze=False).flat, strict=False):
        _draw(axes, panel, body)
    for axes in figure.axes[len(panels) :]:
        axes.set_visible(False)
    out = io.BytesIO()
    canvas.print_png(out)
    return out.getvalue()


def _draw(axes: Axes, panel: _Panel, body: RunReport) -> None:
    """One panel by matplotlib."""
    for s in panel.series:
        ys = [float("nan") if y is None else y for y in s.ys]
        if not ys:
            continue
        if s.look == "level":
            axes.axhline(ys[-1], linestyle="--", color=f"C{s.colour}", label=s.name)
        else:
            marker = "o" if s.look == "points" else None
            axes.plot(s.xs, ys, marker=marker, linewidth=1.2, color=f"C{s.colour}", label=s.name)
    for mark in _marks(body):
        axes.axvline(mark.x, linestyle=":", color="red" if mark.bad else "grey")
    axes.set_title(panel.title)
    axes.set_xlabel("tokens")
    if panel.zero:
        axes.set_ylim(bottom=0)
    elif is_wide([y for s in panel.series for y in s.ys if y is not None], panel.kind):
        axes.set_yscale("log")
    if panel.kind == "percent":
        axes.yaxis.set_major_formatter(lambda value, place: f"{value:.0%}")
    axes.grid(alpha=0.3)
    axes.legend()
