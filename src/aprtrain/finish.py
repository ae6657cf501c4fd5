"""A run from its first evaluation to its summary: the training loop, the last checkpoint, the records."""

from __future__ import annotations

import math
import os
import statistics
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import NotRequired, TypedDict

from aprfmt.api import qa
from aprfmt.errors import AprError, StorageError
from aprfmt.inspection.run_report import PAGE, write_report
from aprfmt.text import format_clock
from aprfmt.types import JsonObject, Numbers, construct
from aprtrain import budget, guards
from aprtrain.checkpoints.adapter import save_adapter
from aprtrain.loop import Trainer
from aprtrain.memory import total
from aprtrain.report.metrics import Recorder
from aprtrain.resume import Saved


class QaGate(TypedDict):
    """What a run keeps of a gate of `apr qa`: id, status, and whether the model cannot pass without it."""

    id: str
    status: str
    required: bool


class QaOutcome(TypedDict):
    """The result of --qa.

    Attributes:
        passed: whether the model passed.
        gates: the gates that ran.
        error: why `apr qa` itself failed, if it did.
    """

    passed: bool
    gates: list[QaGate]
    error: NotRequired[str]


class Summary(TypedDict):
    """Result of a run; JSON data.

    Attributes:
        output, model: the run's folder (None with --smoke) and the final model (None if the run is not finished).
        steps, tokens: totals since step 0, resumed runs included.
        seconds, tokens_per_s: wall time of this process; median throughput of its steps.
        first, last: scores of the first and the last evaluation.
        loss: loss of the last step.
        train: mean training metrics, as in the last log line.
        checkpoints, failed_saves: saved steps; number of failed saves.
        config, digest: the resolved configuration and its hash.
        projected_steps, projected_seconds: length and estimated time of the whole run, with --smoke.
        interrupted: number of the signal that stopped the run.
        early: why the run stopped early.
        qa: report of `apr qa`, with --qa.
        damaged: newer checkpoints that were skipped on resume: `step` and `reason`.
    """

    command: str
    output: str | None
    model: str | None
    steps: int
    tokens: int
    seconds: float
    tokens_per_s: float | None
    first: Numbers | None
    last: Numbers | None
    loss: float | None
    train: Numbers | None
    checkpoints: list[int]
    failed_saves: int
    config: JsonObject
    digest: str
    projected_steps: NotRequired[int]
    projected_seconds: NotRequired[float]
    interrupted: NotRequired[int]
    early: NotRequired[str]
    qa: NotRequired[QaOutcome]
    damaged: NotRequired[list[JsonObject]]


def run_loop(trainer: Trainer, command: str, saved: Saved) -> Summary:
    """Trains from `saved` to the end or an interruption; an error is recorded in the folder and raised."""
    began = time.monotonic()
    config, world, progress, recorder = trainer.config, trainer.world, trainer.progress, trainer.recorder
    if not progress.evaluations:  # also if a signal stopped the first evaluation of a run that is resumed
        recorder.log("evaluating before the first step")
        scores: Numbers = {}
        with suppress(guards.EvaluationStopped):
            scores = trainer.evaluate() if config.smoke is None else trainer.evaluate_student(trainer.wants_stop)
        if trainer.vocabulary is not None and scores:
            allow_weaker = config.allow_weaker_teacher
            guards.check_scores(scores, trainer.vocabulary.n_real, allow_weaker=allow_weaker, is_qat=bool(config.qat))
        if config.smoke is None and not trainer.evaluation_stopped:
            _try_to_save(trainer)
        world.barrier()
    peak_before = budget.peak_bytes(world.device)
    budget.reset_peak(world.device)
    _describe(trainer, "running")
    try:
        trainer.run()
        if trainer.early is not None:
            recorder.log(f"early stop after step {progress.step}: {trainer.early}")
        model = _finish(trainer, saved)
        is_done = trainer.is_done
    except Exception as error:
        if trainer.saver is not None:
            trainer.saver.wait()
        message = error.message if isinstance(error, AprError) else f"{type(error).__name__}: {error}"
        recorder.record("error", {"step": progress.step, "message": message})
        _describe(trainer, "failed")
        raise
    summary = _summarise(trainer, command, model, time.monotonic() - began)
    summary["damaged"] = [asdict(damage) for damage in saved.damaged]
    if trainer.early is not None:
        summary["early"] = trainer.early
    if not is_done:
        summary["interrupted"] = trainer.stop.number or 15
    if config.qa and model is not None:
        summary["qa"] = _run_qa(model, recorder)
    facts = {"step": progress.step, "finished": is_done, **_log_memory(trainer, peak_before)}
    recorder.record("end", facts)
    _describe(trainer, "done" if is_done else "interrupted", summary["seconds"])
    return summary


def _try_to_save(trainer: Trainer) -> None:
    """Trial save before the first step; the copied weights are freed on return."""
    snapshot = trainer.snapshot({})
    if trainer.saver is not None:
        trainer.saver.trial_save(snapshot)


def _log_memory(trainer: Trainer, before: int | None) -> Numbers:
    """Logs planned and peak GPU memory; `before` is the peak before the first step. {} without a GPU."""
    after = budget.peak_bytes(trainer.world.device)
    if before is None or after is None:
        return {}
    plan, peak = total(trainer.plan), max(before, after)
    trainer.recorder.log(f"memory: plan {plan / 2**30:.2f} GiB, peak {peak / 2**30:.2f} GiB")
    return {"memory_plan_bytes": plan, "memory_peak_bytes": peak}


def _finish(trainer: Trainer, saved: Saved) -> Path | None:
    """Runs the last evaluation and saves the last checkpoint, unless the run was resumed from it.

    Returns the path of the final model, or None if the run is not finished.
    """
    saver = trainer.saver
    if trainer.config.smoke is not None:
        return None
    known = trainer.progress.evaluations
    is_scored = trainer.world.any(bool(known) and known[-1]["step"] == trainer.progress.step)  # and so it ended
    scores = (known[-1] if known else {}) if is_scored else trainer.evaluate() if trainer.is_done else {}
    is_done = trainer.is_done  # unless a signal has stopped this evaluation
    if not (is_done and is_scored and saved and trainer.progress.step == saved.step):
        trainer.save_now()
    snapshot = trainer.snapshot(scores) if is_done else None
    model = None
    if saver is not None and snapshot is not None:
        model = saver.finish(snapshot)
        if (spec := trainer.student.lora) is not None:
            base = str(trainer.config.student or trainer.config.init)
            masters = {k.removeprefix("master."): v for k, v in snapshot.state.items() if k.startswith("master.")}
            paths = save_adapter(saver.folder, trainer.student.shape, spec, masters, base)
            trainer.recorder.log(f"adapter: {', '.join(map(str, paths))}")
    elif saver is not None and trainer.progress.step not in saver.saved:
        raise StorageError(
            "the run was stopped, but its last checkpoint could not be saved", path=saver.folder,
            hint="the checkpoint named in `latest` is intact",
        )  # fmt: skip
    trainer.world.barrier()
    return model


def _run_qa(model: Path, recorder: Recorder) -> QaOutcome:
    """Runs `apr qa` on the model in llama.cpp; an error counts as not passed."""
    recorder.log("running apr qa on the model in llama.cpp")
    try:
        report = qa(model, log=recorder.log, on_gate=lambda gate: recorder.doing(f"{gate.id}: {gate.status}"))
    except AprError as error:
        return {"passed": False, "error": error.message, "gates": []}
    finally:
        recorder.doing("")
    recorder.record("qa", {"passed": report.passed})
    return construct(QaOutcome, report.to_json())


def _summarise(trainer: Trainer, command: str, model: Path | None, seconds: float) -> Summary:
    config, progress, saver = trainer.config, trainer.progress, trainer.saver
    times = trainer.step_seconds[2:] or trainer.step_seconds
    typical = statistics.median(times) if times else math.nan
    mean = trainer.mean
    summary: Summary = {
        "command": command,
        "output": None if saver is None else str(saver.folder),
        "model": str(model) if model is not None else None,
        "steps": progress.step,
        "tokens": progress.tokens,
        "seconds": seconds,
        "tokens_per_s": config.tokens_per_step / typical if times else None,
        "first": progress.evaluations[0] if progress.evaluations else None,
        "last": progress.evaluations[-1] if progress.evaluations else None,
        "loss": trainer.latest["loss"] if trainer.latest is not None else None,
        "train": mean and {"loss": mean["loss"], "ce": mean["ce"], "kl": mean["kl1"], "agreement": mean["agreement"]},
        "checkpoints": list(saver.saved) if saver is not None else [],
        "failed_saves": saver.failed if saver is not None else 0,
        "config": config.to_json(),
        "digest": config.digest(),
    }
    if config.smoke is not None and times:
        steps = config.steps or config.smoke
        summary["projected_steps"], summary["projected_seconds"] = steps, steps * typical
        trainer.recorder.log(f"{steps} steps would take {format_clock(steps * typical)}")
    return summary


def _describe(trainer: Trainer, status: str, seconds: float | None = None) -> None:
    """Writes the run's metadata into its folder, and its HTML report once it has ended."""
    progress, saver = trainer.progress, trainer.saver
    if saver is None:
        return
    facts = {
        **trainer.origin,
        "status": status,
        "steps": progress.step,
        "tokens": progress.tokens,
        "evaluations": progress.evaluations,
        "resolved": trainer.config.to_json(),
        "cwd": os.getcwd(),  # to which relative paths refer
    }
    saver.describe(facts | ({"seconds": seconds} if seconds is not None else {}))
    if status != "running":
        try:
            write_report(saver.folder, saver.folder / PAGE, force=True)
        except Exception as error:  # the models are saved, and `apr report` can retry
            trainer.recorder.log(f"{PAGE} could not be written: {error}")
