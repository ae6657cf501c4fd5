"""RWKV 7 in llama.cpp: what mlx-lm, which has the network too, computes with the same checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from arch_models import find_case, relative_error, token_ids, top1_equal, write_checkpoint, write_tokenizers
from llama_peer import LlamaPeer

import aprfmt

pytestmark = pytest.mark.llama
mx = pytest.importorskip("mlx.core")
rwkv7 = pytest.importorskip("mlx_lm.models.rwkv7")


@pytest.mark.parametrize("case_id", ["rwkv7", "rwkv7/ratio"])
def test_llama_cpp_computes_the_network(case_id: str, tmp_path: Path, llama_cpp: LlamaPeer) -> None:
    import numpy as np

    case, folder = find_case(case_id), tmp_path / "model"
    write_checkpoint(case, folder, write_tokenizers(tmp_path / "tokenizers", [case.tokenizer], 2048))
    config = json.loads((folder / "config.json").read_text())
    mx.set_default_device(mx.cpu)
    network = rwkv7.Model(
        rwkv7.ModelArgs.from_dict({**config, "intermediate_size": config["intermediate_size"] or 512})
    )
    weights = network.sanitize(mx.load(str(folder / "model.safetensors")))
    network.load_weights(list(weights.items()), strict=True)
    ids = token_ids(folder)
    wanted = np.array(network(mx.array([ids]))[0].astype(mx.float32))

    aprfmt.convert_model(folder, tmp_path / "model.gguf", dtype="f32")
    got = llama_cpp.logits(tmp_path / "model.gguf", ids)
    assert relative_error(got, wanted) < 1e-4
    assert top1_equal(got, wanted)
