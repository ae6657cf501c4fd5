"""The quality score of an inspection."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict

from aprfmt.arch.names import EMBEDDING, spellings
from aprfmt.inspection.tokenizer_info import TokenizerInfo
from aprfmt.light_dataclass import light_dataclass
from aprfmt.model import Model, Tensor
from aprfmt.provenance.spdx import is_spdx

QUALITY_THRESHOLD = 90


# Words that fill a field without information.
_PLACEHOLDERS = (None, "", "unknown", "tbd", "todo", "n/a", "none")


_LAYER = re.compile(r"(?:^|\.)(?:layers|blk|h)\.(\d{1,6})\.")


@light_dataclass(frozen=True, slots=True)
class QualityPart:
    """Points of at most `max`: what was checked, what was found, what is missing or wrong."""

    points: int
    max: int
    looked_at: str
    found: Mapping[str, object]
    missing: list[str]


@light_dataclass(frozen=True, slots=True)
class Quality:
    """How complete a file's metadata is: the points of each part."""

    breakdown: Mapping[str, QualityPart]

    @property
    def score(self) -> int:
        """Total points, at most 100."""
        return sum(part.points for part in self.breakdown.values())

    def to_json(self) -> dict[str, object]:
        """{score, threshold, ship_ready, breakdown}."""
        return {
            "score": self.score,
            "threshold": QUALITY_THRESHOLD,
            "ship_ready": self.score >= QUALITY_THRESHOLD,
            "breakdown": {name: asdict(part) for name, part in self.breakdown.items()},
        }


def quality_of(
    model: Model, metadata: Mapping[str, object], checksum: Mapping[str, str], tokenizer: TokenizerInfo | None
) -> Quality:
    """The score of an opened model. `metadata`, `checksum` and `tokenizer` are those of its Inspection.

    Tensor values are not decoded, and the breakdown says so; `apr validate` does that.
    """
    structure = dict.fromkeys(("architecture", "hidden_size", "num_layers", "num_heads"), 5)
    licenses = {"license": 9, "data_source": 8, "data_license": 8}
    classes = {"hf_architecture": 12, "hf_model_type": 8}
    what = "checks architecture and dimensions in the metadata against tensor names and shapes"
    stated = (
        "checks that license, data_source and data_license are set and licenses are SPDX ids, not that they are correct"
    )
    odd = {
        name: f"{name} {value!r} is not an SPDX id"
        for name in ("license", "data_license")
        if not is_spdx(str(value := metadata.get(name)))
    }
    return Quality(
        {
            "physics": _checksum_part(checksum),
            "structural": _fields_part(metadata, structure, what, _contradictions(model, metadata)),
            "provenance": _fields_part(metadata, licenses, stated, odd),
            "hf_identity": _fields_part(metadata, classes, ", ".join(classes), {}),
            "tokenizer": _tokenizer_part(model, tokenizer),
        }
    )


def _checksum_part(checksum: Mapping[str, str]) -> QualityPart:
    bad = [f"the {part} checksum is wrong" for part, state in checksum.items() if state == "bad"]
    missing = bad or ([] if "ok" in checksum.values() else ["the container stores no checksum"])
    what = "verifies the container's checksums; tensor values are not decoded"
    return QualityPart(0 if missing else 20, 20, what, dict(checksum), missing)


def _fields_part(
    metadata: Mapping[str, object], points: Mapping[str, int], what: str, problems: Mapping[str, str]
) -> QualityPart:
    """The points of the stated fields, without those that have a problem."""
    values = {name: metadata.get(name) for name in points}
    found = {
        name: value
        for name, value in values.items()
        if (value.strip().lower() if isinstance(value, str) else value) not in _PLACEHOLDERS
    }
    good = [name for name in found if name not in problems]
    missing = [problems[name] if name in found else name for name in points if name not in good]
    return QualityPart(sum(points[name] for name in good), sum(points.values()), what, found, missing)


def _contradictions(model: Model, metadata: Mapping[str, object]) -> dict[str, str]:
    """Stated dimensions that the tensors contradict."""
    problems = {}
    embedding = first_tensor(model, EMBEDDING)
    width, layers = metadata.get("hidden_size"), metadata.get("num_layers")
    if embedding is not None and width is not None and width not in embedding.shape:
        problems["hidden_size"] = f"hidden_size {width}, but {embedding.name} is {list(embedding.shape)}"
    seen = {int(m[1]) for tensor in model.tensors.entries if (m := _LAYER.search(tensor.name))}
    if seen and isinstance(layers, int) and len(seen) < layers:  # MTP layers may add some
        problems["num_layers"] = f"num_layers {layers}, but the tensors have {len(seen)}"
    return problems


def _tokenizer_part(model: Model, tokenizer: TokenizerInfo | None) -> QualityPart:
    what = "checks that a tokenizer is embedded, and its size against the embedding's rows"
    if tokenizer is None or not tokenizer.vocab_size:
        return QualityPart(0, 15, what, {}, ["no tokenizer embedded"])
    found = {"tokens": tokenizer.vocab_size, "merges": tokenizer.merges}
    embedding = first_tensor(model, EMBEDDING)
    if embedding is not None and embedding.shape:
        found["embedding_rows"] = embedding.shape[0]
        if tokenizer.vocab_size > embedding.shape[0]:
            problem = f"{tokenizer.vocab_size} tokens, but {embedding.name} has {embedding.shape[0]} rows"
            return QualityPart(0, 15, what, found, [problem])
    return QualityPart(15, 15, what, found, [])


def first_tensor(model: Model, gguf_name: str) -> Tensor | None:
    """The tensor with that GGUF name, under whatever name it has in the model; None without one."""
    return next((model.tensors[name] for name in spellings(gguf_name) if name in model.tensors), None)
