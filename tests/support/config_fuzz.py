"""Random configurations by number: case `i` of a seed is the same on every machine, in a process of its own.

A worker forks once for each case, and shares one llama.cpp with them until it dies. What is found counts only if it is
found with other weights too, beyond what weights that differ in the fourth digit change; then the changes that it does
not need are taken back.
"""

from __future__ import annotations

import gc
import json
import math
import os
import re
import resource
import select
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from arch_models import ArchCase, all_cases, has_gguf, inputs, make_model, quiet_transformers
from config_draws import Draws, draw, n_parameters, with_changes
from llama_peer import LlamaPeer
from odd_configs import (
    FINE,
    REFUSED,
    RIGHT,
    SAID,
    SKIPPED,
    VOCABULARY,
    WRONG,
    OddConfig,
    Unbuildable,
    Verdict,
    Verdicts,
    judge,
    sensitivity,
)
from train_children import die_with_parent

UNBUILT, DIED, LATE = "not built", "died", "late"
_CPU_SECONDS, _WALL_SECONDS, _LLAMA_SECONDS = 120, 400.0, 60.0
_SILENT_SECONDS = _WALL_SECONDS + 2 * _LLAMA_SECONDS
_GRACE_SECONDS = 60.0
"""How long a worker may need for its last case when the time is over."""
_MEMORY_BYTES, _FILE_BYTES, _PARAMETERS = 4 << 30, 512 << 20, 2_000_000
_MOST_CHANGES = (1, 1, 2, 2, 3, 4)
_DTYPES = ("f32", "f16", "bf16", "f64", "mix")
_SEEDS = (1, 2)
_ABOVE_NOISE = 5
_EMBEDDING = {"chameleon": 8448}
"""Rows whose config names tokens beyond those of the tokenizer: how many embeddings they have."""


@dataclass(frozen=True)
class Known:
    """Something that is found again and again and is right as it is: `why` says so."""

    row: str
    text: str
    why: str


KNOWN: tuple[Known, ...] = ()


@dataclass
class Outcome:
    """What a numbered case came to.

    Attributes:
        number: of the case.
        row: of the architecture table.
        outcome: the worst of `verdicts`, or that the case was not built, or that its process died or was late.
        verdicts: way -> outcome, error, text.
        changes: what of the known case was changed.
        line: of configs.jsonl, with the fewest changes, where it is a find.
        seconds: of the processor.
        llama_died: whether the worker has to start another llama.cpp.
    """

    number: int
    row: str
    outcome: str
    verdicts: dict[str, tuple[str, float | None, str]] = field(default_factory=dict)
    changes: dict[str, Any] = field(default_factory=dict)
    line: str = ""
    seconds: float = 0.0
    llama_died: bool = False

    @property
    def text(self) -> str:
        """What the program said of the verdict that counts."""
        return next((text for outcome, _, text in self.verdicts.values() if outcome == self.outcome), "")

    @property
    def error(self) -> float | None:
        """Its error."""
        return next((error for outcome, error, _ in self.verdicts.values() if outcome == self.outcome), None)

    @property
    def found(self) -> bool:
        """Whether it is wrong, and not known."""
        return self.outcome not in (*FINE, UNBUILT) and not any(
            re.fullmatch(known.row, self.row) and re.search(known.text, self.text) for known in KNOWN
        )


def outcome_of(verdicts: Mapping[str, Verdict]) -> str:
    """The one word for both ways: what is wrong, else what is refused or said."""
    outcomes = [verdict.outcome for verdict in verdicts.values()]
    return next((o for o in outcomes if o not in FINE), next((o for o in (REFUSED, SAID) if o in outcomes), RIGHT))


@cache
def fuzzed_rows(*, plain: bool = False) -> dict[str, list[ArchCase]]:
    """Row -> its cases that transformers computes, the base case first; with `plain` those of rows of which llama.cpp
    has no network.
    """
    found: dict[str, list[ArchCase]] = {}
    for case in all_cases():
        if case.computable and case.kind != "draft" and has_gguf(case.row) != plain:
            found.setdefault(case.row, []).append(case)
    return found


def row_of(seed: int, number: int, rows: Sequence[str]) -> str:
    """The row of a case: all of them in turn, in another order each time."""
    order = list(rows)
    Random(f"{seed}:rows:{number // len(order)}").shuffle(order)
    return order[number % len(order)]


def numbered(seed: int, number: int, row: str) -> tuple[OddConfig, Draws, dict[str, Any]]:
    """The case of a number, what it is drawn from, and its changes."""
    rng = Random(f"{seed}:{number}:{row}")
    known = fuzzed_rows(plain=not has_gguf(row))[row]
    base = known[0] if rng.random() < 0.4 else rng.choice(known)
    draws = Draws(base, _EMBEDDING.get(row, VOCABULARY))
    dtype = rng.choices(_DTYPES, (6, 1, 1, 1, 1))[0]
    gguf_dtype = "q8_0" if rng.random() < 0.08 else "f32"
    usual = OddConfig(
        draws.made_type, base.model_class, draws.arguments, dtype, base.kind, like=base.id, gguf_dtype=gguf_dtype
    )
    n_changes, most = rng.choice(_MOST_CHANGES), _PARAMETERS + 2 * draws.parameters
    changes = draw(draws, rng, n_changes, lambda arguments: _builds(replace(usual, config=arguments), most))
    return changed(usual, draws, changes), draws, changes


def changed(case: OddConfig, draws: Draws, changes: Mapping[str, Any]) -> OddConfig:
    """The case with these changes of what it is drawn from."""
    said = ", ".join(f"{key.rpartition('.')[2]}={json.dumps(value)}" for key, value in changes.items())
    return replace(case, config=with_changes(draws.arguments, changes), why=said)


def _builds(case: OddConfig, most: int) -> bool:
    """Whether transformers makes a model of it, of at most so many parameters, that computes."""
    import torch

    known = case.arch_case()
    try:
        if n_parameters(known) > most:
            return False
        _, model = make_model(known, VOCABULARY)
        with torch.no_grad():
            getattr(model, "thinker", model)(**inputs(range(5, 45), case.kind))
    except Exception:
        return False
    return True


def run_number(seed: int, number: int, row: str, work: Path, llama: LlamaPeer) -> Outcome:
    """Judges a case; one that is found is looked at again and made smaller."""
    try:
        case, draws, changes = numbered(seed, number, row)
        verdicts = judge(case, work / "first", llama)
    except Unbuildable as failure:
        return Outcome(number, row, UNBUILT, {"apr": (UNBUILT, None, str(failure))})
    if outcome_of(verdicts) in FINE:
        return _outcome(number, row, verdicts, changes)
    retry = _Retry(work, llama, outcome_of(verdicts))
    if (again := retry.confirmed(case)) is None:
        return _outcome(number, row, dict.fromkeys(verdicts, Verdict(RIGHT)), changes)
    small, verdicts = _minimised(case, draws, changes, retry, again)
    return replace(_outcome(number, row, verdicts, changes), line=small.line())


def _outcome(number: int, row: str, verdicts: Verdicts, changes: dict[str, Any]) -> Outcome:
    said = {way: (v.outcome, v.error, v.text) for way, v in verdicts.items() if v.outcome != SKIPPED}
    return Outcome(number, row, outcome_of(verdicts), said, changes)


class _Retry:
    def __init__(self, work: Path, llama: LlamaPeer, outcome: str) -> None:
        self.work, self.llama, self.outcome, self.n = work, llama, outcome, 0

    def confirmed(self, case: OddConfig, seeds: Sequence[int] = _SEEDS) -> Verdicts | None:
        """The verdicts with other weights in a new llama.cpp, if the case comes to the same with each of them."""
        found = None
        for seed in seeds:
            self.n += 1
            folder = self.work / str(self.n)
            self.llama.__exit__()  # recurrent states of llama.cpp may begin with what an earlier model left in memory
            try:
                noise = sensitivity(case, folder / "noise", seed) if self.outcome == WRONG else 0.0
                loose = max(1.0, _ABOVE_NOISE * noise)
                found = judge(case, folder, self.llama, seed, loose)
            except Unbuildable:
                return None
            finally:
                shutil.rmtree(folder, ignore_errors=True)
            if outcome_of(found) != self.outcome:
                return None
        return found


def _minimised(
    case: OddConfig, draws: Draws, changes: Mapping[str, Any], retry: _Retry, verdicts: Verdicts
) -> tuple[OddConfig, Verdicts]:
    """The case with the fewest changes that comes to the same, and what it comes to."""

    def attempt(smaller: OddConfig) -> bool:
        nonlocal case, verdicts
        if (found := retry.confirmed(smaller, _SEEDS[:1])) is None:
            return False
        case, verdicts = smaller, found
        return True

    if case.gguf_dtype != "f32":
        attempt(replace(case, gguf_dtype="f32"))
    if case.tensor_dtype != "f32":
        attempt(replace(case, tensor_dtype="f32"))
    for key in list(changes):
        fewer = {name: value for name, value in changes.items() if name != key}
        if attempt(changed(case, draws, fewer)):
            changes = fewer
    return case, verdicts


# --- processes ---


def limit_resources() -> None:
    """For this process and those that it starts, llama.cpp among them."""
    found = re.search(r"VmData:\s+(\d+)", Path("/proc/self/status").read_text())
    resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY_BYTES + (int(found[1]) << 10 if found else 0),) * 2)
    resource.setrlimit(resource.RLIMIT_FSIZE, (_FILE_BYTES,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def work_off(seed: int, numbers: Iterator[int], rows: Sequence[str], tell: Callable[[Outcome], None]) -> None:
    """Judges numbered cases one after the other, each in a fork of this process."""
    limit_resources()
    with LlamaPeer(_LLAMA_SECONDS) as llama:
        for number in numbers:
            llama.start()
            with tempfile.TemporaryDirectory(prefix="apr-configs-") as work:
                outcome = _forked(seed, number, row_of(seed, number, rows), Path(work), llama)
            if outcome.llama_died:
                llama.__exit__()
            tell(outcome)


def _forked(seed: int, number: int, row: str, work: Path, llama: LlamaPeer) -> Outcome:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        _child(seed, number, row, work, llama, writer)
    os.close(writer)
    data, end = b"", time.monotonic() + _WALL_SECONDS
    while select.select([reader], [], [], max(0.0, end - time.monotonic()))[0]:
        part = os.read(reader, 1 << 20)
        if not part:
            break
        data += part
    else:
        os.kill(pid, signal.SIGKILL)
    os.close(reader)
    _, status, usage = os.wait4(pid, 0)
    seconds = usage.ru_utime + usage.ru_stime
    if data and status == 0:
        return replace(Outcome(**json.loads(data)), seconds=seconds)
    late = time.monotonic() >= end or (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU)
    verdict = (LATE if late else DIED, None, f"the process of the case ended with wait status {status}")
    return Outcome(number, row, verdict[0], {"apr": verdict}, seconds=seconds, llama_died=True)


def _child(seed: int, number: int, row: str, work: Path, llama: LlamaPeer, pipe: int) -> None:
    code = 1
    try:
        die_with_parent()
        resource.setrlimit(resource.RLIMIT_CPU, (_CPU_SECONDS, _CPU_SECONDS + 10))
        tempfile.tempdir = str(work)
        before = llama.process
        outcome = run_number(seed, number, row, work, llama)
        outcome.llama_died = llama.process is not before
        with os.fdopen(pipe, "w") as stream:
            stream.write(json.dumps(vars(outcome), default=str))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _latest(heard: float, end: float | None) -> float:
    """When a worker that was heard last at `heard` has to answer."""
    return min(heard + _SILENT_SECONDS, math.inf if end is None else max(heard, end) + _GRACE_SECONDS)


def _of_worker(outcome: str, text: str) -> Outcome:
    return Outcome(-1, "", outcome, {"apr": (outcome, None, text)})


class Fuzzer:
    """Workers that share the numbers of a seed, and what they came to."""

    def __init__(self, seed: int, rows: Sequence[str], jobs: int) -> None:
        self._seed, self._rows, self._jobs = seed, rows, jobs

    def run(self, seconds: float | None, cases: int | None, start: int = 0) -> Iterator[Outcome]:
        """The outcomes as they come, until the time is over or all cases from number `start` on are judged.

        A worker that dies, that is silent for longer than a case may take, or that has not ended a while after the time
        is over, ends the run; the last outcome says so.
        """
        end = time.monotonic() + seconds if seconds is not None else None
        pipes, pids = dict[int, bytes](), dict[int, int]()
        for job in range(self._jobs):
            reader, writer = os.pipe()
            pid = os.fork()
            if pid == 0:
                os.close(reader)
                self._work(job, end, start, cases, writer)
            os.close(writer)
            pipes[reader], pids[reader] = b"", pid
        heard = dict.fromkeys(pipes, time.monotonic())
        try:
            while pipes:
                ready = select.select(list(pipes), [], [], 1.0)[0]
                heard |= dict.fromkeys(ready, time.monotonic())
                for reader in ready:
                    data = os.read(reader, 1 << 20)
                    *lines, pipes[reader] = (pipes[reader] + data).split(b"\n")
                    yield from (Outcome(**json.loads(line)) for line in lines)
                    if not data:
                        os.close(reader)
                        del pipes[reader]
                        status = os.waitpid(pids.pop(reader), 0)[1]
                        if status:
                            yield _of_worker(DIED, f"a worker ended with wait status {status}")
                            return
                if any(time.monotonic() > _latest(heard[reader], end) for reader in pipes):
                    yield _of_worker(LATE, "a worker did not end in time")
                    return
        finally:
            for reader in pipes:
                os.close(reader)
            for pid in pids.values():
                os.kill(pid, signal.SIGKILL)  # its own children die with it
                os.waitpid(pid, 0)

    def _work(self, job: int, end: float | None, start: int, cases: int | None, pipe: int) -> None:
        code = 1

        def numbers() -> Iterator[int]:
            number = start + job
            while (cases is None or number < start + cases) and (end is None or time.monotonic() < end):
                yield number
                number += self._jobs

        def tell(outcome: Outcome) -> None:
            os.write(pipe, json.dumps(vars(outcome)).encode() + b"\n")

        try:
            die_with_parent()
            work_off(self._seed, numbers(), self._rows, tell)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)


def preload(rows: Sequence[str] = ()) -> None:
    """Does what each case would do anew in its own process: imports, tables, patterns. It is most of a case's time."""
    import aprfmt.api
    from aprfmt.arch.table import ARCHITECTURES

    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads do not survive a fork
    quiet_transformers()
    for row, cases in (fuzzed_rows() | fuzzed_rows(plain=True)).items():
        if row in (rows or fuzzed_rows()):
            ARCHITECTURES.get(row)
            getattr(quiet_transformers(), cases[0].model_class)
    del aprfmt
    with tempfile.TemporaryDirectory(prefix="apr-configs-") as work, LlamaPeer(_LLAMA_SECONDS) as llama:
        for row, gguf_dtype in (("llama", "f32"), ("bert", "q8_0")):
            base = fuzzed_rows()[row][0]
            draws = Draws(base, VOCABULARY)
            case = OddConfig(
                draws.made_type,
                base.model_class,
                draws.arguments,
                "f32",
                base.kind,
                like=base.id,
                gguf_dtype=gguf_dtype,
            )
            verdicts = judge(case, Path(work) / row, llama)
            assert outcome_of(verdicts) == RIGHT, f"{row}: {verdicts}"
    gc.collect()
    gc.freeze()  # a collection in a worker would copy the pages of all of it
