"""Converters of networks that mix attention with linear layers."""

from __future__ import annotations

from collections.abc import Collection

from aprfmt.arch.converter import DEFAULT, Converter, Scope, nothing
from aprfmt.arch.converters.layers import FULL, LINEAR
from aprfmt.arch.fields import as_mapping
from aprfmt.arch.grammar import layer_kinds
from aprfmt.errors import RefusedError


def attending(scope: Scope) -> list[int] | None:
    """The layers with key-value heads, by the GGUF; None where it does not say it of each layer."""
    heads = scope.gguf("attention.head_count_kv")
    return [i for i, n in enumerate(heads) if n] if isinstance(heads, list) else None


_KDA_CONFIG = {
    "head_dim": "linear_head_dim",
    "num_heads": "linear_num_heads",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}


def kinds_of(full: Collection[int], n_layers: int) -> list[str]:
    """The layer types of `n_layers` layers, of which those of the numbers `full` have full attention."""
    return [FULL if i in full else LINEAR for i in range(n_layers)]


def _latent_layers_to(value: object, scope: Scope) -> list[int] | None:
    """Key-value heads by layer, as the runtime sees them: one in the layers of latent attention."""
    kinds = layer_kinds(scope.h.extra, scope.h.num_layers)
    return None if kinds is None else [int(kind == FULL) for kind in kinds]


def kda_config_from(value: object, scope: Scope) -> object:
    """The object in which Kimi's own code, and llama.cpp's converter, look for what transformers has beside it."""
    kinds = layer_kinds(scope.h.extra)
    if kinds is None:
        return DEFAULT
    numbers = {name: scope.h.extra.get(key) for name, key in _KDA_CONFIG.items()}
    full = [i + 1 for i, kind in enumerate(kinds) if kind == FULL]
    kda = [i + 1 for i, kind in enumerate(kinds) if kind != FULL]
    return {**as_mapping(value), **numbers, "full_attn_layers": full, "kda_layers": kda}


def _kda_heads_to(value: object, scope: Scope) -> None:
    if value != scope.h.num_heads:
        raise RefusedError(
            f"{scope.name} is {value}: llama.cpp's {scope.row.gguf} has as many heads in every layer, "
            f"{scope.h.num_heads} by num_attention_heads"
        )


latent_layers = Converter(_latent_layers_to, lambda value, scope: scope.h.num_heads)

kda_config = Converter(nothing, kda_config_from, normalize=kda_config_from)

kda_heads = Converter(_kda_heads_to, lambda value, scope: scope.h.num_heads)
