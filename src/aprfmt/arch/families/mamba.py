"""Mamba, and hybrids of it with attention."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from aprfmt.arch.blocks.decoder import (
    DECODER, DIMS, EXPERTS, KV_HEADS_BY_LAYER, RMS_EPS, ROPE, ROPE_DIM, SILU, VOCAB, attention, block, class_names,
    embedding, experts, final_norm, flag, fused_experts, gated_mlp, head, hf_names, linear, must_be, norm, rename,
)
from aprfmt.arch.blocks.ssm import dual, mixer, selective
from aprfmt.arch.converter import DEFAULT, ConfigKeys, Converter, Scope, nothing
from aprfmt.arch.converters.common import expand, inner_size, times_hidden
from aprfmt.arch.converters.hybrid import attending
from aprfmt.arch.fields import as_int
from aprfmt.arch.row import Architecture, Key, TensorRow
from aprfmt.errors import RefusedError


def _rank_derive(scope: Scope) -> int | None:
    """A sixteenth of the hidden size, rounded up: the meaning of "auto"."""
    return -(-scope.h.hidden_size // 16) if scope.h.hidden_size else None


auto_rank = Converter(
    derive=_rank_derive, normalize=lambda value, scope: _rank_derive(scope) if value == "auto" else DEFAULT,
)


def _steps(found: list[int], n_layers: int, period: str, offset: str) -> ConfigKeys:
    """Every `period`-th layer, starting at `offset`; for a single one, the next would be after the last."""
    first = found[0] if found else n_layers
    return ConfigKeys({period: found[1] - first if len(found) > 1 else max(n_layers, first + 1), offset: first})


def _period_from_gguf(value: object, scope: Scope) -> object:
    found, n_layers = attending(scope), scope.h.num_layers
    return DEFAULT if found is None or not n_layers else _steps(found, n_layers, scope.name, "attn_layer_offset")


def _expert_period_from_gguf(value: object, scope: Scope) -> object:
    """From the layers that have a router."""
    n_layers = scope.h.num_layers
    if not scope.names or not n_layers:
        return DEFAULT
    found = [i for i in range(n_layers) if f"blk.{i}.ffn_gate_inp.weight" in scope.names]
    return _steps(found, n_layers, scope.name, "expert_layer_offset")


def _inner_width_normalize(value: object, scope: Scope) -> object:
    """The width of a mixer: null means the expansion of the hidden size."""
    expand, hidden = scope.size("mamba_expand"), scope.h.hidden_size
    return expand * hidden if value is None and expand and hidden else DEFAULT


def _head_width_normalize(value: object, scope: Scope) -> object:
    inner, heads = scope.size("mamba_d_ssm"), scope.size("mamba_n_heads")
    return inner // heads if value in (None, "auto") and inner and heads else DEFAULT


def _norm_behind_gate_to_gguf(value: object, scope: Scope) -> None:
    if value and scope.config("mamba_rms_norm"):
        raise RefusedError(f"{scope.name}: llama.cpp's {scope.row.gguf} norms after the gate, not before it")


def _tied_multiplier_to_gguf(value: object, scope: Scope) -> None:
    if scope.h.tied and value != scope.h.extra.get("lm_head_multiplier"):
        raise RefusedError(
            f"embedding_multiplier is {value} and lm_head_multiplier {scope.h.extra.get('lm_head_multiplier')}: a GGUF "
            "folds them into the weights, and a tied embedding can take only one"
        )


attention_indices = Converter(
    nothing, lambda value, scope: DEFAULT if (found := attending(scope)) is None else found,
    normalize=lambda value, scope: [] if value is None else DEFAULT,
)
attention_period = Converter(nothing, _period_from_gguf)
expert_period = Converter(nothing, _expert_period_from_gguf)
heads_of_width = Converter(nothing, _head_width_normalize, normalize=_head_width_normalize)
norm_behind_gate = Converter(_norm_behind_gate_to_gguf, lambda value, scope: not scope.h.extra.get("mamba_rms_norm"))
_SSM, _ATTENTION = "linear_attention|mamba", "full_attention|attention"
_INNER = "mamba_expand*hidden"
_TWICE = Key("ssm.inner_size", ("mamba_expand",), converter=expand, allowed=(2,))


def _layers(*mixers: TensorRow, feed_forward: tuple[TensorRow, ...]) -> tuple[TensorRow, ...]:
    return (
        embedding(),
        *block(*norm("input_layernorm", "attn_norm"), *mixers, *norm("pre_ff_layernorm", "ffn_norm"), *feed_forward),
        *final_norm("model.final_layernorm"), *head(),
    )


def _part_rotated() -> tuple[TensorRow, ...]:
    """Attention with partial rotation: only there a GGUF has neighbours instead of halves."""

    def order(heads: str) -> tuple[str, ...]:
        return (f"each:{heads},head_dim,2,rotary/2",)

    orders = {"attn_q.weight": order("heads"), "attn_q.bias": order("heads")}
    orders |= {"attn_k.weight": order("kv_heads"), "attn_k.bias": order("kv_heads")}
    rows = attention("attention_bias", "attention_bias", layers=_ATTENTION)
    return tuple(replace(row, order=orders.get(row.gguf[0], ())) for row in rows)


_BAMBA_MIXER = dual(
    _INNER, "mamba_d_state", "mamba_n_heads", "mamba_n_groups", "mamba_d_conv", "mamba_proj_bias", "mamba_conv_bias",
)
_JAMBA_MIXER = (
    *selective(_INNER, "mamba_d_state", "mamba_dt_rank", "mamba_d_conv", "mamba_proj_bias", "mamba_conv_bias"),
    *norm("dt_layernorm", "ssm_dt_norm", "mamba_dt_rank"), *norm("b_layernorm", "ssm_b_norm", "mamba_d_state"),
    *norm("c_layernorm", "ssm_c_norm", "mamba_d_state"),
)
_EXPERTS = (
    *linear("feed_forward.router", "ffn_gate_inp", "experts,hidden", layers="moe"),
    *experts("feed_forward.experts.{e}.", layers="moe"),
    *fused_experts("feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj", layers="moe"),
    *gated_mlp(hf="feed_forward", layers="dense"),
)
_SCALED = {
    "token_embd.weight": ":embedding_multiplier", "output.weight": ":lm_head_multiplier",
    "attn_q.weight": ":attention_in_multiplier", "attn_k.weight": ":key_multiplier,attention_in_multiplier",
    "attn_v.weight": ":attention_in_multiplier", "attn_output.weight": ":attention_out_multiplier",
    "ssm_out.weight": ":ssm_out_multiplier", "ffn_gate.weight": ":mlp_multipliers.0",
    "ffn_gate.bias": ":mlp_multipliers.0", "ffn_down.weight": ":mlp_multipliers.1",
    "ffn_down.bias": ":mlp_multipliers.1",
}
"""Falcon H1's activation multipliers, which are folded into the weights of a GGUF."""
_GROUPED = "mamba_n_groups*mamba_d_state"
_IN_SCALES = tuple(
    f"{rows}:ssm_in_multiplier,ssm_multipliers.{i}"
    for i, rows in enumerate(("mamba_d_ssm", "mamba_d_ssm", _GROUPED, _GROUPED, ""))
)
_FALCON_MIXER = tuple(
    replace(row, need="mamba_rms_norm") if row.gguf == ("ssm_norm.weight",) else row
    for row in dual(
        "mamba_d_ssm", "mamba_d_state", "mamba_n_heads", "mamba_n_groups", "mamba_d_conv", "mamba_proj_bias",
        "mamba_conv_bias", "projectors_bias",
    )
)


def _scaled(rows: tuple[TensorRow, ...]) -> Iterator[TensorRow]:
    for row in rows:
        name = row.gguf[0].removeprefix("blk.{n}.")
        scale = _IN_SCALES if name == "ssm_in.weight" else (_SCALED[name],) if name in _SCALED else ()
        named = ("blk.{n}.ffn_norm",) if name == "ffn_norm.weight" else row.gguf  # llama.cpp's name there
        yield replace(row, gguf=named, scale=scale)


def _padded_normalize(value: object, scope: Scope) -> object:
    """The embedding's rows: tokens are padded to a multiple."""
    vocab, multiple = as_int(value, scope.name), as_int(scope.h.extra.get("pad_vocab_size_multiple"), "") or 1
    return DEFAULT if vocab is None else -(-vocab // multiple) * multiple


padded_vocab = Converter(normalize=_padded_normalize)


def _twice_to_gguf(value: object, scope: Scope) -> object:
    """The width of a Mamba layer, of which llama.cpp supports one."""
    width, hidden = as_int(value, scope.name), scope.h.hidden_size
    if width is not None and hidden is not None and width != 2 * hidden:
        raise RefusedError(
            f"{scope.name} is {width}, {width / hidden:g} times the hidden size: llama.cpp's {scope.row.gguf} supports "
            "an expansion of 2 only"
        )
    return value


expanded_twice = Converter(
    _twice_to_gguf, derive=lambda scope: times_hidden(scope.h.extra.get("expand", scope.defaults.get("expand")), scope),
)
_BLOCKS, _, _WIDTH, _, _ = DIMS
_UNBOUNDED = Key("context_length", constant=1 << 20)
"""Written for networks without positions; a config.json has no such key."""
_EPS = Key("attention.layer_norm_rms_epsilon", ("layer_norm_epsilon", "rms_norm_eps"), "f32", field="rms_norm_eps")


def _mamba(rows: tuple[TensorRow, ...]) -> tuple[TensorRow, ...]:
    return (
        embedding("backbone.embeddings"),
        *block(*norm("norm", "attn_norm"), *mixer("mixer.", rows), hf="backbone.layers.{n}."),
        *final_norm("backbone.norm_f"), *head(),
    )


def _mamba_keys(inner: Key, *family: Key) -> tuple[Key, ...]:
    return (
        _UNBOUNDED, _WIDTH, Key("feed_forward_length", constant=0), Key("attention.head_count", constant=0), _BLOCKS,
        Key("ssm.conv_kernel", ("conv_kernel", "d_conv")), inner, Key("ssm.state_size", ("state_size", "d_state")),
        *family, _EPS, SILU, must_be("use_bias", False), flag("use_conv_bias"),
    )


_SELECTIVE = _mamba(selective("ffn", "state_size", "time_step_rank", "conv_kernel", "use_bias", "use_conv_bias"))
_SSM_INNER = Key(
    "ssm.inner_size", ("intermediate_size", "d_inner"), field="intermediate_size", converter=expanded_twice,
)
_RANK = Key("ssm.time_step_rank", ("time_step_rank", "dt_rank"), converter=auto_rank)
_NORMED = "ssm.dt_b_c_rms"

ROWS: tuple[Architecture, ...] = (
    Architecture(
        id="mamba", gguf="mamba", **class_names("MambaForCausalLM", "MambaLMHeadModel", types=("mamba",)),
        prefixes=(("backbone.embedding.", "backbone.embeddings."),),
        tensors=_SELECTIVE,
        keys=(
            *_mamba_keys(_SSM_INNER, _RANK), Key(_NORMED, kind="bool", constant=False),
            Key("", ("pad_vocab_size_multiple",)), Key("", ("vocab_size",), field="vocab_size", converter=padded_vocab),
        ),
    ),
    Architecture(
        id="falcon_mamba", gguf="mamba", **class_names("FalconMambaForCausalLM", types=("falcon_mamba",)), when=_NORMED,
        tensors=_SELECTIVE,
        keys=(
            *_mamba_keys(_SSM_INNER, _RANK), Key(_NORMED, kind="bool", constant=True),
            Key("", ("mixer_rms_eps",), "f32"),
        ),
    ),
    Architecture(
        id="mamba2", gguf="mamba2", **class_names("Mamba2ForCausalLM", types=("mamba2",)),
        tensors=_mamba(
            dual("expand*hidden", "state_size", "num_heads", "n_groups", "conv_kernel", "use_bias", "use_conv_bias")
        ),
        keys=_mamba_keys(
            Key("ssm.inner_size", ("expand",), converter=expand), Key("ssm.time_step_rank", ("num_heads",)),
            Key("ssm.group_count", ("n_groups",)), Key("", ("head_dim",), converter=inner_size),
        ),
        prefixes=(("model.backbone.", "backbone."), ("model.lm_head.", "lm_head.")),
    ),
    Architecture(
        id="bamba", gguf="granitehybrid", **hf_names("Bamba", "bamba"), rope_type=0,
        tensors=_layers(
            *mixer("mamba.", _BAMBA_MIXER, _SSM), *_part_rotated(),
            feed_forward=gated_mlp("mlp_bias", hf="feed_forward"),
        ),
        keys=(
            *DIMS, KV_HEADS_BY_LAYER, ROPE, RMS_EPS, VOCAB, ROPE_DIM, Key("ssm.conv_kernel", ("mamba_d_conv",)),
            Key("ssm.state_size", ("mamba_d_state",)), Key("ssm.group_count", ("mamba_n_groups",)), _TWICE,
            Key("ssm.time_step_rank", ("mamba_n_heads",)), Key("rope.scaling.finetuned", kind="bool", constant=True),
            Key("", ("attn_layer_indices",), converter=attention_indices), SILU, flag("attention_bias"),
            flag("mlp_bias"), must_be("mamba_proj_bias", False), flag("mamba_conv_bias"),
        ),
    ),
    Architecture(
        id="jamba", gguf="jamba", **hf_names("Jamba", "jamba"),
        tensors=_layers(*mixer("mamba.", _JAMBA_MIXER, _SSM), *attention(layers=_ATTENTION), feed_forward=_EXPERTS),
        keys=(
            *DIMS, KV_HEADS_BY_LAYER, Key("ssm.conv_kernel", ("mamba_d_conv",)), _TWICE,
            Key("ssm.state_size", ("mamba_d_state",)),
            Key("ssm.time_step_rank", ("mamba_dt_rank",), converter=auto_rank),
            RMS_EPS, *rename(EXPERTS[:2], num_experts=("num_experts", "num_local_experts")),
            Key("", ("attn_layer_period",), converter=attention_period), Key("", ("attn_layer_offset",)),
            Key("", ("expert_layer_period",), converter=expert_period), Key("", ("expert_layer_offset",)), SILU,
            must_be("mamba_proj_bias", False), flag("mamba_conv_bias"),
        ),
    ),
    Architecture(
        id="falcon_h1", gguf="falcon-h1", **hf_names("FalconH1", "falcon_h1"),
        tensors=tuple(
            _scaled(
                _layers(
                    *mixer("mamba.", _FALCON_MIXER), *attention("attention_bias", "attention_bias"),
                    feed_forward=gated_mlp("mlp_bias", hf="feed_forward"),
                )
            )
        ),
        keys=(
            *DECODER, VOCAB, Key("ssm.conv_kernel", ("mamba_d_conv",)),
            Key("ssm.inner_size", ("mamba_d_ssm",), converter=Converter(normalize=_inner_width_normalize)),
            Key("ssm.state_size", ("mamba_d_state",)), Key("ssm.time_step_rank", ("mamba_n_heads",)),
            Key("ssm.group_count", ("mamba_n_groups",)), Key("", ("mamba_d_head",), converter=heads_of_width),
            flag("mamba_rms_norm"), Key("", ("mamba_norm_before_gate",), "bool", converter=norm_behind_gate),
            Key("", ("embedding_multiplier",), "f32", converter=Converter(_tied_multiplier_to_gguf)), SILU,
            flag("mlp_bias"),
            must_be("attention_bias", False), must_be("projectors_bias", False), must_be("mamba_proj_bias", False),
            flag("mamba_conv_bias"),
        ),
    ),
)
