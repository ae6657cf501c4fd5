"""Sizes in words: "q+2*kv" of a table row as a number, from the hyper-parameters of one network."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache

from aprfmt.arch.hyperparams import Hyperparams

_WORD = re.compile(r"\d+|[A-Za-z_][A-Za-z0-9_]*|[-+*/]")

Sizes = Mapping[str, int]


def sizes_of(h: Hyperparams) -> dict[str, int]:
    """Every size word that the hyper-parameters give: the standard words and all integers among the config keys."""
    kv_heads = h.num_kv_heads if h.num_kv_heads is not None else h.num_heads
    words: dict[str, int | None] = {
        key: value
        for key, value in h.extra.items()
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0
    }
    words |= {
        "vocab": h.vocab_size,
        "hidden": h.hidden_size,
        "ffn": h.intermediate_size,
        "heads": h.num_heads,
        "kv_heads": kv_heads,
        "head_dim": h.head_dim,
        "q": _product(h.num_heads, h.head_dim),
        "kv": _product(kv_heads, h.head_dim),
        "experts": h.num_experts,
        "moe_ffn": h.moe_intermediate_size if h.moe_intermediate_size is not None else h.intermediate_size,
        "positions": h.max_position_embeddings,
        "layers": h.num_layers,
    }
    return {word: size for word, size in words.items() if size is not None}


def _product(a: int | None, b: int | None) -> int | None:
    return a * b if a is not None and b is not None else None


@cache
def _terms(expression: str) -> tuple[tuple[str, tuple[tuple[str, str], ...]], ...]:
    """((sign, ((operator, word), ...)), ...) of sums of products."""
    tokens = _WORD.findall(expression)
    terms: list[tuple[str, list[tuple[str, str]]]] = [("+", [("*", tokens[0])])]
    for operator, word in zip(tokens[1::2], tokens[2::2], strict=True):
        if operator in "+-":
            terms.append((operator, [("*", word)]))
        else:
            terms[-1][1].append((operator, word))
    return tuple((sign, tuple(factors)) for sign, factors in terms)


def evaluate(expression: str, sizes: Sizes) -> int | None:
    """The number that `expression` ("q+2*kv") is; None where a word is unknown or a division leaves a rest."""
    total = 0
    for sign, factors in _terms(expression):
        product = 1
        for operator, word in factors:
            size = int(word) if word.isdigit() else sizes.get(word)
            if size is None or (operator == "/" and (size == 0 or product % size)):
                return None
            product = product * size if operator == "*" else product // size
        total += product if sign == "+" else -product
    return total if total >= 0 else None


def words(expression: str) -> tuple[str, ...]:
    """The words of an expression."""
    return tuple(word for _, factors in _terms(expression) for _, word in factors if not word.isdigit())


def shape_of(dims: str, sizes: Sizes) -> tuple[int | None, ...]:
    """The shape that `dims` ("q,hidden") describes; None for dimensions that the sizes do not give."""
    return tuple(evaluate(part, sizes) for part in dims.split(",")) if dims else ()
