"""Whatever a folder or a GGUF holds beside a plain decoder comes back from an `.apr`, every file the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import odd_models
import pytest
from carried_models import CONVERTED, FOLDERS, GGUFS

import aprfmt
from aprfmt.errors import AprError, CorruptError
from aprfmt.formats.gguf_fields import GgufType

Get = Callable[[str], Path]


def files(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", FOLDERS)
def test_every_file_of_a_folder_comes_back(name: str, carried_folder: Get, tmp_path: Path) -> None:
    source = carried_folder(name)
    report = aprfmt.import_model(source, tmp_path / "m.apr")
    assert report.lossless
    assert not report.losses
    back = aprfmt.export_model(tmp_path / "m.apr", tmp_path / "back", format="hf")
    assert back.lossless
    assert files(tmp_path / "back") == files(source)


@pytest.mark.parametrize("name", [name for name in (*CONVERTED, *GGUFS) if name not in ("unknown", "anonymous")])
def test_every_gguf_comes_back(name: str, carried_gguf: Get, tmp_path: Path) -> None:
    source = carried_gguf(name)
    report = aprfmt.import_model(source, tmp_path / "m.apr")
    assert report.lossless
    assert not report.losses
    aprfmt.export_model(tmp_path / "m.apr", tmp_path / "back.gguf")
    assert (tmp_path / "back.gguf").read_bytes() == source.read_bytes()


@pytest.mark.parametrize("name", ["unknown", "anonymous"])
def test_a_gguf_of_an_unknown_architecture_is_refused_unless_it_may_keep_its_names(
    name: str, carried_gguf: Get, tmp_path: Path
) -> None:
    source = carried_gguf(name)
    with pytest.raises(AprError, match="architecture"):
        aprfmt.import_model(source, tmp_path / "m.apr")
    aprfmt.import_model(source, tmp_path / "m.apr", allow_unmapped=True)
    aprfmt.export_model(tmp_path / "m.apr", tmp_path / "back.gguf")
    assert (tmp_path / "back.gguf").read_bytes() == source.read_bytes()


# --- draft layers ---


def _stored(path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    with aprfmt.open(path) as model:
        return {name: (t.dtype, t.shape, bytes(t.raw())) for name, t in model.tensors.items()}


def _own_keys(path: Path) -> dict[str, object]:
    """The keys of the network in a GGUF."""
    with aprfmt.open(path) as model:
        word = model.metadata["general.architecture"]
        return {key: value for key, value in model.metadata.items() if key.startswith(f"{word}.")}


@pytest.mark.parametrize("name", ["glm4_moe_mtp", "glm4_moe_lite_mtp", "deepseek_v3_mtp"])
def test_a_gguf_has_the_draft_layers_that_the_converter_writes(
    name: str, carried_folder: Get, carried_gguf: Get, tmp_path: Path
) -> None:
    peer = carried_gguf(name)
    aprfmt.import_model(carried_folder(name), tmp_path / "m.apr")
    for source in (carried_folder(name), tmp_path / "m.apr"):
        report = aprfmt.export_model(source, tmp_path / "m.gguf", dtype="f16", pre="smollm", force=True)
        assert _stored(tmp_path / "m.gguf") == _stored(peer)
        left = any("MTP layers" in loss for loss in report.losses)
        assert left is (name == "deepseek_v3_mtp")
        keys = _own_keys(tmp_path / "m.gguf")
        # The converter leaves the gating function to llama.cpp, whose default depends on the sizes.
        assert {**keys, **_own_keys(peer)} == keys


@pytest.mark.parametrize("name", ["glm4_moe_mtp", "glm4_moe_lite_mtp"])
def test_a_folder_gets_the_draft_layers_of_a_gguf(
    name: str, carried_folder: Get, carried_gguf: Get, tmp_path: Path
) -> None:
    source = carried_gguf(name)
    aprfmt.import_model(source, tmp_path / "m.apr")
    for i, path in enumerate((source, tmp_path / "m.apr")):
        report = aprfmt.export_model(path, tmp_path / f"{i}", format="hf", dtype="f16")
        assert not any("behind" in loss for loss in report.losses)
        aprfmt.export_model(carried_folder(name), tmp_path / f"wanted-{i}.safetensors", dtype="f16")
        assert _stored(tmp_path / f"{i}") == _stored(tmp_path / f"wanted-{i}.safetensors")
        config = json.loads((tmp_path / f"{i}" / "config.json").read_text())
        assert (config["num_hidden_layers"], config["num_nextn_predict_layers"]) == (3, 1)


def test_a_draft_layer_without_names_in_a_checkpoint_stays_behind(carried_gguf: Get, tmp_path: Path) -> None:
    odd = odd_models.read(carried_gguf("glm4_moe_mtp"), "gguf")
    (known,) = (tensor for tensor in odd.tensors if tensor.name == "blk.3.nextn.enorm.weight")
    odd.tensors.append(replace(known, name="blk.3.nextn.unheard_of.weight"))
    report = aprfmt.export_model(odd.write(tmp_path), tmp_path / "folder", format="hf")
    assert any(loss.startswith("1 tensor of the MTP layers (blk.3.*") for loss in report.losses)
    assert not any(tensor.startswith("blk.") for tensor in _stored(tmp_path / "folder"))


@pytest.mark.parametrize("name", ["glm4_moe_mtp", "glm4_moe_lite_mtp", "qwen3_5_mtp"])
def test_draft_layers_are_quantized_with_the_others(name: str, carried_gguf: Get, tmp_path: Path) -> None:
    source = carried_gguf(name)
    aprfmt.import_model(source, tmp_path / "m.apr")
    for path in (source, tmp_path / "m.apr"):
        out = tmp_path / f"{path.suffix[1:]}-q.gguf"
        aprfmt.quantize_model(path, out, "q4_k_m")
        assert _stored(out).keys() == _stored(source).keys()
        assert _own_keys(out) == _own_keys(source)
        eh_proj = next(tensor for tensor in _stored(out) if tensor.endswith("nextn.eh_proj.weight"))
        assert _stored(out)[eh_proj][0] not in ("F16", "F32")
    assert _stored(tmp_path / "gguf-q.gguf") == _stored(tmp_path / "apr-q.gguf")


@pytest.mark.parametrize("name", [*CONVERTED, *GGUFS])
def test_nothing_stumbles_over_what_is_no_plain_decoder(name: str, carried_gguf: Get, tmp_path: Path) -> None:
    source = carried_gguf(name)
    aprfmt.import_model(source, tmp_path / "m.apr", allow_unmapped=name in ("unknown", "anonymous"))
    for path in (source, tmp_path / "m.apr"):
        assert aprfmt.validate(path).passed is not (name == "unknown" and path.suffix == ".apr")
        assert aprfmt.inspect(path).to_json()["tensor_count"]
    assert not any(d.kind == "tensor" for d in aprfmt.diff(source, tmp_path / "m.apr", values=True).differences)
    if name in GGUFS or "mmproj" in name or "only" in name:
        why = "base model was not found" if name == "lora" else r"no config\.json mapping"
        with pytest.raises(AprError, match=why) as caught:
            aprfmt.export_model(tmp_path / "m.apr", tmp_path / "folder", format="hf")
        assert "None" not in caught.value.message


def test_more_draft_layers_than_layers_are_refused(carried_gguf: Get, tmp_path: Path) -> None:
    odd = odd_models.read(carried_gguf("glm4_moe_mtp"), "gguf")
    odd.set("glm4moe.nextn_predict_layers", GgufType.UINT32, 5)
    with pytest.raises(CorruptError, match=r"nextn_predict_layers is 5, but the network has 4 layers"):
        aprfmt.import_model(odd.write(tmp_path), tmp_path / "m.apr")


def test_an_apr_comes_back_from_its_gguf_with_draft_layers(carried_folder: Get, tmp_path: Path) -> None:
    aprfmt.import_model(carried_folder("glm4_moe_mtp"), tmp_path / "m.apr", dtype="bf16")
    aprfmt.export_model(tmp_path / "m.apr", tmp_path / "m.gguf", pre="smollm")
    aprfmt.import_model(tmp_path / "m.gguf", tmp_path / "back.apr")
    found = _stored(tmp_path / "back.apr")
    assert found == _stored(tmp_path / "m.apr")
    assert found["model.layers.3.enorm.weight"][0] == "BF16"
