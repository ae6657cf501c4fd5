"""What a run of the suite left out: a table of reasons, how many tests each costs, and what to type to have them."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Iterable

NEEDS: tuple[tuple[str, str], ...] = (
    ("needs a GPU", "on a machine with CUDA: python -m pytest -m cuda tests/train"),
    ("Chromium", "as root: apt-get install chromium-headless-shell"),
    ("docker-registry", "as root: apt-get install docker-registry"),
    ("needs (node|tmux)", "as root: apt-get install nodejs tmux"),
    ("FlashAttention|quack", 'on a GPU of Hopper or later: pip install -e ".[flash4]"'),
    ("xllamacpp", 'pip install -e ".[llama]"'),
    ("llama-cpp-python|llama_cpp", "tools/install_llama.sh .venv/bin/python"),
    ("material|converter$|real tokenizer", "python tools/fetch_material.py"),
    ("could not import|no libggml|nbclient", 'pip install -e ".[test]"'),
    ("another user|small tmpfs", "as root: make test"),
    ("^root", "as another user: runuser -u nobody -- python -m pytest"),
    ("Linux|/proc|/dev/full|pseudo-terminals|POSIX|links, pipes", "on Linux"),
    ("extended attributes|one disk only|file system has none", "with TMPDIR on another disk"),
)
"""Patterns of reasons, and what to type. The first that is found counts; other reasons say why a case cannot exist."""


def way(reason: str) -> str:
    """What to type to have the tests that were skipped for `reason`; "" where nothing brings them."""
    return next((typed for pattern, typed in NEEDS if re.search(pattern, reason, re.IGNORECASE)), "")


def table(reasons: Iterable[str], width: int = 120) -> list[str]:
    """Lines of a table: the number of tests, why they were skipped, what to type; those that can be had come first."""
    counts = Counter(reason.removeprefix("Skipped: ").strip() for reason in reasons)
    lines = []
    for reason, n in sorted(counts.items(), key=lambda item: (not way(item[0]), -item[1], item[0])):
        typed = way(reason)
        lines += textwrap.wrap(
            f"{reason}  →  {typed}" if typed else reason, width, initial_indent=f"{n:5}  ", subsequent_indent=" " * 9
        )
    return lines
