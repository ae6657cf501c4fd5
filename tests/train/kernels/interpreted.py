"""Our Triton kernels on a CPU, by Triton's interpreter, beside torch and the codecs.

tests/train/kernels/test_interpreted.py runs this file in a process of its own, with the interpreter, which Triton
chooses when it is imported. It runs programs one after another: races and the compiler's faults are for `-m cuda`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize
from torch import Tensor
from torch.nn import functional
from train_adam import check_updates
from train_blocks import edge_blocks, random_blocks
from train_encode import CASES, by_rule, random_values
from train_head import gap, problem

from aprfmt.codecs import ggml
from aprtrain.kernels import blocks_triton, encode, fp8, fp8_triton, gated_triton
from aprtrain.kernels.blocks import BLOCK_TYPES
from aprtrain.kernels.decode_triton import launch as attend
from aprtrain.loss import head
from aprtrain.loss.head import Logits, Softcaps
from aprtrain.loss.objective import Objective
from aprtrain.optim import rules


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch.manual_seed(0)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(encode, "uses_triton", lambda *args: True)
    with np.errstate(all="ignore"):  # the interpreter computes with numpy
        yield


def _cut(values: Tensor) -> Tensor:
    """float32 as bfloat16: the interpreter cuts off what a GPU rounds to nearest."""
    return (values.view(torch.int32) & -65536).view(torch.float32).bfloat16()


@pytest.mark.parametrize("dtype", BLOCK_TYPES)
def test_blocks_decode_bit_by_bit(dtype: str) -> None:
    for stored in (edge_blocks(dtype), random_blocks(dtype, 70, 1)):
        values = dequantize(stored.reshape(1, -1), gguf.GGMLQuantizationType[dtype]).astype("f4")
        found = torch.full((values.size,), float("nan"), dtype=torch.bfloat16)
        blocks_triton.launch(dtype, torch.from_numpy(stored.copy()), found)
        want = _cut(torch.from_numpy(values.reshape(-1)))
        assert torch.equal(found.isnan(), want.isnan())
        assert torch.equal(found.nan_to_num(), want.nan_to_num())


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", ["Q8_0", "NVFP4", "MXFP4"])
def test_values_encode_as_by_the_codec(dtype: str, case: str) -> None:
    values = CASES[case]()
    wanted = ggml.encode(dtype, values.numpy())
    assert encode.encode(dtype, values).numpy().tobytes() == wanted.tobytes()
    out = torch.full_like(values, torch.nan)
    encode.round_trip(dtype, values, out)
    assert torch.equal(out, torch.from_numpy(ggml.decode(dtype, wanted)))


def test_codes_on_steps_have_the_scale_of_least_squares() -> None:
    first, later = random_values(200, 8), random_values(200, 8) + 0.02 * random_values(200, 9)
    steps = encode.fit_steps(first)
    codes, scales = by_rule(later, steps)
    stored = encode.encode("Q4_0", later, steps).numpy().reshape(-1, 18)
    halves = torch.from_numpy(stored[:, :2].copy().view("<f2").astype("f4"))
    normal = scales.abs() > 1e-4
    assert torch.allclose(halves.double()[normal], scales[normal], rtol=2**-11 * 1.01)
    nibbles = torch.from_numpy(np.concatenate((stored[:, 2:] & 15, stored[:, 2:] >> 4), 1)).int() - 8
    assert float((nibbles == codes).float().mean()) > 0.9999  # one at a tie may differ
    out = torch.empty_like(later)
    encode.round_trip("Q4_0", later, out, steps)
    assert torch.equal(out, torch.from_numpy(ggml.decode("Q4_0", stored.reshape(-1))))


def _project(x_CD: Tensor, w_VD: Tensor, out_CV: Tensor) -> None:
    shrink = head._SHRINK if out_CV.dtype == torch.float16 else 1.0
    out_CV.copy_(x_CD.float() @ w_VD.float().t() * shrink)


@pytest.mark.parametrize("logits", ["fp16", "fp32"])
@pytest.mark.parametrize("kind", ["forward", "reverse", "jsd"])
@pytest.mark.parametrize("caps", [Softcaps(), Softcaps(5.0, 6.0)], ids=["", "capped"])
@pytest.mark.parametrize(("weight", "temperature"), [(0.0, 1.0), (0.7, 1.0), (0.7, 3.0), (1.0, 3.0)])
def test_the_loss_and_its_gradient(
    kind: str, logits: Logits, caps: Softcaps, weight: float, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head, "_project", _project)
    p, objective = problem(12, 1000, 1003, 1001, spread=3), Objective(weight, temperature, kind, 0.3)
    teacher = weight > 0
    job = head._Job(
        p.t if teacher else None, p.wt if teacher else None, p.labels, objective, p.vocabulary if teacher else None,
        None, None, p.n_valid, 8, logits, caps, None, True,
    )  # fmt: skip
    exact = replace(job, t_NE=p.t.double(), wt_RE=p.wt.double()) if teacher else job
    terms, wanted = torch.zeros(5, 12), torch.zeros(5, 12, dtype=torch.float64)
    fused = head._fused_terms(p.x, p.w, job, terms)
    plain = head._plain_terms(p.x.double(), p.w.double(), exact, wanted)
    for rows in (slice(0, 8), slice(8, 12)):
        assert gap(fused(rows), plain(rows)) < 0.02
    used = 5 if teacher else 1
    assert gap(terms[:used], wanted[:used]) < (3e-3 if logits == "fp16" else 1e-4)


def test_the_gradient_of_gate_and_up() -> None:
    both, arriving = (torch.randn(5, n).mul_(4).bfloat16() for n in (2 * 1030, 1030))
    exact = both.double().requires_grad_()
    gate, up = exact.chunk(2, -1)
    (want,) = torch.autograd.grad(functional.silu(gate) * up, exact, arriving.double())
    found = torch.full_like(both, torch.nan)
    gated_triton.launch(arriving, both, found)
    assert gap(found, want) < 4e-3


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("width", [16, 3000, 18944])
def test_rows_in_e4m3(width: int, gated: bool) -> None:
    x = torch.randn(4, width * (1 + gated)).mul_(3).bfloat16()
    values = x.float()
    if gated:
        gate, up = values.chunk(2, -1)
        values = functional.silu(gate) * up
    found, scale = fp8_triton.quantize(x, gated=gated)
    want, want_scale = fp8._quantize(values)
    assert torch.allclose(scale, want_scale, rtol=1e-5)
    found, want = found.float(), want.float()
    # The interpreter may give the neighbour of a value halfway or below 2^-6, and loses the carry of a mantissa that is
    # rounded up to the next power of two.
    is_near = (found - want).abs() <= (want.abs() / 8).clamp(min=2.0**-9)
    assert bool((is_near | ((found * 2 == want) & (want.frexp().mantissa.abs() == 0.5))).all())
    assert float((found == want).double().mean()) > 0.9
    x[1, 3] = torch.nan
    _, scale = fp8_triton.quantize(x, gated=gated)
    assert scale.isfinite().flatten().tolist() == [True, False, True, True]


@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_updates_of_adamw(clip: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "note_adamw", lambda device: True)
    check_updates(clip, "cpu", _cut)


@pytest.mark.parametrize(("heads", "n_kv", "size", "values"), [(9, 3, 64, 64), (4, 4, 80, 80), (16, 1, 192, 128)])
def test_attention_over_the_cache(heads: int, n_kv: int, size: int, values: int) -> None:
    q = torch.randn(3, 1, heads, size)
    k, v = torch.randn(3, 100, n_kv, size), torch.randn(3, 100, n_kv, values)
    first, place = torch.tensor([0, 1, 69]), 70
    k[:, place + 1 :] = v[:, place + 1 :] = float("nan")  # not yet written
    out = torch.full((3, 1, heads, values), torch.nan)
    attend(q, k, v, out, first, torch.tensor([place]), size**-0.5)
    for row, start in enumerate(first.tolist()):
        q_H1E, k_HTE, v_HTE = (x.transpose(0, 1).double() for x in (q[row], k[row, start:71], v[row, start:71]))
        k_HTE, v_HTE = (x.repeat_interleave(heads // n_kv, 0) for x in (k_HTE, v_HTE))
        want = functional.scaled_dot_product_attention(q_H1E, k_HTE, v_HTE, scale=size**-0.5)
        assert gap(out[row].transpose(0, 1), want) < 1e-5
