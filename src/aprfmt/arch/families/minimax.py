"""MiniMax."""

from __future__ import annotations

from dataclasses import replace

from aprfmt.arch.blocks.decoder import (
    ROPE_DIM, SILU, attention, class_names, experts, gated_mlp, hf_names, linear, must_be, needs, network, norm, rename,
    tensor,
)
from aprfmt.arch.blocks.moe import SIGMOID, WEIGHTS_SCALE, WIDTH, moe_decoder, moe_keys, shared_expert
from aprfmt.arch.blocks.tower import (
    IMAGE, TOWER_WIDTH, USE_GELU, epsilon, layers, mlp, norms, patches_in_time, projector, sees, sizes, tower_attention,
    whole,
)
from aprfmt.arch.converter import DEFAULT, Convert, Converter, Scope, if_given, implied, refuse_if
from aprfmt.arch.converters.common import gating
from aprfmt.arch.converters.experts import (
    DENSE, SPARSE, counted_dense_from_gguf, counted_dense_to_gguf, width_of_experts,
)  # fmt: skip
from aprfmt.arch.converters.layers import flags_of
from aprfmt.arch.fields import as_int
from aprfmt.arch.grammar import BLOCKWISE
from aprfmt.arch.row import REQUIRED, Architecture, Key, TensorRow, Tower
from aprfmt.errors import RefusedError


_EIGHTH = 8
"""llama.cpp's default for MiniMax: every eighth layer has full attention."""


def _lightning_layers_to_gguf(value: object, scope: Scope) -> list[bool] | None:
    if not isinstance(value, list):
        return None
    recurrent = [not mark for mark in value]
    return None if recurrent == [bool((i + 1) % _EIGHTH) for i in range(len(value))] else recurrent


def _lightning_layers_from_gguf(value: object, scope: Scope) -> object:
    if isinstance(value, list):
        return [int(not flag) for flag in value]
    period = as_int(scope.gguf("full_attention_interval"), "full_attention_interval") or _EIGHTH
    return [int((i + 1) % period == 0) for i in range(scope.h.num_layers or 0)]


_ALPHA = "layernorm_full_attention_alpha"
same_alpha = Converter(
    refuse_if(
        lambda value, scope: value != scope.h.extra.get(_ALPHA),
        "{name} is {value}: llama.cpp's {gguf} has one residual scale",
    ),
    lambda value, scope: scope.h.extra.get(_ALPHA),
)
lightning_layers = Converter(_lightning_layers_to_gguf, _lightning_layers_from_gguf)
_LIGHTNING, _ATTENTION = "linear_attention", "full_attention"
_SCALES = ("layernorm_full_attention", "layernorm_linear_attention", "layernorm_mlp")
_FREQUENCY = "sparse_attention_config.sparse_attention_freq"


def _by_flags(name: str, yes: str, no: str, silent: str) -> Convert:
    """Layer types from the flags of an older key, `silent` everywhere without it."""

    def normalize(value: object, scope: Scope) -> object:
        flags, n_layers = scope.h.extra.pop(name, None), scope.h.num_layers
        if value is not None or n_layers is None:
            return DEFAULT
        return [silent] * n_layers if flags is None else [yes if flag else no for flag in flags_of(flags, name)]

    return normalize


def _where_sparse(scope: Scope) -> list[str]:
    """Blocks are selected in the MoE layers: llama.cpp implies it."""
    kinds = scope.h.extra.get("mlp_layer_types")
    return ["full_attention" if kind == DENSE else BLOCKWISE for kind in kinds] if isinstance(kinds, list) else []


def _whole_experts(value: object, scope: Scope) -> int | None:
    """A width as a number of experts of the others' width."""
    total, width = as_int(value, scope.name), scope.h.moe_intermediate_size
    if total is None or not width:
        return None
    if total % width:
        raise RefusedError(f"{scope.name} is {total}: llama.cpp's {scope.row.gguf} supports multiples of {width} only")
    return total // width


over_moe_width = Converter(_whole_experts, lambda value, scope: width_of_experts(value, scope) or DEFAULT)
per_kv_head = Converter(
    refuse_if(
        lambda value, scope: value is not None and value != scope.h.num_kv_heads,
        "{name} is {value}: llama.cpp's {gguf} has one index head per key-value head ({h.num_kv_heads})",
    ),
)
within_chosen = Converter(
    refuse_if(
        lambda value, scope: (as_int(value, scope.name) or 0) > (scope.size("index_topk_blocks") or 0),
        "{name} is {value}, more than index_topk_blocks: llama.cpp and transformers select different blocks among them",
    ),
)
counted_dense = Converter(
    counted_dense_to_gguf, counted_dense_from_gguf, normalize=_by_flags("moe_layer_freq", SPARSE, DENSE, SPARSE),
)
indexed_where_sparse = implied(
    _where_sparse, "{name}: llama.cpp's {gguf} has block-sparse attention in exactly the MoE layers",
    normalize=_by_flags(_FREQUENCY, BLOCKWISE, "full_attention", "full_attention"),
)
_SPARSE = "sparse_attention_config."
_PLUS_ONE = "plus_one"


def _blocks() -> tuple[TensorRow, ...]:
    """The block indexer: separate query heads, one key."""
    size, layers = "index_head_dim", "indexer"
    return (
        *linear("self_attn.index_q_proj", "indexer.q_proj", f"index_n_heads*{size},hidden", layers=layers),
        *linear("self_attn.index_k_proj", "indexer.k_proj", f"{size},hidden", layers=layers),
        *norm("self_attn.index_q_norm", "indexer.q_norm", size, value=_PLUS_ONE, layers=layers),
        *norm("self_attn.index_k_norm", "indexer.k_norm", size, value=_PLUS_ONE, layers=layers),
    )


_M3_V = "vision_tower.vision_model."
_M3_TURN = ("each:num_attention_heads,80,2,3,13",)
"""Q and K of a head: halves of three directions each become three directions of two halves; two rows stay."""


ROWS: tuple[Architecture, ...] = (
    Architecture(
        id="minimax_m3", gguf="minimax-m3", **hf_names("MiniMaxM3Sparse", "minimax_m3_vl_text", also=("minimax_m3",)),
        tensors=network(
            *norm("input_layernorm", "attn_norm", value=_PLUS_ONE), *attention(),
            *norm("self_attn.q_norm", "attn_q_norm", "head_dim", value=_PLUS_ONE),
            *norm("self_attn.k_norm", "attn_k_norm", "head_dim", value=_PLUS_ONE), *_blocks(),
            *norm("post_attention_layernorm", "ffn_norm", value=_PLUS_ONE),
            *linear("block_sparse_moe.gate", "ffn_gate_inp", "experts,hidden", layers="moe"),
            tensor("block_sparse_moe.e_score_correction_bias", "exp_probs_b.bias", "experts", layers="moe"),
            *experts("block_sparse_moe.experts.{e}.", ("w1", "w3", "w2"), layers="moe"),
            *shared_expert("block_sparse_moe.shared_experts", "shared_intermediate_size", layers="moe"),
            *gated_mlp(layers="dense"), norm_value=_PLUS_ONE,
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
            Key(
                "attention.indexer.head_count", ("index_n_heads", f"{_SPARSE}sparse_num_index_heads"),
                converter=per_kv_head,
            ),
            Key("attention.indexer.key_length", ("index_head_dim", f"{_SPARSE}sparse_index_dim")),
            Key("attention.indexer.top_k", ("index_topk_blocks", f"{_SPARSE}sparse_topk_blocks")),
            Key("attention.indexer.block_size", ("index_block_size", f"{_SPARSE}sparse_block_size")),
            Key(
                "attention.indexer.local_blocks", ("index_local_blocks", f"{_SPARSE}sparse_local_block"),
                converter=within_chosen,
            ),
            Key("leading_dense_block_count", ("mlp_layer_types",), converter=counted_dense),
            Key("", ("layer_types",), "str[]", converter=indexed_where_sparse), Key("", ("moe_layer_freq",)),
            Key("", (f"{_SPARSE}sparse_attention_freq",)), must_be("swiglu_alpha", 1.702), must_be("swiglu_limit", 7.0),
            Key("", ("hidden_act",), "str", allowed=("silu", "swigluoai")),
        ),
    ),
    Architecture(
        id="minimax_m2", gguf="minimax-m2", **hf_names("MiniMaxM2", "minimax_m2"),
        tensors=moe_decoder(
            *attention(qk_norm="q"), *linear("block_sparse_moe.gate", "ffn_gate_inp", "experts,hidden"),
            tensor("block_sparse_moe.e_score_correction_bias", "exp_probs_b.bias", "experts"),
            *experts("block_sparse_moe.experts.{e}.", ("w1", "w3", "w2")),
        ),
        keys=moe_keys(
            SIGMOID, Key("expert_feed_forward_length", ("intermediate_size",), field="intermediate_size"),
            *needs("expert_gating_func", "feed_forward_length"),
            replace(ROPE_DIM, hf=("rotary_dim",)), count="num_local_experts",
        ),
    ),
    Architecture(
        id="minimax_text_01", gguf="minimax-01",
        **class_names("MiniMaxText01ForCausalLM", "MiniMaxM1ForCausalLM", types=("minimax_text_01", "minimax_m1")),
        tensors=moe_decoder(
            *linear("self_attn.qkv_proj", "attn_qkv", "3*q,hidden", layers=_LIGHTNING),
            *norm("self_attn.norm", "attn_norm_2", "q", layers=_LIGHTNING),
            *linear("self_attn.output_gate", "attn_gate", "q,hidden", layers=_LIGHTNING),
            *linear("self_attn.out_proj", "attn_output", "hidden,q", layers=_LIGHTNING), *attention(layers=_ATTENTION),
            *linear("block_sparse_moe.gate", "ffn_gate_inp", "experts,hidden"),
            *experts("block_sparse_moe.experts.{e}.", ("w1", "w3", "w2")),
        ),
        keys=(
            *moe_keys(count="num_local_experts"),
            Key("residual_scale", (f"{_SCALES[0]}_alpha",), "f32", converter=if_given),
            *(Key("", (f"{name}_alpha",), "f32", converter=same_alpha) for name in _SCALES[1:]),
            *(must_be(f"{name}_beta", 1.0) for name in _SCALES), ROPE_DIM,
            Key("attention.recurrent_layers", ("attn_type_list",), "bool[]", converter=lightning_layers),
            must_be("postnorm", True), must_be("shared_intermediate_size", 0),
        ),
    ),
)

TOWERS: tuple[Tower, ...] = (
    Tower(
        id="minimax_m3_vision",
        **whole(
            "MiniMaxM3SparseForConditionalGeneration", "MiniMaxM3VLForConditionalGeneration", types=("minimax_m3_vl",),
        ),
        when="projector_type=minimax_m3",
        tensors=(
            *patches_in_time(f"{_M3_V}embeddings.patch_embedding"),
            *norm(f"{_M3_V}pre_layrnorm", "v.pre_ln", TOWER_WIDTH, REQUIRED),
            *layers(
                *norms("layer_norm1", "layer_norm2"), *tower_attention(order=_M3_TURN), *mlp(),
                hf=f"{_M3_V}encoder.layers.{{n}}.",
            ),
            *linear("multi_modal_projector.linear_1", "mm.1", f"projector_hidden_size,{TOWER_WIDTH}", REQUIRED),
            *linear("multi_modal_projector.linear_2", "mm.2", "hidden,projector_hidden_size", REQUIRED),
            *linear(
                "patch_merge_mlp.linear_1", "mm.merger.fc1",
                "projector_hidden_size,hidden*spatial_merge_size*spatial_merge_size", REQUIRED,
            ),
            *linear("patch_merge_mlp.linear_2", "mm.merger.fc2", "hidden,projector_hidden_size", REQUIRED),
        ),
        keys=sees(
            *sizes(), *IMAGE, projector("minimax_m3"), USE_GELU, epsilon("vision", "vision_config.layer_norm_eps"),
            Key(
                "vision.spatial_merge_size",
                ("vision_config.img_token_compression_config.spatial_merge_size", "vision_config.spatial_merge_size"),
            ),
            Key("", ("projector_hidden_size",)),
        ),
        config={"vision_config.model_type": "minimax_m3_vl_vision"},
    ),
)
