"""Merges adapters into a model's weights, tensor by tensor, while they are read.

B A is computed in the row order in which the weight is stored: that of a GGUF for tensors of one. So weights are not
reordered, and blocks of a quantized weight are dequantized and quantized again in place, a few rows at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from math import prod

from aprfmt.arch.names import canonical_name, matches
from aprfmt.arch.row import Architecture
from aprfmt.canonical import lora as factors
from aprfmt.canonical.lora_blocks import values_of
from aprfmt.canonical.lora_pairs import Adapter, Base, LoraPair
from aprfmt.canonical.model import Canonical
from aprfmt.canonical.packed import PackedTensor
from aprfmt.canonical.requantized import RequantizationErrors
from aprfmt.canonical.row_mapping import BufferedTensor
from aprfmt.canonical.sides import links
from aprfmt.canonical.tensor import CanonicalTensor
from aprfmt.codecs.dtypes import DTYPES
from aprfmt.codecs.recode import can_encode, decode, encode, is_padded, recode
from aprfmt.codecs.stream import TensorSource, read_whole
from aprfmt.errors import AprError, RefusedError
from aprfmt.io.recent import RecentValues
from aprfmt.io.source import Buffer
from aprfmt.text import plural
from aprfmt.types import Array, PathLike, Shape

_HELD = 6
"""Factor pairs that are kept decoded: workers process a few tensors at a time."""


_Factors = RecentValues[int, tuple[Array, Array]]
"""The float32 factors A and B of pairs, by the identity of the pair."""


@dataclass(frozen=True, slots=True)
class Delta:
    """The update of a stored weight by one adapter.

    Attributes:
        pair: the factors.
        turned: whether the weight is stored as [in, out].
        weight: the adapter's weight.
        factors: a cache of decoded pairs.
    """

    pair: LoraPair
    turned: bool
    weight: float
    factors: _Factors

    @property
    def shape(self) -> Shape:
        """Shape of the stored weight."""
        *n, out, inside = self.pair.shape
        return (*n, inside, out) if self.turned else (*n, out, inside)

    def rows(self, first: int, last: int) -> Array:
        """Rows [first, last) of the update, with all matrices of a stack concatenated: float32 [rows, columns]."""
        import numpy as np

        a, b = self.factors.get(id(self.pair), lambda: (values_of(self.pair.a), values_of(self.pair.b)))
        left, right = (a.swapaxes(-1, -2), b.swapaxes(-1, -2)) if self.turned else (b, a)
        scale = np.float32(self.pair.scale * self.weight)
        if left.ndim == 2:
            made: Array = (left[first:last] @ right) * scale
            return made
        per_matrix = left.shape[1]
        found = []
        while first < last:
            number, row = divmod(first, per_matrix)
            end = min(per_matrix, row + last - first)
            found.append((left[number, row:end] @ right[number]) * scale)
            first += end - row
        return np.concatenate(found)


@dataclass(frozen=True, slots=True)
class MergedTensor:
    """A stored weight plus updates, computed on read in little memory.

    Attributes:
        name: of the weight.
        base: the stored weight, under whatever name.
        dtype: of the result: that of the base, or F32.
        deltas: the updates, if any.
        errors: records what quantizing the sum again changes.
    """

    name: str
    base: TensorSource
    dtype: str
    deltas: Sequence[Delta] = ()
    errors: RequantizationErrors | None = None

    @property
    def quantized_from(self) -> str | None:
        """The quantized type of the base; None for floats."""
        if isinstance(self.base, PackedTensor):
            return self.base.scheme
        return self.base.dtype if DTYPES[self.base.dtype].kind != "plain" else None

    @property
    def shape(self) -> Shape:
        """Shape of the weight."""
        return self.base.shape

    @property
    def n_bytes(self) -> int:
        """Bytes of all of it."""
        return DTYPES[self.dtype].n_bytes(self.shape)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fills `buffer` from byte `offset` of the sum."""
        if not self.deltas and self.dtype == self.base.dtype:
            self.base.read_into(offset, buffer)
            return
        columns = self.shape[-1]
        n_rows = prod(self.shape[:-1])
        row_bytes = self.n_bytes // n_rows
        first, last = offset // row_bytes, -(-(offset + len(buffer)) // row_bytes)
        stored = DTYPES[self.base.dtype].n_bytes((last - first, columns))
        data = bytearray(stored)
        self.base.read_into(first * (stored // (last - first)), memoryview(data))
        values = self._sum(decode(self.base.dtype, data, (last - first, columns)), first, last)
        made = encode(self.dtype, values)
        if self.errors is not None and self.quantized_from and DTYPES[self.dtype].kind != "plain":
            again = decode(self.dtype, made, values.shape)
            self.errors.add(self.name, self.quantized_from, self.dtype, values, again)
        start = offset - first * row_bytes
        buffer[:] = memoryview(made)[start : start + len(buffer)]

    def _sum(self, values: Array, first: int, last: int) -> Array:
        import numpy as np

        out = values.astype(np.float32)
        for delta in self.deltas:
            out += delta.rows(first, last)
        return out


@dataclass(slots=True)
class _AdapterPlan:
    """Which stored tensors get which updates.

    Attributes:
        sources: by the name of the stored tensor (llama.cpp's), for tensors of a GGUF.
        names: by Hugging Face name, for all others.
        whole: replaced weights, by Hugging Face name.
    """

    sources: dict[str, list[Delta]] = field(default_factory=dict)
    names: dict[str, list[Delta]] = field(default_factory=dict)
    whole: dict[str, CanonicalTensor] = field(default_factory=dict)


def with_adapters(
    c: Canonical, adapters: Sequence[tuple[Adapter, float]], *, keep: bool, errors: RequantizationErrors | None = None
) -> tuple[Canonical, list[str]]:
    """`c` with each adapter merged at its weight, and a sentence per loss.

    With `keep` weights keep their dtype; quantized ones are quantized again, and `errors` records what that changes;
    else they become F32. Raises RefusedError for an adapter that changes weights that `c` does not have, and for blocks
    that cannot be encoded.
    """
    row = c.arch
    if row is None:
        raise RefusedError(
            "the base model's architecture is unknown, so the adapter's weights cannot be matched",
            path=c.model.path,
            hint="set it with --arch NAME; list the names with apr architectures",
        )
    c, notes = _untied(c, row, [adapter for adapter, _ in adapters])
    plan, held = _AdapterPlan(), _Factors(_HELD)
    for adapter, weight in adapters:
        _add(plan, c, row, adapter, weight, held)
    made: dict[str, MergedTensor] = {}
    tensors = {name: _merged(tensor, plan, made, keep, errors) for name, tensor in c.tensors.items()}
    for name, tensor in plan.whole.items():
        tensors[name] = tensor
    requantized = sum(DTYPES[source.base.dtype].kind != "plain" for source in made.values())
    if requantized:
        again = "and requantized" if keep else "to merge"
        notes.append(
            f"{plural(requantized, 'quantized weight')} were dequantized {again}: the merged weights are rounded"
        )
    hparams = c.hparams
    embedding = plan.whole.get(c.embedding)
    if embedding is not None and hparams.vocab_size is not None and embedding.shape:
        hparams = replace(hparams, vocab_size=embedding.shape[0])
    return replace(c, tensors=tensors, hparams=hparams, is_whole=False, sidecar=None), notes


def _untied(c: Canonical, row: Architecture, adapters: Sequence[Adapter]) -> tuple[Canonical, list[str]]:
    """`c` with an untied output head, if an adapter changes only one of head and embedding."""
    if c.head in c.tensors or c.embedding not in c.tensors:
        return c, []
    changed = {
        canonical_name(row, weight.replace(".base_layer.", ".")) or weight
        for adapter in adapters
        for weight in (*adapter.pairs, *adapter.whole)
        if ".base_layer." not in weight
    }
    own = {"token_embd.weight": c.embedding, "output.weight": c.head}
    changed = {own.get(name, name) for name in changed}
    if not changed & {c.embedding, c.head}:
        return c, []
    base = c.tensors[c.embedding]
    head = CanonicalTensor(c.head, (MergedTensor(c.head, base.as_source(), base.dtype),))
    note = "the output head and the embedding are untied: the adapter changes only one of them"
    return replace(c, tensors={**c.tensors, c.head: head}, hparams=replace(c.hparams, tied=False)), [note]


def _add(plan: _AdapterPlan, c: Canonical, row: Architecture, adapter: Adapter, weight: float, held: _Factors) -> None:
    path = c.model.path
    _check_scales_known(c, row, adapter)
    if adapter.invocation:
        raise RefusedError(
            "the adapter applies only after its invocation tokens (activated LoRA); merged, it would always apply",
            path=path,
        )
    for name, tensor in adapter.whole.items():
        _replace(plan, c, row, name, tensor, weight)
    names = factors.spelled(adapter, Base(row, c.hparams))
    # A weight that replaces one of a GGUF has the row order of a checkpoint.
    direct = {
        name: pair
        for name, pair in names.items()
        if name in plan.whole or (name in c.tensors and not _is_of_gguf(c.tensors[name]))
    }
    rest = {name: replace(pair, weight=name) for name, pair in names.items() if name not in direct}
    if rest:
        direct |= _add_rest(plan, c, row, replace(adapter, pairs=rest), weight, held)
    for name, pair in direct.items():
        stored = plan.whole.get(name, c.tensors[name]).sources[0]
        _put(plan.names, name, Delta(pair, factors.is_turned(row, name), weight, held), stored, path)


def _check_scales_known(c: Canonical, row: Architecture, adapter: Adapter) -> None:
    """Raises RefusedError if the weights of a GGUF were scaled by values that the GGUF does not store."""
    known = adapter.of is not None and adapter.of.hparams is not c.hparams
    if known or c.model.convention != "gguf":
        return
    for name in adapter.pairs:
        spelled = canonical_name(row, name)
        if spelled is not None and any(match.row.scale for match in matches(row, spelled)):
            raise RefusedError(
                "the GGUF's weight is scaled by values of the base's config.json, which was not found",
                path=c.model.path,
                tensor=name,
                hint="merge into the base model's folder, or put the base at the path in the adapter's config",
            )


def _add_rest(
    plan: _AdapterPlan, c: Canonical, row: Architecture, adapter: Adapter, weight: float, held: _Factors
) -> dict[str, LoraPair]:
    """Plans the pairs for tensors of a GGUF; returns those for weights that `c` has under other Hugging Face names."""
    path = c.model.path
    stored = {source.name: source for t in c.tensors.values() if _is_of_gguf(t) for source in t.sources}
    gguf, _ = factors.to_gguf(adapter, path)
    left = {}
    for name, pair in gguf.items():
        if name in stored:
            turned = name == "token_embd.weight"
            _put(plan.sources, name, Delta(pair, turned, weight, held), stored[name], path)
        else:
            left[name] = pair
    found: dict[str, LoraPair] = {}
    for link in links(row, c.hparams, c.tensors) if left else ():
        if left.keys() & set(link.gguf):
            for pair in factors.from_link(link, left, {}, path):
                found[pair.weight] = pair
            for name in link.gguf:
                left.pop(name, None)
    missing = next(iter(left), None) or next((name for name in found if name not in c.tensors), None)
    if missing is not None:
        raise RefusedError(
            "the adapter changes a weight that the base model does not have",
            path=path,
            tensor=missing,
            hint=_OTHER_BASE,
        )
    return found


def _is_of_gguf(tensor: CanonicalTensor) -> bool:
    """Whether a tensor is stored under llama.cpp's name and in its row order."""
    return tensor.link is not None and tensor.sources[0].name in tensor.link.gguf


_OTHER_BASE = "merge it into the model that it was trained on; apr inspect ADAPTER names it"


def _put(plan: dict[str, list[Delta]], name: str, delta: Delta, source: TensorSource, path: PathLike) -> None:
    if delta.shape != source.shape:
        raise RefusedError(
            f"the adapter is for a different base model: it adds {list(delta.shape)} to a weight of "
            f"{list(source.shape)}",
            path=path,
            tensor=name,
            hint=_OTHER_BASE,
        )
    plan.setdefault(name, []).append(delta)


def _replace(
    plan: _AdapterPlan, c: Canonical, row: Architecture, name: str, tensor: CanonicalTensor, weight: float
) -> None:
    """Plans the replacement of a whole weight."""
    plain = name.replace(".base_layer.", ".")
    known = canonical_name(row, plain) or next((m.row.hf[0] for m in matches(row, plain, "gguf")), plain)
    if known not in c.tensors:
        raise RefusedError(
            "the adapter replaces a weight that the base model does not have", path=c.model.path, tensor=name
        )
    if known in plan.whole:
        raise RefusedError("two adapters replace this weight", path=c.model.path, tensor=name)
    if weight != 1:
        raise RefusedError(
            f"the adapter replaces this weight, so it cannot be scaled by {weight:g}",
            path=c.model.path,
            tensor=name,
            hint="use --weight 1 for this adapter",
        )
    own = c.tensors[known].shape
    resized = known in (c.embedding, c.head) and len(own) == 2 and tensor.shape[1:] == own[1:]
    if tensor.shape != own and not resized:
        raise RefusedError(
            f"the adapter is for a different base model: it replaces a weight of {list(own)} by {list(tensor.shape)}",
            path=c.model.path,
            tensor=name,
            hint=_OTHER_BASE,
        )
    stored = c.tensors[known].sources[0].name if not _is_of_gguf(c.tensors[known]) else known
    plan.whole[known] = CanonicalTensor(known, (MergedTensor(stored, tensor.as_source(), tensor.dtype),))


def _merged(
    tensor: CanonicalTensor,
    plan: _AdapterPlan,
    made: dict[str, MergedTensor],
    keep: bool,
    errors: RequantizationErrors | None,
) -> CanonicalTensor:
    if tensor.name in plan.names:
        whole = plan.whole.pop(tensor.name, tensor)
        merged = replace(merged_tensor(whole.sources[0], plan.names[tensor.name], keep), errors=errors)
        made[tensor.name] = merged
        return replace(whole, sources=(merged, *whole.sources[1:]))
    if not _is_of_gguf(tensor) or not any(source.name in plan.sources for source in tensor.sources):
        return tensor
    sources = []
    for source in tensor.sources:
        if source.name in plan.sources and source.name not in made:
            made[source.name] = replace(merged_tensor(source, plan.sources[source.name], keep), errors=errors)
        sources.append(made.get(source.name, source))
    return replace(tensor, sources=tuple(sources))


@cache
def encodes_without_importance(dtype: str) -> bool:
    """Whether values can be encoded as `dtype` without an importance matrix."""
    import numpy as np

    try:
        return can_encode(dtype) and bool(encode(dtype, np.ones(DTYPES[dtype].block, np.float32)))
    except AprError:
        return False


def merged_tensor(source: TensorSource, deltas: Sequence[Delta], keep: bool) -> MergedTensor:
    """The weight `source` plus the deltas. Raises RefusedError if its blocks cannot be encoded again."""
    row = DTYPES[source.dtype]
    if row.kind == "aprq" or is_padded(row, source.shape):  # whose rows are not independent

        def read() -> list[Buffer]:
            return [read_whole(source)]

        decoded = BufferedTensor(
            source.name, "F32", source.shape, lambda: recode(source.dtype, "F32", source.shape, read)
        )
        return MergedTensor(source.name, decoded, "F32", deltas)
    if row.kind == "plain":
        return MergedTensor(source.name, source, source.dtype, deltas)
    if keep and not encodes_without_importance(row.name):
        raise RefusedError(
            f"weights in {row.name} can be dequantized, but not requantized",
            tensor=source.name,
            hint="choose another dtype: --quantize q4_k_m, or --dtype f16",
        )
    return MergedTensor(source.name, source, source.dtype if keep else "F32", deltas)
