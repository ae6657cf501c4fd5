"""apr eval through llama.cpp: torch's numbers where torch can, and every decoder that it cannot."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from arch_models import build, find_case, write_tokenizers

import aprfmt
from aprfmt.cli.main import run
from aprfmt.errors import MissingDependencyError, NotFoundError, RefusedError, UnsupportedError, UsageError
from aprfmt.llama.client import Llama
from aprfmt.running import scoring
from aprfmt.running.scoring import LogitsReader

pytestmark = pytest.mark.llama
torch = pytest.importorskip("torch")

TEXT = "".join(f"{i} green bottles hang on the wall, and {i * i % 97} of them fall.\n" for i in range(40))


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    """Short and long documents, so that windows hold pieces of several."""
    path = tmp_path / "text.jsonl"
    texts = [TEXT[:300], "The cat sat.", TEXT[:900], "def f(x):\n    return x * x\n", TEXT]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def gguf_of(case: str, tmp_path: Path) -> Path:
    found = find_case(case)
    build(found, tmp_path / case, write_tokenizers(tmp_path / "tokenizers", [found.tokenizer], 512))
    aprfmt.export_model(tmp_path / case, tmp_path / f"{case}.gguf", dtype="f32")
    return tmp_path / f"{case}.gguf"


def test_smollm2_both_ways(smollm2_gguf: Path, documents: Path) -> None:
    ours = aprfmt.evaluate(smollm2_gguf, documents, engine="torch", device="cpu", seq_len=256, limit=768)
    theirs = aprfmt.evaluate(smollm2_gguf, documents, engine="llama", seq_len=256, limit=768)
    assert theirs.ce == pytest.approx(ours.ce, rel=5e-3)  # llama.cpp rounds activations to 8 bits
    assert abs(theirs.accuracy - ours.accuracy) < 0.02
    for name in ("documents", "data_tokens", "seq_len", "windows", "tokens", "format", "architecture"):
        assert getattr(theirs, name) == getattr(ours, name), name
    assert theirs.device.startswith("llama.cpp (")
    assert theirs.dtype == "q4_1"


@pytest.mark.parametrize("piece", [48 << 20, 20_000])
def test_a_small_model_and_its_teacher_both_ways(
    tmp_path: Path, documents: Path, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    monkeypatch.setattr(scoring, "_BYTES", piece)
    gguf = gguf_of("llama", tmp_path)
    aprfmt.quantize_model(gguf, tmp_path / "q4.gguf", "q4_0")
    # llama.cpp rounds what it multiplies with blocks of 4 bits; the values are the same in float32.
    aprfmt.convert_model(tmp_path / "q4.gguf", output := tmp_path / "student.gguf", dtype="f32")
    both = [
        aprfmt.evaluate(output, documents, teacher=gguf, seq_len=64, **how)  # type: ignore[arg-type]
        for how in ({"engine": "torch", "device": "cpu"}, {"engine": "llama"})
    ]
    for name in ("ce", "teacher_ce"):
        assert getattr(both[1], name) == pytest.approx(getattr(both[0], name), rel=1e-3), name
    assert both[0].kl is not None
    assert both[1].kl is not None
    assert both[1].kl == pytest.approx(both[0].kl, rel=0.01)
    assert both[1].agreement == pytest.approx(both[0].agreement, abs=0.02)
    assert both[1].tokens == both[0].tokens


def test_the_scores_are_those_of_the_definition(smollm2_gguf: Path, tmp_path: Path) -> None:
    with Llama(smollm2_gguf, n_ctx=128) as llama:
        ids = llama.tokenize("The quick brown fox jumps over the lazy dog.")
        found = LogitsReader(str(tmp_path), llama, llama).score(ids)
        path = tmp_path / "logits"
        path.write_bytes(bytes(4 * len(ids) * llama.n_vocab))
        llama.logits(ids, path)
        rows = torch.from_numpy(np.fromfile(path, np.float32).reshape(len(ids), -1)[:-1].astype(np.float64))
        labels = torch.tensor(ids[1:])
    expected = torch.nn.functional.cross_entropy(rows, labels, reduction="none")
    assert np.allclose(found.loss, expected.numpy(), atol=1e-9)
    assert (found.hit == (rows.argmax(1) == labels).numpy()).all()
    assert found.kl is not None
    assert np.abs(found.kl).max() < 1e-9
    assert found.other_loss is not None
    assert np.allclose(found.other_loss, found.loss)
    assert found.dropped is None


@pytest.mark.parametrize("case", ["mamba", "gpt_neox"])
def test_what_the_trainer_does_not_know(
    case: str, tmp_path: Path, documents: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gguf = gguf_of(case, tmp_path)
    with pytest.raises(UnsupportedError):
        aprfmt.evaluate(gguf, documents, device="cpu")
    assert run(["eval", str(gguf), "--data", str(documents), "--seq-len", "64", "--teacher", str(gguf), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["ce"] == pytest.approx(math.log(512), rel=0.3)  # random weights
    assert found["perplexity"] == pytest.approx(math.exp(found["ce"]))
    assert found["kl"] < 1e-6
    assert found["agreement"] == 1


def test_an_apr_and_a_folder(tmp_path: Path, documents: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("APR_CACHE", str(tmp_path / "cache"))
    gguf = gguf_of("llama", tmp_path)
    aprfmt.convert_model(gguf, tmp_path / "m.apr")
    scores = [
        aprfmt.evaluate(path, documents, engine="llama", seq_len=64).ce
        for path in (gguf, tmp_path / "m.apr", tmp_path / "llama")
    ]
    assert scores[0] == scores[1]
    assert scores[2] == pytest.approx(scores[0], rel=1e-3)


def test_missing_data_are_noticed_before_an_export(
    tmp_path: Path, documents: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("APR_CACHE", str(tmp_path / "cache"))
    gguf, model, data = gguf_of("llama", tmp_path), tmp_path / "m.apr", tmp_path / "absent"
    aprfmt.convert_model(gguf, model)
    calls: tuple[Callable[[], object], ...] = (
        lambda: aprfmt.evaluate(model, data, engine="llama"),
        lambda: aprfmt.kl_divergence(model, gguf, data),
        lambda: aprfmt.quantize_model(model, tmp_path / "q.gguf", "q4_k_m", imatrix="auto", data=data),
    )
    for call in calls:
        with pytest.raises(NotFoundError, match="no such file or folder"):
            call()
        assert not (tmp_path / "cache/exports").exists()


def test_refusals(tmp_path: Path, documents: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "bert"
    build(find_case("bert"), folder, write_tokenizers(tmp_path / "tokenizers", ["bert"], 512))
    aprfmt.export_model(folder, tmp_path / "bert.gguf", dtype="f32")
    with pytest.raises(UnsupportedError, match="encoder"):
        aprfmt.evaluate(tmp_path / "bert.gguf", documents, engine="llama")
    with pytest.raises(UnsupportedError, match="encoder"):
        aprfmt.evaluate(gguf_of("t5", tmp_path), documents, engine="llama")
    gguf = gguf_of("llama", tmp_path)
    with pytest.raises(UsageError, match="unknown engine"):
        aprfmt.evaluate(gguf, documents, engine="onnx")
    with pytest.raises(UsageError, match="device"):
        aprfmt.evaluate(gguf, documents, engine="llama", device="cpu")
    with pytest.raises(RefusedError, match="sequence length 99999"):
        aprfmt.evaluate(gguf, documents, engine="llama", seq_len=99999)
    monkeypatch.setattr("aprfmt.llama.client.find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match=r"llama\.cpp"):
        aprfmt.evaluate(gguf, documents, engine="llama")


def test_windows_are_read_without_torch() -> None:
    import subprocess
    import sys

    code = "import sys, aprfmt.running.evaluation_llama; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
