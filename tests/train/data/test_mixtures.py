"""Several sources by weight: shares of the tokens that are read, the same in every process and after a resume."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from train_corpora import byte_tokenizer, functions, part, varied, write_jsonl

from aprfmt.errors import RefusedError, UsageError
from aprfmt.texts.corpus import prepare
from aprfmt.texts.sequences import Windows
from aprfmt.texts.shards import Corpus
from aprfmt.texts.sources import short_names, split_weights
from aprtrain.data.batches import Batches, Share, shares_of

TOKENIZER = byte_tokenizer()
FILLER = 2
SHARES = [Share("a", 0, 30, Fraction(1, 2)), Share("b", 30, 50, Fraction(3, 10)), Share("c", 80, 20, Fraction(1, 5))]


def windows() -> Windows:
    return Windows(part(varied(801)), 8, FILLER)


def batches(shares: list[Share] = SHARES, **options: Any) -> Batches:
    given: dict[str, Any] = {"sequences_per_step": 10, "windows_per_micro": 10, "seed": 3, "epochs": None} | options
    return Batches(windows(), shares=shares, **given)


def taken(steps: Batches, n: int) -> list[list[int]]:
    return [[window for batch in next(steps) for window in batch.windows] for _ in range(n)]


def of(numbers: list[int]) -> Counter[str]:
    return Counter(next(share.name for share in SHARES if share.first <= i < share.first + share.n) for i in numbers)


def test_each_step_has_the_shares_that_were_asked_for() -> None:
    seen = taken(batches(), 12)
    assert [of(step) for step in seen] == [Counter(a=5, b=3, c=2)] * 12
    flat = [i for step in seen for i in step]
    for share, passes in zip(SHARES, (2, 0, 1), strict=True):  # 60, 36 and 24 of 30, 50 and 20
        mine = [i for i in flat if share.first <= i < share.first + share.n]
        for turn in range(passes):
            assert sorted(mine[turn * share.n : (turn + 1) * share.n]) == [*range(share.first, share.first + share.n)]
        assert len(set(mine[passes * share.n :])) == len(mine[passes * share.n :])
    a = [i for i in flat if i < 30]
    assert a[:30] != a[30:60]


def test_thirds_stay_within_a_window_of_their_weight() -> None:
    shares = [
        Share("a", 0, 40, Fraction(1, 3)),
        Share("b", 40, 30, Fraction(2, 7)),
        Share("c", 70, 30, Fraction(8, 21)),
    ]
    flat = [i for step in taken(batches(shares), 50) for i in step]
    for n in range(1, len(flat)):
        for share in shares:
            count = sum(share.first <= i < share.first + share.n for i in flat[:n])
            assert abs(count - n * share.weight) < len(shares)


@pytest.mark.parametrize("world", [2, 5])
def test_every_process_and_every_resumed_run_takes_the_same(world: int) -> None:
    wanted = taken(batches(), 9)
    ranks = [batches(rank=rank, world=world, windows_per_micro=1) for rank in range(world)]
    for step in wanted:
        assert [i for rank in ranks for batch in next(rank) for i in batch.windows] == step
    first = batches()
    assert taken(first, 4) + taken(batches(cursor=first.cursor), 5) == wanted


def test_one_source_alone_is_read_as_without_weights() -> None:
    assert taken(batches([Share("", 0, 100, Fraction(1))]), 20) == taken(batches([]), 20)


def test_a_weight_that_takes_a_source_twice_is_refused() -> None:
    once = batches(epochs=1)
    assert once.n_steps == 6  # 30 of a last for 60
    once.check(6)
    with pytest.raises(
        RefusedError, match=r"7 steps need 280 tokens of a, but the data has 240 .* 1\.2 epochs"
    ) as caught:
        once.check(7)
    assert "--repeat" in str(caught.value.hint)
    assert sum(map(len, taken(once, 6))) == 60
    with pytest.raises(RefusedError, match="the data ends after 1 epochs of 60 sequences"):
        next(once)
    batches(epochs=2).check(12)
    batches(epochs=None).check(10**6)


def test_passes_are_told_by_their_source() -> None:
    lines: list[str] = []
    taken(batches(log=lines.append), 7)
    assert [line for line in lines if " of a," in line] == [f"epoch {n}: 30 sequences of a, reshuffled" for n in (1, 2)]
    assert len(lines) == 4
    assert [n for n in range(1, 14) if batches(epochs=2).ends_epochs(n, 1)] == [6, 12]


# --- from files ---


def make(tmp_path: Path, *given: str, to: str = "data") -> Corpus:
    paths, weights = split_weights(given)
    return prepare(paths, TOKENIZER, tmp_path / to, weights=weights, held_out=0.05)


def test_sources_are_where_their_files_are(tmp_path: Path) -> None:
    a = write_jsonl(tmp_path / "a.jsonl", functions(60))
    b = write_jsonl(tmp_path / "b.jsonl", functions(90, seed=1))
    corpus = make(tmp_path, f"{a}:0.75", f"{b}:.25")
    assert [source["weight"] for source in corpus.header["sources"]] == ["3/4", "1/4"]
    assert sum(source["tokens"] for source in corpus.header["sources"]) == len(corpus.train.tokens)
    found = Windows(corpus.train, 16, corpus.separator)
    first, second = shares_of(corpus, found)
    assert (first.first, second.first, second.first + second.n) == (0, first.n, len(found))
    assert found.sources == [0, first.n, first.n + second.n]
    labels = [source["tokens"] - source["documents"] for source in corpus.header["sources"]]
    assert [found.n_labels(range(each.first, each.first + each.n)) for each in (first, second)] == labels
    steps = Batches(found, shares=[first, second], sequences_per_step=8, windows_per_micro=8, seed=1, epochs=None)
    for step in taken(steps, 20):
        assert sum(i < first.n for i in step) == 6
    assert shares_of(make(tmp_path, str(a), str(b), to="plain"), found) == []
    again = prepare([tmp_path / "data"], TOKENIZER, tmp_path / "other", held_out=0.05)
    assert shares_of(again, found) == [first, second]
    keys = {make(tmp_path, f"{a}:0.5", f"{b}:0.5", to="half").key, make(tmp_path, str(a), str(b), to="plain").key}
    assert len(keys | {corpus.key}) == 3


def test_sources_of_one_name_are_told_apart(tmp_path: Path) -> None:
    files = []
    for seed, name in enumerate("ab"):
        (tmp_path / name).mkdir()
        files.append(write_jsonl(tmp_path / name / "train.jsonl", functions(40, seed=seed)))
    corpus = make(tmp_path, *(f"{file}:1" for file in files))
    assert [source["name"] for source in corpus.header["sources"]] == ["a/train.jsonl", "b/train.jsonl"]
    assert short_names([tmp_path / "a", tmp_path / "b"]) == ["a", "b"]


def test_what_the_weights_are_of(tmp_path: Path) -> None:
    odd = tmp_path / "a:0.5"
    odd.write_text("text")
    assert split_weights([str(odd)]) == ([odd], [])
    assert split_weights([f"{odd}:3", "b:1"]) == ([odd, Path("b")], [Fraction(3, 4), Fraction(1, 4)])
    assert split_weights(["C:x", "b"]) == ([Path("C:x"), Path("b")], [])
    for given, message in (
        (["a:1", "b"], "set a weight for every --data"),
        (["a:1", "b:0"], "--data b: its weight must be above 0"),
        (["a:1"], "requires several --data"),
        (["a", "a"], "given twice"),
    ):
        with pytest.raises(UsageError, match=message) as caught:
            split_weights(given)
        assert caught.value.hint


def test_a_source_without_a_window_is_refused(tmp_path: Path) -> None:
    a = write_jsonl(tmp_path / "a.jsonl", functions(60))
    b = write_jsonl(tmp_path / "b.jsonl", ["x"])
    corpus = prepare([a, b], TOKENIZER, tmp_path / "data", weights=[Fraction(1, 2)] * 2)
    for length in (61, 62, 63, 64):  # also where the last window begins in it by chance
        with pytest.raises(RefusedError, match=rf"b\.jsonl has [0-3] tokens, fewer than a sequence of {length}"):
            shares_of(corpus, Windows(corpus.train, length, corpus.separator))
