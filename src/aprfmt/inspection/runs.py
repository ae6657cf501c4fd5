"""The training runs below a folder: where each one is, how far it came, and whether it still goes on."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from aprfmt.errors import AprError, LimitError, NotFoundError, storage_errors
from aprfmt.formats import path_text
from aprfmt.inspection.run_page import RunReport
from aprfmt.inspection.run_report import is_run, number, summarise
from aprfmt.limits import MAX_RUN_FOLDERS
from aprfmt.types import PathLike

_DEPTH = 4
"""Levels of folders that are searched."""


@dataclass(frozen=True, slots=True)
class RunRow:
    """One run.

    Attributes:
        path, name: its folder, and that relative to the folder that was searched.
        state: "running", "done", "stopped" (by a signal), "failed", or "killed" (it ended without a word).
        command: "distill" or "pretrain".
        steps, total_steps, tokens: progress; `total_steps` is None if the run did not log it.
        loss: training loss since the step that was logged before, as the run prints it, in nats.
        objective: what the loss is made of: "CE", or of a distillation such as "0.8 KL + 0.2 CE".
        held_out_ce, kl: of the last evaluation, in nats; `kl` is None without a teacher.
        tokens_per_s: median.
        heard_at: seconds since 1970 of the last line.
    """

    path: str
    name: str
    state: str
    command: str
    steps: int
    total_steps: int | None
    tokens: int
    loss: float | None
    objective: str
    held_out_ce: float | None
    kl: float | None
    tokens_per_s: float | None
    heard_at: float | None


@dataclass(frozen=True, slots=True)
class Runs:
    """The result of `runs`.

    Attributes:
        folder: as given.
        runs: sorted by name.
        skipped: folders of runs that cannot be read, each with the reason.
    """

    folder: str
    runs: Sequence[RunRow]
    skipped: Mapping[str, str]

    def to_json(self) -> dict[str, object]:
        """The object of `apr runs --json`."""
        return {"folder": self.folder, "runs": [asdict(run) for run in self.runs], "skipped": dict(self.skipped)}


def runs(folder: PathLike = ".") -> Runs:
    """Lists the training runs in `folder` and up to four levels below, without following symlinks.

    Raises NotFoundError if `folder` is not a folder, LimitError if it has too many subfolders.
    """
    top = Path(path_text(folder, "folder"))
    if not top.is_dir():
        raise NotFoundError("no such folder", path=top)
    found, skipped = list[RunRow](), dict[str, str]()
    with storage_errors(top):
        for path in sorted(_run_folders(top)):
            try:
                found.append(_row(path, top))
            except AprError as error:
                skipped[str(path)] = error.message
    return Runs(str(top), found, skipped)


def _run_folders(top: Path) -> Iterator[Path]:
    count, waiting = 0, [(top, 0)]
    while waiting:
        folder, depth = waiting.pop()
        count += 1
        if count > MAX_RUN_FOLDERS:
            raise LimitError(f"more than {MAX_RUN_FOLDERS:,} subfolders", path=top, hint="pass one of its subfolders")
        if is_run(folder):
            yield folder
            continue
        if depth == _DEPTH:
            continue
        try:
            entries = [*os.scandir(folder)]
        except PermissionError:
            continue
        inner = (e for e in entries if not e.name.startswith(".") and e.is_dir(follow_symlinks=False))
        waiting += [(Path(entry.path), depth + 1) for entry in inner]


def _row(path: Path, top: Path) -> RunRow:
    body = summarise(path)
    last = body["after"] or body["before"] or {}
    total = body["total_steps"]
    return RunRow(
        path=str(path), name=str(path.relative_to(top)) if path != top else path.resolve().name, state=state_of(body),
        command=body["command"], steps=body["steps"], total_steps=None if total is None else int(total),
        tokens=round(body["tokens"]), loss=body["loss"], objective=_objective(body["command"], body["config"]),
        held_out_ce=last.get("ce"), kl=last.get("kl"), tokens_per_s=body["tokens_per_s"], heard_at=body["heard_at"],
    )  # fmt: skip


_DIVERGENCES = {"forward": "KL", "reverse": "reverse KL", "jsd": "JSD"}


def _objective(command: str, config: Mapping[str, object]) -> str:
    """What a training loss is made of, by the options that the run logged."""
    weight = number(config.get("kd_weight")) if command == "distill" else 0.0
    if weight is None:
        return "-"
    parts = ((weight, _DIVERGENCES.get(str(config.get("loss")), "KL")), (1 - weight, "CE"))
    return " + ".join(name if part == 1 else f"{part:.3g} {name}" for part, name in parts if part)


def state_of(body: RunReport) -> str:
    """The state of a run, see RunRow."""
    return "stopped" if body["status"] == "interrupted" else body["status"]
