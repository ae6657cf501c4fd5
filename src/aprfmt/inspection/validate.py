"""Validation rules as a table; the score is the weighted share of the applicable rules that passed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, TypeAlias

from aprfmt import formats
from aprfmt.arch.gguf_keys import key_problems
from aprfmt.arch.loaders import loader_of
from aprfmt.arch.names import EMBEDDING, OUTPUT_HEAD, check_shapes, check_tensors
from aprfmt.arch.table import ARCHITECTURES, find_gguf
from aprfmt.arch.tower_table import find_tower_gguf
from aprfmt.canonical.base_model import find_base
from aprfmt.canonical.checks import network_shapes, shapes_after_links
from aprfmt.canonical.clip import read_towers
from aprfmt.canonical.model import Canonical
from aprfmt.canonical.model_kinds import ADAPTER, is_adapter, is_clip
from aprfmt.canonical.read import canonical
from aprfmt.codecs.dtypes import DTYPES, n_elements
from aprfmt.codecs.values import BLOCK_VALUES
from aprfmt.errors import AprError, StorageError, UsageError
from aprfmt.formats import apr2
from aprfmt.formats.apr_metadata import SOURCE_KEY
from aprfmt.formats.apr_shards import JoinedNative
from aprfmt.formats.gguf import GgufNative
from aprfmt.formats.hfdir import HfNative, modules_problems
from aprfmt.inspection.describe import REQUIRED_DIMS
from aprfmt.inspection.quality import first_tensor
from aprfmt.inspection.stats import Stats, blocks
from aprfmt.io import names
from aprfmt.io.digest import KINDS
from aprfmt.io.pipe import StartProgress
from aprfmt.model import Model, Tensor
from aprfmt.text import first_few, plural
from aprfmt.tokenizer import ggml
from aprfmt.tokenizer.data import TokenType
from aprfmt.types import PathLike

_MAX_DEAD_SHARE = 0.25
_REQUIRED = ("architecture", *REQUIRED_DIMS)

Status: TypeAlias = Literal["pass", "info", "warn", "fail", "skip"]


@dataclass(frozen=True, slots=True)
class Check:
    """The result of rule `id`: a sentence, the tensor concerned, and a suggestion.

    "skip": the rule does not apply to the file. "pass": a fact that the rule reports.
    """

    status: Status
    message: str
    tensor: str | None = None
    id: str = ""
    suggestion: str | None = None

    def to_json(self) -> dict[str, str]:
        """{id, status, message, tensor?, suggestion?}."""
        body = {"id": self.id, "status": self.status, "message": self.message}
        more = {"tensor": self.tensor, "suggestion": self.suggestion}
        return body | {key: value for key, value in more.items() if value is not None}


@dataclass(frozen=True, slots=True)
class ValidationRule:
    """A rule: id, weight in the score, what holds if it passes, and the function that checks.

    For a lint rule (inspection.lint) `level` is the severity of a failure, `why` the reason for it and `source` its
    reference.
    """

    id: str
    weight: int
    holds: str
    look: Callable[[Subject], Iterator[Check]]
    level: Status = "fail"
    why: str = ""
    source: str = ""


class Subject:
    """A model under examination; caches what several rules need."""

    def __init__(
        self, model: Model, progress: Callable[[int, str], None] | None = None, base: PathLike | None = None
    ) -> None:
        self.model = model
        self._base = base
        self._progress = progress or (lambda n_bytes, label: None)

    @cached_property
    def embedding(self) -> Tensor | None:
        """The token embedding, under any name."""
        return first_tensor(self.model, EMBEDDING)

    @property
    def no_tensors(self) -> str:
        """Why tensors cannot be checked."""
        encrypted = self.model.flags.get("encrypted")
        return "the tensors are encrypted" if encrypted else "the file contains no tensors"

    @property
    def vocabulary_tensors(self) -> list[Tensor]:
        """Embedding and output head, if present and two-dimensional."""
        found = (self.embedding, first_tensor(self.model, OUTPUT_HEAD))
        return [t for t in found if t is not None and len(t.shape) == 2]

    @cached_property
    def canonical(self) -> Canonical | AprError:
        """The model under Hugging Face names, or why that is impossible."""
        try:
            base = find_base(self.model, self._base) if is_adapter(self.model) else None
            return canonical(self.model, base=base)
        except StorageError:
            raise  # independent of the file
        except AprError as error:
            return error

    @cached_property
    def stats(self) -> list[tuple[Tensor, Stats | AprError, list[int]]]:
        """Each tensor's statistics (or why they are unavailable), and all-zero rows of the vocabulary tensors."""
        vocabulary = {id(t) for t in self.vocabulary_tensors}
        found = []
        for tensor in self.model.tensors.entries:
            dead: list[int] = []
            try:
                figures: Stats | AprError = _scan(tensor, dead if id(tensor) in vocabulary else None)
            except StorageError:
                raise
            except AprError as error:
                figures = error
            self._progress(tensor.n_bytes, tensor.name)
            found.append((tensor, figures, dead))
        return found


def _scan(tensor: Tensor, dead: list[int] | None) -> Stats:
    """One pass over `tensor`; appends indices of all-zero rows to `dead` if given."""
    import numpy as np

    stats = Stats(moments=False)
    columns = tensor.shape[-1] if dead is not None else 0
    step = columns * max(1, BLOCK_VALUES // columns) if columns else BLOCK_VALUES
    row = 0
    for block in blocks(tensor, step):
        stats.add(block)
        if dead is not None and columns:
            rows = block.reshape(-1, columns)
            with np.errstate(invalid="ignore"):  # NaNs are counted elsewhere
                dead += (row + np.flatnonzero(~np.any(rows, axis=1))).tolist()
            row += len(rows)
    return stats


def _header(subject: Subject) -> Iterator[Check]:
    state = subject.model.checksum()["header"]
    if state == "bad":
        yield Check("fail", "header checksum mismatch")
    elif state != "ok":
        yield Check("skip", "the container stores no header checksum")


def _footer(subject: Subject) -> Iterator[Check]:
    state = subject.model.checksum()["footer"]
    shards = subject.model.native_as(JoinedNative)
    if shards is not None and shards.problems:
        yield from (Check("fail", problem) for problem in shards.problems)
    elif subject.model.cut is not None:
        yield Check("fail", subject.model.cut)
    elif state == "bad":
        yield Check("fail", "file checksum mismatch: the file is damaged")
    elif state == "absent":
        yield Check("warn", "the file has no checksum, so damage cannot be detected")
    elif state != "ok":
        yield Check("skip", "the container stores no file checksum")


DIGEST_RULE = "file.sha256"
"""The rule that compares files with external digests (inspection.checksums)."""


def _covered(model: Model) -> bool:
    """Whether a checksum of the container covers the weights."""
    shards = model.native_as(JoinedNative)
    return model.checksum()["footer"] in ("ok", "bad") or (
        shards is not None and all(info.sha256 is not None for info, _ in shards.shards)
    )


def _protection(subject: Subject) -> Iterator[Check]:
    """Which checksum would reveal a changed byte."""
    if not (facts := [*_protections(subject)]):
        facts = [Check("skip", "the container stores no checksum: only sizes and contents can be checked")]
    yield from facts


def _protections(subject: Subject) -> Iterator[Check]:
    model, state = subject.model, subject.model.checksum()["footer"]
    shards = model.native_as(JoinedNative)
    if shards is not None and any(info.sha256 is not None for info, _ in shards.shards):
        yield Check("pass", f"the manifest stores the SHA-256 of {plural(len(shards.shards), 'shard')}")
    if state in ("ok", "bad"):
        yield Check("pass", "a CRC-32 at the end of the file covers every byte")
    record = model.metadata.get(SOURCE_KEY) if apr2.native_of(model) is not None else None
    files = record.get("files") if isinstance(record, Mapping) else None
    rows = [row for row in files if isinstance(row, Mapping)] if isinstance(files, list) else []
    for kind, (label, _) in KINDS.items():
        if n := sum(kind in row for row in rows):
            yield Check("pass", f"the source manifest stores the {label} of {plural(n, 'file')}")


def _check_source_manifest_names(subject: Subject) -> Iterator[Check]:
    """File names in the source manifest that `export` would restore: unsafe, special or colliding."""
    record = subject.model.metadata.get(SOURCE_KEY) if apr2.native_of(subject.model) is not None else None
    files = record.get("files") if isinstance(record, Mapping) else None
    if not isinstance(files, list):
        yield Check("skip", "the file has no source manifest")
        return
    for finding in names.findings(str(row.get("name")) for row in files if isinstance(row, Mapping)):
        yield Check("fail", f"an export would write {finding}")


def _extents(subject: Subject) -> Iterator[Check]:
    for tensor in subject.model.tensors.entries:
        if tensor.offset + tensor.n_bytes > tensor.source.size:
            yield Check("fail", "the data extends past the end of the file", tensor.name)
        try:
            need = DTYPES[tensor.dtype].n_bytes(tensor.shape)
        except AprError:
            continue  # rows padded to whole blocks; the reader has checked their size
        if need != tensor.n_bytes:
            text = f"{tensor.dtype} {list(tensor.shape)} needs {need} bytes, {tensor.n_bytes} are stored"
            yield Check("fail", text, tensor.name)


def _duplicates(subject: Subject) -> Iterator[Check]:
    seen: set[str] = set()
    for tensor in subject.model.tensors.entries:
        if tensor.name in seen:
            yield Check("fail", "duplicate tensor name", tensor.name)
        seen.add(tensor.name)
    if not seen:
        yield Check("skip", subject.no_tensors)


def _finite(subject: Subject) -> Iterator[Check]:
    if not subject.model.tensors:
        yield Check("skip", subject.no_tensors)
    for tensor, stats, _ in subject.stats:
        if isinstance(stats, AprError):
            yield Check("warn", f"cannot read the values: {stats.message}", tensor.name)
        elif stats.nan_count or stats.inf_count:
            text = f"{stats.nan_count:,} NaN and {stats.inf_count:,} infinite of {stats.n:,} values"
            yield Check("fail", text, tensor.name)


def _zeros(subject: Subject) -> Iterator[Check]:
    if not subject.model.tensors:
        yield Check("skip", subject.no_tensors)
    for tensor, stats, _ in subject.stats:
        if isinstance(stats, AprError) or not stats.n or stats.zero_count < stats.n:
            continue
        if len(tensor.shape) >= 2 and is_adapter(subject.model):
            yield Check(
                "warn", f"all {stats.n:,} values are zero: the adapter does not change this weight", tensor.name
            )
        elif len(tensor.shape) >= 2:
            yield Check("fail", f"all {stats.n:,} values are zero", tensor.name)
        elif not tensor.name.endswith("bias"):
            yield Check("warn", f"all {stats.n:,} values are zero", tensor.name)


def _dead_rows(subject: Subject) -> Iterator[Check]:
    if not subject.vocabulary_tensors:
        yield Check("skip", "no embedding found")
    tokenizer = subject.model.tokenizer
    for tensor, stats, dead in subject.stats:
        if not dead or isinstance(stats, AprError) or stats.zero_count == stats.n:
            continue
        n_tokens = len(tokenizer.tokens) if tokenizer else tensor.shape[0]
        types = tokenizer.types if tokenizer else []
        used = [row for row in dead if row < n_tokens and (row >= len(types) or types[row] != TokenType.UNUSED)]
        rest = len(dead) - len(used)
        if used:
            status: Status = "fail" if len(used) > _MAX_DEAD_SHARE * n_tokens else "warn"
            yield Check(status, f"{len(used):,} rows of used tokens are all zero, first: row {used[0]}", tensor.name)
        if rest:
            yield Check("warn", f"{rest:,} rows of unused or padding tokens are all zero", tensor.name)


def _adapter(subject: Subject) -> Iterator[Check]:
    """Whether an adapter is valid: a plain LoRA of complete pairs with a matching config."""
    if not is_adapter(subject.model):
        yield Check("skip", "the file is not an adapter")
        return
    found = subject.canonical
    if isinstance(found, AprError):
        yield Check("fail", found.message, found.tensor)
    elif found.adapter is not None and found.adapter.of is None:
        yield Check("pass", "every lora_A has its lora_B; shapes are compared only with --base")


def _names(subject: Subject) -> Iterator[Check]:
    found = subject.canonical
    if is_adapter(subject.model):
        yield Check("skip", f"the file contains {ADAPTER}")
        return
    if isinstance(found, AprError):
        yield Check("skip" if found.tensor is None else "fail", found.message, found.tensor)
        return
    if found.part and is_clip(subject.model) and find_tower_gguf(subject.model.metadata, subject.model.tensors):
        read_towers(subject.model).check()
        return
    if found.arch is None:
        yield Check("skip", f"the file contains {found.part}" if found.part else "unknown architecture")
        return
    check_tensors(found.arch, found.hparams, network_shapes(found))


def _shapes(subject: Subject) -> Iterator[Check]:
    found = subject.canonical
    if isinstance(found, AprError) or found.arch is None:
        yield Check("skip", "unknown architecture or tensor names")
        return
    shapes = network_shapes(found) | shapes_after_links(found.tensors)
    check_shapes(found.arch, found.hparams, shapes)


def _modules(subject: Subject) -> Iterator[Check]:
    if subject.model.native_as(HfNative) is None:
        yield Check("skip", "not a sentence-transformers folder")
    for file, problem, tensor in modules_problems(subject.model):
        yield Check("fail", f"{file} {problem}", tensor)


def _vocabulary(subject: Subject) -> Iterator[Check]:
    tokenizer, embedding = subject.model.tokenizer, subject.embedding
    if tokenizer is None or embedding is None or len(embedding.shape) != 2:
        yield Check("skip", "no tokenizer embedded" if tokenizer is None else "no embedding found")
        return
    n_tokens, rows = len(tokenizer.tokens), embedding.shape[0]
    if n_tokens > rows:
        yield Check("fail", f"the tokenizer has {n_tokens:,} tokens, the embedding {rows:,} rows", embedding.name)


def _special_ids(subject: Subject) -> Iterator[Check]:
    tokenizer = subject.model.tokenizer
    if tokenizer is None:
        yield Check("skip", "no tokenizer embedded")
        return
    n_tokens = len(tokenizer.tokens)
    for role, token in sorted(tokenizer.special.items()):
        if not 0 <= token < n_tokens:
            yield Check("fail", f"the {role} token is {token}, but the last id is {n_tokens - 1}")


def _required_keys(subject: Subject) -> Iterator[Check]:
    found = subject.canonical
    if (isinstance(found, Canonical) and found.part) or is_adapter(subject.model):
        yield Check("skip", f"the file contains {found.part if isinstance(found, Canonical) else ADAPTER}")
        return
    hparams = subject.model.hparams
    row = ARCHITECTURES.get(hparams.architecture or "")
    # A state space model has no attention heads, some networks no plain MLP.
    known = {key.field for key in row.keys} | {"architecture"} if row is not None else set(_REQUIRED)
    missing = [name for name in _REQUIRED if name in known and getattr(hparams, name) is None]
    if missing:
        # Only a file that claims to be a language model must have its dimensions.
        status: Status = (
            "fail" if subject.embedding is not None and apr2.native_of(subject.model) is not None else "warn"
        )
        yield Check(status, f"the metadata lacks {', '.join(missing)}")


def _runtime_keys(subject: Subject) -> Iterator[Check]:
    gguf = subject.model.native_as(GgufNative)
    if gguf is None:
        yield Check("skip", "not a GGUF file")
        return
    kv, found = gguf.parts[0].kv, subject.canonical
    row = found.arch if isinstance(found, Canonical) else find_gguf(kv, subject.model.tensors)
    if row is None or not subject.model.tensors or kv.get("general.type", "model") != "model":
        yield Check("skip", "unknown architecture" if row is None else "llama.cpp does not run this file on its own")
        return
    embedding = subject.model.tensors.get("token_embd.weight")
    rows = embedding.shape[0] if embedding is not None and embedding.shape else None
    shapes = {tensor.name: tensor.shape for tensor in subject.model.tensors.entries}
    problems = [*key_problems(row, kv, shapes), *ggml.key_problems(kv, row.gguf, rows)]
    tokenizer = subject.model.tokenizer if not problems else None
    part, missing = ggml.missing_by_name(tokenizer, str(kv.get("general.name", ""))) if tokenizer else ("", [])
    if missing:
        problems.append(("general.name", f"contains {part!r}, but the tokenizer lacks {first_few(missing)}"))
    for key, problem in problems:
        yield Check("fail", f"llama.cpp cannot load the file: {key} {problem}")
    loader, tensors = loader_of(row.gguf), subject.model.tensors
    nvfp4 = (t.name.removesuffix(".weight") + ".scale" for t in tensors.entries if t.dtype == "NVFP4")
    ignored = [name for name in nvfp4 if name in tensors and loader is not None and not loader.multiplies(name)]
    if ignored:
        what = f"llama.cpp's {row.gguf} network ignores {first_few(ignored)}: its logits are wrong"
        yield Check("fail", f"{what}; apr convert writes a GGUF that decodes these weights", ignored[0])


def _require_adapter(model: Model) -> None:
    if not is_adapter(model):
        raise UsageError("--base applies to adapters, and the input is not an adapter", path=model.path)


RULES = (
    ValidationRule("container.header", 5, "the header checksum matches", _header),
    ValidationRule("container.footer", 15, "the file checksum matches", _footer),
    ValidationRule("container.protection", 0, "checksums protect the file", _protection),
    ValidationRule(
        "record.names",
        5,
        "no restored file has a name that other programs execute or reserve",
        _check_source_manifest_names,
    ),
    ValidationRule("container.extents", 10, "every tensor is inside the file and its size matches its shape", _extents),
    ValidationRule("tensors.unique", 5, "every tensor name is unique", _duplicates),
    ValidationRule("values.finite", 15, "no value is NaN or infinite", _finite),
    ValidationRule("values.zero", 10, "no weight is all zeros", _zeros),
    ValidationRule("values.dead-rows", 5, "no vocabulary row is all zeros", _dead_rows),
    ValidationRule("adapter.pairs", 0, "every LoRA A has its B of the same rank", _adapter),
    ValidationRule("names.complete", 10, "all tensors of the architecture are present, and no others", _names),
    ValidationRule("shapes.match", 5, "shapes agree with the dimensions in the metadata", _shapes),
    ValidationRule("repository.modules", 0, "sentence-transformers modules are complete and fit", _modules),
    ValidationRule("tokenizer.size", 4, "the tokenizer fits the embedding", _vocabulary),
    ValidationRule("tokenizer.special", 3, "special tokens are in the vocabulary", _special_ids),
    ValidationRule("metadata.required", 3, "architecture and dimensions are set", _required_keys),
    ValidationRule("metadata.runtime", 5, "every key that llama.cpp requires is present", _runtime_keys),
)


@dataclass(frozen=True, slots=True)
class Validation:
    """The result of `validate`; `to_json` is the object of `apr validate --json`.

    Attributes:
        file: the path as given.
        format: the container, such as "GGUF v3".
        checks: one entry per passed rule, and one per finding.
        skipped: rules that do not apply; they do not affect the score.
        score: weighted share of the applied rules that passed, 0 to 100; 0 if a file is not the published one.
        passed: whether no rule failed and the score reaches the minimum.
        protected: whether a checksum covers the weights, so that a flipped bit would be found.
    """

    file: str
    format: str
    checks: list[Check]
    skipped: list[Check]
    score: int
    passed: bool
    protected: bool = True

    def to_json(self) -> dict[str, object]:
        """The keys of the JSON contract."""
        return {
            "file": self.file,
            "format": self.format,
            "passed": self.passed,
            "checks": [check.to_json() for check in self.checks],
            "skipped": [{"id": check.id, "message": check.message} for check in self.skipped],
            "score": self.score,
            "protected": self.protected,
        }


def apply(rules: Iterable[ValidationRule], subject: Subject) -> Iterator[tuple[ValidationRule, list[Check] | AprError]]:
    """The findings of each rule, or the error that prevented it: unreadable metadata, an invalid tokenizer."""
    for rule in rules:
        try:
            yield rule, list(rule.look(subject))
        except StorageError:
            raise  # independent of the file
        except AprError as error:
            yield rule, error


def validate(
    path: PathLike,
    *,
    strict: bool = False,
    min_score: int = 0,
    base: PathLike | None = None,
    progress: StartProgress | None = None,
    more: Sequence[ValidationRule] = (),
) -> Validation:
    """Applies every rule to the model at `path`, and those of `more`; every value is decoded.

    `strict` counts warnings as failures, a score under `min_score` fails. A warning costs its rule's weight too. `base`
    is the model that an adapter is compared with. `progress` is called with the bytes to decode; the function it
    returns is called with (bytes, tensor).
    """
    with formats.open_unchanged(path) as model:
        if base is not None:
            _require_adapter(model)
        n_bytes = sum(t.n_bytes for t in model.tensors.entries if n_elements(t.shape))
        subject = Subject(model, progress(n_bytes) if progress is not None else None, base)
        outcomes = [
            (rule, [Check("fail", found.message, found.tensor)] if isinstance(found, AprError) else found)
            for rule, found in apply((*RULES, *more), subject)
        ]
        label, protected = model.label, _covered(model) or any(rule.id == DIGEST_RULE for rule in more)
    checks: list[Check] = []
    skipped: list[Check] = []
    weights = passed = 0
    for rule, findings in outcomes:
        skip = next((f for f in findings if f.status == "skip"), None)
        if skip is not None:
            skipped.append(replace(skip, id=rule.id))
            continue
        weights += rule.weight
        if all(finding.status == "pass" for finding in findings):
            passed += rule.weight
            findings = findings or [Check("pass", rule.holds)]
        checks += [
            replace(f, id=rule.id, status="fail" if strict and f.status == "warn" else f.status) for f in findings
        ]
    is_other = any(check.id == DIGEST_RULE and check.status == "fail" for check in checks)
    score = passed * 100 // weights if weights and not is_other else 0
    failed = any(check.status == "fail" for check in checks)
    passes = not failed and score >= min_score
    return Validation(os.fspath(path), label, checks, skipped, score, passes, protected)
