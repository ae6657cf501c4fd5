"""Cases of networks that speak: config.json as published but for the sizes."""

from __future__ import annotations

from arch_cases_remote import Config, remote
from arch_cases_remote_encoder import LFM2
from arch_models import ArchCase

_DETOKENIZER: Config = {"layer_types": ["conv", "sliding_attention"], "output_size": 32, "sliding_window": 30}

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
)
