"""`.apr` shards: what is written, every way to open them, the way back."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import aprfmt
from aprfmt.errors import ExistsError, RefusedError, UsageError
from aprfmt.formats import apr2
from aprfmt.inspection.validate import validate

MANIFEST = "model.apr.index.json"


def cut(source: Path, folder: Path, size: int = 60_000, **options: Any) -> dict[str, Any]:
    report = aprfmt.convert_model(source, folder, format="apr-shards", shard_size=size, **options)
    return report.to_json()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def manifest(folder: Path) -> dict[str, Any]:
    value = json.loads((folder / MANIFEST).read_text())
    assert isinstance(value, dict)
    return value


@pytest.mark.parametrize("fixture", ["tiny_apr", "tiny_q8"])
@pytest.mark.parametrize("size", [1, 30_000, 60_000, 100_000, 10_000_000])
def test_joined_shards_are_the_file(fixture: str, size: int, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    source: Path = request.getfixturevalue(fixture)
    report = cut(source, tmp_path / "d", size)
    assert report["lossless"] is True
    aprfmt.convert_model(tmp_path / "d", tmp_path / "one.apr")
    assert (tmp_path / "one.apr").read_bytes() == source.read_bytes()
    files = list((tmp_path / "d").glob("*.apr"))
    largest = max(path.stat().st_size for path in files)
    assert size < 60_000 or largest <= size
    assert len(files) == {1: 20, 10_000_000: 1}.get(size, len(files))
    assert report["output_bytes"] == sum(path.stat().st_size for path in files)


def test_the_manifest_is_the_references(shards: Path, tiny_apr: Path) -> None:
    text = (shards / MANIFEST).read_text()
    value = manifest(shards)
    assert text == json.dumps(value, indent=2, ensure_ascii=False)
    assert list(value) == ["version", "shard_count", "total_size", "tensor_count", "shards", "weight_map"]
    count = len(value["shards"])
    assert count == value["shard_count"] > 2
    assert names(shards) == [*(f"model-{i:05d}-of-{count:05d}.apr" for i in range(count)), MANIFEST]
    for i, row in enumerate(value["shards"]):
        assert list(row) == ["filename", "index", "size", "tensors", "sha256", "crc32"]
        data = (shards / row["filename"]).read_bytes()
        assert (row["index"], row["size"]) == (i, len(data))
        assert row["sha256"] == hashlib.sha256(data).hexdigest()
        assert row["crc32"] == int.from_bytes(data[-4:], "little")
        assert all(value["weight_map"][name] == i for name in row["tensors"])
    with aprfmt.open(tiny_apr) as model:
        assert set(value["weight_map"]) == set(model.tensors)
        assert value["tensor_count"] == len(model.tensors)
        assert value["total_size"] == sum(t.n_bytes for t in model.tensors.values())


def test_only_the_first_shard_has_all_metadata(tiny_q8: Path, tmp_path: Path) -> None:
    cut(tiny_q8, tmp_path / "d")
    paths = sorted((tmp_path / "d").glob("*.apr"))
    true_dtypes: list[str] = []
    for i, path in enumerate(paths):
        with apr2.open_model(path) as model:
            assert model.flags["sharded"]
            assert model.flags["has_vocab"] is (i == 0)
            assert model.metadata["sharding"] == {
                "shard_count": len(paths),
                "shard_index": i,
                "total_size": manifest(tmp_path / "d")["total_size"],
                "pattern": "model-{:05d}-of-{:05d}.apr",
            }
            assert model.metadata["architecture"] == "llama"
            assert ("tokenizer.vocabulary" in model.metadata) is (i == 0)
            assert model.warnings == []
            assert model.checksum() == {"header": "ok", "footer": "ok"}
            assert {t.dtype for t in model.tensors.values()} <= {"Q8_0", "F32"}
            true_dtypes += model.metadata.get("aprfmt.tensors", {})
    assert len(true_dtypes) == len(set(true_dtypes)) > 0


def test_every_way_in_gives_the_model(shards: Path, tiny_apr: Path) -> None:
    count = manifest(shards)["shard_count"]
    with aprfmt.open(tiny_apr) as one:
        for path in (shards, *shards.iterdir()):
            assert aprfmt.detect(path) == "apr-v2"
            with aprfmt.open(path) as model:
                assert (model.format, model.label) == ("apr-v2", f"APR v2, {count} shards")
                assert list(model.tensors) == list(one.tensors)
                assert all(t.raw() == one.tensors[name].raw() for name, t in model.tensors.items())
                assert model.metadata == one.metadata
                assert model.tokenizer == one.tokenizer
                assert model.warnings == []
                assert len(model.sources) == count
                assert model.hparams == one.hparams


def test_any_model_is_cut(tiny_gguf: Path, tiny_apr: Path, tmp_path: Path) -> None:
    report = cut(tiny_gguf, tmp_path / "d")
    assert report["lossless"] is True
    aprfmt.convert_model(tmp_path / "d", tmp_path / "one.apr")
    assert (tmp_path / "one.apr").read_bytes() == tiny_apr.read_bytes()
    aprfmt.export_model(tmp_path / "d", tmp_path / "back.gguf")
    assert (tmp_path / "back.gguf").read_bytes() == tiny_gguf.read_bytes()


def test_shards_are_cut_again(shards: Path, tiny_apr: Path, tmp_path: Path) -> None:
    assert cut(shards, tmp_path / "e", 100_000)["lossless"] is True
    assert manifest(tmp_path / "e")["shard_count"] < manifest(shards)["shard_count"]
    aprfmt.convert_model(tmp_path / "e" / MANIFEST, tmp_path / "one.apr")
    assert (tmp_path / "one.apr").read_bytes() == tiny_apr.read_bytes()


@pytest.mark.parametrize("path", [".", MANIFEST])
def test_shards_are_not_cut_over_themselves(shards: Path, path: str) -> None:
    before = {name: (shards / name).read_bytes() for name in names(shards)}
    with pytest.raises(RefusedError, match="is the input"):
        cut(shards / path, shards, 100_000, force=True)
    assert {name: (shards / name).read_bytes() for name in names(shards)} == before


def test_order_of_blobs_and_generation_survive(tmp_path: Path) -> None:
    tensors = {name: np.full((40, 10), i, np.float32) for i, name in enumerate("dacb")}
    metadata = {"model_type": "x", "name": "ä"}
    for generation in ("Current", "GenA", "Gen0"):
        source = tmp_path / f"{generation}.apr"
        aprfmt.save_file(tensors, source, metadata, streaming=True, flags=0x0100, generation=generation)
        assert cut(source, tmp_path / generation, 2000)["lossless"] is True
        assert manifest(tmp_path / generation)["shard_count"] == 4
        aprfmt.convert_model(tmp_path / generation, tmp_path / "one.apr", force=True)
        assert (tmp_path / "one.apr").read_bytes() == source.read_bytes()


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.dictionaries(st.text("abcé.", min_size=1, max_size=8), st.integers(0, 300), max_size=9),
    limit=st.integers(1, 3000),
)
def test_any_tensors_come_back(tmp_path: Path, sizes: dict[str, int], limit: int) -> None:
    source, folder, one = tmp_path / "s.apr", tmp_path / "d", tmp_path / "one.apr"
    aprfmt.save_file({name: np.arange(n, dtype=np.float32) for name, n in sizes.items()}, source, force=True)
    shutil.rmtree(folder, ignore_errors=True)
    assert cut(source, folder, limit)["lossless"] is True
    aprfmt.convert_model(folder, one, force=True)
    assert one.read_bytes() == source.read_bytes()
    for path in folder.glob("*.apr"):
        with apr2.open_model(path) as model:
            assert path.stat().st_size <= limit or len(model.tensors) <= 1


def test_a_file_that_our_writer_would_lay_out_otherwise_is_said_to_be(tiny_apr: Path, tmp_path: Path) -> None:
    (tmp_path / "longer.apr").write_bytes(tiny_apr.read_bytes() + b"more")
    assert cut(tmp_path / "longer.apr", tmp_path / "d")["lossless"] is False


def test_a_lone_shard_opens_with_a_warning(shards: Path, tmp_path: Path) -> None:
    path = sorted(shards.glob("*.apr"))[1]
    shutil.copy(path, tmp_path / "x.apr")
    with aprfmt.open(tmp_path / "x.apr") as model:
        assert 0 < len(model.tensors) < 20
        assert [w for w in model.warnings if "one shard of a larger model" in w]
    (tmp_path / "x.apr").rename(shards / "x.apr")
    with aprfmt.open(shards / "x.apr") as model:
        assert "no manifest in its folder lists it" in model.warnings[0]
    with pytest.raises(RefusedError, match="one shard of a larger model"):
        cut(shards / "x.apr", tmp_path / "d")
    assert not (tmp_path / "d").exists()


def test_a_folder_of_safetensors_stays_one(shards: Path) -> None:
    from safetensors.numpy import save_file

    save_file({"a": np.zeros(2, np.float32)}, shards / "model.safetensors")
    assert aprfmt.detect(shards) == "hf"


def test_a_manifest_without_our_fields(shards: Path, tiny_apr: Path, tmp_path: Path) -> None:
    """As the reference would write it; the footers then tell about damage."""
    value = manifest(shards)
    for row in value["shards"]:
        del row["sha256"], row["crc32"]
    (shards / MANIFEST).write_text(json.dumps(value))
    assert validate(shards).passed
    path = sorted(shards.glob("*.apr"))[2]
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)
    assert [check.message for check in validate(shards).checks if check.status == "fail"] == [
        f"shard {path.name}: the checksum at its end is bad"
    ]


def test_stamping_shards_gives_one_file(shards: Path, tmp_path: Path) -> None:
    aprfmt.stamp(shards, tmp_path / "one.apr", license="MIT")
    with aprfmt.open(tmp_path / "one.apr") as model:
        assert model.metadata["license"] == "MIT"
        assert "sharding" not in model.metadata
        assert not model.flags["sharded"]
        assert len(model.tensors) == 20
    assert validate(tmp_path / "one.apr").passed
    with pytest.raises(RefusedError, match="several files"):
        aprfmt.stamp(shards, in_place=True, license="MIT")
    with pytest.raises(RefusedError, match="is the input"):
        aprfmt.stamp(shards, sorted(shards.glob("*.apr"))[1], license="MIT", force=True)


def test_force_clears_old_shards(shards: Path, tiny_apr: Path) -> None:
    (shards / "README.md").write_text("kept")
    with pytest.raises(ExistsError):
        cut(tiny_apr, shards, 100_000)
    cut(tiny_apr, shards, 100_000, force=True)
    count = manifest(shards)["shard_count"]
    assert len(names(shards)) == count + 2
    with aprfmt.open(shards) as model:
        assert len(model.tensors) == 20


def test_names_that_a_manifest_cannot_hold(tmp_path: Path) -> None:
    a = np.zeros(2, np.float32)
    twice = [("a", a), ("a", a)]
    for i, tensors in enumerate((twice, [("\udcff", a)], [("x" * 300, a)])):
        aprfmt.save_file(tensors, tmp_path / "s.apr", force=True)
        if i == 2:  # cut to 256 bytes by the container, which fits
            cut(tmp_path / "s.apr", tmp_path / "d")
            continue
        with pytest.raises(RefusedError, match="manifest"):
            cut(tmp_path / "s.apr", tmp_path / "d")
        assert not (tmp_path / "d").exists()


def test_one_file_is_not_sharded(tiny_apr: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--shard-size"):
        aprfmt.convert_model(tiny_apr, tmp_path / "x.apr", shard_size=1000)
