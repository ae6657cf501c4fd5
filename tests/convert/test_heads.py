"""Heads of other tasks than the next token: carried, and named where an export to GGUF leaves them behind."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from arch_models import build, find_case, write_checkpoint, write_tokenizers
from llama_peer import LlamaPeer

import aprfmt
from aprfmt.arch.heads import head_of
from aprfmt.cli.main import run
from aprfmt.errors import AprError, RefusedError
from aprfmt.formats import gguf_write
from aprfmt.formats.gguf import GgufNative
from aprfmt.formats.gguf_fields import GgufType
from aprfmt.formats.gguf_write import KV
from aprfmt.formats.out_tensor import OutTensor
from aprfmt.inspection.describe import inspect
from aprfmt.inspection.validate import validate
from aprfmt.io.pipe import FileLayout, WriteOptions, write_file

torch = pytest.importorskip("torch")


@dataclass(frozen=True)
class Case:
    """A network of arch_models with a head of another class.

    Attributes:
        case: id of the case.
        hf_class: the class; one of transformers where there are no `tensors`.
        left: what an export to GGUF says of the head.
        tensors: what published checkpoints have in place of the output head, and their shapes.
        keeps_output: whether the output head stays beside them.
    """

    case: str
    hf_class: str
    left: str
    tensors: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    keeps_output: bool = False

    def __str__(self) -> str:
        return f"{self.hf_class}-{self.case}"


_SCORES = "1 tensor of the sequence classification head (score.weight"
_TOKENS = "2 tensors of the token classification head (score.bias, score.weight"
_SPANS = "2 tensors of the question answering head (qa_outputs.bias, qa_outputs.weight"
_MATH = {"score.0.weight": (64, 64), "score.0.bias": (64,), "score.2.weight": (1, 64), "score.2.bias": (1,)}
_GATED = {
    "regression_layer.weight": (19, 64), "gating.layers.0.weight": (8, 64), "gating.layers.0.bias": (8,),
    "gating.temperature": (1,), "reward_transform_matrix": (19, 19),
}  # fmt: skip

CASES = (
    Case("llama", "LlamaForSequenceClassification", _SCORES),
    Case("llama", "LlamaForTokenClassification", _TOKENS),
    Case("llama", "LlamaForQuestionAnswering", _SPANS),
    Case("phi", "PhiForSequenceClassification", _SCORES),
    Case("qwen3", "Qwen3ForTokenClassification", _TOKENS),
    Case("gpt_neox", "GPTNeoXForQuestionAnswering", _SPANS),
    Case("mixtral", "MixtralForSequenceClassification", _SCORES),
    Case("qwen3_next", "Qwen3NextForSequenceClassification", _SCORES),
    Case("t5encoder", "T5ForTokenClassification", "2 tensors of the token classification head (classifier.bias"),
    Case("bert", "BertForMaskedLM", "5 tensors of the masked language model head: cls.predictions.bias"),
    Case("bert", "BertForNextSentencePrediction", "2 tensors of the next sentence head: cls.seq_relationship.bias"),
    Case("bert", "BertForTokenClassification", "2 tensors of the token classification head: classifier.bias"),
    Case("roberta", "RobertaForQuestionAnswering", "2 tensors of the question answering head: qa_outputs.bias"),
    Case("roberta", "RobertaForMultipleChoice", "2 tensors of the multiple choice head: classifier.bias"),
    Case("modernbert", "ModernBertForMaskedLM", "3 tensors of the masked language model head: decoder.bias"),
    Case("modernbert", "ModernBertForTokenClassification", "4 tensors of the token classification head: classifier"),
    Case("nomic_bert", "NomicBertForSequenceClassification", "2 tensors of the sequence classification head: class"),
    Case("eurobert", "EuroBertForSequenceClassification", "4 tensors of the sequence classification head: classifier"),
    # As Qwen/Qwen2.5-Math-RM-72B, internlm/internlm2-7b-reward and RLHFlow/ArmoRM-Llama3-8B-v0.1 have them, and what
    # trainers put beside the output head.
    Case("qwen2", "Qwen2ForRewardModel", "4 tensors of the reward head (score.*", _MATH),
    Case("qwen2", "Qwen2ForProcessRewardModel", "4 tensors of the reward head (score.*", _MATH),
    Case("internlm2", "InternLM2ForRewardModel", "1 tensor of the reward head (v_head", {"v_head.weight": (1, 64)}),
    Case("llama", "LlamaForRewardModelWithGating", "5 tensors of the reward head (gating.*", _GATED),
    Case(
        "llama", "LlamaForCausalLM", "2 tensors of the head of another task (v_head.*",
        {"v_head.summary.weight": (1, 64), "v_head.summary.bias": (1,)}, keeps_output=True,
    ),
)  # fmt: skip
by_case = pytest.mark.parametrize("case", CASES, ids=str)


def write(case: Case, folder: Path) -> Path:
    """The folder of the case."""
    from safetensors.torch import load_file, save_file

    base = find_case(case.case)
    tokenizers = write_tokenizers(folder.parent / "tok", [base.tokenizer], 4000)
    if not case.tensors:
        build(replace(base, model_class=case.hf_class, kind="encoder", model_options={}), folder, tokenizers)
        return folder
    (build if base.computable else write_checkpoint)(base, folder, tokenizers)
    path, config = folder / "model.safetensors", json.loads((folder / "config.json").read_text())
    heads = () if case.keeps_output else ("lm_head.weight", "output.weight")
    kept = {name: tensor for name, tensor in load_file(path).items() if name not in heads}
    save_file(kept | {name: torch.randn(shape) for name, shape in case.tensors.items()}, path, {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config | {"architectures": [case.hf_class]}))
    return folder


def _files(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.turns
@by_case
def test_every_file_comes_back_and_what_stays_is_named(case: Case, tmp_path: Path) -> None:
    source = write(case, tmp_path / "m")
    assert aprfmt.import_model(source, tmp_path / "m.apr").lossless
    aprfmt.export_model(tmp_path / "m.apr", tmp_path / "back", format="hf")
    assert _files(tmp_path / "back") == _files(source)
    report = aprfmt.export_model(tmp_path / "m.apr", tmp_path / "m.gguf", dtype="f32", allow_different=True)
    assert [loss for loss in report.losses if case.left in loss], report.losses
    with aprfmt.open(tmp_path / "m.gguf") as model:
        assert not [name for name in model.tensors if name.startswith("cls")]


@pytest.mark.turns
@by_case
def test_validate_and_inspect_know_it(case: Case, tmp_path: Path) -> None:
    source = write(case, tmp_path / "m")
    report = validate(source)
    assert report.passed, [check for check in report.checks if check.status == "fail"]
    aprfmt.import_model(source, tmp_path / "m.apr")
    head = head_of(case.hf_class)
    for path in (source, tmp_path / "m.apr"):
        found = inspect(path).head
        assert (found and found.task) == (head and head.task)


@dataclass(frozen=True)
class Shown:
    """What `apr inspect` says of the head of a folder and of its GGUF."""

    case: str
    task: str
    labels: tuple[str, ...]


@pytest.mark.parametrize(
    "shown",
    [
        Shown("bert_classifier", "sequence classification", ("negative", "neutral", "positive")),
        Shown("bert_classifier/one", "sequence classification", ("LABEL_0",)),
        Shown("modernbert_classifier", "sequence classification", ("negative", "neutral", "positive")),
        Shown("qwen3_classifier", "sequence classification", ("negative", "neutral", "positive")),
    ],
    ids=lambda shown: shown.case,
)
def test_inspect_shows_the_head_of_every_container(
    shown: Shown, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case = find_case(shown.case)
    build(case, tmp_path / "m", write_tokenizers(tmp_path / "tok", [case.tokenizer], 4000))
    aprfmt.import_model(tmp_path / "m", tmp_path / "m.apr")
    aprfmt.export_model(tmp_path / "m", tmp_path / "m.gguf")
    for name in ("m", "m.apr", "m.gguf"):
        assert run(["inspect", str(tmp_path / name), "--json"]) == 0
        head = json.loads(capsys.readouterr().out)["head"]
        assert head["task"] == shown.task
        assert head["n_labels"] == len(shown.labels)
        assert len(shown.labels) == 1 or tuple(head["labels"]) == shown.labels
        assert run(["inspect", str(tmp_path / name)]) == 0
        assert f"{shown.task}, {len(shown.labels)} output" in " ".join(capsys.readouterr().out.split())


@dataclass(frozen=True)
class Bad:
    """What is done to the folder of a BertForSequenceClassification of three outputs, and what is said of it."""

    what: str
    config: Mapping[str, object] = field(default_factory=dict)
    without: str = ""
    said: str = ""


@pytest.mark.parametrize(
    "bad",
    [
        Bad("more names than outputs", {"id2label": dict.fromkeys("0123", "x")}, said="num_labels 4.*classifier"),
        Bad("fewer names than outputs", {"id2label": {"0": "a", "1": "b"}}, said="num_labels 2.*classifier"),
        Bad("names that are a list", {"id2label": ["a", "b", "c"]}, said="id2label is not an object"),
        Bad("no classifier", without="classifier.weight", said="missing: classifier.weight"),
        Bad("no pooler", without="bert.pooler.dense.bias", said="missing: bert.pooler.dense.bias"),
    ],
    ids=lambda bad: bad.what,
)
def test_a_head_that_contradicts_its_config_is_refused(bad: Bad, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    build(find_case("bert_classifier"), tmp_path / "m", write_tokenizers(tmp_path / "tok", ["bert"], 4000))
    path, weights = tmp_path / "m" / "config.json", tmp_path / "m" / "model.safetensors"
    path.write_text(json.dumps(json.loads(path.read_text()) | dict(bad.config)))
    save_file({name: t for name, t in load_file(weights).items() if name != bad.without}, weights, {"format": "pt"})
    for target in ("m.apr", "m.gguf"):
        with pytest.raises(AprError, match=bad.said):
            aprfmt.convert_model(tmp_path / "m", tmp_path / target)
        assert not (tmp_path / target).exists()


def test_a_gguf_whose_outputs_have_other_names_fails(tmp_path: Path) -> None:
    build(find_case("bert_classifier"), tmp_path / "m", write_tokenizers(tmp_path / "tok", ["bert"], 4000))
    aprfmt.export_model(tmp_path / "m", tmp_path / "m.gguf", dtype="f32", allow_different=True)
    with aprfmt.open(tmp_path / "m.gguf") as model:
        native = model.native_as(GgufNative)
        assert native is not None
        pairs, key = native.parts[0].kv, "bert.classifier.output_labels"
        entries: list[KV | bytes] = [bytes(pairs.raw(name)) for name in pairs if name != key]
        tensors = [
            OutTensor(n, t.dtype, t.shape, t.n_bytes, lambda t=t: [bytes(t.raw())])  # type: ignore[misc]
            for n, t in model.tensors.items()
        ]
        entries.append((key, (GgufType.ARRAY, GgufType.STRING), ["yes", "no"]))
        layout = gguf_write.layout(entries, tensors)
        write_file(str(tmp_path / "bad.gguf"), FileLayout("bad.gguf", layout), WriteOptions(fsync=False))
    report = validate(tmp_path / "bad.gguf")
    assert not report.passed
    assert any("num_labels 2" in check.message for check in report.checks if check.status == "fail")
    with pytest.raises(RefusedError, match="num_labels 2"):
        aprfmt.import_model(tmp_path / "bad.gguf", tmp_path / "m.apr")


@pytest.mark.llama
@pytest.mark.parametrize("case", ["llama", "phi", "phimoe", "gpt_neox", "qwen2"])
def test_llama_cpp_loads_what_is_left_of_a_network(case: str, tmp_path: Path, llama_cpp: LlamaPeer) -> None:
    base = find_case(case)
    hf_class = base.model_class.replace("ForCausalLM", "ForSequenceClassification")
    folder = write(Case(case, hf_class, ""), tmp_path / "m")
    aprfmt.export_model(folder, tmp_path / "m.gguf", dtype="f32", allow_different=True)
    llama_cpp.load(tmp_path / "m.gguf")
