"""Which ids teacher and student share: found by comparing tokenizers, never by comparing row counts.

Embeddings and heads are padded to sizes that suit matrix units, and each size of a family to another one, so row
counts say nothing about tokens. Two tokenizers are the same when each id stands for the same bytes in both.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

from aprfmt.errors import RefusedError
from aprfmt.tokenizer.model import Tokenizer, TokenType

_ALIGNMENT = 64  # rows; what the matrix units of a GPU like
_PAD = re.compile(r"\[PAD(\d+)\]|<\|pad_(\d+)\|>")
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_LITERAL = (TokenType.CONTROL, TokenType.USER_DEFINED)
_OTHERWISE = "distil into a student that has the teacher's tokenizer, or train it on text that the teacher wrote"
_SUPERSET = "--vocab-policy renormalise learns from the shared tokens alone, if the teacher hardly uses the others"


@dataclass(frozen=True, slots=True)
class SharedVocabulary:
    """The ids [0, n_real) that teacher and student share, and the rows of their heads.

    The teacher's distribution lives on [0, n_real) alone. The student is normalised over all of its rows, so that
    training pushes its padding rows down: runtimes sample over every row.

    Attributes:
        n_real: number of shared ids.
        teacher_rows: rows of the teacher's head, padding included.
        student_rows: rows of the student's head, padding included.
        dropped: tokens of the teacher at and beyond n_real, which the student lacks.
    """

    n_real: int
    teacher_rows: int
    student_rows: int
    dropped: tuple[str, ...] = ()

    @property
    def teacher_width(self) -> int:
        """Rows of the teacher's head that are multiplied: n_real rounded up to 64 where there are as many."""
        return min(-(-self.n_real // _ALIGNMENT) * _ALIGNMENT, self.teacher_rows)

    @property
    def dropped_rows(self) -> slice:
        """Rows of the teacher's head that stand for dropped tokens."""
        return slice(self.n_real, min(self.n_real + len(self.dropped), self.teacher_rows))


def align(
    teacher: Tokenizer | None, student: Tokenizer | None, teacher_rows: int, student_rows: int, policy: str = "shared"
) -> SharedVocabulary:
    """The vocabulary that a teacher's and a student's tokenizer share.

    Args:
        teacher, student: the tokenizers of the two models.
        teacher_rows, student_rows: rows of their heads.
        policy: whether the teacher may have tokens that the student lacks: "shared" (control tokens alone) or
            "renormalise" (any; its distribution is taken over the shared ones).

    Raises:
        RefusedError: a tokenizer is missing, an id stands for different bytes, one side has tokens that the
            other lacks and may not lack, or a head has fewer rows than there are tokens.
    """
    if teacher is None or student is None:
        side = "teacher" if teacher is None else "student"
        raise RefusedError(
            f"the {side} has no tokenizer, so the two vocabularies cannot be compared",
            hint="import it again with --tokenizer FOLDER",
        )
    n_teacher, n_student = count_real(teacher, teacher_rows), count_real(student, student_rows)
    n_real = min(n_teacher, n_student)
    _check_same(teacher, student, n_real)
    _check_surplus("student", student, "teacher", range(n_real, n_student), _OTHERWISE)
    surplus = range(n_real, n_teacher)
    if policy == "shared" and any(_kind(teacher, i) != TokenType.CONTROL for i in surplus):
        _check_surplus("teacher", teacher, "student", surplus, _SUPERSET)
    for side, rows in (("teacher", teacher_rows), ("student", student_rows)):
        if rows < n_real:
            raise RefusedError(
                f"the {side}'s head has {rows} rows for {n_real} tokens",
                hint=f"the {side}'s weights and tokenizer do not belong together; import them again",
            )
    return SharedVocabulary(n_real, teacher_rows, student_rows, tuple(teacher.tokens[i] for i in surplus))


def count_real(tokenizer: Tokenizer, rows: int) -> int:
    """Ids up to the last token: names that only fill the embedding do not count.

    Nor do control tokens at the end without a row of their own, such as a placeholder for images in the tokenizer
    of a model that reads text only.
    """
    n = len(tokenizer.tokens)
    while n and _is_pad(tokenizer, n - 1):
        n -= 1
    end = n
    while end > rows and _kind(tokenizer, end - 1) == TokenType.CONTROL:
        end -= 1
    return end if end <= rows else n


def token_bytes(tokenizer: Tokenizer, i: int) -> bytes | None:
    """What id `i` stands for in text, as UTF-8; None for a hole of the vocabulary."""
    if _is_pad(tokenizer, i):
        return None
    text, kind = tokenizer.tokens[i], _kind(tokenizer, i)
    if kind in _LITERAL:
        return text.replace("\u2581", " ").encode("utf-8", "surrogatepass")
    if tokenizer.model == "gpt2":
        alphabet = _byte_alphabet()
        if all(char in alphabet for char in text):
            return bytes(alphabet[char] for char in text)
    elif found := _BYTE.fullmatch(text):
        return bytes([int(found[1], 16)])
    return text.replace("\u2581", " ").encode("utf-8", "surrogatepass")


def _check_same(teacher: Tokenizer, student: Tokenizer, n: int) -> None:
    if teacher.model == student.model and teacher.tokens[:n] == student.tokens[:n]:
        return
    different = [i for i in range(n) if token_bytes(teacher, i) != token_bytes(student, i)]
    if different:
        i = different[0]
        raise RefusedError(
            f"teacher and student have different tokenizers: id {i} is {_show(teacher, i)} to the teacher and "
            f"{_show(student, i)} to the student; {len(different)} of {n} ids differ",
            hint=_OTHERWISE,
        )


def _check_surplus(side: str, tokenizer: Tokenizer, other: str, surplus: range, hint: str) -> None:
    if surplus:
        raise RefusedError(
            f"the {side}'s tokenizer has {len(surplus)} tokens that the {other}'s lacks, the first is id "
            f"{surplus[0]}, {_show(tokenizer, surplus[0])}",
            hint=hint,
        )


def _show(tokenizer: Tokenizer, i: int) -> str:
    value = token_bytes(tokenizer, i)
    return "not a token" if value is None else repr(value.decode("utf-8", "backslashreplace"))


def _kind(tokenizer: Tokenizer, i: int) -> int:
    return tokenizer.types[i] if i < len(tokenizer.types) else TokenType.NORMAL


def _is_pad(tokenizer: Tokenizer, i: int) -> bool:
    """Converters fill the rows beyond the tokens with names that carry their id; some call their type otherwise."""
    found = _PAD.fullmatch(tokenizer.tokens[i])
    return found is not None and int(found[1] or found[2]) == i


@cache
def _byte_alphabet() -> dict[str, int]:
    """GPT-2's letters for bytes: printable Latin-1 stands for itself, the others are moved behind U+0100 in order."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(0x100 + n): byte for n, byte in enumerate(hidden)}
