"""silu(gate) * up on a GPU, its backward pass, the products around it and its e4m3, beside float64."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from aprtrain.kernels.fp8 import gated_linear, quantize_weight
from aprtrain.kernels.gated import add_product, feed_forward, gated_product, products_agree, silu_gated

pytestmark = pytest.mark.cuda
needs_quack = pytest.mark.skipif(find_spec("quack") is None, reason="needs quack-kernels")


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


def _layer(tokens: int, d_model: int, width: int) -> list[Tensor]:
    """Inputs in two rows, gate and up, down, and a gradient of the output."""
    generator = torch.Generator("cuda").manual_seed(width)
    shapes = (2, tokens, d_model), (2 * width, d_model), (d_model, width), (2, tokens, d_model)
    some = (torch.randn(s, generator=generator, device="cuda") for s in shapes)
    return [x.mul_(2 / s[-1] ** 0.5 if len(s) == 2 else 1).bfloat16() for x, s in zip(some, shapes, strict=True)]


def _near(value: Tensor, want: Tensor, most: float = 6e-3) -> bool:
    return float((value.double() - want).norm() / want.norm()) < most


@needs_quack
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("tokens", "d_model", "width"), [(100, 64, 48), (257, 896, 4864), (1, 8, 8)])
def test_a_feed_forward_layer_is_that_of_the_definition(tokens: int, d_model: int, width: int, compiled: bool) -> None:
    x, gate_up, down, arriving = _layer(tokens, d_model, width)
    exact = [value.double().requires_grad_() for value in (x, gate_up, down)]
    gate, up = functional.linear(exact[0], exact[1]).chunk(2, -1)
    h = functional.silu(gate) * up
    wanted = functional.linear(h, exact[2])
    expected = torch.autograd.grad(wanted, exact, arriving.double())
    assert _near(gated_product(x, gate_up), h.detach())
    inputs = [value.requires_grad_() for value in (x, gate_up, down)]
    out = (torch.compile(feed_forward, fullgraph=True) if compiled else feed_forward)(*inputs)
    assert _near(out.detach(), wanted.detach())
    for value, want in zip(torch.autograd.grad(out, inputs, arriving), expected, strict=True):
        assert value.is_contiguous()
        assert _near(value, want, 1e-2)


def test_a_product_is_added_in_place() -> None:
    h, _, down, total = _layer(50, 96, 96)
    wanted = total.double() + functional.linear(h.double(), down.double())

    def added(total: Tensor) -> Tensor:
        total = total * 1
        add_product(total, h, down)
        return total

    with torch.inference_mode():
        for found in (added(total), torch.compile(added, fullgraph=True)(total)):
            assert _near(found, wanted)


@needs_quack
def test_the_products_are_taken_where_they_agree() -> None:
    if torch.cuda.get_device_capability()[0] == 9:
        assert products_agree(learns=True)
        assert products_agree(learns=False)


@pytest.mark.parametrize("width", [16, 4864, 8960, 18944])
def test_e4m3_of_the_product_is_that_of_its_rows(width: int) -> None:
    both = torch.randn(33, 2 * width, device="cuda").mul_(3).bfloat16()
    weight = torch.randn(32, width, device="cuda").bfloat16()
    gate, up = both.double().chunk(2, -1)
    h = functional.silu(gate) * up
    scale = h.abs().amax(1, keepdim=True) / 448
    rounded = (h / scale).float().to(torch.float8_e4m3fn).double() * scale
    packed = quantize_weight(weight)
    wanted = rounded @ (packed.data_OI.double() * packed.scale_O.double()[:, None]).t()
    assert _near(gated_linear(both, packed, None), wanted)
    both[5, 3] = torch.nan
    found = gated_linear(both, packed, None)
    assert not found[5].isfinite().any()
    assert found[6:].isfinite().all()
