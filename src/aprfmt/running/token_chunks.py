"""Splits text into chunks of equal length, as llama-imatrix and llama-perplexity do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from aprfmt.llama.client import Llama

_CHARACTERS = 8
"""Maximum characters per token in nearly all text."""

SPREAD = 16
"""Text that `spread_chunks` reads, in multiples of what it takes."""


def token_chunks(
    llama: Llama, text: Iterable[str], size: int, limit: int | None = None, *, parse_special: bool = False
) -> list[list[int]]:
    """The ids of all of `text` in chunks of `size` tokens, at most `limit`; an incomplete last chunk is dropped.

    The first id of a chunk is that of the text: `with_bos` replaces it.
    """
    wanted = limit * size if limit is not None else None
    ids: list[int] = []
    for whole in _prefixes(text, wanted):
        ids = llama.tokenize(whole, parse_special=parse_special)
        if wanted is not None and len(ids) >= wanted + size:
            break
    n = len(ids) // size
    return [ids[i * size : (i + 1) * size] for i in range(n if limit is None else min(n, limit))]


def spread_chunks(
    llama: Llama, text: Iterable[str], size: int, count: int, *, parse_special: bool = False
) -> list[list[int]]:
    """`count` chunks of `size` tokens, spread evenly over the text, or over the start of one that is SPREAD times as
    long; fewer if the text is shorter. Neighbouring chunks are alike, those of other documents are not.
    """
    found = token_chunks(llama, text, size, SPREAD * count, parse_special=parse_special)
    taken = min(count, len(found))
    return [found[(2 * i + 1) * len(found) // (2 * taken)] for i in range(taken)]


def with_bos(llama: Llama, ids: list[int]) -> list[int]:
    """A chunk as it is evaluated: with the BOS token in place of its first id, if the model adds one."""
    return [llama.facts.bos, *ids[1:]] if llama.facts.adds_bos else ids


def _prefixes(text: Iterable[str], limit: int | None) -> Iterator[str]:
    """All of the text; if few tokens are wanted, first as much of it as probably suffices."""
    parts: list[str] = []
    size, enough = 0, (limit or 0) * _CHARACTERS
    for part in text:
        parts.append(part)
        size += len(part)
        if limit is not None and size >= enough:
            yield "".join(parts)
            enough = 2 * size
    yield "".join(parts)
