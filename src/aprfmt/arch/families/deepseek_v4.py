"""DeepSeek V4: compressed attention over residual streams."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from aprfmt.arch.blocks.decoder import (
    DIMS, GROUPED, HEAD_DIM, RMS_EPS, ROPE, SILU, block, embedding, experts, final_norm, head, hf_names, linear,
    must_be, needs, norm, optional, rename, tensor,
)
from aprfmt.arch.blocks.mla import INDEXER
from aprfmt.arch.blocks.moe import COUNT, MTP, SHARED_COUNT, USED, WEIGHTS_SCALE, WIDTH, draft_layer, packed_experts
from aprfmt.arch.blocks.streams import HC_COUNT, HC_EPS, HC_ITERATIONS, last_stream, streams
from aprfmt.arch.blocks.tower import IMAGE, USE_SILU, layers, norms, projector, sees, whole
from aprfmt.arch.converter import DEFAULT, Converter, Scope, default, nothing, refuse_if
from aprfmt.arch.converters.common import computed, gating
from aprfmt.arch.converters.drafts import next_layers
from aprfmt.arch.converters.experts import one_for_all, same_limit
from aprfmt.arch.fields import as_int, as_mapping
from aprfmt.arch.row import COMPRESSED_ROPE, INT32, MOST, OPTIONAL, REQUIRED, Architecture, Key, TensorRow, Tower
from aprfmt.errors import CorruptError, RefusedError


compressed_rope = Converter(role=COMPRESSED_ROPE)
_WINDOW, _CHOSEN, _ALL = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
_RATES: Mapping[str, object] = {_CHOSEN: 4, _ALL: 128}
"""Positions compressed into one key, by layer type in transformers: with an indexer, or all attended."""
_HASHED = "hash_moe"
_N_HASHED = 3


def _ratios_normalize(value: object, scope: Scope) -> object:
    """A ratio per layer, 0 for sliding-window only; from the layer types if transformers wrote the config."""
    extra, n_layers = scope.h.extra, scope.h.num_layers
    kinds = extra.pop("layer_types", None)
    rates = {**_RATES, **as_mapping(extra.pop("compress_rates", None))}
    if rates != _RATES:
        raise RefusedError(
            f"unsupported compress_rates {rates}", hint=f"supported rates: {_RATES[_CHOSEN]} and {_RATES[_ALL]}",
        )
    if kinds is None and (value is not None or n_layers is None):
        return DEFAULT
    if kinds is None:
        kinds = [_CHOSEN if i > 1 and i % 2 else _ALL for i in range(n_layers or 0)]
    if not isinstance(kinds, list) or any(kind not in (*rates, _WINDOW) for kind in kinds):
        raise CorruptError(f"layer_types may contain only {_WINDOW!r}, {_CHOSEN!r} and {_ALL!r}")
    return [rates.get(kind, 0) for kind in kinds]


def _ratios_to_gguf(value: object, scope: Scope) -> object:
    for ratio in value if isinstance(value, list) else ():
        if ratio not in (0, *_RATES.values()):
            raise RefusedError(f"{scope.name} has {ratio}: llama.cpp's {scope.row.gguf} supports 0, 4 and 128 only")
    if isinstance(value, list) and _RATES[_CHOSEN] not in value:
        raise RefusedError(
            f"{scope.name} lacks {_RATES[_CHOSEN]}: llama.cpp's {scope.row.gguf} needs at least one such layer"
        )
    return value


def _hashed_normalize(value: object, scope: Scope) -> object:
    """The number of leading layers with table-routed experts; a list of types is kept if these are not the first ones.
    """
    extra, n_layers = scope.h.extra, scope.h.num_layers
    kinds = extra.get("mlp_layer_types")
    if not isinstance(kinds, list):
        return min(_N_HASHED, n_layers) if value is None and n_layers is not None else DEFAULT
    count = kinds.count(_HASHED)
    if _HASHED not in kinds[count:]:
        del extra["mlp_layer_types"]
    return count


def _all_streams(value: object, scope: Scope) -> int | None:
    width, n_streams = scope.h.hidden_size, as_int(scope.h.extra.get("hc_mult"), "hc_mult")
    if n_streams not in (None, 4):
        raise RefusedError(f"hc_mult is {n_streams}: llama.cpp's {scope.row.gguf} supports 4 only")
    return width * n_streams if width and n_streams else None


def _stages_normalize(value: object, scope: Scope) -> object:
    """A draft is published with its model, whose layers the config counts; ratios cover the layers of both."""
    scope.h.extra.pop("num_nextn_predict_layers", None)
    layers, ratios = as_int(value, scope.name), scope.h.extra.get("compress_ratios")
    n_stages = len(ratios) - layers if isinstance(ratios, list) and layers is not None else 0
    return n_stages if n_stages > 0 else DEFAULT


def _no_ratios(value: object, scope: Scope) -> list[int]:
    for name in ("layer_types", "compress_rates"):
        scope.h.extra.pop(name, None)
    return [0] * (scope.h.num_layers or 0)


def _no_tables(value: object, scope: Scope) -> int:
    scope.h.extra.pop("mlp_layer_types", None)
    return 0


compress_ratios = Converter(_ratios_to_gguf, normalize=_ratios_normalize)
hash_layers = Converter(
    refuse_if(
        lambda value, scope: scope.h.extra.get("mlp_layer_types"),
        "mlp_layer_types: llama.cpp's {gguf} supports hash-routed experts in the first layers only",
    ),
    normalize=_hashed_normalize,
)
draft_stages = Converter(normalize=_stages_normalize)
no_ratios = Converter(normalize=_no_ratios)
no_tables = Converter(normalize=_no_tables)
eighth_of_head = Converter(derive=lambda scope: None if scope.h.head_dim is None else scope.h.head_dim // 8)
_TURNS = "2*hc_mult+hc_mult*hc_mult"


def _compressor(hf: str, gguf: str, width: str, layers: str, size: str) -> tuple[TensorRow, ...]:
    """Compresses the layer's ratio of positions into one key: `width` values of each, and a key of `size`."""
    return (
        tensor(f"{hf}.ape", f"{gguf}_ape.weight", f"compress_ratios,{width}", layers=layers),
        *linear(f"{hf}.wkv", f"{gguf}_kv", f"{width},hidden", layers=layers),
        *linear(f"{hf}.wgate", f"{gguf}_gate", f"{width},hidden", layers=layers),
        *norm(f"{hf}.norm", f"{gguf}_norm", size, layers=layers),
    )


def _attention() -> tuple[TensorRow, ...]:
    """One key that is also the value; a low-rank output per group of heads; compressor and indexer."""
    indexer, size = "attn.indexer", "index_head_dim"
    return (
        *linear("attn.wq_a", "attn_q_a", "q_lora_rank,hidden"), *norm("attn.q_norm", "attn_q_a_norm", "q_lora_rank"),
        *linear("attn.wq_b", "attn_q_b", "q,q_lora_rank"), *linear("attn.wkv", "attn_kv", "head_dim,hidden"),
        *norm("attn.kv_norm", "attn_kv_a_norm", "head_dim"),
        *optional(*norm("attn.norm", "attn_kv_a_norm", "head_dim")),  # as saved by transformers
        tensor("attn.attn_sink", "attn_sinks.weight", "heads"),
        *linear("attn.wo_a", "attn_output_a", "o_groups*o_lora_rank,q/o_groups"),
        *linear("attn.wo_b", "attn_output_b", "hidden,o_groups*o_lora_rank"),
        *_compressor("attn.compressor", "attn_compressor", "2*head_dim", "compressor&indexer", "head_dim"),
        *_compressor("attn.compressor", "attn_compressor", "head_dim", "compressor&!indexer", "head_dim"),
        *linear(f"{indexer}.wq_b", "indexer.attn_q_b", f"index_n_heads*{size},q_lora_rank", layers="indexer"),
        *linear(f"{indexer}.weights_proj", "indexer.proj", "index_n_heads,hidden", layers="indexer"),
        *_compressor(f"{indexer}.compressor", "indexer_compressor", f"2*{size}", "indexer", size),
    )


def _draft() -> tuple[TensorRow, ...]:
    """An MTP layer has the two halves of its projection as separate tensors."""
    halves = TensorRow(
        ("e_proj.weight", "h_proj.weight"), ("nextn.eh_proj.weight",), ("hidden,hidden",),
        gguf_dims=("hidden,2*hidden",), layers="draft", transposed=True, gguf_transposed=(True,),
    )
    return (halves, *(row for row in draft_layer(norm_after="norm") if "eh_proj" not in row.hf[0]))


def _experts() -> tuple[TensorRow, ...]:
    """Experts assigned to each token by a table in the first layers; a shared one."""
    return (
        *linear("ffn.gate", "ffn_gate_inp", "experts,hidden"),
        tensor("ffn.gate.tid2eid", "ffn_gate_tid2eid.weight", "vocab,experts_used", layers="hashed", value=INT32),
        tensor("ffn.gate.bias", "exp_probs_b.bias", "experts", layers="!hashed"),
        tensor("ffn.gate.bias_vl", "exp_probs_b_vl.bias", "experts", OPTIONAL),
        *packed_experts("ffn.experts.{e}.", ("w1", "w3", "w2"), ("weight", "scale"), "mxfp4_e8m0"),
        *experts("ffn.experts.{e}.", ("w1", "w3", "w2")),
        *linear("ffn.shared_experts.w1", "ffn_gate_shexp", "n_shared_experts*moe_ffn,hidden"),
        *linear("ffn.shared_experts.w3", "ffn_up_shexp", "n_shared_experts*moe_ffn,hidden"),
        *linear("ffn.shared_experts.w2", "ffn_down_shexp", "hidden,n_shared_experts*moe_ffn"),
    )


_LAYER = (
    *streams("hc_attn_", "hc_ffn_", _TURNS, "3"), *norm("attn_norm", "attn_norm"), *_attention(),
    *norm("ffn_norm", "ffn_norm"), *_experts(),
)
_LAYER_OF_DRAFTS = tuple(row for row in _LAYER if row.layers in ("", "!hashed") and "bias_vl" not in row.hf[0])
_ALL_STREAMS = Key("embedding_length_out", converter=Converter(_all_streams, default))
_KEYS = (
    *(key for key in DIMS if key.field != "intermediate_size"), replace(GROUPED, allowed=(1,)),
    ROPE, RMS_EPS,
    *rename((COUNT, USED), num_experts=("n_routed_experts", "num_local_experts")),
    Key("expert_gating_func", ("scoring_func",), converter=gating, allowed=("sqrtsoftplus",)), HEAD_DIM,
    Key("rope.dimension_count", ("qk_rope_head_dim",), converter=eighth_of_head),
    Key("attention.q_lora_rank", ("q_lora_rank",)), Key("attention.sliding_window", ("sliding_window",)), WIDTH,
    SHARED_COUNT, WEIGHTS_SCALE, Key("expert_weights_norm", ("norm_topk_prob",), "bool", constant=True),
    Key("swiglu_clamp_exp", ("swiglu_limit",), "f32[]", converter=one_for_all, draft=MOST),
    Key("swiglu_clamp_shexp", kind="f32[]", converter=same_limit, draft=MOST), *INDEXER,
    Key(
        "attention.output_group_count", ("o_groups",),
        converter=Converter(
            refuse_if(
                lambda value, scope: value and (scope.h.num_heads or 0) % (as_int(value, scope.name) or 1),
                "{name} is {value}: llama.cpp's {gguf} needs a divisor of the {h.num_heads} heads",
            ),
        ),
    ), Key("attention.output_lora_rank", ("o_lora_rank",)),
    Key("", ("compress_rates",)), Key("", ("mlp_layer_types",), "str[]"),
    Key("attention.compress_ratios", ("compress_ratios",), "i32[]", converter=compress_ratios),
    Key("attention.compress_rope_freq_base", ("compress_rope_theta",), "f32", converter=compressed_rope), HC_COUNT,
    HC_ITERATIONS, HC_EPS,
    Key("hash_layer_count", ("num_hash_layers",), converter=hash_layers), _ALL_STREAMS, MTP,
    must_be("attention_bias", False), must_be("mlp_bias", False), SILU,
)
_OF_DRAFTS = {"block_count": draft_stages, "attention.compress_ratios": no_ratios, "hash_layer_count": no_tables}
_PACKED = {
    "quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "activation_scheme": "dynamic",
    "weight_block_size": [128, 128], "expert_dtype": "fp4", "modules_to_not_convert": ["attn", "shared_experts"],
}


_V4_SIDE = "vision_patch_size"
_V4_NAMES = {
    "patch_size": _V4_SIDE, "embedding_length": "vision_dim", "feed_forward_length": "vision_inter_dim",
    "block_count": "vision_n_layers", "attention.head_count": "vision_n_heads",
}

ROWS: tuple[Architecture, ...] = (
    Architecture(
        id="deepseek_v4", gguf="deepseek4", **hf_names("DeepseekV4", "deepseek_v4"), packed_config=_PACKED,
        drafts=(("mtp.{m}.", "layers.{n}."),), drafts_apart=(("mtp.0.hc_head_", "hc_head_"),),
        prefixes=(("model.embed_tokens.", "embed."), ("model.hc_head.hc_", "hc_head_"), ("model.", "")),
        tensors=(
            embedding("embed"), *block(*_LAYER, *_draft(), hf="layers.{n}."), *last_stream("hc_head_"),
            *final_norm("norm"), *head("head"),
        ),
        keys=(*_KEYS, *needs("attention.head_count_kv", "attention.value_length")),
    ),
    Architecture(
        id="deepseek_v4_dspark",
        gguf="dflash",
        when="hyper_connection.count", hf_class="DeepseekV4DSparkModel", model_type="deepseek_v4",
        hf_classes=("DeepseekV4DSparkModel",), model_types=(), packed_config=_PACKED,
        # The last stage has the tensors that follow all of them; published drafts have three.
        prefixes=tuple(
            (f"mtp.{stage}.{name}", f"mtp.2.{name}")
            for stage in (0, 1, 3)
            for name in ("norm.", "hc_head_", "markov_head.", "confidence_head.")
        ),
        tensors=(
            *linear("mtp.0.main_proj", "fc", "hidden,dspark_target_layer_ids*hidden"),
            *norm("mtp.0.main_norm", "enc.output_norm"), *block(*_LAYER_OF_DRAFTS, hf="mtp.{n}."),
            *last_stream("mtp.2.hc_head_"), *norm("mtp.2.norm", "output_norm"),
            *linear("mtp.2.markov_head.markov_w1", "markov_w1", "vocab,dspark_markov_rank"),
            *linear("mtp.2.markov_head.markov_w2", "markov_w2", "vocab,dspark_markov_rank"),
            *optional(*linear("mtp.2.confidence_head.proj", "conf_proj", "1,hidden+dspark_markov_rank")),
            # Tensors of the target model, whose layers are carried along.
            *(
                replace(row, gguf=(), need=OPTIONAL)
                for row in (embedding("embed"), *final_norm("norm"), *head("head"), *last_stream("hc_head_"))
            ),
        ),
        keys=(
            *(
                replace(key, converter=_OF_DRAFTS.get(key.gguf, key.converter))
                for key in _KEYS if key not in (MTP, _ALL_STREAMS)
            ),
            Key("block_size", ("dspark_block_size",)),
            Key("target_layers", ("dspark_target_layer_ids",), "i32[]", converter=next_layers, needed=REQUIRED),
            Key("tokenizer.ggml.mask_token_id", ("dspark_noise_token_id",)), Key("", ("dspark_markov_rank",)),
            *needs("attention.q_lora_rank", "attention.sliding_window"),
        ),
    ),
)

TOWERS: tuple[Tower, ...] = (
    Tower(
        id="deepseek_v4_vision", **whole("DeepseekV4ForCausalLM", types=("deepseek_v4",)), hf_when="vision_n_layers",
        when="projector_type=deepseek4v", text="",
        tensors=(
            tensor(
                "vision.patch_embed.proj.weight", "v.patch_embd.weight", f"vision_dim,3*{_V4_SIDE}*{_V4_SIDE}",
                gguf_dims=(f"vision_dim,3,{_V4_SIDE},{_V4_SIDE}",),
            ),
            tensor("vision.patch_embed.proj.bias", "v.patch_embd.bias", "vision_dim", OPTIONAL),
            *layers(
                *norms("norm1", "norm2", bias=False, width="vision_dim"),
                *linear("attn.wqkv", "attn_qkv", "3*vision_dim,vision_dim", OPTIONAL),
                *linear("attn.wo", "attn_out", "vision_dim,vision_dim", OPTIONAL),
                TensorRow(
                    ("mlp.w1.weight",), ("ffn_gate.weight", "ffn_up.weight"), ("2*vision_inter_dim,vision_dim",),
                    gguf_dims=("vision_inter_dim,vision_dim",) * 2,
                ),
                *linear("mlp.w2", "ffn_down", "vision_dim,vision_inter_dim", OPTIONAL), hf="vision.blocks.{n}.",
                depth="vision_n_layers",
            ),
            *norm("vision.norm", "v.post_ln", "vision_dim"),
            *linear(
                "aligner.w1", "mm.1", "any_width,vision_dim*vision_downsample_ratio*vision_downsample_ratio", REQUIRED,
            ),
            *linear("aligner.w2", "mm.2", "hidden,any_width", REQUIRED),
            tensor("image_newline", "v.image_newline", "hidden"),
            tensor("image_start", "v.token_embd.img_start", "hidden"),
            tensor("image_end", "v.token_embd.img_end", "hidden"),
            tensor("image_pad", "v.token_embd.img_pad", "hidden"),
        ),
        keys=sees(
            Key("vision.image_size", converter=computed("16*vision_patch_size*vision_downsample_ratio", nothing)),
            *(Key(f"vision.{gguf}", (name,)) for gguf, name in _V4_NAMES.items()), *IMAGE, projector("deepseek4v"),
            Key("vision.attention.layer_norm_epsilon", kind="f32", constant=1e-6), USE_SILU,
            Key("vision.projector.scale_factor", ("vision_downsample_ratio",)),
            Key("vision.image_min_pixels", ("vision_min_pixels",)), must_be("vision_max_n_token", 384),
            must_be("vision_max_wh_ratio", 8), must_be("vision_rope_theta", 10000.0),
        ),
    ),
)
