"""The towers of a model that were told by a `clip` GGUF: which row they are of, and what it says of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from aprfmt.arch import names
from aprfmt.arch.fields import as_int, as_mapping
from aprfmt.arch.hyperparams import Hyperparams
from aprfmt.arch.row import Tower
from aprfmt.arch.towers import TOWERS
from aprfmt.errors import CorruptError

TOWER_KEY = "aprfmt.tower"
"""APR metadata key of what a GGUF of towers says of them."""


@dataclass(frozen=True, slots=True)
class TowerPart:
    """Towers that stand beside a language model; a source whose config.json tells them needs none.

    Attributes:
        row: their row of the table of towers.
        hparams: what is known of them; `hidden_size` is the width of the language model.
    """

    row: Tower
    hparams: Hyperparams

    def has(self, name: str) -> bool:
        """Whether `name` is that of a tensor of the towers, in a checkpoint or in a GGUF."""
        return bool(names.canonical_name(self.row, name) or self.has_in_gguf(name))

    def has_in_gguf(self, name: str) -> bool:
        """Whether `name` is that of a tensor of the towers' GGUF."""
        return names.is_gguf_only(self.row, name) or bool(names.matches(self.row, name, "gguf"))

    def of(self, all_names: Iterable[str]) -> set[str]:
        """Those of the names that are the towers'."""
        return {name for name in all_names if self.has(name)}

    def to_metadata(self) -> dict[str, object]:
        """What read_tower reads."""
        told = {"projection_dim": self.hparams.hidden_size, "hparams": self.hparams.extra}
        return {TOWER_KEY: {"row": self.row.id, **told}}


def read_tower(metadata: Mapping[str, object]) -> TowerPart | None:
    """The towers that the metadata of an `.apr` tell; None without a word. Raises CorruptError for an unknown row."""
    if (value := metadata.get(TOWER_KEY)) is None:
        return None
    told = as_mapping(value)
    row = next((row for row in TOWERS if row.id == told.get("row")), None)
    if row is None:
        raise CorruptError(f"{TOWER_KEY} names no tower of the table")
    hidden = as_int(told.get("projection_dim"), f"{TOWER_KEY}.projection_dim")
    return TowerPart(row, Hyperparams(row.id, hidden_size=hidden, extra=dict(as_mapping(told.get("hparams")))))
