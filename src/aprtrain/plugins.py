"""Names of losses and optimizers, without torch: what --loss and --optimizer take.

Other packages add theirs by entry points, see docs/training.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points


@dataclass(frozen=True)
class Plugins:
    """What has a name here or in an installed package.

    Attributes:
        group: of the entry points.
        what: a word for one, in messages.
        built_in: the names of our own.
    """

    group: str
    what: str
    built_in: tuple[str, ...]

    def installed(self) -> dict[str, EntryPoint]:
        """Those of other packages by name."""
        return _installed(self.group)

    def unknown(self, name: str) -> str | None:
        """Why nothing has this name, naming what exists; None if something has. Looks for packages only if it must."""
        if name in self.built_in or name in self.installed():
            return None
        return f"unknown {self.what} {name!r}: use {', '.join([*self.built_in, *self.installed()])}"


@cache
def _installed(group: str) -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=group)}


LOSSES = Plugins("aprtrain.losses", "loss", ("forward", "reverse", "skew", "jsd", "tv"))
"""Functions as in `loss.objective.DIVERGENCES`."""
OPTIMIZERS = Plugins("aprtrain.optimizers", "optimizer", ("adamw", "muon"))
"""Each an `optim.rules.UpdateRule`."""
MIXTURES = ("skew", "jsd")
"""Losses that use beta, the teacher's share of a mixture."""
