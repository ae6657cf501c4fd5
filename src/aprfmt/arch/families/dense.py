"""Dense decoders of families with a single network."""

from __future__ import annotations

from dataclasses import replace

from aprfmt.arch.blocks.decoder import (
    DECODER, DIMS, GROUPED, HEAD_DIM, LLAMA_KEYS, PAD, RMS_EPS, ROPE, ROPE_DIM, SILU, WHOLE_HEADS, attention, block,
    class_names, decoder, embedding, flag, gated_mlp, head, hf_names, layer_eps, linear, must_be, network, norm,
    plain_mlp, rename, split, tensor,
)
from aprfmt.arch.converter import DEFAULT, ConfigKeys, Converter, Scope, refuse_if
from aprfmt.arch.converters.common import of_tensor
from aprfmt.arch.converters.layers import of_layers
from aprfmt.arch.fields import as_float, as_int
from aprfmt.arch.row import OPTIONAL, REQUIRED, Architecture, Difference, Key, TensorRow
from aprfmt.errors import RefusedError


def _head_norms(hf: str, gguf: str, heads: str) -> TensorRow:
    """One norm per head, which GGUF stacks."""
    row = tensor(f"self_attn.{hf}.norms.{{e}}.weight", f"{gguf}.weight", "head_dim", "qk_layernorm")
    return replace(row, gguf_dims=(f"{heads},head_dim",), count=heads)


_STABLELM_FFN_NORM = norm(
    "post_attention_layernorm", "ffn_norm", bias="!use_parallel_residual", need="!use_parallel_residual",
)


def _scale_of_range(value: object, scope: Scope) -> object:
    """One over the range of the initial weights, if the config does not state the scale."""
    spread = as_float(scope.config("initializer_range"), "initializer_range")
    return 1 / spread if value is None and spread else DEFAULT


def _passes(scope: Scope, layers: int) -> int | None:
    """The number of layer applications per token, for two stacks that run in cycles."""
    high, low = scope.size("H_cycles"), scope.size("L_cycles")
    if high is None or low is None:
        return None
    if not high or not low:
        raise RefusedError(f"H_cycles is {high} and L_cycles is {low}: llama.cpp runs each stack at least once")
    return layers * high * (low + 1)


def _layers_of_stack_normalize(value: object, scope: Scope) -> object:
    """If the config lacks the key, its number of layers is that of a stack, not of all applications."""
    layers = scope.h.num_layers
    if value is not None or layers is None:
        return DEFAULT
    return ConfigKeys({scope.name: layers, "num_hidden_layers": _passes(scope, layers)})


def _layers_of_stack_to_gguf(value: object, scope: Scope) -> int | None:
    layers = as_int(value, scope.name)
    passed = None if layers is None else _passes(scope, layers)
    if passed is not None and passed != scope.h.num_layers:
        raise RefusedError(
            f"num_hidden_layers is {scope.h.num_layers}, but {scope.name}, H_cycles and L_cycles give {passed}"
        )
    return layers


layers_of_stack = Converter(_layers_of_stack_to_gguf, normalize=_layers_of_stack_normalize)


def _every_to_gguf(value: object, scope: Scope) -> object:
    """A list, one number per layer, even if all are equal."""
    listed = scope.h.extra.get(scope.name)
    return listed if isinstance(listed, list) else value and [value] * (scope.h.num_layers or 0)


def _every_from_gguf(value: object, scope: Scope) -> object:
    return value if isinstance(value, list) or value is None else [value] * (scope.h.num_layers or 0)


_DIVISOR = 256
"""For the widths of all published OpenELMs."""


def _multiplied_from_gguf(value: object, scope: Scope) -> object:
    listed, hidden = _every_from_gguf(value, scope), scope.h.hidden_size
    if not isinstance(listed, list) or not hidden:
        return DEFAULT
    widths = [as_int(width, scope.name) or 0 for width in listed]
    return ConfigKeys(
        ffn_multipliers=[width / hidden for width in widths],
        ffn_dim_divisor=1 if any(width % _DIVISOR for width in widths) else _DIVISOR,
    )


in_every_layer = Converter(_every_to_gguf, _every_from_gguf)
multiplied_widths = Converter(
    lambda value, scope: of_layers(scope, "ffn") if isinstance(value, list) else None, _multiplied_from_gguf,
)
_STACK = "num_layers_per_stack"


def _stack(module: str, first: str = "") -> tuple[TensorRow, ...]:
    """Layers with gated attention and norms without weights; published checkpoints have their matrices in two tensors.
    """
    sides = {"gate_proj": "attn_gate", "q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v"}
    halves = dict.fromkeys(("ffn_gate.weight", "ffn_up.weight"), "ffn,hidden")
    quarters = {f"{name}.weight": "q,hidden" for name in sides.values()}
    return block(
        split("attn.gqkv_proj.weight", "4*q,hidden", quarters),
        *(row for hf, gguf in sides.items() for row in linear(f"self_attn.{hf}", gguf, "q,hidden")),
        *linear("attn.o_proj", "attn_output", "hidden,q"), *linear("self_attn.o_proj", "attn_output", "hidden,q"),
        split("mlp.gate_up_proj.weight", "2*ffn,hidden", halves), *gated_mlp(), hf=f"model.{module}.layers.{{n}}.",
        depth=_STACK, first=first,
    )


all_logits = Converter(
    refuse_if(lambda value, scope: bool(value), "{name} is {value}: llama.cpp computes a logit for every token"),
)
_XIELU = {"alpha_n": "1", "alpha_p": "1", "beta": "", "eps": ""}
"""Parameters of a layer's activation, and their shapes in checkpoints."""


ROWS: tuple[Architecture, ...] = (
    Architecture(
        id="apertus", gguf="apertus", **hf_names("Apertus", "apertus", "Apertus1p5Text", also=("apertus1p5_text",)),
        tensors=network(
            *norm("attention_layernorm", "attn_norm"),
            *attention("attention_bias", "attention_bias", qk_norm="head_dim"),
            *norm("feedforward_layernorm", "ffn_norm"), *plain_mlp(None, "mlp.up_proj", "mlp.down_proj"),
            *(TensorRow((f"mlp.act_fn.{name}",), (), (dims,), OPTIONAL) for name, dims in _XIELU.items()),
        ),
        keys=(
            *LLAMA_KEYS,
            *(
                Key(f"xielu.{name}", (f"model.layers.{{n}}.mlp.act_fn.{name}",), "f32[]", converter=of_tensor)
                for name in _XIELU
            ),
            must_be("hidden_act", "xielu"), flag("attention_bias"),
            Key("", ("output_vocab_size",), converter=all_logits),
        ),
    ),
    Architecture(
        id="seed_oss", gguf="seed_oss", **hf_names("SeedOss", "seed_oss"),
        tensors=network(
            *norm("input_layernorm", "attn_norm"), *attention("attention_bias", "attention_out_bias"),
            *norm("post_attention_layernorm", "post_attention_norm"), *gated_mlp("mlp_bias"),
        ),
        keys=(
            *DECODER, PAD, SILU, flag("attention_bias"), must_be("attention_out_bias", False),
            must_be("mlp_bias", False),
        ),
    ),
    Architecture(
        id="stablelm", gguf="stablelm", **hf_names("StableLm", "stablelm", "StableLMEpoch"),
        tensors=network(
            *norm("input_layernorm", "attn_norm", bias=REQUIRED), *attention("use_qkv_bias"),
            _head_norms("q_layernorm", "attn_q_norm", "heads"), _head_norms("k_layernorm", "attn_k_norm", "kv_heads"),
            *_STABLELM_FFN_NORM, *gated_mlp(), norm_bias=REQUIRED,
        ),
        keys=(
            *DIMS, GROUPED, ROPE, ROPE_DIM, Key("use_parallel_residual", ("use_parallel_residual",), "bool"),
            layer_eps("layer_norm_eps", "norm_eps"), flag("use_qkv_bias"), flag("qk_layernorm"), SILU,
        ),
    ),
    Architecture(
        id="bitnet", gguf="bitnet",
        **class_names(
            "BitNetForCausalLM", "BitnetForCausalLM", "BitNetModel", types=("bitnet",), bare=("BitNetModel",),
        ),
        tensors=decoder(
            *attention("attention_bias", "attention_bias"), *norm("self_attn.attn_sub_norm", "attn_sub_norm"),
            *norm("self_attn.inner_attn_ln", "attn_sub_norm"),
            mlp=(
                *gated_mlp(), *norm("mlp.ffn_sub_norm", "ffn_sub_norm", "ffn"),
                *norm("mlp.ffn_layernorm", "ffn_sub_norm", "ffn"),
            ),
        ),
        keys=(*DECODER, WHOLE_HEADS, SILU, must_be("attention_bias", False), Key("", ("weight_bits",))),
        differs=(
            Difference(
                "llama.cpp uses the weights as stored; this model rounds them to ternary values at run time",
                "weight_bits|quantization_config.quantization_mode=online",
            ),
            Difference(
                "transformers rounds the inputs of BitNet's projections to 8 bits, by up to 0.4 % of a token's "
                "largest; llama.cpp does not",
                "quantization_config.quant_method=bitnet", slight=True,
            ),
        ),
    ),
    # As apple/OpenELM-270M has it.
    Architecture(
        id="openelm", gguf="openelm", **hf_names("OpenELM", "openelm"),
        tensors=network(
            *norm("attn_norm", "attn_norm"), *linear("attn.qkv_proj", "attn_qkv", "q+2*kv,hidden"),
            *norm("attn.q_norm", "attn_q_norm", "head_dim"), *norm("attn.k_norm", "attn_k_norm", "head_dim"),
            *linear("attn.out_proj", "attn_output", "hidden,q"), *norm("ffn_norm", "ffn_norm"),
            split(
                "ffn.proj_1.weight", "2*ffn,hidden", dict.fromkeys(("ffn_gate.weight", "ffn_up.weight"), "ffn,hidden"),
            ),
            *linear("ffn.proj_2", "ffn_down", "hidden,ffn"),
            hf="transformer.layers.{n}.", embed="transformer.token_embeddings", last="transformer.norm",
        ),
        keys=(
            *rename(
                tuple(key for key in DIMS if key.field not in ("intermediate_size", "num_heads")),
                num_layers="num_transformer_layers", max_position_embeddings="max_context_length",
                hidden_size="model_dim",
            ),
            Key("feed_forward_length", ("ffn_multipliers",), "u32[]", converter=multiplied_widths),
            Key("", ("ffn_dim_divisor",)),
            Key("attention.head_count", ("num_query_heads",), "u32[]", field="num_heads", converter=in_every_layer),
            Key("attention.head_count_kv", ("num_kv_heads",), "u32[]", field="num_kv_heads", converter=in_every_layer),
            Key("rope.freq_base", ("rope_freq_constant",), "f32", field="rope_theta"),
            Key("attention.layer_norm_rms_epsilon", (), "f32", field="rms_norm_eps", constant=1e-6), HEAD_DIM, ROPE_DIM,
            must_be("activation_fn_name", "silu"), must_be("ffn_with_glu", True),
            must_be("normalization_layer_name", "rms_norm"), must_be("normalize_qk_projections", True),
            must_be("share_input_output_layers", True),
        ),
    ),
    # H_cycles times: L_cycles times the low stack, then the high one.
    Architecture(
        id="hrm_text", gguf="hrm_text", **hf_names("HrmText", "hrm_text"),
        tensors=(
            embedding(), tensor("model.z_L_init", "hrm.z_l_init", "hidden"), *_stack("L_module"),
            *_stack("H_module", _STACK), *head(),
        ),
        keys=(
            *DIMS, ROPE, RMS_EPS, HEAD_DIM, ROPE_DIM, Key("", ("initializer_range",), "f32"),
            Key("embedding_scale", ("embedding_scale",), "f32", converter=Converter(normalize=_scale_of_range)),
            Key("hrm.h_cycles", ("H_cycles",)), Key("hrm.l_cycles", ("L_cycles",)),
            Key("hrm.layers_per_stack", (_STACK,), converter=layers_of_stack),
            Key("hrm.prefix_lm", ("prefix_lm",), "bool"),
            SILU, must_be("attention_bias", False), must_be("mlp_bias", False),
        ),
        differs=(
            Difference(
                "llama.cpp uses causal attention: logits differ for prompts with bidirectional attention (prefix_lm)",
                "prefix_lm", slight=True,
            ),
        ),
    ),
)
