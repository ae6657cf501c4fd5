"""The documents of a corpus in the tokens of another tokenizer, aligned with their own.

Two tokens end at the same place if they end at the same byte of the text. A span is what lies between two such places:
as few tokens of each side as possible. The teacher's tokens of a document are stored as token shards, in the order of
the student's documents; the upper bits of an id count the student's tokens of the span that ends with it.

Control tokens are aligned by their role (`alignment.match`): the other side reads its own token in their place.

Shape suffixes: D tokens of a document, R rows, T positions, G spans, E the teacher's tokens in them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from aprfmt.errors import UnsupportedError
from aprfmt.io.sink import AtomicFolder
from aprfmt.texts.corpus import reuse
from aprfmt.texts.encoding import Encoder, Ids, Int64
from aprfmt.texts.packing import best_fit
from aprfmt.texts.sequences import IGNORED, Windows
from aprfmt.texts.shards import PARTS, Corpus, CorpusSplit, PartWriter, TokenShardHeader, open_corpus, write_header
from aprfmt.texts.sources import HEADER
from aprfmt.tokenizer.alignment import is_control, match, token_bytes
from aprfmt.tokenizer.fast import Encoded
from aprfmt.tokenizer.model import Tokenizer

LONGEST_SPAN = 64
"""Tokens of either side; the labels of longer spans are not aligned."""

_ID_BITS = 20
_IDS = np.uint32((1 << _ID_BITS) - 1)
_MOST = (1 << 31 - _ID_BITS) - 1
_AT_ONCE = 1 << 19  # tokens of the documents that are encoded at once
_ROOM = 1.25  # by which a row of the teacher is longer than its share of a sequence
_ROUND = 64


def retokenize(
    corpus: Corpus,
    student: Tokenizer | None,
    teacher: Tokenizer | None,
    folder: Path,
    log: Callable[[str], None] = lambda line: None,
) -> Corpus:
    """Writes the documents of `corpus` in the teacher's tokens, with the student's spans, or reuses them in `folder`.

    Raises as Encoder, and UnsupportedError for a teacher of more than a million tokens.
    """
    own, encoder = Encoder(student), Encoder(teacher)
    assert student is not None
    assert teacher is not None
    if encoder.n_ids > _IDS:
        raise UnsupportedError(f"the teacher's tokenizer has {encoder.n_ids:,} tokens; the maximum is {int(_IDS):,}")
    digest = digest_of(own, encoder)
    key = hashlib.sha256(f"{corpus.key} {digest}".encode()).hexdigest()
    if (found := reuse(folder, (key, key), digest, log)) is not None:
        return found
    log("tokenizing the data with the teacher's tokenizer")
    pairs = match(teacher, student)
    texts = [_reading(student, i, teacher, pairs) for i in range(len(student.tokens))]
    has_prefix = student.model == "llama" and student.flags.get("add_space_prefix", True)
    parts = {}
    with AtomicFolder(folder, force=True, n_bytes=4 * len(corpus.train.tokens), last=HEADER) as temporary:
        for name, part in zip(PARTS, (corpus.train, corpus.held_out), strict=True):
            with PartWriter(temporary, name) as writer:
                documents = _encode(part, own, encoder, texts, has_prefix=has_prefix)
                for ids, content in zip(documents, part.hashes.tolist(), strict=True):
                    writer.add(ids, content)
            parts[name] = writer.summary()
        header: TokenShardHeader = {
            **corpus.header, "key": key, "tokenizer": digest, "separator": encoder.separator, "parts": parts,
        }  # fmt: skip
        header.pop("sources", None)
        header.pop("template", None)
        header.pop("begin", None)
        if encoder.begin is not None:
            header["begin"] = encoder.begin
        write_header(temporary, header)
    return open_corpus(folder, digest)


def digest_of(student: Encoder, teacher: Encoder) -> str:
    """What the shards of `retokenize` have as their tokenizer."""
    return hashlib.sha256(f"aligned {student.digest} {teacher.digest}".encode()).hexdigest()


def _reading(student: Tokenizer, i: int, teacher: Tokenizer, pairs: dict[int, int]) -> bytes:
    """What the teacher reads for the student's token."""
    if i in pairs and is_control(student, i):
        return teacher.tokens[pairs[i]].encode("utf-8", "surrogatepass")
    return token_bytes(student, i) or b""


def _encode(
    part: CorpusSplit, own: Encoder, encoder: Encoder, texts: list[bytes], *, has_prefix: bool
) -> Iterator[Ids]:
    """The teacher's tokens of each document; `has_prefix` if the student's tokenizer puts a space before a text."""
    lengths = np.array([len(text) for text in texts], np.int64)
    starts, n = part.starts, len(part.ends)
    at = 0
    while at < n:
        end = max(at + 1, int(np.searchsorted(part.ends, starts[at] + _AT_ONCE, "right")))
        documents = [part.tokens[s:e] for s, e in zip(starts[at:end].tolist(), part.ends[at:end].tolist(), strict=True)]
        inner = [
            ids[own.begin is not None and int(ids[0]) == own.begin : len(ids) - (int(ids[-1]) == own.separator)]
            for ids in documents
        ]
        read = [b"".join(map(texts.__getitem__, ids.tolist())).decode("utf-8", "replace") for ids in inner]
        skipped = [int(has_prefix and text[:1] == " ") for text in read]  # which its tokenizer put before the text
        read = [text[n:] for n, text in zip(skipped, read, strict=True)]
        for ids, some, n_skipped, text, placed in zip(
            documents, inner, skipped, read, encoder.placed(read), strict=True
        ):
            ends = (lengths[some].cumsum() - n_skipped).clip(0)
            yield _with_spans(ends, len(ids) - len(some), ids, own, encoder, text, placed)
        at = end


def _with_spans(
    ends_D: Int64, n_framed: int, ids: Ids, own: Encoder, encoder: Encoder, text: str, placed: Encoded
) -> Ids:
    """The teacher's tokens of a document, each with the student's tokens of the span that it ends."""
    at_char = np.concatenate([[0], _utf8_lengths(text).cumsum()])
    size = int(at_char[-1])
    has_end = n_framed > 0 and int(ids[-1]) == own.separator
    begins = [0] * (n_framed - has_end)
    mine = np.concatenate([begins, ends_D, [size + 1] * has_end]).astype(np.int64)
    places = np.array(placed.ids and placed.places, np.int64).reshape(-1, 2)
    starts, ends = at_char[places[:, 0]], at_char[places[:, 1]]
    # Tokens that share a character end together: the last of them ends it.
    ends = np.where(np.append(starts[1:], size) >= ends, ends, -1)
    first = [] if encoder.begin is None or placed.ids[:1] == [encoder.begin] else [encoder.begin]
    last = [encoder.separator] * has_end
    theirs = np.concatenate([[0] * len(first), ends, [size + 1] * has_end]).astype(np.int64)
    tokens = np.array([*first, *placed.ids, *last], np.uint32)
    if len(ends_D) and int(ends_D[-1]) != size:  # the tokens are not valid UTF-8: nothing can be compared
        return tokens
    done = np.searchsorted(mine, theirs, "right")
    is_end = (done > 0) & (mine[done - 1] == theirs)
    counts = np.diff(np.maximum.accumulate(np.where(is_end, done, 0)), prepend=0)
    if counts.max(initial=0) > _MOST:
        counts[int(np.argmax(counts > _MOST)) :] = 0
    return tokens | (counts << _ID_BITS).astype(np.uint32)


def _utf8_lengths(text: str) -> Int64:
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")
    found: Int64 = 1 + (codes >= 0x80).astype(np.int64) + (codes >= 0x800) + (codes >= 0x10000)
    return found


@dataclass(frozen=True, slots=True)
class AlignedRows:
    """A batch of windows as the teacher reads it.

    Attributes:
        tokens_RT: the teacher's ids, int64.
        lengths: lengths of the documents in each row, which add up to T.
        index_P: flattened positions of the student's labels: those of the spans in order, then the others.
        sizes_G, counts_G: tokens of each span on the student's and the teacher's side.
        teacher_E, next_E: flattened positions that predict the teacher's tokens of the spans, and these ids.
    """

    tokens_RT: Int64
    lengths: list[list[int]]
    index_P: Int64
    sizes_G: Int64
    counts_G: Int64
    teacher_E: Int64
    next_E: Int64


class AlignedWindows:
    """Windows of the student, as a teacher with another tokenizer reads them.

    Attributes:
        row_len: T of the teacher's rows; what it needs more for a piece of a document is cut off.
    """

    def __init__(
        self, windows: Windows, part: CorpusSplit, twin: CorpusSplit, filler: int, longest: int | None
    ) -> None:
        """`twin` is `part` in the teacher's tokens, `filler` its padding id, `longest` its context length."""
        self.windows, self._starts, self._ends = windows, part.starts, part.ends
        self._twin, self._twin_starts, self._filler = twin, twin.starts, filler
        share = windows.seq_len * len(twin.tokens) / max(1, len(part.tokens))
        row_len = -(-int(_ROOM * share + 1) // _ROUND) * _ROUND
        self.row_len = min(row_len, longest or row_len)

    def __len__(self) -> int:
        return len(self.windows)

    def share(self, ids: Sequence[int]) -> float:
        """Fraction of the labels of these windows that are in a span."""
        return sum(int(self.rows([i]).sizes_G.sum()) for i in ids) / max(1, self.windows.n_labels(ids))

    def rows(self, ids: Sequence[int]) -> AlignedRows:
        """The windows with these indices; a negative index is an empty one.

        The number of rows is what their pieces need, in steps of a quarter: a compiled network sees few shapes.
        """
        labels = self.windows.rows(ids).labels_NT.ravel()
        found = []
        for row, i in enumerate(ids):
            at = row * self.windows.seq_len
            for start, size, begins in self.windows.pieces(i) if i >= 0 else ():
                found.append(_PieceSpans.of(self, labels, at, start, size, begins=begins))
                at += size
        kept = [piece for piece in found if piece is not None]
        sizes = np.array([len(piece.tokens) - 1 for piece in kept], np.int64)
        row_P = best_fit(sizes, self.row_len)
        step = max(1, len(ids) // 4)
        n_rows = (int(row_P.max(initial=0)) // step + 1) * step
        tokens = np.full((n_rows, self.row_len), self._filler, np.int64)
        lengths: list[list[int]] = [[] for _ in range(n_rows)]
        teacher_E = [np.zeros(0, np.int64)]
        for piece, size, row in zip(kept, sizes.tolist(), row_P.tolist(), strict=True):
            at = sum(lengths[row])
            tokens[row, at : at + size] = piece.tokens[:-1]
            lengths[row].append(size)
            teacher_E.append(piece.places_E + row * self.row_len + at)
        for each in lengths:
            each += [self.row_len - sum(each)] if sum(each) < self.row_len else []
        index = np.concatenate([np.zeros(0, np.int64), *(piece.index_P for piece in kept)])
        is_other = labels != IGNORED
        is_other[index] = False
        columns = {
            name: np.concatenate([np.zeros(0, np.int64), *(getattr(piece, name) for piece in kept)])
            for name in ("sizes_G", "counts_G", "next_E")
        }
        index = np.concatenate([index, np.flatnonzero(is_other)])
        return AlignedRows(tokens, lengths, index, teacher_E=np.concatenate(teacher_E), **columns)

    def document(self, start: int) -> tuple[int, Int64, Int64]:
        """Of the document around a position of the student's stream: its start, the teacher's ids, and the student's
        tokens of the span that ends with each.
        """
        d = int(np.searchsorted(self._ends, start, "right"))
        words = self._twin.tokens[int(self._twin_starts[d]) : int(self._twin.ends[d])]
        return int(self._starts[d]), (words & _IDS).astype(np.int64), (words >> _ID_BITS).astype(np.int64)

    @property
    def begin(self) -> int | None:
        """The teacher's BOS, which also precedes a piece from within a document."""
        return self._twin.begin


@dataclass(frozen=True, slots=True)
class _PieceSpans:
    """The spans of a piece of a document. places_E: positions in the piece that predict the teacher's tokens."""

    tokens: Int64
    index_P: Int64
    sizes_G: Int64
    counts_G: Int64
    places_E: Int64
    next_E: Int64

    @classmethod
    def of(
        cls, windows: AlignedWindows, labels: Int64, at: int, start: int, size: int, *, begins: bool
    ) -> _PieceSpans | None:
        """The piece at position `at` of the flattened batch, `size` positions from `start` in the student's stream.

        None if it has no span.
        """
        origin, ids, counts = windows.document(start)
        first = start - origin
        end = first + size - begins + 1  # behind the last label
        ends_t = np.flatnonzero(counts) + 1
        ends_t, ends_s = np.append(0, ends_t), np.append(0, counts[ends_t - 1].cumsum())
        low = int(np.searchsorted(ends_s, first, "right")) - 1
        origin_t = int(ends_t[low])
        has_begin = windows.begin is not None and origin_t > 0
        longest = origin_t + windows.row_len + 1 - has_begin
        high = min(int(np.searchsorted(ends_s, end, "right")), int(np.searchsorted(ends_t, longest, "right"))) - 1
        k = np.arange(low, high)
        shift = has_begin - origin_t
        sizes, n_t = ends_s[k + 1] - ends_s[k], ends_t[k + 1] - ends_t[k]
        k = k[
            (ends_s[k] >= first + 1 - begins) & (ends_t[k] + shift > 0)
            & (sizes <= LONGEST_SPAN) & (n_t <= LONGEST_SPAN)
        ]  # fmt: skip
        to_batch = at - first - 1 + begins
        index = _ranges(ends_s[k] + to_batch, ends_s[k + 1] - ends_s[k])
        if not len(k):
            return None
        learned = np.logical_and.reduceat(labels[index] != IGNORED, _starts(ends_s[k + 1] - ends_s[k]))
        k = k[learned]
        if not len(k):
            return None
        sizes, n_t = ends_s[k + 1] - ends_s[k], ends_t[k + 1] - ends_t[k]
        tokens = ids[origin_t : int(ends_t[k[-1] + 1])]
        tokens = np.concatenate([[windows.begin], tokens]).astype(np.int64) if has_begin else tokens
        places = _ranges(ends_t[k] + shift, n_t)
        return cls(tokens, _ranges(ends_s[k] + to_batch, sizes), sizes, n_t, places - 1, tokens[places])


def _starts(sizes: Int64) -> Int64:
    return np.cumsum(sizes) - sizes


def _ranges(starts: Int64, sizes: Int64) -> Int64:
    """The concatenated ranges of `sizes` numbers from each start."""
    found: Int64 = np.repeat(starts - _starts(sizes), sizes) + np.arange(int(sizes.sum()))
    return found
