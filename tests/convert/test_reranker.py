"""Language models that are rerankers by name: the rows of "yes" and "no" become a classifier of llama.cpp's."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from arch_models import build, find_case, relative_error, token_ids, transformers_logits, write_tokenizers
from conformance_steps import list_tensors
from converter_peer import CONVERTER, ConverterPeer
from llama_peer import LlamaPeer

import aprfmt
from aprfmt.errors import RefusedError

pytest.importorskip("torch")


@pytest.fixture(scope="module", params=["tied", "untied"])
def reranker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3ForCausalLM in a folder that is called as the published models are."""
    root = tmp_path_factory.mktemp("reranker")
    case = find_case("qwen3")
    case = replace(case, config={**case.config, "tie_word_embeddings": request.param == "tied"})
    build(case, root / "Qwen3-Reranker-0.0B", write_tokenizers(root / "tok", ["smollm2"], 11_000))
    return root / "Qwen3-Reranker-0.0B"


def _answers(folder: Path) -> list[int]:
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    return [vocabulary["yes"], vocabulary["no"]]


@pytest.mark.llama
@pytest.mark.parametrize("by_apr", [False, True])
def test_llama_cpp_gives_the_share_of_yes(reranker: Path, tmp_path: Path, by_apr: bool, llama_cpp: LlamaPeer) -> None:
    ids = token_ids(reranker)
    logits = transformers_logits(reranker, ids)[-1][_answers(reranker)]
    wanted = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
    source = tmp_path / "Qwen3-Reranker.apr" if by_apr else reranker
    if by_apr:
        aprfmt.import_model(reranker, source)
    report = aprfmt.export_model(source, tmp_path / "m.gguf", dtype="f32")
    assert any("written as a reranker" in warning for warning in report.warnings)
    assert relative_error(llama_cpp.logits(tmp_path / "m.gguf", ids, "rank_decoder"), wanted) < 5e-3
    with aprfmt.open(tmp_path / "m.gguf") as model:
        assert model.metadata["qwen3.pooling_type"] == 4
        assert list(model.metadata["qwen3.classifier.output_labels"]) == ["yes", "no"]
        assert "{query}" in str(model.metadata["tokenizer.chat_template.rerank"])
        assert "output.weight" not in model.tensors
    aprfmt.export_model(tmp_path / "m.gguf", tmp_path / "back", format="hf")
    assert json.loads((tmp_path / "back" / "config.json").read_text())["architectures"] == [
        "Qwen3ForSequenceClassification"
    ]
    assert relative_error(transformers_logits(tmp_path / "back", ids, "rank_decoder"), wanted) < 1e-6


@pytest.mark.skipif(not CONVERTER.is_dir(), reason="needs llama.cpp's converter")
def test_it_is_what_the_converter_writes(reranker: Path, tmp_path: Path) -> None:
    ConverterPeer().convert(reranker, tmp_path / "theirs.gguf", "f32", ())
    aprfmt.export_model(reranker, tmp_path / "ours.gguf", dtype="f32")
    assert list_tensors(tmp_path / "ours.gguf") == list_tensors(tmp_path / "theirs.gguf")
    with aprfmt.open(tmp_path / "ours.gguf") as ours, aprfmt.open(tmp_path / "theirs.gguf") as theirs:
        names = ("qwen3.", "tokenizer.chat_template")
        kept = [key for key in theirs.metadata if key.startswith(names)]
        assert {key: ours.metadata.get(key) for key in kept} == {key: theirs.metadata[key] for key in kept}


def test_a_card_says_it_too_and_another_name_says_nothing(reranker: Path, tmp_path: Path) -> None:
    shutil.copytree(reranker, tmp_path / "judge")
    aprfmt.export_model(tmp_path / "judge", tmp_path / "plain.gguf")
    (tmp_path / "judge" / "README.md").write_text("# Qwen3-Reranker-4B\n")
    aprfmt.export_model(tmp_path / "judge", tmp_path / "card.gguf")
    with aprfmt.open(tmp_path / "plain.gguf") as plain, aprfmt.open(tmp_path / "card.gguf") as card:
        assert "cls.output.weight" not in plain.tensors
        assert card.tensors["cls.output.weight"].shape == (2, 64)


def test_a_tokenizer_without_the_answers_is_refused(reranker: Path, tmp_path: Path) -> None:
    folder = tmp_path / "qwen3-reranker"
    shutil.copytree(reranker, folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["yep"] = tokenizer["model"]["vocab"].pop("yes")
    tokenizer["model"]["merges"] = []
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(RefusedError, match="no token 'yes'") as caught:
        aprfmt.export_model(folder, tmp_path / "m.gguf")
    assert "rename the folder" in str(caught.value.hint)
    assert not (tmp_path / "m.gguf").exists()


@pytest.mark.llama
@pytest.mark.parametrize("by_apr", [False, True])
def test_a_single_score_becomes_its_sigmoid(tmp_path: Path, by_apr: bool, llama_cpp: LlamaPeer) -> None:
    """As rerankers of one output have it; of the softmax of one number nothing is left."""
    case = replace(find_case("qwen3_classifier"), config={"num_labels": 1, "tie_word_embeddings": True})
    build(case, tmp_path / "m", write_tokenizers(tmp_path / "tok", ["smollm2"], 4000))
    ids = token_ids(tmp_path / "m")
    (score,) = transformers_logits(tmp_path / "m", ids, "rank")
    source = tmp_path / ("m.apr" if by_apr else "m")
    if by_apr:
        aprfmt.import_model(tmp_path / "m", source)
    report = aprfmt.export_model(source, tmp_path / "m.gguf", dtype="f32")
    assert any("two outputs" in warning for warning in report.warnings)
    got = llama_cpp.logits(tmp_path / "m.gguf", ids, "rank_decoder")
    assert got == pytest.approx([1 / (1 + np.exp(-score)), 1 / (1 + np.exp(score))], rel=5e-3)
    aprfmt.import_model(tmp_path / "m.gguf", tmp_path / "again.apr")
    aprfmt.export_model(tmp_path / "again.apr", tmp_path / "back", format="hf")
    assert transformers_logits(tmp_path / "back", ids, "rank") == pytest.approx([score, 0], rel=1e-5)
