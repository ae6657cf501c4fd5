"""Judges unusual configurations: folder -> .apr -> GGUF -> llama.cpp, GGUF -> folder -> transformers.

    python tools/configs.py [FILE] [--only WORD] [--line N]
    python tools/configs.py --fuzz [--minutes M] [--cases N] [--start I] [--seed S] [--row ID | --plain] [--jobs J]
                            [--out DIR] [--docs]

FILE has a case a line (tests/conformance/configs.jsonl by default; tests/support/odd_configs.py describes the keys).
Prints one line a case; exit 1 when one is wrong in silence or cannot be loaded.

`--fuzz` draws cases from the fields of transformers' config classes (tests/support/config_fuzz.py). DIR gets
summary.json, with the counts and the reasons of refusals, summary.txt, the same to read, finds.jsonl, whose lines can
be added to FILE, and outcomes.jsonl, a line a case. With both limits it ends at the first that is reached. `--docs`
keeps the counts for docs/architectures.md. Exit 1 for a find, and for a worker that died or did not end.

`--plain` draws cases of the rows of which llama.cpp has no network: right means that the folder comes back from an
`.apr` byte by byte, that a config.json made of its hyper-parameters says the same, and that a GGUF is refused.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests" / "support"), str(ROOT / "tools")]
os.environ.setdefault("OMP_NUM_THREADS", "1")

from config_fuzz import Fuzzer, fuzzed_rows, preload  # noqa: E402
from llama_peer import LlamaPeer  # noqa: E402
from odd_configs import CASES, judge, read_cases  # noqa: E402

from configs_report import Tally  # noqa: E402


def main(arguments: Sequence[str] | None = None) -> int:
    """Judges the chosen cases; the exit code."""
    options = _options(arguments)
    import torch

    torch.set_num_threads(1)
    return _fuzz(options) if options.fuzz else _judge_lines(options)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", nargs="?", type=Path, default=CASES)
    parser.add_argument("--only", default="", help="only model types that contain this")
    parser.add_argument("--line", type=int, action="append", help="only this line, counted from 0")
    parser.add_argument("--fuzz", action="store_true", help="random configurations")
    parser.add_argument("--minutes", type=float, help="how long at most")
    parser.add_argument("--cases", type=int, help="how many cases at most (default: one of each row)")
    parser.add_argument("--start", type=int, default=0, help="number of the first case")
    parser.add_argument("--seed", type=int, default=0, help="another number, other cases")
    parser.add_argument("--row", action="append", default=[], help="only cases of this row")
    parser.add_argument("--plain", action="store_true", help="only rows of which llama.cpp has no network")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, help="folder for the summary, the finds and the outcomes")
    parser.add_argument("--docs", action="store_true", help="keep the counts, for docs/architectures.md")
    options = parser.parse_args(arguments)
    if unknown := sorted({*options.row} - {*fuzzed_rows(), *fuzzed_rows(plain=True)}):
        parser.error(f"transformers computes no such row: {', '.join(unknown)}")
    return options


def _judge_lines(options: argparse.Namespace) -> int:
    bad = 0
    with LlamaPeer() as llama:
        for n, case in enumerate(read_cases(options.file)):
            if options.only not in case.model_type or (options.line and n not in options.line):
                continue
            with tempfile.TemporaryDirectory() as work:
                try:
                    verdicts = judge(case, Path(work), llama)
                except Exception as failure:
                    print(f"{n} {case.model_type}: the harness failed: {type(failure).__name__}: {failure}", flush=True)
                    bad += 1
                    continue
            bad += not all(verdict.fine for verdict in verdicts.values())
            print(f"{n} {case.model_type} {case.why}: {'; '.join(f'{k} {v}' for k, v in verdicts.items())}", flush=True)
    return 1 if bad else 0


def _fuzz(options: argparse.Namespace) -> int:
    rows = [*options.row] or [*fuzzed_rows(plain=options.plain)]
    cases = options.cases or (None if options.minutes else len(rows))
    seconds = 60 * options.minutes if options.minutes else None
    tally = Tally(options.seed)
    preload(rows)
    try:
        for outcome in Fuzzer(options.seed, rows, options.jobs).run(seconds, cases, options.start):
            tally.add(outcome)
            if options.out:
                tally.write(options.out, outcome)
            if outcome.found:
                print(tally.line(outcome), file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
    if options.docs:
        tally.keep()
    print(tally.sentence(cases))
    if options.out:
        print(f"counts and reasons of refusals: {options.out}/summary.txt")
    return 1 if tally.finds else 0


if __name__ == "__main__":
    sys.exit(main())
