"""Benchmarks models in llama.cpp side by side."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from statistics import median

from aprfmt.convert.parsing import parse_size
from aprfmt.errors import UsageError
from aprfmt.io.pipe import StartProgress
from aprfmt.llama.client import Llama
from aprfmt.running.decoders import open_decoder
from aprfmt.types import PathLike


@dataclass(frozen=True, slots=True)
class Samples:
    """The measurements of all runs; `ratio` is the median relative to that of the first model."""

    median: float
    min: float
    max: float
    samples: list[float]
    ratio: float


@dataclass(frozen=True, slots=True)
class BenchedModel:
    """One model.

    Attributes:
        file: as given.
        engine: the package that provides llama.cpp.
        threads: compute threads.
        load_s: load time in seconds.
        weight_bytes: of all tensors.
        context_bytes: of the context and compute buffers; None if llama.cpp's log does not state it.
        memory_bytes: peak memory of the process, mapped weights included; 0 if the system does not tell.
        prompt_tok_s: prompt tokens per second.
        tok_s: generated tokens per second.
        ttft_ms: milliseconds to the first token after a prompt.
    """

    file: str
    engine: str
    threads: int
    load_s: float
    weight_bytes: int
    context_bytes: int | None
    memory_bytes: int
    prompt_tok_s: Samples
    tok_s: Samples
    ttft_ms: Samples


@dataclass(frozen=True, slots=True)
class BenchGate:
    """A limit for one model; met if the value is not worse."""

    file: str
    gate: str
    limit: float
    value: float
    passed: bool


@dataclass(frozen=True, slots=True)
class BenchReport:
    """The result of `bench`.

    Attributes:
        prompt_tokens, tokens, runs: prompt length, generated tokens and measured runs.
        models: one entry per model, in the order given.
        gates: every limit, for every model.
        passed: whether all limits were met.
        seconds: wall time of the whole benchmark.
    """

    prompt_tokens: int
    tokens: int
    runs: int
    models: list[BenchedModel]
    gates: list[BenchGate] = field(default_factory=list)
    passed: bool = True
    seconds: float = 0.0

    def to_json(self) -> dict[str, object]:
        """The object of `apr bench --json`."""
        return asdict(self)


GATES: dict[str, tuple[bool, Callable[[BenchedModel], float]]] = {
    "tok_s": (True, lambda m: m.tok_s.median),
    "prompt_tok_s": (True, lambda m: m.prompt_tok_s.median),
    "ttft_ms": (False, lambda m: m.ttft_ms.median),
    "memory": (False, lambda m: m.memory_bytes),
    "load_s": (False, lambda m: m.load_s),
}
"""Name -> (whether more is better, the value)."""


def parse_gates(gates: Mapping[str, object] | Sequence[str]) -> dict[str, float]:
    """Limits by name, from a mapping or NAME=VALUE strings. Raises UsageError."""
    pairs: list[tuple[str, object]] = []
    if isinstance(gates, Mapping):
        pairs = [*gates.items()]
    else:
        for text in gates:
            name, equals, value = text.partition("=")
            if not equals:
                raise UsageError(f"--gate {text}: missing value", hint=f"write {name}=VALUE")
            pairs.append((name, value))
    found: dict[str, float] = {}
    for name, given in pairs:
        if name not in GATES:
            raise UsageError(f"--gate {name}: unknown gate", hint=f"known gates: {', '.join(GATES)}")
        if name in found:
            raise UsageError(f"--gate {name} is given twice")
        if name == "memory":
            found[name] = parse_size(given, name="gate memory")
            continue
        try:
            limit = float(given) if isinstance(given, str | int | float) else math.nan
        except ValueError:
            limit = math.nan
        if not 0 < limit < math.inf:
            raise UsageError(f"--gate {name}={given}: not a number above 0")
        found[name] = limit
    return found


def measure(
    files: Sequence[PathLike],
    *,
    prompt_tokens: int,
    tokens: int,
    runs: int,
    threads: int,
    gpu_layers: int,
    gates: Mapping[str, float],
    say: Callable[[str], None],
    progress: StartProgress | None,
) -> BenchReport:
    """Loads all models, warms each up once, then measures in turns, so that machine noise affects all of them alike."""
    started = time.monotonic()
    n_ctx = max(prompt_tokens, tokens + 1) + 8
    with ExitStack() as stack:
        loaded = [
            stack.enter_context(open_decoder(file, n_ctx=n_ctx, n_threads=threads, gpu_layers=gpu_layers, say=say))
            for file in files
        ]
        each = prompt_tokens + tokens
        advance = progress(each * len(files) * (runs + 1)) if progress is not None else None
        found: list[list[dict[str, float]]] = [[] for _ in files]
        for run in range(-1, runs):
            for file, llama, samples in zip(files, loaded, found, strict=True):
                taken = llama.measure(prompt_tokens, tokens)
                if run >= 0:
                    samples.append(taken)
                if advance is not None:
                    advance(each, str(file))
        models: list[BenchedModel] = []
        for file, llama, samples in zip(files, loaded, found, strict=True):
            first = models[0] if models else None
            models.append(_model(str(file), llama, samples, prompt_tokens, tokens, first))
    checked = [_gate(model, name, limit) for model in models for name, limit in gates.items()]
    return BenchReport(
        prompt_tokens, tokens, runs, models, checked, all(gate.passed for gate in checked), time.monotonic() - started
    )


def _model(
    file: str,
    llama: Llama,
    samples: list[dict[str, float]],
    prompt_tokens: int,
    tokens: int,
    first: BenchedModel | None,
) -> BenchedModel:
    return BenchedModel(
        file, llama.engine, llama.facts.n_threads, llama.facts.load_seconds, llama.facts.weight_bytes,
        llama.context_bytes(), int(max(taken["peak_bytes"] for taken in samples)),
        _samples([prompt_tokens / taken["prompt_seconds"] for taken in samples], first.prompt_tok_s if first else None),
        _samples([tokens / taken["seconds"] for taken in samples], first.tok_s if first else None),
        _samples([1000 * taken["first_seconds"] for taken in samples], first.ttft_ms if first else None),
    )  # fmt: skip


def _samples(values: list[float], first: Samples | None) -> Samples:
    middle = median(values)
    return Samples(middle, min(values), max(values), values, middle / first.median if first else 1.0)


def _gate(model: BenchedModel, name: str, limit: float) -> BenchGate:
    more_is_better, value_of = GATES[name]
    value = value_of(model)
    return BenchGate(model.file, name, limit, value, value >= limit if more_is_better else 0 < value <= limit)
