"""Measures how much requantization changes weights, while they are written."""

from __future__ import annotations

import math
from threading import Lock
from typing import TypedDict

from aprfmt.types import Array

RequantizedWeight = TypedDict("RequantizedWeight", {"tensor": str, "from": str, "to": str, "relative_error": float})
"""A weight that was decoded, changed and quantized again: the RMSE of the last step over the RMS of its values."""


class RequantizationErrors:
    """Sums of squares by weight; several threads may add to them."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, str, str], list[float]] = {}
        self._lock = Lock()

    def add(self, tensor: str, source: str, target: str, values: Array, stored: Array) -> None:
        """Adds float32 values of a weight and their requantized values."""
        wide = values.reshape(-1).astype("f8")
        error, size = float(((stored.reshape(-1) - wide) ** 2).sum()), float((wide**2).sum())
        with self._lock:
            sums = self._sums.setdefault((tensor, source, target), [0.0, 0.0])
            sums[0] += error
            sums[1] += size

    def rows(self) -> list[RequantizedWeight]:
        """One row per weight, by name."""
        return [
            RequantizedWeight({"tensor": name, "from": a, "to": b, "relative_error": math.sqrt(error / size)})
            for (name, a, b), (error, size) in sorted(self._sums.items())
            if size
        ]

    def sentences(self) -> list[str]:
        """One sentence for each pair of types."""
        rows = self.rows()
        found = []
        for a, b in sorted({(row["from"], row["to"]) for row in rows}):
            own = sorted(row["relative_error"] for row in rows if (row["from"], row["to"]) == (a, b))
            found.append(
                f"{len(own):,} merged weights requantized from {a} to {b}: relative error {own[len(own) // 2]:.2%} "
                f"in the median, {own[-1]:.2%} at most"
            )
        return found
