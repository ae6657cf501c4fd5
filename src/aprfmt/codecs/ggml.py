"""GGML blocks: which backend decodes or encodes a dtype, and what may be written.

The numpy code (`ggml_legacy`, `ggml_k`, `ggml_fp4`; gguf.quants for the IQ types) is the reference for values;
libggml is used where it gives the known answers of `ggml_answers`, and alone encodes K-quants, IQ types and
anything with an importance of columns.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from aprfmt.codecs import backend, ggml_fp4, ggml_k, ggml_legacy, libggml
from aprfmt.codecs.dtypes import DTYPES, Dtype
from aprfmt.codecs.ggml_answers import decode_agrees, encode_agrees, has, symbol
from aprfmt.codecs.stream import blocks
from aprfmt.errors import MissingDependencyError, RefusedError, UnsupportedError, UsageError
from aprfmt.types import Array

if TYPE_CHECKING:
    import numpy as np

    from aprfmt.codecs.ggml_legacy import Run
    from aprfmt.codecs.libggml import Library

LAYOUTS: dict[str, tuple[tuple[Any, ...], ...]] = {
    **ggml_legacy.LAYOUTS,
    **ggml_fp4.LAYOUTS,
    **ggml_k.LAYOUTS,
    "IQ2_XXS": (("d", "<f2"), ("qs", "u1", 64)),
    "IQ2_XS": (("d", "<f2"), ("qs", "u1", 72)),
    "IQ2_S": (("d", "<f2"), ("qs", "u1", 80)),
    "IQ3_XXS": (("d", "<f2"), ("qs", "u1", 96)),
    "IQ3_S": (("d", "<f2"), ("qs", "u1", 108)),
    "IQ1_S": (("d", "<f2"), ("qs", "u1", 48)),
    "IQ1_M": (("qs", "u1", 48), ("scales", "<u2", 4)),
    "IQ4_NL": (("d", "<f2"), ("qs", "u1", 16)),
    "IQ4_XS": (("d", "<f2"), ("qs", "u1", 134)),
}
"""Fields of a block as far as they matter: those called d and m are scales that must be finite."""

ENCODERS: dict[str, Run] = {**ggml_legacy.ENCODERS, **ggml_fp4.ENCODERS, **ggml_k.ENCODERS}
DECODERS: dict[str, Run] = {**ggml_legacy.DECODERS, **ggml_fp4.DECODERS, **ggml_k.DECODERS}

ENCODABLE = tuple(ENCODERS)
"""What numpy can write."""

UNREADABLE = ("Q8_1", "Q8_K")
"""Intermediate types of a computation, which no model file holds."""

_WEIGHTS_IGNORED = ("Q1_0", "Q2_0", "Q8_0", "TQ1_0", "TQ2_0", "MXFP4", "NVFP4")
"""Encoded alike with and without an importance of columns."""

_NUMPY_BLOCK = 1 << 17
"""Values at a time: few enough for the caches, enough for two threads to run side by side."""

_NUMPY_FIRST = {
    *((name, "encode") for name in ("Q1_0", "Q2_0", "Q8_0", "MXFP4", "NVFP4")),
    *((name, "decode") for name in ("Q1_0", "Q2_0")),
}
"""Where numpy is faster than libggml, which is built for any processor."""

_MOST = 2.0**30
"""No scale of a block reaches a value beyond this (an f16 times at most 127 * 32)."""

_UNBOUNDED = ("MXFP4", "NVFP4")
"""Without an f16 scale: MXFP4 reaches what a float32 does, NVFP4 takes the largest it has."""

MOST_WEIGHT = 2.0**60
"""Largest importance of a column: squares of values times it must stay within a float32, or the encoders give NaN."""

_HINT = "pip install 'aprfmt[llama]'"


def decodable(dtype: str) -> bool:
    """Whether `decode` knows the GGML dtype."""
    return DTYPES[dtype].kind == "ggml" and dtype not in UNREADABLE


def encodable(dtype: str) -> bool:
    """Whether `encode` can write the GGML dtype here: some need libggml."""
    return dtype in ENCODERS or (backend.forced() in (None, "ggml") and _present(dtype, "encode") is not None)


def needs_weights(dtype: str) -> bool:
    """Whether the GGML dtype can only be written with an importance of columns. False where libggml is missing."""
    lib, ggml_id = _present(dtype, "encode"), DTYPES[dtype].ggml_id
    return lib is not None and ggml_id is not None and lib.needs_weights(ggml_id)


def _present(dtype: str, direction: str) -> Library | None:
    """The library, if it has the function."""
    lib, row = libggml.library(), DTYPES[dtype]
    return lib if lib is not None and dtype in LAYOUTS and has(lib, row, direction) else None


def _trusted(dtype: str, direction: str) -> Library | None:
    """The library, if it also gives the known answer: seconds for IQ types, whose tables are made for it."""
    lib, row = _present(dtype, direction), DTYPES[dtype]
    if lib is None:
        return None
    check = decode_agrees if direction == "decode" else encode_agrees
    return lib if lib.agrees(symbol(row, direction), lambda: check(lib, row)) else None


def _choose(dtype: str, direction: str, *, numpy: bool) -> Library | None:
    """The library that does it, None for numpy. Raises MissingDependencyError where neither may."""
    names = ("numpy", "ggml") if (dtype, direction) in _NUMPY_FIRST else ("ggml", "numpy")
    for name in backend.order(*(name for name in names if name != "numpy" or numpy)):
        if name == "numpy":
            return None
        lib = _trusted(dtype, direction)
        if lib is not None:
            return lib
    raise missing(dtype, direction)


def missing(dtype: str, direction: str) -> MissingDependencyError:
    """The error for a type that cannot be decoded or encoded here, with the reason."""
    lib, forced = libggml.library(), backend.forced()
    if forced not in (None, "ggml"):
        why = f"{backend.VARIABLE}={forced} forbids it"
    elif lib is None:
        why = libggml.absence()
    else:
        why = f"that of {lib.path}, version {lib.version}, is unknown or gives other bytes than it should"
    return MissingDependencyError(f"to {direction} {dtype} takes llama.cpp's libggml: {why}", hint=_HINT)


def decode(dtype: str, data: Any, *, tensor: str | None = None) -> Array:
    """Whole blocks as float32, 1-d. Raises UnsupportedError for dtypes that no decoder exists for."""
    import numpy as np

    row = DTYPES[dtype]
    if dtype in UNREADABLE:
        raise UnsupportedError(
            f"{dtype} cannot be decoded", tensor=tensor, hint="keep the tensor as it is (--dtype keep)"
        )
    stored = np.frombuffer(data, dtype="u1").reshape(-1, row.block_bytes)
    out = np.empty((len(stored), row.block), dtype="<f4")
    lib = _choose(dtype, "decode", numpy=True)
    if lib is not None:
        run = lib.row(symbol(row, "decode"))
        assert run is not None
        if stored.ctypes.data % 4:  # compilers may rely on the alignment of the fields
            stored = stored.copy()
        if out.size:
            run(stored.ctypes.data, out.ctypes.data, out.size)
        return out.reshape(-1)
    decoder = DECODERS.get(dtype) or _decode_gguf(row)
    fields = stored.view(layout(dtype))[:, 0] if dtype in DECODERS else stored
    with np.errstate(all="ignore"):
        for part in blocks(len(stored), _NUMPY_BLOCK // row.block):
            decoder(fields[part], out[part])
    return out.reshape(-1)


@cache
def layout(dtype: str) -> np.dtype[Any]:
    """A block as a numpy structure."""
    import numpy as np

    return np.dtype([*LAYOUTS[dtype]])


def _decode_gguf(row: Dtype) -> Run:
    try:
        import gguf.quants
    except ImportError as error:
        raise MissingDependencyError(f"{row.name} needs the package gguf", hint="pip install gguf") from error
    kind = gguf.GGMLQuantizationType(row.ggml_id)

    def run(stored: Array, values: Array) -> None:
        # One row holds many blocks: gguf.quants loops over groups of rows in Python.
        values[:] = gguf.quants.dequantize(stored.reshape(1, -1), kind).reshape(values.shape)

    return run


def decode_padded(dtype: str, data: Any, cols: int, *, tensor: str | None = None) -> Array:
    """Whole rows of `cols` values, each padded to whole blocks, as float32, 1-d, without the padding."""
    row_blocks = -(-cols // DTYPES[dtype].block)
    values = decode(dtype, data, tensor=tensor).reshape(-1, row_blocks * DTYPES[dtype].block)
    return values[:, :cols].reshape(-1)


def encode(
    dtype: str, values: Array, cols: int | None = None, weights: Array | None = None, *, start: int = 0
) -> Array:
    """float32 values as stored bytes, uint8.

    Args:
        dtype: a GGML block type.
        values: float32, 1-d.
        cols: values of a row, for `weights`; without them any number of whole blocks will do.
        weights: float32 [cols], how much an error in each column matters; None: equally.
        start: where `values` begin in their tensor, for messages.

    Raises:
        UsageError: blocks do not divide a row.
        RefusedError: a value is NaN, infinite or beyond what the scales of the type reach; weights that no
            importance has; no weights for a type that needs them.
        MissingDependencyError: a type that only libggml writes, without it.
    """
    import numpy as np

    row = DTYPES[dtype]
    if weights is None:  # every block stands for itself
        cols = row.block
    if cols is None or cols % row.block or values.size % max(cols, 1):
        raise UsageError(
            f"{dtype} stores blocks of {row.block} values; {values.size} in rows of {cols} do not divide"
        )
    lib = _choose(dtype, "encode", numpy=dtype in ENCODERS and (weights is None or dtype in _WEIGHTS_IGNORED))
    if weights is not None:
        weights = _checked_weights(weights, cols)
    values = np.require(values, "<f4", ["C", "A"]).reshape(-1)
    _check_values(dtype, values, start)
    out = np.empty((values.size // row.block, row.block_bytes), dtype="u1")
    if lib is None:
        _encode_numpy(row, values.reshape(-1, row.block), out)
    elif values.size:
        _encode_library(lib, row, values.reshape(-1, cols), out, weights)
    _check_scales(dtype, out, start)
    return out.reshape(-1)


def _encode_numpy(row: Dtype, values: Array, out: Array) -> None:
    import numpy as np

    run, fields = ENCODERS[row.name], out.view(layout(row.name))[:, 0]
    with np.errstate(all="ignore"):
        for part in blocks(len(values), _NUMPY_BLOCK // row.block):
            run(values[part], fields[part])


def _encode_library(lib: Library, row: Dtype, values: Array, out: Array, weights: Array | None) -> None:
    assert row.ggml_id is not None
    if weights is None and lib.needs_weights(row.ggml_id):
        raise RefusedError(
            f"{row.name} needs to know which columns matter", hint="give an importance matrix: --imatrix FILE"
        )
    address = None if weights is None else weights.ctypes.data
    rows, cols = values.shape
    written = lib.quantize(row.ggml_id, values.ctypes.data, out.ctypes.data, rows, cols, address)
    if written != out.nbytes:
        raise MissingDependencyError(
            f"{lib.path} wrote {written} of {out.nbytes} bytes of {row.name}", hint=_HINT
        )


def _checked_weights(weights: Array, cols: int) -> Array:
    import numpy as np

    weights = np.require(weights, "<f4", ["C", "A"]).reshape(-1)
    if weights.size != cols:
        raise RefusedError(f"an importance of {weights.size} columns for rows of {cols}")
    if not (weights.min() >= 0 and weights.max() <= MOST_WEIGHT):
        raise RefusedError("an importance is negative, beyond 2^60 or no number")
    return weights


def _check_values(dtype: str, values: Array, start: int) -> None:
    """libggml ends the process, or writes what it refuses to load, when it meets a NaN or an infinity."""
    import numpy as np

    if not values.size:
        return
    most = np.finfo("f4").max if dtype in _UNBOUNDED else _MOST
    if values.min() >= -most and values.max() <= most:  # false where one is a NaN
        return
    at = int(np.argmin(np.abs(values) <= most))
    raise RefusedError(
        f"value {start + at} is {values[at]}, which {dtype} cannot hold",
        hint="give it another dtype, such as --tensor-type NAME=f32",
    )


def _check_scales(dtype: str, out: Array, start: int) -> None:
    """llama.cpp does not load blocks whose scale is infinite or NaN."""
    import numpy as np

    bad = ~finite_scales(dtype, out)
    if bad.any():
        at = start + int(np.argmax(bad)) * DTYPES[dtype].block
        raise RefusedError(
            f"the block of value {at} is beyond the scales of {dtype}",
            hint="give it another dtype, such as --tensor-type NAME=f32",
        )


def finite_scales(dtype: str, stored: Array) -> Array:
    """Of each block [n, block_bytes] of a GGML dtype whether llama.cpp takes its scales: a boolean [n]."""
    import numpy as np

    fields = stored.view(layout(dtype))[:, 0]
    good = np.ones(len(fields), dtype=bool)
    if dtype == "MXFP4":
        good &= fields["e"] != 0xFF
    elif dtype == "IQ1_M":  # the scale is spread over the topmost bits of four words
        words = fields["scales"]
        good &= ((words[:, 3] & 0xF000 | (words[:, 2] & 0xF000) >> 4) & 0x7C00) != 0x7C00
    elif dtype != "NVFP4":
        for name in ("d", "m"):
            if name in (layout(dtype).names or ()):
                good &= (fields[name].view("<u2") & 0x7C00) != 0x7C00
    return good
