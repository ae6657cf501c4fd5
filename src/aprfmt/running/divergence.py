"""KL divergence of a model's next-token distributions from a reference: llama-perplexity's `--kl-divergence`.

The text is split into chunks of `n_ctx` tokens, each evaluated by itself; the positions from n_ctx / 2 on are scored.
A logits file contains the reference's distributions in llama-perplexity's format, little-endian:
  "_logits_" | i32 n_ctx | i32 n_vocab | i32 chunks | i32 tokens [chunks, n_ctx], and for every scored position
  f32 scale | f32 low | u16 q [n_vocab, rounded up to an even number]: ln p = scale q + low, at least 16 below the top
"""

from __future__ import annotations

import os
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aprfmt import formats
from aprfmt.errors import CorruptError, RefusedError, RunError, UsageError, storage_errors
from aprfmt.io.pipe import FileLayout, Literal, StartProgress, Stream, WriteOptions, write_file
from aprfmt.io.sink import check_target
from aprfmt.io.temporary import scratch_folder
from aprfmt.llama.client import Llama
from aprfmt.running.decoders import open_decoder
from aprfmt.running.divergence_report import Divergence, histogram
from aprfmt.running.generate import metadata_of
from aprfmt.running.imatrix import text_of
from aprfmt.running.prepared import prepare
from aprfmt.running.scoring import LogitsReader
from aprfmt.running.token_chunks import spread_chunks, token_chunks, with_bos
from aprfmt.schema import check_numbers
from aprfmt.texts.sequences import check_length
from aprfmt.texts.sources import list_files
from aprfmt.types import Array, PathLike, paths_of

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Floats = npt.NDArray[np.float64]
    Logits = npt.NDArray[np.float32]
    Packed = npt.NDArray[np.uint16]

MAGIC = b"_logits_"
_HEAD = struct.Struct("<8s3i")
DEFAULT_CTX = 512
LEAST_CTX = 4
_RANGE = 16.0
"""Nats below the most likely token at which a logits file truncates."""

_BLOCK = 1 << 17
"""Logits that are computed with at once."""

QUANTILES = (0.0, 0.001, 0.01, 0.05, 0.1, 0.5, 0.9, 0.95, 0.99, 0.999, 1.0)


def kl_divergence(
    file: PathLike,
    against: PathLike,
    data: PathLike | Sequence[PathLike] = (),
    *,
    n_ctx: int | None = None,
    chunks: int | None = None,
    limit: int | None = None,
    save_logits: PathLike | None = None,
    text_field: str = "text",
    threads: int = 0,
    gpu_layers: int = 0,
    output: PathLike | None = None,
    force: bool = False,
    progress: StartProgress | None = None,
    log: Callable[[str], None] = lambda line: None,
) -> Divergence:
    """Computes the statistics of llama-perplexity's `--kl-divergence` for the model `file` in llama.cpp.

    Args:
        file: the model, in any format.
        against: the reference: a model with the same tokenizer, or a logits file, which contains the text too.
        data: text, jsonl or Parquet files, or folders of them.
        n_ctx: tokens of a chunk, the second half of which is scored; by default 512 or the models'
            context if shorter; that of a logits file.
        chunks: maximum number of chunks.
        limit: the same in tokens; at least one chunk is used.
        save_logits: keep the reference's distributions in this logits file.
        text_field: field of a record's text.
        threads: llama.cpp threads; 0: half of the CPUs.
        gpu_layers: layers to offload to a GPU, if llama.cpp supports it.
        output: an HTML page to write: the distribution of KL, and the error of the weights by layer.
        force: replace an existing `save_logits` or `output`.
        progress: called with the number of tokens to compute; returns a function to call as they are computed.
        log: called with progress lines.

    Raises:
        RefusedError: the vocabularies differ, or the text is shorter than a chunk, or a model's context is.
        RunError: llama.cpp cannot run a model, or a result is not finite.
    """
    started = time.monotonic()
    check_numbers(
        seq_len=(n_ctx, LEAST_CTX),
        chunks=(chunks, 1),
        limit=(limit, 1),
        threads=(threads, 0),
        gpu_layers=(gpu_layers, 0),
    )
    name, reference = formats.path_text(file, "file"), formats.path_text(against, "against")
    texts = [Path(formats.path_text(path, "data")) for path in paths_of(data)]
    page = _page(output, [name, reference, *map(str, texts)], force=force)
    load = partial(open_decoder, n_threads=threads, gpu_layers=gpu_layers, say=log)
    with scratch_folder("logits") as scratch:
        path = os.path.join(scratch, "reference.kld")
        if is_logits_file(reference):
            if texts or save_logits is not None or any(value is not None for value in (n_ctx, chunks, limit)):
                raise UsageError(
                    "a logits file contains its text in chunks: --data, --save-logits, --seq-len and --limit do not "
                    "apply to it"
                )
            path, n_ctx = reference, read_head(reference).n_ctx
        else:
            n_ctx = _context({"reference": reference, "model": name}, n_ctx)
            chunks = chunks if limit is None else max(1, limit // n_ctx)
            if not texts:
                raise UsageError("--data is missing: the text to compare the models on", hint="add --data text.txt")
            path = formats.path_text(save_logits, "save_logits") if save_logits is not None else path
            check_target(path, [name, reference, *map(str, texts)], force)
            list_files(texts, Counter())  # before a model is exported
            kept = [prepare(each, say=log) for each in (name, reference)]
            _check_vocabularies(*(_count_tokens(each.path) for each in kept))
            with load(reference, n_ctx=n_ctx) as llama:
                found = chunks_of(llama, texts, n_ctx, chunks, text_field)
                log(f"computing the distributions of {reference}")
                write_logits(llama, found, path, force=force)
        with load(name, n_ctx=n_ctx) as llama:
            columns = compare(llama, path, progress=progress)
            engine = llama.engine
        n_chunks = read_head(path).n_chunks
    seconds = time.monotonic() - started
    report = summarize(
        columns, file=name, reference=reference, engine=engine, n_ctx=n_ctx, chunks=n_chunks, seconds=seconds
    )
    if page is not None:
        from aprfmt.html.file import write_page
        from aprfmt.running.divergence_page import NO_WEIGHTS, divergence_html, weight_errors

        log("comparing the weights")
        weights = NO_WEIGHTS if is_logits_file(reference) else weight_errors(name, reference)
        write_page(page, divergence_html(report, weights), force=force)
    return report


def _context(models: Mapping[str, str], n_ctx: int | None) -> int:
    """The tokens of a chunk: `n_ctx`, else as many as the contexts of the models have, at most DEFAULT_CTX.

    Raises RefusedError if the context of one of them is shorter.
    """
    from aprfmt.running.evaluation_llama import positions_of

    length = n_ctx or DEFAULT_CTX
    for who, path in models.items():
        with formats.open(path) as model:
            positions = positions_of(model)
        if n_ctx is None:
            length = min(length, positions or length)
        else:
            check_length(length, who, positions)
    return length


def _count_tokens(gguf: str) -> int:
    """Tokens of its vocabulary; 0 if it has none."""
    tokens = metadata_of(gguf).get("tokenizer.ggml.tokens")
    return len(tokens) if isinstance(tokens, Sized) else 0


def _check_vocabularies(n_model: int, n_reference: int) -> None:
    """Raises RefusedError for vocabularies of different sizes; 0: unknown."""
    if n_model and n_reference and n_model != n_reference:
        raise RefusedError(
            f"the vocabularies differ: the model has {n_model} tokens, the reference {n_reference}",
            hint="KL divergence needs models with the same tokenizer",
        )


def _page(output: PathLike | None, inputs: Sequence[str], *, force: bool) -> str | None:
    """The page to write. Raises UsageError or ExistsError before anything is computed for it."""
    if output is None:
        return None
    from aprfmt.html.file import check_page

    target = formats.path_text(output, "output")
    check_page(target)
    check_target(target, inputs, force)
    return target


def chunks_of(
    llama: Llama, texts: Sequence[Path], n_ctx: int, limit: int | None, text_field: str = "text"
) -> list[list[int]]:
    """The text in chunks. Raises RefusedError if it is shorter than one."""
    hint = "add text with --data, or use a smaller --seq-len"
    return _not_empty(token_chunks(llama, text_of(texts, text_field), n_ctx, limit), texts, n_ctx, hint)


def sample_chunks(llama: Llama, texts: Sequence[Path], n_tokens: int, text_field: str = "text") -> list[list[int]]:
    """About `n_tokens` of the text, spread evenly, in chunks of DEFAULT_CTX. Raises RefusedError if it is shorter than
    one.
    """
    n_chunks = max(1, n_tokens // DEFAULT_CTX)
    found = spread_chunks(llama, text_of(texts, text_field), DEFAULT_CTX, n_chunks)
    return _not_empty(found, texts, DEFAULT_CTX, "add text with --eval-data")


def _not_empty(found: list[list[int]], texts: Sequence[Path], n_ctx: int, hint: str) -> list[list[int]]:
    if not found:
        raise RefusedError(f"the text is shorter than one chunk of {n_ctx} tokens", path=texts[0], hint=hint)
    return found


@dataclass(frozen=True, slots=True)
class LogitsHead:
    """The head of a logits file.

    Attributes:
        n_ctx: tokens of a chunk.
        n_vocab: tokens of the vocabulary.
        n_chunks: number of chunks.
        chunks: the ids of each chunk, as in the text.
    """

    n_ctx: int
    n_vocab: int
    n_chunks: int
    chunks: Sequence[list[int]] = ()

    @property
    def n_scored(self) -> int:
        """Scored positions of a chunk, the second half: each predicts the token after it."""
        return self.n_ctx - 1 - self.n_ctx // 2

    @property
    def row_bytes(self) -> int:
        """Bytes of a scored position."""
        return 2 * (2 * ((self.n_vocab + 1) // 2) + 4)

    @property
    def start(self) -> int:
        """Offset of the first scored position."""
        return _HEAD.size + 4 * self.n_ctx * self.n_chunks

    @property
    def n_bytes(self) -> int:
        """Size of the file."""
        return self.start + self.n_chunks * self.n_scored * self.row_bytes


def is_logits_file(path: PathLike) -> bool:
    """Whether the file begins like a logits file."""
    try:
        with open(path, "rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def read_head(path: PathLike) -> LogitsHead:
    """Reads the head of a logits file. Raises CorruptError if its size or ids do not match, StorageError."""
    import numpy as np

    with storage_errors(path), open(path, "rb") as file:
        data = file.read(_HEAD.size)
        if len(data) < _HEAD.size or data[:8] != MAGIC:
            raise CorruptError("not a logits file of llama-perplexity", path=path)
        _, n_ctx, n_vocab, n_chunks = _HEAD.unpack(data)
        head = LogitsHead(n_ctx, n_vocab, n_chunks)
        size = os.fstat(file.fileno()).st_size
        if n_ctx < 4 or n_vocab < 1 or n_chunks < 1 or head.n_bytes != size:
            raise CorruptError(
                f"the logits file has {size:,} bytes, but {n_chunks} chunks of {n_ctx} tokens and a vocabulary of "
                f"{n_vocab} need {head.n_bytes:,}",
                path=path,
                hint="the file is incomplete: write it again",
            )
        ids = np.frombuffer(file.read(4 * n_ctx * n_chunks), "<i4").reshape(n_chunks, n_ctx)
    if ids.min() < 0 or ids.max() >= n_vocab:
        raise CorruptError("a token id of the logits file is outside its vocabulary", path=path)
    return replace(head, chunks=ids.tolist())


def write_logits(
    llama: Llama,
    chunks: Sequence[list[int]],
    path: PathLike,
    *,
    force: bool = False,
    progress: StartProgress | None = None,
) -> None:
    """Writes the distributions of a loaded model on `chunks` of equal length as a logits file.

    `progress` counts bytes. Raises RunError for NaN logits, ExistsError, StorageError.
    """
    import numpy as np

    head = LogitsHead(len(chunks[0]), llama.n_vocab, len(chunks))
    ids = np.array(chunks, "<i4")
    with scratch_folder("logits") as folder:
        reader = LogitsReader(folder, llama)

        def rows() -> Iterator[bytes]:
            for chunk in chunks:
                for _, logits in _scored(reader, llama, chunk):
                    yield packed(logits).tobytes()

        begin = Literal(_HEAD.pack(MAGIC, head.n_ctx, head.n_vocab, len(chunks)) + ids.tobytes())
        body = Stream(head.n_bytes - head.start, rows, "logits")
        layout = FileLayout(os.path.basename(path), [begin, body])
        write_file(os.fspath(path), layout, WriteOptions(force=force, progress=progress))


def compare(llama: Llama, path: PathLike, *, progress: StartProgress | None = None) -> list[Floats]:
    """Compares a loaded model with a logits file.

    `progress` counts tokens.

    Returns:
        Per scored position [P]: KL(reference || model), the model's loss, the reference's loss, whether both have the
        same most likely token.

    Raises:
        RefusedError: another vocabulary.
        RunError: the model computes no numbers.
    """
    import numpy as np

    head = read_head(path)
    _check_vocabularies(llama.n_vocab, head.n_vocab)
    advance = progress(head.n_ctx * head.n_chunks) if progress is not None else None
    parts: list[list[Array]] = []
    with scratch_folder("logits") as folder, storage_errors(path), open(path, "rb") as file:
        file.seek(head.start)
        reader = LogitsReader(folder, llama)
        for chunk in head.chunks:
            for position, logits in _scored(reader, llama, chunk):
                data = file.read(len(logits) * head.row_bytes)
                if len(data) < len(logits) * head.row_bytes:
                    raise CorruptError("the logits file was truncated while it was read", path=path)
                rows = np.frombuffer(data, "<u2").reshape(len(logits), -1)
                labels = np.array(chunk[position + 1 : position + 1 + len(logits)])
                parts.append(divergences(rows, logits, labels))
            if advance is not None:
                advance(head.n_ctx, "comparing")
    found: list[Floats] = [np.concatenate(column) for column in zip(*parts, strict=True)]
    if not all(np.isfinite(column).all() for column in found[:3]):
        raise RunError("the KL divergence is not finite, no score", hint="the weights are damaged: apr validate FILE")
    return found


def _scored(reader: LogitsReader, llama: Llama, chunk: list[int]) -> Iterator[tuple[int, Logits]]:
    """(position, logits) of the scored positions of a chunk."""
    first, last = len(chunk) // 2, len(chunk) - 1
    for position, rows in reader.after(with_bos(llama, chunk), first):
        if len(scored := rows[: last - position]):
            yield position, scored


def packed(logits: Logits) -> Packed:
    """Logits [P, V] as rows of a logits file."""
    import numpy as np

    top = logits.max(1, keepdims=True)
    low = np.maximum(logits.min(1, keepdims=True), top - np.float32(_RANGE))
    log_sum = np.log(np.exp(logits - top).sum(1, dtype="f8", keepdims=True)).astype("f4")
    scale = (top - low) / np.float32(65535)
    rows = np.zeros((len(logits), 2 * ((logits.shape[1] + 1) // 2) + 4), "<u2")
    rows[:, :4] = np.concatenate([scale, low - top - log_sum], 1).astype("<f4").view("<u2")
    steps = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale > 0)
    rows[:, 4 : 4 + logits.shape[1]] = np.rint(np.maximum(logits - low, 0) * steps)
    return rows


def divergences(rows: Packed, logits: Logits, labels: Array) -> list[Array]:
    """What `compare` returns, for rows of a logits file and the model's logits [P, V] with the next tokens [P]."""
    import numpy as np

    if (step := max(1, _BLOCK // logits.shape[1])) < len(logits):  # temporaries that the CPU's caches hold
        blocks = [slice(first, first + step) for first in range(0, len(logits), step)]
        parts = [divergences(rows[block], logits[block], labels[block]) for block in blocks]
        return [np.concatenate(column) for column in zip(*parts, strict=True)]
    scale, floor = np.ascontiguousarray(rows[:, :4]).view("<f4").T[:, :, None]
    base = rows[:, 4 : 4 + logits.shape[1]] * scale + floor
    top = logits.max(1, keepdims=True)
    log_sum = top + np.log(np.exp(logits - top).sum(1, dtype="f8", keepdims=True)).astype("f4")
    with np.errstate(over="ignore"):
        terms = np.where(base > -_RANGE, np.exp(base) * (base - logits + log_sum), 0)
    at = np.arange(len(labels))
    loss = (log_sum[:, 0] - logits[at, labels]).astype("f8")
    return [terms.sum(1, dtype="f8"), loss, -base[at, labels].astype("f8"), logits.argmax(1) == base.argmax(1)]


def summarize(columns: Sequence[Floats], **facts: Any) -> Divergence:
    """The statistics of the result of `compare`; `facts` are the other attributes of Divergence."""
    import numpy as np

    kl, loss, other, same = columns
    change = np.exp(-loss) - np.exp(-other)
    ce, reference_ce = float(loss.mean()), float(other.mean())
    return Divergence(
        **facts, tokens=len(kl), ce=ce, perplexity=float(np.exp(ce)), reference_ce=reference_ce,
        reference_perplexity=float(np.exp(reference_ce)), kl=float(kl.mean()),
        kl_error=float(kl.std() / max(1, len(kl) - 1) ** 0.5), kl_quantiles=_quantiles(kl), kl_histogram=histogram(kl),
        agreement=float(same.mean()), mean_dp=float(change.mean()), rms_dp=float(np.sqrt((change**2).mean())),
        dp_quantiles=_quantiles(change),
    )  # fmt: skip


def _quantiles(values: Floats) -> dict[str, float]:
    import numpy as np

    return {f"{q:g}": float(value) for q, value in zip(QUANTILES, np.quantile(values, QUANTILES), strict=True)}
