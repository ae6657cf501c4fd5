"""Folders with odd material come back as they were, and a GGUF's sidecar keeps to what it may say."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from natives import gguf_parts
from plain_models import CONFIG, GGUF_KEYS, gguf_names, weights, write_folder, write_gguf
from safetensors.numpy import save_file

import aprfmt
from aprfmt.canonical import sidecar
from aprfmt.formats import gguf_write
from aprfmt.formats.out_tensor import OutTensor
from aprfmt.io.pipe import FileLayout, WriteOptions, write_file

CARD = b"---\nlicense: mit\n---\n"


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*")}


def assert_comes_back(source: Path, tmp_path: Path) -> None:
    assert aprfmt.import_model(source, tmp_path / "m.apr").lossless
    assert aprfmt.export_model(tmp_path / "m.apr", tmp_path / "back").lossless
    assert contents(tmp_path / "back") == contents(source)


@pytest.mark.parametrize(
    "facts", [b"{}", b"[1", b'{"name":"other"}', b'{"license":"mit","note":1}', b'{"hidden_size": 3}\r\n']
)
def test_any_apr_metadata_json_of_a_folder_comes_back(facts: bytes, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "f")
    (folder / "README.md").write_bytes(CARD)
    (folder / "apr_metadata.json").write_bytes(facts)
    assert_comes_back(folder, tmp_path)


@pytest.mark.parametrize("card", [None, CARD])
def test_a_snapshot_of_the_hubs_cache_comes_back_without_more_files(card: bytes | None, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "f")
    if card is not None:
        (folder / "README.md").write_bytes(card)
    snapshot = tmp_path / "models--some--tiny-model" / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    blobs = snapshot.parents[1] / "blobs"
    blobs.mkdir()
    for i, path in enumerate(sorted(folder.iterdir())):
        path.rename(blobs / str(i))
        (snapshot / path.name).symlink_to(f"../../blobs/{i}")
    assert_comes_back(snapshot, tmp_path)


def test_a_source_that_was_stated_still_reaches_the_folder(tmp_path: Path) -> None:
    aprfmt.import_model(write_folder(tmp_path / "f"), tmp_path / "m.apr")
    aprfmt.stamp(tmp_path / "m.apr", tmp_path / "s.apr", set={"source": "https://huggingface.co/a/b"})
    aprfmt.export_model(tmp_path / "s.apr", tmp_path / "back")
    assert "https://huggingface.co/a/b" in (tmp_path / "back" / "apr_metadata.json").read_text()


def test_a_tied_head_under_its_gguf_name_comes_back(tmp_path: Path) -> None:
    arrays = {name: np.ascontiguousarray(data) for name, data in gguf_names(weights()).items()}
    arrays["output.weight"] = arrays["token_embd.weight"].copy()
    folder = tmp_path / "f"
    folder.mkdir()
    save_file(arrays, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG | {"tie_word_embeddings": True}))
    assert_comes_back(folder, tmp_path)


def test_a_file_that_could_not_be_written_again_is_left_and_named_at_import(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "f")
    (folder / "a\\b.md").write_text("x")
    report = aprfmt.import_model(folder, tmp_path / "m.apr")
    assert not report.lossless
    (loss,) = report.losses
    assert loss.startswith("not carried: a\\b.md; ")
    aprfmt.export_model(tmp_path / "m.apr", tmp_path / "out", format="hf")
    assert {path.name for path in folder.iterdir()} - {path.name for path in (tmp_path / "out").iterdir()} == {
        "a\\b.md"
    }


def pieces(tensor: aprfmt.Tensor) -> list[memoryview]:
    return [tensor.raw()]


@pytest.mark.parametrize(
    "entry",
    [
        {"tokenizer.vocabulary": None},
        {"tokenizer.vocabulary": ["x"] * 320},
        {"aprfmt.tensors": {"lm_head.weight": {"dtype": "U8", "shape": [1]}}},
        {"aprfmt.source": 5},
    ],
    ids=["no list", "other list", "dtypes", "record"],
)
def test_an_envelope_cannot_replace_lists_and_tensors(entry: dict[str, object], tmp_path: Path) -> None:
    aprfmt.export_model(write_folder(tmp_path / "f"), tmp_path / "g.gguf")
    with aprfmt.open(tmp_path / "g.gguf") as model:
        kv = gguf_parts(model)[0].kv
        keys = sidecar.seal([bytes(kv.raw(key)) for key in kv], sidecar.Sidecar(entry))
        tensors = [OutTensor(t.name, t.dtype, t.shape, t.n_bytes, partial(pieces, t)) for t in model.tensors.entries]
        layout = FileLayout("e.gguf", gguf_write.layout(keys, tensors))
        write_file(str(tmp_path / "e.gguf"), layout, WriteOptions())
    report = aprfmt.import_model(tmp_path / "e.gguf", tmp_path / "e.apr")
    assert any(sidecar.KEY in warning for warning in report.warnings)
    aprfmt.export_model(tmp_path / "e.apr", tmp_path / "again.gguf")
    assert (tmp_path / "again.gguf").read_bytes() == (tmp_path / "e.gguf").read_bytes()


def test_a_custom_entry_reaches_the_gguf_of_another_program(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "s.gguf", gguf_names(weights()), GGUF_KEYS)
    aprfmt.import_model(source, tmp_path / "m.apr")
    aprfmt.stamp(tmp_path / "m.apr", tmp_path / "e.apr", set={"note": 1})
    assert not aprfmt.export_model(tmp_path / "e.apr", tmp_path / "out.gguf", no_tokenizer=True).lossless
    aprfmt.import_model(tmp_path / "out.gguf", tmp_path / "again.apr")
    with aprfmt.open(tmp_path / "again.apr") as model:
        assert model.metadata["note"] == 1
