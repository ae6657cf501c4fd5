"""Options that several commands share, declared once; groups of them that a command takes as a whole."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer

Group = Mapping[str, tuple[Any, Any]]
"""Parameter name -> (annotated type, default)."""


def takes(*groups: Group) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Gives a command the options of `groups`; it gets their values as the dict `more`."""
    added = {name: option for group in groups for name, option in group.items()}

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def command(**given: Any) -> Any:
            more = {name: given.pop(name) for name in added}
            return function(**given, more=more)

        signature = inspect.signature(function, eval_str=True)
        own = [param for param in signature.parameters.values() if param.name != "more"]
        new = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
            for name, (kind, default) in added.items()
        ]
        command.__signature__ = signature.replace(parameters=[*own, *new])  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in (*own, *new)}
        return command

    return decorate


ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="FILE", help="A model: .apr, .gguf, .safetensors, an index, a folder or hf://org/repo."
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout, also on failure.")]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing but errors.")]
OutputOption = Annotated[Path, typer.Option("--output", "-o", metavar="PATH", help="What to write.")]
ForceOption = Annotated[bool, typer.Option("--force", "-f", help="Replace the output if it exists.")]
PlanOption = Annotated[
    bool, typer.Option("--plan", help="Show bytes, memory, losses and names; read and write nothing more.")
]
DtypeOption = Annotated[
    str,
    typer.Option(
        "--dtype",
        "--quantize",
        metavar="TYPE",
        help="keep, f32, f16, bf16, f8_e4m3, aprq8 ..., or a mix such as q4_k_m (apr quantize --list).",
    ),
]
ArchOption = Annotated[
    str | None, typer.Option("--arch", metavar="NAME", help="Architecture, where the source does not say it.")
]
TokenizerOption = Annotated[
    Path | None,
    typer.Option(
        "--tokenizer", metavar="PATH", help="Tokenizer files (folder or tokenizer.json) to use instead."
    ),
]
LicenseOption = Annotated[
    str | None, typer.Option("--license", metavar="SPDX", help="Licence of the weights.")
]
DataSourceOption = Annotated[
    str | None, typer.Option("--data-source", metavar="ID", help="What the model was trained on.")
]
DataLicenseOption = Annotated[
    str | None, typer.Option("--data-license", metavar="SPDX", help="Licence of the training data.")
]
NoConfigOption = Annotated[
    bool, typer.Option("--allow-no-config", help="Go on without config.json; dims are inferred from shapes.")
]
UnmappedOption = Annotated[
    bool, typer.Option("--allow-unmapped", help="Keep tensors of unknown name under their own name.")
]
FormatOption = Annotated[
    str | None,
    typer.Option(
        "--format",
        metavar="NAME",
        help="apr, apr-shards, gguf, safetensors, hf or mlx; else the suffix of -o decides.",
    ),
]
PreOption = Annotated[
    str | None,
    typer.Option("--pre", metavar="NAME", help="llama.cpp pre-tokenizer, where it cannot be detected."),
]
PadStyleOption = Annotated[
    str,
    typer.Option("--pad-style", metavar="STYLE", help="Names of padding tokens in GGUF: llama.cpp or apr."),
]
ShardSizeOption = Annotated[
    str | None,
    typer.Option("--shard-size", metavar="SIZE", help="Largest file, such as 5GB or 500MiB; 0: one file."),
]
VerifyOption = Annotated[
    bool,
    typer.Option("--verify", help="Load the result in llama.cpp and generate a little."),
]
MACHINE: Group = {
    "threads": (
        Annotated[
            int | None, typer.Option("--threads", metavar="N", help="Worker threads; else one a processor.")
        ],
        None,
    ),
    "max_memory": (
        Annotated[
            str | None,
            typer.Option(
                "--max-memory",
                metavar="SIZE",
                help="Most memory to take, such as 300MiB.",
            ),
        ],
        None,
    ),
    "fsync": (
        Annotated[
            bool,
            typer.Option(
                "--fsync/--no-fsync",
                help="Wait until the disk has the output.",
            ),
        ],
        True,
    ),
}
"""How much of the machine a conversion may take."""

QUANTISING: Group = {
    "imatrix": (
        Annotated[
            Path | None,
            typer.Option(
                "--imatrix", metavar="FILE", help="Importance matrix of llama-imatrix, old form or new."
            ),
        ],
        None,
    ),
    "tensor_type": (
        Annotated[
            list[str],
            typer.Option(
                "--tensor-type",
                metavar="REGEX=TYPE",
                help="Type of the tensors whose GGUF name has the pattern; may be given again, the first one counts.",
            ),
        ],
        [],
    ),
    "output_type": (
        Annotated[str | None, typer.Option("--output-type", metavar="TYPE", help="Type of the output head.")],
        None,
    ),
    "embedding_type": (
        Annotated[
            str | None, typer.Option("--embedding-type", metavar="TYPE", help="Type of the token embedding.")
        ],
        None,
    ),
    "pure": (
        Annotated[
            bool, typer.Option("--pure", help="Every matrix in the one type, without the mix's exceptions.")
        ],
        False,
    ),
    "leave_output": (
        Annotated[bool, typer.Option("--leave-output", help="Keep the output head as it is.")],
        False,
    ),
    "allow_requantize": (
        Annotated[
            bool,
            typer.Option("--allow-requantize", help="Quantise what is quantised already; it loses twice."),
        ],
        False,
    ),
}
"""What goes with a mix."""
