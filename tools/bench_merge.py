"""Merges of two models against reading both and writing one: python tools/bench_merge.py [--layers N] [--rounds N]

Two Hugging Face folders with the shape of Qwen2.5-1.5B in BF16 and different random weights (28 layers: 3.09 GB each;
for both, an output and the base 13 GB of disk must be free). The floor reads both in pieces of 1 MiB and writes as many
bytes as one has, with fsync. Prints a table of each method: seconds, peak memory, and its time over the floor's.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from bench_material import FULL_LAYERS, qwen_folder
from bench_measure import PIECE, Job, interleaved, machine, process, self_timed, show, timed, touch, warm, write_pieces

FLOOR = "read both, write one"


def ours(name: str, command: list[str | Path], target: Path) -> Job:
    """`apr merge` from start to end."""
    words: list[str | Path] = [
        sys.executable,
        "-m",
        "aprfmt",
        "merge",
        *command,
        "-o",
        target,
        "--format",
        "hf",
        "--quiet",
    ]
    return Job(name, lambda: process(*words), (target,))


def run_floor(a: str, b: str, target: str) -> None:
    """Reads two folders and writes what the first one has."""
    buffer = memoryview(bytearray(PIECE))

    def pieces() -> Iterator[memoryview]:
        pairs = zip(sorted(Path(a).glob("*.safetensors")), sorted(Path(b).glob("*.safetensors")), strict=True)
        for first, second in pairs:
            with open(first, "rb", buffering=0) as one, open(second, "rb", buffering=0) as two:
                while n := one.readinto(buffer):
                    yield buffer[:n]
                    two.readinto(buffer)

    timed(lambda: write_pieces(Path(target), pieces(), True))


def main() -> None:
    """Makes the models, measures, prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=FULL_LAYERS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--work", type=Path, default=None, help="folder for models and outputs (a temporary one)")
    parser.add_argument("--only", nargs="*", default=[], help="methods to measure (all)")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.work) as folder:
        work = Path(folder)
        a, b = work / "a", work / "b"
        n_bytes = qwen_folder(a, given.layers)
        qwen_folder(b, given.layers, seed=1)
        out = work / "out"
        pair: list[str | Path] = [a, b]
        dare: list[str | Path] = ["--density", "0.5", "--method"]
        jobs = [
            Job(FLOOR, lambda: self_timed(sys.executable, __file__, "floor", a, b, work / "floor"), (work / "floor",),
                floor=True),
            ours("linear", [*pair, "--method", "linear"], out),
            ours("slerp", [*pair, "--method", "slerp", "--t", "0.4"], out),
            ours("task arithmetic", [b, "--base", a, "--method", "task-arithmetic", "--weight", "0.7"], out),
            ours("ties", [b, "--base", a, *dare, "ties"], out),
            ours("dare linear", [b, "--base", a, *dare, "dare-linear"], out),
            ours("passthrough", [*pair, "--method", "passthrough", "--layers", f"0-{given.layers // 2 - 1}",
                                 "--layers", f"{given.layers // 2}-{given.layers - 1}"], out),
        ]  # fmt: skip
        jobs = [job for job in jobs if job.floor or not given.only or job.name in given.only]
        warm(a, b)
        print(machine(work))
        series = interleaved(jobs, given.rounds, [a, b], partial(touch, work, n_bytes + n_bytes // 4))
        show(f"two of {n_bytes / 1e9:.2f} GB", series, [FLOOR], {FLOOR})


if __name__ == "__main__":
    if sys.argv[1:2] == ["floor"]:
        run_floor(*sys.argv[2:])
    else:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        main()
