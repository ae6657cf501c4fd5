"""A page about a model file: dims, which dtype where, how values spread over layers, tokenizer, provenance.

`survey` reads every value once, in constant memory; `html` draws what it found.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

from aprfmt.errors import CorruptError, UnsupportedError
from aprfmt.html import heatmaps
from aprfmt.html.page import facts, folded, grid, heading, page, table, text, tiles
from aprfmt.inspection.describe import describe
from aprfmt.inspection.stats import Stats, blocks
from aprfmt.model import Model, Tensor
from aprfmt.text import format_number
from aprfmt.types import Array

if TYPE_CHECKING:
    pass

_BINS = 128
_PIXELS = 64
_NOWHERE = -1  # stands for the layer of a tensor that is in none
_LAYER = re.compile(r"(?:^|\.)(\d{1,9})\.")
_DIMS = (
    *(("num_layers", "layers"), ("hidden_size", "hidden"), ("intermediate_size", "feed-forward")),
    *(("num_heads", "heads"), ("num_kv_heads", "kv heads"), ("head_dim", "head dim")),
    *(("vocab_size", "vocabulary"), ("max_position_embeddings", "context")),
    *(("num_experts", "experts"), ("num_experts_per_tok", "experts used")),
    *(("rope_theta", "rope theta"), ("rms_norm_eps", "norm eps")),
)
_LONG = 600  # characters of a metadata value on the page


class Histogram:
    """Counts over 128 equal bins from -reach to reach, which the first block of values decides.

    What lies beyond counts in the end bins, what is not finite nowhere.
    """

    def __init__(self) -> None:
        self.reach = 0.0
        self._counts: Array | None = None

    def add(self, block: Array) -> None:
        """Takes the values of `block` in."""
        import numpy as np

        values = block.view(block.real.dtype) if block.dtype.kind == "c" else block
        values = values.astype(np.float64 if values.dtype.itemsize > 4 else np.float32, copy=False)
        values = values[np.isfinite(values)]
        if not values.size:
            return
        if self._counts is None:
            rms = math.sqrt(float(np.mean(np.square(values, dtype=np.float64))))
            self.reach = 1.25 * min(float(np.abs(values).max()), 8 * rms) or 1.0
            self._counts = np.zeros(_BINS, np.int64)
        scaled = (values.astype(np.float64) / self.reach + 1) * (_BINS / 2)
        self._counts += np.bincount(np.clip(scaled, 0, _BINS - 1).astype(np.int16), minlength=_BINS)

    def to_json(self) -> dict[str, Any] | None:
        """{reach, counts}; None where no finite value was seen."""
        return None if self._counts is None else {"reach": self.reach, "counts": self._counts.tolist()}


def survey(model: Model, advance: Callable[[int, str], None] | None = None) -> dict[str, Any]:
    """What `apr inspect --json` says, and of every tensor figures and a histogram; `advance` hears of bytes read."""
    rows = []
    for tensor in model.tensors.entries:
        rows.append(_row(tensor))
        if advance is not None:
            advance(tensor.n_bytes, tensor.name)
    tokenizer = model.tokenizer
    words = (
        {}
        if tokenizer is None
        else {name: _token(tokenizer.tokens, i) for name, i in tokenizer.special.items()}
    )
    template = tokenizer.chat_template if tokenizer is not None else None
    found = {
        "special_tokens": words,
        "chat_template": template,
        "lineage": model.metadata.get("aprfmt.lineage"),
    }
    return {**describe(model).to_json(), **found, "tensors": rows}


def _token(tokens: Sequence[str], index: int) -> str:
    return f"{index} {tokens[index]!r}" if 0 <= index < len(tokens) else str(index)


def _row(tensor: Tensor) -> dict[str, Any]:
    stats, histogram = Stats(), Histogram()
    row: dict[str, Any] = {
        "name": tensor.name,
        "dtype": tensor.dtype,
        "shape": list(tensor.shape),
        "size_bytes": tensor.n_bytes,
    }
    try:
        for block in blocks(tensor):
            stats.add(block)
            histogram.add(block)
    except (CorruptError, UnsupportedError) as error:  # one odd tensor does not hide the others
        return row | dict.fromkeys(Stats().to_json()) | {"histogram": None, "error": error.message}
    return row | stats.to_json() | {"histogram": histogram.to_json()}


def _placed(
    rows: Sequence[dict[str, Any]],
) -> tuple[dict[str, dict[int, list[dict[str, Any]]]], list[dict[str, Any]]]:
    """Kind -> layer -> its tensors (several where there are experts), and the tensors of no layer."""
    kinds: dict[tuple[str, str], dict[int, list[dict[str, Any]]]] = {}
    rest = []
    for row in rows:
        found = _LAYER.search(row["name"])
        if found is None:
            rest.append(row)
            continue
        tail = re.sub(r"\.\d+\.", ".*.", row["name"][found.end() :])
        key = row["name"][: found.start()], tail
        kinds.setdefault(key, {}).setdefault(int(found[1]), []).append(row)
    alone = len({prefix for prefix, _ in kinds}) == 1
    return {tail if alone else f"{prefix}.{tail}": layers for (prefix, tail), layers in kinds.items()}, rest


def html(body: Mapping[str, Any]) -> str:
    """The page of what `survey` found."""
    kinds, rest = _placed(body["tensors"])
    layers = sorted({layer for found in kinds.values() for layer in found})
    maps = [
        _dtype_map(kinds, layers),
        _figure_map("Spread of the values (standard deviation), each row by itself", "std", kinds, layers),
        _figure_map("Largest magnitude, each row by itself", "largest", kinds, layers),
    ]
    pictures = [_pictures(kind, found) for kind, found in kinds.items()]
    parts = [*_head(body), _tiles(body), *_tables(body)]
    if layers:
        parts += [heading("Layers"), *maps]
        parts += [heading("Values of every layer, first on top"), grid(pictures)]
    parts += [*_rest(rest), *_tokenizer(body), *_provenance(body)]
    return page(f"{body['file']}: {body['format']}", parts, style=heatmaps.STYLE)


def _head(body: Mapping[str, Any]) -> Iterator[str]:
    yield f"<h1>{text(body['metadata'].get('name') or body['file'])}</h1>"
    arch = body["architecture"] or "unknown architecture"
    yield f"<p class=lead>{text(arch)}, {format_number(body['param_count'])} parameters, {text(body['format'])}</p>"
    yield f"<p class=soft>{text(body['file'])}</p>"
    bad = sum((t["nan_count"] or 0) + (t["inf_count"] or 0) for t in body["tensors"])
    if bad:
        yield f"<p class=bad>{bad:,} values are NaN or infinite</p>"
    for tensor in body["tensors"]:
        if "error" in tensor:
            yield f"<p class=bad>{text(tensor['name'])} cannot be read: {text(tensor['error'])}</p>"
    for warning in body["warnings"]:
        yield f"<p class=warn>{text(warning)}</p>"


def _tiles(body: Mapping[str, Any]) -> str:
    metadata = body["metadata"]
    rows = [("size", f"{format_number(body['size_bytes'])}B", f"{body['size_bytes']:,} bytes", "")]
    stored = sum(row["bytes"] for row in body["dtypes"].values())
    bits = f"{8 * stored / body['param_count']:.2f}" if body["param_count"] else "–"
    rows += [("parameters", format_number(body["param_count"]), "", ""), ("bits a weight", bits, "", "")]
    rows += [("tensors", f"{body['tensor_count']:,}", "", "")]
    rows += [(label, _number(metadata[key]), "", "") for key, label in _DIMS if metadata.get(key) is not None]
    return tiles(rows)


def _number(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return (
        f"{value:g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
    )


def _tables(body: Mapping[str, Any]) -> Iterator[str]:
    total = sum(row["bytes"] for row in body["dtypes"].values()) or 1
    rows = [
        [
            name,
            f"{row['tensors']:,}",
            format_number(row["params"]),
            f"{row['bytes']:,}",
            f"{row['bytes'] / total:.1%}",
        ]
        for name, row in body["dtypes"].items()
    ]
    if rows:
        yield heading("Dtypes")
        yield table(
            ["dtype", "tensors", "params", "bytes", "share"], rows, right="tensors|params|bytes|share"
        )


def _dtype_map(kinds: Mapping[str, Mapping[int, Sequence[dict[str, Any]]]], layers: Sequence[int]) -> str:
    names = list(dict.fromkeys(t["dtype"] for found in kinds.values() for ts in found.values() for t in ts))
    look = {name: (i % 4, 1.0 if i < 4 else 0.4) for i, name in enumerate(names)}

    def cell(kind: str, layer: int, tensors: Sequence[dict[str, Any]]) -> heatmaps.Cell:
        first = tensors[0]
        colour, strength = look[first["dtype"]]
        words = " or ".join(sorted({t["dtype"] for t in tensors}))
        shape = " × ".join(map(str, first["shape"]))
        return heatmaps.Cell(strength, f"layer {layer} {kind}: {words}, {shape}", colour)

    legend = heatmaps.legend([(name, *look[name]) for name in names])
    rows = [_cells(kind, found, layers, cell) for kind, found in kinds.items()]
    return heatmaps.heat_map("Dtypes", rows, [str(layer) for layer in layers], legend)


def _cells(
    kind: str,
    found: Mapping[int, Sequence[dict[str, Any]]],
    layers: Sequence[int],
    cell: Callable[[str, int, Sequence[dict[str, Any]]], heatmaps.Cell],
) -> tuple[str, list[heatmaps.Cell]]:
    return kind, [
        cell(kind, layer, found[layer]) if layer in found else heatmaps.Cell(None) for layer in layers
    ]


def _figure_map(
    title: str, name: str, kinds: Mapping[str, Mapping[int, Sequence[dict[str, Any]]]], layers: Sequence[int]
) -> str:
    """Each row from its least value (pale) to its largest."""
    rows = []
    for kind, found in kinds.items():
        values = {layer: _figure(name, tensors) for layer, tensors in found.items()}
        known = [v for v in values.values() if v is not None]
        low, span = (min(known), max(known) - min(known)) if known else (0.0, 0.0)
        cells = [_shade(kind, layer, values.get(layer), low, span) for layer in layers]
        rows.append((kind, cells))
    return heatmaps.heat_map(title, rows, [str(layer) for layer in layers])


def _shade(kind: str, layer: int, value: float | None, low: float, span: float) -> heatmaps.Cell:
    if value is None:
        return heatmaps.Cell(None)
    return heatmaps.Cell((value - low) / span if span else 0.5, f"layer {layer} {kind}: {value:.4g}")


def _figure(name: str, tensors: Sequence[dict[str, Any]]) -> float | None:
    """Of one tensor; of experts the largest of all, or the mean spread."""
    if name == "largest":
        return max((max(abs(t["min"]), abs(t["max"])) for t in tensors if t["min"] is not None), default=None)
    found = [t[name] for t in tensors if t[name] is not None]
    return fmean(found) if found else None


def _pictures(kind: str, found: Mapping[int, Sequence[dict[str, Any]]]) -> str:
    """The histograms of all layers, over the range that holds 99.9 % of the values of each."""
    rows = {}
    for layer in sorted(found):
        known = [t["histogram"] for t in found[layer] if t["histogram"] is not None]
        if known:
            rows[layer] = known
    reach = max((_within(h) for known in rows.values() for h in known), default=0.0)
    if not reach:
        return ""
    lines = [_rebinned(known, reach) for known in rows.values()]
    ends = list(rows)
    labels = ("", "") if ends == [_NOWHERE] else (f"layer {ends[0]}", str(ends[-1]))
    return heatmaps.histograms(kind, lines, reach, labels)


def _within(histogram: Mapping[str, Any]) -> float:
    """The magnitude below which 99.9 % of the values lie, by the edges of bins."""
    counts = histogram["counts"]
    left, half = 0.001 * sum(counts), _BINS // 2
    for i in range(half):
        left -= counts[i] + counts[_BINS - 1 - i]
        if left < 0:
            return float(histogram["reach"]) * (half - i) / half
    return float(histogram["reach"]) / half


def _rebinned(known: Sequence[Mapping[str, Any]], reach: float) -> list[float]:
    """The counts of several histograms over _PIXELS bins from -reach to reach; each bin spread evenly."""
    pixels = [0.0] * _PIXELS
    for histogram in known:
        scale = histogram["reach"] / reach * _PIXELS / _BINS  # pixels a bin
        for i, count in enumerate(histogram["counts"]):
            if count:
                start = _PIXELS / 2 + (i - _BINS / 2) * scale
                _spread(pixels, start, start + scale, count / scale)
    return pixels


def _spread(pixels: list[float], start: float, stop: float, density: float) -> None:
    for i in range(max(0, math.floor(start)), min(len(pixels), math.ceil(stop))):
        pixels[i] += density * (min(stop, i + 1) - max(start, i))


def _rest(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    if not rows:
        return
    yield heading("Tensors of no layer")
    names = ("mean", "std", "min", "max")
    cells = [
        [t["name"], t["dtype"], " × ".join(map(str, t["shape"])), *(_short(t[name]) for name in names)]
        for t in rows
    ]
    yield table(["tensor", "dtype", "shape", *names], cells, right="|".join(names))
    yield grid(_pictures(t["name"], {_NOWHERE: [t]}) for t in rows)


def _short(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def _tokenizer(body: Mapping[str, Any]) -> Iterator[str]:
    yield heading("Tokenizer")
    info = body["tokenizer"]
    if info is None:
        yield "<p class=soft>none embedded</p>"
        return
    rows = [(name.replace("_", " "), _number(value)) for name, value in info.items() if value is not None]
    yield facts(rows)
    yield folded("Special tokens", facts((f"{k}", v) for k, v in body["special_tokens"].items()))
    if body["chat_template"]:
        yield folded("Chat template", facts([("jinja", body["chat_template"])]))


def _provenance(body: Mapping[str, Any]) -> Iterator[str]:
    shown = {key for key, _ in _DIMS}
    rows = [
        (key, "(missing)" if value is None else _value(value))
        for key, value in body["metadata"].items()
        if key not in shown and not key.startswith("tokenizer.") and key != "chat_template"
    ]
    yield heading("Provenance and metadata") + facts(rows)
    lineage = body["lineage"]
    if isinstance(lineage, Mapping):
        yield folded("Lineage of its training", facts((str(k), _value(v)) for k, v in lineage.items()))
    yield heading("Checksums") + facts((name, str(state)) for name, state in body["checksum"].items())


def _value(value: Any) -> str:
    words = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
    return words if len(words) <= _LONG else f"{words[:_LONG]}…"
