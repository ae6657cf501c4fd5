"""The configuration of a decoder network, as numbers: everything that `decoder.Decoder` needs."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from aprfmt.arch import rope
from aprfmt.arch.fields import as_float, as_int, as_mapping
from aprfmt.arch.hparams import active_window
from aprfmt.arch.hyperparams import Hyperparams
from aprfmt.arch.rope import DEFAULT_THETA, scaling_of
from aprfmt.arch.row import Architecture
from aprfmt.errors import CorruptError, RefusedError, UnsupportedError
from aprtrain.network.experts import Experts, experts_of
from aprtrain.network.layout import Layout, layout_of
from aprtrain.network.recurrence import DeltaNet
from aprtrain.network.rotation import Rope, rope_of, yarn_scale

NO_ATTENTION = -1
"""The window of a layer without attention."""


class Heads(NamedTuple):
    """The heads of a layer: of queries, of keys and values, and their size."""

    n: int
    n_kv: int
    size: int


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).

    Attributes:
        rank: size of the latent vector for keys and values.
        nope_dim, rope_dim: nope and rope dimensions of a head of Q and K.
        values: head size of V.
        eps: epsilon of the norms of this part.
    """

    rank: int
    nope_dim: int
    rope_dim: int
    values: int
    eps: float = 1e-6


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder network.

    Attributes:
        architecture: id in aprfmt's architecture table.
        n_layers, d_model, n_heads, n_kv_heads, head_dim, d_ffn: sizes; `head_dim` of Q and K, `d_ffn` of dense layers.
        vocab_rows: rows of the embedding; at least the tokens of the tokenizer.
        norm_eps: epsilon of norms.
        norm_centred: whether norms subtract the mean (layer norms).
        norm_plus_one: whether norms scale by 1 + weight.
        tied: whether the output head is the embedding.
        embed_scale, residual_scale, logit_scale: factors of embeddings, residual additions and logits.
        act: activation of the MLP, "silu", "gelu_tanh" or "relu2".
        gated: whether the MLP is gated.
        qk_norm_after_rope: whether Q and K are normalized after the rotation.
        attn_scale: factor of attention scores.
        attn_softcap, logit_softcap: c of c tanh(x / c) over scores and logits; 0 for none.
        windows: sliding window of each layer, including the current position; 0 for full attention, NO_ATTENTION for
            none.
        ropes: the distinct rotations.
        layer_ropes: index into `ropes` of each layer; -1 for a layer without rotation.
        adjacent: whether pairs are adjacent dimensions.
        experts, latent: see there; None for none.
        outer: the parameters outside of layers.
        kinds: parameters of a layer, for each layer kind.
        layer_kinds: index into `kinds` of each layer.
        layer_heads: the heads of each layer.
        kv_layers: the layer whose keys and values each layer uses: itself, or an earlier one.
        value_norm: whether values are normalized, without a weight.
        attn_gated: whether a gate follows each head of Q, for its output.
        delta: sizes of layers with the delta rule; None for none.
    """

    architecture: str
    n_layers: int
    d_model: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    d_ffn: int
    vocab_rows: int
    norm_eps: float
    norm_centred: bool
    norm_plus_one: bool
    tied: bool
    embed_scale: float
    residual_scale: float
    logit_scale: float
    act: str
    gated: bool
    qk_norm_after_rope: bool
    attn_scale: float
    attn_softcap: float
    logit_softcap: float
    windows: tuple[int, ...]
    ropes: tuple[Rope, ...]
    layer_ropes: tuple[int, ...]
    adjacent: bool
    experts: Experts | None
    latent: Latent | None
    outer: Layout
    kinds: tuple[Layout, ...]
    layer_kinds: tuple[int, ...]
    layer_heads: tuple[Heads, ...]
    kv_layers: tuple[int, ...]
    value_norm: bool
    attn_gated: bool
    delta: DeltaNet | None

    @property
    def q_rows(self) -> int:
        """Rows of the query projection, of the largest layer."""
        return max(heads.n * heads.size for heads in self.layer_heads)

    @property
    def kv_rows(self) -> int:
        """Rows of the key projection, and of the value projection, of the largest layer."""
        return max(heads.n_kv * heads.size for heads in self.layer_heads)

    @property
    def n_params(self) -> int:
        """Elements of all tensors."""
        layouts = [self.outer, *(self.kinds[kind] for kind in self.layer_kinds)]
        return sum(prod(part.size) for layout in layouts for _, parts in layout for part in parts)

    @property
    def n_layer_params(self) -> int:
        """Elements of the matrices of the largest layer."""
        return max(_elements(layout, 1.0) for layout in self.kinds)

    @property
    def n_active_params(self) -> int:
        """Elements of the matrices used per token in all layers: of experts only the selected ones."""
        share = self.experts.used / self.experts.n if self.experts is not None else 1.0
        return sum(_elements(self.kinds[kind], share) for kind in self.layer_kinds)

    @property
    def n_embed_params(self) -> int:
        """Elements of the embeddings: of tokens, and of tokens per layer."""
        return sum(prod(part.size) for name, parts in self.outer if "embed" in name for part in parts)

    @property
    def per_layer_width(self) -> int:
        """Width of the per-layer embeddings; 0 without them."""
        return next((parts[0].size[0] for name, parts in self.outer if name == "ple_proj_norm"), 0)

    @property
    def mlp_values(self) -> int:
        """Values per token between the two products of an MLP, including gate and up.

        For each selected expert also its input and output, in two orders.
        """
        e = self.experts
        return max(3 * self.d_ffn, 3 * e.used * (e.width + self.d_model) if e is not None else 0)

    @property
    def recurrent_values(self) -> int:
        """Values per token of a layer without attention, where one in float32 counts twice."""
        convs = [part.size for layout in self.kinds for name, parts in layout if name == "conv" for part in parts]
        conv = max((size[0] * (4 + 2 * size[-1]) for size in convs), default=0)
        return conv + (self.delta.n_values if self.delta is not None else 0)

    @property
    def cached_values(self) -> int:
        """Values per token and layer that generation caches, of the largest layer."""
        return 2 * (self.q_rows if self.latent else self.kv_rows)

    @property
    def state_values(self) -> int:
        """Values per layer of the delta rule's state."""
        return self.delta.v_heads * self.delta.k_dim * self.delta.v_dim if self.delta is not None else 0

    def has(self, parameter: str) -> bool:
        """Whether some layer has this parameter."""
        return any(parameter == name for layout in self.kinds for name, _ in layout)


def _elements(layout: Layout, share: float) -> int:
    parts = ((share if name.startswith("experts") else 1.0, part) for name, parts in layout for part in parts)
    return round(sum(share * prod(part.size) for share, part in parts if len(part.size) > 1))


_ROOT, _PARTIAL, _LOCAL, _MIXED, _LATE, _ROUTED = "root", "partial", "local", "mixed", "late", "routed"
_UNIT = "unit"

FAMILIES: Mapping[str, frozenset[str]] = {
    **dict.fromkeys(
        ("llama", "mistral", "ministral", "ministral3", "smollm3", "qwen2", "qwen3", "seed_oss", "granite", "olmo2",
         "olmo3", "arcee", "ernie4_5", "starcoder2", "cohere", "jais2", "lfm2"), frozenset(),
    ),
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text"), frozenset((_ROOT,))),
    **dict.fromkeys(("phi3", "glm", "glm4", "nemotron", "qwen3_5_text"), frozenset((_PARTIAL,))),
    "cohere2": frozenset((_LOCAL,)),
    "exaone4": frozenset((_MIXED,)),
    "hunyuan_v1_dense": frozenset((_LATE,)),
    **dict.fromkeys(
        ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v2", "deepseek_v3", "olmoe", "granitemoe", "ernie4_5_moe",
         "dots1", "mellum", "lfm2_moe"), frozenset((_ROUTED,)),
    ),
    **dict.fromkeys(("glm4_moe", "minimax_m2", "qwen3_5_moe_text", "qwen3_next"), frozenset((_ROUTED, _PARTIAL))),
    "hunyuan_v1_moe": frozenset((_ROUTED, _LATE)),
    "exaone_moe": frozenset((_ROUTED, _MIXED)),
    "gemma4_text": frozenset((_ROUTED, _ROOT, _UNIT)),
}  # fmt: skip
"""Supported rows, and what neither their tensors nor their keys state: `root`, embeddings are multiplied by the square
root of the width; `partial`, heads may be partially rotated; `local`, only sliding-window layers are rotated; `mixed`,
the same if the network has a window; `late`, heads are normalized after the rotation; `routed`, experts, if the
config does not turn them off; `unit`, values are normalized, and scores not scaled.
"""

_ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "relu2": "relu2",
}  # fmt: skip


def shape_of(h: Hyperparams, row: Architecture | None, present: Collection[str] = ()) -> Shape:
    """The network described by the hyper-parameters and their row of the architecture table.

    `present` are the names of the checkpoint's tensors, for families that spell them in several ways. Raises
    UnsupportedError for an unsupported architecture or feature, RefusedError for missing sizes.
    """
    if row is None or row.id not in FAMILIES:
        raise UnsupportedError(
            f"architecture {row.id if row else h.architecture!r} is not supported for training",
            hint="docs/training.md lists those that are; as a teacher, any decoder of llama.cpp runs: apr teacher FILE "
            "--data D -o DIR, then apr distill --teacher-logprobs DIR --student S",
        )
    words, sizes = FAMILIES[row.id], _sizes(h)
    if h.rms_norm_eps is None:
        raise RefusedError("the model lacks rms_norm_eps", hint="set it first: apr stamp FILE --set rms_norm_eps=VALUE")
    for feature in ("use_bidirectional_attention", "clip_qkv"):
        if h.extra.get(feature) not in (None, False, "vision"):
            raise UnsupportedError(f"{feature} of a {row.id} is not supported for training")
    outer = layout_of(h, row, None, present)
    if "head_bias" in dict(outer):
        raise UnsupportedError(f"the bias of the output head of a {row.id} is not supported")
    if not h.tied and "head" not in dict(outer):
        raise RefusedError(f"a {h.hf_architecture} has no output head", hint="use a causal language model")
    layers = [layout_of(h, row, n, present) for n in range(sizes["n_layers"])]
    kinds = tuple(dict.fromkeys(layers))
    latent = _latent(h) if any(name == "kv_a" for name, _ in kinds[0]) else None
    if latent is not None:
        sizes |= {"head_dim": latent.nope_dim + latent.rope_dim, "n_kv_heads": sizes["n_heads"]}
    if wide := [part.size[-1] for kind in kinds for name, parts in kind if name == "down" for part in parts]:
        sizes["d_ffn"] = max(wide)
    heads = Heads(sizes["n_heads"], sizes["n_kv_heads"], sizes["head_dim"])
    full = _full_heads(h, heads)
    windows, ropes, layer_ropes = _layers(h, row, full.size, latent)
    query = next(t for t in row.tensors if t.gguf[:1] in (("blk.{n}.attn_q.weight",), ("blk.{n}.attn_qkv.weight",)))
    return Shape(
        architecture=row.id,
        **sizes,
        norm_eps=h.rms_norm_eps,
        norm_centred=any(key.gguf == "attention.layer_norm_epsilon" for key in row.keys),
        norm_plus_one=any(t.value == "plus_one" for t in row.tensors),
        tied=bool(h.tied),
        embed_scale=math.sqrt(sizes["d_model"]) if _ROOT in words else _factor(h, "embedding_multiplier"),
        residual_scale=_factor(h, "residual_multiplier"),
        logit_scale=_factor(h, "logit_scale") / _factor(h, "logits_scaling"),
        act=_activation(h, row),
        gated=any("ffn_gate" in name or t.dims == ("2*ffn,hidden",) for t in row.tensors for name in t.gguf),
        qk_norm_after_rope=_LATE in words,
        attn_scale=1.0 if _UNIT in words else _attn_scale(h, sizes["head_dim"], latent),
        attn_softcap=as_float(h.extra.get("attn_logit_softcapping"), "attn_logit_softcapping") or 0.0,
        logit_softcap=as_float(h.extra.get("final_logit_softcapping"), "final_logit_softcapping") or 0.0,
        windows=windows,
        ropes=ropes,
        layer_ropes=layer_ropes,
        adjacent=row.rope_type == 0 and not query.order and h.extra.get("rope_interleave") is not False,
        experts=experts_of(h, row) if any(name == "router" for kind in kinds for name, _ in kind) else None,
        latent=latent,
        outer=outer,
        kinds=kinds,
        layer_kinds=tuple(kinds.index(layout) for layout in layers),
        layer_heads=tuple(heads if window else full for window in windows),
        kv_layers=_kv_layers(h, sizes["n_layers"]),
        value_norm=_UNIT in words,
        attn_gated=query.dims == ("2*q,hidden",),
        delta=_delta(h, row) if any(name == "decay" for kind in kinds for name, _ in kind) else None,
    )


def _full_heads(h: Hyperparams, heads: Heads) -> Heads:
    """The heads of layers with full attention."""
    found = (as_int(h.extra.get(key), key) for key in ("num_global_key_value_heads", "global_head_dim"))
    n_kv, size = (given or usual for given, usual in zip(found, heads[1:], strict=True))
    return Heads(heads.n, n_kv, size)


def _kv_layers(h: Hyperparams, n_layers: int) -> tuple[int, ...]:
    """The last layers use keys and values of the last earlier layer of the same type."""
    stated = h.extra.get("layer_types")
    kinds = stated if isinstance(stated, list) else []
    first = n_layers - (as_int(h.extra.get("num_kv_shared_layers"), "num_kv_shared_layers") or 0)
    found = list(range(n_layers))
    for n in range(first, n_layers):
        own = [m for m in range(first) if kinds[m : m + 1] == kinds[n : n + 1]]
        if not own:
            raise CorruptError(f"no earlier layer has keys and values for layer {n}")
        found[n] = own[-1]
    return tuple(found)


def _factor(h: Hyperparams, key: str) -> float:
    value = as_float(h.extra.get(key), key)
    if value == 0:
        raise CorruptError(f"{key} is 0")
    return 1.0 if value is None else value


def _attn_scale(h: Hyperparams, head_dim: int, latent: Latent | None) -> float:
    if (given := as_float(h.extra.get("attention_multiplier"), "attention_multiplier")) is not None:
        return given
    scalar = as_float(h.extra.get("query_pre_attn_scalar"), "query_pre_attn_scalar")
    stretched = yarn_scale(scaling_of(h)) if latent is not None else 1.0
    return stretched / math.sqrt(scalar or head_dim)


def _latent(h: Hyperparams) -> Latent:
    keys = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    return Latent(*(as_int(h.extra.get(key), key) or 0 for key in keys))


def _delta(h: Hyperparams, row: Architecture) -> DeltaNet:
    """The sizes of its layers; one projection of Q, K, V and the gate is grouped by the heads of keys."""
    keys = ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")
    grouped = any({"blk.{n}.attn_qkv.weight", "blk.{n}.attn_gate.weight"} <= {*t.gguf} for t in row.tensors)
    k_heads, v_heads, k_dim, v_dim = (as_int(h.extra.get(key), key) or 0 for key in keys)
    found = DeltaNet(k_heads, v_heads, k_dim, v_dim, grouped)
    if found.v_heads % found.k_heads:
        raise CorruptError(f"{found.v_heads} heads of values cannot share {found.k_heads} heads of keys")
    return found


_SIZES = {
    "n_layers": "num_layers",
    "d_model": "hidden_size",
    "n_heads": "num_heads",
    "n_kv_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "d_ffn": "intermediate_size",
    "vocab_rows": "vocab_size",
}


def _sizes(h: Hyperparams) -> dict[str, int]:
    found: dict[str, int] = {name: getattr(h, field) for name, field in _SIZES.items()}
    found["d_ffn"] = found["d_ffn"] or h.moe_intermediate_size or 0  # a network may have no dense layer
    missing = [_SIZES[name] for name, value in found.items() if not value]
    if missing:
        raise RefusedError(
            f"the model lacks {', '.join(missing)}",
            hint=f"set it first: apr stamp FILE --set {missing[0]}=VALUE -o OUT.apr",
        )
    if any(value < 1 for value in found.values()) or found["n_heads"] % found["n_kv_heads"]:
        raise CorruptError(f"{found['n_heads']} heads cannot share {found['n_kv_heads']} key-value heads")
    return found


def _activation(h: Hyperparams, row: Architecture) -> str:
    constants = {key.hf[0]: key.constant for key in row.keys if key.hf}
    name = "hidden_activation" if "hidden_activation" in constants else "hidden_act"
    word = h.extra.get(name) or constants.get(name) or row.defaults.get("", {}).get(name, "silu")  # LFM2 has no key
    if word not in _ACTIVATIONS:
        raise UnsupportedError(
            f"activation {word!r:.40} is not supported for training", hint=f"supported: {', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[str(word)]


_RECURRENT = ("conv", "linear_attention")
"""Types of layers without attention."""


def _layers(
    h: Hyperparams, row: Architecture, head_dim: int, latent: Latent | None
) -> tuple[tuple[int, ...], tuple[Rope, ...], tuple[int, ...]]:
    """(windows, ropes, index of a rope of each layer); `head_dim` is that of full attention."""
    kinds, n_layers, scaling = h.extra.get("layer_types"), h.num_layers or 0, scaling_of(h)
    has_window = any("sliding_window" in key.hf for key in row.keys)
    window = (active_window(h) or 0) if has_window else 0
    if not isinstance(kinds, list):
        kinds = ["sliding_attention" if window else "full_attention"] * n_layers
    if len(kinds) < n_layers or set(kinds) - {"sliding_attention", "full_attention", *_RECURRENT}:
        raise UnsupportedError(f"layers of type {sorted(set(map(str, kinds)))} are not supported for training")
    sliding = [kind == "sliding_attention" for kind in kinds[:n_layers]]
    words, dim = FAMILIES[row.id], latent.rope_dim if latent is not None else rope.rotary_dim(h) or 0
    if is_proportional := scaling.get("rope_type") == "proportional":
        dim = head_dim
    if dim % 2 or dim < 2 or (latent is None and dim != head_dim and _PARTIAL not in words):
        raise UnsupportedError(f"partial RoPE on heads of {head_dim} values is not supported for training")
    ropes = [rope_of(h, h.rope_theta or DEFAULT_THETA, scaling, dim)]
    local = as_mapping(as_mapping(h.extra.get("rope_layers")).get("sliding_attention"))
    if local and row.nested_rope:
        rest = {key: value for key, value in local.items() if key != "rope_theta"}
        theta, size = as_float(local.get("rope_theta"), "rope_theta"), h.head_dim if is_proportional else dim
        ropes.append(rope_of(h, theta or DEFAULT_THETA, rest, size or dim))
    layer_ropes = [len(ropes) - 1 if slides else 0 for slides in sliding]
    rotated = h.extra.get("no_rope_layers")
    if _LOCAL in words or (_MIXED in words and window):
        rotated = [slides and window > 0 for slides in sliding]
    if isinstance(rotated, list) and len(rotated) >= n_layers:  # 1 where a layer is rotated, despite the name
        layer_ropes = [index if rotated[i] else -1 for i, index in enumerate(layer_ropes)]
    spans = {"sliding_attention": window, **dict.fromkeys(_RECURRENT, NO_ATTENTION)}
    return tuple(spans.get(str(kind), 0) for kind in kinds[:n_layers]), tuple(ropes), tuple(layer_ropes)
