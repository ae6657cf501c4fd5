"""Towers of Whisper's kind behind other projectors. Data only."""

from __future__ import annotations

from aprfmt.arch.row import OPTIONAL, REQUIRED, Key, TensorRow, Tower
from aprfmt.arch.rows.parts import linear, norm, tensor
from aprfmt.arch.towers.parts import attention, hears, layers, mlp, norms, projector, sizes
from aprfmt.arch.towers.whisper import CONVOLUTIONS, DEFAULTS, EPS, MEL, POSITIONS, whisper

_MM = "multi_modal_projector."
_D_MODEL = ("d_model", "encoder_ffn_dim", "encoder_layers")
_OWN = ("hidden_size", "intermediate_size", "num_hidden_layers")


def _own_sizes(config: str, *, own: bool = False) -> tuple[Key, ...]:
    """Sizes of the encoder in the object `config`, under Whisper's names or those of most transformers."""
    if own:
        return sizes("audio", config)
    return sizes(
        "audio",
        config,
        embedding_length="d_model",
        feed_forward_length="encoder_ffn_dim",
        block_count="encoder_layers",
        head_count="encoder_attention_heads",
    )


def _in(config: str, *keys: Key) -> tuple[Key, ...]:
    """Keys of audio_config as keys of another object."""
    return tuple(
        Key(key.gguf, tuple(f"{config}.{path.partition('.')[2]}" for path in key.hf), key.kind, converter=key.converter)
        for key in keys
    )


def _defaults(config: str) -> dict[str, object]:
    return {f"{config}.{path.partition('.')[2]}": value for path, value in DEFAULTS.items()}


def _convolutions_in_two_dimensions(hf: str) -> tuple[TensorRow, ...]:
    """Three convolutions over time and frequency."""
    many = "downsample_hidden_size"
    rows: list[TensorRow] = []
    for n, n_in in ((1, "1"), (2, many), (3, many)):
        rows += [
            tensor(f"{hf}conv2d{n}.weight", f"a.conv2d.{n}.weight", f"{many},{n_in},3,3"),
            tensor(f"{hf}conv2d{n}.bias", f"a.conv2d.{n}.bias", many, gguf_dims=(f"{many},1,1",)),
        ]
    return tuple(rows)


def qwen3_audio(hf: str) -> tuple[TensorRow, ...]:
    """The encoder of Qwen 3 ASR and Qwen 3 Omni, with its projector."""
    return (
        *_convolutions_in_two_dimensions(hf),
        *linear(f"{hf}conv_out", "a.conv_out", "d_model,num_mel_bins/8*downsample_hidden_size"),
        *layers(
            *norms("self_attn_layer_norm", "final_layer_norm", width="d_model"),
            *attention(width="d_model"),
            *mlp("fc1", "fc2", width="d_model", ffn="encoder_ffn_dim"),
            hf=f"{hf}layers.{{n}}.",
            gguf="a.blk.{n}.",
            depth="encoder_layers",
        ),
        *norm(f"{hf}ln_post", "a.post_ln", "d_model", REQUIRED),
        *linear(f"{hf}proj1", "mm.a.mlp.1", "d_model,d_model", REQUIRED),
        *linear(f"{hf}proj2", "mm.a.mlp.2", "hidden,d_model", REQUIRED),
    )


_THINKER = "thinker_config.audio_config"
QWEN3_POSITIONS = {"a.position_embd.weight": "sinusoids:1500,d_model"}
QWEN3_CONVOLUTIONS = (".conv2d.1.weight", ".conv2d.2.weight", ".conv2d.3.weight", ".conv_out.weight")
QWEN3_KEYS = (*_own_sizes(_THINKER), *_in(_THINKER, MEL, EPS, Key("", ("audio_config.downsample_hidden_size",))))
QWEN3_DEFAULTS = {**_defaults(_THINKER), f"{_THINKER}.downsample_hidden_size": 480}


def _fast_conformer() -> tuple[TensorRow, ...]:
    """A conformer behind convolutions that take eight frames at a time."""
    many = "subsampling_conv_channels"
    first: list[TensorRow] = []
    for n, shape in ((0, "1,3,3"), (2, "1,3,3"), (3, f"{many},1,1"), (5, "1,3,3"), (6, f"{many},1,1")):
        name = f"conformer.pre_encode.conv.{n}"
        first += [
            tensor(f"{name}.weight", f"a.conv1d.{n}.weight", f"{many},{shape}"),
            tensor(f"{name}.bias", f"a.conv1d.{n}.bias", many, gguf_dims=(f"{many},1,1",)),
        ]
    return (
        *first,
        *linear("conformer.pre_encode.out", "a.pre_encode.out", f"d_model,{many}*feat_in/8", REQUIRED),
        *layers(
            *(
                row
                for n, end in ((1, ""), (2, "_1"))
                for row in (
                    *norm(f"norm_feed_forward{n}", f"ffn_norm{end}", "d_model", REQUIRED),
                    *linear(
                        f"feed_forward{n}.linear1", f"ffn_up{end}", "d_model*ff_expansion_factor,d_model", REQUIRED
                    ),
                    *linear(
                        f"feed_forward{n}.linear2", f"ffn_down{end}", "d_model,d_model*ff_expansion_factor", REQUIRED
                    ),
                )
            ),
            *norm("norm_self_att", "ln1", "d_model", REQUIRED),
            *attention(names=("linear_q", "linear_k", "linear_v", "linear_out"), width="d_model"),
            *linear("self_attn.linear_pos", "linear_pos", "d_model,d_model"),
            tensor("self_attn.pos_bias_u", "pos_bias_u", "n_heads,d_model/n_heads"),
            tensor("self_attn.pos_bias_v", "pos_bias_v", "n_heads,d_model/n_heads"),
            *norm("norm_conv", "norm_conv", "d_model", REQUIRED),
            tensor(
                "conv.pointwise_conv1.weight",
                "conv_pw1.weight",
                "2*d_model,d_model,1",
                gguf_dims=("2*d_model,d_model",),
            ),
            tensor("conv.pointwise_conv1.bias", "conv_pw1.bias", "2*d_model"),
            tensor(
                "conv.depthwise_conv.weight",
                "conv_dw.weight",
                "d_model,1,conv_kernel_size",
                gguf_dims=("d_model,conv_kernel_size",),
            ),
            tensor("conv.depthwise_conv.bias", "conv_dw.bias", "d_model"),
            tensor(
                "conv.pointwise_conv2.weight", "conv_pw2.weight", "d_model,d_model,1", gguf_dims=("d_model,d_model",)
            ),
            tensor("conv.pointwise_conv2.bias", "conv_pw2.bias", "d_model"),
            *norm("norm_out", "ln2", "d_model", REQUIRED),
            hf="conformer.layers.{n}.",
            gguf="a.blk.{n}.",
            depth="n_layers",
        ),
        *(
            TensorRow((f"conformer.layers.{{n}}.conv.batch_norm.{name}",), (), ("d_model",), depth="n_layers")
            for name in ("weight", "bias", "running_mean", "running_var")
        ),
    )


TOWERS: tuple[Tower, ...] = (
    Tower(
        id="audioflamingo3_tower",
        gguf="clip",
        hf_class="AudioFlamingo3ForConditionalGeneration",
        model_type="audioflamingo3",
        hf_classes=("AudioFlamingo3ForConditionalGeneration",),
        model_types=("audioflamingo3",),
        when="projector_type=musicflamingo",
        prefixes=(("model.audio_tower.", "audio_tower."), (f"model.{_MM}", _MM)),
        tensors=(
            *whisper("audio_tower.", *_OWN),
            *linear(f"{_MM}linear_1", "mm.a.mlp.1", "hidden,hidden_size", OPTIONAL),
            *linear(f"{_MM}linear_2", "mm.a.mlp.2", "hidden,hidden", OPTIONAL),
        ),
        f32=(".position_embd.", *CONVOLUTIONS),
        keys=hears(*_own_sizes("audio_config", own=True), projector("musicflamingo"), MEL, EPS, POSITIONS),
        defaults={
            "": {
                "audio_config.hidden_size": 1280,
                "audio_config.intermediate_size": 5120,
                "audio_config.num_hidden_layers": 32,
                "audio_config.num_attention_heads": 20,
                "audio_config.num_mel_bins": 128,
                "audio_config.max_source_positions": 1500,
                "audio_config.layer_norm_eps": 1e-5,
            }
        },
        config={"audio_config.model_type": "audioflamingo3_encoder"},
    ),
    Tower(
        id="ultravox_tower",
        gguf="clip",
        hf_class="UltravoxModel",
        model_type="ultravox",
        hf_classes=("UltravoxModel",),
        model_types=("ultravox",),
        when="projector_type=ultravox",
        tensors=(
            *whisper("audio_tower.", *_D_MODEL),
            *norm(f"{_MM}ln_pre", "mm.a.norm_pre", "stack_factor*d_model"),
            *linear(f"{_MM}linear_1", "mm.a.mlp.1", "hidden_size,stack_factor*d_model"),
            *norm(f"{_MM}ln_mid", "mm.a.norm_mid", "hidden_size/2"),
            *linear(f"{_MM}linear_2", "mm.a.mlp.2", "hidden,hidden_size/2"),
        ),
        f32=(".position_embd.",),
        f16=CONVOLUTIONS,
        keys=hears(
            *_own_sizes("audio_config"),
            projector("ultravox"),
            MEL,
            EPS,
            Key("audio.projector.stack_factor", ("stack_factor",)),
            Key("", ("hidden_size",)),
            POSITIONS,
        ),
        defaults={"": {**DEFAULTS, "stack_factor": 8}},
        config={"audio_config.model_type": "whisper"},
    ),
    Tower(
        id="meralion2_tower",
        gguf="clip",
        hf_class="MERaLiON2ForConditionalGeneration",
        model_type="meralion2",
        hf_classes=("MERaLiON2ForConditionalGeneration",),
        model_types=("meralion2",),
        when="projector_type=meralion",
        text="text_decoder.",
        tensors=(
            *whisper("speech_encoder.", *_D_MODEL),
            *norm("ln_speech", "mm.a.norm_pre", "d_model", REQUIRED),
            *(
                row
                for n, name, dims in (
                    (0, "mlp_adapter.0", "speech_mlp_scale_factor*d_model,speech_mlp_scale_factor*d_model"),
                    (1, "gate_proj", "4*d_model,speech_mlp_scale_factor*d_model"),
                    (2, "pool_proj", "4*d_model,speech_mlp_scale_factor*d_model"),
                    (3, "out_proj", "hidden,4*d_model"),
                )
                for row in linear(f"speech_audio_adapter.{name}", f"mm.a.mlp.{n}", dims, OPTIONAL)
            ),
        ),
        f32=(".position_embd.",),
        f16=CONVOLUTIONS,
        keys=hears(
            *_own_sizes("speech_config"),
            projector("meralion"),
            *_in("speech_config", MEL, EPS),
            Key("audio.projector.stack_factor", ("speech_mlp_scale_factor",)),
            *_in("speech_config", POSITIONS),
        ),
        defaults={"": {**_defaults("speech_config"), "speech_mlp_scale_factor": 15}},
        config={"speech_config.model_type": "whisper"},
    ),
    Tower(
        id="glmasr_tower",
        gguf="clip",
        hf_class="GlmasrModel",
        model_type="Glmasr",
        hf_classes=("GlmasrModel",),
        model_types=("Glmasr",),
        when="projector_type=glma",
        text="",
        tensors=(
            *whisper("audio_encoder.whisper.", *_D_MODEL)[:-2],
            *norm("audio_encoder.layer_norm", "mm.a.norm_pre", "d_model", REQUIRED),
            *linear("audio_encoder.adapting.0", "mm.a.mlp.1", "2*hidden,merge_factor*d_model", REQUIRED),
            *linear("audio_encoder.adapting.2", "mm.a.mlp.2", "hidden,2*hidden", REQUIRED),
            TensorRow(
                ("audio_encoder.audio_bos_eos_token.weight",),
                ("v.boi", "v.eoi"),
                ("2,hidden",),
                gguf_dims=("hidden", "hidden"),
            ),
        ),
        f32=(".position_embd.",),
        f16=CONVOLUTIONS,
        keys=hears(
            *_own_sizes("whisper_config"),
            projector("glma"),
            *_in("whisper_config", MEL, EPS),
            Key("audio.projector.stack_factor", ("merge_factor",)),
            *_in("whisper_config", POSITIONS),
        ),
        defaults={"": {**_defaults("whisper_config"), "merge_factor": 4}},
        config={"whisper_config.model_type": "whisper"},
    ),
    Tower(
        id="qwen3_asr_tower",
        gguf="clip",
        hf_class="Qwen3ASRForConditionalGeneration",
        model_type="qwen3_asr",
        hf_classes=("Qwen3ASRForConditionalGeneration",),
        model_types=("qwen3_asr",),
        when="audio.projector_type=qwen3a&!has_vision_encoder",
        text="thinker.",
        tensors=qwen3_audio("thinker.audio_tower."),
        made=QWEN3_POSITIONS,
        f32=(".position_embd.",),
        f16=QWEN3_CONVOLUTIONS,
        keys=hears(*QWEN3_KEYS, projector("qwen3a", part="audio")),
        defaults={"": QWEN3_DEFAULTS},
    ),
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
            *_fast_conformer(),
            tensor("audio_embedding.embedding.weight", "a.position_embd.weight", "any_codes,hidden"),
            *norm("audio_embedding.embedding_norm", "a.position_embd_norm", "hidden"),
            *linear("audio_embedding.to_logits", "a.embd_to_logits", "any_codes,hidden"),
            *norm("audio_adapter.model.0", "mm.a.mlp.0", "d_model", REQUIRED),
            *linear("audio_adapter.model.1", "mm.a.mlp.1", "hidden,d_model", REQUIRED),
            *linear("audio_adapter.model.3", "mm.a.mlp.3", "hidden,hidden", REQUIRED),
        ),
        ignored=(".num_batches_tracked",),
        made={
            "a.blk.{n}.conv_norm.weight": "batch_scale:conformer.layers.{n}.conv.batch_norm",
            "a.blk.{n}.conv_norm.bias": "batch_shift:conformer.layers.{n}.conv.batch_norm",
        },
        f32=(".conv1d.", ".conv_pw1.weight", ".conv_pw2.weight", ".conv_dw.weight"),
        keys=hears(
            Key("audio.embedding_length", ("encoder.d_model",)),
            Key("audio.feed_forward_length", ("encoder.d_model",)),
            Key("audio.block_count", ("encoder.n_layers",)),
            Key("audio.attention.head_count", ("encoder.n_heads",)),
            projector("lfm2a"),
            Key("audio.num_mel_bins", ("encoder.feat_in",)),
            Key("audio.attention.layer_norm_epsilon", kind="f32", constant=1e-5),
            *(
                Key("", (f"encoder.{name}",))
                for name in ("ff_expansion_factor", "conv_kernel_size", "subsampling_conv_channels")
            ),
        ),
        defaults={
            "": {
                **{"encoder.d_model": 512, "encoder.n_layers": 17, "encoder.n_heads": 8, "encoder.feat_in": 128},
                **{"encoder.ff_expansion_factor": 4, "encoder.conv_kernel_size": 9},
                "encoder.subsampling_conv_channels": 256,
            }
        },
    ),
)
