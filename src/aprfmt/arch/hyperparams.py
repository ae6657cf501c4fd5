"""The hyper-parameters of a network, under one set of names, for all containers."""

from __future__ import annotations

from dataclasses import field

from aprfmt.light_dataclass import light_dataclass


@light_dataclass(slots=True)
class Hyperparams:
    """Dimensions and constants of a network; None if the source does not state them.

    Fields named like typed APR metadata fields have the same values. `extra` has everything else that the network
    needs, under Hugging Face config names: the row's `keys` ("a.b" is b of the object a; None if null differs from
    absence), the rope parameters (see arch.rope), `head_dim` if the source states it, lists of token ids, `text_of`
    (the model type of the multimodal model that contains the language model).

    Attributes:
        architecture: row id of arch.table ("llama", "qwen2", ...), or the source's own word if no row matches.
        hf_architecture: class name of the Hugging Face model, `LlamaForCausalLM`.
        hf_model_type: config.json's `model_type`.
        head_dim: explicit head size, or hidden_size / num_heads.
        rope_type: 0 adjacent pairs, 2 split halves (NeoX), as the rows of Q and K in Hugging Face order are rotated.
        tied: whether the output head is the embedding; None when unknown.
        bos_token_id, eos_token_id: first id; lists are in `extra`.
    """

    architecture: str | None = None
    hf_architecture: str | None = None
    hf_model_type: str | None = None
    hidden_size: int | None = None
    num_layers: int | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None
    vocab_size: int | None = None
    intermediate_size: int | None = None
    max_position_embeddings: int | None = None
    rope_theta: float | None = None
    rope_type: int | None = None
    rms_norm_eps: float | None = None
    head_dim: int | None = None
    num_experts: int | None = None
    num_experts_per_tok: int | None = None
    moe_intermediate_size: int | None = None
    tied: bool | None = None
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    extra: dict[str, object] = field(default_factory=dict)

    @property
    def plain_head_dim(self) -> int | None:
        """hidden_size / num_heads, the default head size."""
        return self.hidden_size // self.num_heads if self.hidden_size and self.num_heads else None


@light_dataclass(frozen=True, slots=True)
class HparamField:
    """A Hyperparams field and all its spellings.

    Attributes:
        name: attribute of Hyperparams, and typed key of APR metadata.
        gguf: key of a GGUF after the architecture's prefix.
        hf: config.json keys that any family may have, the current one first.
        aliases: further keys in APR metadata, in the reference's order.
        rare: config.json keys of single families, read if the class is unknown.
        kind: type in a GGUF, as in row.Key.
    """

    name: str
    gguf: str
    hf: tuple[str, ...]
    aliases: tuple[str, ...] = ()
    rare: tuple[str, ...] = ()
    kind: str = "u32"


FIELDS: tuple[HparamField, ...] = (
    HparamField("num_layers", "block_count", ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
          ("num_hidden_layers", "n_layers", "n_layer")),
    HparamField("max_position_embeddings", "context_length", ("max_position_embeddings", "n_positions", "n_ctx"),
          ("max_seq_len", "context_length", "n_ctx"), ("max_seq_len", "max_sequence_length", "seq_length")),
    HparamField("hidden_size", "embedding_length", ("hidden_size", "n_embd", "n_embed", "d_model"),
          ("hidden_dim", "d_model", "n_embd")),
    HparamField("intermediate_size", "feed_forward_length", ("intermediate_size", "n_inner", "ffn_dim"),
          ("ffn_dim", "intermediate_dim", "n_inner"), ("ffn_hidden_size", "d_ff")),
    HparamField("num_heads", "attention.head_count", ("num_attention_heads", "n_head", "num_heads", "n_heads"),
          ("num_attention_heads", "n_heads", "n_head")),
    HparamField("num_kv_heads", "attention.head_count_kv", ("num_key_value_heads",),
          ("num_key_value_heads", "n_kv_heads"), ("num_kv_heads", "n_kv_heads", "n_head_kv")),
    HparamField("rope_theta", "rope.freq_base", ("rope_theta",), kind="f32"),
    HparamField("rms_norm_eps", "attention.layer_norm_rms_epsilon", ("rms_norm_eps",), ("layer_norm_eps", "norm_eps"),
          ("layer_norm_epsilon", "layer_norm_eps", "norm_eps", "norm_epsilon"), kind="f32"),
    HparamField("num_experts", "expert_count", ("num_experts", "num_local_experts", "n_routed_experts")),
    HparamField("num_experts_per_tok", "expert_used_count", ("num_experts_per_tok", "num_experts_per_token")),
    HparamField("moe_intermediate_size", "expert_feed_forward_length", ("moe_intermediate_size",)),
    HparamField("head_dim", "attention.key_length", ("head_dim",)),
    HparamField("vocab_size", "vocab_size", ("vocab_size",), ("n_vocab",)),
)  # fmt: skip
"""The typed numbers of APR metadata, in the order of llama.cpp's converter: the single table of their spellings, from
which rows take their keys (blocks/decoder.py).
"""

FIELD = {f.name: f for f in FIELDS}
