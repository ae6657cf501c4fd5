"""Folders for mlx_lm: tiny models whose config.json has the keys of published ones, which mlx_lm reads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import arch_models
from safetensors import safe_open

from aprfmt.convert.targets.mlx import older_keys

CHANGED: Mapping[str, Mapping[str, Any]] = {
    "granite": {"intermediate_size": 128},  # its 8 bits come in groups of 64
    "granitemoe": {"intermediate_size": 128},
    "gemma3_text/whole": {"vocab_size": 600},  # which it reads beside text_config
    "qwen3_next": {  # it knows the kinds of layers by this number alone
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
        "num_hidden_layers": 4,
        "full_attention_interval": 4,
    },
}
"""What differs from the cases of arch_models."""


def build(row: str, folder: Path, tokenizers: Mapping[str, Path], dtype: str = "float32") -> None:
    """The base case of `row`, its config.json with the keys of transformers 4 beside those of transformers 5."""
    case = arch_models.find_case(row)
    case = replace(case, config={**case.config, **CHANGED.get(row, {})}, dtype=dtype)
    if case.computable:
        arch_models.build(case, folder, tokenizers)
    else:
        arch_models.write_checkpoint(case, folder, tokenizers)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config |= {key: value for key, value in CHANGED.get(row, {}).items() if key not in config}
    if isinstance(part := config.get("text_config"), dict):
        part |= older_keys(part) | {"tie_word_embeddings": config["tie_word_embeddings"]} | part
        part["tie_word_embeddings"] = config["tie_word_embeddings"]
    older = older_keys(config)
    if config.keys() >= {"hidden_size", "num_attention_heads"}:
        older["head_dim"] = config["hidden_size"] // config["num_attention_heads"]
    path.write_text(json.dumps(older | config, indent=2))


def tensors(folder: Path) -> dict[str, tuple[Any, tuple[int, ...], bytes]]:
    """dtype, shape and bytes of every tensor of a folder, by name."""
    import torch

    found = {}
    for path in sorted(folder.glob("model*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118  # a file of safetensors is not a mapping
                tensor = file.get_tensor(name)
                found[name] = (tensor.dtype, tuple(tensor.shape), bytes(tensor.reshape(-1).view(torch.uint8).numpy()))
    return found


def files(folder: Path) -> dict[str, bytes]:
    """Every file of a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
