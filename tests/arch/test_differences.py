"""What llama.cpp cannot load is refused, what it computes otherwise is said, and nothing else: case by case."""

from __future__ import annotations

import pytest
from arch_models import ArchCase, all_cases, has_gguf
from test_keys import config_of

from aprfmt.arch.differences import GENERAL, RULES, RULES_OF_ROW, differences
from aprfmt.arch.grammar import parse_condition
from aprfmt.arch.hparams import from_hf_config, to_gguf
from aprfmt.arch.hyperparams import Hyperparams
from aprfmt.arch.loaders import OUTPUT_HEAD, supports_untied_head
from aprfmt.arch.names import special
from aprfmt.arch.row import Architecture
from aprfmt.arch.scopes import keys_of
from aprfmt.arch.table import ARCHITECTURES
from aprfmt.errors import RefusedError


def told(case: ArchCase) -> list[str]:
    """Why llama.cpp does not load the network, or what it computes otherwise."""
    h, row = from_hf_config(config_of(case)), ARCHITECTURES[case.row]
    if not supports_untied_head(row.gguf) and special(row, OUTPUT_HEAD) and not h.tied:
        return ["refused where the head's bytes are known"]
    try:
        to_gguf(h, row)
    except RefusedError as error:
        return [error.message]
    return [found.what for found in differences(row, h)]


@pytest.mark.turns(rows=True)
@pytest.mark.parametrize("case", [case for case in all_cases() if has_gguf(case.row)], ids=lambda case: case.id)
def test_what_llama_cpp_cannot_compute_is_told_and_nothing_else(case: ArchCase) -> None:
    # A text as short as that of the case shows nothing of a stretched rotation, and weights as large as these nothing
    # of an epsilon.
    unseen = ("dynamic RoPE scaling", "uses rms_norm_eps", "every GELU", "LongRoPE")
    seen = [sentence for sentence in told(case) if not any(part in sentence for part in unseen)]
    assert bool(seen) == bool(case.llama_cpp_cannot), seen


@pytest.mark.parametrize("row", ARCHITECTURES.values(), ids=lambda row: row.id)
def test_differences_are_plain_sentences_about_keys_that_are_read(row: Architecture) -> None:
    known = {name for key in keys_of(row, {}) for name in key.hf} | {*RULES, *RULES_OF_ROW, "gguf", "rope_scaling"}
    for difference in (*GENERAL, *row.differs):
        assert "llama.cpp" in difference.what
        assert not difference.what.endswith(".")
        words = {word for facts in parse_condition(difference.when or "layers") for word, _, _ in facts}
        assert {word.partition(".")[0] for word in words} <= known


def test_a_window_as_long_as_the_text_is_none() -> None:
    row = ARCHITECTURES["mistral"]
    for window, positions, expected in ((4096, 32768, 1), (4096, 4096, 0), (None, 32768, 0), (0, 32768, 0)):
        h = Hyperparams(architecture="mistral", max_position_embeddings=positions, extra={"sliding_window": window})
        said = list(differences(row, h))
        assert len(said) == expected
        assert all("4,096 tokens" in found.what and found.beyond == 4096 and not found.refused for found in said)


def test_layers_that_all_see_everything_have_no_window() -> None:
    extra = {"sliding_window": 8, "use_sliding_window": True, "layer_types": ["full_attention"] * 4}
    h = Hyperparams(architecture="qwen2", max_position_embeddings=512, extra=extra)
    assert not list(differences(ARCHITECTURES["qwen2"], h))
    extra["layer_types"] = ["full_attention", "sliding_attention"]
    assert len(list(differences(ARCHITECTURES["qwen2"], h))) == 1


def test_a_least_time_step_is_a_difference() -> None:
    steps = (1e-3, 0.33)
    found = [
        [one.what for one in differences(ARCHITECTURES["nemotron_h"], Hyperparams(extra={"time_step_min": step}))]
        for step in steps
    ]
    assert found == [[], ["llama.cpp does not raise time steps to time_step_min"]]


def test_the_size_of_a_difference_is_told() -> None:
    ropes = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 512}
    h = Hyperparams(
        head_dim=16, rope_theta=10000.0, rms_norm_eps=1e-5, max_position_embeddings=2048,
        extra={"rope_scaling": {**ropes, "beta_fast": 16.5, "beta_slow": 2.0}, "kv_lora_rank": 8},
    )  # fmt: skip
    found = [one.what for one in differences(ARCHITECTURES["llama"], h)]
    assert [text.rpartition(": ")[2] for text in found] == [
        "RoPE frequencies differ by up to 19 %", "their outputs differ by 4e-06 for inputs of RMS 1, 0.0004 for RMS 0.1"
    ]  # fmt: skip
