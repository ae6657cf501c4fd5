"""Judges unusual configurations: folder -> GGUF -> llama.cpp, GGUF -> folder -> transformers.

    python tools/configs.py [FILE] [--only WORD] [--line N]

FILE has a case a line (tests/conformance/configs.jsonl by default; tests/support/odd_configs.py describes the keys).
Prints one line a case; exit 1 when one is wrong in silence or cannot be loaded.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "support"))

from llama_peer import LlamaPeer  # noqa: E402
from odd_configs import CASES, judge, read_cases  # noqa: E402


def main(arguments: Sequence[str] | None = None) -> int:
    """Judges the chosen cases; the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", nargs="?", type=Path, default=CASES)
    parser.add_argument("--only", default="", help="only model types that contain this")
    parser.add_argument("--line", type=int, action="append", help="only this line, counted from 0")
    options = parser.parse_args(arguments)
    import torch

    torch.set_num_threads(1)
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


if __name__ == "__main__":
    sys.exit(main())
