"""MLX and mlx_lm in a process of their own: mlx may not know the processor, and its death must not be the suite's.

Run as a program it reads one JSON list of jobs from standard input: a list of a function's name and its arguments each.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

LIMIT_S = 400


def run(*jobs: Sequence[object]) -> None:
    """Does the jobs one after the other. Raises RuntimeError with the last words where the process fails or hangs."""
    environment = dict(os.environ, HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1")
    done = subprocess.run(
        [sys.executable, __file__], input=json.dumps(jobs), text=True, capture_output=True, timeout=LIMIT_S,
        env=environment, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"mlx ended with {done.returncode}: {done.stderr[-2000:]}")


def convert(source: str, output: str, bits: int, group_size: int, recipe: str | None = None) -> None:
    """What `mlx_lm.convert -q` does."""
    module: Any = import_module("mlx_lm.convert")
    module.convert(source, output, quantize=True, q_bits=bits, q_group_size=group_size, quant_predicate=recipe)


def quantize_folder(source: str, output: str, bits: int, group_size: int) -> None:
    """What `mlx_lm.convert -q` does, for folders whose tokenizer it need not know."""
    utils: Any = import_module("mlx_lm.utils")
    model, config = utils.load_model(Path(source), lazy=True)
    model, config = utils.quantize_model(model, config, group_size, bits)
    utils.save_model(output, model)
    utils.save_config(config, Path(output, "config.json"))


def quantize(folder: str, bits: int, group_size: int, dtype: str, mode: str) -> None:
    """`mx.quantize` of values.npy, F32, as `dtype`, and `mx.dequantize` of that, each part as a file of its bytes."""
    mx: Any = import_module("mlx.core")
    values = mx.array(np.load(Path(folder, "values.npy"))).astype(getattr(mx, dtype))
    parts = mx.quantize(values, group_size=group_size, bits=bits, mode=mode)
    decoded = mx.dequantize(*parts, group_size=group_size, bits=bits, mode=mode)
    name = f"{mode}-{dtype}-{bits}-{group_size}"
    stored = {f"{name}.weight": parts[0], f"{name}.scales": parts[1], f"{name}.decoded": decoded.astype(mx.float32)}
    if len(parts) > 2:
        stored[f"{name}.biases"] = parts[2]
    mx.save_safetensors(str(Path(folder, f"{name}.safetensors")), stored)


def logits(folder: str, ids: list[int], output: str) -> None:
    """The logits of the model in `folder` after each of the tokens, float32 [tokens, vocabulary], as .npy."""
    mx: Any = import_module("mlx.core")
    utils: Any = import_module("mlx_lm.utils")
    model, _ = utils.load_model(Path(folder))
    np.save(output, np.array(model(mx.array([ids])).astype(mx.float32))[0])


def adapted_logits(folder: str, adapter: str, ids: list[int], output: str) -> None:
    """The logits of the model in `folder` with an adapter beside it, as `logits` gives them."""
    mx: Any = import_module("mlx.core")
    utils: Any = import_module("mlx_lm.utils")
    model, _ = utils.load_model(Path(folder))
    model = utils.load_adapters(model, adapter)
    model.eval()
    np.save(output, np.array(model(mx.array([ids])).astype(mx.float32))[0])


def write_adapter(folder: str, adapter: str, keys: list[str], rank: int, scale: float) -> None:
    """What a training by mlx_lm leaves: adapters.safetensors, those of a step before, adapter_config.json."""
    mx: Any = import_module("mlx.core")
    tuner: Any = import_module("mlx_lm.tuner.utils")
    utils: Any = import_module("mlx_lm.utils")
    flatten: Any = import_module("mlx.utils").tree_flatten
    model, _ = utils.load_model(Path(folder))
    model.freeze()
    numbers = {"rank": rank, "scale": scale, "dropout": 0.0, "keys": keys}
    tuner.linear_to_lora_layers(model, len(model.layers), numbers)
    mx.random.seed(3)
    made = {
        name: 0.05 * mx.random.normal(value.shape) if name.endswith(("lora_a", "lora_b")) else value
        for name, value in flatten(model.trainable_parameters())
    }
    place = Path(adapter)
    place.mkdir(parents=True)
    config = {"fine_tune_type": "lora", "num_layers": len(model.layers), "lora_parameters": numbers, "model": folder}
    utils.save_config(config, place / "adapter_config.json")
    for name in ("0000100_adapters.safetensors", "adapters.safetensors"):
        mx.save_safetensors(str(place / name), made)


if __name__ == "__main__":
    for function, *arguments in json.load(sys.stdin):
        globals()[function](*arguments)
