"""A single bit turned over anywhere in an `.apr` is noticed by every command that writes, and by validate.

APR_FLIPS=10000 turns over so many bits instead of a few for each kind of file, with every command for each.
"""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import bit_flips
import pytest
from bit_flips import Subject

FLIPS = int(os.environ.get("APR_FLIPS", "0"))
KINDS = ("folder", "gguf", "shard 00000", "shard 00001", "v1", "v1 lz4")


@pytest.fixture(scope="module")
def subjects(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Subject]:
    found = bit_flips.subjects(tmp_path_factory.mktemp("flips"))
    assert tuple(found) == KINDS
    return found


@pytest.mark.timeout(0 if FLIPS else 600)
@pytest.mark.parametrize("kind", KINDS)
def test_one_bit(kind: str, subjects: dict[str, Subject], tmp_path: Path) -> None:
    subject, dice = subjects[kind], random.Random(kind)
    names = list(subject.commands)
    missed = []
    for n, (region, bit) in enumerate(bit_flips.bits(subject, dice, FLIPS // len(KINDS) if FLIPS else 48)):
        chosen = names if FLIPS else [names[n % len(names)]]
        missed += [(region, bit, name) for name in bit_flips.passed(subject, bit, chosen, tmp_path / "out")]
    assert not missed


@pytest.mark.parametrize("kind", KINDS)
def test_the_file_as_it_is_passes(kind: str, subjects: dict[str, Subject], tmp_path: Path) -> None:
    for command in subjects[kind].commands.values():
        (tmp_path / "out").mkdir()
        command(subjects[kind].path, tmp_path / "out")
        shutil.rmtree(tmp_path / "out")
