"""What the operating system refuses is an AprError that names the file; nothing half-written stays, old outputs do.

Each operation runs, by turns, for every place in the package from which it asks the operating system for something,
once where the first call from there fails and once where the last does. `APR_FAULTS=all` fails every single call
instead (some 3,000).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import writers
from writers import OPERATIONS, Place, contents, restore

from aprfmt.errors import AprError
from faults import Faults

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks up descriptors under /proc")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("faults")
    writers.prepare(root)
    return root


@pytest.mark.parametrize("stays", [False, True], ids=["once", "stays"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_fault_is_an_apr_error_and_leaves_no_half_file(
    name: str, stays: bool, root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(error: BaseException) -> int:
        raise error

    monkeypatch.setattr("aprfmt.cli.failures.report", fail)
    operation, at = OPERATIONS[name], Place(root / "in", root / "out")
    before = contents(root / "old")

    def attempt(number: int) -> tuple[object, AprError | None]:
        restore(before, root / "old", at.out)
        with faults.armed(number, stays=stays):
            try:
                return operation(at), None
            except AprError as error:
                return None, error

    faults = Faults(root)
    attempt(0)  # whatever is imported on first use
    wanted = attempt(0)
    complete = contents(at.out)
    for number in faults.points(every=os.environ.get("APR_FAULTS") == "all", disk=stays):
        result, error = attempt(number)
        where = f"call {number}, {faults.failed}: {error}"
        if error is None:
            assert (result, None) == wanted, where
            assert contents(at.out) == complete, where
        else:
            assert error.path, where
            assert ".tmp" not in error.path, where
            assert error.code in ("storage", "exists"), where
            assert contents(at.out) in (before, complete), where
