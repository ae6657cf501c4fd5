"""Checkpoints packed as they are published: their GGUF beside that of llama.cpp's converter, and the way back."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from arch_models import find_case, relative_error, token_ids, top1_equal, transformers_logits
from conformance_explained import explain
from conformance_steps import LLAMA_TOLERANCE, list_keys
from converter_peer import ConverterPeer, unchanged_output
from llama_peer import LlamaPeer
from packed_checkpoints import PACKED, write_packed

import aprfmt
from aprfmt.codecs.recode import encode

pytest.importorskip("torch")

by_name = pytest.mark.parametrize("name", PACKED)
by_turns = pytest.mark.turns(by="name")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, llama_cpp_converter: Path) -> Any:
    """Gives the packed folder of a name, and one of the same network in floats."""
    root = tmp_path_factory.mktemp("packed")

    def get(name: str) -> tuple[Path, Path]:
        found = root / name / "packed", root / name / "plain"
        if not found[0].is_dir():
            write_packed(name, *found)
        return found

    return get


@pytest.fixture(scope="module")
def converter() -> ConverterPeer:
    """llama.cpp's converter."""
    return ConverterPeer()


def options_of(name: str, source: Path) -> list[str]:
    return [option.format(source=source) for option in PACKED[name].options]


@by_turns
@by_name
def test_a_packed_folder_comes_back_byte_for_byte(name: str, folders: Any, tmp_path: Path) -> None:
    source, _ = folders(name)
    report = aprfmt.import_model(source, tmp_path / "m.apr")
    assert report.lossless
    aprfmt.export_model(tmp_path / "m.apr", tmp_path / "back")
    for file in source.iterdir():
        assert (tmp_path / "back" / file.name).read_bytes() == file.read_bytes()


@by_turns
@by_name
def test_a_gguf_in_floats_is_that_of_the_floats(name: str, folders: Any, tmp_path: Path) -> None:
    for path, source in zip((tmp_path / "packed.gguf", tmp_path / "plain.gguf"), folders(name), strict=True):
        aprfmt.export_model(source, path, dtype="f32", pre="smollm", no_mtp=True)
    same_values("", tmp_path / "packed.gguf", tmp_path / "plain.gguf")


@by_turns
@pytest.mark.parametrize("name", [name for name, packed in PACKED.items() if packed.converter])
def test_a_gguf_has_what_the_converters_has(name: str, folders: Any, converter: ConverterPeer, tmp_path: Path) -> None:
    """Where it rounds FP8 to Q8_0 ours has the values, and rounded they are the same bytes."""
    source, _ = folders(name)
    theirs, ours = tmp_path / "theirs.gguf", tmp_path / "ours.gguf"
    read = unchanged_output(source, tmp_path / "raw") if PACKED[name].raw else source
    converter.convert_once(read, theirs, "bf16", options_of(name, source), plain_vocabulary=True)
    aprfmt.import_model(source, tmp_path / "m.apr")
    for path in (source, tmp_path / "m.apr"):
        aprfmt.export_model(path, ours, pre="smollm", force=True)
        same_values(PACKED[name].case, ours, theirs)
        keys, wanted = list_keys(ours), list_keys(theirs)
        other = [key for key in keys.keys() | wanted.keys() if keys.get(key) != wanted.get(key)]
        assert [key for key in other if explain(PACKED[name].case, key) is None] == []


@by_turns
@pytest.mark.parametrize("name", [name for name, packed in PACKED.items() if packed.drafts])
def test_draft_layers_stay_behind_or_stand_alone(
    name: str, folders: Any, converter: ConverterPeer, tmp_path: Path
) -> None:
    source, _ = folders(name)
    theirs, ours = tmp_path / "theirs.gguf", tmp_path / "ours.gguf"
    converter.convert_once(source, theirs, "bf16", (*options_of(name, source), "--mtp"), plain_vocabulary=True)
    aprfmt.import_model(source, tmp_path / "m.apr")
    for path in (source, tmp_path / "m.apr"):
        report = aprfmt.export_model(path, ours, pre="smollm", mtp_only=True, force=True)
        assert any(loss.endswith("dropped (--mtp-only)") for loss in report.losses)
        same_values(PACKED[name].case, ours, theirs)
        assert list_keys(ours) == list_keys(theirs)
        report = aprfmt.export_model(path, tmp_path / "m.gguf", pre="smollm", force=True)
        said = [loss for loss in report.losses if "dropped: --mtp-only writes them to a separate GGUF" in loss]
        assert len(said) == 1


def test_a_draft_is_taken_out_of_the_folder_that_holds_its_model_too(
    folders: Any, converter: ConverterPeer, tmp_path: Path
) -> None:
    """As DeepSeek publishes them, under the class of the model."""
    from carried_models import edit_config
    from safetensors.torch import load_file, save_file

    (model, _), (draft, _) = folders("deepseek_v4"), folders("deepseek_v4_dspark")
    tensors = {n: t for n, t in load_file(model / "model.safetensors").items() if not n.startswith("mtp.")}
    whole = tmp_path / "whole"
    shutil.copytree(draft, whole)
    save_file(tensors | load_file(draft / "model.safetensors"), whole / "model.safetensors", {"format": "pt"})
    edit_config(whole, architectures=["DeepseekV4ForCausalLM"])
    theirs, ours = tmp_path / "theirs.gguf", tmp_path / "ours.gguf"
    options = ("--dspark", "--target-model-dir", str(whole))
    converter.convert_once(whole, theirs, "bf16", options, plain_vocabulary=True)
    report = aprfmt.export_model(whole, ours, arch="deepseek_v4_dspark", target_model=whole, pre="smollm")
    same_values("deepseek_v4_dspark", ours, theirs)
    assert list_keys(ours) == list_keys(theirs)
    assert any("embed.weight" in loss for loss in report.losses)
    # Its model goes without it.
    report = aprfmt.export_model(whole, tmp_path / "model.gguf", pre="smollm")
    assert any("dropped: --mtp-only" in loss for loss in report.losses)
    aprfmt.export_model(model, tmp_path / "alone.gguf", pre="smollm")
    with aprfmt.open(tmp_path / "model.gguf") as a, aprfmt.open(tmp_path / "alone.gguf") as b:
        assert {n: bytes(t.raw()) for n, t in a.tensors.items()} == {n: bytes(t.raw()) for n, t in b.tensors.items()}


def same_values(case: str, ours: Path, theirs: Path) -> None:
    with aprfmt.open(ours) as a, aprfmt.open(theirs) as b:
        assert a.tensors.keys() == b.tensors.keys()
        for name, wanted in b.tensors.items():
            found = a.tensors[name]
            assert found.shape == wanted.shape, name
            if found.dtype == wanted.dtype:
                same = bytes(found.raw()) == bytes(wanted.raw()) or explain(case, name)
                # What a GGUF has in F32 whatever the file's dtype is decoded to the dtype that the config names.
                assert same or encode("BF16", wanted.numpy()) == encode("BF16", found.numpy()), name
            elif wanted.dtype == "Q8_0":
                assert found.dtype in ("BF16", "F32"), name
                assert encode("Q8_0", found.numpy()) == bytes(wanted.raw()), name
            else:
                assert {found.dtype, wanted.dtype} <= {"F32", "BF16", "F16"}, name
                np.testing.assert_array_equal(found.numpy(), wanted.numpy(), name)


@by_turns
@by_name
def test_llama_cpp_computes_the_network(name: str, folders: Any, tmp_path: Path) -> None:
    source, plain = folders(name)
    case = find_case(PACKED[name].case)
    aprfmt.export_model(source, tmp_path / "keep.gguf", pre="smollm")
    aprfmt.export_model(source, tmp_path / "f32.gguf", dtype="f32", pre="smollm")
    with LlamaPeer() as llama:
        if case.kind == "draft":
            llama.load(tmp_path / "keep.gguf")
            return
        ids = token_ids(plain)
        assert np.isfinite(llama.logits(tmp_path / "keep.gguf", ids)).all()
        if not case.computable:
            return
        found, wanted = llama.logits(tmp_path / "f32.gguf", ids), transformers_logits(plain, ids)
    assert relative_error(found, wanted) <= LLAMA_TOLERANCE
    assert top1_equal(found, wanted)


@by_turns
@by_name
def test_a_gguf_comes_back_as_a_folder_of_the_same_values(name: str, folders: Any, tmp_path: Path) -> None:
    """What a GGUF holds packed comes back packed, the rest as floats; and the folder gives the GGUF again."""
    source, _ = folders(name)
    aprfmt.export_model(source, tmp_path / "m.gguf", pre="smollm")
    assert aprfmt.import_model(tmp_path / "m.gguf", tmp_path / "m.apr").lossless
    aprfmt.export_model(tmp_path / "m.apr", tmp_path / "back", format="hf")
    aprfmt.export_model(tmp_path / "back", tmp_path / "again.gguf", pre="smollm")
    with aprfmt.open(tmp_path / "m.gguf") as a, aprfmt.open(tmp_path / "again.gguf") as b:
        assert {n: (t.dtype, bytes(t.raw())) for n, t in a.tensors.items()} == {
            n: (t.dtype, bytes(t.raw())) for n, t in b.tensors.items()
        }
    keys, again = list_keys(tmp_path / "m.gguf"), list_keys(tmp_path / "again.gguf")
    assert {key: keys.get(key, 0) for key in again} == again
    from safetensors.torch import load_file

    stored, back = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "back"))
    experts = [name for name in stored if stored[name].element_size() == 1 and name in back]
    for tensor in experts:
        if stored[tensor].dtype == back[tensor].dtype:
            assert stored[tensor].view(back[tensor].dtype).equal(back[tensor]), tensor


@by_turns
@by_name
def test_a_missing_scale_is_refused(name: str, folders: Any, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    source, _ = folders(name)
    stored = load_file(source / "model.safetensors")
    shutil.copytree(source, tmp_path / "folder")
    for scale in [key for key in stored if "scale" in key and stored[key].ndim == 2][:: max(1, len(stored) // 2)]:
        left = {key: tensor for key, tensor in stored.items() if key != scale}
        save_file(left, tmp_path / "folder" / "model.safetensors", {"format": "pt"})
        for target in ("m.apr", "m.gguf"):
            with pytest.raises(aprfmt.AprError) as info:
                aprfmt.convert_model(tmp_path / "folder", tmp_path / target)
            assert info.value.exit_code == 5
            assert not (tmp_path / target).exists()
