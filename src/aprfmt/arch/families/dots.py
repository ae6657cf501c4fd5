"""dots.llm1, dots.note, dots.ocr."""

from __future__ import annotations

import math
from dataclasses import replace

from aprfmt.arch.blocks.decoder import (
    DIMS, NO_WINDOW, attention, gated_mlp, hf_names, linear, must_be, norm, split, tensor,
)
from aprfmt.arch.blocks.hearing import convolutions_2d
from aprfmt.arch.blocks.mla import INDEXER, indexer, mla_keys
from aprfmt.arch.blocks.moe import (
    DENSE_LAYERS, EQUAL_HEADS, GROUPS, MLP_LAYER_TYPES, MTP, NO_BIAS, SHARED_COUNT, SIGMOID, WEIGHTS_NORM,
    WEIGHTS_SCALE, WIDTH, draft_layer, moe_decoder, moe_keys, router_and_experts, selection_bias, shared_expert,
)
from aprfmt.arch.blocks.tower import (
    IMAGE, USE_SILU, epsilon, hears, layers, norms, patches, projector, sees, sizes, whole,
)
from aprfmt.arch.converter import DEFAULT, Converter, Scope, default, nothing
from aprfmt.arch.converters.common import computed
from aprfmt.arch.converters.layers import plain_kinds
from aprfmt.arch.converters.windows import step_heads, windowed_heads
from aprfmt.arch.fields import as_int
from aprfmt.arch.grammar import layer_kinds
from aprfmt.arch.row import OPTIONAL, REQUIRED, Architecture, Difference, Key, TensorRow, Tower
from aprfmt.errors import RefusedError


text_width = Converter(nothing, lambda value, scope: scope.h.hidden_size or DEFAULT)


def _indexed_from_gguf(value: object, scope: Scope) -> object:
    if not isinstance(value, list):
        return DEFAULT
    return ["sliding_attention" if flag else "full_attention" for flag in value]


def _without_window_to_gguf(value: object, scope: Scope) -> list[bool] | None:
    kinds = layer_kinds(scope.h.extra)
    return None if kinds is None else [kind != "sliding_attention" for kind in kinds]


def _latent_scales(scope: Scope, applied: object) -> object:
    """Scales of the latent vectors after their norms, which a GGUF has folded into the norms' weights."""
    ranks = {"q_lora_scale": "q_lora_rank", "kv_lora_scale": "kv_lora_rank", "swa_kv_lora_scale": "swa_kv_lora_rank"}
    hidden, extra = scope.h.hidden_size or 0, scope.h.extra
    for name, key in ranks.items():
        rank = as_int(extra.get(key), key)
        extra[name] = math.sqrt(hidden / rank) if applied and hidden and rank else 1.0
    return bool(applied)


def _swa_nope_from_gguf(value: object, scope: Scope) -> object:
    length, rotated = as_int(value, scope.key.gguf), as_int(scope.gguf("rope.dimension_count"), "rope.dimension_count")
    return DEFAULT if length is None or rotated is None or rotated > length else length - rotated


indexed_layers = Converter(
    lambda value, scope: [kind == "sliding_attention" for kind in value] if isinstance(value, list) else None,
    _indexed_from_gguf, normalize=plain_kinds,
)
latent_scales = Converter(
    nothing, lambda value, scope: _latent_scales(scope, True),
    normalize=lambda value, scope: _latent_scales(scope, value),
)
swa_key_length = computed("swa_qk_nope_head_dim+qk_rope_head_dim", _swa_nope_from_gguf)
_WINDOW, _INDEXED = "sliding_attention|draft", "!sliding_attention&!draft"
_ROTATED = "qk_rope_head_dim"


def _two_geometries() -> tuple[TensorRow, ...]:
    """Latent attention with one size in sliding-window layers, another in layers with an indexer; a gate per head."""
    rows: list[TensorRow] = []
    for kind, pre, heads in ((_INDEXED, "", "heads"), (_WINDOW, "swa_", "swa_num_attention_heads")):
        latent, nope, value = f"{pre}kv_lora_rank", f"{pre}qk_nope_head_dim", f"{pre}v_head_dim"
        rows += [
            tensor(
                "self_attn.kv_a_layernorm.weight", "attn_kv_a_norm.weight", latent, layers=kind,
                scale=(f":{pre}kv_lora_scale",),
            ),
            *linear("self_attn.q_b_proj", "attn_q_b", f"{heads}*{nope}+{heads}*{_ROTATED},q_lora_rank", layers=kind),
            *linear("self_attn.kv_a_proj_with_mqa", "attn_kv_a_mqa", f"{latent}+{_ROTATED},hidden", layers=kind),
            split(
                "self_attn.kv_b_proj.weight", f"{heads}*{nope}+{heads}*{value},{latent}",
                {"attn_k_b.weight": f"{heads},{latent},{nope}", "attn_v_b.weight": f"{heads},{value},{latent}"},
                order=(f"deal:{heads},{nope},{value}",), gguf_transposed=(True, False), layers=kind,
            ),
            *linear("self_attn.o_proj", "attn_output", f"hidden,{heads}*{value}", layers=kind),
            *linear("self_attn.g_proj", "attn_gate", f"{heads},hidden", layers=kind),
        ]
    return (
        *linear("self_attn.q_a_proj", "attn_q_a", "q_lora_rank,hidden"),
        tensor("self_attn.q_a_layernorm.weight", "attn_q_a_norm.weight", "q_lora_rank", scale=(":q_lora_scale",)),
        *norm("self_attn.k_rope_only_layernorm", "attn_k_norm", _ROTATED), *rows, *indexer(_INDEXED),
    )


_HALVES = Difference(
    "llama.cpp's dots3note applies NEOX-style RoPE to the indexer, transformers interleaved RoPE: texts longer than "
    "index_topk select other positions", beyond="index_topk",
)
"""No row order fixes this: engines know two, told apart by an index's `indexer_rope_layout`."""
_DOTS3_LISTS = {"num_heads": replace(DIMS[4], kind="i32[]", converter=step_heads, draft="swa_num_attention_heads")}


def _counts_to_gguf(value: object, scope: Scope) -> object:
    """Numbers of experts per layer; a config says -1 for layers without."""
    if not isinstance(value, list) or not all(type(count) is int for count in value):
        raise RefusedError(f"{scope.name} is {value!r:.40}, not a list of expert counts")
    return [max(0, count) for count in value]


counts = Converter(_counts_to_gguf)
_NOTE_V = "vision_encoder."
_A = "audio_encoder.dots_encoder.speech_encoder."
_WHISPER = "audio_config.whisper_config"
_EXPERTS = "vision_config.pyramid_num_routed"
_MERGED = "spatial_merge_size*spatial_merge_size*embed_dim"


def _of_image(gguf: str, name: str, kind: str = "u32") -> Key:
    """A key of the preprocessor, which has image settings in an object of their own."""
    return Key(gguf, (f"preprocessor_config.vision_config.{name}", f"preprocessor_config.{name}"), kind)


def _gate_and_up(end: str, dims: str) -> TensorRow:
    """Gate over up in a checkpoint."""
    return TensorRow((f"fc1.{end}",), (f"ffn_gate.{end}", f"ffn_up.{end}"), (f"2*{dims}",), gguf_dims=(dims, dims))


_V = "vision_tower."

ROWS: tuple[Architecture, ...] = (
    Architecture(
        id="dots1", gguf="dots1", **hf_names("Dots1", "dots1"),
        tensors=moe_decoder(
            *attention("attention_bias", "attention_bias", qk_norm="head_dim"),
            *router_and_experts("moe", (selection_bias(),)),
            *shared_expert("mlp.shared_experts", "n_shared_experts*moe_ffn", layers="moe"), *gated_mlp(layers="dense"),
        ),
        keys=moe_keys(
            *GROUPS, WIDTH, DENSE_LAYERS, SHARED_COUNT, WEIGHTS_SCALE, WEIGHTS_NORM, replace(SIGMOID, needed=REQUIRED),
            NO_BIAS, EQUAL_HEADS, Key("", ("sliding_window",)), Key("", ("max_window_layers",)),
            Key("", ("layer_types",), "str[]"), count="n_routed_experts",
        ),
        differs=(NO_WINDOW,),
    ),
    Architecture(
        id="dots3_note", gguf="dots3note",
        **hf_names("Dots3Note", "dots3_note", "Dots3NoteText", also=("dots3_note_text",)), rope_type=0,
        nested_rope=True,
        tensors=moe_decoder(
            *_two_geometries(), *router_and_experts("moe&!draft", (selection_bias("moe&!draft"),)),
            *shared_expert("mlp.shared_experts", "n_shared_experts*moe_ffn", layers="moe&!draft"),
            *gated_mlp(layers="dense|draft"), *draft_layer(),
        ),
        drafts=(("model.mtp.embed_tokens.", "model.layers.{n}.embed_tokens."),),
        keys=(
            *(_DOTS3_LISTS.get(key.field, key) for key in mla_keys()), *INDEXER,
            Key("attention.indexer.types", kind="bool[]", converter=Converter(_without_window_to_gguf, default)),
            Key("attention.sliding_window", ("sliding_window_size", "sliding_window")),
            Key("attention.sliding_window_pattern", ("layer_types",), "bool[]", converter=indexed_layers),
            Key("", ("swa_num_attention_heads",), converter=windowed_heads),
            Key("attention.kv_lora_rank_swa", ("swa_kv_lora_rank",)),
            Key("attention.key_length_swa", converter=computed("swa_kv_lora_rank+qk_rope_head_dim")),
            Key("attention.value_length_swa", converter=computed("swa_kv_lora_rank")),
            Key("attention.key_length_mla_swa", ("swa_qk_nope_head_dim",), converter=swa_key_length),
            Key("attention.value_length_mla_swa", ("swa_v_head_dim",)),
            Key("", ("apply_mla_qkv_lora_rescale",), "bool", converter=latent_scales), must_be("use_dsa", True),
            must_be("k_rope_only_layernorm", True), must_be("n_group", 1), must_be("attention_gate_type", "headwise"),
            must_be("swa_attention_gate_type", "headwise"), MLP_LAYER_TYPES, MTP,
        ),
        differs=(_HALVES,),
    ),
)

TOWERS: tuple[Tower, ...] = (
    Tower(
        id="dots_ocr_vision", **whole("DotsOCRForCausalLM", types=("dots_ocr",)), when="projector_type=dots_ocr",
        text="",
        tensors=(
            *patches(f"{_V}patch_embed.patchifier.proj", width="embed_dim"),
            *norm(f"{_V}patch_embed.patchifier.norm", "v.pre_ln", "embed_dim"),
            *layers(
                *norms("norm1", "norm2", bias=False, width="embed_dim"),
                *linear("attn.qkv", "attn_qkv", "3*embed_dim,embed_dim", OPTIONAL),
                *linear("attn.proj", "attn_out", "embed_dim,embed_dim", OPTIONAL),
                *linear("mlp.fc1", "ffn_gate", "intermediate_size,embed_dim", OPTIONAL),
                *linear("mlp.fc3", "ffn_up", "intermediate_size,embed_dim", OPTIONAL),
                *linear("mlp.fc2", "ffn_down", "embed_dim,intermediate_size", OPTIONAL), hf=f"{_V}blocks.{{n}}.",
            ),
            *norm(f"{_V}post_trunk_norm", "mm.post_norm", "embed_dim"),
            *norm(f"{_V}merger.ln_q", "mm.input_norm", "embed_dim", REQUIRED),
            *linear(f"{_V}merger.mlp.0", "mm.0", "4*embed_dim,4*embed_dim", REQUIRED),
            *linear(f"{_V}merger.mlp.2", "mm.2", "hidden,4*embed_dim", REQUIRED),
        ),
        keys=sees(
            *sizes(image_size="", embedding_length=("embed_dim", "hidden_size")), Key("vision.image_size", constant=0),
            Key("", ("vision_config.hidden_size",), converter=text_width), *IMAGE, projector("dots_ocr"),
            Key("vision.image_min_pixels", ("preprocessor_config.min_pixels",)),
            Key("vision.image_max_pixels", ("preprocessor_config.max_pixels",)),
            epsilon("vision", "vision_config.rms_norm_eps"),
            Key("vision.projector.scale_factor", ("vision_config.spatial_merge_size",)), USE_SILU,
        ),
        config={"vision_config.model_type": "dots_vit", "vision_config.post_norm": True},
    ),
    Tower(
        id="dots3_note_towers",
        **whole("Dots3NoteForConditionalGeneration", "Dots3NoteForCausalLM", types=("dots3_note",)),
        when="vision.projector_type=dots3note_v", text="",
        prefixes=((f"model.{_NOTE_V}", _NOTE_V), ("model.audio_encoder.", "audio_encoder.")),
        tensors=(
            *patches(f"{_NOTE_V}patch_embed.proj", width="embed_dim"),
            *norm(f"{_NOTE_V}patch_embed.norm", "v.pre_ln", "embed_dim"),
            *layers(
                *norms("norm_1", "norm_2", bias=False, width="embed_dim"),
                *linear("attn.qkv", "attn_qkv", "3*embed_dim,embed_dim"),
                *norm("attn.q_norm", "attn_q_norm", "embed_dim/num_attention_heads"),
                *norm("attn.k_norm", "attn_k_norm", "embed_dim/num_attention_heads"),
                *linear("attn.proj", "attn_out", "embed_dim,embed_dim"),
                *(
                    tensor(f"mlp.{hf}.weight", f"ffn_{name}.weight", dims, layers="!pyramid")
                    for hf, name, dims in (
                        ("fc1", "gate", "intermediate_size,embed_dim"), ("fc3", "up", "intermediate_size,embed_dim"),
                        ("fc2", "down", "embed_dim,intermediate_size"),
                    )
                ),
                tensor("mlp.gate_weight", "ffn_gate_inp.weight", f"{_EXPERTS},embed_dim", layers="pyramid"),
                tensor("mlp.router_bias", "exp_probs_b.weight", _EXPERTS, layers="pyramid"),
                *(
                    TensorRow(
                        (f"mlp.experts.{{e}}.{hf}.weight",), (f"ffn_{name}_exps.weight",), (dims,), layers="pyramid",
                        count=_EXPERTS,
                    )
                    for hf, name, dims in (
                        ("fc1", "gate", "moe_intermediate_size,embed_dim"),
                        ("fc3", "up", "moe_intermediate_size,embed_dim"),
                        ("fc2", "down", "embed_dim,moe_intermediate_size"),
                    )
                ),
                hf=f"{_NOTE_V}blocks.{{n}}.",
            ),
            *norm(f"{_NOTE_V}post_trunk_norm", "mm.post_norm", "embed_dim"),
            *norm(f"{_NOTE_V}adapter.ln_q", "mm.input_norm", "embed_dim", REQUIRED),
            *linear(f"{_NOTE_V}adapter.mlp.0", "mm.0", f"{_MERGED},{_MERGED}", REQUIRED),
            *linear(f"{_NOTE_V}adapter.mlp.2", "mm.2", f"hidden,{_MERGED}", REQUIRED), *convolutions_2d(_A),
            *linear(f"{_A}conv_out", "a.conv_out", "d_model,num_mel_bins/8*downsample_hidden_size"),
            *layers(
                *norms("self_attn_layer_norm", "final_layer_norm", bias=False, width="d_model"),
                *linear("self_attn.q_proj", "attn_q", "d_model,d_model", REQUIRED),
                *linear("self_attn.k_proj", "attn_k", "d_model,d_model"),
                *linear("self_attn.v_proj", "attn_v", "d_model,d_model", REQUIRED),
                *linear("self_attn.out_proj", "attn_out", "d_model,d_model", REQUIRED),
                _gate_and_up("weight", "encoder_ffn_dim,d_model"), _gate_and_up("bias", "encoder_ffn_dim"),
                *linear("fc2", "ffn_down", "d_model,encoder_ffn_dim", REQUIRED), hf=f"{_A}layers.{{n}}.",
                gguf="a.blk.{n}.", depth="encoder_layers",
            ),
            *norm(f"{_A}layer_norm", "a.post_ln", "d_model"),
            *norm("audio_encoder.audio_adapter.proj.0", "mm.a.norm_pre", "d_model", REQUIRED),
            *linear("audio_encoder.audio_adapter.proj.1", "mm.a.mlp.1", "hidden,d_model", REQUIRED),
            *linear("audio_encoder.audio_adapter.proj.3", "mm.a.mlp.3", "hidden,hidden", REQUIRED),
        ),
        f32=(".ffn_gate_inp.", ".exp_probs_b.", ".conv2d.", "a.conv_out."),
        keys=(
            *sees(
                *sizes(image_size="", embedding_length="embed_dim", head_count=("num_attention_heads", "num_heads")),
                Key("vision.image_size", constant=0), Key("", ("vision_config.hidden_size",), converter=text_width),
                _of_image("vision.image_mean", "image_mean", "f32[]"),
                _of_image("vision.image_std", "image_std", "f32[]"), projector("dots3note_v", part="vision"), USE_SILU,
                epsilon("vision", "vision_config.rms_norm_eps"),
                Key("vision.spatial_merge_size", ("vision_config.spatial_merge_size",)),
                _of_image("vision.image_min_pixels", "min_pixels"), _of_image("vision.image_max_pixels", "max_pixels"),
                Key("vision.expert_count_per_layer", (_EXPERTS,), "i32[]", converter=counts),
                Key("vision.expert_used_count", ("vision_config.capacity_factor",)),
                Key("", ("vision_config.moe_intermediate_size",)),
                must_be("vision_config.adapter_type", "patch_merger"), must_be("vision_config.pre_pixel_shuffle", True),
                must_be("vision_config.use_qk_norm", True), must_be("vision_config.router_scoring_func", "sigmoid"),
                must_be("vision_config.router_scale", 1.0),
            ),
            *hears(
                Key("audio.embedding_length", (f"{_WHISPER}.d_model",)),
                Key("audio.feed_forward_length", (f"{_WHISPER}.encoder_ffn_dim",)),
                Key("audio.block_count", (f"{_WHISPER}.encoder_layers",)),
                Key("audio.attention.head_count", (f"{_WHISPER}.encoder_attention_heads",)),
                projector("dots3note_a", part="audio"), Key("audio.num_mel_bins", (f"{_WHISPER}.num_mel_bins",)),
                Key("audio.attention.layer_norm_epsilon", kind="f32", constant=1e-6),
                Key("", ("audio_config.downsample_hidden_size",)), must_be(f"{_WHISPER}.activation_function", "swiglu"),
                must_be("audio_config.use_conv2d_stem", True), must_be("audio_config.use_rope", True),
                must_be("audio_config.use_rms_norm", True), must_be("audio_config.merge_factor", 1),
                must_be("audio_config.chunk_seconds", 60),
                must_be("audio_config.rope_parameters.partial_rotary_factor", 0.5),
                must_be("audio_config.rope_parameters.rope_theta", 10000.0),
            ),
        ),
        config={"vision_config.temporal_patch_size": 1, "vision_config.use_bias": False},
    ),
)
