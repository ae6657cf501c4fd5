"""The quantized weights of a model: those of a quantized checkpoint, and weights on a QAT lattice."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from aprfmt.codecs.dtypes import DTYPES, n_elements
from aprfmt.errors import AprError
from aprfmt.io.remote import RemoteSource
from aprfmt.light_dataclass import light_dataclass
from aprfmt.model import Model, Tensor

_FLOATS = ("F32", "F16", "BF16", "F64")
_BLOCK_BYTES = 64
"""Of a block of Q4_0 in bfloat16."""
_CODES = 17
"""Maximum number of distinct values in a block: 16, and negative zero."""
_SAMPLE_BLOCKS = 1 << 10
_MISSES = 8
"""Number of weights without a lattice after which the search stops, if none has one."""


@light_dataclass(frozen=True, slots=True)
class QuantizedWeights:
    """Weights of one scheme.

    Attributes:
        scheme: as for `--quantize`, such as "w4a16-g64"; else the method, such as "AWQ"; "Q4_0 lattice" for bfloat16
            values that are exact in Q4_0, as quantization-aware training leaves them.
        weights: number of weights.
        bits_per_weight: as stored, scales among them.
    """

    scheme: str
    weights: int
    bits_per_weight: float


@light_dataclass(frozen=True, slots=True)
class PackedCount:
    """Parameters of a model and the schemes of its quantized weights, most weights first."""

    param_count: int
    quantized: list[QuantizedWeights]


def count_packed(model: Model) -> PackedCount:
    """Counts the parameters of an opened model; quantized weights count as their decoded elements, if known."""
    entries = model.tensors.entries
    if all(DTYPES[tensor.dtype].is_quantized or tensor.dtype in _FLOATS for tensor in entries):
        return PackedCount(
            sum(tensor.size for tensor in entries), []
        )  # nothing that could be part of a quantized weight
    from aprfmt.canonical.packed import AS_STORED, Packing, packing
    from aprfmt.codecs.serving import scheme_of

    h = replace(model.hparams, extra=dict(model.hparams.extra))
    try:
        packs = packing(model, None, h, AS_STORED, allow_unmapped=True)
    except AprError:  # inspection reports what is wrong with it
        packs = Packing()
    kept = (tensor.shape for tensor in entries if tensor.name not in packs.parts)
    n_params = sum(map(n_elements, (*kept, *(weight.shape for weight in packs.weights))))
    found: Counter[str] = Counter()
    n_bits: Counter[str] = Counter()
    values: Counter[str] = Counter()
    for weight in packs.weights:
        scheme = scheme_of(weight.form.settings)
        name = scheme.id if scheme is not None else weight.scheme
        found[name] += 1
        n_bits[name] += 8 * sum(source.n_bytes for source in weight.sources)
        values[name] += n_elements(weight.shape)
    rows = [QuantizedWeights(name, n, n_bits[name] / max(1, values[name])) for name, n in found.most_common()]
    return PackedCount(n_params, rows)


def lattice_weights(model: Model) -> list[QuantizedWeights]:
    """The bfloat16 weights whose first blocks are exact in Q4_0, as one row; [] without any.

    Reads the first bytes of each matrix; none for a model on the hub, where each read is a download.
    """
    found = misses = 0
    for tensor in model.tensors.entries:
        if tensor.dtype != "BF16" or len(tensor.shape) < 2 or tensor.shape[-1] * 2 % _BLOCK_BYTES:
            continue
        if isinstance(tensor.source, RemoteSource) or (not found and misses == _MISSES):
            break
        on_lattice = _is_on_lattice(tensor)
        found, misses = found + on_lattice, misses + (not on_lattice)
    return [QuantizedWeights("Q4_0 lattice", found, 16.0)] if found else []


def _is_on_lattice(tensor: Tensor) -> bool:
    data = bytes(tensor.source.read(tensor.offset, min(tensor.n_bytes, _SAMPLE_BLOCKS * _BLOCK_BYTES)))
    head = data[: 32 * _BLOCK_BYTES]
    blocks = struct.iter_unpack(f"<{_BLOCK_BYTES // 2}H", head[: len(head) // _BLOCK_BYTES * _BLOCK_BYTES])
    if any(len({*block}) > _CODES for block in blocks):  # spares most models the import of numpy
        return False
    from aprfmt.codecs import lattice

    return lattice.is_on_lattice(lambda unit: [data])


def as_words(rows: Sequence[QuantizedWeights]) -> str:
    """The rows as one readable line."""
    return "; ".join(
        f"{row.weights:,} weights with values that Q4_0 represents exactly (QAT): apr quantize FILE q4_0 is lossless"
        if row.scheme == "Q4_0 lattice"
        else f"{row.weights:,} weights, {row.scheme}, {row.bits_per_weight:.2f} bits each"
        for row in rows
    )
