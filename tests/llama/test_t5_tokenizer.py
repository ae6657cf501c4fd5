"""T5's own tokenizer in llama.cpp, and back: the same ids as transformers gives, 10,000 strings."""

from __future__ import annotations

import itertools
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from arch_models import build, find_case, quiet_transformers
from llama_peer import LlamaPeer
from texts import make_texts

import aprfmt
from aprfmt.tokenizer.data import CHARSMAP

pytestmark = pytest.mark.llama
pytest.importorskip("torch")

N_PIECES, N_TEXTS = 20_000, 10_000


@pytest.fixture(scope="module")
def t5(tmp_path_factory: pytest.TempPathFactory, llama_cpp_models: Path) -> tuple[Path, Any]:
    """A folder with T5's tokenizer, and the tokenizer: pieces and charsmap are those of a real Unigram model."""
    root = tmp_path_factory.mktemp("t5")
    with aprfmt.open(llama_cpp_models / "ggml-vocab-nomic-bert-moe.gguf") as model:
        known = model.tokenizer
        assert known is not None
        charsmap = known.extra[CHARSMAP][1]
        scored = zip(known.tokens, known.scores, known.types, strict=True)
        pieces = [(text, score) for text, score, kind in scored if kind == 1][:N_PIECES]
    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    tokenizer = quiet_transformers().T5Tokenizer(vocab=[*special, *pieces], _spm_precompiled_charsmap=charsmap)
    tokenizer.save_pretrained(root / "tokenizer")
    build(find_case("t5/bare"), root / "model", {"smollm2": root / "tokenizer"})
    return root / "model", tokenizer


def is_told_apart(text: str) -> bool:
    """Whether Hugging Face's steps, unlike SentencePiece, lose something: U+0085, or a mark behind a mapped sign."""
    pairs = itertools.pairwise(text)
    lost = (unicodedata.category(b)[0] == "M" and unicodedata.normalize("NFKC", a) != a for a, b in pairs)
    return "\x85" in text or any(lost)


def test_there_and_back(t5: tuple[Path, Any], tmp_path: Path, llama_cpp: LlamaPeer) -> None:
    folder, tokenizer = t5
    aprfmt.export_model(folder, tmp_path / "m.gguf")
    with aprfmt.open(tmp_path / "m.gguf") as model:
        kv = {key: model.metadata[key] for key in model.metadata}
    told = {
        "model": "t5", "pre": "default", "add_space_prefix": True, "remove_extra_whitespaces": True,
        "add_eos_token": True, "eos_token_id": 1, "padding_token_id": 0, "unknown_token_id": 2,
    }  # fmt: skip
    assert {key: kv[f"tokenizer.ggml.{key}"] for key in told} == told
    assert kv["t5.decoder_start_token_id"] == 0
    texts = [text for text in make_texts(N_TEXTS, ["<extra_id_0>", "<extra_id_5>", "</s>"]) if not is_told_apart(text)]
    assert len(texts) > 0.9 * N_TEXTS
    found = llama_cpp.vocabulary(tmp_path / "m.gguf").tokenize(texts, add_bos=True)
    assert found == tokenizer(texts).input_ids
    aprfmt.import_model(tmp_path / "m.gguf", tmp_path / "m.apr")
    aprfmt.export_model(tmp_path / "m.apr", tmp_path / "back", format="hf")
    again = quiet_transformers().AutoTokenizer.from_pretrained(tmp_path / "back")
    assert again(texts).input_ids == found
