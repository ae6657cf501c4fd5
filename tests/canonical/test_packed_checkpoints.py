"""Which tensors of a checkpoint are packed, which are not, and what a report says of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import packed_models as pm
import pytest
from safetensors.numpy import save_file

import aprfmt
from aprfmt.canonical import packed
from aprfmt.canonical.packed import Packing
from aprfmt.canonical.read import canonical
from aprfmt.codecs.stream import read_whole
from aprfmt.errors import RefusedError
from aprfmt.model import Tensor


def checkpoint() -> tuple[dict[str, Tensor], dict[str, Any]]:
    """One FP8 weight among ordinary ones, activation and cache scales beside it."""
    case = pm.fp8()
    other = [
        pm.tensor("model.embed_tokens.weight", "BF16", np.zeros((4, 7))),
        pm.tensor("lm_head.weight", "F8_E4M3", np.zeros((4, 7))),
        pm.tensor(f"{pm.BASE}.input_scale", "F32", [1.0]),
        pm.tensor("model.layers.0.self_attn.k_scale", "F32", [1.0]),
        pm.tensor("model.norm.weight", "BF16", np.zeros(7)),
    ]
    return case.tensors | pm.named(other), case.config


def test_only_packed_weights_are_found_and_a_listed_module_is_ordinary() -> None:
    tensors, config = checkpoint()
    config["quantization_config"]["modules_to_not_convert"] = ["lm_head"]
    (found,) = packed.packed_weights(tensors, config)
    assert found.parts == (f"{pm.BASE}.weight", f"{pm.BASE}.weight_scale_inv")
    assert packed.activation_scales(tensors, config) == [f"{pm.BASE}.input_scale", "model.layers.0.self_attn.k_scale"]


def test_codes_without_scales_are_refused_where_they_are_not_listed() -> None:
    tensors, config = checkpoint()
    with pytest.raises(RefusedError, match=r"lm_head.weight_scale_inv is missing") as caught:
        packed.packed_weights(tensors, config)
    assert caught.value.tensor == "lm_head.weight"


@pytest.mark.parametrize("key", ["modules_to_not_convert", "ignore", "llm_int8_skip_modules", "exclude_modules"])
@pytest.mark.parametrize("name", ["lm_head", "model.lm_head", "head"])
def test_lists_name_whole_modules(key: str, name: str) -> None:
    tensors, config = checkpoint()
    config["quantization_config"][key] = [name, 3]
    if name == "lm_head":
        assert len(packed.packed_weights(tensors, config)) == 1
    else:
        with pytest.raises(RefusedError):
            packed.packed_weights(tensors, config)


def test_a_model_without_packed_weights_has_none() -> None:
    tensors = pm.named([pm.tensor("a.weight", "F32", np.zeros((2, 2))), pm.tensor("a.logit_scale", "F32", [1.0])])
    assert packed.packed_weights(tensors, {}) == []
    assert packed.packed_weights(tensors, {"quantization_config": {"quant_method": "fp8"}}) == []
    assert packed.activation_scales(tensors, {}) == []


def test_settings_of_a_language_model_inside_a_larger_one() -> None:
    case = pm.gptq()
    config = {"text_config": {"dtype": "float16", "quantization_config": case.quantization}}
    (found,) = packed.packed_weights(case.tensors, config)
    assert found.dtype == "F16"
    assert packed.without_packing(config) == {"text_config": {"dtype": "float16"}}


def test_the_file_of_modelopt_stands_in_for_missing_settings() -> None:
    case = pm.nvfp4(modelopt=True)
    file = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "group_size": 16}}
    config = packed.with_hf_quant({"dtype": "bfloat16"}, file)
    (found,) = packed.packed_weights(case.tensors, config)
    assert found.scheme == "NVFP4"
    assert packed.activation_scales(case.tensors, config) == [f"{pm.BASE}.input_scale"]
    own = {"quantization_config": {"quant_method": "fp8"}}
    assert packed.with_hf_quant(own, file) == own
    assert packed.with_hf_quant({}, None) == {}


def test_a_config_of_decoded_weights_says_nothing_of_packing() -> None:
    config = {"hidden_size": 3, "quantization_config": {"quant_method": "fp8"}, "compression_config": {}}
    assert packed.without_packing(config) == {"hidden_size": 3}
    assert "quantization_config" in config


def test_sentences_for_the_report() -> None:
    one, two = pm.fp8(), pm.ct_fp8()
    found = packed.packed_weights(one.tensors, one.config) + packed.packed_weights(two.tensors, two.config)
    assert Packing(found, decoded=True).losses() == ["2 tensors decoded from FP8"]
    assert Packing(found).losses() == []


def test_a_warning_tells_of_weights_that_stay_packed(tmp_path: Path) -> None:
    case = pm.gptq()
    write_checkpoint(tmp_path, case)
    with aprfmt.open(tmp_path) as model:
        (warning,) = canonical(model, allow_unmapped=True).warnings
    assert warning.startswith("1 weights are kept quantized (GPTQ); ")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "hqq"}}))
    with aprfmt.open(tmp_path) as model:
        (warning,) = canonical(model, allow_unmapped=True).warnings
        assert "weights quantized with hqq cannot be decoded" in warning
        with pytest.raises(RefusedError, match="hqq"):
            canonical(model, arch="llama")


def test_mixed_groups_of_compressed_tensors() -> None:
    four, eight = pm.pack_quantized(4), pm.pack_quantized(8)
    renamed = pm.named(
        [
            Tensor(t.name.replace("up_proj", "down_proj"), t.dtype, t.shape, t.offset, t.n_bytes, t.source)
            for t in eight.tensors.values()
        ]
    )
    groups = {
        "a": four.quantization["config_groups"]["group_0"],
        "b": eight.quantization["config_groups"]["group_0"] | {"format": "pack-quantized"},
    }
    settings = four.quantization | {"format": "mixed-precision", "config_groups": groups}
    found = packed.packed_weights(four.tensors | renamed, {"quantization_config": settings})
    for tensor, case in zip(found, (four, eight), strict=True):
        data = bytes(read_whole(replace(tensor, dtype="F32")))
        assert data == case.values.tobytes()


def write_checkpoint(folder: Path, case: pm.Packed) -> None:
    numpy_types = {"I32": "<i4", "F16": "<f2"}
    arrays = {n: np.frombuffer(t.raw(), numpy_types[t.dtype]).reshape(t.shape) for n, t in case.tensors.items()}
    save_file(arrays, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(case.config))


def test_weights_of_a_folder_on_disk(tmp_path: Path) -> None:
    case = pm.gptq(desc_act=True)
    write_checkpoint(tmp_path, case)
    with aprfmt.open(tmp_path) as model:
        (found,) = packed.packed_weights(model.tensors, model.metadata)
        data = bytes(read_whole(replace(found, dtype="F32")))
    assert data == case.values.tobytes()


def test_fp8_agrees_with_transformers() -> None:
    torch = pytest.importorskip("torch")
    finegrained = pytest.importorskip("transformers.integrations.finegrained_fp8")
    case = pm.fp8(rows=6, columns=9)
    (found,) = packed.packed_weights(case.tensors, case.config)
    codes = torch.frombuffer(bytearray(case.tensors[f"{pm.BASE}.weight"].raw()), dtype=torch.float8_e4m3fn)
    scale = torch.frombuffer(bytearray(case.tensors[f"{pm.BASE}.weight_scale_inv"].raw()), dtype=torch.float32)
    theirs = finegrained.Fp8Dequantize(None)._dequantize_one(codes.reshape(6, 9), scale.reshape(3, 3), torch.bfloat16)
    ours = bytes(read_whole(replace(found, dtype="BF16")))
    assert ours == theirs.view(torch.int16).numpy().tobytes()


def test_mxfp4_agrees_with_transformers() -> None:
    torch = pytest.importorskip("torch")
    integration = pytest.importorskip("transformers.integrations.mxfp4")
    case = pm.mxfp4()
    (found,) = packed.packed_weights(case.tensors, case.config)
    base = "model.layers.0.mlp.experts.gate_up_proj"
    blocks, scales = (
        torch.frombuffer(bytearray(t.raw()), dtype=torch.uint8).reshape(t.shape)
        for t in (case.tensors[f"{base}_blocks"], case.tensors[f"{base}_scales"])
    )
    theirs = integration.convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
    assert tuple(theirs.shape) == found.shape
    ours = bytes(read_whole(replace(found, dtype="BF16")))
    assert ours == theirs.view(torch.int16).numpy().tobytes()
