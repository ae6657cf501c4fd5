"""A corpus in the tokens of another tokenizer: spans hold the same bytes on both sides, and no label is lost."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import demo_model
import numpy as np
import pytest

import aprfmt
from aprfmt.errors import UnsupportedError
from aprfmt.texts.corpus import prepare
from aprfmt.texts.encoding import HIDDEN, Encoder
from aprfmt.texts.parallel import LONGEST_SPAN, AlignedWindows, retokenize
from aprfmt.texts.sequences import IGNORED, Windows
from aprfmt.texts.shards import Corpus, CorpusSplit, part_of
from aprfmt.tokenizer.alignment import is_control, match, outcomes_of, token_bytes
from aprfmt.tokenizer.encoding import hard_texts
from aprfmt.tokenizer.model import Tokenizer

OTHER = ("a t", "Ġ a", "t h", "Ġ th", "Ġth e", "e r", "o g", "Ġ d", "Ġd og", "Ġ h", "n d", "Ġa nd")
TEXTS = (
    "the dog and the cat sat on a hat in the heat of the other land, and then another " * 3,
    "Ünï→çødé 🦙🦙 and <|im_end|> the end",
)


def demo(folder: Path, merges: Sequence[str] = demo_model.MERGES) -> Tokenizer:
    path = folder / f"{len(merges)}.gguf"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo_model, "MERGES", tuple(merges))
        patch.setattr(demo_model, "N_TOKENS", 260 + len(merges))
        demo_model.build(path)
    return read(path)


def read(path: Path) -> Tokenizer:
    with aprfmt.open(path) as model:
        assert model.tokenizer is not None
        return model.tokenizer


def with_begin(tokenizer: Tokenizer) -> Tokenizer:
    return replace(tokenizer, special={**tokenizer.special, "bos": 1}, flags={**tokenizer.flags, "add_bos": True})


def corpora(folder: Path, student: Tokenizer, teacher: Tokenizer, texts: Sequence[str]) -> tuple[Corpus, Corpus]:
    (folder / "texts.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    (folder / "held_out.txt").write_text("another text")
    own = prepare([folder / "texts.jsonl"], student, folder / "own", held_out_paths=[folder / "held_out.txt"])
    return own, retokenize(own, student, teacher, folder / "twin")


def check(student: Tokenizer, teacher: Tokenizer, own: CorpusSplit, windows: AlignedWindows) -> int:
    """Spans of all windows at once: the same bytes, predicted by the tokens before them; gives the aligned labels."""
    ids = range(len(windows))
    rows, batch = windows.rows(ids), windows.windows.rows(ids)
    labels, read = batch.labels_NT.ravel(), rows.tokens_RT.ravel()
    assert np.array_equal(np.sort(rows.index_P), np.flatnonzero(labels != IGNORED)), "each label once"
    assert [sum(lengths) for lengths in rows.lengths] == [windows.row_len] * len(rows.tokens_RT)
    n = int(rows.sizes_G.sum())
    ours = np.split(rows.index_P[:n], rows.sizes_G.cumsum()[:-1])
    theirs = np.split(np.stack([rows.teacher_E, rows.next_E], 1), rows.counts_G.cumsum()[:-1])
    starts = {int(at) for at in np.cumsum([0, *(each for row in rows.lengths for each in row)])}
    for places, found in zip(ours, theirs, strict=True):
        said, heard = labels[places].tolist(), found[:, 1].tolist()
        if not is_control(student, said[0]):
            texts = [b"".join(token_bytes(t, i) or b"" for i in ids) for t, ids in ((student, said), (teacher, heard))]
            assert texts[0] == texts[1] or "llama" in (student.model, teacher.model)
            one, other = (text.decode("utf-8", "replace").replace("▁", " ").lstrip() for text in texts)
            assert one == other, "SentencePiece puts a space before a text"
        at = int(found[0, 0])
        assert np.array_equal(found[:, 0], np.arange(at, at + len(found)))
        assert read[at + 1 : at + len(found)].tolist() == heard[:-1]
        # Both have read the same until then: the last tokens before a span end with the same byte.
        before = token_bytes(student, int(batch.tokens_NT.ravel()[places[0]])), token_bytes(teacher, int(read[at]))
        assert at in starts or not before[0] or not before[1] or before[0][-1] == before[1][-1]
    return n


@pytest.mark.parametrize("seq_len", [5, 16, 400])
@pytest.mark.parametrize("begins", ["", "student", "teacher", "both"])
def test_spans_hold_the_same_text(begins: str, seq_len: int, tmp_path: Path) -> None:
    student, teacher = demo(tmp_path, OTHER), demo(tmp_path)
    student = with_begin(student) if begins in ("student", "both") else student
    teacher = with_begin(teacher) if begins in ("teacher", "both") else teacher
    own, twin = corpora(tmp_path, student, teacher, TEXTS)
    windows = Windows(own.train, seq_len, own.separator)
    n = check(student, teacher, own.train, AlignedWindows(windows, own.train, twin.train, twin.separator, None))
    total = windows.n_labels(range(len(windows)))
    assert n > (0.5 if seq_len == 5 else 0.85) * total
    if seq_len == 400:  # a text begins without a prediction on a side that has no BOS
        assert n >= total - 3 * len(own.train.ends)
        assert (n == total) == (begins == "both")


@pytest.mark.parametrize(("one", "other"), [("gpt-2", "llama-spm"), ("llama-spm", "gpt-2")])
def test_real_tokenizers_share_the_hard_texts(one: str, other: str, llama_cpp_models: Path, tmp_path: Path) -> None:
    student, teacher = (read(llama_cpp_models / f"ggml-vocab-{name}.gguf") for name in (one, other))
    own, twin = corpora(tmp_path, student, teacher, [" ".join(hard_texts()[i::8]) for i in range(8)])
    windows = AlignedWindows(Windows(own.train, 256, own.separator), own.train, twin.train, twin.separator, None)
    assert check(student, teacher, own.train, windows) > 0.95 * windows.windows.n_labels(range(len(windows)))
    outcomes = outcomes_of(teacher, student)
    assert outcomes.n == len(match(teacher, student)) > 10_000
    assert outcomes.n not in outcomes.student[3:200] + outcomes.teacher[3:200], "bytes"


def test_a_span_is_aligned_only_if_all_its_labels_are_learned(tmp_path: Path) -> None:
    student, teacher = demo(tmp_path, ()), demo(tmp_path)
    ids = Encoder(student).encode(["on the dog"])[0]
    _, twin = corpora(tmp_path, student, teacher, ["on the dog"])
    found = {(): " the dog", (2,): " dog", (5,): " dog", (6, 7): " theog", (8, 9): " the d"}
    for hidden, aligned in found.items():
        marked = ids.copy()
        marked[[*hidden]] |= HIDDEN
        part = part_of([marked])
        windows = AlignedWindows(Windows(part, 16, 0), part, twin.train, twin.separator, None)
        rows = windows.rows([0])
        labels = windows.windows.rows([0]).labels_NT.ravel()[rows.index_P[: rows.sizes_G.sum()]]
        assert b"".join(token_bytes(student, i) or b"" for i in labels.tolist()) == f"{aligned}<|im_end|>".encode()
        assert len(rows.index_P) == 10 - len(hidden)


def test_a_short_context_of_the_teacher_cuts_pieces_and_the_share_says_so(tmp_path: Path) -> None:
    student, teacher = demo(tmp_path), demo(tmp_path, ())
    own, twin = corpora(tmp_path, student, teacher, TEXTS)
    windows = Windows(own.train, 400, own.separator)
    whole, cut = (AlignedWindows(windows, own.train, twin.train, twin.separator, n) for n in (None, 40))
    assert cut.row_len == 40 < whole.row_len
    assert check(student, teacher, own.train, cut) < check(student, teacher, own.train, whole)
    ids = [*range(len(windows)), -1]
    assert 0 < cut.share(ids) < whole.share(ids)
    empty = cut.rows([-1])
    assert (len(empty.index_P), len(empty.teacher_E), len(empty.tokens_RT)) == (0, 0, 1)


def test_control_tokens_pair_by_role_and_words_before_bytes(tmp_path: Path) -> None:
    one = Tokenizer("gpt2", ["<s>", "</s>", "a", "ab", "<|x|>"], types=[3, 3, 1, 1, 3], special={"bos": 0, "eos": 1})
    two = Tokenizer(
        "llama", ["<|x|>", "<end>", "<0x61>", "a", "abc", "</s>"], types=[3, 3, 6, 1, 1, 1], special={"eos": 1}
    )
    assert match(two, one) == {1: 1, 2: 3, 4: 0}
    found = outcomes_of(two, one)
    assert (found.n, found.student, found.teacher) == (3, [3, 0, 1, 1, 2], [2, 0, 1, 1, 1, 3])


def test_shards_are_reused_and_rebuilt_if_damaged(tmp_path: Path) -> None:
    student, teacher, lines = demo(tmp_path, OTHER), demo(tmp_path), list[str]()
    own, twin = corpora(tmp_path, student, teacher, TEXTS)
    assert retokenize(own, student, teacher, tmp_path / "twin", lines.append).key == twin.key
    assert "up to date" in lines[-1]
    stored = (tmp_path / "twin/train.bin").read_bytes()
    (tmp_path / "twin/train.bin").write_bytes(stored[:-4] + b"\0\0\0\0")
    retokenize(own, student, teacher, tmp_path / "twin", lines.append)
    assert "rebuilt" in lines[-2]
    assert (tmp_path / "twin/train.bin").read_bytes() == stored
    n = 1 << 20
    wide = replace(teacher, tokens=teacher.tokens + ["x"] * n, types=teacher.types + [1] * n)
    with pytest.raises(UnsupportedError, match="the maximum is 1,048,575"):
        retokenize(own, student, wide, tmp_path / "wide")


def test_long_spans_are_left_out(tmp_path: Path) -> None:
    long = "q" + "x" * LONGEST_SPAN
    student, teacher = demo(tmp_path), demo(tmp_path, [f"{long[:i]} x" for i in range(1, len(long))])
    own, twin = corpora(tmp_path, student, teacher, [f"on the {long} hat"])
    windows = AlignedWindows(Windows(own.train, 400, own.separator), own.train, twin.train, twin.separator, None)
    n = check(student, teacher, own.train, windows)
    assert n < windows.windows.n_labels([0]) - LONGEST_SPAN
