"""Tiny random models that are more than a plain decoder: towers, draft heads, adapters, modules, files of other kinds.

FOLDERS writes Hugging Face folders, GGUFS files as llama.cpp's programs write them. All are deterministic.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import arch_cases_moe
import arch_cases_multimodal
import arch_models
import numpy as np
from arch_models import ArchCase
from converter_peer import ConverterPeer
from imatrix_files import new_imatrix
from tiny_models import BYTES, write_byte_tokenizer

Arrays = dict[str, np.ndarray[Any, Any]]
Write = Callable[[Path], None]

PLAIN = ArchCase(
    "plain", "llama", "LlamaConfig", "LlamaForCausalLM", {"vocab_size": 320, "hidden_size": 32, "head_dim": 8}, BYTES
)
_QWEN3_5 = ArchCase(
    "qwen3_5",
    "qwen3_5_text",
    "Qwen3_5TextConfig",
    "Qwen3_5ForCausalLM",
    {
        **arch_cases_multimodal.DELTA,
        "vocab_size": 320,
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "full_attention"] * 2,
    },
    BYTES,
)
_BERT = ArchCase("bert", "bert", "BertConfig", "BertModel", {"vocab_size": 320}, BYTES, kind="encoder")


def _case(case_id: str, cases: tuple[ArchCase, ...], **config: Any) -> ArchCase:
    case = next(case for case in cases if case.id == case_id)
    return ArchCase(
        case.id, case.row, case.config_class, case.model_class, {**case.config, "vocab_size": 320, **config}, BYTES
    )


def _build(case: ArchCase, folder: Path) -> None:
    tokenizer = folder.parent / f".{folder.name}-tokenizer"
    tokenizer.mkdir(parents=True)
    write_byte_tokenizer(tokenizer)
    arch_models.build(case, folder, {BYTES: tokenizer})


def _multimodal(case_id: str, folder: Path) -> None:
    case = next(case for case in arch_cases_multimodal.CASES if case.id == case_id)
    # llama.cpp's converter counts the modules of Qwen2-VL's projector as layers.
    vision = {**case.config["vision_config"], **({"depth": 3} if case_id == "qwen2_vl" else {})}
    _build(replace(case, config={**case.config, "vision_config": vision}, tokenizer=BYTES), folder)
    path = folder / "model.safetensors"
    named = {_PUBLISHED.sub(r"\1vision_model.", name): array for name, array in read_arrays(path).items()}
    write_arrays(path, named)
    _write_json(folder / "preprocessor_config.json", {"image_mean": [0.5] * 3, "image_std": [0.5] * 3})


_PUBLISHED = re.compile(r"^(vision_tower\.)(?!vision_model\.)")
"""Where published checkpoints of CLIP and SigLIP have one more module in their names than transformers saves now."""


# --- draft heads ---

_NEW = (("eh_proj", 2), ("enorm", 1), ("hnorm", 1), ("shared_head.norm", 1))
"""What a draft layer has beside the tensors of a layer, and how many dimensions of the hidden size."""


def _random(rng: np.random.Generator, *shape: int) -> np.ndarray[Any, Any]:
    return rng.normal(size=shape).astype(np.float32)


def read_arrays(path: Path) -> Arrays:
    """The tensors of a safetensors file."""
    from safetensors.numpy import load_file

    return dict(load_file(path))


def write_arrays(path: Path, arrays: Arrays) -> None:
    """A safetensors file as transformers writes it."""
    from safetensors.numpy import save_file

    save_file(arrays, path, metadata={"format": "pt"})


def edit_config(folder: Path, **values: Any) -> None:
    """Sets keys of a config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}, indent=2, sort_keys=True) + "\n")


def _with_draft_layer(case: ArchCase, folder: Path) -> None:
    """A checkpoint whose draft head is one more layer behind the last, as GLM-4.5 and DeepSeek-V3 are published."""
    _build(case, folder)
    path, rng = folder / "model.safetensors", np.random.default_rng(1)
    arrays = read_arrays(path)
    last = case.config["num_hidden_layers"] - 1
    hidden = arrays["model.norm.weight"].shape[0]
    before = f"model.layers.{last + 1}."
    for name in list(arrays):
        if name.startswith(f"model.layers.{last}."):
            arrays[name.replace(f".{last}.", f".{last + 1}.", 1)] = _random(rng, *arrays[name].shape)
    for name, dims in _NEW:
        arrays[f"{before}{name}.weight"] = _random(rng, *((hidden, 2 * hidden) if dims == 2 else (hidden,)))
    arrays[f"{before}embed_tokens.weight"] = arrays["model.embed_tokens.weight"].copy()
    arrays[f"{before}shared_head.head.weight"] = arrays["lm_head.weight"].copy()
    write_arrays(path, arrays)
    # transformers leaves out the number of dense layers, which published files of GLM-4.7-Flash have.
    edit_config(folder, num_nextn_predict_layers=1, first_k_dense_replace=1)


def _with_mtp(case: ArchCase, folder: Path) -> None:
    """A checkpoint whose draft head has names of its own, `mtp.*`, as Qwen3.5 is published."""
    _build(case, folder)
    path, rng = folder / "model.safetensors", np.random.default_rng(2)
    arrays = read_arrays(path)
    attention = next(i for i, kind in enumerate(case.config["layer_types"]) if kind == "full_attention")
    hidden = arrays["model.norm.weight"].shape[0]
    for name in list(arrays):
        if name.startswith(layer := f"model.layers.{attention}."):
            arrays["mtp.layers.0." + name.removeprefix(layer)] = _random(rng, *arrays[name].shape)
    arrays["mtp.fc.weight"] = _random(rng, hidden, 2 * hidden)
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        arrays[f"mtp.{name}.weight"] = _random(rng, hidden)
    write_arrays(path, arrays)
    edit_config(folder, mtp_num_hidden_layers=1, mtp_use_dedicated_embeddings=False)


# --- folders around a model ---


def _sentence_transformers(folder: Path) -> None:
    _build(_BERT, folder)
    modules = {"": "Transformer", "1_Pooling": "Pooling", "2_Dense": "Dense", "3_Normalize": "Normalize"}
    listed = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(modules.items())
    ]
    _write_json(folder / "modules.json", listed)
    _write_json(folder / "sentence_bert_config.json", {"max_seq_length": 512, "do_lower_case": False})
    _write_json(folder / "config_sentence_transformers.json", {"prompts": {}, "similarity_fn_name": "cosine"})
    pooling = {"word_embedding_dimension": 64, "pooling_mode_mean_tokens": True}
    _write_json(folder / "1_Pooling" / "config.json", pooling)
    dense = {"in_features": 64, "out_features": 32, "bias": True}
    _write_json(folder / "2_Dense" / "config.json", dense)
    rng = np.random.default_rng(3)
    write_arrays(
        folder / "2_Dense" / "model.safetensors",
        {"linear.weight": _random(rng, 32, 64), "linear.bias": _random(rng, 32)},
    )
    (folder / "README.md").write_text("---\nlibrary_name: sentence-transformers\n---\n\n# An encoder\n")


def _lora(folder: Path) -> None:
    rng, arrays = np.random.default_rng(4), Arrays()
    for layer in range(2):
        for name in ("q_proj", "v_proj"):
            stem = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            arrays[f"{stem}.lora_A.weight"] = _random(rng, 4, 32)
            arrays[f"{stem}.lora_B.weight"] = _random(rng, 32 if name == "q_proj" else 16, 4)
    folder.mkdir(parents=True)
    write_arrays(folder / "adapter_model.safetensors", arrays)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "example/plain",
        "r": 4,
        "lora_alpha": 8,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": ["q_proj", "v_proj"],
        "inference_mode": True,
    }
    _write_json(folder / "adapter_config.json", config)
    (folder / "README.md").write_text("---\nbase_model: example/plain\nlibrary_name: peft\n---\n\n# An adapter\n")


def _pictures(folder: Path) -> None:
    _build(PLAIN, folder)
    rng = np.random.default_rng(5)
    for name in ("assets/logo.png", "assets/curves/loss.jpg", "original/consolidated.00.pth", "original/params.json"):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b'{"dim": 32}\n' if name.endswith(".json") else rng.bytes(3000))
    (folder / "README.md").write_text("# A model\n\n![the curve](assets/curves/loss.jpg)\n")


def _write_json(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=2) + "\n")


_MOE = arch_cases_moe.CASES
_NO_DRAFTS: Mapping[str, Any] = {"num_nextn_predict_layers": 0, "num_hidden_layers": 3}

FOLDERS: dict[str, Write] = {
    "llava": partial(_multimodal, "llama/llava"),
    "qwen2_vl": partial(_multimodal, "qwen2_vl"),
    "gemma3_vision": partial(_multimodal, "gemma3_text/whole"),
    "glm4_moe_mtp": partial(_with_draft_layer, _case("glm4_moe", _MOE, attention_bias=True, **_NO_DRAFTS)),
    "glm4_moe_lite_mtp": partial(_with_draft_layer, _case("deepseek_v3/glm4_lite", _MOE, **_NO_DRAFTS)),
    "deepseek_v3_mtp": partial(_with_draft_layer, _case("deepseek_v3", _MOE, **_NO_DRAFTS)),
    "qwen3_5_mtp": partial(_with_mtp, _QWEN3_5),
    "sentence_transformers": _sentence_transformers,
    "lora": _lora,
    "pictures": _pictures,
}
"""Name -> what writes the folder."""


# --- GGUF ---

CONVERTED: dict[str, tuple[str, tuple[str, ...]]] = {
    "glm4_moe_mtp": ("glm4_moe_mtp", ()),
    "glm4_moe_no_mtp": ("glm4_moe_mtp", ("--no-mtp",)),
    "glm4_moe_only_mtp": ("glm4_moe_mtp", ("--mtp",)),
    "glm4_moe_lite_mtp": ("glm4_moe_lite_mtp", ()),
    "deepseek_v3_mtp": ("deepseek_v3_mtp", ()),
    "qwen3_5_mtp": ("qwen3_5_mtp", ()),
    "qwen3_5_only_mtp": ("qwen3_5_mtp", ("--mtp",)),
    "llava_text": ("llava", ()),
    "qwen2_vl_mmproj": ("qwen2_vl", ("--mmproj",)),
    "gemma3_mmproj": ("gemma3_vision", ("--mmproj",)),
}
"""What llama.cpp's converter makes of folders: name -> (folder, its options)."""


def convert(folder: Path, name: str, path: Path, peer: ConverterPeer) -> None:
    """Writes the row `name` of CONVERTED. Raises ConverterError."""
    options = CONVERTED[name][1]
    peer.convert_once(folder, path, "f16", options, plain_vocabulary="--mmproj" not in options)


def _write(path: Path, arch: str | None, keys: Mapping[str, Any], arrays: Arrays) -> None:
    import gguf

    writer = gguf.GGUFWriter(path, arch or "", use_temp_file=False)
    if arch is None:
        writer.kv_data[0].clear()
    for key, value in keys.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        else:
            kinds = {str: "STRING", bool: "BOOL", int: "UINT32", float: "FLOAT32"}
            writer.add_key_value(key, value, gguf.GGUFValueType[kinds[type(value)]])
    for name, array in arrays.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _lora_gguf(path: Path) -> None:
    rng, arrays = np.random.default_rng(6), Arrays()
    for layer in range(2):
        for name in ("attn_q", "attn_v"):
            arrays[f"blk.{layer}.{name}.weight.lora_a"] = _random(rng, 4, 32)
            arrays[f"blk.{layer}.{name}.weight.lora_b"] = _random(rng, 32, 4)
    keys = {"general.type": "adapter", "adapter.type": "lora", "general.name": "a", "adapter.lora.alpha": 8.0}
    _write(path, "llama", keys, arrays)


def _control_vector(path: Path) -> None:
    rng = np.random.default_rng(7)
    arrays = {f"direction.{layer}": _random(rng, 32) for layer in range(1, 3)}
    keys = {"controlvector.model_hint": "llama", "controlvector.layer_count": 2}
    _write(path, "controlvector", keys, arrays)


def _unknown(path: Path) -> None:
    rng = np.random.default_rng(8)
    arrays = {"token_embd.weight": _random(rng, 320, 32), "blk.0.weird.weight": _random(rng, 32, 32)}
    keys = {"zoo.block_count": 1, "zoo.embedding_length": 32, "zoo.strange": [1, 2, 3]}
    _write(path, "zoo", keys, arrays)


def _imatrix(path: Path) -> None:
    new_imatrix(path, {"blk.0.attn_q.weight": [1.0, 2.0, 3.0, 4.0]}, {"blk.0.attn_q.weight": [4.0]})


def _anonymous(path: Path) -> None:
    _write(path, None, {"some.key": 1}, {"x": _random(np.random.default_rng(9), 4, 4)})


GGUFS: dict[str, Write] = {
    "lora": _lora_gguf,
    "control_vector": _control_vector,
    "unknown": _unknown,
    "imatrix": _imatrix,
    "anonymous": _anonymous,
}
"""GGUF files that are not models: name -> what writes the file."""
