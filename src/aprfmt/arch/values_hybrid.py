"""Converters of hybrids and linear attention: which layers attend, and what their configs count otherwise."""

from __future__ import annotations

from aprfmt.arch.converter import DEFAULT, ConfigKeys, Converter, Scope, nothing
from aprfmt.arch.fields import as_int


def _attending(scope: Scope) -> list[int] | None:
    """The layers with key-value heads, by the GGUF; None where it does not say it of each layer."""
    heads = scope.gguf("attention.head_count_kv")
    return [i for i, n in enumerate(heads) if n] if isinstance(heads, list) else None


def _listed_from(value: object, scope: Scope) -> object:
    return DEFAULT if (found := _attending(scope)) is None else found


def _steps(found: list[int], n_layers: int, period: str, offset: str) -> ConfigKeys:
    """Layers that come every `period`, the first at `offset`; of one that stands alone, the next is behind the last."""
    first = found[0] if found else n_layers
    return ConfigKeys({period: found[1] - first if len(found) > 1 else max(n_layers, first + 1), offset: first})


def _period_from(value: object, scope: Scope) -> object:
    found, n_layers = _attending(scope), scope.h.num_layers
    return DEFAULT if found is None or not n_layers else _steps(found, n_layers, scope.name, "attn_layer_offset")


def _expert_period_from(value: object, scope: Scope) -> object:
    """By the layers that have a router."""
    n_layers = scope.h.num_layers
    if not scope.names or not n_layers:
        return DEFAULT
    found = [i for i in range(n_layers) if f"blk.{i}.ffn_gate_inp.weight" in scope.names]
    return _steps(found, n_layers, scope.name, "expert_layer_offset")


def _padded_settle(value: object, scope: Scope) -> object:
    """The embedding's rows: tokens are padded to a multiple."""
    vocab, multiple = as_int(value, scope.name), as_int(scope.h.extra.get("pad_vocab_size_multiple"), "") or 1
    return DEFAULT if vocab is None else -(-vocab // multiple) * multiple


HYBRID: dict[str, Converter] = {
    "attention_indices": Converter(nothing, _listed_from),
    "attention_period": Converter(nothing, _period_from),
    "expert_period": Converter(nothing, _expert_period_from),
    "padded_vocab": Converter(settle=_padded_settle),
}
