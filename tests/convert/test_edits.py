"""Edits take effect in every later output, and whatever they do not touch stays."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFValueType
from plain_models import GGUF_KEYS, gguf_names, weights, write_folder, write_gguf

import aprfmt
from aprfmt.cli.main import run
from aprfmt.convert.stamp import stamp
from aprfmt.errors import AprError


@pytest.fixture
def apr(tmp_path: Path) -> Path:
    """An import of a folder with a card."""
    folder = write_folder(tmp_path / "source")
    (folder / "README.md").write_text("card")
    aprfmt.import_model(folder, tmp_path / "m.apr")
    return tmp_path / "m.apr"


def stamped(apr: Path, **values: Any) -> Path:
    out = apr.with_name("stamped.apr")
    stamp(apr, out, set={key.replace("__", "."): value for key, value in values.items()})
    return out


def test_a_stamped_chat_template_reaches_the_folder(apr: Path, tmp_path: Path) -> None:
    report = aprfmt.export_model(stamped(apr, chat_template="{{ messages }}"), tmp_path / "out")
    assert not report.lossless
    assert json.loads((tmp_path / "out/tokenizer_config.json").read_text())["chat_template"] == "{{ messages }}"
    assert (tmp_path / "out/README.md").read_text() == "card"


def test_a_removed_chat_template_is_gone(apr: Path, tmp_path: Path) -> None:
    aprfmt.export_model(stamped(apr, chat_template=None), tmp_path / "out")
    assert "chat_template" not in json.loads((tmp_path / "out/tokenizer_config.json").read_text())


def test_a_stamped_token_id_reaches_config_json(apr: Path, tmp_path: Path) -> None:
    aprfmt.export_model(stamped(apr, tokenizer__bos_token_id=7), tmp_path / "out")
    assert json.loads((tmp_path / "out/config.json").read_text())["bos_token_id"] == 7


def test_an_alias_sets_its_typed_field(apr: Path) -> None:
    with aprfmt.open(stamped(apr, num_hidden_layers=3)) as model:
        assert model.metadata["num_layers"] == 3
        assert "num_hidden_layers" not in model.metadata


def test_a_stamped_token_id_keeps_the_other_keys_of_a_gguf(tmp_path: Path) -> None:
    keys = GGUF_KEYS | {
        "general.tags": (GGUFValueType.ARRAY, ["one"]),
        "tokenizer.ggml.model": (GGUFValueType.STRING, "llama"),
        "tokenizer.ggml.tokens": (GGUFValueType.ARRAY, [f"t{i}" for i in range(320)]),
        "tokenizer.ggml.scores": (GGUFValueType.ARRAY, [0.5] * 320),
        "tokenizer.ggml.bos_token_id": (GGUFValueType.UINT32, 1),
    }
    source = write_gguf(tmp_path / "s.gguf", gguf_names(weights()), keys)
    aprfmt.import_model(source, tmp_path / "m.apr")
    aprfmt.export_model(stamped(tmp_path / "m.apr", tokenizer__bos_token_id=7), tmp_path / "out.gguf")
    with aprfmt.open(tmp_path / "out.gguf") as model:
        assert model.metadata["tokenizer.ggml.bos_token_id"] == 7
        assert list(model.metadata["general.tags"]) == ["one"]


def test_converting_an_apr_keeps_what_nothing_models(apr: Path, tmp_path: Path) -> None:
    source = stamped(apr, **{"my__key": {"a": 1}})
    aprfmt.convert_model(source, tmp_path / "half.apr", dtype="f16")
    with aprfmt.open(tmp_path / "half.apr") as model:
        assert model.metadata["my.key"] == {"a": 1}
        assert model.metadata["original_format"] == "safetensors"
        record = model.metadata["aprfmt.source"]
        assert record["partial"] is True
        own = {path.name for path in (tmp_path / "source").iterdir()}
        assert {file["name"] for file in record["files"]} == own - {"model.safetensors"}
    aprfmt.convert_model(source, tmp_path / "licensed.apr", license="mit")
    report = aprfmt.export_model(tmp_path / "licensed.apr", tmp_path / "back")
    assert not report.lossless  # one file more than the source had
    for path in (tmp_path / "source").iterdir():
        assert (tmp_path / "back" / path.name).read_bytes() == path.read_bytes()
    assert json.loads((tmp_path / "back/apr_metadata.json").read_text()) == {"license": "MIT", "my.key": {"a": 1}}


@pytest.mark.parametrize("start", ["folder", "apr"])
def test_another_tokenizer_replaces_the_source_files(start: str, apr: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    text = (tmp_path / "source/tokenizer.json").read_text().replace("<|endoftext|>", "<|otherword|>")
    (other / "tokenizer.json").write_text(text)
    source = apr if start == "apr" else tmp_path / "source"
    report = aprfmt.convert_model(source, tmp_path / "out", tokenizer=other)
    assert not report.lossless
    assert (tmp_path / "out/tokenizer.json").read_text() == text
    assert not (tmp_path / "out/tokenizer_config.json").exists()
    assert (tmp_path / "out/README.md").read_text() == "card"


@pytest.mark.parametrize("sharded", [False, True])
def test_a_folder_does_not_replace_its_own_input(sharded: bool, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "f")
    source = folder / "model.safetensors"
    if sharded:
        aprfmt.convert_model(folder, tmp_path / "g", shard_size=60_000)
        folder, source = tmp_path / "g", tmp_path / "g/model.safetensors.index.json"
    before = {path: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(aprfmt.AprError, match="contains the input"):
        aprfmt.convert_model(source, folder, format="hf", dtype="f16", force=True)
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_an_old_tokenizer_does_not_stay_beside_a_new_one(apr: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "chat_template.jinja").write_text("OLD")
    (out / "notes.txt").write_text("mine")
    aprfmt.export_model(apr, out, format="hf", force=True)
    assert not (out / "chat_template.jinja").exists()
    assert (out / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("form", ["m.apr", "m.gguf"])
@pytest.mark.parametrize("in_place", [True, False])
def test_a_plan_counts_what_a_stamp_then_writes(apr: Path, tmp_path: Path, form: str, in_place: bool) -> None:
    source = tmp_path / form
    if form != "m.apr":
        aprfmt.convert_model(apr, source)
    out = None if in_place else tmp_path / "out" / form
    (tmp_path / "out").mkdir()
    before = source.read_bytes()
    plan = stamp(source, out, license="MIT", in_place=in_place, plan=True)
    assert source.read_bytes() == before
    assert not list((tmp_path / "out").iterdir())
    done = stamp(source, out, license="MIT", in_place=in_place)
    assert plan.to_json() == done.to_json() | {"plan": True}
    assert "plan" not in done.to_json()


def test_a_plan_refuses_what_a_stamp_refuses(apr: Path, tmp_path: Path) -> None:
    with pytest.raises(AprError, match="has no effect"):
        stamp(apr, tmp_path / "x.apr", set={"llama.vocab_size": 7}, plan=True)
    with pytest.raises(AprError, match="plan must be"):
        stamp(apr, tmp_path / "x.apr", license="MIT", plan="yes")  # type: ignore[arg-type]


def test_the_command_says_that_nothing_was_written(
    apr: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["stamp", str(apr), "-o", str(tmp_path / "x.apr"), "--license", "mit", "--plan"]) == 0
    assert "nothing is written" in (shown := capsys.readouterr().out)
    assert "MIT" in shown
    assert not (tmp_path / "x.apr").exists()
