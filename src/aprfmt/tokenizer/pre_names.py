"""The values of `tokenizer.ggml.pre` that llama.cpp knows: any other one keeps a model from loading there."""

from __future__ import annotations

import difflib

from aprfmt.errors import UsageError

__all__ = ["PRE_NAMES", "check_name", "close_names"]

_NAMES = """
default kimi-k2 minicpm5 llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano
deepseek-llm deepseek-coder deepseek-v3 spark2_5 youtu falcon mpt starcoder gpt-2 phi-2 jina-es jina-de
gigachat jina-v2-es jina-v2-de a.x-4.0 mellum modern-bert jais-2 gemma4 granite-embed-multi-311m sarvam-moe
jina-v1-en jina-v2-code roberta-bpe whitespace refact command-r qwen2 deepseek-r1-qwen kormo f2llmv2 qwen35
stablelm2 olmo dbrx smaug-bpe poro-chat chatglm-bpe glm4 glm5 viking jais tekken smollm codeshell bloom
gpt3-finnish exaone exaone4 exaone-moe chameleon minerva-7b megrez gpt-4o llama4 kanana2 talkie
granite-embed-multi-97m tiny_aya cohere2moe superbpe trillion granite-docling bailingmoe bailingmoe2
llada-moe seed-coder hunyuan hunyuan-dense hy_v4 joyai-llm ufakzeka grok-2 afmoe laguna minimax-m2
solar-open mellum2
"""
PRE_NAMES = frozenset(_NAMES.split())
"""For byte-level BPE; the other algorithms do not look at the name."""


def close_names(name: str) -> list[str]:
    """The known names that look most like `name`, the nearest first; at least one."""
    return difflib.get_close_matches(name.lower(), sorted(PRE_NAMES), n=3, cutoff=0.5) or ["default"]


def check_name(name: str) -> None:
    """Raises UsageError, with the nearest names, unless llama.cpp knows `name`."""
    if name not in PRE_NAMES:
        near = close_names(name)
        raise UsageError(
            f"llama.cpp knows no pre-tokenizer {name!r}",
            hint=f"the nearest known one is --pre {near[0]}"
            + (f" (also {', '.join(near[1:])})" if len(near) > 1 else ""),
        )
