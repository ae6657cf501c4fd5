"""Rows of the architecture table: decoders with routed experts, of which GGUF keeps little more than the sizes."""

from __future__ import annotations

from dataclasses import replace

from aprfmt.arch.converter import DEFAULT, Converter, Scope, nothing
from aprfmt.arch.converters.common import shared_width, softcap
from aprfmt.arch.rope import attention_factor
from aprfmt.arch.row import OPTIONAL, REQUIRED, Architecture, Difference, Key, TensorRow
from aprfmt.arch.rows.parts import (
    DIMS, GROUPED, NO_WINDOW, ROPE, ROPE_DIM, SCALES, VOCAB, WHOLE_HEADS, WINDOW, attention, experts, flag,
    fused_experts, gated_mlp, hf_names, linear, must_be, network, norm, rename, split, tensor,
)
from aprfmt.arch.rows.parts_moe import (
    BIAS_FLAG, COUNT, EQUAL_HEADS, NO_BIAS, USED, WIDTH, moe_decoder, moe_keys, router_and_experts, shared_expert,
)
from aprfmt.errors import RefusedError


same_theta = Converter(from_gguf=lambda value, scope: scope.h.rope_theta)


def _every_layer_to(value: object, scope: Scope) -> object:
    """The step between layers with experts, which the runtime takes for 1."""
    if value not in (None, 1):
        raise RefusedError(f"{scope.name} is {value}: llama.cpp's {scope.row.gguf} looks for experts in every layer")
    return value


def _last_layer_to(value: object, scope: Scope) -> None:
    """Up to which layer there are experts: a GGUF has no key for it, it is always the last."""
    if value not in (None, -1) and scope.h.num_layers is not None and value != scope.h.num_layers - 1:
        raise RefusedError(
            f"{scope.name} is {value}, but a GGUF of {scope.row.gguf!r} has experts up to the last layer"
        )


def _mscales_from(value: object, scope: Scope) -> object:
    """PhiMoE's longrope names its attention factor twice; a GGUF has one."""
    scaling = scope.h.extra.get("rope_scaling")
    if isinstance(scaling, dict) and scaling.get("rope_type") == "longrope":
        factor = attention_factor(scope.h, "longrope", scaling)
        for name in ("short_mscale", "long_mscale"):
            scaling.setdefault(name, 1.0 if factor is None else factor)
    return DEFAULT


last_layer = Converter(_last_layer_to)
mscales = Converter(nothing, _mscales_from)
every_layer = Converter(_every_layer_to)

_WINDOWED = (flag("use_sliding_window"), Key("", ("max_window_layers",)))
_SPARSE = (must_be("decoder_sparse_step", 1), must_be("mlp_only_layers", []))


def _mixtral_experts() -> tuple[TensorRow, ...]:
    return (
        *linear("block_sparse_moe.gate", "ffn_gate_inp", "experts,hidden"),
        *experts("block_sparse_moe.experts.{e}.", ("w1", "w3", "w2")),
    )


def _granite_experts() -> tuple[TensorRow, ...]:
    return (
        *linear("block_sparse_moe.router.layer", "ffn_gate_inp", "experts,hidden"),
        *fused_experts("block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"),
    )


def _granite_shared() -> tuple[TensorRow, ...]:
    width, need = "shared_intermediate_size", "shared_intermediate_size"
    return (
        split(
            "shared_mlp.input_linear.weight", f"2*{width},hidden",
            dict.fromkeys(("ffn_gate_shexp.weight", "ffn_up_shexp.weight"), f"{width},hidden"), need,
        ),
        *linear("shared_mlp.output_linear", "ffn_down_shexp", f"hidden,{width}", need=need),
    )


_GRANITE_DEFAULTS = {
    "num_local_experts": 8, "num_experts_per_tok": 2, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6,
    "embedding_multiplier": 1.0, "logits_scaling": 1.0, "residual_multiplier": 1.0, "attention_multiplier": 1.0,
    "attention_bias": False, "tie_word_embeddings": False,
}


_SPARSEMIXER = Difference(
    "llama.cpp's phimoe norms without subtracting the mean and weighs both experts by one softmax (no sparsemixer)"
)


ROWS: tuple[Architecture, ...] = (
    Architecture(
        id="mixtral", gguf="llama", when="expert_count", **hf_names("Mixtral", "mixtral"), rope_type=0,
        tensors=moe_decoder(*attention(permuted=True), *_mixtral_experts()),
        keys=moe_keys(VOCAB, ROPE_DIM, WINDOW, count="num_local_experts"),
        differs=(NO_WINDOW,),
        defaults={"": {
            "num_local_experts": 8, "num_experts_per_tok": 2, "num_key_value_heads": 8,
            "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "tie_word_embeddings": False,
            "bos_token_id": 1, "eos_token_id": 2,
        }},
    ),
    Architecture(
        id="qwen2_moe", gguf="qwen2moe", **hf_names("Qwen2Moe", "qwen2_moe"), head_always=True,
        tensors=moe_decoder(
            *attention("qkv_bias"), *router_and_experts("moe"),
            *linear("mlp.shared_expert_gate", "ffn_gate_inp_shexp", "1,hidden", layers="moe"),
            *shared_expert("mlp.shared_expert", "shared_expert_intermediate_size", layers="moe"),
            *gated_mlp(layers="dense"),
        ),
        keys=moe_keys(
            WIDTH, Key("expert_shared_feed_forward_length", ("shared_expert_intermediate_size",)),
            must_be("norm_topk_prob", False), flag("qkv_bias"), *_SPARSE, WINDOW, *_WINDOWED,
        ),
        differs=(NO_WINDOW,),
        defaults={"": {
            "num_experts": 60, "num_experts_per_tok": 4, "num_key_value_heads": 16, "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632, "norm_topk_prob": False, "qkv_bias": True,
            "decoder_sparse_step": 1, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False, "use_sliding_window": False,
        }},
    ),
    Architecture(
        id="qwen3_moe", gguf="qwen3moe", **hf_names("Qwen3Moe", "qwen3_moe"),
        tensors=moe_decoder(
            *attention("attention_bias", "attention_bias", qk_norm="head_dim"), *router_and_experts("moe"),
            *gated_mlp(layers="dense"),
        ),
        keys=moe_keys(WIDTH, must_be("norm_topk_prob", True), NO_BIAS, *_SPARSE, WINDOW, *_WINDOWED),
        differs=(NO_WINDOW,),
        defaults={"": {
            "num_experts": 128, "num_experts_per_tok": 8, "num_key_value_heads": 4, "moe_intermediate_size": 768,
            "norm_topk_prob": False, "decoder_sparse_step": 1, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6,
            "attention_bias": False, "tie_word_embeddings": False, "use_sliding_window": False,
        }},
    ),
    Architecture(
        id="phimoe", gguf="phimoe", **hf_names("Phimoe", "phimoe", "PhiMoE"), head_always=True,
        tensors=moe_decoder(
            *attention("attention_bias", "attention_bias"), *_mixtral_experts(),
            norm_bias=REQUIRED, head_bias="lm_head_bias&output",
        ),
        keys=moe_keys(
            ROPE_DIM, WINDOW, must_be("attention_bias", True), must_be("lm_head_bias", True),
            Key("", converter=mscales),
            Key("", ("router_jitter_noise",), "f32"), count="num_local_experts",
        ),
        gguf_only=("rope_factors_long.weight", "rope_factors_short.weight"),
        differs=(_SPARSEMIXER, NO_WINDOW),
        defaults={"": {
            "num_local_experts": 16, "num_experts_per_tok": 2, "num_key_value_heads": 8,
            "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "attention_bias": False,
            "lm_head_bias": False, "router_jitter_noise": 0.01, "tie_word_embeddings": False, "bos_token_id": 1,
            "eos_token_id": 2,
        }},
    ),
    Architecture(
        id="olmoe", gguf="olmoe", **hf_names("Olmoe", "olmoe"), head_always=True,
        tensors=moe_decoder(*attention("attention_bias", "attention_bias", qk_norm="q"), *router_and_experts()),
        keys=moe_keys(
            NO_BIAS, EQUAL_HEADS, WHOLE_HEADS, Key("", ("clip_qkv",), "f32"), must_be("norm_topk_prob", False)
        ),
        differs=(Difference("llama.cpp's olmoe does not clip Q, K and V (clip_qkv)", "clip_qkv"),),
        defaults={"": {
            "num_experts": 64, "num_experts_per_tok": 8, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
            "norm_topk_prob": False, "attention_bias": False, "tie_word_embeddings": False, "eos_token_id": 50279,
        }},
    ),
    Architecture(
        id="granitemoe",
        required={"logit_scale": "", "expert_shared_feed_forward_length": "tensors=ffn_up_shexp.weight"},
        gguf="granitemoe", **hf_names("GraniteMoe", "granitemoe"), rope_type=0,
        tensors=moe_decoder(*attention("attention_bias", "attention_bias", permuted=True), *_granite_experts()),
        keys=moe_keys(VOCAB, ROPE_DIM, *SCALES, BIAS_FLAG, count="num_local_experts"),
        defaults={"": _GRANITE_DEFAULTS},
    ),
    Architecture(
        id="granitemoeshared", required={"logit_scale": "", "expert_shared_feed_forward_length": ""}, gguf="granitemoe",
        when="expert_shared_feed_forward_length", **hf_names("GraniteMoeShared", "granitemoeshared"), rope_type=0,
        tensors=moe_decoder(
            *attention("attention_bias", "attention_bias", permuted=True), *_granite_experts(), *_granite_shared()
        ),
        keys=moe_keys(
            VOCAB, ROPE_DIM, *SCALES, Key("expert_shared_feed_forward_length", ("shared_intermediate_size",)),
            BIAS_FLAG, count="num_local_experts",
        ),
        defaults={"": {**_GRANITE_DEFAULTS, "shared_intermediate_size": 0}},
    ),
    Architecture(
        id="ernie4_5_moe",
        required={"interleave_moe_layer_step": "", "expert_shared_feed_forward_length": "expert_shared_count"},
        gguf="ernie4_5-moe", **hf_names("Ernie4_5_Moe", "ernie4_5_moe"), rope_type=0,
        tensors=moe_decoder(
            *attention("use_bias", "use_bias"),
            *router_and_experts(
                "moe",
                (
                    tensor(
                        "mlp.moe_statics.e_score_correction_bias", "exp_probs_b.bias", "1,experts",
                        gguf_dims=("1,experts",), layers="moe",
                    ),
                ),
            ),
            *shared_expert(
                "mlp.shared_experts", "moe_ffn*moe_num_shared_experts", "moe_num_shared_experts", "moe", OPTIONAL
            ),
            *gated_mlp("use_bias", layers="dense"),
            head_bias="use_bias&output",
        ),
        keys=moe_keys(
            Key("interleave_moe_layer_step", ("moe_layer_interval",), converter=every_layer),
            Key("leading_dense_block_count", ("moe_layer_start_index",)), WIDTH,
            Key("expert_shared_count", ("moe_num_shared_experts",)),
            Key("expert_shared_feed_forward_length", converter=shared_width),
            Key("", ("moe_layer_end_index",), "i32", converter=last_layer), must_be("use_bias", False),
            count="moe_num_experts", used="moe_k",
        ),
        defaults={"": {
            "moe_num_experts": 64, "moe_k": 6, "moe_intermediate_size": 1536, "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1, "moe_layer_end_index": -1, "moe_layer_interval": 1, "num_key_value_heads": 4,
            "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "use_bias": False,
            "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2,
        }},
    ),
    Architecture(
        id="dbrx", required={"attention.clamp_kqv": ""}, gguf="dbrx", **hf_names("Dbrx", "dbrx"), gguf_only=(),
        head_always=True,
        tensors=network(
            *norm("norm_attn_norm.norm_1", "attn_norm"),
            *linear("norm_attn_norm.attn.Wqkv", "attn_qkv", "q+2*kv,hidden"),
            *linear("norm_attn_norm.attn.out_proj", "attn_output", "hidden,q"),
            *norm("norm_attn_norm.norm_2", "attn_output_norm"),
            *linear("ffn.router.layer", "ffn_gate_inp", "experts,hidden"),
            *(
                tensor(
                    f"ffn.experts.mlp.{hf}", f"{gguf}.weight", "experts*ffn,hidden", gguf_dims=(dims,),
                    gguf_transposed=(gguf == "ffn_down_exps",),
                )
                for hf, gguf, dims in (
                    ("w1", "ffn_gate_exps", "experts,ffn,hidden"), ("v1", "ffn_up_exps", "experts,ffn,hidden"),
                    ("w2", "ffn_down_exps", "experts,hidden,ffn"),
                )
            ),
            hf="transformer.blocks.{n}.", embed="transformer.wte", last="transformer.norm_f",
        ),
        keys=(
            *rename(
                DIMS, num_layers="n_layers", max_position_embeddings="max_seq_len", hidden_size="d_model",
                num_heads="n_heads", intermediate_size="ffn_config.ffn_hidden_size",
            ),
            replace(GROUPED, hf=("attn_config.kv_n_heads",)), ROPE,
            Key("", ("attn_config.rope_theta",), "f32", converter=same_theta),
            Key("attention.layer_norm_epsilon", (), "f32", constant=1e-5),
            Key("attention.clamp_kqv", ("attn_config.clip_qkv",), "f32", converter=softcap),
            *rename(
                (COUNT, USED), num_experts="ffn_config.moe_num_experts", num_experts_per_tok="ffn_config.moe_top_k"
            ),
            must_be("ffn_config.moe_normalize_expert_weights", 1.0), WHOLE_HEADS,
        ),
        defaults={"": {
            "max_seq_len": 2048, "attn_config.kv_n_heads": 1, "ffn_config.moe_num_experts": 4,
            "ffn_config.moe_top_k": 1, "ffn_config.moe_normalize_expert_weights": 1.0, "tie_word_embeddings": False,
        }},
    ),
)
