"""Qwen3-Next and Qwen 3.5: gated delta networks with interleaved attention layers."""

from __future__ import annotations

from dataclasses import replace

from aprfmt.arch.blocks.decoder import (
    DIMS, EXPERTS, GROUPED, HEAD_DIM, RMS_EPS, ROPE, ROPE_DIM, More, block, class_names, convert, embedding, gated_mlp,
    head, linear, must_be, network, norm, split, tensor,
)
from aprfmt.arch.blocks.moe import ALL_SPARSE, MTP, draft_layer, mtp_names, router_and_experts, shared_expert
from aprfmt.arch.converter import DEFAULT, Converter, GgufKeys, Scope, default, if_given, nothing, refuse_if
from aprfmt.arch.converters.common import attending_layers, inner_size, of_tensor, recurrent_layers
from aprfmt.arch.converters.layers import FULL
from aprfmt.arch.fields import as_int, as_mapping
from aprfmt.arch.grammar import layer_kinds
from aprfmt.arch.row import Architecture, Difference, Key, TensorRow
from aprfmt.errors import RefusedError


def _has_table(scope: Scope) -> bool:
    return bool(scope.h.extra.get("ple_layer_ids"))


def _ratios_to_gguf(value: object, scope: Scope) -> list[int] | None:
    ratio, kinds = as_int(value, scope.name), layer_kinds(scope.h.extra, scope.h.num_layers)
    return None if ratio is None or kinds is None else [ratio if kind == FULL else 0 for kind in kinds]


def _ratios_from_gguf(value: object, scope: Scope) -> object:
    ratios = [ratio for ratio in value if isinstance(ratio, int)] if isinstance(value, list) else []
    return max(ratios, default=0) or 1  # llama.cpp attends to everything if a file says 0


def _tables_to_gguf(value: object, scope: Scope) -> list[int] | None:
    """The layer with the table, counted from 0."""
    layers = value if isinstance(value, list) else []
    if len(layers) > 1:
        raise RefusedError(f"{scope.name} is {layers}: llama.cpp's {scope.row.gguf} supports one such layer only")
    return [layer - 1 for layer in layers] or None


def _tables_from_gguf(value: object, scope: Scope) -> list[int]:
    return [layer + 1 for layer in value if isinstance(layer, int)] if isinstance(value, list) else []


def _hashes(scope: Scope) -> int:
    return max(0, (scope.size("ngram_size") or 1) - 1) * (scope.size("heads_per_ngram") or 0)


def _row_width_to_gguf(value: object, scope: Scope) -> int | None:
    if not _has_table(scope):
        return None
    width, heads = as_int(value, scope.name) or scope.h.hidden_size, _hashes(scope)
    if width != scope.h.hidden_size:
        raise RefusedError(f"{scope.name} is {width}: llama.cpp's {scope.row.gguf} supports the hidden size only")
    return width // heads if width and heads and width % heads == 0 else None


def _row_width_from_gguf(value: object, scope: Scope) -> object:
    width, sizes = as_int(value, scope.key.gguf), scope.gguf("ple.head_vocab_sizes")
    return DEFAULT if width is None or not isinstance(sizes, list) else width * len(sizes)


def _first_prime(value: object, scope: Scope) -> object:
    """The rows of the first hash, from which those of the others follow."""
    sizes = scope.gguf("ple.head_vocab_sizes")
    return sizes[0] if isinstance(sizes, list) and sizes and isinstance(sizes[0], int) else DEFAULT


def _parts_from_gguf(value: object, scope: Scope) -> object:
    """One: a GGUF stores the table whole."""
    return 1 if scope.gguf("ple.layers") is not None else DEFAULT


def _output_gate_normalize(value: object, scope: Scope) -> object:
    """The activation of the MLPs, if the config does not state it."""
    return scope.config("hidden_act") if value is None else DEFAULT


def _end_from_gguf(value: object, scope: Scope) -> object:
    if scope.h.eos_token_id is None:
        scope.h.eos_token_id = as_int(value, scope.key.gguf)
    return DEFAULT


ratio_a_layer = Converter(_ratios_to_gguf, _ratios_from_gguf)
table_layers = Converter(_tables_to_gguf, _tables_from_gguf)
of_table = Converter(lambda value, scope: value if _has_table(scope) else None)
end_of_ngrams = Converter(lambda value, scope: scope.h.eos_token_id if _has_table(scope) else None, _end_from_gguf)
output_gate = Converter(nothing, lambda value, scope: "sigmoid", normalize=_output_gate_normalize)
row_width = Converter(_row_width_to_gguf, _row_width_from_gguf)
parts_of_table = Converter(nothing, _parts_from_gguf)


def _sections_to_gguf(value: object, scope: Scope) -> GgufKeys | None:
    """M-RoPE sections that a Qwen3.5 config leaves to its class; llama.cpp needs them."""
    if "mrope_section" in as_mapping(scope.h.extra.get("rope_scaling")):
        return None
    return GgufKeys({"rope.dimension_sections": ("i32[]", [11, 11, 10, 0])})


_K_HEADS, _V_HEADS = "linear_num_key_heads", "linear_num_value_heads"
_K_DIM, _V_DIM = "linear_key_head_dim", "linear_value_head_dim"
_equal_heads = refuse_if(
    lambda value, scope: value != scope.config(_K_DIM), f"{{name}} is {{value}}: llama.cpp's {{gguf}} expects {_K_DIM}"
)
delta_width = replace(inner_size, to_gguf=lambda value, scope: inner_size.to_gguf(_equal_heads(value, scope), scope))
_K, _V = f"{_K_HEADS}*{_K_DIM}", f"{_V_HEADS}*{_V_DIM}"
_QKV = f"2*{_K}+{_V}"
_RUN = f"{_V}/{_K_HEADS}"
"""Rows of V (and of Z) per head of K."""
_TILED = f"1,{_K_HEADS},{_V_HEADS}/{_K_HEADS}"
"""V heads: Hugging Face groups those of a K head, GGUF has the first of each K head, then the second."""
_V_ORDER, _QKV_ORDER = (f"swap:{_TILED}",), (f"tail:2*{_K},{_TILED}",)


def _attention() -> tuple[TensorRow, ...]:
    """Attention of the full_attention layers; Q has a gate after each head."""
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
    """The linear_attention layers; `tiled` if GGUF orders the heads of V differently."""
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
    *linear("in_proj_ba", "ssm_ba", f"2*{_V_HEADS},hidden"), tiled=False,
)
"""Qwen3-Next: one projection for Q, K, V and Z, grouped by the heads of K; another for beta and alpha."""
_SEPARATE = _delta_net(
    *linear("in_proj_qkv", "attn_qkv", f"{_QKV},hidden", order=_QKV_ORDER),
    *linear("in_proj_z", "attn_gate", f"{_V},hidden", order=_V_ORDER),
    *linear("in_proj_b", "ssm_beta", f"{_V_HEADS},hidden", order=_V_ORDER),
    *linear("in_proj_a", "ssm_alpha", f"{_V_HEADS},hidden", order=_V_ORDER), tiled=True,
)
_MLP = gated_mlp()
_EXPERTS = (
    *router_and_experts("moe"), *shared_expert("mlp.shared_expert", "shared_expert_intermediate_size", layers="moe"),
    *linear("mlp.shared_expert_gate", "ffn_gate_inp_shexp", "1,hidden", layers="moe"),
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
        *(convert(DIMS, intermediate_size=if_given) if experts else DIMS), GROUPED, ROPE, RMS_EPS,
        *((count, used) if experts else ()), HEAD_DIM,
        *((width, Key("expert_shared_feed_forward_length", ("shared_expert_intermediate_size",))) if experts else ()),
        Key("ssm.conv_kernel", ("linear_conv_kernel_dim",)), Key("ssm.state_size", (_K_DIM,)),
        Key("ssm.group_count", (_K_HEADS,)), Key("ssm.time_step_rank", (_V_HEADS,)),
        Key("ssm.inner_size", (_V_DIM,), converter=delta_width),
        Key("attention.recurrent_layers", ("layer_types",), "bool[]", converter=recurrent_layers, draft=False),
        Key("full_attention_interval", ("full_attention_interval",)), ROPE_DIM, must_be("attention_bias", False),
        must_be("hidden_act", "silu"), replace(MTP, hf=("mtp_num_hidden_layers", *MTP.hf)), *family,
    )


_SECTIONS = Key("rope.dimension_sections", (), "i32[]", converter=Converter(_sections_to_gguf, default))


def _qwen3_5(id: str, gguf: str, name: str, layer: tuple[TensorRow, ...], keys: tuple[Key, ...]) -> Architecture:
    """Text model of Qwen3.5, alone or in a folder with a vision tower."""
    model_type = f"{id}_text"
    classes = (f"{name}ForCausalLM", f"{name}TextModel")
    return Architecture(
        id=model_type, gguf=gguf, hf_class=classes[0], model_type=model_type,
        hf_classes=(*classes, f"{name}ForConditionalGeneration", f"{name}Model"), bare_classes=(classes[1],),
        model_types=(model_type, id),
        tensors=_decoder(*_SEPARATE, *layer), keys=(*keys, _SECTIONS), drafts=mtp_names(),
    )


_QWEN3_5_ROW = _qwen3_5("qwen3_5", "qwen35", "Qwen3_5", _MLP, _keys(experts=False))
_STREAMS, _MIXED = "hc_count*hidden", "hc_lowrank"
_PLUS_ONE = "plus_one"


def _streams(hf: str, gguf: str, inject: bool = True) -> tuple[TensorRow, ...]:
    """Mixes the residual streams before a block and distributes its result over them."""
    return (
        *norm(f"{hf}.hc_norm", f"{gguf}_norm", _STREAMS, value=_PLUS_ONE),
        *linear(f"{hf}.input_mix_weight_down", f"{gguf}_down", f"{_MIXED},{_STREAMS}"),
        *linear(f"{hf}.input_mix_weight_up", f"{gguf}_up", f"{_STREAMS},{_MIXED}"),
        *(linear(f"{hf}.block_inject_weight", f"{gguf}_inject", f"hc_count,{_STREAMS}") if inject else ()),
    )


_INDEXER = (
    split(
        "self_attn.indexer.index_qk_proj.weight", "indexer_n_heads*indexer_head_dim+indexer_head_dim,hidden",
        {
            "indexer.q_proj.weight": "indexer_n_heads*indexer_head_dim,hidden",
            "indexer.k_proj.weight": "indexer_head_dim,hidden",
        },
        layers="full_attention",
    ),
    *norm("self_attn.indexer.q_layernorm", "indexer.q_norm", "indexer_head_dim", value=_PLUS_ONE,
        layers="full_attention"),
    *norm("self_attn.indexer.k_layernorm", "indexer.k_norm", "indexer_head_dim", value=_PLUS_ONE,
        layers="full_attention"),
)
_NGRAMS, _TABLES = "ple.ple_embedding", "ple.layers"
_CONSTANTS = {
    "ple.layer_multipliers": ("layer_multipliers", "ngram_size"),
    "ple.head_offsets": ("ngram_heads_offsets", "ngram_heads"),
    "ple.head_vocab_sizes": ("ngram_heads_vocab_sizes", "ngram_heads"),
}
"""GGUF key -> the integer tensor of a checkpoint, and its length."""
_TABLE = tuple(
    replace(row, layers="ple")
    for row in (
        *linear("ple.key_proj", "ple_key", f"{_STREAMS},hidden"),
        *linear("ple.value_proj", "ple_value", "hidden,hidden"),
        *(row for name in ("key", "query", "conv")
          for row in norm(f"ple.norm_{name}", f"ple_norm_{name}", _STREAMS, value=_PLUS_ONE)),
        tensor("ple.conv1d.weight", "ple_conv1d.weight", f"{_STREAMS},1,ple_conv_kernel_size",
            gguf_dims=(f"{_STREAMS},ple_conv_kernel_size",)),
        *(TensorRow((f"{_NGRAMS}.{name}",), (), (size,)) for name, size in _CONSTANTS.values()),
    )
)
_SHARDS = TensorRow(
    (f"model.layers.{{n}}.{_NGRAMS}.ngram_embedding.shard_{{e}}.weight",), ("per_layer_token_embd.weight",),
    ("ngram_rows/split_ngram_parts,ngram_width",), gguf_dims=("ngram_rows,ngram_width",), layers="ple",
    count="split_ngram_parts",
)
_TEMPERATURES = {"choice": 0.85, "score": 0.85, "noul": 0.85 * 1.829074}
"""OpenJev's logit divisors, by type of question."""


ROWS: tuple[Architecture, ...] = (
    Architecture(
        id="qwen3_next", gguf="qwen3next",
        **class_names("Qwen3NextForCausalLM", "Qwen3NextModel", types=("qwen3_next",), bare=("Qwen3NextModel",)),
        tensors=_decoder(*_FUSED, *_EXPERTS, *gated_mlp(layers="dense")), drafts=mtp_names(),
        keys=_keys(must_be("norm_topk_prob", True), *ALL_SPARSE, experts=True),
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
    # As Qwen/Qwen3.8-Flash-Next has it.
    Architecture(
        id="qwen4_exp_text", gguf="qwen4exp", hf_class="Qwen4ExpForCausalLM", model_type="qwen4_exp_text",
        hf_classes=("Qwen4ExpForCausalLM", "Qwen4ExpTextModel", "Qwen4ExpForConditionalGeneration", "Qwen4ExpModel"),
        bare_classes=("Qwen4ExpTextModel",), model_types=("qwen4_exp_text", "qwen4_exp"),
        tensors=(
            embedding(), _SHARDS,
            *block(
                *_streams("attn_hyper_connection", "hc_attn"), *_attention(), *_INDEXER, *_SEPARATE, *_TABLE,
                *_streams("mlp_hyper_connection", "hc_ffn"), *_EXPERTS,
            ),
            *_streams("model.hyper_connection_mixer", "output_hc", inject=False), *head(),
        ),
        keys=(
            *(
                replace(key, converter=attending_layers) if key.converter is recurrent_layers else key
                for key in _keys(experts=True) if key.gguf != MTP.gguf
            ),
            Key("hyper_connection.count", ("hc_count",)), Key("hyper_connection.low_rank", (_MIXED,)),
            Key("attention.indexer.head_count", ("indexer_n_heads",)),
            Key("attention.indexer.key_length", ("indexer_head_dim",)),
            Key("attention.indexer.top_k", ("indexer_budget",)), must_be("indexer_kv_heads", 1),
            Key("attention.compress_ratios", ("indexer_compress_ratio",), "i32[]", converter=ratio_a_layer),
            Key("ple.layers", ("ple_layer_ids",), "i32[]", converter=table_layers, needed="ple.ngram_size"),
            Key("ple.ngram_size", ("ngram_size",), converter=of_table, needed=_TABLES),
            Key("ple.heads_per_ngram", ("heads_per_ngram",), converter=of_table, needed=_TABLES),
            Key("ple.conv_kernel", ("ple_conv_kernel_size",), converter=of_table),
            Key("ple.eos_token_id", converter=end_of_ngrams, needed=_TABLES),
            Key("ple.image_token_id", ("image_token_id",), converter=of_table),
            Key("embedding_length_per_layer_input", ("ple_embed_dim",), converter=row_width, needed=_TABLES),
            *(Key(gguf, (f"model.layers.{{n}}.{_NGRAMS}.{name}",), "u64[]", converter=of_tensor, needed=_TABLES)
              for gguf, (name, _) in _CONSTANTS.items()),
            Key("", ("ngram_vocab_size_base",), converter=Converter(nothing, _first_prime)),
            Key("", ("make_ngram_vocab_size_divisible_by",)), Key("", ("split_ngram_parts",), converter=parts_of_table),
            Key("", ("seed",)), Key("", ("output_gate_type",), "str", allowed=("sigmoid",), converter=output_gate),
            must_be("norm_topk_prob", True), _SECTIONS,
        ),
        differs=(
            Difference(
                "llama.cpp selects up to indexer_compress_ratio - 1 more positions: logits differ for texts longer "
                "than indexer_budget tokens",
                "chosen", beyond="indexer_budget",
            ),
        ),
    ),
    _qwen3_5("qwen3_5_moe", "qwen35moe", "Qwen3_5Moe", _EXPERTS, _keys(experts=True)),
)
