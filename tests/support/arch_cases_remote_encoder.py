"""Cases of embedding models that transformers does not have: config.json as published but for the sizes."""

from __future__ import annotations

from arch_cases_remote import Config, remote
from arch_models import DIMS, VOCAB, ArchCase

_SIZES: Config = {key: value for key, value in DIMS.items() if key not in ("head_dim", "pad_token_id")}
_LLAMA: Config = {
    **_SIZES, "attention_bias": False, "head_dim": 16, "hidden_act": "silu", "mlp_bias": False, "pooling": "avg",
    "rope_theta": 500000.0, "temperature": 0.02, "tie_word_embeddings": False, "vocab_size": VOCAB,
}  # fmt: skip
_LLAMA3: Config = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}  # fmt: skip
_EUROBERT: Config = {
    **_SIZES, "attention_bias": False, "classifier_pooling": "mean", "head_dim": 16, "hidden_act": "silu",
    "mask_token_id": 3, "mlp_bias": False,
    "rope_parameters": {"rope_theta": 250000, "rope_type": "default"}, "tie_word_embeddings": False,
    "vocab_size": VOCAB,
}  # fmt: skip

CASES: tuple[ArchCase, ...] = (
    # As nvidia/llama-embed-nemotron-8b has them.
    *remote("llama_bidirec", "LlamaBidirectionalModel", _LLAMA, {"llama3": {"rope_scaling": _LLAMA3}}, kind="encoder"),
    # As jinaai/jina-embeddings-v5-text-nano-retrieval has them.
    ArchCase(
        "eurobert/jina-v5",
        "eurobert",
        "",
        "JinaEmbeddingsV5Model",
        {"model_type": "eurobert", **_EUROBERT},
        kind="encoder",
    ),
)
