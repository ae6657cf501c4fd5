"""Opening and listing against peers, interleaved in one run: python tools/bench_open.py [GGUF]

Minimum of the rounds in milliseconds, and the ratio to the peer in the same table.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import aprfmt

CACHE = Path(os.environ.get("APR_MATERIAL", Path.home() / ".cache" / "aprfmt" / "material"))
ROUNDS = 15


def open_ours(path: Path) -> None:
    """Opens `path` with aprfmt and touches every tensor."""
    with aprfmt.open(path) as model:
        assert sum(t.n_bytes for t in model.tensors.values())


def open_gguf_py(path: Path) -> None:
    """The same with gguf-py."""
    from gguf import GGUFReader

    assert sum(t.n_bytes for t in GGUFReader(path).tensors)


def open_safetensors(path: Path) -> None:
    """The same with safetensors."""
    from safetensors import safe_open

    with safe_open(path, "np") as file:
        assert sum(len(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118


def run(*command: str) -> Callable[[], object]:
    """A whole process."""
    return lambda: subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def best_ms(jobs: dict[str, Callable[[], object]], rounds: int = ROUNDS) -> dict[str, float]:
    """Milliseconds of the fastest round of each job, the jobs taking turns."""
    best = dict.fromkeys(jobs, float("inf"))
    for _ in range(rounds):
        for name, job in jobs.items():
            start = time.perf_counter()
            job()
            best[name] = min(best[name], 1e3 * (time.perf_counter() - start))
    return best


def table(title: str, times: dict[str, float], peer: str) -> None:
    """Prints a Markdown table; `peer` is the 1.0."""
    print(f"\n| {title} | ms | x {peer} |\n|---|---|---|")
    for name, value in times.items():
        print(f"| {name} | {value:.2f} | {value / times[peer]:.3g} |")


def main() -> None:
    """Prints three tables: containers, safetensors, process start."""
    gguf = Path(sys.argv[1]) if len(sys.argv) > 1 else next((CACHE / "smollm2").glob("*.gguf"))
    with tempfile.TemporaryDirectory() as folder:
        apr, flat = Path(folder, "m.apr"), Path(folder, "m.safetensors")
        aprfmt.import_model(gguf, apr)
        aprfmt.export_model(apr, flat, dtype="f16")
        jobs: dict[str, Callable[[], object]] = {
            "aprfmt, .apr": lambda: open_ours(apr),
            "aprfmt, GGUF": lambda: open_ours(gguf),
            "gguf-py, GGUF": lambda: open_gguf_py(gguf),
        }
        table("open and list, real 135M model", best_ms(jobs, 3), "gguf-py, GGUF")
        jobs = {"aprfmt": lambda: open_ours(flat), "safetensors": lambda: open_safetensors(flat)}
        table("open and list, safetensors", best_ms(jobs), "safetensors")
        python = sys.executable
        jobs = {
            "python -c 'import argparse'": run(python, "-c", "import argparse"),
            "apr --version": run(python, "-m", "aprfmt", "--version"),
            "apr inspect X.apr": run(python, "-m", "aprfmt", "inspect", str(apr)),
            "apr tensors X.apr": run(python, "-m", "aprfmt", "tensors", str(apr)),
        }
        table("process", best_ms(jobs), "python -c 'import argparse'")


if __name__ == "__main__":
    main()
