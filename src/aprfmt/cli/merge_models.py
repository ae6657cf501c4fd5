"""`apr merge`: several models into one."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import partial
from typing import Annotated

import typer

from aprfmt.cli.convert import refuse_terminal, report_of
from aprfmt.cli.options import Common, Derived, DtypeOptions, Machine, OutputOption
from aprfmt.cli.options import PresetOptions as MixOptions


@dataclass(kw_only=True)
class Merge(Common, Machine, MixOptions, Derived, DtypeOptions):
    """Merge models of one architecture: average, interpolate or add up their weights, or stack their layers.

    Config, tokenizer and dtypes are those of the base, or of the first model.

    \b
    apr merge A B -o OUT --method slerp --t 0.4
    apr merge a.gguf b.gguf -o c.gguf --method ties --base m.gguf --density 0.5
    apr merge A A -o D --method passthrough --layers 0-15 --layers 8-23
    apr merge --config recipe.yaml -o m.gguf --quantize q4_k_m --plan
    """

    models: Annotated[
        list[str] | None, typer.Argument(metavar="MODEL...", help="The models, in any readable forms.")
    ] = None
    output: OutputOption
    method: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="linear, weighted, slerp, ties, dare-linear, dare-ties, task-arithmetic or passthrough.",
        ),
    ] = None
    base: Annotated[str | None, typer.Option(metavar="FILE", help="The model that the others are fine-tunes of.")] = (
        None
    )
    config: Annotated[
        str | None, typer.Option(metavar="FILE", help="A recipe in mergekit's YAML, instead of models and method.")
    ] = None
    weight: Annotated[
        list[float] | None, typer.Option(metavar="X", help="Weight of each model: one for all, or one each.")
    ] = None
    density: Annotated[
        list[float] | None,
        typer.Option(metavar="X", help="Part of a model's changes that stays, for ties and dare: for all, or each."),
    ] = None
    t: Annotated[
        list[float] | None,
        typer.Option("--t", metavar="X", help="For slerp: 0 is the base, 1 the other; several: a gradient (0.5)."),
    ] = None
    normalize: Annotated[
        bool | None, typer.Option("--normalize/--no-normalize", help="Divide by the sum of weights.")
    ] = None
    rescale: Annotated[
        str | None,
        typer.Option(metavar="HOW", help="Rescale what is left after dropping: norm (dare), density, none (ties)."),
    ] = None
    lambda_: Annotated[float | None, typer.Option("--lambda", metavar="X", help="Factor of the sum of changes.")] = None
    scale: Annotated[list[float] | None, typer.Option(metavar="X", help="For passthrough: factor of the weights.")] = (
        None
    )
    layers: Annotated[
        list[str] | None, typer.Option(metavar="A-B", help="For passthrough: layers of each model, numbered from 0.")
    ] = None
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of what dare drops.")] = 0
    pad_vocab: Annotated[
        bool, typer.Option("--pad-vocab", help="Fill up or cut embeddings to the rows of the first model.")
    ] = False

    def __call__(self) -> None:
        """Runs the command."""
        from aprfmt.convert.combining import merge_models

        refuse_terminal(self.output)
        own = {"models", "output", "as_json", "quiet", "allow_requantize"}
        given = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in own}
        given["layers"] = self.layers or ()
        report_of(self.plan, "merging", partial(merge_models, self.models or [], self.output), given)
