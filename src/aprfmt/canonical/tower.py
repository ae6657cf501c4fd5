"""Towers imported from a `clip` GGUF: their row and their config."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from aprfmt.arch import names
from aprfmt.arch.fields import as_int, as_mapping
from aprfmt.arch.hyperparams import Hyperparams
from aprfmt.arch.projectors import NUMBERS
from aprfmt.arch.row import Tower
from aprfmt.arch.table import TOWERS
from aprfmt.errors import CorruptError

TOWER_KEY = "aprfmt.tower"
"""APR metadata key with the hyper-parameters of a tower GGUF."""


@dataclass(frozen=True, slots=True)
class TowerPart:
    """Towers from a separate file of a language model; unnecessary if the source's config.json describes them.

    Attributes:
        row: their row of the tower table.
        hparams: known hyper-parameters; `hidden_size` is the width of the language model.
    """

    row: Tower
    hparams: Hyperparams

    def has(self, name: str) -> bool:
        """Whether `name` is a tensor of the towers, in a checkpoint or in a GGUF."""
        return bool(names.canonical_name(self.row, name) or self.has_in_gguf(name))

    def has_in_gguf(self, name: str) -> bool:
        """Whether `name` is a tensor of the towers' GGUF."""
        return names.is_gguf_only(self.row, name) or bool(names.matches(self.row, name, "gguf"))

    def of(self, all_names: Iterable[str]) -> set[str]:
        """The names that belong to the towers."""
        return {name for name in all_names if self.has(name)}

    def text_name(self, name: str) -> str:
        """The name of the language model's tensor `name` in a checkpoint of the whole model."""
        beginning = self.row.text
        if not self.row.bare and not beginning.startswith("model."):
            return beginning + name
        return beginning + name[len("model.") :] if name.startswith("model.") else name

    def to_metadata(self) -> dict[str, object]:
        """Metadata that read_tower reads."""
        stated = {"projection_dim": self.hparams.hidden_size, "hparams": self.hparams.extra}
        return {TOWER_KEY: {"row": self.row.id, **stated}}


def row_spelling(row: Tower, h: Hyperparams, name: str) -> str | None:
    """The row's spelling of a checkpoint tensor; None if it is not a tower tensor."""
    spelled = names.canonical_name(row, name)
    return _renumbered(row, h, spelled, to_layer=True) if spelled is not None else None


def checkpoint_spelling(row: Tower, h: Hyperparams, name: str) -> str:
    """The inverse of row_spelling."""
    return _renumbered(row, h, name, to_layer=False)


def _renumbered(row: Tower, h: Hyperparams, name: str, *, to_layer: bool) -> str:
    """`name` with the layer index for the position in a list of layers, or the reverse; see Tower.listed."""
    for beginning, key in row.listed.items():
        if name.startswith(beginning):
            number, dot, rest = name[len(beginning) :].partition(".")
            layers = NUMBERS[key](h) if key in NUMBERS else h.extra.get(key)
            layers = layers if isinstance(layers, list) else []
            known = dict(enumerate(layers)) if to_layer else {layer: i for i, layer in enumerate(layers)}
            if number.isdecimal() and int(number) in known:
                return f"{beginning}{known[int(number)]}{dot}{rest}"
    return name


def read_tower(metadata: Mapping[str, object]) -> TowerPart | None:
    """Reads the towers from the metadata of an `.apr`, or None. Raises CorruptError for an unknown row."""
    if (value := metadata.get(TOWER_KEY)) is None:
        return None
    stated = as_mapping(value)
    row = TOWERS.get(str(stated.get("row")))
    if row is None:
        raise CorruptError(f"{TOWER_KEY} names an unknown tower")
    hidden = as_int(stated.get("projection_dim"), f"{TOWER_KEY}.projection_dim")
    return TowerPart(row, Hyperparams(row.id, hidden_size=hidden, extra=dict(as_mapping(stated.get("hparams")))))
