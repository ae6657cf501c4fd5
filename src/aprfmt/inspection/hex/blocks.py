"""The stored bytes of a tensor, block by block: fields, codes and values."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from aprfmt.codecs.aprq import decode_q8
from aprfmt.codecs.dtypes import DTYPES, n_elements
from aprfmt.codecs.layouts import BlockPart, formula_of, parts_of
from aprfmt.codecs.recode import decode, is_padded, stored_bytes
from aprfmt.errors import UnsupportedError, UsageError
from aprfmt.model import Tensor
from aprfmt.types import Shape


@dataclass(frozen=True, slots=True)
class HexBlock:
    """Bytes of a tensor that are decoded together: a block of a quantized dtype, a line of a plain one.

    Attributes:
        index: of the block in the tensor; for plain values, of the line.
        offset: of the first byte, from the start of the file.
        data: the bytes.
        first: flat, row-major index of its first value in the tensor.
        parts: its fields; none for plain values.
        codes: one per value, before scaling; None if unavailable.
        values: decoded; None without a decoder.
    """

    index: int
    offset: int
    data: bytes
    first: int
    parts: Sequence[BlockPart]
    codes: Sequence[int] | None
    values: Sequence[float | int | bool | str] | None

    def to_json(self) -> dict[str, object]:
        """{index, offset, first, bytes, fields, codes, values}."""
        fields = [
            {"name": p.name, "offset": self.offset + p.offset, "size": len(p.data), "bytes": p.data.hex(), **p.values}
            for p in self.parts
        ]
        body: dict[str, object] = {"index": self.index, "offset": self.offset, "first": self.first}
        return body | {"bytes": self.data.hex(), "fields": fields, "codes": self.codes, "values": self.values}


@dataclass(frozen=True, slots=True)
class TensorDump:
    """The shown part of a tensor.

    Attributes:
        file: the file that contains it, one of several of a sharded model.
        in_memory: whether that file is compressed, so that offsets are in the decompressed data.
        name, dtype, shape, offset, n_bytes: as in model.Tensor.
        block_values, block_bytes: of one block.
        n_blocks: number of blocks of the tensor.
        formula: of a value from a block's fields; "" for plain values.
        blocks: the shown ones.
    """

    file: str
    in_memory: bool
    name: str
    dtype: str
    shape: Shape
    offset: int
    n_bytes: int
    block_values: int
    block_bytes: int
    n_blocks: int
    formula: str
    blocks: Sequence[HexBlock]

    def to_json(self) -> dict[str, object]:
        """The tensor's object in the JSON of `apr hex --tensor`."""
        body = {name: getattr(self, name) for name in self.__slots__ if name not in ("shape", "blocks", "n_bytes")}
        return body | {
            "shape": list(self.shape),
            "size_bytes": self.n_bytes,
            "blocks": [block.to_json() for block in self.blocks],
        }


def check_offset(tensor: Tensor, offset: int) -> None:
    """Raises UsageError for an offset past the end of `tensor`."""
    if offset and offset >= tensor.n_bytes:
        hint = f"it has {tensor.n_bytes} bytes"
        raise UsageError(f"--offset {offset} is past the end of the tensor", tensor=tensor.name, hint=hint)


def dump_tensor(tensor: Tensor, offset: int, limit: int, width: int) -> TensorDump:
    """The blocks of `tensor` from its byte `offset` on, at most `limit` (0: all); lines of plain values are `width`
    bytes long.
    Raises UsageError for an offset outside.
    """
    check_offset(tensor, offset)
    row = DTYPES[tensor.dtype]
    is_plain = row.kind == "plain" or tensor.dtype == "AprQ8"
    unit = row.block_bytes * max(1, width // row.block_bytes) if is_plain else row.block_bytes
    head = 4 if tensor.dtype == "AprQ8" and tensor.n_bytes else 0
    n_blocks = -(-(tensor.n_bytes - head) // unit) if unit else 0
    first = max(0, offset - head) // unit
    last = n_blocks if not limit else min(n_blocks, first + limit)
    made = _lines(tensor, head, unit, first, last) if is_plain else _blocks(tensor, unit, first, last)
    return TensorDump(
        file=tensor.source.path, in_memory=tensor.source.identity is None, name=tensor.name, dtype=tensor.dtype,
        shape=tensor.shape, offset=tensor.offset, n_bytes=tensor.n_bytes,
        block_values=unit // row.block_bytes if is_plain else row.block, block_bytes=unit, n_blocks=n_blocks,
        formula="value = scale × code" if head else formula_of(tensor.dtype), blocks=list(made),
    )  # fmt: skip


def _lines(tensor: Tensor, head: int, unit: int, first: int, last: int) -> Iterator[HexBlock]:
    """Plain values, and those of AprQ8, whose scale is the first four bytes of the tensor."""
    scale, item = 1.0, DTYPES[tensor.dtype].block_bytes
    if head:
        raw = tensor.source.read(tensor.offset, head)
        (scale,) = struct.unpack("<f", raw)
        part = BlockPart("scale", 0, raw, {"scale": [scale]})
        yield HexBlock(-1, tensor.offset, raw, 0, [part], None, [])
    for i in range(first, last):
        at = head + i * unit
        data = tensor.source.read(tensor.offset + at, min(unit, tensor.n_bytes - at))
        codes: list[int] | None = None
        if head:
            values, codes = decode_q8(data, scale), list(struct.unpack(f"<{len(data)}b", data))
        else:
            values = decode(tensor.dtype, data, (len(data) // item,), tensor=tensor.name)
        kept = [str(v) for v in values] if values.dtype.kind == "c" else values.tolist()
        yield HexBlock(i, tensor.offset + at, data, i * unit // item, [], codes, kept)


def _blocks(tensor: Tensor, unit: int, first: int, last: int) -> Iterator[HexBlock]:
    row, shape = DTYPES[tensor.dtype], tensor.shape
    is_filled = is_padded(row, shape) and tensor.n_bytes == stored_bytes(tensor.dtype, shape)
    per_row = -(-shape[-1] // row.block) if is_filled else 0
    for i in range(first, last):
        data = tensor.source.read(tensor.offset + i * unit, unit)
        at, n = i * row.block, row.block
        if is_filled:  # each row ends with a partial block
            at = i // per_row * shape[-1] + i % per_row * row.block
            n = min(n, shape[-1] - i % per_row * row.block)
        n = max(0, min(n, n_elements(shape) - at))
        parts, codes = parts_of(tensor.dtype, data)
        values = None
        with suppress(UnsupportedError):
            values = decode(tensor.dtype, data, (row.block,), tensor=tensor.name).tolist()[:n]
        yield HexBlock(i, tensor.offset + i * unit, data, at, parts, codes[:n] if codes is not None else None, values)
