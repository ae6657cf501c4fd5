"""The statistics of `apr eval --against` beside llama-perplexity's own, on the same text and files.

    python tools/bench_kld.py [--type q4_k_m] [--chunks 4] [--tool LLAMA_PERPLEXITY]

Both compare SmolLM2 as F16 with a quantized file. llama-perplexity is built once, with cmake, into the cache of the
tests' material, and ours runs in the llama.cpp of llama-cpp-python, which is of the same source. Exit 1 where a figure
differs by more than 1e-3.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import aprfmt
from aprfmt.llama.client import Llama
from aprfmt.running import decoders
from fetch_material import CACHE
from llama_tools import llama_tool

_ROOT = Path(__file__).resolve().parent.parent
_TOLERANCE = 1e-3


def figures(text: str) -> dict[str, float]:
    """What llama-perplexity prints at its end: label -> number, percentages from 0 to 1."""
    found = {}
    for label, number, unit in re.findall(r"^(.+?) *: +(-?[\d.]+)(?: ± +[\d.]+)? *(%?)$", text, re.MULTILINE):
        found[" ".join(label.split())] = float(number) / (100 if unit else 1)
    return found


def own_figures(report: aprfmt.Divergence) -> dict[str, float]:
    """The same figures of a report, under the same labels."""
    found = {
        "Mean PPL(Q)": report.perplexity, "Mean PPL(base)": report.reference_perplexity, "Mean KLD": report.kl,
        "Mean Δp": report.mean_dp, "RMS Δp": report.rms_dp, "Same top p": report.agreement,
    }  # fmt: skip
    words = {"0.5": "Median", "1": "Maximum", "0": "Minimum"}
    for kind, quantiles in (("KLD", report.kl_quantiles), ("Δp", report.dp_quantiles)):
        for quantile, value in quantiles.items():
            found[f"{words.get(quantile, f'{100 * float(quantile):.1f}%')} {kind}"] = value
    return found


def main() -> int:
    """Prints a table; the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--type", default="q4_k_m")
    parser.add_argument("--chunks", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tool", type=Path, help="llama-perplexity, if it is built already")
    options = parser.parse_args()
    tool = options.tool or llama_tool("llama-perplexity")
    vars(decoders)["Llama"] = partial(Llama, engines=["llama_cpp"])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        base, quantized, text, saved = (folder / file for file in ("f16.gguf", "q.gguf", "text.txt", "base.kld"))
        aprfmt.convert_model(next((CACHE / "smollm2").glob("*.gguf")), base, dtype="f16")
        aprfmt.quantize_model(base, quantized, options.type)
        text.write_text("\n\n".join(page.read_text() for page in sorted((_ROOT / "docs").glob("*.md"))))
        common = ["-f", str(text), "-c", "512", "--chunks", str(options.chunks), "-t", str(options.threads)]
        common += ["--kl-divergence-base", str(saved)]
        subprocess.run([tool, "-m", base, *common], check=True, capture_output=True)
        done = subprocess.run(
            [tool, "-m", quantized, *common, "--kl-divergence"], check=True, capture_output=True, text=True
        )
        theirs = figures(done.stdout + done.stderr)
        reports = {
            "from the models": aprfmt.kl_divergence(
                quantized, base, text, chunks=options.chunks, threads=options.threads
            ),
            "from its logits file": aprfmt.kl_divergence(quantized, saved, threads=options.threads),
        }
        columns = [own_figures(report) for report in reports.values()]
    print("llama.cpp of", ", ".join({report.engine for report in reports.values()}))
    print("| figure | llama-perplexity |", " | ".join(reports), "|\n|---|--:|", "--:|" * len(reports), sep="")
    worst = 0.0
    for label in sorted(theirs.keys() & columns[0].keys()):
        row = [column[label] for column in columns]
        print(f"| {label} | {theirs[label]:.6f} | " + " | ".join(f"{value:.6f}" for value in row) + " |")
        size = abs(theirs[label]) if "PPL" in label else 1.0
        worst = max(worst, *(abs(value - theirs[label]) / size for value in row))
    print(
        f"largest difference {worst:.1e} (of perplexities: relative), {len(theirs.keys() & columns[0].keys())} figures"
    )
    return int(worst > _TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
