"""The registry of readers and targets: built-in rows, and what packages register as entry points."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import aprfmt
from aprfmt import formats
from aprfmt.cli import failures
from aprfmt.cli.main import run
from aprfmt.convert.targets.base import TARGETS, Target, find_target, targets
from aprfmt.errors import AprError, MissingDependencyError, RefusedError, Terminated, UnknownFormatError, UsageError
from aprfmt.formats import READERS, Reader, entry_points

PLUGIN = """
import io

import numpy as np

from aprfmt.convert.targets.base import Output
from aprfmt.io.pipe import FileLayout, Literal
from aprfmt.io.source import Source
from aprfmt.model import Model, Tensor

DTYPES = {"<f4": "F32", "<f2": "F16", "<i4": "I32"}


class Npz:
    name = container = "npz"
    label = "NumPy archive"
    suffixes = (".npz",)
    folder = False
    takes = frozenset({"dtype"})

    def detect(self, found):
        return found.head.startswith(b"PK") and found.path.suffix == ".npz"

    def open(self, path):
        tensors = []
        with np.load(path) as arrays:
            for name, array in arrays.items():
                source = Source.from_bytes(array.tobytes(), path)
                dtype = DTYPES[array.dtype.str]
                tensors.append(Tensor(name, dtype, array.shape, 0, array.nbytes, source))
        return Model(path=path, format="npz", label=self.label, sources=[], tensors=tensors)

    def layouts(self, c, work):
        outs, arrays = [], {}
        for tensor in c.tensors.values():
            work.losses.note(tensor.dtype, "F32")
            out = tensor.out(tensor.name, "F32", work.losses.overflow)
            outs.append(out)
            arrays[tensor.name] = np.frombuffer(out.data(), "<f4").reshape(out.shape)
        file = io.BytesIO()
        np.savez(file, **arrays)
        return Output([FileLayout(work.name, [Literal(file.getvalue())])], outs)


npz = Npz()
"""


def install(folder: Path, module: str, code: str, entry: str) -> None:
    """A distribution as pip leaves it: a module, its metadata, its entry points."""
    (folder / f"{module}.py").write_text(code)
    info = folder / f"{module}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[aprfmt.formats]\n{entry}\n")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on sys.path whose packages have entry points."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    formats.plugins.cache_clear()
    yield folder
    formats.plugins.cache_clear()
    for name in ("npz_plugin", "broken_plugin", "rude_plugin"):
        sys.modules.pop(name, None)


def test_the_rows_are_readers_and_targets() -> None:
    assert all(isinstance(reader, Reader) for reader in READERS)
    assert all(isinstance(target, Target) for target in TARGETS)
    for rows in (READERS, TARGETS):
        assert len({row.name for row in rows}) == len(rows)


def test_a_package_adds_a_reader_and_a_target(site: Path, tiny_gguf: Path, tmp_path: Path) -> None:
    install(site, "npz_plugin", PLUGIN, "npz = npz_plugin:npz")
    out = tmp_path / "m.npz"
    report = aprfmt.convert_model(tiny_gguf, out)
    assert (report.format, report.label, report.lossless) == ("npz", "NumPy archive", False)
    assert aprfmt.detect(out) == "npz"
    with aprfmt.open(out) as model, aprfmt.open(tiny_gguf) as source:
        assert model.tokenizer is None
        assert model.hparams.hidden_size is None
        norm = model.tensors["model.norm.weight"].numpy()
        np.testing.assert_array_equal(norm, source.tensors["output_norm.weight"].numpy())
    back = aprfmt.convert_model(out, tmp_path / "back.safetensors", allow_no_config=True, allow_unmapped=True)
    assert back.tensor_count == report.tensor_count
    assert not back.lossless
    with pytest.raises(UsageError, match="--pre does not apply to the format npz"):
        aprfmt.convert_model(tiny_gguf, tmp_path / "n.npz", pre="llama-bpe")
    with pytest.raises(RefusedError, match="npz has no dtype Q4_K"):
        aprfmt.convert_model(tiny_gguf, tmp_path / "n.npz", dtype="q4_k_m")
    assert find_target("x", "npz").label == "NumPy archive"
    assert "npz" in [target.name for target in targets()]


def test_no_plugin_is_loaded_for_what_we_know(site: Path, tiny_gguf: Path, tmp_path: Path) -> None:
    install(site, "broken_plugin", "raise RuntimeError('not today')", "odd = broken_plugin:odd")
    aprfmt.import_model(tiny_gguf, tmp_path / "m.apr")
    assert "broken_plugin" not in sys.modules
    (tmp_path / "odd").write_bytes(b"what is this")
    with pytest.raises(
        MissingDependencyError, match="plugin 'odd' of broken_plugin cannot be loaded: RuntimeError: not today"
    ):
        aprfmt.detect(tmp_path / "odd")


def test_what_no_reader_knows_is_said_so(site: Path, tmp_path: Path) -> None:
    install(site, "npz_plugin", PLUGIN, "npz = npz_plugin:npz")
    (tmp_path / "odd").write_bytes(b"what is this")
    with pytest.raises(UnknownFormatError, match="not a file of any known format"):
        aprfmt.detect(tmp_path / "odd")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UnknownFormatError, match="belongs to a model") as wrong:
        aprfmt.detect(tmp_path / "config.json")
    assert wrong.value.hint == f"pass the folder: {tmp_path}"
    with pytest.raises(UsageError, match="unknown format") as caught:
        aprfmt.convert_model(tmp_path / "odd", tmp_path / "x", format="zip")
    assert "npz" in (caught.value.hint or "")


RUDE = """
import os, sys, time
print("at import")
os.write(1, b"by a library")
class Rude:
    name = container = label = "rude"
    suffixes, folder, takes = (".rude",), False, frozenset()
    def detect(self, found):
        print("in detect")
        {detect}
    def open(self, path):
        print("in open")
        {open}
    def layouts(self, c, work):
        {layouts}
rude = Rude()
{after}
"""
FAULTS = {
    "exit at import": ({"after": "sys.exit(0)"}, "cannot be loaded: SystemExit: 0"),
    "another exception at import": (
        {"after": "class E(BaseException): pass\nraise E('x')"}, "cannot be loaded: E: x"),
    "exit in detect": ({"detect": "sys.exit(0)"}, "failed in detect: SystemExit: 0"),
    "exception in detect": ({"detect": "1 / 0"}, "failed in detect: ZeroDivisionError: division by zero"),
    "exit in open": ({"detect": "return True", "open": "raise SystemExit"}, "failed in open: SystemExit"),
    "no model": ({"detect": "return True", "open": "return 1"}, "failed in open: it returned a int, not a Model"),
    "neither": ({"after": "rude = 1"}, "is neither a reader (detect, open) nor a target (layouts)"),
    "odd suffixes": ({"after": "rude.suffixes = None"}, "needs a name (str) and suffixes"),
    "a truth that exits": (
        {"detect": "return Odd()", "after": "class Odd:\n    def __bool__(self): sys.exit(0)"},
        "failed in detect: SystemExit: 0"),
    "a folder that exits": (
        {"after": "class Odd:\n    def __bool__(self): sys.exit(0)\nRude.folder = Odd()"},
        "cannot be loaded: SystemExit: 0"),
    "a label that is no text": ({"after": "rude.label = 1"}, "needs a container and a label (str)"),
    **{
        f"an error with exit code {code}": (
            {"detect": "raise Odd('x')",
             "after": f"import aprfmt\nclass Odd(aprfmt.AprError): exit_code = {code}"},
            "failed in detect: Odd: x")
        for code in ("0", "256", "-1", "'0'", "1")
    },
    "a name that fails": ({"after": "Rude.name = property(lambda self: 1 / 0)"}, "cannot be loaded: ZeroDivisionError"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_plugin_is_an_error_that_names_its_package(
    fault: str, site: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    parts, message = FAULTS[fault]
    code = RUDE.format(**{"detect": "pass", "open": "pass", "layouts": "pass", "after": "", **parts})
    install(site, "rude_plugin", code, "r = rude_plugin:rude")
    (tmp_path / "odd").write_bytes(b"what is this")
    assert run(["convert", str(tmp_path / "odd"), "-o", str(tmp_path / "x.apr"), "--json"]) == 6
    captured = capfd.readouterr()
    error = json.loads(captured.out)["error"]
    assert error["message"].startswith(f"the plugin 'r' of rude_plugin {message}")
    assert "rude_plugin" in error["hint"]
    assert "at import" in captured.err
    assert "by a library" in captured.err
    assert not (tmp_path / "x.apr").exists()


@pytest.mark.parametrize("metadata", [b"Name: odd\nVersion: 1\n", b"Name: \xff\n", None])
@pytest.mark.parametrize("entries", [b"[aprfmt.formats]\nx = \xff\n", b"[aprfmt.formats]\nx = : : (\n"])
def test_entry_points_that_cannot_be_read_are_an_error(
    metadata: bytes | None, entries: bytes, site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    info = site / "odd-1.dist-info"
    info.mkdir()
    (info / "entry_points.txt").write_bytes(entries)
    if metadata is not None:
        (info / "METADATA").write_bytes(metadata)
    (tmp_path / "odd").write_bytes(b"what is this")
    assert run(["convert", str(tmp_path / "odd"), "-o", str(tmp_path / "x.apr"), "--json"]) == 6
    message = json.loads(capsys.readouterr().out)["error"]["message"]
    assert "odd" in message or str(site) in message or "cannot be loaded" in message
    assert not (tmp_path / "x.apr").exists()


@pytest.mark.parametrize("code", [0, 256, -1])
def test_no_error_ends_a_command_with_exit_0(code: int, capsys: pytest.CaptureFixture[str]) -> None:
    odd = type("Odd", (AprError,), {"exit_code": code})
    assert failures.report(odd("x")) == 70
    assert failures.report(Terminated(code - 128)) == 70


def test_a_target_that_exits_is_an_error(site: Path, tiny_gguf: Path, tmp_path: Path) -> None:
    code = RUDE.format(detect="pass", open="pass", layouts="sys.exit(0)", after="")
    install(site, "rude_plugin", code, "r = rude_plugin:rude")
    with pytest.raises(MissingDependencyError, match="failed in layouts: SystemExit: 0"):
        aprfmt.convert_model(tiny_gguf, tmp_path / "x.rude")
    assert not (tmp_path / "x.rude").exists()


@pytest.mark.parametrize("ending", [KeyboardInterrupt, Terminated(15)])
def test_an_interrupt_goes_through_a_plugin(ending: object, site: Path, tmp_path: Path) -> None:
    code = RUDE.format(detect="raise self.ending", open="pass", layouts="pass", after="")
    install(site, "rude_plugin", code, "r = rude_plugin:rude")
    (tmp_path / "odd").write_bytes(b"what is this")
    formats.plugins()
    sys.modules["rude_plugin"].Rude.ending = ending
    with pytest.raises((KeyboardInterrupt, Terminated)):
        aprfmt.detect(tmp_path / "odd")


def test_a_slow_plugin_is_named(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entry_points, "_SLOW_SECONDS", 0.01)
    install(site, "rude_plugin", RUDE.format(detect="time.sleep(0.02)", open="pass", layouts="pass", after=""),
            "r = rude_plugin:rude")  # fmt: skip
    (tmp_path / "odd").write_bytes(b"what is this")
    with pytest.warns(RuntimeWarning, match="the plugin 'r' of rude_plugin took"), pytest.raises(UnknownFormatError):
        aprfmt.detect(tmp_path / "odd")


def test_a_library_that_exits_is_an_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def leave(*_: object, **__: object) -> None:
        raise SystemExit(0)

    monkeypatch.setattr(aprfmt, "doctor", leave)
    assert run(["doctor", "--json"]) == 8
    assert "a library ended the command: exit(0)" in json.loads(capsys.readouterr().out)["error"]["message"]
