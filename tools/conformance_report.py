"""The matrix of a conformance run, the reasons below it, and the table of docs/architectures.md."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from arch_models import ArchCase
from conformance_steps import OURS, PEER, Step, Steps
from registry_sources import registry_lines

from configs_report import fuzz_lines
from loaders_report import loader_lines

_HEAD = ("case", "loads", "error", "top1", "bits", "back", "direct",
         "| loads", "error", "top1", "| keys", "tensors", "comes back")  # fmt: skip
_RUNTIME = {"loads", "logits", "top1"}
_COMPUTED = ("loads", "logits", "top1")


@dataclass
class Result:
    """A case and how its steps went."""

    case: ArchCase
    steps: Steps

    def passed(self, *names: str) -> bool:
        """Whether all of these steps were reached and went well."""
        return all((step := self.steps.get(name)) is not None and step.ok for name in names)

    @property
    def ok(self) -> bool:
        """Whether our whole way is right: there, in llama.cpp, and back."""
        return self.passed("build", *OURS) and not self._broken_with_peer

    @property
    def excused(self) -> bool:
        """Whether all that is wrong is what llama.cpp itself cannot compute."""
        if self.case.llama_cpp_cannot and self.passed("build", "direct") and self._refused:
            return True
        others = [name for name in OURS if name not in _RUNTIME]
        return bool(self.case.llama_cpp_cannot) and self.passed("build", *others) and not self._broken_with_peer

    @property
    def _refused(self) -> bool:
        """Whether no GGUF was written, with a reason, instead of one that computes something else."""
        step = self.steps.get("gguf")
        return step is not None and not step.ok and step.reason.startswith("RefusedError")

    @property
    def _broken_with_peer(self) -> bool:
        """Whether a GGUF that the converter got right does not come back, or is other than ours without a reason."""
        return self.peer_ok and not self.passed("peer_back", "keys", "tensors")

    @property
    def peer_ok(self) -> bool:
        """Whether llama.cpp's converter has the case right."""
        return self.passed("peer_converts", *(f"peer_{name}" for name in _COMPUTED))

    @property
    def peer_ran(self) -> bool:
        """Whether llama.cpp's converter was asked."""
        return "peer_converts" in self.steps

    def line(self) -> str:
        """One line for the eye while it runs."""
        verdict = "right" if self.ok else "llama.cpp cannot" if self.excused else "WRONG"
        peer = "" if not self.peer_ran else "; converter right" if self.peer_ok else "; converter wrong"
        failed = [r for r in self.reasons() if not r.startswith(("llama.cpp", "peer_converts"))]
        return f"{self.case.id}: {verdict}{peer}{'' if self.ok or not failed else f'; {failed[0]}'}"

    def cells(self) -> list[str]:
        """The matrix row."""
        peer = ["| " + _mark(self.steps.get("peer_loads")), _error(self.steps.get("peer_logits"))]
        if self.peer_ran and "peer_loads" not in self.steps:
            peer[0] = "| no GGUF"
        return [
            self.case.id,
            _mark(self.steps.get("loads")),
            _error(self.steps.get("logits")),
            *(_mark(self.steps.get(name)) for name in ("top1", "back_bits", "back_logits", "direct")),
            *peer,
            _mark(self.steps.get("peer_top1")),
            "| " + _mark(self.steps.get("keys"), "differ"),
            _mark(self.steps.get("tensors"), "differ"),
            _mark(self.steps.get("peer_back")),
        ]

    def reasons(self) -> list[str]:
        """What went wrong, a line a step."""
        lines = [f"llama.cpp cannot: {self.case.llama_cpp_cannot}"] if self.case.llama_cpp_cannot else []
        for name in ("build", *OURS, *PEER):
            step = self.steps.get(name)
            if step is not None and (not step.ok or step.reason):
                error = "" if step.error is None else f"error {step.error:.1e} "
                lines.append(f"{name}: {error}{step.reason or ('' if error else 'differs')}".rstrip())
        return lines


def _mark(step: Step | None, bad: str = "NO") -> str:
    if step is None:
        return "-"
    return bad if not step.ok else "explained" if bad == "differ" and step.reason else "yes"


def _error(step: Step | None) -> str:
    return "-" if step is None or step.error is None else f"{step.error:.0e}" + ("" if step.ok else "!")


def without_case(cases: Sequence[ArchCase]) -> list[str]:
    """Rows of the architecture table that no base case tests."""
    from aprfmt.arch.table import ARCHITECTURES

    tested = {case.row for case in cases if case.base}
    return [row for row in ARCHITECTURES if row not in tested]


def matrix(results: Sequence[Result], unused: Sequence[str] = ()) -> str:
    """The whole report."""
    rows = [list(_HEAD), *(result.cells() for result in results)]
    widths = [max(len(row[n]) for row in rows) for n in range(len(_HEAD))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines[:0] = [" " * (widths[0] + 2) + "ours" + " " * (sum(widths[1:7]) + 8) + "| llama.cpp's converter"]
    for result in results:
        if reasons := result.reasons():
            lines += ["", result.case.id, *(f"  {reason}" for reason in reasons)]
    lines += ["", *totals(results), *(f"row {row}: no case" for row in unused)]
    return "\n".join(lines)


def totals(results: Sequence[Result]) -> list[str]:
    """ "rows: ours 41 of 44, converter 24 of 44", and the same of all cases."""
    lines = []
    for name, chosen in (("rows", [r for r in results if r.case.base]), ("cases", list(results))):
        if chosen:
            cannot = sum(r.excused and not r.ok for r in chosen)
            line = f"{name}: ours {sum(r.ok for r in chosen)} of {len(chosen)}"
            line += f" ({cannot} that llama.cpp itself cannot compute)" if cannot else ""
            if any(r.peer_ran for r in chosen):
                line += f", converter {sum(r.peer_ok for r in chosen)} of {len(chosen)}"
            lines.append(line)
    return lines


def docs_page(results: Sequence[Result]) -> str:
    """docs/architectures.md: a row each, a tick per verified column, reasons below."""
    from aprfmt.arch.table import ARCHITECTURES

    by_row: dict[str, list[Result]] = {}
    for result in results:
        by_row.setdefault(result.case.row, []).append(result)
    lines = [*_INTRO, ""]
    lines += ["| Row | Hugging Face classes | GGUF | HF → GGUF | back | converter's GGUF back | converter | Cases |"]
    lines += ["|---|---|---|---|---|---|---|---|"]
    notes: list[str] = []
    for name, row in ARCHITECTURES.items():
        lines.append(_docs_row(name, row, by_row.get(name, [])))
        notes += _notes(by_row.get(name, []))
    peer_notes = _peer_notes(results)
    totals_line = "; ".join(totals(results))
    body = [*lines, "", f"{totals_line[:1].upper()}{totals_line[1:]}.", ""]
    if notes:
        body += ["## What llama.cpp cannot compute", "", *notes, ""]
    body += [*fuzz_lines(), *loader_lines()]
    body += ["## What other projects register", "", *registry_lines(), ""]
    return "\n".join([*body, "## Where llama.cpp's converter differs", "", *peer_notes]) + "\n"


def verified_text(results: Sequence[Result]) -> str:
    """What aprfmt.arch.verified reads: JSON, a line a row that was run."""
    from aprfmt.arch.table import ARCHITECTURES
    from aprfmt.arch.verified import CONVERTER, TRANSFORMERS

    lines = []
    for name in ARCHITECTURES:
        own = [result for result in results if result.case.row == name]
        values = {
            "row": name,
            "against": TRANSFORMERS if any(result.case.computable for result in own) else CONVERTER,
            "cases": len(own),
            "right": sum(result.ok for result in own),
            "refused": sum(result.excused and not result.ok for result in own),
        }
        if own:
            lines.append(f"{json.dumps(values)}\n")
    return "".join(lines)


_INTRO = (
    "# Architectures",
    "",
    "Written by `python tools/conformance.py --docs`. Every row is a tiny random model of transformers, in the",
    "variants that the family has, with a real tokenizer. *HF → GGUF*: the F32 GGUF gives transformers' logits in",
    "llama.cpp (relative norm at most 5e-3, every most likely token the same). *back*: GGUF → `.apr` → folder gives",
    "the same tensors bit by bit and the same logits. *converter's GGUF back*: the same logits from the GGUF that",
    "llama.cpp's converter writes. *converter*: that GGUF gives transformers' logits in llama.cpp. – is no.",
    "Where transformers has no such network, the checkpoint has the names that the row gives; llama.cpp's converter,",
    "its loader and finite logits are then the judges.",
)


def _docs_row(name: str, row: Any, results: Sequence[Result]) -> str:
    from aprfmt.arch.table import classes_of

    base = next((r for r in results if r.case.base), None)
    ticks = ["–"] * 4
    if base is not None:
        held = (
            base.passed("gguf", *_COMPUTED),
            base.passed("back_bits", "back_logits", "direct"),
            base.passed("peer_back"),
            base.peer_ok,
        )
        ticks = ["✓" if tick else "–" for tick in held]
    classes = ", ".join(f"`{name}`" for name in classes_of(row))
    good = sum(r.ok for r in results)
    return f"| {name} | {classes} | `{row.gguf}` | {' | '.join(ticks)} | {good} of {len(results)} |"


def _notes(results: Sequence[Result]) -> list[str]:
    return [f"* `{r.case.id}`: {r.case.llama_cpp_cannot}" for r in results if r.case.llama_cpp_cannot]


def _peer_notes(results: Sequence[Result]) -> list[str]:
    """Why the converter has a case wrong, and where its keys or tensors are others than ours."""
    lines = []
    for result in results:
        if not result.peer_ran:
            continue
        parts = []
        for name in PEER[:-1]:
            step = result.steps.get(name)
            if step is not None and not step.ok:
                error = "" if step.error is None else f"error {step.error:.1e}"
                parts.append(f"{name.removeprefix('peer_')}: {' '.join(filter(None, (error, step.reason))) or 'no'}")
        if parts:
            lines.append(f"* `{result.case.id}`: {'; '.join(parts)}".replace("|", "\\|"))
    return lines or ["Nowhere."]
