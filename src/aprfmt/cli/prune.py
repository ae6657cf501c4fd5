"""`apr prune`: drop layers or experts of a model, reduce the width of its layers, or trim its vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

from aprfmt.cli.conversion import Conversion
from aprfmt.cli.options import ModelArgument, OutputOption, with_options
from aprfmt.convert.options import PruneCall
from aprfmt.schema import OptionRow, rows


@with_options(rows(PruneCall, OptionRow))
@dataclass(kw_only=True)
class Prune(Conversion):
    """Prune a model's layers (depth), their width, experts, or the vocabulary; remaining weights are unchanged.

    With --width, the channels, neurons and heads with the largest weights are kept. With --experts, the model runs on
    the texts of --experts-from (with torch, on a GPU if available), and each layer keeps its most salient experts.
    Train the pruned model afterwards, for example with apr distill. With --vocab-from, the tokens that some texts use
    are kept: these texts have the same tokens as before under new ids, others are encoded with smaller ones.

    \b
    apr prune ./Qwen2.5-0.5B --drop-layers 16-21 -o small --format hf
    apr prune m.gguf --keep-layers 0-9,20-31 -o m20.gguf --plan
    apr prune m.apr --width ffn=64,heads=2,kv_heads=1 -o narrow.apr
    apr prune model.gguf --vocab-from src/ --vocab-from chats.jsonl -o domain.gguf
    """

    file: ModelArgument
    output: OutputOption

    def __call__(self) -> None:
        """Runs the command."""
        from aprfmt.convert.pruning import prune_model

        self.run("pruning", prune_model, self.file, self.output)
