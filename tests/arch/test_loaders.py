"""llama.cpp's loaders, as its own source has them, and the architectures that are written for them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from arch_models import has_gguf

from aprfmt.arch import rope, rope_factors, rope_gguf, yarn
from aprfmt.arch.differences import differences
from aprfmt.arch.gguf_keys import key_problems
from aprfmt.arch.grammar import is_needed
from aprfmt.arch.heads import repeats_embedding
from aprfmt.arch.hparams import to_gguf
from aprfmt.arch.hyperparams import Hyperparams
from aprfmt.arch.loaders import Loader, loader_of, supports_untied_head
from aprfmt.arch.row import REQUIRED, Architecture
from aprfmt.arch.table import ARCHITECTURES
from aprfmt.errors import RefusedError
from aprfmt.types import Shape
from loaders import Library, table

LOADED = [row for row in ARCHITECTURES.values() if has_gguf(row.id)]
ROWS = pytest.mark.parametrize("row", LOADED, ids=lambda row: row.id)
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip


def loader(row: Architecture) -> Loader:
    found = loader_of(row.gguf)
    assert found is not None
    return found


def test_the_table_is_that_of_the_source(llama_cpp_source: Path) -> None:
    stored = Path(yarn.__file__).with_name("loaders.jsonl").read_text()
    assert table(llama_cpp_source) == stored


def test_what_is_read_off_code() -> None:
    library = object.__new__(Library)
    library.names = {"LLM_KV_A": "%s.a", "LLM_KV_B": "%s.b", "LLM_KV_C": "%s.c", "LLM_TENSOR_X": "blk.%d.x"}
    read = library.keys(
        "{ ml.get_key(LLM_KV_A, h.a); ml.get_key(LLM_KV_B, h.b, false); if (h.a) { ml.get_key(LLM_KV_C, h.c); } }"
    )
    assert read.to_json() == {"required": ["a"], "optional": ["b", "c"]}
    code = '{ for (int i = 0; i < n_layer; ++i) { create_tensor(tn(LLM_TENSOR_X, "weight", i), {n_embd, n_embd}, 0); '
    assert library.tensors(code + "} }").to_json() == {"required": ["blk.x.weight"], "optional": []}
    assert [*library.square(code)] == ["blk.x.weight"]
    optional = code.replace(", 0)", ", TENSOR_NOT_REQUIRED)") + "} }"
    assert library.tensors(optional).to_json() == {"required": [], "optional": ["blk.x.weight"]}


@ROWS
def test_tensors_of_every_model_are_known_to_the_loader(row: Architecture) -> None:
    always = {n.replace("{n}", "0") for t in row.tensors if t.need == REQUIRED and not t.layers for n in t.gguf}
    assert not [*loader(row).unknown(always)]


@ROWS
def test_tensors_that_the_loader_needs_are_in_the_row(row: Architecture) -> None:
    made = {*row.flat_norms, *row.copies, *(name for t in row.tensors for name in t.gguf)}
    made |= {"token_embd.weight"} if row.id in ("qwen3_tts_talker", "pocket_tts", "pocket_tts_published") else set()
    assert loader(row).needed <= {n.replace(".{n}", "").replace("blk.0.", "blk.") for n in made}


@ROWS
def test_rope_factors_are_written_where_the_graph_reads_them(row: Architecture) -> None:
    h = Hyperparams(rope_theta=1e4, head_dim=16, max_position_embeddings=512, extra={"rope_scaling": LLAMA3})
    reads = rope.FREQS in loader(row).rope_factors
    assert bool(rope_factors.factor_tensors(h, row)) == reads
    if any(key.role == "rope" for key in row.keys) and not reads:
        with pytest.raises(RefusedError, match=r"rope_type is 'llama3', which llama.cpp's .* does not support"):
            rope_gguf.to_gguf(h, row)


def test_networks_that_load_factors_and_ignore_them() -> None:
    for gguf in ("falcon-h1", "refact", "pangu-embedded"):
        found = loader_of(gguf)
        assert found is not None
        assert rope.FREQS in found.known
        assert not found.rope_factors


@pytest.mark.parametrize("factor", [1.5, 16.0])
@pytest.mark.parametrize("gguf", ["llama", "deepseek2", "deepseek32", "mistral4"])
@pytest.mark.parametrize(("t", "s"), [(1.0, 1.0), (1.277, 1.0), (1.0, 1.277), (0.9, 1.3)])
def test_attention_scales_come_back(gguf: str, factor: float, t: float, s: float) -> None:
    found = yarn.to_runtime(gguf, "yarn", factor, t, s, 0.0)
    if gguf == "llama":
        assert (found is None) == (s != 1)
    if found is not None:
        assert yarn.from_runtime(gguf, "yarn", factor, *found) == pytest.approx((t, s))


def test_attention_scales_as_published() -> None:
    """DeepSeek-V3 names both mscales 1, DeepSeek-V2-Lite 0.707: their GGUFs have a tenth of them, and no factor."""
    for mscale in (1.0, 0.707):
        s = 1 + 0.1 * mscale * math.log(40)
        log, attention = yarn.to_runtime("deepseek2", "yarn", 40.0, 1.0, s, mscale) or (0, 0)
        assert (log, attention) == pytest.approx((mscale, 1.0))
    assert yarn.to_runtime("glm-dsa", "yarn", 40.0, 1.0, 1.3, 1.0) is None  # its loader reads no logarithm


KV: dict[str, object] = {
    "block_count": 2, "context_length": 64, "embedding_length": 8, "attention.head_count": 2,
    "attention.layer_norm_rms_epsilon": 1e-5, "feed_forward_length": 8,
}  # fmt: skip


def problems(row: str, kv: Mapping[str, object], shapes: Mapping[str, Shape]) -> str:
    found = ARCHITECTURES[row]
    return "; ".join(
        f"{key} {what}" for key, what in key_problems(found, {f"{found.gguf}.{k}": v for k, v in kv.items()}, shapes)
    )


def test_what_the_loader_does_not_read_or_take() -> None:
    assert problems("qwen3", KV, {}) == ""
    said = problems("qwen3", KV, {"blk.1.attn_output.bias": (8,)})
    assert "blk.1.attn_output.bias is not a tensor of its 'qwen3' (config.json: attention_bias is true)" in said
    said = problems("cohere2", KV, {"blk.0.attn_output.weight": (8, 12)})
    assert (
        "blk.0.attn_output.weight is 8x12: its 'cohere2' needs heads times head_dim to equal the hidden size, 8" in said
    )
    groups = {"expert_count": 6, "expert_used_count": 2, "expert_group_count": 3, "expert_group_used_count": 3}
    assert "cannot select 3 of 3 groups of 6 experts" in problems("deepseek_v3", KV | groups, {})
    assert "groups" not in problems("deepseek_v3", KV | groups | {"expert_group_used_count": 2}, {})


def test_an_architecture_that_llama_cpp_does_not_know() -> None:
    row = replace(ARCHITECTURES["qwen3"], gguf="qwen9")
    found = dict(key_problems(row, {f"qwen9.{key}": value for key, value in KV.items()}, {}))
    assert found == {"general.architecture": "is 'qwen9', an architecture that llama.cpp does not know"}


def test_layers_of_one_kind() -> None:
    ssm, attention = {"blk.0.ssm_out.weight": (8, 16)}, {"blk.1.attn_k.weight": (8, 8)}
    assert "has no attention layer" in problems("qwen3_next", KV, ssm)
    assert "has no recurrent layer" in problems("qwen3_next", KV, attention)
    assert "layer_types" not in problems("qwen3_next", KV, ssm | attention)
    assert "layer_types" not in problems("qwen3_next", KV | {"nextn_predict_layers": 1, "block_count": 2}, attention)
    window = {"attention.sliding_window": 8, "attention.sliding_window_pattern": [False, False]}
    assert "has no sliding-window layer" in problems("exaone_moe", KV | window, {})
    both = window | {"attention.sliding_window_pattern": [True, False]}
    assert "sliding window" not in problems("exaone_moe", KV | both, {})
    only = window | {"attention.sliding_window_pattern": [True, True]}
    assert "has no full-attention layer" in problems("modernbert", KV | only, {})
    assert "full attention" not in problems("exaone_moe", KV | only, {})


def test_every_switch_of_a_tensor_without_a_place_is_refused_by_its_name() -> None:
    row = ARCHITECTURES["olmo2"]
    h = Hyperparams(num_layers=1, extra={"attention_bias": True})
    needs = [t for t in row.tensors if t.need == "attention_bias" and t.gguf[0].endswith("attn_output.bias")]
    assert needs
    assert all(is_needed(row, t.need, h) for t in needs)
    assert "(config.json: attention_bias is true)" in problems("olmo2", KV, {"blk.0.attn_output.bias": (8,)})


def test_experts_of_every_group_are_a_plain_choice() -> None:
    h = Hyperparams(
        num_layers=1, max_position_embeddings=8, hidden_size=8, intermediate_size=8, num_heads=2, num_experts=4,
        extra={"n_group": 2, "topk_group": 2},
    )  # fmt: skip
    keys = {key for key, _, _ in to_gguf(h, ARCHITECTURES["deepseek_v3"], complete=False)}
    assert not [key for key in keys if "expert_group" in key]
    h.extra["topk_group"] = 1
    keys = {key for key, _, _ in to_gguf(h, ARCHITECTURES["deepseek_v3"], complete=False)}
    assert len([key for key in keys if "expert_group" in key]) == 2


def test_rotated_parts_that_no_head_has() -> None:
    assert "is 5, an odd number" in problems("qwen3_next", KV | {"rope.dimension_count": 5}, {})
    sections = {"rope.dimension_sections": [11, 11, 10, 0], "attention.key_length": 12}
    assert "add up to 32 pairs, but a head has 12 values" in problems("qwen3_5_text", KV | sections, {})
    fitting = sections | {"attention.key_length": 64}
    assert "pairs" not in problems("qwen3_5_text", KV | fitting, {})


def test_heads_that_are_rotated_whole_or_not_at_all_so_far() -> None:
    part = {"rope.dimension_count": 4, "attention.key_length": 8}
    assert "is 4: its 'granite' cannot rotate 4 of 8 values per head" in problems("granite", KV | part, {})
    assert "rotate" not in problems("glm4", KV | part, {})
    more = {"rope.dimension_count": 12, "attention.key_length": 8}
    assert "is 12: its 'glm4' cannot rotate 12 of 8 values per head" in problems("glm4", KV | more, {})


def test_more_experts_than_there_are() -> None:
    experts = {"expert_count": 4, "expert_used_count": 5}
    assert "is 5: its loader cannot select 5 of 4 experts" in problems("qwen3_moe", KV | experts, {})
    assert "select" not in problems("qwen3_moe", KV | experts | {"expert_used_count": 4}, {})
    assert "is 0: its loader" in problems("qwen3_moe", KV | experts | {"expert_used_count": 0}, {})
    assert "select" not in problems("nemotron_h_moe", KV | experts | {"expert_used_count": [0, 4]}, {})
    routers = dict.fromkeys(("blk.0.ffn_gate_inp.weight", "blk.1.ffn_gate_inp.weight"), (4, 8))
    assert "is 0: its loader" in problems("hunyuan_v1_moe", KV | experts | {"expert_used_count": [1, 0]}, routers)
    groups = {"expert_count": 4, "expert_used_count": 3, "expert_group_count": 2, "expert_group_used_count": 1}
    assert "is 3: its loader cannot select 3 of 2 experts" in problems("deepseek_v3", KV | groups, {})


def test_periods_of_windows() -> None:
    one = {"block_count": 1, "attention.sliding_window": 8, "attention.sliding_window_pattern": 3}
    assert "has no sliding-window layer" in problems("modernbert", KV | one, {})
    assert "sliding window" not in problems("modernbert", KV | one | {"block_count": 2}, {})
    assert "sliding window" not in problems("exaone_moe", KV | one, {})


@pytest.mark.parametrize(("row", "period"), [("gemma_embedding", 6), ("llama4_text", 4)])
def test_inputs_of_full_attention_that_no_layer_uses(row: str, period: int) -> None:
    keys = KV | ({"attention.sliding_window": 8} if row != "llama4_text" else {})
    assert "has no full-attention layer" in problems(row, keys | {"block_count": period - 1}, {})
    assert "attention layer" not in problems(row, keys | {"block_count": period}, {})


def test_a_loader_that_reads_no_epsilon() -> None:
    assert [row.id for row in LOADED if not loader(row).reads_epsilon] == ["qwen2_vl"]

    def told(eps: float) -> list[str]:
        return [found.what for found in differences(ARCHITECTURES["qwen2_vl"], Hyperparams(rms_norm_eps=eps))]

    assert told(1e-6) == []
    assert "does not read rms_norm_eps (0.001)" in "".join(told(1e-3))


def test_layers_with_a_window_take_no_factor_of_the_others() -> None:
    yarn_of = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    sliding = {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    h = Hyperparams(rope_theta=1e6, head_dim=16, extra={"rope_scaling": yarn_of, "rope_layers": sliding})
    row = ARCHITECTURES["gemma3_text"]
    assert rope_gguf.runtime_scales(h, row)[1] == pytest.approx(1)
    h.extra["rope_scaling"] = {**yarn_of, "attention_factor": 1.3}
    with pytest.raises(RefusedError, match=r"scales RoPE by 1.3; llama.cpp's gemma3 would scale that of sliding"):
        rope_gguf.runtime_scales(h, row)
    del h.extra["rope_layers"]
    assert rope_gguf.runtime_scales(h, row)[1] > 1


def test_the_loader_decides_whether_a_tied_head_is_repeated() -> None:
    assert not any(repeats_embedding(gguf, True, {}) for gguf in ("llama", "gemma", "t5"))
    assert all(repeats_embedding(gguf, True, {}) for gguf in ("gpt-oss", "internlm2", "baichuan"))
    assert [supports_untied_head(gguf) for gguf in ("gemma", "llama")] == [False, True]
