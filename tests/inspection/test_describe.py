"""The inspect object: what it says, and that it says nothing that it has not looked at."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from demo_model import build

import aprfmt
from aprfmt.inspection.describe import describe, inspect
from aprfmt.inspection.tokenizer_info import tokenizer_info


def body_of(path: Path, **options: Any) -> dict[str, Any]:
    body = inspect(path, **options).to_json()
    assert body["file"] == str(path)
    return body


def test_apr(write: Callable[..., Path], arrays: Any) -> None:
    body = body_of(write(arrays, license="MIT"))
    json.dumps(body)
    assert (body["format"], body["version"], body["architecture"]) == ("APR v2", "2.0", "llama")
    assert body["checksum"] == {"header": "ok", "footer": "ok"}
    assert body["metadata"]["license"] == "MIT"
    assert body["metadata"]["data_source"] is None
    assert body["dtypes"] == {"F32": {"tensors": 11, "params": body["param_count"], "bytes": 4 * body["param_count"]}}
    assert (body["tokenizer"]["vocab_size"], body["tokenizer"]["bos_id"]) == (9, 1)
    assert body["compat"] == {"reference_runtime": True, "reasons": []}


def test_why_the_reference_runtime_cannot_run_it(write: Callable[..., Path], arrays: Any) -> None:
    reasons = body_of(write(arrays, architecture=None, hf_architecture=None, hf_model_type=None, num_heads=None))
    text = " ".join(reasons["compat"]["reasons"])
    assert "C-03" in text
    assert "num_heads" in text
    arrays["model.norm.weight"] = arrays["model.norm.weight"].astype("<i8")
    assert "I64" in " ".join(body_of(write(arrays, "i.apr"))["compat"]["reasons"])
    assert "vocabulary 12" in " ".join(body_of(write(arrays, "v.apr", vocab_size=12))["compat"]["reasons"])


def test_quality_counts_what_is_there(write: Callable[..., Path], arrays: Any) -> None:
    def score(name: str, **changes: Any) -> int:
        quality = body_of(write(arrays, name, **changes), quality=True)["quality"]
        assert quality["score"] == sum(part["points"] for part in quality["breakdown"].values())
        assert sum(part["max"] for part in quality["breakdown"].values()) == 100
        assert quality["ship_ready"] is (quality["score"] >= 90)
        return int(quality["score"])

    assert score("a.apr") == 75
    full = {"license": "MIT", "data_source": "x", "data_license": "MIT"}
    assert score("b.apr", **full) == 100
    assert score("c.apr", **full, **{"tokenizer.vocabulary": None}) == 85
    assert score("d.apr", **(full | {"license": "unknown"})) == 91


def test_quality_looks_at_the_checksum(write: Callable[..., Path], arrays: Any) -> None:
    path = write(arrays)
    data = bytearray(path.read_bytes())
    data[-40] ^= 1
    path.write_bytes(data)
    body = body_of(path, quality=True)
    assert body["checksum"]["footer"] == "bad"
    assert body["quality"]["breakdown"]["physics"]["points"] == 0


def test_no_tokenizer(write: Callable[..., Path], arrays: Any) -> None:
    keys = dict.fromkeys(("tokenizer.vocabulary", "tokenizer.model", "tokenizer.merges"))
    assert body_of(write(arrays, **keys, **{"tokenizer.bos_token_id": None}))["tokenizer"] is None


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    build(path)
    return path


def test_counts_are_those_of_the_whole_tokenizer(tiny_gguf: Path, tmp_path: Path) -> None:
    """Lists are counted, not decoded; the rest comes from the same reader."""
    aprfmt.import_model(tiny_gguf, tmp_path / "m.apr")
    for path in (tiny_gguf, tmp_path / "m.apr"):
        with aprfmt.open(path) as model:
            tokenizer, found = model.tokenizer, tokenizer_info(model)
        assert tokenizer is not None
        assert found is not None
        assert (found.model, found.pre, found.added) == (tokenizer.model, tokenizer.pre, tokenizer.n_added)
        assert (found.vocab_size, found.merges) == (len(tokenizer.tokens), len(tokenizer.merges))
        assert (found.bos_id, found.eos_id) == (tokenizer.special.get("bos"), tokenizer.special.get("eos"))
        assert found.chat_template is bool(tokenizer.chat_template)
        assert found.vocab_size > 9


def test_a_gguf_is_described_without_its_vocabulary(tiny_gguf: Path) -> None:
    with aprfmt.open(tiny_gguf) as model:
        found = describe(model)
        assert found.tokenizer is not None
        assert found.metadata["vocab_size"] == found.tokenizer.vocab_size
        assert not [key for key in model.metadata._values if model.metadata.entries[key].count is not None]  # type: ignore[attr-defined]


def test_real_model(smollm2_gguf: Path) -> None:
    body = body_of(smollm2_gguf)
    assert (body["tensor_count"], body["architecture"], body["param_count"]) == (272, "llama", 134_515_008)
    assert body["tokenizer"]["vocab_size"] == 49152
    with aprfmt.open(smollm2_gguf) as model:
        assert model.tokenizer is not None
        assert body["tokenizer"]["merges"] == len(model.tokenizer.merges)
    assert body["metadata"]["license"] == "apache-2.0"
    assert body["compat"]["reference_runtime"] is False
