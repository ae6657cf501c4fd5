"""Exports as llama.cpp sees them: the same logits as transformers, the same ids as tokenizers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llama_peer import LlamaPeer
from texts import make_texts
from tiny_models import BYTES, CASES

import aprfmt

pytestmark = pytest.mark.llama

IDS = [[1, 5, 9, 200, 33, 7, 301, 12], [17] * 6, list(range(40, 72))]


def torch_logits(model: Any, ids: list[int]) -> Any:
    import torch

    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].float().numpy()


def distance(a: Any, b: Any) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


@pytest.mark.turns(of=8)
@pytest.mark.parametrize("name", list(CASES))
def test_hf_to_apr_to_gguf_gives_the_logits_of_transformers(
    name: str, tiny_model: Callable[[str], Any], tmp_path: Path, llama_cpp: LlamaPeer
) -> None:
    folder, reference = tiny_model(name)
    aprfmt.import_model(folder, tmp_path / "m.apr")
    aprfmt.export_model(tmp_path / "m.apr", tmp_path / "m.gguf", dtype="f32")
    for ids in IDS:
        expected = torch_logits(reference, ids)
        actual = llama_cpp.logits(tmp_path / "m.gguf", ids)
        assert actual.shape[1] == CASES[name].config.get("vocab_size", 320)
        assert distance(actual, expected) < 5e-3
        assert (actual.argmax(-1) == expected.argmax(-1)).all()


@pytest.mark.turns(of=8)
@pytest.mark.parametrize("name", [case.id for case in CASES.values() if case.tokenizer != BYTES])
def test_the_exported_tokenizer_gives_the_ids_of_tokenizers(
    name: str, tiny_model: Callable[[str], Any], tmp_path: Path, llama_cpp: LlamaPeer
) -> None:
    from tokenizers import Tokenizer

    folder, _ = tiny_model(name)
    aprfmt.import_model(folder, tmp_path / "m.apr")
    aprfmt.export_model(tmp_path / "m.apr", tmp_path / "m.gguf", dtype="f16")
    reference = Tokenizer.from_file(str(folder / "tokenizer.json"))
    specials = [token.content for token in reference.get_added_tokens_decoder().values()][:40]
    texts = make_texts(1000, specials)
    actual = llama_cpp.vocabulary(tmp_path / "m.gguf").tokenize(texts, add_bos=False)
    for text, ids in zip(texts, actual, strict=True):
        assert ids == reference.encode(text, add_special_tokens=False).ids, repr(text)


@pytest.mark.turns(of=8)
@pytest.mark.parametrize("name", ["qwen2-untied", "llama-bias", "mistral", "qwen3"])
def test_gguf_to_apr_to_hf_gives_the_model_back(name: str, tiny_model: Callable[[str], Any], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder, reference = tiny_model(name)
    aprfmt.export_model(folder, tmp_path / "m.gguf")
    aprfmt.import_model(tmp_path / "m.gguf", tmp_path / "m.apr")
    aprfmt.export_model(tmp_path / "m.apr", tmp_path / "hf")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    for ids in IDS:
        assert distance(torch_logits(again, ids), torch_logits(reference, ids)) < 1e-6


PROMPTS = [
    "The capital of France is the city of",
    "def add(a, b):\n    return a + b\n\ndef sub(a, b):",
    "Once upon a time there was a little girl who lived in a village near the forest.",
    "1, 2, 3, 4, 5, 6,",
    "Water boils at a temperature of 100 degrees Celsius at",
    "The quick brown fox jumps over the lazy",
    "import numpy as np\nimport",
    "To be, or not to be, that is the",
    "The largest planet in our solar system is",
    "My favourite food is",
    "In 1969, Neil Armstrong became the first person to walk on the",
    "Roses are red, violets are",
    "The opposite of hot is",
    "A triangle has three",
    "The chemical symbol for gold is",
    "Photosynthesis is the process by which",
    "She opened the door and",
    "for i in range(10):\n    print(",
    "The United States of",
    "Hello, my name is",
]


@pytest.mark.turns(first=False, of=8)
def test_smollm2_decoded_to_hf_agrees_with_llama_cpp(smollm2_gguf: Path, tmp_path: Path, llama_cpp: LlamaPeer) -> None:
    """F32: 5e-3. Against the Q4_1 file itself 3 %: llama.cpp quantizes activations there."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    aprfmt.import_model(smollm2_gguf, tmp_path / "m.apr")
    aprfmt.export_model(tmp_path / "m.apr", tmp_path / "hf", dtype="f32")
    aprfmt.export_model(tmp_path / "m.apr", tmp_path / "m.gguf", dtype="f32")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    ids = [tokenizer.encode(prompt) for prompt in PROMPTS]
    expected = [torch_logits(model, each) for each in ids]
    for path, tolerance in ((tmp_path / "m.gguf", 5e-3), (smollm2_gguf, 3e-2)):
        assert llama_cpp.vocabulary(path).tokenize(PROMPTS, add_bos=False) == ids
        actual = [llama_cpp.logits(path, each) for each in ids]
        assert distance(np.concatenate(actual), np.concatenate(expected)) < tolerance
        if tolerance < 1e-2:
            assert all(a[-1].argmax() == e[-1].argmax() for a, e in zip(actual, expected, strict=True))
