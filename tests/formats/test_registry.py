"""The registry of readers and targets: built-in rows, and what packages register as entry points."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import aprfmt
from aprfmt import formats
from aprfmt.convert.targets.base import TARGETS, Target, find_target, targets
from aprfmt.errors import MissingDependencyError, RefusedError, UnknownFormatError, UsageError
from aprfmt.formats import READERS, Reader

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
    for name in ("npz_plugin", "broken_plugin"):
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
    with pytest.raises(MissingDependencyError, match="plugin 'odd' of broken_plugin cannot be loaded: not today"):
        aprfmt.detect(tmp_path / "odd")


def test_what_no_reader_knows_is_said_so(site: Path, tmp_path: Path) -> None:
    install(site, "npz_plugin", PLUGIN, "npz = npz_plugin:npz")
    (tmp_path / "odd").write_bytes(b"what is this")
    with pytest.raises(UnknownFormatError, match="not a file of any known format"):
        aprfmt.detect(tmp_path / "odd")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UnknownFormatError, match="belongs to a model") as wrong:
        aprfmt.detect(tmp_path / "config.json")
    assert wrong.value.hint == f"a model is its whole folder: {tmp_path}"
    with pytest.raises(UsageError, match="unknown format") as caught:
        aprfmt.convert_model(tmp_path / "odd", tmp_path / "x", format="zip")
    assert "npz" in (caught.value.hint or "")
