"""An opened model, the same for every container: tensors by name, lazy metadata, tokenizer, hyper-parameters."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, ItemsView, Iterator, Mapping, Sequence, ValuesView
from dataclasses import dataclass
from functools import cached_property, partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias, TypeVar, overload

from aprfmt.errors import AprError, ChecksumError, LimitError, UnknownTensorError, UsageError
from aprfmt.io.crc import ReadChecksum
from aprfmt.io.source import Source
from aprfmt.limits import MAX_NAMES_CHARS
from aprfmt.text import first_few, format_bytes, format_shape, plural
from aprfmt.types import Array, PathLike, Shape

if TYPE_CHECKING:
    import torch
    from numpy.typing import DTypeLike

    from aprfmt.arch.hyperparams import Hyperparams
    from aprfmt.tokenizer.model import Tokenizer
    from aprfmt.trust.signature import ModelSignature

T = TypeVar("T")

Convention: TypeAlias = Literal["hf", "gguf", "apr"]
"""Whose naming of tensors and keys a container uses."""

_SHOWN_ROWS = 20
_COUNTED = 1 << 24
"""Values counted for a histogram in a notebook: about a third of a second."""


@dataclass(slots=True, eq=False, repr=False)
class Tensor:
    """One tensor of an open file; `numpy.asarray` returns its decoded values.

    Attributes:
        name: name in the container.
        dtype: name of a row of codecs.dtypes (the true dtype, even if the container stores opaque rows).
        shape: row-major, outermost dimension first, in every container.
        offset: byte offset of the data from the start of the file.
        n_bytes: stored size in bytes, without padding.
        source: the file that contains the bytes.
    """

    name: str
    dtype: str
    shape: Shape
    offset: int
    n_bytes: int
    source: Source

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of values."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """`n_bytes` under numpy's name: the stored size, not the decoded one."""
        return self.n_bytes

    def raw(self) -> memoryview:
        """The stored bytes, read-only and without a copy. Valid after the model is closed.

        They are mapped from the file: truncating the file while they are in use kills the process with SIGBUS, as with
        any mapped file. `numpy` and `torch` read instead: then it is a ChangedError.
        """
        return self.source.view(self.offset, self.n_bytes)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fills `buffer` from byte `offset` of the tensor; implements codecs.stream.TensorSource."""
        self.source.read_into(self.offset + offset, buffer)

    def numpy(self) -> Array:
        """The values in memory of their own: BF16 and quantized dtypes as float32, the others unchanged."""
        from aprfmt.codecs.recode import decode
        from aprfmt.codecs.stream import read_whole

        return decode(self.dtype, read_whole(self), self.shape, tensor=self.name)

    def torch(self) -> torch.Tensor:
        """The values as a torch tensor with memory of its own. Raises MissingDependencyError without torch."""
        from aprfmt.codecs.recode import decode_torch
        from aprfmt.codecs.stream import read_whole

        return decode_torch(self.dtype, read_whole(self), self.shape, tensor=self.name)

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> Array:
        """`numpy()` for numpy itself.

        With `copy` False only values whose stored form is numpy's, as a view of `raw()`; else UsageError.
        """
        import numpy as np

        from aprfmt.codecs.recode import decode

        if copy is not False:
            return np.asarray(self.numpy(), dtype=dtype)
        stored = self.raw()
        values = decode(self.dtype, stored, self.shape, tensor=self.name)
        out = np.asarray(values, dtype=dtype)
        if out.size and not np.may_share_memory(out, np.frombuffer(stored, np.uint8)):
            wanted = values.dtype if dtype is None else dtype
            raise UsageError(f"{self.dtype} cannot be viewed as {wanted} without a copy", tensor=self.name)
        return out

    def __repr__(self) -> str:
        return f"Tensor({self.name!r}, {self.dtype}, {list(self.shape)}, {self.n_bytes} bytes)"

    def _repr_html_(self) -> str:
        from aprfmt.html.notebook import small_figure, small_table

        rows = [("tensor", self.name), ("dtype", self.dtype), ("shape", format_shape(self.shape))]
        rows += [("size", format_bytes(self.n_bytes)), ("file", str(self.source.path))]
        try:
            figure = self._histogram()
        except AprError as error:  # a dtype without a decoder, a missing file: the rest is still valid
            return small_table([*rows, ("values", error.message)])
        return small_table(rows) + small_figure(figure)

    def _histogram(self) -> str:
        """The distribution of the values as a figure; "" without finite values."""
        from aprfmt.codecs.values import Histogram, values
        from aprfmt.html.charts import histograms
        from aprfmt.io.pipe import source_chunks

        found, counted = Histogram(), 0
        stored = partial(source_chunks, self.source, self.offset, self.n_bytes)
        for block in values(self.dtype, self.shape, stored, name=self.name):
            found.add(block)
            counted += block.size
            if counted >= _COUNTED:
                break
        part = f" (the first {counted:,})" if counted < self.size else ""
        reach = found.bulk()
        return histograms(f"Values{part}", [found.rebin(reach)], reach) if reach else ""


class Tensors(Mapping[str, Tensor]):
    """Tensors by name, in file order. For duplicate names the mapping returns the first; `entries` has all.

    An unknown name raises UnknownTensorError, a KeyError with the most similar name.
    """

    def __init__(self, entries: Sequence[Tensor], path: PathLike) -> None:
        self.path = os.fspath(path)
        self.entries = tuple(entries)
        self._by_name: dict[str, Tensor] = {t.name: t for t in self.entries}
        if len(self._by_name) < len(self.entries):
            self._by_name |= {t.name: t for t in reversed(self.entries)}

    def __getitem__(self, name: str) -> Tensor:
        try:
            return self._by_name[name]
        except KeyError:
            raise self._unknown(name) from None

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    @overload
    def get(self, name: str, /) -> Tensor | None: ...
    @overload
    def get(self, name: str, default: Tensor, /) -> Tensor: ...
    @overload
    def get(self, name: str, default: T, /) -> Tensor | T: ...
    def get(self, name: str, default: object = None, /) -> object:
        """As in a dict; the inherited method would search for similar names each time."""
        return self._by_name.get(name, default)

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def values(self) -> ValuesView[Tensor]:
        """As in a dict; the inherited method is slow."""
        return self._by_name.values()

    def items(self) -> ItemsView[str, Tensor]:
        """As in a dict; the inherited method is slow."""
        return self._by_name.items()

    def __len__(self) -> int:
        return len(self._by_name)

    def _unknown(self, name: str) -> UnknownTensorError:
        from difflib import get_close_matches

        word = str(name)
        near = [other for other in self._by_name if word in other.split(".")]
        near = sorted(near, key=len) or get_close_matches(word, self._by_name, 1)
        near = near or [other for other in self._by_name if len(word) > 2 and word in other]
        nearest = f"; did you mean {near[0]!r}?" if near else ""
        hint = None if near else f"apr tensors {self.path} lists their names"
        return UnknownTensorError(f"no tensor {name!r}{nearest}", path=self.path, hint=hint)

    def __repr__(self) -> str:
        return f"Tensors({len(self)}: {first_few(map(repr, self))})"

    def _repr_html_(self) -> str:
        from aprfmt.html.notebook import small_table

        shown = list(self.values())[:_SHOWN_ROWS]
        rows = [(t.name, t.dtype, format_shape(t.shape), format_bytes(t.n_bytes)) for t in shown]
        more = [(f"and {len(self) - len(shown)} more",)] if len(self) > len(shown) else []
        return small_table([*rows, *more], ("tensor", "dtype", "shape", "size"))


def _no_hparams() -> Hyperparams:
    from aprfmt.arch.hyperparams import Hyperparams

    return Hyperparams()


class Model:
    """An open model; use it in a `with` block. Built by the format modules, never subclassed.

    Attributes:
        path: the opened file or folder.
        format: id of the container: "apr-v2", "apr-v1", "apr-legacy", "gguf", "safetensors", "hf", or a plugin's.
        convention: "hf": tensors have Hugging Face names, hyper-parameters come from config.json, which may be missing;
            "gguf": llama.cpp's names, row order and keys; "apr": metadata of an `.apr`, and the tensor names from its
            import.
        label: the container's display name: "APR v2", "GGUF v3", "SafeTensors", "HF folder".
        version: version of the container, such as "2.0" or "3"; "" if it has none.
        sources: all open files, the main file first.
        tensors: by name; `tensors.entries` includes duplicates.
        checksum: {"header": "ok"|"bad"|"none", "footer": "ok"|"bad"|"absent"|"none"}; may be expensive, hence a method.
        flags: container flags by name.
        warnings: unusual but readable properties.
        cut: what is missing at the end of a truncated file, as a sentence; None if the file is complete.
        files: files stored beside the model, as tensors of bytes; not part of `tensors`.
        native: the format module's own view (header fields, key-value pairs), read with `native_as`.
        signature: the signature of its files; None without one.
    """

    signature: ModelSignature | None = None

    def __init__(
        self,
        *,
        path: Path,
        format: str,
        convention: Convention = "hf",
        label: str,
        version: str = "",
        sources: Sequence[Source],
        tensors: Sequence[Tensor],
        load_metadata: Callable[[], Mapping[str, Any]] = dict,
        load_tokenizer: Callable[[Model], Tokenizer | None] = lambda _: None,
        load_hparams: Callable[[Model], Hyperparams] = lambda _: _no_hparams(),
        checksum: Callable[[], dict[str, str]] = lambda: {"header": "none", "footer": "none"},
        flags: Mapping[str, bool] | None = None,
        warnings: Sequence[str] = (),
        cut: str | None = None,
        files: Sequence[Tensor] = (),
        native: object = None,
    ) -> None:
        self.path = path
        self.format = format
        self.convention = convention
        self.label = label
        self.version = version
        self.sources = tuple(sources)
        self.tensors = Tensors(tensors, path)
        if (n_bytes := sum(len(tensor.name) for tensor in tensors)) > MAX_NAMES_CHARS:
            raise LimitError(
                f"the tensor names have {n_bytes:,} characters; the limit is {MAX_NAMES_CHARS:,}", path=path
            )
        self.checksum = checksum
        self.flags = dict(flags or {})
        self.warnings = list(warnings)
        self.cut = cut
        self.files = tuple(files)
        self.native = native
        self._load_metadata = load_metadata
        self._load_tokenizer = load_tokenizer
        self._load_hparams = load_hparams

    def __getitem__(self, name: str) -> Tensor:
        """The tensor of that name, as `tensors[name]`. Raises UnknownTensorError."""
        return self.tensors[name]

    def __contains__(self, name: object) -> bool:
        return name in self.tensors

    def __iter__(self) -> Iterator[str]:
        """The names of the tensors, in file order."""
        return iter(self.tensors)

    @cached_property
    def metadata(self) -> Mapping[str, Any]:
        """APR metadata, GGUF key-value pairs, safetensors `__metadata__` or config.json, parsed on first use."""
        return self._load_metadata()

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The embedded tokenizer, None if the file has none; parsed on first use."""
        return self._load_tokenizer(self)

    @cached_property
    def hparams(self) -> Hyperparams:
        """Dimensions and constants of the network, under one set of names for every container."""
        return self._load_hparams(self)

    def native_as(self, kind: type[T]) -> T | None:
        """`native` if it is a `kind`, else None."""
        return self.native if isinstance(self.native, kind) else None

    @property
    def size_bytes(self) -> int:
        """Total size of its files in bytes."""
        return sum(source.size for source in self.sources)

    def check_unchanged(self) -> None:
        """Raises ChangedError if one of its files changed since it was opened, ChecksumError for a stated digest.

        See io.source.Source.check_unchanged.
        """
        for source in self.sources:
            source.check_unchanged(digest=True)

    def record_reads(self) -> None:
        """Computes the checksum of everything read from now on, so that check_intact need not read it again."""
        for source in self.sources:
            source.record = ReadChecksum()

    def check_intact(self) -> None:
        """Raises ChecksumError for a truncated file or a wrong checksum; reads whole files.

        A file without any checksum, from another writer, passes with a warning. If it has a signature, the files
        are compared with the digests in it.
        """
        if self.signature is not None and not any(source.stated_digest for source in self.sources):
            self.signature.check_claim()
        hint = "copy or download it again"
        if self.cut is not None:
            raise ChecksumError(self.cut, path=self.path, hint=hint)
        bad = [part for part, state in self.checksum().items() if state == "bad"]
        if bad:
            raise ChecksumError(f"the checksum in the {bad[0]} does not match the bytes", path=self.path, hint=hint)

    def close(self) -> None:
        """Closes the files; existing views of tensors stay valid."""
        for source in self.sources:
            source.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        size = format_bytes(self.size_bytes)
        return f"Model({str(self.path)!r}, {self.label}, {plural(len(self.tensors), 'tensor')}, {size})"

    def _repr_html_(self) -> str:
        from aprfmt.html.notebook import small_table

        dtypes = Counter(tensor.dtype for tensor in self.tensors.entries)
        facts = small_table(
            [
                ("model", self.path),
                ("format", self.label),
                ("size", format_bytes(self.size_bytes)),
                ("tensors", len(self.tensors)),
                ("dtypes", ", ".join(f"{name} {n}" for name, n in dtypes.most_common())),
            ]
        )
        return f"{facts}<details><summary>tensors</summary>{self.tensors._repr_html_()}</details>"
