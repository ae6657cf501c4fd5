"""Llama and networks that are one but for a few fields."""

from __future__ import annotations

from dataclasses import replace

from aprfmt.arch.blocks.decoder import (
    DECODER, DIMS, GROUPED, LAYER_EPS, LLAMA_KEYS, PAD, RMS_EPS, ROPE, ROPE_DIM, SILU, SLIDING_LAYERS, VOCAB, WINDOW,
    attention, class_names, decoder, flag, fused_qkv, gated_mlp, hf_names, linear, must_be, network, norm, plain_mlp,
    rename, split, tensor,
)
from aprfmt.arch.blocks.encoder import ENCODER
from aprfmt.arch.blocks.moe import NO_BIAS, WIDTH, moe_decoder, moe_keys, shared_expert
from aprfmt.arch.converter import DEFAULT, Converter, Scope, nothing
from aprfmt.arch.converters.common import is_list
from aprfmt.arch.converters.heads import pooling
from aprfmt.arch.converters.windows import every_fourth_full, fourth_full_to
from aprfmt.arch.fields import as_float, as_int, as_mapping
from aprfmt.arch.row import REQUIRED, Architecture, Difference, Key, TensorRow
from aprfmt.errors import RefusedError


_STEP = 4
"""SmolLM3's runtime leaves every fourth layer unrotated, whatever a file says."""


def _rotated(n_layers: int, step: int) -> list[int]:
    return [int((i + 1) % step != 0) for i in range(n_layers)]


def _rotated_derive(scope: Scope) -> list[int]:
    step = scope.h.extra.get("no_rope_layer_interval")
    return _rotated(scope.h.num_layers or 0, step if isinstance(step, int) and step > 0 else _STEP)


def _rotated_to(value: object, scope: Scope) -> None:
    if isinstance(value, list) and [int(bool(item)) for item in value] != _rotated(len(value), _STEP):
        raise RefusedError(
            f"{scope.name}: llama.cpp's {scope.row.gguf} leaves exactly every fourth layer without rotation"
        )


every_fourth = Converter(_rotated_to, lambda value, scope: _rotated_derive(scope), _rotated_derive)
_IMAGE_TOKENS = ("IMGIMG", "<image>")


def _image_tokens(value: object, scope: Scope) -> object:
    """The tokens of Chameleon's pictures and their ids, which the class needs and a GGUF has with its vocabulary."""
    tokens = scope.kv.get("tokenizer.ggml.tokens")
    if not scope.kv:
        return DEFAULT
    listed = tokens if is_list(tokens) else ()
    return {str(token): i for i, token in enumerate(listed) if str(token).startswith(_IMAGE_TOKENS)}


image_tokens = Converter(nothing, _image_tokens)
pooling_avg = replace(pooling, normalize=lambda value, scope: "mean" if value == "avg" else DEFAULT)
_BIASES = (flag("attention_bias"), flag("mlp_bias"))
_NO_BIASES = (must_be("attention_bias", False), must_be("mlp_bias", False))
_FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_BIASED = decoder(*attention("attention_bias", "attention_bias", permuted=True), mlp=gated_mlp("mlp_bias"))


def _head_norms(side: str, heads: str) -> tuple[TensorRow, ...]:
    """A norm with a bias for each head, whose values follow the rotary order of the head."""
    rows = norm(f"self_attn.{side}_norm", f"attn_{side}_norm", f"{heads},head_dim", REQUIRED)
    order = (f"swap:{heads},2,head_dim/2",)
    return tuple(replace(row, dims=(f"{heads},head_dim",), order=order, flat=True) for row in rows)


def _stepped_to(value: object, scope: Scope) -> None:
    step, n_layers = scope.size("interleave_moe_layer_step") or 1, scope.h.num_layers or 0
    if isinstance(value, list) and value != list(range(step - 1, n_layers, step)):
        raise RefusedError(
            f"{scope.name} is not every layer at a step of {step} (interleave_moe_layer_step), where llama.cpp's "
            f"{scope.row.gguf} looks for experts"
        )


_BARE_EXPERTS = 128
"""So many experts has the Llama 4 whose Q and K llama.cpp does not norm."""


def _normed_to(value: object, scope: Scope) -> None:
    if bool(value) == (scope.h.num_experts == _BARE_EXPERTS):
        raise RefusedError(
            f"{scope.name} is {value}: llama.cpp's {scope.row.gguf} norms Q and K but for networks of {_BARE_EXPERTS} "
            "experts"
        )


stepped_moe_layers = Converter(_stepped_to)
not_of_128_experts = Converter(_normed_to, lambda value, scope: scope.h.num_experts != _BARE_EXPERTS)
every_fourth_unchunked = Converter(fourth_full_to, lambda value, scope: None)
_FOURTH = Key("", ("layer_types",), "str[]", converter=every_fourth_full)


def _llama4_experts() -> tuple[TensorRow, ...]:
    """Gate beside up, as [experts, in, out]."""
    halves = dict.fromkeys(("ffn_gate_exps.weight", "ffn_up_exps.weight"), "experts,moe_ffn,hidden")
    return (
        *linear("feed_forward.router", "ffn_gate_inp", "experts,hidden", layers="moe"),
        split(
            "feed_forward.experts.gate_up_proj", "experts,hidden,2*moe_ffn", halves, transposed=True,
            order=("deal:experts,moe_ffn,moe_ffn",), layers="moe",
        ),
        tensor(
            "feed_forward.experts.down_proj", "ffn_down_exps.weight", "experts,moe_ffn,hidden", transposed=True,
            gguf_dims=("experts,hidden,moe_ffn",), layers="moe",
        ),
        *shared_expert("feed_forward.shared_expert", "moe_ffn", layers="moe"),
        *gated_mlp(hf="feed_forward", layers="dense"),
    )


_QKV = {"attn_q.weight": "q,hidden", "attn_k.weight": "kv,hidden", "attn_v.weight": "kv,hidden"}
_META_LAYOUT = Key("tensor_data_layout", (), "str", constant="Meta AI original pth")


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


sliding_rotary_dim = Converter(_sliding_dim_to, _sliding_dim_from)

ROWS: tuple[Architecture, ...] = (
    Architecture(
        id="llama", gguf="llama",
        **class_names(
            "LlamaForCausalLM", "LLaMAForCausalLM", "VLlama3ForCausalLM", "InternLM3ForCausalLM",
            "IQuestCoderForCausalLM", "LlamaModel", types=("llama", "smollm", "smollm2", "internlm3", "iquestcoder"),
            bare=("LlamaModel",),
        ),
        rope_type=0, gguf_only=_FACTORS,
        tensors=_BIASED, keys=(*LLAMA_KEYS, SILU, *_BIASES, Key("", ("clip_qkv",), "f32")),
        differs=(Difference("llama.cpp's llama does not clip Q, K and V (clip_qkv)", "clip_qkv"),),
    ),
    Architecture(
        id="llama_bidirec", gguf="llama-embed",
        **class_names("LlamaBidirectionalModel", types=("llama_bidirec",), bare=("LlamaBidirectionalModel",)),
        rope_type=0, gguf_only=_FACTORS,
        tensors=_BIASED, keys=(*LLAMA_KEYS, ENCODER[0], replace(ENCODER[1], converter=pooling_avg), SILU, *_BIASES),
    ),
    Architecture(
        id="arcee", gguf="arcee", **hf_names("Arcee", "arcee"), rope_type=0,
        tensors=decoder(
            *attention("attention_bias", "attention_bias", permuted=True),
            mlp=plain_mlp("mlp_bias", "mlp.up_proj", "mlp.down_proj"),
        ),
        keys=(*LLAMA_KEYS, must_be("hidden_act", "relu2"), *_NO_BIASES),
    ),
    Architecture(
        id="smollm3", gguf="smollm3", **hf_names("SmolLM3", "smollm3"), rope_type=0, gguf_only=(),
        tensors=_BIASED,
        keys=(
            *LLAMA_KEYS, SILU, PAD, *_NO_BIASES, Key("", ("no_rope_layers",), "i32[]", converter=every_fourth),
            Key("", ("no_rope_layer_interval",)), must_be("use_sliding_window", False), Key("", ("sliding_window",)),
            Key("", ("layer_types",), "str"),
        ),
    ),
    Architecture(
        id="chameleon", gguf="chameleon",
        **class_names(
            "ChameleonForConditionalGeneration", "ChameleonForCausalLM", "ChameleonModel", types=("chameleon",),
            bare=("ChameleonModel",),
        ),
        rope_type=0, gguf_only=(),
        tensors=decoder(
            *attention("attention_bias", "attention_bias", permuted=True), *_head_norms("q", "heads"),
            *_head_norms("k", "kv_heads"),
            mlp=gated_mlp("mlp_bias"),
        ),
        keys=(
            *DECODER, Key("swin_norm", ("swin_norm",), "bool"), Key("", ("vocabulary_map",), converter=image_tokens),
            Key("", ("vq_config",)), SILU, *_NO_BIASES,
        ),
        differs=(
            Difference("llama.cpp gives the MLP of a Chameleon with swin_norm what attention adds alone", "swin_norm"),
        ),
    ),
    Architecture(
        id="llama4_text", required={"interleave_moe_layer_step": "", "expert_feed_forward_length": ""}, gguf="llama4",
        **class_names("Llama4ForCausalLM", "Llama4TextModel", types=("llama4_text",), bare=("Llama4TextModel",)),
        rope_type=0,
        tensors=moe_decoder(*attention("attention_bias", "attention_bias"), *_llama4_experts()),
        keys=(
            *rename(
                moe_keys(VOCAB, ROPE_DIM, WIDTH, NO_BIAS, count="num_local_experts"),
                intermediate_size="intermediate_size_mlp", moe_intermediate_size="intermediate_size",
            ),
            Key("interleave_moe_layer_step", ("interleave_moe_layer_step",)),
            Key("", ("moe_layers",), "i32[]", converter=stepped_moe_layers),
            Key("", ("no_rope_layers",), "i32[]", converter=every_fourth), Key("", ("no_rope_layer_interval",)),
            replace(_FOURTH, converter=every_fourth_unchunked),
            Key("", ("use_qk_norm",), "bool", converter=not_of_128_experts),
            must_be("attention_chunk_size", 8192), Key("", ("attn_temperature_tuning",), "bool", allowed=(True, 4)),
            must_be("floor_scale", 8192), must_be("attn_scale", 0.1),
        ),
    ),
    Architecture(
        id="internlm2", gguf="internlm2", **hf_names("InternLM2", "internlm2"), rope_type=0,
        tensors=network(
            *norm("attention_norm", "attn_norm"),
            # Each group holds its queries, one key and one value; queries and keys are in llama's rotary order.
            split(
                "attention.wqkv.weight", "q+2*kv,hidden", _QKV,
                order=("deal:kv_heads,q/kv_heads,head_dim,head_dim", "head:q+kv,heads+kv_heads,2,head_dim/2"),
            ),
            *linear("attention.wo", "attn_output", "hidden,q"), *norm("ffn_norm", "ffn_norm"),
            *gated_mlp(hf="feed_forward", names=("w1", "w3", "w2")),
            embed="model.tok_embeddings", out="output",
        ),
        keys=(*DECODER, SILU, flag("bias")),
    ),
    Architecture(
        id="orion", gguf="orion", **hf_names("Orion", "orion"),
        tensors=decoder(*attention(), norm_bias="required"),
        # Its config says rms_norm_eps, its norms are layer norms.
        keys=(
            _META_LAYOUT, *rename(DIMS, max_position_embeddings=("max_sequence_length", "max_position_embeddings")),
            GROUPED, replace(LAYER_EPS, hf=("rms_norm_eps",)), ROPE, SILU,
        ),
    ),
    Architecture(
        id="xverse", gguf="xverse", **hf_names("Xverse", "xverse"), rope_type=0,
        tensors=decoder(*attention(permuted=True)), keys=(*DECODER, _META_LAYOUT, ROPE_DIM, SILU),
    ),
    Architecture(
        id="baichuan", gguf="baichuan", **hf_names("Baichuan", "baichuan", "BaiChuan"), rope_type=0,
        tensors=network(
            *norm("input_layernorm", "attn_norm"),
            split(
                "self_attn.W_pack.weight", "q+2*kv,hidden", _QKV, order=("head:q+kv,heads+kv_heads,2,head_dim/2",)
            ),
            *linear("self_attn.o_proj", "attn_output", "hidden,q"), *norm("post_attention_layernorm", "ffn_norm"),
            *gated_mlp(),
        ),
        keys=(
            *rename(DIMS, max_position_embeddings=("model_max_length", "max_position_embeddings")), RMS_EPS, ROPE,
            _META_LAYOUT, ROPE_DIM, SILU,
        ),
    ),
    Architecture(
        id="maincoder", gguf="maincoder", **hf_names("Maincoder", "maincoder"),
        tensors=decoder(*attention(qk_norm="head_dim")), keys=(*DECODER, ROPE_DIM, SILU),
    ),
    Architecture(
        id="pangu_embedded", gguf="pangu-embedded", **hf_names("PanguEmbedded", "PanguEmbedded"),
        tensors=decoder(*attention("bias", "bias")), keys=(*DECODER, VOCAB, ROPE_DIM, SILU, flag("bias")),
    ),
    Architecture(
        id="nanbeige", gguf="nanbeige", **hf_names("Nanbeige", "nanbeige"), rope_type=0,
        tensors=decoder(*attention(permuted=True)),
        keys=(
            *DECODER, VOCAB, ROPE_DIM, Key("num_loops", ("num_loops",)),
            Key("skip_loop_final_norm", ("skip_loop_final_norm",), "bool"), SILU,
        ),
    ),
    # As XHToken/Spark-X2.5-1.7B has it.
    Architecture(
        id="spark2_5", gguf="spark2_5",
        required={"attention.sliding_window": "", "attention.sliding_window_pattern": ""},
        **hf_names("Spark2_5", "spark2_5"), gguf_only=(), nested_rope=True,
        tensors=decoder(
            *fused_qkv("self_attn.q_k_v_proj", "q+2*kv,hidden"),
            *linear("self_attn.g_proj", "attn_gate", "heads,hidden"),
            *linear("self_attn.o_proj", "attn_output", "hidden,q"),
        ),
        keys=(
            *DECODER, VOCAB, WINDOW, SLIDING_LAYERS, ROPE_DIM,
            Key("rope.dimension_count_swa", converter=sliding_rotary_dim), must_be("gate_attn_act_mode", "sigmoid"),
            must_be("headwise_attn_output_gate", True), must_be("hidden_act", "gelu"),
        ),
    ),
)
