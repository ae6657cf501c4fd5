"""`apr merge-adapter`: merge LoRA adapters into a base model, or extract one from two models."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Annotated

import typer

from aprfmt.cli.conversion import Conversion
from aprfmt.cli.options import OutputOption, with_options
from aprfmt.cli.output import out
from aprfmt.convert.options import ExtractAdapterCall, MergeAdapterCall
from aprfmt.errors import UsageError
from aprfmt.schema import OptionRow, rows


@with_options(rows(MergeAdapterCall, OptionRow) | {"rank": rows(ExtractAdapterCall, OptionRow)["rank"]})
@dataclass(kw_only=True)
class MergeAdapter(Conversion):
    """Merge LoRA adapters into a model; with --unmerge, extract an adapter from a base and its fine-tune.

    A quantized base is dequantized and requantized, to its own types or to --quantize.

    \b
    apr merge-adapter ./Qwen2.5-0.5B ./my-lora -o merged --format hf
    apr merge-adapter m.gguf a.gguf b.gguf -o ab.gguf --weight 0.7 --weight 0.3
    apr merge-adapter m.gguf a.gguf -o small.gguf --quantize q4_k_m --plan
    apr merge-adapter ./base ./fine-tune --unmerge --rank 64 -o lora --format hf
    """

    file: Annotated[str, typer.Argument(metavar="BASE", help="The base model, in any supported format.")]
    adapters: Annotated[
        list[str],
        typer.Argument(metavar="ADAPTER...", help="One or more adapters; with --unmerge, the fine-tuned model."),
    ]
    output: OutputOption
    unmerge: Annotated[bool, typer.Option("--unmerge", help="Extract an adapter from BASE and a fine-tune of it.")] = (
        False
    )

    def __call__(self) -> None:
        """Runs the command."""
        from aprfmt.cli.special_lines import is_adapter, is_model
        from aprfmt.convert.merge_adapters import extract_adapter, merge_adapter

        given = self.given()
        if not self.unmerge:
            if "rank" in given:
                raise UsageError("--rank is for --unmerge", hint="leave out --rank: a merged adapter has its own rank")
            if is_adapter(self.file) and len(self.adapters) == 1 and is_model(self.adapters[0]):
                base, adapter = self.adapters[0], self.file
                if not is_adapter(base):  # the other way round
                    self.file, self.adapters = base, [adapter]
                    out.note(shlex.join(["apr", "merge-adapter", base, adapter, "-o", str(self.output)]))
            self.run("merging", merge_adapter, self.file, self.adapters, self.output)
            return
        if len(self.adapters) != 1:
            raise UsageError(
                "--unmerge takes a base and one fine-tuned model", hint="apr merge-adapter BASE TUNED --unmerge"
            )
        known = rows(ExtractAdapterCall, OptionRow)
        if (odd := next((name for name in given if name not in known), None)) is not None:
            raise UsageError(f"--{odd.replace('_', '-')} does not apply to --unmerge")
        out.progress_line(f"extracting what {self.adapters[0]} adds to its base {self.file}")
        self.run("extracting", extract_adapter, self.file, self.adapters[0], self.output)
