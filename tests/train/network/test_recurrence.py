"""The chunked delta rule and short convolutions are the recurrences that define them, document by document."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from aprtrain.network.attention import AttentionPlan, Documents, KeyValueCache, places
from aprtrain.network.recurrence import DeltaNet, causal_conv, delta_rule


def plan_of(lengths: list[int], n: int) -> AttentionPlan:
    """Of documents in `n` rows."""
    tokens_NT = torch.zeros(n, sum(lengths) // n, dtype=torch.int64)
    return AttentionPlan("none", positions_NT=places(tokens_NT, Documents.of(lengths, tokens_NT.shape[1]))[0])


def inputs(n: int, t: int) -> list[Tensor]:
    """Q, K, V, decays and learning rates of three heads, in float64."""
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(n, t, 3, size, dtype=torch.float64, generator=generator) for size in (4, 4, 5))
    decay, beta = torch.rand(2, n, t, 3, dtype=torch.float64, generator=generator)
    return [x.requires_grad_() for x in (q, torch.nn.functional.normalize(k, dim=-1), v, -0.02 * decay, beta)]


def by_chunks(given: list[Tensor], plan: AttentionPlan) -> Tensor:
    q, k, v, decay, beta = given
    return delta_rule(q, k, v, decay, beta, plan)


def by_steps(given: list[Tensor], plan: AttentionPlan) -> Tensor:
    """The definition."""
    assert plan.positions_NT is not None
    q, k, v, decay, beta = given
    state, found = q.new_zeros(len(q), 3, 4, 5), []
    for t in range(q.shape[1]):
        state = state * (plan.positions_NT[:, t] > 0)[:, None, None, None] * decay[:, t, :, None, None].exp()
        change = beta[:, t, :, None] * (v[:, t] - torch.einsum("nhk,nhkv->nhv", k[:, t], state))
        state = state + torch.einsum("nhk,nhv->nhkv", k[:, t], change)
        found.append(torch.einsum("nhk,nhkv->nhv", q[:, t], state))
    return torch.stack(found, 1)


@pytest.mark.parametrize("lengths", [[150, 150], [64, 86, 150], [1, 62, 1, 70, 16, 3, 65, 82], [150, 127, 1, 22]])
def test_the_delta_rule_is_its_recurrence_within_documents(lengths: list[int]) -> None:
    given, plan = inputs(2, 150), plan_of(lengths, 2)
    found, expected = by_chunks(given, plan), by_steps(given, plan)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    torch.manual_seed(2)
    way = torch.randn_like(found)
    for ours, theirs in zip(
        torch.autograd.grad(found, given, way), torch.autograd.grad(expected, given, way), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-8)


def test_projections_may_be_grouped_by_the_heads_of_keys() -> None:
    """Qwen3-Next's rows are those of each head of keys in turn: q, k, the values of its heads, their gates."""
    at = DeltaNet(k_heads=2, v_heads=4, k_dim=3, v_dim=2)
    q, k = (torch.arange(6.0).view(2, 3) + start for start in (0, 10))
    v, z = (torch.arange(8.0).view(2, 4) + start for start in (20, 30))
    beta, decay = (torch.arange(4.0).view(2, 2) + start for start in (40, 50))
    parts = [torch.cat([x.flatten() for x in (q, k, v)]), *(x.flatten() for x in (z, beta, decay))]
    grouped = torch.cat([torch.cat((q, k, v, z), 1).flatten(), torch.cat((beta, decay), 1).flatten()])
    for found in (at.split(torch.cat(parts)[None, None]), replace(at, grouped=True).split(grouped[None, None])):
        assert [x.flatten().tolist() for x in found] == [x.tolist() for x in parts]


def test_strong_decays_stay_finite() -> None:
    """Sums of decays over a chunk are far below the least exponent."""
    q, k, v, decay, beta = inputs(1, 130)
    given = [x.detach().float().requires_grad_() for x in (q, k, v, 5000 * decay, beta)]
    found = by_chunks(given, plan_of([70, 60], 1))
    assert all(bool(x.isfinite().all()) for x in (found, *torch.autograd.grad(found.sum(), given)))


def test_states_go_on_where_the_text_before_ended() -> None:
    """A prompt of two chunks behind padding, then one position at a time."""
    given, plan = [x.detach() for x in inputs(2, 100)], plan_of([1] * 7 + [93] + [100], 2)
    x_NTC, weight_CW = given[2].flatten(2), torch.randn(15, 4, dtype=torch.float64)
    assert plan.positions_NT is not None
    cache, parts = KeyValueCache(100), []
    for start, stop in ((0, 90), *((t, t + 1) for t in range(90, 100))):
        now = AttentionPlan("none", positions_NT=plan.positions_NT[:, start:stop], cache=cache)
        some = [x[:, start:stop] for x in given]
        parts.append((by_chunks(some, now), causal_conv(x_NTC[:, start:stop], weight_CW, None, now)))
    whole = by_chunks(given, plan), causal_conv(x_NTC, weight_CW, None, plan)
    for found, expected in zip(zip(*parts, strict=True), whole, strict=True):
        torch.testing.assert_close(torch.cat(found, 1), expected, rtol=1e-9, atol=1e-9)
