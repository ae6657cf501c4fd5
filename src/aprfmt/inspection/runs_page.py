"""A page that compares training runs: one curve a run in each chart, their results, and the options that differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from aprfmt.errors import UsageError
from aprfmt.html.charts import Chart, Series, draw
from aprfmt.html.page import grid, heading, headline, paragraph, table
from aprfmt.inspection.run_page import STATUS, RunReport, run_parts
from aprfmt.text import format_clock, format_count, format_number, format_setting, plural
from aprfmt.types import Json

MAX_RUNS = 8
"""Runs on one page: so many colours can be told apart."""


@dataclass(frozen=True, slots=True)
class _Panel:
    """A chart of one metric: a logged curve, or with `is_score` a held-out score."""

    title: str
    key: str
    unit: str
    kind: str = "number"
    is_score: bool = False
    zero: bool = False


_PANELS = (
    _Panel("Held-out KL to the teacher", "kl", "nats per token", is_score=True),
    _Panel("Held-out cross entropy", "ce", "nats per token", is_score=True),
    _Panel("Held-out agreement with the teacher", "agreement", "fraction of tokens", "percent", is_score=True),
    _Panel("Loss", "loss", "nats per token"),
    _Panel("Cross entropy", "ce", "nats per token"),
    _Panel("KL to the teacher, T = 1", "kl1", "nats per token"),
    _Panel("Gradient norm", "grad_norm", "norm before clipping"),
    _Panel("Learning rate", "lr", "learning rate", zero=True),
    _Panel("Speed", "tokens_per_s", "tokens/s", "count", zero=True),
)


def run_names(folders: Sequence[str]) -> list[str]:
    """The shortest ends of paths that are unique: `a/run` and `b/run`, but `x` and `y`."""
    parts = [PurePath(folder).parts or (folder,) for folder in folders]
    for n in range(1, max(map(len, parts)) + 1):
        names = ["/".join(path[-n:]) for path in parts]
        if len(set(names)) == len(names):
            return names
    return list(folders)


def overlay_charts(bodies: Sequence[RunReport]) -> list[Chart]:
    """Each metric over tokens, with a curve for each run that has it."""
    names = run_names([body["folder"] for body in bodies])
    reach = (0.0, float(max(1, *(body["tokens"] for body in bodies))))
    return [
        Chart(
            panel.title,
            [_series(panel, body, name, colour) for colour, (name, body) in enumerate(zip(names, bodies, strict=True))],
            "tokens",
            panel.unit,
            panel.kind,
            "count",
            zero=panel.zero,
            x_range=reach,
        )
        for panel in _PANELS
    ]


def _series(panel: _Panel, body: RunReport, name: str, colour: int) -> Series:
    if panel.is_score:
        rows = [e for e in body["evaluations"] if e[panel.key] is not None]
        return Series(name, [e["at_tokens"] or 0 for e in rows], [e[panel.key] for e in rows], "points", colour)
    ys = body["curves"].get(panel.key, [])
    xs = [x or 0 for x in body["curves"].get("tokens", [])] if ys else []
    return Series(name, xs, ys, "exact" if panel.key == "lr" else "line", colour)


def runs_parts(bodies: Sequence[RunReport]) -> tuple[str, list[str]]:
    """Title and parts of the page of one run, or of several over each other. Raises UsageError above MAX_RUNS."""
    if len(bodies) == 1:
        return run_parts(bodies[0])
    if len(bodies) > MAX_RUNS:
        raise UsageError(f"{len(bodies)} runs on one page; the limit is {MAX_RUNS}", hint="pass fewer runs")
    names = run_names([body["folder"] for body in bodies])
    figures = [draw(chart) for chart in overlay_charts(bodies)]
    parts = [
        headline(f"{plural(len(bodies), 'run')}: {', '.join(names)}"), heading("Results"), _results(names, bodies),
        heading("Metrics by tokens"), grid(figures), *_differences(names, bodies),
    ]  # fmt: skip
    return ", ".join(names), parts


def _results(names: Sequence[str], bodies: Sequence[RunReport]) -> str:
    columns: list[tuple[str, Callable[[RunReport], str]]] = [
        ("state", lambda body: STATUS[body["status"]][0]),
        ("steps", lambda body: f"{body['steps']:,}"),
        ("tokens", lambda body: format_count(round(body["tokens"]))),
        ("KL", lambda body: _score(body, "kl")),
        ("CE", lambda body: _score(body, "ce")),
        ("agreement", lambda body: _score(body, "agreement", "{:.1%}")),
        ("tok/s", lambda body: "–" if (rate := body["tokens_per_s"]) is None else format_number(rate)),
        ("time", lambda body: "–" if (seconds := body["seconds"]) is None else format_clock(seconds)),
    ]
    rows = [[name, *(put(body) for _, put in columns)] for name, body in zip(names, bodies, strict=True)]
    header = ["run", *(title for title, _ in columns)]
    return table(header, rows, right="|".join(header[2:]), sortable=True, stack=True)


def _score(body: RunReport, key: str, form: str = "{:.4f}") -> str:
    value = (body["after"] or body["before"] or {}).get(key)
    return "–" if value is None else form.format(value)


def _differences(names: Sequence[str], bodies: Sequence[RunReport]) -> Iterator[str]:
    """The options that are not the same in all runs."""
    options = dict.fromkeys(name for body in bodies for name in body["config"] if name != "output")
    rows: list[list[str]] = []
    for option in options:
        values: list[Json] = [body["config"].get(option) for body in bodies]
        if any(value != values[0] for value in values):
            rows.append([option, *map(format_setting, values)])
    yield heading("Options that differ")
    if rows:
        yield table(["option", *names], rows, code="|".join(names), stack=True)
    else:
        yield paragraph("none")
