"""Files that are cut short while something reads them, in a process of its own, because a signal would end the tests.

The child gets a case as a line of JSON and answers with one.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import aprfmt
from aprfmt.cli.main import run
from aprfmt.errors import AprError


@dataclass(frozen=True, slots=True)
class Cut:
    """A case: what runs on which model, and behind which of its reads the file that was read is cut to how much.

    Attributes:
        name: of the model in the folder.
        words: a command line; IN, TWIN and OUT/name stand for paths. Empty: everything that the library offers.
        after: number of the read; 0 for none at all.
        share: of its size that the file keeps.
    """

    name: str
    words: tuple[str, ...]
    after: int = 0
    share: float = 0.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a case.

    Attributes:
        exit: the exit code; that of the error for the library.
        code: of the error, "" without one.
        path: that the error names.
        reads: of the model's files.
        file: that was cut, "" where none was.
        again: reads of that file after the cut.
        left: names of outputs.
    """

    exit: int
    code: str
    path: str
    reads: int
    file: str
    again: int
    left: list[str]


class Child:
    """The process in which the cases run; AssertionError with the case in which it dies."""

    def __init__(self, folder: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "cut_files", str(folder)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )  # fmt: skip

    def run(self, cut: Cut) -> Outcome:
        """Runs one case."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(asdict(cut)) + "\n")
        answer = self._process.stdout.readline()
        assert answer, f"ended by {self._process.wait()} in {cut}"
        return Outcome(**json.loads(answer))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._process:
            self._process.kill()


# --- in the child ---


def main() -> None:
    """Answers every line."""
    folder = Path(sys.argv[1])
    for line in sys.stdin:
        values: dict[str, Any] = json.loads(line)
        outcome = _outcome(folder, Cut(**{**values, "words": tuple(values["words"])}))
        print(json.dumps(asdict(outcome)), flush=True)


def _outcome(folder: Path, cut: Cut) -> Outcome:
    work, out = folder / "work", folder / "out"
    for path in (work, out):
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
    source, given = folder / cut.name, work / cut.name
    shutil.copytree(source, given) if source.is_dir() else shutil.copyfile(source, given)
    places = {"IN": given, "TWIN": source}
    words = [str(places.get(w, w)).replace("OUT/", f"{out}/") for w in cut.words]
    cutter = _Cutter(work, cut)
    with cutter.watching():
        exit_code, code, named = _command(words) if words else _library(given)
    return Outcome(
        exit_code, code, named, cutter.reads, cutter.file, cutter.again, sorted(p.name for p in out.iterdir())
    )


def _command(words: list[str]) -> tuple[int, str, str]:
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(io.StringIO()):
        exit_code = run([*words, "--json"])
    error = json.loads(text.getvalue()).get("error") or {}
    return exit_code, error.get("code", ""), error.get("path") or ""


def _library(path: Path) -> tuple[int, str, str]:
    """Everything that a program may ask of an opened model; `raw` is asked for and not looked at."""
    try:
        with aprfmt.open(path) as model:
            _ = model.tokenizer, dict(model.metadata), model.checksum()
            _ = model.hparams if model.format != "apr-v1" else None
            for tensor in model.tensors.values():
                _ = tensor.numpy().sum(), tensor.torch().sum(), len(tensor.raw())
    except AprError as error:
        return error.exit_code, error.code, error.path or ""
    return 0, "", ""


class _Cutter:
    """Counts the reads of files below a folder, and cuts the file of one of them short behind it."""

    def __init__(self, folder: Path, cut: Cut) -> None:
        self.reads = self.again = 0
        self.file = ""
        self._folder, self._cut = os.path.realpath(folder), cut

    @contextmanager
    def watching(self) -> Iterator[None]:
        calls = {name: getattr(os, name) for name in ("pread", "preadv")}
        for name, call in calls.items():
            setattr(os, name, self._watched(call))
        try:
            yield
        finally:
            for name, call in calls.items():
                setattr(os, name, call)

    def _watched(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(fd: int, *rest: Any) -> Any:
            result = call(fd, *rest)
            path = os.readlink(f"/proc/self/fd/{fd}")
            if path.startswith(self._folder):
                self.reads += 1
                self.again += path == self.file
                if self.reads == self._cut.after:
                    self.file = path
                    os.truncate(path, int(os.path.getsize(path) * self._cut.share))
            return result

        return watched


if __name__ == "__main__":
    main()
