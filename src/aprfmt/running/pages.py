"""Pages about what was found by running models: the gates of `apr qa`, the speeds of `apr bench`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from aprfmt.html.charts import Bar, Chart, Series, bars, draw
from aprfmt.html.page import Tone, grid, heading, headline, page, paragraph, table, tiles
from aprfmt.running.bench import BenchedModel, BenchReport, Samples
from aprfmt.running.qa import GateResult, QaReport
from aprfmt.text import format_bytes, format_count, format_figure, format_seconds, plural

_TONES = {"pass": "good", "fail": "bad", "skip": "warn"}
_UNITS = {"GiB": 1 << 30, "MiB": 1 << 20}


def qa_html(found: QaReport) -> str:
    """The page of `apr qa`."""
    verdict = ("passed", "good") if found.passed else ("not passed", "bad")
    parts = [headline(f"Quality of {Path(found.model).name}", verdict), paragraph(_sentence(found), "lead")]
    parts.append(paragraph(found.model))
    parts += [paragraph(f"compared with {found.against}")] if found.against is not None else []
    counts = [sum(gate.status == status for gate in found.gates) for status in _TONES]
    parts.append(
        tiles(
            [
                ("gates passed", f"{counts[0]} of {len(found.gates)}", "", ""),
                ("failed", str(counts[1]), "", ""),
                ("skipped", str(counts[2]), "", ""),
                ("parameters", format_count(found.parameters), "", ""),
                ("bits per weight", f"{found.bits_per_weight:.2f}", "", ""),
                ("time", format_seconds(found.seconds), found.engine or "", ""),
            ]
        )
    )
    header = ["gate", "status", "evidence", "value", "limit", "time", "requirement"]
    parts += [heading("Gates"), table(header, map(_gate, found.gates), right="value|limit|time", stack=True)]
    return page(f"{Path(found.model).name}: {verdict[0]}", parts)


def _sentence(found: QaReport) -> str:
    failed = [gate.id for gate in found.gates if gate.status == "fail"]
    skipped = [gate.id for gate in found.gates if gate.status == "skip" and gate.required]
    parts = [f"failed: {', '.join(failed)}"] if failed else []
    parts += [f"skipped, although required: {', '.join(skipped)}"] if skipped and not found.passed else []
    return "; ".join(parts) or "Every gate that applies to this model passed."


def _gate(gate: GateResult) -> list[str | Tone]:
    figures = ("" if value is None else format_figure(value) for value in (gate.value, gate.threshold))
    message = gate.message if gate.hint is None else f"{gate.message}. Fix: {gate.hint}"
    evidence = message, *figures, format_seconds(gate.seconds), gate.shows
    return [gate.id, (gate.status, _TONES[gate.status]), *evidence]


def bench_html(found: BenchReport) -> str:
    """The page of `apr bench`."""
    first, many = found.models[0], len(found.models) > 1
    title = f"Speed of {len(found.models)} models" if many else f"Speed of {Path(first.file).name}"
    verdict = (("gates passed", "good") if found.passed else ("a gate failed", "bad")) if found.gates else None
    what = f"{plural(found.prompt_tokens, 'token')} of prompt, {found.tokens:,} of text"
    what += f"; median of {plural(found.runs, 'run')}"
    parts = [headline(title, verdict), paragraph(f"{what}, {format_seconds(found.seconds)} in total.", "lead")]
    parts += [paragraph(f"llama.cpp by {first.engine}, {plural(first.threads, 'thread')}")]
    parts += [] if many else [_tiles(first)]
    parts += [heading("Medians, with lowest and highest run"), grid(_bars(found.models))]
    parts += [heading("All runs"), grid(map(draw, _runs(found.models)))]
    parts += [heading("Models"), *_table(found.models)]
    if found.gates:
        cells = [
            (
                ("met", "good") if gate.passed else ("missed", "bad"),
                *(gate.gate, f"{gate.value:,.4g}", f"{gate.limit:,.4g}", gate.file),
            )
            for gate in found.gates
        ]
        parts += [
            heading("Gates"),
            table(["gate", "of", "value", "limit", "model"], cells, right="value|limit", stack=True),
        ]
    return page(title, parts)


def _tiles(model: BenchedModel) -> str:
    return tiles(
        [
            ("prompt", f"{model.prompt_tok_s.median:,.1f}", "tokens/s", ""),
            ("text", f"{model.tok_s.median:,.1f}", "tokens/s", ""),
            ("first token", f"{model.ttft_ms.median:,.1f} ms", "", ""),
            ("loaded in", format_seconds(model.load_s), "", ""),
            ("peak memory", format_bytes(model.memory_bytes) if model.memory_bytes else "unknown", "", ""),
        ]
    )


_MEASURED: tuple[tuple[str, str, Callable[[BenchedModel], Samples]], ...] = (
    ("Prompt", "tokens/s, higher is better", lambda m: m.prompt_tok_s),
    ("Text", "tokens/s, higher is better", lambda m: m.tok_s),
    ("Time to the first token", "ms, lower is better", lambda m: m.ttft_ms),
)
"""What was measured in every run: title, unit, where it is."""


def _bars(models: Sequence[BenchedModel]) -> Iterator[str]:
    names = _names(models)
    for title, unit, of in _MEASURED:
        found = [of(model) for model in models]
        words = [f"{s.median:,.1f}" + (f" ({s.ratio:.2f}x)" if len(models) > 1 else "") for s in found]
        rows = [Bar(name, s.median, s.min, s.max, label) for name, s, label in zip(names, found, words, strict=True)]
        yield bars(title, rows, unit)
    memory = [model.memory_bytes for model in models]
    if all(memory):
        unit, size = next((row for row in _UNITS.items() if max(memory) >= row[1]), ("MiB", _UNITS["MiB"]))
        rows = [Bar(name, n / size, n / size, n / size, format_bytes(n)) for name, n in zip(names, memory, strict=True)]
        yield bars("Peak memory", rows, f"{unit}, lower is better")


def _runs(models: Sequence[BenchedModel]) -> Iterator[Chart]:
    names = _names(models)
    for title, unit, of in _MEASURED:
        series = [
            Series(name, range(1, len(of(model).samples) + 1), of(model).samples, "points", i % 4)
            for i, (name, model) in enumerate(zip(names, models, strict=True))
        ]
        yield Chart(title, series, "run", unit.partition(",")[0], x_kind="whole", latest=False, zero=True)


def _names(models: Sequence[BenchedModel]) -> list[str]:
    """The names of the files, with their folders where two have one name."""
    short = [Path(model.file).name for model in models]
    return short if len(set(short)) == len(short) else [model.file for model in models]


def _table(models: Sequence[BenchedModel]) -> Iterator[str]:
    measured = ("prompt, tokens/s", "text, tokens/s", "first token, ms")
    header = ["model", *measured, "loaded in", "weights", "context", "peak"]
    cells = [
        [
            *(model.file, *(f"{of(model).median:,.1f}" for _, _, of in _MEASURED), format_seconds(model.load_s)),
            format_bytes(model.weight_bytes),
            *("–" if not n else format_bytes(n) for n in (model.context_bytes, model.memory_bytes)),
        ]
        for model in models
    ]
    yield table(header, cells, right="|".join(header[1:]), sortable=len(models) > 1, stack=True)
