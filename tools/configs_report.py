"""What fuzzed configurations came to: counts by row, reasons of refusals, finds, and a section of the docs."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from config_fuzz import UNBUILT, Outcome, fuzzed_rows
from odd_configs import REFUSED, RIGHT, SAID, TOLERANCE

COUNTS = Path(__file__).resolve().parent.parent / "tests" / "conformance" / "fuzzed.json"
_SHOWN = 40


@dataclass
class Tally:
    """The outcomes of one seed.

    Attributes:
        counts: row -> outcome -> cases.
        reasons: what refusals say, without numbers and names -> cases.
        needless: the same of those where llama.cpp computed the same, had it been given the GGUF.
        finds: what is wrong.
    """

    seed: int
    counts: dict[str, Counter[str]] = field(default_factory=dict)
    reasons: Counter[str] = field(default_factory=Counter)
    needless: Counter[str] = field(default_factory=Counter)
    finds: list[Outcome] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, outcome: Outcome) -> None:
        """Counts a case."""
        self.counts.setdefault(outcome.row, Counter())[outcome.outcome] += 1
        self.seconds += outcome.seconds
        if outcome.outcome == REFUSED:
            self.reasons[_plain(outcome.text)] += 1
            if outcome.error is not None and outcome.error <= TOLERANCE:
                self.needless[_plain(outcome.text)] += 1
        if outcome.found:
            self.finds.append(outcome)

    def line(self, outcome: Outcome) -> str:
        """A find in one line."""
        said = "; ".join(
            f"{way} {word}{'' if error is None else f' {error:.1e}'} {text}"
            for way, (word, error, text) in outcome.verdicts.items()
        )
        why = json.loads(outcome.line).get("why", "") if outcome.line else json.dumps(outcome.changes)
        return f"{outcome.number} {outcome.row}: {why}: {said}"

    def sentence(self, asked: int | None) -> str:
        """The counts in one line; `asked` are the cases that were to be judged."""
        total = sum(self.counts.values(), Counter[str]())
        n = sum(total.values()) - total[UNBUILT]
        of = f" of {asked}" if asked and sum(total.values()) < asked else ""
        found = "; ".join(f"{word}: {total[word]}" for word in (RIGHT, SAID, REFUSED))
        return f"seed {self.seed}, {n}{of} configurations; {found}; found: {len(self.finds)}"

    def totals(self) -> dict[str, Any]:
        """Cases, and how many came to what."""
        all_rows = sum(self.counts.values(), Counter[str]())
        return {
            "seed": self.seed,
            "cases": sum(n for outcome, n in all_rows.items() if outcome != UNBUILT),
            "cpu_seconds": round(self.seconds, 1),
            "found": len(self.finds),
            "outcomes": dict(sorted(all_rows.items())),
            "refused_needlessly": sum(self.needless.values()),
        }

    def write(self, folder: Path, outcome: Outcome) -> None:
        """Writes the summary, and adds the outcome to the files of lines."""
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "outcomes.jsonl").open("a") as file:
            file.write(json.dumps(asdict(outcome)) + "\n")
        if outcome.found:
            with (folder / "finds.jsonl").open("a") as file:
                file.write((outcome.line or json.dumps(asdict(outcome))) + "\n")
        summary = self.totals() | {
            "rows": {row: dict(sorted(found.items())) for row, found in self._rows()},
            "reasons": dict(self.reasons.most_common()),
            "needless": dict(self.needless.most_common()),
        }
        (folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
        (folder / "summary.txt").write_text(self.table() + "\n")

    def table(self) -> str:
        """Counts by row, then the most frequent reasons of refusals."""
        lines = ["\n".join(_table([(row, found) for row, found in self._rows()]))]
        for title, reasons in (("refused", self.reasons), ("refused, though right", self.needless)):
            lines += ["", f"{title}:", *(f"{n:5} {text}" for text, n in reasons.most_common(_SHOWN))] if reasons else []
        return "\n".join(lines)

    def keep(self) -> None:
        """Writes what `fuzz_lines` reads."""
        kept = self.totals() | {"rows": {row: dict(sorted(found.items())) for row, found in self._rows()}}
        COUNTS.write_text(json.dumps(kept, indent=1) + "\n")

    def _rows(self) -> list[tuple[str, Counter[str]]]:
        return [(row, self.counts[row]) for row in (*fuzzed_rows(), *fuzzed_rows(plain=True)) if row in self.counts]


def fuzz_lines() -> list[str]:
    """The section of docs/architectures.md about the last full run."""
    if not COUNTS.exists():
        return []
    kept = json.loads(COUNTS.read_text())
    total = Counter({name: n for name, n in kept["outcomes"].items() if name != UNBUILT})
    return [
        "## Random configurations",
        "",
        "Written by `make conformance-fuzz DOCS=1`. Each case is a tiny random model whose config has up to four",
        "changed fields: odd sizes, every kind of RoPE and of layer, each activation, each boolean. *right*: folder →",
        "`.apr` → folder gives the same bytes, llama.cpp gives transformers' logits (relative norm at most 2e-3), and",
        "the folder made from the GGUF gives llama.cpp's. *said*: the report names what differs. *refused*: the error",
        "says why no GGUF is written. *wrong*: anything else.",
        "",
        f"Seed {kept['seed']}: {sum(total.values()):,} cases, {total[RIGHT]:,} right, {total[SAID]:,} said, "
        f"{total[REFUSED]:,} refused, {kept['found']:,} wrong.",
        "",
        *_table([(row, Counter(found)) for row, found in kept["rows"].items()], bars=True),
        "",
    ]


def _table(rows: list[tuple[str, Counter[str]]], *, bars: bool = False) -> list[str]:
    cells: list[tuple[str, ...]] = [("row", "cases", RIGHT, SAID, REFUSED, "wrong")]
    for row, found in rows:
        cases = sum(n for outcome, n in found.items() if outcome != UNBUILT)
        fine = tuple(found[outcome] for outcome in (RIGHT, SAID, REFUSED))
        cells.append((row, *map(str, (cases, *fine, cases - sum(fine)))))
    if bars:
        return [
            f"| {' | '.join(cells[0])} |",
            "|---|" + "---:|" * 5,
            *(f"| {' | '.join(line)} |" for line in cells[1:]),
        ]
    widths = [max(len(line[i]) for line in cells) for i in range(6)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]


def _plain(text: str) -> str:
    """A sentence without what belongs to one model."""
    return re.sub(r"\d[\d.,e+-]*", "#", re.sub(r"'[^']*'|\[[^]]*\]", "'…'", text))[:200]
