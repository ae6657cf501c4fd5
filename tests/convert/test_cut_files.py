"""An `.apr` that is cut off, with a bit turned over: no command that writes takes it for a whole file."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import bit_flips
import numpy as np
import pytest
from flips import flip

import aprfmt
from aprfmt.errors import AprError, ChecksumError, CorruptError
from aprfmt.formats.apr_metadata import FOOTER, FOOTER_KEY, has_footer
from aprfmt.inspection.validate import validate
from aprfmt.publishing import survey

CUTS = range(1, 17)

COMMANDS: dict[str, Callable[[Path, Path], object]] = {
    **bit_flips.COMMANDS,
    "stamp in place": lambda path, out: aprfmt.stamp(path, in_place=True, license="MIT"),
    "prune": lambda path, out: aprfmt.prune_model(path, out / "m.apr", drop_layers="0"),
    "merge": lambda path, out: aprfmt.merge_models([path, path.with_name("whole.apr")], out / "m.apr", method="linear"),
    "merge, second": lambda path, out: aprfmt.merge_models(
        [path.with_name("whole.apr"), path], out / "m.apr", method="linear"
    ),
    "rewrite": lambda path, out: _rewrite(path, out / "m.apr"),
    "push": lambda path, out: survey.survey(str(path), {"m.apr": path}),
}


def _rewrite(path: Path, out: Path) -> None:
    with aprfmt.open(path) as model:
        aprfmt.rewrite_file(model, out)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bit_flips.Subject:
    """A file of ours whose metadata have no other key of ours than that of the footer."""
    root = tmp_path_factory.mktemp("cut")
    subject = bit_flips.subjects(root)["folder"]
    with aprfmt.open(subject.path) as model:
        metadata = {key: value for key, value in model.metadata.items() if not key.startswith("aprfmt.")}
        tensors = {name: tensor.numpy() for name, tensor in model.tensors.items()}
    aprfmt.save_file(tensors, root / "whole.apr", {**metadata, FOOTER_KEY: FOOTER}, flags=0x0200)
    return bit_flips.Subject(
        root / "whole.apr", root / "whole.apr", bit_flips._v2_regions(root / "whole.apr"), COMMANDS
    )


def test_the_whole_file_passes(whole: bit_flips.Subject, tmp_path: Path) -> None:
    for name, command in COMMANDS.items():
        out = tmp_path / name
        out.mkdir()
        shutil.copy(whole.path, tmp_path / "m.apr")
        shutil.copy(whole.path, tmp_path / "whole.apr")
        command(tmp_path / "m.apr", out)


@pytest.mark.parametrize("cut", CUTS)
def test_no_command_writes_from_a_file_that_is_cut_off(cut: int, whole: bit_flips.Subject, tmp_path: Path) -> None:
    dice = random.Random(cut)
    data = whole.path.read_bytes()[:-cut]
    path, out = tmp_path / "m.apr", tmp_path / "out"
    shutil.copy(whole.path, tmp_path / "whole.apr")
    passed = []
    for name, command in COMMANDS.items():
        bit = 8 * dice.choice(dice.choice(whole.regions["tensors"])) + dice.randrange(8)
        path.write_bytes(data)
        flip(path, bit)
        before = path.read_bytes()
        out.mkdir()
        with pytest.raises(CorruptError, match="truncated" if cut <= 4 else "the file has"):
            command(path, out)
        passed += [name] if list(out.iterdir()) or path.read_bytes() != before else []
        out.rmdir()
    assert not passed
    if cut <= 4:  # of more, the last tensor lacks its end, and the file does not open
        report = validate(path)
        assert not report.passed
        assert any("the file is truncated" in check.message for check in report.checks)


def test_a_bit_of_the_key_does_not_hide_the_cut(tmp_path: Path) -> None:
    path = tmp_path / "m.apr"
    aprfmt.save_file({"a": np.ones(16, np.float32)}, path, {FOOTER_KEY: FOOTER})
    data = path.read_bytes()
    start = data.index(FOOTER_KEY.encode())
    end = data.index(FOOTER.encode()) + len(FOOTER)
    path.write_bytes(data[:-4])
    for bit in range(8 * start, 8 * end):
        flip(path, bit)
        try:
            with aprfmt.open(path) as model:
                assert model.checksum()["footer"] == "bad"
        except AprError:
            pass
        flip(path, bit)


@pytest.mark.parametrize("cut", CUTS)
def test_a_file_of_another_program_may_end_with_its_data_alone(cut: int, tmp_path: Path) -> None:
    path = tmp_path / "m.apr"
    aprfmt.save_file({"a": np.ones(3, np.float32)}, path, {"name": "theirs"})
    path.write_bytes(path.read_bytes()[:-cut])
    if cut == 4:
        assert aprfmt.stamp(path, tmp_path / "out.apr", license="MIT").warnings
        return
    with pytest.raises(ChecksumError, match="truncated"):
        aprfmt.stamp(path, tmp_path / "out.apr", license="MIT")
    assert not (tmp_path / "out.apr").exists()


@pytest.mark.parametrize("make", [
    lambda path, out: aprfmt.convert_model(path, out, dtype="f16"),
    lambda path, out: aprfmt.quantize_model(path, out, "q8_0"),
    lambda path, out: aprfmt.prune_model(path, out, drop_layers="0"),
    lambda path, out: aprfmt.merge_models([path, path], out, method="linear"),
    lambda path, out: aprfmt.stamp(path, out, license="MIT"),
])  # fmt: skip
def test_what_is_written_names_its_footer(
    make: Callable[[Path, Path], object], whole: bit_flips.Subject, tmp_path: Path
) -> None:
    make(whole.path, tmp_path / "m.apr")
    with aprfmt.open(tmp_path / "m.apr") as model:
        assert model.metadata[FOOTER_KEY] == FOOTER
        assert has_footer(model.metadata)


def test_every_shard_names_its_footer(whole: bit_flips.Subject, tmp_path: Path) -> None:
    aprfmt.convert_model(whole.path, tmp_path / "s", format="apr-shards", shard_size=60_000)
    shards = sorted((tmp_path / "s").glob("*.apr"))
    assert len(shards) > 2
    for number, shard in enumerate(shards):
        alone = tmp_path / f"{number}.apr"
        alone.write_bytes(shard.read_bytes()[:-4])
        with aprfmt.open(alone) as model:
            assert model.checksum()["footer"] == "bad"
