"""Checks what is installed, what works, and what is missing for which command."""

from __future__ import annotations

import json
import os
import platform
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.resources import as_file, files
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement

import aprfmt
from aprfmt.codecs import backend
from aprfmt.errors import AprError, MissingDependencyError
from aprfmt.formats.hub_errors import cache_folder
from aprfmt.io import child
from aprfmt.io.cache import cache_home
from aprfmt.llama.client import PROMPT, Llama
from aprfmt.text import first_few, format_bytes

Status = Literal["ok", "absent", "warn", "fail"]

EXTRAS = {
    "llama": ("xllamacpp", "run, bench, qa, imatrix, export --verify"),
    "train": ("torch", "distill, pretrain, eval on a GPU"),
    "hub": ("huggingface_hub", "hf:// addresses, push"),
    "sign": ("model-signing", "sign, verify, --require-signature"),
    "fast": ("isal", "faster checksums"),
}
"""Extra -> (its package, the commands that need it)."""

_PINNED = "flash4"
"""The extra whose versions are pinned."""

_LIST_FEATURES = "python -m aprtrain.features shows why"
_LEAST_PYTHON = (3, 11)
_LITTLE_DISK = 2_000_000_000
_TORCH_SECONDS = 120.0
_TORCH = """
import json, torch
names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
print(json.dumps({"version": torch.__version__, "cuda": torch.version.cuda, "names": names}))
"""


@dataclass(frozen=True, slots=True)
class DoctorFinding:
    """One check.

    Attributes:
        id: stable name, such as "llama.cpp".
        status: "ok"; "absent": optional and missing; "warn"; "fail": installed, but does not work.
        message: what was found.
        hint: what to type next, if anything.
    """

    id: str
    status: Status
    message: str
    hint: str | None = None


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The result of `doctor`.

    Attributes:
        version: version of this package.
        findings: one entry per check, in order.
        passed: whether no check failed.
    """

    version: str
    findings: list[DoctorFinding]

    @property
    def passed(self) -> bool:
        """Whether no check failed; missing packages and warnings are not failures."""
        return all(finding.status != "fail" for finding in self.findings)

    def to_json(self) -> dict[str, object]:
        """The object of `apr doctor --json`."""
        return asdict(self) | {"passed": self.passed}


def doctor() -> Diagnosis:
    """Checks Python, packages, llama.cpp (with a tiny model), CPU, memory, GPU, the trainer's features and disks."""
    return Diagnosis(aprfmt.__version__, [finding for look in _CHECKS for finding in look()])


def _python() -> Iterator[DoctorFinding]:
    text = f"{platform.python_implementation()} {platform.python_version()} on {platform.system()} {platform.machine()}"
    if sys.version_info < _LEAST_PYTHON or sys.maxsize < 1 << 32:
        yield DoctorFinding("python", "fail", f"{text}; 64 bits and {'.'.join(map(str, _LEAST_PYTHON))} are required")
    else:
        yield DoctorFinding("python", "ok", text)


def _packages() -> Iterator[DoctorFinding]:
    """The package's own requirements, with their versions."""
    try:
        found = _compare(_required())
    except PackageNotFoundError:
        yield DoctorFinding(
            "packages", "warn", "aprfmt runs from a source folder and is not installed", "pip install ."
        )
        return
    if found.wrong:
        yield DoctorFinding("packages", "fail", "; ".join(found.wrong), _install(found.mend))
    else:
        yield DoctorFinding("packages", "ok", first_few(found.right, len(found.right)))


def _pins() -> Iterator[DoctorFinding]:
    """The kernels for Hopper GPUs, in the versions that were measured together."""
    with suppress(PackageNotFoundError):  # of aprfmt, which _packages reports
        pinned = _required(_PINNED)
        found, name = _compare(pinned), f"extra {_PINNED}"
        if not pinned:  # metadata of another version
            return
        if found.absent == len(pinned):
            yield DoctorFinding(name, "absent", "not installed; speeds up training on a Hopper GPU", _install(pinned))
        elif found.wrong:
            text = f"{'; '.join(found.wrong)}: versions differ from the tested combination"
            yield DoctorFinding(name, "warn", text, _install(pinned))
        else:
            yield DoctorFinding(name, "ok", f"{', '.join(found.right)}: the tested combination of versions")


def _required(extra: str = "") -> list[Requirement]:
    """The requirements on this machine; with an extra, those that it adds. Raises PackageNotFoundError."""
    every = [Requirement(text) for text in requires("aprfmt") or []]
    always = [r for r in every if r.marker is None or r.marker.evaluate({"extra": ""})]
    if not extra:
        return always
    return [r for r in every if r not in always and r.marker is not None and r.marker.evaluate({"extra": extra})]


@dataclass
class _Compared:
    """Installed packages compared with requirements: those that match, those that do not, and how to fix them."""

    right: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    mend: list[Requirement] = field(default_factory=list)
    absent: int = 0


def _compare(requirements: Iterable[Requirement]) -> _Compared:
    found = _Compared()
    for requirement in requirements:
        try:
            installed = version(requirement.name)
        except PackageNotFoundError:
            found.absent += 1
            found.wrong.append(f"{requirement.name} is missing")
            found.mend.append(requirement)
            continue
        if requirement.specifier.contains(installed, prereleases=True):
            found.right.append(f"{requirement.name} {installed}")
        else:
            found.wrong.append(f"{requirement.name} is {installed}, not {requirement.specifier}")
            found.mend.append(requirement)
    return found


def _install(requirements: Iterable[Requirement]) -> str:
    """The line that installs them."""
    named = ((r, f"[{','.join(sorted(r.extras))}]" if r.extras else "") for r in requirements)
    return shlex.join(["pip", "install", *(f"{r.name}{extras}{r.specifier}" for r, extras in named)])


def _extras() -> Iterator[DoctorFinding]:
    for extra, (package, commands) in EXTRAS.items():
        if find_spec(package) is not None:
            yield DoctorFinding(f"extra {extra}", "ok", f"{package} {_version(package)}: {commands}")
        else:
            yield DoctorFinding(
                f"extra {extra}", "absent", f"not installed; needed for {commands}", f"pip install {package}"
            )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "of unknown version"


def _quantizers() -> Iterator[DoctorFinding]:
    why = backend.absence()
    if not why:
        yield DoctorFinding("libggml", "ok", "quantizes to every llama.cpp type")
    else:
        yield DoctorFinding("libggml", "warn", f"{why}; some types cannot be written", "pip install libggml-python")


def _llama() -> Iterator[DoctorFinding]:
    tiny = as_file(files("aprfmt.cli") / "demo-tiny.gguf")
    try:
        with tiny as path, Llama(path) as llama:
            llama.generate(PROMPT, 1)
            engine, system = llama.engine, llama.system()
    except MissingDependencyError as error:
        yield DoctorFinding("llama.cpp", "absent", error.message, error.hint)
    except AprError as error:
        yield DoctorFinding("llama.cpp", "fail", error.message, error.hint)
    else:
        off = engine.endswith("off")
        known = ", ".join(
            part.split(" = ")[0].rpartition(": ")[2] for part in system.split(" | ") if part.endswith("= 1")
        )
        amx = "; it crashes with repacked weights (AMX reported but not permitted?), so repacking is off" if off else ""
        yield DoctorFinding("llama.cpp", "warn" if off else "ok", f"{engine} works, built for {known}{amx}")


def _machine() -> Iterator[DoctorFinding]:
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    lines = _lines("/proc/cpuinfo")
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    flags = next(({*line.split()} for line in lines if line.startswith("flags")), set())
    known = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "avx_vnni", "amx_tile") if flag in flags]
    text = f"{processors} processors {name}".strip() + (f" ({', '.join(known)})" if known else "")
    yield DoctorFinding("processor", "ok", text)
    memory = {line.partition(":")[0]: line.split()[1] for line in _lines("/proc/meminfo") if len(line.split()) > 1}
    if {"MemTotal", "MemAvailable"} <= memory.keys():
        total, free = (int(memory[key]) << 10 for key in ("MemTotal", "MemAvailable"))
        yield DoctorFinding("memory", "ok", f"{format_bytes(total)}, {format_bytes(free)} of it available")


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(errors="replace").splitlines()
    except OSError:
        return []


def _gpu() -> Iterator[DoctorFinding]:
    """torch runs in a separate process: importing it takes seconds, and a broken driver may kill it."""
    if find_spec("torch") is None:
        return
    text = child.run(["-c", _TORCH], _TORCH_SECONDS)
    try:
        found = json.loads(text) if text is not None else None
    except ValueError:
        found = None
    if found is None:
        yield DoctorFinding("gpu", "fail", "torch cannot be imported", 'python -c "import torch" shows why')
    elif found["names"]:
        yield DoctorFinding("gpu", "ok", f"{', '.join(found['names'])}; torch {found['version']}, CUDA {found['cuda']}")
    elif shutil.which("nvidia-smi") is not None:
        yield DoctorFinding("gpu", "warn", f"torch {found['version']} finds no GPU; compare with nvidia-smi")
    else:
        yield DoctorFinding("gpu", "absent", f"torch {found['version']} finds no GPU: training runs on the CPU")


def _features() -> Iterator[DoctorFinding]:
    """The trainer's optional packages are imported in a separate process, since that runs their code."""
    if find_spec("torch") is None:
        return
    text = child.run(["-m", "aprtrain.features"], _TORCH_SECONDS)
    try:
        rows = json.loads(text) if text is not None else None
    except ValueError:
        rows = None
    if rows is None:
        yield DoctorFinding("trainer", "fail", "probing its optional features crashes the process", _LIST_FEATURES)
        return
    for name, row in rows.items():
        label = " ".join(filter(None, (row["label"], row["version"])))
        if row["usable"]:
            yield DoctorFinding(f"trainer: {name}", "ok", f"{label}, for {row['speeds_up']}")
        else:
            status: Status = "absent" if row["version"] is None else "fail"
            text = f"{label} is not usable: {row['reason']}; it is for {row['speeds_up']}"
            yield DoctorFinding(f"trainer: {name}", status, text, row["mend"])


def _disks() -> Iterator[DoctorFinding]:
    for name, find in (("current folder", os.getcwd), ("temporary files", tempfile.gettempdir)):
        try:
            free = shutil.disk_usage(place := find()).free
        except OSError as error:
            yield DoctorFinding(f"disk: {name}", "fail", f"none: {error.strerror}", "cd to an existing folder")
            continue
        status: Status = "ok" if free >= _LITTLE_DISK else "warn"
        yield DoctorFinding(f"disk: {name}", status, f"{format_bytes(free)} free at {place}")
    for name, folder, hint in (
        ("exports for llama.cpp", cache_home() / "exports", "APR_CACHE_SIZE=20GB limits it; it can be deleted"),
        ("importance matrices", cache_home() / "imatrix", "it can be deleted"),
        ("hub models", cache_folder(), "list it with: hf cache"),
    ):
        count, size = _size_of(folder)
        if count:
            yield DoctorFinding(f"cache: {name}", "ok", f"{format_bytes(size)} in {count:,} files at {folder}", hint)


def _size_of(folder: Path) -> tuple[int, int]:
    """(files, bytes); links of the hub's cache count once, at their target."""
    count = size = 0
    for where, _, names in os.walk(folder):
        for name in names:
            try:
                status = os.lstat(os.path.join(where, name))
            except OSError:
                continue
            count, size = count + 1, size + status.st_size
    return count, size


_CHECKS: tuple[Callable[[], Iterator[DoctorFinding]], ...] = (
    _python, _packages, _extras, _pins, _quantizers, _llama, _machine, _gpu, _features, _disks,
)  # fmt: skip
