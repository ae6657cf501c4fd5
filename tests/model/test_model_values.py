"""Opened models and their tensors as values: reprs, tables for notebooks, numpy's protocol, mistyped names."""

from __future__ import annotations

from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import plain_models
import pytest

import aprfmt
from aprfmt.canonical.read import canonical
from aprfmt.errors import AprError, UnknownTensorError, UsageError

EVIL = '<script>"&\n\x1b[31m\udcff'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return plain_models.write_folder(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def model(folder: Path) -> Iterator[aprfmt.Model]:
    with aprfmt.open(folder) as model:
        yield model


@pytest.fixture
def evil(tmp_path: Path) -> Iterator[aprfmt.Model]:
    path = tmp_path / '<b> & "q".apr'
    aprfmt.save_file([(EVIL, np.zeros((2, 3), np.float32))] * 2, path)
    with aprfmt.open(path) as model:
        yield model


def test_reprs_are_short(model: aprfmt.Model, folder: Path, tmp_path: Path) -> None:
    name = str(folder)
    assert repr(model) == f"Model({name!r}, HF folder, 21 tensors, 403.3 KiB)"
    tensor = model.tensors["model.norm.weight"]
    assert repr(tensor) == "Tensor('model.norm.weight', F32, [64], 256 bytes)"
    assert repr(model.tensors).endswith(" and 18 more)")
    assert model.tokenizer is not None
    report = aprfmt.import_model(folder, tmp_path / "m.apr", plan=True)
    for value in (model.tensors, model.tokenizer, canonical(model), report):
        assert len(repr(value)) < 600
        assert repr(value).startswith(type(value).__name__ + "(")
    assert "320 tokens" in repr(model.tokenizer)
    assert "lossless True" in repr(report)


class _Tags(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.cells: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.add(tag)
        self.cells.append("")

    def handle_data(self, data: str) -> None:
        self.cells[-1] += data


def test_notebooks_get_small_escaped_tables(evil: aprfmt.Model, folder: Path, tmp_path: Path) -> None:
    report = aprfmt.import_model(folder, tmp_path / "m.apr", plan=True)
    for value in (evil, evil.tensors, evil.tensors[EVIL], report):
        html = value._repr_html_()
        allowed = {"table", "tr", "th", "td", "details", "summary", "div", "style", "figure", "figcaption", "b", "span"}
        assert _Tags(html).tags <= allowed | {"svg", "text", "path"}
        html.encode()
    assert _Tags(evil._repr_html_()).cells.count("F32 2") == 1
    assert "2×3" in _Tags(evil.tensors._repr_html_()).cells


def test_a_long_list_of_tensors_is_cut(tmp_path: Path) -> None:
    aprfmt.save_file({f"w{i}": np.zeros(1, np.float32) for i in range(50)}, tmp_path / "w.apr")
    with aprfmt.open(tmp_path / "w.apr") as model:
        cells = _Tags(model.tensors._repr_html_()).cells
    assert "w0" in cells
    assert "and 30 more" in cells
    assert "w49" not in cells


def test_tensors_are_arrays_to_numpy(tmp_path: Path) -> None:
    values = np.arange(64, dtype=np.float32).reshape(2, 32)
    raw = aprfmt.encode("Q8_0", values)
    stored: dict[str, Any] = {
        "f32": values,
        "q8": aprfmt.RawTensor("Q8_0", values.shape, raw),
        "one": np.array(3, np.int64),
    }
    aprfmt.save_file(stored, tmp_path / "w.apr")
    with aprfmt.open(tmp_path / "w.apr") as model:
        plain, q8, one = (model.tensors[name] for name in ("f32", "q8", "one"))
        assert (plain.ndim, plain.size, plain.nbytes, plain.n_bytes) == (2, 64, 256, 256)
        assert (q8.ndim, q8.size, q8.nbytes) == (2, 64, 68)
        assert (one.ndim, one.size, int(np.asarray(one))) == (0, 1, 3)
        np.testing.assert_array_equal(np.asarray(plain), values)
        np.testing.assert_array_equal(np.asarray(plain) + 1, values + 1)
        np.testing.assert_array_equal(np.asarray(q8), q8.numpy())
        assert np.asarray(plain, dtype=np.float16).dtype == np.float16
        view = plain.__array__(copy=False)
        assert np.shares_memory(view, np.frombuffer(plain.raw(), np.uint8))
        assert not view.flags.writeable
        copy = plain.__array__(copy=True)
        assert copy.flags.writeable
        assert not np.shares_memory(copy, view)
        for tensor, dtype in ((q8, None), (plain, np.dtype(np.float64))):
            with pytest.raises(UsageError, match="without a copy"):
                tensor.__array__(dtype, copy=False)


def test_a_mistyped_name_names_the_nearest(model: aprfmt.Model, folder: Path) -> None:
    with pytest.raises(KeyError) as caught:
        model.tensors["model.norm.wieght"]
    error = caught.value
    assert isinstance(error, AprError)
    assert isinstance(error, UnknownTensorError)
    assert str(error) == f"{folder}: no tensor 'model.norm.wieght'; did you mean 'model.norm.weight'?"
    with pytest.raises(KeyError, match=r"no tensor 'x'$") as caught:
        model.tensors["x"]
    assert caught.value.hint == f"apr tensors {folder} lists their names"
    with pytest.raises(KeyError, match=r"did you mean 'model.norm.weight'"):
        model.tensors["norm"]
    with pytest.raises(KeyError, match=r"did you mean 'model.layers.0.self_attn.q_proj.weight'"):
        model.tensors["q_proj"]
    assert "x" not in model.tensors
    assert "model.norm.weight" in model.tensors
    assert model.tensors.get("x") is None
    assert model.tensors.get("x", 5) == 5
    assert model.tensors.get("model.norm.weight") is model.tensors["model.norm.weight"]


def test_tensors_are_a_mapping_in_file_order(model: aprfmt.Model, evil: aprfmt.Model) -> None:
    assert len(model.tensors) == len(list(model.tensors)) == 21
    assert [t.name for t in model.tensors.values()] == list(model.tensors)
    assert list(dict(model.tensors.items())) == list(model.tensors.keys())
    assert (len(evil.tensors), len(evil.tensors.entries)) == (1, 2)
    assert evil.tensors[EVIL] is evil.tensors.entries[0]
