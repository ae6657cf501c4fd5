"""What stands on a network where its class is not one that predicts the next token: by the class's name. Data only.

Where llama.cpp has a place for a head, a row of families.classifiers names its tensors. All others are carried, and an
export to GGUF says what stays behind.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache

from aprfmt.arch.loaders import needs_head
from aprfmt.light_dataclass import light_dataclass


def repeats_embedding(gguf: str, has_tied_head: bool, extra: Mapping[str, object]) -> bool:
    """Whether a GGUF of the architecture `gguf` stores a tied head as a tensor of its own.

    Some loaders require one. A T5 with a tied head whose logits are not scaled by d_model needs one, too: llama.cpp
    scales those of a GGUF without.
    """
    return needs_head(gguf) or (has_tied_head and extra.get("scale_decoder_outputs") is False)


@light_dataclass(frozen=True, slots=True)
class Head:
    """A kind of head.

    Attributes:
        task: what it is for; messages say "the TASK head".
        classes: endings of the names of classes that have one.
        beside: whether it stands beside the output head of a language model, not in its place.
    """

    task: str
    classes: tuple[str, ...]
    beside: bool = False

    def __str__(self) -> str:
        """`token classification head`."""
        return f"{self.task} head"


HEADS: tuple[Head, ...] = (
    Head("masked language model", ("ForMaskedLM", "LMHead", "BertForPreTraining")),
    Head("next sentence", ("ForNextSentencePrediction",)),
    Head("sequence classification", ("ForSequenceClassification", "ForTextClassification")),
    Head("token classification", ("ForTokenClassification",)),
    Head("question answering", ("ForQuestionAnswering", "ForQuestionAnsweringSimple")),
    Head("multiple choice", ("ForMultipleChoice", "DoubleHeadsModel")),
    Head("value", ("ForCausalLMWithValueHead", "LMHeadModelWithValueHead"), beside=True),
    Head("reward", ("RewardModel", "RewardModelWithGating", "ForRewardModelWithGating", "ForRM", "ForScoring")),
)
"""Kinds of heads; of a class the first that fits."""


EVEN_HEADS = frozenset(
    (
        "arcee", "deepseek_v2", "eurobert", "gemma2", "gemma3_text", "gemma3n_text", "hrm_text", "internlm3",
        "iquestcoder", "jais2", "llama", "minicpm3", "muse_glimmer_text", "pocket_tts",
    )
)  # fmt: skip
"""Model types whose config class in transformers refuses a hidden size that the heads do not divide."""

MODULE_KEYS = re.compile(r"pooling|dense_[1-9]_(in|out|bias)|other_modules")
"""Names of hyper-parameters that a repository has in files of modules beside config.json, which never has them: how
hidden states are pooled, and the widths of the linear layers that come after."""

MODULE = re.compile(r"[1-9]_\w+\.")
"""How the names of a module's tensors begin, out of the folder that it lies in."""


@cache
def head_of(hf_class: str | None) -> Head | None:
    """The head that a class has in place of a language model's or beside it; None for language models and networks
    without any.
    """
    return next((head for head in HEADS if hf_class is not None and hf_class.endswith(head.classes)), None)


def has_no_output(hf_class: str | None) -> bool:
    """Whether a class has another head where a language model has its output head."""
    head = head_of(hf_class)
    return head is not None and not head.beside
