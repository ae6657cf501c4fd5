"""Cases of GPT-2's kin: learned positions, ALiBi, fused attention."""

from __future__ import annotations

from typing import Any

from arch_models import ArchCase

_UNTIED: dict[str, Any] = {"tie_word_embeddings": False}
_NEOX_ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}


def _gpt2(name: str, cannot: str = "", dtype: str = "float32", **config: Any) -> ArchCase:
    return ArchCase(name, "gpt2", "GPT2Config", "GPT2LMHeadModel", config, llama_cpp_cannot=cannot, dtype=dtype)


def _neox(name: str, rope: dict[str, Any] | None = None, **config: Any) -> ArchCase:
    config = {"rope_parameters": {**_NEOX_ROPE, **(rope or {})}, **config}
    return ArchCase(name, "gpt_neox", "GPTNeoXConfig", "GPTNeoXForCausalLM", config)


def _bigcode(name: str, **config: Any) -> ArchCase:
    return ArchCase(name, "gpt_bigcode", "GPTBigCodeConfig", "GPTBigCodeForCausalLM", config)


def _falcon(name: str, cannot: str = "", **config: Any) -> ArchCase:
    return ArchCase(name, "falcon", "FalconConfig", "FalconForCausalLM", config, llama_cpp_cannot=cannot)


def _bloom(name: str, cannot: str = "", **config: Any) -> ArchCase:
    return ArchCase(name, "bloom", "BloomConfig", "BloomForCausalLM", config, llama_cpp_cannot=cannot)


def _mpt(name: str, cannot: str = "", **config: Any) -> ArchCase:
    config = {"max_seq_len": 512, **config}
    return ArchCase(name, "mpt", "MptConfig", "MptForCausalLM", config, llama_cpp_cannot=cannot)


CASES: tuple[ArchCase, ...] = (
    _gpt2("gpt2"),
    _gpt2("gpt2/n_ctx", n_ctx=512),
    _gpt2("gpt2/untied", **_UNTIED),
    _gpt2("gpt2/inner", n_inner=80),
    _gpt2("gpt2/odd-heads", n_embd=60, n_head=3),
    _gpt2("gpt2/float16", dtype="float16"),
    _gpt2(
        "gpt2/inverse-layer",
        "its gpt2 network scales attention by 1/sqrt(head size) in every layer",
        scale_attn_by_inverse_layer_idx=True,
    ),
    _neox("gpt_neox"),
    _neox("gpt_neox/sequential", use_parallel_residual=False),
    _neox("gpt_neox/tied", tie_word_embeddings=True),
    _neox("gpt_neox/whole-rotary", {"partial_rotary_factor": 1.0}),
    _neox("gpt_neox/odd-heads", {"partial_rotary_factor": 0.5}, hidden_size=60, num_attention_heads=3),
    _neox("gpt_neox/theta", {"rope_theta": 50000.0}),
    _neox("gpt_neox/linear", {"rope_type": "linear", "factor": 4.0}),
    _neox("gpt_neox/yarn", {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}),
    _neox("gpt_neox/no-attention-bias", attention_bias=False),
    _bigcode("gpt_bigcode"),
    _bigcode("gpt_bigcode/multi-head", multi_query=False),
    _bigcode("gpt_bigcode/untied", **_UNTIED),
    _bigcode("gpt_bigcode/inner", n_inner=80),
    _falcon("falcon", multi_query=True),
    _falcon("falcon/7b", multi_query=True, num_kv_heads=1),
    _falcon("falcon/multi-head", multi_query=False),
    _falcon("falcon/40b", new_decoder_architecture=True, num_kv_heads=2),
    _falcon("falcon/11b", new_decoder_architecture=True, num_kv_heads=2, num_ln_in_parallel_attn=1),
    _falcon("falcon/untied", **_UNTIED),
    _falcon("falcon/ffn", ffn_hidden_size=96),
    _falcon("falcon/linear", rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}),
    _falcon("falcon/alibi", "its falcon network always applies RoPE", alibi=True),
    _falcon(
        "falcon/sequential",
        "its falcon network computes attention and MLP in parallel, without biases",
        parallel_attn=False,
        bias=True,
        multi_query=False,
    ),
    _bloom("bloom"),
    _bloom("bloom/untied", **_UNTIED),
    _bloom("bloom/six-heads", hidden_size=96, n_head=6),
    _bloom(
        "bloom/residual-norm",
        "its bloom network adds the residual before the norm",
        apply_residual_connection_post_layernorm=True,
    ),
    _mpt("mpt"),
    _mpt("mpt/untied", **_UNTIED),
    _mpt("mpt/six-heads", d_model=96, n_heads=6),
    _mpt("mpt/clipped", attn_config={"clip_qkv": 0.75}),
    _mpt(
        "mpt/softmax-scale",
        "its mpt network scales attention by 1/sqrt(head size)",
        attn_config={"softmax_scale": 0.125},
    ),
)
