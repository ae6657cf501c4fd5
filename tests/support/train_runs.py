"""Tiny runs on the CPU: a corpus with something to learn, a teacher that has learnt it, options of short runs."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import demo_model
import torch
from torch import Tensor

import aprfmt
from aprfmt.inspection.run_report import FILE
from aprfmt.provenance import provenance
from aprtrain.checkpoints.checkpoint import ModelIdentity, StoredWeight, Weights
from aprtrain.checkpoints.state import open_state
from aprtrain.config import Config
from aprtrain.config_sources import build
from aprtrain.loss.head import HeadOut, distill_head
from aprtrain.network.weights import NetworkSource
from aprtrain.run import run

_TEXT = "the cat sat on a mat and then it ran to the dog that was here with one hat in her hand"
_WORDS = tuple(dict.fromkeys(_TEXT.split()))

SIZES: dict[str, Any] = {
    "device": "cpu",
    "deterministic": True,
    "seq_len": 32,
    "tokens_per_step": 128,
    "micro_tokens": 64,
    "log_every": 1,
    "eval_tokens": 512,
    "held_out": 0.1,
    "save_dtype": "f32",
}


@cache
def _chain() -> dict[str, list[str]]:
    rng = random.Random(3)
    return {word: rng.choices(_WORDS, k=3) for word in _WORDS}


def write_corpus(path: Path, *, documents: int = 160, words: int = 60, seed: int = 1) -> Path:
    """Documents in which each word has three possible followers, as JSON lines."""
    rng = random.Random(seed)
    with path.open("w") as file:
        for _ in range(documents):
            text = [rng.choice(_WORDS)]
            while len(text) < words:
                text.append(rng.choice(_chain()[text[-1]]))
            file.write(json.dumps({"text": " ".join(text)}) + "\n")
    return path


def options(command: str, data: Path, output: Path | None, **given: Any) -> Config:
    """The configuration of a tiny run."""
    files = {"data": str(data), "output": str(output) if output else None}
    return build(command, {**SIZES, **files, **given})[0]


def make_teacher(folder: Path, data: Path, *, steps: int = 120) -> Path:
    """A llama of two layers that was trained on the corpus: an `.apr` made by a pretraining run."""
    start = folder / "start.gguf"
    demo_model.build(start)
    config = options(
        "pretrain", data, folder / "teacher", init=str(start), steps=steps, repeat=True, lr=5e-3, save_every=0
    )
    model = run("pretrain", config, stream=None)["model"]
    assert model is not None
    return Path(model)


def lines(folder: Path, event: str = "step") -> list[dict[str, Any]]:
    """The lines of a run's metrics that tell of `event`, without the time of day."""
    every = map(json.loads, (folder / FILE).read_text().splitlines())
    found = [line for line in every if line["event"] == event]
    return [{key: value for key, value in line.items() if key != "time"} for line in found]


def weights(path: Path) -> dict[str, bytes]:
    """The stored bytes of a model's tensors by name."""
    with aprfmt.open(path) as model:
        return {name: bytes(tensor.raw()) for name, tensor in model.tensors.items()}


def close(a: Mapping[str, Tensor], b: Mapping[str, Tensor], *, atol: float = 2e-5) -> bool:
    """Whether 999 of 1000 numbers differ by `atol` at most, as after one training with sums in two orders.

    AdamW divides a gradient by its size: where that is next to zero, its last bits decide on a whole step.
    """
    assert a.keys() == b.keys()
    near = [torch.isclose(a[name].double(), b[name].double(), atol=atol).flatten() for name in a]
    return torch.cat(near).double().mean().item() >= 0.999


def same_model(a: Path, b: Path, *, atol: float = 2e-5) -> bool:
    """`close` of the weights in two files."""
    with aprfmt.open(a) as one, aprfmt.open(b) as two:
        return close(*({name: t.torch() for name, t in model.tensors.items()} for model in (one, two)), atol=atol)


def load_state(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """All that a state file holds. Raises as open_state."""
    with open_state(path) as state:
        return dict(state), state.facts


def identity_of(network: NetworkSource) -> ModelIdentity:
    """What a model is beside its weights."""
    assert network.model is not None
    return ModelIdentity(network.hparams, network.tokenizer, provenance.read(network.model))


def snapshot(tensors: Mapping[str, Tensor], dtype: str) -> Weights:
    """A copy of live weights as "bf16" or "f32"."""
    name, kind = {"bf16": ("BF16", torch.bfloat16), "f32": ("F32", torch.float32)}[dtype]
    copies = {key: tensor.detach().to(kind, copy=True) for key, tensor in tensors.items()}
    return {key: StoredWeight(name, tuple(copy.shape), copy) for key, copy in copies.items()}


def poisoned(calls: int) -> Callable[..., HeadOut]:
    """The loss head, whose loss is NaN at that call, counted from 1."""
    seen = 0

    def head(*args: Any, **options: Any) -> HeadOut:
        nonlocal seen
        seen += 1
        out = distill_head(*args, **options)
        return out._replace(loss=out.loss * float("nan")) if seen == calls else out

    return head
