"""Networks with a head that scores or labels a whole text."""

from __future__ import annotations

from dataclasses import replace

from aprfmt.arch.blocks.decoder import linear, must_be, norm
from aprfmt.arch.converter import DEFAULT, Converter, Scope, default, nothing
from aprfmt.arch.families import bert, encoders, qwen
from aprfmt.arch.fields import as_int
from aprfmt.arch.hyperparams import Hyperparams
from aprfmt.arch.row import HEAD, REQUIRED, Architecture, Difference, Key, TensorRow
from aprfmt.errors import CorruptError, LimitError
from aprfmt.limits import MAX_LABELS


def _labels(h: Hyperparams) -> dict[str, str] | None:
    """Label names of a classifier by id, in order; None if the config has none."""
    value = h.extra.get("id2label")
    if value is None:
        return None
    if not isinstance(value, dict):
        raise CorruptError("id2label is not an object")
    return {str(key): str(value[key]) for key in sorted(value, key=lambda key: str(key).zfill(9))}


def _labels_to_gguf(value: object, scope: Scope) -> list[str]:
    """A name per label: llama.cpp takes their number from the list. transformers invents the names of two."""
    labels = _labels(scope.h)
    n = as_int(scope.h.extra.get("num_labels"), "num_labels") or 0
    if n > MAX_LABELS:
        raise LimitError(f"num_labels is {n}; the limit is {MAX_LABELS}")
    return list(labels.values()) if labels else [f"LABEL_{i}" for i in range(n)]


def _n_labels_derive(scope: Scope) -> int:
    """The number of names; without any, transformers' default, or the GGUF's."""
    return len(_labels(scope.h) or ()) or (1 if scope.kv else 2)


def _label_ids_derive(scope: Scope) -> dict[str, int] | None:
    labels = _labels(scope.h)
    return None if labels is None else {name: i for i, name in enumerate(labels.values())}


labels = Converter(
    _labels_to_gguf,
    lambda value, scope: {str(i): x for i, x in enumerate(value)} if isinstance(value, list) else DEFAULT,
)
n_labels = Converter(nothing, default, _n_labels_derive)
label_ids = Converter(nothing, default, _label_ids_derive)
LABELS = (
    Key("classifier.output_labels", ("id2label",), "str[]", converter=labels),
    Key("", ("num_labels",), converter=n_labels), Key("", ("label2id",), converter=label_ids),
)
"""Label names, their number, and their ids by name."""
_BASES: dict[str, Architecture] = {row.id: row for file in (bert, encoders, qwen) for row in file.ROWS}
_OUTPUT = "tensors=cls.output.weight"


def _classifier(
    base: str, classes: tuple[str, ...], inside: str, *head: TensorRow, when: str = _OUTPUT, keys: tuple[Key, ...] = (),
    differs: tuple[Difference, ...] = (),
) -> Architecture:
    """The row `base` inside classes that prefix its names with `inside`, with a head."""
    row = _BASES[base]
    own = {name for part in head for name in part.hf}
    network = tuple(
        replace(part, hf=tuple(inside + name for name in part.hf))
        if part.gguf or part.hf[0].startswith("pooler.") else part
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
    """The dense layer before the outputs."""
    return linear(hf, "cls", "hidden,hidden", REQUIRED)


def _outputs(hf: str, bias: str | None = REQUIRED) -> tuple[TensorRow, ...]:
    """The output layer."""
    return linear(hf, "cls.output", "num_labels,hidden", bias)


_ROBERTA_HEAD = (*_dense("classifier.dense"), *_outputs("classifier.out_proj"))
_RELU = Difference("llama.cpp applies tanh inside the classifier, transformers ReLU: scores differ")
_NO_POOLER = Difference("llama.cpp skips the pooler before the classifier and applies tanh to the score")
_SOFTMAX = Difference("llama.cpp returns the softmax of the scores, transformers the scores", slight=True)

ROWS: tuple[Architecture, ...] = (
    _classifier("roberta", ("RobertaForSequenceClassification",), "roberta.", *_ROBERTA_HEAD),
    _classifier(
        "xlm-roberta", ("XLMRobertaForSequenceClassification", "CamembertForSequenceClassification"), "roberta.",
        *_ROBERTA_HEAD,
    ),
    _classifier(
        "distilbert", ("DistilBertForSequenceClassification",), "distilbert.", *_dense("pre_classifier"),
        *_outputs("classifier"), differs=(_RELU,),
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
