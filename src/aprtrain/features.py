"""Optional features of the trainer: what each speeds up, how to install it, and which of them a run uses or not.

`TABLE` lists them. Code that chooses between a feature and its fallback notes the choice in the current `KernelRecord`;
the log, metrics.jsonl, `--plan` and `apr doctor` read that record.

    python -m aprtrain.features     # the state of each on this machine, as JSON
"""

from __future__ import annotations

import importlib
import json
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import TypedDict


@dataclass(frozen=True, slots=True)
class Feature:
    """A row of the table.

    Attributes:
        label: its name in messages.
        speeds_up: what is slower, larger or missing without it.
        mend: what to type or change to enable it.
        package, module: the distribution that provides it, and the module to import; "" if torch or the machine does.
    """

    label: str
    speeds_up: str
    mend: str
    package: str = ""
    module: str = ""


_FLASH4 = "pip install 'flash-attn-4[cu13]==4.0.0b36' quack-kernels==0.6.5 'nvidia-cutlass-dsl[cu13]==4.7.1'"
"""The versions of the extra `flash4`."""

TABLE: dict[str, Feature] = {
    "flash4": Feature(
        "FlashAttention 4", "attention of packed documents and of the student", _FLASH4, "flash-attn-4",
        "flash_attn.cute.interface",
    ),
    "cudnn": Feature("cuDNN attention", "attention of unpacked sequences on Hopper and later", "pip install -U torch"),
    "flash": Feature("flash attention", "attention without materializing scores", "choose another model"),
    "quack": Feature(
        "quack", "gated feed-forward layers, with less activation memory", _FLASH4, "quack-kernels",
        "quack.gemm_interface",
    ),
    "triton": Feature(
        "Triton", "the loss, AdamW, gated layers and quantized teachers on a GPU", "pip install triton", "triton",
        "triton",
    ),
    "compile": Feature("torch.compile", "all layers", "unset TORCH_COMPILE_DISABLE and TORCHDYNAMO_DISABLE"),
    "fp8": Feature("fp8 matmuls", "the teacher", "use a GPU of compute capability 8.9 or later"),
    "bf16": Feature("bf16", "halving the memory of training", "leave out --device cpu on a machine with a GPU"),
    "blocks": Feature(
        "block-resident weights", "keeping a quantized teacher as small in memory as its file",
        "apr quantize TEACHER q4_k_m, from its original weights",
    ),
    "isal": Feature("isal", "checksums of checkpoints", "pip install isal", "isal", "isal.isal_zlib"),
    "blake3": Feature("blake3", "digests of --hash", "pip install blake3", "blake3", "blake3"),
    "threads": Feature("full multithreading", "all training on a CPU", "unset OMP_NUM_THREADS"),
    "mfu": Feature("MFU", "logging the MFU", "none needed"),
    "locks": Feature(
        "a lock on the folder", "preventing two runs in one folder",
        "write to a disk that supports flock",
    ),
}  # fmt: skip
"""Feature -> its row."""


def reason_of(error: BaseException) -> str:
    """The type and the text of an exception, on one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a feature can be used; `reason` says why not."""

    ok: bool
    reason: str = ""

    def __bool__(self) -> bool:
        return self.ok


@cache
def installed(name: str) -> str | None:
    """Version of the feature's package, None if it is not installed."""
    try:
        return version(TABLE[name].package)
    except PackageNotFoundError:
        return None


def label_of(name: str) -> str:
    """A feature's label with the version of its package."""
    return " ".join(filter(None, (TABLE[name].label, installed(name) if TABLE[name].package else None)))


@cache
def importable(name: str) -> Verdict:
    """Whether the module of a feature can be imported. Imports it."""
    row = TABLE[name]
    try:
        if find_spec(row.module.partition(".")[0]) is None:
            return Verdict(False, "not installed")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module(row.module)
    except Exception as error:  # importing a package runs its code
        return Verdict(False, reason_of(error))
    return Verdict(True)


@dataclass(frozen=True, slots=True)
class Miss:
    """A feature that was requested, or would apply, and is not used."""

    feature: str
    reason: str
    mend: str

    def text(self) -> str:
        """One line of a log."""
        row = TABLE[self.feature]
        if self.feature == "bf16":
            return f"training in float32: {self.reason}"
        return f"{row.label} is not used: {self.reason}. It is for {row.speeds_up}. To fix: {self.mend}"


class Selection(TypedDict):
    """JSON data of a Record.

    Attributes:
        used: what computes each part of a run.
        not_used: `feature`, `reason` and `mend` of each Miss.
    """

    used: dict[str, str]
    not_used: list[dict[str, str]]


class KernelRecord:
    """Which features a run uses, and which not.

    Attributes:
        tell: called with each Miss that is noted from now on.
    """

    def __init__(self) -> None:
        self._used: dict[str, dict[str, str]] = {}
        self._missed: dict[tuple[str, str], Miss] = {}
        self.tell: Callable[[Miss], None] = lambda miss: None

    def use(self, part: str, what: str, who: str = "") -> None:
        """`what` computes this part of a run, for `who` (student, teacher) if they differ."""
        self._used.setdefault(part, {})[who] = what

    def miss(self, feature: str, reason: str, mend: str = "") -> None:
        """A feature of the table is not used; each reason is reported once."""
        found = Miss(feature, reason, mend or TABLE[feature].mend)
        if (feature, reason) not in self._missed:
            self._missed[feature, reason] = found
            self.tell(found)

    def check(self, feature: str, verdict: Verdict) -> bool:
        """Whether the feature can be used; notes why not."""
        if not verdict:
            self.miss(feature, verdict.reason)
        return verdict.ok

    @property
    def missed(self) -> list[Miss]:
        """In the order in which they were noted."""
        return list(self._missed.values())

    def line(self) -> str:
        """The kernels in use, in one line."""
        return "kernels: " + ", ".join(f"{part} {_joined(found)}" for part, found in self._used.items())

    def to_json(self) -> Selection:
        """What a run uses, as JSON data."""
        used = {part: _joined(found) for part, found in self._used.items()}
        return {"used": used, "not_used": [asdict(miss) for miss in self.missed]}


def _joined(found: dict[str, str]) -> str:
    if len(set(found.values())) == 1:
        return next(iter(found.values()))
    return " and ".join(f"{what} ({who})" if who else what for who, what in found.items())


_CURRENT: ContextVar[KernelRecord] = ContextVar("aprtrain.features", default=KernelRecord())  # noqa: B039 - of who records nothing


def current() -> KernelRecord:
    """The record of the current run."""
    return _CURRENT.get()


@contextmanager
def recording() -> Iterator[KernelRecord]:
    """A new record, current while the block runs."""
    record = KernelRecord()
    token = _CURRENT.set(record)
    try:
        yield record
    finally:
        _CURRENT.reset(token)


def note_checksums() -> None:
    """Notes which libraries compute checksums."""
    record = current()
    record.use("checksums", label_of("isal") if record.check("isal", importable("isal")) else "zlib")
    record.check("blake3", importable("blake3"))


def main() -> None:
    """Prints the state of every feature with a package: version, whether it can be imported, why not, what to do."""
    with redirect_stdout(sys.stderr):  # packages may greet
        rows = {
            name: {
                "label": row.label, "package": row.package, "version": installed(name), "speeds_up": row.speeds_up,
                "usable": importable(name).ok, "reason": importable(name).reason, "mend": row.mend,
            }
            for name, row in TABLE.items()
            if row.package
        }  # fmt: skip
    print(json.dumps(rows))  # noqa: T201 - for a parent process


if __name__ == "__main__":
    main()
