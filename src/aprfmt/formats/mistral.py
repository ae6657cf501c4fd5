"""Mistral's own layout of a model: params.json and consolidated.safetensors.

Rows of Q and K are ordered as in a GGUF: values that rotate together are neighbours. So these two get their GGUF names
here and are mapped to a checkpoint's order like any GGUF. All others get Hugging Face names.
"""

from __future__ import annotations

import re

from aprfmt.errors import UnsupportedError
from aprfmt.types import Json, JsonObject

PARAMS_NAME = "params.json"

_NAMES = {"tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"}
_LAYER = re.compile(r"layers\.(\d+)\.(.+)\.(weight|bias|qscale_weight|qscale_act)")
_ENDINGS = {"qscale_weight": "weight_scale", "qscale_act": "input_scale"}
_EXPERT = re.compile(r"(?:feed_forward\.)?experts\.(\d+)\.(w[123])")
_IN_LAYER = {
    "attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj", "attention.wq_a": "self_attn.q_a_proj",
    "attention.q_a_norm": "self_attn.q_a_layernorm", "attention.wq_b": "self_attn.q_b_proj",
    "attention.wkv_a_with_mqa": "self_attn.kv_a_proj_with_mqa", "attention.kv_a_norm": "self_attn.kv_a_layernorm",
    "attention.wkv_b": "self_attn.kv_b_proj", "feed_forward.w1": "mlp.gate_proj", "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj", "feed_forward.gate": "block_sparse_moe.gate", "gate": "mlp.gate",
    "shared_experts.w1": "mlp.shared_experts.gate_proj", "shared_experts.w2": "mlp.shared_experts.down_proj",
    "shared_experts.w3": "mlp.shared_experts.up_proj",
}  # fmt: skip
_AS_IN_GGUF = {"attention.wq": "attn_q", "attention.wk": "attn_k"}
_PROJECTIONS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}

_KEYS = {
    "dim": "hidden_size", "n_layers": "num_hidden_layers", "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads", "head_dim": "head_dim", "hidden_dim": "intermediate_size",
    "norm_eps": "rms_norm_eps", "vocab_size": "vocab_size", "rope_theta": "rope_theta",
    "sliding_window": "sliding_window", "q_lora_rank": "q_lora_rank", "kv_lora_rank": "kv_lora_rank",
    "qk_rope_head_dim": "qk_rope_head_dim", "qk_nope_head_dim": "qk_nope_head_dim", "v_head_dim": "v_head_dim",
}  # fmt: skip
_MOE_KEYS = {
    "num_experts": "n_routed_experts", "num_experts_per_tok": "num_experts_per_tok",
    "expert_hidden_dim": "moe_intermediate_size", "num_shared_experts": "n_shared_experts",
    "routed_scale": "routed_scaling_factor", "first_k_dense_replace": "first_k_dense_replace",
    "num_expert_groups": "n_group", "num_expert_groups_per_tok": "topk_group",
}  # fmt: skip
_LONGEST_TEXT = 128_000
"""Default number of positions."""


def is_weights(name: str) -> bool:
    """Whether a file of that name contains weights under Mistral's names."""
    return name.startswith("consolidated") and name.endswith(".safetensors")


def to_name(name: str) -> str:
    """The tensor's name in other layouts; those of towers keep their names."""
    stem, _, end = name.rpartition(".")
    if stem in _NAMES and end in ("weight", "bias"):
        return f"{_NAMES[stem]}.{end}"
    if (match := _LAYER.fullmatch(name)) is None:
        return name
    layer, inner, end = match.groups()
    end = _ENDINGS.get(end, end)
    if inner in _AS_IN_GGUF:
        return f"blk.{layer}.{_AS_IN_GGUF[inner]}.{end}"
    if (expert := _EXPERT.fullmatch(inner)) is not None:
        number, part = expert.groups()
        own = f"block_sparse_moe.experts.{number}.{part}"
        inner = own if inner.startswith("feed_forward") else f"mlp.experts.{number}.{_PROJECTIONS[part]}"
        return f"model.layers.{layer}.{inner}.{end}"
    return f"model.layers.{layer}.{_IN_LAYER[inner]}.{end}" if inner in _IN_LAYER else name


def to_config(params: JsonObject) -> JsonObject:
    """Translates params.json to a config.json. Raises UnsupportedError for quantization that cannot be decoded."""
    config: JsonObject = {own: params[key] for key, own in _KEYS.items() if params.get(key) is not None}
    config |= _quantization(params.get("quantization"))
    positions = params.get("max_position_embeddings") or params.get("max_seq_len") or _LONGEST_TEXT
    config |= {
        "max_position_embeddings": positions,
        "tie_word_embeddings": params.get("tied_embeddings") is True,
        "hidden_act": params.get("activation", "silu"),
        "sliding_window": config.get("sliding_window"),
    }
    moe, scaling = params.get("moe"), params.get("llama_4_scaling")
    if (yarn := _yarn(params)) is not None:
        config["rope_parameters"] = yarn
    if isinstance(moe, dict) and "kv_lora_rank" not in config:
        return _named(config, "MixtralForCausalLM", "mixtral") | {
            "num_local_experts": moe.get("num_experts"),
            "num_experts_per_tok": moe.get("num_experts_per_tok"),
        }
    if isinstance(moe, dict):
        return _named(config, "Mistral4ForCausalLM", "mistral4") | _experts(moe)
    if isinstance(scaling, dict):
        return _named(config, "Ministral3ForCausalLM", "ministral3")
    return _named(config, "MistralForCausalLM", "mistral")


def _quantization(stated: Json) -> JsonObject:
    """The quantization_config for FP8 weights with one scale per tensor."""
    if not isinstance(stated, dict):
        return {}
    if stated.get("qformat_weight") != "fp8_e4m3":
        raise UnsupportedError(
            f"params.json declares {stated.get('qformat_weight')} weights; only fp8_e4m3 is supported in this layout",
            path=PARAMS_NAME,
            hint="use the repository's config.json and model*.safetensors",
        )
    packed: JsonObject = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
    return {"quantization_config": packed, "dtype": "bfloat16"}


def _experts(moe: JsonObject) -> JsonObject:
    """Experts with latent attention. Raises UnsupportedError unless every layer after the first has them."""
    if moe.get("route_every_n", 1) != 1:
        raise UnsupportedError(
            f"params.json has experts in one of every {moe['route_every_n']} layers; only experts in every layer "
            "are supported in this layout",
            path=PARAMS_NAME,
            hint="use the repository's config.json and model*.safetensors",
        )
    return {own: moe[key] for key, own in _MOE_KEYS.items() if moe.get(key) is not None}


def _named(config: JsonObject, hf_class: str, model_type: str) -> JsonObject:
    return {"architectures": [hf_class], "model_type": model_type, **config}


def _yarn(params: JsonObject) -> JsonObject | None:
    yarn, scaling = params.get("yarn"), params.get("llama_4_scaling")
    if not isinstance(yarn, dict):
        return None
    scale: Json = 0.0 if yarn.get("apply_scale") else 1.0
    found: JsonObject = {
        "rope_type": "yarn", "rope_theta": params.get("rope_theta"), "factor": yarn.get("factor"),
        "beta_fast": yarn.get("beta"), "beta_slow": yarn.get("alpha"),
        "original_max_position_embeddings": yarn.get("original_max_position_embeddings"), "mscale": 1.0,
        "mscale_all_dim": scale,
    }  # fmt: skip
    return found | ({"llama_4_scaling_beta": scaling.get("beta")} if isinstance(scaling, dict) else {})
