"""Hyper-parameters of state-space models and hybrids: what configs, old ones too, and GGUF keys mean."""

from __future__ import annotations

from typing import Any

import pytest

from aprfmt.arch import hparams
from aprfmt.arch.hyperparams import Hyperparams
from aprfmt.arch.table import ARCHITECTURES
from aprfmt.errors import AprError

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "vocab_size": 320,
}


def read(name: str, config: dict[str, Any]) -> Hyperparams:
    return hparams.from_hf_config({"architectures": [name], **SIZES, **config})


def gguf_keys(h: Hyperparams) -> dict[str, Any]:
    assert h.architecture is not None
    row = ARCHITECTURES[h.architecture]
    return {key.removeprefix(f"{row.gguf}."): value for key, _, value in hparams.to_gguf(h, row)}


def from_gguf(row: str, **kv: Any) -> Hyperparams:
    name = ARCHITECTURES[row].gguf
    keys = {f"{name}.{key.replace('__', '.')}": value for key, value in kv.items()}
    return hparams.from_gguf({"general.architecture": name, **keys})


@pytest.mark.parametrize(
    ("adjust", "width"),
    [
        ({}, 256),
        ({"block_multiple_of": 32}, 64),
        ({"block_multiple_of": 10, "block_ffn_dim_multiplier": 1.2}, 80),
        ({"block_multiple_of": 1, "block_ffn_dim_multiplier": None}, 64),
        ({"block_auto_adjust_ff_dim": False}, 96),
    ],
)
def test_lfm2_holds_the_width_that_its_mlp_has(adjust: dict[str, Any], width: int) -> None:
    h = read("Lfm2ForCausalLM", {"layer_types": ["conv", "full_attention"] * 2, **adjust})
    assert h.intermediate_size == width
    assert gguf_keys(h)["feed_forward_length"] == width
    config = hparams.to_hf_config(h)
    assert (config["intermediate_size"], config["block_auto_adjust_ff_dim"]) == (width, False)


def test_lfm2_of_an_old_config() -> None:
    h = read("Lfm2ForCausalLM", {"full_attn_idxs": [1, 2], "intermediate_size": None, "block_ff_dim": 96})
    assert h.extra["layer_types"] == ["conv", "full_attention", "full_attention", "conv"]
    assert gguf_keys(h)["attention.head_count_kv"] == [0, 2, 2, 0]
    assert h.intermediate_size == 256


def test_layers_of_a_gguf_are_told_by_their_kv_heads() -> None:
    sizes = {"block_count": 3, "embedding_length": 64, "attention__head_count": 4}
    lfm2 = from_gguf("lfm2", **sizes, attention__head_count_kv=[0, 2, 0])
    assert lfm2.extra["layer_types"] == ["conv", "full_attention", "conv"]
    assert lfm2.num_kv_heads == 2
    granite = from_gguf("granitemoehybrid", **sizes, attention__head_count_kv=[2, 0, 0], logit_scale=8.0)
    assert granite.extra["layer_types"] == ["full_attention", "linear_attention", "linear_attention"]


@pytest.mark.parametrize(
    ("config", "recurrent"),
    [
        ({}, [True, True, True, False]),
        ({"full_attention_interval": 2}, [True, False, True, False]),
        ({"layer_types": ["full_attention", *["linear_attention"] * 3]}, [False, True, True, True]),
    ],
)
def test_recurrent_layers(config: dict[str, Any], recurrent: list[bool]) -> None:
    h = read("Qwen3_5ForCausalLM", config)
    assert gguf_keys(h)["attention.recurrent_layers"] == recurrent


def test_recurrent_layers_of_a_gguf() -> None:
    told = from_gguf("qwen3_5_text", block_count=2, attention__recurrent_layers=[False, True])
    assert told.extra["layer_types"] == ["full_attention", "linear_attention"]
    regular = from_gguf("qwen3_5_text", block_count=4, full_attention_interval=2)
    assert regular.extra["layer_types"] == ["linear_attention", "full_attention"] * 2


def test_heads_of_a_delta_net() -> None:
    config = {"linear_num_value_heads": 6, "linear_value_head_dim": 16, "linear_num_key_heads": 3}
    config["linear_key_head_dim"] = 16
    keys = gguf_keys(read("Qwen3_5ForCausalLM", config))
    assert (keys["ssm.inner_size"], keys["ssm.time_step_rank"], keys["ssm.group_count"]) == (96, 6, 3)
    h = from_gguf("qwen3_5_text", ssm__inner_size=96, ssm__time_step_rank=6, ssm__group_count=3)
    assert h.extra["linear_value_head_dim"] == 16


def test_sections_of_positions_are_always_written_for_qwen3_5() -> None:
    assert gguf_keys(read("Qwen3_5ForCausalLM", {}))["rope.dimension_sections"] == [11, 11, 10, 0]
    told = {"rope_parameters": {"rope_type": "default", "mrope_section": [4, 2, 2]}}
    assert gguf_keys(read("Qwen3_5ForCausalLM", told))["rope.dimension_sections"] == [4, 2, 2, 0]


def test_mamba_derives_what_its_config_leaves_out() -> None:
    h = read("MambaForCausalLM", {"hidden_size": 40, "intermediate_size": None, "time_step_rank": "auto"})
    keys = gguf_keys(h)
    assert (keys["ssm.inner_size"], keys["ssm.time_step_rank"]) == (80, 3)
    assert (keys["feed_forward_length"], keys["attention.head_count"]) == (0, 0)
    assert (
        gguf_keys(read("MambaForCausalLM", {"time_step_rank": 7, "intermediate_size": None}))["ssm.time_step_rank"] == 7
    )


def test_mamba2_of_a_gguf() -> None:
    h = from_gguf("mamba2", embedding_length=64, ssm__inner_size=192, ssm__time_step_rank=12)
    assert (h.extra["expand"], h.extra["num_heads"], h.extra["head_dim"]) == (3, 12, 16)


def test_falcon_mamba_and_mamba_share_a_gguf_name() -> None:
    assert from_gguf("mamba", ssm__dt_b_c_rms=True).architecture == "falcon_mamba"
    assert from_gguf("mamba", ssm__dt_b_c_rms=False).architecture == "mamba"
    assert from_gguf("mamba").architecture == "mamba"


def test_granite_without_experts() -> None:
    config = {"layer_types": ["mamba", "attention"] * 2, "shared_intermediate_size": 40, "num_local_experts": 0}
    keys = gguf_keys(read("GraniteMoeHybridForCausalLM", config))
    assert (keys["feed_forward_length"], keys["expert_count"]) == (40, 0)
    assert "expert_used_count" not in keys
    assert keys["rope.scaling.finetuned"] is False
    with pytest.raises(AprError, match="position_embedding_type"):
        gguf_keys(read("GraniteMoeHybridForCausalLM", config | {"position_embedding_type": "alibi"}))


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("MambaForCausalLM", {"use_bias": True, "intermediate_size": None}),
        ("Mamba2ForCausalLM", {"use_bias": True}),
        ("Lfm2ForCausalLM", {"conv_bias": True}),
        ("Qwen3NextForCausalLM", {"attention_bias": True}),
        ("Qwen3NextForCausalLM", {"norm_topk_prob": False}),
    ],
)
def test_what_llama_cpp_cannot_compute_is_refused(name: str, config: dict[str, Any]) -> None:
    h = read(name, {"layer_types": ["full_attention"] * 4, "num_experts": 4, "num_experts_per_tok": 2, **config})
    with pytest.raises(AprError, match=next(iter(config))):
        gguf_keys(h)


def test_layer_types_of_another_kind_are_refused() -> None:
    with pytest.raises(AprError):
        gguf_keys(read("Lfm2ForCausalLM", {"layer_types": "conv"}))
    with pytest.raises(AprError):
        read("Lfm2ForCausalLM", {"full_attn_idxs": 3})


def test_nemotron_h_of_an_old_config() -> None:
    h = read("NemotronHForCausalLM", {"hybrid_override_pattern": "M-*", "num_hidden_layers": None})
    assert h.extra["layers_block_type"] == ["linear_attention", "mlp", "full_attention"]
    keys = gguf_keys(h)
    assert keys["block_count"] == 3
    assert keys["feed_forward_length"] == [0, 96, 0]
    assert keys["attention.head_count_kv"] == [0, 0, 2]
    with pytest.raises(AprError, match="hybrid_override_pattern"):
        read("NemotronHForCausalLM", {"hybrid_override_pattern": "MX"})


@pytest.mark.parametrize(("experts", "kind"), [({}, "mlp"), ({"expert_count": 4}, "moe")])
def test_nemotron_h_of_a_gguf(experts: dict[str, int], kind: str) -> None:
    row = "nemotron_h_moe" if experts else "nemotron_h"
    lists = {"attention__head_count_kv": [0, 2, 0], "feed_forward_length": [0, 0, 96]}
    h = from_gguf(row, block_count=3, **lists, **experts)
    assert h.extra["layers_block_type"] == ["linear_attention", "full_attention", kind]


def test_granite_4_without_state_space_layers_is_a_granite() -> None:
    h = read("GraniteMoeHybridForCausalLM", {"layer_types": ["attention"] * 4})
    assert h.architecture == "granite4"
    assert from_gguf("granite", ssm__inner_size=128).architecture == "granite4"
    assert from_gguf("granite").architecture == "granite"
