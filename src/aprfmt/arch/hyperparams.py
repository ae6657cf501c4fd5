"""What is known of a network, under one set of names, whatever container it came from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Hyperparams:
    """Dimensions and constants of a network; None where the source does not say.

    Fields named like the typed APR metadata fields hold the same values. `extra` holds everything else that the
    network needs, under Hugging Face config names: what the row's `keys` name ("a.b" is b of the object a; None where
    null says something else than absence), the rope parameters (see arch.rope), `head_dim` where the source gives it,
    lists of token ids, `text_of` (the model type of the multimodal model that a language model is taken from).

    Attributes:
        architecture: row id of arch.table ("llama", "qwen2", ...), or the source's own word when no row fits.
        hf_architecture: class name of the Hugging Face model, `LlamaForCausalLM`.
        hf_model_type: config.json's `model_type`.
        head_dim: explicit head size, or hidden_size / num_heads.
        rope_type: 0 adjacent pairs, 2 split halves (NeoX), as Hugging Face ORDERED rows are rotated.
        tied: whether the output head is the embedding; None when unknown.
        bos_token_id, eos_token_id: first id; lists stay in `extra`.
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
    extra: dict[str, Any] = field(default_factory=dict)
