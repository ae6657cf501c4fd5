"""What is checked of one case: our way there and back, the converter's way, and both against each other.

A step never raises: its failure is one short reason. The model's folder has a neutral name, because llama.cpp looks
into `general.name` for some families.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from arch_models import (
    BUILD_VERSION,
    CACHE,
    OF_STATES,
    OF_TEXTS,
    ArchCase,
    build,
    n_kept,
    quiet_transformers,
    relative_error,
    token_ids,
    top1_equal,
    transformers_logits,
    unwrapped,
    write_checkpoint,
    write_target,
    write_tokenizers,
)
from conformance_explained import HANGS, explain
from converter_peer import ConverterError, ConverterPeer
from llama_peer import LlamaError, LlamaPeer

from aprfmt.arch.hyperparams import Hyperparams
from aprfmt.arch.names import canonical_name
from aprfmt.arch.table import ARCHITECTURES

LLAMA_TOLERANCE = 5e-3
HF_TOLERANCE = 1e-6
OUT_TYPES = ("f32", "f16", "bf16")


@dataclass
class Step:
    """How one check went; `reason` says why it did not, or what is to be known of it."""

    ok: bool
    error: float | None = None
    reason: str = ""


Steps = dict[str, Step]


class Bench:
    """The running peers and the folder they work in. Use in `with`.

    `vocabulary` cuts the tokenizer down to so many tokens, for speed; the converter knows only whole ones.
    """

    def __init__(self, work: Path, *, peer: bool = True, keep: bool = False, vocabulary: int | None = None) -> None:
        self.work, self.peer, self.keep, self.vocabulary = work, peer, keep, vocabulary
        self.llama, self.converter = LlamaPeer(), ConverterPeer()

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.llama.__exit__()

    def run(self, case: ArchCase, seed: int = 0) -> Steps:
        """Every step of the case: "build", then ours (SHOWN_OURS), then the converter's (SHOWN_PEER)."""
        run = _Run(case, self, seed)
        run.step("build", run.build)
        if run.steps["build"].ok:
            run.ours()
            if self.peer:
                run.theirs()
        if not self.keep:
            shutil.rmtree(run.folder, ignore_errors=True)
        return run.steps


OURS = ("apr", "gguf", "loads", "logits", "top1", "back_bits", "back_logits", "direct")
PEER = ("peer_converts", "peer_loads", "peer_logits", "peer_top1", "keys", "tensors", "peer_back")


def _apart(ours: Hyperparams, others: Hyperparams) -> dict[str, object]:
    """What of the hyper-parameters of a network is not the other's."""
    found, other = ({**asdict(h), **h.extra, "extra": None} for h in (ours, others))
    return {name: value for name, value in found.items() if name not in other or other[name] != value}


class _Run:
    def __init__(self, case: ArchCase, bench: Bench, seed: int) -> None:
        self.case, self.bench, self.seed = case, bench, seed
        self.steps: Steps = {}
        self.folder = bench.work / case.id.replace("/", "--")
        shutil.rmtree(self.folder, ignore_errors=True)
        self.source = self.folder / "tiny-model"
        self.target = self.folder / "target"
        self.apr = self.folder / "tiny-model.apr"

    def step(self, name: str, check: Callable[[], Step | None]) -> bool:
        """Runs a check and notes how it went."""
        try:
            self.steps[name] = check() or Step(True)
        except Exception as failure:
            self.steps[name] = Step(False, reason=self.said(failure))
        return self.steps[name].ok

    def said(self, failure: Exception) -> str:
        """The failure in one line, without this run's paths."""
        lines = [line for line in str(failure).strip().splitlines() if line] or [""]
        return f"{type(failure).__name__}: {lines[0].replace(f'{self.folder}/', '')}"[:300]

    def build(self) -> None:
        limit = n_kept(self.case, self.bench.vocabulary)
        tokenizers = write_tokenizers(self.bench.work / f"tokenizers-{limit}", [self.case.tokenizer], limit)
        if self.case.target:
            write_target(self.case, self.target, tokenizers)
        if not self.case.computable:
            write_checkpoint(self.case, self.source, tokenizers, self.seed)
            self.ids, self.wanted = token_ids(self.source), None
            return
        build(self.case, self.source, tokenizers, self.seed)
        self.ids = token_ids(self.source)
        self.wanted = self._logits(self.source) if self.case.kind != "draft" else None

    # ours

    def ours(self) -> None:
        if not self.step("apr", self._import):
            return
        self.step("direct", lambda: self._same_folder(self._to_hf(self.apr, "direct")))
        gguf = self._ours("f32")
        if self.step("gguf", lambda: self._export("f32")):
            self._in_llama("", gguf)
            self._back(gguf)

    def _ours(self, out_type: str) -> Path:
        return self.folder / f"ours-{out_type}.gguf"

    def _import(self) -> None:
        import aprfmt

        aprfmt.import_model(self.source, self.apr, target_model=self.target if self.case.target else None)

    def _export(self, out_type: str) -> Step:
        import aprfmt

        report = aprfmt.export_model(self.apr, self._ours(out_type), dtype=out_type, allow_different=True)
        left = [loss for loss in report.losses if " dropped: " in loss]
        said, wanted = sum(int(loss.split()[0]) for loss in left), len(self._beside())
        return Step(
            said == wanted, reason="" if said == wanted else f"says that {said} tensors are dropped, not {wanted}"
        )

    def _in_llama(self, prefix: str, gguf: Path) -> None:
        """The steps loads, logits and top1."""
        if self.case.kind == "draft":  # alone it computes nothing
            loaded = self.step(f"{prefix}loads", lambda: self.bench.llama.load(gguf))
            self.steps |= {f"{prefix}{name}": Step(loaded) for name in ("logits", "top1")}
            return
        try:
            got = self.bench.llama.logits(gguf, self.ids, self.case.kind)
        except LlamaError as failure:
            self.steps[f"{prefix}loads"] = Step(False, reason=str(failure))
            return
        self.steps[f"{prefix}loads"] = Step(True)
        if self.wanted is None:
            if not _is_sane(got):  # recurrent states of llama.cpp may begin with what an earlier model left in memory
                self.bench.llama.__exit__()
                self.bench.llama.__enter__()
                got = self.bench.llama.logits(gguf, self.ids, self.case.kind)
            self.steps[f"{prefix}logits"] = Step(
                _is_sane(got), None, "" if _is_sane(got) else "not finite, or all the same"
            )
            self.steps[f"{prefix}top1"] = Step(True)
            return
        error = relative_error(got, self.wanted)
        reason = "" if got.shape == self.wanted.shape else f"shape {got.shape} instead of {self.wanted.shape}"
        self.steps[f"{prefix}logits"] = Step(error <= LLAMA_TOLERANCE, error, reason)
        same = self.case.kind in (*OF_STATES, *OF_TEXTS) or top1_equal(got, self.wanted)
        self.steps[f"{prefix}top1"] = Step(same)

    def _to_hf(self, apr: Path, name: str) -> Path:
        import aprfmt

        aprfmt.export_model(apr, self.folder / name, format="hf")
        return self.folder / name

    def _back(self, gguf: Path) -> None:
        """GGUF -> .apr -> folder; for dtypes that F32 would widen, by way of a GGUF that keeps them."""
        if self.case.dtype != "float32":
            if not self.step("gguf", lambda: self._export("keep")):
                return
            gguf = self._ours("keep")
        try:
            folder = self._gguf_to_hf(gguf, "back")
        except Exception as failure:
            self.steps["back_bits"] = Step(False, reason=self.said(failure))
            return
        self.step("back_bits", lambda: self._same_network_tensors(folder))
        self.step("back_logits", lambda: self._same_network(folder))

    def _gguf_to_hf(self, gguf: Path, name: str) -> Path:
        import aprfmt

        apr = self.folder / f"{name}-model.apr"
        aprfmt.import_model(gguf, apr)
        return self._to_hf(apr, name)

    def _same_network(self, folder: Path) -> Step:
        """Whether a folder computes what the source does; without transformers, whether its config means the same."""
        if self.case.computable and self.case.kind != "draft" and _has_class(folder):
            return self._same_logits(folder)
        from aprfmt.arch.hparams import from_hf_config, to_gguf, with_target

        ours, wanted = (from_hf_config(json.loads((f / "config.json").read_text())) for f in (folder, self.source))
        if self.case.target:
            target = json.loads((self.target / "config.json").read_text())
            wanted = with_target(wanted, ARCHITECTURES[self.case.row], target) or wanted
        if self.case.wrapped or self.case.model_class in ARCHITECTURES[self.case.row].other_names:
            ours, wanted = unwrapped(ours, wanted), unwrapped(wanted, ours)
        same = ours == wanted
        if ours.architecture != wanted.architecture:  # the same network under a plainer name
            keys, others = (to_gguf(h, ARCHITECTURES[str(h.architecture)]) for h in (ours, wanted))
            same = sorted(keys, key=str) == sorted(others, key=str)
        return Step(same, reason="" if same else f"{_apart(ours, wanted)} instead of {_apart(wanted, ours)}")

    def _same_logits(self, folder: Path) -> Step:
        assert self.wanted is not None
        error = relative_error(self._logits(folder), self.wanted)
        return Step(error <= HF_TOLERANCE, error)

    def _logits(self, folder: Path) -> Any:
        """What transformers computes with the folder, which may hold a wrapper or its language model alone."""
        saved = json.loads((folder / "config.json").read_text())["architectures"] == [self.case.model_class]
        model_class = self.case.model_class if self.case.wrapped and saved else ""
        return transformers_logits(folder, self.ids, self.case.kind, model_class)

    def _same_folder(self, folder: Path) -> Step:
        step = same_tensors(folder, self.source)
        if step.ok and self.case.wrapped:
            other = [p.name for p in self.source.iterdir() if p.read_bytes() != (folder / p.name).read_bytes()]
            return Step(not other, reason=f"other files: {', '.join(other)}" if other else "")
        # Equal tensors under an equal config.json are the same network: nothing is left to compute.
        return self._same_network(folder) if step.ok and not _same_config(folder, self.source) else step

    def _same_network_tensors(self, folder: Path, *, explained: bool = False) -> Step:
        """Whether a folder holds the source's tensors by the row's names; of a wrapper, its language model's.

        `explained` differences are right, since the converter has lost what it changed.
        """
        import aprfmt

        ours, wanted = _folder_tensors(folder), _folder_tensors(self.source)
        if self.case.wrapped or self.case.model_class in ARCHITECTURES[self.case.row].other_names:
            row = ARCHITECTURES[self.case.row]
            beside = self._beside()
            wanted = {str(canonical_name(row, name)): t for name, t in wanted.items() if name not in beside}
            if ours.keys() != wanted.keys():  # a class of language models alone has its experts under other names
                again = folder.with_suffix(".gguf")
                whole = (folder / "config.json").exists()
                aprfmt.convert_model(folder if whole else self._theirs("f32"), again, dtype="keep")
                ours, wanted = list_tensors(again), list_tensors(self._ours("f32"))
        found = _differences(ours, wanted, "source")
        return _judged(self.case, found) if explained else Step(not found, reason=_listed(found))

    def _beside(self) -> set[str]:
        """Tensors of a wrapper's folder that are none of its language model."""
        if not self.case.wrapped or not self.case.computable:
            return set(self.case.beside)
        row = ARCHITECTURES[self.case.row]
        return {name for name in _folder_tensors(self.source) if canonical_name(row, name) is None}

    # the converter's

    def theirs(self) -> None:
        cached = _cache_file(self.source, self.target, self.bench.converter.version)
        known: dict[str, Any] = {}

        def ask() -> None:
            known.update(json.loads(cached.read_text()) if cached.exists() else self._ask_converter(cached))

        if not self.step("peer_converts", ask):
            return
        self.steps |= {name: Step(**step) for name, step in known["steps"].items()}
        if not self.steps["peer_converts"].ok:
            return
        if self._ours("f32").exists():
            self.step("keys", lambda: self._keys(known["keys"]))
            self.step("tensors", lambda: self._tensors(known["tensors"]))
        self.step("peer_back", self._peer_back)

    def _ask_converter(self, cached: Path) -> dict[str, Any]:
        """Converts to every type, computes the f32 one, and keeps what was found."""
        known: dict[str, Any] = {"steps": {}, "tensors": {}, "keys": {}}
        before, self.steps = self.steps, {}
        try:
            for out_type in OUT_TYPES:
                how = self.bench.converter.convert(self.source, self._theirs(out_type), out_type, self._options())
                known["tensors"][out_type] = list_tensors(self._theirs(out_type))
            self.steps["peer_converts"] = Step(True, reason=how)
            known["keys"] = list_keys(self._theirs("f32"))
            if self.case.row in HANGS:
                self.steps["peer_loads"] = Step(False, reason=HANGS[self.case.row])
            else:
                self._in_llama("peer_", self._theirs("f32"))
        except ConverterError as failure:
            self.steps["peer_converts"] = Step(False, reason=str(failure))
        known["steps"] = {name: asdict(step) for name, step in self.steps.items()}
        self.steps = before
        cached.parent.mkdir(parents=True, exist_ok=True)
        parts = cached.with_suffix(f".{os.getpid()}")
        parts.write_text(json.dumps(known))
        parts.rename(cached)
        return known

    def _options(self) -> tuple[str, ...]:
        return ("--target-model-dir", str(self.target)) if self.case.target else ()

    def _theirs(self, out_type: str) -> Path:
        return self.folder / f"theirs-{out_type}.gguf"

    def _keys(self, theirs: Mapping[str, Any]) -> Step:
        return _judged(self.case, _differences(list_keys(self._ours("f32")), theirs, "converter"))

    def _tensors(self, theirs: Mapping[str, Any]) -> Step:
        said = []
        for out_type in OUT_TYPES:
            if not self._ours(out_type).exists():
                self._export(out_type)
            found = _differences(list_tensors(self._ours(out_type)), theirs[out_type], "converter")
            step = _judged(self.case, found, f"{out_type}: ")
            if not step.ok:
                return step
            said.append(step.reason)
        return Step(True, reason="; ".join(dict.fromkeys(filter(None, said))))

    def _peer_back(self) -> Step:
        gguf = self._theirs("f32")
        if not gguf.exists():
            self.bench.converter.convert(self.source, gguf, "f32", self._options())
        if self.case.computable:
            return self._same_network(self._gguf_to_hf(gguf, "peer-back"))
        import aprfmt

        # The vocabulary is not that of the network, so there are no tokenizer files for it.
        folder = self.folder / "peer-back"
        folder.mkdir()
        aprfmt.convert_model(gguf, folder / "model.safetensors")
        return self._same_network_tensors(folder, explained=True)


def _same_config(folder: Path, other: Path) -> bool:
    ours, theirs = (json.loads((f / "config.json").read_text()) for f in (folder, other))
    return bool(ours == theirs)


def _has_class(folder: Path) -> bool:
    """Whether transformers has the class of a folder: some wrappers are there, but not their language model alone."""
    classes = json.loads((folder / "config.json").read_text())["architectures"]
    return hasattr(quiet_transformers(), classes[0])


def _is_sane(values: Any) -> bool:
    import numpy as np

    return bool(np.isfinite(values).all() and (values.astype(np.float64).std() > 0 or values.size == 1))


def same_tensors(folder: Path, wanted: Path) -> Step:
    """Whether two folders hold the same tensors: names, dtypes, shapes, bytes."""
    found = _differences(_folder_tensors(folder), _folder_tensors(wanted), "source")
    return Step(not found, reason=_listed(found))


def _folder_tensors(folder: Path) -> dict[str, Any]:
    from safetensors import safe_open

    found: dict[str, Any] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                tensor = file.get_tensor(name).contiguous()
                raw = tensor.view(-1).view(_uint8()).numpy().tobytes() if tensor.numel() else b""
                found[name] = [str(tensor.dtype), list(tensor.shape), _digest(raw)]
    return found


def _uint8() -> Any:
    import torch

    return torch.uint8


def list_tensors(gguf: Path) -> dict[str, Any]:
    """Name -> [dtype, shape, digest of the bytes] of every tensor of a GGUF."""
    import aprfmt

    with aprfmt.open(gguf) as model:
        return {name: [t.dtype, list(t.shape), _digest(t.raw())] for name, t in model.tensors.items()}


def list_keys(gguf: Path) -> dict[str, Any]:
    """`general.architecture` and every key that starts with it."""
    import aprfmt

    with aprfmt.open(gguf) as model:
        kv = model.metadata
        arch = kv["general.architecture"]
        keys = {key: kv[key] for key in kv if key.startswith(f"{arch}.")}
        return {"general.architecture": arch, **{key: _plain(value) for key, value in keys.items()}}


def _plain(value: Any) -> Any:
    return value if isinstance(value, str | int | float | bool) else list(value)


def _digest(raw: bytes | memoryview) -> str:
    return hashlib.sha256(raw).hexdigest()[:16]


def _differences(ours: Mapping[str, Any], theirs: Mapping[str, Any], who: str) -> dict[str, str]:
    """Name -> what differs; bytes are said to differ, all else is quoted."""
    said = {name: f"not in the {who}'s" for name in ours if name not in theirs}
    said |= {name: f"only in the {who}'s" for name in theirs if name not in ours}
    for name in ours:
        if name in theirs and ours[name] != theirs[name]:
            a, b = ours[name], theirs[name]
            bytes_only = isinstance(a, list) and isinstance(b, list) and len(a) == 3 and a[:2] == b[:2]
            said[name] = "other bytes" if bytes_only else f"{a}, the {who}'s {b}"
    return said


def _judged(case: ArchCase, found: Mapping[str, str], prefix: str = "") -> Step:
    """Right where everything that differs is explained; the reason tells the unexplained, else the explanations."""
    why = {name: explain(case.id, name) for name in found}
    unexplained = {name: text for name, text in found.items() if why[name] is None}
    if unexplained:
        return Step(False, reason=f"{prefix}{_listed(unexplained)}")
    return Step(True, reason="; ".join(dict.fromkeys(f"{name}: {text}" for name, text in why.items())))


def _listed(found: Mapping[str, str]) -> str:
    said = [f"{name}: {text}" for name, text in found.items()]
    return f"{'; '.join(said[:6])}{f' and {len(said) - 6} more' if said[6:] else ''}"


def _cache_file(source: Path, target: Path, version: str) -> Path:
    """Where the converter's part of a case is kept: by the bytes it was given, since a seed gives other weights on
    another processor."""
    given = hashlib.sha256(repr((BUILD_VERSION, version)).encode())
    for folder in filter(Path.exists, (source, target)):
        for path in sorted(folder.iterdir()):
            given.update(f"{folder.name}/{path.name}\0".encode())
            given.update(path.read_bytes())
    return CACHE / "conformance" / f"{given.hexdigest()[:24]}.json"
