"""The fused head on CUDA at the size of a real vocabulary, against whole logits in float64."""

from __future__ import annotations

import itertools
import math
import warnings
from dataclasses import replace

import pytest
import torch
from train_head import Answer, Head, Problem, cosine, expected, gap, problem

from aprfmt.texts.sequences import IGNORED
from aprtrain.loss.head import Softcaps, distill_head, head_bytes, logit_weight
from aprtrain.loss.objective import Objective

pytestmark = pytest.mark.cuda
KINDS: list[str] = ["forward", "reverse", "jsd"]
head = Head(chunk=32)
QWEN = (151_665, 151_936, 152_064)


def close(found: Answer, wanted: Answer, n_valid: int, logits: str) -> None:
    loose = logits == "fp16"
    for name in Answer._fields[:6]:
        value, want = getattr(found, name), getattr(wanted, name)
        absolute = abs(float(value) - float(want)) / n_valid
        if name == "agree":
            assert abs(float(value) - float(want)) <= 1, name
        else:
            assert gap(value, want) < (3e-3 if loose else 1e-4) or absolute < 2e-5, name
    for name in ("dx", "dw"):
        assert cosine(getattr(found, name), getattr(wanted, name)) > (0.999 if loose else 0.9999), name
        assert gap(getattr(found, name), getattr(wanted, name)) < (0.02 if loose else 0.01), name


@pytest.mark.parametrize("logits", ["fp16", "fp32"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_real_vocabulary(kind: str, logits: str) -> None:
    p = problem(64, *QWEN, widths=(128, 192), device="cuda", spread=4)
    for temperature, weight in itertools.product((1.0, 2.0, 4.0), (0.0, 0.3, 0.7, 1.0)):
        objective = Objective(weight, temperature, kind, 0.3)
        close(head(p, objective, logits=logits), expected(p, objective), p.n_valid, logits)


@pytest.mark.parametrize("logits", ["fp16", "fp32"])
@pytest.mark.parametrize("rows", [(1000, 1003, 1001), (40, 40, 40), (5000, 5056, 9000)], ids=str)
def test_odd_vocabularies_and_soft_caps(rows: tuple[int, int, int], logits: str) -> None:
    """Different widths back to back, so a kernel compiled for one must not serve another."""
    for kind, caps in itertools.product(KINDS, (Softcaps(), Softcaps(5.0, 6.0))):
        p = problem(50, *rows, widths=(64, 128), device="cuda")
        found = head(p, Objective(0.7, 3.0, kind), logits=logits, softcaps=caps)
        close(found, expected(p, Objective(0.7, 3.0, kind), caps), p.n_valid, logits)


@pytest.mark.parametrize("kind", KINDS)
def test_equal_models_have_no_divergence(kind: str) -> None:
    p = problem(64, 151_936, 151_936, 151_936, widths=(128, 128), device="cuda")
    p = replace(p, t=p.x, wt=p.w)
    found = head(p, Objective(1.0, 2.0, kind))
    assert abs(float(found.kl)) / p.n_valid < 1e-6
    assert found.dx.abs().max() < 1e-6
    assert found.agree == p.n_valid


def test_weight_0_needs_no_teacher() -> None:
    p = problem(64, *QWEN, widths=(128, 192), device="cuda")
    x = p.x.clone().requires_grad_()
    out = distill_head(x, p.w, None, None, p.labels, Objective(0.0), None, n_valid=p.n_valid, chunk=32)
    out.loss.backward()  # type: ignore[no-untyped-call]
    wanted = expected(p, Objective(0.0))
    assert x.grad is not None
    assert gap(out.loss, wanted.loss) < 1e-3
    assert cosine(x.grad, wanted.dx) > 0.999


@pytest.mark.parametrize("logits", ["fp16", "fp32"])
def test_chunks_and_micro_batches_change_nothing(logits: str) -> None:
    p = problem(3000, 20_000, 20_032, 20_032, widths=(64, 64), device="cuda")
    first = head(p, Objective(), logits=logits, chunk=256)
    for chunk in (1000, 2048, 8192):
        second = head(p, Objective(), logits=logits, chunk=chunk)
        assert all(gap(b, a) < (1e-3 if logits == "fp16" else 1e-5) for a, b in zip(first[:6], second[:6], strict=True))
        assert gap(second.dw, first.dw) < 1e-3 + 4e-3  # dw leaves autograd in bfloat16
    sums = [head(p.rows(rows), Objective(), n_valid=p.n_valid).loss for rows in (slice(0, 700), slice(700, 3000))]
    assert gap(sum(sums, torch.zeros_like(sums[0])), first.loss) < 1e-3


def test_the_teachers_padding_rows_change_nothing() -> None:
    p = problem(64, *QWEN, widths=(128, 192), device="cuda")
    first = head(p, Objective())
    filled = p.wt.clone()
    filled[QWEN[0] :] = 50.0
    second = head(replace(p, wt=filled), Objective())
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_no_wait_for_the_device() -> None:
    p = problem(64, *QWEN, widths=(128, 192), device="cuda")
    n_valid, buffer = p.n_valid, torch.zeros_like(p.w, dtype=torch.float32)
    x = p.x.clone().requires_grad_()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch calls the mode a prototype
            torch.cuda.set_sync_debug_mode("error")
        out = distill_head(
            x, p.w, p.t, p.wt, p.labels, Objective(), p.vocabulary, n_valid=n_valid, chunk=32, grad_w=buffer
        )
        out.loss.backward()  # type: ignore[no-untyped-call]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert cosine(buffer, expected(p, Objective()).dw) > 0.999


def test_more_than_two_to_the_31_logits_in_a_chunk() -> None:
    p = problem(16_384, *QWEN, widths=(64, 64), device="cuda")
    assert 16_384 * QWEN[1] > 2**31
    found = head(p, Objective(), chunk=16_384)
    tail = p.rows(slice(16_384 - 64, 16_384))
    wanted = expected(tail, Objective())
    assert cosine(found.dx[-64:], wanted.dx) > 0.999
    assert gap(found.dx[-64:] * (p.n_valid / tail.n_valid), wanted.dx) < 0.02


def test_huge_logits_ignored_rows_and_labels_out_of_range() -> None:
    p = problem(64, *QWEN, widths=(128, 128), device="cuda")
    huge = replace(p, x=p.x * 3000, t=p.t * 3000)
    assert float((huge.x @ huge.w.T).abs().max()) > 1e4
    found = head(huge, Objective())
    assert all(torch.isfinite(value).all() for value in found)
    assert gap(found.loss, expected(huge, Objective()).loss) < 3e-3
    nothing = head(replace(p, labels=torch.full_like(p.labels, IGNORED)), Objective(), n_valid=3)
    assert all(value.abs().max() == 0 for value in nothing)
    wild = p.labels.clone()
    wild[0] = QWEN[1]
    assert math.isnan(float(head(replace(p, labels=wild), Objective()).loss))


def extra(p: Problem, **options: object) -> int:
    """Bytes at the peak beside inputs and gradients."""
    x, buffer = p.x.clone().requires_grad_(), torch.zeros_like(p.w, dtype=torch.float32)
    teacher = logit_weight(p.wt[: p.vocabulary.teacher_width])
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = distill_head(
        x, p.w, p.t, teacher, p.labels, Objective(), p.vocabulary, n_valid=p.n_valid, grad_w=buffer, **options  # type: ignore[arg-type]
    )  # fmt: skip
    out.loss.backward()  # type: ignore[no-untyped-call]
    return torch.cuda.max_memory_allocated() - before - x.nbytes


def test_extra_memory_depends_on_the_chunk_only() -> None:
    extra(problem(64, *QWEN, widths=(896, 256), device="cuda"))  # takes the library's workspace, which stays
    found = []
    for n in (4096, 16_384, 65_536):
        found.append(extra(problem(n, *QWEN, widths=(896, 256), device="cuda")))
        assert found[-1] < 1.5 * 2**30
        assert found[-1] < 1.1 * head_bytes(problem(1, *QWEN).vocabulary, 896)
    assert max(found) - min(found) < 16 * 2**20
