"""One GPU against several: python tools/bench_scale.py [--gpus 1 2] [--teacher 1.5b] [--json FILE]

The updates of bench_train.py, each row in processes of its own that torchrun starts: they share the windows of an
update. Rows: 32,768 tokens an update on one GPU and on several, as many on each of several, and --shard weights. The
ratio is tokens a second beside the first row. Every row tells the loss of its last update, which must agree between
rows of the same batches.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

TOKENS, MICRO = 32_768, 16_384
WARM, MEASURED = 4, 12


@dataclass(frozen=True)
class Row:
    """What one torchrun measures."""

    gpus: int
    tokens: int
    shard: str


def rows(gpus: list[int]) -> list[Row]:
    """The table's rows."""
    found = [Row(1, TOKENS, "states")]
    for n in gpus:
        if n > 1:
            found += [Row(n, TOKENS, "states"), Row(n, n * TOKENS, "states"), Row(n, TOKENS, "weights")]
    return found


def child(teacher: str, row: Row) -> None:
    """In every process: builds, trains, and the first one prints."""
    import torch

    from aprtrain.config import Config
    from aprtrain.memory import total
    from aprtrain.world import join_world
    from bench_train import T, trainer_of, updates, windows

    with join_world("cuda") as world:
        config = Config(
            micro_tokens=MICRO, seq_len=T, tokens_per_step=row.tokens, warmup_steps=0, lr=1e-6, save_every=0,
            save_minutes=0.0, eval_every=0, repeat=True, shard=row.shard,
        )  # fmt: skip
        began = time.perf_counter()
        fresh = trainer_of(config, teacher, windows(0), world)
        loaded = time.perf_counter() - began
        torch.cuda.reset_peak_memory_stats()
        trainer = updates(fresh, WARM + MEASURED)
        seconds = trainer.step_seconds
        typical = statistics.median(seconds[WARM:])
        if world.is_first:
            found = {
                "tok_s": row.tokens / typical, "ms": typical * 1e3, "load_s": loaded,
                "loss": trainer.latest["loss"] if trainer.latest is not None else None,
                "first_s": seconds[0], "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
                "plan_gib": total(fresh.plan) / 2**30, "spread": [min(seconds[WARM:]), max(seconds[WARM:])],
            }  # fmt: skip
            print("FOUND " + json.dumps(found), flush=True)


def measured(teacher: str, row: Row) -> dict[str, Any]:
    """The row's figures, or why there are none."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={row.gpus}",
        __file__, "--teacher", teacher, "--child", json.dumps(asdict(row)),
    ]  # fmt: skip
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "4"}
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    if done.returncode or not lines:
        return {"error": f"exit {done.returncode}: {done.stderr[-1500:]}"}
    figures: dict[str, Any] = json.loads(lines[-1].removeprefix("FOUND "))
    return figures


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--teacher", default="1.5b", choices=("1.5b", "7b"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.teacher, Row(**json.loads(options.child)))
        return 0
    found: list[dict[str, Any]] = []
    for row in rows(options.gpus):
        figures = measured(options.teacher, row)
        found.append({**asdict(row), **figures})
        if options.json:
            options.json.write_text(json.dumps(found, indent=1))
        name = f"{row.gpus} GPU, {row.tokens:,} tokens an update, {row.shard}"
        if "error" in figures:
            print(f"{name:48} {figures['error']}", flush=True)
            continue
        ratio = figures["tok_s"] / found[0]["tok_s"] if "tok_s" in found[0] else float("nan")
        print(
            f"{name:48} {figures['tok_s'] / 1e3:7.1f}k tok/s {figures['ms']:7.1f} ms  {ratio:.2f}x  "
            f"loss {figures['loss']:.6f}  peak {figures['peak_gib']:.1f} GiB, plan {figures['plan_gib']:.1f}  "
            f"first {figures['first_s']:.0f} s", flush=True,
        )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
