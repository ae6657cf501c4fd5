"""The record of the source files holds their digests, and what is restored is compared with them."""

from __future__ import annotations

import os
import re
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blake3 import blake3
from plain_models import write_folder

import aprfmt
from aprfmt.cli.main import main
from aprfmt.errors import ChecksumError, CorruptError, UsageError
from aprfmt.io import crc
from aprfmt.io.digest import BLAKE3, CRC32, KINDS

KEY = "aprfmt.source"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "in")


def record(path: Path) -> dict[str, Any]:
    with aprfmt.open(path) as model:
        assert model.checksum() == {"header": "ok", "footer": "ok"}
        return dict(model.metadata[KEY])


def with_record(path: Path, value: object) -> None:
    """Writes the `.apr` again with another record of its source files, and a footer that fits."""
    from aprfmt.formats import apr_metadata

    with aprfmt.open(path) as model:
        text = apr_metadata.dump({**model.metadata, KEY: value})
        aprfmt.rewrite_file(model, path.with_name("new"), metadata=text)
    path.with_name("new").replace(path)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """Which digest is recorded."""
    return str(request.param)


@pytest.fixture(params=["hf", "gguf", "gguf parts", "safetensors", "shards"])
def imported(request: pytest.FixtureRequest, kind: str, folder: Path, tmp_path: Path) -> tuple[list[Path], Path, Path]:
    """The files of a source, the `.apr` made of it, and where it is restored."""
    hash = kind == BLAKE3
    if request.param in ("hf", "shards"):
        out = tmp_path / ("m.apr" if request.param == "hf" else "shards")
        format = None if request.param == "hf" else "apr-shards"
        aprfmt.convert_model(folder, out, format=format, shard_size=60_000 if format else None, hash=hash)
        return sorted(folder.iterdir()), out, tmp_path / "out"
    name = {"gguf": "m.gguf", "gguf parts": "m.gguf", "safetensors": "m.safetensors"}[request.param]
    source = tmp_path / "source"
    source.mkdir()
    report = aprfmt.convert_model(folder, source / name, shard_size=100_000 if request.param == "gguf parts" else None)
    (tmp_path / "out").mkdir()
    aprfmt.import_model(report.output, tmp_path / "m.apr", allow_no_config=True, arch="llama", hash=hash)
    return sorted(source.iterdir()), tmp_path / "m.apr", tmp_path / "out" / name


def test_every_file_has_the_digest_of_its_bytes(imported: tuple[list[Path], Path, Path], kind: str) -> None:
    files, apr, target = imported
    rows = record(apr)["files"]
    for row in rows:
        data = next(path for path in files if path.name == row["name"]).read_bytes()
        assert row[kind] == (f"{zlib.crc32(data):08x}" if kind == CRC32 else blake3(data).hexdigest())
    assert len(rows) == len(files)
    assert not any((set(KINDS) - {kind}) & row.keys() for row in rows)
    report = aprfmt.export_model(apr, target)
    assert report.lossless
    assert report.proven
    assert report.to_json()["proven"] is True
    outputs = sorted(target.iterdir()) if target.is_dir() else sorted(target.parent.iterdir())
    assert [path.read_bytes() for path in outputs] == [path.read_bytes() for path in files]


def test_an_import_is_the_same_each_time(kind: str, folder: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        report = aprfmt.import_model(folder, tmp_path / f"{name}.apr", hash=kind == BLAKE3)
        assert (report.lossless, report.proven) == (True, False)
    assert (tmp_path / "a.apr").read_bytes() == (tmp_path / "b.apr").read_bytes()


def test_damage_that_the_checksum_fits(imported: tuple[list[Path], Path, Path], kind: str) -> None:
    """Somebody edited a digest, or bytes that it covers: the file that would differ is named and nothing is left."""
    _, apr, target = imported
    if apr.is_dir():
        pytest.skip("shards are written again by a shard command only")
    value = record(apr)
    row = value["files"][-1]
    row[kind] = ("1" if row[kind][0] == "0" else "0") + row[kind][1:]
    with_record(apr, value)
    before = sorted(target.parent.iterdir())
    with pytest.raises(
        ChecksumError, match=rf"^.*{re.escape(row['name'])} would differ from the imported file"
    ) as caught:
        aprfmt.export_model(apr, target)
    assert caught.value.path == str(apr)
    assert sorted(target.parent.iterdir()) == before


def test_records_without_digests(imported: tuple[list[Path], Path, Path], kind: str) -> None:
    _, apr, target = imported
    if apr.is_dir():
        pytest.skip("shards are written again by a shard command only")
    value = record(apr)
    for row in value["files"]:
        del row[kind]
    with_record(apr, value)
    report = aprfmt.export_model(apr, target)
    assert (report.lossless, report.proven) == (True, False)


@pytest.mark.parametrize("digest", [None, 3, "", "0" * 63, "0" * 7, "G" * 64, "G" * 8, ["0" * 64], "0" * 8 + "\n"])
def test_a_digest_that_is_none(digest: object, kind: str, folder: Path, tmp_path: Path) -> None:
    aprfmt.import_model(folder, tmp_path / "m.apr", hash=kind == BLAKE3)
    value = record(tmp_path / "m.apr")
    value["files"][0][kind] = digest
    with_record(tmp_path / "m.apr", value)
    with pytest.raises(CorruptError, match=f"not a valid {KINDS[kind][0]}"):
        aprfmt.export_model(tmp_path / "m.apr", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_edit_is_not_compared(folder: Path, tmp_path: Path) -> None:
    aprfmt.import_model(folder, tmp_path / "m.apr")
    report = aprfmt.export_model(tmp_path / "m.apr", tmp_path / "out", dtype="f16")
    assert (report.lossless, report.proven) == (False, False)


def test_a_plan_proves_nothing(folder: Path, tmp_path: Path) -> None:
    aprfmt.import_model(folder, tmp_path / "m.apr")
    assert not aprfmt.export_model(tmp_path / "m.apr", tmp_path / "out", plan=True).proven
    data = bytearray((tmp_path / "m.apr").read_bytes())
    data[-100] ^= 1
    (tmp_path / "m.apr").write_bytes(data)
    aprfmt.export_model(tmp_path / "m.apr", tmp_path / "out", plan=True)
    with pytest.raises(ChecksumError):
        aprfmt.export_model(tmp_path / "m.apr", tmp_path / "out")


def test_a_file_is_read_once(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was streamed is not read again for the checksum in the footer."""
    aprfmt.import_model(folder, tmp_path / "m.apr")
    monkeypatch.setattr(crc, "_LEAST_BYTES", 1)
    read: list[tuple[int, int]] = []
    add = crc.ReadChecksum.add

    def note(self: crc.ReadChecksum, start: int, data: bytes) -> None:
        read.append((start, len(data)))
        add(self, start, data)

    monkeypatch.setattr(crc.ReadChecksum, "add", note)
    aprfmt.export_model(tmp_path / "m.apr", tmp_path / "m.safetensors")
    size = (tmp_path / "m.apr").stat().st_size
    assert size <= sum(n for _, n in read) < size + 20_000


RESTORED = "source.restored"


def restored(path: Path, *, strict: bool = True) -> tuple[bool, list[str]]:
    """Whether the strict validation passes, and what it says of the restored files, found or skipped."""
    found = aprfmt.validate(path, strict=strict)
    return found.passed, [check.message for check in (*found.checks, *found.skipped) if check.id == RESTORED]


def test_validate_makes_what_would_be_restored(imported: tuple[list[Path], Path, Path], kind: str) -> None:
    _, apr, _ = imported
    assert restored(apr)[1] == ["every restored source file matches its digest from import"]
    assert restored(apr, strict=False)[1] == []
    if apr.is_dir():
        return
    value = record(apr)
    row = value["files"][0]
    row[kind] = "0" * KINDS[kind][1]
    with_record(apr, value)
    what = f"{row['name']} would differ from the imported file: its {KINDS[kind][0]} differs"
    assert restored(apr) == (False, [what])


def test_validate_of_what_has_no_record(folder: Path, tmp_path: Path) -> None:
    assert restored(folder)[1] == ["the file has no source manifest"]
    aprfmt.import_model(folder, tmp_path / "m.apr")
    value = record(tmp_path / "m.apr")
    for row in value["files"]:
        del row[CRC32]
    with_record(tmp_path / "m.apr", value)
    assert restored(tmp_path / "m.apr")[1] == ["the source manifest has no digests"]
    value["files"][-1]["segments"] = [["t", "gone", "F32", "F32"]]
    with_record(tmp_path / "m.apr", value)
    assert "edited after its import" in restored(tmp_path / "m.apr")[1][0]


def test_a_new_checksum_over_a_file_without_one_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The file of another program: nothing in it tells that a footer was written."""
    path = tmp_path / "m.apr"
    aprfmt.save_file({"a": np.ones(16, np.float32)}, path, {"name": "theirs"})
    os.truncate(path, path.stat().st_size - 4)
    warning = "the file has no checksum: damage to it cannot be detected"
    assert aprfmt.stamp(path, tmp_path / "s.apr", license="MIT").warnings == [warning]
    assert warning in aprfmt.convert_model(path, tmp_path / "c.apr").warnings
    with pytest.raises(SystemExit, match="0"):
        main(["stamp", str(path), "--in-place", "--license", "MIT"])
    assert warning in capsys.readouterr().err
    assert aprfmt.stamp(path, in_place=True, license="Apache-2.0").warnings == []


def test_no_digest_is_taken_of_files_that_are_not_there(folder: Path, tmp_path: Path) -> None:
    aprfmt.import_model(folder, tmp_path / "m.apr")
    for target in ("again.apr", "shards"):
        format = "apr-shards" if target == "shards" else None
        with pytest.raises(UsageError, match="--hash needs the source files"):
            aprfmt.convert_model(tmp_path / "m.apr", tmp_path / target, format=format, hash=True)
    with pytest.raises(UsageError, match="--hash does not apply to the format gguf"):
        aprfmt.convert_model(folder, tmp_path / "m.gguf", hash=True)
