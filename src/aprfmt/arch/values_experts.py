"""Converters of networks with routed experts: which layers have them, how wide they are and how they are bounded."""

from __future__ import annotations

from collections.abc import Mapping

from aprfmt.arch.converter import DEFAULT, ConfigKeys, Converter, Scope, default, nothing
from aprfmt.arch.fields import as_float, as_int, from_f32
from aprfmt.arch.grammar import BLOCKWISE
from aprfmt.arch.values_layers import flags_of
from aprfmt.errors import CorruptError, RefusedError


def _stepped_to(value: object, scope: Scope) -> None:
    step, n_layers = scope.size("interleave_moe_layer_step") or 1, scope.h.num_layers or 0
    if isinstance(value, list) and value != list(range(step - 1, n_layers, step)):
        raise RefusedError(
            f"{scope.name} is not every layer at a step of {step} (interleave_moe_layer_step), where llama.cpp's "
            f"{scope.row.gguf} looks for experts"
        )


def _all_sparse_to(value: object, scope: Scope) -> None:
    if isinstance(value, list) and "dense" in value:
        raise RefusedError(f"{scope.name} has dense layers: llama.cpp's {scope.row.gguf} gives every layer experts")


_BARE_EXPERTS = 128
"""So many experts has the Llama 4 whose Q and K llama.cpp does not norm."""


def _normed_to(value: object, scope: Scope) -> None:
    if bool(value) == (scope.h.num_experts == _BARE_EXPERTS):
        raise RefusedError(
            f"{scope.name} is {value}: llama.cpp's {scope.row.gguf} norms Q and K but for networks of {_BARE_EXPERTS} "
            "experts"
        )


_PUZZLE = "block_configs"


def _puzzle_blocks(scope: Scope) -> list[Mapping[str, object]]:
    blocks = scope.h.extra.get(_PUZZLE)
    if not isinstance(blocks, list) or not all(isinstance(block, Mapping) for block in blocks):
        raise CorruptError(f"{_PUZZLE} is not a list of objects")
    return blocks


def _puzzle_settle(value: object, scope: Scope) -> object:
    """Kinds of layers and their number, as the blocks have them."""
    kinds = [block.get("block_type") for block in _puzzle_blocks(scope)]
    return ConfigKeys({"layers_block_type": kinds, "num_hidden_layers": len(kinds)})


def _puzzle_from(value: object, scope: Scope) -> object:
    names = ("expert_feed_forward_length", "expert_used_count", "attention.head_count_kv")
    widths, used, heads = map(scope.gguf, names)
    if not (isinstance(widths, list) and isinstance(used, list) and isinstance(heads, list)):
        return DEFAULT
    return [
        {"block_type": "moe", "moe_intermediate_size": width, "num_experts_per_tok": n}
        if width
        else {"block_type": "attention" if n_heads else "mamba"}
        for width, n, n_heads in zip(widths, used, heads, strict=False)
    ]


def _of_blocks(name: str) -> Converter:
    """What each block has under a name, 0 where it has none."""
    return Converter(
        lambda value, scope: [as_int(block.get(name), name) or 0 for block in _puzzle_blocks(scope)],
        lambda value, scope: DEFAULT,
    )


def _one_for_all_to(value: object, scope: Scope) -> list[float] | None:
    """A number as one a layer; 0 is none."""
    number = as_float(value, scope.name)
    return [number] * scope.h.num_layers if number and scope.h.num_layers else None


def _one_for_all_from(value: object, scope: Scope) -> object:
    found = value[0] if isinstance(value, list) and value else value
    return from_f32(found, scope.key.gguf) or 0.0


def _same_limit_to(value: object, scope: Scope) -> list[float] | None:
    return _one_for_all_to(scope.h.extra.get("swiglu_limit"), scope)


_DENSE, _SPARSE = "dense", "sparse"


def _types(kinds: list[str], scope: Scope) -> object:
    """Which layers have experts, in each spelling that the family's configs have for it."""
    if not any("moe_layer_freq" in key.hf for key in scope.row.keys):
        return kinds
    return ConfigKeys(mlp_layer_types=kinds, moe_layer_freq=[int(kind == _SPARSE) for kind in kinds])


def _after(n_dense: int, n_layers: int) -> list[str]:
    return [_DENSE if i < n_dense else _SPARSE for i in range(n_layers)]


def _dense_settle(value: object, scope: Scope) -> object:
    """By a list of words or of flags, else by the number of dense layers at the beginning, which is 1 unless said."""
    extra, n_layers = scope.h.extra, scope.h.num_layers
    flags = extra.get("moe_layer_freq")
    first = as_int(extra.pop("first_k_dense_replace", None), "first_k_dense_replace")
    if isinstance(value, list):
        return _types([str(kind) for kind in value], scope)
    if isinstance(flags, list):
        return _types([_SPARSE if flag else _DENSE for flag in flags], scope)
    return DEFAULT if n_layers is None else _types(_after(1 if first is None else first, n_layers), scope)


def _dense_from(value: object, scope: Scope) -> object:
    """By the tensors: llama.cpp asks no key."""
    n_layers = scope.h.num_layers or 0
    if not scope.names:
        return _types(_after(1, n_layers), scope)
    routed = [f"blk.{i}.ffn_gate_inp.weight" in scope.names for i in range(n_layers)]
    return _types([_SPARSE if one else _DENSE for one in routed], scope)


_FREQUENCY = "sparse_attention_config.sparse_attention_freq"


def _counted_dense_settle(value: object, scope: Scope) -> object:
    flags = scope.h.extra.pop("moe_layer_freq", None)
    if value is not None or scope.h.num_layers is None:
        return DEFAULT
    if flags is None:
        return [_SPARSE] * scope.h.num_layers
    return [_SPARSE if flag else _DENSE for flag in flags_of(flags, "moe_layer_freq")]


def _counted_dense_to(value: object, scope: Scope) -> int | None:
    """How many layers at the beginning are dense, and no others."""
    if not isinstance(value, list):
        return None
    n_dense = next((i for i, kind in enumerate(value) if kind != _DENSE), len(value))
    if _DENSE in value[n_dense:]:
        raise RefusedError(f"{scope.name} has dense layers after sparse ones, which llama.cpp does not load")
    return n_dense


def _counted_dense_from(value: object, scope: Scope) -> object:
    return _after(as_int(value, scope.key.gguf) or 0, scope.h.num_layers or 0)


def _where_sparse(scope: Scope) -> list[str]:
    """Blocks are chosen in the layers with experts: what llama.cpp takes for granted."""
    kinds = scope.h.extra.get("mlp_layer_types")
    return ["full_attention" if kind == _DENSE else BLOCKWISE for kind in kinds] if isinstance(kinds, list) else []


def _where_sparse_settle(value: object, scope: Scope) -> object:
    flags = scope.h.extra.pop(_FREQUENCY, None)
    if value is not None or scope.h.num_layers is None:
        return DEFAULT
    if flags is None:
        return ["full_attention"] * scope.h.num_layers
    return [BLOCKWISE if flag else "full_attention" for flag in flags_of(flags, _FREQUENCY)]


def _where_sparse_to(value: object, scope: Scope) -> None:
    if value is not None and value != _where_sparse(scope):
        raise RefusedError(
            f"{scope.name}: llama.cpp's {scope.row.gguf} chooses blocks of positions in exactly the layers with experts"
        )


def _times_moe_width(value: object, scope: Scope) -> int | None:
    """A number of experts as the width of one as wide as all of them."""
    count, width = as_int(value, scope.name), scope.h.moe_intermediate_size
    return None if count is None or width is None else count * width


def _over_moe_width(value: object, scope: Scope) -> object:
    total, width = as_int(value, scope.key.gguf), scope.h.moe_intermediate_size
    return total // width if total is not None and width else DEFAULT


def _whole_experts(value: object, scope: Scope) -> int | None:
    """A width as a number of experts of the others' width."""
    total, width = as_int(value, scope.name), scope.h.moe_intermediate_size
    if total is None or not width:
        return None
    if total % width:
        raise RefusedError(f"{scope.name} is {total}: llama.cpp's {scope.row.gguf} knows multiples of {width} only")
    return total // width


def _enumerated_dense_settle(value: object, scope: Scope) -> object:
    """By the layers with experts, which a text lists; all but the first three unless something is said."""
    listed, n_layers = scope.h.extra.pop("moe_layers_enum", None), scope.h.num_layers
    if value is not None or n_layers is None:
        return DEFAULT
    if listed is None:
        return _after(3, n_layers)
    if not isinstance(listed, str) or not all(part.strip().isdecimal() for part in listed.split(",") if part.strip()):
        raise CorruptError("moe_layers_enum is not a list of layers, separated by commas")
    routed = {int(part) for part in listed.split(",") if part.strip()}
    return [_SPARSE if i in routed else _DENSE for i in range(n_layers)]


def _limits_to(value: object, scope: Scope) -> list[float] | None:
    """Bounds of the gated values, 0 where a layer has none."""
    return [as_float(item, scope.name) or 0.0 for item in value] if isinstance(value, list) else None


def _limits_from(value: object, scope: Scope) -> object:
    items = [from_f32(item, scope.key.gguf) for item in value] if isinstance(value, list) else []
    return [item or None for item in items] if items else DEFAULT


EXPERTS: dict[str, Converter] = {
    "stepped_moe_layers": Converter(_stepped_to),
    "all_sparse": Converter(_all_sparse_to),
    "not_of_128_experts": Converter(_normed_to, lambda value, scope: scope.h.num_experts != _BARE_EXPERTS),
    "like_experts": Converter(fill=lambda scope: scope.h.moe_intermediate_size),
    "puzzle_blocks": Converter(nothing, _puzzle_from, settle=_puzzle_settle),
    "puzzle_widths": _of_blocks("moe_intermediate_size"),
    "puzzle_used": _of_blocks("num_experts_per_tok"),
    "norm_of_softmax": Converter(
        lambda value, scope: value or scope.config("expert_selection_fn") == "softmax", lambda value, scope: bool(value)
    ),
    "dense_by_tensors": Converter(nothing, _dense_from, settle=_dense_settle),
    "times_moe_width": Converter(_times_moe_width, _over_moe_width),
    "one_for_all": Converter(_one_for_all_to, _one_for_all_from),
    "over_moe_width": Converter(_whole_experts, lambda value, scope: _times_moe_width(value, scope) or DEFAULT),
    "counted_dense": Converter(_counted_dense_to, _counted_dense_from, settle=_counted_dense_settle),
    "indexed_where_sparse": Converter(
        _where_sparse_to, lambda value, scope: _where_sparse(scope), settle=_where_sparse_settle
    ),
    "enumerated_dense": Converter(_counted_dense_to, _counted_dense_from, settle=_enumerated_dense_settle),
    "limits": Converter(_limits_to, _limits_from),
    "same_limit": Converter(_same_limit_to, default),
}
"""What a Key's `via` names, as in arch.values.CONVERTERS."""
