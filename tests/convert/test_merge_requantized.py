"""Adapters merged into quantized bases and quantized again: to the same scheme, with the error of each weight."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from arch_models import find_case
from tiny_models import BYTES, build

import aprfmt
from aprfmt.types import Array

torch = pytest.importorskip("torch")

TARGETS = {"self_attn.q_proj": (64, 128), "mlp.up_proj": (256, 128), "mlp.down_proj": (128, 256)}
CHANGED = sorted(f"model.layers.{n}.{name}.weight" for n in range(2) for name in TARGETS)
RANK = 4


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("requantized") / "source"
    case = find_case("llama")
    sizes = {"hidden_size": 128, "intermediate_size": 256}
    build(replace(case, config={**case.config, **sizes}, tokenizer=BYTES), folder, None, dtype="bfloat16")
    return folder


def write_adapter(folder: Path, size: float) -> Path:
    from safetensors.torch import save_file

    torch.manual_seed(0)
    tensors = {}
    for weight in CHANGED:
        rows, columns = TARGETS[weight.split(".", 3)[3].removesuffix(".weight")]
        base = f"base_model.model.{weight.removesuffix('.weight')}"
        tensors[f"{base}.lora_A.weight"] = torch.randn(RANK, columns) * size
        tensors[f"{base}.lora_B.weight"] = torch.randn(rows, RANK) * 0.1
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": ["q_proj", "up_proj", "down_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def stored(folder: Path) -> dict[str, bytes]:
    with aprfmt.open(folder) as model:
        return {name: bytes(tensor.raw()) for name, tensor in model.tensors.items()}


def values(folder: Path, to: Path) -> dict[str, Array]:
    aprfmt.convert_model(folder, to, dtype="f32")
    return {name: np.asarray(value, "f8") for name, value in aprfmt.load_file(to).items()}


SCHEMES = {
    "fp8-dynamic": 0.03, "fp8-block": 0.03, "w8a8": 0.01, "w8a16-g32": 0.01, "w4a16-g32": 0.1,
    "w4a16-g32-asym": 0.1, "nvfp4a16": 0.1, "mxfp4": 0.13, "mxfp8": 0.04,
}  # fmt: skip
"""Scheme -> the largest relative error of random values."""


@pytest.mark.parametrize("name", SCHEMES)
def test_a_base_gets_its_scheme_again_and_the_error_is_counted(name: str, source: Path, tmp_path: Path) -> None:
    aprfmt.convert_model(source, tmp_path / "base", format="hf", dtype=name)
    lora = write_adapter(tmp_path / "lora", 0.05)
    report = aprfmt.merge_adapter(tmp_path / "base", lora, tmp_path / "out", format="hf")
    assert [row.scheme for row in aprfmt.inspect(tmp_path / "out").quantized] == [name]
    before, after = stored(tmp_path / "base"), stored(tmp_path / "out")
    assert before.keys() == after.keys()
    changed = {f"{part.rpartition('.')[0]}.weight" for part in before if before[part] != after[part]}
    assert sorted(changed) == CHANGED
    config = [json.loads((tmp_path / x / "config.json").read_text())["quantization_config"] for x in ("base", "out")]
    assert config[0] == config[1]

    aprfmt.merge_adapter(tmp_path / "base", lora, tmp_path / "floats", format="hf", dtype="f32")
    wanted, found = (values(tmp_path / x, tmp_path / f"{x}.safetensors") for x in ("floats", "out"))
    told = {row["tensor"]: row for row in report.requantized}
    assert sorted(told) == CHANGED
    for weight, row in told.items():
        error = float(np.linalg.norm(found[weight] - wanted[weight]) / np.linalg.norm(wanted[weight]))
        assert row["relative_error"] == pytest.approx(error, rel=0.05)
        assert 0 < error < SCHEMES[name]
    assert not any("decoded from" in loss for loss in report.losses)
    assert any("6 merged weights requantized from" in loss for loss in report.losses)
    assert report.to_json()["requantized"] == report.requantized


@pytest.mark.parametrize("name", ["fp8-dynamic", "w8a16-g32", "w4a16-g32", "nvfp4a16"])
def test_an_adapter_of_almost_nothing_changes_almost_no_code(name: str, source: Path, tmp_path: Path) -> None:
    aprfmt.convert_model(source, tmp_path / "base", format="hf", dtype=name)
    report = aprfmt.merge_adapter(
        tmp_path / "base", write_adapter(tmp_path / "lora", 1e-9), tmp_path / "out", format="hf"
    )
    assert max(row["relative_error"] for row in report.requantized) < 2e-3
    a, b = (values(tmp_path / x, tmp_path / f"{x}.safetensors") for x in ("base", "out"))
    for weight in CHANGED:
        assert np.linalg.norm(a[weight] - b[weight]) < 5e-3 * np.linalg.norm(a[weight])


def test_blocks_of_a_gguf_are_counted_too(source: Path, tmp_path: Path) -> None:
    aprfmt.export_model(source, tmp_path / "base.gguf", dtype="q4_0", pure=True)
    lora = write_adapter(tmp_path / "lora", 0.05)
    report = aprfmt.merge_adapter(tmp_path / "base.gguf", lora, tmp_path / "out.gguf")
    assert {(row["from"], row["to"]) for row in report.requantized} == {("Q4_0", "Q4_0")}
    aprfmt.merge_adapter(tmp_path / "base.gguf", lora, tmp_path / "floats.gguf", dtype="f32")
    with aprfmt.open(tmp_path / "out.gguf") as out, aprfmt.open(tmp_path / "floats.gguf") as floats:
        for row in report.requantized:
            wanted, found = (np.asarray(model.tensors[row["tensor"]], "f8") for model in (floats, out))
            error = float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))
            assert row["relative_error"] == pytest.approx(error, rel=1e-3)


def awq(folder: Path) -> None:
    """Rewrites w4a16-g32-asym weights in the layout of AWQ."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    found = dict(tensors)
    for name in [n for n in tensors if n.endswith(".weight_packed")]:
        base = name.removesuffix("weight_packed")
        words = tensors[name].numpy().view("u4")
        codes = np.stack([words >> 4 * i & 15 for i in range(8)], axis=2).reshape(words.shape[0], -1)
        zeros = tensors[f"{base}weight_zero_point"].numpy().view("u4")
        zero = np.stack([zeros >> 4 * i & 15 for i in range(8)], axis=1).reshape(-1, zeros.shape[1])

        def packed(fields: Array) -> Any:
            eights = fields.T.reshape(fields.shape[1], -1, 8)
            out = sum(eights[..., i].astype("u4") << 4 * place for i, place in enumerate((0, 4, 1, 5, 2, 6, 3, 7)))
            return torch.from_numpy(np.ascontiguousarray(out, "u4").view("i4"))

        found |= {f"{base}qweight": packed(codes), f"{base}qzeros": packed(zero[: len(codes)])}
        found[f"{base}scales"] = tensors[f"{base}weight_scale"].T.contiguous().half()
        for ending in ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape"):
            del found[base + ending]
    save_file(found, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": 32,
        "zero_point": True,
        "version": "gemm",
    }
    (folder / "config.json").write_text(json.dumps(config))


def test_an_awq_base_gets_the_same_groups_and_zero_points(source: Path, tmp_path: Path) -> None:
    aprfmt.convert_model(source, tmp_path / "base", format="hf", dtype="w4a16-g32-asym")
    awq(tmp_path / "base")
    assert [row.scheme for row in aprfmt.inspect(tmp_path / "base").quantized] == ["AWQ"]
    lora = write_adapter(tmp_path / "lora", 0.05)
    report = aprfmt.merge_adapter(tmp_path / "base", lora, tmp_path / "out", format="hf")
    assert [row.scheme for row in aprfmt.inspect(tmp_path / "out").quantized] == ["AWQ"]
    assert {(row["from"], row["to"]) for row in report.requantized} == {("AWQ", "w4a16-g32-asym")}
    before, after = stored(tmp_path / "base"), stored(tmp_path / "out")
    changed = {f"{part.rpartition('.')[0]}.weight" for part in before if before[part] != after[part]}
    assert sorted(changed) == CHANGED


@pytest.mark.parametrize(("format", "name"), [("hf", "w4a16-g32"), ("hf", "fp8-dynamic"), ("gptq", "w4a16-g32")])
def test_an_adapter_of_the_head_alone_leaves_all_codes(format: str, name: str, source: Path, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    aprfmt.convert_model(source, tmp_path / "base", format=format, dtype=name)
    lora = write_adapter(tmp_path / "lora", 0.05)
    rows = len(aprfmt.load_file(source / "model.safetensors")["model.embed_tokens.weight"])
    parts = {"lora_A": torch.randn(RANK, 128), "lora_B": torch.randn(rows, RANK)}
    save_file(
        {f"base_model.model.lm_head.{part}.weight": value for part, value in parts.items()},
        lora / "adapter_model.safetensors",
    )
    (lora / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": ["lm_head"]})
    )
    aprfmt.merge_adapter(tmp_path / "base", lora, tmp_path / "out", format="hf")
    before, after = stored(tmp_path / "base"), stored(tmp_path / "out")
    assert {part for part in before if before[part] != after.get(part)} <= {"lm_head.weight"}
    configs = [json.loads((tmp_path / x / "config.json").read_text())["quantization_config"] for x in ("base", "out")]
    assert configs[0] == configs[1]
