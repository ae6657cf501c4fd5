"""NVFP4 weights with a scale of the tensor: moved to a GGUF, an `.apr` and back with every code and scale."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from arch_models import relative_error, token_ids
from converter_peer import ConverterPeer
from llama_peer import LlamaPeer
from packed_checkpoints import PackedCheckpoint, nvfp4_checkpoint, write_packed_case

import aprfmt
from aprfmt.arch.links import RowMapping
from aprfmt.canonical.packed import Decoding
from aprfmt.canonical.row_mapping import produce
from aprfmt.canonical.tensor_scales import scaled_weights
from aprfmt.codecs import nvfp4
from aprfmt.errors import CorruptError
from aprfmt.formats import gguf_write
from aprfmt.formats.out_tensor import OutTensor
from aprfmt.inspection.diff import diff
from aprfmt.inspection.validate import validate
from aprfmt.io.pipe import FileLayout, WriteOptions, write_file

pytest.importorskip("torch")

QWEN2: PackedCheckpoint = nvfp4_checkpoint("qwen2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("nvfp4")
    write_packed_case(nvfp4_checkpoint("llama"), root / "packed", root / "plain")
    return root


@pytest.fixture(scope="module")
def theirs(folder: Path, llama_cpp_converter: Path) -> Path:
    ConverterPeer().convert_once(folder / "packed", folder / "theirs.gguf", "bf16", plain_vocabulary=True)
    return folder / "theirs.gguf"


def stored(path: Path) -> dict[str, tuple[str, bytes]]:
    with aprfmt.open(path) as model:
        return {name: (tensor.dtype, bytes(tensor.raw())) for name, tensor in model.tensors.items()}


def test_the_converters_gguf_is_valid_and_comes_back_with_the_codes_of_the_folder(
    folder: Path, theirs: Path, tmp_path: Path
) -> None:
    failed = [check for check in validate(theirs).checks if check.status == "fail"]
    assert [check for check in failed if check.id != "vocabulary.size"] == []
    assert aprfmt.import_model(theirs, tmp_path / "m.apr").lossless
    aprfmt.export_model(tmp_path / "m.apr", tmp_path / "again.gguf")
    assert (tmp_path / "again.gguf").read_bytes() == theirs.read_bytes()
    wanted = stored(folder / "packed")
    for number, source in enumerate((theirs, tmp_path / "m.apr")):
        back = tmp_path / f"back-{number}"
        aprfmt.export_model(source, back, format="hf")
        found = stored(back)
        codes = [name for name in wanted if "_proj" in name]
        assert len(codes) == 2 * 7 * 4
        assert {name: found[name] for name in codes} == {name: wanted[name] for name in codes}
        assert diff(folder / "packed", back, values=True).identical


def test_values_are_those_of_the_codes_times_the_scale(folder: Path, theirs: Path, tmp_path: Path) -> None:
    for number, source in enumerate((theirs, folder / "packed")):
        aprfmt.export_model(source, tmp_path / f"{number}.gguf", dtype="f32", pre="smollm", force=True)
    with aprfmt.open(tmp_path / "0.gguf") as a, aprfmt.open(tmp_path / "1.gguf") as b:
        for name, tensor in a.tensors.items():
            np.testing.assert_allclose(tensor.numpy(), b.tensors[name].numpy(), rtol=2e-7, err_msg=name)


def test_a_scale_that_llama_cpp_ignores_decodes_the_weight(tmp_path: Path) -> None:
    """Its qwen2 network multiplies by the scales of the attention, and not by those of the MLP."""
    write_packed_case(QWEN2, tmp_path / "packed", tmp_path / "plain")
    report = aprfmt.export_model(tmp_path / "packed", tmp_path / "m.gguf", pre="smollm")
    assert any("decoded from NVFP4: llama.cpp's qwen2 network ignores" in loss for loss in report.losses)
    found = {name: dtype for name, (dtype, _) in stored(tmp_path / "m.gguf").items()}
    assert found["blk.0.attn_q.weight"] == "NVFP4"
    assert "blk.0.attn_q.scale" in found
    assert found["blk.0.ffn_down.weight"] == "BF16"
    assert "blk.0.ffn_down.scale" not in found
    aprfmt.export_model(tmp_path / "packed", tmp_path / "f32.gguf", dtype="f32", pre="smollm")
    ids = token_ids(tmp_path / "plain")
    with LlamaPeer() as llama:
        ours, floats = (llama.logits(tmp_path / name, ids) for name in ("m.gguf", "f32.gguf"))
    assert relative_error(ours, floats) < 0.05  # it rounds the inputs of NVFP4 products to 8 bits


def test_validate_tells_of_a_scale_that_llama_cpp_ignores(tmp_path: Path, llama_cpp_converter: Path) -> None:
    write_packed_case(QWEN2, tmp_path / "packed", tmp_path / "plain")
    ConverterPeer().convert_once(tmp_path / "packed", tmp_path / "theirs.gguf", "bf16", plain_vocabulary=True)
    said = [check.message for check in validate(tmp_path / "theirs.gguf").checks if check.status == "fail"]
    assert any("llama.cpp's qwen2 network ignores blk.0.ffn" in message for message in said)
    aprfmt.convert_model(tmp_path / "theirs.gguf", tmp_path / "ours.gguf", license="MIT")
    said = [check.message for check in validate(tmp_path / "ours.gguf").checks if check.status == "fail"]
    assert not any("ignores" in message for message in said)


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf"), -1.0])
def test_a_tensor_scale_that_is_no_scale_is_refused(value: float, folder: Path, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(folder / "packed", tmp_path / "folder")
    tensors = load_file(tmp_path / "folder" / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight_scale_2"
    save_file(tensors | {name: torch.tensor(value)}, tmp_path / "folder" / "model.safetensors", {"format": "pt"})
    with pytest.raises(aprfmt.AprError, match="expected a positive finite scale") as info:
        aprfmt.export_model(tmp_path / "folder", tmp_path / "m.gguf", pre="smollm")
    assert info.value.tensor == name
    assert not (tmp_path / "m.gguf").exists()


@pytest.mark.parametrize("code", [0x7F, 0xFF, 0xB8])
def test_a_group_scale_that_is_nan_or_negative_is_refused(code: int, folder: Path, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(folder / "packed", tmp_path / "folder")
    tensors = load_file(tmp_path / "folder" / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight_scale"].view(torch.uint8)[5, 2] = code
    save_file(tensors, tmp_path / "folder" / "model.safetensors", {"format": "pt"})
    with pytest.raises(aprfmt.AprError, match="NaN or negative"):
        aprfmt.export_model(tmp_path / "folder", tmp_path / "m.gguf", pre="smollm")
    assert not (tmp_path / "m.gguf").exists()


def test_pieces_and_blocks_are_each_others_inverse() -> None:
    rng = np.random.default_rng(0)
    codes, scales = rng.bytes(32 * 9), bytes(rng.integers(0, 0x7F, 4 * 9).astype("u1"))
    blocks = nvfp4.pack(codes, scales)
    assert nvfp4.unpack(blocks) == (codes, scales)
    # Value 1 of group 2 is the high half of byte 16 of the pieces, the low half of byte 1 of that group in the block.
    assert blocks[4 + 8 * 2 + 1] & 15 == codes[16] >> 4
    with pytest.raises(CorruptError, match="NVFP4 block size"):
        nvfp4.unpack(blocks[:-1])
    with pytest.raises(CorruptError, match="do not match"):
        nvfp4.pack(codes, scales[4:])


def test_rows_of_several_scales_are_decoded_and_stacks_keep_one_each(tmp_path: Path) -> None:
    """Two matrices laid end to end have no one scale; stacked they have one each."""
    rng = np.random.default_rng(1)
    weights = [encoded(rng.normal(size=(2, 64))) for _ in range(2)]
    write_scaled(tmp_path / "m.gguf", weights, scales=[0.5, 2.0])
    with aprfmt.open(tmp_path / "m.gguf") as model:
        a, b = scaled_weights(model, Decoding(), lambda name: True)
        values = [np.float32(s) * model.tensors[w.name].numpy() for s, w in ((0.5, a), (2.0, b))]
        joined = produce((a, b), RowMapping(((2, 64), (2, 64)), ((4, 64),)), 0)
        assert joined.dtype == "F32"
        assert not joined.scales
        np.testing.assert_array_equal(joined.values(), np.concatenate(values))
        stack = produce((a, b), RowMapping(((2, 64), (2, 64)), ((2, 2, 64),)), 0)
        assert stack.dtype == "NVFP4"
        assert stack.scales == {"scale": (0.5, 2.0)}
        np.testing.assert_array_equal(stack.values(), np.stack(values))
        inner = produce((stack.as_source("stack"),), RowMapping(((2, 64), (2, 64)), ((2, 2, 64),)), 1, inverse=True)
        assert inner.scales == {"scale": (2.0,)}
        np.testing.assert_array_equal(inner.values(), values[1])


def encoded(values: Any) -> bytes:
    from aprfmt.codecs.recode import encode

    return bytes(encode("NVFP4", values.astype("<f4")))


def write_scaled(path: Path, weights: list[bytes], scales: list[float]) -> None:
    tensors = []
    for number, (data, scale) in enumerate(zip(weights, scales, strict=True)):
        tensors.append(OutTensor(f"w{number}.weight", "NVFP4", (2, 64), len(data), lambda data=data: [data]))  # type: ignore[misc]
        one = np.float32(scale).tobytes()
        tensors.append(OutTensor(f"w{number}.scale", "F32", (1,), 4, lambda one=one: [one]))  # type: ignore[misc]
    write_file(str(path), FileLayout(path.name, gguf_write.layout([], tensors)), WriteOptions())
