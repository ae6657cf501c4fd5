"""Writes the adapters of a LoRA student: a PEFT folder, and a GGUF adapter for llama.cpp."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

import aprfmt
from aprfmt.formats.safetensors import layout
from aprfmt.io.pipe import FileLayout, Literal, WriteOptions, write_folder
from aprtrain.checkpoints.state import out_tensor
from aprtrain.lora_spec import LoraSpec
from aprtrain.network.lora import pairs
from aprtrain.network.shape import Shape

FOLDER, GGUF = "adapter", "adapter.gguf"


def save_adapter(folder: Path, shape: Shape, spec: LoraSpec, masters: Mapping[str, Tensor], base: str) -> list[Path]:
    """Writes `adapter/` and `adapter.gguf` into a run's folder; returns their paths.

    Args:
        folder: of the run.
        shape, spec: of the student.
        masters: float32 pairs by parameter name, on the CPU.
        base: file or folder of the base model; only its name is stored.

    Raises AprError.
    """
    tensors, modules = [], dict[str, None]()
    for hf, a, b in pairs(shape, spec, masters):
        module = hf.removesuffix(".weight")
        modules[module.rpartition(".")[2]] = None
        for which, value in (("A", a), ("B", b)):
            name = f"base_model.model.{module}.lora_{which}.weight"
            tensors.append(out_tensor(name, "F32", value.float().contiguous()))
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": Path(base).name, "bias": "none",
        "r": spec.rank, "lora_alpha": spec.alpha, "lora_dropout": 0.0, "fan_in_fan_out": False,
        "inference_mode": True, "target_modules": [*modules],
    }  # fmt: skip
    files = [
        FileLayout("adapter_model.safetensors", layout(tensors, {"format": "pt"})),
        FileLayout("adapter_config.json", [Literal((json.dumps(config, indent=2) + "\n").encode())]),
    ]
    write_folder(str(folder / FOLDER), files, WriteOptions(force=True))
    aprfmt.convert_model(folder / FOLDER, folder / GGUF, base=base, force=True)
    return [folder / FOLDER, folder / GGUF]
