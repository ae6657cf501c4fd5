"""RWKV 6 and 7."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from aprfmt.arch.blocks.decoder import (
    DIMS, EPSILON, GROUPED, LAYER_EPS, RMS_EPS, SILU, block, class_names, decoder, embedding, final_norm, flag,
    gated_mlp, head, linear, must_be, norm, tensor,
)
from aprfmt.arch.converter import DEFAULT, Converter, GgufKeys, Scope
from aprfmt.arch.fields import as_float, as_int
from aprfmt.arch.row import OPTIONAL, REQUIRED, Architecture, Difference, Key, TensorRow


def heads_from_gguf(value: object, scope: Scope) -> object:
    """The number of heads: a GGUF of these states the head size, and 0 for the number."""
    size, hidden = as_int(scope.gguf("wkv.head_size"), "wkv.head_size"), scope.h.hidden_size
    return hidden // size if size and hidden else DEFAULT


_LARGE = 4096
"""Hidden size from which RWKV 6 has projections of twice the rank."""


def _rank(rank: int) -> Converter:
    return Converter(derive=lambda scope: 2 * rank if scope.h.hidden_size == _LARGE else rank)


def _rank_from(rank: int) -> Converter:
    """The same for Qwen 2, where larger ones have it too."""
    return Converter(derive=lambda scope: 2 * rank if (scope.h.hidden_size or 0) >= _LARGE else rank)


def _heads_to_gguf(value: object, scope: Scope) -> GgufKeys | None:
    size = scope.h.plain_head_dim
    return None if size is None else GgufKeys({"wkv.head_size": ("u32", size), "attention.head_count": ("u32", 0)})


mix_rank = _rank(32)
decay_rank = _rank(64)
mix_rank_in_qwen = _rank_from(32)
decay_rank_in_qwen = _rank_from(64)
rwkv_width = Converter(derive=lambda scope: int(scope.h.hidden_size * 3.5) // 32 * 32 if scope.h.hidden_size else None)
state_heads = Converter(_heads_to_gguf, heads_from_gguf)
_BLOCKS, _, _WIDTH, _FFN, _HEADS = DIMS
_MIX, _DECAY = "time_mix_extra_dim", "time_decay_extra_dim"
_SHIFT_RANK, _DECAY_RANK = "lora_rank_tokenshift", "lora_rank_decay"
_ROW = "1,1,hidden"


def _vector(hf: str, gguf: str) -> TensorRow:
    return tensor(hf, gguf, _ROW, gguf_dims=("hidden",))


def _low_ranks(hf: str, mix: str, decay: str, order: tuple[str, ...] = ()) -> tuple[TensorRow, ...]:
    """Token-shift mixing of each input, by token, and the decay of states."""
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
_GATE_RANK = 128


def _rank_by(exponent: float, factor: float) -> Converter:
    """The rank of a product in RWKV 7, a multiple of 32."""

    def fill(scope: Scope) -> int | None:
        hidden = scope.h.hidden_size
        return 32 * max(1, round(hidden**exponent * factor / 32)) if hidden else None

    return Converter(derive=fill)


def _width_7(scope: Scope) -> int | None:
    ratio, hidden = as_float(scope.config("hidden_ratio"), "hidden_ratio"), scope.h.hidden_size
    return -(-int(hidden * ratio) // 32) * 32 if ratio and hidden else None


rwkv7_width = Converter(derive=_width_7)
rank_by_root = _rank_by(0.5, 1.8)
value_rank = _rank_by(0.5, 1.3)
gate_rank = _rank_by(0.8, 0.6)
has_gate = Converter(lambda value, scope: _GATE_RANK if value else 0, lambda value, scope: bool(value))
idle_heads = Converter(lambda value, scope: 0, heads_from_gguf)
_RANK_KEYS = (
    Key("attention.decay_lora_rank", ("lora_rank_decay",), converter=rank_by_root),
    Key("attention.iclr_lora_rank", ("lora_rank_iclr",), converter=rank_by_root),
    Key("attention.value_residual_mix_lora_rank", ("lora_rank_value_residual_mix",), converter=value_rank),
    Key("attention.gate_lora_rank", ("lora_rank_gate",), converter=gate_rank),
)
_RANKS = {letter: key.hf[0] for letter, key in zip("wavg", _RANK_KEYS, strict=True)}
_FLA_RANKS = dict(
    zip("wavg", ("decay_low_rank_dim", "a_low_rank_dim", "v_low_rank_dim", "gate_low_rank_dim"), strict=True),
)
_FIXED = {"w": "64", "a": "64", "v": "32", "g": "128"}
_FIRST = {f"blk.0.time_mix_v{i}.weight": f"blk.0.time_mix_a{i}.weight" for i in range(3)}
"""The first layer has no earlier values to mix with."""
_PROJECTIONS = {"receptance": "r_proj", "key": "k_proj", "value": "v_proj", "output": "o_proj"}


def _mixed(letters: str, hf: str = "", need: str = REQUIRED) -> TensorRow:
    """Token-shift mixing of each input, one tensor in a GGUF."""
    names, dims = tuple(f"{hf}x_{letter}" for letter in letters), f"{len(letters)},1,1,hidden"
    return TensorRow(names, ("time_mix_lerp_fused.weight",), (_ROW,), need, (dims,))


def _low_rank(letter: str, rank: str, hf: str = "", need: str = REQUIRED) -> tuple[TensorRow, ...]:
    """A low-rank product, with a bias except for the gate; the first layer mixes no values."""
    layers = "!first" if letter == "v" else ""
    rows = (
        tensor(f"{hf}{letter}0", f"time_mix_{letter}0.weight", _ROW, need, ("hidden",), layers=layers),
        tensor(f"{hf}{letter}1", f"time_mix_{letter}1.weight", f"hidden,{rank}", need, transposed=True, layers=layers),
        tensor(f"{hf}{letter}2", f"time_mix_{letter}2.weight", f"{rank},hidden", need, transposed=True, layers=layers),
    )
    return rows[letter == "g" :]


def _time_mix_tensors(
    ranks: Mapping[str, str], heads: str, hf: str = "", gate: str = REQUIRED
) -> tuple[TensorRow, ...]:
    """Tensors of RWKV's time mixing, under the names of RWKV's own code."""
    return (
        *(row for letter in "wav" for row in _low_rank(letter, ranks[letter], hf)),
        *_low_rank("g", ranks["g"], hf, gate),
        *(tensor(f"{hf}k_{x}", f"time_mix_k_{x}.weight", _ROW, gguf_dims=("hidden",)) for x in "ka"),
        tensor(f"{hf}r_k", "time_mix_r_k.weight", heads, gguf_dims=("hidden",)),
        *(row for name in _PROJECTIONS for row in linear(hf + name, f"time_mix_{name}", "hidden,hidden")),
    )


def _idle(hf: str, rank: str) -> tuple[TensorRow, ...]:
    """Unused value-mixing tensors of the first layer in some checkpoints."""
    dims = (_ROW, f"hidden,{rank}", f"{rank},hidden")
    return tuple(TensorRow((f"{hf}v{i}",), (), (one,), OPTIONAL) for i, one in enumerate(dims))


def _lora(letter: str, rank: str) -> tuple[TensorRow, ...]:
    """A low-rank product under fla's names: linear layers, stored [out, in]."""
    layers, hf = "!first" if letter == "v" else "", f"attn.{letter}_lora.lora"
    rows = (
        tensor(f"{hf}.2.bias", f"time_mix_{letter}0.weight", "hidden", layers=layers),
        tensor(f"{hf}.0.weight", f"time_mix_{letter}1.weight", f"{rank},hidden", layers=layers),
        tensor(f"{hf}.2.weight", f"time_mix_{letter}2.weight", f"hidden,{rank}", layers=layers),
    )
    return rows[letter == "g" :]


_HEAD_ROWS = "hidden/head_dim,head_dim"
_FLA = (
    embedding("model.embeddings"), *norm("model.layers.0.pre_norm", "token_embd_norm", bias=REQUIRED),
    *block(
        *norm("attn_norm", "attn_norm", bias=REQUIRED), _mixed("rwkvag", "attn."),
        tensor("attn.x_x", "time_mix_lerp_fused.weight", "6,hidden", gguf_dims=("6,1,1,hidden",)),
        *(row for letter, rank in _FLA_RANKS.items() for row in _lora(letter, rank)),
        *(tensor(f"attn.k_{x}", f"time_mix_k_{x}.weight", "hidden") for x in "ka"),
        tensor("attn.r_k", "time_mix_r_k.weight", _HEAD_ROWS, gguf_dims=("hidden",)),
        *(
            row
            for to, name in _PROJECTIONS.items()
            for row in linear(f"attn.{name}", f"time_mix_{to}", "hidden,hidden")
        ),
        *norm("attn.g_norm", "time_mix_ln", bias=REQUIRED), *norm("ffn_norm", "attn_norm_2", bias=REQUIRED),
        tensor("ffn.x_k", "channel_mix_lerp_k.weight", "hidden"), *linear("ffn.key", "channel_mix_key", "ffn,hidden"),
        *linear("ffn.value", "channel_mix_value", "hidden,ffn"),
    ),
    *final_norm(bias=REQUIRED), *head(),
)
_PLAIN = (
    embedding("model.embeddings"), *norm("model.pre_ln", "token_embd_norm", bias=REQUIRED),
    *_idle("model.blocks.0.attention.", _RANKS["v"]),
    *block(
        *norm("ln1", "attn_norm", bias=REQUIRED), _mixed("rwkvag", "attention."),
        *_time_mix_tensors(_RANKS, _HEAD_ROWS, "attention."), *norm("attention.ln_x", "time_mix_ln", bias=REQUIRED),
        *norm("ln2", "attn_norm_2", bias=REQUIRED),
        tensor("feed_forward.x_k", "channel_mix_lerp_k.weight", _ROW, gguf_dims=("hidden",)),
        *linear("feed_forward.key", "channel_mix_key", "ffn,hidden"),
        *linear("feed_forward.value", "channel_mix_value", "hidden,ffn"), hf="model.blocks.{n}.",
    ),
    *final_norm("model.ln_out", bias=REQUIRED), *head("head"),
)
"""The same network under the names of RWKV's own class; its low-rank matrices are stored [in, out]."""
_INSIDE_QWEN = "self_attn.time_mixer."


def _keys(eps: str, head_size: str, *ranks: Key) -> tuple[Key, ...]:
    return (
        Key("context_length", constant=1 << 20), _WIDTH, _BLOCKS, replace(LAYER_EPS, hf=(eps,)),
        Key("wkv.head_size", (head_size,), field="head_dim"), *ranks, Key("", ("hidden_ratio",), "f32"),
        Key(_FFN.gguf, _FFN.hf, field=_FFN.field, converter=rwkv7_width), Key("attention.head_count", constant=0),
    )


_RWKV7 = Architecture(
    id="rwkv7", gguf="rwkv7", **class_names("RWKV7ForCausalLM", types=("rwkv7", "rwkv7_fla")), copies=_FIRST,
    tensors=_FLA,
    keys=(
        *_keys("norm_eps", "head_dim", *map(lambda key, hf: replace(key, hf=(hf,)), _RANK_KEYS, _FLA_RANKS.values())),
        must_be("norm_first", True), must_be("norm_bias", True), must_be("hidden_act", "sqrelu"),
    ),
    differs=(
        Difference("llama.cpp's head norm uses a fixed epsilon of 64e-5 (64 values, norm_eps 1e-5)", "other_head_norm"),
    ),
)

ROWS: tuple[Architecture, ...] = (
    Architecture(
        id="rwkv6", gguf="rwkv6", **class_names("Rwkv6ForCausalLM", types=("rwkv6",)),
        tensors=(
            embedding("rwkv.embeddings"), *norm("rwkv.blocks.0.pre_ln", "token_embd_norm", bias=REQUIRED),
            *block(
                *norm("ln1", "attn_norm", bias=REQUIRED), *_TIME_MIX, *norm("ln2", "attn_norm_2", bias=REQUIRED),
                *_CHANNEL_MIX, hf="rwkv.blocks.{n}.",
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
    ),
    Architecture(
        id="rwkv6qwen2", gguf="rwkv6qwen2", **class_names("RWKV6Qwen2ForCausalLM", types=("rwkv6qwen2",)),
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
    ),
    _RWKV7,
    replace(
        _RWKV7, id="rwkv7_goose", hf_class="Rwkv7ForCausalLM", hf_classes=("Rwkv7ForCausalLM",), model_types=(),
        tensors=_PLAIN, keys=(*_keys("layer_norm_epsilon", "head_size", *_RANK_KEYS), must_be("head_size_divisor", 8)),
        differs=(),
    ),
    Architecture(
        id="rwkv_hybrid", gguf="arwkv7", **class_names("RwkvHybridForCausalLM", types=("rwkv_hybrid",)), copies=_FIRST,
        tensors=(
            embedding(), *_idle(f"model.layers.0.{_INSIDE_QWEN}", _FIXED["v"]),
            *block(
                *norm("input_layernorm", "attn_norm"), _mixed("rwkvag", _INSIDE_QWEN, "wkv_has_gate"),
                _mixed("rwkva", _INSIDE_QWEN, "!wkv_has_gate"),
                *_time_mix_tensors(_FIXED, "hidden/head_size,head_size", _INSIDE_QWEN, "wkv_has_gate"),
                *norm(f"{_INSIDE_QWEN}ln_x", "time_mix_ln", bias="wkv_has_group_norm", need="wkv_has_group_norm"),
                *norm("post_attention_layernorm", "ffn_norm"), *gated_mlp(),
            ),
            *final_norm(), *head(),
        ),
        keys=(
            Key("context_length", constant=1 << 20), _WIDTH, _BLOCKS, RMS_EPS, Key("wkv.head_size", ("head_size",)),
            *(Key(key.gguf, constant=int(rank)) for key, rank in zip(_RANK_KEYS[:3], _FIXED.values(), strict=False)),
            Key("attention.gate_lora_rank", ("wkv_has_gate",), converter=has_gate), _FFN,
            Key("token_shift_count", constant=1), replace(_HEADS, converter=idle_heads), must_be("wkv_version", 7),
            must_be("head_size_divisor", 8), flag("wkv_has_group_norm"), SILU,
        ),
    ),
)
