"""Files as the reference tool writes them, and weights that come without a config."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from plain_models import HEADS, METADATA, Weights, gguf_names, weights, write_folder, write_gguf
from safetensors.numpy import save_file

import aprfmt
from aprfmt import RawTensor
from aprfmt.arch.orders import indices
from aprfmt.codecs.recode import decode, encode


def permuted(arrays: Weights) -> Weights:
    """Q and K rows in GGUF order."""
    return {
        name: array[indices([("swap", (len(array) // 16, 2, 8))], len(array))]
        if "q_proj" in name or "k_proj" in name
        else array
        for name, array in arrays.items()
    }


def test_gguf_names_beside_a_copied_head(tmp_path: Path) -> None:
    arrays = weights(head=False)
    stored = gguf_names(permuted(arrays)) | {"lm_head.weight": arrays["model.embed_tokens.weight"]}
    aprfmt.save_file(stored, tmp_path / "m.apr", METADATA | {"tied_embeddings": True})
    aprfmt.export_model(tmp_path / "m.apr", tmp_path / "m.safetensors")
    back = aprfmt.load_file(tmp_path / "m.safetensors")
    assert back.keys() == arrays.keys()
    assert all(np.array_equal(back[name], array) for name, array in arrays.items())


@pytest.mark.parametrize("qk_norm", [False, True])
def test_a_head_size_that_only_the_tensors_tell(qk_norm: bool, tmp_path: Path) -> None:
    words = {"architecture": "qwen3", "hf_architecture": "Qwen3ForCausalLM"} if qk_norm else {}
    arrays = weights(qk_norm=qk_norm, head_dim=32)
    aprfmt.save_file(arrays, tmp_path / "m.apr", METADATA | words)
    aprfmt.export_model(tmp_path / "m.apr", tmp_path / "m.gguf", no_tokenizer=True)
    with aprfmt.open(tmp_path / "m.gguf") as model:
        assert model.hparams.head_dim == 32


def test_rows_padded_to_whole_blocks_become_q8_0_in_a_gguf(tmp_path: Path) -> None:
    blocks = np.random.default_rng(1).integers(0, 255, (1 << 12, 144), dtype=np.uint8)
    blocks[:, :4] = np.frombuffer(np.array([0.01, 0.02], np.float16).tobytes(), np.uint8)
    arrays: dict[str, Any] = {
        name: RawTensor("Q4_K", array.shape, blocks[: array.shape[0]].tobytes()) if array.ndim == 2 else array
        for name, array in weights().items()
    }
    aprfmt.save_file(arrays, tmp_path / "m.apr", METADATA)
    aprfmt.export_model(tmp_path / "m.apr", tmp_path / "m.gguf", no_tokenizer=True)
    gate = "model.layers.0.mlp.gate_proj.weight"
    expected = encode("Q8_0", decode("Q4_K", arrays[gate].data, arrays[gate].shape))
    with aprfmt.open(tmp_path / "m.gguf") as model:
        assert model.tensors["blk.0.ffn_gate.weight"].dtype == "Q8_0"
        assert bytes(model.tensors["blk.0.ffn_gate.weight"].raw()) == expected


def test_norms_in_blocks_become_f32_in_a_gguf(tmp_path: Path) -> None:
    arrays = {name: RawTensor("AprQ8", array.shape, encode("AprQ8", array)) for name, array in weights().items()}
    aprfmt.save_file(arrays, tmp_path / "m.apr", METADATA)
    aprfmt.export_model(tmp_path / "m.apr", tmp_path / "m.gguf", no_tokenizer=True)
    with aprfmt.open(tmp_path / "m.gguf") as model:
        assert {t.dtype for t in model.tensors.values() if len(t.shape) == 1} == {"F32"}
        assert {t.dtype for t in model.tensors.values() if len(t.shape) == 2} == {"F16"}


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.embed_tokens.weight", (8,)),
        ("model.layers.0.mlp.gate_proj.weight", ()),
        ("model.layers.0.self_attn.q_norm.weight", (0,)),
        ("model.layers.0.self_attn.q_proj.weight", None),
        ("model.layers." + "9" * 5000 + ".x", (1,)),
    ],
)
def test_damaged_weights_without_a_config_are_refused(name: str, shape: tuple[int, ...] | None, tmp_path: Path) -> None:
    arrays = weights(qk_norm=True)
    arrays.pop(name, None)
    if shape is not None:
        arrays[name] = np.zeros(shape, np.float32)
    save_file(arrays, tmp_path / "m.safetensors")
    with contextlib.suppress(aprfmt.AprError) if shape == (0,) else pytest.raises(aprfmt.AprError):
        aprfmt.import_model(tmp_path / "m.safetensors", tmp_path / "m.apr", arch="qwen3", allow_no_config=True)


def test_head_counts_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    from plain_models import GGUF_KEYS

    kind = GGUF_KEYS["llama.block_count"][0]
    keys = {key: value for key, value in GGUF_KEYS.items() if not key.endswith("embedding_length")}
    keys["llama.attention.head_count"] = (kind, HEADS * 10**6)
    source = write_gguf(tmp_path / "s.gguf", gguf_names(weights()), keys)
    with pytest.raises(aprfmt.AprError, match="is unknown or not an integer"):
        aprfmt.import_model(source, tmp_path / "m.apr", plan=True)


def test_an_encrypted_file_gives_no_empty_model(fixtures_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(aprfmt.AprError, match="payload is encrypted"):
        aprfmt.export_model(fixtures_dir / "vectors/golden/v1_encrypted_password.apr", tmp_path / "m.safetensors")


def test_norms_of_16_bits_are_f32_in_a_gguf(tmp_path: Path) -> None:
    """llama.cpp has no kernels for others."""
    arrays = {name: array.astype(np.float16) for name, array in weights().items()}
    aprfmt.export_model(write_folder(tmp_path / "f", arrays), tmp_path / "m.gguf")
    with aprfmt.open(tmp_path / "m.gguf") as model:
        assert {t.dtype for t in model.tensors.values() if t.ndim == 1} == {"F32"}
        assert {t.dtype for t in model.tensors.values() if t.ndim == 2} == {"F16"}
