"""Tiny llamas for tests of teachers: GGUF files of random blocks, and a folder that llama.cpp's types divide."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import plain_models
from gguf_images import write_peer
from train_blocks import BYTES, random_blocks

D, FFN, HEADS, KV_HEADS, VOCAB, LAYERS = 256, 512, 4, 2, 320, 4

SIZES = {"Q4_K": 2e-4, "Q6_K": 5e-5, "Q8_0": 8e-4}
"""Scales of blocks whose values are then about 0.06."""

MATRICES = {
    "attn_q": (D, D),
    "attn_k": (D // 2, D),
    "attn_v": (D // 2, D),
    "attn_output": (D, D),
    "ffn_gate": (FFN, D),
    "ffn_up": (FFN, D),
    "ffn_down": (D, FFN),
}

MIX = dict.fromkeys(MATRICES, "Q4_K") | {"attn_v": "Q6_K", "ffn_down": "Q6_K", "output": "Q6_K"}
"""As Q4_K_M has them, all layers alike."""

Stored = tuple[np.ndarray[Any, Any], str]


def write_gguf(path: Path, types: Mapping[str, str] = MIX, *, tied: bool = False, layers: int = LAYERS) -> Path:
    """A llama of random blocks; `types` by GGUF name without layer and `.weight`, Q4_K where it says nothing.

    A type that holds no blocks is filled with small normal values.
    """
    sizes = {"token_embd": (VOCAB, D), "output_norm": (D,)} | ({} if tied else {"output": (VOCAB, D)})
    for n in range(layers):
        sizes |= {f"blk.{n}.attn_norm": (D,), f"blk.{n}.ffn_norm": (D,)}
        sizes |= {f"blk.{n}.{name}": size for name, size in MATRICES.items()}
    tensors = {
        f"{name}.weight": _tensor(types.get(name.rpartition(".")[2], "Q4_K"), size, seed)
        for seed, (name, size) in enumerate(sizes.items())
    }
    kind = gguf.GGUFValueType
    fields: list[tuple[str, gguf.GGUFValueType, Any]] = [
        ("llama.block_count", kind.UINT32, layers),
        ("llama.context_length", kind.UINT32, 128),
        ("llama.embedding_length", kind.UINT32, D),
        ("llama.feed_forward_length", kind.UINT32, FFN),
        ("llama.attention.head_count", kind.UINT32, HEADS),
        ("llama.attention.head_count_kv", kind.UINT32, KV_HEADS),
        ("llama.attention.layer_norm_rms_epsilon", kind.FLOAT32, 1e-5),
    ]
    write_peer(path, fields, tensors)
    return path


def _tensor(dtype: str, size: tuple[int, ...], seed: int) -> Stored:
    random = np.random.default_rng(seed)
    if len(size) == 1:
        return random.uniform(0.5, 1.5, size).astype(np.float32), "F32"
    if dtype not in BYTES:
        values = (random.normal(size=size) * 0.06).astype(np.float32)
        return gguf.quants.quantize(values, gguf.GGMLQuantizationType[dtype]), dtype
    per_block = 32 if dtype == "Q8_0" else 256
    blocks = random_blocks(dtype, size[0] * size[1] // per_block, seed, SIZES[dtype])
    return blocks.reshape(size[0], -1), dtype


def write_folder(folder: Path) -> Path:
    """A Hugging Face folder of the same dims with a tokenizer; float32."""
    random = np.random.default_rng(3)
    names = dict(
        zip(MATRICES, ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"), strict=True)
    )
    arrays = {
        name: (random.normal(size=(VOCAB, D)) * 0.5).astype(np.float32)
        for name in ("model.embed_tokens.weight", "lm_head.weight")
    }
    for n in range(LAYERS):
        for name, size in MATRICES.items():
            part = "self_attn" if name.startswith("attn") else "mlp"
            values = (random.normal(size=size) * 0.06).astype(np.float32)
            arrays[f"model.layers.{n}.{part}.{names[name]}.weight"] = values
        for norm in ("input_layernorm", "post_attention_layernorm"):
            arrays[f"model.layers.{n}.{norm}.weight"] = random.uniform(0.5, 1.5, D).astype(np.float32)
    arrays["model.norm.weight"] = random.uniform(0.5, 1.5, D).astype(np.float32)
    return plain_models.write_folder(
        folder,
        arrays,
        hidden_size=D,
        intermediate_size=FFN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
    )
