"""Cases of encoders: what they are compared by is the last hidden states."""

from __future__ import annotations

from typing import Any

from arch_models import ArchCase

_BERT: dict[str, Any] = {"hidden_act": "gelu", "pad_token_id": 0}
_ROBERTA: dict[str, Any] = {"pad_token_id": 2, "max_position_embeddings": 515, "type_vocab_size": 1}
"""With the padding token of the tokenizer: positions count from behind its id on."""
_NO_POOLER: dict[str, Any] = {"add_pooling_layer": False}


def _encoder(
    name: str, row: str, stem: str, config: dict[str, Any], tokenizer: str = "bert", cannot: str = "", **options: Any
) -> ArchCase:
    return ArchCase(
        name, row, f"{stem}Config", f"{stem}Model", config, tokenizer, cannot, kind="encoder", model_options=options
    )


def _modern(name: str, cannot: str = "", **config: Any) -> ArchCase:
    common = {"local_attention": 16, "num_hidden_layers": 4, "pad_token_id": 0, "cls_token_id": 1, "sep_token_id": 2}
    return _encoder(name, "modernbert", "ModernBert", {**common, **config}, "smollm2", cannot)


_F, _S = "full_attention", "sliding_attention"

CASES: tuple[ArchCase, ...] = (
    _encoder("bert", "bert", "Bert", _BERT, **_NO_POOLER),
    _encoder("bert/odd-heads", "bert", "Bert", {**_BERT, "hidden_size": 60, "num_attention_heads": 3}, **_NO_POOLER),
    _encoder("bert/one-type", "bert", "Bert", {**_BERT, "type_vocab_size": 1}, **_NO_POOLER),
    _encoder(
        "bert/relu", "bert", "Bert", {**_BERT, "hidden_act": "relu"}, cannot="its bert network has GELU", **_NO_POOLER
    ),
    _encoder("roberta", "roberta", "Roberta", _ROBERTA, "smollm2", **_NO_POOLER),
    _encoder("roberta/two-types", "roberta", "Roberta", {**_ROBERTA, "type_vocab_size": 2}, "smollm2", **_NO_POOLER),
    _encoder("xlm-roberta", "xlm-roberta", "XLMRoberta", _ROBERTA, "smollm2", **_NO_POOLER),
    _encoder("xlm-roberta/camembert", "xlm-roberta", "Camembert", _ROBERTA, "smollm2", **_NO_POOLER),
    _encoder(
        "distilbert",
        "distilbert",
        "DistilBert",
        {"dim": 64, "hidden_dim": 96, "n_layers": 2, "n_heads": 4, "pad_token_id": 0},
    ),
    _encoder("mpnet", "mpnet", "MPNet", {"pad_token_id": 1}, cannot="its loader has no relative attention bias"),
    _encoder("nomic_bert", "nomic_bert", "NomicBert", {"pad_token_id": 0}, **_NO_POOLER),
    _encoder(
        "jina_embeddings_v3",
        "jina_embeddings_v3",
        "JinaEmbeddingsV3",
        {"pad_token_id": 1, "type_vocab_size": 1},
        "smollm2",
        **_NO_POOLER,
    ),
    _modern("modernbert"),
    _modern("modernbert/silu", hidden_activation="silu"),
    _modern("modernbert/layers", layer_types=[_F, _F, _S, _F]),
    _modern("modernbert/every-second", layer_types=[_F, _S, _F, _S]),
    _modern("modernbert/norm-bias", "its modern-bert network has no biases", norm_bias=True),
    _encoder("eurobert", "eurobert", "EuroBert", {"pad_token_id": 0, "mask_token_id": 3}, "smollm2"),
    _encoder(
        "eurobert/multi-head",
        "eurobert",
        "EuroBert",
        {"pad_token_id": 0, "mask_token_id": 3, "num_key_value_heads": 4},
        "smollm2",
    ),
)
