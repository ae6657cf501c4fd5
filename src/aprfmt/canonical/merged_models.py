"""A model whose weights are computed from those of several models, a chunk at a time, while they are read.

All inputs are brought into Hugging Face order first, so a folder can be merged with a GGUF, and the result does not
depend on the containers. A weight keeps the dtype of the first model; of quantized blocks those whose values changed
are quantized again, row by row.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from threading import Lock

from aprfmt.arch.extra_tensors import layer_of
from aprfmt.arch.names import is_gguf_only, matches
from aprfmt.canonical.depth_pruning import SourceLayer, check_layer, renumbered, select_layers
from aprfmt.canonical.merge_arrays import SCRATCH, Values
from aprfmt.canonical.merge_methods import PASSTHROUGH, Combination, MergeRule
from aprfmt.canonical.merged_adapters import encodes_without_importance
from aprfmt.canonical.model import Canonical
from aprfmt.canonical.row_mapping import Produced
from aprfmt.canonical.sides import hf_side
from aprfmt.canonical.tensor import CanonicalTensor, is_float
from aprfmt.codecs import plain
from aprfmt.codecs.dtypes import DTYPES
from aprfmt.codecs.recode import decode, encode, is_padded
from aprfmt.codecs.stream import STEP, TensorSource, regroup
from aprfmt.errors import RefusedError
from aprfmt.io.pipe import Item, Job
from aprfmt.io.recent import RecentValues
from aprfmt.io.source import Buffer
from aprfmt.text import plural
from aprfmt.types import Array, Shape

_OPEN = 8
"""Open reordered tensors: workers process a few at a time."""

_RECENT = 3
"""Chunks kept of each, since reads rarely end at chunk boundaries."""

_COMPARED_BYTES = 1 << 20
_SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class LayerSlice:
    """Some layers of the result, each merged from a layer of every input.

    Attributes:
        inputs: indices of the models.
        firsts: the first layer of the slice in each.
        n_layers: number of layers.
    """

    inputs: tuple[int, ...]
    firsts: tuple[int, ...]
    n_layers: int

    @property
    def lead(self) -> int:
        """The input that determines the form of the layers: the first model if it takes part."""
        return self.inputs.index(0) if 0 in self.inputs else 0

    def layers(self, i: int) -> list[SourceLayer]:
        """The input layers of layer `i` of the slice."""
        return [(model, first + i) for model, first in zip(self.inputs, self.firsts, strict=True)]


Ruling = Callable[[int, str, Sequence[str], float], MergeRule]
"""(index of the slice, name of the weight in the result, its names in the inputs, position in the slice from 0 to 1) ->
the merge rule.
"""


# --- values of one model ---


class _Opened:
    """The jobs of a reordered tensor, and the output of the last ones."""

    def __init__(self, produced: Produced, dtype: str) -> None:
        import numpy as np

        self.items: list[Item]
        if dtype != produced.dtype:
            self.items = [encode(dtype, produced.values())]
        else:
            self.items = [produced.data()] if produced.held_bytes else list(produced.items(1))
        sizes = [item.n_bytes if isinstance(item, Job) else memoryview(item).nbytes for item in self.items]
        self.ends = np.cumsum(sizes)
        self._recent: OrderedDict[int, Buffer] = OrderedDict()
        self._lock = Lock()

    def read_into(self, offset: int, buffer: memoryview) -> None:
        import numpy as np

        done = 0
        which = int(np.searchsorted(self.ends, offset, side="right"))
        while done < len(buffer):
            data = memoryview(self._item(which)).cast("B")
            start = offset + done - (int(self.ends[which]) - len(data))
            part = data[start : start + len(buffer) - done]
            buffer[done : done + len(part)] = part
            done += len(part)
            which += 1

    def _item(self, which: int) -> Buffer:
        with self._lock:
            if which in self._recent:
                return self._recent[which]
        item = self.items[which]
        data = item.run() if isinstance(item, Job) else item
        with self._lock:
            self._recent[which] = data
            while len(self._recent) > _RECENT:
                self._recent.popitem(last=False)
        return data


_Orders = RecentValues[int, _Opened]
"""Reordered tensors that are being read, by the identity of the tensor."""


@dataclass(frozen=True, slots=True)
class _Ordered:
    """A tensor that is stored in another order, as a lazy tensor."""

    tensor: CanonicalTensor
    dtype: str
    orders: _Orders

    @property
    def name(self) -> str:
        return self.tensor.name

    @property
    def shape(self) -> Shape:
        return self.tensor.shape

    @property
    def n_bytes(self) -> int:
        return DTYPES[self.dtype].n_bytes(self.shape)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        opened = self.orders.get(id(self.tensor), lambda: _Opened(self.tensor.produced, self.dtype))
        opened.read_into(offset, buffer)


def _in_order(tensor: CanonicalTensor, orders: _Orders) -> TensorSource:
    """Its bytes in Hugging Face order, readable at any offset; decoded if rows end inside blocks."""
    if is_padded(DTYPES[tensor.dtype], tensor.shape):
        return _Ordered(tensor, "F32", orders)
    if tensor.mapping is None or tensor.mapping.is_plain:
        return tensor.sources[0]
    return _Ordered(tensor, tensor.dtype, orders)


@dataclass(frozen=True, slots=True)
class _Stored:
    """The values of a lazy tensor."""

    source: TensorSource

    def read_into(self, first: int, out: Array) -> None:
        row = DTYPES[self.source.dtype]
        last = first + len(out)
        if row.kind == "plain":
            with SCRATCH.lent(len(out) * row.block_bytes) as data:
                self.source.read_into(first * row.block_bytes, data)
                plain.decode_into(row.name, data, out)
            return
        low, high = first // row.block * row.block, -(-last // row.block) * row.block
        begin = low // row.block * row.block_bytes
        # An AprQ8 tensor has one scale, stored before the values.
        scale = _SCALE_BYTES if row.name == "AprQ8" else 0
        with SCRATCH.lent(scale + (high - low) // row.block * row.block_bytes) as data:
            if scale:
                self.source.read_into(0, data[:scale])
            self.source.read_into(scale + begin, data[scale:])
            out[:] = decode(row.name, data, (high - low,), tensor=self.source.name)[first - low : last - low]


@dataclass(frozen=True, slots=True)
class _Filled:
    """The first `n` values of one model, followed by those of another: embedding rows that the first one lacks."""

    own: Values
    n: int
    rest: Values

    def read_into(self, first: int, out: Array) -> None:
        n_own = min(max(self.n - first, 0), len(out))
        if n_own:
            self.own.read_into(first, out[:n_own])
        if n_own < len(out):
            self.rest.read_into(first + n_own, out[n_own:])


# --- the result ---


@dataclass(frozen=True, slots=True)
class CombinedTensor:
    """A merged weight, computed on read in little memory.

    Attributes:
        name: of the weight.
        dtype: of the result.
        shape: of the weight.
        combination: its values.
        base: the weight in the first model, whose blocks are kept in rows without changes; None for plain values.
    """

    name: str
    dtype: str
    shape: Shape
    combination: Combination
    base: TensorSource | None = None

    @property
    def n_bytes(self) -> int:
        """Bytes of all of it."""
        return DTYPES[self.dtype].n_bytes(self.shape)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fills `buffer` from byte `offset` of the result. Raises RefusedError for values beyond a dtype's range."""
        if self.base is not None:
            self._read_rows(self.base, offset, buffer)
            return
        size = DTYPES[self.dtype].block_bytes
        first, last = offset // size, -(-(offset + len(buffer)) // size)
        for start, values in self.combination.chunks(first, last):
            low, high = start * size - offset, (start + len(values)) * size - offset
            if low >= 0 and high <= len(buffer):
                plain.encode_into(self.dtype, values, buffer[low:high], self._overflow)
            else:
                made = plain.encode(self.dtype, values, self._overflow).view("u1")
                buffer[max(low, 0) : high] = made[max(-low, 0) : len(buffer) - low].data

    def _overflow(self, n: int) -> None:
        raise RefusedError(
            f"merged values are too large for {self.dtype}", tensor=self.name, hint="use --dtype f32 or bf16"
        )

    def _read_rows(self, base: TensorSource, offset: int, buffer: memoryview) -> None:
        import numpy as np

        columns = self.shape[-1]
        row_bytes = self.n_bytes // prod(self.shape[:-1])
        first, last = offset // row_bytes, -(-(offset + len(buffer)) // row_bytes)
        stored = np.empty((last - first, row_bytes), np.uint8)
        base.read_into(first * row_bytes, stored.reshape(-1).data)
        step = max(1, STEP // columns)
        for start in range(first, last, step):
            rows = stored[start - first : start - first + step]
            values = self.combination.read(start * columns, (start + len(rows)) * columns).reshape(len(rows), columns)
            before = decode(self.dtype, rows.reshape(-1).data, values.shape, tensor=self.name)
            changed = (values != before).any(axis=1)
            if changed.any():
                rows[changed] = np.frombuffer(encode(self.dtype, values[changed]), np.uint8).reshape(-1, row_bytes)
        start = offset - first * row_bytes
        buffer[:] = stored.reshape(-1)[start : start + len(buffer)].data


@dataclass(slots=True)
class _Merge:
    """The request, and what is found while it is planned."""

    models: Sequence[Canonical]
    slices: Sequence[LayerSlice]
    ruling: Ruling
    keep: bool
    pad: bool
    orders: _Orders = field(default_factory=partial(_Orders, _OPEN))
    requantized: int = 0
    narrowed: int = 0
    padded: set[int] = field(default_factory=set)


def combined(
    models: Sequence[Canonical], slices: Sequence[LayerSlice], ruling: Ruling, *, keep: bool, pad_vocab: bool = False
) -> tuple[Canonical, list[str]]:
    """The first of `models` with the layers of `slices`, each weight merged by `ruling`; and the losses.

    Tensors before the layers are merged from the inputs of the first slice, those after them from the last. With `keep`
    weights keep the dtype of the first model, else they become F32. With `pad_vocab`, rows of embedding and head that a
    model lacks are taken from the first one, and rows beyond the first one's are left out.

    Raises RefusedError for models of different networks, with the weight in which they differ, and for blocks that
    cannot be encoded; and as select_layers.
    """
    _check_architectures(models)
    models, notes = _under_one_set_of_names(models)
    for part in slices:
        for model, first in zip(part.inputs, part.firsts, strict=True):
            for layer in (first, first + part.n_layers - 1):
                check_layer(models[model], layer)
    merge = _Merge(models, slices, ruling, keep, pad_vocab)
    places = [(number, i) for number, part in enumerate(slices) for i in range(part.n_layers)]
    stack = [slices[number].layers(i)[slices[number].lead] for number, i in places]
    c = _own_head(merge, models[0])
    skeleton = c
    if stack != [(0, layer) for layer in range(c.hparams.num_layers or 0)]:
        skeleton = select_layers([c, *models[1:]], stack)
    _check_complete(merge, places)
    tensors = {name: _merged(merge, skeleton, tensor, places) for name, tensor in skeleton.tensors.items()}
    extras, stated = _extras(merge, skeleton)
    notes += stated
    if merge.requantized:
        again = "and requantized where they changed" if keep else "to merge"
        notes.append(f"{plural(merge.requantized, 'quantized weight')} were dequantized {again}")
    if merge.narrowed:
        notes.append(f"{plural(merge.narrowed, 'weight')} of F64 were merged in float32")
    notes += [
        f"the embedding and head of {models[number].model.path} were padded or cut to the first model's vocabulary"
        for number in sorted(merge.padded)
    ]
    made = replace(skeleton, tensors=tensors, extras=extras, is_whole=False, sidecar=None)
    return replace(made, warnings=(*made.warnings, *_differences(models))), notes


def _check_architectures(models: Sequence[Canonical]) -> None:
    first = models[0]
    if first.arch is None or not first.tensors:
        raise RefusedError(
            "the architecture is unknown, so its weights cannot be matched to the other models",
            path=first.model.path,
            hint="set it with --arch NAME; list the names with apr architectures",
        )
    for c in models[1:]:
        if c.arch is not first.arch:
            raise RefusedError(
                f"the architecture is {_architecture(c)}, but {first.model.path} has {_architecture(first)}: the "
                "weights cannot be merged",
                path=c.model.path,
                hint="merge models of one architecture, ideally fine-tuned from one base model",
            )


def _architecture(c: Canonical) -> str:
    return c.arch.id if c.arch is not None else c.hparams.architecture or c.part or "unknown"


def _under_one_set_of_names(models: Sequence[Canonical]) -> tuple[Sequence[Canonical], list[str]]:
    """The models with weights under the same names.

    Blocks that would have to be decoded for a checkpoint keep their GGUF names, in all models or in none.
    """
    own = [{t.name for t in c.tensors.values() if t.link is not None and t.name in t.link.gguf} for c in models]
    if all(names == own[0] for names in own):
        return models, []
    changed = []
    for c in models:
        assert c.arch is not None
        kept = {name: t for name, t in c.tensors.items() if is_gguf_only(c.arch, name)}
        changed.append(replace(c, tensors=kept | {t.name: t for t in hf_side(c.arch, c.tensors)}))
    made = (
        f"{plural(len(own[0]), 'quantized weight')} stored as F32: quantized blocks cannot be put in checkpoint order"
    )
    return changed, [made] if own[0] else []


def _own_head(merge: _Merge, c: Canonical) -> Canonical:
    """`c` with an untied output head, if another merged model has one."""
    last = [merge.models[i] for i in merge.slices[-1].inputs]
    if c.head in c.tensors or c.embedding not in c.tensors or not any(other.head in other.tensors for other in last):
        return c
    head = replace(c.tensors[c.embedding], name=c.head)
    return replace(c, tensors={**c.tensors, c.head: head}, hparams=replace(c.hparams, tied=False))


def _find(c: Canonical, name: str) -> CanonicalTensor | None:
    """The tensor of a model; for a tied head the embedding."""
    found = c.tensors.get(name)
    return c.tensors.get(c.embedding) if found is None and name == c.head else found


_BEFORE = ("token_", "position_", "per_layer_", "rope_", "embd", "embedding")
"""Prefixes of llama.cpp's names of the tensors before the layers."""


def _slice_of(merge: _Merge, c: Canonical, name: str, places: Sequence[tuple[int, int]]) -> tuple[int, int | None]:
    """The slice and layer that an output weight belongs to; None outside the layers."""
    assert c.arch is not None
    layer = layer_of(c.arch, name)
    if layer is not None and layer < len(places):
        return places[layer]
    found = matches(c.arch, name)
    gguf = found[0].row.gguf[0] if found and found[0].row.gguf else ""
    is_before = name == c.embedding or gguf.startswith(_BEFORE)
    return 0 if is_before else len(merge.slices) - 1, None


def _merged(merge: _Merge, c: Canonical, tensor: CanonicalTensor, places: Sequence[tuple[int, int]]) -> CanonicalTensor:
    if c.arch is not None and is_gguf_only(c.arch, tensor.name):
        return tensor  # it is derived from config.json
    number, i = _slice_of(merge, c, tensor.name, places)
    part = merge.slices[number]
    names = [tensor.name] * len(part.inputs)
    t = 0.0
    if i is not None:
        assert c.arch is not None
        layer = layer_of(c.arch, tensor.name)
        assert layer is not None
        names = [renumbered(tensor.name, layer, old) for _, old in part.layers(i)]
        t = i / (part.n_layers - 1) if part.n_layers > 1 else 1.0
    inputs = []
    for model, name in zip(part.inputs, names, strict=True):
        other = merge.models[model]
        found = _find(other, name)
        if found is None:
            raise RefusedError(
                f"the weight is in {c.model.path}, but not in this model", path=other.model.path, tensor=name
            )
        inputs.append((other, found))
    return _combine(merge, c, tensor, inputs, merge.ruling(number, tensor.name, names, t), part.inputs)


def _combine(
    merge: _Merge,
    c: Canonical,
    tensor: CanonicalTensor,
    inputs: Sequence[tuple[Canonical, CanonicalTensor]],
    rule: MergeRule,
    numbers: Sequence[int],
) -> CanonicalTensor:
    """The weight `tensor` of the first model, merged from the `inputs`."""
    if any(not is_float(other.dtype) for _, other in inputs):
        return _equal(tensor, inputs)
    base = _Stored(_in_order(tensor, merge.orders))
    shape = tensor.shape
    values: list[Values] = []
    for (model, other), number in zip(inputs, numbers, strict=True):
        own: Values = _Stored(_in_order(other, merge.orders))
        if other.shape != shape:
            _check_shape(merge, c, tensor, model, other)
            merge.padded.add(number)
            if other.shape[0] < shape[0]:
                own = _Filled(own, prod(other.shape), base)
        values.append(own)
    if not prod(shape):
        return tensor
    if rule.method == PASSTHROUGH and rule.factor == 1 and inputs[0][1].shape == shape:
        if c.arch is not None and layer_of(c.arch, tensor.name) is not None:
            return tensor
        if inputs[0][1].name == tensor.name:
            return inputs[0][1]
    source = base.source
    # A checkpoint keeps its own spelling; a head that was tied has none.
    embedding = c.tensors.get(c.embedding)
    is_new = tensor.name == c.head and embedding is not None and tensor.sources[0] is embedding.sources[0]
    name = tensor.name if tensor.link is not None or is_new else tensor.sources[0].name
    combination = Combination(tensor.name, prod(shape), rule, values)
    blocks = DTYPES[tensor.dtype].kind != "plain"
    merge.requantized += blocks
    merge.narrowed += any(other.dtype == "F64" for _, other in inputs)
    if not merge.keep or (blocks and (source.dtype == "F32" or DTYPES[tensor.dtype].kind == "aprq")):
        return CanonicalTensor(tensor.name, (CombinedTensor(name, "F32", shape, combination),))
    if blocks and not encodes_without_importance(DTYPES[tensor.dtype].name):
        raise RefusedError(
            f"weights in {tensor.dtype} can be dequantized, but not requantized",
            path=c.model.path,
            tensor=tensor.name,
            hint="choose another dtype: --quantize q4_k_m, or --dtype f16",
        )
    made = CombinedTensor(name, tensor.dtype, shape, combination, source if blocks else None)
    return CanonicalTensor(tensor.name, (made,))


def _check_shape(
    merge: _Merge, c: Canonical, tensor: CanonicalTensor, model: Canonical, other: CanonicalTensor
) -> None:
    is_vocabulary = tensor.name in (c.embedding, c.head) and len(tensor.shape) == 2
    rows_only = is_vocabulary and other.shape[1:] == tensor.shape[1:]
    if rows_only and merge.pad:
        return
    hint = "merge models fine-tuned from one base model"
    if rows_only:
        hint = "add --pad-vocab to fill missing rows from the first model and drop extra ones"
    raise RefusedError(
        f"the weight is {list(other.shape)}, but in {c.model.path} it is {list(tensor.shape)}",
        path=model.model.path,
        tensor=tensor.name,
        hint=hint,
    )


def _equal(tensor: CanonicalTensor, inputs: Sequence[tuple[Canonical, CanonicalTensor]]) -> CanonicalTensor:
    """An integer tensor, which must be the same in all models."""
    for c, other in inputs:
        if other is tensor:
            continue
        same = other.dtype == tensor.dtype and other.shape == tensor.shape
        streams = (regroup(side.chunks(), _COMPARED_BYTES, _COMPARED_BYTES) for side in (tensor, other))
        if not same or any(a != b for a, b in zip(*streams, strict=True)):
            raise RefusedError(
                f"{tensor.dtype} tensors cannot be merged, and this one differs between the models", path=c.model.path,
                tensor=tensor.name,
            )  # fmt: skip
    return tensor


def _check_complete(merge: _Merge, places: Sequence[tuple[int, int]]) -> None:
    """Raises RefusedError for weights of a later model, in merged layers, that the first input lacks."""
    for part in merge.slices:
        lead = merge.models[part.inputs[part.lead]]
        assert lead.arch is not None
        for model, first in zip(part.inputs, part.firsts, strict=True):
            other = merge.models[model]
            for name in other.tensors:
                layer = layer_of(lead.arch, name)
                if layer is not None and not first <= layer < first + part.n_layers:
                    continue
                if is_gguf_only(lead.arch, name):
                    continue
                here = name if layer is None else renumbered(name, layer, layer - first + part.firsts[part.lead])
                if _find(lead, here) is None:
                    raise RefusedError(
                        f"the weight is in this model, but not in {lead.model.path}", path=other.model.path, tensor=name
                    )


def _extras(merge: _Merge, c: Canonical) -> tuple[dict[str, CanonicalTensor], list[str]]:
    """Extra tensors: merged if all models have the same ones, else those of the first model."""
    if not c.extras:
        return {}, []
    if len(merge.slices) == 1 and len(merge.slices[0].inputs) > 1 and c.layers is None:
        part = merge.slices[0]
        found = [merge.models[number] for number in part.inputs]
        if all(
            name in other.extras and other.extras[name].shape == tensor.shape
            for other in found
            for name, tensor in c.extras.items()
        ):
            return {
                name: _combine(
                    merge, c, tensor, [(other, other.extras[name]) for other in found],
                    merge.ruling(0, name, [name] * len(found), 0.0), part.inputs,
                )
                for name, tensor in c.extras.items()
            }, []  # fmt: skip
    kept = plural(len(c.extras), "tensor")
    return dict(c.extras), [f"{kept} outside the language model (towers, MTP layers) are taken from the first model"]


_SAME = ("num_heads", "num_kv_heads", "head_dim", "num_experts_per_tok", "rope_type")
_ALIKE = ("rope_theta", "rms_norm_eps", "max_position_embeddings")
_ALIKE_EXTRA = ("rope_scaling", "rope_parameters", "sliding_window", "hidden_act")


def _differences(models: Sequence[Canonical]) -> list[str]:
    """Warnings about differing hyper-parameters that shapes do not show. Raises RefusedError if heads differ."""
    first, notes = models[0], []
    for c in models[1:]:
        for key in _SAME:
            a, b = getattr(first.hparams, key), getattr(c.hparams, key)
            if a is not None and b is not None and a != b:
                raise RefusedError(
                    f"{key} is {b}, but in {first.model.path} it is {a}",
                    path=c.model.path,
                    hint="weights trained with different values cannot be merged",
                )
        pairs = [(key, getattr(first.hparams, key), getattr(c.hparams, key)) for key in _ALIKE]
        pairs += [(key, first.hparams.extra.get(key), c.hparams.extra.get(key)) for key in _ALIKE_EXTRA]
        notes += [
            f"{key} is {a} in {first.model.path} and {b} in {c.model.path}: the first is used"
            for key, a, b in pairs
            if a is not None and b is not None and a != b
        ]
    return list(dict.fromkeys(notes))
