"""`apr merge-adapter`: merge LoRA adapters into a base model, or extract one from two models."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import partial
from typing import Annotated

import typer

from aprfmt.cli.convert import refuse_terminal, report_of
from aprfmt.cli.options import Common, Derived, DtypeOptions, Machine, OutputOption
from aprfmt.cli.options import PresetOptions as MixOptions
from aprfmt.errors import UsageError

_MERGE_ONLY = (
    *("arch", "imatrix", "tensor_type", "output_type", "embedding_type", "pure", "leave_output", "tokenizer"),
    *("no_tokenizer", "pre", "shard_size", "bits", "group_size", "recipe", "verify", "weight"),
)


@dataclass(kw_only=True)
class MergeAdapter(Common, Machine, MixOptions, Derived, DtypeOptions):
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
    weight: Annotated[
        list[float] | None,
        typer.Option(metavar="X", help="Scale of the adapters: one for all, or one for each, in order."),
    ] = None
    unmerge: Annotated[bool, typer.Option("--unmerge", help="Extract an adapter from BASE and a fine-tune of it.")] = (
        False
    )
    rank: Annotated[int | None, typer.Option(metavar="N", min=1, help="With --unmerge: rank of the adapter (32).")] = (
        None
    )

    def __call__(self) -> None:
        """Runs the command."""
        from aprfmt.convert.merging import extract_adapter, merge_adapter

        refuse_terminal(self.output)
        own = {"file", "adapters", "output", "unmerge", "rank", "weight", "as_json", "quiet", "allow_requantize"}
        given = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in own}
        if not self.unmerge:
            if self.rank is not None:
                raise UsageError("--rank is for --unmerge", hint="leave --rank out: a merged adapter has its own rank")
            given["weight"] = self.weight or [1.0]
            report_of(self.plan, "merging", partial(merge_adapter, self.file, self.adapters, self.output), given)
            return
        if len(self.adapters) != 1:
            raise UsageError(
                "--unmerge takes a base and one fine-tuned model", hint="apr merge-adapter BASE TUNED --unmerge"
            )
        defaults = {f.name: f.default for f in fields(self)}
        odd = next((name for name in _MERGE_ONLY if getattr(self, name) != defaults[name]), None)
        if odd is not None:
            raise UsageError(f"--{odd.replace('_', '-')} does not apply to --unmerge")
        given = {name: value for name, value in given.items() if name not in _MERGE_ONLY} | {"rank": self.rank or 32}
        report_of(self.plan, "extracting", partial(extract_adapter, self.file, self.adapters[0], self.output), given)
