"""Converters of networks that mix attention with linear layers."""

from __future__ import annotations

from collections.abc import Collection

from aprfmt.arch.converter import DEFAULT, Converter, Scope, nothing
from aprfmt.arch.converters.layers import FULL, LINEAR, SLIDING
from aprfmt.arch.grammar import layer_kinds
from aprfmt.errors import CorruptError, RefusedError


def attending(scope: Scope) -> list[int] | None:
    """The layers with key-value heads in the GGUF; None if it does not list them per layer."""
    heads = scope.gguf("attention.head_count_kv")
    return [i for i, n in enumerate(heads) if n] if isinstance(heads, list) else None


def hybrid_kinds(full: Collection[int], n_layers: int) -> list[str]:
    """The layer types of `n_layers` layers, of which those with indices in `full` have full attention."""
    return [FULL if i in full else LINEAR for i in range(n_layers)]


def _latent_layers_to_gguf(value: object, scope: Scope) -> list[int] | None:
    """Key-value heads per layer, as llama.cpp sees them: one in layers with latent attention."""
    kinds = layer_kinds(scope.h.extra, scope.h.num_layers)
    return None if kinds is None else [int(kind == FULL) for kind in kinds]


def _kda_heads_to_gguf(value: object, scope: Scope) -> None:
    if value != scope.h.num_heads:
        raise RefusedError(
            f"{scope.name} is {value}: llama.cpp's {scope.row.gguf} has num_attention_heads ({scope.h.num_heads}) "
            "heads in every layer"
        )


latent_layers = Converter(_latent_layers_to_gguf, lambda value, scope: scope.h.num_heads)
kda_heads = Converter(_kda_heads_to_gguf, lambda value, scope: scope.h.num_heads)


def _other(scope: Scope) -> str:
    return "conv" if any(row.layers == "conv" for row in scope.row.tensors) else LINEAR


def _mixed_from_gguf(value: object, scope: Scope) -> object:
    """Layer types from KV heads: a layer without any is of the family's other type."""
    heads = scope.gguf("attention.head_count_kv")
    if heads is None:
        return DEFAULT
    if not isinstance(heads, list):
        heads = [heads] * (scope.h.num_layers or 0)
    sees = SLIDING if scope.gguf("attention.sliding_window") else FULL
    return [sees if n else _other(scope) for n in heads]


def _mixed_derive(scope: Scope) -> list[str] | None:
    """From the indices of the attention layers in older configs; otherwise all have attention."""
    n_layers, h = scope.h.num_layers, scope.h
    if n_layers is None:
        return None
    listed = h.extra.get("full_attn_idxs")
    indices = range(n_layers) if listed is None else listed
    if not isinstance(indices, range | list):
        raise CorruptError("full_attn_idxs is not a list")
    return [FULL if i in indices else _other(scope) for i in range(n_layers)]


mixed_layers = Converter(nothing, _mixed_from_gguf, _mixed_derive)
