"""Attention by FlashAttention-4, beside float64; where there is a GPU of Hopper or later and the package."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from aprtrain.network.attention import AttentionPlan, Documents, attend, choose

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(find_spec("flash_attn") is None, reason="needs FlashAttention-4"),
    pytest.mark.filterwarnings("ignore:.*cannot be converted to a JitArgument"),
]


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("window", [0, 50])
@pytest.mark.parametrize(("heads", "size", "softcap"), [((14, 2), 64, 0.0), ((4, 4), 128, 0.0), ((8, 4), 128, 2.0)])
def test_values_and_gradients_are_those_of_the_definition(
    heads: tuple[int, int], size: int, softcap: float, window: int, packed: bool
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
    scores = q_all @ k_all.transpose(2, 3) * 0.1
    scores = (softcap * torch.tanh(scores / softcap) if softcap else scores).masked_fill(~seen[:, None], -torch.inf)
    wanted = (scores.softmax(-1) @ v_all).transpose(1, 2)
    expected = [wanted.detach(), *torch.autograd.grad(wanted, exact, arriving.double())]
    inputs = [x.requires_grad_() for x in (q, k, v)]
    plan = AttentionPlan("flash4", None, ends if packed else None, 256, window)
    out = attend(q, k, v, plan, scale=0.1, softcap=softcap)
    found = [out.detach(), *torch.autograd.grad(out, inputs, arriving)]
    for value, want in zip(found, expected, strict=True):
        assert float((value.double() - want).norm() / want.norm()) < 1e-2


def test_documents_and_rows_that_learn_take_it_and_reproducible_runs_do_not() -> None:
    tokens_NT = torch.zeros(2, 256, device="cuda", dtype=torch.int64)
    documents = Documents(Documents.of([200, 56, 256], 256).cu_seqlens.cuda(), 256)

    def kind(documents: Documents | None = documents, softcap: float = 0.0) -> str:
        heads = 14, 2, 64
        return choose(
            tokens_NT, documents, tokens_NT, window=0, softcap=softcap, heads=heads, dtype=torch.bfloat16
        ).kind

    assert kind() == kind(None) == kind(softcap=30.0) == kind(None, softcap=30.0) == "flash4"
    with torch.no_grad():
        assert kind() == "flash4"
        assert kind(None) == "cudnn"
    torch.use_deterministic_algorithms(True)
    try:
        assert kind() == "varlen"
        assert kind(None) == "causal"
        assert kind(softcap=30.0) == "eager"
    finally:
        torch.use_deterministic_algorithms(False)
