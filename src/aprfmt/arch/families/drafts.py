"""Draft models that read hidden states of their target."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace

from aprfmt.arch import rope
from aprfmt.arch.blocks.decoder import (
    DECODER, DIMS, GROUPED, PAIRS, RMS_EPS, ROPE, ROPE_DIM, SILU, SLIDING_LAYERS, VOCAB, WINDOW, attention, block,
    gated_mlp, linear, must_be, needs, norm, tensor,
)
from aprfmt.arch.blocks.encoder import hf_only
from aprfmt.arch.converter import DEFAULT, ConfigKeys, Converter, Scope, default, nothing, refuse_if
from aprfmt.arch.converters.drafts import needed, next_layers
from aprfmt.arch.converters.layers import FULL, SLIDING
from aprfmt.arch.families import gemma4
from aprfmt.arch.fields import as_int
from aprfmt.arch.row import HAS_TENSORS, OPTIONAL, PLUS_ROW, REQUIRED, Architecture, Key, TensorRow


has_tensors = Converter(lambda value, scope: bool(value), lambda value, scope: bool(value), role=HAS_TENSORS)


def _eagle_layers(target: Mapping[str, object], scope: Scope) -> list[int] | None:
    """EAGLE-3's default target layers: an early, a middle and a late one."""
    n_layers = as_int(target.get("num_hidden_layers"), "num_hidden_layers of the target model")
    return [2, n_layers // 2, n_layers - 3] if n_layers is not None else None


def _sections(target: Mapping[str, object], scope: Scope) -> list[int] | None:
    """Text positions only, for the draft of a model with several position types."""
    ropes = target.get("rope_parameters") or target.get("rope_scaling")
    if not isinstance(ropes, Mapping) or "mrope_section" not in ropes or scope.h.head_dim is None:
        return None
    return [scope.h.head_dim // 2, 0, 0, 0]


def _dflash_window(value: object, scope: Scope) -> object:
    """A window of all layers, which some configs have besides per-layer ones."""
    if not value:
        return DEFAULT
    window = scope.h.extra.get("dflash_config.swa_window_size") or scope.config("sliding_window")
    layers = [SLIDING] * (scope.h.num_layers or 0)
    return ConfigKeys({"sliding_window": window, "use_sliding_window": True, "layer_types": layers})


def _partial_rotary(value: object, scope: Scope) -> object:
    """Written only if a part of a head is rotated."""
    return rope.rotary_dim(scope.h) if scope.h.extra.get("partial_rotary_factor") is not None else None


def _partial_rotary_from_gguf(value: object, scope: Scope) -> object:
    if value is not None:
        rope.set_rotary_dim(scope.h, as_int(value, scope.key.gguf), scope.defaults)
    return DEFAULT


def _anchor(value: object, scope: Scope) -> object:
    """Whether the first token of a block is drafted: not if the speculators library wrote the config."""
    if value is not None:
        return DEFAULT
    return not (scope.h.hf_architecture == "DSparkSpeculator" or "aux_hidden_state_layer_ids" in scope.h.extra)


eagle_layers = Converter(needed, from_target=_eagle_layers)
target_width = Converter(needed, from_target=lambda target, scope: target.get("hidden_size"))
anchor = Converter(normalize=_anchor)
draft_vocabulary = Converter(
    nothing, lambda value, scope: None, lambda scope: scope.h.vocab_size if "d2t" not in scope.names else None,
)
global_head = Converter(gemma4.head_sizes())
all_full = Converter(
    refuse_if(
        lambda value, scope: isinstance(value, list) and bool(set(map(str, value)) - {FULL}),
        "{name}: llama.cpp's Gemma 4 draft model supports full-attention layers only",
    ),
    derive=lambda scope: [FULL] * (scope.h.num_layers or 0),
)
root_of_width = Converter(lambda value, scope: math.sqrt(scope.h.hidden_size) if scope.h.hidden_size else None, default)
layer_count = Converter(lambda value, scope: scope.h.num_layers, lambda value, scope: DEFAULT)
target_sections = Converter(from_target=_sections)
_OWN_VOCABULARY = (
    TensorRow(("d2t",), ("d2t",), ("draft_vocab_size",), OPTIONAL, value=PLUS_ROW),
    TensorRow(("t2d",), (), ("vocab",), OPTIONAL),
)
"""For a draft with fewer tokens: the offset of each id to the target's, and the list of ids."""


def _convolutions() -> tuple[TensorRow, ...]:
    """DFlash 2: the convolutions before attention and before the MLP."""
    need, rows = "dflash_config.conv_kernel_size", list[TensorRow]()
    for own, name in (("attention_conv", "attn_conv"), ("mlp_conv", "ffn_conv")):
        rows.append(tensor(f"{own}.base_kernel", f"{name}_base", "2,conv_kernel_size,hidden", need))
        width = "2*conv_kernel_size*hidden/conv_group_size"
        rows += linear(f"{own}.kernel_projection", f"{name}_proj", f"{width},hidden", need=need)
    return tuple(rows)


_LAYER = (
    *norm("input_layernorm", "attn_norm"), *attention(qk_norm="head_dim"),
    tensor("self_attn.sinks", "attn_sinks.weight", "heads", OPTIONAL), *norm("post_attention_layernorm", "ffn_norm"),
    *gated_mlp(), *_convolutions(),
)
_GEMMA4_LAYER = (
    *norm("input_layernorm", "attn_norm"), *(row for row in attention(qk_norm="head_dim") if "v_proj" not in row.hf[0]),
    *norm("post_attention_layernorm", "post_attention_norm"), *norm("pre_feedforward_layernorm", "ffn_norm"),
    *gated_mlp(), *norm("post_feedforward_layernorm", "post_ffw_norm"),
    tensor("layer_scalar", "layer_output_scale.weight", "1"),
)
_RANK, _CODEBOOK = "dflash_config.selector_rank", "vocab,selector_rank"
_SELECTOR = (
    tensor("candidate_selector.predecessor_codebook", "selector_predecessor.weight", _CODEBOOK, _RANK),
    tensor("candidate_selector.successor_codebook", "selector_successor.weight", _CODEBOOK, _RANK),
    *linear("candidate_selector.hidden_projection", "selector_hidden", "selector_rank,hidden", need=_RANK),
)
"""DFlash 2: selects among the candidates of a block."""


def _dflash(
    *more: TensorRow, vocabulary: str = "vocab", layer: tuple[TensorRow, ...] = _LAYER
) -> tuple[TensorRow, ...]:
    """A small decoder that reads hidden states of the target's layers; it may have the target's embedding and head."""
    return (
        tensor("embed_tokens.weight", "token_embd.weight", "vocab,hidden", OPTIONAL),
        *linear("fc", "fc", "hidden,target_layer_ids*hidden"), *norm("hidden_norm", "enc.output_norm"),
        *block(*layer, hf="layers.{n}."), *norm("norm", "output_norm"),
        *linear("lm_head", "output", f"{vocabulary},hidden", need=OPTIONAL), *more,
    )


def _of_dflash(name: str, kind: str = "u32", *more: str) -> Key:
    return Key(name, (f"dflash_config.{name}", *more), kind)


_BLOCKS_AND_LAYERS = (
    Key("block_size", ("dflash_config.block_size", "block_size")),
    Key("target_layers", ("dflash_config.target_layer_ids", "target_layer_ids"), "i32[]", converter=next_layers,
        needed=REQUIRED),
    Key("tokenizer.ggml.mask_token_id", ("dflash_config.mask_token_id", "mask_token_id")),
)
_DFLASH_KEYS = (
    *DECODER, Key("rope.dimension_count", converter=Converter(_partial_rotary, _partial_rotary_from_gguf)),
    Key("rope.dimension_sections", ("target_rope_sections",), "i32[]", converter=target_sections), WINDOW,
    SLIDING_LAYERS, Key("", ("dflash_config.use_swa",), "bool", converter=Converter(nothing, normalize=_dflash_window)),
    Key("", ("dflash_config.swa_window_size",)),
    Key("attention.value_scale", ("dflash_config.attention_value_scale",), "f32"),
    Key("attention.causal", ("is_causal", "dflash_config.causal"), "bool"),
    *map(_of_dflash, ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")),
    Key("logit_scale", ("output_multiplier", "dflash_config.output_multiplier"), "f32"),
    Key("final_logit_softcapping", ("final_logit_softcapping", "dflash_config.final_logit_softcapping"), "f32"),
    Key("embedding_scale", ("input_embedding_scale", "dflash_config.input_embedding_scale"), "f32"),
    *_BLOCKS_AND_LAYERS, must_be("attention_bias", False), SILU,
)
_MARKOV_KEYS = (
    Key("sample_from_anchor", ("sample_from_anchor",), "bool", converter=anchor),
    Key("has_confidence_head", ("has_confidence_head",), "bool", converter=has_tensors),
    Key("", ("draft_vocab_size",), converter=draft_vocabulary), Key("", ("markov_rank",)),
    must_be("markov_head_type", "vanilla"),
)
_MARKOV = (
    *linear("markov_head.markov_w1", "markov_w1", "vocab,markov_rank"),
    *linear("markov_head.markov_w2", "markov_w2", "draft_vocab_size,markov_rank"),
    *linear("confidence_head.proj", "conf_proj", "1,hidden+markov_rank", "has_confidence_head", "has_confidence_head"),
)
_GEMMA4 = next(row for row in gemma4.ROWS if row.id == "gemma4_text")
_AS_IT_IS = {"attention.shared_kv_layers", "final_logit_softcapping"}
"""Keys of Gemma 4 whose absence means the same to llama.cpp's assistant as to transformers': all of them, no cap."""
_NOT_OF_ASSISTANTS = re.compile(r"attn_[kv]|_exps|_norm_[12]|ffn_gate_inp|per_layer|inp_gate|proj\.|post_norm")

ROWS: tuple[Architecture, ...] = (
    Architecture(
        id="eagle3", gguf="eagle3", hf_class="LlamaForCausalLMEagle3", model_type="llama",
        hf_classes=("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel"),
        other_names=("Eagle3Speculator",), model_types=(), rope_type=0,
        prefixes=(("layers.0.", "midlayer."), ("model.layers.0.", "midlayer."), ("model.", "")),
        tensors=(
            tensor("embed_tokens.weight", "token_embd.weight", "vocab,hidden", OPTIONAL),
            *linear("fc", "fc", "hidden,3*target_hidden_size"),
            *norm("input_norm", "enc.output_norm", "3*target_hidden_size", need="norm_before_fc"),
            *block(
                *norm("input_layernorm", "attn_norm"), *norm("hidden_norm", "attn_norm_2"),
                *linear("self_attn.q_proj", "attn_q", "q,2*hidden", order=PAIRS["q"]),
                *linear("self_attn.k_proj", "attn_k", "kv,2*hidden", order=PAIRS["kv"]),
                *linear("self_attn.v_proj", "attn_v", "kv,2*hidden"),
                *linear("self_attn.o_proj", "attn_output", "hidden,q"), *norm("post_attention_layernorm", "ffn_norm"),
                *gated_mlp(), hf="midlayer.", gguf="blk.0.",
            ),
            *norm("norm", "output_norm"), *linear("lm_head", "output", "draft_vocab_size,hidden"), *_OWN_VOCABULARY,
        ),
        keys=(
            *DECODER, VOCAB, ROPE_DIM,
            Key("target_layers", ("eagle_aux_hidden_state_layer_ids",), "i32[]", converter=eagle_layers,
                needed=REQUIRED),
            Key("target_hidden_size", ("target_hidden_size",), converter=target_width),
            Key("norm_before_residual", ("norm_before_residual",), "bool"),
            Key("norm_before_fc", ("norm_before_fc",), "bool"), Key("", ("draft_vocab_size",)),
            Key("", ("attention_bias",), "bool", constant=False), SILU,
        ),
    ),
    Architecture(
        id="dflash", gguf="dflash", hf_class="DFlashDraftModel", model_type="qwen3",
        hf_classes=("DFlashDraftModel", "DFlash2DraftModel", "MuseGlimmerAssistantModel"),
        other_names=("MuseGlimmerAssistantModel",), model_types=("muse_glimmer_assistant",),
        prefixes=(("model.", ""), ("encoder.fc.", "fc."), ("encoder.output_norm_enc.", "hidden_norm.")),
        tensors=_dflash(*_SELECTOR), keys=_DFLASH_KEYS,
    ),
    Architecture(
        id="gemma4_dspark", gguf="dflash", when="tensors=layer_output_scale.weight", hf_class="Gemma4DSparkModel",
        model_type="gemma4_dspark", hf_classes=("Gemma4DSparkModel",), model_types=(),
        prefixes=(("model.", ""), ("confidence_proj.", "confidence_head.proj.")),
        tensors=_dflash(*_MARKOV, layer=_GEMMA4_LAYER),
        keys=(
            *DIMS, replace(GROUPED, hf=("num_global_key_value_heads",)), ROPE, RMS_EPS,
            Key("attention.key_length", ("global_head_dim",), field="head_dim", converter=global_head),
            *_BLOCKS_AND_LAYERS, *_MARKOV_KEYS, Key("", ("layer_types",), "str[]", converter=all_full),
            Key("embedding_scale", kind="f32", converter=root_of_width),
            Key("attention.scale", kind="f32", constant=1.0),
            Key("hidden_activation", ("hidden_activation",), "str", constant="gelu_pytorch_tanh"),
            must_be("attention_k_eq_v", True), must_be("attention_bias", False), must_be("enable_moe_block", False),
        ),
    ),
    Architecture(
        id="dspark", gguf="dflash", when="tensors=markov_w1.weight", hf_class="DSparkDraftModel", model_type="qwen3",
        hf_classes=(
            "DSparkDraftModel", "DSparkSpeculator", "Qwen3DSparkModel", "Lfm2DSparkDraftModel", "LingDSparkModel",
        ),
        model_types=(), prefixes=(("model.", ""),),
        tensors=_dflash(*_SELECTOR, *_MARKOV, *_OWN_VOCABULARY, vocabulary="draft_vocab_size"),
        keys=(
            *_DFLASH_KEYS, Key("", ("aux_hidden_state_layer_ids",), "i32[]"), *_MARKOV_KEYS,
            must_be("rope_is_neox_style", True),
        ),
    ),
    replace(
        _GEMMA4, id="gemma4_assistant", gguf="gemma4-assistant", hf_class="Gemma4AssistantForCausalLM",
        model_type="gemma4_assistant", hf_classes=("Gemma4AssistantForCausalLM", "Gemma4UnifiedAssistantForCausalLM"),
        model_types=(), inside=("text_config", "gemma4_text"),
        tensors=(
            *linear("pre_projection", "nextn.pre_projection", "hidden,2*backbone_hidden_size"),
            *linear("post_projection", "nextn.post_projection", "backbone_hidden_size,hidden"),
            *(
                row
                for row in _GEMMA4.tensors
                if not _NOT_OF_ASSISTANTS.search(row.gguf[0]) and row.layers != "double_wide"
            ),
            *hf_only("num_centroids,hidden", "masked_embedding.centroids"),
            TensorRow(("masked_embedding.token_ordering",), (), ("vocab",), OPTIONAL),
        ),
        keys=(
            *(
                replace(key, converter=None) if key.gguf in _AS_IT_IS else key
                for key in _GEMMA4.keys
            ),
            Key("embedding_length_out", ("backbone_hidden_size",), needed=REQUIRED),
            Key("nextn_predict_layers", converter=layer_count), *needs("embedding_length_per_layer_input"),
            Key("", ("num_centroids",)),
        ),
    ),
)
