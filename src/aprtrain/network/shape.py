"""What a decoder network is made of, as numbers: everything that `decoder.Decoder` has to know."""

from __future__ import annotations

import math
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from aprfmt.arch import rope
from aprfmt.arch.fields import as_float, as_int
from aprfmt.arch.hparams import active_window
from aprfmt.arch.hyperparams import Hyperparams
from aprfmt.arch.rope import DEFAULT_THETA, scaling_of
from aprfmt.arch.row import HEAD, OPTIONAL, REQUIRED, Architecture, TensorRow
from aprfmt.errors import CorruptError, RefusedError, UnsupportedError
from aprfmt.types import Json


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotation of one kind of layers.

    Attributes:
        inv_freq: radians a position, [R], each a float32 number.
        factor: what cosines and sines are multiplied with (yarn's attention factor; 1 for the others).
    """

    inv_freq: tuple[float, ...]
    factor: float = 1.0


@dataclass(frozen=True, slots=True)
class Shape:
    """A network of the llama kind.

    Attributes:
        architecture: row of aprfmt's architecture table.
        n_layers, d_model, n_heads, n_kv_heads, head_dim, d_ffn: sizes.
        vocab_rows: rows of the embedding; at least the tokens of the tokenizer.
        norm_eps: added to the mean square in RMS norms.
        tied: whether the output head is the embedding.
        qkv_bias, o_bias, mlp_bias: which linear layers have biases.
        qk_norm: whether every head of Q and K is normalised before the rotation.
        norm_plus_one: whether norms scale by 1 + weight.
        post_norms: whether what attention and MLP give is normalised too, before it is added.
        embed_scale: what embeddings are multiplied with.
        act: activation of the MLP's gate, "silu" or "gelu_tanh".
        attn_scale: what attention scores are multiplied with.
        attn_softcap, logit_softcap: c of c tanh(x / c) over scores and logits; 0 for none.
        windows: positions that each layer attends to, its own counted; 0 for all before it.
        ropes: the kinds of rotation that occur.
        layer_ropes: index into `ropes` of each layer; -1 for a layer without rotation.
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
    tied: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    norm_plus_one: bool
    post_norms: bool
    embed_scale: float
    act: str
    attn_scale: float
    attn_softcap: float
    logit_softcap: float
    windows: tuple[int, ...]
    ropes: tuple[Rope, ...]
    layer_ropes: tuple[int, ...]

    @property
    def q_rows(self) -> int:
        """Rows of the query projection."""
        return self.n_heads * self.head_dim

    @property
    def kv_rows(self) -> int:
        """Rows of the key projection, and of the value projection."""
        return self.n_kv_heads * self.head_dim

    @property
    def n_layer_params(self) -> int:
        """Elements of the matrices of one layer."""
        attention = self.d_model * (2 * self.q_rows + 2 * self.kv_rows)
        return attention + 3 * self.d_model * self.d_ffn

    @property
    def n_params(self) -> int:
        """Elements of all matrices; the norms and biases are not counted."""
        heads = 1 if self.tied else 2
        return self.n_layers * self.n_layer_params + heads * self.vocab_rows * self.d_model


FAMILIES: Mapping[str, str] = {
    "llama": "hidden_act",
    "mistral": "hidden_act",
    "ministral": "hidden_act",
    "smollm3": "hidden_act",
    "qwen2": "hidden_act",
    "qwen3": "hidden_act",
    "seed_oss": "hidden_act",
    "gemma": "hidden_act",
    "gemma2": "hidden_activation",
    "gemma3_text": "hidden_activation",
}
"""Rows that can be trained, and the config.json key of their activation."""

_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}


def shape_of(h: Hyperparams, row: Architecture | None) -> Shape:
    """The network that the hyper-parameters and their row of the architecture table describe.

    Raises UnsupportedError for an architecture or feature that cannot be trained, RefusedError for missing sizes.
    """
    if row is None or row.id not in FAMILIES:
        raise UnsupportedError(
            f"architecture {row.id if row else h.architecture!r} cannot be trained or distilled",
            hint=f"these can: {', '.join(FAMILIES)}",
        )
    sizes = _sizes(h)
    if h.rms_norm_eps is None:
        raise RefusedError(
            "the model does not give its rms_norm_eps", hint="set it first: apr stamp FILE --set rms_norm_eps=VALUE"
        )
    for feature in ("use_bidirectional_attention", "num_local_experts", "clip_qkv"):
        if h.extra.get(feature):
            raise UnsupportedError(f"{feature} of this {row.id} cannot be trained")
    windows, ropes, layer_ropes = _layers(h, row, sizes["n_layers"])
    tensors = {name: t for t in row.tensors for name in t.gguf}
    scalar = as_float(h.extra.get("query_pre_attn_scalar"), "query_pre_attn_scalar")
    norm = tensors["blk.{n}.attn_norm.weight"]
    return Shape(
        architecture=row.id,
        **sizes,
        norm_eps=h.rms_norm_eps,
        tied=bool(h.tied),
        qkv_bias=_has(tensors, "attn_q.bias", h),
        o_bias=_has(tensors, "attn_output.bias", h),
        mlp_bias=_has(tensors, "ffn_gate.bias", h),
        qk_norm="blk.{n}.attn_q_norm.weight" in tensors,
        norm_plus_one=norm.value == "plus_one",
        post_norms="blk.{n}.post_ffw_norm.weight" in tensors,
        embed_scale=math.sqrt(sizes["d_model"]) if row.id.startswith("gemma") else 1.0,
        act=_activation(h, row),
        attn_scale=(scalar or sizes["head_dim"]) ** -0.5,
        attn_softcap=as_float(h.extra.get("attn_logit_softcapping"), "attn_logit_softcapping") or 0.0,
        logit_softcap=as_float(h.extra.get("final_logit_softcapping"), "final_logit_softcapping") or 0.0,
        windows=windows,
        ropes=ropes,
        layer_ropes=layer_ropes,
    )


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
    missing = [_SIZES[name] for name, value in found.items() if not value]
    if missing:
        raise RefusedError(
            f"the model does not give its {', '.join(missing)}",
            hint=f"set it first: apr stamp FILE --set {missing[0]}=VALUE -o OUT.apr",
        )
    if any(value < 1 for value in found.values()) or found["n_heads"] % found["n_kv_heads"]:
        raise CorruptError(f"{found['n_heads']} heads cannot share {found['n_kv_heads']} key-value heads")
    return found


def _has(tensors: Mapping[str, TensorRow], name: str, h: Hyperparams) -> bool:
    """Whether the network has the tensor: always, or where a config key says so."""
    row = tensors.get(f"blk.{{n}}.{name}")
    if row is None or row.need in (OPTIONAL, HEAD):
        return False
    return row.need == REQUIRED or bool(h.extra.get(row.need))


def _activation(h: Hyperparams, row: Architecture) -> str:
    key = FAMILIES[row.id]
    usual = "gelu_pytorch_tanh" if row.id.startswith("gemma") else "silu"
    word = h.extra.get(key) or row.defaults.get("", {}).get(key) or usual
    if word not in _ACTIVATIONS:
        raise UnsupportedError(
            f"activation {word!r:.40} cannot be trained", hint=f"known are {', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[word]


def _layers(
    h: Hyperparams, row: Architecture, n_layers: int
) -> tuple[tuple[int, ...], tuple[Rope, ...], tuple[int, ...]]:
    """(windows, ropes, index of a rope of each layer)."""
    kinds = h.extra.get("layer_types")
    has_window = any("sliding_window" in key.hf for key in row.keys)
    window = (active_window(h) or 0) if has_window else 0
    if not isinstance(kinds, list):
        kinds = ["sliding_attention" if window else "full_attention"] * n_layers
    if len(kinds) < n_layers or set(kinds) - {"sliding_attention", "full_attention"}:
        raise UnsupportedError(f"layers of the kinds {sorted(set(map(str, kinds)))} cannot be trained")
    sliding = [kind == "sliding_attention" for kind in kinds[:n_layers]]
    ropes = [_rope_of(h, h.rope_theta or DEFAULT_THETA, scaling_of(h))]
    local = _mapping(_mapping(h.extra.get("rope_layers")).get("sliding_attention"))
    if local and row.nested_rope:
        rest = {key: value for key, value in local.items() if key != "rope_theta"}
        ropes.append(_rope_of(h, as_float(local.get("rope_theta"), "rope_theta") or DEFAULT_THETA, rest))
    layer_ropes = [len(ropes) - 1 if slides else 0 for slides in sliding]
    rotated = h.extra.get("no_rope_layers")
    if isinstance(rotated, list) and len(rotated) >= n_layers:  # 1 where a layer is rotated, despite the name
        layer_ropes = [index if rotated[i] else -1 for i, index in enumerate(layer_ropes)]
    return tuple(window if slides else 0 for slides in sliding), tuple(ropes), tuple(layer_ropes)


_SCALINGS = ("default", "dynamic", "linear", "llama3", "yarn")


def _rope_of(h: Hyperparams, theta: float, scaling: Mapping[str, object]) -> Rope:
    """The rotation at base `theta` under the `scaling` dict of a config.json ({} for none).

    Raises UnsupportedError for a kind of scaling whose frequencies depend on the length of the text.
    """
    dim = h.head_dim or 0
    if rope.rotary_dim(h) != dim or dim % 2 or dim < 2:
        raise UnsupportedError(f"heads of {dim} values rotated in part cannot be trained")
    kind = str(scaling.get("rope_type", "default")).lower()
    if kind not in _SCALINGS or (kind == "dynamic" and scaling.get("alpha")):
        raise UnsupportedError(
            f"rope scaling {kind!r} cannot be trained", hint=f"known are {', '.join(_SCALINGS)} (dynamic without alpha)"
        )
    # Computed in float32 as transformers does it, so that long positions give the same angles.
    exponents = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
    inv_freq, factor = 1.0 / (theta**exponents), 1.0
    # `dynamic` changes nothing within the positions that a network is made for.
    if kind == "linear":
        inv_freq = inv_freq / _number(scaling, "factor", 1.0)
    elif kind == "llama3":
        factors = rope.llama3_factors(theta, dim, scaling, h.max_position_embeddings)
        inv_freq = inv_freq / torch.tensor(factors, dtype=torch.float32)
    elif kind == "yarn":
        inv_freq, factor = _yarn(h, theta, scaling, inv_freq)
    return Rope(tuple(inv_freq.tolist()), factor)


def _yarn(h: Hyperparams, theta: float, scaling: Mapping[str, object], inv_freq: Tensor) -> tuple[Tensor, float]:
    """Frequencies and attention factor of yarn (Peng et al., arXiv 2309.00071, section 3.2).

    Slow pairs are stretched, fast ones are not. A pair turns r times within the original context; from `beta_fast`
    turns on it keeps its frequency f, up to `beta_slow` it gets f / factor, between them a mixture that is linear in
    the number of the pair.
    """
    original = rope.original_context(h, scaling) or 1
    factor = _number(scaling, "factor", 0.0) or (h.max_position_embeddings or original) / original
    dim = 2 * len(inv_freq)

    def pair_of(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = pair_of(_number(scaling, "beta_fast", 32.0))
    high = pair_of(_number(scaling, "beta_slow", 1.0))
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    pairs = torch.arange(len(inv_freq), dtype=torch.float32)
    slow = ((pairs - low) / (high - low if high != low else 0.001)).clamp(0, 1)
    attention = rope.attention_factor(h, "yarn", scaling)
    mixed = inv_freq / factor * slow + inv_freq * (1 - slow)
    return mixed, rope.mscale_of(factor) if attention is None else attention


def _number(scaling: Mapping[str, object], key: str, default: float) -> float:
    value = as_float(scaling.get(key), key)
    return default if value is None else value


def _mapping(value: object) -> Mapping[str, Json]:
    return value if isinstance(value, Mapping) else {}


_WIDTHS = {"hidden": "hidden_size", "ffn": "intermediate_size", "heads": "num_heads", "kv_heads": "num_kv_heads"}


def to_hparams(base: Hyperparams, layers: tuple[int, ...], widths: Mapping[str, int]) -> Hyperparams:
    """`base` for a network of those of its layers, in their new order, and of other widths by name.

    Lists that say something of each layer are taken along. The size of a head stays what it was.
    """
    old_layers = as_int(base.num_layers, "num_layers") or 0
    extra = deepcopy(base.extra)
    for key in ("layer_types", "no_rope_layers"):
        kinds = extra.get(key)
        if isinstance(kinds, list) and len(kinds) >= old_layers:
            extra[key] = [kinds[i] for i in layers]
    if "max_window_layers" in extra and "layer_types" in extra:
        extra["max_window_layers"] = len(layers)
    if base.head_dim:
        extra["head_dim"] = base.head_dim
    sizes: dict[str, Any] = {_WIDTHS[name]: size for name, size in widths.items()}
    return replace(base, num_layers=len(layers), extra=extra, **sizes)
