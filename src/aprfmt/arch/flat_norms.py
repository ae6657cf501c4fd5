"""Constant norms that a GGUF has and a checkpoint does not: all their values are one number of the config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from aprfmt.arch.fields import as_float, shorten
from aprfmt.arch.hyperparams import Hyperparams
from aprfmt.arch.names import spell
from aprfmt.arch.row import Architecture


def flat_norms(arch: Architecture, layer: int) -> dict[str, str]:
    """GGUF name -> config key ("" for 1) of the constant norms of one layer; {} for most families."""
    return {spell(name, layer): key for name, key in arch.flat_norms.items()}


def all_flat_norms(h: Hyperparams, arch: Architecture) -> dict[str, list[float]]:
    """GGUF name -> values [head_dim] of the norms of all layers. Raises CorruptError for anything but a number."""
    made: dict[str, list[float]] = {}
    for layer in range(h.num_layers or 0 if arch.flat_norms else 0):
        for name, key in flat_norms(arch, layer).items():
            number = as_float(h.extra.get(key), key) if key else 1.0
            made[name] = [1.0 if number is None else number] * (h.head_dim or 0)
    return made


def read_flat_norms(h: Hyperparams, arch: Architecture, tensors: Mapping[str, Sequence[float]]) -> None:
    """Sets the config keys from the norms of the first layer."""
    for name, key in flat_norms(arch, 0).items():
        values = tensors.get(name)
        if key and values:
            h.extra[key] = shorten(values[0])
