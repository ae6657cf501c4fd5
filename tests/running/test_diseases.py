"""apr qa names each known fault, injected into a tiny model, before its symptoms, and the command that mends it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import broken_models
import numpy as np
import pytest
from arch_models import Inline, build, find_case, write_tokenizers

import aprfmt
from aprfmt.cli.main import run
from aprfmt.convert import logits, torch_child
from aprfmt.errors import RunError
from aprfmt.running import encoder_gates, gates, original
from aprfmt.running.diseases import DISEASES, KEYS
from aprfmt.running.examined import ModelUnderTest
from aprfmt.running.findings import SkippedError
from aprfmt.running.gates import GATES
from aprfmt.running.qa import GateResult, QaReport

pytestmark = pytest.mark.llama

TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Sound GGUFs of tiny random models, F32."""
    folder = tmp_path_factory.mktemp("sound")
    cases = [find_case(name) for name in ("llama", "qwen2_moe", "bert", "bert_classifier/one", "t5")]
    tokenizers = write_tokenizers(folder / "tokenizers", [case.tokenizer for case in cases], 512)
    found = {}
    for case in cases:
        name = case.id.partition("/")[0]
        build(case, folder / name, tokenizers)
        found[name] = folder / f"{name}.gguf"
        aprfmt.export_model(folder / name, found[name], dtype="f32")
    broken_models.with_key(found["bert"], folder / "pooled.gguf", "bert.pooling_type", 1)
    return found | {"bert": folder / "pooled.gguf"}


def failed(report: QaReport) -> list[GateResult]:
    return [gate for gate in report.gates if gate.status == "fail"]


def gate(report: QaReport, name: str) -> GateResult:
    return next(each for each in report.gates if each.id == name)


def without_head(source: Path, target: Path) -> Path:
    """The GGUF of a folder whose config ties the head that its checkpoint has."""
    from safetensors.torch import load_file, save_file

    folder = target.with_suffix("")
    shutil_copy(source.with_suffix(""), folder)
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    aprfmt.export_model(folder, target, dtype="f32")
    return target


def shutil_copy(source: Path, target: Path) -> None:
    target.mkdir()
    for path in source.iterdir():
        (target / path.name).write_bytes(path.read_bytes())


def low_rank(values: np.ndarray) -> np.ndarray:
    rng = np.random.default_rng(0)
    rows = values.reshape(64, -1)
    added: np.ndarray = (rows + 0.5 * rng.normal(size=(64, 2)) @ rng.normal(size=(2, rows.shape[1]))).reshape(-1)
    return added


KEY_FAULTS = [
    ("rope-base", "llama.rope.freq_base", 10.0),
    ("rope-scaling", "llama.rope.scaling.type", "linear"),
    ("norm-epsilon", "llama.attention.layer_norm_rms_epsilon", 0.1),
    ("pre-tokenizer", "tokenizer.ggml.pre", "default"),
    ("bos", "tokenizer.ggml.bos_token_id", 3),
    ("special-token", "tokenizer.ggml.eos_token_id", 3),
    ("chat-template", "tokenizer.chat_template", TEMPLATE),
]
TENSOR_FAULTS: list[tuple[str, str, Callable[[Path, Path], Path]]] = [
    ("nan", "llama", lambda a, b: broken_models.with_nan(a, b, "blk.1.attn_norm.weight")),
    ("zeros", "llama", lambda a, b: broken_models.zeroed(a, b, 1)),
    ("tied-head", "llama", without_head),
    ("norm-plus-one", "llama", lambda a, b: broken_models.with_values(a, b, "output_norm", lambda v: v + 1)),
    ("rope-order", "llama", lambda a, b: broken_models.reordered(a, b, {"attn_q": 4, "attn_k": 2}, halves=True)),
    ("experts", "qwen2_moe", lambda a, b: broken_models.with_swapped_experts(a, b, 4)),
    ("adapter-scale", "llama", lambda a, b: broken_models.with_values(a, b, "blk.1.attn_q.weight", low_rank)),
    ("values", "llama", lambda a, b: broken_models.with_values(a, b, "token_embd", lambda v: v[::-1])),
]


@pytest.mark.parametrize(("disease", "key", "value"), KEY_FAULTS)
def test_a_wrong_key_is_named_first_and_its_command_mends_it(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disease: str, key: str, value: object
) -> None:
    """`rope.freq_base=10` is no matter of layers that do nothing."""
    source = models["llama"]
    with aprfmt.open(source) as model:
        was = model.metadata.get(key)
    broken = broken_models.with_key(source, tmp_path / "m.gguf", key, value)
    with ModelUnderTest(str(broken), str(source), 0) as x:
        found = original.header(x)
        assert not found.passed
        assert found.disease == disease
        assert key in found.message
        hint = _hint(x, "header")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(str(was))
    assert run(shlex.split(hint)[1:]) == 0
    with ModelUnderTest(str(broken), str(source), 0) as x:
        assert original.header(x).passed


def _hint(x: ModelUnderTest, name: str) -> str:
    from aprfmt.running.qa import _look

    result = _look(next(each for each in GATES if each.id == name), x, {}, ())
    assert result.status == "fail"
    assert result.hint is not None
    return result.hint


@pytest.mark.parametrize(("disease", "name", "breaks"), TENSOR_FAULTS)
def test_wrong_tensors_are_named(
    models: dict[str, Path], tmp_path: Path, disease: str, name: str, breaks: Callable[[Path, Path], Path]
) -> None:
    broken = breaks(models[name], tmp_path / "m.gguf")
    with ModelUnderTest(str(broken), str(models[name]), 0) as x:
        assert original.header(x).passed
        found = original.tensors(x)
        assert not found.passed
        assert (found.disease, DISEASES[disease].sentence in found.message) == (disease, True), found.message
        hint = _hint(x, "tensors")
        assert f"apr convert {models[name]} " in hint or hint.startswith("apr merge-adapter BASE ADAPTER ")


def test_causes_come_before_symptoms(
    models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = broken_models.with_key(models["llama"], tmp_path / "m.gguf", "llama.rope.freq_base", 10.0)
    assert run(["qa", str(broken), "--against", str(models["llama"]), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    first = next(each for each in report["gates"] if each["status"] == "fail")
    assert (first["id"], first["disease"]) == ("header", "rope-base")
    assert first["hint"] == f"apr stamp {broken} --in-place --set llama.rope.freq_base=10000"
    by_id = {each["id"]: each for each in report["gates"]}
    assert by_id["layers"]["message"] == "not run, because header did not pass"
    assert run(["qa", str(broken), "--against", str(models["llama"])]) == 1
    assert "fix: apr stamp" in capsys.readouterr().out


def test_logits_of_the_original_by_another_program(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an export gets wrong, an export of the original may get wrong too: transformers does not."""
    folder = models["llama"].with_suffix("")
    monkeypatch.setattr(torch_child, "Child", Inline)
    with ModelUnderTest(str(models["llama"]), str(folder), 0) as x:
        found = original.logits(x)
        assert found.passed
        assert found.value is not None
        assert found.value < 1e-4
    broken = broken_models.reordered(models["llama"], tmp_path / "m.gguf", {"attn_q": 4, "attn_k": 2}, halves=True)
    with ModelUnderTest(str(broken), str(folder), 0) as x, pytest.raises(RunError, match="differ from the source's"):
        original.logits(x)
    monkeypatch.setattr(logits, "_by_torch", lambda *given: (None, "no transformers"))
    with (
        ModelUnderTest(str(models["llama"]), str(folder), 0) as x,
        pytest.raises(SkippedError, match="pip install") as caught,
    ):
        original.logits(x)
    assert caught.value.required


def test_a_quantized_model_and_its_original(models: dict[str, Path], tmp_path: Path) -> None:
    for name, mix in (("llama", "q4_k_m"), ("qwen2_moe", "q2_k")):
        aprfmt.quantize_model(models[name], tmp_path / f"{name}.gguf", mix)
        with ModelUnderTest(str(tmp_path / f"{name}.gguf"), str(models[name]), 0) as x:
            assert original.header(x).passed
            assert original.tensors(x).passed


def test_a_bos_token_that_the_original_adds(models: dict[str, Path], tmp_path: Path) -> None:
    """A key that one of the files lacks means something else for each vocabulary: llama.cpp tells."""
    adds = broken_models.with_key(models["llama"], tmp_path / "adds.gguf", "tokenizer.ggml.add_bos_token", True)
    with ModelUnderTest(str(models["llama"]), str(adds), 0) as x:
        found = gates._bos(x)
        assert (found.passed, found.disease) == (False, "bos")
        assert _hint(x, "bos").endswith("--set tokenizer.ggml.add_bos_token=true")
    with ModelUnderTest(str(adds), str(adds), 0) as x:
        assert gates._bos(x).passed


@pytest.mark.parametrize(("loss_without", "passed"), [(6.0, False), (3.2, True)])
def test_a_tokenizer_that_adds_no_bos(loss_without: float, passed: bool) -> None:
    class Scored:
        def __init__(self, ids: list[int]) -> None:
            self.loss = np.full(len(ids) - 1, 3.0 if ids[0] == 1 else loss_without)

    class Subject:
        against = None
        texts = ([*range(5, 60)],)
        reader = type("Reader", (), {"score": staticmethod(Scored)})
        llama = type("Loaded", (), {"facts": type("Facts", (), {"bos": 1, "adds_bos": False})})

    found = gates._bos(Subject())  # type: ignore[arg-type]
    assert found.passed is passed
    assert found.disease == (None if passed else "missing-bos")


def test_every_disease_is_injected_and_every_gate_and_disease_is_in_the_docs() -> None:
    injected = {disease for disease, *_ in (*KEY_FAULTS, *TENSOR_FAULTS)} | {
        "missing-bos",
        "hyperparameter",
        "vocabulary",
    }
    assert injected == set(DISEASES)
    assert {disease for _, disease in KEYS} <= set(DISEASES)
    ids = {each.id for each in GATES}
    assert all(ids.issuperset(row.gates) for row in DISEASES.values())
    page = (Path(__file__).resolve().parents[2] / "docs" / "qa.md").read_text()
    for name in (*ids, *DISEASES):
        assert f"`{name}`" in page, name


def test_other_keys_of_the_network_and_another_vocabulary(models: dict[str, Path]) -> None:
    with ModelUnderTest(str(models["llama"]), str(models["llama"]), 0) as x:
        for key, disease in (
            ("llama.attention.head_count_kv", "hyperparameter"),
            ("tokenizer.ggml.tokens", "vocabulary"),
        ):
            x.__dict__["original_gguf"] = _Renamed(x.gguf.metadata, key)
            assert original.header(x).disease == disease


class _Renamed:
    """A model in which a key has another value."""

    def __init__(self, metadata: Any, key: str) -> None:
        value = metadata[key]
        self.metadata = dict(metadata) | {key: value + 1 if isinstance(value, int) else [*value[1:], "x"]}


# --- encoders, rerankers, encoder-decoders ---


@pytest.mark.parametrize("name", ["bert", "bert_classifier", "t5"])
def test_networks_without_text_pass(models: dict[str, Path], name: str) -> None:
    report = aprfmt.qa(models[name], against=models[name])
    unlucky = [(each.id, each.message) for each in failed(report) if each.id != "similar"]  # the weights are random
    assert unlucky == []
    shown = {each.id for each in report.gates}
    assert {"header", "structure", "finite-vectors", "varies", "repeatable", "vectors"} <= shown
    assert ("batch" in shown) == (name != "t5")
    assert "perplexity" not in shown


def constant(source: Path, target: Path) -> Path:
    middle = target.with_suffix(".middle")
    broken_models.with_values(source, middle, "token_embd.weight", np.zeros_like)
    return broken_models.with_values(middle, target, "position_embd", np.zeros_like)


ENCODER_FAULTS: list[tuple[str, str, Callable[[Path, Path], Path]]] = [
    ("varies", "two texts have the same embeddings", constant),
    ("finite-vectors", "NaN", lambda a, b: broken_models.with_nan(a, b, "blk.1.attn_q.weight")),
]


@pytest.mark.parametrize(("name", "message", "breaks"), ENCODER_FAULTS)
def test_faults_of_encoders(
    models: dict[str, Path], tmp_path: Path, name: str, message: str, breaks: Callable[[Path, Path], Path]
) -> None:
    report = aprfmt.qa(breaks(models["bert"], tmp_path / "m.gguf"))
    assert gate(report, name).status == "fail", gate(report, name).message
    assert message in gate(report, name).message
    assert gate(report, name).hint


def test_an_encoder_without_pooling_is_no_pass(models: dict[str, Path], tmp_path: Path) -> None:
    source = broken_models.with_key(models["bert"], tmp_path / "m.gguf", "bert.pooling_type", None)
    report = aprfmt.qa(source)
    assert gate(report, "pooling").status == "skip"
    assert gate(report, "pooling").required
    assert not report.passed


def test_vectors_that_depend_on_the_batch_or_differ_from_the_original(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with ModelUnderTest(str(models["bert"]), str(models["bert"]), 0) as x:
        assert encoder_gates.batch(x).passed
        assert encoder_gates.against(x).passed
        true = x.llama.vectors
        monkeypatch.setattr(x.llama, "vectors", lambda texts: true(texts)[::-1])
        assert not encoder_gates.batch(x).passed
        monkeypatch.setattr(encoder_gates, "_COSINES", ((0.0, 1.1),))
        assert not encoder_gates.against(x).passed
        vectors = iter(_drifting())
        monkeypatch.setattr(x, "vector", lambda text, **more: next(vectors))
        assert not encoder_gates.repeatable(x).passed


def test_a_text_without_cls_and_sep(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    with ModelUnderTest(str(models["bert"].with_name("bert")), None, 0) as x:
        assert encoder_gates.special_tokens(x).passed
        true = x.llama.tokenize
        monkeypatch.setattr(x.llama, "tokenize", lambda text: true(text)[1:-1])
        found = encoder_gates.special_tokens(x)
    assert not found.passed
    assert "not with '[CLS]' and '[SEP]'" in found.message


def _drifting() -> Iterator[list[float]]:
    n = 0.0
    while True:
        n += 1.0
        yield [1.0, n]
