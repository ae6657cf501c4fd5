"""The chunked head on the CPU: against whole logits in float64, and every way in which it could lie."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from live_bytes import LiveBytes
from torch import Tensor
from train_head import Answer, Head, Problem, expected, gap, problem

from aprfmt.errors import UsageError
from aprfmt.texts.sequences import IGNORED
from aprfmt.tokenizer.alignment import SharedVocabulary
from aprtrain.loss.head import Softcaps, distill_head, head_bytes, plain_bytes
from aprtrain.loss.objective import Objective, RowLosses, dense
from aprtrain.loss.topk import TopK
from aprtrain.plugins import LOSSES

KINDS = LOSSES.built_in
head = Head(chunk=8)


def check_like_whole_logits(
    p: Problem, objective: Objective, softcaps: Softcaps = Softcaps(), bound: float = 1e-12  # noqa: B008
) -> None:  # fmt: skip
    found, wanted = head(p, objective, softcaps=softcaps), expected(p, objective, softcaps)
    for name in Answer._fields:
        value, want = getattr(found, name), getattr(wanted, name)
        assert gap(value, want) < bound or (want.abs().max() == 0 and value.abs().max() == 0), name


@pytest.mark.parametrize("softcaps", [Softcaps(), Softcaps(3.0, 4.0), Softcaps(0.0, 5.0)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("weight", [0.3, 1.0])
def test_float64_is_exact(kind: str, weight: float, softcaps: Softcaps) -> None:
    p = problem(29, 40, 48, 64).to(torch.float64)
    check_like_whole_logits(p, Objective(weight, 2.0, kind, 0.3), softcaps)


@pytest.mark.parametrize("kind", KINDS)
def test_float32_and_bfloat16_inputs_are_as_exact_as_their_types(kind: str) -> None:
    p = problem(29, 40, 48, 64)
    check_like_whole_logits(p.to(torch.float32), Objective(0.7, 3.0, kind), bound=1e-5)
    check_like_whole_logits(p, Objective(0.7, 3.0, kind), bound=5e-3)


@pytest.mark.parametrize("softcaps", [Softcaps(), Softcaps(2.0, 3.0)], ids=str)
def test_gradients_are_those_of_the_loss_by_finite_differences(softcaps: Softcaps) -> None:
    p = problem(6, 40, 48, 64).to(torch.float64)
    objective, step = Objective(0.7, 3.0), 1e-5
    answer = head(p, objective, softcaps=softcaps)
    for name, grad in (("x", answer.dx), ("w", answer.dw)):
        for flat in range(0, grad.numel(), 7):
            bump = torch.zeros(grad.numel(), dtype=torch.float64)
            bump[flat] = step
            above, below = (
                head(replace(p, **{name: getattr(p, name) + sign * bump.view_as(grad)}), objective, softcaps=softcaps)
                for sign in (1, -1)
            )  # fmt: skip
            assert abs((above.loss - below.loss) / (2 * step) - grad.flatten()[flat]) < 1e-8


def check_padding(vocabulary: SharedVocabulary) -> None:
    """The teacher's rows beyond the ids have no influence, bit by bit."""
    p = replace(problem(20, 40, 48, 64).to(torch.float32), vocabulary=vocabulary)
    first = head(p, Objective())
    filled = p.wt.clone()
    filled[40:] = 50.0
    second = head(replace(p, wt=filled), Objective())
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_the_teachers_padding_rows_change_nothing() -> None:
    check_padding(SharedVocabulary(40, 64, 48))


def test_a_mask_that_is_off_shows() -> None:
    with pytest.raises(AssertionError):
        check_padding(SharedVocabulary(48, 64, 48))


def test_student_padding_rows_are_pushed_down() -> None:
    p = problem(20, 40, 48, 64, spread=0.1).to(torch.float32)
    x = torch.ones_like(p.x)
    for kind in KINDS:
        down = head(replace(p, x=x), Objective(1.0, 1.0, kind)).dw[40:]
        assert (down.sum(1) > 0).all(), kind


def check_positions(p: Problem) -> None:
    """Each valid position has a gradient of its own, which one changed label or teacher row alone changes."""
    objective = Objective(0.7, 3.0)
    first = head(p, objective).dx
    assert ((first.abs().amax(1) > 0) == (p.labels >= 0)).all()
    at = 3
    label, teacher = p.labels.clone(), p.t.clone()
    label[at] = (label[at] + 1) % 40
    teacher[at] += 1.0
    for changed in (replace(p, labels=label), replace(p, t=teacher)):
        moved = (head(changed, objective).dx != first).any(1)
        assert moved[at]
        assert moved.sum() == 1


def test_every_position_contributes_and_no_position_touches_another() -> None:
    check_positions(problem(20, 40, 48, 64).to(torch.float64))


def test_a_loss_of_the_last_position_only_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    def last_only(objective: Objective, s: Tensor, t: Tensor | None, labels: Tensor) -> tuple[RowLosses, Tensor]:
        return dense(objective, s, t, torch.cat([torch.full_like(labels[:-1], IGNORED), labels[-1:]]))

    monkeypatch.setattr("aprtrain.loss.head.dense", last_only)
    p = problem(20, 40, 48, 64).to(torch.float64)
    with pytest.raises(AssertionError):
        check_positions(p)
    with pytest.raises(AssertionError):
        check_like_whole_logits(p, Objective())


@pytest.mark.parametrize("chunk", [1, 7, 16, 29, 4096])
def test_the_chunk_changes_nothing(chunk: int) -> None:
    p = problem(29, 40, 48, 64).to(torch.float64)
    first, second = head(p, Objective()), head(p, Objective(), chunk=chunk)
    assert all(torch.allclose(a, b, rtol=1e-12, atol=0) for a, b in zip(first, second, strict=True))


def test_micro_batches_with_uneven_counts_add_up_to_the_batch() -> None:
    p = problem(29, 40, 48, 64).to(torch.float64)
    p.labels[:6] = IGNORED
    whole = head(p, Objective())
    parts = [head(p.rows(rows), Objective(), n_valid=p.n_valid) for rows in (slice(0, 9), slice(9, 11), slice(11, 29))]
    for name in Answer._fields:
        values = [getattr(part, name) for part in parts]
        total = torch.cat(values) if name == "dx" else torch.stack(values).sum(0)
        assert torch.allclose(total, getattr(whole, name), rtol=1e-10, atol=1e-14), name


def test_a_buffer_receives_what_autograd_would_give() -> None:
    p = problem(29, 40, 48, 64).to(torch.float64)
    wanted = head(p, Objective())
    buffer = torch.ones_like(p.w)
    found = head(p, Objective(), grad_w=buffer)
    assert torch.allclose(buffer - 1, wanted.dw, rtol=1e-9)
    assert torch.equal(found.dx, wanted.dx)
    assert found.dw.abs().max() == 0  # nothing through autograd on top


def test_the_buffer_of_bfloat16_weights_is_float32() -> None:
    p = problem(29, 40, 48, 64)
    buffer = torch.zeros(48, 8)
    head(p, Objective(), grad_w=buffer)
    assert gap(buffer, expected(p, Objective()).dw) < 1e-5


def scaled(grad_w: Tensor | None) -> tuple[Tensor, Tensor | None]:
    p = problem(9, 40, 48, 64).to(torch.float64)
    x, w = p.x.requires_grad_(), p.w.requires_grad_()
    out = distill_head(x, w, p.t, p.wt, p.labels, Objective(), p.vocabulary, n_valid=p.n_valid, grad_w=grad_w)
    (3 * out.loss).backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    return x.grad, w.grad


def test_a_scaled_loss_scales_both_gradients_or_none_is_usable() -> None:
    wanted = head(problem(9, 40, 48, 64).to(torch.float64), Objective())
    dx, dw = scaled(None)
    assert dw is not None
    assert torch.allclose(dx, 3 * wanted.dx)
    assert torch.allclose(dw, 3 * wanted.dw)
    dx, _ = scaled(torch.zeros(48, 8, dtype=torch.float64))
    assert dx.isnan().all()


def test_without_gradients_only_values_are_computed() -> None:
    p = problem(9, 40, 48, 64).to(torch.float64)
    buffer = torch.zeros_like(p.w)
    with torch.no_grad():
        out = distill_head(p.x, p.w, p.t, p.wt, p.labels, Objective(), p.vocabulary, n_valid=p.n_valid, grad_w=buffer)
    assert gap(out.loss, expected(p, Objective()).loss) < 1e-12
    assert buffer.abs().max() == 0
    assert not out.loss.requires_grad


def test_a_frozen_head_gets_no_gradient() -> None:
    p = problem(9, 40, 48, 64).to(torch.float64)
    x = p.x.clone().requires_grad_()
    out = distill_head(x, p.w, p.t, p.wt, p.labels, Objective(), p.vocabulary, n_valid=p.n_valid)
    out.loss.backward()  # type: ignore[no-untyped-call]
    assert p.w.grad is None
    assert x.grad is not None
    assert gap(x.grad, expected(p, Objective()).dx) < 1e-12


def test_weight_0_needs_no_teacher() -> None:
    p = problem(29, 40, 48, 64).to(torch.float64)
    x = p.x.clone().requires_grad_()
    out = distill_head(x, p.w, None, None, p.labels, Objective(0.0), None, n_valid=p.n_valid, chunk=8)
    out.loss.backward()  # type: ignore[no-untyped-call]
    wanted = expected(p, Objective(0.0))
    assert x.grad is not None
    assert gap(out.loss, wanted.loss) < 1e-12
    assert gap(x.grad, wanted.dx) < 1e-12
    assert out.kl_sum == out.teacher_entropy_sum == 0


def test_a_batch_without_valid_positions_gives_0() -> None:
    p = problem(9, 40, 48, 64).to(torch.float64)
    answer = head(replace(p, labels=torch.full((9,), IGNORED)), Objective(), n_valid=4)
    assert all(value.abs().max() == 0 for value in answer)


_FAULTS: dict[str, Callable[[Problem], tuple[Problem, dict[str, object]]]] = {
    "n_valid": lambda p: (p, {"n_valid": 0}),
    "chunk": lambda p: (p, {"chunk": 0}),
    "hidden states and head": lambda p: (replace(p, w=p.w[:, 1:]), {}),
    "labels must": lambda p: (replace(p, labels=p.labels[1:]), {}),
    "int64, one per position": lambda p: (replace(p, labels=p.labels.int()), {}),
    "exceeds the student's rows": lambda p: (replace(p, labels=p.labels + 48), {}),
    "teacher's hidden states": lambda p: (replace(p, t=p.t[:, 1:]), {}),
    "fewer rows": lambda p: (replace(p, w=p.w[:39], labels=p.labels.clamp(max=30)), {}),
    "needs a teacher": lambda p: (replace(p, t=None), {}),  # type: ignore[arg-type]
    "grad_w": lambda p: (p, {"grad_w": torch.zeros(48, 8)}),
}


@pytest.mark.parametrize("message", _FAULTS)
def test_what_does_not_fit_is_refused(message: str) -> None:
    p, options = _FAULTS[message](problem(9, 40, 48, 64).to(torch.float64))
    with pytest.raises(UsageError, match=message):
        head(p, Objective(), **options)


def test_the_memory_figure_depends_on_the_chunk_only_and_stays_in_its_budget() -> None:
    qwen = SharedVocabulary(151_665, 152_064, 151_936)
    assert head_bytes(qwen, 896) == 2 * 2048 * (151_936 + 151_680) + 2 * 151_936 * 896
    assert head_bytes(qwen, 896) < 1.5 * 2**30
    for chunk, logits in itertools.product((1024, 4096), ("fp16", "fp32")):
        with_teacher, without = (head_bytes(qwen, 896, chunk, logits, on) for on in (True, False))  # type: ignore[arg-type]
        assert with_teacher - without == chunk * 151_680 * (2 if logits == "fp16" else 4)


@pytest.mark.parametrize("shared", [400, 1000, 2000])
@pytest.mark.parametrize("kind", ["", *KINDS, "files"])
def test_the_memory_of_plain_torch_is_what_the_plan_counts(kind: str, shared: int) -> None:
    chunk, rows, width = 64, 2000, 8
    x_ND, w_VD = torch.randn(3 * chunk, width, requires_grad=True), torch.randn(rows, width, requires_grad=True)
    t_NE, wt_RE, labels_N = torch.randn(3 * chunk, width), torch.randn(shared, width), torch.arange(3 * chunk)
    objective = Objective(0.5 if kind else 0.0, 2.0, kind if kind in KINDS else "forward")
    vocabulary = SharedVocabulary(shared, shared, rows)
    known = kind in KINDS
    top = TopK(torch.arange(4).expand(3 * chunk, 4), *(torch.full(s, 0.1) for s in ((3 * chunk, 4), (192,), (192,))))
    with LiveBytes() as live:
        distill_head(
            x_ND, w_VD, t_NE if known else None, wt_RE if known else None, labels_N, objective,
            vocabulary if known else None, n_valid=192, chunk=chunk, grad_w=torch.zeros(rows, width),
            top=top if kind == "files" else None,
        )  # fmt: skip
    planned = plain_bytes(vocabulary, chunk, kind if known else "", top=kind == "files")
    assert 0.98 * planned < live.peak < 1.06 * planned
