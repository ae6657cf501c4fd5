"""What k costs: python tools/topk_study.py SmolLM2-135M-Instruct.Q4_1.gguf CORPUS -o OUT

The same student learns the same text from the whole distribution, and from files of k ids and the mass of the rest.
The files are written through llama.cpp from a GGUF whose architecture the trainer has no network for: the model's own
weights as an `xverse`, which computes the same. Each result is scored with the whole distribution on held-out text.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np

APR = (sys.executable, "-m", "aprfmt")
TYPES = gguf.GGUFValueType


def apr(*words: object) -> dict[str, Any]:
    """Runs a command of apr to its end; gives its JSON."""
    done = subprocess.run([*APR, *map(str, words), "--json"], check=False, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"apr {' '.join(map(str, words))}: {done.stdout[:500]}{done.stderr[-2000:]}")
    body: dict[str, Any] = json.loads(done.stdout)
    return body


def as_xverse(source: Path, target: Path) -> None:
    """A llama GGUF under the other architecture's keys, its tied head written out."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, "xverse")
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        kind, inner = field.types[0], field.types[-1] if field.types[0] == TYPES.ARRAY else None
        writer.add_key_value(name.replace("llama.", "xverse."), field.contents(), kind, inner)
    for tensor in reader.tensors:
        for name in (tensor.name, *(["output.weight"] if tensor.name == "token_embd.weight" else [])):
            writer.add_tensor(name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--layers", default="0,1,2,27,28,29")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--tokens-per-step", type=int, default=1024)
    parser.add_argument("--temperature", type=float, nargs="*", default=[1.0, 2.0])
    parser.add_argument("--k", type=int, nargs="*", default=[256, 64, 16])
    parser.add_argument("--limit", type=int, default=16384, help="held-out tokens to score")
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    out: Path = given.output
    out.mkdir(exist_ok=True)
    if not (out / "xverse.gguf").exists():
        as_xverse(given.model, out / "xverse.gguf")
    apr("prune", given.model, "-o", out / "student.apr", "--keep-layers", given.layers, "--force")
    each = given.tokens_per_step
    sizes = ("--seq-len", 256, "--held-out", 0.05)
    said = apr(
        "teacher", out / "xverse.gguf", "--data", given.corpus, "-o", out / "said", "--top-k", max(given.k), *sizes,
        "--engine", "llama", "--student", out / "student.apr",
    )  # fmt: skip
    print(f"{said['engine']}, {said['tokens']} positions, {said['rest']}, {said['seconds']:.0f} s", flush=True)
    print("| T | teacher | held-out KL | agreement | cross entropy | loss, last ten steps |\n|---|---|---|---|---|---|")
    for temperature in given.temperature:
        for k in (None, *given.k):
            run = out / f"run-{temperature:g}-{k or 'all'}"
            source = ("--teacher-logprobs", out / "said", "--top-k", k) if k else (given.model,)
            if not (run / "model.apr").exists():
                apr(
                    "distill", *source, "--student", out / "student.apr", "--data", out / "said/tokens", "-o", run,
                    "--steps", given.steps, *sizes[:2], "--tokens-per-step", each, "--micro-tokens", each, "--lr", 3e-4,
                    "--warmup-steps", 5, "--kd-weight", 1, "--temperature", temperature, "--device", given.device,
                    "--eval-tokens", 1024, "--save-every", 0, "--repeat",
                )  # fmt: skip
            score = apr(
                "eval", run / "model.apr", "--data", out / "said/tokens", "--teacher", given.model,
                "--engine", "torch", "--device", given.device, "--seq-len", 256, "--limit", given.limit,
            )  # fmt: skip
            lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
            last = [line["loss"] for line in lines if line["event"] == "step"][-10:]
            print(
                f"| {temperature:g} | {f'k = {k}' if k else 'whole'} | {score['kl']:.4f} | {score['agreement']:.2%} | "
                f"{score['ce']:.4f} | {sum(last) / len(last):.4f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
