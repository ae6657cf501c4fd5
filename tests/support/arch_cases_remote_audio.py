"""Cases of networks that speak: config.json as published but for the sizes."""

from __future__ import annotations

from arch_cases_remote import Config, remote
from arch_cases_remote_encoder import LFM2
from arch_models import VOCAB, ArchCase

_DETOKENIZER: Config = {"layer_types": ["conv", "sliding_attention"], "output_size": 32, "sliding_window": 30}

_WAVTOKENIZER: Config = {
    "convnext": {"n_embd": 64, "n_layer": 2}, "group_norm_epsilon": 1e-6, "group_norm_groups": 32, "hidden_size": 82,
    "layer_norm_epsilon": 1e-6, "max_position_embeddings": 8192, "n_embd_features": 32, "n_ff": 96, "n_head": 1,
    "n_layer": 6, "posnet": {"n_embd": 64, "n_layer": 6}, "vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip

CASES: tuple[ArchCase, ...] = (
    # As the audio_detokenizer of LiquidAI/LFM2.5-Audio-1.5B has them.
    *remote(
        "lfm2_audio_tokenizer",
        "Lfm25AudioTokenizer",
        {**LFM2, **_DETOKENIZER},
        kind="states",
        wrapped=True,
        beside={"emb.emb.weight": (16, 64)},
    ),
    # As novateur/WavTokenizer-large-speech-75token has them, brought into a folder by llama.cpp's script.
    *remote("wavtokenizer_dec", "WavTokenizerDec", _WAVTOKENIZER, kind="encoder"),
)
