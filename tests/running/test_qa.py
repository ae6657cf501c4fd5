"""apr qa on SmolLM2: it passes as it is, and each fault is found by the gate that is for it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import broken_models
import pytest
from arch_models import build as build_case
from arch_models import find_case, write_tokenizers
from pages import Page
from turns import first_always

import aprfmt
from aprfmt.cli.main import run
from aprfmt.errors import MissingDependencyError, NotFoundError, UsageError
from aprfmt.llama.client import Llama
from aprfmt.llama.engine import ENGINES
from aprfmt.running import gates
from aprfmt.running.chat_gate import chat_template
from aprfmt.running.examined import ModelUnderTest
from aprfmt.running.findings import GateFinding, SkippedError
from aprfmt.running.gates import GATES, bits_limit, kl_limit
from aprfmt.running.qa import GateResult, QaReport
from aprfmt.running.qa_text import FORMATS, STORIES, TEXTS

pytestmark = pytest.mark.llama

HEADS = {"attn_q": 9, "attn_k": 3}
OF_TEXT = [each.id for each in GATES if "causal" in each.kinds]
INST = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]"
    "{% else %} {{ m['content'] }}</s>{% endif %}{% endfor %}"
)
LLAMA3 = (
    "{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n{{ m['content'] }}<|eot_id|>"
    "{% endfor %}"
)


def by_status(report: QaReport, status: str) -> list[str]:
    return [gate.id for gate in report.gates if gate.status == status]


def gate(report: QaReport, name: str) -> GateResult:
    return next(each for each in report.gates if each.id == name)


@pytest.fixture
def few_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The beginnings of the bundled texts, and few tokens of the model's own: enough to find a fault.

    `test_smollm2_passes` reads the whole texts.
    """
    monkeypatch.setattr(gates, "OWN_TOKENS", 24)
    monkeypatch.setattr("aprfmt.running.examined.TEXTS", tuple(text[:_CHARACTERS] for text in TEXTS))


_CHARACTERS = 500


@pytest.fixture(scope="module")
def swapped(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2 with the rows of Q and K permuted once less."""
    return broken_models.reordered(smollm2_gguf, tmp_path_factory.mktemp("swapped") / "m.gguf", HEADS, halves=True)


# --- the real model ---


def test_smollm2_passes(smollm2_gguf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["qa", str(smollm2_gguf), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["schema"] == "apr.qa/1"
    assert found["passed"] is True
    assert [each["id"] for each in found["gates"]] == OF_TEXT
    beside = {"header", "tensors", "logits", "kl", "agreement", "ratio", "canary"}
    for each in found["gates"]:
        assert each.keys() == {f.name for f in fields(GateResult)}
        assert (each["disease"], each["hint"]) == (None, None)
        assert (each["status"], each["required"]) == (("skip", False) if each["id"] in beside else ("pass", True))
    values = {each["id"]: each["value"] for each in found["gates"]}
    assert values["perplexity"] == pytest.approx(0.78, abs=0.03)  # what the band was made of
    assert values["copy"] == 1
    assert values["layers"] > 0.1


@pytest.mark.usefixtures("few_texts")
@pytest.mark.turns(first=False, of=16)
def test_its_apr_passes_too(smollm2_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("APR_CACHE", str(tmp_path / "cache"))
    aprfmt.convert_model(smollm2_gguf, tmp_path / "m.apr")
    seen: list[str] = []
    report = aprfmt.qa(tmp_path / "m.apr", on_gate=lambda each: seen.append(each.id))
    assert report.passed
    assert seen == OF_TEXT
    assert report.parameters == 134_515_008


@pytest.mark.usefixtures("few_texts")
@pytest.mark.turns(first=False, of=16)
def test_a_layer_of_zeros(smollm2_gguf: Path, tmp_path: Path) -> None:
    report = aprfmt.qa(broken_models.zeroed(smollm2_gguf, tmp_path / "m.gguf", 12))
    assert by_status(report, "fail") == ["weights", "layers"]
    assert "blk.12." in gate(report, "weights").message
    assert gate(report, "weights").disease == "zeros"
    assert gate(report, "weights").hint == "apr convert ORIGINAL -o FIXED.gguf --verify=logits"
    assert gate(report, "layers").message == "inactive layers: 12"
    assert gate(report, "layers").value == 0
    assert not report.passed


def test_a_nan(smollm2_gguf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = broken_models.with_nan(smollm2_gguf, tmp_path / "m.gguf", "blk.7.ffn_norm.weight")
    assert run(["qa", str(path), "-o", str(tmp_path / "page.html")]) == 1
    text = capsys.readouterr().out
    assert f"wrote            {tmp_path}/page.html" in text
    page = Page((tmp_path / "page.html").read_text())
    assert "not passed" in page.words
    assert "blk.7.ffn_norm.weight" in page.text
    assert "blk.7.ffn_norm.weight" in text
    n_skipped = text.partition("skip  layers, rope-order, ")[2].partition(": not run, ")[0].count(",") + 3
    assert f"not passed: failed weights, finite; {n_skipped} gates skipped; " in text
    assert text.count("fix: ") == 1, "once for both gates"


ORDERS = [(True, "permuted once more"), (False, "unpermuted once")]
PRESETS: list[tuple[str, list[str]]] = [("q4_k_m", []), ("q2_k", ["kl", "agreement", "ratio"])]


@pytest.mark.usefixtures("few_texts")
@pytest.mark.turns(first=False, of=16)
@pytest.mark.parametrize(("halves", "must"), ORDERS)
def test_swapped_rows_of_q_and_k(smollm2_gguf: Path, swapped: Path, tmp_path: Path, halves: bool, must: str) -> None:
    path = swapped if halves else broken_models.reordered(smollm2_gguf, tmp_path / "m.gguf", HEADS, halves=False)
    report = aprfmt.qa(path)
    assert by_status(report, "fail") == ["rope-order"]
    assert f"in the wrong order and must be {must}" in gate(report, "rope-order").message
    assert gate(report, "rope-order").disease == "rope-order"
    assert gate(report, "perplexity").message == "not run, because rope-order did not pass"


def other_tokenizer(model: Path, folder: Path) -> Path:
    return broken_models.with_tokenizer_of(model, folder / "m.gguf", "qwen2_5", folder / "tokenizer")


def other_template(model: Path, folder: Path) -> Path:
    return broken_models.with_template(model, folder / "m.gguf", INST)


OTHERS: list[tuple[Callable[[Path, Path], Path], str, str]] = [
    (other_tokenizer, "tokenizer", "another model's tokenizer"),
    (other_template, "chat-template", "expects the ChatML format"),
]


@pytest.mark.usefixtures("few_texts")
@pytest.mark.turns(first=False, of=16)
@pytest.mark.parametrize(("made", "failed", "message"), OTHERS)
def test_what_another_model_has(
    smollm2_gguf: Path, tmp_path: Path, made: Callable[[Path, Path], Path], failed: str, message: str
) -> None:
    report = aprfmt.qa(made(smollm2_gguf, tmp_path))
    assert by_status(report, "fail") == [failed]
    assert message in gate(report, failed).message
    assert gate(report, failed).disease == ("chat-template" if failed == "chat-template" else None)
    assert str(tmp_path) in str(gate(report, failed).hint)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (LLAMA3, "markers that are not in the vocabulary: <|start_header_id|>, <|end_header_id|>, <|eot_id|>"),
        ("{% for m in messages %}{{ m['content'] }{% endfor %}", "line 1"),
        ("{{ raise_exception('only one turn') }}", "only one turn"),
        ("{{ messages[0]['content'] }}", "drops messages"),
    ],
)
def test_templates_that_cannot_be_right(smollm2_short: Path, tmp_path: Path, template: str, message: str) -> None:
    with ModelUnderTest(str(broken_models.with_template(smollm2_short, tmp_path / "m.gguf", template)), None, 0) as x:
        found = chat_template(x)
    assert not found.passed
    assert message in found.message


def test_an_original_that_is_not_there_is_told_before_any_gate(smollm2_gguf: Path, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        aprfmt.qa(smollm2_gguf, against=tmp_path / "no.gguf", on_gate=lambda gate: pytest.fail("a gate looked"))


@pytest.mark.turns(first=False, of=16)
@pytest.mark.parametrize(("mix", "failed"), PRESETS)
def test_beside_the_original(smollm2_gguf: Path, tmp_path: Path, mix: str, failed: list[str]) -> None:
    """Of 576 columns most matrices of this model keep more bits than a mix says, so "Q2_K" is one of 5.1 bits."""
    path = tmp_path / f"{mix}.gguf"
    aprfmt.quantize_model(smollm2_gguf, path, mix, allow_requantize=True)
    report = aprfmt.qa(path, against=smollm2_gguf)
    assert by_status(report, "fail") == failed, [(each.id, each.message) for each in report.gates]
    assert by_status(report, "skip") == ["logits", "canary"]  # both are GGUFs: llama.cpp compares them
    assert report.passed == (not failed)


# --- what decides ---


def test_limits() -> None:
    assert bits_limit(134_500_000) == pytest.approx(1.56)
    assert bits_limit(7_000_000_000) == pytest.approx(1.56 - 2 * 0.517 / math.log(2) / 4, abs=0.01)
    assert bits_limit(1000) == bits_limit(10_000_000)
    limits = [kl_limit(bits) for bits in (16, 8.5, 6.6, 5.7, 4.85, 4.2, 3.5, 2.6)]
    assert limits == sorted(limits)
    assert limits[0] == 0.005
    assert limits[-1] == 0.25


@pytest.mark.parametrize("engine", first_always(ENGINES))
def test_rows_are_reordered_in_memory(smollm2_gguf: Path, swapped: Path, tmp_path: Path, engine: str) -> None:
    """As the bytes of a file with that fault are, and back again."""
    if find_spec(engine) is None:
        pytest.skip(f"{engine} is not installed")
    before = smollm2_gguf.read_bytes()[-4096:]

    def last(llama: Llama) -> bytes:
        path = tmp_path / "logits"
        path.write_bytes(bytes(4 * len(ids) * llama.n_vocab))
        llama.logits(ids, path)
        return path.read_bytes()

    with Llama(smollm2_gguf, watched=True, engines=[engine]) as llama:
        ids = llama.tokenize("The capital of France is Paris.")
        effects, names = llama.effects(ids)
        assert len(effects) == 30
        assert all(effect is not None and effect > 0.05 for effect in effects)
        heads = [(name, 0, n, 64) for name in names for part, n in HEADS.items() if name.endswith(f".{part}.weight")]
        assert len(heads) == 60
        as_it_was = last(llama)
        llama.reorder(heads, halves=True)
        reordered = last(llama)
        llama.reorder(heads, halves=False)
        assert last(llama) == as_it_was
        with Llama(swapped, watched=True, engines=[engine]) as other:
            assert last(other) == reordered
        assert reordered != as_it_was
    assert smollm2_gguf.read_bytes()[-4096:] == before


def test_text_that_goes_round(smollm2_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: dict[str, list[int]] = {}

    class Speaker:
        def generate(self, prompt: str, n: int) -> Any:
            from aprfmt.llama.client import Generated

            return Generated(made[prompt], "text", "length", 1, 0.0, 0.0)

    class Subject:
        llama = Speaker()

    first, second = STORIES
    various = [*range(48)]
    for ids, passed in (
        (various, True),
        ([7] * 48, False),
        ([1, 2, 3] * 16, False),
        ([*range(10), *[5, 6] * 19], False),
    ):
        made |= {first: ids, second: [3] * 48}
        assert gates._text(Subject()).passed is passed, ids  # type: ignore[arg-type]


def test_formats_are_told_apart() -> None:
    heads = [form.text[0] for form in FORMATS.values()]
    assert len(set(heads)) == len(heads)
    assert 4000 < sum(map(len, TEXTS)) < 9000
    assert all(text.isascii() for text in TEXTS)


# --- small models ---


@pytest.fixture
def small(tmp_path: Path, smollm2_gguf: Path) -> Callable[[str], Path]:
    """A random model of a case."""

    def make(name: str) -> Path:
        case = find_case(name)
        build_case(case, tmp_path / name, write_tokenizers(tmp_path / "tokenizers", [case.tokenizer], 512))
        aprfmt.export_model(tmp_path / name, tmp_path / f"{name}.gguf", dtype="f32")
        return tmp_path / f"{name}.gguf"

    return make


def test_a_random_model_is_no_language_model(small: Callable[[str], Path]) -> None:
    report = aprfmt.qa(small("llama"))
    assert not report.passed
    assert by_status(report, "fail") == ["tokenizer"]
    assert "untrained weights" in gate(report, "tokenizer").message
    for name in ("structure", "weights", "loads", "vocabulary", "finite", "layers", "rope-order"):
        assert gate(report, name).status == "pass", gate(report, name).message


def test_the_order_of_a_model_that_guesses_is_not_judged(
    small: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gates, "ORDER_MARGIN", -100.0)
    with ModelUnderTest(str(small("llama")), None, 0) as x:
        assert gates._rope_order(x).passed


def test_a_gate_that_has_nothing_to_look_at(small: Callable[[str], Path]) -> None:
    with (
        ModelUnderTest(str(small("mamba")), None, 0) as x,
        pytest.raises(SkippedError, match="per-head rotary") as caught,
    ):
        gates._rope_order(x)
    assert not caught.value.required


def test_a_skipped_gate_is_no_pass(small: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def skip(x: ModelUnderTest) -> Any:
        raise SkippedError("no time")

    def fine(x: ModelUnderTest) -> Any:
        return GateFinding(True, "")

    path = small("llama")
    table = tuple(replace(each, look=skip if each.id == "copy" else fine) for each in GATES)
    monkeypatch.setattr("aprfmt.running.qa.GATES", table)
    monkeypatch.setattr(ModelUnderTest, "llama", type("Loaded", (), {"engine": "none"}))
    report = aprfmt.qa(path)
    assert by_status(report, "skip") == ["copy"]
    assert gate(report, "copy").required
    assert not report.passed
    assert aprfmt.qa(path, allow_skip=["copy"]).passed
    with pytest.raises(UsageError, match="unknown gate 'speed'"):
        aprfmt.qa(path, allow_skip=["speed"])


def test_a_file_that_llama_cpp_refuses(small: Callable[[str], Path]) -> None:
    path = small("llama")
    data = path.read_bytes()
    assert data.count(b"smollm") == 1  # the pre-tokenizer
    path.write_bytes(data.replace(b"smollm", b"smallm"))
    report = aprfmt.qa(path)
    assert not report.passed
    assert "loads" in by_status(report, "fail")
    assert gate(report, "finite").message == "not run, because loads did not pass"
    assert report.engine is None


def test_no_more_positions_than_there_are(small: Callable[[str], Path]) -> None:
    """llama.cpp dies where a text is longer than a table of positions."""
    report = aprfmt.qa(small("gpt2"))
    assert not [each.message for each in report.gates if "died" in each.message]
    assert gate(report, "rope-order").status == "pass"  # nothing is rotated, so the order of both does not matter


def test_no_llama_cpp(small: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    path = small("llama")
    monkeypatch.setattr("aprfmt.llama.client.find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError):
        aprfmt.qa(path)
