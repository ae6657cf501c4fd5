"""Chooses the tensors of a model by a glob, in the names of its container or of the other convention."""

from __future__ import annotations

from collections.abc import Iterator

from aprfmt.model import Model, Tensor
from aprfmt.text import name_filter


def chosen_tensors(model: Model, glob: str | None) -> list[Tensor]:
    """The tensors whose names match `glob` (without wildcards: contain it).

    If none does, those that contain a match, also by their names in the other convention: `layers.3.*attn` of a GGUF,
    `blk.3` of a checkpoint.
    """
    entries, fits = model.tensors.entries, name_filter(glob)
    found = [tensor for tensor in entries if fits(tensor.name)]
    if found or glob is None:
        return found
    from aprfmt.arch.names import matches, spell  # loading the table of architectures takes a while
    from aprfmt.arch.table import row_of

    fits = name_filter(f"*{glob}*")
    is_gguf = model.convention == "gguf"
    row = row_of(model.hparams, kv=model.metadata if is_gguf else None, tensor_names=model.tensors)
    here, there = ("gguf", "hf") if is_gguf else ("hf", "gguf")

    def names(name: str) -> Iterator[str]:
        yield name
        for match in matches(row, name, here) if row is not None else ():
            if not match.row.first:  # else the two conventions number layers differently
                for template in getattr(match.row, there):
                    yield spell(template, match.layer, match.expert)

    return [tensor for tensor in entries if any(map(fits, names(tensor.name)))]
