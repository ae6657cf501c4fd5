"""Text embeddings, and reranker scores, through llama.cpp."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

from aprfmt import formats
from aprfmt.errors import UsageError
from aprfmt.llama.client import Llama, pooling_of
from aprfmt.running.generate import Loading, check_reads_text, context_of, metadata_of, require_unicode
from aprfmt.running.prepared import prepare, prepare_adapter
from aprfmt.types import PathLike

_CONTEXT = 2048
"""A whole text is computed at once, so the context must fit the longest one."""


@dataclass(frozen=True, slots=True)
class EmbeddedText:
    """A text and its embedding, or for a reranker or a classifier its scores by label."""

    text: str
    vector: list[float] | None = None
    scores: dict[str, float] | None = None

    @property
    def norm(self) -> float | None:
        """Length of the vector."""
        return math.hypot(*self.vector) if self.vector is not None else None


@dataclass(frozen=True, slots=True)
class Embeddings:
    """Embeddings of texts, or scores of a reranker.

    Attributes:
        model: the file, as given.
        engine: the package that provides llama.cpp.
        pooling: "mean", "cls", "last", or "rank" for scores.
        size: dimensions of an embedding; for scores, their number.
        items: one entry per text; for a reranker, per document.
        query: the text that a reranker scored the documents against.
        load_seconds, seconds: time to load the model, and to compute.
    """

    model: str
    engine: str
    pooling: str
    size: int
    items: list[EmbeddedText]
    query: str | None
    load_seconds: float
    seconds: float

    @property
    def similarities(self) -> list[list[float | None]] | None:
        """Pairwise cosine similarities; None for scores."""
        vectors = [item.vector for item in self.items]
        norms = [item.norm for item in self.items]
        if None in vectors:
            return None
        return [
            [sum(x * y for x, y in zip(a or (), b or (), strict=True)) / (m * n) if m and n else None
             for b, n in zip(vectors, norms, strict=True)]
            for a, m in zip(vectors, norms, strict=True)
        ]  # fmt: skip

    def to_json(self) -> dict[str, object]:
        """The object of `apr run --embed --json`."""
        body = asdict(self)
        timings = {name: body.pop(name) for name in ("load_seconds", "seconds")}
        body["items"] = [
            {name: value for name, value in {**asdict(item), "norm": item.norm}.items() if value is not None}
            for item in self.items
        ]
        return body | {"similarities": self.similarities, "timings": timings}


def compute(
    file: PathLike, texts: Sequence[str], loading: Loading, say: Callable[[str], None] = lambda line: None
) -> Embeddings:
    """Embeds texts with the file's pooling type, or the last token if it states none.

    A reranker scores each further text against the first; a classifier, and a reranker with one text, scores each.

    Raises:
        RefusedError: the file is not a language model.
        RunError: a text is longer than the context; llama.cpp cannot compute the model.
    """
    import time

    path = formats.path_text(file, "file")
    if not texts:
        raise UsageError("no text to embed")
    for text in texts:
        require_unicode(text)
    prepared = prepare(file, dtype=loading.dtype, say=say)
    metadata = metadata_of(prepared.path)
    check_reads_text(metadata, path)
    pooling, encodes = pooling_of(metadata)
    labels = labels_of(metadata)
    if pooling is None or pooling == "none":
        pooling = "rank" if labels else "mean" if encodes else "last"
    adapters = [(prepare_adapter(adapter, file, prepared, say=say), scale) for adapter, scale in loading.lora]
    with Llama(
        prepared.path,
        n_ctx=context_of(metadata, loading.ctx, _CONTEXT),
        pooling=pooling,
        name=path,
        n_bytes=prepared.n_bytes,
        adapters=adapters,
        n_threads=loading.threads,
        gpu_layers=loading.gpu_layers,
    ) as llama:
        started = time.perf_counter()
        query, items = None, []
        if pooling == "rank" and len(labels) < 2 and len(texts) > 1:
            query = texts[0]
            for text in texts[1:]:
                values = llama.embed(pair_ids(llama, metadata, query, text))
                items.append(EmbeddedText(text, scores=_named(values, labels)))
        else:
            for text in texts:
                values = llama.embed(text)
                scores = _named(values, labels) if pooling == "rank" else None
                items.append(EmbeddedText(text, None if scores else values, scores))
        seconds = time.perf_counter() - started
        size = len(items[0].vector or items[0].scores or ())
        return Embeddings(path, llama.engine, pooling, size, items, query, llama.facts.load_seconds, seconds)


def labels_of(metadata: Mapping[str, object]) -> list[str]:
    """The labels of a classifier."""
    value = metadata.get(f"{metadata.get('general.architecture')}.classifier.output_labels")
    return [str(label) for label in value] if isinstance(value, list) else []


def _named(values: list[float], labels: list[str]) -> dict[str, float]:
    names = labels if len(labels) == len(values) > 1 else [f"score {i}" if i else "score" for i in range(len(values))]
    return dict(zip(names, values, strict=True))


def pair_ids(llama: Llama, metadata: Mapping[str, object], query: str, document: str) -> list[int]:
    """A reranker's input: by its own prompt, with both texts in braces, or with the vocabulary's special tokens."""
    form = metadata.get("tokenizer.chat_template.rerank")
    if not isinstance(form, str):
        return llama.pair(query, document)
    # The query may contain the other placeholder.
    before, _, behind = form.partition("{query}")
    text = before.replace("{document}", document) + query + behind.replace("{document}", document)
    return llama.tokenize(text, add_special=False)
