"""How a conversion for serving engines chooses scales and codes: importance of the columns, and error feedback."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from threading import Lock

from aprfmt.arch import names
from aprfmt.canonical.model import Canonical
from aprfmt.canonical.tensor import CanonicalTensor, Losses
from aprfmt.codecs.error_feedback import FeedbackBlock, feedback_blocks
from aprfmt.codecs.serving import SERVING, Importance, ServingScheme
from aprfmt.convert.options import Options
from aprfmt.errors import RefusedError, UsageError
from aprfmt.formats.imatrix import COMPUTE, Imatrix, read_imatrix
from aprfmt.formats.second_moments import SecondMoments, read_second_moments
from aprfmt.text import first_few
from aprfmt.types import Array

_KEPT = 3
"""Inputs whose feedback is kept; the threads of a conversion work on neighbouring weights."""


@dataclass(slots=True)
class Feedback:
    """Error feedback by second moments.

    Attributes:
        moments: of the inputs.
    """

    moments: SecondMoments
    _kept: dict[str, tuple[Array, list[FeedbackBlock]]] = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock)

    def of(self, owner: str) -> tuple[Array, list[FeedbackBlock]]:
        """The mean squares of a weight's inputs, float32 [columns], and its feedback.

        Those of a few inputs are kept: neighbours share them, and those of all would not fit in memory.
        """
        import numpy as np

        with self._lock:
            if owner not in self._kept:
                blocks = self.moments.blocks(owner)
                squares = np.concatenate([block.diagonal() for block in blocks])
                while len(self._kept) >= _KEPT:
                    del self._kept[next(iter(self._kept))]
                self._kept[owner] = squares, feedback_blocks(blocks)
            return self._kept[owner]


@dataclass(slots=True)
class ScaleSearch:
    """Chooses scales for the least error, weighted by an importance matrix if given, and codes by error feedback.

    Attributes:
        imatrix: the matrix.
        feedback: without it, each value is rounded alone.
        missing: weights without an entry in the matrix, or without second moments.
    """

    imatrix: Imatrix | None = None
    feedback: Feedback | None = None
    missing: list[str] = field(default_factory=list)

    def importance(self, c: Canonical, tensor: CanonicalTensor) -> Callable[[], Importance]:
        """What decides over the codes of a weight, on demand.

        Raises RefusedError for an importance matrix or second moments of another model.
        """
        match = next(iter(names.matches(c.arch, tensor.name)), None) if c.arch is not None else None
        gguf = names.gguf_name(c.arch, tensor.name, c.hparams) if c.arch is not None else None
        has_columns = match is not None and not match.row.columns
        weights = self._weights(gguf or tensor.name, tensor, match.expert if match is not None else None, has_columns)
        owner = None
        if self.feedback is not None and has_columns:
            owner = self.feedback.moments.owner(gguf or tensor.name, tensor.shape[1])
        if (self.feedback is not None and owner is None) or (self.imatrix is not None and weights is None):
            self.missing.append(tensor.name)
        return partial(self._importance, tensor.shape[1], weights, owner)

    def _importance(self, columns: int, weights: Array | None, owner: str | None) -> Importance:
        import numpy as np

        blocks: list[FeedbackBlock] = []
        if self.feedback is not None and owner is not None:
            squares, blocks = self.feedback.of(owner)
            weights = squares if weights is None else weights
        mean = float(weights.mean()) if weights is not None else 0.0
        if weights is None or not mean > 0:
            return Importance(np.ones(columns, "f4"), blocks)
        return Importance(np.ascontiguousarray(weights, "f4") / np.float32(mean), blocks)

    def _weights(self, name: str, tensor: CanonicalTensor, expert: int | None, has_columns: bool) -> Array | None:
        """Column importances of a weight by the matrix; None without an entry."""
        columns = tensor.shape[1]
        values = self.imatrix.entries.get(name) if self.imatrix is not None and has_columns else None
        if self.imatrix is None or values is None:
            return None
        if expert is not None and values.size > columns:  # one entry for all experts of a layer
            values = values[expert * columns : (expert + 1) * columns]
        if values.size != columns:
            raise RefusedError(
                f"the importance matrix belongs to another model: {values.size} values instead of {columns}",
                path=self.imatrix.path,
                tensor=tensor.name,
                hint=COMPUTE,
            )
        return values

    def check(self, n_weights: int, losses: Losses) -> None:
        """Warns about weights without an entry. Raises RefusedError if all `n_weights` lack one."""
        if not self.missing:
            return
        what, verbs = "the importance matrix", ("belongs", "it has", "has")
        path = self.imatrix.path if self.imatrix is not None else ""
        if self.feedback is not None:
            what, verbs, path = "the second moments", ("belong", "they have", "have"), self.feedback.moments.path
        belongs, it_has, has = verbs
        if len(self.missing) == n_weights:
            reason = f"{what} {belongs} to another model: {it_has} no entry for {self.missing[0]}"
            raise RefusedError(reason, path=path, hint=COMPUTE)
        losses.warnings.append(f"{what} {has} no entry for {first_few(self.missing)}")


def scale_search(options: Options, scheme: ServingScheme | None) -> ScaleSearch | None:
    """The search that `options` request. Raises UsageError if it does not apply to the scheme."""
    if not options.search:
        for name in ("imatrix", "second_moments"):
            if getattr(options, name) is not None and scheme is not None:
                option = f"--{name.replace('_', '-')}"
                raise UsageError(f"{option} applies to {scheme.id} only with --search", hint="add --search")
        return None
    if scheme is None or not scheme.is_searched:
        fitting = ", ".join(name for name, row in SERVING.items() if row.is_searched)
        raise UsageError("--search applies to schemes of 4 bits in a folder", hint=f"--quantize one of: {fitting}")
    moments = options.second_moments
    return ScaleSearch(
        read_imatrix(options.imatrix) if options.imatrix is not None else None,
        Feedback(read_second_moments(moments)) if moments is not None else None,
    )
