"""Unusual configurations of known model types, both ways: right, refused, said, or wrong in silence.

A case is a line of tests/conformance/configs.jsonl: a model type and class of transformers, the config, the dtype of
the stored tensors. `judge` writes a tiny random model of it, converts the folder to a GGUF, compares llama.cpp's
logits with transformers', converts the GGUF back to a folder, and compares the logits of that.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from arch_models import (
    _clear_winners,
    inputs,
    quiet_transformers,
    randomise,
    relative_error,
    token_ids,
    transformers_logits,
    write_tokenizers,
)
from llama_peer import LlamaError, LlamaPeer

CASES = Path(__file__).resolve().parent.parent / "conformance" / "configs.jsonl"

VOCABULARY = 280
"""Tokens of the tokenizer; the embedding of a case has more rows."""

TOLERANCE = 2e-3
"""Relative error of logits that counts as right; llama.cpp computes some activations by tables of half precision."""

RIGHT, REFUSED, SAID, WRONG, UNLOADABLE, SKIPPED = "right", "refused", "said", "WRONG", "unloadable", "skipped"
SAME = "same"
FINE = frozenset((RIGHT, REFUSED, SAID, SKIPPED, SAME))


@dataclass(frozen=True)
class OddConfig:
    """One configuration.

    Attributes:
        model_type, model_class: of transformers.
        config: all that the config class is given.
        tensor_dtype: "f32", "f16", "bf16", "f64", or "mix": each of the first three by turns.
        kind: what is compared, as in ArchCase.
        edits: what the saved config.json says otherwise; null takes a key away.
        why: what is unusual.
        expected: what one of the directions has to come to; "" for anything that is fine.
    """

    model_type: str
    model_class: str
    config: Mapping[str, Any]
    tensor_dtype: str = "f32"
    kind: str = "causal"
    edits: Mapping[str, Any] = field(default_factory=dict)
    why: str = ""
    expected: str = ""


@dataclass(frozen=True)
class Verdict:
    """What one direction came to; `error` is relative, `text` what the program said."""

    outcome: str
    error: float | None = None
    text: str = ""

    @property
    def fine(self) -> bool:
        """Whether the user gets a right model, or is told."""
        return self.outcome in FINE

    def __str__(self) -> str:
        error = "" if self.error is None else f" {self.error:.1e}"
        return f"{self.outcome}{error}{f' ({self.text})' if self.text else ''}"


def read_cases(path: Path = CASES) -> Iterator[OddConfig]:
    """The cases of a file of lines."""
    for line in path.read_text().splitlines():
        found = json.loads(line)
        yield OddConfig(
            found["model_type"],
            found["class"],
            found["config"],
            found.get("tensor_dtype", "f32"),
            found.get("kind", "causal"),
            found.get("edits", {}),
            found.get("why", ""),
            found.get("expected", ""),
        )


def judge(case: OddConfig, work: Path, llama: LlamaPeer) -> dict[str, Verdict]:
    """Both directions, "to_gguf" and "from_gguf", and "apr": whether an `.apr` gives the folder back."""
    folder = work / "tiny"
    write_model(case, folder, work)
    return {"apr": _through_apr(folder, work), **_judge_gguf(case, folder, work, llama)}


def _through_apr(folder: Path, work: Path) -> Verdict:
    """Whether an import and an export give the folder back byte for byte."""
    import aprfmt

    try:
        aprfmt.convert_model(folder, work / "tiny.apr")
        aprfmt.convert_model(work / "tiny.apr", work / "again", format="hf")
    except aprfmt.AprError as error:
        return Verdict(WRONG, None, str(error))
    other = [path.name for path in folder.iterdir() if path.read_bytes() != (work / "again" / path.name).read_bytes()]
    return Verdict(WRONG if other else SAME, None, ", ".join(other))


def _judge_gguf(case: OddConfig, folder: Path, work: Path, llama: LlamaPeer) -> dict[str, Verdict]:
    import aprfmt

    gguf = work / "tiny.gguf"
    ids = token_ids(folder, 60)[:60]
    wanted = transformers_logits(folder, ids, case.kind)
    skipped = Verdict(SKIPPED, None, "no GGUF")
    try:
        report = aprfmt.convert_model(folder, gguf, dtype="f32")
    except aprfmt.AprError as error:
        return {"to_gguf": Verdict(REFUSED, None, str(error)), "from_gguf": skipped}
    said = _about_logits((*report.warnings, *report.losses))
    try:
        computed = llama.logits(gguf, ids, case.kind)
    except LlamaError as failure:
        return {"to_gguf": Verdict(UNLOADABLE, None, str(failure)), "from_gguf": skipped}
    first = _verdict(relative_error(computed, wanted), said)
    return {"to_gguf": first, "from_gguf": _back(case, gguf, work / "back", ids, computed)}


def _back(case: OddConfig, gguf: Path, folder: Path, ids: list[int], computed: Any) -> Verdict:
    """Whether transformers computes with a GGUF's folder what llama.cpp computes with the GGUF."""
    import aprfmt

    try:
        report = aprfmt.convert_model(gguf, folder, format="hf")
    except aprfmt.AprError as error:
        return Verdict(REFUSED, None, str(error))
    try:
        found = transformers_logits(folder, ids, case.kind)
    except Exception as failure:
        return Verdict(UNLOADABLE, None, f"{type(failure).__name__}: {str(failure)[:300]}")
    return _verdict(relative_error(found, computed), _about_logits((*report.warnings, *report.losses)))


def _verdict(error: float, said: str) -> Verdict:
    if error <= TOLERANCE:
        return Verdict(RIGHT, error, said)
    return Verdict(SAID if said else WRONG, error, said)


def _about_logits(sentences: Iterable[str]) -> str:
    """What of a report concerns what the network computes."""
    other = ("tokenizer", "pre-tokenizer", "rounded from", "newer than", "chat template", "dropped: ")
    return "; ".join(dict.fromkeys(s for s in sentences if not any(word in s for word in other)))


def write_model(case: OddConfig, folder: Path, work: Path) -> None:
    """Writes the Hugging Face folder of a case: random weights, config, tokenizer."""
    import torch

    transformers = quiet_transformers()
    # transformers completes what it is given.
    config = getattr(transformers, case.model_class).config_class(**json.loads(json.dumps(case.config)))
    config._attn_implementation = "eager"
    model = getattr(transformers, case.model_class)(config).eval()
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    source = write_tokenizers(work / "tokenizers", ["smollm2"], VOCABULARY)["smollm2"]
    for path in source.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    ids = token_ids(folder, 60)[:60]
    for attempt in range(20):
        torch.manual_seed(attempt)
        randomise(model)
        for parameter in model.parameters():
            parameter.data = parameter.data.to(torch.float16).to(torch.float32)
        if case.kind != "causal" or _clear_winners(model, inputs(ids, case.kind)):
            break
    model.save_pretrained(folder)
    _store_as(folder / "model.safetensors", case.tensor_dtype)
    _edit(folder / "config.json", case)


_DTYPES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16", "f64": "float64"}


def _store_as(path: Path, kind: str) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    if kind == "f32":
        return
    kinds = ["f32", "f16", "bf16"] if kind == "mix" else [kind]
    tensors = load_file(path)
    for i, (name, tensor) in enumerate(tensors.items()):
        if tensor.is_floating_point():
            tensors[name] = tensor.to(getattr(torch, _DTYPES[kinds[i % len(kinds)]]))
    save_file(tensors, path, {"format": "pt"})


def _edit(path: Path, case: OddConfig) -> None:
    config = json.loads(path.read_text())
    config |= {"architectures": [case.model_class], **case.edits}
    if case.tensor_dtype in _DTYPES:
        config["dtype"] = _DTYPES[case.tensor_dtype]
    path.write_text(json.dumps({key: config[key] for key in config if key not in case.edits or config[key] != "-"}))
