"""A model under examination by `apr qa`; caches what several gates need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Self

from aprfmt import formats
from aprfmt.arch.names import gguf_name
from aprfmt.canonical.model import Canonical
from aprfmt.canonical.read import canonical
from aprfmt.convert.logits import WORDS, kind_of
from aprfmt.errors import AprError
from aprfmt.inspection.quantized import count_packed
from aprfmt.inspection.validate import Validation, validate
from aprfmt.io.temporary import scratch_folder
from aprfmt.llama.client import Llama, pooling_of
from aprfmt.running.decoders import open_decoder
from aprfmt.running.embeddings import labels_of, pair_ids
from aprfmt.running.prepared import prepare
from aprfmt.running.qa_text import QUERY, TEXTS, Question
from aprfmt.running.scoring import LogitsReader, Scored
from aprfmt.tokenizer.model import Tokenizer

if TYPE_CHECKING:
    from aprfmt.model import Model

CONTEXT, _VECTOR_CONTEXT = 1024, 256


class ModelUnderTest:
    """A model in llama.cpp, and optionally its original. Use in `with`.

    Args:
        file: the model.
        against: its original.
        n_threads: as for Llama.
        say: called with a line before something is exported.
    """

    def __init__(
        self, file: str, against: str | None, n_threads: int, say: Callable[[str], None] = lambda line: None
    ) -> None:
        self.file, self.against = file, against
        self._n_threads, self._say = n_threads, say
        self._stack = ExitStack()
        self._llama: Llama | None = None
        self._vectors: dict[tuple[str, bool], list[float]] = {}

    def __enter__(self) -> Self:
        self._folder = self._stack.enter_context(scratch_folder("qa"))
        self.model: Model = self._stack.enter_context(formats.open(self.file))
        self._prepared = prepare(self.file, say=self._say)  # keeps the file in the cache
        self.gguf: Model = self._stack.enter_context(formats.open(self._prepared.path))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    @property
    def llama(self) -> Llama:
        """The model, loaded on demand."""
        if self._llama is None:
            self._llama = self._open(self.file)
        return self._llama

    @cached_property
    def original(self) -> Llama:
        """Its original."""
        assert self.against is not None
        return self._open(self.against)

    @cached_property
    def watched(self) -> Llama:
        """The model again, in private memory."""
        return self._open(self.file, watched=True)

    def _open(self, file: str, *, watched: bool = False) -> Llama:
        if self.kind == "causal":
            return self._stack.enter_context(
                open_decoder(file, n_ctx=self.n_ctx, n_threads=self._n_threads, watched=watched, say=self._say)
            )
        prepared = prepare(file, say=self._say)
        has_vectors = self.kind != "seq2seq"
        return self._stack.enter_context(
            Llama(
                prepared.path,
                n_ctx=min(self.n_ctx, _VECTOR_CONTEXT),
                pooling=(self.pooling or "mean") if has_vectors else None,
                name=file,
                n_bytes=prepared.n_bytes,
                n_threads=self._n_threads,
                n_seq=2 if has_vectors else 1,
            )
        )

    @cached_property
    def kind(self) -> str:
        """Its kind: see kind_of."""
        return kind_of(self.gguf.metadata)

    @cached_property
    def pooling(self) -> str | None:
        """Its pooling type; None if the file states none."""
        if self.kind.startswith("rank"):
            return "rank"
        name = pooling_of(self.gguf.metadata)[0]
        return name if name != "none" else None

    @property
    def words(self) -> str:
        """What its vectors are called in messages."""
        return WORDS[self.kind]

    @cached_property
    def original_gguf(self) -> Model:
        """Its original as a GGUF."""
        assert self.against is not None
        self._of_original = prepare(self.against, say=self._say)  # keeps the file in the cache
        return self._stack.enter_context(formats.open(self._of_original.path))

    def ids(self, text: str, *, original: bool = False) -> list[int]:
        """The ids of a text; for a reranker those of a query and the text."""
        llama, metadata = (self.original, self.original_gguf.metadata) if original else (self.llama, self.gguf.metadata)
        if self.kind.startswith("rank") and len(labels_of(metadata)) < 2:
            return pair_ids(llama, metadata, QUERY, text)
        return llama.tokenize(text)

    def vector(self, text: str, *, original: bool = False, again: bool = False) -> list[float]:
        """The embedding of a text, its scores, or the first logits of a seq2seq decoder; cached unless `again`."""
        if (text, original) not in self._vectors or again:
            ids = self.ids(text, original=original)
            llama = self.original if original else self.llama
            if self.kind == "seq2seq":
                reader = self.original_reader if original else self.reader
                found = [float(value) for value in reader.last(ids)]
            else:
                found = llama.embed(ids)
            if again:
                return found
            self._vectors[text, original] = found
        return self._vectors[text, original]

    def close_watched(self) -> None:
        """Frees its memory."""
        if "watched" in self.__dict__:
            self.watched.close()

    @cached_property
    def reader(self) -> LogitsReader:
        """Reads the model's logits."""
        return LogitsReader(self._folder, self.llama)

    @cached_property
    def original_reader(self) -> LogitsReader:
        """Reads the original's logits."""
        return LogitsReader(self._folder, self.original)

    def reader_of(self, llama: Llama) -> LogitsReader:
        """Reads the logits of another form of the model."""
        return LogitsReader(self._folder, llama)

    @cached_property
    def canonical(self) -> Canonical | None:
        """The model in canonical form; None if the table does not know it."""
        try:
            return canonical(self.model)
        except AprError:
            return None

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """Its tokenizer; None without one."""
        try:
            return self.model.tokenizer
        except AprError:
            return None

    @cached_property
    def n_params(self) -> int:
        """Its parameters."""
        if self.canonical is not None:
            return self.canonical.n_params
        return sum(_product(tensor.shape) for tensor in self.gguf.tensors.entries)

    @cached_property
    def bits_per_weight(self) -> float:
        """Of all tensors of the file itself, which may be a quantized checkpoint."""
        n_params = count_packed(self.model).param_count
        return 8 * sum(tensor.n_bytes for tensor in self.model.tensors.entries) / max(1, n_params)

    @property
    def coarse_bits(self) -> float:
        """Bits per value of a checkpoint's quantized weights, whose embeddings are floats; else of all tensors."""
        return min(self.packed_bits.values(), default=self.bits_per_weight)

    @cached_property
    def packed_bits(self) -> dict[str, float]:
        """Bits per value of the weights of a quantized checkpoint, by GGUF name."""
        c = self.canonical
        if c is None or c.arch is None:
            return {}
        return {gguf_name(c.arch, w.name, c.hparams) or w.name: w.bits_per_value for w in c.packs.weights}

    @cached_property
    def validation(self) -> Validation:
        """The result of `apr validate`'s rules."""
        return validate(self.file)

    @cached_property
    def texts(self) -> list[list[int]]:
        """Ids of the bundled texts."""
        return [self.llama.tokenize(text, parse_special=False)[: self.n_ctx] for text in TEXTS]

    @cached_property
    def scores(self) -> list[Scored]:
        """The scores of the bundled texts."""
        return [self.reader.score(ids) for ids in self.texts]

    @cached_property
    def loss(self) -> float:
        """Mean loss of the bundled texts, in nats per token."""
        return sum(float(found.loss.sum()) for found in self.scores) / sum(len(found.loss) for found in self.scores)

    @cached_property
    def bits_per_byte(self) -> float:
        """Loss of the bundled texts in bits per byte, independent of the tokenizer."""
        n_bytes = sum(
            len(self.llama.detokenize(ids[1:]).encode()) if len(ids) >= self.n_ctx else len(text.encode())
            for ids, text in zip(self.texts, TEXTS, strict=True)
        )
        return sum(float(found.loss.sum()) for found in self.scores) / _LN2 / max(1, n_bytes)

    @cached_property
    def compared(self) -> dict[str, float]:
        """Means over the bundled texts compared with the original: kl, agreement, loss, other_loss."""
        reader = LogitsReader(self._folder, self.llama, self.original)
        found = [reader.score(ids) for ids in self.texts]
        n = sum(len(each.loss) for each in found)
        names = {"kl": "kl", "agreement": "agree", "loss": "loss", "other_loss": "other_loss"}
        return {name: float(sum(getattr(each, field).sum() for each in found)) / n for name, field in names.items()}

    @property
    def n_ctx(self) -> int:
        """Context length: as needed, but at most the model's own."""
        trained = self.metadata("ARCH.context_length")
        return min(CONTEXT, trained) if isinstance(trained, int) and trained > 0 else CONTEXT

    def metadata(self, key: str) -> object:
        """A key of the GGUF, in which ARCH is the architecture."""
        return self.gguf.metadata.get(key.replace("ARCH", str(self.gguf.metadata.get("general.architecture"))))

    def answer(self, question: Question, reader: LogitsReader, llama: Llama) -> tuple[float, bool]:
        """(ln of the right answer's probability among the answers, whether it is the most likely one)."""
        import numpy as np

        begun = llama.tokenize(question.prompt, parse_special=False)
        whole = [llama.tokenize(question.prompt + answer, parse_special=False) for answer in question.answers]
        shared = len(begun)
        while all(len(ids) > shared for ids in whole) and len({ids[shared] for ids in whole}) == 1:
            shared += 1  # such as a space of its own
        firsts = [ids[shared] if len(ids) > shared else -1 for ids in whole]
        ids = whole[question.right][:shared]
        last = reader.last(ids).astype(np.float64)
        values = np.array([last[first] if first >= 0 else -np.inf for first in firsts])
        right = values[question.right]
        log_sum = values.max() + np.log(np.exp(values - values.max()).sum())
        return float(right - log_sum), bool(right == values.max() and (values == right).sum() == 1)

    def answers(self, questions: Sequence[Question], *, original: bool = False) -> tuple[float, float]:
        """(mean ln of the right answer's probability, fraction of questions answered correctly)."""
        reader, llama = (self.original_reader, self.original) if original else (self.reader, self.llama)
        found = [self.answer(question, reader, llama) for question in questions]
        return sum(value for value, _ in found) / len(found), sum(right for _, right in found) / len(found)


_LN2 = 0.6931471805599453


def _product(shape: Sequence[int]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total
