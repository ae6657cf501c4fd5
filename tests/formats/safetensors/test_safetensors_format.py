"""safetensors: the library as peer in both directions, and hostile headers."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from natives import native
from turns import examples

import aprfmt
from aprfmt.codecs.dtypes import DTYPES
from aprfmt.errors import AprError, CorruptError, LimitError, TruncatedError, UnsupportedError, UsageError
from aprfmt.formats import safetensors as ours
from aprfmt.formats.out_tensor import OutTensor
from aprfmt.io.pipe import FileLayout, write_layout
from aprfmt.io.sink import AtomicFile
from aprfmt.limits import MAX_NAME_BYTES, MAX_NDIM
from aprfmt.model import Model

Put = Callable[[bytes], Path]

TORCH = {
    row.safetensors: getattr(torch, row.torch)
    for row in DTYPES.values()
    if row.safetensors is not None and row.torch is not None
}


@pytest.fixture
def put(tmp_path: Path) -> Put:
    """Writes bytes to a file and gives its path."""

    def write(data: bytes) -> Path:
        path = tmp_path / "x.safetensors"
        path.write_bytes(data)
        return path

    return write


def samples() -> dict[str, torch.Tensor]:
    """A tensor of every dtype, a scalar, an empty one and one of a name that JSON escapes."""
    found = {f"w.{name}": torch.ones(3, 5).to(dtype) for name, dtype in TORCH.items()}
    found["scalar"] = torch.tensor(1.5)
    found["empty"] = torch.zeros(0, 7)
    found['é "\\\n世界'] = torch.arange(4, dtype=torch.int8)
    return found


def raw_bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()) if tensor.numel() else b""


def out_tensors(model: Model) -> list[OutTensor]:
    return [
        OutTensor(t.name, t.dtype, t.shape, t.n_bytes, lambda t=t: [t.raw()])  # type: ignore[misc]
        for t in model.tensors.entries
    ]


def write(path: Path, tensors: list[OutTensor], metadata: dict[str, str] | None = None) -> bytes:
    with AtomicFile(path) as sink:
        write_layout(FileLayout(path.name, ours.layout(tensors, metadata)), sink)
    return path.read_bytes()


def test_dtypes_are_spelled_as_the_library_spells_them() -> None:
    from safetensors.torch import _TYPES

    assert {name: dtype for name, dtype in _TYPES.items() if name in TORCH}.items() <= TORCH.items()
    assert _TYPES.keys() - TORCH.keys() <= {"F8_E4M3FNUZ", "F8_E5M2FNUZ"}


def test_a_file_of_the_library_is_read_equal(tmp_path: Path) -> None:
    path, tensors = tmp_path / "peer.safetensors", samples()
    safetensors.torch.save_file(tensors, path, {"format": "pt", "ключ": "\u0001"})
    with aprfmt.open(path) as model:
        assert (model.format, model.label, model.version) == ("safetensors", "SafeTensors", "")
        assert set(model.tensors) == set(tensors)
        assert dict(model.metadata) == {"format": "pt", "ключ": "\u0001"}
        assert native(model, ours.SafetensorsNative).config_path is None
        for name, tensor in tensors.items():
            mine = model.tensors[name]
            assert mine.shape == tuple(tensor.shape)
            assert TORCH[mine.dtype] == tensor.dtype
            assert bytes(mine.raw()) == raw_bytes(tensor)
        offsets = [t.offset for t in model.tensors.values()]
        assert offsets == sorted(offsets)


def test_our_bytes_are_those_of_the_library(tmp_path: Path) -> None:
    path = tmp_path / "peer.safetensors"
    safetensors.torch.save_file(samples(), path, {"format": "pt"})
    with aprfmt.open(path) as model:
        assert write(tmp_path / "ours.safetensors", out_tensors(model), {"format": "pt"}) == path.read_bytes()


def test_the_library_reads_our_file_equal(tmp_path: Path) -> None:
    tensors = samples()
    mine = []
    for name, tensor in reversed(tensors.items()):
        dtype = next(key for key, value in TORCH.items() if value == tensor.dtype)
        raw = raw_bytes(tensor)
        mine.append(OutTensor(name, dtype, tuple(tensor.shape), len(raw), lambda raw=raw: [raw]))  # type: ignore[misc]
    path = tmp_path / "ours.safetensors"
    data = write(path, mine, {"a": "é"})
    assert int.from_bytes(data[:8], "little") % 8 == 0
    theirs = safetensors.torch.load_file(path)
    assert set(theirs) == set(tensors)
    assert all(raw_bytes(theirs[name]) == raw_bytes(tensor) for name, tensor in tensors.items())
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata() == {"a": "é"}
    with aprfmt.open(path) as model:
        assert native(model, ours.SafetensorsNative).config_path is None
        assert [t.n_bytes for t in model.tensors.values() if t.n_bytes] == [t.n_bytes for t in mine if t.n_bytes]


def test_no_metadata_is_no_key(tmp_path: Path) -> None:
    assert write(tmp_path / "a", []) == struct.pack("<Q", 8) + b"{}      "
    assert b'"__metadata__":{}' in write(tmp_path / "b", [], {})


def entry(dtype: Any = "F32", shape: Any = (2,), span: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": span}


def image(header: Any, data: bytes = b"", *, length: int | None = None) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


_ONE = b'"t":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'
TWICE = b"{" + _ONE + b"," + _ONE + b"}"
DEEP = b'{"t":' + b"[" * 200_000 + b"]" * 200_000 + b"}"
EIGHT = bytes(8)
NAME = "n" * (MAX_NAME_BYTES + 1)

HOSTILE: dict[str, tuple[bytes, type[AprError]]] = {
    "not an object": (image(b"{]"), CorruptError),
    "garbage": (image(b"{" + b"\xff" * 7), CorruptError),
    "bytes behind the object": (image(b"{} {}"), CorruptError),
    "not UTF-8": (image(b'{"\xff":1}'), CorruptError),
    "name twice": (image(TWICE, b"\0"), CorruptError),
    "deep": (image(DEEP), CorruptError),
    "huge number": (image(b'{"t":' + b"9" * 10_000 + b"}"), CorruptError),
    "lone surrogate": (image(rb'{"\ud800":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'), CorruptError),
    "metadata of numbers": (image({"__metadata__": {"a": 1}}), CorruptError),
    "metadata list": (image({"__metadata__": ["a"]}), CorruptError),
    "entry list": (image({"t": []}), CorruptError),
    "no dtype": (image({"t": {"shape": [2], "data_offsets": [0, 8]}}, EIGHT), CorruptError),
    "dtype number": (image({"t": entry(7)}, EIGHT), CorruptError),
    "unknown dtype": (image({"t": entry("F6_E2M3")}, EIGHT), UnsupportedError),
    "shape missing": (image({"t": {"dtype": "F32", "data_offsets": [0, 8]}}, EIGHT), CorruptError),
    "shape negative": (image({"t": entry(shape=[-2])}, EIGHT), CorruptError),
    "shape float": (image({"t": entry(shape=[2.0])}, EIGHT), CorruptError),
    "shape bool": (image({"t": entry(shape=[True, 2])}, EIGHT), CorruptError),
    "shape text": (image({"t": entry(shape="2")}, EIGHT), CorruptError),
    "dims": (image({"t": entry(shape=[1] * MAX_NDIM + [2])}, EIGHT), LimitError),
    "overflow": (image({"t": entry(shape=[1 << 40, 1 << 40])}, EIGHT), LimitError),
    "overflow over u64": (image({"t": entry(shape=[1 << 64])}, EIGHT), CorruptError),
    "name cap": (image({NAME: entry()}, EIGHT), LimitError),
    "one offset": (image({"t": entry(span=[0])}, EIGHT), CorruptError),
    "three offsets": (image({"t": entry(span=[0, 8, 8])}, EIGHT), CorruptError),
    "reversed offsets": (image({"t": entry(span=[8, 0])}, EIGHT), CorruptError),
    "size": (image({"t": entry(span=[0, 4])}, EIGHT), CorruptError),
    "gap": (image({"t": entry(span=[4, 12])}, bytes(12)), CorruptError),
    "overlap": (image({"t": entry(), "u": entry(span=[4, 12])}, bytes(12)), CorruptError),
    "same place": (image({"t": entry(), "u": entry()}, EIGHT), CorruptError),
    "trailing": (image({"t": entry()}, bytes(9)), CorruptError),
    "short": (image({"t": entry()}, bytes(7)), TruncatedError),
    "huge offsets": (image({"t": entry("U8", [1 << 62], [0, 1 << 62])}, EIGHT), TruncatedError),
}


STRICTER = {"name twice", "dims", "name cap"}
"""What the library lets pass."""


@pytest.mark.parametrize("name", HOSTILE)
def test_refused(put: Put, name: str) -> None:
    data, kind = HOSTILE[name]
    path = put(data)
    with pytest.raises(kind) as caught:
        aprfmt.open(path)
    assert type(caught.value) is kind
    assert caught.value.exit_code == 4
    if name not in STRICTER:
        with pytest.raises(safetensors.SafetensorError):
            safetensors.numpy.load(data)


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"\0" * 7, TruncatedError),
        (struct.pack("<Q", ours.MAX_LIBRARY_HEADER_BYTES + 1) + b"{}", LimitError),
        (struct.pack("<Q", (1 << 64) - 1) + b"{}", LimitError),
        (struct.pack("<Q", 100) + b"{}", TruncatedError),
        (struct.pack("<Q", 0), CorruptError),
        (struct.pack("<Q", 3) + b" {}", CorruptError),
    ],
)
def test_header_lengths(put: Put, data: bytes, kind: type[AprError]) -> None:
    path = put(data)
    with pytest.raises(kind):
        ours.open_model(path)
    with pytest.raises(AprError) as caught:  # detection stands before the reader
        aprfmt.open(path)
    assert caught.value.exit_code == 4


def test_unknown_fields_and_null_metadata_are_read_as_by_the_library(put: Put) -> None:
    data = image({"__metadata__": None, "t": {**entry(), "more": [1]}}, EIGHT)
    assert set(safetensors.numpy.load(data)) == {"t"}
    with aprfmt.open(put(data)) as model:
        assert dict(model.metadata) == {}
        assert model.tensors["t"].shape == (2,)


def test_every_cut_is_refused(put: Put) -> None:
    data = image({"t": entry(), "u": entry("U8", [3], [8, 11])}, bytes(11))
    aprfmt.open(put(data)).close()
    for size in range(len(data)):
        with pytest.raises(AprError) as caught:
            aprfmt.open(put(data[:size]))
        assert caught.value.exit_code in (3, 4)


@settings(max_examples=examples(300), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_what_we_accept_the_library_accepts(put: Put, data: st.DataObject) -> None:
    good = image({"t": entry(), "u": entry("U8", [3], [8, 11]), "v": entry("I8", [0, 4], [11, 11])}, bytes(11))
    bad = bytearray(good)
    for position in data.draw(st.lists(st.integers(8, len(good) - 12), min_size=0, max_size=4)):
        bad[position] = data.draw(st.sampled_from(list(b'0123459"\\{}[]:, tuIF\x00\xff')))
    try:
        with aprfmt.open(put(bytes(bad))) as model:
            found = {name: (tensor.shape, bytes(tensor.raw())) for name, tensor in model.tensors.items()}
    except AprError as error:
        if error.exit_code not in (3, 4):
            raise
    else:
        theirs = safetensors.numpy.load(bytes(bad))
        assert found == {name: (array.shape, array.tobytes()) for name, array in theirs.items()}


def out(name: str = "t", dtype: str = "F32", n_bytes: int = 8) -> OutTensor:
    return OutTensor(name, dtype, (2,), n_bytes, lambda: [bytes(n_bytes)])


@pytest.mark.parametrize(
    ("tensors", "metadata", "kind"),
    [
        ([out(), out()], None, UsageError),
        ([out("__metadata__")], None, UsageError),
        ([out("\ud800")], None, UsageError),
        ([], {"a": "\ud800"}, UsageError),
        ([out(n_bytes=4)], None, UsageError),
        ([out(dtype="Q4_K")], None, UnsupportedError),
    ],
)
def test_layouts_that_would_be_broken_are_refused(
    tensors: list[OutTensor], metadata: dict[str, str] | None, kind: type[AprError]
) -> None:
    with pytest.raises(kind):
        ours.layout(tensors, metadata)


def test_the_writer_obeys_the_header_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ours, "MAX_LIBRARY_HEADER_BYTES", 32)
    ours.layout([])
    with pytest.raises(LimitError):
        ours.layout([out()])


def test_a_config_beside_the_file_is_found(put: Put, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with aprfmt.open(put(image({}))) as model:
        assert native(model, ours.SafetensorsNative).config_path == tmp_path / "config.json"


def test_reading_numbers(tmp_path: Path) -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    safetensors.numpy.save_file({"a": array}, tmp_path / "a.safetensors")
    with aprfmt.open(tmp_path / "a.safetensors") as model:
        assert np.array_equal(np.frombuffer(model.tensors["a"].raw(), "<f4").reshape(2, 3), array)


def test_a_doubled_key_among_very_many_is_found_at_once(tmp_path: Path) -> None:
    entry = '{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
    names = [f"t{i}" for i in range(300_000)] + ["t299999"]
    header = ("{" + ",".join(f'"{name}":{entry}' for name in names) + "}").encode()
    (tmp_path / "m.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(CorruptError, match="t299999"):
        aprfmt.open(tmp_path / "m.safetensors")
