"""Whole models with packed weights: kept as they are, decoded into a GGUF or another dtype, refused when damaged."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from packed_models import fp8, gptq
from packed_parts import BASE, Packed, tensor
from plain_models import CONFIG, FFN, HIDDEN, weights
from tiny_models import write_byte_tokenizer

import aprfmt
from aprfmt.arch.orders import indices
from aprfmt.codecs.recode import encode
from aprfmt.model import Tensor

Array = np.ndarray[Any, Any]
UP, QUERY = "model.layers.0.mlp.up_proj", "model.layers.1.self_attn.q_proj"


def folder_of(path: Path, packed: dict[str, Packed], drop: str = "") -> Path:
    """A llama folder of which some weights are packed."""
    arrays: dict[str, Array] = dict(weights())
    tensors: list[tuple[str, str, tuple[int, ...], bytes]] = []
    for module, case in packed.items():
        arrays.pop(f"{module}.weight", None)
        tensors += [(t.name.replace(BASE, module), *_stored(t)) for t in case.tensors.values()]
    tensors += [(name, "F32", a.shape, a.tobytes()) for name, a in arrays.items()]
    _safetensors(path, [t for t in tensors if not (drop and t[0].endswith(drop))])
    first = next(iter(packed.values()))
    config = CONFIG | {"quantization_config": first.quantization, "dtype": first.dtype}
    (path / "config.json").write_text(json.dumps(config))
    write_byte_tokenizer(path)
    return path


def _stored(tensor: Tensor) -> tuple[str, tuple[int, ...], bytes]:
    return tensor.dtype, tensor.shape, bytes(tensor.raw())


def _safetensors(path: Path, tensors: list[tuple[str, str, tuple[int, ...], bytes]]) -> None:
    path.mkdir()
    header, position = {}, 0
    for name, dtype, shape, data in tensors:
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, position + len(data)]}
        position += len(data)
    text = json.dumps(header).encode()
    body = b"".join(data for *_, data in tensors)
    (path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + body)


def bf16(values: Array) -> Array:
    import torch

    return torch.from_numpy(values.copy()).to(torch.bfloat16).float().numpy()


FP8 = {UP: fp8("block", FFN, HIDDEN), QUERY: fp8("block", HIDDEN, HIDDEN, seed=1)}


def test_kept_pieces_come_back_as_the_same_files(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "f", FP8)
    report = aprfmt.import_model(folder, tmp_path / "m.apr")
    assert report.lossless
    assert any("2 weights are kept quantized (FP8)" in w for w in report.warnings)
    aprfmt.export_model(tmp_path / "m.apr", tmp_path / "back")
    for file in folder.iterdir():
        assert (tmp_path / "back" / file.name).read_bytes() == file.read_bytes()


@pytest.mark.parametrize("packed", [FP8, {"model.layers.0.self_attn.v_proj": gptq()}], ids=["FP8", "GPTQ"])
def test_packed_weights_are_counted_as_what_they_stand_for(packed: dict[str, Packed], tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "f", packed)
    aprfmt.import_model(folder, tmp_path / "m.apr")
    decoded = aprfmt.convert_model(folder, tmp_path / "d", format="hf", dtype="f32", allow_unmapped=True)
    for path in (folder, tmp_path / "m.apr", tmp_path / "d"):
        assert aprfmt.inspect(path).param_count == decoded.param_count
    for source, name in ((folder, "a.gguf"), (tmp_path / "m.apr", "b.gguf")):
        aprfmt.export_model(source, tmp_path / name)
    with aprfmt.open(tmp_path / "a.gguf") as a, aprfmt.open(tmp_path / "b.gguf") as b:
        assert a.metadata["general.size_label"] == b.metadata["general.size_label"] == "103K"


def test_packed_draft_layers_are_carried_and_no_mix_blows_them_up(tmp_path: Path) -> None:
    draft = "model.layers.2.mlp.up_proj"
    folder = folder_of(tmp_path / "f", FP8 | {draft: fp8("block", FFN, HIDDEN, seed=2)})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    assert aprfmt.import_model(folder, tmp_path / "m.apr").lossless
    aprfmt.export_model(tmp_path / "m.apr", tmp_path / "back")
    for file in folder.iterdir():
        assert (tmp_path / "back" / file.name).read_bytes() == file.read_bytes()
    report = aprfmt.export_model(tmp_path / "m.apr", tmp_path / "m.gguf")
    assert any("1 tensor of the MTP layers (model.layers.2.*, " in loss for loss in report.losses)
    aprfmt.convert_model(folder, tmp_path / "q.apr", dtype="q8_0", allow_requantize=True)
    with aprfmt.open(tmp_path / "q.apr") as model:
        assert (model.tensors[f"{draft}.weight"].dtype, model.tensors[f"{UP}.weight"].dtype) == ("BF16", "Q8_0")


@pytest.mark.parametrize("through_apr", [False, True])
def test_a_gguf_gets_the_decoded_weights(through_apr: bool, tmp_path: Path) -> None:
    source = folder_of(tmp_path / "f", FP8)
    if through_apr:
        aprfmt.import_model(source, tmp_path / "m.apr")
        source = tmp_path / "m.apr"
    report = aprfmt.convert_model(source, tmp_path / "m.gguf")
    assert "2 tensors decoded from FP8" in report.losses
    with aprfmt.open(tmp_path / "m.gguf") as model:
        up, query = model.tensors["blk.0.ffn_up.weight"], model.tensors["blk.1.attn_q.weight"]
        assert (up.dtype, query.dtype) == ("BF16", "BF16")
        np.testing.assert_array_equal(up.numpy(), bf16(FP8[UP].values))
        rows = indices([("swap", (4, 2, 8))], HIDDEN)
        np.testing.assert_array_equal(query.numpy(), bf16(FP8[QUERY].values)[rows])
        assert not [name for name in model.tensors if "scale" in name]


@pytest.mark.parametrize("through_apr", [False, True])
@pytest.mark.parametrize("make", [lambda: {UP: fp8("channel", FFN, HIDDEN)}, lambda: {UP: fp8("tensor", FFN, HIDDEN)}])
def test_a_dtype_decodes_once_and_forgets_the_packing(make: Any, through_apr: bool, tmp_path: Path) -> None:
    packed = make()
    source = folder_of(tmp_path / "f", packed)
    if through_apr:
        aprfmt.import_model(source, tmp_path / "m.apr", dtype="f32")
        source = tmp_path / "m.apr"
    report = aprfmt.convert_model(source, tmp_path / "out", format="hf", dtype="f32")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in config
    found = aprfmt.load_file(tmp_path / "out" / "model.safetensors")
    np.testing.assert_array_equal(found[f"{UP}.weight"], packed[UP].values)
    assert set(found) == set(weights())
    assert through_apr or "1 tensors decoded from FP8" in report.losses


def test_gptq_reaches_a_gguf(tmp_path: Path) -> None:
    case = gptq(4, desc_act=True)
    assert case.values.shape == (HIDDEN // 2, HIDDEN)
    folder = folder_of(tmp_path / "f", {"model.layers.0.self_attn.v_proj": case})
    aprfmt.convert_model(folder, tmp_path / "m.gguf", dtype="f32")
    with aprfmt.open(tmp_path / "m.gguf") as model:
        np.testing.assert_array_equal(model.tensors["blk.0.attn_v.weight"].numpy(), case.values)


def test_integers_keep_their_codes_in_a_gguf_and_the_report_says_what_rounding_changes(tmp_path: Path) -> None:
    case, value = gptq(4), "model.layers.0.self_attn.v_proj"
    report = aprfmt.convert_model(folder_of(tmp_path / "f", {value: case}), tmp_path / "m.gguf")
    assert report.changes == []
    with aprfmt.open(tmp_path / "m.gguf") as model:
        found = model.tensors["blk.0.attn_v.weight"]
        assert found.dtype == "Q4_1"
        np.testing.assert_array_equal(found.numpy(), case.values)
    scales = np.full((2, 32), 1 / 3, "<f4")
    odd = replace(case, tensors=case.changed("scales", tensor(f"{BASE}.scales", "F32", scales)))
    report = aprfmt.convert_model(folder_of(tmp_path / "g", {value: odd}), tmp_path / "n.gguf")
    (change,) = report.changes
    assert (change["tensor"], change["from"], change["to"]) == (f"{value}.weight", "GPTQ", "Q4_1")
    assert 0 < change["largest_relative_change"] < 2**-10
    assert any(
        "1 tensor converted from GPTQ to Q4_1, codes unchanged: rounding the scales" in loss for loss in report.losses
    )
    assert report.to_json()["changes"] == report.changes


@pytest.mark.parametrize("target", ["m.apr", "m.gguf"])
def test_a_missing_scale_is_refused(target: str, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "f", FP8, drop="up_proj.weight_scale_inv")
    with pytest.raises(aprfmt.AprError, match=r"up_proj\.weight_scale_inv is missing") as info:
        aprfmt.convert_model(folder, tmp_path / target)
    assert info.value.exit_code == 5
    assert not (tmp_path / target).exists()


def test_an_unknown_scheme_is_refused_and_can_be_kept(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "f", FP8)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "hqq"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(aprfmt.AprError, match="hqq"):
        aprfmt.convert_model(folder, tmp_path / "m.gguf")
    with pytest.raises(aprfmt.AprError, match="hqq"):
        aprfmt.import_model(folder, tmp_path / "m.apr")
    report = aprfmt.import_model(folder, tmp_path / "m.apr", allow_unmapped=True)
    assert any("they cannot be decoded: " in w for w in report.warnings)
    aprfmt.export_model(tmp_path / "m.apr", tmp_path / "back", allow_unmapped=True)
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


def test_wrong_shapes_of_packed_weights_are_refused(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "f", {UP: fp8("block", FFN - 1, HIDDEN)})
    with pytest.raises(aprfmt.AprError, match="hyper-parameters require"):
        aprfmt.import_model(folder, tmp_path / "m.apr")


@pytest.mark.parametrize("through", ["folder", "apr"])
@pytest.mark.parametrize("target", ["m.apr", "m.gguf"])
def test_a_release_in_fp8_is_quantized_without_being_told_twice(target: str, through: str, tmp_path: Path) -> None:
    source = folder_of(tmp_path / "f", FP8)
    if through == "apr":
        aprfmt.import_model(source, tmp_path / "s.apr")
        source = tmp_path / "s.apr"
    report = aprfmt.convert_model(source, tmp_path / target, dtype="q8_0")
    assert report.warnings.count("the model was released in FP8: its weights are decoded before quantizing") == 1
    aprfmt.convert_model(tmp_path / target, tmp_path / "end.gguf", force=True)
    with aprfmt.open(tmp_path / "end.gguf") as model:
        up = model.tensors["blk.0.ffn_up.weight"]
        assert (up.dtype, bytes(up.raw())) == ("Q8_0", encode("Q8_0", FP8[UP].values))
        assert "quantization_config" not in model.hparams.extra
    with pytest.raises(aprfmt.AprError, match="Q8_0 is already quantized"):
        aprfmt.convert_model(tmp_path / target, tmp_path / "again.gguf", dtype="q4_0")


def test_weights_that_somebody_packed_are_quantized_again_only_when_told(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "f", {"model.layers.0.self_attn.v_proj": gptq(4, desc_act=True)})
    with pytest.raises(aprfmt.AprError, match="GPTQ is already quantized") as info:
        aprfmt.convert_model(folder, tmp_path / "m.gguf", dtype="q8_0")
    assert info.value.exit_code == 5
    assert "--allow-requantize" in str(info.value.hint)
    aprfmt.convert_model(folder, tmp_path / "m.gguf", dtype="q8_0", allow_requantize=True)
