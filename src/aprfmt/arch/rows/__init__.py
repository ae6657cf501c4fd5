"""The rows of the architecture table, a file a kind of network; a new file is added to both lists."""

from __future__ import annotations

from aprfmt.arch.row import Architecture
from aprfmt.arch.rows import (
    bert,
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
    layered,
    llama,
    mla,
    mla_dense,
    mla_sparse,
    moe,
    moe_shared,
    moe_window,
    nemotron_h,
    qwen,
    remote,
    remote_dense,
    remote_moe,
    seq2seq,
    ssm,
    vision,
)

_FILES = (
    llama,
    qwen,
    gemma,
    gemma4,
    dense,
    moe,
    moe_shared,
    moe_window,
    mla,
    mla_dense,
    mla_sparse,
    gpt,
    bert,
    encoder,
    ssm,
    delta,
    hybrid,
    hybrid_mamba,
    nemotron_h,
    vision,
    remote,
    remote_dense,
    remote_moe,
    layered,
    diffusion,
    seq2seq,
    encoder_remote,
    drafts,
)

ROWS: tuple[Architecture, ...] = tuple(row for file in _FILES for row in file.ROWS)
"""Of rows that share a class or a GGUF name without a condition, the first counts."""
