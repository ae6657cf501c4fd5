"""Proof that the tests bite: each fault of mutations.py must turn its tests red.

    python tools/mutate.py                      all of them
    python tools/mutate.py --package aprfmt     those of one package
    python tools/mutate.py "lr dropped"         only those

The tests first run on a copy without faults and must be green there; then each fault is put into a copy of its own.
A test that fails for a reason that any slip of the pen would cause is not proof, nor is one whose setup fails. Exit 1
where a fault survives, or its place in the sources is gone.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from mutation import Mutation
from mutations import MUTATIONS

ROOT = Path(__file__).resolve().parents[1]
_TIMEOUT_S = 180
_COPIED = ("src", "tests", "tools", "pyproject.toml")
_SLIPS = re.compile(r"(Name|Syntax|Import|ModuleNotFound|Attribute|UnboundLocal)Error\b")
_MAKE_TEACHER = """
import sys
from pathlib import Path
import train_runs
folder = Path(sys.argv[1])
print(train_runs.make_teacher(folder, train_runs.write_corpus(folder / "corpus.jsonl")))
"""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a mutant's tests said: the one that failed, "" where none did in earnest; why; how long it took."""

    name: str
    caught_by: str
    reason: str
    seconds: float


class Copy:
    """The sources and tests in a temporary folder, and a teacher that sound code has trained there, if asked for."""

    def __init__(self, folder: Path, *, teacher: bool) -> None:
        """Makes it. Raises CalledProcessError where no teacher can be trained."""
        self.folder = folder / "sound"
        self._mutants = folder / "mutants"
        for name in _COPIED:
            source, target = ROOT / name, self.folder / name
            if source.is_dir():
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", ".hypothesis"))
            else:
                shutil.copy2(source, target)
        for path in ROOT.iterdir():  # fixtures, pages that tests read
            if not path.name.startswith(".") and path.name not in _COPIED:
                (self.folder / path.name).symlink_to(path)
        self._teacher = self._made_teacher(folder / "teacher") if teacher else ""

    def _made_teacher(self, folder: Path) -> str:
        folder.mkdir()
        arguments = ["-c", _MAKE_TEACHER, str(folder)]
        environment = self._environment("tests/support")
        made = subprocess.run(
            [sys.executable, *arguments], cwd=self.folder, env=environment, capture_output=True, text=True, check=True
        )  # fmt: skip
        return made.stdout.split()[-1]

    def _environment(self, *paths: str | Path) -> dict[str, str]:
        # Compiled files are told apart by their size and second: two mutants could share one.
        return os.environ | {
            "PYTHONPATH": os.pathsep.join(str(self.folder / path) for path in (*paths, "src")),
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "1000",
            "APR_FULL": "1",
        }

    def test(self, tests: Iterable[str], mutant: Path | None = None) -> tuple[int, str]:
        """Runs tests with a mutant's package before the sound ones: exit code, output."""
        where = self._mutants / "temporary" / (mutant.name if mutant else "sound")
        where.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pytest", "-q", "-x", "--tb=no", "-rfE", "-p", "no:cacheprovider"]
        found = subprocess.run(  # noqa: PLW1510
            [*command, f"--basetemp={where}", *map(self._path, tests)],
            cwd=self.folder,
            env=self._environment(*([mutant] if mutant else [])) | {"APR_TEST_TEACHER": self._teacher},
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
        )
        return found.returncode, found.stdout + found.stderr

    def _path(self, test: str) -> str:
        """`test_x.py::y` with the folder of the file, whose name is unique below tests."""
        name, _, rest = test.partition("::")
        (path,) = (self.folder / "tests").rglob(name)
        return f"{path.relative_to(self.folder)}::{rest}"

    def mutated(self, number: int, mutation: Mutation) -> Path:
        """A folder with the package of a mutant."""
        folder = self._mutants / str(number)
        shutil.copytree(self.folder / "src" / mutation.package, folder / mutation.package)
        (folder / mutation.file).write_text(faulty(mutation, self.folder / "src"))
        return folder


def faulty(mutation: Mutation, sources: Path) -> str:
    """The text of the file with the fault in it. Raises ValueError if its place is gone or the result is no Python."""
    text = (sources / mutation.file).read_text()
    start, end = _span(text, mutation) if mutation.function else (0, len(text))
    if (count := text.count(mutation.old, start, end)) != 1:
        raise ValueError(f"{mutation.place} contains {mutation.old!r} {count} times")
    mutant = text[:start] + text[start:end].replace(mutation.old, mutation.new) + text[end:]
    try:
        compile(mutant, mutation.file, "exec")
    except SyntaxError as error:
        raise ValueError(f"{mutation.file} does not compile with the fault: {error}") from error
    return mutant


def _span(text: str, mutation: Mutation) -> tuple[int, int]:
    """Where the function of `mutation` begins and ends in `text`."""
    found: list[_Definition | ast.Module] = [_tree(text)]
    for name in mutation.function.split("."):
        found = [node for parent in found for node in _definitions(parent) if node.name == name]
    if len(found) != 1 or isinstance(node := found[0], ast.Module):
        raise ValueError(f"{mutation.file} has {len(found)} functions {mutation.function}")
    lines = text.splitlines(keepends=True)
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)]) - 1
    return len("".join(lines[:first])), len("".join(lines[: node.end_lineno]))


@cache
def _tree(text: str) -> ast.Module:
    return ast.parse(text)


_Definition = ast.FunctionDef | ast.ClassDef


def _definitions(parent: ast.AST) -> Iterator[_Definition]:
    """The functions and classes directly in `parent`, those under an `if` or `with` too."""
    for node in ast.iter_child_nodes(parent):
        if isinstance(node, _Definition):
            yield node
        else:
            yield from _definitions(node)


def judged(code: int, output: str) -> tuple[str, str]:
    """(the test that noticed the fault, its words), or ("", why that is not proof)."""
    if code == 0:
        return "", "all tests pass"
    failed = re.search(r"^FAILED tests/(?:[^:\s]*/)?(.+?)(?: - (.*))?$", output, re.MULTILINE)
    if failed is None:
        error = re.search(r"^ERROR .*$", output, re.MULTILINE)
        return "", error[0] if error else f"pytest ended with {code}: {output.strip()[-200:]}"
    test, words = failed[1], failed[2] or ""
    if _SLIPS.match(words):
        return "", f"{test} fails for another reason: {words}"
    return test, words


def tried(copy: Copy, number: int, mutation: Mutation) -> Outcome:
    """Puts the fault in and runs its tests."""
    begin = time.monotonic()
    try:
        code, output = copy.test(mutation.tests.split(), copy.mutated(number, mutation))
        test, reason = judged(code, output)
    except subprocess.TimeoutExpired:
        test, reason = "", f"no end after {_TIMEOUT_S} s"
    except ValueError as error:
        test, reason = "", str(error)
    return Outcome(mutation.name, test, reason, time.monotonic() - begin)


def chosen(names: list[str], package: str | None) -> list[Mutation]:
    """The mutations of these names, for none all of a package that can be tried here.

    Raises SystemExit for an unknown one.
    """
    known = {mutation.name: mutation for mutation in MUTATIONS}
    if unknown := [name for name in names if name not in known]:
        raise SystemExit(f"no such mutation: {', '.join(unknown)}")
    some = [m for m in MUTATIONS if package in (None, m.package)]
    return [known[name] for name in names] or [m for m in some if not m.cuda or _has_cuda()]


@cache
def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def outcomes(mutations: list[Mutation], jobs: int) -> Iterator[Outcome]:
    """The sound copy's outcome, then those of the mutants as they end, in the order of the table."""
    with tempfile.TemporaryDirectory(prefix="apr-mutants-") as name:
        copy = Copy(Path(name), teacher=any(m.package == "aprtrain" for m in mutations))
        begin = time.monotonic()
        tests = dict.fromkeys(test for mutation in mutations for test in mutation.tests.split())
        code, output = copy.test(tests)
        if code:
            raise SystemExit(f"the tests are not green without a fault:\n{output[-3000:]}")
        yield Outcome("(no fault)", f"{len(tests)} tests are green", "", time.monotonic() - begin)
        with ThreadPoolExecutor(jobs) as pool:
            yield from pool.map(lambda pair: tried(copy, *pair), enumerate(mutations))


def main(arguments: list[str] | None = None) -> int:
    """The table; 1 where something survives."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="mutations to try (default: all)")
    parser.add_argument("--package", choices=sorted({m.package for m in MUTATIONS}), help="only faults of this one")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="mutants at a time")
    given = parser.parse_args(arguments)
    mutations = chosen(given.names, given.package)
    width = max(len(mutation.name) for mutation in mutations)
    survivors = 0
    for outcome in outcomes(mutations, given.jobs):
        survivors += not outcome.caught_by
        verdict = outcome.caught_by.partition("[")[0] or f"SURVIVES: {outcome.reason}"
        print(f"{outcome.name:<{width}}  {outcome.seconds:5.1f} s  {verdict}", flush=True)
    print(f"{len(mutations)} of {len(MUTATIONS)} mutations, {survivors} survive; those of CUDA kernels need a GPU")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
