"""The reference files, through tools/vectors.py; and that this tool can fail."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
MANIFEST = ROOT / "fixtures" / "vectors" / "manifest.json"
RECORDS: dict[str, list[dict[str, Any]]] = json.loads(MANIFEST.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def vectors() -> ModuleType:
    spec = importlib.util.spec_from_file_location("vectors_tool", ROOT / "tools" / "vectors.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("record", RECORDS["golden"], ids=lambda r: Path(r["file"]).stem)
def test_golden(vectors: ModuleType, record: dict[str, Any], tmp_path: Path) -> None:
    assert list(vectors.check_golden(record, MANIFEST.parent, tmp_path / "out.apr")) == []


@pytest.mark.parametrize("record", RECORDS["malformed"], ids=lambda r: Path(r["file"]).stem)
def test_malformed(vectors: ModuleType, record: dict[str, Any], tmp_path: Path) -> None:
    assert list(vectors.check_malformed(record, MANIFEST.parent, tmp_path / "out.apr")) == []


def _record(name: str) -> dict[str, Any]:
    return next(r for r in RECORDS["golden"] + RECORDS["malformed"] if Path(r["file"]).stem == name)


def test_every_kind_of_difference_is_seen(vectors: ModuleType, tmp_path: Path) -> None:
    record = json.loads(json.dumps(_record("v2_streaming")))
    record["header"]["flags"] = 0
    record["metadata_json"] = "{}"
    record["tensors"][0]["offset"] = 0
    record["tensors"][1]["dtype"] = "f16"
    record["lookup_by_name_sha256"] = {}
    record["footer"]["computed"] = 0
    record["sha256"] = "0"
    found = "\n".join(vectors.check_golden(record, MANIFEST.parent, tmp_path / "out.apr"))
    for word in (
        "sha-256 of the file",
        "header.flags",
        "metadata text",
        "offset",
        "dtype",
        "lookup",
        "footer",
        "bytes",
    ):
        assert word in found


def test_wrong_verdicts_are_seen(vectors: ModuleType, tmp_path: Path) -> None:
    accepted = {**_record("edge_metadata_whitespace"), "hardened_reader_should": "reject"}
    refused = {**_record("metadata_array"), "hardened_reader_should": "accept"}
    silent = {**_record("edge_metadata_whitespace"), "hardened_reader_should": "warn or reject"}
    changed = {**_record("metadata_array"), "sha256": "0" * 64}
    for record in (accepted, refused, silent, changed):
        assert list(vectors.check_malformed(record, MANIFEST.parent, tmp_path / "out.apr"))


def test_exit_codes(vectors: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "golden"
    folder.mkdir()
    record = _record("v2_zero_tensors")
    shutil.copy(MANIFEST.parent / record["file"], folder)
    manifest = tmp_path / "manifest.json"
    manifest.write_text(json.dumps({"golden": [record], "malformed": []}))
    assert vectors.main(["check", str(manifest)]) == 0
    assert capsys.readouterr().out.endswith("1 passed, 0 failed\n")
    (folder / "v2_zero_tensors.apr").write_bytes(b"APR\0")
    assert vectors.main(["check", str(manifest)]) == 1
    assert capsys.readouterr().out.endswith("0 passed, 1 failed\n")
    missing = {**_record("metadata_array"), "file": "malformed/missing.apr"}
    manifest.write_text(json.dumps({"malformed": [missing]}))
    assert vectors.main(["check", str(manifest)]) == 1
    assert capsys.readouterr().out.endswith("0 passed, 1 failed\n")


def test_what_is_no_manifest_or_spec_is_told(vectors: ModuleType, tmp_path: Path) -> None:
    out, spec = str(tmp_path / "out.apr"), tmp_path / "spec.json"
    assert vectors.main(["check", str(spec)]) == 2
    for text in ("{", "[]", '{"tensors": [{"name": "t", "dtype": "F32", "shape": [2], "hex": "00"}]}'):
        spec.write_text(text)
        assert vectors.main(["write", str(spec), out]) == 2


def test_numbers_of_a_spec_are_read_as_the_reference_reads_them(vectors: ModuleType, tmp_path: Path) -> None:
    out, spec = tmp_path / "out.apr", tmp_path / "spec.json"
    spec.write_text('{"metadata": {"x": [-0, 18446744073709551615, 18446744073709551616]}}')
    assert vectors.main(["write", str(spec), str(out)]) == 0
    assert b'"x":[-0.0,18446744073709551615,1.8446744073709552e19]' in out.read_bytes()


def test_write_takes_a_spec_or_a_record(vectors: ModuleType, tmp_path: Path) -> None:
    record = _record("v2_duplicate_names")
    want = (MANIFEST.parent / record["file"]).read_bytes()
    for spec in (record, record["input"]):
        (tmp_path / "spec.json").write_text(json.dumps(spec))
        assert vectors.main(["write", str(tmp_path / "spec.json"), str(tmp_path / "out.apr")]) == 0
        assert (tmp_path / "out.apr").read_bytes() == want
