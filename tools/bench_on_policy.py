"""On-policy distillation beside off-policy and TRL: python tools/bench_on_policy.py TEACHER.gguf CHATS.jsonl -o OUT

A student of some of the teacher's layers is distilled on the conversations; from it, runs of equal wall-clock time go
on: on the data, and on the student's own continuations. Each result is judged by what it writes itself: it continues
prompts that no run has seen, and the KL divergence of teacher and student, both ways, is computed in float32 at every
position that it wrote. With --trl, GKDTrainer of TRL trains the same student on its own continuations, with the same
prompts per step and the same length; both report sampled tokens per second of training.

Everything is trained by `apr distill`. OUT gets the runs and result.json.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from aprfmt.texts.encoding import Encoder, Ids
from aprtrain.config import Config
from aprtrain.network.weights import load_decoder, open_network
from aprtrain.sampler import continue_prompts, read_prompts

APR = (sys.executable, "-m", "aprfmt")
PROMPTS, NEW_TOKENS, SEQ_LEN = 256, 128, 1024
OWN_PROMPTS = 16384
"""Conversations whose prompts on-policy runs use."""
_JUDGED_AT_ONCE = 32
"""Texts."""


def apr(*words: object) -> None:
    """Runs a command of apr to its end."""
    done = subprocess.run([*APR, *map(str, words)], check=False, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"apr {' '.join(map(str, words))}: {done.stdout[-500:]}{done.stderr[-3000:]}")


def steps_of(run: Path) -> list[dict[str, Any]]:
    """The steps that a run logged."""
    events = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [event for event in events if event["event"] == "step"]


def seconds_per_step(run: Path) -> float:
    """Mean seconds of a step, without the first fifth, in which kernels are compiled."""
    found = steps_of(run)
    return statistics.fmean(step["seconds"] for step in found[len(found) // 5 :])


def split(chats: Path, train: Path, prompts: Path, judge: Path) -> None:
    """Writes the conversations to train on, those whose prompts are continued, and those whose prompts judge."""
    lines = chats.read_text().splitlines()
    held = lines[:: len(lines) // PROMPTS][:PROMPTS]
    kept = set(held)
    rest = [f"{line}\n" for line in lines if line not in kept]
    train.write_text("".join(rest))
    prompts.write_text("".join(rest[:OWN_PROMPTS]))
    judge.write_text("".join(f"{line}\n" for line in held))


@torch.no_grad()
def judged(student: Path, teacher: Path, judge: Path, device: str) -> dict[str, float]:
    """KL both ways, nats per token, on the student's own continuations of the prompts; three draws of each."""
    with open_network(student) as network:
        encoder = Encoder(network.tokenizer)
        own = load_decoder(network, torch.bfloat16 if device == "cuda" else torch.float32, device)
    with open_network(teacher) as network:
        other = load_decoder(network, torch.float32, device)
    prompts = read_prompts(judge, encoder, "text", SEQ_LEN - NEW_TOKENS, print)
    generator = torch.Generator(device).manual_seed(1)
    texts: list[tuple[Ids, list[int]]] = []
    for _ in range(3):
        made = continue_prompts(own, prompts, NEW_TOKENS, encoder.separator, generator)
        texts += zip(prompts, made, strict=True)
    with open_network(student) as network:
        own = load_decoder(network, torch.float32, device)
    sums, count = np.zeros(3), 0
    texts.sort(key=lambda text: len(text[0]) + len(text[1]))
    for start in range(0, len(texts), _JUDGED_AT_ONCE):
        some = texts[start : start + _JUDGED_AT_ONCE]
        rows = [torch.tensor([*prompt.tolist(), *new[:-1]], device=device) for prompt, new in some]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)  # behind the texts: nothing looks there
        hidden = own(ids), other(ids)
        for row, (prompt, new) in enumerate(some):
            spot = slice(len(prompt) - 1, len(prompt) - 1 + len(new))
            student_log, teacher_log = (
                functional.log_softmax(functional.linear(h[row, spot], decoder.head_weight).float(), -1)
                for h, decoder in zip(hidden, (own, other), strict=True)
            )
            sums[0] += float((teacher_log.exp() * (teacher_log - student_log)).sum())
            sums[1] += float((student_log.exp() * (student_log - teacher_log)).sum())
            sums[2] += float((student_log.argmax(-1) == teacher_log.argmax(-1)).sum())
            count += len(new)
    forward, reverse, same = sums / count
    return {"kl": forward, "reverse_kl": reverse, "agreement": same, "tokens": count}


def run_of(out: Path, name: str, args: argparse.Namespace, *more: object, steps: int) -> Path:
    """Distils, from the base if there is one, and gives the run's folder."""
    folder, began = out / name, time.monotonic()
    start = ("--student", out / "base/model.apr") if name != "base" else ("--student-init", f"layers:{args.layers}")
    apr(
        "distill", args.teacher, *start, "--data", out / "shards", "-o", folder, "--steps", steps, "--seq-len", SEQ_LEN,
        "--tokens-per-step", args.tokens, "--repeat", "--save-every", 0, "--save-minutes", 0, "--eval-every", 0,
        "--device", args.device, "--allow-weaker-teacher", "--seed", 1, *more,
    )  # fmt: skip
    print(f"{name}: {time.monotonic() - began:.0f} s, {1000 * seconds_per_step(folder):.1f} ms a step", flush=True)
    return folder


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """Trains and judges: {run: its scores}."""
    out = args.output
    train, prompts, judge, shards = (out / name for name in ("train.jsonl", "prompts.jsonl", "judge.jsonl", "shards"))
    if not judge.exists():
        split(args.chats, train, prompts, judge)
    if not shards.exists():
        apr("data", train, "--model", args.teacher, "-o", shards)
    found: dict[str, Any] = {}

    def add(name: str, folder: Path) -> None:
        speed = seconds_per_step(folder)
        own = [step for step in steps_of(folder) if "sampled_tokens" in step]
        found[name] = {
            **judged(folder / "model.apr", args.teacher, judge, args.device),
            "steps": len(steps_of(folder)), "seconds": speed * len(steps_of(folder)), "ms": 1000 * speed,
        }  # fmt: skip
        if own:
            later = own[len(own) // 5 :]
            found[name]["sampled_per_s"] = sum(s["sampled_tokens"] for s in later) / sum(s["seconds"] for s in later)
            sampling = sum(step.get("sampler_seconds", 0.0) for step in later)
            found[name]["sampler_share"] = sampling / sum(step["seconds"] for step in later)
        print(name, json.dumps(found[name]), flush=True)
        args.json.write_text(json.dumps(found, indent=1))

    if not (out / "base/model.apr").exists():
        add("base", run_of(out, "base", args, "--lr", 6e-4, steps=args.steps))
    own = ("--prompts", prompts, "--new-tokens", NEW_TOKENS, "--lr", args.lr, "--sample-every", args.sample_every)
    arms = {
        "off-policy": ("--lr", args.lr),
        "off-policy, w = 1": ("--lr", args.lr, "--kd-weight", 1),
        "on-policy 0.5, reverse": (*own, "--on-policy", 0.5, "--loss", "reverse"),
        "on-policy 1, reverse": (*own, "--on-policy", 1, "--loss", "reverse"),
        "on-policy 1, jsd": (*own, "--on-policy", 1, "--loss", "jsd"),
        "on-policy 1, forward": (*own, "--on-policy", 1),
    }
    for number, (name, how) in enumerate(arms.items()):
        if args.arms is not None and str(number) not in args.arms:
            continue
        probe = run_of(out, f"probe{number}", args, *how, steps=args.probe)
        steps = max(args.probe, int(args.seconds / seconds_per_step(probe)))
        add(name, run_of(out, f"arm{number}", args, *how, steps=steps))
    return found


def trl_speed(args: argparse.Namespace) -> dict[str, float]:
    """Sampled tokens per second of TRL's GKDTrainer from the base on, with lmbda 1."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

    gkd: Any = importlib.import_module("trl.experimental.gkd")
    datasets: Any = importlib.import_module("datasets")
    arrow: Any = importlib.import_module("pyarrow")
    out = args.output
    (out / "trl").mkdir(exist_ok=True)
    for name, model in (("student", out / "base/model.apr"), ("teacher", args.teacher)):
        if not (out / "trl" / name).exists():
            apr("convert", model, "-o", out / "trl" / name, "--format", "hf", "--dtype", "bf16")
    tokenizer = AutoTokenizer.from_pretrained(out / "trl/teacher")
    models = [
        AutoModelForCausalLM.from_pretrained(out / "trl" / n, dtype=torch.bfloat16) for n in ("student", "teacher")
    ]
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    rows = [json.loads(line)["messages"] for line in (out / "train.jsonl").read_text().splitlines()]
    firsts = [row[: next(i for i, m in enumerate(row) if m["role"] == "assistant") + 1] for row in rows[:4000]]
    # With a fingerprint of its own: that of datasets pickles its schema, which not every pyarrow allows.
    table = datasets.table.InMemoryTable(arrow.Table.from_pylist([{"messages": row} for row in firsts]))
    seconds, counts, began = list[float](), list[int](), [0.0]

    generate = gkd.GKDTrainer.generate_on_policy_outputs

    def counted(*arguments: Any, **named: Any) -> Any:
        made = generate(*arguments, **named)
        counts.append(int((made[2] != -100).sum()))
        return made

    def begin(*_: Any, **named: Any) -> None:
        began[0] = time.monotonic()

    def end(*_: Any, **named: Any) -> None:
        if args.device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.monotonic() - began[0])

    clock = type("Clock", (TrainerCallback,), {"on_step_begin": begin, "on_step_end": end})
    config = gkd.GKDConfig(
        output_dir=str(out / "trl/run"), per_device_train_batch_size=args.trl_rows, max_steps=args.trl_steps, lmbda=1.0,
        beta=1.0, temperature=1.0, max_new_tokens=NEW_TOKENS, max_length=SEQ_LEN, bf16=args.device == "cuda",
        learning_rate=args.lr, report_to=[], save_strategy="no", logging_steps=1000, gradient_checkpointing=False,
        use_cpu=args.device == "cpu",
    )  # fmt: skip
    trainer = gkd.GKDTrainer(
        model=models[0], teacher_model=models[1], args=config, processing_class=tokenizer,
        train_dataset=datasets.Dataset(table, fingerprint="chats"), callbacks=[clock()],
    )  # fmt: skip
    trainer.generate_on_policy_outputs = counted
    trainer.train()
    skip = max(1, len(seconds) // 5)
    return {
        "rows": args.trl_rows, "steps": len(seconds), "ms": 1000 * statistics.fmean(seconds[skip:]),
        "sampled_per_s": sum(counts[skip:]) / sum(seconds[skip:]),
    }  # fmt: skip


def main() -> None:
    """Runs it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("teacher", type=Path)
    parser.add_argument("chats", type=Path, help="conversations, such as tools/chat_corpus.py makes")
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--layers", default="15")
    parser.add_argument("--steps", type=int, default=450, help="of the base")
    parser.add_argument("--seconds", type=float, default=100, help="of each run from the base on")
    parser.add_argument("--probe", type=int, default=20, help="steps to measure the time of a step")
    parser.add_argument("--tokens", type=int, default=32768, help="tokens per step")
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--sample-every", type=int, default=Config.sample_every)
    parser.add_argument("--arms", nargs="*", help="only these runs, by number from 0; the base is reused")
    parser.add_argument("--trl", action="store_true", help="time TRL's GKDTrainer too")
    parser.add_argument("--json", type=Path, help="default: OUT/result.json")
    parser.add_argument("--trl-rows", type=int, default=128)
    parser.add_argument("--trl-steps", type=int, default=12)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    args.json = args.json or args.output / "result.json"
    found = compare(args)
    if args.trl:
        found["TRL"] = trl_speed(args)
        print("TRL", json.dumps(found["TRL"]), flush=True)
    args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
