"""Building blocks of rows: decoders with routed experts."""

from __future__ import annotations

from dataclasses import replace

from aprfmt.arch.blocks.decoder import (
    DIMS, EXPERTS, GROUPED, HEAD_DIM, RMS_EPS, ROPE, SILU, block, embedding, experts, final_norm, flag, fused_experts,
    head, linear, must_be, norm, rename, tensor,
)
from aprfmt.arch.converters.common import (
    absent_0, absent_1_0, absent_false, drafts, equal_heads, leading_dense, shared_width, some_drafts,
)
from aprfmt.arch.converters.experts import some_groups
from aprfmt.arch.row import OPTIONAL, REQUIRED, Key, TensorRow


COUNT, USED, WIDTH = EXPERTS
GROUPS = (
    Key("expert_group_count", ("n_group",), converter=some_groups),
    Key("expert_group_used_count", ("topk_group",), converter=some_groups),
)
SHARED_COUNT = Key("expert_shared_count", ("n_shared_experts",))
MLP_LAYER_TYPES = Key("", ("mlp_layer_types",), "str[]", converter=leading_dense)
"""Which layers are dense: only the first ones."""
NUM_SHARED_EXPERTS = Key("expert_shared_count", ("num_shared_experts",))
SHARED_WIDTH = Key("expert_shared_feed_forward_length", converter=shared_width)
DENSE_LAYERS = Key("leading_dense_block_count", ("first_k_dense_replace",), converter=absent_0)
WEIGHTS_SCALE = Key("expert_weights_scale", ("routed_scaling_factor",), "f32", converter=absent_1_0)
WEIGHTS_NORM = Key("expert_weights_norm", ("norm_topk_prob",), "bool", converter=absent_false)
SIGMOID = Key("expert_gating_func", constant=2)
ALL_SPARSE = (must_be("decoder_sparse_step", 1), must_be("mlp_only_layers", []))
"""llama.cpp loads experts in every layer."""
BIAS_FLAG = flag("attention_bias")
NO_BIAS = must_be("attention_bias", False)
EQUAL_HEADS = Key("", converter=equal_heads)
"""llama.cpp supports as many key-value heads as heads only."""


def moe_keys(*family: Key, count: str = "num_experts", used: str = "num_experts_per_tok") -> tuple[Key, ...]:
    """A decoder's keys with those of the experts, named `count` and `used` in config.json, and the family's own."""
    counts = (count, *(name for name in COUNT.hf if name != count))
    routed = rename((COUNT, USED), num_experts=counts, num_experts_per_tok=(used,))
    return (*DIMS, GROUPED, ROPE, RMS_EPS, *routed, HEAD_DIM, *family, SILU)


def moe_decoder(*layer: TensorRow, norm_bias: str | None = None, head_bias: str | None = None) -> tuple[TensorRow, ...]:
    """A decoder with a norm before attention and one before the MLP."""
    return (
        embedding(),
        *block(
            *norm("input_layernorm", "attn_norm", bias=norm_bias),
            *norm("post_attention_layernorm", "ffn_norm", bias=norm_bias), *layer,
        ),
        *final_norm(bias=norm_bias), *head(bias=head_bias),
    )


def router_and_experts(layers: str = "", bias: tuple[TensorRow, ...] = ()) -> tuple[TensorRow, ...]:
    """Router and experts under `mlp`, one tensor per expert or all of them in one."""
    return (
        *linear("mlp.gate", "ffn_gate_inp", "experts,hidden", layers=layers), *bias, *experts(layers=layers),
        *fused_experts("mlp.experts.gate_up_proj", "mlp.experts.down_proj", layers=layers),
    )


def packed_experts(
    hf: str, names: tuple[str, str, str], endings: tuple[str, str], pack: str, *, width: str = "hidden",
    layers: str = "",
) -> tuple[TensorRow, ...]:
    """Gate, up and down projection of each expert in MXFP4: `endings` of the tensors with values and scales.

    `width` is the input and output width of the experts.
    """

    def stacked(name: str, gguf: str, rows: str, columns: str) -> TensorRow:
        return TensorRow(
            tuple(f"{hf}{name}.{ending}" for ending in endings), (f"{gguf}.weight",),
            (f"{rows},{columns}/2", f"{rows},{columns}/32"), gguf_dims=(f"experts,{rows},{columns}",), layers=layers,
            pack=pack,
        )

    gate, up, down = names
    return (
        stacked(gate, "ffn_gate_exps", "moe_ffn", width), stacked(up, "ffn_up_exps", "moe_ffn", width),
        stacked(down, "ffn_down_exps", width, "moe_ffn"),
    )


def shared_expert(
    hf: str, width: str, need: str = REQUIRED, layers: str = "", bias: str | None = None
) -> tuple[TensorRow, ...]:
    """The shared expert's gate, up and down projection, with its width in size words."""
    return (
        *linear(f"{hf}.gate_proj", "ffn_gate_shexp", f"{width},hidden", bias, need, layers=layers),
        *linear(f"{hf}.up_proj", "ffn_up_shexp", f"{width},hidden", bias, need, layers=layers),
        *linear(f"{hf}.down_proj", "ffn_down_shexp", f"hidden,{width}", bias, need, layers=layers),
    )


def selection_bias(layers: str = "moe", need: str = REQUIRED) -> TensorRow:
    """The bias added to the scores for expert selection."""
    return tensor("mlp.gate.e_score_correction_bias", "exp_probs_b.bias", "experts", need, layers=layers)


MTP = Key("nextn_predict_layers", ("num_nextn_predict_layers",), converter=some_drafts)
"""The number of MTP layers, which a GGUF states only if it has any."""


MTP_OR_0 = replace(MTP, converter=drafts)
"""The same, which a GGUF states even if there are none."""


def draft_layer(value: str = "", norm_after: str = "shared_head.norm") -> tuple[TensorRow, ...]:
    """The tensors that an MTP layer has in addition to those of a layer; it follows the last layer.

    `value` maps the values of its norms, `norm_after` is the name of the norm before its head.
    """
    matrices = {"embed_tokens": "embed_tokens", "shared_head.head": "shared_head_head"}
    rows = (
        *linear("eh_proj", "nextn.eh_proj", "hidden,2*hidden"), *norm("enorm", "nextn.enorm", value=value),
        *norm("hnorm", "nextn.hnorm", value=value),
        *norm(norm_after, "nextn.shared_head_norm", need=OPTIONAL, value=value),
        *(row for hf, gguf in matrices.items() for row in linear(hf, f"nextn.{gguf}", "vocab,hidden", need=OPTIONAL)),
    )
    return tuple(replace(row, layers="draft") for row in rows)


def mtp_names(layer: str = "model.layers.{n}.", prefix: str = "mtp.") -> tuple[tuple[str, str], ...]:
    """Checkpoint names of MTP layers with names of their own, and the row's names (see draft_layer)."""
    beside = {
        "fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "norm": "shared_head.norm",
    }
    return (
        *((f"{prefix}{own}.", f"{layer}{name}.") for own, name in beside.items()), (f"{prefix}layers.{{m}}.", layer),
    )


def mixtral_experts() -> tuple[TensorRow, ...]:
    """A router and experts under Mixtral's names."""
    return (
        *linear("block_sparse_moe.gate", "ffn_gate_inp", "experts,hidden"),
        *experts("block_sparse_moe.experts.{e}.", ("w1", "w3", "w2")),
    )
