"""Draft layers (MTP, nextn) of every family that has them: into a GGUF as llama.cpp's converter writes it, and back."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from arch_models import find_case
from conformance_explained import explain
from converter_peer import ConverterPeer, unchanged_output
from draft_models import DRAFTED, write_drafted
from llama_peer import LlamaPeer

import aprfmt
from aprfmt.arch.scopes import drafts_key
from aprfmt.arch.table import ARCHITECTURES
from aprfmt.errors import AprError

Stored = dict[str, tuple[str, tuple[int, ...], bytes]]
Folder = Callable[[str], Path]
Converted = Callable[..., Path]

WRITTEN = [name for name, drafted in DRAFTED.items() if drafted.converter == "writes"]
by_turns = pytest.mark.turns(by="name")
OPTIONAL = [name for name, drafted in DRAFTED.items() if drafted.options]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """Gives the folder of a row of DRAFTED."""
    pytest.importorskip("transformers")
    work = tmp_path_factory.mktemp("drafted")

    def get(name: str) -> Path:
        if not (work / name).is_dir():
            write_drafted(name, work / name)
        return work / name

    return get


@pytest.fixture(scope="module")
def converted(folder: Folder, tmp_path_factory: pytest.TempPathFactory, llama_cpp_converter: Path) -> Converted:
    """Gives what llama.cpp's converter makes of such a folder, with its options."""
    work = tmp_path_factory.mktemp("converted")
    peer = ConverterPeer()

    def get(name: str, *options: str) -> Path:
        path = work / f"{name}{''.join(options)}.gguf"
        if not path.exists():
            source = folder(name)
            if DRAFTED[name].raw:
                source = unchanged_output(source, work / str([*DRAFTED].index(name)))
            peer.convert_once(source, path, DRAFTED[name].out_type, options, plain_vocabulary=True)
        return path

    return get


def _stored(path: Path) -> Stored:
    with aprfmt.open(path) as model:
        return {name: (t.dtype, t.shape, bytes(t.raw())) for name, t in model.tensors.items()}


def _keys(path: Path, case: str) -> dict[str, object]:
    """The keys of the network, but for what conformance explains."""
    with aprfmt.open(path) as model:
        word = model.metadata["general.architecture"]
        keys = {key: value for key, value in model.metadata.items() if key.startswith(f"{word}.")}
    compared = {key: value for key, value in keys.items() if explain(case, key) is None}
    return {key: value if isinstance(value, str | int | float) else list(value) for key, value in compared.items()}


def _same_gguf(name: str, ours: Path, theirs: Path) -> None:
    found, wanted = _stored(ours), _stored(theirs)
    assert found.keys() == wanted.keys()
    case = DRAFTED[name].case
    assert [n for n in found if found[n] != wanted[n] and explain(case, n) is None] == []
    assert _keys(ours, case) == _keys(theirs, case)


def _rewritten(path: Path, out: Path, dtype: str) -> Stored:
    """The tensors of a folder in another dtype."""
    aprfmt.export_model(path, out, dtype=dtype)
    return _stored(out)


@by_turns
@pytest.mark.parametrize("name", WRITTEN)
def test_a_gguf_is_the_converters(name: str, folder: Folder, converted: Converted, tmp_path: Path) -> None:
    peer = converted(name)
    report = aprfmt.import_model(folder(name), tmp_path / "m.apr")
    assert report.lossless
    for source in (folder(name), tmp_path / "m.apr"):
        report = aprfmt.export_model(
            source, tmp_path / "m.gguf", dtype=DRAFTED[name].out_type, pre="smollm", force=True
        )
        _same_gguf(name, tmp_path / "m.gguf", peer)
        assert not any("MTP" in loss for loss in report.losses)


@by_turns
@pytest.mark.parametrize("name", OPTIONAL)
@pytest.mark.parametrize(("option", "theirs"), [("no_mtp", "--no-mtp"), ("mtp_only", "--mtp")])
def test_each_option_writes_what_the_converter_writes(
    name: str, option: str, theirs: str, folder: Folder, converted: Converted, tmp_path: Path
) -> None:
    peer = converted(name, theirs)
    aprfmt.import_model(folder(name), tmp_path / "m.apr")
    for source in (folder(name), tmp_path / "m.apr"):
        asked: dict[str, Any] = {"dtype": DRAFTED[name].out_type, "pre": "smollm", "force": True, option: True}
        report = aprfmt.export_model(source, tmp_path / "m.gguf", **asked)
        _same_gguf(name, tmp_path / "m.gguf", peer)
        said = "dropped (--no-mtp)" if option == "no_mtp" else "dropped (--mtp-only)"
        assert any(loss.endswith(said) for loss in report.losses)


@by_turns
@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize(("option", "theirs"), [("no_mtp", "--no-mtp"), ("mtp_only", "--mtp")])
def test_each_option_takes_a_gguf_apart(
    name: str, option: str, theirs: str, converted: Converted, tmp_path: Path
) -> None:
    if not DRAFTED[name].options:
        pytest.skip("the converter has no such option for the family")
    source = converted(name)
    aprfmt.import_model(source, tmp_path / "m.apr")
    for path in (source, tmp_path / "m.apr"):
        asked: dict[str, Any] = {"force": True, option: True}
        aprfmt.export_model(path, tmp_path / "m.gguf", **asked)
        _same_gguf(name, tmp_path / "m.gguf", converted(name, theirs))


@by_turns
@pytest.mark.parametrize("name", WRITTEN)
def test_the_converters_gguf_comes_back(name: str, folder: Folder, converted: Converted, tmp_path: Path) -> None:
    source = converted(name)
    assert aprfmt.import_model(source, tmp_path / "m.apr").lossless
    aprfmt.export_model(tmp_path / "m.apr", tmp_path / "m.gguf")
    assert (tmp_path / "m.gguf").read_bytes() == source.read_bytes()
    dtype = DRAFTED[name].out_type
    wanted = _rewritten(folder(name), tmp_path / "wanted.safetensors", dtype)
    if find_case(DRAFTED[name].case).wrapped:  # what comes back is the language model alone
        wanted = {n.replace("language_model.", ""): t for n, t in wanted.items() if "visual" not in n}
    for i, path in enumerate((source, tmp_path / "m.apr")):
        report = aprfmt.export_model(path, tmp_path / f"{i}", format="hf", dtype=dtype)
        assert not any("behind" in loss for loss in report.losses)
        found = _stored(tmp_path / f"{i}")
        assert found.keys() == wanted.keys()
        # Of A_log a GGUF holds -exp, which the converter rounds otherwise now and then.
        assert [tensor for tensor in found if found[tensor] != wanted[tensor] and "A_log" not in tensor] == []
        config, n = json.loads((tmp_path / f"{i}" / "config.json").read_text()), DRAFTED[name].n
        with aprfmt.open(folder(name)) as model:
            layers, row = model.hparams.num_layers, ARCHITECTURES[str(model.hparams.architecture)]
        assert config["num_hidden_layers"] == layers
        assert config[drafts_key(row).hf[0]] == n
        if find_case(DRAFTED[name].case).wrapped:
            continue
        # As it is stored, the folder gives the same GGUF once more.
        aprfmt.export_model(path, tmp_path / f"{i}-kept", format="hf")
        aprfmt.export_model(tmp_path / f"{i}-kept", tmp_path / f"{i}.gguf", pre="smollm")
        _same_gguf(name, tmp_path / f"{i}.gguf", source)


@by_turns
@pytest.mark.parametrize("name", DRAFTED)
def test_a_folder_comes_back_whole_or_without_its_draft_layers(name: str, folder: Folder, tmp_path: Path) -> None:
    source, wanted = folder(name), _stored(folder(name))
    assert aprfmt.import_model(source, tmp_path / "m.apr").lossless
    aprfmt.export_model(tmp_path / "m.apr", tmp_path / "back", format="hf")
    assert _files(tmp_path / "back") == _files(source)
    # Where the record of the source cannot be followed, names and count are the family's.
    aprfmt.export_model(tmp_path / "m.apr", tmp_path / "f16", format="hf", dtype="f16")
    assert _stored(tmp_path / "f16").keys() == wanted.keys()
    for i, path in enumerate((source, tmp_path / "m.apr")):
        report = aprfmt.export_model(path, tmp_path / f"{i}", format="hf", no_mtp=True)
        assert any("MTP layers" in loss and loss.endswith("dropped (--no-mtp)") for loss in report.losses)
        left = _stored(tmp_path / f"{i}")
        assert left == {tensor: wanted[tensor] for tensor in left}
        config = json.loads((tmp_path / f"{i}" / "config.json").read_text())
        assert not any(config.get(key) for key in ("num_nextn_predict_layers", "mtp_num_hidden_layers"))
        assert aprfmt.validate(tmp_path / f"{i}").passed
    assert len(left) < len(wanted)
    aprfmt.import_model(source, tmp_path / "less.apr", no_mtp=True)
    assert len(_stored(tmp_path / "less.apr")) == len(left)


def _files(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


@by_turns
@pytest.mark.parametrize("name", [name for name, drafted in DRAFTED.items() if drafted.loads])
def test_llama_cpp_computes_the_same_with_draft_layers_and_without(
    name: str, folder: Folder, llama_cpp: LlamaPeer, tmp_path: Path
) -> None:
    import numpy as np

    logits = []
    for i, no_mtp in enumerate((False, True)):
        path = tmp_path / f"{i}.gguf"
        aprfmt.export_model(folder(name), path, pre="smollm", no_mtp=no_mtp)
        logits.append(llama_cpp.logits(path, _IDS))
    assert np.isfinite(logits[0]).all()
    assert np.array_equal(*logits)


_IDS: Sequence[int] = (5, 17, 80, 211, 33, 99)


def test_both_options_at_once_and_none_of_the_layers_are_errors(folder: Folder, tmp_path: Path) -> None:
    with pytest.raises(AprError, match="are mutually exclusive"):
        aprfmt.export_model(folder("glm4_moe"), tmp_path / "m.gguf", no_mtp=True, mtp_only=True)
    aprfmt.import_model(folder("glm4_moe"), tmp_path / "m.apr", no_mtp=True)
    with pytest.raises(AprError, match="no MTP layers") as caught:
        aprfmt.export_model(tmp_path / "m.apr", tmp_path / "m.gguf", pre="smollm", mtp_only=True)
    assert "--mtp-only" in str(caught.value.hint)
    with pytest.raises(AprError, match="--mtp-only does not apply to the format hf"):
        aprfmt.export_model(folder("glm4_moe"), tmp_path / "m", format="hf", mtp_only=True)


def test_a_draft_layer_that_is_not_whole_is_refused(folder: Folder, tmp_path: Path) -> None:
    import shutil

    from carried_models import read_arrays, write_arrays

    shutil.copytree(folder("qwen3_5"), tmp_path / "m")
    path = tmp_path / "m" / "model.safetensors"
    arrays = read_arrays(path)
    for change, said in (
        ({"mtp.fc.weight": arrays["mtp.fc.weight"][:, :-8]}, "hidden"),
        ({"mtp.layers.0.mlp.up_proj.weight": arrays["mtp.layers.0.mlp.up_proj.weight"][:-8]}, "ffn"),
        ({"mtp.layers.0.mlp.up_proj.weight": None}, "missing"),
    ):
        changed = {name: array for name, array in {**arrays, **change}.items() if array is not None}
        write_arrays(path, changed)
        with pytest.raises(AprError, match=said):
            aprfmt.export_model(tmp_path / "m", tmp_path / "m.gguf", pre="smollm")
