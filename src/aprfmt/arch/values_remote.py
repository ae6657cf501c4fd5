"""Converters of decoders whose configs count in ways of their own; `arch.values` has the others, and the one table."""

from __future__ import annotations

from aprfmt.arch.converter import DEFAULT, Converter, Scope
from aprfmt.arch.fields import as_float, as_int, as_mapping
from aprfmt.arch.rope import DEFAULT_THETA
from aprfmt.errors import RefusedError

# --- latent attention ---


def _given_to(value: object, scope: Scope) -> object:
    if value is None:
        raise RefusedError(
            f"{scope.name} is null: llama.cpp's {scope.row.gguf} knows only networks that have it",
            hint="an .apr or a folder can hold the model: -o NAME.apr, or -o NAME --format hf",
        )
    return value


def _nope_and_rope_to(value: object, scope: Scope) -> int | None:
    parts = as_int(value, scope.name), scope.h.head_dim
    return None if parts[0] is None or parts[1] is None else parts[0] + parts[1]


def _nope_from(value: object, scope: Scope) -> object:
    length, rotated = as_int(value, scope.key.gguf), scope.h.head_dim
    return length - rotated if length and rotated and length >= rotated else DEFAULT


def _odd_length_to(value: object, scope: Scope) -> object:
    """The length of a value where it is not what llama.cpp takes it for when nothing is said."""
    return None if value == scope.h.plain_head_dim else value


def _plain_head(scope: Scope) -> int | None:
    return scope.h.plain_head_dim


# --- dense decoders ---


def _half_to(value: object, scope: Scope) -> int | None:
    """Rotated values of a head: half of them."""
    return None if scope.h.head_dim is None else scope.h.head_dim // 2


def _half_from(value: object, scope: Scope) -> object:
    count = as_int(value, scope.key.gguf)
    return DEFAULT if count is None else 2 * count


def _ratio_from(value: object, scope: Scope) -> object:
    theta = as_float(value, scope.key.gguf)
    ratio = None if theta is None else theta / DEFAULT_THETA
    return DEFAULT if ratio is None else int(ratio) if ratio.is_integer() else ratio


def _ratio_to(value: object, scope: Scope) -> float | None:
    """The base frequency: `rope_ratio` times the usual one."""
    ratio = as_float(value, scope.name)
    return None if ratio is None else ratio * DEFAULT_THETA


def _refact_width(value: object, scope: Scope) -> object:
    """Refact's MLP: two thirds of four times the hidden size, rounded up to 256, whatever the config says."""
    hidden = scope.h.hidden_size
    return None if hidden is None else -(-(8 * hidden // 3) // 256) * 256


def _unshared(value: object, scope: Scope) -> object:
    """Key-value heads of which each serves `n_shared_head` heads."""
    heads, shared = scope.h.num_heads, scope.size("n_shared_head")
    return -(-heads // shared) if heads and shared else DEFAULT


def _shared_from(value: object, scope: Scope) -> object:
    heads, kv_heads = scope.h.num_heads, scope.h.num_kv_heads
    return heads // kv_heads if scope.kv and heads and kv_heads else DEFAULT


def _sliding_dim_to(value: object, scope: Scope) -> int | None:
    """Rotated values of a head in the layers that have a window."""
    sliding = as_mapping(as_mapping(scope.h.extra.get("rope_layers")).get("sliding_attention"))
    part = as_float(sliding.get("partial_rotary_factor"), "partial_rotary_factor")
    return None if scope.h.head_dim is None else int(scope.h.head_dim * (1.0 if part is None else part))


def _sliding_dim_from(value: object, scope: Scope) -> object:
    count, layers = as_int(value, scope.key.gguf), as_mapping(scope.h.extra.get("rope_layers"))
    if count is not None and scope.h.head_dim and "sliding_attention" in layers:
        sliding = {**as_mapping(layers["sliding_attention"]), "partial_rotary_factor": count / scope.h.head_dim}
        scope.h.extra["rope_layers"] = {**layers, "sliding_attention": sliding}
    return DEFAULT


REMOTE: dict[str, Converter] = {
    "given": Converter(_given_to),
    "nope_and_rope": Converter(_nope_and_rope_to, _nope_from),
    "odd_value_length": Converter(_odd_length_to, fill=_plain_head),
    "half": Converter(_half_to, _half_from),
    "rope_ratio": Converter(_ratio_to, _ratio_from),
    "refact_width": Converter(settle=_refact_width),
    "unshared_heads": Converter(settle=_unshared),
    "shared_heads": Converter(from_gguf=_shared_from),
    "sliding_rotary_dim": Converter(_sliding_dim_to, _sliding_dim_from),
}
