"""GLM, from ChatGLM to GLM 5, and its towers."""

from __future__ import annotations

from dataclasses import replace

from aprfmt.arch.blocks.decoder import (
    DECODER, DIMS, GROUPED, RMS_EPS, ROPE_DIM, SILU, VOCAB, WHOLE_HEADS, attention, block, class_names, embedding,
    final_norm, flag, fused_mlp, fused_qkv, gated_mlp, head, hf_names, linear, must_be, needs, network, norm, rename,
    tensor,
)
from aprfmt.arch.blocks.hearing import CONVOLUTIONS, D_MODEL, HEARING_EPS, MEL, POSITIONS, keys_in, own_sizes, whisper
from aprfmt.arch.blocks.mla import INDEXER, indexer, mla_decoder, mla_keys
from aprfmt.arch.blocks.moe import (
    BIAS_FLAG, DENSE_LAYERS, EQUAL_HEADS, GROUPS, MLP_LAYER_TYPES, MTP, MTP_OR_0, SHARED_COUNT, SIGMOID, WEIGHTS_NORM,
    WEIGHTS_SCALE, WIDTH, draft_layer, moe_keys, router_and_experts, selection_bias, shared_expert,
)
from aprfmt.arch.blocks.tower import (
    IMAGE, PATCHES, TOWER_WIDTH, VISION_EPS, hears, layers, mlp, norms, patches, patches_in_time, preprocessor,
    projector, sees, sizes, whole,
)
from aprfmt.arch.converter import DEFAULT, Converter, Scope, if_given
from aprfmt.arch.converters.common import integer
from aprfmt.arch.converters.sparse import indexers_from_gguf, indexers_normalize, indexers_to_gguf
from aprfmt.arch.converters.towers import activation
from aprfmt.arch.fields import as_float, as_int
from aprfmt.arch.rope import DEFAULT_THETA
from aprfmt.arch.row import REQUIRED, Architecture, Key, TensorRow, Tower


def _glm(*norms: TensorRow) -> tuple[TensorRow, ...]:
    """GLM's decoder, with fused gate and up on both sides."""
    return (
        embedding(), *block(*norm("input_layernorm", "attn_norm"), *attention("attention_bias"), *norms, *fused_mlp()),
        *final_norm(), *head(),
    )


_GLM4 = _glm(
    *norm("post_self_attn_layernorm", "post_attention_norm"), *norm("post_attention_layernorm", "ffn_norm"),
    *norm("post_mlp_layernorm", "post_ffw_norm"),
)


def _halved(row: TensorRow) -> TensorRow:
    """Q and K whose rotated pairs are neighbours in a checkpoint and halves of the rotated part in a GGUF."""
    heads = {"attn_q": "heads", "attn_k": "kv_heads"}.get(row.gguf[0].split(".")[-2])
    return replace(row, order=(f"each:{heads},head_dim,rotary/2,2",)) if heads else row


_GLM_KEYS = (*DECODER, ROPE_DIM, flag("attention_bias"), SILU)
glm_indexers = Converter(indexers_to_gguf, indexers_from_gguf, normalize=indexers_normalize)


def _ratio_from_gguf(value: object, scope: Scope) -> object:
    theta = as_float(value, scope.key.gguf)
    ratio = None if theta is None else theta / DEFAULT_THETA
    return DEFAULT if ratio is None else int(ratio) if ratio.is_integer() else ratio


def _ratio_to_gguf(value: object, scope: Scope) -> float | None:
    """The base frequency: `rope_ratio` times the default."""
    ratio = as_float(value, scope.name)
    return None if ratio is None else ratio * DEFAULT_THETA


half = Converter(
    lambda value, scope: scope.h.head_dim and scope.h.head_dim // 2, integer(int, lambda count: 2 * count).from_gguf,
)
"""Rotated dimensions: half a head."""
rope_ratio = Converter(_ratio_to_gguf, _ratio_from_gguf)


def _expert(kind: str, gguf: str) -> tuple[TensorRow, ...]:
    """CogVLM's separate projections for text and image tokens."""
    attn, mlp = f"self_attn.{kind}_expert_", f"mlp.{kind}_mlp."
    beside = "vis_" if gguf else ""
    return (
        *linear(f"{attn}query_key_value", f"{beside}attn_qkv", "3*q,hidden"),
        *linear(f"{attn}dense", f"{beside}attn_output", "hidden,q"),
        *linear(f"{mlp}gate_proj", f"{gguf or 'ffn_'}gate", "ffn,hidden"),
        *linear(f"{mlp}up_proj", f"{gguf or 'ffn_'}up", "ffn,hidden"),
        *linear(f"{mlp}down_proj", f"{gguf or 'ffn_'}down", "hidden,ffn"),
    )


_OF_VISION = f"vision_config.{TOWER_WIDTH}"


def _pixels_of_token(scope: Scope) -> int:
    """Pixels per side of the patch group of a token, from the preprocessor config."""
    patch, side = (scope.size(f"preprocessor_config.{name}") or 0 for name in ("patch_size", "merge_size"))
    return (patch * side) ** 2


def _tokens_to_gguf(value: object, scope: Scope) -> object:
    tokens = as_int(value, scope.name)
    return tokens * _pixels_of_token(scope) if tokens is not None else None


def _tokens_from_gguf(value: object, scope: Scope) -> object:
    pixels = as_int(value, scope.name)
    patch, side = scope.gguf("vision.patch_size"), scope.gguf("vision.spatial_merge_size")
    if pixels is None or not isinstance(patch, int) or not isinstance(side, int) or not patch * side:
        return DEFAULT
    return pixels // (patch * side) ** 2


tokens_as_pixels = Converter(_tokens_to_gguf, _tokens_from_gguf)
_V = "visual."
_SIDE = "spatial_merge_size"
_BIAS = "vision_config.attention_bias"
_PREFIXES = (("model.visual.", _V),)


def _tensors(
    *own: TensorRow, ffn: str, inner: str, bias: bool, qk_norm: bool, qkv_bias: str | None
) -> tuple[TensorRow, ...]:
    """`ffn` is the width of an MLP, `inner` that of the projector; `bias` is that of an MLP."""
    head_dim = f"{TOWER_WIDTH}/num_heads"
    qk = (*norm("attn.q_norm", "attn_q_norm", head_dim), *norm("attn.k_norm", "attn_k_norm", head_dim))
    return (
        *patches_in_time(f"{_V}patch_embed.proj"),
        tensor(f"{_V}patch_embed.proj.bias", "v.patch_embd.bias", TOWER_WIDTH), *own,
        *layers(
            *norms("norm1", "norm2", bias=False),
            *linear("attn.qkv", "attn_qkv", f"3*{TOWER_WIDTH},{TOWER_WIDTH}", qkv_bias),
            *linear("attn.proj", "attn_out", f"{TOWER_WIDTH},{TOWER_WIDTH}", qkv_bias), *(qk if qk_norm else ()),
            *mlp("mlp.up_proj", "mlp.down_proj", "mlp.gate_proj", bias=bias, ffn=ffn), hf=f"{_V}blocks.{{n}}.",
            depth="depth",
        ),
        *norm(f"{_V}post_layernorm", "v.post_ln", TOWER_WIDTH),
        tensor(f"{_V}downsample.weight", "mm.patch_merger.weight", f"hidden,{TOWER_WIDTH},{_SIDE},{_SIDE}"),
        tensor(f"{_V}downsample.bias", "mm.patch_merger.bias", "hidden"),
        *linear(f"{_V}merger.proj", "mm.model.fc", "hidden,hidden"),
        *norm(f"{_V}merger.post_projection_norm", "mm.post_norm", "hidden", REQUIRED),
        *linear(f"{_V}merger.gate_proj", "mm.gate", f"{inner},hidden"),
        *linear(f"{_V}merger.up_proj", "mm.up", f"{inner},hidden"),
        *linear(f"{_V}merger.down_proj", "mm.down", f"hidden,{inner}"),
    )


_SIZES = sizes(block_count="depth", head_count="num_heads")
_HIDDEN_ACT = Key("", ("vision_config.hidden_act",), "str", converter=activation)
_EPS = Key("vision.attention.layer_norm_epsilon", ("vision_config.rms_norm_eps",), "f32")
_MERGE = Key("", (f"vision_config.{_SIDE}",))

ROWS: tuple[Architecture, ...] = (
    Architecture(
        id="glm", gguf="chatglm", **hf_names("Glm", "glm"), rope_type=0,
        tensors=_glm(*norm("post_attention_layernorm", "ffn_norm")), keys=(*_GLM_KEYS, WHOLE_HEADS),
    ),
    Architecture(
        id="glm4", gguf="glm4", **hf_names("Glm4", "glm4"), rope_type=0,
        tensors=(*_GLM4, *block(*draft_layer())), keys=(*_GLM_KEYS, MTP),
    ),
    Architecture(  # GLM-4.1V and GLM-OCR: llama.cpp rotates halves with M-RoPE
        id="glm4v", gguf="glm4", when="rope.dimension_sections", hf_class="Glm4ForCausalLM", model_type="glm4",
        hf_classes=(), model_types=("glm4v", "glm4v_text", "glm_ocr", "glm_ocr_text"), rope_type=0,
        tensors=(*(_halved(row) for row in _GLM4), *block(*draft_layer())),
        keys=(*_GLM_KEYS, MTP, *needs("rope.dimension_sections")),
    ),
    Architecture(
        id="glm4_moe", gguf="glm4moe",
        **hf_names("Glm4Moe", "glm4_moe", "SolarOpen", also=("glm4v_moe_text", "solar_open")),
        tensors=network(
            *norm("input_layernorm", "attn_norm"), *attention("attention_bias"),
            *norm("self_attn.q_norm", "attn_q_norm", "head_dim", need="use_qk_norm"),
            *norm("self_attn.k_norm", "attn_k_norm", "head_dim", need="use_qk_norm"),
            *norm("post_attention_layernorm", "post_attention_norm"), *router_and_experts("moe", (selection_bias(),)),
            *shared_expert("mlp.shared_experts", "n_shared_experts*moe_ffn", "n_shared_experts", "moe"),
            *gated_mlp(layers="dense"), *draft_layer(),
        ),
        keys=moe_keys(
            *GROUPS, ROPE_DIM, WIDTH, SHARED_COUNT, DENSE_LAYERS, SIGMOID, WEIGHTS_SCALE, WEIGHTS_NORM, BIAS_FLAG,
            flag("use_qk_norm"), MTP_OR_0, count="n_routed_experts",
        ),
    ),
    Architecture(
        id="glm_moe_dsa", gguf="glm-dsa", **hf_names("GlmMoeDsa", "glm_moe_dsa"), rope_type=0,
        tensors=mla_decoder((selection_bias(),), (*indexer("indexer"), *draft_layer())),
        keys=mla_keys(
            *INDEXER, Key("attention.indexer.types", ("indexer_types",), "bool[]", converter=glm_indexers), MTP_OR_0,
            MLP_LAYER_TYPES
        ),
    ),
    # As zai-org/chatglm3-6b and glm-4-9b-chat have it.
    Architecture(
        id="chatglm", gguf="chatglm", when="tensors=attn_qkv.weight",
        **class_names("ChatGLMModel", "ChatGLMForConditionalGeneration", types=("chatglm",)), rope_type=0,
        ignored=(".rotary_pos_emb.inv_freq",),
        tensors=network(
            *norm("input_layernorm", "attn_norm"),
            *fused_qkv("self_attention.query_key_value", "q+2*kv,hidden", "add_qkv_bias"),
            *linear("self_attention.dense", "attn_output", "hidden,hidden"),
            *norm("post_attention_layernorm", "ffn_norm"), *linear("mlp.dense_h_to_4h", "ffn_up", "2*ffn,hidden"),
            *linear("mlp.dense_4h_to_h", "ffn_down", "hidden,ffn"),
            hf="transformer.encoder.layers.{n}.", embed="transformer.embedding.word_embeddings",
            last="transformer.encoder.final_layernorm", out="transformer.output_layer",
        ),
        keys=(
            *rename(
                DIMS, max_position_embeddings="seq_length", num_layers=("num_layers", "num_hidden_layers"),
                intermediate_size="ffn_hidden_size",
            ),
            replace(GROUPED, hf=("multi_query_group_num",)), replace(RMS_EPS, hf=("layernorm_epsilon",)),
            Key("rope.dimension_count", ("kv_channels",), field="head_dim", converter=half),
            Key("rope.freq_base", ("rope_ratio",), "f32", converter=rope_ratio),
            Key("", ("padded_vocab_size", "vocab_size"), field="vocab_size"), WHOLE_HEADS, flag("add_qkv_bias"),
            must_be("add_bias_linear", False), must_be("apply_residual_connection_post_layernorm", False),
            must_be("multi_query_attention", True), must_be("post_layer_norm", True), must_be("rmsnorm", True),
        ),
    ),
    # As in zai-org/cogvlm-chat-hf. The image tensors are part of the network: llama.cpp requires them.
    Architecture(
        id="cogvlm", gguf="cogvlm", **hf_names("CogVLM", "cogvlm"),
        tensors=network(
            *norm("input_layernorm", "attn_norm"), *_expert("language", ""), *_expert("vision", "vis_"),
            *norm("post_attention_layernorm", "ffn_norm"),
        ),
        keys=(*DECODER, VOCAB, ROPE_DIM, EQUAL_HEADS, SILU),
    ),
)

TOWERS: tuple[Tower, ...] = (
    Tower(
        id="cogvlm_vision", **whole("CogVLMForCausalLM", types=("cogvlm",)), when="projector_type=cogvlm", text="",
        tensors=(
            tensor("model.vision.patch_embedding.cls_embedding", "v.class_embd", f"1,{TOWER_WIDTH}"),
            *patches("model.vision.patch_embedding.proj"),
            tensor(
                "model.vision.patch_embedding.position_embedding.weight", "v.position_embd.weight",
                f"{PATCHES}+1,vision_config.{TOWER_WIDTH}",
            ),
            *layers(
                *norms("input_layernorm", "post_attention_layernorm", width=_OF_VISION),
                *linear("attention.query_key_value", "attn_qkv", f"3*{_OF_VISION},{_OF_VISION}", REQUIRED),
                *linear("attention.dense", "attn_out", f"{_OF_VISION},{_OF_VISION}", REQUIRED),
                *mlp(width=_OF_VISION, ffn="vision_config.intermediate_size"),
                hf="model.vision.transformer.layers.{n}.", depth="vision_config.num_hidden_layers",
            ),
            *linear("model.vision.linear_proj.linear_proj", "mm.model.fc", f"hidden,{_OF_VISION}"),
            *norm("model.vision.linear_proj.norm1", "mm.post_fc_norm", "hidden", REQUIRED),
            *linear("model.vision.linear_proj.dense_h_to_4h", "mm.up", "intermediate_size,hidden"),
            *linear("model.vision.linear_proj.gate_proj", "mm.gate", "intermediate_size,hidden"),
            *linear("model.vision.linear_proj.dense_4h_to_h", "mm.down", "hidden,intermediate_size"),
            tensor("model.vision.boi", "v.boi", "1,1,hidden"), tensor("model.vision.eoi", "v.eoi", "1,1,hidden"),
        ),
        keys=(
            *sees(*sizes(head_count="num_heads"), *IMAGE, VISION_EPS, projector("cogvlm")),
            Key("", ("intermediate_size",)),
        ),
    ),
    Tower(
        id="glmasr_tower", **whole("GlmasrModel", types=("Glmasr",)), when="projector_type=glma", text="",
        tensors=(
            *whisper("audio_encoder.whisper.", *D_MODEL)[:-2],
            *norm("audio_encoder.layer_norm", "mm.a.norm_pre", "d_model", REQUIRED),
            *linear("audio_encoder.adapting.0", "mm.a.mlp.1", "2*hidden,merge_factor*d_model", REQUIRED),
            *linear("audio_encoder.adapting.2", "mm.a.mlp.2", "hidden,2*hidden", REQUIRED),
            TensorRow(
                ("audio_encoder.audio_bos_eos_token.weight",), ("v.boi", "v.eoi"), ("2,hidden",),
                gguf_dims=("hidden", "hidden"),
            ),
        ),
        f32=(".position_embd.",), f16=CONVOLUTIONS,
        keys=hears(
            *own_sizes("whisper_config"), projector("glma"), *keys_in("whisper_config", MEL, HEARING_EPS),
            Key("audio.projector.stack_factor", ("merge_factor",)), *keys_in("whisper_config", POSITIONS),
        ),
        config={"whisper_config.model_type": "whisper"},
    ),
    Tower(
        id="glm4v_vision",
        **whole(
            "Glm4vForConditionalGeneration", "Glm4vMoeForConditionalGeneration", "Glm46VForConditionalGeneration",
            types=("glm4v", "glm4v_moe", "glm46v"),
        ),
        when="projector_type=glm4v&!tensors=v.attn_q_norm.weight", text="model.language_model.", prefixes=_PREFIXES,
        tensors=_tensors(
            *norm(f"{_V}post_conv_layernorm", "v.norm_embd", TOWER_WIDTH),
            tensor(
                f"{_V}embeddings.position_embedding.weight", "v.position_embd.weight",
                f"image_size/patch_size*image_size/patch_size,{TOWER_WIDTH}",
            ),
            ffn="hidden", inner="intermediate_size", bias=False, qk_norm=False, qkv_bias=_BIAS,
        ),
        keys=sees(*_SIZES, *IMAGE, projector("glm4v"), _HIDDEN_ACT, _EPS, _MERGE, Key("", (_BIAS,), "bool")),
    ),
    Tower(
        id="glm_ocr_vision", **whole("GlmOcrForConditionalGeneration", types=("glm_ocr",)),
        when="projector_type=glm4v&tensors=v.attn_q_norm.weight", text="model.language_model.", prefixes=_PREFIXES,
        tensors=_tensors(ffn="intermediate_size", inner="3*hidden", bias=True, qk_norm=True, qkv_bias=_BIAS),
        keys=sees(*_SIZES, *IMAGE, projector("glm4v"), _HIDDEN_ACT, _EPS, _MERGE, Key("", (_BIAS,), "bool")),
    ),
    Tower(
        id="glm5_next_vision", **whole("Glm5NextForConditionalGeneration", types=("glm5_next",)),
        when="projector_type=glm5v", text="model.language_model.", prefixes=_PREFIXES,
        tensors=_tensors(
            ffn="intermediate_size", inner="projection_intermediate_size", bias=True, qk_norm=True, qkv_bias=_BIAS,
        ),
        keys=sees(
            *_SIZES, *IMAGE, projector("glm5v"), _HIDDEN_ACT, _EPS, Key(f"vision.{_SIDE}", (f"vision_config.{_SIDE}",)),
            Key("vision.swiglu_clamp", ("vision_config.swiglu_limit",), "f32", converter=if_given),
            preprocessor("vision.image_min_pixels", "min_image_tokens", converter=tokens_as_pixels),
            preprocessor("vision.image_max_pixels", "max_image_tokens", converter=tokens_as_pixels),
            Key("", ("preprocessor_config.patch_size",)), Key("", ("preprocessor_config.merge_size",)),
            Key("", ("vision_config.projection_intermediate_size",)), Key("", (_BIAS,), "bool"),
        ),
    ),
)
