"""Classes that llama.cpp's converter knows from build 11434 on, newer than the one that the suite runs.

What is expected here is what that converter wrote for the same cases: names, types and bytes of all tensors, and keys.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from arch_models import find_case, write_checkpoint, write_tokenizers

import aprfmt

TEMPERATURES = {"choice": 0.85, "noul": 1.5547129, "score": 0.85}


def _gguf(root: Path, case_id: str) -> Path:
    case, name = find_case(case_id), case_id.replace("/", "-")
    write_checkpoint(case, root / name, write_tokenizers(root / "tokenizers", [case.tokenizer], 512))
    aprfmt.convert_model(root / name, root / f"{name}.gguf", dtype="f32")
    return root / f"{name}.gguf"


def test_a_decision_model_says_how_its_answers_are_read(tmp_path: Path) -> None:
    path = _gguf(tmp_path, "openjev")
    with aprfmt.open(path) as model:
        keys = {
            key.removeprefix("qwen35.decision."): model.metadata[key] for key in model.metadata if "decision" in key
        }
        assert keys.pop("type") == "openjev"
        assert {key.removeprefix("temperature."): np.float32(value) for key, value in keys.items()} == {
            key: np.float32(value) for key, value in TEMPERATURES.items()
        }
        assert len(model.tensors) == 28
    aprfmt.convert_model(path, tmp_path / "back", format="hf")
    assert '"OpenJevModel"' in (tmp_path / "back" / "config.json").read_text()


def test_a_masked_head_is_that_of_the_encoder(tmp_path: Path) -> None:
    encoder, masked = (_gguf(tmp_path, id) for id in ("lfm2_bidirectional", "lfm2_bidirectional/masked"))
    with aprfmt.open(encoder) as a, aprfmt.open(masked) as b:
        assert [(t.name, t.dtype, t.shape, bytes(t.raw())) for t in a.tensors.values()] == [
            (t.name, t.dtype, t.shape, bytes(t.raw())) for t in b.tensors.values()
        ]
        assert {k: v for k, v in a.metadata.items() if k.startswith("lfm2.")} == {
            k: v for k, v in b.metadata.items() if k.startswith("lfm2.")
        }
        assert b.metadata["lfm2.attention.causal"] is False
