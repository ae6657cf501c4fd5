"""`apr lint`: check a file against best practices."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

import aprfmt
from aprfmt.cli.ci import JunitOption, SarifOption, ci_reports
from aprfmt.cli.output import out, pairs, printable, width
from aprfmt.errors import UsageError
from aprfmt.text import plural

if TYPE_CHECKING:
    from aprfmt.inspection.lint.run import Level, Lint
    from aprfmt.inspection.validate import ValidationRule

_STYLES = {"error": "red", "warn": "yellow", "info": "cyan"}
_WORDS: tuple[tuple[Level, str], ...] = (("error", "error"), ("warn", "warning"), ("info", "note"))


def lint(
    file: Annotated[
        str | None, typer.Argument(metavar="FILE", help="A model: .apr, .gguf, .safetensors, an index or a folder.")
    ] = None,
    *,
    fail_at: Annotated[
        str,
        typer.Option(
            "--fail-at", metavar="LEVEL", help="Exit 1 for findings of this level or above: error, warn, info."
        ),
    ] = "warn",
    select: Annotated[
        list[str] | None,
        typer.Option(metavar="ID", help="Run only these rules; repeatable, with globs such as 'gguf.*'."),
    ] = None,
    ignore: Annotated[
        list[str] | None, typer.Option(metavar="ID", help="Skip these rules; repeatable, with globs.")
    ] = None,
    list_rules: Annotated[bool, typer.Option("--list", help="List all rules with what they require and why.")] = False,
    junit: JunitOption = None,
    sarif: SarifOption = None,
) -> int:
    """Check a model file against best practices: license, tokenizer, keys, names, dtypes, shards.

    Checks metadata, names and shapes; apr validate checks values.
    Exit status: 0 no findings, 1 findings at or above the level of --fail-at.

    \b
    apr lint model.gguf
    apr lint ./Qwen2.5-0.5B --fail-at error
    apr lint model.apr --ignore 'provenance.*' --json
    apr lint model.gguf --sarif lint.sarif
    apr lint --list
    """
    if list_rules:
        rules = aprfmt.lint_rules()
        body = [{"id": r.id, "level": _level(r), "holds": r.holds, "why": r.why, "source": r.source} for r in rules]
        out.result({"count": len(rules), "rules": body}, _rules(rules))
        return 0
    if file is None:
        raise UsageError("FILE is missing", hint="apr lint FILE; apr lint --list")
    with ci_reports("lint", file, junit, sarif) as write:
        found = aprfmt.lint(file, fail_at=fail_at, select=select or (), ignore=ignore or ())
        if junit or sarif:
            from aprfmt.inspection.ci_reports import cases_of_lint

            write(cases_of_lint(found))
    out.result(found.to_json(), _findings(found))
    return 0 if found.passed else 1


def _level(rule: ValidationRule) -> str:
    from aprfmt.inspection.lint.run import LEVELS

    return LEVELS[rule.level]


def _rules(rules: tuple[ValidationRule, ...]) -> Iterator[str]:
    for rule in rules:
        yield f"{out.style(_level(rule).ljust(5), _STYLES[_level(rule)])}  {out.style(rule.id, 'bold')}"
        yield from pairs([("requires", rule.holds), ("because", rule.why), ("source", rule.source)], indent=7, label=9)


def _findings(found: Lint) -> Iterator[str]:
    yield f"{out.style(printable(found.file), 'bold')}  {found.format}"
    for row in found.findings:
        tensor = f" ({row.tensor})" if row.tensor is not None else ""
        yield f"{out.style(row.level.ljust(5), _STYLES[row.level])}  {out.style(row.id, 'bold')}"
        yield from _wrapped(printable(row.message + tensor))
        if row.suggestion:
            yield from _wrapped("→ " + printable(row.suggestion))
    counts = [plural(n, word) for level, word in _WORDS if (n := found.count(level))]
    word, style = ("passed", "green") if found.passed else ("FAILED", "red")
    yield f"{out.style(word, style)}: {', '.join(counts) or 'no findings'} by {plural(len(found.rules), 'rule')}"


def _wrapped(text: str) -> list[str]:
    """`text` behind the column of levels; whole lines where another program reads them."""
    import textwrap

    if not out.data_stream.isatty():
        return [" " * 7 + text]
    lines = textwrap.wrap(text, max(20, width() - 7), break_long_words=False, break_on_hyphens=False)
    return [" " * 7 + line for line in lines]
