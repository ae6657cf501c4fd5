"""Bad input at the command line: the right exit code, one clear sentence, nothing left behind."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any

import pytest

import aprfmt
from aprfmt.cli.main import run
from aprfmt.errors import AprError, RefusedError, UnmappedError


def apr(*args: object) -> subprocess.CompletedProcess[str]:
    """The command line in this process."""
    words = [*map(str, args)]
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        return subprocess.CompletedProcess(words, run(words), out.getvalue(), err.getvalue())


def refused(exit_code: int, folder: Path, *args: object) -> dict[str, Any]:
    """Runs apr, checks code, message and that `folder` holds what it held; returns the error object."""
    before = sorted(folder.rglob("*"))
    human = apr(*args)
    assert human.returncode == exit_code, human.stderr
    assert "Traceback" not in human.stderr
    assert human.stdout == ""
    machine = apr(*args, "--json")
    assert machine.returncode == exit_code
    body = json.loads(machine.stdout)
    assert body["ok"] is False
    assert body["schema"] == "apr.error/1"
    assert sorted(folder.rglob("*")) == before
    error: dict[str, Any] = body["error"]
    assert error["message"].split("\n")[0] in human.stderr.replace("\n", " ") or error["message"][:30] in human.stderr
    return error


@pytest.fixture
def folder(tiny_model: Callable[[str], Any], tmp_path: Path) -> Path:
    """A fresh copy of a tiny Hugging Face folder."""
    return Path(shutil.copytree(tiny_model("qwen2-untied")[0], tmp_path / "model"))


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))


def test_every_malformed_vector_is_refused(fixtures_dir: Path, tmp_path: Path) -> None:
    manifest = json.loads((fixtures_dir / "vectors" / "manifest.json").read_text())
    wanted = [r for r in manifest["malformed"] if "reject" in r["hardened_reader_should"].split(" or ")[0]]
    wanted = [r for r in wanted if " or keep" not in r["hardened_reader_should"]]
    assert len(wanted) > 40
    for record in wanted:
        path = fixtures_dir / "vectors" / record["file"]
        with pytest.raises(AprError) as caught:
            aprfmt.open(path).close()
        assert caught.value.exit_code in (3, 4)
        assert len(caught.value.message) > 10
        assert "\n" not in caught.value.message


@pytest.mark.parametrize("twentieth", range(20))
def test_a_gguf_cut_anywhere_is_refused(twentieth: int, tiny_gguf: Path, tmp_path: Path) -> None:
    data = tiny_gguf.read_bytes()
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(data[: len(data) * twentieth // 20])
    with pytest.raises(AprError) as caught:
        aprfmt.import_model(cut, tmp_path / "out.apr")
    assert caught.value.exit_code in (3, 4)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["cut.gguf"]


def test_a_cut_gguf_at_the_command_line(tiny_gguf: Path, tmp_path: Path) -> None:
    (tmp_path / "cut.gguf").write_bytes(tiny_gguf.read_bytes()[:-5000])
    error = refused(4, tmp_path, "import", tmp_path / "cut.gguf", "-o", tmp_path / "o.apr")
    assert error["code"] == "truncated"
    assert error["hint"]


def test_a_folder_without_config(folder: Path, tmp_path: Path) -> None:
    (folder / "config.json").unlink()
    error = refused(5, tmp_path, "import", folder, "-o", tmp_path / "o.apr")
    assert "config.json" in error["message"]
    assert "--allow-no-config" in error["hint"]


def test_an_index_naming_a_missing_shard(folder: Path, tmp_path: Path) -> None:
    shards = tmp_path / "shards"
    aprfmt.convert_model(folder, shards, shard_size=60_000)
    sorted(shards.glob("model-*.safetensors"))[1].unlink()
    error = refused(5, tmp_path, "import", shards, "-o", tmp_path / "o.apr")
    assert "model-00002-of-" in error["message"]


def test_an_unknown_architecture(folder: Path, tmp_path: Path) -> None:
    edit_config(folder, architectures=["SomeNovelArchForCausalLM"], model_type="somenovel")
    error = refused(5, tmp_path, "import", folder, "-o", tmp_path / "o.apr")
    assert error["code"] == "unmapped"
    assert "SomeNovelArchForCausalLM" in error["message"]


def test_an_unmapped_tensor_is_named_with_the_nearest_known_one(folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.q_prj.weight"] = tensors.pop("model.layers.0.self_attn.q_proj.weight")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    error = refused(5, tmp_path, "export", folder, "-o", tmp_path / "o.gguf")
    assert error["tensor"] == "model.layers.0.self_attn.q_prj.weight"
    assert "model.layers.0.self_attn.q_proj.weight" in error["message"]


def test_a_name_that_llama_cpp_cannot_load_is_refused(folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0." + "x" * 64
    tensors[name] = tensors["model.norm.weight"].clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    error = refused(5, tmp_path, "export", folder, "-o", tmp_path / "o.gguf", "--allow-unmapped")
    assert error["tensor"] == name


def test_a_missing_bias_is_refused_before_anything_is_written(folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.self_attn.k_proj.bias"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(RefusedError, match="missing") as caught:
        aprfmt.import_model(folder, tmp_path / "o.apr")
    assert caught.value.tensor == "model.layers.1.self_attn.k_proj.bias"


def test_dimensions_of_another_model_are_refused(folder: Path, tmp_path: Path) -> None:
    edit_config(folder, intermediate_size=112)
    with pytest.raises(RefusedError, match="112"):
        aprfmt.export_model(folder, tmp_path / "o.gguf")
    assert not (tmp_path / "o.gguf").exists()


def test_a_tokenizer_larger_than_the_embedding_is_refused(
    folder: Path, tmp_path: Path, real_tokenizers: dict[str, Path]
) -> None:
    error = refused(5, tmp_path, "import", folder, "-o", tmp_path / "o.apr", "--tokenizer", real_tokenizers["qwen2_5"])
    assert "151665" in error["message"]
    assert "320" in error["message"]


def test_a_head_that_is_neither_stored_nor_tied_is_refused(folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(RefusedError, match=r"lm_head\.weight"):
        aprfmt.import_model(folder, tmp_path / "o.apr")


def test_output_equal_to_input(tiny_gguf: Path, tmp_path: Path) -> None:
    path = Path(shutil.copy(tiny_gguf, tmp_path / "m.gguf"))
    content = path.read_bytes()
    error = refused(5, tmp_path, "convert", path, "-o", path, "--force")
    assert "input" in error["message"]
    (tmp_path / "link.gguf").symlink_to(path)
    refused(5, tmp_path, "convert", path, "-o", tmp_path / "link.gguf", "--force")
    assert path.read_bytes() == content


def test_an_existing_output_is_kept_without_force(tiny_gguf: Path, tmp_path: Path) -> None:
    (tmp_path / "o.apr").write_text("precious")
    assert refused(5, tmp_path, "import", tiny_gguf, "-o", tmp_path / "o.apr")["code"] == "exists"
    assert (tmp_path / "o.apr").read_text() == "precious"
    assert apr("import", tiny_gguf, "-o", tmp_path / "o.apr", "--force", "--quiet").returncode == 0
    assert aprfmt.detect(tmp_path / "o.apr") == "apr-v2"


def test_a_target_that_cannot_hold_the_dtype(tiny_gguf: Path, tmp_path: Path) -> None:
    error = refused(5, tmp_path, "export", tiny_gguf, "-o", tmp_path / "o.safetensors", "--dtype", "q8_0")
    assert "Q8_0" in error["message"]


def test_unknown_words_are_usage_errors(tiny_gguf: Path, tmp_path: Path) -> None:
    refused(2, tmp_path, "import", tiny_gguf, "-o", tmp_path / "o.apr", "--dtype", "q9")
    refused(2, tmp_path, "import", tiny_gguf, "-o", tmp_path / "o.apr", "--arch", "nonesuch")
    refused(2, tmp_path, "export", tiny_gguf, "-o", tmp_path / "o.bin")
    refused(3, tmp_path, "import", tmp_path / "none.gguf", "-o", tmp_path / "o.apr")


def test_api_options_that_do_not_exist_are_refused(tiny_gguf: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"quantize": "q8_0"}
    with pytest.raises(TypeError, match="quantize"):
        aprfmt.export_model(tiny_gguf, tmp_path / "o.gguf", **options)


def test_without_a_row_only_an_explicit_wish_goes_through(folder: Path, tmp_path: Path) -> None:
    edit_config(folder, architectures=["SomeNovelArchForCausalLM"], model_type="somenovel")
    report = aprfmt.import_model(folder, tmp_path / "o.apr", allow_unmapped=True)
    assert report.lossless
    aprfmt.export_model(tmp_path / "o.apr", tmp_path / "back", allow_unmapped=True)
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    with pytest.raises(UnmappedError):
        aprfmt.export_model(tmp_path / "o.apr", tmp_path / "o.gguf")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 kB."""
    mount = tmp_path / "disk"
    mount.mkdir()
    if (
        os.geteuid() != 0
        or subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", mount], capture_output=True, check=False
        ).returncode
    ):
        pytest.skip("cannot mount a small tmpfs")
    yield mount
    subprocess.run(["umount", mount], check=True)


def test_a_full_disk(tiny_gguf: Path, small_disk: Path) -> None:
    error = refused(7, small_disk, "import", tiny_gguf, "-o", small_disk / "o.apr")
    assert "disk" in error["message"]


def test_a_disk_that_fills_up_while_writing(tiny_gguf: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aprfmt.io.sink.check_space", lambda folder, n_bytes: None)
    with pytest.raises(AprError) as caught:
        aprfmt.import_model(tiny_gguf, small_disk / "o.apr")
    assert caught.value.exit_code == 7
    assert "space" in caught.value.message
    assert list(small_disk.iterdir()) == []


def _unfinished_bytes(pid: int, folder: Path) -> int:
    """Of an output that is being written, under a temporary name or (on Linux) without any."""
    sizes = [p.stat().st_size for p in folder.iterdir() if p.name.endswith(".tmp")]
    with suppress(OSError):
        for opened in Path(f"/proc/{pid}/fd").iterdir():
            if os.readlink(opened).startswith(f"{folder}/#"):
                sizes.append(opened.stat().st_size)
    return sum(sizes)


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_leaves_nothing_behind(number: int, exit_code: int, tmp_path: Path) -> None:
    """The output is large enough to be caught in the middle: 3 GB of zeros that take no room in the source."""
    header = json.dumps({"x.weight": {"dtype": "F32", "shape": [750_000, 1000], "data_offsets": [0, 3_000_000_000]}})
    with open(tmp_path / "big.safetensors", "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header.encode())
        file.truncate(8 + len(header) + 3_000_000_000)
    paths = [str(tmp_path / "big.safetensors"), "-o", str(tmp_path / "o.apr")]
    process = subprocess.Popen(
        [sys.executable, "-m", "aprfmt", "import", *paths, "--allow-no-config", "--allow-unmapped"],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not _unfinished_bytes(process.pid, tmp_path):
        assert process.poll() is None, process.stderr and process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(number)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == exit_code
    assert "Traceback" not in stderr
    assert [p.name for p in tmp_path.iterdir()] == ["big.safetensors"]


@pytest.mark.parametrize("name", ["tekken.json", "sentencepiece.bpe.model"])
def test_a_tokenizer_of_an_unreadable_kind_is_named(name: str, folder: Path, tmp_path: Path) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / name).write_bytes(b"{}")
    with pytest.raises(AprError, match=name):
        aprfmt.import_model(folder, tmp_path / "o.apr")
    assert not (tmp_path / "o.apr").exists()
