"""The backward pass of silu(gate) * up on a GPU, beside float64."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from aprtrain.kernels.gated import silu_gated

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("width", [8, 1000, 4864])
def test_the_gradient_is_that_of_the_definition(width: int, compiled: bool) -> None:
    generator = torch.Generator("cuda").manual_seed(width)
    both, arriving = (
        torch.randn(3, 17, n, generator=generator, device="cuda").mul_(4).bfloat16() for n in (2 * width, width)
    )
    exact = both.double().requires_grad_()
    gate, up = exact.chunk(2, -1)
    product = functional.silu(gate) * up
    (expected,) = torch.autograd.grad(product, exact, arriving.double())
    both.requires_grad_()
    found = (torch.compile(silu_gated, fullgraph=True) if compiled else silu_gated)(both)
    (grad,) = torch.autograd.grad(found, both, arriving)
    for value, want in ((found.detach(), product.detach()), (grad, expected)):
        assert float((value.double() - want).norm() / want.norm()) < 4e-3
        assert value.isfinite().all()


def test_large_gates_give_no_nan() -> None:
    both = torch.tensor([[3e38, -3e38, 100.0, -100.0, 1.0, 1.0, 1.0, 1.0]], device="cuda", dtype=torch.bfloat16)
    (grad,) = torch.autograd.grad(silu_gated(both.requires_grad_()).sum(), both)
    assert grad[0, 1:].isfinite().all()
    assert grad[0, 1] == grad[0, 3] == 0
