"""Quantized tensors of a GGUF that are one tensor of a checkpoint, and cannot become it without being decoded."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from arch_models import CACHE, build, find_case, write_tokenizers

import aprfmt


@pytest.mark.parametrize("through_apr", [False, True])
def test_blocks_of_two_gguf_tensors_come_back_as_one(tmp_path: Path, through_apr: bool) -> None:
    """DeepSeek's kv_b_proj: its keys stand transposed in one tensor of a GGUF, its values in another."""
    pytest.importorskip("transformers")
    if not CACHE.is_dir():
        pytest.skip("needs a real tokenizer")
    build(find_case("deepseek_v3"), tmp_path / "folder", write_tokenizers(tmp_path / "tokenizers", ["smollm2"], 600))
    source = tmp_path / "q.gguf"
    aprfmt.quantize_model(tmp_path / "folder", source, "q8_0")
    with aprfmt.open(source) as model:
        assert model.tensors["blk.0.attn_v_b.weight"].dtype == "Q8_0"
    if through_apr:
        aprfmt.import_model(source, tmp_path / "q.apr")
        source = tmp_path / "q.apr"
    aprfmt.export_model(source, tmp_path / "back", format="hf")
    with aprfmt.open(tmp_path / "folder") as a, aprfmt.open(tmp_path / "back") as b:
        names = [name for name in a.tensors if name.endswith("kv_b_proj.weight")]
        assert names
        for name in names:
            wanted, found = (m.tensors[name].numpy().astype(np.float64) for m in (a, b))
            assert np.linalg.norm(found - wanted) < 1e-2 * np.linalg.norm(wanted)
