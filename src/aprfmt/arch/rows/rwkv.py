"""Rows of the architecture table: RWKV, whose layers mix each token with the one before it and a decaying state."""

from __future__ import annotations

from aprfmt.arch.row import REQUIRED, Architecture, Key, TensorRow
from aprfmt.arch.rows.parts import DIMS, EPSILON, block, embedding, final_norm, head, linear, norm, tensor

_BLOCKS, _, _WIDTH, _FFN, _ = DIMS
_MIX, _DECAY = "time_mix_extra_dim", "time_decay_extra_dim"
_ROW = "1,1,hidden"


def _vector(hf: str, gguf: str) -> TensorRow:
    return tensor(hf, gguf, _ROW, gguf_dims=("hidden",))


_FUSED = TensorRow(
    tuple(f"attention.time_maa_{name}" for name in "wkvrg"),
    ("time_mix_lerp_fused.weight",),
    (_ROW,),
    gguf_dims=("5,1,1,hidden",),
)
_TIME_MIX = (
    _vector("attention.time_maa_x", "time_mix_lerp_x.weight"),
    _FUSED,
    tensor("attention.time_maa_w1", "time_mix_w1.weight", f"hidden,5*{_MIX}", transposed=True),
    tensor("attention.time_maa_w2", "time_mix_w2.weight", f"5,{_MIX},hidden", transposed=True),
    _vector("attention.time_decay", "time_mix_decay.weight"),
    tensor("attention.time_decay_w1", "time_mix_decay_w1.weight", f"hidden,{_DECAY}", transposed=True),
    tensor("attention.time_decay_w2", "time_mix_decay_w2.weight", f"{_DECAY},hidden", transposed=True),
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
        id="rwkv6",
        gguf="rwkv6",
        hf_class="Rwkv6ForCausalLM",
        model_type="rwkv6",
        hf_classes=("Rwkv6ForCausalLM",),
        model_types=("rwkv6",),
        required={"wkv.head_size": "", _MIX: "", _DECAY: ""},
        gguf_only=(),
        tensors=(
            embedding("rwkv.embeddings"),
            *norm("rwkv.blocks.0.pre_ln", "token_embd_norm", bias=REQUIRED),
            *block(
                *norm("ln1", "attn_norm", bias=REQUIRED),
                *_TIME_MIX,
                *norm("ln2", "attn_norm_2", bias=REQUIRED),
                *_CHANNEL_MIX,
                hf="rwkv.blocks.{n}.",
            ),
            *final_norm("rwkv.ln_out", bias=REQUIRED),
            *head("head"),
        ),
        keys=(
            Key("context_length", constant=1 << 20),
            _WIDTH,
            _BLOCKS,
            EPSILON,
            Key("rescale_every_n_layers", ("rescale_every",)),
            Key("wkv.head_size", ("head_size",)),
            Key(_MIX, (_MIX,), via="mix_rank"),
            Key(_DECAY, (_DECAY,), via="decay_rank"),
            Key(_FFN.gguf, _FFN.hf, field=_FFN.field, via="rwkv_width"),
            Key("attention.head_count", constant=0),
        ),
        defaults={"": {"head_size": 64, "layer_norm_epsilon": 1e-5, "rescale_every": 6, "tie_word_embeddings": False}},
        head_always=True,
    ),
)
