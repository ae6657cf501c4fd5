"""Tensors that a checkpoint has and a GGUF has not: poolers and heads of pre-training."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from arch_models import ArchCase, build, find_case, write_tokenizers
from conformance_steps import same_tensors

import aprfmt

_BERT = find_case("bert")
_ROBERTA = find_case("roberta")


def _with(case: ArchCase, model_class: str) -> ArchCase:
    return replace(case, model_class=model_class, model_options={})


@pytest.mark.parametrize(
    ("case", "lost"),
    [
        (_with(_BERT, "BertModel"), "pooler.dense.bias"),
        (_with(_BERT, "BertForMaskedLM"), "cls.predictions.bias"),
        (_with(_BERT, "BertForTokenClassification"), "classifier.bias"),
        (_with(_ROBERTA, "RobertaForMaskedLM"), "lm_head.bias"),
        (_with(find_case("distilbert"), "DistilBertForMaskedLM"), "vocab_layer_norm.bias"),
    ],
    ids=lambda value: value.model_class if isinstance(value, ArchCase) else "",
)
def test_they_are_carried_but_not_into_a_gguf(tmp_path: Path, case: ArchCase, lost: str) -> None:
    _build(case, tmp_path)
    aprfmt.import_model(tmp_path / "m", tmp_path / "m.apr")
    aprfmt.export_model(tmp_path / "m.apr", tmp_path / "back", format="hf", dtype="f32")
    step = same_tensors(tmp_path / "back", tmp_path / "m")
    assert step.ok, step.reason
    report = aprfmt.export_model(tmp_path / "m.apr", tmp_path / "m.gguf")
    assert any("cannot hold" in loss and lost in loss for loss in report.losses)


def test_a_classifier_of_roberta_goes_into_a_gguf(tmp_path: Path) -> None:
    case = _with(_ROBERTA, "RobertaForSequenceClassification")
    _build(replace(case, config={**case.config, "num_labels": 3}), tmp_path)
    aprfmt.import_model(tmp_path / "m", tmp_path / "m.apr")
    report = aprfmt.export_model(tmp_path / "m.apr", tmp_path / "m.gguf")
    assert not report.losses
    with aprfmt.open(tmp_path / "m.gguf") as model:
        assert model.metadata["bert.classifier.output_labels"] == ["LABEL_0", "LABEL_1", "LABEL_2"]
        assert model.tensors["cls.output.weight"].shape == (3, 64)


def _build(case: ArchCase, folder: Path) -> Any:
    return build(case, folder / "m", write_tokenizers(folder / "tokenizers", [case.tokenizer], 4000))
