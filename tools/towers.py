"""Runs the cases of towers beside llama.cpp's converter and counts the classes that it registers.

python tools/towers.py [--case TEXT] [--jobs N] [--no-peer]    one line a case, then the counts
python tools/towers.py --docs                                  what the cases hold, into docs/towers.md
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent.parent / "tests" / "support")]

from tower_models import all_tower_cases  # noqa: E402
from tower_report import write_page  # noqa: E402
from tower_steps import STEPS, run_one  # noqa: E402


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs what the arguments choose; 0 where every step of every case is right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", default="", help="cases whose id has this text")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--no-peer", action="store_true", help="without llama.cpp's converter")
    parser.add_argument("--docs", action="store_true", help="write the table of docs/towers.md, and run nothing")
    options = parser.parse_args(arguments)
    if options.docs:
        write_page()
        return 0
    cases = [case for case in all_tower_cases() if options.case in case.id]
    bad = 0
    with ProcessPoolExecutor(options.jobs) as pool:
        for case, found in zip(cases, pool.map(partial(run_one, peer=not options.no_peer), cases), strict=True):
            wrong = {step: found[step].wrong for step in STEPS if found[step].wrong}
            bad += bool(wrong)
            print(f"{case.id:32} {'ok' if not wrong else 'NO'}", flush=True)
            for step, text in wrong.items():
                print(f"    {step}: {text}")
            for step in STEPS:
                if found[step].note:
                    print(f"    {step}: ({found[step].note})")
    print(f"{len(cases) - bad} of {len(cases)} cases are right")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
