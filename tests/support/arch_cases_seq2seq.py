"""Cases of encoder-decoders: the encoder reads a text, the decoder the same text backwards."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from arch_models import ArchCase

_SIZES: dict[str, Any] = {
    "d_model": 64, "d_kv": 24, "d_ff": 96, "num_hidden_layers": 2, "num_decoder_layers": 1, "num_heads": 4,
    "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 2, "relative_attention_num_buckets": 16,
}  # fmt: skip
_UNTIED: dict[str, Any] = {"tie_word_embeddings": False}
_SCALED = "its graph does not divide the decoder's states by sqrt(d_model)"


def _case(name: str, stem: str, end: str = "ForConditionalGeneration", cannot: str = "", **config: Any) -> ArchCase:
    kind = {"Model": "decoder", "EncoderModel": "encoder"}.get(end, "seq2seq")
    row = name.partition("/")[0]
    return ArchCase(name, row, f"{stem}Config", stem + end, {**_SIZES, **config}, llama_cpp_cannot=cannot, kind=kind)


_FLAN = replace(_case("t5", "T5", feed_forward_proj="gated-gelu", **_UNTIED), own_head=True)

CASES: tuple[ArchCase, ...] = (
    _FLAN,
    _case("t5/first", "T5", cannot=_SCALED, num_decoder_layers=2),
    _case("t5/deep-decoder", "T5", "Model", "its decoder cannot be deeper than its encoder", num_decoder_layers=4),
    _case("t5/bare", "T5", "Model", **_UNTIED),
    _case("t5/silu", "T5", "Model", "its MLP has GELU or ReLU", feed_forward_proj="gated-silu", **_UNTIED),
    _case(
        "t5/distance", "T5", "Model", "its biases reach 128 positions", relative_attention_max_distance=16, **_UNTIED
    ),
    replace(_case("t5/mt5", "MT5", feed_forward_proj="gated-gelu"), own_head=True),
    _case("umt5", "UMT5", "Model"),
    replace(_case("umt5/head", "UMT5", cannot=_SCALED), own_head=True),
    _case("t5encoder", "T5", "EncoderModel"),
    _case("t5encoder/gated", "T5", "EncoderModel", feed_forward_proj="gated-gelu"),
    _case("t5encoder/mt5", "MT5", "EncoderModel", feed_forward_proj="gated-gelu"),
    _case("umt5encoder", "UMT5", "EncoderModel", feed_forward_proj="gated-gelu"),
)
