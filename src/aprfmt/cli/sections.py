"""`--help` with options grouped into sections, named by typer's `rich_help_panel`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from typer.core import TyperCommand, TyperOption

from aprfmt.cli.commands import COMMANDS
from aprfmt.schema import SECTIONS
from aprfmt.types import construct

if TYPE_CHECKING:
    from typer._click import Context, HelpFormatter, Parameter

EVERYWHERE = [
    TyperOption(param_decls=names, is_flag=True, default=False, expose_value=False, help=words)
    for *names, words in (
        ("as_json", "--json", "Print one JSON object to stdout, even on failure."),
        ("quiet", "--quiet", "-q", "Print nothing but errors."),
    )
]
"""Options of every command; `Console.configure` reads them from the raw command line."""
_LAST = ("require_signature", *(option.name for option in EVERYWHERE), "help")
"""Options that --help shows last."""


def _require_signature(ctx: Context, parameter: Parameter, value: str | None) -> None:
    """Sets the environment variable that `formats.open` reads, in this process and those that it starts."""
    if value is None:
        return
    from aprfmt.trust.keys import SIGSTORE, read_signer
    from aprfmt.trust.signature import REQUIRED_SIGNER

    os.environ[REQUIRED_SIGNER] = value if value.startswith(SIGSTORE) else os.path.abspath(value)
    read_signer(value)


REQUIRE_SIGNATURE = TyperOption(
    param_decls=["require_signature", "--require-signature"],
    metavar="KEY",
    expose_value=False,
    callback=_require_signature,
    help="Refuse models that are not signed by KEY: a public key, certificates, or sigstore:ID,ISSUER.",
)
"""Option of every command that reads models."""


class SectionedCommand(TyperCommand):
    """A command whose help groups options by section; `plain_first` puts those without one first or last."""

    plain_first: ClassVar[bool] = True

    def __init__(self, name: str | None, **settings: object) -> None:
        construct(partial(super().__init__, name), settings)
        row = COMMANDS.get(name or "")
        self.params += [*([REQUIRE_SIGNATURE] if row is not None and row.reads_models else []), *EVERYWHERE]

    def parse_args(self, ctx: Context, args: list[str]) -> list[str]:
        """Gives switches with an optional value (`--resume [STEP]`) an explicit one, then parses."""
        for parameter in self.params:
            if parameter.param_type_name == "option" and (metavar := parameter.metavar or "").startswith("["):
                args = spell_out(args, parameter.opts[0], metavar.strip("[]").split("|")[1:])
        parsed: list[str] = super().parse_args(ctx, args)
        return parsed

    def sections(self, ctx: Context) -> dict[str, list[Parameter]]:
        """The parameters by section: arguments, options, those of SECTIONS, then others in order of appearance."""
        arguments: list[Parameter] = []
        plain: list[Parameter] = []
        titled: dict[str, list[Parameter]] = {title: [] for title in SECTIONS}
        for parameter in self.get_params(ctx):
            if parameter.param_type_name == "argument":
                arguments.append(parameter)
            elif not getattr(parameter, "hidden", False):
                title = getattr(parameter, "rich_help_panel", None)
                (titled.setdefault(title, []) if title else plain).append(parameter)
        plain.sort(key=lambda parameter: parameter.name in _LAST)
        options = {"Options": plain} | titled if self.plain_first else titled | {"Options": plain}
        return {title: found for title, found in ({"Arguments": arguments} | options).items() if found}

    def format_options(self, ctx: Context, formatter: HelpFormatter) -> None:
        """Writes the parameters by section."""
        for title, parameters in self.sections(ctx).items():
            records = [record for parameter in parameters if (record := parameter.get_help_record(ctx)) is not None]
            if records:
                with formatter.section(title):
                    formatter.write_dl(records, col_max=min(30, formatter.width // 2 - 4))


def spell_out(arguments: list[str], flag: str, words: Sequence[str] = ()) -> list[str]:
    """Rewrites `--flag 300` as `--flag=300`, `--flag` as `--flag=true`, `--no-flag` as `--flag=false`.

    A number behind the flag is its value, and so is one of `words`.
    """
    found: list[str] = []
    rest = iter(arguments)
    for word in rest:
        if word == "--":
            return [*found, word, *rest]
        if (word.isdecimal() or word in words) and found[-1:] == [f"{flag}=true"]:
            found[-1] = f"{flag}={word}"
        else:
            found.append({flag: f"{flag}=true", f"--no-{flag[2:]}": f"{flag}=false"}.get(word, word))
    return found
