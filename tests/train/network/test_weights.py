"""A network's weights come out of every container the same, and a file that is none is refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import arch_models
import gguf
import numpy as np
import pytest
import torch
from llama_peer import LlamaPeer
from safetensors.torch import load_file, save_file
from torch import Tensor
from train_models import Maker, error, load, our_logits, same_winners

import aprfmt
from aprfmt.errors import (
    AprError,
    CorruptError,
    RefusedError,
    TruncatedError,
    UnknownFormatError,
    UnmappedError,
    UnsupportedError,
)
from aprtrain.network.names import hf_names
from aprtrain.network.weights import fingerprint, load_decoder, open_network, values

CASES = ["llama", "llama/llama3", "llama/yarn", "qwen2", "qwen3", "gemma2", "gemma3_text"]


def quantized(name: str, value: Tensor) -> Tensor:
    """What Q8_0 keeps of a matrix, by the gguf package."""
    if value.ndim < 2:
        return value
    kind = gguf.GGMLQuantizationType.Q8_0
    blocks = gguf.quants.quantize(value.detach().numpy(), kind)
    return torch.from_numpy(gguf.quants.dequantize(blocks, kind).astype(np.float32))


CHANGES: dict[str, Callable[[str, Tensor], Tensor] | None] = {
    "f32": None,
    "f16": lambda name, value: value.half().float() if value.ndim > 1 else value,
    "q8_0": quantized,
}
"""GGUF dtype -> what it keeps of a parameter."""


@pytest.mark.parametrize("dtype", CHANGES)
@pytest.mark.parametrize("case_id", CASES)
def test_a_gguf_computes_what_transformers_does_on_its_values(
    case_id: str, dtype: str, tiny: Maker, tmp_path: Path
) -> None:
    model = tiny(case_id)
    aprfmt.export_model(model.folder, tmp_path / "m.gguf", dtype=dtype)
    logits, expected = our_logits(load(tmp_path / "m.gguf"), model.ids_NT), model.logits(CHANGES[dtype])
    assert error(logits, expected) < 1e-5
    assert same_winners(logits, expected)


@pytest.mark.parametrize("dtype", ["f32", "q8_0"])
@pytest.mark.parametrize("case_id", ["llama", "qwen2", "gemma3_text"])
def test_an_apr_computes_the_same(case_id: str, dtype: str, tiny: Maker, tmp_path: Path) -> None:
    model = tiny(case_id)
    aprfmt.import_model(model.folder, tmp_path / "m.apr", dtype=dtype)
    logits = our_logits(load(tmp_path / "m.apr"), model.ids_NT)
    assert error(logits, model.logits(CHANGES[dtype])) < 1e-5


def test_an_apr_of_a_gguf_computes_the_same(tiny: Maker, tmp_path: Path) -> None:
    model = tiny("llama")
    aprfmt.export_model(model.folder, tmp_path / "m.gguf", dtype="f16")
    aprfmt.import_model(tmp_path / "m.gguf", tmp_path / "m.apr")
    logits = our_logits(load(tmp_path / "m.apr"), model.ids_NT)
    assert error(logits, model.logits(CHANGES["f16"])) < 1e-5


def test_weights_are_rounded_once_into_the_dtype_they_are_loaded_in(tiny: Maker) -> None:
    stored = load_file(tiny("llama").folder / "model.safetensors")
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        loaded = load(tiny("llama").folder, dtype).hf_tensors()
        assert set(loaded) == set(stored)
        assert all(torch.equal(loaded[name], tensor.to(dtype)) for name, tensor in stored.items())


def test_a_matrix_is_never_whole_in_another_dtype(smollm2_gguf: Path) -> None:
    with open_network(smollm2_gguf) as network:
        assert network.tokenizer is not None
        assert (network.shape.n_layers, network.shape.d_model, network.shape.tied) == (30, 576, True)
        embedding = network.tensors["model.embed_tokens.weight"]
        sizes = [part.numel() for part in values(embedding, torch.bfloat16)]
    assert sum(sizes) == 49152 * 576
    assert max(sizes) <= 1 << 20


def test_a_fingerprint_is_that_of_the_values(tiny: Maker, tmp_path: Path) -> None:
    folder = tiny("qwen2").folder
    aprfmt.import_model(folder, tmp_path / "m.apr")
    for kind in ("f32", "q8_0"):
        aprfmt.export_model(folder, tmp_path / f"{kind}.gguf", dtype=kind)
    with open_network(folder) as network:
        expected = fingerprint(network)
    shutil.copytree(folder, tmp_path / "changed")
    tensors = load_file(tmp_path / "changed" / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][5, 7] += 1
    save_file(tensors, tmp_path / "changed" / "model.safetensors", {"format": "pt"})
    for name, same in (("m.apr", True), ("f32.gguf", True), ("q8_0.gguf", False), ("changed", False)):
        with open_network(tmp_path / name) as network:
            assert (fingerprint(network) == expected) is same, name


@pytest.fixture
def damaged(tiny: Maker, tmp_path: Path) -> Callable[[str, Callable[[Tensor], Tensor | None]], Path]:
    """Gives a copy of a folder in which one tensor was changed, or left out."""

    def make(name: str, change: Callable[[Tensor], Tensor | None]) -> Path:
        folder = tmp_path / "damaged"
        shutil.copytree(tiny("llama").folder, folder)
        tensors = load_file(folder / "model.safetensors")
        value = change(tensors.pop(name))
        save_file(
            tensors if value is None else {**tensors, name: value.contiguous()},
            folder / "model.safetensors",
            {"format": "pt"},
        )
        return folder

    return make


def _one(value: float) -> Callable[[Tensor], Tensor]:
    def change(tensor: Tensor) -> Tensor:
        tensor.view(-1)[-1] = value
        return tensor

    return change


@pytest.mark.parametrize(
    ("name", "change", "kind", "words"),
    [
        ("model.layers.1.mlp.up_proj.weight", torch.zeros_like, RefusedError, "are zero"),
        ("model.embed_tokens.weight", torch.zeros_like, RefusedError, "are zero"),
        ("model.layers.0.self_attn.v_proj.weight", _one(float("nan")), CorruptError, "NaN or infinite"),
        ("model.norm.weight", _one(float("inf")), CorruptError, "NaN or infinite"),
        ("model.layers.1.self_attn.k_proj.weight", lambda tensor: None, RefusedError, "missing"),
        ("model.norm.weight", lambda tensor: None, RefusedError, "missing"),
        ("model.layers.0.mlp.down_proj.weight", lambda tensor: tensor[:, :64], RefusedError, "shape"),
        ("model.layers.0.mlp.down_proj.weight", lambda tensor: tensor[:0], RefusedError, "shape"),
    ],
)
def test_a_damaged_tensor_is_refused_by_name(
    damaged: Callable[[str, Callable[[Tensor], Tensor | None]], Path],
    name: str,
    change: Callable[[Tensor], Tensor | None],
    kind: type[AprError],
    words: str,
) -> None:
    folder = damaged(name, change)
    with pytest.raises(kind, match=words) as caught:
        load(folder)
    assert caught.value.tensor == name
    assert caught.value.exit_code in (4, 5)


def test_norms_and_biases_may_be_zero(damaged: Callable[..., Path]) -> None:
    assert not load(damaged("model.norm.weight", torch.zeros_like)).get_parameter("norm").any()


def test_files_that_hold_no_network_are_refused(tiny: Maker, tmp_path: Path, llama_cpp_models: Path) -> None:
    aprfmt.export_model(tiny("llama").folder, tmp_path / "m.gguf", dtype="f32")
    whole = (tmp_path / "m.gguf").read_bytes()
    cases: list[tuple[bytes, type[AprError]]] = [
        (b"", UnknownFormatError),
        (b"\0" * 4096, CorruptError),
        (whole[: len(whole) // 2], TruncatedError),
    ]
    for data, kind in cases:
        (tmp_path / "bad.gguf").write_bytes(data)
        with pytest.raises(kind), open_network(tmp_path / "bad.gguf"):
            pass
    with (
        pytest.raises(RefusedError, match="contains no tensors"),
        open_network(llama_cpp_models / "ggml-vocab-qwen2.gguf"),
    ):
        pass
    with pytest.raises(AprError, match="no such file"), open_network(tmp_path / "absent.gguf"):
        pass


def test_weights_without_a_config_are_refused(tiny: Maker, tmp_path: Path) -> None:
    shutil.copy(tiny("llama").folder / "model.safetensors", tmp_path)
    with (
        pytest.raises((RefusedError, UnsupportedError, UnmappedError)) as caught,
        open_network(tmp_path / "model.safetensors"),
    ):
        pass
    assert caught.value.exit_code in (4, 5)


def test_frequencies_that_nothing_explains_are_refused(tiny: Maker, tmp_path: Path) -> None:
    aprfmt.export_model(tiny("llama/llama3").folder, tmp_path / "m.gguf", dtype="f32")
    data = bytearray((tmp_path / "m.gguf").read_bytes())
    with aprfmt.open(tmp_path / "m.gguf") as model:
        factors = model.tensors["rope_freqs.weight"]
        odd = np.linspace(1, 3, factors.shape[0], dtype=np.float32).tobytes()
        data[factors.offset : factors.offset + factors.n_bytes] = odd
    (tmp_path / "odd.gguf").write_bytes(data)
    with pytest.raises(UnsupportedError, match="rope frequencies"), open_network(tmp_path / "odd.gguf"):
        pass


def test_every_tensor_of_the_shape_is_loaded(tiny: Maker) -> None:
    for case_id in CASES:
        with open_network(tiny(case_id).folder) as network:
            assert set(network.tensors) == set(hf_names(network.shape))
            assert not any(bool(p.isnan().any()) for p in load_decoder(network).parameters())


@pytest.mark.llama
@pytest.mark.parametrize("case_id", ["llama/llama3", "qwen2/yarn", "qwen3", "gemma2", "gemma3_text"])
def test_llama_cpp_computes_the_same(case_id: str, tiny: Maker, tmp_path: Path, llama_cpp: LlamaPeer) -> None:
    model = tiny(case_id)
    aprfmt.export_model(model.folder, tmp_path / "m.gguf", dtype="f32")
    peer = llama_cpp.logits(tmp_path / "m.gguf", model.ids_NT[0].tolist())
    logits = our_logits(load(tmp_path / "m.gguf"), model.ids_NT)[0].numpy()
    # Its tables of activations and of the exponential are half precision.
    assert arch_models.relative_error(logits, peer) < 2e-3
    assert arch_models.top1_equal(logits, peer)
