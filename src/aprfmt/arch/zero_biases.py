"""Biases that llama.cpp adds in every network of an architecture: a GGUF has zeros where a checkpoint has none."""

from __future__ import annotations

import math

from aprfmt.arch.grammar import has_layer, is_unwanted, shape_of, sizes_of
from aprfmt.arch.hyperparams import Hyperparams
from aprfmt.arch.loaders import loader_of
from aprfmt.arch.names import spell
from aprfmt.arch.row import Architecture, TensorRow

_ALWAYS_ADDED = frozenset(("blk.ssm_conv1d.bias",))
"""Biases that a graph adds, although some loaders accept a GGUF without them."""


def zero_biases(h: Hyperparams, arch: Architecture) -> dict[str, list[float]]:
    """GGUF name -> zeros [rows of the weight] of the biases that the config switches off; {} for most networks.

    Where llama.cpp needs one of the biases of a switch, all of them get zeros: a config has all or none.
    """
    loader = loader_of(arch.gguf)
    if loader is None:
        return {}
    always = loader.needed | (_ALWAYS_ADDED & loader.known)
    rows = [row for row in arch.tensors if _is_bias(row) and is_unwanted(arch, row.need, h)]
    switches = {row.need for row in rows if _plain(row) in always}
    made: dict[str, list[float]] = {}
    for row in rows:
        if row.need not in switches or _plain(row) not in loader.known:
            continue
        in_layers = "{n}" in row.gguf[0]
        for layer in range(h.num_layers or 0) if in_layers else (None,):
            if layer is None or has_layer(row.layers, h, layer):
                shape = shape_of((row.gguf_dims or (row.dims[0],))[0], sizes_of(h, layer))
                made[spell(row.gguf[0], layer)] = [0.0] * math.prod(size or 0 for size in shape)
    return made


def _plain(row: TensorRow) -> str:
    """The name in the table of loaders."""
    return row.gguf[0].replace(".{n}.", ".")


def _is_bias(row: TensorRow) -> bool:
    return len(row.gguf) == 1 and row.gguf[0].endswith(".bias") and "{e}" not in row.hf[0]
