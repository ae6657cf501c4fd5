"""The order of windows is a function of one integer; batches are the same whatever the number of processes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional
from train_corpora import part, tiny_decoder, varied

from aprfmt.errors import RefusedError, UsageError
from aprfmt.texts.sequences import IGNORED, Windows
from aprtrain.data.batches import Batch, Batches, batch_of, shuffle_index

FILLER = 2


def windows(n: int = 37, seq_len: int = 8) -> Windows:
    """`n` windows of documents of 5 to 20 tokens."""
    tokens, docs = varied(n * seq_len - 3, seed=n), []
    while tokens:
        length = 5 + len(tokens) % 16
        docs.append(tokens[:length])
        tokens = tokens[length:]
    found = Windows(part(*docs), seq_len, FILLER)
    assert len(found) == n
    return found


def batches(data: Windows, per_step: int = 4, per_micro: int = 4, seed: int = 42, **options: object) -> Batches:
    return Batches(data, sequences_per_step=per_step, windows_per_micro=per_micro, seed=seed, **options)  # type: ignore[arg-type]


def taken(step: list[Batch]) -> list[int]:
    return [window for batch in step for window in batch.windows]


# --- order ---


@settings(deadline=None)
@given(n=st.integers(1, 700), seed=st.integers(0, 2**63), epoch=st.integers(0, 1000))
def test_an_epoch_is_a_permutation(n: int, seed: int, epoch: int) -> None:
    assert sorted(shuffle_index(i, n, seed, epoch) for i in range(n)) == list(range(n))


def test_the_order_is_fixed_for_ever() -> None:
    assert [shuffle_index(i, 10, 42, 0) for i in range(10)] == [3, 2, 1, 7, 5, 4, 0, 6, 9, 8]
    assert shuffle_index(123_456_789, 10**12, 7, 3) == 453_436_289_284


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = {tuple(shuffle_index(i, 100, seed, epoch) for i in range(100)) for seed in range(4) for epoch in range(4)}
    assert len(orders) == 16
    moved = [abs(shuffle_index(i, 10_000, 1, 0) - i) for i in range(10_000)]
    assert 3000 < sum(moved) / len(moved) < 3700  # a third of n, as of any random order


# --- steps ---


def test_every_window_comes_once_an_epoch_and_then_the_data_end() -> None:
    data = windows(37)
    steps = batches(data, epochs=2)
    assert steps.n_steps == 19
    seen = [taken(next(steps)) for _ in range(19)]
    flat = [i for step in seen for i in step]
    assert Counter(i for i in flat[:37]) == Counter(range(37))
    assert Counter(flat) == Counter({**dict.fromkeys(range(37), 2), -1: 2})
    assert flat[-2:] == [-1, -1]
    with pytest.raises(RefusedError, match="the data ends after 2 epochs of 37 sequences") as caught:
        next(steps)
    assert caught.value.exit_code == 5
    with pytest.raises(RefusedError):
        next(steps)


def test_repeating_goes_on_and_says_so() -> None:
    lines: list[str] = []
    steps = batches(windows(10), epochs=None, log=lines.append)
    flat = [i for _ in range(8) for i in taken(next(steps))]
    assert steps.n_steps is None
    assert [Counter(flat[i : i + 10]) for i in (0, 10, 20)] == [Counter(range(10))] * 3
    assert lines == [f"epoch {e}: 10 sequences, reshuffled" for e in (1, 2, 3, 4)]
    assert flat[:10] != flat[10:20]


def test_epochs_are_announced_once_also_when_a_step_has_several() -> None:
    lines: list[str] = []
    steps = batches(windows(3), per_step=4, epochs=3, log=lines.append)
    for _ in range(3):
        next(steps)
    assert lines == ["epochs 1 to 2 of 3: 3 sequences, reshuffled", "epoch 3 of 3: 3 sequences, reshuffled"]


def test_a_run_that_the_data_do_not_last_for_is_refused_before_it_starts() -> None:
    steps = batches(windows(37))
    steps.check(10)
    with pytest.raises(RefusedError, match=r"11 steps need 352 tokens, but the data has 296 .* 1\.2 epochs") as caught:
        steps.check(11)
    assert "use --epochs 2, --tokens-per-step 24 or --repeat" in (caught.value.hint or "")
    batches(windows(37), per_step=3).check(11)  # what the hint says
    batches(windows(37), epochs=2).check(11)
    batches(windows(37), epochs=None).check(10**9)


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("per_micro", [1, 2, 8])
def test_a_step_is_the_same_whatever_the_number_of_processes(world: int, per_micro: int) -> None:
    data = windows(37)
    alone = [next(batches(data, per_step=8, per_micro=8, cursor=cursor, epochs=2)) for cursor in (0, 8, 32, 72)]
    for whole, cursor in zip(alone, (0, 8, 32, 72), strict=True):
        (expected,) = whole
        shares = [
            next(batches(data, 8, per_micro, rank=rank, world=world, cursor=cursor, epochs=2)) for rank in range(world)
        ]
        assert all(len(batch.windows) <= per_micro for share in shares for batch in share)
        together = [batch for share in shares for batch in share]
        assert torch.equal(torch.cat([b.tokens_NT for b in together]), expected.tokens_NT)
        assert torch.equal(torch.cat([b.labels_NT for b in together]), expected.labels_NT)
        assert sum((b.windows for b in together), ()) == expected.windows
        assert {b.n_valid for b in together} == {expected.n_valid}
        assert sum(int((b.labels_NT != IGNORED).sum()) for b in together) == expected.n_valid


def test_going_on_from_a_cursor_leaves_nothing_out_and_repeats_nothing() -> None:
    data = windows(37)
    whole = batches(data, epochs=3)
    wanted = [taken(next(whole)) for _ in range(27)]
    first = batches(data, epochs=3)
    found = [taken(next(first)) for _ in range(11)]
    second = batches(data, epochs=3, cursor=first.cursor)
    found += [taken(next(second)) for _ in range(16)]
    assert found == wanted
    assert second.cursor == whole.cursor == 27 * 4


def test_a_step_that_processes_cannot_share_is_refused() -> None:
    with pytest.raises(UsageError, match="6 sequences per step do not divide over 4 processes"):
        batches(windows(5), per_step=6, world=4)


# --- documents ---


def test_documents_are_where_they_begin_and_have_room() -> None:
    data = Windows(part([1, 2, 3, 4, 5], [6, 7], [8, 9, 10], [11, 12, 13, 14], [15, 16]), 4, FILLER)
    batch = batch_of(data, [1, 0])
    assert batch.documents is not None
    ends = batch.documents.cu_seqlens
    assert ends.dtype == torch.int32
    assert ends.tolist()[:5] == [0, 1, 4, 8, 8]
    assert set(ends.tolist()[5:]) == {8}
    assert batch.documents.max_len == 4
    shapes = {batch_of(data, [a, b]).documents.cu_seqlens.shape for a in range(3) for b in range(3)}  # type: ignore[union-attr]
    assert len(shapes) == 1  # so that nothing is compiled again


def test_without_packing_there_are_no_documents() -> None:
    assert batch_of(Windows(part(varied(6), varied(9), varied(4)), 8, FILLER), [0, 1]).documents is not None
    assert batch_of(Windows(part(varied(9), varied(9)), 8, FILLER), [0, 1]).documents is None


def test_a_batch_moves_as_a_whole() -> None:
    batch = batch_of(windows(5), [0, 3, -1])
    moved = batch.to("cpu")
    assert torch.equal(moved.tokens_NT, batch.tokens_NT)
    assert moved.documents is not None
    assert batch.documents is not None
    assert torch.equal(moved.documents.cu_seqlens, batch.documents.cu_seqlens)
    assert (moved.windows, moved.n_valid) == ((0, 3, -1), batch.n_valid)
    assert {moved.tokens_NT.dtype, moved.labels_NT.dtype} == {torch.int64}


def test_where_few_labels_count_their_places_are_known() -> None:
    data = windows(5)
    assert batch_of(data, [0, 3]).kept_P is None  # nearly all count
    batch = batch_of(data, [0, -1, 3])
    labels = batch.labels_NT.flatten()
    assert batch.kept_P is not None
    assert batch.kept_P.tolist() == [i for i, label in enumerate(labels.tolist()) if label != IGNORED]
    moved = batch.to("cpu").kept_P
    assert moved is not None
    assert torch.equal(moved, batch.kept_P)


def test_a_document_sees_nothing_of_the_one_before_it() -> None:
    decoder = tiny_decoder(1)
    first, other, second = varied(11, seed=1), varied(11, seed=2), varied(13, seed=3)

    def hidden(*docs: list[int], packed: bool = True) -> torch.Tensor:
        batch = batch_of(Windows(part(*docs), 24, FILLER), [0])
        with torch.no_grad():
            found: torch.Tensor = decoder(batch.tokens_NT, batch.documents if packed else None)
        return found[0]

    behind_first, behind_other = (hidden(doc, second)[10:22] for doc in (first, other))
    assert torch.equal(behind_first, behind_other)
    alone = hidden(second)[:12]
    torch.testing.assert_close(behind_first, alone, rtol=1e-4, atol=1e-5)
    leaking = hidden(first, second, packed=False)[10:22]
    assert not torch.allclose(leaking, alone, rtol=1e-2, atol=1e-2)  # this comparison can tell


def test_rows_that_fill_the_last_batch_change_no_loss() -> None:
    data = windows(5)
    full, filled = batch_of(data, [1, 3]), batch_of(data, [1, 3, -1, -1])
    weight = torch.randn(320, 8, generator=torch.Generator().manual_seed(1))

    def loss(batch: Batch) -> torch.Tensor:
        logits = weight[batch.tokens_NT] @ weight.T
        summed = functional.cross_entropy(logits.flatten(0, 1), batch.labels_NT.flatten(), reduction="sum")
        return summed / batch.n_valid

    assert full.n_valid == filled.n_valid > 0
    torch.testing.assert_close(loss(full), loss(filled))
    assert not torch.isclose(loss(replace(full, n_valid=32)), loss(full))
