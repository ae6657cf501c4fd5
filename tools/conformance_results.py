"""What every case came to when it was last run, in tests/conformance/results.jsonl: a line a case.

A run adds the cases it ran and keeps the others. The file is made for merges: lines stand for themselves, and of two
lines of one case the last counts.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from arch_models import ArchCase
from conformance_steps import OURS, PEER, Step, Steps

from conformance_report import Result

RESULTS = Path(__file__).resolve().parent.parent / "tests" / "conformance" / "results.jsonl"
STEPS = ("build", *OURS, *PEER)
_PASSED, _FAILED, _SKIPPED = "+-."

_BUILD_FOLDER = re.compile(r"/\S+/(?=llama\.cpp/src/)")
"""Where llama.cpp was compiled, as its assertions name their file."""


def digest(case: ArchCase) -> str:
    """Eight digits that change with the test data of a case."""
    parts = (case, dict(case.target), dict(case.optional), case.renames)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:8]


def kept(cases: Sequence[ArchCase], path: Path = RESULTS) -> dict[str, Result]:
    """Id -> the last result of each of the cases that was run since it was last changed, in the cases' order."""
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    last = {line["case"]: line for line in lines}
    found = ((case, last.get(case.id)) for case in cases)
    return {case.id: Result(case, _steps(line)) for case, line in found if line and line["data"] == digest(case)}


def keep(results: Iterable[Result], path: Path = RESULTS) -> None:
    """Writes the file: these results, which `kept` reads back, and no others."""
    path.write_text("".join(f"{_line(result)}\n" for result in results))


def _line(result: Result) -> str:
    marks = "".join(_SKIPPED if s is None else _PASSED if s.ok else _FAILED for s in map(result.steps.get, STEPS))
    line: dict[str, Any] = {"case": result.case.id, "data": digest(result.case), "steps": marks.rstrip(_SKIPPED)}
    failed = {name: s for name in STEPS if (s := result.steps.get(name)) is not None and not s.ok}
    if errors := {name: float(f"{step.error:.1e}") for name, step in failed.items() if step.error is not None}:
        line["errors"] = errors
    if reasons := {name: _BUILD_FOLDER.sub("", step.reason) for name, step in failed.items() if step.reason}:
        line["reasons"] = reasons
    return json.dumps(line, ensure_ascii=False)


def _steps(line: Mapping[str, Any]) -> Steps:
    errors, reasons = line.get("errors", {}), line.get("reasons", {})
    return {
        name: Step(mark == _PASSED, errors.get(name), reasons.get(name, ""))
        for name, mark in zip(STEPS, line["steps"], strict=False)
        if mark != _SKIPPED
    }
