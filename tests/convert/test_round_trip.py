"""What goes in comes out: byte for byte where nothing was asked to change."""

from __future__ import annotations

import hashlib
import json
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aprfmt
from aprfmt.errors import ChecksumError

# The peak of this process alone: ru_maxrss would count what the parent had before the fork.
PRINT_PEAK = "\nprint(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')))"


def sha(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def folder_hashes(folder: Path) -> dict[str, str]:
    return {path.relative_to(folder).as_posix(): sha(path) for path in folder.rglob("*") if path.is_file()}


def test_smollm2_comes_back_as_the_same_file_in_little_memory(smollm2_gguf: Path, tmp_path: Path) -> None:
    code = "import sys, aprfmt; r = aprfmt.import_model(sys.argv[1], sys.argv[2])\nassert r.lossless" + PRINT_PEAK
    apr = tmp_path / "m.apr"
    run = subprocess.run([sys.executable, "-c", code, smollm2_gguf, apr], capture_output=True, text=True, check=True)
    peak_bytes = int(run.stdout) * 1024
    assert peak_bytes < 250e6
    assert apr.stat().st_size <= smollm2_gguf.stat().st_size * 1.025
    report = aprfmt.export_model(apr, tmp_path / "m.gguf")
    assert report.lossless
    assert sha(tmp_path / "m.gguf") == sha(smollm2_gguf)


@pytest.mark.parametrize("name", ["qwen2-untied", "llama-bias", "mistral", "qwen2"])
def test_a_folder_comes_back_with_every_file_the_same(
    name: str, tiny_model: Callable[[str], Any], tmp_path: Path
) -> None:
    folder, _ = tiny_model(name)
    assert aprfmt.import_model(folder, tmp_path / "m.apr").lossless
    assert aprfmt.export_model(tmp_path / "m.apr", tmp_path / "back").lossless
    assert folder_hashes(tmp_path / "back") == folder_hashes(folder)


def test_a_sharded_folder_with_card_and_template_comes_back(tiny_model: Callable[[str], Any], tmp_path: Path) -> None:
    folder, _ = tiny_model("qwen2-untied")
    shards = tmp_path / "shards"
    aprfmt.convert_model(folder, shards, shard_size=60_000)
    (shards / "README.md").write_text("---\nlicense: mit\n---\n# Card é\n")
    (shards / "chat_template.jinja").write_text("{{ messages }}")
    assert len(list(shards.glob("model-*.safetensors"))) > 1
    aprfmt.import_model(shards, tmp_path / "m.apr")
    aprfmt.export_model(tmp_path / "m.apr", tmp_path / "back")
    assert folder_hashes(tmp_path / "back") == folder_hashes(shards)


def test_one_safetensors_file_comes_back(tiny_model: Callable[[str], Any], tmp_path: Path) -> None:
    source = tiny_model("qwen2-untied")[0] / "model.safetensors"
    aprfmt.import_model(source, tmp_path / "m.apr")
    aprfmt.export_model(tmp_path / "m.apr", tmp_path / "back.safetensors")
    assert sha(tmp_path / "back.safetensors") == sha(source)


def test_every_readable_vector_is_copied_byte_for_byte(fixtures_dir: Path, tmp_path: Path) -> None:
    for path in sorted((fixtures_dir / "vectors" / "golden").glob("*.apr")):
        if path.name == "v2_bad_footer.apr":
            with pytest.raises(ChecksumError):
                aprfmt.convert_model(path, tmp_path / path.name)
            continue
        aprfmt.convert_model(path, tmp_path / path.name)
        assert sha(tmp_path / path.name) == sha(path), path.name


def test_an_edit_takes_effect_and_the_rest_of_the_keys_stay(tiny_gguf: Path, tmp_path: Path) -> None:
    aprfmt.import_model(tiny_gguf, tmp_path / "m.apr", license="apache-2.0")
    report = aprfmt.export_model(tmp_path / "m.apr", tmp_path / "m.gguf")
    assert not report.lossless
    with aprfmt.open(tiny_gguf) as before, aprfmt.open(tmp_path / "m.gguf") as after:
        assert after.metadata["general.license"] == "Apache-2.0"
        assert {k: v for k, v in after.metadata.items() if k != "general.license"} == dict(before.metadata)
        for name, tensor in before.tensors.items():
            assert after.tensors[name].raw() == tensor.raw()


def test_stamping_leaves_tensors_alone_and_travels_on(tiny_gguf: Path, tmp_path: Path) -> None:
    aprfmt.import_model(tiny_gguf, tmp_path / "m.apr")
    aprfmt.stamp(tmp_path / "m.apr", tmp_path / "s.apr", data_source="teacher-only", set={"note": [1, "x"]})
    with aprfmt.open(tmp_path / "m.apr") as a, aprfmt.open(tmp_path / "s.apr") as b:
        assert b.metadata["data_source"] == "teacher-only"
        assert b.metadata["note"] == [1, "x"]
        assert [(t.name, t.dtype, bytes(t.raw())) for t in a.tensors.entries] == [
            (t.name, t.dtype, bytes(t.raw())) for t in b.tensors.entries
        ]
        assert b.checksum() == {"header": "ok", "footer": "ok"}
    aprfmt.export_model(tmp_path / "s.apr", tmp_path / "back.gguf")
    aprfmt.import_model(tmp_path / "back.gguf", tmp_path / "again.apr")
    aprfmt.stamp(tmp_path / "again.apr", tmp_path / "plain.apr", set={"note": None, "data_source": None})
    with aprfmt.open(tmp_path / "again.apr") as model:
        assert model.metadata["note"] == [1, "x"]
    # without the edits it is the first file again
    aprfmt.export_model(tmp_path / "plain.apr", tmp_path / "first.gguf")
    assert sha(tmp_path / "first.gguf") == sha(tiny_gguf)


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "q8_0", "q4_0", "q5_1", "aprq8", "aprq4"])
def test_dtype_changes_the_matrices_and_keeps_the_values_close(
    dtype: str, tiny_model: Callable[[str], Any], tmp_path: Path
) -> None:
    folder, _ = tiny_model("qwen2-untied")
    report = aprfmt.import_model(folder, tmp_path / "m.apr", dtype=dtype, pure=dtype.startswith(("q4", "q5")))
    assert report.lossless is (dtype == "f32")
    bound = {"f32": 0, "f16": 1e-3, "bf16": 8e-3, "q8_0": 2e-2, "aprq8": 2e-2}.get(dtype, 0.3)
    with aprfmt.open(folder) as before, aprfmt.open(tmp_path / "m.apr") as after:
        for name, tensor in before.tensors.items():
            a, b = tensor.numpy(), after.tensors[name].numpy()
            assert after.tensors[name].shape == tensor.shape
            assert np.abs(a - b).max() <= bound * np.abs(a).max()
            if tensor.dtype == "F32" and len(tensor.shape) == 2:
                assert after.tensors[name].dtype.lower() == dtype.replace("aprq", "aprq")


def test_a_tied_head_is_stored_once(tiny_model: Callable[[str], Any], tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "tied"
    source, _ = tiny_model("qwen2-untied")
    folder.mkdir()
    for path in source.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    tensors = load_file(source / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(config))
    aprfmt.import_model(folder, tmp_path / "m.apr")
    with aprfmt.open(tmp_path / "m.apr") as model:
        assert "lm_head.weight" not in model.tensors
        assert model.metadata["tied_embeddings"] is True
    aprfmt.export_model(tmp_path / "m.apr", tmp_path / "back")
    assert folder_hashes(tmp_path / "back") == folder_hashes(folder)
    # the same declaration with a head of its own: kept, because the bytes say so
    tensors["lm_head.weight"] = torch.flip(tensors["lm_head.weight"], [0])
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    aprfmt.import_model(folder, tmp_path / "m2.apr")
    with aprfmt.open(tmp_path / "m2.apr") as model:
        assert "lm_head.weight" in model.tensors
        assert model.metadata["tied_embeddings"] is False


def test_short_vocabularies_are_padded_and_marked_unused(tiny_model: Callable[[str], Any], tmp_path: Path) -> None:
    folder, _ = tiny_model("qwen2")
    for style, text in (("llama.cpp", "[PAD151700]"), ("apr", "<|pad_151700|>")):
        path = tmp_path / f"{style}.gguf"
        aprfmt.export_model(folder, path, pad_style=style)
        with aprfmt.open(path) as model:
            tokens = model.metadata["tokenizer.ggml.tokens"]
            assert len(tokens) == 151936 == len(set(tokens))
            assert tokens[151700] == text
            assert model.metadata["tokenizer.ggml.token_type"][151665:] == [5] * 271


def test_memory_does_not_grow_with_a_tensor(tmp_path: Path) -> None:
    """A 400 MB tensor goes to F16 within 150 MB."""
    n_rows, n_cols = 100_000, 1000
    header = json.dumps(
        {"x.weight": {"dtype": "F32", "shape": [n_rows, n_cols], "data_offsets": [0, 4 * n_rows * n_cols]}}
    )
    with open(tmp_path / "big.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(header)) + header.encode())
        file.truncate(8 + len(header) + 4 * n_rows * n_cols)
    code = (
        "import sys, aprfmt\n"
        "aprfmt.convert_model(sys.argv[1], sys.argv[2], dtype='f16', allow_unmapped=True, allow_no_config=True)"
        + PRINT_PEAK
    )
    arguments = [sys.executable, "-c", code, str(tmp_path / "big.safetensors"), str(tmp_path / "small.safetensors")]
    run = subprocess.run(arguments, capture_output=True, text=True, check=True)
    assert int(run.stdout) * 1024 < 150e6
    assert (tmp_path / "small.safetensors").stat().st_size > 2 * n_rows * n_cols


def test_files_that_are_not_carried_are_named(tiny_model: Callable[[str], Any], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model("qwen2-untied")[0], folder)
    (folder / ".cache").mkdir()
    (folder / ".cache" / "lock").write_text("x")
    assert aprfmt.import_model(folder, tmp_path / "a.apr").lossless
    (folder / "original").mkdir()
    (folder / "original" / "params.json").write_text("{}")
    (folder / "logo.png").write_bytes(b"\x89PNG")
    report = aprfmt.import_model(folder, tmp_path / "b.apr", carry=0)
    assert not report.lossless
    assert [loss.partition(";")[0] for loss in report.losses] == [
        "not carried: logo.png (4 B), original/params.json (2 B)"
    ]
