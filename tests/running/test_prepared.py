"""The cache of exports: found again while nothing changed, made anew when anything did."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import plain_models
import pytest
from demo_model import build

import aprfmt
from aprfmt.errors import AprError, ChecksumError, StorageError, UsageError
from aprfmt.running.prepared import SIZE_VARIABLE, prepare


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model, and an empty cache."""
    monkeypatch.setenv("APR_CACHE", str(tmp_path / "cache"))
    return plain_models.write_folder(tmp_path / "hf")


def exports(tmp_path: Path) -> list[Path]:
    return sorted(path for path in (tmp_path / "cache" / "exports").iterdir() if path.suffix == ".gguf")


def test_a_gguf_is_itself(folder: Path, tmp_path: Path) -> None:
    aprfmt.convert_model(folder, tmp_path / "m.gguf")
    aprfmt.convert_model(folder, tmp_path / "p.gguf", shard_size=200_000)
    assert prepare(tmp_path / "m.gguf").path == str(tmp_path / "m.gguf")
    parts = sorted(tmp_path.glob("p-*.gguf"))
    assert len(parts) > 1
    for part in parts:
        found = prepare(part)
        assert found.path == str(parts[0])
        assert found.n_bytes == sum(path.stat().st_size for path in parts)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("form", ["hf", "m.apr", "hf/model.safetensors", "apr-parts", "mlx"])
def test_every_form_is_exported_once(folder: Path, tmp_path: Path, form: str) -> None:
    if form == "m.apr":
        aprfmt.convert_model(folder, tmp_path / form)
    elif form != "hf" and "/" not in form:
        options = {"format": "apr-shards", "shard_size": 200_000} if form == "apr-parts" else {"format": "mlx"}
        aprfmt.convert_model(folder, tmp_path / form, **options)
    lines: list[str] = []
    first = prepare(tmp_path / form, say=lines.append)
    assert first.report is not None
    assert Path(first.path).stat().st_size == first.n_bytes
    assert len(lines) == 1
    again = prepare(tmp_path / form, say=lines.append)
    assert (again.path, again.report, len(lines)) == (first.path, None, 1)
    aprfmt.convert_model(tmp_path / form, tmp_path / "direct.gguf")
    assert Path(first.path).read_bytes() == (tmp_path / "direct.gguf").read_bytes()


@pytest.mark.parametrize("form", ["hf", "hf/model.safetensors"])
def test_a_change_of_any_file_makes_another(folder: Path, tmp_path: Path, form: str) -> None:
    first = prepare(tmp_path / form)
    config = folder / "config.json"
    times = config.stat()
    config.write_text(json.dumps(json.loads(config.read_text()) | {"rms_norm_eps": 1e-4}))
    os.utime(config, ns=(times.st_atime_ns, times.st_mtime_ns))  # the time of change cannot be set back
    second = prepare(tmp_path / form)
    assert second.path != first.path
    with aprfmt.open(second.path) as model:
        assert model.hparams.rms_norm_eps == pytest.approx(1e-4)


def test_what_was_not_used_for_longest_goes(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = []
    for name in ("a.apr", "b.apr", "c.apr"):
        aprfmt.convert_model(folder, tmp_path / name)
        paths.append(prepare(tmp_path / name).path)
        os.utime(paths[-1], (len(paths), len(paths)))
    prepare(tmp_path / "a.apr")  # used again
    monkeypatch.setenv(SIZE_VARIABLE, str(2 * os.path.getsize(paths[0])))
    aprfmt.convert_model(folder, tmp_path / "d.apr")
    last = prepare(tmp_path / "d.apr").path
    assert [*map(str, exports(tmp_path))] == sorted([paths[0], last])
    monkeypatch.setenv(SIZE_VARIABLE, "0")
    prepare(tmp_path / "d.apr")
    assert [*map(str, exports(tmp_path))] == [last]
    monkeypatch.setenv(SIZE_VARIABLE, "much")
    with pytest.raises(AprError, match="'much' is not a valid size"):
        prepare(tmp_path / "d.apr")


def test_two_processes_make_one(folder: Path, tmp_path: Path) -> None:
    code = """if True:
        import sys
        from aprfmt.running.prepared import prepare
        found = prepare(sys.argv[1])
        print(found.path, found.report is None)
    """
    started = [
        subprocess.Popen([sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    lines = sorted(process.communicate(timeout=100)[0].split() for process in started)
    assert len({path for path, _ in lines}) == 1
    assert sorted(found for _, found in lines) == ["False", "True", "True"]


def test_nothing_half_made_is_found(folder: Path, tmp_path: Path) -> None:
    config = folder / "config.json"
    good = config.read_text()
    config.write_text(good.replace("llama", "no-such-network").replace("Llama", "NoSuch"))
    with pytest.raises(AprError, match=r"no-such-network|NoSuch"):
        prepare(folder)
    assert not exports(tmp_path)


def test_a_cache_that_cannot_be_made(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("APR_CACHE", str(tmp_path / "file"))
    with pytest.raises(StorageError, match="the cache is not writable"):
        prepare(folder)


def test_variables_that_make_no_sense(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("APR_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("APR_CACHE_SIZE", "much")
    with pytest.raises(UsageError, match="APR_CACHE_SIZE: 'much' is not a valid size"):
        prepare(folder)
    assert not (tmp_path / "cache").exists(), "said before anything is exported"
    monkeypatch.delenv("APR_CACHE_SIZE")
    monkeypatch.setenv("APR_CACHE", "~nobody-of-this-name/cache")
    with pytest.raises(UsageError, match="cannot locate the cache"):
        prepare(folder)


def test_a_damaged_export_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("xllamacpp")
    monkeypatch.setenv("APR_CACHE", str(tmp_path / "cache"))
    build(tmp_path / "m.gguf")
    aprfmt.convert_model(tmp_path / "m.gguf", tmp_path / "m.apr")
    right = aprfmt.run(tmp_path / "m.apr", "a", raw=True, max_tokens=2).text
    (path,) = exports(tmp_path)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1  # of a weight: llama.cpp loads it
    path.write_bytes(data)
    with pytest.raises(ChecksumError, match="the file in the cache is damaged"):
        aprfmt.run(tmp_path / "m.apr", "a", raw=True, max_tokens=2)
    assert aprfmt.run(tmp_path / "m.apr", "a", raw=True, max_tokens=2).text == right
    assert path.read_bytes() != bytes(data)


def test_an_export_of_a_private_model_is_private(folder: Path, tmp_path: Path) -> None:
    aprfmt.convert_model(folder, tmp_path / "m.apr")
    (tmp_path / "m.apr").chmod(0o600)
    path = Path(prepare(tmp_path / "m.apr").path)
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)
