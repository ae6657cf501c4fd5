"""The keys that llama.cpp insists on: our own GGUFs have them, and each that is gone is named."""

from __future__ import annotations

from typing import Any

import pytest
from arch_models import ArchCase, all_cases
from test_keys import config_of

from aprfmt.arch.gguf_keys import ALWAYS, key_problems
from aprfmt.arch.hparams import from_hf_config, to_gguf
from aprfmt.arch.loaders import loader_of
from aprfmt.arch.row import OF_TENSOR, REQUIRED
from aprfmt.arch.scopes import full_key
from aprfmt.arch.table import ARCHITECTURES

BASE = [case for case in all_cases() if not case.llama_cpp_cannot]


def written(case: ArchCase) -> dict[str, Any]:
    h, row = from_hf_config(config_of(case)), ARCHITECTURES[case.row]
    kv = {key: value for key, _, value in to_gguf(h, row, vocab_size=512)}
    # What tensors and the tokenizer bring where the config does not.
    numbers = {full_key(row, key.gguf): 1.0 for key in row.keys if key.role == OF_TENSOR}
    return {"tokenizer.ggml.token_type_count": 2} | numbers | kv


@pytest.mark.turns(rows=True)
@pytest.mark.parametrize("case", BASE, ids=lambda case: case.id)
def test_we_write_every_key(case: ArchCase) -> None:
    row = ARCHITECTURES[case.row]
    kv, loader = written(case), loader_of(row.gguf)
    has_experts = from_hf_config(config_of(case)).num_experts
    counts = kv.get(full_key(row, "expert_used_count"))
    chooses = next(i for i, count in enumerate(counts) if count) if isinstance(counts, list) else 0
    shapes = {f"blk.{chooses}.ffn_gate_inp.weight": (4, 64)} if has_experts else {}
    assert list(key_problems(row, kv, shapes)) == []
    needed = [key.gguf for key in row.keys if key.needed == REQUIRED]
    for suffix in dict.fromkeys((*ALWAYS, *needed, *sorted(loader.required if loader else ()))):
        key = full_key(row, suffix)
        assert key in [name for name, _ in key_problems(row, {k: v for k, v in kv.items() if k != key}, shapes)]


def test_lists_of_another_length() -> None:
    row = ARCHITECTURES["lfm2"]
    case = next(case for case in BASE if case.id == "lfm2")
    kv = written(case)
    key = "lfm2.attention.head_count_kv"
    kv[key] = [*kv[key], 2]
    assert [name for name, _ in key_problems(row, kv, {})] == [key]


def test_absent_numbers_mean_what_llama_cpp_takes_for_them() -> None:
    row = ARCHITECTURES["llama"]
    kv = written(next(case for case in BASE if case.id == "llama"))
    del kv["llama.attention.head_count_kv"]
    same, fewer = {"blk.0.attn_k.weight": (64, 64)}, {"blk.0.attn_k.weight": (32, 64), "blk.1.attn_k.weight": (32, 64)}
    assert list(key_problems(row, kv, same)) == []
    assert [name for name, _ in key_problems(row, kv, fewer)] == ["llama.attention.head_count_kv"]


def test_keys_that_rows_need() -> None:
    """What llama.cpp guesses wrong without a key, whatever its loader asks for."""
    told = {name for name, _ in key_problems(ARCHITECTURES["lfm2"], {}, {})}
    assert "lfm2.attention.head_count_kv" in told
    row, key = ARCHITECTURES["deepseek_v2"], "deepseek2.attention.q_lora_rank"
    missing = [key in dict(key_problems(row, {"deepseek2.block_count": layers}, {})) for layers in (27, 60)]
    assert missing == [False, True]


@pytest.mark.parametrize(("row", "key"), [("lfm2", "shortconv.l_cache"), ("qwen4_exp_text", "ple.conv_kernel")])
def test_convolutions_without_a_state(row: str, key: str) -> None:
    name = full_key(ARCHITECTURES[row], key)
    told = [dict(key_problems(ARCHITECTURES[row], {name: size}, {})).get(name, "") for size in (1, 2)]
    assert ["is 1: " in text for text in told] == [True, False]


def test_rotations_that_follow_the_first_layer() -> None:
    row = ARCHITECTURES["laguna"]
    sizes = {full_key(row, "rope.dimension_count"): 8, full_key(row, "rope.dimension_count_swa"): 16}
    told = [
        dict(key_problems(row, sizes | {full_key(row, "attention.sliding_window_pattern"): pattern}, {}))
        for pattern in ([True, False], [False, True], [True, True])
    ]
    name = full_key(row, "rope.dimension_count")
    assert ["rotates 16 values in every layer" in found.get(name, "") for found in told] == [True, False, False]


def test_index_heads_hold_what_is_rotated() -> None:
    row = ARCHITECTURES["minimax_m3"]
    turned, name = {full_key(row, "rope.dimension_count"): 12}, full_key(row, "attention.indexer.key_length")
    told = [dict(key_problems(row, turned | {name: size}, {})).get(name, "") for size in (8, 12)]
    assert ["rotates 12 values" in text for text in told] == [True, False]
