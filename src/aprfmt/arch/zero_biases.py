"""Biases that llama.cpp adds in every network of an architecture: a GGUF has zeros where a checkpoint has none.

The GGUF key `aprfmt.zero_biases` lists the config switches that are off, so that a checkpoint made from the GGUF lacks
them too.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from functools import cache

from aprfmt.arch.grammar import has_layer, is_needed, shape_of, sizes_of
from aprfmt.arch.hyperparams import Hyperparams
from aprfmt.arch.loaders import loader_of
from aprfmt.arch.names import matches, spell
from aprfmt.arch.row import OUTPUT, Architecture, TensorRow

KEY = "aprfmt.zero_biases"

_ALWAYS_ADDED = frozenset(("blk.ssm_conv1d.bias",))
"""Biases that a graph adds, although some loaders accept a GGUF without them."""


def zero_switches(h: Hyperparams, arch: Architecture) -> list[str]:
    """The config switches that are off although llama.cpp needs one of their biases; [] for most networks."""
    return [switch for switch in _rows_of_switches(arch) if not h.extra.get(switch, True)]


def zero_biases(h: Hyperparams, arch: Architecture) -> dict[str, list[float]]:
    """GGUF name -> zeros [rows of the weight] of the biases of `zero_switches`.

    Where llama.cpp needs one of the biases of a switch, all of them get zeros: a config has all or none.
    """
    made: dict[str, list[float]] = {}
    for row in (row for switch in zero_switches(h, arch) for row in _rows_of_switches(arch)[switch]):
        if row.need.endswith(OUTPUT) and not is_needed(arch, OUTPUT, h):
            continue
        in_layers = "{n}" in row.gguf[0]
        for layer in range(h.num_layers or 0) if in_layers else (None,):
            if layer is None or has_layer(row.layers, h, layer):
                shape = shape_of((row.gguf_dims or (row.dims[0],))[0], sizes_of(h, layer))
                made[spell(row.gguf[0], layer)] = [0.0] * math.prod(size or 0 for size in shape)
    return made


def stated_switches(kv: Mapping[str, object], arch: Architecture) -> list[str]:
    """The switches that a GGUF of ours states to be off; [] for other files."""
    stated = kv.get(KEY)
    return [switch for switch in _rows_of_switches(arch) if switch in stated] if isinstance(stated, list) else []


def biases_of(switches: Collection[str], arch: Architecture, names: Collection[str]) -> dict[str, list[str]]:
    """Switch -> the Hugging Face names among `names` of its biases."""
    found: dict[str, list[str]] = {switch: [] for switch in switches}
    for name in names if switches else ():
        for match in matches(arch, name)[:1]:
            if (switch := _switch_of(match.row)) in found:
                found[switch].append(name)
    return found


@cache
def _rows_of_switches(arch: Architecture) -> dict[str, list[TensorRow]]:
    """Switch -> its biases, for each switch of which llama.cpp needs one."""
    loader = loader_of(arch.gguf)
    if loader is None:
        return {}
    always = loader.needed | (_ALWAYS_ADDED & loader.known)
    found: dict[str, list[TensorRow]] = {}
    flags = {key.hf[0] for key in arch.keys if key.hf and key.kind == "bool" and not key.gguf and key.constant is None}
    for row in arch.tensors:
        if _is_bias(row) and _switch_of(row) in flags and _plain(row) in loader.known:
            found.setdefault(_switch_of(row), []).append(row)
    return {switch: rows for switch, rows in found.items() if any(_plain(row) in always for row in rows)}


def _switch_of(row: TensorRow) -> str:
    return row.need.removesuffix(f"&{OUTPUT}")


def _plain(row: TensorRow) -> str:
    """The name in the table of loaders."""
    return row.gguf[0].replace(".{n}.", ".")


def _is_bias(row: TensorRow) -> bool:
    return len(row.gguf) == 1 and row.gguf[0].endswith(".bias") and "{e}" not in row.hf[0]
