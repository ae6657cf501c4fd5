"""Building blocks of rows: tensors and keys that most language models share."""

from __future__ import annotations

from dataclasses import fields, replace
from operator import attrgetter
from typing import TypedDict, Unpack

from aprfmt.arch.converter import Converter
from aprfmt.arch.converters.common import (
    attention_layers, head_dim, pad_token, rope_keys, rotary_dim, sliding_layers, whole_heads, window,
)
from aprfmt.arch.converters.layers import layer_types
from aprfmt.arch.hyperparams import FIELD
from aprfmt.arch.row import HEAD, OPTIONAL, REQUIRED, Architecture, Difference, Key, TensorRow


# The fields after `hf` and `gguf`. A thousand rows are created per model: `replace` is too slow.
_rest = attrgetter(*(field.name for field in fields(TensorRow)[2:]))
PAIRS = {"q": ("swap:heads,2,head_dim/2",), "kv": ("swap:kv_heads,2,head_dim/2",)}
"""Row orders of llama's Q and K: Hugging Face rotates halves of a head against each other, GGUF neighbours."""


class More(TypedDict, total=False):
    """Fields of a TensorRow that a building block passes through."""

    layers: str
    order: tuple[str, ...]
    columns: tuple[str, ...]
    transposed: bool
    gguf_transposed: tuple[bool, ...]
    value: str
    scale: tuple[str, ...]
    flat: bool
    count: str
    skip: str
    cut: str


class Classes(TypedDict):
    """Fields of an Architecture: its classes and model types."""

    hf_class: str
    model_type: str
    hf_classes: tuple[str, ...]
    bare_classes: tuple[str, ...]
    model_types: tuple[str, ...]


def tensor(
    hf: str, gguf: str, dims: str, need: str = REQUIRED, gguf_dims: tuple[str, ...] = (), **more: Unpack[More]
) -> TensorRow:
    """A tensor that is the same on both sides, apart from the given TensorRow fields."""
    return TensorRow((hf,), (gguf,), (dims,), need, gguf_dims, **more)


def split(hf: str, dims: str, gguf: dict[str, str], need: str = REQUIRED, **more: Unpack[More]) -> TensorRow:
    """One tensor of a checkpoint that is split into several in a GGUF: their names and shapes."""
    return TensorRow((hf,), tuple(gguf), (dims,), need, tuple(gguf.values()), **more)


def linear(
    hf: str, gguf: str, dims: str, bias: str | None = None, need: str = REQUIRED, **more: Unpack[More]
) -> tuple[TensorRow, ...]:
    """The weight [out, in] of a linear layer and, if `bias` names its need, the bias [out]."""
    weight = tensor(f"{hf}.weight", f"{gguf}.weight", dims, need, **more)
    if bias is None:
        return (weight,)
    of_rows = More(order=more.get("order", ()), layers=more.get("layers", ""))
    return weight, tensor(f"{hf}.bias", f"{gguf}.bias", dims.partition(",")[0], bias, **of_rows)


def norm(
    hf: str, gguf: str, dim: str = "hidden", bias: str | None = None,
    need: str = REQUIRED, *, value: str = "", layers: str = "",
) -> tuple[TensorRow, ...]:
    """The weight of a norm and, if `bias` names its need, the bias."""
    return linear(hf, gguf, dim, bias, need, value=value, layers=layers)


def embedding(hf: str = "model.embed_tokens") -> TensorRow:
    """The token embedding."""
    return tensor(f"{hf}.weight", "token_embd.weight", "vocab,hidden")


def final_norm(hf: str = "model.norm", bias: str | None = None, value: str = "") -> tuple[TensorRow, ...]:
    """The norm before the head."""
    return norm(hf, "output_norm", bias=bias, value=value)


def head(hf: str = "lm_head", bias: str | None = None) -> tuple[TensorRow, ...]:
    """The output head, absent if tied to the embedding."""
    return linear(hf, "output", "vocab,hidden", bias, HEAD)


def attention(
    qkv_bias: str | None = None, o_bias: str | None = None, *, permuted: bool = False,
    qk_norm: str = "", hf: str = "self_attn", o_proj: str = "o_proj", layers: str = "",
) -> tuple[TensorRow, ...]:
    """Separate Q, K, V and output projections.

    `permuted` is for llama's rotary order. `qk_norm` is the length of the norms of Q and K: "head_dim", or "q", which
    for K means "kv".
    """
    q, k = (PAIRS["q"], PAIRS["kv"]) if permuted else ((), ())
    k_norm = "kv" if qk_norm == "q" else qk_norm
    return (
        *linear(f"{hf}.q_proj", "attn_q", "q,hidden", qkv_bias, order=q, layers=layers),
        *linear(f"{hf}.k_proj", "attn_k", "kv,hidden", qkv_bias, order=k, layers=layers),
        *linear(f"{hf}.v_proj", "attn_v", "kv,hidden", qkv_bias, layers=layers),
        *linear(f"{hf}.{o_proj}", "attn_output", "hidden,q", o_bias, layers=layers),
        *(norm(f"{hf}.q_norm", "attn_q_norm", qk_norm, layers=layers) if qk_norm else ()),
        *(norm(f"{hf}.k_norm", "attn_k_norm", k_norm, layers=layers) if qk_norm else ()),
    )


def gated_mlp(
    bias: str | None = None, *, hf: str = "mlp", names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    layers: str = "",
) -> tuple[TensorRow, ...]:
    """Gate, up and down projections of width ffn."""
    gate, up, down = names
    return (
        *linear(f"{hf}.{gate}", "ffn_gate", "ffn,hidden", bias, layers=layers),
        *linear(f"{hf}.{up}", "ffn_up", "ffn,hidden", bias, layers=layers),
        *linear(f"{hf}.{down}", "ffn_down", "hidden,ffn", bias, layers=layers),
    )


def plain_mlp(bias: str | None, up: str, down: str) -> tuple[TensorRow, ...]:
    """An MLP without a gate, under the names of its two projections."""
    return (*linear(up, "ffn_up", "ffn,hidden", bias), *linear(down, "ffn_down", "hidden,ffn", bias))


def experts(
    hf: str = "mlp.experts.{e}.", names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"), layers: str = ""
) -> tuple[TensorRow, ...]:
    """One gate, up and down projection per expert, of width moe_ffn; GGUF stacks them."""
    gate, up, down = names
    return (
        tensor(f"{hf}{gate}.weight", "ffn_gate_exps.weight", "moe_ffn,hidden", layers=layers),
        tensor(f"{hf}{up}.weight", "ffn_up_exps.weight", "moe_ffn,hidden", layers=layers),
        tensor(f"{hf}{down}.weight", "ffn_down_exps.weight", "hidden,moe_ffn", layers=layers),
    )


def fused_experts(gate_up: str, down: str, layers: str = "") -> tuple[TensorRow, ...]:
    """All experts in two tensors, gate over up: [experts, 2 moe_ffn, hidden] and [experts, hidden, moe_ffn]."""
    halves = dict.fromkeys(("ffn_gate_exps.weight", "ffn_up_exps.weight"), "experts,moe_ffn,hidden")
    order = ("deal:experts,moe_ffn,moe_ffn",)
    return (
        split(gate_up, "experts,2*moe_ffn,hidden", halves, order=order, layers=layers),
        tensor(down, "ffn_down_exps.weight", "experts,hidden,moe_ffn", layers=layers),
    )


def block(
    *rows: TensorRow, hf: str = "model.layers.{n}.", gguf: str = "blk.{n}.", depth: str = "layers", first: str = ""
) -> tuple[TensorRow, ...]:
    """Rows of a layer: their names get the prefixes; `depth` is the number of layers, `first` the GGUF index of the
    first one.
    """

    def named(row: TensorRow) -> TensorRow:
        names = (tuple(hf + name for name in row.hf), tuple(gguf + name for name in row.gguf))
        return TensorRow(*names, *_rest(row))

    if depth == "layers":
        return tuple(map(named, rows))
    return tuple(replace(named(row), depth=depth, first=first) for row in rows)


def optional(*rows: TensorRow) -> tuple[TensorRow, ...]:
    """The rows, all optional."""
    return tuple(replace(row, need=OPTIONAL) for row in rows)


def number(name: str) -> Key:
    """The key of a typed Hyperparams field, with the spellings that any family may have."""
    f = FIELD[name]
    return Key(f.gguf, f.hf, f.kind, f.name)


DIMS = tuple(map(number, ("num_layers", "max_position_embeddings", "hidden_size", "intermediate_size", "num_heads")))
"""Sizes of every transformer."""
GROUPED = number("num_kv_heads")
RMS_EPS = number("rms_norm_eps")
LAYER_EPS = Key("attention.layer_norm_epsilon", ("layer_norm_eps", "layer_norm_epsilon"), "f32", field="rms_norm_eps")
EPSILON = replace(LAYER_EPS, hf=("layer_norm_epsilon",))
ROPE = Key("rope", converter=rope_keys)
"""Placeholder for the rope keys: freq_base, scaling.*, dimension_sections, those of sliding layers; see arch.rope."""
ROPE_DIM = Key("rope.dimension_count", converter=rotary_dim)
"""Rotated dimensions of a head: head_dim x partial_rotary_factor."""
HEAD_DIM = replace(number("head_dim"), converter=head_dim)
"""Placeholder for key_length and value_length; written if the config states a head size or it is not hidden / heads."""
VOCAB = number("vocab_size")
NO_WINDOW = Difference(
    "llama.cpp ignores the sliding window: logits differ for texts longer than {window} tokens",
    "window", beyond="window",
)
WHOLE_HEADS = Key("", converter=whole_heads)
"""llama.cpp requires projections of hidden_size values."""
WINDOW = Key("attention.sliding_window", ("sliding_window",), converter=window)
PAD = Key("", ("pad_token_id",), converter=pad_token)
"""For families whose configs state a padding token by default; a GGUF stores it with the tokenizer."""
SLIDING_LAYERS = Key("attention.sliding_window_pattern", ("layer_types",), "bool[]", converter=sliding_layers)
ALWAYS_WINDOW = Key("attention.sliding_window", ("sliding_window",))
"""The sliding window of families whose layer types say which layers use it."""
WINDOW_LAYERS = Key("attention.sliding_window_pattern", ("layer_types",), "bool[]", converter=layer_types)
"""Which layers have a sliding window, by `layer_types`."""
KV_HEADS_BY_LAYER = replace(GROUPED, kind="i32[]", converter=attention_layers, needed=REQUIRED)
"""KV heads per layer, 0 for layers without attention: so a GGUF states the layer types."""
EXPERTS = tuple(map(number, ("num_experts", "num_experts_per_tok", "moe_intermediate_size")))
DECODER: tuple[Key, ...] = (*DIMS, GROUPED, ROPE, RMS_EPS, HEAD_DIM)
"""Keys of a plain decoder with grouped-query attention, rotary positions and RMS norms."""


def rename(keys: tuple[Key, ...], **hf: tuple[str, ...] | str) -> tuple[Key, ...]:
    """`keys` with other config.json names for some fields: rename(DIMS, hidden_size="n_embd")."""
    names = {name: (value,) if isinstance(value, str) else value for name, value in hf.items()}
    return tuple(replace(key, hf=names[key.field]) if key.field in names else key for key in keys)


def convert(keys: tuple[Key, ...], **by: Converter) -> tuple[Key, ...]:
    """`keys` with a converter for some fields: convert(DIMS, intermediate_size=four_hidden)."""
    return tuple(replace(key, converter=by[key.field]) if key.field in by else key for key in keys)


def hf_names(stem: str, model_type: str, *more: str, end: str = "ForCausalLM", also: tuple[str, ...] = ()) -> Classes:
    """The transformers classes of a family with the prefix `stem` ("Qwen2"); `more` prefixes are accepted too.

    `also` are further model types.
    """
    stems = (stem, *more)
    return {
        "hf_class": stem + end, "model_type": model_type,
        "hf_classes": tuple(name + e for name in stems for e in (end, "Model")),
        "bare_classes": tuple(f"{name}Model" for name in stems), "model_types": (model_type, *also),
    }


def class_names(*names: str, types: tuple[str, ...], bare: tuple[str, ...] = ()) -> Classes:
    """Classes and model types without a common prefix, the first of each for a new config.json."""
    return {
        "hf_class": names[0], "model_type": types[0], "hf_classes": names, "bare_classes": bare, "model_types": types,
    }


def variant(
    base: Architecture, id: str, gguf: str, classes: Classes, *keys: Key, without: tuple[str, ...] = (), when: str = ""
) -> Architecture:
    """The network of `base` under other names, with additional keys and without some config.json names.

    Change further fields with `replace(variant(...), FIELD=...)`.
    """
    kept = (key for key in base.keys if not {*key.hf} & {*without})
    return replace(base, id=id, gguf=gguf, **classes, keys=(*kept, *keys), when=when, hf_when="", other_names=())


def needs(*names: str) -> tuple[Key, ...]:
    """GGUF keys that other keys of the row write and that every file needs (see Key.needed)."""
    return tuple(Key(name, needed=REQUIRED) for name in names)


def flag(name: str) -> Key:
    """A boolean of config.json without a GGUF key: the GGUF's tensors tell."""
    return Key("", (name,), "bool")


_GELUS = ("gelu", "gelu_new", "gelu_fast", "gelu_python", "gelu_pytorch_tanh", "gelu_accurate")


def gelu(name: str = "hidden_act") -> Key:
    """The activation: any approximation of GELU, since the runtime has a single one."""
    return Key("", (name,), "str", allowed=_GELUS)


_KINDS = {bool: "bool", int: "u32", float: "f32", str: "str", list: "i32[]"}


def must_be(name: str, value: object) -> Key:
    """A config.json key for which llama.cpp's network supports one value only; others are refused on export to GGUF."""
    return Key("", (name,), _KINDS[type(value)], constant=value)


def network(
    *layer: TensorRow, embed: str = "model.embed_tokens", hf: str = "model.layers.{n}.", last: str = "model.norm",
    out: str = "lm_head", norm_bias: str | None = None, norm_value: str = "", head_bias: str | None = None,
) -> tuple[TensorRow, ...]:
    """An embedding, layers of these rows, a norm and a head, with the usual names of decoders."""
    first, end = embedding(embed), final_norm(last, norm_bias, norm_value)
    return (first, *block(*layer, hf=hf), *end, *head(out, head_bias))


def decoder(
    *attention_rows: TensorRow, mlp: tuple[TensorRow, ...] = (), norm_bias: str | None = None
) -> tuple[TensorRow, ...]:
    """A pre-norm decoder; the MLP is gated if `mlp` is empty."""
    return network(
        *norm("input_layernorm", "attn_norm", bias=norm_bias), *attention_rows,
        *norm("post_attention_layernorm", "ffn_norm", bias=norm_bias), *(mlp or gated_mlp()), norm_bias=norm_bias,
    )


SILU = must_be("hidden_act", "silu")
"""The activation of most gated MLPs."""


def fused_mlp() -> tuple[TensorRow, ...]:
    """An MLP whose gate and up projections are one tensor on both sides."""
    return (*linear("mlp.gate_up_proj", "ffn_up", "2*ffn,hidden"), *linear("mlp.down_proj", "ffn_down", "hidden,ffn"))


def layer_eps(*names: str) -> Key:
    """The epsilon of layer norms, with these config.json names first."""
    return replace(LAYER_EPS, hf=(*names, *LAYER_EPS.hf))


LLAMA_KEYS = (*DECODER, VOCAB, ROPE_DIM)


def post_norm_decoder(*attention_rows: TensorRow) -> tuple[TensorRow, ...]:
    """A post-norm decoder: norms after attention and MLP instead of before."""
    return network(
        *attention_rows, *norm("post_attention_layernorm", "post_attention_norm"), *gated_mlp(),
        *norm("post_feedforward_layernorm", "post_ffw_norm"),
    )


def fused_qkv(hf: str, dims: str, bias: str | None = None) -> tuple[TensorRow, ...]:
    """Q over K over V in one tensor on both sides."""
    return linear(hf, "attn_qkv", dims, bias)
