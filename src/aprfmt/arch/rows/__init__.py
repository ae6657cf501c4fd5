"""The rows of the architecture table, a file a kind of network.

A new file is added to FILES. index.jsonl beside it says what each row is found by, so that only the file of the row
that is wanted is imported; `python tools/row_index.py` writes it after such a change, and a test holds it.
"""

from __future__ import annotations

import json
from dataclasses import fields, replace
from functools import cache
from importlib import import_module
from pathlib import Path

from aprfmt.arch.row import Architecture, Listed
from aprfmt.arch.rows.parts_encoder import POOLED

FILES = (
    "llama", "qwen", "gemma", "gemma4", "dense", "moe", "moe_indexed", "moe_shared", "moe_window",
    "moe_interleaved", "mla", "mla_dense", "mla_sparse", "gpt", "classifiers", "bert", "encoder", "rwkv", "rwkv7",
    "ssm", "switch", "delta", "hybrid", "interleaved", "hyper", "compressed", "hybrid_mamba", "kimi", "lightning",
    "ling_hybrid", "plamo", "nemotron_h", "vision", "remote", "remote_dense", "remote_gpt", "remote_moe", "ling",
    "layered", "diffusion", "seq2seq", "audio", "encoder_remote", "drafts",
)
"""Of rows that share a class or a GGUF name without a condition, the first counts."""


INDEX = Path(__file__).with_name("index.jsonl")


def listed() -> list[Listed]:
    """Every row of the table by what it is found by, in its order, without importing any."""
    lines = INDEX.read_text("utf-8").splitlines()
    return [Listed(**line) for line in json.loads(f"[{','.join(lines)}]")]


def index_of_rows() -> str:
    """The text of index.jsonl, made of all rows: a line a row, what is empty left out."""
    lines = (_line(file, row) for file in FILES for row in rows_of(file))
    return "".join(json.dumps({name: value for name, value in line.items() if value}) + "\n" for line in lines)


def _line(file: str, row: Architecture) -> dict[str, object]:
    own = {"file": file, "embedding": _hf_name(row, "token_embd.weight"), "head": _hf_name(row, "output.weight")}
    return {field.name: own.get(field.name) or getattr(row, field.name, "") for field in fields(Listed)}


def _hf_name(row: Architecture, gguf_name: str) -> str:
    return next((tensor.hf[0] for tensor in row.tensors if gguf_name in tensor.gguf), "")


@cache
def rows_of(file: str) -> tuple[Architecture, ...]:
    """The rows of one of FILES."""
    rows: tuple[Architecture, ...] = import_module(f"aprfmt.arch.rows.{file}").ROWS
    return tuple(map(_pooled, rows))


def _pooled(row: Architecture) -> Architecture:
    """The row with a key for how a sentence-transformers folder pools its hidden states."""
    return row if any(key.gguf == POOLED.gguf for key in row.keys) else replace(row, keys=(*row.keys, POOLED))
