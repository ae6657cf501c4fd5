"""Missing and altered shards, and manifests that lie: refused by name, nothing written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import aprfmt
from aprfmt.errors import AprError, ChecksumError, CorruptError, RefusedError
from aprfmt.inspection.validate import validate

MANIFEST = "model.apr.index.json"


def second(shards: Path) -> Path:
    return sorted(shards.glob("*.apr"))[1]


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def other_revision(path: Path) -> None:
    """The same tensors with other values, a good shard in itself."""
    from aprfmt.formats import apr2
    from aprfmt.formats.apr2_write import rewrite

    flip(path, -100)
    with apr2.open_model(path) as model:
        rewrite(model, path.with_name("new"), accept_damage=True)
    path.with_name("new").replace(path)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (Path.unlink, "but missing"),
    "longer": (lambda path: path.write_bytes(path.read_bytes() + b"\0"), "bytes instead of"),
    "shorter": (lambda path: path.write_bytes(path.read_bytes()[:-64]), "bytes instead of"),
    "header": (lambda path: flip(path, 8), "checksum"),
    "footer": (lambda path: flip(path, -1), "its checksum differs"),
    "tensor name": (lambda path: flip(path, path.read_bytes().rindex(b".weight") - 1), "other tensors"),
    "revision": (other_revision, "its checksum differs"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_opening_refuses(shards: Path, tmp_path: Path, case: str) -> None:
    path = second(shards)
    damage, message = DAMAGE[case]
    damage(path)
    others = [shards, shards / MANIFEST, min(shards.glob("*.apr"))]
    for way in others:
        with pytest.raises(AprError, match=message) as caught:
            aprfmt.open(way)
        assert path.name in str(caught.value)
        assert caught.value.exit_code in (4, 5)
        assert caught.value.hint
    with pytest.raises(AprError):
        aprfmt.convert_model(shards, tmp_path / "one.apr")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["shards"]


def test_swapped_shards_are_refused(shards: Path) -> None:
    paths = sorted(shards.glob("*.apr"))
    paths[1].rename(shards / "x")
    paths[2].rename(paths[1])
    (shards / "x").rename(paths[2])
    with pytest.raises(RefusedError, match=paths[1].name):
        aprfmt.open(shards)


def test_a_changed_weight_is_seen_before_anything_is_joined(shards: Path, tmp_path: Path) -> None:
    path = second(shards)
    flip(path, -100)  # inside the last blob; size, header, index and footer stay
    with aprfmt.open(shards) as model:
        assert model.checksum()["footer"] == "bad"
    found = validate(shards)
    failed = [check.message for check in found.checks if check.status == "fail"]
    assert not found.passed
    assert failed == [f"shard {path.name} was modified: its sha256 differs from the manifest"]
    with pytest.raises(ChecksumError, match=f"{path.name} was modified"):
        aprfmt.convert_model(shards, tmp_path / "one.apr")
    assert not (tmp_path / "one.apr").exists()


def _drop(*keys: str) -> Callable[[dict[str, Any]], None]:
    def edit(value: dict[str, Any]) -> None:
        for key in keys:
            del value["shards"][1][key]

    return edit


def _set(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda value: value["shards"][1].update(values)


LIES: dict[str, Callable[[dict[str, Any]], object]] = {
    "no shards": lambda v: v.pop("shards"),
    "empty": lambda v: v.update(shards=[]),
    "shards no list": lambda v: v.update(shards={"a": 1}),
    "shard no object": lambda v: v["shards"].append(3),
    "count": lambda v: v.update(shard_count=9),
    "count text": lambda v: v.update(shard_count="4"),
    "no filename": _drop("filename"),
    "no tensors": _drop("tensors"),
    "size": _set(size=-1),
    "size bool": _set(size=True),
    "index twice": _set(index=0),
    "tensors": _set(tensors=[1]),
    "parent": _set(filename="../model.apr"),
    "absolute": _set(filename="/etc/passwd"),
    "dots": _set(filename=".."),
    "control": _set(filename="a\nb"),
    "sha256": _set(sha256="abc"),
    "crc32": _set(crc32="1"),
    "tensor twice": lambda v: v["shards"][1]["tensors"].append(v["shards"][0]["tensors"][0]),
    "weight_map": lambda v: v["weight_map"].update({v["shards"][0]["tensors"][0]: 1}),
    "weight_map no object": lambda v: v.update(weight_map=[]),
}


@pytest.mark.parametrize("case", LIES)
def test_a_manifest_that_makes_no_sense(shards: Path, case: str) -> None:
    path = shards / MANIFEST
    value = json.loads(path.read_text())
    LIES[case](value)
    path.write_text(json.dumps(value))
    with pytest.raises(CorruptError) as caught:
        aprfmt.open(shards)
    assert caught.value.path == str(path)


@pytest.mark.parametrize("text", [b"{", b"{}", b"[]", b"{\xff}", b'{"a":1,"a":2}', b"{" * 5000])
def test_a_manifest_that_is_no_object(shards: Path, text: bytes) -> None:
    (shards / MANIFEST).write_bytes(text)
    with pytest.raises(AprError):
        aprfmt.open(shards / MANIFEST)
    with pytest.raises(AprError):
        aprfmt.open(second(shards))


def test_shards_under_each_others_index(shards: Path) -> None:
    """A manifest without checksums whose rows name the wrong shard is caught by what the shards say."""
    path = shards / MANIFEST
    value = json.loads(path.read_text())
    rows = value["shards"]
    for row in rows:
        del row["sha256"], row["crc32"]
    rows[1]["index"], rows[2]["index"] = 2, 1
    value["weight_map"] = {name: row["index"] for row in rows for name in row["tensors"]}
    path.write_text(json.dumps(value))
    with pytest.raises(RefusedError, match="does not identify it as shard 1 of"):
        aprfmt.open(shards)


def test_two_models_in_one_folder(shards: Path) -> None:
    text = (shards / MANIFEST).read_bytes()
    (shards / "other.apr.index.json").write_bytes(text)
    aprfmt.open(shards).close()  # the usual name wins
    (shards / MANIFEST).rename(shards / "more.apr.index.json")
    with pytest.raises(RefusedError, match="several sharded models") as caught:
        aprfmt.open(shards)
    assert "more.apr.index.json" in (caught.value.hint or "")
    aprfmt.open(shards / "more.apr.index.json").close()
