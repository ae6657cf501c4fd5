"""Rows of the architecture table: Qwen3-Next and Qwen3.5, whose layers are gated delta nets or gated attention."""

from __future__ import annotations

from dataclasses import replace

from aprfmt.arch.row import Architecture, Key, TensorRow
from aprfmt.arch.rows.parts import (
    DIMS, EXPERTS, GROUPED, HEAD_DIM, RMS_EPS, ROPE, ROPE_DIM, More, class_names, convert, gated_mlp, linear, must_be,
    network, norm, split, tensor,
)
from aprfmt.arch.rows.parts_moe import MTP, draft_layer, mtp_names, router_and_experts, shared_expert

_K_HEADS, _V_HEADS = "linear_num_key_heads", "linear_num_value_heads"
_K_DIM, _V_DIM = "linear_key_head_dim", "linear_value_head_dim"
_K, _V = f"{_K_HEADS}*{_K_DIM}", f"{_V_HEADS}*{_V_DIM}"
_QKV = f"2*{_K}+{_V}"
_RUN = f"{_V}/{_K_HEADS}"
"""Rows of V (and of Z) that go with one head of K."""
_TILED = f"1,{_K_HEADS},{_V_HEADS}/{_K_HEADS}"
"""Heads of V: Hugging Face has those of a head of K together, GGUF the first of each head of K, then the second."""
_V_ORDER, _QKV_ORDER = (f"swap:{_TILED}",), (f"tail:2*{_K},{_TILED}",)


def _attention() -> tuple[TensorRow, ...]:
    """Attention of the full_attention layers; the rows of Q hold a gate behind each head."""
    bias, at = "attention_bias", More(layers="full_attention|draft")
    return (
        *linear("self_attn.q_proj", "attn_q", "2*q,hidden", bias, **at),
        *linear("self_attn.k_proj", "attn_k", "kv,hidden", bias, **at),
        *linear("self_attn.v_proj", "attn_v", "kv,hidden", bias, **at),
        *linear("self_attn.o_proj", "attn_output", "hidden,q", bias, **at),
        *norm("self_attn.q_norm", "attn_q_norm", "head_dim", layers="full_attention|draft", value="plus_one"),
        *norm("self_attn.k_norm", "attn_k_norm", "head_dim", layers="full_attention|draft", value="plus_one"),
    )


def _delta_net(*projections: TensorRow, tiled: bool) -> tuple[TensorRow, ...]:
    """The linear_attention layers; `tiled` where GGUF has the heads of V in another order."""
    v_order, qkv_order = (_V_ORDER, _QKV_ORDER) if tiled else ((), ())
    kernel = "linear_conv_kernel_dim"
    rows = (
        *projections, tensor("A_log", "ssm_a", _V_HEADS, order=v_order, value="minus_exp"),
        tensor("dt_bias", "ssm_dt.bias", _V_HEADS, order=v_order),
        tensor(
            "conv1d.weight", "ssm_conv1d.weight", f"{_QKV},1,{kernel}", gguf_dims=(f"{_QKV},{kernel}",), order=qkv_order
        ),
        *norm("norm", "ssm_norm", _V_DIM), *linear("out_proj", "ssm_out", f"hidden,{_V}", columns=v_order),
    )
    return tuple(
        replace(row, hf=tuple(f"linear_attn.{name}" for name in row.hf), layers="linear_attention") for row in rows
    )


_FUSED = _delta_net(
    split(
        "in_proj_qkvz.weight", f"{_QKV}+{_V},hidden",
        {"attn_qkv.weight": f"{_QKV},hidden", "attn_gate.weight": f"{_V},hidden"},
        order=(f"deal:{_K_HEADS},{_K_DIM},{_K_DIM},{_RUN},{_RUN}",),
    ),
    *linear("in_proj_ba", "ssm_ba", f"2*{_V_HEADS},hidden"),
    tiled=False,
)
"""Qwen3-Next: one projection for Q, K, V and Z, dealt out by the heads of K; another for beta and alpha."""

_SEPARATE = _delta_net(
    *linear("in_proj_qkv", "attn_qkv", f"{_QKV},hidden", order=_QKV_ORDER),
    *linear("in_proj_z", "attn_gate", f"{_V},hidden", order=_V_ORDER),
    *linear("in_proj_b", "ssm_beta", f"{_V_HEADS},hidden", order=_V_ORDER),
    *linear("in_proj_a", "ssm_alpha", f"{_V_HEADS},hidden", order=_V_ORDER),
    tiled=True,
)

_MLP = gated_mlp()
_EXPERTS = (
    *router_and_experts(), *shared_expert("mlp.shared_expert", "shared_expert_intermediate_size"),
    *linear("mlp.shared_expert_gate", "ffn_gate_inp_shexp", "1,hidden"),
)


def _decoder(*layer: TensorRow) -> tuple[TensorRow, ...]:
    return network(
        *norm("input_layernorm", "attn_norm", value="plus_one"), *_attention(), *layer,
        *norm("post_attention_layernorm", "post_attention_norm", value="plus_one"), *draft_layer("plus_one"),
        norm_value="plus_one",
    )


def _keys(*family: Key, experts: bool) -> tuple[Key, ...]:
    count, used, width = EXPERTS
    return (
        *(convert(DIMS, intermediate_size="if_given") if experts else DIMS), GROUPED, ROPE, RMS_EPS,
        *((count, used) if experts else ()), HEAD_DIM,
        *((width, Key("expert_shared_feed_forward_length", ("shared_expert_intermediate_size",))) if experts else ()),
        Key("ssm.conv_kernel", ("linear_conv_kernel_dim",)), Key("ssm.state_size", (_K_DIM,)),
        Key("ssm.group_count", (_K_HEADS,)), Key("ssm.time_step_rank", (_V_HEADS,)),
        Key("ssm.inner_size", (_V_DIM,), via="inner_size"),
        Key("attention.recurrent_layers", ("layer_types",), "bool[]", via="recurrent_layers", draft=False),
        Key("full_attention_interval", ("full_attention_interval",)), ROPE_DIM, must_be("attention_bias", False),
        must_be("hidden_act", "silu"), replace(MTP, hf=("mtp_num_hidden_layers", *MTP.hf)), *family,
    )


_DEFAULTS = {
    "hidden_act": "silu", "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    "attention_bias": False, "head_dim": 256, "partial_rotary_factor": 0.25, "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_SECTIONS = Key("rope.dimension_sections", (), "i32[]", via="qwen3_5_sections")


def _qwen3_5(
    id: str, gguf: str, name: str, layer: tuple[TensorRow, ...], keys: tuple[Key, ...], defaults: dict[str, object]
) -> Architecture:
    """Text model of Qwen3.5, alone or in a folder with a vision tower."""
    model_type = f"{id}_text"
    classes = (f"{name}ForCausalLM", f"{name}TextModel")
    return Architecture(
        id=model_type, required={"rope.dimension_sections": ""}, gguf=gguf, hf_class=classes[0], model_type=model_type,
        hf_classes=(*classes, f"{name}ForConditionalGeneration", f"{name}Model"), bare_classes=(classes[1],),
        model_types=(model_type, id),
        tensors=_decoder(*_SEPARATE, *layer), keys=(*keys, _SECTIONS), drafts=mtp_names(),
        defaults={"": _DEFAULTS | defaults},
    )


_QWEN3_5_ROW = _qwen3_5("qwen3_5", "qwen35", "Qwen3_5", _MLP, _keys(experts=False), {"num_key_value_heads": 4})
_TEMPERATURES = {"choice": 0.85, "score": 0.85, "noul": 0.85 * 1.829074}
"""What OpenJev divides the logits of answers by, for each type of question."""

ROWS: tuple[Architecture, ...] = (
    Architecture(
        id="qwen3_next", gguf="qwen3next",
        **class_names("Qwen3NextForCausalLM", "Qwen3NextModel", types=("qwen3_next",), bare=("Qwen3NextModel",)),
        tensors=_decoder(*_FUSED, *_EXPERTS), drafts=mtp_names(),
        keys=_keys(must_be("norm_topk_prob", True), experts=True),
        defaults={"": {
            **_DEFAULTS, "num_key_value_heads": 2, "num_experts": 512, "num_experts_per_tok": 10,
            "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
        }},
    ),
    _QWEN3_5_ROW,
    replace(
        _QWEN3_5_ROW, id="openjev", hf_class="OpenJevModel", hf_classes=("OpenJevModel",), bare_classes=(),
        model_types=(), when="decision.type=openjev",
        keys=(
            *_QWEN3_5_ROW.keys, Key("decision.type", kind="str", constant="openjev"),
            *(Key(f"decision.temperature.{kind}", kind="f32", constant=t) for kind, t in _TEMPERATURES.items()),
        ),
    ),
    _qwen3_5(
        "qwen3_5_moe", "qwen35moe", "Qwen3_5Moe", _EXPERTS, _keys(experts=True),
        {
            "num_key_value_heads": 2, "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
        },
    ),
)
