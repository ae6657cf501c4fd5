"""What configs say of generating: suppressed tokens and ends of turns, from folders to GGUFs and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from arch_models import find_case, tokenizer_files, write_checkpoint, write_tokenizers

import aprfmt
from aprfmt.tokenizer import generation, hf_write
from aprfmt.tokenizer.data import TokenType
from aprfmt.tokenizer.hf import read_files
from aprfmt.tokenizer.model import Tokenizer

IDS = [5, 258_880]


def read(generation_config: bytes | None, config: dict[str, Any] | None = None) -> Tokenizer:
    files = tokenizer_files("smollm2", 512)
    more = {} if generation_config is None else {generation.FILE_NAME: generation_config}
    tokenizer = read_files(files | more, config or {})
    assert tokenizer is not None
    return tokenizer


def test_suppressed_tokens_are_kept_with_the_vocabulary() -> None:
    data = json.dumps({"eos_token_id": 2, "suppress_tokens": IDS}).encode()
    assert read(data).extra == {"tokenizer.ggml.suppress_tokens": (("ARRAY", "INT32"), IDS)}
    assert generation.FILE_NAME not in read(data).files


@pytest.mark.parametrize(
    "data",
    [
        None, b"", b"{", b"[]", b"[" * 100_000, b"\xff", b"{}", b'{"suppress_tokens": []}',
        b'{"suppress_tokens": [-1]}', b'{"suppress_tokens": [true]}', b'{"suppress_tokens": [4294967296]}',
    ],
)  # fmt: skip
def test_other_files_say_nothing(data: bytes | None) -> None:
    assert read(data).extra == {}


def test_a_turn_ends_by_the_list_of_a_config() -> None:
    config = {"model_type": "laguna", "bos_token_id": 2, "eos_token_id": [2, 24]}
    plain, tok = read(None), read(None, config)
    assert "eot" not in plain.special
    assert plain.types[24] != TokenType.CONTROL
    assert (tok.special["eot"], tok.types[24]) == (24, TokenType.CONTROL)
    for other in ({"eos_token_id": 24}, {"eos_token_id": [2]}, {"eos_token_id": [2, 999]}, {"model_type": "qwen3"}):
        assert "eot" not in read(None, config | other).special


def test_suppressed_tokens_go_to_a_gguf_and_back(tmp_path: Path) -> None:
    tokenizers = write_tokenizers(tmp_path / "tokenizers", ["smollm2"], 512)
    write_checkpoint(find_case("internlm2"), tmp_path / "model", tokenizers)
    file = tmp_path / "model" / generation.FILE_NAME
    file.write_text(json.dumps({"temperature": 0.5, "suppress_tokens": IDS}))
    aprfmt.import_model(tmp_path / "model", tmp_path / "m.apr")
    aprfmt.export_model(tmp_path / "m.apr", tmp_path / "m.gguf")
    aprfmt.export_model(tmp_path / "m.apr", tmp_path / "same", format="hf")
    assert (tmp_path / "same" / generation.FILE_NAME).read_bytes() == file.read_bytes()
    with aprfmt.open(tmp_path / "m.gguf") as model:
        assert list(model.metadata["tokenizer.ggml.suppress_tokens"]) == IDS
        made = hf_write.to_hf_files(model.tokenizer) if model.tokenizer is not None else {}
    again = json.loads(made[generation.FILE_NAME])
    assert again["suppress_tokens"] == IDS
    assert again["eos_token_id"] == 2
