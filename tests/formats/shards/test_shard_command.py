"""`apr shard`, `--shard-size` of the other commands, and Hugging Face folders of a chosen shard size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import aprfmt
from aprfmt.cli.main import run


def apr(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    code = run([str(word) for word in words])
    value = json.loads(capsys.readouterr().out)
    assert isinstance(value, dict)
    return code, value


def test_shard_validate_diff_join(tiny_apr: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, one = tmp_path / "d", tmp_path / "one.apr"
    code, body = apr(capsys, "shard", tiny_apr, "-o", folder, "--shard-size", "60KB", "--json")
    assert (code, body["schema"], body["ok"], body["lossless"]) == (0, "apr.shard/1", True, True)
    assert (body["format"], body["output"], body["tensor_count"]) == ("apr-v2", str(folder), 20)
    code, body = apr(capsys, "validate", folder, "--json")
    assert (code, body["passed"], body["format"]) == (0, True, "APR v2, 4 shards")
    code, body = apr(capsys, "diff", folder, tiny_apr, "--values", "--json")
    assert (code, body["identical"]) == (0, True)
    code, body = apr(capsys, "inspect", folder, "--json")
    assert (code, body["flags"]["sharded"], body["compat"]["reference_runtime"]) == (0, True, False)
    code, body = apr(capsys, "convert", folder, "-o", one, "--json")
    assert code == 0
    assert one.read_bytes() == tiny_apr.read_bytes()
    second = sorted(folder.glob("*.apr"))[1]
    data = bytearray(second.read_bytes())
    data[-100] ^= 1
    second.write_bytes(data)
    code, body = apr(capsys, "validate", folder / "model.apr.index.json", "--json")
    assert (code, body["passed"]) == (5, False)
    assert [second.name in c["message"] for c in body["checks"] if c["status"] == "fail"] == [True]
    second.unlink()
    code, body = apr(capsys, "validate", folder, "--json")
    assert (code, body["ok"]) == (5, False)
    assert second.name in body["error"]["message"]


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("--shard-size", "0"), 2),
        (("--shard-size", "x"), 2),
        (("--shard-size", "-1"), 2),
        (("--shard-size", "5"), 2),
        ((), 5),
    ],
)
def test_refusals(
    tiny_apr: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], code: int
) -> None:
    (tmp_path / "d").mkdir()
    assert apr(capsys, "shard", tiny_apr, "-o", tmp_path / "d", *words, "--json")[0] == code
    assert list((tmp_path / "d").iterdir()) == []


def test_a_file_is_not_replaced_by_a_folder(tiny_apr: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "d").write_text("mine")
    assert apr(capsys, "shard", tiny_apr, "-o", tmp_path / "d", "--force", "--json")[0] == 5
    assert (tmp_path / "d").read_text() == "mine"


def test_a_plan_writes_nothing(tiny_apr: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, body = apr(capsys, "shard", tiny_apr, "-o", tmp_path / "d", "--plan", "--json")
    assert (code, body["plan"], len(body["tensors"])) == (0, True, 20)
    assert list(tmp_path.iterdir()) == []


def test_gguf_parts(tiny_apr: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, body = apr(capsys, "export", tiny_apr, "-o", tmp_path / "x.gguf", "--shard-size", "60KB", "--json")
    assert (code, len(body["files"])) == (0, 4)
    first = body["files"][0]
    code, body = apr(capsys, "convert", first, "-o", tmp_path / "x.gguf", "--shard-size", "0", "--json")
    assert (code, "files" in body) == (0, False)


@pytest.mark.parametrize(("size", "count"), [(60_000, 4), (0, 1), (None, 1)])
def test_folders(tiny_apr: Path, tmp_path: Path, size: int | None, count: int) -> None:
    folder = tmp_path / "hf"
    aprfmt.export_model(tiny_apr, folder, format="hf", shard_size=size)
    weights = sorted(folder.glob("*.safetensors"))
    assert len(weights) == count
    with aprfmt.open(folder) as model, aprfmt.open(tiny_apr) as one:
        assert set(model.tensors) == set(one.tensors)
        for name, tensor in model.tensors.items():
            assert tensor.raw() == one.tensors[name].raw()
        for source in model.sources:
            held = sum(t.n_bytes for t in model.tensors.values() if t.source is source)
            assert not size or held <= size
    index = folder / "model.safetensors.index.json"
    assert index.exists() is (count > 1)
    if count > 1:
        value = json.loads(index.read_text())
        assert set(value["weight_map"].values()) == {path.name for path in weights}
        assert value["metadata"]["total_size"] == sum(t.n_bytes for t in aprfmt.open(tiny_apr).tensors.values())
