"""Rotary embeddings: every spelling of a config, GGUF keys and GGUF tensors mean the same frequencies."""

from __future__ import annotations

import math
import struct
from dataclasses import replace
from typing import Any

import pytest
from arch_cases import DIMS, LINEAR, LLAMA3, LLAMA3_FACTORS, YARN
from arch_models import find_case

from aprfmt.arch import rope, rope_factors, rope_gguf
from aprfmt.arch.blocks.decoder import DECODER, ROPE_DIM
from aprfmt.arch.hparams import from_gguf, from_hf_config, to_gguf, to_hf_config
from aprfmt.arch.hyperparams import Hyperparams
from aprfmt.arch.row import Architecture
from aprfmt.arch.table import ARCHITECTURES
from aprfmt.errors import CorruptError, RefusedError

LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0 + i / 8 for i in range(8)],
    "long_factor": [1.5 + i for i in range(8)],
    "original_max_position_embeddings": 64,
}
LLAMA, MAINCODER = ARCHITECTURES["llama"], ARCHITECTURES["maincoder"]
"""One whose class rotates whole heads, and one that transformers does not have."""


def read(row: str = "llama", **config: Any) -> Hyperparams:
    return from_hf_config({**DIMS, "model_type": row, "max_position_embeddings": 256, **config})


def gguf(h: Hyperparams, row: Architecture = LLAMA) -> dict[str, Any]:
    """Keys of a GGUF, floats as it has them."""
    return {
        key: struct.unpack("<f", struct.pack("<f", value))[0] if kind == "FLOAT32" else value
        for key, kind, value in to_gguf(h, row)
    }


def keys(h: Hyperparams, row: Architecture = LLAMA) -> dict[str, Any]:
    """Its rope keys by suffix."""
    found = {key.removeprefix(f"{row.gguf}."): value for key, value in gguf(h, row).items()}
    return {key: value for key, value in found.items() if key.startswith("rope.")}


def back(h: Hyperparams, row: Architecture = LLAMA) -> Hyperparams:
    return from_gguf({"general.architecture": row.gguf, **gguf(h, row)})


def rebuilt(h: Hyperparams) -> Any:
    """The rope parameters of a config.json."""
    return to_hf_config(h)["rope_parameters"]


def test_llama3_factors_are_those_of_the_converter() -> None:
    assert rope_factors.llama3_factors(500000.0, 16, LLAMA3) == pytest.approx(LLAMA3_FACTORS, rel=1e-6)
    h = read(rope_parameters={**LLAMA3, "rope_theta": 500000.0})
    assert rope_factors.factor_tensors(h, LLAMA) == {"rope_freqs.weight": pytest.approx(LLAMA3_FACTORS, rel=1e-6)}


@pytest.mark.parametrize("factor", [8.0, 32.0])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_llama3_is_known_by_its_factors(factor: float, head_dim: int) -> None:
    scaling = {**LLAMA3, "factor": factor}
    stored = struct.pack(f"<{head_dim // 2}f", *rope_factors.llama3_factors(500000.0, head_dim, scaling))
    factors = struct.unpack(f"<{head_dim // 2}f", stored)
    assert rope_factors.infer_llama3(factors, 500000.0, head_dim) == scaling
    assert rope_factors.infer_llama3(factors[:-1], 500000.0, head_dim) is None
    assert rope_factors.infer_llama3(factors, 1000000.0, head_dim) is None
    assert rope_factors.infer_llama3([1.0] * (head_dim // 2), 500000.0, head_dim) is None
    assert rope_factors.infer_llama3([math.nan] * (head_dim // 2), 500000.0, head_dim) is None


def test_llama3_frequencies_as_transformers_computes_them() -> None:
    import torch
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(head_dim=64, rope_parameters={**LLAMA3, "factor": 32.0, "rope_theta": 500000.0})
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 500000.0 ** (-torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    factors = rope_factors.llama3_factors(500000.0, 64, {**LLAMA3, "factor": 32.0})
    torch.testing.assert_close(plain / torch.tensor(factors), scaled.double(), rtol=1e-5, atol=0)


def test_spellings_of_a_config() -> None:
    h = read(rope_theta=5, rope_scaling={"type": "linear", "factor": 2.0})
    assert (h.rope_theta, h.extra["rope_scaling"]) == (5.0, LINEAR)
    h = read(rope_parameters={"full_attention": {**YARN, "rope_theta": 9.0}})
    assert (h.rope_theta, h.extra["rope_scaling"]) == (9.0, YARN)
    h = read(rope_parameters={"rope_type": "default", "rope_theta": 1e6}, rope_scaling=None)
    assert (h.rope_theta, "rope_scaling" in h.extra) == (1e6, False)
    assert read(rope_scaling={"type": "su", **{k: v for k, v in LONGROPE.items() if k != "rope_type"}}).extra[
        "rope_scaling"
    ] == LONGROPE  # fmt: skip


@pytest.mark.parametrize(
    "config",
    [{"partial_rotary_factor": 0.5}, {"rotary_pct": 0.5}, {"rope_pct": 0.5}, {"rotary_dim": 8},
     {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}],
)  # fmt: skip
def test_spellings_of_a_partial_rotation(config: dict[str, Any]) -> None:
    h = read(MAINCODER.id, **config)
    assert h.extra["partial_rotary_factor"] == 0.5
    assert keys(h, MAINCODER)["rope.dimension_count"] == 8
    assert back(h, MAINCODER).extra["partial_rotary_factor"] == 0.5
    assert rebuilt(h)["partial_rotary_factor"] == 0.5
    llama = read(**config)  # whose class in transformers rotates whole heads whatever its config says
    assert "partial_rotary_factor" not in llama.extra
    assert keys(llama)["rope.dimension_count"] == 16


def test_a_draft_rotates_the_part_of_a_head_that_its_config_names() -> None:
    """DFlashDraftModel does; MuseGlimmerAssistant, which shares its row and rotates whole heads, names none."""
    case = find_case("dflash/scales")
    h, row = (
        from_hf_config({**case.config, "architectures": [case.model_class], "vocab_size": 512}),
        ARCHITECTURES["dflash"],
    )
    assert keys(h, row)["rope.dimension_count"] == 8
    assert rope.rotary_dim(back(h, row)) == 8


def test_counts_of_rotated_values_that_a_class_does_not_read() -> None:
    ropes = {"rope_type": "default", "rope_theta": 10000.0}
    rotated = {
        (row, named): rope.rotary_dim(
            read(row, head_dim=16, rotary_dim=8, **({"rope_parameters": ropes} if named else {}))
        )
        for row in ("minimax_m3", "minimax_m2")
        for named in (False, True)
    }
    assert rotated == {
        ("minimax_m3", False): 8, ("minimax_m3", True): 16, ("minimax_m2", False): 8, ("minimax_m2", True): 8,
    }  # fmt: skip


def test_long_factors_that_every_context_would_have_are_refused() -> None:
    def written(original: int, positions: int) -> Any:
        scaling = {**LONGROPE, "original_max_position_embeddings": original}
        return keys(read(max_position_embeddings=positions, rope_parameters={**scaling, "rope_theta": 1e4}))

    for original, positions in ((64, 64), (100, 64), (300, 300), (128, 100)):
        with pytest.raises(RefusedError, match="would use the long factors for short texts"):
            written(original, positions)
    for original, positions in ((512, 512), (8192, 100), (256, 200)):
        assert written(original, positions)["rope.scaling.original_context_length"] == original


def test_scaling_that_windows_would_not_have_is_refused() -> None:
    muse = ARCHITECTURES["muse_glimmer_text"]
    for kind in ("linear", "yarn"):
        h = Hyperparams(head_dim=16, extra={"rope_scaling": {"rope_type": kind, "factor": 8.0}})
        with pytest.raises(RefusedError, match=f"rope_type is '{kind}': llama.cpp's muse-glimmer applies no RoPE"):
            rope_gguf.to_gguf(h, muse)


def test_the_name_that_a_family_has_for_a_partial_rotation() -> None:
    pct = replace(ROPE_DIM, hf=("rotary_pct",))
    count = replace(ROPE_DIM, hf=("rotary_dim",))
    h = read(MAINCODER.id, rotary_pct=0.25)
    assert rope.to_hf(h, replace(LLAMA, keys=(*DECODER, pct)), {})["rotary_pct"] == 0.25
    assert rope.to_hf(h, replace(LLAMA, keys=(*DECODER, count)), {})["rotary_dim"] == 4


@pytest.mark.parametrize(
    ("head_dim", "part", "count"), [(80, 0.4, 32), (16, 0.25, 4), (128, 1.0, 128), (96, 1 / 3, 32)]
)
def test_rotated_values_are_counted(head_dim: int, part: float, count: int) -> None:
    h = read(MAINCODER.id, head_dim=head_dim, partial_rotary_factor=part)
    assert rope.rotary_dim(h) == count
    again = Hyperparams(head_dim=head_dim)
    rope.set_rotary_dim(again, count, {})
    assert rope.rotary_dim(again) == count
    assert again.extra.get("partial_rotary_factor", 1.0) == pytest.approx(part)


def test_a_default_part_is_not_lost_when_all_of_a_head_is_rotated() -> None:
    h = Hyperparams(head_dim=64)
    rope.set_rotary_dim(h, 64, {"partial_rotary_factor": 0.5})
    assert h.extra["partial_rotary_factor"] == 1.0
    rope.set_rotary_dim(h, 32, {"partial_rotary_factor": 0.5})
    assert h.extra["partial_rotary_factor"] == 0.5


@pytest.mark.parametrize(
    "extra",
    [{}, {"attention_factor": 1.2}, {"mscale": 1.0, "mscale_all_dim": 0.5}, {"mscale": 0.7, "mscale_all_dim": 0.7}],
)
def test_yarn_has_the_attention_factor_of_transformers(extra: dict[str, float]) -> None:
    """What llama.cpp multiplies with: its own 1 + ln(factor) / 10, times rope.scaling.attn_factor."""
    import torch
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, **extra}
    h = read(rope_parameters={**scaling, "rope_theta": 1e4})
    config = LlamaConfig(**DIMS, max_position_embeddings=256, rope_parameters={**scaling, "rope_theta": 1e4})
    _, want = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
    runtime = (1 + 0.1 * math.log(4.0)) * keys(h).get("rope.scaling.attn_factor", 1.0)
    assert runtime == pytest.approx(want, rel=1e-6)
    again: Any = back(h).extra["rope_scaling"]
    assert again["rope_type"] == "yarn"
    config = LlamaConfig(**DIMS, max_position_embeddings=256, rope_parameters={**again, "rope_theta": 1e4})
    assert ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))[1] == pytest.approx(want, rel=1e-6)


@pytest.mark.parametrize("extra", [{}, {"factor": 2.0}, {"attention_factor": 1.5}])
def test_longrope_goes_into_tensors_and_back(extra: dict[str, float]) -> None:
    row = LLAMA
    h = read(rope_parameters={**LONGROPE, **extra, "rope_theta": 1e4})
    tensors = rope_factors.factor_tensors(h, row)
    assert tensors == {
        "rope_factors_long.weight": LONGROPE["long_factor"],
        "rope_factors_short.weight": LONGROPE["short_factor"],
    }
    found = keys(h, row)
    factor = extra.get("factor", 4.0)
    want = extra.get("attention_factor", math.sqrt(1 + math.log(factor) / math.log(64)))
    assert found["rope.scaling.attn_factor"] == pytest.approx(want, rel=1e-6)
    assert found["rope.scaling.original_context_length"] == 64
    again = back(h, row)
    assert rope_factors.read_factor_tensors(again, tensors) == []
    scaling: Any = again.extra["rope_scaling"]
    assert {key: scaling[key] for key in LONGROPE} == LONGROPE
    scaling |= {key: value for key, value in extra.items() if key == "factor"}
    assert keys(again, row) == {
        key: value if isinstance(value, str) else pytest.approx(value) for key, value in found.items()
    }
    plain = ARCHITECTURES["gpt_oss"]
    with pytest.raises(RefusedError, match="longrope"):
        to_gguf(h, plain)
    assert rope_factors.factor_tensors(h, plain) == {}
    h.extra["rope_scaling"] = {**LONGROPE, "long_factor": [1.0]}
    with pytest.raises(RefusedError, match="long_factor"):
        rope_factors.factor_tensors(h, row)


def test_proportional_rotation_goes_into_a_tensor_and_back() -> None:
    h = read(rope_parameters={"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6})
    tensors = rope_factors.factor_tensors(h, LLAMA)
    assert tensors == {"rope_freqs.weight": [1.0] * 2 + [1e30] * 6}
    again = read(rope_theta=1e6)
    assert rope_factors.read_factor_tensors(again, tensors) == []
    assert again.extra["rope_scaling"] == {"rope_type": "proportional"}
    assert again.extra["partial_rotary_factor"] == 0.25


def test_unknown_factors_are_told() -> None:
    h = read()
    assert rope_factors.read_factor_tensors(h, {"rope_freqs.weight": [1.0] * 8}) == []
    assert len(rope_factors.read_factor_tensors(h, {"rope_freqs.weight": [1.0, 3.0] * 4})) == 1
    assert "rope_scaling" not in h.extra


def test_sections_of_several_positions() -> None:
    old = read(rope_theta=1e6, rope_scaling={"type": "mrope", "mrope_section": [3, 3, 2]})
    h = read(rope_parameters={"rope_type": "default", "rope_theta": 1e6, "mrope_section": [3, 3, 2]})
    assert h == old
    assert ("llama.rope.dimension_sections", ("ARRAY", "INT32"), [3, 3, 2, 0]) in to_gguf(h, LLAMA)
    assert back(h).extra["rope_scaling"] == {"rope_type": "default", "mrope_section": [3, 3, 2]}
    assert rebuilt(h)["mrope_section"] == [3, 3, 2]


def test_layer_types_with_bases_of_their_own() -> None:
    row = ARCHITECTURES["gemma3_text"]
    new = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 3e4},
    }
    old = {"rope_theta": 2e6, "rope_local_base_freq": 3e4, "rope_scaling": {"type": "linear", "factor": 8.0}}
    one, two = read("gemma3_text", rope_parameters=new), read("gemma3_text", **old)
    assert one.extra["rope_layers"] == two.extra["rope_layers"] == {"sliding_attention": new["sliding_attention"]}
    assert one.extra["rope_scaling"] == two.extra["rope_scaling"] == {"rope_type": "linear", "factor": 8.0}
    assert (keys(one, row)["rope.freq_base"], keys(one, row)["rope.freq_base_swa"]) == (2e6, 3e4)
    config = to_hf_config(one)
    assert config["rope_parameters"] == new
    assert (config["rope_theta"], config["rope_local_base_freq"]) == (2e6, 3e4)
    assert back(one, row).extra["rope_layers"] == one.extra["rope_layers"]
    usual: Any = read("gemma3_text").extra["rope_layers"]
    assert usual["sliding_attention"]["rope_theta"] == 1e4
    assert read("gemma3_text").rope_theta == 1e6


def test_layers_whose_rotation_a_gguf_cannot_say() -> None:
    def nested(**sliding: Any) -> dict[str, Any]:
        return {"full_attention": {"rope_type": "default", "rope_theta": 1e4}, "sliding_attention": sliding}

    gemma = ARCHITECTURES["gemma3_text"]
    scaled = read("gemma3_text", rope_parameters=nested(rope_type="linear", factor=2.0, rope_theta=1e4))
    with pytest.raises(RefusedError, match="sliding_attention"):
        to_gguf(scaled, gemma)
    with pytest.raises(RefusedError, match="sliding_attention"):
        to_gguf(read(rope_parameters=nested(rope_type="default", rope_theta=1e3)), LLAMA)
    part = nested(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5)
    with pytest.raises(RefusedError, match="sliding_attention"):
        to_gguf(read("step3p5", rope_parameters=part), ARCHITECTURES["step3p5"])
    same = read(rope_parameters=nested(rope_type="default", rope_theta=1e4))
    assert "rope.freq_base_swa" not in keys(same)


def test_a_fixed_alpha_stretches_the_base() -> None:
    h = read(rope_parameters={"rope_type": "dynamic", "alpha": 1000.0, "rope_theta": 1e4})
    assert keys(h)["rope.freq_base"] == pytest.approx(1e4 * 1000 ** (16 / 14), rel=1e-6)


def test_gguf_spellings() -> None:
    def scaling(**kv: Any) -> Any:
        kv = {f"llama.rope.{key.replace('__', '.')}": value for key, value in kv.items()}
        return from_gguf({"general.architecture": "llama", **kv}).extra.get("rope_scaling")

    assert scaling(scale_linear=4.0) == {"rope_type": "linear", "factor": 4.0}
    assert scaling(scaling__type="none") is None
    with pytest.raises(CorruptError, match="type"):
        scaling(scaling__type=3)
    with pytest.raises(CorruptError, match="dimension_sections"):
        scaling(dimension_sections=3)


def test_unknown_kinds_are_refused_for_gguf_only() -> None:
    h = read(rope_parameters={"rope_type": "odd", "rope_theta": 1e4})
    with pytest.raises(RefusedError, match="'odd'"):
        to_gguf(h, LLAMA)
    assert rebuilt(h)["rope_type"] == "odd"
    assert all(not key[0].endswith("scaling.type") for key in to_gguf(h, LLAMA, complete=False))
