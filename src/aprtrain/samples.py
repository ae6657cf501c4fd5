"""Samples of the student's text at an evaluation: greedy continuations of the beginnings of held-out sequences."""

from __future__ import annotations

from typing import TypedDict

import torch
from torch.nn import functional

from aprfmt.texts.sequences import Windows
from aprfmt.tokenizer.encoding import tokenizer_json
from aprfmt.tokenizer.fast import load
from aprfmt.tokenizer.model import Tokenizer
from aprtrain.data.batches import batch_of
from aprtrain.network.decoder import Decoder, soft_cap

PROMPT_TOKENS, NEW_TOKENS = 24, 40
"""Tokens of a prompt, and of its continuation; a shorter --seq-len shortens both."""


class TextSample(TypedDict):
    """The beginning of a held-out sequence, and the student's continuation, up to its end token."""

    prompt: str
    text: str


def sample_texts(student: Decoder, windows: Windows, tokenizer: Tokenizer, count: int) -> list[TextSample]:
    """Greedy continuations of `count` held-out sequences, the same at every call; does not affect random states.

    All passes have one shape, [count, T], so that a compiled student is compiled once. Collective if the student's
    weights are sharded.
    """
    total = min(PROMPT_TOKENS + NEW_TOKENS, windows.seq_len)
    first = max(1, total * PROMPT_TOKENS // (PROMPT_TOKENS + NEW_TOKENS))
    tokens_NT = batch_of(windows, windows.select(count)).tokens_NT[:, :total].to(student.norm.device, copy=True)
    tokens_NT[:, first:] = 0  # causal: later positions have no effect
    with torch.no_grad():
        for at in range(first, total):
            hidden_ND = student(tokens_NT)[:, at - 1]
            logits_NV = functional.linear(hidden_ND.float(), student.head_weight.float())
            tokens_NT[:, at] = soft_cap(logits_NV, student.shape.logit_softcap).argmax(1)
    encoder, end = load(tokenizer_json(tokenizer)), tokenizer.special.get("eos")
    found: list[TextSample] = []
    for row in tokens_NT.tolist():
        new = row[first:]
        kept = new[: new.index(end)] if end in new else new
        found.append({"prompt": encoder.decode(row[:first]), "text": encoder.decode(kept)})
    return found
