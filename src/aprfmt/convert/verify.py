"""Loads an exported GGUF in llama.cpp: token count against embedding rows, greedy text without NaN."""

from __future__ import annotations

import os
from typing import Any

from aprfmt.errors import MissingDependencyError, RunError

PROMPT = "The capital of France is"


def require_llama() -> None:
    """Raises MissingDependencyError when llama-cpp-python is not installed."""
    from importlib.util import find_spec

    if find_spec("llama_cpp") is None:
        raise MissingDependencyError(
            "--verify needs llama-cpp-python, which is not installed", hint="pip install 'aprfmt[llama]'"
        )


def load_llama(path: str | os.PathLike[str], *, n_ctx: int = 128, vocab_only: bool = False) -> Any:
    """llama.cpp's model of a GGUF file. Raises MissingDependencyError, RunError when llama.cpp refuses the file."""
    require_llama()
    from llama_cpp import Llama

    try:
        return Llama(
            os.fspath(path),
            n_ctx=n_ctx,
            vocab_only=vocab_only,
            logits_all=not vocab_only,
            verbose=False,
            n_gpu_layers=0,
        )
    except (ValueError, RuntimeError, AssertionError) as error:
        raise RunError(
            f"llama.cpp does not load the file: {error}",
            path=path,
            hint="apr validate shows what is wrong with it",
        ) from error


def greedy(path: str | os.PathLike[str], prompt: str = PROMPT, n_tokens: int = 16) -> tuple[list[int], str]:
    """Token ids and text that llama.cpp continues `prompt` with, always taking the most likely token."""
    llama = load_llama(path)
    try:
        return _generate(llama, prompt, n_tokens)
    finally:
        llama.close()


def _generate(llama: Any, prompt: str, n_tokens: int) -> tuple[list[int], str]:
    import numpy as np

    tokens = llama.tokenize(prompt.encode(), add_bos=True, special=True) or [max(0, llama.token_bos())]
    llama.eval(tokens)
    ids: list[int] = []
    for _ in range(n_tokens):
        logits = np.asarray(llama.scores[llama.n_tokens - 1])
        if not np.isfinite(logits).all():
            raise RunError("the model gives NaN or infinite logits", path=llama.model_path)
        ids.append(int(logits.argmax()))
        if ids[-1] == llama.token_eos():
            break
        llama.eval([ids[-1]])
    return ids, llama.detokenize(ids, prev_tokens=tokens).decode(errors="replace")


def verify_gguf(path: str | os.PathLike[str], embedding_rows: int | None) -> dict[str, Any]:
    """Loads `path`, checks its vocabulary against the embedding and generates 16 tokens.

    Returns {loaded, vocab_size, embedding_rows, tokens, text}. Raises RunError when any of it fails.
    """
    llama = load_llama(path)
    try:
        n_vocab = llama.n_vocab()
        if embedding_rows is not None and n_vocab != embedding_rows:
            raise RunError(
                f"the vocabulary has {n_vocab} tokens, the embedding {embedding_rows} rows", path=path
            )
        ids, text = _generate(llama, PROMPT, 16)
        return {
            "loaded": True,
            "vocab_size": n_vocab,
            "embedding_rows": embedding_rows,
            "tokens": ids,
            "text": text,
        }
    finally:
        llama.close()
