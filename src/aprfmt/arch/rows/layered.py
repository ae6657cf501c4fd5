"""Rows of the architecture table: decoders whose layers differ in their heads and widths, or come in two stacks."""

from __future__ import annotations

from dataclasses import replace

from aprfmt.arch.converter import DEFAULT, ConfigKeys, Converter, GgufKeys, Scope, default
from aprfmt.arch.converters.common import is_list
from aprfmt.arch.fields import as_float, as_int
from aprfmt.arch.grammar import sizes_of
from aprfmt.arch.row import Architecture, Difference, Key, TensorRow
from aprfmt.arch.rows.parts import (
    DIMS, GROUPED, HEAD_DIM, RMS_EPS, ROPE, ROPE_DIM, SILU, VOCAB, WHOLE_HEADS, attention, block, embedding, gated_mlp,
    head, hf_names, linear, must_be, network, norm, rename, split, tensor,
)
from aprfmt.errors import CorruptError, RefusedError


def _scale_of_range(value: object, scope: Scope) -> object:
    """One over the range of the first weights, where the config does not name the scale."""
    spread = as_float(scope.config("initializer_range"), "initializer_range")
    return 1 / spread if value is None and spread else DEFAULT


def _passes(scope: Scope, layers: int) -> int | None:
    """How many layers a token passes, of two stacks that run in cycles."""
    high, low = scope.size("H_cycles"), scope.size("L_cycles")
    return None if high is None or low is None else layers * high * (low + 1)


def _layers_of_stack_normalize(value: object, scope: Scope) -> object:
    """A config that is silent counts the layers of a stack where others count all that a token passes."""
    layers = scope.h.num_layers
    if value is not None or layers is None:
        return DEFAULT
    return ConfigKeys({scope.name: layers, "num_hidden_layers": _passes(scope, layers)})


def _layers_of_stack_to(value: object, scope: Scope) -> int | None:
    layers = as_int(value, scope.name)
    passed = None if layers is None else _passes(scope, layers)
    if passed is not None and passed != scope.h.num_layers:
        raise RefusedError(
            f"num_hidden_layers is {scope.h.num_layers}, but {scope.name}, H_cycles and L_cycles make it {passed}"
        )
    return layers


scale_of_range = Converter(normalize=_scale_of_range)
layers_of_stack = Converter(_layers_of_stack_to, normalize=_layers_of_stack_normalize)


def _every_to(value: object, scope: Scope) -> object:
    """A list, one number a layer, also where all are the same."""
    listed = scope.h.extra.get(scope.name)
    return listed if isinstance(listed, list) else value and [value] * (scope.h.num_layers or 0)


def _every_from(value: object, scope: Scope) -> object:
    return value if isinstance(value, list) or value is None else [value] * (scope.h.num_layers or 0)


def _of_layers(scope: Scope, word: str) -> list[int]:
    """A size in each layer."""
    return [sizes_of(scope.h, layer).get(word, 0) for layer in range(scope.h.num_layers or 0)]


def _multiplied_to(value: object, scope: Scope) -> object:
    return _of_layers(scope, "ffn") if isinstance(value, list) else None


_DIVISOR = 256
"""Of the widths of all published OpenELMs."""


def _multiplied_from(value: object, scope: Scope) -> object:
    listed, hidden = _every_from(value, scope), scope.h.hidden_size
    if not isinstance(listed, list) or not hidden:
        return DEFAULT
    widths = [as_int(width, scope.name) or 0 for width in listed]
    return ConfigKeys(
        ffn_multipliers=[width / hidden for width in widths],
        ffn_dim_divisor=1 if any(width % _DIVISOR for width in widths) else _DIVISOR,
    )


def _block_list(word: str) -> Converter:
    """A number, or a list of them where `block_configs` says that layers differ."""

    def to_gguf(value: object, scope: Scope) -> object:
        if isinstance(scope.config("block_configs"), list):
            value = _of_layers(scope, word)
        elif word == "kv_heads" and isinstance(listed := scope.config("num_key_value_heads_per_layer"), list):
            value = listed
        kind = "u32[]" if isinstance(value, list) else "u32"
        return None if value is None else GgufKeys({scope.key.gguf: (kind, value)})

    def from_gguf(value: object, scope: Scope) -> object:
        if not isinstance(value, list):
            return DEFAULT if value is None else value
        return max(value, default=None) if word == "heads" else None

    return Converter(to_gguf, from_gguf)


def _listed_kv_from(value: object, scope: Scope) -> object:
    listed = scope.gguf("attention.head_count_kv")
    return list(listed) if is_list(listed) and not is_list(scope.gguf("attention.head_count")) else DEFAULT


def _blocks_from(value: object, scope: Scope) -> object:
    """What `block_configs` says of layers with these heads, key-value heads and widths."""
    names = ("attention.head_count", "attention.head_count_kv", "feed_forward_length")
    heads, kv_heads, widths = (scope.gguf(name) for name in names)
    if not (is_list(heads) and is_list(kv_heads) and is_list(widths)):
        return DEFAULT
    hidden = scope.h.hidden_size or 1
    blocks = []
    for item in zip(heads, kv_heads, widths, strict=False):
        n_heads, n_kv, width = (as_int(number, name) or 0 for number, name in zip(item, names, strict=True))
        attention = {
            "n_heads_in_group": n_heads // n_kv if n_kv else None,
            "no_op": not n_heads,
            "replace_with_linear": bool(n_heads and not n_kv),
        }
        blocks.append(
            {
                "attention": attention,
                "ffn": {"ffn_mult": 3 * width / (2 * hidden) if width else None, "no_op": not width},
            }
        )
    return blocks


def _blocks_normalize(value: object, scope: Scope) -> object:
    if isinstance(value, list) and len(value) != scope.h.num_layers:
        raise CorruptError(f"{scope.name} describes {len(value)} layers, and the network has {scope.h.num_layers}")
    return DEFAULT


def _block_head_dim_to(value: object, scope: Scope) -> GgufKeys | None:
    """The size of a head, which does not follow from the heads of a first layer that may have none."""
    if not isinstance(scope.config("block_configs"), list):
        return None
    return GgufKeys({f"attention.{name}_length": ("u32", scope.h.head_dim) for name in ("key", "value")})


in_every_layer = Converter(_every_to, _every_from)
multiplied_widths = Converter(_multiplied_to, _multiplied_from)
block_widths = _block_list("ffn")
block_heads = _block_list("heads")
block_kv_heads = _block_list("kv_heads")
listed_kv_heads = Converter(from_gguf=_listed_kv_from)
blocks = Converter(from_gguf=_blocks_from, normalize=_blocks_normalize)
block_head_dim = Converter(_block_head_dim_to, default)

_SIZES = (*DIMS, GROUPED)
_BY_BLOCK = {"intermediate_size": block_widths, "num_heads": block_heads, "num_kv_heads": block_kv_heads}
_BLOCK_SIZES = tuple(
    replace(key, kind="u32[]", converter=_BY_BLOCK[key.field]) if key.field in _BY_BLOCK else key for key in _SIZES
)

_STACK = "num_layers_per_stack"


def _stack(module: str, first: str = "") -> tuple[TensorRow, ...]:
    """Layers with gated attention and norms without weights; published checkpoints have its matrices in two."""
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


ROWS: tuple[Architecture, ...] = (
    # As apple/OpenELM-270M has it.
    Architecture(
        id="openelm", gguf="openelm", **hf_names("OpenELM", "openelm"), gguf_only=(), head_never=True,
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
        defaults={"": {"tie_word_embeddings": True, "ffn_dim_divisor": 256, "rope_freq_constant": 10000}},
    ),
    # As Deci/DeciLM-7B and nvidia/Llama-3_1-Nemotron-51B-Instruct have it.
    Architecture(
        id="deci", gguf="deci", **hf_names("DeciLM", "nemotron-nas", also=("deci",)), rope_type=0,
        tensors=network(
            *norm("input_layernorm", "attn_norm", layers="heads"), *attention(permuted=True, layers="kv_heads"),
            *linear("self_attn.linear_attn", "attn_output", "hidden,hidden", layers="heads&!kv_heads"),
            *norm("post_attention_layernorm", "ffn_norm", layers="ffn"), *gated_mlp(layers="ffn"),
        ),
        keys=(
            *(
                replace(key, kind="u32[]", converter=_BY_BLOCK[key.field]) if key.field in _BY_BLOCK else key
                for key in _SIZES
            ),
            Key("", ("num_key_value_heads_per_layer",), "u32[]", converter=listed_kv_heads),
            Key("", ("block_configs",), converter=blocks), Key("attention.key_length", converter=block_head_dim), ROPE,
            RMS_EPS,
            VOCAB, ROPE_DIM, WHOLE_HEADS, must_be("attention_bias", False), must_be("mlp_bias", False), SILU,
        ),
        differs=(Difference("llama.cpp's deci leaves out a layer that has attention but no MLP", "lone_attention"),),
        defaults={"": {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "max_position_embeddings": 2048}},
    ),
    # What runs H_cycles times: L_cycles times the low stack, then the high one.
    Architecture(
        id="hrm_text", gguf="hrm_text", **hf_names("HrmText", "hrm_text"), gguf_only=(),
        required={f"hrm.{key}": "" for key in ("layers_per_stack", "h_cycles", "l_cycles")},
        tensors=(
            embedding(), tensor("model.z_L_init", "hrm.z_l_init", "hidden"), *_stack("L_module"),
            *_stack("H_module", _STACK), *head(),
        ),
        keys=(
            *DIMS, ROPE, RMS_EPS, HEAD_DIM, ROPE_DIM, Key("", ("initializer_range",), "f32"),
            Key("embedding_scale", ("embedding_scale",), "f32", converter=scale_of_range),
            Key("hrm.h_cycles", ("H_cycles",)), Key("hrm.l_cycles", ("L_cycles",)),
            Key("hrm.layers_per_stack", (_STACK,), converter=layers_of_stack),
            Key("hrm.prefix_lm", ("prefix_lm",), "bool"),
            SILU, must_be("attention_bias", False), must_be("mlp_bias", False),
        ),
        defaults={"": {
            "num_attention_heads": 12, "hidden_act": "silu", "max_position_embeddings": 2048, "initializer_range": 0.02,
            "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False,
            "head_dim": 128, "H_cycles": 2, "L_cycles": 3, "prefix_lm": True,
        }},
        differs=(
            Difference(
                "llama.cpp's tokens see only those before them: a prompt whose tokens all see each other (prefix_lm) "
                "gets other logits",
                "prefix_lm",
            ),
        ),
    ),
)
