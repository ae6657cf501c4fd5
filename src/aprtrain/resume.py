"""What a run goes on from: the checkpoint is chosen, every byte of it checked, and its facts held against each other.

Each process checks a part of the tensors, and all of them come to the same answer. Where the checkpoint that `latest`
names is damaged, the one before it takes its place.
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
from aprfmt.formats import open as open_model
from aprfmt.types import JsonObject
from aprtrain.checkpoints.checkpoint import (
    BEST,
    LATEST,
    LINEAGE,
    MODEL,
    SIZES,
    check_resumable,
    files_by_step,
    read_pointer,
    step_name,
    write_pointer,
)
from aprtrain.checkpoints.state import State, open_state
from aprtrain.config import digest_of, is_value, what_fields
from aprtrain.loop import Progress
from aprtrain.network.weights import NetworkSource
from aprtrain.nodes import fetch
from aprtrain.optim.adamw import KINDS
from aprtrain.world import World


@dataclass(frozen=True)
class Damage:
    """A checkpoint that a run could not go on from: its step and why."""

    step: int
    reason: str


@dataclass(frozen=True)
class Saved:
    """The state that a run continues from; without a configuration the beginning, of which nothing is saved.

    Attributes:
        step, cursor, progress: where the run was.
        origin, config: what it was made of.
        damaged: newer checkpoints that are damaged.
        left: steps of the checkpoints after this one, which the run leaves behind.
        fetched: files of checkpoints that this process fetched for its node, to be removed when they are read.
        notes: what else is wrong in the folder, a line each.
    """

    step: int = 0
    cursor: int = 0
    progress: Progress = field(default_factory=Progress)
    origin: JsonObject = field(default_factory=dict)
    config: JsonObject = field(default_factory=dict)
    damaged: tuple[Damage, ...] = ()
    left: tuple[int, ...] = ()
    fetched: tuple[Path, ...] = ()
    notes: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.config)

    def lines(self) -> Iterator[str]:
        """What a user is told of it."""
        yield from self.notes
        for damage in self.damaged:
            yield f"checkpoint {damage.step} is damaged ({damage.reason}): going on from {self.step}"
        if self.left:
            names = ", ".join(map(str, self.left))
            yield f"checkpoints after step {self.step} ({names}) are left behind; the next save removes them"


def state_file(folder: Path, step: int) -> Path:
    """Where the state of a step is."""
    return folder / f"{step_name(step)}.state"


def model_file(folder: Path, step: int) -> Path:
    """Where the model of a step is."""
    return folder / f"{step_name(step)}.apr"


def find_saved(folder: Path, wanted: bool | int, world: World) -> Saved:
    """The checkpoint of step `wanted`, for True the latest that is whole. All processes take part.

    Raises RefusedError where there is none, CorruptError where the one that is wanted, or every one, is damaged,
    RunError for values that are not finite.
    """
    notes: list[str] = []
    steps, latest, best = world.gather(_listed(folder, notes) if world.is_first else ([], None, None))[0]
    last = [] if latest is None else [latest]
    check_resumable(folder, wanted, steps or (last if wanted is True else []))
    found = {*(step for step in steps if step <= (last or steps)[-1]), *last} if wanted is True else {int(wanted)}
    saved = _first_whole(folder, sorted(found, reverse=True), world)
    left = tuple(step for step in steps if step > saved.step)
    if best is None or best > saved.step:
        saved.progress.best = None  # the next one that is scored is the best of those that stay
    return replace(saved, left=left, notes=tuple(notes))


def _listed(folder: Path, notes: list[str]) -> tuple[list[int], int | None, int | None]:
    """The steps in a run's folder, the latest, and the best."""
    latest, best = (_pointer(folder, which, notes) for which in (LATEST, BEST))
    return list(files_by_step(folder)), latest, best


def _pointer(folder: Path, which: str, notes: list[str]) -> int | None:
    try:
        return read_pointer(folder, which)
    except CorruptError as error:
        notes.append(f"the file {which} is damaged ({error.message}); the next save writes it again")
        return None


def _first_whole(folder: Path, candidates: list[int], world: World) -> Saved:
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
            error.hint = f"--resume STEP goes on from an older one: {older}" if older else error.hint
            raise
    assert first is not None
    if others := [str(damage.step) for damage in damaged[1:]]:
        first.hint = f"the checkpoints before it are damaged too: {', '.join(others)}; start a new run with another -o"
    raise world.told(first)


def reason_of(error: AprError) -> str:
    """An error about a checkpoint in a few words."""
    name = Path(error.path).name if error.path else ""
    return " ".join(filter(None, (f"{error.message} in {name}" if name else error.message, error.tensor)))


def _checked(folder: Path, step: int, world: World) -> Saved:
    """The facts of a checkpoint, once all of it is checked. Raises CorruptError, or what keeps it from being read.

    The first fault in the order of what is checked, whichever process finds it, is that of all.
    """
    number, saved, fault = -1, None, None
    with ExitStack() as stack:
        try:
            state = stack.enter_context(open_state(state_file(folder, step)))
            _check_tensors(state, step)
            saved = _saved_of(state, step)
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
        if is_damage and not isinstance(found, CorruptError):  # a file that is missing, or of another kind
            raise CorruptError(found.message, path=found.path, tensor=found.tensor)
        raise found if is_damage else world.told(found, rank)
    assert saved is not None
    return saved


# --- what is checked ---


def _check(state: State, name: str) -> None:
    """Reads a tensor. Raises ChecksumError, RunError where a value is not finite."""
    tensor = state[name]
    if tensor.is_floating_point() and tensor.numel() and not all(torch.isfinite(x) for x in torch.aminmax(tensor)):
        raise RunError("a value of the saved state is not finite", path=state.path, tensor=name)


def _check_model(path: Path, state: State) -> None:
    """Compares a checkpoint's model with its checksum and with the state beside it. Raises AprError."""
    with open_model(path) as model:
        if model.checksum().get("footer") != "ok":
            raise ChecksumError("the checksum is wrong", path=path)
        lineage = model.metadata.get(LINEAGE)
        for name, fact in (("step", "progress.step"), ("tokens", "progress.tokens"), ("config_digest", "digest")):
            found, wanted = _fact(lineage, name), _fact(state.facts, fact)
            if found != wanted:
                raise CorruptError(f"its {LINEAGE}.{name} is {found!r}, the state's {fact} {wanted!r}", path=path)


def is_finished(folder: Path, saved: Saved) -> bool:
    """Whether `model.apr` is whole and of the step that the run continues from: writing it may have failed."""
    try:
        with open_state(state_file(folder, saved.step)) as state:
            _check_model(folder / MODEL, state)
    except AprError:
        return False
    return True


def _check_tensors(state: State, step: int) -> None:
    """Raises CorruptError for tensors that are not masters, moments, "step" and "rng" as they belong together."""
    random = torch.get_rng_state()
    wanted = {"rng": ("U8", tuple(random.shape)), "step": ("F32", ())}
    for name, (_, shape) in state.forms.items():
        kind, _, parameter = name.partition(".")
        if kind == KINDS[0] and parameter:
            wanted |= {f"{other}.{parameter}": ("F32", shape) for other in KINDS}
    for name in (*wanted, *state.forms):
        found = state.forms.get(name)
        if found != wanted.get(name):
            is_extra = name not in wanted
            words = "does not belong to a state" if is_extra else f"is {_form(found)}, not {_form(wanted[name])}"
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
    """Whether it is a list of what evaluations found."""
    return isinstance(value, list) and all(
        isinstance(one, dict) and _is_count(one.get("step")) and all(map(_is_number, one.values())) for one in value
    )


def _is_print(value: object) -> bool:
    return isinstance(value, dict) and isinstance(value.get("print"), str)


# Fact -> (what it must be, whether it is).
_FACTS: dict[str, tuple[str, Callable[[object], bool]]] = {
    "config": ("options", lambda value: isinstance(value, dict)),
    "cursor": ("a number of windows", _is_count),
    "digest": ("a hash", lambda value: isinstance(value, str)),
    "progress.step": ("a step", _is_count),
    "progress.tokens": ("a number of tokens", _is_count),
    "progress.best": ("a score or null", _is_number),
    "progress.evaluations": ("a list of scores", _is_scores),
    "origin.teacher": ("a model or null", lambda value: value is None or _is_print(value)),
    "origin.student": ("a model", _is_print),
    "origin.data": ("a hash or null", lambda value: value is None or isinstance(value, str)),
    "origin.config_digest": ("a hash", lambda value: isinstance(value, str)),
}


def _saved_of(state: State, step: int) -> Saved:
    """What a state says of the run. Raises CorruptError with the fact's name."""

    def fault(name: str, found: object, wanted: str) -> CorruptError:
        words = "is missing" if found is _MISSING else f"is {repr(found)[:80]}, not {wanted}"
        return CorruptError(f"its fact {name} {words}", path=state.path)

    facts = {name: _fact(state.facts, name) for name in _FACTS}
    for name, (wanted, holds) in _FACTS.items():
        if not holds(facts[name]):
            raise fault(name, facts[name], wanted)
    if facts["progress.step"] != step:
        raise fault("progress.step", facts["progress.step"], "the one of the file's name")
    config, origin, progress = (dict(_fact(state.facts, name)) for name in ("config", "origin", "progress"))
    for name in what_fields():
        if name not in config or not is_value(name, config[name]):
            raise fault(f"config.{name}", config.get(name, _MISSING), "a value of that option")
    digest = digest_of(config)
    for name in ("digest", "origin.config_digest"):
        if facts[name] != digest:
            raise fault(name, facts[name], f"the {digest} of its configuration")
    if extra := sorted(set(progress) - {f.name for f in fields(Progress)}):
        raise fault(f"progress.{extra[0]}", progress[extra[0]], "known here")
    return Saved(step, facts["cursor"], Progress(**progress), origin, config)


_MISSING = object()


def _fact(facts: object, name: str) -> Any:
    for key in name.split("."):
        facts = facts.get(key, _MISSING) if isinstance(facts, dict) else _MISSING
    return facts


def leave_behind(folder: Path, saved: Saved) -> None:
    """Makes `latest` name the checkpoint that the run goes on from: later ones are of another line from now on."""
    if _pointer(folder, LATEST, []) != saved.step:
        write_pointer(folder, LATEST, saved.step)


def check_student(folder: Path, saved: Saved, student: NetworkSource) -> None:
    """Raises CorruptError where the checkpoint's model has other dims than the student that it is of."""
    path = model_file(folder, saved.step)
    with open_model(path) as model:
        for name in SIZES:
            found, wanted = getattr(model.hparams, name), getattr(student.hparams, name)
            if found != wanted:
                raise CorruptError(f"its {name} is {found!r}, the student's {wanted!r}", path=path)
