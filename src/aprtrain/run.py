"""A whole run: models, data and guards put together, then the loop, then the files that are left behind."""

from __future__ import annotations

import platform
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor

import aprfmt
from aprfmt.errors import RefusedError, RunError, UsageError
from aprtrain import budget, checkpoint, guards
from aprtrain.batches import Batches
from aprtrain.config import Config, changed_fields, settled, what_fields
from aprtrain.corpus import prepare
from aprtrain.course import Course
from aprtrain.decoder import Decoder
from aprtrain.evaluate import evaluate
from aprtrain.head import head_bytes
from aprtrain.loop import Parts, Progress
from aprtrain.metrics import Recorder
from aprtrain.models import Pair, is_compiled, load_student, load_teacher, opened, quick_print
from aprtrain.objective import Kind, Objective
from aprtrain.optim import Optimizer
from aprtrain.packing import Windows, check_windows
from aprtrain.saving import Saver, prepare_folder
from aprtrain.shards import Corpus
from aprtrain.teacher import Teacher, planned_bytes
from aprtrain.vocab import Vocabulary
from aprtrain.world import World, joined

SCHEMA = "aprtrain.run/1"
_TOKENS = "tokens"
_ASSUMED_FLOPS = 400e12
"""What a plan's time goes by: half of an H200's published rate is rarely missed by far."""


def run(
    command: str,
    config: Config,
    *,
    stream: TextIO | None = sys.stderr,
    lines: Sequence[str] = (),
    on_stall: Callable[[RunError], None] = guards.abort,
) -> dict[str, Any]:
    """Trains as `config` says and gives the summary; `stream` takes progress, `lines` stand before it.

    `on_stall` is called from another thread when a step takes too long, and ends the process.

    With "interrupted" in the summary a signal's number ended it, after a checkpoint. Raises AprError.
    """
    try:
        with ExitStack() as stack:
            if config.deterministic:
                stack.enter_context(guards.deterministic())
            world = stack.enter_context(joined(config.device))
            recorder = _recorder(config, world, stream)
            for line in lines:
                recorder.say(line)
            folder = stack.enter_context(_folder(config, world))
            pair = stack.enter_context(opened(command, config))
            return _train(command, config, world, recorder, folder, pair, on_stall)
    except torch.OutOfMemoryError as error:
        raise RunError(
            "the GPU has no memory left", hint="try a smaller --micro-tokens, --recompute block; see --plan"
        ) from error


@dataclass(frozen=True)
class _Folder:
    """Where a run lives; the step it goes on from, with that step's state and facts."""

    path: Path
    resumed: int | None
    state: dict[str, Tensor] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)


def _train(
    command: str,
    config: Config,
    world: World,
    recorder: Recorder,
    folder: _Folder,
    pair: Pair,
    on_stall: Callable[[RunError], None],
) -> dict[str, Any]:
    corpus = _corpus(config, world, folder.path, pair, recorder)
    windows = Windows(corpus.train, config.seq_len, corpus.separator)
    held_out = Windows(corpus.held_out, config.seq_len, corpus.separator)
    check_windows(windows)
    config, batches = _settled(config, windows, world, recorder, int(folder.facts.get("cursor", 0)))
    origin = _origin(command, config, pair, corpus)
    if folder.resumed is not None:
        _check_resumed(config, folder.facts, origin, folder.resumed)
    plan = memory_plan(config, pair, world.device)
    on_gpu = world.device.type == "cuda"
    if on_gpu:
        budget.check_fits(plan, torch.cuda.get_device_properties(world.device).total_memory)
    student, optimizer = load_student(config, pair, world.device)
    teacher = load_teacher(config, pair, held_out, world.device)
    _check_devices(student, teacher, world)
    parts = Parts(
        student=student,
        optimizer=optimizer,
        teacher=teacher,
        vocabulary=pair.vocabulary,
        batches=batches,
        objective=_objective(config, teacher),
        evaluate=_evaluation(config, student, teacher, pair.vocabulary, held_out, world),
        saver=_saver(config, world, folder.path, pair, recorder),
        recorder=recorder,
        plan=plan if on_gpu else [],
        flops=_flops(config, pair),
        lineage=origin,
        facts={"origin": origin, "config": config.resolved(), "digest": config.digest()},
        on_stall=on_stall,
    )
    progress = _progress(folder, optimizer)
    recorder.begin(folder.resumed)
    _announce(command, config, world, recorder, origin, teacher)
    return Course(command, config, world, parts, progress, origin).go(folder.resumed)


def _progress(folder: _Folder, optimizer: Optimizer) -> Progress:
    """Where the run begins; the optimizer and the random numbers are put there."""
    if folder.resumed is None:
        return Progress()
    optimizer.load(folder.state, folder.facts["layout"])
    torch.set_rng_state(folder.state["rng"])
    folder.state.clear()  # gigabytes
    return Progress(**folder.facts["progress"])


def _flops(config: Config, pair: Pair) -> budget.Flops:
    return budget.flops(config, pair.student.shape, pair.teacher.shape if pair.teacher is not None else None)


@contextmanager
def _folder(config: Config, world: World) -> Iterator[_Folder]:
    """The run's folder; of a smoke run one that is gone afterwards."""
    if config.smoke is not None:
        with tempfile.TemporaryDirectory(prefix="apr-smoke-") as name:
            yield _Folder(Path(name), None)
        return
    assert config.output is not None
    path = Path(config.output)
    is_new = not path.exists()
    resumed = prepare_folder(path, resume=config.resume) if world.is_first else None
    world.barrier()
    if not world.is_first and config.resume:
        resumed = checkpoint.pointed(path, checkpoint.LATEST)
    state: dict[str, Tensor] = {}
    facts: dict[str, Any] = {}
    if resumed is not None:
        state, facts = checkpoint.load_state(path / f"{checkpoint.step_name(resumed)}.state")
    try:
        yield _Folder(path, resumed, state, facts)
    except BaseException:
        if is_new and world.is_first:
            with suppress(OSError):
                path.rmdir()  # nothing came into it
        raise


def _recorder(config: Config, world: World, stream: TextIO | None) -> Recorder:
    keeps = config.output is not None and config.smoke is None and world.is_first
    return Recorder(Path(config.output or "") if keeps else None, stream if world.is_first else None)


def _corpus(config: Config, world: World, folder: Path, pair: Pair, recorder: Recorder) -> Corpus:
    """The token shards; the first process makes them, the others open what it made."""
    assert config.data is not None
    held_out = [Path(config.eval_data)] if config.eval_data is not None else []

    def make() -> Corpus:
        return prepare(
            [Path(config.data or "")], pair.student.tokenizer, folder / _TOKENS,
            held_out=config.held_out, held_out_paths=held_out, log=recorder.say,
        )  # fmt: skip

    if world.is_first:
        corpus = make()
        world.barrier()
        return corpus
    world.barrier()
    return make()


def _settled(
    config: Config, windows: Windows, world: World, recorder: Recorder, cursor: int
) -> tuple[Config, Batches]:
    share, rest = divmod(config.windows_per_step, world.size)
    if rest:
        raise UsageError(
            f"{config.windows_per_step} windows a step cannot be shared by {world.size} processes",
            hint=f"make --tokens-per-step a multiple of {world.size * config.seq_len}",
        )
    batches = Batches(
        windows,
        windows_per_step=config.windows_per_step,
        windows_per_micro=min(share, config.windows_per_pass),
        seed=config.seed,
        rank=world.rank,
        world=world.size,
        epochs=None if config.repeat else config.epochs or 1,
        cursor=cursor,
        log=recorder.say,
    )
    config = settled(config, batches.n_steps)
    batches.check(config.stop)
    return config, batches


def _objective(config: Config, teacher: Teacher | None) -> Objective:
    if teacher is None:
        return Objective(kd_weight=0.0)
    kinds: dict[str, Kind] = {"forward": "forward", "reverse": "reverse", "jsd": "jsd"}
    return Objective(config.kd_weight, config.temperature, kinds[config.loss], config.beta)


def _evaluation(
    config: Config,
    student: Decoder,
    teacher: Teacher | None,
    vocabulary: Vocabulary | None,
    held_out: Windows,
    world: World,
) -> Any:
    def score() -> dict[str, Any]:
        found = evaluate(
            student, held_out, rows=config.windows_per_pass, device=world.device, teacher=teacher,
            vocabulary=vocabulary, max_windows=max(1, config.eval_tokens // config.seq_len),
        )  # fmt: skip
        return {**asdict(found), "best": found.ce if found.kl is None else found.kl}

    return score


def _saver(config: Config, world: World, folder: Path, pair: Pair, recorder: Recorder) -> Saver | None:
    if config.smoke is not None or not world.is_first:
        return None
    return Saver(folder, pair.identity, config.keep, recorder.say)


def memory_plan(config: Config, pair: Pair, device: torch.device) -> list[budget.Row]:
    """The memory of a run on `device`."""
    teacher, shape = pair.teacher, pair.student.shape
    on_gpu = device.type == "cuda"
    resident = planned_bytes(teacher, config.teacher_residency) if teacher is not None else 0
    if teacher is not None and not on_gpu and config.teacher_residency == "bf16":
        resident *= 2
    vocabulary = pair.vocabulary or Vocabulary(shape.vocab_rows, shape.vocab_rows, shape.vocab_rows)
    logits = "fp16" if config.logits == "fp16" and on_gpu else "fp32"
    head = head_bytes(
        vocabulary, shape.d_model, min(config.chunk, config.micro_tokens),
        "fp16" if logits == "fp16" else "fp32", teacher is not None,
    )  # fmt: skip
    return budget.memory(
        config, shape, teacher.shape if teacher is not None else None,
        resident=resident, head=head, on_gpu=on_gpu, compiled=is_compiled(config, device),
    )  # fmt: skip


def _origin(command: str, config: Config, pair: Pair, corpus: Corpus | None) -> dict[str, Any]:
    """Where a checkpoint of this run comes from; no folder of this machine is named."""
    overrides = [name for name in ("allow_same_arch", "allow_weaker_teacher") if getattr(config, name)]
    overrides += [f"changed {name}" for name in config.allow_changed]
    teacher = pair.teacher
    return {
        "schema": SCHEMA,
        "command": command,
        "teacher": teacher
        and {
            "name": teacher.path.name,
            "print": quick_print(teacher),
            "architecture": teacher.shape.architecture,
        },
        "student": {
            "name": pair.student.path.name,
            "made": config.student_init or config.shape,
            "print": pair.student_print(),
            "architecture": pair.student.shape.architecture,
        },
        "data": corpus.key if corpus is not None else None,
        "config": {name: value for name, value in config.resolved().items() if name in what_fields()},
        "config_digest": config.digest(),
        "overrides": overrides,
        "versions": {
            "aprfmt": aprfmt.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }


def _check_resumed(config: Config, facts: dict[str, Any], origin: dict[str, Any], step: int) -> None:
    """Refuses to go on with anything that would make it another run."""
    old = facts["origin"]
    changed = [name for name in changed_fields(facts["config"], config) if name not in config.allow_changed]
    if changed:
        was = ", ".join(f"{name} was {facts['config'].get(name)!r}" for name in changed)
        raise RefusedError(
            f"the run to resume was configured otherwise: {was}",
            hint=" ".join(f"--allow-changed {name}" for name in changed) + " goes on nevertheless",
        )
    for what, name in (
        ("teacher", "the teacher"),
        ("student", "the student's first weights"),
        ("data", "the data"),
    ):
        a, b = old[what], origin[what]
        if (a["print"] if isinstance(a, dict) else a) != (b["print"] if isinstance(b, dict) else b):
            raise RefusedError(
                f"{name} differs from that of the run to resume",
                hint="begin a run of its own with another -o",
            )
    if step >= config.stop:
        raise UsageError(f"the run has done {step} steps already", hint=f"--steps must be more than {step}")


def _check_devices(student: Decoder, teacher: Teacher | None, world: World) -> None:
    guards.check_resident(student.named_parameters(), world.device)
    if teacher is not None:
        held = teacher.decoder.named_parameters()  # what stays in blocks has a stand-in without memory
        guards.check_resident(((name, p) for name, p in held if not p.is_meta), world.device)


def _announce(
    command: str,
    config: Config,
    world: World,
    recorder: Recorder,
    origin: dict[str, Any],
    teacher: Teacher | None,
) -> None:
    """The resolved configuration, printed and recorded before the first step."""
    device = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "cpu"
    resolved = config.resolved()
    recorder.record(
        "start", {"command": command, "config": resolved, "digest": config.digest(), "device": device}
    )
    said = "  ".join(f"{name}={value}" for name, value in resolved.items() if value not in (None, False, []))
    recorder.say(f"{command} on {world.size} x {device}: {said}")
    recorder.say(f"configuration {config.digest()[:16]}  data {str(origin['data'])[:16]}")
    for note in teacher.notes if teacher is not None else []:
        recorder.say(f"teacher: {note}")


def plan(command: str, config: Config) -> dict[str, Any]:
    """What a run would take and do, without a device: memory, FLOPs, time, vocabulary, hashes. Raises AprError."""
    device = torch.device(config.device.split(":")[0])
    with opened(command, config) as pair:
        rows = memory_plan(config, pair, device)
        work = _flops(config, pair)
        steps = config.steps
        tokens = steps * config.tokens_per_step if steps is not None else None
        if steps is not None:
            config = settled(config)
        return {
            "command": command,
            "memory": [{"name": row.name, "bytes": row.n_bytes} for row in rows],
            "memory_bytes": budget.total(rows),
            "flops_per_token": {"teacher": work.teacher, "student": work.student},
            "tokens": tokens,
            "flops": tokens and tokens * work.total,
            "seconds_at_400_tflops": tokens and tokens * work.total / _ASSUMED_FLOPS,
            "student": {**_described(pair.student.shape), "made": pair.made is not None},
            "teacher": _described(pair.teacher.shape) if pair.teacher is not None else None,
            "vocabulary": asdict(pair.vocabulary) if pair.vocabulary is not None else None,
            "compiled": is_compiled(config, device),
            "config": config.resolved(),
            "digest": config.digest(),
            "origin": _origin(command, config, pair, None),
        }


def _described(shape: Any) -> dict[str, Any]:
    return {name: value for name, value in asdict(shape).items() if isinstance(value, (int, float, str))} | {
        "parameters": shape.n_params
    }
