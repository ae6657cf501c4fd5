"""Cards, config and GGUF keys into typed fields and out again, with the keys of llama.cpp's converter."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from natives import gguf_parts

import aprfmt
from aprfmt.errors import UsageError
from aprfmt.formats import gguf_write
from aprfmt.formats.gguf_fields import GgufType
from aprfmt.io.pipe import FileLayout
from aprfmt.provenance import model_card, provenance
from aprfmt.provenance.model_card import parse_card

Folder = Callable[..., Path]

CARD = """---
license: other
license_name: tiny-community-license
license_link: https://example.org/LICENSE
model_name: Tiny Chat
model_creator: Some One
model_organization: Example Lab
model_version: v1.1
model_description: A tiny model for tests
model_basename: tiny
model_finetune: Chat
model_url: https://example.org/tiny
model_doi: 10.1000/182
model_uuid: 123e4567-e89b-12d3-a456-426614174000
model_repo_url: https://example.org/tiny.git
base_model:
- Qwen/Qwen2.5-Base
- https://huggingface.co/some-lab/other-model
- https://example.org/elsewhere
language:
- en
- no
tags:
- chat
- tiny
pipeline_tag: text-generation
datasets:
- HuggingFaceTB/smoltalk
- wikitext
- https://huggingface.co/some-lab/some-data
---
# Tiny
"""

# What convert_hf_to_gguf.py of llama.cpp (as in llama-cpp-python 0.3.36) wrote for a folder with this card,
# but for the size label, which is that of the 648 elements here.
CONVERTER_KEYS = [
    ("general.name", "STRING", "Tiny Chat"),
    ("general.author", "STRING", "Some One"),
    ("general.version", "STRING", "v1.1"),
    ("general.organization", "STRING", "Example Lab"),
    ("general.finetune", "STRING", "Chat"),
    ("general.basename", "STRING", "tiny"),
    ("general.description", "STRING", "A tiny model for tests"),
    ("general.size_label", "STRING", "0.6K"),
    ("general.license", "STRING", "other"),
    ("general.license.name", "STRING", "tiny-community-license"),
    ("general.license.link", "STRING", "https://example.org/LICENSE"),
    ("general.source.url", "STRING", "https://example.org/tiny"),
    ("general.source.doi", "STRING", "10.1000/182"),
    ("general.source.uuid", "STRING", "123e4567-e89b-12d3-a456-426614174000"),
    ("general.source.repo_url", "STRING", "https://example.org/tiny.git"),
    ("general.base_model.count", "UINT32", 3),
    ("general.base_model.0.name", "STRING", "Qwen2.5 Base"),
    ("general.base_model.0.organization", "STRING", "Qwen"),
    ("general.base_model.0.repo_url", "STRING", "https://huggingface.co/Qwen/Qwen2.5-Base"),
    ("general.base_model.1.name", "STRING", "Other Model"),
    ("general.base_model.1.organization", "STRING", "Some Lab"),
    ("general.base_model.1.repo_url", "STRING", "https://huggingface.co/some-lab/other-model"),
    ("general.base_model.2.repo_url", "STRING", "https://example.org/elsewhere"),
    ("general.dataset.count", "UINT32", 3),
    ("general.dataset.0.name", "STRING", "Smoltalk"),
    ("general.dataset.0.organization", "STRING", "HuggingFaceTB"),
    ("general.dataset.0.repo_url", "STRING", "https://huggingface.co/HuggingFaceTB/smoltalk"),
    ("general.dataset.1.name", "STRING", "Wikitext"),
    ("general.dataset.2.name", "STRING", "Some Data"),
    ("general.dataset.2.organization", "STRING", "Some Lab"),
    ("general.dataset.2.repo_url", "STRING", "https://huggingface.co/some-lab/some-data"),
    ("general.tags", "ARRAY of STRING", ["chat", "tiny", "text-generation"]),
    ("general.languages", "ARRAY of STRING", ["en", "no"]),
]
TYPED = {
    "name": "Tiny Chat",
    "description": "A tiny model for tests",
    "author": "Some One",
    "license": "other",
    "version": "v1.1",
    "source": "https://example.org/tiny",
    "data_source": "HuggingFaceTB/smoltalk,wikitext,some-lab/some-data",
}
SET_BY_OTHERS = ("general.architecture", "general.type", "general.file_type", "general.quantization_version")


def general_keys(path: Path) -> list[tuple[str, str, Any]]:
    with aprfmt.open(path) as model:
        entries = gguf_parts(model)[0].kv.entries
        return [
            (key, " of ".join(t.name for t in (entry.type, entry.elem_type) if t is not None), model.metadata[key])
            for key, entry in entries.items()
            if key.startswith("general.") and key not in SET_BY_OTHERS
        ]  # fmt: skip


def typed(path: Path) -> dict[str, Any]:
    with aprfmt.open(path) as model:
        keys = (*provenance.INFO_FIELDS, provenance.GENERAL)
        return {key: model.metadata[key] for key in keys if model.metadata.get(key) is not None}


def sha(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def write_gguf(path: Path, *keys: tuple[str, Any, Any]) -> Path:
    start = [("general.architecture", GgufType.STRING, "llama")]
    layout = FileLayout(path.name, gguf_write.layout([*start, *keys], []))
    path.write_bytes(b"".join(bytes(getattr(s, "data", None) or bytes(s.n_bytes)) for s in layout.segments))
    return path


# --- cards ---


def test_a_card_fills_the_typed_fields_and_gguf_gets_the_converters_keys(folder: Folder, tmp_path: Path) -> None:
    source = folder(card=CARD)
    report = aprfmt.import_model(source, tmp_path / "m.apr")
    assert any("'other' (tiny-community-license)" in w for w in report.warnings)
    found = typed(tmp_path / "m.apr")
    assert {key: value for key, value in found.items() if key != provenance.GENERAL} == TYPED
    aprfmt.export_model(tmp_path / "m.apr", tmp_path / "m.gguf", no_tokenizer=True)
    assert general_keys(tmp_path / "m.gguf") == CONVERTER_KEYS
    aprfmt.convert_model(source, tmp_path / "direct.gguf", no_tokenizer=True)
    assert general_keys(tmp_path / "direct.gguf") == CONVERTER_KEYS


def test_the_same_metadata_comes_back_from_gguf_and_from_a_folder(folder: Folder, tmp_path: Path) -> None:
    aprfmt.import_model(folder(card=CARD), tmp_path / "m.apr")
    aprfmt.export_model(tmp_path / "m.apr", tmp_path / "m.gguf", no_tokenizer=True)
    aprfmt.import_model(tmp_path / "m.gguf", tmp_path / "g.apr")
    assert typed(tmp_path / "g.apr") == typed(tmp_path / "m.apr")
    aprfmt.export_model(tmp_path / "g.apr", tmp_path / "hf")
    assert (tmp_path / "hf" / "README.md").is_file()
    aprfmt.import_model(tmp_path / "hf", tmp_path / "h.apr")
    assert typed(tmp_path / "h.apr") == typed(tmp_path / "g.apr")


def test_a_written_card_reads_as_hugging_face_spells_it(folder: Folder, tmp_path: Path) -> None:
    yaml = pytest.importorskip("yaml")
    aprfmt.convert_model(folder(card=CARD), tmp_path / "m.gguf", no_tokenizer=True)
    aprfmt.convert_model(tmp_path / "m.gguf", tmp_path / "hf")
    front = yaml.safe_load((tmp_path / "hf" / "README.md").read_text().split("---\n")[1])
    assert front["license"] == "other"
    assert front["license_name"] == "tiny-community-license"
    assert front["base_model"] == ["Qwen/Qwen2.5-Base", "some-lab/other-model", "https://example.org/elsewhere"]
    assert front["language"] == ["en", "no"]
    assert front["tags"] == ["chat", "tiny"]
    assert front["pipeline_tag"] == "text-generation"
    assert front["datasets"] == ["HuggingFaceTB/smoltalk", "Wikitext", "some-lab/some-data"]


@pytest.mark.parametrize("card", [None, CARD, "# only words\n", "---\nlicense: [\n---\n"])
def test_a_folder_comes_back_as_it_was(card: str | None, folder: Folder, tmp_path: Path) -> None:
    source = folder(card=card, _name_or_path="some-lab/tiny-llama")
    report = aprfmt.import_model(source, tmp_path / "m.apr")
    assert report.lossless
    assert any("README.md" in w for w in report.warnings) is (card is not None and "[" in card)
    assert aprfmt.export_model(tmp_path / "m.apr", tmp_path / "back").lossless
    assert {p.name: sha(p) for p in source.iterdir()} == {p.name: sha(p) for p in (tmp_path / "back").iterdir()}


def test_flags_win_and_take_the_old_licence_along(folder: Folder, tmp_path: Path) -> None:
    source = folder(card=CARD)
    aprfmt.import_model(
        source, tmp_path / "m.apr", license="apache-2.0", data_source="mine", data_license="LicenseRef-x"
    )
    found = typed(tmp_path / "m.apr")
    assert (found["license"], found["data_source"], found["data_license"]) == ("Apache-2.0", "mine", "LicenseRef-x")
    assert not {"license.name", "license.link"} & set(found[provenance.GENERAL])
    report = aprfmt.export_model(tmp_path / "m.apr", tmp_path / "back")
    assert sha(tmp_path / "back" / "README.md") == sha(source / "README.md")
    assert sum("README.md is unchanged" in w for w in report.warnings) == 2


def test_stamping_a_folder_without_a_card_gives_it_one(folder: Folder, tmp_path: Path) -> None:
    aprfmt.import_model(folder(), tmp_path / "m.apr")
    stamped = aprfmt.stamp(tmp_path / "m.apr", tmp_path / "s.apr", license="mit", data_source="teacher-only")
    assert stamped.stamped == {"license": "MIT", "data_source": "teacher-only"}
    assert not aprfmt.export_model(tmp_path / "s.apr", tmp_path / "back").lossless
    front = model_card.from_card(parse_card((tmp_path / "back" / "README.md").read_bytes())[0])[0]
    assert (front["license"], front["data_source"]) == ("MIT", "teacher-only")


@pytest.mark.parametrize("field", ["license", "data_license", "data_source"])
def test_an_empty_flag_is_refused_and_nothing_is_written(field: str, folder: Folder, tmp_path: Path) -> None:
    options: dict[str, Any] = {field: " "}
    with pytest.raises(aprfmt.AprError) as error:
        aprfmt.import_model(folder(), tmp_path / "m.apr", **options)
    assert error.value.code == "usage"
    assert not (tmp_path / "m.apr").exists()


# --- names ---


@pytest.mark.parametrize(
    ("name", "expected"),
    [("tiny-llama-1.1b-v1.0", "Tiny Llama 1.1b v1.0"), ("Qwen2.5-0.5B-Instruct", "Qwen2.5 0.5B Instruct"), ("a", "A")],
)
def test_titles_are_llama_cpps(name: str, expected: str) -> None:
    assert model_card.title(name) == expected


def test_the_name_comes_from_card_config_cache_or_folder(folder: Folder, tmp_path: Path) -> None:
    def info(path: Path) -> provenance.Provenance:
        with aprfmt.open(path) as model:
            return provenance.read(model)

    assert info(folder("tiny-llama-v1.0")).info == {"name": "Tiny Llama v1.0"}
    named = info(folder("x", _name_or_path="some-lab/tiny-llama"))
    assert named.info["name"] == "Tiny Llama"
    assert named.general is not None
    assert named.general["organization"] == "Some Lab"
    for path in ("/home/me/x", "./x", "", ".", "a/b/c"):
        assert info(folder(f"y{len(path)}", _name_or_path=path)).info["name"] == f"Y{len(path)}"
    cached = folder("models--some-lab--tiny-llama/snapshots/" + "0123456789" * 4)
    assert info(cached).info == {"name": "Tiny Llama", "source": "https://huggingface.co/some-lab/tiny-llama"}
    assert info(cached / "model.safetensors").info == info(cached).info
    bare = tmp_path / "weights.safetensors"
    bare.write_bytes((cached / "model.safetensors").read_bytes())
    assert info(bare).info == {"name": "weights"}


@pytest.mark.parametrize(
    ("n_params", "label"),
    [(494_032_768, "494M"), (1_543_714_304, "1.5B"), (134_515_008, "135M"), (7_615_616_512, "7.6B"), (648, "0.6K"),
     (999_999_999, "1000M"), (12_345, "12K"), (1, "0.00K"), (2_000_000_000_000, "2.0T")],
)  # fmt: skip
def test_size_labels(n_params: int, label: str) -> None:
    assert provenance.size_label(n_params) == label


# --- GGUF ---

STRINGS = (GgufType.ARRAY, GgufType.STRING)


@pytest.mark.parametrize(
    "keys",
    [
        [("general.name", GgufType.UINT32, 5)],
        [("general.name", GgufType.STRING, "")],
        [("general.license", GgufType.STRING, "llama3.2"), ("general.license.name", GgufType.STRING, "x")],
        [("general.license.name", GgufType.STRING, "x")],
        [("general.tags", GgufType.STRING, "a"), ("general.languages", STRINGS, [])],
        [("general.datasets", STRINGS, ["a/b", "c"])],
        [("general.dataset.count", GgufType.UINT32, 4_000_000_000)],
        [("general.dataset.7.name", GgufType.STRING, "x"), ("general.dataset.0.odd", GgufType.STRING, "x")],
        [("general.base_model.count", GgufType.STRING, "x"), ("general.base_model.0.name", GgufType.BOOL, True)],
        [("general.url", GgufType.STRING, "u"), ("general.quantized_by", GgufType.STRING, "q")],
        [("general.name", GgufType.STRING, "bad \udcff byte"), ("general.tags", STRINGS, ["\udcfe"])],
    ],
    ids=lambda keys: keys[0][0],
)
def test_any_gguf_comes_back_as_the_same_file(keys: list[Any], tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "m.gguf", *keys)
    aprfmt.import_model(source, tmp_path / "m.apr")
    aprfmt.export_model(tmp_path / "m.apr", tmp_path / "back.gguf")
    assert sha(tmp_path / "back.gguf") == sha(source)


def test_the_earlier_key_of_data_sets_is_read(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", ("general.datasets", STRINGS, ["a/b", "https://huggingface.co/datasets/c/d"]))
    aprfmt.import_model(tmp_path / "m.gguf", tmp_path / "m.apr")
    assert typed(tmp_path / "m.apr")["data_source"] == "a/b,c/d"


def test_an_edited_licence_changes_its_keys_only(tmp_path: Path) -> None:
    keys = [
        ("general.license", GgufType.STRING, "other"),
        ("general.license.name", GgufType.STRING, "x"),
        ("general.tags", STRINGS, ["a"]),
        ("general.mine", GgufType.BOOL, True),
    ]
    aprfmt.import_model(write_gguf(tmp_path / "m.gguf", *keys), tmp_path / "m.apr")
    aprfmt.stamp(tmp_path / "m.apr", in_place=True, license="MIT")
    aprfmt.export_model(tmp_path / "m.apr", tmp_path / "back.gguf", no_tokenizer=True)
    assert [(k, v) for k, _, v in general_keys(tmp_path / "back.gguf")] == [
        ("general.license", "MIT"),
        ("general.tags", ["a"]),
        ("general.mine", True),
    ]


def test_an_apr_that_says_nothing_of_them_loses_no_key(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "m.gguf", ("general.tags", STRINGS, ["a"]), ("general.url", GgufType.STRING, "u"))
    aprfmt.import_model(source, tmp_path / "m.apr")
    with aprfmt.open(tmp_path / "m.apr") as model:
        values = {key: value for key, value in model.metadata.items() if key != provenance.GENERAL}
    aprfmt.save_file({}, tmp_path / "old.apr", metadata=values)
    aprfmt.export_model(tmp_path / "old.apr", tmp_path / "back.gguf")
    assert sha(tmp_path / "back.gguf") == sha(source)


@pytest.mark.parametrize(
    "value",
    [5, [], "x", {"tags": "x"}, {"tags": [5, None, "a"]}, {"datasets": [5, {}, {"name": 5}, {"name": "n", "x": "y"}]},
     {"license.name": ["x"]}, {"base_models": {"name": "x"}}],
    ids=json.dumps,
)  # fmt: skip
def test_a_crafted_record_does_no_harm(value: Any, folder: Folder, tmp_path: Path) -> None:
    aprfmt.import_model(folder(), tmp_path / "m.apr")
    with aprfmt.open(tmp_path / "m.apr") as model:
        values = dict(model.metadata) | {provenance.GENERAL: value}
        tensors = {name: tensor.numpy() for name, tensor in model.tensors.items()}
    aprfmt.save_file(tensors, tmp_path / "c.apr", metadata=values)
    aprfmt.export_model(tmp_path / "c.apr", tmp_path / "c.gguf", no_tokenizer=True)
    aprfmt.export_model(tmp_path / "c.apr", tmp_path / "c")
    aprfmt.stamp(tmp_path / "c.apr", in_place=True, license="MIT")
    assert {key for key, _, _ in general_keys(tmp_path / "c.gguf")} <= {
        *("general.name", "general.tags", "general.dataset.count", "general.dataset.0.name")
    }


def test_a_card_with_a_lone_surrogate_is_written_with_a_replacement(folder: Folder, tmp_path: Path) -> None:
    aprfmt.import_model(folder(card='---\nauthor: "a\\ud800b"\nlicense: mit\n---\n'), tmp_path / "m.apr")
    assert typed(tmp_path / "m.apr")["author"] == "a\ufffdb"


def test_a_licence_set_as_a_key_is_checked_too(folder: Folder, tmp_path: Path) -> None:
    aprfmt.import_model(folder(), tmp_path / "m.apr")
    with pytest.raises(UsageError):
        aprfmt.stamp(tmp_path / "m.apr", tmp_path / "s.apr", set={"license": "unknown"})
    aprfmt.stamp(tmp_path / "m.apr", tmp_path / "s.apr", set={"license": "mit"})
    assert typed(tmp_path / "s.apr")["license"] == "MIT"
