"""Rows of the architecture table: Gemma and Cohere."""

from __future__ import annotations

from dataclasses import replace

from aprfmt.arch.converter import DEFAULT, Converter, Scope
from aprfmt.arch.converters.common import any_window, softcap, unscaled
from aprfmt.arch.converters.layers import FULL, layer_types, layer_types_from, layer_types_to, periodic
from aprfmt.arch.fields import as_float, as_int
from aprfmt.arch.row import HEAD, Architecture, Key, TensorRow
from aprfmt.arch.rows.parts import (
    DECODER, DIMS, GROUPED, HEAD_DIM, LAYER_EPS, ROPE, ROPE_DIM, SILU, VOCAB, attention, block, class_names, convert,
    embedding, final_norm, gated_mlp, head, hf_names, must_be, network, norm, tensor,
)
from aprfmt.arch.rows.parts_encoder import ENCODER
from aprfmt.errors import RefusedError


_BOTH = ("dense_2_in", "dense_2_out", "dense_3_in", "dense_3_out")


def _both_dense_to(value: object, scope: Scope) -> object:
    """The width of one of two layers behind the pooling, where both are as the runtime computes them."""
    extra = scope.h.extra
    whole = all(extra.get(name) for name in _BOTH) and not (extra.get("dense_2_bias") or extra.get("dense_3_bias"))
    return value if whole else None


both_dense = Converter(_both_dense_to)
_NORMED_LAYERS = 64
"""From so many layers on llama.cpp's command-r wants norms of Q and K, and knows none before."""


def _large_qk_norm_to(value: object, scope: Scope) -> None:
    normed, n_layers = bool(value), scope.h.num_layers or 0
    if normed != (n_layers >= _NORMED_LAYERS):
        raise RefusedError(
            f"use_qk_norm is {normed} in a network of {n_layers} layers: llama.cpp's {scope.row.gguf} norms Q and K "
            f"from {_NORMED_LAYERS} layers on, and only then"
        )


_WIDE_HEADS = {"gemma2": 46, "gemma3": 62}
"""GGUF name -> layers of the one size that scales by hidden / heads, which the runtime tells by their number."""


def _own_layers_to(value: object, scope: Scope) -> list[bool] | None:
    """Layer types that are not those that the runtime takes where a file names none."""
    sliding = layer_types_to(value, scope)
    period = as_int(scope.defaults.get("sliding_window_pattern"), "sliding_window_pattern")
    if sliding is None or not period:
        return sliding
    return None if sliding == periodic(period, len(sliding)) else sliding


def _some_layers_to(value: object, scope: Scope) -> list[bool] | None:
    """The runtime asserts that some layer slides, and a file of this architecture cannot say that none does."""
    sliding = layer_types_to(value, scope)
    if sliding and not any(sliding):
        raise RefusedError(f"{scope.name}: llama.cpp's {scope.row.gguf} needs at least one sliding layer")
    return _own_layers_to(value, scope)


def _any_layers_to(value: object, scope: Scope) -> list[bool] | None:
    sliding = _own_layers_to(value, scope)
    return sliding if sliding and any(sliding) else None


def _any_layers_from(value: object, scope: Scope) -> object:
    if not scope.gguf("attention.sliding_window"):
        return [FULL] * (scope.h.num_layers or 0)
    return layer_types_from(value, scope)


def _query_scale(scope: Scope) -> int | None:
    """What llama.cpp divides attention scores by the root of."""
    wide = scope.h.num_layers == _WIDE_HEADS.get(scope.row.gguf)
    return scope.h.plain_head_dim if wide else scope.h.head_dim


def _query_scale_to(value: object, scope: Scope) -> None:
    number, runtime = as_float(value, scope.name), _query_scale(scope)
    if number is not None and runtime is not None and number != runtime:
        raise RefusedError(
            f"{scope.name} is {number:g}; llama.cpp's {scope.row.gguf} of these dimensions scales by {runtime}",
            hint="a GGUF has no key for it",
        )


some_layer_types = replace(layer_types, to_gguf=_some_layers_to)
own_layer_types = replace(layer_types, to_gguf=_own_layers_to)
any_layer_types = replace(layer_types, to_gguf=_any_layers_to, from_gguf=_any_layers_from)
query_scale = Converter(
        _query_scale_to, lambda value, scope: DEFAULT if (scale := _query_scale(scope)) is None else scale
    )
# Command-R has few positions, and under another key those that it was trained with.
trained_length = Converter(lambda value, scope: scope.size("model_max_length") or value)
large_qk_norm = Converter(_large_qk_norm_to)

_BOTH_DENSE = "dense_2_out&dense_3_in&!dense_2_bias&!dense_3_bias"
"""llama.cpp has two layers behind the pooling, without biases."""
_WINDOW = Key("attention.sliding_window", ("sliding_window",))
_ODD_LAYERS = Key("attention.sliding_window_pattern", ("layer_types",), "bool[]", converter=own_layer_types)
_SOME_LAYERS = replace(_ODD_LAYERS, converter=some_layer_types)
_QUERY_SCALE = Key("", ("query_pre_attn_scalar",), converter=query_scale)
_LOGIT_SCALE = Key("logit_scale", ("logit_scale",), "f32")
_UNSCALED = Key("rope.scaling.type", kind="str", converter=unscaled)
_NO_BIAS = must_be("attention_bias", False)
_GELU = must_be("hidden_activation", "gelu_pytorch_tanh")
_CAUSAL = Key("", ("use_bidirectional_attention",), "bool", allowed=(False,))


def _gemma(*more: TensorRow, after: str = "ffn_norm") -> tuple[TensorRow, ...]:
    """Gemma's decoder: its norms scale by their weight + 1."""
    return network(
        *norm("input_layernorm", "attn_norm", value="plus_one"), *attention("attention_bias", "attention_bias"),
        *norm("post_attention_layernorm", after, value="plus_one"), *more, *gated_mlp(),
        norm_value="plus_one",
    )


def _sandwiched(*more: TensorRow) -> tuple[TensorRow, ...]:
    """Gemma's decoder with norms before and behind attention and MLP."""
    return _gemma(
        *norm("pre_feedforward_layernorm", "ffn_norm", value="plus_one"),
        *norm("post_feedforward_layernorm", "post_ffw_norm", value="plus_one"), *more,
        after="post_attention_norm",
    )


_GEMMA3 = _sandwiched(
    *norm("self_attn.q_norm", "attn_q_norm", "head_dim", value="plus_one"),
    *norm("self_attn.k_norm", "attn_k_norm", "head_dim", value="plus_one"),
)
_GEMMA_TOKENS = {"bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0}
_GEMMA2_DEFAULTS = {
    **_GEMMA_TOKENS, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 256, "rms_norm_eps": 1e-6, "query_pre_attn_scalar": 256,
    "sliding_window": 4096, "tie_word_embeddings": True,
}
_GEMMA3_DEFAULTS = {
    **_GEMMA2_DEFAULTS, "vocab_size": 262208, "max_position_embeddings": 131072, "sliding_window_pattern": 6,
    "rope_theta": 1e6, "rope_local_base_freq": 1e4,
}
_GEMMA3_KEYS = (
    *DECODER, Key("final_logit_softcapping", ("final_logit_softcapping",), "f32"),
    Key("", ("attn_logit_softcapping",), "f32", allowed=(False,)), _QUERY_SCALE, _NO_BIAS, _GELU,
)


def _parallel(*attention_rows: TensorRow) -> tuple[TensorRow, ...]:
    """Cohere's decoder: one norm of a layer feeds attention and MLP."""
    return (
        embedding(), *block(*norm("input_layernorm", "attn_norm"), *attention_rows, *gated_mlp()), *final_norm(),
        *head(),
    )


_COHERE = (*DIMS, GROUPED, ROPE, LAYER_EPS, HEAD_DIM, _LOGIT_SCALE, _UNSCALED, _NO_BIAS, SILU)
_COHERE_DEFAULTS = {
    "max_position_embeddings": 8192, "layer_norm_eps": 1e-5, "logit_scale": 0.0625, "tie_word_embeddings": True,
    "bos_token_id": 5, "eos_token_id": 255001, "pad_token_id": 0,
}


ROWS: tuple[Architecture, ...] = (
    Architecture(
        id="gemma", gguf="gemma", **hf_names("Gemma", "gemma"), gguf_only=(), head_never=True,
        tensors=_gemma(), keys=(*DECODER, _NO_BIAS, _CAUSAL),
        defaults={"": {
            **_GEMMA_TOKENS, "max_position_embeddings": 8192, "head_dim": 256, "rms_norm_eps": 1e-6,
            "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True,
        }},
    ),
    Architecture(
        id="gemma2", gguf="gemma2", **hf_names("Gemma2", "gemma2"), gguf_only=(), head_never=True,
        tensors=_sandwiched(),
        keys=(
            *DECODER, Key("attn_logit_softcapping", ("attn_logit_softcapping",), "f32", converter=softcap),
            Key("final_logit_softcapping", ("final_logit_softcapping",), "f32", converter=softcap), _WINDOW,
            _SOME_LAYERS,
            _QUERY_SCALE, _NO_BIAS, _GELU, _CAUSAL,
        ),
        defaults={
            "": {
                **_GEMMA2_DEFAULTS, "max_position_embeddings": 8192, "attn_logit_softcapping": 50.0,
                "final_logit_softcapping": 30.0, "sliding_window_pattern": 2,
            }
        },
    ),
    Architecture(
        id="gemma3_text", gguf="gemma3",
        **class_names("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration", types=("gemma3_text", "gemma3")),
        gguf_only=(),
        tensors=_GEMMA3,
        keys=(
            *_GEMMA3_KEYS, replace(_WINDOW, converter=any_window), replace(_ODD_LAYERS, converter=any_layer_types),
            _CAUSAL,
        ),
        nested_rope=True,
        defaults={"": _GEMMA3_DEFAULTS},
    ),
    Architecture(
        id="gemma_embedding", required={"attention.sliding_window": ""}, gguf="gemma-embedding",
        hf_class="Gemma3TextModel", model_type="gemma3_text", hf_classes=("Gemma3TextModel",),
        bare_classes=("Gemma3TextModel",), model_types=(), gguf_only=(), prefixes=(("model.", ""),),
        tensors=(
            *(
                replace(row, hf=tuple(name.removeprefix("model.") for name in row.hf))
                for row in _GEMMA3
                if row.need != HEAD
            ),
            tensor("2_Dense.linear.weight", "dense_2.weight", "dense_2_out,hidden", _BOTH_DENSE),
            tensor("3_Dense.linear.weight", "dense_3.weight", "hidden,dense_2_out", _BOTH_DENSE),
        ),
        keys=(
            *_GEMMA3_KEYS, _WINDOW, _ODD_LAYERS, ENCODER[1],
            *(
                Key(f"dense_{n}_feat_{side}", (f"dense_{n}_{side}",), converter=both_dense)
                for n in (2, 3)
                for side in ("in", "out")
            ),
            *(Key("", (f"dense_{n}_bias",), "bool") for n in (2, 3)), must_be("use_bidirectional_attention", True),
        ),
        nested_rope=True,
        defaults={"": {**_GEMMA3_DEFAULTS, "use_bidirectional_attention": False}},
    ),
    Architecture(
        id="cohere", gguf="command-r", **hf_names("Cohere", "cohere"), rope_type=0, gguf_only=(), head_never=True,
        tensors=_parallel(
            *attention("attention_bias", "attention_bias"),
            *norm("self_attn.q_norm", "attn_q_norm", "heads,head_dim", need="use_qk_norm"),
            *norm("self_attn.k_norm", "attn_k_norm", "kv_heads,head_dim", need="use_qk_norm"),
        ),
        keys=(
            *convert(_COHERE, max_position_embeddings=trained_length), Key("", ("model_max_length",)),
            Key("", ("use_qk_norm",), "bool", converter=large_qk_norm),
        ),
        defaults={"": {**_COHERE_DEFAULTS, "rope_theta": 500000.0}},
    ),
    Architecture(
        id="cohere2", required={"attention.sliding_window": "", "logit_scale": ""}, gguf="cohere2",
        **hf_names("Cohere2", "cohere2"), rope_type=0, gguf_only=(), head_never=True,
        tensors=_parallel(*attention("attention_bias", "attention_bias")),
        keys=(*_COHERE, _WINDOW, _SOME_LAYERS, VOCAB, ROPE_DIM),
        defaults={"": {**_COHERE_DEFAULTS, "sliding_window": 4096, "sliding_window_pattern": 4}},
    ),
)
