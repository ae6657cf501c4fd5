"""What k costs: python tools/topk_study.py CORPUS -o OUT

A teacher that the trainer has no network for, a small GPT-NeoX that transformers trains on CORPUS (a folder of text),
goes into a GGUF; `apr teacher` asks llama.cpp what it says. The same small llama learns the same windows from k ids and
the mass of the rest, and from all ids, which is the whole distribution. Each result is scored on held-out text by
llama.cpp, with the whole distribution.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

APR = (sys.executable, "-m", "aprfmt")
IDS, SEQ_LEN, END = 2048, 128, "<|endoftext|>"


def apr(*words: object) -> dict[str, Any]:
    """Runs a command of apr to its end; gives its JSON."""
    done = subprocess.run([*APR, *map(str, words), "--json"], check=False, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"apr {' '.join(map(str, words))}: {done.stdout[:500]}{done.stderr[-2000:]}")
    body: dict[str, Any] = json.loads(done.stdout)
    return body


def make_models(corpus: Path, out: Path, steps: int) -> None:
    """A trained teacher and a random student, with one tokenizer, as folders."""
    texts = [path.read_text(errors="ignore") for path in sorted(corpus.rglob("*")) if path.is_file()]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=IDS, special_tokens=[END], initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=END, bos_token=END)
    ids = np.concatenate([np.array([*bpe.encode(text).ids, 0]) for text in texts])
    torch.manual_seed(1)
    sizes: dict[str, Any] = {"vocab_size": IDS, "hidden_size": 128, "max_position_embeddings": 512}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    teacher = GPTNeoXForCausalLM(
        GPTNeoXConfig(**sizes, **ends, num_hidden_layers=4, num_attention_heads=4, intermediate_size=512)
    )
    student = LlamaForCausalLM(
        LlamaConfig(**sizes, **ends, num_hidden_layers=1, num_attention_heads=4, intermediate_size=256)
    )
    optimizer = torch.optim.AdamW(teacher.parameters(), 2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    starts = np.random.default_rng(1)
    for step in range(steps):
        rows = np.stack([ids[i : i + SEQ_LEN] for i in starts.integers(0, len(ids) - SEQ_LEN, 16)])
        batch = torch.from_numpy(rows)
        loss = teacher(batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(teacher.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 50 == 49:
            print(f"teacher, step {step + 1}: {loss.item():.3f}", file=sys.stderr, flush=True)
    for name, model in (("teacher", teacher), ("student", student)):
        model.save_pretrained(out / name)
        tokenizer.save_pretrained(out / name)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--teacher-steps", type=int, default=400)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--temperature", type=float, nargs="*", default=[2.0, 1.0])
    given = parser.parse_args()
    out: Path = given.output
    out.mkdir(exist_ok=True)
    if not (out / "teacher").exists():
        make_models(given.corpus, out, given.teacher_steps)
        apr("export", out / "teacher", "-o", out / "teacher.gguf")
    sizes = ("--seq-len", SEQ_LEN, "--held-out", 0.1)
    said = apr(
        "teacher", out / "teacher.gguf", "--data", given.corpus, "-o", out / "said", "--top-k", IDS, *sizes,
        "--engine", "llama", "--student", out / "student",
    )  # fmt: skip
    print(f"{said['engine']}, {said['tokens']} positions, cross entropy {said['teacher_ce']}", flush=True)
    print("| T | k | held-out KL | agreement | cross entropy | loss, last ten steps |\n|---|---|---|---|---|---|")
    for temperature in given.temperature:
        for k in (IDS, 256, 64, 16):
            run = out / f"run-{temperature:g}-{k}"
            if not (run / "model.apr").exists():
                apr(
                    "distill", "--teacher-logprobs", out / "said", "--top-k", k, "--student", out / "student",
                    "--data", out / "said/tokens", "-o", run, "--steps", given.steps, "--seq-len", SEQ_LEN,
                    "--tokens-per-step", 1024, "--micro-tokens", 1024, "--lr", 2e-3, "--warmup-steps", 10,
                    "--kd-weight", 1, "--temperature", temperature, "--device", "cpu", "--eval-tokens", 4096,
                    "--save-every", 0, "--repeat",
                )  # fmt: skip
            score = apr(
                "eval", run / "model.apr", "--data", out / "said/tokens", "--teacher", out / "teacher.gguf",
                "--engine", "llama", "--seq-len", SEQ_LEN, "--limit", 4096,
            )  # fmt: skip
            lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
            last = [line["loss"] for line in lines if line["event"] == "step"][-10:]
            print(
                f"| {temperature:g} | {k if k < IDS else f'all {k}'} | {score['kl']:.4f} | {score['agreement']:.2%} | "
                f"{score['ce']:.4f} | {sum(last) / len(last):.4f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
