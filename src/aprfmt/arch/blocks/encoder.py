"""Building blocks of rows: encoders and their heads."""

from __future__ import annotations

from aprfmt.arch.blocks.decoder import Classes, class_names
from aprfmt.arch.converters.heads import pooling, pooling_of_modules
from aprfmt.arch.row import OPTIONAL, REQUIRED, Key, TensorRow


ENCODER = (Key("attention.causal", kind="bool", constant=False), Key("pooling_type", ("pooling",), converter=pooling))
"""Keys of every encoder; `pooling` comes from a sentence-transformers folder."""
POOLED = Key("pooling_type", ("pooling",), converter=pooling_of_modules)
"""The same for all other families: llama.cpp can pool the hidden states of any network."""
TYPES = Key("tokenizer.ggml.token_type_count", ("type_vocab_size",), needed=REQUIRED)
"""Number of token types, which llama.cpp reads with the tokenizer."""
HEADS = ("ForMaskedLM", "ForTokenClassification", "ForQuestionAnswering")
"""Suffixes of encoder classes with a head that a GGUF cannot store."""


def hf_only(dims: str, *names: str) -> tuple[TensorRow, ...]:
    """Tensors that only checkpoints may have (poolers, heads, classifiers): weights of `dims`, and biases.

    A name that ends in ".bias" means that tensor only.
    """
    rows: list[TensorRow] = []
    for name in names:
        if name.endswith(".bias"):
            rows.append(TensorRow((name,), (), (dims,), OPTIONAL))
            continue
        for kind, shape in (("weight", dims), ("bias", dims.partition(",")[0])):
            rows.append(TensorRow((f"{name}.{kind}",), (), (shape,), OPTIONAL))
    return tuple(rows)


def encoder_names(
    stem: str, model_type: str, *ends: str, also: tuple[str, ...] = (), types: tuple[str, ...] = ()
) -> Classes:
    """The classes of an encoder, none of which predicts tokens: `stem` with "Model" or `ends`, and `also`."""
    names = (*(stem + end for end in ("Model", *ends)), *also)
    return class_names(*names, types=(model_type, *types), bare=names)
