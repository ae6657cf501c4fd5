"""The command table, and a typer application that imports only the command it runs."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Annotated

import typer
from typer.core import TyperGroup, TyperOption

from aprfmt.cli.commands import COMMANDS
from aprfmt.cli.complete import SHELL_OPTIONS
from aprfmt.cli.output import out, width
from aprfmt.cli.sections import EVERYWHERE, SectionedCommand
from aprfmt.errors import RunError, UsageError

if TYPE_CHECKING:
    from typer._click import Context, HelpFormatter, Parameter

_EPILOG = """Every command reads .apr, .gguf, .safetensors, *.safetensors.index.json and Hugging Face
folders; formats are detected by content, not by suffix. Add --json for one JSON object on stdout. Run
`apr COMMAND --help` for options and examples."""


_WIDEST = 140
"""Columns of --help in a wider terminal: longer lines are hard to read."""


class _Group(TyperGroup):
    def get_params(self, ctx: Context) -> list[Parameter]:
        """The options, with help for shell completion that names the supported shells."""
        *own, help_option = super().get_params(ctx)
        params = [*own, *EVERYWHERE, help_option]
        for option in params:
            if isinstance(option, TyperOption):
                option.help = SHELL_OPTIONS.get(option.opts[0], option.help)
        return params

    def format_commands(self, ctx: Context, formatter: HelpFormatter) -> None:
        """Writes the commands, grouped by section."""
        for section in dict.fromkeys(row.section for row in COMMANDS.values()):
            with formatter.section(section):
                rows = [(row.name, row.help) for row in COMMANDS.values() if row.section == section]
                formatter.write_dl(rows, col_max=max(map(len, COMMANDS)))


def build(wanted: str | None) -> typer.Typer:
    """The command line. Imports only the module of command `wanted`, or every module if it is None."""
    columns = min(_WIDEST, width())
    settings: dict[str, object] = {
        "help_option_names": ["-h", "--help"], "terminal_width": columns, "max_content_width": columns,
    }  # fmt: skip
    app = typer.Typer(
        cls=_Group,
        suggest_commands=False,  # failures.py does, by the table
        help="Package language models as APR, GGUF, safetensors or Hugging Face folders, without loss.",
        epilog=_EPILOG,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings=settings,
    )
    app.callback(invoke_without_command=True)(_root)
    for row in (COMMANDS[wanted],) if wanted in COMMANDS else COMMANDS.values():
        function = _not_imported
        if wanted in (None, row.name):
            module, _, name = row.place.partition(":")
            function = getattr(import_module(f"aprfmt.cli.{module}"), name or "command")
        kind = getattr(function, "command_class", SectionedCommand)
        app.command(row.name, cls=kind, short_help=row.help, context_settings=settings)(function)
    return app


def _not_imported() -> None:
    """Placeholder for a command whose module is not imported."""


def _root(
    ctx: typer.Context, version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False
) -> None:
    if version:
        raise UsageError("--version takes no command (add --json for a JSON object)")
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help(), err=out.mode == "json")
        if out.mode == "json":
            raise UsageError("no command given", hint="apr --help")


def dispatch(app: typer.Typer, arguments: Sequence[str]) -> int:
    """Runs a command line and returns its exit code: the command's return value, or 0 for None."""
    group = typer.main.get_command(app)
    try:
        # Not `app(...)`: it handles Ctrl-C and closed pipes itself, with other exit codes.
        with group.make_context("apr", list(arguments)) as ctx:
            result = group.invoke(ctx)
            if callable(result):  # a dataclass of options
                result = result()
    except typer.Exit as stop:
        return stop.exit_code
    except SystemExit as stop:  # from a library or plugin: the command did not finish
        raise RunError(f"a library ended the command: exit({stop.code!r:.80})") from stop
    return result if isinstance(result, int) else 0
