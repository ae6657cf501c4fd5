"""`apr prune`: drop layers of a model, or reduce their width."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import partial
from typing import Annotated

import typer

from aprfmt.cli.convert import refuse_terminal, report_of
from aprfmt.cli.options import Common, Derived, DtypeOptions, Machine, ModelArgument, NoMtpOption, OutputOption
from aprfmt.cli.options import PresetOptions as MixOptions


@dataclass(kw_only=True)
class Prune(Common, Machine, MixOptions, Derived, DtypeOptions):
    """Prune a model's layers (depth) or the width of each layer; remaining weights are unchanged.

    With --width, the channels, neurons and heads with the largest weights are kept. Train the pruned model
    afterwards, for example with apr distill.

    \b
    apr prune ./Qwen2.5-0.5B --drop-layers 16-21 -o small --format hf
    apr prune m.gguf --keep-layers 0-9,20-31 -o m20.gguf --plan
    apr prune m.apr --width ffn=64,heads=2,kv_heads=1 -o narrow.apr
    """

    file: ModelArgument
    output: OutputOption
    drop_layers: Annotated[
        str | None, typer.Option(metavar="LIST", help="Layers to drop, numbered from 0: 10-15,20.")
    ] = None
    keep_layers: Annotated[
        str | None, typer.Option(metavar="LIST", help="Layers to keep, instead of --drop-layers.")
    ] = None
    width: Annotated[
        str | None,
        typer.Option(metavar="SIZES", help="Keep this many hidden, ffn, heads, kv_heads: hidden=512,heads=8."),
    ] = None
    no_mtp: NoMtpOption = False

    def __call__(self) -> None:
        """Runs the command."""
        from aprfmt.convert.pruning import prune_model

        refuse_terminal(self.output)
        given = {
            f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("file", "output", "as_json", "quiet")
        }
        report_of(self.plan, "pruning", partial(prune_model, self.file, self.output), given)
