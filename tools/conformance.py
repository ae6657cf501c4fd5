"""Compares every architecture with transformers and llama.cpp, our converter and llama.cpp's side by side.

    python tools/conformance.py [--row ID] [--case ID] [--base-only] [--sample N --seed S] [--no-peer]
                                [--missing] [--json FILE] [--jobs N] [--keep DIR] [--docs]

Per case a tiny random model of transformers goes Hugging Face -> .apr -> GGUF (F32) -> llama.cpp, whose logits must
agree (relative norm 5e-3, every most likely token the same), and back to a folder whose tensors are the same bit by
bit. Where llama.cpp's converter is right, its GGUF must come back too, and have the same keys and tensors as ours,
but for what conformance_explained.py explains. Prints a matrix and the reasons below it. Exit 1 when a case falls
short, unless llama.cpp itself cannot compute it, and when a row has no case.

`--docs` keeps what the cases came to in tests/conformance/results.jsonl, beside what is kept there of the others, and
writes docs/architectures.md and what `apr architectures` says of each row from all of it. `--missing` runs the cases
of which nothing is kept, or whose test data have changed since: `--missing --docs` brings everything up to date, after
a merge of two that added rows too.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests" / "support"), str(ROOT / "tools")]

from arch_models import ArchCase, all_cases  # noqa: E402
from conformance_steps import Bench, Step, Steps  # noqa: E402

from conformance_report import Result, docs_page, matrix, verified_text, without_case  # noqa: E402
from conformance_results import keep, kept  # noqa: E402

os.environ.setdefault("OMP_NUM_THREADS", "1")
_BENCHES: list[Bench] = []


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the chosen cases and prints the matrix; the exit code."""
    options = _options(arguments)
    cases = choose(options)
    results: list[Result] = []
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(options.keep or scratch)
        for case, steps in _run(cases, work, options):
            results.append(Result(case, steps))
            print(results[-1].line(), file=sys.stderr, flush=True)
    unused = [] if options.row or options.case or options.sample or options.missing else without_case(all_cases())
    print(matrix(results, unused))
    if options.json:
        rows = [{"id": r.case.id, "ok": r.ok, "steps": {k: asdict(s) for k, s in r.steps.items()}} for r in results]
        Path(options.json).write_text(json.dumps(rows, indent=1) + "\n")
    if options.docs:
        _write_docs(results)
    return 1 if unused or not all(r.ok or r.excused for r in results) else 0


def _write_docs(results: Sequence[Result]) -> None:
    """Joins the results to those that are kept, and writes what is made of them."""
    cases = all_cases()
    known = kept(cases) | {result.case.id: result for result in results}
    together = [known[case.id] for case in cases if case.id in known]
    keep(together)
    (ROOT / "docs" / "architectures.md").write_text(docs_page(together))
    (ROOT / "src" / "aprfmt" / "arch" / "verified.jsonl").write_text(verified_text(together))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--row", action="append", default=[], help="only the cases of this row")
    parser.add_argument("--case", action="append", default=[], help="only this case")
    parser.add_argument("--missing", action="store_true", help="only cases that have no result of their test data")
    parser.add_argument("--base-only", action="store_true", help="only one case a row")
    parser.add_argument("--sample", type=int, help="only that many cases, chosen by --seed")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--no-peer", action="store_true", help="without llama.cpp's converter")
    parser.add_argument("--json", help="also write every step here")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--keep", help="keep the files of every case in this folder")
    parser.add_argument("--docs", action="store_true", help="keep the results, write docs/architectures.md")
    options = parser.parse_args(arguments)
    if options.docs and options.no_peer:
        parser.error("--docs needs llama.cpp's converter: leave out --no-peer")
    return options


def choose(options: argparse.Namespace) -> list[ArchCase]:
    """The cases that the options ask for. Exits where none fits, unless it is that none is missing."""
    cases = [
        case
        for case in all_cases()
        if (not options.row or case.row in options.row)
        and (not options.case or case.id in options.case)
        and (case.base or not options.base_only)
    ]
    if options.missing:
        known = kept(cases)
        return [case for case in cases if case.id not in known]
    if options.sample and options.sample < len(cases):
        chosen = set(random.Random(options.seed).sample(range(len(cases)), options.sample))
        cases = [case for n, case in enumerate(cases) if n in chosen]
    if not cases:
        sys.exit("no such case")
    return cases


def _run(cases: Sequence[ArchCase], work: Path, options: argparse.Namespace) -> Iterator[tuple[ArchCase, Steps]]:
    """Each case with its steps, in order; what kills a worker process costs only the case it was at."""
    settings = (work, not options.no_peer, bool(options.keep))
    waiting = list(cases)
    while waiting:
        context = multiprocessing.get_context("spawn")
        jobs = max(1, min(options.jobs, len(waiting)))
        with ProcessPoolExecutor(jobs, context, initializer=_start, initargs=settings) as pool:
            futures = [pool.submit(_one, case) for case in waiting]
            for future in futures:
                case = waiting[0]
                try:
                    steps = future.result()
                except BrokenProcessPool:
                    yield waiting.pop(0), {"build": Step(False, reason="the process that ran the case died")}
                    break
                except Exception as failure:
                    steps = {"build": Step(False, reason=f"the harness failed: {failure!r}")}
                waiting.pop(0)
                yield case, steps


def _start(work: Path, peer: bool, keep: bool) -> None:
    import torch

    torch.set_num_threads(1)
    _BENCHES.append(Bench(work / f"worker-{os.getpid()}", peer=peer, keep=keep))


def _one(case: ArchCase) -> Steps:
    return _BENCHES[0].run(case)


if __name__ == "__main__":
    sys.exit(main())
