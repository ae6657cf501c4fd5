"""Converters of decoders whose configs count in ways of their own; `arch.values` has the others, and the one table."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeGuard

from aprfmt.arch.converter import DEFAULT, ConfigKeys, Converter, GgufKeys, Scope, default, nothing
from aprfmt.arch.fields import as_float, as_int, as_mapping, shorten
from aprfmt.arch.grammar import sizes_of
from aprfmt.arch.rope import DEFAULT_THETA
from aprfmt.errors import CorruptError, RefusedError
from aprfmt.io.jsonx import to_f32

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


# --- routed experts ---


def _root_to(value: object, scope: Scope) -> float | None:
    """What attention scores are multiplied with; one over the root of a head where nothing is said."""
    scale, size = as_float(value, scope.name), scope.h.head_dim
    return scale if scale is not None or not size else size**-0.5


def _root_from(value: object, scope: Scope) -> object:
    scale, size = as_float(value, scope.key.gguf), scope.h.head_dim
    return DEFAULT if scale is None or (size and to_f32(size**-0.5) == scale) else shorten(scale)


_ORIGINAL = ("original", "yarn")
"""How Grok 2 calls yarn."""


def _yarn_to(value: object, scope: Scope) -> str | None:
    return "yarn" if value in _ORIGINAL else None


def _if_yarn_to(value: object, scope: Scope) -> object:
    return value if scope.config("rope_type") in _ORIGINAL else None


def _chunk_width_to(value: object, scope: Scope) -> int | None:
    return scope.h.head_dim


_EVERY = 4
"""Of so many layers llama.cpp's smallthinker leaves the first without window and rotation, if it has windows."""


def _layout(scope: Scope) -> list[int]:
    return [int(layer % _EVERY != 0) for layer in range(scope.h.num_layers or 0)]


def _as_layout(value: object, scope: Scope) -> list[int]:
    return value if isinstance(value, list) else [0] * (scope.h.num_layers or 0)


def _layout_window_to(value: object, scope: Scope) -> object:
    """The window, if a layer has it; the runtime knows one length, in three of four layers."""
    layout = _as_layout(scope.config("sliding_window_layout"), scope)
    if not any(layout):
        return None
    if value != _WINDOW or layout != _layout(scope):
        raise RefusedError(
            f"llama.cpp's {scope.row.gguf} has windows of {_WINDOW} tokens in all but every {_EVERY}th layer from the "
            f"first on; this model has {value} in layers {layout}"
        )
    return value


_WINDOW = 4096


def _window_layout_from(value: object, scope: Scope) -> object:
    if not scope.kv:
        return DEFAULT
    return _layout(scope) if scope.gguf("attention.sliding_window") else [0] * (scope.h.num_layers or 0)


def _rope_layout_to(value: object, scope: Scope) -> None:
    windows = any(_as_layout(scope.config("sliding_window_layout"), scope))
    expected = _layout(scope) if windows else [1] * (scope.h.num_layers or 0)
    if isinstance(value, list) and value != expected:
        raise RefusedError(f"llama.cpp's {scope.row.gguf} rotates the layers {expected}, not those of {scope.name}")


def _rope_layout_from(value: object, scope: Scope) -> object:
    if not scope.kv:
        return DEFAULT
    return _layout(scope) if scope.gguf("attention.sliding_window") else [1] * (scope.h.num_layers or 0)


def _all_layers_to(value: object, scope: Scope) -> None:
    if isinstance(value, list) and not all(value):
        raise RefusedError(f"{scope.name} has layers without experts, which llama.cpp's {scope.row.gguf} does not know")


def _all_layers_from(value: object, scope: Scope) -> object:
    return [1] * (scope.h.num_layers or 0) if scope.kv else DEFAULT


def _in_each_to(value: object, scope: Scope) -> list[float] | None:
    number = as_float(value, scope.name)
    return None if number is None else [number] * (scope.h.num_layers or 0)


def _in_each_from(value: object, scope: Scope) -> object:
    return value[0] if isinstance(value, list) and value else DEFAULT


def _expert_width_to(value: object, scope: Scope) -> object:
    """The width of one shared expert; the runtime multiplies it with their number."""
    return scope.h.moe_intermediate_size if value is None else value


# --- sizes that differ from layer to layer ---


def _every_to(value: object, scope: Scope) -> object:
    """A list, one number a layer, also where all are the same."""
    listed = scope.h.extra.get(scope.name)
    return listed if isinstance(listed, list) else value and [value] * (scope.h.num_layers or 0)


def _every_from(value: object, scope: Scope) -> object:
    return value if isinstance(value, list) or value is None else [value] * (scope.h.num_layers or 0)


def _of_layers(scope: Scope, word: str) -> list[int]:
    """A size in each layer."""
    return [sizes_of(scope.h, layer).get(word, 0) for layer in range(scope.h.num_layers or 0)]


def _multiplied_to(value: object, scope: Scope) -> object:
    return _of_layers(scope, "ffn") if isinstance(value, list) else None


_DIVISOR = 256
"""Of the widths of all published OpenELMs."""


def _multiplied_from(value: object, scope: Scope) -> object:
    listed, hidden = _every_from(value, scope), scope.h.hidden_size
    if not isinstance(listed, list) or not hidden:
        return DEFAULT
    widths = [as_int(width, scope.name) or 0 for width in listed]
    return ConfigKeys(
        ffn_multipliers=[width / hidden for width in widths],
        ffn_dim_divisor=1 if any(width % _DIVISOR for width in widths) else _DIVISOR,
    )


def _block_list(word: str) -> Converter:
    """A number, or a list of them where `block_configs` says that layers differ."""

    def to_gguf(value: object, scope: Scope) -> object:
        if isinstance(scope.config("block_configs"), list):
            value = _of_layers(scope, word)
        elif word == "kv_heads" and isinstance(listed := scope.config("num_key_value_heads_per_layer"), list):
            value = listed
        kind = "u32[]" if isinstance(value, list) else "u32"
        return None if value is None else GgufKeys({scope.key.gguf: (kind, value)})

    def from_gguf(value: object, scope: Scope) -> object:
        if not isinstance(value, list):
            return DEFAULT if value is None else value
        return max(value, default=None) if word == "heads" else None

    return Converter(to_gguf, from_gguf)


def _listed_kv_from(value: object, scope: Scope) -> object:
    listed = scope.gguf("attention.head_count_kv")
    return list(listed) if _is_list(listed) and not _is_list(scope.gguf("attention.head_count")) else DEFAULT


def _is_list(value: object) -> TypeGuard[Iterable[object]]:
    return isinstance(value, Iterable) and not isinstance(value, str | bytes)


def _blocks_from(value: object, scope: Scope) -> object:
    """What `block_configs` says of layers with these heads, key-value heads and widths."""
    names = ("attention.head_count", "attention.head_count_kv", "feed_forward_length")
    heads, kv_heads, widths = (scope.gguf(name) for name in names)
    if not (_is_list(heads) and _is_list(kv_heads) and _is_list(widths)):
        return DEFAULT
    hidden = scope.h.hidden_size or 1
    blocks = []
    for item in zip(heads, kv_heads, widths, strict=False):
        n_heads, n_kv, width = (as_int(number, name) or 0 for number, name in zip(item, names, strict=True))
        attention = {
            "n_heads_in_group": n_heads // n_kv if n_kv else None,
            "no_op": not n_heads,
            "replace_with_linear": bool(n_heads and not n_kv),
        }
        blocks.append(
            {
                "attention": attention,
                "ffn": {"ffn_mult": 3 * width / (2 * hidden) if width else None, "no_op": not width},
            }
        )
    return blocks


def _blocks_settle(value: object, scope: Scope) -> object:
    if isinstance(value, list) and len(value) != scope.h.num_layers:
        raise CorruptError(f"{scope.name} describes {len(value)} layers, and the network has {scope.h.num_layers}")
    return DEFAULT


def _block_head_dim_to(value: object, scope: Scope) -> GgufKeys | None:
    """The size of a head, which does not follow from the heads of a first layer that may have none."""
    if not isinstance(scope.config("block_configs"), list):
        return None
    return GgufKeys({f"attention.{name}_length": ("u32", scope.h.head_dim) for name in ("key", "value")})


# --- vocabularies ---

_IMAGE_TOKENS = ("IMGIMG", "<image>")


def _image_tokens(value: object, scope: Scope) -> object:
    """The tokens of Chameleon's pictures and their ids, which the class needs and a GGUF has with its vocabulary."""
    tokens = scope.kv.get("tokenizer.ggml.tokens")
    if not scope.kv:
        return DEFAULT
    listed = tokens if _is_list(tokens) else ()
    return {str(token): i for i, token in enumerate(listed) if str(token).startswith(_IMAGE_TOKENS)}


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
    "inverse_root": Converter(_root_to, _root_from),
    "original_yarn": Converter(_yarn_to, lambda value, scope: _ORIGINAL[0] if value == "yarn" else None),
    "if_yarn": Converter(_if_yarn_to),
    "chunk_width": Converter(_chunk_width_to, default),
    "softmax_switch": Converter(lambda value, scope: 1 if value else 2, lambda value, scope: value == 1),
    "layout_window": Converter(_layout_window_to),
    "window_layout": Converter(nothing, _window_layout_from),
    "rope_layout": Converter(_rope_layout_to, _rope_layout_from),
    "all_layers": Converter(_all_layers_to, _all_layers_from),
    "in_each_layer": Converter(_in_each_to, _in_each_from),
    "expert_width": Converter(_expert_width_to),
    "in_every_layer": Converter(_every_to, _every_from),
    "multiplied_widths": Converter(_multiplied_to, _multiplied_from),
    "block_widths": _block_list("ffn"),
    "block_heads": _block_list("heads"),
    "block_kv_heads": _block_list("kv_heads"),
    "listed_kv_heads": Converter(from_gguf=_listed_kv_from),
    "blocks": Converter(from_gguf=_blocks_from, settle=_blocks_settle),
    "block_head_dim": Converter(_block_head_dim_to, default),
    "of_tensor": Converter(),
    "has_tensors": Converter(lambda value, scope: bool(value), lambda value, scope: bool(value)),
    "image_tokens": Converter(nothing, _image_tokens),
}
