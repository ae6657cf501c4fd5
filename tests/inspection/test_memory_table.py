"""Memory by context length: keys and values of each layer, windows, latents, layers that keep none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import plain_models
import pytest
from demo_model import CONTEXT, build

import aprfmt
from aprfmt.inspection.memory_table import CacheLayers, ModelMemory, model_memory


def memory_of(path: Path) -> ModelMemory | None:
    with aprfmt.open(path) as model:
        return model_memory(model)


def test_a_gguf_and_its_apr_keep_the_same(tmp_path: Path) -> None:
    build(tmp_path / "m.gguf")
    aprfmt.import_model(tmp_path / "m.gguf", tmp_path / "m.apr")
    for path in (tmp_path / "m.gguf", tmp_path / "m.apr"):
        found = memory_of(path)
        assert found is not None
        assert found.layers == [CacheLayers(2, 64, 0)], "two heads of 16 for keys, and for values"
        assert found.cache_bytes(CONTEXT) == 2 * 64 * CONTEXT * 2
        assert found.cache_bytes(32, "q8_0") == 2 * 64 * 34
        assert (found.context, found.others) == (CONTEXT, 0)
        with aprfmt.open(path) as model:
            assert found.weights == sum(tensor.n_bytes for tensor in model.tensors.values())


def folder_with(tmp_path: Path, arrays: dict[str, Any], **config: Any) -> Path:
    return plain_models.write_folder(tmp_path / "hf", plain_models.weights() | arrays, **config)


def test_windows_latents_and_layers_without_attention(tmp_path: Path) -> None:
    found = ModelMemory(0, [CacheLayers(3, 10, 4), CacheLayers(1, 10, 0)], 100, 0)
    assert found.cache_bytes(100, "f32") == (3 * 10 * 4 + 10 * 100) * 4
    assert found.cache_bytes(2, "f32") == 4 * 10 * 2 * 4, "below its window a layer keeps all"


@pytest.mark.parametrize(
    ("names", "rows"), [(("self_attn.kv_a_proj_with_mqa", "self_attn.k_proj"), 24), (("self_attn.qkv_proj",), None)]
)
def test_fused_and_latent_projections(tmp_path: Path, names: tuple[str, ...], rows: int | None) -> None:
    path = plain_models.write_folder(tmp_path / "hf")
    with aprfmt.open(path) as model:
        h, tensors = model.hparams, dict(model.tensors)
    assert h.num_heads is not None
    queries = h.num_heads * (h.head_dim or h.plain_head_dim or 0)
    arrays = {
        name: np.zeros((24 if rows else queries + 40, 8), "f4")
        for name in (f"model.layers.0.{n}.weight" for n in names)
    }
    others = {name: np.zeros(t.shape, "f4") for name, t in tensors.items() if "self_attn" not in name}
    path = plain_models.write_folder(tmp_path / "changed", {**others, **arrays})
    found = memory_of(path)
    assert found is not None
    assert found.layers[0].values == (rows or 40)
    assert sum(row.count for row in found.layers) + found.others == h.num_layers


def test_an_encoder_without_a_context_has_none(tmp_path: Path, write: Callable[..., Path]) -> None:
    assert memory_of(write({"a.weight": np.zeros((2, 2), "f4")})) is None
