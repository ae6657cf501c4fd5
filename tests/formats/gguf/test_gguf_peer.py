"""The gguf package as peer: equal constants, its files are read equal, ours are byte-equal to its."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import gguf.constants
import numpy as np
import pytest
from gguf_images import QUANTS, Field, image, peer_tensors, string, write_peer
from natives import gguf_parts

import aprfmt
from aprfmt.codecs.dtypes import DTYPES, DTYPES_BY_GGML_ID
from aprfmt.formats import gguf as ours
from aprfmt.formats.gguf_fields import FORMATS, GgufType, KvMapping
from aprfmt.formats.gguf_write import KV, ValueType, encode_kv, layout
from aprfmt.formats.out_tensor import OutTensor
from aprfmt.io.pipe import FileLayout, Literal, Segment, Stream, run_jobs

V = gguf.GGUFValueType

SCALARS: list[tuple[str, Any]] = [
    ("UINT8", 255),
    ("INT8", -128),
    ("UINT16", 65535),
    ("INT16", -32768),
    ("UINT32", 2**32 - 1),
    ("INT32", -(2**31)),
    ("FLOAT32", 0.1),
    ("BOOL", True),
    ("STRING", "héllo\n\0世界"),
    ("UINT64", 2**64 - 1),
    ("INT64", -(2**63)),
    ("FLOAT64", 1e-300),
]


def to_bytes(segments: list[Segment]) -> bytes:
    parts: list[bytes] = []
    for segment in segments:
        if isinstance(segment, Literal):
            parts.append(bytes(segment.data))
        elif isinstance(segment, Stream):
            parts += [bytes(chunk) for chunk in run_jobs(segment.chunks())]
        else:
            parts.append(bytes(segment.n_bytes))
    data = b"".join(parts)
    assert len(data) == FileLayout("x", segments).n_bytes
    return data


def out_tensors(tensors: dict[str, tuple[np.ndarray[Any, Any], str]]) -> list[OutTensor]:
    result = []
    for name, (array, dtype) in tensors.items():
        shape = array.shape
        row = DTYPES[dtype]
        if array.dtype == np.uint8 and row.block_bytes != 1:
            shape = (*shape[:-1], shape[-1] // row.block_bytes * row.block)
        raw = array.tobytes()
        result.append(OutTensor(name, dtype, shape, len(raw), lambda raw=raw: [raw]))  # type: ignore[misc]
    return result


def fields() -> list[Field]:
    """All scalar types and arrays whose element type GGUFWriter infers."""
    found: list[Field] = [(f"scalar.{name.lower()}", V[name], value) for name, value in SCALARS]
    found += [
        ("array.int", V.ARRAY, [1, -2, 3]),
        ("array.float", V.ARRAY, [0.5, -1.25]),
        ("array.bool", V.ARRAY, [True, False]),
        ("array.str", V.ARRAY, ["a", "", "ß"]),
        ("array.nested", V.ARRAY, [[1, 2], [3]]),
        ("array.deep", V.ARRAY, [[["x"], ["y", "z"]], [["w"]]]),
    ]
    return found


ARRAY_TYPES: dict[str, ValueType] = {
    "array.int": (GgufType.ARRAY, GgufType.INT32),
    "array.float": (GgufType.ARRAY, GgufType.FLOAT32),
    "array.bool": (GgufType.ARRAY, GgufType.BOOL),
    "array.str": (GgufType.ARRAY, GgufType.STRING),
    "array.nested": (GgufType.ARRAY, (GgufType.ARRAY, GgufType.INT32)),
    "array.deep": (GgufType.ARRAY, (GgufType.ARRAY, (GgufType.ARRAY, GgufType.STRING))),
}


def our_fields(alignment: int) -> list[KV]:
    found: list[KV] = [("general.architecture", GgufType.STRING, "llama")]
    for key, kind, value in fields():
        found.append((key, ARRAY_TYPES.get(key, GgufType(int(kind))), value))
    if alignment != 32:
        found.append(("general.alignment", GgufType.UINT32, alignment))
    return found


def test_value_types_are_those_of_the_package() -> None:
    assert {kind.name: int(kind) for kind in GgufType} == {kind.name: int(kind) for kind in V}
    assert set(FORMATS) == set(GgufType) - {GgufType.STRING, GgufType.ARRAY}


def test_tensor_types_are_those_of_the_package() -> None:
    mine = {row.ggml_id: (row.name, row.block, row.block_bytes) for row in DTYPES.values() if row.ggml_id is not None}
    theirs = {int(kind): (kind.name, *sizes) for kind, sizes in gguf.constants.GGML_QUANT_SIZES.items()}
    newer = {number: row for number, row in mine.items() if number > max(theirs)}
    assert mine == theirs | newer
    assert [name for name, _, _ in newer.values()] == ["Q2_0"]
    assert {kind.value for kind in gguf.GGMLQuantizationType} == set(theirs)


def test_header_constants_are_those_of_the_package() -> None:
    assert ours.DEFAULT_ALIGNMENT == gguf.constants.GGUF_DEFAULT_ALIGNMENT
    assert gguf.constants.GGUF_VERSION == 3
    assert int.from_bytes(b"GGUF", "little") == gguf.constants.GGUF_MAGIC


@pytest.mark.parametrize("alignment", [32, 64, 8])
def test_a_file_of_the_package_is_read_equal(tmp_path: Path, alignment: int) -> None:
    path, tensors = tmp_path / "peer.gguf", peer_tensors()
    write_peer(path, fields(), tensors, alignment)
    with aprfmt.open(path) as model:
        assert (model.format, model.label, model.version) == ("gguf", "GGUF v3", "3")
        assert list(model.tensors) == list(tensors)
        expected = {key: value for key, _, value in fields()}
        expected["scalar.float32"] = float(np.float32(0.1))
        found = dict(model.metadata)
        assert found.pop("general.architecture") == "llama"
        assert found.pop("general.alignment", 32) == alignment
        assert found == expected
        part = gguf_parts(model)[0]
        assert (part.alignment, part.version) == (alignment, 3)
        for theirs in gguf.GGUFReader(path).tensors if alignment > 8 else []:
            mine = model.tensors[theirs.name]
            assert mine.dtype == theirs.tensor_type.name
            assert mine.shape == tuple(reversed(theirs.shape.tolist()))
            assert (mine.offset, mine.n_bytes) == (theirs.data_offset, theirs.n_bytes)
        for name, (array, _) in tensors.items():
            assert model.tensors[name].raw() == array.tobytes(), name


@pytest.mark.parametrize("alignment", [32, 64])
def test_our_bytes_are_those_of_the_package(tmp_path: Path, alignment: int) -> None:
    path, tensors = tmp_path / "peer.gguf", peer_tensors()
    write_peer(path, fields(), tensors, alignment)
    assert to_bytes(layout(our_fields(alignment), out_tensors(tensors), alignment=alignment)) == path.read_bytes()


def test_bytes_without_tensors_are_those_of_the_package(tmp_path: Path) -> None:
    path = tmp_path / "peer.gguf"
    write_peer(path, fields(), {})
    assert to_bytes(layout(our_fields(32), [])) == path.read_bytes()


@pytest.mark.parametrize("name", [*sorted(FORMATS, key=int), GgufType.STRING])
def test_typed_arrays_are_those_of_the_package(tmp_path: Path, name: GgufType) -> None:
    value = [dict(SCALARS)[name.name]] * 3
    path = tmp_path / "peer.gguf"
    writer = gguf.GGUFWriter(path, "x")
    writer.add_key_value("k", value, V.ARRAY, sub_type=V(int(name)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert path.read_bytes().endswith(encode_kv("k", (GgufType.ARRAY, name), value))


def test_our_file_is_read_equal_by_the_package(tmp_path: Path) -> None:
    path, tensors = tmp_path / "ours.gguf", peer_tensors()
    kv: list[KV] = [*our_fields(64), ("array.empty", (GgufType.ARRAY, GgufType.STRING), [])]
    path.write_bytes(to_bytes(layout(kv, out_tensors(tensors), alignment=64)))
    reader = gguf.GGUFReader(path)
    for key, _, value in our_fields(64):
        field = reader.fields[key]
        if key not in ("scalar.float32", "array.nested", "array.deep"):  # it flattens nested arrays
            assert field.contents() == value, key
    assert [tensor.name for tensor in reader.tensors] == list(tensors)
    for tensor in reader.tensors:
        assert tensor.data.tobytes() == tensors[tensor.name][0].tobytes()


def test_version_2_is_read_and_written(tmp_path: Path) -> None:
    path = tmp_path / "v2.gguf"
    path.write_bytes(to_bytes(layout([("a", GgufType.BOOL, True)], [], version=2)))
    with aprfmt.open(path) as model:
        assert (model.label, dict(model.metadata)) == ("GGUF v2", {"a": True})
    assert gguf.GGUFReader(path).fields["a"].contents() is True


def test_metadata_is_decoded_on_access_and_counted_without(tmp_path: Path) -> None:
    path = tmp_path / "peer.gguf"
    write_peer(path, fields(), {})
    model = aprfmt.open(path)
    metadata = model.metadata
    assert isinstance(metadata, KvMapping)
    entry = metadata.entries["array.str"]
    assert (entry.type, entry.elem_type, entry.count) == (GgufType.ARRAY, GgufType.STRING, 3)
    assert metadata._values == {}
    raw = bytes(metadata.raw("array.str"))
    assert raw == encode_kv("array.str", (GgufType.ARRAY, GgufType.STRING), ["a", "", "ß"])
    assert raw == path.read_bytes()[entry.start : entry.end]
    model.close()
    assert metadata["array.str"] == ["a", "", "ß"]  # also after closing
    assert "nothing" not in metadata
    with pytest.raises(KeyError):
        metadata["nothing"]


def test_entries_cover_the_key_value_block_without_gaps(tmp_path: Path) -> None:
    path, tensors = tmp_path / "peer.gguf", peer_tensors()
    write_peer(path, fields(), tensors)
    with aprfmt.open(path) as model:
        part = gguf_parts(model)[0]
        entries = list(part.kv.entries.values())
        assert entries[0].start == 24
        assert all(a.end == b.start for a, b in pairwise(entries))
        assert entries[-1].end < min(tensor.offset for tensor in model.tensors.entries)
        copied = layout([bytes(part.kv.raw(key)) for key in part.kv.entries], out_tensors(tensors))
    assert to_bytes(copied) == path.read_bytes()


def test_bytes_that_are_no_text_survive(put: Callable[[bytes], Path]) -> None:
    raw = b"\xff\xfe ok \xed\xa0\x80"
    pair = string(b"k\xff") + (8).to_bytes(4, "little") + string(raw)
    with aprfmt.open(put(image([pair]))) as model:
        (key,) = model.metadata
        assert encode_kv(key, GgufType.STRING, model.metadata[key]) == pair


def test_every_quant_of_the_package_is_tried() -> None:
    encodable = {
        kind.name
        for kind in gguf.GGMLQuantizationType
        if kind.name in ("F32", "F16") or (kind in gguf.quants._type_traits and _encodes(kind))
    }
    assert encodable == set(QUANTS)


def _encodes(kind: gguf.GGMLQuantizationType) -> bool:
    try:
        gguf.quants.quantize(np.zeros((1, 256), dtype=np.float32), kind)
    except NotImplementedError:
        return False
    return True


def test_ggml_ids_find_their_rows() -> None:
    for row in DTYPES.values():
        if row.ggml_id is not None:
            assert DTYPES_BY_GGML_ID.get(row.ggml_id) is row
