"""Rows of the architecture table: latent attention whose keys and values llama.cpp unfolds, and a dense MLP."""

from __future__ import annotations

from aprfmt.arch.converter import DEFAULT, Converter, Scope
from aprfmt.arch.converters.common import odd_value_length
from aprfmt.arch.fields import as_int
from aprfmt.arch.row import Architecture, Key, TensorRow
from aprfmt.arch.rows.parts import (
    DIMS, GROUPED, RMS_EPS, ROPE, SILU, VOCAB, decoder, hf_names, linear, must_be, norm, plain_mlp,
)
from aprfmt.arch.rows.parts_mla import MLA_REQUIRED, latent_attention, mla_keys
from aprfmt.arch.rows.parts_moe import EQUAL_HEADS
from aprfmt.errors import RefusedError


def _given_to(value: object, scope: Scope) -> object:
    if value is None:
        raise RefusedError(
            f"{scope.name} is null: llama.cpp's {scope.row.gguf} knows only networks that have it",
            hint="an .apr or a folder can hold the model: -o NAME.apr, or -o NAME --format hf",
        )
    return value


def _nope_and_rope_to(value: object, scope: Scope) -> int | None:
    parts = as_int(value, scope.name), scope.h.head_dim
    return None if parts[0] is None or parts[1] is None else parts[0] + parts[1]


def _nope_from(value: object, scope: Scope) -> object:
    length, rotated = as_int(value, scope.key.gguf), scope.h.head_dim
    return length - rotated if length and rotated and length >= rotated else DEFAULT


given = Converter(_given_to)
nope_and_rope = Converter(_nope_and_rope_to, _nope_from)

_KEY, _LATENT = "qk_nope_head_dim+head_dim", "kv_lora_rank"
_ROTATED = Key("rope.dimension_count", ("qk_rope_head_dim",), field="head_dim")
"""What the rope parameters call a head is the part of it that is rotated."""


def _attention(*queries: TensorRow) -> tuple[TensorRow, ...]:
    """Keys and values of one latent vector and a rotated part that all heads share."""
    return (
        *queries, *linear("self_attn.kv_a_proj_with_mqa", "attn_kv_a_mqa", f"{_LATENT}+head_dim,hidden"),
        *norm("self_attn.kv_a_layernorm", "attn_kv_a_norm", _LATENT),
        *linear("self_attn.kv_b_proj", "attn_kv_b", f"heads*qk_nope_head_dim+heads*v_head_dim,{_LATENT}"),
        *linear("self_attn.o_proj", "attn_output", "hidden,heads*v_head_dim"),
    )


_WHOLE_QUERY = f"heads*{_KEY.replace('+', '+heads*')},"
_LOW_RANK = (
    *linear("self_attn.q_a_proj", "attn_q_a", "q_lora_rank,hidden", need="q_lora_rank"),
    *norm("self_attn.q_a_layernorm", "attn_q_a_norm", "q_lora_rank", need="q_lora_rank"),
    *linear("self_attn.q_b_proj", "attn_q_b", f"{_WHOLE_QUERY}q_lora_rank", need="q_lora_rank"),
    TensorRow(("self_attn.q_proj.weight",), (), (f"{_WHOLE_QUERY}hidden",), "!q_lora_rank"),
)


_OF_EXPERTS = ("expert_", "leading_dense")

ROWS: tuple[Architecture, ...] = (
    Architecture(  # every layer is one of DeepSeek's leading dense ones
        id="youtu", required=MLA_REQUIRED | {"attention.q_lora_rank": ""}, gguf="deepseek2",
        when="expert_feed_forward_length&!expert_count", **hf_names("Youtu", "youtu"), rope_type=0, gguf_only=(),
        tensors=decoder(*latent_attention()),
        keys=(
            *(key for key in mla_keys() if not key.gguf.startswith(_OF_EXPERTS)),
            Key("leading_dense_block_count", ("num_hidden_layers",), field="num_layers"),
            Key("expert_feed_forward_length", ("intermediate_size",), field="intermediate_size"),
            Key("expert_shared_count", constant=0), must_be("rope_interleave", True),
        ),
        defaults={"": {
            "max_position_embeddings": 131072, "num_key_value_heads": 16, "rms_norm_eps": 1e-6, "kv_lora_rank": 512,
            "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
            "attention_bias": False, "tie_word_embeddings": True, "bos_token_id": 128000, "eos_token_id": 128001,
        }},
    ),
    Architecture(
        id="minicpm3", gguf="minicpm3", required={"attention.q_lora_rank": "", "attention.key_length": ""},
        **hf_names("MiniCPM3", "minicpm3"), gguf_only=("rope_factors_long.weight", "rope_factors_short.weight"),
        tensors=decoder(*_attention(*_LOW_RANK)),
        keys=(
            *DIMS, GROUPED, _ROTATED, ROPE, RMS_EPS, VOCAB,
            Key("attention.q_lora_rank", ("q_lora_rank",), converter=given),
            Key("attention.kv_lora_rank", ("kv_lora_rank",)),
            Key("attention.key_length", ("qk_nope_head_dim",), converter=nope_and_rope),
            Key("attention.value_length", ("v_head_dim",), converter=odd_value_length), EQUAL_HEADS,
            must_be("scale_emb", 12), must_be("scale_depth", 1.4), must_be("dim_model_base", 256),
            must_be("attention_bias", False), must_be("mlp_bias", False), SILU,
        ),
        defaults={"": {
            "max_position_embeddings": 32768, "num_key_value_heads": 40, "rms_norm_eps": 1e-5, "kv_lora_rank": 256,
            "q_lora_rank": 768, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "scale_emb": 12, "scale_depth": 1.4,
            "dim_model_base": 256, "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": True,
            "bos_token_id": 1, "eos_token_id": 2,
        }},
    ),
    # As PLM-Team/PLM-1.8B-Base has it.
    Architecture(
        id="plm", gguf="plm", required={"attention.key_length": "", "attention.value_length": ""},
        **hf_names("PLM", "plm"), rope_type=0, gguf_only=(), head_never=True,
        tensors=decoder(
            *_attention(*linear("self_attn.q_proj", "attn_q", f"{_WHOLE_QUERY}hidden")),
            mlp=plain_mlp(None, "mlp.up_proj", "mlp.down_proj"),
        ),
        keys=(
            *DIMS, GROUPED, _ROTATED, ROPE, RMS_EPS, VOCAB, Key("attention.kv_lora_rank", ("kv_lora_rank",)),
            Key("attention.key_length", ("qk_nope_head_dim",), converter=nope_and_rope),
            Key("attention.value_length", ("v_head_dim",)), EQUAL_HEADS, must_be("attention_bias", False),
            must_be("hidden_act", "relu2"),
        ),
        defaults={"": {
            "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "attention_bias": False, "tie_word_embeddings": True,
        }},
    ),
)
