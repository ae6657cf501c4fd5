"""Adapters of tiny random models, made by PEFT itself, and what PEFT, llama.cpp's script and mlx_lm make of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from arch_models import build, find_case, write_tokenizers

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")

FAMILIES: dict[str, tuple[str, ...]] = {
    "llama": (*ATTENTION, *MLP),
    "mistral": (*ATTENTION, *MLP),
    "qwen2": (*ATTENTION, *MLP),
    "qwen3": (*ATTENTION, *MLP),
    "gemma2": (*ATTENTION, *MLP),
    "gemma3_text": (*ATTENTION, *MLP),
    "phi3": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
    "granite": (*ATTENTION, *MLP),
    "olmo2": (*ATTENTION, *MLP),
    "starcoder2": (*ATTENTION, "c_fc", "c_proj"),
    "stablelm": (*ATTENTION, *MLP),
    "cohere": (*ATTENTION, *MLP),
    "gpt_neox": ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"),
    "falcon": ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"),
}
"""Cases of arch_models and the modules that adapters of them change."""


def write_base(case_id: str, folder: Path) -> Any:
    """Writes the Hugging Face folder of a case; returns the transformers model."""
    case = find_case(case_id)
    return build(case, folder, write_tokenizers(folder.parent / "tokenizers", [case.tokenizer], 300))


def write_adapter(model: Any, folder: Path, targets: Sequence[str], base: Path | None = None, **options: Any) -> Any:
    """Writes the adapter that PEFT saves for `model`, with random factors; returns the PEFT model."""
    import warnings

    import torch
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        **{"r": 4, "lora_alpha": 8, "target_modules": list(targets), "task_type": "CAUSAL_LM", **options}
    )
    with warnings.catch_warnings(action="ignore"):  # of what PEFT asks of transformers
        adapted = get_peft_model(model, config).eval()
    torch.manual_seed(len(targets))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(parameter, std=0.05)
            elif "modules_to_save" in name:
                parameter.add_(0.01 * torch.randn_like(parameter))
    for one in adapted.peft_config.values():
        one.base_model_name_or_path = str(base) if base is not None else "example/base"
    with warnings.catch_warnings(action="ignore"):
        adapted.save_pretrained(str(folder))
    return adapted


def values(path: Path) -> dict[str, Any]:
    """The tensors of a file, decoded, by name."""
    import aprfmt

    with aprfmt.open(path) as model:
        return {name: tensor.numpy() for name, tensor in model.tensors.items()}


def files(folder: Path) -> Mapping[str, bytes]:
    """Every file of a folder."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()
    }
