"""The record of the source files: exact where it is claimed, harmless where it was made up."""

from __future__ import annotations

import base64
import json
import struct
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import arch_models
import pytest
from gguf import GGUFValueType
from plain_models import CONFIG, GGUF_KEYS, METADATA, gguf_names, weights, write_folder, write_gguf
from tiny_models import BYTES, write_byte_tokenizer

import aprfmt
from aprfmt import limits
from aprfmt.errors import LimitError

TEXT = json.dumps(CONFIG).encode()
CONFIG_FILE = {"name": "config.json", "size": len(TEXT), "segments": [["b", len(TEXT)]]}
QUERY = "model.layers.0.self_attn.q_proj.weight"


def entry(name: str, size: int, *segments: list[Any]) -> dict[str, Any]:
    return {"name": name, "size": size, "segments": list(segments)}


@pytest.mark.parametrize(
    ("files", "literals"),
    [
        ([entry("config.json", 1 << 40, ["z", 1 << 40])], b""),
        ([entry("config.json", 3, ["b", 3])], b"abc"),
        ([entry("config.json", 3, ["b", 3])], b"[1]"),
        ([entry("config.json", len(TEXT) - 5, ["b", len(TEXT)], ["z", -5])], TEXT),
        ([CONFIG_FILE, entry("a", 1, ["z", 1]), entry("a/b", 1, ["z", 1])], TEXT),
        ([CONFIG_FILE, entry("d" * 300 + "/b", 1, ["z", 1])], TEXT),
        ([CONFIG_FILE, entry("w", 64 * 64 * 4, ["t", QUERY, "F32", "F32", "rope_permute", 0])], TEXT),
        ([CONFIG_FILE, entry("w", 64 * 64 * 4, ["t", QUERY, "F32", "F32", "shuffle", 2])], TEXT),
        ([], b""),
    ],
)
@pytest.mark.parametrize("form", ["hf", "gguf"])
def test_a_crafted_record_is_refused(files: list[Any], literals: bytes, form: str, tmp_path: Path) -> None:
    record = {"format": form, "files": files, "literals": base64.b64encode(zlib.compress(literals)).decode()}
    aprfmt.save_file(weights(), tmp_path / "m.apr", METADATA | {"aprfmt.source": record})
    with pytest.raises(aprfmt.AprError):
        aprfmt.export_model(tmp_path / "m.apr", tmp_path / "out", format=form)
    assert [path.name for path in tmp_path.iterdir()] == ["m.apr"]


@pytest.mark.parametrize(
    "name",
    [
        "a/" * 1000 + "b",
        "a/" * limits.MAX_PATH_PARTS + "b",
        "a/" * 200_000 + "b",
        "ab/" * 2 + "c" * limits.MAX_PATH_CHARS,
    ],
    ids=["1000", "one more", "200000", "long"],
)
@pytest.mark.parametrize("form", ["hf", "apr"])
def test_a_path_without_end_is_refused(name: str, form: str, tmp_path: Path) -> None:
    record = {
        "format": "hf",
        "files": [CONFIG_FILE, entry(name, 1, ["z", 1])],
        "literals": base64.b64encode(zlib.compress(TEXT)).decode(),
    }
    aprfmt.save_file(weights(), tmp_path / "m.apr", METADATA | {"aprfmt.source": record})
    with pytest.raises(LimitError, match="parts"):
        aprfmt.convert_model(tmp_path / "m.apr", tmp_path / "out", format=form)
    assert [path.name for path in tmp_path.iterdir()] == ["m.apr"]


def test_a_crafted_alignment_is_refused(tmp_path: Path) -> None:
    keys = GGUF_KEYS | {"general.alignment": (GGUFValueType.STRING, "x")}
    image = write_gguf(tmp_path / "s.gguf", {}, keys).read_bytes()
    record = {
        "format": "gguf",
        "files": [entry("s.gguf", len(image), ["b", len(image)])],
        "literals": base64.b64encode(zlib.compress(image)).decode(),
    }
    aprfmt.save_file(weights(), tmp_path / "m.apr", METADATA | {"aprfmt.source": record, "name": "edited"})
    with pytest.raises(aprfmt.AprError):
        aprfmt.export_model(tmp_path / "m.apr", tmp_path / "out.gguf")


def test_a_head_of_its_own_in_a_model_declared_tied_comes_back(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "f", tie_word_embeddings=True)
    assert aprfmt.import_model(folder, tmp_path / "m.apr").lossless
    assert aprfmt.export_model(tmp_path / "m.apr", tmp_path / "back").lossless
    for path in folder.iterdir():
        assert (tmp_path / "back" / path.name).read_bytes() == path.read_bytes()


@pytest.mark.parametrize(
    "key",
    [
        ("general.version", GGUFValueType.UINT32, 3),
        ("llama.rope.scaling.type", GGUFValueType.STRING, "longrope"),
        ("general.name", GGUFValueType.STRING, "QQQQ"),
        ("tokenizer.chat_templates", GGUFValueType.ARRAY, ["tool_use", "rag"]),
    ],
    ids=lambda key: key[0],
)
def test_a_gguf_with_an_unusual_key_comes_back(key: tuple[str, Any, Any], tmp_path: Path) -> None:
    keys = GGUF_KEYS | {key[0]: key[1:]}
    if key[0] == "tokenizer.chat_templates":
        keys |= {
            "tokenizer.ggml.model": (GGUFValueType.STRING, "llama"),
            "tokenizer.ggml.tokens": (GGUFValueType.ARRAY, ["a", "b"]),
            "tokenizer.chat_template.tool_use": (GGUFValueType.STRING, "T"),
            "tokenizer.chat_template.rag": (GGUFValueType.STRING, "R"),
        }
    source = write_gguf(tmp_path / "s.gguf", {} if "token" in key[0] else gguf_names(weights()), keys)
    source.write_bytes(source.read_bytes().replace(b"QQQQ", b"\xff\xfeQQ"))  # a name that is not UTF-8
    assert aprfmt.import_model(source, tmp_path / "m.apr").lossless
    assert aprfmt.export_model(tmp_path / "m.apr", tmp_path / "back.gguf").lossless
    assert (tmp_path / "back.gguf").read_bytes() == source.read_bytes()


@pytest.mark.parametrize("n_keys", [0, len(GGUF_KEYS)])
def test_a_gguf_of_a_vocabulary_or_without_one_comes_back(n_keys: int, tmp_path: Path) -> None:
    keys = dict(list(GGUF_KEYS.items())[:n_keys])
    if not n_keys:
        keys["tokenizer.ggml.model"] = (GGUFValueType.STRING, "llama")
        keys["tokenizer.ggml.tokens"] = (GGUFValueType.ARRAY, ["a", "b"])
    source = write_gguf(tmp_path / "s.gguf", gguf_names(weights()) if n_keys else {}, keys)
    assert aprfmt.import_model(source, tmp_path / "m.apr").lossless
    aprfmt.export_model(tmp_path / "m.apr", tmp_path / "back.gguf")
    assert (tmp_path / "back.gguf").read_bytes() == source.read_bytes()


def test_foreign_bytes_behind_the_tensors_are_bounded(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("aprfmt.convert.source_manifest_writer.MAX_LITERAL_BYTES", 1 << 16)
    assert limits.MAX_LITERAL_BYTES * 4 // 3 < limits.MAX_METADATA_BYTES
    source = write_gguf(tmp_path / "s.gguf", gguf_names(weights()))
    source.write_bytes(source.read_bytes() + bytes(1 << 20))
    aprfmt.import_model(source, tmp_path / "zeros.apr")
    source.write_bytes(source.read_bytes() + b"x" * (1 << 17))
    with pytest.raises(aprfmt.AprError, match="neither tensors nor vocabulary"):
        aprfmt.import_model(source, tmp_path / "m.apr")


@pytest.mark.parametrize("name", ["../evil", "/evil", "a/../../evil", "a\\evil", "", "."])
def test_a_record_that_leaves_its_folder_is_refused(name: str, tmp_path: Path) -> None:
    files = [CONFIG_FILE, entry(name, 1, ["z", 1])]
    record = {"format": "hf", "files": files, "literals": base64.b64encode(zlib.compress(TEXT)).decode()}
    aprfmt.save_file(weights(), tmp_path / "m.apr", METADATA | {"aprfmt.source": record})
    with pytest.raises(aprfmt.AprError, match=r"source manifest lists .* not a plain relative path"):
        aprfmt.export_model(tmp_path / "m.apr", tmp_path / "out")


@pytest.mark.parametrize(
    ("segment", "code"),
    [(["b", 1 << 40], "limit"), (["b", 1 << 20], "corrupt"), (["t", QUERY, "F32", "F16"], "corrupt")],
    ids=["literals beyond the limit", "fewer literals", "a narrower dtype"],
)
def test_a_record_that_asks_for_what_is_not_there_is_refused(segment: list[Any], code: str, tmp_path: Path) -> None:
    n_bytes = segment[1] if segment[0] == "b" else 64 * 64 * 2
    record = {"format": "hf", "files": [CONFIG_FILE, entry("w", n_bytes, segment)]}
    record["literals"] = base64.b64encode(zlib.compress(TEXT)).decode()
    aprfmt.save_file(weights(), tmp_path / "m.apr", METADATA | {"aprfmt.source": record})
    with pytest.raises(aprfmt.AprError) as caught:
        aprfmt.export_model(tmp_path / "m.apr", tmp_path / "out")
    assert (caught.value.code, caught.value.exit_code) == (code, 4)


@pytest.mark.parametrize("change", ["", "size", "dtype"])
def test_a_record_that_no_longer_fits_is_passed_over(change: str, tmp_path: Path) -> None:
    """It says what was imported; what has been made of the file since is another model."""
    aprfmt.import_model(write_folder(tmp_path / "f"), tmp_path / "m.apr")
    with aprfmt.open(tmp_path / "m.apr") as model:
        metadata = dict(model.metadata)
        tensors = {tensor.name: tensor.numpy().copy() for tensor in model.tensors.values()}
    if change == "size":
        metadata["aprfmt.source"]["files"][-1]["size"] += 1
    elif change == "dtype":
        tensors[QUERY] = tensors[QUERY].astype("<f2" if tensors[QUERY].dtype == "<f4" else "<f4")
    aprfmt.save_file(tensors, tmp_path / "m.apr", metadata, force=True)
    assert aprfmt.export_model(tmp_path / "m.apr", tmp_path / "out").lossless is not bool(change)


def test_mapped_values_that_round_are_kept_as_they_were(tmp_path: Path) -> None:
    """Gemma's norms are stored plus one in a GGUF: 1e-9 minus one is -1, and plus one it is 0."""
    (tmp_path / "tokenizer").mkdir()
    write_byte_tokenizer(tmp_path / "tokenizer")
    case = replace(arch_models.find_case("gemma"), tokenizer=BYTES)
    arch_models.build(case, tmp_path / "f", {BYTES: tmp_path / "tokenizer"})
    aprfmt.export_model(tmp_path / "f", tmp_path / "m.gguf", pre="gpt-2")
    with aprfmt.open(tmp_path / "m.gguf") as model:
        norm = model.tensors["blk.0.attn_norm.weight"]
        assert norm.dtype == "F32"
    with open(tmp_path / "m.gguf", "r+b") as file:
        file.seek(norm.offset)
        file.write(struct.pack("<f", 1e-9))
    aprfmt.import_model(tmp_path / "m.gguf", tmp_path / "m.apr")
    aprfmt.export_model(tmp_path / "m.apr", tmp_path / "back.gguf")
    assert (tmp_path / "back.gguf").read_bytes() == (tmp_path / "m.gguf").read_bytes()
