"""--pad-vocab: embedding and head up to a multiple of rows, the token list as each format pads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from arch_models import build as build_case
from arch_models import find_case, token_ids, transformers_logits, write_tokenizers
from demo_model import N_TOKENS, build
from plain_models import write_adapter, write_folder

import aprfmt
from aprfmt.canonical.padded_vocabulary import PaddedRows
from aprfmt.errors import RefusedError, UsageError
from aprfmt.limits import MAX_VOCABULARY_MULTIPLE
from aprfmt.types import Array

MULTIPLE, PADDED = 128, 384
OUTPUTS = {
    "out.gguf": "token_embd.weight",
    "q8.gguf": "token_embd.weight",
    "q4k.gguf": "token_embd.weight",
    "out.apr": "model.embed_tokens.weight",
    "hf": "model.embed_tokens.weight",
    "mlx": "model.embed_tokens.weight",
}
DTYPES = {"q8.gguf": "q8_0", "q4k.gguf": "q4_0"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("padded") / "m.gguf"
    build(path)
    return path


def embedding(path: Path, name: str) -> Array:
    with aprfmt.open(path) as opened:
        values: Array = opened.tensors[name].numpy()
        return values


@pytest.mark.parametrize("name", OUTPUTS)
def test_every_format_has_the_rows_and_the_tokens(model: Path, tmp_path: Path, name: str) -> None:
    options: dict[str, Any] = {"dtype": DTYPES[name]} if name in DTYPES else {}
    options |= {"format": name} if name in ("hf", "mlx") else {}
    plain, padded = tmp_path / f"plain-{name}", tmp_path / f"padded-{name}"
    aprfmt.convert_model(model, plain, **options)
    report = aprfmt.convert_model(model, padded, pad_vocab=MULTIPLE, **options)
    before, after = (embedding(path, OUTPUTS[name]) for path in (plain, padded))
    assert after.shape == (PADDED, before.shape[1])
    np.testing.assert_array_equal(after[:N_TOKENS], before)
    assert not after[N_TOKENS:].any()
    assert any("84 rows of zeros" in loss for loss in report.losses)
    with aprfmt.open(padded) as opened:
        assert opened.hparams.vocab_size == PADDED
        assert opened.tokenizer is not None
        assert opened.tokenizer.encode("the cat") == aprfmt.open(model).tokenizer.encode("the cat")  # type: ignore[union-attr]
        if padded.suffix == ".gguf":
            tokens: Any = opened.metadata["tokenizer.ggml.tokens"]
            assert len(tokens) == PADDED
            assert tokens[-1] == f"[PAD{PADDED - 1}]"
    if padded.is_dir():
        assert json.loads((padded / "config.json").read_text())["vocab_size"] == PADDED
    assert aprfmt.validate(padded).passed


def test_a_vocabulary_that_fits_is_left_alone(model: Path, tmp_path: Path) -> None:
    report = aprfmt.convert_model(model, tmp_path / "out.gguf", pad_vocab=4)
    assert not report.losses
    assert embedding(tmp_path / "out.gguf", "token_embd.weight").shape[0] == N_TOKENS


@pytest.mark.parametrize("case", ["llama/tied", "phi/theta"])
def test_the_logits_of_the_tokens_are_unchanged(tmp_path: Path, case: str) -> None:
    """In transformers, with a tied head, and with a head that has a bias."""
    pytest.importorskip("transformers")
    found = find_case(case)
    folder = tmp_path / "model"
    build_case(found, folder, write_tokenizers(tmp_path / "tokenizers", [found.tokenizer], 300))
    aprfmt.convert_model(folder, tmp_path / "out", format="hf", pad_vocab=MULTIPLE)
    n = json.loads((folder / "config.json").read_text())["vocab_size"]
    ids = token_ids(folder)
    before, after = (transformers_logits(path, ids) for path in (folder, tmp_path / "out"))
    np.testing.assert_allclose(after[..., :n], before, rtol=1e-5, atol=1e-6)
    assert after.shape[-1] % MULTIPLE == 0
    assert not after[..., n:].any()


def test_what_cannot_be_padded_is_refused(model: Path, tmp_path: Path) -> None:
    for wrong in (1, 0, -64, MAX_VOCABULARY_MULTIPLE + 1, True, "64"):
        with pytest.raises(UsageError, match="pad_vocab"):
            aprfmt.convert_model(model, tmp_path / "never.gguf", pad_vocab=wrong)  # type: ignore[arg-type]
    base, adapter = write_folder(tmp_path / "base"), tmp_path / "adapter"
    write_adapter(adapter)
    with pytest.raises(RefusedError, match="cannot be padded"):
        aprfmt.convert_model(adapter, tmp_path / "never", format="hf", base=base, pad_vocab=64)
    assert not list(tmp_path.glob("never*"))


def test_any_range_is_read() -> None:
    class Source:
        name, dtype, shape, n_bytes = "w", "U8", (3, 4), 12

        def read_into(self, offset: int, buffer: memoryview) -> None:
            assert 0 < len(buffer) <= 12 - offset
            buffer[:] = bytes(range(1, 13))[offset : offset + len(buffer)]

    made = PaddedRows(Source(), 5, {})
    whole = bytes(range(1, 13)) + bytes(8)
    for start in range(21):
        for end in range(start, 21):
            buffer = memoryview(bytearray(b"\xff" * (end - start)))
            made.read_into(start, buffer)
            assert buffer == whole[start:end]
