"""The dtype table: names, container ids, block geometry. A new dtype is one row here and one in the tests."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Protocol, TypedDict

from aprfmt.errors import LimitError, UsageError
from aprfmt.light_dataclass import light_dataclass
from aprfmt.types import Shape


@light_dataclass(frozen=True, slots=True)
class Dtype:
    """One tensor dtype.

    Attributes:
        name: the name shown to users, `F32`, `Q4_K`, `AprQ8`.
        apr_id: id in an APR v2 index, None if the container has none.
        ggml_id: GGML type number, None if GGML has none.
        safetensors: spelling in a safetensors header, None if it has none.
        block: values in a block (1 for plain dtypes).
        block_bytes: bytes of a block.
        numpy: numpy dtype string of a plain dtype's stored elements, None for block types.
        kind: "plain" (codecs.plain), "aprq" (codecs.aprq) or "ggml" (codecs.ggml).
        torch: name of a plain dtype in torch, which not every version of it has.
        answers: for a GGML block type, CRC-32 of the decoded test blocks and of the encoded test values (codecs.ggml);
            None for types that are not decoded.
        scales: offsets of the f16 scales in such a block; llama.cpp refuses blocks with a non-finite scale.
    """

    name: str
    apr_id: int | None
    ggml_id: int | None
    safetensors: str | None
    block: int
    block_bytes: int
    numpy: str | None = None
    kind: str = "ggml"
    torch: str | None = None
    answers: tuple[int, int] | None = None
    scales: tuple[int, ...] = ()

    @property
    def is_quantized(self) -> bool:
        """Whether values share scales in blocks."""
        return self.block != 1 or self.kind != "plain"

    def n_bytes(self, shape: tuple[int, ...]) -> int:
        """Stored bytes of a tensor of `shape` (row-major). Raises UsageError unless blocks divide the rows.

        AprQ8 has one scale per tensor (4 + n, nothing for n = 0), AprQ4 rounds its flat length up to blocks.
        """
        n = n_elements(shape)
        if self.name == "AprQ8":
            return 4 + n if n else 0
        if self.name == "AprQ4":
            return self.block_bytes * -(-n // self.block)
        cols = shape[-1] if shape else 1
        if self.block > 1 and n and cols % self.block:
            raise UsageError(f"{self.name} stores blocks of {self.block} values, which do not divide a row of {cols}")
        return n // self.block * self.block_bytes


def n_elements(shape: tuple[int, ...]) -> int:
    """Product of the dims; raises LimitError beyond 2^63 (files give dims as u64)."""
    n = prod(shape)
    if n >= 1 << 63:
        raise LimitError(f"a tensor of shape {list(shape)} has more elements than any file can hold")
    return n


DTYPES: dict[str, Dtype] = {
    row.name: row
    for row in (
        #     name        apr   ggml  safetensors block bytes numpy  kind
        Dtype("F32", 0, 0, "F32", 1, 4, "<f4", "plain", torch="float32"),
        Dtype("F16", 1, 1, "F16", 1, 2, "<f2", "plain", torch="float16"),
        Dtype("BF16", 30, 30, "BF16", 1, 2, "<u2", "plain", torch="bfloat16"),
        Dtype("F64", 3, 28, "F64", 1, 8, "<f8", "plain", torch="float64"),
        Dtype("I8", 6, 24, "I8", 1, 1, "<i1", "plain", torch="int8"),
        Dtype("I16", None, 25, "I16", 1, 2, "<i2", "plain", torch="int16"),
        Dtype("I32", 4, 26, "I32", 1, 4, "<i4", "plain", torch="int32"),
        Dtype("I64", 5, 27, "I64", 1, 8, "<i8", "plain", torch="int64"),
        Dtype("U8", 7, None, "U8", 1, 1, "<u1", "plain", torch="uint8"),
        Dtype("U16", None, None, "U16", 1, 2, "<u2", "plain", torch="uint16"),
        Dtype("U32", None, None, "U32", 1, 4, "<u4", "plain", torch="uint32"),
        Dtype("U64", None, None, "U64", 1, 8, "<u8", "plain", torch="uint64"),
        Dtype("BOOL", None, None, "BOOL", 1, 1, "<u1", "plain", torch="bool"),
        Dtype("F8_E4M3", None, None, "F8_E4M3", 1, 1, "<u1", "plain", torch="float8_e4m3fn"),
        Dtype("F8_E5M2", None, None, "F8_E5M2", 1, 1, "<u1", "plain", torch="float8_e5m2"),
        Dtype("F8_E8M0", None, None, "F8_E8M0", 1, 1, "<u1", "plain", torch="float8_e8m0fnu"),
        Dtype("C64", None, None, "C64", 1, 8, "<c8", "plain", torch="complex64"),
        Dtype("AprQ4", 128, None, None, 32, 18, None, "aprq"),
        Dtype("AprQ8", 129, None, None, 1, 1, None, "aprq"),
        Dtype("Q4_0", None, 2, None, 32, 18, answers=(0x520B4E9D, 0xF048AA44), scales=(0,)),
        Dtype("Q4_1", None, 3, None, 32, 20, answers=(0xAF8C825B, 0xB612BD88), scales=(0, 2)),
        Dtype("Q5_0", None, 6, None, 32, 22, answers=(0xB60FA8CB, 0x9ABAE1C5), scales=(0,)),
        Dtype("Q5_1", None, 7, None, 32, 24, answers=(0x82940A9C, 0x110B89B5), scales=(0, 2)),
        Dtype("Q8_0", None, 8, None, 32, 34, answers=(0x90CD23CE, 0x9D87E099), scales=(0,)),
        Dtype("Q8_1", None, 9, None, 32, 40),
        Dtype("Q2_K", None, 10, None, 256, 84, answers=(0x01FE78A8, 0x5C8D7F2D), scales=(80, 82)),
        Dtype("Q3_K", None, 11, None, 256, 110, answers=(0x0A13D009, 0x2B6F0E4A), scales=(108,)),
        Dtype("Q4_K", 12, 12, None, 256, 144, answers=(0x60E14A52, 0x8C0CAA68), scales=(0, 2)),
        Dtype("Q5_K", None, 13, None, 256, 176, answers=(0x1329A65A, 0xBA0082E8), scales=(0, 2)),
        Dtype("Q6_K", 14, 14, None, 256, 210, answers=(0x6CF8D642, 0x8556EAA8), scales=(208,)),
        Dtype("Q8_K", None, 15, None, 256, 292),
        Dtype("IQ2_XXS", None, 16, None, 256, 66, answers=(0x366FC602, 0x830DEA13), scales=(0,)),
        Dtype("IQ2_XS", None, 17, None, 256, 74, answers=(0x35011156, 0xC0251C13), scales=(0,)),
        Dtype("IQ3_XXS", None, 18, None, 256, 98, answers=(0x33A8D3A6, 0xBE22607B), scales=(0,)),
        Dtype("IQ1_S", None, 19, None, 256, 50, answers=(0x8B61BB85, 0xF9748A91), scales=(0,)),
        Dtype("IQ4_NL", None, 20, None, 32, 18, answers=(0x63A3B4A8, 0xE90AE0A7), scales=(0,)),
        Dtype("IQ3_S", None, 21, None, 256, 110, answers=(0x31E0F77D, 0x6EE64F11), scales=(0,)),
        Dtype("IQ2_S", None, 22, None, 256, 82, answers=(0xD89286A2, 0x9C37F0F6), scales=(0,)),
        Dtype("IQ4_XS", None, 23, None, 256, 136, answers=(0xA1B36B0D, 0x8131AFB0), scales=(0,)),
        Dtype("IQ1_M", None, 29, None, 256, 56, answers=(0x86321C97, 0xA21C8558)),
        Dtype("TQ1_0", None, 34, None, 256, 54, answers=(0x90CE9B86, 0x176F396A), scales=(52,)),
        Dtype("TQ2_0", None, 35, None, 256, 66, answers=(0x08E77E3D, 0x91DE8987), scales=(64,)),
        Dtype("MXFP4", None, 39, None, 32, 17, answers=(0xCDDC91C4, 0x5B9C7F5C)),
        Dtype("NVFP4", None, 40, None, 64, 36, answers=(0xB4657A12, 0xDF732CBE)),
        Dtype("Q1_0", None, 41, None, 128, 18, answers=(0x820C0562, 0xDE9948CF), scales=(0,)),
        Dtype("Q2_0", None, 42, None, 64, 18, answers=(0x1AE88425, 0xFFCC4148), scales=(0,)),
    )
}

DTYPES_BY_APR_ID = {row.apr_id: row for row in DTYPES.values() if row.apr_id is not None}
# Readers must still accept the ids that the two native dtypes had before they moved out of GGML's range.
DTYPES_BY_APR_ID |= {8: DTYPES["AprQ4"], 9: DTYPES["AprQ8"]}
DTYPES_BY_GGML_ID = {row.ggml_id: row for row in DTYPES.values() if row.ggml_id is not None}
DTYPES_BY_SAFETENSORS = {row.safetensors: row for row in DTYPES.values() if row.safetensors is not None}


def _key(name: str) -> str:
    return name.lower().replace("_", "")


_SPELLINGS = {"fp32": "F32", "float32": "F32", "fp16": "F16", "float16": "F16", "half": "F16", "bfloat16": "BF16"}
"""Other programs' names of float dtypes."""

_BY_NAME = {_key(name): row for name, row in DTYPES.items()}
_BY_NAME |= {spelling: DTYPES[name] for spelling, name in _SPELLINGS.items()}


def find_dtype(name: str) -> Dtype:
    """The row called `name`, ignoring case and underscores (`Q4K`, `apr_q8`, `fp16`). Raises UsageError."""
    row = _BY_NAME.get(_key(name))
    if row is None:
        raise UsageError(f"unknown dtype {name!r}", hint="known: " + ", ".join(DTYPES))
    return row


# --- totals ---


class Measured(Protocol):
    """Anything with a dtype and a size: a stored or planned tensor."""

    @property
    def dtype(self) -> str:
        """Dtype of the bytes, a row of DTYPES."""

    @property
    def shape(self) -> Shape:
        """Row-major shape."""

    @property
    def n_bytes(self) -> int:
        """Length in bytes."""


class DtypeTotals(TypedDict):
    """Totals of one dtype in a file."""

    tensors: int
    params: int
    bytes: int


def dtype_totals(tensors: Iterable[Measured]) -> dict[str, DtypeTotals]:
    """Totals by dtype, in order of first occurrence."""
    totals: dict[str, DtypeTotals] = {}
    for tensor in tensors:
        row = totals.setdefault(tensor.dtype, DtypeTotals(tensors=0, params=0, bytes=0))
        row["tensors"] += 1
        row["params"] += n_elements(tensor.shape)
        row["bytes"] += tensor.n_bytes
    return totals
