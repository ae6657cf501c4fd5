"""The rows of the architecture table, a file a kind of network; a new file is added to both lists."""

from __future__ import annotations

from dataclasses import replace

from aprfmt.arch.row import Architecture
from aprfmt.arch.rows import (
    audio,
    bert,
    classifiers,
    compressed,
    delta,
    dense,
    diffusion,
    drafts,
    encoder,
    encoder_remote,
    gemma,
    gemma4,
    gpt,
    hybrid,
    hybrid_mamba,
    hyper,
    interleaved,
    kimi,
    layered,
    lightning,
    ling,
    ling_hybrid,
    llama,
    mla,
    mla_dense,
    mla_sparse,
    moe,
    moe_indexed,
    moe_interleaved,
    moe_shared,
    moe_window,
    nemotron_h,
    plamo,
    qwen,
    remote,
    remote_dense,
    remote_gpt,
    remote_moe,
    rwkv,
    rwkv7,
    seq2seq,
    ssm,
    switch,
    vision,
)
from aprfmt.arch.rows.parts_encoder import POOLED

_FILES = (
    llama,
    qwen,
    gemma,
    gemma4,
    dense,
    moe,
    moe_indexed,
    moe_shared,
    moe_window,
    moe_interleaved,
    mla,
    mla_dense,
    mla_sparse,
    gpt,
    classifiers,
    bert,
    encoder,
    rwkv,
    rwkv7,
    ssm,
    switch,
    delta,
    hybrid,
    interleaved,
    hyper,
    compressed,
    hybrid_mamba,
    kimi,
    lightning,
    ling_hybrid,
    plamo,
    nemotron_h,
    vision,
    remote,
    remote_dense,
    remote_gpt,
    remote_moe,
    ling,
    layered,
    diffusion,
    seq2seq,
    audio,
    encoder_remote,
    drafts,
)


def _pooled(row: Architecture) -> Architecture:
    """The row with a key for how a sentence-transformers folder pools its hidden states."""
    return row if any(key.gguf == POOLED.gguf for key in row.keys) else replace(row, keys=(*row.keys, POOLED))


ROWS: tuple[Architecture, ...] = tuple(_pooled(row) for file in _FILES for row in file.ROWS)
"""Of rows that share a class or a GGUF name without a condition, the first counts."""
