"""Rows of the architecture table: dense decoders whose code came with their checkpoints, fused or without rotation."""

from __future__ import annotations

from dataclasses import replace

from aprfmt.arch.converter import DEFAULT, Converter, Scope
from aprfmt.arch.fields import as_float, as_int, as_mapping
from aprfmt.arch.rope import DEFAULT_THETA
from aprfmt.arch.row import Architecture, Key, TensorRow
from aprfmt.arch.rows.parts import (
    DECODER, DIMS, EPSILON, GROUPED, RMS_EPS, ROPE_DIM, SILU, SLIDING_LAYERS, VOCAB, WHOLE_HEADS, WINDOW, class_names,
    convert, decoder, flag, gated_mlp, hf_names, linear, must_be, network, norm, rename, split,
)
from aprfmt.arch.rows.parts_moe import EQUAL_HEADS


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


half = Converter(_half_to, _half_from)
rope_ratio = Converter(_ratio_to, _ratio_from)
refact_width = Converter(normalize=_refact_width)
unshared_heads = Converter(normalize=_unshared)
shared_heads = Converter(from_gguf=_shared_from)
sliding_rotary_dim = Converter(_sliding_dim_to, _sliding_dim_from)

_RMS_EPSILON = replace(EPSILON, gguf=RMS_EPS.gguf)
_UNTIED = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False}

# Each KV head serves every `heads/n_shared_head`-th head, in llama.cpp as many neighbours.
_NEIGHBOURS = ("swap:1,n_shared_head,heads/n_shared_head",)


def _qkv(hf: str, dims: str, bias: str | None = None) -> tuple[TensorRow, ...]:
    """Q over K over V in one tensor on both sides."""
    return linear(hf, "attn_qkv", dims, bias)


def _expert(kind: str, gguf: str) -> tuple[TensorRow, ...]:
    """CogVLM's projections for the tokens of texts or of pictures."""
    attn, mlp = f"self_attn.{kind}_expert_", f"mlp.{kind}_mlp."
    beside = "vis_" if gguf else ""
    return (
        *linear(f"{attn}query_key_value", f"{beside}attn_qkv", "3*q,hidden"),
        *linear(f"{attn}dense", f"{beside}attn_output", "hidden,q"),
        *linear(f"{mlp}gate_proj", f"{gguf or 'ffn_'}gate", "ffn,hidden"),
        *linear(f"{mlp}up_proj", f"{gguf or 'ffn_'}up", "ffn,hidden"),
        *linear(f"{mlp}down_proj", f"{gguf or 'ffn_'}down", "hidden,ffn"),
    )


ROWS: tuple[Architecture, ...] = (
    # As zai-org/chatglm3-6b and glm-4-9b-chat have it.
    Architecture(
        id="chatglm", gguf="chatglm", when="tensors=attn_qkv.weight",
        **class_names("ChatGLMModel", "ChatGLMForConditionalGeneration", types=("chatglm",)), rope_type=0, gguf_only=(),
        ignored=(".rotary_pos_emb.inv_freq",),
        tensors=network(
            *norm("input_layernorm", "attn_norm"),
            *_qkv("self_attention.query_key_value", "q+2*kv,hidden", "add_qkv_bias"),
            *linear("self_attention.dense", "attn_output", "hidden,hidden"),
            *norm("post_attention_layernorm", "ffn_norm"), *linear("mlp.dense_h_to_4h", "ffn_up", "2*ffn,hidden"),
            *linear("mlp.dense_4h_to_h", "ffn_down", "hidden,ffn"),
            hf="transformer.encoder.layers.{n}.", embed="transformer.embedding.word_embeddings",
            last="transformer.encoder.final_layernorm", out="transformer.output_layer",
        ),
        keys=(
            *rename(
                DIMS, max_position_embeddings="seq_length", num_layers=("num_layers", "num_hidden_layers"),
                intermediate_size="ffn_hidden_size",
            ),
            replace(GROUPED, hf=("multi_query_group_num",)), replace(RMS_EPS, hf=("layernorm_epsilon",)),
            Key("rope.dimension_count", ("kv_channels",), field="head_dim", converter=half),
            Key("rope.freq_base", ("rope_ratio",), "f32", converter=rope_ratio),
            Key("", ("padded_vocab_size", "vocab_size"), field="vocab_size"), WHOLE_HEADS, flag("add_qkv_bias"),
            must_be("add_bias_linear", False), must_be("apply_residual_connection_post_layernorm", False),
            must_be("multi_query_attention", True), must_be("post_layer_norm", True), must_be("rmsnorm", True),
        ),
        defaults={
            "": {"layernorm_epsilon": 1e-5, "rope_ratio": 1, "add_qkv_bias": False, "tie_word_embeddings": False}
        },
    ),
    # As smallcloudai/Refact-1_6B-fim has it.
    Architecture(
        id="refact", gguf="refact", **hf_names("GPTRefact", "gpt_refact"), gguf_only=(),
        tensors=network(
            *norm("ln_1", "attn_norm"), *linear("attn.q", "attn_q", "hidden,hidden"),
            split(
                "attn.kv.weight", "2*head_dim,hidden",
                dict.fromkeys(("attn_k.weight", "attn_v.weight"), "head_dim,hidden"),
            ),
            *linear("attn.c_proj", "attn_output", "hidden,hidden"), *norm("ln_2", "ffn_norm"),
            split(
                "mlp.gate_up_proj.weight", "2*ffn,hidden",
                dict.fromkeys(("ffn_gate.weight", "ffn_up.weight"), "ffn,hidden"),
            ),
            *linear("mlp.c_proj", "ffn_down", "hidden,ffn"),
            hf="transformer.h.{n}.", embed="transformer.wte", last="ln_f",
        ),
        keys=(
            *convert(
                rename(
                    DIMS, num_layers="n_layer", max_position_embeddings="n_positions", hidden_size="n_embd",
                    intermediate_size="n_inner", num_heads="n_head",
                ),
                intermediate_size=refact_width,
            ),
            Key("attention.head_count_kv", field="num_kv_heads", constant=1), _RMS_EPSILON,
            must_be("multi_query", True),
        ),
        defaults={"": {"layer_norm_epsilon": 1e-5, "tie_word_embeddings": False}},
    ),
    # As pfnet/plamo-13b has it, whose config names no length.
    Architecture(
        id="plamo", gguf="plamo", **hf_names("Plamo", "plamo"), gguf_only=(),
        tensors=network(
            *norm("norm", "attn_norm"), *linear("self_attn.q_proj", "attn_q", "hidden,hidden", order=_NEIGHBOURS),
            *linear("self_attn.k_proj", "attn_k", "kv,hidden"), *linear("self_attn.v_proj", "attn_v", "kv,hidden"),
            *linear("self_attn.o_proj", "attn_output", "hidden,hidden", columns=_NEIGHBOURS), *gated_mlp(),
            hf="model.layers.layers.{n}.",
        ),
        keys=(
            *DIMS, Key("attention.head_count_kv", field="num_kv_heads", converter=unshared_heads),
            Key("", ("n_shared_head",), converter=shared_heads), RMS_EPS, SILU,
        ),
        defaults={"": {**_UNTIED, "max_position_embeddings": 4096, "n_shared_head": 8}},
    ),
    # As XHToken/Spark-X2.5-1.7B has it.
    Architecture(
        id="spark2_5", gguf="spark2_5",
        required={"attention.sliding_window": "", "attention.sliding_window_pattern": ""},
        **hf_names("Spark2_5", "spark2_5"), gguf_only=(), nested_rope=True,
        tensors=decoder(
            *_qkv("self_attn.q_k_v_proj", "q+2*kv,hidden"), *linear("self_attn.g_proj", "attn_gate", "heads,hidden"),
            *linear("self_attn.o_proj", "attn_output", "hidden,q"),
        ),
        keys=(
            *DECODER, VOCAB, WINDOW, SLIDING_LAYERS, ROPE_DIM,
            Key("rope.dimension_count_swa", converter=sliding_rotary_dim), must_be("gate_attn_act_mode", "sigmoid"),
            must_be("headwise_attn_output_gate", True), must_be("hidden_act", "gelu"),
        ),
        defaults={"": {**_UNTIED, "sliding_window": 512, "sliding_window_pattern": 4, "head_dim": 256}},
    ),
    # As zai-org/cogvlm-chat-hf has it. The tensors for pictures are the network's: llama.cpp insists on them.
    Architecture(
        id="cogvlm", gguf="cogvlm", **hf_names("CogVLM", "cogvlm"), gguf_only=(),
        tensors=network(
            *norm("input_layernorm", "attn_norm"), *_expert("language", ""), *_expert("vision", "vis_"),
            *norm("post_attention_layernorm", "ffn_norm"),
        ),
        keys=(*DECODER, VOCAB, ROPE_DIM, EQUAL_HEADS, SILU),
        defaults={"": {**_UNTIED, "max_position_embeddings": 2048}},
    ),
)
