"""Packs documents into sequences of fixed length.

A document that fits into a sequence is never split: sequences are filled with whole documents by best-fit decreasing
(Ding et al., Fewer Truncations Improve Language Modeling, 2024, arXiv 2404.10830). A longer text is split into pieces
of a sequence each; every piece after the first begins with BOS if the tokenizer adds one. A longer conversation is
truncated: later labels would not see its beginning.

Shape suffixes: D documents, P pieces, N sequences.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from aprfmt.texts.encoding import Int64
from aprfmt.texts.shards import CorpusSplit

MAX_PADDING = 0.03
"""Fraction of padding above which texts are also split to fill the gaps of sequences."""

_MIN_GAP = 16  # positions; smaller gaps are padded
_Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Pieces:
    """Pieces of documents.

    Attributes:
        starts_P: position in the token stream of the first token of each piece, without BOS.
        sizes_P: positions in a sequence, BOS included; each token but BOS is a label.
        begins_P: whether BOS is prepended.
    """

    starts_P: Int64
    sizes_P: Int64
    begins_P: _Flags

    def take(self, index: Int64 | _Flags) -> Pieces:
        """Selects some of them."""
        return Pieces(self.starts_P[index], self.sizes_P[index], self.begins_P[index])


@dataclass(frozen=True, slots=True)
class PackedSequences:
    """The pieces of each sequence.

    Attributes:
        pieces: of all sequences, in order.
        first_N: index of each sequence's first piece, followed by the number of pieces [N + 1].
        sources: index of each source's first sequence, followed by the number of sequences.
    """

    pieces: Pieces
    first_N: Int64
    sources: list[int]


def pack(part: CorpusSplit, seq_len: int) -> PackedSequences:
    """Packs the documents of a part; documents of two weighted sources never share a sequence."""
    bounds = np.cumsum([0, *(part.sources or [len(part.ends)])]).tolist()
    found, firsts, sources, n_pieces = [], [np.zeros(1, np.int64)], [0], 0
    for begin, end in pairwise(bounds):
        pieces, sequence_P = _pack_source(part, slice(begin, end), seq_len)
        found.append(pieces)
        counts = np.bincount(sequence_P)
        firsts.append(n_pieces + np.cumsum(counts))
        n_pieces += len(sequence_P)
        sources.append(sources[-1] + len(counts))
    columns = ([getattr(each, name) for each in found] for name in Pieces.__slots__)
    return PackedSequences(Pieces(*map(np.concatenate, columns)), np.concatenate(firsts), sources)


def _pack_source(part: CorpusSplit, some: slice, seq_len: int) -> tuple[Pieces, Int64]:
    """The pieces of some documents and the sequence index of each, both in the order of the sequences."""
    starts_D, ends_D = part.starts[some], part.ends[some]
    masks = part.masks
    is_chat_D = np.searchsorted(masks[:, 0], ends_D) > np.searchsorted(masks[:, 1], starts_D, "right")
    labels_D = np.where(is_chat_D, _learned(masks, starts_D, ends_D, seq_len), ends_D - starts_D - 1)
    has_begin = part.begin is not None and seq_len > 1
    pieces = _divide(starts_D, labels_D, seq_len, has_begin=has_begin)
    sequence_P = best_fit(pieces.sizes_P, seq_len)
    n = int(sequence_P.max(initial=-1)) + 1
    if not is_chat_D.any() and n * seq_len - int(pieces.sizes_P.sum()) > MAX_PADDING * n * seq_len:
        pieces, sequence_P = _fill_gaps(pieces, sequence_P, seq_len, has_begin=has_begin)
    # Sequences are ordered by the stream position of their first piece.
    first = np.full(int(sequence_P.max(initial=-1)) + 1, np.iinfo(np.int64).max)
    np.minimum.at(first, sequence_P, pieces.starts_P)
    rank = np.empty_like(first)
    rank[np.argsort(first)] = np.arange(len(first))
    order = np.lexsort([pieces.starts_P, rank[sequence_P]])
    return pieces.take(order), rank[sequence_P][order]


def _learned(masks: Int64, starts_D: Int64, ends_D: Int64, seq_len: int) -> Int64:
    """Number of labels up to the last unmasked one among the first `seq_len` of each document."""
    last = np.minimum(ends_D - 1, starts_D + seq_len)
    run = np.searchsorted(masks[:, 0], last, "right") - 1
    if len(masks):
        last = np.where((run >= 0) & (masks[run, 1] > last), masks[run, 0] - 1, last)
    found: Int64 = last - starts_D
    return found


def _divide(starts_D: Int64, labels_D: Int64, seq_len: int, *, has_begin: bool) -> Pieces:
    """Pieces of at most a sequence; documents without a label have none."""
    stride = seq_len - has_begin
    counts = np.where(labels_D > 0, 1 + -(-(labels_D - seq_len).clip(0) // stride), 0)
    document = np.repeat(np.arange(len(labels_D)), counts)
    number = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
    is_later = number > 0
    done = np.where(is_later, seq_len + (number - 1) * stride, 0)
    labels = np.minimum(labels_D[document] - done, np.where(is_later, stride, seq_len))
    begins = is_later & has_begin
    return Pieces(starts_D[document] + done, labels + begins, begins)


def best_fit(sizes_P: Int64, capacity: int) -> Int64:
    """The sequence index of each piece by best-fit decreasing; sizes are 1 to `capacity`.

    Sequences with equal free space are filled at once, so the time grows with the number of distinct sizes.
    """
    found = np.empty(len(sizes_P), np.int64)
    order = np.argsort(-sizes_P, kind="stable")
    sizes, firsts, counts = np.unique(-sizes_P[order], return_index=True, return_counts=True)
    free: dict[int, Int64] = {}  # sequences by free space
    spaces: list[int] = []  # its keys, ascending
    n = 0
    for size, first, count in zip((-sizes).tolist(), firsts.tolist(), counts.tolist(), strict=True):
        todo = order[first : first + count]
        while len(todo):
            at = bisect_left(spaces, size)
            if at < len(spaces):
                space = spaces.pop(at)
                candidates = free.pop(space)
                each = space // size
            else:
                space, each = capacity, capacity // size
                some = -(-len(todo) // each)
                candidates, n = np.arange(n, n + some), n + some
            placed = np.repeat(candidates, each)[: len(todo)]
            found[todo[: len(placed)]] = placed
            todo = todo[len(placed) :]
            n_full, more = divmod(len(placed), each)
            taken = n_full + (more > 0)
            for rest, those in (
                (space, candidates[taken:]),
                (space - each * size, candidates[:n_full]),
                (space - more * size, candidates[n_full:taken]),
            ):
                if rest and len(those):
                    if rest not in free:
                        insort(spaces, rest)
                    free[rest] = np.concatenate([free.get(rest, those[:0]), those])
    return found


def _fill_gaps(pieces: Pieces, sequence_P: Int64, seq_len: int, *, has_begin: bool) -> tuple[Pieces, Int64]:
    """Splits the pieces of the emptiest sequences to fill the gaps of the others."""
    used = np.bincount(sequence_P, pieces.sizes_P).astype(np.int64)
    order = np.argsort(-used, kind="stable")
    room = np.where(seq_len - used < _MIN_GAP, 0, seq_len - used - has_begin)[order]
    rest = used.sum() - np.cumsum(used[order])  # positions in the following sequences
    kept = int(np.argmax(np.cumsum(room) >= rest)) + 1
    is_moved = ~np.isin(sequence_P, order[:kept])
    # The moved pieces concatenated, split wherever a piece or a gap ends.
    moved = pieces.take(is_moved)
    piece_ends, gap_ends = np.cumsum(moved.sizes_P), np.cumsum(room[:kept])
    total = int(piece_ends[-1]) if len(piece_ends) else 0
    ends = np.union1d(piece_ends, gap_ends[gap_ends < total])
    ends = ends[ends > 0]
    begins = np.concatenate([np.zeros(1, np.int64), ends[:-1]])[: len(ends)]
    piece = np.searchsorted(piece_ends, begins, "right")
    inner = begins - (piece_ends - moved.sizes_P)[piece]  # positions of the piece before the split
    is_cut = inner > 0
    cut = Pieces(
        moved.starts_P[piece] + np.where(is_cut, inner - moved.begins_P[piece], 0),
        ends - begins + (is_cut & has_begin),
        np.where(is_cut, has_begin, moved.begins_P[piece]),
    )
    gap = order[np.searchsorted(gap_ends, begins, "right")]
    has_labels = cut.sizes_P > cut.begins_P
    together = (
        np.concatenate([getattr(pieces.take(~is_moved), name), getattr(cut.take(has_labels), name)])
        for name in Pieces.__slots__
    )
    sequences = np.concatenate([sequence_P[~is_moved], gap[has_labels]])
    return Pieces(*together), np.unique(sequences, return_inverse=True)[1]
