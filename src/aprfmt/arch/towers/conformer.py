"""Towers that are conformers: convolutions between attention and two MLPs. Data only."""

from __future__ import annotations

from aprfmt.arch.row import REQUIRED, Key, TensorRow, Tower
from aprfmt.arch.rows.parts import linear, norm, tensor
from aprfmt.arch.towers.parts import hears, layers, projector, sizes

_E = "conformer.pre_encode."
_N = "conformer.layers.{n}."
_D = "d_model"
_FFN = "ff_expansion_factor*d_model"
_MANY = "subsampling_conv_channels"


def _subsampling() -> tuple[TensorRow, ...]:
    """Convolutions over time and frequency, every second pair of them a separable one."""
    rows: list[TensorRow] = []
    shapes = {0: f"{_MANY},1,3,3", 2: f"{_MANY},1,3,3", 3: f"{_MANY},{_MANY},1,1"}
    for number, shape in (shapes | {5: shapes[2], 6: shapes[3]}).items():
        rows += [
            tensor(f"{_E}conv.{number}.weight", f"a.conv1d.{number}.weight", shape),
            tensor(f"{_E}conv.{number}.bias", f"a.conv1d.{number}.bias", _MANY, gguf_dims=(f"{_MANY},1,1",)),
        ]
    return tuple(rows)


def _batch_norm(module: str) -> tuple[TensorRow, ...]:
    """What a batch norm was trained to; a GGUF has what follows from it, see canonical.made."""
    parts = ("weight", "bias", "running_mean", "running_var")
    return tuple(TensorRow((f"{module}.{part}",), (), (_D,)) for part in parts)


TOWERS: tuple[Tower, ...] = (
    Tower(
        id="lfm2_audio_tower",
        gguf="clip",
        hf_class="Lfm2AudioForConditionalGeneration",
        model_type="lfm2_audio",
        hf_classes=("Lfm2AudioForConditionalGeneration",),
        model_types=("lfm2_audio",),
        when="projector_type=lfm2a",
        text="lfm.",
        bare=True,
        tensors=(
            *_subsampling(),
            *linear(f"{_E}out", "a.pre_encode.out", f"{_D},{_MANY}*feat_in/subsampling_factor", REQUIRED),
            *norm("audio_embedding.embedding_norm", "a.position_embd_norm", "any_width"),
            tensor("audio_embedding.embedding.weight", "a.position_embd.weight", "any_codes,any_width"),
            tensor("audio_embedding.to_logits.weight", "a.embd_to_logits.weight", "any_codes,any_width"),
            *layers(
                *norm("norm_feed_forward1", "ffn_norm", _D, REQUIRED),
                *linear("feed_forward1.linear1", "ffn_up", f"{_FFN},{_D}", REQUIRED),
                *linear("feed_forward1.linear2", "ffn_down", f"{_D},{_FFN}", REQUIRED),
                *norm("norm_self_att", "ln1", _D, REQUIRED),
                *linear("self_attn.linear_q", "attn_q", f"{_D},{_D}", REQUIRED),
                *linear("self_attn.linear_k", "attn_k", f"{_D},{_D}", REQUIRED),
                *linear("self_attn.linear_v", "attn_v", f"{_D},{_D}", REQUIRED),
                *linear("self_attn.linear_out", "attn_out", f"{_D},{_D}", REQUIRED),
                *linear("self_attn.linear_pos", "linear_pos", f"{_D},{_D}"),
                tensor("self_attn.pos_bias_u", "pos_bias_u", f"n_heads,{_D}/n_heads"),
                tensor("self_attn.pos_bias_v", "pos_bias_v", f"n_heads,{_D}/n_heads"),
                *norm("norm_conv", "norm_conv", _D, REQUIRED),
                tensor("conv.pointwise_conv1.weight", "conv_pw1.weight", f"2*{_D},{_D},1", gguf_dims=(f"2*{_D},{_D}",)),
                tensor("conv.pointwise_conv1.bias", "conv_pw1.bias", f"2*{_D}"),
                tensor(
                    "conv.depthwise_conv.weight",
                    "conv_dw.weight",
                    f"{_D},1,conv_kernel_size",
                    gguf_dims=(f"{_D},conv_kernel_size",),
                ),
                tensor("conv.depthwise_conv.bias", "conv_dw.bias", _D),
                *_batch_norm("conv.batch_norm"),
                tensor("conv.pointwise_conv2.weight", "conv_pw2.weight", f"{_D},{_D},1", gguf_dims=(f"{_D},{_D}",)),
                tensor("conv.pointwise_conv2.bias", "conv_pw2.bias", _D),
                *norm("norm_feed_forward2", "ffn_norm_1", _D, REQUIRED),
                *linear("feed_forward2.linear1", "ffn_up_1", f"{_FFN},{_D}", REQUIRED),
                *linear("feed_forward2.linear2", "ffn_down_1", f"{_D},{_FFN}", REQUIRED),
                *norm("norm_out", "ln2", _D, REQUIRED),
                hf=_N,
                gguf="a.blk.{n}.",
                depth="n_layers",
            ),
            *norm("audio_adapter.model.0", "mm.a.mlp.0", _D, REQUIRED),
            *linear("audio_adapter.model.1", "mm.a.mlp.1", f"any_inner,{_D}", REQUIRED),
            *linear("audio_adapter.model.3", "mm.a.mlp.3", "hidden,any_inner", REQUIRED),
        ),
        made={
            "a.blk.{n}.conv_norm.weight": f"batch_scale:{_N}conv.batch_norm",
            "a.blk.{n}.conv_norm.bias": f"batch_shift:{_N}conv.batch_norm",
        },
        ignored=(".batch_norm.num_batches_tracked",),
        f32=(".conv1d.", ".conv_dw.", ".conv_pw1.", ".conv_pw2.", ".position_embd."),
        keys=(
            *hears(
                *sizes(
                    "audio",
                    "encoder",
                    embedding_length="d_model",
                    feed_forward_length="d_model",
                    block_count="n_layers",
                    head_count="n_heads",
                ),
                projector("lfm2a"),
                Key("audio.num_mel_bins", ("encoder.feat_in",)),
                Key("audio.attention.layer_norm_epsilon", kind="f32", constant=1e-5),
            ),
            *(
                Key("", (f"encoder.{name}",))
                for name in (
                    "ff_expansion_factor",
                    "conv_kernel_size",
                    "subsampling_factor",
                    "subsampling_conv_channels",
                )
            ),
        ),
        defaults={
            "": {
                "encoder.feat_in": 128,
                "encoder.n_layers": 17,
                "encoder.d_model": 512,
                "encoder.n_heads": 8,
                "encoder.ff_expansion_factor": 4,
                "encoder.conv_kernel_size": 9,
                "encoder.subsampling_factor": 8,
                "encoder.subsampling_conv_channels": 256,
            }
        },
    ),
)
