"""Keys of a GGUF are edited where they are; the tensor data stay, and nothing that cannot take effect is taken."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFValueType
from plain_models import GGUF_KEYS, gguf_names, weights, write_folder, write_gguf

import aprfmt
from aprfmt.convert import gguf_edit
from aprfmt.convert.stamp import stamp

TOKENS = [f"t{i}" for i in range(320)]
KEYS = GGUF_KEYS | {
    "general.name": (GGUFValueType.STRING, "a model"),
    "general.tags": (GGUFValueType.ARRAY, ["one"]),
    "own.bytes": (GGUFValueType.UINT8, 7),
    "tokenizer.ggml.model": (GGUFValueType.STRING, "llama"),
    "tokenizer.ggml.tokens": (GGUFValueType.ARRAY, TOKENS),
    "tokenizer.ggml.scores": (GGUFValueType.ARRAY, [0.5] * 320),
}


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "m.gguf", gguf_names(weights()), KEYS)


def metadata(path: Path) -> dict[str, Any]:
    with aprfmt.open(path) as model:
        return dict(model.metadata)


def data(path: Path) -> dict[str, bytes]:
    with aprfmt.open(path) as model:
        return {name: bytes(tensor.raw()) for name, tensor in model.tensors.items()}


def kinds(path: Path) -> dict[str, str]:
    return {key.key: key.type for key in aprfmt.inspect(path, metadata=True).stored or ()}


def test_a_key_that_fits_is_edited_in_place(gguf: Path) -> None:
    before, tensors, inode = metadata(gguf), data(gguf), gguf.stat().st_ino
    report = stamp(gguf, in_place=True, set={"general.name": "b model"})
    assert metadata(gguf) == before | {"general.name": "b model"}
    assert (data(gguf), gguf.stat().st_ino) == (tensors, inode)
    assert report.output_bytes <= 4096


def test_what_does_not_fit_is_a_copy(gguf: Path) -> None:
    before, tensors, inode = metadata(gguf), data(gguf), gguf.stat().st_ino
    stamp(gguf, in_place=True, set={"general.name": "x" * 99, "general.tags": None})
    assert metadata(gguf) == {k: v for k, v in before.items() if k != "general.tags"} | {"general.name": "x" * 99}
    assert data(gguf) == tensors
    assert gguf.stat().st_ino != inode


@pytest.mark.parametrize("length", range(0, 70, 3))
def test_every_length_gives_a_file_that_the_gguf_package_reads(length: int, gguf: Path) -> None:
    from gguf import GGUFReader

    stamp(gguf, in_place=True, set={"general.name": "n" * length})
    reader = GGUFReader(gguf)
    assert bytes(reader.fields["general.name"].parts[-1]).decode() == "n" * length
    assert {tensor.name: tensor.data.tobytes() for tensor in reader.tensors} == data(gguf)


def test_types_stay_or_are_given(gguf: Path, tmp_path: Path) -> None:
    out = tmp_path / "o.gguf"
    values = {"own.bytes": 8, "llama.rope.freq_base": 500000, "general.license.name": "x", "my.list": [1, -2]}
    stamp(gguf, out, set=values, types={"my.list": "i16[]"})
    found = kinds(out)
    assert [found[key] for key in values] == ["UINT8", "FLOAT32", "STRING", "ARRAY of INT16"]
    assert {key: metadata(out)[key] for key in values} == values


def test_provenance_has_keys(gguf: Path) -> None:
    stamp(gguf, in_place=True, license="mit", data_source="org/data")
    found = metadata(gguf)
    assert found["general.license"] == "MIT"
    with aprfmt.open(gguf) as model:
        assert aprfmt.inspect(gguf).metadata["data_source"] == "org/data"
        assert model.metadata["general.name"] == "a model"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"llama.contxt_length": 1}, "no effect"),
        ({"llama.block_count": 3}, "tensors of the llama network are missing"),
        ({"llama.feed_forward_length": 95}, "shape"),
        ({"llama.context_length": -1}, "UINT32"),
        ({"llama.context_length": True}, "UINT32"),
        ({"own.bytes": 256}, "UINT8"),
        ({"general.name": 7}, "STRING"),
        ({"general.tags": "one"}, "list"),
        ({"general.alignment": 64}, "cannot be edited"),
        ({"general.architecture": "nothing"}, "unknown architecture"),
        ({"tokenizer.ggml.tokens": ["a"]}, "320 rows"),
        ({"general.nome": None}, "unknown key"),
        ({"data_license": "MIT"}, "no key"),
    ],
)
def test_edits_that_are_refused(values: dict[str, object], message: str, gguf: Path) -> None:
    before = gguf.read_bytes()
    with pytest.raises(aprfmt.AprError, match=message) as caught:
        stamp(gguf, in_place=True, set=values)
    assert caught.value.hint or caught.value.path
    assert gguf.read_bytes() == before


def test_a_suggested_key(gguf: Path) -> None:
    with pytest.raises(aprfmt.AprError) as caught:
        stamp(gguf, in_place=True, set={"llama.contxt_length": 1})
    assert "llama.context_length" in (caught.value.hint or "")


def test_a_kill_leaves_the_old_or_the_new_file(gguf: Path) -> None:
    """The writer is killed at many moments; each time the file is one of the two."""
    code = (
        "import sys, aprfmt; print('go', flush=True)\n"
        "while True:\n"
        "  for name in ('a model', 'b model'): aprfmt.stamp(sys.argv[1], in_place=True, set={'general.name': name})"
    )
    stamp(gguf, in_place=True, set={"general.name": "b model"})
    new = gguf.read_bytes()
    stamp(gguf, in_place=True, set={"general.name": "a model"})
    states = (gguf.read_bytes(), new)
    for i in range(8):
        child = subprocess.Popen(
            [sys.executable, "-c", code, gguf], stdout=subprocess.PIPE, start_new_session=True, env=dict(os.environ)
        )
        assert child.stdout is not None
        assert child.stdout.readline() == b"go\n"
        time.sleep(0.02 * i)
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        child.stdout.close()
        time.sleep(0.05)
        assert gguf.read_bytes() in states


def test_a_split_model_is_joined_first(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "m.gguf", gguf_names(weights()), KEYS)
    aprfmt.convert_model(source, tmp_path / "s.gguf", shard_size=60_000)
    with pytest.raises(aprfmt.AprError, match="files"):
        stamp(next(tmp_path.glob("s-00001*")), in_place=True, set={"general.name": "x"})


def test_keys_of_a_gguf_change_an_apr(tmp_path: Path) -> None:
    aprfmt.import_model(write_folder(tmp_path / "f"), tmp_path / "m.apr")
    values = {
        "llama.context_length": 64,
        "general.tags": ["a", "b"],
        "general.url": "somewhere",
        "tokenizer.chat_template": "{{ messages }}",
        "tokenizer.ggml.eot_token_id": 5,
    }
    stamp(tmp_path / "m.apr", tmp_path / "s.apr", set=values)
    aprfmt.export_model(tmp_path / "s.apr", tmp_path / "o.gguf")
    found = metadata(tmp_path / "o.gguf")
    assert {key: found[key] for key in values} == values


@pytest.mark.parametrize("key", ["general.foo", "llama.foo", "llama.vocab_size", "tokenizer.ggml.foo"])
def test_a_key_that_no_export_writes_is_refused(key: str, tmp_path: Path) -> None:
    aprfmt.import_model(write_folder(tmp_path / "f"), tmp_path / "m.apr")
    with pytest.raises(aprfmt.AprError, match="no effect"):
        stamp(tmp_path / "m.apr", tmp_path / "s.apr", set={key: 7})
    assert not (tmp_path / "s.apr").exists()


@pytest.mark.parametrize(
    ("text", "value"), [("7", 7), ("true", True), ("a b", "a b"), ('"7"', "7"), ("NaN", "NaN"), ("[1]", [1])]
)
def test_typed_texts(text: str, value: object) -> None:
    assert gguf_edit.parse_text(text) == value


@pytest.mark.parametrize("text", ['{"a"', "[1,", '"a', "[" * 100_000])
def test_texts_that_are_broken_json(text: str) -> None:
    with pytest.raises(aprfmt.AprError, match="neither"):
        gguf_edit.parse_text(text)


def test_parts_become_one_file_in_the_order_of_the_original(gguf: Path, tmp_path: Path) -> None:
    original = gguf.read_bytes()
    aprfmt.convert_model(gguf, tmp_path / "p.gguf", shard_size=60_000)
    parts = sorted(tmp_path.glob("p-*.gguf"))
    assert len(parts) > 2
    aprfmt.convert_model(parts[0], tmp_path / "joined.gguf")
    assert (tmp_path / "joined.gguf").read_bytes() == original
    aprfmt.convert_model(parts[0], tmp_path / f"q-00001-of-{len(parts):05d}.gguf")
    assert [path.read_bytes() for path in sorted(tmp_path.glob("q-*"))] == [path.read_bytes() for path in parts]
    assert not list(tmp_path.glob("joined-*"))
