"""The tensors of a model as rows: where each one is and, on request, what its values are like and its digest."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from aprfmt import formats
from aprfmt.errors import ChangedError, CorruptError, UnsupportedError
from aprfmt.inspection.tensor_filter import chosen_tensors
from aprfmt.io.pipe import StartProgress
from aprfmt.model import Tensor
from aprfmt.schema import check_numbers
from aprfmt.types import PathLike


@dataclass(frozen=True, slots=True)
class ListedTensor:
    """One tensor.

    Attributes:
        tensor: name, dtype, shape, offset and size; its values can be read while the model is open only.
        file: the shard that contains it; None if the model is one file.
        stats: mean, std, min, max, counts of NaN and infinity, share of zeros, if requested.
        error: why its values could not be read.
        sha256: of the stored bytes, if requested.
    """

    tensor: Tensor
    file: str | None
    stats: Mapping[str, float | None] | None
    error: str | None
    sha256: str | None

    def to_json(self) -> dict[str, object]:
        """An item of `tensors` in the object of `apr tensors --json`."""
        t = self.tensor
        row: dict[str, object] = {"name": t.name, "dtype": t.dtype, "shape": list(t.shape)}
        row |= {"offset": t.offset, "size_bytes": t.n_bytes, **(self.stats or {})}
        more = {"stats_error": self.error, "sha256": self.sha256, "file": self.file}
        return row | {key: value for key, value in more.items() if value is not None}


@dataclass(frozen=True, slots=True)
class TensorList:
    """The result of `tensors`.

    Attributes:
        file, format: the path as given, and the container.
        tensor_count: tensors in the file.
        matched: those that match the filter; `tensors` are the first of them.
    """

    file: str
    format: str
    tensor_count: int
    matched: int
    tensors: Sequence[ListedTensor]

    def to_json(self) -> dict[str, object]:
        """The object of `apr tensors --json`."""
        rows = [row.to_json() for row in self.tensors]
        body: dict[str, object] = {"file": self.file, "format": self.format, "tensor_count": self.tensor_count}
        return body | {"matched": self.matched, "tensors": rows}


def tensors(
    path: PathLike,
    *,
    filter: str | None = None,
    limit: int = 0,
    stats: bool = False,
    hash: bool = False,
    progress: StartProgress | None = None,
) -> TensorList:
    """Lists the tensors of the model at `path`.

    Args:
        path: the model, in any format.
        filter: a glob; without wildcards, names that contain it. Hugging Face names choose tensors of a GGUF too, and
            GGUF names those of a checkpoint.
        limit: list at most so many; 0: all.
        stats: read the values: mean, deviation, range, NaN, infinities, zeros.
        hash: the SHA-256 of the stored bytes.
        progress: called with the number of bytes to read; returns a function to call with (bytes, tensor).

    Raises:
        AprError: the file cannot be opened.
    """
    check_numbers(limit=(limit, 0))
    with formats.open_unchanged(path) as model:
        entries = model.tensors.entries
        chosen = chosen_tensors(model, filter)
        shown = chosen[:limit] if limit else chosen
        sharded = len(model.sources) > 1  # offsets are relative to a shard
        reads = progress if stats or hash else None
        advance = reads(sum(tensor.n_bytes for tensor in shown)) if reads else None
        rows = []
        for tensor in shown:
            rows.append(_row(tensor, stats=stats, hash=hash, sharded=sharded))
            if advance:
                advance(tensor.n_bytes, tensor.name)
        return TensorList(os.fspath(path), model.label, len(entries), len(chosen), rows)


def _row(tensor: Tensor, *, stats: bool, hash: bool, sharded: bool) -> ListedTensor:
    figures, error, digest = None, None, None
    if stats:
        from aprfmt.inspection.stats import Stats, tensor_stats

        try:
            figures = tensor_stats(tensor).to_json()
        except ChangedError:
            raise
        except (CorruptError, UnsupportedError) as caught:  # list the remaining tensors
            figures, error = dict.fromkeys(Stats().to_json()), caught.message
    if hash:
        from aprfmt.io.pipe import sha256_of_range

        digest = sha256_of_range(tensor.source, tensor.offset, tensor.n_bytes)
    return ListedTensor(tensor, Path(tensor.source.path).name if sharded else None, figures, error, digest)
