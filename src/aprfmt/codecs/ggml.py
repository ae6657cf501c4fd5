"""GGML blocks: chooses the backend that decodes or encodes a dtype, and checks what is written.

libggml is used if it reproduces known answers (`Dtype.answers`): one that rounds differently is skipped rather than
writing other bytes. Only libggml encodes K-quants, IQ types and anything with column importances; without it
`ggml_numpy` and gguf-py are used.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from functools import partial

from aprfmt.codecs import backend, ggml_numpy
from aprfmt.codecs.backend import GgmlLibrary
from aprfmt.codecs.dtypes import DTYPES, Dtype
from aprfmt.codecs.stream import blocks
from aprfmt.errors import MissingDependencyError, RefusedError, UnsupportedError, UsageError
from aprfmt.io.source import Buffer
from aprfmt.types import Array

_NUMPY_BLOCK = 1 << 17
"""Values per call: few enough for the caches, enough for two threads to run in parallel."""

_MOST = 2.0**30
"""No block scale yields a value beyond this (an f16 times at most 127 * 32)."""

_UNBOUNDED = ("MXFP4", "NVFP4")
"""Types without an f16 scale: MXFP4 covers the range of float32, NVFP4 clamps to its maximum."""

MOST_WEIGHT = 2.0**60
"""Maximum importance of a column: squares of values times it must fit a float32, or the encoders yield NaN."""

_HINT = "pip install libggml-python"


def decodable(dtype: str) -> bool:
    """Whether `decode` supports the GGML dtype; not Q8_1 and Q8_K, which exist only within a computation."""
    return DTYPES[dtype].answers is not None


def encodable(dtype: str) -> bool:
    """Whether `encode` can write the GGML dtype on this machine: some need libggml."""
    return dtype in ggml_numpy.ENCODABLE or (
        backend.forced() in (None, "ggml") and any(_find_libraries(dtype, "encode"))
    )


def needs_weights(dtype: str) -> bool:
    """Whether the GGML dtype requires column importances. False if libggml is missing."""
    lib, ggml_id = next(_find_libraries(dtype, "encode"), None), DTYPES[dtype].ggml_id
    return lib is not None and ggml_id is not None and lib.needs_weights(ggml_id)


def _find_libraries(dtype: str, direction: str) -> Iterator[GgmlLibrary]:
    """The libraries that export the function."""
    row = DTYPES[dtype]
    if row.answers is not None:
        yield from (lib for lib in backend.libraries() if has_type(lib, row, direction))


def _choose(dtype: str, direction: str, *, numpy: bool) -> GgmlLibrary | None:
    """The library to use, None for numpy. Raises MissingDependencyError if neither is possible."""
    row, check = DTYPES[dtype], decode_agrees if direction == "decode" else encode_agrees
    names = ("numpy", "ggml") if (dtype, direction) in ggml_numpy.FASTER else ("ggml", "numpy")
    for name in backend.order(*(name for name in names if name != "numpy" or numpy)):
        if name == "numpy":
            return None
        for lib in _find_libraries(dtype, direction):
            # For IQ types the known answer takes seconds, since tables are built for it.
            if lib.agrees(symbol(row, direction), partial(check, lib, row)):
                return lib
    raise missing_library(dtype, direction)


def missing_library(dtype: str, direction: str) -> MissingDependencyError:
    """The error for a type that cannot be decoded or encoded on this machine, with the reason."""
    libs, forced = [*backend.libraries()], backend.forced()
    if forced not in (None, "ggml"):
        why = f"{backend.VARIABLE}={forced} disables it"
    else:
        wrong = (f"that of {lib.path}, version {lib.version}" for lib in libs)
        why = " and ".join(wrong) + " lacks the type or returns wrong bytes" if libs else backend.absence()
    return MissingDependencyError(f"to {direction} {dtype} needs llama.cpp's libggml: {why}", hint=_HINT)


def decode(dtype: str, data: Buffer | Array, *, cols: int | None = None, tensor: str | None = None) -> Array:
    """Decodes whole blocks to float32, 1-d; with `cols`, whole rows without their padding.

    Raises UnsupportedError for dtypes without a decoder.
    """
    import numpy as np

    row = DTYPES[dtype]
    if not decodable(dtype):
        raise UnsupportedError(
            f"{dtype} cannot be decoded", tensor=tensor, hint="keep the stored dtype with --dtype keep"
        )
    stored = np.frombuffer(data, dtype="u1").reshape(-1, row.block_bytes)
    out = np.empty((len(stored), row.block), dtype="<f4")
    lib = _choose(dtype, "decode", numpy=True)
    if lib is not None:
        function = lib.row(symbol(row, "decode"))
        assert function is not None
        if stored.ctypes.data % 4:  # compilers may rely on the alignment of the fields
            stored = stored.copy()
        if out.size:
            function(stored.ctypes.data, out.ctypes.data, out.size)
    else:
        run = ggml_numpy.decoder(row)
        with np.errstate(all="ignore"):
            for part in blocks(len(stored), _NUMPY_BLOCK // row.block):
                run(stored[part], out[part])
    if cols is not None:
        out = out.reshape(-1, -(-cols // row.block) * row.block)[:, :cols]
    return out.reshape(-1)


def encode(
    dtype: str, values: Array, cols: int | None = None, weights: Array | None = None, *, start: int = 0
) -> Array:
    """float32 values as stored bytes, uint8.

    Args:
        dtype: a GGML block type.
        values: float32, 1-d.
        cols: values per row, for `weights`; without them any number of whole blocks.
        weights: float32 [cols], column importances; None: all equal.
        start: offset of `values` in their tensor, for messages.

    Raises:
        UsageError: blocks do not divide a row.
        RefusedError: a value is NaN, infinite or out of the type's range; weights are invalid, or missing for a type
            that needs them.
        MissingDependencyError: the type needs libggml, which is missing.
    """
    import numpy as np

    row = DTYPES[dtype]
    if weights is None:  # all blocks are independent
        cols = row.block
    if cols is None or cols % row.block or values.size % max(cols, 1):
        raise UsageError(
            f"{dtype} stores blocks of {row.block} values, which do not divide {values.size} in rows of {cols}"
        )
    by_numpy = dtype in ggml_numpy.ENCODABLE and (weights is None or dtype not in ggml_numpy.WEIGHTED)
    lib = _choose(dtype, "encode", numpy=by_numpy)
    if weights is not None:
        weights = _check_weights(weights, cols)
    values = np.require(values, "<f4", ["C", "A"]).reshape(-1)
    _check_values(dtype, values, start)
    out = np.empty((values.size // row.block, row.block_bytes), dtype="u1")
    if lib is None:
        run, rows = ggml_numpy.encoder(row), values.reshape(-1, row.block)
        with np.errstate(all="ignore"):
            for part in blocks(len(rows), _NUMPY_BLOCK // row.block):
                run(rows[part], out[part])
    elif values.size:
        assert row.ggml_id is not None
        if weights is None and lib.needs_weights(row.ggml_id):
            raise RefusedError(
                f"{dtype} needs an importance matrix", hint="compute one with apr imatrix, then add --imatrix FILE"
            )
        address = None if weights is None else weights.ctypes.data
        target, n_rows = out.ctypes.data, values.size // cols
        written = lib.quantize(row.ggml_id, values.ctypes.data, target, n_rows, cols, address)
        if written != out.nbytes:
            raise MissingDependencyError(f"{lib.path} wrote {written} of {out.nbytes} bytes of {dtype}", hint=_HINT)
    bad = ~finite_scales(dtype, out)
    if bad.any():  # llama.cpp refuses such blocks
        raise RefusedError(
            f"the block of value {start + int(np.argmax(bad)) * row.block} exceeds the scale range of {dtype}",
            hint="choose another dtype for it, such as --tensor-type NAME=f32",
        )
    return out.reshape(-1)


def _check_weights(weights: Array, cols: int) -> Array:
    import numpy as np

    weights = np.require(weights, "<f4", ["C", "A"]).reshape(-1)
    if weights.size != cols:
        raise RefusedError(f"the importance matrix has {weights.size} values for rows of {cols}")
    if not (weights.min() >= 0 and weights.max() <= MOST_WEIGHT):
        raise RefusedError("an importance value is negative, above 2^60 or NaN")
    return weights


def _check_values(dtype: str, values: Array, start: int) -> None:
    """libggml aborts the process on NaN or infinity, or writes what it refuses to load."""
    import numpy as np

    if not values.size:
        return
    most = np.finfo("f4").max if dtype in _UNBOUNDED else _MOST
    if values.min() >= -most and values.max() <= most:  # false where one is a NaN
        return
    at = int(np.argmin(np.abs(values) <= most))
    fix = "choose another dtype for it, such as --tensor-type NAME=f32"
    raise RefusedError(
        f"value {start + at} is {values[at]}, which {dtype} cannot represent",
        hint=fix if np.isfinite(values[at]) else f"the weights are damaged: apr validate FILE; or {fix}",
    )


def finite_scales(dtype: str, stored: Array) -> Array:
    """Whether llama.cpp accepts the scales of each block [n, block_bytes] of a GGML dtype: bool [n]."""
    import numpy as np

    row = DTYPES[dtype]
    if dtype == "MXFP4":
        return np.asarray(stored[:, 0] != 0xFF)
    good = np.ones(len(stored), dtype=bool)
    if dtype == "IQ1_M":  # the scale is spread over the top bits of four words
        words = stored.view("<u2")
        good &= ((words[:, 27] & 0xF000 | (words[:, 26] & 0xF000) >> 4) & 0x7C00) != 0x7C00
    for at in row.scales:
        good &= (stored.view("<u2")[:, at // 2] & 0x7C00) != 0x7C00
    return good


# --- known answers: CRC-32 values of what numpy gives or, where only libggml encodes, of what llama.cpp gave ---

_N_VALUES = 1024
_COLS = 256


def symbol(row: Dtype, direction: str) -> str:
    """The function of libggml that decodes or encodes a type."""
    return ("dequantize_row_" if direction == "decode" else "quantize_") + _ggml_name(row)


def _ggml_name(row: Dtype) -> str:
    return row.name.lower().replace("_k", "_K")


def stored_pattern(row: Dtype) -> Array:
    """Test blocks to decode, uint8: every byte value, in a pattern that permuted bits would break."""
    import numpy as np

    i = np.arange(_N_VALUES // row.block * row.block_bytes)
    return (i * 37 + 11 * (i // 7) + 101).astype("u1")


def value_pattern() -> Array:
    """Test values to encode, float32: small multiples of powers of two, so that few sums are rounded."""
    import numpy as np

    i = np.arange(_N_VALUES)
    values = ((i * i * 7 + i * 37) % 509 - 254).astype("f4") / np.float32(64)
    return np.ldexp(values, -(i // _COLS)).astype("f4")


def weight_pattern() -> Array:
    """Test column importances, float32."""
    import numpy as np

    return ((np.arange(_COLS) * 5 % 17 + 1) / 8).astype("f4")


def checksum_values(values: Array) -> int:
    """Checksum of decoded values; all NaNs are equal."""
    import numpy as np

    return zlib.crc32(np.where(np.isnan(values), np.float32(0), values).astype("<f4").tobytes())


def decode_agrees(lib: GgmlLibrary, row: Dtype) -> bool:
    """Whether the library decodes the test blocks correctly."""
    import numpy as np

    run = lib.row(symbol(row, "decode"))
    if run is None or row.answers is None or not has_type(lib, row, "decode"):
        return False
    stored, out = stored_pattern(row), np.empty(_N_VALUES, dtype="f4")
    run(stored.ctypes.data, out.ctypes.data, out.size)
    return checksum_values(out) == row.answers[0]


def encode_agrees(lib: GgmlLibrary, row: Dtype) -> bool:
    """Whether the library encodes the test values correctly, with and without weights."""
    return has_type(lib, row, "encode") and row.answers is not None and checksum_encoding(lib, row) == row.answers[1]


def checksum_encoding(lib: GgmlLibrary, row: Dtype) -> int:
    """CRC-32 of the library's encoding of the test values: without weights, if the type supports it, then with them."""
    import numpy as np

    assert row.ggml_id is not None
    values, weights = value_pattern(), weight_pattern()
    crc = 0
    for address in (None, weights.ctypes.data):
        if address is None and lib.needs_weights(row.ggml_id):
            continue
        out = np.zeros(_N_VALUES // row.block * row.block_bytes, dtype="u1")
        lib.quantize(row.ggml_id, values.ctypes.data, out.ctypes.data, _N_VALUES // _COLS, _COLS, address)
        crc = zlib.crc32(out.tobytes(), crc)
    return crc


def has_type(lib: GgmlLibrary, row: Dtype, direction: str) -> bool:
    """Whether the library has the function, and the type as in the dtype table."""
    assert row.ggml_id is not None
    if not lib.has(symbol(row, direction)):  # the geometry of an unknown type would be read beyond its table
        return False
    return lib.geometry(row.ggml_id) == (_ggml_name(row), row.block, row.block_bytes)
