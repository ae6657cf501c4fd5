"""Our importance matrix beside llama.cpp's own tool, built from the source of llama-cpp-python: values and time.

    python tools/bench_imatrix.py [--chunks 16] [--threads 2] [--avx2] [--models "SmolLM2 F32"]

Both compute the same text with as many threads, in turn; times are the fastest of two, CPU seconds the fewest. The tool
is built once, with cmake, into the cache of the tests' material: for this machine, or with --avx2 for the instructions
that xllamacpp's wheel is compiled for. Models: SmolLM2 as it is, as F32, and a small network of experts.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np

import aprfmt
from aprfmt.formats.imatrix import read_sums
from aprfmt.llama.client import Llama
from aprfmt.llama.engine import ENGINES
from aprfmt.running import importance
from fetch_material import CACHE
from llama_tools import llama_tool

_ROOT = Path(__file__).resolve().parent.parent


def models(folder: Path) -> dict[str, Path]:
    """Name -> GGUF."""
    smollm2 = next((CACHE / "smollm2").glob("*.gguf"))
    aprfmt.convert_model(smollm2, folder / "f32.gguf", dtype="f32")
    sys.path.insert(0, str(_ROOT / "tests" / "support"))
    from arch_models import build, find_case, write_tokenizers

    build(find_case("qwen3_moe"), folder / "moe", write_tokenizers(folder / "tokenizers", ["smollm2"]))
    aprfmt.convert_model(folder / "moe", folder / "moe.gguf", dtype="f32")
    return {"SmolLM2 Q4_1": smollm2, "SmolLM2 F32": folder / "f32.gguf", "experts F32": folder / "moe.gguf"}


def difference(peer: Path, own: Path) -> float:
    """The largest relative difference of two sums. Raises SystemExit where entries or counts differ."""
    a, b = read_sums(peer).entries, read_sums(own).entries
    if a.keys() != b.keys() or any(not np.array_equal(a[name].counts, b[name].counts) for name in a):
        raise SystemExit(f"entries or counts differ: {sorted(a.keys() ^ b.keys())[:3]}")
    worst = 0.0
    for name, entry in a.items():
        used = entry.sums > 0
        worst = max(worst, float((np.abs(entry.sums - b[name].sums)[used] / entry.sums[used]).max(initial=0.0)))
    return worst


Times = tuple[float, float]
"""Wall and CPU seconds, those of child processes included."""


def timed(work: Callable[[], object]) -> Times:
    """How long `work` takes; its child processes end with it."""
    start, before = time.perf_counter(), os.times()
    work()
    after = os.times()
    return time.perf_counter() - start, sum(after[:4]) - sum(before[:4])


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--chunks", type=int, default=16)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--avx2", action="store_true", help="llama-imatrix built for AVX2, as xllamacpp's wheel is")
    parser.add_argument("--models", default="", help="names of models, separated by commas; default: all")
    options = parser.parse_args()
    peer = llama_tool("llama-imatrix", portable=options.avx2)
    columns = ("model", "engine", "own s", "llama-imatrix s", "ratio", "CPU s", "CPU s", "ratio", "largest difference")
    print(f"| {' | '.join(columns)} |\n|---|---|{'--:|' * 7}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text = folder / "text.txt"
        pages = [_ROOT / "README.md", _ROOT / "ARCHITECTURE.md", *sorted((_ROOT / "docs").glob("*.md"))]
        text.write_text("\n\n".join(page.read_text() for page in pages))
        for label, gguf in models(folder).items():
            if options.models and label not in options.models.split(","):
                continue
            for engine in filter(find_spec, ENGINES):
                vars(importance)["Llama"] = partial(Llama, engines=[engine])
                times: dict[str, list[Times]] = {"own": [], "peer": []}
                command = [str(peer), "-m", str(gguf), "-f", str(text), "-o", str(folder / "peer.gguf"), "--no-ppl"]
                for _ in range(2):
                    chunks, threads, out = options.chunks, options.threads, folder / "own.gguf"
                    own = partial(aprfmt.imatrix, gguf, text, out, chunks=chunks, threads=threads, force=True)
                    times["own"].append(timed(own))
                    line = [*command, "--chunks", str(options.chunks), "-t", str(options.threads)]
                    times["peer"].append(timed(partial(subprocess.run, line, check=True, capture_output=True)))
                (wall, own_cpu), (other, cpu) = (map(min, zip(*times[who], strict=True)) for who in ("own", "peer"))
                worst = difference(folder / "peer.gguf", folder / "own.gguf")
                found = (
                    f"{wall:.2f} | {other:.2f} | {wall / other:.2f} | {own_cpu:.1f} | {cpu:.1f} | {own_cpu / cpu:.2f}"
                )
                print(f"| {label} | {ENGINES[engine]} | {found} | {worst:.1e} |", flush=True)


if __name__ == "__main__":
    main()
