"""GGUF models in parts: as llama.cpp's gguf-split writes them, imported and given back, merged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
from natives import gguf_parts

import aprfmt
from aprfmt.errors import ExistsError, RefusedError
from aprfmt.formats.gguf_fields import GgufType


def parts(folder: Path, stem: str = "out") -> list[Path]:
    return sorted(folder.glob(f"{stem}-?????-of-?????.gguf"))


def split(source: Path, target: Path, size: int = 60_000, **options: Any) -> dict[str, Any]:
    return aprfmt.export_model(source, target, shard_size=size, **options).to_json()


def rewrite(source: Path, writer: gguf.GGUFWriter) -> None:
    """`source` written again by the gguf package."""
    reader = gguf.GGUFReader(source)
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            sub_type = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=sub_type)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def peer_split(source: Path, folder: Path, stem: str = "peer") -> list[Path]:
    """The same in parts of seven tensors."""
    rewrite(source, gguf.GGUFWriter(folder / f"{stem}.gguf", "llama", split_max_tensors=7))
    return parts(folder, stem)


def test_the_keys_of_a_split(tiny_gguf: Path, tmp_path: Path) -> None:
    report = split(tiny_gguf, tmp_path / "out.gguf")
    paths = parts(tmp_path)
    count = len(paths)
    assert count == 4
    assert sorted(tmp_path.iterdir()) == paths
    assert report["files"] == [str(path) for path in paths]
    assert report["output"] == str(paths[0])
    assert report["output_bytes"] == sum(path.stat().st_size for path in paths)
    for no, path in enumerate(paths):
        assert path.name == f"out-{no + 1:05d}-of-{count:05d}.gguf"
        assert path.stat().st_size <= 60_000
        fields = gguf.GGUFReader(path).fields
        own = {name: field for name, field in fields.items() if not name.startswith("GGUF.")}
        wanted = {"split.no": ("UINT16", no), "split.count": ("UINT16", count)}
        wanted["split.tensors.count"] = ("INT32", 20)
        for name, (kind, value) in wanted.items():
            assert own[name].types == [gguf.GGUFValueType[kind]]
            assert own[name].contents() == value
        assert (len(own) > 3) is (no == 0)
    with aprfmt.open(tiny_gguf) as one, aprfmt.open(paths[2]) as model:
        assert set(model.tensors) == set(one.tensors)
        assert all(t.raw() == one.tensors[name].raw() for name, t in model.tensors.items())
        assert dict(one.metadata).items() <= dict(model.metadata).items()


@pytest.mark.parametrize(("size", "count"), [(1, 20), (120_000, 2), (10_000_000, 0)])
def test_sizes(tiny_gguf: Path, tmp_path: Path, size: int, count: int) -> None:
    split(tiny_gguf, tmp_path / "out.gguf", size)
    assert len(parts(tmp_path)) == count
    assert (tmp_path / "out.gguf").exists() is (count == 0)
    if count:
        assert size == 1 or max(path.stat().st_size for path in parts(tmp_path)) <= size


@pytest.mark.llama
def test_llama_cpp_loads_the_parts(tiny_gguf: Path, tmp_path: Path) -> None:
    report = split(tiny_gguf, tmp_path / "out.gguf", verify=True)
    whole = aprfmt.convert_model(tiny_gguf, tmp_path / "whole.gguf", verify=True).to_json()
    assert len(report["files"]) == 4
    assert report["verify"] == whole["verify"]


@pytest.mark.llama
def test_parts_that_do_not_load_never_appear(tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: str, n_tokens: int | None, name: str) -> dict[str, Any]:
        assert Path(path).exists()
        assert Path(name) == tmp_path / Path(path).name
        raise RefusedError("does not load")

    monkeypatch.setattr("aprfmt.convert.api.verify_gguf", fail)
    with pytest.raises(RefusedError, match="does not load"):
        split(tiny_gguf, tmp_path / "out.gguf", verify=True)
    assert list(tmp_path.iterdir()) == []


def test_an_imported_split_comes_back(tiny_gguf: Path, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    sources = peer_split(tiny_gguf, tmp_path / "in")
    assert len(sources) == 3
    report = aprfmt.import_model(sources[1], tmp_path / "m.apr")
    assert report.lossless
    report = aprfmt.export_model(tmp_path / "m.apr", tmp_path / "out.gguf")
    assert report.lossless
    assert report.files == [str(path) for path in parts(tmp_path)]
    assert [p.read_bytes() for p in parts(tmp_path)] == [p.read_bytes() for p in sources]


def test_a_part_name_is_taken_as_the_stem(tiny_gguf: Path, tmp_path: Path) -> None:
    sources = peer_split(tiny_gguf, tmp_path)
    aprfmt.import_model(sources[0], tmp_path / "m.apr")
    aprfmt.export_model(tmp_path / "m.apr", tmp_path / "out-00001-of-00003.gguf")
    assert [p.read_bytes() for p in parts(tmp_path)] == [p.read_bytes() for p in sources]


def test_zero_merges(tiny_gguf: Path, tmp_path: Path) -> None:
    split(tiny_gguf, tmp_path / "out.gguf")
    aprfmt.import_model(parts(tmp_path)[0], tmp_path / "m.apr")
    for source, name in ((tmp_path / "m.apr", "a.gguf"), (parts(tmp_path)[0], "b.gguf")):
        report = aprfmt.export_model(source, tmp_path / name, shard_size=0)
        assert report.files == []
        with aprfmt.open(tiny_gguf) as one, aprfmt.open(tmp_path / name) as model:
            assert dict(model.metadata) == dict(one.metadata)
            assert set(model.tensors) == set(one.tensors)
            assert all(t.raw() == one.tensors[key].raw() for key, t in model.tensors.items())


def test_an_edited_split_becomes_one_file(tiny_gguf: Path, tmp_path: Path) -> None:
    split(tiny_gguf, tmp_path / "out.gguf")
    aprfmt.import_model(parts(tmp_path)[0], tmp_path / "m.apr")
    aprfmt.stamp(tmp_path / "m.apr", in_place=True, set={"name": "other"})
    aprfmt.export_model(tmp_path / "m.apr", tmp_path / "x.gguf")
    with aprfmt.open(tmp_path / "x.gguf") as model:
        assert model.metadata["general.name"] == "other"
        assert not [key for key in model.metadata if key.startswith("split.")]
        assert len(model.tensors) == 20


def test_a_single_file_with_split_keys_comes_back(tiny_gguf: Path, tmp_path: Path) -> None:
    """gguf-split writes such a file when everything fits into one part."""
    from aprfmt.formats.gguf_write import KV, layout
    from aprfmt.formats.out_tensor import OutTensor
    from aprfmt.io.pipe import FileLayout, write_layout
    from aprfmt.io.sink import AtomicFile

    with aprfmt.open(tiny_gguf) as model:
        keys: list[KV | bytes] = [bytes(gguf_parts(model)[0].kv.raw(key)) for key in model.metadata]
        keys += [("split.no", GgufType.UINT16, 0), ("split.count", GgufType.UINT16, 1)]
        keys += [("split.tensors.count", GgufType.INT32, 20)]
        data = {t.name: t.raw() for t in model.tensors.entries}
        tensors = [
            OutTensor(t.name, t.dtype, t.shape, t.n_bytes, lambda t=t: [data[t.name]])  # type: ignore[misc]
            for t in model.tensors.entries
        ]
        with AtomicFile(tmp_path / "in.gguf") as sink:
            write_layout(FileLayout("", layout(keys, tensors)), sink)
    aprfmt.import_model(tmp_path / "in.gguf", tmp_path / "m.apr")
    assert aprfmt.export_model(tmp_path / "m.apr", tmp_path / "out.gguf").lossless
    assert (tmp_path / "out.gguf").read_bytes() == (tmp_path / "in.gguf").read_bytes()


def test_an_unusual_alignment(tiny_gguf: Path, tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_custom_alignment(256)
    rewrite(tiny_gguf, writer)
    split(tmp_path / "a.gguf", tmp_path / "out.gguf")
    with aprfmt.open(tiny_gguf) as one, aprfmt.open(parts(tmp_path)[0]) as model:
        assert [part.alignment for part in gguf_parts(model)] == [256, 32, 32, 32]
        assert all(t.raw() == one.tensors[name].raw() for name, t in model.tensors.items())
    assert all(path.stat().st_size <= 60_000 for path in parts(tmp_path))


# --- all or none ---


def test_an_existing_part_is_not_replaced(tiny_gguf: Path, tmp_path: Path) -> None:
    (tmp_path / "out-00003-of-00004.gguf").write_text("mine")
    with pytest.raises(ExistsError, match="00003"):
        split(tiny_gguf, tmp_path / "out.gguf")
    assert [p.read_text() for p in tmp_path.iterdir()] == ["mine"]
    split(tiny_gguf, tmp_path / "out.gguf", force=True)
    with aprfmt.open(parts(tmp_path)[0]) as model:
        assert len(model.tensors) == 20


def test_parts_are_not_written_over_the_input(tiny_gguf: Path, tmp_path: Path) -> None:
    split(tiny_gguf, tmp_path / "out.gguf")
    before = [path.read_bytes() for path in parts(tmp_path)]
    with pytest.raises(RefusedError, match="is the input"):
        split(parts(tmp_path)[0], tmp_path / "out.gguf", force=True)
    assert [path.read_bytes() for path in parts(tmp_path)] == before


def test_a_plan_writes_nothing(tiny_gguf: Path, tmp_path: Path) -> None:
    report = split(tiny_gguf, tmp_path / "out.gguf", plan=True)
    assert len(report["files"]) == 4
    assert list(tmp_path.iterdir()) == []


# --- older outputs ---


def test_older_outputs_of_the_name_make_way(tiny_gguf: Path, tmp_path: Path) -> None:
    old = ["out[1]-00001-of-00002.gguf", "out[1]-00002-of-00002.gguf"]
    others = ["out[2]-00001-of-00002.gguf", "out1-00001-of-00002.gguf", "out[1].apr", "notes"]
    for name in (*old, *others):
        (tmp_path / name).write_bytes(b"older")
    report = split(tiny_gguf, tmp_path / "out[1].gguf")  # without --force nothing goes
    assert not [text for text in report["warnings"] if "older" in text]
    assert {*old, *others} < {path.name for path in tmp_path.iterdir()}
    (tmp_path / "out[1].gguf").write_bytes(b"older")
    report = split(tiny_gguf, tmp_path / "out[1].gguf", force=True)
    assert f"the new parts replace 3 older files: {', '.join([*old, 'out[1].gguf'])}" in report["warnings"]
    assert {path.name for path in tmp_path.iterdir()} == {*others, *(Path(path).name for path in report["files"])}
    assert len(report["files"]) > 2


def test_a_part_of_the_input_never_makes_way(tiny_gguf: Path, tmp_path: Path) -> None:
    split(tiny_gguf, tmp_path / "out.gguf")
    before = {path: path.read_bytes() for path in parts(tmp_path)}
    with pytest.raises(RefusedError, match="the input is one of the older parts"):
        split(parts(tmp_path)[0], tmp_path / "out.gguf", 20_000, force=True)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
