"""The tower table: finds the tower of a config.json or a `clip` GGUF, and converts its hyper-parameters."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from aprfmt.arch.converter import Scope, look_up
from aprfmt.arch.families import listed
from aprfmt.arch.fields import as_text
from aprfmt.arch.grammar import holds, is_gguf_of
from aprfmt.arch.hparams import first_class, set_path
from aprfmt.arch.hyperparams import Hyperparams
from aprfmt.arch.row import OF_TENSOR, Tower
from aprfmt.arch.scopes import defaults_of, fill, read_config
from aprfmt.arch.table import TOWERS

PREPROCESSOR = "preprocessor_config"
"""The object under which a tower's keys find preprocessor_config.json and processor_config.json."""


def find_tower(config: Mapping[str, object]) -> Tower | None:
    """The tower of a config.json, by its class, else its model type; None if unknown."""
    hf_class, model_type = first_class(config), as_text(config.get("model_type"))
    for name, names in ((hf_class, "hf_classes"), (model_type, "model_types")):
        found = [row for row in listed(towers=True).values() if name is not None and name in getattr(row, names)]
        for row in sorted(found, key=lambda row: not row.hf_when):
            if not row.hf_when or holds(row.hf_when, lambda word: look_up(config, (word,))[0]):
                return TOWERS[row.id]
    return None


def find_tower_gguf(
    kv: Mapping[str, object], tensor_names: Collection[str], classes: Collection[str] = ()
) -> Tower | None:
    """The tower of a `clip` GGUF with these keys and tensors; of several with one projector that of the `classes`."""
    found = [row for row in listed(towers=True).values() if is_gguf_of(row, kv, tensor_names)]
    row = next((row for row in found if any(name in classes for name in row.hf_classes)), next(iter(found), None))
    return TOWERS[row.id] if row is not None else None


def from_config(config: Mapping[str, object], row: Tower, hidden_size: int | None) -> Hyperparams:
    """The tower's hyper-parameters from a config.json with PREPROCESSOR in it; absent keys have the row's defaults.

    `hidden_size` is the width of the language model. Raises CorruptError.
    """
    model_type = as_text(config.get("model_type"))
    h = Hyperparams(architecture=row.id, hf_architecture=first_class(config), hf_model_type=model_type)
    h.hidden_size = hidden_size
    defaults = defaults_of(row, model_type)
    scopes = [Scope(h, row, key, defaults) for key in row.keys if key.hf and key.role != OF_TENSOR]
    read_config(scopes, config, defaults, null_is_absent=True)
    fill(h, scopes)
    return h


def missing_keys(h: Hyperparams, row: Tower) -> list[str]:
    """Paths of config keys that the tower's GGUF needs and that neither the source nor the row's defaults provide."""
    return [
        key.hf[0]
        for key in row.keys
        if key.gguf and key.hf and key.converter is None and h.extra.get(key.hf[0]) is None
    ]


def to_config(h: Hyperparams, row: Tower) -> dict[str, object]:
    """The tower's part of a config.json, with PREPROCESSOR in it."""
    config: dict[str, object] = {}
    for path, value in row.config.items():
        set_path(config, path, value)
    for key in row.keys:
        if key.hf and not key.field and h.extra.get(key.hf[0]) is not None:
            set_path(config, key.hf[0], h.extra[key.hf[0]])
    return config
