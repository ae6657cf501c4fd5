"""Our importance matrix beside llama.cpp's own tool, built from the source of llama-cpp-python: values and time.

    python tools/bench_imatrix.py [--chunks 16] [--threads 2]

Both compute the same text with as many threads, in turn; times are the fastest of two. The tool is built once, with
cmake, into the cache of the tests' material. Models: SmolLM2 as it is, as F32, and a small network of experts.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
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


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--chunks", type=int, default=16)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    peer = llama_tool("llama-imatrix")
    print("| model | engine | own s | llama-imatrix s | ratio | largest difference |\n|---|---|--:|--:|--:|--:|")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text = folder / "text.txt"
        pages = [_ROOT / "README.md", _ROOT / "ARCHITECTURE.md", *sorted((_ROOT / "docs").glob("*.md"))]
        text.write_text("\n\n".join(page.read_text() for page in pages))
        for label, gguf in models(folder).items():
            for engine in filter(find_spec, ENGINES):
                vars(importance)["Llama"] = partial(Llama, engines=[engine])
                times: dict[str, list[float]] = {"own": [], "peer": []}
                command = [str(peer), "-m", str(gguf), "-f", str(text), "-o", str(folder / "peer.gguf"), "--no-ppl"]
                for _ in range(2):
                    start = time.perf_counter()
                    aprfmt.imatrix(
                        gguf, text, folder / "own.gguf", chunks=options.chunks, threads=options.threads, force=True
                    )
                    times["own"].append(time.perf_counter() - start)
                    start = time.perf_counter()
                    numbers = ["--chunks", str(options.chunks), "-t", str(options.threads)]
                    subprocess.run([*command, *numbers], check=True, capture_output=True)
                    times["peer"].append(time.perf_counter() - start)
                own, other = min(times["own"]), min(times["peer"])
                worst = difference(folder / "peer.gguf", folder / "own.gguf")
                print(
                    f"| {label} | {ENGINES[engine]} | {own:.2f} | {other:.2f} | {own / other:.2f} | {worst:.1e} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
