"""The sentences that a user reads: listed in strings.txt, in plain words of the field."""

from __future__ import annotations

import re
from functools import cache

import strings

PRIVATE = (
    r"\b(it|that|this) is no (?!longer|more|less|better|worse)",
    r"\bthere (is|are|was|were) (no|none)\b",
    r"\b(is|are|was|were|has|have) no such\b",
    r"\bis none (of|that)\b",
    r"\bstand(s|ing)? (in|at|against|beside|behind|there)\b",
    r"\bstood in\b",
    r"\bl(ie|ies|ay) beside\b",
    r"\bstay(s|ed)? behind\b",
    r"\b(comes?|goes) behind\b",
    r"\bwhat (is|was) (said|told|there|asked)\b",
    r"\b(is|are|be) told\b",
    r"\bsaid of\b",
    r"\bnothing (brings|says|tells|states) ",
    r"\bof what (is|was|are|were)\b",
    r"\b(a|the) mix\b(?! of)",
    r"\bsource record\b",
    r"\bat hand\b",
    r"\bmade anew\b",
    r"\bbut for\b",
    r"\bsees? everything\b",
    r"\blooks for (experts|norms)\b",
    r"\bquantized again\b",
    r"\bmend(s|ed)?\b",
    r"\brow maps?\b",
    r"\bof no known\b",
    r"\bnot (asked|known|understood)\b",
    r"\b(can|cannot) be told\b",
    r"\bdoes not give (its|a|the)\b",
    r"\ba windows?\b(?! or)",
    r"\b(has|have) no place\b",
    r"\bsays which\b",
    r"\bin a new order\b",
    r"\bknown are\b",
    r"\bit has a role\b",
    r"\bbehind BOS\b",
    r"\bas read back\b",
    r"\b(from|with) \S+ on, not\b",
    r"\b(is|are) not whole\b",
    r"\bare the original's\b",
    r"\bknown here\b",
    r"\blacks memory\b",
    r"\bexclude each other\b",
    r"\bname (one|another)( with|:| -o)",
    r"\bweights are packed\b",
    r"\bno string under\b",
    r"^give ",
    r"[;,] or give ",
    r"\b(one|each|two|values|heads|frames) a (position|layer|head)\b",
)
"""Phrases of no field: say `not a ...`, `unknown ...`, `... not found`, `is stored in`, `is dropped`, `is missing`."""

ALLOWED = frozenset(("Attempting to run cuBLAS, but there was no current CUDA context",))
"""Sentences of other programs."""


@cache
def inventory() -> str:
    """Made once: it parses all of src/."""
    return strings.inventory()


def test_the_inventory_of_sentences_is_current() -> None:
    assert strings.INVENTORY.read_text(encoding="utf-8") == inventory(), "run python tools/strings.py"


def test_no_sentence_is_in_a_dialect() -> None:
    found = {
        (line, phrase)
        for line in inventory().splitlines()
        for phrase in PRIVATE
        if re.search(phrase, line, re.IGNORECASE) and line not in ALLOWED
    }
    assert found == set()
