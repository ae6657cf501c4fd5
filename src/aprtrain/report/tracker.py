"""Logs a run's metrics to TensorBoard or Weights & Biases, if installed."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import TypeGuard

from aprfmt.errors import MissingDependencyError

_GROUPS = {"step": "train", "evaluation": "held-out"}
_WANDB_ID = "wandb.id"

Track = Callable[[str, Mapping[str, object]], None]
"""Called with an event and its values, like Recorder.record."""


def check_tracker(kind: str | None) -> None:
    """Raises MissingDependencyError if the package of `kind` is not installed."""
    try:
        import_module(kind or "json")
    except ImportError as error:
        hint = f"pip install {kind}, or leave out --log-to"
        raise MissingDependencyError(f"--log-to {kind} needs {kind}", hint=hint) from error


def open_tracker(kind: str, folder: Path, config: Mapping[str, object], resumed_step: int | None) -> Track:
    """A function that logs the metrics of the run in `folder`; a resumed run continues after `resumed_step`.

    Writes to `folder`, from the first step on: a run that is refused before leaves no files. The function raises
    whatever the library raises.
    """
    opened: tuple[_Put, Callable[[], None]] | None = None
    waiting: list[tuple[str, Mapping[str, object]]] = []

    def track(event: str, values: Mapping[str, object]) -> None:
        """Buffers events until the first step, then opens the backend and logs them; closes it on "end" or "error"."""
        nonlocal opened
        waiting.append((event, values))
        if event == "step" and opened is None:
            opened = (_tensorboard if kind == "tensorboard" else _wandb)(folder, config, resumed_step)
        while opened is not None and waiting:
            _pass_on(*opened, *waiting.pop(0))

    return track


def _pass_on(put: _Put, close: Callable[[], None], event: str, values: Mapping[str, object]) -> None:
    if event in _GROUPS:
        put(
            {f"{_GROUPS[event]}/{name}": x for name, x in values.items() if _is_number(x) and name != "step"},
            int(str(values["step"])),
        )
    elif event in ("end", "error"):
        close()


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


_Put = Callable[[dict[str, float], int], None]


def _tensorboard(folder: Path, config: Mapping[str, object], resumed: int | None) -> tuple[_Put, Callable[[], None]]:
    purge = None if resumed is None else resumed + 1
    writer = import_module("torch.utils.tensorboard").SummaryWriter(str(folder / "tensorboard"), purge_step=purge)
    writer.add_text("config", "\n".join(f"    {name}: {value}" for name, value in config.items()))

    def put(numbers: dict[str, float], step: int) -> None:
        for name, value in numbers.items():
            writer.add_scalar(name, value, step)

    return put, writer.close


def _wandb(folder: Path, config: Mapping[str, object], resumed: int | None) -> tuple[_Put, Callable[[], None]]:
    path = folder / _WANDB_ID
    if resumed is None or not path.exists():
        path.write_text(secrets.token_hex(4))
    run = import_module("wandb").init(
        project="apr", name=folder.resolve().name, dir=str(folder), config=dict(config), id=path.read_text(),
        resume="allow",
    )  # fmt: skip
    return run.log, run.finish
