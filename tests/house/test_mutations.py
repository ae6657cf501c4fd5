"""The table of faults stays true: its places are in the sources, its tests in the suite; no red is taken on trust."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from mutate import ROOT, faulty, judged
from mutation import Mutation
from mutations import MUTATIONS

TESTS = ROOT / "tests"


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_fault_has_its_place_and_its_tests(mutation: Mutation) -> None:
    assert faulty(mutation, ROOT / "src") != (ROOT / "src" / mutation.file).read_text()
    assert mutation.tests
    for test in mutation.tests.split():
        file, _, name = test.partition("::")
        assert re.search(rf"^def {name.partition('[')[0]}\(", _text_of(file), re.MULTILINE), test


@cache
def _text_of(test_file: str) -> str:
    return next(TESTS.rglob(test_file)).read_text()


def test_names_are_unique() -> None:
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS)


def test_a_place_that_is_gone_or_doubled_and_a_fault_that_does_not_compile_are_noticed(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\ny = 1\n")
    assert faulty(Mutation("m", "a.py", "t", "x = 1", "x = 2"), tmp_path) == "x = 2\ny = 1\n"
    (tmp_path / "b.py").write_text("def f():\n    return 1\n\n\nclass A:\n    def f(self):\n        return 1\n")
    assert faulty(Mutation("m", "b.py:A.f", "t", "1", "2"), tmp_path).count("return 2") == 1
    with pytest.raises(ValueError, match="0 functions g"):
        faulty(Mutation("m", "b.py:g", "t", "1", "2"), tmp_path)
    for old, new, words in (("z", "", "0 times"), ("= 1", "= 2", "2 times"), ("x = 1", "x =", "compile")):
        with pytest.raises(ValueError, match=words):
            faulty(Mutation("m", "a.py", "t", old, new), tmp_path)


@pytest.mark.parametrize(
    ("code", "output", "test"),
    [
        (0, "3 passed", ""),
        (1, "FAILED tests/train/test_a.py::test_b[x] - assert 1 == 2", "test_a.py::test_b[x]"),
        (1, "FAILED tests/train/test_a.py::test_b[a, b] - Failed: DID NOT RAISE", "test_a.py::test_b[a, b]"),
        (1, "FAILED tests/train/test_a.py::test_b", "test_a.py::test_b"),
        (1, "FAILED tests/train/test_a.py::test_b - NameError: name 'x' is not defined", ""),
        (1, "ERROR tests/train/test_a.py::test_b - RunError: no teacher", ""),
        (4, "ERROR: not found: test_c", ""),
        (5, "no tests ran", ""),
    ],
)
def test_only_a_test_that_fails_in_earnest_is_a_proof(code: int, output: str, test: str) -> None:
    assert judged(code, f"some dots\n{output}\n1 failed")[0] == test
