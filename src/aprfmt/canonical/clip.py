"""Reads a `clip` GGUF as the towers of a multimodal model, by a row of the tower table."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from aprfmt.arch import names
from aprfmt.arch.grammar import dims_of, evaluate, sizes_of
from aprfmt.arch.hparams import from_gguf
from aprfmt.arch.hyperparams import Hyperparams
from aprfmt.arch.row import Tower
from aprfmt.arch.tower_table import find_tower_gguf
from aprfmt.canonical.model_kinds import CLIP, is_clip
from aprfmt.canonical.naming import name_tensors
from aprfmt.canonical.packed import Packing
from aprfmt.canonical.tensor import CanonicalTensor
from aprfmt.canonical.tower import TowerPart
from aprfmt.errors import RefusedError
from aprfmt.model import Model
from aprfmt.text import first_few
from aprfmt.types import Shape


@dataclass(frozen=True, slots=True)
class ClipTowers:
    """The contents of a `clip` GGUF.

    Attributes:
        part: the row and the hyper-parameters from the keys.
        tensors: by the names of the row; derived tensors (Tower.made) keep their GGUF names.
        others: tensors that the row does not have.
    """

    part: TowerPart
    tensors: Mapping[str, CanonicalTensor]
    others: Mapping[str, CanonicalTensor]

    def check(self) -> None:
        """Raises RefusedError, UnmappedError if the tensors do not match the towers by name and shape."""
        check_towers(self.part.row, self.part.hparams, self.tensors)


def read_towers(model: Model, classes: Collection[str] = ()) -> ClipTowers:
    """Reads the towers of `model`; if several rows share a projector, the one of the `classes`.

    Raises RefusedError for anything but a GGUF of towers, and for unknown towers.
    """
    if not is_clip(model):
        raise RefusedError(
            "--mmproj needs a GGUF of towers",
            path=model.path,
            hint="its general.architecture must be clip: check with apr inspect",
        )
    row = find_tower_gguf(model.metadata, model.tensors, classes)
    if row is None:
        raise RefusedError(
            f"towers with the projector {projectors(model.metadata)} are not supported",
            path=model.path,
            hint="import the file alone to keep it unchanged, or add them as docs/towers.md describes",
        )
    h = from_gguf(model.metadata, model.tensors, row)
    _take_sizes(row, h, {name: tensor.shape for name, tensor in model.tensors.items()})
    tensors, others, _ = name_tensors(model, row, h, False, Packing(), set())
    return ClipTowers(TowerPart(row, h), tensors, others)


def projectors(kv: Mapping[str, object]) -> str:
    """The projector types in the keys."""
    found = (kv.get(f"{CLIP}.{part}projector_type") for part in ("", "vision.", "audio."))
    return first_few([repr(word) for word in found if isinstance(word, str)]) or "None"


def _take_sizes(row: Tower, h: Hyperparams, shapes: Mapping[str, Shape]) -> None:
    """Infers sizes without a GGUF key from tensors, and depths from tensor names."""
    paths = [key.hf[0] for key in row.keys if key.hf and not key.gguf and key.converter is None]
    wanted = {path.rpartition(".")[2]: path for path in paths} | {path: path for path in paths}
    depths = {part.depth for part in row.tensors} & {*wanted.values()}
    found = dict.fromkeys(depths, 0)
    for match in (match for name in shapes if depths for match in names.matches(row, name, "gguf")[:1]):
        if match.row.depth in depths and match.layer is not None:
            found[match.row.depth] = max(found[match.row.depth], match.layer + 1)
    h.extra |= found
    for part in row.tensors:
        if len(part.gguf) != 1 or part.transposed or not wanted:
            continue
        n_layers = evaluate(part.depth, sizes_of(h)) or 0 if "{n}" in part.gguf[0] else 1
        spelled = (names.spell(part.gguf[0], layer) for layer in range(min(n_layers, len(shapes))))
        shape = next((shapes[name] for name in spelled if name in shapes), ())
        own = shape[1:] if "{e}" in part.hf[0] and not part.gguf_dims else shape
        for word, size in zip(dims_of((part.gguf_dims or part.dims)[0]), own, strict=False):
            if word in wanted:
                h.extra[wanted.pop(word)] = size


def check_towers(row: Tower, h: Hyperparams, tensors: Mapping[str, CanonicalTensor]) -> None:
    """Raises RefusedError, UnmappedError if the tensors do not match the tower by name and shape."""
    known = {name: t for name, t in tensors.items() if not names.is_gguf_only(row, name)}
    # Derived tensors may be present without their inputs.
    made = [name for name in tensors if names.is_gguf_only(row, name)]
    lacking = {part.hf for part in row.tensors if not part.gguf} if made else set()
    needed = replace(row, tensors=tuple(part for part in row.tensors if part.hf not in lacking)) if lacking else row
    names.check_tensors(needed, h, known)
    names.check_shapes(row, h, {name: tensor.shape for name, tensor in known.items()})
