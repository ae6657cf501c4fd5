"""The table of commands, and the typer application in which only the command that runs is a real one."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import import_module
from typing import Annotated, Any, Protocol

import typer
from typer.core import TyperGroup

from aprfmt.cli.complete import SHELL_OPTIONS
from aprfmt.cli.options import JsonOption, QuietOption
from aprfmt.cli.output import out
from aprfmt.cli.sections import SectionedCommand
from aprfmt.errors import RunError, UsageError


@dataclass(frozen=True, slots=True)
class Row:
    """One command: its name, `module` or `module:callable` in this package, its line and section in `apr --help`."""

    name: str
    place: str
    help: str
    section: str


COMMANDS = {
    row.name: row
    for row in (
        Row("inspect", "look:inspect", "What a file is: container, dimensions, dtypes, tokenizer.", "Look"),
        Row("tensors", "look:tensors", "One row per tensor, with statistics and hashes on request.", "Look"),
        Row("tree", "tree:tree", "The modules as a tree, equal layers folded; dot, Mermaid.", "Look"),
        Row("hex", "hex:hex", "The bytes of a file with their meaning, or a tensor's blocks.", "Look"),
        Row("validate", "look:validate", "Check integrity and content; exit 5 if a check fails.", "Look"),
        Row("lint", "lint:lint", "What a file could do better; exit 1 if there is anything.", "Look"),
        Row("diff", "compare:diff", "Compare two models; exit 0: same, 1: different, 2: trouble.", "Look"),
        Row("vocab", "vocab", "Text to tokens and back; how two tokenizers differ.", "Look"),
        Row("report", "measure:report", "A page about a model or a training run.", "Look"),
        Row("architectures", "look:architectures", "The supported model families.", "Look"),
        Row("import", "convert:Import", "safetensors, Hugging Face folder, GGUF, hf://... to .apr.", "Convert"),
        Row("export", "convert:Export", "To GGUF, safetensors, a Hugging Face folder or MLX.", "Convert"),
        Row("convert", "convert:Convert", "Any readable form to any writable one, in one step.", "Convert"),
        Row("quantize", "convert:Quantize", "Fewer bits, by llama.cpp's mixes; --list shows them.", "Convert"),
        Row("merge", "merge_models:Merge", "Several models into one: slerp, ties, dare, layers of each.", "Convert"),
        Row("merge-adapter", "merge:MergeAdapter", "Adapters into their base; --unmerge extracts one.", "Convert"),
        Row("prune", "prune:Prune", "Leave out layers of a model, or parts of each.", "Convert"),
        Row("imatrix", "imatrix:Imatrix", "Which columns matter, for a better quantization.", "Convert"),
        Row("shard", "convert:Shard", "Split into .apr files of limited size, with a manifest.", "Convert"),
        Row("stamp", "convert:Stamp", "Edit provenance and metadata; tensor bytes stay untouched.", "Convert"),
        Row("run", "run:Run", "Ask a model, talk with it, or embed texts, in llama.cpp.", "Run"),
        Row("bench", "bench:Bench", "Speed and memory in llama.cpp; several files in turns.", "Run"),
        Row("push", "push", "A model on the hub, with a card of origin and checksums.", "Convert"),
        Row("qa", "qa:qa", "Gates that a broken model fails; exit 1 if one does.", "Run"),
        Row("distill", "training:Distill", "Train a student on the answers of a larger model.", "Train"),
        Row("teacher", "teacher:Teacher", "What a teacher says on text, as files to distil from.", "Train"),
        Row("pretrain", "training:Pretrain", "Train a model on text alone.", "Train"),
        Row("data", "data:Data", "What training data hold, and what of it is learned.", "Train"),
        Row("eval", "measure:evaluate", "Cross entropy on held-out text, and the KL to a teacher.", "Train"),
        Row("doctor", "doctor:doctor", "What is installed, what works, what is missing.", "Try"),
        Row("demo", "demo", "The main job on a small model, each step timed and checked.", "Try"),
    )
}

_EPILOG = """Every command reads .apr, .gguf, .safetensors, *.safetensors.index.json and Hugging Face
folders, recognised by their bytes, not by their suffix. Add --json for one JSON object on stdout. See
`apr COMMAND --help` for options and examples."""


class _Formatter(Protocol):
    """What typer hands to `format_commands`."""

    def section(self, name: str) -> AbstractContextManager[None]: ...

    def write_dl(self, rows: Sequence[tuple[str, str]], col_max: int = ...) -> None: ...


class _Group(TyperGroup):
    def get_params(self, ctx: Any) -> list[Any]:
        """The options, those of completion in our words: typer's texts know no name of a shell."""
        params: list[Any] = super().get_params(ctx)
        for option in params:
            option.help = SHELL_OPTIONS.get(option.opts[0], option.help)
        return params

    def format_commands(self, ctx: object, formatter: _Formatter) -> None:
        """The commands under the names of their sections."""
        for section in dict.fromkeys(row.section for row in COMMANDS.values()):
            with formatter.section(section):
                rows = [(row.name, row.help) for row in COMMANDS.values() if row.section == section]
                formatter.write_dl(rows, col_max=max(map(len, COMMANDS)))


def build(wanted: str | None) -> typer.Typer:
    """The command line, of the command `wanted` alone where there is one; for None with every module imported."""
    settings = {"help_option_names": ["-h", "--help"]}
    app = typer.Typer(
        cls=_Group,
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
            if isinstance(function, type):  # a dataclass of options
                _put_own_first(function)
        kind = getattr(function, "command_class", SectionedCommand)
        app.command(row.name, cls=kind, short_help=row.help, context_settings=settings)(function)
    return app


def _put_own_first(command: type) -> None:
    """Options that a command alone has stand before those that it shares with others."""
    given = inspect.signature(command, eval_str=True).parameters
    own = [name for name in command.__annotations__ if name in given]
    order = dict.fromkeys([*own, *given])
    setattr(command, "__signature__", inspect.Signature([given[name] for name in order]))  # noqa: B010


def _not_imported() -> None:
    """Stands for a command that this command line does not name."""


def _root(
    ctx: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    if version:
        raise UsageError("--version stands alone (with --json for a JSON object)")
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help(), err=out.mode == "json")
        if out.mode == "json":
            raise UsageError("no command given", hint="apr --help")


def dispatch(app: typer.Typer, arguments: Sequence[str]) -> int:
    """Runs a command line; what the command returns is its exit code, None is 0."""
    group = typer.main.get_command(app)
    try:
        # Not `app(...)`: it would turn Ctrl-C and closed pipes into endings of its own.
        with group.make_context("apr", list(arguments)) as ctx:
            result = group.invoke(ctx)
            if callable(result):  # a dataclass of options
                result = result()
    except typer.Exit as stop:
        return stop.exit_code
    except SystemExit as stop:  # of a library or a plugin: what was asked for is not done
        raise RunError(f"code of a library ended the command: exit({stop.code!r:.80})") from stop
    return result if isinstance(result, int) else 0
