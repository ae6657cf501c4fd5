"""Shared command-line options: single options as Annotated types, and those that are made from a schema.

typer reads the signature of a callable. A dataclass is a callable whose fields are the parameters.
"""

# No `from __future__ import annotations` here: as strings, the types of fields could not be resolved from the module
# of a subclass.
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

import typer

from aprfmt.cli import complete
from aprfmt.schema import BESIDE, MACHINE, OptionRow

_C = TypeVar("_C", bound="Common")

ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="FILE",
        help="A model: .apr, .gguf, .safetensors, .bin, an index, a folder, hf://org/repo, org/repo or a URL.",
    ),
]
OutputOption = Annotated[Path, typer.Option("--output", "-o", metavar="PATH", help="Output file or folder.")]
PageOption = Annotated[
    Path | None, typer.Option("--output", "-o", metavar="PATH", help="Also write an HTML report: page.html.")
]
ForceOption = Annotated[bool, typer.Option("--force", "-f", help="Overwrite the output if it exists.")]
PlanOption = Annotated[bool, typer.Option("--plan", help="Show what would be written; write nothing.")]
FilterOption = Annotated[
    str | None,
    typer.Option(
        metavar="GLOB",
        help="Show only matching names; without wildcards, names that contain GLOB.",
        autocompletion=complete.complete_tensor,
    ),
]
BaseOption = Annotated[
    str | None,
    typer.Option(
        metavar="PATH",
        help="Base model of an adapter: a folder with config.json, or a model file.",
        rich_help_panel=BESIDE,
    ),
]
TextFieldOption = Annotated[
    str, typer.Option(metavar="NAME", help="Field of a record, or column of a table, that contains the text.")
]
FollowLinksOption = Annotated[
    bool, typer.Option("--follow-links", help="Follow symlinks that point outside the folder.")
]
ThreadsOption = Annotated[int, typer.Option(metavar="N", min=0, help="Threads for llama.cpp; 0: half the CPUs.")]
EngineOption = Annotated[
    str | None, typer.Option(metavar="NAME", help="torch or llama. [default: torch on a GPU if supported, else llama]")
]
StrictOption = Annotated[bool, typer.Option("--strict", help="Fail on invalid records.")]


@dataclass(kw_only=True)
class Common:
    """A command whose options come from a schema."""

    options: ClassVar[Mapping[str, OptionRow]] = {}

    def given(self) -> dict[str, Any]:
        """The options of the schema that are set, by name."""
        return {name: value for name in self.options if (value := getattr(self, name)) is not None}


@dataclass(kw_only=True)
class LlamaMachine:
    """Resource limits of llama.cpp."""

    threads: Annotated[
        int, typer.Option(metavar="N", min=0, help="Threads for llama.cpp; 0: half the CPUs.", rich_help_panel=MACHINE)
    ] = 0
    gpu_layers: Annotated[
        int,
        typer.Option(
            metavar="N", min=0, help="Layers to offload to the GPU, if llama.cpp supports one.", rich_help_panel=MACHINE
        ),
    ] = 0


def parameter(row: OptionRow) -> tuple[str, object, None]:
    """A row of a schema as a field of a command's dataclass; None: not set."""
    names, metavar, words, default = [row.flag, *row.flags], row.metavar, row.help, row.default
    kind: object = list[row.kind] if row.many else row.kind  # type: ignore[name-defined]
    if row.optional:
        kind, metavar, words, default = str, f"[{row.optional}]", f"{words} --no-{row.flag[2:]}: off.", None
    elif row.kind is bool:
        names[0] += f"/--no-{row.flag[2:]}" if row.negatable else ""
        default = None
    else:
        metavar = metavar or "|".join(row.choices) or {int: "N", float: "X", Path: "PATH"}.get(row.kind, "TEXT")
    if default not in (None, ()):
        words += f" [default: {row.shown or (f'{default:g}' if isinstance(default, float) else default)}]"
    completion = complete.COMPLETIONS[row.complete] if row.complete else None
    option = typer.Option(
        *names, metavar=metavar or None, help=words, autocompletion=completion, rich_help_panel=row.section or None
    )
    return row.name, Annotated[kind | None, option], None  # type: ignore[operator]


def with_options(options: Mapping[str, OptionRow]) -> Callable[[type[_C]], type[_C]]:
    """Decorates a dataclass: its fields are the first parameters, `options` the others."""

    def decorate(command: type[_C]) -> type[_C]:
        names = {f.name for f in fields(command)}
        found = [parameter(row) for name, row in options.items() if name not in names]
        # From Python 3.12 on `make_dataclass` would set __module__ to this one, which lacks the names of annotations.
        namespace = {
            "__doc__": command.__doc__, "__module__": command.__module__, "options": options,
            "__annotations__": {name: kind for name, kind, _ in found}, **{name: unset for name, _, unset in found},
        }  # fmt: skip
        return dataclass(kw_only=True, eq=False, repr=False)(type(command.__name__, (command,), namespace))

    return decorate
