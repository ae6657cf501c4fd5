"""How well a file describes itself: a score of 100, and for each part what was looked at, found and missed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from aprfmt.arch.names import spellings
from aprfmt.model import Model, Tensor
from aprfmt.provenance.spdx import is_spdx

if TYPE_CHECKING:
    from aprfmt.inspection.describe import TokenizerInfo

THRESHOLD = 90

# Words that fill a field without saying anything.
_PLACEHOLDERS = (None, "", "unknown", "tbd", "todo", "n/a", "none")

_LAYER = re.compile(r"(?:^|\.)(?:layers|blk|h)\.(\d{1,6})\.")


@dataclass(frozen=True, slots=True)
class QualityPart:
    """Points of at most `max`, what was looked at, what was found, what is missing or wrong."""

    points: int
    max: int
    looked_at: str
    found: Mapping[str, object]
    missing: list[str]


@dataclass(frozen=True, slots=True)
class Quality:
    """How well a file describes itself: the points of each part."""

    breakdown: Mapping[str, QualityPart]

    @property
    def score(self) -> int:
        """Points of all parts, at most 100."""
        return sum(part.points for part in self.breakdown.values())

    def to_json(self) -> dict[str, object]:
        """{score, threshold, ship_ready, breakdown}."""
        return {
            "score": self.score,
            "threshold": THRESHOLD,
            "ship_ready": self.score >= THRESHOLD,
            "breakdown": {name: asdict(part) for name, part in self.breakdown.items()},
        }


def quality_of(
    model: Model,
    metadata: Mapping[str, object],
    checksum: Mapping[str, str],
    tokenizer: TokenizerInfo | None,
) -> Quality:
    """The score of an opened model. `metadata`, `checksum` and `tokenizer` are those of its Inspection.

    No tensor value is decoded, and the breakdown says so; `apr validate` does that.
    """
    return Quality(
        {
            "physics": _checksums(checksum),
            "structural": _structure(model, metadata),
            "provenance": _provenance(metadata),
            "hf_identity": _identity(metadata),
            "tokenizer": _tokenizer(model, tokenizer),
        }
    )


def _known(value: object) -> bool:
    return (value.strip().lower() if isinstance(value, str) else value) not in _PLACEHOLDERS


def _stated(metadata: Mapping[str, object], names: Iterable[str]) -> dict[str, object]:
    return {name: metadata[name] for name in names if _known(metadata.get(name))}


def _checksums(checksum: Mapping[str, str]) -> QualityPart:
    bad = [f"the {part} checksum is wrong" for part, state in checksum.items() if state == "bad"]
    missing = bad or ([] if "ok" in checksum.values() else ["the container has no checksum"])
    what = "the container's checksums over every byte they cover; tensor values are not decoded"
    return QualityPart(0 if missing else 20, 20, what, dict(checksum), missing)


def _structure(model: Model, metadata: Mapping[str, object]) -> QualityPart:
    names = ("architecture", "hidden_size", "num_layers", "num_heads")
    found = _stated(metadata, names)
    problems = _disagreements(model, found)
    missing = [problems.get(name) or name for name in names if name not in found or name in problems]
    what = "architecture and dimensions in the metadata, compared with the tensors' shapes and names"
    return QualityPart(5 * (len(names) - len(missing)), 20, what, found, missing)


def _disagreements(model: Model, found: Mapping[str, object]) -> dict[str, str]:
    """Stated dims that the tensors contradict."""
    problems = {}
    embedding = _embedding(model)
    width = found.get("hidden_size")
    if embedding is not None and width is not None and width not in embedding.shape:
        problems["hidden_size"] = f"hidden_size {width}, but {embedding.name} is {list(embedding.shape)}"
    seen = {int(m[1]) for tensor in model.tensors.entries if (m := _LAYER.search(tensor.name))}
    layers = found.get("num_layers")
    if seen and isinstance(layers, int) and len(seen) < layers:  # prediction heads may add some
        problems["num_layers"] = f"num_layers {layers}, but the tensors make {len(seen)}"
    return problems


def _provenance(metadata: Mapping[str, object]) -> QualityPart:
    weights = {"license": 9, "data_source": 8, "data_license": 8}
    found = _stated(metadata, weights)
    problems = {
        name: f"{name} {value!r} is not an SPDX id"
        for name, value in found.items()
        if name != "data_source" and not is_spdx(str(value))
    }
    good = [name for name in found if name not in problems]
    missing = [problems.get(name, name) for name in weights if name not in good]
    what = "whether license, data_source and data_license are stated, licences as SPDX ids; not whether they are true"
    return QualityPart(sum(weights[name] for name in good), 25, what, found, missing)


def _identity(metadata: Mapping[str, object]) -> QualityPart:
    weights = {"hf_architecture": 12, "hf_model_type": 8}
    found = _stated(metadata, weights)
    missing = [name for name in weights if name not in found]
    what = "hf_architecture, hf_model_type"
    return QualityPart(sum(weights[name] for name in found), 20, what, found, missing)


def _tokenizer(model: Model, tokenizer: TokenizerInfo | None) -> QualityPart:
    what = "the tokens themselves, and their number compared with the embedding's rows"
    if tokenizer is None or not tokenizer.vocab_size:
        return QualityPart(0, 15, what, {}, ["no tokens are embedded"])
    found = {"tokens": tokenizer.vocab_size, "merges": tokenizer.merges}
    embedding = _embedding(model)
    if embedding is not None and embedding.shape:
        found["embedding_rows"] = embedding.shape[0]
        if tokenizer.vocab_size > embedding.shape[0]:
            problem = f"{tokenizer.vocab_size} tokens, but {embedding.name} has {embedding.shape[0]} rows"
            return QualityPart(0, 15, what, found, [problem])
    return QualityPart(15, 15, what, found, [])


def _embedding(model: Model) -> Tensor | None:
    names = spellings("token_embd.weight")
    return next((model.tensors[name] for name in names if name in model.tensors), None)
