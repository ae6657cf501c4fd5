"""Rows of the architecture table: RWKV 6, whose layers mix each token with the one before it and a decaying state."""

from __future__ import annotations

from dataclasses import replace

from aprfmt.arch.converter import Converter, GgufKeys, Scope
from aprfmt.arch.converters.common import heads_from
from aprfmt.arch.row import REQUIRED, Architecture, Key, TensorRow
from aprfmt.arch.rows.parts import (
    DIMS, EPSILON, GROUPED, RMS_EPS, SILU, block, class_names, decoder, embedding, final_norm, flag, head, linear,
    must_be, norm, tensor,
)


_LARGE = 4096
"""Of this hidden size RWKV 6 has projections of twice the rank."""


def _rank(rank: int) -> Converter:
    return Converter(derive=lambda scope: 2 * rank if scope.h.hidden_size == _LARGE else rank)


def _rank_from(rank: int) -> Converter:
    """The same in Qwen 2, where larger ones have it too."""
    return Converter(derive=lambda scope: 2 * rank if (scope.h.hidden_size or 0) >= _LARGE else rank)


def _width_6(scope: Scope) -> int | None:
    return int(scope.h.hidden_size * 3.5) // 32 * 32 if scope.h.hidden_size else None


def _heads_to(value: object, scope: Scope) -> GgufKeys | None:
    size = scope.h.plain_head_dim
    return None if size is None else GgufKeys({"wkv.head_size": ("u32", size), "attention.head_count": ("u32", 0)})


mix_rank = _rank(32)
decay_rank = _rank(64)
mix_rank_in_qwen = _rank_from(32)
decay_rank_in_qwen = _rank_from(64)
rwkv_width = Converter(derive=_width_6)
state_heads = Converter(_heads_to, heads_from)

_BLOCKS, _, _WIDTH, _FFN, _HEADS = DIMS
_MIX, _DECAY = "time_mix_extra_dim", "time_decay_extra_dim"
_SHIFT_RANK, _DECAY_RANK = "lora_rank_tokenshift", "lora_rank_decay"
_ROW = "1,1,hidden"


def _vector(hf: str, gguf: str) -> TensorRow:
    return tensor(hf, gguf, _ROW, gguf_dims=("hidden",))


def _low_ranks(hf: str, mix: str, decay: str, order: tuple[str, ...] = ()) -> tuple[TensorRow, ...]:
    """What each input takes of the token before, by token, and how fast states decay."""
    fused = tuple(f"{hf}time_maa_{name}" for name in "wkvrg")
    return (
        _vector(f"{hf}time_maa_x", "time_mix_lerp_x.weight"),
        TensorRow(fused, ("time_mix_lerp_fused.weight",), (_ROW,), gguf_dims=("5,1,1,hidden",)),
        tensor(f"{hf}time_maa_w1", "time_mix_w1.weight", f"hidden,5*{mix}", transposed=True, order=order),
        tensor(f"{hf}time_maa_w2", "time_mix_w2.weight", f"5,{mix},hidden", transposed=True, order=order),
        _vector(f"{hf}time_decay", "time_mix_decay.weight"),
        tensor(f"{hf}time_decay_w1", "time_mix_decay_w1.weight", f"hidden,{decay}", transposed=True),
        tensor(f"{hf}time_decay_w2", "time_mix_decay_w2.weight", f"{decay},hidden", transposed=True),
    )


_TIME_MIX = (
    *_low_ranks("attention.", _MIX, _DECAY),
    tensor("attention.time_faaaa", "time_mix_first.weight", "hidden/head_size,head_size"),
    *(
        row
        for name in ("receptance", "key", "value", "gate")
        for row in linear(f"attention.{name}", f"time_mix_{name}", "hidden,hidden")
    ),
    *norm("attention.ln_x", "time_mix_ln", bias=REQUIRED),
    *linear("attention.output", "time_mix_output", "hidden,hidden", scale=(":rescaled",)),
)
_CHANNEL_MIX = (
    _vector("feed_forward.time_maa_k", "channel_mix_lerp_k.weight"),
    _vector("feed_forward.time_maa_r", "channel_mix_lerp_r.weight"),
    *linear("feed_forward.key", "channel_mix_key", "ffn,hidden"),
    *linear("feed_forward.receptance", "channel_mix_receptance", "hidden,hidden"),
    *linear("feed_forward.value", "channel_mix_value", "hidden,ffn", scale=(":rescaled",)),
)

ROWS: tuple[Architecture, ...] = (
    Architecture(
        id="rwkv6", gguf="rwkv6", **class_names("Rwkv6ForCausalLM", types=("rwkv6",)),
        required={"wkv.head_size": "", _MIX: "", _DECAY: ""}, gguf_only=(),
        tensors=(
            embedding("rwkv.embeddings"), *norm("rwkv.blocks.0.pre_ln", "token_embd_norm", bias=REQUIRED),
            *block(
                *norm("ln1", "attn_norm", bias=REQUIRED), *_TIME_MIX, *norm("ln2", "attn_norm_2", bias=REQUIRED),
                *_CHANNEL_MIX,
                hf="rwkv.blocks.{n}.",
            ),
            *final_norm("rwkv.ln_out", bias=REQUIRED), *head("head"),
        ),
        keys=(
            Key("context_length", constant=1 << 20), _WIDTH, _BLOCKS, EPSILON,
            Key("rescale_every_n_layers", ("rescale_every",)), Key("wkv.head_size", ("head_size",)),
            Key(_MIX, (_MIX,), converter=mix_rank), Key(_DECAY, (_DECAY,), converter=decay_rank),
            Key(_FFN.gguf, _FFN.hf, field=_FFN.field, converter=rwkv_width), Key("attention.head_count", constant=0),
            must_be("head_size_divisor", 8),
        ),
        defaults={"": {
            "head_size": 64, "head_size_divisor": 8, "layer_norm_epsilon": 1e-5, "rescale_every": 6,
            "tie_word_embeddings": False,
        }},
        head_always=True,
    ),
    Architecture(
        id="rwkv6qwen2", gguf="rwkv6qwen2", **class_names("RWKV6Qwen2ForCausalLM", types=("rwkv6qwen2",)),
        required={"wkv.head_size": "", _MIX: "", _DECAY: ""}, gguf_only=(),
        tensors=decoder(
            *_low_ranks("self_attn.", _SHIFT_RANK, _DECAY_RANK, ("parts:3,1,2,0,4",)),
            *linear("self_attn.q_proj", "time_mix_receptance", "q,hidden", "attention_bias"),
            *linear("self_attn.k_proj", "time_mix_key", "kv,hidden", "attention_bias"),
            *linear("self_attn.v_proj", "time_mix_value", "kv,hidden", "attention_bias"),
            *linear("self_attn.gate", "time_mix_gate", "q,hidden"),
            *linear("self_attn.o_proj", "time_mix_output", "hidden,q"),
        ),
        keys=(
            Key("context_length", constant=1 << 20), _WIDTH, _BLOCKS, replace(_HEADS, converter=state_heads),
            Key(_MIX, (_SHIFT_RANK,), converter=mix_rank_in_qwen),
            Key(_DECAY, (_DECAY_RANK,), converter=decay_rank_in_qwen),
            _FFN, RMS_EPS, Key("token_shift_count", constant=1), GROUPED, flag("attention_bias"),
            must_be("attention_output_bias", False), SILU,
        ),
        defaults={"": {
            "attention_bias": True, "attention_output_bias": False, "hidden_act": "silu", "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
        }},
        head_always=True,
    ),
)
