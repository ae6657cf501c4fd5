"""The known pre-tokenizer that is nearest to an unknown one, and what differs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from difflib import SequenceMatcher

__all__ = ["alternatives", "nearest"]

_SHOWN = 60


def nearest(own: Sequence[str], known: Mapping[str, Sequence[str]]) -> tuple[str, str]:
    """The name whose steps are most alike, and one clause on the first difference.

    Args:
        own: steps of the unknown pre-tokenizer in canonical form: regexes and words for other steps.
        known: the same for each name that llama.cpp has.
    """
    mine = [part for step in own for part in alternatives(step)]
    parts = {name: [part for step in steps for part in alternatives(step)] for name, steps in known.items()}
    # Equal alternatives count first, then how alike the spellings are.
    ranked = max(
        parts, key=lambda name: (_alike(mine, parts[name]), _alike("".join(mine), "".join(parts[name])))
    )
    return ranked, _difference(mine, parts[ranked])


def _alike(a: Sequence[str], b: Sequence[str]) -> float:
    return SequenceMatcher(None, a, b, autojunk=False).ratio()


def _difference(mine: Sequence[str], theirs: Sequence[str]) -> str:
    for kind, a, b, c, d in SequenceMatcher(None, mine, theirs, autojunk=False).get_opcodes():
        here, there = _shown(mine[a:b]), _shown(theirs[c:d])
        if kind == "replace":
            return f"it has {there} where this tokenizer has {here}"
        if kind == "delete":
            return f"it lacks {here}, which this tokenizer has"
        if kind == "insert":
            return f"it has {there}, which this tokenizer lacks"
    return "its splitting rules are the same"


def _shown(parts: Sequence[str]) -> str:
    text = "|".join(parts)
    return f"`{text if len(text) <= _SHOWN else text[: _SHOWN - 1] + '…'}`"


def alternatives(pattern: str) -> Iterator[str]:
    """The alternatives of a regex at its top level, cut at every `|` outside of groups and classes."""
    start, depth, in_class, escaped = 0, 0, False, False
    for i, c in enumerate(pattern):
        if escaped:
            escaped = False
        elif c == "\\":
            escaped = True
        elif c == "[":
            in_class = True
        elif c == "]":
            in_class = False
        elif not in_class and c in "()":
            depth += 1 if c == "(" else -1
        elif c == "|" and depth == 0 and not in_class:
            yield pattern[start:i]
            start = i + 1
    yield pattern[start:]
