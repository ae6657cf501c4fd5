"""The table of commands and the click group that imports only the module of the command that runs."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Annotated, Any, get_type_hints

import click
import typer
from click.exceptions import Exit
from typer.core import TyperArgument, TyperCommand, TyperGroup

from aprfmt.cli.options import JsonOption, QuietOption
from aprfmt.cli.output import out


@dataclass(frozen=True, slots=True)
class Row:
    """One command: name, module with its `command` function, line and section in `apr --help`."""

    name: str
    module: str
    help: str
    section: str


COMMANDS = {
    row.name: row
    for row in (
        Row("inspect", "inspect", "What a file is: container, dims, dtypes, tokenizer, origin.", "Look"),
        Row("tensors", "tensors", "One row a tensor, with statistics and hashes on request.", "Look"),
        Row("validate", "validate", "Check integrity and content; exit 5 when something fails.", "Look"),
        Row("diff", "diff", "Compare two models: exit 0 same, 1 different, 2 trouble.", "Look"),
        Row("architectures", "architectures", "The model families that can be converted.", "Look"),
        Row("import", "import_", "safetensors, Hugging Face folder, GGUF, hf://… to .apr.", "Convert"),
        Row("export", "export", "A model to GGUF, safetensors, a Hugging Face folder or MLX.", "Convert"),
        Row("convert", "convert", "Any readable form to any writable form in one step.", "Convert"),
        Row(
            "quantize",
            "quantize",
            "A model in fewer bits, by llama.cpp's mixes; --list shows them.",
            "Convert",
        ),
        Row("shard", "shard", "A model as .apr files of a chosen size, with a manifest.", "Convert"),
        Row("stamp", "stamp", "Edit provenance and metadata; tensor bytes stay untouched.", "Convert"),
        Row("distill", "distill", "A student learns what a larger model answers.", "Train"),
        Row("pretrain", "pretrain", "A model learns from text alone.", "Train"),
        Row("eval", "eval", "Cross entropy on held-out text, and the KL to a teacher.", "Train"),
        Row("report", "report", "One page about a training run, or about a model.", "Train"),
        Row("demo", "demo", "The main job on a small model, each step timed and checked.", "Try"),
    )
}

_EPILOG = """Every command takes .apr, .gguf, .safetensors, *.safetensors.index.json and Hugging Face
folders; the bytes decide, not the suffix. Add --json for one JSON object on stdout. `apr COMMAND --help`
shows examples."""


# Plain help texts: rich would add 100 ms and escape the brackets of `[default: ...]`.
typer.core.HAS_RICH = False


class PlainCommand(TyperCommand):
    """A command whose help has the same sections under every click release."""

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Usage, description and examples, arguments, options."""
        self.format_usage(ctx, formatter)
        self.format_help_text(ctx, formatter)
        for title, kind in (("Arguments", click.Argument), ("Options", click.Option)):
            params = [param for param in self.get_params(ctx) if isinstance(param, kind)]
            records = [record for param in params if (record := param.get_help_record(ctx)) is not None]
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


class LazyGroup(TyperGroup):
    """A group over COMMANDS; `--help` and unknown names are answered from the table alone."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names in the table's order."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of that name, its module imported now; None when there is none."""
        row = COMMANDS.get(cmd_name)
        if row is None:
            return None
        app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
        function: Any = import_module(f"aprfmt.cli.{row.module}").command
        settings = {"help_option_names": ["-h", "--help"]}
        app.command(row.name, cls=PlainCommand, context_settings=settings)(function)
        command = typer.main.get_command(app)
        _restore_argument_help(command, function)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click does; an unknown name suggests the nearest command."""
        from difflib import get_close_matches

        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            near = get_close_matches(args[0], COMMANDS, n=1)
            suggestion = f" Did you mean {near[0]!r}?" if near else ""
            raise click.UsageError(f"no such command {args[0]!r}.{suggestion}", ctx)
        return super().resolve_command(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Commands by section, then the few options of `apr` itself."""
        for section in dict.fromkeys(row.section for row in COMMANDS.values()):
            with formatter.section(section):
                rows = [(row.name, row.help) for row in COMMANDS.values() if row.section == section]
                formatter.write_dl(rows, col_max=max(map(len, COMMANDS)))
        options = [record for p in self.get_params(ctx) if (record := p.get_help_record(ctx)) is not None]
        with formatter.section("Options"):
            formatter.write_dl(options)


def _restore_argument_help(command: click.Command, function: Any) -> None:
    """click 8.5 gave arguments a help text of its own and so clears the one that typer 0.20 has set."""
    hints = get_type_hints(function, include_extras=True)
    for param in command.params:
        if isinstance(param, TyperArgument) and not param.help:
            param.help = hints[param.name or ""].__metadata__[0].help


def build() -> click.Command:
    """The whole command line as a click command."""
    app = typer.Typer(
        cls=LazyGroup,
        help="Package language models: APR, GGUF, safetensors, Hugging Face folders; no loss.",
        epilog=_EPILOG,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback(invoke_without_command=True)(_root)
    return typer.main.get_command(app)


def _root(
    ctx: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    if version:
        raise click.UsageError("--version stands alone (with --json for a JSON object)")
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help(), err=out.mode == "json")
        if out.mode == "json":
            raise click.UsageError("no command given")


def finish(group: click.Command, arguments: list[str]) -> int:
    """Runs `group` on `arguments`; the value a command returns is its exit code, None is 0."""
    try:
        with group.make_context("apr", list(arguments)) as ctx:
            result = group.invoke(ctx)
    except Exit as stop:
        return stop.exit_code
    return result if isinstance(result, int) else 0
