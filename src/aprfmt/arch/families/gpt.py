"""GPT-2 and networks with its layout."""

from __future__ import annotations

from dataclasses import replace

from aprfmt.arch.blocks.decoder import (
    DIMS, EPSILON, GROUPED, HEAD_DIM, LAYER_EPS, NO_WINDOW, RMS_EPS, ROPE, ROPE_DIM, WINDOW, More, attention, block,
    class_names, convert, decoder, embedding, final_norm, flag, gated_mlp, gelu, head, hf_names, layer_eps, linear,
    must_be, network, norm, optional, plain_mlp, rename, split, tensor,
)
from aprfmt.arch.converter import DEFAULT, ConfigKeys, Converter, Scope, nothing
from aprfmt.arch.converters.common import of_tensor, over_hidden, rotary_dim, times_hidden
from aprfmt.arch.fields import as_float, as_int
from aprfmt.arch.row import HEAD, OPTIONAL, REQUIRED, Architecture, Difference, Key, TensorRow


four_hidden = Converter(derive=lambda scope: times_hidden(4, scope))


def conv1d(hf: str, gguf: str, n_in: str, n_out: str) -> tuple[TensorRow, ...]:
    """GPT-2's linear layer, stored [in, out]."""
    return (
        tensor(f"{hf}.weight", f"{gguf}.weight", f"{n_in},{n_out}", transposed=True),
        tensor(f"{hf}.bias", f"{gguf}.bias", n_out),
    )


def _multi_query_normalize(value: object, scope: Scope) -> int | None:
    """KV heads from the switch: transformers ignores the number in the config."""
    return scope.h.num_heads if scope.config("multi_query") is False else 1


def _falcon_kv_normalize(value: object, scope: Scope) -> int | None:
    """KV heads: one if attention is multi-query; the new decoder architecture uses the number instead."""
    new, multi = scope.config("new_decoder_architecture"), scope.config("multi_query")
    if multi and not new:
        return 1
    return as_int(value, scope.name) or scope.h.num_heads


def _falcon_kind_from_gguf(value: object, scope: Scope) -> object:
    """Which of the three Falcons: from the KV heads and the norms of a layer."""
    heads, kv_heads = scope.h.num_heads, scope.h.num_kv_heads
    if not scope.names or kv_heads is None:
        return DEFAULT
    norms = 2 if "blk.0.attn_norm_2.weight" in scope.names else 1
    new = norms == 2 or 1 < kv_heads != heads
    return ConfigKeys(
        new_decoder_architecture=new, multi_query=kv_heads == 1, num_ln_in_parallel_attn=norms if new else None,
    )


def _has_groups(scope: Scope) -> bool:
    return scope.h.num_kv_heads != scope.h.num_heads


def _alibi_from_gguf(value: object, scope: Scope) -> object:
    bias = as_float(value, scope.key.gguf)
    if bias is None and not scope.kv:
        return DEFAULT
    usual = scope.defaults.get(scope.name)
    shown = usual if not bias else int(bias) if bias.is_integer() else bias
    return ConfigKeys({"attn_config.alibi": bool(bias), scope.name: shown})


multi_query = Converter(nothing, lambda value, scope: scope.h.num_kv_heads == 1 if scope.kv else DEFAULT)
multi_query_kv = Converter(normalize=_multi_query_normalize)
falcon_kv = Converter(normalize=_falcon_kv_normalize)
expansion = Converter(nothing, lambda value, scope: over_hidden(scope.h.intermediate_size if scope.kv else None, scope))
expansion_width = Converter(derive=lambda scope: times_hidden(scope.config("expansion_ratio"), scope))
kv_named = Converter(nothing, lambda value, scope: scope.h.num_kv_heads if scope.kv and _has_groups(scope) else DEFAULT)
kv_if_named = Converter(
    lambda value, scope: scope.h.num_kv_heads if _has_groups(scope) else None,
    normalize=lambda value, scope: scope.size("attn_config.kv_n_heads") or scope.h.num_heads,
)
alibi_bias = Converter(
    lambda value, scope: 0.0 if scope.config("attn_config.alibi") is False else as_float(value, scope.name),
    _alibi_from_gguf,
)
_DEALT = More(order=("deal:kv_heads,q/kv_heads,head_dim,head_dim",))
"""Fused attention by group: its heads of Q, one of K, one of V; GGUF has all Q, all K, all V."""
_QKV = "q+2*kv,hidden"
_GPT_DIMS = rename(
    DIMS, num_layers=("n_layer", "num_hidden_layers"),
    max_position_embeddings=("n_positions", "n_ctx", "max_position_embeddings"), hidden_size=("n_embd", "hidden_size"),
    intermediate_size=("n_inner",), num_heads=("n_head", "num_attention_heads"),
)


def _positions(hf: str) -> TensorRow:
    return tensor(f"{hf}.weight", "position_embd.weight", "positions,hidden")


def _gpt2_tensors(layer: tuple[TensorRow, ...]) -> tuple[TensorRow, ...]:
    """A network with GPT-2's names, learned positions and LayerNorms with biases, with these rows per layer."""
    return (
        embedding("transformer.wte"), _positions("transformer.wpe"),
        *block(
            *norm("ln_1", "attn_norm", bias=REQUIRED), *layer, *norm("ln_2", "ffn_norm", bias=REQUIRED),
            hf="transformer.h.{n}.",
        ),
        *final_norm("transformer.ln_f", REQUIRED), *head(),
    )


def _bare(*names: str) -> tuple[tuple[str, str], ...]:
    """Names in checkpoints that were saved without the wrapping model."""
    return tuple((name, f"transformer.{name}") for name in names)


_GPT2 = Architecture(
    id="gpt2", gguf="gpt2", **hf_names("GPT2", "gpt2", end="LMHeadModel"),
    tensors=_gpt2_tensors(
        (
            *conv1d("attn.c_attn", "attn_qkv", "hidden", "3*hidden"),
            *conv1d("attn.c_proj", "attn_output", "hidden", "hidden"), *conv1d("mlp.c_fc", "ffn_up", "hidden", "ffn"),
            *conv1d("mlp.c_proj", "ffn_down", "ffn", "hidden"),
        ),
    ),
    keys=(
        *convert(_GPT_DIMS, intermediate_size=four_hidden), EPSILON, gelu("activation_function"),
        must_be("scale_attn_weights", True), must_be("scale_attn_by_inverse_layer_idx", False),
    ),
    ignored=(".attn.bias", ".attn.masked_bias"), prefixes=_bare("wte.", "wpe.", "h.", "ln_f."),
)
_RUGPT3XL = Architecture(  # as evilfreelancer/ruGPT3XL has it: GPT-2 under the names of Llama
    id="rugpt3xl", gguf="gpt2", **hf_names("RuGPT3XL", "rugpt3xl"),
    tensors=(
        embedding(), _positions("model.embed_positions"),
        *block(
            *norm("input_layernorm", "attn_norm", bias=REQUIRED),
            *(
                TensorRow(
                    tuple(f"self_attn.{name}_proj.{part}" for name in "qkv"), (f"attn_qkv.{part}",), (f"hidden{rest}",),
                    gguf_dims=(f"3*hidden{rest}",),
                )
                for part, rest in (("weight", ",hidden"), ("bias", ""))
            ),
            *linear("self_attn.o_proj", "attn_output", "hidden,hidden", REQUIRED),
            *norm("post_attention_layernorm", "ffn_norm", bias=REQUIRED),
            *linear("mlp.up_proj", "ffn_up", "ffn,hidden", REQUIRED),
            *linear("mlp.down_proj", "ffn_down", "hidden,ffn", REQUIRED),
        ),
        *final_norm(bias=REQUIRED), *head(),
    ),
    keys=(*DIMS, LAYER_EPS, gelu(), Key("", ("sparse_mode",), "str")),
    differs=(
        Difference(
            "llama.cpp ignores ruGPT3XL's sparse attention (sparse_mode) and attends to all positions",
            "sparse_mode&!sparse_mode=none",
        ),
    ),
)
_BIGCODE = Architecture(
    id="gpt_bigcode", gguf="starcoder", **hf_names("GPTBigCode", "gpt_bigcode"),
    tensors=_gpt2_tensors(
        (
            *linear("attn.c_attn", "attn_qkv", _QKV, REQUIRED, **_DEALT),
            *linear("attn.c_proj", "attn_output", "hidden,q", REQUIRED),
            *linear("mlp.c_fc", "ffn_up", "ffn,hidden", REQUIRED),
            *linear("mlp.c_proj", "ffn_down", "hidden,ffn", REQUIRED),
        ),
    ),
    keys=(
        *convert(_GPT_DIMS, intermediate_size=four_hidden), replace(GROUPED, converter=multi_query_kv),
        Key("", ("multi_query",), "bool", converter=multi_query), EPSILON, gelu("activation_function"),
        must_be("scale_attn_weights", True),
    ),
    ignored=(".attn.bias", ".attn.masked_bias"), prefixes=_bare("wte.", "wpe.", "h.", "ln_f."),
)
_NEOX = Architecture(
    id="gpt_neox", gguf="gptneox", **hf_names("GPTNeoX", "gpt_neox"),
    tensors=network(
        *norm("input_layernorm", "attn_norm", bias=REQUIRED),
        *linear("attention.query_key_value", "attn_qkv", _QKV, "attention_bias", **_DEALT),
        *linear("attention.dense", "attn_output", "hidden,q", "attention_bias"),
        *norm("post_attention_layernorm", "ffn_norm", bias=REQUIRED),
        *linear("mlp.dense_h_to_4h", "ffn_up", "ffn,hidden", REQUIRED),
        *linear("mlp.dense_4h_to_h", "ffn_down", "hidden,ffn", REQUIRED), hf="gpt_neox.layers.{n}.",
        embed="gpt_neox.embed_in", last="gpt_neox.final_layer_norm", norm_bias=REQUIRED, out="embed_out",
    ),
    keys=(
        *DIMS, Key("rope.dimension_count", ("rotary_pct",), converter=rotary_dim),
        Key("use_parallel_residual", ("use_parallel_residual",), "bool"), LAYER_EPS,
        replace(ROPE, hf=("rotary_emb_base",)), flag("attention_bias"), gelu("hidden_act"),
    ),
    ignored=(".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq"),
    prefixes=tuple((name, f"gpt_neox.{name}") for name in ("embed_in.", "layers.", "final_layer_norm.")),
)


def _two_norms(*kinds: str) -> tuple[TensorRow, ...]:
    """The norms of Falcon 40B and 180B: one before attention, one before the parallel MLP."""
    return tuple(
        TensorRow(
            (f"ln_mlp.{kind}", f"ln_attn.{kind}"), (f"attn_norm.{kind}", f"attn_norm_2.{kind}"), ("hidden",),
            gguf_dims=("hidden", "hidden"),
        )
        for kind in kinds
    )


_FALCON = Architecture(
    id="falcon", gguf="falcon",
    **class_names(
        "FalconForCausalLM", "FalconModel", "RWForCausalLM", "RWModel",
        types=("falcon", "RefinedWeb", "RefinedWebModel"), bare=("FalconModel", "RWModel"),
    ),
    tensors=network(
        *_two_norms("weight", "bias"), *norm("input_layernorm", "attn_norm", bias=REQUIRED),
        *linear("self_attention.query_key_value", "attn_qkv", _QKV, "bias", **_DEALT),
        *linear("self_attention.dense", "attn_output", "hidden,q", "bias"),
        TensorRow(("post_attention_layernorm.weight",), (), ("hidden",), OPTIONAL),
        TensorRow(("post_attention_layernorm.bias",), (), ("hidden",), OPTIONAL),
        *linear("mlp.dense_h_to_4h", "ffn_up", "ffn,hidden", "bias"),
        *linear("mlp.dense_4h_to_h", "ffn_down", "hidden,ffn", "bias"), hf="transformer.h.{n}.",
        embed="transformer.word_embeddings", last="transformer.ln_f", norm_bias=REQUIRED,
    ),
    keys=(
        *convert(
            rename(
                DIMS, num_layers=("num_hidden_layers", "n_layer"), hidden_size=("hidden_size", "n_embed"),
                intermediate_size=("ffn_hidden_size",), num_heads=("num_attention_heads", "n_head"),
            ),
            intermediate_size=four_hidden,
        ),
        Key("tensor_data_layout", kind="str", constant="jploski"),
        Key("attention.head_count_kv", ("num_kv_heads", "n_head_kv"), field="num_kv_heads", converter=falcon_kv),
        flag("multi_query"), Key("", ("num_ln_in_parallel_attn",)),
        Key("", ("new_decoder_architecture",), "bool", converter=Converter(nothing, _falcon_kind_from_gguf)), EPSILON,
        ROPE,
        must_be("alibi", False), must_be("parallel_attn", True), must_be("bias", False), gelu("activation"),
    ),
    ignored=(".rotary_emb.inv_freq", ".maybe_rotary.inv_freq"), prefixes=_bare("word_embeddings.", "h.", "ln_f."),
)
_BLOOM = Architecture(
    id="bloom", gguf="bloom", **hf_names("Bloom", "bloom"),
    tensors=(
        embedding("transformer.word_embeddings"),
        *norm("transformer.word_embeddings_layernorm", "token_embd_norm", bias=REQUIRED),
        *block(
            *norm("input_layernorm", "attn_norm", bias=REQUIRED),
            *linear("self_attention.query_key_value", "attn_qkv", "3*hidden,hidden", REQUIRED, **_DEALT),
            *linear("self_attention.dense", "attn_output", "hidden,hidden", REQUIRED),
            *norm("post_attention_layernorm", "ffn_norm", bias=REQUIRED),
            *linear("mlp.dense_h_to_4h", "ffn_up", "4*hidden,hidden", REQUIRED),
            *linear("mlp.dense_4h_to_h", "ffn_down", "hidden,4*hidden", REQUIRED), hf="transformer.h.{n}.",
        ),
        *final_norm("transformer.ln_f", REQUIRED), *head(),
    ),
    keys=(
        *convert(
            rename(
                DIMS, num_layers=("n_layer", "num_hidden_layers"), max_position_embeddings=("seq_length",),
                hidden_size=("hidden_size", "n_embed"), intermediate_size=(),
                num_heads=("n_head", "num_attention_heads"),
            ),
            intermediate_size=four_hidden,
        ),
        Key("attention.head_count_kv", field="num_kv_heads"), EPSILON,
        must_be("apply_residual_connection_post_layernorm", False),
    ),
    prefixes=_bare("word_embeddings.", "word_embeddings_layernorm.", "h.", "ln_f."),
)
_MPT = Architecture(
    id="mpt", gguf="mpt",
    **class_names(
        "MptForCausalLM", "MptModel", "MPTForCausalLM", "MPTModel", types=("mpt",), bare=("MptModel", "MPTModel"),
    ),
    tensors=(
        embedding("transformer.wte"), *optional(_positions("transformer.wpe")),
        *block(
            *norm("norm_1", "attn_norm", bias=OPTIONAL), *linear("attn.Wqkv", "attn_qkv", _QKV, OPTIONAL),
            *optional(*norm("attn.q_ln", "attn_q_norm", "q", bias=REQUIRED)),
            *optional(*norm("attn.k_ln", "attn_k_norm", "kv", bias=REQUIRED)),
            *linear("attn.out_proj", "attn_output", "hidden,q", OPTIONAL), *norm("norm_2", "ffn_norm", bias=OPTIONAL),
            *linear("ffn.up_proj", "ffn_up", "ffn,hidden", OPTIONAL),
            *linear("ffn.down_proj", "ffn_down", "hidden,ffn", OPTIONAL), hf="transformer.blocks.{n}.",
        ),
        *final_norm("transformer.norm_f", OPTIONAL), *head(),
    ),
    keys=(
        *convert(
            rename(
                DIMS, num_layers="n_layers", max_position_embeddings="max_seq_len", hidden_size="d_model",
                intermediate_size=(), num_heads="n_heads",
            ),
            intermediate_size=expansion_width,
        ),
        Key("", ("expansion_ratio",), converter=expansion),
        Key("attention.head_count_kv", field="num_kv_heads", converter=kv_if_named),
        Key("", ("attn_config.kv_n_heads",), converter=kv_named), EPSILON,
        Key("attention.clamp_kqv", ("attn_config.clip_qkv",), "f32"), flag("attn_config.alibi"),
        Key("attention.max_alibi_bias", ("attn_config.alibi_bias_max",), "f32", converter=alibi_bias),
        Key("", ("attn_config.softmax_scale",), "f32", allowed=(None,)),
        Key("", ("logit_scale",), "f32", allowed=(None,)), flag("no_bias"),
    ),
    prefixes=_bare("wte.", "wpe.", "blocks.", "norm_f."),
)


def _refact_width(value: object, scope: Scope) -> object:
    """Refact's MLP width: two thirds of four times the hidden size, rounded up to 256, whatever the config says."""
    hidden = scope.h.hidden_size
    return None if hidden is None else -(-(8 * hidden // 3) // 256) * 256


refact_width = Converter(normalize=_refact_width)
_RMS_EPSILON = replace(EPSILON, gguf=RMS_EPS.gguf)

ROWS: tuple[Architecture, ...] = (
    Architecture(
        id="starcoder2", gguf="starcoder2", **hf_names("Starcoder2", "starcoder2"),
        tensors=decoder(
            *attention("use_bias", "use_bias"), mlp=plain_mlp("use_bias", "mlp.c_fc", "mlp.c_proj"), norm_bias=REQUIRED
        ),
        keys=(
            *DIMS, GROUPED, ROPE, layer_eps("norm_epsilon"), HEAD_DIM, WINDOW, flag("use_bias"),
            must_be("hidden_act", "gelu_pytorch_tanh"),
        ),
        differs=(NO_WINDOW,),
    ),
    Architecture(
        id="jais2", gguf="jais2", **hf_names("Jais2", "jais2"),
        tensors=decoder(
            *attention("attention_bias", "attention_bias"),
            mlp=plain_mlp("mlp_bias", "mlp.up_proj", "mlp.down_proj"), norm_bias=REQUIRED,
        ),
        keys=(
            *DIMS, GROUPED, ROPE, LAYER_EPS, HEAD_DIM, ROPE_DIM, must_be("hidden_act", "relu2"),
            flag("attention_bias"), flag("mlp_bias"),
        ),
    ),
    _GPT2,
    _RUGPT3XL,
    _BIGCODE,
    _NEOX,
    _FALCON,
    _BLOOM,
    _MPT,
    Architecture(
        id="codeshell", gguf="codeshell", **hf_names("CodeShell", "codeshell"),
        ignored=(".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq"),
        tensors=network(
            *norm("ln_1", "attn_norm", bias=REQUIRED), *linear("attn.c_attn", "attn_qkv", "q+2*kv,hidden", REQUIRED),
            *linear("attn.c_proj", "attn_output", "hidden,q", REQUIRED), *norm("ln_2", "ffn_norm", bias=REQUIRED),
            *linear("mlp.c_fc", "ffn_up", "ffn,hidden", REQUIRED),
            *linear("mlp.c_proj", "ffn_down", "hidden,ffn", REQUIRED),
            hf="transformer.h.{n}.", embed="transformer.wte", last="transformer.ln_f", norm_bias=REQUIRED,
        ),
        keys=(
            *convert(
                rename(
                    DIMS, max_position_embeddings="n_positions", hidden_size="n_embd", num_layers="n_layer",
                    num_heads="n_head", intermediate_size="n_inner",
                ),
                intermediate_size=four_hidden,
            ),
            replace(GROUPED, hf=("num_query_groups",)), EPSILON, ROPE, gelu("activation_function"),
        ),
    ),
    # As smallcloudai/Refact-1_6B-fim has it.
    Architecture(
        id="refact", gguf="refact", **hf_names("GPTRefact", "gpt_refact"),
        tensors=network(
            *norm("ln_1", "attn_norm"), *linear("attn.q", "attn_q", "hidden,hidden"),
            split(
                "attn.kv.weight", "2*head_dim,hidden",
                dict.fromkeys(("attn_k.weight", "attn_v.weight"), "head_dim,hidden"),
            ),
            *linear("attn.c_proj", "attn_output", "hidden,hidden"), *norm("ln_2", "ffn_norm"),
            split(
                "mlp.gate_up_proj.weight", "2*ffn,hidden",
                dict.fromkeys(("ffn_gate.weight", "ffn_up.weight"), "ffn,hidden"),
            ),
            *linear("mlp.c_proj", "ffn_down", "hidden,ffn"),
            hf="transformer.h.{n}.", embed="transformer.wte", last="ln_f",
        ),
        keys=(
            *convert(
                rename(
                    DIMS, num_layers="n_layer", max_position_embeddings="n_positions", hidden_size="n_embd",
                    intermediate_size="n_inner", num_heads="n_head",
                ),
                intermediate_size=refact_width,
            ),
            Key("attention.head_count_kv", field="num_kv_heads", constant=1), _RMS_EPSILON,
            must_be("multi_query", True),
        ),
    ),
    # As in inceptionai/jais-family-590m and core42/jais-13b; a GGUF has both scales folded into the matrices.
    Architecture(
        id="jais", gguf="jais", **hf_names("JAIS", "jais", end="LMHeadModel"),
        ignored=(".attn.bias", ".attn.masked_bias", ".relative_pe.slopes"),
        tensors=(
            tensor("transformer.wte.weight", "token_embd.weight", "vocab,hidden", scale=(":mup_embeddings_scale",)),
            *block(
                *norm("ln_1", "attn_norm", bias=REQUIRED), *conv1d("attn.c_attn", "attn_qkv", "hidden", "3*hidden"),
                *conv1d("attn.c_proj", "attn_output", "hidden", "hidden"), *norm("ln_2", "ffn_norm", bias=REQUIRED),
                *conv1d("mlp.c_fc", "ffn_up", "hidden", "ffn"), *conv1d("mlp.c_fc2", "ffn_gate", "hidden", "ffn"),
                *conv1d("mlp.c_proj", "ffn_down", "ffn", "hidden"), hf="transformer.h.{n}.",
            ),
            *final_norm("transformer.ln_f", REQUIRED),
            tensor(
                "lm_head.weight", "output.weight", "vocab,hidden", HEAD, scale=(":mup_output_alpha*mup_width_scale",)
            ),
        ),
        keys=(
            *rename(
                DIMS, num_layers="n_layer", max_position_embeddings="n_positions", hidden_size="n_embd",
                intermediate_size="n_inner", num_heads="n_head",
            ),
            EPSILON, Key("attention.max_alibi_bias", kind="f32", constant=8.0),
            Key("", ("mup_embeddings_scale", "embeddings_scale"), "f32"),
            Key("", ("mup_width_scale", "width_scale"), "f32"), Key("", ("mup_output_alpha",), "f32"),
            Key("", ("mup_scale_qk_dot_by_d", "scale_qk_dot_by_d"), "bool", constant=True),
            must_be("activation_function", "swiglu"), must_be("position_embedding_type", "alibi"),
        ),
    ),
    # As in lewtun/talkie-1930-13b-it-hf, which rotates in the opposite direction of llama.cpp.
    Architecture(
        id="talkie", gguf="talkie", **hf_names("Talkie", "talkie"), prefixes=(("lm_head.weight", "lm_head"),),
        tensors=(
            embedding("model.embed"),
            *block(
                *linear("attn.attn_query", "attn_q", "q,hidden", value="mirror:head_dim"),
                tensor("attn.head_gain.head_g", "attn_q_norm.weight", "heads", gguf_dims=("heads,1",)),
                *linear("attn.attn_key", "attn_k", "q,hidden", value="mirror:head_dim"),
                *linear("attn.attn_value", "attn_v", "q,hidden"), *linear("attn.attn_resid", "attn_output", "hidden,q"),
                tensor("attn_gain.a_g", "attn_output.scale", "1"),
                *gated_mlp(names=("mlp_gate", "mlp_linear", "mlp_resid")),
                tensor("mlp_gain.a_g", "ffn_down.scale", "1"),
                tensor("embed_skip.a_g", "layer_output_scale.weight", "1"), hf="model.blocks.{n}.",
            ),
            tensor("lm_head", "output.weight", "vocab,hidden", HEAD), TensorRow(("lm_head_gain.w_g",), (), ("1",)),
        ),
        keys=(
            *DIMS, ROPE, HEAD_DIM,
            # The float32 machine epsilon, torch's default.
            Key("attention.layer_norm_rms_epsilon", kind="f32", field="rms_norm_eps", constant=1.1920929e-07),
            Key("logit_scale", ("lm_head_gain.w_g",), "f32", converter=of_tensor),
        ),
    ),
)
