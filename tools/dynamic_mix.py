"""The choice of mlx-lm's dynamic_quant, computed in torch: MLX is slow on most CPUs.

Its rule: with all modules in the lower bits, the gradient of the KL from the float model, times what the higher bits
change of a weight, per million of values, is the sensitivity of a module. The most sensitive ones get the higher bits.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from aprfmt.codecs.affine import Affine, round_trip

GROUP = 64
_BITS = (2, 3, 4, 5, 6, 8)
_PER_WEIGHT = 32 / GROUP
"""Bits of scale and bias."""


def module_bits(folder: Path, text: str, n_bytes: int, n_sequences: int = 4) -> tuple[dict[str, int], int]:
    """The bits of each module of a Hugging Face folder for weights of at most `n_bytes`, and the lower bits.

    Args:
        folder: the model, with float weights.
        text: calibration text; sequences of 512 tokens are used.
        n_bytes: of the weights that are quantized.
        n_sequences: how many.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ids = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt").input_ids[0][: 512 * n_sequences]
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    kinds = (torch.nn.Linear, torch.nn.Embedding)
    modules = {name: m for name, m in model.named_modules() if isinstance(m, kinds) and m.weight.shape[1] % GROUP == 0}
    if model.config.tie_word_embeddings:
        modules.pop("lm_head", None)
    sizes = {name: m.weight.numel() for name, m in modules.items()}

    def bytes_at(bits: float) -> float:
        return sum(sizes.values()) * (bits + _PER_WEIGHT) / 8

    low = max((bits for bits in _BITS[:-1] if bytes_at(bits) <= n_bytes), default=_BITS[0])
    high = _BITS[_BITS.index(low) + 1]
    model.requires_grad_(False)
    with torch.no_grad():
        wanted = [torch.log_softmax(model(part[None]).logits[0], -1).half() for part in ids.split(512)]
    differences = {}
    for name, module in modules.items():
        values = module.weight.numpy().copy()
        lower, higher = (round_trip(values, Affine(bits, GROUP), "F16") for bits in (low, high))
        module.weight.data = torch.from_numpy(lower)
        differences[name] = torch.from_numpy(lower - higher)
        module.weight.requires_grad_(True)
    for part, base in zip(ids.split(512), wanted, strict=True):
        found = torch.log_softmax(model(part[None]).logits[0], -1)
        loss: Any = torch.nn.functional.kl_div(found, base.float(), log_target=True, reduction="batchmean")
        loss.backward()
    gradients: dict[str, Any] = {name: module.weight.grad for name, module in modules.items()}
    sensitivity = {name: float((gradients[name] * differences[name]).sum()) / sizes[name] for name in modules}
    chosen, left = dict.fromkeys(modules, low), n_bytes - bytes_at(low)
    for name in sorted(modules, key=lambda name: -sensitivity[name]):
        more = sizes[name] * (high - low) / 8
        if more > left:  # its threshold is one number: all below stay at the lower bits
            break
        chosen[name], left = high, left - more
    return chosen, low
