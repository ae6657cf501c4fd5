"""A page about a training run, from what its folder says: result, curves, checkpoints, configuration, provenance."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NotRequired, TypedDict

from aprfmt.html.charts import Chart, Mark, Series, draw
from aprfmt.html.page import facts, fold, grid, heading, headline, page, paragraph, table, tiles, track
from aprfmt.text import format_bytes, format_clock, format_count, format_number, format_perplexity
from aprfmt.types import Json, JsonObject, Numbers

STATUS = {
    "done": ("done", "good"),
    "interrupted": ("stopped by a signal", "warn"),
    "failed": ("failed", "bad"),
    "running": ("running", "good"),
    "killed": ("killed", "bad"),
}
"""The words for a status, and their tone."""

_GIB = float(1 << 30)
_FEW_TOKENS = 10_000  # scored, below which a result is noisy and the page says so
_LONG = 14  # rows of a table that are shown without folding


class StepPlace(TypedDict):
    """A step of a run, and the tokens up to it."""

    step: float
    at_tokens: float


class RunModel(TypedDict):
    """A model of a run; `made` says how a student was made."""

    name: str | None
    architecture: Json
    parameters: float | None
    made: NotRequired[Json]


class DamagedCheckpoint(StepPlace):
    """A checkpoint that a run, which resumed at this place, could not go on from."""

    checkpoint: float | None
    reason: str


class FailedSave(StepPlace):
    """A checkpoint that could not be written."""

    error: str


class SavedCheckpoint(StepPlace):
    """A checkpoint that was written at `time` (seconds since 1970) in `seconds`."""

    bytes: float | None
    seconds: float | None
    time: float | None
    best: bool


class StepSamples(StepPlace):
    """What the student wrote at an evaluation: `prompt` and `text` of each sample."""

    samples: list[dict[str, str]]


class ChangedField(TypedDict):
    """A field of the configuration that is not at its default."""

    name: str
    value: Json
    default: Json


class RunReport(TypedDict):
    """Everything that a report says; JSON data.

    Attributes:
        status: done, interrupted, failed, running, or killed: it neither ended nor holds the lock on its folder.
        heard_at: seconds since 1970 of the last line.
        loss: training loss since the step that was logged before, as the run prints it.
        tokens_per_s, mfu, utilisation: medians; memory_bytes is the peak.
        evaluations, resumed: `step`, `at_tokens` and, of an evaluation, SCORES and `scored_tokens`.
        before, after, change: the first and last evaluation, and the relative difference, absolute for shares.
        teacher, student: name, architecture, parameters; `made` says how a student was made.
        curves: columns of the logged steps, by name.
        damaged: newer checkpoints that a resumed run could not go on from: `checkpoint`, `reason`, and where it did.
        failed_saves, checkpoints: step and at_tokens; the error, or bytes, seconds, time, best.
        samples: of each evaluation `step`, `at_tokens` and `samples`: prompt and text.
        changed: name, value and default of the fields that are not at their defaults.
        lineage: hashes of what the run is made of.
    """

    folder: str
    command: str
    status: str
    error: str | None
    heard_at: float | None
    teacher: RunModel | None
    student: RunModel
    data: str | None
    device: str | None
    steps: int
    total_steps: float | None
    tokens: float
    seconds: float | None
    loss: float | None
    tokens_per_s: float | None
    mfu: float | None
    utilisation: float | None
    memory_bytes: float | None
    before: Numbers | None
    after: Numbers | None
    change: Numbers
    evaluations: list[Numbers]
    curves: dict[str, list[float | None]]
    resumed: list[StepPlace]
    damaged: list[DamagedCheckpoint]
    failed_saves: list[FailedSave]
    failed_save_count: int
    checkpoints: list[SavedCheckpoint]
    changed: list[ChangedField]
    config: JsonObject
    environment: JsonObject
    versions: JsonObject
    lineage: JsonObject
    samples: list[StepSamples]
    skipped_lines: int


def charts(body: RunReport) -> list[Chart]:
    """What is drawn over tokens; a chart whose series are all empty is nothing."""
    t = body["config"].get("temperature")
    soft = f"train, T = {format_number(t)}" if isinstance(t, (int, float)) else "train, with temperature"
    teacher = _scores(body, "teacher", "teacher_ce", 2)
    level = Series("teacher", teacher.xs, teacher.ys, "level", 2)
    kl = [_curve(body, "train, T = 1", "kl1", 0), _scores(body, "held-out", "kl", 1)]
    kl += [] if t == 1 else [_curve(body, soft, "kl", 3)]
    use = [_curve(body, "MFU", "mfu", 0), _curve(body, "GPU busy", "utilisation", 1, 100)]
    memory = _curve(body, "peak", "memory_bytes", 0, _GIB, look="exact")
    same = [_curve(body, "train", "agreement", 0), _scores(body, "held-out", "agreement", 1)]
    ce = [_curve(body, "train", "ce", 0), _scores(body, "held-out", "ce", 1), level]
    loss = [_curve(body, "train", "loss", 0)] if body["teacher"] is not None else []  # else it is the cross entropy
    reach = (0.0, float(max(body["tokens"], *(n or 0 for n in body["curves"].get("tokens", [])), 1)))
    marks = _marks(body)

    def over_tokens(title: str, series: list[Series], unit: str, kind: str = "number", *, zero: bool = False) -> Chart:
        return Chart(title, series, "tokens", unit, kind, "count", zero=zero, x_range=reach, marks=marks)

    return [
        over_tokens("Loss", loss, "nats per token"),
        over_tokens("Cross entropy", ce, "nats per token"),
        over_tokens("KL to the teacher", kl, "nats per token"),
        over_tokens("Top-1 agreement with the teacher", same, "fraction of tokens", "percent"),
        over_tokens("Learning rate", [_curve(body, "lr", "lr", 0, look="exact")], "learning rate", zero=True),
        over_tokens("Gradient norm", [_curve(body, "norm", "grad_norm", 0)], "norm before clipping"),
        over_tokens("Speed", [_curve(body, "tokens/s", "tokens_per_s", 0)], "tokens/s", "count", zero=True),
        over_tokens("GPU utilization", use, "fraction of time or of peak", "percent", zero=True),
        over_tokens("Peak memory", [memory], "GiB", zero=True),
    ]


def _curve(body: RunReport, name: str, key: str, colour: int, unit: float = 1.0, look: str = "line") -> Series:
    ys = body["curves"].get(key, [])
    xs = [x or 0 for x in body["curves"].get("tokens", [])] if ys else []
    return Series(name, xs, [None if y is None else y / unit for y in ys], look, colour)


def _scores(body: RunReport, name: str, key: str, colour: int) -> Series:
    rows = [e for e in body["evaluations"] if e[key] is not None]
    return Series(name, [e["at_tokens"] or 0 for e in rows], [e[key] for e in rows], "points", colour)


def _marks(body: RunReport) -> list[Mark]:
    resumed = [Mark(m["at_tokens"], f"resumed at step {m['step']:,.0f}") for m in body["resumed"]]
    failed = [
        Mark(m["at_tokens"], f"no checkpoint at step {m['step']:,.0f}: {m['error']}", bad=True)
        for m in body["failed_saves"]
    ]
    damaged = [Mark(m["at_tokens"], damage_text(m), bad=True) for m in body["damaged"]]
    return resumed + damaged + failed


def damage_text(row: DamagedCheckpoint) -> str:
    """A row of RunReport.damaged in words."""
    return (
        f"checkpoint {row['checkpoint'] or 0:,.0f} is damaged ({row['reason']}): resumed from {row['step'] or 0:,.0f}"
    )


def html(body: RunReport) -> str:
    """The page of a run."""
    return page(*run_parts(body))


def run_parts(body: RunReport) -> tuple[str, list[str]]:
    """The title and the parts of the page of a run."""
    figures = [draw(chart) for chart in charts(body)]
    parts = [*_head(body), _tiles(body), heading("Metrics by tokens"), _notes(body), grid(figures)]
    point = " Hover over a curve, or use the arrow keys, to read values." if any(figures) else ""
    footer = f"Report of {body['folder']}{_heard(body)}.{point}"
    parts += [*_samples(body), *_tables(body), *_origin(body), f"<footer>{paragraph(footer)}</footer>"]
    return f"{title(body)}: {sentence(body)}", parts


def title(body: RunReport) -> str:
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
            n = (body["after"] or {}).get("scored_tokens")
            few = f", on only {n:,.0f} tokens" if n is not None and n < _FEW_TOKENS else ""
            if a == b:
                return f"held-out {words} stayed at {a:.4g}{few}"
            verb = "fell" if b < a else "rose"
            return f"held-out {words} {verb} from {a:.4g} to {b:.4g} ({_with_sign(moved)}){few}"
    return "no result yet: fewer than two evaluations"


def _with_sign(share: float, unit: str = "%") -> str:
    return f"{100 * share:+.1f} {unit}".replace("-", "\N{MINUS SIGN}")


def _head(body: RunReport) -> Iterator[str]:
    yield headline(title(body), STATUS[body["status"]])
    result = sentence(body)
    yield paragraph(result[0].upper() + result[1:], "lead")
    words_of = [body["command"], f"on {body['data']}" if body["data"] else "", body["device"] or ""]
    for who, model in (("teacher", body["teacher"]), ("student", body["student"])):
        if model and model["architecture"]:
            size = f" {format_count(round(model['parameters']))} parameters" if model["parameters"] else ""
            words_of.append(f"{who if body['teacher'] else 'model'} {model['architecture']}{size}")
    yield paragraph(" · ".join(word for word in words_of if word))
    yield paragraph(body["error"] or "", "bad")
    total = body["total_steps"]
    if body["status"] != "done" and total:
        share = min(1.0, body["steps"] / total)
        yield paragraph(f"Step {body['steps']:,} of {total:,.0f} ({share:.0%}){_heard(body)}", "")
        yield track(share)


def _heard(body: RunReport) -> str:
    return f", last update on {_date(body['heard_at'])}" if body["heard_at"] is not None else ""


def _date(seconds: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))
    except (OverflowError, ValueError, OSError):
        return "an unknown date"


def _tiles(body: RunReport) -> str:
    rows = [*_results(body)]
    of = f"of {body['total_steps']:,.0f}" if body["total_steps"] else ""
    rows.append(("steps", f"{body['steps']:,}", of, ""))
    rows.append(("tokens", format_count(round(body["tokens"])), "", ""))
    if body["seconds"] is not None:
        rows.append(("wall time", format_clock(body["seconds"]), "h:mm:ss", ""))
    if body["tokens_per_s"] is not None:
        rows.append(("tokens/s", f"{body['tokens_per_s']:,.0f}", "median", ""))
    if body["mfu"] is not None:
        rows.append(("MFU", f"{body['mfu']:.1%}", "median", ""))
    if body["memory_bytes"] is not None:
        rows.append(("peak memory", format_bytes(body["memory_bytes"]), "", ""))
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


def _samples(body: RunReport) -> Iterator[str]:
    """What the student wrote at the evaluations, the latest first."""
    if not body["samples"]:
        return
    yield heading("Samples of the student's text")

    def rows(found: StepSamples) -> str:
        cells = [[sample["prompt"], sample["text"]] for sample in found["samples"]]
        return table(
            ["prompt (held-out)", "greedy continuation"],
            cells,
            code="prompt (held-out)|greedy continuation",
            stack=True,
        )

    *earlier, last = body["samples"]
    yield paragraph(f"Step {last['step']:,.0f}") + rows(last)
    yield fold(
        f"{len(earlier)} earlier",
        "".join(paragraph(f"Step {each['step']:,.0f}") + rows(each) for each in earlier[::-1]),
    )


def _notes(body: RunReport) -> str:
    words = []
    if body["resumed"]:
        words.append("Grey vertical lines: run resumed.")
    if body["failed_saves"]:
        words.append("Red vertical lines: checkpoint not saved.")
    words += [damage_text(m)[0].upper() + damage_text(m)[1:] + "." for m in body["damaged"]]
    if body["skipped_lines"]:
        words.append(f"Damaged lines skipped: {body['skipped_lines']}.")
    if not body["curves"]:
        words.append("No steps logged yet.")
    return paragraph(" ".join(words))


def _tables(body: RunReport) -> Iterator[str]:
    columns: list[tuple[str, str, Callable[[float], str]]] = [
        ("step", "step", "{:,.0f}".format), ("tokens", "at_tokens", lambda n: format_count(round(n))),
        ("KL", "kl", "{:.4g}".format), ("CE", "ce", "{:.4f}".format), ("perplexity", "perplexity", format_perplexity),
        ("agreement", "agreement", "{:.1%}".format), ("top-1 accuracy", "accuracy", "{:.1%}".format),
        ("teacher's CE", "teacher_ce", "{:.4f}".format),
    ]  # fmt: skip
    yield from _numbers_table("Held-out evaluations", columns, body["evaluations"])
    saves: list[tuple[float, Mapping[str, object]]] = [
        *((row["step"], {**row, "note": "best so far" if row["best"] else ""}) for row in body["checkpoints"]),
        *((row["step"], {**row, "note": f"not saved: {row['error']}"}) for row in body["failed_saves"]),
    ]
    columns = [
        ("step", "step", "{:,.0f}".format),
        ("tokens", "at_tokens", lambda n: format_count(round(n))),
        ("written", "time", _date),
        ("size", "bytes", format_bytes),
        ("seconds", "seconds", "{:.3g}".format),
        ("", "note", str),
    ]
    rows = [row for _, row in sorted(saves, key=lambda save: save[0])]
    yield from _numbers_table("Checkpoints saved, including deleted ones", columns, rows)


def _numbers_table(
    title: str, columns: Sequence[tuple[str, str, Callable[[Any], str]]], rows: Sequence[Mapping[str, object]]
) -> Iterator[str]:
    """A table without the columns that no row has a value in."""
    used = [column for column in columns if any(row.get(column[1]) not in (None, "") for row in rows)]
    if not rows or not used:
        return
    cells = [[put(row[key]) if row.get(key) is not None else "–" for _, key, put in used] for row in rows]
    header, right = [name for name, _, _ in used], "|".join(name for name, key, _ in used if key != "note")
    yield heading(title)
    if len(cells) <= _LONG:
        yield table(header, cells, right=right, stack=True)
        return
    yield table(header, [*cells[:2], *cells[-8:]], right=right, stack=True)
    yield fold(f"All {len(cells)}", table(header, cells, right=right, stack=True))


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
