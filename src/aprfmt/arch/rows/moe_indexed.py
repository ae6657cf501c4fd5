"""Rows of the architecture table: decoders with experts that attend to chosen blocks of positions."""

from __future__ import annotations

from dataclasses import replace

from aprfmt.arch.converter import DEFAULT, Converter, Scope
from aprfmt.arch.converters.common import gating
from aprfmt.arch.converters.experts import DENSE, SPARSE, counted_dense_from, counted_dense_to, width_of_experts
from aprfmt.arch.converters.layers import flags_of
from aprfmt.arch.fields import as_int
from aprfmt.arch.grammar import BLOCKWISE
from aprfmt.arch.row import Architecture, Key, TensorRow
from aprfmt.arch.rows.parts import (
    ROPE_DIM, SILU, attention, experts, gated_mlp, hf_names, linear, must_be, network, norm, rename, tensor,
)
from aprfmt.arch.rows.parts_moe import WEIGHTS_SCALE, WIDTH, moe_keys, shared_expert
from aprfmt.errors import RefusedError


_FREQUENCY = "sparse_attention_config.sparse_attention_freq"


def _counted_dense_normalize(value: object, scope: Scope) -> object:
    flags = scope.h.extra.pop("moe_layer_freq", None)
    if value is not None or scope.h.num_layers is None:
        return DEFAULT
    if flags is None:
        return [SPARSE] * scope.h.num_layers
    return [SPARSE if flag else DENSE for flag in flags_of(flags, "moe_layer_freq")]


def _where_sparse(scope: Scope) -> list[str]:
    """Blocks are chosen in the layers with experts: what llama.cpp takes for granted."""
    kinds = scope.h.extra.get("mlp_layer_types")
    return ["full_attention" if kind == DENSE else BLOCKWISE for kind in kinds] if isinstance(kinds, list) else []


def _where_sparse_normalize(value: object, scope: Scope) -> object:
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


def _whole_experts(value: object, scope: Scope) -> int | None:
    """A width as a number of experts of the others' width."""
    total, width = as_int(value, scope.name), scope.h.moe_intermediate_size
    if total is None or not width:
        return None
    if total % width:
        raise RefusedError(f"{scope.name} is {total}: llama.cpp's {scope.row.gguf} knows multiples of {width} only")
    return total // width


over_moe_width = Converter(_whole_experts, lambda value, scope: width_of_experts(value, scope) or DEFAULT)
counted_dense = Converter(counted_dense_to, counted_dense_from, normalize=_counted_dense_normalize)
indexed_where_sparse = Converter(
        _where_sparse_to, lambda value, scope: _where_sparse(scope), normalize=_where_sparse_normalize
    )

_SPARSE = "sparse_attention_config."
_PLUS_ONE = "plus_one"


def _blocks() -> tuple[TensorRow, ...]:
    """What scores blocks of positions: heads of their own for queries, one key."""
    size, layers = "index_head_dim", "indexer"
    return (
        *linear("self_attn.index_q_proj", "indexer.q_proj", f"index_n_heads*{size},hidden", layers=layers),
        *linear("self_attn.index_k_proj", "indexer.k_proj", f"{size},hidden", layers=layers),
        *norm("self_attn.index_q_norm", "indexer.q_norm", size, value=_PLUS_ONE, layers=layers),
        *norm("self_attn.index_k_norm", "indexer.k_norm", size, value=_PLUS_ONE, layers=layers),
    )


ROWS: tuple[Architecture, ...] = (
    Architecture(
        id="minimax_m3",
        required={
            "expert_gating_func": "", "expert_shared_count": "",
            **{f"attention.indexer.{name}": "" for name in ("head_count", "key_length", "top_k")},
            **{f"attention.indexer.{name}": "" for name in ("block_size", "local_blocks")},
        },
        gguf="minimax-m3", **hf_names("MiniMaxM3Sparse", "minimax_m3_vl_text", also=("minimax_m3",)), head_always=True,
        tensors=network(
            *norm("input_layernorm", "attn_norm", value=_PLUS_ONE), *attention(),
            *norm("self_attn.q_norm", "attn_q_norm", "head_dim", value=_PLUS_ONE),
            *norm("self_attn.k_norm", "attn_k_norm", "head_dim", value=_PLUS_ONE), *_blocks(),
            *norm("post_attention_layernorm", "ffn_norm", value=_PLUS_ONE),
            *linear("block_sparse_moe.gate", "ffn_gate_inp", "experts,hidden", layers="moe"),
            tensor("block_sparse_moe.e_score_correction_bias", "exp_probs_b.bias", "experts", layers="moe"),
            *experts("block_sparse_moe.experts.{e}.", ("w1", "w3", "w2"), layers="moe"),
            *shared_expert("block_sparse_moe.shared_experts", "shared_intermediate_size", layers="moe"),
            *gated_mlp(layers="dense"),
            norm_value=_PLUS_ONE,
        ),
        keys=(
            *(
                key
                for key in rename(moe_keys(count="num_local_experts"), intermediate_size="dense_intermediate_size")
                if key != SILU
            ),
            replace(WIDTH, hf=("intermediate_size",)),
            Key("expert_shared_count", ("shared_intermediate_size",), converter=over_moe_width),
            must_be("n_shared_experts", 1), WEIGHTS_SCALE, Key("expert_weights_norm", kind="bool", constant=True),
            Key("expert_gating_func", ("scoring_func",), converter=gating, allowed=("sigmoid",)),
            replace(ROPE_DIM, hf=("rotary_dim",)),
            Key("attention.indexer.head_count", ("index_n_heads", f"{_SPARSE}sparse_num_index_heads")),
            Key("attention.indexer.key_length", ("index_head_dim", f"{_SPARSE}sparse_index_dim")),
            Key("attention.indexer.top_k", ("index_topk_blocks", f"{_SPARSE}sparse_topk_blocks")),
            Key("attention.indexer.block_size", ("index_block_size", f"{_SPARSE}sparse_block_size")),
            Key("attention.indexer.local_blocks", ("index_local_blocks", f"{_SPARSE}sparse_local_block")),
            Key("leading_dense_block_count", ("mlp_layer_types",), converter=counted_dense),
            Key("", ("layer_types",), "str[]", converter=indexed_where_sparse), Key("", ("moe_layer_freq",)),
            Key("", (f"{_SPARSE}sparse_attention_freq",)), must_be("swiglu_alpha", 1.702), must_be("swiglu_limit", 7.0),
            Key("", ("hidden_act",), "str", allowed=("silu", "swigluoai")),
        ),
        gguf_only=(),
        defaults={"": {
            "num_local_experts": 128, "num_experts_per_tok": 4, "num_key_value_heads": 4, "head_dim": 128,
            "intermediate_size": 3072, "dense_intermediate_size": 12288, "shared_intermediate_size": 3072,
            "routed_scaling_factor": 2.0, "scoring_func": "sigmoid", "rotary_dim": 64, "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0, "index_n_heads": 4, "index_head_dim": 128, "index_block_size": 128,
            "index_topk_blocks": 16, "index_local_blocks": 1, "max_position_embeddings": 524288, "rms_norm_eps": 1e-6,
            "rope_theta": 5000000.0, "tie_word_embeddings": False, "bos_token_id": 200034, "eos_token_id": 200020,
            "hidden_act": "silu",
        }},
    ),
)
