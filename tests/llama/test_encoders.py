"""Encoders are verified by an embedding, which is that of transformers."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from arch_models import build, find_case, write_tokenizers
from turns import first_always

import aprfmt
from aprfmt.cli.main import run
from aprfmt.formats.hf_modules import module_files
from aprfmt.llama.client import PROMPT, Llama, encoder_pooling
from aprfmt.llama.engine import ENGINES

pytestmark = pytest.mark.llama


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BertModel with mean pooling, of all-MiniLM's class."""
    folder = tmp_path_factory.mktemp("bert")
    build(find_case("bert"), folder / "m", write_tokenizers(folder / "tokenizers", ["bert"]))
    for name, data in module_files({"pooling": "mean"}, 64).items():
        (folder / "m" / name).parent.mkdir(exist_ok=True)
        (folder / "m" / name).write_bytes(data)
    return folder / "m"


def test_export_verifies_it(bert: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["export", str(bert), "-o", str(tmp_path / "m.gguf"), "--verify", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["verify"]
    assert found["loaded"]
    assert found["embedding_size"] == 64
    assert found["embedding_norm"] > 0
    assert "text" not in found
    assert run(["export", str(bert), "-o", str(tmp_path / "n.gguf"), "--verify"]) == 0
    assert "embeds a sentence in 64 dimensions" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("engine", first_always(ENGINES))
def test_the_embedding_is_the_mean_that_transformers_gives(bert: Path, tmp_path: Path, engine: str) -> None:
    if find_spec(engine) is None:
        pytest.skip(f"{engine} is not installed")
    import torch
    from transformers import AutoModel, AutoTokenizer

    aprfmt.export_model(bert, tmp_path / "m.gguf", dtype="f32")
    assert encoder_pooling(tmp_path / "m.gguf")[0] == "mean"
    with Llama(tmp_path / "m.gguf", pooling="mean", engines=[engine]) as llama:
        vector = np.array(llama.embed(PROMPT))
    ids = AutoTokenizer.from_pretrained(bert)(PROMPT, return_tensors="pt")
    with torch.no_grad():
        wanted = AutoModel.from_pretrained(bert).eval()(**ids).last_hidden_state[0].mean(0).numpy()
    assert np.linalg.norm(vector - wanted) < 1e-2 * np.linalg.norm(wanted)
