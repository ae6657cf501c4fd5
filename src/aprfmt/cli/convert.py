"""`apr import`, `export`, `convert`, `quantize` and `shard` convert models; `stamp` edits metadata."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from aprfmt.cli.complete import complete_mix
from aprfmt.cli.options import Common, ForceOption, ModelArgument, OutputOption, with_options
from aprfmt.cli.output import as_text, out, pairs, printable, progress_bar, table, tokens, wrapped
from aprfmt.cli.report_text import done_text, plan_text
from aprfmt.convert.options import Access, ConvertCall, ImportCall, QuantizeCall, Stated
from aprfmt.errors import RefusedError, UsageError
from aprfmt.schema import OptionRow, rows
from aprfmt.text import format_bytes

if TYPE_CHECKING:
    from aprfmt.convert.api import Report


_ALL = rows(ConvertCall, OptionRow)
_OF_SHARD = {
    **{name: _ALL[name] for name in ("plan", "force", *rows(Access, OptionRow), "follow_links")},
    "shard_size": replace(_ALL["shard_size"], default="5GB"),
}
_OF_STAMP = rows(Stated, OptionRow) | {"tokenizer": _ALL["tokenizer"]}


@dataclass(kw_only=True)
class Conversion(Common):
    """A command that calls a conversion with the options of its schema."""

    def run(self, verb: str, function: Callable[..., Report], *paths: object, **fixed: object) -> None:
        """Calls `function` and prints its report or plan; the last of `paths` is the output."""
        refuse_terminal(paths[-1])
        report_of(verb, partial(function, *paths), self.given() | fixed)


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

        say_what_is_written(self.output, self.given().get("format"))
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

        shard_size = self.given().get("shard_size", _OF_SHARD["shard_size"].default)
        parse_size(shard_size, name="shard_size")  # other commands accept 0: no limit
        self.run("sharding", convert_model, self.file, self.output, format="apr-shards", shard_size=shard_size)


@with_options(rows(QuantizeCall, OptionRow))
@dataclass(kw_only=True)
class Quantize(Conversion):
    """Quantize a model to Q4_K_M, Q8_0, ..., with the same types and bytes as llama.cpp's quantize tool.

    \b
    apr quantize --list
    apr quantize ./Qwen2.5-0.5B q4_k_m        (writes Qwen2.5-0.5B-Q4_K_M.gguf)
    apr quantize ./Qwen2.5-0.5B q4_k_m -o qwen.gguf --verify
    apr quantize model.apr iq3_m -o small.gguf --imatrix model.imatrix.gguf
    apr quantize model.apr iq2_m -o small.gguf --imatrix auto --data text.txt
    apr quantize model.gguf q4_k_m -o m.gguf --tensor-type ffn_down=q6_k --plan
    """

    file: Annotated[
        str | None, typer.Argument(metavar="FILE", help="A model: .apr, .gguf, .safetensors or a folder.")
    ] = None
    mix: Annotated[
        str | None, typer.Argument(metavar="MIX", help="q4_k_m, q8_0, ... (see --list).", autocompletion=complete_mix)
    ] = None
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="PATH", help="Output .gguf or .apr; default: NAME-MIX.gguf."),
    ] = None
    list_mixes: Annotated[bool, typer.Option("--list", help="List the quantization types, with advice.")] = False

    def __call__(self) -> None:
        """Runs the command."""
        if self.list_mixes:
            _list_mixes()
            return
        if self.file is None or self.mix is None:
            missing = "FILE" if self.file is None else "MIX"
            hint = f"apr quantize {self.file or 'FILE'} MIX, such as q4_k_m; apr quantize --list shows all"
            raise UsageError(f"{missing} is missing", hint=hint)
        import aprfmt
        from aprfmt.api import AUTO, cached_imatrix
        from aprfmt.convert.mixes import find_mix, quantized_name
        from aprfmt.io.sink import check_target

        if find_mix(self.file) and not find_mix(self.mix) and not Path(self.file).exists():
            raise UsageError("FILE must come before MIX", hint=f"apr quantize {self.mix} {self.file}")
        output = self.output or Path(quantized_name(self.file, self.mix))
        if not output.suffix:
            hint = f"-o {output}.gguf, or {output}.apr"
            raise UsageError("the output has no suffix", path=output, hint=hint)

        given = self.given()
        data, auto = given.get("data"), {}
        if given.get("imatrix") == AUTO and data and not given.get("plan"):
            check_target(output, map(str, data), given.get("force", False))
            more = {name: given[name] for name in ("chunks", "text_field") if name in given}
            with progress_bar("computing", tokens) as progress:
                path, warnings = cached_imatrix(self.file, data, **more, progress=progress, log=out.progress_line)
            for warning in warnings:
                out.warning(warning)
            auto = {"imatrix": path, "data": (), "chunks": None, "text_field": "text"}
        self.run("quantizing", partial(aprfmt.quantize_model, mix=self.mix), self.file, output, **auto)


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
    output: Annotated[Path | None, typer.Option("--output", "-o", metavar="PATH", help="Where to write.")] = None
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
            hint = f"apr stamp {self.file} -o stamped{self.file.suffix} --license MIT"
            raise UsageError("give either -o PATH or --in-place", hint=hint)
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
            self.file,
            self.file if self.output is None else self.output,
            hf_architecture=self.hf_architecture,
            hf_model_type=self.hf_model_type,
            architecture=self.architecture,
            set=values,
            types=types,
            in_place=self.in_place,
            plan=self.plan,
            force=self.force,
            **self.given(),
        )
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


def _list_mixes() -> None:
    from aprfmt.convert.mixes import ALIASES, MIXES, usual_bits

    body, cells = [], []
    for mix in MIXES.values():
        aliases = [alias for alias, name in ALIASES.items() if name == mix.name]
        bits = round(usual_bits(mix), 2)
        row = {"name": mix.name, "aliases": aliases, "bits_per_weight": bits, "file_type": mix.file_type}
        body.append(row | {"dtype": mix.dtype, "advice": mix.advice})
        cells.append([" = ".join([mix.name, *aliases]), f"{bits:.2f}", mix.advice])
    note = "Bits per weight for Llama-3.1-8B; models with row lengths that are not multiples of 256 need more."
    lines = [*table(["mix", "bits", "when"], cells, right="bits", indent=0, wrap=24), "", *wrapped(note)]
    out.result({"count": len(body), "mixes": body}, lines)


def say_what_is_written(output: Path, format: str | None) -> None:
    """Prints a hint if neither a suffix nor --format determines the format of `output`."""
    if format is None and not output.suffix and not output.is_dir():
        out.hint(f"{output} has no suffix: writing a Hugging Face folder; for a GGUF use -o {output}.gguf")


def report_of(verb: str, function: Callable[..., Report], given: Mapping[str, object]) -> None:
    """Calls the conversion `function` with the options `given`; prints its report or plan."""
    plan = bool(given.get("plan"))
    with progress_bar(verb) as progress:
        report = function(progress=None if plan else progress, **given)
    for warning in report.warnings:
        out.warning(warning)
    out.result(report.to_json(), plan_text(report) if plan else done_text(report))


def refuse_terminal(output: object) -> None:
    """Refuses `-` as output: models are written atomically, to files."""
    if str(output) == "-":
        raise RefusedError("a model cannot be written to standard output", hint="-o FILE")
