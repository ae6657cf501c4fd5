"""Scores models in llama.cpp, on the same sequences as the trainer's network."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

import aprfmt
from aprfmt.canonical.detection import find_row
from aprfmt.canonical.read import canonical
from aprfmt.errors import AprError, RunError
from aprfmt.inspection.quantized import count_packed
from aprfmt.io.temporary import scratch_folder
from aprfmt.llama.client import Llama
from aprfmt.running.decoders import open_decoder
from aprfmt.running.evaluation import (
    EvaluatedModel,
    Evaluation,
    Scores,
    TextEncoder,
    check_data,
    read_part,
    scores_of,
    scoring,
    sequence_length,
)
from aprfmt.running.scoring import LogitsReader
from aprfmt.texts.encoding import Encoder, Ids
from aprfmt.texts.records import LOG_S, TEXT_FIELD, Chat, Document, Marked
from aprfmt.texts.sequences import Windows
from aprfmt.tokenizer.alignment import SharedVocabulary, align

if TYPE_CHECKING:
    from aprfmt.model import Model
    from aprfmt.tokenizer.model import Tokenizer


class _LlamaEncoder:
    """llama.cpp's tokenizer, for vocabularies that the tokenizers library does not support."""

    begin: int | None = None

    def __init__(self, llama: Llama) -> None:
        if llama.facts.eos < 0:
            raise RunError("the evaluation failed, no score: the model has no token to separate documents")
        self._llama, self.separator, self.digest = llama, llama.facts.eos, ""

    def encode(self, documents: list[Document]) -> list[Ids]:
        """Ids of each document, followed by the end token."""
        found = []
        for document in documents:
            assert not isinstance(document, Marked), "render makes none"
            ids = self._llama.tokenize(document, parse_special=False) if isinstance(document, str) else [*document]
            if not ids or ids[-1] != self.separator:
                ids.append(self.separator)
            found.append(np.array(ids, np.uint32))
        return found

    def render(self, chat: Chat) -> Marked:
        """Raises RunError: llama.cpp does not return token offsets."""
        raise RunError("scoring conversations needs the tokenizers library, which does not support this vocabulary")


def score(
    path: str,
    data: Path,
    *,
    teacher: str | None = None,
    seq_len: int | None = None,
    limit: int | None = None,
    text_field: str = TEXT_FIELD,
    vocab_policy: str = "shared",
    threads: int = 0,
    gpu_layers: int = 0,
    log: Callable[[str], None] = lambda line: None,
) -> Evaluation:
    """Implements `aprfmt.evaluate` for any decoder in llama.cpp.

    Raises RunError if model, tokenizer, data or computation yield no score; UnsupportedError for an encoder; before
    anything is computed, what opening the models and reading the data raise.
    """
    begin = time.perf_counter()
    with ExitStack() as stack:
        paths = [path] if teacher is None else [path, teacher]
        opened = [stack.enter_context(aprfmt.open(each)) for each in paths]
        names = ["model", "teacher"]
        facts = [_facts(each, model) for each, model in zip(paths, opened, strict=True)]
        made_for = {who: n for who, model in zip(names, opened, strict=False) if (n := positions_of(model))}
        length = sequence_length(seq_len, limit, made_for)
        check_data(data)
        loaded = [
            stack.enter_context(open_decoder(each, n_ctx=length + 8, n_threads=threads, gpu_layers=gpu_layers, say=log))
            for each in paths
        ]
        tokenizers = [model.tokenizer for model in opened]
        vocabulary = None
        if teacher is not None:
            vocabulary = align(tokenizers[1], tokenizers[0], loaded[1].n_vocab, loaded[0].n_vocab, vocab_policy)
        skipped: Counter[str] = Counter()
        encoder = _encoder(tokenizers[0], loaded[0])
        part = read_part(data, encoder, skipped, log, text_field)
        with scoring():
            windows = Windows(part, length, encoder.separator)
        folder = stack.enter_context(scratch_folder("eval"))
        scores = _totals(windows, windows.select(limit and limit // length), folder, loaded, vocabulary, log)
        return Evaluation(
            **facts[0],  # type: ignore[arg-type]  # _facts are the fields of EvaluatedModel
            teacher=EvaluatedModel(**facts[1]) if teacher is not None else None,  # type: ignore[arg-type]
            data=str(data),
            documents=len(part.ends),
            data_tokens=len(part.tokens),
            left_out=dict(+skipped),
            device=f"llama.cpp ({loaded[0].engine})",
            dtype=_dtype(opened[0]),
            seq_len=length,
            **asdict(scores),
            seconds=time.perf_counter() - begin,
        )


def _encoder(tokenizer: Tokenizer | None, llama: Llama) -> TextEncoder:
    try:
        return Encoder(tokenizer)
    except AprError:
        if tokenizer is None:
            with scoring():
                raise
        return _LlamaEncoder(llama)


def _totals(
    windows: Windows,
    numbers: list[int],
    folder: str,
    loaded: list[Llama],
    vocabulary: SharedVocabulary | None,
    log: Callable[[str], None],
) -> Scores:
    """The means over all labels. Each piece of a document is a separate text."""
    shared = vocabulary.n_real if vocabulary is not None else None
    n_other = vocabulary.dropped_rows.stop if vocabulary is not None else None
    with scoring():
        other = loaded[1] if len(loaded) > 1 else None
        reader = LogitsReader(folder, loaded[0], other, n_shared=shared, n_other=n_other)
        sums = np.zeros(6)
        count, logged = 0, time.monotonic()
        for done, number in enumerate(numbers):
            rows = windows.rows([number])
            start = 0
            for size in rows.lengths[0]:
                piece = slice(start, start + size)
                start += size
                found = reader.score(rows.tokens_NT[0, piece].tolist(), rows.labels_NT[0, piece].tolist())
                count += len(found.loss)
                sums += [0.0 if column is None else column.sum() for column in found]
            if time.monotonic() - logged > LOG_S:
                logged = time.monotonic()
                log(f"scored {done + 1:,} of {len(numbers):,} sequences")
    dropped = vocabulary is not None and bool(vocabulary.dropped)
    return scores_of(len(numbers), count, sums.tolist(), vocabulary is not None, dropped)


def _facts(path: str, model: Model) -> dict[str, object]:
    name, size = architecture_of(model), parameters_of(model)
    return {"file": path, "format": model.label, "architecture": name, "parameters": size}


def architecture_of(model: Model) -> str:
    """Its id in the table; if unknown, the GGUF's architecture."""
    try:
        row = find_row(model)
    except AprError:
        row = None
    return row.id if row is not None else str(model.metadata.get("general.architecture", "unknown"))


def parameters_of(model: Model) -> int:
    """Parameters of its network; if the table does not know it, of the whole file."""
    try:
        return canonical(model).n_params
    except AprError:  # llama.cpp may know what the table does not
        return sum(math.prod(tensor.shape) for tensor in model.tensors.entries)


def positions_of(model: Model) -> int | None:
    """Its context length; None if unknown."""
    try:
        return model.hparams.max_position_embeddings
    except AprError:
        return None


def _dtype(model: Model) -> str:
    """The dtype with the most bytes; for a quantized checkpoint its scheme."""
    if packed := count_packed(model).quantized:
        return packed[0].scheme
    sizes: Counter[str] = Counter()
    for tensor in model.tensors.entries:
        sizes[tensor.dtype] += tensor.n_bytes
    return sizes.most_common(1)[0][0].lower()
