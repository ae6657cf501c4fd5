"""Values that every GGML block type is encoded from, and blocks that it is decoded from. A dtype needs no row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from aprfmt.codecs import DTYPES, ggml, ggml_numpy

Array = np.ndarray[Any, Any]

BLOCKS = tuple(name for name, row in DTYPES.items() if row.kind == "ggml" and ggml.decodable(name))
BY_NUMPY = ggml_numpy.ENCODABLE
BY_LIBRARY = tuple(name for name in BLOCKS if name not in BY_NUMPY)

ROWS, COLS = 24, 512

SLOW = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S")
"""libggml makes tables for seconds before it encodes these."""


def _draw(kind: str) -> Array:
    return getattr(np.random.default_rng(len(kind)), kind)(size=(ROWS, COLS))  # type: ignore[no-any-return]


def _zeros_of_both_signs() -> Array:
    return np.where(_draw("random") < 0.5, -0.0, 0.0)


def _powers() -> Array:
    """Blocks whose largest value is a power of two or a few steps below it, over all of the exponents but two."""
    rng = np.random.default_rng(5)
    exponents = np.resize(np.arange(-122, 15), (ROWS, COLS // 32))
    top = np.ldexp(np.float32(1), exponents).astype("f4").view("i4") - rng.integers(0, 8, exponents.shape)
    values = rng.uniform(-0.9, 0.9, (ROWS, COLS // 32, 32)) * top.astype("i4").view("f4")[:, :, None]
    values[:, :, 7] = top.astype("i4").view("f4")
    return np.reshape(values, (ROWS, COLS))


VALUES: dict[str, Callable[[], Array]] = {
    "normal": lambda: _draw("standard_normal"),
    "uniform": lambda: _draw("random") * 2 - 1,
    "positive": lambda: _draw("random"),
    "zero": lambda: np.zeros((ROWS, COLS)),
    "minus zero": lambda: -np.zeros((ROWS, COLS)),
    "zeros of both signs": _zeros_of_both_signs,
    "sparse": lambda: np.where(_draw("random") < 0.03, np.abs(_draw("standard_normal")), _zeros_of_both_signs()),
    "constant": lambda: np.full((ROWS, COLS), 0.37),
    "negative constant": lambda: np.full((ROWS, COLS), -0.37),
    "alternating": lambda: np.resize([0.5, -0.5], (ROWS, COLS)),
    "alternating from below": lambda: np.resize([-0.5, 0.5], (ROWS, COLS)),
    "halves": lambda: np.round(_draw("random") * 508 - 254) / 2,
    "denormal": lambda: _draw("standard_normal") * 1e-40,
    "no inverse": lambda: _draw("standard_normal") * np.geomspace(1e-45, 1e-30, ROWS)[:, None] + 3e-37,
    "tiny": lambda: _draw("standard_normal") * np.geomspace(1e-30, 1e-5, ROWS)[:, None] + 1e-34,
    "outlier": lambda: np.where(_draw("random") < 0.004, 1000, _draw("standard_normal")),
    "large": lambda: (_draw("random") * 2 - 1) * 60000,
    "powers of two": _powers,
}
"""float64 [ROWS, COLS] that every type can hold, as float32."""

FOREIGN: dict[str, float] = {"NaN": np.nan, "infinity": np.inf, "minus infinity": -np.inf}
"""What no block holds."""


def values_of(kind: str) -> Array:
    """float32 [ROWS, COLS]."""
    return VALUES[kind]().astype("f4")


def weights_of(kind: str) -> Array:
    """An importance of the columns, float32."""
    rng = np.random.default_rng(3)
    return {"random": rng.random(COLS), "sparse": np.where(rng.random(COLS) < 0.1, 1.0, 0.0)}[kind].astype("f4")


def random_blocks(name: str, n: int, *, sane: bool) -> Array:
    """Blocks of random bytes [n, bytes]; scales may be NaN or infinite unless `sane`."""
    stored = np.random.default_rng(7).integers(0, 256, (n, DTYPES[name].block_bytes), dtype="u1")
    if not sane:
        stored[: n // 2] |= 0x7C  # every second f16 is NaN or infinite
        return stored
    return stored[ggml.finite_scales(name, stored)]
