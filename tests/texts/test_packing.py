"""Packing: whole documents, every token a label once, little padding; useless data are refused."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from train_corpora import byte_tokenizer, functions, part, varied, write_jsonl
from turns import examples

from aprfmt.errors import AprError, RefusedError
from aprfmt.texts.corpus import prepare
from aprfmt.texts.packing import MAX_PADDING, best_fit
from aprfmt.texts.sequences import IGNORED, Windows, check_windows

NO = IGNORED
FILLER, FILLER_ID = 999, 6000


def test_windows_by_hand() -> None:
    windows = Windows(part([1, 2, 3, 4, 5], [6, 7], [8, 9, 10]), 4, FILLER)
    rows = windows.rows([0, 1])
    assert rows.tokens_NT.tolist() == [[1, 2, 3, 4], [6, 8, 9, FILLER]]
    assert rows.labels_NT.tolist() == [[2, 3, 4, 5], [7, 9, 10, NO]]
    assert rows.lengths == [[4], [1, 2, 1]]
    assert [windows.n_labels([i]) for i in range(2)] == [4, 3]
    assert windows.used(np.arange(2)).tolist() == [4, 3]
    assert windows.is_packed
    assert (len(windows), windows.padding, windows.n_cuts, windows.n_dropped) == (2, 1 / 8, 0, 0)


def test_a_document_that_fills_a_window_exactly() -> None:
    windows = Windows(part([1, 2, 3, 11], [4, 5, 6, 12], [7, 8, 9, 10]), 3, FILLER)
    rows = windows.rows([0, 1, 2])
    assert rows.labels_NT.tolist() == [[2, 3, 11], [5, 6, 12], [8, 9, 10]]
    assert rows.lengths == [[3], [3], [3]]
    assert len(windows) == 3  # the last token is a label only
    assert not windows.is_packed


def test_negative_numbers_are_rows_without_labels() -> None:
    windows = Windows(part([1, 2, 3, 4, 5]), 4, FILLER)
    rows = windows.rows([-1, 0])
    assert rows.tokens_NT.tolist() == [[FILLER] * 4, [1, 2, 3, 4]]
    assert rows.labels_NT.tolist() == [[NO] * 4, [2, 3, 4, 5]]
    assert rows.lengths == [[4], [4]]
    assert windows.n_labels([-1, 0, -1]) == 4


def test_a_long_text_goes_on_behind_bos() -> None:
    """Each piece but the first begins with BOS, whose label is ignored; no token is a label twice."""
    data = replace(part([0, *range(1, 12)]), begin=0)
    rows = Windows(data, 4, FILLER).rows([0, 1, 2])
    assert rows.tokens_NT.tolist() == [[0, 1, 2, 3], [0, 4, 5, 6], [0, 7, 8, 9]]
    assert rows.labels_NT.tolist() == [[1, 2, 3, 4], [NO, 5, 6, 7], [NO, 8, 9, 10]]
    assert rows.lengths == [[4], [4], [4]]


@settings(deadline=None, max_examples=examples(200))
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=40).filter(lambda x: max(x) > 1),
    seq_len=st.integers(1, 48),
    begin=st.sampled_from([None, 5000]),
)
def test_every_token_but_the_first_of_a_document_is_a_label_once(
    lengths: list[int], seq_len: int, begin: int | None
) -> None:
    ids = iter(range(5000))
    docs = [[next(ids) for _ in range(length)] for length in lengths]
    windows = Windows(replace(part(*docs), begin=begin), seq_len, FILLER_ID)
    rows = windows.rows(range(len(windows)))
    found = []
    for tokens, labels, pieces in zip(rows.tokens_NT.tolist(), rows.labels_NT.tolist(), rows.lengths, strict=True):
        assert sum(pieces) == seq_len
        at = 0
        for size in pieces:
            own, at = tokens[at : at + size], at + size
            learned = [(token, label) for token, label in zip(own, labels[at - size : at], strict=True) if label >= 0]
            found += learned
            assert own == [FILLER_ID] * size or len(learned) == size - (own[0] == begin)
            # A piece is a run of one document, so each position but BOS predicts the next one's token.
            assert all(label == token for (_, label), (token, _) in pairwise(learned))
    assert sorted(found) == [pair for doc in docs for pair in pairwise(doc)]
    assert windows.n_labels(range(len(windows))) == len(found)
    assert windows.used(np.arange(len(windows))).sum() == (rows.tokens_NT != FILLER_ID).sum()


@settings(deadline=None, max_examples=examples(200))
@given(sizes=st.lists(st.integers(1, 30), min_size=1, max_size=60))
def test_best_fit_decreasing_is_that_of_the_definition(sizes: list[int]) -> None:
    free: list[int] = []
    for size in sorted(sizes, reverse=True):
        fits = [i for i, space in enumerate(free) if space >= size]
        if not fits:
            free.append(30)
            fits = [len(free) - 1]
        free[min(fits, key=lambda i: free[i])] -= size
    found = best_fit(np.array(sizes), 30)
    used = np.bincount(found, sizes)
    assert sorted(used) == sorted(30 - space for space in free)


@pytest.mark.parametrize("seq_len", [512, 1024, 2048])
def test_documents_that_fit_are_whole_and_little_is_padding(seq_len: int) -> None:
    """Chats with a median of 138 tokens: every learned label sees the beginning of its conversation."""
    lengths = np.random.default_rng(7).lognormal(np.log(138), 0.7, 3000).astype(int).clip(4, 3000)
    data, learned = part(*(range(1, n + 1) for n in lengths)), lengths - lengths // 3 - 1
    starts = data.starts
    masks = np.stack([starts + 1, starts + 1 + lengths // 3], 1)[lengths // 3 > 0]
    windows = Windows(replace(data, masks=masks, begin=0), seq_len, FILLER)
    rows, seen = windows.rows(range(len(windows))), 0
    for tokens, pieces in zip(rows.tokens_NT, rows.lengths, strict=True):
        at = np.cumsum([0, *pieces[:-1]])
        assert set(tokens[at].tolist()) <= {1, FILLER}
        seen += int((tokens[at] == 1).sum())
    assert seen == 3000
    assert windows.padding < MAX_PADDING
    n_long = np.count_nonzero(lengths - 1 > seq_len)
    assert windows.n_dropped == (lengths - 1 - seq_len)[lengths - 1 > seq_len].sum()
    assert bool(n_long) == bool(windows.n_dropped) == (seq_len == 512 or windows.n_dropped > 0)
    assert windows.n_labels(range(len(windows))) == (learned + (lengths // 3 == 0)).sum() - windows.n_dropped


def test_texts_are_cut_where_whole_ones_would_leave_gaps() -> None:
    windows = Windows(part(*(varied(61, seed) for seed in range(200))), 100, FILLER)
    assert windows.padding < MAX_PADDING
    assert 60 < windows.n_cuts < 90
    assert windows.n_labels(range(len(windows))) == 200 * 60


def test_sources_share_no_window() -> None:
    docs = [varied(10, seed) for seed in range(20)]
    windows = Windows(replace(part(*docs), sources=(7, 13)), 32, FILLER)
    first = windows.rows(range(windows.sources[1]))
    assert windows.sources == [0, 3, 8]
    own = {tuple(doc[:-1]) for doc in docs[:7]}
    pieces = [
        tuple(piece.tolist())
        for tokens, lengths in zip(first.tokens_NT, first.lengths, strict=True)
        for piece in np.split(tokens, np.cumsum(lengths)[:-1])
    ]
    assert own <= set(pieces)
    assert all(piece in own or set(piece) == {FILLER} for piece in pieces)


@pytest.mark.parametrize(
    ("data", "message"), [([[1]], "fewer than two tokens"), ([[1], [2]], "no document has a token to predict")]
)
def test_a_stream_without_a_label_is_refused(data: list[list[int]], message: str) -> None:
    with pytest.raises(RefusedError, match=message):
        Windows(part(*data), 4, FILLER)


# --- data that nothing can be learned from ---


def refused(windows: Windows) -> AprError:
    with pytest.raises(RefusedError) as caught:
        check_windows(windows)
    assert caught.value.exit_code == 5
    assert caught.value.hint
    return caught.value


def test_a_constant_stream_is_refused() -> None:
    error = refused(Windows(part([7] * 1000), 16, FILLER))
    assert "0.00 bits per token, id 7 is 100% of all tokens" in str(error)


def test_two_labels_are_refused() -> None:
    error = refused(Windows(part(varied(1000, high=2)), 16, FILLER))
    assert "bits per token" in str(error)
    check_windows(Windows(part(varied(4000, high=12)), 16, FILLER))  # 3.6 bits are enough


def test_labels_beyond_the_window_are_counted_and_refused_if_most_are() -> None:
    def chats(prompt: int, n: int) -> Windows:
        docs = [varied(prompt + n, seed) for seed in range(30)]
        starts = np.arange(30) * (prompt + n)
        masks = np.stack([starts + 1, starts + prompt], 1)
        return Windows(replace(part(*docs), masks=masks), 32, FILLER)

    lines: list[str] = []
    check_windows(chats(8, 32), lines.append)
    assert lines[0].startswith("210 of 960 labels are beyond the first 32 tokens of their conversation")
    error = refused(chats(32, 25))
    assert "720 of 750 labels are beyond the first 32 tokens of their conversation" in str(error)
    with pytest.raises(RefusedError, match="no document has a token to predict"):
        chats(40, 8)


def test_padding_is_said() -> None:
    docs = [varied(22, seed) for seed in range(30)]
    masks = np.stack([np.arange(30) * 22 + 1, np.arange(30) * 22 + 2], 1)
    lines: list[str] = []
    check_windows(Windows(replace(part(*docs), masks=masks), 32, FILLER), lines.append)
    assert lines == ["34.4% of the positions are padding: few documents fit together into 32 tokens"]


def test_repeated_windows_are_refused_with_the_first_pair() -> None:
    blocks = [varied(16, seed) for seed in range(100)]
    order = [*range(100), *range(40, 80), 99]  # with the block behind it, all of 40 to 78 are the same window again
    tokens = [token for block in order for token in blocks[block]]
    error = refused(Windows(part(tokens), 16, FILLER))
    assert "39 of 141 sequences are duplicates; the first is sequence 100, a copy of sequence 40" in str(error)


def test_some_repeats_are_normal_and_said() -> None:
    blocks = [varied(16, seed) for seed in range(400)]
    for repeated, told in (([40, 41, 42, 7], 0), ([*range(40, 70)], 1)):
        lines: list[str] = []
        order = [*range(400), *repeated]
        tokens = [token for block in order for token in blocks[block]]
        check_windows(Windows(part(tokens), 16, FILLER), lines.append)
        assert len(lines) == told
    assert lines[0].startswith("6.7%: 29 of 430 sequences are duplicates")


def test_one_input_with_two_last_labels_is_refused() -> None:
    same = varied(16, seed=1)
    tokens = [token for i in range(60) for token in (*same, i, *varied(15, seed=i + 2))]
    error = refused(Windows(part(tokens), 16, FILLER))
    assert "the same input as another but a different last label, such as sequences 0 and " in str(error)


def test_real_text_passes(tmp_path: Path) -> None:
    corpus = prepare([write_jsonl(tmp_path / "a.jsonl", functions(400))], byte_tokenizer(), tmp_path / "data")
    for seq_len in (32, 128, 4096):
        check_windows(Windows(corpus.train, seq_len, corpus.separator))
    check_windows(Windows(corpus.held_out, 4096, corpus.separator))  # one window that is not full


def test_large_data_are_looked_at_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    windows = Windows(part(varied(20_000)), 16, FILLER)
    read: Counter[int] = Counter()
    whole = Windows.rows

    def counted(self: Windows, ids: list[int]) -> object:
        read.update(ids)
        return whole(self, ids)

    monkeypatch.setattr(Windows, "rows", counted)
    monkeypatch.setattr("aprfmt.texts.sequences._LOOK_AT", 1600)
    monkeypatch.setattr("aprfmt.texts.sequences._AT_ONCE", 170)
    check_windows(windows)
    assert len(read) == 100
    assert min(read) == 0
    assert max(read) == len(windows) - 1
