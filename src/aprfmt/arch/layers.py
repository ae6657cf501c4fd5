"""Which layers have a tensor: rules that a table row names, as functions of the hyper-parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aprfmt.arch.hyperparams import Hyperparams


def applies(rule: str, h: Hyperparams, layer: int) -> bool:
    """Whether layer `layer` (from 0) has the tensors of a row with `layers=rule`.

    A rule is a name of RULES, or a word of the config's `layer_types` (always that behind "="); several are joined
    by `|`.
    """
    if not rule:
        return True
    return any(_one(name, h, layer) for name in rule.split("|"))


def _one(name: str, h: Hyperparams, layer: int) -> bool:
    if name in RULES:
        return RULES[name](h, layer)
    kinds = h.extra.get("layer_types") or h.extra.get("layers_block_type")
    return isinstance(kinds, list) and layer < len(kinds) and kinds[layer] == name.removeprefix("=")


def _int(h: Hyperparams, key: str, default: int = 0) -> int:
    value = h.extra.get(key, default)
    return value if isinstance(value, int) and not isinstance(value, bool) else default


def _list(h: Hyperparams, key: str) -> list[Any] | None:
    value = h.extra.get(key)
    return value if isinstance(value, list) else None


def _is_moe(h: Hyperparams, layer: int) -> bool:
    """Routed experts or one dense MLP, by whatever key the config tells it."""
    if not h.num_experts:
        return False
    kinds = _list(h, "mlp_layer_types")
    if kinds is not None:
        return layer < len(kinds) and kinds[layer] != "dense"
    first = max(
        _int(h, key) for key in ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
    )
    end = _int(h, "moe_layer_end_index", -1)
    dense = layer in (_list(h, "mlp_only_layers") or []) or layer < first or 0 <= end < layer
    return not dense and _at_step(h, layer)


def _at_step(h: Hyperparams, layer: int) -> bool:
    """Whether experts come in this layer, of those that come every few layers."""
    frequency = h.extra.get("moe_layer_freq")
    if isinstance(frequency, list):
        return layer < len(frequency) and bool(frequency[layer])
    if layer % max(1, _int(h, "moe_layer_freq", 1)):
        return False
    steps = (_int(h, key, 1) for key in ("decoder_sparse_step", "moe_layer_interval"))
    return all((layer + 1) % max(1, step) == 0 for step in steps)


RULES: dict[str, Callable[[Hyperparams, int], bool]] = {
    "moe": _is_moe,
    "dense": lambda h, layer: not _is_moe(h, layer),
    "first": lambda h, layer: layer == 0,
    "after_first": lambda h, layer: layer > 0,
}
"""Name -> whether a layer has the tensors."""
