"""`apr stamp`: edit metadata."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from aprfmt.cli.conversion import refuse_terminal
from aprfmt.cli.options import Common, ForceOption, with_options
from aprfmt.cli.output import as_text, out, pairs, printable
from aprfmt.convert.options import Network, Running, Stated
from aprfmt.errors import UsageError
from aprfmt.schema import OptionRow, rows
from aprfmt.text import format_bytes

_OF_STAMP = rows(Stated, OptionRow) | {
    "tokenizer": rows(Network, OptionRow)["tokenizer"],
    "follow_links": rows(Running, OptionRow)["follow_links"],
}


@with_options(_OF_STAMP)
@dataclass(kw_only=True)
class Stamp(Common):
    """Edit the metadata of an .apr file or the keys of a GGUF; tensor data is copied unchanged.

    \b
    apr stamp model.apr -o stamped.apr --license MIT --data-source wikitext
    apr stamp model.apr --in-place --set description='a small model'
    apr stamp model.gguf --in-place --set tokenizer.chat_template=@chat.jinja
    apr stamp model.gguf --in-place --set my.key:u32=7 --unset general.url --plan
    """

    file: Annotated[Path, typer.Argument(metavar="FILE", help="An .apr file or a GGUF.")]
    output: Annotated[Path | None, typer.Option("--output", "-o", metavar="PATH", help="Output file.")] = None
    hf_architecture: Annotated[
        str | None, typer.Option(metavar="CLASS", help="Model class in config.json, such as LlamaForCausalLM.")
    ] = None
    hf_model_type: Annotated[
        str | None, typer.Option(metavar="NAME", help="model_type in config.json, such as llama.")
    ] = None
    architecture: Annotated[str | None, typer.Option(metavar="NAME", help="Architecture, such as llama.")] = None
    set: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE", help="Set a key to text or JSON, or to the contents of @FILE; KEY:u32=7 sets the type."
        ),
    ] = None
    unset: Annotated[list[str] | None, typer.Option(metavar="KEY", help="Remove a key; repeatable.")] = None
    in_place: Annotated[bool, typer.Option("--in-place", help="Replace FILE itself, atomically.")] = False
    plan: Annotated[bool, typer.Option("--plan", help="Check, and show the changes; write nothing.")] = False
    force: ForceOption = False

    def __call__(self) -> None:
        """Runs the command."""
        from aprfmt.io.source import watch_opened

        if (self.output is None) != self.in_place:
            hint = shlex.join(["apr", *out.arguments, "--in-place"])
            hint = "leave out --in-place, or -o" if self.in_place else hint
            raise UsageError("use either -o PATH or --in-place", hint=hint)
        if self.output is not None:
            refuse_terminal(self.output)
        with watch_opened():
            self._stamp()

    def _stamp(self) -> None:
        from aprfmt.convert.stamp import stamp

        values, types = parse_assignments(self.set or [])
        for key in self.unset or ():
            if key in values:
                raise UsageError(f"{key!r} is both set and removed")
            values[key] = None
        report = stamp(
            self.file, self.file if self.output is None else self.output, hf_architecture=self.hf_architecture,
            hf_model_type=self.hf_model_type, architecture=self.architecture, set=values, types=types,
            in_place=self.in_place, plan=self.plan, force=self.force, **self.given(),
        )  # fmt: skip
        for warning in report.warnings:
            out.warning(warning)
        rows = [(key, as_text(value)) for key, value in report.stamped.items()]
        rows.append(("size", format_bytes(report.output_bytes)))
        name = out.style(printable(report.output), "bold")
        done = f"{out.style('stamped', 'green')} {name}"
        head = f"{out.style('plan', 'cyan')} for {name}; nothing is written" if self.plan else done
        out.result(report.to_json(), [head, *pairs(rows)])


def parse_assignments(items: list[str]) -> tuple[dict[str, object], dict[str, str]]:
    """Parses `KEY=VALUE` and `KEY:TYPE=VALUE` into (values by key, types by key); values stay unparsed text.

    `@FILE` is replaced by the file's text. Raises UsageError, StorageError.
    """
    from aprfmt.convert.gguf_edit import TYPES, Text
    from aprfmt.io.source import read_whole

    values: dict[str, object] = {}
    types: dict[str, str] = {}
    for item in items:
        key, equals, text = item.partition("=")
        name, colon, kind = key.rpartition(":")
        if colon and kind.removesuffix("[]") in TYPES:
            key, types[name] = name, kind
        if not key or not equals:
            raise UsageError(f"--set {item!r} is not KEY=VALUE", hint="--set author=me")
        if key in values:
            raise UsageError(f"--set given twice for {key!r}")
        if not text.startswith("@"):
            values[key] = Text(text)
            continue
        try:
            values[key] = read_whole(text[1:]).decode()
        except UnicodeDecodeError as error:
            raise UsageError(f"{text[1:]} is not UTF-8 text", path=text[1:], offset=error.start) from None
    return values, types
