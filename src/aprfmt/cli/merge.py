"""`apr merge`: merge several models into one."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Annotated

import typer

from aprfmt.cli.conversion import Conversion
from aprfmt.cli.options import OutputOption, with_options
from aprfmt.cli.output import out
from aprfmt.convert.options import MergeCall
from aprfmt.errors import UsageError
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
        from aprfmt.cli.special_lines import first_part
        from aprfmt.convert.merge_models import merge_models

        models, given = self.models or [], self.given()
        config: dict[str, str | None] = {}
        if len(models) == 1 and models[0].endswith((".yaml", ".yml")) and "config" not in given:
            models, config = [], {"config": models[0]}  # as mergekit-yaml takes it
        elif not models and "config" not in given and str(given.get("recipe", "")).endswith((".yaml", ".yml")):
            config = {"config": given["recipe"], "recipe": None}
        elif "method" not in given and (first := first_part(models)) is not None:
            from aprfmt.convert.api import convert_model

            out.note(shlex.join(["apr", "convert", first, "-o", str(self.output)]))
            self.run("joining", convert_model, first, self.output)
            return
        elif not {"config", "method"} & {*given} and "weight" in given and len(models) > 1:
            line = shlex.join(["apr", *out.arguments, "--method", "linear"])
            if {"base", "density", "lambda_"} & {*given}:
                raise UsageError("no merge method given", hint=f"{line}\nother methods: ties, dare, task-arithmetic")
            out.note(line)
            config = {"method": "linear"}  # weights of models are a mean
        self.run("merging", merge_models, models, self.output, **config)
