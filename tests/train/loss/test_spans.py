"""The loss against a teacher with another tokenizer: outcomes by hand, gradients by differences, chunks, memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from live_bytes import LiveBytes
from torch import Tensor
from torch.nn import functional
from train_head import gap

from aprfmt.tokenizer.alignment import OutcomeMap, SharedVocabulary
from aprtrain.loss.head import HeadOut, Softcaps, distill_head, span_bytes
from aprtrain.loss.objective import Objective, dense
from aprtrain.loss.spans import Spans, VocabularyMap, aligned, sorted_distance
from aprtrain.plugins import LOSSES

_CPU = torch.device("cpu")

# Outcomes a, b, c. Student: a b c, "ab" counts for a, a pad. Teacher: a b c, "bc" and "bcc" count for b, <x> for none.
STUDENT, TEACHER = [0, 1, 2, 0, 3], [0, 1, 2, 1, 1, 3]
MAP = OutcomeMap(3, STUDENT, TEACHER)
# Spans: a|a, b c|"bc", "ab"|a b, c|c; then two labels without a partner.
LABELS, NEXT = [0, 1, 2, 3, 2, 1, 0], [0, 3, 0, 1, 2]
SIZES, COUNTS = np.array([1, 2, 1, 1]), np.array([1, 1, 2, 1])


@dataclass(frozen=True)
class _Models:
    x: Tensor
    w: Tensor
    t: Tensor
    wt: Tensor

    def logits(self) -> tuple[Tensor, Tensor]:
        return self.x @ self.w.T, self.t @ self.wt.T

    def loss(self, objective: Objective, *, uld: bool = False, chunk: int = 64, **options: object) -> HeadOut:
        ids = VocabularyMap(MAP, 5, 6, _CPU, uld=uld)
        spans = Spans.of(ids, torch.tensor(NEXT), SIZES, COUNTS, len(LABELS), chunk)
        given: dict[str, object] = {"n_valid": len(LABELS), "spans": spans, **options}
        vocabulary = SharedVocabulary(6, 6, 5)
        return distill_head(self.x, self.w, self.t, self.wt, torch.tensor(LABELS), objective, vocabulary, **given)  # type: ignore[arg-type]


def models(seed: int = 0) -> _Models:
    torch.manual_seed(seed)
    shapes = ((7, 4), (5, 4), (5, 3), (6, 3))
    return _Models(*(torch.randn(shape, dtype=torch.float64, requires_grad=i < 2) for i, shape in enumerate(shapes)))


def outcomes(p: Tensor, q: Tensor) -> list[tuple[list[Tensor], list[Tensor]]]:
    """Of each span, from the probabilities of the student's rows [7, 5] and the teacher's [5, 6], by the definition."""
    (a, b, c), (ta, tb, tc) = (
        [x[:, [i for i, column in enumerate(columns) if column == n]].sum(1) for n in range(3)]
        for x, columns in ((p, STUDENT), (q, TEACHER))
    )
    bc, tbc = p[1, 1] * p[2, 2], q[1, 3]  # both begin with b
    ab, tab = p[3, 3], q[2, 0] * q[3, 1]  # both begin with a
    return [
        ([a[0], b[0], c[0], p[0, 4]], [ta[0], tb[0], tc[0], q[0, 5]]),
        ([a[1], bc, c[1], p[1, 4] + b[1] - bc], [ta[1], tbc, tc[1], q[1, 5] + tb[1] - tbc]),
        ([ab, b[3], c[3], p[3, 4] + a[3] - ab], [tab, tb[2], tc[2], q[2, 5] + ta[2] - tab]),
        ([a[4], b[4], c[4], p[4, 4]], [ta[4], tb[4], tc[4], q[4, 5]]),
    ]


def test_models_are_compared_by_what_each_says_next_of_the_text() -> None:
    m, w, t = models(), 0.6, 2.0
    out = m.loss(Objective(w, t))
    s, q = m.logits()
    at = {temperature: outcomes((s / temperature).softmax(1), (q / temperature).softmax(1)) for temperature in (1.0, t)}
    kl = {
        k: torch.stack(
            [functional.kl_div(torch.stack(a).log(), torch.stack(b), reduction="sum") for a, b in at[k]]
        ).sum()
        for k in at
    }
    ce = -s.log_softmax(1)[range(7), LABELS]
    alone = ce[[2, 5, 6]].sum()  # the second label of a span, and those outside of spans
    wanted = ((1 - w) * ce.sum() + w * (t**2 * kl[t] + alone)) / 7
    assert gap(out.loss, wanted) < 1e-12
    assert gap(out.kl1_sum, kl[1.0]) < 1e-12
    assert gap(out.ce_sum, ce.sum()) < 1e-12
    found = torch.autograd.grad(out.loss, (m.x, m.w))
    for value, want in zip(found, torch.autograd.grad(wanted, (m.x, m.w)), strict=True):
        assert gap(value, want) < 1e-10


@pytest.mark.parametrize("uld", [False, True])
@pytest.mark.parametrize("kind", LOSSES.built_in)
def test_gradients_are_those_of_differences_under_softcaps(kind: str, uld: bool) -> None:
    m, objective, caps = models(1), Objective(0.8, 1.5, kind, 0.3), Softcaps(4.0, 3.0)
    m.loss(objective, uld=uld, softcaps=caps).loss.backward()  # type: ignore[no-untyped-call]
    for name in ("x", "w"):
        tensor, step = getattr(m, name), torch.zeros_like(getattr(m, name))
        step[1, 2] = 1e-6
        up, down = (
            replace(m, **{name: tensor + sign * step}).loss(objective, uld=uld, softcaps=caps).loss for sign in (1, -1)
        )
        assert float((up - down).detach() / 2e-6) == pytest.approx(float(tensor.grad[1, 2]), rel=1e-5)


def test_with_one_tokenizer_it_is_the_usual_loss() -> None:
    torch.manual_seed(2)
    s, t, labels = torch.randn(9, 6, dtype=torch.float64), torch.randn(9, 5, dtype=torch.float64), torch.arange(9) % 5
    ids = VocabularyMap(OutcomeMap(5, [*range(5)], [*range(5)]), 6, 5, _CPU)
    one = np.ones(9, np.int64)
    part = Spans.of(ids, labels, one, one, 9, 64).chunk(slice(0, 9), slice(0, 9))
    for kind in ("forward", "jsd", "tv"):
        objective = Objective(0.7, 2.0, kind)
        (rows, grad, text), (want_rows, want_grad) = aligned(objective, s, t, labels, part, ids), dense(
            objective, s, t, labels
        )  # fmt: skip
        assert all(gap(a, b) < 1e-12 for a, b in zip(rows, want_rows, strict=True)), kind
        assert gap(grad, want_grad) < 1e-12
        assert gap(text, t.log_softmax(1)[range(9), labels]) < 1e-12


@pytest.mark.parametrize("chunk", [1, 2, 3, 5])
def test_chunks_of_whole_spans_change_nothing(chunk: int) -> None:
    whole, parts = models(), models()
    wanted, found = whole.loss(Objective()), parts.loss(Objective(), chunk=chunk)
    assert all(gap(a, b) < 1e-12 for a, b in zip(found, wanted, strict=True))
    for out in (wanted, found):
        out.loss.backward()  # type: ignore[no-untyped-call]
    assert whole.x.grad is not None
    assert parts.x.grad is not None
    assert gap(parts.x.grad, whole.x.grad) < 1e-12
    spans = Spans.of(VocabularyMap(MAP, 5, 6, _CPU), torch.tensor(NEXT), SIZES, COUNTS, 7, chunk)
    assert max(rows.stop - rows.start for pair in spans.chunks for rows in pair[:2]) <= max(2, chunk)


def test_sorted_probabilities_are_padded_and_their_tail_is_one_value(monkeypatch: pytest.MonkeyPatch) -> None:
    p, q = torch.tensor([[0.1, 0.6, 0.3]]), torch.tensor([[0.05, 0.2, 0.05, 0.5, 0.2]])
    assert sorted_distance(p, q).item() == pytest.approx(0.1 + 0.1 + 0.1 + 0.05 + 0.05)
    monkeypatch.setattr("aprtrain.loss.spans.SORTED", 2)
    assert sorted_distance(p, q).item() == pytest.approx(0.1 + 0.1 + abs(0.1 - 0.3))


@pytest.mark.parametrize(("student", "teacher", "shared"), [(490, 1520, 400), (1500, 500, 500)])
def test_the_memory_is_within_what_the_plan_counts(student: int, teacher: int, shared: int) -> None:
    chunk, n, one = 64, 192, np.ones(192, np.int64)
    ids = [[min(i, shared) for i in range(rows)] for rows in (student, teacher)]
    vocabulary = VocabularyMap(OutcomeMap(shared, *ids), student, teacher, _CPU)
    spans = Spans.of(vocabulary, torch.arange(n), one, one, n, chunk)
    x, w = torch.randn(n, 8, requires_grad=True), torch.randn(student, 8, requires_grad=True)
    with LiveBytes() as live:
        distill_head(
            x, w, torch.randn(n, 8), torch.randn(teacher, 8), torch.arange(n), Objective(0.5, 2.0, "jsd"),
            SharedVocabulary(teacher, teacher, student), n_valid=n, chunk=chunk, grad_w=torch.zeros(student, 8),
            spans=spans,
        )  # fmt: skip
    planned = span_bytes(SharedVocabulary(teacher, teacher, student), chunk, shared)
    assert 0.6 * planned < live.peak < planned
