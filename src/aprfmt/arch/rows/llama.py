"""Rows of the architecture table: Llama and the families that share its rotary order."""

from __future__ import annotations

from dataclasses import replace

from aprfmt.arch import projectors
from aprfmt.arch.converter import DEFAULT, Converter, Scope, nothing
from aprfmt.arch.converters.common import every_fourth, is_list, llama_4_scaling, numbers, of_tensor, yarn_log
from aprfmt.arch.converters.heads import pooling
from aprfmt.arch.projectors import DEEPSTACK, MAP, TARGETS
from aprfmt.arch.row import OPTIONAL, REQUIRED, Architecture, Difference, Key, TensorRow
from aprfmt.arch.rows.parts import (
    DECODER, DIMS, GROUPED, HEAD_DIM, NO_WINDOW, PAD, ROPE, ROPE_DIM, SCALES, SILU, SLIDING_LAYERS, VOCAB, WINDOW,
    attention, block, class_names, decoder, embedding, flag, gated_mlp, head, hf_names, must_be, network, norm,
    plain_mlp,
)
from aprfmt.arch.rows.parts_encoder import ENCODER


_IMAGE_TOKENS = ("IMGIMG", "<image>")


def _image_tokens(value: object, scope: Scope) -> object:
    """The tokens of Chameleon's pictures and their ids, which the class needs and a GGUF has with its vocabulary."""
    tokens = scope.kv.get("tokenizer.ggml.tokens")
    if not scope.kv:
        return DEFAULT
    listed = tokens if is_list(tokens) else ()
    return {str(token): i for i, token in enumerate(listed) if str(token).startswith(_IMAGE_TOKENS)}


image_tokens = Converter(nothing, _image_tokens)


def _mapping_to(value: object, scope: Scope) -> object:
    """What a GGUF told, else what the lists of the whole model's config.json say; nothing for Granite alone."""
    n_layers = scope.h.num_layers or 0
    if value is not None:
        return numbers(value, scope.name)[:n_layers]
    told = {name: scope.config(name) for name in (MAP, TARGETS)}
    return projectors.deepstack_mapping(told, n_layers) if any(told.values()) else None


deepstack_mapping = Converter(_mapping_to, lambda value, scope: value)
pooling_avg = replace(pooling, normalize=lambda value, scope: "mean" if value == "avg" else DEFAULT)


def _unit_mscale_from(value: object, scope: Scope) -> object:
    """`mscale_all_dim` of a runtime that takes `mscale` for 1."""
    scaling = scope.h.extra.get("rope_scaling")
    if value is not None and isinstance(scaling, dict):
        scaling.setdefault("mscale", 1.0)
    return yarn_log.from_gguf(value, scope)


unit_mscale = Converter(yarn_log.to_gguf, _unit_mscale_from)

_LLAMA = (*DECODER, VOCAB, ROPE_DIM)
_BIASES = (flag("attention_bias"), flag("mlp_bias"))
_NO_BIASES = (must_be("attention_bias", False), must_be("mlp_bias", False))
_FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


_PLAIN = decoder(*attention(permuted=True))
_BIASED = decoder(*attention("attention_bias", "attention_bias", permuted=True), mlp=gated_mlp("mlp_bias"))

_LLAMA_DEFAULTS = {
    "num_attention_heads": 32, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "max_position_embeddings": 2048,
    "bos_token_id": 1, "eos_token_id": 2,
}
_INTERNLM3 = {
    "num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1e-5, "max_position_embeddings": 32768,
    "pad_token_id": 2,
}
_IQUESTCODER = {
    "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
}
_MISTRAL_DEFAULTS = {
    "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "max_position_embeddings": 131072, "num_key_value_heads": 8,
    "sliding_window": 4096, "bos_token_id": 1, "eos_token_id": 2,
}


def _head_norms(side: str, heads: str) -> tuple[TensorRow, ...]:
    """A norm with a bias for each head, whose values follow the rotary order of the head."""
    rows = norm(f"self_attn.{side}_norm", f"attn_{side}_norm", f"{heads},head_dim", REQUIRED)
    order = (f"swap:{heads},2,head_dim/2",)
    return tuple(replace(row, dims=(f"{heads},head_dim",), order=order, flat=True) for row in rows)


_XIELU = {"alpha_n": "1", "alpha_p": "1", "beta": "", "eps": ""}
"""Numbers of a layer's activation, and the shapes that checkpoints hold them in."""


ROWS: tuple[Architecture, ...] = (
    Architecture(
        id="llama", gguf="llama",
        **class_names(
            "LlamaForCausalLM", "LLaMAForCausalLM", "VLlama3ForCausalLM", "InternLM3ForCausalLM",
            "IQuestCoderForCausalLM", "LlamaModel", types=("llama", "smollm", "smollm2", "internlm3", "iquestcoder"),
            bare=("LlamaModel",),
        ),
        rope_type=0, gguf_only=_FACTORS,
        tensors=_BIASED, keys=(*_LLAMA, SILU, *_BIASES, Key("", ("clip_qkv",), "f32")),
        differs=(Difference("llama.cpp's llama does not clip Q, K and V (clip_qkv)", "clip_qkv"),),
        defaults={"": _LLAMA_DEFAULTS, "internlm3": _INTERNLM3, "iquestcoder": _IQUESTCODER},
    ),
    Architecture(
        id="llama_bidirec", gguf="llama-embed",
        **class_names("LlamaBidirectionalModel", types=("llama_bidirec",), bare=("LlamaBidirectionalModel",)),
        rope_type=0, gguf_only=_FACTORS,
        tensors=_BIASED, keys=(*_LLAMA, ENCODER[0], replace(ENCODER[1], converter=pooling_avg), SILU, *_BIASES),
        defaults={"": _LLAMA_DEFAULTS | {"pooling": "mean"}},
    ),
    Architecture(
        id="ministral", gguf="llama", when="attention.sliding_window_pattern&!expert_count",
        **hf_names("Ministral", "ministral"),
        rope_type=0,
        tensors=_PLAIN, keys=(*_LLAMA, SILU, WINDOW, SLIDING_LAYERS),
        differs=(NO_WINDOW,),
        defaults={"": {
            "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "max_position_embeddings": 131072,
            "num_key_value_heads": 8, "sliding_window": 4096, "sliding_window_pattern": "L", "bos_token_id": 1,
            "eos_token_id": 2,
        }},
    ),
    Architecture(
        id="mistral", gguf="llama", when="attention.sliding_window&!expert_count", **hf_names("Mistral", "mistral"),
        rope_type=0,
        gguf_only=_FACTORS,
        tensors=_PLAIN, keys=(*_LLAMA, SILU, WINDOW),
        differs=(NO_WINDOW,), defaults={"": _MISTRAL_DEFAULTS},
    ),
    Architecture(  # Mistral inside Mistral3, the wrapper
        id="mistral3", gguf="mistral3", hf_class="MistralForCausalLM", model_type="mistral", hf_classes=(),
        model_types=(), rope_type=0,
        tensors=_PLAIN, keys=(*_LLAMA, SILU, WINDOW),
        differs=(NO_WINDOW,), defaults={"": _MISTRAL_DEFAULTS},
    ),
    Architecture(
        id="ministral3", gguf="mistral3", when="attention.temperature_scale|rope.scaling.yarn_log_multiplier",
        **hf_names("Ministral3", "ministral3"), rope_type=0,
        tensors=_PLAIN,
        keys=(
            *_LLAMA, Key("rope.scaling.yarn_log_multiplier", (), "f32", converter=unit_mscale),
            Key("attention.temperature_scale", (), "f32", converter=llama_4_scaling), SILU, PAD, WINDOW,
        ),
        differs=(NO_WINDOW,),
        defaults={"": {
            "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "max_position_embeddings": 262144,
            "num_key_value_heads": 8, "head_dim": 128, "bos_token_id": 1, "pad_token_id": 11, "eos_token_id": 2,
        }},
    ),
    Architecture(
        id="arcee", gguf="arcee", **hf_names("Arcee", "arcee"), rope_type=0,
        tensors=decoder(
            *attention("attention_bias", "attention_bias", permuted=True),
            mlp=plain_mlp("mlp_bias", "mlp.up_proj", "mlp.down_proj"),
        ),
        keys=(*_LLAMA, must_be("hidden_act", "relu2"), *_NO_BIASES),
        defaults={"": {
            "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "max_position_embeddings": 4096, "bos_token_id": 128000,
            "eos_token_id": 128001,
        }},
    ),
    Architecture(
        id="smollm3", gguf="smollm3", **hf_names("SmolLM3", "smollm3"), rope_type=0, gguf_only=(),
        tensors=_BIASED,
        keys=(
            *_LLAMA, SILU, PAD, *_NO_BIASES, Key("", ("no_rope_layers",), "i32[]", converter=every_fourth),
            Key("", ("no_rope_layer_interval",)), must_be("use_sliding_window", False), Key("", ("sliding_window",)),
            Key("", ("layer_types",), "str"),
        ),
        defaults={"": {
            "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "max_position_embeddings": 32768,
            "num_key_value_heads": 4, "rope_theta": 2000000.0, "bos_token_id": 128000, "pad_token_id": 128004,
            "eos_token_id": 128001,
        }},
    ),
    Architecture(
        id="granite", required={"logit_scale": ""}, gguf="granite",
        **hf_names("Granite", "granite", also=("granite4_vision_text",)), rope_type=0,
        tensors=_BIASED,
        keys=(
            *_LLAMA, *SCALES, SILU, *_BIASES,
            Key("deepstack_mapping", (DEEPSTACK,), "i32[]", converter=deepstack_mapping), Key("", (MAP,)),
            Key("", (TARGETS,)),
        ),
        defaults={"granite4_vision": {TARGETS: [12, 15, 18, 21]}, "": {
            "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "max_position_embeddings": 2048,
            "attention_multiplier": 1.0, "embedding_multiplier": 1.0, "residual_multiplier": 1.0, "logits_scaling": 1.0,
            "bos_token_id": 1, "eos_token_id": 2,
        }},
    ),
    Architecture(
        id="olmo", gguf="olmo", **hf_names("Olmo", "olmo", "OLMo"), rope_type=0, gguf_only=(),
        tensors=(
            embedding(), *block(*attention("attention_bias", "attention_bias", permuted=True), *gated_mlp()), *head(),
        ),
        keys=(
            *DIMS, GROUPED, ROPE, HEAD_DIM, Key("attention.layer_norm_epsilon", (), "f32", constant=1e-5),
            Key("attention.clamp_kqv", ("clip_qkv",), "f32"), SILU, PAD, must_be("attention_bias", False),
        ),
        defaults={"": {
            "tie_word_embeddings": False, "max_position_embeddings": 2048, "pad_token_id": 1, "eos_token_id": 50279,
        }},
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
        defaults={"": {
            "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "max_position_embeddings": 4096, "swin_norm": False,
            "attention_bias": False, "mlp_bias": False, "num_key_value_heads": 32, "bos_token_id": 1, "eos_token_id": 2,
        }},
    ),
    Architecture(
        id="apertus", required=dict.fromkeys((f"xielu.{name}" for name in _XIELU), ""), gguf="apertus",
        **hf_names("Apertus", "apertus"), head_always=True,
        tensors=network(
            *norm("attention_layernorm", "attn_norm"),
            *attention("attention_bias", "attention_bias", qk_norm="head_dim"),
            *norm("feedforward_layernorm", "ffn_norm"), *plain_mlp(None, "mlp.up_proj", "mlp.down_proj"),
            *(TensorRow((f"mlp.act_fn.{name}",), (), (dims,), OPTIONAL) for name, dims in _XIELU.items()),
        ),
        keys=(
            *_LLAMA,
            *(
                Key(f"xielu.{name}", (f"model.layers.{{n}}.mlp.act_fn.{name}",), "f32[]", converter=of_tensor)
                for name in _XIELU
            ),
            must_be("hidden_act", "xielu"), flag("attention_bias"),
        ),
        defaults={"": {
            "hidden_act": "xielu", "max_position_embeddings": 65536, "rms_norm_eps": 1e-5, "attention_bias": False,
            "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3,
            "rope_parameters": {
                "rope_type": "llama3", "rope_theta": 12000000.0, "factor": 8.0,
                "original_max_position_embeddings": 8192, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            },
        }},
    ),
)
