"""Hyper-parameters of Gemma, Cohere and Phi that a GGUF says in another way than config.json, or not at all."""

from __future__ import annotations

from typing import Any

import pytest

from aprfmt.arch.hparams import from_gguf, from_hf_config, to_gguf, to_hf_config
from aprfmt.arch.table import ARCHITECTURES
from aprfmt.errors import RefusedError

DIMS: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 100,
    "max_position_embeddings": 512,
}
SLIDING, FULL = "sliding_attention", "full_attention"
GEMMA2 = {**DIMS, "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "query_pre_attn_scalar": 32}
GEMMA3 = {**GEMMA2, "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text"}
COHERE = {
    **{key: value for key, value in DIMS.items() if key != "head_dim"},
    "architectures": ["CohereForCausalLM"],
    "model_type": "cohere",
}


def keys(config: dict[str, Any], row: str) -> dict[str, Any]:
    """The GGUF keys of a config.json, by what stands behind the architecture."""
    arch = ARCHITECTURES[row]
    found = to_gguf(from_hf_config(config), arch)
    return {key.removeprefix(f"{arch.gguf}."): value for key, _, value in found}


def back(row: str, found: dict[str, Any]) -> dict[str, Any]:
    """The config.json that these GGUF keys give."""
    arch = ARCHITECTURES[row].gguf
    kv = {f"{arch}.{key}": value for key, value in found.items()}
    return to_hf_config(from_gguf({"general.architecture": arch, **kv, "tokenizer.ggml.tokens": ["a"] * 100}))


@pytest.mark.parametrize(
    ("base", "row", "layers", "scale"),
    [
        (GEMMA2, "gemma2", 4, 32),
        (GEMMA2, "gemma2", 46, 16),
        (GEMMA2, "gemma2", 62, 32),
        (GEMMA3, "gemma3_text", 46, 32),
        (GEMMA3, "gemma3_text", 62, 16),
    ],
)
def test_attention_is_scaled_as_the_runtime_does(base: dict[str, Any], row: str, layers: int, scale: int) -> None:
    """src/models/gemma2.cpp, gemma3.cpp: hidden / heads at the layers of the 27B model, else the size of a head."""
    config = {**base, "num_hidden_layers": layers, "query_pre_attn_scalar": scale}
    assert back(row, keys(config, row))["query_pre_attn_scalar"] == scale
    with pytest.raises(RefusedError, match=f"query_pre_attn_scalar is 24; .* scales by {scale}"):
        keys({**config, "query_pre_attn_scalar": 24}, row)


@pytest.mark.parametrize("name", ["attn_logit_softcapping", "final_logit_softcapping"])
def test_a_null_soft_cap_is_a_cap_beyond_reach(name: str) -> None:
    usual = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}[name]
    assert keys(GEMMA2, "gemma2")[name] == usual
    assert back("gemma2", keys({**GEMMA2, name: 7.5}, "gemma2"))[name] == 7.5
    uncapped = keys({**GEMMA2, name: None}, "gemma2")
    assert uncapped[name] == 2.0**20
    assert back("gemma2", uncapped)[name] is None
    del uncapped[name]
    assert back("gemma2", uncapped)[name] == usual


@pytest.mark.parametrize(
    ("base", "row", "usual"),
    [(GEMMA2, "gemma2", [SLIDING, FULL, SLIDING, FULL]), (GEMMA3, "gemma3_text", [SLIDING] * 4)],
)
def test_only_unusual_layer_types_are_written(base: dict[str, Any], row: str, usual: list[str]) -> None:
    pattern = "attention.sliding_window_pattern"
    plain = keys(base, row)
    assert pattern not in plain
    assert back(row, plain)["layer_types"] == usual
    other = [FULL, SLIDING, SLIDING, FULL]
    found = keys({**base, "layer_types": other}, row)
    assert found[pattern] == [False, True, True, False]
    assert back(row, found)["layer_types"] == other


def test_gemma2_without_sliding_layers_has_no_runtime() -> None:
    with pytest.raises(RefusedError, match="at least one sliding-window layer"):
        keys({**GEMMA2, "layer_types": [FULL] * 4}, "gemma2")


def test_an_old_period_is_no_usual_one() -> None:
    found = keys({**GEMMA3, "sliding_window_pattern": 2}, "gemma3_text")
    assert found["attention.sliding_window_pattern"] == [True, False, True, False]


def test_gemma3_without_sliding_layers_has_no_window() -> None:
    """The runtime asserts that some layer slides where a file names a window."""
    found = keys({**GEMMA3, "layer_types": [FULL] * 4}, "gemma3_text")
    assert not [key for key in found if "sliding_window" in key]
    assert back("gemma3_text", found)["layer_types"] == [FULL] * 4


@pytest.mark.parametrize(
    ("config", "row", "said"),
    [
        ({**GEMMA2, "use_bidirectional_attention": True}, "gemma2", "use_bidirectional_attention"),
        ({**GEMMA3, "attn_logit_softcapping": 50.0}, "gemma3_text", "attn_logit_softcapping"),
        ({**GEMMA2, "attention_bias": True}, "gemma2", "attention_bias"),
        ({**GEMMA3, "architectures": ["Gemma3TextModel"]}, "gemma_embedding", "use_bidirectional_attention"),
    ],
)
def test_what_the_runtime_cannot_compute_is_refused(config: dict[str, Any], row: str, said: str) -> None:
    with pytest.raises(RefusedError, match=said):
        keys(config, row)


def test_command_r_has_the_positions_that_it_was_trained_with() -> None:
    assert keys(COHERE, "cohere")["context_length"] == 512
    assert keys({**COHERE, "model_max_length": 4096}, "cohere")["context_length"] == 4096


@pytest.mark.parametrize(
    ("scaling", "word"),
    [
        ({"rope_type": "default"}, "none"),
        ({"rope_type": "dynamic", "factor": 2.0}, "none"),
        ({"rope_type": "linear", "factor": 2.0}, "linear"),
    ],
)
def test_command_r_names_its_scaling(scaling: dict[str, Any], word: str) -> None:
    found = keys({**COHERE, "rope_parameters": {"rope_theta": 1e4, **scaling}}, "cohere")
    assert found["rope.scaling.type"] == word
