"""--verify=logits: the output computes what its source does, or nothing is written."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import broken_models
import pytest
from arch_models import Inline, build, find_case, write_tokenizers

import aprfmt
from aprfmt.cli.main import run
from aprfmt.convert import logits, torch_child
from aprfmt.convert.api import convert
from aprfmt.errors import MissingDependencyError, RunError, UsageError
from aprtrain import reference

pytestmark = pytest.mark.llama


@pytest.fixture
def inline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_child, "Child", Inline)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny random models of transformers."""
    folder = tmp_path_factory.mktemp("models")
    cases = [find_case(name) for name in ("llama", "bert", "bert_classifier", "t5")]
    tokenizers = write_tokenizers(folder / "tokenizers", [case.tokenizer for case in cases], 512)
    for case in cases:
        build(case, folder / case.id, tokenizers)
    return {case.id: folder / case.id for case in cases}


@pytest.mark.usefixtures("inline")
def test_a_gguf_computes_what_its_folder_does(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "m.gguf")
    assert run(["export", str(folders["llama"]), "-o", out, "--verify=logits", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["verify"]
    assert found["loaded"]
    assert found["tokens"]
    compared = found["logits"]
    assert compared["what"] == "logits"
    assert compared["tokens"] == 16
    assert compared["source_engine"].startswith("transformers ")
    assert compared["relative_error"] < 1e-4 < compared["limit"] == 2e-3
    assert run(["quantize", out, "q8_0", "-o", str(tmp_path / "q.gguf"), "--verify=logits"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "compared logits of 16 tokens:" in text
    assert "limit 0.3" in text


@pytest.mark.usefixtures("inline")
@pytest.mark.parametrize(
    ("name", "what"), [("bert", "embeddings"), ("bert_classifier", "scores"), ("t5", "decoder logits")]
)
def test_what_is_compared_of_other_networks(folders: dict[str, Path], tmp_path: Path, name: str, what: str) -> None:
    found = aprfmt.export_model(folders[name], tmp_path / "m.gguf", verify="logits").verify
    assert found is not None
    assert found["logits"]["what"] == what
    assert found["logits"]["relative_error"] < 2e-3


def test_an_apr_is_computed_in_another_process(folders: dict[str, Path], tiny_gguf: Path, tmp_path: Path) -> None:
    found = aprfmt.import_model(tiny_gguf, tmp_path / "m.apr", verify="logits").verify
    assert found is not None
    assert found["logits"]["engine"] == "the decoder of aprtrain"
    assert found["logits"]["relative_error"] < 1e-2


@pytest.mark.usefixtures("inline")
def test_an_output_that_computes_something_else_is_not_written(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A GGUF whose Q and K keep the order of transformers, as if the export had not permuted them."""
    true = logits.compute

    def wrong(path: Any, ids: Any, kind: Any, convert: Any, **more: Any) -> Any:
        if "name" in more:
            source = tmp_path / "output.gguf"
            source.write_bytes(Path(path).read_bytes())
            path = broken_models.reordered(source, tmp_path / "w.gguf", {"attn_q": 4, "attn_k": 2}, halves=True)
        return true(path, ids, kind, convert, **more)

    monkeypatch.setattr(logits, "compute", wrong)
    out = tmp_path / "m.gguf"
    assert run(["convert", str(folders["llama"]), "-o", str(out), "--verify=logits"]) == 8
    assert "logits of 16 tokens differ from the source's" in capsys.readouterr().err
    assert not out.exists()
    assert aprfmt.convert_model(folders["llama"], out, verify=True).verify is not None  # which compares nothing


@pytest.mark.usefixtures("inline")
def test_what_cannot_be_computed_is_no_pass(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "m.gguf"
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingDependencyError, match=r"cannot be computed: .*transformers") as caught:
        aprfmt.export_model(folders["bert"], out, verify="logits")
    assert caught.value.hint is not None
    assert "pip install -U transformers" in caught.value.hint
    assert not out.exists()


@pytest.mark.parametrize(("kind", "model_type"), [("causal", "new"), ("encoder", "bert")])
def test_a_class_that_transformers_does_not_have(
    folders: dict[str, Path], tmp_path: Path, kind: str, model_type: str
) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    config = json.loads((folders["llama"] / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["NewModel"], "model_type": model_type}))
    answer = reference._answer("transformers", str(folder), [1, 2], kind, "")
    assert answer["missing"] == "transformers"
    assert "has no class NewModel" in answer["reason"]


def test_usage(folders: dict[str, Path], tiny_gguf: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--verify does not apply to the format hf") as caught:
        aprfmt.convert_model(tiny_gguf, tmp_path / "m", format="hf", verify=True)
    assert "--verify=logits" in str(caught.value.hint)
    with pytest.raises(UsageError, match="verify must be True, False or"):
        aprfmt.convert_model(tiny_gguf, tmp_path / "m.gguf", verify="sums")
    with pytest.raises(UsageError, match="which this command changes"):
        aprfmt.prune_model(tiny_gguf, tmp_path / "m.gguf", keep_layers=[0], verify="logits")
    assert not list(tmp_path.iterdir())


def test_tolerances_follow_the_dtypes() -> None:
    """Coarser types may differ by more, and the coarsest of several decides."""
    names = ("F32", "F16", "BF16", "Q8_0", "Q5_K", "Q4_K", "Q3_K", "Q2_K")
    limits = [logits.tolerance([name], same_weights=False) for name in names]
    assert limits == sorted(limits)
    assert limits[0] == 2e-3
    assert logits.tolerance(["F32", "Q4_K"], same_weights=False) == limits[5]
    assert logits.tolerance(["Q4_K"], same_weights=True) < limits[5]


@pytest.mark.parametrize(
    ("keys", "kind"),
    [
        ({}, "causal"),
        ({"x.attention.causal": False}, "encoder"),
        ({"x.pooling_type": 3}, "states"),
        ({"x.pooling_type": 4}, "rank_decoder"),
        ({"x.pooling_type": 4, "x.attention.causal": False}, "rank"),
        ({"x.decoder_start_token_id": 0}, "seq2seq"),
    ],
)
def test_what_the_keys_of_a_gguf_say(keys: dict[str, object], kind: str) -> None:
    assert logits.kind_of({"general.architecture": "x"} | keys) == kind


def test_a_network_that_computes_nan(folders: dict[str, Path], tiny_gguf: Path, tmp_path: Path) -> None:
    broken = broken_models.with_nan(tiny_gguf, tmp_path / "nan.gguf", "blk.0.attn_norm.weight")
    with pytest.raises(RunError, match="NaN"):
        logits.compute(broken, [1, 2, 3], "causal", convert)
