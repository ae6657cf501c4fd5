"""A page about a model file: dims, which dtype where, how values spread over layers, tokenizer, provenance.

`survey` reads every value once, in constant memory; `html` draws what it found.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean

from aprfmt.codecs.values import Histogram
from aprfmt.errors import AprError, ChangedError, CorruptError, RefusedError, UnsupportedError
from aprfmt.formats.stored_keys import StoredKey, stored_keys
from aprfmt.html.charts import histograms
from aprfmt.html.heatmaps import Cell, Legend, against_median, heat_map
from aprfmt.html.page import (
    branch,
    branches,
    code,
    explorer,
    facts,
    fold,
    grid,
    heading,
    headline,
    memory_slider,
    page,
    paragraph,
    table,
    tiles,
)
from aprfmt.inspection.describe import DIMS, Inspection, describe
from aprfmt.inspection.layers import Layers, by_layer
from aprfmt.inspection.memory_table import KV_BYTES, ModelMemory, model_memory
from aprfmt.inspection.stats import Stats, blocks
from aprfmt.inspection.token_explorer import TokenExplorer, token_explorer
from aprfmt.inspection.tree import Tree, tree_of
from aprfmt.io.pipe import Progress
from aprfmt.model import Model, Tensor
from aprfmt.text import format_bytes, format_count, format_shape, plural
from aprfmt.tokenizer.chat_format import template_of
from aprfmt.tokenizer.model import Tokenizer

_MAX_VALUE_CHARS = 600
_SHOWN_ROWS, _SHOWN_KEYS = 40, 20
"""Rows of tensors and of keys that are shown at first; search, sorting and a button have the others."""
_SENTENCE = "The quick brown fox, aged 27, doesn't jump over 12,345 lazy dogs. def f(x):\n    return x"


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
class ModelView:
    """What a page shows of a model beside its values.

    Attributes:
        keys: every metadata key as stored.
        tree: the modules.
        memory: None if the KV cache is unknown.
        example: a conversation rendered by the chat template, or why that failed; None without a template.
        explorer: None without a tokenizer.
    """

    keys: Sequence[StoredKey]
    tree: Tree
    memory: ModelMemory | None
    example: RenderedExample | None
    explorer: TokenExplorer | None


@dataclass(frozen=True, slots=True)
class RenderedExample:
    """The text that a chat template makes of EXAMPLE; `error` if it refuses it."""

    text: str
    error: str | None = None


EXAMPLE = (
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": "What is the capital of France?"},
    {"role": "assistant", "content": "Paris."},
    {"role": "user", "content": "And of Italy?"},
)
"""The conversation that a chat template is shown with; without its system message where that is refused."""


@dataclass(frozen=True, slots=True)
class Survey:
    """What `apr inspect --json` says of a model, and the values of every tensor."""

    inspection: Inspection
    special_tokens: Mapping[str, str]
    chat_template: str | None
    lineage: object
    tensors: list[TensorValues]
    view: ModelView

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
    view = ModelView(
        stored_keys(model),
        tree_of(model, str(model.path)),
        model_memory(model),
        _example(tokenizer) if tokenizer is not None else None,
        token_explorer(tokenizer) if tokenizer is not None else None,
    )
    return Survey(describe(model), tokens, template, model.metadata.get("aprfmt.lineage"), rows, view)


def _example(tokenizer: Tokenizer) -> RenderedExample | None:
    template = template_of(tokenizer)
    if template is None:
        return None
    try:
        try:
            return RenderedExample(template.render(EXAMPLE))
        except RefusedError:
            return RenderedExample(template.render(EXAMPLE[1:]))
    except AprError as error:
        return RenderedExample("", error.message)


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
    parts = [*_head(found), _tiles(found, total), *_memory(found.view.memory)]
    if rows:
        header = ["dtype", "tensors", "params", "size", "share", "bits/weight"]
        parts.append(heading("Dtypes") + table(header, rows, right="|".join(header[1:]), stack=True))
    parts += [heading("Modules"), fold("Module tree, identical layers folded", _graph(found.view.tree))]
    if layers:
        maps = [_dtype_map(kinds, layers)]
        for title, figure in (("Standard deviation of values", _mean_std), ("Largest magnitude", _largest)):
            maps.append(_figure_map(title, figure, kinds, layers))
        pictures = [_histograms(kind, of_kind) for kind, of_kind in kinds.items()]
        parts += [heading("Layers"), fold("Maps by layer", "\n".join(maps), wide=True)]
        parts.append(fold("Values by layer, first layer on top", grid(pictures), wide=True))
    if rest:
        pictures = [_histograms(row.tensor.name, {0: [row]}) for row in rest]
        parts.append(fold("Values of tensors outside the layers", grid(pictures), wide=True))
    parts += [*_tensors(found.tensors), *_tokenizer(found), *_metadata(found.view.keys), *_provenance(found)]
    return page(f"{found.inspection.file}: {found.inspection.format}", parts, viewer=True)


def _memory(memory: ModelMemory | None) -> Iterator[str]:
    if memory is None:
        return
    data = {
        "weights": memory.weights,
        "layers": [[row.values, row.window, row.count] for row in memory.layers],
        "least": min(512, memory.context),
        "most": memory.context,
        "types": dict(KV_BYTES),
    }
    yield heading("Memory by context length")
    yield memory_slider(json.dumps(data), list(KV_BYTES))
    lengths = sorted({memory.context, *(n for n in (2048, 8192, 32_768, 131_072) if n < memory.context)})
    kinds = ("f16", "q8_0", "q4_0")
    rows = [
        [f"{n:,}", *(format_bytes(memory.weights + memory.cache_bytes(n, kind)) for kind in kinds)] for n in lengths
    ]
    names = [f"{kind} cache" for kind in kinds]
    yield table(["context", *names], rows, right="|".join(names))
    others = f"; {plural(memory.others, 'layer')} without keys and values not counted" if memory.others else ""
    yield paragraph(f"Weights and KV cache of one sequence{others}. Compute buffers come on top.")


def _graph(tree: Tree) -> str:
    """The module tree as nested lists that open."""
    steps = tree.steps()
    below: dict[int, list[int]] = {}
    for i, step in enumerate(steps):
        below.setdefault(step.parent, []).append(i)

    def nodes(parent: int) -> str:
        return "".join(node(i) for i in below.get(parent, ()))

    def node(i: int) -> str:
        step, tensor = steps[i], steps[i].node.tensor
        times = f" ({step.times:,} ×)" if step.times > 1 else ""
        size = f"{format_count(step.times * step.node.params)}, {format_bytes(step.times * step.node.n_bytes)}"
        what = f"{tensor.dtype} {format_shape(tensor.shape)}, {size}" if tensor is not None else size
        return branch((step.label or "(no name)") + times, what, nodes(i))

    return branches(nodes(-1))


def _metadata(keys: Sequence[StoredKey]) -> Iterator[str]:
    """Every key of the file, searchable."""
    if not keys:
        return
    rows = [[key.key, key.type, "" if key.count is None else f"{key.count:,}", _value(key.value)] for key in keys]
    yield heading("Metadata")
    header = ["key", "type", "elements", "value"]
    grid_of = table(
        header, rows, right="elements", code="value", sortable=True, stack=True, search="keys", shown=_SHOWN_KEYS
    )
    yield fold(f"{plural(len(keys), 'key')} as stored", grid_of, wide=True)


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


def _figure_map(
    title: str,
    figure: Callable[[Sequence[TensorValues]], float | None],
    kinds: Mapping[str, Layers[TensorValues]],
    layers: Sequence[int],
) -> str:
    """A map whose squares compare each layer with the median of its kind: what is normal for a norm is not for Q."""
    squares = []
    for kind, found in kinds.items():
        values = {layer: value for layer, rows in found.items() if (value := figure(rows)) is not None}
        marks = dict(zip(values, against_median(list(values.values())), strict=True))
        cells = []
        for layer in layers:
            if layer not in values:
                cells.append(Cell(None))
                continue
            strength, colour, ratio = marks[layer]
            words = f"layer {layer} {kind}: {values[layer]:.4g}, {ratio:.3g} of the median of its kind"
            cells.append(Cell(strength, words, colour))
        squares.append((kind, cells))
    looks = [
        ("a quarter or less", Cell(1.0, colour=1)),
        ("median of its kind", Cell(0.0)),
        ("fourfold or more", Cell(1.0)),
    ]
    return heat_map(title, squares, [str(layer) for layer in layers], Legend(looks), "layer")


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
    rows_of = table(header, cells, right=right, sortable=True, stack=True, search="tensors", shown=_SHOWN_ROWS)
    yield fold(plural(len(rows), "tensor"), rows_of, wide=True)


def _tokenizer(found: Survey) -> Iterator[str]:
    yield heading("Tokenizer")
    info = found.inspection.tokenizer
    if info is None:
        yield paragraph("none embedded")
        return
    yield facts((name.replace("_", " "), _number(value)) for name, value in asdict(info).items() if value is not None)
    view = found.view
    if view.explorer is not None and view.explorer.data:
        tried = explorer(view.explorer.data, _SENTENCE)
        yield fold("Try the tokenizer: type a text (without the special tokens around it)", tried, wide=True)
    elif view.explorer is not None:
        yield paragraph(f"No tokenizer explorer: {view.explorer.reason}. apr vocab FILE TEXT tokenizes.")
    yield fold("Special tokens", facts(found.special_tokens.items()))
    if view.example is not None:
        example = view.example
        shown = code(example.text) if example.error is None else paragraph(example.error, "bad")
        yield fold("A conversation as the chat template renders it", shown, wide=True)
    if found.chat_template:
        yield fold("Chat template", facts([("jinja", found.chat_template)]))


def _provenance(found: Survey) -> Iterator[str]:
    shown = {key for key, _ in DIMS} | {"chat_template"}
    rows = [
        (key, "(missing)" if value is None else _value(value))
        for key, value in found.inspection.metadata.items()
        if key not in shown and not key.startswith("tokenizer.")
    ]
    yield heading("Provenance") + facts(rows)
    if isinstance(found.lineage, Mapping):
        yield fold("Training lineage", facts((str(k), _value(v)) for k, v in found.lineage.items()))
    yield heading("Checksums") + facts((name, str(state)) for name, state in found.inspection.checksum.items())


def _value(value: object) -> str:
    words = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
    return words if len(words) <= _MAX_VALUE_CHARS else f"{words[:_MAX_VALUE_CHARS]}…"
