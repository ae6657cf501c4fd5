"""Canonical form -> a folder for MLX: that of Hugging Face, marked as MLX's own."""

from __future__ import annotations

from aprfmt.canonical.model import Canonical
from aprfmt.convert.lossless.recipe import restorable
from aprfmt.convert.targets.base import Output, Work
from aprfmt.convert.targets.hf import folder_output


def layouts(c: Canonical, work: Work) -> Output:
    """Every file of the folder; the text files are those of the imported folder."""
    recipe = restorable(c, "hf") if c.model.convention == "apr" else None
    return folder_output(c, work, recipe, "mlx")
