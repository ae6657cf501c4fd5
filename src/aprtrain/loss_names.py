"""Names of the distillation losses, without torch: what --loss takes.

A package adds one by an entry point of the group ENTRY_POINTS, which names a function as in `objective.DIVERGENCES`.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import EntryPoint, entry_points

ENTRY_POINTS = "aprtrain.losses"
BUILT_IN = ("forward", "reverse", "skew", "jsd", "tv")
MIXTURES = ("skew", "jsd")
"""Those that use beta, the teacher's share of a mixture."""


@cache
def installed() -> dict[str, EntryPoint]:
    """Losses of other packages by name."""
    return {entry.name: entry for entry in entry_points(group=ENTRY_POINTS)}


def unknown_loss(name: str) -> str | None:
    """Why no loss has this name, naming those that exist; None if one does. Looks for packages only if it must."""
    if name in BUILT_IN or name in installed():
        return None
    return f"unknown loss {name!r}: use {', '.join([*BUILT_IN, *installed()])}"
