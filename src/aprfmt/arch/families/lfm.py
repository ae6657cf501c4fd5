"""LFM 2."""

from __future__ import annotations

from dataclasses import replace

from aprfmt.arch.blocks.decoder import (
    DIMS, EXPERTS, KV_HEADS_BY_LAYER, RMS_EPS, ROPE, VOCAB, More, attention,
    block, class_names, embedding, experts, gated_mlp, head, linear, must_be, norm, tensor,
)
from aprfmt.arch.blocks.encoder import ENCODER
from aprfmt.arch.blocks.hearing import batch_norm, scale_and_shift
from aprfmt.arch.blocks.tower import (
    IMAGE, TOWER_WIDTH, USE_GELU, VISION_EPS, hears, layers, projector, sees, siglip, sizes, tower_attention, whole,
)
from aprfmt.arch.converter import DEFAULT, ConfigKeys, Converter, Scope, default, nothing, refuse_if
from aprfmt.arch.converters.common import ATTENTION
from aprfmt.arch.converters.hybrid import mixed_layers
from aprfmt.arch.fields import as_float, as_int
from aprfmt.arch.grammar import layer_kinds
from aprfmt.arch.row import OPTIONAL, REQUIRED, Architecture, Key, TensorRow, Tower


as_wide = Converter(nothing, lambda value, scope: scope.h.hidden_size if scope.gguf("embedding_length_out") else None)


def _has_one_kind(value: object, scope: Scope) -> bool:
    kinds = layer_kinds(scope.h.extra, scope.h.num_layers)
    return bool(kinds) and len({kind in ATTENTION for kind in kinds or ()}) == 1


def _lfm2_width(value: object, scope: Scope) -> object:
    """LFM2 in stored form: the actual width of the MLP, without adjustment keys."""
    width, extra = as_int(value, scope.name), scope.h.extra
    if width is None or not extra.get("block_auto_adjust_ff_dim"):
        return DEFAULT
    width = 2 * width // 3
    if (factor := as_float(extra.get("block_ffn_dim_multiplier"), "block_ffn_dim_multiplier")) is not None:
        width = int(factor * width)
    multiple = as_int(extra.get("block_multiple_of"), "block_multiple_of") or 1
    return ConfigKeys({scope.name: -(-width // multiple) * multiple, "block_auto_adjust_ff_dim": False})


some_conv = Converter(
    refuse_if(_has_one_kind, "llama.cpp's {gguf} needs both attention and convolution layers"), default
)
lfm2_width = Converter(normalize=_lfm2_width)
never_adjusted = Converter(nothing, lambda value, scope: False)
_BLOCKS, _CONTEXT, _WIDTH, _FFN, _HEADS = DIMS
_CONV = "conv_L_cache"


def _short_conv() -> tuple[TensorRow, ...]:
    """The conv layers of LFM2: three projections of the input, a gated convolution over a few tokens."""
    at, bias = More(layers="conv"), "conv_bias"
    return (
        tensor("conv.conv.weight", "shortconv.conv.weight", f"hidden,1,{_CONV}", gguf_dims=(f"hidden,{_CONV}",), **at),
        tensor("conv.conv.bias", "shortconv.conv.bias", "hidden", bias, **at),
        *linear("conv.in_proj", "shortconv.in_proj", "3*hidden,hidden", bias, **at),
        *linear("conv.out_proj", "shortconv.out_proj", "hidden,hidden", bias, **at),
    )


def _lfm2(*mlp: TensorRow, begin: str = "model.") -> tuple[TensorRow, ...]:
    return (
        embedding(f"{begin}embed_tokens"),
        *norm(f"{begin}embedding_norm", "token_embd_norm"),
        *block(
            *norm("operator_norm", "attn_norm"),
            *_short_conv(),
            *attention(o_proj="out_proj", layers="!conv"),
            *norm("self_attn.q_layernorm", "attn_q_norm", "head_dim", layers="!conv"),
            *norm("self_attn.k_layernorm", "attn_k_norm", "head_dim", layers="!conv"),
            *norm("ffn_norm", "ffn_norm"),
            *mlp, hf=f"{begin}layers.{{n}}.",
        ),
        *head(),
    )


_KINDS = Key("", ("layer_types",), converter=mixed_layers)
_LFM2_EPS = replace(RMS_EPS, hf=("norm_eps",))
_LFM2_END = (VOCAB, Key("shortconv.l_cache", (_CONV,)), must_be("conv_bias", False), Key("", converter=some_conv))
_LFM2_MLP = gated_mlp(hf="feed_forward", names=("w1", "w3", "w2"))
_LFM2_ROW = Architecture(
    id="lfm2", gguf="lfm2",
    **class_names("Lfm2ForCausalLM", "LFM2ForCausalLM", "Lfm2Model", types=("lfm2",), bare=("Lfm2Model",)),
    tensors=(
        *_lfm2(*_LFM2_MLP),
        tensor("1_Dense.linear.weight", "dense_2.weight", "dense_1_out,hidden", "dense_1_out"),
        tensor("1_Dense.linear.bias", "dense_2.bias", "dense_1_out", "dense_1_bias"),
    ),
    keys=(
        _BLOCKS, _CONTEXT, _WIDTH, replace(_FFN, hf=("intermediate_size", "block_ff_dim"), converter=lfm2_width),
        _HEADS, KV_HEADS_BY_LAYER, ROPE, _LFM2_EPS,
        *_LFM2_END, _KINDS, ENCODER[1], Key("embedding_length_out", ("dense_1_out",)),
        Key("", ("dense_1_in",), converter=as_wide),
        Key("", ("dense_1_bias",), "bool"),
        Key("", ("block_auto_adjust_ff_dim",), "bool", converter=never_adjusted),
        Key("", ("full_attn_idxs",)),
        Key("", ("block_ffn_dim_multiplier",), "f32"),
        Key("", ("block_multiple_of",)),
    ),
)


_BATCH_NORM = "conformer.layers.{n}.conv.batch_norm"


def _fast_conformer() -> tuple[TensorRow, ...]:
    """A conformer after convolutions with a stride of eight frames."""
    many = "subsampling_conv_channels"
    first: list[TensorRow] = []
    for n, shape in ((0, "1,3,3"), (2, "1,3,3"), (3, f"{many},1,1"), (5, "1,3,3"), (6, f"{many},1,1")):
        name = f"conformer.pre_encode.conv.{n}"
        first += [
            tensor(f"{name}.weight", f"a.conv1d.{n}.weight", f"{many},{shape}"),
            tensor(f"{name}.bias", f"a.conv1d.{n}.bias", many, gguf_dims=(f"{many},1,1",)),
        ]
    return (
        *first, *linear("conformer.pre_encode.out", "a.pre_encode.out", f"d_model,{many}*feat_in/8", REQUIRED),
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
            *tower_attention(names=("linear_q", "linear_k", "linear_v", "linear_out"), width="d_model"),
            *linear("self_attn.linear_pos", "linear_pos", "d_model,d_model"),
            tensor("self_attn.pos_bias_u", "pos_bias_u", "n_heads,d_model/n_heads"),
            tensor("self_attn.pos_bias_v", "pos_bias_v", "n_heads,d_model/n_heads"),
            *norm("norm_conv", "norm_conv", "d_model", REQUIRED),
            tensor(
                "conv.pointwise_conv1.weight", "conv_pw1.weight",
                "2*d_model,d_model,1", gguf_dims=("2*d_model,d_model",),
            ),
            tensor("conv.pointwise_conv1.bias", "conv_pw1.bias", "2*d_model"),
            tensor(
                "conv.depthwise_conv.weight", "conv_dw.weight",
                "d_model,1,conv_kernel_size", gguf_dims=("d_model,conv_kernel_size",),
            ),
            tensor("conv.depthwise_conv.bias", "conv_dw.bias", "d_model"),
            tensor(
                "conv.pointwise_conv2.weight", "conv_pw2.weight", "d_model,d_model,1", gguf_dims=("d_model,d_model",)
            ),
            tensor("conv.pointwise_conv2.bias", "conv_pw2.bias", "d_model"),
            *norm("norm_out", "ln2", "d_model", REQUIRED),
            hf="conformer.layers.{n}.", gguf="a.blk.{n}.", depth="n_layers",
        ),
        *batch_norm(_BATCH_NORM, "d_model", "n_layers"),
    )


ROWS: tuple[Architecture, ...] = (
    _LFM2_ROW,
    replace(
        _LFM2_ROW,
        id="lfm2_bidirectional", hf_class="Lfm2BidirectionalModel",
        hf_classes=("Lfm2BidirectionalModel", "Lfm2BidirectionalForMaskedLM"),
        bare_classes=("Lfm2BidirectionalModel",),
        prefixes=(("lfm2.", "model."),),
        model_types=(),
        when="attention.causal=False",
        keys=(*_LFM2_ROW.keys, ENCODER[0]),
    ),
    replace(
        _LFM2_ROW,
        id="lfm2_audio_tokenizer", hf_class="Lfm25AudioTokenizer", hf_classes=("Lfm25AudioTokenizer",),
        bare_classes=("Lfm25AudioTokenizer",),
        model_types=(),
        when="attention.sliding_window", ignored=("istft.window",),
        tensors=(*_lfm2(*_LFM2_MLP, begin="lfm."), *linear("lin", "dense_2", "output_size,hidden", REQUIRED)),
        keys=(
            *(key for key in _LFM2_ROW.keys if not key.gguf.startswith("embedding_length_out")),
            Key("attention.sliding_window", ("sliding_window",)),
            Key("embedding_length_out", ("output_size",)),
        ),
    ),
    Architecture(
        id="lfm2_moe", gguf="lfm2moe", **class_names("Lfm2MoeForCausalLM", types=("lfm2_moe",)),
        tensors=_lfm2(
            *gated_mlp(hf="feed_forward", names=("w1", "w3", "w2"), layers="dense"),
            *linear("feed_forward.gate", "ffn_gate_inp", "experts,hidden", layers="moe"),
            tensor("feed_forward.expert_bias", "exp_probs_b.bias", "experts", "use_expert_bias", layers="moe"),
            *experts("feed_forward.experts.{e}.", ("w1", "w3", "w2"), layers="moe"),
        ),
        keys=(
            *DIMS, KV_HEADS_BY_LAYER, ROPE, _LFM2_EPS,
            *EXPERTS, Key("leading_dense_block_count", ("num_dense_layers",)),
            Key("expert_gating_func", constant=2),
            *_LFM2_END, _KINDS, must_be("use_expert_bias", True),
            must_be("norm_topk_prob", True),
            must_be("routed_scaling_factor", 1.0),
        ),
    ),
)

TOWERS: tuple[Tower, ...] = (
    Tower(
        id="lfm2_audio_tower", **whole("Lfm2AudioForConditionalGeneration", types=("lfm2_audio",)),
        when="projector_type=lfm2a", text="lfm.", bare=True,
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
        made=scale_and_shift(_BATCH_NORM),
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
    ),
    Tower(
        id="lfm2_vl_vision", **whole("Lfm2VlForConditionalGeneration", types=("lfm2_vl",)),
        when="projector_type=lfm2",
        prefixes=(
            ("model.vision_tower.vision_model.", "vision_tower.vision_model."),
            ("model.vision_tower.", "vision_tower.vision_model."),
            ("model.multi_modal_projector.", "multi_modal_projector."),
        ),
        tensors=(
            TensorRow(
                ("vision_tower.vision_model.embeddings.patch_embedding.weight",),
                ("v.patch_embd.weight",),
                (f"{TOWER_WIDTH},16*16*3",),
                gguf_dims=(f"{TOWER_WIDTH},3,16,16",),
                columns=("swap:1,16*16,3",),
            ),
            tensor("vision_tower.vision_model.embeddings.patch_embedding.bias", "v.patch_embd.bias", TOWER_WIDTH),
            *siglip("vision_tower.vision_model.", positions=f"num_patches,{TOWER_WIDTH}")[2:],
            *norm("multi_modal_projector.layer_norm", "mm.input_norm", f"{TOWER_WIDTH}*4", OPTIONAL, need=OPTIONAL),
            *linear("multi_modal_projector.linear_1", "mm.1", f"projector_hidden_size,{TOWER_WIDTH}*4", OPTIONAL),
            *linear("multi_modal_projector.linear_2", "mm.2", "hidden,projector_hidden_size", OPTIONAL),
        ),
        keys=sees(
            *sizes(image_size=""),
            Key("vision.image_size", constant=256),
            *IMAGE, projector("lfm2"),
            VISION_EPS, Key("vision.projector.scale_factor", ("downsample_factor",)),
            USE_GELU, Key("", ("vision_config.num_patches",)),
            Key("", ("projector_hidden_size",)),
        ),
        config={"vision_config.model_type": "siglip2_vision_model"},
    ),
)
