"""The result of `diff`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from aprfmt.inspection.distance import Distance, TensorFigures, TotalFigures
from aprfmt.text import plural

_NOTEBOOK_ROWS = 10


@dataclass(frozen=True, slots=True)
class ModelDifference:
    """One difference.

    Attributes:
        kind: "format", "metadata" or "tensor".
        name: of a metadata key, a file of a folder, or a tensor under its Hugging Face name.
        a, b: the two sides, short enough to print; None if absent.
        what: of files, and of texts that begin alike, "content"; of tensors "missing", "shape", "dtype", "bytes" or
            "values".
        first_difference: of lists, the first item that differs.
        distance: metrics of tensors whose values were compared.
    """

    kind: Literal["format", "metadata", "tensor"]
    name: str
    a: object
    b: object
    what: str | None = None
    first_difference: int | None = None
    distance: Distance | None = None

    def to_json(self) -> dict[str, object]:
        """{kind, name, a, b}, and the other attributes if set."""
        more = {"what": self.what, "first_difference": self.first_difference}
        body: dict[str, object] = {"kind": self.kind, "name": self.name, "a": self.a, "b": self.b}
        body |= {key: value for key, value in more.items() if value is not None}
        return body | (asdict(self.distance) if self.distance is not None else {})


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of `diff`; `to_json` is the object of `apr diff --json`.

    Attributes:
        a, b: the paths as given.
        tensors_compared: number of tensors in both models.
        notes: differences that were deliberately ignored.
        tensors: with `values`, every tensor that has the same shape in both models, worst first.
        total: metrics over all of these tensors; None if there are none or the files are identical.
    """

    a: str
    b: str
    differences: Sequence[ModelDifference] = ()
    tensors_compared: int = 0
    notes: Sequence[str] = ()
    tensors: Sequence[TensorFigures] | None = None
    total: TotalFigures | None = None

    @property
    def identical(self) -> bool:
        """Whether no difference was found."""
        return not self.differences

    def __repr__(self) -> str:
        return f"Comparison({self.a!r}, {self.b!r}: {self._verdict()})"

    def _repr_html_(self) -> str:
        from aprfmt.html.notebook import small_table
        from aprfmt.text import cosine, decibels, percent

        facts = [("A", self.a), ("B", self.b), ("found", self._verdict()), *(("note", note) for note in self.notes)]
        if self.total is not None and not self.identical:
            far = self.total.distance
            figures = f"relative RMSE {percent(far.relative_rmse)}, SNR {decibels(far.snr_db)} dB"
            facts.append(("total", f"{figures}, cosine {cosine(far.cosine)}"))
        worst = [row for row in self.tensors or () if not row.distance.is_zero][:_NOTEBOOK_ROWS]
        rows: list[tuple[object, ...]] = [
            (r.name, r.a, r.b, percent(r.distance.relative_rmse), decibels(r.distance.snr_db)) for r in worst
        ]
        header = ("tensor, worst first", "A", "B", "relative RMSE", "SNR, dB")
        if not worst:
            header = ("", "what", "name", "A", "B")
            rows = [(r.kind, r.what or "", r.name, r.a, r.b) for r in self.differences[:_NOTEBOOK_ROWS]]
        return small_table(facts) + (small_table(rows, header) if rows else "")

    def _verdict(self) -> str:
        words = "same" if self.identical else plural(len(self.differences), "difference")
        return f"{words}, {plural(self.tensors_compared, 'tensor')} compared"

    def to_json(self) -> dict[str, object]:
        """The keys of the JSON contract; `tensors` and `total` only if values were compared."""
        body: dict[str, object] = {
            "a": self.a,
            "b": self.b,
            "identical": self.identical,
            "differences": [row.to_json() for row in self.differences],
            "tensors_compared": self.tensors_compared,
            "notes": list(self.notes),
        }
        if self.tensors is not None:
            body["tensors"] = [row.to_json() for row in self.tensors]
            body["total"] = None if self.total is None else self.total.to_json()
        return body
