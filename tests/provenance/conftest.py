"""A small llama folder of our own making, without transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

Folder = Callable[..., Path]

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 10,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
SHAPES = {
    "model.embed_tokens.weight": (10, 8),
    "model.norm.weight": (8,),
    "model.layers.0.input_layernorm.weight": (8,),
    "model.layers.0.post_attention_layernorm.weight": (8,),
    **{f"model.layers.0.self_attn.{p}_proj.weight": (8, 8) for p in "qkvo"},
    "model.layers.0.mlp.gate_proj.weight": (12, 8),
    "model.layers.0.mlp.up_proj.weight": (12, 8),
    "model.layers.0.mlp.down_proj.weight": (8, 12),
}


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    """folder(name, card text or None, **changes of config.json) -> path."""

    def make(name: str = "tiny-llama-v1.0", card: str | None = None, **config: object) -> Path:
        path = tmp_path / name
        path.mkdir(parents=True)
        rng = np.random.default_rng(5)
        tensors = {n: rng.normal(size=shape).astype(np.float32) for n, shape in SHAPES.items()}
        save_file(tensors, path / "model.safetensors", {"format": "pt"})
        (path / "config.json").write_text(json.dumps(CONFIG | config))
        if card is not None:
            (path / "README.md").write_text(card)
        return path

    return make
