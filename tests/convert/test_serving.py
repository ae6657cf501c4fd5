"""Folders for serving engines: every byte as compressed-tensors stores it, and read back by every reader here."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from arch_models import find_case
from tiny_models import BYTES, build

import aprfmt
from aprfmt.codecs import affine, plain
from aprfmt.codecs.dtypes import DTYPES
from aprfmt.codecs.serving import SERVING, find_scheme
from aprfmt.convert import serving
from aprfmt.errors import RefusedError
from aprfmt.inspection.diff import diff
from aprfmt.inspection.distance import Distance
from aprfmt.inspection.validate import validate

torch = pytest.importorskip("torch")

PEER: Mapping[tuple[str, str], tuple[float, ...]] = {
    ("fp8-dynamic", "BF16"): (0xDADFFE05, 0x1EFB2937),
    ("fp8-dynamic", "F16"): (0xAD908571, 0x2E3CE352),
    ("fp8-dynamic", "F32"): (0xF0C4EF4E, 0x47295322),
    ("w8a8", "BF16"): (0x68C0B725, 0x8F941294),
    ("w8a8", "F16"): (0x464497CD, 0xBFE25DA5),
    ("w8a8", "F32"): (0x8F33727F, 0x9D175719),
    ("w8a16", "BF16"): (0xB7B99982, 0x8F941294),
    ("w8a16", "F16"): (0x993DB96A, 0xBFE25DA5),
    ("w8a16", "F32"): (0x504A5CD8, 0x9D175719),
    ("w8a16-g32", "BF16"): (0x5394FD5D, 0xD892B1D2),
    ("w8a16-g32", "F16"): (0xAE2B3D5A, 0x78E72E83),
    ("w8a16-g32", "F32"): (0x29A364C9, 0xC580B70E),
    ("w4a16", "BF16"): (0x58BC9015, 0xF9AEF921),
    ("w4a16", "F16"): (0xE6509D85, 0xA409BF12),
    ("w4a16", "F32"): (0xC0B64055, 0xBE2E0785),
    ("w4a16-g64", "BF16"): (0xAA19082C, 0x8AE8E73B),
    ("w4a16-g64", "F16"): (0xE49C2664, 0x1FAF1AC6),
    ("w4a16-g64", "F32"): (0x6095F5CA, 0x6506715F),
    ("w4a16-g32", "BF16"): (0xF161FEA3, 0x6C877B06),
    ("w4a16-g32", "F16"): (0x04BEC674, 0x7CEB7322),
    ("w4a16-g32", "F32"): (0x6D08E85D, 0x03CA8A17),
    ("w4a16-asym", "BF16"): (0x25283E79, 0xB904077F, 0x5F22D5E6),
    ("w4a16-asym", "F16"): (0x138A80E2, 0x4AAA27CA, 0x5F22D5E6),
    ("w4a16-asym", "F32"): (0x16E77B9C, 0xEBAFB6E5, 0x5F22D5E6),
    ("w4a16-g64-asym", "BF16"): (0x713613B9, 0x144182D0, 0xE6EEF612),
    ("w4a16-g64-asym", "F16"): (0x99357BB8, 0x89B3AF76, 0xE6EEF612),
    ("w4a16-g64-asym", "F32"): (0x8AA5CF7B, 0x45E32DE3, 0xE6EEF612),
    ("w4a16-g32-asym", "BF16"): (0x6C461CC2, 0x5F1C4C5A, 0x62F68412),
    ("w4a16-g32-asym", "F16"): (0xBEE2043F, 0x0D366437, 0x4AE693FD),
    ("w4a16-g32-asym", "F32"): (0x8DD998DB, 0x9D67DB9C, 0x408DD98E),
    ("nvfp4a16", "BF16"): (0xC287C014, 0x51B3F869, 71.5),
    ("nvfp4a16", "F16"): (0x60700E93, 0xD76CB4E7, 71.5),
    ("nvfp4a16", "F32"): (0xD74671C9, 0x42AFF524, 71.4760971069336),
    ("mxfp4", "BF16"): (0xF2BE26E1, 0x7A4C238E),
    ("mxfp4", "F16"): (0xB09BF243, 0x518EF1EE),
    ("mxfp4", "F32"): (0x28AEE71A, 0x929F2EA9),
    ("mxfp8", "BF16"): (0xBD8FF766, 0xC3E8C6B3),
    ("mxfp8", "F16"): (0x5D9EF319, 0x5260FEE6),
    ("mxfp8", "F32"): (0x4B621FCB, 0x917121A1),
}
"""CRC-32 of each part that compressed-tensors 0.20.0 makes of `weight(dtype)`, then its scale of the tensor."""

DISTANCES = {8: 0.03, 4: 0.13}
"""The largest relative error of a weight by bits: half a step of random values."""


def weight(dtype: str) -> Any:
    """24 rows of 256: a group of zeros, an outlier, a row 300 times as large; float32 values of `dtype`."""
    rng = np.random.default_rng(0)
    values = (rng.standard_normal((24, 256)) * 0.05).astype("f4")
    values[3, 32:64] = 0
    values[5, 200] = 1.75
    values[7, :] *= 300
    return affine.rounded(values, dtype)


def distances(a: Path, b: Path) -> dict[str, Distance]:
    return {found.name: found.distance for found in diff(a, b, values=True).tensors or ()}


@pytest.mark.parametrize(("name", "dtype"), PEER)
def test_every_part_is_that_of_compressed_tensors(name: str, dtype: str) -> None:
    scheme, wanted = SERVING[name], PEER[name, dtype]
    overall = wanted[-1] if scheme.has_tensor_scale else 1.0
    values = weight(dtype)
    parts = scheme.encode(scheme, values, dtype, overall, None)
    assert tuple(map(zlib.crc32, parts)) == wanted[: len(parts)]
    for part, data in zip(scheme.parts, parts, strict=True):
        assert memoryview(data).nbytes == DTYPES[part.dtype or dtype].n_bytes(part.shape(*values.shape))
    half = [scheme.encode(scheme, piece, dtype, overall, None) for piece in (values[:8], values[8:])]
    assert [bytes(a) + bytes(b) for a, b in zip(*half, strict=True)] == [bytes(part) for part in parts]


# Of the largest value. Scales of the first are subnormal; at 32 and 239 are the ends of what is looked up.
@pytest.mark.parametrize("exponent", [1, 9, 31, 32, 33, 127, 238, 239, 254])
def test_bfloat16_weights_take_the_short_way_to_the_same_bytes(exponent: int) -> None:
    scheme, magnitudes = SERVING["fp8-dynamic"], np.arange(0x7F80)
    largest = exponent << 7 | np.arange(128)[:, None]  # a row for each mantissa of a scale
    codes = np.concatenate([np.minimum(magnitudes, largest), np.minimum(magnitudes, largest) | 0x8000], axis=1)
    codes = np.concatenate([codes, np.zeros((1, codes.shape[1]), int)]).astype("<u2")
    assert scheme.encode_bf16 is not None
    found = scheme.encode_bf16(codes)
    wanted = scheme.encode(scheme, plain.decode("BF16", codes.reshape(-1)).reshape(codes.shape), "BF16", 1.0, None)
    assert [bytes(part) for part in found] == [bytes(part) for part in wanted]
    for code in (0x7F80, 0xFFC0):
        codes[7, 9] = code
        with pytest.raises(aprfmt.AprError, match="NaN or infinite"):
            scheme.encode_bf16(codes)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny llama in bfloat16; groups of 128 do not divide the inputs of o_proj."""
    folder = tmp_path_factory.mktemp("serving") / "source"
    case = find_case("llama")
    sizes = {"hidden_size": 128, "intermediate_size": 256}
    build(replace(case, config={**case.config, **sizes}, tokenizer=BYTES), folder, None, dtype="bfloat16")
    return folder


@pytest.mark.parametrize(
    ("layout", "name"),
    [("hf", name) for name in ("fp8-block", "w8a8", "w4a16-g32-asym", "nvfp4a16", "mxfp4")]
    + [("gptq", "w4a16-g32"), ("awq", "w4a16-g32-asym"), ("modelopt", "nvfp4a16")],
)
def test_large_weights_are_made_of_pieces(
    layout: str, name: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    aprfmt.convert_model(source, tmp_path / "whole", format=layout, dtype=name)
    monkeypatch.setattr(serving, "STEP", 4096)
    aprfmt.convert_model(source, tmp_path / "pieces", format=layout, dtype=name)
    whole, pieces = ((tmp_path / folder / "model.safetensors").read_bytes() for folder in ("whole", "pieces"))
    assert pieces == whole


@pytest.mark.parametrize("name", SERVING)
def test_a_folder_is_read_back(name: str, source: Path, tmp_path: Path) -> None:
    scheme = SERVING[name]
    report = aprfmt.convert_model(source, tmp_path / "out", format="hf", dtype=name)
    n_packed = 12 if scheme.group == 128 else 14
    assert f"{n_packed} tensors rounded from BF16 to {name}" in report.losses
    uneven = [warning for warning in report.warnings if "do not divide" in warning]
    assert len(uneven) == (scheme.group == 128)
    assert [check for check in validate(tmp_path / "out").checks if check.status == "fail"] == []
    found_there = aprfmt.inspect(tmp_path / "out")
    assert found_there.param_count == aprfmt.inspect(source).param_count == report.param_count
    assert [(row.scheme, row.weights) for row in found_there.quantized] == [(name, n_packed)]
    found = distances(source, tmp_path / "out")
    assert len([d for d in found.values() if d.n_different]) == n_packed
    assert max(d.relative_rmse or 0 for d in found.values()) < DISTANCES[scheme.bits]
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    settings = config["quantization_config"]
    ignored = settings["modules_to_not_convert" if scheme.format == "fp8" else "ignore"]
    assert {"lm_head", "model.embed_tokens"} <= {*ignored}
    assert config.get("dtype", config.get("torch_dtype")) == "bfloat16"
    if scheme.format != "fp8":
        (group,) = settings["config_groups"].values()
        assert (settings["format"], group["weights"]["num_bits"]) == (scheme.format, scheme.bits)
    aprfmt.import_model(tmp_path / "out", tmp_path / "m.apr")
    aprfmt.export_model(tmp_path / "m.apr", tmp_path / "back", format="hf")
    same = [(tmp_path / x / "model.safetensors").read_bytes() for x in ("out", "back")]
    assert same[0] == same[1]


@pytest.mark.llama
@pytest.mark.parametrize("name", ["fp8-dynamic", "mxfp4", "nvfp4a16"])
def test_qa_compares_a_folder_by_the_bits_of_its_own_weights(name: str, source: Path, tmp_path: Path) -> None:
    aprfmt.convert_model(source, tmp_path / "out", format="hf", dtype=name)
    report = aprfmt.qa(tmp_path / "out", against=source)
    statuses = {gate.id: gate.status for gate in report.gates}
    assert (statuses["header"], statuses["tensors"]) == ("pass", "pass")
    assert report.bits_per_weight < 12.1
    if name != "nvfp4a16":
        return
    from safetensors.torch import load_file, save_file

    tensors = load_file(tmp_path / "out" / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight_global_scale"] *= 2
    save_file(tensors, tmp_path / "out" / "model.safetensors", {"format": "pt"})
    broken = aprfmt.qa(tmp_path / "out", against=source)
    assert {gate.id: gate.status for gate in broken.gates}["tensors"] == "fail"


def test_a_lattice_of_quantization_aware_training_is_named(source: Path, tmp_path: Path) -> None:
    import shutil

    from safetensors.torch import load_file, save_file

    shutil.copytree(source, tmp_path / "qat")
    tensors = load_file(source / "model.safetensors")
    for name, values in tensors.items():
        if "mlp" in name:
            steps = torch.randint(-8, 8, values.shape).float().reshape(-1, 32)
            tensors[name] = (steps * 2.0**-6).reshape(values.shape).to(torch.bfloat16)
            tensors[name].flatten()[0] = -0.0
    save_file(tensors, tmp_path / "qat" / "model.safetensors", {"format": "pt"})
    assert aprfmt.inspect(source).quantized == []
    (row,) = aprfmt.inspect(tmp_path / "qat").quantized
    assert (row.scheme, row.weights) == ("Q4_0 lattice", 6)


def test_weights_that_engines_fuse_share_the_scale_of_the_tensor(source: Path, tmp_path: Path) -> None:
    aprfmt.convert_model(source, tmp_path / "out", format="hf", dtype="nvfp4a16")
    before, after = (aprfmt.load_file(folder / "model.safetensors") for folder in (source, tmp_path / "out"))
    layer = "model.layers.0."
    for kin in (["q_proj", "k_proj", "v_proj"], ["gate_proj", "up_proj"]):
        names = [f"{layer}{'self_attn' if len(kin) == 3 else 'mlp'}.{name}" for name in kin]
        scales = {float(after[f"{name}.weight_global_scale"][0]) for name in names}
        most = max(float(np.abs(before[f"{name}.weight"]).max()) for name in names)
        assert len(scales) == 1
        assert scales.pop() == pytest.approx(2688 / most, rel=2**-7)


@pytest.mark.parametrize(("dtype", "name"), [("q4_0", "w4a16-g32"), ("q8_0", "w8a16-g32")])
def test_blocks_of_a_gguf_keep_their_codes_there_and_back(dtype: str, name: str, source: Path, tmp_path: Path) -> None:
    aprfmt.export_model(source, tmp_path / "a.gguf", dtype=dtype, pure=True)
    report = aprfmt.convert_model(tmp_path / "a.gguf", tmp_path / "out", format="hf", dtype=name)
    assert not [loss for loss in report.losses if name in loss]
    aprfmt.export_model(tmp_path / "out", tmp_path / "b.gguf")
    with aprfmt.open(tmp_path / "a.gguf") as a, aprfmt.open(tmp_path / "b.gguf") as b:
        blocks = [n for n, t in a.tensors.items() if t.dtype == dtype.upper() and n.startswith("blk.")]
        assert len(blocks) == 14
        for block in blocks:
            assert b.tensors[block].dtype == a.tensors[block].dtype
            assert bytes(b.tensors[block].raw()) == bytes(a.tensors[block].raw())
    found = distances(tmp_path / "a.gguf", tmp_path / "out")
    assert max(distance.n_different for name, distance in found.items() if "_proj" in name) == 0


REFUSED = {
    "an 8-bit float without scales": ("f8_e4m3", {}, "needs scales", "--quantize fp8-dynamic"),
    "activations without calibration": ("nvfp4", {}, "scales of activations", "nvfp4a16"),
    "a typo": ("w4a61", {}, "unknown dtype or quantization scheme", "did you mean w4a16?"),
    "another word": ("int-quantized", {}, "unknown dtype or quantization scheme", "mxfp8"),
    "a group that no scheme has": ("w4a16-g48", {}, "unknown dtype or quantization scheme", "w4a16-g64"),
    "a file in llm-compressor's spelling": (
        "W4A16_ASYM",
        {"format": "gguf"},
        "a quantization scheme of Hugging Face folders",
        "--format hf",
    ),
    "a file": ("fp8-dynamic", {"format": "gguf"}, "a quantization scheme of Hugging Face folders", "--format hf"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_the_line_to_type(case: str, source: Path, tmp_path: Path) -> None:
    dtype, more, what, hint = REFUSED[case]
    with pytest.raises(aprfmt.AprError, match=what) as info:
        aprfmt.convert_model(source, tmp_path / "out", **{"format": "hf", "dtype": dtype, **more})  # type: ignore[arg-type]
    assert hint in str(info.value.hint)
    assert info.value.exit_code == 2
    assert not (tmp_path / "out").exists()


def test_other_names_of_a_scheme() -> None:
    names = {"W4A16_ASYM": "w4a16-asym", "w4a16-g128": "w4a16", "int8": "w8a8", "FP8": "fp8-dynamic"}
    assert {name: getattr(find_scheme(name), "id", None) for name in names} == names


def test_only_schemes_that_divide_the_rows_are_proposed(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    build(replace(find_case("llama"), tokenizer=BYTES), folder, None)
    with pytest.raises(RefusedError, match="no weight can be quantized, as groups of 128") as info:
        aprfmt.convert_model(folder, tmp_path / "out", format="hf", dtype="w4a16")
    named = str(info.value.hint).removeprefix("choose another scheme: ").split(", ")
    assert {"w8a8", "w4a16-g32"} <= {*named}
    assert not {"w4a16", "w4a16-asym"} & {*named}


def test_quantized_weights_are_not_quantized_again(source: Path, tmp_path: Path) -> None:
    aprfmt.export_model(source, tmp_path / "a.gguf", dtype="q4_0")
    with pytest.raises(
        aprfmt.AprError, match="Q4_0 is already quantized; quantizing it again to fp8-dynamic"
    ) as caught:
        aprfmt.convert_model(tmp_path / "a.gguf", tmp_path / "out", format="hf", dtype="fp8-dynamic")
    assert "--format hf --dtype bf16" in str(caught.value.hint)
    aprfmt.convert_model(tmp_path / "a.gguf", tmp_path / "decoded", format="hf", dtype="bf16")
    aprfmt.convert_model(tmp_path / "decoded", tmp_path / "decoded8", format="hf", dtype="fp8-dynamic")
    aprfmt.convert_model(source, tmp_path / "w4", format="hf", dtype="w4a16-g32")
    with pytest.raises(aprfmt.AprError, match="packed integers is already quantized"):
        aprfmt.convert_model(tmp_path / "w4", tmp_path / "out", format="hf", dtype="nvfp4a16")
    aprfmt.convert_model(source, tmp_path / "fp8", format="hf", dtype="fp8-block")
    aprfmt.convert_model(tmp_path / "fp8", tmp_path / "out", format="hf", dtype="w4a16-g32")


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_weight_that_is_not_finite_is_refused(value: float, source: Path, tmp_path: Path) -> None:
    import shutil

    from safetensors.torch import load_file, save_file

    shutil.copytree(source, tmp_path / "in")
    tensors = load_file(tmp_path / "in" / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = value
    save_file(tensors, tmp_path / "in" / "model.safetensors", {"format": "pt"})
    for name in ("fp8-dynamic", "nvfp4a16"):
        with pytest.raises(aprfmt.AprError, match="NaN or infinite") as info:
            aprfmt.convert_model(tmp_path / "in", tmp_path / "out", format="hf", dtype=name)
        assert info.value.tensor == "model.layers.1.mlp.up_proj.weight"
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "value"),
    [("fp8-dynamic", np.nan), ("fp8-dynamic", np.inf), ("fp8-block", np.inf), ("w8a8", np.nan), ("mxfp4", 255)],
)
def test_a_scale_that_is_no_number_is_refused(name: str, value: float, source: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    aprfmt.convert_model(source, tmp_path / "in", format="hf", dtype=name)
    tensors = load_file(tmp_path / "in" / "model.safetensors")
    scales = next(part for part in tensors if part.startswith("model.layers.1.mlp.up_proj.weight_scale"))
    tensors[scales].view(-1)[-1] = value
    save_file(tensors, tmp_path / "in" / "model.safetensors", {"format": "pt"})
    with pytest.raises(aprfmt.AprError, match="scales that are NaN or infinite") as info:
        aprfmt.convert_model(tmp_path / "in", tmp_path / "out.gguf")
    assert info.value.tensor == scales
    assert not (tmp_path / "out.gguf").exists()


def test_a_model_whose_rows_no_group_divides_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "in"
    build(replace(find_case("llama"), tokenizer=BYTES), source, None)
    with pytest.raises(aprfmt.AprError, match="no weight can be quantized, as groups of 128 do not divide"):
        aprfmt.convert_model(source, tmp_path / "out", format="hf", dtype="w4a16")
    assert not (tmp_path / "out").exists()


def test_a_tied_head_is_not_quantized(tmp_path: Path) -> None:
    case = find_case("llama")
    build(replace(case, config={**case.config, "tie_word_embeddings": True}, tokenizer=BYTES), tmp_path / "in", None)
    for name, key in (("fp8-dynamic", "ignore"), ("fp8-block", "modules_to_not_convert")):
        aprfmt.convert_model(tmp_path / "in", tmp_path / name, format="hf", dtype=name)
        config = json.loads((tmp_path / name / "config.json").read_text())
        assert "lm_head" in config["quantization_config"][key]
        assert "lm_head.weight" not in aprfmt.load_file(tmp_path / name / "model.safetensors")


def test_an_alias_writes_what_the_scheme_writes(source: Path, tmp_path: Path) -> None:
    aprfmt.convert_model(source, tmp_path / "in", format="hf", dtype="fp8-block")
    for name in ("W4A16_G32", "w4a16-g32"):
        aprfmt.convert_model(tmp_path / "in", tmp_path / name, format="hf", dtype=name)
    same = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("W4A16_G32", "w4a16-g32")]
    assert same[0] == same[1]


def test_names_of_schemes_have_aliases() -> None:
    found = serving.serving_scheme("FP8"), serving.serving_scheme("W4A16_G64"), serving.serving_scheme("bf16")
    assert [scheme and scheme.id for scheme in found] == ["fp8-dynamic", "w4a16-g64", None]
