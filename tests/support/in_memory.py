"""A folder of tests whose temporary files are kept in memory, wherever TMPDIR is.

A conftest.py imports `tmp_path_factory` for the tests of its folder: those that convert and train models, which write
most of the suite's bytes and do not test file systems. tools/test.sh names the place if TMPDIR is on a disk.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session", name="tmp_path_factory")
def tmp_path_factory(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> pytest.TempPathFactory:
    place = os.environ.get("APR_TEST_MEMORY")
    if place is None:
        return tmp_path_factory
    worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
    # The same in each folder of tests: a base that exists would be emptied.
    factory = getattr(request.config, "_in_memory", None)
    if factory is None:
        factory = pytest.TempPathFactory(Path(place) / worker, 3, "failed", request.config.trace, _ispytest=True)
        request.config._in_memory = factory  # type: ignore[attr-defined]
    assert isinstance(factory, pytest.TempPathFactory)
    return factory
