"""Models to measure with, made quickly: python tools/bench_material.py FOLDER [--layers N]

A Hugging Face folder with the shape of Qwen2.5-1.5B in BF16 (28 layers: 3.09 GB in two shards), its real tokenizer
out of the material cache, weights pseudo-random and the same on every machine. Each layer has 93.6 MB, the
embeddings 467 MB. And an importance matrix for a GGUF.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from fetch_material import CACHE

FULL_LAYERS = 28
QUICK_LAYERS = 4
_HIDDEN, _FFN, _VOCABULARY, _KV = 1536, 8960, 151936, 256
_BLOCK = 1 << 20  # values made at a time
_STD = 0.02
IMATRIX_CALLS = 10

Shapes = dict[str, tuple[int, ...]]

_CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": _HIDDEN,
    "initializer_range": 0.02,
    "intermediate_size": _FFN,
    "max_position_embeddings": 32768,
    "max_window_layers": 21,
    "model_type": "qwen2",
    "num_attention_heads": 12,
    "num_hidden_layers": FULL_LAYERS,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.1",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": _VOCABULARY,
}
_GENERATION = {
    "bos_token_id": 151643,
    "do_sample": True,
    "eos_token_id": [151645, 151643],
    "pad_token_id": 151643,
    "repetition_penalty": 1.1,
    "temperature": 0.7,
    "top_k": 20,
    "top_p": 0.8,
    "transformers_version": "4.43.1",
}


def qwen_folder(folder: Path, layers: int = FULL_LAYERS, seed: int = 0) -> int:
    """Makes the folder; returns the bytes of its weights. Raises SystemExit without the tokenizer's files."""
    tokenizer = CACHE / "tokenizers" / "qwen2_5"
    if not tokenizer.is_dir():
        raise SystemExit("no tokenizer in the material cache: run tools/fetch_material.py tokenizers")
    folder.mkdir(parents=True, exist_ok=True)
    for file in tokenizer.iterdir():
        shutil.copyfile(file, folder / file.name)
    _write_json(folder / "config.json", _CONFIG | {"num_hidden_layers": layers})
    _write_json(folder / "generation_config.json", _GENERATION)
    return _write_shards(folder, _shapes(layers), seed)


def _shapes(layers: int) -> Shapes:
    shapes: Shapes = {"model.embed_tokens.weight": (_VOCABULARY, _HIDDEN)}
    for number in range(layers):
        for name, shape in _layer().items():
            shapes[f"model.layers.{number}.{name}"] = shape
    return shapes | {"model.norm.weight": (_HIDDEN,)}


def _layer() -> Shapes:
    rows = {"q_proj": _HIDDEN, "k_proj": _KV, "v_proj": _KV}
    return {
        **{f"self_attn.{name}.weight": (n, _HIDDEN) for name, n in rows.items()},
        **{f"self_attn.{name}.bias": (n,) for name, n in rows.items()},
        "self_attn.o_proj.weight": (_HIDDEN, _HIDDEN),
        "mlp.gate_proj.weight": (_FFN, _HIDDEN),
        "mlp.up_proj.weight": (_FFN, _HIDDEN),
        "mlp.down_proj.weight": (_HIDDEN, _FFN),
        "input_layernorm.weight": (_HIDDEN,),
        "post_attention_layernorm.weight": (_HIDDEN,),
    }


def _write_shards(folder: Path, shapes: Shapes, seed: int) -> int:
    total = sum(2 * math.prod(shape) for shape in shapes.values())
    shards: list[Shapes] = [{}, {}]
    before = 0
    for name, shape in shapes.items():
        shards[before >= total / 2][name] = shape
        before += 2 * math.prod(shape)
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file_name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        with open(folder / file_name, "wb") as file:
            _write_shard(file, dict(sorted(shard.items())), seed)
        places |= dict.fromkeys(shard, file_name)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    _write_json(folder / "model.safetensors.index.json", index)
    return total


def _write_shard(file: BinaryIO, shapes: Shapes, seed: int) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        end = offset + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, end]}
        offset = end
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    file.write(struct.pack("<Q", len(raw)) + raw)
    for name, shape in shapes.items():
        for piece in _weights(name, math.prod(shape), seed):
            file.write(piece)


def _weights(name: str, count: int, seed: int) -> Iterator[memoryview]:
    """BF16 of normal values, about 0 or, for a norm, about 1; they follow from the name and the seed."""
    import numpy as np

    generator = np.random.default_rng(zlib.crc32(name.encode()) + seed)
    mean = np.float32("norm" in name)
    for start in range(0, count, _BLOCK):
        values = generator.standard_normal(min(_BLOCK, count - start), np.float32)
        values *= np.float32(_STD)
        values += mean
        bits = values.view(np.uint32)
        bits += 0x8000
        bits >>= 16
        yield bits.astype("<u2").data.cast("B")


def _write_json(path: Path, value: Mapping[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


# --- large models of latent attention and many experts ---


@dataclass(frozen=True)
class Latent:
    """Sizes in which DeepSeek-V3 and its relatives differ; the others are those of DeepSeek-V3."""

    dense: int
    experts: int
    heads: int
    groups: int
    drafts: int
    shards: int


LATENT = {"DeepSeek-V3, 671B": Latent(3, 256, 128, 8, 1, 163), "Kimi-K2, 1T": Latent(1, 384, 64, 1, 0, 61)}
_LATENT_LAYERS, _LATENT_HIDDEN, _LATENT_VOCABULARY = 61, 7168, 129280


def latent_folder(folder: Path, sizes: Latent) -> int:
    """Makes an FP8 release of those sizes, of holes instead of weights; returns the number of its tensors."""
    tokenizer = CACHE / "tokenizers" / "llama3"
    if not tokenizer.is_dir():
        raise SystemExit("no tokenizer in the material cache: run tools/fetch_material.py tokenizers")
    folder.mkdir(parents=True, exist_ok=True)
    for file in tokenizer.iterdir():
        shutil.copyfile(file, folder / file.name)
    _write_json(folder / "config.json", _latent_config(sizes))
    tensors = list(_latent_tensors(sizes))
    step = -(-len(tensors) // sizes.shards)
    places: dict[str, str] = {}
    for number in range(sizes.shards):
        name = f"model-{number + 1:05}-of-{sizes.shards:06}.safetensors"
        part = tensors[number * step : (number + 1) * step]
        _write_holes(folder / name, part)
        places |= {tensor: name for tensor, _, _ in part}
    _write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": places})
    return len(tensors)


def _latent_config(sizes: Latent) -> dict[str, object]:
    return {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "attention_bias": False,
        "bos_token_id": 0, "eos_token_id": 1, "first_k_dense_replace": sizes.dense, "hidden_act": "silu",
        "hidden_size": _LATENT_HIDDEN, "intermediate_size": 18432, "kv_lora_rank": 512,
        "max_position_embeddings": 163840, "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": sizes.groups,
        "topk_group": min(4, sizes.groups), "n_routed_experts": sizes.experts, "n_shared_experts": 1,
        "norm_topk_prob": True, "num_attention_heads": sizes.heads, "num_experts_per_tok": 8,
        "num_hidden_layers": _LATENT_LAYERS, "num_key_value_heads": sizes.heads,
        "num_nextn_predict_layers": sizes.drafts, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06, "rope_theta": 10000, "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid", "tie_word_embeddings": False, "topk_method": "noaux_tc", "torch_dtype": "bfloat16",
        "v_head_dim": 128, "vocab_size": _LATENT_VOCABULARY,
        "quantization_config": {"fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]},
    }  # fmt: skip


def _latent_tensors(sizes: Latent) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """(name, dtype, shape) of every tensor."""
    hidden, vocabulary, heads = _LATENT_HIDDEN, _LATENT_VOCABULARY, sizes.heads
    attention = {
        "q_a_proj": (1536, hidden), "q_b_proj": (192 * heads, 1536), "kv_a_proj_with_mqa": (576, hidden),
        "kv_b_proj": (256 * heads, 512), "o_proj": (hidden, 128 * heads),
    }  # fmt: skip
    norms = {
        "input_layernorm": hidden, "post_attention_layernorm": hidden, "self_attn.q_a_layernorm": 1536,
        "self_attn.kv_a_layernorm": 512,
    }  # fmt: skip
    draft = {
        "embed_tokens": (vocabulary, hidden), "enorm": (hidden,), "hnorm": (hidden,), "eh_proj": (hidden, 2 * hidden),
        "shared_head.norm": (hidden,), "shared_head.head": (vocabulary, hidden),
    }  # fmt: skip
    yield "model.embed_tokens.weight", "BF16", (vocabulary, hidden)
    for layer in range(_LATENT_LAYERS + sizes.drafts):
        begin = f"model.layers.{layer}."
        own: dict[str, tuple[int, ...]] = {name: (n,) for name, n in norms.items()}
        own |= draft if layer >= _LATENT_LAYERS else {}
        packed = {f"self_attn.{name}": shape for name, shape in attention.items()}
        if layer < sizes.dense:
            packed |= _gated("mlp.", 18432)
        else:
            own["mlp.gate"] = (sizes.experts, hidden)
            yield f"{begin}mlp.gate.e_score_correction_bias", "F32", (sizes.experts,)
            for expert in (*(f"experts.{i}." for i in range(sizes.experts)), "shared_experts."):
                packed |= _gated(f"mlp.{expert}", 2048)
        for name, shape in own.items():
            yield f"{begin}{name}.weight", "BF16", shape
        for name, (rows, columns) in packed.items():
            yield f"{begin}{name}.weight", "F8_E4M3", (rows, columns)
            yield f"{begin}{name}.weight_scale_inv", "F32", (-(-rows // 128), -(-columns // 128))
    yield "model.norm.weight", "BF16", (hidden,)
    yield "lm_head.weight", "BF16", (vocabulary, hidden)


def _gated(begin: str, width: int) -> dict[str, tuple[int, int]]:
    up = (width, _LATENT_HIDDEN)
    return {f"{begin}gate_proj": up, f"{begin}up_proj": up, f"{begin}down_proj": up[::-1]}


def _write_holes(path: Path, tensors: Sequence[tuple[str, str, tuple[int, ...]]]) -> None:
    """A safetensors file that has its header, and a hole for the data."""
    sizes, header, offset = {"F8_E4M3": 1, "BF16": 2, "F32": 4}, dict[str, object](), 0
    for name, dtype, shape in tensors:
        end = offset + sizes[dtype] * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        file.truncate(8 + len(raw) + offset)


# --- an importance matrix ---


def write_imatrix(gguf: Path, target: Path) -> None:
    """Writes a synthetic matrix for the layers of `gguf`, in the older of the two forms, `.dat`.

    Little-endian: i32 entries; each: i32 length and bytes of the name, i32 calls, i32 columns, f32 the mean squared
    activation of each column times the calls; then i32 chunks, i32 length and bytes of the data set's name.
    """
    import numpy as np

    import aprfmt

    with aprfmt.open(gguf) as model:
        columns = {
            t.name: t.shape[-1]
            for t in model.tensors.entries
            if t.name.startswith("blk.") and t.name.endswith(".weight") and len(t.shape) > 1
        }
    with open(target, "wb") as file:
        file.write(struct.pack("<i", len(columns)))
        for name, count in sorted(columns.items()):
            raw = name.encode()
            mean = np.random.default_rng(zlib.crc32(raw)).standard_normal(count, np.float32) ** 2 + 1e-4
            file.write(struct.pack(f"<i{len(raw)}sii", len(raw), raw, IMATRIX_CALLS, count))
            file.write((mean * IMATRIX_CALLS).astype("<f4").tobytes())
        file.write(struct.pack("<ii9s", IMATRIX_CALLS, 9, b"synthetic"))


def read_imatrix(path: Path) -> dict[str, bytes]:
    """F32 of each column's mean by tensor name, as llama-quantize hands them to the library."""
    import numpy as np

    raw, at = path.read_bytes(), 4
    means = {}
    for _ in range(struct.unpack_from("<i", raw)[0]):
        (length,) = struct.unpack_from("<i", raw, at)
        name = raw[at + 4 : at + 4 + length].decode()
        calls, count = struct.unpack_from("<ii", raw, at + 4 + length)
        at += 12 + length
        means[name] = (np.frombuffer(raw, "<f4", count, at) / np.float32(calls)).tobytes()
        at += 4 * count
    return means


def main() -> None:
    """Makes the folder and says its size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=FULL_LAYERS)
    options = parser.parse_args()
    print(f"{qwen_folder(options.folder, options.layers)} bytes of weights in {options.folder}")


if __name__ == "__main__":
    main()
