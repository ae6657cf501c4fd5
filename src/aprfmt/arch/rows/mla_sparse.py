"""Rows of the architecture table: latent attention to the positions that an indexer chooses."""

from __future__ import annotations

import math
from dataclasses import replace

from aprfmt.arch.converter import DEFAULT, Convert, Converter, Scope, default, nothing
from aprfmt.arch.converters.common import drafts, leading_dense
from aprfmt.arch.converters.sparse import indexers_from, indexers_normalize, indexers_to
from aprfmt.arch.converters.windows import step_heads, windowed_heads
from aprfmt.arch.fields import as_int
from aprfmt.arch.grammar import layer_kinds
from aprfmt.arch.row import Architecture, Difference, Key, TensorRow
from aprfmt.arch.rows.parts import DIMS, gated_mlp, hf_names, linear, must_be, norm, split, tensor
from aprfmt.arch.rows.parts_mla import INDEXER, MLA_REQUIRED, indexer, mla_decoder, mla_keys
from aprfmt.arch.rows.parts_moe import MTP, draft_layer, moe_decoder, router_and_experts, selection_bias, shared_expert


def _indexed_normalize(value: object, scope: Scope) -> object:
    """transformers says in a word of its own that an indexer chooses."""
    if not isinstance(value, list):
        return DEFAULT
    return ["full_attention" if kind == "indexed_attention" else kind for kind in value]


def _indexed_to(value: object, scope: Scope) -> list[bool] | None:
    return [kind == "sliding_attention" for kind in value] if isinstance(value, list) else None


def _indexed_from(value: object, scope: Scope) -> object:
    if not isinstance(value, list):
        return DEFAULT
    return ["sliding_attention" if flag else "full_attention" for flag in value]


def _without_window_to(value: object, scope: Scope) -> list[bool] | None:
    kinds = layer_kinds(scope.h.extra)
    return None if kinds is None else [kind != "sliding_attention" for kind in kinds]


def _latent_scales(scope: Scope, applied: object) -> object:
    """What the latent vectors are multiplied by behind their norms, which a GGUF has in the weights of these."""
    ranks = {"q_lora_scale": "q_lora_rank", "kv_lora_scale": "kv_lora_rank", "swa_kv_lora_scale": "swa_kv_lora_rank"}
    hidden, extra = scope.h.hidden_size or 0, scope.h.extra
    for name, key in ranks.items():
        rank = as_int(extra.get(key), key)
        extra[name] = math.sqrt(hidden / rank) if applied and hidden and rank else 1.0
    return bool(applied)


def _swa_sum(*names: str) -> Convert:
    def to_gguf(value: object, scope: Scope) -> int | None:
        numbers = [as_int(scope.h.extra.get(name), name) for name in names]
        return None if None in numbers else sum(n or 0 for n in numbers)

    return to_gguf


def _swa_nope_from(value: object, scope: Scope) -> object:
    length, rotated = as_int(value, scope.key.gguf), as_int(scope.gguf("rope.dimension_count"), "rope.dimension_count")
    return DEFAULT if length is None or rotated is None or rotated > length else length - rotated


indexed_layers = Converter(_indexed_to, _indexed_from, normalize=_indexed_normalize)
indexed_without_window = Converter(_without_window_to, default)
latent_scales = Converter(
        nothing,
        lambda value, scope: _latent_scales(scope, True),
        normalize=lambda value, scope: _latent_scales(scope, value),
    )
swa_key_width = Converter(_swa_sum("swa_kv_lora_rank", "qk_rope_head_dim"), default)
swa_value_width = Converter(_swa_sum("swa_kv_lora_rank"), default)
swa_key_length = Converter(_swa_sum("swa_qk_nope_head_dim", "qk_rope_head_dim"), _swa_nope_from)
glm_indexers = Converter(indexers_to, indexers_from, normalize=indexers_normalize)

_DRAFTS = Key("nextn_predict_layers", ("num_nextn_predict_layers",), converter=drafts)
_LAYERS = Key("", ("mlp_layer_types",), "str[]", converter=leading_dense)
_REQUIRED = {
    **MLA_REQUIRED, "attention.q_lora_rank": "", "attention.indexer.head_count": "", "attention.indexer.key_length": "",
    "attention.indexer.top_k": "",
}
_DEFAULTS = {
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "kv_lora_rank": 512, "q_lora_rank": 1536,
    "rms_norm_eps": 1e-6, "attention_bias": False, "tie_word_embeddings": False, "scoring_func": "sigmoid",
    "n_shared_experts": 1, "n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3, "routed_scaling_factor": 2.5, "norm_topk_prob": True, "index_topk": 2048,
    "index_head_dim": 128, "bos_token_id": 0, "eos_token_id": 1,
}

_WINDOW, _INDEXED = "sliding_attention|draft", "!sliding_attention&!draft"


def _two_geometries() -> tuple[TensorRow, ...]:
    """Latent attention of one size where there is a window, of another where an indexer chooses; a gate a head."""
    rows: list[TensorRow] = []
    for layers, pre, heads in ((_INDEXED, "", "heads"), (_WINDOW, "swa_", "swa_num_attention_heads")):
        latent, nope, value = f"{pre}kv_lora_rank", f"{pre}qk_nope_head_dim", f"{pre}v_head_dim"
        rows += [
            tensor(
                "self_attn.kv_a_layernorm.weight", "attn_kv_a_norm.weight", latent, layers=layers,
                scale=(f":{pre}kv_lora_scale",),
            ),
            *linear("self_attn.q_b_proj", "attn_q_b", f"{heads}*{nope}+{heads}*{_ROTATED},q_lora_rank", layers=layers),
            *linear("self_attn.kv_a_proj_with_mqa", "attn_kv_a_mqa", f"{latent}+{_ROTATED},hidden", layers=layers),
            split(
                "self_attn.kv_b_proj.weight", f"{heads}*{nope}+{heads}*{value},{latent}",
                {"attn_k_b.weight": f"{heads},{latent},{nope}", "attn_v_b.weight": f"{heads},{value},{latent}"},
                order=(f"deal:{heads},{nope},{value}",), gguf_transposed=(True, False), layers=layers,
            ),
            *linear("self_attn.o_proj", "attn_output", f"hidden,{heads}*{value}", layers=layers),
            *linear("self_attn.g_proj", "attn_gate", f"{heads},hidden", layers=layers),
        ]
    return (
        *linear("self_attn.q_a_proj", "attn_q_a", "q_lora_rank,hidden"),
        tensor("self_attn.q_a_layernorm.weight", "attn_q_a_norm.weight", "q_lora_rank", scale=(":q_lora_scale",)),
        *norm("self_attn.k_rope_only_layernorm", "attn_k_norm", _ROTATED), *rows, *indexer(_INDEXED),
    )


_ROTATED = "qk_rope_head_dim"
_HALVES = Difference(
    "llama.cpp's dots3note rotates the halves of an indexer's queries and keys, transformers neighbours: in texts that "
    "are longer than index_topk they choose other positions"
)
"""Not mended by another order of rows: serving programs know two, told by an index's `indexer_rope_layout`."""
_DOTS3_LISTS = {"num_heads": replace(DIMS[4], kind="i32[]", converter=step_heads, draft="swa_num_attention_heads")}


ROWS: tuple[Architecture, ...] = (
    Architecture(
        id="deepseek_v32", required={**_REQUIRED, "expert_gating_func": ""}, gguf="deepseek32",
        **hf_names("DeepseekV32", "deepseek_v32"), rope_type=0,
        tensors=mla_decoder((selection_bias(),), (*indexer(), *draft_layer())),
        keys=mla_keys(*INDEXER, _DRAFTS, _LAYERS), gguf_only=(),
        defaults={"": {
            **_DEFAULTS, "n_group": 8, "topk_group": 4, "num_key_value_heads": 128, "index_n_heads": 64,
            "max_position_embeddings": 163840,
        }},
    ),
    Architecture(
        id="glm_moe_dsa", required=_REQUIRED, gguf="glm-dsa", **hf_names("GlmMoeDsa", "glm_moe_dsa"), rope_type=0,
        tensors=mla_decoder((selection_bias(),), (*indexer("indexer"), *draft_layer())),
        keys=mla_keys(
            *INDEXER, Key("attention.indexer.types", ("indexer_types",), "bool[]", converter=glm_indexers), _DRAFTS,
            _LAYERS
        ),
        gguf_only=(),
        defaults={"": {
            **_DEFAULTS, "n_group": 1, "topk_group": 1, "num_key_value_heads": 64, "index_n_heads": 32,
            "qk_nope_head_dim": 192, "v_head_dim": 256, "q_lora_rank": 2048, "rms_norm_eps": 1e-5,
            "max_position_embeddings": 202752,
        }},
    ),
    Architecture(
        id="dots3_note", required={**_REQUIRED, "attention.sliding_window": "", "attention.kv_lora_rank_swa": ""},
        gguf="dots3note", **hf_names("Dots3Note", "dots3_note", "Dots3NoteText", also=("dots3_note_text",)),
        rope_type=0, nested_rope=True,
        tensors=moe_decoder(
            *_two_geometries(), *router_and_experts("moe&!draft", (selection_bias("moe&!draft"),)),
            *shared_expert("mlp.shared_experts", "n_shared_experts*moe_ffn", layers="moe&!draft"),
            *gated_mlp(layers="dense|draft"), *draft_layer(),
        ),
        drafts=(("model.mtp.embed_tokens.", "model.layers.{n}.embed_tokens."),),
        keys=(
            *(_DOTS3_LISTS.get(key.field, key) for key in mla_keys()), *INDEXER,
            Key("attention.indexer.types", kind="bool[]", converter=indexed_without_window),
            Key("attention.sliding_window", ("sliding_window_size", "sliding_window")),
            Key("attention.sliding_window_pattern", ("layer_types",), "bool[]", converter=indexed_layers),
            Key("", ("swa_num_attention_heads",), converter=windowed_heads),
            Key("attention.kv_lora_rank_swa", ("swa_kv_lora_rank",)),
            Key("attention.key_length_swa", converter=swa_key_width),
            Key("attention.value_length_swa", converter=swa_value_width),
            Key("attention.key_length_mla_swa", ("swa_qk_nope_head_dim",), converter=swa_key_length),
            Key("attention.value_length_mla_swa", ("swa_v_head_dim",)),
            Key("", ("apply_mla_qkv_lora_rescale",), "bool", converter=latent_scales), must_be("use_dsa", True),
            must_be("k_rope_only_layernorm", True), must_be("n_group", 1), must_be("attention_gate_type", "headwise"),
            must_be("swa_attention_gate_type", "headwise"), _LAYERS, MTP,
        ),
        differs=(_HALVES,), gguf_only=(),
        defaults={"": {
            **_DEFAULTS, "q_lora_rank": 1024, "num_key_value_heads": 128, "rms_norm_eps": 1e-5,
            "moe_intermediate_size": 1536, "first_k_dense_replace": 1, "routed_scaling_factor": 1.0,
            "index_n_heads": 64, "n_group": 1, "topk_group": 1, "rope_theta": 80000000.0, "swa_rope_theta": 50000.0,
            "max_position_embeddings": 524288, "swa_kv_lora_rank": 1024, "swa_qk_nope_head_dim": 192,
            "swa_v_head_dim": 128, "swa_num_attention_heads": 64, "sliding_window_size": 512, "bos_token_id": 151643,
            "eos_token_id": 151668,
        }},
    ),
)
