"""Checkpoints without a config.json: what their tensors tell."""

from __future__ import annotations

from pathlib import Path

import pytest

from aprfmt.arch.configless import config_of_tensors
from aprfmt.arch.hparams import from_hf_config
from aprfmt.convert.api import import_model
from aprfmt.errors import RefusedError

_SHAPES = {
    "flow_lm.conditioner.embed.weight": (4001, 1024),
    "flow_lm.bos_emb": (32,),
    **{f"flow_lm.transformer.layers.{n}.linear1.weight": (4096, 1024) for n in range(6)},
    **{f"flow_lm.flow_net.res_blocks.{n}.in_ln.weight": (512,) for n in range(3)},
    "mimi.encoder_transformer.transformer.layers.0.norm1.weight": (512,),
    "mimi.encoder_transformer.transformer.layers.1.norm1.weight": (512,),
}


def test_tensors_tell_the_config() -> None:
    """The sizes of the published English model."""
    config = config_of_tensors(_SHAPES)
    assert config is not None
    h = from_hf_config({**config, "model_variant": "english"})
    assert (h.architecture, h.num_layers, h.hidden_size, h.intermediate_size, h.num_heads, h.vocab_size) == (
        *("pocket_tts_published", 6, 1024, 4096, 16),
        4001,
    )
    audio = config["audio_config"]
    assert isinstance(audio, dict)
    known = {key: audio[key] for key in ("latent_dim", "flow_depth", "num_hidden_layers", "num_attention_heads")}
    assert known == {"latent_dim": 32, "flow_depth": 3, "num_hidden_layers": 2, "num_attention_heads": 8}
    assert "inner_dim" not in audio


@pytest.mark.parametrize("gone", ["flow_lm.bos_emb", "flow_lm.conditioner.embed.weight"])
def test_others_have_none(gone: str) -> None:
    assert config_of_tensors({name: shape for name, shape in _SHAPES.items() if name != gone}) is None
    assert config_of_tensors({**_SHAPES, "flow_lm.conditioner.embed.weight": (4001,)}) is None


def test_a_lone_tensor_is_refused(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    (tmp_path / "model").mkdir()
    save_file({"flow_lm.bos_emb": torch.zeros(8)}, tmp_path / "model/model.safetensors")
    with pytest.raises(RefusedError, match=r"no config\.json"):
        import_model(tmp_path / "model", tmp_path / "out.apr")
