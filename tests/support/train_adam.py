"""AdamW's updates beside torch's in float64."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from aprtrain.optim.rules import ADAMW, Settings, Updates


def check_updates(clip: float, device: str, round_down: Callable[[Tensor], Tensor] = Tensor.bfloat16) -> None:
    """Three updates and a spoilt one; `round_down` gives the copies in bfloat16."""
    generator = torch.Generator(device).manual_seed(0)
    weights = [torch.randn(n, generator=generator, device=device) for n in (5000, 7, 1024)]
    decays = [True, False, True]
    exact = [w.double().requires_grad_() for w in weights]
    groups = [{"params": [w], "weight_decay": 0.3 * d} for w, d in zip(exact, decays, strict=True)]
    wanted = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95), eps=1e-8)
    adam = Updates(weights, decays, Settings(clip=clip, weight_decay=0.3), [ADAMW] * len(weights))
    copies = [torch.empty_like(w, dtype=torch.bfloat16) for w in weights]
    for step in range(4):
        grads = [torch.randn(w.shape, generator=generator, device=device) * 0.1 for w in weights]
        norm = torch.linalg.vector_norm(torch.cat(grads))
        spoilt = step == 2
        if not spoilt:
            for own, grad in zip(exact, grads, strict=True):
                own.grad = grad.double() / max(1.0, float(norm) / clip if clip else 0.0)
            wanted.step()
        adam.update(weights, grads, 0.01, norm * torch.inf if spoilt else norm, torch.zeros_like(norm), copies)
    assert adam.count == 3
    for found, want, copy in zip(weights, exact, copies, strict=True):
        assert torch.allclose(found.double(), want.detach(), rtol=1e-5, atol=1e-7)
        assert torch.equal(copy, round_down(found))
