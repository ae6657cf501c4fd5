"""Adapters into their base and out of two models: beside PEFT's own merge, and beside llama.cpp with the adapter."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adapter_models import FAMILIES, values, write_adapter, write_base
from arch_models import token_ids
from llama_peer import LlamaPeer

import aprfmt
from aprfmt.errors import AprError

EXPERTS: dict[str, dict[str, Any]] = {
    "qwen2_moe": {"targets": ["q_proj", "shared_expert.up_proj"], "target_parameters": ["mlp.experts.down_proj"]},
    "qwen3_moe": {"targets": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]},
    "gpt_oss": {"targets": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]},
    "llama4_text": {"targets": ["q_proj"], "target_parameters": ["feed_forward.experts.gate_up_proj"]},
    "mixtral": {"targets": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj"]},
}
"""Stacks of experts, whose parameters PEFT changes by their names."""

OTHERS: dict[str, dict[str, Any]] = {
    "gpt2": {"targets": ["c_attn", "c_fc", "c_proj"], "fan_in_fan_out": True},
    "bloom": {"targets": ["query_key_value"]},
    "mamba": {"targets": ["in_proj", "x_proj"]},
    "falcon_h1": {"targets": ["q_proj", "k_proj", "gate_proj"]},
    "llama": {"targets": ["q_proj", "embed_tokens", "lm_head"]},
    "qwen3": {"targets": ["q_proj"], "use_rslora": True, "rank_pattern": {"layers.1.*q_proj": 2}},
}
"""Weights that are stored as [in, out], fused, scaled; embeddings and heads; scales of other kinds."""

CASES = {**{name: {"targets": [*targets]} for name, targets in FAMILIES.items()}, **EXPERTS, **OTHERS}


class Built:
    """A base, an adapter for it, and the weights that PEFT makes of both."""

    def __init__(self, folder: Path, case: str, **options: Any) -> None:
        model = write_base(case, folder / "base")
        targets = options.pop("targets")
        adapted = write_adapter(model, folder / "lora", targets, folder / "base", **options)
        self.base, self.lora = folder / "base", folder / "lora"
        with warnings.catch_warnings(action="ignore"):  # of tied heads
            merged = adapted.merge_and_unload()
        self.merged = folder / "peft"
        _save(merged, self.base, self.merged)
        self.ids = token_ids(self.base)[:24]


def _save(model: Any, base: Path, folder: Path) -> None:
    """Writes a merged model; where its names are those of the base, with exactly these."""
    from safetensors.torch import save_file

    state, names = model.state_dict(), list(values(base))
    if not set(names) <= set(state):  # stacks of experts, which transformers saves one by one
        model.save_pretrained(folder)
        return
    model.config.save_pretrained(folder)
    save_file(
        {name: state[name].contiguous().clone() for name in names}, folder / "model.safetensors", {"format": "pt"}
    )


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return Built(tmp_path_factory.mktemp("merge_llama"), "llama", targets=FAMILIES["llama"])


def distance(a: Path, b: Path) -> float:
    x, y = values(a), values(b)
    assert sorted(x) == sorted(y)
    return max(float(np.abs(x[name].astype(np.float64) - y[name]).max()) for name in x)


@pytest.mark.turns
@pytest.mark.parametrize("case", sorted(CASES))
def test_a_merged_base_is_what_peft_makes_of_it(case: str, tmp_path: Path, llama_cpp: LlamaPeer) -> None:
    built = Built(tmp_path, case, **dict(CASES[case]))
    report = aprfmt.merge_adapter(built.base, built.lora, tmp_path / "merged")
    assert report.losses == []
    assert distance(tmp_path / "merged", built.merged) <= 1e-6
    # The adapter as a GGUF, added to the base as an .apr: the same tensors.
    aprfmt.convert_model(built.lora, tmp_path / "lora.gguf")
    aprfmt.import_model(built.base, tmp_path / "base.apr")
    aprfmt.merge_adapter(tmp_path / "base.apr", tmp_path / "lora.gguf", tmp_path / "merged.apr")
    assert distance(tmp_path / "merged.apr", built.merged) <= 1e-6
    # And back from the GGUF it is the folder that PEFT wrote, but for what a GGUF has no place for.
    aprfmt.convert_model(tmp_path / "lora.gguf", tmp_path / "back", format="hf", base=built.base)
    there, back = (values(path / "adapter_model.safetensors") for path in (built.lora, tmp_path / "back"))
    assert sorted(back) == sorted(name for name in there if ".base_layer.weight" not in name)
    assert max(float(np.abs(array - there[name]).max()) for name, array in back.items()) <= 1e-7
    # In llama.cpp the base with the adapter has the logits of the merged base.
    aprfmt.convert_model(built.base, tmp_path / "base.gguf")
    aprfmt.merge_adapter(tmp_path / "base.gguf", built.lora, tmp_path / "merged.gguf")
    beside = llama_cpp.logits(tmp_path / "base.gguf", built.ids, adapters={tmp_path / "lora.gguf": 1.0})
    inside = llama_cpp.logits(tmp_path / "merged.gguf", built.ids)
    plain = llama_cpp.logits(tmp_path / "base.gguf", built.ids)
    moved = np.abs(inside - plain).max()
    assert moved > 0.01
    assert np.abs(beside - inside).max() <= 2e-3 * moved


def test_several_adapters_count_as_their_weights_say(llama: Built, tmp_path: Path) -> None:
    write_adapter(write_base("llama", tmp_path / "again"), tmp_path / "other", ["q_proj"], llama.base, r=2)
    aprfmt.merge_adapter(llama.base, [llama.lora, tmp_path / "other"], tmp_path / "merged", weight=[0.5, -2.0])
    base, merged = values(llama.base), values(tmp_path / "merged")
    q, v = ("model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.v_proj")
    lora, other = (values(path / "adapter_model.safetensors") for path in (llama.lora, tmp_path / "other"))

    def product(tensors: dict[str, Any], name: str) -> Any:
        stem = f"base_model.model.{name}.lora_"
        return tensors[f"{stem}B.weight"] @ tensors[f"{stem}A.weight"]

    wanted = base[f"{q}.weight"] + 0.5 * 2 * product(lora, q) - 2 * 4 * product(other, q)
    np.testing.assert_allclose(merged[f"{q}.weight"], wanted, atol=1e-6)
    np.testing.assert_allclose(merged[f"{v}.weight"], base[f"{v}.weight"] + product(lora, v), atol=1e-6)


def test_a_quantized_base_is_quantized_again(llama: Built, tmp_path: Path) -> None:
    aprfmt.convert_model(llama.base, tmp_path / "q.gguf", dtype="q8_0")
    report = aprfmt.merge_adapter(tmp_path / "q.gguf", llama.lora, tmp_path / "merged.gguf")
    rounded, error = report.losses
    assert rounded == "14 quantized weights were dequantized and requantized: the merged weights are rounded"
    assert error.startswith("14 merged weights requantized from Q8_0 to Q8_0: relative error 0.5")
    before, after = ({name: row["tensors"] for name, row in aprfmt.inspect(tmp_path / f"{n}.gguf").dtypes.items()}
                     for n in ("q", "merged"))  # fmt: skip
    assert before == after
    aprfmt.convert_model(tmp_path / "merged.gguf", tmp_path / "back", format="hf", dtype="f32")
    x, y = values(tmp_path / "back"), values(llama.merged)
    for name, array in x.items():
        assert np.abs(array - y[name]).max() <= 2.2 * np.abs(y[name]).max() / 127, name
    # As asked: floats, or another mix.
    report = aprfmt.merge_adapter(tmp_path / "q.gguf", llama.lora, tmp_path / "f.gguf", dtype="f16")
    assert "Q8_0" not in report.dtypes
    assert any("14 quantized weights were dequantized to merge" in loss for loss in report.losses)
    aprfmt.merge_adapter(tmp_path / "q.gguf", llama.lora, tmp_path / "folder", dtype="f32")
    assert set(aprfmt.inspect(tmp_path / "folder").dtypes) == {"F32"}
    report = aprfmt.merge_adapter(tmp_path / "q.gguf", llama.lora, tmp_path / "q4.gguf", dtype="q4_0")
    assert "Q4_0" in report.dtypes


def test_a_base_of_mlx_is_decoded_and_quantized_as_asked(llama: Built, tmp_path: Path) -> None:
    aprfmt.convert_model(llama.base, tmp_path / "mlx", format="mlx", bits=8, group_size=32)
    report = aprfmt.merge_adapter(tmp_path / "mlx", llama.lora, tmp_path / "floats", format="hf", dtype="f32")
    assert report.losses
    assert distance(tmp_path / "floats", llama.merged) < 0.02
    aprfmt.merge_adapter(tmp_path / "mlx", llama.lora, tmp_path / "again", format="mlx", bits=8, group_size=32)
    aprfmt.convert_model(tmp_path / "again", tmp_path / "back", format="hf", dtype="f32")
    assert distance(tmp_path / "back", llama.merged) < 0.03


def test_a_base_of_half_precision_keeps_its_dtype(llama: Built, tmp_path: Path) -> None:
    aprfmt.convert_model(llama.base, tmp_path / "half", dtype="bf16", format="hf")
    report = aprfmt.merge_adapter(tmp_path / "half", llama.lora, tmp_path / "merged")
    assert set(report.dtypes) == {"BF16"}
    assert distance(tmp_path / "merged", llama.merged) < 0.02


def test_a_tied_head_stays_what_it_was(tmp_path: Path) -> None:
    built = Built(tmp_path, "llama/tied", targets=["q_proj", "embed_tokens"])
    report = aprfmt.merge_adapter(built.base, built.lora, tmp_path / "merged")
    assert any("head and the embedding" in loss for loss in report.losses)
    base, merged = values(built.base), values(tmp_path / "merged")
    assert (merged["lm_head.weight"] == base["model.embed_tokens.weight"]).all()
    assert not (merged["model.embed_tokens.weight"] == base["model.embed_tokens.weight"]).all()
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["tie_word_embeddings"] is False
    with pytest.raises(AprError, match=r"llama\.cpp cannot adapt only one of them"):
        aprfmt.convert_model(built.lora, tmp_path / "x.gguf")


def test_modules_to_save_replace_those_of_the_base(tmp_path: Path) -> None:
    built = Built(tmp_path, "llama", targets=["q_proj"], modules_to_save=["lm_head", "input_layernorm"])
    aprfmt.merge_adapter(built.base, built.lora, tmp_path / "merged")
    assert distance(tmp_path / "merged", built.merged) <= 1e-6
    aprfmt.convert_model(built.base, tmp_path / "base.gguf")
    aprfmt.merge_adapter(tmp_path / "base.gguf", built.lora, tmp_path / "merged.gguf")
    aprfmt.convert_model(tmp_path / "merged.gguf", tmp_path / "back", format="hf")
    assert distance(tmp_path / "back", built.merged) <= 1e-6
    with pytest.raises(AprError, match="replaces this weight"):
        aprfmt.convert_model(built.lora, tmp_path / "x.gguf")
    assert aprfmt.import_model(built.lora, tmp_path / "x.apr").lossless
    with pytest.raises(AprError, match=r"so it cannot be scaled by 0\.5"):
        aprfmt.merge_adapter(built.base, tmp_path / "x.apr", tmp_path / "half", weight=0.5)


@pytest.mark.parametrize("case", ["llama", "gpt2", "qwen3_moe", "phi3"])
def test_an_extracted_adapter_of_full_rank_gives_the_fine_tune_back(case: str, tmp_path: Path) -> None:
    built = Built(tmp_path, case, **dict(CASES[case]))
    for output, form in (("x", "hf"), ("x.apr", None), ("x.gguf", None)):
        report = aprfmt.extract_adapter(built.base, built.merged, tmp_path / output, rank=4096, format=form)
        assert report.losses == []
        aprfmt.merge_adapter(built.base, tmp_path / output, tmp_path / f"{output}.merged", format="hf")
        assert distance(tmp_path / f"{output}.merged", built.merged) <= 1e-5


def test_the_rank_that_was_trained_is_enough_and_less_is_said(llama: Built, tmp_path: Path) -> None:
    assert aprfmt.extract_adapter(llama.base, llama.merged, tmp_path / "four.apr", rank=4).losses == []
    aprfmt.merge_adapter(llama.base, tmp_path / "four.apr", tmp_path / "merged", format="hf")
    assert distance(tmp_path / "merged", llama.merged) <= 1e-5
    report = aprfmt.extract_adapter(llama.base, llama.merged, tmp_path / "two.apr", rank=2)
    (loss,) = report.losses
    held = float(loss.split("captures ")[1].split("%")[0]) / 100
    changed = {name: array - values(llama.base)[name] for name, array in values(llama.merged).items()}
    squares = [np.linalg.svd(d, compute_uv=False) ** 2 for d in changed.values() if d.ndim == 2 and d.any()]
    assert held == pytest.approx(sum(s[:2].sum() for s in squares) / sum(s.sum() for s in squares), abs=1e-4)


def test_a_small_rank_of_a_large_matrix_is_near_the_best() -> None:
    from aprfmt.canonical.extracted import decompose

    rng = np.random.default_rng(5)
    delta = rng.standard_normal((300, 8)) @ rng.standard_normal((8, 400)) + 0.01 * rng.standard_normal((300, 400))
    a, b, _ = decompose(delta, 8)
    u, s, v = np.linalg.svd(delta, full_matrices=False)
    best = np.linalg.norm(delta - (u[:, :8] * s[:8]) @ v[:8])
    assert np.linalg.norm(delta - b @ a) <= best * (1 + 1e-6)


def _cases(llama: Built, folder: Path) -> Iterator[tuple[str, Any]]:
    merge: Any = aprfmt.merge_adapter
    yield "this is not an adapter", lambda out: merge(llama.base, llama.base, out)
    yield "this is an adapter", lambda out: merge(llama.lora, llama.lora, out)
    yield "for a different base model", lambda out: merge(folder / "wide", llama.lora, out)
    yield "2 weights given for 1 adapters", lambda out: merge(llama.base, llama.lora, out, weight=[1.0, 2.0])
    yield "weight must be a number", lambda out: merge(llama.base, llama.lora, out, weight=float("nan"))
    yield "no adapter given", lambda out: merge(llama.base, [], out)
    yield "no such file", lambda out: merge(llama.base, folder / "absent", out)
    extract: Any = aprfmt.extract_adapter
    yield "nothing to extract", lambda out: extract(llama.base, llama.base, out)
    yield "in the fine-tune, ", lambda out: extract(llama.base, folder / "wide", out)
    yield "--rank must be at least 1, not 0", lambda out: extract(llama.base, llama.merged, out, rank=0)


def test_what_cannot_be_merged_is_refused_and_nothing_is_written(llama: Built, tmp_path: Path) -> None:
    write_base("llama/head_dim", tmp_path / "wide")
    for what, run in _cases(llama, tmp_path):
        for output in (tmp_path / "out.apr", tmp_path / "out"):
            with pytest.raises(AprError, match=what) as caught:
                run(output)
            assert "different base" not in what or "apr inspect" in str(caught.value.hint)
            assert not output.exists(), what


def test_the_output_is_no_input(llama: Built, tmp_path: Path) -> None:
    aprfmt.convert_model(llama.lora, tmp_path / "lora.gguf")
    for inputs in ((llama.base, tmp_path / "lora.gguf"),):
        with pytest.raises(AprError, match="the output is an input"):
            aprfmt.merge_adapter(*inputs, tmp_path / "lora.gguf", force=True)


def run(*arguments: str) -> tuple[int, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "aprfmt", *arguments, "--json"], capture_output=True, text=True, check=False, timeout=120
    )
    return done.returncode, json.loads(done.stdout)


def test_the_command_merges_plans_and_extracts(llama: Built, tmp_path: Path) -> None:
    base, lora, merged = str(llama.base), str(llama.lora), str(tmp_path / "merged.gguf")
    code, plan = run("merge-adapter", base, lora, "-o", merged, "--weight", "0.5", "--plan")
    assert (code, plan["schema"], plan["plan"]) == (0, "apr.merge-adapter/1", True)
    assert not Path(merged).exists()
    assert run("merge-adapter", base, lora, lora, "-o", merged, "--weight", "0.5", "--weight", "0.5")[0] == 0
    assert run("merge-adapter", base, lora, "-o", merged)[0] == 5
    code, made = run("merge-adapter", base, lora, "-o", merged, "--force", "--quantize", "q8_0")
    assert (code, "Q8_0" in made["dtypes"]) == (0, True)
    out = str(tmp_path / "again.apr")
    code, made = run("merge-adapter", base, str(llama.merged), "--unmerge", "--rank", "4", "-o", out)
    assert (code, made["losses"]) == (0, [])
    assert run("merge-adapter", base, lora, "--rank", "4", "-o", out)[0] == 2
    assert run("merge-adapter", base, lora, "--unmerge", "--verify", "-o", out)[0] == 2
    assert run("export", base, "-o", str(tmp_path / "x.gguf"), "--base", base)[0] == 2
