"""The two languages of table rows: sizes (`q+2*kv`) and conditions (`moe|!use_bias`). docs/rows.md teaches them.

    size      := product (("+" | "-") product)*
    product   := atom (("*" | "/") atom)*
    atom      := number | word
    shape     := size ("," size)*
    order     := name ":" shape
    condition := facts ("|" facts)*
    facts     := fact ("&" fact)*
    fact      := ["!"] word ["=" value]

What the words mean stands in `arch.facts`. Each text is parsed on first use and the result is kept. A text outside
the grammar raises ValueError, which no user can cause: rows are part of the package, and tests parse all of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from functools import cache

_ATOM = r"(?:\d+|[A-Za-z_]\w*)"
_SIZE = rf"{_ATOM}(?:[-+*/]{_ATOM})*"
_TOKEN = rf"{_ATOM}|[-+*/]"
_FACT = r"(!?)([A-Za-z_][\w.]*)(?:=([\w.-]+))?"


@cache
def _parse_size(size: str) -> tuple[tuple[str, tuple[tuple[str, str], ...]], ...]:
    """((sign, ((operator, atom), ...)), ...): a sum of products."""
    if not re.fullmatch(_SIZE, size, re.ASCII):
        raise ValueError(f"{size!r} is not a size")
    tokens = re.findall(_TOKEN, size, re.ASCII)
    terms: list[tuple[str, list[tuple[str, str]]]] = [("+", [("*", tokens[0])])]
    for operator, atom in zip(tokens[1::2], tokens[2::2], strict=True):
        if operator in "+-":
            terms.append((operator, [("*", atom)]))
        else:
            terms[-1][1].append((operator, atom))
    return tuple((sign, tuple(factors)) for sign, factors in terms)


def evaluate(size: str, sizes: Mapping[str, int]) -> int | None:
    """The number that `size` ("q+2*kv") stands for; None where a word is unknown or a division leaves a remainder."""
    total = 0
    for sign, factors in _parse_size(size):
        product = 1
        for operator, atom in factors:
            number = int(atom) if atom.isdigit() else sizes.get(atom)
            if number is None or (operator == "/" and (number == 0 or product % number)):
                return None
            product = product * number if operator == "*" else product // number
        total += product if sign == "+" else -product
    return total if total >= 0 else None


def size_words(size: str) -> set[str]:
    """The words of a size."""
    return {atom for _, factors in _parse_size(size) for _, atom in factors if not atom.isdigit()}


def shape_of(dims: str, sizes: Mapping[str, int]) -> tuple[int | None, ...]:
    """The shape that `dims` ("q,hidden") describes; None for each dimension that the sizes do not give."""
    return tuple(evaluate(size, sizes) for size in dims.split(","))


def parse_order(order: str) -> tuple[str, list[str]]:
    """The name and the sizes of an order of rows: "swap:heads,2,head_dim/2". `arch.orders` has the names."""
    name, _, sizes = order.partition(":")
    return name, sizes.split(",")


Fact = tuple[str, str, bool]
"""(word, value or "", whether it is behind "!")."""


@cache
def parse_condition(condition: str) -> tuple[tuple[Fact, ...], ...]:
    """The alternatives of a condition, each with the facts that must hold together."""
    return tuple(tuple(map(_parse_fact, facts.split("&"))) for facts in condition.split("|"))


def _parse_fact(text: str) -> Fact:
    match = re.fullmatch(_FACT, text, re.ASCII)
    if match is None:
        raise ValueError(f"{text!r} is not a fact of a condition")
    return match[2], match[3] or "", bool(match[1])


def holds(condition: str, look_up: Callable[[str], object]) -> bool:
    """Whether `condition` is true, where `look_up` gives what a word stands for.

    `word` is true of what is neither absent nor false, 0 or empty. `word=value` is true of a list that has the value,
    and of anything else that is spelled like it.
    """
    return any(
        all(_is_true(look_up(word), value) is not negated for word, value, negated in facts)
        for facts in parse_condition(condition)
    )


def _is_true(found: object, value: str) -> bool:
    if not value:
        return bool(found)
    if isinstance(found, Collection) and not isinstance(found, str):
        return any(str(item) == value for item in found)
    return str(found) == value
