"""A config that contradicts the weights, a missing tensor, one too many: refused for every kind of network."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from arch_models import build, find_case, write_tokenizers
from safetensors.numpy import load_file, save_file

import aprfmt

pytest.importorskip("torch")

# Case -> config keys whose values are told by the tensors' shapes.
CASES = {
    "qwen3_moe": (
        "hidden_size",
        "num_attention_heads",
        "num_key_value_heads",
        "moe_intermediate_size",
        "num_local_experts",
    ),
    "deepseek_v2": ("hidden_size", "num_attention_heads", "kv_lora_rank", "qk_nope_head_dim", "n_routed_experts"),
    "gpt_oss": ("hidden_size", "num_attention_heads", "intermediate_size", "num_local_experts"),
    "deepseek_v4": (
        "hidden_size",
        "num_attention_heads",
        "head_dim",
        "q_lora_rank",
        "o_lora_rank",
        "n_routed_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "index_head_dim",
        "hc_mult",
    ),
    "gpt2": ("n_embd",),
    "falcon": ("hidden_size",),
    "gemma3_text": ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size"),
    "mamba2": ("hidden_size", "state_size", "num_heads"),
    "lfm2": ("hidden_size", "num_attention_heads"),
    "bert": ("hidden_size", "intermediate_size", "type_vocab_size"),
    "t5": ("d_model", "d_kv", "d_ff", "num_heads", "relative_attention_num_buckets"),
}
LAYERS = ("num_hidden_layers", "n_layer", "num_layers")
by_case = pytest.mark.parametrize("case_id", CASES)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, smollm2_gguf: Path, llama_cpp_models: Path) -> Any:
    """Folder of a case, built once; the fixtures stand for the tokenizers that the cases take from the cache."""
    root = tmp_path_factory.mktemp("models")
    tokenizers = write_tokenizers(root / "tokenizers", ["smollm2", "bert"], 2048)

    @cache
    def folder(case_id: str) -> Path:
        case = find_case(case_id)
        known = dict.fromkeys([case.tokenizer], tokenizers["bert" if case.tokenizer == "bert" else "smollm2"])
        build(case, root / case_id, known)
        return root / case_id

    return folder


def refused(source: Path, tmp_path: Path, **config: Any) -> aprfmt.AprError:
    """The refusal of `source` with other config values; nothing may be left of any output."""
    folder = tmp_path / "changed"
    if folder != source:
        shutil.copytree(source, folder)
    stored = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(stored | config))
    for name in ("m.apr", "m.gguf"):
        with pytest.raises(aprfmt.AprError) as info:
            aprfmt.convert_model(folder, tmp_path / name)
        assert info.value.exit_code in (4, 5), info.value
        assert not [path for path in tmp_path.iterdir() if path != folder]
    return info.value


@pytest.mark.turns(by="case_id")
@by_case
def test_the_models_themselves_are_taken(case_id: str, models: Any, tmp_path: Path) -> None:
    """What the refusals below rest on: without a contradiction nothing is refused."""
    for name in ("m.apr", "m.gguf"):
        aprfmt.convert_model(models(case_id), tmp_path / name)


@pytest.mark.turns(by="case_id")
@pytest.mark.parametrize(("case_id", "key"), [(case, key) for case, keys in CASES.items() for key in keys])
@pytest.mark.parametrize("factor", [2, 0.5], ids=["twice", "half"])
def test_wrong_dimensions_are_refused(case_id: str, key: str, factor: float, models: Any, tmp_path: Path) -> None:
    value = json.loads((models(case_id) / "config.json").read_text())[key]
    refused(models(case_id), tmp_path, **{key: int(value * factor)})


@pytest.mark.turns(by="case_id")
@by_case
@pytest.mark.parametrize("more", [1, -1])
def test_wrong_layer_counts_are_refused(case_id: str, more: int, models: Any, tmp_path: Path) -> None:
    config = json.loads((models(case_id) / "config.json").read_text())
    key = next(key for key in LAYERS if key in config)
    refused(models(case_id), tmp_path, **{key: config[key] + more})


@pytest.mark.turns(by="case_id")
@by_case
def test_a_wrong_vocabulary_is_refused(case_id: str, models: Any, tmp_path: Path) -> None:
    size = json.loads((models(case_id) / "config.json").read_text())["vocab_size"]
    refused(models(case_id), tmp_path, vocab_size=size + 64)


def with_tensors(source: Path, tmp_path: Path, change: Any) -> Path:
    folder = tmp_path / "changed"
    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.turns(by="case_id")
@by_case
def test_each_missing_tensor_of_a_layer_is_refused(case_id: str, models: Any, tmp_path: Path) -> None:
    names = [n for n in load_file(models(case_id) / "model.safetensors") if ".0." in n and n.endswith("weight")]
    for name in names[:: max(1, len(names) // 6)]:
        folder = with_tensors(models(case_id), tmp_path, lambda tensors, name=name: tensors.pop(name))
        error = refused(folder, tmp_path)
        assert name in str(error)
        shutil.rmtree(folder)


@pytest.mark.turns(by="case_id")
@by_case
def test_a_tensor_too_many_is_refused(case_id: str, models: Any, tmp_path: Path) -> None:
    name = next(n for n in load_file(models(case_id) / "model.safetensors") if ".0." in n and n.endswith("weight"))
    extra = name.replace(".weight", ".gain")

    def change(tensors: dict[str, Any]) -> None:
        tensors[extra] = tensors[name]

    error = refused(with_tensors(models(case_id), tmp_path, change), tmp_path)
    assert extra in str(error)
    assert "closest" in str(error)
