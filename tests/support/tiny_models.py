"""Tiny random Hugging Face models of every family, with real tokenizers. A new family is one row in CASES."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Case:
    """One family: its transformers classes, what differs from the common dims, the tokenizer of its folder."""

    id: str
    config_class: str
    model_class: str
    tokenizer: str | None
    vocab_size: int
    overrides: dict[str, Any] = field(default_factory=dict)


_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

CASES = {
    case.id: case
    for case in (
        Case("qwen2", "Qwen2Config", "Qwen2ForCausalLM", "qwen2_5", 151936, {"tie_word_embeddings": True}),
        Case("qwen2-untied", "Qwen2Config", "Qwen2ForCausalLM", None, 320),
        Case(
            "qwen3",
            "Qwen3Config",
            "Qwen3ForCausalLM",
            "qwen3",
            151936,
            {"head_dim": 32, "tie_word_embeddings": True},
        ),
        Case(
            "llama3", "LlamaConfig", "LlamaForCausalLM", "llama3", 128256, {"rope_parameters": _LLAMA3_ROPE}
        ),
        Case("llama-bias", "LlamaConfig", "LlamaForCausalLM", None, 320, {"attention_bias": True}),
        Case(
            "mistral",
            "MistralConfig",
            "MistralForCausalLM",
            None,
            320,
            {"head_dim": 32, "sliding_window": None},
        ),
    )
}


def build(
    case: Case, folder: Path, tokenizers: dict[str, Path] | None, *, seed: int = 0, dtype: str = "float32"
) -> Any:
    """Writes the folder of a tiny random model of `case`; returns the transformers model."""
    import torch
    import transformers

    dims = {
        "vocab_size": case.vocab_size,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
    }
    config = getattr(transformers, case.config_class)(**{**dims, **case.overrides})
    torch.manual_seed(seed)
    model = getattr(transformers, case.model_class)(config).eval()
    with (
        torch.no_grad()
    ):  # larger than the default initialisation, so that every constant shows in the logits
        for name, weight in model.named_parameters():
            if weight.ndim >= 2:
                weight.normal_(0.0, 0.2)
            elif name.endswith("bias"):
                weight.normal_(0.0, 0.5)
            else:
                weight.uniform_(0.5, 1.5)
    model = model.to(getattr(torch, dtype))
    model.save_pretrained(folder)
    if case.tokenizer is not None and tokenizers is not None:
        for path in tokenizers[case.tokenizer].iterdir():
            shutil.copy(path, folder / path.name)
    elif case.tokenizer is None:
        write_byte_tokenizer(folder)
    return model


def write_byte_tokenizer(folder: Path) -> None:
    """A byte-level BPE of 256 bytes, 60 merges and four special tokens: 320 ids."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT * 4, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "GPT2Tokenizer",
        "bos_token": "<|endoftext|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|pad|>",
        "chat_template": "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}{% endfor %}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2))


_TEXT = [
    "the quick brown fox jumps over the lazy dog and then the other dog jumps over the fox",
    "there is a theory which states that if ever anyone discovers exactly what the universe is for",
    "def quick(brown): return [fox for fox in brown if fox.jumps and not fox.lazy]",
]
