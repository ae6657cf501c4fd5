"""`apr merge`: merge several models into one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from aprfmt.cli.conversion import Conversion
from aprfmt.cli.options import OutputOption, with_options
from aprfmt.convert.options import MergeCall
from aprfmt.schema import OptionRow, rows


@with_options(rows(MergeCall, OptionRow))
@dataclass(kw_only=True)
class Merge(Conversion):
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

    def __call__(self) -> None:
        """Runs the command."""
        from aprfmt.convert.merge_models import merge_models

        models, config = self.models or [], {}
        if len(models) == 1 and models[0].endswith((".yaml", ".yml")) and "config" not in self.given():
            models, config = [], {"config": models[0]}  # as mergekit-yaml takes it
        self.run("merging", merge_models, models, self.output, **config)
