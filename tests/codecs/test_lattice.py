"""Weights on the lattice of Q4_0, as quantization-aware training leaves them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from plain_models import CONFIG, weights
from tiny_models import write_byte_tokenizer

import aprfmt
from aprfmt.codecs import affine, lattice, plain
from aprfmt.codecs.recode import decode, encode
from aprfmt.io.pipe import run_jobs

Array = np.ndarray[Any, Any]


def on_lattice(n: int, steps: str, seed: int = 0) -> Array:
    """Blocks of 32 with steps that are numbers of `steps`, of either sign, rounded to bfloat16."""
    rng = np.random.default_rng(seed)
    step = ((rng.random(n) * 0.02 + 0.003) * rng.choice([-1, 1], n)).astype("f4")
    codes = np.clip(np.rint(rng.standard_normal((n, 32)) * 2.5), -8, 7)
    return affine.rounded((affine.rounded(step, steps)[:, None] * codes).astype("f4"), "BF16")


@pytest.mark.parametrize("steps", ["F16", "BF16"])
def test_blocks_of_a_lattice_are_stored_without_error(steps: str) -> None:
    values = on_lattice(4000, steps)
    stored = plain.encode("BF16", values.reshape(-1)).tobytes()
    rounded: list[int] = []
    blocks = b"".join(map(bytes, run_jobs(lattice.jobs(lambda unit: iter([stored]), rounded.append))))
    again = affine.rounded(decode("Q4_0", blocks, values.shape), "BF16")
    np.testing.assert_array_equal(again, values)
    assert rounded == []
    quantized = decode("Q4_0", encode("Q4_0", values), values.shape)  # as llama.cpp quantizes them
    assert np.sqrt(((quantized - values) ** 2).sum() / (values**2).sum()) > 0.05


def test_a_step_that_f16_lacks_is_rounded_and_counted() -> None:
    values = on_lattice(4000, "F32")
    stored = plain.encode("BF16", values.reshape(-1)).tobytes()
    rounded: list[int] = []
    blocks = b"".join(map(bytes, run_jobs(lattice.jobs(lambda unit: iter([stored]), rounded.append))))
    again = affine.rounded(decode("Q4_0", blocks, values.shape), "BF16")
    wrong = (again != values).any(axis=1)
    assert 0 < wrong.sum() == sum(rounded) < 100
    assert (np.abs(again - values) <= np.abs(values) * 2.0**-7).all()


def test_other_values_are_on_no_lattice_and_zeros_stay_as_llama_cpp_has_them() -> None:
    values = affine.rounded(np.random.default_rng(1).standard_normal((2000, 32)).astype("f4"), "BF16")
    assert not lattice.find(values)[2].any()
    stored = plain.encode("BF16", values.reshape(-1)).tobytes()
    assert not lattice.is_on_lattice(lambda unit: iter([stored]))
    assert not lattice.is_on_lattice(lambda unit: iter([bytes(6400)]))
    assert not lattice.is_on_lattice(lambda unit: iter([]))
    mixed = np.concatenate([on_lattice(3, "F16"), np.zeros((2, 32), "f4"), values[:2]])
    data = plain.encode("BF16", mixed.reshape(-1)).tobytes()
    blocks = b"".join(map(bytes, run_jobs(lattice.jobs(lambda unit: iter([data]), lambda n: None))))
    assert blocks[3 * 18 :] == bytes(encode("Q4_0", mixed[3:]))


@pytest.mark.parametrize("name", ["m.gguf", "m.apr"])
def test_quantize_keeps_a_lattice(name: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    values = {key: on_lattice(a.size // 32, "F16").reshape(a.shape) for key, a in weights().items() if a.ndim > 1}
    tensors = {key: torch.from_numpy(values.get(key, a)).to(torch.bfloat16) for key, a in weights().items()}
    (tmp_path / "in").mkdir()
    save_file(tensors, tmp_path / "in" / "model.safetensors", {"format": "pt"})
    (tmp_path / "in" / "config.json").write_text(json.dumps(CONFIG | {"dtype": "bfloat16"}))
    write_byte_tokenizer(tmp_path / "in")
    report = aprfmt.convert_model(tmp_path / "in", tmp_path / name, dtype="q4_0", pure=True)
    assert next(loss for loss in report.losses if "without error" in loss).startswith(
        f"{len(values)} tensors stored as Q4_0"
    )
    assert not [loss for loss in report.losses if "rounded from" in loss]
    with aprfmt.open(tmp_path / name) as model:
        for layer, found in enumerate(n for n in model.tensors if "ffn_down" in n or "down_proj" in n):
            assert model.tensors[found].dtype == "Q4_0"
            stored = affine.rounded(model.tensors[found].numpy(), "BF16")
            np.testing.assert_array_equal(stored, values[f"model.layers.{layer}.mlp.down_proj.weight"])
