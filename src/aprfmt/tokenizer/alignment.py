"""The ids that teacher and student share, found by comparing tokenizers, never by comparing row counts.

Embeddings and heads are padded to sizes that suit matrix units, which differ within a family, so row counts say nothing
about tokens. Two tokenizers are the same if each id means the same bytes in both.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

from aprfmt.errors import RefusedError
from aprfmt.tokenizer.data import TokenType
from aprfmt.tokenizer.model import Tokenizer

_ALIGNMENT = 64  # rows; a multiple that suits a GPU's matrix units
_PAD = re.compile(r"\[PAD(\d+)\]|<\|pad_(\d+)\|>")
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_LITERAL = (TokenType.CONTROL, TokenType.USER_DEFINED)
ALIGNED = ("aligned", "uld")
"""Values of --vocab-policy for a teacher whose tokenizer is not the student's."""

OTHERWISE = (
    "use a student with the teacher's tokenizer, or distill between tokenizers: apr distill --student FILE "
    "--vocab-policy aligned"
)
_SUPERSET = (
    "--vocab-policy renormalise compares the shared tokens only, if the teacher rarely uses the others; apr distill "
    "--vocab-policy aligned compares spans of text"
)


@dataclass(frozen=True, slots=True)
class SharedVocabulary:
    """The ids [0, n_real) that teacher and student share, and the rows of their heads.

    The teacher's distribution covers [0, n_real) only. The student is normalized over all of its rows, so that training
    pushes
    its padding rows down: runtimes sample over every row.

    Attributes:
        n_real: number of shared ids.
        teacher_rows: rows of the teacher's head, padding included.
        student_rows: rows of the student's head, padding included.
        dropped: the teacher's tokens from n_real on, which the student lacks.
    """

    n_real: int
    teacher_rows: int
    student_rows: int
    dropped: tuple[str, ...] = ()

    @property
    def teacher_width(self) -> int:
        """Computed rows of the teacher's head: n_real rounded up to 64 if it has that many."""
        return min(-(-self.n_real // _ALIGNMENT) * _ALIGNMENT, self.teacher_rows)

    @property
    def dropped_rows(self) -> slice:
        """Rows of the teacher's head for dropped tokens."""
        return slice(self.n_real, min(self.n_real + len(self.dropped), self.teacher_rows))


def align(
    teacher: Tokenizer | None,
    student: Tokenizer | None,
    teacher_rows: int,
    student_rows: int,
    policy: str = "shared",
    *,
    surplus_hint: str | None = None,
) -> SharedVocabulary:
    """The vocabulary that a teacher's and a student's tokenizer share.

    Args:
        teacher, student: the tokenizers of the two models.
        teacher_rows, student_rows: rows of their heads.
        policy: whether the teacher may have tokens that the student lacks: "shared" (control tokens only) or
            "renormalise" (any; its distribution is restricted to the shared ones); one of ALIGNED: the tokenizers
            differ, and the ids are all of the teacher's.
        surplus_hint: what to type if it has such tokens and may not; by default the policies that allow them.

    Raises:
        RefusedError: a tokenizer is missing, an id means different bytes, one side lacks tokens that it must have, or a
            head has fewer rows than tokens.
    """
    if teacher is None or student is None:
        side = "teacher" if teacher is None else "student"
        raise RefusedError(
            f"the {side} has no tokenizer, so the two vocabularies cannot be compared",
            hint="import it again with --tokenizer FOLDER",
        )
    n_teacher, n_student = count_real(teacher, teacher_rows), count_real(student, student_rows)
    is_other = policy in ALIGNED
    n_real = n_teacher if is_other else min(n_teacher, n_student)
    surplus = range(n_real, n_teacher)
    if not is_other:
        _check_same(teacher, student, n_real)
        _check_surplus("student", student, "teacher", range(n_real, n_student), OTHERWISE)
        if policy == "shared" and any(_kind(teacher, i) != TokenType.CONTROL for i in surplus):
            _check_surplus("teacher", teacher, "student", surplus, surplus_hint or _SUPERSET)
    for side, rows, n in (
        ("teacher", teacher_rows, n_real), ("student", student_rows, n_student if is_other else n_real)
    ):  # fmt: skip
        if rows < n:
            raise RefusedError(
                f"the {side}'s head has {rows} rows for {n} tokens",
                hint=f"the {side}'s weights and tokenizer do not match; import them again",
            )
    return SharedVocabulary(n_real, teacher_rows, student_rows, tuple(teacher.tokens[i] for i in surplus))


def match(teacher: Tokenizer, student: Tokenizer) -> dict[int, int]:
    """The teacher's id for each of the student's that means the same: by role (EOS, BOS, end of a turn), then by text.

    An id is in one pair at most; of several tokens for the same bytes, that of a word precedes that of a byte.
    """
    found: dict[int, int] = {}
    for role in sorted(student.special, key=lambda role: role != "eos"):
        pair = student.special[role], teacher.special.get(role)
        if pair[1] is not None and pair[0] not in found and pair[1] not in found.values():
            found[pair[0]] = pair[1]
    taken, meant = {*found.values()}, dict[tuple[bool, bytes], int]()
    for i, meaning in meanings(teacher):
        if i not in taken:
            meant.setdefault(meaning, i)
    for i, meaning in meanings(student):
        if i not in found and meaning in meant:
            found[i] = meant.pop(meaning)
    return dict(sorted(found.items()))


@dataclass(frozen=True, slots=True)
class OutcomeMap:
    """What the tokens of two tokenizers begin a text with, as far as both can tell.

    A token that both have is an outcome. One that only one side has counts for the longest such token that it begins
    with: the other side writes the same text with that token or a longer one.

    Attributes:
        n: number of outcomes, the shared tokens.
        student, teacher: the outcome of each id, n for ids without one.
    """

    n: int
    student: list[int]
    teacher: list[int]


def outcomes_of(teacher: Tokenizer, student: Tokenizer) -> OutcomeMap:
    """The outcomes of two tokenizers, see `match`."""
    pairs = match(teacher, student)
    shared = {token_bytes(student, s): n for n, s in enumerate(pairs) if not is_control(student, s)}
    found = []
    for tokenizer, ids in ((student, pairs.keys()), (teacher, pairs.values())):
        columns, own = [len(pairs)] * len(tokenizer.tokens), {i: n for n, i in enumerate(ids)}
        for i, (is_marker, text) in meanings(tokenizer):
            begins = (shared[text[:end]] for end in range(len(text), 0, -1) if not is_marker and text[:end] in shared)
            columns[i] = own[i] if i in own else next(begins, len(pairs))
        found.append(columns)
    return OutcomeMap(len(pairs), *found)


def is_control(tokenizer: Tokenizer, i: int) -> bool:
    """Whether id `i` is not text: a control token, or the unknown one."""
    return _kind(tokenizer, i) in (TokenType.CONTROL, TokenType.UNKNOWN) or i in tokenizer.special.values()


def meanings(tokenizer: Tokenizer) -> list[tuple[int, tuple[bool, bytes]]]:
    """Each token with whether it is a control token, and its bytes; those of a single byte last."""
    texts = ((i, token_bytes(tokenizer, i)) for i in range(len(tokenizer.tokens)))
    real = [(i, (is_control(tokenizer, i), text)) for i, text in texts if text is not None]
    return sorted(real, key=lambda item: _kind(tokenizer, item[0]) == TokenType.BYTE)


def count_real(tokenizer: Tokenizer, rows: int) -> int:
    """The number of ids up to the last real token, without padding names.

    Trailing control tokens without a row of their own do not count either, such as an image placeholder in the
    tokenizer of a text-only model.
    """
    n = len(tokenizer.tokens)
    while n and _is_pad(tokenizer, n - 1):
        n -= 1
    end = n
    while end > rows and _kind(tokenizer, end - 1) == TokenType.CONTROL:
        end -= 1
    return end if end <= rows else n


def token_bytes(tokenizer: Tokenizer, i: int) -> bytes | None:
    """The bytes that id `i` means in text, UTF-8; None for a hole in the vocabulary."""
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
            f"teacher and student have different tokenizers: id {i} is {_show(teacher, i)} for the teacher "
            f"and {_show(student, i)} for the student; {len(different)} of {n} ids differ",
            hint=OTHERWISE,
        )


def _check_surplus(side: str, tokenizer: Tokenizer, other: str, surplus: range, hint: str) -> None:
    if surplus:
        raise RefusedError(
            f"the {side}'s tokenizer has {len(surplus)} tokens that the {other}'s lacks, first: id "
            f"{surplus[0]}, {_show(tokenizer, surplus[0])}",
            hint=hint,
        )


def _show(tokenizer: Tokenizer, i: int) -> str:
    value = token_bytes(tokenizer, i)
    return "not a token" if value is None else repr(value.decode("utf-8", "backslashreplace"))


def _kind(tokenizer: Tokenizer, i: int) -> int:
    return tokenizer.types[i] if i < len(tokenizer.types) else TokenType.NORMAL


def _is_pad(tokenizer: Tokenizer, i: int) -> bool:
    """Converters pad the vocabulary with names that contain the id; some give them another type."""
    found = _PAD.fullmatch(tokenizer.tokens[i])
    return found is not None and int(found[1] or found[2]) == i


@cache
def _byte_alphabet() -> dict[str, int]:
    """GPT-2's byte alphabet: printable Latin-1 maps to itself, the others to U+0100 and up, in order."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(0x100 + n): byte for n, byte in enumerate(hidden)}
