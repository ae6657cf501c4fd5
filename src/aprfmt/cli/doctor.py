"""`apr doctor`: check the installation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import aprfmt
from aprfmt.cli.output import out, pairs, printable, progress_bar
from aprfmt.cli.output import width as columns

if TYPE_CHECKING:
    from aprfmt.running.doctor import Diagnosis

_STYLES = {"ok": "green", "absent": "dim", "warn": "yellow", "fail": "red"}


def doctor() -> int:
    """Check the installation: what works, and what is missing for which command.

    Runs a tiny model in llama.cpp. Exit status 1: an installed component does not work.

    \b
    apr doctor
    apr doctor --json
    """
    with progress_bar("checking"):
        found = aprfmt.doctor()
    out.result(found.to_json(), _text(found))
    return 0 if found.passed else 1


def _text(found: Diagnosis) -> Iterator[str]:
    yield out.style(f"apr {found.version}", "bold")
    width = max(len(finding.id) for finding in found.findings)
    for finding in found.findings:
        first, *rest = pairs([(finding.id, finding.message)], label=width, indent=10)
        yield f"  {out.style(finding.status.ljust(6), _STYLES[finding.status])}  {first[10:]}"
        yield from rest
        if finding.hint:
            indent = width + 12 if width + 12 + len(finding.hint) <= columns() else 10
            yield " " * indent + out.style(printable(finding.hint), "cyan")
