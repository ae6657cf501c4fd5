from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from natives import apr2_native
from turns import examples

import aprfmt
from aprfmt import RawTensor, load_file, save_file
from aprfmt.codecs.dtypes import DTYPES
from aprfmt.errors import ChecksumError, ExistsError, LimitError, RefusedError, UsageError
from aprfmt.formats import apr2, apr2_write, apr_metadata
from aprfmt.formats.out_tensor import OutTensor

Write = Callable[..., Path]
VECTORS = Path(__file__).resolve().parents[3] / "fixtures" / "vectors"


def test_arrays_come_back(tmp_path: Path) -> None:
    arrays: dict[str, Any] = {
        dtype: np.arange(6).reshape(2, 3).astype(dtype)
        for dtype in ("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "?")
    }
    arrays |= {"scalar": np.float32(3.5), "empty": np.zeros((3, 0), "f4"),
    "strided": np.arange(12.0).reshape(3, 4).T,
               "big": np.arange(3, dtype=">i4")}  # fmt: skip
    path = tmp_path / "a.apr"
    save_file(arrays, path)
    for name, got in load_file(path).items():
        want = np.asarray(arrays[name])
        assert got.shape == want.shape, name
        assert got.dtype == want.dtype.newbyteorder("<") or want.dtype == bool, name
        assert np.array_equal(got, want), name
    with aprfmt.open(path) as model:
        assert (model.tensors["?"].dtype, model.tensors["u2"].dtype, model.tensors["u1"].dtype) == ("BOOL", "U16", "U8")
        assert set(model.metadata["aprfmt.tensors"]) == {"?", "i2", "u2", "u4", "u8"}


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_keeps_bytes_dtype_and_shape(dtype: str, tmp_path: Path) -> None:
    row = DTYPES[dtype]
    shape = (2, 3, 256)
    data = bytes(i * 7 & 255 for i in range(row.n_bytes(shape)))
    path = tmp_path / "t.apr"
    save_file({"t": RawTensor(dtype, shape, data), "u": RawTensor("U8", (3,), b"abc")}, path, {"model_type": "m"})
    with apr2.open_model(path) as model:
        tensor = model.tensors["t"]
        assert (tensor.dtype, tensor.shape, bytes(tensor.raw())) == (dtype, shape, data)
        assert model.warnings == []
        if row.apr_id is None:
            assert apr2_native(model).metadata_bytes().endswith(b"}}}")
            assert apr2_native(model).index.stored_shapes[0] == (6, len(data) // 6)


@pytest.mark.parametrize(("shape", "stored"), [
    ((), (1, 1)), ((256,), (1, 288)), ((2, 64), (2, 72)), ((2, 3, 32), (6, 36)), ((0, 32), (0, 0)), ((2, 0),
    (2, 0)),
])  # fmt: skip
def test_stored_form_of_dtypes_without_an_id(shape: tuple[int, ...], stored: tuple[int, ...], tmp_path: Path) -> None:
    dtype = "BOOL" if not shape else "MXFP4" if shape == (0, 32) else "Q5_0" if shape[-1] == 0 else "Q4_K"
    if dtype == "Q4_K":
        dtype = "IQ4_NL" if shape != (256,) else "Q8_1"
        per_row = DTYPES[dtype].n_bytes((shape[-1],))
        stored = (stored[0], per_row)
    assert apr2_write.stored_form(dtype, shape) == (7, stored)
    path = tmp_path / "t.apr"
    save_file({"t": RawTensor(dtype, shape, bytes(DTYPES[dtype].n_bytes(shape)))}, path)
    with apr2.open_model(path) as model:
        assert (model.tensors["t"].dtype, model.tensors["t"].shape) == (dtype, shape)


def test_names_are_sorted_in_full_and_cut_to_256_bytes(tmp_path: Path) -> None:
    long = "n" * 255
    names = [long + "é2", long + "é1", "n" * 300, "a"]
    path = tmp_path / "n.apr"
    save_file([(name, RawTensor("U8", (1,), bytes([i]))) for i, name in enumerate(names)], path)
    with apr2.open_model(path) as model:
        got = [(t.name.encode("utf-8", "surrogateescape"), t.raw()[0]) for t in model.tensors.entries]
    cut = long.encode() + b"\xc3"
    assert got == [(b"a", 3), (b"n" * 256, 2), (cut, 1), (cut, 0)]


def test_ninth_dimension_is_dropped(tmp_path: Path) -> None:
    save_file({"t": RawTensor("F32", (1,) * 8 + (2,), bytes(8))}, tmp_path / "d.apr", force=True)
    with apr2.open_model(tmp_path / "d.apr") as model:
        assert model.tensors["t"].shape == (1,) * 8
    for more in (2, 0):  # the values are all there
        save_file({"t": np.arange(more, dtype="<f4").reshape((1,) * 8 + (more,))}, tmp_path / "d.apr", force=True)
        assert load_file(tmp_path / "d.apr")["t"].shape == (1,) * 8 + (more,)


def test_streaming_keeps_the_order_of_the_blobs(tmp_path: Path) -> None:
    tensors = {
        "z": RawTensor("U8", (70,), bytes(70)),
        "a": RawTensor("U8", (1,), b"a"),
        "m": RawTensor("U8", (0,), b""),
    }
    offsets = {}
    for streaming in (False, True):
        save_file(tensors, tmp_path / "s.apr", streaming=streaming, force=True)
        with apr2.open_model(tmp_path / "s.apr") as model:
            start = apr2_native(model).header.data_offset
            assert list(model.tensors) == ["a", "m", "z"]
            offsets[streaming] = {t.name: t.offset - start for t in model.tensors.values()}
    assert offsets == {False: {"a": 0, "m": 64, "z": 64}, True: {"z": 0, "a": 128, "m": 192}}


names = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
tensors = st.lists(st.tuples(names, st.binary(max_size=130)), max_size=8)


@settings(max_examples=examples(60), deadline=None)
@given(
    tensors,
    st.booleans(),
    st.integers(0, 0xFFFF).map(lambda f: f & ~0x0804),
    st.sampled_from(list(apr_metadata.GENERATIONS)),
)
def test_what_is_written_is_read_and_written_again(
    tmp_path_factory: pytest.TempPathFactory,
    items: list[tuple[str, bytes]],
    streaming: bool,
    flags: int,
    generation: str,
) -> None:
    folder = tmp_path_factory.mktemp("rt")
    path, again, moved = folder / "a.apr", folder / "b.apr", folder / "c.apr"
    pairs = [(name, RawTensor("U8", (len(data),), data)) for name, data in items]
    save_file(pairs, path, {"model_type": "m", "x": [1, 2.5]}, flags, streaming, generation=generation)
    with apr2.open_model(path) as model:
        assert apr2_native(model).header.flags == flags | 0x0400
        assert model.checksum() == {"header": "ok", "footer": "ok"}
        want = sorted(items, key=lambda item: item[0].encode())
        assert [(t.name, bytes(t.raw())) for t in model.tensors.entries] == want
        apr2_write.rewrite(model, again)
        apr2_write.rewrite(model, moved, metadata=apr2_native(model).metadata_bytes() + b" ")
    assert again.read_bytes() == path.read_bytes()
    with apr2.open_model(moved) as model:
        assert [(t.name, bytes(t.raw())) for t in model.tensors.entries] == want
        apr2_write.rewrite(model, again, metadata=apr2_native(model).metadata_bytes()[:-1], force=True)
    assert again.read_bytes() == path.read_bytes()


@pytest.mark.parametrize("path", sorted((VECTORS / "golden").glob("v2_*.apr")), ids=lambda p: p.stem)
def test_laying_out_anew_keeps_ids_order_flags_and_version(path: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.apr"
    with apr2.open_model(path) as model:
        metadata = apr_metadata.dump({**model.metadata, "added": 1})
        apr2_write.rewrite(model, out, metadata=metadata, accept_damage=path.stem == "v2_bad_footer")
        with apr2.open_model(out) as other:
            assert other.metadata["added"] == 1
            assert apr2_native(other).index.dtype_ids == apr2_native(model).index.dtype_ids
            assert apr2_native(other).header.version == apr2_native(model).header.version
            assert apr2_native(other).header.flags == apr2_native(model).header.flags | 0x0400
            assert apr2_native(other).index.blob_order() == apr2_native(model).index.blob_order()
            for a, b in zip(model.tensors.entries, other.tensors.entries, strict=True):
                assert (a.name, a.dtype, a.shape, a.raw()) == (b.name, b.dtype, b.shape, b.raw())


def test_legacy_images_come_out_current(write_image: Write, tmp_path: Path) -> None:
    from aprfmt.io.source import Source

    entries = [(b"b", 2, (1,), 0, 2), (b"q", 8, (1,), 64, 18)]
    path = write_image(entries=entries, blobs=bytes(128), magic=b"APR2", flags=1)
    out = tmp_path / "out.apr"
    with Source.open(path) as source:
        model = apr2.open_source(source, path, format="apr-legacy", label="APR2")
        apr2_write.rewrite(model, out)
    with apr2.open_model(out) as model:
        assert (apr2_native(model).index.dtype_ids, apr2_native(model).header.flags) == ([30, 128], 0x0400)


def test_an_absent_footer_and_padding_are_supplied(write_image: Write, tmp_path: Path) -> None:
    path = write_image(entries=[(b"t", 0, (1,), 0, 4)], blobs=bytes(64))
    whole = path.read_bytes()
    path.write_bytes(whole[:-40])
    with apr2.open_model(path) as model:
        with pytest.raises(ChecksumError, match="truncated"):
            apr2_write.rewrite(model, tmp_path / "out.apr")
        assert not (tmp_path / "out.apr").exists()
        apr2_write.rewrite(model, tmp_path / "out.apr", accept_damage=True)
    assert (tmp_path / "out.apr").read_bytes() == whole


def test_nothing_is_overwritten_unasked(tmp_path: Path) -> None:
    path = tmp_path / "a.apr"
    save_file({}, path)
    with pytest.raises(ExistsError):
        save_file({}, path)
    with pytest.raises(ExistsError):
        save_file({}, path, streaming=True)
    with apr2.open_model(path) as model, pytest.raises(RefusedError):
        apr2_write.rewrite(model, path, force=True)
    save_file({}, path, {"name": "new"}, force=True)
    with apr2.open_model(path) as model:
        assert model.metadata["name"] == "new"
        model.native = None
        with pytest.raises(UsageError):
            apr2_write.layout_from_model(model)


@pytest.mark.parametrize("tensor", [
    RawTensor("F32", (2,), bytes(4)), RawTensor("Q4_1", (31,), bytes(20)), RawTensor("Q99", (1,), b""),
    RawTensor("F32", (-1,), b""), RawTensor("F32", (1.0,), bytes(4)), RawTensor("Q4_K", (2, 300), bytes(144)),  # type: ignore[arg-type]
    RawTensor("F32", (1 << 64, 0), b""), RawTensor("Q4_K", (), bytes(144)), np.zeros((1,) * 9, "<i2"),
    np.array(["a"]), np.array([1j]), np.array([None]),
])  # fmt: skip
def test_tensors_the_container_cannot_hold(tensor: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        save_file({"t": tensor}, tmp_path / "t.apr")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["m.gguf", "m.safetensors", "m.GGUF", "m.bin", "m.npz"])
def test_a_suffix_of_another_format_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"writes \.apr files"):
        save_file({}, tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_other_suffixes_are_the_users_choice(tmp_path: Path) -> None:
    for name in ("m", "m.apr", "model-v1.5", "m.tmp"):
        save_file({}, tmp_path / name)


@pytest.mark.parametrize(
    "arguments",
    [
        {"tensors": 5}, {"tensors": ["a"]}, {"tensors": {5: np.zeros(1)}}, {"tensors": {"a": [[1], [2, 3]]}},
        {"metadata": [1]}, {"flags": "1"}, {"path": 5}, {"generation": "Old"},
    ],
)  # fmt: skip
def test_wrong_values_are_usage_errors(arguments: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        save_file(**{"tensors": {}, "path": tmp_path / "t.apr", "metadata": {"x": 1}, **arguments})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("flags", [0x0800, 1 << 16, -1])
def test_flags_no_reader_accepts(flags: int, tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        save_file({}, tmp_path / "t.apr", flags=flags)


def test_bad_names(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        save_file({"\ud800": RawTensor("U8", (0,), b"")}, tmp_path / "t.apr")
    with pytest.raises(RefusedError):
        save_file({"n" * 255 + "é": RawTensor("BOOL", (1,), b"\1")}, tmp_path / "t.apr")


def test_row_padded_k_quants(tmp_path: Path) -> None:
    for size in (4 * 144, 3 * 144):  # each row padded, or only the end
        save_file({"t": RawTensor("Q4K", (2, 300), bytes(size))}, tmp_path / "t.apr", force=True)
        with apr2.open_model(tmp_path / "t.apr") as model:
            assert model.tensors["t"].n_bytes == size
            assert model.tensors["t"].numpy().shape == (2, 300)


def test_dims_beyond_any_array(tmp_path: Path) -> None:
    for dims in ((0, 1 << 63), (1 << 40, 1 << 40, 0)):
        save_file({"t": RawTensor("F32", dims, b"")}, tmp_path / "t.apr", force=True)
        with apr2.open_model(tmp_path / "t.apr") as model:
            for decode in (model.tensors["t"].numpy, model.tensors["t"].torch):
                with pytest.raises(LimitError):
                    decode()


def test_limits_of_a_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apr2_write, "MAX_METADATA_BYTES", 1)
    with pytest.raises(LimitError):
        apr2_write.layout(b"{}", [])


def test_layout_gives_sizes_before_bytes() -> None:
    def never() -> list[bytes]:
        raise AssertionError("asked for bytes while planning")

    segments = apr2_write.layout(b"{}", [OutTensor("t", "F16", (100,), 200, never)])
    assert sum(segment.n_bytes for segment in segments) == 64 + 64 + 64 + 256
    assert json.loads(bytes(segments[0].data)[64:66]) == {}  # type: ignore[union-attr]
    assert struct.unpack_from("<I", segments[0].data, 8) == (1,)  # type: ignore[union-attr]
