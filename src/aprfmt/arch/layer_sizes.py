"""Sizes that differ between layers: heads and widths of one layer, from any config.json key."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from math import isqrt

from aprfmt.arch.hyperparams import Hyperparams

# Size word -> config.json keys that list it, one number per layer.
_LISTS = {
    "heads": ("num_query_heads", "num_attention_heads_per_layer"),
    "kv_heads": ("num_kv_heads", "num_key_value_heads_per_layer"),
}


def layer_sizes(h: Hyperparams, layer: int) -> dict[str, int]:
    """The size words of this layer: every per-layer integer list of the config, and `heads`, `kv_heads` and `ffn` if
    they differ between layers; `{}` for most networks.
    """
    listed = {key: value[layer] for key, value in h.extra.items() if isinstance(value, list) and layer < len(value)}
    words = {key: item for key, item in listed.items() if type(item) is int and item >= 0}
    words |= {word: words[key] for word, keys in _LISTS.items() for key in keys if key in words}
    if isinstance(block := listed.get("block_configs"), Mapping):
        words |= _expert_width(block) if "block_type" in block else block_sizes(h, block)
    words |= _ngram_sizes(h)
    multiplier, divisor = listed.get("ffn_multipliers"), h.extra.get("ffn_dim_divisor")
    if isinstance(multiplier, int | float) and isinstance(divisor, int) and divisor > 0 and h.hidden_size:
        words["ffn"] = divisible(multiplier * h.hidden_size, divisor)
    return words


def _ngram_sizes(h: Hyperparams) -> dict[str, int]:
    """The n-gram table of a Qwen4 layer: hashes per token, rows of each, rows in all, their width.

    Each hash has a prime number of rows, consecutive primes; the total is rounded up.
    """
    names = ("ngram_vocab_size_base", "ngram_size", "heads_per_ngram", "make_ngram_vocab_size_divisible_by")
    base, size, heads, multiple = (value if type(value := h.extra.get(name)) is int else 0 for name in names)
    count = (size - 1) * heads
    if not (0 < base <= _MOST_ROWS and 0 < count <= _MOST_HASHES and multiple > 0):
        return {}
    words = {"ngram_heads": count, "ngram_rows": -(-sum(_primes(base, count)) // multiple) * multiple}
    width = h.extra.get("ple_embed_dim") or h.hidden_size
    return words | ({"ngram_width": width // count} if type(width) is int and width % count == 0 else {})


_MOST_ROWS, _MOST_HASHES = 1 << 31, 64
"""Layer types that llama.cpp has enum values for."""


@cache
def _primes(start: int, count: int) -> tuple[int, ...]:
    """The first `count` primes from `start` on."""
    found: list[int] = []
    number = max(start, 2)
    while len(found) < count:
        if all(number % divisor for divisor in range(2, isqrt(number) + 1)):
            found.append(number)
        number += 1
    return tuple(found)


def divisible(width: float, divisor: int) -> int:
    """OpenELM's widths: the nearest multiple of `divisor`, but at least nine tenths of `width`."""
    nearest = max(divisor, int(width + divisor / 2) // divisor * divisor)
    return nearest + divisor if nearest < 0.9 * width else nearest


def _expert_width(block: Mapping[object, object]) -> dict[str, int]:
    """The expert width of a layer of Nemotron's Puzzle."""
    width = block.get("moe_intermediate_size")
    return {"moe_ffn": width} if type(width) is int and width > 0 else {}


_STEP = 256
"""DeciLM's widths are multiples of it."""


def block_sizes(h: Hyperparams, block: Mapping[object, object]) -> dict[str, int]:
    """Heads, key-value heads and width of a layer of `block_configs`, which may lack attention or MLP.

    Attention replaced by a matrix has heads, but no key-value heads.
    """
    attention, mlp = (part if isinstance(part := block.get(name), Mapping) else {} for name in ("attention", "ffn"))
    group, multiplier = attention.get("n_heads_in_group"), mlp.get("ffn_mult")
    heads = h.num_heads or 0
    words = {"heads": heads if group or attention.get("replace_with_linear") else 0, "kv_heads": 0, "ffn": 0}
    if type(group) is int and group > 0:
        words["kv_heads"] = heads // group
    if isinstance(multiplier, int | float) and h.hidden_size:
        words["ffn"] = -(-int(2 * multiplier * h.hidden_size / 3) // _STEP) * _STEP
    return words
