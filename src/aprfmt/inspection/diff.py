"""Compares two models: container, metadata, tensors by Hugging Face name, bytes or decoded values."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from threading import Lock
from typing import TypeGuard

from aprfmt import formats
from aprfmt.canonical.base_model import find_base
from aprfmt.canonical.lora import to_hf
from aprfmt.canonical.lora_pairs import Adapter, Base, LoraPair
from aprfmt.canonical.model_kinds import is_adapter
from aprfmt.canonical.packed import AS_STORED, AS_VALUES, Decoding
from aprfmt.canonical.read import canonical
from aprfmt.canonical.tensor import CanonicalTensor
from aprfmt.codecs.stream import regroup
from aprfmt.errors import AprError, RefusedError, UnmappedError, UnsupportedError, UsageError
from aprfmt.formats.hfdir import HfNative
from aprfmt.inspection.comparison import Comparison, ModelDifference
from aprfmt.inspection.describe import typed_metadata
from aprfmt.inspection.distance import (
    Distance,
    DistanceSums,
    TensorFigures,
    TotalFigures,
    bits_of,
    form_of,
    identical,
    measure,
    same_sums,
    side_by_side,
    together,
)
from aprfmt.inspection.quantized import count_packed
from aprfmt.io.pipe import MOST_THREADS, Flow, Progress, StartProgress, is_same_content
from aprfmt.io.sink import check_target
from aprfmt.io.source import read_whole
from aprfmt.model import Model
from aprfmt.text import plural
from aprfmt.types import PathLike

# Typed APR fields that some other container cannot store, and the template, which the tokenizers show.
_APR_ONLY = (
    *("model_type", "original_format", "created_at", "total_size", "param_count"),
    *("hf_architecture", "hf_model_type", "chat_template"),
)
_MAX_TEXT = 120
_COMPARE_BYTES = 1 << 20
_LARGE_BYTES = 32 << 20


def diff(
    a: PathLike,
    b: PathLike,
    *,
    values: bool = False,
    tolerance: float = 0.0,
    metadata_only: bool = False,
    base: PathLike | None = None,
    threads: int | None = None,
    output: PathLike | None = None,
    force: bool = False,
    progress: StartProgress | None = None,
) -> Comparison:
    """Compares two models: container, metadata, tensor names, dtypes, shapes and bytes.

    Args:
        a, b: the models; their formats may differ.
        values: compare only tensors, decoded and in the same row order, so containers and dtypes may differ. Two values
            are equal if they differ by at most `tolerance` or are both NaN. The result then has metrics of every tensor
            (RMSE, SNR, cosine, bits per weight).
        metadata_only: compare only the metadata.
        base: base model of two adapters, which determines their row order in a GGUF; adapters are compared by factors
            and scales.
        threads: worker threads; None: one per CPU.
        output: with `values`, an HTML page to write; `force` replaces an existing one.
        progress: called with the number of bytes of `a`; returns a function to call with (bytes, tensor).

    Raises:
        UsageError: contradictory options.
        ExistsError: the output exists, without `force`.
    """
    _check_options(values, tolerance, metadata_only, threads, output)
    names = os.fspath(a), os.fspath(b)
    with formats.open_unchanged(a) as left, formats.open_unchanged(b) as right:
        if output is not None:
            inputs = [source.path for model in (left, right) for source in model.sources]
            check_target(output, [*inputs, *(() if base is None else [os.fspath(base)])], force)
        elif same_files(left, right):
            same = ["the files are byte-identical"]
            return Comparison(*names, notes=same, tensors=[] if values else None)
        differences: list[ModelDifference] = []
        notes: list[str] = []
        if not values:
            differences += _metadata_differences(left, right)
        elif left.label != right.label:
            notes.append(f"{left.label} and {right.label}: --values ignores container and metadata")
        found = Comparison(*names, differences, 0, notes)
        if not metadata_only:
            of = _base(left, right, base)
            differences += _scale_differences(left, right, of)
            n_bytes = sum(t.n_bytes for t in left.tensors.entries)
            advance = progress(n_bytes) if progress is not None else lambda n_bytes, label: None
            pairs = list(_pairs(left, right, of, AS_VALUES if values else AS_STORED))
            if values:
                found = _by_value(found, (left, right), pairs, tolerance, Flow(threads or 0), advance)
            else:
                found = replace(found, tensors_compared=sum(None not in pair for pair in pairs))
                for name, x, y in pairs:
                    differences += _tensor_differences(name, x, y)
                    advance(x.n_bytes if x is not None else 0, name)
    if output is not None:
        from aprfmt.html.file import write_page
        from aprfmt.inspection.diff_page import html

        write_page(output, html(found), force=force)
    return found


def _check_options(
    values: bool, tolerance: float, metadata_only: bool, threads: int | None, output: PathLike | None
) -> None:
    if math.isnan(tolerance):
        raise UsageError("--tolerance is not a number")
    if tolerance and not values:
        raise UsageError("--tolerance needs --values", hint="apr diff A B --values --tolerance 1e-3")
    if values and metadata_only:
        raise UsageError("--values and --metadata-only are mutually exclusive")
    if threads is not None and not 1 <= threads <= MOST_THREADS:
        raise UsageError(f"{threads} threads", hint=f"--threads must be between 1 and {MOST_THREADS}")
    if output is None:
        return
    if not values:
        raise UsageError("-o page.html needs --values", hint="apr diff A B --values -o page.html")
    from aprfmt.html.file import check_page

    check_page(output)


_Pair = tuple[str, CanonicalTensor | None, CanonicalTensor | None]


def _by_value(
    found: Comparison,
    models: tuple[Model, Model],
    pairs: Sequence[_Pair],
    tolerance: float,
    flow: Flow,
    advance: Progress,
) -> Comparison:
    """`found` with the differences of decoded values, and the metrics of every tensor, the worst first."""
    differences = list(found.differences)
    common: list[tuple[str, CanonicalTensor, CanonicalTensor]] = []
    for name, x, y in pairs:
        if x is None or y is None:
            differences.append(_difference(name, x, y, "missing"))
        elif x.shape != y.shape:
            differences.append(_difference(name, x, y, "shape"))
        else:
            common.append((name, x, y))

    one_at_a_time = Lock()

    def compare(pair: tuple[str, CanonicalTensor, CanonicalTensor], is_over: Callable[[], bool]) -> DistanceSums | None:
        name, x, y = pair
        if x.dtype == y.dtype and x.n_bytes == y.n_bytes and _same_bytes(x, y):
            return None
        # Tensors that must be in memory whole (a transposed matrix) are there once, not once per thread.
        is_large = max(x.produced.held_bytes, y.produced.held_bytes) > _LARGE_BYTES
        with one_at_a_time if is_large else nullcontext():
            return measure(name, x, y, tolerance, is_over)

    sums = []
    for (name, x, _), result in zip(common, side_by_side(common, compare, flow), strict=True):
        advance(x.n_bytes, name)
        sums.append(result)
    if any(result is not None for result in sums):  # their energy counts in the total
        equal = [i for i, result in enumerate(sums) if result is None]
        again = side_by_side([common[i] for i in equal], lambda pair, over: same_sums(pair[0], pair[1], over), flow)
        for i, result in zip(equal, again, strict=True):
            sums[i] = result
    figures = []
    for (name, x, y), result in zip(common, sums, strict=True):
        distance = identical(x) if result is None else result.distance()
        kept = result or DistanceSums(n=distance.n_values)
        figures.append(TensorFigures(name, form_of(x), form_of(y), bits_of(x), bits_of(y), distance, kept))
        if distance.n_different:
            differences.append(_difference(name, x, y, "values", distance))
    figures.sort(key=lambda row: row.distance.badness, reverse=True)
    compared = len(common) + sum(row.what == "shape" for row in differences)
    totals = _totals(models, len(common), together(figures)) if common else None
    return replace(found, differences=differences, tensors_compared=compared, tensors=figures, total=totals)


def _totals(models: tuple[Model, Model], n_tensors: int, distance: Distance) -> TotalFigures:
    sizes = [sum(t.n_bytes for t in model.tensors.entries) for model in models]
    counts = [count_packed(model).param_count for model in models]
    bits = [8 * size / n if n else None for size, n in zip(sizes, counts, strict=True)]
    return TotalFigures(n_tensors, sizes[0], sizes[1], bits[0], bits[1], distance)


def same_files(a: Model, b: Model) -> bool:
    """Whether all files of both models are byte-identical."""
    if a.format != b.format or [s.size for s in a.sources] != [s.size for s in b.sources]:
        return False
    if a.convention == "hf":
        return False  # config and tokenizer are separate files
    return all(map(is_same_content, a.sources, b.sources))


def _metadata_differences(a: Model, b: Model) -> Iterator[ModelDifference]:
    if a.label != b.label:
        yield ModelDifference("format", "container", a.label, b.label)
    elif a.version != b.version:
        yield ModelDifference("format", "container", f"{a.label} {a.version}", f"{b.label} {b.version}")
    left: Mapping[str, object]
    right: Mapping[str, object]
    if a.format == b.format:
        left, right = dict(a.metadata), dict(b.metadata)
        if a.flags != b.flags:
            flags = [sorted(name for name, value in model.flags.items() if value) for model in (a, b)]
            yield ModelDifference("format", "flags", flags[0], flags[1])
    else:
        left, right = (
            {key: value for key, value in typed_metadata(model).items() if key not in _APR_ONLY} for model in (a, b)
        )
    for key in dict.fromkeys((*left, *right)):
        if (key in left) != (key in right) or not same_value(left.get(key), right.get(key)):
            yield _metadata_difference(key, left.get(key), right.get(key))
    yield from _tokenizer_differences(a, b)
    left_files, right_files = (model.native_as(HfNative) for model in (a, b))
    if left_files is not None and right_files is not None:
        yield from _file_differences(left_files, right_files)


def _file_differences(a: HfNative, b: HfNative) -> Iterator[ModelDifference]:
    """The other files of two folders; JSON by its data, config.json was compared as metadata."""
    left, right = ({p.as_posix(): m.folder / p for p in m.other_files} for m in (a, b))
    for name in sorted({*left, *right} - {"config.json"}):
        x, y = left.get(name), right.get(name)
        if x is None or y is None:
            yield ModelDifference("metadata", name, _presence(x), _presence(y))
            continue
        p, q = read_whole(x), read_whole(y)
        if p != q and not (x.suffix == ".json" and _same_json(p, q)):
            yield ModelDifference("metadata", name, f"{len(p)} bytes", f"{len(q)} bytes", what="content")


def _presence(thing: object) -> str:
    return "absent" if thing is None else "present"


def _same_json(p: bytes, q: bytes) -> bool:
    try:
        return bool(json.loads(p) == json.loads(q))
    except (ValueError, RecursionError):  # not JSON after all: the bytes decide
        return False


def same_value(x: object, y: object) -> bool:
    """Whether two metadata values are equal; floats may differ by rounding to 32 bits."""
    if isinstance(x, float) and isinstance(y, float):
        return x == y or (math.isnan(x) and math.isnan(y)) or math.isclose(x, y, rel_tol=1e-7)
    if _is_list(x) and _is_list(y):
        return len(x) == len(y) and all(map(same_value, x, y))
    return bool(x == y)


def _is_list(value: object) -> TypeGuard[Collection[object]]:
    return hasattr(value, "__len__") and not isinstance(value, (str, bytes, Mapping))


def _short(value: object) -> object:
    """`value` shortened for printing: long texts are truncated, long lists and objects are counted."""
    if isinstance(value, str) and len(value) > _MAX_TEXT:
        return f"{value[:_MAX_TEXT]}… ({len(value)} characters)"
    if _is_list(value):
        long = len(value) > 8 or len(repr(list(value))) > _MAX_TEXT
        return f"[{plural(len(value), 'item')}]" if long else list(value)
    if isinstance(value, Mapping) and (len(value) > 8 or len(repr(value)) > _MAX_TEXT):
        return f"{{{plural(len(value), 'key')}}}"
    return value


def _metadata_difference(name: str, x: object, y: object) -> ModelDifference:
    first = None
    if _is_list(x) and _is_list(y):
        pairs = enumerate(zip(x, y, strict=False))
        first = next((i for i, (p, q) in pairs if not same_value(p, q)), min(len(x), len(y)))
    a, b = _short(x), _short(y)
    what = "content" if first is None and same_value(a, b) else None  # both are shortened to the same text
    return ModelDifference("metadata", name, a, b, what, first_difference=first)


def _tokenizer_differences(a: Model, b: Model) -> Iterator[ModelDifference]:
    """Compares the tokenizers as data across containers; within one the metadata has shown everything."""
    if a.format == b.format and a.convention != "hf":
        return
    left, right = a.tokenizer, b.tokenizer
    if left is None or right is None:
        if left is not right:
            yield ModelDifference("metadata", "tokenizer", _presence(left), _presence(right))
        return
    for name in ("model", "pre", "tokens", "merges", "types", "scores", "special", "chat_template"):
        x, y = getattr(left, name), getattr(right, name)
        if not same_value(x, y):
            yield _metadata_difference(f"tokenizer.{name}", x, y)


def _base(a: Model, b: Model, given: PathLike | None) -> Base | None:
    """The base models of two adapters, as far as known."""
    both = (a, b)
    if not all(map(is_adapter, both)):
        if given is not None:
            raise UsageError("--base applies only when both inputs are adapters")
        return None
    return next((found for model in both if (found := find_base(model, given)) is not None), None)


def _adapters(a: Model, b: Model, base: Base | None) -> list[tuple[Adapter, dict[str, LoraPair]]]:
    """Both adapters with their pairs by Hugging Face names, if possible for both; [] otherwise."""
    found = []
    try:
        for model in (a, b):
            adapter = canonical(model, base=base).adapter
            if adapter is not None:
                found.append((adapter, to_hf(adapter, model.path)))
    except RefusedError:
        return []
    return found if len(found) == 2 else []


def _scale_differences(a: Model, b: Model, base: Base | None) -> Iterator[ModelDifference]:
    """Scales of two adapters, which are not tensors but part of their updates."""
    found = _adapters(a, b, base)
    for name in found[0][1] if found else ():
        x, y = (pairs.get(name) for _, pairs in found)
        if x is not None and y is not None and not math.isclose(x.scale, y.scale, rel_tol=1e-6):
            yield ModelDifference("metadata", f"{name} scale", x.scale, y.scale)


def _pairs(
    a: Model, b: Model, base: Base | None, decoding: Decoding
) -> Iterator[tuple[str, CanonicalTensor | None, CanonicalTensor | None]]:
    """Tensors under Hugging Face names; under their own if that is impossible for either model."""
    if found := _adapters(a, b, base):
        left, right = ({**replace(adapter, pairs=pairs).tensors} for adapter, pairs in found)
    else:
        try:
            both = canonical(a, decoding=decoding), canonical(b, decoding=decoding)
            # Files of folders are compared separately, as far as they belong to the model.
            with_files = all(model.convention == "apr" for model in (a, b))
            left, right = (c.stored if with_files else c.all_tensors for c in both)
        except (UnmappedError, RefusedError, UnsupportedError):
            left, right = ({t.name: CanonicalTensor(t.name, (t,)) for t in m.tensors.entries} for m in (a, b))
    for name in dict.fromkeys((*left, *right)):
        yield name, left.get(name), right.get(name)


def _difference(
    name: str, x: CanonicalTensor | None, y: CanonicalTensor | None, what: str, distance: Distance | None = None
) -> ModelDifference:
    sides = [None if side is None else f"{side.dtype} {list(side.shape)}" for side in (x, y)]
    return ModelDifference("tensor", name, sides[0], sides[1], what, distance=distance)


def _tensor_differences(name: str, x: CanonicalTensor | None, y: CanonicalTensor | None) -> Iterator[ModelDifference]:
    """How two tensors differ as stored."""
    if x is None or y is None:
        yield _difference(name, x, y, "missing")
    elif x.shape != y.shape:
        yield _difference(name, x, y, "shape")
    elif x.dtype != y.dtype:
        yield _difference(name, x, y, "dtype")
    elif x.n_bytes != y.n_bytes or not _same_bytes(x, y):
        distance = None
        with suppress(AprError):  # bytes that cannot be decoded still differ
            distance = measure(name, x, y, 0.0).distance()
        yield _difference(name, x, y, "bytes", distance)


def _same_bytes(x: CanonicalTensor, y: CanonicalTensor) -> bool:
    if x.scales != y.scales:
        return False
    streams = (regroup(side.chunks(), _COMPARE_BYTES, _COMPARE_BYTES) for side in (x, y))
    return all(p == q for p, q in zip(*streams, strict=True))
