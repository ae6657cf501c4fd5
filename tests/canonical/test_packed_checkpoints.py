"""Which tensors of a checkpoint are packed, which are not, and what a report says of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import packed_models as pm
import pytest
from safetensors.numpy import save_file

import aprfmt
from aprfmt.canonical import packed
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
    (found,) = packed.groups(tensors, config)
    assert found.pieces == (f"{pm.BASE}.weight", f"{pm.BASE}.weight_scale_inv")
    assert found.stored_bytes == 35 + 36
    assert packed.aside(tensors, config) == [f"{pm.BASE}.input_scale", "model.layers.0.self_attn.k_scale"]


def test_codes_without_scales_are_refused_where_they_are_not_listed() -> None:
    tensors, config = checkpoint()
    with pytest.raises(RefusedError, match=r"lm_head.weight_scale_inv is missing") as caught:
        packed.groups(tensors, config)
    assert caught.value.tensor == "lm_head.weight"


@pytest.mark.parametrize(
    "key", ["modules_to_not_convert", "ignore", "llm_int8_skip_modules", "exclude_modules"]
)
@pytest.mark.parametrize("name", ["lm_head", "model.lm_head", "head"])
def test_lists_name_whole_modules(key: str, name: str) -> None:
    tensors, config = checkpoint()
    config["quantization_config"][key] = [name, 3]
    if name == "lm_head":
        assert len(packed.groups(tensors, config)) == 1
    else:
        with pytest.raises(RefusedError):
            packed.groups(tensors, config)


def test_a_model_without_packed_weights_has_none() -> None:
    tensors = pm.named(
        [pm.tensor("a.weight", "F32", np.zeros((2, 2))), pm.tensor("a.logit_scale", "F32", [1.0])]
    )
    assert packed.groups(tensors, {}) == []
    assert packed.groups(tensors, {"quantization_config": {"quant_method": "fp8"}}) == []
    assert packed.aside(tensors, {}) == []
    assert packed.keep_warning(tensors, {}) is None


def test_settings_of_a_language_model_inside_a_larger_one() -> None:
    case = pm.gptq()
    config = {"text_config": {"dtype": "float16", "quantization_config": case.quantization}}
    (found,) = packed.groups(case.tensors, config)
    assert found.dtype == "F16"
    assert packed.without(config) == {"text_config": {"dtype": "float16"}}


def test_the_file_of_modelopt_stands_in_for_missing_settings() -> None:
    case = pm.nvfp4(modelopt=True)
    file = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "group_size": 16}}
    config = packed.with_hf_quant({"dtype": "bfloat16"}, file)
    (found,) = packed.groups(case.tensors, config)
    assert found.scheme == "NVFP4"
    assert packed.aside(case.tensors, config) == [f"{pm.BASE}.input_scale"]
    own = {"quantization_config": {"quant_method": "fp8"}}
    assert packed.with_hf_quant(own, file) == own
    assert packed.with_hf_quant({}, None) == {}


def test_a_config_of_decoded_weights_says_nothing_of_packing() -> None:
    config = {"hidden_size": 3, "quantization_config": {"quant_method": "fp8"}, "compression_config": {}}
    assert packed.without(config) == {"hidden_size": 3}
    assert "quantization_config" in config


def test_sentences_for_the_report() -> None:
    one, two = pm.fp8(), pm.ct_fp8()
    found = packed.groups(one.tensors, one.config) + packed.groups(two.tensors, two.config)
    assert packed.losses(found) == ["2 tensors decoded from FP8"]
    sentence = packed.keep_warning(one.tensors, one.config)
    assert sentence is not None
    assert sentence.startswith("1 weights are kept packed (FP8), as stored")
    refused = packed.keep_warning(one.tensors, {"quantization_config": {"quant_method": "hqq"}})
    assert refused is not None
    assert "weights packed by hqq cannot be decoded" in refused


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
    found = packed.groups(four.tensors | renamed, {"quantization_config": settings})
    for tensor, case in zip(found, (four, eight), strict=True):
        data = b"".join(bytes(chunk) for chunk in tensor.chunks("F32"))
        assert data == case.values.tobytes()


def test_weights_of_a_folder_on_disk(tmp_path: Path) -> None:
    case = pm.gptq(desc_act=True)
    numpy_types = {"I32": "<i4", "F16": "<f2"}
    arrays = {
        n: np.frombuffer(t.raw(), numpy_types[t.dtype]).reshape(t.shape) for n, t in case.tensors.items()
    }
    save_file(arrays, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(case.config))
    with aprfmt.open(tmp_path) as model:
        (found,) = packed.groups(model.tensors, model.metadata)
        data = b"".join(bytes(chunk) for chunk in found.chunks("F32"))
    assert data == case.values.tobytes()


def test_fp8_agrees_with_transformers() -> None:
    torch = pytest.importorskip("torch")
    finegrained = pytest.importorskip("transformers.integrations.finegrained_fp8")
    case = pm.fp8(rows=6, columns=9)
    (found,) = packed.groups(case.tensors, case.config)
    codes = torch.frombuffer(bytearray(case.tensors[f"{pm.BASE}.weight"].raw()), dtype=torch.float8_e4m3fn)
    scale = torch.frombuffer(
        bytearray(case.tensors[f"{pm.BASE}.weight_scale_inv"].raw()), dtype=torch.float32
    )
    theirs = finegrained.Fp8Dequantize(None)._dequantize_one(
        codes.reshape(6, 9), scale.reshape(3, 3), torch.bfloat16
    )
    ours = b"".join(bytes(chunk) for chunk in found.chunks("BF16"))
    assert ours == theirs.view(torch.int16).numpy().tobytes()


def test_mxfp4_agrees_with_transformers() -> None:
    torch = pytest.importorskip("torch")
    integration = pytest.importorskip("transformers.integrations.mxfp4")
    case = pm.mxfp4()
    (found,) = packed.groups(case.tensors, case.config)
    base = "model.layers.0.mlp.experts.gate_up_proj"
    blocks, scales = (
        torch.frombuffer(bytearray(t.raw()), dtype=torch.uint8).reshape(t.shape)
        for t in (case.tensors[f"{base}_blocks"], case.tensors[f"{base}_scales"])
    )
    theirs = integration.convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
    assert tuple(theirs.shape) == found.shape
    ours = b"".join(bytes(chunk) for chunk in found.chunks("BF16"))
    assert ours == theirs.view(torch.int16).numpy().tobytes()
