"""The fuzzer finds nothing in a fixed number of cases, what it once found stays mended, and it sees what is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import fuzz_cases
import fuzz_seeds
import pytest
from fuzz_cases import MEMORY_BYTES, TARGETS, Run, build, run_case
from fuzz_seeds import Seed

import aprfmt
import fuzz
from aprfmt.cli.commands import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
CASES = 900

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="measures processes by /proc")


@pytest.fixture(scope="module")
def seeds() -> dict[str, Seed]:
    return fuzz_seeds.seeds()


@pytest.fixture
def place(tmp_path: Path, seeds: dict[str, Seed]) -> Path:
    fuzz_seeds.write({"base.gguf": seeds["gguf-bpe"].files["m.gguf"]}, tmp_path)
    return tmp_path / "case"


@pytest.mark.turns(first=False)
def test_damaged_files_have_no_wrong_outcome() -> None:
    words = [sys.executable, str(ROOT / "tools" / "fuzz.py"), "--plain", "--seed", "1", "--cases", str(CASES)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    found = json.loads(done.stdout)
    assert found["findings"] == []
    assert done.returncode == 0
    assert found["cases"] == CASES
    assert found["outcomes"] > 300


@pytest.mark.turns
@pytest.mark.parametrize("path", sorted((ROOT / "fixtures" / "fuzz").glob("*.zip")), ids=lambda path: path.stem)
def test_a_finding_stays_mended(path: Path, place: Path) -> None:
    run = run_case(path.stem, fuzz.unpack(path), place, sorted(TARGETS))
    assert run.findings == []


def test_each_command_that_reads_models_gets_damaged_ones() -> None:
    """Or says in ELSEWHERE what covers it."""
    covered = {target.partition("-")[0] for target in TARGETS} | fuzz_cases.ELSEWHERE.keys()
    assert {row.name for row in COMMANDS.values() if row.reads_models} <= covered
    assert fuzz_cases.ELSEWHERE.keys() <= COMMANDS.keys() - {target.partition("-")[0] for target in TARGETS}


def test_a_case_is_built_from_its_name(seeds: dict[str, Seed]) -> None:
    for name in ("gguf-bpe/1", "apr-of-folder/2/3", "hf-spm/4"):
        assert build(seeds, name) == build(seeds, name)
        assert build(seeds, name).files != seeds[name.partition("/")[0]].files


def test_every_seed_is_read(seeds: dict[str, Seed], place: Path) -> None:
    """Edits of files that nobody reads find nothing."""
    for name, seed in seeds.items():
        run = run_case(name, seed, place)
        opened = {"model": "read open ok", "imatrix": "imatrix read ok"}[seed.role]
        assert opened in run.outcomes, name


def _outcome(place: Path, seed: Seed, monkeypatch: pytest.MonkeyPatch, operation: Callable[..., Any]) -> list[str]:
    monkeypatch.setattr(aprfmt, "open", operation)
    return [finding.kind for finding in run_case("x", seed, place).findings]


def _raise(error: BaseException) -> Callable[..., Any]:
    def operation(path: Path) -> None:
        raise error

    return operation


def _with_message(text: str) -> aprfmt.AprError:
    error = aprfmt.AprError("")
    error.message = text
    return error


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _loop(path: Path) -> None:
    while True:
        pass


@pytest.mark.parametrize(
    ("kind", "operation"),
    [
        ("exception", _raise(KeyError("x"))),
        ("exception", _raise(RecursionError())),
        ("memory", _raise(MemoryError())),
        ("message", _raise(aprfmt.AprError(" "))),
        ("message", _raise(_with_message("x" * 3000))),
        ("time", _loop),
        ("input", _empty),
    ],
)
def test_a_wrong_outcome_is_seen(
    kind: str, operation: Callable[..., Any], seeds: dict[str, Seed], place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert kind in _outcome(place, seeds["gguf-nested"], monkeypatch, operation)


@pytest.mark.parametrize(("kind", "fault"), [("left", "left"), ("lossy", "zeros"), ("output", "cut")])
def test_a_wrong_output_is_seen(
    kind: str, fault: str, seeds: dict[str, Seed], place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A conversion that leaves a file, writes other tensors, or half of them."""
    convert = aprfmt.convert_model

    def damaged(source: Path, output: Path, **options: Any) -> Any:
        report = convert(source, output, **options)
        if fault == "left":
            (output.parent / ".m.apr.tmp").write_bytes(b"x")
        elif output.name == "m.apr":
            data = output.read_bytes()
            output.write_bytes(data[:-9000] + bytes(8996) + data[-4:] if fault == "zeros" else data[:-9000])
        return report

    monkeypatch.setattr(aprfmt, "convert_model", damaged)
    run = run_case("x", seeds["gguf-bpe"], place, sorted(TARGETS))
    assert kind in {finding.kind for finding in run.findings}


@pytest.mark.parametrize(
    ("kind", "fault"),
    [("died", lambda: os._exit(3)), ("died", os.abort), ("memory", lambda: bytearray(2 * MEMORY_BYTES))],
    ids=["exit", "signal", "memory"],
)
def test_a_process_that_dies_is_one_finding(
    kind: str, fault: Callable[[], Any], seeds: dict[str, Seed], monkeypatch: pytest.MonkeyPatch
) -> None:
    def first_dies(name: str, seed: Seed, at: Path, *_: Any, **__: Any) -> Run:
        run = Run(name, seed, at)
        if name.startswith("gguf-v2/"):
            run.attempt("read", fault)
        return run

    monkeypatch.setattr(fuzz, "run_case", first_dies)
    fuzzer = fuzz.Fuzzer(seeds, ["gguf-v2"], 0)
    fuzzer.run(1, cases=1)
    assert fuzzer.total.findings[0].kind == kind
    assert fuzzer.total.findings[0].case.startswith("gguf-v2/")


def test_archives_of_findings_come_back(seeds: dict[str, Seed], tmp_path: Path) -> None:
    case = build(seeds, "hf-bpe/5")
    (tmp_path / "x.zip").write_bytes(fuzz.pack(case))
    assert fuzz.unpack(tmp_path / "x.zip") == case


def test_values_are_repeatable() -> None:
    import fuzz_values

    assert fuzz_values.value(Random(3), "a") == fuzz_values.value(Random(3), "a")
    assert fuzz_cases.CPU_SECONDS == 2.0
