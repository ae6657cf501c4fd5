"""Tiny random models with real or byte-level tokenizers of their own size, for tests that look at tokenizers too."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import arch_models
from arch_models import ArchCase

BYTES = "bytes"
"""The tokenizer of write_byte_tokenizer."""

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
        ArchCase("qwen2", "qwen2", "Qwen2Config", "Qwen2ForCausalLM",
                 {"vocab_size": 151936, "tie_word_embeddings": True}, "qwen2_5"),
        ArchCase("qwen2-untied", "qwen2", "Qwen2Config", "Qwen2ForCausalLM", {}, BYTES),
        ArchCase("qwen3", "qwen3", "Qwen3Config", "Qwen3ForCausalLM",
                 {"vocab_size": 151936, "head_dim": 32, "tie_word_embeddings": True}, "qwen3"),
        ArchCase("llama3", "llama", "LlamaConfig", "LlamaForCausalLM",
                 {"vocab_size": 128256, "rope_parameters": _LLAMA3_ROPE}, "llama3"),
        ArchCase("llama-bias", "llama", "LlamaConfig", "LlamaForCausalLM", {"attention_bias": True}, BYTES),
        ArchCase("mistral", "mistral", "MistralConfig", "MistralForCausalLM",
                 {"head_dim": 32, "sliding_window": None}, BYTES),
    )
}  # fmt: skip


def build(case: ArchCase, folder: Path, tokenizers: dict[str, Path] | None, *, dtype: str = "float32") -> Any:
    """Writes the folder of a tiny random model of `case`; returns the transformers model."""
    known = dict(tokenizers or {})
    if case.tokenizer == BYTES:
        known[BYTES] = folder.parent / f"{folder.name}-tokenizer"
        known[BYTES].mkdir(parents=True)
        write_byte_tokenizer(known[BYTES])
    return arch_models.build(replace(case, dtype=dtype), folder, known)


def write_byte_tokenizer(folder: Path, size: int = 320) -> None:
    """A byte-level BPE of four special tokens, 256 bytes and merges: `size` ids."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
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


def write_word_tokenizer(folder: Path) -> None:
    """A WordPiece tokenizer of BERT: five special tokens, the printable ASCII characters, and their continuations."""
    characters = [chr(i) for i in range(33, 127) if not chr(i).isupper()]
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *characters, *(f"##{c}" for c in characters)]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    special = [
        {"id": i, "content": token, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": True}
        for i, token in enumerate(tokens[:5])
    ]  # fmt: skip
    piece, first, last = ({"Sequence": {"id": "A", "type_id": 0}}, *(
        {"SpecialToken": {"id": token, "type_id": 0}} for token in ("[CLS]", "[SEP]")
    ))  # fmt: skip
    value = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True,
                       "strip_accents": None, "lowercase": True},
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": {
            "type": "TemplateProcessing", "single": [first, piece, last], "pair": [first, piece, last],
            "special_tokens": {token: {"id": token, "ids": [vocabulary[token]], "tokens": [token]}
                               for token in ("[CLS]", "[SEP]")},
        },
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
                  "max_input_chars_per_word": 100, "vocab": vocabulary},
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(value))
    (folder / "vocab.txt").write_text("".join(f"{token}\n" for token in tokens))
    names = {"unk": 1, "cls": 2, "sep": 3, "pad": 0, "mask": 4}
    config = {"tokenizer_class": "BertTokenizer", "do_lower_case": True}
    config |= {f"{name}_token": tokens[i] for name, i in names.items()}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2))


_TEXT = [
    "the quick brown fox jumps over the lazy dog and then the other dog jumps over the fox",
    "there is a theory which states that if ever anyone discovers exactly what the universe is for",
    "def quick(brown): return [fox for fox in brown if fox.jumps and not fox.lazy]",
]
