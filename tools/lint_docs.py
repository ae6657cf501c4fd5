"""Writes docs/lint.md from the table of rules: `python tools/lint_docs.py`; a test holds that it is up to date."""

from __future__ import annotations

from pathlib import Path

import aprfmt
from aprfmt.inspection.lint.run import LEVELS

PAGE = Path(__file__).resolve().parents[1] / "docs" / "lint.md"

_HEAD = """# Rules of `apr lint`

`apr lint FILE` checks a model file against best practices: is it easy to find, load, trust and run? It checks metadata,
names, shapes and dtypes, but no values (`apr validate` does); rules that do not apply to a file are skipped. Each
finding names the problem and the command that fixes it.

    apr lint model.gguf
    apr lint ./my-model --fail-at error --ignore 'provenance.*'
    apr lint --list

Exit status 1 means findings at or above the level of `--fail-at` (`error`, `warn` or `info`; default `warn`).
`--select` and `--ignore` take rule ids or globs. In Python: `aprfmt.lint(file, fail_at=…, select=…, ignore=…)` and
`aprfmt.lint_rules()`. To add a rule, add a row to `inspection/lint/table.py` and its function, then run
`python tools/lint_docs.py`, which generates this page.

| rule | level | requires | because | source |
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
