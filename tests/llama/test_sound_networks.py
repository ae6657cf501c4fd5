"""Networks whose output is sound have no tokenizer, and need none in llama.cpp."""

from __future__ import annotations

from pathlib import Path

import pytest
from arch_models import find_case, write_checkpoint, write_tokenizers
from llama_peer import LlamaPeer

import aprfmt

pytestmark = pytest.mark.llama


def test_a_network_without_text_goes_there_and_back(tmp_path: Path, smollm2_gguf: Path, llama_cpp: LlamaPeer) -> None:
    pytest.importorskip("torch")
    folder = tmp_path / "model"
    case = find_case("wavtokenizer_dec")
    write_checkpoint(case, folder, write_tokenizers(tmp_path / "tokenizers", ["smollm2"], 512))
    for path in [path for path in folder.iterdir() if path.name not in ("config.json", "model.safetensors")]:
        path.unlink()
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert aprfmt.import_model(folder, tmp_path / "m.apr").warnings == []
    assert aprfmt.export_model(tmp_path / "m.apr", tmp_path / "m.gguf").warnings == []
    with aprfmt.open(tmp_path / "m.gguf") as model:
        assert model.metadata["tokenizer.ggml.model"] == "none"
        assert model.metadata["wavtokenizer-dec.vocab_size"] == 512
    assert llama_cpp.logits(tmp_path / "m.gguf", [3, 1, 4, 1, 5], case.kind).shape == (5, 82)
    aprfmt.export_model(tmp_path / "m.apr", tmp_path / "back", format="hf")
    assert {path.name: path.read_bytes() for path in (tmp_path / "back").iterdir()} == before
