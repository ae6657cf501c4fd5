"""How well a file describes itself: a score of 100, and for each part what was looked at, found and missed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from aprfmt.arch.names import spellings
from aprfmt.model import Model
from aprfmt.provenance.spdx import is_spdx

THRESHOLD = 90

# Words that fill a field without saying anything.
_PLACEHOLDERS = (None, "", "unknown", "tbd", "todo", "n/a", "none")

_LAYER = re.compile(r"(?:^|\.)(?:layers|blk|h)\.(\d{1,6})\.")

Part = tuple[int, int, str, dict[str, Any], list[str]]
"""Points, most points, what was looked at, what was found, what is missing or wrong."""


def quality_score(
    model: Model,
    metadata: Mapping[str, Any],
    checksum: Mapping[str, str],
    tokenizer: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """{score, threshold, ship_ready, breakdown: {part: {points, max, looked_at, found, missing}}}.

    `metadata`, `checksum` and `tokenizer` are those of the inspect object. No tensor value is decoded, and the
    breakdown says so; `apr validate` does that.
    """
    parts: dict[str, Part] = {
        "physics": _checksums(checksum),
        "structural": _structure(model, metadata),
        "provenance": _provenance(metadata),
        "hf_identity": _identity(metadata),
        "tokenizer": _tokenizer(model, tokenizer),
    }
    score = sum(part[0] for part in parts.values())
    names = ("points", "max", "looked_at", "found", "missing")
    breakdown = {name: dict(zip(names, part, strict=True)) for name, part in parts.items()}
    return {
        "score": score,
        "threshold": THRESHOLD,
        "ship_ready": score >= THRESHOLD,
        "breakdown": breakdown,
    }


def _known(value: Any) -> bool:
    return (value.strip().lower() if isinstance(value, str) else value) not in _PLACEHOLDERS


def _stated(metadata: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {name: metadata[name] for name in names if _known(metadata.get(name))}


def _checksums(checksum: Mapping[str, str]) -> Part:
    bad = [f"the {part} checksum is wrong" for part, state in checksum.items() if state == "bad"]
    missing = bad or ([] if "ok" in checksum.values() else ["the container has no checksum"])
    what = "the container's checksums over every byte they cover; tensor values are not decoded"
    return (0 if missing else 20), 20, what, dict(checksum), missing


def _structure(model: Model, metadata: Mapping[str, Any]) -> Part:
    names = ("architecture", "hidden_size", "num_layers", "num_heads")
    found = _stated(metadata, names)
    problems = _disagreements(model, found)
    missing = [problems.get(name) or name for name in names if name not in found or name in problems]
    what = "architecture and dims in the metadata; width and layers against the tensors' shapes and names"
    return 5 * (len(names) - len(missing)), 20, what, found, missing


def _disagreements(model: Model, found: Mapping[str, Any]) -> dict[str, str]:
    """Stated dims that the tensors contradict."""
    problems = {}
    embedding = next(
        (model.tensors[name] for name in spellings("token_embd.weight") if name in model.tensors), None
    )
    width = found.get("hidden_size")
    if embedding is not None and width is not None and width not in embedding.shape:
        problems["hidden_size"] = f"hidden_size {width}, but {embedding.name} is {list(embedding.shape)}"
    seen = {int(m[1]) for tensor in model.tensors.entries if (m := _LAYER.search(tensor.name))}
    layers = found.get("num_layers")
    if seen and isinstance(layers, int) and len(seen) < layers:  # prediction heads may add some
        problems["num_layers"] = f"num_layers {layers}, but the tensors make {len(seen)}"
    return problems


def _provenance(metadata: Mapping[str, Any]) -> Part:
    weights = {"license": 9, "data_source": 8, "data_license": 8}
    found = _stated(metadata, weights)
    problems = {
        name: f"{name} {value!r} is no SPDX id"
        for name, value in found.items()
        if name != "data_source" and not is_spdx(str(value))
    }
    good = [name for name in found if name not in problems]
    missing = [problems.get(name, name) for name in weights if name not in good]
    what = "license, data_source, data_license: stated, and the licences SPDX ids; not whether they are true"
    return sum(weights[name] for name in good), 25, what, found, missing


def _identity(metadata: Mapping[str, Any]) -> Part:
    weights = {"hf_architecture": 12, "hf_model_type": 8}
    found = _stated(metadata, weights)
    missing = [name for name in weights if name not in found]
    what = "hf_architecture, hf_model_type"
    return sum(weights[name] for name in found), 20, what, found, missing


def _tokenizer(model: Model, tokenizer: Mapping[str, Any] | None) -> Part:
    what = "the tokens themselves, not a flag; their number against the embedding's rows"
    if not tokenizer or not tokenizer["vocab_size"]:
        return 0, 15, what, {}, ["no tokens are embedded"]
    found: dict[str, Any] = {"tokens": tokenizer["vocab_size"], "merges": tokenizer["merges"]}
    embedding = next(
        (model.tensors[name] for name in spellings("token_embd.weight") if name in model.tensors), None
    )
    if embedding is not None and embedding.shape:
        found["embedding_rows"] = embedding.shape[0]
        if found["tokens"] > embedding.shape[0]:
            problem = f"{found['tokens']} tokens, but {embedding.name} has {embedding.shape[0]} rows"
            return 0, 15, what, found, [problem]
    return 15, 15, what, found, []
