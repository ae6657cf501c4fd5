"""Resuming: chooses the checkpoint, verifies every byte of it and checks that its metadata is consistent.

Each process verifies a part of the tensors, and all agree on the result. If the checkpoint named in `latest` is
damaged, the run falls back to the one before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from aprfmt.errors import AprError, ChecksumError, CorruptError, RunError, StorageError
from aprfmt.formats import open_own as open_model
from aprfmt.types import JsonObject
from aprtrain.checkpoints.checkpoint import (
    BEST,
    LATEST,
    LINEAGE,
    MODEL,
    SIZES,
    check_resumable,
    files_by_step,
    prepare_folder,
    read_pointer,
    step_name,
    write_pointer,
)
from aprtrain.checkpoints.state import State, open_state
from aprtrain.config import digest_of, is_value, what_fields
from aprtrain.loop import Progress
from aprtrain.network.weights import NetworkSource
from aprtrain.nodes import fetch
from aprtrain.optim.rules import rule_of
from aprtrain.sampler import Continuations
from aprtrain.world import World


@dataclass(frozen=True)
class Damage:
    """A damaged checkpoint: its step and what is wrong with it."""

    step: int
    reason: str


@dataclass(frozen=True)
class Saved:
    """The state to resume from; an empty `config` means a new run.

    Attributes:
        step, cursor, progress: progress of the run and its position in the data.
        origin, config: lineage and configuration of the run.
        damaged: newer checkpoints that are damaged.
        left: steps of newer checkpoints, which the next save removes.
        sampled: what each process had sampled with --on-policy and not learned yet.
        fetched: checkpoint files that this process fetched for its node, removed once they are loaded.
        notes: other problems in the folder, one line each.
    """

    step: int = 0
    cursor: int = 0
    progress: Progress = field(default_factory=Progress)
    origin: JsonObject = field(default_factory=dict)
    config: JsonObject = field(default_factory=dict)
    damaged: tuple[Damage, ...] = ()
    left: tuple[int, ...] = ()
    sampled: tuple[Continuations, ...] = ()
    fetched: tuple[Path, ...] = ()
    notes: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.config)

    def lines(self) -> Iterator[str]:
        """Log lines about problems and discarded checkpoints."""
        yield from self.notes
        for damage in self.damaged:
            yield f"checkpoint {damage.step} is damaged ({damage.reason}): resuming from {self.step}"
        if self.left:
            names = ", ".join(map(str, self.left))
            yield f"checkpoints after step {self.step} ({names}) are discarded; the next save removes them"


def state_file(folder: Path, step: int) -> Path:
    """Path of the state of a step."""
    return folder / f"{step_name(step)}.state"


def model_file(folder: Path, step: int) -> Path:
    """Path of the model of a step."""
    return folder / f"{step_name(step)}.apr"


def find_checkpoint(folder: Path, wanted: bool | int | str, world: World) -> Saved:
    """The checkpoint of step `wanted`, or for True the latest one that is not damaged. Collective.

    For "auto" that is the latest one too, or a new run in a folder without a run.

    Raises RefusedError if there is no checkpoint, CorruptError if the requested one, or every one, is damaged,
    RunError if a value is not finite.
    """
    notes: list[str] = []
    listed: tuple[list[int], int | None, int | None] = [], None, None
    if world.is_first:
        listed = list(files_by_step(folder)), _pointer(folder, LATEST, notes), _pointer(folder, BEST, notes)
    steps, latest, best = world.gather(listed)[0]
    last = [] if latest is None else [latest]
    if wanted == "auto":
        if not steps and not last:
            prepare_folder(folder, resumes=False)
            return Saved()
        wanted = True
    check_resumable(folder, wanted, steps or (last if wanted is True else []))
    found = {*(step for step in steps if step <= (last or steps)[-1]), *last} if wanted is True else {int(wanted)}
    saved = _first_intact(folder, sorted(found, reverse=True), world)
    left = tuple(step for step in steps if step > saved.step)
    if best is None or best > saved.step:
        saved.progress.best = None  # the best checkpoint is discarded: the next evaluation sets it again
    return replace(saved, left=left, notes=tuple(notes))


def _pointer(folder: Path, which: str, notes: list[str]) -> int | None:
    try:
        return read_pointer(folder, which)
    except CorruptError as error:
        notes.append(f"the file {which} is damaged ({error.message}); the next save rewrites it")
        return None


def _first_intact(folder: Path, candidates: list[int], world: World) -> Saved:
    damaged: list[Damage] = []
    fetched: list[Path] = []
    first: CorruptError | None = None
    for step in candidates:
        names = [path(folder, step).name for path in (state_file, model_file)]
        fetched += fetch(names, folder, folder, world)
        try:
            return replace(_checked(folder, step, world), damaged=tuple(damaged), fetched=tuple(fetched))
        except CorruptError as error:
            first = first or error
            damaged.append(Damage(step, reason_of(error)))
        except RunError as error:
            older = ", ".join(str(other) for other in candidates if other < step)
            error.hint = f"resume from an older checkpoint with --resume STEP: {older}" if older else error.hint
            raise
    assert first is not None
    if others := [str(damage.step) for damage in damaged[1:]]:
        first.hint = f"the checkpoints before it are damaged too: {', '.join(others)}; start a new run with another -o"
    raise world.told(first)


def reason_of(error: AprError) -> str:
    """Short description of an error about a checkpoint."""
    name = Path(error.path).name if error.path else ""
    return " ".join(filter(None, (f"{error.message} in {name}" if name else error.message, error.tensor)))


def _checked(folder: Path, step: int, world: World) -> Saved:
    """Verifies a checkpoint and returns its state. Raises CorruptError, or the error that prevents reading it.

    All processes raise the same error: the first one in the order of the checks.
    """
    number, saved, fault = -1, None, None
    with ExitStack() as stack:
        try:
            state = stack.enter_context(open_state(state_file(folder, step)))
            saved = _saved_of(state, step)
            _check_tensors(state, step, str(saved.config["optimizer"]))
            checks = [
                partial(_check_model, model_file(folder, step), state),
                *(partial(_check, state, n) for n in state),
            ]
            for number in range(world.rank, len(checks), world.size):
                checks[number]()
        except AprError as error:
            fault = number, not isinstance(error, (StorageError, RunError)), world.rank, error
    faults = [found for found in world.gather(fault) if found is not None]
    if faults:
        _, is_damage, rank, found = min(faults, key=lambda each: each[:3])
        if is_damage and not isinstance(found, CorruptError):  # for example a missing file or an unknown format
            raise CorruptError(found.message, path=found.path, tensor=found.tensor)
        raise found if is_damage else world.told(found, rank)
    assert saved is not None
    return saved


# --- what is checked ---


def _check(state: State, name: str) -> None:
    """Reads and verifies a tensor. Raises ChecksumError, or RunError if a value is not finite."""
    tensor = state[name]
    if tensor.is_floating_point() and tensor.numel() and not all(torch.isfinite(x) for x in torch.aminmax(tensor)):
        raise RunError("the saved state has a value that is not finite", path=state.path, tensor=name)


def _check_model(path: Path, state: State) -> None:
    """Checks a checkpoint's model against its checksum and its state file. Raises AprError."""
    with open_model(path) as model:
        if model.checksum().get("footer") != "ok":
            raise ChecksumError("checksum mismatch", path=path)
        lineage = model.metadata.get(LINEAGE)
        for name, fact in (("step", "progress.step"), ("tokens", "progress.tokens"), ("config_digest", "digest")):
            found, wanted = _fact(lineage, name), _fact(state.facts, fact)
            if found != wanted:
                raise CorruptError(f"{LINEAGE}.{name} is {found!r}, but {fact} of the state is {wanted!r}", path=path)


def is_finished(folder: Path, saved: Saved) -> bool:
    """Whether `model.apr` is intact and belongs to the step to resume from; its last write may have failed."""
    try:
        with open_state(state_file(folder, saved.step)) as state:
            _check_model(folder / MODEL, state)
    except AprError:
        return False
    return True


def _check_tensors(state: State, step: int, optimizer: str) -> None:
    """Checks that the tensors are matching masters and moments, "step" and "rng". Raises CorruptError."""
    rule = rule_of(optimizer)
    random = torch.get_rng_state()
    wanted = {"rng": ("U8", tuple(random.shape)), "step": ("F32", ())}
    for name, (_, shape) in state.forms.items():
        kind, _, parameter = name.partition(".")
        if kind == "master" and parameter:
            wanted |= {f"{other}.{parameter}": ("F32", shape) for other in rule.kinds(parameter, shape)}
    for name in (*wanted, *state.forms):
        found = state.forms.get(name)
        if found != wanted.get(name):
            is_extra = name not in wanted
            words = "is not part of a training state" if is_extra else f"is {_form(found)}, not {_form(wanted[name])}"
            raise CorruptError(f"the tensor {words}", path=state.path, tensor=name)
    count = float(state["step"])
    if not (count.is_integer() and 0 <= count <= step):
        raise CorruptError(f"{count:g} updates in the state of step {step}", path=state.path, tensor="step")


def _form(form: tuple[str, tuple[int, ...]] | None) -> str:
    return "missing" if form is None else f"{form[0]} {list(form[1])}"


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_number(value: object) -> bool:
    return value is None or (isinstance(value, (int, float)) and not isinstance(value, bool))


def _is_scores(value: object) -> bool:
    """Whether a value is a list of evaluation scores."""
    return isinstance(value, list) and all(
        isinstance(one, dict) and _is_count(one.get("step")) and all(map(_is_number, one.values())) for one in value
    )


def _is_fingerprint(value: object) -> bool:
    return isinstance(value, dict) and isinstance(value.get("print"), str)


# Metadata key -> (expected value in words, check).
_FACTS: dict[str, tuple[str, Callable[[object], bool]]] = {
    "config": ("options", lambda value: isinstance(value, dict)),
    "cursor": ("a number of sequences", _is_count),
    "digest": ("a hash", lambda value: isinstance(value, str)),
    "progress.step": ("a step", _is_count),
    "progress.tokens": ("a number of tokens", _is_count),
    "progress.best": ("a score or null", _is_number),
    "progress.evaluations": ("a list of scores", _is_scores),
    "origin.teacher": ("a model or null", lambda value: value is None or _is_fingerprint(value)),
    "origin.student": ("a model", _is_fingerprint),
    "origin.data": ("a hash or null", lambda value: value is None or isinstance(value, str)),
    "origin.config_digest": ("a hash", lambda value: isinstance(value, str)),
}


def _saved_of(state: State, step: int) -> Saved:
    """Parses and checks the metadata of a state. Raises CorruptError that names the key."""

    def fault(name: str, found: object, wanted: str) -> CorruptError:
        words = "is missing" if found is _MISSING else f"is {repr(found)[:80]}, not {wanted}"
        return CorruptError(f"metadata {name} {words}", path=state.path)

    facts = {name: _fact(state.facts, name) for name in _FACTS}
    for name, (wanted, holds) in _FACTS.items():
        if not holds(facts[name]):
            raise fault(name, facts[name], wanted)
    if facts["progress.step"] != step:
        raise fault("progress.step", facts["progress.step"], "the step in the file name")
    config, origin, progress = (dict(_fact(state.facts, name)) for name in ("config", "origin", "progress"))
    for name in what_fields():
        if name not in config or not is_value(name, config[name]):
            raise fault(f"config.{name}", config.get(name, _MISSING), "a valid value of that option")
    digest = digest_of(config)
    for name in ("digest", "origin.config_digest"):
        if facts[name] != digest:
            raise fault(name, facts[name], f"the {digest} of its configuration")
    if extra := sorted(set(progress) - {f.name for f in fields(Progress)}):
        raise fault(f"progress.{extra[0]}", progress[extra[0]], "a known key")
    found = state.facts.get("sampled", [])
    try:
        sampled = tuple(map(Continuations.from_json, found if isinstance(found, list) else [found]))
    except ValueError:
        raise fault("sampled", found, "a list of continuations") from None
    return Saved(step, facts["cursor"], Progress(**progress), origin, config, sampled=sampled)


_MISSING = object()


def _fact(facts: object, name: str) -> Any:
    for key in name.split("."):
        facts = facts.get(key, _MISSING) if isinstance(facts, dict) else _MISSING
    return facts


def point_latest_at(folder: Path, saved: Saved) -> None:
    """Points `latest` at the checkpoint to resume from: newer ones no longer belong to this run."""
    if _pointer(folder, LATEST, []) != saved.step:
        write_pointer(folder, LATEST, saved.step)


def check_student(folder: Path, saved: Saved, student: NetworkSource) -> None:
    """Raises CorruptError if the dimensions of the checkpoint's model differ from the student's."""
    path = model_file(folder, saved.step)
    with open_model(path) as model:
        for name in SIZES:
            found, wanted = getattr(model.hparams, name), getattr(student.hparams, name)
            if found != wanted:
                raise CorruptError(f"{name} is {found!r}, but the student has {wanted!r}", path=path)
