"""apr bench: what is measured is what llama.cpp computed, and a gate that is missed is an exit status."""

from __future__ import annotations

import json
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
from arch_models import build as build_case
from arch_models import find_case, write_tokenizers
from demo_model import build
from pages import Page
from turns import first_always

import aprfmt
from aprfmt.cli.main import run
from aprfmt.errors import UnsupportedError, UsageError
from aprfmt.llama.client import Llama
from aprfmt.llama.engine import ENGINES
from aprfmt.schema import flag_of

pytestmark = pytest.mark.llama

SMALL = ("--prompt-tokens", "24", "-n", "6", "--runs", "3")


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    """The model of the demo."""
    path = tmp_path / "m.gguf"
    build(path)
    return path


@pytest.mark.parametrize("engine", first_always(ENGINES))
def test_the_times_are_those_of_the_call(smollm2_gguf: Path, engine: str) -> None:
    if find_spec(engine) is None:
        pytest.skip(f"{engine} is not installed")
    with Llama(smollm2_gguf, n_ctx=128, engines=[engine]) as llama:
        llama.measure(64, 16)
        started = time.perf_counter()
        taken = llama.measure(64, 16)
        all_of_it = time.perf_counter() - started
        assert taken["prompt_seconds"] <= taken["first_seconds"]
        assert taken["first_seconds"] + taken["seconds"] <= all_of_it
        assert taken["first_seconds"] + taken["seconds"] > all_of_it / 2
        # What is computed at once, and the keys and values of 128 tokens: 30 layers x 2 x 3 heads x 64 f16.
        context = llama.context_bytes()
        assert context is not None
        assert context > 256 * 30 * 2 * 3 * 64 * 2 / 2
        assert taken["peak_bytes"] > llama.facts.weight_bytes


def test_two_models_in_turns(gguf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    aprfmt.convert_model(gguf, tmp_path / "m.apr")
    assert run(["bench", str(gguf), str(tmp_path / "m.apr"), *SMALL, "--threads", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["schema"] == "apr.bench/1"
    first, second = found["models"]
    assert [first["file"], second["file"]] == [str(gguf), str(tmp_path / "m.apr")]
    for model in (first, second):
        assert model["threads"] == 1
        assert model["engine"]
        for key in ("prompt_tok_s", "tok_s", "ttft_ms"):
            samples = model[key]
            assert len(samples["samples"]) == 3
            assert samples["min"] == min(samples["samples"])
            assert samples["max"] == max(samples["samples"])
            assert samples["median"] == sorted(samples["samples"])[1]
            assert samples["ratio"] == pytest.approx(samples["median"] / first[key]["median"])
    assert first["tok_s"]["ratio"] == 1


def test_gates(gguf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", str(gguf), *SMALL, "--gate", "tok_s=0.001", "--gate", "memory=100GB", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["passed"]
    code = run(["bench", str(gguf), *SMALL, "--gate", "tok_s=1e12", "--gate", "ttft_ms=1e9", "--gate", "memory=1MB"])
    assert code == 1
    text = capsys.readouterr().out
    assert "missed  tok_s" in text
    assert "met  ttft_ms" in text
    assert "missed  memory" in text


def test_the_memory_is_that_of_llama_cpp_alone(gguf: Path) -> None:
    held = b"\1" * (1 << 30)
    found = aprfmt.bench(gguf, prompt_tokens=24, tokens=6, runs=1, threads=1)
    assert 0 < found.models[0].memory_bytes < len(held) / 2


def test_a_page_of_it(gguf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "page.html"
    words = ["bench", str(gguf), *SMALL, "--threads", "1", "-o", str(target)]
    assert run([*words, "--gate", "tok_s=1e12", "--json"]) == 1
    body = json.loads(capsys.readouterr().out)
    assert body["output"] == str(target)
    page = Page(target.read_text())
    assert "a gate failed" in page.text
    assert "MiB, lower is better" in page.text, "the unit of the figure beside the bar"
    assert "GiB" not in page.text
    assert f"{body['models'][0]['tok_s']['median']:,.1f}" in page.text
    assert page.charts["Text"]["s"][0]["y"] == pytest.approx(body["models"][0]["tok_s"]["samples"], rel=1e-3)
    started = time.perf_counter()
    assert run(words) == 5, "there is a page already"
    assert run(["bench", str(gguf), "-o", str(gguf), "--force"]) == 2, "no page has that name"
    assert time.perf_counter() - started < 5, "refused before anything was measured"


@pytest.mark.parametrize(
    ("gate", "message"),
    [
        ("speed=3", "unknown gate"),
        ("tok_s", "missing value"),
        ("tok_s=fast", "not a number"),
        ("tok_s=-1", "not a number"),
        ("tok_s=nan", "not a number"),
        ("memory=much", "is not a valid size"),
    ],
)
def test_a_gate_that_there_is_not(gguf: Path, gate: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", str(gguf), "--gate", gate]) == 2
    assert message in capsys.readouterr().err
    with pytest.raises(UsageError, match=message):
        aprfmt.bench(gguf, gates=[gate])


def test_bad_numbers(gguf: Path) -> None:
    for name in ("prompt_tokens", "tokens", "runs"):
        with pytest.raises(UsageError, match=flag_of(name)):
            aprfmt.bench(gguf, **{name: 0})  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="no model"):
        aprfmt.bench([])


def test_an_encoder_has_no_next_token(tmp_path: Path) -> None:
    folder = tmp_path / "bert"
    build_case(find_case("bert"), folder, write_tokenizers(tmp_path / "tokenizers", ["bert"], 512))
    aprfmt.export_model(folder, tmp_path / "bert.gguf", dtype="f32")
    with pytest.raises(UnsupportedError, match="encoder"):
        aprfmt.bench(tmp_path / "bert.gguf")
