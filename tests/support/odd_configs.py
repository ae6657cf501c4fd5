"""Unusual configurations of known model types, both ways: right, refused, said, or wrong in silence.

A case is a line of tests/conformance/configs.jsonl: a model type and class of transformers, the config, the dtype of
the stored tensors. `judge` writes a tiny random model of it, imports the folder, compares what comes back with it byte
by byte, exports a GGUF, compares llama.cpp's logits with transformers', converts the GGUF back to a folder, and
compares the logits of that.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from arch_models import ArchCase, build, find_case, quiet_transformers, relative_error, token_ids, transformers_logits
from llama_peer import LlamaError, LlamaPeer
from tiny_models import write_byte_tokenizer, write_word_tokenizer

from aprfmt.arch.row import WHOLE_HEADS
from aprfmt.arch.table import ARCHITECTURES

CASES = Path(__file__).resolve().parent.parent / "conformance" / "configs.jsonl"

VOCABULARY = 280
"""Tokens of the byte-level tokenizer; the embedding of a case may have more rows."""

TOKENS = 60
"""Tokens of the text whose logits are compared."""

TOLERANCE = 2e-3
"""Relative error of logits that counts as right; llama.cpp computes some activations by tables of half precision."""
SLIGHT = 0.9
"""Part of the positions that keep their most likely token where the report names a slight difference."""
QUANTIZED = 0.1
"""The same of Q8_0: the weights and, in llama.cpp, the activations are rounded to eight bits."""

RIGHT, SAME, REFUSED, SAID, SKIPPED = "right", "same", "refused", "said", "skipped"
WRONG, UNLOADABLE, ABORTED, CRASHED, BYTES = "WRONG", "unloadable", "aborted", "crashed", "bytes differ"
FINE = frozenset((RIGHT, SAME, REFUSED, SAID, SKIPPED))


@dataclass(frozen=True)
class OddConfig:
    """One configuration.

    Attributes:
        model_type, model_class: of transformers.
        config: all that the config class is given.
        tensor_dtype: "f32", "f16", "bf16", "f64", or "mix": each of the first three by turns.
        kind: what is compared, as in ArchCase.
        edits: what the saved config.json says otherwise; "-" takes a key away.
        why: what is unusual.
        expected: what one of the directions has to come to; "" for anything that is fine.
        like: id of the ArchCase whose class options, tensor names and tokenizer it has; "" where they are the usual.
        gguf_dtype: of the GGUF, "f32" or "q8_0".
    """

    model_type: str
    model_class: str
    config: Mapping[str, Any]
    tensor_dtype: str = "f32"
    kind: str = "causal"
    edits: Mapping[str, Any] = field(default_factory=dict)
    why: str = ""
    expected: str = ""
    like: str = ""
    gguf_dtype: str = "f32"

    def line(self) -> str:
        """The case as a line of a file; what is usual is left out."""
        usual = OddConfig("", "", {})
        found = {"model_type": self.model_type, "class": self.model_class, "config": self.config}
        for name in ("tensor_dtype", "kind", "edits", "why", "expected", "like", "gguf_dtype"):
            if getattr(self, name) != getattr(usual, name):
                found[name] = getattr(self, name)
        return json.dumps(found)

    def arch_case(self) -> ArchCase:
        """What arch_models builds it from."""
        config_class = getattr(quiet_transformers(), self.model_class).config_class.__name__
        known = find_case(self.like) if self.like else ArchCase(self.model_type, "", config_class, self.model_class)
        return replace(
            known,
            config_class=config_class,
            model_class=self.model_class,
            config=json.loads(json.dumps(self.config)),
            kind=self.kind,
            tokenizer=WORDS if known.tokenizer == "bert" else BYTES_OF_TEXT,
            dtype="float16",  # which each of the other dtypes holds exactly, but for BF16
            wrapped=True,  # `config` is all that the class is given
        )


BYTES_OF_TEXT, WORDS = "bytes", "words"


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


Verdicts = dict[str, Verdict]
WAYS = ("apr", "to_gguf", "from_gguf")
"""Folder -> `.apr` -> folder, folder -> `.apr` -> GGUF, GGUF -> folder."""


class Unbuildable(Exception):
    """transformers does not build, save or load the model: nothing can be compared."""


def read_cases(path: Path = CASES) -> Iterator[OddConfig]:
    """The cases of a file of lines."""
    for line in path.read_text().splitlines():
        found = json.loads(line)
        found["model_class"] = found.pop("class")
        yield OddConfig(**found)


def judge(case: OddConfig, work: Path, llama: LlamaPeer, seed: int = 0, loose: float = 1.0) -> Verdicts:
    """What each of WAYS came to; `seed` draws other weights. Raises Unbuildable.

    Tolerances are `loose` times as wide.
    """
    return _Judged(case, work, llama, seed, loose).verdicts


class _Judged:
    def __init__(self, case: OddConfig, work: Path, llama: LlamaPeer, seed: int, loose: float) -> None:
        self.case, self.work, self.llama, self.loose = case, work, llama, loose
        self.source, self.apr, self.gguf = work / "tiny", work / "tiny.apr", work / "tiny.gguf"
        try:
            write_model(case, self.source, work, seed)
            self.ids = text_ids(self.source)
            self.wanted = _logits(case, self.source, self.ids)
            if not bool(abs(self.wanted).max() < float("inf")):
                raise ValueError("transformers' logits are not finite")
        except Exception as failure:
            raise Unbuildable(f"{type(failure).__name__}: {str(failure)[:300]}") from failure
        self.verdicts = dict.fromkeys(WAYS, Verdict(SKIPPED))
        for way, check in (("apr", self._apr), ("to_gguf", self._to_gguf), ("from_gguf", self._from_gguf)):
            self.verdicts[way] = self._judged(check)
            if way == "apr" and not self.apr.exists():
                break
            if way == "to_gguf" and not (self.gguf.exists() and self.verdicts[way].outcome in (RIGHT, SAID, WRONG)):
                break

    def _judged(self, check: Any) -> Verdict:
        import aprfmt

        try:
            found: Verdict = check()
        except aprfmt.AprError as error:
            return Verdict(REFUSED, None, self._without_paths(str(error)))
        except LlamaError as failure:
            return Verdict(ABORTED if " died " in str(failure) else UNLOADABLE, None, str(failure)[:300])
        except Exception as failure:
            text = self._without_paths(f"{type(failure).__name__}: {str(failure)[:300]}")
            return Verdict(CRASHED, None, text)
        return found

    def _without_paths(self, text: str) -> str:
        return text.replace(f"{self.work}/", "").removeprefix("tiny: ").removeprefix("tiny.apr: ")

    def _apr(self) -> Verdict:
        import aprfmt

        aprfmt.import_model(self.source, self.apr)
        aprfmt.export_model(self.apr, self.work / "same", format="hf")
        names = {path.name for folder in (self.source, self.work / "same") for path in folder.iterdir()}
        other = [name for name in sorted(names) if _bytes(self.source / name) != _bytes(self.work / "same" / name)]
        return Verdict(BYTES, None, ", ".join(other)) if other else Verdict(SAME)

    def _to_gguf(self) -> Verdict:
        import aprfmt

        try:
            report = aprfmt.export_model(self.apr, self.gguf, dtype=self.case.gguf_dtype)
        except aprfmt.AprError as error:
            if self.gguf.exists():
                return Verdict(CRASHED, None, f"refused after it was written: {error}")
            if "llama.cpp has no network" in error.message:
                return self._rebuilt_config()
            if "--allow-different" not in f"{error} {error.hint}":
                raise
            aprfmt.export_model(self.apr, self.gguf, dtype=self.case.gguf_dtype, allow_different=True)
            computed = self.llama.logits(self.gguf, self.ids, self.case.kind)
            return Verdict(REFUSED, relative_error(computed, self.wanted), self._without_paths(str(error)))
        self.computed = self.llama.logits(self.gguf, self.ids, self.case.kind)
        self.tolerance = (QUANTIZED if self.case.gguf_dtype == "q8_0" else TOLERANCE) * self.loose
        if (of_dense := self._error_of_dense_attention()) > self.tolerance:
            return Verdict(WRONG, of_dense, "with attention to all positions")
        return _verdict(self.computed, self.wanted, self.tolerance, report.differences)

    def _rebuilt_config(self) -> Verdict:
        """Whether a config.json that is made of the hyper-parameters has the values of the model's own."""
        from aprfmt.arch.hparams import from_hf_config, to_hf_config

        config = json.loads((self.source / "config.json").read_text())
        inside = next((part for part in config.values() if _is_text(part)), config)
        h = from_hf_config(config)
        built, whole = json.loads(json.dumps(to_hf_config(h))), ARCHITECTURES[str(h.architecture)].rotates
        of_whole = {"tie_word_embeddings"} if inside is not config else set()
        stated = {key for key, value in inside.items() if value is not None} - _OF_FILES - of_whole
        other = [key for key in built.keys() & stated if _rotated(built[key], whole) != _rotated(inside[key], whole)]
        text = ", ".join(f"{key} is {built[key]} instead of {inside[key]}" for key in sorted(other))
        return Verdict(WRONG, None, text) if other else Verdict(SKIPPED)

    def _error_of_dense_attention(self) -> float:
        """Of networks in _ROUNDED_ATTENTION; 0 for others. Nothing is rounded where all blocks are attended to."""
        key = _ROUNDED_ATTENTION.get(self.case.model_type)
        if key is None:
            return 0.0
        folder = self.work / "dense"
        shutil.copytree(self.source, folder)
        config = folder / "config.json"
        config.write_text(re.sub(rf'"{key}": \d+', f'"{key}": {TOKENS}', config.read_text()))
        dense = self.llama.logits(self.gguf, self.ids, self.case.kind, dense=True)
        return relative_error(dense, _logits(self.case, folder, self.ids))

    def _from_gguf(self) -> Verdict:
        """Whether transformers computes with a GGUF's folder what llama.cpp computes with the GGUF."""
        import aprfmt

        gguf = self.gguf
        if self.case.gguf_dtype != "f32":
            gguf = self.work / "decoded.gguf"
            aprfmt.convert_model(self.gguf, gguf, dtype="f32", allow_different=True)
            decoded = self.llama.logits(gguf, self.ids, self.case.kind)
            if (error := relative_error(self.computed, decoded)) > self.tolerance:
                return Verdict(WRONG, error, "the decoded weights compute something else")
            self.computed = decoded
        folder = self.work / "back"
        dtype = "keep" if gguf == self.gguf else "f32"  # what is decoded is not rounded again
        report = aprfmt.convert_model(self.gguf, folder, format="hf", dtype=dtype)
        if not _has_class(folder):
            return Verdict(SKIPPED, None, "transformers has no class of the language model alone")
        try:
            found = _logits(self.case, folder, self.ids)
        except Exception as failure:
            return Verdict(UNLOADABLE, None, self._without_paths(f"{type(failure).__name__}: {str(failure)[:300]}"))
        wanted = self.computed
        if self.verdicts["to_gguf"].outcome == SAID and relative_error(found, self.wanted) <= TOLERANCE:
            wanted = self.wanted  # the folder may have back what the GGUF cannot say
        told: list[dict[str, Any]] = [
            *report.differences,
            *({"what": text, "beyond": None} for text in _about_logits(report)),
        ]
        return _verdict(found, wanted, TOLERANCE * self.loose, told)


_OF_FILES = {"architectures", "dtype", "torch_dtype", "transformers_version", "model_type"}
"""Keys of a config.json that are not of the network."""


def _rotated(value: Any, rotates: str) -> Any:
    """Rope parameters without the rotated part of a head where the class rotates all of it."""
    part = value.get("partial_rotary_factor") if isinstance(value, dict) else None
    is_whole = part is not None and (part == 1.0 or rotates == WHOLE_HEADS)
    return {k: v for k, v in value.items() if k != "partial_rotary_factor"} if is_whole else value


def _is_text(part: object) -> bool:
    """Whether it is the config of a language model inside another."""
    return isinstance(part, dict) and {"num_hidden_layers", "vocab_size"} <= part.keys()


def _logits(case: OddConfig, folder: Path, ids: list[int]) -> Any:
    """What transformers computes with a folder, which may hold a wrapper or its language model alone."""
    classes = json.loads((folder / "config.json").read_text())["architectures"]
    wrapped = bool(case.like) and find_case(case.like).wrapped
    model_class = case.model_class if wrapped and classes == [case.model_class] else ""
    return transformers_logits(folder, ids, case.kind, model_class)


_ROUNDED_ATTENTION = {"minimax_m3_vl": "index_topk_blocks"}
"""Model types whose keys and values llama.cpp rounds to half precision, since it computes them by flash attention: what
names the number of blocks that are attended to.
"""


def sensitivity(case: OddConfig, work: Path, seed: int = 0) -> float:
    """How many tolerances transformers' logits move where each weight moves by a little: near-ties show in it.

    Raises Unbuildable.
    """
    import torch
    from safetensors.torch import load_file, save_file

    folder = work / "tiny"
    step, tolerance = (8e-3, QUANTIZED) if case.gguf_dtype == "q8_0" else (1e-4, TOLERANCE)
    if case.model_type in _ROUNDED_ATTENTION:
        step = max(step, 1e-3)
    try:
        write_model(case, folder, work, seed)
        ids = text_ids(folder)
        before = _logits(case, folder, ids)
        tensors = load_file(folder / "model.safetensors")
        torch.manual_seed(seed)
        for name, tensor in tensors.items():
            if tensor.is_floating_point():
                tensors[name] = tensor.float() * (1 + step * torch.randn(tensor.shape))
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return relative_error(_logits(case, folder, ids), before) / tolerance
    except Exception as failure:
        raise Unbuildable(f"{type(failure).__name__}: {str(failure)[:300]}") from failure


def _verdict(found: Any, wanted: Any, tolerance: float, told: Sequence[Mapping[str, Any]]) -> Verdict:
    """Right, said where one of the differences concerns texts of that length, else wrong."""
    least = min(SLIGHT, SLIGHT * TOLERANCE / tolerance)
    error = relative_error(found, wanted)
    if error <= tolerance:
        return Verdict(RIGHT, error)
    slight = found.shape == wanted.shape and (found.argmax(-1) == wanted.argmax(-1)).mean() >= least
    allowed = [
        one["what"]
        for one in told
        if (one["beyond"] is None or one["beyond"] < len(wanted)) and (slight or not one.get("slight"))
    ]
    return Verdict(SAID if allowed else WRONG, error, "; ".join(allowed or [one["what"] for one in told]))


def _about_logits(report: Any) -> list[str]:
    """What of a report concerns what the network computes."""
    other = ("tokenizer", "pre-tokenizer", "rounded from", "newer than", "chat template", "dropped: ")
    sentences = dict.fromkeys((*report.warnings, *report.losses))
    return [s for s in sentences if not any(word in s for word in other)]


def _bytes(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None


def _has_class(folder: Path) -> bool:
    classes = json.loads((folder / "config.json").read_text())["architectures"]
    return hasattr(quiet_transformers(), classes[0])


def text_ids(folder: Path) -> list[int]:
    """The ids of a text that the model's positions have room for."""
    config = json.loads((folder / "config.json").read_text())
    config = next((value for value in config.values() if isinstance(value, dict) and "hidden_size" in value), config)
    room = [n for key in ("max_position_embeddings", "n_positions") if isinstance(n := config.get(key), int) and n > 2]
    return token_ids(folder, TOKENS)[: min((TOKENS, *(n - 2 for n in room)))]


def write_model(case: OddConfig, folder: Path, work: Path, seed: int = 0) -> None:
    """Writes the Hugging Face folder of a case: random weights, config, tokenizer."""
    known = case.arch_case()
    build(known, folder, write_tokenizers(work / "tokenizers", known.tokenizer), seed)
    _store_as(folder / "model.safetensors", case.tensor_dtype, cleared=case.model_type in _CLEARS_PADDING)
    _edit(folder / "config.json", case)


def write_tokenizers(folder: Path, name: str) -> dict[str, Path]:
    """The folder of a small tokenizer of its own, below `folder`."""
    at = folder / name
    at.mkdir(parents=True)
    for file, data in _tokenizer_files(name).items():
        (at / file).write_bytes(data)
    return {name: at}


@cache
def _tokenizer_files(name: str) -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as made:
        if name == WORDS:
            write_word_tokenizer(Path(made))
        else:
            write_byte_tokenizer(Path(made), VOCABULARY)
        return {path.name: path.read_bytes() for path in Path(made).iterdir()}


_DTYPES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16", "f64": "float64"}
_CLEARS_PADDING = ("youtu",)
"""Model types whose class sets the embedding of the padding token to 0 whenever it loads a model. That token is the
config's in the first folder, the tokenizer's in one made from a GGUF, and one of the first four in both.
"""


def _store_as(path: Path, kind: str, *, cleared: bool = False) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    kinds = ["f32", "f16", "bf16"] if kind == "mix" else [kind]
    tensors = load_file(path)
    for i, (name, tensor) in enumerate(tensors.items()):
        if cleared and name.endswith("embed_tokens.weight"):
            tensor[:4] = 0
        if tensor.is_floating_point():
            tensors[name] = tensor.to(getattr(torch, _DTYPES[kinds[i % len(kinds)]]))
    save_file(tensors, path, {"format": "pt"})


def _edit(path: Path, case: OddConfig) -> None:
    config = json.loads(path.read_text())
    config |= {"architectures": [case.model_class], **case.edits}
    config["dtype"] = _DTYPES.get(case.tensor_dtype, "float32")
    path.write_text(json.dumps({key: config[key] for key in config if key not in case.edits or config[key] != "-"}))
