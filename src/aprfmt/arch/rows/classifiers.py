"""Rows of the architecture table: networks with a head that gives scores or labels for a whole text. Data only.

Each is a row of another file with the head that llama.cpp applies where it pools by "rank": `cls`, an activation,
`cls.norm`, `cls.output`. Heads that it does not have (of tokens, spans, masked words) are those of arch.heads.
"""

from __future__ import annotations

from dataclasses import replace

from aprfmt.arch.row import HEAD, REQUIRED, Architecture, Difference, Key, TensorRow
from aprfmt.arch.rows import bert, encoder, encoder_remote, qwen
from aprfmt.arch.rows.parts import linear, must_be, norm
from aprfmt.arch.rows.parts_encoder import LABELS

_BASES: dict[str, Architecture] = {row.id: row for file in (bert, encoder, encoder_remote, qwen) for row in file.ROWS}
_OUTPUT = "tensors=cls.output.weight"


def _classifier(
    base: str, classes: tuple[str, ...], inside: str, *head: TensorRow, when: str = _OUTPUT, keys: tuple[Key, ...] = (),
    differs: tuple[Difference, ...] = (),
) -> Architecture:
    """The row `base` inside classes that put `inside` before its names, with a head on it."""
    row = _BASES[base]
    own = {name for part in head for name in part.hf}
    network = tuple(
        replace(part, hf=tuple(inside + name for name in part.hf))
        if part.gguf or part.hf[0].startswith("pooler.")
        else part
        for part in row.tensors
        if part.need != HEAD and own.isdisjoint((*part.hf, *(inside + name for name in part.hf)))
    )
    return replace(
        row, id=f"{base}_classifier", hf_class=classes[0], hf_classes=classes, bare_classes=classes, model_types=(),
        tensors=(*network, *head), keys=(*row.keys, *LABELS, *keys),
        prefixes=tuple((beginning, inside) for beginning in {"": None, **dict(row.prefixes)} if beginning != inside),
        when="&".join(filter(None, (row.when, when))), differs=(*row.differs, *differs),
    )


def _dense(hf: str) -> tuple[TensorRow, ...]:
    """The layer before the outputs."""
    return linear(hf, "cls", "hidden,hidden", REQUIRED)


def _outputs(hf: str, bias: str | None = REQUIRED) -> tuple[TensorRow, ...]:
    """The layer that gives the scores."""
    return linear(hf, "cls.output", "num_labels,hidden", bias)


_ROBERTA_HEAD = (*_dense("classifier.dense"), *_outputs("classifier.out_proj"))
_RELU = Difference(
    "llama.cpp passes the inner layer of the classifier through tanh, transformers through ReLU: its scores are others"
)
_NO_POOLER = Difference("llama.cpp leaves out the pooler before the classifier, and passes its score through tanh")
_SOFTMAX = Difference("llama.cpp gives the softmax of the scores, transformers the scores themselves")

ROWS: tuple[Architecture, ...] = (
    _classifier("roberta", ("RobertaForSequenceClassification",), "roberta.", *_ROBERTA_HEAD),
    _classifier(
        "xlm-roberta", ("XLMRobertaForSequenceClassification", "CamembertForSequenceClassification"), "roberta.",
        *_ROBERTA_HEAD,
    ),
    _classifier(
        "distilbert", ("DistilBertForSequenceClassification",), "distilbert.", *_dense("pre_classifier"),
        *_outputs("classifier"),
        differs=(_RELU,),
    ),
    _classifier(
        "bert", ("BertForSequenceClassification",), "bert.", *_dense("bert.pooler.dense"), *_outputs("classifier"),
        when=f"tensors=cls.weight&{_OUTPUT}",
    ),
    _classifier(
        "modernbert", ("ModernBertForSequenceClassification",), "model.", *linear("head.dense", "cls", "hidden,hidden"),
        *norm("head.norm", "cls.norm"), *_outputs("classifier"),
        keys=(must_be("classifier_bias", False), must_be("classifier_activation", "gelu")),
    ),
    _classifier("neobert", ("NeoBERTForSequenceClassification",), "model.", *_dense("dense"), *_outputs("classifier")),
    _classifier(
        "jina_bert_v2", ("JinaBertForSequenceClassification",), "bert.",
        *linear("classifier", "cls", "num_labels,hidden", REQUIRED),
        when="tensors=cls.weight", keys=(must_be("num_labels", 1),), differs=(_NO_POOLER,),
    ),
    _classifier(
        "qwen3", ("Qwen3ForSequenceClassification",), "", *_outputs("score", None),
        keys=(Key("pooling_type", constant=4),), differs=(_SOFTMAX,),
    ),
)
