"""Every class of transformers with a masked-LM, sequence or token classification head on a network that has a row."""

from __future__ import annotations

from pathlib import Path

import pytest
from arch_models import build, write_tokenizers
from head_classes import case_of, head_classes
from turns import in_turn, turn

import aprfmt
from aprfmt.arch.heads import head_of
from aprfmt.errors import AprError
from aprfmt.inspection.describe import inspect
from aprfmt.inspection.validate import validate

pytest.importorskip("transformers")

TURNS = 32
CLASSES = head_classes()


def _files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def _said_of_gguf(source: Path, target: Path) -> str:
    """What an export to GGUF says: why it is refused, or what it leaves out."""
    try:
        return " ".join(aprfmt.export_model(source, target, dtype="f32", allow_different=True).losses)
    except AprError as error:
        return error.message


@pytest.mark.parametrize("name", in_turn(CLASSES, lambda name: name == CLASSES[0], turn(), of=TURNS))
def test_a_head_is_carried_and_named(name: str, tmp_path: Path) -> None:
    case, head = case_of(name), head_of(name)
    assert head is not None
    build(case, tmp_path / "m", write_tokenizers(tmp_path / "tok", [case.tokenizer], 512))
    assert aprfmt.import_model(tmp_path / "m", tmp_path / "m.apr").lossless
    aprfmt.export_model(tmp_path / "m.apr", tmp_path / "back", format="hf")
    assert _files(tmp_path / "back") == _files(tmp_path / "m")
    assert [check for check in validate(tmp_path / "m").checks if check.status == "fail"] == []
    found = inspect(tmp_path / "m.apr").head
    assert found is not None
    assert found.task == head.task
    said = _said_of_gguf(tmp_path / "m.apr", tmp_path / "m.gguf")
    if (tmp_path / "m.gguf").exists():
        with aprfmt.open(tmp_path / "m.gguf") as model:
            assert f"{head.task} head" in said or any(tensor.startswith("cls") for tensor in model.tensors)
    else:
        assert "llama.cpp" in said


def test_networks_of_every_kind_are_among_them() -> None:
    """An encoder, a decoder, an encoder-decoder and a wrapper."""
    assert {"DebertaV2ForMaskedLM", "LlamaForTokenClassification", "BartForSequenceClassification",
            "Gemma3ForSequenceClassification"} <= {*CLASSES}  # fmt: skip
    assert len(CLASSES) > 200
