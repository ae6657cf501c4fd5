"""What users give by mistake: models and data with one fault each, made from good ones."""

from __future__ import annotations

import json
import random
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import demo_model
import numpy as np
from train_corpora import functions, write_jsonl

import aprfmt

Array = np.ndarray[Any, Any]
Maker = Callable[[Path, Path, Path], object]
"""(a good model, a good corpus, where the faulty file goes)."""

UP = "model.layers.1.mlp.up_proj.weight"


def edited(
    source: Path,
    target: Path,
    *,
    tensors: Callable[[str, Array], Array | None] = lambda name, values: values,
    metadata: Callable[[str, Any], Any] = lambda key, value: value,
) -> None:
    """An `.apr` with changed tensors and metadata; None leaves one out."""
    with aprfmt.open(source) as model:
        values = {name: tensors(name, tensor.numpy().copy()) for name, tensor in model.tensors.items()}
        keys = {key: metadata(key, value) for key, value in dict(model.metadata).items()}
    kept = {name: array for name, array in values.items() if array is not None}
    aprfmt.save_file(kept, target, {key: value for key, value in keys.items() if value is not None})


def _bytes(change: Callable[[bytes], bytes]) -> Maker:
    return lambda model, data, target: target.write_bytes(change(model.read_bytes()))


def _tensors(change: Callable[[str, Array], Array | None]) -> Maker:
    return lambda model, data, target: edited(model, target, tensors=change)


def _metadata(change: Callable[[str, Any], Any]) -> Maker:
    return lambda model, data, target: edited(model, target, metadata=change)


def _rows(n: int) -> Maker:
    """Embedding and head of `n` rows, cut or filled with large values."""

    def resized(name: str, values: Array) -> Array:
        if name not in ("model.embed_tokens.weight", "lm_head.weight"):
            return values
        more = np.full((max(0, n - len(values)), values.shape[1]), 9.0, values.dtype)
        return np.concatenate([values[:n], more])

    return lambda model, data, target: edited(
        model, target, tensors=resized, metadata=lambda key, value: n if key == "vocab_size" else value
    )


def _poisoned(name: str, values: Array) -> Array:
    if name == UP:
        values[3, 5] = np.nan
    return values


def _permuted(key: str, value: Any) -> Any:
    if key == "tokenizer.vocabulary":
        value = list(value)
        value[40], value[41] = value[41], value[40]
    return value


def _texts(texts: Callable[[], list[str]]) -> Maker:
    return lambda model, data, target: write_jsonl(target, texts())


def _clashing() -> list[str]:
    """The same 32 tokens in every document, each time with another letter behind them: one input, many labels.

    Each of these letters is a token, and one more ends a document of 64.
    """
    letters, random_ = string.ascii_uppercase, random.Random(0)
    same = letters + string.digits[:6]
    return [same + letter + "".join(random_.choices(letters, k=30)) for letter in letters]


CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 64, "vocab_size": 64,
    "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
}  # fmt: skip
"""config.json of a tiny llama with fewer rows than any tokenizer has tokens."""

MAKERS: dict[str, Maker] = {
    "empty.apr": _bytes(lambda data: b""),
    "text.apr": _bytes(lambda data: b"what" + data[4:]),
    "cut.apr": _bytes(lambda data: data[: len(data) // 2]),
    "hollow.apr": _tensors(lambda name, values: None),
    "gap.apr": _tensors(lambda name, values: None if name == UP else values),
    "nodims.apr": _metadata(lambda key, value: None if key.startswith(("hidden", "num_")) else value),
    "zero.apr": _tensors(lambda name, values: np.zeros_like(values) if ".layers.1." in name else values),
    "nan.apr": _tensors(_poisoned),
    "noise.apr": _tensors(lambda name, values: values * -3 if ".layers.1.mlp" in name else values),
    "mute.apr": _metadata(lambda key, value: None if key.startswith(("tokenizer", "aprfmt.")) else value),
    "permuted.apr": _metadata(_permuted),
    "narrow.apr": _rows(290),
    "wide.apr": _rows(384),
    "f16.apr": lambda model, data, target: aprfmt.import_model(model, target, dtype="f16"),
    "random.gguf": lambda model, data, target: demo_model.build(target),
    "blank.jsonl": _texts(lambda: ["", "  \n"]),
    "constant.jsonl": _texts(lambda: ["a" * (200 + i) for i in range(50)]),
    "other.jsonl": _texts(lambda: functions(100)),
    "clashing.jsonl": _texts(_clashing),
    "broken.jsonl": lambda model, data, target: target.write_text('{"text": "good"}\n{'),
    "latin.txt": lambda model, data, target: target.write_bytes("Köln ".encode("latin-1") * 100),
    "small.json": lambda model, data, target: target.write_text(json.dumps(CONFIG)),
    "options.toml": lambda model, data, target: target.write_text("learning_rate = 1e-3\n"),
    "file": lambda model, data, target: target.write_text("no folder"),
}
"""File name -> what makes it."""
