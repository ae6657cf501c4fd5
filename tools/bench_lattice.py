"""Weights on the lattice of Q4_0, as quantization-aware training leaves them: our error and that of llama-quantize.

    python tools/bench_lattice.py [--tool LLAMA_QUANTIZE]

Takes SmolLM2, rounds its matrices to whole multiples of a step for each 32 values, as training with symmetric int4
does, and quantizes that bfloat16 model with both. llama-quantize is built once, with cmake, into the cache of the
tests' material. Exit 1 unless ours returns every value.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

import aprfmt
from fetch_material import CACHE
from llama_tools import llama_tool


def errors(wanted: Path, found: Path) -> tuple[int, int, float]:
    """Values that differ once rounded to bfloat16, all values, and the relative RMS error, of the matrices in Q4_0."""
    different = total = 0
    squares = size = 0.0
    with aprfmt.open(wanted) as a, aprfmt.open(found) as b:
        for name, tensor in b.tensors.items():
            if tensor.dtype != "Q4_0":
                continue
            before, after = (model.tensors[name].numpy().astype("f4") for model in (a, b))
            rounded = (after.view("u4") + 0x7FFF + (after.view("u4") >> 16 & 1)) >> 16 << 16
            different += int((rounded.view("f4") != before).sum())
            total += before.size
            squares += float(((after - before).astype("f8") ** 2).sum())
            size += float((before.astype("f8") ** 2).sum())
    return different, total, float(np.sqrt(squares / size))


def project(path: Path) -> None:
    """Makes the matrices of a safetensors file whole multiples, -7 to 7, of a float16 step for each 32 values."""
    import torch
    from safetensors.torch import load_file, save_file

    tensors = load_file(path)
    for name, weight in tensors.items():
        if weight.ndim == 2 and weight.shape[1] % 32 == 0:
            blocks = weight.float().reshape(-1, 32)
            step = (blocks.abs().amax(1, keepdim=True) / 7).half().float()
            codes = torch.where(step > 0, blocks / step, 0).round().clamp(-7, 7)
            tensors[name] = (codes * step).reshape(weight.shape).to(torch.bfloat16)
    save_file(tensors, path, {"format": "pt"})


def main() -> int:
    """Prints a table; the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tool", type=Path, help="llama-quantize, if it is built already")
    options = parser.parse_args()
    tool = options.tool or llama_tool("llama-quantize")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = next((CACHE / "smollm2").glob("*.gguf"))
        aprfmt.convert_model(source, folder / "model", format="hf", dtype="bf16")
        project(folder / "model" / "model.safetensors")
        lattice, ours, theirs = (folder / file for file in ("lattice.gguf", "ours.gguf", "theirs.gguf"))
        aprfmt.convert_model(folder / "model", lattice)
        aprfmt.quantize_model(lattice, ours, "q4_0", pure=True)
        subprocess.run([tool, "--pure", lattice, theirs, "q4_0", "2"], check=True, capture_output=True)
        rows = {"apr quantize": errors(lattice, ours), "llama-quantize": errors(lattice, theirs)}
    print("| | values changed | of | relative RMS error |\n|---|--:|--:|--:|")
    for label, (different, total, error) in rows.items():
        print(f"| {label} | {different:,} | {total:,} | {error:.2e} |")
    return int(rows["apr quantize"][0] > 0)


if __name__ == "__main__":
    sys.exit(main())
