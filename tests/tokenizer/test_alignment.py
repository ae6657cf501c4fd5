"""Vocabularies are aligned by what ids stand for; padding rows have no say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from aprfmt.errors import RefusedError
from aprfmt.texts.sequences import IGNORED
from aprfmt.tokenizer.alignment import SharedVocabulary, align, count_real, token_bytes
from aprfmt.tokenizer.data import TokenType
from aprfmt.tokenizer.hf import read_files
from aprfmt.tokenizer.model import Tokenizer
from aprtrain.loss.head import distill_head
from aprtrain.loss.objective import Objective

CONTROL, NORMAL, UNUSED, USER = (
    int(t) for t in (TokenType.CONTROL, TokenType.NORMAL, TokenType.UNUSED, TokenType.USER_DEFINED)
)


def words(tokens: Sequence[str], types: Sequence[int] = (), model: str = "gpt2") -> Tokenizer:
    return Tokenizer(model, list(tokens), types=list(types) or [NORMAL] * len(tokens))


def read(folder: Path) -> Tokenizer:
    found = read_files({path.name: path.read_bytes() for path in folder.iterdir()})
    assert found is not None
    return found


@pytest.fixture(scope="module")
def qwen(real_tokenizers: dict[str, Path]) -> Tokenizer:
    return read(real_tokenizers["qwen2_5"])


def test_the_7b_and_the_0_5b_of_qwen_share_what_their_tokenizer_has(qwen: Tokenizer) -> None:
    found = align(qwen, qwen, 152_064, 151_936)
    assert (found.n_real, found.teacher_rows, found.student_rows) == (151_665, 152_064, 151_936)
    assert found.teacher_width == 151_680
    assert found.dropped == ()


def test_names_that_converters_give_to_padding_rows_are_no_tokens(qwen: Tokenizer) -> None:
    n = len(qwen.tokens)
    for style, kind in (("[PAD{}]", UNUSED), ("[PAD{}]", USER), ("<|pad_{}|>", UNUSED)):
        names = [style.format(i) for i in range(n, 151_936)]
        padded = replace(qwen, tokens=qwen.tokens + names, types=qwen.types + [kind] * len(names))
        assert align(padded, qwen, 152_064, 151_936).n_real == n
        assert align(qwen, padded, 152_064, 151_936).n_real == n


def test_a_permuted_tokenizer_is_refused_with_the_first_difference(qwen: Tokenizer) -> None:
    tokens = list(qwen.tokens)
    tokens[700], tokens[9000] = tokens[9000], tokens[700]
    with pytest.raises(RefusedError, match=r"id 700 is .* for the teacher and .* 2 of 151665 ids differ") as caught:
        align(qwen, replace(qwen, tokens=tokens), 152_064, 151_936)
    assert caught.value.exit_code == 5
    assert caught.value.hint


def test_families_with_other_tokenizers_are_refused(real_tokenizers: dict[str, Path], qwen: Tokenizer) -> None:
    with pytest.raises(RefusedError, match="different tokenizers: id "):
        align(read(real_tokenizers["llama3"]), qwen, 128_256, 151_936)


def test_a_teacher_with_more_words_is_refused(real_tokenizers: dict[str, Path], qwen: Tokenizer) -> None:
    qwen3 = read(real_tokenizers["qwen3"])
    with pytest.raises(RefusedError, match=r"the teacher's tokenizer has 4 tokens .* id 151665, '<tool_response>'"):
        align(qwen3, qwen, 151_936, 151_936)
    with pytest.raises(RefusedError, match="the student's tokenizer has 4 tokens that the teacher's lacks"):
        align(qwen, qwen3, 151_936, 151_936)


@pytest.mark.parametrize("side", ["teacher", "student"])
def test_a_head_narrower_than_the_vocabulary_is_refused(side: str) -> None:
    tok = words(["a", "b", "c", "d"])
    rows = {"teacher": 8, "student": 8, side: 3}
    with pytest.raises(RefusedError, match=f"the {side}'s head has 3 rows for 4 tokens"):
        align(tok, tok, rows["teacher"], rows["student"])
    assert align(tok, tok, 4, 8).n_real == 4


@pytest.mark.parametrize("side", ["teacher", "student"])
def test_a_missing_tokenizer_is_refused(side: str) -> None:
    pair = {"teacher": words(["a"]), "student": words(["a"]), side: None}
    with pytest.raises(RefusedError, match=f"the {side} has no tokenizer"):
        align(pair["teacher"], pair["student"], 8, 8)


def test_control_tokens_at_the_end_of_the_teacher_are_dropped_and_named() -> None:
    teacher = words(["a", "b", "<|image|>"], [NORMAL, NORMAL, CONTROL])
    assert align(teacher, words(["a", "b"]), 4, 4) == SharedVocabulary(2, 4, 4, ("<|image|>",))
    with pytest.raises(RefusedError, match=r"the teacher's tokenizer has 1 tokens .* '<\|image\|>'"):
        align(replace(teacher, types=[NORMAL, NORMAL, USER]), words(["a", "b"]), 4, 4)
    with pytest.raises(RefusedError, match="the student's tokenizer has 1 tokens"):
        align(words(["a", "b"]), teacher, 4, 4)


def test_a_teacher_may_have_more_words_where_that_is_asked_for() -> None:
    teacher, student = words(["a", "b", "c", "d"]), words(["a", "b"])
    with pytest.raises(RefusedError, match="the teacher's tokenizer has 2 tokens") as caught:
        align(teacher, student, 8, 4)
    assert "--vocab-policy renormalise" in str(caught.value.hint)
    assert "--vocab-policy aligned" in str(caught.value.hint)
    found = align(teacher, student, 8, 4, "renormalise")
    assert found == SharedVocabulary(2, 8, 4, ("c", "d"))
    assert found.dropped_rows == slice(2, 4)
    with pytest.raises(RefusedError, match="the student's tokenizer has 2 tokens"):
        align(student, teacher, 8, 8, "renormalise")
    with pytest.raises(RefusedError, match="id 1 is 'x' for the teacher"):
        align(words(["a", "x", "c"]), student, 8, 8, "renormalise")


def test_a_control_token_without_a_row_does_not_count() -> None:
    tok = words(["a", "b", "<|image|>"], [NORMAL, NORMAL, CONTROL])
    assert count_real(tok, 2) == 2
    assert count_real(tok, 3) == 3
    assert count_real(tok, 1) == 3  # 'b' has no row either: nothing is overlooked
    assert align(tok, tok, 2, 2) == SharedVocabulary(2, 2, 2)


def test_holes_are_no_tokens() -> None:
    holes = words(["a", "[PAD1]", "c"], [NORMAL, UNUSED, NORMAL])
    assert token_bytes(holes, 1) is None
    with pytest.raises(RefusedError, match="id 1 is not a token for the teacher and 'b' for the student"):
        align(holes, words(["a", "b", "c"]), 4, 4)
    assert token_bytes(words(["[PAD7]"]), 0) == b"[PAD7]"  # a word, as its number is not its id


def test_spellings_of_the_same_bytes_are_the_same() -> None:
    bpe = words(["Ġthe", "Ċ", "é"[0], "<s> a"], [NORMAL, NORMAL, NORMAL, CONTROL])
    spm = words(["▁the", "<0x0A>", "<0xE9>", "<s>▁a"], [NORMAL, 6, 6, CONTROL], model="llama")
    assert [token_bytes(bpe, i) for i in range(4)] == [b" the", b"\n", b"\xe9", b"<s> a"]
    assert align(bpe, spm, 4, 4).n_real == 4
    other = words(["▁the", "<0x0D>", "<0xE9>", "<s>▁a"], [NORMAL, 6, 6, CONTROL], model="llama")
    with pytest.raises(RefusedError, match=r"id 1 is '\\n' for the teacher and '\\r' for the student; 1 of 4"):
        align(bpe, other, 4, 4)


def test_every_byte_has_a_letter() -> None:
    from tokenizers.pre_tokenizers import ByteLevel

    letters = sorted(ByteLevel.alphabet())
    assert sorted(token_bytes(words([letter]), 0) or b"" for letter in letters) == [bytes([b]) for b in range(256)]
    assert token_bytes(words(["ĠĊ"]), 0) == b" \n"


def test_the_width_of_the_teachers_product() -> None:
    assert SharedVocabulary(320, 320, 320).teacher_width == 320
    assert SharedVocabulary(321, 400, 400).teacher_width == 384
    assert SharedVocabulary(321, 330, 400).teacher_width == 330


# --- padding rows in the loss ---


def heads(n_real: int, rows: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(3)
    x, t = (torch.randn(12, 8, generator=generator) for _ in range(2))
    w, wt = (torch.randn(rows, 8, generator=generator) for _ in range(2))
    labels = torch.randint(0, n_real, (12,), generator=generator)
    labels[4] = IGNORED
    return x, w, t, wt, labels


def loss_and_gradients(
    wt: torch.Tensor, vocabulary: SharedVocabulary, n_real: int, rows: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x, w, t, _, labels = heads(n_real, rows)
    x.requires_grad_(True)
    w.requires_grad_(True)
    out = distill_head(x, w, t, wt, labels, Objective(), vocabulary, n_valid=11)
    torch.autograd.backward(out.loss)
    assert x.grad is not None
    assert w.grad is not None
    return out.loss.detach(), x.grad, w.grad


def test_rows_of_the_teacher_beyond_the_tokens_change_nothing() -> None:
    n_real, rows = 70, 100
    wt = heads(n_real, rows)[3]
    filled = wt.clone()
    filled[n_real:] = 50.0
    masked = SharedVocabulary(n_real, rows, rows)
    before, after = (loss_and_gradients(w, masked, n_real, rows) for w in (wt, filled))
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    unmasked = loss_and_gradients(filled, SharedVocabulary(rows, rows, rows), n_real, rows)
    assert not torch.isclose(unmasked[0], before[0])  # this comparison can tell


def test_the_students_mass_on_padding_rows_falls() -> None:
    n_real, rows = 20, 32
    x, w, t, wt, labels = heads(n_real, rows)
    w.requires_grad_(True)

    def padding_mass() -> float:
        return float(torch.softmax(x @ w.detach().T, 1)[:, n_real:].sum(1).mean())

    start = padding_mass()
    optimizer = torch.optim.SGD([w], lr=0.5)
    for _ in range(200):
        optimizer.zero_grad()
        out = distill_head(x, w, t, wt, labels, Objective(), SharedVocabulary(n_real, rows, rows), n_valid=11)
        torch.autograd.backward(out.loss)
        optimizer.step()
    assert start > 0.1
    assert padding_mass() < start / 2
