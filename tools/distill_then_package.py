"""A whole distillation, as a user would run it: python tools/distill_then_package.py CORPUS -o OUT --teacher T.gguf

A student is made from some of the teacher's layers and trained twice on the same windows of CORPUS (a folder of
source code, for example an installed Python environment): with the teacher's term and on the labels alone. The first
run is killed (SIGKILL) after a checkpoint and resumed. Both results are scored on the documents held out; the
distilled one is exported to Q8_0 and Q4_K_M, each is loaded in llama.cpp, scored against its original, and continues
some prompts. With --chat CORPUS holds conversations, such as tools/chat_corpus.py makes, and both answer questions in
the teacher's chat format through `apr run`; what is learned and scored are the answers alone.

Everything goes through the `apr` command. With two --devices both trainings run beside each other. OUT gets the run
folders, the exports, `log.txt`, `result.json` and `result.md`, the last two also when a later stage fails.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

APR = (sys.executable, "-m", "aprfmt")
PROMPTS = (
    "def fibonacci(n):\n",
    "import numpy as np\n\n\ndef softmax(x):\n",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
)
QUESTIONS = (
    "What does the function `loads` of the Python module `json` do?",
    "Explain the method `Path.read_text` from `pathlib`.",
    "Which methods does the class `Counter` of `collections` have?",
)
PRESETS = ("q8_0", "q4_k_m")
N_SAMPLE = 64


@dataclass
class Stage:
    """What is known so far; written after every stage."""

    out: Path
    facts: dict[str, Any] = field(default_factory=dict)

    def add(self, name: str, value: Any) -> None:
        """Keeps a fact and says it."""
        self.facts[name] = value
        print(f"[{time.strftime('%H:%M:%S')}] {name}: {json.dumps(value)[:300]}", flush=True)
        (self.out / "result.json").write_text(json.dumps(self.facts, indent=1))
        (self.out / "result.md").write_text("\n".join(table(self.facts)) + "\n")


def apr(out: Path, *words: object) -> dict[str, Any]:
    """Runs a command of apr to its end; gives its JSON."""
    done = subprocess.run([*APR, *map(str, words), "--json"], check=False, capture_output=True, text=True)
    with open(out / "log.txt", "a") as log:
        log.write(f"$ apr {' '.join(map(str, words))}\n{done.stderr}{done.stdout[:2000]}\n")
    if done.returncode:
        raise SystemExit(f"apr {words[0]} ended with {done.returncode}: {done.stdout[:500]}{done.stderr[-2000:]}")
    body: dict[str, Any] = json.loads(done.stdout)
    return body


# --- training ---


@dataclass
class Run:
    """One training: its folder, its options, the GPU it may see."""

    folder: Path
    words: list[str]
    gpu: str | None

    def start(self, *more: str) -> subprocess.Popen[bytes]:
        """The command, in the background; its lines go to a log beside the folder."""
        env = os.environ | ({"CUDA_VISIBLE_DEVICES": self.gpu} if self.gpu is not None else {})
        with open(f"{self.folder}.log", "ab") as log:
            return subprocess.Popen(
                [*APR, "distill", *self.words, "-o", str(self.folder), *more], stdout=log, stderr=log, env=env
            )

    def events(self, kind: str) -> list[dict[str, Any]]:
        """The lines of that kind that are recorded so far."""
        path = self.folder / "metrics.jsonl"
        text = path.read_text() if path.exists() else ""
        lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
        return [line for line in lines if line["event"] == kind]

    def killed_after(self, step: int) -> dict[str, Any]:
        """Runs until a checkpoint of `step` or later and some steps more, kills the process, says where it was."""
        process = self.start()
        while process.poll() is None:
            steps = self.events("step")
            at = steps[-1]["step"] if steps else 0
            saved = _latest(self.folder)
            if saved >= step and at > saved:
                process.send_signal(signal.SIGKILL)
                process.wait()
                return {"killed_at": at, "checkpoint": saved, "signal": "SIGKILL"}
            time.sleep(0.1)
        raise SystemExit(f"the run ended with {process.returncode} before it could be killed: {self.tail()}")

    def finished(self, process: subprocess.Popen[bytes]) -> None:
        """Waits for the end. Raises SystemExit when it is a bad one."""
        if process.wait():
            raise SystemExit(f"{self.folder.name} ended with {process.returncode}: {self.tail()}")

    def tail(self) -> str:
        """The end of its log."""
        return Path(f"{self.folder}.log").read_text()[-3000:]


def _latest(folder: Path) -> int:
    path = folder / "latest"
    return int(json.loads(path.read_text())["step"]) if path.exists() else 0


def curve(run: Run) -> list[dict[str, Any]]:
    """Held-out scores over the run."""
    keys = ("step", "ce", "kl", "agreement", "teacher_ce")
    return [{key: event[key] for key in keys} for event in run.events("evaluation")]


def train(stage: Stage, options: argparse.Namespace) -> tuple[Run, Run]:
    """Both trainings, the first with its accident."""
    common = [
        str(options.teacher), "--student-init", f"layers:{options.layers}", "-d", str(options.corpus),
        "--steps", str(options.steps), "--device", options.device, *shlex.split(options.distill),
    ]  # fmt: skip
    gpus: list[str | None] = list(options.gpus) or [None]
    kd = Run(options.output / "kd", [*common, "--kd-weight", str(options.kd_weight)], gpus[0])
    ce = Run(options.output / "ce", [*common, "--kd-weight", "0"], gpus[-1])
    began = time.monotonic()
    beside = ce.start() if len(gpus) > 1 else None
    stage.add("accident", kd.killed_after(options.kill_after))
    kd.finished(kd.start("--resume"))
    stage.add("kd", _summary(kd, time.monotonic() - began))
    ce.finished(beside or ce.start())
    stage.add("ce", _summary(ce, time.monotonic() - began))
    return kd, ce


def _summary(run: Run, seconds: float) -> dict[str, Any]:
    steps = run.events("step")
    metadata = json.loads((run.folder / "distillation_metadata.json").read_text())
    rates = sorted(event["tokens_per_s"] for event in steps)
    return {
        "steps": metadata["steps"], "tokens": metadata["tokens"], "failed_saves": metadata["failed_saves"],
        "wall_seconds": seconds, "tokens_per_s": rates[len(rates) // 2], "curve": curve(run),
        "logged": [e["step"] for e in steps][:3] + [e["step"] for e in steps][-3:],
    }  # fmt: skip


# --- what became of it ---


def package(stage: Stage, options: argparse.Namespace, kd: Run, ce: Run) -> None:
    """Scores, exports, llama.cpp."""
    out, held_out = options.output, kd.folder / "tokens"
    device = ("--device", options.device, "--limit", str(options.eval_tokens))
    for run in (kd, ce):
        score = apr(out, "eval", run.folder / "model.apr", "-d", held_out, "--teacher", options.teacher, *device)
        stage.add(f"score {run.folder.name}", score)
    files = {"teacher": options.teacher, "f16": out / "student-f16.gguf"}
    apr(out, "export", kd.folder / "model.apr", "-o", files["f16"], "--dtype", "f16", "--force")
    for mix in PRESETS:
        files[mix] = out / f"student-{mix}.gguf"
        made = apr(out, "export", kd.folder / "model.apr", "-o", files[mix], "--dtype", mix, "--force", "--verify")
        stage.add(f"export {mix}", {key: made.get(key) for key in ("output_bytes", "verify", "warnings")})
        score = apr(out, "eval", files[mix], "-d", held_out, "--teacher", kd.folder / "model.apr", *device)
        stage.add(f"score {mix}", score)
    files["ce"] = out / "ce-f16.gguf"
    apr(out, "export", ce.folder / "model.apr", "-o", files["ce"], "--dtype", "f16", "--force")
    stage.add("sizes", {name: os.path.getsize(path) for name, path in files.items()})
    stage.add("samples", {name: samples(path, out, options.chat) for name, path in files.items()})


def samples(path: Path, out: Path, is_chat: bool) -> list[str]:
    """Greedy continuations of the prompts by llama.cpp, or answers to the questions."""
    from aprfmt.llama.client import Llama

    if is_chat:
        found = [apr(out, "run", path, question, "-n", N_SAMPLE, "--temperature", 0) for question in QUESTIONS]
        return [answer["text"] for answer in found]
    with Llama(path, n_ctx=512) as llama:
        return [llama.generate(prompt, N_SAMPLE).text for prompt in PROMPTS]


# --- the page ---


def table(facts: dict[str, Any]) -> list[str]:
    """What is known, as Markdown."""
    sections: Sequence[tuple[str, Callable[[dict[str, Any]], list[str]]]] = (
        ("kd", _curves), ("score kd", _scores), ("samples", _samples),
    )  # fmt: skip
    return [line for key, section in sections if key in facts for line in section(facts)]


def _curves(facts: dict[str, Any]) -> list[str]:
    lines = ["| step | KD: CE | KD: KL | KD: agreement | CE only: CE | CE only: KL | CE only: agreement |"]
    lines.append("|---|---|---|---|---|---|---|")
    other = {row["step"]: row for row in facts.get("ce", {}).get("curve", [])}
    for row in facts["kd"]["curve"]:
        pair = (row, other.get(row["step"], {}))
        cells = [f"{r[k]:.4f}" if k in r else "" for r in pair for k in ("ce", "kl", "agreement")]
        lines.append(f"| {row['step']} | {' | '.join(cells)} |")
    return [*lines, ""]


def _scores(facts: dict[str, Any]) -> list[str]:
    lines = ["| model | compared with | CE | perplexity | KL | agreement | tokens |", "|---|---|---|---|---|---|---|"]
    names = {"kd": "the teacher", "ce": "the teacher", **dict.fromkeys(PRESETS, "its original")}
    for name, whom in names.items():
        if s := facts.get(f"score {name}"):
            lines.append(
                f"| {name} | {whom} | {s['ce']:.4f} | {s['perplexity']:.3f} | {s['kl']:.4f} | "
                f"{s['agreement']:.1%} | {s['tokens']:,} |"
            )
    return [*lines, ""]


def _samples(facts: dict[str, Any]) -> list[str]:
    lines = []
    for number, prompt in enumerate(QUESTIONS if facts["chat"] else PROMPTS):
        for name, texts in facts["samples"].items():
            shown = f"{prompt}\n\n{texts[number]}" if facts["chat"] else prompt + texts[number]
            lines += [f"{name}, {facts['sizes'][name] / 1e6:.1f} MB:", "```python", shown, "```", ""]
    return lines


def main() -> int:
    """Everything, in order."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--teacher", type=Path, required=True)
    parser.add_argument("--layers", default="15", help="how many of the teacher's, or which (0,3,6)")
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--kill-after", type=int, default=400, help="the checkpoint after which the run is killed")
    parser.add_argument("--kd-weight", type=float, default=0.8)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--gpus", nargs="*", default=[], help="one or two numbers of CUDA devices")
    parser.add_argument("--eval-tokens", type=int, default=1 << 20)
    parser.add_argument("--chat", action="store_true", help="CORPUS are conversations; ask questions")
    parser.add_argument("--distill", default="", metavar="OPTIONS", help="more options of apr distill, in one word")
    options = parser.parse_args()
    options.output.mkdir(parents=True)
    stage = Stage(options.output)
    stage.add("chat", options.chat)
    kd, ce = train(stage, options)
    package(stage, options, kd, ce)
    print((options.output / "result.md").read_text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
