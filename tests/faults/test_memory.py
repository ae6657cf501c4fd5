"""Where memory runs out a command ends with exit 7, and the old output is untouched. APR_OOM=all tries more."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import oom
import pytest

import aprfmt
from aprfmt.errors import AprError, OutOfMemoryError, out_of_memory

COUNT = 1500 if os.environ.get("APR_OOM") == "all" else 7
DEMO = str(oom.DEMO)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    pytest.importorskip("_testcapi")
    words = [sys.executable, oom.__file__, str(tmp_path_factory.mktemp("oom")), str(COUNT)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("name", oom.COMMANDS)
def test_one_allocation_fails(name: str, outcomes: list[dict[str, Any]]) -> None:
    found = [one for one in outcomes if one["name"] == name]
    assert len(found) == COUNT
    writes = name not in ("inspect", "validate")
    for one in found:
        assert one["code"] in (0, 7), one
        assert one["out"] in (["old", "new"] if one["code"] else ["new"] if writes else ["old"]), one
        assert "raised" not in one["said"], one
    assert {one["code"] for one in found} >= {7}


@pytest.mark.skipif(sys.platform != "linux", reason="limits the address space as Linux does")
@pytest.mark.parametrize("words", [["validate", DEMO], ["inspect", DEMO, "--json"], ["tree", DEMO]], ids=lambda w: w[0])
def test_under_a_limit_of_the_address_space(words: list[str]) -> None:
    import resource

    limit = 96 << 20
    done = subprocess.run(
        [sys.executable, "-m", "aprfmt", *words],
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
    )
    if words[0] == "inspect":
        assert done.returncode == 0
        return
    assert done.returncode == 7
    assert done.stderr.startswith("error: not enough memory: this process is limited to 96 MiB, 128 are needed\n")
    assert "hint: raise its limit: ulimit -v unlimited" in done.stderr


def raising(error: BaseException, cause: BaseException | None = None) -> Callable[..., None]:
    def function(*_: object, **__: object) -> None:
        raise error from cause

    return function


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (MemoryError(), None),
        (ValueError("of a library"), MemoryError()),
        (OSError(12, "Cannot allocate memory"), None),
        (ImportError("numpy"), ImportError("x.so: failed to map segment from shared object")),
        (RuntimeError("can't start new thread"), None),
        (RuntimeError("can't allocate lock"), None),
        (SystemError("error return without exception set"), None),
        (SystemError("<built-in function f> returned NULL without setting an exception"), None),
        (TypeError("stat: path should be string, bytes, os.PathLike or integer, not PosixPath"), None),
        (TypeError("expected str, bytes or os.PathLike object, not PosixPath"), None),
    ],
)
def test_a_lack_of_memory_is_an_error_of_ours(
    error: Exception, cause: Exception | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aprfmt.inspection.describe.inspect", raising(error, cause))
    monkeypatch.delitem(vars(aprfmt), "inspect", raising=False)
    with pytest.raises(AprError) as caught:
        aprfmt.inspect(tmp_path)
    assert isinstance(caught.value, OutOfMemoryError)
    assert caught.value.exit_code == 7
    vars(aprfmt).pop("inspect", None)


def test_other_errors_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    assert out_of_memory(ValueError("x")) is None
    assert out_of_memory(ImportError("no module named x")) is None
    assert out_of_memory(RuntimeError("x")) is None
    assert out_of_memory(TypeError("stat: path should be string, bytes, os.PathLike or integer, not list")) is None
    assert out_of_memory(SystemError("bad argument to internal function")) is None
    looped = KeyboardInterrupt()
    looped.__cause__ = looped
    assert out_of_memory(looped) is None


def test_memory_that_runs_out_at_the_end_is_told() -> None:
    code = """if True:
        import gc
        from aprfmt.cli import main
        def fail(): raise MemoryError
        gc.freeze = fail
        main.main(["--version"])
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (7, "error: not enough memory\n")
