"""Options that several commands share, declared once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

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
        help="keep, f32, f16, bf16, or a quantised type such as q8_0, q4_0.",
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
