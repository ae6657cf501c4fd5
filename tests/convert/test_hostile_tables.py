"""Odd and hostile input of the table's machinery: crafted row maps and names, doubled spellings, folded tables."""

from __future__ import annotations

import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aprfmt
from aprfmt.arch import names
from aprfmt.arch.links import RowMapping
from aprfmt.arch.orders import Order, indices
from aprfmt.arch.table import ARCHITECTURES
from aprfmt.convert.api import convert_model
from aprfmt.convert.source_manifest import expand_experts
from aprfmt.errors import RefusedError
from aprfmt.inspection.validate import validate

HUGE = 1 << 62


def test_rows_of_no_values_are_refused() -> None:
    with pytest.raises(RefusedError, match="rows of 0 values"):
        RowMapping(((5, 0), (3, 4)), ((12,),)).check("x")


@pytest.mark.parametrize("order", [("tail", (4, HUGE, HUGE, HUGE)), ("tail", (4, 1 << 40, 2, 2))])
def test_an_order_of_more_rows_than_there_are_is_refused(order: Order) -> None:
    with pytest.raises(RefusedError, match="does not divide"):
        indices([order], 4)


def test_many_runs_of_shapes_make_no_memory_bomb() -> None:
    runs = [[1 << 16, [1]]] * 1000
    start = time.perf_counter()
    with pytest.raises(ValueError, match="not a valid size"):
        RowMapping.from_json({"before": runs, "after": runs}, "x")
    with pytest.raises(ValueError, match="experts"):
        expand_experts([["x", 1 << 14]] * 1_000_000)
    assert time.perf_counter() - start < 2


def test_a_name_of_thousands_of_numbers_is_read_at_once() -> None:
    start = time.perf_counter()
    assert names.matches(ARCHITECTURES["qwen3_moe"], "1." * 30_000) == []
    assert time.perf_counter() - start < 2
    assert names.matches(ARCHITECTURES["qwen3_moe"], "model.layers.10.mlp.experts.127.up_proj.weight")


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    import arch_models

    if not arch_models.CACHE.joinpath("smollm2").exists():
        pytest.skip("run tools/fetch_material.py")
    return arch_models.write_tokenizers(tmp_path_factory.mktemp("tokenizers"), ["smollm2"], limit=2048)


def _built(case: str, folder: Path, tokenizers: dict[str, Path]) -> Path:
    import arch_models

    arch_models.build(arch_models.find_case(case), folder, tokenizers)
    return folder


def test_experts_in_two_spellings_are_refused_by_name(tmp_path: Path, tokenizers: dict[str, Path]) -> None:
    from safetensors.numpy import load_file, save_file

    folder = _built("qwen3_moe", tmp_path / "m", tokenizers)
    tensors: dict[str, Any] = load_file(folder / "model.safetensors")
    stem = "model.layers.0.mlp.experts."
    n = sum(name.startswith(stem) and name.endswith(".down_proj.weight") for name in tensors)
    tensors[f"{stem}down_proj"] = np.stack([tensors[f"{stem}{e}.down_proj.weight"] for e in range(n)])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RefusedError, match="two source tensors map to it") as caught:
        convert_model(folder, tmp_path / "m.gguf")
    assert caught.value.tensor == "blk.0.ffn_down_exps.weight"


def test_a_network_without_heads_is_valid(tmp_path: Path, tokenizers: dict[str, Path]) -> None:
    convert_model(_built("mamba", tmp_path / "m", tokenizers), tmp_path / "m.apr")
    found = validate(tmp_path / "m.apr")
    assert found.passed, found.checks


def test_rope_factors_of_two_dimensions_are_read(tmp_path: Path, tokenizers: dict[str, Path]) -> None:
    convert_model(_built("llama/llama3", tmp_path / "m", tokenizers), tmp_path / "m.gguf")
    _fold_rope_factors(tmp_path / "m.gguf", tmp_path / "two.gguf")
    convert_model(tmp_path / "two.gguf", tmp_path / "m.apr")
    convert_model(tmp_path / "m.apr", tmp_path / "again.gguf")
    assert (tmp_path / "again.gguf").read_bytes() == (tmp_path / "two.gguf").read_bytes()


def _fold_rope_factors(src: Path, dst: Path) -> None:
    """The GGUF with rope_freqs.weight as [2, n / 2] instead of [n]."""
    with aprfmt.open(src) as model:
        tensors = sorted(model.tensors.entries, key=lambda t: t.offset)
        (n,), start, last = model.tensors["rope_freqs.weight"].shape, tensors[0].offset, tensors[-1]
    data = src.read_bytes()
    end = data.rindex(last.name.encode(), 0, start) + len(last.name) + 4 + 8 * len(last.shape) + 12
    name = b"rope_freqs.weight"
    flat, folded = name + struct.pack("<IQ", 1, n), name + struct.pack("<IQQ", 2, n // 2, 2)
    assert data.count(flat) == 1
    head = data[:end].replace(flat, folded)
    dst.write_bytes(head + bytes(-len(head) % 32) + data[start:])
