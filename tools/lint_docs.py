"""Writes docs/lint.md from the table of rules: `python tools/lint_docs.py`; a test holds that it is up to date."""

from __future__ import annotations

from pathlib import Path

import aprfmt
from aprfmt.inspection.lint.run import LEVELS

PAGE = Path(__file__).resolve().parents[1] / "docs" / "lint.md"

_HEAD = """# Rules of `apr lint`

What makes a model file easy to find, to load, to trust and to run. Rules look at metadata, names, shapes and dtypes; no
value is decoded (`apr validate` does that), and a file that a rule does not concern is skipped by it. A finding names
the file's fault and what to type next.

`--fail-at error|warn|info` says from which level on findings give exit status 1 (default: warn), `--select ID` and
`--ignore ID` choose rules, globs too. In Python: `aprfmt.lint(file, fail_at=…, select=…, ignore=…)`; the table is
`aprfmt.lint_rules()`. A rule is one row of `inspection/lint/table.py` and the function that looks. This page is written
from the table by `python tools/lint_docs.py`.

| rule | level | asks that | because | source |
|---|---|---|---|---|
"""


def page() -> str:
    """The whole page."""
    rows = (
        f"| `{r.id}` | {LEVELS[r.level]} | {r.holds} | {r.why} | {r.source} |".replace("|>", "\\|>").replace(
            "<|", "<\\|"
        )
        for r in aprfmt.lint_rules()
    )
    return _HEAD + "\n".join(rows) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
