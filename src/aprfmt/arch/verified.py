"""How each row of the architecture table was last verified; tools/conformance.py writes the figures."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

TRANSFORMERS, CONVERTER = "transformers", "converter"

_HOW = {
    TRANSFORMERS: "same logits in llama.cpp as in transformers",
    CONVERTER: "same GGUF as from llama.cpp's converter",
}


@dataclass(frozen=True, slots=True)
class Verified:
    """The verification of one row.

    Attributes:
        against: TRANSFORMERS if logits are compared, or CONVERTER if only the converter's GGUF is, because transformers
            lacks the network.
        cases: models of the family that were converted both ways, each with other config options.
        right: those with everything right.
        refused: those that llama.cpp cannot compute, which an export reports.
    """

    against: str
    cases: int
    right: int
    refused: int

    def __str__(self) -> str:
        beside = f", {self.refused} beyond llama.cpp" if self.refused else ""
        return f"{self.right} of {self.cases} {self.against}{beside}"

    @property
    def sentence(self) -> str:
        """The same for a row alone."""
        beside = f"; llama.cpp cannot compute {self.refused}" if self.refused else ""
        return f"{_HOW[self.against]} in {self.right} of {self.cases} cases{beside}"


@cache
def verified() -> Mapping[str, Verified]:
    """Id of a row -> what is known of it."""
    lines = files(__package__).joinpath("verified.jsonl").read_text("utf-8").splitlines()
    return {values.pop("row"): Verified(**values) for values in map(json.loads, lines)}
