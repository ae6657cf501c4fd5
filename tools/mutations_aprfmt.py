"""Faults of the package that reads and writes models."""

from __future__ import annotations

from mutation import Mutation

# fmt: off
APRFMT: tuple[Mutation, ...] = ()
