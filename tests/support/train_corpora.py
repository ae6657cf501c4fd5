"""Small corpora, a byte-level tokenizer, a tiny network without a file: for tests of the trainer's data."""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from tiny_models import write_byte_tokenizer

from aprfmt.arch.hparams import from_hf_config
from aprfmt.arch.table import ARCHITECTURES
from aprfmt.texts.shards import CorpusSplit
from aprfmt.tokenizer.hf import read_files
from aprfmt.tokenizer.model import Tokenizer
from aprtrain.models import TrainingPair, initialize_weights
from aprtrain.network.decoder import Decoder
from aprtrain.network.shape import Shape, shape_of
from aprtrain.network.weights import NetworkSource


@cache
def _files() -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as folder:
        write_byte_tokenizer(Path(folder))
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def byte_tokenizer() -> Tokenizer:
    """320 ids: four special tokens, all bytes, a few merges; documents end with `<|im_end|>`."""
    found = read_files(_files())
    assert found is not None
    return found


def functions(n: int, seed: int = 0) -> list[str]:
    """`n` different texts that look like Python."""
    rng = random.Random(seed)
    words = ["fox", "dog", "lazy", "brown", "quick", "jump", "over", "river", "stone", "theory", "universe"]

    def name() -> str:
        return f"{rng.choice(words)}_{rng.choice(words)}{rng.randrange(1000)}"

    return [
        f"def {name()}({name()}, {name()}):\n    {name()} = {rng.random():.6f}\n    return {name()} + {name()}\n"
        for _ in range(n)
    ]


def write_jsonl(path: Path, texts: Sequence[str]) -> Path:
    """A file with a `text` a line."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def part(*documents: Sequence[int]) -> CorpusSplit:
    """Documents of these ids, in memory."""
    tokens = np.array([token for document in documents for token in document], np.uint32)
    ends = np.cumsum([len(document) for document in documents]).astype(np.int64)
    return CorpusSplit(tokens, ends, np.arange(len(documents), dtype=np.uint64))


def varied(n: int, seed: int = 0, high: int = 300) -> list[int]:
    """`n` ids from 0 to `high`, all about equally frequent."""
    return [int(i) for i in np.random.default_rng(seed).integers(0, high, n)]


_CONFIG: dict[str, Any] = {
    "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "head_dim": 8,
    "num_key_value_heads": 1, "intermediate_size": 24, "vocab_size": 320, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}  # fmt: skip


def shape_of_config(**config: Any) -> Shape:
    """The network of a config.json."""
    h = from_hf_config(config)
    return shape_of(h, ARCHITECTURES.get(h.architecture or ""))


SHAPE = shape_of_config(**_CONFIG)


def tiny_decoder(seed: int, **changes: Any) -> Decoder:
    """A random network of SHAPE with some fields changed."""
    found = Decoder(replace(SHAPE, **changes))
    initialize_weights(found, seed, spread=0.4)
    return found


def student_alone(shape: Shape) -> TrainingPair:
    """What a plan needs of a run without a teacher."""
    unknown: Any = None
    return TrainingPair(None, NetworkSource(Path("student"), None, unknown, shape, unknown, None, {}), unknown, None)
