"""Encodes text with a model's tokenizer, and compares tokenizers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TypeVar

from aprfmt.errors import AprError, UnsupportedError, UsageError
from aprfmt.formats import path_text
from aprfmt.formats.vocabulary import read_vocabulary
from aprfmt.text import plural
from aprfmt.tokenizer.data import TokenType, is_unicode, without_padding
from aprfmt.tokenizer.encoding import hard_texts, tokenizer_json
from aprfmt.tokenizer.fast import load
from aprfmt.tokenizer.model import Tokenizer
from aprfmt.types import PathLike

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Token:
    """A token of a text: its id, its text in the vocabulary, and the part of the text that it represents."""

    id: int
    piece: str
    text: str


@dataclass(frozen=True, slots=True)
class Tokens:
    """A text, or ids, and their tokens. `decoded` is the text of the ids, special tokens included."""

    text: str | None
    tokens: Sequence[Token]
    decoded: str

    @property
    def ids(self) -> list[int]:
        """The ids alone."""
        return [token.id for token in self.tokens]

    def to_json(self) -> dict[str, object]:
        """An item of `texts` in the object of `apr vocab --json`."""
        return {"text": self.text, "ids": self.ids, "tokens": [asdict(t) for t in self.tokens], "decoded": self.decoded}


@dataclass(frozen=True, slots=True)
class TokenizerFacts:
    """Properties of a tokenizer; named as in tokenizer.model.Tokenizer."""

    model: str
    pre: str | None
    vocab_size: int
    merges: int
    special: Mapping[str, int]
    flags: Mapping[str, bool]


@dataclass(frozen=True, slots=True)
class TokenizerDifference:
    """A difference between two tokenizers: what, how often, and the first case."""

    what: str
    count: int
    first: str


@dataclass(slots=True)
class Vocabulary:
    """The result of `vocab`.

    Attributes:
        file, against: paths as given; `against` is None without a comparison.
        facts: properties of the tokenizer.
        texts: the encoded or decoded texts.
        other: properties of the tokenizer compared with.
        compared: number of texts encoded by both; 0 if that was not possible.
        differences: differences between the tokenizers; empty if they are equal.
        notes: what could not be compared, and why.
    """

    file: str
    facts: TokenizerFacts
    texts: Sequence[Tokens] = ()
    against: str | None = None
    other: TokenizerFacts | None = None
    compared: int = 0
    differences: Sequence[TokenizerDifference] = ()
    notes: list[str] = field(default_factory=list)

    @property
    def identical(self) -> bool:
        """Whether no difference was found."""
        return not self.differences

    def to_json(self) -> dict[str, object]:
        """The object of `apr vocab --json`."""
        body: dict[str, object] = {
            "file": self.file,
            "tokenizer": asdict(self.facts),
            "texts": [tokens.to_json() for tokens in self.texts],
            "notes": self.notes,
        }
        if self.other is None:
            return body
        return body | {
            "against": self.against,
            "other": asdict(self.other),
            "identical": self.identical,
            "compared": self.compared,
            "differences": [asdict(one) for one in self.differences],
        }


def vocab(
    file: PathLike,
    texts: str | Sequence[str] = (),
    *,
    ids: str | Sequence[int] | None = None,
    against: PathLike | None = None,
    special: bool = True,
) -> Vocabulary:
    """Encodes texts, or decodes ids, with a model's own tokenizer, or compares it with another tokenizer.

    Args:
        file: a model in any readable format, a folder with a tokenizer, or a tokenizer.json.
        texts: one text or several.
        ids: ids to decode: numbers, or a string of numbers.
        against: the model or tokenizer to compare with; without texts, on a built-in set of difficult texts.
        special: add the special tokens around a text (such as BOS). Special tokens spelled out in a text are parsed in
            any case.

    Raises:
        AprError: a file has no tokenizer; UsageError: an id is not in the vocabulary; UnsupportedError: the tokenizer
            cannot be written as tokenizer.json.
    """
    path = path_text(file, "file")
    tokenizer = read_vocabulary(path)
    given = [texts] if isinstance(texts, str) else list(texts)
    if any(not isinstance(text, str) for text in given):
        raise UsageError("text must be a string")
    own = _Encoder(tokenizer, special, path) if given or ids is not None else None
    found = [own.encode(text) for text in given] if own is not None else []
    if ids is not None and own is not None:
        found.append(own.decode(_ids(ids)))
    result = Vocabulary(path, _facts(tokenizer), found)
    if against is not None:
        _compare(result, tokenizer, path_text(against, "against"), given, special)
    return result


def _facts(tok: Tokenizer) -> TokenizerFacts:
    return TokenizerFacts(tok.model, tok.pre, len(tok.tokens), len(tok.merges), dict(tok.special), dict(tok.flags))


def _ids(given: object) -> list[int]:
    if isinstance(given, str):
        if re.fullmatch(r"[\d\s,\[\]]*", given, re.ASCII) is None or not (found := re.findall(r"\d+", given)):
            raise UsageError(f"{given!r:.60} are not ids", hint="--ids '1 15043 3186'")
        return [int(number[:18]) for number in found]
    items = list(given) if isinstance(given, Sequence) else [None]
    if any(type(item) is not int for item in items):
        raise UsageError(f"ids must be integers, not {given!r:.60}")
    return [item for item in items if type(item) is int]


class _Encoder:
    """A tokenizer that can encode."""

    def __init__(self, tokenizer: Tokenizer, special: bool, path: str) -> None:
        """Raises UnsupportedError for a tokenizer without a tokenizer.json form."""
        self._tokenizer, self._special, self._path = tokenizer, special, path
        try:
            self._fast = load(tokenizer_json(tokenizer))
        except AprError as error:
            error.path = error.path or path
            raise

    def ids(self, texts: Sequence[str], *, special: bool = True) -> list[list[int]]:
        """The ids of each text, with special tokens around it if `special`."""
        return [one.ids for one in self._call(lambda: self._fast.encode(texts, special=special))]

    def encode(self, text: str) -> Tokens:
        """The tokens of a text. Raises UsageError for one that is not valid Unicode."""
        if not is_unicode(text):
            raise UsageError("the text is not valid Unicode", hint="pass it in UTF-8")
        (made,) = self._call(lambda: self._fast.encode([text], special=self._special, places=True))
        tokens = [Token(i, self._piece(i), text[start:end]) for i, (start, end) in zip(*made, strict=True)]
        return Tokens(text, tokens, self._decoded(made.ids))

    def decode(self, ids: Sequence[int]) -> Tokens:
        """The text of ids."""
        n_ids = len(self._tokenizer.tokens)
        wrong = next((i for i in ids if not 0 <= i < n_ids), None)
        if wrong is not None:
            raise UsageError(f"unknown token id {wrong}", path=self._path, hint=f"ids range from 0 to {n_ids - 1}")
        return Tokens(None, [Token(i, self._piece(i), self._decoded([i])) for i in ids], self._decoded(list(ids)))

    def _piece(self, i: int) -> str:
        return self._tokenizer.tokens[i] if i < len(self._tokenizer.tokens) else ""

    def _decoded(self, ids: list[int]) -> str:
        return self._call(lambda: self._fast.decode(ids))

    def _call(self, function: Callable[[], T]) -> T:
        try:
            return function()
        except AprError as error:
            error.path = self._path
            raise


# --- two of them ---


def _compare(result: Vocabulary, a: Tokenizer, against: str, texts: Sequence[str], special: bool) -> None:
    b = read_vocabulary(against)
    result.against, result.other = against, _facts(b)
    found = [*_in_lists(a, b)]
    wanted = list(texts) or [*hard_texts(), *(f"a{text}b {text}" for text in _special_texts(a)[:40])]
    try:
        first, second = _Encoder(a, special, result.file), _Encoder(b, special, against)
    except UnsupportedError as error:
        result.notes.append(f"texts cannot be compared: {error}")
    else:
        result.compared = len(wanted)
        (start,), (other_start,) = first.ids([""]), second.ids([""])
        if special and start != other_start:
            found.append(TokenizerDifference("tokens added around text", 1, f"{start}, not {other_start}"))
        both = zip(wanted, first.ids(wanted, special=False), second.ids(wanted, special=False), strict=True)
        changed = [(text, x, y) for text, x, y in both if x != y]
        if changed:
            text, x, y = changed[0]
            what = f"ids of {plural(len(wanted), 'text')}"
            found.append(TokenizerDifference(what, len(changed), f"{text!r:.60}: {_short(x)}, not {_short(y)}"))
    result.differences = found


def _short(ids: Sequence[int]) -> str:
    return f"{ids[:8]}" if len(ids) <= 8 else f"{ids[:8]}".replace("]", f", … {len(ids)} in total]")


def _special_texts(tok: Tokenizer) -> list[str]:
    kinds = (TokenType.CONTROL, TokenType.USER_DEFINED)
    return [text for text, kind in zip(tok.tokens, tok.types, strict=False) if kind in kinds]


def _in_lists(a: Tokenizer, b: Tokenizer) -> Iterator[TokenizerDifference]:
    """How the two differ as data."""
    if a.model != b.model:
        yield TokenizerDifference("algorithm", 1, f"{a.model}, not {b.model}")
    if a.pre != b.pre and a.pre is not None and b.pre is not None:
        yield TokenizerDifference("pre-tokenizer", 1, f"{a.pre}, not {b.pre}")
    mine, other = without_padding(a), without_padding(b)
    if len(mine) != len(other):
        yield TokenizerDifference("number of tokens", abs(len(mine) - len(other)), f"{len(mine)}, not {len(other)}")
    changed = [i for i, (x, y) in enumerate(zip(mine, other, strict=False)) if x != y]
    if changed:
        i = changed[0]
        yield TokenizerDifference("vocabulary", len(changed), f"id {i} is {mine[i]!r:.60}, not {other[i]!r:.60}")
    kinds = [
        i
        for i, (x, y) in enumerate(zip(a.types, b.types, strict=False))
        if (x == TokenType.CONTROL) != (y == TokenType.CONTROL) and i < min(len(mine), len(other))
    ]
    if kinds:
        i, own = kinds[0], a.types[kinds[0]] == TokenType.CONTROL
        word = (
            "is a control token here, but not in the other" if own else "is a control token in the other, but not here"
        )
        yield TokenizerDifference("control tokens", len(kinds), f"id {i} ({mine[i]!r:.60}) {word}")
    if a.model == b.model == "gpt2" and a.merges != b.merges:
        pairs = zip(a.merges, b.merges, strict=False)
        rank = next((n for n, (x, y) in enumerate(pairs) if x != y), min(len(a.merges), len(b.merges)))
        count = sum(x != y for x, y in zip(a.merges, b.merges, strict=False)) + abs(len(a.merges) - len(b.merges))
        here, there = (repr(t.merges[rank]) if rank < len(t.merges) else "nothing" for t in (a, b))
        yield TokenizerDifference("merges", count, f"merge {rank} is {here}, not {there}")
    roles = [role for role in {**a.special, **b.special} if a.special.get(role) != b.special.get(role)]
    if roles:
        role = roles[0]
        yield TokenizerDifference("special tokens", len(roles), f"{role} is {_role(a, role)}, not {_role(b, role)}")


def _role(tok: Tokenizer, role: str) -> str:
    i = tok.special.get(role)
    return "none" if i is None else f"{i} ({tok.tokens[i]!r:.40})" if i < len(tok.tokens) else str(i)
