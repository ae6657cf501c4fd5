"""A tiny llama model that each test changes and writes in the container it wants."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

Arrays = dict[str, "np.ndarray[Any, Any]"]
Write = Callable[..., Path]

METADATA: dict[str, Any] = {
    "model_type": "llama",
    "architecture": "llama",
    "hf_architecture": "LlamaForCausalLM",
    "hf_model_type": "llama",
    "hidden_size": 8,
    "num_layers": 1,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 4,
    "vocab_size": 10,
    "intermediate_size": 12,
    "max_position_embeddings": 32,
    "rope_theta": 10000.0,
    "rope_type": 0,
    "rms_norm_eps": 1e-5,
    "tied_embeddings": True,
    "tokenizer.model": "gpt2",
    "tokenizer.vocabulary": [chr(97 + i) for i in range(9)],
    "tokenizer.merges": [],
    "tokenizer.bos_token_id": 1,
}

SHAPES = {
    "model.embed_tokens.weight": (10, 8),
    "model.layers.0.input_layernorm.weight": (8,),
    "model.layers.0.mlp.down_proj.weight": (8, 12),
    "model.layers.0.mlp.gate_proj.weight": (12, 8),
    "model.layers.0.mlp.up_proj.weight": (12, 8),
    "model.layers.0.post_attention_layernorm.weight": (8,),
    "model.layers.0.self_attn.k_proj.weight": (4, 8),
    "model.layers.0.self_attn.o_proj.weight": (8, 8),
    "model.layers.0.self_attn.q_proj.weight": (8, 8),
    "model.layers.0.self_attn.v_proj.weight": (4, 8),
    "model.norm.weight": (8,),
}


@pytest.fixture
def arrays() -> Arrays:
    rng = np.random.default_rng(3)
    return {name: rng.normal(size=shape).astype("<f4") for name, shape in SHAPES.items()}


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """write(arrays, name="m.apr", **metadata changes; None removes a key) -> path."""
    from aprfmt import save_file

    def save(arrays: Arrays, name: str = "m.apr", **changes: Any) -> Path:
        metadata = {key: value for key, value in (METADATA | changes).items() if value is not None}
        save_file(arrays, tmp_path / name, metadata=metadata)
        return tmp_path / name

    return save
