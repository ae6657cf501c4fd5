"""Measuring for the bench scripts: whole processes that take turns, beside plain writes of the same bytes.

Every contestant is a process of its own. So its peak memory is its own too, as long as this process stays small:
Linux counts the memory of the process that started it. Hence nothing here imports numpy or keeps data, and the
floors run as children as well: python tools/bench_measure.py write | copy ...
"""

from __future__ import annotations

import functools
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PIECE = 1 << 20
_POOL = 256 * PIECE  # more than any cache, so that a floor reads memory as a conversion does
_PACKAGES = ("numpy", "isal", "torch", "safetensors", "gguf", "transformers", "llama-cpp-python")


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a process: wall and CPU seconds, peak resident bytes, and its standard output."""

    seconds: float
    cpu: float
    peak_bytes: int
    said: str


@dataclass(frozen=True, slots=True)
class Job:
    """A contestant. `outputs` are deleted before and after each run, outside the time that is taken."""

    name: str
    run: Callable[[], Run]
    outputs: tuple[Path, ...] = ()
    rounds: int = sys.maxsize
    floor: bool = False


Series = dict[int, Run]
"""Runs of one job by the number of the round."""


# --- running ---


def process(*command: str | Path, environment: Mapping[str, str] | None = None) -> Run:
    """Runs a command to its end, with compiled modules kept, as installed programs have them.

    Raises SystemExit with what it said when it fails.
    """
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    with tempfile.TemporaryFile("w+", errors="replace") as out, tempfile.TemporaryFile("w+") as log:
        start = time.perf_counter()
        child = subprocess.Popen([*map(str, command)], stdout=out, stderr=log, env=kept | dict(environment or {}))
        _, status, usage = os.wait4(child.pid, 0)
        seconds = time.perf_counter() - start
        child.returncode = os.waitstatus_to_exitcode(status)
        for file in (out, log):
            file.seek(0)
        said = out.read()
        if child.returncode:
            raise SystemExit(f"{' '.join(map(str, command))}\n{said[-2000:]}{log.read()[-2000:]}")
    return Run(seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss << 10, said)


def self_timed(*command: str | Path, environment: Mapping[str, str] | None = None) -> Run:
    """A process that takes its time itself, without its start and imports: it says `wall CPU` in seconds last."""
    run = process(*command, environment=environment)
    seconds, cpu = map(float, run.said.split()[-2:])
    return replace(run, seconds=seconds, cpu=cpu)


@functools.cache
def knows(command: str, option: str) -> bool:
    """Whether a command of `apr` has an option."""
    return option in process(sys.executable, "-m", "aprfmt", command, "--help").said


def timed(work: Callable[[], object]) -> None:
    """Does the work and says how long it took, in the child of `self_timed`."""
    start, cpu = time.perf_counter(), time.process_time()
    work()
    print(time.perf_counter() - start, time.process_time() - cpu)


def interleaved(
    jobs: Sequence[Job],
    rounds: int,
    sources: Iterable[Path] = (),
    ready: Callable[[], object] = lambda: None,
    first: Callable[[Job], object] = lambda job: None,
) -> dict[str, Series]:
    """Runs of each job by name; in each round another job begins, so that none has the best place always.

    The sources are read before each round, which keeps them in the page cache; `ready` is called before each run.
    `first` is called after a job's first run, while its outputs are there.
    """
    series: dict[str, Series] = {job.name: {} for job in jobs}
    for number in range(rounds):
        warm(*sources)
        turn = number % len(jobs)
        for job in (*jobs[turn:], *jobs[:turn]):
            if len(series[job.name]) >= job.rounds:
                continue
            clear(job.outputs)
            ready()
            run = job.run()
            print(f"  round {number + 1}: {job.name} {run.seconds:.3f} s", file=sys.stderr, flush=True)
            if not series[job.name]:
                first(job)
            series[job.name][number] = run
            clear(job.outputs)
    return series


def warm(*paths: Path) -> None:
    """Reads files and folders once."""
    for path in paths:
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_file():
                with open(file, "rb", buffering=0) as source:
                    while source.read(PIECE):
                        pass


def touch(folder: Path, n_bytes: int) -> None:
    """Writes and deletes a file of `n_bytes` bytes.

    A virtual machine gives free pages back to its host, and the first touch of one is up to ten times slower. After
    this the pages are there, for floors, peers and ours alike.
    """
    zeros = bytes(PIECE)
    path = folder / "touch"
    with open(path, "wb", buffering=0) as file:
        for _ in range(n_bytes // PIECE):
            file.write(zeros)
    path.unlink()


def clear(paths: Iterable[Path]) -> None:
    """Removes outputs; what was written and not synced goes with them, so that no job pays for the one before."""
    for path in paths:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    os.sync()


# --- tables ---


def fastest(series: Series) -> Run:
    """The run of the fastest round."""
    return min(series.values(), key=lambda run: run.seconds)


def ratio(series: Series, base: Series) -> str:
    """Fastest round by fastest round of the base, and the median of the ratios within a round."""
    rounds = [series[n].seconds / base[n].seconds for n in series.keys() & base.keys()]
    median = f" ({statistics.median(rounds):.3g})" if rounds else ""
    return f"{fastest(series).seconds / fastest(base).seconds:.3g}{median}"


def show(title: str, series: Mapping[str, Series], bases: Sequence[str], floors: Iterable[str] = ()) -> None:
    """Prints a Markdown table: the fastest round of each job, its peak memory, and its times over those of the bases.

    A ratio is that of the fastest rounds; in brackets the median of the ratios within a round.
    """
    bases = [base for base in bases if series.get(base)]
    print(f"\n| {title} | s | CPU s | peak MB |" + "".join(f" x {base} |" for base in bases))
    print("|---" * (4 + len(bases)) + "|")
    for name, runs in series.items():
        if not runs:
            continue
        best = fastest(runs)
        peak = max(run.peak_bytes for run in runs.values()) / 1e6
        cells = [f"{best.seconds:.3f}", f"{best.cpu:.2f}", "" if name in floors else f"{peak:.0f}"]
        cells += [ratio(runs, series[base]) for base in bases]
        print(f"| {name} | " + " | ".join(cells) + " |")
    sys.stdout.flush()


def machine(work: Path) -> str:
    """One paragraph: processor, memory, file system of `work`, load, versions of what takes part."""
    info = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in info if line.startswith("model name")), "?")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    python = ".".join(map(str, sys.version_info[:3]))
    return (
        f"{os.cpu_count()} cores of {model}, {memory:.0f} GiB, {_file_system(work)}, "
        f"load {os.getloadavg()[0]:.2f}; Python {python}, "
        + ", ".join(f"{name} {found}" for name in _PACKAGES if (found := _version(name)))
    )


def _file_system(folder: Path) -> str:
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    inside = [mount for mount in mounts if folder.resolve().is_relative_to(mount[1])]
    return max(inside, key=lambda mount: len(mount[1]))[2]


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


# --- floors ---


def floor_write(name: str, target: Path, n_bytes: int, source: Path, *, fsync: bool) -> Job:
    """A plain write of `n_bytes` bytes, which are those of `source` over and over, to a new file."""
    command = (sys.executable, __file__, "write", target, str(n_bytes), source, str(int(fsync)))
    return Job(name, lambda: self_timed(*command), (target,), floor=True)


def floor_copy(name: str, source: Path, target: Path) -> Job:
    """A copy of a file by the kernel, with fsync."""
    command = (sys.executable, __file__, "copy", source, target)
    return Job(name, lambda: self_timed(*command), (target,), floor=True)


def write_pieces(target: Path, pieces: Iterable[memoryview], fsync: bool) -> None:
    """What no writer can avoid: write() of 1 MiB pieces to a new file, fsync, the name."""
    unfinished = target.with_suffix(".tmp")
    with open(unfinished, "wb", buffering=0) as file:
        for piece in pieces:
            while piece:
                piece = piece[file.write(piece) :]
        if fsync:
            os.fsync(file.fileno())
    unfinished.replace(target)


def _write(target: str, n_bytes: str, source: str, fsync: str) -> None:
    with open(source, "rb") as file:
        pool = memoryview(file.read(min(_POOL, int(n_bytes))))
    places = ((at % len(pool), int(n_bytes) - at) for at in range(0, int(n_bytes), PIECE))
    pieces = (pool[at : at + min(PIECE, left)] for at, left in places)
    timed(lambda: write_pieces(Path(target), pieces, bool(int(fsync))))


def _copy(source: str, target: str) -> None:
    def copy() -> None:
        shutil.copyfile(source, target)
        with open(target, "rb+") as file:
            os.fsync(file.fileno())

    timed(copy)


if __name__ == "__main__":
    floors: dict[str, Callable[..., None]] = {"write": _write, "copy": _copy}
    floors[sys.argv[1]](*sys.argv[2:])
