"""A page about a model file: dims, which dtype where, how values spread over layers, tokenizer, provenance.

`survey` reads every value once, in constant memory; `html` draws what it found.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean

from aprfmt.codecs.values import Histogram
from aprfmt.errors import ChangedError, CorruptError, UnsupportedError
from aprfmt.html.charts import histograms
from aprfmt.html.heatmaps import Cell, Legend, Scale, heat_map
from aprfmt.html.page import facts, fold, grid, heading, headline, page, paragraph, table, tiles
from aprfmt.inspection.describe import DIMS, Inspection, describe
from aprfmt.inspection.layers import Layers, by_layer
from aprfmt.inspection.stats import Stats, blocks
from aprfmt.io.pipe import Progress
from aprfmt.model import Model, Tensor
from aprfmt.text import format_bytes, format_count, format_shape, plural

_MAX_VALUE_CHARS = 600
_SHOWN_ROWS = 500
"""Rows of tensors in the document: its search box finds the others too."""


@dataclass(frozen=True, slots=True)
class TensorValues:
    """What the values of a tensor are like; `error` where they could not be read."""

    tensor: Tensor
    stats: Mapping[str, float | None]
    histogram: Histogram
    error: str | None = None

    def to_json(self) -> dict[str, object]:
        """The tensor's row in the JSON object."""
        t = self.tensor
        row = {"name": t.name, "dtype": t.dtype, "shape": list(t.shape), "size_bytes": t.n_bytes}
        row |= {**self.stats, "histogram": self.histogram.to_json()}
        return row if self.error is None else row | {"error": self.error}


@dataclass(frozen=True, slots=True)
class Survey:
    """What `apr inspect --json` says of a model, and the values of every tensor."""

    inspection: Inspection
    special_tokens: Mapping[str, str]
    chat_template: str | None
    lineage: object
    tensors: list[TensorValues]

    def to_json(self) -> dict[str, object]:
        """The JSON object of `apr report MODEL`."""
        return {
            **self.inspection.to_json(),
            "special_tokens": self.special_tokens,
            "chat_template": self.chat_template,
            "lineage": self.lineage,
            "tensors": [row.to_json() for row in self.tensors],
        }


def survey(model: Model, progress: Progress | None = None) -> Survey:
    """Reads every value of `model`; `progress` is called for each tensor."""
    rows = []
    for tensor in model.tensors.entries:
        rows.append(_read(tensor))
        if progress is not None:
            progress(tensor.n_bytes, tensor.name)
    tokens, template = dict[str, str](), None
    if (tokenizer := model.tokenizer) is not None:
        template = tokenizer.chat_template
        for name, i in tokenizer.special.items():
            tokens[name] = f"{i} {tokenizer.tokens[i]!r}" if 0 <= i < len(tokenizer.tokens) else str(i)
    return Survey(describe(model), tokens, template, model.metadata.get("aprfmt.lineage"), rows)


def _read(tensor: Tensor) -> TensorValues:
    stats, histogram = Stats(), Histogram()
    try:
        for block in blocks(tensor):
            stats.add(block)
            histogram.add(block)
    except ChangedError:
        raise
    except (CorruptError, UnsupportedError) as error:  # one odd tensor does not hide the others
        return TensorValues(tensor, dict.fromkeys(Stats().to_json()), Histogram(), error.message)
    return TensorValues(tensor, stats.to_json(), histogram)


def html(found: Survey) -> str:
    """The page of what `survey` found."""
    kinds, rest = by_layer(found.tensors, lambda row: row.tensor.name)
    layers = sorted({layer for of_kind in kinds.values() for layer in of_kind})
    dtypes = found.inspection.dtypes
    total = sum(row["bytes"] for row in dtypes.values())
    rows = [
        [
            *(name, f"{row['tensors']:,}", format_count(row["params"])),
            *(format_bytes(row["bytes"]), f"{row['bytes'] / (total or 1):.1%}"),
            f"{8 * row['bytes'] / row['params']:.2f}" if row["params"] else "",
        ]
        for name, row in dtypes.items()
    ]
    parts = [*_head(found), _tiles(found, total)]
    if rows:
        header = ["dtype", "tensors", "params", "size", "share", "bits/weight"]
        parts.append(heading("Dtypes") + table(header, rows, right="|".join(header[1:]), stack=True))
    if layers:
        parts += [heading("Layers"), _dtype_map(kinds, layers)]
        for title, figure in (("Standard deviation of values", _mean_std), ("Largest magnitude", _largest)):
            parts += _figure_maps(title, figure, kinds, layers)
        pictures = [_histograms(kind, of_kind) for kind, of_kind in kinds.items()]
        parts += [heading("Values by layer, first layer on top"), grid(pictures)]
    if rest:
        parts += [heading("Values of tensors outside the layers")]
        parts.append(grid(_histograms(row.tensor.name, {0: [row]}) for row in rest))
    parts += [*_tensors(found.tensors), *_tokenizer(found), *_provenance(found)]
    return page(f"{found.inspection.file}: {found.inspection.format}", parts)


def _head(found: Survey) -> Iterator[str]:
    what = found.inspection
    yield headline(str(what.metadata.get("name") or what.file))
    arch = what.architecture or "unknown architecture"
    yield paragraph(f"{arch}, {format_count(what.param_count)} parameters, {what.format}", "lead")
    yield paragraph(what.file)
    bad = sum(int(row.stats[key] or 0) for row in found.tensors for key in ("nan_count", "inf_count"))
    if bad:
        yield paragraph(f"{plural(bad, 'value')} {'are' if bad > 1 else 'is'} NaN or infinite", "bad")
    for row in found.tensors:
        if row.error is not None:
            yield paragraph(f"{row.tensor.name} cannot be read: {row.error}", "bad")
    for warning in what.warnings:
        yield paragraph(warning, "warn")


def _tiles(found: Survey, stored: int) -> str:
    what = found.inspection
    metadata = what.metadata
    bits = f"{8 * stored / what.param_count:.2f}" if what.param_count else "–"
    rows = [
        ("size", format_bytes(what.size_bytes), f"{what.size_bytes:,} bytes", ""),
        ("parameters", format_count(what.param_count), "", ""),
        ("bits per weight", bits, "", ""),
        ("tensors", f"{what.tensor_count:,}", "", ""),
    ]
    rows += [(label, _number(metadata[key]), "", "") for key, label in DIMS if metadata.get(key) is not None]
    return tiles(rows)


def _number(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if value.is_integer() else f"{value:g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _dtype_map(kinds: Mapping[str, Layers[TensorValues]], layers: Sequence[int]) -> str:
    names = dict.fromkeys(row.tensor.dtype for found in kinds.values() for rows in found.values() for row in rows)
    look = {name: Cell(1.0 if i < 4 else 0.4, colour=i % 4) for i, name in enumerate(names)}

    def cell(kind: str, layer: int, rows: Sequence[TensorValues]) -> Cell:
        first = rows[0].tensor
        dtypes = " or ".join(sorted({row.tensor.dtype for row in rows}))
        return replace(look[first.dtype], words=f"layer {layer} {kind}: {dtypes}, {format_shape(first.shape)}")

    squares = [
        (kind, [cell(kind, layer, found[layer]) if layer in found else Cell(None) for layer in layers])
        for kind, found in kinds.items()
    ]
    return heat_map("Dtypes", squares, [str(layer) for layer in layers], Legend(list(look.items())), "layer")


def _figure_maps(
    title: str,
    figure: Callable[[Sequence[TensorValues]], float | None],
    kinds: Mapping[str, Layers[TensorValues]],
    layers: Sequence[int],
) -> Iterator[str]:
    """A map of the matrices and one of the vectors, each with one colour scale: norms are not weights."""
    for name, is_one in (("matrices", False), ("vectors: norms, biases", True)):
        values = {
            kind: {layer: value for layer, rows in found.items() if (value := figure(rows)) is not None}
            for kind, found in kinds.items()
            if (len(next(iter(found.values()))[0].tensor.shape) < 2) == is_one
        }
        scale = Scale.of([value for row in values.values() for value in row.values()])
        squares = [
            (
                kind,
                [
                    Cell(scale.strength(row[layer]), f"layer {layer} {kind}: {row[layer]:.4g}")
                    if layer in row
                    else Cell(None)
                    for layer in layers
                ],
            )
            for kind, row in values.items()
        ]
        yield heat_map(f"{title}: {name}", squares, [str(layer) for layer in layers], scale.legend, "layer")


def _mean_std(rows: Sequence[TensorValues]) -> float | None:
    known = [std for row in rows if (std := row.stats["std"]) is not None]
    return fmean(known) if known else None


def _largest(rows: Sequence[TensorValues]) -> float | None:
    ends = (row.stats[key] for row in rows for key in ("min", "max"))
    return max((abs(end) for end in ends if end is not None), default=None)


def _histograms(kind: str, found: Layers[TensorValues]) -> str:
    """The histograms of all layers, over the range that holds 99.9 % of the values of each."""
    known = {
        layer: seen for layer in sorted(found) if (seen := [r.histogram for r in found[layer] if r.histogram.reach])
    }
    reach = max((histogram.bulk() for seen in known.values() for histogram in seen), default=0.0)
    if not reach:
        return ""
    lines = [list(map(sum, zip(*(h.rebin(reach) for h in seen), strict=True))) for seen in known.values()]
    ends = list(known)
    return histograms(kind, lines, reach, ("", "") if len(ends) == 1 else (f"layer {ends[0]}", str(ends[-1])))


def _tensors(rows: Sequence[TensorValues]) -> Iterator[str]:
    if not rows:
        return
    names = ("mean", "std", "min", "max")
    cells = [
        [
            *(row.tensor.name, row.tensor.dtype, format_shape(row.tensor.shape), format_bytes(row.tensor.n_bytes)),
            *("–" if (value := row.stats[name]) is None else f"{value:.4g}" for name in names),
            "–" if (zeros := row.stats["zero_fraction"]) is None else f"{zeros:.1%}",
        ]
        for row in rows
    ]
    header = ["tensor", "dtype", "shape", "size", *names, "zeros"]
    right = "|".join(header[3:])
    yield heading("Tensors")
    yield table(header, cells, right=right, sortable=True, stack=True, search="tensors", shown=_SHOWN_ROWS)


def _tokenizer(found: Survey) -> Iterator[str]:
    yield heading("Tokenizer")
    info = found.inspection.tokenizer
    if info is None:
        yield paragraph("none embedded")
        return
    yield facts((name.replace("_", " "), _number(value)) for name, value in asdict(info).items() if value is not None)
    yield fold("Special tokens", facts(found.special_tokens.items()))
    if found.chat_template:
        yield fold("Chat template", facts([("jinja", found.chat_template)]))


def _provenance(found: Survey) -> Iterator[str]:
    shown = {key for key, _ in DIMS} | {"chat_template"}
    rows = [
        (key, "(missing)" if value is None else _value(value))
        for key, value in found.inspection.metadata.items()
        if key not in shown and not key.startswith("tokenizer.")
    ]
    yield heading("Provenance and metadata") + facts(rows)
    if isinstance(found.lineage, Mapping):
        yield fold("Training lineage", facts((str(k), _value(v)) for k, v in found.lineage.items()))
    yield heading("Checksums") + facts((name, str(state)) for name, state in found.inspection.checksum.items())


def _value(value: object) -> str:
    words = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
    return words if len(words) <= _MAX_VALUE_CHARS else f"{words[:_MAX_VALUE_CHARS]}…"
