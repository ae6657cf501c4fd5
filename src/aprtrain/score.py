"""A model file scored on data files: opened, loaded, its text tokenised and read. What fails gives no score."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from aprfmt.errors import UsageError
from aprtrain.data.corpus import Encoder, ReadProgress
from aprtrain.data.packing import Windows
from aprtrain.data.shards import HEADER, Part, open_corpus
from aprtrain.data.sources import Document, list_files, read_documents
from aprtrain.evaluate import evaluate, scoring
from aprtrain.guards import check_length
from aprtrain.loss.vocab import align
from aprtrain.network.weights import Network, load_decoder, open_network
from aprtrain.teacher.teacher import Teacher
from aprtrain.world import device_of

SEQ_LEN = 2048
"""Tokens of a window, where no model was made for fewer."""

_DOCUMENTS = 256  # tokenised at a time
_TOKENS_AT_ONCE = {"cpu": 4096, "cuda": 16384}


def score(
    path: str,
    data: Path,
    *,
    teacher: str | None = None,
    device: str = "cuda",
    seq_len: int | None = None,
    limit: int | None = None,
    log: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """What `apr eval` answers: the scores of `evaluate`, and what they were made from.

    Args:
        path: the model, in any container.
        data: a text, jsonl or Parquet file or a folder of them, read whole; or the token shards of a run, of which
            the held-out part is read.
        teacher: the model to compare with, in any container.
        device: cuda, cuda:N or cpu; float32 on the CPU, bfloat16 on a GPU.
        seq_len: tokens of a window; else SEQ_LEN, or as many as both models were made for.
        limit: scores about so many tokens, as windows spread evenly over all of the data.
        log: takes a line now and then about how far the tokenising of text is.

    Raises:
        RunError: the weights, the tokenizer, the data or the computation give no score.
        AprError: as opening the models and reading the data raise it, before anything is computed.
    """
    begin = time.perf_counter()
    where = device_of(device)
    with ExitStack() as stack:
        network = stack.enter_context(open_network(path))
        other = stack.enter_context(open_network(teacher)) if teacher is not None else None
        models = {"model": network} if other is None else {"model": network, "teacher": other}
        made_for = {who: n for who, m in models.items() if (n := m.hparams.max_position_embeddings)}
        length = seq_len or min(SEQ_LEN, min(made_for.values(), default=SEQ_LEN))
        for who, positions in made_for.items():
            check_length(length, who, positions)
        if limit is not None and limit < length:
            raise UsageError(
                f"--limit {limit} is less than one window of {length} tokens", hint="give a smaller --seq-len"
            )
        skipped: Counter[str] = Counter()
        part, separator = _read(data, network, skipped, log)
        vocabulary = None
        if other is not None:
            rows = other.shape.vocab_rows, network.shape.vocab_rows
            vocabulary = align(other.tokenizer, network.tokenizer, *rows)
        dtype = torch.float32 if where.type == "cpu" else torch.bfloat16
        with scoring():
            windows = Windows(part, length, separator)
            model = load_decoder(network, dtype, where)
            comparison = None
            if other is not None and vocabulary is not None:
                comparison = Teacher(other, vocabulary, "bf16", where, dtype=dtype)
        found = evaluate(
            model,
            windows,
            rows=max(1, _TOKENS_AT_ONCE[where.type] // length),
            device=where,
            teacher=comparison,
            vocabulary=vocabulary,
            max_windows=limit and limit // length,
        )
        return {
            **_described(path, network),
            "teacher": _described(teacher, other) if teacher is not None and other is not None else None,
            "data": str(data),
            "documents": len(part.ends),
            "data_tokens": len(part.tokens),
            "left_out": dict(+skipped),
            "device": str(where),
            "dtype": "f32" if where.type == "cpu" else "bf16",
            "seq_len": length,
            **asdict(found),
            "seconds": time.perf_counter() - begin,
        }


def _described(path: str, network: Network) -> dict[str, Any]:
    label = network.model.label if network.model is not None else None
    shape = network.shape
    return {
        "file": path,
        "format": label,
        "architecture": shape.architecture,
        "parameters": shape.n_params,
    }


def _read(
    data: Path, network: Network, skipped: Counter[str], log: Callable[[str], None]
) -> tuple[Part, int]:
    """The documents to read, and the id that separates them; `skipped` counts what is left out, by reason."""
    with scoring():
        encoder = Encoder(network.tokenizer)
    if (data / HEADER).is_file():
        return open_corpus(data, encoder.digest).held_out, encoder.separator
    ids = []
    documents = _documents(data, encoder.separator, skipped, log)
    while some := list(islice(documents, _DOCUMENTS)):
        with scoring():
            ids += encoder.encode(some)
    tokens = np.concatenate([np.zeros(0, np.uint32), *ids])
    ends = np.cumsum([len(document) for document in ids], dtype=np.int64)
    return Part(tokens, ends, np.zeros(len(ids), np.uint64)), encoder.separator


def _documents(
    data: Path, separator: int, skipped: Counter[str], log: Callable[[str], None]
) -> Iterator[Document]:
    """Every document that is not empty."""
    files = list_files([data], skipped)
    sizes = [file.path.stat().st_size for file in files]
    progress = ReadProgress(sum(sizes), log)
    for file, size in zip(files, sizes, strict=True):
        for document in read_documents(file, separator, skipped):
            progress.document(document)
            if not isinstance(document, str) or document.strip():
                yield document
        progress.file(size)
