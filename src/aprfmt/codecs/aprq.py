"""APR's own quantized dtypes. Values are divided in float32 and rounded half away from zero.

AprQ8, one scale a tensor:        f32 scale | n signed bytes;               scale = max|v| / 127
AprQ4, 18 bytes every 32 values:  f16 scale | 16 bytes, even value low;     scale = max|v| / 7

An all-zero group has scale 1. AprQ4 rounds with the float32 scale and stores it as f16; a stored scale that
is NaN, infinite or subnormal decodes as 0. Unused nibbles of a last, partial block are 0. NaNs become 0.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from aprfmt.codecs import plain
from aprfmt.codecs.stream import blocks
from aprfmt.io.source import Buffer
from aprfmt.types import Array

if TYPE_CHECKING:
    import numpy as np

Q4_VALUES, Q4_BYTES = 32, 18
_F16_MIN_NORMAL = 2.0**-14


def q8_scale(parts: Iterable[Array]) -> float:
    """The scale of an AprQ8 tensor whose float32 values come in `parts`; NaNs are ignored."""
    import numpy as np

    top = np.float32(0)
    for values in parts:
        for part in blocks(values.size):
            top = np.fmax(top, np.fmax.reduce(np.abs(values[part])))
    return float(top / np.float32(127)) if top > 0 else 1.0


def encode_q8(values: Array, scale: float) -> Array:
    """Encodes float32 `values`, any part of a tensor, as signed bytes with `scale`."""
    import numpy as np

    out = np.empty(values.size, dtype="i1")
    for part in blocks(values.size):
        out[part] = _quotients(values[part], np.float32(scale), -127, 127)
    return out


def decode_q8(data: Buffer, scale: float) -> Array:
    """Decodes the signed bytes of an AprQ8 tensor, without the scale, to float32."""
    import numpy as np

    out = np.frombuffer(data, dtype="i1").astype("<f4")
    with np.errstate(over="ignore", invalid="ignore"):
        out *= np.float32(scale)
    return out


def encode_q4(values: Array) -> Array:
    """Encodes float32 `values` as AprQ4 blocks, uint8 [18 * ceil(n / 32)]; only the last block may be partial."""
    import numpy as np

    n_blocks = -(-values.size // Q4_VALUES)
    out = np.zeros((n_blocks, Q4_BYTES), dtype="u1")
    whole = values.size // Q4_VALUES
    step = 1 << 11
    for part in blocks(whole, step):
        _encode_q4_rows(values[part.start * Q4_VALUES : part.stop * Q4_VALUES].reshape(-1, Q4_VALUES), out[part])
    rest = values[whole * Q4_VALUES :]
    if rest.size:
        padded = np.zeros((1, Q4_VALUES), dtype="<f4")
        padded[0, : rest.size] = rest
        _encode_q4_rows(padded, out[whole:])
        out[whole, 2 + -(-rest.size // 2) :] = 0
        if rest.size % 2:
            out[whole, 2 + rest.size // 2] &= 0x0F
    return out.reshape(-1)


def _encode_q4_rows(rows: Array, out: Array) -> None:
    """Encodes float rows [n, 32] as blocks [n, 18]."""
    import numpy as np

    top = np.fmax(np.fmax.reduce(np.abs(rows), axis=1), np.float32(0))
    scale = np.where(top > 0, top / np.float32(7), np.float32(1)).astype("<f4")
    out[:, :2] = plain.encode("F16", scale).view("u1").reshape(-1, 2)
    nibbles = (_quotients(rows, scale[:, None], -8, 7) + np.float32(8)).astype("u1")
    np.bitwise_or(nibbles[:, 0::2], nibbles[:, 1::2] << 4, out=out[:, 2:])


def decode_q4(data: Buffer, n: int) -> Array:
    """Decodes the first `n` values of AprQ4 blocks, float32."""
    import numpy as np

    stored = np.frombuffer(data, dtype="u1").reshape(-1, Q4_BYTES)
    out = np.empty((len(stored), Q4_VALUES), dtype="<f4")
    for part in blocks(len(stored), 1 << 11):
        scale = np.ascontiguousarray(stored[part, :2]).view("<f2").astype("<f4")
        usable = np.isfinite(scale) & (np.abs(scale) >= _F16_MIN_NORMAL)
        scale[~usable] = 0
        packed = stored[part, 2:]
        out[part, 0::2] = packed & 0x0F
        out[part, 1::2] = packed >> 4
        out[part] -= np.float32(8)
        out[part] *= scale
    return out.reshape(-1)[:n]


def _quotients(values: Array, scale: Array | np.float32, low: int, high: int) -> Array:
    """round(values / scale), half away from zero, clamped to low .. high; NaN (0 / 0, inf / inf) gives 0."""
    import numpy as np

    with np.errstate(all="ignore"):
        quotient: Array = np.divide(values, scale, dtype=np.float32)
        np.clip(quotient, np.float32(low - 1), np.float32(high + 1), out=quotient)
        whole: Array = np.trunc(quotient)
        # Adding a half and truncating would lift 0.49999997 to 1; the fraction is exact.
        up = np.abs(quotient - whole) >= np.float32(0.5)
        whole += np.copysign(up.astype("<f4"), quotient)
        np.clip(whole, np.float32(low), np.float32(high), out=whole)
        if np.isnan(whole.sum()):
            whole[np.isnan(whole)] = 0
    return whole
