"""Tensors of a tower's GGUF that a checkpoint does not store: computed from a formula or from other tensors.

A row's `made` gives the name of a function in MADE and, after a colon, its arguments: names of a checkpoint's tensors
or modules, with `{n}` for the layer, or sizes. They cannot be reversed: an imported GGUF keeps them under their GGUF
names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import isqrt

from aprfmt.arch import names
from aprfmt.arch.converters.towers import book_sizes
from aprfmt.arch.grammar import evaluate, sizes_of
from aprfmt.arch.hyperparams import Hyperparams
from aprfmt.arch.row import Tower
from aprfmt.canonical.row_mapping import BufferedTensor
from aprfmt.canonical.tensor import CanonicalTensor
from aprfmt.errors import RefusedError
from aprfmt.tokenizer.model import Tokenizer
from aprfmt.types import Array

BATCH_NORM_EPS = 1e-5
"""torch's default epsilon of batch norms."""


LEAST_COUNT = 1e-5
"""The count of a codebook entry that no vector was assigned to."""


@dataclass(frozen=True, slots=True)
class Sources:
    """Inputs of derived tensors.

    Attributes:
        tensors: the tower's, by the names of its row.
        h: its hyper-parameters.
        embedding: the token embedding of the language model; None without one.
        tokenizer: of the language model.
    """

    tensors: Mapping[str, CanonicalTensor]
    h: Hyperparams
    embedding: CanonicalTensor | None = None
    tokenizer: Tokenizer | None = None

    def values(self, name: str) -> Array | None:
        """A tensor of the tower in float32, None if missing."""
        tensor = self.tensors.get(name)
        return tensor.produced.values().reshape(tensor.shape) if tensor is not None else None

    def size(self, text: str) -> int:
        """Value of a size word. Raises RefusedError if it is unknown."""
        number = evaluate(text, sizes_of(self.h))
        if number is None:
            raise RefusedError(
                f"{text} is unknown, so position embeddings cannot be computed", hint="check the config.json"
            )
        return number


def compute_derived(row: Tower, sources: Sources) -> Iterator[CanonicalTensor]:
    """Computes the float32 tensors listed in `row.made` whose inputs are present."""
    layers = sorted({m.layer for name in sources.tensors for m in names.matches(row, name)[:1] if m.layer is not None})
    for template, recipe in row.made.items():
        function, _, arguments = recipe.partition(":")
        for layer in layers if "{n}" in template else (None,):
            spelled = [names.spell(argument, layer) for argument in arguments.split(",")]
            found = MADE[function](sources, spelled)
            if found is not None:
                yield _tensor(names.spell(template, layer), found)


def derived_position(row: Tower, name: str) -> tuple[int, int]:
    """Position of a GGUF tensor among those of `compute_derived`; all others come first."""
    for place, template in enumerate(row.made):
        if match := re.fullmatch(re.escape(template).replace(r"\{n\}", r"(\d{1,6})"), name):
            return place, int(match[1]) if match.groups() else 0
    return -1, 0


def _tensor(name: str, values: Array) -> CanonicalTensor:
    import numpy as np

    data = np.ascontiguousarray(values, dtype="<f4").tobytes()
    return CanonicalTensor(name, (BufferedTensor(name, "F32", tuple(values.shape), partial(list, (data,))),))


def _sinusoids(sources: Sources, arguments: Sequence[str]) -> Array | None:
    """Positions of Whisper, [positions, width]: sines, then cosines, of 10000 ** -(i / (width / 2 - 1))."""
    import numpy as np

    length, width = map(sources.size, arguments)
    # In float32, step by step as torch does it; each function is rounded once, so the same on every processor.
    step = np.float32(-np.log(10000) / (width // 2 - 1))
    rates = np.exp((step * np.arange(width // 2, dtype=np.float32)).astype(np.float64)).astype(np.float32)
    angles = (np.arange(length, dtype=np.float32)[:, None] * rates[None, :]).astype(np.float64)
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype(np.float32)


def _batch_norm(sources: Sources, module: str) -> tuple[Array, Array] | None:
    import numpy as np

    parts = [sources.values(f"{module}.{name}") for name in ("weight", "bias", "running_mean", "running_var")]
    if any(part is None for part in parts):
        return None
    weight, bias, mean, variance = (part for part in parts if part is not None)
    scale = weight / np.sqrt(variance + np.float32(BATCH_NORM_EPS))
    return scale, bias - mean * scale


def _batch_scale(sources: Sources, arguments: Sequence[str]) -> Array | None:
    found = _batch_norm(sources, arguments[0])
    return found[0] if found is not None else None


def _batch_shift(sources: Sources, arguments: Sequence[str]) -> Array | None:
    found = _batch_norm(sources, arguments[0])
    return found[1] if found is not None else None


def _row_of_token(sources: Sources, arguments: Sequence[str]) -> Array | None:
    """The language model's embedding of the given token text; None if missing."""
    tokens = sources.tokenizer.tokens if sources.tokenizer is not None else []
    if sources.embedding is None or arguments[0] not in tokens:
        return None
    found = sources.embedding
    row: Array = found.produced.values().reshape(found.shape)[tokens.index(arguments[0])]
    return row


def _grid(sources: Sources, arguments: Sequence[str]) -> Array | None:
    """Interpolates the positions [1, n * n, width] of a square image linearly to another size.

    The corners are aligned.
    """
    import numpy as np

    values, side = sources.values(arguments[0]), sources.size(arguments[1])
    if values is None:
        return None
    n = isqrt(values.shape[1])
    if n * n != values.shape[1]:
        raise RefusedError(f"{values.shape[1]} positions are not a square grid", tensor=arguments[0])
    if n == side:
        return values
    grid = values.reshape(n, n, -1)
    places = np.arange(side, dtype=np.float32) * np.float32((n - 1) / max(1, side - 1))
    first = np.minimum(places.astype(np.int64), n - 1)
    second = np.minimum(first + 1, n - 1)
    share = places - first
    rows = grid[first] * (1 - share)[:, None, None] + grid[second] * share[:, None, None]
    found = rows[:, first] * (1 - share)[None, :, None] + rows[:, second] * share[None, :, None]
    shrunk: Array = found.astype(np.float32).reshape(1, side * side, -1)
    return shrunk


def _sum_of_frames(sources: Sources, arguments: Sequence[str]) -> Array | None:
    """Reduces a convolution over several frames to one over a single image, [width, 3, size, size]: their sum."""
    found = sources.values(arguments[0])
    frames, size = map(sources.size, arguments[1:])
    summed: Array | None = None if found is None else found.reshape(len(found), frames, 3, size, size).sum(axis=1)
    return summed


def _codebooks(sources: Sources, arguments: Sequence[str]) -> Array | None:
    """The codebooks of a quantizer, [books, entries, width], without the first: sums of vectors divided by their
    counts.
    """
    import numpy as np

    books = []
    for i in range(sources.size(arguments[1])):
        book = f"{arguments[0]}.{i}._codebook"
        total, count = sources.values(f"{book}.embedding_sum"), sources.values(f"{book}.cluster_usage")
        if total is None or count is None:
            return None
        books.append(total / np.maximum(count, np.float32(LEAST_COUNT))[:, None])
    return np.stack(books) if len(books) > 1 else books[0]


def _padded_books(sources: Sources, arguments: Sequence[str]) -> Array | None:
    """The codebooks of a quantizer, [books, entries, width], padded with zeros to the same length.

    Arguments: their list, their number, and the config key with their lengths.
    """
    import numpy as np

    name, count, key = arguments
    n_books = sources.size(count)
    books = [sources.values(f"{name}.{i}._codebook.embed") for i in range(n_books)]
    known = [book for book in books if book is not None]
    if not known or len(known) < n_books:
        return None
    stated = book_sizes(sources.h.extra.get(key), n_books)
    for i, (book, size) in enumerate(zip(known, stated, strict=True)):
        if len(book) != size:
            raise RefusedError(
                f"the codebook has {len(book)} entries, but config.json says {size}",
                tensor=f"{name}.{i}._codebook.embed",
                hint="the files belong to different models; download the repository again",
            )
    padded = np.zeros((n_books, max(stated), known[0].shape[1]), np.float32)
    for i, book in enumerate(known):
        padded[i, : len(book)] = book
    return padded


MADE: dict[str, Callable[[Sources, Sequence[str]], Array | None]] = {
    "sinusoids": _sinusoids, "batch_scale": _batch_scale, "batch_shift": _batch_shift, "row_of_token": _row_of_token,
    "grid": _grid, "sum_of_frames": _sum_of_frames, "codebooks": _codebooks, "padded_books": _padded_books,
}  # fmt: skip
"""Name -> function that computes a derived tensor from its arguments; None if an input is missing."""
