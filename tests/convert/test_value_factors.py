"""Matrices that a GGUF holds multiplied with numbers of the config, as those of Jais."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import aprfmt
from aprfmt.canonical.read import canonical
from aprfmt.canonical.sides import gguf_side
from aprfmt.errors import CorruptError

CONFIG = {
    "architectures": ["JAISLMHeadModel"], "model_type": "jais", "activation_function": "swiglu", "n_embd": 8,
    "n_head": 2, "n_inner": 12, "n_layer": 1, "n_positions": 32, "position_embedding_type": "alibi",
    "layer_norm_epsilon": 1e-5, "vocab_size": 6, "tie_word_embeddings": True, "mup_embeddings_scale": 3.0,
    "mup_output_alpha": 0.5, "mup_width_scale": 0.25, "mup_scale_qk_dot_by_d": True,
}  # fmt: skip
WTE = np.arange(48, dtype=np.float32).reshape(6, 8)


LING = {
    "architectures": ["BailingMoeForCausalLM"], "model_type": "bailing_moe", "hidden_size": 8, "vocab_size": 6,
    "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 12, "max_position_embeddings": 32,
}  # fmt: skip


def gguf_tensors(folder: Path, name: str = "transformer.wte.weight", **config: object) -> dict[str, np.ndarray]:
    """The tensors of the GGUF of a checkpoint that holds one, of Jais where `config` does not say another class."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config if "architectures" in config else {**CONFIG, **config}))
    save_file({name: WTE}, folder / "model.safetensors")
    with aprfmt.open(folder) as model:
        c = canonical(model)
        assert c.arch is not None
        return {t.name: t.produced.values() for t in gguf_side(c.arch, c.hparams, c.tensors)}


def test_a_tied_head_is_the_embedding_with_the_scale_of_the_head(tmp_path: Path) -> None:
    made = gguf_tensors(tmp_path / "m")
    assert (made["token_embd.weight"] == WTE * 3).all()
    assert (made["output.weight"] == WTE * 0.125).all()


@pytest.mark.parametrize("scale", [0, float("nan")])
def test_a_scale_that_cannot_be_undone_is_refused(tmp_path: Path, scale: float) -> None:
    with pytest.raises(CorruptError, match="mup_embeddings_scale"):
        gguf_tensors(tmp_path / "m", mup_embeddings_scale=scale)


def test_ling_may_have_columns_of_length_1_in_its_head(tmp_path: Path) -> None:
    made = gguf_tensors(tmp_path / "m", "lm_head.weight", **LING, norm_head=True)["output.weight"]
    assert np.allclose(np.linalg.norm(made, axis=0), 1, rtol=1e-6)
    assert np.allclose(made, WTE / np.linalg.norm(WTE, axis=0), rtol=1e-6)
    plain = gguf_tensors(tmp_path / "plain", "lm_head.weight", **LING, norm_head=False)["output.weight"]
    assert (plain == WTE).all()
