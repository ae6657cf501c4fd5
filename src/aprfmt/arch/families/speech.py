"""Text-to-speech networks."""

from __future__ import annotations

from dataclasses import replace

from aprfmt.arch.blocks.decoder import (
    DECODER, DIMS, GROUPED, HEAD_DIM, LAYER_EPS, ROPE, SILU, VOCAB, attention, block, class_names, final_norm, flag,
    gated_mlp, gelu, linear, must_be, norm, plain_mlp, rename, split, tensor,
)
from aprfmt.arch.blocks.encoder import ENCODER
from aprfmt.arch.blocks.tower import hears, layers, projector, sizes, whole, width
from aprfmt.arch.converter import Converter, default, refuse_if
from aprfmt.arch.row import OPTIONAL, REQUIRED, Architecture, Key, TensorRow, Tower


folded = Converter(
    refuse_if(
        lambda value, scope: True,
        "llama.cpp's {gguf} stores the product of embedding and projection, which is not in the checkpoint and cannot "
        "be reversed",
        hint="write an .apr or a folder; for a GGUF use llama.cpp's convert_hf_to_gguf.py",
    ),
    default,
)
_POS, _NEXT = "posnet.n_embd", "convnext.n_embd"


def _column(hf: str, gguf: str, dims: str, *, of_weight: bool = False) -> tuple[TensorRow, ...]:
    """A layer whose bias, and weight if `of_weight`, is a column, broadcast over time."""
    return (
        tensor(f"{hf}.weight", f"{gguf}.weight", f"{_POS},1" if of_weight else dims),
        tensor(f"{hf}.bias", f"{gguf}.bias", f"{_POS},1"),
    )


def _posnet(n: int) -> tuple[TensorRow, ...]:
    """A layer of the six before the convolutions: attention in the third, a norm in the last, residual blocks else."""
    hf, gguf = f"backbone.posnet.{n}", f"posnet.{n}"
    if n in (2, 5):
        named = {"q": "attn_q", "k": "attn_k", "v": "attn_v", "proj_out": "attn_output"} if n == 2 else {}
        layers = (_column(f"{hf}.{a}", f"{gguf}.{b}", f"{_POS},{_POS},1") for a, b in named.items())
        return (
            *_column(f"{hf}.norm", f"{gguf}.attn_norm", "", of_weight=True), *(row for two in layers for row in two),
        )
    halves = (
        (
            *_column(f"{hf}.norm{i}", f"{gguf}.norm{i}", "", of_weight=True),
            *_column(f"{hf}.conv{i}", f"{gguf}.conv{i}", f"{_POS},{_POS},3"),
        )
        for i in (1, 2)
    )
    return tuple(row for half in halves for row in half)


def _hf_only(dims: str, *names: str) -> tuple[TensorRow, ...]:
    """Required tensors that a GGUF cannot store."""
    return tuple(TensorRow((name,), (), (dims,)) for name in names)


_STAGES = 4
"""Convolutions of ECAPA-TDNN: a plain one, and three multi-scale ones."""
_SCALES = 7
"""Number of multi-scale convolutions per stage, and number of slices of its width."""
_BOOKS = 15
"""Further codes per speech step."""
_S = "speaker_encoder."
_P = "talker.code_predictor."
_PREDICTOR = "talker_config.code_predictor_config"
_W = "speech_tokenizer.decoder."
_DECODER = "speech_tokenizer.decoder_config"
_FIXED = {
    **{"num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 16, "sliding_window": 72},
    **{"rope_theta": 10000, "rms_norm_eps": 1e-5},
}
"""What llama.cpp's network implies, since no key states it."""
_HIDDEN, _LATENT, _DIM = f"{_DECODER}.hidden_size", "latent_dim", "decoder_dim"
_BOOK = "codebook_dim/2"
_ATTENTION = f"{_DECODER}.num_attention_heads*{_DECODER}.head_dim"


def _conv(hf: str, gguf: str, dims: str, layer: str = "") -> tuple[TensorRow, ...]:
    return linear(hf, gguf, dims, REQUIRED, layers=layer)


def _voice() -> tuple[TensorRow, ...]:
    """ECAPA-TDNN: a speaker embedding."""
    wide, kernel = "speaker_encoder_config.enc_channels", "speaker_encoder_config.enc_kernel_sizes"
    part = f"{wide}/{_SCALES + 1}"
    return (
        *layers(
            *_conv("conv", "conv1d.{n}", f"{wide},mel_dim,{kernel}", "first"), hf=f"{_S}blocks.{{n}}.", gguf="a.",
            depth=str(_STAGES),
        ),
        *layers(
            *_conv("tdnn1.conv", "conv_pw1", f"{wide},{wide},1", "!first"),
            *(
                row
                for i in range(_SCALES)
                for row in _conv(f"res2net_block.blocks.{i}.conv", f"res2.{i}", f"{part},{part},{kernel}", "!first")
            ),
            *_conv("tdnn2.conv", "conv_pw2", f"{wide},{wide},1", "!first"),
            *_conv("se_block.conv1", "se_conv1", f"enc_se_channels,{wide},1", "!first"),
            *_conv("se_block.conv2", "se_conv2", f"{wide},enc_se_channels,1", "!first"), hf=f"{_S}blocks.{{n}}.",
            gguf="a.blk.{n}.", depth=str(_STAGES),
        ),
        *_conv(f"{_S}mfa.conv", "a.conv_out", "any_features,any_features,1"),
        *_conv(f"{_S}asp.tdnn.conv", "a.asp_tdnn", "enc_attention_channels,any_statistics,1"),
        *_conv(f"{_S}asp.conv", "a.asp_attn", "any_features,enc_attention_channels,1"),
        *_conv(f"{_S}fc", "mm.a.fc", "enc_dim,any_pooled,1"),
    )


def _codes() -> tuple[TensorRow, ...]:
    """A small transformer that predicts the further codes of a step one after the other."""
    size, ffn = f"{_PREDICTOR}.hidden_size", f"{_PREDICTOR}.intermediate_size"
    heads, kv = (f"{_PREDICTOR}.{n}*{_PREDICTOR}.head_dim" for n in ("num_attention_heads", "num_key_value_heads"))
    vocab = f"{_PREDICTOR}.vocab_size"

    def books(hf: str, gguf: str, dims: str) -> TensorRow:
        names = tuple(f"{_P}{hf}.{i}.weight" for i in range(_BOOKS))
        return TensorRow(names, (gguf,), (dims,), gguf_dims=(f"{_BOOKS},{dims}",))

    return (
        *linear(f"{_P}small_to_mtp_projection", "a.gen.code.proj_in", f"{size},hidden", OPTIONAL, OPTIONAL),
        tensor("talker.model.codec_embedding.weight", "a.gen.code.out_embd.weight", "talker_config.vocab_size,hidden"),
        books("model.codec_embedding", "a.gen.code.embd.weight", f"{vocab},hidden"),
        *layers(
            *norm("input_layernorm", "ln1", size), *linear("self_attn.q_proj", "attn_q", f"{heads},{size}"),
            *norm("self_attn.q_norm", "attn_q_norm", f"{_PREDICTOR}.head_dim"),
            *linear("self_attn.k_proj", "attn_k", f"{kv},{size}"),
            *norm("self_attn.k_norm", "attn_k_norm", f"{_PREDICTOR}.head_dim"),
            *linear("self_attn.v_proj", "attn_v", f"{kv},{size}"),
            *linear("self_attn.o_proj", "attn_out", f"{size},{heads}"), *norm("post_attention_layernorm", "ln2", size),
            *linear("mlp.gate_proj", "ffn_gate", f"{ffn},{size}"), *linear("mlp.up_proj", "ffn_up", f"{ffn},{size}"),
            *linear("mlp.down_proj", "ffn_down", f"{size},{ffn}"), hf=f"{_P}model.layers.{{n}}.",
            gguf="a.gen.code.blk.{n}.", depth=f"{_PREDICTOR}.num_hidden_layers",
        ),
        *norm(f"{_P}model.norm", "a.gen.code.output_norm", size),
        books("lm_head", "a.gen.code.head.weight", f"{vocab},{size}"),
    )


def _codebook(part: str, n: int) -> tuple[TensorRow, ...]:
    """Projections around the codebooks of a quantizer; a GGUF has the quotients of sums and counts."""
    hf, gguf = f"{_W}quantizer.rvq_{part}", f"a.gen.wav.quant.{part}"
    into, out = f"{_BOOK},codebook_dim", f"codebook_dim,{_BOOK}"
    return (
        tensor(f"{hf}.input_proj.weight", f"{gguf}.in_proj.weight", f"{into},1", gguf_dims=(into,)),
        tensor(f"{hf}.output_proj.weight", f"{gguf}.out_proj.weight", f"{out},1", gguf_dims=(out,)),
        *(
            TensorRow((f"{hf}.vq.layers.{i}._codebook.{name}",), (), (dims,))
            for i in range(n)
            for name, dims in (("embedding_sum", f"codebook_size,{_BOOK}"), ("cluster_usage", "codebook_size"))
        ),
    )


def _snake(hf: str, gguf: str, dim: str) -> tuple[TensorRow, ...]:
    """A snake activation with a frequency and a magnitude per channel, stored as logarithms in a checkpoint."""
    return (
        tensor(f"{hf}.alpha", f"{gguf}.alpha", dim, value="exp"),
        tensor(f"{hf}.beta", f"{gguf}.beta", dim, value="inverse_exp"),
    )


def _longer(n: int) -> tuple[TensorRow, ...]:
    """An upsampling block that halves the channels, with three residual units."""
    hf, gguf = f"{_W}decoder.{n + 1}.block", f"a.gen.wav.dac.blk.{n}"
    before, after = f"{_DIM}/{2**n}" if n else _DIM, f"{_DIM}/{2 ** (n + 1)}"
    return (
        *_snake(f"{hf}.0", f"{gguf}.snake", before),
        tensor(f"{hf}.1.conv.weight", f"{gguf}.conv.weight", f"{before},{after},any_kernel"),
        tensor(f"{hf}.1.conv.bias", f"{gguf}.conv.bias", after),
        *(
            row
            for unit in range(3)
            for i, kernel in ((1, 7), (2, 1))
            for row in (
                *_snake(f"{hf}.{unit + 2}.act{i}", f"{gguf}.res.{unit}.act{i}", after),
                *_conv(f"{hf}.{unit + 2}.conv{i}.conv", f"{gguf}.res.{unit}.conv{i}", f"{after},{after},{kernel}"),
            )
        ),
    )


def _sound() -> tuple[TensorRow, ...]:
    """Codes to audio: codebooks, a transformer, upsampling convolutions."""
    return (
        *(row for part, n in (("first", 1), ("rest", _BOOKS)) for row in _codebook(part, n)),
        *_conv(f"{_W}pre_conv.conv", "a.gen.wav.pre_conv", f"{_LATENT},codebook_dim,3"),
        *linear(f"{_W}pre_transformer.input_proj", "a.gen.wav.tfm.in_proj", f"{_HIDDEN},{_LATENT}", REQUIRED),
        *layers(
            *norm("input_layernorm", "ln1", _HIDDEN),
            *(
                row
                for letter in "qkv"
                for row in linear(f"self_attn.{letter}_proj", f"attn_{letter}", f"{_ATTENTION},{_HIDDEN}")
            ),
            *linear("self_attn.o_proj", "attn_out", f"{_HIDDEN},{_ATTENTION}"),
            tensor("self_attn_layer_scale.scale", "ls1.weight", _HIDDEN),
            *norm("post_attention_layernorm", "ln2", _HIDDEN),
            *linear("mlp.gate_proj", "ffn_gate", f"{_DECODER}.intermediate_size,{_HIDDEN}"),
            *linear("mlp.up_proj", "ffn_up", f"{_DECODER}.intermediate_size,{_HIDDEN}"),
            *linear("mlp.down_proj", "ffn_down", f"{_HIDDEN},{_DECODER}.intermediate_size"),
            tensor("mlp_layer_scale.scale", "ls2.weight", _HIDDEN), hf=f"{_W}pre_transformer.layers.{{n}}.",
            gguf="a.gen.wav.tfm.blk.{n}.", depth=f"{_DECODER}.num_hidden_layers",
        ),
        *norm(f"{_W}pre_transformer.norm", "a.gen.wav.tfm.output_norm", _HIDDEN),
        *linear(f"{_W}pre_transformer.output_proj", "a.gen.wav.tfm.out_proj", f"{_LATENT},{_HIDDEN}", REQUIRED),
        *layers(
            tensor("0.conv.weight", "conv.weight", f"{_LATENT},{_LATENT},{_DECODER}.upsampling_ratios"),
            tensor("0.conv.bias", "conv.bias", _LATENT), *_conv("1.dwconv.conv", "dwconv", f"{_LATENT},1,7"),
            *norm("1.norm", "norm", _LATENT, REQUIRED), *linear("1.pwconv1", "pw1", f"4*{_LATENT},{_LATENT}", REQUIRED),
            *linear("1.pwconv2", "pw2", f"{_LATENT},4*{_LATENT}", REQUIRED), tensor("1.gamma", "gamma", _LATENT),
            hf=f"{_W}upsample.{{n}}.", gguf="a.gen.wav.up.blk.{n}.", depth="upsampling_ratios",
        ),
        *_conv(f"{_W}decoder.0.conv", "a.gen.wav.dac.entry", f"{_DIM},{_LATENT},7"),
        *(row for n in range(4) for row in _longer(n)),
        *_snake(f"{_W}decoder.5", "a.gen.wav.dac.post_snake", f"{_DIM}/16"),
        *_conv(f"{_W}decoder.6.conv", "a.gen.wav.dac.post_conv", f"1,{_DIM}/16,7"),
    )


def _told(config: str, *names: str) -> tuple[Key, ...]:
    """Sizes without a GGUF key."""
    return tuple(Key("", (f"{config}.{name}",)) for name in names)


_QWEN3_TTS = Tower(
    id="qwen3_tts_codec",
    **whole("Qwen3TTSForConditionalGeneration", types=("qwen3_tts",)),
    when="audio.projector_type=qwen3tts_spkenc",
    text="",
    tensors=(*_voice(), *_codes(), *_sound()),
    made={
        "a.gen.wav.quant.first.codebook.weight": f"codebooks:{_W}quantizer.rvq_first.vq.layers,1",
        "a.gen.wav.quant.rest.codebook.weight": f"codebooks:{_W}quantizer.rvq_rest.vq.layers,{_BOOKS}",
    },
    # The network has no convolutions in other dtypes; the values between up and down exceed F16.
    f16=(
        "^a.gen.wav.pre_conv.weight", "^a.gen.wav.dac.entry.weight", "^a.gen.wav.dac.post_conv.weight",
        ".up.blk.*.dwconv.weight", ".dac.blk.*.conv1.weight", ".dac.blk.*.conv2.weight",
    ),
    f32=("^a.gen.wav.up.blk.*.conv.weight", "^a.gen.wav.dac.blk.*.conv.weight", "^a.gen.code.blk.*.ffn_down.weight"),
    keys=hears(
        projector("qwen3tts_spkenc", part="audio"),
        Key("audio.num_mel_bins", ("speaker_encoder_config.mel_dim",), constant=128),
        Key("audio.block_count", constant=_STAGES - 1), Key("audio.embedding_length", constant=1536),
        Key("audio.attention.head_count", constant=1), Key("audio.feed_forward_length", constant=1536),
        Key("audio.attention.layer_norm_epsilon", kind="f32", constant=1e-5),
        Key("has_gen_audio_encoder", kind="bool", constant=True), projector("qwen3tts_gen", part="gen.audio"),
        width("gen.audio"), Key("gen.audio.embedding_length", (f"{_PREDICTOR}.hidden_size",)),
        Key("gen.audio.feed_forward_length", (f"{_PREDICTOR}.intermediate_size",)),
        Key("gen.audio.block_count", (f"{_PREDICTOR}.num_hidden_layers",)),
        Key("gen.audio.attention.head_count", (f"{_PREDICTOR}.num_attention_heads",)),
        Key("gen.audio.attention.head_count_kv", (f"{_PREDICTOR}.num_key_value_heads",)),
        Key("gen.audio.attention.layer_norm_epsilon", (f"{_PREDICTOR}.rms_norm_eps",), "f32"),
        *_told(_PREDICTOR, "head_dim", "vocab_size"), *_told("talker_config", "vocab_size"),
        *_told(
            "speaker_encoder_config", "enc_channels", "enc_kernel_sizes", "enc_dim", "enc_se_channels",
            "enc_attention_channels",
        ),
        *_told(_DECODER, "hidden_size", "intermediate_size", "head_dim"),
        *(Key("", (f"{_DECODER}.{name}",), allowed=(number,)) for name, number in _FIXED.items()),
        Key("", (f"{_PREDICTOR}.rope_theta",), allowed=(1000000,)),
        Key("", (f"{_PREDICTOR}.num_code_groups",), allowed=(_BOOKS + 1,)),
        *_told(_DECODER, "latent_dim", "codebook_dim", "codebook_size", "decoder_dim", "upsampling_ratios"),
    ),
    files={"speech_tokenizer": "speech_tokenizer/config.json"},
)
_M, _F, _L = "mimi.", "flow_lm.", "flow_lm.flow_net."
_AUDIO = "audio_config"
_CODEC, _FILTERS, _FLOW = f"{_AUDIO}.hidden_size", "n_filters", "flow_dim"
_RATIOS = (4, 5, 6)
"""Upsampling factor of each stage, starting from the audio side."""


def _mimi_layers(part: str, gguf: str) -> tuple[TensorRow, ...]:
    """The transformer of one half of Mimi."""
    square, ffn = f"{_CODEC},{_CODEC}", f"{_AUDIO}.intermediate_size"
    return layers(
        *norm("norm1", "ln1", _CODEC, REQUIRED),
        split(
            "self_attn.in_proj.weight", f"3*{_CODEC},{_CODEC}", {f"attn_{letter}.weight": square for letter in "qkv"},
        ),
        *linear("self_attn.out_proj", "attn_out", square), tensor("layer_scale_1.scale", "ls1.weight", _CODEC),
        *norm("norm2", "ln2", _CODEC, REQUIRED), *linear("linear1", "ffn_up", f"{ffn},{_CODEC}"),
        *linear("linear2", "ffn_down", f"{_CODEC},{ffn}"), tensor("layer_scale_2.scale", "ls2.weight", _CODEC),
        hf=f"{_M}{part}_transformer.transformer.layers.{{n}}.", gguf=gguf, depth=f"{_AUDIO}.num_hidden_layers",
    )


def _residual(hf: str, gguf: str, channels: str) -> tuple[TensorRow, ...]:
    return (
        *_conv(f"{hf}.block.1.conv", f"{gguf}.res_conv1", f"{channels}/2,{channels},3"),
        *_conv(f"{hf}.block.3.conv", f"{gguf}.res_conv2", f"{channels},{channels}/2,1"),
    )


def _seanet() -> tuple[TensorRow, ...]:
    """Convolutions from audio to steps, and from steps to audio."""
    wide = [f"{2**i}*{_FILTERS}" for i in range(4)]
    enc, dec, a, w = f"{_M}encoder.model", f"{_M}decoder.model", "a.seanet", "a.gen.wav.seanet"
    inward = (
        row
        for i, ratio in enumerate(_RATIOS)
        for row in (
            *_residual(f"{enc}.{3 * i + 1}", f"{a}.blk.{i}", wide[i]),
            *_conv(f"{enc}.{3 * i + 3}.conv", f"{a}.blk.{i}.scale_conv", f"{wide[i + 1]},{wide[i]},{2 * ratio}"),
        )
    )
    outward = (
        row
        for i, ratio in enumerate(reversed(_RATIOS))
        for row in (
            tensor(
                f"{dec}.{3 * i + 2}.convtr.weight", f"{w}.blk.{i}.scale_conv.weight",
                f"{wide[3 - i]},{wide[2 - i]},{2 * ratio}",
            ),
            tensor(f"{dec}.{3 * i + 2}.convtr.bias", f"{w}.blk.{i}.scale_conv.bias", wide[2 - i]),
            *_residual(f"{dec}.{3 * i + 3}", f"{w}.blk.{i}", wide[2 - i]),
        )
    )
    return (
        *_conv(f"{enc}.0.conv", f"{a}.conv_in", f"{_FILTERS},1,7"), *inward,
        *_conv(f"{enc}.11.conv", f"{a}.conv_out", f"{_CODEC},{wide[3]},3"),
        *_conv(f"{dec}.0.conv", f"{w}.conv_in", f"{wide[3]},{_CODEC},7"), *outward,
        *_conv(f"{dec}.11.conv", f"{w}.conv_out", f"1,{_FILTERS},3"),
    )


def _flow() -> tuple[TensorRow, ...]:
    """The flow network that generates an audio step from noise, conditioned on the language model."""
    return (
        *linear(f"{_L}input_proj", "a.gen.flow.input_proj", f"{_FLOW},latent_dim", REQUIRED),
        *linear(f"{_L}cond_embed", "a.gen.flow.cond_embd", f"{_FLOW},hidden", REQUIRED),
        *layers(
            tensor("freqs", "freqs", "flow_frequencies"),
            *linear("mlp.0", "up", f"{_FLOW},2*flow_frequencies", REQUIRED),
            *linear("mlp.2", "down", f"{_FLOW},{_FLOW}", REQUIRED), tensor("mlp.3.alpha", "norm", _FLOW),
            hf=f"{_L}time_embed.{{n}}.", gguf="a.gen.flow.time.{n}.", depth="2",
        ),
        *layers(
            *norm("in_ln", "norm", _FLOW, REQUIRED), *linear("mlp.0", "up", f"{_FLOW},{_FLOW}", REQUIRED),
            *linear("mlp.2", "down", f"{_FLOW},{_FLOW}", REQUIRED),
            *linear("adaLN_modulation.1", "ada", f"3*{_FLOW},{_FLOW}", REQUIRED), hf=f"{_L}res_blocks.{{n}}.",
            gguf="a.gen.flow.blk.{n}.", depth="flow_depth",
        ),
        *linear(f"{_L}final_layer.adaLN_modulation.1", "a.gen.flow.final.ada", f"2*{_FLOW},{_FLOW}", REQUIRED),
        *linear(f"{_L}final_layer.linear", "a.gen.flow.final.proj", f"latent_dim,{_FLOW}", REQUIRED),
        *linear(f"{_F}out_eos", "a.gen.out_eos", "1,hidden", REQUIRED),
        tensor(f"{_F}input_linear.weight", "a.gen.input_linear.weight", "hidden,latent_dim"),
        tensor(f"{_F}emb_mean", "a.gen.emb_mean", "latent_dim"), tensor(f"{_F}emb_std", "a.gen.emb_std", "latent_dim"),
    )


_POCKET_TTS = Tower(
    id="pocket_tts_codec",
    gguf="clip",
    hf_class="FlowLMModel",
    model_type="pockettts",
    # The class that llama.cpp's converter assumes, and the name in the published code.
    hf_classes=("PocketTTSModel", "FlowLMModel"),
    model_types=("pockettts",),
    hf_when="model_type=pockettts",
    when="audio.projector_type=pockettts_spkenc",
    text="",
    tensors=(
        *_mimi_layers("encoder", "a.blk.{n}."), *_seanet(),
        tensor(f"{_M}downsample.conv.conv.weight", "a.downsample.conv.weight", f"inner_dim,{_CODEC},32"),
        tensor(f"{_F}speaker_proj_weight", "a.speaker_proj.weight", "hidden,inner_dim"), *_flow(),
        tensor(
            f"{_M}quantizer.output_proj.weight", "a.gen.wav.quant_out.weight", "outer_dim,latent_dim,1",
            gguf_dims=("outer_dim,latent_dim",),
        ),
        tensor(f"{_M}upsample.convtr.convtr.weight", "a.gen.wav.upsample.weight", "outer_dim,1,32"),
        *_mimi_layers("decoder", "a.gen.wav.tfm.blk.{n}."),
    ),
    f16=(".seanet.*.weight", "^a.downsample.conv.weight", "^a.gen.wav.upsample.weight"),
    keys=hears(
        projector("pockettts_spkenc", part="audio"), *sizes("audio"),
        Key("audio.attention.layer_norm_epsilon", kind="f32", constant=1e-5), Key("audio.num_mel_bins", constant=1),
        Key("has_gen_audio_encoder", kind="bool", constant=True), projector("pockettts_gen", part="gen.audio"),
        width("gen.audio"), *(replace(key, gguf=f"gen.{key.gguf}") for key in sizes("audio")),
        Key("gen.audio.attention.layer_norm_epsilon", kind="f32", constant=1e-5),
        Key("gen.audio.model_variant", ("model_variant",), "str"),
        *_told(_AUDIO, "latent_dim", "flow_dim", "flow_depth", "flow_frequencies", "inner_dim", "outer_dim", _FILTERS),
    ),
)

ROWS: tuple[Architecture, ...] = (
    Architecture(
        id="wavtokenizer_dec", gguf="wavtokenizer-dec",
        **class_names("WavTokenizerDec", types=("wavtokenizer_dec",), bare=("WavTokenizerDec",)), no_vocabulary=True,
        tensors=(
            tensor("backbone.embedding.weight", "token_embd.weight", "vocab,n_embd_features"),
            *_column("backbone.embed", "conv1d", f"{_POS},n_embd_features,7"),
            *(row for n in range(6) for row in _posnet(n)), *norm("backbone.norm", "token_embd_norm", _POS, REQUIRED),
            *block(
                tensor("dwconv.weight", "dw.weight", f"{_NEXT},1,7"), tensor("dwconv.bias", "dw.bias", f"{_NEXT},1"),
                *norm("norm", "norm", _NEXT, REQUIRED), *linear("pwconv1", "pw1", f"ffn,{_NEXT}", REQUIRED),
                *linear("pwconv2", "pw2", f"{_NEXT},ffn", REQUIRED), tensor("gamma.weight", "gamma.weight", _NEXT),
                hf="backbone.convnext.{n}.", gguf="convnext.{n}.", depth="convnext.n_layer",
            ),
            *norm("backbone.final_layer_norm", "output_norm", _NEXT, REQUIRED),
            *linear("head.out", "output", f"hidden,{_NEXT}", REQUIRED),
        ),
        keys=(
            *rename(DIMS, num_layers="n_layer", intermediate_size="n_ff", num_heads="n_head"),
            replace(LAYER_EPS, hf=("layer_norm_epsilon",)), VOCAB,
            Key("features_length", ("n_embd_features",), needed=REQUIRED),
            Key("attention.group_norm_epsilon", ("group_norm_epsilon",), "f32"),
            Key("attention.group_norm_groups", ("group_norm_groups",)),
            Key("posnet.embedding_length", (_POS,), needed=REQUIRED),
            Key("posnet.block_count", ("posnet.n_layer",), allowed=(6,), needed=REQUIRED),
            Key("convnext.embedding_length", (_NEXT,), needed=REQUIRED),
            Key("convnext.block_count", ("convnext.n_layer",), needed=REQUIRED), ENCODER[0],
        ),
        ignored=("codebook.cluster_size", "codebook.embed_avg", "codebook.inited"),
    ),
    # For both networks below llama.cpp's file has a computed embedding, which these rows do not produce.
    Architecture(
        id="qwen3_tts_talker", gguf="qwen3tts",
        **class_names("Qwen3TTSTalkerForConditionalGeneration", types=("qwen3_tts_talker",)),
        when="tensors=text_embd.weight",
        tensors=(
            *_hf_only("vocab,text_hidden_size", "talker.model.text_embedding.weight"),
            *_hf_only("vocab_size,hidden", "talker.model.codec_embedding.weight"),
            *_hf_only("text_hidden_size,text_hidden_size", "talker.text_projection.linear_fc1.weight"),
            *_hf_only("text_hidden_size", "talker.text_projection.linear_fc1.bias"),
            *_hf_only("hidden,text_hidden_size", "talker.text_projection.linear_fc2.weight"),
            *_hf_only("hidden", "talker.text_projection.linear_fc2.bias"),
            *block(
                *norm("input_layernorm", "attn_norm"), *attention(qk_norm="head_dim"),
                *norm("post_attention_layernorm", "ffn_norm"), *gated_mlp(), hf="talker.model.layers.{n}.",
            ),
            *final_norm("talker.model.norm"), *linear("talker.codec_head", "output", "vocab_size,hidden"),
        ),
        keys=(
            *DECODER, SILU, must_be("attention_bias", False),
            Key("vocab_size", ("text_vocab_size",), field="vocab_size"), Key("", ("vocab_size",)),
            Key("", ("text_hidden_size",)), Key("", converter=folded),
        ),
    ),
    Architecture(
        id="pocket_tts", gguf="pockettts",
        **class_names(
            "PocketTTSModel", "PocketTTSForConditionalGeneration", types=("pocket_tts",),
            bare=("PocketTTSModel", "PocketTTSForConditionalGeneration"),
        ),
        when="tensors=text_embd.weight",
        tensors=(
            *_hf_only("vocab,hidden", "model.embed_tokens.weight"),
            *_hf_only("hidden,latent_dim", "model.audio_prompt_proj.weight", "model.audio_latent_proj.weight"),
            *_hf_only("latent_dim", "model.bos_latent"),
            *block(
                *norm("input_layernorm", "attn_norm", bias=REQUIRED), *attention("attention_bias", "attention_bias"),
                *norm("post_attention_layernorm", "ffn_norm", bias=REQUIRED), *plain_mlp(None, "mlp.fc1", "mlp.fc2"),
            ),
            *final_norm(bias=REQUIRED),
        ),
        keys=(
            *DIMS, GROUPED, ROPE, LAYER_EPS, HEAD_DIM, flag("attention_bias"), gelu(), Key("", ("flow_head_config",)),
            Key("", converter=folded),
        ),
    ),
    # The same network as published, without a config.json (arch.configless).
    Architecture(
        id="pocket_tts_published", gguf="pockettts", when="tensors=bos_emb.weight",
        **class_names("FlowLMModel", types=("pockettts",), bare=("FlowLMModel",)),
        tensors=(
            *_hf_only("vocab,hidden", "flow_lm.conditioner.embed.weight"),
            *_hf_only("latent_dim", "flow_lm.bos_emb", "flow_lm.emb_mean", "flow_lm.emb_std"),
            TensorRow(("flow_lm.bos_before_voice",), (), ("1,1,hidden",), OPTIONAL),
            *_hf_only("hidden,latent_dim", "flow_lm.input_linear.weight"),
            *_hf_only("1,hidden", "flow_lm.out_eos.weight"), *_hf_only("1", "flow_lm.out_eos.bias"),
            *_hf_only("hidden,inner_dim", "flow_lm.speaker_proj_weight"),
            *block(
                *norm("norm1", "attn_norm", bias=REQUIRED),
                split(
                    "self_attn.in_proj.weight", "3*hidden,hidden",
                    {f"attn_{letter}.weight": "hidden,hidden" for letter in "qkv"},
                ),
                *linear("self_attn.out_proj", "attn_output", "hidden,hidden"),
                *norm("norm2", "ffn_norm", bias=REQUIRED), *linear("linear1", "ffn_up", "ffn,hidden"),
                *linear("linear2", "ffn_down", "hidden,ffn"), hf="flow_lm.transformer.layers.{n}.",
            ),
            *final_norm("flow_lm.out_norm", bias=REQUIRED),
        ),
        keys=(
            *DIMS, GROUPED, ROPE, LAYER_EPS, Key("", ("audio_config.latent_dim",)),
            Key("", ("audio_config.inner_dim",)), Key("", ("model_variant",), "str"), Key("", converter=folded),
        ),
    ),
)

TOWERS: tuple[Tower, ...] = (_QWEN3_TTS, _POCKET_TTS)
