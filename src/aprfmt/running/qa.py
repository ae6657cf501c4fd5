"""Runs the gates of `apr qa` on a model."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from aprfmt import formats
from aprfmt.errors import MissingDependencyError, RunError, UsageError
from aprfmt.inspection.ci_reports import CaseStatus, CiCase
from aprfmt.llama.client import require_llama
from aprfmt.running.diseases import AGAIN, DISEASES
from aprfmt.running.examined import ModelUnderTest
from aprfmt.running.findings import GateFinding, SkippedError
from aprfmt.running.gates import FINER, GATES, Gate


@dataclass(frozen=True, slots=True)
class GateResult:
    """One gate.

    Attributes:
        id: its name.
        status: "pass", "fail" or "skip".
        required: for a skipped gate, whether the model cannot pass without it.
        shows: what holds if it passes.
        message: the evidence, or why it was skipped.
        value, threshold: the deciding figure and its limit, if any.
        seconds: duration.
        disease: id of the known fault, a row of diseases.DISEASES.
        hint: for a failed gate, what to type to fix the model.
    """

    id: str
    status: str
    required: bool
    shows: str
    message: str
    value: float | None
    threshold: float | None
    seconds: float
    disease: str | None = None
    hint: str | None = None


@dataclass(frozen=True, slots=True)
class QaReport:
    """The result of `qa`.

    Attributes:
        model, against: the model and the original, as given.
        passed: whether no gate failed and no required gate was skipped.
        engine: the package that provides llama.cpp; None if it did not load the model.
        parameters, bits_per_weight: size of the model.
        gates: one entry per gate, in the order they ran.
        seconds: wall time.
    """

    model: str
    against: str | None
    passed: bool
    engine: str | None
    parameters: int
    bits_per_weight: float
    gates: list[GateResult]
    seconds: float

    def to_json(self) -> dict[str, object]:
        """The object of `apr qa --json`."""
        return asdict(self)

    def cases(self) -> list[CiCase]:
        """One case per gate, for CI reports; a required gate that was skipped fails."""
        status: dict[str, CaseStatus] = {"pass": "pass", "fail": "fail"}
        return [
            CiCase(g.id, status.get(g.status, "fail" if g.required else "skip"), g.message, hint=g.hint)
            for g in self.gates
        ]


def examine(
    file: str,
    *,
    against: str | None = None,
    allow_skip: Sequence[str] = (),
    threads: int = 0,
    log: Callable[[str], None] = lambda line: None,
    on_gate: Callable[[GateResult], None] = lambda gate: None,
) -> QaReport:
    """Runs every gate; gates that a failed one blocks are skipped, which is not a pass.

    Raises:
        UsageError: for an unknown gate.
        MissingDependencyError: llama.cpp is not installed.
    """
    known = [gate.id for gate in GATES]
    for name in allow_skip:
        if name not in known:
            raise UsageError(f"unknown gate {name!r:.40}", hint=f"known gates: {', '.join(known)}")
    require_llama()
    for path in (file, against) if against is not None else ():
        formats.detect(path)  # missing files are reported before minutes of gates
    started = time.monotonic()
    results: dict[str, GateResult] = {}
    with ModelUnderTest(file, against, threads, log) as x:
        for gate in (gate for gate in GATES if x.kind in gate.kinds):
            results[gate.id] = _look(gate, x, results, allow_skip)
            on_gate(results[gate.id])
        loaded = results["loads"].status == "pass"
        return QaReport(
            file, against, all(map(_is_fine, results.values())), x.llama.engine if loaded else None, x.n_params,
            x.bits_per_weight, [*results.values()], time.monotonic() - started,
        )  # fmt: skip


def _is_fine(gate: GateResult) -> bool:
    """Whether a gate passed, or did not need to apply."""
    return gate.status == "pass" or (gate.status == "skip" and not gate.required)


def _look(gate: Gate, x: ModelUnderTest, before: dict[str, GateResult], allow_skip: Sequence[str]) -> GateResult:
    started = time.monotonic()
    required = gate.id not in allow_skip
    finding, status = GateFinding(False, ""), "skip"
    missing = [name for name in gate.needs if name in before and not _is_fine(before[name])]
    if missing:
        finding = GateFinding(False, f"not run, because {missing[0]} did not pass")
    else:
        try:
            finding = gate.look(x)
            status = "pass" if finding.passed else "fail"
        except SkippedError as skip:
            finding, required = GateFinding(False, str(skip)), required and skip.required
        except MissingDependencyError:
            raise
        except RunError as error:  # llama.cpp failed where the gate did not expect it
            finding, status = GateFinding(False, error.message), "fail"
    return GateResult(
        gate.id, status, required, gate.shows, finding.message, finding.value, finding.threshold,
        time.monotonic() - started, finding.disease, _hint(gate, finding, x) if status == "fail" else None,
    )  # fmt: skip


def _hint(gate: Gate, finding: GateFinding, x: ModelUnderTest) -> str:
    """What to type to fix a model that fails a gate."""
    disease = DISEASES.get(finding.disease or "")
    mend = disease.mend if disease is not None else gate.mend
    value = finding.words.get("value")
    can_stamp = x.model.format in ("gguf", "apr-v2") and ("{value}" not in mend or value is not None)
    if mend.startswith("apr stamp") and not can_stamp:  # it edits no folders, and no lists
        mend = AGAIN
    if mend == FINER and x.packed_bits:
        mend = "apr convert {original} -o FIXED --format hf --quantize w8a16"
    return mend.format(
        file=x.file,
        original=x.against or "ORIGINAL",
        arch=x.metadata("general.architecture"),
        key=finding.words.get("key"),
        value=value,
    )
