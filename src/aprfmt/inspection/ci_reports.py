"""Results of validate, lint and qa as JUnit XML and SARIF, which CI services show."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias
from urllib.parse import quote
from xml.sax.saxutils import escape, quoteattr

from aprfmt.inspection.lint.run import LEVELS, Lint
from aprfmt.inspection.validate import Validation

CaseStatus: TypeAlias = Literal["pass", "note", "warn", "fail", "error", "skip"]

_LEVELS = {"fail": "error", "error": "error", "warn": "warning", "note": "note"}
"""Levels of SARIF by status."""

_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


@dataclass(frozen=True, slots=True)
class CiCase:
    """One rule's result.

    Attributes:
        id: the rule or gate.
        status: "fail" and "error" (the command could not finish) fail the job; "warn" and "note" are shown.
        message: the finding; of a passed rule what holds.
        tensor: the tensor concerned.
        hint: what to type.
    """

    id: str
    status: CaseStatus
    message: str
    tensor: str | None = None
    hint: str | None = None

    @property
    def text(self) -> str:
        """The finding with tensor and hint."""
        where = f" ({self.tensor})" if self.tensor else ""
        return f"{self.message}{where}" + (f"\n{self.hint}" if self.hint else "")


def cases_of_validation(found: Validation) -> list[CiCase]:
    """One case per check; a score below the minimum is a failure of its own."""
    known: dict[str, CaseStatus] = {"fail": "fail", "warn": "warn", "skip": "skip"}
    cases = [CiCase(c.id, known.get(c.status, "pass"), c.message, c.tensor, c.suggestion) for c in found.checks]
    if not found.passed and all(case.status != "fail" for case in cases):
        cases.append(CiCase("score", "fail", f"the score {found.score} is below the minimum, or a warning counts"))
    return [*cases, *(CiCase(check.id, "skip", check.message) for check in found.skipped)]


def cases_of_lint(found: Lint) -> list[CiCase]:
    """One case per finding, and one per rule without findings; findings below `fail_at` do not fail."""
    order = list(LEVELS.values())
    cases = []
    for row in found.findings:
        fails = order.index(row.level) <= order.index(found.fail_at)
        status: CaseStatus = "fail" if fails else "note" if row.level == "info" else "warn"
        cases.append(CiCase(row.id, status, row.message, row.tensor, row.suggestion))
    hit = {case.id for case in cases}
    cases += [CiCase(name, "pass", "") for name in found.rules if name not in hit]
    return [*cases, *(CiCase(name, "skip", "does not apply to this file") for name in found.skipped)]


def junit(command: str, file: str, cases: Sequence[CiCase]) -> bytes:
    """JUnit XML: a test suite with a case per rule, as GitLab, Jenkins and Azure read it."""
    counts = {status: sum(case.status == status for case in cases) for status in ("fail", "error", "skip")}
    totals = f'tests="{len(cases)}" failures="{counts["fail"]}" errors="{counts["error"]}" skipped="{counts["skip"]}"'
    name = _attribute(f"apr {command}")
    lines = [
        '<?xml version="1.0" encoding="UTF-8"?>',
        f"<testsuites name={name} {totals}>",
        f"  <testsuite name={_attribute(f'apr {command} {file}')} {totals}>",
    ]
    for case in cases:
        names = {"classname": f"apr.{command}", "name": _name(case), "file": file}
        attributes = " ".join(f"{key}={_attribute(value)}" for key, value in names.items())
        lines.append(f"    <testcase {attributes}{_outcome(case)}")
    return "\n".join([*lines, "  </testsuite>", "</testsuites>", ""]).encode()


def _name(case: CiCase) -> str:
    return f"{case.id} {case.tensor}" if case.tensor else case.id


def _outcome(case: CiCase) -> str:
    """The rest of a test case's element."""
    if case.status == "pass":
        return "/>"
    message = f"message={_attribute(case.message)}"
    body = {
        "fail": f'<failure {message} type="fail">{_text(case.text)}</failure>',
        "error": f'<error {message} type="error">{_text(case.text)}</error>',
        "skip": f"<skipped {message}/>",
    }.get(case.status, f"<system-out>{_text(f'{case.status}: {case.text}')}</system-out>")
    return f">{body}</testcase>"


def _attribute(text: str) -> str:
    return quoteattr(_NOT_XML.sub("?", text))


def _text(text: str) -> str:
    return escape(_NOT_XML.sub("?", text))


def sarif(command: str, file: str, cases: Sequence[CiCase]) -> bytes:
    """SARIF 2.1.0: a result per finding, as GitHub's code scanning reads it."""
    from aprfmt import __version__

    found = [case for case in cases if case.status in _LEVELS]
    uri = quote(file.replace("\\", "/").removeprefix("./"), errors="surrogateescape")
    rules = [{"id": name} for name in dict.fromkeys(case.id for case in cases if case.status != "skip")]
    results = [_result(case, uri) for case in found]
    run = {
        "tool": {"driver": {"name": "apr", "version": __version__, "semanticVersion": __version__, "rules": rules}},
        "automationDetails": {"id": f"apr/{command}/{uri}"},
        "invocations": [{"executionSuccessful": all(case.status != "error" for case in cases)}],
        "results": results,
    }
    body = {"$schema": "https://json.schemastore.org/sarif-2.1.0.json", "version": "2.1.0", "runs": [run]}
    return (json.dumps(body, indent=2) + "\n").encode()


def _result(case: CiCase, uri: str) -> dict[str, object]:
    location: dict[str, object] = {"physicalLocation": {"artifactLocation": {"uri": uri}, "region": {"startLine": 1}}}
    if case.tensor:
        location["logicalLocations"] = [{"fullyQualifiedName": case.tensor, "kind": "member"}]
    mark = hashlib.sha256("\0".join((case.id, case.tensor or "", uri)).encode(errors="replace")).hexdigest()
    return {
        "ruleId": case.id,
        "level": _LEVELS[case.status],
        "message": {"text": case.text},
        "locations": [location],
        "partialFingerprints": {"apr/v1": mark[:32]},
    }
