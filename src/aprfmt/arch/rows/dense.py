"""Rows of the architecture table: GLM, Phi and other dense decoders with a layout of their own."""

from __future__ import annotations

from dataclasses import replace

from aprfmt.arch.converters.common import or_zero, unscaled
from aprfmt.arch.row import OUTPUT, REQUIRED, Architecture, Difference, Key, TensorRow
from aprfmt.arch.rows.parts import (
    DECODER, DIMS, GROUPED, HEAD_DIM, LAYER_EPS, NO_WINDOW, RMS_EPS, ROPE, ROPE_DIM, SILU, VOCAB, WHOLE_HEADS, WINDOW,
    attention, block, class_names, decoder, embedding, final_norm, flag, gated_mlp, head, hf_names, linear, must_be,
    network, norm, plain_mlp, tensor,
)
from aprfmt.arch.rows.parts_moe import MTP, draft_layer

_UNSCALED = Key("rope.scaling.type", kind="str", converter=unscaled)


def _glm(*norms: TensorRow) -> tuple[TensorRow, ...]:
    """GLM's decoder, with gate and up in one tensor on both sides."""
    return (
        embedding(), *block(*norm("input_layernorm", "attn_norm"), *attention("attention_bias"), *norms, *_fused_mlp()),
        *final_norm(), *head(),
    )


def _fused_mlp() -> tuple[TensorRow, ...]:
    return (*linear("mlp.gate_up_proj", "ffn_up", "2*ffn,hidden"), *linear("mlp.down_proj", "ffn_down", "hidden,ffn"))


_GLM4 = _glm(
    *norm("post_self_attn_layernorm", "post_attention_norm"), *norm("post_attention_layernorm", "ffn_norm"),
    *norm("post_mlp_layernorm", "post_ffw_norm"),
)


def _halved(row: TensorRow) -> TensorRow:
    """Q and K whose rotated pairs are neighbours in a checkpoint and halves of the rotated part in a GGUF."""
    heads = {"attn_q": "heads", "attn_k": "kv_heads"}.get(row.gguf[0].split(".")[-2])
    return replace(row, order=(f"each:{heads},head_dim,rotary/2,2",)) if heads else row


_GLM_KEYS = (*DECODER, ROPE_DIM, flag("attention_bias"), SILU)
_GLM_DEFAULTS = {
    "max_position_embeddings": 131072, "num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1.5625e-7,
    "partial_rotary_factor": 0.5, "attention_bias": True, "tie_word_embeddings": False,
    "eos_token_id": [151329, 151336, 151338], "pad_token_id": 151329,
}
_GLM_OCR = {
    "max_position_embeddings": 131072, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "attention_bias": False,
    "tie_word_embeddings": False,
}
_GLM4V = {**_GLM_OCR, "max_position_embeddings": 32768, "num_key_value_heads": 2, "attention_bias": True}


def _head_norms(hf: str, gguf: str, heads: str) -> TensorRow:
    """One norm a head, which GGUF stacks."""
    row = tensor(f"self_attn.{hf}.norms.{{e}}.weight", f"{gguf}.weight", "head_dim", "qk_layernorm")
    return replace(row, gguf_dims=(f"{heads},head_dim",), count=heads)


_STABLELM_FFN_NORM = norm(
    "post_attention_layernorm", "ffn_norm", bias="!use_parallel_residual", need="!use_parallel_residual"
)


def _layer_eps(*names: str) -> Key:
    return replace(LAYER_EPS, hf=(*names, *LAYER_EPS.hf))


ROWS: tuple[Architecture, ...] = (
    Architecture(
        id="glm", gguf="chatglm", **hf_names("Glm", "glm"), rope_type=0, gguf_only=(),
        tensors=_glm(*norm("post_attention_layernorm", "ffn_norm")), keys=(*_GLM_KEYS, WHOLE_HEADS),
        defaults={"": _GLM_DEFAULTS},
    ),
    Architecture(
        id="glm4", gguf="glm4", **hf_names("Glm4", "glm4"), rope_type=0, gguf_only=(),
        tensors=(*_GLM4, *block(*draft_layer())), keys=(*_GLM_KEYS, MTP),
        defaults={"": _GLM_DEFAULTS},
    ),
    Architecture(  # of GLM-4.1V and GLM-OCR: llama.cpp turns halves where positions are triples
        id="glm4v", required={"rope.dimension_sections": ""}, gguf="glm4", when="rope.dimension_sections",
        hf_class="Glm4ForCausalLM", model_type="glm4", hf_classes=(),
        model_types=("glm4v", "glm4v_text", "glm_ocr", "glm_ocr_text"), rope_type=0, gguf_only=(),
        tensors=(*(_halved(row) for row in _GLM4), *block(*draft_layer())), keys=(*_GLM_KEYS, MTP),
        defaults={
            "glm4v": _GLM4V, "glm4v_text": _GLM4V, "glm_ocr": _GLM_OCR, "glm_ocr_text": _GLM_OCR, "glm4": _GLM_DEFAULTS,
        },
    ),
    Architecture(
        id="stablelm", gguf="stablelm", **hf_names("StableLm", "stablelm", "StableLMEpoch"), gguf_only=(),
        head_always=True,
        tensors=network(
            *norm("input_layernorm", "attn_norm", bias=REQUIRED), *attention("use_qkv_bias"),
            _head_norms("q_layernorm", "attn_q_norm", "heads"), _head_norms("k_layernorm", "attn_k_norm", "kv_heads"),
            *_STABLELM_FFN_NORM, *gated_mlp(),
            norm_bias=REQUIRED,
        ),
        keys=(
            *DIMS, GROUPED, ROPE, ROPE_DIM, Key("use_parallel_residual", ("use_parallel_residual",), "bool"),
            _layer_eps("layer_norm_eps", "norm_eps"), flag("use_qkv_bias"), flag("qk_layernorm"), SILU,
        ),
        defaults={"": {
            "max_position_embeddings": 4096, "layer_norm_eps": 1e-5, "partial_rotary_factor": 0.25,
            "use_qkv_bias": False, "qk_layernorm": False, "use_parallel_residual": False, "tie_word_embeddings": False,
            "bos_token_id": 0, "eos_token_id": 0,
        }},
    ),
    Architecture(
        id="nemotron", gguf="nemotron", **hf_names("Nemotron", "nemotron"), gguf_only=(), head_always=True,
        tensors=network(
            *norm("input_layernorm", "attn_norm", bias=REQUIRED, value="plus_one"),
            *attention("attention_bias", "attention_bias"),
            *norm("post_attention_layernorm", "ffn_norm", bias=REQUIRED, value="plus_one"),
            *plain_mlp("mlp_bias", "mlp.up_proj", "mlp.down_proj"),
            norm_bias=REQUIRED, norm_value="plus_one",
        ),
        keys=(
            *DIMS, GROUPED, ROPE, _layer_eps("norm_eps"), replace(RMS_EPS, hf=("norm_eps",)), HEAD_DIM, VOCAB, ROPE_DIM,
            _UNSCALED, WHOLE_HEADS, flag("attention_bias"), flag("mlp_bias"), must_be("hidden_act", "relu2"),
        ),
        defaults={"": {
            "max_position_embeddings": 4096, "norm_eps": 1e-5, "partial_rotary_factor": 0.5,
            "tie_word_embeddings": False, "bos_token_id": 2, "eos_token_id": 3,
        }},
    ),
    Architecture(
        id="phi", gguf="phi2", **hf_names("Phi", "phi"), gguf_only=(), head_always=True,
        tensors=network(
            *norm("input_layernorm", "attn_norm", bias=REQUIRED), *attention(REQUIRED, REQUIRED, o_proj="dense"),
            *norm("self_attn.q_layernorm", "attn_q_norm", "head_dim", "qk_layernorm", "qk_layernorm"),
            *norm("self_attn.k_layernorm", "attn_k_norm", "head_dim", "qk_layernorm", "qk_layernorm"),
            *plain_mlp(REQUIRED, "mlp.fc1", "mlp.fc2"),
            last="model.final_layernorm", norm_bias=REQUIRED, head_bias=OUTPUT,
        ),
        keys=(
            *DIMS, GROUPED, ROPE, LAYER_EPS, ROPE_DIM, must_be("qk_layernorm", False),
            must_be("hidden_act", "gelu_new"),
        ),
        defaults={"": {
            "max_position_embeddings": 2048, "intermediate_size": 8192, "layer_norm_eps": 1e-5,
            "partial_rotary_factor": 0.5, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
        }},
    ),
    Architecture(
        id="phi3", gguf="phi3", **hf_names("Phi3", "phi3"),
        gguf_only=("rope_factors_long.weight", "rope_factors_short.weight"),
        tensors=network(
            *norm("input_layernorm", "attn_norm"), *linear("self_attn.qkv_proj", "attn_qkv", "q+2*kv,hidden"),
            *linear("self_attn.o_proj", "attn_output", "hidden,q"), *norm("post_attention_layernorm", "ffn_norm"),
            *_fused_mlp(),
        ),
        keys=(
            *DIMS, GROUPED, ROPE, Key("rope.scaling.original_context_length", ("original_max_position_embeddings",)),
            RMS_EPS, ROPE_DIM, Key("attention.sliding_window", ("sliding_window",), converter=or_zero), SILU,
        ),
        differs=(NO_WINDOW,),
        defaults={"": {
            "max_position_embeddings": 4096, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 32000, "pad_token_id": 32000,
        }},
    ),
    Architecture(
        id="starcoder2", gguf="starcoder2", **hf_names("Starcoder2", "starcoder2"), gguf_only=(),
        tensors=decoder(
            *attention("use_bias", "use_bias"), mlp=plain_mlp("use_bias", "mlp.c_fc", "mlp.c_proj"), norm_bias=REQUIRED
        ),
        keys=(
            *DIMS, GROUPED, ROPE, _layer_eps("norm_epsilon"), HEAD_DIM, WINDOW, must_be("use_bias", True),
            must_be("hidden_act", "gelu_pytorch_tanh"),
        ),
        differs=(NO_WINDOW,),
        defaults={"": {
            "max_position_embeddings": 4096, "num_key_value_heads": 2, "norm_epsilon": 1e-5,
            "tie_word_embeddings": True, "bos_token_id": 50256, "eos_token_id": 50256,
        }},
    ),
    Architecture(
        id="jais2", gguf="jais2", **hf_names("Jais2", "jais2"), gguf_only=(),
        tensors=decoder(
            *attention("attention_bias", "attention_bias"),
            mlp=plain_mlp("mlp_bias", "mlp.up_proj", "mlp.down_proj"), norm_bias=REQUIRED,
        ),
        keys=(
            *DIMS, GROUPED, ROPE, LAYER_EPS, HEAD_DIM, ROPE_DIM, must_be("hidden_act", "relu2"),
            must_be("attention_bias", True), must_be("mlp_bias", True),
        ),
        defaults={"": {
            "max_position_embeddings": 8192, "layer_norm_eps": 1e-5, "attention_bias": True, "mlp_bias": True,
            "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 150024,
        }},
    ),
    Architecture(
        id="bitnet", gguf="bitnet",
        **class_names(
            "BitNetForCausalLM", "BitnetForCausalLM", "BitNetModel", types=("bitnet",), bare=("BitNetModel",),
        ),
        gguf_only=(), head_never=True,
        tensors=decoder(
            *attention("attention_bias", "attention_bias"), *norm("self_attn.attn_sub_norm", "attn_sub_norm"),
            *norm("self_attn.inner_attn_ln", "attn_sub_norm"),
            mlp=(
                *gated_mlp(), *norm("mlp.ffn_sub_norm", "ffn_sub_norm", "ffn"),
                *norm("mlp.ffn_layernorm", "ffn_sub_norm", "ffn"),
            ),
        ),
        keys=(*DECODER, WHOLE_HEADS, SILU, must_be("attention_bias", False), Key("", ("weight_bits",))),
        differs=(
            Difference(
                "llama.cpp takes the weights as they are, and this network rounds them to three values as it runs",
                "weight_bits|quantization_config.quantization_mode=online",
            ),
        ),
        defaults={"": {
            "max_position_embeddings": 2048, "num_key_value_heads": 5, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
            "hidden_act": "relu2", "attention_bias": False, "tie_word_embeddings": False, "bos_token_id": 128000,
            "eos_token_id": 128001,
        }},
    ),
)
