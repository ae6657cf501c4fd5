"""Converters of experts: leading dense layers, widths, limits."""

from __future__ import annotations

from aprfmt.arch.converter import DEFAULT, ConfigKeys, Converter, Scope, default, nothing
from aprfmt.arch.fields import as_float, as_int, from_f32
from aprfmt.errors import RefusedError


def _one_for_all_to_gguf(value: object, scope: Scope) -> list[float] | None:
    """A number repeated per layer; 0 is none."""
    number = as_float(value, scope.name)
    return [number] * scope.h.num_layers if number and scope.h.num_layers else None


def _one_for_all_from_gguf(value: object, scope: Scope) -> object:
    found = value[0] if isinstance(value, list) and value else value
    return from_f32(found, scope.key.gguf) or 0.0


def _some_groups_to_gguf(value: object, scope: Scope) -> object:
    """The number of expert groups; None if every group is selected, which llama.cpp does not support."""
    groups, used = (scope.size(name) or 1 for name in ("n_group", "topk_group"))
    return None if groups > 1 and used >= groups else value


some_groups = Converter(_some_groups_to_gguf, lambda value, scope: 1 if value is None else value)

DENSE, SPARSE = "dense", "sparse"


def _types(kinds: list[str], scope: Scope) -> object:
    """The MLP type per layer, in every spelling of the family's configs."""
    if not any("moe_layer_freq" in key.hf for key in scope.row.keys):
        return kinds
    return ConfigKeys(mlp_layer_types=kinds, moe_layer_freq=[int(kind == SPARSE) for kind in kinds])


def after(n_dense: int, n_layers: int) -> list[str]:
    """MLP types of `n_layers` layers, the first `n_dense` of them dense."""
    return [DENSE if i < n_dense else SPARSE for i in range(n_layers)]


def _dense_normalize(value: object, scope: Scope) -> object:
    """From a list of words or flags, else from the number of leading dense layers, which defaults to 1."""
    extra, n_layers = scope.h.extra, scope.h.num_layers
    flags = extra.get("moe_layer_freq")
    first = as_int(extra.pop("first_k_dense_replace", None), "first_k_dense_replace")
    if isinstance(value, list):
        return _types([str(kind) for kind in value], scope)
    if isinstance(flags, list):
        return _types([SPARSE if flag else DENSE for flag in flags], scope)
    return DEFAULT if n_layers is None else _types(after(1 if first is None else first, n_layers), scope)


def _dense_from_gguf(value: object, scope: Scope) -> object:
    """From the tensors: llama.cpp has no key for it."""
    n_layers = scope.h.num_layers or 0
    if not scope.names:
        return _types(after(1, n_layers), scope)
    routed = [f"blk.{i}.ffn_gate_inp.weight" in scope.names for i in range(n_layers)]
    return _types([SPARSE if one else DENSE for one in routed], scope)


def counted_dense_to_gguf(value: object, scope: Scope) -> int | None:
    """The number of leading dense layers, if no others are dense."""
    if not isinstance(value, list):
        return None
    n_dense = next((i for i, kind in enumerate(value) if kind != DENSE), len(value))
    if DENSE in value[n_dense:]:
        raise RefusedError(f"{scope.name} has dense layers after MoE layers, which llama.cpp does not support")
    return n_dense


def counted_dense_from_gguf(value: object, scope: Scope) -> object:
    """MLP types from the number of leading dense layers."""
    return after(as_int(value, scope.key.gguf) or 0, scope.h.num_layers or 0)


def width_of_experts(value: object, scope: Scope) -> int | None:
    """A number of experts as the width of one as wide as all of them."""
    count, width = as_int(value, scope.name), scope.h.moe_intermediate_size
    return None if count is None or width is None else count * width


def _limits_to_gguf(value: object, scope: Scope) -> list[float] | None:
    """Clamp limits of the gated values, 0 for layers without one."""
    return [as_float(item, scope.name) or 0.0 for item in value] if isinstance(value, list) else None


def _limits_from_gguf(value: object, scope: Scope) -> object:
    items = [from_f32(item, scope.key.gguf) for item in value] if isinstance(value, list) else []
    return [item or None for item in items] if items else DEFAULT


dense_by_tensors = Converter(nothing, _dense_from_gguf, normalize=_dense_normalize)
one_for_all = Converter(_one_for_all_to_gguf, _one_for_all_from_gguf)
limits = Converter(_limits_to_gguf, _limits_from_gguf)
same_limit = Converter(lambda value, scope: _one_for_all_to_gguf(scope.h.extra.get("swiglu_limit"), scope), default)
