"""The training loop. It never waits for the device within a step.

The results of a step (losses, gradient norm, stop requests) are one vector on the device, all-reduced over the
processes and copied to the host while the next step runs. A NaN is therefore noticed one step late, but the optimizer
skips that update on the device, so the weights stay finite.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from aprfmt.errors import AprError, RunError
from aprfmt.tokenizer.alignment import SharedVocabulary
from aprfmt.types import Numbers
from aprtrain import budget
from aprtrain.checkpoints.checkpoint import HostBuffers, Saver, Snapshot, copy_state
from aprtrain.config import Config
from aprtrain.data.batches import Batch, Batches
from aprtrain.guards import EvaluationStopped, Stop, UtilizationMonitor, Watchdog, is_better, nvml_reader, since_best
from aprtrain.hidden import HiddenStates
from aprtrain.loss.head import Softcaps, distill_head, logit_weight
from aprtrain.loss.objective import Objective
from aprtrain.memory import MemoryRow
from aprtrain.models import Origin
from aprtrain.network.decoder import Decoder
from aprtrain.network.names import head_name
from aprtrain.optim.rules import learning_rate
from aprtrain.optim.states import Optimizer
from aprtrain.qat import Quantizer
from aprtrain.report.metrics import Recorder, SampledValues, StepValues, mean_of, scores_text
from aprtrain.sampler import Sampler
from aprtrain.samples import TextSample
from aprtrain.teacher.aligned import AlignedTeacher
from aprtrain.teacher.files import TeacherTargets
from aprtrain.teacher.teacher import Teacher
from aprtrain.world import World

_SUMS = ("loss", "ce", "kl", "kl1", "agreement", "teacher_entropy", "aligned", "hidden", "save", "stop")
_MOST_UNLOGGED = 10_000  # steps averaged in a log line, at most
_PEAK_STEP = 2  # after which peak memory is checked


@dataclass
class Progress:
    """Progress of a run; JSON data, saved with every checkpoint."""

    step: int = 0
    tokens: int = 0
    best: float | None = None
    evaluations: list[Numbers] = field(default_factory=list)


@dataclass
class _Pending:
    """A step that was launched and whose results are not read yet."""

    step: int
    n_valid: int
    tokens: int
    lr: float
    values: Tensor
    ready: torch.cuda.Event | None
    sampled: SampledValues | None


class _NotFiniteError(Exception):
    """The loss or the gradient of a step is not finite; its argument is the step's number."""


@dataclass
class Trainer:
    """Runs steps from `progress.step` until the last step, a signal or a failure.

    Attributes:
        config, world: of the run.
        student, optimizer: the model to train and its optimizer.
        teacher, vocabulary: None in pretraining.
        batches: training batches, positioned at the cursor.
        objective: the loss to minimise.
        evaluate_student: metrics of the student on held-out data; "best" (lower is better) selects the best checkpoint:
            the KL to the teacher, or the cross entropy without one or with kd_weight 0. Its argument is `is_stopped` of
            `aprtrain.evaluate.evaluate`.
        saver: None in smoke runs and in processes that do not write.
        recorder: writes metrics and log lines.
        plan: rows of the memory plan.
        flops: useful FLOPs per token.
        origin: lineage for checkpoints.
        on_stall: called from another thread when a step takes too long; ends the process.
        answers: saved teacher log-probabilities, with --teacher-logprobs.
        aligned: runs a teacher with another tokenizer.
        sampler: of the student's own continuations, with --on-policy.
        sample: samples of the student's text, recorded after each evaluation; None without --samples.
        quantizer: what rounds the student's weights, with --qat.
        hidden: the loss between hidden states, with --hidden-weight.
        progress: current step, tokens and evaluations.
        stop: whether a signal asked to stop.
        latest: metrics of the last step whose results were read.
        step_seconds: duration of each such step in this process.
        early: why the run stopped early, else None.
        evaluation_stopped: whether a signal has stopped an evaluation; the same in every process.
    """

    config: Config
    world: World
    student: Decoder
    optimizer: Optimizer
    teacher: Teacher | None
    vocabulary: SharedVocabulary | None
    batches: Batches
    objective: Objective
    evaluate_student: Callable[[Callable[[], bool]], Numbers]
    saver: Saver | None
    recorder: Recorder
    plan: list[MemoryRow]
    flops: budget.Flops
    origin: Origin
    on_stall: Callable[[RunError], None]
    answers: TeacherTargets | None = None
    aligned: AlignedTeacher | None = None
    sampler: Sampler | None = None
    sample: Callable[[], list[TextSample]] | None = None
    quantizer: Quantizer | None = None
    hidden: HiddenStates | None = None
    progress: Progress = field(default_factory=Progress)
    stop: Stop = field(default_factory=Stop)
    latest: StepValues | None = field(default=None, init=False)
    step_seconds: list[float] = field(default_factory=list, init=False)
    early: str | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._on_gpu = self.world.device.type == "cuda"
        self._teacher_head: Tensor | None = None
        models = (self.student, self.teacher)
        self._softcaps = Softcaps(*(model.shape.logit_softcap if model else 0.0 for model in models))
        self._pending: _Pending | None = None
        self._asked_to_stop = False
        self.evaluation_stopped = False
        self._asked_to_save = False
        self._ready_before: torch.cuda.Event | None = None  # of the previous step, unless a pause followed it
        self._is_on_policy = False
        self._host = HostBuffers()
        self._utilisation: UtilizationMonitor | None = None
        self._unlogged: deque[StepValues] = deque(maxlen=_MOST_UNLOGGED)
        self._logged: StepValues | None = None

    @property
    def is_done(self) -> bool:
        """Whether the run has reached its last step or stopped early, and no signal has stopped an evaluation."""
        return not self.evaluation_stopped and (self.progress.step >= self.config.stop or self.early is not None)

    def wants_stop(self) -> bool:
        """Whether a signal stops an evaluation; with FSDP, where all processes evaluate together, one of them."""
        return self.world.any(bool(self.stop)) if self.optimizer.is_sharded else bool(self.stop)

    @property
    def mean(self) -> StepValues | None:
        """Mean metrics of the steps since the last log line, or of that line if no step followed."""
        return mean_of(self._unlogged) if self._unlogged else self._logged

    def run(self) -> None:
        """Runs all steps, evaluations and periodic saves. Raises RunError (NaN, idle GPU, memory)."""
        with ExitStack() as stack:
            watchdog = Watchdog(self.config.deadline, self.on_stall, least_s=self.config.step_deadline)
            self._watch_device(stack)
            self._looked_at = self._saved_at = time.monotonic()
            self.early = self._why_early() if self.progress.step else None  # a run that stopped early may be resumed
            try:
                # Several processes must all stop after the same step: the all-reduced request decides.
                while not (self.is_done or (self._asked_to_stop if self.world.size > 1 else self.stop)):
                    with watchdog.step():
                        self._step()
                    self._after_step()
                self._read_pending()
            except _NotFiniteError as found:  # saves outside of the watchdog
                self._stop_for_nan(*found.args)
        if self.saver is not None:
            self.saver.wait()

    def _watch_device(self, stack: ExitStack) -> None:
        read = nvml_reader(self.world.device) if self._on_gpu else None
        if read is not None:
            self._utilisation = stack.enter_context(
                UtilizationMonitor(read, self.recorder.log, least=self.config.min_utilization)
            )
        elif self._on_gpu:
            self.recorder.log("GPU utilization is not monitored: NVML is missing or does not support this GPU")

    # --- a step ---

    def _step(self) -> None:
        if self._utilisation is not None and self.step_seconds:  # the first step compiles kernels
            self._utilisation.wanted.set()
            self._utilisation.check()
        launched = self._launch(self._micro_batches())
        self._read_pending()
        self._pending = launched
        if not self._on_gpu:
            self._read_pending()

    def _micro_batches(self) -> list[Batch]:
        """The step's data, or the student's own continuations in their place."""
        sampler, step = self.sampler, self.progress.step
        self._is_on_policy = sampler is not None and sampler.is_due(step)
        if sampler is None or not self._is_on_policy:
            return next(self.batches)
        self.batches.skip()
        found = sampler.batches(step)
        n_valid = sum(self.world.gather(found[0].n_valid))
        return [replace(batch, n_valid=n_valid) for batch in found]

    def _launch(self, micro_batches: list[Batch]) -> _Pending:
        config, progress = self.config, self.progress
        assert config.warmup_steps is not None
        assert config.total_steps is not None
        lr = learning_rate(
            progress.step, peak=config.lr, total=config.total_steps, warmup=config.warmup_steps,
            final=config.lr_final,
        )  # fmt: skip
        if self.quantizer is not None:
            self.quantizer.pull = config.qat_dampening * progress.step / config.total_steps
        self.optimizer.clear()
        sums = torch.zeros(len(_SUMS), device=self.world.device)
        for batch in micro_batches:
            if batch is micro_batches[-1]:
                self.optimizer.sync_next_backward()
            sums[:-2] += self._pass(batch.to(self.world.device))
        # Rank 0's clock decides for all.
        is_due = 0 < config.save_minutes <= (time.monotonic() - self._saved_at) / 60
        sums[-2] += float(self.world.is_first and is_due)
        sums[-1] += float(bool(self.stop))
        self.world.all_reduce(sums)
        norm = self.optimizer.step(lr, sums[0])
        if self.hidden is not None:
            self.hidden.step(lr, sums[0])
        values = torch.cat([sums, norm.reshape(1)])
        n_valid = micro_batches[0].n_valid
        progress.step += 1
        progress.tokens += n_valid
        ready = None
        if self._on_gpu:
            values = values.to("cpu", non_blocking=True)
            ready = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            ready.record()
        sampled = None if self.sampler is None or not self._is_on_policy else self.sampler.values(progress.step - 1)
        return _Pending(progress.step, n_valid, progress.tokens, lr, values, ready, sampled)

    def _pass(self, batch: Batch) -> Tensor:
        """Forward and backward pass of a micro-batch; returns its part of the sums."""
        config = self.config
        hidden, head, spans, n_aligned = None, None, None, 0
        with nullcontext() if self.hidden is None else self.hidden.recording():
            if self.teacher is not None and self.aligned is None:
                hidden = self.teacher.hidden(batch.tokens_NT, batch.documents).flatten(0, 1)
                head = self._head_of(self.teacher)
            x_ND, labels_N = self.student(batch.tokens_NT, batch.documents).flatten(0, 1), batch.labels_NT.flatten()
        n_valid = max(1, batch.n_valid)
        distance = None if self.hidden is None else self.hidden.loss(labels_N, batch.kept_P, n_valid)
        kept_P, top = batch.kept_P, None
        if self.answers is not None:
            given = self.answers(batch.windows).to(self.world.device)
            kept_P, top = given.index_P, given.top
        if self.teacher is not None and self.aligned is not None:
            found, head = self.aligned(batch.windows), self._head_of(self.teacher)
            hidden, spans, n_aligned = found.hidden_ED, found.spans, found.n_labels
            x_ND, labels_N, kept_P = x_ND.index_select(0, found.index_P), labels_N[found.index_P], None
        if kept_P is not None:  # skip the logits of ignored positions
            x_ND, labels_N = x_ND.index_select(0, kept_P), labels_N[kept_P]
            hidden = None if hidden is None else hidden[kept_P]
        out = distill_head(
            x_ND, self.student.head_weight, hidden, head, labels_N,
            replace(self.objective, kd_weight=1.0) if self._is_on_policy else self.objective,
            self.vocabulary if hidden is not None else None, n_valid=n_valid, chunk=config.chunk,
            logits="fp32" if config.logits == "fp32" else "fp16", softcaps=self._softcaps,
            grad_w=self.optimizer.grad_of(head_name(self.student.shape)) if self.student.lora is None else None,
            top=top, spans=spans,
        )  # fmt: skip
        extra = [] if distance is None else [config.hidden_weight * distance]
        torch.autograd.backward([out.loss, *extra])
        values = *out, out.loss.new_tensor(n_aligned), out.loss.new_zeros(()) if distance is None else distance
        sums = torch.stack([value.detach().float() for value in values])
        for term in extra:
            sums[0] += term.detach()
        return sums

    def _head_of(self, teacher: Teacher) -> Tensor:
        """The teacher's head in the loss's dtype, cached unless it is dequantized for every use."""
        head = self._teacher_head
        if head is None:
            head = logit_weight(teacher.head_weight, "fp32" if self.config.logits == "fp32" else "fp16")
            self._teacher_head = head if teacher.residency != "q4k" else None
        return head

    # --- results of a step ---

    def _read_pending(self) -> None:
        """Waits for the pending step and reads its results."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        if pending.ready is not None:
            pending.ready.synchronize()
        numbers: list[float] = pending.values.tolist()
        seconds = self._seconds(pending.ready)
        self.step_seconds.append(seconds)
        self._asked_to_save, self._asked_to_stop = (number > 0 for number in numbers[len(_SUMS) - 2 : -1])
        values = self._values(pending, dict(zip((*_SUMS, "grad_norm"), numbers, strict=True)), seconds)
        self.latest = values
        self._unlogged.append(values)
        is_logged = pending.step % self.config.log_every == 0 or pending.step in (1, self.config.stop)
        if is_logged:
            self._logged = mean_of(self._unlogged)
            self._unlogged.clear()
        if self.world.is_first:
            self.recorder.step(values, total=self.config.stop, mean=self._logged if is_logged else None)
        if not (math.isfinite(values["loss"]) and math.isfinite(values["grad_norm"])):
            raise _NotFiniteError(pending.step)

    def _seconds(self, ready: torch.cuda.Event | None) -> float:
        """Duration of the step just read, from the end of the previous step or pause.

        Prefers CUDA events to the host's clock: the host may read two steps in a row that finished long before.
        """
        now = time.monotonic()
        seconds, self._looked_at = now - self._looked_at, now
        before, self._ready_before = self._ready_before, ready
        if before is not None and ready is not None:
            seconds = before.elapsed_time(ready) / 1e3
        return seconds

    def _values(self, pending: _Pending, sums: dict[str, float], seconds: float) -> StepValues:
        config, n = self.config, max(1, pending.n_valid)  # a step may have no labels
        rate = config.tokens_per_step / max(seconds, 1e-9)
        has_teacher = self.teacher is not None or self.answers is not None
        values: StepValues = {
            "step": pending.step,
            "loss": sums["loss"],
            "ce": sums["ce"] / n,
            "kl": sums["kl"] / n if has_teacher else None,
            "kl1": sums["kl1"] / n if has_teacher else None,
            "agreement": sums["agreement"] / n if has_teacher else None,
            "teacher_entropy": sums["teacher_entropy"] / n if has_teacher else None,
            "grad_norm": sums["grad_norm"],
            "lr": pending.lr,
            "labels": pending.n_valid,
            "tokens": pending.tokens,
            "seconds": seconds,
            "tokens_per_s": rate,
            "eta_s": (config.stop - pending.step) * seconds,
            "student_tflops": rate * self.flops.student / 1e12,
            "mfu": None,
            "utilisation": self._utilisation.latest if self._utilisation else None,
            "memory_bytes": budget.peak_bytes(self.world.device),
        }
        if pending.sampled is not None:
            values = {**values, **pending.sampled}
            if "sampler_seconds" in pending.sampled:
                values["sampler_share"] = min(1.0, pending.sampled["sampler_seconds"] / max(seconds, 1e-9))
        if self.hidden is not None:
            values["hidden"] = sums["hidden"]
        if self.aligned is not None:
            values["aligned"] = sums["aligned"] / n
        if self.teacher is not None:
            values["teacher_tflops"] = rate * self.flops.teacher / 1e12
        if self._on_gpu:
            peak = budget.peak_flops(torch.cuda.get_device_name(self.world.device))
            values["mfu"] = peak and rate * self.flops.total / self.world.size / peak
        return values

    def _stop_for_nan(self, step: int) -> None:
        self.save_now()
        self.world.barrier()  # wait for the save: the first process that fails ends the others
        where = f"the weights before this step are saved in {self.saver.folder}" if self.saver else ""
        raise RunError(
            f"the loss or the gradient of step {step} is not finite; {where or 'nothing was saved'}",
            hint="resume with a lower --lr: --resume --allow-changed lr --lr ..., or try --logits fp32",
        )

    # --- between steps ---

    def _after_step(self) -> None:
        config, step = self.config, self.progress.step
        if len(self.step_seconds) == _PEAK_STEP and (peak := budget.peak_bytes(self.world.device)) is not None:
            budget.check_peak(self.plan, peak)
        if step >= config.stop:
            return  # `run._finish` evaluates and saves
        is_due = self._asked_to_save or (config.save_every and step % config.save_every == 0)
        is_due = is_due or self.batches.ends_epochs(step, config.save_epochs)
        saves = bool(is_due) and config.smoke is None
        if saves or (config.eval_every and step % config.eval_every == 0):
            self._pause()
            scores = self.evaluate()
            if saves and not self.evaluation_stopped:  # else `finish` saves
                self._save(scores)
            self.early = self._why_early()
            self.world.barrier()  # outside of the watchdog: the others may have to wait long
        self._looked_at = time.monotonic() if self._pending is None else self._looked_at

    def _why_early(self) -> str | None:
        """Why the evaluations so far stop the run early, else None; the same in every process."""
        config, found = self.config, self.progress.evaluations
        since = since_best(scores["best"] or 0.0 for scores in found)  # only rank 0 has scores
        is_low = bool(found) and (found[-1]["ce"] or 0.0) <= (config.target_val_loss or 0.0)
        if self.world.any(is_low and config.target_val_loss is not None):
            return f"the held-out cross entropy is at most {config.target_val_loss:g}"
        if self.world.any(config.patience is not None and since >= config.patience):
            assert config.patience is not None
            was = "1 evaluation" if config.patience == 1 else f"{config.patience} evaluations in a row"
            return f"{was} without improvement"
        return None

    def _pause(self) -> None:
        """Reads the pending step and suspends timing, before longer work between two steps."""
        self._read_pending()
        self._ready_before = None
        if self._utilisation is not None:
            self._utilisation.wanted.clear()

    def evaluate(self) -> Numbers:
        """Evaluates, records and logs the scores; {} if this process has none, or a signal stops the evaluation.

        On failure all save, then raise.
        """
        scores: Numbers = {}
        error: AprError | None = None
        self.optimizer.search_scales()  # what a checkpoint of this step would contain
        if (self.world.is_first or self.optimizer.is_sharded) and self.config.smoke is None:
            try:
                scores = {"step": self.progress.step, **self.evaluate_student(self.wants_stop)}
            except AprError as found:
                if self.optimizer.is_sharded and found.__cause__ is not None:
                    raise  # possibly in this process alone: with FSDP the others cannot take part in a save
                error = found
        failure = self.world.first_error(error)
        if isinstance(failure, EvaluationStopped):
            self._asked_to_stop = self.evaluation_stopped = True
            return {}
        if failure is not None:
            if self.progress.step:
                self.save_now()
            self.world.barrier()
            raise failure
        if not scores:
            return {}
        self.progress.evaluations.append(scores)
        self.recorder.record("evaluation", scores)
        self.recorder.log(f"held-out, step {self.progress.step}: {scores_text(scores)}")
        if self.sample is not None:
            self.recorder.record("samples", {"step": self.progress.step, "samples": self.sample()})
        return scores

    def _save(self, scores: Numbers) -> None:
        """Starts writing a checkpoint of the current state."""
        snapshot = self.snapshot(scores)
        if self.saver is not None:
            self.saver.begin(snapshot)
        self._saved_at = time.monotonic()
        self._asked_to_save = False

    def save_now(self) -> None:
        """Saves a checkpoint with the scores of this step, if any, and waits for it."""
        known = self.progress.evaluations
        self._save(known[-1] if known and known[-1]["step"] == self.progress.step else {})
        if self.saver is not None:
            self.saver.wait()

    def snapshot(self, scores: Numbers) -> Snapshot:
        """A copy of the current state, after the previous save has finished; collective, kept by rank 0 only."""
        if self.saver is not None:
            self.saver.wait()
        score = scores.get("best")
        is_best = score is not None and is_better(score, self.progress.best)
        if is_best:
            self.progress.best = score
        weights, state = copy_state(
            self.optimizer, self.student, self.config.save_dtype, self._host, keeps=self.saver is not None,
            quantizer=self.quantizer,
        )  # fmt: skip
        state["rng"] = torch.get_rng_state()
        state |= self.hidden.states() if self.hidden is not None else {}
        here = {"step": self.progress.step, "tokens": self.progress.tokens, "scores": dict(scores)}
        facts = {
            "origin": self.origin,
            "config": self.config.to_json(),
            "digest": self.config.digest(),
            "progress": vars(self.progress) | {"evaluations": list(self.progress.evaluations)},
            "cursor": self.batches.cursor,
        }
        if self.sampler is not None:
            facts["sampled"] = self.world.gather(self.sampler.drawn.to_json())
        return Snapshot(self.progress.step, weights, {**self.origin, **here}, state, facts, is_best)
