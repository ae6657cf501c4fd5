"""Folders for mlx_lm: tiny models whose config.json has the keys of published ones, which mlx_lm reads."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import arch_models
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from aprfmt.arch.mlx_networks import NETWORKS
from aprfmt.convert.targets.mlx import older_keys

ONE_ATTENTION = {"layer_types": ["linear_attention"] * 3 + ["full_attention"], "num_hidden_layers": 4}
BLOCK = {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.5}}
LFM2 = {"block_dim": 64, "block_multiple_of": 32, "block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": False}
CASE_OF = {
    "deci": "deci/blocks",
    "gemma3n_text": "gemma3n_text/whole",
    "kimi_k3": "kimi_k3/plain",
    "mimo_v2_flash": "mimo_v2_flash/published",
    "minicpm3": "minicpm3/longrope",
    "minimax_m3": "minimax_m3/whole",
    "qwen3_5_moe_text": "qwen3_5_moe_text/whole",
    "qwen3_5_text": "qwen3_5_text/whole",
    "qwen3_vl_moe": "qwen3_vl_moe/published",
}
"""The cases of rows whose base case mlx_lm does not read: outside a wrapper, or without keys that it needs."""
CASES = (
    *(CASE_OF.get(row, row) for row in NETWORKS),
    *(
        "gemma3_text/whole",
        "gemma4_text/whole",
        "deepseek_v3/kimi_k25",
        "llama4_text/whole",
        "llama/llava",
        "llama/telechat3",
    ),
)
CHANGED: Mapping[str, Mapping[str, Any]] = {
    "apertus": {"mlp_bias": False, "post_norm": False, "qk_norm": True},
    "deci/blocks": {"block_configs": [BLOCK] * 5},
    "deepseek_v2": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}},
    "exaone_moe": {"is_moe_layer": [False, True, True, True]},
    "glm_moe_dsa": {"topk_method": "noaux_tc", "moe_layer_freq": 1, "scoring_func": "sigmoid"},
    "gpt2": {"n_ctx": 512},
    "gpt_bigcode": {"n_inner": 256},
    "gpt_neox": {"rotary_emb_base": 10000, "rotary_pct": 0.25, "intermediate_size": 256},
    "granite": {"intermediate_size": 128},  # its 8 bits come in groups of 64
    "granitemoe": {"intermediate_size": 128},
    "gemma3_text/whole": {"vocab_size": 600},  # which it reads beside text_config
    "gemma3n_text/whole": {
        "text_config": {
            "rope_local_base_freq": 10000.0, "rope_theta": 1e6, "final_logit_softcapping": 30.0, "laurel_rank": 64,
            "hidden_size_per_layer_input": 256, "altup_num_inputs": 4, "altup_coef_clip": 120.0,
            "altup_correct_scale": True, "altup_active_idx": 0, "tie_word_embeddings": True,
        },
    },
    "gemma4_text/whole": {"vocab_size": 600},
    "llama4_text/whole": {"text_config": {"num_experts_per_tok": 1}},
    "qwen3_vl_moe/published": {"text_config": {"norm_topk_prob": True}},
    "kimi_linear": {"rope_theta": 10000.0, "head_dim": 16, "model_max_length": 512},
    "lfm2": LFM2,
    "mimo": {"num_nextn_predict_layers": 0},
    "iquestloopcoder": {"head_dim": 32},  # its gates come in groups of 32
    "llama4_text": {"tie_word_embeddings": True, "moe_layers": [], "interleave_moe_layer_step": 8},
    "mamba2": {"intermediate_size": 128},
    "hunyuan_v1_moe": {
        "rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0}, "use_qk_norm": True,
        "use_mixed_mlp_moe": True, "use_cla": False, "cla_share_factor": 2, "num_shared_expert": 1,
    },
    "minimax_m2": {"shared_intermediate_size": 0},
    "qwen": {"kv_channels": 16},
    "qwen3_5_text/whole": {"text_config": ONE_ATTENTION},
    "qwen3_5_moe_text/whole": {"text_config": ONE_ATTENTION},
    "qwen3_next": {**ONE_ATTENTION, "full_attention_interval": 4},  # it knows the kinds of layers by this number alone
    "rwkv7": dict.fromkeys(("a_low_rank_dim", "v_low_rank_dim", "gate_low_rank_dim", "decay_low_rank_dim"), 64),
    "recurrent_gemma": {"conv1d_width": 4},
}  # fmt: skip
"""What differs from the cases of arch_models."""

PUBLISHED: Mapping[str, Mapping[str, Any]] = {
    "gemma4_text": {"global_head_dim": 16},
    "gemma4_text/whole": {"text_config": {"global_head_dim": 16}},
    "granite4": {"layer_types": ["attention"] * 4},
    "granitemoehybrid": {"layer_types": ["mamba", "attention", "mamba", "attention"]},
    "hunyuan_v1_moe": {"model_type": "hunyuan"},
    "qwen3_5_text/whole": {"text_config": {"rope_parameters": {"type": "default"}}},
    "qwen3_5_moe_text/whole": {"text_config": {"rope_parameters": {"type": "default"}}},
    "llama/llava": {"model_type": "pixtral"},
    "youtu": {"model_type": "youtu_llm"},
}
"""Keys of config.json as published models have them, where transformers writes others."""

RENAMED: Mapping[str, tuple[tuple[str, str], ...]] = {
    "gpt2": ((r"^transformer\.", ""),),
    "muse_glimmer_text": ((r"^model\.vision_", "vision_"),),
}
"""Patterns of the names that transformers saves, and what published checkpoints have instead."""

FOR_MLX: Mapping[str, tuple[tuple[str, str], ...]] = {
    "nanochat": (
        (r"^model\.embed_tokens\.", "transformer.wte."),
        (r"^model\.layers\.", "transformer.h."),
        (r"\.self_attn\.([qkv])_proj\.", r".attn.c_\1."),
        (r"\.self_attn\.o_proj\.", ".attn.c_proj."),
        (r"\.mlp\.fc1\.", ".mlp.c_fc."),
        (r"\.mlp\.fc2\.", ".mlp.c_proj."),
    ),
    "spark2_5": ((r"\.self_attn\.o_proj\.", ".self_attn.out_proj."),),
}
"""Patterns of the names in checkpoints of today, and those of the first ones, which mlx_lm reads alone."""

FUSED = ("qwen3_5_moe_text/whole", "qwen3_vl_moe/published")
"""Cases whose published checkpoints have the experts of a layer in two tensors."""


def build(case_id: str, folder: Path, tokenizers: Mapping[str, Path], dtype: str = "float32") -> None:
    """The case of that id, its config.json with the keys of transformers 4 beside those of transformers 5."""
    case, changed = arch_models.find_case(case_id), CHANGED.get(case_id, {})
    renames = (*case.renames, *RENAMED.get(case_id, ()))
    case = replace(case, config=_merged(case.config, changed), dtype=dtype, renames=renames)
    if case.computable:
        arch_models.build(case, folder, tokenizers)
    else:
        arch_models.write_checkpoint(case, folder, tokenizers)
    path = folder / "model.safetensors"
    if case_id in FUSED and not case.swapped:
        save_file(fused(load_file(path), case_id), path, {"format": "pt"})
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config |= {key: value for key, value in changed.items() if key not in config}
    if isinstance(part := config.get("text_config"), dict):
        tied = config.get("tie_word_embeddings", part.get("tie_word_embeddings", True))
        part |= older_keys(part) | part | {"tie_word_embeddings": tied}
    older = older_keys(config)
    if config.keys() >= {"hidden_size", "num_attention_heads"}:
        older["head_dim"] = config["hidden_size"] // config["num_attention_heads"]
    path.write_text(json.dumps(_merged(older | config, PUBLISHED.get(case_id, {})), indent=2))


def for_mlx(case_id: str, folder: Path) -> Path:
    """The folder that mlx_lm reads: `folder`, or a copy with the names of FOR_MLX."""
    if case_id not in FOR_MLX:
        return folder
    renames = FOR_MLX[case_id]
    copied = shutil.copytree(folder, folder.with_name(f"{folder.name}-first-names"))
    path = copied / "model.safetensors"
    tensors = {_renamed(name, renames): tensor for name, tensor in load_file(path).items()}
    save_file(tensors, path, {"format": "pt"})
    return copied


def _renamed(name: str, renames: tuple[tuple[str, str], ...]) -> str:
    for pattern, new in renames:
        name = re.sub(pattern, new, name)
    return name


def _merged(config: Mapping[str, Any], changed: Mapping[str, Any]) -> dict[str, Any]:
    """`config` with the values of `changed`, which has only the other keys of a part of it."""
    parts = {k: _merged(config.get(k, {}), value) for k, value in changed.items() if isinstance(value, dict)}
    return {**config, **changed, **parts}


def fused(tensors: dict[str, Any], case_id: str) -> dict[str, Any]:
    """The tensors, with the experts of each layer in two of them: the gate's rows before those of the up projection."""
    import torch

    swapped = arch_models.find_case(case_id).swapped
    first = [name for name in tensors if re.search(r"\.experts\.0\.gate_proj\.weight$", name)]
    for begin in (name.partition("experts.0.")[0] + "experts." for name in first):
        count = sum(name.startswith(begin) and name.endswith(".gate_proj.weight") for name in tensors)
        gate, up, down = (
            torch.stack([tensors.pop(f"{begin}{e}.{word}_proj.weight") for e in range(count)])
            for word in ("gate", "up", "down")
        )
        stacks = {f"{begin}gate_up_proj": torch.cat((gate, up), 1), f"{begin}down_proj": down}
        tensors |= {name: tensor.mT if swapped else tensor for name, tensor in stacks.items()}
    return tensors


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
