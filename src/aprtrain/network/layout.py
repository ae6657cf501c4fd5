"""Maps the parameters of a network to checkpoint tensors, from its row of the architecture table."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from math import prod
from typing import NamedTuple

from aprfmt.arch.grammar import dims_of, evaluate, has_layer, is_needed, sizes_of
from aprfmt.arch.hyperparams import Hyperparams
from aprfmt.arch.row import Architecture, TensorRow
from aprfmt.errors import RefusedError, UnsupportedError


class CheckpointRows(NamedTuple):
    """A checkpoint tensor that is a run of rows of a parameter.

    Attributes:
        name: Hugging Face name, with `{n}` for the layer.
        size: its shape.
        axes: its shape in size words: ("q+2*kv", "hidden").
    """

    name: str
    size: tuple[int, ...]
    axes: tuple[str, ...]

    @property
    def rows(self) -> int:
        """Its number of rows in the parameter."""
        return count_rows(self.size)


def count_rows(size: tuple[int, ...]) -> int:
    """Rows of a parameter that a checkpoint tensor of this size takes: expert matrices are stacked."""
    return prod(size[:-1]) if len(size) > 1 else size[0]


Layout = tuple[tuple[str, tuple[CheckpointRows, ...]], ...]
"""(parameter, its parts in the order of rows), in the order of the network."""

# GGUF name without layer and suffix -> parameter; matrices with the same input are fused.
_PARAMETERS = {
    "token_embd": "embed", "output_norm": "norm", "token_embd_norm": "norm", "output": "head",
    "attn_norm": "attn_norm", "attn_q": "qkv", "attn_k": "qkv", "attn_v": "qkv", "attn_qkv": "qkv",
    "attn_q_norm": "q_norm", "attn_k_norm": "k_norm", "attn_sinks": "sinks", "attn_output": "out",
    "attn_q_a": "q_a", "attn_q_a_norm": "q_a_norm", "attn_q_b": "q_b",
    "shortconv.in_proj": "conv_in", "shortconv.conv": "conv", "shortconv.out_proj": "out",
    "attn_gate": "qkv", "ssm_beta": "qkv", "ssm_alpha": "qkv", "ssm_ba": "qkv", "ssm_a": "decay", "ssm_dt": "dt",
    "ssm_conv1d": "conv", "ssm_norm": "delta_norm", "ssm_out": "out", "ffn_gate_inp_shexp": "shared_gate",
    "attn_kv_a_mqa": "kv_a", "attn_kv_a_norm": "kv_a_norm", "attn_k_b": "kv_b",
    "post_attention_norm": "attn_post_norm", "ffn_norm": "mlp_norm", "post_ffw_norm": "mlp_post_norm",
    "ffn_gate": "gate_up", "ffn_up": "gate_up", "ffn_down": "down",
    "ffn_gate_inp": "router", "exp_probs_b": "choice",
    "ffn_gate_inp.scale": "router_scale", "ffn_down_exps.scale": "expert_scale", "pre_ffw_norm_2": "experts_norm",
    "post_ffw_norm_1": "mlp_own_norm", "post_ffw_norm_2": "experts_post_norm", "ffn_gate_up_exps": "experts_gate_up",
    "per_layer_token_embd": "ple_embed", "per_layer_model_proj": "ple_proj", "per_layer_proj_norm": "ple_proj_norm",
    "inp_gate": "ple_gate", "proj": "ple_out", "post_norm": "ple_norm", "layer_output_scale": "layer_scale",
    "ffn_gate_exps": "experts_gate_up", "ffn_up_exps": "experts_gate_up", "ffn_down_exps": "experts_down",
    "ffn_gate_shexp": "shared_gate_up", "ffn_up_shexp": "shared_gate_up", "ffn_down_shexp": "shared_down",
}  # fmt: skip

WEIGHTS = tuple(dict.fromkeys(_PARAMETERS.values()))
"""Parameters of all networks, in a fixed order; each may have a `_bias`."""


FLOAT32 = frozenset(("choice_bias",))
"""Parameters that are never rounded: bfloat16 could not tell nearly equal experts apart."""


def layout_of(h: Hyperparams, row: Architecture, layer: int | None, present: Collection[str]) -> Layout:
    """The parameters of a layer, or with None those outside of layers.

    If a family's checkpoints spell a tensor in several ways, the one among the names `present` counts, else the first.
    Raises UnsupportedError for a tensor that the decoder does not have, RefusedError for one of unknown size.
    """
    sizes, found = sizes_of(h, layer), dict[str, list[tuple[int, CheckpointRows]]]()
    for t in _rows(h, row, layer, present):
        name = t.gguf[0].removeprefix("blk.{n}.").removesuffix(".weight")
        stem, is_bias = name.removesuffix(".bias"), name.endswith(".bias")
        if stem not in _PARAMETERS:
            raise UnsupportedError(f"unsupported tensors of a {row.id}: {t.hf[0]}")
        axes = tuple(dims_of(t.dims[0]))
        size = tuple(evaluate(axis, sizes) or 0 for axis in axes)
        if 0 in size:
            raise RefusedError(f"the model lacks {axes[size.index(0)]}", tensor=t.hf[0])
        parts = found.setdefault(_PARAMETERS[stem] + ("_bias" if is_bias else ""), [])
        for expert in _experts(t, sizes):
            parts.append((expert, CheckpointRows(t.hf[0].replace("{e}", str(expert)), size, axes)))
    if "kv_a" in found and "qkv" in found:
        found["q_b"] = found.pop("qkv")
    if "attn_post_norm" in found and not {"mlp_norm", "mlp_post_norm"} & set(found):
        found["mlp_norm"] = found.pop("attn_post_norm")
    in_order = ((name, sorted(parts, key=lambda part: part[0])) for name, parts in found.items())
    return tuple((name, tuple(part for _, part in parts)) for name, parts in in_order)


def _experts(t: TensorRow, sizes: dict[str, int]) -> Iterable[int]:
    return range(evaluate(t.count, sizes) or 0) if "{e}" in t.hf[0] else (0,)


def _rows(h: Hyperparams, row: Architecture, layer: int | None, present: Collection[str]) -> list[TensorRow]:
    chosen: dict[str, TensorRow] = {}
    for t in row.tensors:
        if t.pack or ("{n}" in t.hf[0]) != (layer is not None) or not is_needed(row, t.need, h):
            continue
        if layer is None or has_layer(t.layers, h, layer):
            is_present = t.hf[0].replace("{n}", str(layer)).replace("{e}", "0") in present
            chosen |= {name: t for name in t.gguf if is_present or name not in chosen}
    return list(dict.fromkeys(chosen.values()))
