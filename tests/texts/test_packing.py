"""Windows hold every token, learn every token once, and know where documents begin; useless data are refused."""

from __future__ import annotations

from collections import Counter
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
from aprfmt.texts.windows import IGNORED, Windows, check_windows

NO = IGNORED
FILLER = 999


def test_windows_by_hand() -> None:
    windows = Windows(part([1, 2, 3, 4, 5], [6, 7], [8, 9, 10]), 4, FILLER)
    assert len(windows) == 3
    rows = windows.rows([0, 1, 2])
    assert rows.tokens_NT.tolist() == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, FILLER, FILLER]]
    assert rows.labels_NT.tolist() == [[2, 3, 4, 5], [NO, 7, NO, 9], [10, NO, NO, NO]]
    assert rows.lengths == [[4], [1, 2, 1], [2, 2]]
    assert [windows.n_labels([i]) for i in range(3)] == [4, 2, 1]
    assert windows.is_packed


def test_a_document_that_fills_a_window_exactly() -> None:
    windows = Windows(part([1, 2, 3], [4, 5, 6], [7, 8, 9, 10]), 3, FILLER)
    rows = windows.rows([0, 1, 2])
    assert rows.labels_NT.tolist() == [[2, 3, NO], [5, 6, NO], [8, 9, 10]]
    assert rows.lengths == [[3], [3], [3]]
    assert len(windows) == 3  # the last token is a label only


def test_negative_numbers_are_rows_without_labels() -> None:
    windows = Windows(part([1, 2, 3, 4, 5]), 4, FILLER)
    rows = windows.rows([-1, 0])
    assert rows.tokens_NT.tolist() == [[FILLER] * 4, [1, 2, 3, 4]]
    assert rows.labels_NT.tolist() == [[NO] * 4, [2, 3, 4, 5]]
    assert rows.lengths == [[4], [4]]
    assert windows.n_labels([-1, 0, -1]) == 4


@settings(deadline=None, max_examples=examples(200))
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=12).filter(lambda x: sum(x) > 1),
    seq_len=st.integers(1, 12),
)
def test_every_token_but_the_first_of_a_document_is_a_label_once(lengths: list[int], seq_len: int) -> None:
    ids = iter(range(1000))
    docs = [[next(ids) for _ in range(length)] for length in lengths]
    windows = Windows(part(*docs), seq_len, FILLER)
    rows = windows.rows(range(len(windows)))
    pairs = [
        (int(token), int(label))
        for tokens, labels in zip(rows.tokens_NT, rows.labels_NT, strict=True)
        for token, label in zip(tokens, labels, strict=True)
        if label != IGNORED
    ]
    assert sorted(pairs) == [pair for doc in docs for pair in pairwise(doc)]
    assert windows.n_labels(range(len(windows))) == len(pairs)
    for tokens, pieces in zip(rows.tokens_NT.tolist(), rows.lengths, strict=True):
        assert sum(pieces) == seq_len
        starts = np.cumsum([0, *pieces[:-1]]).tolist()
        real = [i for i in starts if tokens[i] != FILLER]
        assert [tokens[i] for i in real[1:]] == [t for t in tokens[1:] if t in {d[0] for d in docs}]


def test_a_stream_without_a_label_is_refused() -> None:
    with pytest.raises(RefusedError, match="fewer than two tokens"):
        Windows(part([1]), 4, FILLER)


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


def test_windows_without_a_label_are_refused() -> None:
    tokens = varied(300)
    lonely = [[token] for token in tokens[10:]]
    error = refused(Windows(part(tokens[:10], *lonely), 8, FILLER))
    assert "36 of 38 sequences have nothing to predict, such as sequence 2" in str(error)
    lines: list[str] = []
    check_windows(Windows(part(tokens[:100], *lonely[90:130], tokens[140:]), 8, FILLER), lines.append)
    assert [line.split(":")[0] for line in lines] == ["10.5%"]


def test_repeated_windows_are_refused_with_the_first_pair() -> None:
    blocks = [varied(16, seed) for seed in range(100)]
    order = [*range(100), *range(40, 80), 99]  # with the block behind it, all of 40 to 78 are the same window again
    tokens = [token for block in order for token in blocks[block]]
    error = refused(Windows(part(tokens), 16, FILLER))
    assert "39 of 140 sequences are duplicates; the first is sequence 100, a copy of sequence 40" in str(error)


def test_some_repeats_are_normal_and_said() -> None:
    blocks = [varied(16, seed) for seed in range(400)]
    for repeated, told in (([40, 41, 42, 7], 0), ([*range(40, 70)], 1)):
        lines: list[str] = []
        order = [*range(400), *repeated]
        tokens = [token for block in order for token in blocks[block]]
        check_windows(Windows(part(tokens), 16, FILLER), lines.append)
        assert len(lines) == told
    assert lines[0].startswith("6.8%: 29 of 429 sequences are duplicates")


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
    whole = Windows.tokens

    def counted(self: Windows, ids: np.ndarray[tuple[int], np.dtype[np.int64]]) -> object:
        read.update(ids.tolist())
        return whole(self, ids)

    monkeypatch.setattr(Windows, "tokens", counted)
    monkeypatch.setattr("aprfmt.texts.windows._LOOK_AT", 1600)
    monkeypatch.setattr("aprfmt.texts.windows._AT_ONCE", 170)
    check_windows(windows)
    assert len(read) == 100
    assert min(read) == 0
    assert max(read) == len(windows) - 2
