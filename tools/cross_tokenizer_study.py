"""What a teacher with another tokenizer is worth: python tools/cross_tokenizer_study.py CORPUS -o OUT [--device cpu]

A small llama with Qwen's vocabulary learns CORPUS (files or a folder of text) by `apr pretrain`. Then a smaller one
with SmolLM2's vocabulary, from the same random weights for each seed, learns the same sequences in the same order from
labels alone, from sorted probabilities (--vocab-policy uld) and from aligned spans (--vocab-policy aligned). Prints the
scores of each on held-out text. Tokenizers are those of tools/fetch_material.py, or models that are named; --trim drops
the tokens that CORPUS does not use from both, which changes none of its tokens: for a CPU. What is in OUT already is
not computed again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import aprfmt
from aprfmt.tokenizer.hf import read_files
from aprfmt.tokenizer.hf_write import to_hf_files

APR = (sys.executable, "-m", "aprfmt")
MATERIAL = Path(os.environ.get("APR_MATERIAL", Path.home() / ".cache" / "aprfmt" / "material"))
QWEN, SMOLLM2 = MATERIAL / "tokenizers/qwen2_5", MATERIAL / "smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
RUNS = {"labels alone": ("aligned", 0.0), "uld": ("uld", None), "aligned": ("aligned", None)}
"""--vocab-policy and --kd-weight of each run; None: the one that is asked for."""


def apr(*words: object) -> dict[str, Any]:
    """Runs a command of apr to its end; gives its JSON."""
    done = subprocess.run([*APR, *map(str, words), "--json"], check=False, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"apr {' '.join(map(str, words))}: {done.stdout[:1000]}")
    body: dict[str, Any] = json.loads(done.stdout)
    return body


def make_model(
    tokenizer: Path, size: Sequence[int], context: int, folder: Path, seed: int, corpus: Sequence[Path] = ()
) -> None:
    """A random llama of a width and a number of layers, with the tokenizer of a model or of a folder of its files.

    With `corpus`, its vocabulary is trimmed to it.
    """
    hidden, layers = size
    if tokenizer.is_dir():
        found = read_files({path.name: path.read_bytes() for path in tokenizer.iterdir() if path.suffix == ".json"})
    else:
        with aprfmt.open(tokenizer) as model:
            found = model.tokenizer
    if found is None:
        raise SystemExit(f"{tokenizer} has no tokenizer")
    torch.manual_seed(seed)
    ends: dict[str, Any] = {f"{role}_token_id": found.special.get(role) for role in ("bos", "eos")}
    config = LlamaConfig(
        vocab_size=-(-len(found.tokens) // 64) * 64, hidden_size=hidden, intermediate_size=3 * hidden,
        num_hidden_layers=layers, num_attention_heads=max(1, hidden // 32), max_position_embeddings=context,
        tie_word_embeddings=True, **ends,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    for name, data in to_hf_files(found).items():
        (folder / name).write_bytes(data)
    if corpus:
        texts = (word for path in corpus for word in ("--vocab-from", path))
        apr("prune", folder, *texts, "-o", folder / "trimmed", "--format", "hf")
        for path in (folder / "trimmed").iterdir():
            path.replace(folder / path.name)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path, nargs="+")
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--teacher-tokenizer", type=Path, default=QWEN)
    parser.add_argument("--student-tokenizer", type=Path, default=SMOLLM2)
    parser.add_argument("--teacher-size", type=int, nargs=2, default=(256, 4), metavar=("HIDDEN", "LAYERS"))
    parser.add_argument("--student-size", type=int, nargs=2, default=(128, 2), metavar=("HIDDEN", "LAYERS"))
    parser.add_argument("--teacher-steps", type=int, default=400)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--tokens-per-step", type=int, default=8192)
    parser.add_argument("--eval-tokens", type=int, default=32768)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--kd-weight", type=float, nargs="+", default=[0.5, 0.8])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--trim", action="store_true")
    parser.add_argument("--device", default="cuda")
    given = parser.parse_args()
    out: Path = given.output
    out.mkdir(exist_ok=True, parents=True)
    trimmed = given.corpus if given.trim else ()
    usual = (
        *(word for path in given.corpus for word in ("--data", path)), "--seq-len", given.seq_len, "--lr", given.lr,
        "--tokens-per-step", given.tokens_per_step, "--device", given.device, "--held-out", 0.05, "--repeat",
        "--save-every", 0, "--save-minutes", 0, "--eval-tokens", given.eval_tokens, "--warmup-steps", 20,
    )  # fmt: skip
    teacher = out / "teacher/model.apr"
    if not teacher.exists():
        make_model(given.teacher_tokenizer, given.teacher_size, 2 * given.seq_len, out / "start", 0, trimmed)
        apr("pretrain", "--init", out / "start", *usual, "--steps", given.teacher_steps, "-o", out / "teacher")
    rows: dict[str, list[dict[str, float]]] = {}
    for seed in given.seeds:
        student = out / f"student-{seed}"
        if not student.exists():
            make_model(given.student_tokenizer, given.student_size, 2 * given.seq_len, student, seed, trimmed)
        for name, (policy, fixed) in RUNS.items():
            for weight in given.kd_weight if fixed is None else [fixed]:
                run = out / f"{name.replace(' ', '-')}-{weight:g}-{seed}"
                result, began = run / "summary.json", time.monotonic()
                if not result.exists():
                    summary = apr(
                        "distill", teacher, "--student", student, *usual, "--steps", given.steps, "--seed", seed,
                        "--vocab-policy", policy, "--kd-weight", weight, "-o", run, "--allow-weaker-teacher",
                    )  # fmt: skip
                    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
                    shares = [line["aligned"] for line in lines if line["event"] == "step"]
                    scores = {"aligned": fmean(shares), "seconds": time.monotonic() - began, **summary["last"]}
                    result.write_text(json.dumps(scores))
                rows.setdefault(f"{name}, w {weight:g}" if weight else name, []).append(json.loads(result.read_text()))
                print(f"{run.name}: {rows[next(reversed(rows))][-1]}", file=sys.stderr, flush=True)
    teacher_ce = fmean(found["teacher_ce"] for each in rows.values() for found in each)
    print(f"the teacher's cross entropy per token of the student: {teacher_ce:.4f}\n")
    print("| learned from | held-out cross entropy | KL of the outcomes | agreement | labels aligned |")
    print("|---|---|---|---|---|")
    for name, found in rows.items():
        ce, kl, agreement, aligned = (
            fmean(each[key] for each in found) for key in ("ce", "kl", "agreement", "aligned")
        )
        print(f"| {name} | {ce:.4f} | {kl:.4f} | {agreement:.1%} | {aligned:.1%} |")


if __name__ == "__main__":
    main()
