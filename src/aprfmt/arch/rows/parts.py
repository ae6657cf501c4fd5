"""Building blocks of table rows: the tensors and keys that most families share. Data only, but for prefixes."""

from __future__ import annotations

from dataclasses import fields, replace
from operator import attrgetter
from typing import Any

from aprfmt.arch.row import HEAD, OPTIONAL, REQUIRED, Key, TensorRow

# What follows `hf` and `gguf`. A thousand rows are made whenever a model is looked at: `replace` is too slow.
_rest = attrgetter(*(field.name for field in fields(TensorRow)[2:]))

PAIRS = {"q": ("swap:heads,2,head_dim/2",), "kv": ("swap:kv_heads,2,head_dim/2",)}
"""Row orders of llama's Q and K: Hugging Face rotates halves of a head against each other, GGUF neighbours."""


def tensor(hf: str, gguf: str, dims: str, need: str = REQUIRED, **more: Any) -> TensorRow:
    """One tensor that is the same on both sides, but for what `more` fields of TensorRow say."""
    return TensorRow((hf,), (gguf,), (dims,), need, **more)


def linear(
    hf: str, gguf: str, dims: str, bias: str | None = None, need: str = REQUIRED, **more: Any
) -> tuple[TensorRow, ...]:
    """Weight [out, in] of a linear layer and, where `bias` names its need, the bias [out]."""
    weight = tensor(f"{hf}.weight", f"{gguf}.weight", dims, need, **more)
    if bias is None:
        return (weight,)
    kept = {key: value for key, value in more.items() if key in ("order", "layers")}
    return weight, tensor(f"{hf}.bias", f"{gguf}.bias", dims.partition(",")[0], bias, **kept)


def norm(
    hf: str, gguf: str, dim: str = "hidden", bias: str | None = None, need: str = REQUIRED, **more: Any
) -> tuple[TensorRow, ...]:
    """Weight of a normalisation and, where `bias` names its need, the bias."""
    return linear(hf, gguf, dim, bias, need, **more)


def embedding(hf: str = "model.embed_tokens") -> TensorRow:
    """The token embedding."""
    return tensor(f"{hf}.weight", "token_embd.weight", "vocab,hidden")


def final_norm(hf: str = "model.norm", bias: str | None = None, **more: Any) -> tuple[TensorRow, ...]:
    """The normalisation before the head."""
    return norm(hf, "output_norm", bias=bias, **more)


def head(hf: str = "lm_head", bias: str | None = None) -> tuple[TensorRow, ...]:
    """The output head, absent where it is the embedding."""
    return linear(hf, "output", "vocab,hidden", bias, HEAD)


def attention(
    qkv_bias: str | None = None,
    o_bias: str | None = None,
    *,
    permuted: bool = False,
    qk_norm: str = "",
    hf: str = "self_attn",
    o_proj: str = "o_proj",
    **more: Any,
) -> tuple[TensorRow, ...]:
    """Separate Q, K, V and output projections; `permuted` for llama's rotary order, `qk_norm` its length in words."""
    q: dict[str, Any] = {"order": PAIRS["q"]} if permuted else {}
    k: dict[str, Any] = {"order": PAIRS["kv"]} if permuted else {}
    norms = (
        (
            *norm(f"{hf}.q_norm", "attn_q_norm", qk_norm, **more),
            *norm(
                f"{hf}.k_norm",
                "attn_k_norm",
                qk_norm.replace("q", "kv") if qk_norm == "q" else qk_norm,
                **more,
            ),
        )
        if qk_norm
        else ()
    )
    return (
        *linear(f"{hf}.q_proj", "attn_q", "q,hidden", qkv_bias, **q, **more),
        *linear(f"{hf}.k_proj", "attn_k", "kv,hidden", qkv_bias, **k, **more),
        *linear(f"{hf}.v_proj", "attn_v", "kv,hidden", qkv_bias, **more),
        *linear(f"{hf}.{o_proj}", "attn_output", "hidden,q", o_bias, **more),
        *norms,
    )


def gated_mlp(bias: str | None = None, *, hf: str = "mlp", **more: Any) -> tuple[TensorRow, ...]:
    """Gate, up and down projections of width ffn."""
    return (
        *linear(f"{hf}.gate_proj", "ffn_gate", "ffn,hidden", bias, **more),
        *linear(f"{hf}.up_proj", "ffn_up", "ffn,hidden", bias, **more),
        *linear(f"{hf}.down_proj", "ffn_down", "hidden,ffn", bias, **more),
    )


def experts(
    hf: str = "mlp.experts.{e}.",
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    **more: Any,
) -> tuple[TensorRow, ...]:
    """One gate, up and down projection an expert, of width moe_ffn; GGUF stacks them."""
    gate, up, down = names
    return (
        tensor(f"{hf}{gate}.weight", "ffn_gate_exps.weight", "moe_ffn,hidden", **more),
        tensor(f"{hf}{up}.weight", "ffn_up_exps.weight", "moe_ffn,hidden", **more),
        tensor(f"{hf}{down}.weight", "ffn_down_exps.weight", "hidden,moe_ffn", **more),
    )


def fused_experts(gate_up: str, down: str, **more: Any) -> tuple[TensorRow, ...]:
    """All experts in two tensors, gate over up: [experts, 2 moe_ffn, hidden] and [experts, hidden, moe_ffn]."""
    stacked = "experts,moe_ffn,hidden"
    return (
        replace(
            tensor(gate_up, "", "experts,2*moe_ffn,hidden", **more),
            gguf=("ffn_gate_exps.weight", "ffn_up_exps.weight"),
            gguf_dims=(stacked, stacked),
            order=("deal:experts,moe_ffn,moe_ffn",),
        ),
        tensor(down, "ffn_down_exps.weight", "experts,hidden,moe_ffn", **more),
    )


def block(*rows: TensorRow, hf: str = "model.layers.{n}.", gguf: str = "blk.{n}.") -> tuple[TensorRow, ...]:
    """Rows of a layer: their names get the prefixes."""
    return tuple(
        TensorRow(tuple(hf + name for name in row.hf), tuple(gguf + name for name in row.gguf), *_rest(row))
        for row in rows
    )


def optional(*rows: TensorRow) -> tuple[TensorRow, ...]:
    """The rows, none of them required."""
    return tuple(replace(row, need=OPTIONAL) for row in rows)


DIMS: tuple[Key, ...] = (
    Key("block_count", ("num_hidden_layers", "n_layer", "num_layers", "n_layers"), field="num_layers"),
    Key(
        "context_length", ("max_position_embeddings", "n_positions", "n_ctx"), field="max_position_embeddings"
    ),
    Key("embedding_length", ("hidden_size", "n_embd", "n_embed", "d_model"), field="hidden_size"),
    Key("feed_forward_length", ("intermediate_size", "n_inner", "ffn_dim"), field="intermediate_size"),
    Key("attention.head_count", ("num_attention_heads", "n_head", "num_heads", "n_heads"), field="num_heads"),
)
"""Sizes of every transformer."""

GROUPED = Key("attention.head_count_kv", ("num_key_value_heads",), field="num_kv_heads")
RMS_EPS = Key("attention.layer_norm_rms_epsilon", ("rms_norm_eps",), "f32", field="rms_norm_eps")
LAYER_EPS = Key(
    "attention.layer_norm_epsilon", ("layer_norm_eps", "layer_norm_epsilon"), "f32", field="rms_norm_eps"
)
ROPE = Key("rope", via="rope")
"""Stands for the rope keys: freq_base, scaling.*, dimension_sections, the sliding layers' own; see arch.rope."""
ROPE_DIM = Key("rope.dimension_count", via="rotary_dim")
"""Rotated values of a head: head_dim x partial_rotary_factor."""
HEAD_DIM = Key("attention.key_length", ("head_dim",), field="head_dim", via="head_dim")
"""Stands for key_length and value_length; written where the config names a head size or it is not hidden / heads."""
VOCAB = Key("vocab_size", ("vocab_size",), field="vocab_size")
WINDOW = Key("attention.sliding_window", ("sliding_window",), via="window")
PAD = Key("", ("pad_token_id",), via="pad_token")
"""For families whose configs name a padding token where they are silent; a GGUF keeps it with the tokenizer."""
SLIDING_LAYERS = Key("attention.sliding_window_pattern", ("layer_types",), "bool[]", via="sliding_layers")
EXPERTS: tuple[Key, ...] = (
    Key("expert_count", ("num_experts", "num_local_experts", "n_routed_experts"), field="num_experts"),
    Key("expert_used_count", ("num_experts_per_tok", "num_experts_per_token"), field="num_experts_per_tok"),
    Key("expert_feed_forward_length", ("moe_intermediate_size",), field="moe_intermediate_size"),
)

DECODER: tuple[Key, ...] = (*DIMS, GROUPED, ROPE, RMS_EPS, HEAD_DIM)
"""Keys of a plain decoder with grouped-query attention, rotary positions and RMS norms."""


def rename(keys: tuple[Key, ...], **hf: tuple[str, ...] | str) -> tuple[Key, ...]:
    """`keys` with other config.json names for some fields: rename(DIMS, hidden_size="n_embd")."""
    names = {name: (value,) if isinstance(value, str) else value for name, value in hf.items()}
    return tuple(replace(key, hf=names[key.field]) if key.field in names else key for key in keys)


def hf_names(stem: str, model_type: str, *more: str) -> dict[str, Any]:
    """Fields of an Architecture whose classes transformers calls after `stem` ("Qwen2"), `more` stems beside it."""
    stems = (stem, *more)
    return {
        "hf_class": f"{stem}ForCausalLM",
        "model_type": model_type,
        "hf_classes": tuple(f"{name}{end}" for name in stems for end in ("ForCausalLM", "Model")),
        "bare_classes": tuple(f"{name}Model" for name in stems),
        "model_types": (model_type,),
    }


def flag(name: str) -> Key:
    """A switch of config.json for which a GGUF has no key: its tensors tell."""
    return Key("", (name,), "bool")


def must_be(name: str, value: Any, kind: str = "str") -> Key:
    """A config.json key for which llama.cpp's network has one value only; another cannot become a GGUF."""
    return Key("", (name,), kind, constant=value)


def decoder(*attention_rows: TensorRow, mlp: tuple[TensorRow, ...] = ()) -> tuple[TensorRow, ...]:
    """A decoder that normalises what attention and MLP take; the MLP is a gated one where `mlp` is empty."""
    return (
        embedding(),
        *block(
            *norm("input_layernorm", "attn_norm"),
            *attention_rows,
            *norm("post_attention_layernorm", "ffn_norm"),
            *(mlp or gated_mlp()),
        ),
        *final_norm(),
        *head(),
    )


SILU = must_be("hidden_act", "silu")
"""The activation of most gated MLPs."""

TEXT_PREFIXES: tuple[tuple[str, str], ...] = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.text_model.", "model."),
)
"""How multimodal checkpoints begin the names of their language model."""
TOWERS: tuple[str, ...] = (
    "vision_tower.", "model.vision_tower.", "vision_model.", "model.vision_model.", "visual.", "model.visual.",
    "audio_tower.", "model.audio_tower.", "multi_modal_projector.", "model.multi_modal_projector.",
    "mm_projector.", "model.mm_projector.", "connector.", "model.connector.", "image_newline",
    "model.image_newline", "embed_vision.", "model.embed_vision.", "embed_audio.", "model.embed_audio.",
)  # fmt: skip
"""How the names of their other parts begin."""
MULTIMODAL: dict[str, Any] = {"prefixes": TEXT_PREFIXES, "left_out": TOWERS}
"""Fields of an Architecture whose network is the language model of multimodal ones too."""
