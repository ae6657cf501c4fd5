"""`apr transplant`: replace a model's tokenizer."""

from __future__ import annotations

from dataclasses import dataclass

from aprfmt.cli.conversion import Conversion
from aprfmt.cli.options import ModelArgument, OutputOption, with_options
from aprfmt.convert.options import TransplantCall
from aprfmt.schema import OptionRow, rows


@with_options(rows(TransplantCall, OptionRow))
@dataclass(kw_only=True)
class Transplant(Conversion):
    """Replace a model's tokenizer: rows of shared tokens are copied, those of new tokens are computed.

    With --donor, a new token is a combination of shared tokens, as in the donor's embeddings; without, the mean of the
    old tokens of its text. Train the model afterwards, for example with apr distill.

    \b
    apr transplant model.gguf --tokenizer ./Qwen2.5-0.5B -o transplanted.gguf
    apr transplant ./Qwen2.5-0.5B --donor model.gguf -o transplanted --format hf
    """

    file: ModelArgument
    output: OutputOption

    def __call__(self) -> None:
        """Runs the command."""
        from aprfmt.convert.transplant import transplant_model

        self.run("transplanting", transplant_model, self.file, self.output)
