"""Damages model files with knowledge of their formats and looks for wrong outcomes, in processes of their own.

    python tools/fuzz.py [--minutes M | --cases N] [--jobs J] [--seed S] [--plain] [--only PATTERN] [--out DIR]
    python tools/fuzz.py --case NAME          one case again, every target
    python tools/fuzz.py --file FILE.zip      the files of a finding again, every target
    python tools/fuzz.py --minimize NAME --out FILE.zip

A case is a seed and the numbers of its edits, "gguf-bpe/12/77" (tests/support/fuzz_seeds.py, fuzz_formats.py). It is
opened, read, validated and converted (tests/support/fuzz_cases.py) within 2 s of processor time and 512 MB of memory.
Wrong: an exception that is not an AprError, a death, a limit passed, an output that cannot be read or validates worse
than its source, something left behind, "lossless" that is not. The summary is JSON, on standard output and in DIR.
"""

from __future__ import annotations

import argparse
import io
import json
import mmap
import os
import re
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
import zipfile
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from random import Random

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests" / "support")]

import fuzz_cases  # noqa: E402
from fuzz_cases import MEMORY_BYTES, TARGETS, Finding, build, run_case, scratch  # noqa: E402
from fuzz_formats import repaired  # noqa: E402
from fuzz_seeds import Seed, seeds, write  # noqa: E402

_HARD_SECONDS = 6.0
"""Processor time after which a process that heard no signal is killed."""

_WALL_SECONDS = 25.0
_SAVE_SECONDS = 30.0
_FILE_BYTES = 64 << 20
_KEPT_CASES = 400
_MOST_LIVES = 50
_LONGEST_CHAIN = 6


@dataclass
class Total:
    """What many cases came to."""

    cases: int = 0
    cpu_seconds: float = 0.0
    outcomes: set[str] = field(default_factory=set)
    per_seed: Counter[str] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)

    def to_json(self) -> dict[str, object]:
        """Counts, and each distinct finding with its first case."""
        groups: dict[str, list[Finding]] = {}
        for finding in self.findings:
            groups.setdefault(finding.key, []).append(finding)
        return {
            "cases": self.cases,
            "cpu_hours": round(self.cpu_seconds / 3600, 4),
            "outcomes": len(self.outcomes),
            "wrong": len(self.findings),
            "distinct": len(groups),
            "findings": [
                {"count": len(group), **asdict(min(group, key=lambda f: len(f.case)))} for group in groups.values()
            ],
            "per_seed": dict(sorted(self.per_seed.items())),
        }


# --- one process ---


def limit_memory() -> None:
    """From here on the process may take MEMORY_BYTES more than it has, and write no file above 64 MiB.

    For each case anew, because memory that was freed stays with the process.
    """
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return
    now = int(re.findall(r"VmData:\s+(\d+)", status)[0]) << 10
    resource.setrlimit(resource.RLIMIT_DATA, (now + MEMORY_BYTES, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_FSIZE, (_FILE_BYTES, resource.RLIM_INFINITY))


def prepare(known: Mapping[str, Seed], folder: Path) -> None:
    """Loads what cases need, so that none of them pays for it."""
    folder.mkdir(parents=True, exist_ok=True)
    write({"base.gguf": known["gguf-bpe"].files["m.gguf"]}, folder)
    for name in ("hf-bpe", "apr-of-gguf", "gguf-q8", "v1_signed_ed25519", "v1_encrypted_password", "imatrix-old"):
        run_case(name, known[name], folder / "case", sorted(TARGETS))


class Guide:
    """Chooses cases: a seed, or in `share` of them changed files that had an outcome which none had before."""

    def __init__(self, names: list[str], rng: Random, share: float) -> None:
        self._names, self._rng, self._share = names, rng, share
        self._kept: list[str] = []
        self.outcomes: set[str] = set()

    def next(self) -> str:
        """The name of the next case."""
        rng = self._rng
        base = rng.choice(self._kept) if self._kept and rng.random() < self._share else rng.choice(self._names)
        return f"{base}/{rng.getrandbits(32)}"

    def saw(self, case: str, outcomes: set[str]) -> None:
        """Keeps a case whose outcomes are new."""
        if outcomes - self.outcomes:
            self.outcomes |= outcomes
            if case.count("/") < _LONGEST_CHAIN:
                self._kept = [*self._kept[-_KEPT_CASES:], case]


class Slot:
    """Memory that a worker and the one who watches it share: the case and the target at which it is."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 4096)

    def set(self, text: str, began: float) -> None:
        """Says where the worker is, and its processor time when the case began."""
        raw = text.encode("utf-8", "replace")[:4000]
        self._memory[: 12 + len(raw)] = struct.pack("<dI", began, len(raw)) + raw

    def get(self) -> tuple[float, str]:
        """(processor time when the case began, case and target)."""
        began, n = struct.unpack("<dI", self._memory[:12])
        return began, self._memory[12 : 12 + n].decode("utf-8", "replace")


def work(known: Mapping[str, Seed], next_case: Callable[[], str | None], guide: Guide, slot: Slot, pipe: int) -> None:
    """Runs cases until there are none left, and writes what came of each to `pipe`."""
    folder = scratch() / f"apr-fuzz-{os.getpid()}"
    stream = os.fdopen(pipe, "w", buffering=1)
    try:
        prepare(known, folder)
        while (case := next_case()) is not None:
            began = time.process_time()
            tell = partial(_tell, slot, case, began)
            tell("build")
            limit_memory()
            run = run_case(case, build(known, case), folder / "case", tell=tell)
            guide.saw(case, run.outcomes)
            row = {
                "case": case,
                "cpu": time.process_time() - began,
                "outcomes": sorted(run.outcomes),
                "findings": [asdict(finding) for finding in run.findings],
            }
            stream.write(json.dumps(row) + "\n")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _tell(slot: Slot, case: str, began: float, target: str) -> None:
    slot.set(f"{case}\t{target}", began)


# --- many processes ---


@dataclass
class _Worker:
    pid: int
    pipe: int
    slot: Slot
    number: int
    lives: int
    left: int | None
    seen: str = ""
    since: float = field(default_factory=time.monotonic)
    rest: bytes = b""
    killed: str = ""


class Fuzzer:
    """Runs workers, collects what they find, and starts another where one died."""

    def __init__(self, known: Mapping[str, Seed], names: list[str], seed: int, share: float = 0.4) -> None:
        self._known, self._names, self._seed, self._share = known, names, seed, share
        self.total = Total()
        self._workers: list[_Worker] = []

    def run(
        self, jobs: int, *, seconds: float | None = None, cases: int | None = None, out: Path | None = None
    ) -> None:
        """Until the time is over, or each worker has had its share of the cases; saves now and then in `out`."""
        end = time.monotonic() + seconds if seconds is not None else None
        share = -(-cases // jobs) if cases is not None else None
        for number in range(jobs):
            self._start(number, 0, end, share)
        saved = time.monotonic()
        try:
            while self._workers and (end is None or time.monotonic() < end + _WALL_SECONDS):
                time.sleep(0.1)
                if out is not None and time.monotonic() > saved + _SAVE_SECONDS:
                    save(self.total, self._known, out)
                    saved = time.monotonic()
                for worker in list(self._workers):
                    self._watch(worker, end)
        finally:
            for worker in self._workers:
                os.kill(worker.pid, signal.SIGKILL)
                os.waitpid(worker.pid, 0)
                shutil.rmtree(scratch() / f"apr-fuzz-{worker.pid}", ignore_errors=True)

    def _start(self, number: int, lives: int, end: float | None, share: int | None) -> None:
        slot = Slot()
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.close(reader)
                guide = Guide(self._names, Random(f"{self._seed}:{number}:{lives}"), self._share)
                left = iter(range(share)) if share is not None else None

                def next_case() -> str | None:
                    if (end is not None and time.monotonic() > end) or (left is not None and next(left, None) is None):
                        return None
                    return guide.next()

                work(self._known, next_case, guide, slot, writer)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        os.close(writer)
        self._workers.append(_Worker(pid, reader, slot, number, lives, share))

    def _watch(self, worker: _Worker, end: float | None) -> None:
        self._read(worker)
        began, at = worker.slot.get()
        if at != worker.seen:
            worker.seen, worker.since = at, time.monotonic()
        pid, status = os.waitpid(worker.pid, os.WNOHANG)
        if pid == 0:
            used = _cpu_seconds(worker.pid) - began
            if at and not worker.killed and (used > _HARD_SECONDS or time.monotonic() - worker.since > _WALL_SECONDS):
                worker.killed = (
                    f"killed after {used:.1f} s of processor time, {time.monotonic() - worker.since:.0f} s of waiting"
                )
                os.kill(worker.pid, signal.SIGKILL)
            return
        self._read(worker)
        os.close(worker.pipe)
        self._workers.remove(worker)
        shutil.rmtree(scratch() / f"apr-fuzz-{worker.pid}", ignore_errors=True)
        if status == 0:
            return
        case, _, target = at.partition("\t")
        why = worker.killed or f"wait status {status}"
        kind = "time" if worker.killed else "died"
        self.total.findings.append(Finding(case, target, kind, f"{kind}: {target} {why.split(' after')[0]}", why))
        left = worker.left - 1 if worker.left is not None else None
        if case and left != 0 and worker.lives < _MOST_LIVES:
            self._start(worker.number, worker.lives + 1, end, left)

    def _read(self, worker: _Worker) -> None:
        while True:
            try:
                data = os.read(worker.pipe, 1 << 20)
            except BlockingIOError:
                return
            if not data:
                return
            *lines, worker.rest = (worker.rest + data).split(b"\n")
            for line in lines:
                row = json.loads(line)
                worker.left = worker.left - 1 if worker.left is not None else None
                self.total.cases += 1
                self.total.cpu_seconds += row["cpu"]
                self.total.outcomes |= set(row["outcomes"])
                self.total.per_seed[row["case"].partition("/")[0]] += 1
                self.total.findings += [Finding(**finding) for finding in row["findings"]]


def _cpu_seconds(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# --- findings as files ---


def pack(seed: Seed) -> bytes:
    """The files of a case as a zip archive that is the same each time."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, data in {**seed.files, ".main": f"{seed.role} {seed.main}".encode()}.items():
            archive.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED)
    return out.getvalue()


def unpack(path: Path) -> Seed:
    """The case in a zip archive."""
    with zipfile.ZipFile(path) as archive:
        files = {info.filename: archive.read(info) for info in archive.infolist()}
    role, _, main = files.pop(".main").decode().partition(" ")
    return Seed(files, main, role)


def minimized(seed: Seed, finding: Finding, at: Path) -> Seed:
    """A smaller case with the same finding: without files, with ranges left out or zeroed."""
    targets = [name for name in TARGETS if name in finding.target.split()]

    def shows(changed: Seed) -> bool:
        return finding.key in {found.key for found in run_case("minimize", changed, at, targets).findings}

    for name in list(seed.files):
        fewer = {n: data for n, data in seed.files.items() if n != name}
        if name != seed.main and fewer and shows(Seed(fewer, seed.main, seed.role)):
            seed = Seed(fewer, seed.main, seed.role)
    for name in list(seed.files):
        step = len(seed.files[name]) // 2
        while step >= 32:
            position = 0
            while position < len(seed.files[name]):
                data = seed.files[name]
                cut = data[:position] + data[position + step :]
                zeroed = data[:position] + bytes(len(data[position : position + step])) + data[position + step :]
                for smaller in (cut, zeroed) if data[position : position + step].strip(b"\0") else ():
                    tried = Seed({**seed.files, name: repaired(smaller, Random(0))}, seed.main, seed.role)
                    if shows(tried):
                        seed = tried
                        break
                position += step
            step //= 2
    return seed


def save(total: Total, known: Mapping[str, Seed], out: Path) -> None:
    """Writes the summary, and the files of each distinct finding."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "summary.json").write_text(json.dumps(total.to_json(), indent=1))
    for number, finding in enumerate({f.key: f for f in total.findings}.values()):
        if finding.case:
            (out / f"finding-{number:03d}.zip").write_bytes(pack(build(known, finding.case)))
            (out / f"finding-{number:03d}.txt").write_text(f"{finding.case}\n{finding.target}\n{finding.text}\n")


def _show(name: str, seed: Seed) -> int:
    with tempfile.TemporaryDirectory(dir=scratch()) as folder:
        write({"base.gguf": seeds()["gguf-bpe"].files["m.gguf"]}, Path(folder))
        run = run_case(name, seed, Path(folder) / "case", sorted(TARGETS))
    for finding in run.findings:
        print(f"--- {finding.key}\n{finding.target}\n{finding.text}")
    print(json.dumps({"case": name, "outcomes": sorted(run.outcomes), "wrong": len(run.findings)}, indent=1))
    return 1 if run.findings else 0


def main() -> int:
    """Runs the fuzzer; exit code 1 for a wrong outcome."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, help="how long")
    parser.add_argument("--cases", type=int, help="or how many cases (default: 2000)")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0, help="another number, other cases")
    parser.add_argument("--only", default="", help="seeds whose name has this pattern")
    parser.add_argument("--plain", action="store_true", help="begin with seeds alone: the same cases on every machine")
    parser.add_argument("--out", type=Path, help="folder for the summary and the files of the findings")
    parser.add_argument("--case", help="run this case alone, every target")
    parser.add_argument("--file", type=Path, help="run the files of this archive, every target")
    parser.add_argument("--minimize", help="make this case (or archive) smaller")
    arguments = parser.parse_args()
    known = seeds()
    if arguments.case:
        return _show(arguments.case, build(known, arguments.case))
    if arguments.file:
        return _show(arguments.file.name, unpack(arguments.file))
    if arguments.minimize:
        name = arguments.minimize
        seed = unpack(Path(name)) if name.endswith(".zip") else build(known, name)
        with tempfile.TemporaryDirectory(dir=scratch()) as folder:
            first = run_case(name, seed, Path(folder) / "case", sorted(TARGETS)).findings[0]
            small = minimized(seed, first, Path(folder) / "case")
        target = arguments.out or Path("finding.zip")
        target.write_bytes(pack(small))
        print(f"{first.key}: {target.stat().st_size} bytes")
        return 0
    names = [name for name in known if re.search(arguments.only, name)]
    fuzzer = Fuzzer(known, names, arguments.seed, 0.0 if arguments.plain else 0.4)
    minutes: float | None = arguments.minutes
    cases = arguments.cases if minutes is not None else arguments.cases or 2000
    try:
        fuzzer.run(
            arguments.jobs, seconds=minutes * 60 if minutes is not None else None, cases=cases, out=arguments.out
        )
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
    if arguments.out:
        save(fuzzer.total, known, arguments.out)
    print(json.dumps(fuzzer.total.to_json(), indent=1))
    return 1 if fuzzer.total.findings else 0


__all__ = ["Fuzzer", "Total", "fuzz_cases", "pack", "unpack"]

if __name__ == "__main__":
    sys.exit(main())
