"""`.apr` to GGUF to `.apr`: the same tensors and the same metadata, and the GGUF comes back too."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from natives import gguf_parts
from tiny_models import CASES, build

import aprfmt
from aprfmt.canonical.sidecar import KEY as SIDECAR
from aprfmt.formats import gguf_write
from aprfmt.formats.apr_metadata import SOURCE_KEY
from aprfmt.formats.gguf_fields import GgufType
from aprfmt.formats.out_tensor import OutTensor
from aprfmt.io.pipe import FileLayout, WriteOptions, write_file


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    """An `.apr` of a BF16 model with facts that no GGUF key holds."""
    pytest.importorskip("transformers")
    folder = tmp_path / "model"
    build(CASES["llama-bias"], folder, None, dtype="bfloat16")
    aprfmt.import_model(folder, tmp_path / "plain.apr", data_license="CC0-1.0", data_source="made up")
    aprfmt.stamp(tmp_path / "plain.apr", tmp_path / "a.apr", set={"note": {"b": [1, 2.5], "a": "é"}})
    return tmp_path / "a.apr"


def contents(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    with aprfmt.open(path) as model:
        tensors = {t.name: (t.dtype, t.shape, bytes(t.raw())) for t in model.tensors.entries}
        return tensors, {key: value for key, value in model.metadata.items() if key != SOURCE_KEY}


def test_tensors_and_metadata_survive_the_trip_through_gguf(packed: Path, tmp_path: Path) -> None:
    aprfmt.export_model(packed, tmp_path / "m.gguf")
    with aprfmt.open(tmp_path / "m.gguf") as model:
        assert model.tensors["output_norm.weight"].dtype == "F32"
        assert model.tensors["blk.0.attn_q.bias"].dtype == "F32"
    report = aprfmt.import_model(tmp_path / "m.gguf", tmp_path / "b.apr")
    assert report.lossless
    assert report.losses == []
    assert contents(tmp_path / "b.apr") == contents(packed)
    aprfmt.export_model(tmp_path / "b.apr", tmp_path / "again.gguf")
    assert (tmp_path / "again.gguf").read_bytes() == (tmp_path / "m.gguf").read_bytes()


def test_an_edit_that_no_gguf_key_holds_reaches_the_next_gguf(packed: Path, tmp_path: Path) -> None:
    aprfmt.export_model(packed, tmp_path / "m.gguf")
    aprfmt.import_model(tmp_path / "m.gguf", tmp_path / "b.apr")
    aprfmt.stamp(tmp_path / "b.apr", tmp_path / "c.apr", data_license="MIT")
    aprfmt.export_model(tmp_path / "c.apr", tmp_path / "n.gguf")
    aprfmt.import_model(tmp_path / "n.gguf", tmp_path / "d.apr", data_source="stated now")
    _, metadata = contents(tmp_path / "d.apr")
    assert metadata["data_license"] == "MIT"
    assert metadata["data_source"] == "stated now"


def test_keys_that_another_program_edited_win(packed: Path, tmp_path: Path) -> None:
    aprfmt.export_model(packed, tmp_path / "m.gguf")
    data = (tmp_path / "m.gguf").read_bytes()
    edited = data.replace(
        b"llama.context_length\x04\x00\x00\x00\x00\x02", b"llama.context_length\x04\x00\x00\x00\x00\x01"
    )
    assert edited != data
    (tmp_path / "m.gguf").write_bytes(edited)
    report = aprfmt.import_model(tmp_path / "m.gguf", tmp_path / "b.apr")
    assert any("edited" in warning for warning in report.warnings)
    _, metadata = contents(tmp_path / "b.apr")
    assert metadata["max_position_embeddings"] == 256
    assert "note" not in metadata
    aprfmt.export_model(tmp_path / "b.apr", tmp_path / "again.gguf")
    assert (tmp_path / "again.gguf").read_bytes() == edited


def sources(tensor: aprfmt.Tensor) -> list[memoryview]:
    return [tensor.raw()]


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"keys": 1, "metadata": 2, "dtypes": 3}', '{"keys":"","metadata":{"bits":-1},"dtypes":{}}'],
)
def test_a_damaged_envelope_is_left_aside(text: str, tiny_gguf: Path, tmp_path: Path) -> None:
    with aprfmt.open(tiny_gguf) as model:
        kv = gguf_parts(model)[0].kv
        keys: list[Any] = [bytes(kv.raw(key)) for key in kv if key != SIDECAR]
        tensors = [OutTensor(t.name, t.dtype, t.shape, t.n_bytes, partial(sources, t)) for t in model.tensors.entries]
        layout = FileLayout("m.gguf", gguf_write.layout([*keys, (SIDECAR, GgufType.STRING, text)], tensors))
        write_file(str(tmp_path / "m.gguf"), layout, WriteOptions())
    report = aprfmt.import_model(tmp_path / "m.gguf", tmp_path / "b.apr")
    assert any(SIDECAR in warning for warning in report.warnings)
    assert json.dumps(report.to_json())


def test_tensors_and_metadata_survive_the_trip_through_a_folder(packed: Path, tmp_path: Path) -> None:
    aprfmt.export_model(packed, tmp_path / "model-again")
    facts = json.loads((tmp_path / "model-again" / "apr_metadata.json").read_text())
    assert facts == {"note": {"a": "é", "b": [1, 2.5]}}  # the rest stands in the card
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        assert (tmp_path / "model-again" / name).read_bytes() == (tmp_path / "model" / name).read_bytes()
    aprfmt.import_model(tmp_path / "model-again", tmp_path / "b.apr")
    assert contents(tmp_path / "b.apr") == contents(packed)
    aprfmt.export_model(tmp_path / "b.apr", tmp_path / "third")
    assert (tmp_path / "third" / "apr_metadata.json").read_bytes() == (
        tmp_path / "model-again" / "apr_metadata.json"
    ).read_bytes()


@pytest.mark.parametrize("text", ["", "[]", "nonsense", '{"num_heads": 3, "tokenizer.merges": [], "aprfmt.source": 1}'])
def test_a_file_of_facts_holds_no_dimensions(text: str, packed: Path, tmp_path: Path) -> None:
    aprfmt.export_model(packed, tmp_path / "folder")
    (tmp_path / "folder" / "apr_metadata.json").write_text(text)
    aprfmt.import_model(tmp_path / "folder", tmp_path / "b.apr")
    _, metadata = contents(tmp_path / "b.apr")
    assert metadata["num_heads"] == 4
    assert "note" not in metadata


@pytest.mark.parametrize(
    "said", [{"hidden_size": 5}, {"aprfmt.tokenizer": 5}, {"num_layers": None, "intermediate_size": 7}]
)
def test_an_envelope_that_contradicts_the_file_is_left_aside(
    said: dict[str, Any], packed: Path, tmp_path: Path
) -> None:
    from aprfmt.canonical.sidecar import Sidecar, seal

    aprfmt.export_model(packed, tmp_path / "m.gguf")
    with aprfmt.open(tmp_path / "m.gguf") as model:
        kv = gguf_parts(model)[0].kv
        tensors = [OutTensor(t.name, t.dtype, t.shape, t.n_bytes, partial(sources, t)) for t in model.tensors.entries]
        keys = seal([bytes(kv.raw(key)) for key in kv], Sidecar(said))
        layout = FileLayout("n.gguf", gguf_write.layout(keys, tensors))
        write_file(str(tmp_path / "n.gguf"), layout, WriteOptions())
    report = aprfmt.import_model(tmp_path / "n.gguf", tmp_path / "b.apr")
    assert any("contradicts" in warning for warning in report.warnings)
    _, metadata = contents(tmp_path / "b.apr")
    assert (metadata["hidden_size"], metadata["num_layers"], metadata["intermediate_size"]) == (64, 2, 96)
    aprfmt.export_model(tmp_path / "b.apr", tmp_path / "back.gguf")
    assert (tmp_path / "back.gguf").read_bytes() == (tmp_path / "n.gguf").read_bytes()
