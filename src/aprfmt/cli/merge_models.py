"""`apr merge`: merge several models into one."""

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

    Config, tokenizer and dtypes are taken from the base, or from the first model.

    \b
    apr merge A B -o OUT --method slerp --t 0.4
    apr merge a.gguf b.gguf -o c.gguf --method ties --base m.gguf --density 0.5
    apr merge A A -o D --method passthrough --layers 0-15 --layers 8-23
    apr merge --config recipe.yaml -o m.gguf --quantize q4_k_m --plan
    """

    models: Annotated[
        list[str] | None, typer.Argument(metavar="MODEL...", help="The models, in any supported formats.")
    ] = None
    output: OutputOption
    method: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="linear, weighted, slerp, ties, dare-linear, dare-ties, task-arithmetic or passthrough.",
        ),
    ] = None
    base: Annotated[str | None, typer.Option(metavar="FILE", help="The base model of the fine-tunes.")] = None
    config: Annotated[
        str | None, typer.Option(metavar="FILE", help="mergekit YAML config, instead of models and method.")
    ] = None
    weight: Annotated[
        list[float] | None, typer.Option(metavar="X", help="Weight of each model: one for all, or one each.")
    ] = None
    density: Annotated[
        list[float] | None,
        typer.Option(
            metavar="X", help="Fraction of the task vector to keep, for ties and dare: one for all, or one each."
        ),
    ] = None
    t: Annotated[
        list[float] | None,
        typer.Option(
            "--t", metavar="X", help="For slerp: 0 is the base, 1 the other; several values: a gradient. [default: 0.5]"
        ),
    ] = None
    normalize: Annotated[
        bool | None, typer.Option("--normalize/--no-normalize", help="Normalize the weights by their sum.")
    ] = None
    rescale: Annotated[
        str | None,
        typer.Option(
            metavar="HOW", help="Rescale after dropping: norm (default for dare), density, none (default for ties)."
        ),
    ] = None
    lambda_: Annotated[
        float | None, typer.Option("--lambda", metavar="X", help="Factor of the merged task vector.")
    ] = None
    scale: Annotated[list[float] | None, typer.Option(metavar="X", help="For passthrough: scale of the weights.")] = (
        None
    )
    layers: Annotated[
        list[str] | None, typer.Option(metavar="A-B", help="For passthrough: layers of each model, numbered from 0.")
    ] = None
    seed: Annotated[int, typer.Option(metavar="N", help="Random seed of dare.")] = 0
    pad_vocab: Annotated[
        bool, typer.Option("--pad-vocab", help="Pad or truncate embeddings to the first model's vocabulary.")
    ] = False

    def __call__(self) -> None:
        """Runs the command."""
        from aprfmt.convert.combining import merge_models

        refuse_terminal(self.output)
        own = {"models", "output", "as_json", "quiet", "allow_requantize"}
        given = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in own}
        given["layers"] = self.layers or ()
        report_of(self.plan, "merging", partial(merge_models, self.models or [], self.output), given)
