"""What the operating system refuses is an AprError that names the file; nothing half-written stays, old outputs do.

Each operation runs once for every place in the package from which it asks the operating system for something, and
that call fails. `APR_FAULTS=all` fails every single call instead (some 2,000).
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import plain_models
import pytest

import aprfmt
from aprfmt.cli.main import run
from aprfmt.errors import AprError
from faults import Faults

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks up descriptors under /proc")

_PART = 200_000  # bytes of a shard: three of them


@dataclass(frozen=True)
class Place:
    """Folders of a run: `inputs` stay, `out` holds outputs of an earlier run."""

    inputs: Path
    out: Path


Operation = Callable[[Place], object]


def read(name: str) -> Operation:
    """Everything that can be asked of an opened model."""

    def operation(at: Place) -> object:
        with aprfmt.open(at.inputs / name) as model:
            tensors = list(model.tensors.values())[:3]
            return (
                dict(model.metadata).keys(),
                model.tokenizer and len(model.tokenizer.tokens),
                model.hparams.num_layers if model.format != "apr-v1" else None,
                model.checksum(),
                [hashlib.sha256(tensor.raw()).digest() for tensor in tensors],
                [tensor.numpy().sum() for tensor in tensors],
            )

    return operation


def convert(
    source: str, target: str, format: str | None = None, shard_size: int | None = None, dtype: str = "keep"
) -> Operation:
    def operation(at: Place) -> object:
        report = aprfmt.convert_model(
            at.inputs / source, at.out / target, format=format, shard_size=shard_size, dtype=dtype, force=True
        )
        return report.lossless, report.losses

    return operation


def save(name: str, *, force: bool) -> Operation:
    def operation(at: Place) -> None:
        aprfmt.save_file({"a": np.arange(4000, dtype=np.float32)}, at.out / name, force=force)

    return operation


def command(*words: str) -> Operation:
    """A command line; words with a suffix or in capitals stand for inputs and outputs."""

    def operation(at: Place) -> int:
        places = {"IN": at.inputs, "OUT": at.out}
        return run([str(places[w.split("/")[0]] / w.split("/")[1]) if "/" in w else w for w in words])

    return operation


OPERATIONS: dict[str, Operation] = {
    **{
        f"read {name}": read(name)
        for name in (
            "m.apr", "m.gguf", "part-00001-of-00003.gguf", "m.safetensors", "m.v1.apr", "hf", "hf-parts", "apr-parts",
        )
    },
    "load": lambda at: sorted(aprfmt.load_file(at.inputs / "m.apr")),
    "save over": save("m.apr", force=True),
    "save new": save("new.apr", force=False),
    "import folder": convert("hf", "m.apr"),
    "import gguf": convert("m.gguf", "new.apr"),
    "export gguf": convert("m.apr", "m.gguf"),
    "export parts": convert("m.apr", "part.gguf", shard_size=_PART),
    "export folder over": convert("m.apr", "hf"),
    "export folder new": convert("m.apr", "hf-new"),
    "export mlx": convert("hf", "mlx", format="mlx"),
    "export safetensors": convert("m.gguf", "m.safetensors"),
    "export shards over": convert("m.apr", "apr-parts", format="apr-shards", shard_size=_PART),
    "quantize": convert("hf", "q8.gguf", dtype="q8_0"),
    "stamp in place": command("stamp", "OUT/m.apr", "--in-place", "--license", "MIT", "--quiet"),
    "inspect folder": command("inspect", "IN/hf", "--json"),
    "inspect apr": command("inspect", "IN/m.apr", "--json", "--quality"),
    "tensors": command("tensors", "IN/m.gguf", "--json", "--hash", "--stats"),
    "validate folder": command("validate", "IN/hf-parts", "--json"),
    "validate apr": command("validate", "IN/m.apr", "--json"),
    "diff": command("diff", "IN/hf", "IN/hf-parts", "--json"),
    "report": command("report", "IN/m.apr", "-o", "OUT/page.html", "--force", "--quiet"),
}  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models in every form below `in`, outputs of an earlier run below `old`."""
    root = tmp_path_factory.mktemp("faults")
    source, old = root / "in", root / "old"
    source.mkdir()
    folder = plain_models.write_folder(source / "hf")
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# A model\n")
    for name in ("m.apr", "m.gguf", "m.safetensors"):
        aprfmt.convert_model(folder, source / name)
    aprfmt.convert_model(folder, source / "hf-parts", format="hf", shard_size=_PART)
    aprfmt.convert_model(folder, source / "part.gguf", shard_size=_PART)
    aprfmt.convert_model(source / "m.apr", source / "apr-parts", format="apr-shards", shard_size=_PART)
    aprfmt.write_v1(source / "m.v1.apr", b"x" * 5000, model_type=1, metadata={})
    shutil.copytree(source, old)
    (old / "hf" / "config.json").write_text("{}")
    (old / "hf" / "model-00009-of-00009.safetensors").write_bytes(b"an old shard")
    return root


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


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
        shutil.rmtree(at.out, ignore_errors=True)
        shutil.copytree(root / "old", at.out)
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
