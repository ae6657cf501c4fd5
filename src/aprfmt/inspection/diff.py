"""What two models differ in: container, metadata, tensors by Hugging Face name, bytes or decoded values."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from aprfmt.codecs.dtypes import n_elements
from aprfmt.errors import AprError, RefusedError, UnmappedError, UnsupportedError, storage_error
from aprfmt.formats.hfdir import HfNative
from aprfmt.inspection.describe import typed_metadata
from aprfmt.inspection.stats import exact_chunks, values
from aprfmt.io.pipe import source_chunks
from aprfmt.io.source import Buffer
from aprfmt.model import Model, Tensor
from aprfmt.text import plural

# Typed APR fields that some other container has no place for, and the template, which the tokenizers show.
_APR_ONLY = (
    *("model_type", "original_format", "created_at", "total_size", "param_count"),
    *("hf_architecture", "hf_model_type", "chat_template"),
)
_MAX_TEXT = 120
_COMPARE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class How:
    """What counts as equal.

    By default everything does: container, metadata, tensor names, dtypes, shapes and bytes. `by_value`
    compares the tensors alone, decoded and in one row order, so that containers and dtypes may differ; two
    values are the same when they differ by at most `tolerance`, or are both NaN. `metadata_only` leaves the
    tensors alone.
    """

    by_value: bool = False
    tolerance: float = 0.0
    metadata_only: bool = False


class Side(Protocol):
    """A tensor of one side."""

    @property
    def dtype(self) -> str:
        """Stored dtype."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Row-major shape."""

    @property
    def n_bytes(self) -> int:
        """Stored bytes."""

    def chunks(self) -> Iterable[Buffer]:
        """The stored bytes, in Hugging Face row order where the order is known."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor just as the file has it."""

    tensor: Tensor

    @property
    def dtype(self) -> str:
        """Stored dtype."""
        return self.tensor.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Row-major shape."""
        return self.tensor.shape

    @property
    def n_bytes(self) -> int:
        """Stored bytes."""
        return self.tensor.n_bytes

    def chunks(self) -> Iterator[Buffer]:
        """The stored bytes."""
        return iter(source_chunks(self.tensor.source, self.tensor.offset, self.tensor.n_bytes))


@dataclass(slots=True)
class Comparison:
    """The outcome.

    Attributes:
        differences: {kind: "format" | "metadata" | "tensor", name, a, b, ...}.
        tensors_compared: tensors that both sides have.
        notes: what was deliberately not counted as a difference.
    """

    differences: list[dict[str, Any]] = field(default_factory=list)
    tensors_compared: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def identical(self) -> bool:
        """Whether no difference was found."""
        return not self.differences

    def add(self, kind: str, name: str, a: Any, b: Any, **more: Any) -> None:
        """Records one difference."""
        self.differences.append({"kind": kind, "name": name, "a": a, "b": b, **more})


def diff(a: Model, b: Model, how: How, progress: Callable[[int, str], None] | None = None) -> Comparison:
    """Compares two opened models; `progress` is called with (bytes, tensor) of the first."""
    found = Comparison()
    if not how.by_value:
        _diff_metadata(a, b, found)
    elif a.label != b.label:
        found.notes.append(f"{a.label} and {b.label}: container and metadata do not count with --values")
    if not how.metadata_only:
        _diff_tensors(a, b, found, how, progress or (lambda n_bytes, label: None))
    return found


def same_files(a: Model, b: Model) -> bool:
    """Whether all files of both models are byte for byte the same, tensors and all."""
    if a.format != b.format or [s.size for s in a.sources] != [s.size for s in b.sources]:
        return False
    if a.convention == "hf":
        return False  # config and tokenizer lie in files of their own
    return all(
        x == y
        for s, t in zip(a.sources, b.sources, strict=True)
        for x, y in zip(source_chunks(s, 0, s.size), source_chunks(t, 0, t.size), strict=True)
    )


def _diff_metadata(a: Model, b: Model, found: Comparison) -> None:
    if (a.label, a.version) != (b.label, b.version):
        same = a.label == b.label
        found.add("format", "container", *(f"{m.label} {m.version}" if same else m.label for m in (a, b)))
    if a.format == b.format:
        left, right = dict(a.metadata), dict(b.metadata)
        if a.flags != b.flags:
            found.add("format", "flags", _set(a.flags), _set(b.flags))
    else:
        left, right = (_portable(typed_metadata(model)) for model in (a, b))
    for key in dict.fromkeys((*left, *right)):
        x, y = left.get(key), right.get(key)
        if (key in left) != (key in right) or not _equal(x, y):
            found.add("metadata", key, _short(x), _short(y), **_where(x, y))
    _diff_tokenizers(a, b, found)
    left_files, right_files = (model.native_as(HfNative) for model in (a, b))
    if left_files is not None and right_files is not None:
        _diff_files(left_files, right_files, found)


def _diff_files(a: HfNative, b: HfNative, found: Comparison) -> None:
    """The other files of two folders; JSON by its data, config.json was compared as metadata."""
    left, right = ({p.as_posix(): m.folder / p for p in m.other_files} for m in (a, b))
    for name in sorted({*left, *right} - {"config.json"}):
        x, y = left.get(name), right.get(name)
        if x is None or y is None:
            found.add("metadata", name, *("absent" if path is None else "present" for path in (x, y)))
        elif not _same_file(x, y):
            found.add("metadata", name, *(f"{path.stat().st_size} bytes" for path in (x, y)), what="content")


def _same_file(x: Path, y: Path) -> bool:
    try:
        p, q = x.read_bytes(), y.read_bytes()
    except OSError as error:
        raise storage_error(error, error.filename or x) from error
    if p == q or x.suffix != ".json":
        return p == q
    try:
        return bool(json.loads(p) == json.loads(q))
    except (ValueError, RecursionError):  # no JSON after all: the bytes have decided
        return False


def _portable(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that every container can hold."""
    return {key: value for key, value in metadata.items() if key not in _APR_ONLY}


def _set(flags: Mapping[str, bool]) -> list[str]:
    return sorted(name for name, value in flags.items() if value)


def _equal(x: Any, y: Any) -> bool:
    if isinstance(x, float) and isinstance(y, float):
        return x == y or (math.isnan(x) and math.isnan(y)) or math.isclose(x, y, rel_tol=1e-7)
    if _is_list(x) and _is_list(y):
        return len(x) == len(y) and all(map(_equal, x, y))
    return bool(x == y)


def _is_list(value: Any) -> bool:
    return hasattr(value, "__len__") and not isinstance(value, (str, bytes, Mapping))


def _short(value: Any) -> Any:
    """`value` small enough to print: long texts are cut, long lists and objects are counted."""
    if isinstance(value, str) and len(value) > _MAX_TEXT:
        return f"{value[:_MAX_TEXT]}… ({len(value)} characters)"
    if _is_list(value):
        long = len(value) > 8 or len(repr(list(value))) > _MAX_TEXT
        return f"[{plural(len(value), 'item')}]" if long else list(value)
    if isinstance(value, Mapping) and (len(value) > 8 or len(repr(value)) > _MAX_TEXT):
        return f"{{{plural(len(value), 'key')}}}"
    return value


def _where(x: Any, y: Any) -> dict[str, int]:
    if not (_is_list(x) and _is_list(y)):
        return {}
    pairs = enumerate(zip(x, y, strict=False))
    return {"first_difference": next((i for i, (p, q) in pairs if not _equal(p, q)), min(len(x), len(y)))}


def _diff_tokenizers(a: Model, b: Model, found: Comparison) -> None:
    """Across containers the tokenizers are compared as data; inside one the metadata has shown it all."""
    if a.format == b.format and a.convention != "hf":
        return
    left, right = a.tokenizer, b.tokenizer
    if left is None or right is None:
        if left is not right:
            found.add("metadata", "tokenizer", _presence(left), _presence(right))
        return
    for name in ("model", "pre", "tokens", "merges", "types", "scores", "special", "chat_template"):
        x, y = getattr(left, name), getattr(right, name)
        if not _equal(x, y):
            found.add("metadata", f"tokenizer.{name}", _short(x), _short(y), **_where(x, y))


def _presence(tokenizer: object) -> str:
    return "absent" if tokenizer is None else "present"


def _sides(a: Model, b: Model) -> tuple[Mapping[str, Side], Mapping[str, Side]]:
    """Tensors under Hugging Face names; under their own where either model has no such form."""
    from aprfmt.canonical.model import canonical

    try:
        return canonical(a).tensors, canonical(b).tensors
    except (UnmappedError, RefusedError, UnsupportedError):
        left, right = ({t.name: Stored(t) for t in model.tensors.entries} for model in (a, b))
        return left, right


def _diff_tensors(
    a: Model, b: Model, found: Comparison, how: How, progress: Callable[[int, str], None]
) -> None:
    left, right = _sides(a, b)
    for name in dict.fromkeys((*left, *right)):
        x, y = left.get(name), right.get(name)
        if x is None or y is None:
            found.add("tensor", name, _summary(x), _summary(y), what="missing")
            continue
        found.tensors_compared += 1
        _diff_tensor(name, x, y, found, how)
        progress(x.n_bytes, name)


def _summary(side: Side | None) -> str | None:
    return None if side is None else f"{side.dtype} {list(side.shape)}"


def _diff_tensor(name: str, x: Side, y: Side, found: Comparison, how: How) -> None:
    if x.shape != y.shape:
        found.add("tensor", name, _summary(x), _summary(y), what="shape")
    elif x.dtype != y.dtype and not how.by_value:
        found.add("tensor", name, _summary(x), _summary(y), what="dtype")
    elif x.dtype == y.dtype and x.n_bytes == y.n_bytes and _same_bytes(x, y):
        return
    elif not how.by_value:
        found.add("tensor", name, _summary(x), _summary(y), what="bytes", **_figures_or_none(name, x, y, 0.0))
    else:
        figures = _figures(name, x, y, how.tolerance)
        if figures["n_different"]:
            found.add("tensor", name, _summary(x), _summary(y), what="values", **figures)


def _same_bytes(x: Side, y: Side) -> bool:
    pairs = zip(
        exact_chunks(x.chunks(), _COMPARE_BYTES), exact_chunks(y.chunks(), _COMPARE_BYTES), strict=True
    )
    return all(p == q for p, q in pairs)


def _figures_or_none(name: str, x: Side, y: Side, tolerance: float) -> dict[str, Any]:
    try:
        return _figures(name, x, y, tolerance)
    except AprError:
        return {}


def _figures(name: str, x: Side, y: Side, tolerance: float) -> dict[str, Any]:
    """How far the decoded values are apart; NaN against a number is an infinite distance."""
    import numpy as np

    n_different, largest, squares = 0, 0.0, 0.0
    streams = (values(side.dtype, side.shape, side.chunks, name=name) for side in (x, y))
    for p, q in zip(*streams, strict=True):
        p64, q64 = p.astype(np.float64), q.astype(np.float64)
        with np.errstate(invalid="ignore", over="ignore"):
            distance = np.abs(p64 - q64)
        distance[(p64 == q64) | (np.isnan(p64) & np.isnan(q64))] = 0.0
        distance[np.isnan(distance)] = np.inf
        n_different += int((distance > tolerance).sum())
        largest = max(largest, float(distance.max()))
        squares += float(np.einsum("i,i->", distance, distance))
    n = n_elements(x.shape)
    return {
        "n_values": n,
        "n_different": n_different,
        "max_diff": largest,
        "rmse": math.sqrt(squares / n) if n else 0.0,
    }
