"""Tiny networks for the trainer's tests: folders of arch_models' cases, and what transformers computes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import arch_models
import torch
from torch import Tensor

from aprtrain.network.attention import Documents
from aprtrain.network.decoder import Decoder
from aprtrain.network.weights import load_decoder, open_network

TOKENS = 1000
"""Tokens of the folders' tokenizer."""


@dataclass(frozen=True)
class Tiny:
    """One model: its folder, the transformers model (float32, eval) and token ids [1, T] longer than its window."""

    folder: Path
    reference: Any
    ids_NT: Tensor

    def logits(self, change: Callable[[str, Tensor], Tensor] | None = None) -> Tensor:
        """transformers' logits [1, T, V], with its parameters changed by `change`(name, values) if that is given."""
        model = self.reference
        with torch.no_grad():
            if change is not None:
                model = copy.deepcopy(model)
                for name, parameter in model.named_parameters():
                    parameter.copy_(change(name, parameter))
            logits: Tensor = model(self.ids_NT, use_cache=False).logits
        return logits


class Maker:
    """Builds each case once, below one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tokenizers = arch_models.write_tokenizers(folder / "tokenizers", ["smollm2"], limit=TOKENS)
        self.made: dict[str, Tiny] = {}

    def __call__(self, case_id: str) -> Tiny:
        """The model of a case. Its folder must not be written to."""
        if case_id not in self.made:
            folder = self.folder / case_id.replace("/", "_")
            model = arch_models.build(arch_models.find_case(case_id), folder, self.tokenizers)
            self.made[case_id] = Tiny(folder, model, torch.tensor([arch_models.token_ids(folder)]))
        return self.made[case_id]


def load(path: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    """The decoder of any model file."""
    with open_network(path) as network:
        return load_decoder(network, dtype)


def our_logits(decoder: Decoder, ids_NT: Tensor, documents: Documents | None = None) -> Tensor:
    """All logits [N, T, V] without gradients."""
    with torch.no_grad():
        return decoder.logits(decoder(ids_NT, documents))


def error(a: Tensor, b: Tensor) -> float:
    """Largest difference over the largest value of `b`; infinite where a value is not finite."""
    if a.shape != b.shape or not bool(torch.isfinite(a).all()):
        return float("inf")
    return float((a - b).abs().max() / b.abs().max())


def same_winners(a: Tensor, b: Tensor) -> bool:
    """Whether every position has the same most likely token."""
    return bool((a.argmax(-1) == b.argmax(-1)).all())
