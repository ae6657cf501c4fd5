"""The sentences that a user reads: listed in strings.txt, in plain words of the field."""

from __future__ import annotations

import re

import strings

PRIVATE = (
    r"\bit is no (?!longer|more|less|better|worse)",
    r"\b(is|are|was|were|has|have) no such\b",
    r"\b(stand|stands|stood|standing) in\b",
    r"\b(stay|stays|stayed) behind\b",
    r"\bwhat is (said|told|there) of\b",
    r"\bnothing (brings|says|tells) ",
    r"\bof what (is|was|are|were)\b",
    r"\bgo(es)? by what\b",
)
"""Phrases of no field: say `not a ...`, `unknown ...`, `... not found`, `is stored in`, `is dropped`, `is missing`."""

ALLOWED: frozenset[str] = frozenset()
"""Whole sentences in which such a phrase is the plain one."""


def test_no_sentence_is_in_a_dialect() -> None:
    found = {
        (line, phrase)
        for line in strings.inventory().splitlines()
        for phrase in PRIVATE
        if re.search(phrase, line, re.IGNORECASE) and line not in ALLOWED
    }
    assert found == set()
