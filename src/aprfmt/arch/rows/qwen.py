"""Rows of the architecture table: Qwen and other dense decoders that rotate halves, as Hugging Face does."""

from __future__ import annotations

from aprfmt.arch.row import REQUIRED, Architecture, Difference, TensorRow
from aprfmt.arch.rows.parts import (
    DECODER, NO_WINDOW, PAD, SILU, SLIDING_LAYERS, VOCAB, WHOLE_HEADS, WINDOW, attention, block, decoder, flag,
    gated_mlp, hf_names, must_be, network, norm,
)
from aprfmt.arch.rows.parts_moe import MTP, draft_layer, mtp_names

"""Stands for no key: the runtime loads heads of no other size than hidden / heads."""

_BIASED = attention("attention_bias", "attention_bias")

HUNYUAN_DENSE = decoder(
    *_BIASED, *norm("self_attn.query_layernorm", "attn_q_norm", "head_dim"),
    *norm("self_attn.key_layernorm", "attn_k_norm", "head_dim"),
)


def _post_norm(*attention_rows: TensorRow) -> tuple[TensorRow, ...]:
    """A decoder that normalises what attention and MLP give, not what they take."""
    return network(
        *attention_rows, *norm("post_attention_layernorm", "post_attention_norm"), *gated_mlp(),
        *norm("post_feedforward_layernorm", "post_ffw_norm"),
    )


_OLMO2 = _post_norm(*attention("attention_bias", "attention_bias", qk_norm="q"))


_ONLY_64 = Difference(
    "llama.cpp's exaone4 has a sliding window, and layers without rotation, in a network of 64 layers only",
    "window&!layers=64",
)
_ONE_THETA = Difference("llama.cpp's olmo2 rotates sliding and full layers with one base frequency", "two_thetas")


ROWS: tuple[Architecture, ...] = (
    Architecture(
        id="qwen2", gguf="qwen2", **hf_names("Qwen2", "qwen2"), gguf_only=(),
        tensors=decoder(*attention(REQUIRED)), keys=(*DECODER, WHOLE_HEADS, WINDOW, SLIDING_LAYERS, SILU),
        differs=(NO_WINDOW,),
        defaults={"": {
            "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "max_position_embeddings": 32768,
            "num_key_value_heads": 32, "use_sliding_window": False,
        }},
    ),
    Architecture(  # as KORMo-Team/KORMo-10B-base has it: a llama in all but the names of its norms
        id="kormo", gguf="qwen2", when="tensors=attn_q.weight&!tensors=attn_q.bias", **hf_names("KORMo", "kormo"),
        gguf_only=(),
        tensors=network(
            *norm("pre_attention_layernorm", "attn_norm"), *attention(), *norm("pre_mlp_layernorm", "ffn_norm"),
            *gated_mlp(),
        ),
        keys=(*DECODER, WHOLE_HEADS, SILU, must_be("attention_bias", False), must_be("mlp_bias", False)),
        defaults={"": {"rms_norm_eps": 1e-5, "tie_word_embeddings": False, "max_position_embeddings": 131072}},
    ),
    Architecture(
        id="qwen3", gguf="qwen3", **hf_names("Qwen3", "qwen3"), gguf_only=(),
        tensors=decoder(*attention("attention_bias", "attention_bias", qk_norm="head_dim")),
        keys=(*DECODER, WINDOW, SLIDING_LAYERS, SILU, must_be("attention_bias", False)),
        differs=(NO_WINDOW,),
        defaults={"": {
            "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "max_position_embeddings": 32768,
            "num_key_value_heads": 32, "head_dim": 128, "use_sliding_window": False,
        }},
    ),
    Architecture(
        id="seed_oss", gguf="seed_oss", **hf_names("SeedOss", "seed_oss"), gguf_only=(),
        tensors=network(
            *norm("input_layernorm", "attn_norm"), *attention("attention_bias", "attention_out_bias"),
            *norm("post_attention_layernorm", "post_attention_norm"), *gated_mlp("mlp_bias"),
        ),
        keys=(
            *DECODER, PAD, SILU, flag("attention_bias"), must_be("attention_out_bias", False),
            must_be("mlp_bias", False),
        ),
        defaults={"": {
            "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "max_position_embeddings": 524288,
            "num_key_value_heads": 8, "head_dim": 128, "attention_bias": True, "bos_token_id": 0, "eos_token_id": 2,
            "pad_token_id": 1,
        }},
    ),
    Architecture(
        id="exaone4", gguf="exaone4", **hf_names("Exaone4", "exaone4", also=("exaone4_5_text",)),
        tensors=(*_post_norm(*attention(qk_norm="head_dim")), *block(*draft_layer())), drafts=mtp_names(),
        keys=(*DECODER, VOCAB, WHOLE_HEADS, WINDOW, SLIDING_LAYERS, MTP, SILU),
        differs=(_ONLY_64,),
        defaults={"": {
            "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "max_position_embeddings": 2048,
            "num_key_value_heads": 32, "sliding_window": 4096, "sliding_window_pattern": 4, "bos_token_id": 0,
            "eos_token_id": 2,
        }},
    ),
    Architecture(
        id="hunyuan_v1_dense", gguf="hunyuan-dense", **hf_names("HunYuanDenseV1", "hunyuan_v1_dense"), gguf_only=(),
        tensors=HUNYUAN_DENSE, keys=(*DECODER, PAD, SILU, must_be("attention_bias", False)),
        defaults={"": {
            "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "max_position_embeddings": 2048, "bos_token_id": 1,
            "eos_token_id": 2, "pad_token_id": 0,
        }},
    ),
    Architecture(
        id="ernie4_5", gguf="ernie4_5", **hf_names("Ernie4_5", "ernie4_5", "Ernie4_5_"), rope_type=0, gguf_only=(),
        prefixes=(("ernie.", "model."),),
        tensors=decoder(*attention("use_bias", "use_bias"), mlp=gated_mlp("use_bias")),
        keys=(*DECODER, PAD, SILU, must_be("use_bias", False)),
        defaults={"": {
            "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "max_position_embeddings": 131072,
            "num_key_value_heads": 2, "head_dim": 128, "rope_theta": 500000.0, "bos_token_id": 1, "eos_token_id": 2,
            "pad_token_id": 0,
        }},
    ),
    Architecture(
        id="olmo3", gguf="olmo2", when="attention.sliding_window", **hf_names("Olmo3", "olmo3"), gguf_only=(),
        head_always=True,
        tensors=_OLMO2,
        keys=(*DECODER, WHOLE_HEADS, WINDOW, SLIDING_LAYERS, PAD, SILU, must_be("attention_bias", False)),
        differs=(_ONE_THETA,), nested_rope=True,
        defaults={"": {
            "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "max_position_embeddings": 2048, "sliding_window": 4096,
            "sliding_window_pattern": 4, "rope_theta": 500000.0, "pad_token_id": 1, "eos_token_id": 50279,
        }},
    ),
    Architecture(
        id="olmo2", gguf="olmo2", **hf_names("Olmo2", "olmo2"), gguf_only=(), head_always=True,
        tensors=_OLMO2, keys=(*DECODER, WHOLE_HEADS, PAD, SILU, must_be("attention_bias", False)),
        defaults={"": {
            "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "max_position_embeddings": 2048, "pad_token_id": 1,
            "eos_token_id": 50279,
        }},
    ),
)
