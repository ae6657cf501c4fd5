"""A one-layer llama folder around any tokenizer files, and the pieces of a SentencePiece model."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HIDDEN = 16


def write_folder(
    folder: Path, files: Mapping[str, bytes], vocab_size: int, *, rows: int | None = None, **config: Any
) -> Path:
    """Writes a Hugging Face folder of architecture llama, tied, F16, with `rows` rows of embedding."""
    import numpy as np
    from safetensors.numpy import save_file

    rng = np.random.default_rng(1)
    shapes = {
        "model.embed_tokens.weight": (vocab_size if rows is None else rows, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "model.layers.0.input_layernorm.weight": (HIDDEN,),
        "model.layers.0.post_attention_layernorm.weight": (HIDDEN,),
        **{f"model.layers.0.self_attn.{p}_proj.weight": (HIDDEN, HIDDEN) for p in "qkvo"},
        "model.layers.0.mlp.gate_proj.weight": (32, HIDDEN),
        "model.layers.0.mlp.up_proj.weight": (32, HIDDEN),
        "model.layers.0.mlp.down_proj.weight": (HIDDEN, 32),
    }
    folder.mkdir(parents=True)
    tensors = {name: rng.standard_normal(shape).astype(np.float16) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    body = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": HIDDEN,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "torch_dtype": "float16",
        **config,
    }
    (folder / "config.json").write_text(json.dumps(body, indent=2) + "\n")
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


def varint(value: int) -> bytes:
    """A protobuf number; negative ones take ten bytes."""
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def message(*fields: tuple[int, int | float | bytes]) -> bytes:
    """A protobuf message: integers as varints, floats as 32 bits, bytes with their length."""
    out = b""
    for number, value in fields:
        if isinstance(value, bytes):
            out += varint(number << 3 | 2) + varint(len(value)) + value
        elif isinstance(value, float):
            out += varint(number << 3 | 5) + struct.pack("<f", value)
        else:
            out += varint(number << 3) + varint(value)
    return out


def sentencepiece(
    pieces: Sequence[tuple[str, float, int]],
    trainer: Sequence[tuple[int, int | float | bytes]] = (),
    normalizer: Sequence[tuple[int, int | float | bytes]] = (),
) -> bytes:
    """The bytes of a tokenizer.model."""
    listed = [(1, message((1, text.encode()), (2, float(score)), (3, kind))) for text, score, kind in pieces]
    return message(*listed, (2, message(*trainer)), (3, message(*normalizer)))
