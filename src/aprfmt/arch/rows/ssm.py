"""Rows of the architecture table: state-space models."""

from __future__ import annotations

from aprfmt.arch.converter import DEFAULT, Converter, Scope
from aprfmt.arch.converters.common import auto_rank, expand, inner_size, times_hidden
from aprfmt.arch.fields import as_int
from aprfmt.arch.row import Architecture, Key, TensorRow
from aprfmt.arch.rows.parts import DIMS, SILU, block, class_names, embedding, final_norm, head, must_be, norm
from aprfmt.arch.rows.parts_ssm import dual, mixer, selective
from aprfmt.errors import RefusedError


def _padded_normalize(value: object, scope: Scope) -> object:
    """The embedding's rows: tokens are padded to a multiple."""
    vocab, multiple = as_int(value, scope.name), as_int(scope.h.extra.get("pad_vocab_size_multiple"), "") or 1
    return DEFAULT if vocab is None else -(-vocab // multiple) * multiple


padded_vocab = Converter(normalize=_padded_normalize)


def _twice_to(value: object, scope: Scope) -> object:
    """The width of a Mamba layer, of which the runtime knows one."""
    width, hidden = as_int(value, scope.name), scope.h.hidden_size
    if width is not None and hidden is not None and width != 2 * hidden:
        raise RefusedError(
            f"{scope.name} is {width}, {width / hidden:g} times the hidden size: llama.cpp's {scope.row.gguf} "
            "loads an expansion by 2 only"
        )
    return value


expanded_twice = Converter(
        _twice_to, derive=lambda scope: times_hidden(scope.h.extra.get("expand", scope.defaults.get("expand")), scope)
    )

_BLOCKS, _, _WIDTH, _, _ = DIMS
_UNBOUNDED = Key("context_length", constant=1 << 20)
"""Written where the network has no positions; a config.json has no such key."""
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
        *family, _EPS, SILU, must_be("use_bias", False), must_be("use_conv_bias", True),
    )


_MAMBA = {
    "layer_norm_epsilon": 1e-5, "expand": 2, "conv_kernel": 4, "state_size": 16, "time_step_rank": "auto",
    "use_bias": False, "use_conv_bias": True, "hidden_act": "silu", "tie_word_embeddings": True,
}
_SELECTIVE = _mamba(selective("ffn", "state_size", "time_step_rank", "conv_kernel", "use_bias", "use_conv_bias"))
_INNER = Key("ssm.inner_size", ("intermediate_size", "d_inner"), field="intermediate_size", converter=expanded_twice)
_RANK = Key("ssm.time_step_rank", ("time_step_rank", "dt_rank"), converter=auto_rank)
_NORMED = "ssm.dt_b_c_rms"


ROWS: tuple[Architecture, ...] = (
    Architecture(
        id="mamba", gguf="mamba", **class_names("MambaForCausalLM", "MambaLMHeadModel", types=("mamba",)),
        prefixes=(("backbone.embedding.", "backbone.embeddings."),),
        tensors=_SELECTIVE,
        keys=(
            *_mamba_keys(_INNER, _RANK), Key(_NORMED, kind="bool", constant=False),
            Key("", ("pad_vocab_size_multiple",)), Key("", ("vocab_size",), field="vocab_size", converter=padded_vocab),
        ),
        defaults={"": _MAMBA},
    ),
    Architecture(
        id="falcon_mamba", gguf="mamba", **class_names("FalconMambaForCausalLM", types=("falcon_mamba",)), when=_NORMED,
        tensors=_SELECTIVE,
        keys=(
            *_mamba_keys(_INNER, _RANK), Key(_NORMED, kind="bool", constant=True), Key("", ("mixer_rms_eps",), "f32"),
        ),
        defaults={"": _MAMBA | {"mixer_rms_eps": 1e-6}},
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
        defaults={"": {
            **_MAMBA, "state_size": 128, "n_groups": 8, "num_heads": 128, "head_dim": 64, "tie_word_embeddings": False,
        }},
    ),
)
