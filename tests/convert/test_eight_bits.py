"""--dtype f8_e4m3 and f8_e5m2: matrices of a safetensors file, as torch rounds them; no other container."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import aprfmt
from aprfmt.errors import UsageError

KINDS = {"f8_e4m3": torch.float8_e4m3fn, "f8_e5m2": torch.float8_e5m2}


@pytest.mark.parametrize("dtype", KINDS)
def test_a_file_in_8_bits(dtype: str, tiny_model: Callable[[str], Any], tmp_path: Path) -> None:
    source = tiny_model("mistral")[0]
    report = aprfmt.export_model(source, tmp_path / "out.safetensors", dtype=dtype)
    before, after = (load_file(path) for path in (source / "model.safetensors", tmp_path / "out.safetensors"))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        want = tensor.to(KINDS[dtype]) if tensor.dim() > 1 else tensor
        assert after[name].dtype == want.dtype, name
        assert torch.equal(after[name].contiguous().view(torch.uint8), want.contiguous().view(torch.uint8)), name
    assert any(dtype.upper() in loss for loss in report.losses)


@pytest.mark.parametrize("name", ["m.apr", "m.gguf"])
def test_other_containers_have_no_8_bit_weights(name: str, tiny_gguf: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="F8_E4M3"):
        aprfmt.convert_model(tiny_gguf, tmp_path / name, dtype="f8_e4m3")
    assert not (tmp_path / name).exists()
