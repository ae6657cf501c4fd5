"""Files of second moments: for each weight, the mean of x xᵀ over its inputs x, which error feedback needs.

A safetensors file. NAME.I is block I along the diagonal of the matrix of weight NAME, F32 [n, n]. Weights with the same
input share the blocks of one of them, which the JSON object "shared" of the metadata names.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from aprfmt.errors import CorruptError, RefusedError
from aprfmt.formats.out_tensor import OutTensor
from aprfmt.formats.safetensors import layout, read_shard
from aprfmt.io.pipe import FileLayout, Job
from aprfmt.io.source import Source
from aprfmt.types import Array

FORMAT = "apr.second_moments/1"
_BLOCK = re.compile(r"(.+)\.(\d{1,6})")


@dataclass(frozen=True, slots=True)
class CollectedMoments:
    """Second moments of one input, in files.

    Attributes:
        weights: the weights that have this input.
        blocks: (path of float32 sums, columns) of each block.
        tokens: how many are summed.
    """

    weights: Sequence[str]
    blocks: Sequence[tuple[str, int]]
    tokens: int


def moments_file(inputs: Sequence[CollectedMoments], datasets: Sequence[str], name: str) -> FileLayout:
    """Serializes second moments; files are read one by one."""
    tensors = [
        OutTensor(f"{entry.weights[0]}.{i}", "F32", (n, n), 4 * n * n, partial(_mean, path, 4 * n * n, entry.tokens))
        for entry in inputs
        for i, (path, n) in enumerate(entry.blocks)
    ]
    shared = {other: entry.weights[0] for entry in inputs for other in entry.weights[1:]}
    metadata = {"format": FORMAT, "shared": json.dumps(shared), "datasets": json.dumps([*datasets])}
    return FileLayout(name, layout(tensors, metadata))


def _mean(path: str, n_bytes: int, tokens: int) -> list[Job]:
    def read() -> memoryview:
        import numpy as np

        return (np.fromfile(path, "<f4") / np.float32(max(1, tokens))).data.cast("B")

    return [Job(n_bytes, read)]


@dataclass(frozen=True, slots=True)
class SecondMoments:
    """An opened file of second moments; blocks are read when they are needed.

    Attributes:
        path: of the file, as given.
        shared: weight -> the weight whose blocks it has.
        places: weight -> (offset, columns) of each of its blocks.
    """

    path: str
    shared: Mapping[str, str]
    places: Mapping[str, Sequence[tuple[int, int]]]

    def owner(self, name: str, columns: int) -> str | None:
        """The weight whose blocks `name` has; None without any. Raises RefusedError for a file of another model."""
        found = self.shared.get(name, name)
        if found not in self.places:
            return None
        own = sum(n for _, n in self.places[found])
        if own != columns:
            raise self.misfit(f"{own} columns instead of {columns}", name)
        return found

    def misfit(self, why: str, tensor: str | None = None) -> RefusedError:
        """The error for second moments that a model does not fit."""
        return RefusedError(
            f"the second moments belong to another model: {why}",
            path=self.path,
            tensor=tensor,
            hint="compute them for this model: apr imatrix MODEL --data TEXT -o FILE --second-moments FILE",
        )

    def blocks(self, owner: str) -> list[Array]:
        """The blocks of a weight, float32 [n, n]. Raises CorruptError for values that no input gives."""
        import numpy as np

        found = []
        with Source.open(self.path) as source:
            for offset, n in self.places[owner]:
                block = np.frombuffer(source.read(offset, 4 * n * n), "<f4").reshape(n, n)
                if not (np.isfinite(block).all() and (block.diagonal() >= 0).all()):
                    raise CorruptError("a second moment is negative, NaN or infinite", path=self.path, tensor=owner)
                found.append(block)
        return found


def read_second_moments(path: str | os.PathLike[str]) -> SecondMoments:
    """Opens a file of second moments. Raises NotFoundError, StorageError, CorruptError and its kinds."""
    name = os.fspath(path)
    with ExitStack() as stack:
        file = read_shard(Path(name), stack)
    if file.metadata.get("format") != FORMAT:
        raise CorruptError(
            "not a file of second moments", path=name, hint="apr imatrix MODEL --data TEXT --second-moments FILE"
        )
    places: dict[str, dict[int, tuple[int, int]]] = {}
    for tensor in file.tensors:
        match = _BLOCK.fullmatch(tensor.name)
        if match is None or tensor.dtype != "F32" or len(tensor.shape) != 2 or len({*tensor.shape}) != 1:
            raise CorruptError("not a square block in F32", path=name, tensor=tensor.name)
        places.setdefault(match[1], {})[int(match[2])] = tensor.offset, tensor.shape[0]
    for weight, blocks in places.items():
        if sorted(blocks) != [*range(len(blocks))]:
            raise CorruptError("a block of its second moments is missing", path=name, tensor=weight)
    try:
        shared = json.loads(file.metadata.get("shared", "{}"))
    except ValueError:
        shared = None
    if not isinstance(shared, dict) or not all(isinstance(owner, str) for owner in shared.values()):
        raise CorruptError('"shared" of its metadata does not name weights', path=name)
    ordered = {weight: [blocks[i] for i in range(len(blocks))] for weight, blocks in places.items()}
    return SecondMoments(name, shared, ordered)
