"""Small models in Mistral's own layout: params.json, consolidated.safetensors, tekken.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, LAYERS = 32, 4, 2, 16, 48, 2

PARAMS: dict[str, Any] = {
    "dim": HIDDEN,
    "n_layers": LAYERS,
    "head_dim": HEAD_DIM,
    "hidden_dim": FFN,
    "n_heads": HEADS,
    "n_kv_heads": KV_HEADS,
    "rope_theta": 1000000000.0,
    "norm_eps": 1e-05,
    "max_position_embeddings": 1024,
}
"""As in Mistral Small 3.1's params.json, at small sizes."""

YARN = {"original_max_position_embeddings": 256, "factor": 4, "apply_scale": False, "beta": 32, "alpha": 1}
MINISTRAL3 = {
    "yarn": YARN,
    "llama_4_scaling": {"original_max_position_embeddings": 256, "beta": 0.1},
    "tied_embeddings": False,
}
VISION = {"vision_encoder": {"hidden_size": 16, "num_hidden_layers": 1}}
MIXTRAL = {"moe": {"num_experts": 4, "num_experts_per_tok": 2}}


def shapes(vocab: int, params: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors of a network by Mistral's names."""
    found: dict[str, tuple[int, ...]] = {"tok_embeddings.weight": (vocab, HIDDEN), "norm.weight": (HIDDEN,)}
    if not params.get("tied_embeddings"):
        found["output.weight"] = (vocab, HIDDEN)
    mlp = {"w1": (FFN, HIDDEN), "w2": (HIDDEN, FFN), "w3": (FFN, HIDDEN)}
    for n in range(LAYERS):
        at = f"layers.{n}."
        rows = {"wq": HEADS * HEAD_DIM, "wk": KV_HEADS * HEAD_DIM, "wv": KV_HEADS * HEAD_DIM}
        found |= {f"{at}attention.{part}.weight": (size, HIDDEN) for part, size in rows.items()}
        found |= {f"{at}attention.wo.weight": (HIDDEN, HEADS * HEAD_DIM)}
        found |= {f"{at}{part}.weight": (HIDDEN,) for part in ("attention_norm", "ffn_norm")}
        if "moe" in params:
            n_experts = params["moe"]["num_experts"]
            found |= {f"{at}feed_forward.gate.weight": (n_experts, HIDDEN)}
            for e in range(n_experts):
                found |= {f"{at}feed_forward.experts.{e}.{part}.weight": shape for part, shape in mlp.items()}
        else:
            found |= {f"{at}feed_forward.{part}.weight": shape for part, shape in mlp.items()}
    if "vision_encoder" in params:
        found |= {
            "vision_encoder.patch_conv.weight": (16, 3, 2, 2),
            "vision_language_adapter.w_in.weight": (HIDDEN, 16),
        }
    return found


def write_mistral_folder(folder: Path, files: Mapping[str, bytes], vocab: int, **changed: Any) -> Path:
    """Writes a folder, weights in BF16."""
    import torch
    from safetensors.torch import save_file

    params = {**PARAMS, "vocab_size": vocab, **changed}
    torch.manual_seed(1)
    folder.mkdir()
    weights = {name: torch.randn(shape).to(torch.bfloat16) for name, shape in shapes(vocab, params).items()}
    save_file(weights, folder / "consolidated.safetensors")
    (folder / "params.json").write_text(json.dumps(params, indent=4))
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder
