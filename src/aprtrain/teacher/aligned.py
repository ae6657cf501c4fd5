"""Batches of a teacher with another tokenizer, and the spans that they share with the student's.

Shape suffixes: R rows of the teacher, T positions, P the student's labels, E the teacher's tokens in spans, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aprfmt.texts.parallel import AlignedWindows
from aprtrain.loss.spans import Spans, VocabularyMap
from aprtrain.network.attention import Documents
from aprtrain.teacher.teacher import Teacher
from aprtrain.world import copy_to


@dataclass(frozen=True, slots=True)
class AlignedTargets:
    """What a batch of the student is compared with.

    Attributes:
        index_P: the student's labelled positions in the flattened batch, those of spans first.
        hidden_ED: the teacher's hidden states that predict its tokens of the spans.
        spans: the spans.
        n_labels: number of labels in spans.
    """

    index_P: Tensor
    hidden_ED: Tensor
    spans: Spans
    n_labels: int


@dataclass(frozen=True, slots=True)
class AlignedTeacher:
    """Runs the teacher on its own tokens of the student's windows."""

    teacher: Teacher
    windows: AlignedWindows
    ids: VocabularyMap
    chunk: int

    def __call__(self, windows: Sequence[int]) -> AlignedTargets:
        """The targets of a batch of these windows."""
        device, rows = self.ids.columns[0].device, self.windows.rows(windows)
        lengths = [length for row in rows.lengths for length in row]
        capacity = 1 << max(len(lengths) - 1, 2 * len(rows.lengths)).bit_length()
        documents = Documents.of(lengths, self.windows.row_len, capacity=capacity)
        documents = Documents(copy_to(documents.cu_seqlens, device), documents.max_len)
        tokens, index, places, next_ids = (
            copy_to(torch.from_numpy(each), device)
            for each in (rows.tokens_RT, rows.index_P, rows.teacher_E, rows.next_E)
        )
        hidden = self.teacher.hidden(tokens, documents).flatten(0, 1).index_select(0, places)
        spans = Spans.of(self.ids, next_ids, rows.sizes_G, rows.counts_G, len(rows.index_P), self.chunk)
        return AlignedTargets(index, hidden, spans, int(rows.sizes_G.sum()))
