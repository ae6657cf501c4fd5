"""Bills of materials, judged by cyclonedx-python-lib against the schema of CycloneDX 1.6."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from demo_model import build
from materials_bill import check_bill

import aprfmt
from aprfmt.cli.main import run
from aprfmt.publishing.sbom import LINEAGE

CARD = """---
license: apache-2.0
base_model: acme/base-7b
datasets: [acme/chats]
---
# A model
"""
RUN = {
    "command": "distill",
    "config": {"lr": 1e-4, "steps": 10, "patience": None},
    "config_digest": "ab12",
    "data": "cd34",
    "data_sources": [{"name": "code.jsonl"}],
    "hardware": "8 x H100",
    "overrides": ["allow_same_arch"],
    "schema": "aprtrain.run/1",
    "student": {"name": "s.apr", "print": "ef56", "architecture": "llama", "parameters": 10, "made": None},
    "teacher": {"name": "t.gguf", "print": "0a1b", "architecture": "llama", "parameters": 20},
    "step": 10,
    "tokens": 5120,
    "versions": {"aprfmt": "0.1.0", "torch": "2.11"},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("sbom")
    build(root / "m.gguf")
    aprfmt.export_model(root / "m.gguf", root / "folder", format="hf")
    (root / "folder/README.md").write_text(CARD)
    aprfmt.import_model(root / "folder", root / "imported.apr", hash=True)
    with aprfmt.open(root / "imported.apr") as model:
        known = {**model.metadata, LINEAGE: RUN, "data_source": "acme/chats,code.jsonl"}
        aprfmt.rewrite_file(model, root / "trained.apr", metadata=aprfmt.dump_metadata(known))
    return {"gguf": root / "m.gguf", "folder": root / "folder"} | {
        name: root / f"{name}.apr" for name in ("imported", "trained")
    }


@pytest.mark.parametrize("name", ["gguf", "folder", "imported", "trained"])
def test_every_document_is_valid_and_the_same_again(models: dict[str, Path], name: str) -> None:
    document = aprfmt.sbom(models[name])
    check_bill(document)
    assert document == aprfmt.sbom(models[name])
    refs = [row["bom-ref"] for row in components(document)]
    assert len({*refs}) == len(refs)


def test_the_schema_is_not_passed_by_everything(models: dict[str, Path]) -> None:
    document = aprfmt.sbom(models["gguf"])
    with pytest.raises(AssertionError):
        check_bill(document | {"components": [{"type": "no such type", "name": "x"}]})


def components(document: Any, kind: str = "") -> list[dict[str, Any]]:
    return [row for row in document["components"] if row["bom-ref"].startswith(kind)]


def properties(row: Any) -> dict[str, str]:
    return {item["name"].removeprefix("aprfmt:"): item["value"] for item in row["properties"]}


def test_a_file_is_named_with_its_digest_and_dtypes(models: dict[str, Path]) -> None:
    model: Any = aprfmt.sbom(models["gguf"])["metadata"]["component"]  # type: ignore[call-overload,index]
    digest = hashlib.sha256(models["gguf"].read_bytes()).hexdigest()
    assert model["hashes"] == [{"alg": "SHA-256", "content": digest}]
    assert model["licenses"] == [{"license": {"id": "MIT"}}]
    assert model["modelCard"]["modelParameters"]["architectureFamily"] == "llama"
    found = properties(model)
    assert found["parameters"] == "93248"
    assert found["dtype:F16"].startswith("15 tensors")


def test_a_folder_names_its_files_data_and_base(models: dict[str, Path]) -> None:
    document = aprfmt.sbom(models["folder"])
    files = {row["name"]: row["hashes"][0]["content"] for row in components(document, "file:")}
    assert files == {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in models["folder"].iterdir()}
    assert [(row["group"], row["name"]) for row in components(document, "base:")] == [("Acme", "Base 7b")]
    assert [row["name"] for row in components(document, "data:")] == ["acme/chats"]


def test_an_imported_file_names_what_it_was_made_from(models: dict[str, Path]) -> None:
    from blake3 import blake3

    weights = (models["folder"] / "model.safetensors").read_bytes()
    found = {row["name"]: row.get("hashes") for row in components(aprfmt.sbom(models["imported"]), "source:")}
    assert found["model.safetensors"] == [{"alg": "BLAKE3", "content": blake3(weights).hexdigest()}]


def test_a_trained_model_names_its_run(models: dict[str, Path]) -> None:
    document: Any = aprfmt.sbom(models["trained"])
    workflow = document["formulation"][0]["workflows"][0]
    assert workflow["name"] == "apr distill"
    found = properties(workflow)
    assert (found["hardware"], found["data"], found["tokens"], found["config:lr"]) == (
        "8 x H100",
        "cd34",
        "5120",
        "0.0001",
    )
    assert found["version:torch"] == "2.11"
    assert "config:patience" not in found
    teacher = components(document, "teacher:")[0]
    assert (teacher["name"], properties(teacher)["print"]) == ("t.gguf", "0a1b")
    data = {row["name"]: row for row in components(document, "data:")}
    assert properties(data["code.jsonl"]) == {"data-key": "cd34"}
    assert "properties" not in data["acme/chats"]


def test_the_command_prints_or_writes_it(
    models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["sbom", str(models["gguf"])]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == aprfmt.sbom(models["gguf"])
    assert run(["sbom", str(models["gguf"]), "-o", str(tmp_path / "m.cdx.json"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["component_count"] == len(printed["components"])
    assert json.loads((tmp_path / "m.cdx.json").read_text()) == printed
    assert run(["sbom", str(models["gguf"]), "-o", str(tmp_path / "m.cdx.json")]) == 5
    assert run(["sbom", str(models["gguf"]), "-o", str(models["gguf"]), "--force"]) == 5
