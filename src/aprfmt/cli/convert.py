"""`apr import`, `export`, `convert` and `shard`."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from aprfmt.cli.conversion import Conversion, say_what_is_written
from aprfmt.cli.options import ModelArgument, OutputOption, with_options
from aprfmt.cli.output import out
from aprfmt.convert.options import Access, ConvertCall, ImportCall
from aprfmt.errors import UsageError
from aprfmt.schema import OptionRow, rows

_ALL = rows(ConvertCall, OptionRow)
_OF_SHARD = {
    **{name: _ALL[name] for name in ("plan", "force", *rows(Access, OptionRow), "follow_links")},
    "shard_size": replace(_ALL["shard_size"], default="5GB"),
}


@with_options(rows(ImportCall, OptionRow))
@dataclass(kw_only=True)
class Import(Conversion):
    """Import a model into one .apr file that can restore the source byte for byte.

    \b
    apr import model.gguf -o model.apr
    apr import ./Qwen2.5-0.5B -o qwen.apr --license apache-2.0
    apr import hf://org/repo -o model.apr --plan
    apr import ./my-lora -o lora.apr --base ./Qwen2.5-0.5B
    apr import text.gguf --mmproj mmproj.gguf -o model.apr
    """

    file: Annotated[str, typer.Argument(metavar="SRC", help="safetensors, an index, a folder, .gguf or hf://org/repo.")]
    output: OutputOption

    def __call__(self) -> None:
        """Runs the command."""
        from aprfmt.convert.api import import_model

        self.run("importing", import_model, self.file, self.output)


@with_options(rows(ConvertCall, OptionRow))
@dataclass(kw_only=True)
class Convert(Conversion):
    """Convert a model between any two supported formats in one step.

    \b
    apr convert model.gguf -o folder --format hf --dtype bf16
    apr convert ./Qwen2.5-0.5B -o qwen.gguf --dtype q4_k_m --imatrix qwen.dat
    apr convert ./my-lora -o lora.gguf --base ./Qwen2.5-0.5B
    """

    file: ModelArgument
    output: OutputOption

    def __call__(self) -> None:
        """Runs the command."""
        from aprfmt.convert.api import convert_model

        given = self.given()
        if given.get("format") == "mlx" and "-q" in out.arguments and not {"bits", "recipe"} & {*given}:
            raise UsageError("-q is --quiet and does not quantize; --bits 4 does")
        say_what_is_written(self.output, given.get("format"))
        self.run("converting", convert_model, self.file, self.output)


class Export(Convert):
    """Export a model for llama.cpp (gguf), transformers (hf, safetensors) or MLX.

    \b
    apr export model.apr -o model.gguf --verify
    apr export model.apr -o model.gguf --quantize q4_k_m
    apr export model.apr -o folder --format hf --shard-size 2GB
    apr export model.apr -o model.gguf --shard-size 2GB
    apr export model.apr -o mmproj.gguf --mmproj
    apr export model.apr -o model.gguf --modelfile
    """


@with_options(_OF_SHARD)
@dataclass(kw_only=True)
class ShardCommand(Conversion):
    """Split a model into .apr shards of limited size, in a folder with a manifest of their SHA-256 sums.

    Every command reads the folder, its manifest or any shard as the whole model; `apr convert` joins the shards.

    \b
    apr shard model.apr -o shards --shard-size 2GiB
    apr validate shards
    apr convert shards -o model.apr
    """

    file: ModelArgument
    output: OutputOption

    def __call__(self) -> None:
        """Runs the command."""
        from aprfmt.convert.api import convert_model
        from aprfmt.convert.parsing import parse_size

        if self.output.suffix.lower() in (".gguf", ".apr", ".safetensors"):
            parts = sorted(Path(self.file).glob("*-00001-of-*.gguf"))  # GGUFs are named by their first part
            source = str(parts[0]) if len(parts) == 1 else self.file
            join = shlex.join(["apr", "convert", source, "-o", str(self.output)])
            raise UsageError(
                f"shard writes a folder of .apr shards, not a {self.output.suffix} file",
                path=self.output,
                hint=f"to join shards: {join}; to split into several GGUFs: {join} --shard-size 5GB",
            )
        shard_size = self.given().get("shard_size", _OF_SHARD["shard_size"].default)
        parse_size(shard_size, name="shard_size")  # other commands accept 0: no limit
        self.run("sharding", convert_model, self.file, self.output, format="apr-shards", shard_size=shard_size)
