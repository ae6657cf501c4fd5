"""Memory of a model by context length: its weights, and the keys and values of each layer's attention."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from aprfmt.arch.hparams import active_window
from aprfmt.inspection.layers import by_layer
from aprfmt.model import Model, Tensor

KV_BYTES: Mapping[str, float] = {"f16": 2.0, "bf16": 2.0, "f32": 4.0, "q8_0": 34 / 32, "q5_1": 24 / 32, "q4_0": 18 / 32}
"""Bytes of a value in a KV cache by llama.cpp's type: blocks of 32 values with their scales."""

_KEYS = re.compile(r"(^|\.)(k_proj|attn_k|key|k_lin)\.weight$")
_VALUES = re.compile(r"(^|\.)(v_proj|attn_v|value|v_lin)\.weight$")
_LATENT = re.compile(r"(^|\.)(kv_a_proj_with_mqa|attn_kv_a_mqa)\.weight$")
_FUSED = re.compile(r"(^|\.)(qkv_proj|attn_qkv|query_key_value|Wqkv)\.weight$")


@dataclass(frozen=True, slots=True)
class CacheLayers:
    """Equal layers: how many, values that each keeps of a position, and its window in positions (0: none)."""

    count: int
    values: int
    window: int


@dataclass(frozen=True, slots=True)
class ModelMemory:
    """What a model takes to run.

    Attributes:
        weights: bytes of its tensors.
        layers: the layers with a KV cache.
        context: the context that it was trained with, in positions.
        others: layers without keys and values, whose state (if any) does not grow.
    """

    weights: int
    layers: Sequence[CacheLayers]
    context: int
    others: int

    def cache_bytes(self, context: int, kv_type: str = "f16") -> float:
        """Bytes of the KV cache for `context` positions of one sequence; a layer with a window keeps no more."""
        values = sum(row.count * row.values * min(context, row.window or context) for row in self.layers)
        return values * KV_BYTES[kv_type]


def model_memory(model: Model) -> ModelMemory | None:
    """The memory of a decoder; None where its layers or its context are unknown."""
    h = model.hparams
    context = h.max_position_embeddings
    kinds, _ = by_layer(model.tensors.entries, lambda tensor: tensor.name)
    layers: dict[int, list[Tensor]] = {}
    for of_kind in kinds.values():
        for layer, tensors in of_kind.items():
            layers.setdefault(layer, []).extend(tensors)
    if not context or context < 2 or not h.num_layers or len(layers) < h.num_layers:
        return None
    types, window = h.extra.get("layer_types"), active_window(h)
    kinds_of = types if isinstance(types, list) and len(types) >= h.num_layers else None
    fused = (h.num_heads or 0) * (h.head_dim or h.plain_head_dim or 0)
    found, others = Counter[tuple[int, int]](), 0
    for layer in range(h.num_layers):
        values = _values_of(layers.get(layer, []), fused)
        if not values:
            others += 1
            continue
        slides = window and (kinds_of is None or kinds_of[layer] == "sliding_attention")
        found[values, window or 0 if slides else 0] += 1
    if not found:
        return None
    rows = [CacheLayers(n, values, size) for (values, size), n in found.items()]
    return ModelMemory(sum(t.n_bytes for t in model.tensors.entries), rows, context, others)


def _values_of(tensors: Iterable[Tensor], query_rows: int) -> int:
    """Values that attention keeps of a position: the rows of K and V, or those of the latent that MLA keeps."""
    total = 0
    for tensor in tensors:
        rows = tensor.shape[0] if tensor.ndim == 2 else 0
        if _LATENT.search(tensor.name):
            return rows
        if _FUSED.search(tensor.name):
            return max(0, rows - query_rows)
        total += rows if _KEYS.search(tensor.name) or _VALUES.search(tensor.name) else 0
    return total
