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

_JINA2: Config = {
    **{key: value for key, value in _SIZES.items() if key not in ("num_key_value_heads", "rms_norm_eps")},
    "emb_pooler": "mean", "feed_forward_type": "geglu", "hidden_act": "gelu", "layer_norm_eps": 1e-12,
    "model_type": "bert", "pad_token_id": 0, "position_embedding_type": "alibi", "type_vocab_size": 2,
    "vocab_size": VOCAB,
}  # fmt: skip
_POST: Config = {"auto_map": {"AutoModel": "jinaai/jina-bert-v2-qk-post-norm--modeling_bert.JinaBertModel"}}
_NEOBERT: Config = {
    "bos_token_id": 101, "eos_token_id": 102, "classifier_init_range": 0.02, "decoder_init_range": 0.02,
    "embedding_init_range": 0.02, "hidden_size": 64, "intermediate_size": 96, "max_length": 512, "norm_eps": 1e-5,
    "num_attention_heads": 4, "num_hidden_layers": 2, "pad_token_id": 0, "vocab_size": VOCAB,
}  # fmt: skip

LFM2: Config = {
    **_SIZES, "block_auto_adjust_ff_dim": True, "block_ffn_dim_multiplier": 1.0, "block_multiple_of": 32,
    "conv_L_cache": 3, "conv_bias": False, "hidden_size": 64, "layer_types": ["conv", "full_attention"],
    "model_type": "lfm2", "norm_eps": 1e-5, "pad_token_id": 0, "rope_theta": 1000000.0, "tie_word_embeddings": True,
    "vocab_size": VOCAB,
}  # fmt: skip
"""As LiquidAI/LFM2-350M has it."""

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
    # As jinaai/jina-embeddings-v2-base-en and jina-embeddings-v2-base-de have them.
    *remote(
        "jina_bert_v2",
        "JinaBertForMaskedLM",
        _JINA2,
        {"post-norm": _POST, "one-type": {"type_vocab_size": 1}},
        kind="encoder",
        tokenizer="bert",
    ),
    ArchCase("jina_bert_v2/bare", "jina_bert_v2", "", "JinaBertModel", _JINA2, "bert", kind="encoder"),
    # As chandar-lab/NeoBERT has them.
    *remote("neobert", "NeoBERT", _NEOBERT, kind="encoder", tokenizer="bert"),
    ArchCase(
        "neobert/LMHead",
        "neobert",
        "",
        "NeoBERTLMHead",
        {"model_type": "neobert", **_NEOBERT},
        "bert",
        kind="encoder",
        wrapped=True,
        begins={"": "model."},
    ),
    ArchCase(
        "neobert_classifier",
        "neobert_classifier",
        "",
        "NeoBERTForSequenceClassification",
        {"model_type": "neobert", **_NEOBERT, "id2label": {"0": "no", "1": "maybe", "2": "yes"}},
        "bert",
        kind="rank",
    ),
    # As jinaai/jina-reranker-v1-tiny-en has them.
    ArchCase(
        "jina_bert_v2_classifier",
        "jina_bert_v2_classifier",
        "",
        "JinaBertForSequenceClassification",
        {**_JINA2, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}},
        "bert",
        "it has no pooler, and its classifier has tanh",
        kind="rank",
    ),
    ArchCase("lfm2/first-name", "lfm2", "", "LFM2ForCausalLM", LFM2),
    # As LiquidAI/LFM2.5-Embedding-350M has them.
    *remote("lfm2_bidirectional", "Lfm2BidirectionalModel", LFM2, kind="states", wrapped=True, begins={"model.": ""}),
    # As LiquidAI/LFM2.5-Encoder-350M has them.
    ArchCase(
        "lfm2_bidirectional/masked",
        "lfm2_bidirectional",
        "",
        "Lfm2BidirectionalForMaskedLM",
        LFM2,
        kind="states",
        wrapped=True,
        begins={"model.": "lfm2."},
    ),
)
