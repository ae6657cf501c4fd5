"""Hugging Face folders: shards, index, the files beside them, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from natives import hf_native

import aprfmt
from aprfmt.errors import AprError, CorruptError, LimitError, NotFoundError, RefusedError, UnknownFormatError
from aprfmt.formats import hf_files
from aprfmt.formats.hf_files import select_files
from aprfmt.io import jsonx
from aprfmt.tokenizer.hf_documents import read_json

CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4}
INDEX = "model.safetensors.index.json"


def shard(no: int, count: int) -> str:
    return f"model-{no:05d}-of-{count:05d}.safetensors"


def write_shard(path: Path, *names: str) -> None:
    arrays = {name: np.full((2, 2), len(name), dtype=np.float32) for name in names}
    safetensors.numpy.save_file(arrays, path, {"format": "pt"})


def write_index(folder: Path, weight_map: Any, name: str = INDEX) -> Path:
    path = folder / name
    path.write_text(json.dumps({"metadata": {"total_size": 48}, "weight_map": weight_map}, indent=2))
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two shards with an index and config.json."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    write_shard(tmp_path / shard(1, 2), "b", "a")
    write_shard(tmp_path / shard(2, 2), "c")
    write_index(tmp_path, {"a": shard(1, 2), "b": shard(1, 2), "c": shard(2, 2)})
    return tmp_path


def test_a_sharded_folder(folder: Path) -> None:
    assert aprfmt.detect(folder) == "hf"
    with aprfmt.open(folder) as model:
        assert (model.format, model.label) == ("hf", "HF folder")
        assert list(model.tensors) == ["a", "b", "c"]
        assert dict(model.metadata) == CONFIG
        native = hf_native(model)
        assert native.config == (folder / "config.json").read_bytes()
        assert native.index == (folder / INDEX).read_bytes()
        assert native.index_name == INDEX
        assert list(native.shards) == [shard(1, 2), shard(2, 2)]
        for name, one in native.shards.items():
            assert one.metadata == {"format": "pt"}
            assert Path(one.source.path) == folder / name
        assert native.other_files == [Path("config.json")]
        assert model.tensors["c"].source is native.shards[shard(2, 2)].source
        assert bytes(model.tensors["c"].raw()) == np.ones(4, dtype="<f4").tobytes()
        assert model.warnings == []


def test_the_index_itself_opens_the_folder(folder: Path) -> None:
    assert aprfmt.detect(folder / INDEX) == "hf"
    with aprfmt.open(folder / INDEX) as model:
        assert list(model.tensors) == ["a", "b", "c"]
        assert hf_native(model).folder == folder
        assert model.path == folder / INDEX


def test_an_index_of_another_name(folder: Path) -> None:
    (folder / INDEX).rename(folder / "other.safetensors.index.json")
    with aprfmt.open(folder) as model:
        assert hf_native(model).index_name == "other.safetensors.index.json"


@pytest.mark.parametrize("no", [1, 2])
def test_a_missing_shard_is_named(folder: Path, no: int) -> None:
    (folder / shard(no, 2)).unlink()
    for path in (folder, folder / INDEX):
        with pytest.raises(RefusedError, match=shard(no, 2)) as caught:
            aprfmt.open(path)
        assert caught.value.exit_code == 5
    (folder / INDEX).unlink()
    with pytest.raises(RefusedError, match=shard(no, 2)):
        aprfmt.open(folder)


def test_a_tensor_that_its_shard_lacks_is_named(folder: Path) -> None:
    write_index(folder, {"a": shard(1, 2), "b": shard(1, 2), "c": shard(2, 2), "gone": shard(2, 2)})
    with pytest.raises(RefusedError, match=shard(2, 2)) as caught:
        aprfmt.open(folder)
    assert caught.value.tensor == "gone"


def test_a_tensor_in_another_shard_is_refused(folder: Path) -> None:
    write_index(folder, {"a": shard(1, 2), "b": shard(2, 2), "c": shard(2, 2)})
    with pytest.raises(RefusedError) as caught:
        aprfmt.open(folder)
    assert caught.value.tensor == "b"


def test_a_tensor_in_two_shards_is_refused(folder: Path) -> None:
    write_shard(folder / shard(2, 2), "c", "a")
    with pytest.raises(CorruptError) as caught:
        aprfmt.open(folder)
    assert caught.value.tensor == "a"


def test_a_tensor_that_the_index_lacks_is_read_with_a_warning(folder: Path) -> None:
    write_index(folder, {"a": shard(1, 2), "c": shard(2, 2)})
    with aprfmt.open(folder) as model:
        assert "b" in model.tensors
        assert "b" in model.warnings[0]


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("{", CorruptError),
        ("[]", CorruptError),
        ("{}", CorruptError),
        ('{"weight_map": []}', CorruptError),
        ('{"weight_map": {"a": 1}}', CorruptError),
        ('{"weight_map": {"a": "x", "a": "y"}}', CorruptError),
        ('{"weight_map": {"a": "../x.safetensors"}}', CorruptError),
        ('{"weight_map": {"a": "/etc/passwd"}}', CorruptError),
        ('{"weight_map": {"a": "sub\\\\x.safetensors"}}', CorruptError),
        ('{"weight_map": {"a": ".."}}', CorruptError),
        ('{"weight_map": {"a": ""}}', CorruptError),
        ('{"weight_map": {"a": "x\\u0000"}}', CorruptError),
        ('{"weight_map": {"a": "\\ud800"}}', CorruptError),
        ('{"weight_map": ' + "[" * 100_000, CorruptError),
        ('{"weight_map": {"a": "' + "x" * 300 + '"}}', AprError),
    ],
)
def test_damaged_indexes_are_refused(folder: Path, text: str, kind: type[AprError]) -> None:
    (folder / INDEX).write_text(text)
    with pytest.raises(kind):
        aprfmt.open(folder)


def test_an_index_of_too_many_files_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aprfmt.formats.hf_files.MAX_SPLITS", 1)
    with pytest.raises(LimitError):
        aprfmt.open(folder)


def test_a_single_file(tmp_path: Path) -> None:
    write_shard(tmp_path / "model.safetensors", "a")
    write_shard(tmp_path / "adapter.safetensors", "z")
    with aprfmt.open(tmp_path) as model:
        assert list(model.tensors) == ["a"]
        assert hf_native(model).index is None
        assert hf_native(model).config is None
        assert dict(model.metadata) == {}


def test_a_single_file_with_an_index(tmp_path: Path) -> None:
    write_shard(tmp_path / "model.safetensors", "a")
    write_index(tmp_path, {"a": "model.safetensors"})
    with aprfmt.open(tmp_path) as model:
        assert hf_native(model).index_name == INDEX
        assert not model.warnings


def test_a_stale_index_is_passed_over_with_a_warning(tmp_path: Path) -> None:
    write_shard(tmp_path / "model.safetensors", "a")
    write_index(tmp_path, {"a": shard(1, 2), "b": shard(2, 2)})
    with aprfmt.open(tmp_path) as model:
        assert list(model.tensors) == ["a"]
        assert hf_native(model).index is None
        assert INDEX in model.warnings[0]


def test_numbered_shards_without_an_index(folder: Path) -> None:
    (folder / INDEX).unlink()
    with aprfmt.open(folder) as model:
        assert list(model.tensors) == ["a", "b", "c"]
        assert list(hf_native(model).shards) == [shard(1, 2), shard(2, 2)]


def test_one_file_of_any_name(tmp_path: Path) -> None:
    write_shard(tmp_path / "weights.safetensors", "a")
    with aprfmt.open(tmp_path) as model:
        assert list(model.tensors) == ["a"]


@pytest.mark.parametrize("names", [("x", "y"), (shard(1, 2)[:-12], "y"), (shard(1, 1)[:-12], shard(1, 2)[:-12])])
def test_unclear_weights_are_refused(tmp_path: Path, names: tuple[str, ...]) -> None:
    for name in names:
        write_shard(tmp_path / f"{name}.safetensors", "a")
    with pytest.raises(RefusedError, match="cannot tell") as caught:
        aprfmt.open(tmp_path)
    assert caught.value.hint


def test_a_surplus_shard_is_refused(tmp_path: Path) -> None:
    for name in (shard(1, 2), shard(2, 2), shard(3, 2)):
        write_shard(tmp_path / name, name)
    with pytest.raises(RefusedError):
        aprfmt.open(tmp_path)


def test_several_indexes_are_refused(folder: Path) -> None:
    (folder / INDEX).rename(folder / "a.safetensors.index.json")
    write_index(folder, {}, "b.safetensors.index.json")
    with pytest.raises(RefusedError, match="several"):
        aprfmt.open(folder)


@pytest.mark.parametrize(
    ("name", "hint"),
    [("m.gguf", "m.gguf"), ("m.apr", "m.apr"), ("pytorch_model.bin", "safetensors"), ("config.json", "expected")],
)
def test_other_folders_are_unknown(tmp_path: Path, name: str, hint: str) -> None:
    (tmp_path / name).write_bytes(b"{}")
    with pytest.raises(UnknownFormatError) as caught:
        aprfmt.open(tmp_path)
    assert caught.value.hint is not None
    assert hint in caught.value.hint
    assert caught.value.exit_code == 3


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        aprfmt.open(tmp_path / "none")


@pytest.mark.parametrize("text", ["{", "[]", "\xff", "[" * 100_000])
def test_a_damaged_config_is_reported_when_it_is_needed(folder: Path, text: str) -> None:
    (folder / "config.json").write_bytes(text.encode("latin-1"))
    with aprfmt.open(folder) as model, pytest.raises(CorruptError) as caught:
        _ = model.metadata
    assert caught.value.path == str(folder / "config.json")


def test_a_huge_config_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf_files, "MAX_CONFIG_BYTES", 16)
    with pytest.raises(LimitError):
        aprfmt.open(folder)


def test_json_files_are_measured_before_they_are_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = b'{"a": [[], [], []]}'
    readers: tuple[Callable[[], object], ...] = (
        lambda: hf_files.parse_object(raw, "x.json", "x.json"),
        lambda: read_json({"tokenizer.json": raw}, "tokenizer.json"),
    )
    for read in readers:
        with monkeypatch.context() as patch:
            assert read() == {"a": [[], [], []]}
            patch.setattr(jsonx, "_SURELY_SMALL", 0)
            patch.setattr(jsonx, "MAX_PARSED_BYTES", 100)
            with pytest.raises(LimitError, match="parsing 19 bytes of JSON may take"):
                read()


def test_files_worth_keeping(folder: Path) -> None:
    kept = [
        ".gitattributes",
        "LICENSE",
        "LICENSE.txt",
        "README.md",
        "added_tokens.json",
        "additional_chat_templates/tool_use.jinja",
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "merges.txt",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer.model",
        "tokenizer_config.json",
        "vocab.json",
    ]
    left = [
        "pytorch_model.bin",
        "tokenizer.bin",
        "m.gguf",
        "additional_chat_templates/x.txt",
        "sub/config.json",
        "a.png",
    ]
    for name in kept + left:
        (folder / name).parent.mkdir(exist_ok=True)
        if name != "config.json":
            (folder / name).write_text("x")
    with aprfmt.open(folder) as model:
        assert [path.as_posix() for path in hf_native(model).other_files] == kept


def test_weights_are_never_kept_as_files() -> None:
    names = ["tokenizer.safetensors", "vocab.pt", "model.onnx", "model.onnx_data", "merges.npz"]
    assert select_files(names) == []


def test_the_cache_layout_of_links_is_read(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    snapshot = tmp_path_factory.mktemp("snapshot")
    for path in folder.iterdir():
        (snapshot / path.name).symlink_to(path)
    with aprfmt.open(snapshot) as model:
        assert list(model.tensors) == ["a", "b", "c"]
        assert hf_native(model).other_files == [Path("config.json")]


def test_of_the_models_in_a_folder_the_one_called_model_is_named(tmp_path: Path) -> None:
    for name in ("ckpt-step-000100.apr", "model.apr"):
        (tmp_path / name).touch()
    with pytest.raises(UnknownFormatError) as caught:
        aprfmt.open(tmp_path)
    files = f"{tmp_path / 'model.apr'}, {tmp_path / 'ckpt-step-000100.apr'}"
    assert caught.value.hint == f"name one of its files: {files}"
