"""The report of a run: right numbers from whole, running, killed and failed runs; a page that stands alone."""

from __future__ import annotations

import io
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import train_runs
from demo_model import build as build_model
from pages import Page

from aprfmt.cli.main import run as apr
from aprfmt.errors import NotFoundError, RunError, UnknownFormatError
from aprfmt.inspection.run_page import html, sentence
from aprfmt.inspection.run_report import FILE, METADATA, PAGE, summarise
from aprtrain.checkpoints import checkpoint
from aprtrain.checkpoints.state import save_state
from aprtrain.loop import Trainer
from aprtrain.report.metrics import Recorder
from aprtrain.run import run

Distil = Callable[..., dict[str, Any]]

TEACHER_PANELS = {"KL to the teacher", "Top-1 agreement with the teacher", "Loss"}


def page_of(path: Path) -> Page:
    return Page(path.read_text())


def step(n: int, **more: Any) -> dict[str, Any]:
    values = {"loss": 2.0, "ce": 3.0, "kl": 0.5, "kl1": 1.0, "agreement": 0.5, "grad_norm": 1.0, "lr": 1e-3}
    rates = {"tokens_per_s": 100.0, "mfu": None, "utilisation": None, "memory_bytes": None}
    return {"event": "step", "step": n, "tokens": 100 * n, "time": 50.0 + n, **values, **rates, **more}


def scores(n: int, **values: Any) -> dict[str, Any]:
    return {"event": "evaluation", "step": n, "ce": 4.0, "kl": 2.0, "agreement": 0.25, "tokens": 70_000, **values}


def made(folder: Path, events: list[dict[str, Any]], metadata: dict[str, Any] | None = None) -> Path:
    """A run's folder with just these lines."""
    folder.mkdir()
    (folder / FILE).write_text("".join(json.dumps(event) + "\n" for event in events))
    if metadata is not None:
        (folder / METADATA).write_text(json.dumps(metadata))
    return folder


@pytest.fixture
def resumed_run(tmp_path: Path) -> Path:
    """Ten steps, a save that failed at 4, killed after 8, resumed from 6 an hour later, done."""
    config = {"teacher": "/big.gguf", "student": "/s.apr", "lr": 0.5, "steps": 10, "total_steps": 10}
    usual = {"teacher": None, "student": None, "lr": 5e-5, "steps": None, "total_steps": 10, "warmup_steps": 1}
    start = {"event": "start", "command": "distill", "config": {**config, "warmup_steps": 1}, "digest": "d" * 64}
    start["defaults"] = usual
    events = [
        {"event": "begin", "time": 50.0, "step": 0, "resumed": False, "environment": {"APR_X": "old"}},
        {**start, "time": 50.0},
        scores(0),
        *(step(n) for n in range(1, 7)),
        {"event": "failed_save", "step": 4, "error": "no space left", "time": 55.0},
        {"event": "checkpoint", "step": 6, "bytes": 1 << 30, "seconds": 2.5, "best": True, "time": 60.0},
        {"event": "error", "step": 6, "message": "of the process before", "time": 60.0},
        {"event": "begin", "time": 4000.0, "step": 6, "resumed": True, "environment": {"APR_X": "new"}},
        {**start, "time": 4000.0},
        *(step(n, time=4000.0 + n) for n in range(7, 11)),
        scores(10, ce=3.0, kl=0.5, agreement=0.75),
        {"event": "end", "step": 10, "finished": True, "time": 4020.0},
    ]
    return made(tmp_path / "resumed", events, {"status": "done", "failed_saves": 1, "checkpoints": [10]})


def test_the_numbers_of_a_resumed_run(resumed_run: Path) -> None:
    body = summarise(resumed_run)
    assert body["change"]["kl"] == -0.75
    assert body["change"]["ce"] == -0.25
    assert body["change"]["agreement"] == 0.5, "shares differ by points, not by a share of a share"
    assert body["seconds"] == 10 + 20, "the hour between two processes is not work"
    assert body["resumed"] == [{"step": 6, "at_tokens": 600}]
    assert body["failed_saves"] == [{"step": 4, "at_tokens": 400, "error": "no space left"}]
    assert [(row["step"], row["bytes"]) for row in body["checkpoints"]] == [(6, 1 << 30), (10, None)]
    assert body["environment"] == {"APR_X": "new"}
    assert body["evaluations"][1]["at_tokens"] == 1000, "the place in the run, not the tokens that were scored"
    assert body["curves"]["tokens"] == [100 * n for n in range(1, 11)]
    assert "mfu" not in body["curves"], "what was not measured has no curve"
    assert (body["status"], body["steps"], body["tokens"]) == ("done", 10, 1000)
    assert body["error"] is None, "the process that failed was followed by another"


def test_the_page_shows_what_happened_and_when(resumed_run: Path) -> None:
    page = Page(html(summarise(resumed_run)))
    assert "Held-out KL to the teacher fell from 2 to 0.5 (\N{MINUS SIGN}75.0 %)" in page.text
    assert set(page.titles) > TEACHER_PANELS
    for title in ("GPU utilization", "Peak memory"):
        assert title not in page.titles, "nothing was measured"
    assert page.text.count("resumed at step 6") == len(page.titles)
    assert "no checkpoint at step 4: no space left" in page.text
    kl = page.charts["KL to the teacher"]
    held_out = next(s for s in kl["s"] if s["n"] == "held-out")
    assert (held_out["x"], held_out["y"]) == ([0, 1000], [2.0, 0.5])
    marks = [line for line in page.tags["line"] if (line.get("class") or "").startswith("mark")]
    place = kl["l"] + 0.6 * (kl["r"] - kl["l"])
    assert {line["x1"] for line in marks if line["class"] == "mark"} == {f"{place:.1f}"}
    assert any(line["class"] == "mark bad" for line in marks)


def test_what_differs_from_the_defaults_comes_first(resumed_run: Path) -> None:
    body = summarise(resumed_run)
    assert [row["name"] for row in body["changed"]] == ["teacher", "student", "lr", "steps"]
    assert body["changed"][2] == {"name": "lr", "value": 0.5, "default": 5e-5}
    words = Page(html(body)).words
    assert words.index("lr") < words.index("warmup_steps")


def test_a_run_leaves_a_page_of_itself(distil: Distil, tmp_path: Path) -> None:
    distil(steps=6, save_every=2, total_steps=12)
    distil(steps=12, save_every=2, total_steps=12, resume=True)
    body = summarise(tmp_path / "run")
    page = page_of(tmp_path / "run" / PAGE)
    assert set(page.titles) > TEACHER_PANELS
    assert body["resumed"][0]["step"] == 6
    assert [row["step"] for row in body["checkpoints"]] == [2, 4, 6, 8, 10, 12]
    assert all(row["bytes"] and row["seconds"] for row in body["checkpoints"])
    assert body["status"] == "done"
    assert body["error"] is None
    teacher, student = body["teacher"], body["student"]
    assert teacher is not None
    assert (teacher["parameters"] or 0) > (student["parameters"] or 0) > 0
    assert body["versions"].keys() == {"aprfmt", "torch", "python"}
    assert len(str(body["lineage"]["teacher"])) == 64
    assert body["curves"]["step"] == list(range(1, 13))


def test_a_run_without_a_teacher_has_no_panels_of_one(tmp_path: Path, corpus_file: Path) -> None:
    build_model(tmp_path / "m.gguf")
    config = train_runs.options("pretrain", corpus_file, tmp_path / "run", init=str(tmp_path / "m.gguf"), steps=3)
    run("pretrain", config, stream=None)
    page = page_of(tmp_path / "run" / PAGE)
    assert not TEACHER_PANELS & set(page.titles)
    assert "Cross entropy" in page.titles
    assert "held-out cross entropy" in page.text.lower()
    assert "model llama" in page.text
    assert "student llama" not in page.text
    body = summarise(tmp_path / "run")
    assert "kd_weight" not in body["config"]


def test_a_failed_save_is_in_the_report(distil: Distil, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, fail_at = save_state, {"step": 2}

    def save(state: Any, facts: Any, path: Path) -> Any:
        if facts["progress"]["step"] == fail_at["step"]:
            raise OSError(28, "No space left on device")
        return write(state, facts, path)

    monkeypatch.setattr(checkpoint, "save_state", save)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    distil(steps=4, save_every=2)
    body = summarise(tmp_path / "run")
    assert [m["step"] for m in body["failed_saves"]] == [2]
    assert "No space left" in body["failed_saves"][0]["error"]
    assert "No space left" in page_of(tmp_path / "run" / PAGE).text


def test_a_failed_run_has_a_page_with_the_error(
    distil: Distil, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Trainer) -> None:
        raise RunError("the moon fell down")

    monkeypatch.setattr(Trainer, "run", fail)
    with pytest.raises(RunError):
        distil()
    text = page_of(tmp_path / "run" / PAGE).text
    assert "failed" in text
    assert "the moon fell down" in text


def test_a_page_that_cannot_be_written_ends_no_run(distil: Distil, tmp_path: Path) -> None:
    (tmp_path / "run" / PAGE).mkdir(parents=True)
    said = io.StringIO()
    assert distil(stream=said)["model"]
    assert f"{PAGE} could not be written" in said.getvalue()


def test_a_killed_run_has_a_report(tmp_path: Path) -> None:
    folder = made(tmp_path / "r", [{"event": "start", "config": {"teacher": "t", "steps": 9}}, scores(0), step(1)])
    with open(folder / FILE, "ab") as file:
        file.write(b'[1, 2]\n\x00\x00\xff\n"text"\n{"event": "step", "step": 2, "tokens": "x", "loss": [1]}\n')
        file.write(b"[" * 100_000 + b"\n")
        file.write(b'{"event": "step", "step": 3, "tokens": 1e999, "loss": 1}\n{"event": "st')
    body = summarise(folder)
    assert (body["status"], body["steps"], body["curves"]["step"]) == ("killed", 1, [1])
    assert body["skipped_lines"] == 5
    page = Page(html(body))
    assert "killed" in page.text
    assert "Damaged lines skipped: 5." in page.text
    assert "Step 1 of 9 (11%)" in page.text


@pytest.mark.parametrize(
    ("metrics", "metadata"),
    [
        ("", None),
        ("", "{"),
        (None, "[]"),
        (None, '{"status": 3, "evaluations": 5, "checkpoints": {"a": 1}, "teacher": [], "steps": "x"}'),
        ('{"event": "start", "config": 7}\n{"event": "begin", "time": null, "environment": 3}\n', None),
        ('{"event": "evaluation", "step": 1e400, "ce": 1}\n{"event": ["step"], "step": 1}\n', None),
        ('{"event": "step", "step": 1, "tokens": 5, "time": 1e300, "lr": null}\n', None),
        ('{"event": "step", "step": -3, "tokens": -5, "loss": 0}\n', None),
        (
            '{"event": "step", "step": 1, "tokens": 1e300, "ce": -1e308}\n'
            '{"event": "step", "step": 2, "tokens": 5, "ce": 1e308}\n',
            None,
        ),
        ('{"event": "start", "device": 5, "command": 7, "config": {"teacher": 7, "student_init": [1]}}\n', None),
    ],
)
def test_odd_files_give_a_page_all_the_same(tmp_path: Path, metrics: str | None, metadata: str | None) -> None:
    if metrics is not None:
        (tmp_path / FILE).write_text(metrics)
    if metadata is not None:
        (tmp_path / METADATA).write_text(metadata)
    page = Page(html(summarise(tmp_path)))
    assert "no result yet" in page.text.lower()
    assert ("Hover over a curve" in page.text) == bool(page.titles)


@pytest.mark.parametrize(
    ("last", "words"),
    [
        ({"kl": 2.0}, "held-out KL to the teacher stayed at 2"),
        ({"kl": 2.5, "tokens": 432}, "held-out KL to the teacher rose from 2 to 2.5 (+25.0 %), on only 432 tokens"),
        ({"kl": 3.0}, "held-out KL to the teacher rose from 2 to 3 (+50.0 %)"),
        ({"kl": None, "ce": None}, "no result yet: fewer than two evaluations"),
    ],
)
def test_the_result_in_words(tmp_path: Path, last: dict[str, Any], words: str) -> None:
    assert sentence(summarise(made(tmp_path / "r", [scores(0), scores(4, **last)]))) == words


def test_notes_on_checkpoints_are_words_not_code(resumed_run: Path) -> None:
    """A cell of code breaks anywhere: on a phone there was a line for every letter."""
    page = html(summarise(resumed_run))
    assert 'data-title="">best so far</td>' in page
    assert 'data-title="">not saved: no space left</td>' in page


def test_what_was_seen_after_the_last_logged_step_counts(tmp_path: Path) -> None:
    """Killed between two lines: the evaluation is further than they are, and inside the figure."""
    folder = made(tmp_path / "r", [scores(0), step(1), step(2), scores(4)])
    body = summarise(folder)
    assert (body["steps"], body["tokens"]) == (4, 400)
    assert Page(html(body)).charts["Cross entropy"]["hi"] == 400


def test_the_loss_is_the_mean_since_the_last_printed_line(tmp_path: Path) -> None:
    start = {"event": "start", "config": {"log_every": 2}}
    events = [step(n, loss=float(n), labels=1 + 2 * (n == 4)) for n in range(1, 5)]
    assert summarise(made(tmp_path / "at", [start, *events]))["loss"] == (3 + 3 * 4) / 4
    assert summarise(made(tmp_path / "behind", [start, *events[:3]]))["loss"] == 3
    assert summarise(made(tmp_path / "first", [start, *events[:1]]))["loss"] == 1
    assert summarise(made(tmp_path / "none", [start]))["loss"] is None


def test_the_first_steps_are_no_measure_of_speed(tmp_path: Path) -> None:
    few = [step(1, tokens_per_s=10.0), step(50)]
    assert summarise(made(tmp_path / "few", few))["tokens_per_s"] == 100
    more = [step(1, tokens_per_s=10.0), step(2, tokens_per_s=10.0), step(3)]
    assert summarise(made(tmp_path / "more", more))["tokens_per_s"] == 100


def test_text_of_a_run_is_only_text(tmp_path: Path) -> None:
    evil = '</script><script>alert(1)</script><img src="http://x">\x1b[31m'
    config = {"teacher": evil, "student": evil, "data": evil, "steps": 3}
    start = {"event": "start", "command": evil, "config": config, "device": evil, "digest": evil}
    lost = {"event": "failed_save", "step": 1, "error": evil}
    page = Page(html(summarise(made(tmp_path / "r", [start, step(1), lost]))))
    assert len(page.tags["script"]) == 1
    assert "img" not in page.tags
    assert "alert(1)" in page.text
    assert "\x1b" not in page.text


def test_what_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(NotFoundError):
        summarise(tmp_path / "none")
    with pytest.raises(UnknownFormatError):
        summarise(tmp_path)
    for path in (tmp_path / "none", tmp_path):
        assert apr(["report", str(path), "-o", str(tmp_path / "page.html")]) == 3
    assert not (tmp_path / "page.html").exists()


def test_the_command_writes_pages_and_gives_the_numbers(
    resumed_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "page.html"
    assert apr(["report", str(resumed_run), "-o", str(target)]) == 0
    assert "held-out KL to the teacher fell" in capsys.readouterr().out
    assert "Learning rate" in page_of(target).titles
    assert apr(["report", str(resumed_run), "-o", str(target)]) == 5, "nothing is overwritten unasked"
    assert apr(["report", str(resumed_run), "-o", str(target), "--force", "--quiet"]) == 0
    assert apr(["report", str(resumed_run), "-o", str(tmp_path / "page.pdf")]) == 2
    capsys.readouterr()
    assert apr(["report", str(resumed_run), "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["schema"] == "apr.report/1"
    assert body["curves"]["kl1"] == [1.0] * 10
    assert body["output"] is None


def test_a_figure_needs_matplotlib(
    resumed_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("matplotlib", "matplotlib.figure", "matplotlib.backends.backend_agg"):
        monkeypatch.setitem(sys.modules, name, None)
    assert apr(["report", str(resumed_run), "-o", str(tmp_path / "c.png")]) == 6
    assert "matplotlib" in capsys.readouterr().err
    assert not (tmp_path / "c.png").exists()


def test_a_figure_has_every_panel(resumed_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a stand-in for matplotlib, which need not be installed."""
    axes = np.empty((3, 3), object)
    for i in range(9):
        axes.flat[i] = MagicMock()
    figure, agg = MagicMock(), MagicMock()
    figure.Figure.return_value.subplots.return_value = axes
    figure.Figure.return_value.axes = list(axes.flat)
    agg.FigureCanvasAgg.return_value.print_png = lambda file: file.write(b"drawn")
    monkeypatch.setitem(sys.modules, "matplotlib", MagicMock())
    monkeypatch.setitem(sys.modules, "matplotlib.figure", figure)
    monkeypatch.setitem(sys.modules, "matplotlib.backends", MagicMock())
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", agg)
    assert apr(["report", str(resumed_run), "-o", str(tmp_path / "c.png")]) == 0
    assert (tmp_path / "c.png").read_bytes() == b"drawn"
    titles = [call.args[0] for ax in axes.flat for call in ax.set_title.call_args_list]
    assert titles == Page(html(summarise(resumed_run))).titles
    assert all(ax.axvline.call_count == 2 for ax in axes.flat[: len(titles)])
    assert not axes.flat[len(titles)].axvline.called


def test_a_figure_is_a_png_of_all_panels(resumed_run: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert apr(["report", str(resumed_run), "-o", str(tmp_path / "c.png")]) == 0
    assert (tmp_path / "c.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_damaged_lines_keep_no_run_from_going_on(tmp_path: Path) -> None:
    folder = made(tmp_path / "r", [step(1), step(2), step(3)])
    with open(folder / FILE, "ab") as file:
        file.write(b'\xff\x00\n{"step": 1e999}\n' + b"[" * 100_000 + b"\n[1]\n")
    Recorder(folder, None).begin(2)
    assert summarise(folder)["curves"]["step"] == [1, 2]
    assert summarise(folder)["skipped_lines"] == 0


def test_the_environment_that_counts_is_recorded(
    distil: Distil, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("HOME_OF_SECRETS", "x")
    distil(steps=1)
    found = summarise(tmp_path / "run")["environment"]
    assert found["CUDA_VISIBLE_DEVICES"] == ""
    assert "HOME_OF_SECRETS" not in found
    assert "PATH" in os.environ.keys() - found.keys()
