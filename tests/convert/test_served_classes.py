"""Classes that only vLLM has: their GGUF is that of the transformers class whose network they are, bit by bit, and
llama.cpp computes with it what transformers computes with that class.

The weights get the names and the order in which vLLM loads them here, not by the rows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from arch_models import build, find_case, relative_error, token_ids, top1_equal, transformers_logits, write_tokenizers
from llama_peer import LlamaPeer
from safetensors.numpy import load_file, save_file

import aprfmt

Arrays = dict[str, np.ndarray[Any, Any]]
Config = dict[str, Any]


def renamed(config: Config, names: Mapping[str, str], model_class: str, model_type: str) -> Config:
    kept = {names.get(key, key): value for key, value in config.items()}
    return kept | {"architectures": [model_class], "model_type": model_type}


def mimo(config: Config, arrays: Arrays) -> Config:
    arrays["model.mtp_layers.0.input_proj.weight"] = np.ones((config["hidden_size"], 2 * config["hidden_size"]), "<f4")
    return renamed(config, {}, "MiMoForCausalLM", "mimo") | {"num_nextn_predict_layers": 1}


def telechat3(config: Config, arrays: Arrays) -> Config:
    return renamed(config, {}, "TeleChat3ForCausalLM", "telechat3")


def sarvam(config: Config, arrays: Arrays) -> Config:
    names = {
        "n_routed_experts": "num_experts",
        "n_shared_experts": "num_shared_experts",
        "scoring_func": "score_function",
    }
    return renamed(config, names, "SarvamMLAForCausalLM", "sarvam_mla")


def telechat2(config: Config, arrays: Arrays) -> Config:
    """Keys and values of a head after each other in one tensor, and no biases but those of two projections."""
    heads, n_layers = config["num_key_value_heads"], config["num_hidden_layers"]
    old, names = dict(arrays), {
        "model.layers.": "transformer.h.", "model.embed_tokens": "transformer.word_embeddings",
        "model.norm": "transformer.ln_f", "self_attn.q_proj": "self_attention.query",
        "self_attn.o_proj": "self_attention.dense",
    }  # fmt: skip
    arrays.clear()
    for name, array in old.items():
        if not (
            name.endswith(("q_proj.bias", "gate_proj.bias", "up_proj.bias")) or "k_proj" in name or "v_proj" in name
        ):
            for ours, theirs in names.items():
                name = name.replace(ours, theirs)
            arrays[name] = array
    for n in range(n_layers):
        parts = [
            old[f"model.layers.{n}.self_attn.{x}_proj.weight"].reshape(heads, 1, -1, config["hidden_size"])
            for x in "kv"
        ]
        both = np.concatenate(parts, 1).reshape(-1, config["hidden_size"])
        arrays[f"transformer.h.{n}.self_attention.key_value.weight"] = both
    sizes = {
        "num_hidden_layers": "n_layer", "num_attention_heads": "n_head", "intermediate_size": "ffn_hidden_size",
        "max_position_embeddings": "seq_length", "rms_norm_eps": "layer_norm_epsilon",
    }  # fmt: skip
    return renamed(config, sizes, "TeleChat2ForCausalLM", "telechat2")


by_class = pytest.mark.parametrize(
    ("case_id", "change"),
    [("qwen2", mimo), ("llama/llama3", telechat3), ("llama/biases", telechat2), ("deepseek_v3", sarvam)],
)


def write_both(case_id: str, change: Callable[[Config, Arrays], Config], folder: Path) -> None:
    """Writes the folder `known` of a class of transformers, and `ours` of the class of vLLM with the same weights."""
    case, known, ours = find_case(case_id), folder / "known", folder / "ours"
    build(case, known, write_tokenizers(folder / "tokenizers", [case.tokenizer], 512))
    arrays: Arrays = load_file(known / "model.safetensors")
    if change is telechat2:
        for name in arrays:
            if name.endswith(".bias") and not name.endswith(("o_proj.bias", "down_proj.bias")):
                arrays[name] = np.zeros_like(arrays[name])
        save_file(arrays, known / "model.safetensors", {"format": "pt"})
        plain = json.loads((known / "config.json").read_text())
        plain.pop("head_dim")  # which TeleChat 2 does not state
        (known / "config.json").write_text(json.dumps(plain))
    ours.mkdir()
    for path in known.iterdir():
        (ours / path.name).write_bytes(path.read_bytes())
    config = change(json.loads((known / "config.json").read_text()), arrays)
    (ours / "config.json").write_text(json.dumps(config))
    save_file(arrays, ours / "model.safetensors")


@pytest.mark.llama
@by_class
def test_llama_cpp_computes_the_logits_of_the_known_class(
    case_id: str, change: Callable[[Config, Arrays], Config], tmp_path: Path, llama_cpp: LlamaPeer
) -> None:
    write_both(case_id, change, tmp_path)
    aprfmt.convert_model(tmp_path / "ours", tmp_path / "ours.gguf", dtype="f32")
    ids = token_ids(tmp_path / "known")
    wanted = transformers_logits(tmp_path / "known", ids)
    got = llama_cpp.logits(tmp_path / "ours.gguf", ids, "causal")
    assert relative_error(got, wanted) < 5e-3
    assert top1_equal(got, wanted)


@by_class
def test_the_gguf_is_that_of_the_known_class(
    case_id: str, change: Callable[[Config, Arrays], Config], tmp_path: Path
) -> None:
    write_both(case_id, change, tmp_path)
    for name in ("known", "ours"):
        aprfmt.convert_model(tmp_path / name, tmp_path / f"{name}.gguf", dtype="f32")
    with aprfmt.open(tmp_path / "known.gguf") as known, aprfmt.open(tmp_path / "ours.gguf") as ours:
        tensors = [{name: t.numpy() for name, t in model.tensors.items()} for model in (known, ours)]
        arch = known.metadata["general.architecture"]
        keys = [{k: v for k, v in m.metadata.items() if k.startswith(f"{arch}.")} for m in (known, ours)]
    assert keys[0] == keys[1]
    assert tensors[1].keys() <= tensors[0].keys()
    for name, array in tensors[0].items():
        assert np.array_equal(array, tensors[1][name] if name in tensors[1] else np.zeros_like(array)), name
