"""Tiny models as arrays and files, made without transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import save_file
from tiny_models import write_byte_tokenizer

HIDDEN, FFN, VOCAB, LAYERS, HEADS, KV_HEADS = 64, 96, 320, 2, 4, 2

Weights = dict[str, "np.ndarray[Any, Any]"]

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "vocab_size": VOCAB,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

# The same as typed APR metadata, without a head size, as the reference writes it for a GGUF.
METADATA: dict[str, Any] = {
    "model_type": "llama",
    "architecture": "llama",
    "hidden_size": HIDDEN,
    "num_layers": LAYERS,
    "num_heads": HEADS,
    "num_kv_heads": KV_HEADS,
    "vocab_size": VOCAB,
    "intermediate_size": FFN,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
}


def weights(*, qk_norm: bool = False, head_dim: int = 16, head: bool = True) -> Weights:
    """Random float32 weights of a llama (with `qk_norm` of a qwen3) under Hugging Face names."""
    random = np.random.default_rng(0)
    q, kv = HEADS * head_dim, KV_HEADS * head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN)}
    for n in range(LAYERS):
        layer = {
            "input_layernorm": (HIDDEN,),
            "post_attention_layernorm": (HIDDEN,),
            "self_attn.q_proj": (q, HIDDEN),
            "self_attn.k_proj": (kv, HIDDEN),
            "self_attn.v_proj": (kv, HIDDEN),
            "self_attn.o_proj": (HIDDEN, q),
            "mlp.gate_proj": (FFN, HIDDEN),
            "mlp.up_proj": (FFN, HIDDEN),
            "mlp.down_proj": (HIDDEN, FFN),
        }
        if qk_norm:
            layer |= {"self_attn.q_norm": (head_dim,), "self_attn.k_norm": (head_dim,)}
        shapes |= {f"model.layers.{n}.{name}.weight": shape for name, shape in layer.items()}
    shapes["model.norm.weight"] = (HIDDEN,)
    if head:
        shapes["lm_head.weight"] = (VOCAB, HIDDEN)
    return {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def write_folder(folder: Path, arrays: Weights | None = None, **config: Any) -> Path:
    """A Hugging Face folder with a byte-level tokenizer."""
    folder.mkdir()
    save_file(arrays or weights(), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    write_byte_tokenizer(folder)
    return folder


def write_adapter(folder: Path) -> Path:
    """A LoRA of rank 4 for such a folder, as PEFT saves it, beside the base's config.json."""
    folder.mkdir()
    random = np.random.default_rng(1)
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    for n in range(LAYERS):
        at = f"base_model.model.model.layers.{n}.self_attn.q_proj.lora_"
        for name, shape in (("A", (4, HIDDEN)), ("B", (HEADS * 16, 4))):
            arrays[f"{at}{name}.weight"] = random.normal(size=shape).astype(np.float32)
    save_file(arrays, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def write_seeing_folder(folder: Path) -> Path:
    """A Llava folder: such a model behind a Pixtral tower of one layer."""
    folder.mkdir()
    random = np.random.default_rng(2)
    width, ffn, patch = 32, 48, 4
    layer: dict[str, tuple[int, ...]] = {f"attention.{name}_proj": (width, width) for name in "qkvo"}
    layer |= {"attention_norm": (width,), "ffn_norm": (width,), "feed_forward.down_proj": (width, ffn)}
    layer |= {f"feed_forward.{name}_proj": (ffn, width) for name in ("gate", "up")}
    shapes: dict[str, tuple[int, ...]] = {
        "vision_tower.patch_conv": (width, 3, patch, patch),
        "vision_tower.ln_pre": (width,),
        **{f"vision_tower.transformer.layers.0.{name}": shape for name, shape in layer.items()},
        "multi_modal_projector.linear_1": (HIDDEN, width),
        "multi_modal_projector.linear_2": (HIDDEN, HIDDEN),
    }
    tower = {f"{name}.weight": random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    text = {f"language_model.{name}": array for name, array in weights().items()}
    save_file({**text, **tower}, folder / "model.safetensors", metadata={"format": "pt"})
    vision = {"model_type": "pixtral", "hidden_size": width, "intermediate_size": ffn, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "patch_size": patch, "image_size": 16}
    config = {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "vision_config": vision}
    (folder / "config.json").write_text(json.dumps({**config, "text_config": CONFIG}))
    images = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
    (folder / "preprocessor_config.json").write_text(json.dumps(images))
    write_byte_tokenizer(folder)
    return folder


GGUF_KEYS: dict[str, tuple[gguf.GGUFValueType, Any]] = {
    "llama.block_count": (gguf.GGUFValueType.UINT32, LAYERS),
    "llama.context_length": (gguf.GGUFValueType.UINT32, 128),
    "llama.embedding_length": (gguf.GGUFValueType.UINT32, HIDDEN),
    "llama.feed_forward_length": (gguf.GGUFValueType.UINT32, FFN),
    "llama.attention.head_count": (gguf.GGUFValueType.UINT32, HEADS),
    "llama.attention.head_count_kv": (gguf.GGUFValueType.UINT32, KV_HEADS),
    "llama.attention.layer_norm_rms_epsilon": (gguf.GGUFValueType.FLOAT32, 1e-5),
}


def gguf_names(arrays: Weights) -> Weights:
    """The arrays under GGUF names, rows as they are."""
    from aprfmt.arch.hyperparams import Hyperparams
    from aprfmt.arch.names import gguf_name
    from aprfmt.arch.table import ARCHITECTURES

    return {gguf_name(ARCHITECTURES["llama"], name, Hyperparams()) or name: array for name, array in arrays.items()}


def write_gguf(path: Path, arrays: Weights, keys: Mapping[str, tuple[gguf.GGUFValueType, Any]] = GGUF_KEYS) -> Path:
    """A llama GGUF of `arrays` (GGUF names) and `keys`."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, (kind, value) in keys.items():
        if kind == gguf.GGUFValueType.ARRAY:
            writer.add_array(key, value)
        else:
            writer.add_key_value(key, value, kind)
    for name, array in arrays.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
