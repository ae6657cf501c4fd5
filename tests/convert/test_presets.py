"""Which type every tensor gets: every preset on many networks, as llama.cpp decides."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import plain_models
import pytest
from gguf.constants import LlamaFileType
from imatrix_files import write_gguf
from llama_peer import LlamaPeer

import aprfmt
from aprfmt.codecs import backend, ggml
from aprfmt.codecs.dtypes import DTYPES, find_dtype
from aprfmt.convert.presets import (
    ALIASES,
    CONDITIONS,
    KINDS,
    OUTPUT,
    PRESETS,
    PresetContext,
    QuantizationPreset,
    QuantizeOverrides,
    choose,
    file_type_of,
    find_preset,
    needs_weights,
    usual_bits,
)
from aprfmt.errors import RefusedError
from aprfmt.formats.gguf_fields import GgufType

Shape = tuple[int, ...]

pytestmark = pytest.mark.llama

LLAMA = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
FUSED = ("attn_qkv", "attn_output", "ffn_up", "ffn_down")
EXPERTS = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")


def network(
    architecture: str,
    n_layers: int,
    names: tuple[str, ...],
    *,
    heads: int = 8,
    kv: int = 8,
    experts: int = 0,
    tied: bool = False,
    cols: Mapping[str, int] | None = None,
    more: Mapping[str, Shape] | None = None,
) -> tuple[PresetContext, dict[str, Shape]]:
    """The facts and the tensors, of two rows each: llama.cpp does not compare shapes when it quantizes."""
    cols = cols or {}
    shapes: dict[str, Shape] = {"token_embd.weight": (2, cols.get("token_embd", 256)), "output_norm.weight": (256,)}
    if not tied:
        shapes["output.weight"] = (2, cols.get("output", 256))
    for layer in range(n_layers):
        for name in names:
            shape = (2, cols.get(name, 256))
            shapes[f"blk.{layer}.{name}.weight"] = (experts, *shape) if name.endswith("_exps") else shape
        shapes[f"blk.{layer}.attn_norm.weight"] = (256,)
    return PresetContext(architecture, n_layers, heads, kv, experts), shapes | dict(more or {})


NETWORKS = {
    "llama": network("llama", 16, LLAMA),
    "gqa-tied": network("qwen2", 28, LLAMA, heads=12, kv=2, tied=True),
    "70b": network("llama", 80, LLAMA, heads=64, kv=8),
    "72b": network("qwen2", 80, LLAMA),
    "65b": network("llama", 80, LLAMA),
    "mixtral": network("llama", 17, EXPERTS, kv=2, experts=8),
    "experts-60": network("qwen2moe", 24, (*EXPERTS, "ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp"), experts=60),
    "falcon": network("falcon", 32, FUSED, heads=71, kv=1),
    "phi2": network("phi2", 9, FUSED),
    "mla": network("deepseek2", 8, ("attn_q_a", "attn_q_b", "attn_kv_a_mqa", "attn_kv_b", "attn_output", "ffn_down"),
                   kv=1, experts=160),
    "odd-rows": network("llama", 3, LLAMA, tied=True, cols={"token_embd": 288, "ffn_down": 288, "attn_v": 96,
                                                             "attn_k": 72, "attn_q": 64, "attn_output": 512}),
    "odd-head": network("llama", 1, LLAMA, cols={"output": 288, "token_embd": 320}),
    "left": network("gemma3n", 2, (*LLAMA, "altup_correct_coef", "laurel_l", "ssm_conv1d", "shortconv.conv",
                                   "inp_gate", "indexer.k_proj", "time_mix_w1", "attn_q_norm"), tied=True,
                    more={"per_layer_token_embd.weight": (2, 512), "per_layer_model_proj.weight": (2, 256),
                          "position_embd.weight": (2, 256), "token_types.weight": (2, 256), "rope.bias": (2, 256),
                          "blk.0.flat.weight": (1, 1, 256), "blk.1.thin.weight": (2, 1, 256)}),
}  # fmt: skip


def write(path: Path, net: PresetContext, shapes: Mapping[str, Shape]) -> None:
    """A GGUF of zeros that llama_model_quantize takes for this network."""
    u32, f32, arch = GgufType.UINT32, GgufType.FLOAT32, net.architecture
    keys: list[Any] = [("general.architecture", GgufType.STRING, arch)]
    numbers = {
        "block_count": net.n_layers, "attention.head_count": net.n_heads, "attention.head_count_kv": net.n_kv_heads,
        "context_length": 64, "embedding_length": 512, "feed_forward_length": 256, "vocab_size": 2,
        "attention.kv_lora_rank": 64, "attention.q_lora_rank": 64, "leading_dense_block_count": 0,
        "expert_feed_forward_length": 256, "expert_shared_count": 1, "attention.sliding_window": 16,
        "attention.key_length": 64, "attention.value_length": 64, "embedding_length_per_layer_input": 64,
        "attention.shared_kv_layers": 0, "expert_shared_feed_forward_length": 256,
    }  # fmt: skip
    if net.n_experts:
        numbers |= {"expert_count": net.n_experts, "expert_used_count": 2}
    keys += [(f"{arch}.{key}", u32, value) for key, value in numbers.items()]
    keys += [(f"{arch}.attention.layer_norm_{x}epsilon", f32, 1e-5) for x in ("rms_", "")]
    keys.append((f"{arch}.attention.sliding_window_pattern", (GgufType.ARRAY, GgufType.BOOL), [True] * net.n_layers))
    keys.append((f"{arch}.expert_weights_scale", f32, 1.0))
    tensors = {}
    for name, shape in shapes.items():
        n = 1
        for dim in shape:
            n *= dim
        dtype, size = ("F16", 2) if len(shape) > 1 else ("F32", 4)
        tensors[name] = (dtype, shape, bytes(size * n))
    write_gguf(path, keys, tensors)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("networks")
    for name, (net, shapes) in NETWORKS.items():
        write(folder / f"{name}.gguf", net, shapes)
    return {name: folder / f"{name}.gguf" for name in NETWORKS}


def ours(name: str, preset: str, overrides: QuantizeOverrides) -> dict[str, str]:
    net, shapes = NETWORKS[name]
    found = find_preset(preset)
    assert found is not None
    kept = {n: "F16" if len(shape) > 1 else "F32" for n, shape in shapes.items()}
    return kept | choose(shapes, found, net, overrides)


# llama.cpp gives up on rows that blocks of 128 do not divide; here they become F16.
_NO_FALLBACK = {"q1_0": ("odd-rows", "odd-head")}


@pytest.mark.parametrize("preset", PRESETS)
def test_every_tensor_gets_the_type_that_llama_cpp_gives_it(
    preset: str, files: dict[str, Path], llama_cpp: LlamaPeer
) -> None:
    for name, path in files.items():
        if name in _NO_FALLBACK.get(preset, ()):
            continue
        for imatrix in (None, {"token_embd.weight": [1.0]}):
            theirs = llama_cpp.quantize(path, None, PRESETS[preset].file_type, imatrix=imatrix)
            assert ours(name, preset, QuantizeOverrides(imatrix=imatrix is not None)) == theirs, name


WISHES: dict[str, dict[str, Any]] = {
    "pure": {"pure": True},
    "pure-output": {"pure": True, "output": "Q6_K"},
    "output": {"output": "Q8_0"},
    "output-f16": {"output": "F16"},
    "embedding": {"embedding": "Q8_0"},
    "both": {"embedding": "Q5_K", "output": "BF16"},
    "leave": {"leave_output": True},
    "leave-output": {"leave_output": True, "output": "Q8_0"},
    "override": {"overrides": (("ffn_down", "q8_0"), (r"blk\.[02]\.attn", "q6_k"), ("attn", "iq4_nl"))},
    "override-all": {"overrides": (("embd", "q5_0"), (".", "f16"))},
    "override-pure": {"pure": True, "overrides": (("attn_v", "q8_0"),), "embedding": "q6_k"},
}


@pytest.mark.parametrize("wish", WISHES)
def test_overrides_go_before_the_rules_as_in_llama_cpp(wish: str, files: dict[str, Path], llama_cpp: LlamaPeer) -> None:
    asked = WISHES[wish]
    patterns = tuple((re.compile(p), find_dtype(name).name) for p, name in asked.get("overrides", ()))
    options = {key: value for key, value in asked.items() if key != "overrides"} | {"patterns": patterns}
    options |= {key: find_dtype(asked[key]).name for key in ("output", "embedding") if key in asked}
    for preset in ("q4_k_m", "iq2_xs", "q5_0"):
        for name, path in files.items():
            if name.startswith("odd") and {"output", "embedding"} & set(asked):
                continue  # llama.cpp writes a broken file where the type that was asked for does not fit
            theirs = llama_cpp.quantize(path, None, PRESETS[preset].file_type, **asked)
            assert ours(name, preset, QuantizeOverrides(**options)) == theirs, (preset, name)


def test_names_are_found_whatever_their_case_and_an_unknown_one_is_not() -> None:
    assert find_preset("Q4_K_M") is find_preset("q4km") is PRESETS["q4_k_m"]
    assert all(find_preset(alias) is PRESETS[name] for alias, name in ALIASES.items())
    assert find_preset("q4_k_x") is None
    assert find_preset("f16") is None
    assert len({preset.file_type for preset in PRESETS.values()}) == len(PRESETS)


def test_file_types_of_dtypes_are_those_of_llama_cpp() -> None:
    names = {item.name.removeprefix("MOSTLY_").removeprefix("ALL_"): item.value for item in LlamaFileType}
    known = {name: value for name, value in names.items() if name in DTYPES}
    assert {"F32", "BF16", "Q8_0", "IQ2_S", "NVFP4", "Q1_0"} <= known.keys()
    assert {name: file_type_of(name) for name in known} == known


def test_the_file_type_of_an_apr_of_one_dtype(tmp_path: Path) -> None:
    folder = plain_models.write_folder(tmp_path / "hf")
    aprfmt.import_model(folder, tmp_path / "m.apr", dtype="nvfp4", pure=True)
    aprfmt.export_model(tmp_path / "m.apr", tmp_path / "m.gguf")
    with aprfmt.open(tmp_path / "m.gguf") as model:
        assert model.metadata["general.file_type"] == LlamaFileType.MOSTLY_NVFP4


def test_every_word_of_a_rule_is_known() -> None:
    for preset in PRESETS.values():
        assert set(preset.rules) <= {"output", "token_embd", "*", *(kind for _, kind in KINDS)}
        for clause in " ".join(preset.rules.values()).split():
            words, _, dtype = clause.rpartition(":")
            assert all(word.lstrip("!") in {*CONDITIONS, "imatrix"} for word in words.split("&") if word)
            assert not dtype or dtype in DTYPES


# What llama.cpp's quantize tool names for Llama-3.1-8B.
BITS = {"q4_k_m": 4.89, "q4_k_s": 4.67, "q5_k_m": 5.70, "q6_k": 6.56, "q8_0": 8.50, "q3_k_m": 4.00, "q2_k": 3.16,
        "iq4_xs": 4.46, "iq3_m": 3.76, "iq2_m": 2.93, "iq2_xxs": 2.38, "iq1_s": 2.00}  # fmt: skip


@pytest.mark.parametrize("preset", BITS)
def test_bits_per_weight_of_a_usual_model(preset: str) -> None:
    assert usual_bits(PRESETS[preset]) == pytest.approx(BITS[preset], abs=0.04)


def test_a_layer_that_is_none_is_refused() -> None:
    net = PresetContext("llama", 2, 8, 8, 8)
    for name in ("ffn_down_exps.weight", "blk.2.ffn_down_exps.weight"):
        with pytest.raises(RefusedError, match="layer"):
            choose({name: (8, 2, 256)}, PRESETS["q4_k_m"], net)


def test_a_layer_number_of_thousands_of_digits_is_no_layer() -> None:
    name = f"blk.{'9' * 5000}.ffn_down.weight"
    assert choose({name: (256, 256)}, PRESETS["q4_k_m"], PresetContext("llama", 2, 4, 4, 0)) == {name: "Q4_K"}


def test_encoders_agree_on_which_dtypes_need_weights() -> None:
    for row in DTYPES.values():
        if row.kind == "ggml" and any(backend.libraries()):
            preset = QuantizationPreset("x", 0, row.name, "")
            assert ggml.needs_weights(row.name) == needs_weights(OUTPUT, row.name, preset), row.name
