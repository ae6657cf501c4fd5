"""Language models as rerankers: the score of a text is how much likelier "yes" is than "no" as its next token.

llama.cpp computes it as a classifier with two outputs, the rows of the output head for these two tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial

from aprfmt.arch.table import ARCHITECTURES
from aprfmt.canonical.model import Canonical
from aprfmt.canonical.row_mapping import BufferedTensor
from aprfmt.canonical.tensor import CanonicalTensor
from aprfmt.codecs.dtypes import DTYPES
from aprfmt.codecs.stream import TensorSource
from aprfmt.errors import RefusedError
from aprfmt.formats.hfdir import HfNative, config_of

ANSWERS = ("yes", "no")
_CLASSIFIERS = {"qwen3": "qwen3_classifier"}
_NAME = "qwen3-reranker"
_SCORE = "score.weight"
_LABELS: dict[str, object] = {
    "id2label": {str(i): answer for i, answer in enumerate(ANSWERS)},
    "label2id": {answer: i for i, answer in enumerate(ANSWERS)},
    "num_labels": len(ANSWERS),
}

# The training prompt from the model card; query and document replace the names.
_PROMPT = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    "<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n"
    "<Query>: {query}\n<Document>: {document}<|im_end|>\n"
    "<|im_start|>assistant\n<think>\n\n</think>\n\n"
)


def as_reranker(c: Canonical) -> Canonical | None:
    """`c` as a classifier, if it is a language model whose name says reranker; None otherwise.

    Raises RefusedError if the tokenizer lacks these tokens.
    """
    row = ARCHITECTURES.get(_CLASSIFIERS.get(c.arch.id, "")) if c.arch is not None else None
    if row is None or c.tokenizer is None or c.model.convention == "gguf" or not _is_called_reranker(c):
        return None
    head = c.tensors.get(c.head) or c.tensors.get(c.embedding)
    if head is None or len(head.shape) != 2:
        return None
    rows = [_token(c, answer) for answer in ANSWERS]
    source, (n_rows, width) = head.as_source(), head.shape
    row_bytes = source.n_bytes // n_rows
    made = BufferedTensor(_SCORE, source.dtype, (len(rows), width), partial(_read_rows, source, rows, row_bytes))
    tensors = {name: tensor for name, tensor in c.tensors.items() if name != c.head}
    h = replace(
        c.hparams, architecture=row.id, hf_architecture=row.hf_class, tied=None, extra=c.hparams.extra | _LABELS
    )
    tokenizer = replace(c.tokenizer, chat_templates={**c.tokenizer.chat_templates, "rerank": _PROMPT})
    return replace(
        c, arch=row, hparams=h, tokenizer=tokenizer, tensors=tensors | {_SCORE: CanonicalTensor(_SCORE, (made,))},
        is_whole=c.head not in c.tensors,
    )  # fmt: skip


def with_two_outputs(c: Canonical) -> Canonical | None:
    """`c` with a second output that is always 0, if it is a classifier with one score; None otherwise.

    llama.cpp returns the softmax of the outputs, which is 1 for a single one; for a score s and 0 it is 1 / (1 +
    exp(-s)).
    """
    score = c.tensors.get(_SCORE)
    if c.arch is None or c.arch.id not in _CLASSIFIERS.values() or c.model.convention == "gguf" or score is None:
        return None
    if score.shape[:1] != (1,) or DTYPES[score.dtype].kind != "plain":
        return None
    source = score.as_source()
    made = BufferedTensor(_SCORE, source.dtype, (2, *source.shape[1:]), partial(_read_padded, source))
    h = replace(c.hparams, extra=c.hparams.extra | _LABELS)
    return replace(c, hparams=h, tensors=c.tensors | {_SCORE: CanonicalTensor(_SCORE, (made,))})


def _read_padded(source: TensorSource) -> Iterable[bytes]:
    return [*_read_rows(source, [0], source.n_bytes), bytes(source.n_bytes)]


def _is_called_reranker(c: Canonical) -> bool:
    folder = c.model.native_as(HfNative)
    config = (config_of(folder) if folder is not None else None) or {}
    card = (folder.text_file("README.md") if folder is not None else None) or b""
    called = (c.model.path.name, c.info.get("name", ""), str(config.get("_name_or_path", "")))
    return any(_NAME in word.lower().replace(" ", "-") for word in called) or f"# {_NAME}".encode() in card.lower()


def _token(c: Canonical, text: str) -> int:
    tokens = c.tokenizer.tokens if c.tokenizer is not None else []
    if text not in tokens:
        raise RefusedError(
            f"the model is named a reranker, but its tokenizer has no token {text!r}",
            path=c.model.path,
            hint="rename the folder to convert it as a language model",
        )
    return tokens.index(text)


def _read_rows(source: TensorSource, rows: Iterable[int], row_bytes: int) -> Iterable[bytes]:
    for row in rows:
        data = bytearray(row_bytes)
        source.read_into(row * row_bytes, memoryview(data))
        yield bytes(data)
