"""Vocabulary padding: embedding and output head with rows up to a multiple, as tensor parallelism and kernels want."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, replace

from aprfmt.arch.grammar import dims_of
from aprfmt.arch.names import matches
from aprfmt.canonical.combined_rows import OtherRows
from aprfmt.canonical.model import Canonical, embedding_rows
from aprfmt.canonical.source_rows import read_rows
from aprfmt.canonical.tensor import CanonicalTensor
from aprfmt.codecs.dtypes import DTYPES
from aprfmt.codecs.recode import decode
from aprfmt.codecs.stream import TensorSource
from aprfmt.errors import RefusedError, UsageError
from aprfmt.limits import MAX_VOCABULARY_MULTIPLE
from aprfmt.text import plural
from aprfmt.tokenizer.data import NO_VOCABULARY
from aprfmt.tokenizer.model import Tokenizer
from aprfmt.types import Array


@dataclass(frozen=True, slots=True)
class PaddedRows(OtherRows):
    """A tensor with zeros behind its last row."""

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fills `buffer` from byte `offset`."""
        stored = max(0, min(len(buffer), self.source.n_bytes - offset))
        if stored:
            self.source.read_into(offset, buffer[:stored])
        buffer[stored:] = bytes(len(buffer) - stored)


@dataclass(frozen=True, slots=True)
class ChosenRows(OtherRows):
    """Some rows of a tensor; `rows` are their indices, ascending, int64."""

    rows: Array

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fills `buffer` from byte `offset`."""
        import numpy as np

        if not len(buffer):
            return
        size = self.row_bytes
        first = offset // size
        part = self.rows[first : -(-(offset + len(buffer)) // size)]
        data = read_rows([self.source], np.array([self.source.shape[0]]), part, size)
        buffer[:] = memoryview(data).cast("B")[offset - first * size :][: len(buffer)]


def padded_vocabulary(c: Canonical, multiple: int) -> tuple[Canonical, list[str]]:
    """`c` with rows of zeros in each tensor that has one row per token, up to a multiple of `multiple`; and notes.

    Stored rows keep their bytes in every dtype. The logits of the new ids are 0. Writers pad the token list to the rows
    as their format does.

    Raises:
        UsageError: `multiple` is less than 2 or more than MAX_VOCABULARY_MULTIPLE.
        RefusedError: an unknown architecture, a model without a token embedding, a tensor with tokens along another
            axis, extra tensors (MTP layers) with a row per token, or a dtype whose zero bytes are not the value 0.
    """
    if type(multiple) is not int or not 2 <= multiple <= MAX_VOCABULARY_MULTIPLE:
        raise UsageError(
            f"pad_vocab must be a multiple from 2 to {MAX_VOCABULARY_MULTIPLE:,}, not {multiple!r:.40}",
            hint="--pad-vocab 64",
        )
    n_rows = token_rows(c, "padded")
    wanted = -(-n_rows // multiple) * multiple
    if wanted == n_rows:
        return c, []
    tensors = c.tensors | {name: _padded(tensor, wanted) for name, tensor in token_tensors(c, n_rows, "padded").items()}
    h = deepcopy(c.hparams)
    h.vocab_size = wanted
    what = f"{plural(wanted - n_rows, 'row')} of zeros added to the vocabulary: {n_rows:,} to {wanted:,}"
    return replace(c, hparams=h, tensors=tensors, is_whole=False, sidecar=None), [f"{what}; their logits are 0"]


def token_rows(c: Canonical, verb: str) -> int:
    """The rows of the embedding of `c`. Raises RefusedError without one, which says that it cannot be `verb`."""
    n_rows = embedding_rows(c)
    if c.arch is None or n_rows is None or c.embedding not in c.tensors:
        what = "the architecture is unknown" if c.arch is None else "it has no token embedding"
        raise RefusedError(f"{what}, so its vocabulary cannot be {verb}", path=c.model.path)
    return n_rows


def token_tensors(c: Canonical, n_rows: int, verb: str) -> dict[str, CanonicalTensor]:
    """The tensors with one row per token, `n_rows`. Raises RefusedError as `padded_vocabulary`."""
    path, found = c.model.path, dict[str, CanonicalTensor]()
    extra = next((tensor.name for tensor in c.extras.values() if tensor.shape[:1] == (n_rows,)), None)
    if extra is not None:
        raise RefusedError(
            "an extra tensor also has one row per token", path=path, tensor=extra, hint="drop MTP layers with --no-mtp"
        )
    for name, tensor in c.tensors.items():
        match = next(iter(matches(c.arch, name)), None) if c.arch is not None else None
        dims = match.row.dims[min(match.position, len(match.row.dims) - 1)] if match and match.row.dims else ""
        axes = dims_of(dims) if dims else []
        if not any("vocab" in axis for axis in axes):
            continue
        if axes[0] != "vocab" or any("vocab" in axis for axis in axes[1:]) or tensor.shape[0] != n_rows:
            raise RefusedError(f"only tensors with one row per token can be {verb}", path=path, tensor=name)
        found[name] = tensor
    return found


def replaceable_tokenizer(c: Canonical) -> Tokenizer:
    """The tokenizer of `c`. Raises RefusedError without one, and for extra tensors, whose configs name tokens by id."""
    if c.tokenizer is None or c.tokenizer.model == NO_VOCABULARY:
        raise RefusedError("the model has no tokenizer", path=c.model.path, hint="set it with --tokenizer DIR")
    if c.extras:
        raise RefusedError(
            "the model has extra tensors (towers, MTP layers), whose configs name tokens by id",
            path=c.model.path, tensor=next(iter(c.extras)), hint="extract the language model first, or use --no-mtp",
        )  # fmt: skip
    return c.tokenizer


def row_source(c: Canonical, tensor: CanonicalTensor, n_rows: int) -> TensorSource:
    """A tensor of `c` with one row per token. Raises RefusedError if its rows are not stored one by one."""
    source = tensor.as_source()
    if tensor.scales or source.n_bytes % n_rows:
        raise RefusedError(
            f"{source.dtype} does not store rows one by one here", path=c.model.path, tensor=tensor.name,
            hint="convert to --dtype bf16 first",
        )  # fmt: skip
    return source


def with_stored_rows(tensors: Mapping[str, CanonicalTensor]) -> dict[str, CanonicalTensor]:
    """The `tensors` as they were before their vocabulary was changed."""
    return {
        name: CanonicalTensor(name, (made.source,)) if isinstance(made := tensor.sources[0], OtherRows) else tensor
        for name, tensor in tensors.items()
    }


def _padded(tensor: CanonicalTensor, rows: int) -> CanonicalTensor:
    source = tensor.as_source()
    n_zeros = source.n_bytes // source.shape[0]
    is_zero = DTYPES[source.dtype].kind == "plain" or not decode(source.dtype, bytes(n_zeros), source.shape[1:]).any()
    if tensor.scales or n_zeros * source.shape[0] != source.n_bytes or not is_zero:
        raise RefusedError(
            f"{source.dtype} cannot store a row of zeros here", tensor=tensor.name, hint="convert to --dtype bf16 first"
        )
    return CanonicalTensor(tensor.name, (PaddedRows(source, rows, {}),))
