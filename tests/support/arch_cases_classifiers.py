"""Cases of networks with a head that scores a whole text: what they are compared by is the scores."""

from __future__ import annotations

from typing import Any

from arch_models import ArchCase

_END = "ForSequenceClassification"
_BERT: dict[str, Any] = {"hidden_act": "gelu", "pad_token_id": 0}
_ROBERTA: dict[str, Any] = {"pad_token_id": 2, "max_position_embeddings": 515, "type_vocab_size": 1}
_DISTIL: dict[str, Any] = {"dim": 64, "hidden_dim": 96, "n_layers": 2, "n_heads": 4, "pad_token_id": 0}
_MODERN: dict[str, Any] = {
    "local_attention": 16, "num_hidden_layers": 3, "pad_token_id": 0, "cls_token_id": 1, "sep_token_id": 2,
}  # fmt: skip
_NAMED: dict[str, Any] = {
    "id2label": {0: "negative", 1: "neutral", 2: "positive"},
    "label2id": {"negative": 0, "neutral": 1, "positive": 2},
}
_ONE: dict[str, Any] = {"num_labels": 1}
"""Of a reranker: one score."""
_SOFTMAX = "it returns the softmax of the scores"
_NO_RELU = "its classifier has tanh"


def _case(
    name: str, stem: str, config: dict[str, Any], tokenizer: str = "bert", cannot: str = "", kind: str = "rank"
) -> ArchCase:
    row = name.partition("/")[0]
    return ArchCase(name, row, f"{stem}Config", f"{stem}{_END}", config, tokenizer, cannot, kind=kind)


CASES: tuple[ArchCase, ...] = (
    _case("bert_classifier", "Bert", {**_BERT, **_NAMED}),
    _case("bert_classifier/two", "Bert", _BERT),
    _case("bert_classifier/one", "Bert", {**_BERT, **_ONE}),
    _case("roberta_classifier", "Roberta", {**_ROBERTA, **_NAMED}, "smollm2"),
    _case("roberta_classifier/one", "Roberta", {**_ROBERTA, **_ONE}, "smollm2"),
    _case("xlm-roberta_classifier", "XLMRoberta", {**_ROBERTA, **_ONE}, "smollm2"),
    _case("xlm-roberta_classifier/camembert", "Camembert", {**_ROBERTA, **_NAMED}, "smollm2"),
    _case("distilbert_classifier", "DistilBert", {**_DISTIL, **_NAMED}, cannot=_NO_RELU),
    _case("modernbert_classifier", "ModernBert", {**_MODERN, **_NAMED}, "smollm2"),
    _case("modernbert_classifier/mean", "ModernBert", {**_MODERN, **_ONE, "classifier_pooling": "mean"}, "smollm2"),
    _case(
        "modernbert_classifier/bias",
        "ModernBert",
        {**_MODERN, **_NAMED, "classifier_bias": True},
        "smollm2",
        "its classifier's inner layer has no bias",
    ),
    _case(
        "modernbert_classifier/silu",
        "ModernBert",
        {**_MODERN, **_NAMED, "classifier_activation": "silu"},
        "smollm2",
        "its classifier has GELU",
    ),
    _case(
        "qwen3_classifier",
        "Qwen3",
        {**_NAMED, "tie_word_embeddings": True},
        "smollm2",
        cannot=_SOFTMAX,
        kind="rank_decoder",
    ),
)
