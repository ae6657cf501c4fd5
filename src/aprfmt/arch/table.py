"""The architecture table: a row a family, a line a tensor. A new family is a row here and in the tests."""

from __future__ import annotations

from dataclasses import dataclass

REQUIRED = "required"
OPTIONAL = "optional"
HEAD = "head"


@dataclass(frozen=True, slots=True)
class TensorRow:
    """One tensor of a family, by both of its names; `{n}` stands for the layer.

    Attributes:
        hf: name in a Hugging Face checkpoint.
        gguf: name in a GGUF.
        dims: row-major shape in words: vocab, hidden, ffn, head_dim, q and kv (heads or kv heads x head_dim).
        need: "required", "optional", "head" (required unless tied), or a config flag that makes it required.
        move: row move of arch.transforms from Hugging Face order to GGUF order, None where they agree.
        heads: field of Hyperparams that counts the heads of such a move.
    """

    hf: str
    gguf: str
    dims: tuple[str, ...]
    need: str = REQUIRED
    move: str | None = None
    heads: str | None = None


@dataclass(frozen=True, slots=True)
class Architecture:
    """A family of networks that share tensor names and hyper-parameter keys.

    Attributes:
        id: name of the row.
        gguf: `general.architecture` and the prefix of its keys.
        hf_class, model_type: what a config.json gets when the source names none.
        hf_classes, model_types: what is recognised.
        bare_classes: those of the classes that have no head (`LlamaModel`).
        rope_type: the value of APR's `rope_type` (0 or 2, as the reference assigns them).
        tensors: every tensor that may occur, in the order of a Hugging Face checkpoint's layers.
        gguf_only: GGUF tensors without a Hugging Face counterpart; they follow from the hyper-parameters.
        ignored: endings of Hugging Face tensors that hold no weights (buffers of old checkpoints).
        gguf_keys: hyper-parameters that only this family's converter writes.
    """

    id: str
    gguf: str
    hf_class: str
    model_type: str
    hf_classes: tuple[str, ...]
    bare_classes: tuple[str, ...]
    model_types: tuple[str, ...]
    rope_type: int
    tensors: tuple[TensorRow, ...]
    gguf_only: tuple[str, ...] = ("rope_freqs.weight",)
    ignored: tuple[str, ...] = (".rotary_emb.inv_freq",)
    gguf_keys: tuple[str, ...] = ()


_LAYER = "model.layers.{n}."


def _projection(hf: str, gguf: str, dims: tuple[str, str], need_bias: str | None) -> tuple[TensorRow, ...]:
    """The weight and, where the family knows one, the bias of a linear layer."""
    weight = TensorRow(f"{_LAYER}{hf}.weight", f"blk.{{n}}.{gguf}.weight", dims)
    if need_bias is None:
        return (weight,)
    return weight, TensorRow(f"{_LAYER}{hf}.bias", f"blk.{{n}}.{gguf}.bias", dims[:1], need_bias)


def _norm(hf: str, gguf: str, dim: str = "hidden") -> TensorRow:
    return TensorRow(f"{_LAYER}{hf}.weight", f"blk.{{n}}.{gguf}.weight", (dim,))


def _decoder(
    qkv_bias: str, o_bias: str | None, mlp_bias: str | None, qk_norm: bool = False
) -> tuple[TensorRow, ...]:
    """Tensors of a pre-norm decoder with gated MLP and grouped-query attention."""
    norms = (
        (
            _norm("self_attn.q_norm", "attn_q_norm", "head_dim"),
            _norm("self_attn.k_norm", "attn_k_norm", "head_dim"),
        )
        if qk_norm
        else ()
    )
    return (
        TensorRow("model.embed_tokens.weight", "token_embd.weight", ("vocab", "hidden")),
        _norm("input_layernorm", "attn_norm"),
        *_projection("self_attn.q_proj", "attn_q", ("q", "hidden"), qkv_bias),
        *_projection("self_attn.k_proj", "attn_k", ("kv", "hidden"), qkv_bias),
        *_projection("self_attn.v_proj", "attn_v", ("kv", "hidden"), qkv_bias),
        *_projection("self_attn.o_proj", "attn_output", ("hidden", "q"), o_bias),
        *norms,
        _norm("post_attention_layernorm", "ffn_norm"),
        *_projection("mlp.gate_proj", "ffn_gate", ("ffn", "hidden"), mlp_bias),
        *_projection("mlp.up_proj", "ffn_up", ("ffn", "hidden"), mlp_bias),
        *_projection("mlp.down_proj", "ffn_down", ("hidden", "ffn"), mlp_bias),
        TensorRow("model.norm.weight", "output_norm.weight", ("hidden",)),
        TensorRow("lm_head.weight", "output.weight", ("vocab", "hidden"), HEAD),
    )


def _permuted(rows: tuple[TensorRow, ...]) -> tuple[TensorRow, ...]:
    """The rows with the Q/K reordering of GGUF's llama: its rotary embedding pairs neighbours, not halves."""
    heads = {"q": "num_heads", "kv": "num_kv_heads"}
    return tuple(
        TensorRow(row.hf, row.gguf, row.dims, row.need, "rope_permute", heads[row.dims[0]])
        if "self_attn.q_proj." in row.hf or "self_attn.k_proj." in row.hf
        else row
        for row in rows
    )


ARCHITECTURES: dict[str, Architecture] = {
    row.id: row
    for row in (
        Architecture(
            id="llama",
            gguf="llama",
            hf_class="LlamaForCausalLM",
            model_type="llama",
            hf_classes=(
                "LlamaForCausalLM",
                "LLaMAForCausalLM",
                "LlamaModel",
                "MistralForCausalLM",
                "MistralModel",
            ),
            bare_classes=("LlamaModel", "MistralModel"),
            model_types=("llama", "mistral", "smollm", "smollm2"),
            rope_type=0,
            tensors=_permuted(_decoder("attention_bias", "attention_bias", "mlp_bias")),
            gguf_keys=("vocab_size", "rope.dimension_count"),
        ),
        Architecture(
            id="qwen2",
            gguf="qwen2",
            hf_class="Qwen2ForCausalLM",
            model_type="qwen2",
            hf_classes=("Qwen2ForCausalLM", "Qwen2Model"),
            bare_classes=("Qwen2Model",),
            model_types=("qwen2",),
            rope_type=2,
            tensors=_decoder(REQUIRED, None, None),
        ),
        Architecture(
            id="qwen3",
            gguf="qwen3",
            hf_class="Qwen3ForCausalLM",
            model_type="qwen3",
            hf_classes=("Qwen3ForCausalLM", "Qwen3Model"),
            bare_classes=("Qwen3Model",),
            model_types=("qwen3",),
            rope_type=2,
            tensors=_decoder("attention_bias", "attention_bias", None, qk_norm=True),
        ),
    )
}

_BY_CLASS = {name: row for row in ARCHITECTURES.values() for name in row.hf_classes}
_BY_MODEL_TYPE = {name: row for row in ARCHITECTURES.values() for name in row.model_types}
_BY_GGUF = {row.gguf: row for row in ARCHITECTURES.values()}


def find(
    *, hf_class: str | None = None, model_type: str | None = None, gguf: str | None = None
) -> Architecture | None:
    """The row that a class name, else a model type, else a GGUF architecture names; None if none is known."""
    for key, index in ((hf_class, _BY_CLASS), (model_type, _BY_MODEL_TYPE), (gguf, _BY_GGUF)):
        row = index.get(key) if key is not None else None
        if row is not None:
            return row
    return None
