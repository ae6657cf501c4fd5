"""A whole run: models, data and guards put together, then the loop, then the files that are left behind."""

from __future__ import annotations

import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import torch

from aprfmt.errors import RefusedError, RunError, UsageError
from aprtrain import budget, guards
from aprtrain.checkpoints import checkpoint
from aprtrain.checkpoints.saving import Saver, clear, lock_folder, prepare_folder
from aprtrain.config import Config, changed_fields, command_fields, resolve
from aprtrain.course import Course
from aprtrain.data.batches import Batches
from aprtrain.data.corpus import prepare
from aprtrain.data.packing import Windows, check_windows
from aprtrain.data.shards import Corpus
from aprtrain.evaluate import evaluate
from aprtrain.loop import Parts, Progress
from aprtrain.loss.objective import Kind, Objective
from aprtrain.loss.vocab import Vocabulary
from aprtrain.models import Pair, load_student, load_teacher, open_pair
from aprtrain.network.decoder import Decoder
from aprtrain.optim.adamw import Optimizer, load_states
from aprtrain.planning import check_sharding, flops_of, memory_plan, origin_of
from aprtrain.report.metrics import Recorder
from aprtrain.teacher.cache import CachedHidden, check_folder, open_cache
from aprtrain.teacher.teacher import Teacher
from aprtrain.world import World, join_world, world_size

_TOKENS = "tokens"
_LOST = ("gloo", "NCCL", "peer")
"""Words in what torch.distributed raises where another process is gone."""


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
            world = stack.enter_context(join_world(config.device))
            check_sharding(config, world.size)
            recorder = _recorder(config, world, stream)
            for line in lines:
                recorder.say(line)
            folder = stack.enter_context(_folder(config, world))
            pair = stack.enter_context(open_pair(command, config))
            return _train(command, config, world, recorder, folder, pair, on_stall)
    except BaseException as error:
        _clear_frames(error)
        if isinstance(error, torch.OutOfMemoryError):
            raise RunError(
                "the GPU has no memory left",
                hint="try a smaller --micro-tokens or --recompute block; --plan shows the parts",
            ) from error
        if isinstance(error, RuntimeError) and world_size() > 1 and any(word in str(error) for word in _LOST):
            last = str(error).strip().splitlines()[-1]
            raise RunError(
                "the connection to the other processes broke",
                hint=f"if one of them ended, its own message says why; the message here was: {last}",
            ) from error
        raise


def _clear_frames(error: BaseException | None) -> None:
    """Frees what the frames of a failed run hold: a notebook keeps the last error, and with it the models."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


@dataclass(frozen=True)
class _Folder:
    """Where a run lives; the step it goes on from, and the facts that its state has."""

    path: Path
    resumed: int | None
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
    check_folder(config)
    corpus = _corpus(config, world, folder, pair, recorder)
    windows = Windows(corpus.train, config.seq_len, corpus.separator)
    held_out = Windows(corpus.held_out, config.seq_len, corpus.separator)
    check_windows(windows)
    config, batches = _settled(config, windows, world, recorder, int(folder.facts.get("cursor", 0)))
    origin = origin_of(command, config, pair, corpus)
    if folder.resumed is not None:
        _check_resumed(config, folder.facts, origin, folder.resumed)
    cache = open_cache(config, pair, corpus, (windows, held_out), batches, world.device, recorder.say)
    backbone = cache is None or cache.missing > 0
    plan = memory_plan(config, pair, world.device, backbone=backbone, processes=world.size)
    on_gpu = world.device.type == "cuda"
    if on_gpu:
        budget.check_fits(plan, torch.cuda.get_device_properties(world.device).total_memory)
    student, optimizer = load_student(config, pair, world)
    load = partial(load_teacher, config, pair, held_out, world.device)
    teacher = load(backbone=backbone)
    _check_devices(student, teacher, world)

    def load_late() -> Teacher | None:
        plan[:] = memory_plan(config, pair, world.device, processes=world.size)
        return load()

    answers = cache.connect(teacher, load_late) if cache is not None and teacher is not None else {}
    parts = Parts(
        student=student,
        optimizer=optimizer,
        teacher=teacher,
        vocabulary=pair.vocabulary,
        batches=batches,
        objective=_objective(config, teacher),
        evaluate=_evaluation(
            config, student, teacher, pair.vocabulary, held_out, world, answers.get("held_out")
        ),
        saver=_saver(config, world, folder.path, pair, recorder),
        recorder=recorder,
        plan=plan if on_gpu else [],
        flops=flops_of(config, pair),
        lineage=origin,
        facts={"origin": origin, "config": config.resolved(), "digest": config.digest()},
        on_stall=on_stall,
        answers=answers.get("train"),
    )
    progress = _progress(folder, optimizer)
    recorder.begin(folder.resumed)
    _announce(command, config, world, recorder, origin, teacher)
    if folder.resumed is not None:
        recorder.say(f"goes on after step {folder.resumed}, {progress.tokens:,} tokens")
    with cache or nullcontext():
        return Course(command, config, world, parts, progress, origin).go(folder.resumed)


def _progress(folder: _Folder, optimizer: Optimizer) -> Progress:
    """Where the run begins; the optimizer and the random numbers are put there."""
    if folder.resumed is None:
        return Progress()
    with checkpoint.open_state(_state_file(folder.path, folder.resumed)) as (state, _):
        load_states(optimizer, state)
        torch.set_rng_state(state["rng"])
    return Progress(**folder.facts["progress"])


def _state_file(folder: Path, step: int) -> Path:
    return folder / f"{checkpoint.step_name(step)}.state"


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
    with lock_folder(path) if world.is_first else nullcontext():
        try:
            resumed = prepare_folder(path, resume=config.resume) if world.is_first else None
            world.barrier()
            if not world.is_first and config.resume:
                resumed = checkpoint.read_pointer(path, checkpoint.LATEST)
            facts: dict[str, Any] = {}
            if resumed is not None:
                with checkpoint.open_state(_state_file(path, resumed)) as (_, facts):
                    pass
            yield _Folder(path, resumed, facts)
        except BaseException:
            if world.is_first:
                clear(path, is_new=is_new)
            raise


def _recorder(config: Config, world: World, stream: TextIO | None) -> Recorder:
    keeps = config.output is not None and config.smoke is None and world.is_first
    return Recorder(Path(config.output or "") if keeps else None, stream if world.is_first else None)


def _corpus(config: Config, world: World, folder: _Folder, pair: Pair, recorder: Recorder) -> Corpus:
    """The token shards; the first process makes them, the others open what it made."""
    assert config.data is not None
    held_out = [Path(config.eval_data)] if config.eval_data is not None else []

    def make() -> Corpus:
        return prepare(
            [Path(config.data or "")], pair.student.tokenizer, folder.path / _TOKENS,
            held_out=config.held_out, held_out_paths=held_out, log=recorder.say,
            wanted=folder.facts.get("origin", {}).get("data"), own=folder.path,
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
    config = resolve(config, batches.n_steps)
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
    answers: CachedHidden | None,
) -> Any:
    # No more than a step's passes take, for which the memory is planned.
    rows = min(config.windows_per_pass, config.windows_per_step // world.size)

    def score() -> dict[str, Any]:
        found = evaluate(
            student, held_out, rows=rows, device=world.device, teacher=teacher,
            vocabulary=vocabulary, max_windows=config.eval_windows, answers=answers,
        )  # fmt: skip
        return {**asdict(found), "best": found.ce if found.kl is None else found.kl}

    return score


def _saver(config: Config, world: World, folder: Path, pair: Pair, recorder: Recorder) -> Saver | None:
    if config.smoke is not None or not world.is_first:
        return None
    return Saver(folder, pair.identity, config.keep, recorder.say, recorder.record)


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
    given = {row.name: resolved[row.name] for row in command_fields(command)}
    said = "  ".join(f"{k}={v}" for k, v in given.items() if not (v is None or v is False or v == []))
    recorder.say(f"{command} on {world.size} x {device}: {said}")
    recorder.say(f"configuration {config.digest()[:16]}  data {str(origin['data'])[:16]}")
    for note in teacher.notes if teacher is not None else []:
        recorder.say(f"teacher: {note}")
