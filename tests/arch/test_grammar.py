"""The languages of table rows: sizes and conditions, and what is not one."""

from __future__ import annotations

import pytest

from aprfmt.arch.grammar import (
    evaluate,
    has_layer,
    holds,
    is_config_of,
    is_gguf_of,
    parse_condition,
    parse_order,
    shape_of,
    size_words,
    sizes_of,
)
from aprfmt.arch.hyperparams import Hyperparams
from aprfmt.arch.table import ARCHITECTURES


@pytest.mark.parametrize(
    ("size", "number"),
    [("7", 7), ("heads*head_dim", 48), ("heads*head_dim+2*kv", 80), ("head_dim/2", 4), ("heads/4", None),
     ("2*ffn", None), ("kv-heads", 10), ("heads-kv", None), ("heads*head_dim/kv", 3), ("kv/zero", None)],
)  # fmt: skip
def test_sizes(size: str, number: int | None) -> None:
    assert evaluate(size, {"heads": 6, "head_dim": 8, "kv": 16, "zero": 0}) == number


def test_words_shapes_and_orders() -> None:
    assert size_words("2*kv_lora_rank+q/4") == {"kv_lora_rank", "q"}
    assert shape_of("q,2*kv,ffn", {"q": 3, "kv": 2}) == (3, 4, None)
    assert evaluate("2*attn.heads", {"attn.heads": 3}) == 6
    assert parse_order("swap:heads,2,head_dim/2") == ("swap", ["heads", "2", "head_dim/2"])


@pytest.mark.parametrize(
    "size", ["", "q+", "2kv", "q kv", "q,kv", "-q", "(q)", "q**2", "q+-kv", "attn.", "attn.2", "ø"]
)
def test_what_is_not_a_size(size: str) -> None:
    with pytest.raises(ValueError, match="is not a valid size"):
        evaluate(size, {"q": 1, "kv": 1})


@pytest.mark.parametrize(
    ("condition", "true"),
    [("bias", True), ("!bias", False), ("absent", False), ("!absent", True), ("none", False), ("zero", False),
     ("absent|bias", True), ("bias&rank", True), ("bias&!rank", False), ("bias&!rank|rank", True),
     ("rank=8", True), ("rank=9", False), ("!rank=9", True), ("kinds=conv", True), ("kinds=co", False),
     ("word=con", False), ("word=conv", True), ("bias=True", True), ("absent=None", True)],
)  # fmt: skip
def test_conditions(condition: str, true: bool) -> None:
    facts = {"bias": True, "rank": 8, "kinds": ["conv", 3], "word": "conv", "none": None, "zero": 0}
    assert holds(condition, facts.get) is true


@pytest.mark.parametrize(
    "condition", ["", "|moe", "moe|", "moe||dense", "a&", "!", "!!a", "a=", "=moe", "a b", "has:b", "a=b=c", "2a"]
)
def test_what_is_not_a_condition(condition: str) -> None:
    with pytest.raises(ValueError, match="unknown condition"):
        parse_condition(condition)


def _layers(condition: str, n: int, experts: int | None = 4, **extra: object) -> list[int]:
    h = Hyperparams(num_experts=experts, extra=extra)
    return [layer for layer in range(n) if has_layer(condition, h, layer)]


def test_layers() -> None:
    mixed = ["conv", "full_attention"]
    assert _layers("", 2, layer_types=mixed) == [0, 1]
    assert _layers("conv", 3, layer_types=mixed) == [0]
    assert _layers("conv|full_attention", 3, layer_types=mixed) == [0, 1]
    assert _layers("!first", 3) == [1, 2]
    assert _layers("moe", 3, None) == []
    assert _layers("moe", 3, first_k_dense_replace=1) == [1, 2]
    assert _layers("dense", 3, first_k_dense_replace=1) == [0]
    assert _layers("moe", 6, decoder_sparse_step=2, mlp_only_layers=[3]) == [1, 5]
    # Nemotron-H calls one kind of layer "moe": the word alone asks whether there are experts at all.
    assert _layers("kind=moe", 3, layers_block_type=["mlp", "moe"]) == [1]
    assert _layers("moe", 3, layers_block_type=["mlp", "moe"]) == [0, 1, 2]


def test_which_config() -> None:
    granite4, moe = ARCHITECTURES["granite4"], ARCHITECTURES["nemotron_h_moe"]
    assert is_config_of(granite4, {"layer_types": ["attention"]})
    assert not is_config_of(granite4, {"layer_types": ["attention", "mamba"]})
    assert not is_config_of(granite4, {})
    assert is_config_of(moe, {"layers_block_type": ["mlp", "moe"]})
    assert not is_config_of(moe, {"layers_block_type": "moe"})


def test_which_gguf() -> None:
    distilbert, deepseek = ARCHITECTURES["distilbert"], ARCHITECTURES["deepseek_v3"]
    assert is_gguf_of(distilbert, {}, ["token_embd.weight"])
    assert not is_gguf_of(distilbert, {}, ["token_embd.weight", "token_types.weight"])
    assert not is_gguf_of(distilbert, {}, None)  # the tensors are unknown
    assert is_gguf_of(deepseek, {"deepseek2.expert_gating_func": 2}, ())
    assert is_gguf_of(deepseek, {}, ["blk.3.exp_probs_b.bias"])
    assert not is_gguf_of(deepseek, {"deepseek2.expert_gating_func": 1}, ["blk.3.exp_probs.bias"])


def test_a_table_of_ngrams_has_a_prime_of_rows_for_each_hash() -> None:
    config = {"ngram_vocab_size_base": 100, "ngram_size": 3, "heads_per_ngram": 2}
    extra: dict[str, object] = {**config, "make_ngram_vocab_size_divisible_by": 128}
    sizes = sizes_of(Hyperparams(hidden_size=64, extra=extra), 0)
    assert (sizes["ngram_heads"], sizes["ngram_rows"], sizes["ngram_width"]) == (4, 512, 16)  # 101 + 103 + 107 + 109
    assert "ngram_width" not in sizes_of(Hyperparams(hidden_size=66, extra=extra), 0)
    for wrong in ({"ngram_vocab_size_base": 1 << 40}, {"heads_per_ngram": 1000}, {"ngram_size": 1}):
        assert "ngram_rows" not in sizes_of(Hyperparams(hidden_size=64, extra=extra | wrong), 0)
