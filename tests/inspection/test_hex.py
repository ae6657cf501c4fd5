"""Every byte is shown where it lies, with its meaning; damaged files as far as they go; no more is read than shown."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from demo_model import build
from gguf_images import peer_tensors, write_peer
from plain_models import write_folder

import aprfmt
from aprfmt import RawTensor
from aprfmt.errors import AprError, UsageError
from aprfmt.inspection.hex.run import FileDump
from aprfmt.inspection.hex.spans import Span
from aprfmt.io.source import Source

ROOT = Path(__file__).resolve().parents[2]
VECTORS = sorted((ROOT / "fixtures" / "vectors").glob("*/*.*"))


def spans_of(file: FileDump) -> list[Span]:
    return [span for section in file.sections for entry in section.entries for span in entry]


def one(path: Path, **options: Any) -> FileDump:
    (file,) = aprfmt.hex(path, **options).files
    return file


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hex") / "tiny.gguf"
    build(path)
    return path


@pytest.fixture(scope="module")
def forms(tiny: Path) -> dict[str, Path]:
    """The same model in every container that is taken apart."""
    folder = tiny.parent
    aprfmt.import_model(tiny, folder / "m.apr")
    aprfmt.export_model(tiny, folder / "m.safetensors")
    aprfmt.write_v1(folder / "v1.apr", b"x" * 500, model_type=1, metadata={"model_name": "m", "custom": {"a": [1]}})
    return {"gguf": tiny, "apr": folder / "m.apr", "safetensors": folder / "m.safetensors", "v1": folder / "v1.apr"}


@pytest.mark.parametrize("name", ["gguf", "apr", "safetensors", "v1"])
def test_spans_cover_the_file_and_show_its_bytes(forms: dict[str, Path], name: str) -> None:
    data = forms[name].read_bytes()
    file = one(forms[name], limit=0)
    assert file.damage == []
    end = 0
    for span in spans_of(file):
        between = data[end : span.offset]
        assert span.offset >= end
        # What no span shows is punctuation of JSON, zeros of the alignment and the header of a MessagePack map.
        assert not between.strip(b"\0{}, ") or name == "v1", between
        assert span.data == data[span.offset : span.offset + min(span.n_bytes, 64)]
        end = span.offset + span.n_bytes
    assert end == len(data)
    assert json.loads(json.dumps(file.to_json()))["size_bytes"] == len(data)


def test_keys_and_tensors_are_those_of_the_model(forms: dict[str, Path]) -> None:
    for name, path in forms.items():
        if name == "v1":
            continue
        sections = {section.name: section for section in one(path, limit=0).sections}
        with aprfmt.open(path) as model:
            index = [entry for entry in sections["index"].entries if entry[0].value != '"__metadata__"']
            if name != "safetensors":
                stored = [entry[0].value for entry in sections["metadata"].entries]
                keys = [key if name == "gguf" else json.dumps(key) for key in model.metadata]
                assert sorted(map(str, stored)) == sorted(keys) or name == "apr"
                fields = [{span.name: span for span in entry} for entry in index]
                places = {str(row["name"].value): row["offset"].meaning for row in fields}
                for t in model.tensors.values():
                    assert places[t.name] == f"in the data: byte {t.offset:,} of the file"
            else:
                meanings = {json.loads(data_of(path, entry[0])): entry[1].meaning for entry in index}
                for t in model.tensors.values():
                    assert meanings[t.name] == f"bytes {t.offset:,} to {t.offset + t.n_bytes:,} of the file"


def data_of(path: Path, span: Span) -> str:
    return path.read_bytes()[span.offset : span.offset + span.n_bytes].decode().rstrip(": ")


def test_limit_and_offset_choose_entries(tiny: Path) -> None:
    sections = {section.name: section for section in one(tiny, limit=2).sections}
    assert [len(sections[name].entries) for name in ("metadata", "index")] == [2, 2]
    assert (sections["metadata"].count, sections["index"].count) == (27, 20)
    at = sections["index"].entries[1][0].offset
    later = {section.name: section for section in one(tiny, limit=1, offset=at).sections}
    assert later["metadata"].entries == []
    assert later["index"].entries[0][0].offset == at
    assert later["metadata"].count == 27


@pytest.mark.parametrize("name", ["gguf", "apr", "safetensors", "v1"])
def test_a_file_cut_anywhere_is_shown_as_far_as_it_goes(forms: dict[str, Path], name: str, tmp_path: Path) -> None:
    data = forms[name].read_bytes()
    whole = spans_of(one(forms[name], limit=0))
    header_end = whole[-1].offset if name != "v1" else len(data)
    path = tmp_path / "cut"
    for n in [*range(1, 80), *random.Random(1).sample(range(80, header_end), 60)]:
        path.write_bytes(data[:n])
        for file in aprfmt.hex(path, limit=0).files:
            for span in spans_of(file):
                assert span.offset <= n
                assert span.data == data[span.offset : min(n, span.offset + min(span.n_bytes, 64))]
            if file.format is not None:
                assert file.damage, n
                assert all(error.path == str(path) for error in file.damage)


@pytest.mark.parametrize("name", ["gguf", "apr", "safetensors", "v1"])
def test_bytes_changed_anywhere_raise_nothing_but_an_error_that_says_so(
    forms: dict[str, Path], name: str, tmp_path: Path
) -> None:
    data, rng = forms[name].read_bytes()[:20_000], random.Random(2)
    path = tmp_path / "odd"
    for _ in range(300):
        odd = bytearray(data)
        for _ in range(rng.randrange(1, 4)):
            at = rng.randrange(min(len(odd), 400)) if rng.random() < 0.7 else rng.randrange(len(odd))
            odd[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        path.write_bytes(odd)
        file = one(path, limit=0)
        assert all(isinstance(error, AprError) for error in file.damage)
        json.dumps(file.to_json())


@pytest.mark.parametrize("path", VECTORS, ids=lambda path: path.name)
def test_golden_and_malformed_files(path: Path) -> None:
    whole = aprfmt.hex(path, limit=0)
    json.dumps(whole.to_json())
    try:
        with aprfmt.open(path) as model:
            tensors = list(model.tensors.values())
    except AprError:
        return
    assert whole.damage is None, "a file that can be opened has none"
    for tensor in tensors[:20]:
        found = aprfmt.hex(path, tensor=tensor.name, limit=0).tensor
        assert found is not None
        assert found.n_bytes == tensor.n_bytes


def test_deep_json_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "deep.safetensors"
    text = b'{"a":' + b"[" * 100_000
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    (error,) = one(path).damage
    assert error.code == "corrupt"


# --- tensors ---


def test_values_of_every_dtype_are_the_tensors(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_peer(path, [("general.name", gguf.GGUFValueType.STRING, "x")], peer_tensors())
    data = path.read_bytes()
    with aprfmt.open(path) as model:
        expected = {t.name: (t, t.numpy().ravel()) for t in model.tensors.values()}
    for name, (tensor, values) in expected.items():
        found = aprfmt.hex(path, tensor=name, limit=0, width=24).tensor
        assert found is not None
        assert (found.dtype, found.shape, found.offset) == (tensor.dtype, tensor.shape, tensor.offset)
        assert b"".join(block.data for block in found.blocks) == data[found.offset : found.offset + found.n_bytes]
        assert all(data[block.offset :].startswith(block.data) for block in found.blocks)
        shown = [value for block in found.blocks for value in block.values or ()]
        assert np.array_equal(np.array(shown, values.dtype), values, equal_nan=True)
        assert [block.first for block in found.blocks] == [
            sum(len(b.values or ()) for b in found.blocks[:i]) for i in range(len(found.blocks))
        ]


@pytest.mark.parametrize("name", ["v2_all_dtypes.apr", "v2_aprq4.apr", "v2_aprq8.apr"])
def test_dtypes_of_the_apr_format(name: str) -> None:
    path = ROOT / "fixtures" / "vectors" / "golden" / name
    with aprfmt.open(path) as model:
        expected = {t.name: t.numpy().ravel() for t in model.tensors.values()}
    for tensor, values in expected.items():
        found = aprfmt.hex(path, tensor=tensor, limit=0).tensor
        assert found is not None
        shown = [value for block in found.blocks for value in block.values or ()]
        is_float = values.dtype.kind == "f"
        assert np.array_equal(np.array(shown, values.dtype), values, equal_nan=is_float)


def test_rows_filled_up_to_whole_blocks(tmp_path: Path) -> None:
    """Rows of 300 values in blocks of 256: the second block of each holds 44."""
    values = np.random.default_rng(0).normal(size=(3, 512)).astype("f4")
    stored = bytes(aprfmt.encode("Q4_K", values.ravel()))
    path = tmp_path / "m.apr"
    aprfmt.save_file({"w": RawTensor("Q4_K", (3, 300), stored)}, path, metadata={"model_type": "x"})
    found = aprfmt.hex(path, tensor="w", limit=0).tensor
    assert found is not None
    assert [(block.first, len(block.values or ())) for block in found.blocks] == [
        (0, 256), (256, 44), (300, 256), (556, 44), (600, 256), (856, 44),
    ]  # fmt: skip
    with aprfmt.open(path) as model:
        expected = model.tensors["w"].numpy().ravel()
    assert np.array_equal(np.array([v for b in found.blocks for v in b.values or ()], "f4"), expected)


def test_offset_in_a_tensor_begins_with_its_block(tiny: Path) -> None:
    whole = aprfmt.hex(tiny, tensor="token_embd.weight", limit=0).tensor
    some = aprfmt.hex(tiny, tensor="token_embd.weight", offset=100, limit=3).tensor
    assert whole is not None
    assert some is not None
    assert list(some.blocks) == list(whole.blocks[6:9])
    with pytest.raises(UsageError, match="past the end"):
        aprfmt.hex(tiny, tensor="token_embd.weight", offset=whole.n_bytes)


def test_raw_bytes(tiny: Path, tmp_path: Path) -> None:
    data = tiny.read_bytes()
    file = one(tiny, raw=True, offset=5, limit=3, width=7)
    assert file.lines == [(5, data[5:12]), (12, data[12:19]), (19, data[19:26])]
    (tensor,) = aprfmt.hex(tiny, raw=True, tensor="output_norm.weight", limit=0).files
    with aprfmt.open(tiny) as model:
        assert b"".join(line for _, line in tensor.lines) == bytes(model.tensors["output_norm.weight"].raw())
    odd = tmp_path / "notes.txt"
    odd.write_bytes(b"hello")
    assert one(odd).lines == [(0, b"hello")]
    (tmp_path / "empty").write_bytes(b"")
    assert one(tmp_path / "empty").lines == []


def test_no_more_is_read_than_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "large.apr"
    aprfmt.save_file({"w": np.zeros(4_000_000, "f4")}, path, metadata={"model_type": "x"})
    n_bytes = 0
    read, read_into = Source.read, Source.read_into

    def count(self: Source, offset: int, n: int) -> bytes:
        nonlocal n_bytes
        n_bytes += n
        return read(self, offset, n)

    def count_into(self: Source, offset: int, buffer: memoryview) -> None:
        nonlocal n_bytes
        n_bytes += len(buffer)
        read_into(self, offset, buffer)

    monkeypatch.setattr(Source, "read", count)
    monkeypatch.setattr(Source, "read_into", count_into)
    aprfmt.hex(path)
    aprfmt.hex(path, tensor="w", offset=8_000_000, limit=4)
    aprfmt.hex(path, raw=True, offset=1000, limit=2)
    assert n_bytes < 8_000


def test_every_file_of_a_model_is_named(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "hf")
    aprfmt.convert_model(folder, tmp_path / "p.gguf", shard_size=200_000)
    parts = sorted(tmp_path.glob("p-*.gguf"))
    assert len(parts) > 1
    assert [file.file for file in aprfmt.hex(parts[1]).files] == [str(parts[1])]
    aprfmt.convert_model(folder, tmp_path / "shards", format="hf", shard_size=200_000)
    files = aprfmt.hex(tmp_path / "shards").files
    assert len(files) > 1
    assert {file.format for file in files} == {"SafeTensors"}
    with aprfmt.open(parts[0]) as model:
        last = model.tensors.entries[-1]
        found = aprfmt.hex(parts[0], tensor=last.name).tensor
        assert found is not None
        assert found.file == last.source.path != str(parts[0])


def test_wrong_numbers(tiny: Path) -> None:
    for options in ({"offset": -1}, {"width": 0}, {"width": 65}, {"limit": -1}, {"tensor": "nothing"}):
        with pytest.raises(UsageError):
            aprfmt.hex(tiny, **options)
    with pytest.raises(UsageError):
        aprfmt.hex(tiny, raw=True, offset=tiny.stat().st_size + 1)
