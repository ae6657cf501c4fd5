"""Heads other than next-token prediction, by the class's name. Data only.

If llama.cpp supports a head, a row of families.classifiers names its tensors. All others are carried, and an export to
GGUF reports what it drops.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache

from aprfmt.arch.loaders import needs_head
from aprfmt.light_dataclass import light_dataclass


def repeats_embedding(gguf: str, has_tied_head: bool, extra: Mapping[str, object]) -> bool:
    """Whether a GGUF of the architecture `gguf` stores a tied head as a separate tensor.

    Some loaders require one. So does a T5 with a tied head whose logits are not scaled by d_model: without one,
    llama.cpp scales them.
    """
    return needs_head(gguf) or (has_tied_head and extra.get("scale_decoder_outputs") is False)


@light_dataclass(frozen=True, slots=True)
class Head:
    """A kind of head.

    Attributes:
        task: its purpose; messages say "the TASK head".
        classes: suffixes of the classes that have one.
        beside: whether it is in addition to the output head of a language model, instead of replacing it.
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
"""Kinds of heads; the first match counts."""


EVEN_HEADS = frozenset(
    (
        "arcee", "aria_text", "cwm", "deepseek_v2", "eurobert", "exaone", "gemma2", "gemma3_text", "gemma3n_text",
        "hrm_text", "hyperclovax", "internlm3", "iquestcoder", "jais2", "llama", "minicpm3", "muse_glimmer_text",
        "muse_spark_text", "pocket_tts", "ultrabert", "vaultgemma",
    )
)  # fmt: skip
"""Model types whose config class refuses a hidden size that the heads do not divide."""

MODULE_KEYS = re.compile(r"pooling|dense_[1-9]_(in|out|bias)|other_modules")
"""Names of hyper-parameters from module files of a repository, never config.json: pooling, and the widths of the linear
layers after it.
"""

MODULE = re.compile(r"[1-9]_\w+\.")
"""Prefix of a module's tensor names, replacing its folder."""


@cache
def head_of(hf_class: str | None) -> Head | None:
    """The head that a class has instead of or in addition to a language model's; None for language models and headless
    networks.
    """
    return next((head for head in HEADS if hf_class is not None and hf_class.endswith(head.classes)), None)


def has_no_output(hf_class: str | None) -> bool:
    """Whether a class has another head in place of the language model's output head."""
    head = head_of(hf_class)
    return head is not None and not head.beside
