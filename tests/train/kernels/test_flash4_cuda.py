"""Attention by FlashAttention-4, beside float64; where there is a GPU of Hopper or later and the package."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
from torch.nn import functional

from aprtrain.network.attention import AttentionPlan, Documents, attend, choose

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(find_spec("flash_attn") is None, reason="needs FlashAttention-4"),
    pytest.mark.filterwarnings("ignore:.*cannot be converted to a JitArgument"),
]


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("window", [0, 50])
@pytest.mark.parametrize(("heads", "size"), [((14, 2), 64), ((4, 4), 128)])
def test_values_and_gradients_are_those_of_the_definition(
    heads: tuple[int, int], size: int, window: int, packed: bool
) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    ends = Documents.of([100, 1, 155, 200, 56] if packed else [256, 256], 256, capacity=8).cu_seqlens.cuda()
    q, k, v, arriving = (
        torch.randn(2, 256, n, size, generator=generator, device="cuda", dtype=torch.bfloat16)
        for n in (heads[0], heads[1], heads[1], heads[0])
    )
    number = torch.searchsorted(ends, torch.arange(512, device="cuda", dtype=torch.int32), right=True).view(2, 256)
    back = torch.arange(256, device="cuda")[:, None] - torch.arange(256, device="cuda")
    seen = (number[:, :, None] == number[:, None, :]) & (back >= 0) & (back < (window or 256))
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    q_all, k_all, v_all = (x.transpose(1, 2).repeat_interleave(heads[0] // x.shape[2], 1) for x in exact)
    wanted = functional.scaled_dot_product_attention(q_all, k_all, v_all, seen[:, None], scale=0.1).transpose(1, 2)
    expected = [wanted.detach(), *torch.autograd.grad(wanted, exact, arriving.double())]
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out = attend(q, k, v, AttentionPlan("flash4", None, ends if packed else None, 256, window), scale=0.1)
    found = [out.detach(), *torch.autograd.grad(out, inputs, arriving)]
    for value, want in zip(found, expected, strict=True):
        assert float((value.double() - want).norm() / want.norm()) < 1e-2


def test_documents_and_rows_that_learn_take_it_and_reproducible_runs_do_not() -> None:
    tokens_NT = torch.zeros(2, 256, device="cuda", dtype=torch.int64)
    documents = Documents(Documents.of([200, 56, 256], 256).cu_seqlens.cuda(), 256)

    def kind(documents: Documents | None = documents) -> str:
        return choose(tokens_NT, documents, tokens_NT, window=0, heads=(14, 2, 64), dtype=torch.bfloat16).kind

    assert kind() == kind(None) == "flash4"
    with torch.no_grad():
        assert kind() == "flash4"
        assert kind(None) == "cudnn"
    torch.use_deterministic_algorithms(True)
    try:
        assert kind() == "varlen"
        assert kind(None) == "causal"
    finally:
        torch.use_deterministic_algorithms(False)
