"""Quantizing against llama.cpp: python tools/bench_quantize.py [GGUF ...] [--full]

The F16 of SmolLM2-135M (and with --full a BF16 model of Qwen2.5-1.5B's shape) to several mixes, with and without an
importance matrix, by `apr quantize` and by llama_model_quantize on as many threads as there are processors. Ours is a
whole process; of llama.cpp there is the whole process and the call alone. The last column says whether all tensors
have the same types and the same bytes.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import aprfmt
from bench_material import FULL_LAYERS, qwen_folder, read_imatrix, write_imatrix
from bench_measure import Job, Run, Series, clear, fastest, interleaved, knows, machine, process, ratio, timed, touch
from fetch_material import CACHE

PRESETS = ("q4_k_m", "q5_k_m", "q6_k", "q8_0", "iq4_xs")
OURS, PEER = "aprfmt", "llama.cpp"
_HEADER = ("preset", "imatrix", "aprfmt s", "llama.cpp s", "x its process", "x its call", "peak MB", "same")


def measure(source: Path, work: Path, mix: str, imatrix: Path | None, rounds: int) -> list[str]:
    """One row of the table."""
    ours, theirs = work / "ours.gguf", work / "theirs.gguf"
    same: list[str] = []

    def first(job: Job) -> None:
        """Both outputs are there only when nothing deletes the first: it is kept under another name."""
        kept = job.outputs[0].with_suffix(".kept")
        job.outputs[0].rename(kept)
        if ours.with_suffix(".kept").exists() and theirs.with_suffix(".kept").exists():
            pair = (ours.with_suffix(".kept"), theirs.with_suffix(".kept"))
            same.append(process(sys.executable, __file__, "child", "compare", *pair).said.strip())
            clear(pair)

    options: list[str | Path] = ["--imatrix", imatrix] if imatrix else []
    options += ["--no-fsync"] if knows("quantize", "--no-fsync") else []  # llama.cpp does none
    command = (sys.executable, "-m", "aprfmt", "quantize", source, mix, "-o", ours, "--quiet", *options)
    peer = (sys.executable, __file__, "child", "llama", source, theirs, mix, imatrix or "")
    jobs = [Job(OURS, lambda: process(*command), (ours,)), Job(PEER, lambda: process(*peer), (theirs,))]
    ready = functools.partial(touch, work, source.stat().st_size * 3 // 4)
    series = interleaved(jobs, rounds, [source], ready, first)
    return _row(mix, imatrix, series[OURS], series[PEER], same[0])


def _row(mix: str, imatrix: Path | None, ours: Series, theirs: Series, same: str) -> list[str]:
    call = {number: _call(run) for number, run in theirs.items()}
    peaks = " / ".join(f"{max(run.peak_bytes for run in s.values()) / 1e6:.0f}" for s in (ours, theirs))
    return [
        mix.upper(),
        "yes" if imatrix else "no",
        f"{fastest(ours).seconds:.2f}",
        f"{fastest(theirs).seconds:.2f}",
        ratio(ours, theirs),
        ratio(ours, call),
        peaks,
        same,
    ]


def _call(run: Run) -> Run:
    """The library's call alone, without the start of Python and imports."""
    seconds, cpu = map(float, run.said.split()[-2:])
    return replace(run, seconds=seconds, cpu=cpu)


# --- children ---


def run_llama(source: str, target: str, mix: str, imatrix: str) -> None:
    """llama_model_quantize as llama-quantize calls it; says the seconds of the call."""
    import llama_cpp

    params = llama_cpp.llama_model_quantize_default_params()
    params.nthread = len(os.sched_getaffinity(0))
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{mix.upper()}")
    if imatrix:
        params.imatrix = _matrix(read_imatrix(Path(imatrix)))
    codes: list[int] = []
    paths = (os.fsencode(source), os.fsencode(target))
    llama_cpp.llama_backend_init()
    timed(lambda: codes.append(llama_cpp.llama_model_quantize(*paths, params)))
    sys.exit(codes[0])


def _matrix(means: dict[str, bytes]) -> Any:
    """A C array of entries that ends with an empty one; it keeps what it points to."""
    from llama_cpp.llama_cpp import llama_model_imatrix_data as Entry

    entries = (Entry * (len(means) + 1))()
    for i, (name, raw) in enumerate(means.items()):
        count = len(raw) // 4
        entries[i] = Entry(name.encode(), (ctypes.c_float * count).from_buffer_copy(raw), count)
    return entries


def run_compare(ours: str, theirs: str) -> None:
    """Says whether two models have tensors of the same types and bytes, else which do not."""
    with aprfmt.open(ours) as a, aprfmt.open(theirs) as b:
        mine, others = a.tensors, b.tensors
        names = {t.name for t in mine.entries} ^ {t.name for t in others.entries}
        shared = [t for t in mine.entries if t.name not in names]
        types = [t.name for t in shared if (t.dtype, t.shape) != (others[t.name].dtype, others[t.name].shape)]
        data = [t.name for t in shared if t.name not in types and bytes(t.raw()) != bytes(others[t.name].raw())]
    found = {"names": sorted(names), "types": types, "bytes": data}
    differ = [f"{len(wrong)} {what} differ, {wrong[0]}" for what, wrong in found.items() if wrong]
    print("; ".join(differ) or f"all {len(shared)}")


def run_source(kind: str, target: str, layers: str) -> None:
    """Makes a model to quantize."""
    if kind == "smollm2":
        material = next((CACHE / "smollm2").glob("*.gguf"), None)
        if material is None:
            raise SystemExit("no model in the material cache: run tools/fetch_material.py smollm2")
        aprfmt.convert_model(material, target, dtype="f16", force=True)
        return
    with tempfile.TemporaryDirectory(dir=Path(target).parent) as folder:
        qwen_folder(Path(folder), int(layers))
        aprfmt.convert_model(folder, target, force=True)


def run_imatrix(gguf: str, target: str) -> None:
    """Makes an importance matrix."""
    write_imatrix(Path(gguf), Path(target))


CHILDREN: dict[str, Callable[..., None]] = {
    "llama": run_llama,
    "compare": run_compare,
    "source": run_source,
    "imatrix": run_imatrix,
}


def main() -> None:
    """Prints a table for each model."""
    options = parse()
    with tempfile.TemporaryDirectory(dir=options.work, prefix="bench") as name:
        work = Path(name)
        print(machine(work), flush=True)
        for title, source, rounds in models(work, options):
            table(title, source, work, rounds, options.mixes)


def models(work: Path, options: argparse.Namespace) -> Iterator[tuple[str, Path, int]]:
    """Title, file and rounds of each model; a model is made when its turn has come."""
    for path in options.models:
        yield path.stem, path, options.rounds
    if not options.models:
        path = work / "smollm2.gguf"
        process(sys.executable, __file__, "child", "source", "smollm2", path, "")
        yield "SmolLM2-135M, F16", path, options.rounds
    if options.full or options.layers:
        layers = options.layers or FULL_LAYERS
        path = work / "qwen2.gguf"
        process(sys.executable, __file__, "child", "source", "qwen2", path, str(layers))
        yield f"Qwen2.5-1.5B's shape, {layers} layers, BF16", path, options.full_rounds


def table(title: str, source: Path, work: Path, rounds: int, mixes: Sequence[str]) -> None:
    """Every mix with and without an importance matrix."""
    imatrix = work / "imatrix.dat"
    process(sys.executable, __file__, "child", "imatrix", source, imatrix)
    print(f"\n{title}\n\n| {' | '.join(_HEADER)} |\n{'|---' * len(_HEADER)}|", flush=True)
    for mix in mixes:
        for matrix in (None, imatrix):
            row = measure(source, work, mix, matrix, rounds)
            print(f"| {' | '.join(row)} |", flush=True)


def parse() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", type=Path, help="GGUF files in F16, BF16 or F32 instead of SmolLM2")
    parser.add_argument("--full", action="store_true", help="the large model too, 20 minutes on two processors")
    parser.add_argument("--layers", type=int, help="the large model with fewer layers")
    parser.add_argument("--mixes", nargs="+", default=PRESETS, metavar="MIX")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--full-rounds", type=int, default=1, help="of the large model")
    parser.add_argument("--work", type=Path, help="folder for a temporary folder with all files")
    return parser.parse_args()


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        CHILDREN[sys.argv[2]](*sys.argv[3:])
    else:
        main()
