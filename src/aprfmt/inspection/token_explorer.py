"""What a page needs to tokenize text by itself: a BPE tokenizer as data for html/viewer.js, compressed and bounded.

The steps of a tokenizer.json (normalizer, pre-tokenizer, merges) are carried over one by one; a tokenizer with a step
that the page cannot reproduce exactly has no explorer.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from aprfmt.errors import AprError
from aprfmt.io.jsonx import objects_of
from aprfmt.tokenizer.encoding import tokenizer_json
from aprfmt.tokenizer.model import Tokenizer
from aprfmt.types import Json, JsonObject

MAX_EXPLORER_CHARS = 3 << 20
"""Of the compressed vocabulary on a page, as base64; Qwen's takes a third of it."""

_BYTE_LEVEL = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SCRIPTS = ("Han", "Hiragana", "Katakana", "Hangul", "Latin", "Cyrillic", "Greek", "Arabic", "Thai")
_CATEGORIES = (
    *("L", "Lu", "Ll", "Lt", "Lm", "Lo", "M", "Mn", "Mc", "Me", "N", "Nd", "Nl", "No"),
    *("P", "Pc", "Pd", "Ps", "Pe", "Pi", "Pf", "Po", "S", "Sm", "Sc", "Sk", "So", "Z", "Zs", "Zl", "Zp", "C", "Cc"),
)
_FOLDS = {"s": "\N{LATIN SMALL LETTER LONG S}", "k": "\N{KELVIN SIGN}"}
"""Letters that a comparison without case takes for an ASCII one."""


class _CannotReproduceError(Exception):
    """A step that the page has no equivalent of; its argument says which."""


@dataclass(frozen=True, slots=True)
class TokenExplorer:
    """The data of an explorer, or why the page has none.

    Attributes:
        data: JSON object for html/viewer.js; "" without an explorer.
        reason: why the explorer is missing, a clause; "" if it is not.
    """

    data: str
    reason: str


def token_explorer(tokenizer: Tokenizer) -> TokenExplorer:
    """The explorer of a tokenizer; decompressed in the page on first use."""
    try:
        document = json.loads(tokenizer_json(tokenizer))
        return TokenExplorer(json.dumps(_spec(document), ensure_ascii=False), "")
    except AprError as error:
        return TokenExplorer("", error.message)
    except _CannotReproduceError as error:
        return TokenExplorer("", str(error))
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError):  # the library would refuse it too
        return TokenExplorer("", "its tokenizer.json is damaged")


def _spec(document: JsonObject) -> JsonObject:
    model = document["model"]
    if not isinstance(model, dict) or model.get("type") != "BPE":
        kind = model.get("type") if isinstance(model, dict) else None
        raise _CannotReproduceError(f"the page supports BPE vocabularies only; this one is {kind}")
    for key in ("continuing_subword_prefix", "end_of_word_suffix", "dropout"):
        if model.get(key):
            raise _CannotReproduceError(f"its BPE has a {key}")
    vocab, merges = model["vocab"], model["merges"]
    assert isinstance(vocab, dict)
    assert isinstance(merges, list)
    ids: dict[str, int] = {token: _count(i) for token, i in vocab.items()}
    added = [_added(each) for each in objects_of(document.get("added_tokens"))]
    tokens: list[str | None] = [None] * (1 + max((*ids.values(), *(row[0] for row in added)), default=0))
    for token, i in ids.items():
        tokens[i] = token
    for i, text, *_ in added:
        tokens[i] = text
    packed = _packed(json.dumps(tokens, ensure_ascii=False).encode("utf-8", "replace")), _packed(_merges(merges, ids))
    if sum(map(len, packed)) > MAX_EXPLORER_CHARS:
        raise _CannotReproduceError(f"its vocabulary of {len(tokens):,} tokens is too large for a page")
    return {
        "normalizer": [*_normalizer(document.get("normalizer"))], "splits": [*_splits(document.get("pre_tokenizer"))],
        "added": [[*row] for row in added], "bytes": bool(model.get("byte_fallback")),
        "whole": bool(model.get("ignore_merges")), "unknown": ids.get(str(model.get("unk_token")), -1),
        "fuse": bool(model.get("fuse_unk")), "tokens": packed[0], "merges": packed[1],
    }  # fmt: skip


def _packed(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data, 9)).decode()


def _count(value: Json) -> int:
    if type(value) is not int or not 0 <= value < 1 << 24:
        raise ValueError(value)
    return value


def _added(row: JsonObject) -> tuple[int, str, bool, bool]:
    """Id, text, whether white space before and after belongs to it."""
    if row.get("single_word"):
        raise _CannotReproduceError("it has an added token that matches whole words only")
    return _count(row["id"]), str(row["content"]), bool(row.get("lstrip")), bool(row.get("rstrip"))


def _merges(merges: Sequence[Json], ids: dict[str, int]) -> bytes:
    """Each merge as two varints: the id that it makes, as the zigzag difference to the last one, and the UTF-16 units
    of its left part: the token gives both parts."""
    out, last = bytearray(), 0
    for merge in merges:
        left, right = merge.split(" ", 1) if isinstance(merge, str) else map(str, merge)  # type: ignore[arg-type]
        made = ids[left + right]
        difference, last = made - last, made
        for number in (2 * difference if difference >= 0 else -2 * difference - 1, len(left.encode("utf-16-le")) // 2):
            while number > 0x7F:
                out.append(number & 0x7F | 0x80)
                number >>= 7
            out.append(number)
    return bytes(out)


def _steps(step: Json, inner: str) -> Iterator[JsonObject]:
    """The steps of a sequence, in order."""
    if step is None:
        return
    if not isinstance(step, dict):
        raise TypeError(step)
    if step.get("type") == "Sequence":
        for each in objects_of(step[inner]):
            yield from _steps(each, inner)
    else:
        yield step


def _normalizer(step: Json) -> Iterator[list[Json]]:
    for each in _steps(step, "normalizers"):
        kind = each["type"]
        if kind in ("NFC", "NFD", "NFKC", "NFKD"):
            yield ["form", kind]
        elif kind == "Prepend":
            yield ["prepend", str(each["prepend"])]
        elif kind == "Replace":
            yield ["replace", _pattern(each["pattern"]), str(each["content"])]
        else:
            raise _CannotReproduceError(f"its normalizer has the step {kind}")


def _splits(step: Json) -> Iterator[list[Json]]:
    for each in _steps(step, "pretokenizers"):
        kind = each["type"]
        if kind == "Split":
            yield ["split", _pattern(each["pattern"]), str(each["behavior"]), bool(each.get("invert"))]
        elif kind == "Digits":
            behavior = "Isolated" if each.get("individual_digits") else "Contiguous"
            yield ["split", r"\p{N}", behavior, False]
        elif kind == "ByteLevel":
            if each.get("add_prefix_space"):
                yield ["prefix", " "]
            if each.get("use_regex", True):
                yield ["split", javascript_regex(_BYTE_LEVEL), "Isolated", False]
            yield ["bytes"]
        elif kind == "Metaspace":
            mark = str(each["replacement"])
            scheme = each.get("prepend_scheme", "always" if each.get("add_prefix_space", True) else "never")
            yield ["metaspace", mark, str(scheme), bool(each.get("split", True))]
        else:
            raise _CannotReproduceError(f"its pre-tokenizer has the step {kind}")


def _pattern(pattern: Json) -> str:
    if not isinstance(pattern, dict):
        raise TypeError(pattern)
    if "String" in pattern:
        return "".join(f"\\u{{{ord(c):x}}}" for c in str(pattern["String"]))
    return javascript_regex(str(pattern["Regex"]))


def javascript_regex(pattern: str) -> str:
    """A regex of a tokenizer.json (Oniguruma) for JavaScript's flag `u`. Raises _CannotReproduceError."""
    out, at, depth = [], 0, 0
    in_class, folded = False, 0  # `folded`: depth of the group without case
    quantified = False  # whether what precedes is a quantifier
    while at < len(pattern):
        c = pattern[at]
        rest = pattern[at:]
        if c == "\\":
            text, size = _escape(rest)
            out.append(text)
            at += size
            quantified = False
            continue
        if in_class:
            if c == "[" or rest.startswith("&&"):
                raise _CannotReproduceError("its regex has a nested character class")
            in_class = c != "]"
            out.append(c)
            if folded and c.isalpha():
                raise _CannotReproduceError("its regex has a case-insensitive character class")
        elif c == "[":
            in_class = True
            negated = rest[1:2] == "^"
            out.append("[^" if negated else "[")
            at += negated
        elif c == "(":
            depth += 1
            opening = next((o for o in ("(?i:", "(?:", "(?!", "(?=", "(?<!", "(?<=") if rest.startswith(o)), "(")
            if opening == "(" and rest.startswith("(?"):
                raise _CannotReproduceError(f"its regex has {rest[:4]}")
            folded = folded or (depth if opening == "(?i:" else 0)
            out.append("(?:" if opening in ("(?i:", "(") else opening)
            at += len(opening) - 1
        elif c == ")":
            folded = 0 if folded == depth else folded
            depth -= 1
            out.append(c)
        elif c in "^$." or (c == "+" and quantified):
            raise _CannotReproduceError(f"its regex has {pattern[max(0, at - 1) : at + 1]}")
        elif folded and c.isascii() and c.isalpha():
            out.append(f"[{c.lower()}{c.upper()}{_FOLDS.get(c.lower(), '')}]")
        else:
            out.append(c)
        quantified = c in "?*+}" and not in_class
        at += 1
    return "".join(out)


def _escape(rest: str) -> tuple[str, int]:
    """An escape at the beginning of `rest` for JavaScript, and its length."""
    c = rest[1:2]
    if c in ("p", "P") and rest[2:3] == "{":
        name = rest[3 : rest.index("}")]
        if name in _SCRIPTS:
            return f"\\{c}{{Script={name}}}", 4 + len(name)
        if name in _CATEGORIES:
            return f"\\{c}{{{name}}}", 4 + len(name)
    simple = {"s": r"\p{White_Space}", "S": r"\P{White_Space}", "d": r"\p{Nd}", "D": r"\P{Nd}"}
    if c in simple:
        return simple[c], 2
    if c and c in "rntfv^$\\.*+?()[]{}|/-":
        return f"\\{c}", 2
    if c and not c.isalnum():
        return f"\\u{{{ord(c):x}}}", 2
    raise _CannotReproduceError(f"its regex has {rest[:8]}")
