"""Weights to encode as GGML blocks, and the rule of Q4_0 on steps."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

BLOCK = 64
"""Values that are whole blocks of every type."""


def random_values(n: int, seed: int) -> Tensor:
    """Blocks whose sizes range over what the scales of every type hold, with zeros and equal values among them."""
    generator = torch.Generator().manual_seed(seed)
    x_NB = torch.randn(n, BLOCK, generator=generator) * torch.exp2(torch.randint(-40, 9, (n, 1), generator=generator))
    x_NB[::7, ::3] = 0
    x_NB[1::5] = x_NB[1::5].sign() * x_NB[1::5, :1].abs()
    return x_NB.view(-1)


def near_powers() -> Tensor:
    """Largest values that are powers of two, or a few units in the last place beside them, of either sign."""
    steps = torch.arange(-6, 7, dtype=torch.int32)[:, None]
    bits = (torch.exp2(torch.arange(-100.0, 10.0)).view(torch.int32)[None] + steps).reshape(-1, 1)
    values = bits.view(torch.float32).expand(-1, BLOCK).clone()
    return (values * torch.linspace(-1, 1, BLOCK)).view(-1)


def ties() -> Tensor:
    """Values halfway between two codes of each type."""
    generator = torch.Generator().manual_seed(3)
    x_NB = torch.randint(-254, 255, (96, BLOCK), generator=generator).float()
    x_NB[:, 0], x_NB[:, 1] = -254, 254
    scales = torch.exp2(torch.arange(-10.0, 6.0)).repeat_interleave(6)[:, None]
    return torch.cat((x_NB * scales, (x_NB / 16).round() / 2 * scales)).view(-1)


CASES: dict[str, Callable[[], Tensor]] = {
    "random": lambda: random_values(300, 0),
    "powers": near_powers,
    "ties": ties,
    "zeros": lambda: torch.zeros(2 * BLOCK) * torch.tensor([1.0, -1.0]).repeat(BLOCK),
    "tiny": lambda: random_values(40, 1) * 2.0**-86,
    "below the least scale": lambda: random_values(40, 2) * 2.0**-110,
    "small scales": lambda: torch.linspace(0, 0.05, 40 * BLOCK) * torch.tensor([1.0, -1.0]).repeat(20 * BLOCK),
}


def by_rule(values: Tensor, steps: Tensor) -> tuple[Tensor, Tensor]:
    """Codes of each block, and the float64 scale with the least squared error."""
    x = values.view(-1, 32).double()
    ratio = torch.where(steps == 0, 0, x / steps.double().where(steps != 0, 1))
    codes = (ratio + 0.5).floor().clamp(-8, 7)
    return codes, (x * codes).sum(1, keepdim=True) / codes.square().sum(1, keepdim=True).clamp(min=1)
