"""Planning changes nothing that was opened."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import numpy as np
import plain_models
import pytest
from safetensors.numpy import save_file

import aprfmt
from aprfmt import formats
from aprfmt.canonical.packed import AS_VALUES
from aprfmt.canonical.read import canonical
from aprfmt.model import Model


def _tied_gguf(folder: Path) -> Path:
    """Without vocab_size, head size and a head: all three follow from the tensors."""
    arrays = plain_models.gguf_names(plain_models.weights(head=False))
    return plain_models.write_gguf(folder / "m.gguf", arrays)


def _tied_folder(folder: Path) -> Path:
    """Declared tied, with a head of its own."""
    return plain_models.write_folder(folder / "hf", tie_word_embeddings=True)


def _fp8_folder(folder: Path) -> Path:
    """A packed weight, decoded on its way."""
    arrays = plain_models.weights()
    path = plain_models.write_folder(folder / "hf", arrays)
    import torch
    from safetensors.torch import save_file as save_torch

    name = "model.layers.0.mlp.up_proj.weight"
    tensors = {key: torch.from_numpy(array) for key, array in arrays.items()}
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    tensors[f"{name}_scale_inv"] = torch.ones(1, 1)
    save_torch(tensors, path / "model.safetensors", metadata={"format": "pt"})
    skipped = [key.removesuffix(".weight") for key in arrays if key != name]
    packing = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": skipped}
    (path / "config.json").write_text(json.dumps(plain_models.CONFIG | {"quantization_config": packing}))
    return path


def _bare_safetensors(folder: Path) -> Path:
    """No config.json: dimensions follow from the tensors."""
    save_file(plain_models.weights(), folder / "m.safetensors")
    return folder / "m.safetensors"


def _apr(folder: Path) -> Path:
    """As the reference writes it: no head size, which is not hidden_size / num_heads."""
    arrays = plain_models.weights(head_dim=32)
    aprfmt.save_file(arrays, folder / "m.apr", metadata=plain_models.METADATA)
    return folder / "m.apr"


PLANS = [
    (make, target)
    for make in (_tied_gguf, _tied_folder, _fp8_folder, _bare_safetensors, _apr)
    for target in ("a.apr", "a.gguf", "a.safetensors")
    if (make, target) != (_bare_safetensors, "a.gguf")  # refused: its norm constant is unknown
]


@pytest.mark.parametrize(("make", "target"), PLANS)
def test_a_plan_leaves_the_model_as_it_was_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], Path], target: str
) -> None:
    path, opened, really_open = make(tmp_path), list[Model](), formats.open

    def keep(source: Path) -> Model:
        opened.append(really_open(source))
        return opened[-1]

    with monkeypatch.context() as patch:
        patch.setattr(formats, "open", keep)
        options: dict[str, Any] = {"no_tokenizer": True} if target.endswith(".gguf") else {}
        aprfmt.convert_model(
            path, tmp_path / target, dtype="f16", plan=True, arch="llama", allow_no_config=True, **options
        )
    with really_open(path) as fresh:
        assert opened[0].hparams == fresh.hparams
        assert opened[0].warnings == fresh.warnings
        assert canonical(fresh, arch="llama", decoding=AS_VALUES).hparams != fresh.hparams or make is _bare_safetensors


def test_a_canonical_model_is_frozen(tmp_path: Path) -> None:
    with aprfmt.open(_tied_gguf(tmp_path)) as model:
        c = canonical(model)
        with pytest.raises(FrozenInstanceError):
            c.hparams = model.hparams  # type: ignore[misc]
        assert c.hparams.tied is True
        assert np.prod(c.tensors[c.embedding].shape) == plain_models.VOCAB * plain_models.HIDDEN
