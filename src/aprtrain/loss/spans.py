"""The objective for a teacher with another tokenizer: both models are compared where they have read the same text.

A span is as few tokens of each side as begin and end at the same bytes of the text (`aprfmt.texts.parallel`). Before it
both models have read the same, so their predictions of what follows are comparable. They are reduced to the outcomes

    a token that both vocabularies have    its probability, and that of tokens that only one side has and that begin
                                           with it (`alignment.outcomes_of`)
    the text of the span                   the product of the probabilities of its tokens (chain rule), if they are
                                           several on a side; the outcomes of its first tokens are then "anything else"
    anything else                          the rest

whose divergence is the objective's. Outcomes are disjoint and add up to 1. A span counts once; its labels but the
first, and the labels outside of spans, learn from the cross entropy in full: the teacher's distribution is then the
label.

The baseline `uld` compares sorted probabilities by their L1 distance, whatever their tokens (Boizard et al. 2024,
arXiv:2402.12030): the SORTED largest ones, and the sum of the others. GOLD, TRL's trainer for other tokenizers,
compares tokens of both vocabularies by KL and the others by ULD. A token that only one side has is then missing where
the other side begins the same text with a shorter one, which the student would unlearn.

Shape suffixes: C the student's positions of a chunk, E the teacher's, G spans, V and W ids of student and teacher, K
outcomes that are tokens, B = K + 2 outcomes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from aprfmt.texts.encoding import Int64
from aprfmt.tokenizer.alignment import OutcomeMap
from aprtrain.loss.objective import Objective, RowLosses, dense, divergence_of, forward_kl, times_log
from aprtrain.loss.topk import CELLS
from aprtrain.world import copy_to

SORTED = 2048
"""Largest probabilities that the L1 distance sorts: the order of the others hardly changes their sum."""

_NEVER = -1e4  # log-probability of an outcome that is counted elsewhere: 0, without infinities in gradients


class VocabularyMap:
    """The outcome of each id of two vocabularies, on a device.

    Attributes:
        n: number of outcomes.
        columns: the outcome of each of the student's and of the teacher's rows; n for those that have none.
        uld: whether the loss compares sorted probabilities.
    """

    def __init__(
        self, outcomes: OutcomeMap, n_student: int, n_teacher: int, device: torch.device, *, uld: bool = False
    ) -> None:
        """The heads have n_student and n_teacher rows; those beyond the tokens have no outcome."""
        self.n, self.uld = outcomes.n, uld
        self.columns = []
        for ids, rows in ((outcomes.student, n_student), (outcomes.teacher, n_teacher)):
            column = torch.full((rows,), self.n)
            column[: len(ids)] = torch.tensor(ids[:rows])
            self.columns.append(column.to(device))


class SpanChunk(NamedTuple):
    """The spans of a chunk: index of each position's span, first position and size of each span, the teacher's ids."""

    span_C: Tensor
    first_G: Tensor
    size_G: Tensor
    span_E: Tensor
    first_teacher_G: Tensor
    count_G: Tensor
    next_E: Tensor


@dataclass(frozen=True, slots=True)
class Spans:
    """The spans of a batch, whose positions are in the order of `AlignedRows`.

    Attributes:
        ids: the vocabularies.
        next_E: the teacher's tokens in the spans.
        chunks: rows of the student, rows of the teacher and spans of each chunk; the last ones have no spans.
        sizes_G, counts_G: tokens of each span.
    """

    ids: VocabularyMap
    next_E: Tensor
    chunks: tuple[tuple[slice, slice, slice], ...]
    sizes_G: Int64
    counts_G: Int64

    @classmethod
    def of(cls, ids: VocabularyMap, next_E: Tensor, sizes_G: Int64, counts_G: Int64, n_rows: int, chunk: int) -> Spans:
        """Chunks of whole spans, of at most `chunk` positions of either side (one span if it has more)."""
        chunk = min(chunk, max(1, CELLS // max(map(len, ids.columns))))
        ends = [np.concatenate([[0], sizes.cumsum()]) for sizes in (sizes_G, counts_G)]
        edges = [0]
        while edges[-1] < len(sizes_G):
            fits = min(int(np.searchsorted(end, end[edges[-1]] + chunk, "right")) - 1 for end in ends)
            edges.append(max(fits, edges[-1] + 1))
        rows, rows_t = ([slice(int(end[low]), int(end[high])) for low, high in pairwise(edges)] for end in ends)
        found = list(zip(rows, rows_t, (slice(*edge) for edge in pairwise(edges)), strict=True))
        none = slice(0, 0)
        found += [(slice(at, min(at + chunk, n_rows)), none, none) for at in range(int(ends[0][-1]), n_rows, chunk)]
        return cls(ids, next_E, tuple(found), sizes_G, counts_G)

    def chunk(self, rows_E: slice, spans: slice) -> SpanChunk:
        """The spans of a chunk, on the device of the ids."""
        found: list[Int64] = []
        for sizes in (self.sizes_G[spans], self.counts_G[spans]):
            found += [np.repeat(np.arange(len(sizes)), sizes), sizes.cumsum() - sizes, sizes.copy()]
        here = (copy_to(torch.from_numpy(each), self.next_E.device) for each in found)
        return SpanChunk._make((*here, self.next_E[rows_E]))


class _OwnOutcomes(NamedTuple):
    """The outcomes of the first tokens of each span, student and teacher; those to be counted (distinct, below n);
    whether they are the whole span and the same.
    """

    n: int
    columns_G2: Tensor
    counts_G2: Tensor
    is_one_G: Tensor


class _Side(NamedTuple):
    """log_GB: log-probabilities of the outcomes. first_GV: of all ids before the span. text_G: of the span's text."""

    log_GB: Tensor
    first_GV: Tensor
    text_G: Tensor


def _side(
    logp_CV: Tensor, ids_C: Tensor, span_C: Tensor, first_G: Tensor, column_V: Tensor, own: _OwnOutcomes
) -> _Side:
    """One side's log-probabilities of the outcomes, from those of its positions; `ids_C` are the tokens that follow."""
    first_GV = logp_CV[first_G]
    text_G = first_GV.new_zeros(len(first_G)).index_add(0, span_C, logp_CV.gather(1, ids_C[:, None])[:, 0])
    mass_GB = first_GV.new_zeros(len(first_G), own.n + 1).index_add(1, column_V, first_GV.exp())
    own_G = mass_GB.gather(1, own.columns_G2).where(own.counts_G2, 0).sum(1)
    tiny = torch.finfo(logp_CV.dtype).tiny
    said_G = torch.where(own.is_one_G, own_G.clamp(min=tiny).log(), text_G)
    rest_G = mass_GB[:, -1] + torch.where(own.is_one_G, 0, own_G - text_G.exp())
    others_GK = mass_GB.clamp(min=tiny).log().scatter(1, own.columns_G2, _NEVER)[:, :-1]
    log_GB = torch.cat([others_GK, said_G[:, None], rest_G.clamp(min=tiny).log()[:, None]], 1)
    return _Side(log_GB, first_GV, text_G)


def _largest(p_GU: Tensor, k: int) -> Tensor:
    """The `k` largest values in order, and the sum of the others; 0 where there are fewer."""
    top_GK = p_GU.topk(min(k, p_GU.shape[1]), 1).values
    rest_G1 = p_GU.sum(1, keepdim=True) - top_GK.sum(1, keepdim=True)
    return torch.cat([functional.pad(top_GK, (0, k - top_GK.shape[1])), rest_G1], 1)


def sorted_distance(p_GU: Tensor, q_GU: Tensor) -> Tensor:
    """L1 distance of the probabilities of two vocabularies, each sorted [G]."""
    return (_largest(p_GU, SORTED) - _largest(q_GU, SORTED)).abs().sum(1)


def aligned(
    objective: Objective, s_CV: Tensor, t_EW: Tensor, labels_C: Tensor, part: SpanChunk, ids: VocabularyMap
) -> tuple[RowLosses, Tensor, Tensor]:
    """As `objective.dense` for a chunk of spans; the terms of a span are in its first row.

    Agreement and entropy are weighted by the labels of the span. Models agree where the tokens that they prefer have
    the same outcome, or are their own first tokens of the span. Also returns the teacher's log-probability of the text
    of each span at temperature 1, [G].
    """
    ce_weight, kd_weight = objective.weights()
    firsts = labels_C[part.first_G], part.next_E[part.first_teacher_G]
    columns_G2 = torch.stack([column_V[first_G] for column_V, first_G in zip(ids.columns, firsts, strict=True)], 1)
    counts_G2, is_same_G = columns_G2 < ids.n, columns_G2[:, 0] == columns_G2[:, 1]
    counts_G2[:, 1] &= ~is_same_G
    own = _OwnOutcomes(ids.n, columns_G2, counts_G2, counts_G2[:, 0] & is_same_G & (part.size_G + part.count_G == 2))

    def sides(logp_CV: Tensor, logq_EW: Tensor) -> tuple[_Side, _Side]:
        with torch.no_grad():
            teacher = _side(logq_EW, part.next_E, part.span_E, part.first_teacher_G, ids.columns[1], own)
        return _side(logp_CV, labels_C, part.span_C, part.first_G, ids.columns[0], own), teacher

    with torch.enable_grad():
        s_CV = s_CV.detach().requires_grad_()
        logp_CV, logq_EW = s_CV.log_softmax(1), t_EW.log_softmax(1)
        ce_C = -logp_CV.gather(1, labels_C[:, None])[:, 0]
        t = objective.temperature
        student, teacher = (
            sides(logp_CV, logq_EW)
            if t == 1
            else sides((s_CV / t).log_softmax(1), (t_EW / t).log_softmax(1))
        )  # fmt: skip
        if ids.uld:
            value_G = slope_G = sorted_distance(student.first_GV.exp(), teacher.first_GV.exp())
        else:
            divergence = divergence_of(objective.kind)
            value_G, slope_GB = divergence(student.log_GB.detach(), teacher.log_GB, objective.beta)
            slope_G = (slope_GB * student.log_GB).sum(1)
        inner_C = (ce_C / t**2).index_fill(0, part.first_G, 0)
        loss = ce_weight * ce_C.sum() + kd_weight * (slope_G.sum() + inner_C.sum())
        (grad_CV,) = torch.autograd.grad(loss, s_CV)
    with torch.no_grad():
        one, one_teacher = (student, teacher) if t == 1 else sides(logp_CV, logq_EW)
        top_s, top_t = one.first_GV.argmax(1), one_teacher.first_GV.argmax(1)
        column_G, size_G = ids.columns[0][top_s], part.size_G.to(ce_C.dtype)
        agrees_G = (column_G == ids.columns[1][top_t]) & (column_G < ids.n)
        agrees_G |= (top_s == firsts[0]) & (top_t == firsts[1])
        found_G = (
            value_G.detach(),
            forward_kl(one.log_GB, one_teacher.log_GB, 0)[0],
            agrees_G * size_G,
            -times_log(one_teacher.first_GV.exp(), one_teacher.first_GV).sum(1) * size_G,
        )
    zero_C = torch.zeros_like(ce_C)
    rows = RowLosses(ce_C.detach(), *(zero_C.index_copy(0, part.first_G, each) for each in found_G))
    rows = rows._replace(kl_N=rows.kl_N + inner_C.detach())
    return rows, grad_CV, one_teacher.text_G


def unaligned(objective: Objective, s_CV: Tensor, labels_C: Tensor) -> tuple[RowLosses, Tensor]:
    """As `aligned` for labels outside of spans."""
    found, grad_CV = dense(replace(objective, kd_weight=0.0), s_CV, None, labels_C)
    return found._replace(kl_N=found.ce_N / objective.temperature**2), grad_CV
