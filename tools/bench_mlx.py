"""MLX folders against mlx_lm: python tools/bench_mlx.py [--rounds N]

SmolLM2-135M as a folder of F16 weights, quantized by `apr export --format mlx` and by what `mlx_lm.convert` does but
for the tokenizer. Ours is a whole process; of mlx_lm there is the whole process and the work alone. The last column
says whether all tensors have the same types and the same bytes.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import aprfmt
from bench_measure import Job, Run, Series, clear, fastest, interleaved, knows, machine, process, ratio, timed, touch
from fetch_material import CACHE

OURS, PEER = "aprfmt", "mlx_lm"
BITS = (2, 3, 4, 6, 8)
_HEADER = ("bits", "aprfmt s", "mlx_lm s", "x its process", "x its call", "peak MB", "same")


def measure(source: Path, work: Path, bits: int, rounds: int) -> list[str]:
    """One row of the table."""
    ours, theirs = work / "ours", work / "theirs"
    same: list[str] = []

    def first(job: Job) -> None:
        """Both outputs are there only when nothing deletes the first: it is kept under another name."""
        kept = job.outputs[0].with_suffix(".kept")
        job.outputs[0].rename(kept)
        if all((work / f"{name}.kept").exists() for name in ("ours", "theirs")):
            pair = (work / "ours.kept", work / "theirs.kept")
            same.append(process(sys.executable, __file__, "child", "compare", *pair).said.strip())
            clear(pair)

    options = ["--no-fsync"] if knows("export", "--no-fsync") else []  # mlx_lm does none
    numbers = ("--bits", str(bits), "--group-size", "64")
    command = (sys.executable, "-m", "aprfmt", "export", source, "-o", ours, "--format", "mlx", *numbers, "--quiet")
    peer = (sys.executable, __file__, "child", "mlx", source, theirs, str(bits))
    jobs = [Job(OURS, lambda: process(*command, *options), (ours,)), Job(PEER, lambda: process(*peer), (theirs,))]
    series = interleaved(jobs, rounds, [source / "model.safetensors"], lambda: touch(work, 150_000_000), first)
    return _row(bits, series[OURS], series[PEER], same[0])


def _row(bits: int, ours: Series, theirs: Series, same: str) -> list[str]:
    call = {number: _call(run) for number, run in theirs.items()}
    peaks = " / ".join(f"{max(run.peak_bytes for run in s.values()) / 1e6:.0f}" for s in (ours, theirs))
    seconds = [f"{fastest(s).seconds:.2f}" for s in (ours, theirs)]
    return [str(bits), *seconds, ratio(ours, theirs), ratio(ours, call), peaks, same]


def _call(run: Run) -> Run:
    """The work alone, without the start of Python and imports."""
    seconds, cpu = map(float, run.said.split()[-2:])
    return replace(run, seconds=seconds, cpu=cpu)


# --- children ---


def run_mlx(source: str, target: str, bits: str) -> None:
    """What mlx_lm.convert does but for the tokenizer; says the seconds of it."""
    utils: Any = import_module("mlx_lm.utils")

    def work() -> None:
        model, config = utils.load_model(Path(source), lazy=True)
        model, config = utils.quantize_model(model, config, 64, int(bits))
        utils.save_model(target, model)
        utils.save_config(config, Path(target, "config.json"))

    timed(work)


def run_source(target: str) -> None:
    """Makes the folder to quantize."""
    material = next((CACHE / "smollm2").glob("*.gguf"), None)
    if material is None:
        raise SystemExit("no model in the material cache: run tools/fetch_material.py smollm2")
    aprfmt.convert_model(material, target, format="hf", dtype="f16")


def run_compare(ours: str, theirs: str) -> None:
    """Says whether two folders have tensors of the same types and bytes, else which do not."""
    with aprfmt.open(ours) as a, aprfmt.open(theirs) as b:
        names = set(a.tensors) ^ set(b.tensors)
        both = [(a.tensors[name], b.tensors[name]) for name in a.tensors if name not in names]
        names |= {
            x.name for x, y in both if (x.dtype, x.shape) != (y.dtype, y.shape) or bytes(x.raw()) != bytes(y.raw())
        }
    print(f"{len(names)} differ, {min(names)}" if names else f"all {len(both)}")


CHILDREN: dict[str, Callable[..., None]] = {"mlx": run_mlx, "source": run_source, "compare": run_compare}


def main() -> None:
    """Prints the table."""
    if sys.argv[1:2] == ["child"]:
        CHILDREN[sys.argv[2]](*sys.argv[3:])
        return
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5, help="runs of each, in turn")
    parser.add_argument("--work", type=Path, help="folder for the files")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.work, prefix="bench") as name:
        work = Path(name)
        print(machine(work), flush=True)
        source = work / "smollm2"
        process(sys.executable, __file__, "child", "source", source)
        print(f"\nSmolLM2-135M, F16\n\n| {' | '.join(_HEADER)} |\n{'|---' * len(_HEADER)}|", flush=True)
        for bits in BITS:
            print(f"| {' | '.join(measure(source, work, bits, options.rounds))} |", flush=True)


if __name__ == "__main__":
    main()
