"""Tensors that are made of others, against torch's own modules."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from aprfmt.arch.hyperparams import Hyperparams
from aprfmt.canonical.derived_tensors import MADE, Sources
from aprfmt.canonical.row_mapping import BufferedTensor
from aprfmt.canonical.tensor import CanonicalTensor
from aprfmt.tokenizer.model import Tokenizer
from aprfmt.types import Array


def _tensor(name: str, values: Array) -> CanonicalTensor:
    data = np.ascontiguousarray(values, "<f4").tobytes()
    return CanonicalTensor(name, (BufferedTensor(name, "F32", values.shape, partial(list, (data,))),))


def test_a_folded_batch_norm_is_the_batch_norm() -> None:
    torch = pytest.importorskip("torch")
    module = torch.nn.BatchNorm1d(16).eval()
    rng = np.random.default_rng(0)
    parts = {name: rng.uniform(0.2, 2, 16).astype(np.float32) for name in module.state_dict() if "num_" not in name}
    module.load_state_dict({name: torch.tensor(value) for name, value in parts.items()}, strict=False)
    sources = Sources({f"n.{name}": _tensor(f"n.{name}", value) for name, value in parts.items()}, Hyperparams())
    scale, shift = MADE["batch_scale"](sources, ["n"]), MADE["batch_shift"](sources, ["n"])
    given = rng.normal(size=(5, 16)).astype(np.float32)
    assert scale is not None
    assert shift is not None
    assert np.abs(given * scale + shift - module(torch.tensor(given)).detach().numpy()).max() < 1e-6
    assert MADE["batch_scale"](Sources({}, Hyperparams()), ["n"]) is None


def test_sinusoids_are_those_of_the_formula() -> None:
    found = MADE["sinusoids"](Sources({}, Hyperparams(extra={"width": 32})), ["1500", "width"])
    assert found is not None
    rates = np.exp(-np.log(10000) / 15 * np.arange(16))
    angles = np.arange(1500)[:, None] * rates
    assert found.dtype == np.float32
    assert np.abs(found - np.concatenate([np.sin(angles), np.cos(angles)], 1)).max() < 2e-4


def test_the_row_of_a_token_is_found_by_its_text() -> None:
    table = np.arange(12, dtype=np.float32).reshape(4, 3)
    tokens = Tokenizer("gpt2", ["a", "b", "[IMG]", "c"])
    found = MADE["row_of_token"](Sources({}, Hyperparams(), _tensor("e", table), tokens), ["[IMG]"])
    assert found is not None
    assert found.tolist() == [6, 7, 8]
    assert MADE["row_of_token"](Sources({}, Hyperparams(), _tensor("e", table), tokens), ["[NO]"]) is None
