"""llama.cpp, `tokenizers` and transformers give the same ids from what is written here."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from llama_peer import LlamaPeer, Vocabulary

from aprfmt.errors import UnsupportedError
from aprfmt.tokenizer import ggml, hf, hf_write
from aprfmt.tokenizer.data import TokenType
from aprfmt.tokenizer.model import Tokenizer

Texts = Callable[[int, Sequence[str]], list[str]]
Load = Callable[[Sequence[tuple[str, Any, Any]]], Any]


def specials(tok: Tokenizer) -> list[str]:
    kinds = (TokenType.CONTROL, TokenType.USER_DEFINED)
    return [text for text, kind in zip(tok.tokens, tok.types, strict=True) if kind in kinds]


def read_gguf(path: Path) -> Tokenizer:
    from aprfmt.formats import gguf

    with gguf.open_model(path) as model:
        tok = model.tokenizer
    assert tok is not None
    return tok


def assert_same_ids(encode: Callable[[str], list[int]], model: Vocabulary, texts: list[str]) -> None:
    ids = model.tokenize(texts, add_bos=True)
    different = [text for text, known in zip(texts, ids, strict=True) if encode(text) != known]
    assert len(texts) >= 1000
    assert not different, f"{len(different)} texts, the first {different[0]!r}"


@pytest.mark.turns(of=8)
@pytest.mark.llama
@pytest.mark.parametrize(
    ("name", "vocab_size"),
    [
        ("qwen2_5", 151936),
        ("qwen3", 151936),
        ("llama3", 128256),
        pytest.param("gemma3", 262208, marks=pytest.mark.slow),
    ],
)
def test_written_keys_make_llama_cpp_encode_alike(
    real_tokenizers: dict[str, Path], mixed_texts: Texts, llama_vocabulary: Load, name: str, vocab_size: int
) -> None:
    from tokenizers import Tokenizer as Fast

    files = {path.name: path.read_bytes() for path in real_tokenizers[name].iterdir()}
    tok = hf.read_files(files, {"vocab_size": vocab_size})
    assert tok is not None
    model = llama_vocabulary(ggml.to_gguf(tok, vocab_size=vocab_size))
    assert model.size == vocab_size
    fast = Fast.from_buffer(files["tokenizer.json"])
    assert_same_ids(lambda text: list(fast.encode(text).ids), model, mixed_texts(1000, specials(tok)))


@pytest.mark.turns(of=8)
@pytest.mark.llama
@pytest.mark.parametrize("name", ["smollm2", "llama-bpe", "gpt-2", "deepseek-coder", "qwen2"])
def test_made_files_encode_as_llama_cpp(
    smollm2_gguf: Path, llama_cpp_models: Path, mixed_texts: Texts, name: str, llama_cpp: LlamaPeer
) -> None:
    from tokenizers import Tokenizer as Fast

    path = smollm2_gguf if name == "smollm2" else llama_cpp_models / f"ggml-vocab-{name}.gguf"
    tok = read_gguf(path)
    fast = Fast.from_buffer(hf_write.to_hf_files(tok)["tokenizer.json"])
    texts = mixed_texts(1000, specials(tok))
    assert_same_ids(lambda text: list(fast.encode(text).ids), llama_cpp.vocabulary(path), texts)


@pytest.mark.filterwarnings("ignore")
def test_transformers_loads_the_made_folder(smollm2_gguf: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tok = read_gguf(smollm2_gguf)
    files = hf_write.to_hf_files(tok, max_length=8192)
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 49152}))
    auto = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    assert (auto.bos_token_id, auto.eos_token_id, auto.unk_token_id, auto.pad_token_id) == (1, 2, 0, 2)
    assert auto.model_max_length == 8192
    assert auto.chat_template == tok.chat_template
    chat = auto.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert chat.endswith("<|im_start|>user\nhi<|im_end|>\n")
    again = hf.read_files(files, {"model_type": "llama", "vocab_size": 49152})
    assert again is not None
    assert (again.tokens, again.merges, again.types) == (tok.tokens, tok.merges, tok.types)
    assert (again.pre, again.special, again.flags["add_bos"]) == (tok.pre, tok.special, False)


def test_several_templates_go_into_the_settings() -> None:
    tok = Tokenizer(model="gpt2", tokens=["a"], pre="gpt-2", chat_template="D", chat_templates={"../x": "X"})
    files = hf_write.to_hf_files(tok)
    assert set(files) == {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"}
    again = hf.read_files(files)
    assert again is not None
    assert (again.chat_template, again.chat_templates) == ("D", {"../x": "X"})


def test_pads_are_left_out_and_files_are_kept() -> None:
    tok = Tokenizer(model="gpt2", tokens=["a", "a", "[PAD2]"], types=[1, 5, 5], pre="qwen2")
    made = json.loads(hf_write.to_hf_files(tok)["tokenizer.json"])
    assert made["model"]["vocab"] == {"a": 0}
    assert made["normalizer"] == {"type": "NFC"}
    tok.files = {"tokenizer.json": b"{}"}
    assert hf_write.to_hf_files(tok) == tok.files


@pytest.mark.parametrize(
    "tok", [Tokenizer(model="llama", tokens=["a"]), Tokenizer(model="gpt2", tokens=["a"], pre="?")]
)
def test_what_cannot_be_written_is_refused(tok: Tokenizer) -> None:
    with pytest.raises(UnsupportedError, match="cannot be written") as caught:
        hf_write.to_hf_files(tok)
    assert caught.value.hint
