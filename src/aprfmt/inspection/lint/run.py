"""`apr lint`: checks a file against best practices. The rules are in `lint_rules`; no tensor values are decoded."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Literal, TypeAlias

from aprfmt import formats
from aprfmt.errors import AprError, UsageError
from aprfmt.inspection.validate import Check, Status, Subject, ValidationRule, apply
from aprfmt.types import PathLike

Level: TypeAlias = Literal["error", "warn", "info"]

LEVELS: dict[Status, Level] = {"fail": "error", "warn": "warn", "info": "info"}
"""Levels of findings, the most severe first."""

READABLE = "metadata.readable"
"""Id of the finding that metadata cannot be read, which prevents other rules from running."""


@dataclass(frozen=True, slots=True)
class LintFinding:
    """A finding.

    Attributes:
        id: of the rule.
        level: severity.
        message: what was found, one sentence.
        suggestion: what to type or to do.
        tensor: the tensor concerned, if any.
    """

    id: str
    level: Level
    message: str
    suggestion: str | None
    tensor: str | None

    def to_json(self) -> dict[str, object]:
        """{id, level, message, suggestion, tensor}."""
        return {name: getattr(self, name) for name in ("id", "level", "message", "suggestion", "tensor")}


@dataclass(frozen=True, slots=True)
class Lint:
    """The result of `lint`; `to_json` is the object of `apr lint --json`.

    Attributes:
        file: the path as given.
        format: the container, such as "GGUF v3".
        findings: most severe first.
        rules: ids of the rules that were applied.
        skipped: those that do not apply to the file.
        fail_at: lowest level that makes `passed` false.
    """

    file: str
    format: str
    findings: Sequence[LintFinding]
    rules: Sequence[str]
    skipped: Sequence[str]
    fail_at: Level

    @property
    def passed(self) -> bool:
        """Whether nothing was found at or above the relevant level."""
        order = list(LEVELS.values())
        return all(order.index(found.level) > order.index(self.fail_at) for found in self.findings)

    def count(self, level: Level) -> int:
        """Number of findings of that level."""
        return sum(found.level == level for found in self.findings)

    def to_json(self) -> dict[str, object]:
        """The keys of the JSON contract."""
        return {
            "file": self.file, "format": self.format, "passed": self.passed, "fail_at": self.fail_at,
            "counts": {level: self.count(level) for level in LEVELS.values()},
            "findings": [found.to_json() for found in self.findings], "rules": list(self.rules),
            "skipped": list(self.skipped),
        }  # fmt: skip


def lint(
    path: PathLike,
    *,
    rules: Sequence[ValidationRule],
    fail_at: str = "warn",
    select: Sequence[str] = (),
    ignore: Sequence[str] = (),
) -> Lint:
    """Applies the `rules` that `select` matches (empty: all) and `ignore` does not; both may be globs.

    Raises UsageError for an unknown level or an id, AprError for a file that cannot be opened.
    """
    level = next((level for level in LEVELS.values() if level == fail_at), None)
    if level is None:
        raise UsageError(f"unknown level {fail_at!r}", hint=f"one of: {', '.join(LEVELS.values())}")
    chosen = _chosen(rules, select, ignore)
    findings: list[LintFinding] = []
    skipped: list[str] = []
    errors: set[str] = set()
    with formats.open_unchanged(path) as model:
        for rule, found in apply(chosen, Subject(model)):
            if isinstance(found, AprError):
                if found.message not in errors:
                    errors.add(found.message)
                    hint = "run apr validate to see what is wrong"
                    findings.append(LintFinding(READABLE, "error", found.message, hint, found.tensor))
                continue
            if any(check.status == "skip" for check in found):
                skipped.append(rule.id)
            findings += [_finding(rule, check) for check in found if check.status in LEVELS]
        label = model.label
    order = list(LEVELS.values())
    findings.sort(key=lambda finding: order.index(finding.level))
    return Lint(os.fspath(path), label, findings, [rule.id for rule in chosen], skipped, level)


def _finding(rule: ValidationRule, check: Check) -> LintFinding:
    check = replace(check, status=rule.level) if check.status == "fail" else check
    return LintFinding(rule.id, LEVELS[check.status], check.message, check.suggestion, check.tensor)


def _chosen(rules: Sequence[ValidationRule], select: Sequence[str], ignore: Sequence[str]) -> list[ValidationRule]:
    ids = [rule.id for rule in rules]
    for pattern in (*select, *ignore):
        if not any(fnmatchcase(id, pattern) for id in ids):
            near = get_close_matches(pattern, ids, 1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise UsageError(f"unknown rule {pattern!r}", hint=f"{hint}run apr lint --list for all rules")
    return [
        rule
        for rule in rules
        if (not select or any(fnmatchcase(rule.id, pattern) for pattern in select))
        and not any(fnmatchcase(rule.id, pattern) for pattern in ignore)
    ]
