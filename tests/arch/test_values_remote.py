"""Hyper-parameters of decoders whose code came with their checkpoints: what their configs and GGUF keys mean."""

from __future__ import annotations

from typing import Any

import pytest
from arch_models import find_case
from test_keys import config_of

from aprfmt.arch import hparams
from aprfmt.arch.grammar import has_layer, sizes_of
from aprfmt.arch.hyperparams import Hyperparams
from aprfmt.arch.layer_sizes import divisible
from aprfmt.arch.table import ARCHITECTURES, find, find_gguf
from aprfmt.errors import CorruptError, RefusedError


def read(case: str, **config: Any) -> Hyperparams:
    return hparams.from_hf_config({**config_of(find_case(case)), **config})


def gguf_keys(h: Hyperparams) -> dict[str, Any]:
    row = ARCHITECTURES[h.architecture or ""]
    return {key.removeprefix(f"{row.gguf}."): value for key, _, value in hparams.to_gguf(h, row)}


def test_one_class_name_with_its_module_and_without() -> None:
    for name, row in (("modeling_grove_moe.GroveMoeForCausalLM", "grovemoe"), ("GroveMoeForCausalLM", "grovemoe"),
                      ("modeling_sarvam_moe.SarvamMoEForCausalLM", "bailing_moe_v2")):  # fmt: skip
        found = find(hf_class=name)
        assert found is not None
        assert found.id == row


def test_rows_of_one_gguf_name_are_told_by_their_tensors() -> None:
    for name, tensors, row in (
        ("chatglm", ["blk.0.attn_qkv.weight"], "chatglm"),
        ("chatglm", ["blk.0.attn_q.weight"], "glm"),
        ("grok", ["blk.0.post_ffw_norm.weight"], "grok2"),
        ("grok", ["blk.0.layer_output_norm.weight"], "grok"),
    ):
        found = find_gguf({"general.architecture": name}, tensors)
        assert found is not None
        assert found.id == row


def test_chatglm_counts_frequencies_by_a_ratio() -> None:
    assert gguf_keys(read("chatglm"))["rope.freq_base"] == 10000
    keys = gguf_keys(read("chatglm/glm4"))
    assert keys["rope.freq_base"] == 5000000
    assert keys["rope.dimension_count"] == 8  # half of a head


@pytest.mark.parametrize(("hidden", "width"), [(64, 256), (2048, 5632), (96, 256), (100, 512)])
def test_refact_has_the_width_that_its_code_computes(hidden: int, width: int) -> None:
    assert gguf_keys(read("refact", n_embd=hidden))["feed_forward_length"] == width


def test_plamo_shares_key_value_heads() -> None:
    assert gguf_keys(read("plamo"))["attention.head_count_kv"] == 2
    assert read("plamo", num_attention_heads=40, n_shared_head=8, hidden_size=5120).num_kv_heads == 5


def test_grok_2_calls_yarn_the_original() -> None:
    keys = gguf_keys(read("grok2"))
    assert keys["rope.scaling.type"] == "yarn"
    assert keys["rope.scaling.factor"] == 4.0
    assert keys["attention.output_scale"] == 0.25  # one over the root of a head of 16
    plain = gguf_keys(read("grok2", rope_type="default"))
    assert not any(key.startswith("rope.scaling") for key in plain)


def test_smallthinker_has_windows_where_llama_cpp_has_them() -> None:
    assert "attention.sliding_window" not in gguf_keys(read("smallthinker"))
    assert gguf_keys(read("smallthinker/windows"))["attention.sliding_window"] == 4096
    for config, what in (
        ({"sliding_window_size": 512}, "sliding window of 4096 tokens"),
        ({"sliding_window_layout": [1, 1, 1, 0]}, "sliding window of 4096 tokens"),
        ({"rope_layout": [1, 1, 1, 1]}, "applies RoPE in exactly the sliding-window layers"),
        ({"moe_layer_layout": [1, 0, 1, 1]}, "layers without experts"),
    ):
        with pytest.raises(RefusedError, match=what):
            gguf_keys(read("smallthinker/windows", **config))
    with pytest.raises(RefusedError, match="applies RoPE in exactly the sliding-window layers"):
        gguf_keys(read("smallthinker", rope_layout=[0, 1, 1, 1]))


def test_maple_limits_each_layer() -> None:
    assert gguf_keys(read("maple"))["swiglu_clamp_exp"] == [7.0] * 4
    assert gguf_keys(read("maple", swiglu_limit=5.0))["swiglu_clamp_exp"] == [5.0] * 4


@pytest.mark.parametrize(
    ("width", "divisor", "want"),
    [(640.0, 256, 768), (934.4, 256, 1024), (320.0, 256, 512), (3.0, 8, 8), (100.0, 1, 100)],
)  # fmt: skip
def test_openelm_rounds_widths(width: float, divisor: int, want: int) -> None:
    assert divisible(width, divisor) == want


def test_sizes_of_a_layer() -> None:
    h = read("openelm")
    assert [sizes_of(h, layer)["q"] for layer in range(3)] == [64, 64, 96]
    assert [sizes_of(h, layer)["kv"] for layer in range(3)] == [32, 32, 48]
    assert [sizes_of(h, layer)["ffn"] for layer in range(3)] == [256, 256, 512]
    assert "ffn" not in sizes_of(h)


def test_deci_has_layers_without_attention_or_mlp() -> None:
    h = read("deci/blocks")
    keys = gguf_keys(h)
    assert keys["attention.head_count"] == [4, 0, 4, 0, 4]
    assert keys["attention.head_count_kv"] == [2, 0, 0, 0, 1]
    assert keys["feed_forward_length"] == [256, 256, 256, 0, 512]
    assert [has_layer("heads&!kv_heads", h, layer) for layer in range(5)] == [False, False, True, False, False]
    with pytest.raises(CorruptError, match="4 layers"):
        read("deci/blocks", block_configs=h.extra["block_configs"][:4])  # type: ignore[index]


def test_minicpm3_without_a_low_rank_of_queries_is_refused() -> None:
    with pytest.raises(RefusedError, match="q_lora_rank is null"):
        gguf_keys(read("minicpm3/no_q_rank"))
    assert "attention.value_length" not in gguf_keys(read("minicpm3"))
    assert gguf_keys(read("minicpm3/v_head_dim"))["attention.value_length"] == 24


def test_a_number_of_another_row_is_no_error_of_ours() -> None:
    h = read("openelm")
    h.rms_norm_eps = 1e-5  # an .apr may say anything
    with pytest.raises(RefusedError, match="rms_norm_eps is 1e-05"):
        gguf_keys(h)
