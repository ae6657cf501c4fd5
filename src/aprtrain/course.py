"""A run that is set up, from its first evaluation to the summary and the files that it leaves behind."""

from __future__ import annotations

import math
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from aprfmt.errors import AprError, StorageError
from aprfmt.text import format_clock
from aprtrain import guards
from aprtrain.config import Config
from aprtrain.loop import Parts, Progress, Trainer
from aprtrain.report import summary as report
from aprtrain.signals import catch_signals
from aprtrain.world import World


class Course:
    """The run from its first evaluation to its summary."""

    def __init__(
        self,
        command: str,
        config: Config,
        world: World,
        parts: Parts,
        progress: Progress,
        origin: dict[str, Any],
    ) -> None:
        self._command = command
        self._config = config
        self._world = world
        self._parts = parts
        self._progress = progress
        self._origin = origin

    def go(self, resumed: int | None) -> dict[str, Any]:
        """Everything; the summary."""
        began = time.monotonic()
        with catch_signals() as stop:
            trainer = Trainer(self._config, self._world, self._parts, self._progress, stop)
            if resumed is None:
                self._parts.recorder.say("held-out text is scored before the first step")
                self._check_models(trainer)
                if self._config.smoke is None:
                    self._trial_save(trainer)
                self._world.barrier()
            if self._world.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(self._world.device)
            self._describe("running")
            try:
                trainer.run()
                done = self._progress.step >= self._config.stop
                model = self._finish(trainer, is_whole=done)
            except Exception as error:
                self._fail(error)
                raise
            summary = self._summary(trainer, model, time.monotonic() - began)
            if not done:
                summary["interrupted"] = stop.number or 15
            self._describe("interrupted" if not done else "done", summary)
            self._parts.recorder.record("end", {"step": self._progress.step, "finished": done})
            self._report()
            return summary

    def _fail(self, error: Exception) -> None:
        """Says in the run's files how it ended."""
        if self._parts.saver is not None:
            self._parts.saver.wait()
        message = error.message if isinstance(error, AprError) else f"{type(error).__name__}: {error}"
        self._describe("failed")
        self._parts.recorder.record("error", {"step": self._progress.step, "message": message})
        self._report()

    def _report(self) -> None:
        """Writes the page about the run; a failure is told."""
        saver = self._parts.saver
        if saver is not None:
            try:
                report.write(saver.folder, saver.folder / report.PAGE, force=True)
            except Exception as error:  # whatever it is: the models are saved, and `apr report` can try again
                self._parts.recorder.say(f"{report.PAGE} could not be written: {error}")

    def _check_models(self, trainer: Trainer) -> None:
        """The guards that need both models to answer: on the first evaluation."""
        scores = trainer.evaluate() if self._config.smoke is None else self._parts.evaluate()
        vocabulary = self._parts.vocabulary
        if self._parts.teacher is None or vocabulary is None or not scores:
            return
        guards.check_dropped(scores["dropped_mass"])
        guards.check_divergence(scores["kl"])
        guards.check_teacher(
            scores["teacher_ce"],
            scores["ce"],
            vocabulary.n_real,
            allow_weaker=self._config.allow_weaker_teacher,
        )

    def _trial_save(self, trainer: Trainer) -> None:
        snapshot = trainer.snapshot({})
        if self._parts.saver is not None:
            self._parts.saver.trial_save(snapshot)

    def _finish(self, trainer: Trainer, *, is_whole: bool) -> Path | None:
        if self._config.smoke is not None:
            return None
        scores = trainer.evaluate() if is_whole else {}
        trainer.save_now()
        snapshot = trainer.snapshot(scores) if is_whole else None
        model, saver = None, self._parts.saver
        if saver is not None and snapshot is not None:
            model = saver.finish(snapshot)
        elif saver is not None and self._progress.step not in saver.saved:
            raise StorageError(
                "the run was asked to end, and its last checkpoint could not be saved", path=saver.folder,
                hint="the one that `latest` names is intact",
            )  # fmt: skip
        self._world.barrier()
        return model

    def _summary(self, trainer: Trainer, model: Path | None, seconds: float) -> dict[str, Any]:
        progress, saver = self._progress, self._parts.saver
        rates = trainer.step_seconds[2:] or trainer.step_seconds
        typical = statistics.median(rates) if rates else math.nan
        summary: dict[str, Any] = {
            "command": self._command,
            "output": None if saver is None else str(saver.folder),
            "model": str(model) if model is not None else None,
            "steps": progress.step,
            "tokens": progress.tokens,
            "seconds": seconds,
            "tokens_per_s": self._config.tokens_per_step / typical if rates else None,
            "first": progress.evaluations[0] if progress.evaluations else None,
            "last": progress.evaluations[-1] if progress.evaluations else None,
            "loss": trainer.latest.get("loss"),
            "checkpoints": list(saver.saved) if saver is not None else [],
            "failed_saves": saver.failed if saver is not None else 0,
            "config": self._config.resolved(),
            "digest": self._config.digest(),
        }
        if self._config.smoke is not None and rates:
            whole = self._config.steps or self._config.smoke
            summary |= {"projected_steps": whole, "projected_seconds": whole * typical}
            self._parts.recorder.say(f"{whole} steps would take {format_clock(whole * typical)}")
        return summary

    def _describe(self, status: str, summary: dict[str, Any] | None = None) -> None:
        saver = self._parts.saver
        if saver is None:
            return
        facts = {
            **self._origin,
            "status": status,
            "steps": self._progress.step,
            "tokens": self._progress.tokens,
            "evaluations": self._progress.evaluations,
            "resolved": self._config.resolved(),
        }
        saver.describe(facts | ({"seconds": summary["seconds"]} if summary else {}))
