"""Draft models: what a conversion takes of the model that they draft for, and what it says where that is missing."""

from __future__ import annotations

from pathlib import Path

import pytest
from arch_models import ArchCase, find_case, write_checkpoint, write_target
from tiny_models import BYTES, write_byte_tokenizer

import aprfmt
from aprfmt.errors import AprError, NotFoundError

VOCAB = 320


@pytest.fixture
def draft(tmp_path: Path) -> tuple[Path, Path]:
    """The folders of an EAGLE-3 draft without a tokenizer, and of its target."""
    from dataclasses import replace

    (tmp_path / "tokenizer").mkdir()
    write_byte_tokenizer(tmp_path / "tokenizer")
    case: ArchCase = replace(find_case("eagle3"), tokenizer=BYTES)
    tokenizers = {BYTES: tmp_path / "tokenizer"}
    write_checkpoint(case, tmp_path / "draft", tokenizers)
    write_target(case, tmp_path / "target", tokenizers)
    for path in (tmp_path / "draft").glob("tok*"):
        path.unlink()
    return tmp_path / "draft", tmp_path / "target"


def _keys(path: Path) -> dict[str, object]:
    with aprfmt.open(path) as model:
        return {key: model.metadata[key] for key in model.metadata}


def test_a_draft_takes_the_tokenizer_and_what_it_does_not_say_from_its_target(
    draft: tuple[Path, Path], tmp_path: Path
) -> None:
    source, target = draft
    aprfmt.import_model(source, tmp_path / "whole.apr", target_model=target)
    report = aprfmt.import_model(source, tmp_path / "plain.apr")
    assert report.lossless
    found = []
    for i, (path, given) in enumerate(
        ((source, target), (tmp_path / "whole.apr", None), (tmp_path / "plain.apr", target))
    ):
        aprfmt.export_model(path, tmp_path / f"{i}.gguf", target_model=given, pre="smollm")
        found.append(_keys(tmp_path / f"{i}.gguf"))
        assert found[-1]["eagle3.target_hidden_size"] == 64
        assert list(found[-1]["eagle3.target_layers"]) == [2, 6, 9]  # type: ignore[call-overload]
        assert len(found[-1]["tokenizer.ggml.tokens"]) == VOCAB  # type: ignore[arg-type]
    with aprfmt.open(tmp_path / "0.gguf") as model:
        d2t = model.tensors["d2t"]
        assert (d2t.dtype, d2t.numpy().tolist()[:4]) == ("I64", [0, 2, 4, 6])


def test_what_is_missing_is_said_with_the_option_that_gives_it(draft: tuple[Path, Path], tmp_path: Path) -> None:
    source, target = draft
    with pytest.raises(AprError, match="eagle_aux_hidden_state_layer_ids is unknown") as caught:
        aprfmt.export_model(source, tmp_path / "m.gguf", tokenizer=target)
    assert "--target-model DIR" in str(caught.value.hint)
    with pytest.raises(NotFoundError, match=r"no config\.json"):
        aprfmt.export_model(source, tmp_path / "m.gguf", target_model=tmp_path / "tokenizer")
    with pytest.raises(AprError, match="is not a draft model"):
        aprfmt.export_model(_plain(tmp_path), tmp_path / "m.gguf", target_model=target)
    assert not (tmp_path / "m.gguf").exists()


def _plain(tmp_path: Path) -> Path:
    import arch_models

    case = ArchCase("p", "llama", "LlamaConfig", "LlamaForCausalLM", {"vocab_size": VOCAB}, BYTES)
    arch_models.build(case, tmp_path / "plain", {BYTES: tmp_path / "tokenizer"})
    return tmp_path / "plain"
