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


FP8 = {"quantization": {"qformat_weight": "fp8_e4m3", "qscheme_act": "TENSOR"}}
_RANK_Q, _RANK, _NOPE, _ROPE, _VALUE, _EXPERT = 24, 16, 16, 8, 12, 32
LATENT: dict[str, Any] = {
    "q_lora_rank": _RANK_Q,
    "kv_lora_rank": _RANK,
    "qk_nope_head_dim": _NOPE,
    "qk_rope_head_dim": _ROPE,
    "v_head_dim": _VALUE,
    "head_dim": _NOPE + _ROPE,
    "n_kv_heads": HEADS,
    "yarn": {**YARN, "original_max_position_embeddings": 4},
    "llama_4_scaling": {"original_max_position_embeddings": 4, "beta": 0.3},
    "moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "expert_hidden_dim": _EXPERT,
        "num_shared_experts": 1,
        "routed_scale": 1.5,
        "first_k_dense_replace": 1,
        "num_expert_groups": 1,
        "num_expert_groups_per_tok": 1,
        "route_every_n": 1,
    },
}
"""As in Mistral Large 3's params.json, at small sizes."""


def _latent_shapes(at: str, params: Mapping[str, Any], layer: int) -> dict[str, tuple[int, ...]]:
    """The tensors of a layer of latent attention, the first of them dense."""
    found: dict[str, tuple[int, ...]] = {
        f"{at}attention.wq_a.weight": (_RANK_Q, HIDDEN),
        f"{at}attention.q_a_norm.weight": (_RANK_Q,),
        f"{at}attention.wq_b.weight": (HEADS * (_NOPE + _ROPE), _RANK_Q),
        f"{at}attention.wkv_a_with_mqa.weight": (_RANK + _ROPE, HIDDEN),
        f"{at}attention.kv_a_norm.weight": (_RANK,),
        f"{at}attention.wkv_b.weight": (HEADS * (_NOPE + _VALUE), _RANK),
        f"{at}attention.wo.weight": (HIDDEN, HEADS * _VALUE),
    }
    width = FFN if layer == 0 else _EXPERT
    mlp = {"w1": (width, HIDDEN), "w2": (HIDDEN, width), "w3": (width, HIDDEN)}
    if layer == 0:
        return found | {f"{at}feed_forward.{part}.weight": shape for part, shape in mlp.items()}
    found |= {f"{at}gate.weight": (params["moe"]["num_experts"], HIDDEN)}
    modules = ("shared_experts", *(f"experts.{e}" for e in range(params["moe"]["num_experts"])))
    return found | {f"{at}{module}.{part}.weight": shape for module in modules for part, shape in mlp.items()}


def shapes(vocab: int, params: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors of a network by Mistral's names."""
    found: dict[str, tuple[int, ...]] = {"tok_embeddings.weight": (vocab, HIDDEN), "norm.weight": (HIDDEN,)}
    if not params.get("tied_embeddings"):
        found["output.weight"] = (vocab, HIDDEN)
    mlp = {"w1": (FFN, HIDDEN), "w2": (HIDDEN, FFN), "w3": (FFN, HIDDEN)}
    for n in range(LAYERS):
        at = f"layers.{n}."
        if "kv_lora_rank" in params:
            found |= _latent_shapes(at, params, n)
            found |= {f"{at}{part}.weight": (HIDDEN,) for part in ("attention_norm", "ffn_norm")}
            continue
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


def _packed(weights: Mapping[str, Any]) -> dict[str, Any]:
    """FP8 with one scale a matrix of the layers, and one of its inputs."""
    import torch

    found: dict[str, Any] = {}
    for name, values in weights.items():
        if values.ndim < 2 or not name.startswith("layers.") or name.endswith(".gate.weight"):
            found[name] = values
            continue
        stem, scale = name.removesuffix(".weight"), (values.float().abs().max() / 448).to(torch.bfloat16)
        found |= {name: (values.float() / scale.float()).to(torch.float8_e4m3fn), f"{stem}.qscale_weight": scale}
        found[f"{stem}.qscale_act"] = torch.tensor(0.5).to(torch.bfloat16)
    return found


def write_mistral_folder(folder: Path, files: Mapping[str, bytes], vocab: int, **changed: Any) -> Path:
    """Writes a folder, weights in BF16."""
    import torch
    from safetensors.torch import save_file

    params = {**PARAMS, "vocab_size": vocab, **changed}
    torch.manual_seed(1)
    folder.mkdir()
    weights = {name: torch.randn(shape).to(torch.bfloat16) for name, shape in shapes(vocab, params).items()}
    if "quantization" in params:
        weights = _packed(weights)
    save_file(weights, folder / "consolidated.safetensors")
    (folder / "params.json").write_text(json.dumps(params, indent=4))
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder
