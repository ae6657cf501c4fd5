"""What Llama's kin says otherwise in a GGUF than in config.json."""

from __future__ import annotations

from typing import Any

import pytest

from aprfmt.arch.hparams import from_gguf, from_hf_config, to_gguf, to_hf_config
from aprfmt.arch.rope_factors import infer_llama3, llama3_factors
from aprfmt.arch.table import ARCHITECTURES
from aprfmt.errors import RefusedError

DIMS = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 512,
}  # fmt: skip


def gguf(model_type: str, **config: Any) -> dict[str, Any]:
    row = ARCHITECTURES[model_type]
    keys = to_gguf(from_hf_config({"model_type": model_type, **DIMS, **config}), row)
    return {"general.architecture": row.gguf, **{key: value for key, _, value in keys}}


@pytest.mark.parametrize("original", [128, 2048, 4096, 8192])
def test_llama3_factors_tell_their_context(original: int) -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": original}  # fmt: skip
    found = infer_llama3(llama3_factors(500000.0, 64, scaling), 500000.0, 64)
    assert found == {"rope_type": "llama3", **scaling}


@pytest.mark.parametrize(
    "config",
    [
        {"no_rope_layers": [1, 1, 1, 1]},
        {"no_rope_layer_interval": 2},
        {"use_sliding_window": True, "sliding_window": 8},
        {"hidden_act": "gelu"},
    ],
)
def test_smollm3_refuses_what_its_runtime_does_not_compute(config: dict[str, Any]) -> None:
    assert gguf("smollm3")["smollm3.block_count"] == 4
    with pytest.raises(RefusedError, match=next(iter(config)).partition("_interval")[0]):
        gguf("smollm3", **config)


def test_qwen2_refuses_heads_that_its_runtime_does_not_load() -> None:
    assert "qwen2.attention.key_length" not in gguf("qwen2")
    assert gguf("qwen2", head_dim=16)["qwen2.attention.key_length"] == 16
    for config in ({"head_dim": 32}, {"hidden_size": 32, "head_dim": 16}):
        with pytest.raises(RefusedError, match="to equal the hidden size"):
            gguf("qwen2", **config)


def test_a_mistral3_file_without_a_temperature_is_a_mistral() -> None:
    kv = gguf("mistral", sliding_window=None)
    kv = {key.replace("llama.", "mistral3."): value for key, value in kv.items()}
    assert to_hf_config(from_gguf({**kv, "general.architecture": "mistral3"}))["model_type"] == "mistral"


def test_ministral3_keeps_its_temperature() -> None:
    scaling = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0,
               "original_max_position_embeddings": 128, "llama_4_scaling_beta": 0.25}  # fmt: skip
    kv = gguf("ministral3", rope_parameters=scaling)
    assert kv["mistral3.attention.temperature_scale"] == 0.25
    assert kv["mistral3.rope.scaling.yarn_log_multiplier"] == 1.0
    back: Any = to_hf_config(from_gguf(kv))["rope_parameters"]
    assert {key: back[key] for key in scaling} == scaling


def test_layers_without_a_window_have_no_pattern() -> None:
    full = gguf("exaone4", sliding_window=None, layer_types=["full_attention"] * 4)
    assert not any("sliding_window" in key for key in full)
    config = to_hf_config(from_gguf(full))
    assert config["layer_types"] == ["full_attention"] * 4
    hybrid = gguf("exaone4", sliding_window=8)
    assert hybrid["exaone4.attention.sliding_window_pattern"] == [True, True, True, False]


def test_granite_writes_the_scales_that_transformers_assumes() -> None:
    kv = gguf("granite")
    names = ("attention.scale", "embedding_scale", "residual_scale", "logit_scale")
    assert [kv[f"granite.{name}"] for name in names] == [1.0] * 4
